"""transformers models whose norms `kernels.kernelize` replaces with the built kernel's layers."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
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
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
# family: its configuration, {hook: our layer}, and calls of each op in one forward pass
FAMILIES = {
    "llama": ({}, {"RMSNorm": "RMSNorm"}, {"rms_norm": 5}),
    "qwen3": ({}, {"RMSNorm": "RMSNorm"}, {"rms_norm": 9}),
    "gpt_oss": (
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {"RMSNorm": "RMSNormFp32Weight"},
        {"rms_norm": 5},
    ),
    "qwen3_5_text": (
        LINEAR,
        {"RMSNormZeroCentered": "RMSNormZeroCentered", "RMSNormGated": "RMSNormGated"},
        {"rms_norm": 7, "rms_norm_gated": 1},
    ),
    "qwen3_next": (
        {
            **LINEAR,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
        {"RMSNormGated": "RMSNormGated"},
        {"rms_norm_gated": 1},
    ),
}


@pytest.fixture(scope="module")
def hub_kernel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("hub")
    build.build(ROOT, out, "rmsnorm-tpu")
    return out / "rmsnorm-tpu"


@pytest.fixture
def calls(hub_kernel, monkeypatch) -> dict[str, int]:
    """How often the built kernel's functions were called by its layers."""
    counts: dict[str, int] = {}
    layers = kernels.get_local_kernel(hub_kernel).layers
    functions = sys.modules[layers.RMSNorm.__module__]
    for name in ("rms_norm", "rms_norm_gated"):
        function = getattr(functions, name)

        def count(*args, _name=name, _function=function, **kwargs):
            if not torch.compiler.is_compiling():
                counts[_name] = counts.get(_name, 0) + 1
            return _function(*args, **kwargs)

        monkeypatch.setattr(functions, name, count)
    return counts


def kernelize(model: torch.nn.Module, hub_kernel: Path, hooks: dict[str, str], mode) -> None:
    kernels.register_kernel_mapping(
        {
            hook: {"cpu": kernels.LocalLayerRepository(hub_kernel, layer_name=layer)}
            for hook, layer in hooks.items()
        },
        inherit_mapping=False,
    )
    kernels.kernelize(model, mode=mode, device="cpu", use_fallback=True)


def make_models(family: str, dtype: torch.dtype) -> list[torch.nn.Module]:
    """The same model twice, with norms that do something."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**TINY, **FAMILIES[family][0]})
    models = [
        AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype).eval()
        for _ in range(2)
    ]
    for name, parameter in models[0].named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter)
    models[1].load_state_dict(models[0].state_dict())
    return models


def tokens() -> torch.Tensor:
    return torch.randint(2, TINY["vocab_size"], (2, 11), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_models_compute_the_same_bits(family, dtype, hub_kernel, calls):
    _, hooks, expected = FAMILIES[family]
    plain, ours = make_models(family, dtype)
    kernelize(ours, hub_kernel, hooks, kernels.Mode.INFERENCE)
    with torch.no_grad():
        assert torch.equal(ours(tokens()).logits, plain(tokens()).logits)
    assert calls == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_models_learn_the_same(family, hub_kernel, calls):
    _, hooks, expected = FAMILIES[family]
    models = make_models(family, torch.float32)
    kernelize(models[1], hub_kernel, hooks, kernels.Mode.TRAINING)
    for model in models:
        model.train()
        model(tokens()).logits.square().mean().backward()
    assert calls == expected
    plain, ours = (
        {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        for model in models
    )
    assert ours.keys() == plain.keys()
    for name, grad in plain.items():
        scale = grad.abs().max().clamp(min=1e-6)
        torch.testing.assert_close(ours[name] / scale, grad / scale, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5_text"])
def test_models_compile_in_one_graph(family, hub_kernel):
    _, hooks, expected = FAMILIES[family]
    _, ours = make_models(family, torch.bfloat16)
    if family == "gpt_oss":
        ours.set_experts_implementation("batched_mm")
    kernelize(ours, hub_kernel, hooks, kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE)
    targets = []

    def backend(graph, _):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    with torch.no_grad():
        found = compiled(tokens(), use_cache=False).logits
        wanted = ours(tokens(), use_cache=False).logits
    torch.testing.assert_close(found, wanted)
    ops = [target for target in targets if "_rmsnorm_tpu" in target]
    assert len(ops) == sum(expected.values())


def hooked_classes(hook: str) -> list[tuple[str, str]]:
    """(module, class) of every class of transformers behind the hook."""
    found = []
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        pattern = rf'^@use_kernel_forward_from_hub\("{hook}"\)\nclass (\w+)'
        for match in re.finditer(pattern, path.read_text(), re.MULTILINE):
            found.append((f"transformers.models.{path.parent.name}.{path.stem}", match[1]))
    return found


def layer_of(hook: str, cls: type) -> str:
    """What README says: which layer a class behind "RMSNorm" needs."""
    source = Path(sys.modules[cls.__module__].__file__).read_text()
    body = source[source.index(f"class {cls.__name__}(") :].split("\nclass ", 1)[0]
    multiplies_first = re.search(r"return \(self\.weight.* \* hidden_states\)\.to\(", body)
    return "RMSNormFp32Weight" if hook == "RMSNorm" and multiplies_first else hook


@pytest.mark.parametrize("hook", ["RMSNormZeroCentered", "RMSNormGated", "RMSNorm"])
def test_every_class_behind_the_hook_gets_its_own_bits(hook, hub_kernel, calls):  # RN15, RN21
    classes = hooked_classes(hook)
    assert len(classes) >= {"RMSNormZeroCentered": 2, "RMSNormGated": 8, "RMSNorm": 100}[hook]
    generator = torch.Generator().manual_seed(0)
    if hook == "RMSNorm":  # one of each source text, the other modules take minutes to import
        wanted = {"llama", "qwen3", "deepseek_v3", "gpt_oss", "olmo2", "deepseek_v4", "nemotron_h"}
        classes = [entry for entry in classes if entry[0].split(".")[2] in wanted]
    for module_name, class_name in classes:
        cls = getattr(importlib.import_module(module_name), class_name)
        module = cls(48).bfloat16()
        torch.nn.init.normal_(module.weight, generator=generator)
        arguments = [torch.randn(3, 5, 48, generator=generator).bfloat16()]
        if hook == "RMSNormGated":
            arguments.append(torch.randn(3, 5, 48, generator=generator).bfloat16())
        expected = cls.forward(module, *arguments)
        calls.clear()
        kernelize(module, hub_kernel, {hook: layer_of(hook, cls)}, kernels.Mode.TRAINING)
        found = module(*arguments)
        assert sum(calls.values()) == 1, class_name
        assert found.dtype == expected.dtype and torch.equal(found, expected), class_name
