"""The arithmetic on one block of keys: scores, exponentials, sums.

Logits and weights stand as [key, query]: maxima and sums of a query run down the registers, and the
weights are the stationary operand of their matmul, so that a head narrower than the MXU costs no
columns of it: with 256 columns both matmuls of 128-wide heads take 3/4 of the time of [query, key].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, SUBLANES
from . import masks
from .masks import Place
from .plan import Plan
from .tiling import CHUNK

_LOGITS_AHEAD = 3 * CHUNK * CHUNK  # on their way through the MXU while others become weights
LIVE = 3  # word of refs.state with a bit for each `strip_rows` queries whose m, l, acc are set
_NT = (((1,), (1,)), ((), ()))  # lhs [m, k], rhs [n, k]
_NN = (((1,), (0,)), ((), ()))  # lhs [m, k], rhs [k, n]


def _dot(plan: Plan, lhs, rhs, dims=_NN):
    return jax.lax.dot_general(
        lhs, rhs, dims, precision=plan.precision, preferred_element_type=jnp.float32
    )


def scores(plan: Plan, refs, k_ref, head, kv_head, rows, keys):
    """float32 [keys, rows]: logits in units of log2."""
    is_upright = plan.q_form == "bhds"
    q = refs.queries[head, :, rows] if is_upright else refs.queries[head, rows, :]
    s = _dot(plan, k_ref[kv_head, keys, :], q, _NN if is_upright else _NT)
    # Scaling here costs one of four idle vector slots; scaling q would round it once more.
    s = s * plan.scale
    return plan.softcap * jnp.tanh(s) if plan.softcap else s


def fold(x):
    """[n * SUBLANES, rows] -> [SUBLANES, rows]: sums, still apart by sublane."""
    return x.reshape(-1, SUBLANES, x.shape[1]).sum(0)


def kv_head_of(plan: Plan, head):
    """Key head of a tile's query head, counted from the tile's first key head."""
    if plan.kv_heads == 1:
        return 0
    return head if plan.shape.rep == 1 else jax.lax.div(head, plan.shape.rep)


def _exp(s, m):
    """2^(s - m), per SUBLANES keys so that m, equal in all sublanes, needs no broadcast."""
    return jnp.exp2(s.reshape(-1, SUBLANES, s.shape[1]) - m[None]).reshape(s.shape)


def guess_maximum(s):
    """[SUBLANES, rows], equal in all sublanes: greatest of the first LANES logits, visible or not.

    Any finite value near the greatest visible logit of a query will do.
    """
    m = jnp.max(s[:LANES], axis=0, keepdims=True)
    m = jnp.where(jnp.abs(m) < jnp.inf, m, 0.0)
    return jnp.broadcast_to(m, (SUBLANES, s.shape[1]))


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Some queries of a head and some keys of a block."""

    head: jax.Array
    rows: pl.Slice
    keys: pl.Slice
    is_first: bool  # of its queries: sets m, l and acc
    hide: Callable = lambda p: p  # of hidden pairs makes zeros
    sample: Callable = lambda s: s  # what the maximum is guessed from


def _attend(plan: Plan, refs, k_ref, v_ref, pieces: list[_Piece]):
    """Adds what the keys of each piece give to its queries.

    The MXU is given the logits of the next pieces before it has to wait for the weights of one.
    """

    def begin(piece: _Piece):
        kv_head = kv_head_of(plan, piece.head)
        return scores(plan, refs, k_ref, piece.head, kv_head, piece.rows, piece.keys)

    def weights(piece: _Piece, s):
        at = piece.head, slice(None), piece.rows
        if piece.is_first:
            m = refs.m[at] = guess_maximum(piece.sample(s))
        else:
            m = refs.m[at]
        p = piece.hide(_exp(s, m))
        refs.l[at] = fold(p) if piece.is_first else refs.l[at] + fold(p)
        return p.astype(v_ref.dtype)

    def add(piece: _Piece, p):
        at = piece.head, slice(None), piece.rows
        weighted = _dot(plan, v_ref[kv_head_of(plan, piece.head), :, piece.keys], p)
        refs.acc[at] = weighted if piece.is_first else refs.acc[at] + weighted

    begun, p = [], None
    for i, piece in enumerate(pieces):
        while len(begun) < len(pieces) and sum(s.size for s in begun[i + 1 :]) < _LOGITS_AHEAD:
            begun.append(begin(pieces[len(begun)]))
        if i > 0:
            add(pieces[i - 1], p)
        p = weights(piece, begun[i])
    add(pieces[-1], p)


def _row_pieces(rows: int, step: int) -> list[tuple[int, int]]:
    return [(row, min(step, rows - row)) for row in range(0, rows, step)]


def clear(plan: Plan, refs, head, rows, m=-jnp.inf):
    """acc and l of queries that saw nothing yet, and their m."""
    refs.acc[head, :, rows] = jnp.zeros((plan.shape.dv, rows.size), jnp.float32)
    refs.l[head, :, rows] = jnp.zeros((SUBLANES, rows.size), jnp.float32)
    refs.m[head, :, rows] = jnp.broadcast_to(jnp.float32(m), (SUBLANES, rows.size))


def begin_strip(plan: Plan, refs, k_ref, place: Place, row):
    """Sets m of `strip_rows` queries from some keys of a block, acc and l to zero."""
    rows = pl.ds(row, strip_rows(plan))
    col = pl.multiple_of(jnp.maximum(-place.first_key, 0), LANES) if plan.shifts_keys else 0

    def head_body(head, _):
        s = scores(plan, refs, k_ref, head, kv_head_of(plan, head), rows, pl.ds(col, LANES))
        clear(plan, refs, head, rows, guess_maximum(_keys_only(place, col, s)))
        return 0

    jax.lax.fori_loop(0, plan.tiles.heads, head_body, 0)


def _keys_only(place: Place, col, s):
    """The first LANES logits from key `col` of a block, -inf where there is no key at all but what
    lay in memory."""
    key = place.first_key + col + jax.lax.broadcasted_iota(jnp.int32, (LANES, 1), 0)
    return jnp.where((key >= 0) & (key < place.length), s[:LANES], -jnp.inf)


def full_body(plan: Plan, refs, k_ref, v_ref, is_first: bool, valid: int | None = None):
    """Every query sees every key of the block: no mask, no maximum, nothing to rescale.

    valid: keys of a last block that is not full.
    """
    size = plan.tiles.block_k
    size = size if valid is None else min(size, -(-valid // CHUNK) * CHUNK)

    def hide(p):
        whole = valid // LANES * LANES
        key = jax.lax.broadcasted_iota(jnp.int32, (size - whole, 1), 0)
        return jnp.concatenate([p[:whole], jnp.where(key < valid - whole, p[whole:], 0.0)])

    more = {} if valid is None or valid == size else {"hide": hide}

    def head_body(head, _):
        pieces = [
            _Piece(head, pl.ds(row, rows), pl.ds(0, size), is_first, **more)
            for row, rows in _row_pieces(plan.tiles.block_q, plan.tiles.row_step)
        ]
        _attend(plan, refs, k_ref, v_ref, pieces)
        return 0

    jax.lax.fori_loop(0, plan.tiles.heads, head_body, 0)


def band_body(plan: Plan, refs, k_ref, v_ref, place: Place, rel: int, is_first: bool):
    """A block that the band cuts at a known place: only the strips in the band, masked at the edge.

    rel: first key - aligned first position, as in `Plan.partial_rels`.
    """
    size = plan.tiles.block_k

    def piece_of(head, row: int, rows: int) -> _Piece | None:
        states = [plan.strip_state(rel, row, rows, col, LANES) for col in range(0, size, LANES)]
        live = [i for i, state in enumerate(states) if state != "empty"]
        if not live:
            return None
        first = live[0]

        def hide(p):
            parts = [p[i : i + LANES] for i in range(0, p.shape[0], LANES)]
            for i in live:
                if states[i] != "full":
                    seen = masks.band_mask(plan, place, row, rows, i * LANES, LANES)
                    parts[i - first] = jnp.where(seen, parts[i - first], 0.0)
            return jnp.concatenate(parts)

        keys = pl.ds(first * LANES, (live[-1] + 1 - first) * LANES)
        return _Piece(head, pl.ds(row, rows), keys, is_first, hide)

    def act(heads: list):
        pieces = []
        for head in heads:
            for row, rows in _row_pieces(plan.tiles.block_q, plan.tiles.band_step):
                piece = piece_of(head, row, rows)
                if piece is not None:
                    pieces.append(piece)
                elif is_first:
                    sample = pl.ds(_first_live(plan, rel), LANES)
                    at = pl.ds(row, rows)
                    s = scores(plan, refs, k_ref, head, kv_head_of(plan, head), at, sample)
                    clear(plan, refs, head, at, guess_maximum(s))
        _attend(plan, refs, k_ref, v_ref, pieces)

    _head_loop(plan, act, 2)


def _first_live(plan: Plan, rel: int) -> int:
    """The first LANES keys of a block that some query sees."""
    size, rows = plan.tiles.block_k, plan.tiles.block_q
    cols = range(0, size, LANES)
    return next(c for c in cols if plan.strip_state(rel, 0, rows, c, LANES) != "empty")


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
    bits = refs.mask_buf[index, pl.ds(col, cols), pl.ds(row, rows)]
    return common & (bits.astype(jnp.int32) != 0)


def _head_loop(plan: Plan, act, most: int):
    """act(heads), several heads side by side so that their matmuls and exponentials overlap."""
    heads = plan.tiles.heads
    side = next(n for n in range(most, 0, -1) if heads % n == 0)

    def body(i, _):
        act([i * side + j for j in range(side)])
        return 0

    jax.lax.fori_loop(0, heads // side, body, 0)


def strip_rows(plan: Plan) -> int:
    """Queries of one step of `masked_body`."""
    return _step(plan.tiles.block_q)


def _piece(
    plan: Plan,
    refs,
    k_ref,
    v_ref,
    place: Place,
    row,
    chunk,
    size: int,
    is_first: bool = False,
    is_full: bool = False,
):
    """`strip_rows` queries and `size` keys from chunk `chunk` of a block; is_full: all visible.

    All heads side by side, so that matmuls and exponentials overlap; they share the mask, which is
    made once and waits in VMEM as all ones or zeros.
    """
    # The last piece begins early rather than end late; the keys before `chunk` are done.
    count = strip_rows(plan)
    col = pl.multiple_of(jnp.minimum(chunk * LANES, plan.tiles.block_k - size), LANES)
    rows, keys = pl.ds(row, count), pl.ds(col, size)
    if not is_full:
        low = jnp.maximum(place.first_key + chunk * LANES, 0)
        seen = masks.general_mask(plan, refs, place, row, count, col, size, low)
        if plan.mask_batch and plan.shape.mask_heads == 1:
            seen &= refs.mask_buf[0, keys, rows].astype(jnp.int32) != 0
        refs.seen[:size] = jnp.where(seen, -1, 0)

    def act(heads: list):
        def piece_of(head) -> _Piece:
            if is_full:
                return _Piece(head, rows, keys, is_first)

            def hide(p):
                bits = pltpu.bitcast(p, jnp.int32) & refs.seen[:size]
                if plan.shape.mask_heads > 1:
                    bits &= -refs.mask_buf[head, keys, rows].astype(jnp.int32)
                return pltpu.bitcast(bits, jnp.float32)

            def sample(s):
                return _keys_only(place, col, s)

            return _Piece(head, rows, keys, is_first, hide, sample)

        _attend(plan, refs, k_ref, v_ref, [piece_of(head) for head in heads])

    _head_loop(plan, act, _heads_side_by_side(plan, count * size))


def _heads_side_by_side(plan: Plan, logits: int) -> int:
    """Heads of one loop step of `_piece`: about as much work as one step of `full_body`."""
    passes = 1 if plan.precision == jax.lax.Precision.DEFAULT else 6
    width = max(2 * LANES, plan.shape.d + plan.shape.dv)
    return max(1, 32 * CHUNK * CHUNK * 2 * LANES // (logits * passes * width))


def piece_sizes(plan: Plan) -> list[int]:
    """Keys of one step of `masked_body`, longest first."""
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
            is_first = (live >> strip) & 1 == 0
            for size, begin, end in zip(sizes, [0, *ends], ends, strict=False):
                fits = (i >= begin) & (i < end)
                step = jnp.where(fits, size // LANES, step)
                run = functools.partial(_piece, plan, refs, k_ref, v_ref, place, row, chunk, size)
                pl.when(fits & is_first)(functools.partial(run, is_first=True))
                fits &= ~is_first
                if size == CHUNK and not plan.mask_batch:
                    is_full = masks.all_seen(plan, refs, place, row, count, chunk * LANES, size)
                    pl.when(fits & is_full)(functools.partial(run, is_full=True))
                    fits &= ~is_full
                pl.when(fits)(run)

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
            at = head, slice(None), rows
            m_old = refs.m[at]
            m_new = jnp.maximum(m_old, jnp.max(s, axis=0, keepdims=True))
            m_used = jnp.where(m_new == -jnp.inf, 0.0, m_new)
            old_share = jnp.exp2(m_old - m_used)
            p = jnp.where(seen, _exp(s, m_used), 0.0)

            v = v_ref[kv_head, :, keys].astype(jnp.float32)
            finite = jnp.abs(v) < jnp.inf
            clean = jnp.where(finite, v, 0.0).astype(v_ref.dtype)
            weighted = _dot(plan, clean, p.astype(v_ref.dtype))
            bad = jnp.where(finite, 0.0, 1.0).astype(v_ref.dtype)
            tainted = _dot(plan, bad, seen.astype(jnp.float32).astype(v_ref.dtype))
            weighted = jnp.where(tainted > 0, jnp.nan, weighted)

            refs.m[at] = m_new
            refs.l[at] = refs.l[at] * old_share + fold(p)
            refs.acc[at] = refs.acc[at] * old_share[:1] + weighted
            return 0

        jax.lax.fori_loop(0, plan.tiles.heads, head_body, 0)

    _for_each_piece(plan, refs, place, piece)
