"""experts_forward: the experts function that transformers calls for every MoE family.

    ALL_EXPERTS_FUNCTIONS.register("ragged_dot_tpu", kernel.experts_forward)
    model.set_experts_implementation("ragged_dot_tpu")

transformers itself is never imported: the experts module passed as `self` says all there is to
know.
"""

from __future__ import annotations

import torch

from ..ragged_dot.ops import ragged_dot
from .ops import moe_experts

# (module, class) of the activations that moe_experts computes, as torch 2.14 and transformers 5.22
# name them. Anything else may compute something else, so it is called instead.
_ACTIVATIONS = {
    ("torch.nn.modules.activation", "SiLU"): "silu",
    ("transformers.activations", "SiLUActivation"): "silu",
    ("transformers.activations", "GELUActivation"): "gelu",
    ("transformers.activations", "GELUTanh"): "gelu_tanh",
    ("transformers.activations", "ReLUSquaredActivation"): "relu2",
}


def experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """An experts layer of transformers: hidden_states [t, h] -> [t, h], in hidden_states' dtype.

    Reads the layout from `self` as transformers' own experts functions do: gated or not, biased,
    transposed, with a norm after each expert, with a gate of the model's own. A slot whose index is
    self.num_experts (an expert-parallel rank's sentinel) contributes exactly zero.

    One op for the default gate with an activation that moe_experts knows; otherwise two ragged_dot
    with the model's own gate between them. Differentiable in everything that requires a gradient.
    """
    up_proj = self.gate_up_proj if self.has_gate else self.up_proj
    up_bias = down_bias = None
    if self.has_bias:
        up_bias = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        down_bias = self.down_proj_bias
    # A float32 norm may feed bfloat16 experts: compute in the weights' dtype, as transformers does.
    x = hidden_states.to(up_proj.dtype)
    activation = _fusible_activation(self)
    if activation is None:
        return _two_step(self, x, top_k_index, top_k_weights, up_proj, up_bias, down_bias).to(
            hidden_states.dtype
        )
    return moe_experts(
        x,
        top_k_index,
        top_k_weights,
        up_proj,
        self.down_proj,
        gate_up_bias=up_bias,
        down_bias=down_bias,
        activation=activation,
        transposed=self.is_transposed,
        has_gate=self.has_gate,
        num_experts=self.num_experts,
    ).to(hidden_states.dtype)


def _fusible_activation(experts: torch.nn.Module) -> str | None:
    """The activation's name, if the layer is certain to compute act(gate) * up or act(up)."""
    if experts.has_post_expert_norm:
        return None
    if experts.has_gate:
        gate = getattr(experts._apply_gate, "__func__", None)  # None: replaced on the instance
        if (getattr(gate, "__module__", None), getattr(gate, "__qualname__", None)) != (
            "transformers.integrations.moe",
            "_default_apply_gate",
        ):
            return None
    act_fn = getattr(experts, "act_fn", None)
    if act_fn is torch.nn.functional.silu:
        return "silu"
    if type(act_fn) is torch.nn.GELU:
        return "gelu_tanh" if act_fn.approximate == "tanh" else "gelu"
    return _ACTIVATIONS.get((type(act_fn).__module__, type(act_fn).__name__))


def _two_step(
    experts: torch.nn.Module,
    x: torch.Tensor,  # [t, h]
    top_k_index: torch.Tensor,  # [t, topk]
    top_k_weights: torch.Tensor,  # [t, topk]
    up_proj: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
) -> torch.Tensor:  # [t, h], unrounded
    t, topk = top_k_index.shape
    num_experts = experts.num_experts
    expert = top_k_index.reshape(-1)
    order = torch.argsort(expert, stable=True)
    is_local = expert[order] < num_experts
    sizes = (expert[:, None] == torch.arange(num_experts, device=expert.device)).sum(0)
    transpose_rhs = not experts.is_transposed
    z = ragged_dot(x[order // topk], up_proj, sizes, transpose_rhs=transpose_rhs, bias=up_bias)
    z = experts._apply_gate(z) if experts.has_gate else experts.act_fn(z)
    y = ragged_dot(z, experts.down_proj, sizes, transpose_rhs=transpose_rhs, bias=down_bias)
    if experts.has_post_expert_norm:
        y = experts.post_expert_norm(y)
    # Rows without a local expert are selected away on both sides of the product: the weight there
    # may be NaN, and a gradient of zero times NaN would reach the norm's and the gate's parameters.
    y = y.masked_fill(~is_local[:, None], 0)
    weight = top_k_weights.reshape(-1)[order].masked_fill(~is_local, 0)
    dtype = torch.promote_types(y.dtype, torch.float32)
    weighted = y.to(dtype) * weight.to(dtype)[:, None]
    return weighted[torch.argsort(order)].view(t, topk, -1).sum(1)
