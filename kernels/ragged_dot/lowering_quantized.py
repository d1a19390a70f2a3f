"""The JAX functions behind the torch ops with quantised weights, arguments as in their schema."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...tpu_runtime import Chip
from .dequant import is_int4
from .lowering import bias_grad, ragged_dot
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
    return ragged_dot(
        lhs,
        rhs,
        group_sizes,
        group_offset,
        bias,
        transpose_rhs,
        precision,
        out_dtype,
        scale=rhs_scale.astype(jnp.float32),
        quantised=Quantised(_num_blocks(rhs_scale), is_int4(rhs.dtype), is_backward=False),
        chip=chip,
        interpret=interpret,
    )


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
            group_offset,
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
    group_offset: jax.Array | None,
    *,
    transpose_rhs: bool,
    precision: str,
    **target: Any,
) -> jax.Array:  # [m, k]
    has_pairs = is_int4(rhs.dtype)

    def gradient(nibble: int) -> jax.Array:
        return ragged_dot(
            grad,
            rhs,
            group_sizes,
            group_offset,
            None,
            not transpose_rhs,
            precision,
            grad.dtype.name,
            scale=scale,
            quantised=Quantised(_num_blocks(scale), has_pairs, is_backward=True, nibble=nibble),
            **target,
        )

    if not has_pairs:
        return gradient(0)
    even, odd = gradient(0), gradient(1)
    return jnp.stack((even, odd), axis=2).reshape(even.shape[0], 2 * even.shape[1])


def _num_blocks(scale: jax.Array) -> int:
    return 1 if scale.ndim == 2 else scale.shape[1]
