"""flash_attention as a torch op: registration, compile, autocast, dispatch and refusals."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch._dynamo.testing
from attention_oracle import oracle
from tpu_kernels.kernels.flash_attention import ops, packed
from tpu_kernels.kernels.flash_attention.ops import flash_attention
from tpu_kernels.kernels.flash_attention.packed import flash_attention_packed

CU = torch.tensor([0, 2, 2, 5], dtype=torch.int32)


def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def qkv(dtype: torch.dtype = torch.float32, **kwargs) -> tuple[torch.Tensor, ...]:
    shapes = (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6)
    return tuple(make(*shape, dtype=dtype, **kwargs) for shape in shapes)


def masks() -> dict[str, torch.Tensor]:
    return {
        "q_segment_ids": torch.tensor([[0, 0, 1, 1, 2]] * 2),
        "kv_segment_ids": torch.tensor([[0, 0, 0, 1, 1, 1, 3]] * 2),
        "mask": make(2, 1, 5, 7) < 1,
        "kv_lengths": torch.tensor([7, 3]),
    }


def dense_arguments(heads_first: bool) -> tuple:
    q, k, v = (x.requires_grad_() for x in qkv())
    if heads_first:
        q, k, v = (x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v))
    ids = masks()
    tensors = (
        ids["q_segment_ids"].int(),
        ids["kv_segment_ids"].int(),
        ids["mask"],
        ids["kv_lengths"].int(),
    )
    return q, k, v, make(4).requires_grad_(), *tensors, True, 3, -1, 0.4, 2.0, heads_first


def packed_arguments() -> tuple:
    q, k, v = (x[0].requires_grad_() for x in qkv())
    return q, k, v, make(4).requires_grad_(), CU, CU, True, -1, -1, 0.4, 0.0


def backward_arguments(arguments: tuple, op) -> tuple:
    arguments = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
    out, lse = op(*arguments)
    grad_out = torch.ones_like(out)
    return grad_out, *arguments[:3], out, lse, *arguments[3:], True, True, True


@pytest.mark.parametrize("heads_first", [False, True])
def test_opcheck_dense(heads_first):  # DV07
    arguments = dense_arguments(heads_first)
    torch.library.opcheck(ops._flash_attention, arguments)
    backward = backward_arguments(arguments, ops._flash_attention)
    torch.library.opcheck(ops._flash_attention_backward, backward)
    torch.library.opcheck(ops._flash_attention_backward, (*backward[:-3], False, True, False))


def test_opcheck_packed():
    arguments = packed_arguments()
    torch.library.opcheck(packed._flash_attention_packed, arguments)
    backward = backward_arguments(arguments, packed._flash_attention_packed)
    torch.library.opcheck(packed._flash_attention_packed_backward, backward)


def test_gradcheck():
    q, k, v = (x.requires_grad_() for x in qkv(torch.float64))
    sinks = make(4, dtype=torch.float64).requires_grad_()
    dense = functools.partial(
        flash_attention, causal=True, window_size=(4, -1), softcap=2.0, **masks()
    )
    assert torch.autograd.gradcheck(
        lambda q, k, v, sinks: dense(q, k, v, sinks=sinks), (q, k, v, sinks)
    )
    assert torch.autograd.gradcheck(
        lambda q, k, v, sinks: flash_attention_packed(
            q[0], k[0], v[0], CU, CU, 3, 3, causal=True, sinks=sinks
        ),
        (q, k, v, sinks),
    )


def test_heads_first_is_the_same_attention():
    q, k, v = qkv()
    out = ops.attend(
        *(x.transpose(1, 2) for x in (q, k, v)), heads_first=True, causal=True, **masks()
    )
    torch.testing.assert_close(out, flash_attention(q, k, v, causal=True, **masks()))


@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=4)))
def test_any_subset_of_gradients(needed):
    inputs = [*qkv(), make(4)]
    everything = [x.clone().requires_grad_() for x in inputs]
    flash_attention(*everything[:3], sinks=everything[3]).square().sum().backward()
    for x, is_needed in zip(inputs, needed, strict=True):
        x.requires_grad_(is_needed)
    out = flash_attention(*inputs[:3], sinks=inputs[3])
    assert out.requires_grad == any(needed)
    if any(needed):
        out.square().sum().backward()
    for x, wanted, is_needed in zip(inputs, everything, needed, strict=True):
        if is_needed:
            torch.testing.assert_close(x.grad, wanted.grad)
        else:
            assert x.grad is None


def test_second_order_gradient_is_refused():
    q, k, v = (x.requires_grad_() for x in qkv())
    out = flash_attention(q, k, v)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="flash_attention_backward"):
        grad.sum().backward()


def test_lse_has_no_gradient():
    q, k, v = (x.requires_grad_() for x in qkv())
    out, lse = flash_attention(q, k, v, return_lse=True)
    assert out.requires_grad and not lse.requires_grad
    (out.sum() + lse.sum()).backward()
    alone = torch.autograd.grad(flash_attention(q, k, v).sum(), [q, k, v])
    torch.testing.assert_close([q.grad, k.grad, v.grad], list(alone))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_without_graph_break_or_recompilation(backend, dynamic):  # DV04, DV05
    def call(q, k, v, sinks, masks):
        dense = flash_attention(q * 2, k, v, causal=True, sinks=sinks, return_lse=True, **masks)
        packed = flash_attention_packed(q[0] * 2, k[0], v[0], CU, CU, 3, 3, sinks=sinks)
        return dense[0] + packed, dense[1]

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=counter)
    for seed in range(3):
        inputs = [x.requires_grad_() for x in (*qkv(seed=seed), make(4, seed=seed))]
        copies = [x.detach().clone().requires_grad_() for x in inputs]
        out, lse = compiled(*inputs, masks())
        expected, expected_lse = call(*copies, masks())
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, expected_lse)
        out.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close([x.grad for x in inputs], [x.grad for x in copies])
        if seed == 0:
            compiled_once = counter.frame_count
    assert counter.frame_count == compiled_once
    if dynamic:
        q, k, v = (torch.cat([x, x, x]) for x in qkv())
        longer = {name: torch.cat([x, x, x]) for name, x in masks().items()}
        torch.testing.assert_close(
            compiled(q, k, v, make(4), longer), call(q, k, v, make(4), longer)
        )
        assert counter.frame_count <= compiled_once + 1


def test_autocast_promotes_as_torch_does():  # FA39, DV12
    q, k, v = qkv()
    v16 = v.bfloat16()
    with pytest.raises(TypeError, match=r"q torch\.float32.*v torch\.bfloat16"):
        flash_attention(q, k, v16)
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attention(q, k, v16)
        packed_out = flash_attention_packed(q[0], k[0], v16[0], CU, CU, 3, 3)
    assert out.dtype == packed_out.dtype == torch.float32
    torch.testing.assert_close(out, flash_attention(q, k, v16.float()))
    low = [x.bfloat16().requires_grad_() for x in (q, k, v)]
    out = flash_attention(*low)
    out.backward(torch.ones_like(out).float())
    assert all(x.grad.dtype == torch.bfloat16 for x in low)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64, torch.bool])
def test_unsupported_dtype_is_named(dtype):  # FA34
    q = torch.zeros(1, 2, 1, 4).to(dtype)
    with pytest.raises(TypeError, match=f"q: expected dtype .*got {dtype}"):
        flash_attention(q, q, q)


def test_mixed_dtypes_are_named():  # FA34
    q, k, v = qkv()
    with pytest.raises(TypeError, match=r"q torch\.bfloat16, k torch\.float32"):
        flash_attention(q.bfloat16(), k, v)


def test_sinks_of_another_float_dtype():
    q, k, v = qkv(torch.bfloat16)
    sinks = make(4).requires_grad_()
    out = flash_attention(q, k, v, sinks=sinks)
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert sinks.grad.dtype == torch.float32


Q, K, V = qkv()
IDS = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, 7, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": None}, TypeError, "q: expected a tensor, got NoneType"),
        ({"q": Q[0]}, ValueError, r"q: expected 4 dimensions, got shape \(5, 4, 8\)"),
        ({"k": K[:1], "v": V[:1]}, ValueError, "k: expected the batch size of q, 2, got 1"),
        ({"k": K[..., :4]}, ValueError, "k: expected the head size of q, 8, got 4"),
        ({"v": V[:, :6]}, ValueError, "v: expected shape"),
        ({"v": V[:, :, :1]}, ValueError, "v: expected shape"),
        ({"k": K[:, :, :0], "v": V[:, :, :0]}, ValueError, "at least one head"),
        ({"q": Q[:, :, :3]}, ValueError, "q: expected heads that are a multiple of k's 2, got 3"),
        ({"causal": 1}, TypeError, "causal: expected True or False, got 1"),
        ({"softmax_scale": torch.tensor(1.0)}, TypeError, "softmax_scale.*got a tensor"),
        ({"softcap": torch.tensor(1.0)}, TypeError, "softcap.*got a tensor"),
        ({"softcap": -1.0}, ValueError, "softcap: expected 0 or None.*got -1.0"),
        ({"window_size": 3}, TypeError, "window_size: expected a tuple"),
        ({"window_size": (1, 2, 3)}, TypeError, "window_size: expected a tuple"),
        ({"window_size": (1.5, 0)}, TypeError, "window_size: expected a Python int, got 1.5"),
        ({"window_size": (torch.tensor(1), 0)}, TypeError, "window_size.*got a tensor"),
        ({"window_size": (-2, 0)}, ValueError, "window_size: expected sizes >= 0.*got -2"),
        ({"dropout_p": 0.1}, NotImplementedError, "dropout_p.*got 0.1"),
        ({"dropout_p": torch.tensor(0.1)}, TypeError, "dropout_p.*got a tensor"),
        ({"alibi_slopes": torch.ones(4)}, TypeError, "alibi_slopes"),
        ({"sinks": torch.zeros(2)}, ValueError, "sinks: expected shape"),
        ({"sinks": torch.zeros(4).int()}, TypeError, "sinks: expected dtype"),
        ({"sinks": 0.5}, TypeError, "sinks: expected a tensor, got float"),
        ({"q_segment_ids": IDS[0]}, ValueError, "q_segment_ids, kv_segment_ids: expected both"),
        ({"kv_segment_ids": IDS[1]}, ValueError, "q_segment_ids, kv_segment_ids: expected both"),
        (
            {"q_segment_ids": IDS[1], "kv_segment_ids": IDS[1]},
            ValueError,
            r"q_segment_ids: expected shape \[b, sq\]",
        ),
        (
            {"q_segment_ids": IDS[0].float(), "kv_segment_ids": IDS[1]},
            TypeError,
            "q_segment_ids: expected dtype int32",
        ),
        (
            {"q_segment_ids": IDS[0] + 2**31, "kv_segment_ids": IDS[1]},
            ValueError,
            "q_segment_ids: expected values from -2147483648 to 2147483647",
        ),
        ({"mask": [[True]]}, TypeError, "mask: expected a tensor, got list"),
        ({"mask": torch.ones(5, 6).bool()}, ValueError, "mask: expected a shape broadcastable"),
        ({"mask": torch.ones(2, 2, 5, 7).bool()}, ValueError, "mask: expected a shape"),
        ({"mask": torch.ones(1, 2, 4, 5, 7).bool()}, ValueError, "mask: expected a shape"),
        ({"kv_lengths": torch.tensor([8, 1])}, ValueError, "kv_lengths: expected values from 0"),
        ({"kv_lengths": torch.tensor([-1, 1])}, ValueError, "kv_lengths: expected values from 0"),
        ({"kv_lengths": torch.tensor([1])}, ValueError, r"kv_lengths: expected shape \[b\]"),
        ({"kv_lengths": torch.tensor([1.0, 2])}, TypeError, "kv_lengths: expected dtype int32"),
        ({"kv_lengths": 3}, TypeError, "kv_lengths"),
        ({"return_lse": 1}, TypeError, "return_lse: expected True or False"),
        ({"k": K.to("meta")}, ValueError, "q on cpu, k on meta"),
        ({"kv_lengths": IDS[0][:, 0].to("meta")}, ValueError, "kv_lengths on meta"),
    ],
)
def test_refusals_name_the_argument(change, error, message):  # FA42, DV02, DV17
    with pytest.raises(error, match=message):
        flash_attention(**{"q": Q, "k": K, "v": V, **change})


def test_defaults_of_unsupported_options_pass():  # FA42
    out = flash_attention(Q, K, V, dropout_p=0, softcap=None, window_size=(None, -1))
    assert torch.equal(out, flash_attention(Q, K, V))


def test_inputs_are_neither_changed_nor_returned():  # DV14
    inputs = [*qkv(), make(4), *masks().values()]
    copies = [x.clone() for x in inputs]
    q, k, v, sinks, *ids = inputs
    out, lse = flash_attention(
        q, k, v, sinks=sinks, return_lse=True, **dict(zip(masks(), ids, strict=True))
    )
    assert all(torch.equal(a, b) for a, b in zip(inputs, copies, strict=True))
    storages = {x.untyped_storage().data_ptr() for x in inputs}
    assert out.untyped_storage().data_ptr() not in storages
    assert lse.untyped_storage().data_ptr() not in storages


def test_meta_tensors_have_the_right_shapes():
    q, k, v = (x.to("meta").requires_grad_() for x in qkv(torch.bfloat16))
    out, lse = flash_attention(q, k, v, return_lse=True)
    assert out.shape == (2, 5, 4, 6) and out.dtype == torch.bfloat16 and out.is_meta
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32
    out.sum().backward()
    assert [x.grad.shape for x in (q, k, v)] == [x.shape for x in (q, k, v)]


def test_strided_inputs():
    big = make(2, 7, 6, 32, dtype=torch.float64)
    q, k, v = big[:, :5, :4, ::4], big[:, :, 4:, 3:19:2], big.flip(0)[:, :, :2, 20:26]
    torch.testing.assert_close(
        flash_attention(q, k, v, causal=True), oracle(q, k, v, causal=True)[0]
    )
