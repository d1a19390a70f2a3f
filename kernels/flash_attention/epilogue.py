"""The end of a tile of forward attention: out and lse from acc, l and m."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES
from . import blocks
from .plan import Plan

_LN2 = math.log(2.0)
_LEAST_SUM, _GREATEST_SUM = 2.0**-80, 2.0**100  # of 2^(s - m): outside, `m` was a poor guess
_LOWEST = -1e30
_TINY = 2.0**-100  # a divisor for rows that see nothing: their acc is 0


def finish(plan: Plan, refs, tile, out_ref):
    """Writes out and lse of a tile; returns whether it must be done again."""

    heads = plan.tiles.heads

    def row_body(i, doubt):
        row = pl.multiple_of(i * LANES, LANES)
        exists = None
        if plan.shape.sq % plan.tiles.block_q:
            query = tile.q_id * plan.tiles.block_q + row
            exists = query + jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1) < plan.shape.sq

        def heads_from(first, carry, count: int):
            doubt, lses = carry
            outs = []
            for head in (first + i for i in range(count)):
                out, lse, fine = _finish_head(plan, refs, tile, head, pl.ds(row, LANES))
                outs.append(out)
                at_head = jax.lax.broadcasted_iota(jnp.int32, lses.shape, 0) == head
                lses = jnp.where(at_head, lse, lses)
                if exists is not None:
                    fine |= ~exists
                doubt = jnp.maximum(doubt, jnp.where(fine, 0, 1))
            blocks.store_heads(plan, out_ref, first, outs, row)
            return doubt, lses

        carry = doubt, jnp.zeros((heads, LANES), jnp.float32)
        if plan.out_form == "bshd":  # strided stores want the head to be known
            for first in range(0, heads, 2):
                carry = heads_from(first, carry, 2)
        else:
            carry = jax.lax.fori_loop(0, heads, lambda i, carry: heads_from(i, carry, 1), carry)
        doubt, refs.lse[:, pl.ds(row, LANES)] = carry
        return doubt

    none = jnp.zeros((1, LANES), jnp.int32)
    return jnp.max(jax.lax.fori_loop(0, plan.tiles.block_q // LANES, row_body, none))


def _finish_head(plan: Plan, refs, tile, head, rows):
    """Of some queries: (out [dv, rows], lse [1, rows], whether it need not be done again)."""
    total = jnp.sum(refs.l[head, :, rows], axis=0, keepdims=True)  # [1, rows]
    m = refs.m[head, :1, rows]
    fine = (total >= _LEAST_SUM) & (total <= _GREATEST_SUM) | (m == -jnp.inf)
    sees = ~(total <= 0)  # or is NaN
    divisor, top, whole = total, m, total
    if plan.has_sinks:
        sink = refs.sinks[tile.group * plan.tiles.heads + head]
        divisor = total + jnp.exp2(sink - jnp.maximum(m, _LOWEST))  # both may be -inf
        top = jnp.maximum(m, sink)
        whole = jnp.where(sees, total * jnp.exp2(m - top) + jnp.exp2(sink - top), total)
    lse = jnp.where(sees, top * _LN2 + jnp.log(whole), -jnp.inf)
    out = refs.acc[head, :, rows] * (1.0 / jnp.maximum(divisor, _TINY))
    # The sum is finite unless some value is not (or, seldom, for huge values).
    return out, lse, fine & (jnp.abs(jnp.sum(out, axis=0, keepdims=True)) < jnp.inf)


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
