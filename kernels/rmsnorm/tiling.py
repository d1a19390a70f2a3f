"""Tile choice for RMS normalisation: pure functions of shapes, stream sizes and the chip."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...tpu_runtime import LANES, MIB, Chip, round_up

ROW_ALIGN = 16  # rows of a bfloat16 vector register
MIN_ROWS = 8  # row tile of arrays in HBM, bfloat16 too
CHUNK_ELEMENTS = 128 * 1024  # 128 float32 registers: enough independent work to hide latencies
MAX_CHUNK_ROWS = 1024
UNROLLED_LANES = 8192  # more lanes than this are walked in a loop
VECTOR_BYTES = 8  # in VMEM per column of a [1, d] operand: two float32 buffers
FIRST_STEP_BYTES = 64 * 1024
MAX_TILE_BYTES = 2 * MIB


@dataclass(frozen=True)
class Tiles:
    rows: int  # of one grid step
    chunk: int  # rows that are in registers together, divides `rows`
    buffers: int  # 2: copies overlap the computation; 1: rows too wide for that
    vmem_bytes: int  # estimate

    def __post_init__(self):
        assert self.rows % self.chunk == 0 and self.chunk % MIN_ROWS == 0, self
        assert self.buffers in (1, 2), self


def choose(
    n: int,
    d: int,
    row_bytes: int,
    stream_bytes: int,
    fixed_bytes: int,
    chip: Chip,
    **overrides: int,
) -> Tiles:
    """Tiles for n rows of d columns.

    row_bytes: bytes per element of the widest array that has n rows.
    stream_bytes: bytes per element of all arrays that have n rows, read or written.
    fixed_bytes: bytes per column of what stays in VMEM (weight, its gradient).

    Steps grow with the input: the first copy in and the last copy out overlap nothing, so small
    inputs want small steps, while each step costs a DMA latency.
    """
    width = round_up(d, LANES)
    chunk = min(MAX_CHUNK_ROWS, max(ROW_ALIGN, CHUNK_ELEMENTS // width))
    chunk = 1 << (chunk.bit_length() - 1)
    chunk = overrides.pop("chunk", min(chunk, round_up(n, ROW_ALIGN)))
    budget = chip.vmem_bytes * 9 // 10 - fixed_bytes * width
    tile_bytes = min(MAX_TILE_BYTES, math.isqrt(n * width * row_bytes * FIRST_STEP_BYTES))
    rows = overrides.pop("rows", tile_bytes // (width * row_bytes))
    rows = max(chunk, min(rows, n) // chunk * chunk)
    if chunk > rows or round_up(n, ROW_ALIGN) <= 2 * chunk:
        rows = chunk = min(chunk, round_up(-(-n // 2), ROW_ALIGN))
    buffers = 2
    while buffers * rows * width * stream_bytes > budget:
        if rows > MIN_ROWS:
            rows = chunk = max(MIN_ROWS, rows // 2 // MIN_ROWS * MIN_ROWS)
        elif buffers == 2:
            buffers = 1
        else:
            raise NotImplementedError(
                f"a width of {d} does not fit the {chip.vmem_bytes // MIB} MiB of VMEM of a "
                f"{chip.name}: {MIN_ROWS} rows of all operands take "
                f"{rows * width * stream_bytes // MIB} MiB; use a smaller width or dtype"
            )
    assert not overrides, overrides
    vmem_bytes = buffers * rows * width * stream_bytes + fixed_bytes * width
    return Tiles(rows, chunk, buffers, vmem_bytes)
