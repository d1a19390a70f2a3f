"""The order in which the device keeps the axes of an array, where nobody asks for another.

PJRT, and so JAX and torch_tpu, makes arrays in the order that needs the least padding to tiles of
(8, 128): [16, 2816, 704] has the 2816 as its lanes. A Pallas call takes operands in the order of
their axes, so XLA copies any other array before the call. Handed over with these axes swapped it is
in order again, and the swap is a bitcast. See docs/notes/row-minor-layouts.md.
"""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp

from ...tpu_runtime import LANES, SUBLANES, round_up


def device_order(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Axes of an array of two or more, the minor one first, as its default device layout has them.

    Least padding, and of equals the nearest to the order of the axes.
    """

    def order(minor: int, second: int) -> tuple[int, ...]:
        return minor, second, *(a for a in axes if a not in (minor, second))

    def padded(order: tuple[int, ...]) -> int:
        minor, second, *rest = (shape[axis] for axis in order)
        rows = min(SUBLANES, max(4 // itemsize, 1 << max(second - 1, 0).bit_length()))
        return round_up(minor, LANES) * round_up(second, rows) * math.prod(rest)

    axes = range(len(shape))[::-1]
    return min((order(*pair) for pair in itertools.permutations(axes, 2)), key=padded)


def is_row_minor(shape: tuple[int, ...], dtype: jnp.dtype) -> bool:
    """Whether the device keeps [g, a, b] as [g, b, a]."""
    return device_order(shape, jnp.dtype(dtype).itemsize) == (1, 2, 0)


def as_stored(weight: jax.Array, transposed: bool) -> tuple[jax.Array, bool]:
    """`weight` [g, a, b] as [g, b, a] if the device keeps it so, and `transposed` with it."""
    if is_row_minor(weight.shape, weight.dtype):
        return jnp.swapaxes(weight, 1, 2), not transposed
    return weight, transposed
