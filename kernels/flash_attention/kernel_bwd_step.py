"""One grid step of the backward of attention, and the keys that stay in VMEM between the steps."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import blocks, bodies_bwd, masks
from . import kernel_bwd_keys as keys
from .kernel_bwd_plan import Plan, Step, block_range, pair_state


@dataclasses.dataclass(frozen=True)
class _Refs:
    q: jax.Ref  # VMEM, one block in its stored order
    grad_out: jax.Ref
    lse: jax.Ref  # VMEM [heads, block_q], in units of log2
    delta: jax.Ref  # VMEM [heads, block_q]
    k: jax.Ref  # HBM
    v: jax.Ref  # HBM
    q_up: jax.Ref  # [heads, d, block_q]
    grad_up: jax.Ref  # [heads, dv, block_q]
    k_raw: jax.Ref  # one block of keys in stored order
    v_raw: jax.Ref
    kv_sem: jax.Ref  # [2]
    k_rows: jax.Ref  # [kv_heads, chunk, d]
    v_rows: jax.Ref  # [kv_heads, chunk, dv]
    is_here: jax.Ref  # SMEM [chunk_blocks]: whether a block of keys is in k_rows and v_rows
    coming: jax.Ref  # SMEM [1]: the block whose DMAs are under way, or -1
    dq: jax.Ref | None = None  # VMEM, one block in the order of q
    dk: jax.Ref | None = None
    dv: jax.Ref | None = None
    k_up: jax.Ref | None = None  # [kv_heads, d, chunk]
    dq_up: jax.Ref | None = None  # float32 [heads, d, block_q]
    dk_up: jax.Ref | None = None  # float32 [kv_heads, d, chunk]
    dv_up: jax.Ref | None = None  # float32 [kv_heads, dv, chunk]
    lengths: jax.Ref | None = None  # SMEM [b]
    q_segments: jax.Ref | None = None  # VMEM [1, 1, block_q]
    kv_segments: jax.Ref | None = None  # VMEM [1, 1, keys]
    q_positions: jax.Ref | None = None
    kv_positions: jax.Ref | None = None
    q_segment_bounds: jax.Ref | None = None  # SMEM, see masks.chunk_bounds
    kv_segment_bounds: jax.Ref | None = None
    q_position_bounds: jax.Ref | None = None
    kv_position_bounds: jax.Ref | None = None
    kv_segment_column: jax.Ref | None = None  # VMEM [block_k, LANES]
    kv_position_column: jax.Ref | None = None
    mask: jax.Ref | None = None  # HBM int8 [mb, mh, keys, rows], whole steps
    mask_states: jax.Ref | None = None  # SMEM, see masks.mask_block_states
    mask_buf: jax.Ref | None = None  # VMEM int8 [1 or heads, block_k, step_q]
    mask_sem: jax.Ref | None = None


def run(*args, plan: Plan, fields: tuple[str, ...]):
    """Grid (core, step). A job is a batch element, `kv_heads` key heads and a chunk of their keys.

    The first steps of a job each take block_q queries of `heads` query heads against all keys of
    the chunk that they see; the others each write one block of dk and dv. Blocks of q, grad_out,
    lse, delta, dq, dk and dv come and go through the grid. A block of keys is fetched by hand when
    the first query of the job needs it, and stays in VMEM, with its dk and dv, until the job ends;
    the next one is fetched while one is worked on. Every block of dq, dk and dv is written by one
    step, and a core runs whole jobs, so nothing races.

    Bodies: all of block_q without a mask, one step_q without and one step_q with a mask.

    Causal 1x32/8x8192x128 in bfloat16 (v5e / v6e): floor of the five matmuls 6977 / 2092 us; static
    estimate of this kernel 7726 / 3088 us, with delta and the transposition of dk and dv, in XLA,
    8079 / 3300. The MXU bounds it: busy for 96 % of the time on v5e, 74 % on v6e, where feeding it
    weights is next (three of the matmuls have logits for weights, so that they fill all its rows);
    6 % of the work is on the hidden half of diagonal steps.
    """
    refs = _Refs(**dict(zip(fields, args, strict=True)))
    first = {name: getattr(refs, name).at[0] for name in ("q", "grad_out")}
    first |= {name: getattr(refs, name).at[0, 0] for name in ("lse", "delta")}
    if refs.dq is not None:
        first["dq"] = refs.dq.at[0, 0]
    if refs.dk is not None:
        first |= {"dk": refs.dk.at[0], "dv": refs.dv.at[0]}
    refs = dataclasses.replace(refs, **first)
    core, index = pl.program_id(0), pl.program_id(1)
    step = Step.at(plan, core, index)

    @pl.when(core * plan.core_steps + index < plan.num_jobs * plan.job_steps)
    def _():
        length = refs.lengths[step.batch] if plan.has_lengths else plan.shape.sk

        @pl.when(step.turn == 0)
        def _():
            refs.coming[0] = -1
            for i in range(plan.chunk_blocks):
                refs.is_here[i] = 0

        @pl.when(step.turn < plan.q_steps)
        def _():
            _query_step(plan, refs, step, length)

        @pl.when((step.turn == plan.q_steps - 1) & (refs.coming[0] >= 0))
        def _():
            for copy in keys.copies(plan, refs, step, refs.coming[0]):
                copy.wait()

        if plan.needs_kv:
            pl.when(step.turn >= plan.q_steps)(lambda: keys.write(plan, refs, step))


def _query_step(plan: Plan, refs: _Refs, step: Step, length):
    rows, size = plan.tiles.block_q, plan.tiles.block_k
    query = step.q_id * rows
    first, stop = block_range(plan, query, rows, length, step.chunk)
    if plan.needs_q:
        keys.for_each(plan.tiles.heads, lambda head: keys.zero(refs.dq_up.at[head]))

    @pl.when(first < stop)
    def _():
        _load_queries(plan, refs)

    def visit(block, _):
        some, every = pair_state(plan, refs, step.batch, length, query, rows, block * size, size)

        @pl.when(some)
        def _():
            keys.bring(plan, refs, step, length, block)
            _work(plan, refs, step, length, block, every)

        return 0

    jax.lax.fori_loop(first, stop, visit, 0)
    if plan.needs_q:
        keys.store(plan.tiles.q_form, refs.dq, refs.dq_up, plan.softmax_scale, plan.interpret)


def _work(plan: Plan, refs: _Refs, step: Step, length, block, every):
    """One block of queries against one block of keys in VMEM."""
    tiles, heads = plan.tiles, plan.tiles.heads
    local = block - step.chunk * plan.chunk_blocks
    at = pl.ds(pl.multiple_of(local * tiles.block_k, tiles.block_k), tiles.block_k)
    key, num_steps = block * tiles.block_k, tiles.block_q // tiles.step_q

    @pl.when(every)
    def _():
        def act(head):
            for i in range(num_steps):
                columns = pl.ds(i * tiles.step_q, tiles.step_q)
                bodies_bwd.accumulate(plan, refs, head, at, columns)

        keys.for_each(heads, act)

    def some_queries(i):
        row = pl.multiple_of(i * tiles.step_q, tiles.step_q)
        query = step.q_id * tiles.block_q + row
        columns = pl.ds(row, tiles.step_q)
        some, whole = pair_state(
            plan, refs, step.batch, length, query, tiles.step_q, key, tiles.block_k
        )

        @pl.when(whole)
        def _():
            keys.for_each(heads, lambda head: bodies_bwd.accumulate(plan, refs, head, at, columns))

        @pl.when(some & ~whole)
        def _():
            if plan.mask_batch:
                _load_mask(plan, refs, step, query, key)
            for kind, used in (("segment", plan.has_segments), ("position", plan.has_positions)):
                if used:
                    ids = getattr(refs, f"kv_{kind}s").at[:, :, pl.ds(key, tiles.block_k)]
                    column = getattr(refs, f"kv_{kind}_column")
                    masks.spread_column(ids, column, tiles.block_k)

            def act(head):
                seen = bodies_bwd.visibility(plan, refs, length, query, row, key)
                if plan.mask_batch:
                    bits = refs.mask_buf[head if plan.shape.mask_heads > 1 else 0]
                    allowed = bits.astype(jnp.int32) != 0
                    seen = allowed if seen is None else seen & allowed
                bodies_bwd.accumulate(plan, refs, head, at, columns, seen)

            keys.for_each(heads, act)

    pl.when(~every)(lambda: keys.for_each(num_steps, some_queries))


def _load_mask(plan: Plan, refs: _Refs, step: Step, query, key):
    """The boolean mask of one step, for all heads or the one they share."""
    count = plan.tiles.heads if plan.shape.mask_heads > 1 else 1
    first = step.heads(plan) * count if plan.shape.mask_heads > 1 else 0
    tiles = plan.tiles
    copy = pltpu.make_async_copy(
        refs.mask.at[
            step.batch if plan.mask_batch > 1 else 0,
            pl.ds(first, count),
            pl.ds(pl.multiple_of(key, tiles.block_k), tiles.block_k),
            pl.ds(pl.multiple_of(query, tiles.step_q), tiles.step_q),
        ],
        refs.mask_buf,
        refs.mask_sem.at[0],
    )
    copy.start()
    copy.wait()


def _upright(form: str, ref, target, interpret: bool):
    """target [heads, width, rows] = ref in stored order."""
    heads, _, count = target.shape

    def turn(head):
        x = ref[head]
        target[head] = x if form == "bhds" else x.astype(jnp.float32).T.astype(target.dtype)

    def turn_pairs(row, rows):
        for pair in range(heads // 2):
            for i, x in enumerate(blocks.load_pair(ref.at[pl.ds(row, rows)], pair, interpret)):
                target[2 * pair + i, :, pl.ds(row, rows)] = x.T.astype(target.dtype)

    if form == "bshd":
        keys.for_rows(count, turn_pairs)
    else:
        keys.for_each(heads, turn)


def _load_queries(plan: Plan, refs: _Refs):
    """Turns q and grad_out upright.

    lse is finite for every query that sees a key and has nothing but numbers; in other columns of
    q and grad_out anything may stand, and a product with a probability of 0 would spread it.
    """
    _upright(plan.tiles.q_form, refs.q, refs.q_up, plan.interpret)
    _upright(plan.tiles.out_form, refs.grad_out, refs.grad_up, plan.interpret)
    lse = refs.lse[...]
    is_bad = jnp.max(jnp.where(jnp.abs(lse) < jnp.inf, 0, 1)) > 0

    @pl.when(is_bad)
    def _():
        def clean(head):
            is_fine = jnp.abs(refs.lse[pl.ds(head, 1), :]) < jnp.inf  # [1, block_q]
            for ref in (refs.q_up, refs.grad_up):
                x = ref[head].astype(jnp.float32)
                ref[head] = jnp.where(is_fine, x, 0.0).astype(ref.dtype)

        keys.for_each(plan.tiles.heads, clean)
