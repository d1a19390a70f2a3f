"""Rotation of tiles [d, cols] with the features on sublanes and the sequence on lanes.

That is how XLA lays out tensors whose d is no multiple of 128, where lanes would be padding. The
two halves of the pairs are separate arrays [half, cols]: no partner has to be fetched. Interleaved
16-bit pairs share a 32-bit word, which is taken apart and put together again.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES
from .plan import Rotation

FEATURES = 0  # axis of a tile

Parts = tuple[
    jax.Array, ...
]  # first and second features of the pairs, and those that do not rotate


def table_shapes(s: int, d: int, rotation: Rotation) -> list[tuple[int, int]]:
    """Prepared tables in VMEM: cosine and sine of both halves, [half, s] float32."""
    return [(rotation.half, s)] * 4


def prepare_tables(cos_ref, sin_ref, is_seq_minor: bool, d: int, rotation: Rotation) -> list:
    """Tables as they come, [w, s], -> what `rotate` takes."""
    assert is_seq_minor
    cos_a, cos_b = _split_table(cos_ref, rotation)
    sin_a, sin_b = _split_table(sin_ref, rotation)
    # a' = a cos_a - b sin_a, b' = b cos_b + a sin_b; the transpose swaps the sines and their signs.
    if rotation.inverse:
        sin_a, sin_b = -sin_b, -sin_a
    return [cos_a, cos_b, sin_a, sin_b]


def _split_table(ref, rotation: Rotation) -> Parts:
    if rotation.half_width:
        table = ref[...].astype(jnp.float32)
        return table, table
    return tuple(part.astype(jnp.float32) for part in load(ref, (slice(None),), rotation)[:2])


def load_tables(tables, cols) -> Parts:
    return tuple(table[:, cols] for table in tables)


def weight_shape(d: int) -> tuple[int, int]:
    return d, LANES


def load_weight(ref, rotation: Rotation, span: int) -> Parts:
    """ref: [d, lanes], the features in the order of parts, every lane the same."""
    half, end = rotation.half, rotation.rotary_dim
    bounds = ((0, half), (half, end), (end, ref.shape[0]))
    return tuple(ref[start:stop, :span] for start, stop in bounds if start < stop)


def grad_weight_shape(d: int, span: int) -> tuple[int, int]:
    return d, span


def add_grad_weight(ref, grads: Parts, is_valid, rotation: Rotation) -> None:
    """ref: [d, span], the features in the order of parts; lanes are summed outside."""
    start = 0
    for grad in grads:
        stop = start + grad.shape[0]
        ref[start:stop] += jnp.where(is_valid, grad, 0)
        start = stop


def load(ref, index, rotation: Rotation) -> Parts:
    half, end = rotation.half, rotation.rotary_dim
    *lead, cols = index
    if not rotation.interleaved:
        first, second = ref[*lead, :half, cols], ref[*lead, half:end, cols]
    elif ref.dtype.itemsize == 4:
        first = ref[*lead, pl.ds(0, half, 2), cols]
        second = ref[*lead, pl.ds(1, half, 2), cols]
    else:
        words = pltpu.bitcast(ref[*lead, :end, cols], jnp.uint32)
        first = jax.lax.bitcast_convert_type(words << 16, jnp.float32)
        second = jax.lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)
    rest = (ref[*lead, end:, cols],) if end < ref.shape[-2] else ()
    return first, second, *rest


def rotate(parts: Parts, tables: Parts, rotation: Rotation) -> Parts:
    """Both rotated halves in float32."""
    first, second = (part.astype(jnp.float32) for part in parts[:2])
    cos_a, cos_b, sin_a, sin_b = tables
    return first * cos_a - second * sin_a, second * cos_b + first * sin_b


def complete(rotated: Parts, parts: Parts, dtype, rotation: Rotation) -> Parts:
    """The rotated features, which `store` rounds, and those of `parts` that do not rotate."""
    return *rotated, *(part.astype(dtype) for part in parts[2:])


def store(ref, index, parts: Parts, rotation: Rotation) -> None:
    half, end = rotation.half, rotation.rotary_dim
    *lead, cols = index
    first, second, *rest = parts
    if not rotation.interleaved:
        ref[*lead, :half, cols] = first.astype(ref.dtype)
        ref[*lead, half:end, cols] = second.astype(ref.dtype)
    elif ref.dtype.itemsize == 4:
        ref[*lead, pl.ds(0, half, 2), cols] = first.astype(ref.dtype)
        ref[*lead, pl.ds(1, half, 2), cols] = second.astype(ref.dtype)
    else:
        low, high = _bits(first.astype(ref.dtype)) >> 16, _bits(second.astype(ref.dtype))
        ref[*lead, :end, cols] = pltpu.bitcast(low | high, ref.dtype)
    if rest:
        ref[*lead, end:, cols] = rest[0].astype(ref.dtype)


def _bits(x: jax.Array) -> jax.Array:
    """The bits of 16-bit values as float32: their own 16 above zeros."""
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
