"""flash_attention as a torch op: argument checks, dispatch, shape function and gradient."""

from __future__ import annotations

from typing import Any

import torch

from ..._ops import add_op_namespace_prefix
from ...tpu_runtime import checks, define_op
from . import reference
from .arguments import check_heads, check_ids, check_options, require_range, value_range


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float | None = 0.0,
    sinks: torch.Tensor | None = None,
    q_segment_ids: torch.Tensor | None = None,
    kv_segment_ids: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention: out[i] = sum_j softmax_j(softmax_scale * q[i] . k[j]) v[j] over visible keys j.

    Every mask below takes keys away; a key is visible when none of them does. `causal` and the
    window are aligned at the bottom right: the last query stands at the last key.

    Args:
        q: [b, sq, hq, d] bfloat16, float16 or float32; float64 on the CPU only. Any strides.
        k: [b, sk, hkv, d]. hq is a multiple of hkv; query head i uses key head i // (hq // hkv).
        v: [b, sk, hkv, dv].
        causal: a query sees no key after its own position.
        softmax_scale: a Python number, by default 1 / sqrt(d).
        window_size: (left, right), both inclusive: a query at position p sees keys p - left ..
            p + right; -1 or None is no limit. A model's "sliding window of n tokens" is (n - 1, 0).
        softcap: logits become softcap * tanh(logits / softcap), after scaling and before masking;
            0 or None is off.
        sinks: [hq], any float dtype: one more logit per head in the denominator, and in the lse.
        q_segment_ids, kv_segment_ids: integers [b, sq] and [b, sk]; a query sees only keys with an
            equal id. Both or none.
        mask: bool, broadcastable to [b, 1 or hq, sq, sk], True where a query may see a key.
        kv_lengths: integers [b], the number of valid keys of a static cache: keys past it are
            hidden, and the last query stands at key kv_lengths - 1.
        dropout_p: only 0 is supported.
        return_lse: also return the log-sum-exp. `return_attn_probs` is the same.

    Returns:
        out [b, sq, hq, dv] in q's dtype, accumulated in float32 (float64 for float64) and rounded
        once; with `return_lse` also lse [b, hq, sq], float32, natural logarithm, of the scaled and
        capped logits and the sink. A row without a visible key has out 0 and lse -inf (with sinks
        too). NaN or infinity in hidden keys and values reaches nothing.

    Differentiable once in q, k, v and sinks; lse is not differentiable. Gradients of what is
    hidden are exactly zero. Inside torch.autocast mixed float dtypes are promoted as torch does.

    Raises:
        TypeError, ValueError: for an argument of wrong type, rank, size, dtype or device.
        NotImplementedError: for dropout.
    """
    return attend(
        q,
        k,
        v,
        False,
        causal,
        softmax_scale,
        window_size,
        softcap,
        sinks,
        q_segment_ids,
        kv_segment_ids,
        mask,
        kv_lengths,
        dropout_p,
        return_lse,
        return_attn_probs,
    )


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    heads_first: bool,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float | None = 0.0,
    sinks: torch.Tensor | None = None,
    q_segment_ids: torch.Tensor | None = None,
    kv_segment_ids: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flash_attention`, with q, k and v as [b, h, s, d] if `heads_first`; out never is."""
    heads_dim, length_dim = (1, 2) if heads_first else (2, 1)
    checks.require_bool("return_lse", return_lse)
    checks.require_bool("return_attn_probs", return_attn_probs)
    q, k, v = check_heads(q, k, v, ndim=4, heads_dim=heads_dim, sinks=sinks)
    options = check_options(causal, softmax_scale, window_size, softcap, dropout_p, q.shape[-1])
    q_shape, k_shape = q.shape, k.shape
    b, hq, sq, sk = q_shape[0], q_shape[heads_dim], q_shape[length_dim], k_shape[length_dim]
    if k_shape[0] != b:
        raise ValueError(f"k: expected the batch size of q, {b}, got {k_shape[0]}")
    if (q_segment_ids is None) != (kv_segment_ids is None):
        raise ValueError("q_segment_ids, kv_segment_ids: expected both or none of them, got one")
    if q_segment_ids is not None:
        q_segment_ids = check_ids("q_segment_ids", q_segment_ids, (b, sq), "[b, sq]")
        kv_segment_ids = check_ids("kv_segment_ids", kv_segment_ids, (b, sk), "[b, sk]")
    if mask is not None:
        mask = _check_mask(mask, (b, hq, sq, sk))
    if kv_lengths is not None:
        kv_lengths = check_ids("kv_lengths", kv_lengths, (b,), "[b]")
        if (found := value_range(kv_lengths)) is not None:
            require_range("kv_lengths", found, 0, sk)
    checks.require_same_device(
        q=q,
        k=k,
        v=v,
        sinks=sinks,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        mask=mask,
        kv_lengths=kv_lengths,
    )
    out, lse = _flash_attention(
        q, k, v, sinks, q_segment_ids, kv_segment_ids, mask, kv_lengths, *options, heads_first
    )
    return (out, lse) if return_lse or return_attn_probs else out


def _check_mask(mask: Any, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """The mask with four dimensions, each of size 1 or that of `shape`."""
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"mask: expected a tensor, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise TypeError(
            "mask: expected dtype bool, True where a query may see a key (an additive mask becomes "
            f"one as mask == 0), got {mask.dtype}"
        )
    sizes = (1,) * (4 - mask.ndim) + tuple(mask.shape)
    fits = mask.ndim <= 4 and all(
        size == 1 or size == full for size, full in zip(sizes, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"mask: expected a shape broadcastable to [b, 1 or hq, sq, sk] = {tuple(shape)}, "
            f"got {tuple(mask.shape)}"
        )
    return mask.reshape(sizes)


def _fake(
    q, k, v, sinks, q_segment_ids, kv_segment_ids, mask, kv_lengths, *options
) -> tuple[torch.Tensor, torch.Tensor]:
    heads_first = options[-1]
    (hq, sq) = q.shape[1:3] if heads_first else (q.shape[2], q.shape[1])
    out = q.new_empty((q.shape[0], sq, hq, v.shape[3]))
    return out, q.new_empty((q.shape[0], hq, sq), dtype=torch.float32)


def _fake_backward(grad_out, q, k, v, out, lse, sinks, *options) -> tuple[torch.Tensor, ...]:
    needs_q, needs_kv, needs_sinks = options[-3:]
    return fake_gradients(q, k, v, sinks, needs_q, needs_kv, needs_sinks)


def fake_gradients(q, k, v, sinks, needs_q, needs_kv, needs_sinks) -> tuple[torch.Tensor, ...]:
    return (
        q.new_empty(q.shape if needs_q else (0,)),
        k.new_empty(k.shape if needs_kv else (0,)),
        v.new_empty(v.shape if needs_kv else (0,)),
        sinks.new_empty(sinks.shape) if needs_sinks else q.new_empty(0),
    )


def _load_forward():
    from .lowering import flash_attention

    return flash_attention


def _load_backward():
    from .lowering import flash_attention_backward

    return flash_attention_backward


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    """q, k, v, out, lse and the tensors after v; then what is no tensor."""
    out, lse = output
    ctx.mark_non_differentiable(lse)
    tensors = [x for x in inputs[3:] if x is None or isinstance(x, torch.Tensor)]
    ctx.save_for_backward(*inputs[:3], out, lse, *tensors)
    ctx.options = inputs[3 + len(tensors) :]


def gradients(ctx: Any, backward_op: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
    """One entry per argument of the forward op, whose fourth argument is `sinks`."""
    needs_q, needs_k, needs_v, needs_sinks, *others = ctx.needs_input_grad
    needs_kv = needs_k or needs_v
    dq, dk, dv, dsinks = backward_op(
        grad_out, *ctx.saved_tensors, *ctx.options, needs_q, needs_kv, needs_sinks
    )
    return (
        dq if needs_q else None,
        dk if needs_k else None,
        dv if needs_v else None,
        dsinks if needs_sinks else None,
        *(None for _ in others),
    )


def _backward(ctx: Any, grad_out: torch.Tensor, grad_lse: Any) -> tuple[Any, ...]:
    return gradients(ctx, _flash_attention_backward, grad_out)


_MASKS = (
    "Tensor? sinks, Tensor? q_segment_ids, Tensor? kv_segment_ids, Tensor? mask, "
    "Tensor? kv_lengths, bool causal, int window_left, int window_right, float softmax_scale, "
    "float softcap, bool heads_first"
)

_flash_attention = define_op(
    add_op_namespace_prefix("flash_attention"),
    f"(Tensor q, Tensor k, Tensor v, {_MASKS}) -> (Tensor, Tensor)",
    reference=reference.flash_attention,
    fake=_fake,
    load_kernel=_load_forward,
    backward=_backward,
    save=save_for_backward,
)

_flash_attention_backward = define_op(
    add_op_namespace_prefix("flash_attention_backward"),
    f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_MASKS}, "
    "bool needs_q, bool needs_kv, bool needs_sinks) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=reference.flash_attention_backward,
    fake=_fake_backward,
    load_kernel=_load_backward,
)
