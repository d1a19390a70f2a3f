"""Quantised weights inside a Pallas kernel: tiles in VMEM as stored, products by the MXU.

Pure functions of JAX values, for any kernel that has a tile of `quantized.py`'s format in VMEM:

    lhs = split_pairs(lhs) if is_int4(weight.dtype) else lhs      # once per row tile
    acc = dot(lhs, weight, scale, transposed=...)                 # float32 [m, n]

Every stored value is exact in bfloat16, so the MXU multiplies bfloat16 whatever is stored. Scales
never touch the weights where they can be applied to float32 sums instead: per channel to the whole
sum, per block to the sum of the block.

int4 is unpacked without moving a value: one uint8 holds k = 2j (low nibble) and k = 2j + 1, so the
low nibbles of a tile are the weights of the even columns of lhs, the high nibbles of the odd ones.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, Chip

Rows = jax.Array | tuple[jax.Array, jax.Array]  # [m, k], or its even and odd columns [m, k/2]
REGISTER_ROWS = 32  # of one-byte values
_EACH_88, _EACH_80 = -0x77777778, -0x7F7F7F80  # int32 with 0x88 or 0x80 in every byte of a word
FEW_ROWS = 128
MAX_COPIES = 8  # of the rows, one for each block that shares a product


class Code(NamedTuple):
    """A float8 with three bits of mantissa, which the MXU takes beside bfloat16 as it is."""

    dtype: jnp.dtype
    unit: float  # the number whose bits are 1


def code_of(chip: Chip) -> Code | None:
    if "float8_e4m3fn" in chip.native_matmul:
        return Code(jnp.float8_e4m3fn, 2.0**-9)
    if "float8_e5m2" in chip.native_matmul:  # such a chip takes this one too
        return Code(jnp.float8_e4m3b11fnuz, 2.0**-13)
    return None


def is_int4(dtype) -> bool:
    """Whether weights of this stored dtype hold two values of k in one element."""
    return dtype == jnp.uint8


def widen(weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """int8 or float8 values as bfloat16 or float32, exactly."""
    return weight.astype(dtype)


def unpack_int4(packed: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """(low nibbles, high nibbles) of uint8, each in the shape of `packed`, as bfloat16 or float32.

    weights [k/2, n] or [n, k/2] of the even and of the odd k.
    """
    if packed.shape[0] % REGISTER_ROWS:
        wide = packed.astype(jnp.int32)
        return tuple((wide << shift >> 28).astype(jnp.float32).astype(dtype) for shift in (28, 24))
    # Four bytes at once. Bit 7 keeps the subtraction, which extends the sign, inside its byte.
    words = pltpu.bitcast(packed, jnp.int32)
    nibbles = (words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F)
    signed = (((x ^ _EACH_88) - 0x08080808) ^ _EACH_80 for x in nibbles)
    return tuple(widen(pltpu.bitcast(x, jnp.int8), dtype) for x in signed)


def split_pairs(lhs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Even and odd columns of lhs [m, k], k even, each [m, k/2]. m a multiple of 16.

    Moving lanes is what the MXU does best: a product with a permutation, exact for finite values;
    a row with an inf may get NaN for it. Pieces of the columns are stacked, so that the MXU takes
    the permutation once.
    """
    m, k = lhs.shape
    width = 2 * LANES
    whole = k // width * width
    pieces = []
    if whole:
        stack = [lhs[:, start : start + width] for start in range(0, whole, width)]
        both = _part_columns(stack[0] if len(stack) == 1 else jnp.concatenate(stack, axis=0))
        pieces = [both[start : start + m] for start in range(0, both.shape[0], m)]
    if whole < k:
        pieces.append(_part_columns(lhs[:, whole:]))
    parts = []
    for part in range(2):
        columns = [x[:, part * (x.shape[1] // 2) :][:, : x.shape[1] // 2] for x in pieces]
        parts.append(columns[0] if len(columns) == 1 else jnp.concatenate(columns, axis=1))
    return tuple(parts)


def _part_columns(lhs: jax.Array) -> jax.Array:  # [m, k]
    """The even columns of lhs, then the odd ones."""
    k, dtype = lhs.shape[1], lhs.dtype
    row = jax.lax.broadcasted_iota(jnp.int32, (k, k), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (k, k), 1)
    source = jnp.where(column < k // 2, 2 * column, 2 * column - k + 1)
    permutation = (row == source).astype(jnp.float32).astype(dtype)
    exact = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dims = (((1,), (0,)), ((), ()))
    return jax.lax.dot_general(lhs, permutation, dims, exact, jnp.float32).astype(dtype)


def dot(
    lhs: Rows,  # [m, k]; for int4 the result of split_pairs
    weight: jax.Array,  # as stored: [k, n] or [n, k]; int4 [k/2, n] or [n, k/2]
    scale: jax.Array,  # float32 [k_blocks, n]; k_blocks = 1: per channel
    *,
    transposed: bool,
    precision: jax.lax.Precision = jax.lax.Precision.DEFAULT,
    code: Code | None = None,
) -> jax.Array:  # float32 [m, n]
    """lhs @ (weight * scale). m a multiple of 16.

    With `code`, float8 and int4 go into the MXU as one-byte values beside bfloat16 rows.

    Blocks that divide 128 or are multiples of it (halves of it for int4) are scaled in float32
    after the product. Other blocks scale the weights in float32, rounded to the dtype of lhs.
    """
    parts = lhs if isinstance(lhs, tuple) else (lhs,)
    k, num_blocks = parts[0].shape[1], scale.shape[0]
    if num_blocks == 1:
        return _unscaled(parts, weight, transposed, precision, code) * scale
    block = k // num_blocks if k % num_blocks == 0 else 0
    is_short = block and LANES % block == 0 and LANES // block <= MAX_COPIES
    if is_short or (block and block % LANES == 0):
        return _dot_by_block(parts, weight, scale, block, transposed, precision, code)
    step, block = len(parts), len(parts) * k // num_blocks
    weights = [
        scale_weights(w, scale, block, i, step, transposed)
        for i, w in enumerate(_operands(weight, parts[0].dtype, None))
    ]
    return _sum_of_dots(parts, weights, transposed, precision)


def _sum_of_dots(parts, weights, transposed: bool, precision) -> jax.Array:
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    dots = [
        jax.lax.dot_general(part, weight, dims, precision, jnp.float32)
        for part, weight in zip(parts, weights, strict=True)
    ]
    return sum(dots[1:], dots[0])


def _columns(parts, start: int, size: int) -> list[jax.Array]:
    return [part[:, start : start + size] for part in parts]


def _range_of_k(weight: jax.Array, start: int, size: int, transposed: bool) -> jax.Array:
    return weight[:, start : start + size] if transposed else weight[start : start + size]


def _unscaled(
    parts, weight: jax.Array, transposed: bool, precision, code: Code | None
) -> jax.Array:
    """lhs @ stored values. Few rows take short products: their transposed weights skip the XLU."""
    (m, k), dtype = parts[0].shape, parts[0].dtype
    if dtype != jnp.bfloat16:
        code = None
    if is_int4(weight.dtype) and weight.shape[0] % REGISTER_ROWS:
        code = None
    size = LANES if transposed and m <= FEW_ROWS and k % LANES == 0 else k
    total = None
    for start in range(0, k, size):
        weights = _operands(_range_of_k(weight, start, size, transposed), dtype, code)
        product = _sum_of_dots(_columns(parts, start, size), weights, transposed, precision)
        total = product if total is None else total + product
    if code is not None and is_int4(weight.dtype):
        rows = sum(part.astype(jnp.float32) for part in parts)
        total = total * (1 / code.unit) - 8 * jnp.sum(rows, axis=1, keepdims=True)
    return total


def _operands(weight: jax.Array, dtype: jnp.dtype, code: Code | None) -> tuple[jax.Array, ...]:
    """The weights of each part of lhs, for int4 with a code 8 more and in its units."""
    if is_int4(weight.dtype):
        return unpack_int4(weight, dtype) if code is None else codes(weight, code)
    is_direct = code is not None and weight.dtype != jnp.int8
    return (weight if is_direct else widen(weight, dtype),)


def codes(packed: jax.Array, code: Code) -> tuple[jax.Array, jax.Array]:
    """(value + 8) * code.unit of the low and of the high nibbles.

    The subnormals and the first binade of a float8 with three bits of mantissa are one ladder: read
    as such, 0 .. 15 are these numbers of units. Flipping its upper bit adds 8 to a signed nibble.
    """
    words = pltpu.bitcast(packed, jnp.int32)
    nibbles = ((x & 0x0F0F0F0F) ^ 0x08080808 for x in (words, words >> 4))
    return tuple(pltpu.bitcast(x, code.dtype) for x in nibbles)


def _dot_by_block(
    parts, weight, scale, block: int, transposed: bool, precision, code: Code | None
) -> jax.Array:
    """Sums of each block of k times its scales.

    Blocks shorter than the lanes share a product: rows are repeated, each copy with the lanes of
    one block and zeros elsewhere.

        lhs  [ a a a a | b b b b ]    ->   [ a a a a | 0 0 0 0 ]   times [ weights, 128 of k ]
                                           [ 0 0 0 0 | b b b b ]
    """
    m, k = parts[0].shape
    width = max(block, LANES)
    total = None
    for start in range(0, k, width):
        size = min(width, k - start)
        chunks = [repeat(part, block) for part in _columns(parts, start, size)]
        rows = _range_of_k(weight, start, size, transposed)
        sums = _unscaled(chunks, rows, transposed, precision, code)
        for i in range(size // block):
            block_id = start // block + i
            scaled = sums[i * m : (i + 1) * m] * scale[block_id : block_id + 1]
            total = scaled if total is None else total + scaled
    return total


def repeat(lhs: jax.Array, block: int) -> jax.Array:
    """Copies of lhs [m, k] below each other, the i-th with the columns of block i only."""
    num_copies = lhs.shape[1] // block
    if num_copies == 1:
        return lhs
    block_id = jax.lax.broadcasted_iota(jnp.int32, lhs.shape, 1) // block
    copies = [jnp.where(block_id == i, lhs, jnp.zeros_like(lhs)) for i in range(num_copies)]
    return jnp.concatenate(copies, axis=0)


def scale_weights(
    weight: jax.Array,  # [k, n] or [n, k], widened
    scale: jax.Array,  # float32 [k_blocks, n]
    block: int,  # consecutive k of one scale
    first,  # the tile holds k = first, first + step, ..
    step: int,
    transposed: bool,
) -> jax.Array:
    """weight * scale of its block, multiplied in float32 and rounded to weight.dtype."""
    num_blocks = scale.shape[0]
    if num_blocks == 1:
        spread = scale.T if transposed else scale
    else:
        shape = (weight.shape[1 if transposed else 0], num_blocks)
        k = first + step * jax.lax.broadcasted_iota(jnp.int32, shape, 0)
        start = block * jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        one_hot = ((k >= start) & (k < start + block)).astype(jnp.float32)
        operands = (scale, one_hot) if transposed else (one_hot, scale)
        dims = (((0,), (1,)), ((), ())) if transposed else (((1,), (0,)), ((), ()))
        exact = jax.lax.Precision.HIGHEST
        spread = jax.lax.dot_general(*operands, dims, exact, jnp.float32)
    return (weight.astype(jnp.float32) * spread).astype(weight.dtype)


def weights_of_columns(
    weight: jax.Array,  # as stored, a range of k: [k, n] or [n, k]; int4 [k/2, n] or [n, k/2]
    scale: jax.Array | None,  # float32 [k_blocks, n]; None: applied elsewhere
    dtype: jnp.dtype,
    *,
    block: int,
    first,  # stored index of the first k of the range
    nibble: int,  # int4: the even (0) or the odd (1) k
    transposed: bool,
) -> jax.Array:
    """The weights of a product that contracts over n, as the gradient of lhs does."""
    step = 2 if is_int4(weight.dtype) else 1
    weight = unpack_int4(weight, dtype)[nibble] if step == 2 else widen(weight, dtype)
    if scale is None:
        return weight
    return scale_weights(weight, scale, block, step * first + nibble, step, transposed)
