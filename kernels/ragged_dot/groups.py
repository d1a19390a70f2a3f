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

UNROLL = 4  # 16 cycles a group instead of 23 (v6e), which decode with 128 experts feels


def max_visits(m: int, num_groups: int, tile_rows: int) -> int:
    """Upper bound of the number of visits, plus the one that `list_visits` may write in vain."""
    return num_groups + (m + SUBLANES - 1) // tile_rows + 1


def align_down(row):
    return row // SUBLANES * SUBLANES


def list_visits(sizes_ref, group_offset, num_groups, m, tile_rows, visits_ref, *, with_empty=False):
    """Writes the visits of groups group_offset .. group_offset + num_groups - 1, in row order.

    sizes_ref: SMEM int32 [at least group_offset + num_groups]; visits_ref: SMEM int32
    [3, max_visits], rows are local group id, first row, row past the last. `with_empty` lists empty
    groups too (one visit without rows each), which a weight gradient has to zero.
    Returns (num_visits, first row of the first group, row past the last group).
    """
    num_before = sizes_ref.shape[0] - num_groups
    # An offset that breaks the contract must not read past the sizes either.
    group_offset = jnp.clip(group_offset, 0, num_before) if num_before else 0

    def clipped(group_id, start):
        size = jnp.minimum(jnp.maximum(sizes_ref[group_id], 0), m - start)
        return start + size

    first_row = jax.lax.fori_loop(0, group_offset, clipped, jnp.int32(0))

    def add_group(local_id, carry):
        num_visits, start = carry
        stop = clipped(group_offset + local_id, start)
        tile_stop = align_down(start) + tile_rows
        # Written for an empty group too, without a branch: the next visit overwrites it.
        visits_ref[0, num_visits] = local_id
        visits_ref[1, num_visits] = start
        visits_ref[2, num_visits] = jnp.minimum(stop, tile_stop)
        num_visits += 1 if with_empty else (stop > start).astype(jnp.int32)
        if m <= tile_rows:  # a group is one visit
            return num_visits, stop

        def add_visit(carry):
            num_visits, tile_start = carry
            visits_ref[0, num_visits] = local_id
            visits_ref[1, num_visits] = tile_start
            visits_ref[2, num_visits] = jnp.minimum(stop, tile_start + tile_rows)
            return num_visits + 1, tile_start + tile_rows

        num_visits, _ = jax.lax.while_loop(
            lambda carry: carry[1] < stop, add_visit, (num_visits, tile_stop)
        )
        return num_visits, stop

    def add_groups(i, carry):  # several an iteration, so that their loads and branches overlap
        for j in range(UNROLL):
            carry = add_group(i * UNROLL + j, carry)
        return carry

    unrolled = num_groups // UNROLL if m <= tile_rows else 0
    carry = jax.lax.fori_loop(0, unrolled, add_groups, (jnp.int32(0), first_row))
    num_visits, last_row = jax.lax.fori_loop(unrolled * UNROLL, num_groups, add_group, carry)
    return num_visits, first_row, last_row
