"""Rotary embedding as torch ops: argument checks, dispatch, shape functions and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..._ops import add_op_namespace_prefix
from ...tpu_runtime import checks, define_op
from . import reference

CASTINGS = ("llama", "gemma", "none")


def apply_rotary(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    unsqueeze_dim: int = 1,
    interleaved: bool = False,
    rotary_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotary position embedding of q and k in one launch: x * cos + rotate_half(x) * sin.

    Args:
        q: [b, hq, s, d] with unsqueeze_dim 1, [b, s, hq, d] with 2, [hq, b, s, d] with 0; or
            without batch [t, hq, d] with 1 and [hq, t, d] with 0. bfloat16, float16 or float32;
            float64 on the CPU only. Any strides.
        k: like q with its own number of heads, or None to rotate one tensor only.
        cos, sin: [b or 1, s, w]; for tensors without batch [t, w] or [1, t, w]. Any float dtype,
            used in float32. They get no gradient.
        unsqueeze_dim: where the tables get the axis of the heads, as in transformers.
        interleaved: pairs are features (2i, 2i + 1) instead of (i, i + rotary_dim / 2), and
            full-width tables hold every angle twice in a row.
        rotary_dim: how many of the first features rotate; the others are copied. By default
            w == d / 2 means half-width tables of a full rotation, and any other w is rotary_dim
            itself. With it given, w is rotary_dim or rotary_dim / 2.

    Returns:
        (q, k) rotated, new contiguous tensors of the input's dtype, computed in float32 and
        rounded once; k is None if it was. All of a full-width table is used, with unequal halves
        too. A NaN reaches its own pair of features only.

    Differentiable once in q and k.

    Raises:
        TypeError, ValueError: for an argument of wrong type, rank, size, dtype or device.
        NotImplementedError: if cos or sin requires grad.
    """
    head_axis = _check_layout(q, k, unsqueeze_dim)
    checks.require_bool("interleaved", interleaved)
    checks.require_same_device(q=q, k=k, cos=cos, sin=sin)
    q, k = checks.in_one_dtype(q=q, k=k)
    cos, sin, half_width = _check_tables(q, cos, sin, head_axis, rotary_dim)
    out_q, out_k = _apply_rotary(q, k, cos, sin, head_axis, interleaved, half_width)
    return out_q, None if k is None else out_k


def apply_rotary_transformers(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_rotary_pos_emb` of transformers' rotate-half models, with their arguments.

    q [b, hq, s, d], k [b, hkv, s, d], cos and sin [b or 1, s, d] or [b or 1, s, d / 2] (gpt-oss),
    float32 tables included. See `apply_rotary`; results have the dtype of q.
    """
    return apply_rotary(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


def qk_norm_rotary(
    q: torch.Tensor,
    k: torch.Tensor | None,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    *,
    unsqueeze_dim: int = 1,
    interleaved: bool = False,
    rotary_dim: int | None = None,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """RMSNorm over the head size, then rotary embedding, of q and k in one launch.

    = apply_rotary(rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), cos, sin), with
    xhat = x * rsqrt(mean(x^2) + eps) in float32 and then, by `casting`:
    "llama" (weight + offset, in weight's dtype) * xhat rounded to x.dtype, result promoted;
    "gemma" xhat * (float32 weight + offset), rounded once to x.dtype; "none" all in x.dtype.

    Args:
        q, k, cos, sin, unsqueeze_dim, interleaved, rotary_dim: as in `apply_rotary`.
        q_weight, k_weight: [d], or None for a norm without weight. Any float dtype.
        eps, offset: Python numbers.

    Returns:
        (q, k), new contiguous tensors of the norm's result dtype.

    Differentiable once in q, k and the weights, whose gradients are summed in float32; a frozen
    weight costs no reduction.

    Raises:
        TypeError, ValueError, NotImplementedError: as `apply_rotary`.
    """
    head_axis = _check_layout(q, k, unsqueeze_dim)
    checks.require_bool("interleaved", interleaved)
    checks.require_choice("casting", casting, CASTINGS)
    eps, offset = checks.require_number("eps", eps), checks.require_number("offset", offset)
    for name, x, weight in (("q_weight", q, q_weight), ("k_weight", k, k_weight)):
        if weight is None:
            continue
        checks.require_tensor(name, weight, 1, checks.FLOATS)
        if x is None:
            raise ValueError(f"{name}: expected None where k is None, got a tensor")
        checks.require_shape(name, weight, (x.shape[-1],), "[d]")
        if x.dtype != weight.dtype and torch.float64 in (x.dtype, weight.dtype):
            raise TypeError(f"{name}: expected dtype {x.dtype} as its input, got {weight.dtype}")
    checks.require_same_device(q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
    q, k = checks.in_one_dtype(q=q, k=k)
    cos, sin, half_width = _check_tables(q, cos, sin, head_axis, rotary_dim)
    out_q, out_k = _qk_norm_rotary(
        q,
        k,
        q_weight,
        k_weight,
        cos,
        sin,
        eps,
        offset,
        casting,
        head_axis,
        interleaved,
        half_width,
    )
    return out_q, None if k is None else out_k


def _check_layout(q: Any, k: Any, unsqueeze_dim: Any) -> int:
    """The axis of the heads, after checking q and k against each other."""
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q: expected a tensor, got {type(q).__name__}")
    ndim = q.ndim
    if ndim not in (3, 4):
        raise ValueError(f"q: expected 3 or 4 dimensions, got shape {tuple(q.shape)}")
    checks.require_tensor("q", q, ndim, checks.FLOATS)
    checks.require_int("unsqueeze_dim", unsqueeze_dim)
    head_axis = unsqueeze_dim + ndim if unsqueeze_dim < 0 else unsqueeze_dim
    if not 0 <= head_axis <= ndim - 2:
        raise ValueError(
            f"unsqueeze_dim: expected 0 to {ndim - 2} for q of shape {tuple(q.shape)}, "
            f"got {unsqueeze_dim}"
        )
    if k is not None:
        checks.require_tensor("k", k, ndim, checks.FLOATS)
        expected, found = list(q.shape), list(k.shape)
        expected[head_axis] = found[head_axis]
        if expected != found:
            raise ValueError(
                f"k: expected the shape of q {tuple(q.shape)} but for the heads in dimension "
                f"{head_axis}, got {tuple(k.shape)}"
            )
    return head_axis


def _check_tables(
    q: torch.Tensor, cos: Any, sin: Any, head_axis: int, rotary_dim: Any
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The tables without a batch axis that q has not, and whether they are half as wide."""
    for name, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(table).__name__}")
        if table.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{name}: tables get no gradient; pass {name}.detach(), or rotate in plain torch "
                "to train them"
            )
        if table.dtype not in checks.FLOATS:
            raise TypeError(f"{name}: expected a float dtype, got {table.dtype}")
    q_shape, table_shape = q.shape, cos.shape
    if table_shape != sin.shape:
        raise ValueError(
            f"sin: expected the shape of cos {tuple(table_shape)}, got {tuple(sin.shape)}"
        )

    def shapes() -> str:  # put into words only for an error: that takes longer than the checks
        given = tuple(table_shape)
        return f"cos and sin {given} for q {tuple(q_shape)} and unsqueeze_dim {head_axis}"

    sizes = list(q_shape)
    *batch, length, d = sizes[:head_axis] + sizes[head_axis + 1 :]
    if not batch and len(table_shape) == 3 and table_shape[0] == 1:
        cos, sin = cos[0], sin[0]
    if cos.ndim != len(batch) + 2:
        expected = "[b or 1, s, w]" if batch else "[t, w] or [1, t, w]"
        raise ValueError(f"cos: expected {expected}, got {shapes()}")
    if table_shape[-2] != length:
        raise ValueError(f"cos: expected length {length}, got {shapes()}")
    if batch and table_shape[0] not in (1, batch[0]):
        raise ValueError(f"cos: expected batch 1 or {batch[0]}, got {shapes()}")
    half_width = _check_width(d, table_shape[-1], rotary_dim, shapes)
    dtype = cos.dtype
    if sin.dtype != dtype or dtype == torch.float64:
        dtype = torch.promote_types(dtype, sin.dtype)
        if dtype == torch.float64 and q.dtype != torch.float64:
            dtype = torch.float32
        cos, sin = cos.to(dtype), sin.to(dtype)
    return cos, sin, half_width


def _check_width(d: int, width: int, rotary_dim: Any, shapes: Callable[[], str]) -> bool:
    """Whether the tables hold one angle per pair."""
    if rotary_dim is None:
        half_width = 2 * width == d
        rotary_dim = d if half_width else width
    else:
        checks.require_int("rotary_dim", rotary_dim)
        half_width = 2 * width == rotary_dim
        if width != rotary_dim and not half_width:
            raise ValueError(
                f"rotary_dim: expected the width of cos or twice it, got {rotary_dim}, {shapes()}"
            )
    if rotary_dim % 2 or rotary_dim > d or rotary_dim < 0:
        raise ValueError(
            f"cos: expected a rotation of an even number of at most d = {d} features, "
            f"got {rotary_dim} with {shapes()}"
        )
    return half_width


def _empty(like: torch.Tensor, shape, dtype: torch.dtype | None = None) -> torch.Tensor:
    return like.new_empty(shape, dtype=dtype or like.dtype)


def _fake(q, k, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(q, q.shape), _empty(q, 0 if k is None else k.shape)


def _fake_backward(grad_q, grad_k, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    some = grad_k if grad_q is None else grad_q
    return tuple(_empty(some, 0 if x is None else x.shape) for x in (grad_q, grad_k))


def _fake_norm(
    q, k, q_weight, k_weight, cos, sin, eps, offset, casting, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    outs = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        if x is None:
            outs.append(_empty(q, 0))
            continue
        is_promoted = casting == "llama" and weight is not None
        dtype = torch.promote_types(x.dtype, weight.dtype) if is_promoted else x.dtype
        outs.append(_empty(x, x.shape, dtype))
    return tuple(outs)


def _fake_norm_backward(
    grad_q, grad_k, q, k, q_weight, k_weight, cos, sin, eps, offset, casting, head_axis,
    interleaved, half_width, *needs
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    return tuple(
        _empty(x, x.shape) if needed else _empty(q, 0)
        for x, needed in zip((q, k, q_weight, k_weight), needs, strict=True)
    )


def _load(name: str):
    def load():
        from . import lowering

        return getattr(lowering, name)

    return load


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _, _, cos, sin, *ctx.options = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor) -> tuple[Any, ...]:
    needs_q, needs_k, *_ = ctx.needs_input_grad
    found_q, found_k = _apply_rotary_backward(
        grad_q if needs_q else None, grad_k if needs_k else None, *ctx.saved_tensors, *ctx.options
    )
    return (found_q if needs_q else None, found_k if needs_k else None, *(None,) * 5)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _backward_norm(ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor) -> tuple[Any, ...]:
    needs = ctx.needs_input_grad[:4]
    has_k = ctx.saved_tensors[1] is not None
    grads = _qk_norm_rotary_backward(
        grad_q, grad_k if has_k else None, *ctx.saved_tensors, *ctx.options, *needs
    )
    found = (grad if needed else None for grad, needed in zip(grads, needs, strict=True))
    return (*found, *(None,) * 8)


_ROTATION = "Tensor cos, Tensor sin, int head_axis, bool interleaved, bool half_width"
_NORM = (
    "Tensor q, Tensor? k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, float eps, "
    "float offset, str casting, int head_axis, bool interleaved, bool half_width"
)

_apply_rotary = define_op(
    add_op_namespace_prefix("apply_rotary"),
    f"(Tensor q, Tensor? k, {_ROTATION}) -> (Tensor, Tensor)",
    reference=reference.apply_rotary,
    fake=_fake,
    load_kernel=_load("apply_rotary"),
    backward=_backward,
    save=_save,
)

_apply_rotary_backward = define_op(
    add_op_namespace_prefix("apply_rotary_backward"),
    f"(Tensor? grad_q, Tensor? grad_k, {_ROTATION}) -> (Tensor, Tensor)",
    reference=reference.apply_rotary_backward,
    fake=_fake_backward,
    load_kernel=_load("apply_rotary_backward"),
)

_qk_norm_rotary = define_op(
    add_op_namespace_prefix("qk_norm_rotary"),
    f"({_NORM}) -> (Tensor, Tensor)",
    reference=reference.qk_norm_rotary,
    fake=_fake_norm,
    load_kernel=_load("qk_norm_rotary"),
    backward=_backward_norm,
    save=_save_norm,
)

_qk_norm_rotary_backward = define_op(
    add_op_namespace_prefix("qk_norm_rotary_backward"),
    f"(Tensor grad_q, Tensor? grad_k, {_NORM}, bool needs_q, bool needs_k, bool needs_q_weight, "
    "bool needs_k_weight) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=reference.qk_norm_rotary_backward,
    fake=_fake_norm_backward,
    load_kernel=_load("qk_norm_rotary_backward"),
)
