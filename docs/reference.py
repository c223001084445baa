"""The page of the API: everything that `ssmscope.__all__` lists, from the docstrings.

A hook of mkdocs, which writes the page, and an extension of griffe, which says the types of options as they are.
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
import typing
from typing import Annotated, Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
import ssmscope
from ssmscope.api import analyses as registry

PAGE = "reference.md"
FIRST = ("load", "Model", "Trace", "Result")
"""What comes before the analyses."""
ROOMS = {"interp": "Interpret", "probes": "Probe", "attacks": "Attack"}
"""The headings of the analyses of a package."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    files.append(File.generated(config, PAGE, content=page()))
    return files


ABOUT = (
    "What `ssmscope.__all__` lists. A verb of the command line is the name of its function: `ssmscope.lens_show` for "
    "`analyze lens show`. `ssmscope.__version__` is the version."
)


def page() -> str:
    """The page as Markdown, with a line for mkdocstrings in place of each docstring."""
    names = [name for name in ssmscope.__all__ if name not in FIRST and name != "__version__"]
    modules = [name for name in names if isinstance(getattr(ssmscope, name), types.ModuleType)]
    rooms = {name: place.split(".")[1] for name, place in registry.names().items()}
    analyses = {name: room for name, room in rooms.items() if room in ROOMS}
    parts = ["# API reference", ABOUT]
    parts += ["## Models and results", *map(_described, FIRST)]
    for room, title in ROOMS.items():
        parts += [f"## {title}", *(_described(name) for name in names if analyses.get(name) == room)]
    parts += ["## More", *(_described(name) for name in names if name not in analyses and name not in modules)]
    parts += ["## Packages", *(f"### ssmscope.{name}\n\n{_about(name)}" for name in modules)]
    return "\n\n".join(parts) + "\n"


def _described(name: str) -> str:
    found = getattr(ssmscope, name)
    return f"::: {found.__module__}.{found.__qualname__}\n    options:\n      heading: ssmscope.{name}"


def _about(name: str) -> str:
    return (inspect.getdoc(getattr(ssmscope, name)) or "").partition("\n\n")[0]


class Types(griffe.Extension):
    """The types of a function's options without what their annotations say of them for the command line."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        module = func.module.canonical_path
        if module.startswith("ssmscope.backends."):  # has no options of commands, and may need triton to be imported
            return
        if any(each.kind is griffe.ParameterKind.keyword_only for each in func.parameters):
            scope = vars(importlib.import_module(module))
            for each in func.parameters:
                if each.annotation is not None:
                    each.annotation = plain(str(each.annotation), scope)


def plain(annotation: str, scope: dict[str, Any]) -> str:
    """An annotation as it is written, without what it says of the option for the command line."""
    try:
        hint = eval(annotation, {"Annotated": Annotated, **scope})
    except (NameError, AttributeError):  # a class that is imported for type checkers alone
        return annotation
    return _written(typing.get_args(hint)[0]) if typing.get_origin(hint) is Annotated else annotation


def _written(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join("None" if each is type(None) else _written(each) for each in typing.get_args(hint))
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    return re.sub(r"\b(?:typing|collections\.abc|pathlib)\.", "", str(hint))
