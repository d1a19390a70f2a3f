"""Workloads for `kernels benchmark`: attention of a prompt and of one decoded token.

On a TPU the sizes are those of an 8B model with 4096 tokens; elsewhere they are small.
"""

from __future__ import annotations

import torch
from kernels.benchmark import Benchmark
from torch.nn import functional


class Attention(Benchmark):
    """bfloat16, grouped heads, values of about 0.1."""

    seed = 0

    def allocate(self, queries: int) -> None:
        is_tpu = self.device == "tpu"
        has_device = self.device in ("cpu", "tpu") or getattr(torch, self.device).is_available()
        where = self.device if has_device else "cpu"
        b, s, hq, hkv, d = (1, 4096, 32, 8, 128) if is_tpu else (2, 128, 4, 2, 64)

        def random(*shape: int, scale: float) -> torch.Tensor:
            return (torch.randn(shape) * scale).to(where, torch.bfloat16)

        self.q = random(b, queries or s, hq, d, scale=1.0)  # [b, sq, hq, d]
        self.k = random(b, s, hkv, d, scale=1.0)  # [b, sk, hkv, d]
        self.v = random(b, s, hkv, d, scale=0.1)  # [b, sk, hkv, d]

    def setup_prompt(self) -> None:
        self.allocate(queries=0)

    def setup_decode(self) -> None:
        self.allocate(queries=1)

    def attend(self) -> None:
        self.out = self.kernel.flash_attention(self.q, self.k, self.v, causal=True)
        if self.out.device.type == "tpu":
            torch.tpu.synchronize()  # the runner waits for GPUs only

    def attend_in_torch(self, is_causal: bool) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
        return out.transpose(1, 2)

    def benchmark_prompt(self) -> None:
        self.attend()

    def verify_prompt(self) -> torch.Tensor:
        return self.attend_in_torch(is_causal=True)

    def benchmark_decode(self) -> None:
        self.attend()

    def verify_decode(self) -> torch.Tensor:
        return self.attend_in_torch(is_causal=False)  # the last token sees every key
