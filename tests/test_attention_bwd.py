"""The backward kernel in Pallas' interpreter, in tiles so small that every case has several.

Fresh memory is NaN there, and races fail the test. Everything is compared with float64.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from attention_oracle import gradients, oracle
from interpret import run_kernel
from tpu_kernels.kernels.flash_attention import lowering, tiling_bwd
from tpu_kernels.kernels.flash_attention.kernel_bwd import flash_attention_bwd
from tpu_kernels.kernels.flash_attention.tiling import Shape
from tpu_kernels.tpu_runtime import CHIPS

NAMES = ("q_segment_ids", "kv_segment_ids", "mask", "kv_lengths")
SLOW = [pytest.mark.slow]


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def make_inputs(shape, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """q, k, v, grad_out; shape: b, sq, hq, sk, hkv, d, dv."""
    b, sq, hq, sk, hkv, d, dv = shape
    shapes = (b, sq, hq, d), (b, sk, hkv, d), (b, sk, hkv, dv), (b, sq, hq, dv)
    return [make(*shape, dtype=dtype, seed=i) for i, shape in enumerate(shapes)]


def make_tiles(q, k, v, options: dict, chip: str, chunk: int | None) -> tiling_bwd.Tiles:
    left, right = options.get("window_size", (-1, -1))
    mask = options.get("mask")
    shape = Shape(
        sq=q.shape[1],
        sk=k.shape[1],
        hq=q.shape[2],
        hkv=k.shape[2],
        d=q.shape[3],
        dv=v.shape[3],
        dtype_bytes=q.dtype.itemsize,
        left=left,
        right=0 if options.get("causal") else right,
        has_ids="q_segment_ids" in options,
        mask_heads=0 if mask is None else mask.shape[1],
    )
    tiles = tiling_bwd.choose(shape, CHIPS[chip], step=(128, 128), block_q=[256])
    return tiles if chunk is None else dataclasses.replace(tiles, chunk=chunk)


def run_backward(
    arrays: tuple[torch.Tensor, ...],  # q, k, v, out, lse, grad_out
    *,
    needs: tuple[bool, bool, bool] = (True, True, True),
    chunk: int | None = None,
    chip: str = "v5e",
    **options,
) -> tuple[torch.Tensor, ...]:
    q, k, v, *_ = arrays
    tiles = make_tiles(q, k, v, options, chip, chunk)
    given = {name: options[name] for name in (*NAMES, "sinks") if options.get(name) is not None}

    def backward(q, k, v, out, lse, grad_out, *tensors, chip, interpret):
        tensors = dict(zip(given, tensors, strict=True))
        masks = (tensors.get(name) for name in NAMES)
        return flash_attention_bwd(
            q,
            k,
            v,
            out,
            lse,
            grad_out,
            sinks=tensors.get("sinks"),
            **lowering.dense_masks(*masks, q.shape[1], k.shape[1]),
            causal=options.get("causal", False),
            window=options.get("window_size", (-1, -1)),
            softmax_scale=options.get("softmax_scale", 1 / math.sqrt(q.shape[3])),
            softcap=options.get("softcap", 0.0),
            needs_q=needs[0],
            needs_kv=needs[1],
            needs_sinks=needs[2] and "sinks" in given,
            chip=chip,
            interpret=interpret,
            tiles=tiles,
        )

    return run_kernel(backward, *arrays, *given.values(), chip=chip)


def with_oracle(q, k, v, grad_out, **options):
    """(arrays of `run_backward`, float64 gradients of q, k, v and, if given, sinks)."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    if options.get("sinks") is not None:
        leaves.append(options["sinks"].double().requires_grad_())
        options = {**options, "sinks": leaves[3]}
    out, lse = oracle(*leaves[:3], **options)
    wanted = gradients(out, grad_out.nan_to_num(), leaves)
    return (q, k, v, out.detach().to(q.dtype), lse.detach().float(), grad_out), wanted


def check(q, k, v, grad_out, *, chunk=None, chip="v5e", **options) -> tuple[torch.Tensor, ...]:
    arrays, wanted = with_oracle(q, k, v, grad_out, **options)
    found = run_backward(arrays, chunk=chunk, chip=chip, **options)
    tolerance = 5e-5 if q.dtype == torch.float32 else 3e-2
    for a, b in zip(found, wanted, strict=False):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    return found


def documents(*lengths: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


CAUSAL = {"causal": True}
BLOCKS = (torch.arange(300)[:, None] // 130 == torch.arange(300) // 130)[None, None]
CASES = {
    # name: (shape, options); the comment says how q and k are stored
    "narrow_heads": ((1, 300, 4, 330, 2, 32, 48), CAUSAL),  # bhds
    "tiles_of_heads": ((1, 300, 8, 300, 2, 128, 128), CAUSAL),  # bshd
    "part_of_a_tile_of_heads": ((1, 140, 16, 260, 8, 128, 128), CAUSAL),  # bshd
    "one_side_in_tiles": ((1, 140, 8, 140, 8, 32, 128), CAUSAL),  # bhds, but v and out bshd
    "one_key_head": ((1, 140, 16, 140, 1, 128, 128), CAUSAL),  # bshd, bhsd
    "not_causal": ((1, 200, 3, 300, 3, 128, 128), {}),  # bhsd
    "wide_heads": ((1, 130, 1, 260, 1, 256, 80), CAUSAL),
    "more_queries_than_keys": ((1, 400, 2, 150, 1, 32, 32), CAUSAL),
    "window": ((1, 600, 2, 600, 2, 32, 32), {"window_size": (100, 30)}),
    "softcap": ((1, 260, 2, 260, 1, 32, 32), {"softcap": 2.0, **CAUSAL}),
    "sinks": ((2, 130, 2, 260, 1, 32, 32), {"sinks": torch.tensor([0.3, -math.inf])}),
    "segments": (
        (1, 400, 2, 400, 2, 32, 32),
        {"q_segment_ids": documents(30, 270, 100), "kv_segment_ids": documents(140, 160, 100)},
    ),
    "mask_of_every_head": ((2, 300, 2, 300, 1, 32, 32), {"mask": make(2, 2, 300, 300) < 1}),
    "mask_with_empty_blocks": ((1, 300, 2, 300, 1, 32, 32), {"mask": BLOCKS}),
    "lengths": ((3, 300, 2, 300, 1, 32, 32), {"kv_lengths": torch.tensor([300, 140, 0])} | CAUSAL),
    "lengths_alone": ((2, 130, 2, 300, 1, 32, 32), {"kv_lengths": torch.tensor([40, 256])}),
    "everything": (
        (2, 200, 4, 330, 2, 32, 16),
        {
            "causal": True,
            "window_size": (140, 3),
            "softcap": 2.0,
            "softmax_scale": 0.3,
            "sinks": make(4),
            "q_segment_ids": documents(50, 150).expand(2, 200),
            "kv_segment_ids": documents(170, 160).expand(2, 330),
            "mask": make(2, 4, 200, 330) < 1,
            "kv_lengths": torch.tensor([330, 255]),
        },
    ),
}
QUICK = {"narrow_heads", "tiles_of_heads", "window", "mask_with_empty_blocks", "everything"}


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in CASES]
)
def test_gradients_equal_those_of_float64(name):
    shape, options = CASES[name]
    check(*make_inputs(shape), **options)


@pytest.mark.parametrize("name", ["narrow_heads", pytest.param("tiles_of_heads", marks=SLOW)])
def test_chunks_of_keys(name):
    """A sequence whose dk and dv do not fit in VMEM."""
    shape, options = CASES[name]
    check(*make_inputs(shape), chunk=256, **options)


@pytest.mark.parametrize("b", [1, 3])
def test_two_cores(b):
    check(*make_inputs((b, 140, 2, 140, 2, 32, 32)), chip="v5p", **CAUSAL)


@pytest.mark.parametrize(
    "name", ["narrow_heads", *(pytest.param(n, marks=SLOW) for n in CASES if n != "narrow_heads")]
)
def test_error_is_at_most_twice_that_of_bfloat16_in_torch(name):
    shape, options = CASES[name]
    q, k, v, grad_out = make_inputs(shape, torch.bfloat16)
    arrays, wanted = with_oracle(q, k, v, grad_out, **options)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    eager = gradients(in_bfloat16(*leaves, **options), grad_out, leaves)
    found = run_backward(arrays, **options)
    for ours, theirs, exact in zip(found, eager, wanted, strict=False):
        ours, theirs = ((x.double() - exact).abs() for x in (ours, theirs))
        assert ours.max() <= 2 * theirs.max() + 1e-6
        assert ours.mean() <= 2 * theirs.mean() + 1e-6


def in_bfloat16(q, k, v, **options) -> torch.Tensor:
    """Attention as models write it, every step rounded to bfloat16."""
    b, sq, hq, d = q.shape
    sk, rep = k.shape[1], hq // k.shape[2]
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    # Which pairs are visible, from the oracle: values e_j give row j of the probabilities.
    plain = {n: x for n, x in options.items() if n not in ("softcap", "sinks", "softmax_scale")}
    spread = torch.eye(sk, dtype=torch.float64)[None, :, None].expand(b, sk, 1, sk)
    zeros = one[..., None].new_zeros
    probs, _ = oracle(zeros(b, sq, hq, 1), zeros(b, sk, 1, 1), spread, **plain)
    seen = probs.transpose(1, 2) > 0  # [b, hq, sq, sk]
    key, value = (x.repeat_interleave(rep, 2).transpose(1, 2) for x in (k, v))
    logits = q.transpose(1, 2) @ key.transpose(2, 3) * options.get("softmax_scale", d**-0.5)
    if softcap := options.get("softcap"):
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~seen, -1e30)
    if (sinks := options.get("sinks")) is not None:
        column = sinks.to(q.dtype)[:, None, None].expand(b, hq, sq, 1)
        logits = torch.cat([logits, column], -1)
    p = logits.softmax(-1)[..., :sk].masked_fill(~seen, 0)
    return (p @ value).transpose(1, 2)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_hidden_numbers_reach_nothing(poison):
    """Keys that nobody sees, a query that sees nothing and its grad_out."""
    q, k, v, grad_out = make_inputs((1, 300, 4, 300, 2, 32, 32))
    k[:, 130:140], v[:, 135:150], q[:, 270], grad_out[:, 270] = (poison,) * 4
    mask = torch.ones(1, 1, 300, 300, dtype=torch.bool)
    mask[..., 130:150], mask[..., 270, :] = False, False
    arrays, _ = with_oracle(q.nan_to_num(0, 0), k, v, grad_out, mask=mask)
    _, wanted = with_oracle(*(x.nan_to_num(0, 0, 0) for x in (q, k, v, grad_out)), mask=mask)
    dq, dk, dv, _ = run_backward((q, *arrays[1:]), mask=mask)
    for a, b in zip((dq, dk, dv), wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=5e-5, atol=5e-5)
    assert dq[:, 270].eq(0).all() and dk[:, 130:150].eq(0).all() and dv[:, 130:150].eq(0).all()


def test_nan_stays_with_those_who_see_it():
    """NaN in one value, and in one row of grad_out: only pairs that see them are spoilt."""
    q, k, v, grad_out = make_inputs((1, 300, 2, 300, 2, 32, 32))
    out, lse = oracle(q, k, v, causal=True)
    v[:, 200, 0] = math.nan  # seen by queries 200 and up
    out[:, 200:, 0] = math.nan
    grad_out[:, 10, 1] = math.nan  # sees keys 0 to 10
    found = run_backward((q, k, v, out.float(), lse.float(), grad_out), causal=True)
    dq, dk, dv, _ = (x.isnan() for x in found)
    assert dq[:, 200:, 0].all() and not dq[:, :200, 0].any()
    assert dk[:, :, 0].all()  # every key is seen by query 299
    assert dq[:, 10, 1].all() and not dq[:, :10, 1].any() and not dq[:, 11:, 1].any()
    assert dv[:, :11, 1].all() and dk[:, :11, 1].all()
    assert not dv[:, 11:, 1].any() and not dk[:, 11:, 1].any()


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_only_what_is_needed(needs):
    shape, options = CASES["sinks"]
    arrays, wanted = with_oracle(*make_inputs(shape), **options)
    found = run_backward(arrays, needs=needs, **options)
    needed = needs[0], needs[1], needs[1], needs[2]
    for is_needed, a, b in zip(needed, found, wanted, strict=True):
        if is_needed:
            torch.testing.assert_close(a.double(), b, rtol=5e-5, atol=5e-5)
        else:
            assert a.shape == (0,)


def test_packed_documents():
    """Positions and segments of packed sequences, empty ones and rows of none included."""
    ends_q, ends_k = torch.tensor([0, 140, 140, 290]), torch.tensor([0, 150, 200, 330])
    q, k, v, grad_out = make_inputs((1, 300, 2, 340, 1, 32, 32))
    k[:, 330:], v[:, 330:], q[:, 290:], grad_out[:, 290:] = (math.nan,) * 4
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full((1, 2, 300), -math.inf, dtype=torch.float64)
    for i in (0, 2):
        rows, keys = slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])
        parts = leaves[0][:, rows], leaves[1][:, keys], leaves[2][:, keys]
        one, lse[..., rows] = oracle(*parts, causal=True, window_size=(90, -1))
        out = torch.cat([out[:, : rows.start], one, out[:, rows.stop :]], 1)
    wanted = gradients(out, grad_out.nan_to_num(), leaves)
    tiles = make_tiles(q, k, v, {"causal": True, "q_segment_ids": None}, "v5e", None)

    def backward(q, k, v, out, lse, grad_out, ends_q, ends_k, *, chip, interpret):
        return flash_attention_bwd(
            q,
            k,
            v,
            out,
            lse,
            grad_out,
            **lowering.packed_masks(ends_q, ends_k, 300, 340),
            causal=True,
            window=(90, -1),
            softmax_scale=32**-0.5,
            chip=chip,
            interpret=interpret,
            tiles=tiles,
        )

    arrays = q, k, v, out.detach().float(), lse.detach().float(), grad_out
    found = run_kernel(backward, *arrays, ends_q, ends_k)
    for a, b in zip(found, wanted, strict=False):
        torch.testing.assert_close(a.double(), b, rtol=5e-5, atol=5e-5)
