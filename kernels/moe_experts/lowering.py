"""The JAX functions behind the moe_experts ops: what runs on the TPU, arguments as in the schema.

Forward runs the fused kernel where `tiling.choose` has a plan for the shape, else the two-step
path: sort the (token, slot) rows by expert,
two grouped matmuls with the gate between them, un-sort.
Backward recomputes the two-step path.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...tpu_runtime import Chip
from ..ragged_dot import lowering as grouped
from ..ragged_dot import lowering_quantized as quantized
from .gates import OAI_ALPHA, OAI_LIMIT
from .kernel import choose_plan, moe_experts_fused


def moe_experts(
    hidden_states: jax.Array,  # [t, h]
    top_k_index: jax.Array,  # [t, topk]
    top_k_weights: jax.Array,  # [t, topk]
    gate_up_proj: jax.Array,  # [e, 2i, h], [e, h, 2i] if transposed
    down_proj: jax.Array,  # [e, h, i], [e, i, h] if transposed
    gate_up_bias: jax.Array | None,  # [e, 2i]
    down_bias: jax.Array | None,  # [e, h]
    *options: Any,  # activation, transposed, has_gate, num_experts
    chip: Chip,
    interpret: Any = False,
) -> jax.Array:  # [t, h]
    tensors = (hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj)
    biases = (gate_up_bias, down_bias)
    return moe_experts_quantized(
        *tensors, *biases, None, None, *options, chip=chip, interpret=interpret
    )


def moe_experts_quantized(
    hidden_states: jax.Array,
    top_k_index: jax.Array,
    top_k_weights: jax.Array,
    gate_up_proj: jax.Array,
    down_proj: jax.Array,
    gate_up_bias: jax.Array | None,
    down_bias: jax.Array | None,
    gate_up_scale: jax.Array | None,  # [e, 2i] or [e, k_blocks, 2i]; None: not quantised
    down_scale: jax.Array | None,  # [e, h] or [e, k_blocks, h]
    activation: str,
    transposed: bool,
    has_gate: bool,
    num_experts: int,
    *,
    chip: Chip,
    interpret: Any = False,
) -> jax.Array:  # [t, h]
    (t, h), topk = hidden_states.shape, top_k_index.shape[1]
    e = down_proj.shape[0]
    if 0 in (t, h, topk, *down_proj.shape):
        return _empty_experts(hidden_states, top_k_index, top_k_weights, down_bias, num_experts)
    arrays = (hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj)
    more = (gate_up_bias, down_bias, gate_up_scale, down_scale)
    plan = choose_plan(*arrays[:2], *arrays[3:], *more[2:], activation, transposed, has_gate, chip)
    if plan is not None:
        return moe_experts_fused(
            *arrays,
            *more,
            activation=activation,
            transposed=transposed,
            has_gate=has_gate,
            num_experts=num_experts,
            plan=plan,
            chip=chip,
            interpret=interpret,
        )
    routing = sort_by_expert(top_k_index, top_k_weights, e, num_experts)
    matmul = _matmul(routing.sizes, transposed, chip, interpret)
    gate = functools.partial(apply_gate, activation=activation, has_gate=has_gate)
    gate_up = matmul(hidden_states[routing.token], gate_up_proj, gate_up_scale, gate_up_bias)
    act = gate(gate_up.astype(jnp.float32)).astype(hidden_states.dtype)
    y = matmul(act, down_proj, down_scale, down_bias)
    weighted = _select(routing.is_local, routing.weight[:, None] * y.astype(jnp.float32))
    return _sum_slots(weighted, routing, t, topk).astype(hidden_states.dtype)


def moe_experts_backward(
    grad_out: jax.Array,  # [t, h]
    *args: Any,  # as of `moe_experts`, and which gradients are needed
    chip: Chip,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    return moe_experts_quantized_backward(
        grad_out, *args[:7], None, None, *args[7:], chip=chip, interpret=interpret
    )


def moe_experts_quantized_backward(
    grad_out: jax.Array,  # [t, h]
    hidden_states: jax.Array,
    top_k_index: jax.Array,
    top_k_weights: jax.Array,
    gate_up_proj: jax.Array,
    down_proj: jax.Array,
    gate_up_bias: jax.Array | None,
    down_bias: jax.Array | None,
    gate_up_scale: jax.Array | None,
    down_scale: jax.Array | None,
    activation: str,
    transposed: bool,
    has_gate: bool,
    num_experts: int,
    needs_hidden_states: bool,
    needs_top_k_weights: bool,
    needs_gate_up_proj: bool,
    needs_down_proj: bool,
    needs_gate_up_bias: bool,
    needs_down_bias: bool,
    *,
    chip: Chip,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Gradients of hidden_states, the weights, projections and biases; [0] where not needed."""
    (t, _), topk, e = hidden_states.shape, top_k_index.shape[1], down_proj.shape[0]
    dtype = hidden_states.dtype
    needs = (
        needs_hidden_states,
        needs_top_k_weights,
        needs_gate_up_proj,
        needs_down_proj,
        needs_gate_up_bias,
        needs_down_bias,
    )
    inputs = (hidden_states, top_k_weights, gate_up_proj, down_proj, gate_up_bias, down_bias)
    none = jnp.zeros((0,), dtype)
    if 0 in (t, hidden_states.shape[1], topk, e):
        return tuple(jnp.zeros_like(x) if n else none for x, n in zip(inputs, needs, strict=True))
    routing = sort_by_expert(top_k_index, top_k_weights, e, num_experts)
    target = {"chip": chip, "interpret": interpret}
    matmul = _matmul(routing.sizes, transposed, **target)
    matmul_t = _matmul_t(routing.sizes, transposed, **target)
    gate = functools.partial(apply_gate, activation=activation, has_gate=has_gate)

    def weight_grad(inputs: jax.Array, grads: jax.Array) -> jax.Array:
        left, right = (inputs, grads) if transposed else (grads, inputs)
        return grouped.weight_grad(left, right, routing.sizes, None, e, "default", **target)

    x, grad = hidden_states[routing.token], grad_out[routing.token]
    gate_up = matmul(x, gate_up_proj, gate_up_scale, gate_up_bias)
    act, gate_vjp = jax.vjp(gate, gate_up.astype(jnp.float32))
    grad_y = _select(routing.is_local, routing.weight[:, None] * grad.astype(jnp.float32))
    grad_y_low = grad_y.astype(dtype)
    # Before the routing weight, so that it serves the weight's own gradient too.
    grad_act = matmul_t(grad, down_proj, down_scale).astype(jnp.float32)
    grads = [none] * 6
    if needs_top_k_weights:
        dot = jnp.sum(act * grad_act, axis=-1)
        if down_bias is not None:
            rows = jnp.minimum(routing.expert, e - 1)
            dot += jnp.sum(grad.astype(jnp.float32) * down_bias[rows].astype(jnp.float32), axis=-1)
        dot = jnp.where(routing.is_local, dot, 0).astype(top_k_weights.dtype)
        grads[1] = dot[routing.inverse].reshape(t, topk)
    if needs_down_proj:
        grads[3] = weight_grad(act.astype(dtype), grad_y_low)
    if needs_down_bias:
        grads[5] = grouped.bias_grad(grad_y, routing.sizes, None, e).astype(dtype)
    weighted_act = _select(routing.is_local, routing.weight[:, None] * grad_act)
    (grad_gate_up,) = gate_vjp(weighted_act)
    if needs_gate_up_bias:
        grads[4] = grouped.bias_grad(grad_gate_up, routing.sizes, None, e).astype(dtype)
    grad_gate_up = grad_gate_up.astype(dtype)
    if needs_gate_up_proj:
        grads[2] = weight_grad(x, grad_gate_up)
    if needs_hidden_states:
        rows = matmul_t(grad_gate_up, gate_up_proj, gate_up_scale).astype(jnp.float32)
        grads[0] = _sum_slots(rows, routing, t, topk).astype(dtype)
    return tuple(grads)


def apply_gate(gate_up: jax.Array, *, activation: str, has_gate: bool) -> jax.Array:
    """[m, 2i] float32 -> [m, i]: act(gate) * up, or act(up) without a gate."""
    if activation == "swiglu_oai":
        gate = jnp.minimum(gate_up[:, ::2], OAI_LIMIT)
        up = jnp.clip(gate_up[:, 1::2], -OAI_LIMIT, OAI_LIMIT)
        return (up + 1) * gate * jax.nn.sigmoid(OAI_ALPHA * gate)
    activate = {
        "silu": jax.nn.silu,
        "gelu": functools.partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
        "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    }[activation]
    if not has_gate:
        return activate(gate_up)
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return activate(gate) * up


class Routing(NamedTuple):
    """The (token, slot) rows sorted by expert; rows of no local expert come last."""

    token: jax.Array  # [t * topk] token of each sorted row
    expert: jax.Array  # [t * topk] its expert, e for none
    weight: jax.Array  # [t * topk] float32
    is_local: jax.Array  # [t * topk] bool
    inverse: jax.Array  # [t * topk] sorted position of each (token, slot)
    sizes: jax.Array  # [e] rows of each expert


def sort_by_expert(
    top_k_index: jax.Array, top_k_weights: jax.Array, e: int, num_experts: int
) -> Routing:
    topk = top_k_index.shape[1]
    flat = top_k_index.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < num_experts), flat, e)
    order = jnp.argsort(flat, stable=True)
    expert = flat[order]
    return Routing(
        token=order // topk,
        expert=expert,
        weight=top_k_weights.reshape(-1)[order].astype(jnp.float32),
        is_local=expert < e,
        inverse=jnp.argsort(order),
        sizes=jnp.sum(flat[:, None] == jnp.arange(e), axis=0, dtype=jnp.int32),
    )


def _matmul(sizes: jax.Array, transposed: bool, chip: Chip, interpret: Any):
    """x[sorted rows] @ weight[expert] + bias; weight is [e, in, out] if `transposed`."""
    target = {"chip": chip, "interpret": interpret}

    def matmul(x: jax.Array, weight: jax.Array, scale, bias) -> jax.Array:
        static = (not transposed, "default", x.dtype.name)
        if scale is None:
            return grouped.ragged_dot(x, weight, sizes, None, bias, *static, **target)
        return quantized.ragged_dot_quantized(
            x, weight, scale, sizes, None, bias, *static, **target
        )

    return matmul


def _matmul_t(sizes: jax.Array, transposed: bool, chip: Chip, interpret: Any):
    """grad[sorted rows] @ weight[expert] transposed: from columns out to columns in."""
    target = {"chip": chip, "interpret": interpret}

    def matmul(grad: jax.Array, weight: jax.Array, scale) -> jax.Array:
        dtype = grad.dtype.name
        if scale is None:
            static = (transposed, "default", dtype)
            return grouped.ragged_dot(grad, weight, sizes, None, None, *static, **target)
        static = (not transposed, "default", dtype, True, False)
        return quantized.ragged_dot_quantized_backward(
            grad, weight, scale, sizes, None, *static, **target
        )[0]

    return matmul


def _select(is_local: jax.Array, rows: jax.Array) -> jax.Array:
    """Zero where no local expert is: selected, because the weight of such a slot may be NaN."""
    return jnp.where(is_local[:, None], rows, 0)


def _sum_slots(rows: jax.Array, routing: Routing, t: int, topk: int) -> jax.Array:  # [t, h]
    return jnp.sum(rows[routing.inverse].reshape(t, topk, -1), axis=1)


def _empty_experts(hidden_states, top_k_index, top_k_weights, down_bias, num_experts) -> jax.Array:
    """Without tokens, experts or features only the bias of the second matmul is left."""
    e = 0 if down_bias is None else down_bias.shape[0]
    if e == 0 or 0 in (*hidden_states.shape, top_k_index.shape[1]):
        return jnp.zeros_like(hidden_states)
    is_local = (top_k_index >= 0) & (top_k_index < num_experts)
    rows = down_bias[jnp.clip(top_k_index, 0, e - 1)].astype(jnp.float32)  # [t, topk, h]
    weighted = jnp.where(is_local[..., None], rows * top_k_weights[..., None], 0)
    return jnp.sum(weighted, axis=1).astype(hidden_states.dtype)
