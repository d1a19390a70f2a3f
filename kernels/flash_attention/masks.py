"""Which queries see which keys: scalar tests on blocks and vector masks inside them."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...tpu_runtime import LANES
from .plan import Plan, chunk_count
from .tiling import CHUNK

TAIL = 16  # the body of a last block that is not full, see `Plan.tail_keys`


@dataclasses.dataclass(frozen=True)
class Place:
    """Scalars that say where a block of keys stands for a block of queries."""

    batch: jax.Array
    q_id: jax.Array  # query block
    block: jax.Array  # block of keys
    first_query: jax.Array  # index of the first query
    first_position: jax.Array  # its key position (implicit positions)
    first_key: jax.Array  # may be negative
    length: jax.Array | int  # valid keys
    slot: jax.Array | int = 0  # of the ring, where the block lies

    @classmethod
    def at(cls, plan: Plan, batch, q_id, block, length, slot=0) -> Place:
        first_query = q_id * plan.tiles.block_q
        return cls(
            batch,
            q_id,
            block,
            first_query,
            first_query + plan.offset(length),
            block * plan.tiles.block_k + plan.key_shift(length),
            length,
            slot,
        )


def chunk_bounds(ids: jax.Array) -> jax.Array:  # int32 [b, s] -> [b * 2 * chunks]
    """Least and greatest id of every CHUNK rows, flat, for SMEM."""
    b, s = ids.shape
    padded = jnp.pad(ids, ((0, 0), (0, chunk_count(s) * CHUNK - s)), mode="edge")
    chunks = padded.reshape(b, -1, CHUNK)
    return jnp.stack([chunks.min(-1), chunks.max(-1)], 1).reshape(-1)


def strip_hulls(plan: Plan, q_ids: dict, kv_ids: dict) -> jax.Array:
    """int32 [b * 2 * strips], flat, for SMEM: the first chunk of LANES keys that some of LANES
    queries may see by ids, and the one past the last.

    q_ids, kv_ids: "segment" or "position" -> int32 [b, s].
    """
    some = True
    for kind in q_ids:
        (q_low, q_high), (k_low, k_high) = (_lane_bounds(x[kind]) for x in (q_ids, kv_ids))
        q_low, q_high, k_low, k_high = (
            q_low[:, :, None],
            q_high[:, :, None],
            *(x[:, None] for x in (k_low, k_high)),
        )
        if kind == "segment":
            some &= (k_low <= q_high) & (k_high >= q_low)
            continue
        if plan.shape.right >= 0:
            some &= k_low <= q_high + plan.shape.right
        if plan.shape.left >= 0:
            some &= k_high >= q_low - plan.shape.left
    shape = plan.b, -(-plan.shape.sq // LANES), -(-plan.shape.sk // LANES)
    some = jnp.broadcast_to(some, shape)
    chunk = jax.lax.broadcasted_iota(jnp.int32, shape, 2)
    first = jnp.where(some, chunk, shape[2]).min(2)
    stop = jnp.where(some, chunk + 1, 0).max(2)
    return jnp.stack([first, stop], 1).reshape(-1)


def _lane_bounds(ids: jax.Array):  # [b, s] -> twice [b, chunks]
    """Least and greatest id of every LANES rows."""
    padded = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % LANES)), mode="edge")
    chunks = padded.reshape(ids.shape[0], -1, LANES)
    return chunks.min(2), chunks.max(2)


def _bounds(ref, length: int, batch, first, count: int):
    """(least, greatest) id of `count` rows from row `first`, read from `chunk_bounds`."""
    chunks = chunk_count(length)
    base = batch * 2 * chunks
    first_chunk = jax.lax.div(first, CHUNK)
    low = high = None
    for i in range(max(1, count // CHUNK)):
        chunk = jnp.minimum(first_chunk + i, chunks - 1)
        at_low, at_high = ref[base + chunk], ref[base + chunks + chunk]
        low = at_low if low is None else jnp.minimum(low, at_low)
        high = at_high if high is None else jnp.maximum(high, at_high)
    return low, high


def id_state(plan: Plan, refs, place: Place, row, rows: int, col, cols: int):
    """(some pair may be visible, every pair is visible) by segment ids and explicit positions."""
    some = every = jnp.bool_(True)
    query, key = place.first_query + row, place.first_key + col
    sizes = plan.shape.sq, plan.shape.sk
    if plan.has_segments:
        q_low, q_high = _bounds(refs.q_segment_bounds, sizes[0], place.batch, query, rows)
        k_low, k_high = _bounds(refs.kv_segment_bounds, sizes[1], place.batch, key, cols)
        some &= (k_low <= q_high) & (k_high >= q_low)
        every &= (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    if plan.has_positions and plan.has_band:
        q_low, q_high = _bounds(refs.q_position_bounds, sizes[0], place.batch, query, rows)
        k_low, k_high = _bounds(refs.kv_position_bounds, sizes[1], place.batch, key, cols)
        if plan.shape.right >= 0:
            some &= k_low <= q_high + plan.shape.right
            every &= k_high <= q_low + plan.shape.right
        if plan.shape.left >= 0:
            some &= k_high >= q_low - plan.shape.left
            every &= k_low >= q_high - plan.shape.left
    return some, every


def all_seen(plan: Plan, refs, place: Place, row, rows: int, col, cols: int):
    """Whether some queries, in one chunk, see all of up to CHUNK keys of a block; seldom False
    where they do. Not by the boolean mask."""
    first = place.first_key + col
    every = (first >= 0) & (first + cols <= place.length)
    if plan.has_band and not plan.has_positions:
        gap = first - place.first_position - row
        if plan.shape.right >= 0:
            every &= gap + cols - 1 <= plan.shape.right
        if plan.shape.left >= 0:
            every &= gap - rows + 1 >= -plan.shape.left
    if plan.has_ids:
        for key in (col, col + cols - 1):
            every &= id_state(plan, refs, place, row, rows, key, 1)[1]
    return every


def _mask_state(plan: Plan, refs, place: Place):
    """0 empty, 1 partial, 2 full: the boolean mask in a block, over all heads."""
    batch = place.batch if plan.mask_batch > 1 else 0
    row = batch * plan.num_q + place.q_id
    return refs.mask_states[row * plan.num_k + place.block]


def is_visible(plan: Plan, refs, place: Place):
    """Whether a block within `Plan.block_range` may hold a visible pair."""
    visible = jnp.bool_(True)
    if plan.has_ids:
        some, _ = id_state(plan, refs, place, 0, plan.tiles.block_q, 0, plan.tiles.block_k)
        visible &= some
    if plan.mask_batch:
        visible &= _mask_state(plan, refs, place) > 0
    return visible


def needs_bounds(plan: Plan) -> bool:
    """Whether keys past the end must be masked: a causal band hides them from valid queries."""
    return plan.shape.right != 0 or plan.has_positions


def body_of(plan: Plan, refs, place: Place):
    """0: the general body, always if `Plan.by_strips`; 1: no mask at all; 2 + n: the n-th of
    `Plan.partial_rels`; TAIL."""
    if plan.by_strips:
        return jnp.int32(0)
    size, rows = plan.tiles.block_k, plan.tiles.block_q
    clean = place.first_key >= 0
    if needs_bounds(plan):
        clean &= place.first_key + size <= place.length
    if plan.mask_batch:
        clean &= _mask_state(plan, refs, place) == 2
    full = clean
    if plan.has_band and not plan.has_positions:
        gap = place.first_key - place.first_position
        if plan.shape.right >= 0:
            full &= gap + size - 1 <= plan.shape.right
        if plan.shape.left >= 0:
            full &= gap >= rows - 1 - plan.shape.left
    body = jnp.where(full, 1, 0)
    rel = place.first_key - place.first_query - plan.aligned_offset(place.length)
    for i, partial in enumerate(plan.partial_rels):
        body = jnp.where(clean & (rel == partial) & ~full, 2 + i, body)
    if plan.tail_keys:
        body = jnp.where(place.block == plan.num_k - 1, TAIL, body)
    return body


def band_mask(plan: Plan, place: Place, row, rows: int, col, cols: int):
    """bool [cols, rows]: the causal or windowed band, or None."""
    if not plan.has_band or plan.has_positions:
        return None
    key, query = (jax.lax.broadcasted_iota(jnp.int32, (cols, rows), axis) for axis in (0, 1))
    delta, gap = key - query, place.first_position - place.first_key + row - col
    seen = None
    if plan.shape.right >= 0:
        seen = delta <= gap + plan.shape.right
    if plan.shape.left >= 0:
        right = delta >= gap - plan.shape.left
        seen = right if seen is None else seen & right
    return seen


def general_mask(plan: Plan, refs, place: Place, row, rows: int, col, cols: int, low=0):
    """bool [cols, rows] of everything that does not depend on the head.

    low: first key that counts.
    """
    terms = [band_mask(plan, place, row, rows, col, cols)]
    key = place.first_key + col + jax.lax.broadcasted_iota(jnp.int32, (cols, rows), 0)
    terms.append((key >= low) & (key < place.length))

    def pair(columns, ids):
        column = columns[place.slot, pl.ds(col, cols), :]
        return jnp.concatenate([column] * (rows // LANES), axis=1), ids[0, :, pl.ds(row, rows)]

    if plan.has_segments:
        other, query = pair(refs.kv_segment_cols, refs.q_segments)
        terms.append(query == other)
    if plan.has_positions and plan.has_band:
        other, query = pair(refs.kv_position_cols, refs.q_positions)
        if plan.shape.right >= 0:
            terms.append(other <= query + plan.shape.right)
        if plan.shape.left >= 0:
            terms.append(other >= query - plan.shape.left)
    seen = None
    for term in terms:
        if term is not None:
            seen = term if seen is None else seen & term
    return seen


def spread_column(ref, column_ref, rows: int, first=0):
    """column_ref [rows, LANES] = ref [1, 1, from first] turned upright, repeated in all lanes."""
    for i in range(0, rows, LANES):
        part = jnp.broadcast_to(ref[0, :, pl.ds(first + i, LANES)], (LANES, LANES))
        column_ref[i : i + LANES] = part.T


def chunk_range(plan: Plan, place: Place, row, rows: int, cols: int):
    """Chunks of `cols` keys of a block that `rows` queries from `row` may see, by position."""
    low, high = -place.first_key, place.length - place.first_key
    if plan.has_band and not plan.has_positions:
        gap = place.first_position - place.first_key + row
        if plan.shape.left >= 0:
            low = jnp.maximum(low, gap - plan.shape.left)
        if plan.shape.right >= 0:
            high = jnp.minimum(high, gap + rows + plan.shape.right)
    size = plan.tiles.block_k
    low, high = jnp.clip(low, 0, size), jnp.clip(high, 0, size)
    return jax.lax.div(low, cols), jax.lax.div(high + cols - 1, cols)


def strip_range(plan: Plan, refs, place: Place, row, rows: int):
    """Chunks of LANES keys of a block that `rows` queries may see: (first, past the last)."""
    first, stop = chunk_range(plan, place, row, rows, LANES)
    if plan.has_ids:
        strips = -(-plan.shape.sq // LANES)
        strip = jax.lax.div(place.first_query + row, LANES)
        base = place.batch * 2 * strips
        at = [base + jnp.minimum(strip + i, strips - 1) for i in range(rows // LANES)]
        chunk = jax.lax.div(place.first_key, LANES)
        low = functools.reduce(jnp.minimum, [refs.hulls[i] for i in at])
        high = functools.reduce(jnp.maximum, [refs.hulls[i + strips] for i in at])
        first, stop = jnp.maximum(first, low - chunk), jnp.minimum(stop, high - chunk)
    return first, stop


def mask_block_states(mask: jax.Array, block_q: int, block_k: int) -> jax.Array:
    """int32 [mb * num_q * num_k] of a mask [mb, mh, sq, sk]: 0 empty, 1 partial, 2 full."""
    mb, _, sq, sk = mask.shape
    pad = ((0, 0), (0, -sq % block_q), (0, -sk % block_k))
    some, every = mask.any(1), mask.all(1)

    def blocks(x, fill):
        x = jnp.pad(x, pad, constant_values=fill)
        return x.reshape(mb, -1, block_q, x.shape[2] // block_k, block_k)

    some = blocks(some, False).any((2, 4))
    every = blocks(every, True).all((2, 4))
    return (some.astype(jnp.int32) + every).reshape(-1)
