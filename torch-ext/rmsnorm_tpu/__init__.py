"""RMS normalisation for PyTorch on TPU: plain, with residual, gated; trainable, with a CPU path."""

from . import layers
from .kernels.rmsnorm.ops import add_rms_norm, rms_norm, rms_norm_gated

__all__ = ["add_rms_norm", "layers", "rms_norm", "rms_norm_gated"]
