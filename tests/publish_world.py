"""Small repositories of three releases, a local Hub that holds the first two, and how to publish.

The tiny kernel at version 2, at version 3, at version 3 again with a compatible change (a file
added, one changed, one gone), and at version 4 with an incompatible one.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import publish
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http
from local_hub import LocalHub, Repo
from tiny_kernel import FILES, build, make_repository, read_files

NAME, REPO = "tiny-op", "org/tiny-op"
ARGUMENTS = ("--org", "org", "--first-pause", "0.01", "--tries", "4", "--timeout", "1")

CARD = """---
license: {{ license }}
library_name: kernels
---

# {{ name }}, version {{ version }}, of {{ repo_id }}

{{ trust }}

{{ functions }}

{{ layers }}

{{ versions }}

{{ benchmarks T }}
"""
OPS = FILES["kernels/tiny/ops.py"]
COMMON = {
    "kernels/tiny/CARD.md": CARD,
    "benchmarks/tiny-op/benchmark.py": "print('a benchmark')\n",
    ".gitignore": "build/\n__pycache__/\n",
}
CHANGES: dict[str, dict[str, str | bytes | None]] = {
    "two": {"build.toml": FILES["build.toml"].replace("version = 3", "version = 2")},
    "three": {"kernels/tiny/extra.py": "GONE_LATER = True\n"},
    "again": {
        "kernels/tiny/ops.py": OPS.replace("x: torch.Tensor", "x: torch.Tensor, times: int = 1")
    },
    "four": {
        "build.toml": FILES["build.toml"].replace("version = 3", "version = 4"),
        "kernels/tiny/ops.py": OPS.replace("def double(x", "def double(tensor"),
    },
}
CHANGES["again"]["kernels/tiny/other.py"] = "NEW = True\n"


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false")
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout


def make_release(root: Path, changes: dict[str, str | bytes | None]) -> Path:
    """A repository of the tiny kernel with one commit, built into its build/."""
    make_repository(root, COMMON | changes)
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "x")
    build.build(root, root / "build")
    return root


@dataclass(frozen=True)
class Result:
    """What a run of publish.py said."""

    code: int
    out: str
    err: str


def run(root: Path, hub: LocalHub | None, *arguments: str, token: str | None = "writer") -> Result:
    """scripts/publish.py on the repository `root`, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_ENDPOINT", hub.url if hub else "http://127.0.0.1:9")
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
        patch.setenv("HF_TOKEN", token) if token else patch.delenv("HF_TOKEN", raising=False)
        # huggingface_hub's own pauses start at a second
        patch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None))
        huggingface_hub.close_session()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = publish.main([*ARGUMENTS, *arguments], root)
    return Result(code, out.getvalue(), err.getvalue())


def start(root: Path, hub: LocalHub) -> subprocess.Popen:
    """The same with --execute, in a process of its own that can be killed."""
    arguments = [*ARGUMENTS[:-2], "--execute"]  # without the short timeout
    code = f"import publish, pathlib; publish.main({arguments}, pathlib.Path({str(root)!r}))"
    scripts = Path(publish.__file__).parent
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": "writer", "PYTHONPATH": str(scripts)}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


class World:
    """The releases, and the repositories of a Hub where "two" and "three" are published."""

    def __init__(self, folder: Path):
        self.roots = {name: make_release(folder / name, CHANGES[name]) for name in CHANGES}
        with LocalHub() as hub:
            for name in ("two", "three"):
                result = run(self.roots[name], hub, "--execute")
                assert result.code == 0, result
            self.repos: dict[str, Repo] = hub.repos

    def files(self, name: str) -> dict[str, bytes]:
        """What the version branch holds after publishing release `name`."""
        built = read_files(self.roots[name] / "build" / NAME)
        built.pop("CARD.md")
        return built

    def readme(self, name: str) -> bytes:
        card = (self.roots[name] / "build" / NAME / "CARD.md").read_text()
        return card.replace("{{ repo_id }}", REPO).replace("{{ org }}", "org").encode()

    def hub(self, **options: object) -> LocalHub:
        return LocalHub(self.repos, **options)


def code_of(repo: Repo, branch: str) -> dict[str, bytes]:
    """The files of a branch that publishing owns."""
    owned = ("build/", "benchmarks/")
    return {path: data for path, data in repo.files(branch).items() if path.startswith(owned)}
