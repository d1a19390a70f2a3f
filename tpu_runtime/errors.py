"""Named errors of the device layer."""

from __future__ import annotations


class TpuRuntimeError(RuntimeError):
    """Base of every error that the device layer raises on its own."""


class NoTpuError(TpuRuntimeError):
    """No TPU is attached, and TPU_KERNELS_CHIP does not name one to lower for."""


class UnsupportedDtypeError(TpuRuntimeError, TypeError):
    """The dtype exists in torch but not on the TPU."""


class JaxOwnsTpuError(TpuRuntimeError):
    """JAX opened the TPU of this process before torch_tpu could."""


class ForkedAfterJaxError(TpuRuntimeError):
    """This process was forked from one in which JAX had run: a JAX call here would deadlock."""


class MissingDependencyError(TpuRuntimeError, ImportError):
    """A package that only the TPU path needs is not installed."""
