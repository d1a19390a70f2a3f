"""ragged_dot as a torch op: argument checks, dispatch, shape function and gradient."""

from __future__ import annotations

from typing import Any

import torch

from ..._ops import add_op_namespace_prefix
from ...tpu_runtime import checks, define_op
from . import quantized, reference
from .ops_quantized import ragged_dot_quantized


def ragged_dot(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    group_sizes: torch.Tensor,
    *,
    transpose_rhs: bool = False,
    group_offset: int | torch.Tensor | None = None,
    rhs_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    precision: str = "default",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Grouped matmul: out[r] = lhs[r] @ rhs[group of r] (+ bias[group of r]).

    Rows of `lhs` are sorted by group: the first group_sizes[0] rows belong to group 0, and so on.
    Rows past sum(group_sizes), and rows of groups that `rhs` does not hold, are exactly zero (no
    bias), whatever lhs holds there. From cumulative end offsets, as torch's grouped_mm takes them:
    `group_sizes = torch.diff(offsets, prepend=offsets.new_zeros(1))`.

    Args:
        lhs: [m, k], bfloat16, float16 or float32; float64 on the CPU only.
        rhs: [g, k, n], or [g, n, k] with `transpose_rhs` (as Hugging Face stores experts; never
            copied). Same dtype as lhs, or quantised as `quantize_experts` stores it: int8,
            float8_e4m3fn, float8_e5m2, or int4 as uint8 with two values along k, the low nibble
            first ([g, k/2, n] or [g, n, k/2]). Any strides.
        group_sizes: [g] int32 or int64 (other integers are cast). Sizes that are negative or sum
            past m are a ValueError for eager CPU calls; elsewhere they are clipped to the rows
            there are.
        transpose_rhs: rhs is [g, n, k].
        group_offset: int or 0-d integer tensor: rhs and bias hold groups group_offset ..
            group_offset + g - 1 of at least group_offset + g sizes (an expert-parallel shard).
        rhs_scale: float scales of quantised weights, [g, n] or [g, k_blocks, n] where k_blocks
            divides k, for both layouts of rhs; applied in float32. Weights are dequantised next
            to the matrix unit, never in memory. float32 lhs with precision "default", and the
            gradient of bfloat16 lhs, round them (or the rows) to bfloat16.
        bias: [g, n], dtype of lhs.
        precision: "default" is the TPU's default (float32 inputs are multiplied in one bfloat16
            pass), "highest" multiplies float32 exactly. No difference for bfloat16, nor on a CPU.
        out_dtype: float dtype of the result, by default that of lhs. Accumulation is float32
            (float64 for float64), rounded once.

    Returns:
        [m, n], a new tensor.

    Differentiable once in lhs, bias and rhs that is not quantised: gradients are zero for empty
    groups and for rows that belong to no group. Inside torch.autocast mixed float dtypes are
    promoted as torch does.

    Raises:
        TypeError, ValueError: for an argument of wrong type, rank, size, dtype or device.
        NotImplementedError: for quantised weights or scales that require grad.
    """
    transposed = transpose_rhs
    checks.require_bool("transpose_rhs", transposed)
    checks.require_choice("precision", precision, ("default", "highest"))
    checks.require_tensor("lhs", lhs, 2, checks.FLOATS)
    lhs, rhs, bias = _check_operands(
        lhs, rhs, group_sizes, rhs_scale, bias, group_offset, transposed
    )
    if out_dtype is None:
        out_dtype = lhs.dtype
    if out_dtype not in checks.FLOATS:
        raise TypeError(f"out_dtype: expected a float torch.dtype, got {out_dtype!r}")
    group_offset = _check_groups(group_sizes, group_offset, rhs.shape[0], lhs.shape[0])
    tensors = (checks.as_int32(group_sizes), group_offset, bias)
    static = (transposed, precision, str(out_dtype).removeprefix("torch."))
    if rhs_scale is None:
        return _ragged_dot(lhs, rhs, *tensors, *static)
    scale = rhs_scale.to(reference.accumulation_dtype(lhs.dtype))
    return ragged_dot_quantized(lhs, rhs, scale, *tensors, *static)


def _check_operands(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    rhs_scale: Any,
    bias: Any,
    group_offset: Any,
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """lhs, rhs and bias, promoted under autocast, after checking dtypes, devices and shapes."""
    is_quantised = quantized.check_weight("rhs", rhs, "rhs_scale", rhs_scale, transposed)
    checks.require_tensor("group_sizes", group_sizes, 1, checks.INTEGERS)
    if bias is not None:
        checks.require_tensor("bias", bias, 2, checks.FLOATS)
    checks.require_same_device(
        lhs=lhs,
        rhs=rhs,
        group_sizes=group_sizes,
        bias=bias,
        rhs_scale=rhs_scale,
        group_offset=group_offset if isinstance(group_offset, torch.Tensor) else None,
    )
    if is_quantised:
        lhs, bias = checks.in_one_dtype(lhs=lhs, bias=bias)
    else:
        lhs, rhs, bias = checks.in_one_dtype(lhs=lhs, rhs=rhs, bias=bias)
    if quantized.num_k(rhs, transposed) != lhs.shape[1]:
        packed = "/2" if rhs.dtype == quantized.INT4 else ""
        layout = f"[g, n, k{packed}]" if transposed else f"[g, k{packed}, n]"
        raise ValueError(
            f"rhs: expected {layout} with k = {lhs.shape[1]} as in lhs {tuple(lhs.shape)}, "
            f"got {tuple(rhs.shape)} with transpose_rhs={transposed}"
        )
    if bias is not None:
        n = quantized.num_n(rhs, transposed)
        checks.require_shape("bias", bias, (rhs.shape[0], n), "[g, n]")
    return lhs, rhs, bias


def _check_groups(
    group_sizes: torch.Tensor, group_offset: int | torch.Tensor | None, g: int, m: int
) -> torch.Tensor | None:
    """The group offset as an int32 tensor, None for no offset, after checking it with the sizes."""
    if group_offset is None:
        checks.require_shape("group_sizes", group_sizes, (g,), "[g]")
    else:
        group_offset = _check_offset(group_offset, group_sizes, g)
    if sizes := checks.values_on_host(group_sizes):
        if min(sizes) < 0:
            raise ValueError(f"group_sizes: expected no negative size, got {min(sizes)}")
        if sum(sizes) > m:
            raise ValueError(
                f"group_sizes: expected a sum of at most m = {m} rows of lhs, got {sum(sizes)} "
                "(are these cumulative offsets? sizes = torch.diff(offsets, prepend=zero))"
            )
    return group_offset


def _check_offset(
    group_offset: int | torch.Tensor, group_sizes: torch.Tensor, g: int
) -> torch.Tensor:
    """The group offset as an int32 tensor."""
    if isinstance(group_offset, torch.Tensor):
        checks.require_tensor("group_offset", group_offset, 0, checks.INTEGERS)
        offset = checks.values_on_host(group_offset)
    else:
        checks.require_int("group_offset", group_offset)
        offset = group_offset
    num_sizes = group_sizes.shape[0]
    if offset is not None and (offset < 0 or offset + g > num_sizes):
        raise ValueError(
            f"group_sizes: expected at least group_offset + g = {offset} + {g} sizes "
            f"and group_offset >= 0, got {num_sizes} sizes"
        )
    if isinstance(group_offset, torch.Tensor):
        return checks.as_int32(group_offset)
    return torch.full((), group_offset, dtype=torch.int32, device=group_sizes.device)


def _fake(
    lhs, rhs, group_sizes, group_offset, bias, transpose_rhs, precision, out_dtype
) -> torch.Tensor:
    n = rhs.shape[1 if transpose_rhs else 2]
    return lhs.new_empty((lhs.shape[0], n), dtype=getattr(torch, out_dtype))


def _fake_backward(
    grad_out,
    lhs,
    rhs,
    group_sizes,
    group_offset,
    transpose_rhs,
    precision,
    needs_lhs,
    needs_rhs,
    needs_bias,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    bias_shape = (rhs.shape[0], grad_out.shape[1])
    return (
        lhs.new_empty(lhs.shape if needs_lhs else (0,)),
        rhs.new_empty(rhs.shape if needs_rhs else (0,)),
        lhs.new_empty(bias_shape if needs_bias else (0,)),
    )


def _load_forward():
    from .lowering import ragged_dot

    return ragged_dot


def _load_backward():
    from .lowering import ragged_dot_backward

    return ragged_dot_backward


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    lhs, rhs, group_sizes, group_offset, _, transpose_rhs, precision, _ = inputs
    ctx.save_for_backward(lhs, rhs, group_sizes, group_offset)
    ctx.transpose_rhs, ctx.precision = transpose_rhs, precision


def _backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    needs_lhs, needs_rhs, _, _, needs_bias, *_ = ctx.needs_input_grad
    grad_lhs, grad_rhs, grad_bias = _ragged_dot_backward(
        grad_out,
        *ctx.saved_tensors,
        ctx.transpose_rhs,
        ctx.precision,
        needs_lhs,
        needs_rhs,
        needs_bias,
    )
    return (
        grad_lhs if needs_lhs else None,
        grad_rhs if needs_rhs else None,
        None,
        None,
        grad_bias if needs_bias else None,
        None,
        None,
        None,
    )


_ragged_dot = define_op(
    add_op_namespace_prefix("ragged_dot"),
    "(Tensor lhs, Tensor rhs, Tensor group_sizes, Tensor? group_offset, Tensor? bias, "
    "bool transpose_rhs, str precision, str out_dtype) -> Tensor",
    reference=reference.ragged_dot,
    fake=_fake,
    load_kernel=_load_forward,
    backward=_backward,
    save=_save,
)

_ragged_dot_backward = define_op(
    add_op_namespace_prefix("ragged_dot_backward"),
    "(Tensor grad_out, Tensor lhs, Tensor rhs, Tensor group_sizes, Tensor? group_offset, "
    "bool transpose_rhs, str precision, bool needs_lhs, bool needs_rhs, bool needs_bias) "
    "-> (Tensor, Tensor, Tensor)",
    reference=reference.ragged_dot_backward,
    fake=_fake_backward,
    load_kernel=_load_backward,
)
