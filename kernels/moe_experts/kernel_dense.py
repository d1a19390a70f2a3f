"""Few tokens: every token, in its own place, through every expert that anybody chose.

No grid: one loop over the chosen experts, inside it the gate/up tiles, then the down tiles. x, act
[cuts, 1 or 2, t, k] and the f32 sum y [num_out, t, th] stay in VMEM; the weights stream past, as
they are stored (weights). There is no sort, gather or un-sort: a token that did not choose the
expert keeps its y by a select, so that it gets nothing of it, not even NaN. Race-free: everything
but the weights is written and read by the one core in program order; y is converted into the single
output block after the loop. The scalar core looks for the first chosen expert only, starts its
gate/up DMAs, and lists the other experts while they run; the down DMAs start after that, so that
the tile which arrives last is the one that is used last.

Floor: bytes of the chosen experts. Static estimate, v5e / v6e, h=2048, i=768, topk=8, as a multiple
of it. bf16: 1 expert, 1 token 1.15 / 1.37; 7 experts, 8 tokens 1.02 / 1.06; 16 experts, 64 tokens
1.01 / 1.03; 256 tokens 1.09 / 1.03; 126 experts, 64 tokens 1.00 / 1.00. Bound by the HBM until t *
(MXU time of a row) exceeds it, near 250 tokens on v5e and 400 on v6e. int8, against its own bytes:
1 token 1.35 / 1.79, 8 tokens 1.05 / 1.11; 64 tokens 1.02 / 1.05, 126 experts 1.00 / 1.01;
float8_e4m3fn the same; int8 in blocks of 128, 1.03 / 1.07. int4: 8 tokens 1.10 / 1.30; 64 tokens on
v6e 1.13: 2^20 weights come from the HBM in 600 cycles and enter the MXU in 350, which with the fill
and drain of every tile is nearly as long. Gemma 4, 16 of 128 experts, h=2816, i=704, 64 tokens:
bf16 1.01 / 1.02, int8 1.02 / 1.05.

One expert cannot do better than its bytes and three DMA latencies of 0.5 / 0.7 us, each of which
needs what the one before brought: ids, weights, result. That is 1.12 / 1.33 in bf16 and, as half
the bytes take half the time but the latencies do not, 1.24 / 1.66 in int8. What is left is the last
tile's matmul (0.14 us on v6e); x and the routing weights travel while the ids do.

The idea of visiting each active expert once for all tokens is that of tokamax's fused_moe_decode,
https://github.com/openxla/tokamax.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..ragged_dot import dequant
from .tiling import MAX_UNROLLED
from .weights import Layer, Stream, scale_buffers, take_scales


def _clamped(layer: Layer, ids_ref, row, col):
    """The expert of one slot; layer.e if it is not here."""
    expert = ids_ref[row, col]
    return jnp.where((expert >= 0) & (expert < layer.e), expert, layer.e)


def _first_expert(layer: Layer, ids_ref):
    """The expert of the first slot that is here; layer.e if none is."""
    rows, cols = ids_ref.shape

    def wanted(state):
        row, _, expert = state
        return (row < rows) & (expert == layer.e)

    def step(state):
        row, col, _ = state
        expert = _clamped(layer, ids_ref, row, col)
        is_last = col == cols - 1
        return row + is_last, jnp.where(is_last, 0, col + 1), expert

    return jax.lax.while_loop(wanted, step, (0, 0, jnp.int32(layer.e)))[2]


def _list_rest(layer: Layer, first, ids_ref, active_ref, seen_ref):
    """active_ref[1:n] = the other experts that occur in ids_ref. Returns n, with `first`."""
    rows, cols = ids_ref.shape

    def clear(expert, _):
        seen_ref[expert] = 0
        return 0

    def mark(col, _):
        for row in range(rows):
            seen_ref[_clamped(layer, ids_ref, row, col)] = 1
        return 0

    def add(expert, n):
        active_ref[n] = expert
        return n + jnp.where(expert == first, 0, seen_ref[expert])

    jax.lax.fori_loop(0, layer.e, clear, 0, unroll=_unroll(layer.e))
    jax.lax.fori_loop(0, cols, mark, 0)
    n = (first < layer.e).astype(jnp.int32)
    return jax.lax.fori_loop(0, layer.e, add, n, unroll=_unroll(layer.e))


def _unroll(trips: int) -> int:
    return next(u for u in (16, 8, 4, 2, 1) if trips % u == 0)


def _multiply(stream: Stream, visit, num_visits, load_x, biases, act_ref, y_ref, route, chosen):
    """y += route * the value of the visit's expert, for the tokens that chose it."""
    layer, plan, expert = stream.layer, stream.layer.plan, stream.expert_of(visit)
    bias_in, bias_out = biases

    def tile_in(tile, _):
        stream.wait_in(visit, expert, tile)
        parts = stream.dot_in(load_x(), visit, tile)
        if bias_in is not None:
            parts = [p + bias_in[expert, part, tile] for part, p in enumerate(parts)]
        layer.store_act(act_ref, slice(None), tile, layer.gated(parts))
        stream.start_in(visit, tile + plan.ring_in, num_visits)
        return 0

    def tile_out(tile, _):
        stream.wait_out(visit, expert, tile)
        d = stream.dot_out(layer.load_act(act_ref, slice(None), tile), visit, tile)
        place = 0 if plan.cuts_i else tile
        if bias_out is not None:
            bias = bias_out[expert, place]
            d = d + (jnp.where(tile == 0, bias, 0) if plan.cuts_i else bias)
        y_ref[place] = jnp.where(chosen, y_ref[place] + route * d, y_ref[place])
        stream.start_out(visit, tile + plan.ring_out, num_visits)
        return 0

    _loop(layer.num_in, tile_in)
    _loop(layer.num_out, tile_out)


def _kernel(*refs, layer: Layer, has_bias, has_scales, is_turned):
    refs = iter(refs)
    *rows_hbm, gate_up, down = itertools.islice(refs, 5)
    biases = tuple(itertools.islice(refs, 2)) if has_bias else (None, None)
    scales_hbm = [next(refs) if has else None for has in has_scales]
    out_ref, active_ref, seen_ref, ring_in, ring_out, sem_in, sem_out = itertools.islice(refs, 7)
    act_ref, y_ref, ids_smem, *rows_vmem, sem_ids, sem_rows = itertools.islice(refs, 8)
    ids_ref, w_ref, x_ref = rows_vmem
    scales = take_scales(layer, scales_hbm, refs)
    plan = layer.plan

    copy_ids = pltpu.make_async_copy(rows_hbm[0], ids_smem, sem_ids)
    copies = [
        pltpu.make_async_copy(hbm, vmem, sem_rows)
        for hbm, vmem in zip(rows_hbm, rows_vmem, strict=True)
    ]
    for copy in (copy_ids, *copies):
        copy.start()
    copy_ids.wait()
    first = _first_expert(layer, ids_smem)
    active_ref[0] = first
    stream = Stream(
        layer,
        gate_up,
        down,
        ring_in,
        ring_out,
        sem_in,
        sem_out,
        lambda visit: active_ref[visit],
        *scales,
    )
    stream.start_in(0, 0, first < layer.e)
    stream.start_rest_in(first < layer.e)
    num_active = _list_rest(layer, first, ids_smem, active_ref, seen_ref)
    # After the loops above: the compiler mixes transfers that start in one basic block.
    stream.start_others(num_active)
    y_ref[...] = jnp.zeros(y_ref.shape, y_ref.dtype)
    for copy in copies:
        copy.wait()
    ids, weights = ids_ref[...], w_ref[...].astype(jnp.float32)
    if is_turned:
        ids, weights = ids.T, weights.T  # [t, topk]
    if layer.gate_up.is_int4:
        pairs_ref = next(refs)
        pairs_ref[0], pairs_ref[1] = dequant.split_pairs(x_ref[...])

    def load_x():
        if layer.gate_up.is_int4:
            return dequant.Pairs(pairs_ref[0], pairs_ref[1])
        return x_ref[...]

    def visit_expert(visit, _):
        hit = ids == active_ref[visit]
        route = jnp.sum(jnp.where(hit, weights, 0), axis=1, keepdims=True)  # [t, 1]
        chosen = jnp.max(hit.astype(jnp.int32), axis=1, keepdims=True) > 0  # [t, 1]
        _multiply(stream, visit, num_active, load_x, biases, act_ref, y_ref, route, chosen)
        return 0

    jax.lax.fori_loop(0, num_active, visit_expert, 0)
    for tile in range(layer.h // plan.tile_h):
        cut = slice(tile * plan.tile_h, (tile + 1) * plan.tile_h)
        out_ref[:, cut] = y_ref[tile].astype(out_ref.dtype)


def _loop(num, body):
    """Few tiles are unrolled: their places in the rings are then static."""
    if num <= MAX_UNROLLED:
        for tile in range(num):
            body(tile, 0)
    else:
        jax.lax.fori_loop(0, num, body, 0)


def run(layer: Layer, x, ids, weights, gate_up, down, biases, scales, chip, interpret):
    """[t, h] of x [t, h], ids and weights [t, topk]."""
    plan = layer.plan
    is_turned = layer.t > layer.topk  # then XLA keeps [t, topk] with t minor: turning it is free
    if is_turned:
        ids, weights = ids.T, weights.T
    cuts, pairs, k = layer.act_shape
    vmem, hbm = (pl.BlockSpec(memory_space=s) for s in (pltpu.VMEM, pl.ANY))
    rows = (ids, weights, x)
    scratch = [
        pltpu.SMEM((layer.e + 1,), jnp.int32),
        pltpu.SMEM((layer.e + 1,), jnp.int32),
        pltpu.VMEM(layer.ring_in_shape, gate_up.dtype),
        pltpu.VMEM(layer.ring_out_shape, down.dtype),
        pltpu.SemaphoreType.DMA((plan.ring_in,)),
        pltpu.SemaphoreType.DMA((plan.ring_out,)),
        pltpu.VMEM((cuts, pairs, layer.t, k), layer.dtype),
        pltpu.VMEM((layer.h // plan.tile_h, layer.t, plan.tile_h), jnp.float32),
        pltpu.SMEM(ids.shape, jnp.int32),
        *(pltpu.VMEM(array.shape, array.dtype) for array in rows),
        pltpu.SemaphoreType.DMA,
        pltpu.SemaphoreType.DMA,
        *scale_buffers(layer, scales),
    ]
    if layer.gate_up.is_int4:
        scratch.append(pltpu.VMEM((2, layer.t, layer.h // 2), x.dtype))
    given = [scale for scale in scales if scale is not None]
    return pl.pallas_call(
        lambda *refs: _kernel(
            *refs,
            layer=layer,
            has_bias=bool(biases),
            has_scales=[scale is not None for scale in scales],
            is_turned=is_turned,
        ),
        out_shape=jax.ShapeDtypeStruct((layer.t, layer.h), x.dtype),
        in_specs=[hbm] * 5 + [vmem] * len(biases) + [hbm] * len(given),
        out_specs=vmem,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=chip.vmem_bytes * 9 // 10),
        interpret=interpret,
        name=f"moe_experts_dense_{layer.stored_name}_ti{plan.tile_i}_th{plan.tile_h}",
    )(*rows, gate_up, down, *biases, *given)
