"""Which operands of a program's Pallas calls are fixed by arguments whose values are known.

Group sizes, routing and lengths steer a kernel: its grid, its index maps, what it skips. They pass
through sorts and sums on the way, so the traced program is evaluated where it can be.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.extend import core

MAX_ELEMENTS = 1 << 22  # of an intermediate array worth computing
_NESTED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
_CONTROL_FLOW = ("scan", "while", "cond")
_IDENTITY = ("sharding_constraint", "copy", "optimization_barrier", "with_memory_space_constraint")

Call = list[np.ndarray | tuple[int, ...]]  # operands of a Pallas call: values, else the shape


def pallas_operands(closed: Any, args: list[Any]) -> list[Call]:
    """Operands of every Pallas call of the traced program, in order."""
    calls: list[Call] = []
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        known = [arg if isinstance(arg, np.ndarray) else None for arg in args]
        _evaluate(closed.jaxpr, closed.consts, known, calls)
    return calls


def _evaluate(jaxpr: Any, consts: list[Any], args: list[Any], calls: list[Call]) -> list[Any]:
    """Values of the results, None where they are not known."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def value(var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else values.get(var)

    for equation in jaxpr.eqns:
        inputs = [value(var) for var in equation.invars]
        name = equation.primitive.name
        results = [None] * len(equation.outvars)
        if name in ("pallas_call", "mpmd_map"):
            calls.append(
                [
                    tuple(var.aval.shape) if x is None or np.size(x) > 1 << 20 else np.asarray(x)
                    for x, var in zip(inputs, equation.invars, strict=True)
                ]
            )
        elif name in _IDENTITY:
            results = inputs
        elif nested := _nested(equation):
            results = _evaluate(nested.jaxpr, nested.consts, inputs, calls)
        elif all(x is not None for x in inputs) and _is_small(equation):
            results = equation.primitive.bind(*inputs, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [value(var) for var in jaxpr.outvars]


def _is_small(equation: Any) -> bool:
    return all(math.prod(var.aval.shape) <= MAX_ELEMENTS for var in equation.outvars)


def _nested(equation: Any) -> Any:
    """The program of an equation that just calls one with its operands."""
    if equation.primitive.name in _CONTROL_FLOW:
        return None
    for key in _NESTED:
        if (jaxpr := equation.params.get(key)) is not None:
            closed = jaxpr if hasattr(jaxpr, "consts") else core.ClosedJaxpr(jaxpr, ())
            is_plain = len(closed.jaxpr.invars) == len(equation.invars)
            return closed if is_plain else None
    return None
