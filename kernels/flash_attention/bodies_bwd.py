"""The arithmetic of the backward on one set of queries and keys: five matmuls on the MXU.

Logits as [key, query], which makes rows of lse and delta, are an idea of splash attention:
https://github.com/jax-ml/jax/tree/main/jax/experimental/pallas/ops/tpu/splash_attention
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...tpu_runtime import LANES
from .kernel_bwd_plan import Plan, needs_bounds

_NN = (((1,), (0,)), ((), ()))  # lhs [m, k], rhs [k, n]
_NT = (((1,), (1,)), ((), ()))  # lhs [m, k], rhs [n, k]
_LOG2E = 1 / math.log(2.0)


def accumulate(plan: Plan, refs, head, keys, columns, seen=None):
    """Adds what step_q queries and block_k keys of a head give to dq, dk and dv.

    keys: rows of the resident keys; columns: of q and grad_out, which lie upright, so that lse and
    delta are rows that broadcast for free and dq, dk, dv, upright as well, come from matmuls
    without a transposition. seen: mask [block_k, step_q], None if all pairs are visible.
    """
    kv_head = plan.kv_head_of(head)

    def dot(lhs, rhs, dims=_NN):
        return jax.lax.dot_general(
            lhs, rhs, dims, precision=plan.precision, preferred_element_type=jnp.float32
        )

    q, grad_out = refs.q_up[head, :, columns], refs.grad_up[head, :, columns]  # [d, step_q]
    lse, delta = (ref[pl.ds(head, 1), columns] for ref in (refs.lse, refs.delta))  # [1, step_q]
    logits = dot(refs.k_rows[kv_head, keys, :], q)  # [block_k, step_q]
    slope = None
    if plan.softcap:
        capped = jnp.tanh(logits * (plan.softmax_scale / plan.softcap))
        logits, slope = capped * (plan.softcap * _LOG2E), 1 - capped * capped
    else:
        logits = logits * (plan.softmax_scale * _LOG2E)
    p = jnp.exp2(logits - lse)
    grad_p = dot(refs.v_rows[kv_head, keys, :], grad_out)
    grad_logits = p * (grad_p - delta)
    if slope is not None:
        grad_logits = grad_logits * slope
    if seen is not None:
        p, grad_logits = jnp.where(seen, p, 0.0), jnp.where(seen, grad_logits, 0.0)
    grad_logits = grad_logits.astype(q.dtype)
    if plan.needs_kv:
        refs.dv_up[kv_head, :, keys] += dot(grad_out, p.astype(q.dtype), _NT)  # [dv, block_k]
        refs.dk_up[kv_head, :, keys] += dot(q, grad_logits, _NT)  # [d, block_k]
    if plan.needs_q:
        refs.dq_up[head, :, columns] += dot(refs.k_up[kv_head, :, keys], grad_logits)


def visibility(plan: Plan, refs, length, query, row, key):
    """bool [block_k, step_q], but for the boolean mask: what all heads see.

    query, key: the first ones; row: of the first query in its block.
    """
    cols, rows = plan.tiles.block_k, plan.tiles.step_q
    key_of, query_of = (jax.lax.broadcasted_iota(jnp.int32, (cols, rows), i) for i in (0, 1))
    terms = []
    if needs_bounds(plan):
        terms.append(key_of < length - key)
    if plan.has_band and not plan.has_positions:
        terms += _band(plan, key_of - query_of, query + length - plan.shape.sq - key)
    columns = pl.ds(row, rows)

    def ids(kind: str):
        """(of the keys [block_k, step_q], of the queries [1, step_q])"""
        column = getattr(refs, f"kv_{kind}_column")[...]
        row_ref = getattr(refs, f"q_{kind}s")
        return jnp.concatenate([column] * (rows // LANES), axis=1), row_ref[0, :, columns]

    if plan.has_segments:
        other, own = ids("segment")
        terms.append(other == own)
    if plan.has_positions and plan.has_band:
        other, own = ids("position")
        terms += _band(plan, other, own)
    seen = None
    for term in terms:
        seen = term if seen is None else seen & term
    return seen


def _band(plan: Plan, position, own):
    """Whether a key at `position` is in the band of a query at `own`."""
    terms = []
    if plan.shape.right >= 0:
        terms.append(position <= own + plan.shape.right)
    if plan.shape.left >= 0:
        terms.append(position >= own - plan.shape.left)
    return terms
