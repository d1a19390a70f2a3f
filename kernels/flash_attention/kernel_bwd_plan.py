"""What the backward kernel of attention knows when it is traced, and its scalar arithmetic."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from . import masks
from .plan import MaskPlan
from .tiling import Shape
from .tiling_bwd import Tiles, is_whole

_div, _rem = jax.lax.div, jax.lax.rem


@dataclasses.dataclass(frozen=True)
class Plan(MaskPlan):
    """Shapes, options and tiles of one call."""

    b: int
    shape: Shape
    tiles: Tiles
    chip_cores: int
    softmax_scale: float
    softcap: float
    has_lengths: bool
    has_segments: bool
    has_positions: bool
    mask_batch: int  # 0 without a mask
    needs_q: bool
    needs_kv: bool
    precision: jax.lax.Precision
    interpret: bool

    @property
    def num_groups(self) -> int:
        """Groups of key heads."""
        return self.shape.hkv // self.tiles.kv_heads

    @property
    def splits(self) -> int:
        """Grid steps that the query heads of one group of key heads take."""
        return self.shape.hq // self.num_groups // self.tiles.heads

    @property
    def num_q(self) -> int:
        return -(-self.shape.sq // self.tiles.block_q)

    @property
    def num_k(self) -> int:
        return -(-self.shape.sk // self.tiles.block_k)

    @property
    def num_chunks(self) -> int:
        return -(-self.shape.sk // self.tiles.chunk)

    @property
    def chunk_blocks(self) -> int:
        return self.tiles.chunk // self.tiles.block_k

    @property
    def num_jobs(self) -> int:
        return self.b * self.num_groups * self.num_chunks

    @property
    def num_cores(self) -> int:
        """Cores at work: one without a job would write to blocks of another."""
        return min(self.chip_cores, self.num_jobs)

    @property
    def q_steps(self) -> int:
        """Steps of a job that work on queries; the others write dk and dv."""
        return self.splits * self.num_q

    @property
    def job_steps(self) -> int:
        return self.q_steps + (self.chunk_blocks if self.needs_kv else 0)

    @property
    def core_steps(self) -> int:
        return -(-self.num_jobs // self.num_cores) * self.job_steps

    @property
    def dk_form(self) -> str:
        return self._written_form(self.tiles.k_form)

    @property
    def dv_form(self) -> str:
        return self._written_form(self.tiles.v_form)

    def _written_form(self, form: str) -> str:
        whole = is_whole(self.tiles.kv_heads, self.shape.hkv)
        return "bhsd" if form == "bshd" and not whole else form

    def kv_head_of(self, head):
        """Key head of a step's query head, counted from the job's first key head."""
        if self.tiles.kv_heads == 1:
            return 0
        return _div(head, self.shape.rep) if self.shape.rep > 1 else head


@dataclasses.dataclass(frozen=True)
class Step:
    """Scalars of one grid step."""

    batch: jax.Array
    group: jax.Array
    chunk: jax.Array
    split: jax.Array
    q_id: jax.Array  # block of queries; the job's last one when dk and dv are written
    k_id: jax.Array  # block of the chunk that is written
    turn: jax.Array  # place in the job

    @classmethod
    def at(cls, plan: Plan, core, step) -> Step:
        last = plan.num_jobs * plan.job_steps - 1
        index = jnp.minimum(core * plan.core_steps + step, last)
        job, turn = _div(index, plan.job_steps), _rem(index, plan.job_steps)
        rest, chunk = _div(job, plan.num_chunks), _rem(job, plan.num_chunks)
        batch, group = _div(rest, plan.num_groups), _rem(rest, plan.num_groups)
        q_turn = jnp.minimum(turn, plan.q_steps - 1)
        split, q_id = _div(q_turn, plan.num_q), _rem(q_turn, plan.num_q)
        return cls(batch, group, chunk, split, q_id, jnp.maximum(turn - plan.q_steps, 0), turn)

    def heads(self, plan: Plan):
        """Block of query heads."""
        return self.group * plan.splits + self.split


def key_range(plan: Plan, first, rows: int, length):
    """Keys that queries first .. first + rows - 1 may see by causality, window and length."""
    low, high = 0, length
    if plan.has_band and not plan.has_positions:
        offset = length - plan.shape.sq
        if plan.shape.left >= 0:
            low = jnp.maximum(low, first + offset - plan.shape.left)
        if plan.shape.right >= 0:
            last = jnp.minimum(first + rows, plan.shape.sq) - 1
            high = jnp.minimum(high, last + offset + plan.shape.right + 1)
    return low, high


def block_range(plan: Plan, first, rows: int, length, chunk):
    """Blocks of a chunk that hold `key_range`; none if first >= stop."""
    low, high = key_range(plan, first, rows, length)
    size, start = plan.tiles.block_k, chunk * plan.tiles.chunk
    low, high = jnp.maximum(low, start), jnp.minimum(high, start + plan.tiles.chunk)
    stop = _div(jnp.maximum(high, 0) + size - 1, size)
    return _div(low, size), jnp.where(high > low, stop, 0)


def pair_state(plan: Plan, refs, batch, length, query, rows: int, key, cols: int):
    """(some pair may be visible, every pair is visible) of rows x cols pairs.

    Queries past the end need no mask, see `kernel_bwd._statistics`.
    """
    some = (query < plan.shape.sq) & (key < length)
    every = jnp.bool_(True)
    if needs_bounds(plan):
        every = key + cols <= length
    if plan.has_band and not plan.has_positions:
        gap = key - (query + length - plan.shape.sq)
        if plan.shape.right >= 0:
            some &= gap - rows < plan.shape.right
            every &= gap + cols - 1 <= plan.shape.right
        if plan.shape.left >= 0:
            some &= gap + cols > -plan.shape.left
            every &= gap - rows + 1 >= -plan.shape.left
    if plan.has_ids:
        place = masks.Place(
            batch=batch,
            q_id=None,
            block=None,
            first_query=query,
            first_position=None,
            first_key=key,
            length=length,
        )
        by_ids = masks.id_state(plan, refs, place, 0, rows, 0, cols)
        some, every = some & by_ids[0], every & by_ids[1]
    if plan.mask_batch:
        states = [_mask_state(plan, refs, batch, query, i, key) for i in _steps_in(plan, rows)]
        some &= sum(states) > 0
        for state in states:
            every &= state == 2
    return some, every


def _steps_in(plan: Plan, rows: int) -> range:
    return range(rows // plan.tiles.step_q)


def _mask_state(plan: Plan, refs, batch, query, i: int, key):
    """0 empty, 1 partial, 2 full: the boolean mask over all heads."""
    rows = plan.num_q * (plan.tiles.block_q // plan.tiles.step_q)
    row = (batch if plan.mask_batch > 1 else 0) * rows + _div(query, plan.tiles.step_q) + i
    return refs.mask_states[row * plan.num_k + _div(key, plan.tiles.block_k)]


def needs_bounds(plan: Plan) -> bool:
    """Whether keys past the end must be masked: a causal band hides them from valid queries."""
    return plan.shape.right != 0 or plan.has_positions
