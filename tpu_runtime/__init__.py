"""The device layer: what every kernel of this repository needs from torch, torch_tpu and JAX.

Importing it imports neither JAX nor torch_tpu, opens no device and changes no configuration.
"""

from .chips import CHIPS, LANES, MIB, SUBLANES, Chip, round_up
from .define import define_op
from .device import current_chip, is_tpu_available
from .errors import (
    ForkedAfterJaxError,
    JaxOwnsTpuError,
    MissingDependencyError,
    NoTpuError,
    TpuRuntimeError,
    UnsupportedDtypeError,
)

__all__ = [
    "CHIPS",
    "LANES",
    "MIB",
    "SUBLANES",
    "Chip",
    "ForkedAfterJaxError",
    "JaxOwnsTpuError",
    "MissingDependencyError",
    "NoTpuError",
    "TpuRuntimeError",
    "UnsupportedDtypeError",
    "current_chip",
    "define_op",
    "is_tpu_available",
    "round_up",
]
