"""Built variants as users load them: `kernels.get_kernel` in fresh processes, offline.

LOCAL_KERNELS points the Hub names at local builds. torch_tpu's autoload is off, so that a host with
torch_tpu installed and no TPU behaves like any other; which variant `kernels` picks by itself then
depends on the torch wheel alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tiny_kernel import ROOT, build, make_repository

PREAMBLE = """
import importlib.util, json, socket, sys
from pathlib import Path

def refuse(*arguments, **keywords):
    raise AssertionError("network access")

socket.socket.connect = socket.getaddrinfo = refuse

def block(*names):
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in names:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Finder())

def loaded(*names):
    return sorted({name.split(".")[0] for name in sys.modules} & set(names))

def load_file(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]

def namespace(kernel):
    return sys.modules[kernel.__name__ + "._ops"].NAMESPACE

def check_ragged_dot(kernel):
    import torch

    lhs = torch.randn(7, 4, requires_grad=True)
    rhs = torch.randn(3, 4, 5, requires_grad=True)
    out = kernel.ragged_dot(lhs, rhs, torch.tensor([2, 0, 3]))
    expected = torch.cat([lhs[:2] @ rhs[0], lhs[2:5] @ rhs[2], torch.zeros(2, 5)])
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert lhs.grad is not None and rhs.grad[1].eq(0).all()
"""


def run(script: str, kernels: dict[str, Path]) -> dict:
    """Runs `script` in a fresh process; `report` of the script comes back."""
    source = f"{PREAMBLE}\n{textwrap.dedent(script)}\nprint(json.dumps(report))\n"
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TPU_"))}
    env |= {
        "HF_HUB_OFFLINE": "1",
        "LOCAL_KERNELS": ":".join(f"{name}={path}" for name, path in kernels.items()),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd="/", check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def variants_of(folder: Path) -> dict[str, Path]:
    return {f"org/{path.name}": path for path in sorted((folder / "build").iterdir())}


def ids_of(paths: dict[str, Path]) -> dict[str, str]:
    return {
        name: json.loads((path / "metadata.json").read_text())["id"] for name, path in paths.items()
    }


@pytest.fixture(scope="module")
def shipped(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("shipped")
    build.build(ROOT, out)
    return out / "ragged-dot-tpu"


def test_every_variant_works_without_jax_and_torch_tpu(shipped):  # DV09, DV10, HB17, HB22
    paths = variants_of(shipped)
    report = run(
        f"""
        block("jax", "jaxlib", "torch_tpu", "libtpu")
        from kernels import get_kernel

        report = {{}}
        for name, path in {[(name, str(path)) for name, path in paths.items()]}:
            kernel = get_kernel(name, version=1)
            check_ragged_dot(kernel)
            compat = load_file("ragged_dot_tpu", path + "/ragged_dot_tpu/__init__.py")
            assert compat.__all__ == kernel.__all__
            for public in kernel.__all__:
                assert getattr(compat, public) is getattr(kernel, public)
            report[name] = [kernel.__name__, namespace(kernel), sorted(kernel.__all__)]
        """,
        paths,
    )
    public = [
        "dequantize_experts",
        "experts_forward",
        "moe_experts",
        "quantize_experts",
        "ragged_dot",
    ]
    assert report == {name: [id, id, public] for name, id in ids_of(paths).items()}


def test_import_and_cpu_calls_load_neither_jax_nor_torch_tpu(shipped):
    report = run(
        """
        from kernels import get_kernel

        kernel = get_kernel("org/torch-tpu", version=1)
        at_import = loaded("jax", "jaxlib", "torch_tpu", "libtpu", "transformers")
        check_ragged_dot(kernel)
        report = {"import": at_import, "call": loaded("jax", "jaxlib", "torch_tpu", "libtpu")}
        """,
        variants_of(shipped),
    )
    assert report == {"import": [], "call": []}


def test_kernels_picks_the_variant_of_the_host(shipped):
    report = run(
        """
        import torch
        from kernels import get_kernel, get_local_kernel

        report = {"cuda": torch.version.cuda is not None}
        report["default"] = get_kernel("org/ragged-dot-tpu", version=1).__name__
        report["cpu"] = get_kernel("org/ragged-dot-tpu", version=1, backend="cpu").__name__
        torch.backends.tpu = object()  # what torch_tpu sets where there is a TPU
        report["tpu"] = get_kernel("org/ragged-dot-tpu", version=1).__name__
        from_path = get_local_kernel(Path({path!r}), backend="tpu")
        report["local"] = from_path.__name__
        check_ragged_dot(from_path)
        """.replace("{path!r}", repr(str(shipped))),
        {"org/ragged-dot-tpu": shipped},
    )
    ids = ids_of(variants_of(shipped))
    host = "org/torch-universal" if report.pop("cuda") else "org/torch-cpu"
    expected = {"default": host, "cpu": "org/torch-cpu", "tpu": "org/torch-tpu"}
    expected["local"] = "org/torch-tpu"
    assert report == {key: ids[name] for key, name in expected.items()}


def test_two_builds_side_by_side(shipped, tmp_path):  # HB08
    """Another commit of ours, two of the tiny kernel whose results tell them apart."""
    for name in ("build.toml", "torch-ext", "kernels", "tpu_runtime"):
        copy = shutil.copy if (ROOT / name).is_file() else shutil.copytree
        copy(ROOT / name, tmp_path / name)
    changed = tmp_path / "tpu_runtime" / "__init__.py"
    changed.write_text(f"{changed.read_text()}\n# another commit\n")
    build.build(tmp_path, tmp_path / "out")
    paths = {"org/a": shipped, "org/b": tmp_path / "out" / "ragged-dot-tpu"}
    for name, factor in (("org/double", 2), ("org/triple", 3)):
        runtime = {"tpu_runtime/__init__.py": f"FACTOR = {factor}\n"}
        root = make_repository(tmp_path / f"tiny{factor}", runtime)
        build.build(root, root / "out")
        paths[name] = root / "out" / "tiny-op"
    report = run(
        """
        import torch
        from kernels import get_kernel

        a, b = get_kernel("org/a", version=1), get_kernel("org/b", version=1)
        for kernel in (a, b, a):
            check_ragged_dot(kernel)
        double, triple = get_kernel("org/double", version=3), get_kernel("org/triple", version=3)
        assert double.layers is not triple.layers
        one = torch.ones(1)
        report = {
            "namespaces": [namespace(kernel) for kernel in (a, b, double, triple)],
            "results": [kernel.double(one).item() for kernel in (double, triple, double)],
            "layers": [kernel.layers.Double()(one).item() for kernel in (double, triple)],
            "ops": [hasattr(torch.ops, namespace(k)) for k in (a, b, double, triple)],
        }
        """,
        paths,
    )
    assert len(set(report["namespaces"])) == 4
    assert report["results"] == [2, 3, 2] and report["layers"] == [2, 3]


def test_one_build_from_two_folders(shipped, tmp_path):
    """As from the Hub cache, where every file is a symbolic link to a blob, and from a build."""
    variant = shipped / "build" / "torch-cpu"
    cached = tmp_path / "snapshots" / "build" / "torch-cpu"
    (tmp_path / "blobs").mkdir()
    for number, path in enumerate(sorted(variant.rglob("*"))):
        if path.is_file():
            target = cached / path.relative_to(variant)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(shutil.copy(path, tmp_path / "blobs" / str(number)))
    report = run(
        f"""
        from kernels import get_kernel

        compat = load_file("ragged_dot_tpu", "{cached}/ragged_dot_tpu/__init__.py")
        check_ragged_dot(compat)
        for name in ("org/cached", "org/built"):
            check_ragged_dot(get_kernel(name, version=1, backend="cpu"))
        report = {{}}
        """,
        {"org/cached": cached, "org/built": variant},
    )
    assert report == {}


def test_a_failed_load_can_be_repeated(tmp_path):
    """A variant that fails while loading through its compatibility folder leaves nothing behind."""
    broken = {"kernels/tiny/ops.py": "raise RuntimeError('on purpose')\ndouble = None\n"}
    build.build(make_repository(tmp_path / "repo", broken), tmp_path / "out")
    path = tmp_path / "out" / "tiny-op" / "build" / "torch-cpu"
    report = run(
        f"""
        report = []
        for name in ("first", "second"):
            try:
                load_file(name, "{path}/tiny_op/__init__.py")
            except RuntimeError as error:
                report.append(str(error))
        """,
        {"org/unused": path},
    )
    assert report == ["on purpose", "on purpose"]
