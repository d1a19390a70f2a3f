"""The JAX functions behind the torch ops with quantised weights, arguments as in their schema."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...tpu_runtime import Chip
from .dequant import is_int4
from .kernel import ragged_dot_fwd
from .lowering import bias_grad, offset_array, rows_of_bias
from .tiling import Quantised


def ragged_dot_quantized(
    lhs: jax.Array,  # [m, k]
    rhs: jax.Array,  # as stored, [g, k, n] or [g, n, k]; int4 half of k
    rhs_scale: jax.Array,  # [g, n] or [g, k_blocks, n]
    group_sizes: jax.Array,  # [>= g]
    group_offset: jax.Array | None,  # []
    bias: jax.Array | None,  # [g, n]
    transpose_rhs: bool,
    precision: str,
    out_dtype: str,
    *,
    chip: Chip,
    interpret: Any = False,
) -> jax.Array:  # [m, n]
    (m, k), g, n = lhs.shape, rhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    dtype = jnp.dtype(out_dtype)
    if m == 0 or n == 0 or g == 0:
        return jnp.zeros((m, n), dtype)
    if k == 0:
        return rows_of_bias(bias, group_sizes, group_offset, g, (m, n), dtype)
    lhs, precision = _widen_float16(lhs, precision)
    scale = rhs_scale.astype(jnp.float32)
    return ragged_dot_fwd(
        lhs,
        rhs,
        group_sizes,
        offset_array(group_offset),
        bias,
        scale,
        quantised=Quantised(_num_blocks(scale), is_int4(rhs.dtype), is_backward=False),
        transpose_rhs=transpose_rhs,
        precision=precision,
        out_dtype=jnp.float32 if dtype == jnp.float16 else dtype,
        chip=chip,
        interpret=interpret,
    ).astype(dtype)


def ragged_dot_quantized_backward(
    grad_out: jax.Array,  # [m, n]
    rhs: jax.Array,
    rhs_scale: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    transpose_rhs: bool,
    precision: str,
    dtype: str,
    needs_lhs: bool,
    needs_bias: bool,
    *,
    chip: Chip,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Gradients of lhs [m, k] and bias [g, n] in `dtype`; one that is not needed has shape [0]."""
    g, lhs_dtype = rhs.shape[0], jnp.dtype(dtype)
    grad_lhs = grad_bias = jnp.zeros((0,), lhs_dtype)
    if needs_lhs:
        grad_lhs = _lhs_grad(
            grad_out.astype(lhs_dtype),
            rhs,
            rhs_scale.astype(jnp.float32),
            group_sizes,
            offset_array(group_offset),
            transpose_rhs=transpose_rhs,
            precision=precision,
            chip=chip,
            interpret=interpret,
        )
    if needs_bias:
        grad_bias = bias_grad(grad_out, group_sizes, group_offset, g).astype(lhs_dtype)
    return grad_lhs, grad_bias


def _lhs_grad(
    grad: jax.Array,  # [m, n]
    rhs: jax.Array,
    scale: jax.Array,  # [g, n] or [g, k_blocks, n]
    group_sizes: jax.Array,
    group_offset: jax.Array,  # [1]
    *,
    transpose_rhs: bool,
    precision: str,
    **target: Any,
) -> jax.Array:  # [m, k]
    m, n = grad.shape
    dtype, has_pairs = grad.dtype, is_int4(rhs.dtype)
    num_stored = rhs.shape[2 if transpose_rhs else 1]
    if 0 in (m, n, num_stored, rhs.shape[0]):
        return jnp.zeros((m, num_stored * (2 if has_pairs else 1)), dtype)
    grad, precision = _widen_float16(grad, precision)

    def gradient(nibble: int) -> jax.Array:
        return ragged_dot_fwd(
            grad,
            rhs,
            group_sizes,
            group_offset,
            None,
            scale,
            quantised=Quantised(_num_blocks(scale), has_pairs, is_backward=True, nibble=nibble),
            transpose_rhs=not transpose_rhs,
            precision=precision,
            out_dtype=grad.dtype,
            **target,
        ).astype(dtype)

    if not has_pairs:
        return gradient(0)
    return jnp.stack((gradient(0), gradient(1)), axis=2).reshape(m, 2 * num_stored)


def _num_blocks(scale: jax.Array) -> int:
    return 1 if scale.ndim == 2 else scale.shape[1]


def _widen_float16(lhs: jax.Array, precision: str) -> tuple[jax.Array, str]:
    """float16 as float32 with exact products: Mosaic has no float16."""
    if lhs.dtype == jnp.float16:
        return lhs.astype(jnp.float32), "highest"
    return lhs, precision
