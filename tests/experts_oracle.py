"""The activations of an expert layer by torch's own functions, in the dtype of the input."""

from __future__ import annotations

import torch
from cases import ExpertsCase


def gate(z: torch.Tensor, case: ExpertsCase) -> torch.Tensor:
    """The activation of an expert layer, of z [rows, 2i] or, ungated, [rows, i]."""
    if case.activation == "swiglu_oai":
        linear, up = z[:, ::2].clamp(max=7.0), z[:, 1::2].clamp(-7.0, 7.0)
        return (up + 1) * linear * torch.sigmoid(1.702 * linear)
    activate = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu2": lambda x: torch.relu(x) ** 2,
    }[case.activation]
    if not case.has_gate:
        return activate(z)
    linear, up = z.chunk(2, dim=-1)
    return activate(linear) * up
