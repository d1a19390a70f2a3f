"""What an attention kernel knows when it is traced, and the scalar arithmetic of its schedule."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from ...tpu_runtime import LANES, SUBLANES
from . import tiling
from .tiling import CHUNK, Shape, Tiles


class MaskPlan:
    """What `masks` asks of a plan, forward or backward."""

    shape: Shape
    has_segments: bool
    has_positions: bool

    @property
    def has_band(self) -> bool:
        return self.shape.left >= 0 or self.shape.right >= 0

    @property
    def has_ids(self) -> bool:
        return self.has_segments or self.has_positions


@dataclasses.dataclass(frozen=True)
class Plan(MaskPlan):
    """Shapes, options and tiles of one call."""

    b: int
    shape: Shape
    tiles: Tiles
    chip_cores: int
    scale: float  # of the logits, in units of log2, or before the cap
    softcap: float  # in units of log2
    has_sinks: bool
    has_lengths: bool
    has_segments: bool
    has_positions: bool
    mask_batch: int  # 0 without a mask
    precision: jax.lax.Precision
    interpret: bool
    vmem_bytes: int  # limit

    @property
    def q_form(self) -> str:
        return tiling.storage(self.shape.hq, self.shape.d)

    @property
    def k_form(self) -> str:
        return tiling.storage(self.shape.hkv, self.shape.d)

    @property
    def v_form(self) -> str:
        return tiling.storage(self.shape.hkv, self.shape.dv)

    @property
    def out_form(self) -> str:
        return tiling.storage(self.shape.hq, self.shape.dv)

    @property
    def head_tiles(self) -> int:
        """Pieces of 8 heads in which q and out of a tile pass: with more heads side by side than
        that, a strided load or store would reach few rows of one head."""
        forms, heads = {self.q_form, self.out_form}, self.tiles.heads
        return heads // SUBLANES if forms == {"bshd"} and heads % SUBLANES == 0 else 1

    @property
    def kv_heads(self) -> int:
        return self.shape.kv_heads(self.tiles.heads)

    @property
    def num_groups(self) -> int:
        return self.shape.hq // self.tiles.heads

    @property
    def num_q(self) -> int:
        return -(-self.shape.sq // self.tiles.block_q)

    @property
    def num_tiles(self) -> int:
        return self.b * self.num_groups * self.num_q

    @property
    def num_cores(self) -> int:
        """A core without a tile of its own would still write an output block."""
        return min(self.chip_cores, self.num_tiles)

    @property
    def core_tiles(self) -> int:
        return -(-self.num_tiles // self.num_cores)

    @property
    def num_k(self) -> int:
        """Blocks of keys, counting from key 0."""
        return -(-self.shape.sk // self.tiles.block_k)

    @property
    def shifts_keys(self) -> bool:
        """Whether block borders of the keys follow those of the queries."""
        return self.has_band and not self.by_strips and not self.mask_batch

    @property
    def by_strips(self) -> bool:
        return self.shape.by_strips

    @property
    def tail_keys(self) -> int:
        """Keys of a last block that is not full, if nothing else is masked there; otherwise 0."""
        masked = self.has_band or self.has_ids or self.mask_batch or self.has_lengths
        return 0 if masked else self.shape.sk % self.tiles.block_k

    # -- positions: everything below works on Python ints and on traced scalars alike

    def split_tile(self, tile):
        """(batch, head group, query block) of a tile."""
        rest, q_id = _divmod(tile, self.num_q)
        batch, group = _divmod(rest, self.num_groups)
        return batch, group, q_id

    def first_kv_head(self, group):
        if self.tiles.heads >= self.shape.rep:
            return group * self.kv_heads
        return _divmod(group * self.tiles.heads, self.shape.rep)[0]

    def offset(self, length):
        """Key position of query 0."""
        return length - self.shape.sq

    def aligned_offset(self, length):
        """`offset` rounded up to whole lanes."""
        return (self.offset(length) + LANES - 1) & -LANES

    def key_shift(self, length):
        """First key of block 0, in (-block_k, 0]."""
        if not self.shifts_keys:
            return 0
        size = self.tiles.block_k
        shift = self.aligned_offset(length)
        if isinstance(shift, int):
            return -(-shift % size)
        far = -(-self.shape.sq // size) * size  # makes the dividend positive
        return _round_down_neg(jax.lax.rem(shift + far, size), size)

    def key_range(self, q_id, length):
        """Keys that some query of a block may see by causality, window and length."""
        low, high = 0, length
        if self.has_band and not self.has_positions:
            first = q_id * self.tiles.block_q + self.offset(length)
            last = _min((q_id + 1) * self.tiles.block_q, self.shape.sq) - 1 + self.offset(length)
            if self.shape.left >= 0:
                low = _max(low, first - self.shape.left)
            if self.shape.right >= 0:
                high = _min(high, last + self.shape.right + 1)
        return low, high

    def block_range(self, q_id, length):
        """Blocks of keys that hold `key_range`."""
        low, high = self.key_range(q_id, length)
        shift, size = self.key_shift(length), self.tiles.block_k
        first = _divmod(_max(low - shift, 0), size)[0]
        last = _divmod(_max(high - shift, 0) + size - 1, size)[0]
        return first, jnp.where(high > low, last, first)

    @property
    def partial_rels(self) -> tuple[int, ...]:
        """Distances (first key of a block - aligned first position of a query block) at which the
        band cuts the block; each gets its own unrolled body."""
        if not self.shifts_keys:
            return ()
        size, rows = self.tiles.block_k, self.tiles.block_q
        step = math.gcd(size, rows)
        low = -(self.shape.left + size + rows + LANES) if self.shape.left >= 0 else -size - rows
        high = rows + max(self.shape.right, 0) + size
        rels = []
        for rel in range(low // step * step, high, step):
            states = {self.strip_state(rel, r, rows, 0, size) for r in (0,)}
            if states == {"partial"}:
                rels.append(rel)
        return tuple(rels) if len(rels) <= 4 else ()

    def static_residue(self) -> tuple[int, int]:
        """Range of offset - aligned_offset that is possible at run time."""
        if self.has_lengths:
            return -LANES + 1, 0
        residue = self.offset(self.shape.sk) - self.aligned_offset(self.shape.sk)
        return residue, residue

    def strip_state(self, rel: int, row: int, rows: int, col: int, cols: int) -> str:
        """ "empty", "full" or "partial": how the band meets a piece of a block."""
        low, high = self.static_residue()
        first, last = rel + col - row - rows + 1, rel + col + cols - 1 - row  # key - query
        left, right = self.shape.left, self.shape.right
        if (right >= 0 and first > right + high) or (left >= 0 and last < low - left):
            return "empty"
        if (right < 0 or last <= right + low) and (left < 0 or first >= high - left):
            return "full"
        return "partial"


def _divmod(x, size: int):
    if isinstance(x, int):
        return divmod(x, size)
    if size == 1:
        return x, 0
    return jax.lax.div(x, size), jax.lax.rem(x, size)


def _round_down_neg(rest, size: int):
    return jnp.where(rest > 0, rest - size, 0)


def _min(x, y):
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.minimum(x, y)


def _max(x, y):
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else jnp.maximum(x, y)


def chunk_count(length: int) -> int:
    return -(-length // CHUNK)
