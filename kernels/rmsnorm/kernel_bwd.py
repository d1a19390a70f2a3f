"""RMS normalisation of rows, backward: gradients of the rows, the gate and the weight."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import SUBLANES, Chip
from . import tiling
from .rows import (
    Columns,
    Plan,
    activate,
    activation_slope,
    for_chunks,
    for_columns,
    inverse_rms,
    mean,
    row_zeros,
    scale,
    sigmoid,
    wide_weight,
)


@dataclasses.dataclass(frozen=True)
class _Refs:
    grad: jax.Ref  # [rows, width] gradient of the result
    x: jax.Ref  # [rows, width] what was normalised, before a first gate
    grad_total: jax.Ref | None  # [rows, width] gradient that reaches x besides, from the residual
    gate: jax.Ref | None  # [rows, width]
    weight: jax.Ref | None  # [1, width]
    grad_x: jax.Ref | None  # [rows, width]
    grad_gate: jax.Ref | None  # [rows, width]
    grad_weight: jax.Ref | None  # [1, width]
    sums: jax.Ref | None  # float32 [SUBLANES, width]: partial sums of grad_weight


def rms_norm_bwd(
    grad: jax.Array,  # [n, d]
    x: jax.Array,  # [n, d]
    grad_total: jax.Array | None,  # [n, d]
    gate: jax.Array | None,  # [n, d]
    weight: jax.Array | None,  # [d]
    *,
    eps: float,
    offset: float,
    casting: str,
    activation: str | None = None,
    gate_first: bool = False,
    needs_x: bool = True,
    needs_gate: bool = False,
    needs_weight: bool = False,
    chip: Chip,
    interpret: Any = False,
    **overrides: int,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    """Gradients of x (plus grad_total), gate and weight; None for one that is not needed.

    Grid: (cores, blocks of rows). A core walks its blocks in order and adds the products whose
    column sums are the weight's gradient to `sums` in VMEM; its last step reduces them to its own
    [1, d], so that no step writes what another core reads. Blocks of grad_x and grad_gate are
    written by one core each. The mean square is computed again from x, which has to be read anyway.
    Without needs_weight there are no sums. Rows past n are masked out of the sums; with an odd
    number of blocks the second core computes its last one twice and adds it once.

    Bound by HBM: grad and x read once, grad_x written once. Static estimate, bfloat16 (8192, 4096)
    with both gradients: v5e 298 us, v6e 148 us, 1.01 and 1.04 of that floor.
    """
    n, d = x.shape
    arrays = (grad, x, grad_total, gate)
    outputs = [
        jax.ShapeDtypeStruct((n, d), array.dtype) if needed else None
        for array, needed in ((x, needs_x), (gate, needs_gate))
    ]
    sizes = [array.dtype.itemsize for array in (*arrays, *outputs) if array is not None]
    fixed_bytes = tiling.VECTOR_BYTES * (weight is not None)
    if needs_weight:
        fixed_bytes += tiling.VECTOR_BYTES + 4 * SUBLANES
    tiles = tiling.choose(n, d, max(sizes), sum(sizes), fixed_bytes, chip, **overrides)
    plan = Plan(n, d, tiles, eps, offset, casting, activation, gate_first, x.dtype)
    num_cores = min(chip.num_cores, plan.num_blocks)
    if needs_weight:
        dtype = weight.dtype if num_cores == 1 else jnp.float32
        outputs.append(jax.ShapeDtypeStruct((num_cores, 1, d), dtype))
    else:
        outputs.append(None)
    results = iter(_launch(plan, num_cores, (*arrays, weight), outputs, chip, interpret))
    grad_x, grad_gate, partial = (None if out is None else next(results) for out in outputs)
    if partial is None:
        return grad_x, grad_gate, None
    grad_weight = partial[0, 0] if num_cores == 1 else partial.sum((0, 1)).astype(weight.dtype)
    return grad_x, grad_gate, grad_weight


def _launch(
    plan: Plan,
    num_cores: int,
    arrays: tuple[jax.Array | None, ...],  # grad, x, grad_total, gate, weight
    outputs: list[jax.ShapeDtypeStruct | None],  # gradients of x, gate, weight
    chip: Chip,
    interpret: Any,
) -> list[jax.Array]:
    num_steps = pl.cdiv(plan.num_blocks, num_cores)
    *rows, weight = arrays
    needs_weight = outputs[-1] is not None

    def block_id(core: Any, step: Any) -> tuple[Any, int]:
        return jnp.minimum(core * num_steps + step, plan.num_blocks - 1), 0

    block = pl.BlockSpec(
        (plan.tiles.rows, plan.width), block_id, pipeline_mode=pl.Buffered(plan.tiles.buffers)
    )
    inputs = [array for array in rows if array is not None]
    in_specs = [block] * len(inputs)
    if weight is not None:
        inputs.append(weight.reshape(1, plan.d))
        in_specs.append(pl.BlockSpec((1, plan.width), lambda core, step: (0, 0)))
    out_shape = [output for output in outputs if output is not None]
    out_specs, scratch = [block] * len(out_shape), []
    if needs_weight:
        out_specs[-1] = pl.BlockSpec((None, 1, plan.width), lambda core, step: (core, 0, 0))
        scratch.append(pltpu.VMEM((SUBLANES, plan.width), jnp.float32))
    present = [array is not None for array in (*arrays, *outputs)] + [needs_weight]
    return pl.pallas_call(
        functools.partial(_kernel, plan, num_cores, num_steps, present),
        grid=(num_cores, num_steps),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=chip.vmem_bytes * 9 // 10,
        ),
        interpret=interpret,
        name=_name(plan, *(output is not None for output in outputs)),
    )(*inputs)


def _name(plan: Plan, needs_x: bool, needs_gate: bool, needs_weight: bool) -> str:
    needed = "x" * needs_x + "g" * needs_gate + "w" * needs_weight
    kind = "gated" if plan.activation else "plain"
    tiles = f"d{plan.d}_r{plan.tiles.rows}_c{plan.tiles.chunk}"
    return f"rms_norm_bwd_{needed}_{kind}_{plan.casting}_{plan.dtype.name}_{tiles}"


def _kernel(plan: Plan, num_cores: int, num_steps: int, present: list[bool], *refs: Any) -> None:
    remaining = iter(refs)
    refs = _Refs(*(next(remaining) if is_there else None for is_there in present))
    step = pl.program_id(1)
    first_row = (pl.program_id(0) * num_steps + step) * plan.tiles.rows
    # Blocks that do not end with the array, or that the second core has once too often.
    masks_rows = plan.n % (plan.tiles.rows * num_steps * num_cores) != 0

    if refs.grad_weight is not None:

        @pl.when(step == 0)
        def _() -> None:
            refs.sums[...] = jnp.zeros_like(refs.sums)

    def chunk(rows: Any) -> None:
        factor, pull = _statistics(plan, refs, rows)
        is_row = None
        if masks_rows:
            shape = (plan.tiles.chunk, 1)
            row = jax.lax.broadcasted_iota(jnp.int32, shape, 0) + (first_row + rows.start)
            is_row = row < plan.n
        for_columns(
            plan, lambda columns, _: _write(plan, refs, rows, columns, factor, pull, is_row)
        )

    for_chunks(plan, chunk)

    if refs.grad_weight is not None:

        @pl.when(step == num_steps - 1)
        def _() -> None:
            def reduce(columns: Columns, _: None) -> None:
                total = jnp.sum(refs.sums[:, columns.at], axis=0, keepdims=True)
                refs.grad_weight[:, columns.at] = total.astype(refs.grad_weight.dtype)

            for_columns(plan, reduce)


def _load(ref: jax.Ref, rows: Any, columns: Columns) -> jax.Array:
    return ref[rows, columns.at].astype(jnp.float32)


def _load_row(
    plan: Plan, refs: _Refs, rows: Any, columns: Columns
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What was normalised, the gradient of its scaled norm, and that of xhat; float32."""
    h, grad = _load(refs.x, rows, columns), _load(refs.grad, rows, columns)
    if refs.gate is not None:
        act = activate(_load(refs.gate, rows, columns), plan.activation)
        if plan.gate_first:
            h = h * act
        else:
            grad = grad * act
    if refs.weight is None:
        return h, grad, grad
    return h, grad, grad * wide_weight(plan, refs.weight[:, columns.at])


def _statistics(plan: Plan, refs: _Refs, rows: Any) -> tuple[jax.Array, jax.Array | None]:
    """1 / rms of each row, and how far its gradient is pulled back along the row itself."""
    needs_h = refs.grad_x is not None or (refs.grad_gate is not None and plan.gate_first)

    def add(columns: Columns, partial: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        h, _, grad_xhat = _load_row(plan, refs, rows, columns)
        products = (h * h, grad_xhat * h)
        return tuple(
            sums + columns.masked(product) for sums, product in zip(partial, products, strict=False)
        )

    partial = for_columns(plan, add, (row_zeros(plan),) * (2 if needs_h else 1))
    factor = inverse_rms(plan, mean(plan, partial[0]))
    pull = factor * factor * factor * mean(plan, partial[1]) if needs_h else None
    return factor, pull


def _write(
    plan: Plan,
    refs: _Refs,
    rows: Any,
    columns: Columns,
    factor: jax.Array,  # [chunk, 1]
    pull: jax.Array | None,  # [chunk, 1]
    is_row: jax.Array | None,  # [chunk, 1]
) -> None:
    h, grad, grad_xhat = _load_row(plan, refs, rows, columns)
    grad_h = None if pull is None else grad_xhat * factor - h * pull
    if refs.grad_x is not None:
        grad_x = grad_h
        if plan.gate_first:
            grad_x = grad_x * activate(_load(refs.gate, rows, columns), plan.activation)
        if refs.grad_total is not None:
            grad_x = grad_x + _load(refs.grad_total, rows, columns)
        refs.grad_x[rows, columns.at] = grad_x.astype(refs.grad_x.dtype)
    if refs.grad_gate is not None:
        _write_grad_gate(plan, refs, rows, columns, h * factor, grad_h)
    if refs.grad_weight is not None:
        xhat = h * factor
        if plan.casting != "gemma":  # the forward multiplied the rounded one
            xhat = xhat.astype(plan.dtype).astype(jnp.float32)
        product = grad * xhat
        if is_row is not None:
            product = jnp.where(is_row, product, 0)
        folded = product.reshape(-1, SUBLANES, product.shape[1]).sum(0)
        refs.sums[:, columns.at] += folded


def _write_grad_gate(
    plan: Plan,
    refs: _Refs,
    rows: Any,
    columns: Columns,
    xhat: jax.Array,
    grad_h: jax.Array | None,
) -> None:
    gate = _load(refs.gate, rows, columns)
    if plan.gate_first:
        product = grad_h * _load(refs.x, rows, columns)
    else:
        weight = None if refs.weight is None else refs.weight[:, columns.at]
        normed = scale(plan, xhat, weight).astype(jnp.float32)
        product = _load(refs.grad, rows, columns) * normed
    grad_gate = product * activation_slope(sigmoid(gate), gate, plan.activation)
    refs.grad_gate[rows, columns.at] = grad_gate.astype(refs.grad_gate.dtype)
