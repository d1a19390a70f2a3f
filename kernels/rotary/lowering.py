"""The JAX functions behind the torch ops: what runs on the TPU, arguments as in the torch schema.

Around the Pallas kernels they bring every layout to one of the kernel's views without a copy,
and settle what Mosaic cannot: sizes of zero, float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...tpu_runtime import LANES, SUBLANES, Chip
from . import tiling
from .kernel import Launch, rotary
from .kernel_bwd import qk_norm_rotary_grad
from .plan import Norm, Operand, Rotation

AXES = {3: {0: "hsd", 1: "shd"}, 4: {0: "hbsd", 1: "bhsd", 2: "bshd"}}


def apply_rotary(
    q: jax.Array,
    k: jax.Array | None,
    cos: jax.Array,  # [b or 1, s, w] or [s, w]
    sin: jax.Array,
    head_axis: int,
    interleaved: bool,
    half_width: bool,
    *,
    chip: Chip,
    interpret: Any = False,
    inverse: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """q and k rotated; an array of shape [0] for one that is None."""
    job = _prepare((q, k), cos, sin, head_axis, interleaved, half_width, inverse)
    if job is None:
        return _filled((q, k))
    xs = job.views()
    operands = tuple(job.operand(i, x, x.dtype) for i, x in enumerate(xs))
    launch = job.launch(operands, None, 2, chip)
    outs = rotary(xs, [None] * len(xs), *job.tables, launch, chip=chip, interpret=interpret)
    return job.results(outs, [None if x is None else x.dtype for x in (q, k)])


def apply_rotary_backward(grad_q, grad_k, *args: Any, chip: Chip, interpret: Any = False):
    """Gradients of q and k; an array of shape [0] where the upstream gradient is None."""
    return apply_rotary(grad_q, grad_k, *args, chip=chip, interpret=interpret, inverse=True)


def qk_norm_rotary(
    q: jax.Array,
    k: jax.Array | None,
    q_weight: jax.Array | None,  # [d]
    k_weight: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    eps: float,
    offset: float,
    casting: str,
    head_axis: int,
    interleaved: bool,
    half_width: bool,
    *,
    chip: Chip,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    given = [(x, weight) for x, weight in ((q, q_weight), (k, k_weight)) if x is not None]
    dtypes = [_norm_dtype(x, weight, casting) for x, weight in given]
    job = _prepare((q, k), cos, sin, head_axis, interleaved, half_width, False)
    if job is None:
        return _filled((q, k), dtypes)
    xs, norm = job.views(), Norm(eps, casting)
    operands, weights = [], []
    for i, (x, (source, weight)) in enumerate(zip(xs, given, strict=True)):
        operands.append(
            job.operand(
                i,
                x,
                _kernel_dtype(dtypes[i]),
                rounding=source.dtype.name,
                norm_rounding=dtypes[i].name,
                has_weight=weight is not None,
            )
        )
        weights.append(job.weight(weight, offset, casting, source.dtype))
    launch = job.launch(tuple(operands), norm, 2, chip)
    outs = rotary(xs, weights, *job.tables, launch, chip=chip, interpret=interpret)
    return job.results(outs, [dtypes[0], None if k is None else dtypes[1]])


def qk_norm_rotary_backward(
    grad_q: jax.Array,
    grad_k: jax.Array | None,
    q: jax.Array,
    k: jax.Array | None,
    q_weight: jax.Array | None,
    k_weight: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    eps: float,
    offset: float,
    casting: str,
    head_axis: int,
    interleaved: bool,
    half_width: bool,
    needs_q: bool,
    needs_k: bool,
    needs_q_weight: bool,
    needs_k_weight: bool,
    *,
    chip: Chip,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients of q, k, q_weight, k_weight; one that is not needed has shape [0]."""
    sides = (
        (q, grad_q, q_weight, needs_q, needs_q_weight),
        (k, grad_k, k_weight, needs_k, needs_k_weight),
    )
    wanted = [side for side in sides if side[3] or side[4]]
    used = tuple(x if needs or needs_weight else None for x, _, _, needs, needs_weight in sides)
    job = _prepare(used, cos, sin, head_axis, interleaved, half_width, True)
    grad_inputs, grad_weights = [], []
    if job is None:
        for x, _, weight, needs_x, needs_weight in wanted:
            grad_inputs.append(jnp.zeros(x.shape, x.dtype) if needs_x else None)
            grad_weights.append(jnp.zeros(weight.shape, weight.dtype) if needs_weight else None)
    else:
        xs = job.views()
        grads = job.views([grad for _, grad, _, _, _ in wanted])
        operands, weights = [], []
        for i, (x, _, weight, needs_x, needs_weight) in enumerate(wanted):
            operands.append(
                job.operand(
                    i,
                    xs[i],
                    xs[i].dtype,
                    rounding=x.dtype.name,
                    has_weight=weight is not None,
                    wants_input=needs_x,
                    wants_weight=needs_weight,
                )
            )
            weights.append(job.weight(weight, offset, casting, x.dtype))
        launch = job.launch(tuple(operands), Norm(eps, casting), 3, chip)
        found = qk_norm_rotary_grad(
            xs, grads, weights, *job.tables, launch, chip=chip, interpret=interpret
        )
        for i, (grad_input, sums) in enumerate(found):
            x, _, weight, _, _ = wanted[i]
            is_needed = grad_input is not None
            grad_inputs.append(job.restore(i, grad_input).astype(x.dtype) if is_needed else None)
            grad_weights.append(None if sums is None else job.weight_grad(sums, weight.dtype))
    nothing, by_side = jnp.zeros((0,), q.dtype), iter(zip(grad_inputs, grad_weights, strict=True))
    pairs = [next(by_side) if side[3] or side[4] else (None, None) for side in sides]
    return tuple(
        nothing if x is None else x for x in (*(p[0] for p in pairs), *(p[1] for p in pairs))
    )


def _filled(xs, dtypes=None):
    """The results where there is nothing to compute."""
    some = next(x for x in xs if x is not None)
    dtypes = iter(dtypes or [x.dtype for x in xs if x is not None])
    return tuple(
        jnp.zeros((0,), some.dtype) if x is None else jnp.zeros(x.shape, next(dtypes)) for x in xs
    )


def _kernel_dtype(dtype: Any) -> Any:
    """Mosaic has no float16; float32 holds its values exactly."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else jnp.dtype(dtype)


def _norm_dtype(x: jax.Array, weight: jax.Array | None, casting: str) -> Any:
    if weight is None or casting != "llama":
        return jnp.dtype(x.dtype)
    return jnp.promote_types(x.dtype, weight.dtype)


@dataclass
class _Job:
    """One call, with its tensors brought to the views that the kernel takes."""

    xs: list[jax.Array]
    steps: list[tuple[tuple[int, ...], str, tuple[int, ...]]]  # shape, dims and axes of the view
    b: int
    s: int
    d: int
    rotation: Rotation
    tables: tuple[jax.Array, jax.Array]
    is_table_seq_minor: bool
    is_present: tuple[bool, bool]

    def views(self, arrays=None) -> list[jax.Array]:
        arrays = self.xs if arrays is None else arrays
        views = []
        for x, (shape, _, axes) in zip(arrays, self.steps, strict=True):
            views.append(x.astype(_kernel_dtype(x.dtype)).reshape(shape).transpose(axes))
        return views

    def restore(self, i: int, view: jax.Array) -> jax.Array:
        _, _, axes = self.steps[i]
        return view.transpose(np.argsort(axes)).reshape(self.xs[i].shape)

    def results(self, outs, dtypes) -> tuple[jax.Array, jax.Array]:
        found = iter(enumerate(outs))
        results = []
        for is_present, dtype in zip(self.is_present, dtypes, strict=True):
            if is_present:
                i, out = next(found)
                results.append(self.restore(i, out).astype(dtype))
            else:
                results.append(jnp.zeros((0,), self.xs[0].dtype))
        return tuple(results)

    def operand(self, i: int, view: jax.Array, out_dtype: Any, **options: Any) -> Operand:
        dims = self.steps[i][1]
        return Operand(dims, view.shape[dims.index("h")], view.dtype, out_dtype, **options)

    def launch(self, operands, norm: Norm | None, arrays: int, chip: Chip) -> Launch:
        tiles = tiling.choose(
            self.s,
            self.d,
            tuple(op.heads for op in operands),
            tuple(max(op.dtype.itemsize, jnp.dtype(op.out_dtype).itemsize) for op in operands),
            any(op.is_head_minor for op in operands),
            self.on_lanes,
            arrays,
            chip,
            tiling.STEP_BYTES if norm is None else tiling.NORM_STEP_BYTES,
        )
        shared = self.tables[0].shape[0]
        return Launch(
            self.b,
            self.s,
            self.d,
            self.rotation,
            operands,
            tiles,
            shared,
            self.is_table_seq_minor,
            norm,
        )

    @property
    def on_lanes(self) -> bool:
        return self.steps[0][1].endswith("d")

    @property
    def part_order(self) -> np.ndarray:
        """Features in the order of the parts of `cols`."""
        order, end = np.arange(self.d), self.rotation.rotary_dim
        if self.rotation.interleaved:
            order = np.concatenate([order[0:end:2], order[1:end:2], order[end:]])
        return order

    def weight(self, weight, offset: float, casting: str, dtype: Any) -> jax.Array | None:
        """weight + offset as the kernel takes it."""
        if weight is None:
            return None
        if casting == "gemma":
            weight = weight.astype(jnp.float32)
        elif casting == "none":
            weight = weight.astype(dtype)
        weight = weight + jnp.asarray(offset, weight.dtype) if offset else weight
        if self.on_lanes:
            return weight.astype(_kernel_dtype(weight.dtype)).reshape(1, self.d)
        parts = weight.astype(jnp.float32)[self.part_order]
        return jnp.broadcast_to(parts[:, None], (self.d, LANES))

    def weight_grad(self, sums: jax.Array, dtype: Any) -> jax.Array:  # [d]
        if self.on_lanes:
            return sums.sum((0, 1, 2)).astype(dtype)
        return sums.sum((0, 1, 3))[np.argsort(self.part_order)].astype(dtype)


def _prepare(
    xs: tuple[jax.Array | None, jax.Array | None],
    cos: jax.Array,
    sin: jax.Array,
    head_axis: int,
    interleaved: bool,
    half_width: bool,
    inverse: bool,
) -> _Job | None:
    """The job of a call, None if it has no element."""
    present = [x for x in xs if x is not None]
    if any(x.size == 0 for x in present) or cos.size == 0:
        return None
    dims = AXES[present[0].ndim][head_axis]
    d, s = present[0].shape[-1], present[0].shape[dims.index("s")]
    b = present[0].shape[dims.index("b")] if "b" in dims else 1
    width = cos.shape[-1]
    rotation = Rotation(width * 2 if half_width else width, interleaved, half_width, inverse)
    cos, sin = (_kernel_table(table) for table in (cos, sin))
    is_folded = s == 1 and b > 1  # decode: the batch becomes the sequence
    if is_folded:
        cos, sin = (jnp.broadcast_to(t, (b, 1, width)).reshape(1, b, width) for t in (cos, sin))
        s, b = b, 1
    is_seq_minor = _has_columns(s, d, present)
    steps = [_view(x, dims, b, s, is_folded, is_seq_minor) for x in present]
    if half_width and interleaved and not is_seq_minor:  # lanes cannot be doubled in the kernel
        cos, sin = (jnp.repeat(table, 2, -1) for table in (cos, sin))
        rotation = Rotation(rotation.rotary_dim, True, False, inverse)
    is_table_seq_minor = is_seq_minor or (
        tiling.is_sequence_minor(s, cos.shape[-1]) and s >= LANES and cos.shape[-1] % SUBLANES == 0
    )
    if is_table_seq_minor:
        cos, sin = cos.swapaxes(1, 2), sin.swapaxes(1, 2)
    is_present = tuple(x is not None for x in xs)
    return _Job(present, steps, b, s, d, rotation, (cos, sin), is_table_seq_minor, is_present)


def _kernel_table(table: jax.Array) -> jax.Array:  # [b or 1, s, w]
    table = table[None] if table.ndim == 2 else table
    return table.astype(_kernel_dtype(table.dtype))


def _has_columns(s: int, d: int, xs: list[jax.Array]) -> bool:
    """Whether the features go on sublanes: where XLA lays the tensors out that way."""
    tile = 2 * SUBLANES if any(x.dtype.itemsize == 2 for x in xs) else SUBLANES
    return tiling.is_sequence_minor(s, d) and d % tile == 0


def _view(x, dims: str, b: int, s: int, is_folded: bool, is_seq_minor: bool):
    """(shape to give x, dims of the view, axes to transpose it by)."""
    h, d = x.shape[dims.index("h")], x.shape[-1]
    if h == 1:
        dims = "bhsd"
    elif is_folded:
        dims = {"bhsd": "bshd", "hbsd": "bhsd"}.get(dims, dims)
    elif "b" not in dims:
        dims = "b" + dims
    sizes = {"b": b, "h": h, "s": s, "d": d}
    view = dims
    if is_seq_minor:
        view = "hbds" if dims == "hbsd" else "bhds"
    return tuple(sizes[a] for a in dims), view, tuple(dims.index(a) for a in view)
