"""Device microbenchmarks and call overhead: everything runs to its end on a CPU."""

from __future__ import annotations

import pytest
import torch

from bench import cases, device, overhead, torch_ops


@pytest.mark.parametrize("name", device.TINY)
def test_microbenchmark_runs_on_the_cpu(name: str) -> None:
    rows = device.rows_of(name, "cpu", repeats=3, seconds=1e-4)
    labels = {row["implementation"] for row in rows}
    assert {"ours", "plain_torch"} <= labels
    assert {row["pass"] for row in rows} == {"forward", "forward+backward"}
    for row in rows:
        assert row["device"] == "cpu"
        assert row["kind"] == "measured"
        assert "error" not in row, row
        assert 0 < row["min_us"] <= row["p25_us"] <= row["median_us"] <= row["p75_us"]


@pytest.mark.parametrize("name", device.TINY)
def test_all_implementations_compute_the_same(name: str) -> None:
    case = cases.find(name, "v5e")
    tensors = torch_ops.make_tensors(case, "cpu", 0)
    results = {
        label: [x.float() for x in (out if isinstance(out, tuple) else (out,))]
        for label, fn in torch_ops.implementations(case, False).items()
        for out in [fn(*tensors)]
    }
    for label, outputs in results.items():
        for ours, other in zip(results["ours"], outputs, strict=True):
            scale = ours.abs().max()
            assert (ours - other).abs().max() <= 0.03 * scale, label


def test_inputs_rotate_beyond_the_vmem() -> None:
    case = cases.find("rms_norm --rows 8192 --d 4096", "v6e")
    size = 8192 * 4096 * 2
    assert device.num_copies(case, "v6e") * size >= 4 * 128 * 2**20
    assert device.num_copies(cases.find("R7", "v6e"), "v6e") == 2


def test_overhead_of_every_op_is_measured() -> None:
    for name, call, module, plain in overhead._ops():
        with overhead._Capture() as capture:
            call()
        func, args = capture.calls[0]
        reference = getattr(module, func._opname)(*args)
        first = reference[0] if isinstance(reference, tuple) else reference
        assert isinstance(first, torch.Tensor), name
        plain()


def test_missed_targets_are_named() -> None:
    result = {
        "wrappers": [{"op": "rms_norm", "wrapper_us": 16.0}, {"op": "other", "wrapper_us": 3.0}],
        "loading": [{"kernel": "rotary-tpu", "load_s": 1.5}],
    }
    assert overhead.problems(result) == [
        "rms_norm: wrapper 16.0 us, target 15.0",
        "rotary-tpu: loads in 1.5 s, target 1.0",
    ]
