"""One torch operator per public call, dispatched by the device of its tensors.

cpu, cuda     the reference, in torch
tpu           the Pallas kernels, through torch_tpu's jax_op
fake, meta    a shape function that works with SymInt
interpret     TPU_KERNELS_INTERPRET=1: the Pallas kernels on the CPU, in Pallas' TPU interpreter
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from . import bridge
from .chips import CHIPS
from .device import INTERPRET, chip_to_lower_for, current_chip
from .errors import UnsupportedDtypeError

_LIBRARIES: dict[str, torch.library.Library] = {}  # an operator lives as long as its library


def define_op(
    name: str,
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    load_kernel: Callable[[], Callable[..., Any]],
    backward: Callable[..., Any] | None = None,
    save: Callable[[Any, tuple[Any, ...], Any], None] | None = None,
) -> torch._ops.OpOverload:
    """Registers the operator `name` ("namespace::op") and returns it.

    schema: torch schema without the name and without defaults, "(Tensor x, int n) -> Tensor".
    reference, fake: called with every argument of the schema by position.
    load_kernel: returns the JAX function of the same arguments, plus keywords `chip` and
        `interpret`. Called at the first use on a TPU, so that defining an op imports no JAX.
    save, backward: the gradient. save(ctx, inputs, output) runs in forward; backward(ctx, *grads)
        returns one entry per argument of the schema, None where there is no gradient, and must
        itself only call ops that are defined by `define_op`. Without them a backward pass raises.

    Inputs are never changed and outputs are new tensors.
    """

    def on_host(device_type: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if INTERPRET and not any(_is_float64(arg) for arg in args):
                chip = chip_to_lower_for() or CHIPS["v5e"]
                return bridge.run_interpreted(kernel(), args, chip)
            # The op has promoted its inputs; autocast must not round the reference's products.
            if torch.is_autocast_enabled(device_type):
                with torch.autocast(device_type, enabled=False):
                    return reference(*args)
            return reference(*args)

        return run

    def on_tpu(*args: Any) -> Any:
        _refuse_float64(name, args)
        chip = current_chip()
        with bridge.lowering_for(chip):
            return tpu_op(chip.name)(*args)

    def on_fake(*args: Any) -> Any:
        if any(isinstance(arg, torch.Tensor) and arg.device.type == "tpu" for arg in args):
            _refuse_float64(name, args)
        return fake(*args)

    @functools.cache
    def kernel() -> Callable[..., Any]:
        bridge.import_jax()
        return load_kernel()

    @functools.cache
    def tpu_op(chip_name: str) -> Callable[..., Any]:
        with bridge.LOCK:
            jax_fn = kernel()

            def run(*args: Any) -> Any:
                return jax_fn(*args, chip=CHIPS[chip_name], interpret=False)

            return bridge.make_tpu_op(f"{name}__{chip_name}", run, op._schema)

    def no_gradient(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"{name} is not differentiable (second-order gradients are not)")

    # Not torch.library.custom_op, whose first call imports dynamo: 2 s, and 1 us every call.
    namespace, op_name = name.split("::")
    _LIBRARIES[name] = library = torch.library.Library(namespace, "FRAGMENT")
    library.define(op_name + schema, tags=torch.Tag.pt2_compliant_tag)
    op = getattr(getattr(torch.ops, namespace), op_name).default
    library.impl(op_name, _untraced(on_host("cpu")), "CPU")
    library.impl(op_name, _untraced(on_host("cuda")), "CUDA")
    library.impl(op_name, _untraced(on_tpu), "PrivateUse1")  # the key of the TPU backend
    torch.library.register_fake(name, on_fake, lib=library)
    torch.library.register_autograd(name, backward or no_gradient, setup_context=save, lib=library)
    return op


def _untraced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, which dynamo does not look into when an eager call comes from a frame it left."""
    disabled = None

    def run(*args: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return kernel(*args)
        if disabled is None:
            disabled = torch.compiler.disable(kernel)
        return disabled(*args)

    return run


def _is_float64(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.dtype in (torch.float64, torch.complex128)


def _refuse_float64(name: str, args: tuple[Any, ...]) -> None:
    if any(_is_float64(arg) for arg in args):
        raise UnsupportedDtypeError(
            f"{name}: a TPU has no float64; expected float32, bfloat16 or float16 tensors, "
            "or float64 tensors on the CPU"
        )
