"""tpu_runtime: what it refuses, how it says so, and that it stays out of the way."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tpu_kernels import tpu_runtime
from tpu_kernels.kernels.ragged_dot.ops import ragged_dot
from tpu_kernels.tpu_runtime import bridge, device

TESTS = Path(__file__).parent


def run_python(code: str, **environment: str) -> str:
    """Standard output of `code` in a fresh process that can import the tree."""
    program = "import conftest, os\n" + "".join(
        f"os.environ[{name!r}] = {value!r}\n" for name, value in environment.items()
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program + textwrap.dedent(code)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.strip()


CALL = """
    import torch
    from tpu_kernels.kernels.ragged_dot.ops import ragged_dot
    torch.manual_seed(0)
    lhs, rhs = torch.randn(16, 32), torch.randn(2, 32, 24)
    sizes = torch.tensor([7, 5])
    expected = torch.cat([lhs[:7] @ rhs[0], lhs[7:12] @ rhs[1], torch.zeros(4, 24)])
"""


def test_import_has_no_side_effect() -> None:
    """DV09: neither JAX nor torch_tpu is imported, by the import or by a call on the CPU."""
    out = run_python(
        CALL
        + """
    import sys
    ragged_dot(lhs, rhs, sizes)
    print(sorted({"jax", "jaxlib", "torch_tpu", "libtpu"} & set(sys.modules)))
    """
    )
    assert out == "[]"


def test_cpu_calls_work_without_jax_and_torch_tpu() -> None:
    """DV09: and the error of a path that needs JAX names what to install."""
    out = run_python(
        """
    import sys
    sys.modules.update(dict.fromkeys(["jax", "jaxlib", "torch_tpu", "libtpu"]))
    """
        + CALL
        + """
    torch.testing.assert_close(ragged_dot(lhs, rhs, sizes), expected)
    from tpu_kernels.tpu_runtime import MissingDependencyError, bridge
    try:
        bridge.import_jax()
    except MissingDependencyError as error:
        print(isinstance(error, ImportError), error)
    """
    )
    assert out.startswith("True") and 'pip install "jax==' in out


def test_missing_torch_tpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "tpu", raising=False)
    op = SimpleNamespace(arguments=[], returns=[])
    with pytest.raises(tpu_runtime.MissingDependencyError, match='pip install "torch-tpu=='):
        bridge.make_tpu_op("ns::op", lambda: None, op)


def test_no_tpu_is_an_error_and_never_an_abort() -> None:
    """DV10: no chip is asked for on the CPU, and NoTpuError says what to do."""
    assert not tpu_runtime.is_tpu_available()
    with pytest.raises(tpu_runtime.NoTpuError, match="TPU_KERNELS_CHIP"):
        tpu_runtime.current_chip()


def test_chip_to_lower_for_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_CHIP_TO_LOWER_FOR", "v6e")
    assert tpu_runtime.current_chip() is tpu_runtime.CHIPS["v6e"]
    monkeypatch.setattr(device, "_CHIP_TO_LOWER_FOR", "v9")
    with pytest.raises(ValueError, match=r"TPU_KERNELS_CHIP: expected one of .*'v5e'.* got 'v9'"):
        tpu_runtime.current_chip()


@pytest.mark.parametrize(
    ("device_name", "chip"),
    [
        ("TPU v4", "v4"),
        ("TPU v5e", "v5e"),
        ("TPU v5p", "v5p"),
        ("TPU v6e", "v6e"),
        ("TPU v7", "v7x"),
    ],
)
def test_attached_chip_is_recognised(
    monkeypatch: pytest.MonkeyPatch, device_name: str, chip: str
) -> None:
    """The names that torch_tpu 0.2.0's own table gives to devices."""
    from torch_tpu._internal.utils import hardware

    assert device_name in hardware._PCI_DEVICE_ID_TO_NAME.values()
    monkeypatch.setattr(device, "is_tpu_available", lambda: True)
    monkeypatch.setattr(
        torch, "tpu", SimpleNamespace(get_device_name=lambda: device_name), raising=False
    )
    assert tpu_runtime.current_chip().name == chip
    monkeypatch.setattr(torch.tpu, "get_device_name", lambda: "TPU v99")
    with pytest.raises(tpu_runtime.NoTpuError, match="unknown TPU 'TPU v99'"):
        tpu_runtime.current_chip()


def test_chip_table_agrees_with_jax() -> None:
    """VMEM, MXU, peaks and bandwidth are those of jax's own table."""
    from jax._src import tpu_info

    for chip in tpu_runtime.CHIPS.values():
        version = tpu_info.chip_version_from_device_kind(chip.device_kind)
        info = tpu_info.get_tpu_info_for_chip(version, chip.num_cores)
        assert chip.vmem_bytes == info.vmem_capacity_bytes, chip.name
        assert chip.mxu_size == info.mxu_column_size, chip.name
        assert chip.bf16_flops == pytest.approx(info.bf16_ops_per_second, rel=0.02), chip.name
        assert chip.hbm_bytes_per_s == pytest.approx(info.mem_bw_bytes_per_second, rel=0.02)


def test_jax_that_owns_the_tpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src import xla_bridge

    monkeypatch.setattr(bridge, "_jax_pid", None)
    monkeypatch.setattr(bridge, "is_tpu_available", lambda: True)
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: True)
    monkeypatch.setattr(xla_bridge, "backends", lambda: {"cpu": None, "tpu": None})
    with pytest.raises(tpu_runtime.JaxOwnsTpuError, match="JAX_PLATFORMS=cpu"):
        bridge.import_jax()


def test_a_fork_after_jax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge.import_jax()
    monkeypatch.setattr(os, "getpid", lambda: -1)  # what a forked child sees
    with pytest.raises(tpu_runtime.ForkedAfterJaxError, match="spawn"):
        bridge.import_jax()


def test_interpret_mode_runs_the_kernel_also_from_threads() -> None:
    out = run_python(
        CALL
        + """
    import concurrent.futures, sys
    from tpu_kernels.tpu_runtime import bridge
    calls, run = [], bridge.run_interpreted
    def counted(*args):
        calls.append(args)
        return run(*args)
    bridge.run_interpreted = counted
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: ragged_dot(lhs, rhs, sizes), range(4)))
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == 4 and calls[0][2].name == "v6e"
    wide = ragged_dot(lhs.double(), rhs.double(), sizes)  # float64 always runs the reference
    assert wide.dtype == torch.float64 and len(calls) == 4
    result[0] = 0  # the caller may write to what it got
    print("ok")
    """,
        TPU_KERNELS_INTERPRET="1",
        TPU_KERNELS_CHIP="v6e",
    )
    assert out == "ok"


def test_global_x64_switch_changes_nothing() -> None:
    """DV01: same results and dtypes in interpret mode, and the kernels still compile."""
    out = run_python(
        CALL
        + """
    import jax
    assert jax.config.jax_enable_x64
    result = ragged_dot(lhs, rhs, sizes)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    import aot, jax.numpy as jnp
    from tpu_kernels.kernels.ragged_dot import lowering
    from tpu_kernels.tpu_runtime import CHIPS
    specs = [((16, 32), jnp.bfloat16), ((2, 32, 24), jnp.bfloat16), ((2,), jnp.int32)]
    def fn(lhs, rhs, sizes):
        return lowering.ragged_dot(
            lhs, rhs, sizes, None, None, False, "default", "bfloat16", chip=CHIPS["v5e"]
        )
    aot.compile_for(fn, [jax.ShapeDtypeStruct(*spec) for spec in specs], "v5e")
    print("ok")
    """,
        JAX_ENABLE_X64="1",
        TPU_KERNELS_INTERPRET="1",
    )
    assert out == "ok"


def test_the_runtime_stays_slim() -> None:
    folder = Path(tpu_runtime.__file__).parent
    assert sum(len(path.read_text().splitlines()) for path in folder.glob("*.py")) < 600


def test_float64_is_refused_by_name_on_a_tpu() -> None:
    out = run_python(
        """
    import torch, torch_tpu
    torch_tpu._loader._init_device("tpu")
    from torch._subclasses import FakeTensorMode
    from tpu_kernels.kernels.ragged_dot.ops import ragged_dot
    with FakeTensorMode():
        lhs = torch.empty(4, 3, device="tpu", dtype=torch.float64)
        rhs = torch.empty(1, 3, 2, device="tpu", dtype=torch.float64)
        sizes = torch.empty(1, device="tpu", dtype=torch.int64)
        out = ragged_dot(lhs.float(), rhs.float(), sizes)
        assert out.shape == (4, 2) and out.device.type == "tpu"
        try:
            ragged_dot(lhs, rhs, sizes)
        except TypeError as error:
            print(type(error).__name__, error)
    """
    )
    assert out.splitlines()[-1].startswith("UnsupportedDtypeError") and "no float64" in out


def test_inputs_on_different_devices_are_named() -> None:
    """DV17."""
    sizes = torch.tensor([2, 2])
    with pytest.raises(ValueError, match="lhs on meta, rhs on cpu, group_sizes on cpu"):
        ragged_dot(torch.empty(4, 3, device="meta"), torch.empty(2, 3, 2), sizes)
