"""RMS normalisation as torch ops: argument checks, dispatch, shape functions and gradients."""

from __future__ import annotations

from typing import Any

import torch

from ..._ops import add_op_namespace_prefix
from ...tpu_runtime import checks, define_op
from . import reference

CASTINGS = ("llama", "gemma", "none")


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    """x / sqrt(mean(x ** 2) + eps) * (weight + offset), over the last dimension.

    Args:
        x: [..., d], any rank from 1, bfloat16, float16 or float32; float64 on the CPU only.
        weight: [d] of any of these dtypes, or None for none.
        eps, offset: Python numbers.
        casting: where rounding happens; xhat = x / sqrt(mean(x ** 2) + eps) is float32.
            "llama": xhat is rounded to x.dtype, then multiplied by weight + offset, which is in
            weight's dtype; the result has the promoted dtype of both.
            "gemma": weight + offset and the product are float32, rounded once to x.dtype.
            "none": every step is rounded to x.dtype.

    Returns:
        [..., d], a new tensor. Without a weight xhat, rounded to x.dtype.

    Differentiable once in x and weight. The weight's gradient is summed in float32; it costs
    nothing while the weight needs none. A NaN stays in its row, except in the weight's gradient.
    """
    _check(eps, offset, casting, weight, x=x)
    return _rms_norm(x, weight, eps, offset, casting)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual, weight, eps), x + residual) in one pass over memory.

    Args:
        x, residual: [..., d], of equal shapes. The sum has their promoted dtype and is rounded to
            it before it is normalised.
        weight, eps, offset, casting: as for `rms_norm`.

    Returns:
        The norm and the sum, both [..., d] and new tensors. Differentiable once in x, residual
        and weight, through both results.
    """
    _check(eps, offset, casting, weight, x=x, residual=residual)
    return _add_rms_norm(x, residual, weight, eps, offset, casting)


def rms_norm_gated(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float = 1e-6,
    *,
    activation: str = "silu",
    gate_first: bool = False,
    offset: float = 0.0,
    casting: str = "llama",
) -> torch.Tensor:
    """rms_norm(x) * act(gate), or rms_norm(x * act(gate)) with `gate_first`.

    Args:
        x, gate: [..., d], of equal shapes. The gate is activated in float32.
        activation: "silu" or "sigmoid".
        gate_first: False: the product with the activated gate is rounded to x.dtype; with
            casting "gemma" that is the only rounding. True: the float32 product is normalised, and
            the result rounded as for `rms_norm`.
        weight, eps, offset, casting: as for `rms_norm`.

    Returns:
        [..., d], a new tensor. Differentiable once in x, gate and weight.
    """
    checks.require_choice("activation", activation, ("silu", "sigmoid"))
    checks.require_bool("gate_first", gate_first)
    _check(eps, offset, casting, weight, x=x, gate=gate)
    return _rms_norm_gated(x, gate, weight, eps, activation, gate_first, offset, casting)


def _check(
    eps: Any, offset: Any, casting: Any, weight: torch.Tensor | None, **rows: torch.Tensor
) -> None:
    for name, value in (("eps", eps), ("offset", offset)):
        checks.require_number(name, value)
    checks.require_choice("casting", casting, CASTINGS)
    shape = None
    for name, tensor in rows.items():
        ndim = max(1, tensor.ndim) if isinstance(tensor, torch.Tensor) else 1
        checks.require_tensor(name, tensor, ndim, checks.FLOATS)
        shape = tensor.shape if shape is None else shape
        checks.require_shape(name, tensor, tuple(shape), "that of x")
    if weight is not None:
        checks.require_tensor("weight", weight, 1, checks.FLOATS)
        checks.require_shape("weight", weight, (shape[-1],), "[d]")
    checks.require_same_device(**rows, weight=weight)


def _result_dtype(dtype: torch.dtype, weight: torch.Tensor | None, casting: str) -> torch.dtype:
    is_promoted = casting == "llama" and weight is not None
    return torch.promote_types(dtype, weight.dtype) if is_promoted else dtype


def _fake(x, weight, eps, offset, casting) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=_result_dtype(x.dtype, weight, casting))


def _fake_add(x, residual, weight, eps, offset, casting) -> tuple[torch.Tensor, torch.Tensor]:
    total = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return _fake(total, weight, eps, offset, casting), total


def _fake_gated(x, gate, weight, eps, activation, gate_first, offset, casting) -> torch.Tensor:
    return _fake(x, weight, eps, offset, casting if gate_first else "none")


def _fake_gradient(like: torch.Tensor | None, x: torch.Tensor, is_needed: bool) -> torch.Tensor:
    dtype = x.dtype if like is None else like.dtype
    return x.new_empty(like.shape if is_needed else (0,), dtype=dtype)


def _fake_backward(
    grad_out, x, weight, eps, offset, casting, needs_x, needs_weight
) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_gradient(x, x, needs_x), _fake_gradient(weight, x, needs_weight)


def _fake_add_backward(
    grad_out, grad_total, total, weight, eps, offset, casting, needs_total, needs_weight
) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_gradient(total, total, needs_total), _fake_gradient(weight, total, needs_weight)


def _fake_gated_backward(
    grad_out,
    x,
    gate,
    weight,
    eps,
    activation,
    gate_first,
    offset,
    casting,
    needs_x,
    needs_gate,
    needs_weight,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        _fake_gradient(x, x, needs_x),
        _fake_gradient(gate, x, needs_gate),
        _fake_gradient(weight, x, needs_weight),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, *ctx.statics = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    needs = ctx.needs_input_grad[:2]
    grads = _rms_norm_backward(grad_out, *ctx.saved_tensors, *ctx.statics, *needs)
    return (*_only_needed(grads, needs), None, None, None)


def _save_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, residual, weight, *ctx.statics = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.dtypes = x.dtype, residual.dtype
    ctx.set_materialize_grads(False)


def _backward_add(
    ctx: Any, grad_out: torch.Tensor | None, grad_total: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    needs_x, needs_residual, needs_weight = ctx.needs_input_grad[:3]
    grad_weight = None
    if grad_out is not None:
        needs = (needs_x or needs_residual, needs_weight)
        grads = _add_rms_norm_backward(
            grad_out, grad_total, *ctx.saved_tensors, *ctx.statics, *needs
        )
        grad_total, grad_weight = _only_needed(grads, needs)
    grad_x, grad_residual = (
        grad_total.to(dtype) if is_needed and grad_total is not None else None
        for dtype, is_needed in zip(ctx.dtypes, (needs_x, needs_residual), strict=True)
    )
    return grad_x, grad_residual, grad_weight, None, None, None


def _save_gated(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, gate, weight, *ctx.statics = inputs
    ctx.save_for_backward(x, gate, weight)


def _backward_gated(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    needs = ctx.needs_input_grad[:3]
    grads = _rms_norm_gated_backward(grad_out, *ctx.saved_tensors, *ctx.statics, *needs)
    return (*_only_needed(grads, needs), None, None, None, None, None)


def _only_needed(
    grads: tuple[torch.Tensor, ...], needs: tuple[bool, ...]
) -> list[torch.Tensor | None]:
    return [grad if is_needed else None for grad, is_needed in zip(grads, needs, strict=True)]


def _define(name: str, schema: str, fake: Any, **gradient: Any) -> Any:
    """The op `name`, with the function of that name in reference.py and in lowering.py."""

    def load_kernel():
        from . import lowering

        return getattr(lowering, name)

    return define_op(
        add_op_namespace_prefix(name),
        schema,
        reference=getattr(reference, name),
        fake=fake,
        load_kernel=load_kernel,
        **gradient,
    )


_rms_norm = _define(
    "rms_norm",
    "(Tensor x, Tensor? weight, float eps, float offset, str casting) -> Tensor",
    _fake,
    backward=_backward,
    save=_save,
)
_rms_norm_backward = _define(
    "rms_norm_backward",
    "(Tensor grad_out, Tensor x, Tensor? weight, float eps, float offset, str casting, "
    "bool needs_x, bool needs_weight) -> (Tensor, Tensor)",
    _fake_backward,
)
_add_rms_norm = _define(
    "add_rms_norm",
    "(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, str casting) "
    "-> (Tensor, Tensor)",
    _fake_add,
    backward=_backward_add,
    save=_save_add,
)
_add_rms_norm_backward = _define(
    "add_rms_norm_backward",
    "(Tensor grad_out, Tensor? grad_total, Tensor total, Tensor? weight, float eps, float offset, "
    "str casting, bool needs_total, bool needs_weight) -> (Tensor, Tensor)",
    _fake_add_backward,
)
_rms_norm_gated = _define(
    "rms_norm_gated",
    "(Tensor x, Tensor gate, Tensor? weight, float eps, str activation, bool gate_first, "
    "float offset, str casting) -> Tensor",
    _fake_gated,
    backward=_backward_gated,
    save=_save_gated,
)
_rms_norm_gated_backward = _define(
    "rms_norm_gated_backward",
    "(Tensor grad_out, Tensor x, Tensor gate, Tensor? weight, float eps, str activation, "
    "bool gate_first, float offset, str casting, bool needs_x, bool needs_gate, "
    "bool needs_weight) -> (Tensor, Tensor, Tensor)",
    _fake_gated_backward,
)
