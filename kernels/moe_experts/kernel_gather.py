"""Many tokens: each expert multiplies only its own rows, gathered and added up in VMEM.

XLA sorts one integer per (token, j) slot; everything that has h columns stays inside this kernel:

    x from HBM once -> x rows -> picked -> gate/up, down of an expert -> y row += w * d row -> out
                       (VMEM)    (VMEM)    (weights stream past)         (VMEM, f32)

No grid: one loop over visits, each at most tile_rows rows of one expert. The rows of the next
visit are picked beside the down matmuls of this one, and its own sums are added beside the gate/up
matmuls of the next, so that the vector units work under the MXU; visits with at most
tile_rows_small rows do both in turn. x, y and one whole expert stay in VMEM: an expert's weights
are read once, however many visits it takes. Race-free: one core in program order; a token occurs
once per expert, so the rows added together never meet; each output chunk is written by one DMA
after the last visit.

Floor: bytes of the chosen experts, x and y. Static estimate with the sort, v5e / v6e, h=2048,
i=768, topk=8, as a multiple of it. bf16: 128 experts, 4096 tokens 1.18 / 1.03 (v5e is bound by the
MXU, 288 rows computed for 256); 16 experts of 128, 256 tokens 1.04 / 1.08; 512 tokens 1.05 / 1.10,
the last writes of y added by hand where the estimator misses them; there the sort of 4096 slots and
its layout changes cost 4.5 us, and nothing hides them. int4, 64 tokens: 16 experts on v5e 1.09, in
blocks of 128 on v6e 1.31 (3.4 us of sort); 126 experts 1.02 / 1.04.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, SUBLANES, round_up
from ..ragged_dot import dequant
from .rows import Rows
from .tiling import X_SLOTS, key_bits, max_visits, row_sublanes
from .weights import Layer, Stream, scale_buffers, take_scales


@dataclass(frozen=True)
class _Chunks:
    """x on its way in, later y on its way out, X_SLOTS chunks of rows at a time.

    A slot's semaphore is started by `copy_in(..).start()` or `copy_out(..).start()` and waited for
    before the slot is read or written again.
    """

    layer: Layer
    x_hbm: jax.Array  # [t, h]
    out_hbm: jax.Array  # [t, h]
    buffer: jax.Array  # VMEM [X_SLOTS, chunk_rows, h]
    sem: jax.Array  # [X_SLOTS]
    is_exact: bool

    @property
    def rows(self) -> int:
        return self.layer.plan.chunk_rows

    @property
    def num(self) -> int:
        return (self.layer.t + self.rows - 1) // self.rows

    def _cuts(self, chunk):
        """Rows of a chunk in HBM and in VMEM. A DMA on a device moves whole groups of 8 rows: the
        last one ends past t, in the padding of the array. Interpret mode has exact sizes only.
        """
        rest, size = self.layer.t % self.rows, self.rows
        if rest:
            rest = rest if self.is_exact else round_up(rest, SUBLANES)
            size = jnp.where(chunk == self.layer.t // self.rows, rest, self.rows)
            size = size if self.is_exact else pl.multiple_of(size, SUBLANES)
        return pl.ds(pl.multiple_of(chunk * self.rows, SUBLANES), size), pl.ds(0, size)

    def copy_in(self, chunk):
        hbm, vmem = self._cuts(chunk)
        slot = jax.lax.rem(chunk, X_SLOTS)
        return pltpu.make_async_copy(
            self.x_hbm.at[hbm], self.buffer.at[slot].at[vmem], self.sem.at[slot]
        )

    def copy_out(self, chunk):
        hbm, vmem = self._cuts(chunk)
        slot = jax.lax.rem(chunk, X_SLOTS)
        return pltpu.make_async_copy(
            self.buffer.at[slot].at[vmem], self.out_hbm.at[hbm], self.sem.at[slot]
        )

    def start(self):
        for chunk in range(min(X_SLOTS, self.num)):
            self.copy_in(jnp.int32(chunk)).start()

    def load(self, rows: Rows):
        """rows.x = x, rows.y = 0."""

        def step(chunk, _):
            self.copy_in(chunk).wait()
            slot = jax.lax.rem(chunk, X_SLOTS)
            values = self.buffer[slot]
            if self.layer.gate_up.is_int4:
                values = jnp.concatenate(dequant.split_pairs(values), axis=1)
            rows.pack(values, chunk * self.rows, self.rows)
            rows.clear(chunk * self.rows, self.rows)
            pl.when(chunk + X_SLOTS < self.num)(lambda: self.copy_in(chunk + X_SLOTS).start())
            return 0

        jax.lax.fori_loop(0, self.num, step, 0)

    def store(self, rows: Rows):
        """out = rows.y."""

        def step(chunk, _):
            pl.when(chunk >= X_SLOTS)(lambda: self.copy_out(chunk - X_SLOTS).wait())
            slot = jax.lax.rem(chunk, X_SLOTS)
            rows.result(self.buffer.at[slot], chunk * self.rows, self.rows)
            self.copy_out(chunk).start()
            return 0

        def drain(chunk, _):
            self.copy_out(chunk).wait()
            return 0

        jax.lax.fori_loop(0, self.num, step, 0)
        jax.lax.fori_loop(max(self.num - X_SLOTS, 0), self.num, drain, 0)


def _list_visits(layer: Layer, offsets_ref, active_ref, visits_ref):
    """active_ref[p] = an expert with rows; visits_ref[:, 1 + v] = (p, first key, rows) of visit v.

    Columns 0 and 1 + num_visits name no expert. Returns (number of experts, of visits).
    """
    tile_rows = layer.plan.tile_rows

    def add_expert(expert, carry):
        start, stop = offsets_ref[expert], offsets_ref[expert + 1]
        active_ref[carry[0]] = expert

        def add_visit(index, carry):
            p, v = carry
            first = start + index * tile_rows
            visits_ref[0, 1 + v] = p
            visits_ref[1, 1 + v] = first
            visits_ref[2, 1 + v] = jnp.minimum(stop - first, tile_rows)
            return p, v + 1

        num = (stop - start + tile_rows - 1) // tile_rows
        p, v = jax.lax.fori_loop(0, num, add_visit, carry)
        return p + (num > 0).astype(jnp.int32), v

    num_active, num_visits = jax.lax.fori_loop(0, layer.e, add_expert, (jnp.int32(0), jnp.int32(0)))
    for column in (0, 1 + num_visits):
        visits_ref[0, column] = -1
        visits_ref[1, column] = 0
        visits_ref[2, column] = 0
    return num_active, num_visits


def _share(total: int, step: int, index: int, num: int) -> tuple[int, int]:
    """(first, size) of part `index` of `num` about equal parts of total, in whole steps."""
    edges = [total // step * k // num * step for k in (index, index + 1)]
    return edges[0], edges[1] - edges[0]


def _multiply(stream: Stream, rows: Rows, biases, act_ref, m, visit, beside_in, beside_out):
    """rows.d[0:m] = the expert's value of rows.lhs[0:m].

    visit: (p, expert, is_first, limit): the weights are waited for if this is the expert's first
    row tile, and those of expert p + 1 are requested if p + 1 < limit. `beside_*(tile)` adds work
    to the step of a tile, which the compiler's scheduler puts beside the matmul.
    """
    layer, plan = stream.layer, stream.layer.plan
    p, expert, is_first, limit = visit
    bias_in, bias_out = biases or (None, None)
    half = layer.h // 2
    for tile in range(layer.num_in):
        pl.when(is_first)(lambda tile=tile: stream.wait_in(p, expert, tile))
        lhs = rows.lhs[0:m]
        if layer.gate_up.is_int4:
            lhs = dequant.Pairs(lhs[:, :half], lhs[:, half:])
        parts = stream.dot_in(lhs, p, tile)
        if bias_in is not None:
            parts = [x + bias_in[expert, part, tile] for part, x in enumerate(parts)]
        layer.store_act(act_ref, slice(0, m), tile, layer.gated(parts))
        beside_in(tile)
        stream.start_in(p, tile + plan.ring_in, limit)
    for tile in range(layer.num_out):
        pl.when(is_first)(lambda tile=tile: stream.wait_out(p, expert, tile))
        d = stream.dot_out(layer.load_act(act_ref, slice(0, m), tile), p, tile)
        if bias_out is not None:
            d = d + bias_out[expert, tile]
        rows.spread(d, tile * plan.tile_h)
        beside_out(tile)
        stream.start_out(p, tile + plan.ring_out, limit)


def _kernel(*refs, layer: Layer, has_bias, has_scales, token_bits, slot_bits, is_exact):
    plan, refs = layer.plan, iter(refs)
    keys_ref, offsets_ref, route_ref, x_hbm, gate_up, down = itertools.islice(refs, 6)
    biases = tuple(itertools.islice(refs, 2)) if has_bias else ()
    scales_hbm = [next(refs) if has else None for has in has_scales]
    out_hbm, active_ref, visits_ref, ring_in, ring_out, sem_in, sem_out = itertools.islice(refs, 7)
    x_rows, y_rows, picked, lhs_ref, d_rows, act_ref, chunks, sem_chunk = itertools.islice(refs, 8)
    scales = take_scales(layer, scales_hbm, refs)
    rows = Rows(
        layer.t,
        layer.h,
        layer.dtype,
        token_bits,
        slot_bits,
        keys_ref,
        route_ref,
        x_rows,
        y_rows,
        picked,
        lhs_ref,
        d_rows,
    )
    chunked = _Chunks(layer, x_hbm, out_hbm, chunks, sem_chunk, is_exact)
    chunked.start()
    num_active, num_visits = _list_visits(layer, offsets_ref, active_ref, visits_ref)
    stream = Stream(
        layer, gate_up, down, ring_in, ring_out, sem_in, sem_out, lambda p: active_ref[p], *scales
    )
    stream.start_in(0, 0, num_active)
    stream.start_rest_in(num_active)
    stream.start_others(num_active)

    chunked.load(rows)

    def is_big(v):
        return visits_ref[2, 1 + v] > plan.tile_rows_small

    def visit(v, _):
        p, first, count = (visits_ref[k, 1 + v] for k in range(3))
        before = visits_ref[1, v]
        pending = jnp.where(is_big(v - 1), visits_ref[2, v], 0)  # rows of d not yet in y
        after = visits_ref[1, 2 + v]
        limit = jnp.where(visits_ref[0, 2 + v] != p, num_active, 0)
        what = (p, active_ref[p], visits_ref[0, v] != p, limit)
        is_picked = is_big(v - 1)

        def big():
            m = plan.tile_rows
            pl.when(~is_picked)(lambda: rows.pick_now(first, count, m))
            _multiply(
                stream,
                rows,
                biases,
                act_ref,
                m,
                what,
                lambda tile: rows.add(before, *_share(m, 16, tile, layer.num_in), pending),
                lambda tile: rows.pick(after, *_share(m, 16, tile, layer.num_out)),
            )

        def small():
            m = plan.tile_rows_small
            rows.add_now(before, pending)
            pl.when(~is_picked)(lambda: rows.pick_now(first, count, m))
            _multiply(stream, rows, biases, act_ref, m, what, lambda tile: None, lambda tile: None)
            rows.add_now(first, count)

        if plan.tile_rows > plan.tile_rows_small:
            pl.when(is_big(v))(big)
        pl.when(~is_big(v))(small)
        return 0

    jax.lax.fori_loop(0, num_visits, visit, 0)
    last = num_visits - 1
    rows.add_now(visits_ref[1, 1 + last], jnp.where(is_big(last), visits_ref[2, 1 + last], 0))

    chunked.store(rows)


def _sort(layer: Layer, ids, weights):
    """Slots by expert: keys [topk * t + tile_rows] = (expert, j, token) in bit fields; the first
    key of each expert [e + 1]; weights [slots] by j and token. A token's second slot of the same
    expert is merged into its first, so that within an expert every token occurs once.
    """
    token_bits, slot_bits = key_bits(layer.t, layer.topk)
    ids = ids.T  # [topk, t]: how XLA keeps a narrow array, so this is free
    ids = jnp.where((ids >= 0) & (ids < layer.e), ids, layer.e)
    weights = weights.astype(jnp.float32).T
    rank = jnp.arange(layer.topk)
    same = ids[:, None] == ids[None]  # [topk, topk, t]
    earlier = (rank[None] < rank[:, None])[:, :, None]
    ids = jnp.where(jnp.any(same & earlier, axis=1), layer.e, ids)
    route = jnp.sum(jnp.where(same, weights[None], 0), axis=1)  # [topk, t]
    slots = (rank[:, None] << token_bits) + jnp.arange(layer.t)
    keys = ((ids << slot_bits) + slots).astype(jnp.int32).reshape(-1)
    keys = jnp.pad(jnp.sort(keys), (0, layer.plan.tile_rows))
    before = sum((row[:, None] < jnp.arange(layer.e + 1)).astype(jnp.int32) for row in ids)
    offsets = jnp.sum(before, axis=0)
    route = jnp.pad(route, ((0, 0), (0, (1 << token_bits) - layer.t))).reshape(-1)
    return keys, offsets, route, token_bits, slot_bits


def run(layer: Layer, x, ids, weights, gate_up, down, biases, scales, chip, interpret):
    """[t, h] of x [t, h], ids and weights [t, topk]."""
    plan, m = layer.plan, layer.plan.tile_rows
    keys, offsets, route, token_bits, slot_bits = _sort(layer, ids, weights)
    vmem, smem, hbm = (pl.BlockSpec(memory_space=s) for s in (pltpu.VMEM, pltpu.SMEM, pl.ANY))
    x_sublanes, y_sublanes = (row_sublanes(layer.h, size) for size in (layer.dtype.itemsize, 4))
    held = round_up(layer.t + 1, plan.chunk_rows)
    cuts, pairs, k = layer.act_shape
    given = [scale for scale in scales if scale is not None]
    return pl.pallas_call(
        lambda *refs: _kernel(
            *refs,
            layer=layer,
            has_bias=bool(biases),
            has_scales=[scale is not None for scale in scales],
            token_bits=token_bits,
            slot_bits=slot_bits,
            is_exact=bool(interpret),
        ),
        out_shape=jax.ShapeDtypeStruct((layer.t, layer.h), x.dtype),
        in_specs=[smem, smem, smem, hbm, hbm, hbm] + [vmem] * len(biases) + [hbm] * len(given),
        out_specs=hbm,
        scratch_shapes=[
            pltpu.SMEM((layer.e + 1,), jnp.int32),
            pltpu.SMEM((3, max_visits(layer.t * layer.topk, layer.e, m) + 2), jnp.int32),
            pltpu.VMEM(layer.ring_in_shape, gate_up.dtype),
            pltpu.VMEM(layer.ring_out_shape, down.dtype),
            pltpu.SemaphoreType.DMA((plan.ring_in,)),
            pltpu.SemaphoreType.DMA((plan.ring_out,)),
            pltpu.VMEM((held * x_sublanes, LANES), jnp.uint32),
            pltpu.VMEM((held * y_sublanes, LANES), jnp.float32),
            pltpu.VMEM((m * x_sublanes, LANES), jnp.uint32),
            pltpu.VMEM((m, layer.h), layer.dtype),
            pltpu.VMEM((m * y_sublanes, LANES), jnp.float32),
            pltpu.VMEM((cuts, pairs, m, k), layer.dtype),
            pltpu.VMEM((X_SLOTS, plan.chunk_rows, layer.h), x.dtype),
            pltpu.SemaphoreType.DMA((X_SLOTS,)),
            *scale_buffers(layer, scales),
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=chip.vmem_bytes * 9 // 10),
        interpret=interpret,
        name=f"moe_experts_gather_{layer.stored_name}_tm{m}_ti{plan.tile_i}_th{plan.tile_h}",
    )(keys, offsets, route, x, gate_up, down, *biases, *given)
