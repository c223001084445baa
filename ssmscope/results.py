"""What every analysis returns: numbers with their provenance, which can be shown, saved and read back.

A result is a frozen dataclass that names its kind and owns its views:

    @dataclass(frozen=True)
    class Influence(Result, kind="influence"):
        distances: tuple[int, ...]
        influence: np.ndarray

        def to_frame(self): ...

Fields are plain values, numpy arrays, tuples, mappings or nested dataclasses of these, annotated with types
that exist at run time. Importing this module is quick: pandas, matplotlib and rich are imported by the views
that use them.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import importlib
import importlib.metadata
import io
import json
import math
import os
import re
import types
import typing
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from ssmscope import __version__, register
from ssmscope.errors import InputError, did_you_mean
from ssmscope.writing import publish, read_current

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType

    from ssmscope.show.blocks import Block
    from ssmscope.show.table import Table

R = TypeVar("R", bound="Result")

SUFFIXES = ("json", "csv", "png", "html")
"""How the files of a result end, unless others are asked for."""

FORMATS = (*SUFFIXES, "svg", "pdf", "tex", "md")
"""All that a result can be written as: itself, its numbers, its picture, its page, and its tables for papers."""

TABLE_ROWS = 40
"""How many rows of the table the default terminal, notebook and HTML views show."""

REPORT_ROWS = 100
"""How many of them a report shows."""

READABLE = 10_000
"""Up to how many numbers of an array are written as a list; more are compressed."""

LARGEST = 2**30
"""How many bytes an array has at most that is compressed, so that no small file asks for all memory."""

INFLATION = 1040
"""How many bytes zlib makes at most of one: its longest match, 258 bytes, takes two bits at the least, 1032 : 1."""

DTYPE = re.compile(r"bool|(?:int|uint|float)\d{1,3}|U\d{1,9}", re.ASCII)


@dataclass(frozen=True)
class Result(ABC):
    """The base of all results.

    `provenance` says where the numbers come from: model, architecture, fingerprint, options, seed, versions,
    date (see `record_provenance`). Two results are equal when all that they hold, provenance included, is
    equal; a NaN equals a NaN.
    """

    provenance: Mapping[str, Any]

    kind: ClassVar[str]
    vector: ClassVar[bool] = True
    """Whether its picture is of lines; one with a mark for every token or pixel is kept as pixels."""
    _kinds: ClassVar[dict[str, type[Result]]] = {}

    def __init_subclass__(cls, *, kind: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # @dataclass writes its own comparison and repr unless the class has them; arrays break the former.
        for name in ("__eq__", "__repr__"):
            if name not in cls.__dict__:
                setattr(cls, name, getattr(cls, name))
        if kind is None:
            return
        known = Result._kinds.get(kind)
        if known is not None and _class_path(known) != _class_path(cls):
            raise TypeError(f"the kind {kind!r} of {_class_path(cls)} is already taken by {_class_path(known)}")
        cls.kind = kind
        Result._kinds[kind] = cls

    @abstractmethod
    def to_frame(self) -> DataFrame:
        """All numbers as one tidy table: a row per observation, a column per variable."""

    def figure(self) -> Figure:
        """The picture, made without pyplot: nothing is registered globally and no display is needed. By default what
        `draw` gives in the module `figure` beside the class' own."""
        beside = importlib.import_module(f"{type(self).__module__.rpartition('.')[0]}.figure")
        return beside.draw(self)

    @property
    def model_name(self) -> str:
        """The model, or the models, that it is of."""
        return str(self.provenance.get("model", "a model"))

    @property
    def headline(self) -> str:
        """One line that says what this is and of which model; the title of the page and of the terminal
        view."""
        return f"{self.kind} of {self.provenance.get('model', 'a model')}"

    def verdict(self, at: int = 0) -> str:
        """What the result says of a model, by its number among those that it is of: one line of numbers with their
        intervals, without the model's name. By default the headline without the model."""
        for before in (f" of {self.model_name}: ", f" on {self.model_name}: "):
            if before in self.headline:
                return self.headline.split(before, 1)[1]
        return self.headline

    @property
    def queries_made(self) -> str:
        """How often the model was run, in words; empty where a result does not count it."""
        return ""

    @classmethod
    def compare(cls: type[R], results: Sequence[R], labels: Sequence[Sequence[str]]) -> Table:
        """Results of this kind beside one another in one table, the best marked where that has a meaning.

        Args:
            labels: for each result what each of its models is called.
        """
        from ssmscope.show.table import of_frames

        return of_frames([result.to_frame() for result in results], [", ".join(names) for names in labels])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.headline}>"

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=100, color_system=None, force_jupyter=False)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, type(self)) else NotImplemented

    def blocks(self) -> Iterable[Block]:
        """What is shown of the result, in a terminal, a notebook and a page alike: by default its picture and the
        beginning of its table."""
        from ssmscope.show.table import folded

        yield from self.opening()
        yield dataclasses.replace(folded(self.to_frame(), limit=REPORT_ROWS), brief=TABLE_ROWS)

    def opening(self, *said: str, notes: Iterable[str] = ()) -> Iterable[Block]:
        """The blocks that come first: the title, what is said of the whole, notes, and the picture."""
        from ssmscope.show.blocks import Picture, Prose

        yield Prose(self.headline, "title")
        yield from map(Prose, said)
        yield from (Prose(f"Note: {note}.", "note") for note in notes)
        yield Picture(self.figure, self.headline, vector=self.vector)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        """The terminal view: what `rich.print` and the command line show."""
        from ssmscope.show.terminal import render

        return render(self.blocks(), console)

    def _repr_html_(self) -> str:
        """The notebook view: a fragment of HTML that brings its own style."""
        from ssmscope.show.html import fragment

        return fragment(self.blocks())

    def to_html(self) -> str:
        """A self-contained page in light and dark: nothing is fetched, and no script runs but the one that a kind's
        own view may bring inline."""
        from ssmscope.show.html import page

        return page(self.headline, self._repr_html_(), _flatten(_encode(self.provenance)))

    def to_dict(self) -> dict[str, Any]:
        """Everything as values that JSON knows; `Result.from_dict` reads it back.

        An array becomes its dtype, shape and values; NaN becomes null, an infinity the string "inf" or "-inf".
        An array of more than `READABLE` numbers (up to `LARGEST` bytes) becomes its dtype, shape and "zlib": its
        numbers as little-endian bytes in C order, compressed with zlib, in base64.
        """
        return {"kind": self.kind, "class": _class_path(type(self)), **_encode_fields(self)}

    def to_json(self) -> str:
        """`to_dict` as strict JSON. Floats, float32 included, come back exactly as they were."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def tables(self) -> list[Table]:
        """The tables that the result shows, as `blocks` has them."""
        from ssmscope.show.table import Table

        return [block for block in self.blocks() if isinstance(block, Table)]

    def to_latex(self) -> str:
        """The tables that the result shows as booktabs tabulars, one below the other."""
        from ssmscope.show.markup import to_latex

        return "\n".join(map(to_latex, self.tables()))

    def to_markdown(self) -> str:
        """The tables that the result shows in Markdown, one below the other."""
        from ssmscope.show.markup import to_markdown

        return "\n".join(map(to_markdown, self.tables()))

    def save(self, directory: str | os.PathLike[str], name: str, formats: Sequence[str] = SUFFIXES) -> dict[str, Path]:
        """Write NAME.json, NAME.csv, NAME.png and NAME.html into `directory` and return their paths by
        suffix.

        Args:
            formats: others of `FORMATS`; the JSON, which is the result, is always written. Files of formats that are
                not asked for stay as they are.

        Everything is rendered before anything is written. If one fails, the directory stays as it was; after a kill
        at any moment it holds no files of two results, and `Result.load` reads the old one or the new one (see
        `ssmscope.writing.publish`). Raises InputError if the name, a format or the directory cannot be used.
        """
        return save_together({name: self}, directory, formats)[name]

    @classmethod
    def load(cls: type[R], path: str | os.PathLike[str]) -> R:
        """Read back the JSON that `save` wrote, as the class that wrote it.

        Raises InputError if the file cannot be read, is no result, or is of another kind than the class it is
        asked of (`Result.load` takes all).
        """
        where = os.fspath(path)
        try:
            document = json.loads(read_current(Path(path)))
        except OSError as error:
            raise InputError(f"cannot read {where}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:  # undecodable text or JSON, or nested too deeply
            raise InputError(f"{where} is no result: expected the .json file that save() wrote") from error
        try:
            return cls.from_dict(document)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error

    @classmethod
    def from_dict(cls: type[R], document: Mapping[str, Any]) -> R:
        """The result that `to_dict` described. Raises InputError if it does not describe one of this
        class."""
        if not isinstance(document, Mapping) or not isinstance(document.get("kind"), str):
            raise InputError("not a result: expected the .json file that save() wrote, with a 'kind'")
        kind = document["kind"]
        if kind not in Result._kinds:
            home = register.home_of(kind)
            if home is not None:
                importlib.import_module(home)
        found = Result._kinds.get(kind)
        if found is None:
            known = sorted({*register.kinds(), *Result._kinds})
            raise InputError(
                f"unknown kind of result {kind!r:.80}; known are {', '.join(known)}; import the module that defines it"
                f"{did_you_mean(kind, known)}"
            )
        if not issubclass(found, cls):
            raise InputError(f"a result of kind {kind!r} is no {cls.__name__}; Result.load reads every kind")
        try:
            made = _decode_fields(document, found)
            _flatten(_encode(made.provenance))
            return made
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
            told = "nested too deeply" if isinstance(error, RecursionError) else error
            raise InputError(f"a damaged result of kind {kind!r}: {told}") from error

    def _png(self) -> bytes:
        return self._drawn("png")

    def _drawn(self, suffix: str) -> bytes:
        from ssmscope.show.pictures import drawn

        return drawn(self.figure(), suffix)

    def _written(self, suffix: str) -> bytes:
        """The result in one of `FORMATS`."""
        if suffix in ("png", "svg", "pdf"):
            return self._png() if suffix == "png" else self._drawn(suffix)
        text = {
            "json": self.to_json,
            "csv": lambda: self.to_frame().to_csv(index=False, lineterminator="\n"),
            "html": self.to_html,
            "tex": self.to_latex,
            "md": self.to_markdown,
        }[suffix]()
        return text.encode(errors="strict" if suffix == "json" else "backslashreplace")


def checked_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """The formats that are written, JSON among them. Raises InputError for one that is none of `FORMATS`."""
    for each in formats:
        if each not in FORMATS:
            raise InputError(f"unknown format {each!r}; allowed are {', '.join(FORMATS)}{did_you_mean(each, FORMATS)}")
    return tuple(each for each in FORMATS if each == "json" or each in formats)


def save_together(
    results: Mapping[str, Result], directory: str | os.PathLike[str], formats: Sequence[str] = SUFFIXES
) -> dict[str, dict[str, Path]]:
    """As `Result.save`, several results under their names, all or none of them; their paths by name and suffix."""
    formats = checked_formats(formats)
    contents: dict[str, bytes] = {}
    for name, result in results.items():
        if not name or name in (".", "..") or Path(name).name != name:
            raise InputError(f"{name!r} is no file name; give a plain name without a folder, such as {result.kind!r}")
        contents |= {f"{name}.{suffix}": result._written(suffix) for suffix in formats}
    folder = Path(directory)
    blocked = next((folder / file for file in contents if os.path.isdir(folder / file)), None)
    if blocked is not None:
        raise InputError(f"cannot write {blocked}: a folder of that name is in the way")
    try:
        publish(folder, next(iter(results)), contents)
    except OSError as error:
        raise InputError(f"cannot write to {os.fspath(directory)}: {error.strerror or error}") from error
    return {name: {suffix: folder / f"{name}.{suffix}" for suffix in formats} for name in results}


def record_provenance(
    source: Mapping[str, Any], *, options: Mapping[str, Any], seed: int | None = None, data: Any = None
) -> dict[str, Any]:
    """The provenance of a result: the model's `source` (as in `Trace.source`), and what was asked of it when; of
    labelled `data` also their origin."""
    origin = {}
    if data is not None:
        about = {"name": data.name, "split": data.split, "fingerprint": data.fingerprint, "examples": len(data)}
        origin = {"data": about}
    return {
        **source,
        "options": dict(options),
        "seed": seed,
        "versions": {
            "ssmscope": __version__,
            "torch": _version("torch"),
            "transformers": _version("transformers"),
        },
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **origin,
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _class_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _encode(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufU":
            raise TypeError(f"a result cannot hold an array of {value.dtype}")
        if value.size > READABLE and value.dtype.kind != "U" and value.nbytes <= LARGEST:
            if value.dtype.kind == "f":  # every NaN is written alike, so that results that hold NaN can be equal
                value = np.where(np.isnan(value), np.array(np.nan, value.dtype), value)
            numbers = value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
            packed = base64.b64encode(zlib.compress(numbers, 6)).decode()
            return {"dtype": value.dtype.name, "shape": list(value.shape), "zlib": packed}
        name = f"U{value.dtype.itemsize // 4}" if value.dtype.kind == "U" else value.dtype.name
        return {"dtype": name, "shape": list(value.shape), "values": _encode(value.tolist())}
    if isinstance(value, np.generic):
        return _encode(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _encode_fields(value)
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_encode(item) for item in value]
    raise TypeError(f"a result cannot hold a {type(value).__name__}")


def _encode_fields(record: Any) -> dict[str, Any]:
    return {field.name: _encode(getattr(record, field.name)) for field in dataclasses.fields(record)}


def _decode(value: Any, hint: Any) -> Any:
    """The value of type `hint` that `_encode` turned into `value`."""
    if isinstance(value, Mapping) and value.keys() == {"dtype", "shape", "values"}:
        return _decode_array(**value)
    if isinstance(value, Mapping) and value.keys() == {"dtype", "shape", "zlib"}:
        return _unpack_array(**value)
    if hint is Any:
        return value
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return None if value is None and type(None) in args else _decode(value, _fitting(value, args))
    if hint is float:
        return math.nan if value is None else float(value)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _decode_fields(value, hint)
    if origin is tuple and isinstance(value, list):
        hints = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(hints) != len(value):
            raise ValueError(f"expected {len(hints)} values, not {len(value)}")
        return tuple(map(_decode, value, hints))
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {key: _decode(item, args[1]) for key, item in value.items()}
    if isinstance(origin, type) and issubclass(origin, Sequence) and isinstance(value, list):
        return [_decode(item, args[0]) for item in value]
    expected = origin or hint
    if isinstance(expected, type) and not isinstance(value, expected):
        raise ValueError(f"expected {expected.__name__}, not {value!r:.60}")
    return value


def _decode_array(dtype: Any, shape: Any, values: Any) -> np.ndarray:
    kind = _decode_dtype(dtype)
    if kind.kind == "U":
        flat = np.array(values, dtype=object)
        written = sum(map(len, flat.ravel()))
        if kind.itemsize * flat.size > INFLATION * (written + flat.size):
            raise ValueError(f"{written} characters cannot be read as an array of {dtype}")
        return flat.astype(kind).reshape(shape)
    flat = np.array(values, dtype=object if kind.kind == "f" else kind)
    return flat.astype(np.float64 if kind.kind == "f" else kind).astype(kind).reshape(shape)


def _decode_dtype(dtype: Any) -> np.dtype:
    if isinstance(dtype, str) and DTYPE.fullmatch(dtype):
        return np.dtype(dtype)
    raise ValueError(f"expected the name of a dtype of numbers or text, not {dtype!r:.60}")


def _unpack_array(dtype: Any, shape: Any, zlib: Any) -> np.ndarray:  # named as in the document
    """The array that was compressed. No more is inflated than its shape asks for.

    Raises:
        ValueError: the shape, the dtype or the bytes are no array's, or do not belong together.
    """
    kind = _decode_dtype(dtype)
    if kind.kind == "U":
        raise ValueError(f"expected a compressed array of numbers, not of {dtype}")
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"expected the sizes of an array, not {shape!r:.60}")
    if not isinstance(zlib, str):
        raise ValueError(f"expected compressed numbers, not {zlib!r:.60}")
    size = math.prod(shape) * kind.itemsize
    packed = base64.b64decode(zlib, validate=True)
    if size > min(LARGEST, INFLATION * len(packed)):
        raise ValueError(f"{len(packed)} compressed bytes cannot be read as an array of shape {shape!r:.60}")
    numbers = _inflate(packed, size)
    if len(numbers) != size:
        found = f"only {len(numbers)}" if len(numbers) < size else "more"
        raise ValueError(f"expected {size} bytes for an array of shape {shape!r:.60}, not {found}")
    return np.frombuffer(numbers, kind.newbyteorder("<")).astype(kind).reshape(shape)


def _inflate(packed: bytes, size: int) -> bytes:
    """The uncompressed bytes, and of more than `size` of them only `size` + 1."""
    stream = zlib.decompressobj()
    try:
        numbers = stream.decompress(packed, size + 1)
    except zlib.error as error:
        raise ValueError(f"damaged compressed numbers: {error}") from error
    if len(numbers) <= size and (not stream.eof or stream.unused_data):
        raise ValueError("damaged compressed numbers: cut off, or followed by something else")
    return numbers


def _decode_fields(document: Any, cls: type[Any]) -> Any:
    if not isinstance(document, Mapping):
        raise ValueError(f"expected the fields of {cls.__name__}, not {document!r:.60}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = document.keys() - fields.keys() - {"kind", "class"}
    if unknown:
        raise ValueError(f"{cls.__name__} has no {', '.join(sorted(unknown))}")
    missing = [
        name
        for name, field in fields.items()
        if name not in document and field.default is field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{cls.__name__} lacks {', '.join(missing)}")
    return cls(**{name: _decode(document[name], hints[name]) for name in fields if name in document})


def _fitting(value: Any, options: Sequence[Any]) -> Any:
    """The first of a union's types that `_encode` shows as it shows `value`."""
    for option in options:
        origin = typing.get_origin(option) or option
        if not isinstance(origin, type):
            continue
        if isinstance(value, list):
            fits = issubclass(origin, Sequence) and origin is not str
        elif isinstance(value, Mapping):
            fits = issubclass(origin, Mapping) or dataclasses.is_dataclass(origin)
        elif origin is float:
            fits = value is None or isinstance(value, int | float) or value in ("inf", "-inf")
        else:
            fits = isinstance(value, origin)
        if fits:
            return option
    return Any


def _flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [row for key, item in value.items() for row in _flatten(item, f"{prefix} {key}".strip())]
    return [(prefix, "none" if value is None else value if isinstance(value, str) else json.dumps(value))]
