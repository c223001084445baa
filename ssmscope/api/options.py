"""Options of analyses, declared once, in the function's signature: type, range, default and help.

    def selection_heatmap(model: Model, texts: Texts, *,
                          score: Annotated[Literal["retention", "write"], "Score of a token."] = "retention",
                          top: Annotated[int, "Number of tokens named.", Range(1)] = 5) -> SelectionHeatmap: ...

An option is a bool, int, float, str, a path, or words (`Literal`); a sequence of these; a union of words and one of
these (`Literal["mean", "all"] | Sequence[int]`); and None where that is its default. A union may also name types that
only Python code can give: a class of this package (which may be imported under TYPE_CHECKING alone), a list, a sequence
of sequences, a mapping of functions by name. `int | str` (a token's id or its text) takes numbers from plans too. The
first item of `Annotated` is the help; `Range`, `OneOf`, `Reads` and the marks below may follow. `Option.read` converts
values from a command line or a plan, `Option.accept` those from Python code; both raise InputError for a wrong value.
`ssmscope.api.signatures` makes the options of a function.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Annotated, Any, Literal

from ssmscope.errors import InputError, did_you_mean

VALUE_TYPES = (bool, int, float, str, Path, os.PathLike)
"""The types that can be typed on a command line."""
WHOLE_NUMBER = re.compile(r"-?\d{1,18}", re.ASCII)


@dataclass(frozen=True)
class Range:
    """Allowed numbers, from `low` to `high`; `strict` excludes the ends."""

    low: float = -math.inf
    high: float = math.inf
    strict: bool = False

    def __contains__(self, value: float) -> bool:
        return self.low < value < self.high if self.strict else self.low <= value <= self.high

    def describe(self, whole: bool) -> str:
        """Return the range in words: "a whole number from 1 on"."""
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
    """Words that are registered elsewhere: a collection, or a function that returns one, "module:NAME" below
    `ssmscope`, and more words."""

    where: str
    more: tuple[str, ...] = ()

    def words(self) -> list[str]:
        module, _, name = self.where.partition(":")
        found = getattr(importlib.import_module(f"ssmscope.{module}"), name)
        return [*(found() if callable(found) else found), *self.more]


@dataclass(frozen=True)
class Reads:
    """Mark of an option that names something to read, whose content decides the result: a "file", a "folder" (a lens),
    "data", "lines" and "pairs" (a known name or a file, with labelled examples, with text, or with pairs of texts), or
    a "model" (a directory or hub id). `besides` are words that read nothing, such as "-"."""

    kind: Literal["file", "folder", "data", "lines", "pairs", "model"]
    besides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Metavar:
    """Placeholder of the value in the help, where the type alone does not say it."""

    text: str


OBJECTS_OF = ("ssmscope", "torch", "numpy")
"""Packages whose objects Python code can give."""
REPEATED = object()
"""Mark of an option that is given once for each value, because values may contain commas."""
NO_EFFECT = object()
"""Mark of an option that changes no number of the result: a cache, progress."""


asked: ContextVar[Mapping[str, Any]] = ContextVar("asked")
"""Options of the running analysis, as its provenance records them."""
noted: ContextVar[list[str]] = ContextVar("noted")
"""Notes of the running analysis, which its results show."""


def note(said: str) -> None:
    """Note something that the running analysis's results should say, once."""
    notes = noted.get([])
    notes += [said] * (said not in notes)


@dataclass(frozen=True)
class Option:
    """An option of an analysis.

    Attributes:
        words: allowed in place of other values.
        elements: words allowed within a sequence.
        kind: type of other values; None if only words are allowed.
        several: True if a sequence is allowed; `single` is the type of a value in its place.
        nested: True for a mapping of names to mappings: the options of each method of explanation.
        objects: types of values that only Python code can give; the function receives them unchanged.
        numbers: True if a whole number may be given in place of a text.
        setting: True for a number or word of a fit, a search or an estimate, typed as NAME=VALUE.
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
    objects: tuple[type, ...] = ()
    numbers: bool = False
    setting: bool = False

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def is_flag(self) -> bool:
        return self.kind is bool

    @property
    def metavar(self) -> str:
        """Placeholder of the value in the help."""
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
        """Spelling on the command line; a flag also has its negation."""
        if self.setting:
            return ("--set",)
        name = self.name.rstrip("_").replace("_", "-")  # `from` is a keyword in Python, so the parameter is `from_`.
        return (f"--{name}", f"--no-{name}") if self.is_flag else (f"--{name}",)

    def accept(self, value: Any) -> Any:
        """Convert a value from Python code like `read`, but leave instances of `objects`, and tables of data,
        unchanged."""
        if self._is_object(value) or self._is_table(value):
            return value
        if self.several and isinstance(value, list | tuple) and any(map(self._is_object, value)):
            return [part if self._is_object(part) else self._one(part) for part in value]
        return self.read(value)

    def _is_object(self, value: Any) -> bool:
        own = {each.__name__ for each in type(value).__mro__ if each.__module__.partition(".")[0] in OBJECTS_OF}
        return any(one.__name__ in own if issubclass(one, Later) else isinstance(value, one) for one in self.objects)

    def _is_table(self, value: Any) -> bool:
        """Return True for a table in place of the name of data or of a text."""
        if (
            self.reads is None
            or self.reads.besides
            or not (self.reads.kind in ("data", "pairs") or list in self.objects)
        ):
            return False
        from ssmscope.data.rows import is_table

        return is_table(value)

    def read(self, value: Any) -> Any:
        """Convert a value from a command line or a plan to what the function receives. Raise InputError, naming the
        allowed values and the nearest word, if it is not allowed."""
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
        """Convert a value to the option's type; None if that is impossible."""
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
        """Parse options such as "ig.baseline=pad" into values by method and name."""
        if isinstance(value, Mapping):
            if not all(isinstance(each, Mapping) for each in value.values()):
                raise InputError(f"{self.name} is {value!r:.80}; give a mapping of methods to their options")
            return {str(name): dict(each) for name, each in value.items()}
        found: dict[str, dict[str, Any]] = {}
        for each in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(each, str):
                raise InputError(f"{self.name} is {each!r:.80}; write METHOD.NAME=VALUE, such as ig.baseline=pad")
            place, equals, text = each.partition("=")
            method, dot, name = place.partition(".")
            if not (equals and dot and method and name):
                raise InputError(f"{self.name} {each!r:.80}: write METHOD.NAME=VALUE, such as ig.baseline=pad")
            found.setdefault(method.strip(), {})[name.strip().replace("-", "_")] = as_value(text)
        return found

    @property
    def allowed(self) -> str:
        """Allowed values in words: "allowed is a whole number from 1 on"."""
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
        """Return True if the value is the default; a list equals a tuple."""
        alike = (list, tuple)
        both = isinstance(value, alike) and isinstance(self.default, alike)
        return bool([*value] == [*self.default] if both else value == self.default)

    def typed(self, value: Any) -> list[str]:
        """Return the arguments that give this value on a command line."""
        if self.is_flag and not self.setting:
            return [self.flags[0] if value else self.flags[1]]
        if self.nested:
            written = [f"{m}.{name}={_written(v)}" for m, own in value.items() for name, v in own.items()]
            return [part for text in written for part in (self.flags[0], text)]
        items = value if isinstance(value, list | tuple) else [value]
        texts = [_written(item) for item in items]
        if self.setting:
            return ["--set", f"{self.name}={','.join(texts)}"]
        return [part for text in (texts if self.repeated else [",".join(texts)]) for part in (self.flags[0], text)]


def as_value(text: str) -> Any:
    """Convert typed text to a bool or a number where it looks like one."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def plain(value: Any) -> Any:
    """Return an option's value as JSON has it."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


def _written(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Later:
    """Placeholder for a class that a module imports only under TYPE_CHECKING, with its name."""


def chosen_layers(layers: str | Sequence[int], numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the indices of the chosen layers within `numbers`, a model's state-space layers; a word chooses all. Raise
    InputError if a layer does not exist, or is named twice."""
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


# ---- options shared by several analyses
Layers = Annotated[
    Literal["mean", "all"] | Sequence[int], "Average over layers, show all, or show the given ones.", Range(0)
]
Top = Annotated[int, "Number of tokens named.", Range(1)]
Seed = Annotated[int, "Random seed.", Range(0)]
TokensWritten = Annotated[
    int | None, "Also write so many tokens after each text, without and with the edit.", Range(1, 2**17)
]
Limit = Annotated[int | None, "Maximum number of examples, sampled with the seed.", Range(1)]
BatchSize = Annotated[int | None, "Number of examples per batch.", Range(1)]
Progress = Annotated[bool, "Show progress on stderr.", NO_EFFECT]
Cache = Annotated[
    str | Path | None,
    "A file that stores the model's answers so that a killed run continues; by default next to the results.",
    NO_EFFECT,
]
Columns = Annotated[
    Mapping[str, str] | Sequence[str] | None,
    "Columns to read of a file or table, such as text=sentence,label=sentiment.",
    Metavar("NAME=COLUMN,…"),
]
Template = Annotated[str | None, "A prompt that contains {content}, for a language model."]
LabelWords = Annotated[
    Sequence[str] | None, "A language model's answer for each class, in order of the classes.", Metavar("A,B,…")
]
Scoring = Annotated[
    Literal["likelihood", "generated"], "Score a language model by the words' likelihood, or by the text it generates."
]
Piece = Annotated[int, "Number of tokens of a text that run at once.", Range(1)]
Embeddings = Annotated[str | Path | None, "Word vectors, to find words of similar meaning.", Reads("file")]
MaskedLM = Annotated[
    str | Path | None, "A directory or hub id of a masked language model.", Reads("model"), Metavar("NAME")
]
Encoder = Annotated[
    str | Path | None,
    "A directory or hub id of a sentence encoder, which bounds similarity from below; by default no bound.",
    Reads("model"),
    Metavar("NAME"),
]
