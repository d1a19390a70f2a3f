"""Layers for `kernelize`: pure modules that take the place of the model's own forward."""

from __future__ import annotations

import torch
from torch import nn

from .kernels.rotary.ops import apply_rotary_transformers as _apply_rotary_transformers


class apply_rotary_transformers(nn.Module):  # noqa: N801  (the name that users map)
    """Hook "rotary_pos_emb" of transformers: rotate-half rotary embedding of q and k."""

    has_backward = True
    can_torch_compile = True

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return _apply_rotary_transformers(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


__all__ = ["apply_rotary_transformers"]
