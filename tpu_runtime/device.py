"""Which TPU this process has, if any. Nothing here runs at import, and nothing touches JAX."""

from __future__ import annotations

import os
import warnings

import torch

from .chips import CHIPS, Chip
from .errors import NoTpuError

INTERPRET = os.environ.get("TPU_KERNELS_INTERPRET", "0") not in ("", "0")
_CHIP_TO_LOWER_FOR = os.environ.get("TPU_KERNELS_CHIP", "")

# What torch.tpu.get_device_name() says (torch_tpu 0.2.0), where it is not "TPU <our name>".
_DEVICE_NAMES = {"TPU v7": "v7x"}


def is_tpu_available() -> bool:
    """Whether a torch TPU device is attached to this process.

    An eager operation on a "tpu" tensor without hardware aborts the process, so ask first.
    """
    accelerator = torch.accelerator.current_accelerator()
    return (
        accelerator is not None
        and accelerator.type == "tpu"
        and torch.accelerator.device_count() > 0
    )


def chip_to_lower_for() -> Chip | None:
    """The chip named by TPU_KERNELS_CHIP, for compiling without hardware."""
    if not _CHIP_TO_LOWER_FOR:
        return None
    if _CHIP_TO_LOWER_FOR not in CHIPS:
        raise ValueError(
            f"TPU_KERNELS_CHIP: expected one of {sorted(CHIPS)}, got {_CHIP_TO_LOWER_FOR!r}"
        )
    return CHIPS[_CHIP_TO_LOWER_FOR]


def current_chip() -> Chip:
    """The attached TPU's generation, or the one to lower for; NoTpuError when there is neither."""
    if not is_tpu_available():
        if chip := chip_to_lower_for():
            return chip
        raise NoTpuError(
            "no TPU is attached to this process (torch.accelerator sees none). On a TPU VM install "
            "torch_tpu; to lower for a chip that is not there set TPU_KERNELS_CHIP to one of "
            f"{', '.join(CHIPS)}"
        )
    with warnings.catch_warnings():  # get_device_name() announces that it is experimental
        warnings.simplefilter("ignore")
        device_name = torch.tpu.get_device_name()
    name = _DEVICE_NAMES.get(device_name, device_name.removeprefix("TPU "))
    if name not in CHIPS:
        raise NoTpuError(f"unknown TPU {device_name!r}: expected one of {', '.join(CHIPS)}")
    return CHIPS[name]
