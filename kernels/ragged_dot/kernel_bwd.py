"""Weight gradient of a grouped matmul as one Pallas kernel."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, SUBLANES, Chip
from . import groups, tiling_bwd
from .tiling_bwd import MASK_ROWS, WeightGradTiles, ceil_div, round_up

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
    """out[i] = a[rows of group group_offset + i].T @ b[same rows], accumulated in f32, rounded once.

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
            num_groups=num_groups,
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

    Arrays in HBM are padded to whole tiles, so this stays inside them. Interpret mode has no padding
    and moves the exact number (`is_exact`).
    """
    return size if is_exact else pl.multiple_of(round_up(size, tile), tile)


def _extent(start, size: int, limit: int, tile: int, is_exact: bool):
    """How much of [start, start + size) lies below `limit`; static where it is always all."""
    if limit % size == 0:
        return size
    return _whole_tiles(jnp.minimum(size, limit - start), tile, is_exact)


def _kernel(
    sizes_ref,  # SMEM [at least g]
    offset_ref,  # SMEM [1]
    a_ref,  # HBM [m, p]
    b_ref,  # HBM [m, q]
    out_ref,  # HBM [g, p, q]
    a_rows_ref,  # [2, rows, tile p]
    b_rows_ref,  # [2, rows, tile q]
    acc_ref,  # [slabs, slab, tile q] f32
    store_ref,  # [stores, slab, tile q]
    visits_ref,  # SMEM [3, max visits]
    stored_ref,  # SMEM [2, stores], extent of the DMA last started from each store buffer
    a_sem,  # [2]
    b_sem,  # [2]
    store_sem,  # [stores]
    *,
    tiles: WeightGradTiles,
    num_groups: int,
    precision: jax.lax.Precision,
    is_exact: bool,
):
    """TODO"""
    m, p = a_ref.shape
    q = b_ref.shape[1]
    num_p, num_q = ceil_div(p, tiles.p), ceil_div(q, tiles.q)
    core_panels = ceil_div(num_p * num_q, tiles.num_cores)
    first_panel = pl.program_id(0) * core_panels
    num_panels = jnp.minimum(core_panels, num_p * num_q - first_panel)
    # Sums over several visits know two contraction lengths only, to save compiled bodies.
    half_bucket = ceil_div(tiles.num_buckets, 2)

    offset = jnp.clip(offset_ref[0], 0, sizes_ref.shape[0] - num_groups)
    num_visits, _, _ = groups.list_visits(
        sizes_ref, offset, num_groups, m, tiles.rows, visits_ref, with_empty=True
    )
    num_items = num_visits * num_panels

    def window(visit):
        """First row of the window, rows before the group's, rows up to the end of the group's."""
        start, stop = visits_ref[1, visit], visits_ref[2, visit]
        base = groups.align_down(start)
        return pl.multiple_of(base, SUBLANES), start - base, stop - base

    def is_empty(visit):
        return visits_ref[2, visit] <= visits_ref[1, visit]

    def corner(panel):
        panel = first_panel + panel
        return panel % num_p * tiles.p, panel // num_p * tiles.q

    def load(ref, rows_ref, sem, visit, column, width, slot):
        base, _, size = window(visit)
        rows = _whole_tiles(size, SUBLANES, is_exact)
        columns = _extent(column, width, ref.shape[1], LANES, is_exact)
        return pltpu.make_async_copy(
            ref.at[pl.ds(base, rows), pl.ds(pl.multiple_of(column, LANES), columns)],
            rows_ref.at[slot, pl.ds(0, rows), pl.ds(0, columns)],
            sem.at[slot],
        )

    def load_a(visit, panel, slot):
        return load(a_ref, a_rows_ref, a_sem, visit, corner(panel)[0], tiles.p, slot)

    def load_b(visit, panel, slot):
        return load(b_ref, b_rows_ref, b_sem, visit, corner(panel)[1], tiles.q, slot)

    def clear_foreign(rows_ref, slot, visit, bucket):
        """Zeroes rows of the window that are not the group's, up to the end of its bucket."""
        _, lead, size = window(visit)

        def clear(strip, _):
            start = pl.multiple_of(strip * MASK_ROWS, MASK_ROWS)
            x = rows_ref[slot, pl.ds(start, MASK_ROWS), :]
            row = start + jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
            keep = (row >= lead) & (row < size)
            rows_ref[slot, pl.ds(start, MASK_ROWS), :] = jnp.where(keep, x, jnp.zeros_like(x))

        @pl.when(lead > 0)
        def _():
            clear(0, None)

        end = bucket * tiles.bucket_rows // MASK_ROWS
        jax.lax.fori_loop(size // MASK_ROWS, end, clear, None)

    def copy_out(group, row, column, rows, columns, buffer):
        return pltpu.make_async_copy(
            store_ref.at[buffer, pl.ds(0, rows), pl.ds(0, columns)],
            out_ref.at[group, pl.ds(row, rows), pl.ds(column, columns)],
            store_sem.at[buffer],
        )

    def store(group, panel, slab, buffer):
        row, column = corner(panel)
        row = pl.multiple_of(row + slab * tiles.slab, SUBLANES)
        column = pl.multiple_of(column, LANES)
        rows = _extent(row, tiles.slab, p, SUBLANES, is_exact)
        columns = _extent(column, tiles.q, q, LANES, is_exact)
        stored_ref[0, buffer], stored_ref[1, buffer] = rows, columns
        copy_out(group, row, column, rows, columns, buffer).start()

    def wait_store(buffer, is_used=True):
        """Waits for the DMA last started from this buffer, whose extent only SMEM knows."""
        rows, columns = stored_ref[0, buffer], stored_ref[1, buffer]
        if not is_exact:
            rows, columns = pl.multiple_of(rows, SUBLANES), pl.multiple_of(columns, LANES)
        rows = rows if p % tiles.slab else tiles.slab
        columns = columns if q % tiles.q else tiles.q

        @pl.when(is_used)
        def _():
            copy_out(0, 0, 0, rows, columns, buffer).wait()

    def claim(count):
        """The next store buffer, once its last DMA is over."""
        buffer = count % tiles.num_stores
        wait_store(buffer, count >= tiles.num_stores)
        return buffer

    def dot(a_slot, b_slot, slab, part, rows):
        columns = pl.ds(pl.multiple_of(part * tiles.dot_q, LANES), tiles.dot_q)
        return jax.lax.dot_general(
            a_rows_ref[a_slot, :rows, pl.ds(pl.multiple_of(slab * tiles.slab, LANES), tiles.slab)],
            b_rows_ref[b_slot, :rows, columns],
            (((0,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        ), columns

    num_parts = tiles.q // tiles.dot_q

    def whole_group(bucket, group, panel, a_slot, b_slot, count, num_slabs):
        """The group has one visit: no partial sums."""

        def do_slab(slab, _):
            buffer = claim(count + slab)

            def do_part(part, _):
                if bucket:
                    x, columns = dot(a_slot, b_slot, slab, part, bucket * tiles.bucket_rows)
                    store_ref[buffer, :, columns] = x.astype(store_ref.dtype)
                else:
                    columns = pl.ds(pl.multiple_of(part * tiles.dot_q, LANES), tiles.dot_q)
                    store_ref[buffer, :, columns] = jnp.zeros(
                        (tiles.slab, tiles.dot_q), store_ref.dtype
                    )

            jax.lax.fori_loop(0, num_parts, do_part, None)
            store(group, panel, slab, buffer)

        jax.lax.fori_loop(0, num_slabs, do_slab, None)

    def part_of_group(bucket, group, panel, a_slot, b_slot, count, num_slabs, is_first, is_last):
        def do_slab(slab, _):
            def do_part(part, _):
                x, columns = dot(a_slot, b_slot, slab, part, bucket * tiles.bucket_rows)
                old = acc_ref[slab, :, columns]
                acc_ref[slab, :, columns] = x + jnp.where(is_first, jnp.zeros_like(old), old)

            jax.lax.fori_loop(0, num_parts, do_part, None)

            @pl.when(is_last)
            def _():
                buffer = claim(count + slab)

                def do_part(part, _):
                    columns = pl.ds(pl.multiple_of(part * tiles.dot_q, LANES), tiles.dot_q)
                    store_ref[buffer, :, columns] = acc_ref[slab, :, columns].astype(
                        store_ref.dtype
                    )

                jax.lax.fori_loop(0, num_parts, do_part, None)
                store(group, panel, slab, buffer)

        jax.lax.fori_loop(0, num_slabs, do_slab, None)

    def do_item(item, carry):
        visit, first_visit, panel, a_slot, b_slot, a_new, b_new, count = carry
        group = visits_ref[0, visit]
        next_id = jnp.minimum(visit + 1, num_visits - 1)
        is_last = (visit + 1 == num_visits) | (visits_ref[0, next_id] != group)
        is_last_panel = panel + 1 == num_panels
        next_visit = jnp.where(is_last & ~is_last_panel, first_visit, next_id)
        next_first = jnp.where(is_last & is_last_panel, next_id, first_visit)
        next_panel = jnp.where(is_last, jnp.where(is_last_panel, 0, panel + 1), panel)
        is_loading = (item + 1 < num_items) & ~is_empty(next_visit)
        row, column = corner(panel)
        next_row, next_column = corner(next_panel)
        next_a_new = is_loading & ((next_visit != visit) | (next_row != row))
        next_b_new = is_loading & ((next_visit != visit) | (next_column != column))
        next_a_slot = jnp.where(next_a_new, 1 - a_slot, a_slot)
        next_b_slot = jnp.where(next_b_new, 1 - b_slot, b_slot)

        @pl.when(next_a_new)
        def _():
            load_a(next_visit, next_panel, next_a_slot).start()

        @pl.when(next_b_new)
        def _():
            load_b(next_visit, next_panel, next_b_slot).start()

        is_first = visit == first_visit
        is_whole = is_first & is_last
        bucket = jnp.where(is_empty(visit), 0, ceil_div(window(visit)[2], tiles.bucket_rows))
        coarse_bucket = jnp.where(bucket > half_bucket, tiles.num_buckets, half_bucket)
        bucket = jnp.where(is_whole, bucket, coarse_bucket)

        @pl.when(a_new != 0)
        def _():
            load_a(visit, panel, a_slot).wait()
            clear_foreign(a_rows_ref, a_slot, visit, bucket)

        @pl.when(b_new != 0)
        def _():
            load_b(visit, panel, b_slot).wait()
            clear_foreign(b_rows_ref, b_slot, visit, bucket)

        num_slabs = ceil_div(jnp.minimum(tiles.p, p - row), tiles.slab)
        args = (group, panel, a_slot, b_slot, count, num_slabs)
        jax.lax.switch(
            jnp.where(is_whole, bucket, tiles.num_buckets + 1 + (bucket > half_bucket)),
            [functools.partial(whole_group, i, *args) for i in range(tiles.num_buckets + 1)]
            + [
                functools.partial(part_of_group, i, *args, is_first, is_last)
                for i in (half_bucket, tiles.num_buckets)
            ],
        )
        return (
            next_visit,
            next_first,
            next_panel,
            next_a_slot,
            next_b_slot,
            next_a_new.astype(jnp.int32),
            next_b_new.astype(jnp.int32),
            jnp.where(is_last, count + num_slabs, count),
        )

    is_loading = (num_items > 0) & ~is_empty(0)

    @pl.when(is_loading)
    def _():
        load_a(0, 0, 0).start()
        load_b(0, 0, 0).start()

    zero, is_new = jnp.int32(0), is_loading.astype(jnp.int32)
    count = jax.lax.fori_loop(
        0, num_items, do_item, (zero, zero, zero, zero, zero, is_new, is_new, zero)
    )[-1]
    jax.lax.fori_loop(
        jnp.maximum(0, count - tiles.num_stores),
        count,
        lambda i, _: wait_store(i % tiles.num_stores),
        None,
    )
