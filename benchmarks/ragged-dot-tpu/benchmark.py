"""Workloads for `kernels benchmark`: grouped matmul and an MoE layer against plain torch.

On a TPU the sizes are those of Qwen3-30B-A3B; elsewhere they are small.
"""

from __future__ import annotations

import torch
from kernels.benchmark import Benchmark
from torch.nn import functional


class MixtureOfExperts(Benchmark):
    """bfloat16, weights as Hugging Face stores experts; outputs of about 0.1."""

    seed = 0

    def setup(self) -> None:
        is_tpu = self.device == "tpu"
        has_device = self.device in ("cpu", "tpu") or getattr(torch, self.device).is_available()
        where = self.device if has_device else "cpu"
        t, h, i, e, topk = (4096, 2048, 768, 128, 8) if is_tpu else (64, 128, 64, 8, 2)

        def random(*shape: int, scale: float) -> torch.Tensor:
            return (torch.randn(shape) * scale).to(where, torch.bfloat16)

        self.x = random(t, h, scale=0.1)  # [t, h]
        self.gate_up = random(e, 2 * i, h, scale=h**-0.5)  # [e, 2i, h]
        self.down = random(e, h, i, scale=10 * i**-0.5)  # [e, h, i]
        scores = torch.randn(t, e).softmax(-1).topk(topk)
        self.index = scores.indices.to(where)  # [t, topk]
        self.weights = scores.values.to(where, torch.bfloat16)  # [t, topk]
        order = scores.indices.flatten().argsort(stable=True)
        self.rows = self.x[(order // topk).to(where)]  # [t * topk, h], sorted by expert
        self.sizes = torch.bincount(scores.indices.flatten(), minlength=e).to(where)  # [e]

    def finish(self, out: torch.Tensor) -> None:
        self.out = out
        if out.device.type == "tpu":
            torch.tpu.synchronize()  # the runner waits for GPUs only

    def benchmark_ragged_dot(self) -> None:
        self.finish(self.kernel.ragged_dot(self.rows, self.gate_up, self.sizes, transpose_rhs=True))

    def verify_ragged_dot(self) -> torch.Tensor:
        parts = self.rows.split(self.sizes.tolist())
        return torch.cat([part @ w.T for part, w in zip(parts, self.gate_up, strict=True)])

    def benchmark_moe_experts(self) -> None:
        arguments = (self.x, self.index, self.weights, self.gate_up, self.down)
        self.finish(self.kernel.moe_experts(*arguments))

    def verify_moe_experts(self) -> torch.Tensor:
        out = torch.zeros_like(self.x, dtype=torch.float32)
        for expert, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            token, slot = torch.where(self.index == expert)
            gate, up = (self.x[token] @ gate_up.T).chunk(2, dim=-1)
            rows = (functional.silu(gate) * up) @ down.T
            out.index_add_(0, token, rows.float() * self.weights[token, slot, None].float())
        return out.to(self.x.dtype)
