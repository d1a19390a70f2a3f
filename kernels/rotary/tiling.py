"""Tile choice for the rotary kernels: pure functions of shapes, dtypes and the chip."""

from __future__ import annotations

from dataclasses import dataclass

from ...tpu_runtime import LANES, MIB, SUBLANES, Chip, round_up

STEP_BYTES = 3 * MIB // 2  # of q and k together, read in one grid step: long DMAs, short ramp
NORM_STEP_BYTES = 3 * MIB  # with a norm: fewer steps, whose DMAs cost scalar time it does not have
TILE_ELEMENTS = 128 * LANES  # of one head at a time: 16 float32 registers
MAX_UNROLL = 8  # tiles in flight on sublanes, where a tile is small; half of it on lanes
NORM_UNROLL = 32  # where one pass norms and one rotates: both wait for lanes to move


@dataclass(frozen=True)
class Tiles:
    seq: int  # sequence positions of one block
    span: int  # sequence positions of one tile in registers, divides `seq`
    heads: tuple[int, ...]  # heads of one block, per operand; divide their heads
    head_steps: int  # grid steps over the heads
    vmem_bytes: int  # estimate

    def __post_init__(self):
        assert self.seq % self.span == 0, self
        assert all(heads > 0 for heads in self.heads) and self.head_steps > 0, self


def is_sequence_minor(s: int, width: int) -> bool:
    """Whether XLA lays out [.., s, width] arrays with s on lanes: it pads as little as it can."""
    as_columns = round_up(width, SUBLANES) * round_up(s, LANES)
    return as_columns < round_up(s, SUBLANES) * round_up(width, LANES)


def unroll(count: int, most: int) -> int:
    return next(u for u in range(most, 0, -1) if count % u == 0)


def choose(
    s: int,
    d: int,
    heads: tuple[int, ...],
    itemsizes: tuple[int, ...],
    head_minor: bool,
    on_lanes: bool,
    arrays: int,
    chip: Chip,
    step_bytes: int = STEP_BYTES,
) -> Tiles:
    """`arrays`: how many blocks of each operand's size a grid step holds (inputs and outputs)."""
    width = round_up(d, LANES) if on_lanes else round_up(d, 2 * SUBLANES)
    seq = s
    if s > LANES:
        position = sum(h * width * size for h, size in zip(heads, itemsizes, strict=True))
        wanted = max(LANES, step_bytes // position // LANES * LANES)
        seq = min(wanted, 4 * LANES, s // LANES * LANES)
    budget = chip.vmem_bytes * 6 // 10
    for blocks in range(1, max(heads) + 1):
        chosen = tuple(_block(h, blocks, head_minor) for h in heads)
        vmem = vmem_estimate(seq, d, width, chosen, itemsizes, head_minor, arrays)
        if vmem <= budget or blocks == max(heads):
            break
    steps = max(h // block for h, block in zip(heads, chosen, strict=True))
    return Tiles(seq, _span(seq, width, on_lanes), chosen, steps, vmem)


def vmem_estimate(
    seq: int,
    d: int,
    width: int,
    heads: tuple[int, ...],
    itemsizes: tuple[int, ...],
    head_minor: bool,
    arrays: int,
) -> int:
    """Double-buffered blocks of every operand, and the tables: as they come and prepared."""
    rows = round_up(seq, 2 * SUBLANES)
    tables = (2 * 2 + 2) * rows * round_up(d, LANES) * 4
    total = 0
    for h, size in zip(heads, itemsizes, strict=True):
        padded = seq * round_up(h, 2 * SUBLANES) if head_minor else rows * h
        total += 2 * arrays * padded * width * size
    return tables + total


def _block(heads: int, blocks: int, head_minor: bool) -> int:
    """The largest divisor of `heads` that makes at least `blocks` blocks, tiled if on sublanes."""
    for size in range(heads // min(blocks, heads), 0, -1):
        if heads % size == 0 and (not head_minor or size == heads or size % (2 * SUBLANES) == 0):
            return size
    return heads


def _span(seq: int, width: int, on_lanes: bool) -> int:
    if not on_lanes:
        return LANES if seq % LANES == 0 else seq
    wanted = TILE_ELEMENTS // width
    return next((span for span in (128, 64, 32, 16) if span <= wanted and seq % span == 0), seq)
