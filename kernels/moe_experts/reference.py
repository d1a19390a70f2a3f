"""The MoE experts layer in plain torch: defines what is right, and is the CPU implementation.

One expert at a time, everything in float32 (float64 for float64 inputs), rounded once at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..ragged_dot import quantized
from ..ragged_dot.reference import accumulation_dtype
from .gates import apply_gate, apply_gate_backward


def _routes(
    top_k_index: torch.Tensor, num_experts: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """(expert, tokens, slots) for every expert that some token chose."""
    for expert in top_k_index.unique().tolist():
        if 0 <= expert < num_experts:
            tokens, slots = torch.where(top_k_index == expert)
            yield expert, tokens, slots


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    out = x @ (weight if transposed else weight.T)
    return out if bias is None else out + bias


def _weight(
    projection: torch.Tensor,  # of all experts, as stored
    scale: torch.Tensor | None,
    e: int,
    transposed: bool,
    dtype: torch.dtype,
) -> torch.Tensor:  # [n, k], [k, n] if transposed
    if scale is None:
        return projection[e].to(dtype)
    return quantized.dequantise(projection[e], scale[e], not transposed, dtype)


def moe_experts_quantized(
    hidden_states: torch.Tensor,  # [t, h]
    top_k_index: torch.Tensor,  # [t, topk]
    top_k_weights: torch.Tensor,  # [t, topk]
    gate_up_proj: torch.Tensor,  # [e, 2i, h], [e, h, 2i] if transposed
    down_proj: torch.Tensor,  # [e, h, i], [e, i, h] if transposed
    gate_up_bias: torch.Tensor | None,  # [e, 2i]
    down_bias: torch.Tensor | None,  # [e, h]
    gate_up_scale: torch.Tensor | None,  # [e, 2i] or [e, k_blocks, 2i]
    down_scale: torch.Tensor | None,  # [e, h] or [e, k_blocks, h]
    activation: str,
    transposed: bool,
    has_gate: bool,
    num_experts: int,
) -> torch.Tensor:  # [t, h]
    dtype = accumulation_dtype(hidden_states.dtype)
    out = hidden_states.new_zeros(hidden_states.shape, dtype=dtype)
    for e, tokens, slots in _routes(top_k_index, num_experts):
        bias = None if gate_up_bias is None else gate_up_bias[e].to(dtype)
        x = hidden_states[tokens].to(dtype)
        w1 = _weight(gate_up_proj, gate_up_scale, e, transposed, dtype)
        gate_up = _linear(x, w1, bias, transposed)
        act = apply_gate(gate_up, activation, has_gate)
        bias = None if down_bias is None else down_bias[e].to(dtype)
        w2 = _weight(down_proj, down_scale, e, transposed, dtype)
        y = _linear(act, w2, bias, transposed)
        out.index_add_(0, tokens, y * top_k_weights[tokens, slots, None].to(dtype))
    return out.to(hidden_states.dtype)


def moe_experts_quantized_backward(
    grad_out: torch.Tensor,  # [t, h]
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    gate_up_scale: torch.Tensor | None,
    down_scale: torch.Tensor | None,
    activation: str,
    transposed: bool,
    has_gate: bool,
    num_experts: int,
    *needs: bool,
) -> tuple[torch.Tensor, ...]:
    """Gradients of hidden_states, top_k_weights, gate_up_proj, down_proj and the two biases.

    `needs` says which; one that is not needed has shape [0].
    """
    dtype = accumulation_dtype(hidden_states.dtype)
    inputs = (hidden_states, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias)
    grads = [
        x.new_zeros(x.shape, dtype=dtype if position == 0 else x.dtype)
        if needed
        else hidden_states.new_empty(0)
        for position, (x, needed) in enumerate(zip(inputs, needs, strict=True))
    ]
    for e, tokens, slots in _routes(top_k_index, num_experts):
        w1 = _weight(gate_up_proj, gate_up_scale, e, transposed, dtype)
        w2 = _weight(down_proj, down_scale, e, transposed, dtype)
        b1 = None if gate_up_bias is None else gate_up_bias[e].to(dtype)
        b2 = None if down_bias is None else down_bias[e].to(dtype)
        x, grad = hidden_states[tokens].to(dtype), grad_out[tokens].to(dtype)
        gate_up = _linear(x, w1, b1, transposed)
        act = apply_gate(gate_up, activation, has_gate)
        if needs[1]:
            y = _linear(act, w2, b2, transposed)
            grads[1][tokens, slots] = (grad * y).sum(-1).to(grads[1].dtype)
        grad_y = grad * top_k_weights[tokens, slots, None].to(dtype)
        grad_act = _linear(grad_y, w2, None, not transposed)
        grad_gate_up = apply_gate_backward(grad_act, gate_up, activation, has_gate)
        if needs[0]:
            grads[0].index_add_(0, tokens, _linear(grad_gate_up, w1, None, not transposed))
        if needs[2]:
            grads[2][e] = x.T @ grad_gate_up if transposed else grad_gate_up.T @ x
        if needs[3]:
            grads[3][e] = act.T @ grad_y if transposed else grad_y.T @ act
        if needs[4]:
            grads[4][e] = grad_gate_up.sum(0)
        if needs[5]:
            grads[5][e] = grad_y.sum(0)
    grads[0] = grads[0].to(hidden_states.dtype)
    return tuple(grads)


def moe_experts(*args) -> torch.Tensor:
    """As `moe_experts_quantized`, without scales."""
    return moe_experts_quantized(*args[:7], None, None, *args[7:])


def moe_experts_backward(grad_out: torch.Tensor, *args) -> tuple[torch.Tensor, ...]:
    return moe_experts_quantized_backward(grad_out, *args[:7], None, None, *args[7:])
