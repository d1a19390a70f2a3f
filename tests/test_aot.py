"""Every shipped case through the real TPU compiler, for chips that are not there."""

from __future__ import annotations

from functools import partial

import aot
import jax
import jax.numpy as jnp
import pytest
from cases import EXPERTS_MODEL, RAGGED_DOT_MODEL, ExpertsCase, RaggedDotCase, ids
from tpu_kernels.kernels.moe_experts import lowering as experts
from tpu_kernels.kernels.ragged_dot import lowering as grouped
from tpu_kernels.tpu_runtime import CHIPS

CHIP_NAMES = ["v5e", "v6e", "v5p", "v7x"]

# Sizes that break naive tilings, for the edge reports that ask for an AOT compilation.
EDGE = [
    RaggedDotCase("RD06", "lanes not full", 64, 100, 60, (16,) * 4),
    RaggedDotCase("RD08", "odd rows", 100, 256, 256, (33, 67)),
    RaggedDotCase("RD18", "float16", 16, 128, 128, (10, 6), dtype="float16"),
    RaggedDotCase("RD26", "small dims", 16, 32, 32, (7, 9)),
    RaggedDotCase("one", "limits", 1, 1, 1, (1,), True, dtype="float32"),
    RaggedDotCase("tiny_bias", "limits", 3, 17, 5, (1, 2), True, bias=True),
    RaggedDotCase("exact", "RD17", 40, 256, 384, (10, 30), dtype="float32", precision="highest"),
    RaggedDotCase("DV16", "small 2-D operands", 16, 3072, 128, (16,), dtype="float32"),
]


def spec(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def compile_ragged_dot(case: RaggedDotCase, chip: str) -> None:
    lhs, rhs = spec((case.m, case.k), case.dtype), spec(case.rhs_shape, case.dtype)
    sizes = spec((len(case.sizes),), "int32")
    bias = spec((case.g, case.n), case.dtype) if case.bias else None
    static = (case.transpose_rhs, case.precision)

    def forward(lhs, rhs, sizes, bias):
        return grouped.ragged_dot(
            lhs, rhs, sizes, None, bias, *static, case.dtype, chip=CHIPS[chip]
        )

    def backward(grad, lhs, rhs, sizes):
        needs = (True, True, case.bias)
        return grouped.ragged_dot_backward(
            grad, lhs, rhs, sizes, None, *static, *needs, chip=CHIPS[chip]
        )

    aot.compile_for(forward, (lhs, rhs, sizes, bias), chip)
    aot.compile_for(backward, (spec((case.m, case.n), case.dtype), lhs, rhs, sizes), chip)


@pytest.mark.parametrize("chip", CHIP_NAMES)
@pytest.mark.parametrize("case", RAGGED_DOT_MODEL, ids=ids(RAGGED_DOT_MODEL))
def test_ragged_dot_of_a_model_compiles(case: RaggedDotCase, chip: str) -> None:
    """RD24 among them: forward and backward, without a user setting."""
    compile_ragged_dot(case, chip)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("case", EDGE, ids=ids(EDGE))
def test_ragged_dot_of_any_size_compiles(case: RaggedDotCase, chip: str) -> None:
    compile_ragged_dot(case, chip)


@pytest.mark.parametrize("chip", CHIP_NAMES)
@pytest.mark.parametrize("case", EXPERTS_MODEL, ids=ids(EXPERTS_MODEL))
def test_experts_layer_of_a_model_compiles(case: ExpertsCase, chip: str) -> None:
    args = (
        spec((case.t, case.h), case.dtype),
        spec((case.t, case.topk), "int32"),
        spec((case.t, case.topk), "float32"),
        spec(case.gate_up_shape, case.dtype),
        spec(case.down_shape, case.dtype),
        spec((case.e, case.width), case.dtype) if case.bias else None,
        spec((case.e, case.h), case.dtype) if case.bias else None,
    )
    static = (case.activation, case.transposed, case.has_gate, case.e)
    forward = partial(_call, experts.moe_experts, static, chip)
    aot.compile_for(forward, args, chip)


def _call(fn, static, chip, *arrays):
    return fn(*arrays, *static, chip=CHIPS[chip])


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_experts_backward_of_a_model_compiles(chip: str) -> None:
    case = next(case for case in EXPERTS_MODEL if case.name == "E1.512")
    hidden = spec((case.t, case.h), case.dtype)
    args = (
        hidden,
        hidden,
        spec((case.t, case.topk), "int32"),
        spec((case.t, case.topk), "float32"),
        spec(case.gate_up_shape, case.dtype),
        spec(case.down_shape, case.dtype),
        None,
        None,
    )
    needs = (True, True, True, True, False, False)
    static = (case.activation, case.transposed, case.has_gate, case.e, *needs)
    aot.compile_for(partial(_call, experts.moe_experts_backward, static, chip), args, chip)
