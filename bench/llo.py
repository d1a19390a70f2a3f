"""The TPU compiler's final bundles as text -> a program whose control flow runs in Python.

A bundle is what one cycle issues. Its scalar half (registers, predicates, SMEM, branches, DMA) is
translated to Python, a straight run of bundles at a time and only where the program comes by; its
vector half only takes time. Nothing here knows about time: see simulate.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

_LINE = re.compile(r"^\s*(?:0x[0-9a-f]+|\d+)\s+(?:[LPC][A-Z])?\s*:[> ]*\{(.*)\}([^{}]*)$")
_COMMENT = re.compile(r"/\*.*?\*/", re.S)
_REGION = re.compile(r"(Start/End empty|Start|End) region (\d+)")
_DIRECTION = re.compile(r"\b(?:hbm|vmem|smem)-to-(?:hbm|vmem|smem)\b")
_INSTRUCTION = re.compile(r"^(?:(%\w+) = )?([a-z][\w.]*)(?:<[^>]*>)?\s*(.*)$", re.S)
_PREDICATE = re.compile(r"^\((!?%\w+|0)(?:,\s*([^)]*))?\),?\s*")
_REGISTER = re.compile(r"^(!?)%\w*?_?([sp])(\d+)$")
_OPERAND = re.compile(
    r"%s\d+_(s\d+) = inlined_call_operand\.(<no memory space>|\w+) "
    r"\[shape: (\w+)\[([\d,]*)\][^,]*, index: (\d+), kind: (\w+)"
)


@dataclass
class Instruction:
    target: str | None  # register, such as "s3"
    opcode: str
    predicate: str | None
    otherwise: str | None  # what the target gets where the predicate is false
    args: list[str]
    named: dict[str, str]
    direction: str | None = None  # of a general DMA, from the compiler's comment


@dataclass
class Bundle:
    instructions: list[Instruction] = field(default_factory=list)  # the scalar half
    cycles: int = 1
    matmuls: list[tuple[int | None, str]] = field(default_factory=list)  # MXU (None: any), dtype
    starts: list[int] = field(default_factory=list)  # regions
    ends_region: bool = False


@dataclass(frozen=True)
class Operand:
    register: str
    space: str
    dtype: str
    shape: tuple[int, ...]
    index: int
    kind: str  # "input" or "output"


@dataclass
class Listing:
    bundles: list[Bundle]
    operands: list[Operand]
    regions: dict[int, int]  # region -> its first bundle
    core_id_cells: list[str]  # SMEM cells that hold the number of the core


def parse(text: str) -> Listing:
    operands = [
        Operand(m[0], m[1], m[2], tuple(int(d) for d in m[3].split(",") if d), int(m[4]), m[5])
        for m in _OPERAND.findall(text)
    ]
    cells = re.findall(r"sld \[smem:\[(#allocation\d+)\]\] /\* megacore core id", text)
    text = re.sub(r"/\*(\w+=)\*/", r"\1", text)  # names of arguments
    text = _COMMENT.sub(_condense, text)
    bundles = [_bundle(*m.groups()) for m in map(_LINE.match, text.split("\n")) if m]
    regions: dict[int, int] = {}
    for index, bundle in enumerate(bundles):
        for region in bundle.starts:
            regions.setdefault(region, index)
    return Listing(bundles, operands, regions, cells)


def _condense(match: re.Match) -> str:
    """What of a comment matters: where regions start and end, which way a DMA goes."""
    comment = match.group()
    kept = [f"{'SE' if '/' in what else what[0]}{n}" for what, n in _REGION.findall(comment)]
    direction = _DIRECTION.search(comment)
    return " ".join(kept) + (f"@{direction.group()}@" if direction else "")


def _bundle(body: str, marks: str) -> Bundle:
    bundle = Bundle()
    for mark in marks.split():
        if mark[0] == "S":
            bundle.starts.append(int(mark.lstrip("SE")))
        bundle.ends_region |= "E" in mark
    for text in body.split(";;"):
        text = text.strip()
        if "vmatmul" in text:
            _add_matmul(bundle, text)
        elif delay := re.search(r"= vdelay (\d+)", text):
            bundle.cycles += int(delay.group(1))
        elif instruction := _scalar(text):
            bundle.instructions.append(instruction)
    return bundle


def _add_matmul(bundle: Bundle, text: str) -> None:
    match = re.search(r"= vmatmul((?:\.\w+)*?)\.(?:mxu(\d)|mrb)", text)
    if match:
        kinds = re.findall(r"\.(bf16|f8\w*|[su][48])(?=\.|$)", match.group(1))
        bundle.matmuls.append((int(match[2]) if match[2] else None, kinds[0] if kinds else "f32"))


def _scalar(text: str) -> Instruction | None:
    match = _INSTRUCTION.match(text)
    if not match:
        return None
    target, opcode, rest = match.groups()
    register = _REGISTER.match(target or "")
    name = "".join(register.groups()[1:]) if register else None
    is_effect = opcode in _EFFECTS or opcode.startswith("dma.")
    if not (name or is_effect) or opcode in ("sphi", "shalt.err"):
        return None
    direction = re.search(r"@([\w-]+)@", rest)
    rest = re.sub(r"@[\w-]+@|\[(?:thread|resolvable):\S*\]", "", rest).strip()
    address = None
    if opcode in ("sst", "sld"):  # their predicate stands behind the address
        address, rest = re.match(r"(\[smem:.*?\](?=[ ,]|$)),?\s*(.*)$", rest, re.S).groups()
    predicate = _PREDICATE.match(rest)
    if predicate:
        rest = rest[predicate.end() :]
        if predicate.groups() == ("0", None):  # never happens
            return None
    tokens = [token.strip() for token in rest.split(",")]
    named = dict(re.split(r"\s*=\s*", token, maxsplit=1) for token in tokens if "=" in token)
    args = [re.sub(r"(?<=\w)\s+\[#\w+\]$", "", t) for t in tokens if t and "=" not in t]
    if opcode == "scalar_select":
        args = list(named.values())
    return Instruction(
        name,
        opcode,
        predicate.group(1) if predicate else None,
        predicate.group(2) if predicate else None,
        [address, *args] if address else args,
        named,
        direction.group(1).replace("-", "_") if direction else None,
    )


_EFFECTS = {"sst", "sbr.rel", "vsyncadd", "vsyncpa"}


class Unknown:
    """A value that only the chip would know; whatever is computed from it is unknown too."""

    def _absorb(self, *_: Any) -> Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _absorb
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _absorb
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _absorb
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _absorb
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TypeError("an unknown value steers the program")


UNKNOWN = Unknown()


def _select(predicate: Any, value: Any, otherwise: Any) -> Any:
    return value if predicate is True else otherwise if predicate is False else UNKNOWN


def _negate(a: Any) -> Any:
    return UNKNOWN if a is UNKNOWN else not a


def _and(a: Any, b: Any) -> Any:
    if a is False or b is False:
        return False
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN else True


def _least(a: Any, b: Any) -> Any:
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN else min(a, b)


def _most(a: Any, b: Any) -> Any:
    return UNKNOWN if a is UNKNOWN or b is UNKNOWN else max(a, b)


_HELPERS = {
    "U": UNKNOWN,
    "select": _select,
    "negate": _negate,
    "both": _and,
    "least": _least,
    "most": _most,
}
_SIGNED = "(({} + 0x80000000 & 0xFFFFFFFF) - 0x80000000)"
_LOW = "({} & 0xFFFFFFFF)"
_BINARY = {
    "sadd.s32": _SIGNED.format("({a} + {b})"),
    "ssub.s32": _SIGNED.format("({a} - {b})"),
    "smul.u32": _SIGNED.format("({a} * {b})"),
    "smul.s32": _SIGNED.format("({a} * {b})"),
    "smulhi.u32": _SIGNED.format("(({a} & 0xFFFFFFFF) * ({b} & 0xFFFFFFFF) >> 32)"),
    "sand.u32": "({a} & {b})",
    "sor.u32": "({a} | {b})",
    "sxor.u32": "({a} ^ {b})",
    "sshll.u32": _SIGNED.format("({a} << ({b} & 31))"),
    "sshrl.u32": _SIGNED.format("(({a} & 0xFFFFFFFF) >> ({b} & 31))"),
    "sshra.s32": "({a} >> ({b} & 31))",
    "smin.s32": "least({a}, {b})",
    "smax.s32": "most({a}, {b})",
    "smin.u32": "least({a} & 0xFFFFFFFF, {b} & 0xFFFFFFFF)",
    "smax.u32": "most({a} & 0xFFFFFFFF, {b} & 0xFFFFFFFF)",
    "pand": "both({a}, {b})",
    "pnand": "negate(both({a}, {b}))",
    "por": "negate(both(negate({a}), negate({b})))",
    "pnor": "both(negate({a}), negate({b}))",
    "pxor": "({a} != {b})",
}
_RELATION = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}


class Translator:
    """Compiles traces of a listing: straight runs of bundles from an entry to a branch or its end.

    A trace is a Python function of nothing that returns the index of the bundle to go on with. It
    works on `registers` and `smem`, and calls `events`, an object with the methods

        run(segment)                  the bundles of segments[segment] have issued
        branch(bundle, condition, target) -> whether it is taken
        holds(bundle, condition)      -> whether what the condition guards happens
        dma(bundle, kind, granules, flag, source, destination)
        wait(flag, granules), add(flag, granules), clear(flag)
        store(address, value, condition)
        reduced() -> the word that the vector unit hands to the scalar unit
    """

    def __init__(self, listing: Listing, delay_slots: int, events: Any) -> None:
        self.listing, self.delay_slots = listing, delay_slots
        self.segments: list[tuple[int, int]] = []  # [first, past the last) bundle
        self.unknown_opcodes: set[str] = set()
        self._symbols: dict[str, int] = {}
        self._traces: dict[int, Callable[[], int]] = {}
        self.registers = {f"{kind}{i}": UNKNOWN for kind in "sp" for i in range(64)}
        self.smem: dict[int, Any] = {}
        self._globals = {**_HELPERS, "R": self.registers, "M": self.smem, "E": events}

    def trace(self, entry: int) -> Callable[[], int]:
        if entry not in self._traces:
            scope = dict(self._globals)
            exec(self._source(entry), scope)
            self._traces[entry] = scope["trace"]
        return self._traces[entry]

    def symbol(self, name: str) -> int:
        """The made-up address of a buffer that the program names, such as #allocation3."""
        return self._symbols.setdefault(name, (len(self._symbols) + 1) << 14)

    def _source(self, entry: int) -> str:
        bundles = self.listing.bundles
        lines, index, start = ["def trace():"], entry, entry
        pending: list[tuple[int, str, int]] = []  # bundle after the slots, condition, target

        def close(stop: int) -> None:
            nonlocal start
            if stop > start:
                self.segments.append((start, stop))
                lines.append(f" E.run({len(self.segments) - 1})")
            start = stop

        while index < len(bundles):
            branch, effects, writes = self._translate(index)
            if effects:
                close(index)
                lines += effects
            if branch is not None:
                condition, target = branch
                lines.append(f" c{index} = E.branch({index}, {condition}, {target})")
                pending.append((index + 1 + self._slots(index), f"c{index}", target))
            lines += writes
            index += 1
            while pending and pending[0][0] <= index:
                close(index)
                _, taken, target = pending.pop(0)
                lines.append(f" if {taken}: return {target}")
                if not pending:
                    lines.append(f" return {index}")
                    return "\n".join(lines)
        close(index)
        lines.append(f" return {index}")
        return "\n".join(lines)

    def _slots(self, index: int) -> int:
        if self.delay_slots:
            return self.delay_slots
        bundles = self.listing.bundles
        for later in range(index + 1, min(index + 16, len(bundles))):
            if bundles[later].starts:
                return later - index - 1
            if bundles[later].ends_region:
                return later - index
        return 1

    def _translate(self, index: int) -> tuple[tuple[str, int] | None, list[str], list[str]]:
        """The branch (condition, target), the effects and the register writes of a bundle.

        All of a bundle reads the registers as they were before it.
        """
        branch, effects, writes = None, [], []
        for instruction in self.listing.bundles[index].instructions:
            opcode = instruction.opcode
            condition = self._value(instruction.predicate) if instruction.predicate else "True"
            if opcode == "sbr.rel":
                target = instruction.named["target"]
                region = int(re.search(r"region(\d+)", target).group(1))
                branch = condition, self.listing.regions.get(region, len(self.listing.bundles))
            elif effect := self._effect(index, instruction):
                is_sure = instruction.predicate is None or opcode == "sst"
                guard = " " if is_sure else f" if E.holds({index}, {condition}): "
                effects.append(guard + effect)
            elif instruction.target and (value := self._expression(instruction)) is not None:
                old = f"R[{instruction.target!r}]"
                if instruction.predicate:
                    otherwise = self._value(instruction.otherwise) if instruction.otherwise else old
                    value = f"select({condition}, {value}, {otherwise})"
                writes.append((old, value))
        targets, values = [w[0] for w in writes], [w[1] for w in writes]
        assignment = [f" {', '.join(targets)} = {', '.join(values)}"] if writes else []
        return branch, effects, assignment

    def _effect(self, index: int, instruction: Instruction) -> str | None:
        opcode, args = instruction.opcode, instruction.args
        if opcode == "dma.done.wait":
            return f"E.wait({self._value(args[0])}, {self._value(args[1])})"
        if opcode.startswith("dma."):
            return self._dma(index, instruction)
        if opcode == "vsyncadd":
            return f"E.add({self._value(args[0])}, {self._value(args[1])})"
        if opcode == "vsyncpa":
            return f"E.clear({self._value(args[0])})"
        if opcode == "sst":
            predicate = instruction.predicate
            condition = self._value(predicate) if predicate else "True"
            return f"E.store({self._value(args[0])}, {self._value(args[1])}, {condition})"
        return None

    def _dma(self, index: int, instruction: Instruction) -> str:
        kind, named = instruction.opcode.removeprefix("dma."), instruction.named
        if kind == "general" and instruction.direction:
            kind = instruction.direction
        source, _, destination = kind.partition("_to_")
        get = lambda *names: next((named[n] for n in names if n in named), "?")  # noqa: E731
        values = (
            get("size_in_granules"),
            get("dst_syncflagno"),
            get(source, "src"),
            get(destination, "dst"),
        )
        return f"E.dma({index}, {kind!r}, {', '.join(map(self._value, values))})"

    def _expression(self, instruction: Instruction) -> str | None:
        """The value that the instruction's register gets, None if it keeps its own."""
        opcode, args = instruction.opcode, instruction.args
        value = [self._value(arg) for arg in args]
        if opcode.startswith("inlined_call_operand"):
            return None  # set before the program starts
        if opcode.startswith("int_to_ptr"):
            same = value[-1] == f"R[{instruction.target!r}]"
            return None if same else value[-1]
        if opcode in _BINARY or opcode.startswith("scalar_lea"):
            a, b = value[:2]
            return _BINARY.get(opcode, _BINARY["sadd.s32"]).format(a=a, b=b)
        if opcode.startswith("scmp."):
            _, relation, dtype, *_ = opcode.split(".")
            a, b = (_LOW.format(v) if dtype[0] == "u" else v for v in value[:2])
            return f"({a} {_RELATION[relation]} {b})"
        if opcode == "sld":
            return f"M.get({value[0]}, U)"
        if opcode.startswith("smov") or opcode == "pmov":
            return value[0]
        if opcode == "pneg":
            return f"negate({value[0]})"
        if opcode == "scalar_select":
            return f"select({', '.join(value[:3])})"
        if opcode == "spop":
            return "E.reduced()"
        if not (opcode.startswith(("spop.", "vsyncmov")) or ".f32" in opcode):
            self.unknown_opcodes.add(opcode)
        return "U"

    def _value(self, token: str) -> str:
        """Python source for a token: register, number, buffer name or [address + offset]."""
        token = token.strip()
        if register := _REGISTER.match(token):
            value = f"R['{register[2]}{register[3]}']"
            return f"negate({value})" if register[1] else value
        if re.match(r"^-?\d+$", token):
            return str((int(token) + 0x80000000 & 0xFFFFFFFF) - 0x80000000)
        if re.match(r"^\$?0x[0-9a-f]+$", token):
            return str((int(token.lstrip("$"), 16) + 0x80000000 & 0xFFFFFFFF) - 0x80000000)
        if re.match(r"^#\w+$", token):
            return str(self.symbol(token))
        if token.startswith("["):
            inside = re.sub(r"[\[\]]|\b(?:smem|vmem|sflag|hbm|cmem):", "", token)
            return "(" + " + ".join(self._value(part) for part in inside.split(" + ")) + ")"
        return "U"
