"""The regression gate: schedule cycles and HBM bytes of key cases against the committed values.

    python -m bench.gate             # compiles them; exit 1 and the case by name if one got worse
    python -m bench.gate --refresh   # commits to what they are now: results/gate.json

Both numbers are static: read off the compiled program, the same on every machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from bench import facts
from bench.dumps import estimate_cases

RESULT = "gate.json"
TOLERANCE = 0.03
QUANTITIES = ("schedule_cycles", "hbm_bytes")
# One case or two of every kernel, on both chips, that compile in a second or two.
KEY_CASES = (
    ("v6e", "R1"),
    ("v6e", "R11"),
    ("v6e", "E1.64"),
    ("v6e", "E1.64.int4"),
    ("v6e", "N1"),
    ("v6e", "N3"),
    ("v6e", "Q1"),
    ("v6e", "A1"),
    ("v6e", "A5"),
    ("v5e", "R1s"),
    ("v5e", "R8"),
    ("v5e", "E1.1"),
    ("v5e", "N5"),
    ("v5e", "Q3"),
    ("v5e", "A6"),
)

Values = dict[str, dict[str, float]]  # "chip case" -> quantity -> value


def measure(cases: tuple[tuple[str, str], ...] = KEY_CASES) -> Values:
    """The quantities of each case; a case that does not compile has none."""
    values: Values = {}
    with tempfile.TemporaryDirectory() as folder:
        for chip, case, found in estimate_cases(list(cases), Path(folder)):
            moved = found.get("read_bytes", 0) + found.get("write_bytes", 0)
            values[f"{chip} {case}"] = (
                {"error": found["error"]}
                if "error" in found
                else {"schedule_cycles": found["schedule_cycles"], "hbm_bytes": moved}
            )
    return values


def problems(now: Values, committed: Values) -> list[str]:
    """A line for each quantity that is more than TOLERANCE worse, and for each missing case."""
    lines = []
    for name, before in committed.items():
        after = now.get(name, {"error": "was not compiled"})
        if "error" in after:
            lines.append(f"{name}: does not compile: {after['error']}")
            continue
        for quantity in QUANTITIES:
            old, new = before[quantity], after[quantity]
            if new > old * (1 + TOLERANCE):
                lines.append(f"{name}: {quantity} {old:.0f} -> {new:.0f}, {new / old - 1:+.1%}")
    missing = [name for name in now if name not in committed]
    return lines + [
        f"{name}: no committed value, run python -m bench.gate --refresh" for name in missing
    ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--refresh", action="store_true")
    options = parser.parse_args(argv)
    now = measure()
    for name, values in now.items():
        print(f"static {name:12} " + ", ".join(f"{key} {value}" for key, value in values.items()))
    if options.refresh:
        failed = [name for name, values in now.items() if "error" in values]
        if failed:
            print(f"do not compile: {', '.join(failed)}; nothing written", file=sys.stderr)
            return 1
        content = {"kind": "static", "commit": facts.commit(), "versions": facts.versions()}
        facts.save(RESULT, {**content, "cases": now})
        return 0
    found = problems(now, facts.load(RESULT).get("cases", {}))
    for line in found:
        print(f"WORSE {line}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
