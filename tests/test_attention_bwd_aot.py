"""The backward kernel compiled by the real TPU compiler, and its tiles on every chip."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from aot import compile_for
from tpu_kernels.kernels.flash_attention import lowering, tiling_bwd
from tpu_kernels.kernels.flash_attention.tiling import Shape
from tpu_kernels.tpu_runtime import CHIPS

CHIP_NAMES = ("v5e", "v5p", "v6e", "v7x")
MIB = 1 << 20
SLOW = [pytest.mark.slow]


def array(*shape: int, dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def compile_backward(
    chip_name: str,
    shape: tuple[int, ...],  # b, hq, hkv, sq, sk, d, dv
    *,
    dtype: str = "bfloat16",
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    needs: tuple[bool, bool] = (True, True),
    **tensors: jax.ShapeDtypeStruct,
) -> None:
    b, hq, hkv, sq, sk, d, dv = shape
    names = ("sinks", "q_segment_ids", "kv_segment_ids", "mask", "kv_lengths")
    out = array(b, sq, hq, dv, dtype=dtype)
    arrays = (
        out,
        array(b, sq, hq, d, dtype=dtype),
        array(b, sk, hkv, d, dtype=dtype),
        array(b, sk, hkv, dv, dtype=dtype),
        out,
        array(b, hq, sq, dtype="float32"),
    )

    def call(arrays, tensors):
        return lowering.flash_attention_backward(
            *arrays,
            *(tensors.get(name) for name in names),
            causal,
            *window,
            0.1,
            softcap,
            False,
            *needs,
            "sinks" in tensors,
            chip=CHIPS[chip_name],
        )

    compile_for(call, (arrays, tensors), chip_name)


CASES = {
    "d16": (1, 4, 4, 512, 512, 16, 16),
    "d80": (1, 4, 4, 500, 500, 80, 80),
    "d96_one_row": (1, 2, 1, 1, 300, 96, 96),
    "d256": (1, 8, 8, 600, 600, 256, 256),
    "llama": (1, 32, 8, 1025, 1025, 128, 128),
    "gemma": (2, 8, 1, 512, 512, 256, 256),
    "mla": (1, 16, 16, 512, 512, 192, 128),
    "qwen": (1, 28, 4, 2048, 2048, 128, 128),
    "sd35": (1, 24, 24, 1178, 1178, 64, 64),
    "long": (1, 8, 8, 32768, 32768, 128, 128),
    "long_wide": (1, 8, 8, 32768, 32768, 256, 256),
    "long_narrow": (1, 8, 2, 32768, 32768, 64, 64),
    "long_llama": (1, 32, 8, 32768, 32768, 128, 128),
}
QUICK = {("d80", "v5e"), ("mla", "v6e"), ("long_wide", "v7x"), ("long", "v5e"), ("llama", "v5p")}


@pytest.mark.parametrize(
    ("name", "chip_name"),
    [
        (name, chip) if (name, chip) in QUICK else pytest.param(name, chip, marks=SLOW)
        for name in CASES
        for chip in CHIP_NAMES
    ],
)
def test_compiles(name, chip_name):
    compile_backward(chip_name, CASES[name])


@pytest.mark.parametrize("chip_name", ["v6e", pytest.param("v5e", marks=SLOW)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes(dtype, chip_name):
    compile_backward(chip_name, (1, 8, 2, 600, 600, 128, 128), dtype=dtype)


EVERY_MASK = {
    "sinks": array(8),
    "q_segment_ids": array(2, 300, dtype="int32"),
    "kv_segment_ids": array(2, 600, dtype="int32"),
    "mask": array(2, 8, 1, 600, dtype="bool"),
    "kv_lengths": array(2, dtype="int32"),
}


@pytest.mark.parametrize("d", [64, pytest.param(128, marks=SLOW)])
@pytest.mark.parametrize(
    "chip_name", ["v6e", *(pytest.param(x, marks=SLOW) for x in ("v5e", "v5p", "v7x"))]
)
def test_every_mask_at_once(chip_name, d):
    shape = (2, 8, 2, 300, 600, d, d)
    compile_backward(chip_name, shape, window=(100, 7), softcap=30.0, **EVERY_MASK)


@pytest.mark.slow
@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_only_what_is_needed(needs):
    compile_backward("v6e", (1, 8, 2, 600, 600, 128, 128), needs=needs)


@pytest.mark.slow
@pytest.mark.parametrize("chip_name", CHIP_NAMES)
def test_long_packed_documents(chip_name):
    t, d = 32768, 128

    def call(arrays, sinks, cu_q, cu_k):
        return lowering.flash_attention_packed_backward(
            *arrays,
            sinks,
            cu_q,
            cu_k,
            True,
            -1,
            -1,
            0.1,
            0.0,
            True,
            True,
            True,
            chip=CHIPS[chip_name],
        )

    arrays = (
        array(t, 8, d),
        array(t, 8, d),
        array(t, 2, d),
        array(t, 2, d),
        array(t, 8, d),
        array(8, t, dtype="float32"),
    )
    cu_seqlens = array(9, dtype="int32")
    compile_for(call, (arrays, array(8), cu_seqlens, cu_seqlens), chip_name)


@pytest.mark.parametrize("chip_name", CHIP_NAMES)
@pytest.mark.parametrize("dtype_bytes", [2, 4])
@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize(("hq", "hkv"), [(32, 8), (8, 8), (64, 1), (3, 3)])
def test_tiles_up_to_32k_fit(hq, hkv, width, dtype_bytes, chip_name):
    for length in (1, 129, 4429, 32768):
        shape = Shape(
            sq=length, sk=length, hq=hq, hkv=hkv, d=width, dv=width, dtype_bytes=dtype_bytes
        )
        tiles = tiling_bwd.choose(shape, CHIPS[chip_name])
        assert tiles.vmem_bytes <= CHIPS[chip_name].vmem_bytes * 8 // 10
        assert hq % tiles.heads == 0 and hkv % tiles.kv_heads == 0
        assert tiles.heads * hkv >= hq * tiles.kv_heads or tiles.kv_heads == 1


def test_keys_of_a_llama_layer_stay_where_they_are():
    """No transposition, no chunks: what makes the backward of 8192 tokens fast."""
    shape = Shape(sq=8192, sk=8192, hq=32, hkv=8, d=128, dv=128, dtype_bytes=2, right=0)
    for chip in ("v5e", "v6e", "v7x"):
        tiles = tiling_bwd.choose(shape, CHIPS[chip])
        assert tiles.chunk == 8192 and tiles.q_form == "bshd"


def test_what_fits_on_no_chip_is_refused():
    shape = Shape(sq=512, sk=1 << 22, hq=8, hkv=8, d=128, dv=128, dtype_bytes=2, has_ids=True)
    with pytest.raises(NotImplementedError, match="split the sequence"):
        tiling_bwd.choose(shape, CHIPS["v7x"])
