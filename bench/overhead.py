"""What a call costs beside its work, on the CPU: wrapper, loading and import, each with its target.

    python -m bench.overhead [--check]      # results/overhead.json; --check: fail above a target

The wrapper is what stands between a user's call and the arithmetic: argument checks, the dispatcher
and autograd. It is the time of the public function with an operator of the same schema in the place
of its own, one that only makes its outputs, less the time of making them. That operator called
directly is torch's share of it, the dispatcher with autograd, which `torch.inference_mode` leaves
out. Every number is measured, on this machine's CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo  # its guard around every kernel belongs to what is measured
import tree
from torch.utils._python_dispatch import TorchDispatchMode

from bench import facts

RESULT = "overhead.json"
TARGETS = {"wrapper_us": 15.0, "load_s": 1.0}
HUB_NAMES = ("ragged-dot-tpu", "attention-tpu", "rmsnorm-tpu", "rotary-tpu")


def times_us(*functions: Callable[[], Any], repeats: int = 100, calls: int = 40) -> list[float]:
    """CPU time of a call of each, the least over the repeats: what nothing else disturbed.

    They take turns with pauses, so that a disturbance of some seconds does not hit all repeats.
    """
    least = [math.inf] * len(functions)
    for _ in range(repeats):
        for i, fn in enumerate(functions):
            for _ in range(calls // 4):  # into the caches again
                fn()
            start = time.thread_time_ns()
            for _ in range(calls):
                fn()
            least[i] = min(least[i], (time.thread_time_ns() - start) / calls / 1e3)
        time.sleep(0.03)
    return least


class _Capture(TorchDispatchMode):
    """Notes the calls of our own operators, with what the dispatcher passes to them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == tree.PACKAGE:
            defaults = (a.default_value for a in func._schema.arguments[len(args) :])
            self.calls.append((func, (*args, *defaults)))
        return func(*args, **(kwargs or {}))


Row = tuple[str, Callable[[], Any], Any, Callable[[], Any]]  # op, call, reference module, plain


def _ops() -> list[Row]:
    """Calls on tensors of a few elements, and what plain torch has for them."""
    from tpu_kernels.kernels.flash_attention import ops as attention
    from tpu_kernels.kernels.flash_attention import reference as attention_reference
    from tpu_kernels.kernels.moe_experts import ops as experts
    from tpu_kernels.kernels.moe_experts import reference as experts_reference
    from tpu_kernels.kernels.ragged_dot import ops as grouped
    from tpu_kernels.kernels.ragged_dot import reference as grouped_reference
    from tpu_kernels.kernels.rmsnorm import ops as norms
    from tpu_kernels.kernels.rmsnorm import reference as norms_reference
    from tpu_kernels.kernels.rotary import ops as rotary
    from tpu_kernels.kernels.rotary import reference as rotary_reference

    x, weight = torch.randn(4, 16), torch.ones(16)
    q, table = torch.randn(1, 2, 4, 16), torch.randn(1, 4, 16)
    heads = q.transpose(1, 2)
    lhs, rhs, sizes = torch.randn(4, 8), torch.randn(1, 8, 8), torch.tensor([4], dtype=torch.int32)
    index, routes = torch.zeros(4, 1, dtype=torch.int32), torch.ones(4, 1)
    up, down = torch.randn(1, 16, 8), torch.randn(1, 8, 8)

    def norm(x):
        return torch.nn.functional.rms_norm(x, (16,), weight, 1e-6)

    def rotate(x):
        a, b = x.chunk(2, -1)
        return x * table + torch.cat((-b, a), -1) * table

    def layer():
        gate, up_half = (lhs @ up[0].T).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up_half) @ down[0].T

    return [
        ("rms_norm", lambda: norms.rms_norm(x, weight), norms_reference, lambda: norm(x)),
        (
            "add_rms_norm",
            lambda: norms.add_rms_norm(x, x, weight),
            norms_reference,
            lambda: norm(x + x),
        ),
        (
            "rms_norm_gated",
            lambda: norms.rms_norm_gated(x, x, weight),
            norms_reference,
            lambda: norm(x) * torch.nn.functional.silu(x),
        ),
        (
            "apply_rotary",
            lambda: rotary.apply_rotary(q, q, table, table),
            rotary_reference,
            lambda: (rotate(q), rotate(q)),
        ),
        (
            "qk_norm_rotary",
            lambda: rotary.qk_norm_rotary(q, q, weight, weight, table, table),
            rotary_reference,
            lambda: (rotate(norm(q)), rotate(norm(q))),
        ),
        (
            "ragged_dot",
            lambda: grouped.ragged_dot(lhs, rhs, sizes),
            grouped_reference,
            lambda: lhs @ rhs[0],
        ),
        (
            "moe_experts",
            lambda: experts.moe_experts(lhs, index, routes, up, down),
            experts_reference,
            layer,
        ),
        (
            "flash_attention",
            lambda: attention.flash_attention(heads, heads, heads, causal=True),
            attention_reference,
            lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True),
        ),
    ]


@contextlib.contextmanager
def _idle(func: Any, args: tuple[Any, ...]) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """Puts an operator of the same schema that only makes its outputs in the place of `func`.

    Yields that operator, and what it does as a function of nothing.
    """
    from tpu_kernels.tpu_runtime import define_op

    like = func(*args)

    def body(*_: Any) -> Any:
        return tuple(map(torch.empty_like, like)) if isinstance(like, tuple) else like.clone()

    schema = str(func._schema)
    twin = define_op(
        f"{tree.PACKAGE}_idle::{func._opname}",
        schema[schema.index("(") :],
        reference=body,
        fake=body,
        load_kernel=lambda: body,
    )
    for module in [m for name, m in sys.modules.items() if name.startswith(tree.PACKAGE)]:
        for name, value in vars(module).items():
            if value is func:
                with mock.patch.object(module, name, twin):
                    yield twin, body
                return
    raise LookupError(f"no module holds {func}")


def measure_wrappers() -> list[dict[str, Any]]:
    """A row for each op: the call, its reference called directly, the wrapper, plain torch."""
    rows = []
    for name, call, module, plain in _ops():
        with _Capture() as capture:
            call()
        func, args = capture.calls[0]
        reference = functools.partial(getattr(module, func._opname), *args)
        with _idle(func, args) as (twin, body):
            idle_us, twin_us, body_us = times_us(call, functools.partial(twin, *args), body)
            with torch.inference_mode():
                inference_us, inference_body_us = times_us(call, body)
        call_us, reference_us, plain_us = times_us(call, reference, plain)
        times = {
            "call_us": call_us,
            "reference_us": reference_us,
            "wrapper_us": idle_us - body_us,
            "dispatcher_us": twin_us - body_us,
            "inference_wrapper_us": inference_us - inference_body_us,
            "plain_torch_us": plain_us,
        }
        rows.append({"op": name} | {key: round(value, 1) for key, value in times.items()})
    return rows


_LOAD = """
import json, sys, time
start = time.perf_counter()
import torch
torch_s = time.perf_counter() - start
start = time.perf_counter()
from kernels import get_kernel
kernels_s = time.perf_counter() - start
before = set(sys.modules)
start = time.perf_counter()
get_kernel(sys.argv[1], version=1, trust_remote_code=True)
load_s = time.perf_counter() - start
heavy = sorted({"jax", "torch_tpu", "tokamax"} & (set(sys.modules) - before))
print(json.dumps({"torch_s": torch_s, "kernels_s": kernels_s, "load_s": load_s, "heavy": heavy}))
"""


def measure_loading(repeats: int = 5) -> list[dict[str, Any]]:
    """get_kernel of each Hub kernel in fresh processes, and the imports that come before it."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        build = [sys.executable, str(facts.ROOT / "scripts" / "build.py"), "--out", folder]
        subprocess.run(build, check=True, capture_output=True)
        for name in HUB_NAMES:
            found = [_load_once(name, Path(folder) / name) for _ in range(repeats)]
            rows.append(
                {
                    "kernel": name,
                    "load_s": round(statistics.median(row["load_s"] for row in found), 3),
                    "import_torch_s": round(statistics.median(r["torch_s"] for r in found), 2),
                    "import_kernels_s": round(statistics.median(r["kernels_s"] for r in found), 2),
                    "also_imports": found[0]["heavy"],
                }
            )
    return rows


def _load_once(name: str, built: Path) -> dict[str, Any]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TPU_"))}
    env |= {
        "LOCAL_KERNELS": f"org/{name}={built}",
        "HF_HUB_OFFLINE": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    command = [sys.executable, "-c", _LOAD, f"org/{name}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def problems(result: dict[str, Any]) -> list[str]:
    """What misses its target."""
    found = [
        f"{row['op']}: wrapper {row['wrapper_us']} us, target {TARGETS['wrapper_us']}"
        for row in result["wrappers"]
        if row["wrapper_us"] > TARGETS["wrapper_us"]
    ]
    return found + [
        f"{row['kernel']}: loads in {row['load_s']} s, target {TARGETS['load_s']}"
        for row in result["loading"]
        if row["load_s"] > TARGETS["load_s"]
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit 1 if a target is missed")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    result = {
        "kind": "measured",
        "device": f"CPU, {os.cpu_count()} cores, {platform.machine()}",
        "commit": facts.commit(),
        "date": facts.today(),
        "versions": facts.versions(),
        "targets": TARGETS,
        "wrappers": measure_wrappers(),
        "loading": measure_loading(),
    }
    for row in result["wrappers"]:
        print("measured " + ", ".join(f"{key} {value}" for key, value in row.items()))
    for row in result["loading"]:
        print("measured " + ", ".join(f"{key} {value}" for key, value in row.items()))
    facts.save(RESULT, result)
    missed = problems(result)
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed and options.check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
