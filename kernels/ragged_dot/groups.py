"""Group metadata, made inside the kernel: which rows of which group each visit works on.

Groups are consecutive row ranges. A visit is a piece of one group, at most one row tile long, whose
window starts on a multiple of SUBLANES because that is what a DMA can address:

    rows      0 ...... 8 ...... 16 ..... 24 ..... 32
    group 0   |--------------|                            visit (0, 0, 15), window 0..16
    group 1                  |----|                       visit (1, 15, 20), window 8..24
    group 2                       |------------|          visit (2, 20, 30), window 16..32

Made on the scalar core from `group_sizes` in SMEM, so that no XLA operation runs before the kernel.
Sizes that break the contract are clipped: no visit ever names a row outside [0, m).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...tpu_runtime import SUBLANES


def max_visits(m: int, num_groups: int, tile_rows: int) -> int:
    """Upper bound of the number of visits that `list_visits` writes."""
    return num_groups + (m + SUBLANES - 1) // tile_rows + 1


def align_down(row):
    return row // SUBLANES * SUBLANES


def list_visits(sizes_ref, group_offset, num_groups, m, tile_rows, visits_ref, *, with_empty=False):
    """Writes the visits of groups group_offset .. group_offset + num_groups - 1, in row order.

    sizes_ref: SMEM int32 [at least group_offset + num_groups]; visits_ref: SMEM int32 [3, max_visits],
    rows are local group id, first row, row past the last. `with_empty` lists empty groups too (one
    visit without rows each), which a weight gradient has to zero.
    Returns (num_visits, first row of the first group, row past the last group).
    """

    def clipped(group_id, start):
        size = jnp.minimum(jnp.maximum(sizes_ref[group_id], 0), m - start)
        return start + size

    first_row = jax.lax.fori_loop(0, group_offset, clipped, jnp.int32(0))

    def add_group(local_id, carry):
        num_visits, start = carry
        stop = clipped(group_offset + local_id, start)
        base = align_down(start)
        num_tiles = jnp.where(stop > start, (stop - base + tile_rows - 1) // tile_rows, int(with_empty))

        def add_visit(tile_id, num_visits):
            tile_start = base + tile_id * tile_rows
            visits_ref[0, num_visits] = local_id
            visits_ref[1, num_visits] = jnp.maximum(start, tile_start)
            visits_ref[2, num_visits] = jnp.minimum(stop, tile_start + tile_rows)
            return num_visits + 1

        return jax.lax.fori_loop(0, num_tiles, add_visit, num_visits), stop

    num_visits, last_row = jax.lax.fori_loop(0, num_groups, add_group, (jnp.int32(0), first_row))
    return num_visits, first_row, last_row
