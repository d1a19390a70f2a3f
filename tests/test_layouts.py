"""The order of axes on the device, as PJRT has it, and weights that kernels take as they lie."""

from __future__ import annotations

import math
import random
import re

import aot
import jax
import jax.numpy as jnp
import pytest
from tpu_kernels.kernels.moe_experts import lowering as experts
from tpu_kernels.kernels.ragged_dot import lowering as grouped
from tpu_kernels.kernels.ragged_dot.layouts import as_stored, device_order
from tpu_kernels.tpu_runtime import CHIPS

PROJECTIONS = [  # Gemma 4, gpt-oss, Qwen3 and ranks of them; small and odd ones
    (16, 2816, 704), (128, 2880, 2880), (4, 2880, 5760), (128, 2048, 768), (1, 704, 2816),
    (2, 67, 3456), (4, 2816, 2), (60, 4, 2432), (3, 1, 1), (7, 8, 128),
]  # fmt: skip


def pjrt_order(shape: tuple[int, ...], dtype, chip: str) -> tuple[int, ...]:
    device = aot._device(chip)
    layout = device.client.get_default_layout(jnp.dtype(dtype), shape, device)
    return tuple(map(int, re.match(r"\{([\d,]*)", str(layout))[1].split(",")))


@pytest.mark.parametrize("chip", ["v5e", "v6e", "v5p", "v7x"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn", "bfloat16", "float32"])
def test_device_order_is_that_of_pjrt(dtype: str, chip: str) -> None:
    generator = random.Random(0)

    def size() -> int:
        return generator.choice([1, 64, 128]) * generator.randint(1, 40)

    drawn = [(2 ** generator.randint(0, 8), size(), size()) for _ in range(100)]
    drawn += [(size(), size()) for _ in range(50)]
    for shape in PROJECTIONS + drawn:
        assert device_order(shape, jnp.dtype(dtype).itemsize) == pjrt_order(shape, dtype, chip)


def test_as_stored_swaps_what_the_device_swaps() -> None:
    weight = jnp.arange(2 * 128 * 64, dtype=jnp.float32).reshape(2, 128, 64)
    swapped, transposed = as_stored(weight, False)
    assert transposed and (swapped == weight.transpose(0, 2, 1)).all()
    again, transposed = as_stored(swapped, transposed)
    assert transposed and again is swapped


def spec(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def copied(compiled, size: int) -> list[str]:
    """The operations of a program that rewrite an array of `size` elements."""
    lines = re.findall(r"= \w+\[([\d,]+)\]\S* (copy|transpose|fusion)\(", compiled.as_text())
    return [op for dims, op in lines if math.prod(map(int, dims.split(","))) == size]


@pytest.mark.parametrize("chip", ["v5e", "v6e", "v5p", "v7x"])
@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_experts_of_gemma_4_are_not_copied(stored: str, chip: str) -> None:
    e, h, i = 16, 2816, 704
    dtype = jnp.dtype(stored)
    scales = (spec(e, 2 * i, dtype=jnp.float32), spec(e, h, dtype=jnp.float32))
    arrays = (spec(64, h), spec(64, 8, dtype=jnp.int32), spec(64, 8))
    weights = (spec(e, 2 * i, h, dtype=dtype), spec(e, h, i, dtype=dtype))

    def run(*args):
        x, index, route, gate_up, down, *scales = args
        scales = scales or (None, None)
        static = ("gelu_tanh", False, True, e)
        return experts.moe_experts_quantized(
            x, index, route, gate_up, down, None, None, *scales, *static, chip=CHIPS[chip]
        )

    args = (*arrays, *weights, *(scales if stored == "int8" else ()))
    assert copied(aot.compile_for(run, args, chip), e * h * i) == []


@pytest.mark.parametrize("chip", ["v5e", "v6e", "v5p", "v7x"])
def test_grouped_matmul_and_its_gradients_take_weights_as_they_lie(chip: str) -> None:
    g, m, k, n = 8, 256, 704, 2816

    def run(grad, lhs, rhs, sizes):
        static = (True, "default")
        out = grouped.ragged_dot(lhs, rhs, sizes, None, None, *static, "bfloat16", chip=CHIPS[chip])
        needs = (True, True, False)
        grads = grouped.ragged_dot_backward(
            grad, lhs, rhs, sizes, None, *static, *needs, chip=CHIPS[chip]
        )
        return out, *grads[:2]

    args = (spec(m, n), spec(m, k), spec(g, n, k), spec(g, dtype=jnp.int32))
    assert copied(aot.compile_for(run, args, chip), g * n * k) == []
