"""What each quantisation costs in accuracy: the figures of the README, made anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tpu_kernels.kernels.ragged_dot.ops import ragged_dot
from tpu_kernels.kernels.ragged_dot.quantized import quantize_experts

README = (Path(__file__).parent.parent / "README.md").read_text()
FORMATS = ["int8", "float8_e4m3fn", "float8_e5m2", "int4"]
BLOCKS = [None, 128]


def expert_weights(kind: str) -> torch.Tensor:  # [g, n, k]
    """Normal, or with one weight in a thousand twenty times as large."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(2, 256, 2048, generator=generator)
    if kind == "outliers":
        weight[torch.rand(weight.shape, generator=generator) < 1e-3] *= 20
    return weight


def relative_error(kind: str, stored: str, block: int | None) -> float:
    """Of the float32 output of one expert matmul, |error| / |output| as Euclidean norms."""
    weight = expert_weights(kind)
    lhs = torch.randn(64, 2048, generator=torch.Generator().manual_seed(1))
    sizes = torch.tensor([32, 32])
    quantised, scale = quantize_experts(weight, stored, block, transposed=True)
    exact = ragged_dot(lhs, weight, sizes, transpose_rhs=True)
    out = ragged_dot(lhs, quantised, sizes, rhs_scale=scale, transpose_rhs=True)
    return ((out - exact).norm() / exact.norm()).item()


def row(stored: str, block: int | None) -> str:
    errors = (relative_error(kind, stored, block) for kind in ("normal", "outliers"))
    scales = "channel" if block is None else f"{block} of k"
    return f"| {stored} | {scales} | " + " | ".join(f"{100 * x:.2f} %" for x in errors) + " |"


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("stored", FORMATS)
def test_the_readme_has_this_row(stored: str, block: int | None) -> None:
    assert row(stored, block) in README


if __name__ == "__main__":
    for stored in FORMATS:
        for block in BLOCKS:
            print(row(stored, block))
