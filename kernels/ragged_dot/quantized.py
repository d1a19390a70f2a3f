"""Weight-only quantisation of expert weights: the stored format, its checks, and both directions.

Weights [g, k, n], or [g, n, k] when transposed, are int8, float8_e4m3fn, float8_e5m2, or int4:
two values of -8 .. 7 along k in one uint8, the low nibble first, so [g, k/2, n] or [g, n, k/2].
Scales are one per output channel, [g, n], or one per channel and block of consecutive k,
[g, k_blocks, n], in that layout for transposed weights too. weight = stored value * scale.
"""

from __future__ import annotations

from typing import Any

import torch

from ...tpu_runtime import checks

STORED_DTYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
_WEIGHT_DTYPES = checks.FLOATS + STORED_DTYPES
INT4 = torch.uint8  # what two int4 values are stored in
_NAMES = {
    "int8": torch.int8,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int4": INT4,
    torch.int8: torch.int8,
    torch.float8_e4m3fn: torch.float8_e4m3fn,
    torch.float8_e5m2: torch.float8_e5m2,
    torch.int4: INT4,
}
# The largest magnitude that a channel's or block's absolute maximum is mapped to.
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, INT4: 7.0}


def num_k(weight: torch.Tensor, transposed: bool) -> int:
    """Values along the contraction; int4 stores two in one element."""
    return weight.shape[2 if transposed else 1] * (2 if weight.dtype == INT4 else 1)


def num_n(weight: torch.Tensor, transposed: bool) -> int:
    return weight.shape[1 if transposed else 2]


def check_weight(
    name: str,
    weight: Any,  # [g, k, n] or [g, n, k], as stored
    scale_name: str,
    scale: Any,  # [g, n] or [g, k_blocks, n], or None
    transposed: bool,
) -> bool:
    """Whether the weight is quantised, after checking its rank and dtype.

    Refuses a scale that is missing, superfluous, of a wrong shape or trained.
    """
    checks.require_tensor(name, weight, 3, _WEIGHT_DTYPES)
    if weight.dtype in checks.FLOATS:
        if scale is not None:
            raise ValueError(
                f"{scale_name}: expected None for {name} that is not quantised ({weight.dtype}); "
                "quantised weights are int8, float8_e4m3fn, float8_e5m2, or int4 as uint8"
            )
        return False
    if scale is None:
        raise ValueError(
            f"{scale_name}: expected [g, n] or [g, k_blocks, n] scales for quantised {name} "
            f"({weight.dtype}), got None"
        )
    if not isinstance(scale, torch.Tensor):
        raise TypeError(f"{scale_name}: expected a tensor, got {type(scale).__name__}")
    if scale.dtype not in checks.FLOATS:
        raise TypeError(f"{scale_name}: expected a float dtype, got {scale.dtype}")
    g, k, n = weight.shape[0], num_k(weight, transposed), num_n(weight, transposed)
    is_channel = scale.ndim == 2 and tuple(scale.shape) == (g, n)
    is_block = scale.ndim == 3 and (scale.shape[0], scale.shape[2]) == (g, n)
    if not (is_channel or is_block):
        raise ValueError(
            f"{scale_name}: expected shape [g, n] = ({g}, {n}) or [g, k_blocks, n] for {name} "
            f"{tuple(weight.shape)}, got {tuple(scale.shape)}"
        )
    if is_block and (scale.shape[1] < 1 or k % scale.shape[1]):
        raise ValueError(
            f"{scale_name}: expected a number of blocks that divides k = {k}, "
            f"got [g, k_blocks, n] = {tuple(scale.shape)}"
        )
    if torch.is_grad_enabled():
        for argument, tensor in ((name, weight), (scale_name, scale)):
            if tensor.requires_grad:
                raise NotImplementedError(
                    f"{argument}: quantised weights and their scales have no gradient; detach "
                    f"them: {argument}.detach(), or train the float weights"
                )
    return True


def unpack_int4(
    packed: torch.Tensor,  # uint8 [..., k/2, n] or [..., n, k/2]
    transposed: bool,
) -> torch.Tensor:  # int8 [..., k, n] or [..., n, k], values -8 .. 7
    low = (packed << 4).view(torch.int8) >> 4
    high = packed.view(torch.int8) >> 4
    k_dim = -1 if transposed else -2
    both = torch.stack((low, high), dim=packed.ndim if transposed else packed.ndim - 1)
    shape = list(packed.shape)
    shape[k_dim] *= 2
    return both.reshape(shape)


def pack_int4(values: torch.Tensor, transposed: bool) -> torch.Tensor:
    """The inverse of `unpack_int4`; an even number of values along k."""
    k_dim = -1 if transposed else -2
    k = values.shape[k_dim]
    shape = list(values.shape)
    shape[k_dim : k_dim + 1 if k_dim + 1 else None] = [k // 2, 2]
    low, high = values.reshape(shape).unbind(-1 if transposed else -2)
    return ((high.to(torch.int8) << 4) | (low.to(torch.int8) & 15)).view(torch.uint8)


def _spread(scale: torch.Tensor, k: int, transposed: bool) -> torch.Tensor:
    """Scales that broadcast with weights [..., k, n] or [..., n, k]."""
    if transposed:
        scale = scale.transpose(-1, -2)
        return scale if scale.shape[-1] == 1 else scale.repeat_interleave(k // scale.shape[-1], -1)
    return scale if scale.shape[-2] == 1 else scale.repeat_interleave(k // scale.shape[-2], -2)


def dequantise(
    weight: torch.Tensor,  # one group or all: [..., k, n] or [..., n, k], as stored
    scale: torch.Tensor,  # [..., n] or [..., k_blocks, n]
    transposed: bool,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:  # [..., k, n] or [..., n, k]
    """stored value * scale in `dtype`; the reference of what the kernels multiply by."""
    if weight.dtype == INT4:
        weight = unpack_int4(weight, transposed)
    if scale.ndim < weight.ndim:
        scale = scale.unsqueeze(-2)
    k = weight.shape[-1 if transposed else -2]
    return weight.to(dtype) * _spread(scale.to(dtype), k, transposed)


def quantize_experts(
    weight: torch.Tensor,
    dtype: torch.dtype | str,
    block: int | None = None,
    *,
    transposed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(quantised, scale) of expert weights: symmetric, by absolute maximum, rounded to nearest.

    Args:
        weight: [g, k, n], or [g, n, k] with `transposed`; float, k is the contraction.
        dtype: torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.int4, or their names as
            strings. int4 is returned as uint8, two values along k in one, low nibble first.
        block: None for one scale per output channel, or the number of consecutive k that share
            a scale; it divides k.
        transposed: the layout of weight, and of the result.

    Returns:
        quantised weights in the layout of `weight`, and float32 scales [g, n] or [g, k/block, n]
        (the same for transposed weights), as `ragged_dot` and `moe_experts` take them. A channel
        or block of zeros stays exactly zero. No gradient. Reads the values: not for compiled code.

    Raises:
        TypeError, ValueError: for an argument of wrong type or shape, an odd k with int4, a block
            that does not divide k, and weights that are not finite in float32.
    """
    checks.require_tensor("weight", weight, 3, checks.FLOATS)
    checks.require_bool("transposed", transposed)
    if not isinstance(dtype, torch.dtype | str) or dtype not in _NAMES:
        raise ValueError(
            "dtype: expected torch.int8, torch.float8_e4m3fn, torch.float8_e5m2 or torch.int4, "
            f"got {dtype!r}"
        )
    stored = _NAMES[dtype]
    k = weight.shape[2 if transposed else 1]
    if stored == INT4 and k % 2:
        raise ValueError(f"weight: expected an even k for int4, got k = {k} in {_shape(weight)}")
    if block is not None:
        checks.require_int("block", block)
        if block < 1 or k % block:
            raise ValueError(f"block: expected a divisor of k = {k}, got {block}")
    num_blocks = 1 if block is None or k == 0 else k // block
    # One expert at a time: the float32 copies of all of them would need several times the memory.
    with torch.no_grad():
        parts = [_quantise_one(expert, stored, num_blocks, transposed) for expert in weight]
    if parts:
        quantised, scale = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    else:
        quantised, scale = _nothing(weight, stored, num_blocks, transposed)
    return quantised, scale[:, 0] if block is None else scale


def _quantise_one(
    weight: torch.Tensor, stored: torch.dtype, num_blocks: int, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    values = weight.float()
    if not torch.isfinite(values).all():
        raise ValueError("weight: expected finite values (in float32), got NaN or inf")
    k, n = values.shape if not transposed else values.shape[::-1]
    by_block = values.T if transposed else values  # [k, n]
    if k == 0:
        largest = values.new_zeros(num_blocks, n)
    else:
        largest = by_block.reshape(num_blocks, k // num_blocks, n).abs().amax(1)
    scale = largest / _LARGEST[stored]
    # Zeros, or so small that a TPU would flush the scale to zero.
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
    values = values / _spread(scale, k, transposed)
    values = values.clamp(-_LARGEST[stored], _LARGEST[stored])
    if stored == INT4:
        return pack_int4(values.round().to(torch.int8), transposed), scale
    return (values.round() if stored == torch.int8 else values).to(stored), scale


def _nothing(weight, stored, num_blocks, transposed) -> tuple[torch.Tensor, torch.Tensor]:
    shape = list(weight.shape)
    n = shape[1 if transposed else 2]
    if stored == INT4:
        shape[2 if transposed else 1] //= 2
    return weight.new_empty(shape, dtype=stored), weight.new_empty(
        (0, num_blocks, n), dtype=torch.float32
    )


def dequantize_experts(
    quantised: torch.Tensor,
    scale: torch.Tensor,
    *,
    transposed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The inverse of `quantize_experts`: stored value * scale in float32, rounded to `dtype`.

    quantised: [g, k, n] or [g, n, k], int4 as uint8 with half of k; scale: [g, n] or
    [g, k_blocks, n]. Returns [g, k, n], or [g, n, k] with `transposed`.
    """
    checks.require_tensor("quantised", quantised, 3, STORED_DTYPES)
    checks.require_bool("transposed", transposed)
    if dtype not in checks.FLOATS:
        raise TypeError(f"dtype: expected a float torch.dtype, got {dtype!r}")
    with torch.no_grad():
        check_weight("quantised", quantised, "scale", scale, transposed)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return dequantise(quantised, scale, transposed, wide).to(dtype)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
