"""The JAX functions behind the torch ops: what runs on the TPU, arguments as in the torch schema.

Around the Pallas kernels they settle what those leave out: sizes of zero, float16, arrays with the
heads first, broadcast masks, and the positions and segments of packed sequences.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...tpu_runtime import Chip
from .kernel import flash_attention_fwd

Masks = dict[str, jax.Array | None]  # keywords of the kernels
Options = tuple[bool, int, int, float, float]  # causal, window_left, window_right, scale, softcap


def flash_attention(
    q: jax.Array,  # [b, sq, hq, d], [b, hq, sq, d] if heads_first
    k: jax.Array,  # [b, sk, hkv, d], [b, hkv, sk, d]
    v: jax.Array,  # [b, sk, hkv, dv], [b, hkv, sk, dv]
    sinks: jax.Array | None,  # [hq]
    q_segment_ids: jax.Array | None,  # [b, sq]
    kv_segment_ids: jax.Array | None,  # [b, sk]
    mask: jax.Array | None,  # [b or 1, hq or 1, sq or 1, sk or 1]
    kv_lengths: jax.Array | None,  # [b]
    causal: bool,
    window_left: int,
    window_right: int,
    softmax_scale: float,
    softcap: float,
    heads_first: bool,
    *,
    chip: Chip,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:  # [b, sq, hq, dv], [b, hq, sq]
    (q,) = _heads_last(heads_first, q)
    sk = k.shape[2 if heads_first else 1]
    masks = dense_masks(q_segment_ids, kv_segment_ids, mask, kv_lengths, q.shape[1], sk)
    options = (causal, window_left, window_right, softmax_scale, softcap)
    return _attend(
        q, k, v, sinks, masks, options, heads_first=heads_first, chip=chip, interpret=interpret
    )


def flash_attention_backward(
    grad_out: jax.Array,  # [b, sq, hq, dv]
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,  # [b, sq, hq, dv]
    lse: jax.Array,  # [b, hq, sq]
    sinks: jax.Array | None,
    q_segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    mask: jax.Array | None,
    kv_lengths: jax.Array | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softmax_scale: float,
    softcap: float,
    heads_first: bool,
    needs_q: bool,
    needs_kv: bool,
    needs_sinks: bool,
    *,
    chip: Chip,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k, v and sinks; one that is not needed has shape [0]."""
    q, k, v = _heads_last(heads_first, q, k, v)
    masks = dense_masks(q_segment_ids, kv_segment_ids, mask, kv_lengths, q.shape[1], k.shape[1])
    dq, dk, dv, dsinks = _attend_backward(
        (q, k, v, out, lse, grad_out),
        sinks,
        masks,
        (causal, window_left, window_right, softmax_scale, softcap),
        (needs_q, needs_kv, needs_sinks),
        chip=chip,
        interpret=interpret,
    )
    # The swap is its own inverse.
    (dq,) = _heads_last(heads_first and needs_q, dq)
    dk, dv = _heads_last(heads_first and needs_kv, dk, dv)
    return dq, dk, dv, dsinks


def flash_attention_packed(
    q: jax.Array,  # [t, hq, d]
    k: jax.Array,  # [tk, hkv, d]
    v: jax.Array,  # [tk, hkv, dv]
    sinks: jax.Array | None,  # [hq]
    cu_seqlens_q: jax.Array,  # [number of sequences + 1]
    cu_seqlens_k: jax.Array,
    causal: bool,
    window_left: int,
    window_right: int,
    softmax_scale: float,
    softcap: float,
    *,
    chip: Chip,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:  # [t, hq, dv], [hq, t]
    masks = packed_masks(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0])
    options = (causal, window_left, window_right, softmax_scale, softcap)
    out, lse = _attend(
        q[None], k[None], v[None], sinks, masks, options, chip=chip, interpret=interpret
    )
    return out[0], lse[0]


def flash_attention_packed_backward(
    grad_out: jax.Array,  # [t, hq, dv]
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,  # [t, hq, dv]
    lse: jax.Array,  # [hq, t]
    sinks: jax.Array | None,
    cu_seqlens_q: jax.Array,
    cu_seqlens_k: jax.Array,
    causal: bool,
    window_left: int,
    window_right: int,
    softmax_scale: float,
    softcap: float,
    needs_q: bool,
    needs_kv: bool,
    needs_sinks: bool,
    *,
    chip: Chip,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k, v and sinks; one that is not needed has shape [0]."""
    dq, dk, dv, dsinks = _attend_backward(
        tuple(x[None] for x in (q, k, v, out, lse, grad_out)),
        sinks,
        packed_masks(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]),
        (causal, window_left, window_right, softmax_scale, softcap),
        (needs_q, needs_kv, needs_sinks),
        chip=chip,
        interpret=interpret,
    )
    return dq[0] if needs_q else dq, *((dk[0], dv[0]) if needs_kv else (dk, dv)), dsinks


def _attend(
    q: jax.Array,  # [b, sq, hq, d]
    k: jax.Array,  # [b, sk, hkv, d], [b, hkv, sk, d] if heads_first
    v: jax.Array,  # [b, sk, hkv, dv], [b, hkv, sk, dv]
    sinks: jax.Array | None,
    masks: Masks,
    options: Options,
    *,
    heads_first: bool = False,
    **target: Any,
) -> tuple[jax.Array, jax.Array]:
    (b, sq, hq, _), dv = q.shape, v.shape[3]
    sk = k.shape[2 if heads_first else 1]
    if 0 in (b, sq, sk):
        empty = jnp.full((b, hq, sq), -jnp.inf, jnp.float32)
        return jnp.zeros((b, sq, hq, dv), q.dtype), empty
    arrays = (_no_float16(x) for x in (q, k, v))
    keywords = _keywords(sinks, masks, options)
    out, lse = flash_attention_fwd(*arrays, **keywords, heads_first=heads_first, **target)
    return out.astype(q.dtype), lse


def _attend_backward(
    arrays: tuple[jax.Array, ...],  # q, k, v, out, lse, grad_out
    sinks: jax.Array | None,
    masks: Masks,
    options: Options,
    needs: tuple[bool, bool, bool],
    **target: Any,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    q, k, v, *_ = arrays
    needs_q, needs_kv, needs_sinks = needs
    nothing = jnp.zeros((0,), q.dtype)
    if 0 in (q.shape[0], q.shape[1], k.shape[1]):  # no query, no key or no batch
        dq = jnp.zeros_like(q) if needs_q else nothing
        dk, dv = (jnp.zeros_like(x) if needs_kv else nothing for x in (k, v))
        return dq, dk, dv, jnp.zeros_like(sinks) if needs_sinks else nothing
    from .kernel_bwd import flash_attention_bwd

    dq, dk, dv, dsinks = flash_attention_bwd(
        *(_no_float16(x) for x in arrays),
        **_keywords(sinks, masks, options),
        needs_q=needs_q,
        needs_kv=needs_kv,
        needs_sinks=needs_sinks,
        **target,
    )
    dsinks = dsinks.astype(sinks.dtype if needs_sinks else q.dtype)
    return *(x.astype(q.dtype) for x in (dq, dk, dv)), dsinks


def dense_masks(
    q_segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    mask: jax.Array | None,
    kv_lengths: jax.Array | None,
    sq: int,
    sk: int,
) -> Masks:
    if mask is not None:
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], sq, sk))
    if kv_lengths is not None:
        kv_lengths = jnp.clip(kv_lengths, 0, sk)
    return {
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "mask": mask,
        "kv_lengths": kv_lengths,
    }


def packed_masks(cu_seqlens_q: jax.Array, cu_seqlens_k: jax.Array, t: int, tk: int) -> Masks:
    """Positions and segment ids, [1, t] and [1, tk], of packed rows.

    A sequence's keys stand at 0, 1, ..., its last query at its last key. Rows past the last of n
    sequences have id n among queries and n + 1 among keys, so they see nothing, and ids ascend.
    """
    ends_q = jnp.clip(cu_seqlens_q, 0, t)
    ends_k = jnp.clip(cu_seqlens_k, 0, tk)
    q_sequence, q_row = _sequence_and_row(ends_q, t)
    kv_sequence, kv_row = _sequence_and_row(ends_k, tk)
    # Empty sequences of queries are never looked up, so only their neighbours' lengths matter.
    shift = jnp.diff(ends_k) - jnp.diff(ends_q)
    shift = jnp.concatenate([shift, jnp.zeros((1,), shift.dtype)])  # for rows of no sequence
    return {
        "q_segment_ids": q_sequence[None],
        "kv_segment_ids": (kv_sequence + (kv_row < 0))[None],
        "q_positions": (q_row + shift[q_sequence])[None],
        "kv_positions": kv_row[None],
    }


def _sequence_and_row(ends: jax.Array, t: int) -> tuple[jax.Array, jax.Array]:
    """Each row's sequence and its place there; past the last sequence: (their number, -1)."""
    num_sequences = ends.shape[0] - 1
    row = jnp.arange(t, dtype=ends.dtype)
    # The last sequence that starts at or before the row: empty ones before it do not hold it.
    sequence = jnp.searchsorted(ends, row, side="right").astype(ends.dtype) - 1
    is_inside = (sequence >= 0) & (sequence < num_sequences)
    place = row - ends[jnp.clip(sequence, 0, num_sequences)]
    return jnp.where(is_inside, sequence, num_sequences), jnp.where(is_inside, place, -1)


def _keywords(sinks: jax.Array | None, masks: Masks, options: Options) -> dict[str, Any]:
    """The keywords that the forward and the backward kernel share."""
    causal, window_left, window_right, softmax_scale, softcap = options
    return {
        "sinks": None if sinks is None else sinks.astype(jnp.float32),
        **masks,
        "causal": causal,
        "window": (window_left, window_right),
        "softmax_scale": softmax_scale,
        "softcap": softcap,
    }


def _heads_last(heads_first: bool, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(x.swapaxes(1, 2) for x in arrays) if heads_first else arrays


def _no_float16(x: jax.Array) -> jax.Array:
    """Mosaic has no float16."""
    return x.astype(jnp.float32) if x.dtype == jnp.float16 else x
