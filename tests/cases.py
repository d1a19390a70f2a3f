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
