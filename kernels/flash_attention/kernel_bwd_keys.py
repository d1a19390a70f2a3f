"""The keys of one job of the backward: fetched once, kept in VMEM, and their dk and dv written."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, SUBLANES
from . import blocks
from .kernel_bwd_plan import Plan, Step, block_range, pair_state
from .tiling import CHUNK


def for_each(count: int, act):
    if count == 1:
        act(0)
        return

    def body(i, _):
        act(i)
        return 0

    jax.lax.fori_loop(0, count, body, 0)


def zero(ref):
    ref[...] = jnp.zeros(ref.shape, ref.dtype)


def for_rows(count: int, act):
    """act(row, rows) for pieces of `count` rows: short ones, which compile fast."""
    rows = CHUNK if count % CHUNK == 0 else LANES
    for_each(count // rows, lambda i: act(pl.multiple_of(i * rows, rows), rows))


def store(form: str, ref, upright, scale: float, interpret: bool):
    """Writes upright [heads, width, rows], float32, times scale to ref in stored order."""
    heads, _, count = upright.shape

    def turn(head):
        x = upright[head] * scale
        ref[head] = (x if form == "bhds" else x.T).astype(ref.dtype)

    def turn_pairs(row, rows):
        for pair in range(heads // 2):
            values = (upright[2 * pair + i, :, pl.ds(row, rows)].T * scale for i in range(2))
            blocks.store_pair(ref.at[pl.ds(row, rows)], pair, 0, *values, interpret)

    if form == "bshd":
        for_rows(count, turn_pairs)
    else:
        for_each(heads, turn)


def copies(plan: Plan, refs, step: Step, block):
    """The DMAs of one block of keys and values."""
    size, sk = plan.tiles.block_k, _stored_keys(plan)
    key = pl.multiple_of(block * size, size)
    head, used = step.group * plan.tiles.kv_heads, plan.tiles.kv_heads
    found = []
    for i, (form, src, buf) in enumerate(
        (
            (plan.tiles.k_form, refs.k, refs.k_raw),
            (plan.tiles.v_form, refs.v, refs.v_raw),
        )
    ):
        count = size
        if sk % size:
            # HBM and VMEM hold whole tiles, so on a device a DMA may end past the last key.
            unit = 1 if plan.interpret else {"bshd": 1, "bhsd": SUBLANES, "bhds": LANES}[form]
            count = (jnp.minimum(size, sk - key) + unit - 1) & -unit
            count = pl.multiple_of(count, unit)
        rows, local = pl.ds(key, count), pl.ds(0, count)
        if form == "bshd":
            tiles, tile = buf.shape[1], buf.shape[3]
            first = jax.lax.div(head, tile) if tiles * tile < plan.shape.hkv else 0
            src, buf = src.at[step.batch, rows, pl.ds(first, tiles)], buf.at[local]
        elif form == "bhsd":
            src, buf = src.at[step.batch, pl.ds(head, used), rows], buf.at[:, local]
        else:
            src, buf = src.at[step.batch, pl.ds(head, used), :, rows], buf.at[:, :, local]
        found.append(pltpu.make_async_copy(src, buf, refs.kv_sem.at[i]))
    return found


def _stored_keys(plan: Plan) -> int:
    """Keys in HBM: short sequences are padded to whole lanes."""
    return max(plan.shape.sk, LANES)


def bring(plan: Plan, refs, step: Step, length, block):
    """Makes sure that a block of keys is in VMEM, and sends for the one that follows."""
    base = step.chunk * plan.chunk_blocks

    def start(block):
        for copy in copies(plan, refs, step, block):
            copy.start()

    def receive(_):
        coming = refs.coming[0]
        target = jnp.where(coming >= 0, coming, block)
        pl.when(coming < 0)(lambda: start(target))
        for copy in copies(plan, refs, step, target):
            copy.wait()
        refs.coming[0] = -1
        refs.is_here[target - base] = 1
        _settle(plan, refs, step, length, target)
        return target != block

    @pl.when(refs.is_here[block - base] == 0)
    def _():
        jax.lax.while_loop(lambda more: more, receive, jnp.bool_(True))
        following = jnp.minimum(block + 1, base + plan.chunk_blocks - 1)

        @pl.when(
            (refs.is_here[following - base] == 0) & _is_wanted(plan, refs, step, length, following)
        )
        def _():
            start(following)
            refs.coming[0] = following


def _is_wanted(plan: Plan, refs, step: Step, length, block):
    """Whether a block is visible from these queries or, without ids and mask, from later ones."""
    rows, size = plan.tiles.block_q, plan.tiles.block_k
    if not (plan.has_ids or plan.mask_batch):
        first, stop = block_range(plan, step.q_id * rows, plan.shape.sq, length, step.chunk)
        return (block >= first) & (block < stop)
    wanted = jnp.bool_(False)
    for ahead in range(2):
        q_id = jnp.minimum(step.q_id + ahead, plan.num_q - 1)
        first, stop = block_range(plan, q_id * rows, rows, length, step.chunk)
        some, _ = pair_state(plan, refs, step.batch, length, q_id * rows, rows, block * size, size)
        wanted |= some & (block >= first) & (block < stop)
    return wanted


def _settle(plan: Plan, refs, step: Step, length, block):
    """Spreads a block of keys from k_raw, v_raw to where they stay; dk and dv begin at zero.

    What is not finite, or past the end, becomes zero: a query that sees a NaN has a NaN in lse or
    delta already, and others must not meet it.
    """
    size = plan.tiles.block_k
    base = pl.multiple_of((block - step.chunk * plan.chunk_blocks) * size, size)
    keys, valid = pl.ds(base, size), length - block * size

    def put(head, x, row, rows_ref, up_ref):  # x: float32 [rows, width]
        at = pl.ds(pl.multiple_of(base + row, LANES), x.shape[0])
        key = row + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        x = jnp.where((key < valid) & (jnp.abs(x) < jnp.inf), x, 0.0)
        rows_ref[head, at, :] = x.astype(rows_ref.dtype)
        if up_ref is not None:
            up_ref[head, :, at] = x.T.astype(up_ref.dtype)

    for form, raw, rows_ref, up_ref in (
        (plan.tiles.k_form, refs.k_raw, refs.k_rows, refs.k_up),
        (plan.tiles.v_form, refs.v_raw, refs.v_rows, None),
    ):
        if form == "bshd":
            _settle_pairs(plan, raw, step, functools.partial(put, rows_ref=rows_ref, up_ref=up_ref))
            continue

        def settle(head, form=form, raw=raw, rows_ref=rows_ref, up_ref=up_ref):
            x = raw[head].astype(jnp.float32)
            put(head, x.T if form == "bhds" else x, 0, rows_ref, up_ref)

        for_each(plan.tiles.kv_heads, settle)
    for ref in (refs.dk_up, refs.dv_up) if plan.needs_kv else ():
        for_each(plan.tiles.kv_heads, lambda head, ref=ref: zero(ref.at[head, :, keys]))


def _settle_pairs(plan: Plan, raw, step: Step, put):
    """put(head, x, row) for the key heads of the job, out of a "bshd" block that may hold more."""
    used, staged = plan.tiles.kv_heads, raw.shape[1] * raw.shape[3]

    def from_head(first: int):
        def move(row, rows):
            for head in range(first // 2 * 2, first + used, 2):
                pair = blocks.load_pair(raw.at[pl.ds(row, rows)], head // 2, plan.interpret)
                for i in range(2):
                    if first <= head + i < first + used:
                        put(head + i - first, pair[i], row)

        for_rows(raw.shape[0], move)

    if staged == used:
        from_head(0)
        return
    inner = jax.lax.rem(step.group * used, staged)
    for first in range(0, staged, used):
        pl.when(inner == first)(functools.partial(from_head, first))


def write(plan: Plan, refs, step: Step):
    """One block of dk and dv; zero if no query saw it."""
    size = plan.tiles.block_k
    at = pl.ds(pl.multiple_of(step.k_id * size, size), size)
    is_here = refs.is_here[step.k_id] == 1
    exists = step.chunk * plan.chunk_blocks + step.k_id < plan.num_k  # else in place of the last
    for ref, form, sums, scale in (
        (refs.dk, plan.dk_form, refs.dk_up, plan.softmax_scale),
        (refs.dv, plan.dv_form, refs.dv_up, 1.0),
    ):
        put = functools.partial(store, form, ref, sums.at[:, :, at], scale, plan.interpret)
        pl.when(is_here)(put)
        pl.when(exists & ~is_here)(functools.partial(zero, ref))
