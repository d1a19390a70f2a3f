"""The JAX functions behind the attention ops, compiled by the real TPU compiler."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from aot import compile_for
from tpu_kernels.kernels.flash_attention import lowering
from tpu_kernels.tpu_runtime import CHIPS

CHIP_NAMES = ("v5e", "v6e")
ALL_CHIP_NAMES = ("v5e", "v5p", "v6e", "v7x")


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def qkv(b: int, hq: int, hkv: int, sq: int, sk: int, d: int, dv: int, dtype: str = "bfloat16"):
    shapes = (b, sq, hq, d), (b, sk, hkv, d), (b, sk, hkv, dv)
    return tuple(array(*shape, dtype=dtype) for shape in shapes)


def compile_dense(
    chip_name: str,
    arrays: tuple,
    *,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    heads_first: bool = False,
    **tensors: jax.ShapeDtypeStruct,
):
    names = ("sinks", "q_segment_ids", "kv_segment_ids", "mask", "kv_lengths")

    def call(q, k, v, tensors):
        return lowering.flash_attention(
            q,
            k,
            v,
            *(tensors.get(name) for name in names),
            causal,
            *window,
            0.1,
            softcap,
            heads_first,
            chip=CHIPS[chip_name],
        )

    return compile_for(call, (*arrays, tensors), chip_name)


CASES = {
    "FA03_decode": qkv(1, 8, 2, 1, 300, 128, 128),
    "FA04_192": qkv(1, 8, 8, 192, 192, 128, 128),
    "FA04_4992": qkv(1, 8, 8, 4992, 4992, 128, 128),
    "FA04_1025": qkv(2, 8, 2, 1025, 1025, 128, 128),
    "FA05_d16": qkv(1, 4, 4, 512, 512, 16, 16),
    "FA05_d80": qkv(1, 4, 4, 512, 512, 80, 80),
    "FA05_d96": qkv(1, 4, 4, 512, 512, 96, 96),
    "FA07_d256": qkv(1, 8, 8, 512, 512, 256, 256),
    "FA34_float32": qkv(1, 4, 2, 512, 512, 128, 128, "float32"),
    "FA34_float16": qkv(1, 4, 2, 512, 512, 128, 128, "float16"),
    "mla": qkv(1, 16, 16, 512, 512, 192, 128),
}


QUICK = {"FA03_decode", "FA07_d256", "FA34_float16", "mla"}
SLOW = [pytest.mark.slow]


@pytest.mark.parametrize("chip_name", CHIP_NAMES)
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in CASES]
)
def test_compiles(name, chip_name):
    compile_dense(chip_name, CASES[name])


@pytest.mark.parametrize("chip_name", CHIP_NAMES)
def test_long_images_need_no_flag(chip_name):  # FA35
    compile_dense(chip_name, qkv(1, 16, 16, 25344, 25344, 80, 80), causal=False)


@pytest.mark.slow
@pytest.mark.parametrize("chip_name", CHIP_NAMES)
def test_long_causal_sequence_needs_no_flag(chip_name):  # FA35
    compile_dense(chip_name, qkv(1, 8, 8, 32768, 32768, 128, 128))


@pytest.mark.slow
@pytest.mark.parametrize("chip_name", ALL_CHIP_NAMES)
def test_longest_sequence_needs_no_flag(chip_name):
    compile_dense(chip_name, qkv(1, 8, 1, 131072, 131072, 128, 128))


@pytest.mark.parametrize("chip_name", CHIP_NAMES)
def test_segment_ids_of_a_million_tokens(chip_name):  # FA41
    """They compile, or are refused with the limit; never a dump of the compiler."""
    length = 1 << 20
    ids = {
        "q_segment_ids": array(1, length, dtype="int32"),
        "kv_segment_ids": array(1, length, dtype="int32"),
    }
    try:
        compile_dense(chip_name, qkv(1, 1, 1, length, length, 128, 128), **ids)
    except ValueError as error:
        assert "segment_ids" in str(error) and str(length) in str(error)


@pytest.mark.parametrize(
    "chip_name", ["v6e", *(pytest.param(x, marks=SLOW) for x in ("v5e", "v5p", "v7x"))]
)
def test_every_mask_at_once(chip_name):
    tensors = {
        "sinks": array(4),
        "q_segment_ids": array(2, 300, dtype="int32"),
        "kv_segment_ids": array(2, 500, dtype="int32"),
        "mask": array(2, 1, 1, 500, dtype="bool"),
        "kv_lengths": array(2, dtype="int32"),
    }
    arrays = qkv(2, 4, 2, 300, 500, 64, 64)
    compile_dense(chip_name, arrays, window=(100, 7), softcap=30.0, **tensors)


@pytest.mark.parametrize("chip_name", CHIP_NAMES)
@pytest.mark.parametrize("sq", [1, pytest.param(256, marks=SLOW)])
def test_heads_first_with_a_static_cache(sq, chip_name):
    arrays = tuple(
        array(x.shape[0], x.shape[2], x.shape[1], x.shape[3])
        for x in qkv(4, 32, 8, sq, 2048, 128, 128)
    )
    tensors = {"kv_lengths": array(4, dtype="int32")}
    compiled = compile_dense(chip_name, arrays, heads_first=True, **tensors)
    if sq == 1:  # the cache is read where it lies
        assert compiled.memory_analysis().temp_size_in_bytes < arrays[1].size


@pytest.mark.parametrize(
    "chip_name", ["v6e", *(pytest.param(x, marks=SLOW) for x in ("v5e", "v5p", "v7x"))]
)
@pytest.mark.parametrize("heads", [(64, 8), pytest.param((20, 4), marks=SLOW)])
def test_narrow_window_with_sinks(heads, chip_name):
    hq, hkv = heads
    arrays = qkv(2, hq, hkv, 1000, 1100, 64, 64)
    tensors = {"sinks": array(hq, dtype="float32"), "kv_lengths": array(2, dtype="int32")}
    compile_dense(chip_name, arrays, window=(127, 0), **tensors)


@pytest.mark.parametrize(
    "chip_name", ["v5e", *(pytest.param(x, marks=SLOW) for x in ("v6e", "v5p", "v7x"))]
)
@pytest.mark.parametrize(
    ("d", "window"), [(128, (-1, -1)), pytest.param(256, (1023, 0), marks=SLOW)]
)
def test_documents_and_medium_windows(d, window, chip_name):
    ids = array(1, 2000, dtype="int32")
    tensors = {} if window[0] >= 0 else {"q_segment_ids": ids, "kv_segment_ids": ids}
    compile_dense(chip_name, qkv(1, 32, 8, 2000, 2000, d, d), window=window, **tensors)


@pytest.mark.parametrize("chip_name", ["v5e", pytest.param("v6e", marks=SLOW)])
def test_packed(chip_name):
    call = functools.partial(lowering.flash_attention_packed, chip=CHIPS[chip_name])
    q, k, v = (array(*x.shape[1:]) for x in qkv(1, 8, 2, 1000, 1100, 128, 128))
    cu_seqlens = array(9, dtype="int32")

    def causal(q, k, v, sinks, cu_q, cu_k):
        return call(q, k, v, sinks, cu_q, cu_k, True, -1, -1, 0.1, 0.0)

    compile_for(causal, (q, k, v, array(8), cu_seqlens, cu_seqlens), chip_name)
