"""Forward attention for TPU: softmax(scale * q k^T) v over [b, s, h, d] arrays."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, SUBLANES, Chip
from . import blocks, bodies, kernel_decode, kernel_window, masks, tile, tiling
from .plan import Plan
from .tiling import Shape, Tiles

_LN2 = math.log(2.0)


def _block_spec(plan: Plan, form: str, width: int, part: int = 0) -> pl.BlockSpec:
    """A tile of q or out in stored order, or one of `Plan.head_tiles` parts of it."""

    def place(core, step):
        index = jnp.minimum(core * plan.core_tiles + step, plan.num_tiles - 1)
        batch, group, q_id = plan.split_tile(index)
        where = {"b": batch, "h": group * plan.head_tiles + part, "s": q_id, "d": 0}
        return *(where[axis] for axis in form), *((0, 0) if form == "bshd" else ())

    heads = plan.tiles.heads // plan.head_tiles
    return pl.BlockSpec((1, *blocks.block_shape(form, heads, plan.tiles.block_q, width)), place)


def _tile_place(plan: Plan, core, step):
    return plan.split_tile(jnp.minimum(core * plan.core_tiles + step, plan.num_tiles - 1))


def _optional_inputs(plan: Plan, given: dict[str, jax.Array]):
    """name -> (array, BlockSpec) of sinks, lengths, ids and mask."""
    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    rows, keys = plan.tiles.block_q, plan.tiles.block_k
    inputs = {}
    if plan.has_sinks:
        inputs["sinks"] = given["sinks"].astype(jnp.float32) * (1 / _LN2), smem
    if plan.has_lengths:
        inputs["lengths"] = given["kv_lengths"].astype(jnp.int32), smem
    for kind, present in (("segment", plan.has_segments), ("position", plan.has_positions)):
        if not present:
            continue
        q_ids, kv_ids = given[f"q_{kind}_ids"], given[f"kv_{kind}_ids"]
        inputs[f"q_{kind}_bounds"] = masks.chunk_bounds(q_ids), smem
        inputs[f"kv_{kind}_bounds"] = masks.chunk_bounds(kv_ids), smem
        q_ids = jnp.pad(q_ids, ((0, 0), (0, -q_ids.shape[1] % rows)))[:, None]
        kv_ids = jnp.pad(kv_ids, ((0, 0), (0, -kv_ids.shape[1] % keys)))[:, None]

        def query_place(core, step):
            batch, _, q_id = _tile_place(plan, core, step)
            return batch, 0, q_id

        def key_place(core, step):
            return _tile_place(plan, core, step)[0], 0, 0

        inputs[f"q_{kind}s"] = q_ids, pl.BlockSpec((1, 1, rows), query_place)
        inputs[f"kv_{kind}s"] = kv_ids, pl.BlockSpec((1, 1, kv_ids.shape[2]), key_place)
    if plan.has_ids:
        kinds = [
            kind
            for kind, present in (
                ("segment", plan.has_segments),
                ("position", plan.has_positions and plan.has_band),
            )
            if present
        ]
        sides = ({kind: given[f"{side}_{kind}_ids"] for kind in kinds} for side in ("q", "kv"))
        inputs["hulls"] = masks.strip_hulls(plan, *sides), smem
    if plan.mask_batch:
        mask = given["mask"]
        inputs["mask_states"] = masks.mask_block_states(mask, rows, keys), smem
        pad = ((0, 0), (0, 0), (0, -mask.shape[3] % keys), (0, -mask.shape[2] % rows))
        mask = jnp.pad(mask.swapaxes(2, 3), pad).astype(jnp.int8)
        inputs["mask"] = mask, pl.BlockSpec(memory_space=pl.ANY)
    return inputs


def _scratch(plan: Plan, dtype) -> dict[str, object]:
    shape, tiles = plan.shape, plan.tiles
    heads, rows = tiles.heads, tiles.block_q
    k_ring, v_ring, k_split, v_split = blocks.ring_shapes(plan)
    scratch = {
        "acc": pltpu.VMEM((heads, shape.dv, rows), jnp.float32),
        "l": pltpu.VMEM((heads, SUBLANES, rows), jnp.float32),
        "m": pltpu.VMEM((heads, SUBLANES, rows), jnp.float32),
        "k_ring": pltpu.VMEM(k_ring, dtype),
        "v_ring": pltpu.VMEM(v_ring, dtype),
        "kv_sem": pltpu.SemaphoreType.DMA((2, tiles.slots)),
        "ring": pltpu.SMEM((3, tiles.slots), jnp.int32),
        "state": pltpu.SMEM((4,), jnp.int32),
        "seen": pltpu.VMEM((bodies.piece_sizes(plan)[0], bodies.strip_rows(plan)), jnp.int32),
    }
    if plan.head_tiles > 1:
        block = blocks.block_shape(plan.out_form, SUBLANES, rows, shape.dv)
        scratch["out_buf"] = pltpu.VMEM((2, plan.head_tiles, *block), dtype)
        scratch["out_sem"] = pltpu.SemaphoreType.DMA((2,))
    if plan.q_form == "bshd":
        scratch["queries"] = pltpu.VMEM((heads, rows, shape.d), dtype)
    for name, split in (("k_split", k_split), ("v_split", v_split)):
        if split is not None:
            scratch[name] = pltpu.VMEM(split, dtype)
    for kind, present in (("segment", plan.has_segments), ("position", plan.has_positions)):
        if present:
            columns = tiles.slots, tiles.block_k, LANES
            scratch[f"kv_{kind}_cols"] = pltpu.VMEM(columns, jnp.int32)
    if plan.mask_batch:
        count = heads if shape.mask_heads > 1 else 1
        scratch["mask_buf"] = pltpu.VMEM((count, tiles.block_k, rows), jnp.int8)
        scratch["mask_sem"] = pltpu.SemaphoreType.DMA((1,))
    return scratch


def _make_plan(
    q, k, v, given: dict, band: tuple[int, int], scale, softcap, chip: Chip, interpret, tiles
) -> Plan:
    """The plan of a call; its tiles are the general kernel's."""
    b, sq, hq, d = q.shape
    sk, hkv, dv = k.shape[1], k.shape[2], v.shape[3]
    mask = given["mask"]
    has_segments, has_positions = (
        given[name] is not None for name in ("q_segment_ids", "q_position_ids")
    )
    shape = Shape(
        sq,
        sk,
        hq,
        hkv,
        d,
        dv,
        q.dtype.itemsize,
        *band,
        has_segments or has_positions,
        0 if mask is None else mask.shape[1],
    )
    log2e = 1 / _LN2
    return Plan(
        b,
        shape,
        tiles or tiling.choose(shape, chip),
        chip.num_cores,
        scale / softcap if softcap else scale * log2e,
        softcap * log2e,
        given["sinks"] is not None,
        given["kv_lengths"] is not None,
        has_segments,
        has_positions,
        0 if mask is None else mask.shape[0],
        jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT,
        bool(interpret),
        chip.vmem_bytes * 9 // 10,
    )


def flash_attention_fwd(
    q: jax.Array,  # [b, sq, hq, d]
    k: jax.Array,  # [b, sk, hkv, d]
    v: jax.Array,  # [b, sk, hkv, dv]
    *,
    sinks: jax.Array | None = None,  # float32 [hq]
    q_segment_ids: jax.Array | None = None,  # int32 [b, sq]
    kv_segment_ids: jax.Array | None = None,  # int32 [b, sk]
    q_positions: jax.Array | None = None,  # int32 [b, sq]
    kv_positions: jax.Array | None = None,  # int32 [b, sk]
    mask: jax.Array | None = None,  # bool [b or 1, hq or 1, sq, sk]
    kv_lengths: jax.Array | None = None,  # int32 [b]
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float,
    softcap: float = 0.0,
    chip: Chip,
    interpret: bool | pltpu.InterpretParams = False,
    tiles: Tiles | None = None,
    heads_first: bool = False,
) -> tuple[jax.Array, jax.Array]:  # [b, sq, hq, dv], float32 [b, hq, sq]
    """(out, lse): attention of query head i over kv head i // (hq // hkv).

    q, k, v are bfloat16 or float32, all the same, with b, sq, sk, hq, hkv >= 1. lse is natural log.
    `causal` and `window` (left, right; -1 = unlimited) compare the query's position with the key's:
    positions are `q_positions` and `kv_positions` where given (both or neither), otherwise key j
    stands at j and query i at i + (kv_lengths[b] or sk) - sq. Masks combine by AND; `mask` is True
    where the query attends. Rows with no visible key: out 0, lse -inf (also with sinks). Hidden
    keys and values may hold NaN.

    heads_first: k and v are [b, hkv, sk, d]. A few queries read such a cache in place; for many it
    is turned around in HBM unless XLA stores it the other way already.
    """
    left, right = window
    if causal:
        right = min(right, 0) if right >= 0 else 0
    given = {
        "sinks": sinks,
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "q_position_ids": q_positions,
        "kv_position_ids": kv_positions,
        "mask": mask,
        "kv_lengths": kv_lengths,
    }
    options = (left, right), softmax_scale, softcap, chip, interpret
    if tiles is None and kernel_decode.is_decode(q, k, v, heads_first):
        return kernel_decode.flash_attention_decode(q, k, v, given, *options, heads_first)
    if heads_first:
        k, v = (x.swapaxes(1, 2) for x in (k, v))
    plan = _make_plan(q, k, v, given, *options, tiles)
    b, sq, hq, _ = q.shape
    window_tiles = kernel_window.tiles_for(plan, chip) if tiles is None else None
    if window_tiles is not None:
        plan = dataclasses.replace(plan, tiles=window_tiles)
    q = jnp.pad(q, ((0, 0), (0, max(0, plan.tiles.block_q - sq)), (0, 0), (0, 0)))
    short = max(0, LANES - k.shape[1])
    k, v = (jnp.pad(x, ((0, 0), (0, short), (0, 0), (0, 0))) for x in (k, v))
    arrays = tuple(
        blocks.to_stored(x, form)
        for x, form in ((q, plan.q_form), (k, plan.k_form), (v, plan.v_form))
    )
    if window_tiles is not None:
        out, lse = kernel_window.flash_attention_window(
            plan, *arrays, sinks, kv_lengths, chip, interpret
        )
    else:
        out, lse = _call(plan, *arrays, given, interpret)
    return blocks.from_stored(out, plan.out_form)[:, :sq], lse.reshape(b, hq, -1)[..., :sq]


def _call(plan: Plan, q, k, v, given: dict, interpret):  # q, k, v in stored order
    shape, tiles = plan.shape, plan.tiles
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    parts = range(plan.head_tiles)
    inputs = {
        **{f"q{i}": (q, _block_spec(plan, plan.q_form, shape.d, i)) for i in parts},
        "k": (k, hbm),
        "v": (v, hbm),
        **_optional_inputs(plan, given),
    }
    rows = max(shape.sq, tiles.block_q)
    grouped = (plan.b, plan.num_groups, tiles.heads, rows)
    out_shape = (plan.b, *blocks.block_shape(plan.out_form, shape.hq, rows, shape.dv))

    def lse_place(core, step):
        batch, group, q_id = _tile_place(plan, core, step)
        return batch, group, 0, q_id

    scratch = _scratch(plan, q.dtype)
    kinds = [
        name
        for name, used in (
            ("causal", plan.shape.right == 0),
            ("window", plan.shape.left >= 0),
            ("segments", plan.has_segments),
            ("positions", plan.has_positions),
            ("mask", plan.mask_batch),
            ("lengths", plan.has_lengths),
            ("sinks", plan.has_sinks),
        )
        if used
    ]
    dtype = {"bfloat16": "bf16", "float32": "f32"}[q.dtype.name]
    return pl.pallas_call(
        functools.partial(tile.run, plan=plan, fields=(*inputs, "out", "lse", *scratch)),
        out_shape=(
            jax.ShapeDtypeStruct(out_shape, q.dtype),
            jax.ShapeDtypeStruct(grouped, jnp.float32),
        ),
        grid=(plan.num_cores, plan.core_tiles),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=(
            hbm if plan.head_tiles > 1 else _block_spec(plan, plan.out_form, shape.dv),
            pl.BlockSpec((1, 1, tiles.heads, tiles.block_q), lse_place),
        ),
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=plan.vmem_bytes,
        ),
        interpret=interpret,
        name="_".join(
            [
                "flash_attention_fwd",
                dtype,
                *kinds,
                f"q{tiles.block_q}",
                f"k{tiles.block_k}",
                f"h{tiles.heads}",
            ]
        ),
    )(*(array for array, _ in inputs.values()))
