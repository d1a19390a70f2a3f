"""The torch programs that test_torch_tpu.py lowers and compiles: {name: (function, tensors)}."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from tpu_kernels.kernels.flash_attention.ops import flash_attention
from tpu_kernels.kernels.flash_attention.packed import flash_attention_packed
from tpu_kernels.kernels.flash_attention.transformers import flash_attn_forward
from tpu_kernels.kernels.moe_experts.ops import moe_experts
from tpu_kernels.kernels.ragged_dot.ops import ragged_dot
from tpu_kernels.kernels.rmsnorm.ops import add_rms_norm, rms_norm, rms_norm_gated
from tpu_kernels.kernels.rotary.ops import apply_rotary, qk_norm_rotary

PROGRAMS: dict[str, tuple[Callable[..., object], list[torch.Tensor]]] = {}


def _tensor(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta").requires_grad_(grad)


def _with_gradients(fn: Callable[..., torch.Tensor]) -> Callable[..., object]:
    @functools.wraps(fn)
    def run(*args: torch.Tensor) -> object:
        out = fn(*args)
        inputs = [arg for arg in args if arg.requires_grad]
        return out, *torch.autograd.grad(out.float().square().sum(), inputs)

    return run


def _grouped(g: int, rows: int, k: int, n: int, *, transpose: bool, **kwargs: object) -> None:
    layout = "transposed" if transpose else "plain"
    name = f"ragged_dot_{layout}_{g}x{rows}x{k}x{n}" + "".join(f"_{key}" for key in kwargs)
    rhs = (g, n, k) if transpose else (g, k, n)
    sizes = torch.empty(g, dtype=torch.int64, device="meta")

    def run(lhs, rhs, sizes, *bias):
        more = {"bias": bias[0]} if bias else {}
        return ragged_dot(lhs, rhs, sizes, transpose_rhs=transpose, **more)

    tensors = [_tensor(rows, k, grad=True), _tensor(*rhs, grad=True), sizes]
    if kwargs.get("bias"):
        tensors.append(_tensor(g, n, grad=True))
    PROGRAMS[name] = (_with_gradients(run), tensors)


_grouped(8, 256, 256, 512, transpose=True)
_grouped(8, 250, 192, 320, transpose=False, bias=True)


def _grouped_quantised(g: int, rows: int, k: int, n: int, dtype: torch.dtype, blocks: int) -> None:
    """Forward, and the gradient of lhs, in the transposed layout."""

    def run(lhs, weight, scale, sizes):
        return ragged_dot(lhs, weight, sizes, rhs_scale=scale, transpose_rhs=True)

    weight = _tensor(g, n, k // 2 if dtype == torch.uint8 else k, dtype=dtype)
    scale = _tensor(g, *((blocks,) if blocks > 1 else ()), n, dtype=torch.float32)
    sizes = torch.empty(g, dtype=torch.int64, device="meta")
    name = f"quantized_ragged_dot_{str(dtype).removeprefix('torch.')}_{g}x{rows}x{k}x{n}"
    PROGRAMS[name] = (_with_gradients(run), [_tensor(rows, k, grad=True), weight, scale, sizes])


_grouped_quantised(8, 64, 256, 512, torch.int8, 2)
_grouped_quantised(8, 64, 256, 512, torch.float8_e4m3fn, 1)


def _experts(t: int, e: int, h: int, i: int, topk: int) -> None:
    def run(x, index, weights, gate_up, down):
        return moe_experts(x, index, weights, gate_up, down)

    tensors = [
        _tensor(t, h, grad=True),
        torch.empty(t, topk, dtype=torch.int64, device="meta"),
        _tensor(t, topk, dtype=torch.float32, grad=True),
        _tensor(e, 2 * i, h, grad=True),
        _tensor(e, h, i, grad=True),
    ]
    PROGRAMS[f"moe_experts_{t}x{e}x{h}x{i}"] = (_with_gradients(run), tensors)


_experts(64, 8, 256, 128, 2)


def _quantised_experts(t: int, e: int, h: int, i: int, topk: int) -> None:
    """int4 into the gate, int8 in blocks out of it; the gradients of what has one."""

    def run(x, index, weights, gate_up, down, bias, *scales):
        scales = dict(zip(("gate_up_scale", "down_scale"), scales, strict=True))
        return moe_experts(x, index, weights, gate_up, down, gate_up_bias=bias, **scales)

    tensors = [
        _tensor(t, h, grad=True),
        torch.empty(t, topk, dtype=torch.int64, device="meta"),
        _tensor(t, topk, dtype=torch.float32, grad=True),
        _tensor(e, 2 * i, h // 2, dtype=torch.uint8),
        _tensor(e, h, i, dtype=torch.int8),
        _tensor(e, 2 * i, grad=True),
        _tensor(e, 2 * i, dtype=torch.float32),
        _tensor(e, i // 128, h, dtype=torch.float32),
    ]
    PROGRAMS[f"moe_experts_quantized_{t}x{e}x{h}x{i}"] = (_with_gradients(run), tensors)


_quantised_experts(64, 8, 256, 256, 2)


def _norms(*shape: int) -> None:
    def run(x, residual, gate, weight):
        normed, total = add_rms_norm(x, residual, weight)
        return rms_norm_gated(rms_norm(normed, None), gate, weight) + total

    tensors = [_tensor(*shape, grad=True) for _ in range(3)] + [_tensor(shape[-1], grad=True)]
    PROGRAMS["rms_norm_" + "x".join(map(str, shape))] = (_with_gradients(run), tensors)


_norms(2, 64, 256)
_norms(3, 5, 80)


def _rotary(b: int, s: int, d: int) -> None:
    def run(q, k, q_weight, k_weight, cos, sin):
        q, k = qk_norm_rotary(q, k, q_weight, k_weight, cos, sin)
        return sum(x.float().sum() for x in apply_rotary(q, k, cos, sin))

    tensors = [
        _tensor(b, 8, s, d, grad=True),
        _tensor(b, 2, s, d, grad=True),
        _tensor(d, grad=True),
        _tensor(d, grad=True),
        _tensor(1, s, d),
        _tensor(1, s, d),
    ]
    PROGRAMS[f"rotary_{b}x{s}x{d}"] = (_with_gradients(run), tensors)


_rotary(2, 256, 128)
_rotary(1, 100, 64)


def _attention(name: str, fn: Callable[..., object], shapes: list[tuple], *more: object) -> None:
    tensors = [_tensor(*shape, grad=True) for shape in shapes]
    PROGRAMS[f"flash_attention_{name}"] = (_with_gradients(fn), [*tensors, *more])


def _ints(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _every_mask(q, k, v, sinks, q_ids, kv_ids, mask, lengths):
    return flash_attention(
        q,
        k,
        v,
        causal=True,
        window_size=(100, 0),
        softcap=30.0,
        sinks=sinks,
        q_segment_ids=q_ids,
        kv_segment_ids=kv_ids,
        mask=mask,
        kv_lengths=lengths,
    )


_attention(
    "every_mask",
    _every_mask,
    [(2, 200, 8, 128), (2, 256, 2, 128), (2, 256, 2, 128), (8,)],
    _ints(2, 200),
    _ints(2, 256),
    _ints(2, 1, 200, 256, dtype=torch.bool),
    _ints(2),
)
_attention(
    "causal",
    lambda q, k, v: flash_attention(q, k, v, causal=True),
    [(1, 512, 8, 64), (1, 512, 2, 64), (1, 512, 2, 64)],
)
_attention(
    "static_cache",
    lambda q, k, v: flash_attn_forward(None, q, k, v, None)[0],
    [(1, 8, 256, 128), (1, 2, 512, 128), (1, 2, 512, 128)],
)
_attention(
    "decode",
    lambda q, k, v: flash_attn_forward(None, q, k, v, None)[0],
    [(4, 8, 1, 128), (4, 2, 512, 128), (4, 2, 512, 128)],
)
_attention(
    "packed",
    lambda q, k, v, cu: flash_attention_packed(q, k, v, cu, cu, 100, 100, causal=True),
    [(300, 8, 128), (300, 2, 128), (300, 2, 128)],
    _ints(5),
)
