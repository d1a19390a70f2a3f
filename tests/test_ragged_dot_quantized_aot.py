"""ragged_dot with quantised weights through the real TPU compiler."""

from __future__ import annotations

import aot
import jax
import jax.numpy as jnp
import pytest
from tpu_kernels.kernels.ragged_dot import lowering_quantized as lowering
from tpu_kernels.tpu_runtime import CHIPS

CHIP_NAMES = ["v5e", "v6e", "v5p", "v7x"]
FORMATS = ["int8", "float8_e4m3fn", "float8_e5m2", "int4"]

# m, k, n, g, block, transposed, dtype of lhs
QWEN = (512, 2048, 1536, 16)  # Qwen3-30B-A3B, EP8
MODEL = {
    **{f"R10_{stored}": ((*QWEN, None, False, "bfloat16"), stored) for stored in FORMATS},
    **{f"R10_{stored}_transposed": ((*QWEN, None, True, "bfloat16"), stored) for stored in FORMATS},
    "R10_int8_block128": ((*QWEN, 128, True, "bfloat16"), "int8"),
    "deepseek_block128": ((4096, 7168, 4096, 8, 128, False, "bfloat16"), "float8_e4m3fn"),
    "gpt_oss_block32": ((512, 2880, 5760, 32, 32, True, "bfloat16"), "int4"),
    "mixtral": ((8192, 4096, 28672, 8, None, True, "bfloat16"), "int8"),
}
EDGE = {
    "odd": (37, 100, 60, 4, None, False, "bfloat16"),
    "odd_transposed": (37, 100, 60, 4, None, True, "bfloat16"),
    "odd_block": (37, 90, 40, 3, 3, True, "float32"),
    "short_block": (37, 96, 300, 3, 16, False, "bfloat16"),
    "tiny": (1, 2, 1, 1, None, True, "float32"),
    "float16": (16, 128, 700, 3, 32, True, "float16"),
}


def compile_both(shape: tuple, stored: str, chip: str) -> None:
    m, k, n, g, block, transposed, dtype = shape
    num_k = k // 2 if stored == "int4" else k
    weight = (g, n, num_k) if transposed else (g, num_k, n)
    scale = (g, n) if block is None else (g, k // block, n)
    spec = jax.ShapeDtypeStruct
    weight = spec(weight, jnp.uint8 if stored == "int4" else jnp.dtype(stored))
    shared = (weight, spec(scale, jnp.float32), spec((g,), jnp.int32))

    def forward(lhs, rhs, scale, sizes):
        args = (lhs, rhs, scale, sizes, None, None, transposed, "default", dtype)
        return lowering.ragged_dot_quantized(*args, chip=CHIPS[chip])

    def backward(grad, rhs, scale, sizes):
        args = (grad, rhs, scale, sizes, None, transposed, "default", dtype, True, True)
        return lowering.ragged_dot_quantized_backward(*args, chip=CHIPS[chip])

    aot.compile_for(forward, (spec((m, k), jnp.dtype(dtype)), *shared), chip)
    aot.compile_for(backward, (spec((m, n), jnp.dtype(dtype)), *shared), chip)


@pytest.mark.parametrize("chip", CHIP_NAMES)
@pytest.mark.parametrize("name", MODEL)
def test_layer_of_a_model_compiles(name: str, chip: str) -> None:
    compile_both(*MODEL[name], chip)


@pytest.mark.parametrize("chip", ["v5e", "v7x"])
@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("name", EDGE)
def test_any_size_compiles(name: str, stored: str, chip: str) -> None:
    compile_both(EDGE[name], stored, chip)
