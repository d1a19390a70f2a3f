"""What would be published, and every local reason not to: nothing here talks to the Hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from card import name_repository
from check_variant import METADATA, NOT_HASHED, check_variant, read_variant
from manifest import BACKEND_TYPES, BuildError, Checkout, Kernel, git, read_checkout, read_manifest
from public_api import Public, read_api
from render import render, stray_files

REBUILD = "run `make build` again"


@dataclass(frozen=True)
class Release:
    """One kernel, checked, with the repository it goes to."""

    kernel: Kernel
    repo_id: str
    files: dict[str, bytes]  # of the branch v<version>
    readme: bytes  # of main

    @property
    def branch(self) -> str:
        return f"v{self.kernel.version}"

    def api(self) -> dict[str, Public]:
        return read_api(lambda path: self.files.get(f"build/{self.variants()[0]}/{path}"))

    def variants(self) -> list[str]:
        return [f"torch-{backend}" for backend in self.kernel.backends]


def prepare(
    root: Path, built: Path, repo_ids: dict[str, str], allow_dirty: bool = False
) -> list[Release]:
    """The releases of the kernels in `repo_ids` (Hub name -> repository), or BuildError."""
    kernels, checkout = read_manifest(root), read_checkout(root)
    problems = [] if allow_dirty else list(_dirt(root, checkout))
    problems += stray_files(checkout, kernels)
    releases = []
    for name, repo_id in repo_ids.items():
        if name not in kernels:
            known = ", ".join(kernels)
            problems.append(f"{name}: no such kernel in build.toml; it has {known}")
            continue
        try:
            expected = render(checkout, kernels[name])
        except BuildError as error:
            problems += error.problems
            continue
        found = read_variant(built / name) if (built / name).is_dir() else {}
        wrong = list(_problems(built / name, kernels[name], found, expected, allow_dirty))
        problems += wrong
        if not wrong:
            readme = name_repository(found.pop("CARD.md").decode(), repo_id).encode()
            releases.append(Release(kernels[name], repo_id, found, readme))
    if problems:
        raise BuildError(list(dict.fromkeys(problems)))
    return releases


def _dirt(root: Path, checkout: Checkout) -> Iterator[str]:
    status = git(root, "status", "--porcelain", "-z", "--untracked-files=all", "--no-renames")
    if status is None or checkout.commit is None:
        yield f"{root}: no commit of a git checkout, so nobody could tell what was published"
        return
    for entry in filter(None, status.decode(errors="replace").split("\0")):
        what = "is not tracked by git" if entry.startswith("??") else "has changes not committed"
        yield f"{entry[3:]}: {what}; commit first, or use --allow-dirty"


def _problems(
    folder: Path,
    kernel: Kernel,
    found: dict[str, bytes],
    expected: dict[str, bytes],
    allow_dirty: bool,
) -> Iterator[str]:
    """What is wrong with the build in `folder`, which holds `found` and should hold `expected`."""
    if not found:
        yield f"{folder}: not built: run `make build`"
        return
    if "CARD.md" not in found:
        packages = f"kernels/{kernel.packages[0]}/CARD.md"
        yield f"{folder / 'CARD.md'}: missing; its template is {packages}"
    for backend in kernel.backends:
        variant = folder / "build" / f"torch-{backend}"
        if (variant / METADATA).is_file():
            yield from check_variant(variant)
            metadata = found[f"build/torch-{backend}/{METADATA}"]
            for problem in _mismatches(kernel, backend, metadata):
                yield f"{variant / METADATA}: {problem}"
    for path in expected.keys() - found.keys():
        if path != "CARD.md":
            yield f"{folder / path}: missing; {REBUILD}"
    signatures = {path for path in found if Path(path).name in NOT_HASHED - {METADATA}}
    for path, data in found.items():
        if path not in expected and path not in signatures and path != "CARD.md":
            yield f"{folder / path}: stray, no build of this tree writes it"
        elif path in expected and not _is_same(path, data, expected[path], allow_dirty):
            yield f"{folder / path}: not what this commit builds; {REBUILD}"


def _mismatches(kernel: Kernel, backend: str, data: bytes) -> Iterator[str]:
    """Where metadata.json says something else than build.toml."""
    try:
        metadata = json.loads(data)
    except ValueError:
        return  # check_variant has said so
    expected = {
        "name": kernel.name,
        "version": kernel.version,
        "license": kernel.license,
        "kernels-minver": kernel.kernels_minver,
        "python-depends": list(kernel.python_depends),
        "source": kernel.source,
        "backend": {"type": BACKEND_TYPES[backend]},
    }
    for key, value in expected.items():
        if isinstance(metadata, dict) and metadata.get(key) != value:
            yield f"{key} is {metadata.get(key)!r}, build.toml says {value!r}"


def _is_same(path: str, found: bytes, expected: bytes, allow_dirty: bool) -> bool:
    if found == expected or not (allow_dirty and path.endswith(METADATA)):
        return found == expected
    try:  # whether the tree is dirty may have changed since the build
        left, right = json.loads(found), json.loads(expected)
        return left | {"provenance": None} == right | {"provenance": None}
    except (TypeError, ValueError):
        return False
