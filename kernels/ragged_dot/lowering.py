"""The JAX functions behind the torch ops: what runs on the TPU, arguments as in the torch schema.

Around the Pallas kernels they settle what Mosaic cannot: sizes of zero, float16, no group offset.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...tpu_runtime import Chip
from .kernel import ragged_dot_fwd
from .kernel_bwd import ragged_dot_weight_grad
from .layouts import as_stored, is_row_minor


def ragged_dot(
    lhs: jax.Array,  # [m, k]
    rhs: jax.Array,  # [g, k, n] or [g, n, k]
    group_sizes: jax.Array,  # [>= g]
    group_offset: jax.Array | None,  # []
    bias: jax.Array | None,  # [g, n]
    transpose_rhs: bool,
    precision: str,
    out_dtype: str,
    *,
    chip: Chip,
    interpret: Any = False,
    **quantisation: Any,  # of rhs, as `ragged_dot_fwd` takes it
) -> jax.Array:  # [m, n]
    (m, k), g, n = lhs.shape, rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    dtype = jnp.dtype(out_dtype)
    if m == 0 or n == 0 or g == 0:
        return jnp.zeros((m, n), dtype)
    if k == 0:
        return rows_of_bias(bias, group_sizes, group_offset, g, (m, n), dtype)
    rhs, transpose_rhs = as_stored(rhs, transpose_rhs)
    if lhs.dtype == jnp.float16:
        precision = "highest"
        lhs, rhs, bias = map(_widen, (lhs, rhs, bias))
    kernel_dtype = jnp.float32 if dtype == jnp.float16 else dtype
    return ragged_dot_fwd(
        lhs,
        rhs,
        group_sizes,
        offset_array(group_offset),
        bias,
        transpose_rhs=transpose_rhs,
        precision=precision,
        out_dtype=kernel_dtype,
        chip=chip,
        interpret=interpret,
        **quantisation,
    ).astype(dtype)


def ragged_dot_backward(
    grad_out: jax.Array,  # [m, n]
    lhs: jax.Array,  # [m, k]
    rhs: jax.Array,  # [g, k, n] or [g, n, k]
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    transpose_rhs: bool,
    precision: str,
    needs_lhs: bool,
    needs_rhs: bool,
    needs_bias: bool,
    *,
    chip: Chip,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of lhs, rhs and bias; one that is not needed has shape [0]."""
    g, dtype = rhs.shape[0], lhs.dtype
    # With out_dtype wider than the inputs the gradient comes wider too; the MXU multiplies equals.
    grad = grad_out.astype(dtype)
    target = {"chip": chip, "interpret": interpret}
    grad_lhs = grad_rhs = grad_bias = jnp.zeros((0,), dtype)
    if needs_lhs:
        grad_lhs = ragged_dot(
            grad,
            rhs,
            group_sizes,
            group_offset,
            None,
            not transpose_rhs,
            precision,
            dtype.name,
            **target,
        )
    if needs_rhs:
        left, right = (grad, lhs) if transpose_rhs else (lhs, grad)
        grad_rhs = weight_grad(left, right, group_sizes, group_offset, g, precision, **target)
    if needs_bias:
        grad_bias = bias_grad(grad_out, group_sizes, group_offset, g).astype(dtype)
    return grad_lhs, grad_rhs, grad_bias


def weight_grad(
    left: jax.Array,  # [m, p]
    right: jax.Array,  # [m, q]
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    g: int,
    precision: str,
    *,
    chip: Chip,
    interpret: Any = False,
) -> jax.Array:  # [g, p, q]
    """left[rows of group].T @ right[rows of group]; exact zeros for empty groups."""
    (m, p), q, dtype = left.shape, right.shape[1], left.dtype
    if 0 in (m, p, q, g):
        return jnp.zeros((g, p, q), dtype)
    is_swapped = is_row_minor((g, p, q), dtype)
    if is_swapped:
        left, right = right, left
    if dtype == jnp.float16:
        precision = "highest"
        left, right = map(_widen, (left, right))
    grad = ragged_dot_weight_grad(
        left,
        right,
        group_sizes,
        offset_array(group_offset),
        g,
        precision=precision,
        out_dtype=left.dtype,
        chip=chip,
        interpret=interpret,
    ).astype(dtype)
    return jnp.swapaxes(grad, 1, 2) if is_swapped else grad


def rows_of_bias(
    bias: jax.Array | None,  # [g, n]
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    g: int,
    shape: tuple[int, int],
    dtype: jnp.dtype,
) -> jax.Array:  # [m, n]
    """The result where there is nothing to multiply."""
    if bias is None:
        return jnp.zeros(shape, dtype)
    group_id = local_group_ids(group_sizes, group_offset, g, shape[0])
    rows = bias[jnp.minimum(group_id, g - 1)].astype(dtype)
    return jnp.where((group_id < g)[:, None], rows, 0)


def bias_grad(
    grad_out: jax.Array, group_sizes: jax.Array, group_offset: jax.Array | None, g: int
) -> jax.Array:  # [g, n] float32
    """Sum of each group's rows. A scatter-add, so that one group's NaN stays in its own sum."""
    group_id = local_group_ids(group_sizes, group_offset, g, grad_out.shape[0])
    sums = jnp.zeros((g + 1, grad_out.shape[1]), jnp.float32)
    return sums.at[group_id].add(grad_out.astype(jnp.float32))[:g]


def local_group_ids(
    group_sizes: jax.Array, group_offset: jax.Array | None, g: int, m: int
) -> jax.Array:  # [m]
    """Each row's local group; g for rows of other groups and rows past the last."""
    ends = jnp.cumsum(jnp.maximum(group_sizes, 0))
    group_id = jnp.searchsorted(ends, jnp.arange(m, dtype=ends.dtype), side="right")
    group_id -= offset_array(group_offset)[0]
    return jnp.where((group_id >= 0) & (group_id < g), group_id, g)


def offset_array(group_offset: jax.Array | None) -> jax.Array:  # [1]
    return jnp.zeros((1,), jnp.int32) if group_offset is None else group_offset.reshape(1)


def _widen(x: jax.Array | None) -> jax.Array | None:
    """float16 as float32, for exact products: Mosaic has no float16. Stored weights stay."""
    return x.astype(jnp.float32) if x is not None and x.dtype == jnp.float16 else x
