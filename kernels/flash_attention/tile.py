"""One grid step of forward attention: a block of queries against all keys that it sees."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, SUBLANES
from . import blocks, bodies, masks
from .masks import Place
from .plan import Plan

_CURSOR, _AGAIN, _SLOT = range(3)  # slot filled last; tile to be done again; slot after a restart
_FAST, _RESTART, _SAFE = range(3)  # modes of a tile
_LN2 = math.log(2.0)
_LEAST_SUM, _GREATEST_SUM = 2.0**-80, 2.0**100  # of 2^(s - m): outside, `m` was a poor guess


@dataclasses.dataclass(frozen=True)
class _Refs:
    q: jax.Ref  # VMEM, one block in its stored order
    k: jax.Ref  # HBM
    v: jax.Ref  # HBM
    out: jax.Ref  # VMEM, one block in its stored order
    lse: jax.Ref  # VMEM [heads, block_q]
    queries: jax.Ref | None  # [heads, block_q, d], the same as q if that is stored so
    acc: jax.Ref  # float32 [heads, block_q, dv]
    l: jax.Ref  # float32 [heads, block_q, LANES] sums of 2^(s - m), still apart by lane
    m: jax.Ref  # float32 [heads, block_q, LANES] equal in all lanes
    totals: jax.Ref  # float32 [block_q, LANES] denominators, a head per lane
    tops: jax.Ref  # float32 [block_q, LANES] their m
    k_ring: jax.Ref  # [slots, block] in stored order
    v_ring: jax.Ref
    kv_sem: jax.Ref  # [2, slots]
    ring: jax.Ref  # SMEM [2, slots] id of the block in a slot; 1 while its DMA is under way
    state: jax.Ref  # SMEM [3], see _CURSOR and the like
    k_split: jax.Ref | None = None  # [kv_heads, block_k, d] for "bshd"
    v_split: jax.Ref | None = None
    sinks: jax.Ref | None = None  # SMEM [hq], in units of log2
    lengths: jax.Ref | None = None  # SMEM [b]
    q_segments: jax.Ref | None = None  # VMEM [1, 1, block_q]
    kv_segments: jax.Ref | None = None  # VMEM [1, 1, keys]
    q_positions: jax.Ref | None = None
    kv_positions: jax.Ref | None = None
    q_segment_bounds: jax.Ref | None = None  # SMEM, see masks.chunk_bounds
    kv_segment_bounds: jax.Ref | None = None
    q_position_bounds: jax.Ref | None = None
    kv_position_bounds: jax.Ref | None = None
    q_segment_cols: jax.Ref | None = None  # VMEM [block_q, LANES]
    q_position_cols: jax.Ref | None = None
    mask: jax.Ref | None = None  # HBM int8 [mb, mh, rows, keys], whole blocks
    mask_states: jax.Ref | None = None  # SMEM, see masks.mask_block_states
    mask_buf: jax.Ref | None = None  # VMEM int8 [1 or heads, block_q, block_k]
    mask_sem: jax.Ref | None = None


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Scalars of one grid step: a block of queries of some heads."""

    batch: jax.Array
    group: jax.Array
    q_id: jax.Array
    length: jax.Array | int
    first: jax.Array  # first visible block of keys
    stop: jax.Array  # past the last; no block if first >= stop

    @classmethod
    def at(cls, plan: Plan, refs: _Refs, index) -> _Tile:
        batch, group, q_id = plan.split_tile(index)
        length = refs.lengths[batch] if plan.has_lengths else plan.shape.sk
        first, stop = plan.block_range(q_id, length)
        first = _next_visible(plan, refs, batch, q_id, length, first, stop)
        return cls(batch, group, q_id, length, first, stop)


def _fields(tile: _Tile) -> list:
    return [getattr(tile, field.name) for field in dataclasses.fields(tile)]


def _next_visible(plan, refs, batch, q_id, length, block, stop):
    """The first block from `block` on that may hold a visible pair, or `stop`."""
    if not (plan.has_ids or plan.mask_batch):
        return block

    def is_hidden(block):
        place = Place.at(plan, batch, q_id, jnp.minimum(block, plan.num_k - 1), length)
        return (block < stop) & ~masks.is_visible(plan, refs, place)

    return jax.lax.while_loop(is_hidden, lambda block: block + 1, block)


def _fetch(plan: Plan, refs: _Refs, tile: _Tile, block, busy):
    """The slot of a block; starts its DMAs unless the block is there. Never takes slot `busy`."""
    slots = plan.tiles.slots
    name = plan.first_kv_head(tile.group) + tile.batch * plan.shape.hkv
    name = name * (plan.num_k + 2) + block
    wanted = block < tile.stop
    found = jnp.int32(-1)
    for i in range(slots):
        found = jnp.where(refs.ring[0, i] == name, i, found)

    def after(slot):
        return jnp.where(slot + 1 == slots, 0, slot + 1)

    fresh = after(refs.state[_CURSOR])
    fresh = jnp.where(fresh == busy, after(fresh), fresh)
    slot = jnp.where(found >= 0, found, fresh)

    @pl.when(wanted & (found < 0))
    def _():
        for copy in blocks.kv_copies(plan, refs, tile.batch, tile.group, block, slot, tile.length):
            copy.start()
        refs.ring[0, slot] = name
        refs.ring[1, slot] = 1
        refs.state[_CURSOR] = slot

    return slot


def _arrive(plan: Plan, refs: _Refs, tile: _Tile, block, slot):
    """Waits for the DMAs of `_fetch`, if they are under way."""

    @pl.when(refs.ring[1, slot] == 1)
    def _():
        for copy in blocks.kv_copies(plan, refs, tile.batch, tile.group, block, slot, tile.length):
            copy.wait()
        refs.ring[1, slot] = 0


def _heads_of_block(plan: Plan, refs: _Refs, tile: _Tile, place: Place, slot):
    """(k, v) refs of a block with the head first; values past the keys are zero."""
    first_head = plan.first_kv_head(tile.group)
    blocks.split_heads(plan, plan.k_form, refs.k_ring, slot, refs.k_split, first_head)
    blocks.split_heads(plan, plan.v_form, refs.v_ring, slot, refs.v_split, first_head)
    k = refs.k_ring.at[slot] if refs.k_split is None else refs.k_split
    v = refs.v_ring.at[slot] if refs.v_split is None else refs.v_split
    size = plan.tiles.block_k

    @pl.when((place.first_key < 0) | (place.first_key + size > place.length))
    def _():
        blocks.zero_rows(plan.v_form, v, -place.first_key, place.length - place.first_key)

    return k, v


def _load_mask(plan: Plan, refs: _Refs, tile: _Tile, block):
    """Brings the boolean mask of a block, for all heads of the tile or the one they share."""
    batch = tile.batch if plan.mask_batch > 1 else 0
    count = plan.tiles.heads if plan.shape.mask_heads > 1 else 1
    first = tile.group * count if count > 1 or plan.shape.mask_heads > 1 else 0
    rows, keys = plan.tiles.block_q, plan.tiles.block_k
    copy = pltpu.make_async_copy(
        refs.mask.at[
            batch,
            pl.ds(first, count),
            pl.ds(pl.multiple_of(tile.q_id * rows, rows), rows),
            pl.ds(pl.multiple_of(block * keys, keys), keys),
        ],
        refs.mask_buf,
        refs.mask_sem.at[0],
    )
    copy.start()
    copy.wait()


def _reset(refs: _Refs, m: float):
    refs.acc[...] = jnp.zeros_like(refs.acc)
    refs.l[...] = jnp.zeros_like(refs.l)
    refs.m[...] = jnp.full_like(refs.m, m)


def _run_block(plan: Plan, refs: _Refs, k_ref, v_ref, place: Place, tile: _Tile, body, is_first):
    """Runs the body with number `body`, see masks.body_of; -1 is the safe one."""
    for first in (False, True):
        here = is_first == first

        @pl.when(here & (body == 1))
        def _(first=first):
            bodies.full_body(plan, refs, k_ref, v_ref, first)

        if plan.tail_keys:

            @pl.when(here & (body == masks.TAIL))
            def _(first=first):
                bodies.full_body(plan, refs, k_ref, v_ref, first, plan.tail_keys)

        for i, rel in enumerate(plan.partial_rels):

            @pl.when(here & (body == 2 + i))
            def _(rel=rel, first=first):
                bodies.band_body(plan, refs, k_ref, v_ref, place, rel, first)

    @pl.when(body <= 0)
    def _():
        if plan.mask_batch:
            _load_mask(plan, refs, tile, place.block)

    @pl.when(body == 0)
    def _():
        pl.when(is_first)(lambda: bodies.start(plan, refs, k_ref, place))
        bodies.masked_body(plan, refs, k_ref, v_ref, place)

    pl.when(body < 0)(lambda: bodies.safe_body(plan, refs, k_ref, v_ref, place))


def _finish(plan: Plan, refs: _Refs, tile: _Tile):
    """Writes out and lse of a tile from acc, l and m; returns whether it must be done again."""
    rows, heads, step = plan.tiles.block_q, plan.tiles.heads, plan.tiles.store_step

    def some(first, doubts, count: int):
        """Heads first .. first + count - 1."""
        for row in range(0, rows, step):
            at_rows = pl.ds(row, step)
            lane = jax.lax.broadcasted_iota(jnp.int32, (step, LANES), 1)
            outs, totals, tops = [], refs.totals[at_rows], refs.tops[at_rows]
            for i in range(count):
                out, total, top, doubts = _finish_head(plan, refs, tile, first + i, row, doubts)
                outs.append(out)
                totals = jnp.where(lane == first + i, total, totals)
                tops = jnp.where(lane == first + i, top, tops)
            refs.totals[at_rows], refs.tops[at_rows] = totals, tops
            blocks.store_heads(plan, refs.out, first, outs, row)
        return doubts

    one = jnp.ones((SUBLANES, LANES), jnp.float32)
    doubts = one, one, jnp.zeros_like(one)
    if plan.out_form == "bshd":  # strided stores want the head to be known
        for first in range(0, heads, 2):
            doubts = some(first, doubts, 2)
    else:
        doubts = jax.lax.fori_loop(0, heads, lambda head, doubts: some(head, doubts, 1), doubts)
    for i in range(0, rows, LANES):
        at_rows = pl.ds(i, LANES)
        total = refs.totals[at_rows]
        lse = jnp.where(total > 0, refs.tops[at_rows] * _LN2 + jnp.log(total), -jnp.inf)
        lse = jnp.where(total == total, lse, total)
        refs.lse[:, at_rows] = lse.T[:heads]
    least, greatest, broken = doubts
    fine = (least >= _LEAST_SUM) & (greatest <= _GREATEST_SUM) & (broken == 0)
    return jnp.max(jnp.where(fine, 0, 1))


def _finish_head(plan: Plan, refs: _Refs, tile: _Tile, head, row: int, doubts):
    """(out, denominator, its m, doubts) of some rows; the denominator of a blind row is 0.

    doubts: least sum, greatest sum, and 0 or NaN if all of out is finite or not.
    """
    step = plan.tiles.store_step
    at_rows = pl.ds(row, step)
    wide = step, LANES  # one value per row stays in all lanes: broadcasts are dear
    total = jnp.broadcast_to(jnp.sum(refs.l[head, at_rows], axis=1, keepdims=True), wide)
    m, exists, judged = refs.m[head, at_rows], None, total
    if plan.shape.sq % plan.tiles.block_q:
        query = tile.q_id * plan.tiles.block_q + row + jax.lax.broadcasted_iota(jnp.int32, wide, 0)
        exists = query < plan.shape.sq
        judged = jnp.where(exists, total, 1.0)
    sees, share = ~(total <= 0), 1.0  # sees: or is NaN
    if plan.has_sinks:
        sink = refs.sinks[tile.group * plan.tiles.heads + head]
        top = jnp.maximum(m, sink)
        share = jnp.exp2(m - top)
        m, total = top, jnp.where(sees, total * share + jnp.exp2(sink - top), 0.0)
    factor = jnp.where(sees, share / total, 0.0)
    parts, broken = [], 0.0
    for i in range(0, plan.shape.dv, LANES):
        lanes = min(LANES, plan.shape.dv - i)
        part = refs.acc[head, at_rows, i : i + lanes] * factor[:, :lanes]
        parts.append(part)
        nothing = part * 0.0
        if exists is not None:
            nothing = jnp.where(exists[:, :lanes], nothing, 0.0)
        broken = broken + _pad_lanes(nothing.reshape(-1, SUBLANES, lanes).sum(0))
    by_tile = (-1, SUBLANES, LANES)
    return (
        jnp.concatenate(parts, axis=1),
        total,
        m,
        (
            jnp.minimum(doubts[0], judged.reshape(by_tile).min(0)),
            jnp.maximum(doubts[1], judged.reshape(by_tile).max(0)),
            doubts[2] + broken,
        ),
    )


def _pad_lanes(x):
    short = -x.shape[1] % LANES
    return jnp.pad(x, ((0, 0), (0, short))) if short else x


def run(*args, plan: Plan, fields: tuple[str, ...]):
    """Grid (core, tile): a tile is block_q queries of `heads` query heads.

    Tiles run in the order batch, head group, query block. q and out blocks come through the grid;
    blocks of keys are fetched by hand, the next one (or the first one of the next tile) while one
    is worked on, and only those that hold visible pairs. acc, l and m of the tile stay in VMEM; one
    grid step alone writes an out and an lse block, so nothing races.

    The exponent is not rescaled on the way: 2^(s - m) with a guess of m from the first LANES keys
    is as exact as with the true maximum unless the sum of a row leaves [2^-80, 2^100] or a hidden
    value is not finite. A tile where that happens is done again with a running maximum.
    """
    refs = _Refs(**{"queries": None, **dict(zip(fields, args, strict=False))})
    refs = dataclasses.replace(
        refs,
        q=refs.q.at[0],
        out=refs.out.at[0],
        lse=refs.lse.at[0, 0],
        queries=refs.q.at[0] if refs.queries is None else refs.queries,
    )
    step = pl.program_id(1)
    index = pl.program_id(0) * plan.core_tiles + step

    @pl.when(step == 0)
    def _():
        refs.state[_CURSOR] = 0
        for i in range(plan.tiles.slots):
            refs.ring[0, i] = -1
            refs.ring[1, i] = 0

    @pl.when(index < plan.num_tiles)
    def _():
        _run_tile(plan, refs, step, index)


def _run_tile(plan: Plan, refs: _Refs, step, index):
    tile = _Tile.at(plan, refs, index)
    following = _Tile.at(plan, refs, jnp.minimum(index + 1, plan.num_tiles - 1))
    is_last = (step + 1 == plan.core_tiles) | (index + 1 == plan.num_tiles)
    following = dataclasses.replace(
        following, stop=jnp.where(is_last, following.first, following.stop)
    )
    first_slot = _fetch(plan, refs, tile, tile.first, -1)
    if plan.q_form != "bhsd":
        blocks.split_queries(plan, refs.q, refs.queries)
    for ids, columns in (
        (refs.q_segments, refs.q_segment_cols),
        (refs.q_positions, refs.q_position_cols),
    ):
        if ids is not None:
            masks.spread_column(ids, columns, plan.tiles.block_q)
    refs.state[_AGAIN] = 0

    @pl.when(tile.first >= tile.stop)
    def _():
        _reset(refs, 0.0)

    def run(carry):
        _, block, slot, mode = carry

        @pl.when(mode == _RESTART)
        def _():
            _restart(plan, refs, tile, following)

        slot = jnp.where(mode == _RESTART, refs.state[_SLOT], slot)
        place = Place.at(plan, tile.batch, tile.q_id, block, tile.length)
        after = _next_visible(plan, refs, tile.batch, tile.q_id, tile.length, block + 1, tile.stop)
        more = after < tile.stop
        ahead = _Tile(
            *(
                a if a is b else jnp.where(more, a, b)
                for a, b in zip(_fields(tile), _fields(following), strict=False)
            )
        )
        next_slot = _fetch(plan, refs, ahead, jnp.where(more, after, following.first), slot)

        @pl.when(block < tile.stop)
        def _():
            _arrive(plan, refs, tile, block, slot)
            k_ref, v_ref = _heads_of_block(plan, refs, tile, place, slot)
            is_first = (block == tile.first) & (mode == _FAST)
            body = jnp.where(mode == _FAST, masks.body_of(plan, refs, place), -1)
            _run_block(plan, refs, k_ref, v_ref, place, tile, body, is_first)

        @pl.when(~more)
        def _():
            again = _finish(plan, refs, tile)
            refs.state[_AGAIN] = jnp.where(mode == _FAST, again, 0)

        again = refs.state[_AGAIN] != 0
        return (
            more | again,
            jnp.where(again & ~more, tile.first, after),
            next_slot,
            jnp.where(again & ~more, _RESTART, jnp.where(mode == _FAST, _FAST, _SAFE)),
        )

    # The loop test of a do-while loop: a tile without visible keys still writes its zeros.
    jax.lax.while_loop(
        lambda carry: carry[0], run, (jnp.bool_(True), tile.first, first_slot, jnp.int32(_FAST))
    )


def _restart(plan: Plan, refs: _Refs, tile: _Tile, following: _Tile):
    """Begins the second pass over a tile, after the first one fetched for the next tile."""
    slot = _fetch(plan, refs, following, following.first, -1)
    pl.when(following.first < following.stop)(
        lambda: _arrive(plan, refs, following, following.first, slot)
    )
    _reset(refs, -jnp.inf)
    refs.state[_SLOT] = _fetch(plan, refs, tile, tile.first, -1)
    refs.state[_AGAIN] = 0
