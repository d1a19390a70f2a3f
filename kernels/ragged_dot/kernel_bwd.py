"""Weight gradient of a grouped matmul as one Pallas kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, SUBLANES, Chip, round_up
from . import groups, tiling_bwd
from .tiling_bwd import MASK_ROWS, WeightGradTiles, ceil_div

_DTYPE_NAMES = {"bfloat16": "bf16", "float32": "f32"}


def ragged_dot_weight_grad(
    a: jax.Array,  # [m, p]
    b: jax.Array,  # [m, q]
    group_sizes: jax.Array,  # [at least group_offset + num_groups] int32
    group_offset: jax.Array,  # [1] int32
    num_groups: int,
    *,
    precision: str = "default",
    out_dtype: jnp.dtype,
    chip: Chip,
    tiles: WeightGradTiles | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:  # [g, p, q]
    """out[i] = a[rows of group group_offset + i].T @ b[same rows], f32 sums rounded once.

    a and b are both bf16 or both f32. Groups are consecutive row ranges from row 0 on. Empty groups
    are exactly zero, and no value of a row outside a group (NaN, inf, padding) reaches its block.
    The gradient of rhs [g, k, n] takes a=lhs, b=dout; of rhs [g, n, k] it takes a=dout, b=lhs: no
    operand is ever transposed in HBM.
    """
    assert a.dtype == b.dtype and a.dtype.name in _DTYPE_NAMES, (a.dtype, b.dtype)
    assert group_sizes.shape[0] >= num_groups, (group_sizes.shape, num_groups)
    (m, p), q = a.shape, b.shape[1]
    if m < SUBLANES or p < SUBLANES:
        # Arrays of fewer rows have a smaller tile in HBM, which the row slices below do not fit.
        pad_m, pad_p = max(0, SUBLANES - m), max(0, SUBLANES - p)
        out = ragged_dot_weight_grad(
            jnp.pad(a, ((0, pad_m), (0, pad_p))),
            jnp.pad(b, ((0, pad_m), (0, 0))),
            jnp.minimum(group_sizes, m) if m else jnp.zeros_like(group_sizes),
            group_offset,
            num_groups,
            precision=precision,
            out_dtype=out_dtype,
            chip=chip,
            tiles=tiles,
            interpret=interpret,
        )
        return out[:, :p]
    if tiles is None:
        tiles = tiling_bwd.choose(m, p, q, num_groups, a.dtype, out_dtype, chip)
    num_cores = tiles.num_cores
    buffer = functools.partial(pltpu.VMEM, dtype=a.dtype)
    return pl.pallas_call(
        functools.partial(
            _kernel,
            tiles=tiles,
            precision=jax.lax.Precision.HIGHEST
            if precision == "highest" and a.dtype == jnp.float32
            else jax.lax.Precision.DEFAULT,
            is_exact=bool(interpret),
        ),
        grid=(num_cores,),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pl.ANY),
            pl.BlockSpec(memory_space=pl.ANY),
        ],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct((num_groups, p, q), out_dtype),
        scratch_shapes=[
            buffer((2, tiles.rows, tiles.p)),
            buffer((2, tiles.rows, tiles.q)),
            pltpu.VMEM((tiles.num_slabs, tiles.slab, tiles.q), jnp.float32),
            pltpu.VMEM((tiles.num_stores, tiles.slab, tiles.q), out_dtype),
            pltpu.SMEM((3, groups.max_visits(m, num_groups, tiles.rows)), jnp.int32),
            pltpu.SMEM((2, tiles.num_stores), jnp.int32),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((tiles.num_stores,)),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel" if num_cores > 1 else "arbitrary",),
            vmem_limit_bytes=chip.vmem_bytes * 9 // 10,
        ),
        interpret=interpret,
        name=f"ragged_dot_weight_grad_{_DTYPE_NAMES[a.dtype.name]}"
        f"_tr{tiles.rows}_tp{tiles.p}_tq{tiles.q}",
    )(group_sizes, group_offset, a, b)


def _whole_tiles(size, tile: int, is_exact: bool):
    """The dynamic size of a DMA, rounded up to what the device can address.

    Arrays in HBM are padded to whole tiles, so this stays inside them. Interpret mode has no
    padding and moves the exact number (`is_exact`).
    """
    return size if is_exact else pl.multiple_of(round_up(size, tile), tile)


def _extent(start, size: int, limit: int, tile: int, is_exact: bool):
    """How much of [start, start + size) lies below `limit`; static where it is always all."""
    if limit % size == 0:
        return size
    return _whole_tiles(jnp.minimum(size, limit - start), tile, is_exact)


class _Item(NamedTuple):
    """One piece of work, one visit of one panel, and what the pipeline knows when it begins."""

    visit: jax.Array
    first_visit: jax.Array  # of the group
    panel: jax.Array
    a_slot: jax.Array
    b_slot: jax.Array
    is_a_new: jax.Array  # 1 if a load for this item is under way, 0 if the rows are there already
    is_b_new: jax.Array
    num_stored: jax.Array  # slabs, up to now


def _kernel(
    sizes_ref,  # SMEM [at least g]
    offset_ref,  # SMEM [1]
    a_ref,  # HBM [m, p]
    b_ref,  # HBM [m, q]
    out_ref,  # HBM [g, p, q]
    *scratch_refs,
    tiles: WeightGradTiles,
    precision: jax.lax.Precision,
    is_exact: bool,
):
    """All groups of one panel range of the output; every DMA is made by hand.

    Grid: (cores,), parallel. The output [p, q] of a group is cut into panels [tile p, tile q]
    (usually one). Each core owns a range of panels and makes them for every group, so each output
    block has one writer, and the cores share nothing.

    Work runs over groups, then the core's panels, then the visits (row tiles) of the group. Rows of
    a and b come to VMEM one item ahead, in two slots each; an operand whose rows and columns are
    those of the item before stays where it is. A panel is made slab by slab, [slab, tile q]: dots
    contract over the rows of both operands (the compiler transposes a's side inside VMEM), over a
    compiled length ("bucket") just long enough for the visit. A group of one visit casts its dots
    straight into a store buffer; a group of more adds them up in `sums_ref` and casts at the end.
    An empty group stores zeros. At most 2 + MAX_BUCKETS + 1 bodies are compiled.

    Semaphores: a_sem, b_sem [slot]: started by start_loads, one item ahead, waited for once by
    wait_loads of that item. store_sem [buffer]: started by store, waited for by claim_store before
    the buffer is written again, or at the end of the kernel.

    Race-free: a load goes to the slot that the current item does not read; a store buffer is only
    written after its wait. Foreign rows of a window (up to 7 before, the tail of the bucket after)
    are zeroed in both operands once, after the load.

    Floor: a, b and the output moved once, or the MXU. Static estimates, uniform bf16 groups,
    v5e / v6e in multiples of the floor: [128, 1536, 2048] of 256 rows 1.00 / 1.01, bound by the
    stores; [32, 2880, 5760] of 512 rows 1.07 / 1.00, MXU (2880 is 22.5 lane tiles) / stores;
    [8, 28672, 4096] of 1024 rows 1.03 / 1.12, MXU: each dot fills and drains it anew.
    """
    m, p = a_ref.shape
    num_groups, _, q = out_ref.shape
    total_panels = ceil_div(p, tiles.p) * ceil_div(q, tiles.q)
    core_panels = ceil_div(total_panels, tiles.num_cores)
    first_panel = pl.program_id(0) * core_panels
    work = _Work(
        a_ref,
        b_ref,
        out_ref,
        *scratch_refs,
        tiles=tiles,
        precision=precision,
        is_exact=is_exact,
        first_panel=first_panel,
        num_panels=jnp.minimum(core_panels, total_panels - first_panel),
    )
    num_visits, _, _ = groups.list_visits(
        sizes_ref, offset_ref[0], num_groups, m, tiles.rows, work.visits_ref, with_empty=True
    )
    num_items = num_visits * work.num_panels

    zero = jnp.int32(0)
    is_loading = ((num_items > 0) & ~work.is_empty(0)).astype(jnp.int32)
    first = _Item(zero, zero, zero, zero, zero, is_loading, is_loading, zero)
    work.start_loads(first)

    def do_item(item_id, item):
        next_item = work.next_item(item, num_visits, item_id + 1 < num_items)
        work.start_loads(next_item)
        work.do_item(item, num_visits)
        return next_item

    num_stored = jax.lax.fori_loop(0, num_items, do_item, first).num_stored
    jax.lax.fori_loop(
        jnp.maximum(0, num_stored - tiles.num_stores),
        num_stored,
        lambda i, _: work.wait_store(i % tiles.num_stores),
        None,
    )


@dataclass(frozen=True)
class _Work:
    """The refs of one kernel call and the steps that work on them."""

    a_ref: Any  # HBM [m, p]
    b_ref: Any  # HBM [m, q]
    out_ref: Any  # HBM [g, p, q]
    a_rows_ref: Any  # [2, rows, tile p]
    b_rows_ref: Any  # [2, rows, tile q]
    sums_ref: Any  # [slabs, slab, tile q] f32
    store_ref: Any  # [stores, slab, tile q]
    visits_ref: Any  # SMEM [3, max visits]
    stored_ref: Any  # SMEM [2, stores], extent of the DMA last started from each store buffer
    a_sem: Any  # [2]
    b_sem: Any  # [2]
    store_sem: Any  # [stores]
    tiles: WeightGradTiles
    precision: jax.lax.Precision
    is_exact: bool
    first_panel: jax.Array
    num_panels: jax.Array

    def window(self, visit):
        """First row of the window; rows before the group's; rows up to the end of the group's."""
        start, stop = self.visits_ref[1, visit], self.visits_ref[2, visit]
        base = groups.align_down(start)
        return pl.multiple_of(base, SUBLANES), start - base, stop - base

    def is_empty(self, visit):
        return self.visits_ref[2, visit] <= self.visits_ref[1, visit]

    def is_last(self, visit, num_visits):
        """Whether it is the last visit of its group."""
        next_visit = jnp.minimum(visit + 1, num_visits - 1)
        is_other = self.visits_ref[0, next_visit] != self.visits_ref[0, visit]
        return (visit + 1 == num_visits) | is_other

    def corner(self, panel):
        panel = self.first_panel + panel
        num_p = ceil_div(self.a_ref.shape[1], self.tiles.p)
        return panel % num_p * self.tiles.p, panel // num_p * self.tiles.q

    def num_slabs(self, panel):
        row, _ = self.corner(panel)
        return ceil_div(jnp.minimum(self.tiles.p, self.a_ref.shape[1] - row), self.tiles.slab)

    def next_item(self, item, num_visits, is_any) -> _Item:
        """All visits of a panel, all panels of a group, all groups."""
        is_last = self.is_last(item.visit, num_visits)
        is_group_done = is_last & (item.panel + 1 == self.num_panels)
        following = jnp.minimum(item.visit + 1, num_visits - 1)
        visit = jnp.where(is_last & ~is_group_done, item.first_visit, following)
        panel = jnp.where(is_group_done, 0, jnp.where(is_last, item.panel + 1, item.panel))
        row, column = self.corner(item.panel)
        next_row, next_column = self.corner(panel)
        is_loading = is_any & ~self.is_empty(visit)
        is_a_new = is_loading & ((visit != item.visit) | (next_row != row))
        is_b_new = is_loading & ((visit != item.visit) | (next_column != column))
        return _Item(
            visit=visit,
            first_visit=jnp.where(is_group_done, following, item.first_visit),
            panel=panel,
            a_slot=jnp.where(is_a_new, 1 - item.a_slot, item.a_slot),
            b_slot=jnp.where(is_b_new, 1 - item.b_slot, item.b_slot),
            is_a_new=is_a_new.astype(jnp.int32),
            is_b_new=is_b_new.astype(jnp.int32),
            num_stored=item.num_stored + jnp.where(is_last, self.num_slabs(item.panel), 0),
        )

    def load(self, ref, rows_ref, sem, visit, column, width, slot):
        base, _, size = self.window(visit)
        rows = _whole_tiles(size, SUBLANES, self.is_exact)
        columns = _extent(column, width, ref.shape[1], LANES, self.is_exact)
        return pltpu.make_async_copy(
            ref.at[pl.ds(base, rows), pl.ds(pl.multiple_of(column, LANES), columns)],
            rows_ref.at[slot, pl.ds(0, rows), pl.ds(0, columns)],
            sem.at[slot],
        )

    def loads(self, item):
        """(is new, DMA, rows in VMEM) of both operands."""
        row, column = self.corner(item.panel)
        a = self.a_ref, self.a_rows_ref, self.a_sem, item.visit, row, self.tiles.p, item.a_slot
        b = self.b_ref, self.b_rows_ref, self.b_sem, item.visit, column, self.tiles.q, item.b_slot
        yield item.is_a_new, functools.partial(self.load, *a), self.a_rows_ref.at[item.a_slot]
        yield item.is_b_new, functools.partial(self.load, *b), self.b_rows_ref.at[item.b_slot]

    def start_loads(self, item):
        for is_new, load, _ in self.loads(item):
            pl.when(is_new != 0)(lambda load=load: load().start())

    def wait_loads(self, item, bucket):
        for is_new, load, rows_ref in self.loads(item):

            @pl.when(is_new != 0)
            def _(load=load, rows_ref=rows_ref):
                load().wait()
                self.clear_foreign(rows_ref, item.visit, bucket)

    def clear_foreign(self, rows_ref, visit, bucket):
        """Zeroes the rows of the window that are not the group's, up to the end of the bucket.

        In both operands: 0 * NaN is NaN. Selects, because the rows may hold anything.
        """
        _, lead, size = self.window(visit)

        def clear(strip, _):
            start = pl.multiple_of(strip * MASK_ROWS, MASK_ROWS)
            x = rows_ref[pl.ds(start, MASK_ROWS), :]
            row = start + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
            is_own = (row >= lead) & (row < size)
            rows_ref[pl.ds(start, MASK_ROWS), :] = jnp.where(is_own, x, jnp.zeros_like(x))

        pl.when(lead > 0)(lambda: clear(0, None))
        end = bucket * (self.tiles.bucket_rows // MASK_ROWS)
        jax.lax.fori_loop(size // MASK_ROWS, end, clear, None)

    def copy_out(self, group, row, column, rows, columns, buffer):
        return pltpu.make_async_copy(
            self.store_ref.at[buffer, pl.ds(0, rows), pl.ds(0, columns)],
            self.out_ref.at[group, pl.ds(row, rows), pl.ds(column, columns)],
            self.store_sem.at[buffer],
        )

    def store(self, item, slab, buffer):
        """Starts the DMA of a slab, noting its extent for the wait."""
        _, p, q = self.out_ref.shape
        row, column = self.corner(item.panel)
        row = pl.multiple_of(row + slab * self.tiles.slab, SUBLANES)
        column = pl.multiple_of(column, LANES)
        rows = _extent(row, self.tiles.slab, p, SUBLANES, self.is_exact)
        columns = _extent(column, self.tiles.q, q, LANES, self.is_exact)
        self.stored_ref[0, buffer], self.stored_ref[1, buffer] = rows, columns
        group = self.visits_ref[0, item.visit]
        self.copy_out(group, row, column, rows, columns, buffer).start()

    def wait_store(self, buffer, is_used=True):
        """Waits for the DMA last started from this buffer."""
        _, p, q = self.out_ref.shape
        rows, columns = self.stored_ref[0, buffer], self.stored_ref[1, buffer]
        if not self.is_exact:
            rows, columns = pl.multiple_of(rows, SUBLANES), pl.multiple_of(columns, LANES)
        rows = rows if p % self.tiles.slab else self.tiles.slab
        columns = columns if q % self.tiles.q else self.tiles.q
        copy = functools.partial(self.copy_out, 0, 0, 0, rows, columns, buffer)
        pl.when(is_used)(lambda: copy().wait())

    def claim_store(self, count):
        """The store buffer of the slab number `count`, once its last DMA is over."""
        buffer = count % self.tiles.num_stores
        self.wait_store(buffer, count >= self.tiles.num_stores)
        return buffer

    def for_each_dot(self, do_columns: Callable):
        """Calls do_columns with each range of columns that one dot makes."""

        def do_part(part, _):
            do_columns(pl.ds(pl.multiple_of(part * self.tiles.dot_q, LANES), self.tiles.dot_q))

        jax.lax.fori_loop(0, self.tiles.q // self.tiles.dot_q, do_part, None)

    def dot(self, item, slab, columns, bucket: int):
        """[slab, columns] of a.T @ b over the rows of the bucket."""
        rows = bucket * self.tiles.bucket_rows
        own = pl.ds(pl.multiple_of(slab * self.tiles.slab, LANES), self.tiles.slab)
        return jax.lax.dot_general(
            self.a_rows_ref[item.a_slot, :rows, own],
            self.b_rows_ref[item.b_slot, :rows, columns],
            (((0,), (0,)), ((), ())),
            precision=self.precision,
            preferred_element_type=jnp.float32,
        )

    def do_whole_group(self, item, bucket: int):
        """The group is one visit: no partial sums. Bucket 0 is an empty group."""

        def do_slab(slab, _):
            buffer = self.claim_store(item.num_stored + slab)

            def do_columns(columns):
                shape, dtype = (self.tiles.slab, self.tiles.dot_q), self.store_ref.dtype
                self.store_ref[buffer, :, columns] = (
                    self.dot(item, slab, columns, bucket).astype(dtype)
                    if bucket
                    else jnp.zeros(shape, dtype)
                )

            self.for_each_dot(do_columns)
            self.store(item, slab, buffer)

        jax.lax.fori_loop(0, self.num_slabs(item.panel), do_slab, None)

    def do_part_of_group(self, item, is_last, bucket: int):
        """One of several visits: adds to the sums in VMEM, the last one stores them."""
        is_first = item.visit == item.first_visit

        def do_slab(slab, _):
            def add(columns):
                x = self.dot(item, slab, columns, bucket)
                old = self.sums_ref[slab, :, columns]
                self.sums_ref[slab, :, columns] = x + jnp.where(is_first, jnp.zeros_like(old), old)

            self.for_each_dot(add)

            @pl.when(is_last)
            def _():
                buffer = self.claim_store(item.num_stored + slab)

                def cast(columns):
                    sums = self.sums_ref[slab, :, columns]
                    self.store_ref[buffer, :, columns] = sums.astype(self.store_ref.dtype)

                self.for_each_dot(cast)
                self.store(item, slab, buffer)

        jax.lax.fori_loop(0, self.num_slabs(item.panel), do_slab, None)

    def do_item(self, item, num_visits):
        num_buckets = self.tiles.num_buckets
        # Groups of several visits know two contraction lengths only, to save compiled bodies.
        half = ceil_div(num_buckets, 2)
        is_last = self.is_last(item.visit, num_visits)
        is_whole = is_last & (item.visit == item.first_visit)
        _, _, size = self.window(item.visit)
        bucket = jnp.where(self.is_empty(item.visit), 0, ceil_div(size, self.tiles.bucket_rows))
        coarse = jnp.where(bucket > half, num_buckets, half)
        self.wait_loads(item, jnp.where(is_whole, bucket, coarse))
        jax.lax.switch(
            jnp.where(is_whole, bucket, num_buckets + 1 + (bucket > half)),
            [functools.partial(self.do_whole_group, item, i) for i in range(num_buckets + 1)]
            + [
                functools.partial(self.do_part_of_group, item, is_last, i)
                for i in (half, num_buckets)
            ],
        )
