"""The gates of MoE experts inside the Pallas kernels, on float32 sums of the MXU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...tpu_runtime import LANES
from .gates import OAI_ALPHA, OAI_LIMIT


def _silu(x):
    return x * jax.nn.sigmoid(x)


def _gelu(x):
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))  # Mosaic has erf, jax.nn.gelu takes erfc


def _relu2(x):
    return jnp.square(jnp.maximum(x, 0))


ACTIVATIONS = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu2": _relu2,
}


def swiglu_oai(z: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """[m, n] of [m, 2n], gate and up in turn: (up + 1) * gate * sigmoid(1.702 * gate), clamped.

    Computed in every lane, with its right neighbour as `up`; then the even ones are kept.
    """
    gate = jnp.minimum(z, OAI_LIMIT)
    up = jnp.clip(z, -OAI_LIMIT, OAI_LIMIT)
    up = jnp.concatenate([up[:, 1:], up[:, :1]], axis=1)
    return _even_columns(((up + 1) * gate * jax.nn.sigmoid(OAI_ALPHA * gate)).astype(dtype))


def _even_columns(x: jax.Array) -> jax.Array:
    """x[:, ::2], by products with zeros and ones: exact, moving lanes is what the MXU does best."""
    is_exact = x.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if is_exact else jax.lax.Precision.DEFAULT
    kept = []
    for start in range(0, x.shape[1], 2 * LANES):
        size = min(2 * LANES, x.shape[1] - start)
        row = jax.lax.broadcasted_iota(jnp.int32, (size, size // 2), 0)
        column = jax.lax.broadcasted_iota(jnp.int32, (size, size // 2), 1)
        pick = (row == 2 * column).astype(jnp.float32).astype(x.dtype)
        part = jnp.dot(
            x[:, start : start + size],
            pick,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        kept.append(part.astype(x.dtype))
    return kept[0] if len(kept) == 1 else jnp.concatenate(kept, axis=1)
