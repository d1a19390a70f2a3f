"""The public names of a kernel with their signatures, read from source and never executed.

`read_api` reads a built variant, wherever it lies: `read` gives the bytes of a path in it, or None.
`compare` says which calls that worked with an old version would fail, or mean something else, now.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Read = Callable[[str], bytes | None]

# kinds of parameters: how a caller may pass them
POSITION, EITHER, KEYWORD, REST, OPTIONS = "position", "either", "keyword", "*", "**"


@dataclass(frozen=True)
class Parameter:
    """One parameter; `default` is source text, None where the caller must pass it."""

    name: str
    kind: str
    default: str | None

    def __str__(self) -> str:
        stars = self.kind if self.kind in (REST, OPTIONS) else ""
        return f"{stars}{self.name}" + ("" if self.default is None else f"={self.default}")


@dataclass(frozen=True)
class Public:
    """A public function, layer (with the parameters of its forward) or plain value."""

    what: str  # "function", "layer" or "value"
    parameters: tuple[Parameter, ...] = ()
    summary: str = ""  # the first line of the docstring

    def signature(self, limit: int | None = None) -> str:
        """The arguments of a call; past `limit` characters only those that must be passed."""
        text, has_keywords = [], False
        for parameter in self.parameters:
            if parameter.kind == KEYWORD and not has_keywords:
                has_keywords = True
                text += [] if any(p.kind == REST for p in self.parameters) else ["*"]
            text.append(str(parameter))
        full = ", ".join(text)
        if limit is None or len(full) <= limit:
            return full
        needed = [p for p in self.parameters if p.default is None and p.kind in (POSITION, EITHER)]
        return ", ".join([*map(str, needed), "..."])


def read_api(read: Read) -> dict[str, Public]:
    """Public name -> what it is; layers under `layers.<name>`. Empty without a literal __all__."""
    api = {}
    for name in _literal_all(_parse(read, "__init__.py")):
        if name == "layers":
            api |= {f"layers.{layer}": public for layer, public in _read_layers(read)}
        else:
            api[name] = _resolve(read, "__init__.py", name, set())
    return api


def compare(old: dict[str, Public], new: dict[str, Public]) -> list[str]:
    """One line per incompatible change."""
    problems = []
    for name, before in old.items():
        if name not in new:
            problems.append(f"{name} is gone")
        elif before.what != new[name].what:
            problems.append(f"{name} was a {before.what} and is a {new[name].what}")
        else:
            changes = _signature_changes(before.parameters, new[name].parameters)
            problems += [f"{name}: {change}" for change in changes]
    return problems


def _signature_changes(old: tuple[Parameter, ...], new: tuple[Parameter, ...]) -> Iterator[str]:
    now = {parameter.name: parameter for parameter in new}
    then = {parameter.name for parameter in old}
    positions = [p.name for p in new if p.kind in (POSITION, EITHER)]
    for place, before in enumerate(p for p in old if p.kind in (POSITION, EITHER)):
        if before.name not in now and before.kind == EITHER:
            yield f"parameter {before.name} is gone"
        elif before.name in now and now[before.name].kind not in (POSITION, EITHER):
            yield f"parameter {before.name} can no longer be passed by position"
        elif place >= len(positions) or (before.name != positions[place] and before.kind == EITHER):
            yield f"parameter {before.name} is no longer number {place + 1}"
        elif before.kind == EITHER and now[before.name].kind == POSITION:
            yield f"parameter {before.name} can no longer be passed by name"
    for before in old:
        after = now.get(before.name)
        if before.kind == KEYWORD and (after is None or after.kind not in (KEYWORD, EITHER)):
            yield f"parameter {before.name} is gone"
        elif before.kind in (REST, OPTIONS) and all(p.kind != before.kind for p in new):
            yield f"{before} is gone"
        elif after is not None and before.default is not None and after.default is None:
            yield f"parameter {before.name} has lost its default {before.default}"
        elif after is not None and before.default is not None and before.default != after.default:
            yield f"default of {before.name} was {before.default} and is {after.default}"
    for after in new:
        is_required = after.default is None and after.kind in (POSITION, EITHER, KEYWORD)
        if is_required and after.name not in then and after.kind != POSITION:
            yield f"parameter {after.name} is new and has no default"


def _parse(read: Read, path: str) -> ast.Module:
    source = read(path)
    if source is None:
        raise LookupError(f"{path} is missing")
    return ast.parse(source, filename=path)


def _literal_all(module: ast.Module) -> list[str]:
    for node in module.body:
        if isinstance(node, ast.Assign) and "__all__" in map(ast.unparse, node.targets):
            return list(ast.literal_eval(node.value))
    return []


def _read_layers(read: Read) -> Iterator[tuple[str, Public]]:
    path = "layers.py" if read("layers.py") is not None else "layers/__init__.py"
    module = _parse(read, path)
    names = _literal_all(module) or [
        node.name for node in module.body if isinstance(node, ast.ClassDef)
    ]
    for name in names:
        if not name.startswith("_"):
            yield name, _resolve(read, path, name, set())


def _resolve(read: Read, path: str, name: str, seen: set[tuple[str, str]]) -> Public:
    """What `name` is in the module at `path`, followed through relative imports."""
    if (path, name) in seen:
        raise LookupError(f"{path}: {name} is imported in a circle")
    found = Public("value")
    for node in _parse(read, path).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            found = Public("function", _parameters(node.args), _summary(node))
        elif isinstance(node, ast.ClassDef) and node.name == name:
            forward = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            arguments = [_parameters(n.args)[1:] for n in forward if n.name == "forward"]
            found = Public("layer", (arguments or [()])[0], _summary(node))
        elif isinstance(node, ast.Assign) and name in map(ast.unparse, node.targets):
            is_literal = isinstance(node.value, ast.Constant)
            constant = f"the constant {ast.unparse(node.value)}" if is_literal else ""
            found = Public("value", summary=constant)
        elif isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    target = _module_path(read, path, node)
                    if target is not None:
                        found = _resolve(read, target, alias.name, seen | {(path, name)})
    return found


def _module_path(read: Read, path: str, node: ast.ImportFrom) -> str | None:
    """The file that a relative import takes its names from; None for a folder without code."""
    folders = path.split("/")[:-1]
    base = folders[: len(folders) + 1 - node.level] + (node.module or "").split(".")
    base = [part for part in base if part]
    files = (["/".join(base) + ".py"] if base else []) + ["/".join([*base, "__init__.py"])]
    return next((file for file in files if read(file) is not None), None)


def _parameters(arguments: ast.arguments) -> tuple[Parameter, ...]:
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    defaults = [None] * missing + [ast.unparse(default) for default in arguments.defaults]
    found = [
        Parameter(a.arg, POSITION if a in arguments.posonlyargs else EITHER, default)
        for a, default in zip(positional, defaults, strict=True)
    ]
    if arguments.vararg:
        found.append(Parameter(arguments.vararg.arg, REST, None))
    for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(Parameter(a.arg, KEYWORD, None if default is None else ast.unparse(default)))
    if arguments.kwarg:
        found.append(Parameter(arguments.kwarg.arg, OPTIONS, None))
    return tuple(found)


def _summary(node: ast.FunctionDef | ast.ClassDef) -> str:
    lines = (ast.get_docstring(node) or "").splitlines()
    return lines[0].rstrip(" .,:") if lines else ""
