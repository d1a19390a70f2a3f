"""Products with quantised weight tiles, for bfloat16 rows as fast as the MXU takes weights.

    float8   goes into the MXU as it is stored, beside bfloat16 rows: no instruction widens it. (The
             code that means NaN in float8_e4m3fn counts as 480 on v5e, v5p and v6e, whose MXU
             takes the bits for a float8_e4m3b11fnuz; quantised weights are finite.)
    int4     a nibble 0 .. 15 read as a float8 with three bits of mantissa is exactly its number
             times a unit, because the subnormals and the first binade are one ladder. A mask makes
             four such weights of a word, and another the next four; 8 is added to a signed nibble
             by flipping its upper bit, and comes off again as 8 times the sum of the row.
    int8     is widened to bfloat16 (ragged_dot.dequant), as everything is for float32 rows.

Scales are applied to the float32 sums, of all k or of each block. Blocks that are narrower than the
lanes share a product: each has a copy of the rows, with zeros in the columns of the others.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ...tpu_runtime import LANES
from ..ragged_dot import dequant


class Pairs(NamedTuple):
    """Rows for int4 weights: even and odd columns [m, k/2], and their sums."""

    even: jax.Array
    odd: jax.Array
    sums: jax.Array | None = None  # float32 [m, k_blocks], if known


def split(rows: jax.Array) -> Pairs:  # [m, k]
    return Pairs(*dequant.split_pairs(rows))


def block_sums(even: jax.Array, odd: jax.Array, num_blocks: int) -> jax.Array:
    """float32 [m, num_blocks] of rows by blocks of k."""
    both = even.astype(jnp.float32) + odd.astype(jnp.float32)
    width = both.shape[1] // num_blocks
    sums = [
        jnp.sum(both[:, i * width : (i + 1) * width], axis=1, keepdims=True)
        for i in range(num_blocks)
    ]
    return sums[0] if num_blocks == 1 else jnp.concatenate(sums, axis=1)


def dot(
    rows: jax.Array | Pairs,  # [m, k]
    weight: jax.Array,  # as stored: [k, n] or [n, k]; int4 [k/2, n] or [n, k/2]
    scale: jax.Array,  # float32 [k_blocks, n]
    *,
    transposed: bool,  # [n, k]
    precision: jax.lax.Precision,
    code: dequant.Code | None,
) -> jax.Array:  # float32 [m, n]
    """rows @ (weight * scale)."""
    is_pairs = isinstance(rows, Pairs)
    parts = rows[:2] if is_pairs else (rows,)
    num_blocks, k = scale.shape[0], parts[0].shape[1]
    block = k // num_blocks  # of columns of a part
    is_direct = parts[0].dtype == jnp.bfloat16 and code is not None and k % num_blocks == 0
    is_direct &= (
        weight.shape[0] % dequant.REGISTER_ROWS == 0 if is_pairs else weight.dtype != jnp.int8
    )
    has_lanes = num_blocks == 1 or block % LANES == 0
    if not is_direct or not (has_lanes or _fits_lanes(block, k)):
        return dequant.dot(
            tuple(parts) if is_pairs else rows,
            weight,
            scale,
            transposed=transposed,
            precision=precision,
        )
    weights = dequant.codes(weight, code) if is_pairs else (weight,)
    sums = None
    if is_pairs:
        sums = block_sums(*parts, num_blocks) if rows.sums is None else rows.sums
    total, step = None, block if has_lanes else LANES
    for first in range(0, k, step):
        cut = slice(first, first + step)
        copies = [dequant.repeat(part[:, cut], block) for part in parts]
        value = sum(
            _dot(copy, w[:, cut] if transposed else w[cut], transposed)
            for copy, w in zip(copies, weights, strict=True)
        )
        m = parts[0].shape[0]
        for i in range(step // block):
            one = value[i * m : (i + 1) * m]
            index = first // block + i
            if is_pairs:
                one = one * (1 / code.unit) - 8 * sums[:, index : index + 1]
            one = one * scale[index : index + 1]
            total = one if total is None else total + one
    return total


def _fits_lanes(block: int, k: int) -> bool:
    """Whether a few blocks fill the lanes."""
    return LANES % block == 0 and LANES // block <= dequant.MAX_COPIES and k % LANES == 0


def _dot(rows, weight, transposed: bool):
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    return jax.lax.dot_general(rows, weight, dims, preferred_element_type=jnp.float32)
