"""The Pallas kernels of rmsnorm: in the interpreter, their tiles, and through the TPU compiler."""

from __future__ import annotations

import aot
import jax
import jax.numpy as jnp
import pytest
import torch
from interpret import run_kernel
from test_rmsnorm import assert_near, make, unit_of
from tpu_kernels.kernels.rmsnorm import lowering, reference, rows, tiling
from tpu_kernels.tpu_runtime import CHIPS, SUBLANES

CHIP_NAMES = ["v5e", "v6e", "v5p", "v7x"]
STATICS = {"llama": (1e-6, 0.0, "llama"), "gemma": (1e-5, 1.0, "gemma"), "none": (1e-6, 1, "none")}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def assert_as_reference(name: str, *args, chip: str = "v5e") -> None:
    """The kernel against the reference in float64, both with the same arguments."""
    found = run_kernel(getattr(lowering, name), *args, chip=chip)
    wide = (arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args)
    exact = getattr(reference, name)(*wide)
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    low = getattr(reference, name)(*args)
    pairs = (
        zip(found, exact, low, strict=True) if isinstance(found, tuple) else [(found, exact, low)]
    )
    for result, wanted, same in pairs:
        assert result.shape == same.shape and result.dtype == same.dtype
        assert_near(result, wanted, 10, unit_of(*(t.dtype for t in tensors)))


FORWARD = [
    ((3, 5, 80), BF16, BF16, "llama"),
    ((7, 100), BF16, F32, "gemma"),
    ((64,), F32, F32, "llama"),
    ((2, 3, 4, 96), BF16, BF16, "none"),
    ((40, 1), F32, None, "llama"),
    ((100, 300), BF16, None, "gemma"),
    ((5, 130), F16, F16, "llama"),
]


@pytest.mark.parametrize(("shape", "dtype", "weight_dtype", "casting"), FORWARD)
def test_forward_in_the_interpreter(shape, dtype, weight_dtype, casting):  # RN01, RN07, RN08
    x, gate = make(*shape, dtype=dtype), make(*shape, dtype=dtype, seed=1)
    weight = None if weight_dtype is None else make(shape[-1], dtype=weight_dtype)
    eps, offset, _ = STATICS[casting]
    assert_as_reference("rms_norm", x, weight, *STATICS[casting])
    assert_as_reference("add_rms_norm", x, gate, weight, *STATICS[casting])
    order = {"llama": ("silu", False), "gemma": ("sigmoid", False), "none": ("silu", True)}[casting]
    assert_as_reference("rms_norm_gated", x, gate, weight, eps, *order, offset, casting)


@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_in_the_interpreter(gate_first):
    x, gate, grad = (make(20, 130, seed=i) for i in range(3))
    weight = make(130)
    static = (1e-6, "silu" if gate_first else "sigmoid", gate_first, 1.0, "gemma")
    assert_as_reference("rms_norm_gated", x, gate, weight, *static)
    for needs in ((True, True, True), (False, True, False)):
        assert_as_reference("rms_norm_gated_backward", grad, x, gate, weight, *static, *needs)


BACKWARD = [
    ((3, 5, 80), BF16, BF16, "llama", "v5e"),
    ((100, 200), BF16, F32, "gemma", "v5e"),
    ((9,), F32, F32, "llama", "v5e"),
    ((70, 128), F32, F32, "none", "v5p"),  # two cores, the last block half empty
    ((5, 130), F16, F16, "llama", "v5e"),
]


@pytest.mark.parametrize(("shape", "dtype", "weight_dtype", "casting", "chip"), BACKWARD)
def test_backward_in_the_interpreter(shape, dtype, weight_dtype, casting, chip):  # RN11, RN12
    x, weight = make(*shape, dtype=dtype), make(shape[-1], dtype=weight_dtype)
    out_dtype = torch.promote_types(dtype, weight_dtype) if casting == "llama" else dtype
    grad, more = make(*shape, dtype=out_dtype, seed=1), make(*shape, dtype=dtype, seed=2)
    static = STATICS[casting]
    assert_as_reference("rms_norm_backward", grad, x, weight, *static, True, True, chip=chip)
    if len(shape) == 3:
        grad_x = grad.to(dtype)
        assert_as_reference("rms_norm_backward", grad_x, x, None, *static, True, False, chip=chip)
        assert_as_reference("rms_norm_backward", grad, x, weight, *static, False, True, chip=chip)
    needs = (True, True)
    assert_as_reference("add_rms_norm_backward", grad, more, x, weight, *static, *needs, chip=chip)


def test_wide_rows_in_the_interpreter(monkeypatch):
    monkeypatch.setattr(rows, "UNROLLED_LANES", 256)
    d = 2 * 256 + 70
    x, grad, weight = make(5, d, dtype=BF16), make(5, d, dtype=BF16, seed=1), make(d, dtype=BF16)
    assert_as_reference("rms_norm", x, weight, *STATICS["llama"])
    assert_as_reference("rms_norm_backward", grad, x, weight, *STATICS["llama"], True, True)


def test_nan_stays_in_its_row_of_the_kernel():
    x, grad, weight = make(20, 200), make(20, 200, seed=1), make(200)
    x[3, 199] = float("nan")
    others = torch.arange(20) != 3
    out = run_kernel(lowering.rms_norm, x, weight, *STATICS["llama"])
    grad_x, grad_weight = run_kernel(
        lowering.rms_norm_backward, grad, x, weight, *STATICS["llama"], True, True
    )
    for result in (out, grad_x):
        assert result[3].isnan().all() and result[others].isfinite().all()
    assert grad_weight.isnan().all()


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_empty_in_the_interpreter(shape):
    x, weight = make(*shape), make(shape[-1])
    assert_as_reference("add_rms_norm", x, x, weight, *STATICS["llama"])
    assert_as_reference("rms_norm_backward", x, x, weight, *STATICS["llama"], True, True)


def test_without_weight_gradient_there_are_no_sums():  # RN12
    def jaxpr(needs_weight: bool) -> str:
        spec = jax.ShapeDtypeStruct((64, 256), jnp.float32)
        weight = jax.ShapeDtypeStruct((256,), jnp.float32)
        return str(
            jax.make_jaxpr(
                lambda g, x, w: lowering.rms_norm_backward(
                    g, x, w, *STATICS["llama"], True, needs_weight, chip=CHIPS["v5e"]
                )
            )(spec, spec, weight)
        )

    sums = f"f32[{SUBLANES},256]"
    assert sums in jaxpr(True) and sums not in jaxpr(False)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("d", [1, 100, 128, 2880, 4096, 16500, 65536])
def test_tiles_fit(d, chip):
    for n in (1, 7, 16, 100, 4097, 1 << 20):
        tiles = tiling.choose(n, d, 4, 12, 48, CHIPS[chip])
        assert tiles.vmem_bytes <= CHIPS[chip].vmem_bytes * 9 // 10
        assert tiles.rows < n + 2 * tiling.ROW_ALIGN


def test_rows_that_do_not_fit_are_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"a width of 262144 does not fit.*v4"):
        tiling.choose(8, 262144, 4, 8, 8, CHIPS["v4"])


def spec(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def compile_ops(
    shape: tuple[int, ...], dtype: str, weight_dtype: str, chip: str, names: str = "n x a g X A G"
) -> None:
    """Forward and backward (capitals): no weight, plain, add, gated."""
    x, weight = spec(shape, dtype), spec(shape[-1:], weight_dtype)
    target = {"chip": CHIPS[chip]}
    static = STATICS["llama"]
    grad = spec(shape, jnp.promote_types(dtype, weight_dtype).name)
    gated = (1e-6, "silu", False, 0.0, "llama")
    needs = (True, True)
    programs = {
        "n": (lambda x: lowering.rms_norm(x, None, *static, **target), (x,)),
        "x": (lambda *a: lowering.rms_norm(*a, *static, **target), (x, weight)),
        "a": (lambda *a: lowering.add_rms_norm(*a, *static, **target), (x, x, weight)),
        "g": (lambda *a: lowering.rms_norm_gated(*a, *gated, **target), (x, x, weight)),
        "X": (
            lambda *a: lowering.rms_norm_backward(*a, *static, *needs, **target),
            (grad, x, weight),
        ),
        "A": (
            lambda *a: lowering.add_rms_norm_backward(*a, *static, *needs, **target),
            (grad, x, x, weight),
        ),
        "G": (
            lambda *a: lowering.rms_norm_gated_backward(*a, *gated, *needs, True, **target),
            (x, x, x, weight),
        ),
    }
    for name in names.split():
        aot.compile_for(*programs[name], chip)


MODEL = [(8192, 4096), (262144, 128), (64, 2048), (2, 4096, 8, 128)]  # N1, N3, N4, Qwen3's heads
EDGE = [
    ((3, 5, 80), "bfloat16", "bfloat16"),
    ((7, 100), "bfloat16", "float32"),
    ((64,), "float32", "bfloat16"),
    ((4, 1), "float16", "float16"),
    ((16, 3072), "float32", "float32"),  # DV16
]


@pytest.mark.parametrize("chip", CHIP_NAMES)
@pytest.mark.parametrize("shape", MODEL, ids=str)
def test_shapes_of_models_compile(shape, chip):
    names = "n x a g X A G" if chip == "v6e" else "x g X"
    compile_ops(shape, "bfloat16", "bfloat16", chip, names)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize(("shape", "dtype", "weight_dtype"), EDGE)
def test_any_shape_compiles(shape, dtype, weight_dtype, chip):  # RN08
    compile_ops(shape, dtype, weight_dtype, chip, "n x a g X A G" if chip == "v5e" else "x X")


@pytest.mark.parametrize(
    ("shape", "dtype", "chip"),
    [
        ((600000, 4096), "bfloat16", "v5e"),  # RN17
        pytest.param((600000, 4096), "bfloat16", "v6e", marks=pytest.mark.slow),
        ((1024, 65536), "float32", "v5e"),  # RN18
        ((8, 262144), "bfloat16", "v5e"),
        pytest.param((16, 262144), "float32", "v6e", marks=pytest.mark.slow),
        pytest.param((16, 262144), "float32", "v5p", marks=pytest.mark.slow),
        pytest.param((16, 262144), "float32", "v7x", marks=pytest.mark.slow),
    ],
)
def test_huge_arrays_compile(shape, dtype, chip):
    compile_ops(shape, dtype, dtype, chip, "x X")
