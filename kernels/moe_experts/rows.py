"""Rows of x and y in VMEM, kept as whole registers: moving one is a few loads and stores.

A row of h bf16 numbers is h / 256 sublanes of 128 words of 32 bits, columns c and c + h / 2 in one
word; a row of f32 numbers is h / 128 sublanes. Rows start on multiples of 8 sublanes. For h = 2048:

    chunk [rows, 2048] bf16   --pack-->    rows [rows * 8, 128] uint32, one register a row
    rows picked by token      --unpack-->  lhs  [m, 2048] bf16, by loads of stride 8
    d [m, 2048] f32           --spread-->  rows [m * 16, 128] f32, by stores of stride 16
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...tpu_runtime import LANES, SUBLANES
from .tiling import row_sublanes

GROUP_ROWS = 2 * SUBLANES  # rows of a bf16 register


@dataclass(frozen=True)
class Rows:
    """The refs behind row moves; the keys name slots as bit fields (expert, j, token)."""

    t: int
    h: int
    dtype: jnp.dtype
    token_bits: int
    slot_bits: int
    keys: jax.Array  # SMEM [slots + padding], sorted by expert
    route: jax.Array  # SMEM [2 ** slot_bits] weights by (j, token)
    x: jax.Array  # VMEM [rows * words, 128]
    y: jax.Array  # VMEM f32 [rows * words, 128]; row t takes what belongs to no token
    picked: jax.Array  # VMEM [tile_rows * words, 128]
    lhs: jax.Array  # VMEM [tile_rows, h]
    d: jax.Array  # VMEM f32 [tile_rows * words, 128]

    @property
    def parts(self) -> int:
        """Numbers of x in a word."""
        return 4 // self.dtype.itemsize

    @property
    def x_sublanes(self) -> int:
        return row_sublanes(self.h, self.dtype.itemsize)

    @property
    def y_sublanes(self) -> int:
        return row_sublanes(self.h, 4)

    def _columns(self, word: int, part: int) -> slice:
        first = part * (self.h // self.parts) + word * LANES
        return slice(first, first + LANES)

    def pack(self, chunk, first, num):
        """x rows first .. first + num = chunk [num, h]."""
        for word in range(self.h // self.parts // LANES):
            bits = [
                pltpu.bitcast(chunk[:, self._columns(word, p)].astype(jnp.float32), jnp.uint32)
                for p in range(self.parts)
            ]
            value = bits[0] if self.parts == 1 else (bits[0] >> 16) | bits[1]
            self.x[pl.ds(first * self.x_sublanes + word, num, stride=self.x_sublanes)] = value

    def pick(self, first_key, row, num):
        """lhs rows row .. row + num (static, whole groups) = the x rows of their keys, unrolled."""
        for base in range(row, row + num, GROUP_ROWS):
            for r in range(base, base + GROUP_ROWS):
                self._pick_one(first_key, r)
            self._unpack(base, GROUP_ROWS)

    def pick_now(self, first_key, num, size):
        """As `pick`, in a loop over `num` rows (a value), of which `size` (static) are unpacked."""

        def group(g, _):
            for r in range(SUBLANES):
                self._pick_one(first_key, g * SUBLANES + r)
            return 0

        jax.lax.fori_loop(0, (num + SUBLANES - 1) // SUBLANES, group, 0)
        self._unpack(0, size)

    def _pick_one(self, first_key, r):
        token = self.keys[first_key + r] & ((1 << self.token_bits) - 1)
        self.picked[_row(r, self.x_sublanes)] = self.x[_row(token, self.x_sublanes)]

    def _unpack(self, row: int, num: int):
        for word in range(self.h // self.parts // LANES):
            at = pl.ds(row * self.x_sublanes + word, num, stride=self.x_sublanes)
            value = self.picked[at]
            bits = [value] if self.parts == 1 else [value << 16, value & jnp.uint32(0xFFFF0000)]
            for p, b in enumerate(bits):
                part = pltpu.bitcast(b, jnp.float32).astype(self.dtype)
                self.lhs[row : row + num, self._columns(word, p)] = part

    def spread(self, d, column: int):
        """d rows 0 .. m, from `column` on = d [m, n]."""
        m, n = d.shape
        for word in range(n // LANES):
            at = pl.ds(column // LANES + word, m, stride=self.y_sublanes)
            self.d[at] = d[:, word * LANES : (word + 1) * LANES]

    def add(self, first_key, row, num, count):
        """y[token] += weight * d for d rows row .. row + num (static), those before `count` only.

        A token occurs once per expert, so rows of one group never meet in y.
        """
        for base in range(row, row + num, SUBLANES):
            self._add_group(first_key, base, count)

    def add_now(self, first_key, count):
        """As `add` for all rows before `count`, in a loop."""

        def group(g, _):
            self._add_group(first_key, g * SUBLANES, count)
            return 0

        jax.lax.fori_loop(0, (count + SUBLANES - 1) // SUBLANES, group, 0)

    def _add_group(self, first_key, base, count):
        sums = []
        for r in range(SUBLANES):
            key = self.keys[first_key + base + r]
            token = jnp.where(base + r < count, key & ((1 << self.token_bits) - 1), self.t)
            weight = self.route[key & ((1 << self.slot_bits) - 1)]
            at = _row(token, self.y_sublanes)
            sums.append((at, self.y[at] + weight * self.d[_row(base + r, self.y_sublanes)]))
        for at, value in sums:
            self.y[at] = value

    def clear(self, first, num):
        """y rows first .. first + num = 0."""
        at = pl.ds(pl.multiple_of(first * self.y_sublanes, SUBLANES), num * self.y_sublanes)
        self.y[at] = jnp.zeros((num * self.y_sublanes, LANES), jnp.float32)

    def result(self, chunk, first, num):
        """chunk [num, h] = y rows first .. first + num."""
        for word in range(self.h // LANES):
            value = self.y[pl.ds(first * self.y_sublanes + word, num, stride=self.y_sublanes)]
            chunk[:, word * LANES : (word + 1) * LANES] = value.astype(chunk.dtype)


def _row(row, sublanes: int):
    if isinstance(row, int):
        return pl.ds(row * sublanes, sublanes)
    return pl.ds(pl.multiple_of(row * sublanes, SUBLANES), sublanes)
