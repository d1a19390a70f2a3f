"""apply_rotary and qk_norm_rotary as torch ops: values, gradients, compile and refusals."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from tpu_kernels.kernels.rotary import ops
from tpu_kernels.kernels.rotary.ops import apply_rotary, apply_rotary_transformers, qk_norm_rotary

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def make(*shape: int, dtype=F64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype)


def oracle(x, cos, sin, unsqueeze_dim=1, interleaved=False, rotary_dim=None):
    """One feature pair after the other, in float64."""
    d, w = x.shape[-1], cos.shape[-1]
    r = rotary_dim or (d if 2 * w == d else w)
    cos, sin = (t.double().unsqueeze(unsqueeze_dim) for t in (cos, sin))
    wide, out = x.double(), x.double().clone()
    for i in range(r // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + r // 2)
        at_a, at_b = (i, i) if w != r else (a, b)
        out[..., a] = wide[..., a] * cos[..., at_a] - wide[..., b] * sin[..., at_a]
        out[..., b] = wide[..., b] * cos[..., at_b] + wide[..., a] * sin[..., at_b]
    return out


def norm_oracle(x, weight, eps, offset, casting):
    """The models' own expressions."""
    if casting == "none":
        xhat = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        return xhat if weight is None else xhat * (weight.to(x.dtype) + offset)
    wide = x.to(torch.promote_types(x.dtype, F32))
    xhat = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return xhat.to(x.dtype)
    if casting == "gemma":
        return (xhat * (weight.to(wide.dtype) + offset)).to(x.dtype)
    return (weight + offset) * xhat.to(x.dtype)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([0, 1, 2]),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([F64, F32, BF16, F16]),
    st.sampled_from([F64, F32, BF16]),
)
def test_matches_every_pair_rotated_alone(
    axis, b, s, hq, hk, half, still, interleaved, half_width, dtype, table_dtype
):
    d = 2 * half + still
    shape = [lambda h: (h, b, s, d), lambda h: (b, h, s, d), lambda h: (b, s, h, d)][axis]
    q, k = make(*shape(hq), dtype=dtype), make(*shape(hk), dtype=dtype, seed=1)
    w = half if half_width else 2 * half
    cos, sin = (make(b, s, w, dtype=table_dtype, seed=seed) for seed in (2, 3))
    options = {"unsqueeze_dim": axis, "interleaved": interleaved, "rotary_dim": 2 * half}
    before = q.clone(), k.clone()
    outs = apply_rotary(q, k, cos, sin, **options)
    for out, x, original in zip(outs, (q, k), before, strict=True):
        tables = (cos, sin) if dtype == F64 else (cos.float(), sin.float())
        expected = oracle(x, *tables, axis, interleaved, 2 * half).to(dtype)
        tolerance = {F64: 1e-12, F32: 1e-5, BF16: 1e-2, F16: 2e-3}[dtype]
        assert out.dtype == dtype and out.is_contiguous()
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        assert out[..., 2 * half :].equal(x[..., 2 * half :])
        assert x.equal(original)  # RO09
        assert out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or s == 0


def test_partial_rotation_leaves_the_rest():  # RO01
    q, k = make(1, 4, 8, 128, dtype=F32), make(1, 4, 8, 128, dtype=F32, seed=1)
    cos, sin = make(1, 8, 32, dtype=F32), make(1, 8, 32, dtype=F32, seed=1)
    for out, x in zip(apply_rotary(q, k, cos, sin), (q, k), strict=True):
        torch.testing.assert_close(out.double(), oracle(x, cos, sin), rtol=1e-5, atol=1e-5)
        assert out[..., 32:].equal(x[..., 32:])


def test_one_tensor_is_rotated_as_in_a_pair():  # RO03
    q, cos, sin = make(2, 4, 6, 8), make(2, 6, 8), make(2, 6, 8, seed=1)
    alone, nothing = apply_rotary(q, None, cos, sin)
    assert nothing is None and alone.equal(apply_rotary(q, q[:, :1], cos, sin)[0])


def test_every_sample_has_its_own_angles():  # RO04, RO14
    table = make(9, 8)
    ids = torch.tensor([[1, 1, 0, 1, 2], [0, 1, 2, 3, 4]])
    q, cos, sin = make(2, 3, 5, 8), table[ids], table.flip(0)[ids]
    out = apply_rotary(q, q, cos, sin)[0]
    torch.testing.assert_close(out, oracle(q, cos, sin))
    shared = apply_rotary(q, q, cos[:1], sin[:1])[0]
    torch.testing.assert_close(
        shared, oracle(q, cos[:1].expand(2, -1, -1), sin[:1].expand(2, -1, -1))
    )


def test_a_single_head_is_rotated():  # RO05
    q, k, cos, sin = (
        make(1, 4, 2, 128),
        make(1, 1, 2, 128),
        make(1, 2, 128),
        make(1, 2, 128, seed=1),
    )
    torch.testing.assert_close(apply_rotary(q, k, cos, sin)[1], oracle(k, cos, sin))


def test_half_split_and_interleaved_pairs():  # RO06
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    cos, sin = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]])
    assert apply_rotary(x, None, cos, sin)[0].flatten().tolist() == [-3, 2, 1, 4]
    out, _ = apply_rotary(x, None, cos, sin, interleaved=True)
    assert out.flatten().tolist() == [-2, 1, 3, 4]


def test_half_width_tables_equal_full_ones():  # RO07
    q, cos, sin = make(2, 3, 5, 8), make(2, 5, 4), make(2, 5, 4, seed=1)
    full = apply_rotary(q, q, cos.repeat(1, 1, 2), sin.repeat(1, 1, 2))[0]
    assert apply_rotary(q, q, cos, sin)[0].equal(full)


def test_float32_tables_are_not_rounded():  # RO08
    angles = torch.arange(0, 100000, 997, dtype=F64)[:, None] / 10 ** (torch.arange(32) / 8)
    cos, sin = (f(angles).repeat(1, 2)[None].float() for f in (torch.cos, torch.sin))
    q = make(1, 2, cos.shape[1], 64, dtype=BF16)
    out, _ = apply_rotary(q, None, cos, sin)
    exact = oracle(q, cos, sin)
    assert out.dtype == BF16
    ulp = torch.maximum(exact.abs(), torch.tensor(1e-3)) * 2**-8
    assert ((out.double() - exact).abs() <= ulp).all()


def test_strided_inputs():  # RO12
    big = make(2, 5, 3, 192)
    q, k = big[..., 128:].transpose(1, 2), big[:, :, :1, 64:128].transpose(1, 2)
    cos, sin = make(2, 5, 128)[..., ::2], make(2, 5, 64).mT.contiguous().mT
    dense = apply_rotary(*(x.contiguous() for x in (q, k, cos, sin)))
    for out, expected in zip(apply_rotary(q, k, cos, sin), dense, strict=True):
        assert out.equal(expected) and out.is_contiguous()


def test_the_axis_of_the_heads_is_the_callers():  # RO13
    q, cos, sin = make(2, 4, 4, 8), make(2, 4, 8), make(2, 4, 8, seed=1)
    for axis in (1, 2):
        out, _ = apply_rotary_transformers(q, q, cos, sin, axis)
        torch.testing.assert_close(out, oracle(q, cos, sin, axis))
    torch.testing.assert_close(
        apply_rotary_transformers(q, q, cos, sin, unsqueeze_dim=-2)[0], oracle(q, cos, sin, 2)
    )


def test_packed_layout_without_batch():  # RO17
    q, k, cos, sin = make(7, 4, 8), make(7, 2, 8), make(7, 8), make(7, 8, seed=1)
    expected = oracle(q[None], cos[None], sin[None], 2)[0]
    torch.testing.assert_close(apply_rotary(q, k, cos, sin)[0], expected)
    torch.testing.assert_close(apply_rotary(q, k, cos[None], sin[None])[0], expected)


def test_decode_with_expanded_tables():  # RO19
    q, cos, sin = make(3, 4, 1, 8), make(1, 1, 8), make(1, 1, 8, seed=1)
    expanded = apply_rotary(q, q, cos.expand(3, -1, -1), sin.expand(3, -1, -1))[0]
    torch.testing.assert_close(expanded, oracle(q, cos.expand(3, 1, 8), sin.expand(3, 1, 8)))


@pytest.mark.parametrize("casting", ["llama", "gemma", "none"])
@pytest.mark.parametrize("weight_dtype", [None, F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_norm_is_the_models_expression_before_the_rotation(casting, weight_dtype, dtype):
    q, k = make(2, 3, 5, 8, dtype=dtype), make(2, 1, 5, 8, dtype=dtype, seed=1)
    weights = (
        [None, None]
        if weight_dtype is None
        else [make(8, dtype=weight_dtype, seed=i) for i in (0, 1)]
    )
    cos, sin = make(2, 5, 8, dtype=F32), make(2, 5, 8, dtype=F32, seed=1)
    outs = qk_norm_rotary(q, k, *weights, cos, sin, 1e-5, offset=1.0, casting=casting)
    for out, x, weight in zip(outs, (q, k), weights, strict=True):
        normed = norm_oracle(x, weight, 1e-5, 1.0, casting)
        expected, _ = apply_rotary(normed, None, cos, sin)
        assert out.dtype == normed.dtype and out.equal(expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [8, 4, 3])
def test_gradcheck(interleaved, width):
    q, k = make(2, 2, 3, 8).requires_grad_(), make(2, 1, 3, 8, seed=1).requires_grad_()
    cos, sin = make(1, 3, width), make(1, 3, width, seed=1)
    weights = [make(8, seed=seed).requires_grad_() for seed in (3, 4)]
    options = {"interleaved": interleaved, "rotary_dim": 6 if width == 3 else None}
    torch.autograd.gradcheck(lambda q, k: apply_rotary(q, k, cos, sin, **options), (q, k))
    for casting in ("llama", "gemma", "none"):
        torch.autograd.gradcheck(
            lambda *args, casting=casting: qk_norm_rotary(
                *args, cos, sin, casting=casting, offset=0.5, **options
            ),
            (q, k, *weights),
        )


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=4)))
def test_gradients_of_any_subset(wanted):
    tensors = [make(2, 2, 3, 8), make(2, 1, 3, 8, seed=1), make(8), make(8, seed=1)]
    cos, sin = make(1, 3, 8), make(1, 3, 8, seed=1)

    def gradients(function, wanted):
        leaves = [
            x.clone().requires_grad_(needed) for x, needed in zip(tensors, wanted, strict=True)
        ]
        outs = function(*leaves)
        if any(out.requires_grad for out in outs):
            sum((out * make(*out.shape, seed=9)).sum() for out in outs).backward()
        return [leaf.grad for leaf in leaves]

    def ours(q, k, wq, wk):
        return qk_norm_rotary(q, k, wq, wk, cos, sin)

    def theirs(q, k, wq, wk):
        normed = (norm_oracle(x, w, 1e-6, 0.0, "llama") for x, w in ((q, wq), (k, wk)))
        return [
            oracle(x, cos, sin) if not x.requires_grad else _rotate(x, cos, sin) for x in normed
        ]

    for got, expected in zip(gradients(ours, wanted), gradients(theirs, wanted), strict=True):
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got, expected)


def _rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def test_second_order_gradients_raise():
    q, cos, sin = make(1, 1, 2, 4).requires_grad_(), make(1, 2, 4), make(1, 2, 4)
    out, _ = apply_rotary(q, None, cos, sin)
    (grad,) = torch.autograd.grad(out.pow(2).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="second-order"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_opcheck(dtype):
    q, k = (make(2, h, 3, 8, dtype=dtype).requires_grad_() for h in (2, 1))
    strided = make(2, 3, 2, 8, dtype=dtype).transpose(1, 2).requires_grad_()
    cos, sin, weight = make(1, 3, 8, dtype=dtype), make(1, 3, 8, dtype=dtype), make(8).float()
    rotation = (cos, sin, 1, False, False)
    torch.library.opcheck(ops._apply_rotary, (q, k, *rotation))
    torch.library.opcheck(ops._apply_rotary, (strided, None, *rotation))
    torch.library.opcheck(ops._apply_rotary_backward, (q.detach(), None, *rotation))
    weight = weight.requires_grad_()
    norm = (1e-6, 0.0, "llama", 1, False, False)
    torch.library.opcheck(ops._qk_norm_rotary, (strided, k, weight, None, cos, sin, *norm))
    args = [x.detach() for x in (q, k, weight)]
    args = (*args[:2], *args[:2], args[2], None, cos, sin, *norm, True, True, True, False)
    torch.library.opcheck(ops._qk_norm_rotary_backward, args)


@pytest.mark.parametrize("dynamic", [True, False])
def test_compiles_whole_and_once(dynamic):
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def f(q, k, weight, cos, sin):
        rotated = apply_rotary(q, k, cos, sin)
        return *rotated, *qk_norm_rotary(q, k, weight, None, cos, sin)

    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend=counter)
    first = 0
    for s in (3, 5, 7) if dynamic else (3, 3):
        tables = make(1, s, 8, dtype=F32), make(1, s, 8, dtype=F32, seed=1)
        weight = make(8, dtype=F32)
        mine, plain = (
            [make(2, h, s, 8, dtype=F32).requires_grad_() for h in (2, 1)] for _ in range(2)
        )
        outs, expected = compiled(*mine, weight, *tables), f(*plain, weight, *tables)
        for out, other in zip(outs, expected, strict=True):
            torch.testing.assert_close(out, other)
        sum(out.sum() for out in outs).backward()
        sum(out.sum() for out in expected).backward()
        for x, y in zip(mine, plain, strict=True):
            torch.testing.assert_close(x.grad, y.grad)
        first = first or counter.frame_count
    assert counter.frame_count == first


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8)])
def test_empty_tensors(shape):
    q, cos = make(*shape).requires_grad_(), make(1, shape[2], 8)
    weight = make(8).requires_grad_()
    rotated, _ = apply_rotary(q, None, cos, cos)
    normed, _ = qk_norm_rotary(q, None, weight, None, cos, cos)
    (rotated.sum() + normed.sum()).backward()
    assert rotated.shape == q.grad.shape == shape and weight.grad.eq(0).all()


def test_autocast_promotes_q_and_k():
    q, k, cos = make(1, 2, 3, 8, dtype=F32), make(1, 1, 3, 8, dtype=BF16), make(1, 3, 8, dtype=F32)
    with torch.autocast("cpu", dtype=BF16):
        outs = apply_rotary(q, k, cos, cos)
    assert [out.dtype for out in outs] == [F32, F32]
    with pytest.raises(TypeError, match=r"q torch.float32.*k torch.bfloat16"):
        apply_rotary(q, k, cos, cos)


Q, K, T = make(2, 4, 6, 8), make(2, 2, 6, 8), make(2, 6, 8)
ODD, WIDE, MANY, TENSOR = make(1, 2, 3, 33), make(2, 6, 10), make(4, 6, 8), torch.tensor(8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: apply_rotary(ODD, None, ODD[:, 0], ODD[:, 0]), ValueError, "even.*33"),
        (lambda: apply_rotary(Q, K, WIDE, WIDE), ValueError, r"10.*\(2, 6, 10\).*\(2, 4, 6, 8\)"),
        (lambda: apply_rotary(Q, K, T, T[..., :4]), ValueError, r"\(2, 6, 8\).*\(2, 6, 4\)"),
        (lambda: apply_rotary(Q, K, T[:, :5], T[:, :5]), ValueError, "length 6.*5"),
        (lambda: apply_rotary(Q, K, MANY, MANY), ValueError, "batch 1 or 2"),
        (lambda: apply_rotary(Q, K, T[0], T[0]), ValueError, r"\[b or 1, s, w\]"),
        (lambda: apply_rotary(Q, K[:, :, :5], T, T), ValueError, r"k: .*\(2, 2, 5, 8\)"),
        (lambda: apply_rotary(Q[0, 0], None, T, T), ValueError, "q: expected 3 or 4"),
        (lambda: apply_rotary(Q, K, T, T, unsqueeze_dim=3), ValueError, "unsqueeze_dim"),
        (lambda: apply_rotary(Q, K, T, T, rotary_dim=6), ValueError, "rotary_dim"),
        (lambda: apply_rotary(Q, K, T, T, rotary_dim=TENSOR), TypeError, "rotary_dim.*tensor"),
        (lambda: apply_rotary(Q, K, T, T, interleaved=1), TypeError, "interleaved"),
        (lambda: apply_rotary(Q, K, T.requires_grad_(), T), NotImplementedError, "cos.*gradient"),
        (lambda: apply_rotary(Q.long(), None, T, T), TypeError, "q: .*int64"),
        (lambda: apply_rotary(Q, K, T.to("meta"), T), ValueError, "cos on meta"),
        (lambda: qk_norm_rotary(Q, K, make(1), None, T, T), ValueError, "q_weight"),
        (lambda: qk_norm_rotary(Q, None, None, make(8), T, T), ValueError, "k_weight"),
        (lambda: qk_norm_rotary(Q, K, None, None, T, T, TENSOR), TypeError, "eps.*tensor"),
        (lambda: qk_norm_rotary(Q, K, None, None, T, T, None), TypeError, "eps"),
        (lambda: qk_norm_rotary(Q, K, None, None, T, T, offset=TENSOR), TypeError, "offset"),
        (lambda: qk_norm_rotary(Q, K, None, None, T, T, casting="bf16"), ValueError, "casting"),
        (lambda: apply_rotary(Q, K, T, T, scale=2), TypeError, "scale"),
    ],
)  # fmt: skip
def test_refusals_name_the_argument(call, error, message):
    T.requires_grad_(False)
    with pytest.raises(error, match=message):
        call()
