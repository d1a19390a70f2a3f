"""build.toml and the files of a checkout: everything a build starts from.

Needs the standard library only.
"""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# backend of build.toml -> backend type of the metadata, which knows no "universal"
BACKEND_TYPES = {"tpu": "tpu", "cpu": "cpu", "universal": "cpu"}
# what `kernels` accepts for every backend (its python_depends.json) -> the module it provides
PYTHON_DEPENDS = {"einops": "einops", "helion": "helion", "tvm-ffi": "tvm_ffi"}
# what a build reads, besides build.toml; the last two only fill in the card
SOURCES = ("torch-ext", "kernels", "tpu_runtime", "benchmarks", "README.md", "pyproject.toml")
HUB_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
BUILDER_VERSION = "0.1.0"  # of this script, which stands where kernel-builder would


class BuildError(Exception):
    """The build was refused; `problems` says why, one line each."""

    def __init__(self, problems: list[str]):
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Kernel:
    """One kernel table of build.toml, with what it takes from [general]."""

    name: str
    version: int
    packages: tuple[str, ...]
    backends: tuple[str, ...]
    python_depends: tuple[str, ...]
    license: str
    kernels_minver: str
    source: str | None

    @property
    def python_name(self) -> str:
        return self.name.replace("-", "_")


@dataclass(frozen=True)
class Checkout:
    """The files a build may take, as git names them, or as they lie there without git."""

    root: Path
    files: tuple[str, ...]
    commit: str | None  # None: not a git checkout, or no commit yet
    is_dirty: bool

    def read(self, path: str) -> bytes:
        # a checkout with CRLF must give the same variant
        return (self.root / path).read_bytes().replace(b"\r\n", b"\n")


def _is_text(value: object, pattern: str = ".+") -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _are_names(value: object, allowed: dict[str, str] | None = None) -> bool:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        return False
    fits = all(name in allowed if allowed else name.isidentifier() for name in value)
    return fits and len(set(value)) == len(value)


# key -> (is it right, what it must be, is it required)
GENERAL_RULES = {
    "license": (_is_text, "text", True),
    "kernels-minver": (lambda v: _is_text(v, r"\d+\.\d+\.\d+"), "a version like 0.14.0", True),
    "source": (_is_text, "text", False),
}
KERNEL_RULES = {
    "version": (lambda v: type(v) is int and v > 0, "a positive integer", True),
    "packages": (lambda v: v and _are_names(v), "a list of different package names", True),
    "backends": (
        lambda v: v and _are_names(v, BACKEND_TYPES),
        f"a list of some of {', '.join(BACKEND_TYPES)}",
        True,
    ),
    "python-depends": (
        lambda v: _are_names(v, PYTHON_DEPENDS),
        f"a list of some of {', '.join(PYTHON_DEPENDS)} (import anything else lazily)",
        False,
    ),
}


def _table_problems(name: str, table: object, rules: dict[str, tuple]) -> list[str]:
    where = f"build.toml [{name}]"
    if not isinstance(table, dict):
        return [f"{where}: must be a table, got {table!r}"]
    problems = [f"{where}: unknown key {key}" for key in table if key not in rules]
    for key, (is_right, expected, is_required) in rules.items():
        if key in table and not is_right(table[key]):
            problems.append(f"{where}: {key} must be {expected}, got {table[key]!r}")
        elif key not in table and is_required:
            problems.append(f"{where}: {key} is missing")
    return problems


def read_manifest(root: Path) -> dict[str, Kernel]:
    """Hub name -> kernel, of the build.toml in `root`."""
    try:
        tables = tomllib.loads((root / "build.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BuildError([f"build.toml: {error}"]) from None
    general = tables.pop("general", {})
    problems = _table_problems("general", general, GENERAL_RULES)
    for name, table in tables.items():
        problems += _table_problems(name, table, KERNEL_RULES)
        if not HUB_NAME.fullmatch(name):
            problems.append(
                f"build.toml [{name}]: a Hub name is lower-case words joined by dashes, "
                "such as my-kernel"
            )
    if not tables:
        problems.append("build.toml: no table of a kernel")
    if problems:
        raise BuildError(problems)
    return {
        name: Kernel(
            name=name,
            version=table["version"],
            packages=tuple(table["packages"]),
            backends=tuple(table["backends"]),
            python_depends=tuple(table.get("python-depends", ())),
            license=general["license"],
            kernels_minver=general["kernels-minver"],
            source=general.get("source"),
        )
        for name, table in tables.items()
    }


def read_checkout(root: Path) -> Checkout:
    """The files of `root` that a build may use, with the commit they belong to."""
    if git(root, "rev-parse", "--show-cdup") != b"\n":  # not the top of a checkout: a tarball
        tops = [root / source for source in SOURCES if os.path.lexists(root / source)]
        inside = [path for top in tops for path in (top, *top.rglob("*"))]
        found = [path.relative_to(root).as_posix() for path in inside if not path.is_dir()]
        return Checkout(root, _without_bytecode(found), None, False)

    def listed(*options: str) -> tuple[str, ...]:
        output = git(root, "ls-files", "-z", *options, "--", *SOURCES) or b""
        return _without_bytecode(os.fsdecode(output).split("\0"))

    untracked = listed("--others", "--exclude-standard")
    files = {path for path in (*listed("--cached"), *untracked) if os.path.lexists(root / path)}
    commit = git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    # as kernel-builder: changes of tracked files anywhere; new files count where a build takes them
    is_dirty = git(root, "status", "--porcelain", "--untracked-files=no") != b"" or bool(untracked)
    return Checkout(root, tuple(sorted(files)), commit and commit.decode().strip(), is_dirty)


def git(root: Path, *arguments: str) -> bytes | None:
    """What git prints, None where it does not work; hooks and locales must not change it."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        run = subprocess.run(command, capture_output=True, env=env, check=False)
    except OSError:
        return None
    return run.stdout if run.returncode == 0 else None


def _without_bytecode(paths: list[str]) -> tuple[str, ...]:
    kept = (path for path in paths if path and "__pycache__" not in PurePosixPath(path).parts)
    return tuple(sorted(path for path in kept if not path.endswith(".pyc")))
