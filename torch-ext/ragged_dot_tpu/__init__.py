"""Grouped matmul and MoE experts for PyTorch on TPU, trainable, with a CPU reference."""

from .kernels.moe_experts.ops import moe_experts
from .kernels.moe_experts.transformers import experts_forward
from .kernels.ragged_dot.ops import ragged_dot
from .kernels.ragged_dot.quantized import dequantize_experts, quantize_experts

__all__ = [
    "dequantize_experts",
    "experts_forward",
    "moe_experts",
    "quantize_experts",
    "ragged_dot",
]
