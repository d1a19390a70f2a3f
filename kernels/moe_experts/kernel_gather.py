"""Many tokens: each expert multiplies only the rows that chose it, gathered and added up in VMEM."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, SUBLANES
from .tiling import X_SLOTS, round_up
from .weights import Layer, Stream


def _row_words(layer: Layer, itemsize: int) -> int:
    """Sublanes of 128 32-bit words that hold one row of h numbers, padded to whole registers."""
    return round_up(layer.h * itemsize // 4 // LANES, SUBLANES)


def _columns(layer: Layer, word: int, part: int, parts: int) -> slice:
    """The columns kept in part `part` of word column `word`: halves of a word are h / 2 columns apart."""
    first = part * (layer.h // parts) + word * LANES
    return slice(first, first + LANES)


def _pack(layer: Layer, chunk_ref, rows_ref, first_row, num_rows):
    """Rows of chunk_ref [num_rows, h] become rows_ref [t * words, 128], one row in whole registers."""
    parts = 4 // layer.dtype.itemsize
    words = _row_words(layer, layer.dtype.itemsize)
    for word in range(layer.h // parts // LANES):
        bits = [
            pltpu.bitcast(chunk_ref[:, _columns(layer, word, p, parts)].astype(jnp.float32), jnp.uint32)
            for p in range(parts)
        ]
        value = bits[0] if parts == 1 else (bits[0] >> 16) | bits[1]
        rows_ref[pl.ds(first_row * words + word, num_rows, stride=words)] = value


def _unpack(layer: Layer, rows_ref, lhs_ref, num_rows):
    """The inverse of `_pack`, from row 0."""
    parts = 4 // layer.dtype.itemsize
    words = _row_words(layer, layer.dtype.itemsize)
    for word in range(layer.h // parts // LANES):
        value = rows_ref[pl.ds(word, num_rows, stride=words)]
        bits = [value] if parts == 1 else [value << 16, value & jnp.uint32(0xFFFF0000)]
        for p, b in enumerate(bits):
            lhs_ref[0:num_rows, _columns(layer, word, p, parts)] = pltpu.bitcast(b, jnp.float32).astype(
                layer.dtype
            )


def _gather(layer: Layer, keys_ref, token_mask, first, num_rows, x_rows, picked):
    """picked rows 0, 1, .. = x rows of the tokens of keys first, first + 1, ..; groups of 8 rows."""
    words = _row_words(layer, layer.dtype.itemsize)

    def group(g, _):
        base = g * SUBLANES
        for r in range(SUBLANES):
            token = keys_ref[first + base + r] & token_mask
            row = x_rows[pl.ds(pl.multiple_of(token * words, SUBLANES), words)]
            picked[pl.ds(pl.multiple_of((base + r) * words, SUBLANES), words)] = row
        return 0

    jax.lax.fori_loop(0, (num_rows + SUBLANES - 1) // SUBLANES, group, 0)


def _scatter(layer: Layer, keys_ref, route_ref, token_mask, slot_mask, first, num_rows, d_rows, y_rows):
    """y row of each key's token += weight * d row. A token occurs once per expert: 8 rows at a time."""
    words = _row_words(layer, 4)

    def group(g, _):
        base = g * SUBLANES
        sums = []
        for r in range(SUBLANES):
            key = keys_ref[first + base + r]
            token = jnp.where(base + r < num_rows, key & token_mask, layer.t)  # row t is never read
            at = pl.ds(pl.multiple_of(token * words, SUBLANES), words)
            d = d_rows[pl.ds(pl.multiple_of((base + r) * words, SUBLANES), words)]
            sums.append((at, y_rows[at] + route_ref[key & slot_mask] * d))
        for at, value in sums:
            y_rows[at] = value
        return 0

    jax.lax.fori_loop(0, (num_rows + SUBLANES - 1) // SUBLANES, group, 0)


def _chunk_rows(layer: Layer, chunk, rows, is_exact):
    """(first row, size) of a chunk; the last one ends on a whole register row, or exactly at t."""
    last = layer.t % rows or rows
    if is_exact or last % SUBLANES == 0:
        size = last
    else:
        size = round_up(last, SUBLANES)
    if size == rows:
        return pl.ds(pl.multiple_of(chunk * rows, SUBLANES), rows), pl.ds(0, rows)
    is_last = chunk == (layer.t - 1) // rows
    size = jnp.where(is_last, size, rows)
    if not is_exact:
        size = pl.multiple_of(size, SUBLANES)
    return pl.ds(pl.multiple_of(chunk * rows, SUBLANES), size), pl.ds(0, size)


def _kernel(*refs, layer: Layer, has_bias, token_bits, slot_bits, is_exact):
    plan = layer.plan
    keys_ref, offsets_ref, route_ref, x_hbm, gate_up, down = refs[:6]
    bias_in, bias_out = refs[6:8] if has_bias else (None, None)
    refs = refs[8 if has_bias else 6 :]
    out_hbm, active_ref, ring_in, ring_out, sem_in, sem_out = refs[:6]
    x_rows, y_rows, picked, lhs_ref, act_ref, d_rows, chunks, sem_chunk = refs[6:]
    words = _row_words(layer, 4)
    token_mask, slot_mask = (1 << token_bits) - 1, (1 << slot_bits) - 1
    rows = chunks.shape[1]
    num_chunks = (layer.t + rows - 1) // rows

    def copy_x(chunk):
        src, dst = _chunk_rows(layer, chunk, rows, is_exact)
        slot = jax.lax.rem(chunk, X_SLOTS)
        return pltpu.make_async_copy(x_hbm.at[src], chunks.at[slot].at[dst], sem_chunk.at[slot])

    def copy_y(chunk):
        dst, src = _chunk_rows(layer, chunk, rows, is_exact)
        slot = jax.lax.rem(chunk, X_SLOTS)
        return pltpu.make_async_copy(chunks.at[slot].at[src], out_hbm.at[dst], sem_chunk.at[slot])

    for chunk in range(min(X_SLOTS, num_chunks)):
        copy_x(jnp.int32(chunk)).start()

    def list_active(expert, n):
        active_ref[n] = expert
        return n + (offsets_ref[expert + 1] > offsets_ref[expert]).astype(jnp.int32)

    num_active = jax.lax.fori_loop(0, layer.e, list_active, jnp.int32(0))
    stream = Stream(
        layer, gate_up, down, ring_in, ring_out, sem_in, sem_out, lambda visit: active_ref[visit]
    )
    stream.start_in(0, 0, num_active)
    stream.start_rest(num_active)

    def load(chunk, _):
        copy_x(chunk).wait()
        _pack(layer, chunks.at[jax.lax.rem(chunk, X_SLOTS)], x_rows, chunk * rows, rows)
        zeros = jnp.zeros((rows * words, LANES), jnp.float32)
        y_rows[pl.ds(pl.multiple_of(chunk * rows * words, SUBLANES), rows * words)] = zeros

        @pl.when(chunk + X_SLOTS < num_chunks)
        def _():
            copy_x(chunk + X_SLOTS).start()

        return 0

    jax.lax.fori_loop(0, num_chunks, load, 0)

    def multiply(visit, expert, m, first, num_rows, is_first, is_last):
        """One row tile of one expert: keys first .. first + num_rows, at most m of them."""
        _gather(layer, keys_ref, token_mask, first, num_rows, x_rows, picked)
        _unpack(layer, picked, lhs_ref, m)
        lhs = lhs_ref.at[0:m]
        for tile in range(layer.num_in):
            pl.when(is_first)(lambda tile=tile: (stream.wait_in(visit, tile), None)[1])
            parts = [layer.dot(lhs[...], ring_in[tile, part]) for part in range(layer.parts)]
            if bias_in is not None:
                parts = [p + bias_in[expert, part, tile] for part, p in enumerate(parts)]
            act_ref[tile, 0:m] = layer.gated(parts)
            stream.start_in(visit, tile + plan.ring_in, jnp.where(is_last, num_active, 0))
        for tile in range(layer.num_out):
            pl.when(is_first)(lambda tile=tile: (stream.wait_out(visit, tile), None)[1])
            d = bias_out[expert, tile] if bias_out is not None else None
            for j in range(layer.num_in):
                cut = slice(j * plan.tile_i, (j + 1) * plan.tile_i)
                weight = ring_out[tile, cut] if layer.transposed else ring_out[tile, :, cut]
                part = layer.dot(act_ref[j, 0:m], weight)
                d = part if d is None else d + part
            for word in range(plan.tile_h // LANES):
                at = pl.ds(tile * plan.tile_h // LANES + word, m, stride=words)
                d_rows[at] = d[:, word * LANES : (word + 1) * LANES]
            stream.start_out(visit, tile + plan.ring_out, jnp.where(is_last, num_active, 0))
        _scatter(
            layer, keys_ref, route_ref, token_mask, slot_mask, first, num_rows, d_rows, y_rows
        )

    def visit_expert(visit, _):
        expert = active_ref[visit]
        first, stop = offsets_ref[expert], offsets_ref[expert + 1]
        big, small = plan.tile_rows, plan.tile_rows_small
        count = stop - first
        num_big = (count + small - 1) // big if big > small else 0
        rest = jnp.maximum(count - num_big * big, 0)
        total = num_big + (rest + small - 1) // small

        def row_tile(m, offset, done):
            def body(index, _):
                start = first + offset + index * m
                multiply(
                    visit, expert, m, start, jnp.minimum(stop - start, m),
                    done + index == 0, done + index == total - 1,
                )
                return 0

            return body

        if big > small:
            jax.lax.fori_loop(0, num_big, row_tile(big, 0, 0), 0)
        jax.lax.fori_loop(0, total - num_big, row_tile(small, num_big * big, num_big), 0)
        return 0

    jax.lax.fori_loop(0, num_active, visit_expert, 0)

    def store(chunk, _):
        slot = jax.lax.rem(chunk, X_SLOTS)

        @pl.when(chunk >= X_SLOTS)
        def _():
            copy_y(chunk - X_SLOTS).wait()

        for word in range(layer.h // LANES):
            value = y_rows[pl.ds(chunk * rows * words + word, rows, stride=words)]
            chunks[slot, :, word * LANES : (word + 1) * LANES] = value.astype(chunks.dtype)
        copy_y(chunk).start()
        return 0

    jax.lax.fori_loop(0, num_chunks, store, 0)
    for chunk in range(max(num_chunks - X_SLOTS, 0), num_chunks):
        copy_y(jnp.int32(chunk)).wait()


def _bits(size: int) -> int:
    return max(size - 1, 0).bit_length()


def _sort(layer: Layer, ids, weights):
    """Slots by expert: keys [topk * t + 8] = expert, j, token in bit fields; first key of each expert
    [e + 1]; weights [slots] by j and token. A token's second slot of the same expert is merged into
    its first, so that within an expert every token occurs once.
    """
    token_bits = _bits(layer.t)
    slot_bits = token_bits + _bits(layer.topk)
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
    keys = jnp.pad(jnp.sort(keys), (0, SUBLANES))
    before = sum((row[:, None] < jnp.arange(layer.e + 1)).astype(jnp.int32) for row in ids)
    offsets = jnp.sum(before, axis=0)
    route = jnp.pad(route, ((0, 0), (0, (1 << token_bits) - layer.t))).reshape(-1)
    return keys, offsets, route, token_bits, slot_bits


def run(layer: Layer, x, ids, weights, gate_up, down, biases, chip, interpret):
    """[t, h] of x [t, h], ids and weights [t, topk]."""
    plan = layer.plan
    keys, offsets, route, token_bits, slot_bits = _sort(layer, ids, weights)
    vmem, smem, hbm = (pl.BlockSpec(memory_space=s) for s in (pltpu.VMEM, pltpu.SMEM, pl.ANY))
    words_in, words = _row_words(layer, layer.dtype.itemsize), _row_words(layer, 4)
    rows = plan.chunk_rows
    held = round_up(layer.t + 1, rows)
    m = plan.tile_rows
    row_dtype = jnp.uint32
    return pl.pallas_call(
        lambda *refs: _kernel(
            *refs, layer=layer, has_bias=bool(biases), token_bits=token_bits, slot_bits=slot_bits,
            is_exact=bool(interpret),
        ),
        out_shape=jax.ShapeDtypeStruct((layer.t, layer.h), x.dtype),
        in_specs=[smem, smem, smem, hbm, hbm, hbm] + [vmem] * len(biases),
        out_specs=hbm,
        scratch_shapes=[
            pltpu.SMEM((layer.e + 1,), jnp.int32),
            pltpu.VMEM(layer.ring_in_shape, layer.dtype),
            pltpu.VMEM(layer.ring_out_shape, layer.dtype),
            pltpu.SemaphoreType.DMA((plan.ring_in,)),
            pltpu.SemaphoreType.DMA((plan.ring_out,)),
            pltpu.VMEM((held * words_in, LANES), row_dtype),
            pltpu.VMEM((held * words, LANES), jnp.float32),
            pltpu.VMEM((m * words_in, LANES), row_dtype),
            pltpu.VMEM((m, layer.h), layer.dtype),
            pltpu.VMEM((layer.num_in, m, plan.tile_i), layer.dtype),
            pltpu.VMEM((m * words, LANES), jnp.float32),
            pltpu.VMEM((X_SLOTS, rows, layer.h), x.dtype),
            pltpu.SemaphoreType.DMA((X_SLOTS,)),
        ],
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=chip.vmem_bytes * 9 // 10),
        interpret=interpret,
        name=f"moe_experts_gather_{layer.dtype}_tm{m}_ti{plan.tile_i}_th{plan.tile_h}",
    )(keys, offsets, route, x, gate_up, down, *biases)
