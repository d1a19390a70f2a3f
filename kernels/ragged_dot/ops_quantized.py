"""ragged_dot with quantised weights as a torch op: shape functions, gradients of lhs and bias."""

from __future__ import annotations

from typing import Any

import torch

from ..._ops import add_op_namespace_prefix
from ...tpu_runtime import define_op
from . import quantized, reference


def _fake(
    lhs, rhs, rhs_scale, group_sizes, group_offset, bias, transpose_rhs, precision, out_dtype
) -> torch.Tensor:
    n = quantized.num_n(rhs, transpose_rhs)
    return lhs.new_empty((lhs.shape[0], n), dtype=getattr(torch, out_dtype))


def _fake_backward(
    grad_out,
    rhs,
    rhs_scale,
    group_sizes,
    group_offset,
    transpose_rhs,
    precision,
    dtype,
    needs_lhs,
    needs_bias,
) -> tuple[torch.Tensor, torch.Tensor]:
    m, n = grad_out.shape
    target = {"dtype": getattr(torch, dtype)}
    return (
        grad_out.new_empty(
            (m, quantized.num_k(rhs, transpose_rhs)) if needs_lhs else (0,), **target
        ),
        grad_out.new_empty((rhs.shape[0], n) if needs_bias else (0,), **target),
    )


def _load_forward():
    from .lowering_quantized import ragged_dot_quantized

    return ragged_dot_quantized


def _load_backward():
    from .lowering_quantized import ragged_dot_quantized_backward

    return ragged_dot_quantized_backward


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    lhs, rhs, rhs_scale, group_sizes, group_offset, _, transpose_rhs, precision, _ = inputs
    ctx.save_for_backward(rhs, rhs_scale, group_sizes, group_offset)
    ctx.static = transpose_rhs, precision, str(lhs.dtype).removeprefix("torch.")


def _backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    needs_lhs, needs_bias = ctx.needs_input_grad[0], ctx.needs_input_grad[5]
    grad_lhs, grad_bias = ragged_dot_quantized_backward(
        grad_out, *ctx.saved_tensors, *ctx.static, needs_lhs, needs_bias
    )
    nothing = (None,) * 4
    return (
        grad_lhs if needs_lhs else None,
        *nothing,
        grad_bias if needs_bias else None,
        None,
        None,
        None,
    )


ragged_dot_quantized = define_op(
    add_op_namespace_prefix("ragged_dot_quantized"),
    "(Tensor lhs, Tensor rhs, Tensor rhs_scale, Tensor group_sizes, Tensor? group_offset, "
    "Tensor? bias, bool transpose_rhs, str precision, str out_dtype) -> Tensor",
    reference=reference.ragged_dot_quantized,
    fake=_fake,
    load_kernel=_load_forward,
    backward=_backward,
    save=_save,
)

ragged_dot_quantized_backward = define_op(
    add_op_namespace_prefix("ragged_dot_quantized_backward"),
    "(Tensor grad_out, Tensor rhs, Tensor rhs_scale, Tensor group_sizes, Tensor? group_offset, "
    "bool transpose_rhs, str precision, str dtype, bool needs_lhs, bool needs_bias) "
    "-> (Tensor, Tensor)",
    reference=reference.ragged_dot_quantized_backward,
    fake=_fake_backward,
    load_kernel=_load_backward,
)
