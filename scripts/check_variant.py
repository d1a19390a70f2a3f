"""Validates variants of Hub kernels, built here or downloaded: `scripts/build.py --check DIR`.

A variant is a folder `torch-<backend>` with a metadata.json. Every key of it is checked, so are the
digests of all files, what the code imports, the public names, the layers, and that nothing else
lies there. Where the Hub library is installed, its own parsers have to accept the variant too.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from code_rules import check_code
from manifest import BACKEND_TYPES, HUB_NAME, PYTHON_DEPENDS
from tree import PACKAGE

METADATA = "metadata.json"
NOT_HASHED = {METADATA, f"{METADATA}.sigstore"}
URL = re.compile(r"https?://\S+")


def _is_text(value: object, pattern: str | re.Pattern[str] = r"\S.*") -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _is_git_state(value: object) -> bool:
    is_state = isinstance(value, dict) and set(value) == {"commit", "dirty"}
    return is_state and _is_text(value["commit"], "[0-9a-f]{40}") and type(value["dirty"]) is bool


def _is_provenance(value: object) -> bool:
    if not isinstance(value, dict) or not {"kernel-builder"} <= set(value) <= {
        "kernel-builder",
        "kernel",
    }:
        return False
    builder = value["kernel-builder"]
    is_builder = isinstance(builder, dict) and {"version"} <= set(builder) <= {"version", "git"}
    return (
        is_builder
        and _is_text(builder["version"])
        and ("git" not in builder or _is_git_state(builder["git"]))
        and ("kernel" not in value or _is_git_state(value["kernel"]))
    )


def _is_digest(value: object) -> bool:
    if not isinstance(value, dict) or set(value) != {"algorithm", "files"}:
        return False
    files = value["files"]
    is_map = isinstance(files, dict) and all(isinstance(hash, str) for hash in files.values())
    return value["algorithm"] in ("sha256", "sha512") and is_map


# key -> (is it right, what it must be, is it required)
METADATA_RULES: dict[str, tuple[Callable[[object], bool], str, bool]] = {
    "name": (lambda v: _is_text(v, HUB_NAME), "lower-case words joined by dashes", True),
    "id": (lambda v: isinstance(v, str) and v.isidentifier(), "an identifier", True),
    "version": (lambda v: type(v) is int and v > 0, "a positive integer", True),
    "license": (_is_text, "text", True),
    "python-depends": (
        lambda v: isinstance(v, list) and all(name in PYTHON_DEPENDS for name in v),
        f"a list of some of {', '.join(PYTHON_DEPENDS)}",
        True,
    ),
    "backend": (
        lambda v: isinstance(v, dict) and set(v) == {"type"} and v["type"] in ("tpu", "cpu"),
        'an object with the type "tpu" or "cpu"',
        True,
    ),
    "kernels-minver": (lambda v: _is_text(v, r"\d+\.\d+\.\d+"), "a version like 0.14.0", False),
    "source": (lambda v: _is_text(v, URL), "a URL", False),
    "upstream": (lambda v: _is_text(v, URL), "a URL", False),
    "kernel-depends": (lambda v: v == [], "[]: a kernel carries all of its code", False),
    "digest": (_is_digest, 'an object with "algorithm" ("sha256") and "files"', True),
    "provenance": (
        _is_provenance,
        'an object with "kernel-builder" ("version") and "kernel" ("commit", 40 digits, "dirty")',
        False,
    ),
}


def check_folder(folder: Path) -> tuple[list[str], list[str], str]:
    """Names of the variants in or below `folder`, their problems, and a note for the reader."""
    found = sorted(path.parent for path in folder.rglob(METADATA))
    candidates = {p for p in folder.rglob("torch-*") if p.is_dir() and (p / "__init__.py").exists()}
    without = sorted(candidates - set(found))
    problems = [f"{variant}: {METADATA} is missing" for variant in without]
    if not found and not problems:
        problems.append(f"{folder}: no variant here: no {METADATA} in it or below it")
    has_parsers = _official() is not None
    for variant in found:
        problems += check_variant(variant)
    names = [f"{variant.parent.parent.name}/{variant.name}" for variant in found]
    note = "" if has_parsers else " (the package kernels is not installed: its parsers not asked)"
    return names, problems, note


def check_variant(folder: Path) -> list[str]:
    """Everything wrong with one variant, one line each."""
    return [f"{folder}: {problem}".replace("\n", " ") for problem in _problems(folder)]


def read_variant(folder: Path) -> dict[str, bytes]:
    """Path in the variant -> content, without what Python leaves there."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if not path.is_dir() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }


def _problems(folder: Path) -> Iterator[str]:
    files = read_variant(folder)
    try:
        metadata = json.loads(files[METADATA])
    except ValueError as error:
        yield f"{METADATA}: no JSON: {error}"
        return
    if not isinstance(metadata, dict):
        yield f"{METADATA}: must be an object"
        return
    wrong = list(_metadata_problems(metadata))
    yield from wrong
    if _is_digest(metadata.get("digest")):
        yield from _digest_problems(metadata["digest"], files)
    if not wrong:
        yield from _identity_problems(folder, metadata, files)
        yield from _code_problems(metadata, files)
        yield from _official_problems(folder)


def _metadata_problems(metadata: dict[str, object]) -> Iterator[str]:
    for key in metadata.keys() - METADATA_RULES.keys():
        yield f"{METADATA}: unknown key {key}"
    for key, (is_right, expected, is_required) in METADATA_RULES.items():
        if key not in metadata:
            if is_required:
                yield f"{METADATA}: {key} is missing"
        elif not is_right(metadata[key]):
            got = json.dumps(metadata[key])
            yield f"{METADATA}: {key} must be {expected}, got {got[:80]}"


def _digest_problems(digest: dict, files: dict[str, bytes]) -> Iterator[str]:
    expected = digest["files"]
    for path in expected.keys() - files.keys():
        yield f"{path}: missing, but {METADATA} has its digest"
    for path, data in files.items():
        if path in NOT_HASHED:
            continue
        hashed = base64.b64encode(hashlib.new(digest["algorithm"], data).digest()).decode()
        if path not in expected:
            yield f"{path}: stray, {METADATA} has no digest of it"
        elif expected[path] != hashed:
            yield f"{path}: differs from its digest in {METADATA}"


def _identity_problems(folder: Path, metadata: dict, files: dict[str, bytes]) -> Iterator[str]:
    python_name, backend = metadata["name"].replace("-", "_"), metadata["backend"]["type"]
    kind = folder.resolve().name.removeprefix("torch-")
    if kind not in BACKEND_TYPES or folder.resolve().name == kind:
        known = ", ".join(f"torch-{name}" for name in BACKEND_TYPES)
        yield f"a variant's folder is one of {known}"
    elif BACKEND_TYPES[kind] != backend:
        yield f"{METADATA}: backend is {backend}, but that of torch-{kind} is {BACKEND_TYPES[kind]}"
    form = f"_{python_name}_{backend}_[0-9a-f]{{7}}"
    if not re.fullmatch(form, metadata["id"]):
        yield f"{METADATA}: id must be _{python_name}_{backend}_ and 7 hex digits"
    for path in ("__init__.py", "_ops.py", f"{python_name}/__init__.py"):
        if path not in files:
            yield f"{path}: missing"
        elif path != "__init__.py" and metadata["id"] not in _strings(files[path]):
            yield f"{path}: belongs to another build, not to {metadata['id']}"
    for path in files:
        if path not in NOT_HASHED and not path.endswith(".py"):
            yield f"{path}: neither Python nor metadata"


def _strings(source: bytes) -> set[object]:
    try:
        nodes = ast.walk(ast.parse(source))
    except (SyntaxError, ValueError):
        return set()
    return {node.value for node in nodes if isinstance(node, ast.Constant)}


def _code_problems(metadata: dict, files: dict[str, bytes]) -> list[str]:
    code = {path: (path, data) for path, data in files.items() if path.endswith(".py")}
    if "__init__.py" not in code:
        return []
    own_names = (metadata["name"].replace("-", "_"), PACKAGE, "torch_ext")
    third_party = [PYTHON_DEPENDS[name] for name in metadata["python-depends"]]
    return check_code(code, own_names, third_party)


def _official():
    try:
        from kernels import _rust
    except ImportError:
        return None
    return _rust


def _official_problems(folder: Path) -> Iterator[str]:
    parsers = _official()
    if parsers is None:
        return
    try:
        metadata = parsers.Metadata.read_from_file(folder / METADATA)
        actual = parsers.Digest.hash_variant(metadata.digest.algorithm, folder)
        metadata.digest.validate(actual)
    except parsers.DigestValidationError as error:
        for violation in error.violations:
            yield f"kernels: {violation}"
    except (OSError, RuntimeError, ValueError) as error:
        yield f"kernels: {error}"
