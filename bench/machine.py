"""The machine that a static estimate runs a compiled program on: one TensorCore and its memory.

Sizes and peaks come from `tpu_runtime.chips`. What is added here was fitted to public timings of
real chips (docs/bench.md lists them with the error that remains): how much of the bandwidth large
transfers reach, how long a transfer takes to arrive, and what starting one costs the core.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import tree  # noqa: F401  (makes tpu_kernels importable)
from tpu_kernels.tpu_runtime import CHIPS, Chip

DMA_COMMAND_CYCLES = 40  # the core is busy for so long with each transfer it starts or waits for
GRANULE_BYTES = 32  # unit of a transfer's size in the dumps


@dataclass(frozen=True)
class Machine:
    chip: Chip
    clock_hz: float
    num_mxus: int
    read_share: float  # of the bandwidth, large reads ...
    write_share: float  # ... and writes
    latency_s: float  # from a transfer's end at the memory to its flag
    issue_share: float = 1.0  # bundles per cycle of the clock in long running loops
    delay_slots: int = 4  # bundles that still run after a branch; 0: up to the end of its region

    @property
    def bundles_per_s(self) -> float:
        return self.clock_hz * self.issue_share

    @property
    def latency_cycles(self) -> float:
        return self.latency_s * self.bundles_per_s

    @property
    def read_bytes_per_cycle(self) -> float:
        return self.chip.hbm_bytes_per_s * self.read_share / self.bundles_per_s

    @property
    def write_bytes_per_cycle(self) -> float:
        return self.chip.hbm_bytes_per_s * self.write_share / self.bundles_per_s

    def matmul_flops(self, dtype: str) -> int:
        """Operations of one vmatmul: the rows of a vector register through the whole MXU."""
        rows = {"f32": 8, "bf16": 16}.get(dtype, 32)
        return 2 * rows * self.chip.mxu_size**2

    @functools.cache  # noqa: B019  (a handful of frozen instances)
    def matmul_cycles(self, dtype: str) -> float:
        """How long one vmatmul keeps its MXU at the published peak; one-byte types run at twice."""
        peak_per_cycle = self.chip.bf16_flops / self.num_mxus / self.clock_hz
        return self.matmul_flops(dtype) / peak_per_cycle / (1 if dtype in ("f32", "bf16") else 2)

    def transfer_us(self, read_bytes: float, write_bytes: float) -> float:
        """The least time in which the memory moves them."""
        read = read_bytes / self.read_share
        return 1e6 * (read + write_bytes / self.write_share) / self.chip.hbm_bytes_per_s


MACHINES = {
    machine.chip.name: machine
    for machine in (
        Machine(CHIPS["v5e"], 1.5e9, 4, 0.90, 0.72, 505e-9),
        Machine(CHIPS["v5p"], 1.75e9, 4, 0.99, 0.96, 505e-9),
        Machine(CHIPS["v6e"], 1.75e9, 2, 0.91, 0.78, 700e-9, 0.97),
        Machine(CHIPS["v7x"], 2.2e9, 2, 0.87, 0.87, 800e-9, 0.80, 0),
    )
}


def floor_us(
    chip_name: str,
    flops: float,
    read_bytes: float,
    write_bytes: float,
    head: int | None = None,
    head_share: float = 1.0,
) -> tuple[float, str]:
    """The least time of the work itself, and which unit sets it: "MXU" or "HBM".

    FLOPs at the bfloat16 peak, each byte moved once at the bandwidth that large transfers reach.
    The products that add up over an attention head, `head_share` of the FLOPs, fill `head` rows of
    the MXU and leave the others idle; in the rest a kernel can choose which side is stationary.
    """
    machine = MACHINES[chip_name]
    width = machine.chip.mxu_size
    filled = min(1.0, (head or width) / width)
    mxu = 1e6 * flops * (head_share / filled + 1 - head_share) / machine.chip.bf16_flops
    hbm = machine.transfer_us(read_bytes, write_bytes)
    return max((mxu, "MXU"), (hbm, "HBM"))
