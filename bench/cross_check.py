"""The static estimate against another estimator of the same programs.

    python -m bench.cross_check OTHER.py             # what results/cross_check.json has not yet
    python -m bench.cross_check OTHER.py CASE ...    # these cases, again

OTHER.py has `estimate("FILE:CASES:NAME", topology, keep=FOLDER)` -> {"us", "hbm_bytes", "kernels"},
for the case list of cost_cases.py. It compiles a case and leaves the compiler's dumps in FOLDER;
both estimate what is there.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from bench import aot, cases, cost_cases, facts
from bench.dumps import estimate_compiled

RESULT = "cross_check.json"
CHIPS = ("v5e", "v6e")
TOLERANCE = 0.10
# Cases on which the two differ by more than TOLERANCE, and why.
_PREDICATES = (
    "ours is right: the other overlooks the predicates of scalar loads and stores, which stand "
    "behind the address (`sst [...] (%p), %s`)"
)
DIFFERENCES = {
    "A4": f"{_PREDICATES}. A load that does not happen overwrites the number of a block of keys, "
    "and the loop over them never ends. Taught to see them it gives 334.8 us.",
    "A6": f"{_PREDICATES}. The store is lost that says that a tile is met for the first time, and "
    "the body of the second pass runs, which is shorter. Taught to see them it gives 253.8 us on "
    "v6e; 379.5 us on v5e, where it also stalls on bursts of up to 16 matmuls, which MXUs queue.",
}


def load_tool(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("other_estimator", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # it starts itself again by this name
    spec.loader.exec_module(module)
    return module


def compare(tool: Any, name: str, chip: str, folder: Path) -> dict[str, Any]:
    """A row of results; the dumps are left in folder."""
    row = {"case": name, "chip": chip, "commit": facts.commit()}
    target = f"{Path(cost_cases.__file__)}:CASES:{name}"
    other = tool.estimate(target, aot.TOPOLOGIES[chip], keep=str(folder))
    if not other["ok"]:
        return {**row, "error": other["error"].split("\n")[0][:300]}
    case = cases.find(name, chip)
    traced = aot.trace(case.fn, case.args, chip)
    found = estimate_compiled(case, chip, traced, folder)
    return {
        **row,
        "us": round(found["us"], 2),
        "other_us": round(other["us"], 2),
        "hbm_bytes": found["read_bytes"] + found["write_bytes"],
        "other_hbm_bytes": other["hbm_bytes"],
        "unknown": found["unknown"],
        "other_unknown": sum(len(kernel["unknown"]) for kernel in other["kernels"]),
    }


def difference(row: dict[str, Any]) -> float:
    return row["us"] / row["other_us"] - 1


def summary(rows: list[dict[str, Any]]) -> str:
    close = sorted(
        (row for row in rows if abs(difference(row)) <= TOLERANCE),
        key=lambda row: abs(difference(row)),
    )
    mean = math.exp(statistics.fmean(math.log1p(difference(row)) for row in close))
    median = statistics.median(abs(difference(row)) for row in close)
    worst = close[-1]
    return (
        f"Against a separate implementation of the same idea, on {len(rows)} programs of the case "
        f"list: {len(close)} are within {TOLERANCE:.0%}, with a geometric mean of the ratio of "
        f"{mean:.3f}, a median difference of {median:.2%} and a largest of "
        f"{abs(difference(worst)):.1%} ({worst['case']} on {worst['chip']})."
    )


def reasons(rows: list[dict[str, Any]]) -> list[str]:
    """A sentence for each case that differs by more than TOLERANCE."""
    apart: dict[str, list[str]] = {}
    for row in rows:
        if abs(difference(row)) > TOLERANCE:
            figures = f"{row['us']:,.1f} against {row['other_us']:,.1f} us on {row['chip']}"
            apart.setdefault(row["case"], []).append(figures)
    return [
        f"{case}, {', '.join(figures)}: {DIFFERENCES.get(case, 'not explained.')}"
        for case, figures in apart.items()
    ]


def save(rows: Iterable[dict[str, Any]]) -> None:
    order = {case: i for i, case in enumerate(cost_cases.CASES)}
    known = [row for row in rows if row["case"] in order]
    known.sort(key=lambda row: (order[row["case"]], row["chip"]))
    facts.save(RESULT, {"kind": "static", "versions": facts.versions(), "rows": known})


def main(path: str, *wanted: str) -> int:
    jax.config.update("jax_platforms", "cpu")
    tool = load_tool(path)
    rows = {(row["case"], row["chip"]): row for row in facts.load(RESULT).get("rows", [])}
    failed = 0
    for name in wanted or cost_cases.CASES:
        for chip in CHIPS:
            if (name, chip) in rows and not wanted:
                continue
            with tempfile.TemporaryDirectory() as folder:
                row = compare(tool, name, chip, Path(folder))
            if "error" in row:
                failed += 1
                print(f"{name} {chip}: {row['error']}", file=sys.stderr)
                continue
            print(f"{name} {chip}: {row['us']} against {row['other_us']}", flush=True)
            rows[name, chip] = row
            save(rows.values())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
