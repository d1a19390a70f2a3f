"""Grouped matmul in plain torch: defines what is right, and is the CPU and CUDA implementation.

Every product is accumulated in float32 (float64 for float64 inputs) and rounded once. One group at
a time, so a NaN in one group's rows or weights cannot reach another group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .quantized import dequantise, num_k, num_n


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_ranges(
    group_sizes: torch.Tensor, group_offset: torch.Tensor | None, num_groups: int, m: int
) -> Iterator[tuple[int, int, int]]:
    """(local group id, first row, row past the last) of every group that has rows.

    Sizes that break the contract are clipped to the m rows there are, as the TPU kernel does.
    """
    offset = 0 if group_offset is None else int(group_offset)
    start = 0
    for group_id, size in enumerate(group_sizes.tolist()):
        stop = start + min(max(size, 0), m - start)
        if stop > start and 0 <= group_id - offset < num_groups:
            yield group_id - offset, start, stop
        start = stop


def ragged_dot(
    lhs: torch.Tensor,  # [m, k]
    rhs: torch.Tensor,  # [g, k, n] or [g, n, k]
    group_sizes: torch.Tensor,  # [>= g]
    group_offset: torch.Tensor | None,  # []
    bias: torch.Tensor | None,  # [g, n]
    transpose_rhs: bool,
    precision: str,
    out_dtype: str,
) -> torch.Tensor:  # [m, n]
    del precision  # the CPU multiplies float32 exactly
    dtype = accumulation_dtype(lhs.dtype)

    def weight_of(group_id: int) -> torch.Tensor:
        weight = rhs[group_id].to(dtype)
        return weight.T if transpose_rhs else weight

    shape = rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    return _multiply(lhs, weight_of, shape, group_sizes, group_offset, bias, out_dtype)


def _multiply(
    lhs: torch.Tensor,  # [m, k]
    weight_of: Callable[[int], torch.Tensor],  # of a group, [k, n] in the dtype of accumulation
    shape: tuple[int, int],  # g, n
    group_sizes: torch.Tensor,
    group_offset: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: str,
) -> torch.Tensor:  # [m, n]
    (g, n), m, dtype = shape, lhs.shape[0], accumulation_dtype(lhs.dtype)
    out = lhs.new_zeros((m, n), dtype=getattr(torch, out_dtype))
    for group_id, start, stop in row_ranges(group_sizes, group_offset, g, m):
        product = lhs[start:stop].to(dtype) @ weight_of(group_id)
        if bias is not None:
            product += bias[group_id]
        out[start:stop] = product
    return out


def ragged_dot_backward(
    grad_out: torch.Tensor,  # [m, n]
    lhs: torch.Tensor,  # [m, k]
    rhs: torch.Tensor,  # [g, k, n] or [g, n, k]
    group_sizes: torch.Tensor,
    group_offset: torch.Tensor | None,
    transpose_rhs: bool,
    precision: str,
    needs_lhs: bool,
    needs_rhs: bool,
    needs_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of lhs, rhs and bias; one that is not needed has shape [0]."""
    del precision
    dtype = accumulation_dtype(lhs.dtype)
    n = grad_out.shape[1]
    grad_lhs = lhs.new_zeros(lhs.shape) if needs_lhs else lhs.new_empty(0)
    grad_rhs = rhs.new_zeros(rhs.shape) if needs_rhs else rhs.new_empty(0)
    grad_bias = lhs.new_zeros((rhs.shape[0], n)) if needs_bias else lhs.new_empty(0)
    for group_id, start, stop in row_ranges(group_sizes, group_offset, rhs.shape[0], lhs.shape[0]):
        grad = grad_out[start:stop].to(dtype)
        if needs_lhs:
            weight = rhs[group_id].to(dtype)
            grad_lhs[start:stop] = grad @ (weight if transpose_rhs else weight.T)
        if needs_rhs:
            rows = lhs[start:stop].to(dtype)
            grad_rhs[group_id] = grad.T @ rows if transpose_rhs else rows.T @ grad
        if needs_bias:
            grad_bias[group_id] = grad.sum(0)
    return grad_lhs, grad_rhs, grad_bias


def ragged_dot_quantized(
    lhs: torch.Tensor,  # [m, k]
    rhs: torch.Tensor,  # as stored: [g, k, n] or [g, n, k], int4 half of k
    rhs_scale: torch.Tensor,  # [g, n] or [g, k_blocks, n]
    group_sizes: torch.Tensor,  # [>= g]
    group_offset: torch.Tensor | None,  # []
    bias: torch.Tensor | None,  # [g, n]
    transpose_rhs: bool,
    precision: str,
    out_dtype: str,
) -> torch.Tensor:  # [m, n]
    """`ragged_dot` with weights dequantised in float32, one group at a time."""
    del precision
    dtype = accumulation_dtype(lhs.dtype)

    def weight_of(group_id: int) -> torch.Tensor:
        weight = dequantise(rhs[group_id], rhs_scale[group_id], transpose_rhs, dtype)
        return weight.T if transpose_rhs else weight

    shape = rhs.shape[0], num_n(rhs, transpose_rhs)
    return _multiply(lhs, weight_of, shape, group_sizes, group_offset, bias, out_dtype)


def ragged_dot_quantized_backward(
    grad_out: torch.Tensor,  # [m, n]
    rhs: torch.Tensor,
    rhs_scale: torch.Tensor,
    group_sizes: torch.Tensor,
    group_offset: torch.Tensor | None,
    transpose_rhs: bool,
    precision: str,
    dtype: str,
    needs_lhs: bool,
    needs_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of lhs and bias in `dtype`; one that is not needed has shape [0]."""
    del precision
    (m, n), target = grad_out.shape, {"dtype": getattr(torch, dtype)}
    wide = accumulation_dtype(target["dtype"])
    shape = (m, num_k(rhs, transpose_rhs))
    grad_lhs = grad_out.new_zeros(shape if needs_lhs else (0,), **target)
    grad_bias = grad_out.new_zeros((rhs.shape[0], n) if needs_bias else (0,), **target)
    for group_id, start, stop in row_ranges(group_sizes, group_offset, rhs.shape[0], m):
        grad = grad_out[start:stop].to(wide)
        if needs_lhs:
            weight = dequantise(rhs[group_id], rhs_scale[group_id], transpose_rhs, wide)
            grad_lhs[start:stop] = grad @ (weight if transpose_rhs else weight.T)
        if needs_bias:
            grad_bias[group_id] = grad.sum(0)
    return grad_lhs, grad_bias
