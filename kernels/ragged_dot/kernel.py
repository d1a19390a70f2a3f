"""Grouped matmul: out[r] = lhs[r] @ rhs[group of r] for groups of consecutive rows."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, SUBLANES, Chip
from . import groups, tiling
from .tiling import Tiles, round_up


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

        HBM buffers are padded to whole row tiles, so a DMA may run past row m; the interpreter has
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


def _rows(start, stop):
    return pl.ds(pl.multiple_of(start, SUBLANES), pl.multiple_of(stop - start, SUBLANES))


@dataclasses.dataclass(frozen=True)
class _Refs:
    sizes: jax.Ref  # SMEM int32 [>= offset + g]
    offset: jax.Ref  # SMEM int32 [1]
    lhs: jax.Ref  # HBM [m, k]
    rhs: jax.Ref  # HBM [g, n, k] or [g, k, n]
    bias: jax.Ref | None  # HBM float32 [g, num_n, 1, cols]
    out: jax.Ref  # HBM [m, n]
    visits: jax.Ref  # SMEM int32 [3, max_visits]
    stores: jax.Ref  # SMEM int32 [out_slots, 3]: first row, row past the last, column tile of a window
    lhs_buf: jax.Ref  # [lhs_slots, rows, k]
    rhs_buf: jax.Ref  # [slots, cols, k] or [slots, k, cols]
    bias_buf: jax.Ref | None  # [lhs_slots, num_n, 1, cols]
    out_buf: jax.Ref  # [out_slots, rows, cols]
    partial: jax.Ref  # [core_n, 8, cols] rows of the strip that the next visit completes
    zeros: jax.Ref  # [rows, cols]
    lhs_sem: jax.Ref
    rhs_sem: jax.Ref
    bias_sem: jax.Ref | None
    out_sem: jax.Ref
    zero_sem: jax.Ref


def _ring(i, size):
    """Slot of the i-th user of a ring."""
    return i & (size - 1) if size & (size - 1) == 0 else jax.lax.rem(i, size)


def _lhs_copies(plan, refs, visit_id, slot):
    """DMAs of a visit's rows and bias."""
    base = groups.align_down(refs.visits[1, visit_id])
    stop = plan.row_stop(refs.visits[2, visit_id])
    copies = [
        pltpu.make_async_copy(
            refs.lhs.at[_rows(base, stop)],
            refs.lhs_buf.at[slot, _rows(0, stop - base)],
            refs.lhs_sem.at[slot],
        )
    ]
    if plan.has_bias:
        copies.append(
            pltpu.make_async_copy(
                refs.bias.at[refs.visits[0, visit_id]], refs.bias_buf.at[slot], refs.bias_sem.at[slot]
            )
        )
    return copies


def _rhs_copy(plan, refs, visit_id, tile_id, slot):
    cols = plan.col_slice(tile_id)
    local = pl.ds(0, cols.size)
    group_id = refs.visits[0, visit_id]
    if plan.transpose_rhs:
        src, dst = refs.rhs.at[group_id, cols], refs.rhs_buf.at[slot, local]
    else:
        src, dst = refs.rhs.at[group_id, :, cols], refs.rhs_buf.at[slot, :, local]
    return pltpu.make_async_copy(src, dst, refs.rhs_sem.at[slot])


def _store_copy(plan, refs, slot):
    """DMA of the rows that `stores[slot]` names."""
    start, stop, tile_id = (refs.stores[slot, i] for i in range(3))
    cols = plan.col_slice(tile_id)
    return pltpu.make_async_copy(
        refs.out_buf.at[slot, _rows(0, stop - start), pl.ds(0, cols.size)],
        refs.out.at[_rows(start, stop), cols],
        refs.out_sem.at[slot],
    )


def _wait_store(plan, refs, slot):
    @pl.when(refs.stores[slot, 1] > refs.stores[slot, 0])
    def _():
        _store_copy(plan, refs, slot).wait()


def _for_zero_copies(plan, refs, row_ranges, first_tile, num_tiles, act):
    """Calls act(DMA) for every piece of rows outside the groups."""
    step = plan.tiles.rows
    for start, stop in row_ranges:

        def piece(i, _, start=start, stop=stop):
            row = start + i // num_tiles * step
            cols = plan.col_slice(first_tile + i % num_tiles)
            rows = _rows(row, plan.row_stop(jnp.minimum(row + step, stop)))
            act(
                pltpu.make_async_copy(
                    refs.zeros.at[pl.ds(0, rows.size), pl.ds(0, cols.size)],
                    refs.out.at[rows, cols],
                    refs.zero_sem.at[0],
                )
            )
            return 0

        num_rows = jnp.maximum(stop - start, 0)
        jax.lax.fori_loop(0, (num_rows + step - 1) // step * num_tiles, piece, 0)


def _multiply(plan, refs, tile_id, num_rows, lhs_slot, rhs_slot, out_slot):
    """out_buf[out_slot, :num_rows] = lhs_buf[lhs_slot, :num_rows] @ rhs_buf[rhs_slot] + bias."""
    tiles = plan.tiles
    row_step, col_step, row_tails = tiles.row_step, tiles.col_step, tiles.row_tails
    dims = (((1,), (1 if plan.transpose_rhs else 0,)), ((), ()))

    def dot(row, size, col):
        rows = pl.ds(pl.multiple_of(row, min(row_step, SUBLANES * 2)), size)
        cols = pl.ds(pl.multiple_of(col, col_step), col_step) if tiles.cols > col_step else pl.ds(0, col_step)
        lhs = refs.lhs_buf[lhs_slot, rows, :]
        rhs = refs.rhs_buf[rhs_slot, cols] if plan.transpose_rhs else refs.rhs_buf[rhs_slot, :, cols]
        acc = jax.lax.dot_general(
            lhs, rhs, dims, precision=plan.precision, preferred_element_type=jnp.float32
        )
        if plan.has_bias:
            acc = acc + refs.bias_buf[lhs_slot, tile_id, :, cols]
        refs.out_buf[out_slot, rows, cols] = acc.astype(refs.out_buf.dtype)

    longest_tail = row_tails[-1] if row_tails else 0
    num_steps = jnp.maximum(num_rows - longest_tail + row_step - 1, 0) // row_step
    tail = num_rows - num_steps * row_step

    num_cols = tiles.cols
    if plan.n % tiles.cols:
        num_cols = jnp.minimum(tiles.cols, plan.n - tile_id * tiles.cols)
    num_col_steps = (num_cols + col_step - 1) // col_step

    def col_body(i, _):
        col = i * col_step

        def row_body(j, _):
            dot(j * row_step, row_step, col)
            return 0

        jax.lax.fori_loop(0, num_steps, row_body, 0)
        for low, high in zip((0, *row_tails), row_tails):

            @pl.when((tail > low) & (tail <= high))
            def _(high=high):
                dot(num_steps * row_step, high, col)

        return 0

    jax.lax.fori_loop(0, num_col_steps, col_body, 0)


def _join_strips(plan, refs, tile_id, slot, start, stop, is_last):
    """Completes the first 8-row strip of a window from `partial` and keeps an unfinished last one.

    Returns the row past the last finished strip.
    """
    base = groups.align_down(start)
    last_strip = groups.align_down(stop)
    cols = plan.tiles.cols

    @pl.when(start > base)
    def _():
        row = base + jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, cols), 0)
        strip = refs.out_buf.at[slot, pl.ds(0, SUBLANES)]
        strip[...] = jnp.where(row < start, refs.partial[tile_id], strip[...])

    @pl.when(stop > last_strip)
    def _():
        row = last_strip + jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, cols), 0)
        offset = pl.multiple_of(last_strip - base, SUBLANES)
        strip = refs.out_buf.at[slot, pl.ds(offset, SUBLANES)]
        kept = jnp.where(row < stop, strip[...], jnp.zeros_like(strip))
        refs.partial[tile_id] = kept
        strip[...] = kept

    return base, jnp.where(is_last, plan.row_stop(stop), last_strip)


def _kernel(*args, plan: _Plan, fields: tuple[str, ...]):
    refs = _Refs(**{"bias": None, "bias_buf": None, "bias_sem": None}, **dict(zip(fields, args))) if not plan.has_bias else _Refs(**dict(zip(fields, args)))
    tiles = plan.tiles
    num_visits, first_row, last_row = groups.list_visits(
        refs.sizes, refs.offset[0], plan.g, plan.m, tiles.rows, refs.visits
    )
    first_tile, num_tiles = 0, plan.num_n
    if plan.num_cores > 1:
        first_tile = pl.program_id(0) * plan.core_n
        num_tiles = jnp.clip(plan.num_n - first_tile, 0, plan.core_n)
        num_visits = jnp.where(num_tiles > 0, num_visits, 0)

    def fetch(rhs_slot, ahead):
        """Starts the DMAs of the step `ahead`; a visit's rows come with its first weight tile."""
        visit_id, tile_id = ahead

        @pl.when(visit_id < num_visits)
        def _():
            @pl.when(tile_id == 0)
            def _():
                for copy in _lhs_copies(plan, refs, visit_id, _ring(visit_id, tiles.lhs_slots)):
                    copy.start()

            _rhs_copy(plan, refs, visit_id, first_tile + tile_id, rhs_slot).start()

        is_last = tile_id + 1 == num_tiles
        return jnp.where(is_last, visit_id + 1, visit_id), jnp.where(is_last, 0, tile_id + 1)

    zero = jnp.int32(0)
    ahead = jax.lax.fori_loop(0, tiles.slots, fetch, (zero, zero))

    no_rows = num_visits == 0
    outside = (
        (0, jnp.where(no_rows, 0, groups.align_down(first_row))),
        (jnp.where(no_rows, 0, plan.row_stop(last_row)), plan.m),
    )

    @pl.when((outside[0][1] > 0) | (outside[1][0] < plan.m))
    def _():
        refs.zeros[...] = jnp.zeros_like(refs.zeros)

    refs.partial[...] = jnp.zeros_like(refs.partial)
    for slot in range(tiles.out_slots):
        refs.stores[slot, 0] = 0
        refs.stores[slot, 1] = 0
    _for_zero_copies(plan, refs, outside, first_tile, num_tiles, lambda copy: copy.start())

    def visit(visit_id, carry):
        lhs_slot = _ring(visit_id, tiles.lhs_slots)
        start, stop = refs.visits[1, visit_id], refs.visits[2, visit_id]
        for copy in _lhs_copies(plan, refs, visit_id, lhs_slot):
            copy.wait()

        def tile(tile_id, carry):
            step, *ahead = carry
            rhs_slot, out_slot = _ring(step, tiles.slots), _ring(step, tiles.out_slots)
            _rhs_copy(plan, refs, visit_id, first_tile + tile_id, rhs_slot).wait()
            _wait_store(plan, refs, out_slot)
            num_rows = stop - groups.align_down(start)
            _multiply(plan, refs, first_tile + tile_id, num_rows, lhs_slot, rhs_slot, out_slot)
            ahead = fetch(rhs_slot, ahead)
            base, done = _join_strips(
                plan, refs, tile_id, out_slot, start, stop, visit_id + 1 == num_visits
            )
            refs.stores[out_slot, 0] = base
            refs.stores[out_slot, 1] = done
            refs.stores[out_slot, 2] = first_tile + tile_id

            @pl.when(done > base)
            def _():
                _store_copy(plan, refs, out_slot).start()

            return step + 1, *ahead

        return jax.lax.fori_loop(0, num_tiles, tile, carry)

    jax.lax.fori_loop(0, num_visits, visit, (zero, *ahead))
    for slot in range(tiles.out_slots):
        _wait_store(plan, refs, slot)
    _for_zero_copies(plan, refs, outside, first_tile, num_tiles, lambda copy: copy.wait())


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
    rhs: jax.Array,  # [g, k, n], or [g, n, k] if transpose_rhs
    group_sizes: jax.Array,  # int32 [>= g + offset]
    group_offset: jax.Array,  # int32 [1]
    bias: jax.Array | None = None,  # [g, n]
    *,
    transpose_rhs: bool = False,
    precision: str = "default",
    out_dtype=None,
    chip: Chip,
    tiles: Tiles | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:  # [m, n]
    """out[r] = lhs[r] @ rhs[group of r] + bias[group of r]; zero for rows outside the groups."""
    m, k = lhs.shape
    g = rhs.shape[0]
    n = rhs.shape[1 if transpose_rhs else 2]
    out_dtype = jnp.dtype(out_dtype or lhs.dtype)
    if m < SUBLANES:
        lhs = jnp.pad(lhs, ((0, SUBLANES - m), (0, 0)))
        out = ragged_dot_fwd(
            lhs, rhs, group_sizes, group_offset, bias, transpose_rhs=transpose_rhs,
            precision=precision, out_dtype=out_dtype, chip=chip, tiles=tiles, interpret=interpret,
        )
        return out[:m]
    if tiles is None:
        tiles = tiling.choose(m, k, n, g, lhs.dtype.name, out_dtype.name, transpose_rhs, chip)
    wide = lhs.dtype == jnp.float32 and precision == "highest"
    plan = _Plan(
        m, k, n, g, tiles, chip.num_cores, transpose_rhs, bias is not None,
        jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT, bool(interpret),
    )
    scratch = _scratch(plan, lhs.dtype, out_dtype)
    smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)
    inputs = {"sizes": group_sizes, "offset": group_offset, "lhs": lhs, "rhs": rhs}
    if bias is not None:
        pad = plan.num_n * tiles.cols - n
        bias = jnp.pad(bias.astype(jnp.float32), ((0, 0), (0, pad)))
        inputs["bias"] = bias.reshape(g, plan.num_n, 1, tiles.cols)
    dtype = {"bfloat16": "bf16", "float32": "f32"}[lhs.dtype.name]
    call = pl.pallas_call(
        functools.partial(_kernel, plan=plan, fields=(*inputs, "out", *scratch)),
        out_shape=jax.ShapeDtypeStruct((m, n), out_dtype),
        grid=(chip.num_cores,),
        in_specs=[smem, smem] + [hbm] * (len(inputs) - 2),
        out_specs=hbm,
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=chip.vmem_bytes * 9 // 10,
            disable_bounds_checks=True,
        ),
        interpret=interpret,
        name=f"ragged_dot_fwd_{dtype}_{'nt' if transpose_rhs else 'nn'}_tm{tiles.rows}_tn{tiles.cols}",
    )
    return call(*inputs.values())
