"""Lowers torch programs through the real torch_tpu wheel and compiles them with libtpu, TPU-less.

    python tests/torch_tpu_worker.py v6e        one line of JSON per program of torch_tpu_programs

A process of its own: initialising torch_tpu renames torch's private backend for good. torch_tpu's
graph builder wants a TPU client for custom kernels, so they are captured, stand in the program as
tagged optimization barriers, and their modules are spliced back in before libtpu compiles it all.
Uses private parts of torch_tpu 0.2.0 and JAX 0.12, which only tests may.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import conftest  # noqa: F401  (environment first)

os.environ["TPU_KERNELS_CHIP"] = sys.argv[1]

import numpy as np
import torch
import torch_tpu
from torch.fx.experimental.proxy_tensor import make_fx

torch_tpu._loader._init_device("tpu")

import jax  # noqa: E402

jax.config.update("jax_platforms", "cpu")

from aot import TOPOLOGIES  # noqa: E402
from jax._src import compiler  # noqa: E402
from jax._src.interpreters import mlir as jax_mlir  # noqa: E402
from jax._src.lib import xla_client  # noqa: E402
from jax._src.lib.mlir import ir  # noqa: E402
from jax._src.lib.mlir.dialects import func as func_dialect  # noqa: E402
from jax._src.lib.mlir.dialects import hlo  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from torch_tpu._internal import execution_mode  # noqa: E402
from torch_tpu._internal.compile import tpu_torch_compile  # noqa: E402
from torch_tpu._internal.pallas import pallas as torch_pallas  # noqa: E402
from tpu_kernels.tpu_runtime import current_chip  # noqa: E402

_FIRST_TAG = 1_300_000_000  # an int32 constant no program of ours contains


class _CapturedKernels:
    """Stands in for torch_tpu's native registry of custom kernels."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._modules: dict[tuple[str, str], bytes] = {}
        self.calls: list[tuple[bytes, int]] = []  # (module, number of results) of each call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def lookup_custom_kernel(self, name: str, key: str) -> bool:
        return (name, key) in self._modules

    def register_custom_kernel(self, name: str, key: str, *, serialized_mlir_module: bytes) -> None:
        self._modules[name, key] = serialized_mlir_module

    def call_custom_kernel(
        self, name: str, key: str, *, inputs: list, output_shapes: list, **_: Any
    ) -> list[torch.Tensor]:
        outputs = [torch.zeros(o.shape, dtype=o.dtype, device="tpu") for o in output_shapes]
        tag = torch.full((), _FIRST_TAG + len(self.calls), dtype=torch.int32, device="tpu")
        self.calls.append((self._modules[name, key], len(outputs)))
        fenced = torch.ops.tpu._optimization_barrier([*inputs, *outputs, tag])
        return fenced[len(inputs) : -1]


@contextlib.contextmanager
def _captured_kernels() -> Iterator[_CapturedKernels]:
    captured = _CapturedKernels(torch_pallas.tpu_torch_pallas)
    with mock.patch.object(torch_pallas, "tpu_torch_pallas", captured):
        yield captured


class _OnTpu(torch.fx.Interpreter):
    """Runs a graph traced on meta tensors with every factory call on the TPU."""

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> Any:
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("tpu")}
        return super().call_function(target, args, kwargs)


def lower(fn: Callable[..., Any], args: list[torch.Tensor]) -> str:
    """StableHLO of fn(*args) as torch_tpu builds it, kernels included; args give shapes only."""
    meta = [torch.empty_like(arg, device="meta").requires_grad_(arg.requires_grad) for arg in args]
    graph = make_fx(fn)(*meta)
    inputs = [tpu_torch_compile.placeholder(list(arg.shape), arg.dtype) for arg in args]
    mode = execution_mode.EagerMode._INTERNAL_COMPILE_FX_GRAPH
    with _captured_kernels() as captured, execution_mode.set_eager_mode(mode):
        result = _OnTpu(graph).run(*[tensor.clone() for tensor in inputs])
        outputs = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if leaf is not None]
        module = tpu_torch_compile.build_mlir(outputs, inputs)
        text = tpu_torch_compile.serialize_mlir_text(module)
    return _splice(text, captured.calls)


def _splice(text: str, calls: list[tuple[bytes, int]]) -> str:
    """Replaces each tagged barrier by a call of the captured kernel's own module."""
    with jax_mlir.make_ir_context():
        module = ir.Module.parse(text)
        entries = [_import_functions(module, blob, i) for i, (blob, _) in enumerate(calls)]
        main = next(
            function
            for function in module.body.operations
            if function.attributes["sym_name"].value == "main"
        )
        for op in list(main.regions[0].blocks[0]):
            if op.operation.name != "stablehlo.optimization_barrier":
                continue
            operands = list(op.operands)
            call_id = _tag(operands[-1])
            if call_id is None:
                continue
            num_inputs = len(operands) - 1 - calls[call_id][1]
            inputs = operands[:num_inputs]
            with ir.InsertionPoint(op), op.operation.location:
                types = [value.type for value in operands[num_inputs:-1]]
                symbol = ir.FlatSymbolRefAttr.get(entries[call_id])
                call = func_dialect.CallOp(types, symbol, inputs)
            replacements = [*inputs, *call.results]
            for result, value in zip(list(op.results)[:-1], replacements, strict=True):
                result.replace_all_uses_with(value)
            op.operation.erase()
        module.operation.verify()
        return str(module)


def _import_functions(module: Any, blob: bytes, call_id: int) -> str:
    """Moves the functions of a kernel's module into `module`; returns the name of its entry."""
    kernel = hlo.deserialize_portable_artifact(module.context, blob)
    functions = list(kernel.body.operations)
    for function in functions:
        old = function.attributes["sym_name"].value
        new = f"kernel{call_id}_{old}"
        ir.SymbolTable.replace_all_symbol_uses(old, new, kernel.operation)
        ir.SymbolTable.set_symbol_name(function.operation, new)
    for function in functions:
        function.operation.attributes["sym_visibility"] = ir.StringAttr.get("private")
        function.operation.detach_from_parent()
        module.body.append(function)
    return f"kernel{call_id}_main"


def _tag(value: Any) -> int | None:
    if value.owner.name != "stablehlo.constant":
        return None
    constant = value.owner.attributes["value"]
    if not isinstance(constant, ir.DenseIntElementsAttr) or len(constant) != 1:
        return None
    call_id = int(constant[0]) - _FIRST_TAG
    return call_id if call_id >= 0 else None


def compile_for_current_chip(text: str) -> Any:
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=TOPOLOGIES[current_chip().name]
    )
    device = topology.devices[0]
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=1,
        device_assignment=np.array([[device.id]]),
        backend=device.client,
    )
    with jax_mlir.make_ir_context():
        devices = xla_client.DeviceList((device,))
        return device.client.compile(ir.Module.parse(text), devices, options)


def main() -> None:
    import torch_tpu_programs

    for name, (fn, args) in torch_tpu_programs.PROGRAMS.items():
        report = {"name": name}
        try:
            text = lower(fn, args)
            report["kernels"] = text.count("tpu_custom_call")
            executable = compile_for_current_chip(text)
            hlo_text = executable.hlo_modules()[0].to_string()
            report["compiled_kernels"] = hlo_text.count('custom_call_target="tpu_custom_call"')
        except Exception:
            report["error"] = traceback.format_exc()[-3000:]
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
