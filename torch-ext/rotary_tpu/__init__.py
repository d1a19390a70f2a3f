"""Rotary embedding for PyTorch on TPU, alone or after the q/k norm, with a backward."""

from . import layers
from .kernels.rotary.ops import apply_rotary, apply_rotary_transformers, qk_norm_rotary

__all__ = ["apply_rotary", "apply_rotary_transformers", "layers", "qk_norm_rotary"]
