"""Environment of every test: set before torch, JAX or libtpu are imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

os.environ.update(
    # torch_tpu would probe for hardware at `import torch`, and can hang where there is none.
    TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    JAX_PLATFORMS="cpu",
    # Pallas' interpreter calls back into Python, which can deadlock with asynchronous dispatch on a
    # machine of two cores.
    JAX_CPU_ENABLE_ASYNC_DISPATCH="0",
    # libtpu compiles ahead of time on a CPU host without asking anybody where it is.
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE="v5litepod-4",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    TF_CPP_MIN_LOG_LEVEL="3",
    TORCH_CPP_LOG_LEVEL="ERROR",
    HF_HUB_OFFLINE="1",
)
os.environ.pop("TPU_KERNELS_INTERPRET", None)  # the tests choose the mode, not the caller
os.environ.pop("TPU_KERNELS_CHIP", None)

for folder in ("scripts", "bench", "tests"):
    sys.path.insert(0, str(ROOT / folder))

import tree  # noqa: E402, F401  (makes the working tree importable as `tpu_kernels`)
from hypothesis import settings  # noqa: E402

settings.register_profile("fixed", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("fixed")
