"""Backward of qk_norm_rotary: inverse rotation and gradient of the norm in one launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...tpu_runtime import Chip
from . import norm as norms
from .kernel import Launch, whole


def _backward_kernel(cos_ref, sin_ref, *refs, launch: Launch):
    """See `qk_norm_rotary_grad`. refs: x, grad, weight per operand; outputs; prepared tables."""
    family, rotation, norm = launch.family, launch.rotation, launch.norm
    remaining = iter(refs)

    def take(is_there: bool):
        return next(remaining) if is_there else None

    inputs = [(take(True), take(True), take(op.has_weight)) for op in launch.operands]
    outputs = [(take(op.wants_input), take(op.wants_weight)) for op in launch.operands]
    tables = list(remaining)
    launch.prepare_tables(cos_ref, sin_ref, tables)
    for i, operand in enumerate(launch.operands):

        def tile_grad(index, at, operand=operand, inputs=inputs[i], outputs=outputs[i]):
            (x_ref, grad_ref, weight_ref), (grad_input_ref, grad_weight_ref) = inputs, outputs
            parts = family.load(x_ref, index, rotation)
            grads = family.load(grad_ref, index, rotation)
            rotated = family.rotate(grads, family.load_tables(tables, at), rotation)
            normed_grads = family.complete(rotated, grads, jnp.float32, rotation)
            weights = None
            if weight_ref is not None:
                weights = family.load_weight(weight_ref, rotation, launch.tiles.span)
            grad_input, grad_weight = norms.backward(
                parts, normed_grads, weights, norm, operand, family.FEATURES
            )
            if grad_input_ref is not None:
                family.store(grad_input_ref, index, grad_input, rotation)
            if grad_weight_ref is not None:
                is_valid = _is_valid(launch, at)
                family.add_grad_weight(grad_weight_ref, grad_weight, is_valid, rotation)

        if operand.wants_weight:
            pl.when(pl.program_id(2) == 0)(functools.partial(_clear, outputs[i][1]))
        launch.for_each_tile(i, tile_grad)


def _clear(ref) -> None:
    ref[...] = jnp.zeros_like(ref)


def _is_valid(launch: Launch, at: pl.Slice) -> jax.Array | bool:
    """Which positions of a tile exist: the last sequence block may reach past the end."""
    if launch.s % launch.tiles.seq == 0:
        return True
    shape = [1, 1]
    shape[1 - launch.family.FEATURES] = at.size
    position = jax.lax.broadcasted_iota(jnp.int32, tuple(shape), 1 - launch.family.FEATURES)
    return position + at.start < launch.s - pl.program_id(0) * launch.tiles.seq


def qk_norm_rotary_grad(
    xs: Sequence[jax.Array],  # per operand, axes as its dims say
    grads: Sequence[jax.Array],  # of the outputs, same shapes
    weights: Sequence[jax.Array | None],  # per operand, family.weight_shape(d)
    cos: jax.Array,  # [b or 1, s, w] or [b or 1, w, s]
    sin: jax.Array,
    launch: Launch,
    *,
    chip: Chip,
    interpret: Any = False,
) -> list[tuple[jax.Array | None, jax.Array | None]]:
    """Per operand the gradients of the input and of the weight, where wanted.

    Same grid, blocks and tables as `kernel.rotary`, with the transposed rotation. The reciprocal
    norms are computed again: they cost less than the read of saved ones. The weight's gradient is
    summed in float32 in VMEM over the tiles of one (sequence, batch) pair, which runs on one core,
    and leaves as one partial sum per pair: no race on chips with two cores, and no reduction at
    all for a frozen weight. Floor: x and grad read, the gradient written. Static estimate for
    q (1, 32, 4096, 128), k (1, 8, 4096, 128), bfloat16, v6e: 124 us, 1.39 of the floor, bound by
    the two cross-lane sums per row.
    """
    family, tiles = launch.family, launch.tiles
    args, specs = (
        [cos, sin],
        [launch.table_spec(cos.shape[1 if launch.is_table_seq_minor else 2])] * 2,
    )
    outputs = []
    partial = family.grad_weight_shape(launch.d, tiles.span)
    for i, (x, grad, weight) in enumerate(zip(xs, grads, weights, strict=True)):
        operand = launch.operands[i]
        args += [x, grad]
        specs += [launch.block_spec(i)] * 2
        if weight is not None:
            args.append(weight)
            specs.append(whole(weight.shape))
        if operand.wants_input:
            outputs.append((jax.ShapeDtypeStruct(x.shape, x.dtype), launch.block_spec(i)))
        if operand.wants_weight:
            sums = jax.ShapeDtypeStruct((*launch.grid[:2], *partial), jnp.float32)
            spec = pl.BlockSpec((None, None, *partial), lambda i, b, _: (i, b, 0, 0))
            outputs.append((sums, spec))
    found = iter(
        launch.call(
            _backward_kernel,
            "qk_norm_rotary_grad",
            args,
            specs,
            outputs,
            chip=chip,
            interpret=interpret,
        )
    )
    return [
        (next(found) if op.wants_input else None, next(found) if op.wants_weight else None)
        for op in launch.operands
    ]
