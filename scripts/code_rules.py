"""What the Python code of a variant may do: imports that work anywhere, and a stated public API.

`import <variant>` must work without jax and torch_tpu, in a process that holds other builds of the
same kernel: own modules are imported relatively, everything else but torch and the standard library
inside functions, or in modules that only functions import.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

LAZY_MODULES = {"jax", "torch_tpu", "numpy"}


@dataclass(frozen=True)
class Import:
    """One import statement; `is_lazy` when it does not run while its module is imported."""

    line: int
    level: int
    module: str
    names: tuple[str, ...]
    is_lazy: bool

    def __str__(self) -> str:
        if not self.names:
            return f"import {self.module}"
        return f"from {'.' * self.level}{self.module} import {', '.join(self.names)}"


def find_imports(node: ast.AST, is_lazy: bool = False) -> Iterator[Import]:
    """Every import statement below `node`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(child.lineno, 0, alias.name, (), is_lazy)
        elif isinstance(child, ast.ImportFrom):
            names = tuple(alias.name for alias in child.names)
            yield Import(child.lineno, child.level, child.module or "", names, is_lazy)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from find_imports(ast.Module(child.body, []), True)
            yield from find_imports(ast.Module(child.orelse, []), is_lazy)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from find_imports(child, is_lazy or is_function)


def imported_files(path: str, imported: Import, files: set[str]) -> set[str]:
    """The `files` that a relative import in `path` runs; LookupError says why it would fail."""
    folder = PurePosixPath(path).parts[:-1]
    if imported.level > len(folder) + 1:
        raise LookupError("reaches outside the variant")
    base = folder[: len(folder) + 1 - imported.level]
    target = (*base, *filter(None, imported.module.split(".")))
    own = {_join(*target, "__init__.py"), f"{_join(*target)}.py"} & files
    if not own and not _is_folder(target, files):
        raise LookupError("is not in the variant")
    run = own | {_join(*target[:depth], "__init__.py") for depth in range(len(target))}
    for name in imported.names:
        module = {_join(*target, f"{name}.py"), _join(*target, name, "__init__.py")} & files
        if not own and not module and not _is_folder((*target, name), files):
            raise LookupError(f"finds no {name} in the variant")
        run |= module
    return run & files


def _join(*parts: str) -> str:
    return "/".join(parts)


def _is_folder(parts: tuple[str, ...], files: set[str]) -> bool:
    return any(file.startswith(_join(*parts, "")) for file in files)


def check_code(
    code: dict[str, tuple[str, bytes]], own_names: Collection[str], third_party: Collection[str]
) -> list[str]:
    """Problems in the files of one variant: path in the variant -> (name in messages, source).

    `own_names`: absolute names under which another copy could be found. `third_party`: modules
    that may be imported anywhere, besides torch and the standard library.
    """
    parsed, problems = {}, []
    for path, (shown, source) in code.items():
        try:
            parsed[path] = ast.parse(source, filename=shown)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            problems.append(f"{shown}:{line}: {getattr(error, 'msg', error)}")
    if problems:
        return problems
    files = {*code, "_ops.py"}
    own = {file.split("/")[0].removesuffix(".py") for file in files} | set(own_names)
    allowed = {*sys.stdlib_module_names, "torch", *third_party}
    runs: dict[str, set[str]] = {path: set() for path in parsed}  # what importing a file imports
    if_eager: list[tuple[str, str]] = []  # (file, problem if importing the variant runs it)
    for path, module in parsed.items():
        for imported in find_imports(module):
            where = f"{code[path][0]}:{imported.line}: `{imported}`"
            top = imported.module.split(".")[0]
            if imported.level:
                try:
                    found = imported_files(path, imported, files)
                    runs[path] |= set() if imported.is_lazy else found
                except LookupError as error:
                    problems.append(f"{where} {error.args[0]}")
            elif top in allowed:
                continue
            elif top in own:
                problems.append(f"{where} may find another copy; import relatively")
            elif top not in LAZY_MODULES:
                problems.append(f"{where} is neither torch nor in the standard library")
            elif not imported.is_lazy:
                if_eager.append((path, f"{where} runs when the variant is imported"))
    eager, queue = set(), ["__init__.py"]
    while queue:
        path = queue.pop()
        if path not in eager:
            eager.add(path)
            queue += runs.get(path, ())
    problems += [problem for path, problem in if_eager if path in eager]
    layers = sorted(files & {"layers.py", "layers/__init__.py"})
    for path in layers:
        problems += check_layers(code[path][0], parsed[path])
    return problems + check_public_names(
        code["__init__.py"][0], parsed["__init__.py"], bool(layers)
    )


def check_layers(shown: str, module: ast.Module) -> list[str]:
    """Layers must be pure: `kernelize` puts their forward into modules that others constructed.

    The Hub library refuses a layer with a constructor or any member but forward and two flags when
    a user maps it (`kernels.layer.layer._validate_layer`); here it is refused before it ships.
    """
    problems = []
    for node in module.body:
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        where = f"{shown}:{node.lineno}: layer {node.name}"
        bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
        if bases != {"Module"}:
            problems.append(f"{where} must derive from torch.nn.Module alone")
        members = [name for part in node.body for name in _members(part)]
        if "forward" not in members:
            problems.append(f"{where} has no forward")
        extra = sorted(set(members) - {"forward", "has_backward", "can_torch_compile"})
        problems += [f"{where} must be pure, but has {name}" for name in extra]
    return problems


def _members(node: ast.stmt) -> list[str]:
    """Names that a statement in a class body binds; annotations and docstrings bind none."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        stored = (n for n in ast.walk(node) if isinstance(getattr(n, "ctx", None), ast.Store))
        return [ast.unparse(name) for name in stored]
    if isinstance(node, ast.AnnAssign):
        return [ast.unparse(node.target)] if node.value else []
    is_inert = isinstance(node, ast.Pass) or isinstance(getattr(node, "value", None), ast.Constant)
    return [] if is_inert else [f"`{ast.unparse(node)}`"]


def check_public_names(shown: str, module: ast.Module, has_layers: bool) -> list[str]:
    """`__all__` must be literal and hold every public name that the package offers."""
    public, bound, offered = None, set(), {"layers"} if has_layers else set()
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            bound |= names
            public = node.value if "__all__" in names else public
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.asname or alias.name.split(".")[0] for alias in node.names}
            bound |= names
            offered |= names if getattr(node, "level", 0) else set()
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
            offered.add(node.name)
    try:
        public = ast.literal_eval(public)
    except (ValueError, TypeError):
        public = None
    if not isinstance(public, list | tuple) or not all(isinstance(name, str) for name in public):
        return [f"{shown}: needs __all__, a literal list of the public names"]
    if not public or len(set(public)) != len(public):
        return [f"{shown}: __all__ is empty or names something twice"]
    hidden = sorted(name for name in offered - set(public) if not name.startswith("_"))
    unbound = sorted(set(public) - bound)
    problems = [f"{shown}: {name} is public but not in __all__" for name in hidden]
    return problems + [f"{shown}: __all__ names {name}, which is not defined" for name in unbound]
