"""Compiles cases in a process of their own, with the compiler's dumps on, and estimates them there.

libtpu reads where to dump when it is loaded, and a failed check of the compiler ends its process.
Run as `python -m bench.dumps FOLDER INDEX:CHIP:CASE ...` by `estimate_cases`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Only these stages are written; a full dump is some hundred files for each operation.
_STAGES = "final_bundles|final_hlo-static-per-bundle-utilization"


def _environment(dump: Path) -> dict[str, str]:
    flags = (
        f"--xla_jf_dump_to={dump}",
        "--xla_jf_dump_llo_text=true",
        f"--xla_jf_dump_llo_pass_label_regex={_STAGES}",
    )
    return {
        **os.environ,
        "LIBTPU_INIT_ARGS": " ".join(flags),
        "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def estimate_cases(
    wanted: list[tuple[str, str]], folder: Path, timeout_s: float = 900, *, keep: bool = False
) -> Iterator[tuple[str, str, dict]]:
    """(chip, case, facts) for each wanted (chip, case), in this order.

    The facts are the fields of program.Cost, the counts of the case, "written" (bytes of the
    results) and "compile_s"; or "error", if it does not compile. `keep` leaves the dumps in folder.
    """
    remaining = list(enumerate(wanted))
    while remaining:
        folders = [folder / str(index) for index, _ in remaining]
        for path in folders:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        names = [f"{index}:{chip}:{case}" for index, (chip, case) in remaining]
        command = [sys.executable, "-m", "bench.dumps", str(folder), *names]
        log = folder / "log.txt"
        with log.open("w") as output:
            child = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_environment(folder / "dump"),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            while remaining:
                path = folder / str(remaining[0][0])
                error = _await(path / "facts.json", child, timeout_s)
                if error:  # the child died with this case: note it, go on with the next
                    _write(path / "facts.json", {"error": error + _crash(log)})
                _, (chip, case) = remaining.pop(0)
                yield chip, case, json.loads((path / "facts.json").read_text())
                if not keep:
                    shutil.rmtree(path)
                if error:
                    break
            child.kill()
            child.wait()


def _await(path: Path, child: subprocess.Popen, timeout_s: float) -> str | None:
    end = time.monotonic() + timeout_s
    while not path.exists():
        if child.poll() is not None and not path.exists():
            return "the compiler died: "
        if time.monotonic() > end:
            return f"no result after {timeout_s:.0f} s: "
        time.sleep(0.05)
    return None


def _crash(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().split("\n")
    fatal = [line for line in lines if line.startswith("F") and line[1:5].isdigit()]
    return "\n".join(fatal or lines[-3:])[:2000]


def _write(path: Path, facts: dict) -> None:
    """Written elsewhere and renamed, so that the parent never reads half of it."""
    path.with_suffix(".part").write_text(json.dumps(facts))
    path.with_suffix(".part").rename(path)


def estimate_compiled(case: Any, chip: str, traced: Any, folder: Path) -> dict[str, Any]:
    """The fields of program.Cost of a case, from its dumps: hlo.txt and dump/ in folder."""
    import jax

    from bench import known_values, program

    calls = known_values.pallas_operands(traced.jaxpr, jax.tree.leaves(case.args))
    ordinary = case.counts.get("ordinary", False)
    return dataclasses.asdict(program.Program(folder, chip, calls, ordinary=ordinary).cost())


def _compile(chip: str, case_name: str, folder: Path, dump: Path) -> None:
    import jax

    from bench import aot, cases

    dump.mkdir(exist_ok=True)
    jax.clear_caches()  # a program that is found there is not compiled, so nothing is dumped
    facts: dict = {}
    start = time.monotonic()
    try:
        case = cases.find(case_name, chip)
        with cases.lowering_of_peers():
            traced, compiled = aot.trace_and_compile(case.fn, case.args, chip)
        facts["compile_s"] = round(time.monotonic() - start, 1)
        dump.rename(folder / "dump")
        (folder / "hlo.txt").write_text(compiled.as_text())
        results = jax.tree.leaves(traced.out_info)
        facts["written"] = sum(x.size * x.dtype.itemsize for x in results)
        facts |= case.counts
        facts |= estimate_compiled(case, chip, traced, folder)
    except Exception as error:
        shutil.rmtree(dump, ignore_errors=True)
        facts["error"] = f"{type(error).__name__}: {error}"[:2000]
        (folder / "traceback.txt").write_text(traceback.format_exc())
    _write(folder / "facts.json", facts)


def main(folder: str, *wanted: str) -> None:
    for name in wanted:
        index, chip, case = name.split(":", 2)
        _compile(chip, case, Path(folder) / index, Path(folder) / "dump")


if __name__ == "__main__":
    main(*sys.argv[1:])
