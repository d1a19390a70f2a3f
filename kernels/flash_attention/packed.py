"""flash_attention_packed as a torch op: sequences of different lengths, one after the other."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ..._ops import add_op_namespace_prefix
from ...tpu_runtime import checks, define_op
from . import reference_packed
from .arguments import check_heads, check_options
from .ops import fake_gradients, gradients, save_for_backward


def flash_attention_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float | None = 0.0,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flash_attention` of each sequence of a packed batch, whose queries see its own keys only.

    Sequence i holds rows cu_seqlens_q[i] .. cu_seqlens_q[i + 1] - 1 of q and likewise of k and v.
    `causal` and the window are aligned at the bottom right of each sequence. Sequences may be
    empty, of queries, of keys or of both.

    Args:
        q: [t, hq, d] bfloat16, float16 or float32; float64 on the CPU only. Any strides.
        k, v: [tk, hkv, d] and [tk, hkv, dv].
        cu_seqlens_q, cu_seqlens_k: int32 or int64 [number of sequences + 1], starting with 0, never
            decreasing, ending at t and tk or before. Anything else is a ValueError for eager CPU
            calls; elsewhere it is clipped to the rows there are.
        max_seqlen_q, max_seqlen_k: Python ints, not shorter than any sequence.
        causal, softmax_scale, window_size, softcap, sinks, dropout_p: as in `flash_attention`.
        return_lse: also return the log-sum-exp.

    Returns:
        out [t, hq, dv] in q's dtype, and with `return_lse` lse [hq, t] float32. Rows past
        cu_seqlens_q[-1], and rows without a visible key, have out 0 and lse -inf.

    Differentiable once in q, k, v and sinks; rows past the last sequence get zero gradient.

    Raises:
        TypeError, ValueError: for an argument of wrong type, rank, size, dtype or device.
        NotImplementedError: for dropout.
    """
    checks.require_bool("return_lse", return_lse)
    q, k, v = check_heads(q, k, v, ndim=3, heads_dim=1, sinks=sinks)
    options = check_options(causal, softmax_scale, window_size, softcap, dropout_p, q.shape[-1])
    for name, cu_seqlens in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        checks.require_tensor(name, cu_seqlens, 1, (torch.int32, torch.int64))
        if cu_seqlens.shape[0] < 1:
            raise ValueError(f"{name}: expected at least one element, a zero, got none")
    checks.require_shape(
        "cu_seqlens_k", cu_seqlens_k, tuple(cu_seqlens_q.shape), "[number of sequences + 1]"
    )
    checks.require_same_device(
        q=q, k=k, v=v, sinks=sinks, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k
    )
    checks.require_int("max_seqlen_q", max_seqlen_q)
    checks.require_int("max_seqlen_k", max_seqlen_k)
    _check_values("q", cu_seqlens_q, max_seqlen_q, q.shape[0])
    _check_values("k", cu_seqlens_k, max_seqlen_k, k.shape[0])
    out, lse = _flash_attention_packed(
        q, k, v, sinks, checks.as_int32(cu_seqlens_q), checks.as_int32(cu_seqlens_k), *options
    )
    return (out, lse) if return_lse else out


def _check_values(side: str, cu_seqlens: torch.Tensor, max_seqlen: int, t: int) -> None:
    if (ends := checks.values_on_host(cu_seqlens)) is None:
        return
    lengths = [stop - start for start, stop in itertools.pairwise(ends)]
    if ends[0] != 0 or min(lengths, default=0) < 0 or ends[-1] > t:
        raise ValueError(
            f"cu_seqlens_{side}: expected values from 0 that never decrease, up to the {t} rows "
            f"of {side}, got {ends}"
        )
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(
            f"max_seqlen_{side}: expected at least the longest length of cu_seqlens_{side}, "
            f"{max(lengths)}, got {max_seqlen}"
        )


def _fake(q, k, v, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    t, hq, _ = q.shape
    return q.new_empty((t, hq, v.shape[2])), q.new_empty((hq, t), dtype=torch.float32)


def _fake_backward(grad_out, q, k, v, out, lse, sinks, *options) -> tuple[torch.Tensor, ...]:
    return fake_gradients(q, k, v, sinks, *options[-3:])


def _load_forward():
    from .lowering import flash_attention_packed

    return flash_attention_packed


def _load_backward():
    from .lowering import flash_attention_packed_backward

    return flash_attention_packed_backward


def _backward(ctx: Any, grad_out: torch.Tensor, grad_lse: Any) -> tuple[Any, ...]:
    return gradients(ctx, _flash_attention_packed_backward, grad_out)


_OPTIONS = (
    "Tensor? sinks, Tensor cu_seqlens_q, Tensor cu_seqlens_k, bool causal, int window_left, "
    "int window_right, float softmax_scale, float softcap"
)

_flash_attention_packed = define_op(
    add_op_namespace_prefix("flash_attention_packed"),
    f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)",
    reference=reference_packed.flash_attention_packed,
    fake=_fake,
    load_kernel=_load_forward,
    backward=_backward,
    save=save_for_backward,
)

_flash_attention_packed_backward = define_op(
    add_op_namespace_prefix("flash_attention_packed_backward"),
    f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OPTIONS}, "
    "bool needs_q, bool needs_kv, bool needs_sinks) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=reference_packed.flash_attention_packed_backward,
    fake=_fake_backward,
    load_kernel=_load_backward,
)
