"""Where a number comes from: commit, versions, and a fingerprint of the code it depends on."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "torch-tpu", "jax", "libtpu", "tokamax", "kernels")
# What the program of an operation is made from, beside the device layer.
_FOLDERS = {
    "ragged_dot": ("ragged_dot",),
    "weight_grad": ("ragged_dot",),
    "moe_experts": ("moe_experts", "ragged_dot"),
    "flash_attention": ("flash_attention",),
    "rms_norm": ("rmsnorm",),
    "rms_norm_backward": ("rmsnorm",),
    "add_rms_norm": ("rmsnorm",),
    "rms_norm_gated": ("rmsnorm",),
    "apply_rotary": ("rotary",),
    "qk_norm_rotary": ("rotary",),
}


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the working tree, with a plus if files differ from it; "" outside git."""
    try:
        run = ["git", "-C", str(ROOT)]
        head = subprocess.check_output([*run, "rev-parse", "--short=12", "HEAD"], text=True)
        changed = subprocess.check_output([*run, "status", "--porcelain", "-uno"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.strip() + ("+" if changed.strip() else "")


def today() -> str:
    return datetime.date.today().isoformat()


def fingerprint(args: tuple[Any, ...], counts: dict[str, Any], is_peer: bool) -> str:
    """Changes with the case and with the code that a row of results was computed from."""
    state = hashlib.sha256(json.dumps([versions(), counts], sort_keys=True).encode())
    for arg in args:
        state.update(f"{arg.shape} {arg.dtype}".encode())
        state.update(arg.tobytes() if isinstance(arg, np.ndarray) else b"")
    for path in _sources("peers" if is_peer else counts.get("op", "")):
        state.update(path.name.encode() + path.read_bytes())
    return state.hexdigest()[:16]


@functools.cache
def _sources(op: str) -> list[Path]:
    names = ("machine", "llo", "simulate", "program", "hlo", "known_values")
    files = [ROOT / "bench" / f"{name}.py" for name in names]
    if op == "peers":
        return [*files, ROOT / "bench" / "peers.py"]
    folders = _FOLDERS.get(op) or sorted({f for group in _FOLDERS.values() for f in group})
    files += [path for folder in folders for path in (ROOT / "kernels" / folder).glob("*.py")]
    return sorted([*files, *(ROOT / "tpu_runtime").glob("*.py")])


def load(name: str) -> dict[str, Any]:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else {}


def save(name: str, content: dict[str, Any]) -> None:
    write(RESULTS / name, content)


def write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
