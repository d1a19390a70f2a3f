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
    q, k, v = _heads_last(heads_first, q, k, v)
    (b, sq, hq, _), sk, dv = q.shape, k.shape[1], v.shape[3]
    if 0 in (b, sq, sk):
        return jnp.zeros((b, sq, hq, dv), q.dtype), jnp.full((b, hq, sq), -jnp.inf)
    out, lse = flash_attention_fwd(
        *_kernel_dtype(q, k, v),
        **_masks(sinks, q_segment_ids, kv_segment_ids, mask, kv_lengths, sq, sk),
        causal=causal,
        window=(window_left, window_right),
        softmax_scale=softmax_scale,
        softcap=softcap,
        chip=chip,
        interpret=interpret,
    )
    return out.astype(q.dtype), lse


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
    like = (q, k, v)
    q, k, v = _heads_last(heads_first, q, k, v)
    b, sq, sk = q.shape[0], q.shape[1], k.shape[1]
    if 0 in (b, sq, sk):
        return _zero_gradients(*like, sinks, needs_q, needs_kv, needs_sinks)
    dq, dk, dv, dsinks = _backward_kernel()(
        *_kernel_dtype(q, k, v, out, grad_out, lse=lse),
        **_masks(sinks, q_segment_ids, kv_segment_ids, mask, kv_lengths, sq, sk),
        causal=causal,
        window=(window_left, window_right),
        softmax_scale=softmax_scale,
        softcap=softcap,
        needs_q=needs_q,
        needs_kv=needs_kv,
        needs_sinks=needs_sinks,
        chip=chip,
        interpret=interpret,
    )
    if needs_q:
        (dq,) = _heads_last(heads_first, dq)  # the swap is its own inverse
    if needs_kv:
        dk, dv = _heads_last(heads_first, dk, dv)
    dtype = q.dtype
    dsinks = dsinks.astype(sinks.dtype if needs_sinks else dtype)
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype), dsinks


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
    (t, hq, _), tk, dv = q.shape, k.shape[0], v.shape[2]
    if 0 in (t, tk):
        return jnp.zeros((t, hq, dv), q.dtype), jnp.full((hq, t), -jnp.inf)
    out, lse = flash_attention_fwd(
        *_kernel_dtype(*_batch_of_one(q, k, v)),
        sinks=_wide(sinks),
        **packed_ids(cu_seqlens_q, cu_seqlens_k, t, tk),
        causal=causal,
        window=(window_left, window_right),
        softmax_scale=softmax_scale,
        softcap=softcap,
        chip=chip,
        interpret=interpret,
    )
    return out[0].astype(q.dtype), lse[0]


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
    t, tk, dtype = q.shape[0], k.shape[0], q.dtype
    if 0 in (t, tk):
        return _zero_gradients(q, k, v, sinks, needs_q, needs_kv, needs_sinks)
    q, k, v, out, grad_out, lse = _batch_of_one(q, k, v, out, grad_out, lse)
    dq, dk, dv, dsinks = _backward_kernel()(
        *_kernel_dtype(q, k, v, out, grad_out, lse=lse),
        sinks=_wide(sinks),
        **packed_ids(cu_seqlens_q, cu_seqlens_k, t, tk),
        causal=causal,
        window=(window_left, window_right),
        softmax_scale=softmax_scale,
        softcap=softcap,
        needs_q=needs_q,
        needs_kv=needs_kv,
        needs_sinks=needs_sinks,
        chip=chip,
        interpret=interpret,
    )
    if needs_q:
        dq = dq[0]
    if needs_kv:
        dk, dv = dk[0], dv[0]
    dsinks = dsinks.astype(sinks.dtype if needs_sinks else dtype)
    return dq.astype(dtype), dk.astype(dtype), dv.astype(dtype), dsinks


def packed_ids(
    cu_seqlens_q: jax.Array, cu_seqlens_k: jax.Array, t: int, tk: int
) -> dict[str, jax.Array]:
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


def _masks(
    sinks: jax.Array | None,
    q_segment_ids: jax.Array | None,
    kv_segment_ids: jax.Array | None,
    mask: jax.Array | None,
    kv_lengths: jax.Array | None,
    sq: int,
    sk: int,
) -> dict[str, jax.Array | None]:
    """The tensor keywords of the kernels."""
    if mask is not None:
        mask = jnp.broadcast_to(mask, (*mask.shape[:2], sq, sk))
    if kv_lengths is not None:
        kv_lengths = jnp.clip(kv_lengths, 0, sk)
    return {
        "sinks": _wide(sinks),
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "mask": mask,
        "kv_lengths": kv_lengths,
    }


def _wide(sinks: jax.Array | None) -> jax.Array | None:
    return None if sinks is None else sinks.astype(jnp.float32)


def _heads_last(heads_first: bool, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(x.swapaxes(1, 2) for x in arrays) if heads_first else arrays


def _batch_of_one(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(x[None] for x in arrays)


def _kernel_dtype(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array | None = None,
    grad_out: jax.Array | None = None,
    *,
    lse: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """The arrays in the order of the kernels, with float16 as float32: Mosaic has no float16."""
    arrays = (q, k, v) if lse is None else (q, k, v, out, lse, grad_out)
    return tuple(x.astype(jnp.float32) if x.dtype == jnp.float16 else x for x in arrays)


def _zero_gradients(q, k, v, sinks, needs_q, needs_kv, needs_sinks) -> tuple[jax.Array, ...]:
    """No query, no key or no batch: nothing has a gradient."""
    return (
        jnp.zeros(q.shape if needs_q else (0,), q.dtype),
        jnp.zeros(k.shape if needs_kv else (0,), k.dtype),
        jnp.zeros(v.shape if needs_kv else (0,), v.dtype),
        jnp.zeros(sinks.shape, sinks.dtype) if needs_sinks else jnp.zeros((0,), q.dtype),
    )


def _backward_kernel() -> Any:
    from .kernel_bwd import flash_attention_bwd

    return flash_attention_bwd
