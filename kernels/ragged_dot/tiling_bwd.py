"""Tiles of the weight gradient kernel: pure functions of shape, dtype and chip."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import jax.numpy as jnp

from ...tpu_runtime import LANES, Chip, round_up

MASK_ROWS = 16  # rows masked at a time: one tile of the narrowest dtype, bf16
MAX_BUCKETS = 5  # each is a compiled body
MAX_ROWS = 1280  # mean group up to which a group is meant to be one visit
# A dot keeps the MXU busy for at most so many cycles. Longer ones fill and drain it less often but
# take as many instructions; the fixed cost of one, read off v5e and v6e schedules, is DOT_START.
# Exact f32 is a quarter of that: it compiles for minutes otherwise, and cannot be short anyway.
MAX_DOT_CYCLES = {2: 8192, 4: 2048}  # by itemsize
DOT_START_CYCLES = 350
# What large DMAs reach of the HBM bandwidth, between v5e and v6e.
READ_SHARE, WRITE_SHARE = 0.90, 0.75
DMA_LATENCY_S = 0.7e-6
OVERLAP_COST = 0.05  # of what runs beside the longer of compute and memory
MANY_VISITS_SHARE = 0.25  # of groups, when the mean group is one visit


def ceil_div(x, y: int):
    return (x + y - 1) // y


@dataclass(frozen=True)
class WeightGradTiles:
    """Sizes of the buffers and of the pieces of work; see the kernel for what each one does."""

    rows: int  # rows of a and b one visit works on
    num_buckets: int  # compiled contraction lengths: rows / num_buckets, 2 rows / num_buckets, ..
    p: int  # panel of the output accumulated at a time: [p, q]
    q: int
    slab: int  # rows of a panel stored by one DMA
    dot_q: int  # one dot makes [slab, dot_q]
    num_stores: int  # store buffers, [slab, q] each
    num_cores: int = 1  # cores that share the panels

    def __post_init__(self) -> None:
        assert self.rows % (self.num_buckets * MASK_ROWS) == 0, self
        assert self.p % LANES == self.slab % LANES == self.dot_q % LANES == 0, self
        assert self.p % self.slab == self.q % self.dot_q == 0, self
        assert self.num_stores >= 2 and self.num_cores >= 1, self

    @property
    def bucket_rows(self) -> int:
        return self.rows // self.num_buckets

    @property
    def num_slabs(self) -> int:
        return self.p // self.slab

    def vmem_bytes(self, itemsize: int, out_itemsize: int) -> int:
        loads = 2 * self.rows * (self.p + self.q) * itemsize
        sums = self.p * self.q * 4
        stores = self.num_stores * self.slab * self.q * out_itemsize
        # The compiler keeps the product of one dot, and a transposed copy of its left side.
        dot = self.slab * self.dot_q * 4 + self.rows * self.slab * itemsize
        return loads + sums + stores + dot


@functools.lru_cache
def choose(m: int, p: int, q: int, g: int, dtype, out_dtype, chip: Chip) -> WeightGradTiles:
    """The tiles of least estimated time that leave a tenth of the VMEM free.

    Sized for groups of m / g rows: up to a quarter more is still one visit, for which the partial
    sums never leave the registers and each operand is read about once.
    """
    itemsize, out_itemsize = jnp.dtype(dtype).itemsize, jnp.dtype(out_dtype).itemsize
    mean_rows = max(1, m // g)
    candidates = _candidates(mean_rows, p, q, itemsize, out_itemsize, chip)
    return min(
        candidates, key=lambda t: _seconds(t, mean_rows, p, q, g, itemsize, out_itemsize, chip)
    )


def _candidates(
    mean_rows: int, p: int, q: int, itemsize: int, out_itemsize: int, chip: Chip
) -> Iterator[WeightGradTiles]:
    num_cores = chip.num_cores if max(p, q) > LANES else 1
    for rows, num_buckets in _row_tiles(mean_rows, chip):
        usual_rows = min(rows, max(mean_rows, rows // num_buckets))
        area = MAX_DOT_CYCLES[itemsize] * _flops_per_cycle(chip, itemsize) // (2 * usual_rows)
        is_any = False
        for slab, num_stores in itertools.product((8, 4, 2, 1), (4, 3, 2)):
            slab *= LANES
            for tile_p in _splits(p, slab):
                num_fitting = 0
                for tile_q in _splits(q, LANES):
                    num_dots = ceil_div(tile_q, max(LANES, area // slab // LANES * LANES))
                    dot_q = round_up(ceil_div(tile_q, num_dots), LANES)
                    tiles = WeightGradTiles(
                        rows=rows,
                        num_buckets=num_buckets,
                        p=tile_p,
                        q=num_dots * dot_q,
                        slab=slab,
                        dot_q=dot_q,
                        num_stores=num_stores,
                        num_cores=num_cores,
                    )
                    num_panels = ceil_div(p, tile_p) * ceil_div(q, tiles.q)
                    is_fitting = (
                        tiles.vmem_bytes(itemsize, out_itemsize) <= chip.vmem_bytes * 9 // 10
                    )
                    if is_fitting and num_panels % num_cores == 0:
                        yield tiles
                        is_any = True
                        num_fitting += 1
                    if num_fitting == 3:  # narrower panels only read more
                        break
        if is_any:
            return
    raise AssertionError((mean_rows, p, q, itemsize, chip))


def _row_tiles(mean_rows: int, chip: Chip) -> Iterator[tuple[int, int]]:
    """(rows, buckets) of a visit, the wanted one first, then smaller ones for a small VMEM.

    A bucket fills the depth of the MXU, and a quarter of the mean group: half a bucket is lost on
    average. Long groups take several visits.
    """
    if mean_rows > MAX_ROWS:
        bucket, num_buckets = 256, 4
    else:
        bucket = round_up(ceil_div(mean_rows, MAX_BUCKETS - 1), chip.mxu_size)
        num_buckets = min(max(2, ceil_div(mean_rows * 5 // 4, bucket)), MAX_BUCKETS)
    yield bucket * num_buckets, num_buckets
    while bucket > MASK_ROWS:
        bucket, num_buckets = (
            max(MASK_ROWS, bucket // 2 // MASK_ROWS * MASK_ROWS),
            min(num_buckets, 4),
        )
        yield bucket * num_buckets, num_buckets


def _splits(size: int, piece: int) -> Iterator[int]:
    """Tile sizes, multiples of `piece`, that split `size` into ever more panels."""
    num, last = 1, 0
    while last != piece:
        tile = round_up(ceil_div(size, num), piece)
        if tile != last:
            yield tile
        num, last = num + max(1, num // 8), tile


def _flops_per_cycle(chip: Chip, itemsize: int) -> int:
    """Of four 128 x 128 MXUs, or two of 256 x 256 at twice the rate; exact f32 takes six passes."""
    return 8 * 128**2 * (chip.mxu_size // 128) ** 2 // (6 if itemsize == 4 else 1)


def _seconds(
    tiles: WeightGradTiles,
    mean_rows: int,
    p: int,
    q: int,
    g: int,
    itemsize: int,
    out_itemsize: int,
    chip: Chip,
) -> float:
    """Estimate for g groups of `mean_rows`, on the first core."""
    num_p, num_q = ceil_div(p, tiles.p), ceil_div(q, tiles.q)
    num_panels = num_p * num_q // tiles.num_cores
    hbm = chip.hbm_bytes_per_s

    # With one visit a panel only loads what changes; otherwise it loads everything.
    visits = ceil_div(mean_rows, tiles.rows)
    changes_p = num_panels if num_p > 1 else 1
    changes_q = ceil_div(num_panels, num_p)
    many = MANY_VISITS_SHARE if visits == 1 else 1.0
    loads_p = many * num_panels + (1 - many) * changes_p
    loads_q = many * num_panels + (1 - many) * changes_q
    load = mean_rows * itemsize / (hbm * READ_SHARE)
    loads = load * (loads_p * min(tiles.p, p) + loads_q * min(tiles.q, q))

    # Stores and dots, slab by slab.
    store = tiles.slab * min(tiles.q, q) * out_itemsize / (hbm * WRITE_SHARE)
    num_slabs = num_panels * ceil_div(p, tiles.slab) / num_p
    contraction = round_up(mean_rows, tiles.bucket_rows)
    num_dots = tiles.q // tiles.dot_q
    second = _flops_per_cycle(chip, 2) / chip.bf16_flops  # of one cycle
    passes = contraction
    if tiles.slab == chip.mxu_size == LANES:  # a v5e schedule: rows past 512 take two passes
        passes += max(0, contraction - 512)
    volume = tiles.slab * round_up(tiles.dot_q, chip.mxu_size) * passes
    dot = (
        num_dots
        * (2 * volume / _flops_per_cycle(chip, itemsize) + visits * DOT_START_CYCLES)
        * second
    )
    # A store that queues behind the loads of the next panel stalls the dots once all buffers wait.
    longest_load = load * (tiles.p + tiles.q)
    stall = num_panels * max(0.0, longest_load - (tiles.num_stores - 1) * dot)
    slab = max(dot, (dot + store + DMA_LATENCY_S) / tiles.num_stores)
    times = num_slabs * slab + stall, loads + num_slabs * store
    busy = max(times) + OVERLAP_COST * min(times)
    ramp = longest_load + dot + store
    return g * busy + ramp
