"""The only door to JAX: imported at the first call that needs it, never before."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .chips import Chip
from .device import is_tpu_available
from .errors import ForkedAfterJaxError, JaxOwnsTpuError, MissingDependencyError

# Reentrant: lowering one op may define another. Pallas' interpreter keeps global state, so calls
# in interpret mode are serialised by the same lock.
LOCK = threading.RLock()
_jax_pid: int | None = None


def import_jax() -> Any:
    """JAX, with its platforms limited to the CPU so that it never takes the TPU from torch_tpu."""
    global _jax_pid
    if _jax_pid not in (None, os.getpid()):
        raise ForkedAfterJaxError(
            "this process was forked after JAX had run in its parent; a JAX call here would "
            'deadlock. Start workers with multiprocessing.get_context("spawn") or before the '
            "first kernel call"
        )
    try:
        import jax
        from jax._src import xla_bridge
    except ImportError as error:
        raise MissingDependencyError(
            f"the Pallas kernels need jax, which cannot be imported ({error}): "
            'pip install "jax==0.12.0.1" "libtpu==0.0.52"'
        ) from error
    if _jax_pid is None:
        with LOCK:
            # Any lowering of a Pallas kernel initialises every platform JAX may use; after that
            # the setting has no effect, so it is now or never.
            if not xla_bridge.backends_are_initialized():
                jax.config.update("jax_platforms", "cpu")
            elif is_tpu_available() and "tpu" in xla_bridge.backends():
                raise JaxOwnsTpuError(
                    "JAX has already opened the TPU in this process, so torch_tpu cannot use it: "
                    "set JAX_PLATFORMS=cpu, or call a kernel before any JAX computation"
                )
            _jax_pid = os.getpid()
    return jax


@contextlib.contextmanager
def lowering_for(chip: Chip) -> Iterator[None]:
    """JAX traces inside as if `chip` were its device, and with 32-bit defaults."""
    jax = import_jax()
    from jax.sharding import AbstractDevice, AbstractMesh

    device = AbstractDevice(device_kind=chip.device_kind, num_cores=chip.num_cores, platform="tpu")
    mesh = AbstractMesh((), (), abstract_device=device)
    with jax.enable_x64(False), jax.sharding.use_abstract_mesh(mesh):
        yield


def make_tpu_op(name: str, jax_fn: Callable[..., Any], schema: Any) -> Callable[..., Any]:
    """A torch op that runs `jax_fn` on the TPU, made by torch_tpu's public `jax_op`."""
    import_jax()
    try:
        jax_op = torch.tpu.pallas.jax_op
    except AttributeError as error:
        raise MissingDependencyError(
            'tensors on a TPU need torch_tpu: pip install "torch-tpu==0.2.0"'
        ) from error
    jax_fn.__signature__ = _signature(schema)
    with warnings.catch_warnings():  # jax_op announces that it is experimental
        warnings.simplefilter("ignore")
        return jax_op(name, jax_fn)


def _signature(schema: Any) -> Any:
    """The annotations that jax_op reads, from a torch operator schema."""
    import jax

    types = {
        "Tensor": jax.Array,
        "Optional[Tensor]": jax.Array | None,
        "int": int,
        "float": float,
        "bool": bool,
        "str": str,
    }
    parameters = [
        inspect.Parameter(
            argument.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            annotation=types[str(argument.type)],
        )
        for argument in schema.arguments
    ]
    results = tuple(types[str(result.type)] for result in schema.returns)
    annotation = results[0] if len(results) == 1 else tuple[results]
    return inspect.Signature(parameters, return_annotation=annotation)


_TENSOR = object()  # stands for a tensor among the arguments that a trace is keyed by


def run_interpreted(jax_fn: Callable[..., Any], args: tuple[Any, ...], chip: Chip) -> Any:
    """`jax_fn` on CPU tensors with Pallas' interpreter: NaN in fresh memory, races found."""
    with LOCK:
        jax = import_jax()
        with lowering_for(chip):
            static = tuple(_TENSOR if isinstance(arg, torch.Tensor) else arg for arg in args)
            arrays = [_to_jax(arg) for arg in args if isinstance(arg, torch.Tensor)]
            outputs = jax.block_until_ready(_interpreted(jax_fn, static, chip)(*arrays))
        # A copy: JAX takes its arrays for immutable, the caller may write to a tensor.
        return jax.tree.map(lambda array: torch.from_dlpack(array).clone(), outputs)


@functools.lru_cache(maxsize=256)
def _interpreted(jax_fn: Callable[..., Any], static: tuple[Any, ...], chip: Chip) -> Any:
    import jax
    from jax.experimental.pallas import tpu as pltpu

    interpret = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True)

    def call(*arrays: Any) -> Any:
        remaining = iter(arrays)
        args = (next(remaining) if arg is _TENSOR else arg for arg in static)
        return jax_fn(*args, chip=chip, interpret=interpret)

    return jax.jit(call)


def _to_jax(tensor: torch.Tensor) -> Any:
    import jax

    # dlpack refuses strided and lazily conjugated views, and anything that requires grad.
    return jax.dlpack.from_dlpack(tensor.detach().resolve_conj().resolve_neg().contiguous())
