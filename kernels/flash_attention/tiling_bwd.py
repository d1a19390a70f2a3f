"""Tile choice of the backward of attention: pure functions of shapes, dtypes and the chip."""

from __future__ import annotations

from dataclasses import dataclass

from ...tpu_runtime import LANES, MIB, SUBLANES, Chip, round_up
from .tiling import Shape, staged_heads, storage

STEP = 512  # queries and keys of one set of matmuls in bfloat16
STEP_ROWS = 8 * 1024  # queries times heads of a long grid step
STEP_HEADS = 16  # more would make too much code: tiles of heads are taken apart without a loop
SPILL_BYTES = 6 * MIB  # what the compiler keeps for values that do not fit in registers


@dataclass(frozen=True)
class Tiles:
    """Sizes of `kernel_bwd.flash_attention_bwd`."""

    block_q: int  # queries of one grid step
    step_q: int  # queries of one set of matmuls
    block_k: int  # keys of one set of matmuls, one DMA and one block of dk and dv
    heads: int  # query heads of one grid step
    kv_heads: int  # key heads of one job, see `kernel_bwd_step`
    chunk: int  # keys whose dk and dv stay in VMEM
    q_form: str  # orders of dimensions of q and dq
    out_form: str  # ... of grad_out
    k_form: str
    v_form: str
    vmem_bytes: int  # estimate

    def __post_init__(self):
        assert self.block_q % self.step_q == 0 and self.step_q % LANES == 0, self
        assert self.chunk % self.block_k == 0 and self.block_k % LANES == 0, self
        assert self.heads % self.kv_heads == 0, self


def is_whole(heads: int, num_heads: int) -> bool:
    """Whether `heads` fill tiles of 8: those can be read in part but only be written whole."""
    return heads % SUBLANES == 0 or heads == num_heads


def _groups(shape: Shape, forms: tuple[str, ...]) -> list[tuple[int, int]]:
    """Possible (heads, kv_heads) of one grid step and its job, ascending."""
    groups = []
    for heads in range(1, min(shape.hq, LANES) + 1):
        if shape.hq % heads or (heads % shape.rep and shape.rep % heads):
            continue
        used = shape.kv_heads(heads)
        if "bshd" in forms[:2] and not is_whole(heads, shape.hq):
            continue
        in_tile = is_whole(used, shape.hkv) or SUBLANES % used == 0
        if "bshd" in forms[2:] and not in_tile:
            continue
        groups.append((heads, used))
    return groups


def _roomy(shape: Shape, block_q: int, groups, chip: Chip):
    """The group whose steps are long enough that their beginning and end hardly count."""
    shared = [g for g in groups if shape.hkv // g[1] >= chip.num_cores] or groups[:1]
    is_long = (g for g in shared if g[0] * block_q >= STEP_ROWS or g[0] >= STEP_HEADS)
    return next(is_long, shared[-1])


def _vmem(shape: Shape, block_q: int, step: tuple[int, int], group, chunk: int, forms) -> int:
    """Bytes of all buffers; step: (step_q, block_k)."""
    heads, used = group
    size, (step_q, block_k) = shape.dtype_bytes, step
    wide = round_up(shape.d, LANES), round_up(shape.dv, LANES)
    tall = round_up(shape.d, 2 * SUBLANES), round_up(shape.dv, 2 * SUBLANES)
    padded = round_up(heads, SUBLANES) if "bshd" in forms[:2] else heads
    dq_size = size if chunk >= shape.sk else 4
    total = 2 * padded * block_q * (sum(wide) * size + wide[0] * dq_size)  # two each
    total += heads * block_q * (sum(tall) * size + tall[0] * 4)  # q and grad_out upright, dq
    total += 4 * round_up(heads, SUBLANES) * block_q * 4  # lse and delta
    total += used * chunk * (sum(wide) * size + tall[0] * size + sum(tall) * 4)
    for form, width in zip(forms[2:], wide, strict=True):
        staged = staged_heads(shape.hkv, used) if form == "bshd" else used
        total += block_k * staged * width * size  # as it comes from HBM
        is_tiled = form == "bshd" and is_whole(used, shape.hkv)
        total += 2 * block_k * (round_up(used, SUBLANES) if is_tiled else used) * width * size
    if shape.mask_heads:
        total += (heads if shape.mask_heads > 1 else 1) * step_q * block_k
    if shape.has_ids:
        total += 2 * block_k * LANES * 4 + 4 * SUBLANES * round_up(shape.sk, LANES) * 4
        total += 4 * SUBLANES * block_q * 4
    return total + SPILL_BYTES * step_q * block_k * size // (2 * STEP * STEP)


def _steps(shape: Shape) -> tuple[int, int]:
    """(step_q, block_k)."""
    most = STEP if shape.dtype_bytes == 2 else STEP // 2
    sided = shape.left >= 0 and shape.right >= 0
    if sided and shape.left + shape.right + 1 <= STEP // 2:
        most = STEP // 2
    if not shape.has_ids and not shape.mask_heads:
        return tuple(min(most, round_up(size, LANES)) for size in (shape.sq, shape.sk))
    # Bounds of ids are known for 256 at a time: steps must hold whole ones, or lie within one.
    powers = [size for size in (LANES, 2 * LANES, 4 * LANES) if size <= most]
    return tuple(
        next((size for size in powers if size >= length), powers[-1])
        for length in (shape.sq, shape.sk)
    )


def choose(shape: Shape, chip: Chip, **overrides) -> Tiles:
    """Tiles that fit 8/10 of VMEM; `overrides` are for experiments.

    All keys of a job stay in VMEM if they can. To that end the blocks of queries shrink, then
    heads are handled one by one, which costs XLA a transposition where they are stored together,
    and at last the keys are cut into chunks, each with a dq of its own to be summed.
    """
    budget = chip.vmem_bytes * 8 // 10
    step = step_q, block_k = overrides.get("step", _steps(shape))
    keys = round_up(shape.sk, block_k)
    stored = tuple(
        storage(heads, width) for width in (shape.d, shape.dv) for heads in (shape.hq, shape.hkv)
    )
    stored = stored[0], stored[2], stored[1], stored[3]
    apart = tuple("bhsd" if form == "bshd" else form for form in stored)
    sizes = sorted({min(2 * step_q, round_up(shape.sq, step_q)), step_q}, reverse=True)

    def tiles(block_q: int, group, chunk: int, forms) -> Tiles | None:
        used = _vmem(shape, block_q, step, group, chunk, forms)
        if used > budget:
            return None
        return Tiles(block_q, step_q, block_k, *group, chunk, *forms, used)

    sizes = overrides.get("block_q", sizes)
    stored = overrides.get("forms", stored)
    for forms in (stored, apart):
        for block_q in sizes:
            groups = [g for g in _groups(shape, forms) if tiles(block_q, g, keys, forms)]
            if groups:
                return tiles(block_q, _roomy(shape, block_q, groups, chip), keys, forms)
    chunk = keys
    while chunk > block_k:
        chunk = round_up(chunk // 2, block_k)
        if found := tiles(step_q, _groups(shape, apart)[0], chunk, apart):
            return found
    raise NotImplementedError(
        f"backward of attention with sq={shape.sq}, sk={shape.sk}, head sizes {shape.d} and "
        f"{shape.dv} does not fit the {chip.vmem_bytes // MIB} MiB VMEM of a {chip.name}: split "
        "the sequence, or pass documents as a batch"
    )
