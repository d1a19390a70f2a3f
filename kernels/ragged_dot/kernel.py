"""Grouped matmul: out[r] = lhs[r] @ rhs[group of r], groups being consecutive rows.

Ideas with thanks to the grouped matmuls of tokamax (https://github.com/openxla/tokamax): metadata
made inside the kernel, row-exact DMAs, a strip of eight rows shared by two groups kept in VMEM.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, SUBLANES, Chip, round_up
from . import groups, tiling
from .tiling import PACKED_ROWS, Tiles


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is known when the kernel is traced."""

    m: int
    k: int
    n: int
    g: int
    tiles: Tiles
    num_cores: int
    transpose_rhs: bool
    has_bias: bool
    precision: jax.lax.Precision
    interpret: bool

    @property
    def num_n(self) -> int:
        return pl.cdiv(self.n, self.tiles.cols)

    @property
    def core_n(self) -> int:
        """Most column tiles of one core."""
        return pl.cdiv(self.num_n, self.num_cores)

    def row_stop(self, row):
        """`row` rounded up to what a DMA can end on.

        HBM arrays are padded to whole row tiles, so a DMA may run past row m; the interpreter has
        no padding and takes exact sizes.
        """
        stop = (row + SUBLANES - 1) // SUBLANES * SUBLANES
        return jnp.minimum(stop, self.m) if self.interpret else stop

    def col_slice(self, tile_id):
        """Columns of a tile in HBM; the last tile may be narrower."""
        cols = self.tiles.cols
        if self.num_n == 1:
            return pl.ds(0, self.n)
        start = pl.multiple_of(tile_id * cols, cols)
        if self.n % cols == 0:
            return pl.ds(start, cols)
        stop = self.n if self.interpret else round_up(self.n, LANES)
        return pl.ds(start, pl.multiple_of(jnp.minimum(cols, stop - start), LANES))


@dataclasses.dataclass(frozen=True)
class _Refs:
    sizes: jax.Ref  # SMEM int32 [at least offset + g]
    offset: jax.Ref  # SMEM int32 [1]
    lhs: jax.Ref  # HBM [m, k]
    rhs: jax.Ref  # HBM [g, n, k] if transpose_rhs else [g, k, n]
    out: jax.Ref  # HBM [m, n]
    visits: jax.Ref  # SMEM int32 [3, max_visits], see groups.py
    stores: jax.Ref  # SMEM int32 [out_slots, 3]: first row, row past the last, column tile
    lhs_buf: jax.Ref  # [lhs_slots, rows, k]
    rhs_buf: jax.Ref  # [slots, cols, k] if transpose_rhs else [slots, k, cols]
    out_buf: jax.Ref  # [out_slots, rows, cols]
    partial: jax.Ref  # [core_n, 8, cols]: finished rows of the strip that the next visit completes
    zeros: jax.Ref  # [rows, cols]
    lhs_sem: jax.Ref  # [lhs_slots], started by _fetch, waited for at the start of the visit
    rhs_sem: jax.Ref  # [slots], started by _fetch, waited for by the step
    out_sem: jax.Ref  # [out_slots], started by the step, waited for when the slot is used again
    zero_sem: jax.Ref  # [1], started before the first step, waited for after the last
    bias: jax.Ref | None = None  # HBM float32 [g, num_n, 1, cols]
    bias_buf: jax.Ref | None = None  # [lhs_slots, num_n, 1, cols]
    bias_sem: jax.Ref | None = None  # [lhs_slots], as lhs_sem


@dataclasses.dataclass(frozen=True)
class _Work:
    """The share of this core."""

    num_visits: jax.Array
    first_tile: jax.Array | int
    num_tiles: jax.Array | int


def _rows(start, stop):
    return pl.ds(pl.multiple_of(start, SUBLANES), pl.multiple_of(stop - start, SUBLANES))


def _ring(i, size: int):
    """Slot of the i-th user of a ring."""
    return i & (size - 1) if size & (size - 1) == 0 else jax.lax.rem(i, size)


def _visit_copies(plan: _Plan, refs: _Refs, visit_id):
    """DMAs of the rows and the bias of a visit."""
    slot = _ring(visit_id, plan.tiles.lhs_slots)
    base = groups.align_down(refs.visits[1, visit_id])
    stop = plan.row_stop(refs.visits[2, visit_id])
    src, dst = refs.lhs.at[_rows(base, stop)], refs.lhs_buf.at[slot, _rows(0, stop - base)]
    copies = [pltpu.make_async_copy(src, dst, refs.lhs_sem.at[slot])]
    if plan.has_bias:
        src, dst = refs.bias.at[refs.visits[0, visit_id]], refs.bias_buf.at[slot]
        copies.append(pltpu.make_async_copy(src, dst, refs.bias_sem.at[slot]))
    return copies


def _weight_copy(plan: _Plan, refs: _Refs, visit_id, tile_id, slot):
    """DMA of one weight tile."""
    cols = plan.col_slice(tile_id)
    local = pl.ds(0, cols.size)
    group_id = refs.visits[0, visit_id]
    if plan.transpose_rhs:
        src, dst = refs.rhs.at[group_id, cols], refs.rhs_buf.at[slot, local]
    else:
        src, dst = refs.rhs.at[group_id, :, cols], refs.rhs_buf.at[slot, :, local]
    return pltpu.make_async_copy(src, dst, refs.rhs_sem.at[slot])


def _fetch(plan: _Plan, refs: _Refs, work: _Work, slot, ahead):
    """Starts the DMAs of the step `ahead`; the rows of a visit come with its first weight tile."""
    visit_id, tile_id = ahead

    @pl.when(visit_id < work.num_visits)
    def _():
        @pl.when(tile_id == 0)
        def _():
            for copy in _visit_copies(plan, refs, visit_id):
                copy.start()

        _weight_copy(plan, refs, visit_id, work.first_tile + tile_id, slot).start()

    is_last = tile_id + 1 == work.num_tiles
    return jnp.where(is_last, visit_id + 1, visit_id), jnp.where(is_last, 0, tile_id + 1)


def _store_copy(plan: _Plan, refs: _Refs, slot):
    """DMA of the rows that `stores[slot]` names."""
    start, stop, tile_id = (refs.stores[slot, i] for i in range(3))
    cols = plan.col_slice(tile_id)
    return pltpu.make_async_copy(
        refs.out_buf.at[slot, _rows(0, stop - start), pl.ds(0, cols.size)],
        refs.out.at[_rows(start, stop), cols],
        refs.out_sem.at[slot],
    )


def _wait_store(plan: _Plan, refs: _Refs, slot):
    @pl.when(refs.stores[slot, 1] > refs.stores[slot, 0])
    def _():
        _store_copy(plan, refs, slot).wait()


def _for_zero_copies(plan: _Plan, refs: _Refs, work: _Work, row_ranges, act):
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


def _multiply(plan: _Plan, refs: _Refs, tile_id, num_rows, lhs_slot, rhs_slot, out_slot):
    """out_buf[out_slot, :num_rows] = lhs_buf[lhs_slot, :num_rows] @ rhs_buf[rhs_slot] + bias.

    Works on a few rows and columns more: what they hold is never stored or is masked later.
    """
    tiles = plan.tiles
    row_step, col_step, row_tails = tiles.row_step, tiles.col_step, tiles.row_tails
    dims = (((1,), (1 if plan.transpose_rhs else 0,)), ((), ()))

    def dot(row, size, col):
        rows = pl.ds(pl.multiple_of(row, row_step), size)
        cols = pl.ds(0 if tiles.cols == col_step else pl.multiple_of(col, col_step), col_step)
        rhs_index = (cols, slice(None)) if plan.transpose_rhs else (slice(None), cols)
        acc = jax.lax.dot_general(
            refs.lhs_buf[lhs_slot, rows],
            refs.rhs_buf[(rhs_slot, *rhs_index)],
            dims,
            precision=plan.precision,
            preferred_element_type=jnp.float32,
        )
        if plan.has_bias:
            acc = acc + refs.bias_buf[lhs_slot, tile_id, :, cols]
        refs.out_buf[out_slot, rows, cols] = acc.astype(refs.out_buf.dtype)

    longest_tail = row_tails[-1] if row_tails else 0
    num_steps = jnp.maximum(num_rows - longest_tail + row_step - 1, 0) // row_step
    tail = num_rows - num_steps * row_step

    def col_body(i, _):
        col = i * col_step

        def row_body(j, _):
            dot(j * row_step, row_step, col)
            return 0

        jax.lax.fori_loop(0, num_steps, row_body, 0)
        for low, high in itertools.pairwise((0, *row_tails)):

            @pl.when((tail > low) & (tail <= high))
            def _(high=high):
                dot(num_steps * row_step, high, col)

        return 0

    num_cols = tiles.cols
    if plan.n % tiles.cols:
        num_cols = jnp.minimum(tiles.cols, plan.n - tile_id * tiles.cols)
    jax.lax.fori_loop(0, (num_cols + col_step - 1) // col_step, col_body, 0)


def _join_strips(plan: _Plan, refs: _Refs, tile_id, slot, start, stop, is_last):
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


def _run_visit(plan: _Plan, refs: _Refs, work: _Work, visit_id, carry):
    """All column tiles of one visit; carry = (step, visit and tile of the next fetch)."""
    tiles = plan.tiles
    lhs_slot = _ring(visit_id, tiles.lhs_slots)
    start, stop = refs.visits[1, visit_id], refs.visits[2, visit_id]
    for copy in _visit_copies(plan, refs, visit_id):
        copy.wait()

    def run_tile(local_id, carry):
        step, *ahead = carry
        tile_id = work.first_tile + local_id
        rhs_slot, out_slot = _ring(step, tiles.slots), _ring(step, tiles.out_slots)
        _weight_copy(plan, refs, visit_id, tile_id, rhs_slot).wait()
        _wait_store(plan, refs, out_slot)
        num_rows = stop - groups.align_down(start)
        _multiply(plan, refs, tile_id, num_rows, lhs_slot, rhs_slot, out_slot)
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


def _kernel(*args, plan: _Plan, fields: tuple[str, ...]):
    """One program per core, which owns a range of column tiles; everything moves by DMA.

    Order of work: visits (pieces of a group, in row order), and column tiles in a visit. In VMEM: a
    ring of weight tiles [cols, k] that runs `slots` steps ahead, so each weight is read once per
    visit; the rows of a visit, read once, with the first tile of the visit in the ring; a ring of
    output windows; the last strip of 8 rows of every column tile if a second group continues it.
    A row strip is stored once, by the last visit that has rows in it; rows outside the groups are
    stored by DMAs from a zero buffer and share no strip with a visit. So no two DMAs write the same
    place, HBM is never read back, and cores write different columns.
    One body for full dots and at most five for the last rows of a visit.

    Bounds checks are off: visits are clipped to [0, m), tile ids are below num_n, and a DMA that is
    rounded up ends in the padding that the tiled layout of an array in HBM has.

    Floor: HBM traffic up to about 560 (v6e) or 240 (v5e) rows a group, the MXU above. Static
    estimate as a multiple of it, v5e / v6e: 512x2048 by 16x1536x2048 1.02 / 1.04, 32768x768 by
    128x2048x768 1.01 / 1.01 (HBM bound: what is left is the first DMA's latency and the last tile's
    dots); 8192x4096 by 8x28672x4096 1.02 / 1.14 (MXU bound: every dot fills and drains the MXU).
    """
    refs, tiles = _Refs(**dict(zip(fields, args, strict=True))), plan.tiles
    num_visits, first_row, last_row = groups.list_visits(
        refs.sizes, refs.offset[0], plan.g, plan.m, tiles.rows, refs.visits
    )
    first_tile, num_tiles = 0, plan.num_n
    if plan.num_cores > 1:
        first_tile = pl.program_id(0) * plan.core_n
        num_tiles = jnp.clip(plan.num_n - first_tile, 0, plan.core_n)
        num_visits = jnp.where(num_tiles > 0, num_visits, 0)
    work = _Work(num_visits, first_tile, num_tiles)

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


def _scratch(plan: _Plan, in_dtype, out_dtype) -> dict[str, object]:
    t = plan.tiles
    rhs_tile = (t.cols, plan.k) if plan.transpose_rhs else (plan.k, t.cols)
    scratch = {
        "visits": pltpu.SMEM((3, groups.max_visits(plan.m, plan.g, t.rows)), jnp.int32),
        "stores": pltpu.SMEM((t.out_slots, 3), jnp.int32),
        "lhs_buf": pltpu.VMEM((t.lhs_slots, t.rows, plan.k), in_dtype),
        "rhs_buf": pltpu.VMEM((t.slots, *rhs_tile), in_dtype),
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
    return scratch


def ragged_dot_fwd(
    lhs: jax.Array,  # [m, k]
    rhs: jax.Array,  # [g, n, k] if transpose_rhs else [g, k, n]
    group_sizes: jax.Array,  # int32 [at least g + offset]
    group_offset: jax.Array,  # int32 [1]
    bias: jax.Array | None = None,  # [g, n]
    *,
    transpose_rhs: bool = False,
    precision: str = "default",
    out_dtype: jnp.dtype | None = None,
    chip: Chip,
    tiles: Tiles | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:  # [m, n]
    """out[r] = lhs[r] @ rhs[group of r] + bias[group of r], exactly zero outside the groups.

    bf16 or f32 (lhs and rhs alike), f32 accumulation; m, k, n, g >= 1. Rows belong to the groups in
    order; those of groups before `group_offset` and past the last local group give zero rows, and
    nothing in them (NaN, inf) reaches another row. Sizes that break the contract are clipped to m.
    """
    (m, k), g = lhs.shape, rhs.shape[0]
    n = rhs.shape[1 if transpose_rhs else 2]
    out_dtype = jnp.dtype(out_dtype or lhs.dtype)
    # An array of fewer than 8 rows has a smaller tile in HBM than the DMAs assume.
    lhs = jnp.pad(lhs, ((0, max(0, SUBLANES - m)), (0, 0)))
    num_rows, m = m, max(m, SUBLANES)
    if tiles is None:
        tiles = tiling.choose(m, k, n, g, lhs.dtype.name, out_dtype.name, transpose_rhs, chip)
    tiling.check(tiles, n, chip)
    is_exact = lhs.dtype == jnp.float32 and precision == "highest"
    plan = _Plan(
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
    )
    inputs = {"sizes": group_sizes, "offset": group_offset, "lhs": lhs, "rhs": rhs}
    if bias is not None:
        bias = jnp.pad(bias.astype(jnp.float32), ((0, 0), (0, plan.num_n * tiles.cols - n)))
        inputs["bias"] = bias.reshape(g, plan.num_n, 1, tiles.cols)
    scratch = _scratch(plan, lhs.dtype, out_dtype)
    smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)
    dtype = {"bfloat16": "bf16", "float32": "f32"}[lhs.dtype.name]
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
