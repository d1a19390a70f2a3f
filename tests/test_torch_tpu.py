"""The torch ops through the real torch_tpu: lowered without a TPU, compiled by the TPU compiler."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch_tpu_programs

WORKER = Path(__file__).with_name("torch_tpu_worker.py")
# Pallas kernels each program must contain: forward, and what its backward launches.
KERNELS = {
    "moe_experts_quantized": 5,  # the fused layer; gate/up again, and three backwards
    "quantized_ragged_dot": 2,  # forward and the gradient of lhs
    "ragged_dot": 3,
    "moe_experts": 6,
    "rms_norm": 6,
    "rotary": 4,
    "flash_attention": 2,
}


@functools.cache
def reports(chip: str) -> dict[str, dict]:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKER), chip],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
    assert lines, f"the worker printed no report:\n{result.stderr[-3000:]}"
    return {report["name"]: report for report in map(json.loads, lines)}


@pytest.mark.parametrize(
    "chip",
    [
        pytest.param(name, marks=pytest.mark.xdist_group(f"torch_tpu_{name}"))
        for name in ("v5e", "v6e")
    ],
)
@pytest.mark.parametrize("name", torch_tpu_programs.PROGRAMS)
def test_program_lowers_and_compiles(name: str, chip: str) -> None:
    report = reports(chip)[name]
    assert "error" not in report, report["error"]
    least = next(count for prefix, count in KERNELS.items() if name.startswith(prefix))
    assert report["kernels"] >= least
    assert report["compiled_kernels"] >= least
