"""How the experts layer is cut: mode, weight tiles, ring depth. Pure functions of shapes and chip."""

from __future__ import annotations

from dataclasses import dataclass

from ...tpu_runtime import LANES, MIB, SUBLANES, Chip

TILE_BYTES = 2 * MIB  # of one weight tile: long enough for full bandwidth, short enough to start early

X_SLOTS = 4  # gather: chunks of x (later of y) in flight


@dataclass(frozen=True)
class Plan:
    """`tile_i` gate (and as many up) columns are computed per gate/up tile, `tile_h` outputs per down tile."""

    mode: str  # "dense": every token through every active expert; "gather": only its own rows
    tile_i: int
    tile_h: int
    ring_in: int  # gate/up tiles held in VMEM
    ring_out: int  # down tiles held in VMEM
    is_split: bool  # gate and up arrive as two DMAs (else one block, split after the matmul)
    tile_rows: int = 0  # gather: rows multiplied at once ..
    tile_rows_small: int = 0  # .. and for what is left of an expert's rows
    chunk_rows: int = 0  # gather: rows of x and of y moved at once
    vmem_bytes: int = 0

    def __post_init__(self):
        if self.mode not in ("dense", "gather"):
            raise ValueError(f"mode: got {self.mode!r}, expected 'dense' or 'gather'")
        if min(self.tile_i, self.tile_h, self.ring_in, self.ring_out) < 1:
            raise ValueError(f"tiles and rings must be positive: {self}")


def round_up(size: int, multiple: int) -> int:
    return (size + multiple - 1) // multiple * multiple


def _tile(size: int, row_bytes: int) -> int:
    """Largest divisor of size that is a lane multiple and within TILE_BYTES; size itself if none."""
    if size % LANES:
        return size
    units = size // LANES
    fits = [d for d in range(1, units + 1) if units % d == 0 and d * LANES * row_bytes <= TILE_BYTES]
    return max(fits, default=1) * LANES


def choose(
    t: int,
    topk: int,
    e: int,
    h: int,
    i: int,
    dtype: str,
    transposed: bool,
    has_gate: bool,
    chip: Chip,
) -> Plan | None:
    """None: this kernel does not fit, sort and run two grouped matmuls instead."""
    itemsize = {"bfloat16": 2, "float32": 4}[str(dtype)]
    halves = 2 if has_gate else 1
    tile_i = _tile(i, halves * h * itemsize)
    tile_h = _tile(h, i * itemsize)
    n_in, n_out = i // tile_i, h // tile_h
    is_split = has_gate and i % (LANES if transposed else SUBLANES) == 0
    if t >= 192:
        return Plan("gather", tile_i, tile_h, n_in, n_out, is_split, 256, 64, 128)
    return Plan("dense", tile_i, tile_h, n_in, n_out, is_split)
