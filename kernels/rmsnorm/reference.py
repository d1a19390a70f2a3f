"""RMS normalisation in plain torch: defines what is right, and is the CPU and CUDA implementation.

Statistics are float32 (float64 for float64 inputs). Each casting mode spells out the expression of
the models it stands for, in their order of operations, so that results are equal bit for bit.
Results are contiguous, as on a TPU.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(
    x: torch.Tensor,  # [..., d]
    weight: torch.Tensor | None,  # [d]
    eps: float,
    offset: float,
    casting: str,
) -> torch.Tensor:  # [..., d]
    h = x if casting == "none" else x.to(accumulation_dtype(x.dtype))
    return _cast_and_scale(_normalise(h, eps), weight, offset, casting, x.dtype).contiguous()


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    casting: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = (x + residual).contiguous()
    return rms_norm(total, weight, eps, offset, casting), total


def rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    activation: str,
    gate_first: bool,
    offset: float,
    casting: str,
) -> torch.Tensor:
    dtype = accumulation_dtype(x.dtype)
    act = _activate(gate.to(dtype), activation)
    if gate_first:
        h = x.to(dtype) * act
        h = h.to(x.dtype) if casting == "none" else h
        return _cast_and_scale(_normalise(h, eps), weight, offset, casting, x.dtype).contiguous()
    if casting == "gemma":  # rounded once, after the gate
        normed = _scale(_normalise(x.to(dtype), eps), weight, offset)
    else:
        normed = rms_norm(x, weight, eps, offset, casting)
    return (normed * act).to(x.dtype).contiguous()


def rms_norm_backward(
    grad_out: torch.Tensor,  # [..., d]
    x: torch.Tensor,  # [..., d]
    weight: torch.Tensor | None,  # [d]
    eps: float,
    offset: float,
    casting: str,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and weight; one that is not needed has shape [0]."""
    dtype = accumulation_dtype(x.dtype)
    grad_h, grad_weight = _norm_gradients(
        grad_out.to(dtype),
        x.to(dtype),
        weight,
        eps,
        offset,
        casting,
        x.dtype,
        needs_x,
        needs_weight,
    )
    return grad_h.to(x.dtype).contiguous(), grad_weight


def add_rms_norm_backward(
    grad_out: torch.Tensor,
    grad_total: torch.Tensor | None,
    total: torch.Tensor,  # x + residual
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    needs_total: bool,
    needs_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x + residual and weight; one that is not needed has shape [0]."""
    dtype = accumulation_dtype(total.dtype)
    grad_h, grad_weight = _norm_gradients(
        grad_out.to(dtype),
        total.to(dtype),
        weight,
        eps,
        offset,
        casting,
        total.dtype,
        needs_total,
        needs_weight,
    )
    if needs_total and grad_total is not None:
        grad_h = grad_h + grad_total
    return grad_h.to(total.dtype).contiguous(), grad_weight


def rms_norm_gated_backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    activation: str,
    gate_first: bool,
    offset: float,
    casting: str,
    needs_x: bool,
    needs_gate: bool,
    needs_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, gate and weight; one that is not needed has shape [0]."""
    dtype = accumulation_dtype(x.dtype)
    grad, wide, wide_gate = grad_out.to(dtype), x.to(dtype), gate.to(dtype)
    act, slope = _activate_with_slope(wide_gate, activation)
    if gate_first:
        needs_h = needs_x or needs_gate
        grad_h, grad_weight = _norm_gradients(
            grad, wide * act, weight, eps, offset, casting, x.dtype, needs_h, needs_weight
        )
        grad_x = grad_h * act if needs_x else grad_h.new_empty(0)
        grad_gate = grad_h * wide * slope if needs_gate else gate.new_empty(0)
    else:
        grad_x, grad_weight = _norm_gradients(
            grad * act, wide, weight, eps, offset, casting, x.dtype, needs_x, needs_weight
        )
        grad_gate = gate.new_empty(0)
        if needs_gate:
            normed = _cast_and_scale(_normalise(wide, eps), weight, offset, casting, x.dtype)
            grad_gate = grad * normed * slope
    return (
        grad_x.to(x.dtype).contiguous(),
        grad_gate.to(gate.dtype).contiguous(),
        grad_weight,
    )


def _normalise(h: torch.Tensor, eps: float) -> torch.Tensor:
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)


def _cast_and_scale(
    xhat: torch.Tensor,
    weight: torch.Tensor | None,
    offset: float,
    casting: str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """xhat times weight, rounded as `casting` says for inputs of `dtype`."""
    if casting == "gemma":
        return _scale(xhat, weight, offset).to(dtype)
    xhat = xhat.to(dtype)
    if weight is not None and casting == "none":
        weight = weight.to(dtype)
    if weight is not None and offset:
        weight = weight + offset
    return xhat if weight is None else weight * xhat


def _scale(xhat: torch.Tensor, weight: torch.Tensor | None, offset: float) -> torch.Tensor:
    return xhat if weight is None else xhat * (weight.to(xhat.dtype) + offset)


def _norm_gradients(
    grad: torch.Tensor,  # [..., d] in the accumulation dtype
    h: torch.Tensor,  # [..., d] what was normalised, in the accumulation dtype
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    casting: str,
    dtype: torch.dtype,
    needs_h: bool,
    needs_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    xhat = h * scale
    grad_h = h.new_empty(0)
    grad_weight = h.new_empty(0, dtype=dtype if weight is None else weight.dtype)
    if needs_h:
        grad_xhat = grad if weight is None else grad * (weight.to(h.dtype) + offset)
        grad_h = scale * (grad_xhat - xhat * (grad_xhat * xhat).mean(-1, keepdim=True))
    if needs_weight:  # the forward multiplied the rounded xhat, except in gemma's order
        factor = xhat if casting == "gemma" else xhat.to(dtype)
        grad_weight = (grad * factor).sum_to_size(weight.shape).to(weight.dtype)
    return grad_h, grad_weight


def _activate(gate: torch.Tensor, activation: str) -> torch.Tensor:
    return functional.silu(gate) if activation == "silu" else torch.sigmoid(gate)


def _activate_with_slope(gate: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    sigmoid = torch.sigmoid(gate)
    slope = sigmoid * (1 - sigmoid)
    if activation == "sigmoid":
        return sigmoid, slope
    return functional.silu(gate), sigmoid + gate * slope
