"""Which code computes the result of a verb, as a few digits: a job is done again when it changes.

The code is what the verb's function and those that it calls in its own module say, and the text of every module of ours
that they import, directly or through others, with the C kernels and tables beside them. It is read, not run, and is the
same on every machine and however the package is installed: names are relative to the package, line ends those of Unix.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import ssmscope

ROOT = Path(ssmscope.__file__).parent
BESIDE = re.compile(r"""["']([\w-]+\.(?:c|h|cu|json|txt))["']""", re.ASCII)
"""How a module names a file beside it, such as the source of its kernel."""
ALWAYS = ("api.analysis", "backends.c", "backends.triton")
"""Modules of every call: they read models and inputs, or compute recurrences and are imported by a registry by name."""
LISTED = ("architectures.own", "architectures.read", "interp.methods", "backends.c", "backends.triton")
"""Packages that import their modules by name: all of these belong to the package itself."""

Import = tuple[int, str, tuple[str, ...]]
"""An import statement: how many levels up it starts, the package, and the names from there."""


@cache
def code_of(function: Callable[..., Any]) -> str:
    """16 hex digits of the SHA-256 of all code that a function of the package runs."""
    home = inspect.unwrap(function)
    file = _file(home.__module__.partition(".")[2])
    lines = _text(file).encode().split(b"\n")
    own = _called(_tree(_text(file)), home.__name__)
    digest = hashlib.sha256()
    for each in own:
        digest.update(_segment(lines, each) + b"\0")
    used = ast.Module(body=own, type_ignores=[])
    for name in sorted(_reached({*_modules(_imports(used), home.__module__), *ALWAYS})):
        digest.update(f"{name}\0{_module_digest(name)}\0".encode())
    return digest.hexdigest()[:16]


def _segment(lines: list[bytes], statement: ast.stmt) -> bytes:
    """A statement as a file of these lines says it; `ast.get_source_segment` parts the file into lines each time."""
    assert statement.end_lineno is not None
    found = lines[statement.lineno - 1 : statement.end_lineno]
    found[-1] = found[-1][: statement.end_col_offset]
    found[0] = found[0][statement.col_offset :]
    return b"\n".join(found)


def _called(tree: ast.Module, name: str) -> list[ast.stmt]:
    """The function of that name and what it uses of its own module, in the module's order."""
    defined: dict[str, ast.stmt] = {}
    for each in tree.body:
        if isinstance(each, ast.FunctionDef | ast.ClassDef):
            defined[each.name] = each
        elif isinstance(each, ast.Assign):
            defined.update({one.id: each for one in each.targets if isinstance(one, ast.Name)})
        elif isinstance(each, ast.Import | ast.ImportFrom):
            defined.update({alias.asname or alias.name: each for alias in each.names})
    found: set[str] = set()
    left = [name]
    while left:
        at = left.pop()
        if at in defined and at not in found:
            found.add(at)
            left += [node.id for part in _parts(defined[at]) for node in ast.walk(part) if isinstance(node, ast.Name)]
    return list(dict.fromkeys(each for known, each in defined.items() if known in found))


def _parts(statement: ast.stmt) -> list[ast.AST]:
    """What a statement says; of a function not its decorators, which register it."""
    return [statement.args, *statement.body] if isinstance(statement, ast.FunctionDef) else [statement]


@cache
def _module_digest(name: str) -> str:
    text = _text(_file(name))
    digest = hashlib.sha256(text.encode())
    for beside in sorted({_file(name).with_name(found) for found in BESIDE.findall(text)}):
        if beside.is_file():
            digest.update(f"\0{beside.name}\0{_text(beside)}".encode())
    return digest.hexdigest()


def _reached(start: set[str]) -> set[str]:
    """The modules, and all that they import."""
    found: set[str] = set()
    left = list(start)
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += _imports_of(name)
    return found


@cache
def _imports_of(name: str) -> tuple[str, ...]:
    file = _file(name)
    found = set(_modules(_imports_in(_text(file)), f"ssmscope.{name}", package=file.name == "__init__.py"))
    found |= {name.rpartition(".")[0]} - {""}
    if name in LISTED:
        found |= {f"{name}.{path.stem}" for path in file.parent.glob("*.py") if path.stem != "__init__"}
    return tuple(sorted(found - {name}))


@cache
def _imports_in(text: str) -> tuple[Import, ...]:
    return tuple(_imports(ast.parse(text)))


def _imports(tree: ast.AST) -> Iterator[Import]:
    """What a piece of code imports, as it says it; not for type checkers alone."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):  # of statements: expressions import nothing
        for node in getattr(tree, field, ()):
            if isinstance(node, ast.Import):
                yield 0, "", tuple(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.level, node.module or "", tuple(alias.name for alias in node.names)
            elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
                yield from _imports(node)


def _modules(imports: Iterable[Import], module: str, *, package: bool = False) -> Iterator[str]:
    """The modules of ours among what a module imports, below `ssmscope`."""
    for level, base, names in imports:
        above = module.split(".")[: len(module.split(".")) - level + package] if level else []
        for name in names:
            found = _module(".".join(filter(None, (*above, base, name))))
            if found:
                yield found


def _module(name: str) -> str:
    """The module that holds a dotted name, below `ssmscope`; "" where it is none of ours."""
    parts = name.split(".")
    if parts.pop(0) != "ssmscope":
        return ""
    while parts and not (ROOT.joinpath(*parts).with_suffix(".py").is_file() or ROOT.joinpath(*parts).is_dir()):
        parts.pop()
    return ".".join(parts)


def _file(name: str) -> Path:
    place = ROOT.joinpath(*name.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


@cache
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")
