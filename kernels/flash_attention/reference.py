"""Attention in plain torch: defines what is right, and is the CPU and CUDA implementation.

Everything is computed in float32 (float64 for float64 inputs) and rounded once. Queries are taken
in chunks, so the full matrix of logits never exists. A key that a query does not see is selected
away, never multiplied by zero: a NaN there reaches neither outputs nor gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

_CHUNK_LOGITS = 1 << 24  # logits that exist at a time


@dataclass(frozen=True)
class Masking:
    """Everything that decides which keys a query sees, and how its logits are made."""

    causal: bool
    window_left: int  # -1: unlimited
    window_right: int
    softmax_scale: float
    softcap: float  # 0: off
    q_segment_ids: torch.Tensor | None = None  # [b, sq]
    kv_segment_ids: torch.Tensor | None = None  # [b, sk]
    mask: torch.Tensor | None = None  # [b or 1, hq or 1, sq or 1, sk or 1]
    kv_lengths: torch.Tensor | None = None  # [b]

    def visible(
        self, start: int, stop: int, sq: int, sk: int, hkv: int, device: torch.device
    ) -> torch.Tensor:  # [b or 1, hkv or 1, g or 1, c, sk]
        """Which keys the queries start .. stop - 1 see."""
        key = torch.arange(sk, device=device)
        last = torch.full((1, 1), sk, device=device)
        if self.kv_lengths is not None:
            last = self.kv_lengths.long().clamp(0, sk)[:, None]
        # Bottom-right: the last query stands at the last key.
        query = (last - sq + torch.arange(start, stop, device=device))[:, :, None]  # [b or 1, c, 1]
        seen = (key < last[:, :, None]).expand(-1, stop - start, -1)
        if self.causal:
            seen = seen & (key <= query)
        if self.window_left >= 0:
            seen = seen & (key >= query - self.window_left)
        if self.window_right >= 0:
            seen = seen & (key <= query + self.window_right)
        if self.q_segment_ids is not None:
            ids = self.q_segment_ids[:, start:stop, None]
            seen = seen & (ids == self.kv_segment_ids[:, None, :])
        seen = seen[:, None, None]
        if self.mask is not None:
            rows = self.mask if self.mask.shape[2] == 1 else self.mask[:, :, start:stop]
            heads = (1, 1) if self.mask.shape[1] == 1 else (hkv, -1)
            seen = seen & rows.unflatten(1, heads)
        return seen


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _grouped(x: torch.Tensor, hkv: int, heads_first: bool) -> torch.Tensor:
    """[b, hkv, g, s, d] in the accumulation dtype, g query heads per key head."""
    x = x if heads_first else x.transpose(1, 2)
    return x.unflatten(1, (hkv, x.shape[1] // hkv)).to(_accumulation_dtype(x.dtype))


def _ungrouped(x: torch.Tensor, heads_first: bool, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `_grouped`, as a contiguous tensor."""
    x = x.flatten(1, 2)
    return (x if heads_first else x.transpose(1, 2)).to(dtype).contiguous()


def _chunks(sq: int, logits_per_row: int) -> Iterator[tuple[int, int]]:
    size = max(1, _CHUNK_LOGITS // max(1, logits_per_row))
    for start in range(0, sq, size):
        yield start, min(start + size, sq)


def _sum_visible(
    weights: torch.Tensor,  # [..., m, n], zero where not visible
    visible: torch.Tensor,  # broadcastable to weights
    values: torch.Tensor,  # [..., n, d]
) -> torch.Tensor:  # [..., m, d]
    """weights @ values, but a NaN or infinity in values reaches only the rows that see it."""
    is_bad = ~values.isfinite().all(-1)  # [..., n]
    bad = is_bad.flatten(0, -2).any(0).nonzero()[:, 0]
    if len(bad) == 0:
        return weights @ values
    total = weights @ values.index_fill(-2, bad, 0)
    for n in bad.tolist():
        product = weights[..., :, n, None] * values[..., n, None, :]
        total += product.masked_fill_(~visible[..., :, n, None], 0)
    return total


@dataclass(frozen=True)
class Softmax:
    p: torch.Tensor  # [b, hkv, g, c, sk], exactly zero where not visible
    p_sink: torch.Tensor | None  # [b, hkv, g, c, 1]
    lse: torch.Tensor  # [b, hkv, g, c, 1]
    slope: torch.Tensor | float  # derivative of the soft cap


def _softmax(
    q: torch.Tensor,  # [b, hkv, g, c, d]
    k: torch.Tensor,  # [b, hkv, 1, sk, d]
    sinks: torch.Tensor | None,  # [hkv, g, 1, 1]
    visible: torch.Tensor,
    masking: Masking,
) -> Softmax:
    logits, slope = (q @ k.mT) * masking.softmax_scale, 1.0
    if masking.softcap:
        squashed = torch.tanh(logits / masking.softcap)
        logits, slope = masking.softcap * squashed, 1 - squashed * squashed
    logits = logits.masked_fill(~visible, -torch.inf)
    top = logits.new_full((*logits.shape[:-1], 1), -torch.inf)
    if logits.shape[-1] > 0:
        top = logits.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks)
    top = top.masked_fill(top == -torch.inf, 0)
    p = torch.exp(logits - top).masked_fill(~visible, 0)
    total, p_sink = p.sum(-1, keepdim=True), None
    if sinks is not None:
        p_sink = torch.exp(sinks - top)
        total = total + p_sink
    sees_a_key = visible.any(-1, keepdim=True)
    lse = (top + torch.log(total)).masked_fill(~sees_a_key, -torch.inf)
    if p_sink is not None:
        p_sink = (p_sink / total).masked_fill(~sees_a_key, 0)
    return Softmax((p / total).masked_fill(~visible, 0), p_sink, lse, slope)


def flash_attention(
    q: torch.Tensor,  # [b, sq, hq, d], [b, hq, sq, d] if heads_first
    k: torch.Tensor,  # [b, sk, hkv, d], [b, hkv, sk, d]
    v: torch.Tensor,  # [b, sk, hkv, dv], [b, hkv, sk, dv]
    sinks: torch.Tensor | None,  # [hq]
    q_segment_ids: torch.Tensor | None,  # [b, sq]
    kv_segment_ids: torch.Tensor | None,  # [b, sk]
    mask: torch.Tensor | None,  # [b or 1, hq or 1, sq or 1, sk or 1]
    kv_lengths: torch.Tensor | None,  # [b]
    causal: bool,
    window_left: int,
    window_right: int,
    softmax_scale: float,
    softcap: float,
    heads_first: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # [b, sq, hq, dv], [b, hq, sq]
    masking = Masking(
        causal,
        window_left,
        window_right,
        softmax_scale,
        softcap,
        q_segment_ids,
        kv_segment_ids,
        mask,
        kv_lengths,
    )
    hkv = k.shape[1 if heads_first else 2]
    wide_q, wide_k, wide_v = (_grouped(x, hkv, heads_first) for x in (q, k, v))
    b, _, g, sq, _ = wide_q.shape
    sk = wide_k.shape[3]
    wide_sinks = _grouped_sinks(sinks, hkv, wide_q.dtype)
    out = wide_q.new_empty((b, hkv, g, sq, wide_v.shape[-1]))
    lse = wide_q.new_empty((b, hkv, g, sq, 1))
    for start, stop in _chunks(sq, b * hkv * g * sk):
        visible = masking.visible(start, stop, sq, sk, hkv, q.device)
        rows = wide_q[..., start:stop, :]
        softmax = _softmax(rows, wide_k, wide_sinks, visible, masking)
        lse[..., start:stop, :] = softmax.lse
        out[..., start:stop, :] = _sum_visible(softmax.p, visible, wide_v)
    return _ungrouped(out, False, q.dtype), lse[..., 0].flatten(1, 2).float()


def flash_attention_backward(
    grad_out: torch.Tensor,  # [b, sq, hq, dv]
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,  # [b, sq, hq, dv]
    lse: torch.Tensor,  # [b, hq, sq]
    sinks: torch.Tensor | None,
    q_segment_ids: torch.Tensor | None,
    kv_segment_ids: torch.Tensor | None,
    mask: torch.Tensor | None,
    kv_lengths: torch.Tensor | None,
    causal: bool,
    window_left: int,
    window_right: int,
    softmax_scale: float,
    softcap: float,
    heads_first: bool,
    needs_q: bool,
    needs_kv: bool,
    needs_sinks: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v and sinks; one that is not needed has shape [0]."""
    del out, lse  # rounded: recomputed here
    masking = Masking(
        causal,
        window_left,
        window_right,
        softmax_scale,
        softcap,
        q_segment_ids,
        kv_segment_ids,
        mask,
        kv_lengths,
    )
    hkv = k.shape[1 if heads_first else 2]
    wide_q, wide_k, wide_v = (_grouped(x, hkv, heads_first) for x in (q, k, v))
    grad = _grouped(grad_out, hkv, False)
    b, _, g, sq, _ = wide_q.shape
    sk = wide_k.shape[3]
    wide_sinks = _grouped_sinks(sinks, hkv, wide_q.dtype)
    dq, dk, dv = (torch.zeros_like(x) for x in (wide_q, wide_k, wide_v))
    dsinks = wide_q.new_zeros((hkv, g))
    for start, stop in _chunks(sq, b * hkv * g * sk):
        visible = masking.visible(start, stop, sq, sk, hkv, q.device)
        rows, grad_rows = wide_q[..., start:stop, :], grad[..., start:stop, :]
        softmax = _softmax(rows, wide_k, wide_sinks, visible, masking)
        dp = (grad_rows @ wide_v.mT).masked_fill(~visible, 0)
        delta = (softmax.p * dp).sum(-1, keepdim=True)
        ds = softmax.p * (dp - delta) * softmax.slope * softmax_scale
        ds = ds.masked_fill(~visible, 0)
        if needs_q:
            dq[..., start:stop, :] = _sum_visible(ds, visible, wide_k)
        if needs_kv:
            dk += _sum_visible(ds.mT, visible.mT, rows).sum(2, keepdim=True)
            dv += _sum_visible(softmax.p.mT, visible.mT, grad_rows).sum(2, keepdim=True)
        if needs_sinks:
            # A row that sees nothing has p_sink = 0, and its delta is 0 whatever grad_out holds.
            dsinks -= (softmax.p_sink * delta).sum((0, 3, 4))
    nothing = q.new_empty(0)
    return (
        _ungrouped(dq, heads_first, q.dtype) if needs_q else nothing,
        _ungrouped(dk, heads_first, k.dtype) if needs_kv else nothing.clone(),
        _ungrouped(dv, heads_first, v.dtype) if needs_kv else nothing.clone(),
        dsinks.flatten().to(sinks.dtype) if needs_sinks else nothing.clone(),
    )


def _grouped_sinks(
    sinks: torch.Tensor | None, hkv: int, dtype: torch.dtype
) -> torch.Tensor | None:  # [hkv, g, 1, 1]
    return None if sinks is None else sinks.to(dtype).reshape(hkv, -1, 1, 1)
