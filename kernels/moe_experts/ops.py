"""moe_experts as one torch op: argument checks, dispatch, shape function and gradient."""

from __future__ import annotations

from typing import Any

import torch

from ..._ops import add_op_namespace_prefix
from ...tpu_runtime import checks, define_op, differentiable
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
            `has_gate=False` it is the up projection alone, i wide. Same dtype as hidden_states.
        down_proj: [e, h, i]; [e, i, h] with `transposed`.
        gate_up_bias, down_bias: [e, 2i] and [e, h].
        activation: "silu", "gelu", "gelu_tanh", "relu2" (relu squared), or "swiglu_oai" (gpt-oss:
            interleaved gate and up, clamped at 7, (up + 1) * gate * sigmoid(1.702 * gate)).
        num_experts: the sentinel id, by default the number of experts held, e.
        gate_up_scale, down_scale: scales of quantised weights; not supported yet.

    Returns:
        [t, h] in hidden_states.dtype, a new tensor. float32 accumulation and sum over topk.

    Differentiable once in hidden_states, top_k_weights, the projections and the biases.

    Raises:
        TypeError, ValueError: for an argument of wrong type, rank, size, dtype or device.
        NotImplementedError: for quantised weights.
    """
    checks.require_bool("transposed", transposed)
    checks.require_bool("has_gate", has_gate)
    checks.require_choice("activation", activation, ACTIVATIONS)
    if activation == "swiglu_oai" and not has_gate:
        raise ValueError("has_gate: expected True with activation 'swiglu_oai', got False")
    if gate_up_scale is not None or down_scale is not None:
        raise NotImplementedError(
            "gate_up_scale, down_scale: quantised experts are not supported yet; dequantise the "
            "projections to hidden_states.dtype first"
        )
    checks.require_tensor("hidden_states", hidden_states, 2, checks.FLOATS)
    checks.require_tensor("top_k_index", top_k_index, 2, checks.INTEGERS)
    checks.require_tensor("top_k_weights", top_k_weights, 2, checks.FLOATS)
    checks.require_tensor("gate_up_proj", gate_up_proj, 3, checks.FLOATS)
    checks.require_tensor("down_proj", down_proj, 3, checks.FLOATS)
    for name, bias in (("gate_up_bias", gate_up_bias), ("down_bias", down_bias)):
        if bias is not None:
            checks.require_tensor(name, bias, 2, checks.FLOATS)
    checks.require_same_device(
        hidden_states=hidden_states,
        top_k_index=top_k_index,
        top_k_weights=top_k_weights,
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )
    hidden_states, gate_up_proj, down_proj, gate_up_bias, down_bias = checks.promote_under_autocast(
        hidden_states, gate_up_proj, down_proj, gate_up_bias, down_bias
    )
    checks.require_same_dtype(
        hidden_states=hidden_states,
        gate_up_proj=gate_up_proj,
        down_proj=down_proj,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
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
    return _moe_experts(
        hidden_states,
        top_k_index.to(torch.int32),
        top_k_weights,
        gate_up_proj,
        down_proj,
        gate_up_bias,
        down_bias,
        activation,
        transposed,
        has_gate,
        num_experts,
    )


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
    e, i = gate_up_proj.shape[0], down_proj.shape[1 if transposed else 2]
    width = 2 * i if has_gate else i
    rows = "2i" if has_gate else "i"
    if transposed:
        checks.require_shape("down_proj", down_proj, (e, i, h), "[e, i, h]")
        checks.require_shape("gate_up_proj", gate_up_proj, (e, h, width), f"[e, h, {rows}]")
    else:
        checks.require_shape("down_proj", down_proj, (e, h, i), "[e, h, i]")
        checks.require_shape("gate_up_proj", gate_up_proj, (e, width, h), f"[e, {rows}, h]")
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
    activation,
    transposed,
    has_gate,
    num_experts,
    *needs,
) -> tuple[torch.Tensor, ...]:
    inputs = (hidden_states, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias)
    return tuple(
        x.new_empty(x.shape) if needed else hidden_states.new_empty(0)
        for x, needed in zip(inputs, needs, strict=True)
    )


def _load_forward():
    from .lowering import moe_experts

    return moe_experts


def _load_backward():
    from .lowering import moe_experts_backward

    return moe_experts_backward


_INPUTS = (
    "Tensor hidden_states, Tensor top_k_index, Tensor top_k_weights, Tensor gate_up_proj, "
    "Tensor down_proj, Tensor? gate_up_bias, Tensor? down_bias, str activation, bool transposed, "
    "bool has_gate, int num_experts"
)

_moe_experts = define_op(
    add_op_namespace_prefix("moe_experts"),
    f"({_INPUTS}) -> Tensor",
    reference=reference.moe_experts,
    fake=_fake,
    load_kernel=_load_forward,
)

_moe_experts_backward = define_op(
    add_op_namespace_prefix("moe_experts_backward"),
    f"(Tensor grad_out, {_INPUTS}, bool needs_hidden_states, bool needs_top_k_weights, "
    "bool needs_gate_up_proj, bool needs_down_proj, bool needs_gate_up_bias, bool needs_down_bias"
    ") -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=reference.moe_experts_backward,
    fake=_fake_backward,
    load_kernel=_load_backward,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:7])
    ctx.options = inputs[7:]


def _backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, _, weights, gate_up, down, gate_up_bias, down_bias, *_ = ctx.needs_input_grad
    needs = (x, weights, gate_up, down, gate_up_bias, down_bias)
    grads = _moe_experts_backward(grad_out, *ctx.saved_tensors, *ctx.options, *needs)
    found = [grad if needed else None for grad, needed in zip(grads, needs, strict=True)]
    return (found[0], None, *found[1:], None, None, None, None)


differentiable(_moe_experts, _backward, save=_save)
