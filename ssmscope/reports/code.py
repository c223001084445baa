"""Fingerprint of the code that computes a verb's result; a job runs again when it changes.

The code is the source of the verb's function and of all that it uses in its own module, and the text of every module of
the package that these import, directly or indirectly, with the C kernels and tables next to them. It is read, not run,
and does not depend on machine or installation: names are relative to the package, line ends those of Unix.
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
SIBLING_FILE = re.compile(r"""["']([\w-]+\.(?:c|h|cu|json|txt))["']""", re.ASCII)
"""Pattern of a file name in a module's source, such as that of its kernel in the same folder."""
ALWAYS_USED = ("api.analysis", "backends.c", "backends.triton")
"""Modules that every call uses: they read models and inputs, or compute recurrences and are imported by name."""
REGISTRIES = ("architectures.own", "architectures.read", "interp.methods", "backends.c", "backends.triton")
"""Packages that import their modules by name, so all of these count as imported."""

UNUSED = ("api.analyses",)
"""Modules that are imported but change no number: the table of analyses."""

Import = tuple[int, str, tuple[str, ...]]
"""An import statement: the number of levels up, the package, and the names imported from it."""


@cache
def code_of(function: Callable[..., Any]) -> str:
    """Return 16 hex digits of the SHA-256 of all code that a function of the package runs."""
    home = inspect.unwrap(function)
    file = _file(home.__module__.partition(".")[2])
    lines = _text(file).encode().split(b"\n")
    own = _called(_tree(_text(file)), home.__name__)
    digest = hashlib.sha256()
    for each in own:
        digest.update(_segment(lines, each) + b"\0")
    used = ast.Module(body=own, type_ignores=[])
    for name in sorted(_reached({*_modules(_imports(used), home.__module__), *ALWAYS_USED})):
        digest.update(f"{name}\0{_module_digest(name)}\0".encode())
    return digest.hexdigest()[:16]


def _segment(lines: list[bytes], statement: ast.stmt) -> bytes:
    """Return a statement's source; `ast.get_source_segment` would split the file into lines each time."""
    assert statement.end_lineno is not None
    found = lines[statement.lineno - 1 : statement.end_lineno]
    found[-1] = found[-1][: statement.end_col_offset]
    found[0] = found[0][statement.col_offset :]
    return b"\n".join(found)


def _called(tree: ast.Module, name: str) -> list[ast.stmt]:
    """Return the named function and all that it uses of its own module, in the module's order."""
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
    """Return the parts of a statement that count; a function's decorators, which register it, do not."""
    return [statement.args, *statement.body] if isinstance(statement, ast.FunctionDef) else [statement]


@cache
def _module_digest(name: str) -> str:
    text = _text(_file(name))
    digest = hashlib.sha256(text.encode())
    for sibling in sorted({_file(name).with_name(found) for found in SIBLING_FILE.findall(text)}):
        if sibling.is_file():
            digest.update(f"\0{sibling.name}\0{_text(sibling)}".encode())
    return digest.hexdigest()


def _reached(start: set[str]) -> set[str]:
    """Return the modules and all that they import, directly or indirectly."""
    found: set[str] = set()
    left = list(start)
    while left:
        name = left.pop()
        if name not in found and name not in UNUSED:
            found.add(name)
            left += _imports_of(name)
    return found


@cache
def _imports_of(name: str) -> tuple[str, ...]:
    file = _file(name)
    found = set(_modules(_imports_in(_text(file)), f"ssmscope.{name}", package=file.name == "__init__.py"))
    found |= {name.rpartition(".")[0]} - {""}
    if name in REGISTRIES:
        found |= {f"{name}.{path.stem}" for path in file.parent.glob("*.py") if path.stem != "__init__"}
    return tuple(sorted(found - {name}))


@cache
def _imports_in(text: str) -> tuple[Import, ...]:
    return tuple(_imports(ast.parse(text)))


def _imports(tree: ast.AST) -> Iterator[Import]:
    """Yield the import statements of a piece of code, except those for type checkers alone."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):  # Expressions import nothing.
        for node in getattr(tree, field, ()):
            if isinstance(node, ast.Import):
                yield 0, "", tuple(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.level, node.module or "", tuple(alias.name for alias in node.names)
            elif not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
                yield from _imports(node)


def _modules(imports: Iterable[Import], module: str, *, package: bool = False) -> Iterator[str]:
    """Yield the modules of this package among a module's imports, named relative to `ssmscope`."""
    for level, base, names in imports:
        above = module.split(".")[: len(module.split(".")) - level + package] if level else []
        for name in names:
            found = _module(".".join(filter(None, (*above, base, name))))
            if found:
                yield found


def _module(name: str) -> str:
    """Return the module that holds a dotted name, relative to `ssmscope`; "" if it is not of this package."""
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
