"""The static estimate against another estimator of the same programs.

    python -m bench.cross_check OTHER.py     # results/cross_check.json, resumable

OTHER.py has `estimate("FILE:CASES:NAME", topology)` -> {"us", "hbm_bytes", "kernels"}, for the case
list of cost_cases.py. Both compile every case, one right after the other, so that they see the same
kernels.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import aot, cost_cases, facts
from bench.dumps import estimate_cases

RESULT = "cross_check.json"
CHIPS = ("v5e", "v6e")


def load_tool(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("other_estimator", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # it starts itself again by this name
    spec.loader.exec_module(module)
    return module


def compare(tool: Any, case: str, chips: list[str]) -> Iterator[dict[str, Any]]:
    target = f"{Path(cost_cases.__file__)}:CASES:{case}"
    with tempfile.TemporaryDirectory() as folder:
        wanted = [(chip, case) for chip in chips]
        for chip, _, found in list(estimate_cases(wanted, Path(folder))):
            other = tool.estimate(target, aot.TOPOLOGIES[chip])
            row = {"case": case, "chip": chip}
            if "error" in found or not other["ok"]:
                yield {**row, "error": found.get("error") or other.get("error")}
                continue
            yield {
                **row,
                "us": round(found["us"], 2),
                "other_us": round(other["us"], 2),
                "hbm_bytes": found["read_bytes"] + found["write_bytes"],
                "other_hbm_bytes": other["hbm_bytes"],
                "unknown": found["unknown"],
                "other_unknown": sum(len(kernel["unknown"]) for kernel in other["kernels"]),
            }


def summary(rows: list[dict[str, Any]]) -> str:
    ratios = [row["us"] / row["other_us"] for row in rows]
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    worst = max(rows, key=lambda row: abs(row["us"] / row["other_us"] - 1))
    return (
        f"Against a separate implementation of the same idea, on {len(rows)} programs of the case "
        f"list: geometric mean of the ratio {mean:.3f}, median difference "
        f"{statistics.median(errors):.2%}, largest {errors[-1]:.1%} ({worst['case']} on "
        f"{worst['chip']})."
    )


def main(path: str) -> int:
    tool = load_tool(path)
    rows = facts.load(RESULT).get("rows", [])
    done = {(row["case"], row["chip"]) for row in rows}
    for case in cost_cases.CASES:
        for row in compare(tool, case, [chip for chip in CHIPS if (case, chip) not in done]):
            if "error" in row:
                print(f"{case} {row['chip']}: {row['error']}", file=sys.stderr)
                continue
            print(f"{case} {row['chip']}: {row['us']} against {row['other_us']}", flush=True)
            rows.append(row)
            content = {"kind": "static", "commit": facts.commit(), "versions": facts.versions()}
            facts.save(RESULT, {**content, "summary": summary(rows), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
