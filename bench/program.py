"""From the compiler's dumps of one program to its static estimate."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench import hlo, llo
from bench.hlo import Operation
from bench.machine import MACHINES, Machine
from bench.simulate import TOO_LONG, Run, Simulator


@dataclass
class Cost:
    """Of one operation or of a whole program, times in microseconds."""

    us: float = 0.0
    schedule_cycles: float = 0  # bundles that issue, of all operations
    read_bytes: float = 0.0
    write_bytes: float = 0.0
    vmem_bytes: int = 0
    matmul_flops: float = 0.0
    spills: int = 0  # instructions that store a register to VMEM for want of registers, and
    fills: int = 0  # those that load it again, as they stand in the code
    mxu_stall_us: float = 0.0
    dma_stall_us: float = 0.0
    unknown: dict[str, int] = field(default_factory=dict)  # what no known value decides
    rare_us: float = 0.0  # not counted: what kernels would take more if all data were rare ones
    # Operations without code to run: what they count as, by the compiler's own guess or as the
    # time in which the memory moves their result.
    not_dumped: dict[str, float] = field(default_factory=dict)
    operations: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Cost, times: int = 1) -> None:
        """Adds everything but the time, which depends on what runs beside it."""
        self.schedule_cycles += times * other.schedule_cycles
        self.read_bytes += times * other.read_bytes
        self.write_bytes += times * other.write_bytes
        self.matmul_flops += times * other.matmul_flops
        self.mxu_stall_us += times * other.mxu_stall_us
        self.dma_stall_us += times * other.dma_stall_us
        self.rare_us += times * other.rare_us
        self.vmem_bytes = max(self.vmem_bytes, other.vmem_bytes)
        self.spills += other.spills
        self.fills += other.fills
        self.unknown.update(other.unknown)
        self.not_dumped.update(other.not_dumped)
        self.operations += other.operations


class Timeline:
    """Operations one after the other, with asynchronous copies moving beside them.

    Copies are served in the order they start. An operation and the copies share the memory evenly
    while both want it.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.now = self.memory_us = 0.0
        self.queued = self.moved = 0.0  # memory time of all copies so far, and of what is done
        self.ends: dict[str, float] = {}

    def run(self, us: float, read_bytes: float, write_bytes: float) -> None:
        wanted = self.machine.transfer_us(read_bytes, write_bytes)
        us = max(us, wanted + min(wanted, self.queued - self.moved))
        self.moved = min(self.queued, self.moved + max(0.0, us - wanted))
        self.now += us
        self.memory_us += wanted

    def start_copy(self, name: str, read_bytes: float, write_bytes: float) -> None:
        wanted = self.machine.transfer_us(read_bytes, write_bytes)
        self.queued += wanted
        self.memory_us += wanted
        self.ends[name] = self.queued

    def await_copy(self, name: str) -> None:
        missing = self.ends.pop(name, 0.0) - self.moved
        if missing > 0:
            self.now += missing
            self.moved += missing


class Program:
    def __init__(
        self, folder: Path, chip_name: str, calls: list[list[Any]], *, ordinary: bool = False
    ) -> None:
        """calls: of `known_values.pallas_operands`; ordinary: kernels find no rare values."""
        self.folder, self.machine, self.ordinary = folder, MACHINES[chip_name], ordinary
        self.computations, self.entry = hlo.parse((folder / "hlo.txt").read_text())
        self.calls = calls
        self.dumps = dict(_dumps(folder))
        self.done: dict[str, tuple[Operation, Cost]] = {}

    def cost(self) -> Cost:
        return self._computation(self.entry)

    def _computation(self, name: str) -> Cost:
        total, line = Cost(), Timeline(self.machine)
        operations = self.computations[name]
        shapes = {operation.name: operation.shape for operation in operations}
        for operation in operations:
            if operation.opcode.endswith("-done") and "data-format" not in operation.name:
                line.await_copy(operation.operands[0] if operation.operands else "")
            if operation.opcode in hlo.FREE:
                continue
            if operation.opcode in hlo.COPY_STARTS:
                read, write = hlo.copied_bytes(operation)
                line.start_copy(operation.name, read, write)
                total.add(Cost(read_bytes=read, write_bytes=write))
            elif "data-format" in operation.name:  # a change of layout by the SparseCore
                moved = hlo.num_bytes(operation.shape) * operation.opcode.endswith("-done")
                line.run(0, moved, moved)
                total.add(Cost(read_bytes=moved, write_bytes=moved))
            elif operation.called:
                cost, times = self._control_flow(operation)
                line.run(times * cost.us, times * cost.read_bytes, times * cost.write_bytes)
                total.add(cost, times)
            else:
                cost = self._operation(operation, shapes)
                line.run(cost.us, cost.read_bytes, cost.write_bytes)
                total.add(cost)
        total.us = max(line.now, line.memory_us)
        return total

    def _control_flow(self, operation: Operation) -> tuple[Cost, int]:
        """The body of a loop and how often it runs; of a conditional the dearest branch."""
        costs = [self._computation(name) for name in operation.called]
        cost = max(costs, key=lambda cost: cost.us)
        if operation.opcode == "while" and operation.trip_count is None:
            cost.unknown[f"trip count of {operation.name}"] = 1
        return cost, operation.trip_count or 1

    def _operation(self, operation: Operation, shapes: dict[str, str]) -> Cost:
        if operation.name not in self.dumps:  # equal operations share one dump
            for other, cost in self.done.values():
                if _stem(other.name) == _stem(operation.name) and other.shape == operation.shape:
                    return cost
            return self._without_code(operation)
        bundles, utilization = self.dumps[operation.name]
        listing = llo.parse(bundles.read_text())
        layouts = [shapes.get(name, "") for name in operation.operands]
        values = self._values(listing, layouts) if operation.is_pallas else {}

        def run(found: int | None) -> Run:
            simulator = Simulator(listing, self.machine, found=found)
            simulator.load(values)
            return simulator.execute()

        is_sure = operation.is_pallas and self.ordinary
        result = run(0 if is_sure else None)
        cost = self._as_cost(operation, result)
        if is_sure and result.num_reduced:
            rare = run(1)
            cost.rare_us = (rare.cycles - result.cycles) * 1e6 / self.machine.bundles_per_s
            if TOO_LONG in rare.unknown:
                cost.unknown[f"rare path: {TOO_LONG}"] = 1
        cost.spills, cost.fills = _spills(utilization)
        self.done[operation.name] = operation, cost
        return cost

    def _without_code(self, operation: Operation) -> Cost:
        label = f"{operation.name} [{operation.opcode}]"
        if operation.libtpu_cycles is not None:
            us = 1e6 * operation.libtpu_cycles / self.machine.bundles_per_s
            return Cost(us=us, not_dumped={label: round(us, 2)})
        # What is started here and done elsewhere counts where it is done, once.
        is_begun = operation.opcode.endswith(("-start", "-update"))
        written = 0.0 if is_begun else hlo.num_bytes(hlo.in_hbm(operation.shape))
        read = written * (operation.opcode != "iota")
        us = self.machine.transfer_us(read, written)
        return Cost(us, 0, read, written, not_dumped={label: round(us, 2)})

    def _as_cost(self, operation: Operation, run: Run) -> Cost:
        to_us = 1e6 / self.machine.bundles_per_s
        row = {
            "name": operation.name,
            "kind": "pallas" if operation.is_pallas else operation.opcode,
            "us": round(run.cycles * to_us, 3),
            "schedule_cycles": run.issue_cycles,
            "hbm_bytes": run.read_bytes + run.write_bytes,
            "dmas": run.num_dmas,
        }
        return Cost(
            run.cycles * to_us,
            run.issue_cycles,
            run.read_bytes,
            run.write_bytes,
            operation.vmem_bytes,
            run.matmul_flops,
            mxu_stall_us=run.mxu_stall_cycles * to_us,
            dma_stall_us=run.dma_stall_cycles * to_us,
            unknown=run.unknown,
            operations=[row],
        )

    def _values(
        self, listing: llo.Listing, layouts: list[str]
    ) -> dict[tuple[str, int], np.ndarray]:
        """Known operands, from the first Pallas call whose operands have the kernel's sizes."""
        inputs = sorted((o for o in listing.operands if o.kind == "input"), key=lambda o: o.index)
        sizes = [math.prod(o.shape) for o in inputs]
        for call in self.calls:
            if [math.prod(_shape(x)) for x in call] == sizes:
                return {
                    ("input", i): hlo.words_in_memory(x, layouts[i] if i < len(layouts) else "")
                    for i, x in enumerate(call)
                    if isinstance(x, np.ndarray) and x.size and x.dtype.kind in "iub"
                }
        return {}


def _shape(x: np.ndarray | tuple[int, ...]) -> tuple[int, ...]:
    return x.shape if isinstance(x, np.ndarray) else x


def _dumps(folder: Path) -> Iterator[tuple[str, tuple[Path, Path | None]]]:
    """(operation, (final bundles, how full each slot of each bundle is))."""
    for path in (folder / "dump").glob("*-final_bundles.txt"):
        match = re.match(r"^(\d+-(.*))-\d+-final_bundles\.txt$", path.name)
        if match and "schedule-analysis" not in path.name:
            suffix = "-final_hlo-static-per-bundle-utilization.txt"
            beside = (p for p in path.parent.iterdir() if p.name.endswith(suffix))
            beside = (p for p in beside if re.match(re.escape(match[1]) + r"-\d+-final", p.name))
            yield match[2], (path, next(beside, None))


def _spills(utilization: Path | None) -> tuple[int, int]:
    if utilization is None:
        return 0, 0
    lines = utilization.read_text().split("\n")
    header = next(i for i, line in enumerate(lines) if line.startswith("MATMUL"))
    columns = [column.strip() for column in lines[header].split(",")]
    rows = [line.split() for line in lines[header + 3 :] if line.strip()]
    at = [columns.index("VSTORE:SPILL"), columns.index("VLOAD:FILL")]
    spills, fills = (sum(int(r[i]) for r in rows if len(r) == len(columns)) for i in at)
    return spills, fills


def _stem(name: str) -> str:
    return re.sub(r"[.\d]*$", "", name)
