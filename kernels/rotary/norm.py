"""RMSNorm over the features of a tile that is held as a tuple of parts, forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .plan import Norm, Operand

Parts = tuple[jax.Array, ...]


def round_to(x: jax.Array, rounding: str) -> jax.Array:
    """float32 values rounded to the dtype named; for "float16" in a float32 array.

    The 13 mantissa bits that float16 lacks are rounded away to nearest even.
    """
    if rounding != "float16":
        return x.astype(rounding)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = (bits + 0xFFF + ((bits >> 13) & 1)) & jnp.uint32(0xFFFFE000)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(rounded, jnp.float32), x)


def feature_sum(parts: Parts, axis: int) -> jax.Array:
    return sum(jnp.sum(part, axis, keepdims=True) for part in parts)


def inverse_rms(parts: Parts, norm: Norm, operand: Operand, axis: int) -> jax.Array:
    """rsqrt(mean(x^2) + eps) in float32; rounded after every operation if casting is "none"."""

    def rounded(x: jax.Array) -> jax.Array:
        if norm.casting != "none":
            return x
        return round_to(x, operand.rounding).astype(jnp.float32)

    d = sum(part.shape[axis] for part in parts)
    wide = (part.astype(jnp.float32) for part in parts)
    mean = rounded(feature_sum(tuple(rounded(part * part) for part in wide), axis) * (1 / d))
    return rounded(jax.lax.rsqrt(rounded(mean + norm.eps)))


def forward(parts: Parts, weights: Parts | None, norm: Norm, operand: Operand, axis: int) -> Parts:
    """The normed tile, rounded as `casting` says."""
    rstd = inverse_rms(parts, norm, operand, axis)
    xhat = tuple(part.astype(jnp.float32) * rstd for part in parts)
    if norm.casting == "gemma":
        if weights is not None:
            xhat = tuple(x * weight for x, weight in zip(xhat, weights, strict=True))
        return tuple(round_to(x, operand.rounding) for x in xhat)
    xhat = tuple(round_to(x, operand.rounding) for x in xhat)
    if weights is None:
        return xhat
    if operand.rounding == operand.norm_rounding == "bfloat16":  # so the weight is bfloat16 too
        # One rounding of the exact product, as in float32, but two rows per register.
        return tuple(x * weight.astype(x.dtype) for x, weight in zip(xhat, weights, strict=True))
    return tuple(
        round_to(x.astype(jnp.float32) * weight, operand.norm_rounding)
        for x, weight in zip(xhat, weights, strict=True)
    )


def backward(
    parts: Parts, grads: Parts, weights: Parts | None, norm: Norm, operand: Operand, axis: int
) -> tuple[Parts, Parts]:
    """Gradients of the input, and of the weight before its sum over rows; both float32.

    grads: of the normed tile, float32. Roundings count as the identity.
    """
    rstd = inverse_rms(parts, norm, operand, axis)
    xhat = tuple(part.astype(jnp.float32) * rstd for part in parts)
    seen = xhat
    if norm.casting != "gemma":  # the weight met the rounded value
        seen = tuple(round_to(x, operand.rounding).astype(jnp.float32) for x in xhat)
    grad_weight = tuple(grad * x for grad, x in zip(grads, seen, strict=True))
    if weights is not None:
        grads = tuple(grad * weight for grad, weight in zip(grads, weights, strict=True))
    d = sum(part.shape[axis] for part in parts)
    products = tuple(grad * x for grad, x in zip(grads, xhat, strict=True))
    mean = feature_sum(products, axis) * (1 / d)
    grad_input = tuple((grad - x * mean) * rstd for grad, x in zip(grads, xhat, strict=True))
    return grad_input, grad_weight
