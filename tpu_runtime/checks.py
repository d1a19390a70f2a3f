"""Argument checks shared by the torch surfaces: on shapes, dtypes and devices, never on values.

Every message names the argument, what was expected and what was got.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any

import torch

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (
    torch.int32,
    torch.int64,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
)


def require_tensor(name: str, value: Any, ndim: int, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if value.ndim != ndim:
        raise ValueError(f"{name}: expected {ndim} dimensions, got shape {tuple(value.shape)}")
    if value.dtype not in dtypes:
        expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name}: expected dtype {expected}, got {value.dtype}")


def require_shape(name: str, value: torch.Tensor, shape: tuple[int, ...], means: str) -> None:
    """`means` says in letters what `shape` is, such as "[g, n]"."""
    if value.shape != shape and tuple(value.shape) != tuple(shape):
        raise ValueError(
            f"{name}: expected shape {means} = {tuple(shape)}, got {tuple(value.shape)}"
        )


def require_same_device(**tensors: torch.Tensor | None) -> None:
    device = None
    for value in tensors.values():
        if value is None:
            continue
        if device is None:
            device = value.device
        elif value.device != device:
            present = ((name, value) for name, value in tensors.items() if value is not None)
            devices = ", ".join(f"{name} on {value.device}" for name, value in present)
            raise ValueError(f"expected all tensors on one device, got {devices}")


def in_one_dtype(**tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors, of one float dtype: mixed ones are promoted as torch does inside torch.autocast.

    Outside of it they are a TypeError.
    """
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor is not None}
    if len(dtypes) == 1:
        return tuple(tensors.values())
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    device = next(iter(present.values())).device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        found = ", ".join(f"{name} {tensor.dtype}" for name, tensor in present.items())
        raise TypeError(f"expected one dtype for all of them, got {found}")
    dtype = functools.reduce(torch.promote_types, dtypes)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors.values())


def as_int32(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.to(torch.int32)`, which takes a microsecond even where it has nothing to do."""
    return tensor if tensor.dtype == torch.int32 else tensor.to(torch.int32)


def require_int(name: str, value: Any) -> None:
    if type(value) is int:  # nearly always: the abstract classes below take half a microsecond
        return
    is_int = isinstance(value, (numbers.Integral, torch.SymInt)) and not isinstance(value, bool)
    if not is_int:
        raise TypeError(f"{name}: expected a Python int, got {_describe(value)}")


def require_number(name: str, value: Any) -> float:
    """The Python number `value`, also while it is traced symbolically, as a float."""
    if type(value) is float:  # nearly always: the abstract classes below take a microsecond
        return value
    is_number = isinstance(value, numbers.Real | torch.SymFloat | torch.SymInt)
    if not is_number or isinstance(value, bool):
        raise TypeError(f"{name}: expected a Python number, got {_describe(value)}")
    return float(value)


def require_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {_describe(value)}")


def require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        expected = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}: expected one of {expected}, got {value!r}")


def values_on_host(tensor: torch.Tensor, of: Callable[..., torch.Tensor] | None = None) -> Any:
    """The values of an eager CPU tensor, or of `of(tensor)`.

    None where reading them would trace, sync or fail, as a minimum of nothing does.
    """
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu
    if not is_plain or torch.compiler.is_compiling():
        return None
    try:
        return (tensor if of is None else of(tensor)).tolist()
    except RuntimeError:  # under make_fx, vmap or another transform there are no values to read
        return None


def _describe(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else f"{value!r}"
