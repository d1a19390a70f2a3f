"""The static estimator: bundles, simulator, HLO, floors, and whole compiled programs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bench import (
    cases,
    cost_cases,
    cross_check,
    facts,
    hlo,
    known_values,
    llo,
    machine,
    peers,
    static,
)
from bench.dumps import estimate_cases
from bench.machine import DMA_COMMAND_CYCLES, GRANULE_BYTES, MACHINES
from bench.simulate import Simulator

# Four steps of a loop, each of which fetches 64 granules and awaits them; `s5` counts the steps,
# and a block that is skipped in the last of them holds 100 cycles of delay.
LOOP = """
     0   :  { %s9_s0 = inlined_call_operand.hbm [shape: f32[64,128], index: 0, kind: input, shape index: {}]  ;;  %s8_s1 = inlined_call_operand.hbm [shape: f32[64,128], index: 1, kind: output, shape index: {}] }
   0x1   :  { %s10_s5 = smov.u32 0 }
   0x2 LB: > { %s12_s6 = sshll.u32 %s11_s5, 6  ;;  %s11_s5 = sphi %s10_s5, %s30_s5 } /* Start region 3 */
   0x3   : > { %s13_s7 = scalar_lea.hbm %s9_s0, %s12_s6 }
   0x4   : > { %20 = dma.hbm_to_vmem [thread:$0]  /*hbm=*/%s13_s7, /*size_in_granules=*/64, /*vmem=*/[#allocation2], /*dst_syncflagno=*/[#allocation3] /*
window_bounds: (1) */ }
   0x5   : > { %21 = dma.done.wait [#allocation3], 64 }
   0x6   : > { %22 = vsyncadd [#allocation3], 4294967232 }
   0x7   : > { %s30_s5 = sadd.s32 1, %s11_s5  ;;  %v1_v0 = vmatmul.bf16.gmra.mxu0 %v2_v1 }
   0x8   : > { %p1_p0 = scmp.ge.s32.totalorder %s30_s5, 4 }
   0x9   : > { %40 = sbr.rel (%p1_p0) target = $region7 }
   0xa   : > { %41 = vnop }
   0xb   : > { %41 = vnop }
   0xc   : > { %41 = vnop }
   0xd   : > { %41 = vnop }
   0xe   : > { %42 = vdelay 99 } /* Start region 5 :: End region 5 */
   0xf PF: > { %43 = sbr.rel (!%p1_p0) target = $region3 } /* Start region 7 */
  0x10   : > { %41 = vnop }
  0x11   : > { %41 = vnop }
  0x12   : > { %41 = vnop }
  0x13   : > { %41 = vnop }
"""  # noqa: E501 - a dump has one line a bundle


def run(text: str, values: dict | None = None, chip: str = "v5e"):
    simulator = Simulator(llo.parse(text), MACHINES[chip])
    simulator.load(values or {})
    return simulator.execute(), simulator


def test_a_loop_runs_as_often_as_its_counter_says() -> None:
    result, _ = run(LOOP)
    steps, skipped = 4, 1
    per_step = 12 + 6 + 100  # bundles 0x2 to 0xd, the block, and 0xf to 0x13
    assert result.unknown == {}
    assert result.issue_cycles == 2 + steps * (per_step - 1) - skipped * 100
    assert result.num_dmas == steps
    assert result.read_bytes == steps * 64 * GRANULE_BYTES
    assert result.write_bytes == 0
    assert result.matmul_flops == steps * MACHINES["v5e"].matmul_flops("bf16")


def test_waiting_takes_the_transfer_and_its_latency() -> None:
    result, _ = run(LOOP)
    model = MACHINES["v5e"]
    transfer = 64 * GRANULE_BYTES / model.read_bytes_per_cycle + model.latency_cycles
    # What is left of a transfer after the cycles of starting and awaiting it.
    stall = transfer - DMA_COMMAND_CYCLES
    assert result.dma_stall_cycles == pytest.approx(4 * stall, rel=0.01)
    commands = 4 * 2 * DMA_COMMAND_CYCLES
    expected = result.issue_cycles + result.dma_stall_cycles + commands
    assert result.cycles == pytest.approx(expected)


def test_an_unknown_loop_runs_once_and_is_reported() -> None:
    text = LOOP.replace("scmp.ge.s32.totalorder %s30_s5, 4", "scmp.ge.s32.totalorder %s99_s9, 4")
    result, _ = run(text)
    assert result.num_dmas == 1
    assert result.unknown == {"branch at 0x9": 1, "loop at 0xf": 1}


# A pass over a tile that finds something: a block of 100 cycles, and the pass once more.
RARE = """
     0   :  { %s1_s1 = smov.u32 0 }
   0x1 LB: > { %2 = vpush %v1_v0  ;;  %s5_s1 = sadd.s32 1, %s4_s1 } /* Start region 3 */
   0x2   : > { %s3_s2 = spop %2 }
   0x3   : > { %p1_p0 = scmp.gt.s32.totalorder %s3_s2, 0  ;;  %p2_p1 = scmp.lt.s32.totalorder %s5_s1, 2 }
   0x4   : > { %p3_p2 = pand %p1_p0, %p2_p1  ;;  %40 = sbr.rel (!%p1_p0) target = $region7 }
   0x5   : > { %41 = vnop }
   0x6   : > { %41 = vnop }
   0x7   : > { %41 = vnop }
   0x8   : > { %41 = vnop }
   0x9   : > { %42 = vdelay 99 } /* Start region 5 :: End region 5 */
   0xa PF: > { %43 = sbr.rel (%p3_p2) target = $region3 } /* Start region 7 */
   0xb   : > { %41 = vnop }
   0xc   : > { %41 = vnop }
   0xd   : > { %41 = vnop }
   0xe   : > { %41 = vnop }
"""  # noqa: E501


@pytest.mark.parametrize(
    ("found", "passes", "blocks", "unknown"),
    [
        (None, 1, 1, {"branch at 0x4": 1, "loop at 0xa": 1}),
        (0, 1, 0, {}),
        (1, 2, 2, {}),
    ],
)
def test_what_a_reduction_finds_may_be_given(found, passes, blocks, unknown) -> None:
    simulator = Simulator(llo.parse(RARE), MACHINES["v5e"], found=found)
    simulator.load({})
    result = simulator.execute()
    assert result.issue_cycles == 1 + passes * 13 + blocks * 100
    assert result.num_reduced == passes
    assert result.unknown == unknown


def test_a_predicated_store_and_load_of_smem() -> None:
    text = """
     0   :  { %s1_s1 = smov.u32 7  ;;  %p1_p1 = scmp.eq.s32.totalorder 1, 1 }
   0x1   :  { %2 = sst [smem:[#allocation2]] (%p1_p1), %s1_s1 }
   0x2   :  { %3 = sst [smem:[#allocation2 + $0x1]] (!%p1_p1), %s1_s1 }
   0x3   :  { %s2_s2 = sld [smem:[#allocation2]] (%p1_p1)  ;;  %s3_s3 = sld [smem:[#allocation2 + $0x1]] }
   0x4   :  { %s4_s1 = sadd.s32 %s1_s1, 1  ;;  %s5_s4 = sadd.s32 %s1_s1, 2 }
"""  # noqa: E501
    _, simulator = run(text)
    registers = simulator.program.registers
    assert registers["s2"] == 7
    assert registers["s3"] is llo.UNKNOWN  # nothing was stored there
    assert (registers["s1"], registers["s4"]) == (8, 9)  # a bundle reads what was before it


def test_a_transfer_that_the_compiler_found_to_be_never_made_is_none() -> None:
    never = LOOP.replace("[thread:$0]", "[thread:$0] (0),").replace("wait [", "wait (0), [")
    result, _ = run(never)
    assert result.num_dmas == 0
    assert result.dma_stall_cycles == 0
    assert result.unknown == {}


def test_known_operands_reach_smem_through_a_transfer() -> None:
    text = """
     0   :  { %s9_s0 = inlined_call_operand.hbm [shape: s32[16], index: 0, kind: input, shape index: {}] }
   0x1   :  { %s2_s2 = sshll.u32 %s9_s0, 4 }
   0x2   :  { %4 = dma.hbm_to_smem /*hbm=*/%s2_s2, /*size_in_granules=*/2, /*smem=*/[#allocation2], /*dst_syncflagno=*/[#allocation3] }
   0x3   :  { %s3_s3 = sld [smem:[#allocation2 + $0x9]] }
"""  # noqa: E501
    _, simulator = run(text, {("input", 0): np.arange(16, dtype=np.int32)})
    assert simulator.program.registers["s3"] == 9


def test_unknown_values_absorb() -> None:
    unknown = llo.UNKNOWN
    for value in (unknown + 1, 1 - unknown, unknown << 4, unknown > 3, unknown == unknown):
        assert value is unknown
    with pytest.raises(TypeError):
        bool(unknown)


def test_words_in_memory_follow_the_tiles() -> None:
    array = np.arange(9 * 130, dtype=np.int32).reshape(9, 130)
    words = hlo.words_in_memory(array, "s32[9,130]{1,0:T(8,128)}")
    assert words.size == 16 * 256
    for row, column in ((0, 0), (7, 129), (8, 5), (3, 128)):
        tile = (row // 8) * 2 + column // 128
        assert words[tile * 1024 + (row % 8) * 128 + column % 128] == array[row, column]
    turned = hlo.words_in_memory(array, "s32[9,130]{0,1:T(8,128)}")
    assert turned[1] == array[1, 0]
    assert turned[128] == array[0, 1]


HLO = """HloModule jit_f, is_scheduled=true

%body (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %p = (s32[], f32[8,128]) parameter(0)
  ROOT %fusion.1 = (s32[], f32[8,128]) fusion(%p), kind=kLoop
}

%condition (q: (s32[], f32[8,128])) -> pred[] {
  ROOT %q = pred[] parameter(0)
}

ENTRY %main.2 (a: f32[8,128]) -> f32[8,128] {
  %a = f32[8,128]{1,0:T(8,128)} parameter(0)
  %copy-start = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]) copy-start(%a)
  %copy-done = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  %while = (s32[], f32[8,128]) while(%copy-done), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  ROOT %out = f32[8,128]{1,0} get-tuple-element(%while), index=1
}
"""  # noqa: E501


def test_hlo_is_read_in_schedule_order() -> None:
    computations, entry = hlo.parse(HLO)
    assert entry == "main.2"
    assert [op.name for op in computations[entry]] == [
        "a",
        "copy-start",
        "copy-done",
        "while",
        "out",
    ]
    loop = computations[entry][3]
    assert loop.called == ("body",)
    assert loop.trip_count == 6
    assert hlo.copied_bytes(computations[entry][1]) == (8 * 128 * 4, 0)  # into VMEM


def test_known_values_pass_through_sorts_and_nested_calls() -> None:
    def kernel(sizes_ref, x_ref, out_ref):
        out_ref[...] = x_ref[...]

    @jax.jit
    def call(sizes, x):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(1,),
                in_specs=[pl.BlockSpec(x.shape, lambda i, sizes: (0, 0))],
                out_specs=pl.BlockSpec(x.shape, lambda i, sizes: (0, 0)),
            ),
        )(sizes, x)

    def fn(index, x):
        order = jnp.argsort(index)
        return call(jnp.cumsum(index[order]), x * 2)

    index = np.array([3, 1, 2], np.int32)
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    (operands,) = known_values.pallas_operands(jax.make_jaxpr(fn)(index, x), [index, x])
    np.testing.assert_array_equal(operands[0], [1, 3, 6])
    assert operands[1] == (8, 128)


@pytest.mark.parametrize(
    ("chip", "case", "expected", "bound"),
    [
        ("v5e", "R1", 141.9, "HBM"),
        ("v6e", "R7", 2091, "MXU"),
        ("v5e", "A1", 698, "MXU"),
        ("v6e", "A1", 224, "MXU"),  # a head of 128 fills half of the MXU in one of two products
        ("v6e", "A6", 54.33, "HBM"),  # the MXU, a quarter of it filled in one of two: 22.98
        ("v6e", "N1", 97.43, "HBM"),
        ("v5e", "Q1", 130.7, "HBM"),
    ],
)
def test_floors(chip: str, case: str, expected: float, bound: str) -> None:
    """By hand: FLOPs / peak, or bytes read and written at the bandwidth that is reached."""
    found = cases.find(case, chip)
    results = jax.eval_shape(lambda *x: x[0], found.args[0])
    written = results.size * results.dtype.itemsize
    if case == "R1":
        written = 512 * 1536 * 2
    if case == "R7":
        written = 8192 * 28672 * 2
    if case == "Q1":
        written += found.args[1].size * 2
    counts = found.counts
    head = counts.get("head"), counts.get("head_share", 1.0)
    floor = machine.floor_us(chip, counts["flops"], counts["bytes"] - written, written, *head)
    assert floor[0] == pytest.approx(expected, rel=2e-3)
    assert floor[1] == bound


def test_any_shape_has_the_work_of_the_case_it_equals() -> None:
    pairs = {
        "R1": "ragged_dot --m 512 --k 2048 --n 1536 --g 16",
        "R9": "ragged_dot --m 32768 --k 1536 --n 2048 --g 128 --layout gkn",
        "E1.64": "moe_experts --t 64 --e 16",
        "A1": "flash_attention --sq 4096",
        "A4": "flash_attention --sq 8192 --hq 16 --d 256 --window 1023",
        "A5": "flash_attention --b 64 --sq 1 --sk 4096",
        "N1": "rms_norm --rows 8192 --d 4096",
        "N2": "add_rms_norm --rows 8192 --d 4096",
        "N5": "rms_norm_backward --rows 8192 --d 4096",
        "N6": "rms_norm_gated --rows 8192 --d 4096",
        "Q1": "apply_rotary --s 4096",
        "Q3": "qk_norm_rotary --s 4096",
        "Q6": "apply_rotary --s 4096 --layout bshd",
    }
    for name, command in pairs.items():
        named, custom = cases.find(name, "v6e"), cases.find(command, "v6e")
        assert custom.counts == named.counts, name
        shapes = [np.shape(arg) for arg in custom.args]
        assert shapes == [np.shape(arg) for arg in named.args], name


@pytest.mark.parametrize(
    "command",
    [
        "ragged_dot --m 8 --k 8 --n 8",
        "no_such_op --m 3",
        "ragged_dot --m 8 --k 8 --n 8 --g 2 --sizes 9,9",
    ],
)
def test_a_shape_that_cannot_be_is_refused(command: str) -> None:
    with pytest.raises(SystemExit):
        cases.of_shape(command)


def test_programs_are_estimated_and_failures_named(tmp_path: Path) -> None:
    """Both chips, a kernel and what XLA makes of the expression; one bad case stops no other."""
    shape = "rms_norm --rows 4096 --d 1024"
    wanted = [
        ("v5e", shape),
        ("v6e", "rms_norm --rows nonsense"),
        ("v6e", shape),
        ("v6e", f"{shape}/jnp_f32"),
    ]
    found = [(chip, name, facts) for chip, name, facts in estimate_cases(wanted, tmp_path)]
    assert [(chip, name) for chip, name, _ in found] == wanted
    assert "invalid int value" in found[1][2]["error"]
    for index in (0, 2, 3):
        row = static.row_of(*found[index])
        assert row["hbm_bytes"] >= row["bytes"]
        assert 1.0 <= row["ratio"] < 2.5
        assert row["unknown"] == {}
        assert row["not_dumped"] == {}
        assert 0 < row["schedule_cycles"] < 1e6
        if index < 3:  # the kernel moves every byte once; what XLA does is its own affair
            assert row["hbm_bytes"] == pytest.approx(row["bytes"], rel=0.01)
            assert "pallas" in [step["kind"] for step in found[index][2]["operations"]]


def test_a_second_pass_that_only_rare_values_need_is_told_apart(tmp_path: Path) -> None:
    shape = "flash_attention --sq 512 --hq 8 --hkv 8 --d 64 --window 127"
    ((chip, name, found),) = estimate_cases([("v5e", shape)], tmp_path)
    assert found["unknown"] == {}
    row = static.row_of(chip, name, found)
    # Another pass over each tile, which keeps its queries, keys and values.
    assert 0.2 * row["us"] < row["rare_us"] < 2 * row["us"]


def random_like(case: cases.Case) -> list:
    random = np.random.default_rng(0)
    return [
        jnp.asarray(arg)
        if isinstance(arg, np.ndarray)
        else jnp.asarray(random.normal(size=arg.shape), arg.dtype)
        for arg in case.args
    ]


@pytest.mark.parametrize(
    "command",
    [
        "rms_norm --rows 8 --d 64",
        "rms_norm_backward --rows 8 --d 64",
        "add_rms_norm --rows 8 --d 64",
        "rms_norm_gated --rows 8 --d 64",
        "apply_rotary --s 8 --hq 2 --hkv 1 --d 32",
        "apply_rotary --s 8 --hq 2 --hkv 1 --d 32 --rotary_dim 16 --interleaved",
        "qk_norm_rotary --s 8 --hq 2 --hkv 1 --d 32 --layout bshd",
    ],
)
def test_plain_peers_agree_with_each_other(command: str) -> None:
    """A peer that did less work would be an unfair one."""
    case = cases.find(command, "v5e")
    arrays = random_like(case)
    if "rotary" in command:  # full-width tables, both halves (or pairs) equal
        for i in (2, 3):
            half = arrays[i][..., : arrays[i].shape[-1] // 2]
            both = jnp.repeat(half, 2, -1) if "interleaved" in command else jnp.tile(half, 2)
            arrays[i] = both
    results = [fn(*arrays) for fn, _ in peers.peers_of(case.counts, case.args, "v5e").values()]
    assert len(results) >= 2
    for other in results[1:]:
        for a, b in zip(jax.tree.leaves(results[0]), jax.tree.leaves(other), strict=True):
            scale = float(jnp.abs(a.astype(jnp.float32)).max())
            difference = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max()
            assert float(difference) <= 0.03 * scale


def test_every_case_has_peers_for_both_chips() -> None:
    for name, (_, _, counts) in cost_cases.CASES.items():
        if counts.get("op") in ("ragged_dot", "moe_experts", "rms_norm", "apply_rotary"):
            assert all(cases.peer_names(name, chip) for chip in static.CHIPS), name
        assert cases.describe(name)


FOUND = {
    "us": 10.0,
    "flops": 0.0,
    "bytes": 3e6,
    "written": 1e6,
    "read_bytes": 2e6,
    "write_bytes": 1e6,
    "matmul_flops": 0.0,
    "schedule_cycles": 5,
    "mxu_stall_us": 0.0,
    "dma_stall_us": 0.0,
    "vmem_bytes": 0,
    "spills": 0,
    "fills": 0,
    "compile_s": 1.0,
    "unknown": {},
    "rare_us": 0.0,
    "not_dumped": {},
}


def test_refreshing_goes_on_where_it_ended(tmp_path: Path, monkeypatch) -> None:
    made: list[str] = []
    broken = {"v5e N1/jnp_f32"}

    def estimates(wanted, folder):
        for chip, name in wanted:
            made.append(f"{chip} {name}")
            if made[-1] in broken:
                yield chip, name, {"error": "the compiler died"}
                return
            yield chip, name, FOUND

    def refresh(*cases: str) -> list[str]:
        made.clear()
        missing.append(static.refresh(list(cases), 1, True))
        return list(made)

    missing: list[int] = []
    monkeypatch.setattr(facts, "RESULTS", tmp_path)
    monkeypatch.setattr(static, "estimate_cases", estimates)
    first = refresh("N1", "R1")
    assert first[:3] == ["v5e N1", "v5e N1/jnp_llama", "v5e N1/jnp_f32"]
    assert "v6e R1/tokamax_v2" in first  # one case that breaks stops no other
    broken.clear()
    names = ["v5e N1/jnp_f32", "v6e N1", "v6e N1/jnp_llama", "v6e N1/jnp_f32"]
    assert refresh("N1", "R1") == names
    assert refresh("N1", "R1") == []
    assert missing == [1, 0, 0]
    content = facts.load("static.json")
    listed = [(row["case"], row["implementation"]) for row in content["rows"]]
    assert listed[:4] == [("R1", "ours"), ("R1", "tokamax_v2")] * 2
    content["rows"][0]["fingerprint"] = "that of other sources"
    facts.save("static.json", content)
    assert refresh("R1") == ["v5e R1"]


def test_the_command_line(capsys) -> None:
    assert static.main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(cost_cases.CASES)
    for wrong in ([], ["--refresh", "R99"], ["rms_norm", "--rows", "8"], ["R1", "--chip", "v9"]):
        with pytest.raises(SystemExit):
            static.main(wrong)


def test_estimates_agree_with_another_estimator() -> None:
    """results/cross_check.json: the same programs by a tool that shares no code with this one."""
    rows = facts.load(cross_check.RESULT)["rows"]
    compared = {(row["case"], row["chip"]) for row in rows}
    wanted = {(case, chip) for case in cost_cases.CASES for chip in cross_check.CHIPS}
    assert compared == wanted
    apart = {row["case"] for row in rows if abs(row["us"] / row["other_us"] - 1) > 0.10}
    assert apart == set(cross_check.DIFFERENCES)  # a reason for each, and none that is over


def test_published_measurements_are_reproduced() -> None:
    found = facts.load("published.json")
    ratios = [row["static_us"] / row["measured_us"] for row in found["rows"]]
    assert len(ratios) >= 30
    assert abs(math.log(math.prod(r ** (1 / len(ratios)) for r in ratios))) < 0.05
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    assert errors[len(errors) // 2] < 0.06
    assert json.dumps(found).count('"chip": "v5e"') >= 8
