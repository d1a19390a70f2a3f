"""Tile choice of the grouped matmul: pure functions of shapes, dtypes and the chip."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...tpu_runtime import LANES, MIB, SUBLANES, Chip

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
PACKED_ROWS = 16  # rows of a bf16 register, the fewest a dot works on
TAIL_ROWS = (16, 32, 64, 128, 256)
MAX_ROWS = 1024  # at 561 flop per byte (v6e) weights should serve 600 rows or more
WEIGHT_TILE_BYTES = 2 * MIB  # long enough to hide a DMA's start, short enough to end soon
MAX_WEIGHT_TILE_BYTES = 4 * MIB
MAX_DOT_MATMULS = 2048  # MXU instructions of one dot, about 4 bundles each


def round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple


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
        if any(a >= b for a, b in zip(self.row_tails, (*self.row_tails[1:], self.row_step))):
            raise ValueError(f"row_tails must ascend below row_step, got {self}")
        if min(self.slots, self.out_slots, self.lhs_slots) < 2:
            raise ValueError(f"every ring needs two slots, got {self}")


def lhs_slots_for(n: int, cols: int, slots: int, num_cores: int) -> int:
    """Row windows that `slots` weight tiles reach ahead into, plus the one in use."""
    core_n = -(-(-(-n // cols)) // num_cores)
    return 1 + -(-slots // core_n)


def vmem_estimate(
    tiles: Tiles, k: int, n: int, in_bytes: int, out_bytes: int, transpose_rhs: bool
) -> int:
    """Bytes of all buffers plus two float32 results of a dot, which the compiler may spill."""
    k_lanes, cols = round_up(k, LANES), round_up(tiles.cols, LANES)
    rhs_tile = cols * k_lanes if transpose_rhs else round_up(k, PACKED_ROWS) * cols
    return (
        tiles.lhs_slots * tiles.rows * k_lanes * in_bytes
        + tiles.slots * rhs_tile * in_bytes
        + (tiles.out_slots + 1) * tiles.rows * cols * out_bytes
        + 64 * (round_up(n, LANES) + cols)  # partial strips and bias rows
        + 2 * tiles.row_step * round_up(tiles.col_step, LANES) * 4
    )


def _col_step(k: int, n: int, in_bytes: int, chip: Chip) -> int:
    """Columns of one dot: two MXU widths, less if k is very long."""
    mxu = chip.mxu_size
    longest = max(LANES, MAX_WEIGHT_TILE_BYTES // (k * in_bytes))
    if n <= min(2 * mxu, longest):
        return n

    def waste(step):
        return round_up(n, step) / round_up(n, LANES) - 1

    # On v5e a bound MXU should not work on missing columns: 5760 = 15 * 384, 1408 = 11 * 128.
    steps = [step for step in (2 * mxu, 3 * mxu, mxu) if step <= longest and step <= n]
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
) -> Tiles:
    """Tiles for [m, k] times g matrices of [k, n]; m, k, n, g >= 1.

    Weights are read once if a group has at most `rows` rows, so `rows` is as long as VMEM allows.
    """
    if min(m, k, n, g) < 1:
        raise ValueError(f"m, k, n, g must be positive, got {(m, k, n, g)}")
    in_bytes, out_bytes = DTYPE_BYTES[lhs_dtype], DTYPE_BYTES[out_dtype]
    budget = chip.vmem_bytes * 9 // 10
    col_step = _col_step(k, n, in_bytes, chip)
    tile_bytes = min(WEIGHT_TILE_BYTES, k * n * in_bytes // 4)
    num_steps = max(1, min(tile_bytes // (k * col_step * in_bytes), n // col_step))
    cols = num_steps * col_step

    row_step = 2 * chip.mxu_size
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
        vmem_bytes = vmem_estimate(tiles, k, n, in_bytes, out_bytes, transpose_rhs)
        if vmem_bytes <= budget:
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
