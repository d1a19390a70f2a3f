"""RMS normalisation of rows, forward: plain, with a residual added first, or gated."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import Chip
from . import tiling
from .rows import (
    Plan,
    activate,
    for_chunks,
    for_columns,
    inverse_rms,
    mean,
    row_zeros,
    scale,
    wide_weight,
)


def rms_norm_fwd(
    x: jax.Array,  # [n, d]
    residual: jax.Array | None,  # [n, d]
    gate: jax.Array | None,  # [n, d]
    weight: jax.Array | None,  # [d]
    *,
    eps: float,
    offset: float,
    casting: str,
    activation: str | None = None,
    gate_first: bool = False,
    chip: Chip,
    interpret: Any = False,
    **overrides: int,
) -> list[jax.Array]:
    """[normed], or [normed, x + residual].

    Grid: (blocks of rows), parallel. A step holds whole rows of every operand in VMEM, so it writes
    its own output block and nothing else: no step depends on another. Chunks of a block go through
    registers in two passes, sum of squares and scaling; the second reads VMEM again, not HBM. The
    last block may reach past row n and each row past column d: what is there is masked out of the
    sums and never written.

    Bound by HBM: x read once, the result written once. Static estimate, bfloat16 (8192, 4096):
    v5e 206 us, v6e 100 us, 1.01 and 1.03 of that floor. The lane reduction is one per row however
    short the row: at (262144, 128) it keeps the cross-lane unit busy a third of the time and the
    estimate is 1.02 and 1.04. What is left is the first block's copy in and the last one's out.
    """
    n, d = x.shape
    dtype = x.dtype if residual is None else jnp.promote_types(x.dtype, residual.dtype)
    out_dtype = dtype
    if weight is not None and casting == "llama" and (gate is None or gate_first):
        out_dtype = jnp.promote_types(dtype, weight.dtype)
    inputs = [array for array in (x, residual, gate) if array is not None]
    out_dtypes = [out_dtype] if residual is None else [out_dtype, dtype]
    sizes = [array.dtype.itemsize for array in inputs] + [dt.itemsize for dt in out_dtypes]
    fixed_bytes = 0 if weight is None else tiling.VECTOR_BYTES
    tiles = tiling.choose(n, d, max(sizes), sum(sizes), fixed_bytes, chip, **overrides)
    plan = Plan(
        n, d, tiles, eps, offset, casting, activation, gate_first and gate is not None, dtype
    )
    block = pl.BlockSpec(
        (tiles.rows, plan.width), lambda i: (i, 0), pipeline_mode=pl.Buffered(tiles.buffers)
    )
    in_specs = [block] * len(inputs)
    if weight is not None:
        inputs.append(weight.reshape(1, d))
        in_specs.append(pl.BlockSpec((1, plan.width), lambda i: (0, 0)))
    kind = "add" if residual is not None else "gated" if gate is not None else "plain"
    return pl.pallas_call(
        functools.partial(
            _kernel, plan, residual is not None, gate is not None, weight is not None
        ),
        grid=(plan.num_blocks,),
        in_specs=in_specs,
        out_specs=[block] * len(out_dtypes),
        out_shape=[jax.ShapeDtypeStruct((n, d), dt) for dt in out_dtypes],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=chip.vmem_bytes * 9 // 10
        ),
        interpret=interpret,
        name=f"rms_norm_fwd_{kind}_{casting}_{dtype.name}_d{d}_r{tiles.rows}_c{tiles.chunk}",
    )(*inputs)


def _kernel(plan: Plan, has_residual: bool, has_gate: bool, has_weight: bool, *refs: Any) -> None:
    refs = iter(refs)
    x_ref = next(refs)
    residual_ref = next(refs) if has_residual else None
    gate_ref = next(refs) if has_gate else None
    weight_ref = next(refs) if has_weight else None
    out_ref = next(refs)
    total_ref = next(refs, None)

    def load(rows: Any, columns: Any) -> jax.Array:
        """What is normalised, float32."""
        if has_residual:
            return total_ref[rows, columns.at].astype(jnp.float32)
        h = x_ref[rows, columns.at].astype(jnp.float32)
        if plan.gate_first:
            h = h * activate(gate_ref[rows, columns.at].astype(jnp.float32), plan.activation)
            h = h.astype(plan.dtype).astype(jnp.float32) if plan.casting == "none" else h
        return h

    def chunk(rows: Any) -> None:
        def square(columns: Any, partial: jax.Array) -> jax.Array:
            if has_residual:
                total = x_ref[rows, columns.at].astype(jnp.float32)
                total += residual_ref[rows, columns.at].astype(jnp.float32)
                total_ref[rows, columns.at] = total.astype(plan.dtype)
            h = load(rows, columns)
            return partial + columns.masked(_rounded(plan, h * h))

        mean_square = _rounded(plan, mean(plan, for_columns(plan, square, row_zeros(plan))))
        factor = inverse_rms(plan, mean_square)
        if plan.casting == "none":
            factor = _rounded(plan, jax.lax.rsqrt(_rounded(plan, mean_square + plan.eps)))

        def write(columns: Any, _: None) -> None:
            weight = weight_ref[:, columns.at] if has_weight else None
            xhat = load(rows, columns) * factor
            if has_gate and not plan.gate_first:
                out = _gated(plan, xhat, weight, gate_ref[rows, columns.at].astype(jnp.float32))
            else:
                out = scale(plan, xhat, weight)
            out_ref[rows, columns.at] = out.astype(out_ref.dtype)

        for_columns(plan, write)

    for_chunks(plan, chunk)


def _rounded(plan: Plan, value: jax.Array) -> jax.Array:
    """In casting mode "none" every step is rounded to the input's dtype, as torch does."""
    return value.astype(plan.dtype).astype(jnp.float32) if plan.casting == "none" else value


def _gated(
    plan: Plan, xhat: jax.Array, weight: jax.Array | None, gate: jax.Array
) -> jax.Array:  # float32
    act = activate(gate, plan.activation)
    if plan.casting == "gemma":  # rounded once, after the gate
        normed = xhat if weight is None else xhat * wide_weight(plan, weight)
    else:
        normed = scale(plan, xhat, weight).astype(jnp.float32)
    return normed * act
