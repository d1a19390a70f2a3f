"""Backward of attention in XLA, a block of queries at a time: not a Pallas kernel yet.

Recomputes the probabilities from the forward's lse, so memory stays at one block of logits,
BLOCK_BYTES of float32, whatever the lengths. It multiplies hidden blocks too: exact, but a causal
backward costs twice what a kernel that skips them would.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ...tpu_runtime import MIB, SUBLANES, Chip

BLOCK_BYTES = 64 * MIB
MAX_BLOCK_ROWS = 512


def flash_attention_bwd(
    q: jax.Array,  # [b, sq, hq, d]
    k: jax.Array,  # [b, sk, hkv, d]
    v: jax.Array,  # [b, sk, hkv, dv]
    out: jax.Array,  # [b, sq, hq, dv]
    lse: jax.Array,  # [b, hq, sq] float32
    grad_out: jax.Array,  # [b, sq, hq, dv]
    *,
    sinks: jax.Array | None = None,  # [hq] float32
    q_segment_ids: jax.Array | None = None,  # [b, sq]
    kv_segment_ids: jax.Array | None = None,  # [b, sk]
    q_positions: jax.Array | None = None,  # [b, sq]
    kv_positions: jax.Array | None = None,  # [b, sk]
    mask: jax.Array | None = None,  # bool [b or 1, hq or 1, sq, sk]
    kv_lengths: jax.Array | None = None,  # [b]
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softmax_scale: float,
    softcap: float = 0.0,
    needs_q: bool = True,
    needs_kv: bool = True,
    needs_sinks: bool = False,
    chip: Chip,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(dq, dk, dv, dsinks); one that is not needed has shape [0], dsinks is float32.

    A pair of query and key counts only if the query sees the key. Everything else is selected
    away before it is multiplied, so NaN in a hidden key, value or query reaches nothing.
    """
    del chip, interpret
    (b, sq, hq, d), (_, sk, hkv, dv) = q.shape, v.shape
    rows = BLOCK_BYTES // (4 * b * hq * sk) // SUBLANES * SUBLANES
    rows = min(max(rows, SUBLANES), MAX_BLOCK_ROWS, -(-sq // SUBLANES) * SUBLANES)
    num_blocks = -(-sq // rows)
    delta = jnp.einsum("bqhd,bqhd->bhq", out, grad_out, preferred_element_type=jnp.float32)
    lengths = jnp.full((b,), sk) if kv_lengths is None else kv_lengths
    if q_positions is None:
        q_positions = jnp.arange(sq) + (lengths - sq)[:, None]
        kv_positions = jnp.broadcast_to(jnp.arange(sk), (b, sk))

    def blocks(x, axis, fill=0):
        """[.., sq, ..] -> [num_blocks, .., rows, ..]; rows past sq hold `fill`."""
        pad = [(0, num_blocks * rows - sq if i == axis else 0) for i in range(x.ndim)]
        x = jnp.pad(x, pad, constant_values=fill)
        x = x.reshape(*x.shape[:axis], num_blocks, rows, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    def heads(x):  # [b, sq, hq, d] -> [b, sq, hkv, hq // hkv, d]
        return x.reshape(b, sq, hkv, hq // hkv, x.shape[-1])

    queries = {
        "q": blocks(heads(q), 1),
        "grad_out": blocks(heads(grad_out), 1),
        "lse": blocks(lse.reshape(b, hkv, hq // hkv, sq), 3, -jnp.inf),
        "delta": blocks(delta.reshape(b, hkv, hq // hkv, sq), 3),
        "positions": blocks(q_positions, 1),
        "is_row": blocks(jnp.ones((b, sq), bool), 1, False),
    }
    if q_segment_ids is not None:
        queries["segment_ids"] = blocks(q_segment_ids, 1)
    if mask is not None:
        queries["mask"] = blocks(mask, 2, False)

    def visible(block) -> jax.Array:  # [b, hkv, hq // hkv, rows, sk]
        offset = kv_positions[:, None, :] - block["positions"][:, :, None]
        see = block["is_row"][:, :, None] & (jnp.arange(sk) < lengths[:, None])[:, None, :]
        if causal:
            see &= offset <= 0
        if window[0] >= 0:
            see &= offset >= -window[0]
        if window[1] >= 0:
            see &= offset <= window[1]
        if q_segment_ids is not None:
            see &= block["segment_ids"][:, :, None] == kv_segment_ids[:, None, :]
        see = jnp.broadcast_to(see[:, None], (b, hq, rows, sk))
        if mask is not None:
            see &= block["mask"]
        return see.reshape(b, hkv, hq // hkv, rows, sk)

    step = functools.partial(_block, k=k, v=v, softmax_scale=softmax_scale, softcap=softcap)
    zeros = jnp.zeros((b, sk, hkv, d), jnp.float32), jnp.zeros((b, sk, hkv, dv), jnp.float32)
    (dk, dv_), dq = jax.lax.scan(lambda sums, x: step(x, visible(x), sums), zeros, queries)
    dq = jnp.moveaxis(dq, 0, 1).reshape(b, num_blocks * rows, hq, d)[:, :sq]
    nothing = jnp.zeros((0,), q.dtype)
    dsinks = nothing
    if needs_sinks:
        share = jnp.exp(sinks[None, :, None] - lse) * delta
        dsinks = -jnp.sum(jnp.where(lse == -jnp.inf, 0, share), axis=(0, 2))
    return (
        dq if needs_q else nothing,
        dk.astype(k.dtype) if needs_kv else nothing,
        dv_.astype(v.dtype) if needs_kv else nothing,
        dsinks,
    )


def _block(block, see, sums, *, k, v, softmax_scale: float, softcap: float):
    """Adds one block of queries to (dk, dv) and returns its dq."""
    dtype = k.dtype
    exact = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    dot = functools.partial(jnp.einsum, precision=exact, preferred_element_type=jnp.float32)
    logits = dot("brhgd,bkhd->bhgrk", block["q"], k) * softmax_scale
    slope = softmax_scale
    if softcap:
        capped = jnp.tanh(logits / softcap)
        logits, slope = softcap * capped, softmax_scale * (1 - capped * capped)
    probs = jnp.where(see, jnp.exp(logits - block["lse"][..., None]), 0)
    grad_probs = dot("brhgd,bkhd->bhgrk", block["grad_out"], v)
    grad_logits = probs * (grad_probs - block["delta"][..., None]) * slope
    grad_logits = jnp.where(see, grad_logits, 0).astype(dtype)
    # A NaN belongs to the pairs that see it; the products below would spread it to all others.
    is_bad = ~jnp.isfinite(block["grad_out"]).all(-1)  # [b, rows, hkv, hq // hkv]
    is_bad = jnp.moveaxis(is_bad, 1, 3)[..., None]
    probs = jnp.where(see & is_bad, jnp.nan, probs).astype(dtype)
    dk, dv = sums
    dk += dot("bhgrk,brhgd->bkhd", grad_logits, _finite(block["q"]))
    dv += dot("bhgrk,brhgd->bkhd", probs, _finite(block["grad_out"]))
    dq = dot("bhgrk,bkhd->brhgd", grad_logits, _finite(k)).astype(dtype)
    return (dk, dv), dq


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)
