"""Rotary embedding and per-head RMSNorm in plain torch: what is right, on any device.

Arguments as in the torch schemas of ops.py. Computes in float32 (float64 for float64) and rounds
once, except where `casting` rounds in between.
"""

from __future__ import annotations

import torch


def apply_rotary(q, k, cos, sin, head_axis, interleaved, half_width):
    """(q, k) rotated; a tensor of shape [0] for a k that is None."""
    tables = _tables(q, cos, sin, head_axis, interleaved, half_width)
    rotated_q = _rotate(q, *tables, interleaved)
    return rotated_q, q.new_empty(0) if k is None else _rotate(k, *tables, interleaved)


def apply_rotary_backward(grad_q, grad_k, cos, sin, head_axis, interleaved, half_width):
    """Gradients of q and k; a tensor of shape [0] for one whose upstream gradient is None."""
    some = grad_k if grad_q is None else grad_q
    tables = _tables(some, cos, sin, head_axis, interleaved, half_width)
    return tuple(
        some.new_empty(0) if grad is None else _rotate_back(grad, *tables, interleaved)
        for grad in (grad_q, grad_k)
    )


def qk_norm_rotary(
    q, k, q_weight, k_weight, cos, sin, eps, offset, casting, head_axis, interleaved, half_width
):
    normed_q, normed_k = (
        None if x is None else _rms_norm(x, weight, eps, offset, casting)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    rotation = (cos, sin, head_axis, interleaved, half_width)
    rotated_q, _ = apply_rotary(normed_q, None, *rotation)
    if k is None:
        return rotated_q, q.new_empty(0)
    return rotated_q, apply_rotary(normed_k, None, *rotation)[0]


def qk_norm_rotary_backward(
    grad_q,
    grad_k,
    q,
    k,
    q_weight,
    k_weight,
    cos,
    sin,
    eps,
    offset,
    casting,
    head_axis,
    interleaved,
    half_width,
    needs_q,
    needs_k,
    needs_q_weight,
    needs_k_weight,
):
    """Gradients of q, k, q_weight, k_weight; one that is not needed has shape [0]."""
    found = [q.new_empty(0) for _ in range(4)]
    sides = (
        (grad_q, q, q_weight, needs_q, needs_q_weight),
        (grad_k, k, k_weight, needs_k, needs_k_weight),
    )
    for i, (grad, x, weight, needs_x, needs_weight) in enumerate(sides):
        if not (needs_x or needs_weight):
            continue
        wide = _wide_dtype(x)
        tables = _tables(x, cos, sin, head_axis, interleaved, half_width)
        normed_grad = _rotate_back(grad.to(wide), *tables, interleaved)
        grad_x, grad_weight = _rms_norm_backward(normed_grad, x, weight, eps, offset, casting)
        if needs_x:
            found[i] = grad_x.to(x.dtype).contiguous()
        if needs_weight:
            found[2 + i] = grad_weight.to(weight.dtype)
    return tuple(found)


def _wide_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _tables(x, cos, sin, head_axis, interleaved, half_width):
    """Full-width tables that broadcast against x[..., :rotary_dim], in the wide dtype."""
    wide = _wide_dtype(x)
    tables = []
    for table in (cos, sin):
        table = table.to(wide).unsqueeze(head_axis)
        if half_width:
            table = table.repeat_interleave(2, -1) if interleaved else torch.cat([table, table], -1)
        tables.append(table)
    return tables


def _rotate_half(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _rotate(x, cos, sin, interleaved):
    turning, still = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    wide = turning.to(cos.dtype)
    out = wide * cos + _rotate_half(wide, interleaved) * sin
    return torch.cat([out.to(x.dtype), still], -1).contiguous()


def _rotate_back(grad, cos, sin, interleaved):
    """The transpose of `_rotate`; rotate_half transposed is its negative."""
    turning, still = grad[..., : cos.shape[-1]], grad[..., cos.shape[-1] :]
    wide = turning.to(cos.dtype)
    out = wide * cos - _rotate_half(wide * sin, interleaved)
    return torch.cat([out.to(grad.dtype), still], -1).contiguous()


def _rms_norm(x, weight, eps, offset, casting):
    if casting == "none":
        xhat = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return xhat if weight is None else xhat * (weight.to(x.dtype) + offset)
    wide = x.to(_wide_dtype(x))
    xhat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return xhat.to(x.dtype)
    if casting == "gemma":
        return (xhat * (weight.to(wide.dtype) + offset)).to(x.dtype)
    return (weight + offset if offset else weight) * xhat.to(x.dtype)


def _rms_norm_backward(grad, x, weight, eps, offset, casting):
    """grad: of the normed x, in the wide dtype. Roundings of the forward count as the identity."""
    wide = x.to(grad.dtype)
    if casting == "none":
        rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps).to(grad.dtype)
    else:
        rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    xhat = wide * rstd
    grad_weight = None
    if weight is not None:
        seen = xhat if casting == "gemma" else xhat.to(x.dtype).to(grad.dtype)
        grad_weight = (grad * seen).reshape(-1, x.shape[-1]).sum(0)
        grad = grad * scale(weight, offset, casting, x.dtype).to(grad.dtype)
    return rstd * (grad - xhat * (grad * xhat).mean(-1, keepdim=True)), grad_weight


def scale(weight, offset, casting, dtype):
    """weight + offset, in the dtype that `casting` adds them in."""
    if casting == "gemma":
        return weight.to(torch.promote_types(weight.dtype, torch.float32)) + offset
    if casting == "none":
        weight = weight.to(dtype)
    return weight + offset if offset else weight
