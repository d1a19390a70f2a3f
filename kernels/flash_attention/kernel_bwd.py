"""Backward attention for TPU: dq, dk and dv in one pass over the visible pairs."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, Chip
from . import blocks, kernel_bwd_step, masks, tiling_bwd
from .kernel_bwd_plan import Plan, Step
from .tiling import Shape

_LOG2E = 1 / math.log(2.0)


def flash_attention_bwd(
    q: jax.Array,  # [b, sq, hq, d]
    k: jax.Array,  # [b, sk, hkv, d]
    v: jax.Array,  # [b, sk, hkv, dv]
    out: jax.Array,  # [b, sq, hq, dv]
    lse: jax.Array,  # [b, hq, sq] float32
    grad_out: jax.Array,  # [b, sq, hq, dv]
    *,
    sinks: jax.Array | None = None,  # [hq] float32
    q_segment_ids: jax.Array | None = None,  # [b, sq]
    kv_segment_ids: jax.Array | None = None,  # [b, sk]
    q_positions: jax.Array | None = None,  # [b, sq]
    kv_positions: jax.Array | None = None,  # [b, sk]
    mask: jax.Array | None = None,  # bool [b or 1, hq or 1, sq, sk]
    kv_lengths: jax.Array | None = None,  # [b]
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float,
    softcap: float = 0.0,
    needs_q: bool = True,
    needs_kv: bool = True,
    needs_sinks: bool = False,
    chip: Chip,
    interpret: bool | pltpu.InterpretParams = False,
    tiles: tiling_bwd.Tiles | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(dq, dk, dv, dsinks); one that is not needed has shape [0], dsinks is float32.

    Everything that a pair of query and key gives is computed once, in one visit of a block of
    queries to a block of keys: the probabilities from lse, then five matmuls. dk and dv of a key
    head stay in VMEM until all its queries are done, so nothing is summed in HBM. Hidden queries,
    keys and values may hold NaN.
    """
    given = dict(q_segment_ids=q_segment_ids, kv_segment_ids=kv_segment_ids, mask=mask)
    given |= dict(q_position_ids=q_positions, kv_position_ids=kv_positions, lengths=kv_lengths)
    options = (causal, window, softmax_scale, softcap, needs_q, needs_kv)
    plan = _plan(q, v, given, options, tiles, chip, bool(interpret))
    delta = jnp.sum(out.astype(jnp.float32) * grad_out.astype(jnp.float32), -1).transpose(0, 2, 1)
    nothing = jnp.zeros((0,), q.dtype)
    dq, dk, dv, dsinks = nothing, nothing, nothing, nothing.astype(jnp.float32)
    if needs_sinks:
        share = jnp.exp(sinks[None, :, None] - lse) * delta
        dsinks = -jnp.sum(jnp.where(lse == -jnp.inf, 0, share), axis=(0, 2))
    if needs_q or needs_kv:
        statistics = _statistics(plan, lse, delta)
        found = _call(plan, q, k, v, grad_out, statistics, given, chip, interpret)
        if needs_q:
            dq = found["dq"]  # one for each chunk of keys
            dq = dq[0] if plan.num_chunks == 1 else dq.sum(0).astype(q.dtype)
            dq = blocks.from_stored(dq, plan.tiles.q_form)[:, : q.shape[1]]
        if needs_kv:
            dk, dv = (
                blocks.from_stored(found[name], form)[:, : k.shape[1]]
                for name, form in (("dk", plan.dk_form), ("dv", plan.dv_form))
            )
    return dq, dk, dv, dsinks


def _plan(q, v, given: dict[str, Any], options, tiles, chip: Chip, interpret: bool) -> Plan:
    causal, (left, right), softmax_scale, softcap, needs_q, needs_kv = options
    (b, sq, hq, d), (_, sk, hkv, dv) = q.shape, v.shape
    has_segments, has_positions = (
        given[f"q_{kind}_ids"] is not None for kind in ("segment", "position")
    )
    mask = given["mask"]
    shape = Shape(
        sq=sq,
        sk=sk,
        hq=hq,
        hkv=hkv,
        d=d,
        dv=dv,
        dtype_bytes=q.dtype.itemsize,
        left=left,
        right=0 if causal else right,
        has_ids=has_segments or has_positions,
        mask_heads=0 if mask is None else mask.shape[1],
    )
    return Plan(
        b,
        shape,
        tiles or tiling_bwd.choose(shape, chip),
        chip.num_cores,
        softmax_scale,
        softcap,
        given["lengths"] is not None,
        has_segments,
        has_positions,
        0 if mask is None else mask.shape[0],
        needs_q,
        needs_kv,
        jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT,
        interpret,
    )


def _statistics(plan: Plan, lse, delta) -> tuple[jax.Array, jax.Array]:
    """lse, in units of log2, and delta, both [b, groups, heads, rows] in whole blocks.

    A row that sees nothing, or does not exist, has lse +inf: its probabilities are 0 without any
    mask. NaN in a row's grad_out or out makes its lse NaN, so that it spoils what the row sees.
    """
    is_blind = lse == -jnp.inf
    delta = jnp.where(is_blind, 0.0, delta)
    lse = jnp.where(is_blind, jnp.inf, lse * _LOG2E)
    lse = jnp.where(jnp.abs(delta) < jnp.inf, lse, jnp.nan)
    pad = ((0, 0), (0, 0), (0, plan.num_q * plan.tiles.block_q - plan.shape.sq))
    grouped = plan.b, -1, plan.tiles.heads, plan.num_q * plan.tiles.block_q
    lse = jnp.pad(lse, pad, constant_values=jnp.inf).reshape(grouped)
    return lse, jnp.pad(delta, pad).reshape(grouped)


def _block_spec(plan: Plan, form: str, heads: int, rows: int, width: int, place, lead=()):
    """A block in stored order; place(step) -> (batch, block of heads, block of rows)."""

    def index(core, turn):
        step = Step.at(plan, core, turn)
        batch, head, row = place(step)
        where = {"b": batch, "h": head, "s": row, "d": 0}
        first = (step.chunk,) if lead else ()
        return *first, *(where[axis] for axis in form), *((0, 0) if form == "bshd" else ())

    return pl.BlockSpec((*lead, 1, *blocks.block_shape(form, heads, rows, width)), index)


def _optional_inputs(plan: Plan, given: dict[str, jax.Array]):
    """name -> (array, BlockSpec) of lengths, ids and mask."""
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    tiles, inputs = plan.tiles, {}
    if plan.has_lengths:
        inputs["lengths"] = given["lengths"].astype(jnp.int32), smem
    for kind, present in (("segment", plan.has_segments), ("position", plan.has_positions)):
        if not present:
            continue
        q_ids, kv_ids = (given[f"{side}_{kind}_ids"].astype(jnp.int32) for side in ("q", "kv"))
        inputs[f"q_{kind}_bounds"] = masks.chunk_bounds(q_ids), smem
        inputs[f"kv_{kind}_bounds"] = masks.chunk_bounds(kv_ids), smem
        q_ids = jnp.pad(q_ids, ((0, 0), (0, -q_ids.shape[1] % tiles.block_q)))[:, None]
        kv_ids = jnp.pad(kv_ids, ((0, 0), (0, -kv_ids.shape[1] % tiles.block_k)))[:, None]

        def query_place(core, turn):
            step = Step.at(plan, core, turn)
            return step.batch, 0, step.q_id

        def key_place(core, turn):
            return Step.at(plan, core, turn).batch, 0, 0

        inputs[f"q_{kind}s"] = q_ids, pl.BlockSpec((1, 1, tiles.block_q), query_place)
        inputs[f"kv_{kind}s"] = kv_ids, pl.BlockSpec((1, 1, kv_ids.shape[2]), key_place)
    if plan.mask_batch:
        mask, rows = given["mask"], plan.num_q * tiles.block_q
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, rows - mask.shape[2]), (0, 0)))
        inputs["mask_states"] = masks.mask_block_states(mask, tiles.step_q, tiles.block_k), smem
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, 0), (0, -mask.shape[3] % tiles.block_k)))
        upright = mask.astype(jnp.int8).transpose(0, 1, 3, 2)
        inputs["mask"] = upright, pl.BlockSpec(memory_space=pl.ANY)
    return inputs


def _outputs(plan: Plan, dtype):
    """name -> (shape, BlockSpec) of the gradients."""
    tiles, shape, outputs = plan.tiles, plan.shape, {}
    if plan.needs_q:
        chunks = plan.num_chunks
        stored = blocks.block_shape(tiles.q_form, shape.hq, max(shape.sq, tiles.block_q), shape.d)
        outputs["dq"] = (
            jax.ShapeDtypeStruct((chunks, plan.b, *stored), dtype if chunks == 1 else jnp.float32),
            _block_spec(
                plan, tiles.q_form, tiles.heads, tiles.block_q, shape.d, _query_place(plan), (1,)
            ),
        )

    def key_place(step: Step):
        last = plan.num_k - 1
        return step.batch, step.group, jnp.minimum(step.chunk * plan.chunk_blocks + step.k_id, last)

    for name, form, width in (
        ("dk", plan.dk_form, shape.d),
        ("dv", plan.dv_form, shape.dv),
    ):
        if plan.needs_kv:
            rows = max(shape.sk, tiles.block_k)
            stored = blocks.block_shape(form, shape.hkv, rows, width)
            outputs[name] = (
                jax.ShapeDtypeStruct((plan.b, *stored), dtype),
                _block_spec(plan, form, tiles.kv_heads, tiles.block_k, width, key_place),
            )
    return outputs


def _query_place(plan: Plan):
    return lambda step: (step.batch, step.heads(plan), step.q_id)


def _scratch(plan: Plan, dtype) -> dict[str, object]:
    shape, tiles = plan.shape, plan.tiles
    heads, used, chunk = tiles.heads, tiles.kv_heads, tiles.chunk

    def raw(form: str, width: int):
        staged = tiling_bwd.staged_heads(shape.hkv, used) if form == "bshd" else used
        return pltpu.VMEM(blocks.block_shape(form, staged, tiles.block_k, width), dtype)

    scratch = {
        "q_up": pltpu.VMEM((heads, shape.d, tiles.block_q), dtype),
        "grad_up": pltpu.VMEM((heads, shape.dv, tiles.block_q), dtype),
        "k_raw": raw(tiles.k_form, shape.d),
        "v_raw": raw(tiles.v_form, shape.dv),
        "kv_sem": pltpu.SemaphoreType.DMA((2,)),
        "k_rows": pltpu.VMEM((used, chunk, shape.d), dtype),
        "v_rows": pltpu.VMEM((used, chunk, shape.dv), dtype),
        "is_here": pltpu.SMEM((plan.chunk_blocks,), jnp.int32),
        "coming": pltpu.SMEM((1,), jnp.int32),
    }
    if plan.needs_q:
        scratch["k_up"] = pltpu.VMEM((used, shape.d, chunk), dtype)
        scratch["dq_up"] = pltpu.VMEM((heads, shape.d, tiles.block_q), jnp.float32)
    if plan.needs_kv:
        scratch["dk_up"] = pltpu.VMEM((used, shape.d, chunk), jnp.float32)
        scratch["dv_up"] = pltpu.VMEM((used, shape.dv, chunk), jnp.float32)
    for kind, present in (("segment", plan.has_segments), ("position", plan.has_positions)):
        if present:
            scratch[f"kv_{kind}_column"] = pltpu.VMEM((tiles.block_k, LANES), jnp.int32)
    if plan.mask_batch:
        count = heads if shape.mask_heads > 1 else 1
        scratch["mask_buf"] = pltpu.VMEM((count, tiles.block_k, tiles.step_q), jnp.int8)
        scratch["mask_sem"] = pltpu.SemaphoreType.DMA((1,))
    return scratch


def _call(plan: Plan, q, k, v, grad_out, statistics, given, chip: Chip, interpret: Any):
    shape, tiles = plan.shape, plan.tiles
    rows = ((0, 0), (0, max(0, tiles.block_q - shape.sq)), (0, 0), (0, 0))
    keys = ((0, 0), (0, max(0, LANES - shape.sk)), (0, 0), (0, 0))
    place = _query_place(plan)

    def queries(x, form: str, width: int):
        spec = _block_spec(plan, form, tiles.heads, tiles.block_q, width, place)
        return blocks.to_stored(jnp.pad(x, rows), form), spec

    def row_place(core, turn):
        step = Step.at(plan, core, turn)
        return step.batch, step.heads(plan), 0, step.q_id

    row_spec = pl.BlockSpec((1, 1, tiles.heads, tiles.block_q), row_place)
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    inputs = {
        "q": queries(q, tiles.q_form, shape.d),
        "grad_out": queries(grad_out, tiles.out_form, shape.dv),
        "lse": (statistics[0], row_spec),
        "delta": (statistics[1], row_spec),
        "k": (blocks.to_stored(jnp.pad(k, keys), tiles.k_form), hbm),
        "v": (blocks.to_stored(jnp.pad(v, keys), tiles.v_form), hbm),
        **_optional_inputs(plan, given),
    }
    outputs = _outputs(plan, q.dtype)
    scratch = _scratch(plan, q.dtype)
    dtype = {"bfloat16": "bf16", "float32": "f32"}[q.dtype.name]
    found = pl.pallas_call(
        functools.partial(kernel_bwd_step.run, plan=plan, fields=(*inputs, *outputs, *scratch)),
        out_shape=[like for like, _ in outputs.values()],
        grid=(plan.num_cores, plan.core_steps),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=[spec for _, spec in outputs.values()],
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=chip.vmem_bytes * 9 // 10,
        ),
        interpret=interpret,
        name=f"flash_attention_bwd_{dtype}_q{tiles.block_q}_k{tiles.block_k}_h{tiles.heads}",
    )(*(array for array, _ in inputs.values()))
    return dict(zip(outputs, found, strict=True))
