"""The arithmetic on one block of keys: scores, exponentials, sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES
from . import masks
from .masks import Place
from .plan import Plan
from .tiling import CHUNK

LIVE = 3  # word of refs.state with a bit for each `strip_rows` queries whose m, l, acc are set
_NT = (((1,), (1,)), ((), ()))  # lhs [m, k], rhs [n, k]
_NN = (((1,), (0,)), ((), ()))  # lhs [m, k], rhs [k, n]


def _dot(plan: Plan, lhs, rhs, dims):
    return jax.lax.dot_general(
        lhs, rhs, dims, precision=plan.precision, preferred_element_type=jnp.float32
    )


def _cut(ref, head, form: str, keys):
    """Keys of a block [heads, keys, width], or [heads, width, keys] in "bhds"."""
    return ref[head, :, keys] if form == "bhds" else ref[head, keys, :]


def scores(plan: Plan, refs, k_ref, head, kv_head, rows, keys):
    """float32 [rows, keys]: logits in units of log2."""
    k = _cut(k_ref, kv_head, plan.k_form, keys)
    s = _dot(plan, refs.queries[head, rows, :], k, _NN if plan.k_form == "bhds" else _NT)
    # Scaling here costs one of four idle vector slots; scaling q would round it once more.
    s = s * plan.scale
    return plan.softcap * jnp.tanh(s) if plan.softcap else s


def weigh(plan: Plan, v_ref, kv_head, p, keys):
    """float32 [rows, dv]: p @ v."""
    v = _cut(v_ref, kv_head, plan.v_form, keys)
    return _dot(plan, p.astype(v.dtype), v, _NT if plan.v_form == "bhds" else _NN)


def fold_lanes(op, x):
    """[rows, n * LANES] -> [rows, LANES]."""
    parts = [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]
    while len(parts) > 1:
        pairs = [op(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]


def kv_head_of(plan: Plan, head):
    """Key head of a tile's query head, counted from the tile's first key head."""
    if plan.kv_heads == 1:
        return 0
    return head if plan.shape.rep == 1 else jax.lax.div(head, plan.shape.rep)


def _add(refs, head, rows, p, weighted, is_first: bool = False):
    if is_first:
        refs.l[head, rows, :] = fold_lanes(jnp.add, p)
        refs.acc[head, rows, :] = weighted
    else:
        refs.l[head, rows, :] += fold_lanes(jnp.add, p)
        refs.acc[head, rows, :] += weighted


def _exp(s, m):
    """2^(s - m), per LANES columns so that m, equal in all lanes, needs no broadcast."""
    return [jnp.exp2(s[:, i : i + LANES] - m) for i in range(0, s.shape[1], LANES)]


def guess_maximum(s):
    """[rows, LANES], equal in all lanes: greatest of the first LANES logits, visible or not.

    Any finite value near the greatest visible logit of a row will do.
    """
    m = jnp.broadcast_to(jnp.max(s[:, :LANES], axis=1, keepdims=True), (s.shape[0], LANES))
    return jnp.where(jnp.abs(m) < jnp.inf, m, 0.0)


def begin_strip(plan: Plan, refs, k_ref, place: Place, row):
    """Sets m of `strip_rows` queries from some keys of a block, acc and l to zero."""
    count = strip_rows(plan)
    rows = pl.ds(row, count)
    col = pl.multiple_of(jnp.maximum(-place.first_key, 0), LANES) if plan.shifts_keys else 0

    def head_body(head, _):
        s = scores(plan, refs, k_ref, head, kv_head_of(plan, head), rows, pl.ds(col, LANES))
        refs.m[head, rows] = guess_maximum(jnp.where(_exists(place, col), s, -jnp.inf))
        refs.l[head, rows] = jnp.zeros((count, LANES), jnp.float32)
        refs.acc[head, rows] = jnp.zeros((count, plan.shape.dv), jnp.float32)
        return 0

    jax.lax.fori_loop(0, plan.tiles.heads, head_body, 0)


def _exists(place: Place, col):
    """bool [1, LANES]: keys from `col` of a block that are keys at all, not what lay in memory."""
    key = place.first_key + col + jax.lax.broadcasted_iota(jnp.int32, (1, LANES), 1)
    return (key >= 0) & (key < place.length)


def full_body(plan: Plan, refs, k_ref, v_ref, is_first: bool, valid: int | None = None):
    """Every query sees every key of the block: no mask, no maximum, nothing to rescale.

    valid: keys of a last block that is not full.
    """
    step, size, rows_all = plan.tiles.row_step, plan.tiles.block_k, plan.tiles.block_q
    size = size if valid is None else min(size, -(-valid // CHUNK) * CHUNK)
    keys = pl.ds(0, size)

    def head_body(head, _):
        kv_head = kv_head_of(plan, head)
        if is_first:
            sample = scores(plan, refs, k_ref, head, kv_head, pl.ds(0, rows_all), pl.ds(0, LANES))
            refs.m[head] = guess_maximum(sample)
        for row in range(0, rows_all, step):
            rows = pl.ds(row, step)
            s = scores(plan, refs, k_ref, head, kv_head, rows, keys)
            parts = _exp(s, refs.m[head, rows, :])
            if valid is not None:
                for i in range(valid // LANES, len(parts)):
                    lane = i * LANES + jax.lax.broadcasted_iota(jnp.int32, (step, LANES), 1)
                    parts[i] = jnp.where(lane < valid, parts[i], 0.0)
            p = jnp.concatenate(parts, axis=1)
            _add(refs, head, rows, p, weigh(plan, v_ref, kv_head, p, keys), is_first)
        return 0

    jax.lax.fori_loop(0, plan.tiles.heads, head_body, 0)


def _first_live(plan: Plan, rel: int) -> int:
    """The first LANES keys of a block that some query sees."""
    size, rows = plan.tiles.block_k, plan.tiles.block_q
    cols = range(0, size, LANES)
    return next(c for c in cols if plan.strip_state(rel, 0, rows, c, LANES) != "empty")


def band_body(plan: Plan, refs, k_ref, v_ref, place: Place, rel: int, is_first: bool):
    """A block that the band cuts at a known place: only the strips in the band, masked at the edge.

    rel: first key - aligned first position, as in `Plan.partial_rels`.
    """
    step, size, rows_all = plan.tiles.band_step, plan.tiles.block_k, plan.tiles.block_q

    def act(head):
        kv_head = kv_head_of(plan, head)
        if is_first:
            col = _first_live(plan, rel)
            sample = scores(plan, refs, k_ref, head, kv_head, pl.ds(0, rows_all), pl.ds(col, LANES))
            refs.m[head] = guess_maximum(sample)
        for row in range(0, plan.tiles.block_q, step):
            states = [plan.strip_state(rel, row, step, col, LANES) for col in range(0, size, LANES)]
            live = [i for i, state in enumerate(states) if state != "empty"]
            if not live:
                if is_first:
                    refs.l[head, pl.ds(row, step)] = jnp.zeros((step, LANES), jnp.float32)
                    refs.acc[head, pl.ds(row, step)] = jnp.zeros((step, plan.shape.dv), jnp.float32)
                continue
            first, stop = live[0] * LANES, (live[-1] + 1) * LANES
            rows, keys = pl.ds(row, step), pl.ds(first, stop - first)
            s = scores(plan, refs, k_ref, head, kv_head, rows, keys)
            parts = _exp(s, refs.m[head, rows, :])
            for i in live:
                if states[i] != "full":
                    seen = masks.band_mask(plan, place, row, step, i * LANES, LANES)
                    parts[i - live[0]] = jnp.where(seen, parts[i - live[0]], 0.0)
            p = jnp.concatenate(parts, axis=1)
            _add(refs, head, rows, p, weigh(plan, v_ref, kv_head, p, keys), is_first)

    _head_loop(plan, act, 2)


def _for_each_piece(plan: Plan, refs, place: Place, act):
    """act(row, rows, col, cols, seen) for the chunks of a block that may hold visible pairs."""
    step_q, step_k = (_step(size) for size in (plan.tiles.block_q, plan.tiles.block_k))

    def row_body(i, _):
        row = pl.multiple_of(i * step_q, step_q)
        first, stop = masks.chunk_range(plan, place, row, step_q, step_k)

        def col_body(j, _):
            col = pl.multiple_of(j * step_k, step_k)

            def piece():
                act(row, step_q, col, step_k)

            if plan.has_ids:
                some, _ = masks.id_state(plan, refs, place, row, step_q, col, step_k)
                pl.when(some)(piece)
            else:
                piece()
            return 0

        jax.lax.fori_loop(first, stop, col_body, 0)
        return 0

    jax.lax.fori_loop(0, plan.tiles.block_q // step_q, row_body, 0)


def _step(size: int) -> int:
    return CHUNK if size % CHUNK == 0 else LANES


def _seen_by(plan: Plan, refs, place, head, row, rows, col, cols, common):
    """The mask of one head; `common` is what the heads share."""
    if not plan.mask_batch:
        return common
    index = head if plan.shape.mask_heads > 1 else 0
    bits = refs.mask_buf[index, pl.ds(row, rows), pl.ds(col, cols)]
    return common & (bits.astype(jnp.int32) != 0)


def _head_loop(plan: Plan, act, most: int = 4):
    """act(head), several heads side by side so that their matmuls and exponentials overlap."""
    heads = plan.tiles.heads
    side = next(n for n in range(most, 0, -1) if heads % n == 0)

    def body(i, _):
        for j in range(side):
            act(i * side + j)
        return 0

    jax.lax.fori_loop(0, heads // side, body, 0)


def strip_rows(plan: Plan) -> int:
    """Queries of one step of `masked_body`."""
    return _step(plan.tiles.block_q)


def _piece(plan: Plan, refs, k_ref, v_ref, place: Place, row, chunk, size: int, is_first: bool):
    """`strip_rows` queries and `size` keys from chunk `chunk` of a block.

    All heads side by side, so that matmuls and exponentials overlap; they share the mask, which is
    made once and waits in VMEM as all ones or zeros.
    """
    # The last piece begins early rather than end late; the keys before `chunk` are done.
    count = strip_rows(plan)
    col = pl.multiple_of(jnp.minimum(chunk * LANES, plan.tiles.block_k - size), LANES)
    rows, keys = pl.ds(row, count), pl.ds(col, size)
    low = jnp.maximum(place.first_key + chunk * LANES, 0)
    seen = masks.general_mask(plan, refs, place, row, count, col, size, low)
    if plan.mask_batch and plan.shape.mask_heads == 1:
        seen &= refs.mask_buf[0, rows, keys].astype(jnp.int32) != 0
    refs.seen[:, :size] = jnp.where(seen, -1, 0)

    def act(head):
        kv_head = kv_head_of(plan, head)
        s = scores(plan, refs, k_ref, head, kv_head, rows, keys)
        if is_first:
            m = guess_maximum(jnp.where(_exists(place, col), s[:, :LANES], -jnp.inf))
            refs.m[head, rows] = m
        else:
            m = refs.m[head, rows]
        parts = _exp(s, m)
        for i, part in enumerate(parts):
            lanes = slice(i * LANES, (i + 1) * LANES)
            bits = pltpu.bitcast(part, jnp.int32) & refs.seen[:, lanes]
            if plan.shape.mask_heads > 1:
                own = refs.mask_buf[head, rows, pl.ds(col + i * LANES, LANES)].astype(jnp.int32)
                bits &= -own
            parts[i] = pltpu.bitcast(bits, jnp.float32)
        p = jnp.concatenate(parts, axis=1)
        _add(refs, head, rows, p, weigh(plan, v_ref, kv_head, p, keys), is_first)

    _head_loop(plan, act, _heads_side_by_side(plan, count * size))


def _heads_side_by_side(plan: Plan, logits: int) -> int:
    """Heads of one loop step of `_piece`: about as much work as one step of `full_body`."""
    passes = 1 if plan.precision == jax.lax.Precision.DEFAULT else 6
    width = max(2 * LANES, plan.shape.d + plan.shape.dv)
    return max(1, 32 * CHUNK * CHUNK * 2 * LANES // (logits * passes * width))


def piece_sizes(plan: Plan) -> list[int]:
    """Keys of one step of `masked_body`, longest first. Longer ones do not overlap better."""
    return [size for size in (CHUNK, LANES) if size <= plan.tiles.block_k]


def masked_body(plan: Plan, refs, k_ref, v_ref, place: Place):
    """Any block: for each strip of queries the keys it may see, with every mask.

    A strip's first piece sets m, l and acc; `refs.state[LIVE]` has a bit for each strip with one.
    """
    count, sizes = strip_rows(plan), piece_sizes(plan)

    def strip_body(strip, _):
        row = pl.multiple_of(strip * count, count)
        first, stop = masks.strip_range(plan, refs, place, row, count)
        rest, ends = jnp.maximum(stop - first, 0), []  # ends: pieces up to the last of each size
        for size in sizes:
            number = jax.lax.div(rest, size // LANES)
            rest -= number * (size // LANES)
            ends.append(number + (ends[-1] if ends else 0))

        def piece(i, chunk):
            live, step = refs.state[LIVE], jnp.int32(1)
            for size, begin, end in zip(sizes, [0, *ends], ends, strict=False):
                fits = (i >= begin) & (i < end)
                step = jnp.where(fits, size // LANES, step)
                for is_first in (False, True):

                    @pl.when(fits & (((live >> strip) & 1 == 0) == is_first))
                    def _(is_first=is_first, size=size):
                        _piece(plan, refs, k_ref, v_ref, place, row, chunk, size, is_first)

            refs.state[LIVE] = live | (1 << strip)
            return chunk + step

        jax.lax.fori_loop(0, ends[-1], piece, first)
        return 0

    jax.lax.fori_loop(0, plan.tiles.block_q // count, strip_body, 0)


def safe_body(plan: Plan, refs, k_ref, v_ref, place: Place):
    """As `masked_body` with a running maximum, and without trusting hidden values to be finite.

    A row that sees a value which is not finite gets NaN; rows that do not see it stay clean.
    """

    def piece(row, step_q, col, step_k):
        rows, keys = pl.ds(row, step_q), pl.ds(col, step_k)
        common = masks.general_mask(plan, refs, place, row, step_q, col, step_k)

        def head_body(head, _):
            kv_head = kv_head_of(plan, head)
            seen = _seen_by(plan, refs, place, head, row, step_q, col, step_k, common)
            s = scores(plan, refs, k_ref, head, kv_head, rows, keys)
            s = jnp.where(seen, s, -jnp.inf)
            m_old = refs.m[head, rows, :]
            m_new = jnp.maximum(m_old, jnp.max(s, axis=1, keepdims=True))
            m_used = jnp.where(m_new == -jnp.inf, 0.0, m_new)
            old_share = jnp.exp2(m_old - m_used)
            p = jnp.where(seen, jnp.exp2(s - m_used[:, :1]), 0.0)

            v = _cut(v_ref, kv_head, plan.v_form, keys).astype(jnp.float32)
            dims = _NT if plan.v_form == "bhds" else _NN
            finite = jnp.abs(v) < jnp.inf
            clean = jnp.where(finite, v, 0.0).astype(v_ref.dtype)
            weighted = _dot(plan, p.astype(v_ref.dtype), clean, dims)
            bad = jnp.where(finite, 0.0, 1.0).astype(v_ref.dtype)
            tainted = _dot(plan, seen.astype(jnp.float32).astype(v_ref.dtype), bad, dims)
            weighted = jnp.where(tainted > 0, jnp.nan, weighted)

            refs.m[head, rows, :] = m_new
            refs.l[head, rows, :] = refs.l[head, rows, :] * old_share + fold_lanes(jnp.add, p)
            refs.acc[head, rows, :] = refs.acc[head, rows, :] * old_share[:, :1] + weighted
            return 0

        jax.lax.fori_loop(0, plan.tiles.heads, head_body, 0)

    _for_each_piece(plan, refs, place, piece)
