"""The rotary kernels: in Pallas' TPU interpreter (NaN in fresh memory, races found), and AOT."""

from __future__ import annotations

import pytest
import torch
from aot import compile_for
from interpret import run_kernel
from tpu_kernels.kernels.rotary import lowering, reference
from tpu_kernels.tpu_runtime import CHIPS

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def interpret(name: str, *args):
    return run_kernel(getattr(lowering, name), *args)


def make(head_axis, b, s, d, width, dtype, table_dtype, h=(3, 1), seed=0):
    """q, k and unequal-halved tables [b, s, width]."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=generator).to(dtype)

    orders = {0: lambda h: (h, b, s, d), 1: lambda h: (b, h, s, d), 2: lambda h: (b, s, h, d)}
    q, k = (randn(*orders[head_axis](heads)) for heads in h)
    return q, k, randn(b, s, width, dtype=table_dtype), randn(b, s, width, dtype=table_dtype)


def assert_close(got, expected, dtype, tolerance=None):
    assert got.dtype == expected.dtype and got.shape == expected.shape
    tolerance = tolerance or {F32: 1e-5, F16: 2e-3, BF16: 1.6e-2}[dtype]
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance)


# name, head_axis, (b, s, d, w), heads, interleaved, half-width, dtype, dtype of the tables
CASES = {
    "llama": (1, (2, 32, 128, 128), (2, 1), False, False, BF16, BF16),
    "long": (1, (1, 300, 128, 128), (1, 1), False, False, BF16, F32),
    "bshd": (2, (2, 12, 128, 128), (4, 2), False, False, F32, F32),
    "bshd_short_bf16": (2, (1, 12, 128, 128), (16, 2), False, False, BF16, F32),
    "hbsd": (0, (2, 32, 128, 128), (2, 1), False, False, F32, F32),
    "partial": (1, (1, 144, 128, 32), (2, 1), False, False, BF16, BF16),
    "partial_interleaved": (1, (1, 32, 128, 64), (2, 1), True, False, BF16, F32),
    "d256": (1, (1, 32, 256, 256), (2, 1), False, False, BF16, BF16),
    "d64": (1, (1, 130, 64, 64), (2, 1), False, False, BF16, BF16),
    "gpt_oss": (1, (2, 72, 64, 32), (2, 1), False, True, BF16, BF16),
    "interleaved_d64": (1, (2, 130, 64, 64), (2, 2), True, False, BF16, BF16),
    "interleaved_half_width_f32": (2, (1, 136, 64, 32), (2, 2), True, True, F32, F32),
    "interleaved_half_width_lanes": (1, (1, 16, 128, 64), (2, 2), True, True, BF16, F32),
    "d80": (1, (1, 100, 80, 80), (2, 1), False, False, BF16, F32),
    "d96_partial": (1, (1, 136, 96, 32), (2, 1), False, False, F32, F32),
    "d192_interleaved": (1, (1, 100, 192, 64), (2, 1), True, False, BF16, F32),
    "decode": (1, (5, 1, 128, 128), (4, 2), False, False, BF16, BF16),
    "decode_d64_hbsd": (0, (3, 1, 64, 64), (2, 1), False, False, F32, F32),
    "single_token": (1, (1, 1, 128, 128), (2, 1), False, False, BF16, BF16),
    "f16": (1, (1, 20, 64, 64), (2, 1), False, False, F16, F16),
    "odd_d": (1, (1, 20, 33, 32), (2, 1), True, False, F32, F32),
    "tiny": (2, (1, 3, 6, 4), (2, 1), False, False, BF16, F32),
}


@pytest.mark.parametrize("name", CASES)
def test_rotation_and_its_transpose(name):
    head_axis, sizes, heads, interleaved, half_width, dtype, table_dtype = CASES[name]
    q, k, cos, sin = make(head_axis, *sizes, dtype, table_dtype, heads)
    options = (head_axis, interleaved, half_width)
    for got, expected in zip(
        interpret("apply_rotary", q, k, cos, sin, *options),
        reference.apply_rotary(q, k, cos, sin, *options),
        strict=True,
    ):
        assert_close(got, expected, dtype)
        end = sizes[3] * (2 if half_width else 1)
        source = q if expected.shape == q.shape else k
        assert got[..., end:].equal(source[..., end:])  # the rest is copied, bit by bit
    for got, expected in zip(
        interpret("apply_rotary_backward", q, k, cos, sin, *options),
        reference.apply_rotary_backward(q, k, cos, sin, *options),
        strict=True,
    ):
        assert_close(got, expected, dtype)


# name: case above, casting, offset, dtype of the weights
NORMS = {
    "llama": ("llama", "llama", 0.0, BF16),
    "llama_f32_weight": ("llama", "llama", 1.0, F32),
    "gemma_long": ("long", "gemma", 1.0, BF16),
    "none_bshd": ("bshd_short_bf16", "none", 0.0, BF16),
    "bshd": ("bshd", "llama", 0.0, F32),
    "no_weight_partial": ("partial", "llama", 0.0, None),
    "d64": ("d64", "llama", 0.0, BF16),
    "interleaved_d64": ("interleaved_d64", "gemma", 0.5, F32),
    "interleaved_partial_d192": ("d192_interleaved", "llama", 0.0, BF16),
    "decode": ("decode", "llama", 0.0, BF16),
    "f16": ("f16", "llama", 0.0, F16),
}


@pytest.mark.parametrize("name", NORMS)
def test_norm_and_rotation_and_their_gradients(name):
    case, casting, offset, weight_dtype = NORMS[name]
    head_axis, sizes, heads, interleaved, half_width, dtype, table_dtype = CASES[case]
    q, k, cos, sin = make(head_axis, *sizes, dtype, table_dtype, heads)
    d = sizes[2]
    weights = (None, None)
    if weight_dtype is not None:
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(d, generator=generator).to(weight_dtype) for _ in range(2)]
    args = (q, k, *weights, cos, sin, 1e-6, offset, casting, head_axis, interleaved, half_width)
    # "none" rounds every step: one unit of the mean in the last place shows in the result.
    tolerance = 4e-2 if casting == "none" and dtype == BF16 else None
    outs = reference.qk_norm_rotary(*args)
    for got, expected in zip(interpret("qk_norm_rotary", *args), outs, strict=True):
        assert_close(got, expected, dtype, tolerance)
    needs = (True, True, weight_dtype is not None, weight_dtype is not None)
    generator = torch.Generator().manual_seed(2)
    grads = [torch.randn(out.shape, generator=generator).to(out.dtype) for out in outs]
    for got, expected in zip(
        interpret("qk_norm_rotary_backward", *grads, *args, *needs),
        reference.qk_norm_rotary_backward(*grads, *args, *needs),
        strict=True,
    ):
        scale = max(1.0, expected.abs().max().item() / 8 if expected.numel() else 1.0)
        assert_close(got / scale, expected / scale, dtype, tolerance)


@pytest.mark.parametrize(
    "needs", [(True, False, False, False), (False, True, False, True), (False, False, True, False)]
)
def test_norm_gradients_that_are_not_needed_are_empty(needs):
    q, k, cos, sin = make(1, 1, 16, 128, 128, F32, F32)
    weights = [torch.rand(128), torch.rand(128)]
    args = (q, k, q, k, *weights, cos, sin, 1e-6, 0.0, "llama", 1, False, False, *needs)
    for got, expected, needed in zip(
        interpret("qk_norm_rotary_backward", *args),
        reference.qk_norm_rotary_backward(*args),
        needs,
        strict=True,
    ):
        assert got.shape == expected.shape and (got.numel() > 0) == needed
        assert_close(got, expected, F32)


@pytest.mark.parametrize("case", ["llama", "partial", "interleaved_d64", "bshd", "gpt_oss"])
def test_nan_stays_in_its_pair(case):
    head_axis, sizes, heads, interleaved, half_width, dtype, table_dtype = CASES[case]
    q, k, cos, sin = make(head_axis, *sizes, dtype, table_dtype, heads)
    q[0, 1, 1, 3] = float("nan")
    q[0, 1, 2, 5] = float("inf")
    q[0, 0, 2, -1] = float("nan")
    k[0, 0, 0, 0] = -0.0
    args = (q, k, cos, sin, head_axis, interleaved, half_width)
    for got, expected in zip(
        interpret("apply_rotary", *args), reference.apply_rotary(*args), strict=True
    ):
        assert got.isnan().equal(expected.isnan())
        assert got.isinf().equal(expected.isinf())


def test_tables_shared_by_all_samples():
    q, k, cos, sin = make(1, 3, 20, 128, 128, BF16, F32)
    args = (q, k, cos[:1].contiguous(), sin[:1].contiguous(), 1, False, False)
    for got, expected in zip(
        interpret("apply_rotary", *args), reference.apply_rotary(*args), strict=True
    ):
        assert_close(got, expected, BF16)


def test_one_tensor_only():
    q, _, cos, sin = make(2, 1, 24, 128, 128, BF16, BF16)
    args = (q, None, cos, sin, 2, False, False)
    (out, nothing), (expected, _) = interpret("apply_rotary", *args), reference.apply_rotary(*args)
    assert nothing.shape == (0,)
    assert_close(out, expected, BF16)


def _meta(*args):
    import jax

    dtypes = {BF16: "bfloat16", F16: "float16", F32: "float32"}
    return [jax.ShapeDtypeStruct(tuple(x.shape), dtypes[x.dtype]) for x in args]


def compile_norm(chip: str, sizes, dtype, head_axis=1, casting="llama", **options):
    """Compiles forward and backward with the TPU compiler."""
    b, s, d, w, hq, hk = sizes
    shape = [lambda h: (h, b, s, d), lambda h: (b, h, s, d), lambda h: (b, s, h, d)][head_axis]
    q, k = (torch.empty(shape(h), dtype=dtype, device="meta") for h in (hq, hk))
    table = torch.empty(b, s, w, dtype=dtype, device="meta")
    weight = torch.empty(d, dtype=dtype, device="meta")
    rotation = (head_axis, options.get("interleaved", False), options.get("half_width", False))

    def rotate(q, k, cos, sin):
        return lowering.apply_rotary(q, k, cos, sin, *rotation, chip=CHIPS[chip])

    def norm_backward(q, k, cos, sin, weight):
        args = (q, k, q, k, weight, weight, cos, sin, 1e-6, 0.0, casting, *rotation)
        grads = lowering.qk_norm_rotary_backward(*args, *(True,) * 4, chip=CHIPS[chip])
        return *grads, *lowering.qk_norm_rotary(*args[2:], chip=CHIPS[chip])

    compile_for(rotate, _meta(q, k, table, table), chip)
    compile_for(norm_backward, _meta(q, k, table, table, weight), chip)


# b, s, d, w, hq, hk: real models, and head sizes of RO16
AOT = {
    "llama": ((1, 4096, 128, 128, 32, 8), BF16, {}),
    "decode": ((64, 1, 128, 128, 32, 8), BF16, {}),
    "bshd": ((1, 4096, 128, 128, 32, 8), BF16, {"head_axis": 2}),
    "sd3_interleaved": ((1, 4429, 64, 64, 24, 24), BF16, {"interleaved": True}),
    "gpt_oss": ((1, 4096, 64, 32, 64, 8), BF16, {"half_width": True}),
    "d80": ((2, 300, 80, 80, 3, 1), BF16, {}),
    "d96_f32": ((2, 300, 96, 32, 3, 1), F32, {}),
    "d192": ((1, 1024, 192, 64, 128, 1), BF16, {"interleaved": True}),
    "d256_many_heads_f32": ((1, 512, 256, 256, 128, 128), F32, {}),
    "d72": ((1, 729, 72, 72, 16, 16), BF16, {}),
    "short_d64": ((4, 5, 64, 64, 6, 2), BF16, {}),
}


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("name", AOT)
def test_compiles_for_a_chip(name, chip):  # RO16
    sizes, dtype, options = AOT[name]
    compile_norm(chip, sizes, dtype, **options)


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["v5p", "v7x"])
@pytest.mark.parametrize("name", AOT)
def test_compiles_for_other_chips(name, chip):
    test_compiles_for_a_chip(name, chip)
