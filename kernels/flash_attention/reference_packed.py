"""Packed attention in plain torch: the dense reference, one sequence after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from . import reference


def _sequences(
    cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, t: int, tk: int
) -> Iterator[tuple[slice, slice]]:
    """(rows of q, rows of k and v) of every sequence with queries.

    Ends that break the contract are clipped to the rows there are, as on the TPU.
    """
    ends_q = [min(max(end, 0), t) for end in cu_seqlens_q.tolist()]
    ends_k = [min(max(end, 0), tk) for end in cu_seqlens_k.tolist()]
    for i in range(len(ends_q) - 1):
        if ends_q[i] < ends_q[i + 1]:
            yield slice(*ends_q[i : i + 2]), slice(ends_k[i], max(ends_k[i : i + 2]))


def flash_attention_packed(
    q: torch.Tensor,  # [t, hq, d]
    k: torch.Tensor,  # [tk, hkv, d]
    v: torch.Tensor,  # [tk, hkv, dv]
    sinks: torch.Tensor | None,  # [hq]
    cu_seqlens_q: torch.Tensor,  # [number of sequences + 1]
    cu_seqlens_k: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # [t, hq, dv], [hq, t]
    """options: causal, window_left, window_right, softmax_scale, softcap."""
    (t, hq, _), tk, dv = q.shape, k.shape[0], v.shape[2]
    out = q.new_zeros((t, hq, dv))
    lse = q.new_full((hq, t), -torch.inf, dtype=torch.float32)
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k, t, tk):
        of_sequence = reference.flash_attention(
            q[None, rows], k[None, keys], v[None, keys], sinks, *(None,) * 4, *options, False
        )
        out[rows], lse[:, rows] = (x[0] for x in of_sequence)
    return out, lse


def flash_attention_packed_backward(
    grad_out: torch.Tensor,  # [t, hq, dv]
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,  # [t, hq, dv]
    lse: torch.Tensor,  # [hq, t]
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v and sinks; one that is not needed has shape [0].

    options: as in the forward, then needs_q, needs_kv, needs_sinks.
    """
    *options, needs_q, needs_kv, needs_sinks = options
    needs = (needs_q, needs_kv, needs_sinks)
    dq = q.new_zeros(q.shape if needs_q else (0,))
    dk, dv = (x.new_zeros(x.shape if needs_kv else (0,)) for x in (k, v))
    wide_sinks = None
    if sinks is not None:  # their gradient is summed over sequences before it is rounded
        wide_sinks = sinks.to(torch.promote_types(sinks.dtype, torch.float32))
    dsinks = wide_sinks.new_zeros(sinks.shape) if needs_sinks else q.new_empty(0)
    for rows, keys in _sequences(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0]):
        grads = reference.flash_attention_backward(
            grad_out[None, rows],
            q[None, rows],
            k[None, keys],
            v[None, keys],
            out[None, rows],
            lse[None, :, rows],
            wide_sinks,
            *(None,) * 4,
            *options,
            False,
            *needs,
        )
        if needs_q:
            dq[rows] = grads[0][0]
        if needs_kv:
            dk[keys], dv[keys] = grads[1][0], grads[2][0]
        if needs_sinks:
            dsinks += grads[3]
    return dq, dk, dv, dsinks.to(sinks.dtype) if needs_sinks else dsinks
