"""The quantised experts layer compiles for every chip, and its plan fits each of them."""

from __future__ import annotations

from functools import partial

import aot
import jax
import jax.numpy as jnp
import pytest
from tpu_kernels.kernels.moe_experts import lowering, tiling
from tpu_kernels.kernels.moe_experts.tiling import Stored
from tpu_kernels.tpu_runtime import CHIPS

KINDS = {
    "int8": jnp.int8,
    "float8_e4m3fn": jnp.float8_e4m3fn,
    "float8_e5m2": jnp.float8_e5m2,
    "int4": jnp.uint8,
}


def spec(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def compile_layer(
    chip: str,
    kind: str,
    t: int,
    *,
    transposed: bool = False,
    block: int | None = None,
    activation: str = "silu",
    backward: bool = False,
    e: int = 8,
    i: int = 512,
) -> None:
    h, topk = 1024, 2

    def weight(n: int, k: int) -> jax.ShapeDtypeStruct:
        k = k // 2 if kind == "int4" else k
        return spec(e, *((k, n) if transposed else (n, k)), dtype=KINDS[kind])

    def scale(n: int, k: int) -> jax.ShapeDtypeStruct:
        return spec(e, *(() if block is None else (k // block,)), n, dtype=jnp.float32)

    arrays = (
        spec(t, h),
        spec(t, topk, dtype=jnp.int32),
        spec(t, topk, dtype=jnp.float32),
        weight(2 * i, h),
        weight(h, i),
        spec(e, 2 * i),
        spec(e, h),
        scale(2 * i, h),
        scale(h, i),
    )
    static = (activation, transposed, True, e)
    fn = lowering.moe_experts_quantized
    if backward:
        fn = lowering.moe_experts_quantized_backward
        arrays, static = (arrays[0], *arrays), (*static, True, True, False, False, True, True)

    def run(*arrays):
        return fn(*arrays, *static, chip=CHIPS[chip])

    aot.compile_for(run, arrays, chip)


@pytest.mark.parametrize("chip", ["v5e", "v6e", "v5p", "v7x"])
@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens(kind: str, chip: str) -> None:
    compile_layer(chip, kind, 1)
    compile_layer(chip, kind, 24, transposed=True)


@pytest.mark.parametrize("chip", ["v5e", "v6e", "v5p", "v7x"])
@pytest.mark.parametrize("kind", KINDS)
def test_odd_columns_and_few_experts(kind: str, chip: str) -> None:
    """down_proj lies with its rows minor, and is cut along them; scales of 3 rows."""
    compile_layer(chip, kind, 24, i=1056, e=3)
    compile_layer(chip, kind, 1, i=3168, e=20)


@pytest.mark.parametrize("chip", ["v5e", "v6e", "v5p", "v7x"])
@pytest.mark.parametrize("kind", KINDS)
def test_many_tokens(kind: str, chip: str) -> None:
    compile_layer(chip, kind, 400)


@pytest.mark.parametrize("chip", ["v5e", "v6e", "v7x"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("block", [256, 128, 32])
def test_blocks(block: int, kind: str, chip: str) -> None:
    compile_layer(chip, kind, 16, block=block)
    compile_layer(chip, kind, 1, block=block)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_gpt_oss(chip: str) -> None:
    compile_layer(chip, "int4", 16, transposed=True, activation="swiglu_oai")


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_backward(chip: str) -> None:
    compile_layer(chip, "int4", 32, block=128, backward=True)


@pytest.mark.parametrize("chip", CHIPS)
def test_plans_fit_and_stream_fewer_bytes(chip: str) -> None:
    """Of Qwen3-30B-A3B, Mixtral and DeepSeek-V3: one tile of int4 is a quarter of one of bf16."""
    choose = partial(tiling.choose, dtype="bfloat16", has_gate=True)
    for e, topk, h, i in ((16, 8, 2048, 768), (8, 2, 4096, 14336), (32, 8, 7168, 2048)):
        for t in (1, 16, 64):
            for kind in ("int8", "float8_e5m2", "uint8"):
                stored = Stored(kind, 1, True)
                plan = choose(t, topk, e, h, i, chip=CHIPS[chip], gate_up=stored, down=stored)
                if plan is None:
                    continue
                assert plan.vmem_bytes <= CHIPS[chip].vmem_bytes * 9 // 10
                assert i % plan.tile_i == 0 and h % plan.tile_h == 0
                assert plan.ring_in >= min(2, i // plan.tile_i)
