"""flash_attn_forward: the attention function that transformers calls for every model.

    AutoModelForCausalLM.from_pretrained(..., attn_implementation="org/attention-tpu")

transformers finds it in the loaded kernel beside `supports_flash_attn`, and then builds its masks
as for torch's own attention. transformers itself is never imported.
"""

from __future__ import annotations

from typing import Any

import torch

from .ops import attend
from .packed import flash_attention_packed

supports_flash_attn = True

# Keywords that transformers 5.22 passes down to every attention function and that say nothing about
# what to compute: the mask already holds positions, packing and selected keys.
_HARMLESS = frozenset(
    {
        "cache_position",
        "deterministic",
        "encoder_attention_mask",
        "encoder_hidden_states",
        "indices",
        "labels",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "mm_token_type_ids",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "seq_idx",
        "token_type_ids",
        "use_cache",
    }
)


def flash_attn_forward(
    module: torch.nn.Module | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention: query [b, hq, sq, d] -> ([b, sq, hq, dv], None).

    Args:
        module: the calling layer; only its `is_causal` is read, where that argument is None.
        query, key, value: [b, hq, sq, d], [b, hkv, sk, d], [b, hkv, sk, dv]; not copied.
        attention_mask: bool, broadcastable to [b, 1 or hq, sq, sk], True where a query may see a
            key. It holds everything: sliding_window and is_causal are ignored. None: query i sees
            keys 0..i (also when sk > sq, a static cache) if sq > 1 and is_causal is not False;
            sliding_window then keeps keys i - sliding_window + 1..i. A single query, or
            is_causal False, sees all keys.
        dropout: only 0 is supported.
        scaling: factor of the logits, by default 1 / sqrt(d).
        softcap: soft cap of the logits.
        s_aux: [hq], attention sinks.

    Raises:
        NotImplementedError: for dropout and for options that change the result (position_bias,
            output_attentions, a paged cache).
        TypeError: for unknown keywords that are neither None nor False.
    """
    cu_seqlens = (kwargs.pop("cu_seq_lens_q", None), kwargs.pop("cu_seq_lens_k", None))
    _refuse(kwargs)
    options = {"softmax_scale": scaling, "softcap": softcap, "sinks": s_aux, "dropout_p": dropout}
    if attention_mask is not None:
        out = attend(query, key, value, mask=attention_mask, heads_first=True, **options)
        return out, None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    b, _, sq, _ = query.shape
    sk = key.shape[2]
    is_causal = bool(is_causal) and sq > 1
    if is_causal and sliding_window is not None:
        options["window_size"] = (sliding_window - 1, 0)
    if cu_seqlens[0] is not None and cu_seqlens[1] is not None:
        return _packed(query, key, value, cu_seqlens, is_causal, options), None
    if is_causal and sq < sk:
        # Top-left: the last query stands at key sq - 1, and no query sees what comes after.
        options["kv_lengths"] = torch.full((b,), sq, dtype=torch.int32, device=query.device)
    elif is_causal and sq > sk:
        return _top_left_with_fewer_keys(query, key, value, options), None
    out = attend(query, key, value, causal=is_causal, heads_first=True, **options)
    return out, None


def _refuse(kwargs: dict[str, Any]) -> None:
    for name, value in kwargs.items():
        if name in _HARMLESS or value is None or value is False:
            continue
        if name in ("position_bias", "output_attentions", "cache", "head_mask", "block_indices"):
            raise NotImplementedError(
                f"{name}: attention-tpu does not support it; load the model with "
                'attn_implementation="eager"'
            )
        raise TypeError(f"flash_attn_forward() got an unexpected keyword argument {name!r}")


def _packed(
    query: torch.Tensor,  # [1, hq, t, d]
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: tuple[torch.Tensor, torch.Tensor],
    is_causal: bool,
    options: dict[str, Any],
) -> torch.Tensor:  # [1, t, hq, dv]
    """Padding-free batches that come with cu_seq_lens and no mask."""
    if query.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q: expected a batch of one packed row, got {query.shape[0]}")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return flash_attention_packed(
        q, k, v, *cu_seqlens, q.shape[0], k.shape[0], causal=is_causal, **options
    )[None]


def _top_left_with_fewer_keys(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Top-left causal with sq > sk, which no bottom-right alignment expresses: a mask."""
    left, _ = options.pop("window_size", (None, None))
    row = torch.arange(query.shape[2], device=query.device)[:, None]
    column = torch.arange(key.shape[2], device=query.device)
    mask = column <= row
    if left is not None:
        mask = mask & (column >= row - left)
    return attend(query, key, value, mask=mask, heads_first=True, **options)
