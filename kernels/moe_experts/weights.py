"""The weights of the chosen experts, streamed once from HBM through two rings of tiles in VMEM.

A visit is one pass over one expert: `num_in` gate/up tiles, then `num_out` down tiles.

    HBM   gate_up[e]  | gate 0..ti | .. | up 0..ti | ..      down[e]  | 0..th | th..2th | ..
    VMEM  ring_in     [ring_in, parts, ti, h]                ring_out [ring_out, th, i]

Tile `flat` = visit * num_tiles + tile lives in slot flat % ring. When a tile has been used, its
slot is given at once to tile flat + ring: both rings together are always full and the HBM does not
wait for the compute, a whole expert ahead when that fits, else a few tiles.
Transposed weights are cut along columns instead of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES
from .tiling import Plan


@dataclass(frozen=True)
class Layer:
    """Static facts of one experts layer."""

    t: int
    topk: int
    e: int
    h: int
    i: int
    dtype: jnp.dtype
    activation: str
    transposed: bool
    has_gate: bool
    plan: Plan

    @property
    def num_in(self) -> int:
        return self.i // self.plan.tile_i

    @property
    def num_out(self) -> int:
        return self.h // self.plan.tile_h

    @property
    def parts(self) -> int:
        return 2 if self.plan.is_split else 1

    @property
    def part_width(self) -> int:
        """Columns of one part: gate or up, or both of them when they are not split."""
        return self.plan.tile_i * (2 if self.has_gate and not self.plan.is_split else 1)

    @property
    def ring_in_shape(self) -> tuple[int, ...]:
        tile = (self.h, self.part_width) if self.transposed else (self.part_width, self.h)
        return (self.plan.ring_in, self.parts, *tile)

    @property
    def ring_out_shape(self) -> tuple[int, ...]:
        tile = (self.i, self.plan.tile_h) if self.transposed else (self.plan.tile_h, self.i)
        return (self.plan.ring_out, *tile)

    def dot(self, lhs, weight):
        """f32 [m, n] of lhs [m, k] and weight [n, k] ([k, n] if transposed)."""
        dims = (((1,), (0 if self.transposed else 1,)), ((), ()))
        is_exact = self.dtype == jnp.float32
        precision = jax.lax.Precision.HIGHEST if is_exact else jax.lax.Precision.DEFAULT
        return jax.lax.dot_general(lhs, weight, dims, precision, jnp.float32)

    def gated(self, parts):
        """act(gate) * up of the f32 accumulators, rounded to the weights' dtype."""
        if self.has_gate and not self.plan.is_split:
            parts = [parts[0][:, : self.i], parts[0][:, self.i :]]
        act = ACTIVATIONS[self.activation](parts[0])
        return (act * parts[1] if self.has_gate else act).astype(self.dtype)


def _silu(x):
    return x * jax.nn.sigmoid(x)


def _gelu(x):
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))  # Mosaic has erf, jax.nn.gelu takes erfc


def _relu2(x):
    return jnp.square(jnp.maximum(x, 0))


ACTIVATIONS = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu2": _relu2,
}


@dataclass(frozen=True)
class Stream:
    """The refs of the two rings, and which expert a visit is for.

    Each slot has one DMA semaphore: `start_in` / `start_out` start its copies, `wait_in` /
    `wait_out` wait for all of them before the tile is read; only then is the slot started again.
    """

    layer: Layer
    gate_up: jax.Array  # HBM [e, 2i, h]
    down: jax.Array  # HBM [e, h, i]
    ring_in: jax.Array  # VMEM [ring_in, parts, ti, h]
    ring_out: jax.Array  # VMEM [ring_out, th, i]
    sem_in: jax.Array  # [ring_in]
    sem_out: jax.Array  # [ring_out]
    expert_of: Callable[[Any], Any]

    def _copies_in(self, expert, tile, slot):
        layer, plan = self.layer, self.layer.plan
        for part in range(layer.parts):
            if layer.num_in == 1 and layer.parts == 1:
                src = self.gate_up.at[expert]
            else:
                first = pl.multiple_of(
                    part * layer.i + tile * plan.tile_i, _alignment(part * layer.i, plan.tile_i)
                )
                cut = pl.ds(first, plan.tile_i)
                at = (expert, slice(None), cut) if layer.transposed else (expert, cut)
                src = self.gate_up.at[at]
            yield pltpu.make_async_copy(src, self.ring_in.at[slot, part], self.sem_in.at[slot])

    def _copy_out(self, expert, tile, slot):
        layer, tile_h = self.layer, self.layer.plan.tile_h
        if layer.num_out == 1:
            src = self.down.at[expert]
        else:
            cut = pl.ds(pl.multiple_of(tile * tile_h, tile_h), tile_h)
            src = self.down.at[(expert, slice(None), cut) if layer.transposed else (expert, cut)]
        return pltpu.make_async_copy(src, self.ring_out.at[slot], self.sem_out.at[slot])

    def start_in(self, visit, tile, num_visits):
        """Starts gate/up tile `tile`, which may lie past the end of `visit`, if there is one."""
        visit, tile = _carry(visit, tile, self.layer.num_in)

        @pl.when(visit < num_visits)
        def _():
            slot = self.slot_in(visit, tile)
            for copy in self._copies_in(self.expert_of(visit), tile, slot):
                copy.start()

    def start_out(self, visit, tile, num_visits):
        visit, tile = _carry(visit, tile, self.layer.num_out)

        @pl.when(visit < num_visits)
        def _():
            slot = self.slot_out(visit, tile)
            self._copy_out(self.expert_of(visit), tile, slot).start()

    def start_rest(self, num_visits):
        """Fills both rings for visit 0, of which tile 0 is under way."""
        for tile in range(1, self.layer.plan.ring_in):
            self.start_in(0, tile, num_visits)
        for tile in range(self.layer.plan.ring_out):
            self.start_out(0, tile, num_visits)

    def slot_in(self, visit, tile):
        return _slot(visit, tile, self.layer.num_in, self.layer.plan.ring_in)

    def slot_out(self, visit, tile):
        return _slot(visit, tile, self.layer.num_out, self.layer.plan.ring_out)

    def wait_in(self, visit, tile):
        for copy in self._copies_in(0, 0, self.slot_in(visit, tile)):
            copy.wait()

    def wait_out(self, visit, tile):
        self._copy_out(0, 0, self.slot_out(visit, tile)).wait()


def _alignment(offset: int, step: int) -> int:
    """Largest power of two up to LANES that divides offset and step."""
    align = LANES
    while offset % align or step % align:
        align //= 2
    return align


def _carry(visit, tile, num_tiles):
    """tile of visit, where tile may be num_tiles or more."""
    if isinstance(tile, int):
        return visit + tile // num_tiles, tile % num_tiles
    return visit + tile // num_tiles, jax.lax.rem(tile, num_tiles)


def _slot(visit, tile, num_tiles, ring):
    if ring == num_tiles:
        return tile
    return jax.lax.rem(visit * num_tiles + tile, ring)
