"""What the grouped matmul kernel knows when it is traced, and what it works on when it runs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...tpu_runtime import LANES, SUBLANES, round_up
from .dequant import Code
from .tiling import Quantised, Tiles


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static facts of one call."""

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
    quantised: Quantised | None = None
    code: Code | None = None

    @property
    def num_n(self) -> int:
        return pl.cdiv(self.n, self.tiles.cols)

    @property
    def core_n(self) -> int:
        """Most column tiles of one core."""
        return pl.cdiv(self.num_n, self.num_cores)

    @property
    def scales_by_visit(self) -> bool:
        """Scales come with the rows of a visit; otherwise with each weight tile."""
        if self.quantised is None:
            return False
        is_row = self.quantised.num_blocks == 1 and self.n % self.tiles.cols == 0
        return self.quantised.is_backward or is_row

    def row_stop(self, row):
        """`row` rounded up to what a DMA can end on.

        HBM arrays are padded to whole row tiles, so a DMA may run past row m; the interpreter has
        no padding and takes exact sizes.
        """
        stop = (row + SUBLANES - 1) // SUBLANES * SUBLANES
        return jnp.minimum(stop, self.m) if self.interpret else stop

    def col_slice(self, tile_id, multiple: int = LANES):
        """Columns of a tile in HBM; the last tile may be narrower.

        It ends on a multiple of `multiple`, to which the array is padded in HBM.
        """
        cols = self.tiles.cols
        if self.num_n == 1:
            return pl.ds(0, self.n)
        start = pl.multiple_of(tile_id * cols, cols)
        if self.n % cols == 0:
            return pl.ds(start, cols)
        stop = self.n if self.interpret else round_up(self.n, multiple)
        return pl.ds(start, pl.multiple_of(jnp.minimum(cols, stop - start), multiple))


@dataclasses.dataclass(frozen=True)
class Refs:
    """Operands in HBM, buffers in VMEM and SMEM, semaphores."""

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
    scale: jax.Ref | None = None  # HBM float32 [g, n] or [g, k_blocks, n]; backward: n is k
    scale_buf: jax.Ref | None = None  # [lhs_slots, k_blocks, n] by visit, else [slots, .., cols]
    pairs: jax.Ref | None = None  # [2, rows, k/2]: even and odd columns of the rows of a visit


@dataclasses.dataclass(frozen=True)
class Work:
    """The share of this core."""

    num_visits: jax.Array
    first_tile: jax.Array | int
    num_tiles: jax.Array | int
