"""Moving blocks of q, k, v and out between their stored order and [head, row, feature] in VMEM."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, SUBLANES
from . import tiling
from .plan import Plan

ORDERS = {"bhsd": (0, 2, 1, 3), "bhds": (0, 2, 3, 1)}
INVERSES = {"bhsd": (0, 2, 1, 3), "bhds": (0, 3, 1, 2)}
_HIGH = -65536  # the upper 16 bits: the second of two bfloat16 in one word


def to_stored(x: jax.Array, form: str) -> jax.Array:
    """[b, s, h, d] in the order the kernel takes; a bitcast if XLA stores it that way.

    "bshd" is [b, s, tiles of heads, tiles of features, heads, LANES], the bytes as they lie: a
    strided load needs the last dimension to be one register wide.
    """
    if form != "bshd":
        return x.transpose(ORDERS[form])
    b, s, h, d = x.shape
    tile = min(h, SUBLANES)
    return x.reshape(b, s, h // tile, tile, d // LANES, LANES).transpose(0, 1, 2, 4, 3, 5)


def from_stored(x: jax.Array, form: str) -> jax.Array:
    """Inverse of `to_stored`."""
    if form != "bshd":
        return x.transpose(INVERSES[form])
    x = x.transpose(0, 1, 2, 4, 3, 5)
    b, s, tiles, tile, parts, lanes = x.shape
    return x.reshape(b, s, tiles * tile, parts * lanes)


def block_shape(form: str, heads: int, rows: int, width: int) -> tuple[int, ...]:
    """One block without its batch dimension."""
    if form == "bshd":
        tile = min(heads, SUBLANES)
        return rows, heads // tile, width // LANES, tile, LANES
    sizes = {"s": rows, "h": heads, "d": width}
    return tuple(sizes[axis] for axis in form[1:])


def _strided(ref, head: int, part: int, packing: int, row: int = 0, rows: int | None = None):
    """Index of one head (or of the words it shares) in a block seen as [rows * stride, LANES]."""
    all_rows, tiles, parts, tile, _ = ref.shape
    words = tile // packing
    stride = tiles * parts * words
    start = (head // tile * parts + part) * words + head % tile // packing + row * stride
    return pl.ds(start, rows or all_rows, stride=stride)


def _words(ref):
    """A bfloat16 block as int32 [all rows, LANES]: two neighbouring heads share a word."""
    words = ref.bitcast(jnp.int32)
    return words.reshape(-1, LANES)


def load_pair(ref, pair: int, interpret: bool, upright: bool = False):
    """float32 [rows, width] of heads 2 * pair and 2 * pair + 1 of a "bshd" block; upright:
    [width, rows].

    Strided loads bring them apart. The interpreter knows neither bitcasts of refs nor packing.
    """
    _, _, parts, tile, _ = ref.shape
    if upright and (interpret or ref.dtype != jnp.bfloat16):
        return tuple(x.T for x in load_pair(ref, pair, interpret))
    if interpret:
        return tuple(
            jnp.concatenate(
                [ref[:, head // tile, part, head % tile, :] for part in range(parts)], axis=1
            ).astype(jnp.float32)
            for head in (2 * pair, 2 * pair + 1)
        )
    if ref.dtype == jnp.bfloat16:
        words = [_words(ref)[_strided(ref, 2 * pair, part, 2), :] for part in range(parts)]
        words = jnp.concatenate(words, axis=1)
        words = words.T if upright else words
        low = jax.lax.bitcast_convert_type(words << 16, jnp.float32)
        return low, jax.lax.bitcast_convert_type(words & _HIGH, jnp.float32)
    flat = ref.reshape(-1, LANES)
    return tuple(
        jnp.concatenate([flat[_strided(ref, head, part, 1), :] for part in range(parts)], axis=1)
        for head in (2 * pair, 2 * pair + 1)
    )


def store_pair(ref, pair: int, row: int, even, odd, interpret: bool, upright: bool = False):
    """Inverse of `load_pair` for the rows from `row`, rounding to the dtype of `ref`.

    upright: even and odd are [width, rows].
    """
    _, _, parts, tile, _ = ref.shape
    rows = even.shape[1 if upright else 0]
    shares_words = ref.dtype == jnp.bfloat16 and not interpret
    for part in range(parts):
        lanes = slice(part * LANES, (part + 1) * LANES)
        values = [x[lanes] if upright else x[:, lanes] for x in (even, odd)]
        if upright and not shares_words:
            values = [x.T for x in values]
        heads = 2 * pair, 2 * pair + 1
        if interpret:
            for head, x in zip(heads, values, strict=False):
                ref[pl.ds(row, rows), head // tile, part, head % tile, :] = x.astype(ref.dtype)
        elif shares_words:
            words = pltpu.pack_elementwise(values, packed_dtype=jnp.bfloat16).astype(jnp.int32)
            words = words.T if upright else words
            _words(ref)[_strided(ref, 2 * pair, part, 2, row, rows), :] = words
        else:
            for head, x in zip(heads, values, strict=False):
                ref.reshape(-1, LANES)[_strided(ref, head, part, 1, row, rows), :] = x


def split_queries(plan: Plan, q_refs, queries_ref):
    """queries_ref [heads, block_q, d] = q_refs, equal parts of the heads in "bshd" order."""
    heads = plan.tiles.heads // len(q_refs)
    for head in range(0, plan.tiles.heads, 2):
        pair = load_pair(q_refs[head // heads], head % heads // 2, plan.interpret)
        for i, x in enumerate(pair):
            queries_ref[head + i] = x.astype(queries_ref.dtype)


def store_heads(plan: Plan, out_ref, first, heads: list, row):
    """Writes float32 [dv, rows] of the heads from `first` to out_ref, in stored order."""
    count = heads[0].shape[1]
    if plan.out_form == "bshd":
        if plan.head_tiles > 1:
            out_ref, first = out_ref.at[first // SUBLANES], first % SUBLANES
        out_ref = out_ref.at[pl.ds(row, count)]
        store_pair(out_ref, first // 2, 0, *heads, plan.interpret, upright=True)
        return
    rows = pl.ds(row, count)
    for i, x in enumerate(heads):
        if plan.out_form == "bhds":
            out_ref[first + i, :, rows] = x.astype(out_ref.dtype)
        else:
            out_ref[first + i, rows, :] = x.T.astype(out_ref.dtype)


def _pieces(plan: Plan, form: str, start):
    """(first key in HBM, first row in the buffer, rows) of a block that begins at key `start`."""
    size, sk = plan.tiles.block_k, plan.shape.sk
    if sk % size == 0 and not plan.shifts_keys:
        return pl.multiple_of(start, LANES), 0, size
    skipped = jnp.maximum(-start, 0)
    count = jnp.minimum(size, sk - start) - skipped
    # HBM and VMEM hold whole tiles, so on a device a DMA may end past the last key.
    unit = 1 if plan.interpret else {"bshd": 1, "bhsd": SUBLANES, "bhds": LANES}[form]
    count = pl.multiple_of((count + unit - 1) & -unit, unit)
    return pl.multiple_of(start + skipped, LANES), pl.multiple_of(skipped, LANES), count


def key_copy(plan: Plan, form: str, src, buf, sem, batch, head, used: int, start):
    """DMA of one block of k or v."""
    first, offset, count = _pieces(plan, form, start)
    rows, local = pl.ds(first, count), pl.ds(offset, count)
    if form == "bshd":
        tiles, tile = buf.shape[1], buf.shape[3]
        first_tile = jax.lax.div(head, tile) if tiles * tile < plan.shape.hkv else 0
        return pltpu.make_async_copy(
            src.at[batch, rows, pl.ds(first_tile, tiles)], buf.at[local], sem
        )
    heads = pl.ds(head, used)
    if form == "bhsd":
        return pltpu.make_async_copy(src.at[batch, heads, rows], buf.at[:, local], sem)
    return pltpu.make_async_copy(src.at[batch, heads, :, rows], buf.at[:, :, local], sem)


def kv_copies(plan: Plan, refs, batch, group, block, slot, length):
    """DMAs that bring one block of keys and values into `slot`."""
    head = plan.first_kv_head(group)
    start = block * plan.tiles.block_k + plan.key_shift(length)
    return [
        key_copy(
            plan,
            form,
            src,
            buf.at[slot],
            refs.kv_sem.at[i, slot],
            batch,
            head,
            plan.kv_heads,
            start,
        )
        for i, (form, src, buf) in enumerate(
            ((plan.k_form, refs.k, refs.k_ring), (plan.v_form, refs.v, refs.v_ring))
        )
    ]


def split_heads(plan: Plan, form: str, ring, slot, split, first_head, upright: bool = False):
    """Writes the heads in use of a block to split [heads, block_k, width], or, upright,
    [heads, width, block_k]."""
    src, split, used = ring.at[slot], split.at[slot], plan.kv_heads
    if form != "bshd":  # the other of these two orders

        def turn(head, _):
            split[head] = src[head].astype(jnp.float32).T.astype(split.dtype)
            return 0

        jax.lax.fori_loop(0, used, turn, 0)
        return
    staged = src.shape[1] * src.shape[3]

    def copy_from(inner: int):
        for head in range(inner // 2 * 2, inner + used, 2):
            pair = load_pair(src, head // 2, plan.interpret, upright)
            for i in range(2):
                if inner <= head + i < inner + used:
                    split[head + i - inner] = pair[i].astype(split.dtype)

    if staged == used:
        copy_from(0)
        return
    inner = jax.lax.rem(first_head, staged)
    for start in range(0, staged, used):
        pl.when(inner == start)(functools.partial(copy_from, start))


def zero_columns(ref, low, high):
    """Zeroes the keys of ref [heads, width, keys] outside [low, high).

    A hidden value times a probability of 0 is NaN if the value is.
    """
    key = jax.lax.broadcasted_iota(jnp.int32, ref.shape[1:], 1)

    def head_body(head, _):
        x = ref[head].astype(jnp.float32)
        ref[head] = jnp.where((key >= low) & (key < high), x, 0).astype(ref.dtype)
        return 0

    jax.lax.fori_loop(0, ref.shape[0], head_body, 0)


def ring_shapes(plan: Plan):
    """VMEM shapes of (k_ring, v_ring, k_split, v_split); no split where k is stored as rows or v
    as columns."""
    shape, size, slots = plan.shape, plan.tiles.block_k, plan.tiles.slots
    rings, splits = [], []
    for form, width, wanted in ((plan.k_form, shape.d, "bhsd"), (plan.v_form, shape.dv, "bhds")):
        used = plan.kv_heads
        staged = tiling.staged_heads(shape.hkv, used) if form == "bshd" else used
        rings.append((slots, *block_shape(form, staged, size, width)))
        split = slots, *block_shape(wanted, used, size, width)
        splits.append(None if form == wanted else split)
    return (*rings, *splits)
