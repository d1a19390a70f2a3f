"""Rotation of tiles [rows, d] with the features on lanes, where d is a multiple of 128 or small.

The partner of every feature comes by lane rotations of the packed input, its sign is folded into
the sine: two products, one sum. (Idea: the lane layout of
https://github.com/openxla/tokamax, deepseek_rope, which gathers lane ^ 1.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES
from .plan import Rotation

FEATURES = 1  # axis of a tile

Parts = tuple[jax.Array, ...]  # here always one


def table_shapes(s: int, d: int, rotation: Rotation) -> list[tuple[int, int]]:
    """Prepared tables in VMEM: cosine and signed sine, [s, d] float32."""
    return [(s, d)] * 2


def prepare_tables(cos_ref, sin_ref, is_seq_minor: bool, d: int, rotation: Rotation) -> list:
    """Tables as they come, [s, w] or [w, s], -> what `rotate` takes, [s, d]."""
    cos, sin = cos_ref[...].astype(jnp.float32), sin_ref[...].astype(jnp.float32)
    if is_seq_minor:
        cos, sin = cos.T, sin.T
    if rotation.half_width:
        cos, sin = (jnp.concatenate([table, table], 1) for table in (cos, sin))
    if rotation.rotary_dim < d:  # `store` never takes these features
        still = jnp.zeros((cos.shape[0], d - rotation.rotary_dim), jnp.float32)
        cos, sin = (jnp.concatenate([table, still], 1) for table in (cos, sin))
    lane = jax.lax.broadcasted_iota(jnp.int32, sin.shape, 1)
    is_first = lane % 2 == 0 if rotation.interleaved else lane < rotation.half
    sin = jnp.where(is_first, -sin, sin)
    return [cos, partner(sin, rotation) if rotation.inverse else sin]


def load_tables(tables, rows) -> Parts:
    return tuple(table[rows] for table in tables)


def weight_shape(d: int) -> tuple[int, int]:
    return 1, d


def load_weight(ref, rotation: Rotation, span: int) -> Parts:
    return (ref[...].astype(jnp.float32),)


def grad_weight_shape(d: int, span: int) -> tuple[int, int]:
    return 1, d


def add_grad_weight(ref, grads: Parts, is_valid, rotation: Rotation) -> None:
    (grad,) = grads
    ref[...] += jnp.sum(jnp.where(is_valid, grad, 0), 0, keepdims=True)


def load(ref, index, rotation: Rotation) -> Parts:
    return (ref[index],)


def rotate(parts: Parts, tables: Parts, rotation: Rotation) -> Parts:
    """The tile in float32 with its first rotary_dim features rotated."""
    (x,), (cos, sin) = parts, tables
    wide, other = x.astype(jnp.float32), partner(x, rotation).astype(jnp.float32)
    return (wide * cos + other * sin,)


def complete(rotated: Parts, parts: Parts, dtype, rotation: Rotation) -> Parts:
    """The rotated features in `dtype` with copies of those of `parts` that do not rotate."""
    out, x = rotated[0].astype(dtype), parts[0]
    if rotation.rotary_dim < x.shape[-1]:
        lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        out = jnp.where(lane < rotation.rotary_dim, out, x.astype(dtype))
    return (out,)


def store(ref, index, parts: Parts, rotation: Rotation) -> None:
    ref[index] = parts[0].astype(ref.dtype)


def partner(x: jax.Array, rotation: Rotation) -> jax.Array:
    """The other feature of every pair, [rows, d]; only lanes and no values are touched."""
    if x.dtype.itemsize == 2 and x.shape[0] % 16 == 0:  # two rows per 32-bit lane, half the work
        return pltpu.bitcast(partner(pltpu.bitcast(x, jnp.uint32), rotation), x.dtype)
    (_, d), half, dtype = x.shape, rotation.half, x.dtype
    x = x.astype(jnp.float32) if dtype.itemsize == 2 else x
    if rotation.interleaved:
        lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        other = jnp.where(lane % 2 == 0, roll(x, d - 1), roll(x, 1))
    elif rotation.rotary_dim == d:
        other = roll(x, half)
    elif d % LANES == 0:
        lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        other = jnp.where(lane < half, roll(x, d - half), roll(x, half))
    else:
        end = rotation.rotary_dim
        other = jnp.concatenate([x[:, half:end], x[:, :half], x[:, end:]], 1)
    return other.astype(dtype)


def roll(x: jax.Array, shift: int) -> jax.Array:
    """out[:, i] = x[:, i - shift]."""
    d = x.shape[1]
    if d % LANES == 0 and shift % LANES != 0:
        return pltpu.roll(x, shift, 1)
    return jnp.concatenate([x[:, d - shift :], x[:, : d - shift]], 1)
