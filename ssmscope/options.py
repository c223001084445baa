"""A function's signature as the options of a verb, so that names, types, defaults and help have one home."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ssmscope.inputs import WHOLE_NUMBER


def whole(value: str) -> int:
    """The whole number that an option was given."""
    if not WHOLE_NUMBER.fullmatch(str(value)):
        raise typer.BadParameter(f"{value!r} is no whole number")
    return int(value)


def number(value: str) -> float:
    """The number that an option was given."""
    try:
        return float(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is no number") from None


PARSERS: dict[type, tuple[Callable[[str], Any], str]] = {int: (whole, "N"), float: (number, "X")}


def keyword_options(function: Callable[..., Any], *, without: tuple[str, ...] = ()) -> list[inspect.Parameter]:
    """The keyword-only parameters of `function` as parameters that typer makes options of.

    A parameter is `int`, `float`, `bool`, `str` or a path, or one of these or None; its help is its entry under
    `Args:` in the docstring.
    """
    hints = typing.get_type_hints(function)
    helps = dict(documented(function))
    options = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY or parameter.name in without:
            continue
        hint = hints[parameter.name]
        members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        kinds = [str if kind is Path else kind for kind in members if kind is not type(None)]
        kind: Any = kinds[0] if type(None) not in members else kinds[0] | None
        settings: dict[str, Any] = {"help": helps.get(parameter.name)}
        if kinds[0] in PARSERS:
            settings["parser"], settings["metavar"] = PARSERS[kinds[0]]
        elif kinds[0] is str:
            settings["metavar"] = "NAME"
        # Named here: with a metavar, some releases of typer derive the name from that instead.
        name = parameter.name.replace("_", "-")
        names = f"--{name}/--no-{name}" if kinds[0] is bool else f"--{name}"
        options.append(parameter.replace(annotation=Annotated[kind, typer.Option(names, **settings)]))
    return options


def documented(function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """The name and the text of every entry under `Args:` in a docstring."""
    _, _, section = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")
    section = re.split(r"\n(?=\S)", section)[0]
    for entry in re.split(r"\n(?=    \w)", "\n" + section):
        name, colon, text = entry.strip().partition(": ")
        if colon:
            yield name, " ".join(text.split()).replace("`", "")


Verb = Callable[..., None]


def taking(parameters: list[inspect.Parameter]) -> Callable[[Verb], Verb]:
    """Decorates a function of `**options`: to typer it then names these parameters instead."""

    def named(function: Verb) -> Verb:
        hints = typing.get_type_hints(function, include_extras=True)
        own = [
            parameter.replace(annotation=hints[parameter.name])
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        every = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in [*own, *parameters]]
        function.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
        function.__annotations__ = {parameter.name: parameter.annotation for parameter in every}
        return function

    return named
