"""moe_experts as one torch op: argument checks, dispatch, shape function and gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch.library import CustomOpDef

from ..._ops import add_op_namespace_prefix
from ...tpu_runtime import checks, define_op, differentiable
from ..ragged_dot import quantized
from . import reference
from .gates import ACTIVATIONS


def moe_experts(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str = "silu",
    transposed: bool = False,
    has_gate: bool = True,
    num_experts: int | None = None,
    gate_up_scale: torch.Tensor | None = None,
    down_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The experts of a mixture-of-experts layer, both matmuls, gate and combination in one op:

    out[t] = sum_j top_k_weights[t, j] * (gate(x[t] @ W1[e].T + b1[e]) @ W2[e].T + b2[e]),
    e = top_k_index[t, j], gate(z) = act(z[:i]) * z[i:], or act(z) without a gate.

    Args:
        hidden_states: [t, h] bfloat16, float16 or float32; float64 on the CPU only.
        top_k_index: [t, topk] integers. A slot with index >= num_experts contributes exactly zero
            and gets zero gradient, even if its weight is NaN (another rank's expert). Negative
            indices are a ValueError for eager CPU calls, elsewhere they contribute zero too.
        top_k_weights: [t, topk], any float dtype.
        gate_up_proj: [e, 2i, h], gate half first; [e, h, 2i] with `transposed`. With
            `has_gate=False` it is the up projection alone, i wide. Same dtype as hidden_states, or
            quantised: int8, float8_e4m3fn, float8_e5m2, or int4 as uint8 that holds two values
            along h, low nibble first (`quantize_experts` makes them).
        down_proj: [e, h, i]; [e, i, h] with `transposed`. Quantised or not by itself; int4 holds
            two values along i.
        gate_up_bias, down_bias: [e, 2i] and [e, h].
        activation: "silu", "gelu", "gelu_tanh", "relu2" (relu squared), or "swiglu_oai" (gpt-oss:
            interleaved gate and up, clamped at 7, (up + 1) * gate * sigmoid(1.702 * gate)).
        num_experts: the sentinel id, by default the number of experts held, e.
        gate_up_scale, down_scale: of quantised projections, else None: one scale per output
            channel, [e, 2i] and [e, h], or per block of consecutive inputs, [e, k_blocks, 2i] and
            [e, k_blocks, h], in this layout with `transposed` too. Any float dtype.

    Returns:
        [t, h] in hidden_states.dtype, a new tensor. float32 accumulation and sum over topk.

    Differentiable once in hidden_states, top_k_weights, the projections and the biases; quantised
    projections and their scales have no gradient.

    Raises:
        TypeError, ValueError: for an argument of wrong type, rank, size, dtype or device.
        NotImplementedError: if a quantised projection or a scale requires a gradient.
    """
    checks.require_bool("transposed", transposed)
    checks.require_bool("has_gate", has_gate)
    checks.require_choice("activation", activation, ACTIVATIONS)
    if activation == "swiglu_oai" and not has_gate:
        raise ValueError("has_gate: expected True with activation 'swiglu_oai', got False")
    tensors = {
        "hidden_states": hidden_states,
        "top_k_index": top_k_index,
        "top_k_weights": top_k_weights,
        "gate_up_proj": gate_up_proj,
        "down_proj": down_proj,
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
        "gate_up_scale": gate_up_scale,
        "down_scale": down_scale,
    }
    _check_tensors(tensors, transposed)
    hidden_states, gate_up_proj, down_proj, gate_up_bias, down_bias = _one_dtype(
        hidden_states, gate_up_proj, down_proj, gate_up_bias, down_bias
    )
    _check_shapes(
        hidden_states,
        top_k_index,
        top_k_weights,
        gate_up_proj,
        down_proj,
        gate_up_bias,
        down_bias,
        transposed,
        has_gate,
    )
    num_experts = _check_num_experts(num_experts, gate_up_proj.shape[0], top_k_index)
    tensors = (
        hidden_states,
        top_k_index.to(torch.int32),
        top_k_weights,
        gate_up_proj,
        down_proj,
        gate_up_bias,
        down_bias,
    )
    options = (activation, transposed, has_gate, num_experts)
    if gate_up_scale is None and down_scale is None:
        return _moe_experts(*tensors, *options)
    wide = torch.promote_types(hidden_states.dtype, torch.float32)
    scales = (None if s is None else s.to(wide) for s in (gate_up_scale, down_scale))
    return _moe_experts_quantized(*tensors, *scales, *options)


def _check_tensors(tensors: dict[str, torch.Tensor | None], transposed: bool) -> None:
    """Ranks, dtypes and devices, and whether scales and projections go together."""
    checks.require_tensor("hidden_states", tensors["hidden_states"], 2, checks.FLOATS)
    checks.require_tensor("top_k_index", tensors["top_k_index"], 2, checks.INTEGERS)
    checks.require_tensor("top_k_weights", tensors["top_k_weights"], 2, checks.FLOATS)
    for name in ("gate_up", "down"):
        weight, scale = tensors[f"{name}_proj"], tensors[f"{name}_scale"]
        checks.require_tensor(f"{name}_proj", weight, 3, checks.FLOATS + quantized.STORED_DTYPES)
        quantized.check_scale(f"{name}_proj", weight, f"{name}_scale", scale, not transposed)
    for name in ("gate_up_bias", "down_bias"):
        if tensors[name] is not None:
            checks.require_tensor(name, tensors[name], 2, checks.FLOATS)
    checks.require_same_device(**tensors)


def _one_dtype(hidden_states, gate_up_proj, down_proj, gate_up_bias, down_bias):
    """Float tensors in one dtype (under autocast promoted), quantised projections as they are."""
    kept = [quantized.is_quantised(weight) for weight in (gate_up_proj, down_proj)]
    floats = (
        hidden_states,
        None if kept[0] else gate_up_proj,
        None if kept[1] else down_proj,
        gate_up_bias,
        down_bias,
    )
    x, first, second, *biases = checks.promote_under_autocast(*floats)
    checks.require_same_dtype(
        hidden_states=x,
        gate_up_proj=first,
        down_proj=second,
        gate_up_bias=biases[0],
        down_bias=biases[1],
    )
    return x, gate_up_proj if kept[0] else first, down_proj if kept[1] else second, *biases


def _check_shapes(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    transposed: bool,
    has_gate: bool,
) -> None:
    t, h = hidden_states.shape
    checks.require_shape("top_k_index", top_k_index, (t, top_k_index.shape[1]), "[t, topk]")
    checks.require_shape("top_k_weights", top_k_weights, top_k_index.shape, "[t, topk]")
    e, i = gate_up_proj.shape[0], quantized.num_k(down_proj, not transposed)
    width = 2 * i if has_gate else i
    rows = "2i" if has_gate else "i"
    for name, weight, shape, letters in (
        ("down_proj", down_proj, (h, i), ("h", "i")),
        ("gate_up_proj", gate_up_proj, (width, h), (rows, "h")),
    ):
        n, k = shape
        means, per = letters, ""
        if weight.dtype == quantized.INT4:
            if k % 2:
                raise ValueError(f"{name}: int4 needs an even {letters[1]}, got {k}")
            k, per = k // 2, "/2"
        means = (letters[0], letters[1] + per)
        if transposed:
            n, k, means = k, n, means[::-1]
        checks.require_shape(name, weight, (e, n, k), f"[e, {means[0]}, {means[1]}]")
    if gate_up_bias is not None:
        checks.require_shape("gate_up_bias", gate_up_bias, (e, width), f"[e, {rows}]")
    if down_bias is not None:
        checks.require_shape("down_bias", down_bias, (e, h), "[e, h]")


def _check_num_experts(num_experts: int | None, e: int, top_k_index: torch.Tensor) -> int:
    if num_experts is None:
        num_experts = e
    checks.require_int("num_experts", num_experts)
    if not 0 <= num_experts <= e:
        raise ValueError(
            f"num_experts: expected at most the {e} experts that gate_up_proj holds, "
            f"got {num_experts}"
        )
    values = checks.values_on_host(top_k_index)
    if values and any(expert < 0 for row in values for expert in row):
        raise ValueError(
            "top_k_index: expected no negative expert; slots without a local expert hold "
            f"num_experts = {num_experts}"
        )
    return num_experts


def _fake(hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
    return hidden_states.new_empty(hidden_states.shape)


def _fake_backward(
    grad_out,
    hidden_states,
    top_k_index,
    top_k_weights,
    gate_up_proj,
    down_proj,
    gate_up_bias,
    down_bias,
    *options,
) -> tuple[torch.Tensor, ...]:
    inputs = (hidden_states, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias)
    needs = options[-len(inputs) :]
    return tuple(
        x.new_empty(x.shape) if needed else hidden_states.new_empty(0)
        for x, needed in zip(inputs, needs, strict=True)
    )


def _kernel(name: str):
    def load():
        from . import lowering

        return getattr(lowering, name)

    return load


_TENSORS = (
    "Tensor hidden_states, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up_proj, "
    "Tensor down_proj, Tensor? gate_up_bias, Tensor? down_bias, "
)
_SCALES = "Tensor? gate_up_scale, Tensor? down_scale, "
_OPTIONS = "str activation, bool transposed, bool has_gate, int num_experts"
_NEEDS = (
    ", bool needs_hidden_states, bool needs_top_k_weights, bool needs_gate_up_proj, "
    "bool needs_down_proj, bool needs_gate_up_bias, bool needs_down_bias"
)
_GRADS = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


def _define(name: str, tensors: str) -> tuple[CustomOpDef, CustomOpDef]:
    """The op `name` and its backward; `tensors` starts with those of _TENSORS."""
    forward = define_op(
        add_op_namespace_prefix(name),
        f"({tensors}{_OPTIONS}) -> Tensor",
        reference=getattr(reference, name),
        fake=_fake,
        load_kernel=_kernel(name),
    )
    gradient = define_op(
        add_op_namespace_prefix(f"{name}_backward"),
        f"(Tensor grad_out, {tensors}{_OPTIONS}{_NEEDS}) -> {_GRADS}",
        reference=getattr(reference, f"{name}_backward"),
        fake=_fake_backward,
        load_kernel=_kernel(f"{name}_backward"),
    )
    num_tensors = tensors.count("Tensor")

    def save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[:num_tensors])
        ctx.options = inputs[num_tensors:]

    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, _, *needs = ctx.needs_input_grad[:7]
        needs = (x, *needs)
        grads = gradient(grad_out, *ctx.saved_tensors, *ctx.options, *needs)
        found = [grad if needed else None for grad, needed in zip(grads, needs, strict=True)]
        rest = len(ctx.needs_input_grad) - 7
        return (found[0], None, *found[1:], *[None] * rest)

    differentiable(forward, backward, save=save)
    return forward, gradient


_moe_experts, _moe_experts_backward = _define("moe_experts", _TENSORS)
_moe_experts_quantized, _moe_experts_quantized_backward = _define(
    "moe_experts_quantized", _TENSORS + _SCALES
)
