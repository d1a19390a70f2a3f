"""What compiled programs cost, without a TPU: static estimates against the floor and the peers.

    python -m bench.static ragged_dot --m 512 --k 2048 --n 1536 --g 16 --chip v6e
    python -m bench.static R1 A1 --chip v5e --no-peers
    python -m bench.static --refresh [CASE ...]      # results/static.json, what is out of date only

The program is compiled by the real TPU compiler and its final bundles are executed by a model of
the machine. No number printed here was measured on a TPU.
"""

from __future__ import annotations

import argparse
import functools
import os
import queue
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import facts
from bench.dumps import estimate_cases
from bench.machine import MACHINES, floor_us

RESULT = "static.json"
CHIPS = ("v5e", "v6e")
OURS = "ours"


def row_of(chip: str, name: str, found: dict[str, Any]) -> dict[str, Any]:
    """One row of results from what estimate_cases yields."""
    case, _, peer = name.partition("/")
    row = {"case": case, "chip": chip, "implementation": peer or OURS, "kind": "static"}
    if "error" in found:
        return {**row, "error": found["error"].split("\n")[0][:300]}
    read = found["bytes"] - found["written"]
    head = found.get("head"), found.get("head_share", 1.0)
    floor, bound = floor_us(chip, found["flops"], read, found["written"], *head)
    moved = found["read_bytes"] + found["write_bytes"]
    return {
        **row,
        "us": round(found["us"], 2),
        "floor_us": round(floor, 2),
        "bound": bound,
        "ratio": round(found["us"] / floor, 3),
        "flops": found["flops"],
        "bytes": found["bytes"],
        "hbm_bytes": moved,
        "matmul_flops": found["matmul_flops"],
        "schedule_cycles": found["schedule_cycles"],
        "mxu_stall_us": round(found["mxu_stall_us"], 2),
        "dma_stall_us": round(found["dma_stall_us"], 2),
        "vmem_bytes": found["vmem_bytes"],
        "spills": found["spills"],
        "fills": found["fills"],
        "unknown": found["unknown"],
        "rare_us": round(found["rare_us"], 2),
        "not_dumped": found["not_dumped"],
        "compile_s": found["compile_s"],
    }


def print_row(row: dict[str, Any], operations: list[dict[str, Any]] = ()) -> None:
    label = f"{row['chip']:4} {row['case']:10.40} {row['implementation']:30}"
    if "error" in row:
        print(f"{label} does not compile: {row['error']}")
        return
    print(
        f"{label} static {row['us']:10.2f} us = {row['ratio']:6.2f} x floor"
        f" {row['floor_us']:.2f} us ({row['bound']})"
    )
    print(
        f"     HBM {row['hbm_bytes'] / 1e6:.2f} MB (fewest {row['bytes'] / 1e6:.2f}),"
        f" FLOPs {row['flops'] / 1e9:.2f} G (issued {row['matmul_flops'] / 1e9:.2f}),"
        f" schedule {row['schedule_cycles']} cycles,"
        f" stalls MXU {row['mxu_stall_us']:.1f} us, DMA {row['dma_stall_us']:.1f} us,"
        f" VMEM {row['vmem_bytes'] / 2**20:.2f} MiB,"
        f" spills/fills {row['spills']}/{row['fills']}, compiled in {row['compile_s']} s"
    )
    for operation in operations:
        print(
            f"       {operation['name']:50.50} {operation['kind']:8} {operation['us']:10.2f} us,"
            f" {operation['schedule_cycles']} cycles, {operation['hbm_bytes'] / 1e6:.2f} MB"
        )
    if row["rare_us"]:
        print(f"     values taken as ordinary; if all were rare ones: {row['rare_us']:+.2f} us")
    if row["unknown"]:
        print(f"     decided by data, taken as: loops once, blocks run: {row['unknown']}")
    if row["not_dumped"]:
        print(f"     no code dumped, taken as their memory traffic (us): {row['not_dumped']}")


def show(case: str, chip: str, with_peers: bool) -> int:
    """Prints a case and its peers; the number of rows that do not compile."""
    from bench import cases

    print(f"{cases.describe(case)}: STATIC ESTIMATES for {chip}, no TPU involved")
    names = [case, *(f"{case}/{peer}" for peer in cases.peer_names(case, chip) if with_peers)]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for _, name, found in estimate_cases([(chip, n) for n in names], Path(folder)):
            row = row_of(chip, name, found)
            print_row(row, found.get("operations", []))
            failed += "error" in row and "/" not in name
    return failed


def marks() -> Callable[[str, bool], str]:
    """(case, whether a peer) -> what its row must be stamped with to be up to date."""
    from bench import cost_cases

    @functools.cache
    def mark(case: str, is_peer: bool) -> str:
        _, args, counts = cost_cases.CASES[case]
        return facts.fingerprint(args, counts, is_peer)

    return mark


def refresh(wanted: list[str], jobs: int, with_peers: bool) -> int:
    """Brings results/static.json up to date, saved after each row: start again where it ended.

    Returns how many estimates are missing or do not compile in the end.
    """
    from bench import cases, cost_cases

    mark = marks()
    known = set(cost_cases.CASES)
    saved = facts.load(RESULT)
    rows = {
        (row["case"], row["chip"], row["implementation"]): row
        for row in saved.get("rows", [])
        if row["case"] in known
    }
    work: queue.Queue[list[tuple[str, str]]] = queue.Queue()
    total = 0
    for case in wanted or list(cost_cases.CASES):
        todo = []
        for chip in CHIPS:
            peers = cases.peer_names(case, chip) if with_peers else []
            for name in (OURS, *peers):
                current = rows.get((case, chip, name), {})
                if "us" not in current or current["fingerprint"] != mark(case, name != OURS):
                    todo.append((chip, case if name == OURS else f"{case}/{name}"))
        total += len(todo)
        if todo:
            work.put(todo)
    print(f"{total} estimates to make, {len(rows)} rows in {RESULT}", flush=True)
    lock = threading.Lock()
    order = {case: i for i, case in enumerate(cost_cases.CASES)}

    def keep(row: dict[str, Any]) -> None:
        row |= {
            "fingerprint": mark(row["case"], row["implementation"] != OURS),
            "commit": facts.commit(),
            "date": facts.today(),
        }
        with lock:
            rows[row["case"], row["chip"], row["implementation"]] = row
            print_row(row)
            sys.stdout.flush()
            ordered = sorted(
                rows.values(),
                key=lambda r: (order[r["case"]], r["chip"], r["implementation"] != OURS),
            )
            facts.save(RESULT, {"versions": facts.versions(), "rows": ordered})

    def worker() -> None:
        with tempfile.TemporaryDirectory() as folder:
            while True:
                try:
                    todo = work.get_nowait()
                except queue.Empty:
                    return
                for chip, name, found in estimate_cases(todo, Path(folder)):
                    keep(row_of(chip, name, found))

    threads = [threading.Thread(target=worker) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ours = [rows.get((case, chip, OURS), {}) for case in wanted or known for chip in CHIPS]
    return sum("us" not in row for row in ours)


def main(argv: list[str]) -> int:
    from bench import cases, cost_cases

    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # else --n of a shape would be taken for --no-peers
    )
    parser.add_argument("--chip", choices=[*MACHINES], action="append", help="default: v5e and v6e")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--refresh", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="with --refresh")
    parser.add_argument("--list", action="store_true", help="the cases by name")
    options, rest = parser.parse_known_args(argv)
    if options.list:
        for name in cost_cases.CASES:
            print(f"{name:8} {cases.describe(name)}")
        return 0
    unknown = [name for name in rest if name not in cost_cases.CASES]
    if options.refresh:
        if unknown:
            parser.error(f"expected cases of --list, got {' '.join(unknown)}")
        return 1 if refresh(rest, options.jobs, not options.no_peers) else 0
    if not rest:
        parser.error("expected cases (see --list), or an operation with its sizes, or --refresh")
    wanted = rest if not unknown else [" ".join(rest)]
    if unknown:
        cases.of_shape(wanted[0])  # complains here if it cannot be
    chips = options.chip or CHIPS
    failed = sum(show(case, chip, not options.no_peers) for case in wanted for chip in chips)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
