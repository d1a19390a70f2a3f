"""Run a kernel in Pallas' TPU interpreter: NaN in memory nobody wrote, races detected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from tpu_kernels.tpu_runtime import CHIPS, bridge


def run_kernel(jax_fn: Callable[..., Any], *args: Any, chip: str = "v5e") -> Any:
    """jax_fn(*args) on torch CPU tensors, as the op runs it under TPU_KERNELS_INTERPRET=1."""
    result = bridge.run_interpreted(jax_fn, args, CHIPS[chip])
    races = interpret_pallas_call.races
    assert races is None or not races.races_found, "the kernel reads memory that a DMA is writing"
    return result
