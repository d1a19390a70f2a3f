"""Runs one compiled operation: its control flow exactly, its vector work and transfers as time.

One bundle issues per cycle. Beside that, three things can hold the core up:

* the memory: transfers that touch HBM are served one after the other, at the bandwidth large reads
  and writes reach; one is complete `latency` after the memory has moved it, and waiting for its
  flag stalls;
* the DMA engine: starting and awaiting a transfer costs DMA_COMMAND_CYCLES;
* the MXUs: each works off its matmuls at the published peak, so no estimate beats it. Matmuls
  queue: the compiler issues up to 16 of them two bundles apart, so what a straight run of bundles
  gives an MXU only has to fit into that run.

Bank conflicts, strided transfers, launch gaps and interconnect are not modelled.

Values of vectors are not known either. A kernel that looks for rare ones (not finite, too far
apart) reduces what it finds to a number, 0 for nothing, and hands it to the scalar unit. Given as 0
the program runs as ordinary data have it, as 1 it meets rare values everywhere.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.llo import UNKNOWN, Listing, Translator
from bench.machine import DMA_COMMAND_CYCLES, GRANULE_BYTES, Machine

MAX_TRACES = 30_000_000
TOO_LONG = "stopped: ran too long"
# Made-up addresses that fit 31 bits also when shifted left by 4, as some transfers want them:
# buffers of the program are below, then operands with known values, then the others.
KNOWN_BASE, OTHER_BASE = 1 << 25, 1 << 26
WORDS_PER_GRANULE = GRANULE_BYTES // 4


@dataclass
class Run:
    """What executing an operation took."""

    cycles: float
    issue_cycles: int  # bundles, with delays: what the compiler scheduled, as often as it ran
    mxu_stall_cycles: float
    dma_stall_cycles: float
    read_bytes: int  # from HBM
    write_bytes: int
    matmul_flops: float  # of all vmatmuls that ran, whatever share of the MXU they filled
    bundle_counts: np.ndarray = field(repr=False)
    num_dmas: int = 0
    num_reduced: int = 0  # numbers that the vector unit handed over
    unknown: dict[str, int] = field(default_factory=dict)


class Simulator:
    """The events of a program (see llo.Translator) as time."""

    def __init__(self, listing: Listing, machine: Machine, *, found: int | None = None) -> None:
        """found: what every reduction of a vector gives; None: not known."""
        self.listing, self.machine = listing, machine
        self.found = UNKNOWN if found is None else found
        self.program = Translator(listing, machine.delay_slots, self)
        self.now = self.memory_free = 0.0
        self.mxu_free = [0.0] * machine.num_mxus
        self.slack = machine.matmul_cycles("bf16")  # a matmul delays only the one behind it
        self.mxu_stall = self.dma_stall = 0.0
        self.arriving: dict[Any, deque] = defaultdict(deque)
        self.arrived: Counter = Counter()
        self.moved: Counter = Counter()
        self.unknown: Counter = Counter()
        self.num_dmas = self.num_reduced = 0
        self.contents: dict[int, np.ndarray] = {}  # operand address -> its 32-bit words
        self._segments: list[tuple[int, list[float]]] = []
        self._counts: list[int] = []
        self._cycles, self._busy, self._flops = self._tables()

    def _tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Running sums over the bundles: cycles, cycles of each MXU, matmul operations."""
        machine, bundles = self.machine, self.listing.bundles
        cycles = np.zeros(len(bundles) + 1, np.int64)
        busy = np.zeros((len(bundles) + 1, machine.num_mxus))
        flops = np.zeros(len(bundles) + 1)
        for i, bundle in enumerate(bundles, 1):
            cycles[i] = bundle.cycles
            for mxu, dtype in bundle.matmuls:
                share = slice(None) if mxu is None else mxu % machine.num_mxus
                num_sharing = machine.num_mxus if mxu is None else 1
                busy[i, share] += machine.matmul_cycles(dtype) / num_sharing
                flops[i] += machine.matmul_flops(dtype)
        return cycles.cumsum(), busy.cumsum(0), flops

    def load(self, values: dict[tuple[str, int], np.ndarray]) -> None:
        """Gives every operand an address, and those in `values` (kind, index) their words."""
        known, other = KNOWN_BASE, OTHER_BASE
        for operand in self.listing.operands:
            words = values.get((operand.kind, operand.index))
            if operand.space.startswith("<no"):  # passed by value
                address: Any = UNKNOWN if words is None else int(words[0])
            elif words is None:
                address, other = other, other + (1 << 18)
            else:
                address, known = known, known + (1 << 18)
                self.contents[address] = words
                if operand.space == "smem":
                    self.program.smem.update((address + i, int(w)) for i, w in enumerate(words))
            self.program.registers[operand.register] = address
        for cell in self.listing.core_id_cells:
            self.program.smem[self.program.symbol(cell)] = 0

    def execute(self) -> Run:
        entry, end = 0, len(self.listing.bundles)
        for _ in range(MAX_TRACES):
            if entry >= end:
                break
            entry = self.program.trace(entry)()
        else:
            self.unknown[TOO_LONG] += 1
        edges = np.zeros(end + 1, np.int64)
        for (first, last), count in zip(self.program.segments, self._counts, strict=False):
            edges[first] += count
            edges[last] -= count
        counts = edges.cumsum()[:end]
        for opcode in self.program.unknown_opcodes:
            self.unknown[f"opcode {opcode}"] += 1
        return Run(
            self.now,
            int((counts * np.diff(self._cycles)).sum()) if end else 0,
            self.mxu_stall,
            self.dma_stall,
            self.moved["read"],
            self.moved["write"],
            float((counts * self._flops[1:]).sum()),
            counts,
            self.num_dmas,
            self.num_reduced,
            dict(self.unknown),
        )

    # --- events ---------------------------------------------------------------------------------

    def run(self, segment: int) -> None:
        while segment >= len(self._segments):
            first, last = self.program.segments[len(self._segments)]
            busy = (self._busy[last] - self._busy[first]).tolist()
            self._segments.append((int(self._cycles[last] - self._cycles[first]), busy))
            self._counts.append(0)
        self._counts[segment] += 1
        cycles, busy = self._segments[segment]
        start, end = self.now, self.now + cycles
        for mxu, work in enumerate(busy):
            if work:
                free = max(self.mxu_free[mxu], start) + work
                self.mxu_free[mxu] = free
                if free - self.slack > end:
                    self.mxu_stall += free - self.slack - end
                    end = free - self.slack
        self.now = end

    def branch(self, bundle: int, condition: Any, target: int) -> bool:
        if condition is UNKNOWN:  # a loop ends, a block that might be skipped runs
            self.unknown[f"{'loop' if target <= bundle else 'branch'} at {bundle:#x}"] += 1
            return False
        return condition

    def holds(self, bundle: int, condition: Any) -> bool:
        if condition is UNKNOWN:
            self.unknown[f"predicate at {bundle:#x}"] += 1
            return True
        return condition

    def reduced(self) -> Any:
        self.num_reduced += 1
        return self.found

    def store(self, address: Any, value: Any, condition: Any) -> None:
        if address is UNKNOWN:
            self.unknown["address of a store"] += 1
        elif condition is not False:
            self.program.smem[address] = value if condition is True else UNKNOWN

    def dma(
        self, bundle: int, kind: str, granules: Any, flag: Any, source: Any, destination: Any
    ) -> None:
        self.num_dmas += 1
        if granules is UNKNOWN:
            self.unknown[f"size of the transfer at {bundle:#x}"] += 1
            granules = 0
        num_bytes = granules * GRANULE_BYTES
        self.now += DMA_COMMAND_CYCLES
        origin, _, end = kind.partition("_to_")
        if kind == "general":  # the direction is in the addresses
            origin = "hbm" if _is_operand(source) else "vmem"
            end = "hbm" if _is_operand(destination) else "vmem"
        cycles = 0.0
        if origin == "hbm":
            self.moved["read"] += num_bytes
            cycles += num_bytes / self.machine.read_bytes_per_cycle
        if end == "hbm":
            self.moved["write"] += num_bytes
            cycles += num_bytes / self.machine.write_bytes_per_cycle
        if cycles:
            self.memory_free = max(self.now, self.memory_free) + cycles
            done = self.memory_free + self.machine.latency_cycles
        else:  # on the chip: some four times as fast and as near as HBM
            local = self.machine.latency_cycles + num_bytes / self.machine.read_bytes_per_cycle
            done = self.now + local / 4
        if flag is not UNKNOWN:
            self.arriving[flag].append((done, granules))
        if end == "smem" and destination is not UNKNOWN:
            self._copy_to_smem(source, destination, granules * WORDS_PER_GRANULE)

    def _copy_to_smem(self, source: Any, destination: int, num_words: int) -> None:
        words = self._words_at(source)
        for i in range(num_words):
            known = words is not None and i < len(words)
            self.program.smem[destination + i] = int(words[i]) if known else UNKNOWN

    def _words_at(self, address: Any) -> np.ndarray | None:
        if address is UNKNOWN:
            return None
        for base, words in self.contents.items():
            for shift in (0, 4):
                offset = (address >> shift) - base  # in granules
                if 0 <= offset * WORDS_PER_GRANULE < max(1, len(words)):
                    return words[offset * WORDS_PER_GRANULE :]
        return None

    def wait(self, flag: Any, granules: Any) -> None:
        if flag is UNKNOWN or granules is UNKNOWN:
            self.unknown["a wait"] += 1
            return
        self.now += DMA_COMMAND_CYCLES
        queue = self.arriving[flag]
        while queue and self.arrived[flag] < abs(granules):
            done, count = queue.popleft()
            self.arrived[flag] += count
            if done > self.now:
                self.dma_stall += done - self.now
                self.now = done

    def add(self, flag: Any, granules: Any) -> None:
        if flag is not UNKNOWN and granules is not UNKNOWN and granules < 0:
            self.arrived[flag] = max(0, self.arrived[flag] + granules)

    def clear(self, flag: Any) -> None:
        self.arriving.pop(flag, None)
        self.arrived.pop(flag, None)


def _is_operand(address: Any) -> bool:
    return address is not UNKNOWN and address >= KNOWN_BASE
