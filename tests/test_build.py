"""scripts/build.py: the layout, the metadata, reproducibility and the refusals of Hub variants."""

from __future__ import annotations

import ast
import base64
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernels._rust import Backend, Digest, DigestAlgorithm, KernelName, Metadata
from tiny_kernel import FILES, ROOT, build, make_repository, read_files

VARIANTS = {"torch-tpu": "TPU", "torch-cpu": "CPU", "torch-universal": "CPU"}
PUBLIC_NAMES = {
    "ragged-dot-tpu": {
        "ragged_dot",
        "moe_experts",
        "experts_forward",
        "quantize_experts",
        "dequantize_experts",
    }
}


def build_into(root: Path, out: Path) -> dict[str, dict]:
    """Builds the tiny kernel of `root`; variant -> its metadata."""
    build.build(root, out)
    folders = sorted((out / "tiny-op" / "build").iterdir())
    return {folder.name: json.loads((folder / "metadata.json").read_text()) for folder in folders}


def problems_of(root: Path, out: Path) -> list[str]:
    with pytest.raises(build.BuildError) as error:
        build.build(root, out)
    assert not out.exists()
    return error.value.problems


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout


def commit_all(root: Path) -> str:
    git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "x")
    return git(root, "rev-parse", "HEAD").strip()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("tiny")
    build.build(make_repository(root / "repo"), root / "out")
    return root / "out" / "tiny-op"


@pytest.fixture(scope="module")
def shipped(tmp_path_factory) -> Path:
    """Everything in build.toml, built."""
    out = tmp_path_factory.mktemp("shipped")
    build.build(ROOT, out)
    return out


def shipped_variants(out: Path) -> list[Path]:
    return sorted(path.parent for path in out.glob("*/build/*/metadata.json"))


def test_a_variant_mirrors_the_repository(tiny):
    assert {path.name for path in (tiny / "build").iterdir()} == set(VARIANTS)
    for variant in VARIANTS:
        assert set(read_files(tiny / "build" / variant)) == {
            "__init__.py",
            "_ops.py",
            "kernels/tiny/kernel.py",
            "kernels/tiny/ops.py",
            "layers.py",
            "metadata.json",
            "tiny_op/__init__.py",
            "tpu_runtime/__init__.py",
        }
    assert (tiny / "CARD.md").read_text() == "# tiny\n"


def test_official_parsers_accept_every_shipped_variant(shipped, tiny):
    variants = shipped_variants(shipped) + shipped_variants(tiny.parent)
    assert len(variants) >= 6
    for folder in variants:
        metadata = Metadata.read_from_file(folder / "metadata.json")
        name = folder.parent.parent.name
        assert str(metadata.name) == name and KernelName(name).python_name == name.replace("-", "_")
        assert metadata.backend.backend_type == getattr(Backend, VARIANTS[folder.name])
        assert metadata.version >= 1 and metadata.license == "Apache-2.0"
        assert metadata.kernels_minver is not None
        assert metadata.provenance.kernel_builder.version == build.BUILDER_VERSION
        metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))


def test_digest_covers_every_file(shipped):
    for folder in shipped_variants(shipped):
        files = read_files(folder)
        digest = json.loads(files.pop("metadata.json"))["digest"]
        assert digest["algorithm"] == "sha256"
        assert digest["files"] == {
            path: base64.b64encode(hashlib.sha256(data).digest()).decode()
            for path, data in files.items()
        }


def test_python_depends_is_empty(shipped):  # HB07
    for folder in shipped_variants(shipped):
        metadata = json.loads((folder / "metadata.json").read_text())
        assert metadata["python-depends"] == [] and metadata["kernel-depends"] == []


def test_ids_are_identifiers_and_unique(shipped, tiny):  # HB20
    ids = []
    for folder in shipped_variants(shipped) + shipped_variants(tiny.parent):
        metadata = json.loads((folder / "metadata.json").read_text())
        python_name = metadata["name"].replace("-", "_")
        form = f"_{python_name}_{metadata['backend']['type']}_[0-9a-f]{{7}}"
        assert metadata["id"].isidentifier() and re.fullmatch(form, metadata["id"])
        assert f'NAMESPACE = "{metadata["id"]}"\n' in (folder / "_ops.py").read_text()
        ids.append(metadata["id"])
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    "path", ["kernels/tiny/kernel.py", "tpu_runtime/__init__.py", "torch-ext/tiny_op/layers.py"]
)
def test_every_id_changes_with_every_file(tmp_path, tiny, path):
    root = make_repository(tmp_path / "repo")
    (root / path).write_text((root / path).read_text() + "# changed\n")
    changed = build_into(root, tmp_path / "out")
    for folder in shipped_variants(tiny.parent):
        before = json.loads((folder / "metadata.json").read_text())["id"]
        assert changed[folder.name]["id"] != before


def test_id_does_not_depend_on_what_is_not_shipped(tmp_path, tiny):
    root = make_repository(tmp_path / "repo", {"README.md": "x", "kernels/tiny/CARD.md": "y"})
    commit_all(root)
    for variant, metadata in build_into(root, tmp_path / "out").items():
        before = json.loads((tiny / "build" / variant / "metadata.json").read_text())
        assert metadata["id"] == before["id"] and metadata["digest"] == before["digest"]


def run_script(root: Path, out: str, cwd: Path, umask: int, **env: str) -> None:
    command = [sys.executable, str(root / "scripts" / "build.py"), "--out", out]
    subprocess.run(command, cwd=cwd, env=os.environ | env, umask=umask, check=True)


def test_rebuild_is_byte_identical(tmp_path):
    """Whatever the directory, umask, locale, hash seed and clock."""
    root = make_repository(tmp_path / "repo", {"tpu_runtime/text.py": 'MICRO = "µs, 微秒"\n'})
    (root / "scripts").mkdir()
    for path in (ROOT / "scripts").glob("*.py"):
        shutil.copy(path, root / "scripts" / path.name)
    commit_all(root)
    run_script(root, str(tmp_path / "a"), root, 0o022, LC_ALL="C.UTF-8", PYTHONHASHSEED="1")
    (root / "kernels" / "tiny" / "ops.py").touch()
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo"}
    for _ in range(2):  # the second time over the first
        run_script(root, "../../b", root / "kernels", 0o077, **plain)
        assert read_files(tmp_path / "b") == read_files(tmp_path / "a")
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "b/tiny-op/build").rglob("*")}
    assert modes == {0o755, 0o644}


@pytest.mark.parametrize("source", ["tiny", "shipped"])
def test_rebuild_of_a_tag_is_byte_identical(tmp_path, source):
    """Metadata too: two clones of one tag, whatever came after it and wherever they lie."""
    origin = ROOT
    if source == "shipped" and not (ROOT / ".git").exists():
        pytest.skip("an unpacked tarball has no tags")
    if source == "tiny":
        origin = make_repository(tmp_path / "repo", {"benchmarks/tiny-op/benchmark.py": "x = 1\n"})
        commit_all(origin)
    git(tmp_path, "clone", "--quiet", "--no-hardlinks", str(origin), "tagged")
    git(tmp_path / "tagged", "tag", "v1.0")
    commit = git(tmp_path / "tagged", "rev-parse", "v1.0").strip()
    (tmp_path / "tagged" / "tpu_runtime" / "later.py").write_text("LATER = 1\n")
    commit_all(tmp_path / "tagged")
    builds = []
    for name in ("one", "another/place"):
        git(tmp_path, "clone", "--quiet", "--branch", "v1.0", "tagged", name)
        build.build(tmp_path / name, tmp_path / name / "build")
        builds.append(read_files(tmp_path / name / "build"))
    assert builds[0] == builds[1] and not any("later.py" in path for path in builds[0])
    metadata = [json.loads(data) for path, data in builds[0].items() if "metadata.json" in path]
    provenance = [entry["provenance"]["kernel"] for entry in metadata]
    assert provenance == [{"commit": commit, "dirty": False}] * len(metadata) != []


def test_line_endings_do_not_matter(tmp_path, tiny):
    root = make_repository(tmp_path / "repo")
    for path in root.rglob("*.py"):
        path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    build.build(root, tmp_path / "out")
    assert read_files(tmp_path / "out" / "tiny-op") == read_files(tiny)


def test_provenance_names_the_commit(tmp_path):
    root = make_repository(tmp_path / "repo", {".gitignore": "*.tmp.py\n"})
    commit = commit_all(root)

    def kernel_of_build() -> tuple[dict, dict]:
        metadata = build_into(root, tmp_path / "out")["torch-cpu"]
        return metadata["provenance"]["kernel"], metadata["digest"]["files"]

    (root / "notes.txt").write_text("not an input")
    (root / "kernels/tiny/scratch.tmp.py").write_text("ignored")
    provenance, files = kernel_of_build()
    assert provenance == {"commit": commit, "dirty": False}
    assert "kernels/tiny/scratch.tmp.py" not in files

    (root / "kernels/tiny/extra.py").write_text("")
    provenance, files = kernel_of_build()
    assert provenance == {"commit": commit, "dirty": True}
    assert "kernels/tiny/extra.py" in files

    (root / "kernels/tiny/extra.py").unlink()
    (root / "kernels/tiny/kernel.py").unlink()
    (root / "kernels/tiny/ops.py").write_text("def double(x):\n    return 2 * x\n")
    provenance, files = kernel_of_build()
    assert provenance["dirty"] and "kernels/tiny/kernel.py" not in files


def test_git_hook_environment_does_not_leak_in(tmp_path, monkeypatch):
    root = make_repository(tmp_path / "repo")
    commit = commit_all(root)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    metadata = build_into(root, tmp_path / "out")["torch-tpu"]
    assert metadata["provenance"]["kernel"] == {"commit": commit, "dirty": False}


def test_unpacked_tarball_builds_the_same_without_a_commit(tmp_path, tiny):
    commit_all(make_repository(tmp_path / "other"))
    root = make_repository(tmp_path / "other" / "unpacked")  # inside somebody's checkout
    cache = root / "kernels" / "tiny" / "__pycache__"
    cache.mkdir()
    (cache / "ops.cpython-312.pyc").write_bytes(b"")
    build.build(root, tmp_path / "out")
    assert read_files(tmp_path / "out" / "tiny-op") == read_files(tiny)
    metadata = Metadata.read_from_file(tiny / "build" / "torch-tpu" / "metadata.json")
    assert metadata.provenance.kernel is None


def test_checkout_without_a_commit_builds(tmp_path):
    root = make_repository(tmp_path / "repo")
    git(root, "init", "--quiet")
    assert "kernel" not in build_into(root, tmp_path / "out")["torch-tpu"]["provenance"]


def manifest(before: str, after: str) -> dict[str, str]:
    assert before in FILES["build.toml"]
    return {"build.toml": FILES["build.toml"].replace(before, after)}


INIT = "torch-ext/tiny_op/__init__.py"
OPS = "kernels/tiny/ops.py"
IMPORT_OPS = "from .kernels.tiny.ops import double\n"
REFUSALS = {
    "underscore in the name": (manifest("tiny-op", "tiny_op"), "Hub name"),
    "capital in the name": (manifest("tiny-op", "Tiny-op"), "Hub name"),
    "name ends with a dash": (manifest("tiny-op", "tiny-"), "Hub name"),
    "version 0": (manifest("version = 3", "version = 0"), "version must be a positive integer"),
    "version true": (manifest("version = 3", "version = true"), "version must be a positive"),
    "version text": (manifest("version = 3", 'version = "3"'), "version must be a positive"),
    "no version": (manifest("version = 3", ""), "version is missing"),
    "no license": (manifest('license = "Apache-2.0"', ""), "license is missing"),
    "two-part minver": (manifest("0.14.0", "0.14"), "kernels-minver must be a version"),
    "unknown key": (manifest("version = 3", "version = 3\nbackend = 1"), "unknown key backend"),
    "unknown general key": (manifest("[tiny-op]", "org = 'me'\n[tiny-op]"), "unknown key org"),
    "key outside tables": (manifest("[general]", "a = 1\n[general]"), "[a]: must be a table"),
    "no TOML": (manifest("[general]", "[general"), "build.toml: "),
    "no kernel": ({"build.toml": '[general]\nlicense = "MIT"\n'}, "no table of a kernel"),
    "no build.toml": ({"build.toml": None}, "build.toml"),
    "unknown backend": (manifest('"cpu", ', '"cuda", '), "backends must be a list of some"),
    "no backend": (manifest('["tpu", "cpu", "universal"]', "[]"), "backends must be"),
    "no package": (manifest('["tiny"]', "[]"), "packages must be"),
    "package twice": (manifest('["tiny"]', '["tiny", "tiny"]'), "packages must be"),
    "package is a path": (manifest('["tiny"]', '["../tiny"]'), "packages must be"),
    "package absent": (manifest('["tiny"]', '["tiny", "big"]'), "kernels/big/: missing"),
    "python-depends jax": (
        manifest("version = 3", 'version = 3\npython-depends = ["jax"]'),
        "python-depends must be a list of some of einops, helion, tvm-ffi",
    ),
    "no torch-ext package": (
        {INIT: None, "torch-ext/tiny_op/layers.py": None},
        "tiny_op/: missing",
    ),
    "no __init__": ({INIT: None}, "torch-ext/tiny_op/__init__.py: missing"),
    "no tpu_runtime": ({"tpu_runtime/__init__.py": None}, "tpu_runtime/: missing"),
    "own name as package": ({"torch-ext/tiny_op/tiny_op/a.py": ""}, "the kernel's own name"),
    "own name as module": ({"torch-ext/tiny_op/tiny_op.py": ""}, "the kernel's own name"),
    "generated name": ({"torch-ext/tiny_op/_ops.py": ""}, "the generated _ops.py goes there"),
    "mirrored name": ({"torch-ext/tiny_op/kernels/a.py": ""}, "kernels/ goes there"),
    "other package in torch-ext": ({"torch-ext/big/__init__.py": ""}, "belongs to no kernel"),
    "file in torch-ext": ({"torch-ext/setup.py": ""}, "belongs to no kernel"),
    "data file": ({"torch-ext/tiny_op/a.json": "{}"}, "a.json: not a Python file"),
    "native file": ({"kernels/tiny/a.so": b"\x7fELF"}, "a.so: not a Python file"),
    "card elsewhere": ({"tpu_runtime/CARD.md": ""}, "CARD.md: not a Python file"),
    "hides the Hub library": ({"kernels/__init__.py": ""}, "would hide the Hub library"),
    "syntax error": ({OPS: "def f(:\n"}, "kernels/tiny/ops.py:1: invalid syntax"),
    "null byte": ({OPS: b"a = 1\0\n"}, "kernels/tiny/ops.py:1: "),
    "not UTF-8": ({OPS: b"a = '\xff'\n"}, "kernels/tiny/ops.py:"),
    "absolute self-import": (
        {OPS: "from tiny_op import layers\ndouble = 1\n"},
        "ops.py:1: `from tiny_op import layers` may find another copy",
    ),
    "absolute import in a function": (
        {OPS: "def double(x):\n    import tpu_runtime.chips\n"},
        "ops.py:2: `import tpu_runtime.chips` may find another copy",
    ),
    "import of the tree": (
        {OPS: "from tpu_kernels.kernels.tiny import kernel\n"},
        "may find another copy",
    ),
    "third party": ({OPS: "import yaml\n"}, "ops.py:1: `import yaml` is neither torch nor"),
    "third party in a function": (
        {OPS: "def double(x):\n    import transformers\n"},
        "`import transformers` is neither torch nor",
    ),
    "jax at import": ({OPS: "import jax\n"}, "ops.py:1: `import jax` runs when the variant"),
    "torch_tpu if there": (
        {OPS: "try:\n    import torch_tpu\nexcept ImportError:\n    pass\n"},
        "ops.py:2: `import torch_tpu` runs when the variant is imported",
    ),
    "numpy in a class body": (
        {OPS: "class A:\n    import numpy as np\n"},
        "`import numpy` runs when the variant is imported",
    ),
    "kernel imported eagerly": (
        {OPS: "from . import kernel\n"},
        "kernel.py:1: `import jax.numpy` runs when the variant is imported",
    ),
    "jax in a package's init": (
        {"kernels/tiny/__init__.py": "import jax\n"},
        "kernels/tiny/__init__.py:1: `import jax` runs when the variant is imported",
    ),
    "outside the variant": (
        {OPS: "from ....x import y\n"},
        "`from ....x import y` reaches outside the variant",
    ),
    "module not shipped": (
        {OPS: "from ..big.ops import y\n"},
        "`from ..big.ops import y` is not in the variant",
    ),
    "name not shipped": ({OPS: "from .. import big\n"}, "finds no big"),
    "no __all__": ({INIT: IMPORT_OPS}, "needs __all__, a literal list"),
    "computed __all__": ({INIT: IMPORT_OPS + "__all__ = dir()\n"}, "needs __all__, a literal list"),
    "empty __all__": ({INIT: "__all__ = []\n"}, "__all__ is empty"),
    "layers not in __all__": (
        {INIT: IMPORT_OPS + '__all__ = ["double"]\n'},
        "layers is public but not in __all__",
    ),
    "name not in __all__": (
        {INIT: IMPORT_OPS + 'from . import layers\n__all__ = ["layers"]\n'},
        "double is public but not in __all__",
    ),
    "undefined in __all__": (
        {INIT: 'from . import layers\n__all__ = ["layers", "triple"]\n'},
        "__all__ names triple, which is not defined",
    ),
}


@pytest.mark.parametrize(("changes", "expected"), REFUSALS.values(), ids=REFUSALS)
def test_refuses(tmp_path, changes, expected):
    problems = problems_of(make_repository(tmp_path / "repo", changes), tmp_path / "out")
    assert any(expected in problem for problem in problems), problems
    assert all("\n" not in problem for problem in problems)


def test_refuses_symbolic_links(tmp_path):
    root = make_repository(tmp_path / "repo")
    (root / "tpu_runtime" / "link.py").symlink_to(root / OPS)
    (problem,) = problems_of(root, tmp_path / "out")
    assert problem.startswith("tpu_runtime/link.py: a symbolic link")


@pytest.mark.parametrize(
    "source",
    [
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax\ndouble = 1\n",
        "def double(x):\n    import numpy\n    from jax.experimental import pallas\n",
        "import torch.nn.functional\nimport json\nfrom . import kernel_free\ndouble = 1\n",
    ],
)
def test_accepts_what_does_not_run_at_import(tmp_path, source):
    root = make_repository(tmp_path / "repo", {OPS: source, "kernels/tiny/kernel_free.py": ""})
    build.build(root, tmp_path / "out")


def test_accepts_a_dependency_that_kernels_knows(tmp_path):
    changes = manifest("version = 3", 'version = 3\npython-depends = ["einops"]')
    root = make_repository(tmp_path / "repo", changes | {OPS: "import einops\ndouble = einops\n"})
    assert build_into(root, tmp_path / "out")["torch-tpu"]["python-depends"] == ["einops"]


def test_a_refused_build_keeps_the_old_one(tmp_path, monkeypatch, capsys):
    root = make_repository(tmp_path / "repo")
    monkeypatch.setattr(build, "ROOT", root)
    assert build.main(["--out", str(tmp_path / "out")]) == 0
    before = read_files(tmp_path / "out")
    make_repository(root, {OPS: "import yaml\nimport attrs\n", "torch-ext/a.txt": ""})
    capsys.readouterr()
    assert build.main(["--out", str(tmp_path / "out")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 3  # one problem per line
    assert read_files(tmp_path / "out") == before


def test_a_rebuild_leaves_no_stale_file(tmp_path):
    root = make_repository(tmp_path / "repo", {"tpu_runtime/old.py": ""})
    build.build(root, tmp_path / "out")
    (root / "tpu_runtime/old.py").unlink()
    (root / "kernels/tiny/CARD.md").unlink()
    build.build(root, tmp_path / "out")
    assert not any("old.py" in path or "CARD" in path for path in read_files(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out/tiny-op").iterdir()] == ["build"]


def test_kernel_selects_one(tmp_path, monkeypatch, capsys):
    second = {"torch-ext/tiny_two/__init__.py": "one = 1\n__all__ = ['one']\n"}
    table = '[tiny-two]\nversion = 1\npackages = ["tiny"]\nbackends = ["tpu"]\n'
    root = make_repository(tmp_path / "repo", second | manifest("[tiny-op]", f"{table}[tiny-op]"))
    monkeypatch.setattr(build, "ROOT", root)
    assert build.main(["--out", str(tmp_path / "out"), "--kernel", "tiny-two"]) == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tiny-two"]
    assert build.main(["--out", str(tmp_path / "out"), "--kernel", "tiny"]) == 1
    assert "tiny: no such kernel in build.toml; it has tiny-two, tiny-op" in capsys.readouterr().err


def test_file_in_place_of_out_is_an_error_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "ROOT", make_repository(tmp_path / "repo"))
    (tmp_path / "out").write_text("")
    assert build.main(["--out", str(tmp_path / "out")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_shipped_code_imports_itself_relatively(shipped):  # HB09
    for folder in shipped_variants(shipped):
        own = {path.name.removesuffix(".py") for path in folder.iterdir()}
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_bytes())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names = [node.module]
                for top in (name.split(".")[0] for name in names):
                    assert top not in own, path
                    lazy = {"torch", "jax", "torch_tpu", "numpy"}
                    assert top in sys.stdlib_module_names | lazy, path


def test_shipped_kernels_state_their_public_names(shipped):  # HB14
    for name, expected in PUBLIC_NAMES.items():
        folder = shipped / name / "build" / "torch-tpu"
        body = ast.parse((folder / "__init__.py").read_text()).body
        (public,) = (
            ast.literal_eval(node.value)
            for node in body
            if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
        )
        assert set(public) - {"layers"} == expected
        assert ("layers" in public) == (folder / "layers.py").exists()


def test_compatibility_folder_is_the_same_module(tiny, monkeypatch):  # HB17
    folder = tiny / "build" / "torch-tpu"
    namespace = json.loads((folder / "metadata.json").read_text())["id"]

    def load(name: str, path: Path):
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    compat = load("tiny_op", folder / "tiny_op" / "__init__.py")
    assert compat.__all__ == ["double", "layers"]
    assert compat.double is sys.modules[namespace].double  # one registration, however often loaded
    assert load("tiny_again", folder / "tiny_op" / "__init__.py").layers is compat.layers
