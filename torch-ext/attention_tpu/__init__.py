"""Flash attention for PyTorch on TPU: every mask, trainable, with a CPU reference."""

from .kernels.flash_attention.ops import flash_attention
from .kernels.flash_attention.packed import flash_attention_packed
from .kernels.flash_attention.transformers import flash_attn_forward, supports_flash_attn

__all__ = [
    "flash_attention",
    "flash_attention_packed",
    "flash_attn_forward",
    "supports_flash_attn",
]
