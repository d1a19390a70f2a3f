"""One grid step of forward attention: a block of queries against all keys that it sees."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES
from . import blocks, bodies, epilogue, masks
from .masks import Place
from .plan import Plan

_CURSOR, _AGAIN, _SLOT = range(3)  # slot filled last; tile to be done again; slot after a restart
_NAME, _COMING, _SPLIT = range(3)  # id of the block in a slot; 1 while its DMA runs; 1 once split
_FAST, _RESTART, _SAFE = range(3)  # modes of a tile


@dataclasses.dataclass(frozen=True)
class _Refs:
    q: tuple[jax.Ref, ...]  # VMEM, one block in its stored order, or one of every 8 heads
    k: jax.Ref  # HBM
    v: jax.Ref  # HBM
    out: jax.Ref  # VMEM, one block in its stored order; HBM if there is an out_buf
    lse: jax.Ref  # VMEM [heads, block_q]
    queries: jax.Ref | None  # [heads, block_q, d], or q itself if that is head-major in any order
    acc: jax.Ref  # float32 [heads, dv, block_q]
    l: jax.Ref  # float32 [heads, SUBLANES, block_q] sums of 2^(s - m), still apart by sublane
    m: jax.Ref  # float32 [heads, SUBLANES, block_q] equal in all sublanes
    k_ring: jax.Ref  # [slots, block] in stored order
    v_ring: jax.Ref
    kv_sem: jax.Ref  # [2, slots]
    ring: jax.Ref  # SMEM [3, slots] see _NAME and the like
    state: jax.Ref  # SMEM [4], see _CURSOR and the like, bodies.LIVE
    out_buf: jax.Ref | None = None  # [2, tiles of heads, block of 8 heads in stored order]
    out_sem: jax.Ref | None = None  # [2]
    k_split: jax.Ref | None = None  # [slots, kv_heads, block_k, d] unless stored so
    v_split: jax.Ref | None = None  # [slots, kv_heads, dv, block_k] unless stored so
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
    hulls: jax.Ref | None = None  # SMEM, see masks.strip_hulls
    seen: jax.Ref | None = None  # VMEM int32 [keys, rows], see bodies.masked_body
    kv_segment_cols: jax.Ref | None = None  # VMEM [slots, block_k, LANES]
    kv_position_cols: jax.Ref | None = None
    mask: jax.Ref | None = None  # HBM int8 [mb, mh, keys, rows], whole blocks
    mask_states: jax.Ref | None = None  # SMEM, see masks.mask_block_states
    mask_buf: jax.Ref | None = None  # VMEM int8 [1 or heads, block_k, block_q]
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
        found = jnp.where(refs.ring[_NAME, i] == name, i, found)

    def after(slot):
        return jnp.where(slot + 1 == slots, 0, slot + 1)

    fresh = after(refs.state[_CURSOR])
    fresh = jnp.where(fresh == busy, after(fresh), fresh)
    slot = jnp.where(found >= 0, found, fresh)

    is_new = wanted & (found < 0)

    @pl.when(is_new)
    def _():
        for copy in blocks.kv_copies(plan, refs, tile.batch, tile.group, block, slot, tile.length):
            copy.start()

    for row, value in ((_NAME, name), (_COMING, 1), (_SPLIT, 0)):
        refs.ring[row, slot] = jnp.where(is_new, value, refs.ring[row, slot])
    refs.state[_CURSOR] = jnp.where(is_new, slot, refs.state[_CURSOR])
    return slot


def _arrive(plan: Plan, refs: _Refs, tile: _Tile, block, slot):
    """Waits for the DMAs of `_fetch`, if they are under way."""

    @pl.when(refs.ring[_COMING, slot] == 1)
    def _():
        for copy in blocks.kv_copies(plan, refs, tile.batch, tile.group, block, slot, tile.length):
            copy.wait()

    refs.ring[_COMING, slot] = 0


def _heads_of_block(plan: Plan, refs: _Refs, tile: _Tile, place: Place, slot):
    """(k [kv_heads, block_k, d], v [kv_heads, dv, block_k]); values past the keys are zero."""
    first_head = plan.first_kv_head(tile.group)

    @pl.when(refs.ring[_SPLIT, slot] == 0)
    def _():
        if refs.k_split is not None:
            blocks.split_heads(plan, plan.k_form, refs.k_ring, slot, refs.k_split, first_head)
        if refs.v_split is not None:
            blocks.split_heads(plan, plan.v_form, refs.v_ring, slot, refs.v_split, first_head, True)
        for ids, columns in (
            (refs.kv_segments, refs.kv_segment_cols),
            (refs.kv_positions, refs.kv_position_cols),
        ):
            if ids is not None:
                first_key = pl.multiple_of(place.first_key, LANES)
                masks.spread_column(ids, columns.at[slot], plan.tiles.block_k, first_key)

    refs.ring[_SPLIT, slot] = 1
    k = (refs.k_ring if refs.k_split is None else refs.k_split).at[slot]
    v = (refs.v_ring if refs.v_split is None else refs.v_split).at[slot]
    size = plan.tiles.block_k

    @pl.when((place.first_key < 0) | (place.first_key + size > place.length))
    def _():
        blocks.zero_columns(v, -place.first_key, place.length - place.first_key)

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
            pl.ds(pl.multiple_of(block * keys, keys), keys),
            pl.ds(pl.multiple_of(tile.q_id * rows, rows), rows),
        ],
        refs.mask_buf,
        refs.mask_sem.at[0],
    )
    copy.start()
    copy.wait()


def _reset(refs: _Refs):
    refs.acc[...] = jnp.zeros_like(refs.acc)
    refs.l[...] = jnp.zeros_like(refs.l)
    refs.m[...] = jnp.full_like(refs.m, -jnp.inf)


def _clear(plan: Plan, refs: _Refs, row):
    """acc, l and m of a strip that sees nothing."""
    rows = pl.ds(row, bodies.strip_rows(plan))

    def head_body(head, _):
        bodies.clear(plan, refs, head, rows)
        return 0

    jax.lax.fori_loop(0, plan.tiles.heads, head_body, 0)


def _all_live(plan: Plan) -> int:
    return (1 << plan.tiles.block_q // bodies.strip_rows(plan)) - 1


def _for_dead_strips(plan: Plan, refs: _Refs, act):
    """act(row) for each strip that no body has met yet."""
    live, count = refs.state[bodies.LIVE], bodies.strip_rows(plan)

    @pl.when(live != _all_live(plan))
    def _():
        def body(strip, _):
            dead = (live >> strip) & 1 == 0
            pl.when(dead)(lambda: act(pl.multiple_of(strip * count, count)))
            return 0

        jax.lax.fori_loop(0, plan.tiles.block_q // count, body, 0)


def _run_unmasked(plan: Plan, refs: _Refs, k_ref, v_ref, place: Place, body, is_first):
    """The bodies that touch each strip of a block: full, tail and band."""

    @pl.when((body >= 1) & ~is_first)
    def _():
        _for_dead_strips(plan, refs, lambda row: bodies.begin_strip(plan, refs, k_ref, place, row))

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

    live = refs.state[bodies.LIVE]
    refs.state[bodies.LIVE] = jnp.where(body >= 1, _all_live(plan), live)


def _run_block(plan: Plan, refs: _Refs, k_ref, v_ref, place: Place, tile: _Tile, body, is_first):
    """Runs the body with number `body`, see masks.body_of; -1 is the safe one."""

    if not plan.by_strips:
        _run_unmasked(plan, refs, k_ref, v_ref, place, body, is_first)

    @pl.when(body <= 0)
    def _():
        if plan.mask_batch:
            _load_mask(plan, refs, tile, place.block)

    pl.when(body == 0)(lambda: bodies.masked_body(plan, refs, k_ref, v_ref, place))
    pl.when(body < 0)(lambda: bodies.safe_body(plan, refs, k_ref, v_ref, place))


def run(*args, plan: Plan, fields: tuple[str, ...]):
    """Grid (core, tile): a tile is block_q queries of `heads` query heads.

    Tiles run in the order batch, head group, query block. q blocks come through the grid; blocks of
    keys are fetched by hand, the next one (or the first one of the next tile) while one is worked
    on, only those that hold visible pairs, and not again while they are in the ring, where their
    heads are brought apart once. acc, l and m of the tile stay in VMEM; one grid step alone writes
    an out block (through the grid, or by DMA where the heads are in parts) and an lse block, so
    nothing races.

    The exponent is not rescaled on the way: 2^(s - m) with a guess of m from the first LANES keys
    is as exact as with the true maximum unless the sum of a row leaves [2^-80, 2^100] or a hidden
    value is not finite. A tile where that happens is done again with a running maximum.

    Static estimates as multiples of the floor, v5e / v6e, bfloat16, and what bounds them:
    causal 1 x 32/8 x 4096 x 128: 1.18 / 1.54 of 698 / 224 us, the masked half of the blocks on the
    diagonal and the schedule around the MXU (3447 cycles for 3072 of it on v6e), and
    1 x 28/4 x 32768 x 128: 1.04 / 1.27 of 39.1 / 12.5 ms, the latter; 4 documents in the former:
    1.89 / 2.97 of 186 / 60 us, edges of documents and of the diagonal (1.5 pairs for a visible
    one); window 1024, 1 x 16/8 x 8192 x 256: 1.46 / 2.34 of 654 / 142 us, edges (1.25), masks,
    adding to acc, bringing heads apart.
    """
    given = {"queries": None, **dict(zip(fields, args, strict=False))}
    q = tuple(given.pop(f"q{i}").at[0] for i in range(plan.head_tiles))
    refs = _Refs(q=q, **given)
    refs = dataclasses.replace(
        refs,
        out=refs.out if refs.out_buf is not None else refs.out.at[0],
        lse=refs.lse.at[0, 0],
        queries=refs.q[0] if refs.queries is None else refs.queries,
    )
    step = pl.program_id(1)
    index = pl.program_id(0) * plan.core_tiles + step

    # Selects, as scalar stores under a condition are opaque to static estimates of the schedule.
    keep = step > 0
    refs.state[_CURSOR] = jnp.where(keep, refs.state[_CURSOR], 0)
    for i in range(plan.tiles.slots):
        for row, value in ((_NAME, -1), (_COMING, 0), (_SPLIT, 0)):
            refs.ring[row, i] = jnp.where(keep, refs.ring[row, i], value)

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
    out = refs.out
    if refs.out_buf is not None:
        out_slot = jax.lax.rem(step, 2)
        out = refs.out_buf.at[out_slot]
        pl.when(step >= 2)(lambda: epilogue.await_out(plan, refs, index - 2, out_slot))
    first_slot = _fetch(plan, refs, tile, tile.first, -1)
    if plan.q_form == "bshd":
        blocks.split_queries(plan, refs.q, refs.queries)
    refs.state[_AGAIN] = 0
    refs.state[bodies.LIVE] = 0

    def run(carry):
        _, block, slot, mode = carry

        @pl.when(mode == _RESTART)
        def _():
            _restart(plan, refs, tile, following)

        slot = jnp.where(mode == _RESTART, refs.state[_SLOT], slot)
        place = Place.at(plan, tile.batch, tile.q_id, block, tile.length, slot)
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
            _for_dead_strips(plan, refs, lambda row: _clear(plan, refs, row))
            again = epilogue.finish(plan, refs, tile, out)
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
    if refs.out_buf is not None:
        epilogue.send_out(plan, refs, step, index, out_slot, is_last)


def _restart(plan: Plan, refs: _Refs, tile: _Tile, following: _Tile):
    """Begins the second pass over a tile, after the first one fetched for the next tile."""
    slot = _fetch(plan, refs, following, following.first, -1)
    pl.when(following.first < following.stop)(
        lambda: _arrive(plan, refs, following, following.first, slot)
    )
    _reset(refs)
    refs.state[bodies.LIVE] = _all_live(plan)
    refs.state[_SLOT] = _fetch(plan, refs, tile, tile.first, -1)
    refs.state[_AGAIN] = 0
