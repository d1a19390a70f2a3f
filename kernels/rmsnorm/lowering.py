"""The JAX functions behind the torch ops: what runs on the TPU, arguments as in the torch schema.

Around the Pallas kernels they settle what Mosaic cannot: any rank, sizes of zero, float16.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ...tpu_runtime import Chip
from .kernel import rms_norm_fwd
from .kernel_bwd import rms_norm_bwd


def rms_norm(
    x: jax.Array,  # [..., d]
    weight: jax.Array | None,  # [d]
    eps: float,
    offset: float,
    casting: str,
    *,
    chip: Chip,
    interpret: Any = False,
) -> jax.Array:  # [..., d]
    dtype = _result_dtype(x.dtype, weight, casting)
    (out,) = _forward(
        (x, None, None, weight),
        (dtype,),
        eps=eps,
        offset=offset,
        casting=casting,
        chip=chip,
        interpret=interpret,
    )
    return out


def add_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array | None,
    eps: float,
    offset: float,
    casting: str,
    *,
    chip: Chip,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    total = jnp.promote_types(x.dtype, residual.dtype)
    return _forward(
        (x, residual, None, weight),
        (_result_dtype(total, weight, casting), total),
        eps=eps,
        offset=offset,
        casting=casting,
        chip=chip,
        interpret=interpret,
    )


def rms_norm_gated(
    x: jax.Array,
    gate: jax.Array,
    weight: jax.Array | None,
    eps: float,
    activation: str,
    gate_first: bool,
    offset: float,
    casting: str,
    *,
    chip: Chip,
    interpret: Any = False,
) -> jax.Array:
    dtype = _result_dtype(x.dtype, weight, casting) if gate_first else x.dtype
    (out,) = _forward(
        (x, None, gate, weight),
        (dtype,),
        eps=eps,
        offset=offset,
        casting=casting,
        activation=activation,
        gate_first=gate_first,
        chip=chip,
        interpret=interpret,
    )
    return out


def rms_norm_backward(
    grad_out: jax.Array,
    x: jax.Array,
    weight: jax.Array | None,
    eps: float,
    offset: float,
    casting: str,
    needs_x: bool,
    needs_weight: bool,
    *,
    chip: Chip,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    grad_x, _, grad_weight = _backward(
        (grad_out, x, None, None, weight),
        eps=eps,
        offset=offset,
        casting=casting,
        needs_x=needs_x,
        needs_weight=needs_weight,
        chip=chip,
        interpret=interpret,
    )
    return grad_x, grad_weight


def add_rms_norm_backward(
    grad_out: jax.Array,
    grad_total: jax.Array | None,
    total: jax.Array,
    weight: jax.Array | None,
    eps: float,
    offset: float,
    casting: str,
    needs_total: bool,
    needs_weight: bool,
    *,
    chip: Chip,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    grad_x, _, grad_weight = _backward(
        (grad_out, total, grad_total if needs_total else None, None, weight),
        eps=eps,
        offset=offset,
        casting=casting,
        needs_x=needs_total,
        needs_weight=needs_weight,
        chip=chip,
        interpret=interpret,
    )
    return grad_x, grad_weight


def rms_norm_gated_backward(
    grad_out: jax.Array,
    x: jax.Array,
    gate: jax.Array,
    weight: jax.Array | None,
    eps: float,
    activation: str,
    gate_first: bool,
    offset: float,
    casting: str,
    needs_x: bool,
    needs_gate: bool,
    needs_weight: bool,
    *,
    chip: Chip,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _backward(
        (grad_out, x, None, gate, weight),
        eps=eps,
        offset=offset,
        casting=casting,
        activation=activation,
        gate_first=gate_first,
        needs_x=needs_x,
        needs_gate=needs_gate,
        needs_weight=needs_weight,
        chip=chip,
        interpret=interpret,
    )


def _result_dtype(dtype: Any, weight: jax.Array | None, casting: str) -> Any:
    is_promoted = casting == "llama" and weight is not None
    return jnp.promote_types(dtype, weight.dtype) if is_promoted else dtype


def _forward(
    operands: tuple[jax.Array | None, ...], dtypes: tuple[Any, ...], **kernel_args: Any
) -> tuple[jax.Array, ...]:
    """operands: x, residual, gate, weight. dtypes: those of the results."""
    shape = operands[0].shape
    if 0 in shape:
        return tuple(jnp.zeros(shape, dtype) for dtype in dtypes)
    outputs = rms_norm_fwd(*_as_rows(operands), **kernel_args)
    return tuple(
        out.reshape(shape).astype(dtype) for out, dtype in zip(outputs, dtypes, strict=True)
    )


def _backward(
    operands: tuple[jax.Array | None, ...],
    *,
    needs_x: bool,
    needs_weight: bool,
    needs_gate: bool = False,
    **kernel_args: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of x, gate and weight; one that is not needed has shape [0].

    operands: the result's gradient, x, the gradient that is added to that of x, gate, weight.
    """
    _, x, _, gate, weight = operands
    wanted = [(x, needs_x), (gate, needs_gate), (weight, needs_weight)]
    shapes = [array.shape if needed else (0,) for array, needed in wanted]
    dtypes = [x.dtype if array is None else array.dtype for array, _ in wanted]
    if 0 in x.shape or not any(needed for _, needed in wanted):
        return tuple(jnp.zeros(*out) for out in zip(shapes, dtypes, strict=True))
    grads = rms_norm_bwd(
        *_as_rows(operands),
        needs_x=needs_x,
        needs_gate=needs_gate,
        needs_weight=needs_weight,
        **kernel_args,
    )
    return tuple(
        jnp.zeros((0,), dtype) if grad is None else grad.reshape(shape).astype(dtype)
        for grad, shape, dtype in zip(grads, shapes, dtypes, strict=True)
    )


def _as_rows(operands: tuple[jax.Array | None, ...]) -> list[jax.Array | None]:
    """All but the last, the weight, as [n, d]; float16 as float32, because Mosaic has no float16.

    Rounding of xhat to float16, which the "llama" order asks for, is then left to the end.
    """
    *rows, weight = (
        array.astype(jnp.float32) if array is not None and array.dtype == jnp.float16 else array
        for array in operands
    )
    return [
        *(None if array is None else array.reshape(-1, array.shape[-1]) for array in rows),
        weight,
    ]
