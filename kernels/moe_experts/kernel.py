"""The experts layer of a mixture of experts as one Pallas kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...tpu_runtime import Chip
from . import kernel_dense, kernel_gather, tiling
from .weights import ACTIVATIONS, Layer


def moe_experts_fused(
    hidden_states,  # [t, h]
    top_k_index,  # [t, topk]
    top_k_weights,  # [t, topk]
    gate_up_proj,  # [e, 2i, h]
    down_proj,  # [e, h, i]
    gate_up_bias=None,  # [e, 2i]
    down_bias=None,  # [e, h]
    *,
    activation: str = "silu",
    transposed: bool = False,
    has_gate: bool = True,
    num_experts: int | None = None,
    plan: tiling.Plan | None = None,
    chip: Chip,
    interpret=False,
) -> jax.Array:
    """y[t] = sum_j w[t, j] * (act(x @ gate) * (x @ up) @ down) of expert top_k_index[t, j]; [t, h]."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: got {activation!r}, expected one of {sorted(ACTIVATIONS)}")
    t, h = hidden_states.shape
    e, i = gate_up_proj.shape[0], down_proj.shape[1 if transposed else 2]
    topk = top_k_index.shape[1]
    dtype = gate_up_proj.dtype
    plan = plan or tiling.choose(t, topk, e, h, i, dtype, transposed, has_gate, chip)
    if plan is None:
        raise NotImplementedError("shape does not fit")
    layer = Layer(t, topk, e, h, i, dtype, activation, transposed, has_gate, plan)
    ids = top_k_index.astype(jnp.int32)
    biases = _biases(layer, gate_up_bias, down_bias)
    kernel_of = {"dense": kernel_dense, "gather": kernel_gather}[plan.mode]
    return kernel_of.run(
        layer, hidden_states, ids, top_k_weights, gate_up_proj, down_proj, biases, chip, interpret
    )


def _biases(layer: Layer, gate_up_bias, down_bias):
    """f32, cut like the weights, so that a tile of one expert is a leading index; zeros for one missing."""
    if gate_up_bias is None and down_bias is None:
        return ()
    width = layer.i * (2 if layer.has_gate else 1)
    shapes = ((layer.e, layer.parts, layer.num_in, 1, layer.part_width), (layer.e, layer.num_out, 1, layer.plan.tile_h))
    out = []
    for bias, shape, size in zip((gate_up_bias, down_bias), shapes, (width, layer.h)):
        bias = jnp.zeros((layer.e, size)) if bias is None else bias
        out.append(bias.astype(jnp.float32).reshape(shape))
    return tuple(out)
