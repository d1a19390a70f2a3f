"""experts_forward in real transformers models: every family's experts, and whole models."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from tpu_kernels.kernels.moe_experts import transformers as integration
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

HIDDEN, EXPERTS, TOPK, TOKENS = 12, 6, 2, 7


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Registers experts_forward as "ours" and counts its calls by op."""
    calls = {"moe_experts": 0, "ragged_dot": 0}

    def counted(name: str):
        function = getattr(integration, name)

        def call(*args, **kwargs):
            if not torch.compiler.is_compiling():
                calls[name] += 1
            return function(*args, **kwargs)

        return call

    for name in calls:
        monkeypatch.setattr(integration, name, counted(name))
    ALL_EXPERTS_FUNCTIONS.register("ours", integration.experts_forward)
    return calls


def experts_classes() -> list[tuple[str, str]]:
    """(module, class) of every experts class that transformers dispatches."""
    found = []
    models = Path(transformers.__file__).parent / "models"
    for path in sorted(models.glob("*/modeling_*.py")):
        pattern = r"^@use_experts_implementation.*\nclass (\w+)"
        for match in re.finditer(pattern, path.read_text(), re.MULTILINE):
            found.append((f"transformers.models.{path.parent.name}.{path.stem}", match[1]))
    return found


CLASSES = experts_classes()

# What the gate of a family is, where it is not the default: these take two ragged_dot.
OWN_GATE = {
    "BeamExperts",
    "DeepseekV4Experts",
    "Glm5NextTextExperts",
    "GptOssExperts",
    "HYV4Experts",
    "MiniMaxM3VLExperts",
    "MuseSparkExperts",
    "OpenAIPrivacyFilterExperts",
}
# Parts of these families' own forward are in float32 whatever the weights are.
FLOAT32_INSIDE = {"BeamExperts", "MuseSparkExperts", "OpenAIPrivacyFilterExperts"}


def make_experts(module: str, name: str) -> torch.nn.Module:
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        moe_hidden_size=HIDDEN,
        moe_latent_size=None,
        intermediate_size=10,
        moe_intermediate_size=10,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        n_routed_experts=EXPERTS,
        moe_num_experts=EXPERTS,
        num_experts_per_tok=TOPK,
        moe_num_shared_experts=1,
        hidden_act="silu",
        hidden_activation="gelu_pytorch_tanh",
        mlp_hidden_act="relu2",
        swiglu_alpha=1.7,
        swiglu_limit=1.0,
        post_norm_eps=1e-5,
        rms_norm_eps=1e-5,
        _experts_implementation="eager",
    )
    experts = getattr(importlib.import_module(module), name)(config).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    return experts


def routed(experts: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    index = torch.stack([torch.randperm(experts.num_experts)[:TOPK] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, TOPK, dtype=torch.float64, requires_grad=True)
    return x, index, weights


def run(experts: torch.nn.Module, implementation: str, x, index, weights):
    experts.config._experts_implementation = implementation
    out = experts(x, index, weights)
    inputs = [x, weights, *experts.parameters()]
    return out, torch.autograd.grad(out.square().sum(), inputs)


def test_all_families_are_found() -> None:
    assert len(CLASSES) >= 60
    assert {name for _, name in CLASSES} >= OWN_GATE


@pytest.mark.parametrize(("module", "name"), CLASSES, ids=[name for _, name in CLASSES])
def test_experts_equal_the_familys_own(module: str, name: str, ours: dict[str, int]) -> None:
    torch.manual_seed(0)
    experts = make_experts(module, name)
    inputs = routed(experts)
    expected, expected_grads = run(experts, "eager", *inputs)
    out, grads = run(experts, "ours", *inputs)
    assert ours == (
        {"moe_experts": 0, "ragged_dot": 2}
        if name in OWN_GATE
        else {"moe_experts": 1, "ragged_dot": 0}
    )
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if name in FLOAT32_INSIDE else {}
    torch.testing.assert_close(out, expected, **tolerance)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, **tolerance)


@pytest.mark.parametrize("name", ["Qwen3MoeExperts", "GptOssExperts", "MuseSparkExperts"])
def test_expert_parallel_sentinel(name: str) -> None:
    """Slots of other ranks hold id == num_experts: nothing comes of them, even of NaN."""
    torch.manual_seed(0)
    module = next(module for module, other in CLASSES if other == name)
    experts = make_experts(module, name)
    x, index, weights = routed(experts)
    away = torch.rand(index.shape) < 0.5
    away[0] = True  # a token that is all elsewhere
    experts._is_expert_parallel = True
    masked = torch.where(away, torch.zeros(()), weights.detach()).requires_grad_()
    expected, expected_grads = run(experts, "eager", x, index, masked)
    poisoned = torch.where(away, torch.full((), float("nan")), weights.detach()).requires_grad_()
    index = torch.where(away, experts.num_experts, index)
    with torch.no_grad():
        x[0] = float("inf")
    out, grads = run(experts, "ours", x, index, poisoned)
    assert (out[0] == 0).all() and (grads[0][0] == 0).all()
    torch.testing.assert_close(out[1:], expected[1:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads[0][1:], expected_grads[0][1:], rtol=1e-5, atol=1e-4)
    assert (grads[1][away] == 0).all()
    for grad, right in zip(grads[2:], expected_grads[2:], strict=True):
        assert torch.isfinite(grad).all()
        if name != "MuseSparkExperts":  # its norm's own gradient counts the masked rows in eager
            torch.testing.assert_close(grad, right, rtol=1e-5, atol=1e-4)


def test_all_to_all_ranks_send_any_number_of_rows(ours: dict[str, int]) -> None:
    """AllToAllEP: topk = 1, weights of one, and an empty batch as one zero row."""
    experts = make_experts("transformers.models.qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts")
    for rows in (1, 5):
        x = torch.zeros(rows, HIDDEN, dtype=torch.float64, requires_grad=True)
        index = torch.full((rows, 1), EXPERTS)
        weights = torch.ones(rows, 1, dtype=torch.float64, requires_grad=True)
        out, grads = run(experts, "ours", x, index, weights)
        assert (out == 0).all() and all((grad == 0).all() for grad in grads)


def test_custom_activation_is_called_not_replaced(ours: dict[str, int]) -> None:
    experts = make_experts("transformers.models.mixtral.modeling_mixtral", "MixtralExperts")
    experts.act_fn = torch.nn.Softplus()
    x, index, weights = routed(experts)
    expected, _ = run(experts, "eager", x, index, weights)
    out, _ = run(experts, "ours", x, index, weights)
    torch.testing.assert_close(out, expected)
    assert ours["ragged_dot"] == 2


TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MODELS = {
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "mixtral": {},
    "olmoe": {},
    "gpt_oss": {"layer_types": ["full_attention", "full_attention"]},
    "granitemoe": {},
    "deepseek_v3": {
        "first_k_dense_replace": 0,
        "n_group": 1,
        "topk_group": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
}


def make_model(family: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    options = TINY | MODELS[family]
    known = AutoConfig.for_model(family).to_dict()
    config = AutoConfig.for_model(family, **{k: v for k, v in options.items() if k in known})
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    # Initial weights of std 0.02 would hide a wrong expert behind the residual stream.
    for name, parameter in model.named_parameters():
        if "expert" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("family", MODELS)
def test_model_logits_and_gradients_equal_eager(family: str, ours: dict[str, int]) -> None:
    model = make_model(family)
    tokens = torch.randint(1, 64, (2, 9))
    results = {}
    for implementation in ("eager", "ours"):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        output = model(tokens, labels=tokens)
        output.loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        results[implementation] = output.logits.detach(), grads
    assert sum(ours.values()) > 0, "experts_forward did not run"
    torch.testing.assert_close(results["ours"][0], results["eager"][0], rtol=1e-4, atol=1e-4)
    assert results["ours"][1].keys() == results["eager"][1].keys()
    for name, grad in results["ours"][1].items():
        torch.testing.assert_close(grad, results["eager"][1][name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_generate_with_static_cache(family: str, ours: dict[str, int]) -> None:
    model = make_model(family).eval()
    tokens = torch.randint(1, 64, (2, 5))
    generated = {}
    for implementation in ("eager", "ours"):
        model.set_experts_implementation(implementation)
        cache = StaticCache(config=model.config, max_cache_len=16)
        generated[implementation] = model.generate(
            tokens, max_new_tokens=6, do_sample=False, past_key_values=cache
        )
    assert torch.equal(generated["ours"], generated["eager"])
    assert sum(ours.values()) >= 6


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_compiled_experts_layer(family: str, dynamic: bool) -> None:
    """fullgraph, forward and backward, one compilation for every routing."""
    torch._dynamo.reset()
    model = make_model(family)
    model.set_experts_implementation("ours")
    experts = next(m for n, m in model.named_modules() if n.endswith("experts"))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(experts, fullgraph=True, dynamic=dynamic, backend=backend)
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(6, 32, requires_grad=True)
        index = torch.stack([torch.randperm(4)[:2] for _ in range(6)])
        weights = torch.rand(6, 2)
        ours = torch.autograd.grad(compiled(x, index, weights).square().sum(), x)
        eager = torch.autograd.grad(experts(x, index, weights).square().sum(), x)
        torch.testing.assert_close(ours, eager)
    assert len(graphs) == 1


def test_bfloat16_model_is_as_close_to_float32_as_eager() -> None:
    """|ours - f32| <= 2 x |eager bf16 - f32| + tiny, over the logits of a bfloat16 model."""
    model = make_model("qwen3_moe", torch.bfloat16)
    tokens = torch.randint(1, 64, (2, 9))
    logits = {}
    for implementation in ("eager", "ours"):
        model.set_experts_implementation(implementation)
        logits[implementation] = model(tokens).logits.float()
    exact = model.float()(tokens).logits
    error = {name: (value - exact).abs().max() for name, value in logits.items()}
    assert error["ours"] <= 2 * error["eager"] + 1e-3
