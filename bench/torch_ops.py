"""The cases as torch calls: our ops, torch's own, tokamax, and the plain expression.

`implementations(case, on_tpu)` -> {name: function of the case's tensors}. "ours" is the public op,
"plain_torch" what a model writes, torch_* and tokamax_* the ready-made ones, where they apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from tpu_kernels.kernels.flash_attention import ops as attention
from tpu_kernels.kernels.moe_experts import ops as experts
from tpu_kernels.kernels.ragged_dot import ops as grouped
from tpu_kernels.kernels.rmsnorm import ops as norms
from tpu_kernels.kernels.rotary import ops as rotary

from bench.cases import Case

Functions = dict[str, Callable[..., Any]]
DENSE_LIMIT = 16384  # tokens times experts, above which every token through every expert is a joke


def make_tensors(case: Case, device: str, seed: int) -> list[torch.Tensor]:
    """Fresh random inputs; what steers the kernel (sizes, routing, ids) is that of the case."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for arg in case.args:
        if isinstance(arg, np.ndarray):
            tensors.append(torch.from_numpy(arg.copy()))
        else:
            dtype = getattr(torch, str(arg.dtype))
            tensors.append((torch.randn(arg.shape, generator=generator) * 0.5).to(dtype))
    return [tensor.to(device) for tensor in tensors]


def implementations(case: Case, on_tpu: bool) -> Functions:
    """Empty for what is a backward pass by itself: forward and backward are timed together."""
    make = {
        "ragged_dot": _ragged_dot,
        "moe_experts": _experts,
        "flash_attention": _attention,
        "rms_norm": _norm,
        "add_rms_norm": _norm,
        "rms_norm_gated": _norm,
        "apply_rotary": _rotary,
        "qk_norm_rotary": _rotary,
    }.get(case.counts.get("op", ""))
    return make(case, on_tpu) if make else {}


def _ragged_dot(case: Case, on_tpu: bool) -> Functions:
    transpose = case.counts["transpose_rhs"]
    sizes = case.args[2].tolist()

    def as_gkn(rhs):
        return rhs.transpose(1, 2) if transpose else rhs

    def plain(lhs, rhs, _):
        rows = torch.split(lhs, [*sizes, lhs.shape[0] - sum(sizes)])
        return torch.cat([row @ w for row, w in zip(rows, as_gkn(rhs), strict=False) if len(row)])

    def native(lhs, rhs, group_sizes):
        ends = torch.cumsum(group_sizes, 0, dtype=torch.int32)
        return functional.grouped_mm(lhs, as_gkn(rhs), offs=ends)

    functions: Functions = {
        "ours": lambda *x: grouped.ragged_dot(*x, transpose_rhs=transpose),
        "plain_torch": plain,
        "torch_grouped_mm": native,
    }
    if on_tpu:

        def tokamax(lhs, rhs, group_sizes):
            from tokamax.experimental.torch_tpu import ops

            return ops.ragged_dot()(lhs, as_gkn(rhs), group_sizes)

        functions["torch_tpu_ragged_dot"] = lambda lhs, rhs, group_sizes: torch.tpu.ops.ragged_dot(
            lhs, as_gkn(rhs), group_sizes
        )
        functions["tokamax_ragged_dot"] = tokamax
    return functions


def _experts(case: Case, on_tpu: bool) -> Functions:
    num_experts = case.args[4].shape[0]

    def dense(x, index, weights, gate_up, down):
        ids = torch.arange(num_experts, device=x.device)
        route = ((index[:, :, None] == ids) * weights[:, :, None]).sum(1)  # [t, e]
        gate, up = torch.einsum("th,enh->etn", x, gate_up).chunk(2, -1)
        return torch.einsum("eti,ehi->th", functional.silu(gate) * up * route.T[:, :, None], down)

    functions: Functions = {"ours": lambda *x: experts.moe_experts(*x, num_experts=num_experts)}
    if case.args[0].shape[0] * num_experts <= DENSE_LIMIT:
        functions["plain_torch"] = dense
    return functions


def _attention(case: Case, on_tpu: bool) -> Functions:
    counts = case.counts
    causal, window, names = counts["causal"], counts["window"], counts["masks"]
    sq, sk = case.args[0].shape[1], case.args[1].shape[1]

    def ours(q, k, v, *masks):
        given = dict(zip(names, masks, strict=True))
        ids = given.pop("segment_ids", None)
        window_size = (window, 0) if window >= 0 else (-1, -1)
        return attention.flash_attention(
            q,
            k,
            v,
            causal=causal,
            window_size=window_size,
            q_segment_ids=ids,
            kv_segment_ids=ids,
            **given,
        )

    def plain(q, k, v, *masks):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        logits = (q @ k.transpose(2, 3)).float() * q.shape[-1] ** -0.5
        if causal:
            hidden = torch.ones(sq, sk, dtype=torch.bool, device=q.device).triu(sk - sq + 1)
            logits = logits.masked_fill(hidden, float("-inf"))
        return (logits.softmax(-1).to(v.dtype) @ v).transpose(1, 2)

    def sdpa(q, k, v, *masks):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        # torch aligns a causal mask at the first key; a single query sees all of them.
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal and sq > 1, enable_gqa=True
        )
        return out.transpose(1, 2)

    functions: Functions = {"ours": ours}
    if set(names) - {"kv_lengths"} or window >= 0:  # masks that the others write differently
        return functions
    functions["plain_torch"] = plain
    if sq in (1, sk):
        functions["torch_sdpa"] = sdpa
    if on_tpu and sq == sk:

        def splash(q, k, v):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return torch.tpu.ops.splash_sdpa(q, k, v, is_causal=causal).transpose(1, 2)

        functions["torch_tpu_splash"] = splash
    return functions


def _plain_norm(x, weight, eps=1e-6):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _norm(case: Case, on_tpu: bool) -> Functions:
    op = case.counts["op"]

    def with_norm(norm: Callable) -> Callable:
        def run(*tensors):
            if op == "rms_norm":
                return norm(*tensors)
            x, other, weight = tensors
            if op == "add_rms_norm":
                total = x + other
                return norm(total, weight), total
            return (norm(x, weight).float() * functional.silu(other.float())).to(x.dtype)

        return run

    return {
        "ours": getattr(norms, op),
        "plain_torch": with_norm(_plain_norm),
        "torch_rms_norm": with_norm(lambda x, w: functional.rms_norm(x, w.shape, w, 1e-6)),
    }


def _rotary(case: Case, on_tpu: bool) -> Functions:
    counts = case.counts
    static = {"unsqueeze_dim": counts["axis"], "interleaved": counts["interleaved"]}

    def ours(q, k, cos, sin, *weights):
        if weights:
            return rotary.qk_norm_rotary(q, k, *weights, cos, sin, **static)
        return rotary.apply_rotary(q, k, cos, sin, **static)

    def partner(x):
        if static["interleaved"]:
            return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)

    def plain(q, k, cos, sin, *weights):
        if weights:
            q, k = _plain_norm(q, weights[0]), _plain_norm(k, weights[1])
        width = cos.shape[-1]
        cos, sin = cos.unsqueeze(static["unsqueeze_dim"]), sin.unsqueeze(static["unsqueeze_dim"])

        def rotate(x):
            head = x[..., :width]
            return torch.cat((head * cos + partner(head) * sin, x[..., width:]), -1)

        return rotate(q), rotate(k)

    return {"ours": ours, "plain_torch": plain}
