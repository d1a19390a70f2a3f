"""The experts layer of a mixture of experts as one Pallas kernel.

Two modes, picked by `tiling.choose`: with few tokens every token goes through every chosen expert
(kernel_dense), with many each expert takes only its own rows (kernel_gather). Both read the weights
of the chosen experts once, through the same rings (weights), and keep x and the f32 sum in VMEM.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ...tpu_runtime import SUBLANES, Chip, round_up
from ..ragged_dot.dequant import code_of
from ..ragged_dot.layouts import as_stored, is_row_minor
from . import kernel_dense, kernel_gather, tiling
from .weights import Layer, comes_whole


def moe_experts_fused(
    hidden_states: jax.Array,  # [t, h]
    top_k_index: jax.Array,  # [t, topk]
    top_k_weights: jax.Array,  # [t, topk]
    gate_up_proj: jax.Array,  # [e, 2i, h]; [e, h, 2i] if transposed; i instead of 2i without gate
    down_proj: jax.Array,  # [e, h, i]; [e, i, h] if transposed
    gate_up_bias: jax.Array | None = None,  # [e, 2i]
    down_bias: jax.Array | None = None,  # [e, h]
    gate_up_scale: jax.Array | None = None,  # [e, 2i] or [e, k_blocks, 2i]
    down_scale: jax.Array | None = None,  # [e, h] or [e, k_blocks, h]
    *,
    activation: str = "silu",
    transposed: bool = False,
    has_gate: bool = True,
    num_experts: int | None = None,
    plan: tiling.Plan,  # of `choose_plan`
    chip: Chip,
    interpret=False,
) -> jax.Array:  # [t, h]
    """y[t] = sum_j w[t, j] * down(act(gate(x[t])) * up(x[t])) of expert top_k_index[t, j].

    An id below 0 or from num_experts on (default: all experts held) names no expert here: its slot
    adds exactly zero, whatever its weight. Nothing of a token reaches another token, and nothing of
    an expert a token that did not choose it, NaN and inf included. Sums in f32, rounded once to
    hidden_states.dtype, which is bfloat16 or float32 and that of weights without scales; those with
    scales are stored as `ragged_dot.quantized` says. No gradient.
    """
    t, h = hidden_states.shape
    gate_up = stored_as(gate_up_proj, gate_up_scale, transposed)
    down = stored_as(down_proj, down_scale, transposed)
    gate_up_proj, _ = as_stored(gate_up_proj, transposed)
    down_proj, _ = as_stored(down_proj, transposed)
    num_held, i = gate_up_proj.shape[0], down_proj.shape[1 if down.transposed else 2]
    i *= 2 if down.is_int4 else 1
    topk, dtype = top_k_index.shape[1], hidden_states.dtype
    e = num_held if num_experts is None else min(num_experts, num_held)
    layer = Layer(t, topk, e, h, i, dtype, activation, has_gate, plan, gate_up, down, code_of(chip))
    if top_k_weights.dtype != jnp.bfloat16:
        top_k_weights = top_k_weights.astype(jnp.float32)
    run = {"dense": kernel_dense.run, "gather": kernel_gather.run}[plan.mode]
    return run(
        layer,
        hidden_states,
        top_k_index.astype(jnp.int32),
        top_k_weights,
        layer.view_in(gate_up_proj),
        down_proj,
        _biases(layer, num_held, gate_up_bias, down_bias),
        (_scales(layer, gate_up_scale), _scales(layer, down_scale)),
        chip,
        interpret,
    )


def choose_plan(
    hidden_states,
    top_k_index,
    gate_up_proj,
    down_proj,
    gate_up_scale,
    down_scale,
    activation,
    transposed,
    has_gate,
    chip,
) -> tiling.Plan | None:
    """None: no plan fits the chip; sort the rows and run two grouped matmuls."""
    (t, h), topk = hidden_states.shape, top_k_index.shape[1]
    gate_up = stored_as(gate_up_proj, gate_up_scale, transposed)
    down = stored_as(down_proj, down_scale, transposed)
    e, i = down_proj.shape[0], down_proj.shape[1 if transposed else 2]
    return tiling.choose(
        t,
        topk,
        e,
        h,
        i * (2 if down.is_int4 else 1),
        hidden_states.dtype,
        has_gate,
        chip,
        gate_up=gate_up,
        down=down,
        interleaved=activation == "swiglu_oai",
    )


def stored_as(weight: jax.Array, scale: jax.Array | None, transposed: bool) -> tiling.Stored:
    transposed = transposed != is_row_minor(weight.shape, weight.dtype)
    if scale is None:
        return tiling.Stored(str(weight.dtype), transposed=transposed)
    is_vector = scale.ndim == 2
    num_blocks = 1 if is_vector else scale.shape[1]
    return tiling.Stored(str(weight.dtype), num_blocks, is_vector, transposed)


def _scales(layer: Layer, scale: jax.Array | None) -> jax.Array | None:
    """float32; [e, n] with whole groups of eight experts, if a DMA moves only one of them."""
    if scale is None:
        return None
    scale = scale.astype(jnp.float32)
    if scale.ndim == 2 and not comes_whole(layer, scale):
        e = scale.shape[0]
        scale = jnp.pad(scale, ((0, round_up(e, SUBLANES) - e), (0, 0)))
    return scale


def _biases(layer: Layer, num_held, gate_up_bias, down_bias):
    """f32, cut like the weights so that a tile is a leading index; zeros for a missing one."""
    if gate_up_bias is None and down_bias is None:
        return ()
    if gate_up_bias is None:
        gate_up_bias = jnp.zeros((num_held, layer.i * (2 if layer.has_gate else 1)))
    if down_bias is None:
        down_bias = jnp.zeros((num_held, layer.h))
    shape_in = (num_held, layer.parts, layer.num_in, 1, layer.part_width)
    shape_out = (num_held, layer.h // layer.plan.tile_h, 1, layer.plan.tile_h)
    return (
        gate_up_bias.astype(jnp.float32).reshape(shape_in),
        down_bias.astype(jnp.float32).reshape(shape_out),
    )
