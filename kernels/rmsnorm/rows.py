"""What the forward and the backward kernel share: the plan, and a pass over some rows' lanes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ...tpu_runtime import LANES, round_up
from .tiling import UNROLLED_LANES, Tiles


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known when a kernel is traced."""

    n: int  # rows
    d: int  # columns
    tiles: Tiles
    eps: float
    offset: float
    casting: str
    activation: str | None  # of the gate; None: there is no gate
    gate_first: bool
    dtype: Any  # dtype of x, or of x + residual: xhat is rounded to it

    @property
    def width(self) -> int:
        """Columns of a block: whole lanes. Those past d hold anything at all."""
        return round_up(self.d, LANES)

    @property
    def num_blocks(self) -> int:
        return pl.cdiv(self.n, self.tiles.rows)


@dataclasses.dataclass(frozen=True)
class Columns:
    """LANES columns of a block."""

    at: Any  # slice
    valid: int  # how many of them are columns of the array

    def masked(self, values: jax.Array) -> jax.Array:
        """values with zeros in the lanes past the last column, whatever is there."""
        if self.valid == LANES:
            return values
        lane = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
        return jnp.where(lane < self.valid, values, 0)


def for_columns(plan: Plan, body: Callable[[Columns, Any], Any], carry: Any = None) -> Any:
    """carry = body(columns, carry) for each LANES columns in turn."""
    # A loop for very wide rows keeps the program short; its last round holds the ragged end.
    num_loops = (plan.width - 1) // UNROLLED_LANES if plan.width > UNROLLED_LANES else 0

    def unrolled(start: Any, width: int, valid: int, carry: Any) -> Any:
        for lane in range(0, width, LANES):
            at = (
                pl.ds(pl.multiple_of(start + lane, LANES), LANES)
                if num_loops
                else pl.ds(lane, LANES)
            )
            carry = body(Columns(at, min(LANES, valid - lane)), carry)
        return carry

    if num_loops:

        def loop(i: Any, carry: Any) -> Any:
            return unrolled(i * UNROLLED_LANES, UNROLLED_LANES, UNROLLED_LANES, carry)

        if carry is None:
            jax.lax.fori_loop(0, num_loops, lambda i, _: loop(i, None) or 0, 0)
        else:
            carry = jax.lax.fori_loop(0, num_loops, loop, carry)
    start = num_loops * UNROLLED_LANES
    return unrolled(start, plan.width - start, plan.d - start, carry)


def for_chunks(plan: Plan, body: Callable[[Any], None], num_chunks: Any = None) -> None:
    """body(rows) for each chunk of a block's rows."""
    rows, chunk = plan.tiles.rows, plan.tiles.chunk
    if rows == chunk and num_chunks is None:
        body(pl.ds(0, chunk))
        return

    def step(i: Any, _: Any) -> int:
        body(pl.ds(pl.multiple_of(i * chunk, chunk), chunk))
        return 0

    jax.lax.fori_loop(0, rows // chunk if num_chunks is None else num_chunks, step, 0)


def row_zeros(plan: Plan) -> jax.Array:  # [chunk, LANES]
    return jnp.zeros((plan.tiles.chunk, LANES), jnp.float32)


def mean(plan: Plan, partial: jax.Array) -> jax.Array:  # [chunk, LANES] -> [chunk, 1]
    return jnp.sum(partial, axis=1, keepdims=True) * (1 / plan.d)


def inverse_rms(plan: Plan, mean_square: jax.Array) -> jax.Array:  # [chunk, 1]
    return jax.lax.rsqrt(mean_square + plan.eps)


def sigmoid(gate: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-gate))


def activate(gate: jax.Array, activation: str) -> jax.Array:
    return sigmoid(gate) if activation == "sigmoid" else gate * sigmoid(gate)


def activation_slope(sigmoid: jax.Array, gate: jax.Array, activation: str) -> jax.Array:
    slope = sigmoid * (1 - sigmoid)
    return slope if activation == "sigmoid" else sigmoid + gate * slope


def scale(plan: Plan, xhat: jax.Array, weight: jax.Array | None) -> jax.Array:
    """xhat (float32) times weight [1, LANES], rounded as the casting mode says."""
    if plan.casting == "gemma" or weight is None:
        wide = xhat if weight is None else xhat * wide_weight(plan, weight)
        return wide.astype(plan.dtype)
    xhat = xhat.astype(plan.dtype)
    if plan.casting == "none":
        weight = weight.astype(plan.dtype)
    if plan.offset:
        weight = weight + jnp.asarray(plan.offset, weight.dtype)
    dtype = jnp.promote_types(weight.dtype, xhat.dtype)
    return weight.astype(dtype) * xhat.astype(dtype)


def wide_weight(plan: Plan, weight: jax.Array) -> jax.Array:
    weight = weight.astype(jnp.float32)
    return weight + plan.offset if plan.offset else weight
