"""Checks that the dense and the packed function share: on shapes and dtypes, before any compile."""

from __future__ import annotations

import math
from typing import Any

import torch

from ...tpu_runtime import checks

INT32_MAX = 2**31 - 1


def check_heads(
    q: Any, k: Any, v: Any, *, ndim: int, heads_dim: int, sinks: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v after the checks of ranks, dtypes, heads and head sizes."""
    for name, value in (("q", q), ("k", k), ("v", v)):
        checks.require_tensor(name, value, ndim, checks.FLOATS)
    if sinks is not None:
        checks.require_tensor("sinks", sinks, 1, checks.FLOATS)
    q, k, v = checks.in_one_dtype(q=q, k=k, v=v)
    q_shape, k_shape, v_shape = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    hq, hkv, d = q_shape[heads_dim], k_shape[heads_dim], q_shape[-1]
    if 0 in (hq, hkv, d, v_shape[-1]):
        raise ValueError(
            "q, k, v: expected at least one head and a head size of at least 1, got shapes "
            f"{q_shape}, {k_shape}, {v_shape}"
        )
    if hq % hkv != 0:
        raise ValueError(f"q: expected heads that are a multiple of k's {hkv}, got {hq}")
    if k_shape[-1] != d:
        raise ValueError(f"k: expected the head size of q, {d}, got {k_shape[-1]}")
    if v_shape[:-1] != k_shape[:-1]:
        raise ValueError(
            f"v: expected shape {k_shape[:-1]} as in k but for the head size, got {v_shape}"
        )
    if sinks is not None:
        checks.require_shape("sinks", sinks, (hq,), "[hq]")
    return q, k, v


def check_options(
    causal: Any, softmax_scale: Any, window_size: Any, softcap: Any, dropout_p: Any, head_size: int
) -> tuple[bool, int, int, float, float]:
    """(causal, window_left, window_right, softmax_scale, softcap) as the ops take them."""
    checks.require_bool("causal", causal)
    if softmax_scale is None:
        softmax_scale = 1 / math.sqrt(int(head_size))
    else:
        softmax_scale = checks.require_number("softmax_scale", softmax_scale)
    softcap = 0.0 if softcap is None else checks.require_number("softcap", softcap)
    if softcap < 0:
        raise ValueError(f"softcap: expected 0 or None (off) or a positive number, got {softcap}")
    if checks.require_number("dropout_p", dropout_p) != 0:
        raise NotImplementedError(
            f"dropout_p: attention dropout is not supported, expected 0, got {dropout_p}"
        )
    left, right = _window(window_size)
    return causal, left, right, softmax_scale, softcap


def _window(window_size: Any) -> tuple[int, int]:
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        got = "a tensor" if isinstance(window_size, torch.Tensor) else repr(window_size)
        raise TypeError(f"window_size: expected a tuple (left, right) of ints, got {got}")
    left, right = window_size
    return _window_side(left), _window_side(right)


def _window_side(size: Any) -> int:
    if size is None:
        return -1
    checks.require_int("window_size", size)
    if size < -1:
        raise ValueError(
            f"window_size: expected sizes >= 0, or -1 or None for no limit, got {size}"
        )
    # No sequence is longer, and a sum of positions and window must fit in int32.
    return min(int(size), INT32_MAX // 2)


def check_ids(name: str, ids: Any, shape: tuple[int, ...], means: str) -> torch.Tensor:
    """Integer ids as int32."""
    checks.require_tensor(name, ids, len(shape), checks.INTEGERS)
    checks.require_shape(name, ids, shape, means)
    if ids.dtype in (torch.int64, torch.uint32) and (found := value_range(ids)):
        require_range(name, found, -INT32_MAX - 1, INT32_MAX)
    return checks.as_int32(ids)


def value_range(tensor: torch.Tensor) -> list[int] | None:
    """[least, greatest] value of an eager CPU tensor; None where it cannot be read, or is empty."""
    return checks.values_on_host(
        tensor, lambda values: torch.stack(torch.aminmax(values.to(torch.int64)))
    )


def require_range(name: str, found: list[int], low: int, high: int) -> None:
    if found[0] < low or found[1] > high:
        raise ValueError(f"{name}: expected values from {low} to {high}, got {found}")
