"""One tile of the grouped matmul: rows and weights in VMEM, a rounded window of the result out."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...tpu_runtime import LANES
from . import dequant
from .plan import Plan, Refs

SPLIT_ROWS = 32  # rows whose even and odd columns are parted at once


def prepare_rows(plan: Plan, refs: Refs, num_rows, lhs_slot) -> None:
    """What quantised weights ask of the rows of a visit, once before its tiles."""
    quantised = plan.quantised
    step = min(SPLIT_ROWS, plan.tiles.row_step)
    num_steps = (num_rows + step - 1) // step

    def split(i, _):
        rows = pl.ds(pl.multiple_of(i * step, step), step)
        pairs = dequant.split_pairs(refs.lhs_buf[lhs_slot, rows])
        refs.pairs[0, rows], refs.pairs[1, rows] = pairs

    def scale(i, _):
        rows = pl.ds(pl.multiple_of(i * step, step), step)
        value = refs.lhs_buf[lhs_slot, rows]
        scaled = value.astype(jnp.float32) * refs.scale_buf[lhs_slot]
        refs.lhs_buf[lhs_slot, rows] = scaled.astype(value.dtype)

    if quantised is not None and quantised.splits_lhs:
        jax.lax.fori_loop(0, num_steps, split, None)
    if quantised is not None and quantised.scales_lhs:
        jax.lax.fori_loop(0, num_steps, scale, None)


def _dot(plan: Plan, refs: Refs, rows, cols, first_col, lhs_slot, rhs_slot):
    """lhs rows times `cols` of the weight tile, float32; first_col is where cols begin in all n."""
    rhs_index = (cols, slice(None)) if plan.transpose_rhs else (slice(None), cols)
    weight = refs.rhs_buf[(rhs_slot, *rhs_index)]
    quantised = plan.quantised
    if quantised is None or quantised.is_backward:
        lhs = refs.lhs_buf[lhs_slot, rows]
        if quantised is not None:
            scale = None if quantised.scales_lhs else refs.scale_buf[lhs_slot]
            num_nibbles = 2 if quantised.is_int4 else 1
            weight = dequant.weights_of_columns(
                weight,
                scale,
                lhs.dtype,
                block=num_nibbles * plan.n // quantised.num_blocks,
                first=first_col,
                nibble=quantised.nibble,
                transposed=not plan.transpose_rhs,
            )
        dims = (((1,), (1 if plan.transpose_rhs else 0,)), ((), ()))
        return jax.lax.dot_general(lhs, weight, dims, plan.precision, jnp.float32)
    if quantised.is_int4:
        lhs = dequant.Pairs(refs.pairs[0, rows], refs.pairs[1, rows])
    else:
        lhs = refs.lhs_buf[lhs_slot, rows]
    if plan.scales_by_visit:
        scale = refs.scale_buf[lhs_slot, :, pl.ds(first_col, plan.tiles.col_step)]
    else:
        scale = refs.scale_buf[rhs_slot, :, cols]
    return dequant.dot(
        lhs,
        weight,
        scale,
        transposed=plan.transpose_rhs,
        precision=plan.precision,
        code=plan.code,
    )


def multiply(plan: Plan, refs: Refs, tile_id, num_rows, lhs_slot, rhs_slot, out_slot) -> None:
    """out_buf[out_slot, :num_rows] = lhs_buf[lhs_slot, :num_rows] @ rhs_buf[rhs_slot] + bias.

    Works on a few rows and columns more: what they hold is never stored or is masked later.
    """
    tiles = plan.tiles
    row_step, col_step, row_tails = tiles.row_step, tiles.col_step, tiles.row_tails

    def dot(row, size, col):
        rows = pl.ds(pl.multiple_of(row, row_step), size)
        cols = pl.ds(0 if tiles.cols == col_step else pl.multiple_of(col, col_step), col_step)
        first_col = tile_id * tiles.cols + col
        if plan.n != tiles.cols:
            first_col = pl.multiple_of(first_col, LANES)
        acc = _dot(plan, refs, rows, cols, first_col, lhs_slot, rhs_slot)
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
