"""flash_attention_packed: every sequence as if it were alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attention_oracle import gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from tpu_kernels.kernels.flash_attention import lowering
from tpu_kernels.kernels.flash_attention.ops import flash_attention
from tpu_kernels.kernels.flash_attention.packed import flash_attention_packed


def make(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def cumulated(lengths: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@st.composite
def problems(draw) -> dict:
    lengths = st.lists(st.integers(0, 5), min_size=0, max_size=4)
    q_lengths = draw(lengths)
    num = len(q_lengths)
    k_lengths = draw(st.lists(st.integers(0, 5), min_size=num, max_size=num))
    slack_q, slack_k = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    hkv, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    t, tk, hq = sum(q_lengths) + slack_q, sum(k_lengths) + slack_k, hkv * group
    side = st.sampled_from([-1, None, 0, 1, 3])
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    return {
        "q": make(t, hq, 8),
        "k": make(tk, hkv, 8, seed=1),
        "v": make(tk, hkv, 6, seed=2),
        "cu_seqlens_q": cumulated(q_lengths, dtype),
        "cu_seqlens_k": cumulated(k_lengths, dtype),
        "max_seqlen_q": max(q_lengths, default=0),
        "max_seqlen_k": max(k_lengths, default=0) + draw(st.integers(0, 2)),
        "causal": draw(st.booleans()),
        "window_size": (draw(side), draw(side)),
        "softcap": draw(st.sampled_from([0.0, 2.0])),
        "sinks": make(hq) if draw(st.booleans()) else None,
    }


@settings(max_examples=100, deadline=None)
@given(problem=problems())
def test_equals_one_call_per_sequence(problem):
    names = [name for name in ("q", "k", "v", "sinks") if problem[name] is not None]
    inputs = [problem[name].requires_grad_() for name in names]
    out, lse = flash_attention_packed(**problem, return_lse=True)
    ends = [problem.pop(f"cu_seqlens_{side}").tolist() for side in "qk"]
    for name in ("max_seqlen_q", "max_seqlen_k"):
        problem.pop(name)
    q, k, v = (problem.pop(name) for name in "qkv")
    expected = torch.zeros_like(out, requires_grad=False)
    expected_lse = torch.full_like(lse, -math.inf)
    for i in range(len(ends[0]) - 1):
        rows, keys = (slice(*side[i : i + 2]) for side in ends)
        one = flash_attention(
            q[None, rows], k[None, keys], v[None, keys], **problem, return_lse=True
        )
        expected = torch.cat([expected[: rows.start], one[0][0], expected[rows.stop :]])
        expected_lse[:, rows] = one[1][0]
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    if not expected.requires_grad:  # no sequence at all
        expected = expected + 0 * q.sum()
    grad_out = make(*out.shape, seed=3)
    grad_out[ends[0][-1] :] = math.nan  # rows of no sequence
    found = gradients(out, grad_out, inputs)
    wanted = gradients(expected, grad_out.nan_to_num(), inputs)
    torch.testing.assert_close(found, wanted)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=4, max_size=4))
def test_positions_and_ids_of_the_tpu_path(lengths):
    """What the kernels are given, against the definition row by row."""
    ends = [cumulated(list(side)).tolist() for side in zip(*lengths, strict=True)]
    sizes = 21, 22  # the longest sequences leave one and two rows over
    ids = lowering.packed_masks(*(np.array(side, np.int32) for side in ends), *sizes)
    ids = {name: array[0].tolist() for name, array in ids.items()}
    visible = set()
    for i in range(len(ends[0]) - 1):
        (first, stop), (first_key, stop_key) = (side[i : i + 2] for side in ends)
        for row in range(first, stop):
            for key in range(first_key, stop_key):
                offset = (key - stop_key) - (row - stop)
                visible.add((row, key, offset))
    found = {
        (row, key, ids["kv_positions"][key] - ids["q_positions"][row])
        for row in range(sizes[0])
        for key in range(sizes[1])
        if ids["q_segment_ids"][row] == ids["kv_segment_ids"][key]
    }
    assert found == visible


def test_empty_sequences_do_not_crash_the_backward():  # FA17
    q, k, v = (make(n, 2, 8, seed=n).requires_grad_() for n in (3, 6, 6))
    cu_q, cu_k = torch.tensor([0, 0, 3, 3]), torch.tensor([0, 2, 4, 6])
    out = flash_attention_packed(q, k, v, cu_q, cu_k, 3, 2)
    alone = flash_attention(q[None], k[None, 2:4], v[None, 2:4])[0]
    torch.testing.assert_close(out, alone)
    out.sum().backward()
    for x in (k, v):
        assert x.grad[[0, 1, 4, 5]].eq(0).all() and x.grad[2:4].ne(0).any()


def test_cu_seqlens_may_be_int64_and_max_seqlen_must_be_an_int():  # FA20
    q, k, v = (make(5, 2, 8, seed=s).float() for s in range(3))
    for dtype in (torch.int32, torch.int64):
        cu = cumulated([2, 3], dtype)
        out = flash_attention_packed(q, k, v, cu, cu, 3, 3)
        compiled = torch.compile(flash_attention_packed, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(q, k, v, cu, cu, 3, 3), out)
        with pytest.raises(TypeError, match="max_seqlen_q: expected a Python int, got a tensor"):
            flash_attention_packed(q, k, v, cu, cu, torch.tensor(3), 3)


def test_positions_without_a_zero_are_one_sequence():  # FA40
    """A continued sequence is packed by its length; nothing is derived from position ids."""
    q, k, v = make(3, 2, 8), make(7, 2, 8), make(7, 2, 8, seed=1)
    cu_q, cu_k = cumulated([3]), cumulated([7])
    out = flash_attention_packed(q, k, v, cu_q, cu_k, 3, 7, causal=True)
    torch.testing.assert_close(out, flash_attention(q[None], k[None], v[None], causal=True)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens_q": [0, 2, 6]}, "cu_seqlens_q: expected values from 0.*5 rows"),
        ({"cu_seqlens_q": [1, 2, 5]}, "cu_seqlens_q: expected values from 0"),
        ({"cu_seqlens_k": [0, 3, 2]}, "cu_seqlens_k: expected values from 0"),
        ({"cu_seqlens_k": [0, 5]}, "cu_seqlens_k: expected shape"),
        ({"max_seqlen_k": 1}, "max_seqlen_k: expected at least"),
        ({"cu_seqlens_q": [], "cu_seqlens_k": []}, "cu_seqlens_q: expected at least one"),
    ],
)
def test_broken_sizes_are_refused(change, message):
    q = make(5, 2, 8)
    call = {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 2, 5], "max_seqlen_q": 3}
    call = {**call, "max_seqlen_k": 3, **change}
    call = {
        name: torch.tensor(x, dtype=torch.int32) if isinstance(x, list) else x
        for name, x in call.items()
    }
    with pytest.raises(ValueError, match=message):
        flash_attention_packed(q, q, q, **call)


def test_float_cu_seqlens_are_refused():
    q = make(5, 2, 8)
    with pytest.raises(TypeError, match="cu_seqlens_q: expected dtype int32, int64, got"):
        flash_attention_packed(q, q, q, torch.tensor([0.0, 5]), torch.tensor([0, 5]), 5, 5)
