"""The options of an analysis, read off its function's signature and docstring."""

from __future__ import annotations

import builtins
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from ssmscope.api.options import NO_EFFECT, REPEATED, VALUE_TYPES, Later, Metavar, OneOf, Option, Range, Reads


class Names(dict[str, Any]):
    """Namespace of a module, with a `Later` for each name that it imports only under TYPE_CHECKING."""

    def __missing__(self, name: str) -> type:
        return type(name, (Later,), {})


def options_of(
    function: Callable[..., Any], *, without: Collection[str] = (), settings: Collection[str] = ()
) -> dict[str, Option]:
    """Return the keyword-only parameters of a function as options, by name, except those in `without`; those in
    `settings` are marked as settings.

    A parameter without `Annotated` takes its help from `Args:` in the docstring; its texts and paths are shown as NAME.
    Only the options' annotations are evaluated, so that a module need not import the types of its other parameters.
    Raise TypeError if a parameter has no help, or a type that no option can have."""
    own = getattr(inspect.unwrap(function), "__globals__", {})
    names = Names({"Annotated": Annotated, "Literal": Literal, **vars(builtins), **own})
    helps, found = dict(documented(function)), {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.name not in without:
            hint = parameter.annotation
            hint = eval(hint, {}, names) if isinstance(hint, str) else hint  # noqa: S307  # the function's own annotation
            if not hasattr(hint, "__metadata__") and parameter.name in helps:
                kinds = tuple(str if kind is Path else kind for kind in _members(hint))
                marks = (Metavar("NAME"),) if str in kinds else ()
                hint = Annotated[(typing.Union[kinds], helps[parameter.name], *marks)]  # noqa: UP007
            found[parameter.name] = replace(_option(parameter, hint), setting=parameter.name in settings)
    return found


def documented(function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every entry under `Args:` in a docstring."""
    _, _, section = inspect.cleandoc(function.__doc__ or "").partition("\nArgs:\n")
    section = re.split(r"\n(?=\S)", section)[0]
    for entry in re.split(r"\n(?=    \w)", "\n" + section):
        name, colon, text = entry.strip().partition(": ")
        if colon:
            yield name, " ".join(text.split()).replace("`", "")


def _option(parameter: inspect.Parameter, hint: Any) -> Option:
    marks = list(getattr(hint, "__metadata__", ()))
    if not marks or not isinstance(marks[0], str):
        raise TypeError(f"the option {parameter.name} needs Annotated[TYPE, HELP]")
    several = nested = False
    words, elements = list[str](), list[str]()
    kinds, singles, objects = list[type](), list[type](), list[type]()
    for member in _members(typing.get_args(hint)[0]):
        origin, inner = typing.get_origin(member), typing.get_args(member)
        if member is type(None):
            continue
        if origin is Literal:
            words += inner
        elif isinstance(origin, type) and issubclass(origin, Mapping):
            of_mappings = typing.get_origin(inner[1])
            nested = isinstance(of_mappings, type) and issubclass(of_mappings, Mapping)
            objects += [] if nested else [Mapping]
        elif isinstance(origin, type) and issubclass(origin, Sequence):
            if origin is list:
                objects += [list, tuple]
                continue
            several = True
            for each in _members(inner[0]):
                if typing.get_origin(each) is Literal:
                    elements += typing.get_args(each)
                elif typing.get_origin(each) is not None:
                    objects += [list, tuple]
                elif each in VALUE_TYPES:
                    kinds.append(each)
                else:
                    objects.append(each)
        elif member in VALUE_TYPES:
            singles.append(member)
            kinds.append(member)
        elif isinstance(member, type):
            objects.append(member)
        else:
            raise TypeError(f"the option {parameter.name} cannot be a {member}")
    by_type = {type(mark): mark for mark in marks[1:]}
    reads = by_type.get(Reads)
    if reads is not None and reads.kind in ("model", "data", "lines", "pairs"):
        # A hub id or a known name is not a path.
        kinds, singles = ([str if kind is Path else kind for kind in each] for each in (kinds, singles))
    kinds = [kind for kind in dict.fromkeys(kinds) if kind is not os.PathLike and not (kind is str and Path in kinds)]
    kinds = [float] if set(kinds) == {int, float} else kinds
    numbers = set(kinds) == {int, str}
    kinds = [str] if numbers else kinds
    if len(kinds) > 1 or not (kinds or words or elements or nested):
        raise TypeError(f"the option {parameter.name} has the types {kinds}; it may have one besides words")
    metavar = by_type.get(Metavar)
    return Option(
        name=parameter.name,
        help=marks[0],
        default=parameter.default,
        words=tuple(words),
        elements=tuple(elements),
        kind=kinds[0] if kinds else None,
        several=several,
        single=next((kind for kind in (Path, float, str, int, bool) if kind in singles), None),
        range=by_type.get(Range, Range()),
        one_of=by_type.get(OneOf),
        reads=reads,
        metavar_text=None if metavar is None else metavar.text,
        repeated=REPEATED in marks,
        no_effect=NO_EFFECT in marks,
        nested=nested,
        objects=tuple(objects),
        numbers=numbers,
    )


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
