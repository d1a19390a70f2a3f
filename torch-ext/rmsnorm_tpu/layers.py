"""Layers that `kernels.kernelize` puts in the place of a model's own RMSNorm classes.

They hold no state: `weight`, `variance_epsilon` and the like are those of the module they serve.
"""

from __future__ import annotations

import torch
from torch import nn

from .kernels.rmsnorm.ops import rms_norm, rms_norm_gated


class RMSNorm(nn.Module):
    """weight * xhat.to(dtype): Llama, Mistral, Qwen3, DeepSeek-V3, Mixtral and most others."""

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class RMSNormFp32Weight(nn.Module):
    """(weight * xhat).to(dtype): gpt-oss, OLMo 2 and 3, DeepSeek-V4, Nemotron-H."""

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, casting="gemma")


class RMSNormZeroCentered(nn.Module):
    """((1 + weight) * xhat).to(dtype): Qwen3.5."""

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, offset=1.0, casting="gemma")


class RMSNormGated(nn.Module):
    """rms_norm(hidden_states) * act(gate): the linear attention of Qwen3-Next, Kimi-Linear, ...

    With "silu" the norm is rounded before it is gated (Qwen3-Next, Qwen3.5, OLMo hybrid), with
    "sigmoid" the product is rounded once (Kimi-Linear, GLM-5, Bailing hybrid): that is how the
    models that use them do it.
    """

    has_backward = True
    can_torch_compile = True

    weight: torch.Tensor
    variance_epsilon: float
    activation: str

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return rms_norm_gated(
            hidden_states,
            gate,
            self.weight,
            self.variance_epsilon,
            activation=self.activation,
            casting="gemma" if self.activation == "sigmoid" else "llama",
        )
