"""Compile a JAX function with the real TPU compiler, for a chip that is not there."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import tree  # noqa: F401  (makes tpu_kernels importable)
from jax.experimental import topologies
from tpu_kernels.tpu_runtime import CHIPS
from tpu_kernels.tpu_runtime.bridge import lowering_for

TOPOLOGIES = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "v7x": "tpu7x:2x2x1",
}


@functools.cache
def _device(chip_name: str) -> Any:
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip_name])
    return topology.devices[0]


def trace(fn: Callable[..., Any], args: Any, chip_name: str) -> Any:
    """What jit traces of fn(*args) for a chip; needs no TPU compiler."""
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tuple(args))
    with lowering_for(CHIPS[chip_name]):
        return jax.jit(fn).trace(*specs)


def trace_and_compile(fn: Callable[..., Any], args: Any, chip_name: str) -> tuple[Any, Any]:
    """What jit traced and the executable of fn(*args), for one TPU device."""
    sharding = jax.sharding.SingleDeviceSharding(_device(chip_name))
    specs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tuple(args)
    )
    with lowering_for(CHIPS[chip_name]):
        traced = jax.jit(fn).trace(*specs)
        return traced, traced.lower().compile()


def compile_for(fn: Callable[..., Any], args: Any, chip_name: str) -> Any:
    """The executable of fn(*args) for one TPU device; args: anything with shape and dtype."""
    return trace_and_compile(fn, args, chip_name)[1]
