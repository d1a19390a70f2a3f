"""Tile choice of the grouped matmul: pure functions of shapes, dtypes and the chip."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...tpu_runtime import LANES, MIB, SUBLANES, Chip, round_up

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
STORED_ROWS = 32  # rows of a register of one-byte values
PACKED_ROWS = 16  # rows of a bf16 register, the fewest a dot works on
TAIL_ROWS = (16, 32, 64, 128, 256)
MAX_ROWS = 1024  # at 561 flop per byte (v6e) weights should serve 600 rows or more
WEIGHT_TILE_BYTES = 2 * MIB  # long enough to hide a DMA's start, short enough to end soon
MAX_WEIGHT_TILE_BYTES = 4 * MIB
FEW_ROWS = 512  # so few rows need no long dots
MAX_DOT_MATMULS = 2048  # MXU instructions of one dot, about 4 bundles each


@dataclass(frozen=True)
class Quantised:
    """How the weights are stored and where their scales apply."""

    num_blocks: int  # of the scales; 1: per channel
    is_int4: bool
    is_backward: bool  # lhs is a gradient [m, n], out [m, k], the scales run along the contraction
    nibble: int = 0  # backward of int4: out has the even (0) or the odd (1) k only

    @property
    def splits_lhs(self) -> bool:
        """Even and odd columns of lhs are multiplied by low and high nibbles."""
        return self.is_int4 and not self.is_backward

    @property
    def scales_lhs(self) -> bool:
        """One scale per column of lhs, as its rows are."""
        return self.is_backward and self.num_blocks == 1

    @property
    def bytes_per_k(self) -> float:
        """Of one column of weights, for each column of lhs."""
        return 0.5 if self.splits_lhs else 1


@dataclass(frozen=True)
class Tiles:
    """Sizes of `kernel.ragged_dot_fwd`: `rows` and `cols` are moved by DMA, `*_step` by one dot."""

    rows: int  # most rows of one visit
    cols: int  # columns of one weight tile and of one output window
    row_step: int  # rows of one dot
    row_tails: tuple[int, ...]  # ascending: shorter dots for the last rows of a visit
    col_step: int  # columns of one dot
    slots: int  # weight tiles in flight
    out_slots: int  # output windows in flight
    lhs_slots: int  # row windows in flight
    vmem_bytes: int = 0  # estimate

    def __post_init__(self):
        if self.rows % self.row_step or self.cols % self.col_step:
            raise ValueError(f"steps must divide the tiles, got {self}")
        if self.row_step % PACKED_ROWS:
            raise ValueError(f"row_step must be a multiple of {PACKED_ROWS}, got {self}")
        sizes = (*self.row_tails, self.row_step)
        if list(sizes) != sorted(set(sizes)):
            raise ValueError(f"row_tails must ascend below row_step, got {self}")
        if min(self.slots, self.out_slots, self.lhs_slots) < 2:
            raise ValueError(f"every ring needs two slots, got {self}")


def lhs_slots_for(n: int, cols: int, slots: int, num_cores: int) -> int:
    """Row windows that `slots` weight tiles reach ahead into, plus the one in use."""
    num_n = -(-n // cols)
    core_n = -(-num_n // num_cores)
    fewest = max(1, num_n - core_n * (num_cores - 1))  # column tiles of the last core
    return 1 + -(-slots // fewest)


def vmem_budget(chip: Chip) -> int:
    """Bytes that a kernel may ask for; the compiler needs some itself."""
    return chip.vmem_bytes * 9 // 10


def check(tiles: Tiles, n: int, chip: Chip) -> None:
    """Refuses tiles that do not suit the columns."""
    if tiles.cols != n and (tiles.cols > n or tiles.cols % LANES):
        raise ValueError(f"cols must be n or a smaller multiple of {LANES}, got {tiles}, n={n}")
    lhs_slots = lhs_slots_for(n, tiles.cols, tiles.slots, chip.num_cores)
    if tiles.lhs_slots < lhs_slots:
        raise ValueError(f"lhs_slots must be at least {lhs_slots}, got {tiles}")


def vmem_estimate(
    tiles: Tiles,
    k: int,
    n: int,
    in_bytes: int,
    out_bytes: int,
    transpose_rhs: bool,
    quantised: Quantised | None = None,
) -> int:
    """Bytes of all buffers plus two float32 results of a dot, which the compiler may spill."""
    k_lanes, cols = round_up(k, LANES), round_up(tiles.cols, LANES)
    k_rows = round_up(k, PACKED_ROWS if quantised is None else 2 * STORED_ROWS)
    rhs_tile = cols * k_lanes if transpose_rhs else k_rows * cols
    rhs_bytes = in_bytes if quantised is None else quantised.bytes_per_k
    return (
        tiles.lhs_slots * tiles.rows * k_lanes * in_bytes
        + int(tiles.slots * rhs_tile * rhs_bytes)
        + (0 if quantised is None else _scale_bytes(tiles, k, in_bytes, quantised))
        + (tiles.out_slots + 1) * tiles.rows * cols * out_bytes
        + 32 * (1 + tiles.lhs_slots) * (round_up(n, LANES) + cols)  # partial strips, bias rows
        + 2 * tiles.row_step * round_up(tiles.col_step, LANES) * 4
    )


def _scale_bytes(tiles: Tiles, k: int, in_bytes: int, quantised: Quantised) -> int:
    """Bytes of the scales, of one widened slice of weights, and of the parted rows of int4."""
    k_lanes, cols = round_up(k, LANES), round_up(tiles.cols, LANES)
    per_slot = tiles.lhs_slots * k_lanes if quantised.is_backward else tiles.slots * cols
    widened = k_lanes * round_up(tiles.col_step, LANES) * (in_bytes + 4)
    pairs = tiles.rows * (k_lanes + 2 * LANES) * in_bytes if quantised.splits_lhs else 0
    return per_slot * round_up(quantised.num_blocks, SUBLANES) * 4 + widened + pairs


def _dot_width(in_bytes: int, chip: Chip) -> int:
    """Rows and columns of a large dot.

    Filling and draining the MXU costs a dot of two widths 5 % (v6e, k=4096), of one width 18 %.
    float32 takes up to twelve times the instructions of bf16, so it gets dots of one width.
    """
    return chip.mxu_size * (2 if in_bytes == 2 else 1)


def _col_step(
    m: int, k: int, n: int, in_bytes: int, chip: Chip, quantised: Quantised | None
) -> int:
    """Columns of one dot: two MXU widths, less if k is very long.

    With few rows one width is enough, and the dots left when the last weights arrive end sooner.
    Quantised weights arrive so fast that what a dot costs beside its products counts.
    """
    mxu = chip.mxu_size
    widest = _dot_width(in_bytes, chip) if m > FEW_ROWS else mxu
    weight_bytes = in_bytes
    if quantised is not None and m <= FEW_ROWS:
        widest = 512
        if quantised.splits_lhs:  # its products are cut into few columns (dequant)
            widest, weight_bytes = 1536, 1
    if chip.num_cores > 1:  # every core needs columns
        widest = min(widest, max(LANES, round_up(-(-n // chip.num_cores), LANES)))
    longest = max(LANES, MAX_WEIGHT_TILE_BYTES // (k * weight_bytes))
    if n <= min(widest, longest):
        return n

    def waste(step):
        return round_up(n, step) / round_up(n, LANES) - 1

    # On v5e a bound MXU should not work on missing columns: 5760 = 15 * 384, 1408 = 11 * 128.
    steps = [step for step in (widest, 3 * mxu, mxu) if step <= min(longest, n // chip.num_cores)]
    good = [step for step in steps if waste(step) < 0.02] if mxu == LANES else []
    return (good or steps or [LANES])[0]


def choose(
    m: int,
    k: int,
    n: int,
    g: int,
    lhs_dtype: str,
    out_dtype: str,
    transpose_rhs: bool,
    chip: Chip,
    quantised: Quantised | None = None,
) -> Tiles:
    """Tiles for [m, k] times g matrices of [k, n]; m, k, n, g >= 1.

    Weights are read once if a group has at most `rows` rows, so `rows` is as long as VMEM allows.
    """
    if min(m, k, n, g) < 1:
        raise ValueError(f"m, k, n, g must be positive, got {(m, k, n, g)}")
    in_bytes, out_bytes = DTYPE_BYTES[lhs_dtype], DTYPE_BYTES[out_dtype]
    col_step = _col_step(m, k, n, in_bytes, chip, quantised)
    is_narrow = quantised is not None and quantised.splits_lhs
    tile_bytes = WEIGHT_TILE_BYTES if m > FEW_ROWS or is_narrow else WEIGHT_TILE_BYTES // 2
    rhs_bytes = in_bytes if quantised is None else quantised.bytes_per_k
    num_parts = 4
    if quantised is not None and m <= FEW_ROWS:
        num_parts = 1 if is_narrow else 3
    tile_bytes = min(tile_bytes, k * n * rhs_bytes // num_parts)
    step_bytes = k * col_step * rhs_bytes
    cols = col_step * max(1, min(int(tile_bytes // step_bytes), n // chip.num_cores // col_step))

    row_step = _dot_width(in_bytes, chip)
    if quantised is not None and (quantised.num_blocks > 1 or m <= FEW_ROWS):
        row_step = LANES  # blocks have float32 sums of their own; wide dots of few rows are long
    while row_step > PACKED_ROWS and row_step // 2 >= m:
        row_step //= 2
    while row_step > LANES and row_step * col_step * k > MAX_DOT_MATMULS * 16 * chip.mxu_size**2:
        row_step //= 2
    rows = min(MAX_ROWS, round_up(round_up(m, SUBLANES), row_step))
    slots = 4
    while True:
        tails = tuple(t for t in TAIL_ROWS if t < row_step)
        lhs_slots = lhs_slots_for(n, cols, slots, chip.num_cores)
        tiles = Tiles(rows, cols, row_step, tails, col_step, slots, 4, lhs_slots)
        vmem_bytes = vmem_estimate(tiles, k, n, in_bytes, out_bytes, transpose_rhs, quantised)
        if vmem_bytes <= vmem_budget(chip):
            return replace(tiles, vmem_bytes=vmem_bytes)
        if rows >= 2 * row_step:
            rows = round_up(rows // 2, row_step)
        elif slots > 2:
            slots -= 1
        elif row_step > 2 * PACKED_ROWS:
            row_step //= 2
            rows = row_step
        elif col_step > LANES:
            cols = col_step = LANES
        else:
            raise NotImplementedError(
                f"k={k} in {lhs_dtype} does not fit the {chip.vmem_bytes // MIB} MiB of VMEM of a "
                f"{chip.name}: split the contraction and add the parts"
            )
