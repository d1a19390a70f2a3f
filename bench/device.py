"""Device microbenchmarks: our ops beside torch's own, tokamax and the plain expression, MEASURED.

    python -m bench.device                     # on a TPU VM: results/device_<chip>.json
    python -m bench.device R1 N1 --csv out.csv
    python -m bench.device                     # elsewhere: tiny sizes on the CPU, a smoke test

Every implementation is warmed up, then timed in repeats of several calls with one synchronisation
at the end of each. The calls of a repeat go round as many copies of the inputs as exceed the VMEM
four times, so that nothing is found where the call before left it. "forward" runs without autograd,
"forward+backward" with the gradients of all floating-point inputs.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench import HAS_TPU, cases, facts, torch_ops
from bench.cases import Case
from bench.machine import MACHINES, floor_us

CASES = ("R1", "R3", "E1.64", "E1.512", "A1", "A3", "A5", "A6", "N1", "N2", "N6", "Q1", "Q3")
TINY = (
    "ragged_dot --m 16 --k 32 --n 32 --g 4",
    "moe_experts --t 8 --e 4 --routed 4 --topk 2 --h 32 --i 32",
    "flash_attention --sq 16 --hq 4 --hkv 2 --d 16",
    "flash_attention --b 2 --sq 1 --sk 32 --hq 4 --hkv 2 --d 16",
    "rms_norm --rows 16 --d 64",
    "add_rms_norm --rows 16 --d 64",
    "rms_norm_gated --rows 16 --d 64",
    "apply_rotary --s 16 --hq 4 --hkv 2 --d 32",
    "qk_norm_rotary --s 16 --hq 4 --hkv 2 --d 32",
)
WARM_UP_CALLS = 3
COLUMNS = (
    "case", "op", "pass", "implementation", "device", "kind", "median_us", "p25_us", "p75_us",
    "min_us", "repeats", "calls", "copies", "floor_us", "times_floor", "error",
)  # fmt: skip


def chip_name() -> str:
    """v5e, v6e and so on, or cpu."""
    if not HAS_TPU:
        return "cpu"
    from tpu_kernels.tpu_runtime import current_chip

    return current_chip().name


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.accelerator.synchronize()


def num_copies(case: Case, chip: str) -> int:
    """Of the inputs, so that they are four times as large as the VMEM and at most 8 GiB."""
    if chip == "cpu":
        return 2
    size = sum(arg.size * arg.dtype.itemsize for arg in case.args)
    beyond_vmem = -(-4 * MACHINES[chip].chip.vmem_bytes // size)
    return max(2, min(beyond_vmem, (8 << 30) // size, 64))


def with_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Forward, then the gradients of every input that has one, for upstream gradients of one."""

    def run(*tensors: torch.Tensor) -> Any:
        outputs = fn(*tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        inputs = [tensor for tensor in tensors if tensor.requires_grad]
        upstream = [torch.ones_like(output) for output in outputs]
        return torch.autograd.grad(outputs, inputs, upstream, allow_unused=True)

    return run


def measure(
    fn: Callable[..., Any],
    copies: list[list[torch.Tensor]],
    device: str,
    repeats: int,
    seconds: float,
) -> dict[str, Any]:
    """Microseconds of a call: median and quartiles over the repeats; each takes some `seconds`."""
    for index in range(WARM_UP_CALLS * len(copies)):
        fn(*copies[index % len(copies)])
    synchronize(device)

    def repeat(calls: int) -> float:
        start = time.perf_counter()
        for index in range(calls):
            fn(*copies[index % len(copies)])
        synchronize(device)
        return time.perf_counter() - start

    calls = len(copies)
    while (taken := repeat(calls)) < seconds / 2 and calls < 10_000:
        calls = min(10_000, 2 * calls if taken < seconds / 8 else round(calls * seconds / taken))
    times = sorted(1e6 * repeat(calls) / calls for _ in range(repeats))
    low, _, high = statistics.quantiles(times, n=4)
    return {
        "median_us": round(statistics.median(times), 2),
        "p25_us": round(low, 2),
        "p75_us": round(high, 2),
        "min_us": round(times[0], 2),
        "repeats": repeats,
        "calls": calls,
        "copies": len(copies),
    }


def rows_of(name: str, chip: str, repeats: int, seconds: float) -> list[dict[str, Any]]:
    """Both passes of every implementation of a case; what fails says why and the others go on."""
    case = cases.find(name, "v5e" if chip == "cpu" else chip)
    device = "cpu" if chip == "cpu" else "tpu"
    copies = [torch_ops.make_tensors(case, device, seed) for seed in range(num_copies(case, chip))]
    rows = []
    for label, fn in torch_ops.implementations(case, device == "tpu").items():
        for direction in ("forward", "forward+backward"):
            is_backward = direction != "forward"
            for tensor in (tensor for tensors in copies for tensor in tensors):
                tensor.requires_grad_(is_backward and tensor.is_floating_point())
            if is_backward and case.counts["op"].endswith("rotary"):
                for tensors in copies:  # the tables have no gradient
                    tensors[2].requires_grad_(False)
                    tensors[3].requires_grad_(False)
            row = {
                "case": name,
                "op": case.counts["op"],
                "pass": direction,
                "implementation": label,
                "device": chip,
                "kind": "measured",
            }
            try:
                with torch.set_grad_enabled(is_backward):
                    run = with_gradients(fn) if is_backward else fn
                    row |= measure(run, copies, device, repeats, seconds)
            except Exception as error:  # of others' code: it is said, and the rest still runs
                row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            else:
                row |= _against_floor(case, chip, row) if not is_backward else {}
            rows.append(row)
            print_row(row)
    return rows


def _against_floor(case: Case, chip: str, row: dict[str, Any]) -> dict[str, Any]:
    if chip == "cpu":
        return {}
    flops, moved = case.counts["flops"], case.counts["bytes"]
    # Without a compilation nobody says how much of it is written; as reads it is a lower floor.
    head = case.counts.get("head"), case.counts.get("head_share", 1.0)
    floor, _ = floor_us(chip, flops, moved, 0.0, *head)
    return {"floor_us": round(floor, 2), "times_floor": round(row["median_us"] / floor, 2)}


def print_row(row: dict[str, Any]) -> None:
    label = f"{row['case'][:44]:44} {row['pass']:16} {row['implementation']:20}"
    if "error" in row:
        print(f"{label} {row['error']}", flush=True)
        return
    floor = f", {row['times_floor']} x floor" if "times_floor" in row else ""
    print(
        f"{label} measured on {row['device']}: {row['median_us']} us"
        f" ({row['p25_us']} to {row['p75_us']}){floor}",
        flush=True,
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", help="default: a choice of all kernels")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, help="of a repeat, about; default 0.1, CPU 0.002")
    parser.add_argument("--out", type=Path, help="JSON; default on a TPU: results/device_CHIP.json")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args(argv)
    chip = chip_name()
    seconds = options.seconds or (0.002 if chip == "cpu" else 0.1)
    if chip == "cpu":
        print("no TPU here: tiny sizes on the CPU, which only show that everything runs")
        torch.set_num_threads(1)
    rows = []
    for name in options.cases or (TINY if chip == "cpu" else CASES):
        rows += rows_of(name, chip, options.repeats, seconds)
    result = {
        "kind": "measured",
        "device": chip,
        "cores": os.cpu_count(),
        "commit": facts.commit(),
        "date": facts.today(),
        "versions": facts.versions(),
        "rows": rows,
    }
    if options.out or chip != "cpu":
        path = options.out or facts.RESULTS / f"device_{chip}.json"
        facts.write(path, result)
        print(f"wrote {path}")
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, (*COLUMNS, "commit", "versions"), restval="")
            writer.writeheader()
            stamp = " ".join(f"{key}={value}" for key, value in result["versions"].items())
            writer.writerows({**row, "commit": result["commit"], "versions": stamp} for row in rows)
    failed = [row for row in rows if "error" in row and row["implementation"] == "ours"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
