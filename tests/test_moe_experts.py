"""moe_experts: reference and kernels against float64 autograd, and the op's contract."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import EXPERTS_EDGE, ExpertsCase, experts_inputs, ids
from experts_oracle import gate
from interpret import run_kernel
from tpu_kernels.kernels.moe_experts import ops, reference
from tpu_kernels.kernels.moe_experts.ops import moe_experts

NAMES = (
    "hidden_states",
    "top_k_index",
    "top_k_weights",
    "gate_up_proj",
    "down_proj",
    "gate_up_bias",
    "down_bias",
)
DIFFERENTIABLE = tuple(name for name in NAMES if name != "top_k_index")


def options(case: ExpertsCase) -> tuple:
    return case.activation, case.transposed, case.has_gate, case.e


def dense(case: ExpertsCase, inputs: dict) -> torch.Tensor:
    """Every expert on every token, in the inputs' dtype, by torch's own operations."""
    x = inputs["hidden_states"]
    index, weights = inputs["top_k_index"], inputs["top_k_weights"]
    weights = torch.where(index < case.e, weights, 0)
    out = torch.zeros_like(x)
    for e in range(case.e):
        w1, w2 = inputs["gate_up_proj"][e], inputs["down_proj"][e]
        z = x @ (w1 if case.transposed else w1.T)
        if case.bias:
            z = z + inputs["gate_up_bias"][e]
        y = gate(z, case) @ (w2 if case.transposed else w2.T)
        if case.bias:
            y = y + inputs["down_bias"][e]
        out = out + y * torch.where(index == e, weights, 0).sum(-1, keepdim=True)
    return out


def exact(case: ExpertsCase, inputs: dict, grad_out: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """Output and gradients in float64 by autograd through `dense`."""
    wide = {
        name: None if x is None else x.double() if x.is_floating_point() else x
        for name, x in inputs.items()
    }
    leaves = {n: wide[n].requires_grad_() for n in DIFFERENTIABLE if wide[n] is not None}
    out = dense(case, wide)
    if not out.requires_grad:  # no expert, so nothing depends on anything
        return out, {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out.double())
    return out.detach(), dict(zip(leaves, grads, strict=True))


def assert_close(
    actual: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, what: str, kernel: bool = False
) -> None:
    """Within a few roundings of intermediate values, relative to the largest value."""
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    roundings = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 4e-3}
    # The reference rounds once at the end; the kernel also rounds the gate's result for the MXU.
    tolerance = roundings.get(dtype, 2e-2 if kernel else 5e-3)
    error = (actual.double() - right).abs().max() / right.abs().max().clamp(min=1e-30)
    assert error <= tolerance, f"{what}: relative error {error:.2e} above {tolerance}"


def run_reference(case: ExpertsCase, inputs: dict, grad_out: torch.Tensor):
    values = [inputs[name] for name in NAMES]
    out = reference.moe_experts(*values, *options(case))
    return out, reference.moe_experts_backward(grad_out, *values, *options(case), *needs(inputs))


def run_interpreted(case: ExpertsCase, inputs: dict, grad_out: torch.Tensor):
    from tpu_kernels.kernels.moe_experts import lowering

    values = [inputs[name] for name in NAMES]
    out = run_kernel(lowering.moe_experts, *values, *options(case))
    grads = run_kernel(
        lowering.moe_experts_backward, grad_out, *values, *options(case), *needs(inputs)
    )
    return out, grads


def needs(inputs: dict) -> tuple[bool, ...]:
    return tuple(inputs[name] is not None for name in DIFFERENTIABLE)


@pytest.mark.parametrize("runner", [run_reference, run_interpreted])
@pytest.mark.parametrize("case", EXPERTS_EDGE, ids=ids(EXPERTS_EDGE))
def test_output_and_gradients_equal_float64(case: ExpertsCase, runner) -> None:
    inputs = experts_inputs(case)
    dtype = getattr(torch, case.dtype)
    grad_out = torch.randn(case.t, case.h).to(dtype)
    right, right_grads = exact(case, inputs, grad_out)
    out, grads = runner(case, inputs, grad_out)
    assert out.dtype == dtype
    kernel = runner is run_interpreted
    assert_close(out, right, dtype, "output", kernel)
    for name, grad in zip(DIFFERENTIABLE, grads, strict=True):
        if inputs[name] is None:
            assert grad.shape == (0,)
            continue
        assert grad.dtype == inputs[name].dtype
        assert_close(grad, right_grads[name], dtype, f"gradient of {name}", kernel)
    away = inputs["top_k_index"] >= case.e
    assert (grads[1][away] == 0).all()


@pytest.mark.parametrize("runner", [run_reference, run_interpreted])
@pytest.mark.parametrize("t", [5, 40])
def test_nan_stays_with_its_token_and_its_expert(t: int, runner) -> None:
    case = ExpertsCase("nan", "NaN next door", t, 4, 128, 128, 2)
    inputs = experts_inputs(case)
    inputs["top_k_index"][:] = torch.tensor([0, 1], dtype=torch.int32)
    inputs["top_k_index"][2] = torch.tensor([1, 2], dtype=torch.int32)
    inputs["hidden_states"][0] = float("nan")  # poisons token 0, experts 0 and 1
    inputs["down_proj"][2] = float("nan")  # poisons token 2
    inputs["gate_up_proj"][3] = float("nan")  # poisons nobody
    clean_tokens = [token for token in range(t) if token not in (0, 2)]
    out, grads = runner(case, inputs, torch.ones(t, case.h).bfloat16())
    assert torch.isfinite(out[clean_tokens]).all()
    assert torch.isnan(out[[0, 2]]).all()
    assert torch.isfinite(grads[0][clean_tokens]).all()
    assert torch.isfinite(grads[1][clean_tokens]).all()
    assert (grads[2][3] == 0).all() and (grads[3][3] == 0).all()


@pytest.mark.parametrize("runner", [run_reference, run_interpreted])
def test_the_same_expert_twice_counts_twice(runner) -> None:
    case = ExpertsCase("twice", "routing", 4, 3, 128, 128, 2, dtype="float32")
    inputs = experts_inputs(case)
    inputs["top_k_index"][:] = 1
    grad_out = torch.randn(case.t, case.h)
    right, right_grads = exact(case, inputs, grad_out)
    out, grads = runner(case, inputs, grad_out)
    assert_close(out, right, torch.float32, "output")
    for name, grad in zip(DIFFERENTIABLE, grads, strict=True):
        if inputs[name] is not None:
            assert_close(grad, right_grads[name], torch.float32, name)


@pytest.mark.parametrize(
    "change", [{"t": 0}, {"h": 0}, {"i": 0}, {"topk": 0}, {"e": 0, "topk": 0}], ids=str
)
@pytest.mark.parametrize("runner", [run_reference, run_interpreted])
def test_sizes_of_zero(change: dict, runner) -> None:
    base = ExpertsCase("zero", "limits", 3, 2, 8, 4, 1, bias=True, dtype="float32")
    case = replace(base, **change)
    inputs = experts_inputs(replace(case, h=case.h or 1, i=case.i or 1, t=case.t or 1))
    shapes = {
        "hidden_states": (case.t, case.h),
        "top_k_index": (case.t, case.topk),
        "top_k_weights": (case.t, case.topk),
        "gate_up_proj": case.gate_up_shape,
        "down_proj": case.down_shape,
        "gate_up_bias": (case.e, case.width),
        "down_bias": (case.e, case.h),
    }
    for name, shape in shapes.items():
        inputs[name] = inputs[name][tuple(slice(size) for size in shape)].contiguous()
    grad_out = torch.randn(case.t, case.h)
    right, right_grads = exact(case, inputs, grad_out)
    out, grads = runner(case, inputs, grad_out)
    torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-6)
    for name, grad in zip(DIFFERENTIABLE, grads, strict=True):
        torch.testing.assert_close(grad.double(), right_grads[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("needed", range(6))
def test_each_gradient_alone(needed: int) -> None:
    case = ExpertsCase("subset", "PEFT", 6, 3, 8, 4, 2, bias=True, dtype="float32")
    inputs = experts_inputs(case)
    name = DIFFERENTIABLE[needed]
    grad_out = torch.randn(case.t, case.h)
    _, right = exact(case, inputs, grad_out)
    inputs = {n: None if x is None else x.detach() for n, x in inputs.items()}
    inputs[name].requires_grad_()
    out = call(case, inputs)
    (grad,) = torch.autograd.grad(out, inputs[name], grad_out)
    assert_close(grad, right[name], torch.float32, name)


def call(case: ExpertsCase, inputs: dict) -> torch.Tensor:
    positional = [inputs[name] for name in NAMES[:5]]
    return moe_experts(
        *positional,
        gate_up_bias=inputs["gate_up_bias"],
        down_bias=inputs["down_bias"],
        activation=case.activation,
        transposed=case.transposed,
        has_gate=case.has_gate,
    )


def test_gradcheck() -> None:
    case = ExpertsCase("gradcheck", "", 5, 3, 4, 3, 2, bias=True, dtype="float64", num_routed=4)
    inputs = experts_inputs(case)
    inputs["top_k_weights"] = torch.rand(case.t, case.topk, dtype=torch.float64)
    leaves = [inputs[name].requires_grad_() for name in DIFFERENTIABLE]

    def function(*values: torch.Tensor) -> torch.Tensor:
        return call(case, inputs | dict(zip(DIFFERENTIABLE, values, strict=True)))

    assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_opcheck(dtype: str) -> None:
    case = ExpertsCase("opcheck", "", 5, 3, 4, 3, 2, dtype=dtype)
    inputs = experts_inputs(case)
    values = [inputs[name] for name in NAMES]
    arguments = (*values, *options(case))
    tolerance = {"rtol": 2e-2, "atol": 2e-2}
    grad_out = torch.randn(case.t, case.h).to(getattr(torch, dtype))
    torch.library.opcheck(
        ops._moe_experts_backward, (grad_out, *arguments, *needs(inputs)), **tolerance
    )
    for name in ("hidden_states", "top_k_weights", "gate_up_proj", "down_proj"):
        inputs[name].requires_grad_()
    torch.library.opcheck(ops._moe_experts, arguments, **tolerance)


@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled_training_step(dynamic: bool) -> None:
    torch._dynamo.reset()
    case = ExpertsCase("compiled", "", 6, 3, 8, 4, 2, dtype="float32")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(moe_experts, fullgraph=True, dynamic=dynamic, backend=backend)
    for seed in range(3):
        inputs = experts_inputs(case, seed)
        positional = [inputs[name] for name in NAMES[:5]]
        leaves = [inputs[name].requires_grad_() for name in DIFFERENTIABLE[:4]]
        ours = torch.autograd.grad(compiled(*positional).sum(), leaves)
        eager = torch.autograd.grad(moe_experts(*positional).sum(), leaves)
        for a, b in zip(ours, eager, strict=True):
            torch.testing.assert_close(a, b)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_states": torch.randn(5)}, ValueError, "hidden_states: expected 2 dimensions"),
        ({"top_k_index": torch.rand(5, 2)}, TypeError, "top_k_index: expected dtype int32"),
        ({"top_k_index": torch.full((5, 2), -1)}, ValueError, "top_k_index: expected no negative"),
        ({"top_k_weights": torch.rand(5, 3)}, ValueError, r"top_k_weights: expected shape"),
        ({"gate_up_proj": torch.randn(3, 6, 5)}, ValueError, r"gate_up_proj: .* \[e, 2i, h\]"),
        ({"down_proj": torch.randn(2, 4, 3)}, ValueError, r"down_proj: expected shape \[e, h, i\]"),
        ({"down_proj": torch.randn(3, 4, 3).half()}, TypeError, "down_proj torch.float16"),
        ({"down_bias": torch.randn(3, 3)}, ValueError, r"down_bias: expected shape \[e, h\]"),
        ({"activation": "tanh"}, ValueError, "activation: expected one of 'silu'"),
        ({"num_experts": 4}, ValueError, "num_experts: expected at most the 3 experts"),
        ({"num_experts": 2.0}, TypeError, "num_experts: expected a Python int"),
        ({"transposed": "yes"}, TypeError, "transposed: expected True or False"),
        ({"activation": "swiglu_oai", "has_gate": False}, ValueError, "has_gate"),
        ({"gate_up_scale": torch.ones(3, 6)}, ValueError, "gate_up_scale: expected None"),
        ({"top_k_weights": torch.empty(5, 2, device="meta")}, ValueError, "top_k_weights on meta"),
        ({"act": "silu"}, TypeError, "act"),
    ],
)
def test_bad_input_is_named(changes: dict, error: type[Exception], message: str) -> None:
    arguments = {
        "hidden_states": torch.randn(5, 4),
        "top_k_index": torch.zeros(5, 2, dtype=torch.int64),
        "top_k_weights": torch.rand(5, 2),
        "gate_up_proj": torch.randn(3, 6, 4),
        "down_proj": torch.randn(3, 4, 3),
    }
    with pytest.raises(error, match=message):
        moe_experts(**(arguments | changes))


def run_gathered(case: ExpertsCase, inputs: dict) -> torch.Tensor:
    """The kernel that gathers each expert's rows, which `choose` takes for many tokens only."""
    from tpu_kernels.kernels.moe_experts import kernel, tiling

    activation, transposed, has_gate, num_experts = options(case)
    plan = tiling.Plan("gather", case.i, case.h, 1, 1, has_gate, 32, 16, 16)

    def fused(*arrays, chip, interpret):
        return kernel.moe_experts_fused(
            *arrays,
            activation=activation,
            transposed=transposed,
            has_gate=has_gate,
            num_experts=num_experts,
            plan=plan,
            chip=chip,
            interpret=interpret,
        )

    return run_kernel(fused, *(inputs[name] for name in NAMES))


GATHERED = [
    ExpertsCase("gathered", "prefill", 45, 4, 256, 128, 2, num_routed=6),
    ExpertsCase("gathered_bias", "prefill", 45, 4, 256, 128, 2, "gelu_tanh", bias=True),
    ExpertsCase("gathered_transposed", "prefill", 40, 4, 256, 128, 2, transposed=True),
]


@pytest.mark.parametrize("case", GATHERED, ids=ids(GATHERED))
def test_gathered_rows_equal_float64(case: ExpertsCase) -> None:
    inputs = experts_inputs(case)
    right, _ = exact(case, inputs, torch.zeros(case.t, case.h))
    assert_close(run_gathered(case, inputs), right, torch.bfloat16, "output", kernel=True)


def test_gathered_rows_of_a_token_that_lists_an_expert_twice() -> None:
    case = ExpertsCase("twice", "routing", 40, 3, 256, 128, 3)
    inputs = experts_inputs(case)
    inputs["top_k_index"][:] = 1
    inputs["top_k_index"][20:, 1] = 2
    right, _ = exact(case, inputs, torch.zeros(case.t, case.h))
    assert_close(run_gathered(case, inputs), right, torch.bfloat16, "output", kernel=True)
