"""Tile choice for attention: pure functions of shapes, dtypes and the chip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from ...tpu_runtime import LANES, MIB, SUBLANES, Chip, round_up

CHUNK = 256  # rows and keys of one step of the general masked body
DECODE_MAX_SQ = 16  # queries of the decode kernel
DECODE_IO_BYTES = 4 * MIB  # one block of q, out and lse of the decode kernel
DECODE_MAX_ROWS = 512  # queries times query heads of the decode kernel


def storage(num_heads: int, head_size: int) -> str:
    """How XLA stores [b, s, h, d] by default: the dimension order with the least padding.

    Kernels take every operand in this order, so that the transposition around them is free.
    """
    if head_size % LANES:
        return "bhds"
    if num_heads % SUBLANES == 0 or num_heads in (2, 4):
        return "bshd"
    return "bhsd"


def staged_heads(num_heads: int, used: int) -> int:
    """Heads one DMA of a "bshd" block brings: whole tiles of 8 heads, or all."""
    if used % SUBLANES == 0 or used == num_heads or num_heads < SUBLANES:
        return used if used % SUBLANES == 0 else num_heads
    return SUBLANES


@dataclass(frozen=True)
class Tiles:
    """Sizes of `kernel.flash_attention_fwd`."""

    block_q: int  # queries of one grid step
    block_k: int  # keys of one DMA and of one full body
    heads: int  # query heads of one grid step
    row_step: int  # queries of one matmul, but for the rest of a block
    band_step: int  # the same where the band cuts a block: short for a narrow window
    slots: int  # blocks of keys in flight
    vmem_bytes: int  # estimate

    def __post_init__(self):
        assert self.block_q % LANES == 0 and self.block_k % LANES == 0, self
        assert self.row_step % LANES == 0 and self.band_step % LANES == 0, self
        assert self.slots >= 2, self


@dataclass(frozen=True)
class Shape:
    """What the choice depends on."""

    sq: int
    sk: int
    hq: int
    hkv: int
    d: int
    dv: int
    dtype_bytes: int
    left: int = -1
    right: int = -1
    has_ids: bool = False  # segment ids or explicit positions
    mask_heads: int = 0  # heads of the boolean mask, 0 without one

    @property
    def rep(self) -> int:
        return self.hq // self.hkv

    @property
    def window(self) -> int:
        """Keys that a query sees by its position, 0 if they are not bounded."""
        return self.left + 1 + self.right if self.left >= 0 and self.right >= 0 else 0

    @property
    def by_strips(self) -> bool:
        """Whether every block takes the general body, which finds the keys of each strip of CHUNK
        queries: it pays where few blocks are full and many heads stand side by side."""
        has_work = self.hq * (self.d + self.dv) >= 32 * LANES
        is_medium = 2 * CHUNK < self.window <= 8 * CHUNK and not self.mask_heads
        return self.has_ids or (is_medium and has_work)

    def kv_heads(self, heads: int) -> int:
        """Key heads that a group of `heads` query heads uses."""
        return max(1, heads // self.rep)


def head_groups(shape: Shape) -> list[int]:
    """Possible numbers of query heads per grid step, ascending."""
    tiled = {storage(shape.hq, shape.d), storage(shape.hq, shape.dv)} & {"bshd"}
    groups = []
    for heads in range(1, shape.hq + 1):
        if shape.hq % heads or (heads % shape.rep and shape.rep % heads):
            continue
        if tiled and heads % SUBLANES and heads != shape.hq:
            continue
        used = shape.kv_heads(heads)
        in_tile = used % SUBLANES == 0 or used == shape.hkv or SUBLANES % used == 0
        if "bshd" in (storage(shape.hkv, shape.d), storage(shape.hkv, shape.dv)) and not in_tile:
            continue
        if heads <= LANES:
            groups.append(heads)
    return groups


def vmem_estimate(shape: Shape, block_q: int, block_k: int, heads: int, slots: int) -> int:
    """Bytes of all buffers and of the float32 values of one body."""
    size, d, dv = shape.dtype_bytes, round_up(shape.d, LANES), round_up(shape.dv, LANES)
    used = shape.kv_heads(heads)
    pad_heads = round_up(heads, SUBLANES)
    total = 2 * block_q * pad_heads * (d + dv) * size  # q and out, double-buffered
    total += heads * block_q * (d * size + dv * 4 + 2 * SUBLANES * 4)  # split q, acc, l, m
    total += 2 * pad_heads * block_q * 4 + block_q * LANES * 4 * 3
    for width in (shape.d, shape.dv):
        lanes = round_up(width, LANES)
        staged = used
        if storage(shape.hkv, width) == "bshd":
            staged = max(SUBLANES, staged_heads(shape.hkv, used))
        total += slots * (staged + used) * block_k * lanes * size
    if shape.mask_heads:
        total += (heads if shape.mask_heads > 1 else 1) * block_q * block_k
    if shape.has_ids:
        total += 2 * slots * block_k * LANES * 4 + 4 * SUBLANES * round_up(shape.sk, LANES) * 4
    return total + 6 * CHUNK * block_k * 4 + 2 * MIB


def _best_block(length: int, want: int, step: int) -> int:
    """The multiple of `step` near `want` that pads `length` least."""
    if length <= step:
        return step
    sizes = range(max(step, round_up(want * 3 // 4, step)), want * 5 // 4 + 1, step)
    return min(sizes, key=lambda size: (round_up(length, size), -size))


def _refuse(shape: Shape, chip: Chip) -> NoReturn:
    what = "q_segment_ids, kv_segment_ids: " if shape.has_ids else ""
    raise ValueError(
        f"{what}sq={shape.sq}, sk={shape.sk} do not fit the {chip.vmem_bytes // MIB} MiB VMEM of "
        f"a {chip.name}: pass documents as a batch, or split the sequence"
    )


def choose(shape: Shape, chip: Chip, **overrides) -> Tiles:
    """Tiles that fit 7/10 of VMEM; `overrides` are for experiments."""
    budget = chip.vmem_bytes * 7 // 10
    window, slots = shape.window, 4 if shape.window else 2
    step = CHUNK if shape.has_ids or shape.mask_heads else LANES
    banded = shape.left >= 0 or shape.right >= 0
    want = 1024 if shape.dtype_bytes == 2 else 512
    if window and window <= 2 * CHUNK:
        want = 512
    if banded:
        block_k = min(want, round_up(shape.sk, step))
        long = shape.sq >= 4096 and not window and not shape.has_ids and not shape.mask_heads
        roomy = chip.vmem_bytes >= 128 * MIB and chip.mxu_size > LANES
        roomy = roomy and shape.dtype_bytes == 2 and shape.d <= LANES
        block_q = min(want * 2 if long and roomy else want, round_up(shape.sq, step))
    else:
        block_k = _best_block(shape.sk, want * 3 // 2, max(step, chip.mxu_size))
        block_q = _best_block(shape.sq, want, step)
    if shape.by_strips:
        block_q, block_k = min(block_q, CHUNK), min(block_k, 2 * CHUNK)
        slots = 3 + min(window, shape.sk) // block_k
    block_q = overrides.get("block_q", block_q)
    block_k = overrides.get("block_k", block_k)
    slots = overrides.get("slots", slots)
    groups = [overrides["heads"]] if "heads" in overrides else head_groups(shape)
    enough_rows = 8 * 1024
    if window and window <= 2 * CHUNK and not shape.has_ids:
        enough_rows = 16 * 1024
    while True:
        fitting = [
            heads
            for heads in groups
            if vmem_estimate(shape, block_q, block_k, heads, slots) <= budget
        ]
        if fitting:
            break
        if block_k > 512 or block_q <= CHUNK:
            block_k = max(step, round_up(block_k // 2, step))
        else:
            block_q = round_up(block_q // 2, step)
        if block_q <= step and block_k <= step:
            _refuse(shape, chip)
    enough = [h for h in fitting if h * block_q >= enough_rows]
    heads = enough[0] if enough else fitting[-1]
    row_step = overrides.get("row_step", min(CHUNK, block_q))
    band_step = LANES if window and window <= 2 * CHUNK else row_step
    band_step = overrides.get("band_step", band_step)
    return Tiles(
        block_q,
        block_k,
        heads,
        row_step,
        band_step,
        slots,
        vmem_estimate(shape, block_q, block_k, heads, slots),
    )


@dataclass(frozen=True)
class DecodeTiles:
    """Sizes of `kernel_decode.flash_attention_decode`."""

    block_k: int  # keys of one DMA
    step_k: int  # keys of one matmul
    slots: int  # blocks under way
    vmem_bytes: int  # estimate

    def __post_init__(self):
        assert self.block_k % self.step_k == 0 and self.slots >= 2, self


def choose_decode(
    rows: int,
    groups: int,
    hkv: int,
    sk: int,
    d: int,
    dv: int,
    dtype_bytes: int,
    chip: Chip,
    **overrides,
) -> DecodeTiles:
    """Blocks of about 2 MiB of keys, so that a DMA is long against its latency."""
    width = round_up(d, LANES if groups == 1 else 2 * SUBLANES)
    key_bytes = hkv * width * dtype_bytes
    columns = hkv if groups == 1 else 1  # of one key in one matmul
    step = max(LANES, 2048 // columns // LANES * LANES)
    slots = overrides.get("slots", 4)
    fixed = 4 * groups * rows * (round_up(d, LANES) + round_up(dv, LANES) + LANES) * 4
    fixed += 2 * DECODE_IO_BYTES
    budget = chip.vmem_bytes * 7 // 10 - fixed
    most = max(LANES, 2 * MIB // key_bytes // LANES * LANES)
    most = min(most, round_up(sk, LANES))
    step = min(overrides.get("step_k", step), most)
    block = overrides.get("block_k", max(step, most // step * step))

    def total(block: int) -> int:
        both = round_up(d, LANES) + round_up(dv, LANES)
        return (slots + 1) * block * hkv * both * dtype_bytes + 6 * rows * step * columns * 4

    while total(block) > budget and block > step:
        block -= step
    return DecodeTiles(block, step, slots, fixed + total(block))
