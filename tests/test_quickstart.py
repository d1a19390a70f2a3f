"""The main job of the README, from build to compiled kernels, as a stranger runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "quickstart.py"


@pytest.mark.xdist_group("quickstart")
def test_quickstart_runs_to_the_end() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=900, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    out = result.stdout
    for name in ("ragged_dot_tpu", "attention_tpu", "rmsnorm_tpu", "rotary_tpu"):
        assert re.search(rf"_{name}_cpu_[0-9a-f]{{7}} with ", out)
    assert len(re.findall(r"logits \S+, gradients of \d+ parameters", out)) == 3
    for chip in ("v5e", "v6e"):
        assert len(re.findall(rf"{chip}: compiling", out)) == 3
    assert len(re.findall(r"roofline \d+ us \((MXU|HBM)\)", out)) == 6
    assert "Done." in out
