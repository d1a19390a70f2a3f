"""scripts/build.py --check: what a variant must be, and one refusal per rule."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from check_variant import METADATA_RULES, check_folder, check_variant
from tiny_kernel import ROOT, build, make_repository, read_files


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("tiny")
    build.build(make_repository(root / "repo"), root / "out")
    return root / "out"


@pytest.fixture
def variant(built, tmp_path) -> Path:
    return Path(shutil.copytree(built / "tiny-op" / "build" / "torch-cpu", tmp_path / "torch-cpu"))


def seal(folder: Path, **changes: object) -> None:
    """Writes the digests of what is there now; changes keys of the metadata, None removes one."""
    path = folder / "metadata.json"
    metadata = json.loads(path.read_text())
    files = {name: data for name, data in read_files(folder).items() if name != path.name}
    hashes = {n: base64.b64encode(hashlib.sha256(d).digest()).decode() for n, d in files.items()}
    metadata["digest"] = {"algorithm": "sha256", "files": hashes}
    for key, value in changes.items():
        metadata[key.replace("_", "-")] = value
    kept = {key: value for key, value in metadata.items() if value is not None}
    path.write_text(json.dumps(kept))


def test_every_shipped_variant_passes(tmp_path, monkeypatch, capsys):
    build.build(ROOT, tmp_path / "out")
    assert build.main(["--check", str(tmp_path / "out")]) == 0
    said = capsys.readouterr()
    num_variants = len(list((tmp_path / "out").glob("*/build/torch-*")))
    assert num_variants >= 12 and said.err == ""
    assert said.out.startswith(f"{num_variants} variants are as they must be: attention-tpu/")
    one = tmp_path / "out" / "rotary-tpu" / "build" / "torch-tpu"
    assert build.main(["--check", str(one)]) == 0
    assert "1 variants" in capsys.readouterr().out


def test_a_downloaded_variant_passes(built, tmp_path):
    """As in the cache of the Hub: symbolic links to blobs, bytecode beside them, a signature."""
    folder = tmp_path / "snapshots" / "0123" / "build" / "torch-tpu"
    (tmp_path / "blobs").mkdir()
    for name, data in read_files(built / "tiny-op" / "build" / "torch-tpu").items():
        blob = tmp_path / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(blob)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "layers.cpython-312.pyc").write_bytes(b"\0")
    (folder / "metadata.json.sigstore").write_text("{}")
    names, problems, _ = check_folder(tmp_path / "snapshots")
    assert names == ["0123/torch-tpu"] and problems == []


def test_no_variant_there(tmp_path, capsys):
    assert build.main(["--check", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"{tmp_path}: no variant here: no metadata.json in it or below it\n"
    )


def test_one_problem_per_line_of_every_variant(built, tmp_path, capsys):
    out = Path(shutil.copytree(built, tmp_path / "out"))
    for name in ("torch-cpu", "torch-tpu"):
        (out / "tiny-op" / "build" / name / "layers.py").write_text("x = 1\n")
    (out / "tiny-op" / "build" / "torch-universal" / "metadata.json").unlink()
    assert build.main(["--check", str(out)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert sum("layers.py: differs from its digest" in line for line in lines) == 2
    assert sum("torch-universal: metadata.json is missing" in line for line in lines) == 1


COMMIT = {"commit": "0" * 40, "dirty": False}
WRONG_VALUES: dict[str, list[object]] = {
    "name": [None, "Tiny", "tiny_op", "tiny-", "", 3],
    "id": [None, "1a", "with-dash", "_tiny_op_cpu", "_tiny_op_tpu_0123456", 7],
    "version": [None, 0, -1, "3", True, 1.0],
    "license": [None, "", " ", 3],
    "python-depends": [None, ["jax"], "einops", {}],
    "backend": [None, "cpu", {}, {"type": "cuda"}, {"type": "tpu"}, {"type": "cpu", "archs": []}],
    "kernels-minver": ["0.14", "0.14.0.dev1", 14],
    "source": ["github.com/x", 1, ""],
    "upstream": ["ftp://x", []],
    "kernel-depends": [[{"repo-id": "org/a", "version": 1}], {}],
    "digest": [None, {}, {"algorithm": "md5", "files": {}}, {"algorithm": "sha256", "files": []}],
    "provenance": [
        {},
        {"kernel-builder": {}},
        {"kernel-builder": {"version": "1"}, "kernel": {"commit": "abc", "dirty": False}},
        {"kernel-builder": {"version": "1"}, "kernel": {"commit": "0" * 40}},
        {"kernel-builder": {"version": "1"}, "other": 1},
    ],
}


def test_every_key_has_wrong_values():
    assert set(WRONG_VALUES) == set(METADATA_RULES)


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG_VALUES.items() for value in values]
)
def test_wrong_metadata(variant, key, value):
    seal(variant, **{key: value})
    problems = check_variant(variant)
    assert any(re.search(rf"metadata.json: {key}\b", problem) for problem in problems), problems


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("source", "https://github.com/org/tpu-kernels"),
        ("upstream", "http://example.org"),
        ("python-depends", ["einops", "tvm-ffi"]),
        ("kernel-depends", None),
        ("kernels-minver", None),
        ("provenance", None),
        ("provenance", {"kernel-builder": {"version": "0.14.0", "git": COMMIT}, "kernel": COMMIT}),
    ],
)
def test_right_metadata(variant, key, value):
    seal(variant, **{key: value})
    assert check_variant(variant) == []


def put(path: str, text: str | bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(text.encode() if isinstance(text, str) else text)
        seal(folder)

    return change


def unsealed(path: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / path).write_text(text) and None


def drop(path: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / path).unlink()
        seal(folder)

    return change


LAYER = "from torch import nn\n\n\nclass Double(nn.Module):\n"
FORWARD = "    def forward(self, x):\n        return x\n"
OPS = "kernels/tiny/ops.py"
REFUSALS: dict[str, tuple[Callable[[Path], None], str]] = {
    "unknown key": (lambda folder: seal(folder, extra=1), "metadata.json: unknown key extra"),
    "no JSON": (unsealed("metadata.json", "{"), "metadata.json: no JSON"),
    "no object": (unsealed("metadata.json", "[]"), "metadata.json: must be an object"),
    "changed file": (unsealed("layers.py", "x = 1\n"), "layers.py: differs from its digest"),
    "stray file": (unsealed("a.py", ""), "a.py: stray, metadata.json has no digest of it"),
    "missing file": (lambda f: (f / "layers.py").unlink(), "layers.py: missing, but metadata"),
    "native file": (put("a.so", b"\x7fELF"), "a.so: neither Python nor metadata"),
    "data file": (put("a.json", "{}"), "a.json: neither Python nor metadata"),
    "no __init__": (drop("__init__.py"), "__init__.py: missing"),
    "no _ops": (drop("_ops.py"), "_ops.py: missing"),
    "no compatibility folder": (drop("tiny_op/__init__.py"), "tiny_op/__init__.py: missing"),
    "ops of another build": (
        put(
            "_ops.py", 'NAMESPACE = "_tiny_op_cpu_0000000"\n\n\ndef add_op_namespace_prefix(x): ...'
        ),
        "_ops.py: belongs to another build",
    ),
    "absolute self-import": (put(OPS, "import tiny_op\n"), "`import tiny_op` may find another"),
    "absolute import of a part": (put(OPS, "import tpu_runtime\n"), "may find another copy"),
    "third party": (put(OPS, "import numba\n"), "`import numba` is neither torch nor"),
    "jax at import": (put(OPS, "import jax\ndouble = 1\n"), "`import jax` runs when the variant"),
    "outside the variant": (put(OPS, "from ..... import x\n"), "reaches outside the variant"),
    "syntax error": (put(OPS, "def f(:\n"), f"{OPS}:1: invalid syntax"),
    "no __all__": (put("__init__.py", "x = 1\n"), "needs __all__, a literal list"),
    "layer with a constructor": (
        put("layers.py", f"{LAYER}    def __init__(self):\n        pass\n\n{FORWARD}"),
        "layers.py:4: layer Double must be pure, but has __init__",
    ),
    "layer with state": (
        put("layers.py", f"{LAYER}    scale = 2\n\n{FORWARD}"),
        "layer Double must be pure, but has scale",
    ),
    "layer with a method": (
        put("layers.py", f"{LAYER}{FORWARD}\n    def reset(self):\n        pass\n"),
        "layer Double must be pure, but has reset",
    ),
    "layer without forward": (put("layers.py", f"{LAYER}    pass\n"), "Double has no forward"),
    "layer of another class": (
        put("layers.py", f"{LAYER.replace('nn.Module', 'nn.Linear')}{FORWARD}"),
        "layer Double must derive from torch.nn.Module alone",
    ),
}


@pytest.mark.parametrize(("change", "expected"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(variant, change, expected):
    change(variant)
    problems = check_variant(variant)
    assert any(expected in problem for problem in problems), problems
    assert all("\n" not in problem for problem in problems)


def test_pure_layers_pass(variant):
    flags = "    has_backward = True\n    can_torch_compile = True\n    eps: float\n\n"
    put("layers.py", f'{LAYER}    """Doubles."""\n\n{flags}{FORWARD}')(variant)
    assert check_variant(variant) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch-tpu", "backend is cpu, but that of torch-tpu is tpu"),
        ("torch-cuda", "a variant's folder is one of torch-tpu, torch-cpu, torch-universal"),
        ("cpu", "a variant's folder is one of"),
    ],
)
def test_wrong_folder(variant, name, expected):
    renamed = variant.rename(variant.parent / name)
    assert any(expected in problem for problem in check_variant(renamed))


def test_the_official_parsers_are_asked(variant, monkeypatch):
    """What only they see is a problem too; without them the rest is still checked."""
    from kernels import _rust

    def refuse(path: Path) -> None:
        raise ValueError("the official parser refuses")

    official = {name: getattr(_rust, name) for name in ("Digest", "DigestValidationError")}
    stub = type("Parsers", (), official | {"Metadata": type("M", (), {"read_from_file": refuse})})
    monkeypatch.setattr("check_variant._official", lambda: stub)
    assert [p.split(": ", 1)[1] for p in check_variant(variant)] == [
        "kernels: the official parser refuses"
    ]
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "kernels", None)
    assert check_variant(variant) == []
    assert "not installed" in check_folder(variant)[2]
