"""An independent check: tokamax's grouped matmul on the CPU against ours in interpret mode."""

from __future__ import annotations

import jax
import pytest
import tokamax
import torch
from cases import RAGGED_DOT_EDGE, RaggedDotCase, ragged_dot_inputs
from test_ragged_dot import INTERPRET, forward

# tokamax takes sizes that cover all rows, and neither bias nor group_offset.
CASES = [
    case
    for case in RAGGED_DOT_EDGE
    if sum(case.sizes) == case.m
    and not case.bias
    and case.group_offset is None
    and case.dtype == "bfloat16"
]


@pytest.mark.parametrize("case", CASES[:4], ids=lambda case: case.name)
def test_same_result_as_tokamax(case: RaggedDotCase) -> None:
    inputs = ragged_dot_inputs(case)
    lhs, rhs, sizes = (
        jax.dlpack.from_dlpack(inputs[name].contiguous()) for name in ("lhs", "rhs", "group_sizes")
    )
    numbers = (([1], [2 if case.transpose_rhs else 1]), ([], []))
    dims = jax.lax.RaggedDotDimensionNumbers(numbers, [0], [0])
    theirs = tokamax.ragged_dot_general(lhs, rhs, sizes.astype("int32"), dims, implementation="xla")
    ours = forward(case, inputs, INTERPRET)
    torch.testing.assert_close(ours, torch.from_dlpack(theirs), rtol=1e-2, atol=1e-2)
