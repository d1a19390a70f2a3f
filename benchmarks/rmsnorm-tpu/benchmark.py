"""Workloads for `kernels benchmark`: RMS norms against the expressions of the models.

On a TPU 8192 rows of 4096; elsewhere the sizes are small.
"""

from __future__ import annotations

import torch
from kernels.benchmark import Benchmark
from torch.nn import functional


class RMSNorm(Benchmark):
    """bfloat16; a weight of about 0.1 keeps the outputs small."""

    seed = 0

    def setup(self) -> None:
        has_device = self.device in ("cpu", "tpu") or getattr(torch, self.device).is_available()
        where = self.device if has_device else "cpu"
        rows, d = (8192, 4096) if self.device == "tpu" else (256, 512)

        def random(*shape: int, scale: float) -> torch.Tensor:
            return (torch.randn(shape) * scale).to(where, torch.bfloat16)

        self.x, self.other = random(rows, d, scale=1.0), random(rows, d, scale=1.0)  # [rows, d]
        self.weight = random(d, scale=0.1)  # [d]

    def finish(self, out: torch.Tensor) -> None:
        self.out = out
        if out.device.type == "tpu":
            torch.tpu.synchronize()  # the runner waits for GPUs only

    def norm_in_torch(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        xhat = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * xhat.to(x.dtype)

    def benchmark_rms_norm(self) -> None:
        self.finish(self.kernel.rms_norm(self.x, self.weight))

    def verify_rms_norm(self) -> torch.Tensor:
        return self.norm_in_torch(self.x)

    def benchmark_add_rms_norm(self) -> None:
        self.finish(self.kernel.add_rms_norm(self.x, self.other, self.weight)[0])

    def verify_add_rms_norm(self) -> torch.Tensor:
        return self.norm_in_torch(self.x + self.other)

    def benchmark_rms_norm_gated(self) -> None:
        self.finish(self.kernel.rms_norm_gated(self.x, self.other, self.weight))

    def verify_rms_norm_gated(self) -> torch.Tensor:
        return (self.norm_in_torch(self.x) * functional.silu(self.other.float())).to(self.x.dtype)
