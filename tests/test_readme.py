"""README.md says what is not supported; the code refuses exactly that."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from tpu_kernels.kernels.flash_attention.ops import flash_attention
from tpu_kernels.kernels.flash_attention.packed import flash_attention_packed
from tpu_kernels.kernels.moe_experts.ops import moe_experts
from tpu_kernels.kernels.ragged_dot.ops import ragged_dot
from tpu_kernels.kernels.rotary.ops import apply_rotary

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def gradient_of_quantised_weights() -> None:
    weight, scale = torch.ones(1, 3, 2, dtype=torch.int8), torch.ones(1, 2, requires_grad=True)
    ragged_dot(torch.randn(4, 3), weight, torch.tensor([4]), rhs_scale=scale)


def gradient_of_quantised_experts() -> None:
    x, index, weights = torch.randn(2, 4), torch.zeros(2, 1).long(), torch.rand(2, 1)
    projections = torch.ones(1, 6, 4, dtype=torch.int8), torch.randn(1, 4, 3)
    scale = torch.ones(1, 6, requires_grad=True)
    moe_experts(x, index, weights, *projections, gate_up_scale=scale)


def second_order() -> None:
    lhs, rhs = torch.randn(4, 3, requires_grad=True), torch.randn(1, 3, 2, requires_grad=True)
    out = ragged_dot(lhs, rhs, torch.tensor([4])).square().sum()
    (grad,) = torch.autograd.grad(out, lhs, create_graph=True)
    grad.sum().backward()


def gradient_of_a_table() -> None:
    q, cos = torch.randn(1, 2, 3, 8), torch.randn(1, 3, 8, requires_grad=True)
    apply_rotary(q, None, cos, cos)


def dropout() -> None:
    q = torch.randn(1, 4, 2, 16)
    flash_attention(q, q, q, dropout_p=0.1)


def packed_dropout() -> None:
    q, cu = torch.randn(4, 2, 16), torch.tensor([0, 4])
    flash_attention_packed(q, q, q, cu, cu, 4, 4, dropout_p=0.1)


REFUSED = {
    "dropout": [dropout, packed_dropout],
    "gradients of cos and sin": [gradient_of_a_table],
    "second-order gradients": [second_order],
    "gradients of quantised weights and of scales": [
        gradient_of_quantised_weights,
        gradient_of_quantised_experts,
    ],
}


def refusals_in_readme() -> set[str]:
    rows = (line for line in README.splitlines() if "NotImplementedError" in line)
    return {row.split("|")[1].strip() for row in rows}


def test_the_table_lists_every_refusal() -> None:
    assert refusals_in_readme() == set(REFUSED)


@pytest.mark.parametrize("row", REFUSED)
def test_what_the_table_refuses_raises(row: str) -> None:
    for call in REFUSED[row]:
        with pytest.raises(NotImplementedError):
            call()


def test_public_names_are_documented() -> None:
    """Every name in __all__ of every Hub kernel stands in the README."""
    for init in (ROOT / "torch-ext").glob("*/__init__.py"):
        names = init.read_text().split("__all__ = ")[1]
        for name in ast.literal_eval(names):
            assert f"`{name}`" in README or name == "layers", f"{init.parent.name}: {name}"
