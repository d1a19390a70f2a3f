"""Workloads for `kernels benchmark`: rotary embedding, alone and after the q/k norm.

On a TPU the sizes are those of an 8B model with 4096 tokens; elsewhere they are small.
"""

from __future__ import annotations

import torch
from kernels.benchmark import Benchmark


class Rotary(Benchmark):
    """bfloat16 q and k of about 0.1; the result of q is verified."""

    seed = 0

    def setup(self) -> None:
        is_tpu = self.device == "tpu"
        has_device = self.device in ("cpu", "tpu") or getattr(torch, self.device).is_available()
        where = self.device if has_device else "cpu"
        hq, hkv, s, d = (32, 8, 4096, 128) if is_tpu else (4, 2, 128, 64)

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(shape) * 0.1).to(where, torch.bfloat16)

        self.q, self.k = random(1, hq, s, d), random(1, hkv, s, d)  # [1, heads, s, d]
        self.weight = random(d)  # [d]
        frequencies = 10000.0 ** (-torch.arange(0, d, 2) / d)
        angles = torch.arange(s)[:, None] * frequencies.repeat(2)  # [s, d]
        self.cos = angles.cos()[None].to(where, torch.bfloat16)  # [1, s, d]
        self.sin = angles.sin()[None].to(where, torch.bfloat16)  # [1, s, d]

    def finish(self, out: torch.Tensor) -> None:
        self.out = out
        if out.device.type == "tpu":
            torch.tpu.synchronize()  # the runner waits for GPUs only

    def rotate_in_torch(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x.chunk(2, dim=-1)
        half = torch.cat([-right, left], dim=-1)
        return x * self.cos[:, None] + half * self.sin[:, None]

    def benchmark_apply_rotary(self) -> None:
        self.finish(self.kernel.apply_rotary(self.q, self.k, self.cos, self.sin)[0])

    def verify_apply_rotary(self) -> torch.Tensor:
        return self.rotate_in_torch(self.q)

    def benchmark_qk_norm_rotary(self) -> None:
        weights = (self.weight, self.weight)
        self.finish(self.kernel.qk_norm_rotary(self.q, self.k, *weights, self.cos, self.sin)[0])

    def verify_qk_norm_rotary(self) -> torch.Tensor:
        wide = self.q.float()
        xhat = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.rotate_in_torch(self.weight * xhat.to(self.q.dtype))
