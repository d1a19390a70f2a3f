"""Rotary embedding of q and k in one launch, optionally after an RMSNorm over the head size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import Chip
from . import cols, lanes, tiling
from . import norm as norms
from .plan import Norm, Operand, Rotation
from .tiling import Tiles


@dataclass(frozen=True)
class Launch:
    """One pallas_call: its sizes, the tensors it takes, and how a block is walked."""

    b: int
    s: int
    d: int
    rotation: Rotation
    operands: tuple[Operand, ...]
    tiles: Tiles
    table_batch: int  # b, or 1 for tables that all samples share
    is_table_seq_minor: bool  # tables [b, w, s] instead of [b, s, w]
    norm: Norm | None = None

    @property
    def family(self) -> Any:
        return lanes if self.operands[0].dims.endswith("d") else cols

    @property
    def grid(self) -> tuple[int, int, int]:
        return pl.cdiv(self.s, self.tiles.seq), self.b, self.tiles.head_steps

    @property
    def table_scratch(self) -> list[Any]:
        shapes = self.family.table_shapes(self.tiles.seq, self.d, self.rotation)
        return [pltpu.VMEM(shape, jnp.float32) for shape in shapes]

    def last_step(self, i: int) -> int:
        """The last grid step with heads of operand i; then it keeps its block and does nothing."""
        return self.operands[i].heads // self.tiles.heads[i] - 1

    def block_spec(self, i: int) -> pl.BlockSpec:
        """Block of operand i, of its gradient, or of the output that belongs to it."""
        dims, last = self.operands[i].dims, self.last_step(i)
        block = {"b": None, "h": self.tiles.heads[i], "s": self.tiles.seq, "d": self.d}

        def index(seq_step, b, head_step):
            at = {"b": b, "h": jnp.minimum(head_step, last), "s": seq_step, "d": 0}
            return tuple(at[axis] for axis in dims)

        return pl.BlockSpec(tuple(block[axis] for axis in dims), index)

    def table_spec(self, width: int) -> pl.BlockSpec:
        seq, is_shared = self.tiles.seq, self.table_batch == 1
        if self.is_table_seq_minor:
            return pl.BlockSpec((None, width, seq), lambda i, b, _: (0 if is_shared else b, 0, i))
        return pl.BlockSpec((None, seq, width), lambda i, b, _: (0 if is_shared else b, i, 0))

    def prepare_tables(self, cos_ref, sin_ref, prepared) -> None:
        """The tables of this sequence block, in float32 with their signs, for all its heads."""

        @pl.when(pl.program_id(2) == 0)
        def _():
            tables = self.family.prepare_tables(
                cos_ref, sin_ref, self.is_table_seq_minor, self.d, self.rotation
            )
            for ref, table in zip(prepared, tables, strict=True):
                ref[...] = table

    def for_each_tile(
        self, i: int, body: Callable[[Any, Any], None], most: int | None = None
    ) -> None:
        """body(index of a tile in the block of operand i, its rows in the prepared tables).

        most: how many tiles may be in flight.
        """

        def walk():
            seq, span, heads = self.tiles.seq, self.tiles.span, self.tiles.heads[i]
            if self.operands[i].is_head_minor:  # tiles [heads, d], one for every position

                @pl.loop(0, seq, unroll=tiling.unroll(seq, most or tiling.MAX_UNROLL))
                def _(row):
                    body((row,), pl.ds(row, 1))

                return

            in_flight = most or tiling.MAX_UNROLL // (2 if self.family is lanes else 1)

            @pl.loop(0, seq // span)
            def _(step):  # tiles [span, d] or [d, span], one for every head
                at = pl.ds(pl.multiple_of(step * span, span), span)

                @pl.loop(0, heads, unroll=tiling.unroll(heads, in_flight))
                def _(head):
                    body((head, at), at)

        is_alone = self.last_step(i) == self.tiles.head_steps - 1
        walk() if is_alone else pl.when(pl.program_id(2) <= self.last_step(i))(walk)

    def call(
        self,
        kernel: Callable[..., None],
        name: str,
        args: Sequence[jax.Array],
        in_specs: Sequence[pl.BlockSpec],
        outputs: Sequence[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
        *,
        chip: Chip,
        interpret: Any,
    ) -> tuple[jax.Array, ...]:
        """pallas_call on the grid (sequence blocks, batch, head blocks)."""
        tiles = self.tiles
        shapes, out_specs = zip(*outputs, strict=True)
        return pl.pallas_call(
            functools.partial(kernel, launch=self),
            out_shape=shapes,
            grid=self.grid,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=self.table_scratch,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"),
                vmem_limit_bytes=chip.vmem_bytes * 9 // 10,
            ),
            interpret=interpret,
            name=f"{name}_{self.operands[0].dims}_{args[2].dtype}_s{tiles.seq}_h{tiles.heads[0]}",
        )(*args)


def whole(shape: tuple[int, ...]) -> pl.BlockSpec:
    """A small array that stays in VMEM."""
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def _forward_kernel(cos_ref, sin_ref, *refs, launch: Launch):
    """See `rotary`. refs: per operand x and perhaps its weight; outputs; prepared tables."""
    remaining = iter(refs)
    inputs = [
        (next(remaining), next(remaining) if op.has_weight else None) for op in launch.operands
    ]
    outputs = [next(remaining) for _ in launch.operands]
    tables = list(remaining)
    launch.prepare_tables(cos_ref, sin_ref, tables)
    for i, (x_ref, weight_ref) in enumerate(inputs):
        _rotate_operand(launch, i, x_ref, weight_ref, outputs[i], tables)


def _rotate_operand(launch: Launch, i: int, x_ref, weight_ref, out_ref, tables) -> None:
    """Norms and rotates the block of operand i."""
    family, rotation, norm = launch.family, launch.rotation, launch.norm
    operand = launch.operands[i]

    def normed(index):
        parts = family.load(x_ref, index, rotation)
        if norm is None:
            return parts
        weights = None
        if weight_ref is not None:
            weights = family.load_weight(weight_ref, rotation, launch.tiles.span)
        return norms.forward(parts, weights, norm, operand, family.FEATURES)

    def rotate(parts, index, at):
        rotated = family.rotate(parts, family.load_tables(tables, at), rotation)
        out = family.complete(rotated, parts, operand.out_dtype, rotation)
        family.store(out_ref, index, out, rotation)

    if norm is None or not operand.keeps_norm or family is not lanes:
        launch.for_each_tile(i, lambda index, at: rotate(normed(index), index, at))
        return
    # Two passes: sums and rotations both wait long for the cross-lane unit, and only without each
    # other do the tiles that must be in flight to hide it fit into the registers.
    most = tiling.NORM_UNROLL
    launch.for_each_tile(
        i, lambda index, _: family.store(out_ref, index, normed(index), rotation), most
    )
    launch.for_each_tile(
        i, lambda index, at: rotate(family.load(out_ref, index, rotation), index, at), most
    )


def rotary(
    xs: Sequence[jax.Array],  # per operand, axes as its dims say
    weights: Sequence[jax.Array | None],  # per operand, family.weight_shape(d)
    cos: jax.Array,  # [b or 1, s, w] or [b or 1, w, s]
    sin: jax.Array,
    launch: Launch,
    *,
    chip: Chip,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """Rotates every operand, after normalising it when the launch has a norm.

    Grid (sequence blocks, batch, head blocks), the first two parallel. A step reads a block of
    each operand with (nearly always) all heads, and the rows of the tables that they share; the
    first head step turns these into float32 tables with signs in VMEM. Every output block is
    written by the steps of one (sequence, batch) pair, which run in order on one core: no race.
    An operand with fewer head blocks keeps its last one and skips the rest.
    Features sit on lanes (`lanes`) where the head size is a multiple of 128, else on sublanes
    (`cols`), as XLA lays such arrays out, so that no layout copy stands before the launch.

    Floor: q and k read and written once. Static estimate, bfloat16, v5e / v6e, times the floor:
    rotary of q (1, 32, 4096, 128) and k (1, 8, 4096, 128) 1.01 / 1.03, in [b, s, h, d]
    1.01 / 1.04, interleaved (1, 24, 4429, 64) 1.03 / 1.09, all bound by HBM; with the norm
    1.05 / 1.07, where the results of the cross-lane unit, one per cycle, take nearly as long.
    """
    args, specs = (
        [cos, sin],
        [launch.table_spec(cos.shape[1 if launch.is_table_seq_minor else 2])] * 2,
    )
    for i, (x, weight) in enumerate(zip(xs, weights, strict=True)):
        args.append(x)
        specs.append(launch.block_spec(i))
        if weight is not None:
            args.append(weight)
            specs.append(whole(weight.shape))
    outputs = [
        (jax.ShapeDtypeStruct(x.shape, operand.out_dtype), launch.block_spec(i))
        for i, (x, operand) in enumerate(zip(xs, launch.operands, strict=True))
    ]
    name = "rotary" if launch.norm is None else "qk_norm_rotary"
    direction = "bwd" if launch.rotation.inverse else "fwd"
    return launch.call(
        _forward_kernel, f"{name}_{direction}", args, specs, outputs, chip=chip, interpret=interpret
    )
