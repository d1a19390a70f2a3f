"""Measures and estimates the speed of the kernels: see docs/bench.md."""

import glob
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HAS_TPU = bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"))

if not HAS_TPU:
    # torch_tpu would look for a device at `import torch`, and may hang where there is none.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
if str(ROOT / "scripts") not in sys.path:
    sys.path.insert(0, str(ROOT / "scripts"))
