"""The compiled program: its operations in the order they run, and the layout of its arrays."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

_INSTRUCTION = re.compile(r"\s*(ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{\s*$", re.M)
_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2,
    "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8,
}  # fmt: skip
# What takes no time of its own: names, and the ends of what runs beside the core.
FREE = frozenset({
    "parameter", "constant", "bitcast", "tuple", "get-tuple-element", "after-all", "partition-id",
    "domain", "copy-done", "async-done", "slice-done", "optimization-barrier",
})  # fmt: skip
# Custom calls that only rename or reserve memory.
_FREE_TARGET = re.compile(r'custom_call_target="(?:\w*Bitcast|AllocateBuffer)"')
COPY_STARTS = ("copy-start", "slice-start", "async-start")


@dataclass(frozen=True)
class Operation:
    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    is_pallas: bool
    vmem_bytes: int
    libtpu_cycles: int | None  # the compiler's own guess, for what it dumps no code of
    called: tuple[str, ...]  # computations: the body of a loop, the branches of a conditional
    trip_count: int | None


def parse(text: str) -> tuple[dict[str, list[Operation]], str]:
    """Operations of each computation in schedule order, and the name of the entry."""
    headers = list(_COMPUTATION.finditer(text))
    computations, entry = {}, ""
    for header in headers:
        # An instruction may span lines: the metadata of kernels holds newlines and braces.
        body = text[header.end() :]
        body = re.split(r"\n\}\s*(?:\n|$)", body, maxsplit=1)[0]
        lines = re.split(r"\n(?=\s+(?:ROOT )?%[\w.\-]+ = )", "\n" + body)
        computations[header[1]] = [op for op in map(_operation, lines) if op]
        if text.startswith("ENTRY", header.start()):
            entry = header[1]
    return computations, entry


def _operation(text: str) -> Operation | None:
    match = _INSTRUCTION.match(text)
    if not match:
        return None
    _, name, shape, opcode = match.groups()
    opcode = "bitcast" if _FREE_TARGET.search(text) else opcode
    used = re.search(r'"used_scoped_memory_configs":\[(.*?)\]', text)
    vmem = re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', used[1] if used else "")
    cycles = re.search(r'"bundle_analysis_data":\{"estimated_cycles":"(\d+)"', text)
    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', text)
    called = re.findall(r"\b(?:body|to_apply|true_computation|false_computation)=%([\w.\-]+)", text)
    branches = re.search(r"branch_computations=\{([^}]*)\}", text)
    called += re.findall(r"%([\w.\-]+)", branches[1]) if branches else []
    return Operation(
        name,
        shape,
        opcode,
        tuple(re.findall(r"%([\w.\-]+)", text[match.end() :].split(")")[0])),
        "tpu_custom_call" in text,
        max(map(int, vmem), default=0),
        int(cycles[1]) if cycles else None,
        tuple(called) if opcode in ("while", "conditional", "call") else (),
        int(trips[1]) if trips else None,
    )


def num_bytes(shape: str) -> float:
    """Of an array or of all arrays of a tuple, padding not counted."""
    return sum(
        _BYTES.get(dtype, 4) * math.prod(int(d) for d in dims.split(",") if d)
        for dtype, dims in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", shape)
    )


def in_hbm(shape: str) -> str:
    """The arrays of a shape that are not marked S(n): those are in VMEM or smaller memories."""
    arrays = re.findall(r"\b[a-z]+\d*\w*\[[\d,]*\](?:\{[^}]*\})?", shape)
    return " ".join(array for array in arrays if "S(" not in array)


def copied_bytes(operation: Operation) -> tuple[float, float]:
    """HBM bytes that an asynchronous copy reads and writes: S(1) marks an array in VMEM."""
    arrays = re.findall(r"\b[a-z]+\d*\w*\[[\d,]*\](?:\{[^}]*\})?", operation.shape)[:2]
    if len(arrays) < 2:
        return 0, 0
    target, source = arrays if operation.opcode == "copy-start" else arrays[::-1]
    moved = num_bytes(target)
    return moved * ("S(" not in source), moved * ("S(" not in target)


def words_in_memory(array: np.ndarray, shape: str) -> np.ndarray:
    """The 32-bit words of `array` in the layout of an HLO shape, s32[4,9]{1,0:T(8,128)} say.

    The braces list the dimensions from the minor one on; each tile cuts the last dimensions in
    blocks, padded to whole ones, and the next tile cuts those blocks again.
    """
    layout = re.search(r"\{([\d,]*)(?::((?:T?\([\d,]+\))*))?", shape)
    minor_first = [int(d) for d in layout[1].split(",") if d] if layout else []
    array = np.transpose(array, minor_first[::-1]) if minor_first else np.ravel(array)
    for tile in re.findall(r"\(([\d,]+)\)", (layout[2] or "") if layout else ""):
        block = [int(d) for d in tile.split(",")]
        array = array.reshape((1,) * (len(block) - array.ndim) + array.shape)
        lead = array.ndim - len(block)
        padding = [-size % by for size, by in zip(array.shape[lead:], block, strict=True)]
        array = np.pad(array, [(0, 0)] * lead + [(0, p) for p in padding])
        counts = [size // by for size, by in zip(array.shape[lead:], block, strict=True)]
        split = [size for pair in zip(counts, block, strict=True) for size in pair]
        outer = range(lead, lead + 2 * len(block), 2)
        order = [*range(lead), *outer, *(axis + 1 for axis in outer)]
        array = array.reshape(*array.shape[:lead], *split).transpose(order)
    raw = np.ascontiguousarray(array).tobytes()
    return np.frombuffer(raw + b"\0" * (-len(raw) % 4), np.int32)
