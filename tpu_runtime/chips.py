"""The one table of hardware facts. Figures are per TensorCore unless named otherwise.

Source: jax._src.tpu_info (jax 0.12.0.1) and https://cloud.google.com/tpu/docs/system-architecture-tpu-vm.
"""

from __future__ import annotations

from dataclasses import dataclass

LANES = 128  # columns of a vector register, on every TPU
SUBLANES = 8  # rows of a 32-bit vector register; also the row tile of arrays in HBM
MIB = 1 << 20


@dataclass(frozen=True)
class Chip:
    """One TPU generation as a kernel sees it: a torch device, made of `num_cores` TensorCores."""

    name: str
    device_kind: str  # what PJRT calls it
    num_cores: int  # TensorCores that share one device (megacore)
    vmem_bytes: int
    mxu_size: int  # rows and columns of one matrix unit
    bf16_flops: float  # per second
    hbm_bytes_per_s: float
    native_matmul: frozenset[str]  # torch dtype names the MXU multiplies without a cast


_FLOATS = frozenset({"float32", "bfloat16"})

CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v4", "TPU v4", 2, 16 * MIB, 128, 137.5e12, 0.615e12, _FLOATS),
        Chip(
            "v5e",
            "TPU v5 lite",
            1,
            128 * MIB,
            128,
            197e12,
            0.82e12,
            _FLOATS | {"int8", "int4", "float8_e5m2"},
        ),
        Chip(
            "v5p",
            "TPU v5",
            2,
            64 * MIB,
            128,
            229.5e12,
            1.23e12,
            _FLOATS | {"int8", "int4", "float8_e5m2"},
        ),
        Chip(
            "v6e",
            "TPU v6 lite",
            1,
            128 * MIB,
            256,
            920e12,
            1.64e12,
            _FLOATS | {"int8", "int4", "float8_e5m2"},
        ),
        Chip(
            "v7x",
            "TPU7x",
            1,
            64 * MIB,
            256,
            1155e12,
            3.7e12,
            _FLOATS | {"float8_e5m2", "float8_e4m3fn"},
        ),
    )
}


def round_up(size, multiple: int):
    """The least multiple of `multiple` that is not below `size`; also of traced sizes."""
    return (size + multiple - 1) // multiple * multiple
