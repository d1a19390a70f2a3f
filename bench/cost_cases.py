"""Our kernels as cases for a static cost tool: CASES[name] = (fn, args, {"flops", "bytes", ...}).

fn is the JAX function that the torch op runs on the TPU. The counts are the caller's: inputs read
once, outputs written once, weights of experts without rows not read. Group sizes and routing are
real arrays, because an estimate follows them; everything else is a shape. "op" and what stands
beside it name the operation, so that cases.py finds its peers; "head" is the width of an attention
head and "head_share" the share of the FLOPs that adds up over it, which the floor depends on;
"ordinary" says that the values are such that a kernel which looks for rare ones (NaN, infinite, too
far apart) finds none.
"""

from __future__ import annotations

import functools
import math
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import tree  # noqa: F401  (makes tpu_kernels importable)
from tpu_kernels.kernels.flash_attention import lowering as attention
from tpu_kernels.kernels.moe_experts import lowering as experts
from tpu_kernels.kernels.ragged_dot import lowering as grouped
from tpu_kernels.kernels.ragged_dot import lowering_quantized as grouped_quantized
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
        "op": "ragged_dot",
        "transpose_rhs": transpose,
    }
    fn = functools.partial(ragged_dot, transpose_rhs=transpose)
    CASES[name] = (fn, (bf16(m, k), rhs, sizes), counts)


def add_experts(
    name: str,
    t: int,
    e: int,
    *,
    is_shard: bool,
    h: int = 2048,
    i: int = 768,
    num_routed: int = 128,
    topk: int = 8,
) -> None:
    """A Qwen3-30B-A3B layer: 8 of 128 experts a token; a shard holds the first e of them."""
    random = np.random.default_rng(0)
    chosen = [random.choice(num_routed, topk, replace=False) for _ in range(t)]
    index = np.stack(chosen).astype(np.int32)
    if t == 1 and is_shard and (num_routed, topk) == (128, 8):
        index[0] = [3, 20, 40, 50, 60, 70, 80, 90]  # one local expert
    index = np.where(index < e, index, e).astype(np.int32)
    rows, active = int((index < e).sum()), len(np.unique(index[index < e]))
    counts = {
        "flops": 2.0 * rows * 3 * i * h,
        "bytes": 2.0 * (2 * t * h + active * 3 * i * h) + t * topk * 6,
        "op": "moe_experts",
    }
    arrays = (bf16(t, h), index, bf16(t, topk), bf16(e, 2 * i, h), bf16(e, h, i))
    CASES[name] = (moe_experts, arrays, counts)


class Moe(NamedTuple):
    """An experts layer of a model, and how many of its experts a chip holds."""

    held: int
    num_routed: int
    topk: int
    h: int
    i: int
    activation: str = "silu"
    transposed: bool = False
    has_bias: bool = False


STORED = {  # (dtype, bytes of a weight)
    "bf16": (jnp.bfloat16, 2),
    "int8": (jnp.int8, 1),
    "e4m3": (jnp.float8_e4m3fn, 1),
    "e5m2": (jnp.float8_e5m2, 1),
    "int4": (jnp.uint8, 0.5),
}


def ragged_dot_quantized(lhs, rhs, scale, group_sizes, *, transpose_rhs: bool):
    tensors = (lhs, rhs, scale, group_sizes, None, None)
    static = (transpose_rhs, "default", "bfloat16")
    return grouped_quantized.ragged_dot_quantized(*tensors, *static, chip=target_chip())


def add_ragged_dot_quantized(
    name: str, m: int, k: int, n: int, sizes: np.ndarray, stored: str, block: int | None = None
) -> None:
    """Both layouts: R10.int8 is [g, k, n], R10T.int8 is [g, n, k]."""
    g, active = len(sizes), int((sizes > 0).sum())
    dtype, size = STORED[stored]
    num_stored = k // 2 if stored == "int4" else k
    blocks = () if block is None else (k // block,)
    weight_bytes = n * k * size + 4 * n * math.prod(blocks)
    counts = {
        "flops": 2.0 * int(sizes.sum()) * k * n,
        "bytes": 2.0 * m * (k + n) + active * weight_bytes + 4 * g,
    }
    scale = jax.ShapeDtypeStruct((g, *blocks, n), jnp.float32)
    for transpose in (False, True):
        shape = (g, n, num_stored) if transpose else (g, num_stored, n)
        arrays = (bf16(m, k), jax.ShapeDtypeStruct(shape, dtype), scale, sizes)
        fn = functools.partial(ragged_dot_quantized, transpose_rhs=transpose)
        base, _, rest = name.partition(".")
        CASES[f"{base}T.{rest}" if transpose else name] = (fn, arrays, counts)


def moe_layer(x, index, weights, *more, moe: Moe, is_quantised: bool):
    projections, more = more[:2], more[2:]
    biases, more = (more[:2], more[2:]) if moe.has_bias else ((None, None), more)
    scales = more if is_quantised else (None, None)
    options = (moe.activation, moe.transposed, True, moe.held)
    tensors = (x, index, weights, *projections, *biases, *scales)
    return experts.moe_experts_quantized(*tensors, *options, chip=target_chip())


def add_moe(name: str, t: int, moe: Moe, stored: str = "bf16", block: int | None = None) -> None:
    """`stored`: of STORED; `block`: values along the contraction that share a scale, None: all."""
    random = np.random.default_rng(0)
    chosen = [random.choice(moe.num_routed, moe.topk, replace=False) for _ in range(t)]
    index = np.stack(chosen).astype(np.int32)
    if t == 1 and moe.held < moe.num_routed:
        index[0] = moe.held - 1 + np.arange(moe.topk)  # one local expert
    index = np.where(index < moe.held, index, moe.held).astype(np.int32)
    rows, active = int((index < moe.held).sum()), len(np.unique(index[index < moe.held]))
    dtype, size = STORED[stored]
    arrays, weight_bytes = [], 0.0
    scales, biases = [], []
    for n, k in ((2 * moe.i, moe.h), (moe.h, moe.i)):
        num_stored = k // 2 if stored == "int4" else k
        shape = (num_stored, n) if moe.transposed else (n, num_stored)
        arrays.append(jax.ShapeDtypeStruct((moe.held, *shape), dtype))
        biases.append(bf16(moe.held, n))
        blocks = () if block is None else (k // block,)
        scales.append(jax.ShapeDtypeStruct((moe.held, *blocks, n), jnp.float32))
        weight_bytes += n * k * size + 4 * n * math.prod(blocks) * (stored != "bf16")
        weight_bytes += 2 * n * moe.has_bias
    arrays += biases if moe.has_bias else []
    arrays += scales if stored != "bf16" else []
    counts = {
        "flops": 2.0 * rows * 3 * moe.i * moe.h,
        "bytes": 4.0 * t * moe.h + active * weight_bytes + t * moe.topk * 6,
    }
    fn = functools.partial(moe_layer, moe=moe, is_quantised=stored != "bf16")
    CASES[name] = (fn, (bf16(t, moe.h), index, bf16(t, moe.topk), *arrays), counts)


def add_norm(name: str, fn, rows: int, d: int, num_arrays: int, num_vectors: int, *static) -> None:
    """num_arrays of [rows, d] and num_vectors of [d] are read or written."""

    def run(*arrays):
        *rest, weight = arrays
        return fn(*rest, weight, 1e-6, *static, chip=target_chip())

    num_inputs = {norms.rms_norm: 1}.get(fn, 2)
    args = (*(bf16(rows, d) for _ in range(num_inputs)), bf16(d))
    moved = 2.0 * (num_arrays * rows * d + num_vectors * d)
    CASES[name] = (run, args, {"flops": 0.0, "bytes": moved, "op": fn.__name__})


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
    counts = {
        "flops": 0.0,
        "bytes": float(moved),
        "op": "qk_norm_rotary" if has_norm else "apply_rotary",
        "axis": axis,
        "interleaved": interleaved,
    }
    CASES[name] = (qk_norm_rotary if has_norm else fn, arrays, counts)


def flash_attention(q, k, v, *masks, causal: bool, window: int, names: tuple[str, ...] = ()):
    given = dict(zip(names, masks, strict=True))
    ids, lengths = given.get("segment_ids"), given.get("kv_lengths")
    tensors = (given.get("sinks"), ids, ids, None, lengths)
    static = (causal, window, 0 if window >= 0 else -1, q.shape[-1] ** -0.5, 0.0, False)
    return attention.flash_attention(q, k, v, *tensors, *static, chip=target_chip())


def decode_heads_first(q, k, v, kv_lengths):
    """q, k and v are [b, h, s, d]."""
    static = (True, -1, -1, q.shape[-1] ** -0.5, 0.0, True)
    masks = (None, None, None, None, kv_lengths)
    return attention.flash_attention(q, k, v, *masks, *static, chip=target_chip())


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
    counts = {
        "flops": 4.0 * b * hq * pairs * d,
        "bytes": 2.0 * b * d * (2 * sq * hq + 2 * sk * hkv),
        "op": "flash_attention",
        "head": d,
        "head_share": 1 / 2,
        "ordinary": True,
        "causal": causal,
        "window": window,
        "masks": list(masks),
    }
    CASES[name] = (fn, arrays, counts)


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
        "op": "weight_grad",
    },
)
add_ragged_dot("R9", 32768, 1536, 2048, uniform(128, 32768), False)  # lhs gradient of R3
add_ragged_dot("R11", 8, 2048, 1536, ONE_ROW, True)
for stored in ("int8", "e4m3", "e5m2", "int4"):
    add_ragged_dot_quantized(f"R10.{stored}", 512, 2048, 1536, uniform(16, 512), stored)
add_ragged_dot_quantized("R10.int8.b128", 512, 2048, 1536, uniform(16, 512), "int8", 128)
add_ragged_dot_quantized("R10.int4.b32", 512, 2048, 1536, uniform(16, 512), "int4", 32)
add_ragged_dot_quantized("R10.int4.b128", 512, 2048, 1536, uniform(16, 512), "int4", 128)

for tokens in (1, 64, 256, 512):
    add_experts(f"E1.{tokens}", tokens, 16, is_shard=True)
for tokens in (64, 4096):
    add_experts(f"E2.{tokens}", tokens, 128, is_shard=False)

add_experts("E1.8", 8, 16, is_shard=True)
QWEN3, QWEN3_EP8 = Moe(128, 128, 8, 2048, 768), Moe(16, 128, 8, 2048, 768)
for stored in ("int8", "e4m3", "e5m2", "int4"):
    for tokens in (1, 8, 64, 256, 512):
        add_moe(f"E1.{tokens}.{stored}", tokens, QWEN3_EP8, stored)
    for tokens in (64, 4096):
        add_moe(f"E2.{tokens}.{stored}", tokens, QWEN3, stored)
add_moe("E1.64.int8.b128", 64, QWEN3_EP8, "int8", 128)
add_moe("E1.64.int4.b128", 64, QWEN3_EP8, "int4", 128)
add_moe("E1.64.int4.b32", 64, QWEN3_EP8, "int4", 32)
OAI = {"activation": "swiglu_oai", "transposed": True, "has_bias": True}
LAYERS = {  # one chip, and a rank of eight
    "gemma4_26b": (Moe(128, 128, 8, 2816, 704, "gelu_tanh"), 16),
    "gpt_oss_20b": (Moe(32, 32, 4, 2880, 2880, **OAI), 4),
    "gpt_oss_120b": (Moe(128, 128, 4, 2880, 2880, **OAI), 16),
    "mixtral_8x7b": (Moe(8, 8, 2, 4096, 14336), 1),
    "deepseek_v3": (Moe(256, 256, 8, 7168, 2048), 32),
}
SMALLEST_HBM = 16e9  # of a v5e, in bytes: DeepSeek-V3's experts in bfloat16 take 22.5e9
for model, (layer, shard) in LAYERS.items():
    for stored in ("bf16", "int8", "int4"):
        if 3 * layer.held * layer.h * layer.i * STORED[stored][1] < SMALLEST_HBM:
            add_moe(f"E3.{model}.{stored}", 64, layer, stored)
        add_moe(f"E3.{model}_ep8.{stored}", 64, layer._replace(held=shard), stored)

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
CASES["A5h"] = (  # A5 from a cache as transformers holds it
    decode_heads_first,
    (bf16(64, 32, 1, 128), bf16(64, 8, 4096, 128), bf16(64, 8, 4096, 128), LENGTHS),
    {
        "flops": 4.0 * 64 * 32 * 4096 * 128,
        "bytes": 2.0 * 64 * 128 * (2 * 32 + 2 * 4096 * 8),
        "op": "flash_attention_heads_first",
        "head": 128,
        "head_share": 1 / 2,
        "ordinary": True,
    },
)
add_attention("A6", (1, 4096, 64, 8, 4096), 64, band(4096, 128), window=127, sinks=SINKS)
add_attention("A7", (1, 4096, 32, 8, 4096), 128, sum(map(triangle, DOCUMENTS)), segment_ids=IDS)
add_attention("A8", (1, 32768, 28, 4, 32768), 128, triangle(32768))


def attention_backward(q, k, v, out, lse, grad_out):
    """Gradients of q, k and v under a causal mask."""
    static = (True, -1, -1, q.shape[-1] ** -0.5, 0.0, False, True, True, False)
    masks = (None,) * 5
    arrays = (grad_out, q, k, v, out, lse)
    chip = target_chip()
    return attention.flash_attention_backward(*arrays, *masks, *static, chip=chip)[:3]


def attention_and_backward(q, k, v, grad_out):
    out, lse = flash_attention(q, k, v, causal=True, window=-1)
    return out, *attention_backward(q, k, v, out, lse, grad_out)


def add_attention_backward(name: str, s: int, hq: int, hkv: int, d: int) -> None:
    """A causal backward with its forward, and "-alone"."""
    q, k = bf16(1, s, hq, d), bf16(1, s, hkv, d)
    lse = jax.ShapeDtypeStruct((1, hq, s), jnp.float32)
    matmul = 2.0 * hq * triangle(s) * d
    moved = 2.0 * s * d * (hq + hkv)  # of q and out, or k and v, or gradients of either
    counts = {"op": "flash_attention_backward", "head": d, "causal": True, "window": -1}
    counts["ordinary"] = True
    for suffix, fn, arrays, matmuls, over_head, passes in (
        ("", attention_and_backward, (q, k, k, q), 7, 3, 5),  # twice Q K', dO V'
        ("-alone", attention_backward, (q, k, k, q, lse, q), 5, 2, 4),
    ):
        work = {"flops": matmuls * matmul, "bytes": passes * moved, "masks": []}
        work["head_share"] = over_head / matmuls
        CASES[name + suffix] = (fn, arrays, counts | work)


add_attention_backward("A2b", 8192, 32, 8, 128)
