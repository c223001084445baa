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
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import ssmscope

ROOT = Path(ssmscope.__file__).parent
BESIDE = re.compile(r"""["']([\w-]+\.(?:c|h|cu|json|txt))["']""", re.ASCII)
"""How a module names a file beside it, such as the source of its kernel."""
LISTED = ("models", "interp.methods")
"""Packages that import their modules by name: all of these belong to the package itself."""


@cache
def code_of(function: Callable[..., Any]) -> str:
    """16 hex digits of the SHA-256 of all code that a function of the package runs."""
    home = inspect.unwrap(function)
    file = _file(home.__module__.partition(".")[2])
    own = _called(_tree(file), home.__name__)
    digest = hashlib.sha256()
    for each in own:
        digest.update(f"{ast.get_source_segment(_text(file), each)}\0".encode())
    used = ast.Module(body=own, type_ignores=[])
    for name in sorted(_reached(set(_imported(used, home.__module__)))):
        digest.update(f"{name}\0{_module_digest(name)}\0".encode())
    return digest.hexdigest()[:16]


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
    found = set(_imported(_tree(file), f"ssmscope.{name}", package=file.name == "__init__.py"))
    found |= {name.rpartition(".")[0]} - {""}
    if name in LISTED:
        found |= {f"{name}.{path.stem}" for path in file.parent.glob("*.py") if path.stem != "__init__"}
    return tuple(sorted(found - {name}))


def _imported(tree: ast.AST, module: str, *, package: bool = False) -> Iterator[str]:
    """The modules of ours that a piece of code imports, below `ssmscope`; not those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")[: len(module.split(".")) - node.level + package] if node.level else []
            base = ".".join(filter(None, (*above, node.module)))
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            found = _module(name)
            if found:
                yield found
        yield from _imported(node, module, package=package)


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
def _tree(file: Path) -> ast.Module:
    return ast.parse(_text(file))


@cache
def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8")
