"""ragged_dot with quantised weights against float64."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import jax.numpy as jnp
import pytest
import torch
from closeness import UNIT_ROUNDOFF, assert_rounded_once
from hypothesis import given, settings
from hypothesis import strategies as st
from interpret import run_kernel
from tpu_kernels.kernels.ragged_dot import ops_quantized, tiling
from tpu_kernels.kernels.ragged_dot.ops import ragged_dot
from tpu_kernels.kernels.ragged_dot.plan import Plan
from tpu_kernels.kernels.ragged_dot.quantized import dequantize_experts, quantize_experts
from tpu_kernels.tpu_runtime import CHIPS

FORMATS = ["int8", "float8_e4m3fn", "float8_e5m2", "int4"]
LAYOUTS = pytest.mark.parametrize("transposed", [False, True], ids=["gkn", "gnk"])


@dataclass(frozen=True)
class Case:
    name: str
    m: int
    k: int
    n: int
    sizes: tuple[int, ...]
    stored: str
    block: int | None = None
    transposed: bool = False
    dtype: str = "bfloat16"
    bias: bool = False
    group_offset: int | None = None
    num_groups: int | None = None
    precision: str = "default"

    @property
    def g(self) -> int:
        return len(self.sizes) if self.num_groups is None else self.num_groups

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """(local group, first row, row past the last)."""
        ends = [0]
        for size in self.sizes:
            ends.append(ends[-1] + size)
        first = self.group_offset or 0
        return [(i, ends[first + i], ends[first + i + 1]) for i in range(self.g)]


def make_inputs(case: Case) -> dict[str, torch.Tensor | None]:
    """Rows of no local group are NaN in lhs and inf in the upstream gradient."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    dtype = getattr(torch, case.dtype)
    shape = (case.g, case.n, case.k) if case.transposed else (case.g, case.k, case.n)
    weight = torch.randn(shape, generator=generator)
    weight, scale = quantize_experts(weight, case.stored, case.block, transposed=case.transposed)
    lhs = torch.randn(case.m, case.k, generator=generator).to(dtype)
    grad = torch.randn(case.m, case.n, generator=generator).to(dtype)
    outside = torch.ones(case.m, dtype=torch.bool)
    for _, start, stop in case.ranges:
        outside[start:stop] = False
    lhs[outside], grad[outside] = float("nan"), float("inf")
    bias = torch.randn(case.g, case.n, generator=generator).to(dtype) if case.bias else None
    return {"lhs": lhs, "rhs": weight, "scale": scale, "bias": bias, "grad": grad}


def exact(case: Case, inputs: dict, *, absolute: bool = False) -> dict[str, torch.Tensor]:
    """out and the gradients in float64; with `absolute` the sums of magnitudes."""
    value = (lambda x: x.double().abs()) if absolute else (lambda x: x.double())
    weights = dequantize_experts(
        inputs["rhs"], inputs["scale"], transposed=case.transposed, dtype=torch.float64
    )
    weights = value(weights.mT if case.transposed else weights)  # [g, k, n]
    out, grad_lhs = (torch.zeros(case.m, size).double() for size in (case.n, case.k))
    grad_bias = torch.zeros(case.g, case.n).double()
    for g, start, stop in case.ranges:
        rows, grad = value(inputs["lhs"][start:stop]), value(inputs["grad"][start:stop])
        out[start:stop] = rows @ weights[g]
        if case.bias:
            out[start:stop] += value(inputs["bias"][g])
        grad_lhs[start:stop] = grad @ weights[g].T
        grad_bias[g] = grad.sum(0)
    return {"out": out, "lhs": grad_lhs, "bias": grad_bias}


def tensors_of(case: Case, inputs: dict) -> tuple:
    offset = None if case.group_offset is None else torch.tensor(case.group_offset).int()
    return inputs["rhs"], inputs["scale"], torch.tensor(case.sizes).int(), offset


def run_forward(case: Case, inputs: dict) -> torch.Tensor:
    from tpu_kernels.kernels.ragged_dot import lowering_quantized

    return run_kernel(
        lowering_quantized.ragged_dot_quantized,
        inputs["lhs"],
        *tensors_of(case, inputs),
        inputs["bias"],
        case.transposed,
        case.precision,
        case.dtype,
    )


def run_backward(case: Case, inputs: dict) -> tuple[torch.Tensor, ...]:
    from tpu_kernels.kernels.ragged_dot import lowering_quantized

    return run_kernel(
        lowering_quantized.ragged_dot_quantized_backward,
        inputs["grad"],
        *tensors_of(case, inputs),
        case.transposed,
        case.precision,
        case.dtype,
        True,
        True,
    )


def both_layouts(name: str, *args: object, **kwargs: object) -> list[Case]:
    return [
        Case(f"{name}_{'gnk' if transposed else 'gkn'}", *args, transposed=transposed, **kwargs)
        for transposed in (False, True)
    ]


CASES = [
    *(
        case
        for stored in FORMATS
        for case in both_layouts(stored, 40, 256, 192, (13, 0, 20), stored)
    ),
    *both_layouts("int8_block128", 24, 256, 128, (9, 12), "int8", 128),
    *both_layouts("e4m3_block64", 24, 256, 128, (9, 12), "float8_e4m3fn", 64),
    *both_layouts("e5m2_block256", 24, 512, 128, (9, 12), "float8_e5m2", 256),
    *both_layouts("int4_block128", 24, 256, 128, (9, 12), "int4", 128),
    *both_layouts("int4_block32", 24, 256, 128, (9, 12), "int4", 32, bias=True),
    *both_layouts(
        "int8_odd_block", 24, 96, 40, (9, 12), "int8", 12, dtype="float32", precision="highest"
    ),
    *both_layouts(
        "int4_odd_block", 24, 90, 40, (9, 12), "int4", 3, dtype="float32", precision="highest"
    ),
    *both_layouts("int8_block64_many_rows", 200, 256, 128, (150, 40), "int8", 64),
    *both_layouts("int8_odd_sizes", 37, 100, 60, (5, 0, 11, 3), "int8", bias=True),
    *both_layouts("int4_odd_sizes", 37, 100, 60, (5, 0, 11, 3), "int4", bias=True),
    *both_layouts("e4m3_tiny", 3, 17, 5, (1, 0, 2), "float8_e4m3fn"),
    *both_layouts("int4_one", 1, 2, 1, (1,), "int4"),
    *both_layouts("int8_shard", 48, 64, 40, (5, 7, 3, 9, 2), "int8", group_offset=2, num_groups=2),
    *both_layouts("int4_wide", 300, 128, 700, (140, 130), "int4"),
    *both_layouts("int8_all_empty", 16, 32, 48, (0, 0), "int8"),
    *both_layouts("e5m2_float16", 16, 128, 128, (10, 6), "float8_e5m2", 32, dtype="float16"),
]
IDS = [case.name for case in CASES]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_reference_equals_float64(case: Case) -> None:
    inputs = make_inputs(case)
    lhs, bias = inputs["lhs"].requires_grad_(), inputs["bias"]
    if bias is not None:
        bias.requires_grad_()
    out = ragged_dot(
        lhs,
        inputs["rhs"],
        torch.tensor(case.sizes),
        rhs_scale=inputs["scale"],
        bias=bias,
        transpose_rhs=case.transposed,
        group_offset=case.group_offset,
        precision=case.precision,
    )
    grads = torch.autograd.grad(out, [x for x in (lhs, bias) if x is not None], inputs["grad"])
    lhs.requires_grad_(False)
    if bias is not None:
        bias.requires_grad_(False)
    right, magnitude = exact(case, inputs), exact(case, inputs, absolute=True)
    for name, value in zip(("out", "lhs", "bias"), (out, *grads), strict=False):
        assert_rounded_once(value.detach(), right[name], magnitude[name], name)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_kernel_equals_float64(case: Case) -> None:
    """Interpret mode: NaN in fresh memory, races found."""
    inputs = make_inputs(case)
    out = run_forward(case, inputs)
    assert out.dtype == getattr(torch, case.dtype)
    magnitude = exact(case, inputs, absolute=True)
    assert_rounded_once(out, exact(case, inputs)["out"], magnitude["out"])


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_kernel_gradients_equal_float64(case: Case) -> None:
    """The scales run along the contraction, so one operand is rounded once to lhs.dtype more."""
    inputs = make_inputs(case)
    right, magnitude = exact(case, inputs), exact(case, inputs, absolute=True)
    grad_lhs, grad_bias = run_backward(case, inputs)
    dtype = getattr(torch, case.dtype)
    roundoff = UNIT_ROUNDOFF[torch.float32 if case.dtype == "float16" else dtype]
    bound = UNIT_ROUNDOFF[dtype] * right["lhs"].abs() + (roundoff + 1e-6) * magnitude["lhs"]
    assert grad_lhs.dtype == dtype and torch.isfinite(grad_lhs).all()
    assert ((grad_lhs.double() - right["lhs"]).abs() <= bound + 1e-7).all()
    assert_rounded_once(grad_bias, right["bias"], magnitude["bias"], "gradient of bias")


@st.composite
def problems(draw: st.DrawFn) -> dict:
    g = draw(st.integers(1, 4))
    sizes = draw(st.lists(st.integers(0, 7), min_size=g, max_size=g))
    stored = draw(st.sampled_from(FORMATS))
    num_blocks, block = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    return {
        "sizes": sizes,
        "m": sum(sizes) + draw(st.integers(0, 4)),
        "stored": stored,
        "num_blocks": num_blocks,
        "block": 2 * block if stored == "int4" and num_blocks * block % 2 else block,
        "by_channel": draw(st.booleans()),
        "n": draw(st.integers(0, 7)),
        "transposed": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "strided": draw(st.booleans()),
        "scale_dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
        "offset": draw(st.integers(0, g - 1)),
        "seed": draw(st.integers(0, 2**16)),
    }


def strided(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((x, x), dim=-1)[..., 0]


@given(problems())
@settings(max_examples=150, deadline=None)
def test_any_shape_and_stride(problem: dict) -> None:
    """Values and gradients equal autograd through torch's own matmuls, in float64."""
    sizes, transposed, offset = problem["sizes"], problem["transposed"], problem["offset"]
    k, n, g = problem["num_blocks"] * problem["block"], problem["n"], len(sizes) - offset
    generator = torch.Generator().manual_seed(problem["seed"])
    weight = torch.randn((g, n, k) if transposed else (g, k, n), generator=generator)
    block = None if problem["by_channel"] else problem["block"]
    stored, scale = quantize_experts(weight, problem["stored"], block, transposed=transposed)
    scale = scale.to(problem["scale_dtype"])
    lhs = torch.randn(problem["m"], k, generator=generator).double()
    if problem["strided"]:
        stored, scale, lhs = strided(stored), strided(scale), strided(lhs)
    lhs.requires_grad_()
    bias = None
    if problem["bias"]:
        bias = torch.randn(g, n, generator=generator).double().requires_grad_()
    out = ragged_dot(
        lhs,
        stored,
        torch.tensor(sizes),
        rhs_scale=scale,
        bias=bias,
        transpose_rhs=transposed,
        group_offset=offset,
    )
    weights = dequantize_experts(stored, scale, transposed=transposed, dtype=torch.float64)
    pieces, start = [], 0
    for group, size in enumerate(sizes):
        rows = lhs[start : start + size]
        if group < offset:
            pieces.append(0 * rows.sum() + torch.zeros(size, n).double())
        else:
            weight = weights[group - offset]
            piece = rows @ (weight.T if transposed else weight)
            pieces.append(piece if bias is None else piece + bias[group - offset])
        start += size
    pieces.append(torch.zeros(problem["m"] - start, n).double())
    expected = torch.cat(pieces)
    torch.testing.assert_close(out, expected)
    inputs = [x for x in (lhs, bias) if x is not None]
    upstream = torch.randn(out.shape, generator=generator).double()
    ours = torch.autograd.grad(out, inputs, upstream)
    theirs = torch.autograd.grad(expected, inputs, upstream)
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, right)


@pytest.mark.parametrize("n", [700, 1000, 1300, 1536])
def test_no_weight_is_read_past_the_array(n: int) -> None:
    """Transposed weights have n rows in HBM, padded to 8 and no further."""
    chip = CHIPS["v5e"]
    tiles = tiling.choose(37, 2048, n, 3, "bfloat16", "bfloat16", True, chip)
    static = {"num_cores": 1, "has_bias": False, "precision": None, "interpret": False}
    shape = {"m": 37, "k": 2048, "n": n, "g": 3}
    plan = Plan(**shape, tiles=tiles, transpose_rhs=True, **static)
    assert plan.num_n > 1
    last = plan.col_slice(jnp.int32(plan.num_n - 1), 8)
    assert n <= int(last.start + last.size) <= -(-n // 8) * 8


@LAYOUTS
@pytest.mark.parametrize("stored", ["float8_e4m3fn", "float8_e5m2"])
def test_nan_weights_stay_in_their_group(stored: str, transposed: bool) -> None:
    """In the kernel too, forward and backward, also where two groups share a strip of rows."""
    case = Case("nan", 24, 128, 128, (5, 6, 13), stored, transposed=transposed)
    inputs = make_inputs(case)
    clean = exact(case, inputs), exact(case, inputs, absolute=True)
    inputs["rhs"][1] = float("nan")
    inputs["scale"][1] = float("inf")
    out, (grad_lhs, _) = run_forward(case, inputs), run_backward(case, inputs)
    for value in (out, grad_lhs):
        assert value[5:11].isnan().all()
        assert torch.isfinite(value[:5]).all() and torch.isfinite(value[11:]).all()
    rows = [*range(5), *range(11, 24)]
    assert_rounded_once(out[rows], clean[0]["out"][rows], clean[1]["out"][rows])


@pytest.mark.parametrize("stored", ["float8_e4m3fn", "float8_e5m2", "int8", "int4"])
def test_every_stored_value_is_exact_in_the_kernel(stored: str) -> None:
    """All 256 bytes (16 nibbles) through the kernel: subnormals, largest values, NaN and inf."""
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    if stored != "int4":
        every = every.view(getattr(torch, stored))
    weight = every.reshape(1, 2, 128)
    k = 4 if stored == "int4" else 2
    case = Case("every", 8, k, 128, (8,), stored, dtype="float32", precision="highest")
    inputs = {
        "lhs": torch.eye(8, k),
        "rhs": weight,
        "scale": torch.ones(1, 128),
        "bias": None,
    }
    right = dequantize_experts(weight, torch.ones(1, 128))[0]
    finite = torch.isfinite(right).all(0)
    out = run_forward(case, inputs)[:k]
    assert torch.equal(out[:, finite], right[:, finite])
    assert not torch.isfinite(out[:, ~finite]).all(0).any()


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
@pytest.mark.parametrize("stored", FORMATS)
def test_nothing_to_quantise(stored: str, shape: tuple[int, int, int]) -> None:
    weight, scale = quantize_experts(torch.zeros(shape), stored)
    assert scale.shape == (shape[0], shape[2])
    assert dequantize_experts(weight, scale).shape == shape
    lhs, sizes = torch.randn(5, shape[1]), torch.ones(shape[0], dtype=torch.int32)
    for mode in ("reference", "kernel"):
        if mode == "reference":
            out = ragged_dot(lhs, weight, sizes, rhs_scale=scale)
        else:
            case = Case("zero", 5, *shape[1:], (1,) * shape[0], stored, dtype="float32")
            out = run_forward(case, {"lhs": lhs, "rhs": weight, "scale": scale, "bias": None})
        assert out.shape == (5, shape[2]) and (out == 0).all()


INT8 = torch.ones(3, 4, 5, dtype=torch.int8)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rhs_scale": None}, ValueError, r"rhs_scale: expected \[g, n\] or \[g, k_blocks, n\]"),
        ({"rhs_scale": 1.0}, TypeError, "rhs_scale: expected a tensor, got float"),
        ({"rhs_scale": torch.ones(3, 5).int()}, TypeError, "rhs_scale: expected a float dtype"),
        ({"rhs_scale": torch.ones(3, 4)}, ValueError, r"\[g, n\] = \(3, 5\) .* got \(3, 4\)"),
        ({"rhs_scale": torch.ones(5)}, ValueError, r"rhs_scale: expected shape"),
        ({"rhs_scale": torch.ones(3, 3, 5)}, ValueError, "blocks that divides k = 4"),
        ({"rhs_scale": torch.ones(3, 0, 5)}, ValueError, "blocks that divides k = 4"),
        ({"rhs_scale": torch.ones(3, 5, device="meta")}, ValueError, "rhs_scale on meta"),
        ({"rhs": torch.randn(3, 4, 5)}, ValueError, "rhs_scale: expected None for rhs"),
        ({"rhs": torch.ones(3, 4, 5).int()}, TypeError, "rhs: expected dtype"),
        ({"rhs": INT8.view(torch.uint8)}, ValueError, r"\[g, k/2, n\] with k = 4"),
        ({"lhs": torch.randn(8, 5)}, ValueError, r"\[g, k, n\] with k = 5"),
        ({"bias": torch.randn(3, 5).bfloat16()}, TypeError, "bias torch.bfloat16"),
        (
            {"rhs_scale": torch.ones(3, 5, requires_grad=True)},
            NotImplementedError,
            "rhs_scale: quantised weights and their scales have no gradient",
        ),
        (
            {"rhs": INT8.to(torch.float8_e5m2).requires_grad_()},
            NotImplementedError,
            "rhs: quantised weights",
        ),
    ],
)
def test_bad_input_is_named(changes: dict, error: type[Exception], message: str) -> None:
    arguments = {
        "lhs": torch.randn(8, 4),
        "rhs": INT8,
        "group_sizes": torch.tensor([2, 2, 2]),
        "rhs_scale": torch.ones(3, 5),
        **changes,
    }
    with pytest.raises(error, match=message):
        ragged_dot(**arguments)


def test_parameters_work_without_gradients() -> None:
    """A scale that is a Parameter is fine where no gradient is asked for."""
    scale = torch.nn.Parameter(torch.ones(3, 5))
    with torch.no_grad():
        out = ragged_dot(torch.randn(8, 4), INT8, torch.tensor([2, 2, 2]), rhs_scale=scale)
    assert out.shape == (8, 5)


@pytest.mark.parametrize("stored", FORMATS)
def test_opcheck(stored: str) -> None:
    weight, scale = quantize_experts(torch.randn(3, 6, 4), stored)
    lhs = torch.randn(9, 6, requires_grad=True)
    bias = torch.randn(3, 4, requires_grad=True)
    shared = (weight, scale, torch.tensor([3, 0, 5], dtype=torch.int32), None)
    utils = [
        "test_schema",
        "test_faketensor",
        "test_autograd_registration",
        "test_aot_dispatch_dynamic",
    ]
    if "float8" in stored:
        utils = utils[1:]  # test_schema multiplies its inputs, which torch cannot for float8
    torch.library.opcheck(
        ops_quantized.ragged_dot_quantized,
        (lhs, *shared, bias, False, "default", "float32"),
        test_utils=utils,
    )
    torch.library.opcheck(
        ops_quantized.ragged_dot_quantized_backward,
        (torch.randn(9, 4), *shared, False, "default", "float32", True, False),
        test_utils=utils,
    )


@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled_step(dynamic: bool) -> None:
    """fullgraph, forward and backward, equal to eager."""
    torch._dynamo.reset()
    weight, scale = quantize_experts(torch.randn(3, 5, 4), "int8", transposed=True)
    sizes = torch.tensor([5, 0, 4])

    def step(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        return ragged_dot(x, weight, sizes, rhs_scale=scale, transpose_rhs=True).relu()

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    x = torch.randn(12, 4, requires_grad=True)
    ours, theirs = compiled(x, sizes), step(x, sizes)
    torch.testing.assert_close(ours, theirs)
    ours, theirs = (torch.autograd.grad(y.square().sum(), x)[0] for y in (ours, theirs))
    torch.testing.assert_close(ours, theirs)


def test_autocast_promotes_the_floats_only() -> None:
    weight, scale = quantize_experts(torch.randn(1, 4, 3), "float8_e4m3fn")
    lhs, bias = torch.randn(4, 4).bfloat16(), torch.randn(1, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = ragged_dot(lhs, weight, torch.tensor([4]), rhs_scale=scale, bias=bias)
    assert out.dtype == torch.float32
