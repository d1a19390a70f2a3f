"""Our kernels as cases for the static cost tool, named as in its list of peers.

CASES[name] = (fn, args, {"flops", "bytes"}): the caller's counts, inputs read once and outputs
written once, weights of groups without rows not read. Group sizes are real arrays, because the
estimate follows them.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import tree  # noqa: E402, F401  (makes tpu_kernels importable)

from tpu_kernels.kernels.ragged_dot.kernel import ragged_dot_fwd  # noqa: E402
from tpu_kernels.tpu_runtime import CHIPS, Chip  # noqa: E402

CASES: dict[str, tuple] = {}


def target_chip() -> Chip:
    """The chip that is compiled for: the cost tool sets an abstract mesh of one device."""
    kind = jax.sharding.get_abstract_mesh().abstract_device.device_kind
    return next(chip for chip in CHIPS.values() if chip.device_kind == kind)


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def uniform(g: int, m: int) -> np.ndarray:
    return np.full(g, m // g, np.int32)


def sparse(g: int, sizes: dict[int, int]) -> np.ndarray:
    full = np.zeros(g, np.int32)
    full[list(sizes)] = list(sizes.values())
    return full


def ragged_dot(lhs, rhs, group_sizes, group_offset, *, transpose_rhs: bool):
    return ragged_dot_fwd(
        lhs, rhs, group_sizes, group_offset, transpose_rhs=transpose_rhs, chip=target_chip()
    )


def add_ragged_dot(name: str, m: int, k: int, n: int, sizes: np.ndarray, transpose: bool) -> None:
    g = len(sizes)
    rhs = bf16(g, n, k) if transpose else bf16(g, k, n)
    active = int((sizes > 0).sum())
    counts = {
        "flops": 2.0 * int(sizes.sum()) * k * n,
        "bytes": 2.0 * (m * k + active * k * n + m * n) + 4 * g,
    }
    fn = functools.partial(ragged_dot, transpose_rhs=transpose)
    CASES[name] = (fn, (bf16(m, k), rhs, sizes, np.zeros(1, np.int32)), counts)


SKEWED = sparse(16, {0: 40, 2: 200, 3: 24, 5: 8, 8: 100, 9: 60, 12: 16, 15: 64})
ONE_ROW = sparse(128, dict.fromkeys((3, 17, 30, 55, 64, 90, 101, 127), 1))

add_ragged_dot("R1", 512, 2048, 1536, uniform(16, 512), True)
add_ragged_dot("R1s", 512, 2048, 1536, SKEWED, True)
add_ragged_dot("R2", 512, 768, 2048, uniform(16, 512), True)
add_ragged_dot("R3", 32768, 2048, 1536, uniform(128, 32768), True)
add_ragged_dot("R4", 32768, 768, 2048, uniform(128, 32768), True)
add_ragged_dot("R5", 2048, 2816, 1408, uniform(16, 2048), True)
add_ragged_dot("R6", 16384, 2880, 5760, uniform(32, 16384), False)
add_ragged_dot("R7", 8192, 4096, 28672, uniform(8, 8192), True)
add_ragged_dot("R9", 32768, 1536, 2048, uniform(128, 32768), False)  # lhs gradient of R3
add_ragged_dot("R11", 8, 2048, 1536, ONE_ROW, True)
