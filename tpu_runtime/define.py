"""One torch custom op per public call, dispatched by the device of its tensors.

cpu, cuda     the reference, in torch
tpu           the Pallas kernels, through torch_tpu's jax_op
fake, meta    a shape function that works with SymInt
interpret     TPU_KERNELS_INTERPRET=1: the Pallas kernels on the CPU, in Pallas' TPU interpreter
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.library import CustomOpDef, custom_op

from . import bridge
from .chips import CHIPS
from .device import INTERPRET, chip_to_lower_for, current_chip
from .errors import UnsupportedDtypeError


def define_op(
    name: str,
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    load_kernel: Callable[[], Callable[..., Any]],
) -> CustomOpDef:
    """Registers the operator `name` ("namespace::op") and returns it.

    schema: torch schema without the name, "(Tensor x, int n) -> Tensor".
    reference, fake: called with every argument of the schema by position.
    load_kernel: returns the JAX function of the same arguments, plus keywords `chip` and
        `interpret`. Called at the first use on a TPU, so that defining an op imports no JAX.

    Inputs are never changed and outputs are new tensors. The op has no gradient until
    `differentiable` gives it one; until then a backward pass through it raises.
    """

    def on_cpu(*args: Any) -> Any:
        args = complete(args)
        if INTERPRET and not any(_is_float64(arg) for arg in args):
            chip = chip_to_lower_for() or CHIPS["v5e"]
            return bridge.run_interpreted(kernel(), args, chip)
        # The op has promoted its inputs; autocast must not round the reference's own products.
        device_type = _device_type(args)
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                return reference(*args)
        return reference(*args)

    def on_tpu(*args: Any) -> Any:
        args = complete(args)
        _refuse_float64(name, args)
        chip = current_chip()
        with bridge.lowering_for(chip):
            return tpu_op(chip.name)(*args)

    def on_fake(*args: Any) -> Any:
        args = complete(args)
        if any(isinstance(arg, torch.Tensor) and arg.device.type == "tpu" for arg in args):
            _refuse_float64(name, args)
        return fake(*args)

    def complete(args: tuple[Any, ...]) -> tuple[Any, ...]:
        # The dispatcher and FX graphs drop trailing arguments that equal the schema's default.
        if len(args) == len(arguments):
            return args
        missing = arguments[len(args) :]
        return (*args, *(argument.default_value for argument in missing))

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

            return bridge.make_tpu_op(f"{name}__{chip_name}", run, op._opoverload._schema)

    op = custom_op(name, on_cpu, mutates_args=(), device_types=("cpu", "cuda"), schema=schema)
    # The name of the TPU backend's key before torch_tpu renames it, and also after.
    op.register_kernel("privateuseone")(on_tpu)
    op.register_fake(on_fake)
    arguments = op._opoverload._schema.arguments

    def no_gradient(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(f"{name} is not differentiable (second-order gradients are not)")

    op.register_autograd(no_gradient)
    return op


def differentiable(
    op: CustomOpDef,
    backward: Callable[..., Any],
    *,
    save: Callable[[Any, tuple[Any, ...], Any], None],
) -> None:
    """Gives `op` a gradient: save(ctx, inputs, output) in forward, backward(ctx, *grads) -> grads.

    `backward` returns one entry per argument of the schema, None where there is no gradient, and
    must itself only call ops that are defined by `define_op`.
    """
    op.register_autograd(backward, setup_context=save)


def _device_type(args: tuple[Any, ...]) -> str:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            return arg.device.type
    raise AssertionError("an op without tensors")


def _is_float64(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor) and arg.dtype in (torch.float64, torch.complex128)


def _refuse_float64(name: str, args: tuple[Any, ...]) -> None:
    if any(_is_float64(arg) for arg in args):
        raise UnsupportedDtypeError(
            f"{name}: a TPU has no float64; expected float32, bfloat16 or float16 tensors, "
            "or float64 tensors on the CPU"
        )
