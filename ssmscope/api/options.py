"""The options of an analysis, read off its function's signature: types, ranges, defaults and help have one home.

    def selection_heatmap(model: Model, texts: Texts, *,
                          score: Annotated[Literal["retention", "write"], "what of a token is shown"] = "retention",
                          top: Annotated[int, "how many tokens are named", Range(1)] = 5) -> SelectionHeatmap: ...

An option is a bool, int, float, str, a path, or words (`Literal`); a sequence of these; one or the other
(`Literal["mean", "all"] | Sequence[int]`); and None where that is its default. What only Python code can give stands
beside what can be typed: a class of this package (which may be imported under TYPE_CHECKING alone), a list, a sequence
of sequences, a mapping of functions by name. A number beside a text (`int | str`: a token's id or its text) may stand
in a plan too. Its `Annotated` says the help, and then `Range`, `OneOf`, `Reads` or the marks below. `Option.read` takes
what somebody typed and what stands in a plan, `Option.accept` what Python code gives; each gives the value that the
function gets, or refuses it.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import math
import os
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, Literal

from ssmscope.errors import InputError, did_you_mean

KINDS = (bool, int, float, str, Path, os.PathLike)
"""The types of what can be typed."""
WHOLE_NUMBER = re.compile(r"-?\d{1,18}", re.ASCII)


@dataclass(frozen=True)
class Range:
    """The numbers that are allowed: from `low` to `high`; `strict` leaves the ends out."""

    low: float = -math.inf
    high: float = math.inf
    strict: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low < value < self.high if self.strict else self.low <= value <= self.high

    def describe(self, whole: bool) -> str:
        """ "a whole number from 1 on"."""
        kind = "a whole number" if whole else "a number"
        low, high = (f"{end:,.12g}" for end in (self.low, self.high))
        if self.strict:
            ends = f" above {low}" * math.isfinite(self.low) + " and" * math.isfinite(self.low + self.high)
            return kind + ends + f" below {high}" * math.isfinite(self.high)
        if math.isfinite(self.high):
            return f"{kind} from {low} to {high}" if math.isfinite(self.low) else kind
        return f"{kind} from {low} on" if math.isfinite(self.low) else kind


@dataclass(frozen=True)
class OneOf:
    """Words that are registered elsewhere: a collection of names as "module:NAME" below `ssmscope`, and more words."""

    where: str
    more: tuple[str, ...] = ()

    def words(self) -> list[str]:
        module, _, name = self.where.partition(":")
        return [*getattr(importlib.import_module(f"ssmscope.{module}"), name), *self.more]


@dataclass(frozen=True)
class Reads:
    """The option names what is read: its content decides the result.

    Attributes:
        kind: "file", "folder" (a lens), "data" and "lines" (a known name or a file, of labelled examples or of text),
            "model" (a directory or hub id).
        besides: words that stand for something else and read nothing.
    """

    kind: Literal["file", "folder", "data", "lines", "model"]
    besides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metavar:
    """What stands for the value in the help, where the type does not say it."""

    text: str


REPEATED = object()
"""The option is given once for each value, since its values may have commas in them."""
NO_EFFECT = object()
"""The option changes no number of the result: a cache, progress."""


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        words: that are allowed in place of other values.
        elements: words that are allowed in a sequence.
        kind: the type of other values; None where there are words alone.
        several: whether a sequence is allowed; `single` the type of one value that is, beside it.
    """

    name: str
    help: str
    default: Any
    words: tuple[str, ...]
    elements: tuple[str, ...]
    kind: type | None
    several: bool
    single: type | None
    range: Range
    one_of: OneOf | None = None
    reads: Reads | None = None
    metavar_text: str | None = None
    repeated: bool = False
    no_effect: bool = False
    nested: bool = False
    """A mapping of names to mappings: the options of each method of explanation."""
    objects: tuple[type, ...] = ()
    """The types of values that only Python code can give: the function gets them as they are."""
    numbers: bool = False
    """A whole number may stand for a text."""

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    @property
    def metavar(self) -> str:
        """What stands for the value in the help."""
        if self.metavar_text is not None:
            return self.metavar_text
        if self.nested:
            return "METHOD.NAME=VALUE"
        names: dict[Any, str] = {int: "N", float: "X", str: "TEXT", Path: "FILE"}
        name = "NAME" if self.one_of is not None or self.elements else names.get(self.kind, "")
        listed = f"{name},…" if name and self.several and not self.repeated else name
        return "|".join(filter(None, [*self.words, listed]))

    @property
    def flags(self) -> tuple[str, ...]:
        """How it is typed."""
        name = self.name.rstrip("_").replace("_", "-")  # from_, since Python has a word of its own
        return (f"--{name}", f"--no-{name}") if self.is_flag else (f"--{name}",)

    def accept(self, value: Any) -> Any:
        """As `read`, of what Python code gives: what is of `objects` stays as it is, alone or among others.

        Raises:
            InputError: as `read`.
        """
        if self._is_object(value):
            return value
        if self.several and isinstance(value, list | tuple) and any(map(self._is_object, value)):
            return [part if self._is_object(part) else self._one(part) for part in value]
        return self.read(value)

    def _is_object(self, value: Any) -> bool:
        own = {each.__name__ for each in type(value).__mro__ if each.__module__.startswith("ssmscope.")}
        return any(
            each.__name__ in own if issubclass(each, Later) else isinstance(value, each) for each in self.objects
        )

    def read(self, value: Any) -> Any:
        """The value that the function gets.

        Raises:
            InputError: naming what was given, what is allowed and the nearest word.
        """
        if value is None:
            if self.required or self.default is not None:
                raise InputError(f"{self.name} is not given; {self.allowed}")
            return None
        if self.nested:
            return self._nested(value)
        if self.is_flag:
            found = {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value
            if not isinstance(found, bool):
                raise InputError(f"{self.name} is {value!r:.80}; write true or false")
            return found
        if isinstance(value, str) and value in self.words:
            return value
        if not self.several:
            return self._one(value)
        listed = hasattr(value, "__iter__") and not isinstance(value, str | bytes | Mapping)
        parts = list(value) if listed else [value]
        if isinstance(value, str) and not self.repeated:
            parts = [part.strip() for part in value.split(",")]
        if self.single is not None and len(parts) == 1 and not listed:
            return replace(self, kind=self.single, several=False)._one(parts[0])
        if not parts:
            raise InputError(f"{self.name} is empty; {self.allowed}")
        return [self._one(part) for part in parts]

    def _one(self, value: Any) -> Any:
        known = self.one_of.words() if self.one_of is not None else self.elements or self.words
        if self.kind is None or self.one_of is not None:
            if isinstance(value, str) and value in known:
                return value
            of = f"unknown among {self.name}: " if self.several else f"unknown {self.name} "
            raise InputError(f"{of}{value!r:.80}; allowed are {', '.join(known)}{did_you_mean(str(value), known)}")
        if isinstance(value, str) and value in self.elements:
            return value
        found = self._typed(value)
        if found is None:
            near = did_you_mean(value, self.words) if isinstance(value, str) else ""
            raise InputError(f"{self.name} is {value!r:.80}; {self.allowed}{near}")
        if self.kind in (int, float) and found not in self.range:
            raise InputError(f"{self.name} is {found!r}; {self.allowed}")
        return found

    def _typed(self, value: Any) -> Any:
        """The value as the option's type; None where it is none."""
        if self.numbers and not isinstance(value, bool) and isinstance(value, Integral):
            return value
        if self.kind is str:
            named = os.fspath(value) if self.reads is not None and isinstance(value, os.PathLike) else value
            return named if isinstance(named, str) else None
        if self.kind is Path:
            return Path(value) if isinstance(value, str | os.PathLike) else None
        if isinstance(value, bool):
            return None
        if self.kind is int:
            if isinstance(value, str):
                return int(value) if WHOLE_NUMBER.fullmatch(value.strip()) else None
            return int(value) if hasattr(value, "__index__") else None
        try:
            found = float(value) if isinstance(value, str) or hasattr(value, "__float__") else math.nan
        except ValueError:
            return None
        return found if math.isfinite(found) else None

    def _nested(self, value: Any) -> dict[str, dict[str, Any]]:
        """The options "ig.baseline=pad" by method and name; numbers and yes or no as such."""
        if isinstance(value, Mapping):
            if not all(isinstance(each, Mapping) for each in value.values()):
                raise InputError(f"{self.name} is {value!r:.80}; give a mapping of methods to their options")
            return {str(name): dict(each) for name, each in value.items()}
        found: dict[str, dict[str, Any]] = {}
        for each in [value] if isinstance(value, str) else value:
            place, equals, text = each.partition("=")
            method, dot, name = place.partition(".")
            if not (equals and dot and method and name):
                raise InputError(f"{self.name} {each!r:.80}: write METHOD.NAME=VALUE, such as ig.baseline=pad")
            found.setdefault(method.strip(), {})[name.strip().replace("-", "_")] = as_value(text)
        return found

    @property
    def allowed(self) -> str:
        """ "allowed is a whole number from 1 on", "allowed are mean, all, or whole numbers from 0 on"."""
        if self.one_of is not None:
            return f"allowed are {', '.join(self.one_of.words())}"
        kinds = {int: self.range.describe(True), float: self.range.describe(False), str: "a text"}
        kinds[Path] = "a directory" if self.reads is not None and self.reads.kind == "folder" else "a file"
        parts = [*self.words, *self.elements]
        if self.kind is not None:
            one = kinds.get(self.kind, "true or false")
            parts.append(f"{one}, or several" if self.several else one)
        listed = f"{', '.join(parts[:-1])} or {parts[-1]}" if len(parts) > 1 else parts[0]
        return f"allowed {'are' if len(parts) > 1 or self.several else 'is'} {listed}"

    def is_default(self, value: Any) -> bool:
        """Whether this is the default, whatever kind of sequence holds it."""
        alike = (list, tuple)
        both = isinstance(value, alike) and isinstance(self.default, alike)
        return bool([*value] == [*self.default] if both else value == self.default)

    def typed(self, value: Any) -> list[str]:
        """As it is typed on a command line."""
        if self.is_flag:
            return [self.flags[0] if value else self.flags[1]]
        if self.nested:
            written = [f"{m}.{name}={_written(v)}" for m, own in value.items() for name, v in own.items()]
            return [part for text in written for part in (self.flags[0], text)]
        items = value if isinstance(value, list | tuple) else [value]
        texts = [_written(item) for item in items]
        return [part for text in (texts if self.repeated else [",".join(texts)]) for part in (self.flags[0], text)]


def as_value(text: str) -> Any:
    """What somebody typed as a bool, a number, or the text that it is."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Later:
    """Stands for a class that a module imports under TYPE_CHECKING alone, by its name."""


class Names(dict[str, Any]):
    """Names of a module, those under TYPE_CHECKING as `Later`."""

    def __missing__(self, name: str) -> type:
        return type(name, (Later,), {})


def options_of(function: Callable[..., Any], *, without: Collection[str] = ()) -> dict[str, Option]:
    """The keyword-only parameters of a function as options, by name.

    The help of one without `Annotated` is its entry under `Args:` in the docstring; its texts and paths are names. Only
    the options' annotations are evaluated, so that a module need not import what its other parameters are.

    Raises:
        TypeError: a parameter without help, or of a type that is no option's.
    """
    names = Names(
        {
            "Annotated": Annotated,
            "Literal": Literal,
            **vars(builtins),
            **getattr(inspect.unwrap(function), "__globals__", {}),
        }
    )
    helps, found = dict(documented(function)), {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.name not in without:
            hint = parameter.annotation
            hint = eval(hint, {}, names) if isinstance(hint, str) else hint  # noqa: S307  # the function's own annotation
            if not hasattr(hint, "__metadata__") and parameter.name in helps:
                kinds = tuple(str if kind is Path else kind for kind in _members(hint))
                marks = (Metavar("NAME"),) if str in kinds else ()
                hint = Annotated[(typing.Union[kinds], helps[parameter.name], *marks)]  # noqa: UP007
            found[parameter.name] = _option(parameter, hint)
    return found


def documented(function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """The name and the text of every entry under `Args:` in a docstring."""
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
    words: list[str] = []
    elements: list[str] = []
    kinds: list[type] = []
    several = nested = False
    singles: list[type] = []
    objects: list[type] = []
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
                elif each in KINDS:
                    kinds.append(each)
                else:
                    objects.append(each)
        elif member in KINDS:
            singles.append(member)
            kinds.append(member)
        elif isinstance(member, type):
            objects.append(member)
        else:
            raise TypeError(f"the option {parameter.name} cannot be a {member}")
    by_type = {type(mark): mark for mark in marks[1:]}
    reads = by_type.get(Reads)
    if reads is not None and reads.kind in ("model", "data", "lines"):
        # a hub id or a known name is no path
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


def chosen_layers(layers: str | Sequence[int], numbers: Sequence[int]) -> tuple[int, ...]:
    """The places of the layers that an option names among `numbers`, a model's state-space layers: all for a word.

    Raises:
        InputError: a layer that is not there, or one that is named twice.
    """
    if isinstance(layers, str):
        return tuple(range(len(numbers)))
    if list(numbers) == list(range(len(numbers))):
        allowed = f"this model has the layers 0 to {len(numbers) - 1}"
    else:
        allowed = f"this model's state-space layers are {', '.join(map(str, numbers))}"
    absent = next((layer for layer in layers if layer not in numbers), None)
    if absent is not None:
        raise InputError(f"there is no layer {absent}; {allowed}")
    if len(set(layers)) < len(layers):
        raise InputError(f"layers is {list(layers)}; name each once; {allowed}")
    return tuple(map(list(numbers).index, layers))


# ---- options that several analyses have

Layers = Annotated[
    Literal["mean", "all"] | Sequence[int], "Average all layers; also show all, or those given.", Range(0)
]
Top = Annotated[int, "How many tokens are named.", Range(1)]
Seed = Annotated[int, "Of everything that is drawn.", Range(0)]
Limit = Annotated[int | None, "Only so many examples, drawn by the seed.", Range(1)]
BatchSize = Annotated[int | None, "How many examples are run together.", Range(1)]
Progress = Annotated[bool, "Say on stderr how far it is.", NO_EFFECT]
Cache = Annotated[
    str | Path | None,
    "A file that keeps the model's answers, from which a killed run continues; else beside the results.",
    NO_EFFECT,
]
Template = Annotated[str | None, "A prompt with {content} in it, for a language model."]
LabelWords = Annotated[
    Sequence[str] | None, "What a language model answers for each class, in their order.", Metavar("A,B,…")
]
Scoring = Annotated[
    Literal["likelihood", "generated"], "Of a language model: the likelihood of the words, or what it says."
]
Piece = Annotated[int, "How many tokens of a text run at once.", Range(1)]
Embeddings = Annotated[str | Path | None, "Word vectors, for neighbours in meaning.", Reads("file")]
MaskedLM = Annotated[
    str | Path | None, "A directory or hub id of a masked language model.", Reads("model"), Metavar("NAME")
]
Encoder = Annotated[
    str | Path | None,
    "A directory or hub id of a sentence encoder, for the least similarity; else that limit is left out.",
    Reads("model"),
    Metavar("NAME"),
]
