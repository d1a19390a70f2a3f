"""Grouped matmul: out[r] = lhs[r] @ rhs[group of r], groups being consecutive rows.

Ideas with thanks to the grouped matmuls of tokamax (https://github.com/openxla/tokamax): metadata
made inside the kernel, row-exact DMAs, a strip of eight rows shared by two groups kept in VMEM.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import SUBLANES, Chip
from . import groups, tiling
from .dequant import code_of
from .plan import Plan, Refs, Work
from .product import multiply, prepare_rows
from .tiling import PACKED_ROWS, Quantised, Tiles


def _rows(start, stop):
    return pl.ds(pl.multiple_of(start, SUBLANES), pl.multiple_of(stop - start, SUBLANES))


def _ring(i, size: int):
    """Slot of the i-th user of a ring."""
    return i & (size - 1) if size & (size - 1) == 0 else jax.lax.rem(i, size)


def _visit_copies(plan: Plan, refs: Refs, visit_id):
    """DMAs of the rows and the bias of a visit."""
    slot = _ring(visit_id, plan.tiles.lhs_slots)
    base = groups.align_down(refs.visits[1, visit_id])
    stop = plan.row_stop(refs.visits[2, visit_id])
    src, dst = refs.lhs.at[_rows(base, stop)], refs.lhs_buf.at[slot, _rows(0, stop - base)]
    copies = [pltpu.make_async_copy(src, dst, refs.lhs_sem.at[slot])]
    if plan.has_bias:
        src, dst = refs.bias.at[refs.visits[0, visit_id]], refs.bias_buf.at[slot]
        copies.append(pltpu.make_async_copy(src, dst, refs.bias_sem.at[slot]))
    if plan.scales_by_visit:
        src = refs.scale.at[_scale_index(refs, refs.visits[0, visit_id])]
        copies.append(pltpu.make_async_copy(src, refs.scale_buf.at[slot], refs.lhs_sem.at[slot]))
    return copies


def _scale_index(refs: Refs, group_id):
    """Selects the [k_blocks, n] scales of a group, [1, n] of scales [g, n]."""
    return pl.ds(group_id, 1) if len(refs.scale.shape) == 2 else group_id


def _weight_copies(plan: Plan, refs: Refs, visit_id, tile_id, slot):
    """DMAs of one weight tile and of the scales of its columns."""
    cols = plan.col_slice(tile_id)
    local = pl.ds(0, cols.size)
    group_id = refs.visits[0, visit_id]
    if plan.transpose_rhs:  # columns are rows in HBM, padded to a few only
        rows = plan.col_slice(tile_id, SUBLANES)
        src, dst = refs.rhs.at[group_id, rows], refs.rhs_buf.at[slot, pl.ds(0, rows.size)]
    else:
        src, dst = refs.rhs.at[group_id, :, cols], refs.rhs_buf.at[slot, :, local]
    copies = [pltpu.make_async_copy(src, dst, refs.rhs_sem.at[slot])]
    if plan.quantised is not None and not plan.scales_by_visit:
        scales = refs.scale.at[_scale_index(refs, group_id)]
        src, dst = scales.at[:, cols], refs.scale_buf.at[slot, :, local]
        copies.append(pltpu.make_async_copy(src, dst, refs.rhs_sem.at[slot]))
    return copies


def _fetch(plan: Plan, refs: Refs, work: Work, slot, ahead):
    """Starts the DMAs of the step `ahead`; the rows of a visit come with its first weight tile."""
    visit_id, tile_id = ahead

    @pl.when(visit_id < work.num_visits)
    def _():
        @pl.when(tile_id == 0)
        def _():
            for copy in _visit_copies(plan, refs, visit_id):
                copy.start()

        for copy in _weight_copies(plan, refs, visit_id, work.first_tile + tile_id, slot):
            copy.start()

    is_last = tile_id + 1 == work.num_tiles
    return jnp.where(is_last, visit_id + 1, visit_id), jnp.where(is_last, 0, tile_id + 1)


def _store_copy(plan: Plan, refs: Refs, slot):
    """DMA of the rows that `stores[slot]` names."""
    start, stop, tile_id = (refs.stores[slot, i] for i in range(3))
    cols = plan.col_slice(tile_id)
    return pltpu.make_async_copy(
        refs.out_buf.at[slot, _rows(0, stop - start), pl.ds(0, cols.size)],
        refs.out.at[_rows(start, stop), cols],
        refs.out_sem.at[slot],
    )


def _wait_store(plan: Plan, refs: Refs, slot):
    @pl.when(refs.stores[slot, 1] > refs.stores[slot, 0])
    def _():
        _store_copy(plan, refs, slot).wait()


def _for_zero_copies(plan: Plan, refs: Refs, work: Work, row_ranges, act):
    """Calls act(DMA) for every piece of the rows outside the groups."""
    step = plan.tiles.rows
    for start, stop in row_ranges:

        def piece(i, _, start=start, stop=stop):
            row = start + i // work.num_tiles * step
            cols = plan.col_slice(work.first_tile + i % work.num_tiles)
            rows = _rows(row, plan.row_stop(jnp.minimum(row + step, stop)))
            src = refs.zeros.at[pl.ds(0, rows.size), pl.ds(0, cols.size)]
            act(pltpu.make_async_copy(src, refs.out.at[rows, cols], refs.zero_sem.at[0]))
            return 0

        num_pieces = (jnp.maximum(stop - start, 0) + step - 1) // step * work.num_tiles
        jax.lax.fori_loop(0, num_pieces, piece, 0)


def _join_strips(plan: Plan, refs: Refs, tile_id, slot, start, stop, is_last):
    """Completes the first strip of a window from `partial`, keeps an unfinished last one there.

        rows     8 ........ 16 ....... 24         strips of 8 rows, visits 10..13 and 13..24
        visit 1    |--|                           stores nothing, partial holds rows 10..13
        visit 2       |---------------|           rows 8..13 from partial, stores 8..24

    Returns the rows of the window that are finished.
    """
    base, last_strip = groups.align_down(start), groups.align_down(stop)
    iota = functools.partial(jax.lax.broadcasted_iota, jnp.int32, dimension=0)

    @pl.when(start > base)
    def _():
        strip = refs.out_buf.at[slot, pl.ds(0, SUBLANES)]
        is_before = base + iota(shape=strip.shape) < start
        strip[...] = jnp.where(is_before, refs.partial[tile_id], strip[...])

    @pl.when(stop > last_strip)
    def _():
        # Packed registers hold 16 rows, and v7x loads bf16 only on multiples of that.
        offset = (last_strip - base) // PACKED_ROWS * PACKED_ROWS
        pair = refs.out_buf.at[slot, pl.ds(pl.multiple_of(offset, PACKED_ROWS), PACKED_ROWS)]
        is_ours = base + offset + iota(shape=pair.shape) < stop
        kept = jnp.where(is_ours, pair[...].astype(jnp.float32), 0.0)
        pair[...] = kept.astype(pair.dtype)
        is_second = last_strip - base > offset
        strip = jnp.where(is_second, kept[SUBLANES:], kept[:SUBLANES])
        refs.partial[tile_id] = strip.astype(pair.dtype)

    return base, jnp.where(is_last, plan.row_stop(stop), last_strip)


def _run_visit(plan: Plan, refs: Refs, work: Work, visit_id, carry):
    """All column tiles of one visit; carry = (step, visit and tile of the next fetch)."""
    tiles = plan.tiles
    lhs_slot = _ring(visit_id, tiles.lhs_slots)
    start, stop = refs.visits[1, visit_id], refs.visits[2, visit_id]
    for copy in _visit_copies(plan, refs, visit_id):
        copy.wait()
    num_rows = stop - groups.align_down(start)
    prepare_rows(plan, refs, num_rows, lhs_slot)

    def run_tile(local_id, carry):
        step, *ahead = carry
        tile_id = work.first_tile + local_id
        rhs_slot, out_slot = _ring(step, tiles.slots), _ring(step, tiles.out_slots)
        for copy in _weight_copies(plan, refs, visit_id, tile_id, rhs_slot):
            copy.wait()
        _wait_store(plan, refs, out_slot)
        multiply(plan, refs, tile_id, num_rows, lhs_slot, rhs_slot, out_slot)
        ahead = _fetch(plan, refs, work, rhs_slot, ahead)
        is_last = visit_id + 1 == work.num_visits
        base, done = _join_strips(plan, refs, local_id, out_slot, start, stop, is_last)
        for i, value in enumerate((base, done, tile_id)):
            refs.stores[out_slot, i] = value

        @pl.when(done > base)
        def _():
            _store_copy(plan, refs, out_slot).start()

        return step + 1, *ahead

    return jax.lax.fori_loop(0, work.num_tiles, run_tile, carry)


def _kernel(*args, plan: Plan, fields: tuple[str, ...]):
    """One program per core, which owns a range of column tiles; everything moves by DMA.

    Order of work: visits (pieces of a group, in row order), and column tiles in a visit. In VMEM: a
    ring of weight tiles [cols, k] that runs `slots` steps ahead, so each weight is read once per
    visit; the rows of a visit, read once, with the first tile of the visit in the ring; a ring of
    output windows; the last strip of 8 rows of every column tile if a second group continues it.
    A row strip is stored once, by the last visit that has rows in it; rows outside the groups are
    stored by DMAs from a zero buffer and share no strip with a visit. So no two DMAs write the same
    place, HBM is never read back, and cores write different columns.
    One body for full dots and at most five for the last rows of a visit.

    Quantised weights stay as stored in the ring and become MXU operands in registers (dequant.py).
    Their scales come with the rows of a visit, one row of [g, n] in HBM, or with each weight tile.
    int4 has its rows parted into even and odd columns first, in `pairs`, once per visit.

    Bounds checks are off: visits are clipped to [0, m), tile ids are below num_n, and a DMA that is
    rounded up ends in the padding that the tiled layout of an array in HBM has.

    Floor: HBM traffic up to about 560 (v6e) or 240 (v5e) rows a group, the MXU above. Static
    estimate as a multiple of it, v5e / v6e: 512x2048 by 16x1536x2048 1.02 / 1.04, 32768x768 by
    128x2048x768 1.01 / 1.01 (HBM bound: what is left is the first DMA's latency and the last tile's
    dots); 8192x4096 by 8x28672x4096 1.02 / 1.14 (MXU bound: every dot fills and drains the MXU).
    The first with weights of one byte, a scale per channel, both layouts: 1.04 / 1.08; with int4
    1.07 / 1.15, and 1.07 / 1.16 transposed: as many us above a floor of half the size.
    """
    refs, tiles = Refs(**dict(zip(fields, args, strict=True))), plan.tiles
    num_visits, first_row, last_row = groups.list_visits(
        refs.sizes, refs.offset[0], plan.g, plan.m, tiles.rows, refs.visits
    )
    first_tile, num_tiles = 0, plan.num_n
    if plan.num_cores > 1:
        first_tile = pl.program_id(0) * plan.core_n
        num_tiles = jnp.clip(plan.num_n - first_tile, 0, plan.core_n)
        num_visits = jnp.where(num_tiles > 0, num_visits, 0)
    work = Work(num_visits, first_tile, num_tiles)

    zero = jnp.int32(0)
    fetch = functools.partial(_fetch, plan, refs, work)
    ahead = jax.lax.fori_loop(0, tiles.slots, fetch, (zero, zero))

    has_visits = num_visits > 0
    head_stop = jnp.where(has_visits, groups.align_down(first_row), 0)
    tail_start = jnp.where(has_visits, plan.row_stop(last_row), 0)
    outside = ((0, head_stop), (tail_start, plan.m))

    @pl.when((head_stop > 0) | (tail_start < plan.m))
    def _():
        refs.zeros[...] = jnp.zeros_like(refs.zeros)

    _for_zero_copies(plan, refs, work, outside, lambda copy: copy.start())
    refs.partial[...] = jnp.zeros_like(refs.partial)
    for slot in range(tiles.out_slots):
        refs.stores[slot, 0] = 0
        refs.stores[slot, 1] = 0

    run_visit = functools.partial(_run_visit, plan, refs, work)
    jax.lax.fori_loop(0, num_visits, run_visit, (zero, *ahead))
    for slot in range(tiles.out_slots):
        _wait_store(plan, refs, slot)
    _for_zero_copies(plan, refs, work, outside, lambda copy: copy.wait())


def _scratch(plan: Plan, inputs: dict[str, jax.Array], out_dtype) -> dict[str, object]:
    t, lhs, rhs = plan.tiles, inputs["lhs"], inputs["rhs"]
    rhs_tile = (t.cols, rhs.shape[2]) if plan.transpose_rhs else (rhs.shape[1], t.cols)
    scratch = {
        "visits": pltpu.SMEM((3, groups.max_visits(plan.m, plan.g, t.rows)), jnp.int32),
        "stores": pltpu.SMEM((t.out_slots, 3), jnp.int32),
        "lhs_buf": pltpu.VMEM((t.lhs_slots, t.rows, plan.k), lhs.dtype),
        "rhs_buf": pltpu.VMEM((t.slots, *rhs_tile), rhs.dtype),
        "out_buf": pltpu.VMEM((t.out_slots, t.rows, t.cols), out_dtype),
        "partial": pltpu.VMEM((plan.core_n, SUBLANES, t.cols), out_dtype),
        "zeros": pltpu.VMEM((t.rows, t.cols), out_dtype),
        "lhs_sem": pltpu.SemaphoreType.DMA((t.lhs_slots,)),
        "rhs_sem": pltpu.SemaphoreType.DMA((t.slots,)),
        "out_sem": pltpu.SemaphoreType.DMA((t.out_slots,)),
        "zero_sem": pltpu.SemaphoreType.DMA((1,)),
    }
    if plan.has_bias:
        scratch["bias_buf"] = pltpu.VMEM((t.lhs_slots, plan.num_n, 1, t.cols), jnp.float32)
        scratch["bias_sem"] = pltpu.SemaphoreType.DMA((t.lhs_slots,))
    if (quantised := plan.quantised) is not None:
        width = plan.k if quantised.is_backward else plan.n
        slots, width = (t.lhs_slots, width) if plan.scales_by_visit else (t.slots, t.cols)
        scratch["scale_buf"] = pltpu.VMEM((slots, quantised.num_blocks, width), jnp.float32)
        if quantised.splits_lhs:
            scratch["pairs"] = pltpu.VMEM((2, t.rows, plan.k // 2), lhs.dtype)
    return scratch


def ragged_dot_fwd(
    lhs: jax.Array,  # [m, k]
    rhs: jax.Array,  # [g, n, k] if transpose_rhs else [g, k, n]
    group_sizes: jax.Array,  # int32 [at least g + offset]
    group_offset: jax.Array,  # int32 [1]
    bias: jax.Array | None = None,  # [g, n]
    scale: jax.Array | None = None,  # float32 [g, n] or [g, k_blocks, n]
    *,
    quantised: Quantised | None = None,
    transpose_rhs: bool = False,
    precision: str = "default",
    out_dtype: jnp.dtype | None = None,
    chip: Chip,
    tiles: Tiles | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:  # [m, n]
    """out[r] = lhs[r] @ rhs[group of r] + bias[group of r], exactly zero outside the groups.

    bf16 or f32 (lhs and rhs alike, or rhs as `quantised` says: int4 has half of k), f32
    accumulation; m, k, n, g >= 1. Rows belong to the groups in order; those of groups before
    `group_offset` and past the last local group give zero rows, and nothing in them (NaN, inf)
    reaches another row. Sizes that break the contract are clipped to m.
    """
    (m, k), g = lhs.shape, rhs.shape[0]
    n = rhs.shape[1 if transpose_rhs else 2]
    out_dtype = jnp.dtype(out_dtype or lhs.dtype)
    # An array of fewer than 8 rows has a smaller tile in HBM than the DMAs assume.
    lhs = jnp.pad(lhs, ((0, max(0, SUBLANES - m)), (0, 0)))
    num_rows, m = m, max(m, SUBLANES)
    if tiles is None:
        tiles = tiling.choose(
            m, k, n, g, lhs.dtype.name, out_dtype.name, transpose_rhs, chip, quantised
        )
    tiling.check(tiles, n, chip)
    is_exact = lhs.dtype == jnp.float32 and precision == "highest"
    plan = Plan(
        m=m,
        k=k,
        n=n,
        g=g,
        tiles=tiles,
        num_cores=chip.num_cores,
        transpose_rhs=transpose_rhs,
        has_bias=bias is not None,
        precision=jax.lax.Precision.HIGHEST if is_exact else jax.lax.Precision.DEFAULT,
        interpret=bool(interpret),
        quantised=quantised,
        code=code_of(chip),
    )
    inputs = {"sizes": group_sizes, "offset": group_offset, "lhs": lhs, "rhs": rhs}
    if bias is not None:
        bias = jnp.pad(bias.astype(jnp.float32), ((0, 0), (0, plan.num_n * tiles.cols - n)))
        inputs["bias"] = bias.reshape(g, plan.num_n, 1, tiles.cols)
    if scale is not None:
        inputs["scale"] = scale
    scratch = _scratch(plan, inputs, out_dtype)
    smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)
    dtype = {"bfloat16": "bf16", "float32": "f32"}[lhs.dtype.name]
    if quantised is not None:
        dtype += "_int4" if quantised.is_int4 else f"_{rhs.dtype.name}"
    variant = f"{dtype}_{'nt' if transpose_rhs else 'nn'}"
    out = pl.pallas_call(
        functools.partial(_kernel, plan=plan, fields=(*inputs, "out", *scratch)),
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(chip.num_cores,),
        in_specs=[smem, smem] + [hbm] * (len(inputs) - 2),
        out_specs=hbm,
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=tiling.vmem_budget(chip),
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name=f"ragged_dot_fwd_{variant}_tm{tiles.rows}_tn{tiles.cols}",
    )(*inputs.values())
    return out[:num_rows]
