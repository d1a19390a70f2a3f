"""moe_experts with quantised projections: reference and kernels against float64, the contract."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from cases import ExpertsCase, experts_inputs, ids
from experts_oracle import gate
from hypothesis import given
from hypothesis import strategies as st
from interpret import run_kernel
from tpu_kernels.kernels.moe_experts import ops, reference
from tpu_kernels.kernels.moe_experts.ops import moe_experts
from tpu_kernels.kernels.ragged_dot.quantized import quantize_experts
from tpu_kernels.tpu_runtime import CHIPS

NAMES = (
    "hidden_states",
    "top_k_index",
    "top_k_weights",
    "gate_up_proj",
    "down_proj",
    "gate_up_bias",
    "down_bias",
    "gate_up_scale",
    "down_scale",
)
KINDS = ("int8", "float8_e4m3fn", "float8_e5m2", "int4")
# Inputs of a float type with a gradient; those of quantised projections have none.
TRAINED = ("hidden_states", "top_k_weights", "gate_up_bias", "down_bias")


@dataclass(frozen=True)
class Quantised:
    """A layer, the types of its projections (None: as hidden_states) and the blocks of scales."""

    layer: ExpertsCase
    gate_up: str | None
    down: str | None
    blocks: tuple[int | None, int | None] = (None, None)  # values along h, along i

    @property
    def name(self) -> str:
        kinds = f"{self.gate_up}-{self.down}" if self.gate_up != self.down else self.gate_up
        blocks = "" if self.blocks == (None, None) else f"-blocks{self.blocks[0]}_{self.blocks[1]}"
        return f"{self.layer.name}-{kinds}{blocks}"


LAYER = ExpertsCase("layer", "Qwen3-MoE", 20, 4, 256, 256, 2)
TURNED = replace(LAYER, name="transposed", transposed=True)
EVERY_KIND = [Quantised(layer, kind, kind) for layer in (LAYER, TURNED) for kind in KINDS]
BLOCKS = [
    Quantised(replace(LAYER, h=512, name="wide"), "int8", "int8", (128, 128)),
    Quantised(replace(LAYER, h=512, i=512, name="wide"), "int4", "int4", (256, 256)),
    Quantised(replace(TURNED, h=512, i=512, name="wide_transposed"), "int4", "int4", (256, 256)),
    Quantised(TURNED, "float8_e4m3fn", "float8_e4m3fn", (128, 128)),
    Quantised(LAYER, "int4", "int4", (32, 64)),
    Quantised(TURNED, "int8", "int4", (32, None)),
    Quantised(LAYER, "float8_e5m2", "int8", (None, 256)),
]
MIXED = [
    Quantised(LAYER, None, "int8"),
    Quantised(TURNED, "int4", None),
    Quantised(replace(LAYER, e=11, num_routed=20, topk=3, name="shard"), "int4", "int8"),
    Quantised(replace(LAYER, t=1, e=9, name="one_token"), "int4", "float8_e5m2"),
    Quantised(replace(LAYER, activation="gelu_tanh", bias=True, name="bias"), "int8", "int4"),
    Quantised(replace(LAYER, activation="relu2", has_gate=False, name="ungated"), "int4", "int4"),
    Quantised(replace(LAYER, h=96, i=40, t=13, e=3, name="odd_sizes"), "int8", "int4"),
    Quantised(replace(LAYER, h=1024, i=480, t=6, e=2, name="cut_rows"), "int8", "int8"),
    Quantised(replace(LAYER, dtype="float32", name="float32"), "int4", "float8_e4m3fn"),
    Quantised(replace(LAYER, dtype="float16", name="float16"), "int8", "int4"),
]
OAI = ExpertsCase("oai", "gpt-oss", 10, 3, 256, 256, 2, "swiglu_oai", transposed=True, bias=True)
GPT_OSS = [
    Quantised(OAI, "int8", "int8"),
    Quantised(replace(OAI, transposed=False, name="oai_rows"), "int4", "int4"),
    Quantised(replace(OAI, h=160, i=192, name="oai_cut"), "int4", "int4"),
    Quantised(replace(OAI, h=160, i=192, name="oai_cut"), "float8_e4m3fn", "int8", (None, 64)),
    Quantised(replace(OAI, h=160, i=192, name="oai_cut"), None, None),
]
CASES = EVERY_KIND + BLOCKS + MIXED + GPT_OSS


def make(case: Quantised, seed: int = 0) -> dict[str, torch.Tensor | None]:
    """Inputs of the layer with its projections quantised; absent ones are None."""
    inputs = experts_inputs(case.layer, seed)
    for name, kind, block in zip(
        ("gate_up", "down"), (case.gate_up, case.down), case.blocks, strict=True
    ):
        inputs[f"{name}_scale"] = None
        if kind is not None:
            inputs[f"{name}_proj"], inputs[f"{name}_scale"] = quantize_experts(
                inputs[f"{name}_proj"], kind, block, transposed=not case.layer.transposed
            )
    return inputs


def widened(weight: torch.Tensor, scale: torch.Tensor | None, transposed: bool) -> torch.Tensor:
    """float64 [e, k, n] of a projection as it is stored, one value at a time as the format says."""
    weight = weight if transposed else weight.transpose(1, 2)  # [e, k, n]
    if scale is None:
        return weight.double()
    if weight.dtype == torch.uint8:
        nibbles = torch.stack((weight & 15, weight >> 4), dim=2).flatten(1, 2).to(torch.int16)
        weight = torch.where(nibbles > 7, nibbles - 16, nibbles)
    if scale.ndim == 2:
        scale = scale[:, None]
    block = weight.shape[1] // scale.shape[1]
    return weight.double() * scale.double().repeat_interleave(block, dim=1)


def exact(case: Quantised, inputs: dict, grad_out: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """Output and gradients of what can be trained, in float64 by autograd through torch's ops."""
    layer = case.layer
    leaves = {n: inputs[n].detach().double() for n in TRAINED if inputs[n] is not None}
    leaves = {n: leaf.requires_grad_() for n, leaf in leaves.items()}
    w1 = widened(inputs["gate_up_proj"], inputs["gate_up_scale"], layer.transposed)
    w2 = widened(inputs["down_proj"], inputs["down_scale"], layer.transposed)
    index = inputs["top_k_index"]
    weights = torch.where(index < layer.e, leaves["top_k_weights"], 0)
    out = torch.zeros(layer.t, layer.h, dtype=torch.float64)
    for e in range(layer.e):
        z = leaves["hidden_states"] @ w1[e]
        z = z + leaves["gate_up_bias"][e] if layer.bias else z
        y = gate(z, layer) @ w2[e]
        y = y + leaves["down_bias"][e] if layer.bias else y
        out = out + y * torch.where(index == e, weights, 0).sum(-1, keepdim=True)
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out.double())
    return out.detach(), dict(zip(leaves, grads, strict=True))


def options(case: Quantised) -> tuple:
    layer = case.layer
    return layer.activation, layer.transposed, layer.has_gate, layer.e


def needs(inputs: dict) -> tuple[bool, ...]:
    biases = [inputs[name] is not None for name in ("gate_up_bias", "down_bias")]
    return (True, True, False, False, *biases)


def assert_close(
    case: Quantised, actual: torch.Tensor, right: torch.Tensor, what: str, kernel: bool
) -> None:
    """Within a few roundings of the layer's dtype, relative to the largest value."""
    assert torch.isfinite(actual).all(), f"{what}: not finite"
    tolerance = {"float32": 3e-6, "float16": 4e-3}.get(case.layer.dtype, 5e-3)
    if kernel and case.layer.dtype == "bfloat16":
        tolerance = 1.5e-2  # the gate's result is rounded for the MXU too
    error = (actual.double() - right).abs().max() / right.abs().max().clamp(min=1e-30)
    assert error <= tolerance, f"{what}: relative error {error:.2e} above {tolerance}"


def reference_forward(case: Quantised, inputs: dict) -> torch.Tensor:
    return reference.moe_experts_quantized(*(inputs[n] for n in NAMES), *options(case))


def kernel_forward(case: Quantised, inputs: dict) -> torch.Tensor:
    from tpu_kernels.kernels.moe_experts import lowering

    values = (inputs[name] for name in NAMES)
    return run_kernel(lowering.moe_experts_quantized, *values, *options(case))


@pytest.mark.parametrize("run", [reference_forward, kernel_forward])
@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_output_equals_float64(case: Quantised, run) -> None:
    inputs = make(case)
    right, _ = exact(case, inputs, torch.zeros(case.layer.t, case.layer.h))
    out = run(case, inputs)
    assert out.dtype == getattr(torch, case.layer.dtype)
    assert_close(case, out, right, "output", kernel=run is kernel_forward)


def gathered_forward(case: Quantised, inputs: dict) -> torch.Tensor:
    """The kernel that gathers each expert's rows, with two experts in the rings."""
    from tpu_kernels.kernels.moe_experts import kernel, tiling

    layer = case.layer
    is_split = layer.has_gate and layer.activation != "swiglu_oai"
    plan = tiling.Plan("gather", layer.i, layer.h, 2, 2, is_split, 32, 16, 16)

    def fused(*arrays, chip, interpret):
        return kernel.moe_experts_fused(
            *arrays,
            activation=layer.activation,
            transposed=layer.transposed,
            has_gate=layer.has_gate,
            num_experts=layer.e,
            plan=plan,
            chip=chip,
            interpret=interpret,
        )

    return run_kernel(fused, *(inputs[name] for name in NAMES))


PREFILL = replace(LAYER, name="gathered", t=45, num_routed=6, i=128)
PREFILL_TURNED = replace(PREFILL, name="gathered_transposed", transposed=True)
GATHERED = [Quantised(PREFILL, kind, kind) for kind in KINDS] + [
    Quantised(PREFILL_TURNED, "int4", "int8"),
    Quantised(PREFILL, "int8", "int8", (128, 128)),
    Quantised(PREFILL_TURNED, "int4", "int4", (128, 64)),
    Quantised(replace(PREFILL, activation="swiglu_oai", bias=True), "int4", "int4"),
]


@pytest.mark.parametrize("case", GATHERED, ids=ids(GATHERED))
def test_gathered_rows_equal_float64(case: Quantised) -> None:
    inputs = make(case)
    right, _ = exact(case, inputs, torch.zeros(case.layer.t, case.layer.h))
    assert_close(case, gathered_forward(case, inputs), right, "output", kernel=True)


@pytest.mark.parametrize("blocks", [(None, None), (128, 128)])
@pytest.mark.parametrize("run", [reference_forward, kernel_forward, gathered_forward])
def test_nan_of_an_expert_that_nobody_chose_reaches_nothing(run, blocks) -> None:
    layer = replace(LAYER, t=32, i=128)
    case = Quantised(layer, "float8_e4m3fn", "float8_e5m2", blocks)
    inputs = make(case)
    inputs["top_k_index"] = torch.where(inputs["top_k_index"] == 2, 1, inputs["top_k_index"])
    right = run(case, inputs)
    for name in ("gate_up", "down"):
        inputs[f"{name}_scale"][2] = float("nan")
        inputs[f"{name}_proj"] = inputs[f"{name}_proj"].view(torch.uint8).clone()
        inputs[f"{name}_proj"][2] = 0x7F  # NaN in both types
        dtype = getattr(torch, case.gate_up if name == "gate_up" else case.down)
        inputs[f"{name}_proj"] = inputs[f"{name}_proj"].view(dtype)
    assert torch.equal(run(case, inputs), right) and torch.isfinite(right).all()


@pytest.mark.parametrize("run", [reference_forward, kernel_forward, gathered_forward])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_nan_of_a_token_stays_with_it(kind: str, run) -> None:
    case = Quantised(replace(LAYER, t=32, i=128), kind, kind)
    inputs = make(case)
    right = run(case, inputs)
    inputs["hidden_states"] = inputs["hidden_states"].clone()
    inputs["hidden_states"][3, 5] = float("nan")
    out = run(case, inputs)
    assert torch.isnan(out[3]).all()
    others = [token for token in range(32) if token != 3]
    assert torch.equal(out[others], right[others])


def test_every_stored_value_is_exact_in_the_kernel() -> None:
    """One-hot rows read the weights out: each of the 16 or 256 values, subnormals included."""
    import jax
    import jax.numpy as jnp
    from tpu_kernels.kernels.moe_experts.tiling import Stored
    from tpu_kernels.kernels.ragged_dot import dequant

    for chip in ("v5e", "v7x", "v4"):
        code = dequant.code_of(CHIPS[chip])
        values = torch.arange(256, dtype=torch.uint8).reshape(32, 8)
        for dtype in (jnp.uint8, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2):
            stored = values.numpy().view(dtype)
            is_int4 = Stored(jnp.dtype(dtype).name).is_int4
            k = 64 if is_int4 else 32

            def kernel(weight_ref, out_ref, k=k, code=code, is_int4=is_int4):
                row, column = (jax.lax.broadcasted_iota(jnp.int32, (k, k), d) for d in (0, 1))
                rows = (row == column).astype(jnp.bfloat16)
                out_ref[...] = dequant.dot(
                    dequant.split_pairs(rows) if is_int4 else rows,
                    weight_ref[...],
                    jnp.ones((1, 8), jnp.float32),
                    transposed=False,
                    precision=jax.lax.Precision.DEFAULT,
                    code=code,
                )

            got = torch.from_dlpack(jax.jit(partial(_interpreted, kernel, k))(stored))
            torch_dtype = getattr(torch, jnp.dtype(dtype).name)
            right = widened(values.view(torch_dtype)[None], torch.ones(1, 8), True)[0]
            finite = torch.isfinite(right).all(0)
            assert torch.equal(got.double()[:, finite], right[:, finite]), (chip, dtype)


def _interpreted(kernel, m: int, weight):
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    out = jax.ShapeDtypeStruct((m, weight.shape[1]), jnp.float32)
    return pl.pallas_call(kernel, out_shape=out, interpret=pltpu.InterpretParams())(weight)


def backward(run, case: Quantised, inputs: dict, grad_out: torch.Tensor) -> tuple:
    from tpu_kernels.kernels.moe_experts import lowering

    values = (grad_out, *(inputs[name] for name in NAMES), *options(case), *needs(inputs))
    if run is reference_forward:
        return reference.moe_experts_quantized_backward(*values)
    return run_kernel(lowering.moe_experts_quantized_backward, *values)


TRAINING = [
    Quantised(LAYER, "int8", "float8_e4m3fn"),
    Quantised(replace(LAYER, t=9, bias=True, name="bias"), "int4", "int4"),
    Quantised(replace(TURNED, t=9, activation="gelu_tanh"), "float8_e5m2", "int4", (128, None)),
    Quantised(replace(OAI, h=128, i=128), "int4", "int8", (None, 128)),
]


@pytest.mark.parametrize("run", [reference_forward, kernel_forward])
@pytest.mark.parametrize("case", TRAINING, ids=ids(TRAINING))
def test_gradients_equal_float64(case: Quantised, run) -> None:
    inputs = make(case)
    grad_out = torch.randn(case.layer.t, case.layer.h).to(getattr(torch, case.layer.dtype))
    _, right = exact(case, inputs, grad_out)
    grads = backward(run, case, inputs, grad_out)
    found = dict(zip((*TRAINED[:2], "gate_up_proj", "down_proj", *TRAINED[2:]), grads, strict=True))
    for name in ("gate_up_proj", "down_proj"):
        assert found[name].shape == (0,)
    for name, value in right.items():
        assert found[name].dtype == inputs[name].dtype
        assert_close(case, found[name], value, f"gradient of {name}", kernel=run is kernel_forward)


def call(case: Quantised, inputs: dict, function=moe_experts) -> torch.Tensor:
    layer = case.layer
    return function(
        *(inputs[name] for name in NAMES[:5]),
        **{name: inputs[name] for name in NAMES[5:]},
        activation=layer.activation,
        transposed=layer.transposed,
        has_gate=layer.has_gate,
    )


@given(st.data())
def test_any_layer_through_the_op(data) -> None:
    """Sizes, types, layouts and blocks at random, forward and backward, in float64."""

    def pick(*values):
        return data.draw(st.sampled_from(values))

    half_h, half_i = pick(1, 2, 3, 6), pick(1, 2, 5)
    layer = ExpertsCase(
        "any",
        "",
        pick(1, 2, 7),
        pick(1, 3),
        2 * half_h,
        2 * half_i,
        1,
        pick("silu", "gelu_tanh", "swiglu_oai"),
        pick(True, False),
        bias=pick(True, False),
        dtype="float64",
        num_routed=4,
    )
    blocks = pick(None, 1, 2, half_h), pick(None, 1, 2, half_i)
    blocks = tuple(
        b if b and not k % b else None for b, k in zip(blocks, (layer.h, layer.i), strict=True)
    )
    case = Quantised(layer, pick(None, *KINDS), pick(*KINDS), blocks)
    inputs = make(case, data.draw(st.integers(0, 99)))
    inputs["top_k_weights"] = torch.rand(layer.t, 1, dtype=torch.float64)
    leaves = {n: inputs[n].requires_grad_() for n in TRAINED if inputs[n] is not None}
    grad_out = torch.randn(layer.t, layer.h, dtype=torch.float64)
    right, right_grads = exact(case, inputs, grad_out)
    out = call(case, inputs)
    grads = torch.autograd.grad(out, list(leaves.values()), grad_out)
    torch.testing.assert_close(out.detach(), right, rtol=1e-9, atol=1e-9)
    for name, grad in zip(leaves, grads, strict=True):
        torch.testing.assert_close(grad, right_grads[name], rtol=1e-9, atol=1e-9, msg=name)


def test_the_projection_that_is_not_quantised_can_be_trained() -> None:
    case = Quantised(replace(LAYER, dtype="float32"), "int8", None)
    inputs = make(case)
    down = inputs["down_proj"].requires_grad_()
    (grad,) = torch.autograd.grad(call(case, inputs).sum(), down)
    whole = {**inputs, "gate_up_scale": None, "gate_up_bias": None, "down_bias": None}
    wide = widened(inputs["gate_up_proj"], inputs["gate_up_scale"], False).transpose(1, 2)
    whole["gate_up_proj"] = wide.float().contiguous()
    (right,) = torch.autograd.grad(call(case, whole).sum(), down)
    torch.testing.assert_close(grad, right, rtol=1e-4, atol=1e-4)


def test_opcheck() -> None:
    case = Quantised(ExpertsCase("opcheck", "", 5, 3, 4, 6, 2, dtype="float32"), "int8", "int4")
    inputs = make(case)
    arguments = (*(inputs[name] for name in NAMES), *options(case))
    grad_out = torch.randn(5, 4)
    torch.library.opcheck(
        ops._moe_experts_quantized_backward, (grad_out, *arguments, *needs(inputs))
    )
    for name in ("hidden_states", "top_k_weights"):
        inputs[name].requires_grad_()
    torch.library.opcheck(ops._moe_experts_quantized, arguments)


@pytest.mark.parametrize("dynamic", [True, False])
def test_compiled_without_graph_break(dynamic: bool) -> None:
    torch._dynamo.reset()
    case = Quantised(ExpertsCase("compiled", "", 6, 3, 8, 4, 2, dtype="float32"), "int4", "int8")
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(moe_experts, fullgraph=True, dynamic=dynamic, backend=backend)
    for seed in range(3):
        inputs = make(case, seed)
        x = inputs["hidden_states"].requires_grad_()
        (ours,) = torch.autograd.grad(call(case, inputs, compiled).sum(), x)
        (eager,) = torch.autograd.grad(call(case, inputs).sum(), x)
        torch.testing.assert_close(ours, eager)
    assert len(graphs) == 1


INT8 = torch.ones(3, 6, 4, dtype=torch.int8)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"gate_up_proj": INT8}, ValueError, "gate_up_scale: expected .* got None"),
        ({"gate_up_scale": torch.ones(3, 6)}, ValueError, "gate_up_scale: expected None"),
        ({"down_scale": torch.ones(3, 4)}, ValueError, "down_scale: expected None"),
        (
            {"gate_up_proj": INT8, "gate_up_scale": torch.ones(3, 4)},
            ValueError,
            r"gate_up_scale: expected shape .* got \(3, 4\)",
        ),
        (
            {"gate_up_proj": INT8, "gate_up_scale": torch.ones(3, 3, 6)},
            ValueError,
            "gate_up_scale: expected a number of blocks that divides k = 4",
        ),
        (
            {"gate_up_proj": INT8, "gate_up_scale": torch.ones(3, 6, dtype=torch.int32)},
            TypeError,
            "gate_up_scale: expected a float dtype",
        ),
        (
            {"gate_up_proj": INT8.view(torch.uint8), "gate_up_scale": torch.ones(3, 6)},
            ValueError,
            r"gate_up_proj: expected shape \[e, 2i, h/2\] = \(3, 6, 2\)",
        ),
        ({"gate_up_proj": INT8.to(torch.int32)}, TypeError, "gate_up_proj: expected dtype"),
        (
            {"gate_up_proj": INT8, "gate_up_scale": torch.ones(3, 6).requires_grad_()},
            NotImplementedError,
            "gate_up_scale: quantised weights and their scales have no gradient",
        ),
        (
            {"gate_up_proj": INT8, "gate_up_scale": torch.ones(3, 6, device="meta")},
            ValueError,
            "gate_up_scale on meta",
        ),
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


def test_autocast_promotes_beside_quantised_projections() -> None:
    case = Quantised(replace(LAYER, bias=True, dtype="float32"), "int8", "int4")
    inputs = make(case)
    inputs["hidden_states"] = inputs["hidden_states"].bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert call(case, inputs).dtype == torch.float32
    with pytest.raises(TypeError, match=r"gate_up_bias torch\.float32"):
        call(case, inputs)
