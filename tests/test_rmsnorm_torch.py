"""rms_norm and its kin as torch ops: registration, gradients, compile, autocast and refusals."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch._dynamo.testing
from test_rmsnorm import make
from tpu_kernels.kernels.rmsnorm import ops
from tpu_kernels.kernels.rmsnorm.ops import add_rms_norm, rms_norm, rms_norm_gated

X, RESIDUAL, GATE, WEIGHT = make(2, 3, 8), make(2, 3, 8, seed=1), make(2, 3, 8, seed=2), make(8)


def everything(x, residual, gate, weight, **kwargs):
    """Every public function, forward and gate order."""
    return (
        rms_norm(x, weight, **kwargs),
        *add_rms_norm(x, residual, weight, **kwargs),
        rms_norm_gated(x, gate, weight, **kwargs),
        rms_norm_gated(x, gate, weight, activation="sigmoid", gate_first=True, **kwargs),
    )


@pytest.mark.parametrize("weight", [WEIGHT, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(weight, dtype):  # DV07, DV13
    x, residual, gate = (t.to(dtype, copy=True).requires_grad_() for t in (X, RESIDUAL, GATE))
    strided = residual.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    weight = None if weight is None else weight.clone().requires_grad_()
    statics = (1e-6, 1.0, "llama")
    gated = (1e-6, "silu", False, 1.0, "llama")
    torch.library.opcheck(ops._rms_norm, (x, weight, *statics))
    torch.library.opcheck(ops._add_rms_norm, (x, strided, weight, *statics))
    torch.library.opcheck(ops._rms_norm_gated, (x, gate, weight, *gated))
    x, gate = x.detach(), gate.detach()
    weight = None if weight is None else weight.detach()
    has_weight = weight is not None
    for needs in ((True, has_weight), (False, has_weight), (True, False)):
        torch.library.opcheck(ops._rms_norm_backward, (x, x, weight, *statics, *needs))
        arguments = (x, None, x, weight, *statics, *needs)
        torch.library.opcheck(ops._add_rms_norm_backward, arguments)
        arguments = (x, x, gate, weight, *gated, needs[0], not needs[0], needs[1])
        torch.library.opcheck(ops._rms_norm_gated_backward, arguments)


@pytest.mark.parametrize("casting", ops.CASTINGS)
@pytest.mark.parametrize("has_weight", [True, False])
def test_gradcheck(casting, has_weight):
    tensors = [t.double().requires_grad_() for t in (X, RESIDUAL, GATE)]
    weight = WEIGHT.double().requires_grad_() if has_weight else None
    assert torch.autograd.gradcheck(
        lambda x, residual, gate, *weight: everything(
            x, residual, gate, *(weight or (None,)), offset=1.0, casting=casting
        ),
        (*tensors, *([weight] if has_weight else [])),
    )


@pytest.mark.parametrize("needed", list(itertools.product([False, True], repeat=4)))
def test_any_subset_of_gradients(needed):
    inputs = [t.clone() for t in (X, RESIDUAL, GATE, WEIGHT)]
    wanted = [t.clone().requires_grad_() for t in inputs]
    sum(out.square().sum() for out in everything(*wanted)).backward()
    for tensor, is_needed in zip(inputs, needed, strict=True):
        tensor.requires_grad_(is_needed)
    outs = everything(*inputs)
    if any(needed):
        sum(out.square().sum() for out in outs if out.requires_grad).backward()
    for tensor, reference, is_needed in zip(inputs, wanted, needed, strict=True):
        if is_needed:
            torch.testing.assert_close(tensor.grad, reference.grad)
        else:
            assert tensor.grad is None


def test_frozen_weight_costs_no_reduction():  # RN12
    x, weight = X.clone().requires_grad_(), WEIGHT.clone()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w: rms_norm(x, w).square().sum(),
        backend=torch._dynamo.backends.common.aot_autograd(fw_compiler=backend),
        fullgraph=True,
    )
    compiled(x, weight).backward()
    (call,) = (
        node
        for graph in graphs
        for node in graph.graph.nodes
        if "rms_norm_backward" in str(node.target)
    )
    assert call.args[-2:] == (True, False)
    gradient = ops.reference.rms_norm_backward(X, X, WEIGHT, 1e-6, 0.0, "llama", True, False)[1]
    assert gradient.shape == (0,)


def test_second_order_gradient_is_refused():
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad(rms_norm(x, WEIGHT).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="rms_norm_backward"):
        grad.sum().backward()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_without_graph_break_or_recompilation(backend, dynamic):  # DV04, DV05, RN19
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(everything, fullgraph=True, dynamic=dynamic, backend=counter)
    for seed in range(3):
        tensors = [make(4, 64, dtype=torch.bfloat16, seed=seed + i) for i in range(3)]
        tensors.append(make(64, dtype=torch.bfloat16))
        inputs, copies = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
        outs, expected = compiled(*inputs), everything(*copies)
        assert all(torch.equal(*pair) for pair in zip(outs, expected, strict=True))
        for results in (outs, expected):
            torch.autograd.backward(results, [torch.ones_like(out) for out in results])
        for found, wanted in zip(inputs, copies, strict=True):  # a sum of five, rounded otherwise
            torch.testing.assert_close(found.grad, wanted.grad, rtol=0.02, atol=0.02)
        if seed == 0:
            compiled_once = counter.frame_count
    assert counter.frame_count == compiled_once
    longer = [make(9, 64) for _ in range(3)]
    compiled(*(t.bfloat16() for t in longer), make(64).bfloat16())
    assert counter.frame_count <= compiled_once + 1


def test_compiles_for_changing_eps():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, eps: rms_norm(x, None, eps), fullgraph=True)
    for eps in (1e-6, 1e-5, 1e-4):
        assert torch.equal(compiled(X, eps), rms_norm(X, None, eps))


def test_under_autocast():  # DV12
    with torch.autocast("cpu", torch.bfloat16):
        outs = everything(X, RESIDUAL.bfloat16(), GATE.bfloat16(), WEIGHT)
        low = rms_norm(X.bfloat16(), WEIGHT)
    assert all(out.dtype == torch.float32 for out in outs) and low.dtype == torch.float32


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_result_dtype(dtype, weight_dtype):  # RN15
    x, weight = X.to(dtype), WEIGHT.to(weight_dtype)
    promoted = torch.promote_types(dtype, weight_dtype)
    for casting in ops.CASTINGS:
        expected = promoted if casting == "llama" else dtype
        assert rms_norm(x, weight, casting=casting).dtype == expected
        assert rms_norm_gated(x, x, weight, gate_first=True, casting=casting).dtype == expected
        assert rms_norm_gated(x, x, weight, casting=casting).dtype == dtype
    assert rms_norm(x, None).dtype == dtype


def test_inputs_unchanged_and_results_new():  # DV14
    inputs = [t.clone() for t in (X, RESIDUAL, GATE, WEIGHT)]
    before = [t.clone() for t in inputs]
    storages = {t.untyped_storage().data_ptr() for t in inputs}
    for casting in ops.CASTINGS:
        outs = (*everything(*inputs, casting=casting), rms_norm(inputs[0], None, casting=casting))
        own = {out.untyped_storage().data_ptr() for out in outs}
        assert len(own) == len(outs) and not own & storages
    assert all(torch.equal(*pair) for pair in zip(inputs, before, strict=True))


def test_meta_tensors():  # RN23
    tensors = [t.to("meta").requires_grad_() for t in (X, RESIDUAL, GATE, WEIGHT)]
    outs = everything(*tensors)
    assert all(out.device.type == "meta" and out.shape == X.shape for out in outs)
    sum(out.sum() for out in outs).backward()
    assert all(t.grad.shape == t.shape for t in tensors)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rms_norm(X, WEIGHT, None), TypeError, "eps: expected a Python number, got None"),
        (lambda: rms_norm(X, WEIGHT, torch.tensor(1e-6)), TypeError, "eps.*got a tensor"),
        (lambda: rms_norm(X, WEIGHT, offset=torch.ones(())), TypeError, "offset.*got a tensor"),
        (lambda: rms_norm(X, WEIGHT, True), TypeError, "eps.*got True"),
        (lambda: rms_norm(X, WEIGHT, casting="llm"), ValueError, "casting.*'gemma'.*'llm'"),
        (lambda: rms_norm(X, WEIGHT, scale=1), TypeError, "scale"),
        (lambda: rms_norm(X, make(1)), ValueError, r"weight: expected shape \[d\] = \(8,\), got"),
        (lambda: rms_norm(X, make(2, 4)), ValueError, "weight: expected 1 dimensions"),
        (lambda: rms_norm(X, 1.0), TypeError, "weight: expected a tensor, got float"),
        (lambda: rms_norm(X[0, 0, 0], WEIGHT), ValueError, "x: expected 1 dimensions"),
        (lambda: rms_norm([1.0], None), TypeError, "x: expected a tensor, got list"),
        (lambda: rms_norm(X.int(), WEIGHT), TypeError, "x: expected dtype .*got torch.int32"),
        (lambda: rms_norm(X, WEIGHT.int()), TypeError, "weight: expected dtype"),
        (lambda: add_rms_norm(X, X[:1], WEIGHT), ValueError, "residual: expected shape that of x"),
        (lambda: rms_norm_gated(X, X[0], WEIGHT), ValueError, "gate: expected"),
        (lambda: rms_norm_gated(X, None, WEIGHT), TypeError, "gate: expected a tensor"),
        (
            lambda: rms_norm_gated(X, X, WEIGHT, activation="gelu"),
            ValueError,
            "activation: expected one of 'silu', 'sigmoid'",
        ),
        (lambda: rms_norm_gated(X, X, WEIGHT, gate_first=1), TypeError, "gate_first"),
        (
            lambda: rms_norm(X.to("meta"), WEIGHT),
            ValueError,
            "one device, got x on meta, weight on cpu",
        ),
    ],
)
def test_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
