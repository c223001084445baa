"""Checks the types and shapes in the annotations of chosen modules whenever one of their functions is called. What
jaxtyping's own import hook does, at a fifth of its price: that binds the arguments by the signature at every call, and
checks them twice. It was more than a quarter of what tests of small recurrences took."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from beartype import BeartypeConf, beartype
from jaxtyping import jaxtyped

CHECKED = (
    # Not what takes sequences of recurrences: beartype draws the item that it checks from the global generator, and
    # every run of a model comes by. Nor what a compiled model may call: torch.compile cannot follow the checks.
    *("ops.ssd", "ops.implicit_attention"),
    "attacks.position.measure",
)
"""Modules whose functions are checked when a test calls them; users pay nothing for it."""
NUMBERS = BeartypeConf(is_pep484_tower=True)
"""A whole number stands for a float, as for every type checker."""


def checked(given: Any) -> Any:
    """A function whose arguments and result are checked, with one size for each axis name; a class whose fields are."""
    if inspect.isclass(given):
        if hasattr(given, "__dataclass_fields__") and "__init__" in vars(given):
            given.__init__ = checked(given.__init__)  # type: ignore[misc]
        return given
    inner = beartype(conf=NUMBERS)(given)
    if not _names_shapes(given):
        return inner

    @functools.wraps(given)
    def run(*arguments: Any, **options: Any) -> Any:
        with jaxtyped("context"):
            return inner(*arguments, **options)

    return run


def _names_shapes(function: Any) -> bool:
    words = re.findall(r"\w+", " ".join(map(str, function.__annotations__.values())))
    return any(type(function.__globals__.get(word)).__module__.startswith("jaxtyping") for word in words)


class _Decorator(ast.NodeTransformer):
    """Puts the check next to every function, below its other decorators, and above those of every class; not next to
    those within functions, which would be checked anew, in a tenth of a millisecond, whenever they are made."""

    CHECK = "__import__('shapes').checked"

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.decorator_list.append(ast.parse(self.CHECK, mode="eval").body)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        node.decorator_list.insert(0, ast.parse(self.CHECK, mode="eval").body)
        return node


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        """Compiled anew: what is cached of the module has no checks."""
        tree = _Decorator().visit(ast.parse(self.get_data(self.path), self.path))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in self.names else None
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


def check(names: Sequence[str]) -> None:
    """Check the modules of these names, which are yet to be imported."""
    assert not set(names) & set(sys.modules)
    sys.meta_path.insert(0, _Finder(names))
