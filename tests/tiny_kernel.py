"""A whole repository in small: what scripts/build.py needs, with one kernel that only doubles."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import build  # noqa: E402 - found through the line above

__all__ = ["FILES", "ROOT", "build", "make_repository", "read_files"]

FILES = {
    "build.toml": """
[general]
license = "Apache-2.0"
kernels-minver = "0.14.0"

[tiny-op]
version = 3
packages = ["tiny"]
backends = ["tpu", "cpu", "universal"]
""",
    "torch-ext/tiny_op/__init__.py": '''"""Doubles."""

from . import layers
from .kernels.tiny.ops import double

__all__ = ["double", "layers"]
''',
    "torch-ext/tiny_op/layers.py": """from torch import nn

from .kernels.tiny.ops import double


class Double(nn.Module):
    def forward(self, x):
        return double(x)
""",
    "kernels/tiny/ops.py": """import torch

from ..._ops import add_op_namespace_prefix
from ...tpu_runtime import FACTOR


@torch.library.custom_op(add_op_namespace_prefix("double"), mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * FACTOR


def double_on_tpu(x):
    from .kernel import double_kernel

    return double_kernel(x)
""",
    "kernels/tiny/kernel.py": """import jax.numpy as jnp


def double_kernel(x):
    return jnp.add(x, x)
""",
    "kernels/tiny/CARD.md": "# tiny\n",
    "tpu_runtime/__init__.py": "FACTOR = 2\n",
}


def make_repository(root: Path, changes: dict[str, str | bytes | None] | None = None) -> Path:
    """Writes FILES with `changes` (None: leave the file out) below `root`."""
    for path, text in (FILES | (changes or {})).items():
        if text is not None:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(text.encode() if isinstance(text, str) else text)
    return root


def read_files(folder: Path) -> dict[str, bytes]:
    """Path below `folder` -> content, without bytecode."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
