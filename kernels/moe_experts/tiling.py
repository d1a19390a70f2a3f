"""How the experts layer is cut: mode, weight tiles, ring depth. Functions of shapes and chip."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...tpu_runtime import LANES, MIB, SUBLANES, Chip, round_up

TILE_BYTES = 2 * MIB  # of a weight tile: enough for full bandwidth, soon there
RING_BYTES = 24 * MIB  # of both rings, when a whole expert does not fit
EXPERT_BYTES = 40 * MIB  # the largest expert held whole
SMEM_BYTES = 768 * 1024  # for the sorted slots, of about 1 MiB
X_SLOTS = 4  # gather: chunks of x (later of y) in flight
CHUNK_ROWS = 128  # gather: rows of such a chunk
SMALL_ROWS = 64  # gather: row tile of experts, or of rests of experts, with few rows ..
FEWEST_ROWS = 16  # .. if they have fewer than that on average
MAX_TILE_ROWS = 512
MAX_UNROLLED = 8  # tiles of a visit whose places in the rings are static
PUSH_SECONDS = 0.17e-12  # of a weight into the MXU
SORT_SECONDS = 3e-6, 1.2e-9  # of slots by expert, before the gather kernel: fixed, and by slot


@dataclass(frozen=True)
class Stored:
    """How a projection lies in HBM."""

    dtype: str  # of the array; "uint8": two int4 values along the contraction in one
    num_blocks: int = 0  # scales of one output channel; 0: not quantised
    is_vector: bool = False  # scales are [e, n], not [e, num_blocks, n]
    transposed: bool = False  # [e, k, n], not [e, n, k]

    @property
    def is_int4(self) -> bool:
        return self.dtype == "uint8"

    @property
    def bits(self) -> int:
        return {"float32": 32, "bfloat16": 16, "float16": 16, "uint8": 4}.get(self.dtype, 8)

    @property
    def row_unit(self) -> int:
        """Rows of an array in VMEM that fill a register."""
        return SUBLANES * 32 // max(self.bits, 8)

    def num_stored(self, k: int) -> int:
        return k // 2 if self.is_int4 else k

    def num_copies(self, k: int) -> int:
        """Of the rows, where blocks narrower than the lanes share a product (`dequant.dot`)."""
        block = self.num_stored(k) // max(self.num_blocks, 1)
        return LANES // block if 0 < block < LANES and LANES % block == 0 else 1

    def scale_bytes(self, n: int) -> int:
        """Of one expert, as its copy moves it."""
        rows = SUBLANES if self.is_vector else round_up(self.num_blocks, SUBLANES)
        return 4 * rows * round_up(n, LANES) if self.num_blocks else 0


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
    cuts_i: bool = False  # a down tile is `tile_i` rows of [i, h], with all columns (tile_h = h)

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
    itemsize: int  # of x
    halves: int  # 2 with a gate
    gate_up: Stored
    down: Stored
    chip: Chip

    @property
    def expert_bytes(self) -> int:
        bits = self.halves * self.gate_up.bits + self.down.bits
        return self.h * self.i * bits // 8 + self.scale_bytes

    @property
    def scale_bytes(self) -> int:
        scales_in = self.gate_up.scale_bytes(self.halves * self.i)
        return scales_in + self.down.scale_bytes(self.h)

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
        copies = self.halves * self.gate_up.num_copies(self.h) + self.down.num_copies(self.i)
        flops = 2 * rows * copies * self.h * self.i
        if self.itemsize == 4:
            flops *= 6  # passes of an exact f32 product
        read = self.expert_bytes / (0.9 * self.chip.hbm_bytes_per_s)
        # Static estimates: a 128-wide MXU is the bound, a 256-wide one waits for the vector units,
        # and a weight's way into the MXU takes its time, however few rows there are.
        slack = 1.5 if self.chip.mxu_size > 128 else 1.1
        entry = PUSH_SECONDS * (self.halves + 1) * self.h * self.i
        return experts * max(read, entry + slack * flops / self.chip.bf16_flops)


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


def _tile(size: int, row_bits: int, tile_bits: int, unit: int = LANES, least: int = 1) -> int:
    """Largest divisor of size that is a multiple of unit within tile_bits; size itself if odd.

    If that is below `least`, the smallest that is not.
    """
    if size % unit:
        return size
    divisors = [d for d in range(unit, size + 1, unit) if size % d == 0]
    fits = [d for d in divisors if least <= d and d * row_bits <= tile_bits]
    return max(fits, default=next((d for d in divisors if d >= least), size))


def _rings(shape: _Shape, plan: Plan) -> Plan:
    """Tiles held of gate/up and of down: a whole expert if it fits, and at least two of each.

    An expert of one tile each waits beside the next one, if both fit.
    """
    num_in = shape.i // plan.tile_i
    num_out = num_in if plan.cuts_i else shape.h // plan.tile_h
    if shape.expert_bytes <= min(EXPERT_BYTES, shape.budget // 2):
        fewest = 2 if 2 * shape.expert_bytes <= shape.budget // 2 else 1
        return replace(plan, ring_in=max(fewest, num_in), ring_out=max(fewest, num_out))
    half = min(RING_BYTES, shape.budget // 2) // 2
    size_in, size_out = _tile_bytes(shape, plan)
    return replace(
        plan,
        ring_in=min(num_in, max(2, half // size_in)),
        ring_out=min(num_out, max(2, half // size_out)),
    )


def _tile_bytes(shape: _Shape, plan: Plan) -> tuple[int, int]:
    """Of one gate/up tile and of one down tile in VMEM."""
    lanes_h, lanes_i = round_up(shape.h, LANES), round_up(shape.i, LANES)
    k_out = round_up(plan.tile_i, LANES) if plan.cuts_i else lanes_i
    return (
        shape.halves * plan.tile_i * lanes_h * shape.gate_up.bits // 8,
        round_up(plan.tile_h, LANES) * k_out * shape.down.bits // 8,
    )


def _ring_bytes(shape: _Shape, plan: Plan) -> int:
    size_in, size_out = _tile_bytes(shape, plan)
    return plan.ring_in * size_in + plan.ring_out * size_out + 2 * shape.scale_bytes


def _dense_bytes(shape: _Shape, plan: Plan) -> int:
    t, h, i = round_up(shape.t, 2 * SUBLANES), round_up(shape.h, LANES), round_up(shape.i, LANES)
    copies = 3 if shape.gate_up.is_int4 else 2  # of x: the result, even and odd columns
    held = t * (copies * h * shape.itemsize + h * 4 + i * shape.itemsize)  # and y, act
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
    is_whole = base.ring_in * base.tile_i >= shape.i and base.ring_out * base.tile_h >= shape.h
    if (
        shape.h % (words * LANES)
        or not is_whole
        or shape.t < 2 * FEWEST_ROWS
        or smem > SMEM_BYTES
        or (shape.e + 1) << slot_bits >= 1 << 31
    ):
        return None
    small_rows = SMALL_ROWS if shape.rows_per_expert > SMALL_ROWS // 2 else FEWEST_ROWS
    tile_rows = max(2 * small_rows, round_up(shape.rows_per_expert * 9 // 8, 32))
    tile_rows = min(tile_rows, MAX_TILE_ROWS)
    while tile_rows >= small_rows:
        plan = replace(
            base,
            mode="gather",
            tile_rows=tile_rows,
            tile_rows_small=small_rows,
            chunk_rows=min(CHUNK_ROWS, round_up(shape.t, FEWEST_ROWS)),
        )
        plan = replace(plan, vmem_bytes=_gather_bytes(shape, plan))
        if plan.vmem_bytes <= shape.budget:
            return plan
        tile_rows -= 32
    return None


def _plan_dense(shape: _Shape, interleaved: bool, cuts_i: bool) -> Plan:
    """The dense plan, whether it fits or not; `cuts_i`: cut along i what else is whole."""
    h, i, halves = shape.h, shape.i, shape.halves
    bits_in, bits_out = shape.gate_up.bits, shape.down.bits
    tile_bits = [8 * _wanted_bytes(shape, stored) for stored in (shape.gate_up, shape.down)]
    # The even and odd columns of a gate's result are each stored at a multiple of the lanes.
    unit = LANES * (2 if shape.down.is_int4 else 1)
    tile_i = _tile(i, halves * h * bits_in, tile_bits[0], unit)
    tile_h = _tile(h, i * bits_out, tile_bits[1])
    is_split = halves == 2 and not interleaved
    is_split &= i % (LANES if shape.gate_up.transposed else shape.gate_up.row_unit) == 0
    plan = Plan("dense", tile_i, tile_h, 1, 1, is_split)
    if cuts_i and shape.down.transposed and (h % LANES or i % LANES):
        # Columns are cut at lanes, rows at registers: gate and up side by side may reach them.
        width = LANES // (2 if interleaved else 1)
        width = width if shape.gate_up.transposed else shape.gate_up.row_unit
        unit = max(width, shape.down.row_unit * (2 if shape.down.is_int4 else 1))
        # Scales are read at multiples of the lanes, or at columns that are static.
        is_static = shape.gate_up.num_blocks and not shape.gate_up.transposed
        least = max(LANES, -(-i // MAX_UNROLLED) if is_static else 0)
        tile_i = _tile(i, (halves + 1) * h * bits_in // 2, tile_bits[0], unit, least)
        can_cut = interleaved or halves == 1 or is_split
        if can_cut and tile_i < i and _cuts_blocks(shape.down, i // tile_i):
            plan = replace(plan, tile_i=tile_i, tile_h=h, cuts_i=True)
    return _rings(shape, plan)


def _wanted_bytes(shape: _Shape, stored: Stored) -> int:
    """Of a weight tile: as many numbers as in bfloat16, and four times as many for int4 where the
    MXU is so wide that filling and draining it takes as long as the HBM for half a MiB.
    """
    is_long = stored.is_int4 and shape.chip.mxu_size > LANES
    wanted = TILE_BYTES if is_long else TILE_BYTES * min(stored.bits, 16) // 16
    # With one or two experts the last tile's matmul is not hidden: half the tile costs less.
    return wanted // 2 if shape.t <= 2 * SUBLANES else wanted


def _cuts_blocks(down: Stored, num: int) -> bool:
    """Whether `num` cuts of the contraction leave its blocks whole."""
    return down.num_blocks <= 1 or down.num_blocks % num == 0


def choose(
    t: int,
    topk: int,
    e: int,
    h: int,
    i: int,
    dtype: str,
    has_gate: bool,
    chip: Chip,
    *,
    gate_up: Stored | None = None,
    down: Stored | None = None,
    interleaved: bool = False,
) -> Plan | None:
    """The faster mode that fits; None: sort, and run two grouped matmuls instead.

    dtype: of x, and of the projections unless `gate_up` and `down` say otherwise. interleaved:
    gate and up columns alternate.
    """
    itemsize = {"bfloat16": 2, "float32": 4}.get(str(dtype))
    if itemsize is None or min(t, topk, e, h, i) < 1:
        return None
    stored = Stored(str(dtype))
    halves = 2 if has_gate else 1
    shape = _Shape(t, topk, e, h, i, itemsize, halves, gate_up or stored, down or stored, chip)
    dense = _plan_dense(shape, interleaved, cuts_i=True)
    dense = replace(dense, vmem_bytes=_dense_bytes(shape, dense))
    gather = _plan_gather(shape, _plan_dense(shape, interleaved, cuts_i=False))

    rows, active = shape.rows_per_expert, shape.active
    slots = t * topk
    moved = slots * (5 * h + 4 * i) * itemsize  # rows sorted, multiplied, un-sorted through HBM
    two_step = shape.seconds(rows, active) + 20e-6 + moved / (0.8 * chip.hbm_bytes_per_s)
    options = []
    if dense.vmem_bytes <= shape.budget:
        options.append((shape.seconds(t, active), dense))
    if gather:
        visits = active * -(-rows // gather.tile_rows)
        sort = SORT_SECONDS[0] + SORT_SECONDS[1] * slots
        options.append((shape.seconds(min(rows, gather.tile_rows), visits) + sort, gather))
    options = [(seconds, plan) for seconds, plan in options if seconds <= two_step]
    return min(options, key=lambda option: option[0])[1] if options else None
