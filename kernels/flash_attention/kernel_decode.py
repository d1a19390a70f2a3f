"""Forward attention of a few queries against a dense cache: K and V pass once, at memory speed."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, SUBLANES, Chip, round_up
from . import tiling
from .stream_decode import DecodePlan, run_entry
from .tiling import DecodeTiles

_LN2 = math.log(2.0)


def _rows_of(x, hkv: int, groups: int, rows: int):  # [b, sq, hq, d]
    """[b, groups, rows, d], rows in the order (kv head, its query head, query), padded."""
    b, sq, hq, d = x.shape
    x = x.reshape(b, sq, groups, hq // groups, d).transpose(0, 2, 3, 1, 4)
    x = x.reshape(b, groups, -1, d)
    return jnp.pad(x, ((0, 0), (0, 0), (0, rows - x.shape[2]), (0, 0)))


def _combined_mask(sq, hq, fold, groups, mask, ids, num_columns):
    """int8 [mb, 1 or groups, mask rows, columns] of the boolean mask and of ids; None without."""
    for q_ids, kv_ids, test in ids:
        if q_ids is not None:
            seen = test(q_ids[:, None, :, None], kv_ids[:, None, None, :])
            mask = seen if mask is None else mask & seen
    if mask is None:
        return None
    mb, mh, _, sk = mask.shape
    if mh == 1 and sq == 1:
        mask = mask.reshape(mb, 1, 1, sk)
    else:
        mask = jnp.broadcast_to(mask, (mb, hq, sq, sk)).reshape(mb, groups, -1, sk)
    mask = jnp.repeat(mask.astype(jnp.int8), fold, axis=3)
    return jnp.pad(mask, ((0, 0), (0, 0), (0, 0), (0, num_columns - mask.shape[3])))


def _cache_form(hkv: int, d: int, heads_first: bool) -> str:
    """How XLA stores a cache of which [b, sk, hkv, d] or [b, hkv, sk, d] is the shape."""
    if heads_first:
        return "bhds" if d % LANES else "bhsd"
    return tiling.storage(hkv, d)


def is_decode(q: jax.Array, k: jax.Array, v: jax.Array, heads_first: bool = False) -> bool:
    """Whether `flash_attention_decode` takes these shapes."""
    sq, hq, d = q.shape[1:]
    hkv, dv = k.shape[1 if heads_first else 2], v.shape[3]
    same = _cache_form(hkv, d, heads_first) == _cache_form(hkv, dv, heads_first)
    return sq <= tiling.DECODE_MAX_SQ and hq * sq <= tiling.DECODE_MAX_ROWS and same


def _id_tests(given: dict, left: int, right: int) -> list:
    """(ids of queries, of keys, test) of segments and explicit positions."""

    def in_band(query, key):
        seen = True
        if right >= 0:
            seen = key <= query + right
        return seen & (key >= query - left) if left >= 0 else seen

    tests = [(given["q_segment_ids"], given["kv_segment_ids"], jnp.equal)]
    if left >= 0 or right >= 0:
        tests.append((given["q_position_ids"], given["kv_position_ids"], in_band))
    return tests


def _parts_of_heads(given: dict, b: int, groups: int, chip: Chip) -> int:
    """Entries of the batch are what cores share; too few, and each is cut into this many."""
    options = ("mask", "sinks", "q_segment_ids", "q_position_ids")
    if b % chip.num_cores == 0 or any(given[name] is not None for name in options):
        return 1
    return chip.num_cores if groups % chip.num_cores == 0 else 1


def flash_attention_decode(
    q: jax.Array,  # [b, sq, hq, d]
    k: jax.Array,  # [b, sk, hkv, d], [b, hkv, sk, d] if heads_first
    v: jax.Array,  # [b, sk, hkv, dv], [b, hkv, sk, dv]
    given: dict[str, jax.Array | None],
    band: tuple[int, int],
    scale: float,
    softcap: float,
    chip: Chip,
    interpret: bool | pltpu.InterpretParams = False,
    heads_first: bool = False,
    tiles: DecodeTiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """As `kernel.flash_attention_fwd`, for shapes that `is_decode` names.

    given: sinks, ids, mask and kv_lengths by name; band: (left, right) with causality in it.
    """
    (b, sq, hq, d), dv = q.shape, v.shape[3]
    hkv, sk = k.shape[1:3] if heads_first else k.shape[2:0:-1]
    form = _cache_form(hkv, d, heads_first)
    fold, groups = (hkv, 1) if form == "bshd" else (1, hkv)
    num_rows = hq * sq // groups
    rows = round_up(num_rows, 2 * SUBLANES)
    parts = _parts_of_heads(given, b, groups, chip)
    if tiles is None:
        heads = hkv // parts
        tiles = tiling.choose_decode(
            rows, groups // parts, heads, sk, d, dv, q.dtype.itemsize, chip
        )
    left, right = band
    num_columns = round_up(sk, tiles.block_k) * fold
    tests = _id_tests(given, left, right)
    mask = _combined_mask(sq, hq, fold, groups, given["mask"], tests, num_columns)
    if given["q_position_ids"] is not None:
        left = right = -1
    if right > 0:
        right = -1 if right >= sq - 1 else right
    log2e = 1 / _LN2
    plan = DecodePlan(
        b * parts,
        groups // parts,
        rows,
        hq // hkv * sq,
        num_rows,
        sk * fold,
        fold,
        d,
        dv,
        sq,
        left,
        right,
        form == "bhds",
        scale / softcap if softcap else scale * log2e,
        softcap * log2e,
        given["sinks"] is not None,
        (0, 0) if mask is None else (mask.shape[0], mask.shape[2]),
        tiles,
        min(chip.num_cores, b * parts),  # a core without an entry would write an output block too
        jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else jax.lax.Precision.DEFAULT,
        bool(interpret),
    )
    lengths, sinks = given["kv_lengths"], given["sinks"]
    arrays = {
        "q": _rows_of(q, hkv, groups, rows),
        "k": _stored_cache(k, form, heads_first),
        "v": _stored_cache(v, form, heads_first),
    }
    lengths = jnp.full((b,), sk, jnp.int32) if lengths is None else lengths
    inputs = {"lengths": jnp.repeat(lengths, parts)} | {
        name: x.reshape(b * parts, groups // parts, *x.shape[2:]) for name, x in arrays.items()
    }
    if sinks is not None:
        sinks = jnp.broadcast_to((sinks * log2e)[None, None, :, None], (1, sq, hq, LANES))
        inputs["sinks"] = _rows_of(sinks.astype(jnp.float32), hkv, groups, rows)[0]
    if mask is not None:
        short = -mask.shape[2] % rows if mask.shape[2] > 1 else 0
        inputs["mask"] = jnp.pad(mask, ((0, 0), (0, 0), (0, short), (0, 0)))
    out, lse = (x[:, :, :num_rows] for x in _call(plan, inputs, interpret, chip))
    lse = lse.reshape(b, hq, sq, LANES)[..., 0]
    return out.reshape(b, hq, sq, dv).transpose(0, 2, 1, 3), lse


def _stored_cache(x: jax.Array, form: str, heads_first: bool) -> jax.Array:
    """[b, groups, columns, width], or [b, groups, width, columns] in "bhds"; a bitcast."""
    if form == "bshd":
        b, sk, hkv, width = x.shape
        return x.reshape(b, 1, sk * hkv, width)
    x = x if heads_first else x.swapaxes(1, 2)
    return x.swapaxes(2, 3) if form == "bhds" else x


def _call(plan: DecodePlan, inputs: dict, interpret, chip: Chip):
    tiles, dtype = plan.tiles, inputs["q"].dtype
    slots = tiles.slots + 1

    def buffer(width):
        size = (width, plan.tile_columns) if plan.feature_major else (plan.tile_columns, width)
        return pltpu.VMEM((slots, plan.groups, *size), dtype)

    wide = (plan.groups, plan.rows, LANES)
    scratch = {
        "k_buf": buffer(plan.d),
        "v_buf": buffer(plan.dv),
        "kv_sem": pltpu.SemaphoreType.DMA((2, slots)),
        "acc": pltpu.VMEM((plan.groups, plan.rows, plan.dv), jnp.float32),
        "l": pltpu.VMEM(wide, jnp.float32),
        "m": pltpu.VMEM(wide, jnp.float32),
        "stream": pltpu.SMEM((4,), jnp.int32),
    }
    if plan.fold > 1:
        scratch["match"] = pltpu.VMEM((plan.rows, math.lcm(plan.fold, LANES)), jnp.int32)
    if "mask" in inputs:
        shape = inputs["mask"].shape
        scratch["mask_buf"] = pltpu.VMEM((slots, *shape[1:3], plan.tile_columns), jnp.int8)
        scratch["mask_sem"] = pltpu.SemaphoreType.DMA((slots,))
    smem, hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)

    def own(width):
        def place(core, entry):
            at = jnp.minimum(core * plan.core_batch + entry, plan.b - 1)
            return jax.lax.div(at, plan.io_batch), 0, 0, 0

        return pl.BlockSpec((plan.io_batch, plan.groups, plan.rows, width), place)

    specs = {
        "lengths": smem,
        "q": own(plan.d),
        "k": hbm,
        "v": hbm,
        "mask": hbm,
        "sinks": pl.BlockSpec(memory_space=pltpu.VMEM),
    }
    name = {"bfloat16": "bf16", "float32": "f32"}[dtype.name]
    out_rows = (plan.b, plan.groups, plan.rows)
    return pl.pallas_call(
        functools.partial(run_entry, plan=plan, fields=(*inputs, "out", "lse", *scratch)),
        out_shape=(
            jax.ShapeDtypeStruct((*out_rows, plan.dv), dtype),
            jax.ShapeDtypeStruct((*out_rows, LANES), jnp.float32),
        ),
        grid=(plan.num_cores, plan.core_batch),
        in_specs=[specs[key] for key in inputs],
        out_specs=(own(plan.dv), own(LANES)),
        scratch_shapes=list(scratch.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=chip.vmem_bytes * 9 // 10,
        ),
        interpret=interpret,
        name=f"flash_attention_decode_{name}_k{tiles.block_k}_s{tiles.step_k}",
    )(*inputs.values())
