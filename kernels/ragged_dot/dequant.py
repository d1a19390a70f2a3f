"""Quantised weights inside a Pallas kernel: tiles in VMEM as stored, products by the MXU.

Pure functions of JAX values, for any kernel that has a tile of `quantized.py`'s format in VMEM:

    lhs = split_pairs(lhs) if is_int4(weight.dtype) else lhs      # once per row tile
    acc = dot(lhs, weight, scale, transposed=...)                 # float32 [m, n]

Beside bfloat16 rows the MXU gets

    float8   as it is stored: no instruction widens it. (The code that means NaN in float8_e4m3fn
             counts as 480 on v5e, v5p and v6e, whose MXU takes the bits for a float8_e4m3b11fnuz;
             quantised weights are finite.)
    int4     as a float8: a nibble 0 .. 15 read as one with three bits of mantissa is exactly its
             number times a unit, because the subnormals and the first binade are one ladder. A mask
             makes four such weights of a word, and another the next four; 8 is added to a signed
             nibble by flipping its upper bit, and comes off again as 8 times the sum of the row.
    int8     widened to bfloat16, in which every stored value is exact.

For float32 rows everything is widened to float32. Scales never touch the weights where they can be
applied to float32 sums instead: per channel to the whole sum, per block to the sum of the block.

int4 is unpacked without moving a value: one uint8 holds k = 2j (low nibble) and k = 2j + 1, so the
low nibbles of a tile are the weights of the even columns of lhs, the high nibbles of the odd ones.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, Chip

REGISTER_ROWS = 32  # of one-byte values
_EACH_88, _EACH_80 = -0x77777778, -0x7F7F7F80  # int32 with 0x88 or 0x80 in every byte of a word
FEW_ROWS = 128
PRODUCT_COLS = 2 * LANES
MAX_COPIES = 8  # of the rows, one for each block that shares a product


class Pairs(NamedTuple):
    """Rows for int4 weights: even and odd columns."""

    even: jax.Array  # [m, k/2]
    odd: jax.Array


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


def split_pairs(lhs: jax.Array) -> Pairs:
    """Even and odd columns of lhs [m, k], k even. m a multiple of 16.

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
    return Pairs(*parts)


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
    lhs: jax.Array | Pairs,  # [m, k]; pairs for int4
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
    parts = tuple(lhs) if isinstance(lhs, Pairs) else (lhs,)
    k, num_blocks, dtype = parts[0].shape[1], scale.shape[0], parts[0].dtype
    if dtype != jnp.bfloat16 or (is_int4(weight.dtype) and weight.shape[0] % REGISTER_ROWS):
        code = None
    block = k // num_blocks if k % num_blocks == 0 else 0
    is_short = block and LANES % block == 0 and LANES // block <= MAX_COPIES
    if not (num_blocks == 1 or is_short or (block and block % LANES == 0)):
        step, block = len(parts), len(parts) * k // num_blocks
        weights = [
            scale_weights(w, scale, block, i, step, transposed)
            for i, w in enumerate(_operands(weight, dtype, None))
        ]
        return _product(parts, weights, transposed, precision)

    if code is not None and is_int4(weight.dtype):
        scale = scale * (1 / code.unit)
    results = []
    for start in range(0, scale.shape[1], PRODUCT_COLS):
        cols = slice(start, start + PRODUCT_COLS)
        columns = weight[cols] if transposed else weight[:, cols]
        results.append(_dot_columns(parts, columns, scale[:, cols], transposed, precision, code))
    return results[0] if len(results) == 1 else jnp.concatenate(results, axis=1)


def _dot_columns(
    parts, weight: jax.Array, scale: jax.Array, transposed: bool, precision, code: Code | None
) -> jax.Array:
    """The columns of one product, so few that their sums stay in registers."""
    (m, k), num_blocks = parts[0].shape, scale.shape[0]
    block = k // num_blocks
    total, width = None, block if num_blocks == 1 else max(block, LANES)
    for start in range(0, k, width):
        size = min(width, k - start)
        chunks = [_repeat(part, block) for part in _columns(parts, start, size)]
        rows = _range_of_k(weight, start, size, transposed)
        sums = _unscaled(chunks, rows, transposed, precision, code)
        for i in range(size // block):
            block_id = start // block + i
            value = sums[i * m : (i + 1) * m] * scale[block_id : block_id + 1]
            total = value if total is None else total + value
    return total


def _product(parts, weights, transposed: bool, precision) -> jax.Array:
    """The sum of part @ weight: one product with twice the k where that moves no lanes."""
    dims = (((1,), (1 if transposed else 0,)), ((), ()))
    if len(parts) == 2 and parts[0].shape[1] % LANES == 0:
        parts = [jnp.concatenate(parts, axis=1)]
        weights = [jnp.concatenate(weights, axis=1 if transposed else 0)]
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
    """lhs @ stored values, those of int4 codes in their unit.

    Few rows take short products with widened weights: these are then transposed without the XLU.
    """
    m, k = parts[0].shape
    is_short = transposed and m <= FEW_ROWS and k % LANES == 0 and not _is_direct(weight, code)
    size = LANES if is_short else k
    total = None
    for start in range(0, k, size):
        rhs = _operands(_range_of_k(weight, start, size, transposed), parts[0].dtype, code)
        value = _product(_columns(parts, start, size), rhs, transposed, precision)
        total = value if total is None else total + value
    if code is not None and is_int4(weight.dtype):
        rows = sum(part.astype(jnp.float32) for part in parts)
        total = total - (8 * code.unit) * jnp.sum(rows, axis=1, keepdims=True)
    return total


def _is_direct(weight: jax.Array, code: Code | None) -> bool:
    """Whether the MXU takes the stored values, or codes made of them, beside bfloat16."""
    return code is not None and weight.dtype != jnp.int8


def _operands(weight: jax.Array, dtype: jnp.dtype, code: Code | None) -> tuple[jax.Array, ...]:
    """The weights of each part of lhs, for int4 with a code 8 more and in its units."""
    if is_int4(weight.dtype):
        return unpack_int4(weight, dtype) if code is None else _codes(weight, code)
    return (weight if _is_direct(weight, code) else widen(weight, dtype),)


def _codes(packed: jax.Array, code: Code) -> tuple[jax.Array, jax.Array]:
    """(value + 8) * code.unit of the low and of the high nibbles."""
    words = pltpu.bitcast(packed, jnp.int32)
    nibbles = ((x & 0x0F0F0F0F) ^ 0x08080808 for x in (words, words >> 4))
    return tuple(pltpu.bitcast(x, code.dtype) for x in nibbles)


def _repeat(lhs: jax.Array, block: int) -> jax.Array:
    """Copies of lhs [m, k] below each other, the i-th with the columns of block i only.

    So blocks shorter than the lanes share a product:

        lhs  [ a a a a | b b b b ]    ->   [ a a a a | 0 0 0 0 ]   times [ weights, 128 of k ]
                                           [ 0 0 0 0 | b b b b ]
    """
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
