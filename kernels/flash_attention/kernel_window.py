"""Forward attention with a narrow window and heads narrower than LANES: one pass per strip."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, MIB, SUBLANES, Chip
from . import blocks, tiling
from .plan import Plan
from .tiling import Tiles

_LN2 = math.log(2.0)
_MOST_CHUNKS = 4  # of LANES keys that LANES queries see
_NN = (((1,), (0,)), ((), ()))  # lhs [m, k], rhs [k, n]


def _side_by_side(heads: int) -> int:
    """Heads of one loop step, in whole rows of lse; 0 if that cannot be."""
    if heads <= 2 * SUBLANES:
        return heads
    return next((n for n in (2 * SUBLANES, SUBLANES) if heads % n == 0), 0)


def chunks_of(plan: Plan) -> tuple[int, int]:
    """Chunks of LANES keys that LANES queries may see: (first, past the last), counted from the
    queries' own positions, rounded up to LANES."""
    reach = 2 + (plan.shape.left + max(plan.shape.right, 0)) // LANES
    live = [
        chunk
        for chunk in range(-reach - 2, reach + 3)
        if plan.strip_state(chunk * LANES, 0, LANES, 0, LANES) != "empty"
    ]
    return live[0], live[-1] + 1


def tiles_for(plan: Plan, chip: Chip) -> Tiles | None:
    """Tiles if this kernel is the one for a plan, whose own tiles do not matter."""
    shape = plan.shape
    forms = {plan.q_form, plan.k_form, plan.v_form, plan.out_form}
    whole_rows = shape.d % 16 == 0 and shape.dv % 16 == 0
    narrow = 0 <= shape.left < 3 * LANES and 0 <= shape.right < 3 * LANES
    if forms != {"bhds"} or not whole_rows or not narrow or not plan.shifts_keys:
        return None
    first, stop = chunks_of(plan)
    if stop - first > _MOST_CHUNKS:
        return None
    fitting = []
    for heads in tiling.head_groups(shape):
        if _side_by_side(heads) == 0:
            continue
        for block_q in (LANES, 2 * LANES, 4 * LANES):
            size = heads * (shape.d + shape.dv) * block_q * shape.dtype_bytes
            keys = block_q + (stop - first - 1) * LANES
            used = shape.kv_heads(heads)
            width = shape.d + shape.dv
            total = 2 * size + 2 * used * width * keys * shape.dtype_bytes
            total += used * keys * LANES * shape.dtype_bytes + 4 * MIB
            if size <= 4 * MIB and total <= chip.vmem_bytes * 7 // 10 and block_q <= shape.sq:
                fitting.append((heads * block_q, heads, block_q, keys, total))
    if not fitting:
        return None
    _, heads, block_q, keys, total = max(fitting)
    return Tiles(block_q, keys, heads, LANES, LANES, 2, total)


@dataclasses.dataclass(frozen=True)
class _Refs:
    q: jax.Ref  # VMEM [heads, d, block_q]
    k: jax.Ref  # HBM [b, hkv, d, sk]
    v: jax.Ref  # HBM [b, hkv, dv, sk]
    out: jax.Ref  # VMEM [heads, dv, block_q]
    lse: jax.Ref  # VMEM [heads, block_q]
    k_buf: jax.Ref  # [2, kv_heads, d, keys]
    v_buf: jax.Ref  # [2, kv_heads, dv, keys]
    sem: jax.Ref  # [2, 2]
    k_rows: jax.Ref  # [kv_heads, keys, d]
    seen: jax.Ref  # int32 [keys of a strip, LANES]
    is_second: jax.Ref  # SMEM [1] second pass over a tile
    sinks: jax.Ref | None = None  # SMEM [hq], in units of log2
    lengths: jax.Ref | None = None  # SMEM [b]


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Scalars of one grid step."""

    batch: jax.Array
    group: jax.Array
    first_key: jax.Array  # of the buffer; may be negative, or past the last key
    first_position: jax.Array  # key position of the first query
    length: jax.Array | int

    @classmethod
    def at(cls, plan: Plan, refs: _Refs, index) -> _Tile:
        batch, group, q_id = plan.split_tile(index)
        length = refs.lengths[batch] if plan.has_lengths else plan.shape.sk
        first_query = q_id * plan.tiles.block_q
        first_key = first_query + plan.aligned_offset(length) + chunks_of(plan)[0] * LANES
        return cls(batch, group, first_key, first_query + plan.offset(length), length)


def _for_copies(plan: Plan, refs: _Refs, tile: _Tile, slot, act):
    """act(copy) for the DMAs of a tile's keys and values, if it has any."""
    head = plan.first_kv_head(tile.group)

    @pl.when((tile.first_key < plan.shape.sk) & (tile.first_key + plan.tiles.block_k > 0))
    def _():
        for i, (src, buf) in enumerate(((refs.k, refs.k_buf), (refs.v, refs.v_buf))):
            sem = refs.sem.at[i, slot]
            act(
                blocks.key_copy(
                    plan,
                    "bhds",
                    src,
                    buf.at[slot],
                    sem,
                    tile.batch,
                    head,
                    plan.kv_heads,
                    tile.first_key,
                )
            )


def _dot(plan: Plan, lhs, rhs):
    return jax.lax.dot_general(
        lhs, rhs, _NN, precision=plan.precision, preferred_element_type=jnp.float32
    )


def _mark_seen(plan: Plan, refs: _Refs, tile: _Tile, query):
    """Writes which of the strip's keys each of LANES queries from `query` sees."""
    wide = refs.seen.shape
    key = tile.first_key + query + jax.lax.broadcasted_iota(jnp.int32, wide, 0)
    position = tile.first_position + query + jax.lax.broadcasted_iota(jnp.int32, wide, 1)
    seen = (key >= 0) & (key < tile.length)
    seen &= (key <= position + plan.shape.right) & (key >= position - plan.shape.left)
    refs.seen[...] = jnp.where(seen, 1, 0)


def _attend(plan: Plan, refs: _Refs, tile: _Tile, slot, query, heads: list, is_clean: bool):
    """Writes out of LANES queries from `query` for heads that share a key head; returns lse."""
    lanes, keys = pl.ds(query, LANES), pl.ds(query, refs.seen.shape[0])
    kv_head = jax.lax.div(heads[0], plan.shape.rep) if plan.kv_heads > 1 else 0
    q = jnp.concatenate([refs.q[head, :, lanes] for head in heads], axis=1)
    scores = _dot(plan, refs.k_rows[kv_head, keys, :], q) * plan.scale  # [keys, heads * LANES]
    if plan.softcap:
        scores = plan.softcap * jnp.tanh(scores)
    v = refs.v_buf[slot, kv_head, :, keys]
    lses = []
    for i, head in enumerate(heads):
        seen = refs.seen[...] != 0
        s = jnp.where(seen, scores[:, i * LANES : (i + 1) * LANES], -jnp.inf)
        m = jnp.max(s, axis=0, keepdims=True)
        m = jnp.where(m == -jnp.inf, 0.0, m)
        p = jnp.exp2(s - m)
        total = jnp.sum(p, axis=0, keepdims=True)
        if is_clean:
            out = _dot(plan, v, p.astype(v.dtype))  # [dv, LANES]
        else:
            out = _dot_unclean(plan, v, p.astype(v.dtype), seen)
        sees = ~(total <= 0)  # or is NaN
        top, share = m, 1.0
        if plan.has_sinks:
            sink = refs.sinks[tile.group * plan.tiles.heads + head]
            top = jnp.maximum(m, sink)
            share = jnp.exp2(m - top)
            total = total * share + jnp.exp2(sink - top)
        factor = jnp.where(sees, share / total, 0.0)
        refs.out[head, :, lanes] = (out * factor).astype(refs.out.dtype)
        lses.append(jnp.where(sees, top * _LN2 + jnp.log(total), -jnp.inf))
    return lses


def _dot_unclean(plan: Plan, v, p, seen):
    """v @ p where a value that is not finite counts only for queries that see it."""
    finite = jnp.abs(v.astype(jnp.float32)) < jnp.inf
    bad = jnp.where(finite, 0.0, 1.0).astype(v.dtype)
    tainted = _dot(plan, bad, jnp.where(seen, 1.0, 0.0).astype(v.dtype))
    clean = jnp.where(finite, v.astype(jnp.float32), 0.0).astype(v.dtype)
    return jnp.where(tainted > 0, jnp.nan, _dot(plan, clean, p))


def _prepare(plan: Plan, refs: _Refs, tile: _Tile, slot):
    """Turns the keys upright and zeroes values that are none; whether all values are finite."""

    @pl.when((tile.first_key < 0) | (tile.first_key + plan.tiles.block_k > tile.length))
    def _():
        low, high = -tile.first_key, tile.length - tile.first_key
        blocks.zero_columns(refs.v_buf.at[slot], low, high)

    def body(kv_head, broken):
        for i in range(0, plan.tiles.block_k, LANES):
            keys = refs.k_buf[slot, kv_head, :, i : i + LANES].astype(jnp.float32)
            refs.k_rows[kv_head, i : i + LANES] = keys.T.astype(refs.k_rows.dtype)
            v = refs.v_buf[slot, kv_head, :, i : i + LANES].astype(jnp.float32) * 0.0
            broken = broken + v.reshape(-1, SUBLANES, LANES).sum(0)
        return broken

    broken = jax.lax.fori_loop(0, plan.kv_heads, body, jnp.zeros((SUBLANES, LANES)))
    return jnp.max(jnp.where(broken == 0.0, 0, 1)) == 0


def _run(*args, plan: Plan, fields: tuple[str, ...]):
    """Grid (core, tile): a tile is block_q queries of `heads` query heads.

    LANES queries see few enough keys to meet them all at once: logits stand as [keys, queries], so
    that maxima and sums run down the registers, q, v and out are used as they are stored, features
    first, and nothing is kept between steps but the next tile's keys and values, fetched by hand
    while a tile is worked on. A grid step alone writes its out and lse block, so nothing races.

    Floor of a window of 128 keys with sinks, 1 x 64/8 heads x 4096 x 64 in bfloat16: 114 / 54 us on
    v5e / v6e (HBM); static estimate 2.8 / 4.7 times that. Latency bounds it: its bundles hold a
    third of the vector work that they could, every logit of the two chunks of keys is masked, half
    of them for nothing.

    Values that are not finite are rare but may be hidden: a tile that holds one is done again with
    a body that keeps them from queries that do not see them.
    """
    refs = _Refs(**dict(zip(fields, args, strict=False)))
    refs = dataclasses.replace(refs, q=refs.q.at[0], out=refs.out.at[0], lse=refs.lse.at[0, 0])
    step = pl.program_id(1)
    index = pl.program_id(0) * plan.core_tiles + step
    slot = jax.lax.rem(step, 2)
    side = _side_by_side(plan.tiles.heads)
    joint = 2 if side % 2 == 0 and plan.shape.rep % 2 == 0 else 1

    def strips(tile: _Tile, is_clean: bool):
        def strip_body(strip, _):
            query = pl.multiple_of(strip * LANES, LANES)
            _mark_seen(plan, refs, tile, query)

            def heads_body(i, _):
                first, lses = i * side, []
                for j in range(0, side, joint):
                    heads = [first + j + n for n in range(joint)]
                    lses += _attend(plan, refs, tile, slot, query, heads, is_clean)
                if side < plan.tiles.heads:
                    first = pl.multiple_of(first, SUBLANES)
                refs.lse[pl.ds(first, side), pl.ds(query, LANES)] = jnp.concatenate(lses)
                return 0

            return jax.lax.fori_loop(0, plan.tiles.heads // side, heads_body, 0)

        jax.lax.fori_loop(0, plan.tiles.block_q // LANES, strip_body, 0)

    @pl.when(index < plan.num_tiles)
    def _():
        tile = _Tile.at(plan, refs, index)

        @pl.when(step == 0)
        def _():
            _for_copies(plan, refs, tile, slot, lambda copy: copy.start())

        @pl.when((step + 1 < plan.core_tiles) & (index + 1 < plan.num_tiles))
        def _():
            following = _Tile.at(plan, refs, index + 1)
            _for_copies(plan, refs, following, 1 - slot, lambda copy: copy.start())

        _for_copies(plan, refs, tile, slot, lambda copy: copy.wait())
        is_clean = _prepare(plan, refs, tile, slot)

        refs.is_second[0] = 0

        def attempt(_):
            is_second = refs.is_second[0]
            pl.when(is_second == 0)(lambda: strips(tile, True))
            pl.when(is_second == 1)(lambda: strips(tile, False))
            refs.is_second[0] = 1
            return (is_second == 0) & ~is_clean

        jax.lax.while_loop(lambda more: more, attempt, jnp.bool_(True))


def flash_attention_window(plan: Plan, q, k, v, sinks, kv_lengths, chip: Chip, interpret):
    """out in stored order, lse [b, groups, heads, rows]; a plan with the tiles of `tiles_for`."""
    tiles, shape = plan.tiles, plan.shape
    rows, keys, dtype = q.shape[3], tiles.block_k, q.dtype
    first, stop = chunks_of(plan)
    smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)

    def place(core, step):
        index = jnp.minimum(core * plan.core_tiles + step, plan.num_tiles - 1)
        return plan.split_tile(index)

    def block(width):
        def index_map(core, step):
            batch, group, q_id = place(core, step)
            return batch, group, 0, q_id

        return pl.BlockSpec((1, tiles.heads, width, tiles.block_q), index_map)

    def lse_place(core, step):
        batch, group, q_id = place(core, step)
        return batch, group, 0, q_id

    inputs = {"q": (q, block(shape.d)), "k": (k, hbm), "v": (v, hbm)}
    if sinks is not None:
        inputs["sinks"] = sinks.astype(jnp.float32) * (1 / _LN2), smem
    if kv_lengths is not None:
        inputs["lengths"] = kv_lengths.astype(jnp.int32), smem
    scratch = {
        "k_buf": pltpu.VMEM((2, plan.kv_heads, shape.d, keys), dtype),
        "v_buf": pltpu.VMEM((2, plan.kv_heads, shape.dv, keys), dtype),
        "sem": pltpu.SemaphoreType.DMA((2, 2)),
        "k_rows": pltpu.VMEM((plan.kv_heads, keys, shape.d), dtype),
        "is_second": pltpu.SMEM((1,), jnp.int32),
        "seen": pltpu.VMEM(((stop - first) * LANES, LANES), jnp.int32),
    }
    kinds = [name for name, used in (("lengths", kv_lengths), ("sinks", sinks)) if used is not None]
    name = {"bfloat16": "bf16", "float32": "f32"}[dtype.name]
    return pl.pallas_call(
        functools.partial(_run, plan=plan, fields=(*inputs, "out", "lse", *scratch)),
        out_shape=(
            jax.ShapeDtypeStruct((plan.b, shape.hq, shape.dv, rows), dtype),
            jax.ShapeDtypeStruct((plan.b, plan.num_groups, tiles.heads, rows), jnp.float32),
        ),
        grid=(plan.num_cores, plan.core_tiles),
        in_specs=[spec for _, spec in inputs.values()],
        out_specs=(block(shape.dv), pl.BlockSpec((1, 1, tiles.heads, tiles.block_q), lse_place)),
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=plan.vmem_bytes,
        ),
        interpret=interpret,
        name="_".join(
            ["flash_attention_fwd", name, "window", *kinds, f"q{tiles.block_q}", f"h{tiles.heads}"]
        ),
    )(*(array for array, _ in inputs.values()))
