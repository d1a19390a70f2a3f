"""The public attention functions on the Pallas kernels, in Pallas' interpreter on the CPU.

Fresh memory is NaN there, and races fail the test. Everything is compared with float64.
"""

from __future__ import annotations

import math

import pytest
import torch
from attention_oracle import gradients, oracle
from interpret import run_kernel
from tpu_kernels.kernels.flash_attention import lowering, ops, packed
from tpu_kernels.kernels.flash_attention.ops import flash_attention
from tpu_kernels.kernels.flash_attention.packed import flash_attention_packed
from tpu_kernels.kernels.flash_attention.transformers import flash_attn_forward

INF = math.inf


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The public functions call the kernels; returns what the ops were called with."""
    calls = []

    def replace(module, name, jax_function):
        def run(*args):
            calls.append(args)
            return run_kernel(jax_function, *args)

        monkeypatch.setattr(module, name, run)

    replace(ops, "_flash_attention", lowering.flash_attention)
    replace(packed, "_flash_attention_packed", lowering.flash_attention_packed)
    return calls


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def check(q, k, v, **options) -> torch.Tensor:
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    expected, expected_lse = oracle(q, k, v, **options)
    tolerance = 2e-5 if q.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)
    return out


def test_causal_mask_is_aligned_to_the_last_key_and_has_an_effect():  # FA01, FA37
    v = (torch.arange(5) + 1.0)[None, :, None, None].expand(1, 5, 1, 4)
    k = make(1, 5, 1, 4)
    out = check(torch.zeros(1, 2, 1, 4), k, v, causal=True)
    torch.testing.assert_close(out[0, :, 0, 0], torch.tensor([2.5, 3.0]))
    assert not torch.allclose(out, check(torch.zeros(1, 2, 1, 4), k, v))


@pytest.mark.parametrize(("b", "sq"), [(1, 1), (3, 1), (3, 40)])
def test_two_cores_share_a_call_of_any_size(interpreted, b, sq):
    for hkv in (1, 2) if sq == 1 else (2,):
        q, k, v = make(b, sq, 4, 32), make(b, 40, hkv, 32), make(b, 40, hkv, 32, seed=1)
        check(q, k, v, causal=True)
        out, lse = run_kernel(lowering.flash_attention, *interpreted[-1], chip="v5p")
        expected, expected_lse = oracle(q, k, v, causal=True)
        torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=2e-5, atol=2e-5)


def test_single_token_decode_sees_every_key():  # FA03
    q = make(1, 1, 8, 128, dtype=torch.bfloat16)
    k, v = (make(1, 300, 2, 128, dtype=torch.bfloat16, seed=s) for s in (1, 2))
    check(q, k, v, causal=True)


SLOW = [pytest.mark.slow]


@pytest.mark.parametrize(
    ("sq", "sk", "d"),
    [
        (3, 1025, 80),
        pytest.param(192, 192, 64, marks=SLOW),
        pytest.param(130, 65, 96, marks=SLOW),
    ],
)
def test_odd_lengths_and_head_sizes(sq, sk, d):  # FA04, FA05
    check(make(1, sq, 2, d), make(1, sk, 1, d), make(1, sk, 1, d, seed=1), causal=True)


def test_row_without_visible_key_is_zero():  # FA12
    q, k, v = (make(1, 4, 2, 16, seed=s) for s in range(3))
    ids = {
        "q_segment_ids": torch.tensor([[0, 0, 1, 2]]),
        "kv_segment_ids": torch.tensor([[0, 0, 1, 1]]),
    }
    out = check(q, k, v, sinks=torch.tensor([0.3, -INF]), **ids)
    assert out[0, 3].eq(0).all()


def test_huge_equal_inputs_give_no_nan():  # FA27
    x = torch.full((1, 1, 1, 64), 133120.0, dtype=torch.bfloat16)
    assert torch.equal(flash_attention(x, x, x), x)
    x = x.expand(1, 4, 1, 64)
    assert torch.equal(flash_attention(x, x, x), x)


@pytest.mark.parametrize("poison", [math.nan, pytest.param(INF, marks=SLOW)])
def test_nan_in_hidden_keys_reaches_nothing(poison):
    q, k, v = make(2, 9, 4, 32), make(2, 40, 2, 32), make(2, 40, 2, 32, seed=1)
    k[0, 20:], v[0, 20:] = poison, poison
    k[1, :7], v[1, :7] = poison, poison
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    mask[0, ..., 20:], mask[1, ..., :7] = False, False
    check(q, k, v, mask=mask, causal=True)
    lengths = torch.tensor([20, 40])
    k[1, :7], v[1, :7] = 0, 0
    check(q, k, v, kv_lengths=lengths, causal=True)


EVERYTHING = {
    "causal": True,
    "window_size": (40, 3),
    "softcap": 2.0,
    "softmax_scale": 0.3,
    "sinks": make(4),
    "q_segment_ids": (torch.arange(33) // 20).expand(2, 33),
    "kv_segment_ids": (torch.arange(70) // 50).expand(2, 70),
    "mask": make(2, 4, 33, 70) < 1,
    "kv_lengths": torch.tensor([70, 55]),
}


def test_everything_at_once():
    check(make(2, 33, 4, 32), make(2, 70, 2, 32), make(2, 70, 2, 16), **EVERYTHING)


@pytest.mark.parametrize("dtype", [pytest.param(torch.bfloat16, marks=SLOW), torch.float16])
def test_low_precision(dtype):
    check(*(make(1, 24, h, 32, dtype=dtype) for h in (4, 2, 2)), causal=True)


@pytest.mark.parametrize("shape", [(2, 0, 5), (2, 3, 0), (0, 3, 5)])
def test_no_keys_or_queries_or_batch(shape):  # FA36
    b, sq, sk = shape
    q, k, v = make(b, sq, 4, 8), make(b, sk, 2, 8), make(b, sk, 2, 6)
    out, lse = flash_attention(q, k, v, sinks=torch.zeros(4), return_lse=True)
    assert out.shape == (b, sq, 4, 6) and out.eq(0).all() and lse.eq(-INF).all()


@pytest.mark.parametrize(
    "options", [{"causal": True}, pytest.param({"window_size": (2, 1)}, marks=SLOW)]
)
def test_packed_sequences(options):  # FA17
    q, k, v = make(20, 4, 16), make(30, 2, 16), make(30, 2, 16, seed=1)
    ends_q, ends_k = [0, 0, 3, 3, 17], [0, 2, 4, 6, 26]
    k[26:], v[26:], q[17:] = math.nan, math.nan, math.nan
    cu = [torch.tensor(ends) for ends in (ends_q, ends_k)]
    out, lse = flash_attention_packed(q, k, v, *cu, 14, 20, return_lse=True, **options)
    assert out[17:].eq(0).all() and lse[:, 17:].eq(-INF).all()
    for i in range(4):
        rows, keys = slice(*ends_q[i : i + 2]), slice(*ends_k[i : i + 2])
        wanted = oracle(q[None, rows], k[None, keys], v[None, keys], **options)
        torch.testing.assert_close(out[rows].double(), wanted[0][0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse[:, rows].double(), wanted[1][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("sq", "sk"), [(6, 16), pytest.param(1, 16, marks=SLOW)])
def test_prefill_and_decode_of_a_static_cache(sq, sk):
    q, k, v = make(2, 4, sq, 32), make(2, 2, sk, 32), make(2, 2, sk, 32, seed=1)
    out, _ = flash_attn_forward(None, q, k, v, None)
    mask = torch.arange(sq)[:, None] >= torch.arange(sk) if sq > 1 else None
    wanted, _ = oracle(*(x.transpose(1, 2) for x in (q, k, v)), mask=mask)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sq", "sk", "d", "dv", "options"),
    [
        (300, 300, 64, 64, {"window_size": (127, 0), "sinks": torch.tensor([0.3, -INF, 1, 2])}),
        (150, 270, 32, 48, {"window_size": (20, 70), "kv_lengths": torch.tensor([201])}),
        pytest.param(270, 150, 32, 32, {"window_size": (9, 9), "softcap": 2.0}, marks=SLOW),
    ],
)
def test_narrow_window_of_narrow_heads(sq, sk, d, dv, options):
    check(make(1, sq, 4, d), make(1, sk, 2, d), make(1, sk, 2, dv), **options)


def test_nan_in_a_narrow_window_reaches_those_who_see_it():
    q, k, v = make(1, 300, 4, 64), make(1, 300, 2, 64), make(1, 300, 2, 64, seed=1)
    clean = flash_attention(q, k, v, causal=True, window_size=(99, 0))
    k[:, 40:45], v[:, 150] = math.nan, INF
    out = flash_attention(q, k, v, causal=True, window_size=(99, 0))
    row = torch.arange(300)
    sees = (row >= 40) & (row < 144) | (row >= 150) & (row < 250)
    torch.testing.assert_close(out[:, ~sees], clean[:, ~sees])
    assert not out[:, sees].isfinite().all(-1).any()


def documents(*lengths: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]


@pytest.mark.parametrize(
    ("lengths", "heads", "d", "dtype"),
    [
        ([100, 230, 50, 260], (2, 1), 64, torch.float32),  # borders in strips and in blocks
        pytest.param([300, 350], (16, 8), 128, torch.bfloat16, marks=SLOW),  # heads in two parts
        pytest.param([200, 700], (2, 1), 64, torch.float32, marks=SLOW),  # 256 keys without an edge
    ],
)
def test_documents_of_any_length(lengths, heads, d, dtype):  # FA15
    s, (hq, hkv), ids = sum(lengths), heads, documents(*lengths)
    q, k, v = (make(1, s, h, d, dtype=dtype, seed=i) for i, h in enumerate((hq, hkv, hkv)))
    check(q, k, v, causal=True, q_segment_ids=ids, kv_segment_ids=ids)


def test_nan_in_another_document_reaches_nothing():
    ids = documents(100, 90, 130)
    q, k, v = (make(1, 320, h, 32, seed=h) for h in (2, 1, 1))
    k[:, 100:190], v[:, 100:190] = math.nan, math.nan
    ids_q = ids.clone()
    ids_q[ids == 1] = 7  # nobody sees the document in between
    out = check(q, k, v, causal=True, q_segment_ids=ids_q, kv_segment_ids=ids)
    assert out[:, 100:190].eq(0).all()


def test_logits_far_from_the_first_keys():
    """The guess of the maximum fails, so tiles are done again with a running one."""
    q, k, v = make(1, 300, 2, 64), make(1, 300, 1, 64), make(1, 300, 1, 64, seed=1)
    k[:, 130:] *= 30
    ids = documents(128, 172) // 2  # one document
    for masks in ({}, {"q_segment_ids": ids, "kv_segment_ids": ids}):
        out = flash_attention(q, k, v, softmax_scale=0.3, causal=True, **masks)
        wanted, _ = oracle(q, k, v, softmax_scale=0.3, causal=True, **masks)
        torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_medium_window():
    q, k, v = (make(1, 700, h, 128, dtype=torch.bfloat16, seed=h) for h in (16, 8, 8))
    check(q, k, v, causal=True, window_size=(529, 0))


@pytest.mark.parametrize(
    ("sq", "dtype"), [(1, torch.float32), pytest.param(3, torch.bfloat16, marks=SLOW)]
)
def test_decode_of_a_cache_with_the_heads_first(sq, dtype):
    lengths = torch.tensor([300, 0, 133])
    q, k, v = (make(3, h, n, 128, dtype=dtype, seed=n) for h, n in ((8, sq), (2, 300), (2, 300)))
    for n, length in enumerate(lengths):
        k[n, :, length:], v[n, :, length:] = math.nan, math.nan
    static = (True, -1, -1, 0.1, 0.0, True)
    call = (q, k, v, None, None, None, None, lengths.int(), *static)
    out, lse = run_kernel(lowering.flash_attention, *call)
    arrays = (x.nan_to_num().transpose(1, 2) for x in (q, k, v))
    wanted = oracle(*arrays, causal=True, softmax_scale=0.1, kv_lengths=lengths)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip((out, lse), wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def check_gradients(
    calls: list, q, k, v, *, grad_out: torch.Tensor | None = None, heads_first=False, **options
) -> list[torch.Tensor]:
    """Gradients of q, k, v (and sinks) from the backward kernel, against the oracle's."""
    inputs = [q, k, v] + ([options["sinks"]] if options.get("sinks") is not None else [])
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    (args,) = calls[-1:]
    grad_out = make(*out.shape, dtype=q.dtype) if grad_out is None else grad_out
    arrays = q, k, v
    if heads_first:
        arrays = tuple(x.transpose(1, 2) for x in arrays)
    call = (grad_out, *arrays, out, lse, *args[3:-1], heads_first, True, True, len(inputs) == 4)
    found = list(run_kernel(lowering.flash_attention_backward, *call))
    for i in range(3 if heads_first else 0):
        found[i] = found[i].transpose(1, 2)
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    if len(leaves) == 4:
        options["sinks"] = leaves[3]
    wanted = gradients(oracle(*leaves[:3], **options)[0], grad_out.nan_to_num(), leaves)
    assert found[3].shape == (wanted[3].shape if len(leaves) == 4 else (0,))
    tolerance = 5e-5 if q.dtype == torch.float32 else 3e-2
    for a, b in zip(found, wanted, strict=False):
        assert a.dtype == q.dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)
    return found


@pytest.mark.parametrize("heads_first", [False, True])
def test_gradients_of_everything_at_once(interpreted, heads_first):
    arrays = make(2, 33, 4, 32), make(2, 70, 2, 32), make(2, 70, 2, 16)
    check_gradients(interpreted, *arrays, heads_first=heads_first, **EVERYTHING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_each_dtype(interpreted, dtype):
    arrays = (make(1, 24, h, 32, dtype=dtype) for h in (4, 2, 2))
    check_gradients(interpreted, *arrays, causal=True)


def test_row_without_visible_key_has_no_gradient(interpreted):  # FA12
    q, k, v = (make(1, 4, 2, 16, seed=s) for s in range(3))
    ids = {
        "q_segment_ids": torch.tensor([[0, 0, 1, 2]]),
        "kv_segment_ids": torch.tensor([[0, 0, 1, 1]]),
    }
    grad_out = make(1, 4, 2, 16, seed=5)
    grad_out[0, 3] = math.nan
    found = check_gradients(
        interpreted, q, k, v, grad_out=grad_out, sinks=torch.tensor([0.3, -INF]), **ids
    )
    assert found[0][0, 3].eq(0).all()


def test_nan_in_hidden_keys_reaches_no_gradient(interpreted):
    q, k, v = make(2, 9, 4, 32), make(2, 40, 2, 32), make(2, 40, 2, 32, seed=1)
    lengths = torch.tensor([20, 40])
    k[0, 20:], v[0, 20:] = math.nan, INF
    found = check_gradients(interpreted, q, k, v, kv_lengths=lengths, causal=True)
    assert found[1][0, 20:].eq(0).all() and found[2][0, 20:].eq(0).all()


def test_gradients_that_are_not_needed(interpreted):
    q, k, v = make(1, 6, 4, 16), make(1, 9, 2, 16), make(1, 9, 2, 16)
    out, lse = flash_attention(q, k, v, sinks=make(4), return_lse=True)
    call = (out, q, k, v, out, lse, *interpreted[-1][3:])
    shapes = (q.shape, k.shape, v.shape, (4,))
    for needs in ((True, False, False), (False, True, False), (False, False, True)):
        found = run_kernel(lowering.flash_attention_backward, *call, *needs)
        for x, shape, needed in zip(
            found, shapes, (needs[0], *needs[1:2] * 2, needs[2]), strict=True
        ):
            assert x.shape == (shape if needed else (0,))


def test_gradients_of_packed_sequences(interpreted):  # FA17
    q, k, v = make(20, 4, 16), make(30, 2, 16), make(30, 2, 16, seed=1)
    ends_q, ends_k = [0, 0, 3, 3, 17], [0, 2, 4, 6, 26]
    cu = [torch.tensor(ends) for ends in (ends_q, ends_k)]
    out, lse = flash_attention_packed(q, k, v, *cu, 14, 20, causal=True, return_lse=True)
    grad_out = make(*out.shape, seed=3)
    grad_out[17:] = math.nan  # rows of no sequence
    call = (grad_out, q, k, v, out, lse, *interpreted[-1][3:], True, True, False)
    found = run_kernel(lowering.flash_attention_packed_backward, *call)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    total = 0
    for i in range(4):
        rows, keys = slice(*ends_q[i : i + 2]), slice(*ends_k[i : i + 2])
        parts = leaves[0][None, rows], leaves[1][None, keys], leaves[2][None, keys]
        total = total + (oracle(*parts, causal=True)[0][0] * grad_out[rows].double()).sum()
    for a, b in zip(found, torch.autograd.grad(total, leaves), strict=False):
        torch.testing.assert_close(a.double(), b, rtol=5e-5, atol=5e-5)
    assert found[0][17:].eq(0).all() and found[3].shape == (0,)


@pytest.mark.parametrize("shape", [(2, 0, 5), (2, 3, 0), (0, 3, 5)])
def test_gradients_without_keys_or_queries_or_batch(interpreted, shape):  # FA36
    b, sq, sk = shape
    q, k, v = make(b, sq, 4, 8), make(b, sk, 2, 8), make(b, sk, 2, 6)
    out, lse = flash_attention(q, k, v, sinks=torch.zeros(4), return_lse=True)
    call = (out, q, k, v, out, lse, *interpreted[-1][3:], True, True, True)
    found = run_kernel(lowering.flash_attention_backward, *call)
    for x, like in zip(found, (q, k, v, torch.zeros(4)), strict=True):
        assert x.shape == like.shape and x.eq(0).all()
