"""What a user would run instead: public TPU kernels and plain jax.numpy, as cases.

`peers_of(case, chip)` -> {name: (fn, args)} with the work of `case`. jnp_* is what XLA fuses of the
plain expression, tokamax_v2 the grouped matmul "mosaic_tpu_v2" of tokamax, hub_tokamax_v2 an
experts layer around it as the public Hub kernel has it, jax_splash and tokamax_splash splash
attention with the tiles block_q-block_kv-compute. Attention peers take [b, h, s, d] arrays, as they
want them, so no transposition is held against them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

F32 = jnp.float32
Peers = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]
partial = functools.partial


def peers_of(counts: dict[str, Any], args: tuple[Any, ...], chip: str) -> Peers:
    make = {
        "ragged_dot": _ragged_dot,
        "weight_grad": _weight_grad,
        "moe_experts": _experts,
        "flash_attention": _attention,
        "flash_attention_backward": _attention_backward,
        "rms_norm": _norm,
        "rms_norm_backward": _norm_backward,
        "add_rms_norm": _add_norm,
        "rms_norm_gated": _gated_norm,
        "apply_rotary": _rotary,
        "qk_norm_rotary": _rotary,
    }.get(counts.get("op", ""))
    return make(counts, args, chip) if make else {}


# --- grouped matmul -----------------------------------------------------------------------------


def ragged_dot(lhs, rhs, group_sizes, *, transpose_rhs: bool):
    import tokamax

    contracted = 2 if transpose_rhs else 1
    numbers = jax.lax.RaggedDotDimensionNumbers((([1], [contracted]), ([], [])), [0], [0])
    return tokamax.ragged_dot_general(
        lhs, rhs, group_sizes, numbers, implementation="mosaic_tpu_v2"
    )


def ragged_dot_tiled(lhs, rhs, group_sizes, *, transpose_rhs: bool, tile_m: int):
    """With row tiles of the groups' size, which tokamax does not choose by itself."""
    from tokamax._src.ops.gmm_v2 import gmm_v2

    n, k = rhs.shape[1:] if transpose_rhs else rhs.shape[:0:-1]
    tiles = gmm_v2.TileSizes(tile_m=tile_m, tile_k=k, tile_n=n, bucket_base=tile_m)
    return gmm_v2.gmm_v2(
        lhs,
        rhs,
        group_sizes,
        tile_info=tiles,
        maybe_quantize_lhs=False,
        zero_initialize=False,
        transpose_rhs=transpose_rhs,
        preferred_element_type=lhs.dtype,
    )


def _ragged_dot(counts, args, chip) -> Peers:
    transpose = counts["transpose_rhs"]
    peers: Peers = {"tokamax_v2": (partial(ragged_dot, transpose_rhs=transpose), args)}
    (m, k), g = args[0].shape, args[1].shape[0]
    if m // g == 256 and k % 128 == 0:
        tiled = partial(ragged_dot_tiled, transpose_rhs=transpose, tile_m=256)
        peers["tokamax_v2_256"] = (tiled, args)
    return peers


def weight_grad(grad, lhs, group_sizes):
    from tokamax._src.ops.gmm_v2 import tgmm_v2

    num_groups = group_sizes.shape[0]
    return tgmm_v2.tgmm_v2(grad, lhs, group_sizes, num_groups, preferred_element_type=lhs.dtype)


def _weight_grad(counts, args, chip) -> Peers:
    return {"tokamax_v2": (weight_grad, args)}


# --- experts layer ------------------------------------------------------------------------------


def experts_sorted(x, index, weights, gate_up, down):
    """Rows sorted by expert, two grouped matmuls around the gate, rows brought back and summed."""
    num_experts, top_k = down.shape[0], index.shape[1]
    flat = index.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.sum(flat[:, None] == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    grouped = partial(ragged_dot, transpose_rhs=True)
    gate, up = jnp.split(grouped(x[order // top_k], gate_up, sizes), 2, axis=-1)
    rows = grouped(jax.nn.silu(gate.astype(F32)).astype(x.dtype) * up, down, sizes)
    is_local = (flat[order] < num_experts)[:, None]
    rows = jnp.where(is_local, rows, 0) * weights.reshape(-1)[order][:, None]
    rows = rows[jnp.argsort(order)].astype(F32)
    return rows.reshape(x.shape[0], top_k, -1).sum(axis=1).astype(x.dtype)


def experts_dense(x, index, weights, gate_up, down):
    """Every token through every expert, weighted zero where it was not routed."""
    ids = jnp.arange(down.shape[0])
    route = jnp.sum((index[:, :, None] == ids) * weights[:, :, None], axis=1)  # [t, e]
    hidden = jnp.einsum("th,enh->etn", x, gate_up, preferred_element_type=F32)
    gate, up = jnp.split(hidden, 2, axis=-1)
    rows = (jax.nn.silu(gate) * up * route.T[:, :, None].astype(F32)).astype(x.dtype)
    return jnp.einsum("eti,ehi->th", rows, down, preferred_element_type=F32).astype(x.dtype)


def _experts(counts, args, chip) -> Peers:
    peers: Peers = {"hub_tokamax_v2": (experts_sorted, args)}
    if args[0].shape[0] * args[4].shape[0] <= 16384:  # beyond that most of the work is wasted
        peers["jnp_dense"] = (experts_dense, args)
    return peers


# --- attention ----------------------------------------------------------------------------------


def splash(q, k, v, *masks, library: str, tiles, causal: bool, window: int, names, scheduler=False):
    """q [1, hq, s, d], k and v [1, hkv, s, d]; lengths padded to whole tiles, as both demand.

    The backward has the same tiles.
    """
    backward = dict(
        zip(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), tiles, strict=True)
    )
    if library == "tokamax":
        from tokamax._src.ops.experimental.tpu.splash_attention import (
            base,
            splash_attention_kernel,
            splash_attention_mask,
        )

        segment_ids = base.SegmentIds
    else:
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel,
            splash_attention_mask,
        )

        segment_ids = splash_attention_kernel.SegmentIds
    given = dict(zip(names, masks, strict=True))
    length = q.shape[2]
    padded = -length % max(tiles[:2]) + length
    ids = given.get("segment_ids")
    ids = None if ids is None else jnp.asarray(ids)[0]
    if padded != length:
        ids = jnp.asarray(np.arange(padded) >= length, jnp.int32)
        q, k, v = (jnp.pad(x, [(0, 0), (0, 0), (0, padded - length), (0, 0)]) for x in (q, k, v))
    shape = (padded, padded)
    if window >= 0:
        mask = splash_attention_mask.LocalMask(shape, (window, 0), 0)
    elif causal:
        mask = splash_attention_mask.CausalMask(shape)
    else:
        mask = splash_attention_mask.FullMask(shape)
    if library == "tokamax":
        config = splash_attention_kernel.SplashConfig(
            *tiles,
            **backward,
            use_experimental_scheduler=scheduler,
            fuse_reciprocal=True,
            dq_reduction_steps=3 if padded // tiles[1] > 3 else None,
        )
        kernel = splash_attention_kernel.make_splash_mha_single_device(mask, config=config)
    else:
        mask = splash_attention_mask.MultiHeadMask([mask] * q.shape[1])
        blocks = splash_attention_kernel.BlockSizes(*tiles, **backward, use_fused_bwd_kernel=True)
        kernel = splash_attention_kernel.make_splash_mha_single_device(mask, block_sizes=blocks)
    ids = None if ids is None else segment_ids(ids, ids)
    q = q * jnp.asarray(q.shape[-1] ** -0.5, q.dtype)
    out = kernel(q[0], k[0], v[0], segment_ids=ids, sinks=given.get("sinks"))
    return out[None, :, :length]


def decode(q, k, v, *masks):
    """One query a head: q [b, hq, 1, d], k and v [b, hkv, s, d], all of it visible."""
    grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
    logits = jnp.einsum("bkgd,bksd->bkgs", grouped, k, preferred_element_type=F32)
    shares = jax.nn.softmax(logits * q.shape[-1] ** -0.5, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgs,bksd->bkgd", shares, v).reshape(q.shape)


def _attention(counts, args, chip) -> Peers:
    q, k, v, *masks = args
    swapped = [
        jax.ShapeDtypeStruct((x.shape[0], x.shape[2], x.shape[1], x.shape[3]), x.dtype)
        for x in (q, k, v)
    ]
    if q.shape[1] == 1:
        return {"jnp_einsum": (decode, (*swapped, *masks))}
    if q.shape[0] != 1 or q.shape[1] != k.shape[1] or "kv_lengths" in counts["masks"]:
        return {}
    names = tuple(counts["masks"])
    static = {"causal": counts["causal"], "window": counts["window"], "names": names}
    length = q.shape[1]
    if length % 512:
        choices = [(512, 1536, 512), (1536, 1536, 512)]
    elif counts["window"] >= 0 or "segment_ids" in names:
        choices = [(512, 512, 512), (1024, 1024, 512)]
    else:
        choices = [(1024, 1024, 512)]
    peers: Peers = {}
    for tiles in choices:
        label = "-".join(map(str, tiles))
        for library in ("jax", "tokamax"):
            # tokamax's own scheduler flag wins on v6e and loses on v5e.
            scheduler = library == "tokamax" and chip == "v6e"
            fn = partial(splash, library=library, tiles=tiles, scheduler=scheduler, **static)
            peers[f"{library}_splash_{label}"] = (fn, (*swapped, *masks))
    return peers


def with_backward(q, k, v, grad_out, **static):
    out, backward = jax.vjp(partial(splash, **static), q, k, v)
    return out, *backward(grad_out)


def _attention_backward(counts, args, chip) -> Peers:
    """Of forward and backward together; nobody offers the backward alone."""
    if len(args) != 4:
        return {}
    forward = _attention(counts, args[:3], chip)
    grad = jax.ShapeDtypeStruct(tuple(args[3].shape[axis] for axis in (0, 2, 1, 3)), args[3].dtype)
    return {
        name: (partial(with_backward, **fn.keywords), (*arrays, grad))
        for name, (fn, arrays) in forward.items()
    }


# --- norms --------------------------------------------------------------------------------------


def norm_llama(x, weight):
    wide = x.astype(F32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype) * weight


def norm_f32(x, weight):
    """Rounded once, at the end."""
    wide = x.astype(F32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * scale * weight.astype(F32)).astype(x.dtype)


def norm_closed_form_backward(grad, x, weight):
    """Two sums over rows and one over columns, instead of differentiating step by step."""
    wide, upstream = x.astype(F32), grad.astype(F32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    scaled = upstream * weight.astype(F32)
    mean = jnp.mean(scaled * wide, -1, keepdims=True)
    grad_x = scale * (scaled - wide * (scale * scale * mean))
    grad_weight = jnp.sum(upstream * (wide * scale), 0)
    return grad_x.astype(x.dtype), grad_weight.astype(weight.dtype)


NORMS = {"jnp_llama": norm_llama, "jnp_f32": norm_f32}


def _norm(counts, args, chip) -> Peers:
    return {name: (norm, args) for name, norm in NORMS.items()}


def _norm_backward(counts, args, chip) -> Peers:
    def derived(norm):
        return lambda grad, x, weight: jax.vjp(norm, x, weight)[1](grad)

    peers = {name: (derived(norm), args) for name, norm in NORMS.items()}
    return {**peers, "jnp_closed_form": (norm_closed_form_backward, args)}


def _add_norm(counts, args, chip) -> Peers:
    def added(norm):
        return lambda x, residual, weight: (norm(x + residual, weight), x + residual)

    return {name: (added(norm), args) for name, norm in NORMS.items()}


def _gated_norm(counts, args, chip) -> Peers:
    def gated(norm):
        def run(x, gate, weight):
            return (norm(x, weight).astype(F32) * jax.nn.silu(gate.astype(F32))).astype(x.dtype)

        return run

    return {name: (gated(norm), args) for name, norm in NORMS.items()}


# --- rotary -------------------------------------------------------------------------------------


def rotate_split(x, cos, sin, interleaved):
    """float32 arithmetic on the two halves (or on even and odd features)."""
    width = cos.shape[-1]
    wide, cos, sin = x[..., :width].astype(F32), cos.astype(F32), sin.astype(F32)
    if interleaved:
        partner = jnp.stack([-wide[..., 1::2], wide[..., ::2]], -1).reshape(wide.shape)
    else:
        a, b = jnp.split(wide, 2, -1)
        partner = jnp.concatenate([-b, a], -1)
    turned = (wide * cos + partner * sin).astype(x.dtype)
    return jnp.concatenate([turned, x[..., width:]], -1)


def rotate_hf(x, cos, sin, interleaved):
    """As models write it, in the dtype of x."""
    width = cos.shape[-1]
    head = x[..., :width]
    if interleaved:
        even = jnp.arange(width) % 2 == 0
        partner = jnp.where(even, -jnp.roll(head, -1, -1), jnp.roll(head, 1, -1))
    else:
        a, b = jnp.split(head, 2, -1)
        partner = jnp.concatenate([-b, a], -1)
    return jnp.concatenate([head * cos + partner * sin, x[..., width:]], -1)


def rotate_matmul(x, cos, sin, interleaved):
    """The partner of every feature by a signed permutation matrix, which bfloat16 holds exactly."""
    d, width = x.shape[-1], cos.shape[-1]
    step = 1 if interleaved else width // 2
    swap = np.zeros((d, d), np.float32)
    for i in range(0, width, 2) if interleaved else range(width // 2):
        swap[i + step, i], swap[i, i + step] = -1, 1
    pad = [(0, 0)] * (cos.ndim - 1) + [(0, d - width)]
    cos, sin = jnp.pad(cos, pad, constant_values=1), jnp.pad(sin, pad)
    return (x * cos + (x @ jnp.asarray(swap, x.dtype)) * sin).astype(x.dtype)


ROTATIONS = {"jnp_hf": rotate_hf, "jnp_split_f32": rotate_split, "jnp_matmul": rotate_matmul}


def rotary(q, k, cos, sin, *weights, rotate, axis: int, interleaved: bool):
    if weights:
        q, k = norm_llama(q, weights[0]), norm_llama(k, weights[1])
    cos, sin = jnp.expand_dims(cos, axis), jnp.expand_dims(sin, axis)
    return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)


def _rotary(counts, args, chip) -> Peers:
    static = {"axis": counts["axis"], "interleaved": counts["interleaved"]}
    return {
        name: (partial(rotary, rotate=rotate, **static), args) for name, rotate in ROTATIONS.items()
    }
