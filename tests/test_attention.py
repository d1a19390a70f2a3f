"""flash_attention: what it computes, on the CPU, against float64 and torch's own attention."""

from __future__ import annotations

import math

import pytest
import torch
from attention_oracle import gradients, oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from tpu_kernels.kernels.flash_attention import reference
from tpu_kernels.kernels.flash_attention.ops import flash_attention

INF = math.inf


def make(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def counting_values(sk: int, hkv: int = 1, d: int = 4, first: float = 0.0) -> torch.Tensor:
    """v_j = first + j in every dimension."""
    return (torch.arange(sk) + first).float()[None, :, None, None].expand(1, sk, hkv, d)


@st.composite
def problems(draw) -> dict:
    """Any combination of masks and sizes."""
    b, sq, sk = draw(st.integers(1, 2)), draw(st.integers(0, 9)), draw(st.integers(0, 9))
    hkv, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    d, dv = draw(st.sampled_from([1, 3, 8])), draw(st.sampled_from([1, 5, 8]))
    hq, seed = hkv * group, draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(b, sq, hq, d, generator=generator, dtype=torch.float64)
    k = torch.randn(b, sk, hkv, d, generator=generator, dtype=torch.float64)
    v = torch.randn(b, sk, hkv, dv, generator=generator, dtype=torch.float64)
    side = st.sampled_from([-1, None, 0, 1, 2, 5, 20])
    options = {
        "causal": draw(st.booleans()),
        "window_size": (draw(side), draw(side)),
        "softcap": draw(st.sampled_from([0.0, None, 1.5])),
        "softmax_scale": draw(st.sampled_from([None, 0.3])),
    }
    if draw(st.booleans()):
        options["sinks"] = torch.randn(hq, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        options["q_segment_ids"] = torch.randint(0, 3, (b, sq), generator=generator)
        options["kv_segment_ids"] = torch.randint(0, 3, (b, sk), generator=generator)
    if draw(st.booleans()):
        sizes = [draw(st.sampled_from([1, size])) for size in (b, hq, sq, sk)]
        mask = torch.rand(sizes, generator=generator) < 0.7
        options["mask"] = mask[0, 0] if sizes[0] == sizes[1] == 1 else mask
    if draw(st.booleans()):
        options["kv_lengths"] = torch.randint(0, sk + 1, (b,), generator=generator)
    return {"q": q, "k": k, "v": v, **options}


@settings(max_examples=150, deadline=None)
@given(problem=problems(), small_chunks=st.booleans())
def test_equals_softmax_written_out(problem, small_chunks):
    inputs = [problem[name] for name in ("q", "k", "v", "sinks") if name in problem]
    for x in inputs:
        x.requires_grad_()
    saved = reference._CHUNK_LOGITS
    reference._CHUNK_LOGITS = 40 if small_chunks else saved
    try:
        out, lse = flash_attention(**problem, return_lse=True)
        expected, expected_lse = oracle(**problem)
        grad_out = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        found = gradients(out, grad_out, inputs)
    finally:
        reference._CHUNK_LOGITS = saved
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-6, atol=1e-6)
    wanted = gradients(expected, grad_out, inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_not_worse_than_torch_in_low_precision(dtype, causal):
    q, k, v = (make(2, 33, h, 16, dtype=dtype).requires_grad_() for h in (4, 2, 2))
    out = flash_attention(q, k, v, causal=causal)
    assert out.dtype == dtype
    transposed = [x.transpose(1, 2) for x in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *transposed, is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    exact, _ = oracle(q, k, v, causal=causal)
    grad_out = make(*out.shape, dtype=dtype)
    ours, torchs, true = (gradients(x, grad_out, [q, k, v]) for x in (out, theirs, exact))
    for a, b, c in zip([out, *ours], [theirs, *torchs], [exact, *true], strict=True):
        bound = 2 * (b.double() - c.double()).abs().max() + 1e-6
        assert (a.double() - c.double()).abs().max() <= bound


# Reported symptoms, each with its number in shared/cases/open_cases.md


def test_causal_mask_is_aligned_to_the_last_key():  # FA01
    out = flash_attention(
        torch.zeros(1, 2, 1, 4), make(1, 5, 1, 4).float(), counting_values(5, first=1), causal=True
    )
    torch.testing.assert_close(out[0, :, 0, 0], torch.tensor([2.5, 3.0]))


def test_single_token_decode_sees_every_key():  # FA03
    q = make(1, 1, 8, 128, dtype=torch.bfloat16)
    k, v = (make(1, 300, 2, 128, dtype=torch.bfloat16, seed=s) for s in (1, 2))
    out = flash_attention(q, k, v, causal=True)
    torch.testing.assert_close(out.double(), oracle(q, k, v)[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("sq", "sk"), [(192, 192), (3, 1025), (130, 65)])
def test_length_that_is_no_multiple_of_a_block(sq, sk):  # FA04
    q, k, v = make(1, sq, 2, 8), make(1, sk, 1, 8), make(1, sk, 1, 8, seed=1)
    torch.testing.assert_close(
        flash_attention(q, k, v, causal=True), oracle(q, k, v, causal=True)[0]
    )


@pytest.mark.parametrize("d", [16, 64, 80, 96, 256])
def test_default_scale_is_of_the_true_head_size(d):  # FA05
    q, k, v = (make(1, 5, 2, d, seed=s) for s in range(3))
    expected, _ = oracle(q, k, v, softmax_scale=d**-0.5)
    torch.testing.assert_close(flash_attention(q, k, v), expected)


def test_grouped_heads_are_mapped_by_block():  # FA08
    q, k = make(1, 3, 6, 4).float(), make(1, 3, 2, 4).float()
    v = torch.tensor([0.0, 1.0])[None, None, :, None].expand(1, 3, 2, 4)
    out = flash_attention(q, k, v)
    torch.testing.assert_close(out[0, 0, :, 0], torch.tensor([0.0, 0, 0, 1, 1, 1]))
    with pytest.raises(ValueError, match="multiple of k's 4, got 6"):
        flash_attention(q, make(1, 3, 4, 4).float(), make(1, 3, 4, 4).float())


def test_slices_of_one_fused_projection():  # FA10
    qkv = make(1, 32, 3 * 4 * 16).requires_grad_()
    parts = qkv.view(1, 32, 3, 4, 16).unbind(2)
    copies = [x.detach().contiguous().requires_grad_() for x in parts]
    out, expected = flash_attention(*parts, causal=True), flash_attention(*copies, causal=True)
    torch.testing.assert_close(out, expected)
    grad_out = make(*out.shape)
    out.backward(grad_out)
    grads = torch.autograd.grad(expected, copies, grad_out)
    torch.testing.assert_close(qkv.grad.view(1, 32, 3, 4, 16), torch.stack(grads, 2))


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -INF])])
def test_row_without_visible_key_is_zero(sinks):  # FA12
    q, k, v = (make(1, 4, 2, 8, seed=s).float().requires_grad_() for s in range(3))
    ids = {
        "q_segment_ids": torch.tensor([[0, 0, 1, 2]]),
        "kv_segment_ids": torch.tensor([[0, 0, 1, 1]]),
    }
    out, lse = flash_attention(q, k, v, sinks=sinks, **ids, return_lse=True)
    assert out[0, 3].eq(0).all() and lse[0, :, 3].eq(-INF).all()
    torch.testing.assert_close(out.double(), oracle(q, k, v, sinks=sinks, **ids)[0])
    grad_out = make(1, 4, 2, 8).float()
    grad_out[0, 3] = math.nan
    out.backward(grad_out)
    assert q.grad[0, 3].eq(0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_documents_do_not_attend_across_their_border():  # FA15
    q, k, v = (make(1, 5, 2, 8, seed=s) for s in range(3))
    ids = torch.tensor([[0, 0, 0, 1, 1]])
    out = flash_attention(q, k, v, causal=True, q_segment_ids=ids, kv_segment_ids=ids)
    apart = [
        flash_attention(*(x[:, part] for x in (q, k, v)), causal=True)
        for part in (slice(0, 3), slice(3, 5))
    ]
    torch.testing.assert_close(out, torch.cat(apart, 1))
    torch.testing.assert_close(out[:, 3], v[:, 3])


@pytest.mark.parametrize("real", [slice(0, 3), slice(2, 5)])
def test_padding_on_either_side_is_not_attended(real):  # FA16
    q, k, v = (make(1, 5, 2, 8, seed=s) for s in range(3))
    is_real = torch.zeros(1, 1, 1, 5, dtype=torch.bool)
    is_real[..., real] = True
    k[:, ~is_real[0, 0, 0]] = math.nan
    v[:, ~is_real[0, 0, 0]] = math.nan
    out = flash_attention(q, k, v, causal=True, mask=is_real)
    alone = flash_attention(*(x[:, real] for x in (q, k, v)), causal=True)
    torch.testing.assert_close(out[:, real], alone)
    assert out[:, : real.start].eq(0).all() and out.isfinite().all()


def test_window_is_inclusive_on_both_sides():  # FA21, FA23
    q, k = torch.zeros(1, 6, 1, 4), torch.zeros(1, 6, 1, 4)
    out = flash_attention(q, k, counting_values(6), causal=True, window_size=(2, 0))
    assert out[0, 5, 0, 0] == 4
    v = make(1, 6, 1, 4).float()
    torch.testing.assert_close(flash_attention(q, k, v, window_size=(0, 0)), v)
    out = flash_attention(q[:, :4], k[:, :4], counting_values(4), window_size=(1, 1))
    torch.testing.assert_close(out[0, :, 0, 0], torch.tensor([0.5, 1.0, 2.0, 2.5]))
    assert torch.equal(flash_attention(q, k, v, window_size=(None, None)), flash_attention(q, k, v))
    assert torch.equal(
        flash_attention(q, k, v, window_size=(2**40, 2**40)), flash_attention(q, k, v)
    )


def test_soft_cap_comes_after_scaling_and_before_masking():  # FA25
    q = torch.tensor([1.0, 0.0])[None, None, None]
    k = torch.tensor([[40.0, 0.0], [20.0, 0.0], [5.0, 0.0]])[None, :, None]
    v = torch.eye(3)[None, :, None]
    mask = torch.tensor([[True, True, False]])
    out = flash_attention(q, k, v, mask=mask, softmax_scale=0.5, softcap=10)
    torch.testing.assert_close(out[0, 0, 0], torch.tensor([0.8833, 0.1167, 0]), atol=1e-4, rtol=0)
    off = [flash_attention(q, k, v, mask=mask, softmax_scale=0.5, softcap=cap) for cap in (0, None)]
    assert torch.equal(off[0], off[1]) and off[0][0, 0, 0, 0] > 0.9999


def test_huge_equal_inputs_give_no_nan():  # FA27
    x = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16)
    assert torch.equal(flash_attention(x, x, x), x)
    x = x.expand(1, 4, 1, 64)
    assert torch.equal(flash_attention(x, x, x), x)


def test_sink_takes_its_share_and_has_a_gradient():  # FA29, FA31
    q, k = torch.zeros(1, 3, 2, 4), torch.zeros(1, 1, 1, 4)
    v = torch.full((1, 1, 1, 4), 2.0)
    sinks = torch.full((2,), math.log(3)).requires_grad_()
    out, lse = flash_attention(q, k, v, sinks=sinks, return_lse=True)
    torch.testing.assert_close(out, torch.full_like(out, 0.5))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(4)))
    out[..., 0].sum().backward()
    torch.testing.assert_close(sinks.grad, torch.full((2,), 3 * -0.1875 * 2))
    no_sink = flash_attention(q, k, v, sinks=torch.full((2,), -INF))
    assert torch.equal(no_sink, flash_attention(q, k, v))


def test_lse_is_the_natural_logarithm_in_float32():  # FA32
    q, k = torch.zeros(2, 3, 4, 8, dtype=torch.bfloat16), make(2, 8, 2, 8, dtype=torch.bfloat16)
    lse = flash_attention(q, k, k, return_lse=True)[1]
    assert lse.shape == (2, 4, 3) and lse.dtype == torch.float32
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(8)))
    also_lse = flash_attention(q, k, k, return_attn_probs=True)[1]
    assert torch.equal(lse, also_lse)


@pytest.mark.parametrize("shape", [(2, 0, 5), (2, 3, 0), (0, 3, 5), (0, 0, 0)])
def test_no_keys_or_queries_or_batch(shape):  # FA36
    b, sq, sk = shape
    sinks = torch.zeros(4).requires_grad_()
    q, k, v = (
        make(b, s, h, d).float().requires_grad_()
        for s, h, d in ((sq, 4, 8), (sk, 2, 8), (sk, 2, 6))
    )
    out, lse = flash_attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    assert out.shape == (b, sq, 4, 6) and lse.shape == (b, 4, sq)
    assert out.eq(0).all() and lse.eq(-INF).all()
    out.sum().backward()
    assert all(x.grad.shape == x.shape and x.grad.eq(0).all() for x in (q, k, v, sinks))


def test_causal_has_an_effect():  # FA37
    q, k, v = (make(1, 4, 2, 8, seed=s) for s in range(3))
    causal, full = flash_attention(q, k, v, causal=True), flash_attention(q, k, v)
    torch.testing.assert_close(causal[:, 0], v[:, 0])
    assert not torch.allclose(causal, full)


def test_additive_mask_is_never_taken_for_a_bool_one():  # FA38
    q, k, v = (make(1, 2, 1, 4, seed=s) for s in range(3))
    mask = torch.tensor([[True, False], [True, True]])
    out = flash_attention(q, k, v, mask=mask)
    torch.testing.assert_close(out[:, 0], v[:, 0])
    additive = torch.zeros(2, 2).masked_fill(~mask, -INF)
    with pytest.raises(TypeError, match=r"mask: expected dtype bool.*float32"):
        flash_attention(q, k, v, mask=additive)
    with pytest.raises(TypeError, match=r"mask: expected dtype bool.*int64"):
        flash_attention(q, k, v, mask=mask.long())


HIDING = {
    "causal": {"causal": True},
    "window": {"window_size": (0, 0)},
    "segments": {
        "q_segment_ids": torch.tensor([[0, 0, 0, 1]]),
        "kv_segment_ids": torch.tensor([[0, 0, 0, 1]]),
    },
    "mask": {"mask": torch.tensor([True, True, True, False])},
    "kv_lengths": {"kv_lengths": torch.tensor([3])},
}


@pytest.mark.parametrize("poison", [math.nan, INF, -INF])
@pytest.mark.parametrize("name", HIDING)
def test_nan_in_a_hidden_key_reaches_nothing(name, poison):
    """Key 3 holds NaN; only query 3 sees it, or none does."""
    options = HIDING[name]
    q, k, v = (make(1, 4, h, 8, seed=s).float() for s, h in enumerate((4, 2, 2)))
    clean = [x.clone().requires_grad_() for x in (q, k, v)]
    k[:, 3], v[:, 3] = poison, poison
    dirty = [x.requires_grad_() for x in (q, k, v)]
    sinks = torch.zeros(4)
    expected = flash_attention(*clean, sinks=sinks, **options)
    out = flash_attention(*dirty, sinks=sinks, **options)
    hidden_from = slice(0, 3) if name in ("causal", "window", "segments") else slice(0, 4)
    assert torch.equal(out[:, hidden_from], expected[:, hidden_from])
    grad_out = make(1, 4, 4, 8).float()
    grad_out[:, hidden_from.stop :] = 0
    wanted, found = gradients(expected, grad_out, clean), gradients(out, grad_out, dirty)
    torch.testing.assert_close(found[0][:, hidden_from], wanted[0][:, hidden_from])
    if name == "causal":  # query 3 sees all keys, and takes its NaN to their gradients
        return
    for a, b in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(a[:, :3], b[:, :3])
        assert a[:, 3].eq(0).all() or hidden_from.stop == 3


def test_nan_in_upstream_gradient_stays_with_what_the_row_sees():
    q, k, v = (make(1, 4, 2, 8, seed=s).float().requires_grad_() for s in range(3))
    out = flash_attention(q, k, v, causal=True)
    grad_out = torch.zeros_like(out)
    grad_out[:, 1] = math.nan
    out.backward(grad_out)
    for x in (k, v):
        assert x.grad[:, :2].isnan().all() and x.grad[:, 2:].eq(0).all()
    assert q.grad[:, [0, 2, 3]].eq(0).all()


def test_kv_lengths_of_a_static_cache():
    q = make(3, 2, 4, 8)
    k, v = make(3, 10, 2, 8), make(3, 10, 2, 8, seed=1)
    lengths = [10, 4, 0]
    out, lse = flash_attention(
        q, k, v, causal=True, kv_lengths=torch.tensor(lengths), return_lse=True
    )
    for n, length in enumerate(lengths):
        one = flash_attention(
            q[n : n + 1], k[n : n + 1, :length], v[n : n + 1, :length], causal=True
        )
        torch.testing.assert_close(out[n : n + 1], one)
    assert lse[2].eq(-INF).all()


@pytest.mark.parametrize(
    "sizes", [(), (5,), (1, 1), (3, 1), (3, 5), (4, 3, 5), (2, 1, 1, 5), (1, 4, 3, 1), (2, 4, 3, 5)]
)
def test_mask_broadcasts_as_torch_does(sizes):
    q, k, v = make(2, 3, 4, 8), make(2, 5, 2, 8), make(2, 5, 2, 8, seed=1)
    mask = make(*sizes) < 0.5
    torch.testing.assert_close(flash_attention(q, k, v, mask=mask), oracle(q, k, v, mask=mask)[0])


def test_call_as_diffusers_makes_it():
    q, k, v = (make(1, 6, 2, 8, seed=s) for s in range(3))
    call = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1)}
    out, lse = flash_attention(q=q, k=k, v=v, **call, return_attn_probs=True)
    assert torch.equal(out, flash_attention(q=q, k=k, v=v, **call, return_attn_probs=False))
    assert lse.shape == (1, 2, 6)
