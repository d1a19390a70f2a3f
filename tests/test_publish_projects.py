"""What is generated around variants: cards, benchmarks, kernel-builder projects, CI, the flake."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from kernels._rust import Backend, Build
from tiny_kernel import FILES, ROOT, build, make_repository, read_files

KERNELS = ("ragged-dot-tpu", "attention-tpu", "rmsnorm-tpu", "rotary-tpu")
LETTERS = ("RE", "A", "N", "Q")  # of their cases in the tables of README.md


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("made")
    build.build(ROOT, out / "shipped")
    build.emit_projects(ROOT, out / "projects")
    return out


@pytest.fixture(scope="module")
def shipped(made) -> Path:
    return made / "shipped"


@pytest.fixture(scope="module")
def projects(made) -> Path:
    return made / "projects"


# Cards


@pytest.mark.parametrize("name", KERNELS)
def test_shipped_cards(shipped, name):
    card = (shipped / name / "CARD.md").read_text()
    left = set(re.findall(r"\{\{ *(\w+)", card))
    assert left <= {"repo_id", "org"} and "repo_id" in left  # the rest is filled in by the build
    front = yaml.safe_load(card.split("---\n")[1].replace("{{ repo_id }}", "org/name"))
    assert front["license"] == "apache-2.0" and front["library_name"] == "kernels"
    assert "trust_remote_code=True" in card and f"# {name}" in card
    sections = re.findall(r"^## (\w+)", card, re.MULTILINE)
    assert {"Functions", "Support", "Versions", "Benchmarks"} <= set(sections)
    python_name = name.replace("-", "_")
    init = (ROOT / "torch-ext" / python_name / "__init__.py").read_text()
    for public in re.findall(r'"(\w+)"', init.split("__all__")[1]):
        assert public == "layers" or re.search(rf"^\| `{public}\b", card, re.MULTILINE)
    layers = ROOT / "torch-ext" / python_name / "layers.py"
    if layers.exists():
        for layer in re.findall(r"^class (\w+)", layers.read_text(), re.MULTILINE):
            assert re.search(rf"^\| `{layer}` \| `forward\(", card, re.MULTILINE)
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for pin in pins["optional-dependencies"]["tpu"]:
        assert "==" not in pin or f"`{pin}`" in card


@pytest.mark.parametrize(("name", "letters"), list(zip(KERNELS, LETTERS, strict=True)))
def test_cards_hold_the_estimates_of_the_readme(shipped, name, letters):
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(rf"^\| [{letters}][\d.]+ \|.*\| *\d[^|]*\|$", readme, re.MULTILINE)
    card = (shipped / name / "CARD.md").read_text()
    assert rows and all(row in card for row in rows)
    assert not re.findall(rf"^\| [^{letters}\W]\d+(?:\.\d+)? \|", card, re.MULTILINE)
    assert "nothing here was measured on a TPU" in " ".join(card.split())


def test_unknown_key_in_a_card(tmp_path):
    root = make_repository(tmp_path, {"kernels/tiny/CARD.md": "{{ repo_id }} {{ speed }}\n"})
    with pytest.raises(build.BuildError, match=r"CARD.md: unknown \{\{ speed \}\}; there is name"):
        build.build(root, tmp_path / "out")


def test_line_of_a_card_that_would_break_its_table(tmp_path):
    changes = {
        "kernels/tiny/CARD.md": "{{ functions }}\n",
        "kernels/tiny/ops.py": "def double(x, mode='a|b'):\n    '''a | b.'''\n",
    }
    build.build(make_repository(tmp_path, changes), tmp_path / "out")
    card = (tmp_path / "out" / "tiny-op" / "CARD.md").read_text()
    assert r"| `double(x, mode='a\|b')` | a \| b |" in card


# Benchmarks

RUN_BENCHMARK = """
import json, sys, torch
from pathlib import Path
from kernels.cli import benchmark

torch.version.cuda = None  # the runner would ask a CUDA wheel for the name of its GPU
found = {}
for folder in map(Path, sys.argv[1:]):
    for script in benchmark.discover_benchmark_scripts(str(folder), folder):
        results, _ = benchmark.run_benchmark_script(
            script, iterations=1, warmup=0, cwd=folder, repo_id=str(folder), is_local=True,
            revision="local",
        )
        found |= {name: result.verified for name, result in results.items()}
print(json.dumps(found))
"""


def test_benchmarks_run_on_a_cpu_and_verify(shipped):
    """As `kernels benchmark DIR` runs them; every workload is compared with plain torch."""
    folders = [str(shipped / name) for name in KERNELS]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", RUN_BENCHMARK, *folders]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd="/", check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "MixtureOfExperts.ragged_dot": True,
        "MixtureOfExperts.moe_experts": True,
        "Attention.prompt": True,
        "Attention.decode": True,
        "RMSNorm.rms_norm": True,
        "RMSNorm.add_rms_norm": True,
        "RMSNorm.rms_norm_gated": True,
        "Rotary.apply_rotary": True,
        "Rotary.qk_norm_rotary": True,
    }


@pytest.mark.parametrize("path", ["benchmarks/tiny-op/speed.py", "benchmarks/other/benchmark.py"])
def test_stray_benchmarks(tmp_path, path):
    with pytest.raises(build.BuildError, match=f"{path}: "):
        build.build(make_repository(tmp_path, {path: ""}), tmp_path / "out")


# kernel-builder projects


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_builder_accepts_every_project(projects, name):
    general = Build.open(projects / name).general
    assert set(general.backends) == {Backend.TPU, Backend.CPU}
    written = tomllib.loads((projects / name / "build.toml").read_text())["general"]
    kernel = tomllib.loads((ROOT / "build.toml").read_text())[name]
    assert written["name"] == name and written["version"] == kernel["version"]
    assert "hub" not in written  # no default organisation


@pytest.mark.parametrize("name", KERNELS)
def test_a_project_holds_the_code_of_a_variant(projects, shipped, name):
    """kernel-builder copies torch-ext/<python name>/ to the root of a variant and adds _ops.py."""
    files, python_name = read_files(projects / name), name.replace("-", "_")
    prefix = f"torch-ext/{python_name}/"
    code = {path.removeprefix(prefix): files[path] for path in files if path.startswith(prefix)}
    variant = read_files(shipped / name / "build" / "torch-tpu")
    generated = {"_ops.py", "metadata.json", f"{python_name}/__init__.py"}
    assert code == {path: data for path, data in variant.items() if path not in generated}
    assert {path for path in files if not path.startswith(prefix)} == {
        "build.toml",
        "flake.nix",
        "CARD.md",
        "benchmarks/benchmark.py",
    }
    assert not any(path.is_symlink() for path in (projects / name).rglob("*"))
    assert "{{ org }}" not in files["CARD.md"].decode()


def test_project_options(tmp_path):
    manifest = FILES["build.toml"].replace('"0.14.0"\n', '"0.14.0"\nsource = "https://x.org/a"\n')
    manifest = manifest.replace("version = 3", 'version = 3\npython-depends = ["einops"]')
    root = make_repository(tmp_path / "repo", {"build.toml": manifest})
    build.emit_projects(root, tmp_path / "out")
    Build.open(tmp_path / "out" / "tiny-op")
    general = tomllib.loads((tmp_path / "out/tiny-op/build.toml").read_text())["general"]
    assert general["python-depends"] == ["einops"] and general["source"] == "https://x.org/a"


def test_projects_replace_nothing_foreign(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "ROOT", make_repository(tmp_path / "repo"))
    out = tmp_path / "out"
    for _ in range(2):
        assert build.main(["--emit-projects", str(out)]) == 0
        assert capsys.readouterr().out == f"{out / 'tiny-op'}\n"
    (out / "tiny-op" / "thesis.tex").write_text("")
    assert build.main(["--emit-projects", str(out)]) == 1
    assert "holds thesis.tex, which no build wrote; not replaced" in capsys.readouterr().err
    assert (out / "tiny-op" / "thesis.tex").exists()


# The flake and the workflows


def test_flakes_have_balanced_brackets(projects):
    for path in (ROOT / "flake.nix", *projects.glob("*/flake.nix")):
        text = re.sub(r'"[^"]*"|#.*', "", re.sub(r"''.*?''", "", path.read_text(), flags=re.DOTALL))
        for left, right in ("{}", "[]", "()"):
            assert text.count(left) == text.count(right), path
        assert "outputs" in text and "kernel-builder" in text


@pytest.mark.skipif(not shutil.which("nix-instantiate"), reason="no Nix on this machine")
def test_nix_parses_the_flakes(projects):
    for path in (ROOT / "flake.nix", *projects.glob("*/flake.nix")):
        subprocess.run(["nix-instantiate", "--parse", path], check=True, capture_output=True)


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_there_is(path):
    """Actions are pinned to commits; make targets and scripts exist; every job ends by itself."""
    workflow = yaml.safe_load(path.read_text())
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 120
        for step in job["steps"]:
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step.get("uses", "a/b@" + "0" * 40))
            command = step.get("run", "")
            for target in re.findall(r"^make ([\w-]+)", command, re.MULTILINE):
                assert target in targets
            for script in re.findall(r"(?<![\w/])scripts/[\w/]+\.py", command):
                assert (ROOT / script).is_file()


def test_publishing_happens_on_tags_only_and_signs_first():
    workflow = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML reads the key `on` as true
    publish = workflow["jobs"]["publish"]
    assert publish["needs"] == "build"
    assert publish["permissions"] == {"contents": "read", "id-token": "write"}
    commands = [step.get("run", "") for step in publish["steps"]]
    order = ["build.py --check build", "cosign sign-blob --yes", "publish.py --org"]
    found = [next(i for i, c in enumerate(commands) if text in c) for text in order]
    assert found == sorted(found) and "--execute" in commands[found[-1]]
    for other in WORKFLOWS:
        for name, job in yaml.safe_load(other.read_text())["jobs"].items():
            holds_secret = "secrets." in json.dumps(job)
            assert holds_secret == (other.stem == name == "publish")
