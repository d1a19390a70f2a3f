"""The stored format of quantised experts: round trips, packing, refusals."""

from __future__ import annotations

import pytest
import torch
from tpu_kernels.kernels.ragged_dot.quantized import (
    STORED_DTYPES,
    dequantize_experts,
    pack_int4,
    quantize_experts,
    unpack_int4,
)

LAYOUTS = pytest.mark.parametrize("transposed", [False, True], ids=["gkn", "gnk"])


@LAYOUTS
@pytest.mark.parametrize("block", [None, 32])
@pytest.mark.parametrize(
    ("stored", "step"),
    [("int8", 1 / 254), ("int4", 1 / 14), ("float8_e4m3fn", 2**-4), ("float8_e5m2", 2**-3)],
)
def test_round_trip(stored: str, step: float, block: int | None, transposed: bool) -> None:
    """The error is at most half a step of the largest value of a channel or block."""
    weight = torch.randn(3, 96, 20) * torch.logspace(-3, 3, 20)
    weight[1, :, 4] = 0
    weight[2, 32:64, 5] = 0
    stored_weight, scale = quantize_experts(
        weight.mT if transposed else weight, stored, block, transposed=transposed
    )
    assert stored_weight.dtype in STORED_DTYPES and scale.dtype == torch.float32
    assert scale.shape == ((3, 20) if block is None else (3, 3, 20))
    back = dequantize_experts(stored_weight, scale, transposed=transposed)
    back = back.mT if transposed else back
    largest = weight.reshape(3, 3, 32, 20).abs().amax(2)
    if block is None:
        largest = largest.amax(1, keepdim=True).expand(3, 3, 20)
    bound = step * largest.repeat_interleave(32, 1)
    assert ((back - weight).abs() <= bound * (1 + 1e-5)).all()
    assert (back[1, :, 4] == 0).all() and (back[2, 32:64, 5] == 0).all()


def test_int4_holds_the_low_nibble_first() -> None:
    values = torch.arange(-8, 8, dtype=torch.int8).reshape(1, 8, 2)
    packed = pack_int4(values, transposed=False)
    assert packed.shape == (1, 4, 2) and packed.dtype == torch.uint8
    assert packed[0, 0, 0] == (-8 & 15) | ((-6 & 15) << 4)  # k = 0 low, k = 1 high
    assert torch.equal(unpack_int4(packed, transposed=False), values)
    sideways = pack_int4(values.mT.contiguous(), transposed=True)
    assert torch.equal(sideways, packed.mT)
    assert torch.equal(unpack_int4(sideways, transposed=True), values.mT)


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn", "float8_e5m2", "int4"])
def test_names_and_dtypes_mean_the_same(stored: str) -> None:
    weight = torch.randn(2, 8, 3)
    by_name = quantize_experts(weight, stored)
    by_dtype = quantize_experts(weight, getattr(torch, stored))
    for a, b in zip(by_name, by_dtype, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(
    ("weight", "dtype", "block", "error", "message"),
    [
        (torch.randn(2, 3), "int8", None, ValueError, "weight: expected 3 dimensions"),
        (torch.ones(1, 2, 3).int(), "int8", None, TypeError, "weight: expected dtype"),
        (torch.randn(1, 3, 2), "int4", None, ValueError, "even k for int4, got k = 3"),
        (torch.randn(1, 6, 2), "int8", 4, ValueError, "block: expected a divisor of k = 6, got 4"),
        (torch.randn(1, 6, 2), "int8", 0, ValueError, "block: expected a divisor"),
        (torch.randn(1, 6, 2), "int8", 2.0, TypeError, "block: expected a Python int"),
        (torch.randn(1, 6, 2), "int2", None, ValueError, "dtype: expected torch.int8"),
        (torch.randn(1, 6, 2), torch.float16, None, ValueError, "dtype: expected torch.int8"),
        (torch.full((1, 2, 2), float("nan")), "int8", None, ValueError, "weight: expected finite"),
        (torch.full((1, 2, 2), float("inf")), "int4", None, ValueError, "weight: expected finite"),
    ],
)
def test_what_cannot_be_quantised_is_named(weight, dtype, block, error, message) -> None:
    with pytest.raises(error, match=message):
        quantize_experts(weight, dtype, block)
