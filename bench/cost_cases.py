"""Our kernels as cases for a static cost tool: CASES[name] = (fn, args, {"flops", "bytes"}).

fn is the JAX function that the torch op runs on the TPU. The counts are the caller's: inputs read
once, outputs written once, weights of experts without rows not read. Group sizes and routing are
real arrays, because an estimate follows them; everything else is a shape.
"""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import tree  # noqa: F401  (makes tpu_kernels importable)
from tpu_kernels.kernels.flash_attention import lowering as attention
from tpu_kernels.kernels.moe_experts import lowering as experts
from tpu_kernels.kernels.ragged_dot import lowering as grouped
from tpu_kernels.kernels.rmsnorm import lowering as norms
from tpu_kernels.kernels.rotary import lowering as rotary
from tpu_kernels.tpu_runtime import CHIPS, Chip

CASES: dict[str, tuple] = {}


def target_chip() -> Chip:
    """The chip that is compiled for: the tool sets an abstract mesh of one device."""
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


def ragged_dot(lhs, rhs, group_sizes, *, transpose_rhs: bool):
    return grouped.ragged_dot(
        lhs,
        rhs,
        group_sizes,
        None,
        None,
        transpose_rhs,
        "default",
        "bfloat16",
        chip=target_chip(),
    )


def weight_grad(grad, lhs, group_sizes):
    g = group_sizes.shape[0]
    return grouped.weight_grad(grad, lhs, group_sizes, None, g, "default", chip=target_chip())


def moe_experts(x, index, weights, gate_up, down):
    e = down.shape[0]
    return experts.moe_experts(
        x, index, weights, gate_up, down, None, None, "silu", False, True, e, chip=target_chip()
    )


def add_ragged_dot(name: str, m: int, k: int, n: int, sizes: np.ndarray, transpose: bool) -> None:
    g, active = len(sizes), int((sizes > 0).sum())
    rhs = bf16(g, n, k) if transpose else bf16(g, k, n)
    counts = {
        "flops": 2.0 * int(sizes.sum()) * k * n,
        "bytes": 2.0 * (m * k + active * k * n + m * n) + 4 * g,
    }
    fn = functools.partial(ragged_dot, transpose_rhs=transpose)
    CASES[name] = (fn, (bf16(m, k), rhs, sizes), counts)


def add_experts(name: str, t: int, e: int, *, is_shard: bool, h: int = 2048, i: int = 768) -> None:
    """A Qwen3-30B-A3B layer: 8 of 128 experts a token; a shard holds the first e of them."""
    random = np.random.default_rng(0)
    index = np.stack([random.choice(128, 8, replace=False) for _ in range(t)]).astype(np.int32)
    if t == 1 and is_shard:
        index[0] = [3, 20, 40, 50, 60, 70, 80, 90]  # one local expert
    index = np.where(index < e, index, e).astype(np.int32)
    rows, active = int((index < e).sum()), len(np.unique(index[index < e]))
    counts = {
        "flops": 2.0 * rows * 3 * i * h,
        "bytes": 2.0 * (2 * t * h + active * 3 * i * h) + t * 8 * 6,
    }
    arrays = (bf16(t, h), index, bf16(t, 8), bf16(e, 2 * i, h), bf16(e, h, i))
    CASES[name] = (moe_experts, arrays, counts)


def add_norm(name: str, fn, rows: int, d: int, num_arrays: int, num_vectors: int, *static) -> None:
    """num_arrays of [rows, d] and num_vectors of [d] are read or written."""

    def run(*arrays):
        *rest, weight = arrays
        return fn(*rest, weight, 1e-6, *static, chip=target_chip())

    num_inputs = {norms.rms_norm: 1}.get(fn, 2)
    args = (*(bf16(rows, d) for _ in range(num_inputs)), bf16(d))
    counts = {"flops": 0.0, "bytes": 2.0 * (num_arrays * rows * d + num_vectors * d)}
    CASES[name] = (run, args, counts)


def apply_rotary(q, k, cos, sin, *, axis: int, interleaved: bool):
    return rotary.apply_rotary(q, k, cos, sin, axis, interleaved, False, chip=target_chip())


def qk_norm_rotary(q, k, cos, sin, q_weight, k_weight):
    weights = (q_weight, k_weight)
    static = (1e-6, 0.0, "llama", 1, False, False)
    return rotary.qk_norm_rotary(q, k, *weights, cos, sin, *static, chip=target_chip())


def add_rotary(
    name: str,
    q: tuple[int, ...],
    k: tuple[int, ...],
    table: tuple[int, ...],
    *,
    axis: int = 1,
    interleaved: bool = False,
    has_norm: bool = False,
) -> None:
    weights = (bf16(q[-1]), bf16(q[-1])) if has_norm else ()
    moved = 4 * (math.prod(q) + math.prod(k) + math.prod(table)) + 4 * q[-1] * has_norm
    fn = functools.partial(apply_rotary, axis=axis, interleaved=interleaved)
    arrays = (bf16(*q), bf16(*k), bf16(*table), bf16(*table), *weights)
    counts = {"flops": 0.0, "bytes": float(moved)}
    CASES[name] = (qk_norm_rotary if has_norm else fn, arrays, counts)


def flash_attention(q, k, v, *masks, causal: bool, window: int, names: tuple[str, ...] = ()):
    given = dict(zip(names, masks, strict=True))
    ids, lengths = given.get("segment_ids"), given.get("kv_lengths")
    tensors = (given.get("sinks"), ids, ids, None, lengths)
    static = (causal, window, 0 if window >= 0 else -1, q.shape[-1] ** -0.5, 0.0, False)
    return attention.flash_attention(q, k, v, *tensors, *static, chip=target_chip())


def add_attention(
    name: str,
    shape: tuple[int, int, int, int, int],
    d: int,
    pairs: float,
    *,
    causal: bool = True,
    window: int = -1,
    **masks,
) -> None:
    """shape: b, sq, hq, hkv, sk; pairs: visible ones of one head; window: keys to the left."""
    b, sq, hq, hkv, sk = shape
    fn = functools.partial(flash_attention, causal=causal, window=window, names=tuple(masks))
    arrays = (bf16(b, sq, hq, d), bf16(b, sk, hkv, d), bf16(b, sk, hkv, d), *masks.values())
    moved = 2 * b * d * (2 * sq * hq + 2 * sk * hkv)
    CASES[name] = (fn, arrays, {"flops": 4.0 * b * hq * pairs * d, "bytes": float(moved)})


def triangle(length: int) -> float:
    return length * (length + 1) / 2


def band(length: int, window: int) -> float:
    return triangle(window) + (length - window) * window


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
CASES["R8"] = (  # weight gradient of R3
    weight_grad,
    (bf16(32768, 1536), bf16(32768, 2048), uniform(128, 32768)),
    {
        "flops": 2.0 * 32768 * 1536 * 2048,
        "bytes": 2.0 * (32768 * (1536 + 2048) + 128 * 1536 * 2048),
    },
)
add_ragged_dot("R9", 32768, 1536, 2048, uniform(128, 32768), False)  # lhs gradient of R3
add_ragged_dot("R11", 8, 2048, 1536, ONE_ROW, True)

for tokens in (1, 64, 256, 512):
    add_experts(f"E1.{tokens}", tokens, 16, is_shard=True)
for tokens in (64, 4096):
    add_experts(f"E2.{tokens}", tokens, 128, is_shard=False)

LLAMA = (0.0, "llama")  # offset, casting
add_norm("N1", norms.rms_norm, 8192, 4096, 2, 1, *LLAMA)
add_norm("N2", norms.add_rms_norm, 8192, 4096, 4, 1, *LLAMA)
add_norm("N3", norms.rms_norm, 262144, 128, 2, 1, *LLAMA)
add_norm("N4", norms.rms_norm, 64, 2048, 2, 1, *LLAMA)
add_norm("N5", norms.rms_norm_backward, 8192, 4096, 3, 2, *LLAMA, True, True)
add_norm("N6", norms.rms_norm_gated, 8192, 4096, 3, 1, "silu", False, *LLAMA)

QUERY, KEY, TABLE = (1, 32, 4096, 128), (1, 8, 4096, 128), (1, 4096, 128)
SD35 = (1, 24, 4429, 64)  # Stable Diffusion 3.5
add_rotary("Q1", QUERY, KEY, TABLE)
add_rotary("Q2", (64, 32, 1, 128), (64, 8, 1, 128), (64, 1, 128))
add_rotary("Q3", QUERY, KEY, TABLE, has_norm=True)
add_rotary("Q4", SD35, SD35, (1, 4429, 64), interleaved=True)
add_rotary("Q5", QUERY, KEY, (1, 4096, 32))
add_rotary("Q6", (1, 4096, 32, 128), (1, 4096, 8, 128), TABLE, axis=2)

DOCUMENTS = [700, 1400, 900, 1096]
IDS = np.repeat(np.arange(4, dtype=np.int32), DOCUMENTS)[None]
SINKS = jax.ShapeDtypeStruct((64,), jnp.float32)
add_attention("A1", (1, 4096, 32, 8, 4096), 128, triangle(4096))
add_attention("A2f", (1, 8192, 32, 8, 8192), 128, triangle(8192))
add_attention("A3", (1, 4429, 24, 24, 4429), 64, 4429.0**2, causal=False)
add_attention("A4", (1, 8192, 16, 8, 8192), 256, band(8192, 1024), window=1023)
LENGTHS = np.full(64, 4096, np.int32)
add_attention("A5", (64, 1, 32, 8, 4096), 128, 4096.0, kv_lengths=LENGTHS)
add_attention("A6", (1, 4096, 64, 8, 4096), 64, band(4096, 128), window=127, sinks=SINKS)
add_attention("A7", (1, 4096, 32, 8, 4096), 128, sum(map(triangle, DOCUMENTS)), segment_ids=IDS)
add_attention("A8", (1, 32768, 28, 4, 32768), 128, triangle(32768))
