"""The end of a tile of forward attention: out and lse from acc, l and m."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, SUBLANES
from . import blocks
from .plan import Plan

_LN2 = math.log(2.0)
_LEAST_SUM, _GREATEST_SUM = 2.0**-80, 2.0**100  # of 2^(s - m): outside, `m` was a poor guess
_LOWEST = -1e30
_TINY = 2.0**-100  # a divisor for rows that see nothing: their acc is 0


def finish(plan: Plan, refs, tile, out):
    """Writes out and lse of a tile; returns whether it must be done again.

    Sums and maxima of the heads meet in one register, a head per lane: lse and the test of the sums
    cost the heads together what one head would.
    """
    sinks = _sinks_by_lane(plan, refs, tile)

    def row_body(i, doubt):
        row = pl.multiple_of(i * LANES, LANES)
        query = tile.q_id * plan.tiles.block_q + row
        exists = None
        if plan.shape.sq % plan.tiles.block_q:
            at = query + jax.lax.broadcasted_iota(jnp.int32, (LANES, LANES), 0)
            exists = at < plan.shape.sq
        total, m, broken = _store_rows(plan, refs, tile, out, row, exists)
        _store_lse(refs, row, total, m, sinks)
        fine = (total >= _LEAST_SUM) & (total <= _GREATEST_SUM) | (m == -jnp.inf)
        fine |= jax.lax.broadcasted_iota(jnp.int32, fine.shape, 1) >= plan.tiles.heads
        if exists is not None:
            fine |= ~exists
        worst = jnp.where(fine, 0, 1).reshape(-1, SUBLANES, LANES).max(0)
        return jnp.maximum(doubt, jnp.maximum(worst, jnp.where(broken * 0.0 == 0.0, 0, 1)))

    none = jnp.zeros((SUBLANES, LANES), jnp.int32)
    return jnp.max(jax.lax.fori_loop(0, plan.tiles.block_q // LANES, row_body, none))


def _store_rows(plan: Plan, refs, tile, out, row, exists):
    """Writes out for some rows; (sums, maxima, sum of all of out), the former with a head a lane.

    The last is finite unless some value is not (or, seldom, for huge values).
    """
    wide = LANES, LANES
    lane = jax.lax.broadcasted_iota(jnp.int32, wide, 1)
    at_rows = pl.ds(row, LANES)

    def heads_from(first, carry, count: int):
        totals, tops, broken = carry
        outs = []
        for head in (first + i for i in range(count)):
            total, m = refs.l[head, at_rows], refs.m[head, at_rows]
            total = jnp.broadcast_to(jnp.sum(total, axis=1, keepdims=True), wide)
            totals = jnp.where(lane == head, total, totals)
            tops = jnp.where(lane == head, m, tops)
            if plan.has_sinks:
                sink = refs.sinks[tile.group * plan.tiles.heads + head]
                total = total + jnp.exp2(sink - jnp.maximum(m, _LOWEST))  # both may be -inf
            factor = 1.0 / jnp.maximum(total, _TINY)
            parts = []
            for i in range(0, plan.shape.dv, LANES):
                lanes = min(LANES, plan.shape.dv - i)
                part = refs.acc[head, at_rows, i : i + lanes] * factor[:, :lanes]
                parts.append(part)
                if exists is not None:
                    part = jnp.where(exists[:, :lanes], part, 0.0)
                part = part.reshape(-1, SUBLANES, lanes).sum(0)
                broken = broken + jnp.pad(part, ((0, 0), (0, LANES - lanes)))
            outs.append(jnp.concatenate(parts, axis=1))
        blocks.store_heads(plan, out, first, outs, row)
        return totals, tops, broken

    carry = jnp.ones(wide), jnp.zeros(wide), jnp.zeros((SUBLANES, LANES))
    if plan.out_form == "bshd":  # strided stores want the head to be known
        for first in range(0, plan.tiles.heads, 2):
            carry = heads_from(first, carry, 2)
        return carry
    return jax.lax.fori_loop(
        0, plan.tiles.heads, lambda head, carry: heads_from(head, carry, 1), carry
    )


def _sinks_by_lane(plan: Plan, refs, tile):
    """float32 [1, LANES] sinks of the tile's heads, or None."""
    if not plan.has_sinks:
        return None
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)

    def head_body(head, sinks):
        return jnp.where(lane == head, refs.sinks[tile.group * plan.tiles.heads + head], sinks)

    return jax.lax.fori_loop(0, plan.tiles.heads, head_body, jnp.zeros((1, LANES)))


def _store_lse(refs, row, total, m, sinks):
    """lse of some rows from sums and maxima with a head a lane."""
    sees = ~(total <= 0)  # or is NaN
    if sinks is not None:
        top = jnp.maximum(m, sinks)
        total = jnp.where(sees, total * jnp.exp2(m - top) + jnp.exp2(sinks - top), total)
        m = top
    lse = jnp.where(sees, m * _LN2 + jnp.log(total), -jnp.inf)
    refs.lse[:, pl.ds(row, LANES)] = lse.T[: refs.lse.shape[0]]


def _out_copies(plan: Plan, refs, index, slot):
    """DMAs of the heads of a finished tile."""
    batch, group, q_id = plan.split_tile(index)
    rows, tiles = plan.tiles.block_q, plan.head_tiles
    start = pl.multiple_of(q_id * rows, rows)
    count = rows
    if plan.shape.sq > rows and plan.shape.sq % rows:
        count = jnp.minimum(rows, plan.shape.sq - start)
    return [
        pltpu.make_async_copy(
            refs.out_buf.at[slot, i, pl.ds(0, count), 0],
            refs.out.at[batch, pl.ds(start, count), group * tiles + i],
            refs.out_sem.at[slot],
        )
        for i in range(tiles)
    ]


def await_out(plan: Plan, refs, index, slot):
    for copy in _out_copies(plan, refs, index, slot):
        copy.wait()


def send_out(plan: Plan, refs, step, index, slot, is_last):
    """Starts the DMAs of a finished tile; they have ended when the last tile has."""
    for copy in _out_copies(plan, refs, index, slot):
        copy.start()

    @pl.when(is_last)
    def _():
        pl.when(step > 0)(lambda: await_out(plan, refs, index - 1, 1 - slot))
        await_out(plan, refs, index, slot)
