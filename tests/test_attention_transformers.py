"""flash_attn_forward: its contract, and models of transformers that run on the built Hub kernel.

The models load `org/attention-tpu` as users do, with LOCAL_KERNELS pointing at a fresh build, and
must compute and learn what they do with eager attention.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from attention_oracle import oracle
from tiny_kernel import ROOT, build
from tpu_kernels.kernels.flash_attention.transformers import flash_attn_forward
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "org/attention-tpu"


def make(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def qkv(sq: int, sk: int) -> tuple[torch.Tensor, ...]:
    return make(2, 4, sq, 8), make(2, 2, sk, 8), make(2, 2, sk, 6, seed=1)


def expected(q, k, v, mask: torch.Tensor, **options) -> torch.Tensor:
    return oracle(*(x.transpose(1, 2) for x in (q, k, v)), mask=mask, **options)[0]


def top_left(sq: int, sk: int, window: int = 10**6) -> torch.Tensor:
    offset = torch.arange(sq)[:, None] - torch.arange(sk)
    return (offset >= 0) & (offset < window)


@pytest.mark.parametrize(("sq", "sk"), [(5, 5), (5, 9), (9, 5), (2, 300)])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_without_a_mask_causal_is_top_left(sq, sk, window):
    q, k, v = qkv(sq, sk)
    out, weights = flash_attn_forward(None, q, k, v, None, sliding_window=window)
    assert out.shape == (2, sq, 4, 6) and out.is_contiguous() and weights is None
    mask = top_left(sq, sk, window or 10**6)
    torch.testing.assert_close(out, expected(q, k, v, mask))


def test_a_single_query_sees_every_key():
    q, k, v = qkv(1, 9)
    out, _ = flash_attn_forward(None, q, k, v, None, sliding_window=3, is_causal=True)
    torch.testing.assert_close(out, expected(q, k, v, torch.ones(1, 9).bool()))


def test_encoders_are_not_causal():
    q, k, v = qkv(5, 7)
    everything = expected(q, k, v, torch.ones(5, 7).bool())
    encoder, decoder = (SimpleNamespace(is_causal=value) for value in (False, True))
    for module, is_causal in ((encoder, None), (decoder, False), (None, False)):
        out, _ = flash_attn_forward(module, q, k, v, None, is_causal=is_causal)
        torch.testing.assert_close(out, everything)
    out, _ = flash_attn_forward(encoder, q, k, v, None, is_causal=True)
    torch.testing.assert_close(out, expected(q, k, v, top_left(5, 7)))


def test_a_mask_holds_everything():
    q, k, v = qkv(5, 7)
    mask = make(2, 1, 5, 7) < 0.5
    for options in ({}, {"sliding_window": 1}, {"is_causal": True}, {"is_causal": False}):
        out, _ = flash_attn_forward(None, q, k, v, mask, **options)
        torch.testing.assert_close(out, expected(q, k, v, mask))


def test_scaling_softcap_and_sinks_arrive():
    q, k, v = qkv(5, 5)
    sinks = make(4)
    out, _ = flash_attn_forward(None, q, k, v, None, scaling=0.7, softcap=2.0, s_aux=sinks)
    options = {"softmax_scale": 0.7, "softcap": 2.0, "sinks": sinks}
    torch.testing.assert_close(out, expected(q, k, v, top_left(5, 5), **options))


def test_packed_batch_without_a_mask():
    q, k, v = (x[:1] for x in qkv(5, 5))
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    ids = torch.tensor([0, 0, 1, 1, 1])
    out, _ = flash_attn_forward(
        None, q, k, v, None, cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=3, max_length_k=3
    )
    mask = top_left(5, 5) & (ids[:, None] == ids)
    torch.testing.assert_close(out, expected(q, k, v, mask))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dropout": 0.1}, NotImplementedError, "dropout_p"),
        ({"position_bias": torch.zeros(1)}, NotImplementedError, "position_bias"),
        ({"output_attentions": True}, NotImplementedError, "output_attentions"),
        ({"alibi_slopes": torch.zeros(4)}, TypeError, "alibi_slopes"),
        ({"attention_mask": torch.zeros(2, 1, 5, 5)}, TypeError, "mask: expected dtype bool"),
        ({"attention_mask": torch.ones(2, 1, 4, 5).bool()}, ValueError, "mask: expected a shape"),
    ],
)
def test_unsupported_options_raise(options, error, message):  # FA42
    q, k, v = qkv(5, 5)
    with pytest.raises(error, match=message):
        flash_attn_forward(None, q, k, v, **{"attention_mask": None, **options})


def test_harmless_options_pass():
    q, k, v = qkv(5, 5)
    out, _ = flash_attn_forward(
        None,
        q,
        k,
        v,
        None,
        dropout=0.0,
        position_ids=torch.arange(5),
        position_bias=None,
        output_attentions=False,
        use_cache=True,
        num_items_in_batch=torch.tensor(3),
        alibi_slopes=None,
    )
    torch.testing.assert_close(out, expected(q, k, v, top_left(5, 5)))


# Models

TINY = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, **LAYERS},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, **LAYERS},
    "mistral": {"sliding_window": 4},
    "gpt_oss": {
        "head_dim": 8,
        "sliding_window": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        **LAYERS,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **EXPERTS,
    },
}
PADDINGS = {"left": [0, 4, 7], "right": [0, -4, -7]}


@pytest.fixture(scope="module", autouse=True)
def hub_kernel(tmp_path_factory):
    """LOCAL_KERNELS names a fresh build of attention-tpu."""
    out = tmp_path_factory.mktemp("hub")
    build.build(ROOT, out, "attention-tpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_KERNELS", f"{NAME}={out / 'attention-tpu'}")
        yield


def make_models(family: str) -> tuple[torch.nn.Module, torch.nn.Module, list]:
    """(with eager attention, with ours, what ours was called with)."""
    torch.manual_seed(0)
    eager, ours = (
        AutoModelForCausalLM.from_config(
            AutoConfig.for_model(family, **{**TINY, **FAMILIES[family]}),
            attn_implementation="eager",
        ).eval()
        for _ in range(2)
    )
    for name, parameter in eager.named_parameters():
        if "sinks" in name or "norm" in name:
            torch.nn.init.normal_(parameter)
    ours.load_state_dict(eager.state_dict())
    ours.set_attn_implementation(NAME, allow_all_kernels=True)
    assert ours.config._attn_implementation == NAME != eager.config._attn_implementation
    calls, kernel = [], ALL_ATTENTION_FUNCTIONS[NAME]
    kernel = getattr(kernel, "counted", kernel)  # it is loaded once per process
    assert kernel.__module__.startswith("_attention_tpu")

    def counting(module, query, key, value, attention_mask, **kwargs):
        calls.append((query.shape[2], key.shape[2], attention_mask is not None))
        return kernel(module, query, key, value, attention_mask, **kwargs)

    counting.counted = kernel
    ALL_ATTENTION_FUNCTIONS.register(NAME, counting)
    return eager, ours, calls


def padded_batch(padding: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, TINY["vocab_size"], (3, 12), generator=generator)
    mask = torch.ones_like(ids)
    for row, amount in zip(mask, PADDINGS[padding], strict=True):
        row[slice(amount) if amount >= 0 else slice(amount, None)] = 0
    return ids * mask, mask


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(2, TINY["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_models_compute_and_learn_as_with_eager(family):
    models = make_models(family)
    for padding in PADDINGS:
        ids, mask = padded_batch(padding)
        position_ids = (mask.cumsum(1) - 1).clamp(min=0)
        grads = []
        for model in models[:2]:
            model.zero_grad()
            logits = model(ids, attention_mask=mask, position_ids=position_ids).logits
            logits[mask.bool()].square().sum().backward()
            parameters = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            grads.append((logits[mask.bool()].detach(), parameters))
        assert_close(grads[1][0], grads[0][0])
        assert grads[1][1].keys() == grads[0][1].keys()
        for name, grad in grads[0][1].items():
            scale = grad.abs().max().clamp(min=1e-6)
            assert_close(grads[1][1][name] / scale, grad / scale)
    assert len(models[2]) == 2 * len(PADDINGS) and all(has_mask for *_, has_mask in models[2])


@pytest.mark.parametrize("family", FAMILIES)
def test_models_without_padding_and_with_packed_positions(family):
    eager, ours, calls = make_models(family)
    ids = tokens(2, 11)
    with torch.no_grad():
        assert_close(ours(ids).logits, eager(ids).logits)
        positions = torch.cat([torch.arange(4), torch.arange(7)])[None]
        packed = ours(ids[:1], position_ids=positions, use_cache=False).logits
        assert_close(packed, eager(ids[:1], position_ids=positions, use_cache=False).logits)
        if family != "gpt_oss":  # transformers 5.22 packs nothing there
            for part in (slice(0, 4), slice(4, 11)):
                assert_close(packed[:, part], eager(ids[:1, part]).logits)
            assert all(has_mask for *_, has_mask in calls[2:])
    assert len(calls) == 4


@pytest.mark.parametrize("family", FAMILIES)
def test_static_cache_generates_as_eager(family):
    eager, ours, calls = make_models(family)
    options = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": "static"}
    options |= {"output_logits": True, "return_dict_in_generate": True, "disable_compile": True}
    ids, mask = padded_batch("left")
    for call in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": tokens(2, 6)}):
        found, wanted = (model.generate(**call, **options) for model in (ours, eager))
        assert torch.equal(found.sequences, wanted.sequences)
        assert_close(torch.stack(found.logits), torch.stack(wanted.logits))
    assert any(sq == 1 for sq, *_ in calls)
    if family != "mistral":  # its cache holds no more than the window
        assert any(sk > sq > 1 for sq, sk, _ in calls)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_prefill_of_a_static_cache_without_a_mask(family):
    """Sk > Sq with mask None: bottom-right alignment would give wrong tokens."""
    eager, ours, calls = make_models(family)
    ids = tokens(1, 6)
    results = []
    for model in (ours, eager):
        cache = StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad():
            results.append(model(ids, past_key_values=cache).logits)
    assert_close(*results)
    assert family != "llama" or calls[0] == (6, 16, False)


QUICK = ("llama", "gemma2", "gpt_oss")


@pytest.mark.parametrize(
    "family",
    [name if name in QUICK else pytest.param(name, marks=[pytest.mark.slow]) for name in FAMILIES],
)
def test_models_compile_in_one_graph(family):
    _, ours, _ = make_models(family)
    if family in ("gpt_oss", "deepseek_v3"):
        ours.set_experts_implementation("batched_mm")
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    ids, mask = padded_batch("left")
    with torch.no_grad():
        for call in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": tokens(2, 6)}):
            expected = ours(**call, use_cache=False).logits
            found = compiled(**call, use_cache=False).logits
            assert_close(found.nan_to_num(), expected.nan_to_num())
            assert not math.isnan(found.sum())
