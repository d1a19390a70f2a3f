"""The one case list: it feeds correctness, interpret mode, AOT compilation and the bench.

EDGE cases are small enough for the interpreter; MODEL cases have the real sizes of a model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(frozen=True)
class RaggedDotCase:
    name: str
    source: str  # the model or report it comes from
    m: int
    k: int
    n: int
    sizes: tuple[int, ...] = field(repr=False)  # rows of each group, of all ranks
    transpose_rhs: bool = False
    dtype: str = "bfloat16"
    bias: bool = False
    group_offset: int | None = None
    num_groups: int | None = None  # groups that rhs holds, by default all
    precision: str = "default"

    @property
    def g(self) -> int:
        return len(self.sizes) if self.num_groups is None else self.num_groups

    @property
    def rhs_shape(self) -> tuple[int, int, int]:
        return (self.g, self.n, self.k) if self.transpose_rhs else (self.g, self.k, self.n)


def _uniform(g: int, m: int) -> tuple[int, ...]:
    return (m // g,) * g


_ROUTED_8_TO_16 = (32,) * 16
_SKEWED = (40, 0, 200, 24, 0, 8, 0, 0, 100, 60, 0, 0, 16, 0, 0, 64)

RAGGED_DOT_EDGE = [
    RaggedDotCase("empty_first_middle_last", "RD01", 16, 64, 32, (0, 8, 0, 8, 0)),
    RaggedDotCase("empty_transposed", "RD01", 16, 64, 32, (8, 0, 8, 0), True),
    RaggedDotCase("one_group_takes_all", "routing collapse", 40, 32, 48, (0, 40, 0), True),
    RaggedDotCase("all_empty", "routing collapse", 16, 32, 48, (0, 0, 0)),
    RaggedDotCase("tail_rows", "RD02", 16, 32, 8, (4, 4), dtype="float32"),
    RaggedDotCase("edges_inside_a_strip", "RD08", 40, 64, 128, (3, 6, 1, 13, 9), True),
    RaggedDotCase("one_row_groups", "RD04", 32, 96, 96, (1,) * 32, dtype="float32"),
    RaggedDotCase("one_row_groups_transposed", "decode", 8, 64, 96, (1, 0, 1, 1, 0, 1, 2), True),
    RaggedDotCase("lanes_not_full", "RD06", 64, 100, 60, (16,) * 4),
    RaggedDotCase("lanes_not_full_transposed", "RD06", 64, 100, 60, (16,) * 4, True),
    RaggedDotCase("odd_rows", "RD08", 100, 256, 256, (33, 67)),
    RaggedDotCase("wide_tile", "RD23", 512, 64, 160, (257, 255)),
    RaggedDotCase("small_dims", "RD26", 16, 32, 32, (7, 9)),
    RaggedDotCase("one_of_everything", "limits", 1, 1, 1, (1,), dtype="float32"),
    RaggedDotCase("three_rows", "limits", 3, 17, 5, (1, 0, 2), True),
    RaggedDotCase("square", "tokamax gradient of transposed weights", 48, 64, 64, (20, 28), True),
    RaggedDotCase("bias", "gpt-oss", 32, 40, 72, (5, 0, 11), bias=True),
    RaggedDotCase("bias_transposed", "gpt-oss", 32, 40, 72, (5, 0, 11), True, bias=True),
    RaggedDotCase("shard", "RD15", 16, 32, 24, (4,) * 4, group_offset=1, num_groups=2),
    RaggedDotCase(
        "shard_unaligned",
        "EP rank",
        48,
        32,
        24,
        (5, 7, 3, 9, 2),
        True,
        group_offset=2,
        num_groups=2,
    ),
    RaggedDotCase("exact_float32", "RD17", 8, 128, 128, (8,), dtype="float32", precision="highest"),
    RaggedDotCase("float16", "RD18", 16, 128, 128, (10, 6), dtype="float16"),
]

RAGGED_DOT_MODEL = [
    RaggedDotCase("R1", "Qwen3-30B-A3B EP8 gate_up", 512, 2048, 1536, _ROUTED_8_TO_16, True),
    RaggedDotCase("R1s", "Qwen3-30B-A3B EP8 gate_up, skewed", 512, 2048, 1536, _SKEWED, True),
    RaggedDotCase("R2", "Qwen3-30B-A3B EP8 down", 512, 768, 2048, _ROUTED_8_TO_16, True),
    RaggedDotCase("R3", "Qwen3-30B-A3B gate_up", 32768, 2048, 1536, _uniform(128, 32768), True),
    RaggedDotCase("R4", "Qwen3-30B-A3B down", 32768, 768, 2048, _uniform(128, 32768), True),
    RaggedDotCase("R5", "Gemma-4-26B-A4B", 2048, 2816, 1408, _uniform(16, 2048), True),
    RaggedDotCase("R6", "gpt-oss-20b gate_up", 16384, 2880, 5760, _uniform(32, 16384), bias=True),
    RaggedDotCase("R6d", "gpt-oss-20b down", 16384, 2880, 2880, _uniform(32, 16384), bias=True),
    RaggedDotCase("R7", "Mixtral gate_up", 8192, 4096, 28672, _uniform(8, 8192), True),
    RaggedDotCase("R11", "Qwen3-30B-A3B decode", 8, 2048, 1536, (1,) * 8 + (0,) * 120, True),
    RaggedDotCase("deepseek", "RD24", 4096, 7168, 4096, _uniform(8, 4096)),
    RaggedDotCase(
        "R5f32", "Gemma-4 in float32", 2048, 2816, 1408, _uniform(16, 2048), True, "float32"
    ),
]


def ids(cases: list) -> list[str]:
    return [case.name for case in cases]


def ragged_dot_inputs(case: RaggedDotCase, seed: int = 0) -> dict[str, torch.Tensor | None]:
    """lhs, rhs, group_sizes, bias and an upstream gradient; NaN in every row of no local group."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    lhs, grad = normal(case.m, case.k), normal(case.m, case.n)
    outside = ~rows_of_local_groups(case)
    lhs[outside] = float("nan")
    grad[outside] = float("inf")
    return {
        "lhs": lhs,
        "rhs": normal(*case.rhs_shape),
        "group_sizes": torch.tensor(case.sizes),
        "bias": normal(case.g, case.n) if case.bias else None,
        "grad": grad,
    }


def rows_of_local_groups(case: RaggedDotCase) -> torch.Tensor:  # [m] bool
    offset = case.group_offset or 0
    start = sum(case.sizes[:offset])
    stop = sum(case.sizes[: offset + case.g])
    row = torch.arange(case.m)
    return (row >= start) & (row < stop)


def group_ranges(case: RaggedDotCase) -> list[tuple[int, int, int]]:
    """(local group, first row, row past the last)."""
    ends = np.concatenate([[0], np.cumsum(case.sizes)])
    offset = case.group_offset or 0
    return [(g, int(ends[offset + g]), int(ends[offset + g + 1])) for g in range(case.g)]


@dataclass(frozen=True)
class ExpertsCase:
    name: str
    source: str
    t: int
    e: int  # experts held
    h: int
    i: int
    topk: int
    activation: str = "silu"
    transposed: bool = False
    has_gate: bool = True
    bias: bool = False
    dtype: str = "bfloat16"
    num_routed: int | None = None  # experts of all ranks, by default those held

    @property
    def width(self) -> int:
        return 2 * self.i if self.has_gate else self.i

    @property
    def gate_up_shape(self) -> tuple[int, int, int]:
        return (self.e, self.h, self.width) if self.transposed else (self.e, self.width, self.h)

    @property
    def down_shape(self) -> tuple[int, int, int]:
        return (self.e, self.i, self.h) if self.transposed else (self.e, self.h, self.i)


EXPERTS_EDGE = [
    ExpertsCase("default", "Qwen3-MoE", 20, 4, 128, 128, 2),
    ExpertsCase("one_token", "decode", 1, 8, 128, 64, 2),
    ExpertsCase("odd_sizes", "limits", 13, 3, 96, 40, 2),
    ExpertsCase("shard", "EP rank", 24, 2, 128, 128, 3, num_routed=6),
    ExpertsCase("transposed_gelu", "aria", 9, 3, 128, 128, 2, "gelu", transposed=True),
    ExpertsCase("gelu_tanh_bias", "Gemma 4", 10, 3, 128, 64, 2, "gelu_tanh", bias=True),
    ExpertsCase("cut_rows", "Gemma 4", 6, 2, 1024, 480, 2, "gelu_tanh", bias=True),
    ExpertsCase("ungated", "NemotronH", 10, 3, 64, 128, 2, "relu2", has_gate=False),
    ExpertsCase("gpt_oss", "gpt-oss", 10, 3, 64, 48, 2, "swiglu_oai", transposed=True, bias=True),
    ExpertsCase("one_expert_takes_all", "routing collapse", 40, 1, 128, 128, 1),
    ExpertsCase("float32", "limits", 10, 3, 64, 32, 2, dtype="float32"),
    ExpertsCase("float16", "limits", 10, 3, 64, 32, 2, dtype="float16"),
    ExpertsCase("many_tokens", "prefill", 300, 4, 256, 128, 2),
]

EXPERTS_MODEL = [
    ExpertsCase("E1.1", "Qwen3-30B-A3B EP8", 1, 16, 2048, 768, 8, num_routed=128),
    ExpertsCase("E1.64", "Qwen3-30B-A3B EP8", 64, 16, 2048, 768, 8, num_routed=128),
    ExpertsCase("E1.256", "Qwen3-30B-A3B EP8", 256, 16, 2048, 768, 8, num_routed=128),
    ExpertsCase("E1.512", "Qwen3-30B-A3B EP8", 512, 16, 2048, 768, 8, num_routed=128),
    ExpertsCase("E2.64", "Qwen3-30B-A3B", 64, 128, 2048, 768, 8),
    ExpertsCase("E2.4096", "Qwen3-30B-A3B", 4096, 128, 2048, 768, 8),
    ExpertsCase("gemma4", "Gemma-4-26B-A4B EP8", 64, 16, 2816, 704, 8, "gelu_tanh", num_routed=128),
    ExpertsCase("mixtral", "Mixtral-8x7B", 64, 8, 4096, 14336, 2),
    ExpertsCase("deepseek_v3", "DeepSeek-V3 EP8", 64, 32, 7168, 2048, 8, num_routed=256),
    ExpertsCase(
        "gpt_oss_20b",
        "gpt-oss-20b",
        64,
        32,
        2880,
        2880,
        4,
        "swiglu_oai",
        transposed=True,
        bias=True,
    ),
]


def route(case: ExpertsCase, generator: np.random.Generator) -> np.ndarray:  # [t, topk] int32
    """Distinct experts for each token; those of other ranks become the sentinel e."""
    num_routed = case.num_routed or case.e
    rows = [generator.choice(num_routed, case.topk, replace=False) for _ in range(case.t)]
    ids = np.stack(rows).astype(np.int32)
    return np.where(ids < case.e, ids, case.e).astype(np.int32)


def experts_inputs(case: ExpertsCase, seed: int = 0) -> dict[str, torch.Tensor | None]:
    """Tensors of the case; the routing weight of every slot of another rank is NaN."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    index = torch.from_numpy(route(case, np.random.default_rng(seed)))
    weights = torch.rand(case.t, case.topk, generator=generator)
    weights[index >= case.e] = float("nan")
    return {
        "hidden_states": normal(case.t, case.h),
        "top_k_index": index,
        "top_k_weights": weights,
        "gate_up_proj": normal(*case.gate_up_shape, scale=case.h**-0.5),
        "down_proj": normal(*case.down_shape, scale=case.i**-0.5),
        "gate_up_bias": normal(case.e, case.width) if case.bias else None,
        "down_bias": normal(case.e, case.h) if case.bias else None,
    }
