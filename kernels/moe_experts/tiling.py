"""How the experts layer is cut: mode, weight tiles, ring depth. Functions of shapes and chip."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...tpu_runtime import LANES, MIB, SUBLANES, Chip, round_up

TILE_BYTES = 2 * MIB  # of one weight tile: enough for full bandwidth, soon there
RING_BYTES = 24 * MIB  # of both rings, when a whole expert does not fit
EXPERT_BYTES = 40 * MIB  # the largest expert held whole
SMEM_BYTES = 768 * 1024  # for the sorted slots, of about 1 MiB
X_SLOTS = 4  # gather: chunks of x (later of y) in flight
CHUNK_ROWS = 128  # gather: rows of such a chunk
SMALL_ROWS = 64  # gather: row tile of experts, or of rests of experts, with few rows
MAX_TILE_ROWS = 512


@dataclass(frozen=True)
class Plan:
    """A gate/up tile makes `tile_i` columns of gate and of up, a down tile `tile_h` of y."""

    mode: str  # "dense": every token through every active expert; "gather": only its own rows
    tile_i: int
    tile_h: int
    ring_in: int  # gate/up tiles held in VMEM
    ring_out: int  # down tiles held in VMEM
    is_split: bool  # gate and up arrive as two DMAs (else one block, split after the matmul)
    tile_rows: int = 0  # gather: rows multiplied at once ..
    tile_rows_small: int = 0  # .. and when no more are left
    chunk_rows: int = 0  # gather: rows of x and of y moved at once
    vmem_bytes: int = 0  # estimate

    def __post_init__(self):
        if self.mode not in ("dense", "gather"):
            raise ValueError(f"mode: got {self.mode!r}, expected 'dense' or 'gather'")
        if min(self.tile_i, self.tile_h, self.ring_in, self.ring_out) < 1:
            raise ValueError(f"tiles and rings must be positive: {self}")
        if self.mode == "gather" and (
            self.tile_rows % (2 * SUBLANES)
            or self.tile_rows_small % (2 * SUBLANES)
            or self.chunk_rows % (2 * SUBLANES)
            or not 0 < self.tile_rows_small <= self.tile_rows
            or self.chunk_rows <= 0
        ):
            raise ValueError(f"gather: row tiles must be multiples of {2 * SUBLANES}: {self}")


@dataclass(frozen=True)
class _Shape:
    """Sizes of one layer and what follows from them."""

    t: int
    topk: int
    e: int
    h: int
    i: int
    itemsize: int
    halves: int  # 2 with a gate
    chip: Chip

    @property
    def expert_bytes(self) -> int:
        return (self.halves + 1) * self.h * self.i * self.itemsize

    @property
    def active(self) -> int:
        """Experts that can be chosen at all."""
        return min(self.e, self.t * self.topk)

    @property
    def rows_per_expert(self) -> int:
        return -(-self.t * self.topk // self.active)

    @property
    def bias_bytes(self) -> int:
        return self.e * (self.halves * self.i + self.h) * 4

    @property
    def budget(self) -> int:
        return self.chip.vmem_bytes * 9 // 10

    def seconds(self, rows: int, experts: int) -> float:
        """Of `experts` visits with `rows` rows each: their weights' way from HBM or the matmuls."""
        flops = 2 * rows * (self.halves + 1) * self.h * self.i
        if self.itemsize == 4:
            flops *= 6  # passes of an exact f32 product
        read = self.expert_bytes / (0.9 * self.chip.hbm_bytes_per_s)
        # Static estimates: a 128-wide MXU is the bound, a 256-wide one waits for the vector units.
        slack = 1.5 if self.chip.mxu_size > 128 else 1.1
        return experts * max(read, slack * flops / self.chip.bf16_flops)


def row_sublanes(h: int, itemsize: int) -> int:
    """Sublanes of 128 32-bit words that hold one row of h numbers: whole registers."""
    return round_up(h * itemsize // 4 // LANES, SUBLANES)


def max_visits(num_slots: int, num_experts: int, tile_rows: int) -> int:
    """Upper bound of the row tiles of all experts: at most one of each expert is not full."""
    return num_experts + num_slots // tile_rows


def key_bits(t: int, topk: int) -> tuple[int, int]:
    """Bits that number a token, and a slot (j, token)."""
    token_bits = max(t - 1, 0).bit_length()
    return token_bits, token_bits + max(topk - 1, 0).bit_length()


def _tile(size: int, row_bytes: int, tile_bytes: int) -> int:
    """Largest divisor of size that is a lane multiple within tile_bytes; size itself if odd."""
    if size % LANES:
        return size
    units = size // LANES
    most = max(1, tile_bytes // (LANES * row_bytes))
    fits = [d for d in range(1, units + 1) if units % d == 0 and d <= most]
    return max(fits, default=1) * LANES


def _rings(shape: _Shape, tile_i: int, tile_h: int) -> tuple[int, int]:
    """Tiles held of gate/up and of down: a whole expert if it fits, else at least two of each."""
    num_in, num_out = shape.i // tile_i, shape.h // tile_h
    if shape.expert_bytes <= min(EXPERT_BYTES, shape.budget // 2):
        return num_in, num_out
    half = min(RING_BYTES, shape.budget // 2) // 2
    size_in = shape.halves * tile_i * shape.h * shape.itemsize
    size_out = tile_h * shape.i * shape.itemsize
    return min(num_in, max(2, half // size_in)), min(num_out, max(2, half // size_out))


def _ring_bytes(shape: _Shape, plan: Plan) -> int:
    size = plan.ring_in * shape.halves * plan.tile_i * round_up(shape.h, LANES)
    return (size + plan.ring_out * plan.tile_h * round_up(shape.i, LANES)) * shape.itemsize


def _dense_bytes(shape: _Shape, plan: Plan) -> int:
    t, h, i = round_up(shape.t, 2 * SUBLANES), round_up(shape.h, LANES), round_up(shape.i, LANES)
    held = t * (2 * h * shape.itemsize + h * 4 + i * shape.itemsize)  # x, result; y; act
    columns = shape.halves * round_up(plan.tile_i, LANES) + round_up(plan.tile_h, LANES)
    beside = 2 * t * columns * 4  # results of the matmuls and what is made of them
    narrow = 6 * t * LANES * 4  # ids and weights, both ways round, and their compares
    return _ring_bytes(shape, plan) + held + beside + narrow + shape.bias_bytes


def _gather_bytes(shape: _Shape, plan: Plan) -> int:
    x_row, y_row = (row_sublanes(shape.h, size) * LANES * 4 for size in (shape.itemsize, 4))
    m = plan.tile_rows
    held = round_up(shape.t + 1, plan.chunk_rows) * (x_row + y_row)
    row_tile = m * (x_row + y_row + (shape.h + round_up(shape.i, LANES)) * shape.itemsize)
    beside = m * 4 * (2 * shape.halves * round_up(plan.tile_i, LANES) + 2 * plan.tile_h)
    chunks = X_SLOTS * plan.chunk_rows * shape.h * shape.itemsize
    return _ring_bytes(shape, plan) + held + row_tile + beside + chunks + shape.bias_bytes


def _plan_gather(shape: _Shape, base: Plan) -> Plan | None:
    """The gather plan with the largest row tile that fits, up to a bit over an expert's share."""
    words = 4 // shape.itemsize  # numbers in a word
    slot_bits = key_bits(shape.t, shape.topk)[1]
    num_slots = shape.t * shape.topk
    smem = 4 * (num_slots + (1 << slot_bits) + 4 * MAX_TILE_ROWS + 8 * shape.e)
    is_whole = base.ring_in * base.tile_i == shape.i and base.ring_out * base.tile_h == shape.h
    if (
        shape.h % (words * LANES)
        or not is_whole
        or shape.t < CHUNK_ROWS
        or smem > SMEM_BYTES
        or (shape.e + 1) << slot_bits >= 1 << 31
    ):
        return None
    tile_rows = max(SMALL_ROWS, round_up(shape.rows_per_expert * 9 // 8, 32))
    tile_rows = min(tile_rows, MAX_TILE_ROWS)
    while tile_rows >= SMALL_ROWS:
        plan = replace(
            base,
            mode="gather",
            tile_rows=tile_rows,
            tile_rows_small=SMALL_ROWS,
            chunk_rows=CHUNK_ROWS,
        )
        plan = replace(plan, vmem_bytes=_gather_bytes(shape, plan))
        if plan.vmem_bytes <= shape.budget:
            return plan
        tile_rows -= 32
    return None


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
    """The faster mode that fits; None: sort, and run two grouped matmuls instead."""
    itemsize = {"bfloat16": 2, "float32": 4}.get(str(dtype))
    if itemsize is None or min(t, topk, e, h, i) < 1:
        return None
    shape = _Shape(t, topk, e, h, i, itemsize, 2 if has_gate else 1, chip)
    # With one or two experts the last tile's matmul is not hidden: half the tile costs less.
    tile_bytes = TILE_BYTES // 2 if t <= 2 * SUBLANES else TILE_BYTES
    tile_i = _tile(i, shape.halves * h * itemsize, tile_bytes)
    tile_h = _tile(h, i * itemsize, tile_bytes)
    if transposed and i % LANES:
        tile_i = i
    is_split = has_gate and i % (LANES if transposed else 2 * SUBLANES) == 0
    dense = Plan("dense", tile_i, tile_h, *_rings(shape, tile_i, tile_h), is_split)
    dense = replace(dense, vmem_bytes=_dense_bytes(shape, dense))
    gather = _plan_gather(shape, dense)

    rows, active = shape.rows_per_expert, shape.active
    slots = t * topk
    moved = slots * (5 * h + 4 * i) * itemsize  # rows sorted, multiplied, un-sorted through HBM
    two_step = shape.seconds(rows, active) + 20e-6 + moved / (0.8 * chip.hbm_bytes_per_s)
    options = []
    if dense.vmem_bytes <= shape.budget:
        options.append((shape.seconds(t, active), dense))
    if gather:
        visits = active * -(-rows // gather.tile_rows)
        options.append((shape.seconds(min(rows, gather.tile_rows), visits) + 8e-6, gather))
    options = [(seconds, plan) for seconds, plan in options if seconds <= two_step]
    return min(options, key=lambda option: option[0])[1] if options else None
