"""rms_norm, add_rms_norm, rms_norm_gated on the CPU: against float64, and bit-equal to models."""

from __future__ import annotations

import pytest
import torch
from closeness import UNIT_ROUNDOFF
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from tpu_kernels.kernels.rmsnorm.ops import add_rms_norm, rms_norm, rms_norm_gated

CASTINGS = ("llama", "gemma", "none")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def exact_norm(x, weight, eps, offset=0.0):
    xhat = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return xhat if weight is None else xhat * (weight + offset)


def exact_gated(x, gate, weight, eps, activation="silu", gate_first=False, offset=0.0):
    act = functional.silu(gate) if activation == "silu" else torch.sigmoid(gate)
    if gate_first:
        return exact_norm(x * act, weight, eps, offset)
    return exact_norm(x, weight, eps, offset) * act


def unit_of(*dtypes: torch.dtype) -> float:
    return max(2.0**-21 if t == torch.float32 else UNIT_ROUNDOFF[t] for t in dtypes)


def assert_near(actual: torch.Tensor, exact: torch.Tensor, roundings: float, unit: float) -> None:
    """Within so many roundings of the largest value."""
    assert actual.shape == exact.shape
    if actual.numel() == 0:
        return
    bound = roundings * unit * exact.abs().max() + 1e-30
    error = (actual.double() - exact).abs().max()
    assert error <= bound, f"off by {error:.3g}, {error / bound:.2f} times what is allowed"


def check(function, exact, tensors: list[torch.Tensor | None], roundings: float = 4) -> None:
    """Results and gradients of function(*tensors) against those of exact in float64.

    Errors count in roundings of the narrowest dtype: xhat is rounded before a wide weight, too.
    """
    unit = unit_of(*(t.dtype for t in tensors if t is not None))
    inputs = [None if t is None else t.clone().requires_grad_() for t in tensors]
    wide = [None if t is None else t.double().requires_grad_() for t in tensors]
    outputs, expected = function(*inputs), exact(*wide)
    if isinstance(outputs, torch.Tensor):
        outputs, expected = (outputs,), (expected,)
    upstream = [make(*out.shape, dtype=out.dtype, seed=1) for out in outputs]
    for out, reference in zip(outputs, expected, strict=True):
        assert_near(out, reference, roundings, unit)
    torch.autograd.backward(outputs, upstream)
    torch.autograd.backward(expected, [grad.double() for grad in upstream])
    for found, wanted in zip(inputs, wide, strict=True):
        if found is not None:
            assert found.grad.dtype == found.dtype
            assert_near(found.grad, wanted.grad, 2 * roundings, unit)


# From a width of 8: the gradient of a narrower row may be nothing but cancellation.
SHAPES = st.lists(st.integers(0, 5), max_size=3).flatmap(
    lambda lead: st.integers(8, 70).map(lambda d: (*lead, d))
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shape=SHAPES,
    dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from((*DTYPES, None)),
    casting=st.sampled_from(CASTINGS),
    offset=st.sampled_from((0.0, 1.0, -0.5)),
    eps=st.sampled_from((1e-6, 1e-5, 0.1)),
)
def test_any_shape_dtype_and_casting(
    shape, dtype, weight_dtype, casting, offset, eps
):  # RN08, RN07
    x = make(*shape, dtype=dtype)
    weight = None if weight_dtype is None else make(shape[-1], dtype=weight_dtype)
    roundings = 8 if casting == "none" else 4
    kwargs = {"offset": offset, "casting": casting}
    check(
        lambda x, w: rms_norm(x, w, eps, **kwargs),
        lambda x, w: exact_norm(x, w, eps, offset),
        [x, weight],
        roundings,
    )
    gate = make(*shape, dtype=dtype, seed=2)
    for gate_first in (False, True):
        check(
            lambda x, g, w, first=gate_first: rms_norm_gated(
                x, g, w, eps, gate_first=first, **kwargs
            ),
            lambda x, g, w, first=gate_first: exact_gated(x, g, w, eps, "silu", first, offset),
            [x, gate, weight],
            2 * roundings,
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual_dtype", [torch.bfloat16, torch.float32])
def test_add_rms_norm_is_the_sum_and_its_norm(dtype, residual_dtype):
    x, residual = make(3, 4, 40, dtype=dtype), make(3, 4, 40, dtype=residual_dtype, seed=2)
    weight = make(40, dtype=dtype)
    normed, total = add_rms_norm(x, residual, weight, 1e-5, offset=1.0)
    assert torch.equal(total, x + residual) and total.dtype == (x + residual).dtype
    assert torch.equal(normed, rms_norm(total, weight, 1e-5, offset=1.0))
    check(
        lambda x, r, w: add_rms_norm(x, r, w, 1e-5),
        lambda x, r, w: (exact_norm(x + r, w, 1e-5), x + r),
        [x, residual, weight],
    )


def test_gradient_through_one_result_of_add_rms_norm():
    for index in (0, 1):
        x, residual, weight = (t.requires_grad_() for t in (make(3, 8), make(3, 8), make(8)))
        add_rms_norm(x, residual, weight)[index].square().sum().backward()
        copy = [t.detach().double().requires_grad_() for t in (x, residual, weight)]
        total = copy[0] + copy[1]
        (total if index else exact_norm(total, copy[2], 1e-6)).square().sum().backward()
        torch.testing.assert_close(x.grad, copy[0].grad.float())
        torch.testing.assert_close(residual.grad, copy[1].grad.float())
        assert index or weight.grad is not None


# The expressions of the models, operation by operation


def llama(hidden_states, weight, eps):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + eps)
    return weight * hidden_states.to(input_dtype)


def gpt_oss(hidden_states, weight, eps):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + eps)
    return (weight * hidden_states).to(input_dtype)


def gemma(x, weight, eps):
    output = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (output * (1.0 + weight.float())).type_as(x)


def qwen3_next_gated(hidden_states, gate, weight, eps):
    return (llama(hidden_states, weight, eps) * functional.silu(gate.to(torch.float32))).to(
        hidden_states.dtype
    )


def kimi_gated(hidden_states, gate, weight, eps):
    normed = weight.float() * llama(hidden_states.float(), torch.ones(()), eps)
    return (normed * torch.sigmoid(gate.float())).to(hidden_states.dtype)


def mamba2_gated(hidden_states, gate, weight, eps):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32) * functional.silu(gate.to(torch.float32))
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return weight * (hidden_states * torch.rsqrt(variance + eps)).to(input_dtype)


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 64), (3, 5, 80), (7, 100), (64,), (2, 3, 4, 96), (9, 1)])
def test_bit_equal_to_the_models(shape, dtype, weight_dtype):  # RN01, RN02, RN15
    x, gate = make(*shape, dtype=dtype), make(*shape, dtype=dtype, seed=3)
    weight = make(shape[-1], dtype=weight_dtype)
    pairs = [
        (rms_norm(x, weight, 1e-5), llama(x, weight, 1e-5)),
        (rms_norm(x, weight, 1e-5, casting="gemma"), gpt_oss(x, weight, 1e-5)),
        (rms_norm(x, weight, offset=1.0, casting="gemma"), gemma(x, weight, 1e-6)),
        (rms_norm_gated(x, gate, weight), qwen3_next_gated(x, gate, weight, 1e-6)),
        (
            rms_norm_gated(x, gate, weight, activation="sigmoid", casting="gemma"),
            kimi_gated(x, gate, weight, 1e-6),
        ),
        (rms_norm_gated(x, gate, weight, gate_first=True), mamba2_gated(x, gate, weight, 1e-6)),
    ]
    for number, (found, expected) in enumerate(pairs):
        if number == 1 and torch.promote_types(dtype, weight_dtype) != dtype:
            continue  # gpt-oss multiplies float32 by a narrower weight only
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), number


def test_zero_weight_with_an_offset_is_no_weight():  # RN02
    x = make(4, 64, dtype=torch.bfloat16)
    weight = torch.zeros(64, dtype=torch.bfloat16)
    for casting in CASTINGS:
        plain = rms_norm(x, None, casting=casting)
        assert torch.equal(rms_norm(x, weight, offset=1.0, casting=casting), plain)
        assert rms_norm(x, weight, casting=casting).eq(0).all()


@pytest.mark.parametrize("d", [1, 2, 3])
def test_narrow_rows(d):  # RN08
    check(
        lambda x, w: rms_norm(x, w, 0.5), lambda x, w: exact_norm(x, w, 0.5), [make(5, d), make(d)]
    )


def test_eps_is_inside_the_root():  # RN04
    x = torch.full((1, 64), 0.02)
    ratio = rms_norm(x, None, 1e-6) / rms_norm(x, None, 1e-5)
    torch.testing.assert_close(ratio, torch.full_like(x, 1.0111), rtol=1e-4, atol=0)


def test_norm_of_a_slice_of_a_fused_projection():  # RN09
    qkv = make(10, 512)
    q = qkv[:, :256].view(10, 4, 64)
    weight = make(64)
    assert torch.equal(rms_norm(q, weight), rms_norm(q.contiguous(), weight))
    transposed = make(64, 10).T.requires_grad_()
    copy = transposed.detach().contiguous().requires_grad_()
    out, expected = rms_norm(transposed, weight), rms_norm(copy, weight)
    torch.testing.assert_close(out, expected)
    assert out.is_contiguous()
    upstream = make(64, 10).T
    out.backward(upstream)
    expected.backward(upstream.contiguous())
    torch.testing.assert_close(transposed.grad, copy.grad)


@pytest.mark.parametrize("casting", CASTINGS)
def test_weight_gradient_is_the_sum_over_all_leading_dimensions(casting):  # RN11
    x, weight = make(2, 3, 64, dtype=torch.bfloat16), make(64, dtype=torch.float32)
    weight.requires_grad_()
    out = rms_norm(x, weight, casting=casting)
    upstream = make(2, 3, 64, dtype=out.dtype)
    out.backward(upstream)
    xhat = exact_norm(x.float(), None, 1e-6)
    xhat = xhat if casting == "gemma" else xhat.bfloat16().float()
    assert weight.grad.dtype == torch.float32
    torch.testing.assert_close(weight.grad, (upstream.float() * xhat).sum((0, 1)))


def test_backward_leaves_the_incoming_gradient_alone():  # RN13
    x, weight = make(4, 8).requires_grad_(), make(8).requires_grad_()
    upstream = make(4, 8, seed=5)
    before = upstream.clone()
    normed, total = add_rms_norm(x, x.detach(), weight)
    torch.autograd.backward((normed, total), (upstream, upstream))
    assert torch.equal(upstream, before)

    def residual_model(norm, x, weight):
        h = x + norm(x, weight)
        return h + norm(h, weight)

    grads = []
    for norm in (rms_norm, lambda x, w: exact_norm(x, w, 1e-6)):
        x, weight = make(4, 8).requires_grad_(), make(8).requires_grad_()
        residual_model(norm, x, weight).square().sum().backward()
        grads.append((x.grad, weight.grad))
    torch.testing.assert_close(*grads)


def test_nan_stays_in_its_row():
    x, weight = make(6, 64), make(64).requires_grad_()
    gate = make(6, 64, seed=1)
    x[2, 5] = float("nan")
    x.requires_grad_()
    rows = torch.arange(6) != 2
    for out in (rms_norm(x, weight), rms_norm_gated(x, gate, weight, gate_first=True)):
        assert out[2].isnan().all() and out[rows].isfinite().all()
        (grad,) = torch.autograd.grad(out.nan_to_num().sum(), x)
        assert grad[rows].isfinite().all()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 5), (2, 0, 5)])
def test_empty(shape):
    x, gate = (make(*shape).requires_grad_() for _ in range(2))
    weight = make(shape[-1]).requires_grad_()
    outs = [rms_norm(x, weight), *add_rms_norm(x, gate, weight), rms_norm_gated(x, gate, weight)]
    assert all(out.shape == x.shape for out in outs)
    sum(out.sum() for out in outs).backward()
    assert x.grad.shape == gate.grad.shape == x.shape and weight.grad.eq(0).all()
