"""The stream of key blocks behind `kernel_decode`: plan, refs, arithmetic."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, SUBLANES
from . import tiling
from .tiling import DecodeTiles

_LN2 = math.log(2.0)
_FAST, _SAFE = 0, 1


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """What is known when the kernel is traced.

    Rows are (kv head, query head of it, query). In "bshd" caches the keys of all heads follow each
    other, so all rows meet all of them at once (`fold` = hkv columns per key, one group) and a
    column counts only for rows of its head: that costs idle work in registers, but no shuffle.
    Otherwise a group is one kv head and fold is 1.
    """

    b: int
    groups: int
    rows: int  # of one group, padded
    head_rows: int  # rows of one kv head
    num_rows: int  # rows of one group that are queries
    columns: int  # sk * fold
    fold: int
    d: int
    dv: int
    sq: int
    left: int
    right: int
    feature_major: bool  # k is [b, groups, d, columns]
    scale: float
    softcap: float
    has_sinks: bool
    mask_shape: tuple[int, int]  # batch, rows of the mask; (0, 0) without
    tiles: DecodeTiles
    num_cores: int
    precision: jax.lax.Precision
    interpret: bool

    @property
    def core_batch(self) -> int:
        return -(-self.b // self.num_cores)

    @property
    def io_batch(self) -> int:
        """Entries of one block of q, out and lse: few transfers, but at most IO_BYTES."""
        if self.core_batch * self.num_cores != self.b:
            return 1
        entry_bytes = self.groups * self.rows * (self.d + self.dv + LANES) * 4
        most = max(1, tiling.DECODE_IO_BYTES // entry_bytes)
        return max(
            n for n in range(1, self.core_batch + 1) if self.core_batch % n == 0 and n <= most
        )

    @property
    def tile_columns(self) -> int:
        return self.tiles.block_k * self.fold

    def block_range(self, length):
        """Blocks of keys that some query sees."""
        size = self.tiles.block_k
        low, high = jnp.int32(0), length
        if self.left >= 0:
            low = jnp.maximum(length - self.sq - self.left, 0)
        if self.right >= 0:
            high = jnp.clip(length + self.right, 0, length)
        first, stop = jax.lax.div(low, size), jax.lax.div(high + size - 1, size)
        return first, jnp.where(high > low, stop, first)


@dataclasses.dataclass(frozen=True)
class _Refs:
    lengths: jax.Ref  # SMEM [b]
    q: jax.Ref  # VMEM [io_batch, groups, rows, d]
    k: jax.Ref  # HBM [b, groups, columns, d] or [b, groups, d, columns]
    v: jax.Ref  # HBM
    out: jax.Ref  # VMEM [io_batch, groups, rows, dv]
    lse: jax.Ref  # VMEM [io_batch, groups, rows, LANES] in all lanes
    k_buf: jax.Ref  # [slots + 1, groups, tile]; the last slot is for second passes
    v_buf: jax.Ref
    kv_sem: jax.Ref  # [2, slots + 1]
    acc: jax.Ref  # float32 [groups, rows, dv]
    l: jax.Ref  # float32 [groups, rows, LANES] in all lanes
    m: jax.Ref  # float32 [groups, rows, LANES] in all lanes
    stream: jax.Ref  # SMEM [4] slot to use next; entry, block and slot to fetch next
    match: jax.Ref | None = None  # int32 [rows, lcm(fold, LANES)]: column belongs to row's head
    sinks: jax.Ref | None = None  # VMEM [groups, rows, LANES] in all lanes, in units of log2
    mask: jax.Ref | None = None  # HBM int8 [mask batch, 1 or groups, mask rows, columns]
    mask_buf: jax.Ref | None = None  # [slots + 1, 1 or groups, mask rows, tile columns]
    mask_sem: jax.Ref | None = None  # [slots + 1]


def _copies(plan: DecodePlan, refs: _Refs, batch, block, slot):
    """DMAs of one block of keys, values and mask."""
    size = plan.tile_columns
    start = pl.multiple_of(block * size, LANES)
    count = size
    if plan.columns % size:
        # HBM and VMEM hold whole tiles, so on a device a DMA may end past the last column.
        unit = 1 if plan.interpret else LANES if plan.feature_major else SUBLANES
        count = jnp.minimum(size, plan.columns - start)
        count = pl.multiple_of((count + unit - 1) & -unit, unit)
    there, here = pl.ds(start, count), pl.ds(0, count)
    copies = []
    for i, (src, buf) in enumerate(((refs.k, refs.k_buf), (refs.v, refs.v_buf))):
        if plan.feature_major:
            src, buf = src.at[batch, :, :, there], buf.at[slot, :, :, here]
        else:
            src, buf = src.at[batch, :, there], buf.at[slot, :, here]
        copies.append(pltpu.make_async_copy(src, buf, refs.kv_sem.at[i, slot]))
    if refs.mask is not None:
        copies.append(
            pltpu.make_async_copy(
                refs.mask.at[batch if plan.mask_shape[0] > 1 else 0, :, :, pl.ds(start, size)],
                refs.mask_buf.at[slot],
                refs.mask_sem.at[slot],
            )
        )
    return copies


def _io_entry(plan: DecodePlan):
    return jax.lax.rem(pl.program_id(1), plan.io_batch)


def _visible(plan: DecodePlan, refs: _Refs, length, column, count: int, slot, group, offset):
    """bool [rows, count] for `count` columns from `column` of the cache, `offset` in the block."""
    wide = plan.rows, count
    at = column + jax.lax.broadcasted_iota(jnp.int32, wide, 1)
    seen = at < length * plan.fold
    if plan.left >= 0 or plan.right >= 0:
        row = jax.lax.broadcasted_iota(jnp.int32, wide, 0)
        query = jax.lax.rem(row, plan.sq) if plan.sq > 1 else 0
        position = length - plan.sq + query
        if plan.right >= 0:
            seen &= at < (position + plan.right + 1) * plan.fold
        if plan.left >= 0:
            seen &= at >= (position - plan.left) * plan.fold
    if refs.match is not None:
        period = refs.match.shape[1]
        match = refs.match[...] != 0
        seen &= jnp.concatenate([match] * (count // period), axis=1)
    if refs.mask is not None:
        index = group if refs.mask_buf.shape[1] > 1 else 0
        bits = refs.mask_buf[slot, index, :, pl.ds(offset, count)].astype(jnp.int32)
        seen &= jnp.broadcast_to(bits, wide) != 0
    return seen


def _attend(plan: DecodePlan, refs: _Refs, block, slot, length, group, safe: bool):
    """Adds one block of keys to acc, l and m of a group."""
    step = plan.tiles.step_k * plan.fold
    nt, nn = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))
    q = refs.q[_io_entry(plan), group]

    def dot(x, y, dims):
        return jax.lax.dot_general(
            x, y, dims, precision=plan.precision, preferred_element_type=jnp.float32
        )

    def body(i, _):
        offset = pl.multiple_of(i * step, step)
        columns = pl.ds(offset, step)
        column = block * plan.tile_columns + offset
        if plan.feature_major:
            k, v = refs.k_buf[slot, group, :, columns], refs.v_buf[slot, group, :, columns]
            to_k, to_v = nn, nt
        else:
            k, v = refs.k_buf[slot, group, columns], refs.v_buf[slot, group, columns]
            to_k, to_v = nt, nn
        s = dot(q, k, to_k) * plan.scale
        if plan.softcap:
            s = plan.softcap * jnp.tanh(s)
        seen = _visible(plan, refs, length, column, step, slot, group, offset)
        s = jnp.where(seen, s, -jnp.inf)
        m_old = refs.m[group]
        m_new = jnp.maximum(m_old, jnp.max(s, axis=1, keepdims=True))
        m_used = jnp.where(m_new == -jnp.inf, 0.0, m_new)
        share = jnp.exp2(m_old - m_used)
        p = jnp.concatenate(
            [jnp.exp2(s[:, j : j + LANES] - m_used) for j in range(0, step, LANES)], axis=1
        )
        tainted = None
        if safe:
            finite = jnp.abs(v.astype(jnp.float32)) < jnp.inf
            tainted = dot(
                jnp.where(seen, 1.0, 0.0).astype(v.dtype),
                jnp.where(finite, 0.0, 1.0).astype(v.dtype),
                to_v,
            )
            v = jnp.where(finite, v.astype(jnp.float32), 0.0).astype(v.dtype)
        weighted = dot(p.astype(v.dtype), v, to_v)
        if safe:
            weighted = jnp.where(tainted > 0, jnp.nan, weighted)
        refs.m[group] = m_new
        refs.l[group] = refs.l[group] * share + jnp.sum(p, axis=1, keepdims=True)
        refs.acc[group] = refs.acc[group] * share[:, :1] + weighted
        return 0

    # Chunks past the last key are left out; their buffers hold anything.
    left = length - block * plan.tiles.block_k
    num = jax.lax.div(
        jnp.minimum(left, plan.tiles.block_k) + plan.tiles.step_k - 1, plan.tiles.step_k
    )
    jax.lax.fori_loop(0, num, body, 0)


def _zero_tail(plan: DecodePlan, refs: _Refs, slot, keys):
    """Zeroes values past the last key in the chunk that holds it: 0 times NaN is NaN."""
    step = plan.tiles.step_k * plan.fold
    first = pl.multiple_of(jax.lax.div(keys, plan.tiles.step_k) * step, step)
    columns, axis = pl.ds(first, step), 1 if plan.feature_major else 0

    def body(group, _):
        v = refs.v_buf.at[slot, group]
        v = v.at[:, columns] if plan.feature_major else v.at[columns]
        at = first + jax.lax.broadcasted_iota(jnp.int32, v.shape, axis)
        v[...] = jnp.where(at < keys * plan.fold, v[...].astype(jnp.float32), 0.0).astype(v.dtype)
        return 0

    jax.lax.fori_loop(0, plan.groups, body, 0)


def _block(plan: DecodePlan, refs: _Refs, block, slot, length, safe: bool):
    keys = length - block * plan.tiles.block_k

    @pl.when((keys < plan.tiles.block_k) & (jax.lax.rem(keys, plan.tiles.step_k) != 0))
    def _():
        _zero_tail(plan, refs, slot, keys)

    def body(group, _):
        _attend(plan, refs, block, slot, length, group, safe)
        return 0

    jax.lax.fori_loop(0, plan.groups, body, 0)


def _finish(plan: DecodePlan, refs: _Refs):
    """Writes out and lse of a batch entry; returns whether it must be done again."""
    l, m, entry = refs.l[...], refs.m[...], _io_entry(plan)
    sees = ~(l <= 0)
    m = jnp.where(sees, m, 0.0)
    share = jnp.float32(1)
    if plan.has_sinks:
        top = jnp.maximum(m, refs.sinks[...])
        share = jnp.exp2(m - top)
        m, l = top, l * share + jnp.exp2(refs.sinks[...] - top)
    factor = jnp.where(sees, share / l, 0.0)
    refs.lse[entry] = jnp.where(sees, m * _LN2 + jnp.log(l), -jnp.inf)
    out = refs.acc[...] * factor[:, :, :1]
    refs.out[entry] = out.astype(refs.out.dtype)
    return jnp.max(jnp.where(out * 0.0 == 0.0, 0, 1))


def _match_heads(plan: DecodePlan, refs: _Refs):
    row = jax.lax.broadcasted_iota(jnp.int32, refs.match.shape, 0)
    column = jax.lax.broadcasted_iota(jnp.int32, refs.match.shape, 1)
    is_own = jax.lax.div(row, plan.head_rows) == jax.lax.rem(column, plan.fold)
    refs.match[...] = jnp.where(is_own & (row < plan.num_rows), 1, 0)


@dataclasses.dataclass(frozen=True)
class _Stream:
    """The blocks of keys of all entries of a core, in the order in which they are fetched."""

    plan: DecodePlan
    refs: _Refs
    first_entry: jax.Array  # of the batch
    num_entries: jax.Array

    def batch_of(self, entry):
        return self.first_entry + jnp.minimum(entry, self.num_entries - 1)

    def range_of(self, entry):
        return self.plan.block_range(self.refs.lengths[self.batch_of(entry)])

    def after_slot(self, slot):
        return jnp.where(slot + 1 == self.plan.tiles.slots, 0, slot + 1)

    def from_entry(self, entry):
        """The first entry from `entry` on that sees a key, and its first block."""

        def is_blind(entry):
            first, stop = self.range_of(entry)
            return (entry < self.num_entries) & (first >= stop)

        entry = jax.lax.while_loop(is_blind, lambda entry: entry + 1, entry)
        return entry, self.range_of(entry)[0]

    def fetch(self, ahead):
        """Starts the DMAs of the next block of the stream, (entry, block, slot)."""
        entry, block, slot = ahead

        @pl.when(entry < self.num_entries)
        def _():
            for copy in _copies(self.plan, self.refs, self.batch_of(entry), block, slot):
                copy.start()

        other, other_block = self.from_entry(entry + 1)
        is_last = block + 1 >= self.range_of(entry)[1]
        return (
            jnp.where(is_last, other, entry),
            jnp.where(is_last, other_block, block + 1),
            self.after_slot(slot),
        )

    def start(self):
        """(slot to use next; entry, block and slot to fetch next), all slots but one on the way."""
        ahead = *self.from_entry(jnp.int32(0)), jnp.int32(0)
        for _ in range(self.plan.tiles.slots - 1):
            ahead = self.fetch(ahead)
        return 0, *ahead


def _attempts(plan: DecodePlan, refs: _Refs, stream: _Stream, entry, state):
    """Works an entry off, a second time if need be; `state` as `_Stream.start` gives it."""
    batch = stream.first_entry + entry
    length = refs.lengths[batch]
    first, stop = plan.block_range(length)
    spare = plan.tiles.slots

    def fast(block, state):
        slot, *ahead = state
        ahead = stream.fetch(ahead)
        for copy in _copies(plan, refs, batch, block, slot):
            copy.wait()
        _block(plan, refs, block, slot, length, False)
        return stream.after_slot(slot), *ahead

    def safe(block, _):
        copies = _copies(plan, refs, batch, block, spare)
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()
        _block(plan, refs, block, spare, length, True)
        return 0

    def attempt(carry):
        _, mode, *state = carry
        refs.acc[...] = jnp.zeros_like(refs.acc)
        refs.l[...] = jnp.zeros_like(refs.l)
        refs.m[...] = jnp.full_like(refs.m, -jnp.inf)
        state = jax.lax.fori_loop(first, jnp.where(mode == _FAST, stop, first), fast, tuple(state))
        jax.lax.fori_loop(first, jnp.where(mode == _SAFE, stop, first), safe, 0)
        again = (_finish(plan, refs) != 0) & (mode == _FAST)
        return again, jnp.int32(_SAFE), *state

    _, _, *state = jax.lax.while_loop(
        lambda carry: carry[0], attempt, (jnp.bool_(True), jnp.int32(_FAST), *state)
    )
    return state


def run_entry(*args, plan: DecodePlan, fields: tuple[str, ...]):
    """Grid (core, batch entry of the core), all heads at once.

    Blocks of keys of all entries form one stream; `slots` DMAs of k and v are under way while one
    block is worked on, so the stream stops neither at a block nor at an entry. acc, l and m of an
    entry stay in VMEM; one grid step alone writes its out and lse blocks, so nothing races.

    An entry whose result is not finite is done again with values that are not finite taken out and
    put back as NaN for the rows that see them (a masked value must not reach a row).

    Floor of 64 x 32/8 heads x 4096 keys x 128 in bfloat16: 1457 / 720 us on v5e / v6e, the time to
    read K and V once; static estimate 1.01 / 1.02 times that, for caches with the heads first too.
    HBM bounds it: arithmetic takes 0.4 of the time.
    """
    refs = _Refs(**dict(zip(fields, args, strict=False)))
    entry = pl.program_id(1)
    first_entry = pl.program_id(0) * plan.core_batch
    num_entries = jnp.minimum(plan.core_batch, plan.b - first_entry)
    stream = _Stream(plan, refs, first_entry, num_entries)

    @pl.when(entry == 0)
    def _():
        if refs.match is not None:
            _match_heads(plan, refs)
        for i, x in enumerate(stream.start()):
            refs.stream[i] = x

    @pl.when(entry < num_entries)
    def _():
        state = _attempts(plan, refs, stream, entry, tuple(refs.stream[i] for i in range(4)))
        for i, x in enumerate(state):
            refs.stream[i] = x
