"""Attention written out in float64, differentiable: the oracle of the attention tests."""

from __future__ import annotations

import math

import torch


def oracle(
    q: torch.Tensor,  # [b, sq, hq, d]
    k: torch.Tensor,  # [b, sk, hkv, d]
    v: torch.Tensor,  # [b, sk, hkv, dv]
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float | None = 0.0,
    sinks: torch.Tensor | None = None,
    q_segment_ids: torch.Tensor | None = None,
    kv_segment_ids: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # [b, sq, hq, dv], [b, hq, sq], both float64
    """(out, lse), the matrix of every batch element and head on its own."""
    (b, sq, hq, d), sk = q.shape, k.shape[1]
    group = hq // k.shape[2]
    scale = 1 / math.sqrt(d) if softmax_scale is None else softmax_scale
    seen = torch.ones(b, hq, sq, sk, dtype=torch.bool)
    if mask is not None:
        seen &= mask
    left, right = (math.inf if side in (None, -1) else side for side in window_size)
    for n in range(b):
        length = sk if kv_lengths is None else int(kv_lengths[n])
        offset = torch.arange(sk)[None] - (torch.arange(sq)[:, None] + length - sq)  # key - query
        seen[n] &= (torch.arange(sk) < length) & (offset >= -left) & (offset <= right)
        if causal:
            seen[n] &= offset <= 0
        if q_segment_ids is not None:
            seen[n] &= q_segment_ids[n, :, None] == kv_segment_ids[n]
    out, lse = [], []
    for n in range(b):
        for h in range(hq):
            key, value = (x[n, :, h // group].double() for x in (k, v))
            key, value = _hide(key, seen[n, h]), _hide(value, seen[n, h])
            logits = q[n, :, h].double() @ key.T * scale
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            logits = logits.masked_fill(~seen[n, h], -torch.inf)
            if sinks is not None:
                logits = torch.cat([logits, sinks[h].double().expand(sq, 1)], 1)
            is_empty = ~seen[n, h].any(1, keepdim=True)
            norm = torch.logsumexp(logits.masked_fill(is_empty, 0.0), 1, keepdim=True)
            p = torch.exp(logits - norm).masked_fill(is_empty, 0)[:, :sk]
            out.append(p @ value)
            lse.append(norm.masked_fill(is_empty, -torch.inf)[:, 0])
    if not out:
        return q.new_zeros((b, sq, hq, v.shape[3])).double(), q.new_zeros((b, hq, sq)).double()
    return (
        torch.stack(out).unflatten(0, (b, hq)).transpose(1, 2),
        torch.stack(lse).unflatten(0, (b, hq)),
    )


def _hide(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Rows that no query sees may hold anything."""
    return x.masked_fill(~seen.any(0)[:, None], 0)


def gradients(out: torch.Tensor, grad_out: torch.Tensor, inputs: list[torch.Tensor]):
    """Gradients of sum(out * grad_out), zeros for inputs that do not take part."""
    grads = torch.autograd.grad(out, inputs, grad_out.to(out.dtype), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]
