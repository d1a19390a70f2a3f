"""Gates of MoE experts in torch: f(gate_up) and its derivative, under transformers' names.

gate_up is [..., 2i], gate half first and then up ("swiglu_oai": interleaved), or [..., i] without
a gate. In float32 or float64.
"""

from __future__ import annotations

import torch

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")

# gpt-oss, https://huggingface.co/openai/gpt-oss-20b: fixed in the model, not in its config.
OAI_ALPHA = 1.702
OAI_LIMIT = 7.0


def apply_gate(gate_up: torch.Tensor, activation: str, has_gate: bool) -> torch.Tensor:
    """[..., 2i] -> [..., i]: act(gate) * up, or act(up) without a gate."""
    if activation == "swiglu_oai":
        gate, up = _clamped(gate_up)
        return (up + 1) * gate * torch.sigmoid(OAI_ALPHA * gate)
    if not has_gate:
        return _activate(gate_up, activation)
    gate, up = gate_up.chunk(2, dim=-1)
    return _activate(gate, activation) * up


def apply_gate_backward(
    grad: torch.Tensor, gate_up: torch.Tensor, activation: str, has_gate: bool
) -> torch.Tensor:
    """Gradient of `gate_up` from the gradient of `apply_gate(gate_up)`."""
    if activation == "swiglu_oai":
        gate, up = _clamped(gate_up)
        sigmoid = torch.sigmoid(OAI_ALPHA * gate)
        grad_gate = grad * (up + 1) * sigmoid * (1 + OAI_ALPHA * gate * (1 - sigmoid))
        grad_up = grad * gate * sigmoid
        raw_gate, raw_up = gate_up[..., ::2], gate_up[..., 1::2]
        grad_gate = torch.where(raw_gate <= OAI_LIMIT, grad_gate, 0)
        grad_up = torch.where(raw_up.abs() <= OAI_LIMIT, grad_up, 0)
        return torch.stack((grad_gate, grad_up), dim=-1).flatten(-2)
    if not has_gate:
        return _activate_backward(grad, gate_up, activation)
    gate, up = gate_up.chunk(2, dim=-1)
    grad_gate = _activate_backward(grad * up, gate, activation)
    return torch.cat((grad_gate, grad * _activate(gate, activation)), dim=-1)


def _clamped(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    return gate.clamp(max=OAI_LIMIT), up.clamp(-OAI_LIMIT, OAI_LIMIT)


def _activate(x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return torch.nn.functional.silu(x)
    if activation == "relu2":
        return torch.relu(x).square()
    return torch.nn.functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _activate_backward(grad: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return torch.ops.aten.silu_backward(grad, x)
    if activation == "relu2":
        return grad * 2 * torch.relu(x)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
