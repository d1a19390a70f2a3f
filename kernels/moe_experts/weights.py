"""The weights of the chosen experts, streamed once from HBM through two rings of tiles in VMEM.

A visit is one pass over one expert: `num_in` gate/up tiles, then `num_out` down tiles.

    HBM   gate_up[e]  | gate 0..ti | .. | up 0..ti | ..      down[e]  | 0..th | th..2th | ..
    VMEM  ring_in     [ring_in, parts, ti, h]                ring_out [ring_out, th, i]

Tile `flat` = visit * num_tiles + tile lives in slot flat % ring. When a tile has been used, its
slot is given at once to tile flat + ring: both rings together are always full and the HBM does not
wait for the compute, a whole expert ahead when that fits, else a few tiles.
Transposed weights are cut along columns instead of rows, each projection as it lies. Where h or i
is no multiple of the lanes, a transposed down projection is cut along i, as gate/up is, and its
tiles add up to y (`plan.cuts_i`).

Quantised weights travel and wait as they are stored, and are widened on their way into the MXU
(products). Their scales come with the first tile of a visit, into one of two slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, SUBLANES
from ..ragged_dot import dequant
from . import products
from .activations import ACTIVATIONS, swiglu_oai
from .tiling import MAX_UNROLLED, Plan, Stored


@dataclass(frozen=True)
class Layer:
    """Static facts of one experts layer."""

    t: int
    topk: int
    e: int
    h: int
    i: int
    dtype: jnp.dtype  # of x
    activation: str
    has_gate: bool
    plan: Plan
    gate_up: Stored
    down: Stored
    code: dequant.Code | None

    @property
    def num_in(self) -> int:
        return self.i // self.plan.tile_i

    @property
    def num_out(self) -> int:
        return self.num_in if self.plan.cuts_i else self.h // self.plan.tile_h

    @property
    def parts(self) -> int:
        return 2 if self.plan.is_split else 1

    @property
    def is_interleaved(self) -> bool:
        return self.activation == "swiglu_oai"

    @property
    def part_width(self) -> int:
        """Columns of one part: gate or up, or both of them when they are not split."""
        return self.plan.tile_i * (2 if self.has_gate and not self.plan.is_split else 1)

    @property
    def ring_in_shape(self) -> tuple[int, ...]:
        k = self.gate_up.num_stored(self.h)
        tile = (k, self.part_width) if self.gate_up.transposed else (self.part_width, k)
        return (self.plan.ring_in, self.parts, *tile)

    @property
    def ring_out_shape(self) -> tuple[int, ...]:
        k = self.down.num_stored(self.plan.tile_i if self.plan.cuts_i else self.i)
        tile = (k, self.plan.tile_h) if self.down.transposed else (self.plan.tile_h, k)
        return (self.plan.ring_out, *tile)

    @property
    def act_shape(self) -> tuple[int, int, int]:
        """Gate results of one row tile: [cuts, even and odd columns, k], times rows."""
        num_cuts = self.num_in if self.plan.cuts_i else 1
        pairs = 2 if self.down.is_int4 else 1
        return num_cuts, pairs, self.i // num_cuts // pairs

    @property
    def stored_name(self) -> str:
        """Of the dtypes, for the kernel's name."""
        stored = dict.fromkeys((str(self.dtype), self.gate_up.dtype, self.down.dtype))
        return "_".join(stored).replace("uint8", "int4")

    def view_in(self, gate_up: jax.Array) -> jax.Array:
        """[e, 2i, h] as [e, 2, i, h], so that one DMA moves a tile of gate and of up."""
        if self.parts == 1 or self.gate_up.transposed:
            return gate_up
        return gate_up.reshape(gate_up.shape[0], 2, self.i, gate_up.shape[2])

    def dot(self, lhs, weight, scale, transposed: bool):
        """f32 [m, n] of lhs [m, k] and weight [n, k] ([k, n] if transposed), as it is stored.

        scale: [k_blocks, n], None if not quantised; lhs: `products.Pairs` for int4.
        """
        is_exact = self.dtype == jnp.float32
        precision = jax.lax.Precision.HIGHEST if is_exact else jax.lax.Precision.DEFAULT
        if scale is not None:
            return products.dot(
                lhs,
                weight,
                scale,
                transposed=not transposed,
                precision=precision,
                code=self.code,
            )
        dims = (((1,), (0 if transposed else 1,)), ((), ()))
        return jax.lax.dot_general(lhs, weight, dims, precision, jnp.float32)

    def gated(self, parts):
        """act(gate) * up of the f32 accumulators, rounded to the dtype of x."""
        if self.is_interleaved:
            return swiglu_oai(parts[0], self.dtype)
        if self.has_gate and not self.plan.is_split:
            parts = [parts[0][:, : self.i], parts[0][:, self.i :]]
        act = ACTIVATIONS[self.activation](parts[0])
        return (act * parts[1] if self.has_gate else act).astype(self.dtype)

    def store_act(self, act_ref, rows: slice, tile, act):
        """act_ref [cuts, pairs, m, k]: columns tile * tile_i .. of rows = act."""
        values = products.split(act)[:2] if self.down.is_int4 else (act,)
        size = self.plan.tile_i // len(values)
        for pair, value in enumerate(values):
            if self.plan.cuts_i:
                act_ref[tile, pair, rows] = value
            elif self.num_in == 1:
                act_ref[0, pair, rows] = value
            else:
                act_ref[0, pair, rows, pl.ds(pl.multiple_of(tile * size, LANES), size)] = value

    def load_act(self, act_ref, rows: slice, tile):
        """What down tile `tile` is multiplied with."""
        cut = tile if self.plan.cuts_i else 0
        values = tuple(act_ref[cut, pair, rows] for pair in range(act_ref.shape[1]))
        return products.Pairs(*values) if self.down.is_int4 else values[0]


@dataclass(frozen=True)
class Scales:
    """The scales of one projection.

    [e, n] arrays come whole, once, when most experts are chosen (`is_whole`), else in groups of
    eight experts, as they lie in HBM; [e, k_blocks, n] arrays come by expert. A visit's scales wait
    in slot visit % 2: `start` starts the copy, `wait` waits for it before the first product. The
    slot is started again when the visit after next begins to arrive, when nobody reads it.
    """

    hbm: jax.Array  # [e, n] or [e, k_blocks, n]
    is_whole: bool
    buffer: jax.Array  # VMEM [e, n], [2, 8, n] or [2, k_blocks, n]
    row: jax.Array  # VMEM [1, n]: of the visit's expert, if there are no blocks
    sem: jax.Array  # [2]

    @property
    def has_blocks(self) -> bool:
        return len(self.hbm.shape) == 3

    def _copy(self, expert, slot):
        if self.is_whole:
            return pltpu.make_async_copy(self.hbm, self.buffer, self.sem.at[0])
        src = self.hbm.at[expert]
        if not self.has_blocks:
            first = pl.multiple_of(expert // SUBLANES * SUBLANES, SUBLANES)
            src = self.hbm.at[pl.ds(first, SUBLANES)]
        return pltpu.make_async_copy(src, self.buffer.at[slot], self.sem.at[slot])

    def start(self, expert, visit):
        if not self.is_whole:
            self._copy(expert, jax.lax.rem(visit, 2)).start()
        elif isinstance(visit, int):
            self._copy(0, 0).start()

    def wait(self, expert, visit):
        slot = jax.lax.rem(visit, 2)
        if self.is_whole:
            pl.when(visit == 0)(lambda: self._copy(0, 0).wait())
            self.row[...] = self.buffer[pl.ds(expert, 1)]
            return
        self._copy(0, slot).wait()
        if not self.has_blocks:
            self.row[...] = self.buffer[slot, pl.ds(jax.lax.rem(expert, SUBLANES), 1)]

    def rows(self, visit, columns, blocks):
        """f32 [k_blocks, n] of some columns and some blocks."""
        if not self.has_blocks:
            return self.row[:, columns]
        return self.buffer[jax.lax.rem(visit, 2), blocks, columns]


def scale_buffers(layer: Layer, scales: Sequence[jax.Array | None]) -> list:
    """Scratch of the `Scales` of those that are there, as `take_scales` takes it."""
    scratch = []
    for scale in scales:
        if scale is None:
            continue
        if comes_whole(layer, scale):
            shape = scale.shape
        else:
            shape = (2, SUBLANES if scale.ndim == 2 else scale.shape[1], scale.shape[-1])
        row = pltpu.VMEM((1, scale.shape[-1]), jnp.float32)
        scratch += [pltpu.VMEM(shape, jnp.float32), row, pltpu.SemaphoreType.DMA((2,))]
    return scratch


def take_scales(layer: Layer, scales_hbm: Sequence, refs: Iterator) -> list[Scales | None]:
    return [
        None
        if hbm is None
        else Scales(hbm, comes_whole(layer, hbm), next(refs), next(refs), next(refs))
        for hbm in scales_hbm
    ]


def comes_whole(layer: Layer, scale) -> bool:
    """Whether that moves fewer bytes than eight rows for each chosen expert."""
    active = min(layer.e, layer.t * layer.topk)
    return len(scale.shape) == 2 and scale.shape[0] <= SUBLANES * active


@dataclass(frozen=True)
class Stream:
    """The refs of the two rings, and which expert a visit is for.

    Each slot has one DMA semaphore: `start_in` / `start_out` start its copies, `wait_in` /
    `wait_out` wait for all of them before the tile is read; only then is the slot started again.
    """

    layer: Layer
    gate_up: jax.Array  # HBM, as `layer.view_in` gives it
    down: jax.Array  # HBM [e, h, i]
    ring_in: jax.Array  # VMEM [ring_in, parts, ti, h]
    ring_out: jax.Array  # VMEM [ring_out, th, i]
    sem_in: jax.Array  # [ring_in]
    sem_out: jax.Array  # [ring_out]
    expert_of: Callable[[Any], Any]
    scales_in: Scales | None = None
    scales_out: Scales | None = None

    def _copies_in(self, expert, tile, slot):
        layer, width = self.layer, self.layer.part_width
        if layer.parts == 2 and not layer.gate_up.transposed:
            first = pl.multiple_of(tile * width, _alignment(0, width))
            src = self.gate_up.at[expert, :, pl.ds(first, width)]
            yield pltpu.make_async_copy(src, self.ring_in.at[slot], self.sem_in.at[slot])
            return
        for part in range(layer.parts):
            if layer.num_in == 1 and layer.parts == 1:
                src = self.gate_up.at[expert]
            else:
                first = pl.multiple_of(
                    part * layer.i + tile * width, _alignment(part * layer.i, width)
                )
                cut = pl.ds(first, width)
                at = (expert, slice(None), cut) if layer.gate_up.transposed else (expert, cut)
                src = self.gate_up.at[at]
            yield pltpu.make_async_copy(src, self.ring_in.at[slot, part], self.sem_in.at[slot])

    def _copy_out(self, expert, tile, slot):
        layer = self.layer
        if layer.num_out == 1:
            src = self.down.at[expert]
        else:
            is_column = layer.down.transposed and not layer.plan.cuts_i
            size = layer.ring_out_shape[2 if is_column else 1]
            cut = pl.ds(pl.multiple_of(tile * size, _alignment(0, size)), size)
            src = self.down.at[(expert, slice(None), cut) if is_column else (expert, cut)]
        return pltpu.make_async_copy(src, self.ring_out.at[slot], self.sem_out.at[slot])

    def start_in(self, visit, tile, num_visits):
        """Starts gate/up tile `tile`, which may lie past the end of `visit`, if there is one."""
        visit, tile = _carry(visit, tile, self.layer.num_in)

        @pl.when(visit < num_visits)
        def _():
            slot = self.slot_in(visit, tile)
            expert = self.expert_of(visit)
            for copy in self._copies_in(expert, tile, slot):
                copy.start()
            if self.scales_in is not None:
                _when(tile == 0, lambda: self.scales_in.start(expert, visit))

    def start_out(self, visit, tile, num_visits):
        visit, tile = _carry(visit, tile, self.layer.num_out)

        @pl.when(visit < num_visits)
        def _():
            slot = self.slot_out(visit, tile)
            expert = self.expert_of(visit)
            self._copy_out(expert, tile, slot).start()
            if self.scales_out is not None:
                _when(tile == 0, lambda: self.scales_out.start(expert, visit))

    def start_rest_in(self, num_visits):
        """Fills the ring of gate/up for visit 0, of which tile 0 is under way."""
        for tile in range(1, self.layer.plan.ring_in):
            self.start_in(0, tile, num_visits)

    def start_all_out(self, num_visits):
        """Fills the ring of down for visit 0."""
        for tile in range(self.layer.plan.ring_out):
            self.start_out(0, tile, num_visits)

    def slot_in(self, visit, tile):
        return _slot(visit, tile, self.layer.num_in, self.layer.plan.ring_in)

    def slot_out(self, visit, tile):
        return _slot(visit, tile, self.layer.num_out, self.layer.plan.ring_out)

    def wait_in(self, visit, expert, tile):
        for copy in self._copies_in(0, 0, self.slot_in(visit, tile)):
            copy.wait()
        if self.scales_in is not None:
            _when(tile == 0, lambda: self.scales_in.wait(expert, visit))

    def wait_out(self, visit, expert, tile):
        self._copy_out(0, 0, self.slot_out(visit, tile)).wait()
        if self.scales_out is not None:
            _when(tile == 0, lambda: self.scales_out.wait(expert, visit))

    def dot_in(self, lhs, visit, tile):
        """f32 [m, part_width] of every part of gate/up tile `tile`."""
        layer, slot, width = self.layer, self.slot_in(visit, tile), self.layer.part_width
        results = []
        for part in range(layer.parts):
            scale = None
            if self.scales_in is not None:
                columns = _columns(part * layer.i, tile, width, layer.num_in * layer.parts)
                scale = self.scales_in.rows(visit, columns, slice(None))
            weight = self.ring_in[slot, part]
            results.append(layer.dot(lhs, weight, scale, layer.gate_up.transposed))
        return results

    def dot_out(self, act, visit, tile):
        """f32 [m, tile_h] of down tile `tile`."""
        layer, scale = self.layer, None
        if self.scales_out is not None:
            columns, blocks = slice(None), slice(None)
            if not layer.plan.cuts_i:
                columns = _columns(0, tile, layer.plan.tile_h, layer.num_out)
            elif layer.down.num_blocks > 1:
                num = layer.down.num_blocks // layer.num_out
                blocks = pl.ds(tile * num, num)
            scale = self.scales_out.rows(visit, columns, blocks)
        slot = self.slot_out(visit, tile)
        if scale is not None or layer.plan.cuts_i or layer.num_in > MAX_UNROLLED:
            return layer.dot(act, self.ring_out[slot], scale, layer.down.transposed)
        # One product for each gate/up tile: of few rows, long products spill on v6e.
        total = None
        for j in range(layer.num_in):
            cut = slice(j * layer.plan.tile_i, (j + 1) * layer.plan.tile_i)
            at = (slot, cut) if layer.down.transposed else (slot, slice(None), cut)
            part = layer.dot(act[:, cut], self.ring_out[at], None, layer.down.transposed)
            total = part if total is None else total + part
        return total


def _when(condition, do):
    """`do` now, never, or under pl.when: tiles are Python ints where they are unrolled."""
    if isinstance(condition, bool):
        if condition:
            do()
    else:
        pl.when(condition)(do)


def _columns(start: int, tile, width: int, num: int):
    """Lanes start + tile * width .. of an array that is `num` such tiles wide."""
    if num == 1:
        return slice(None)
    if isinstance(tile, int):
        return slice(start + tile * width, start + (tile + 1) * width)
    return pl.ds(pl.multiple_of(start + tile * width, _alignment(start, width)), width)


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
