"""moe_experts as one torch op: argument checks, dispatch, shape function and gradient."""

from __future__ import annotations

from typing import Any

import torch

from ..._ops import add_op_namespace_prefix
from ...tpu_runtime import checks, define_op
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
    checks.require_tensor("hidden_states", hidden_states, 2, checks.FLOATS)
    checks.require_tensor("top_k_index", top_k_index, 2, checks.INTEGERS)
    checks.require_tensor("top_k_weights", top_k_weights, 2, checks.FLOATS)
    for name, bias in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias)):
        if bias is not None:
            checks.require_tensor(name, bias, 2, checks.FLOATS)
    keeps_gate_up = quantized.check_weight(
        "gate_up_proj", gate_up_proj, "gate_up_scale", gate_up_scale, not transposed
    )
    keeps_down = quantized.check_weight(
        "down_proj", down_proj, "down_scale", down_scale, not transposed
    )
    checks.require_same_device(
        hidden_states=hidden_states,
        top_k_index=top_k_index,
        top_k_weights=top_k_weights,
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        gate_up_scale=gate_up_scale,
        down_scale=down_scale,
    )
    hidden_states, gate_up, down, gate_up_bias, down_bias = checks.in_one_dtype(
        hidden_states=hidden_states,
        gate_up_proj=None if keeps_gate_up else gate_up_proj,
        down_proj=None if keeps_down else down_proj,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )
    gate_up_proj = gate_up_proj if keeps_gate_up else gate_up
    down_proj = down_proj if keeps_down else down
    _check_routing(hidden_states, top_k_index, top_k_weights)
    _check_weights(
        hidden_states.shape[1],
        gate_up_proj,
        down_proj,
        gate_up_bias,
        down_bias,
        transposed,
        has_gate,
    )
    num_experts = _check_num_experts(num_experts, gate_up_proj.shape[0])
    tensors = (
        hidden_states,
        checks.as_int32(top_k_index),
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


def _check_routing(
    hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> None:
    t, shape = hidden_states.shape[0], top_k_index.shape
    if shape[0] != t:
        raise ValueError(f"top_k_index: expected shape [t, topk] with t = {t}, got {tuple(shape)}")
    checks.require_shape("top_k_weights", top_k_weights, shape, "[t, topk]")
    least = checks.values_on_host(top_k_index, torch.min)
    if least is not None and least < 0:
        raise ValueError(
            f"top_k_index: expected no negative expert, got {least}; slots without a local expert "
            "hold num_experts"
        )


def _check_weights(
    h: int,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    transposed: bool,
    has_gate: bool,
) -> None:
    """Their shapes."""
    e, i = gate_up_proj.shape[0], quantized.num_k(down_proj, not transposed)
    width, rows = (2 * i, "2i") if has_gate else (i, "i")
    _check_weight_shape("down_proj", down_proj, (e, h, i), ("h", "i"), transposed)
    _check_weight_shape("gate_up_proj", gate_up_proj, (e, width, h), (rows, "h"), transposed)
    if gate_up_bias is not None:
        checks.require_shape("gate_up_bias", gate_up_bias, (e, width), f"[e, {rows}]")
    if down_bias is not None:
        checks.require_shape("down_bias", down_bias, (e, h), "[e, h]")


def _check_weight_shape(
    name: str,
    weight: torch.Tensor,
    shape: tuple[int, int, int],  # [e, n, k]
    letters: tuple[str, str],  # what n and k are called
    transposed: bool,
) -> None:
    (e, n, k), (rows, columns) = shape, letters
    if weight.dtype == quantized.INT4:
        if k % 2:
            raise ValueError(f"{name}: int4 needs an even {columns}, got {k}")
        k, columns = k // 2, f"{columns}/2"
    if transposed:
        n, k, rows, columns = k, n, columns, rows
    checks.require_shape(name, weight, (e, n, k), f"[e, {rows}, {columns}]")


def _check_num_experts(num_experts: int | None, e: int) -> int:
    if num_experts is None:
        return e
    checks.require_int("num_experts", num_experts)
    if not 0 <= num_experts <= e:
        raise ValueError(
            f"num_experts: expected at most the {e} experts that gate_up_proj holds, "
            f"got {num_experts}"
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


def _define(name: str, tensors: str) -> tuple[Any, Any]:
    """The op `name` and its backward; `tensors` starts with those of _TENSORS."""
    num_tensors = tensors.count("Tensor")
    gradient = define_op(
        add_op_namespace_prefix(f"{name}_backward"),
        f"(Tensor grad_out, {tensors}{_OPTIONS}{_NEEDS}) -> {_GRADS}",
        reference=getattr(reference, f"{name}_backward"),
        fake=_fake_backward,
        load_kernel=_kernel(f"{name}_backward"),
    )

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

    forward = define_op(
        add_op_namespace_prefix(name),
        f"({tensors}{_OPTIONS}) -> Tensor",
        reference=getattr(reference, name),
        fake=_fake,
        load_kernel=_kernel(name),
        backward=backward,
        save=save,
    )
    return forward, gradient


_moe_experts, _moe_experts_backward = _define("moe_experts", _TENSORS)
_moe_experts_quantized, _moe_experts_quantized_backward = _define(
    "moe_experts_quantized", _TENSORS + _SCALES
)
