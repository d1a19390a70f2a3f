"""What is static when a rotary kernel is traced: the rotation, the norm, and each tensor's part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp


@dataclass(frozen=True)
class Rotation:
    """out = x * cos + rotate_half(x) * sin on the first `rotary_dim` features, or its transpose."""

    rotary_dim: int
    interleaved: bool  # pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
    half_width: bool  # tables hold one angle per pair
    inverse: bool  # the transpose of the rotation, for gradients

    @property
    def half(self) -> int:
        return self.rotary_dim // 2


@dataclass(frozen=True)
class Norm:
    """RMSNorm over the features; the weights come with their offset already added."""

    eps: float
    casting: str  # "llama", "gemma" or "none"


@dataclass(frozen=True)
class Operand:
    """One tensor of a launch, as the kernel sees it.

    dims: its axes in order, of b batch, h heads, s sequence, d features; blocks lose the b.
        "bhsd", "hbsd" and "bshd" have the features on lanes, "bhds" and "hbds" on sublanes.
    rounding, norm_rounding: dtypes that the norm rounds xhat and its result to; "float16" is
        emulated in float32 arrays, because Mosaic has no float16.
    """

    dims: str
    heads: int
    dtype: Any  # of the input
    out_dtype: Any
    rounding: str = "float32"
    norm_rounding: str = "float32"
    has_weight: bool = False
    wants_input: bool = True  # backward of the norm: gradient of the input
    wants_weight: bool = False  # backward of the norm: gradient of the weight

    @property
    def keeps_norm(self) -> bool:
        """Whether the output's array holds the norm's result as it is."""
        return jnp.dtype(self.out_dtype).name == self.norm_rounding

    @property
    def is_head_minor(self) -> bool:
        return self.dims == "bshd"
