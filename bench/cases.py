"""Cases by name: ours, any shape of an operation, and their peers.

R1                                              a case of cost_cases.py
ragged_dot --m 512 --k 2048 --n 1536 --g 16     the same operation, any shape
R1/tokamax_v2                                   a peer (see peers.py) of any of these
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import cost_cases, peers


@dataclass(frozen=True)
class Case:
    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    counts: dict[str, Any]  # "flops" and "bytes" of the work itself, see cost_cases.py


def find(name: str, chip: str) -> Case:
    if name.startswith("published:"):
        from bench import published  # its measurements come with tokamax

        return Case(name, *published.find(name))
    base, _, peer = name.partition("/")
    fn, args, counts = cost_cases.CASES[base] if base in cost_cases.CASES else of_shape(base)
    if peer:
        fn, args = peers.peers_of(counts, args, chip)[peer]
    return Case(name, fn, tuple(args), counts)


def peer_names(name: str, chip: str) -> list[str]:
    case = find(name, chip)
    return list(peers.peers_of(case.counts, case.args, chip))


@functools.cache
def of_shape(command: str) -> tuple:
    """The case that a command line names, such as "rms_norm --rows 8192 --d 4096"."""
    options = parser().parse_args(shlex.split(command))
    _ADD[options.op]("custom", options)
    return cost_cases.CASES.pop("custom")


def parser() -> argparse.ArgumentParser:
    """One sub-command for each operation; sizes are named as in README.md."""
    top = argparse.ArgumentParser(prog="make bench ARGS=...", add_help=False)
    ops = top.add_subparsers(dest="op", required=True)

    def op(name: str, **sizes: int | None) -> argparse.ArgumentParser:
        sub = ops.add_parser(name, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        for size, default in sizes.items():
            sub.add_argument(f"--{size}", type=int, default=default, required=default is None)
        return sub

    sub = op("ragged_dot", m=None, k=None, n=None, g=None)
    sub.add_argument("--layout", choices=("gnk", "gkn"), default="gnk", help="of rhs")
    sub.add_argument("--sizes", help="rows of each group, such as 40,0,200; default: equal")
    op("moe_experts", t=None, e=128, routed=128, topk=8, h=2048, i=768)
    sub = op("flash_attention", b=1, sq=None, sk=0, hq=32, hkv=8, d=128, window=-1)
    sub.add_argument("--no-causal", action="store_true")
    for name in ("rms_norm", "rms_norm_backward", "add_rms_norm", "rms_norm_gated"):
        op(name, rows=None, d=None)
    for name in ("apply_rotary", "qk_norm_rotary"):
        sub = op(name, b=1, s=None, hq=32, hkv=8, d=128, rotary_dim=0)
        sub.add_argument("--layout", choices=("bhsd", "bshd"), default="bhsd")
        sub.add_argument("--interleaved", action="store_true")
    return top


def _add_ragged_dot(name: str, o: argparse.Namespace) -> None:
    if o.sizes:
        sizes = np.array([int(size) for size in o.sizes.split(",")], np.int32)
        if len(sizes) != o.g or sizes.sum() > o.m:
            raise SystemExit(f"--sizes: expected {o.g} sizes with a sum up to {o.m}, got {o.sizes}")
    else:
        sizes = np.full(o.g, o.m // o.g, np.int32)
        sizes[: o.m % o.g] += 1
    cost_cases.add_ragged_dot(name, o.m, o.k, o.n, sizes, o.layout == "gnk")


def _add_experts(name: str, o: argparse.Namespace) -> None:
    cost_cases.add_experts(
        name, o.t, o.e, is_shard=o.e < o.routed, h=o.h, i=o.i, num_routed=o.routed, topk=o.topk
    )


def _add_attention(name: str, o: argparse.Namespace) -> None:
    sk = o.sk or o.sq
    causal = not o.no_causal
    ends = np.arange(sk - o.sq, sk) if causal else np.full(o.sq, sk - 1)  # last visible key
    starts = np.maximum(0, np.arange(sk - o.sq, sk) - o.window) if o.window >= 0 else 0
    pairs = float(np.maximum(0, ends - starts + 1).sum())
    shape = (o.b, o.sq, o.hq, o.hkv, sk)
    masks = {"kv_lengths": np.full(o.b, sk, np.int32)} if o.sq == 1 else {}
    cost_cases.add_attention(name, shape, o.d, pairs, causal=causal, window=o.window, **masks)


def _add_norm(name: str, o: argparse.Namespace) -> None:
    static = (*(("silu", False) if o.op == "rms_norm_gated" else ()), *cost_cases.LLAMA)
    static += (True, True) if o.op == "rms_norm_backward" else ()
    num_arrays = {"rms_norm": 2, "add_rms_norm": 4}.get(o.op, 3)
    num_vectors = 2 if o.op == "rms_norm_backward" else 1
    fn = getattr(cost_cases.norms, o.op)
    cost_cases.add_norm(name, fn, o.rows, o.d, num_arrays, num_vectors, *static)


def _add_rotary(name: str, o: argparse.Namespace) -> None:
    def shape(heads: int) -> tuple[int, int, int, int]:
        return (o.b, heads, o.s, o.d) if o.layout == "bhsd" else (o.b, o.s, heads, o.d)

    cost_cases.add_rotary(
        name,
        shape(o.hq),
        shape(o.hkv),
        (1, o.s, o.rotary_dim or o.d),
        axis=1 if o.layout == "bhsd" else 2,
        interleaved=o.interleaved,
        has_norm=o.op == "qk_norm_rotary",
    )


_ADD = {
    "ragged_dot": _add_ragged_dot,
    "moe_experts": _add_experts,
    "flash_attention": _add_attention,
    "rms_norm": _add_norm,
    "rms_norm_backward": _add_norm,
    "add_rms_norm": _add_norm,
    "rms_norm_gated": _add_norm,
    "apply_rotary": _add_rotary,
    "qk_norm_rotary": _add_rotary,
}


def describe(name: str) -> str:
    """The operation and its shapes, as a line of a table."""
    case = find(name, "v5e")
    op, args = case.counts.get("op", ""), case.args
    shapes = ["x".join(map(str, np.shape(x))) for x in args]
    if op == "ragged_dot":
        layout = " transposed" if case.counts["transpose_rhs"] else ""
        g = args[1].shape[0]
        empty = int((np.asarray(args[2]) == 0).sum())
        note = f", {empty} of {g} groups empty" if empty else ""
        return f"ragged_dot {shapes[0]} by {shapes[1]}{layout}{note}"
    if op == "weight_grad":
        (m, n), k, g = args[0].shape, args[1].shape[1], len(args[2])
        return f"weight gradient, {m} rows to {g}x{n}x{k}"
    if op == "moe_experts":
        t, (e, h, i) = args[0].shape[0], args[4].shape
        return f"moe_experts, {t} token{'s' * (t > 1)}, {e} experts, hidden {h}, intermediate {i}"
    if op == "flash_attention":
        (b, sq, hq, d), (sk, hkv) = args[0].shape, args[1].shape[1:3]
        kind = "causal " if case.counts["causal"] else ""
        window = f"window {case.counts['window'] + 1} " if case.counts["window"] >= 0 else ""
        keys = f", {sk} keys" if sk != sq else ""
        masks = "".join(f", {mask}" for mask in case.counts["masks"])
        return f"attention, {kind}{window}{b}x{hq}/{hkv}x{sq}x{d}{keys}{masks}"
    if op == "flash_attention_backward":
        (b, sq, hq, d), hkv = args[0].shape, args[1].shape[2]
        what = "backward" if name.endswith("-alone") else "forward and backward"
        return f"attention, {what}, causal {b}x{hq}/{hkv}x{sq}x{d}"
    if op.startswith(("rms", "add")):
        return f"{op} {shapes[0]}"
    if op in ("apply_rotary", "qk_norm_rotary"):
        kind = " interleaved" if case.counts["interleaved"] else ""
        width = args[2].shape[-1]
        part = f", first {width} features" if width != args[0].shape[-1] else ""
        return f"{op}{kind}, q {shapes[0]} and k {shapes[1]}{part}"
    if name.startswith("R10"):
        return f"ragged_dot {shapes[0]} by {shapes[1]} of {args[1].dtype}"
    if name.startswith("E"):
        t, (e, *_) = args[0].shape[0], args[3].shape
        experts = f"{e} expert{'s' * (e > 1)}"
        return f"moe_experts, {t} token{'s' * (t > 1)}, {experts}, {shapes[3]} of {args[3].dtype}"
    return f"{op} {', '.join(shapes)}"


def lowering_of_peers() -> contextlib.AbstractContextManager:
    """tokamax refuses to lower for a chip that is not there unless it is told."""
    try:
        from tokamax import config
    except ImportError:
        return contextlib.nullcontext()
    return config.cross_compile(True)
