"""What "equal to the reference" means: rounded once, after an accumulation in float32."""

from __future__ import annotations

import torch

# Half a unit in the last place, relative: what rounding once to the dtype may cost.
UNIT_ROUNDOFF = {
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float32: 2.0**-24,
    torch.float64: 2.0**-53,
}
ACCUMULATION = {torch.float64: 1e-14}  # relative to the sum of magnitudes; float32 otherwise


def assert_rounded_once(
    actual: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor, what: str = "result"
) -> None:
    """|actual - exact| within one rounding of actual's dtype plus the accumulation's own error.

    exact: the float64 result; magnitude: the same sums over absolute values, which is what the
    error of an accumulation is proportional to.
    """
    assert actual.shape == exact.shape, f"{what}: shape {actual.shape}, expected {exact.shape}"
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    accumulation = ACCUMULATION.get(actual.dtype, 1e-6)
    tiny = 1e-7 if actual.dtype == torch.float16 else 1e-30  # float16 has subnormals at 6e-8
    bound = UNIT_ROUNDOFF[actual.dtype] * exact.abs() + accumulation * magnitude + tiny
    error = (actual.double() - exact).abs()
    worst = (error - bound).max().item() if error.numel() else -1.0
    assert worst <= 0, f"{what}: off by {error.max().item():.3g}, {worst:.3g} more than allowed"
