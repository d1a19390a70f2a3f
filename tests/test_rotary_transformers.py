"""Models of transformers whose rotary embedding `kernels.kernelize` takes from the built kernel."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest
import torch
from kernels.layer import Mode
from tiny_kernel import ROOT, build
from transformers import AutoConfig, AutoModelForCausalLM

import kernels

TINY = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
FAMILIES = {
    "llama": {},
    "qwen3": {},
    "gpt_oss": {  # half-width tables
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmo": {},  # float32 tables
}
TOKENS = torch.arange(2 * 11).reshape(2, 11) * 7 % 67


@pytest.fixture(scope="module")
def hub_kernel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("hub")
    build.build(ROOT, out, "rotary-tpu")
    return out / "rotary-tpu"


@pytest.fixture
def calls(hub_kernel, monkeypatch) -> list[tuple[int, ...]]:
    """Table shapes of every call that the built layer made."""
    seen = []
    layers = sys.modules[
        kernels.get_local_kernel(hub_kernel).layers.apply_rotary_transformers.__module__
    ]
    function = layers._apply_rotary_transformers

    def count(q, k, cos, sin, unsqueeze_dim=1):
        if not torch.compiler.is_compiling():
            seen.append(tuple(cos.shape))
        return function(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    monkeypatch.setattr(layers, "_apply_rotary_transformers", count)
    return seen


def make_models(family: str, dtype: torch.dtype) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**TINY, **FAMILIES[family]})
    models = [
        AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
        for _ in range(2)
    ]
    models[1].load_state_dict(models[0].state_dict())
    return models


@pytest.fixture
def kernelize(hub_kernel, monkeypatch):
    """kernelize(model, mode); the hooked function of a family is one for all its models."""
    undo = []

    def apply(model: torch.nn.Module, family: str, mode: Mode) -> None:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        hooked = module.apply_rotary_pos_emb
        undo.append((hooked, hooked.__dict__.copy()))
        repository = kernels.LocalLayerRepository(
            hub_kernel, layer_name="apply_rotary_transformers"
        )
        with kernels.use_kernel_mapping(
            {"rotary_pos_emb": {"cpu": repository}}, inherit_mapping=False
        ):
            kernels.kernelize(model, mode=mode, device="cpu", use_fallback=True)

    yield apply
    for hooked, attributes in undo:
        hooked.__dict__.clear()
        hooked.__dict__.update(attributes)


def test_the_layer_is_pure_with_the_hooks_parameters(hub_kernel):
    layer = kernels.get_local_kernel(hub_kernel).layers.apply_rotary_transformers
    parameters = inspect.signature(layer.forward).parameters
    assert list(parameters) == ["self", "q", "k", "cos", "sin", "unsqueeze_dim"]
    assert layer.can_torch_compile and layer.has_backward and "__init__" not in vars(layer)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_compute_and_learn_what_they_do_without(family, dtype, calls, kernelize):
    plain, model = make_models(family, dtype)
    expected = plain(TOKENS, labels=TOKENS)
    expected.loss.backward()
    assert not calls
    kernelize(model, family, Mode.TRAINING)
    out = model(TOKENS, labels=TOKENS)
    assert len(calls) == 2, "the kernel did not run"
    assert calls[0][-1] == (4 if family == "gpt_oss" else 8)
    out.loss.backward()
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(out.logits, expected.logits, rtol=tolerance, atol=tolerance)
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        scale = max(other.grad.abs().max().item(), 1e-3)
        error = (parameter.grad.float() - other.grad.float()).abs().max().item()
        assert error <= tolerance * scale * (1 if dtype == torch.float32 else 4), name


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_models_compile_whole(family, calls, kernelize):
    plain, model = (m.eval() for m in make_models(family, torch.float32))
    with torch.no_grad():
        expected = plain(TOKENS, use_cache=False).logits
        kernelize(model, family, Mode.INFERENCE | Mode.TORCH_COMPILE)
        model(TOKENS, use_cache=False)
        assert calls, "the kernel did not run"
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        logits = compiled(TOKENS, use_cache=False).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
