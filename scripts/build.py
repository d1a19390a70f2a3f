"""Builds the Hub kernels named in build.toml: `<out>/<hub name>/build/torch-<backend>/`.

    python scripts/build.py [--out build] [--kernel NAME]
    python scripts/build.py --check DIR          # validates built or downloaded variants in DIR
    python scripts/build.py --emit-projects DIR  # one kernel-builder project per kernel

A variant holds the files of torch-ext/<python name>/ at its root, kernels/<package>/ and
tpu_runtime/ at the same relative places, and the generated `_ops.py`, `<python name>/__init__.py`
and metadata.json. Beside the variants stand CARD.md, rendered up to the name of the repository, and
benchmarks/. Everything is checked before anything is written, all kernels are written before the
first one is put in place, and the same sources always give the same bytes.

Exit code 0, or 1 with one problem per line on stderr. Needs the standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from check_variant import check_folder
from manifest import BUILDER_VERSION, BuildError, Checkout, Kernel, read_checkout, read_manifest
from projects import render_project
from render import beside_the_code, read_code, render, stray_files
from tree import ROOT

__all__ = ["BUILDER_VERSION", "BuildError", "build", "check", "emit_projects", "main"]

Make = Callable[[Checkout, Kernel], dict[str, bytes]]

# what a folder may hold that a build replaces
BUILT_NAMES = {"build", "benchmarks", "CARD.md", "torch-ext", "build.toml", "flake.nix"}


def write(out: Path, folders: dict[str, dict[str, bytes]]) -> None:
    """Makes every `out`/<name> hold exactly these files; an error changes none of them."""
    for name in folders:
        foreign = {path.name for path in (out / name).glob("*")} - BUILT_NAMES - {"__pycache__"}
        if foreign:
            listed = ", ".join(sorted(foreign))
            raise BuildError([f"{out / name}: holds {listed}, which no build wrote; not replaced"])
    out.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(out)
    with tempfile.TemporaryDirectory(prefix=f".building-{os.getpid()}-", dir=out) as staging:
        new, old = Path(staging, "new"), Path(staging, "old")
        old.mkdir()
        for name, files in folders.items():
            for path, data in files.items():
                (new / name / path).parent.mkdir(parents=True, exist_ok=True)
                (new / name / path).write_bytes(data)
        for path in (new, *new.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # whatever the umask
        replaced = []
        try:
            for name in folders:
                replaced.append(name)
                if (out / name).exists():
                    (out / name).rename(old / name)
                (new / name).rename(out / name)
        except BaseException:
            for name in replaced:
                if (old / name).exists():
                    if (out / name).exists():
                        (out / name).rename(new / name)
                    (old / name).rename(out / name)
            raise


def _remove_abandoned(out: Path) -> None:
    """Staging folders of builds that were killed."""
    for folder in out.glob(".building-*"):
        owner = re.match(r"\.building-(\d+)-", folder.name)
        if owner and not Path("/proc", owner[1]).exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)


def build(root: Path, out: Path, name: str | None = None) -> dict[str, dict[str, bytes]]:
    """Builds one kernel, or all, of `root` into `out`; Hub name -> path below it -> content."""
    return _make(root, out, name, render)


def emit_projects(root: Path, out: Path, name: str | None = None) -> dict[str, dict[str, bytes]]:
    """Writes a self-contained kernel-builder project `out`/<hub name> of one kernel, or all."""

    def project(checkout: Checkout, kernel: Kernel) -> dict[str, bytes]:
        files = read_code(checkout, kernel)
        return render_project(kernel, files, beside_the_code(checkout, kernel, files))

    return _make(root, out, name, project)


def _make(root: Path, out: Path, name: str | None, make: Make) -> dict[str, dict[str, bytes]]:
    kernels, checkout = read_manifest(root), read_checkout(root)
    if name is not None and name not in kernels:
        raise BuildError([f"{name}: no such kernel in build.toml; it has {', '.join(kernels)}"])
    problems = stray_files(checkout, kernels) if name is None else []
    made = {}
    for kernel in kernels.values() if name is None else [kernels[name]]:
        try:
            made[kernel.name] = make(checkout, kernel)
        except BuildError as error:
            problems += error.problems
    if problems:
        raise BuildError(list(dict.fromkeys(problems)))
    write(out, made)
    return made


def check(folder: Path) -> None:
    """Prints what was checked; BuildError lists everything wrong with the variants below."""
    found, problems, note = check_folder(folder)
    if problems:
        raise BuildError(problems)
    print(f"{len(found)} variants are as they must be: {', '.join(found)}{note}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Builds the Hub kernels named in build.toml.")
    parser.add_argument("--out", type=Path, default=ROOT / "build", help="default: %(default)s")
    parser.add_argument("--kernel", metavar="NAME", help="Hub name of the one kernel to build")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--check", type=Path, metavar="DIR", help="validate the variants in DIR")
    instead.add_argument(
        "--emit-projects", type=Path, metavar="DIR", help="write kernel-builder projects into DIR"
    )
    options = parser.parse_args(arguments)
    try:
        if options.check:
            check(options.check)
        elif options.emit_projects:
            for name in emit_projects(ROOT, options.emit_projects, options.kernel):
                print(options.emit_projects / name)
        else:
            for name, files in build(ROOT, options.out, options.kernel).items():
                metadata = [data for path, data in files.items() if "metadata.json" in path]
                ids = ", ".join(json.loads(data)["id"] for data in metadata)
                print(f"{options.out / name / 'build'}: {ids}")
    except BuildError as error:
        print("\n".join(error.problems), file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
