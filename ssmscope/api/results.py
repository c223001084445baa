"""Results of analyses: numbers with their provenance, which can be shown, saved and read back.

A result is a frozen dataclass that names its kind and owns its views:

    @dataclass(frozen=True)
    class Influence(Result, kind="influence"):
        distances: tuple[int, ...]
        influence: np.ndarray

        def to_frame(self): ...

Fields are plain values, numpy arrays, tuples, mappings or nested dataclasses of these, annotated with types
that exist at run time. The views import pandas, matplotlib and rich themselves, so that this module imports quickly.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import io
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from markupsafe import Markup
from ssmscope import outline
from ssmscope.api.analyses import result_homes
from ssmscope.api.jsonable import decode_fields, encode, encode_fields
from ssmscope.api.writing import publish, read_current
from ssmscope.errors import InputError, check_path, did_you_mean
from ssmscope.render.steps import drawn_in_steps, worded

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType
    from ssmscope.api.scores import Changed, Score
    from ssmscope.render.blocks import Block
    from ssmscope.render.figure import Frame
    from ssmscope.render.table import Table

R = TypeVar("R", bound="Result")
T = TypeVar("T")

SUFFIXES = ("json", "csv", "png", "html")
"""Default formats of a result's files, which are also their suffixes."""

FORMATS = (*SUFFIXES, "svg", "pdf", "tex", "md")
"""All formats: the result itself, its numbers, its picture, its page, and its tables for papers."""

TABLE_ROWS = 40
"""Maximum rows of a table in the default terminal, notebook and HTML views."""

REPORT_ROWS = 100
"""Maximum rows of a table in a report."""


@dataclass(frozen=True)
class Result(ABC):
    """Base class of all results.

    `provenance` says where the numbers come from: model, architecture, fingerprint, options, seed, versions, date (see
    `ssmscope.api.provenance`). Two results are equal if all their fields, provenance included, are; NaN equals NaN.
    """

    provenance: Mapping[str, Any]

    kind: ClassVar[str]
    vector: ClassVar[bool] = True
    """True if the picture may be saved as vector graphics; False for one with a mark per token or pixel."""
    drawn_by: ClassVar[str] = "figure"
    """Module of the class's package whose `draw(result, frame)` makes the picture."""
    failed: ClassVar[bool] = False
    """True for a check that found what it looks for: the command line exits with 1, for continuous integration."""
    _kinds: ClassVar[dict[str, type[Result]]] = {}

    def __init_subclass__(cls, *, kind: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # @dataclass writes its own comparison and repr unless the class has them, and arrays break the comparison.
        for name in ("__eq__", "__repr__"):
            if name not in cls.__dict__:
                setattr(cls, name, getattr(cls, name))
        if "to_frame" in cls.__dict__:
            cls.to_frame = _with_model(cls.__dict__["to_frame"])  # type: ignore[method-assign]
        for name in ("blocks", "verdict"):
            if name in cls.__dict__:
                setattr(cls, name, worded(cls.__dict__[name]))
        if isinstance(own := cls.__dict__.get("headline"), property) and own.fget is not None:
            cls.headline = property(worded(own.fget))  # type: ignore[method-assign,assignment]
        if kind is None:
            return
        known = Result._kinds.get(kind)
        if known is not None and _class_path(known) != _class_path(cls):
            raise TypeError(f"the kind {kind!r} of {_class_path(cls)} is already taken by {_class_path(known)}")
        cls.kind = kind
        Result._kinds[kind] = cls

    @abstractmethod
    def to_frame(self) -> DataFrame:
        """Return all numbers as one tidy table: a row per observation, a column per variable.

        A first column `model` is added to tables of subclasses that have none.
        """

    def figure(
        self,
        *,
        ax: Axes | SubFigure | None = None,
        title: str | None = None,
        size: float | tuple[float, float] | None = None,
        **options: Any,
    ) -> Figure:
        """Draw the picture without pyplot: nothing is registered globally and no display is needed.

        Args:
            ax: matplotlib axes to draw into, whose place several panels take, or part of a constrained figure.
            title: text in place of the picture's own title; "" for none, and no line below it.
            size: width, or width and height, in inches, by default as large as the content needs. Letters keep their
                size: at 3.3 inches, a column's width, they are 8 points.
            options: of a kind's own picture, such as `start`, the number of the first text.

        Raises:
            InputError: the size or an option is invalid, or the picture does not fit `ax`.
        """
        from ssmscope.render.figure import Frame, framed

        with framed(Frame(ax, title, size)) as frame:
            return drawn_in_steps(self, ax, title, lambda: self.draw(frame, **options))

    def draw(self, frame: Frame, **options: Any) -> Figure:
        """Draw the picture on a `Sheet` of this frame: by default by `draw(result, frame)` of the module `drawn_by`."""
        package = type(self).__module__.rpartition(".")[0]
        return importlib.import_module(f"{package}.{self.drawn_by}").draw(self, frame, **options)

    @property
    def model_name(self) -> str:
        """Name of the model or models."""
        return str(self.provenance.get("model", "a model"))

    @property
    def headline(self) -> str:
        """Title of the page and of the terminal view: the finding and its model in one line."""
        return f"{self.kind} of {self.model_name}"

    def verdict(self, at: int = 0) -> str:
        """Return the finding for one model in one line, numbers with intervals, without the model's name.

        By default this is the headline without the model.

        Args:
            at: number of the model among those of the result.
        """
        for before in (f" of {self.model_name}: ", f" on {self.model_name}: "):
            if before in self.headline:
                return self.headline.split(before, 1)[1]
        return self.headline

    def sketch(self, at: int = 0) -> Markup:
        """Return the small picture of model number `at` for a report's summary; by default none."""
        return Markup("")

    def card_scores(self, models: Sequence[str] = ()) -> Iterator[Score]:
        """Yield the numbers that scorecards, gates and model cards read (`ssmscope.api.scores`); by default none.

        Args:
            models: names of the result's models as shown, by default its own.
        """
        return iter(())

    def changed_answers(self, texts: Callable[[], Sequence[str]]) -> Iterator[Changed]:
        """Yield the right answers that an attack changes, each once; by default none. `texts` returns the texts of the
        data, read again; none if they cannot be."""
        return iter(())

    @property
    def queries_made(self) -> str:
        """Number of model runs in words; empty if the result does not count them."""
        return ""

    @classmethod
    def compare(cls: type[R], results: Sequence[R], labels: Sequence[Sequence[str]]) -> Table:
        """Compare results of this kind in one table, with the best marked where that is meaningful.

        Args:
            labels: names of the models of each result.
        """
        from ssmscope.render.table import frames_table

        return frames_table([result.to_frame() for result in results], [", ".join(names) for names in labels])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.headline}>"

    def __str__(self) -> str:
        return self.to_text()

    def to_text(self, *, full: bool = False) -> str:
        """Return the terminal's view without colours, 100 characters wide: the finding and the first rows.

        Args:
            full: with definitions, and with more rows of long tables.
        """
        from rich.console import Console, Group

        console = Console(file=io.StringIO(), width=100, color_system=None, force_jupyter=False)
        with console.capture() as captured:
            console.print(Group(*self.in_terminal(console, full=full)))
        return captured.get()

    def in_terminal(
        self, console: Console, *, full: bool = False, more: str = "to_text(full=True)"
    ) -> Iterable[RenderableType]:
        """Return what a console shows: everything, or the first lines and how to see `more`."""
        from ssmscope.render.brief import brief
        from ssmscope.render.terminal import render

        return render(self.blocks(), console) if full else brief(self.blocks(), console, more)

    def __eq__(self, other: object) -> bool:
        return self.to_dict() == other.to_dict() if isinstance(other, type(self)) else NotImplemented

    def blocks(self) -> Iterable[Block]:
        """Yield the blocks that a terminal, a notebook and a page show: by default picture and head of the table."""
        from ssmscope.render.table import frame_table

        yield from self.opening()
        yield dataclasses.replace(frame_table(self.to_frame(), limit=REPORT_ROWS), brief=TABLE_ROWS)

    def opening(self, *said: str, notes: Iterable[str] = ()) -> Iterable[Block]:
        """Yield the first blocks: the title, paragraphs, notes, and the picture."""
        from ssmscope.render.blocks import Picture, Prose

        yield Prose(self.headline, "title")
        yield from map(Prose, said)
        yield from (Prose(f"Note: {note}.", "note") for note in (*notes, *self.provenance.get("notes", ())))
        yield Picture(self.figure, self.headline, vector=self.vector)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        return self.in_terminal(console)

    def _repr_html_(self) -> str:
        """Notebook view: a fragment of HTML with its own style, and a folded tree of the fields."""
        from ssmscope.render.html import fragment

        return fragment(self.blocks()) + outline.titled_tree("fields", self)

    def widget(self) -> Any:
        """Return a notebook widget to choose layer, head and tokens in; this result where anywidget is not installed.
        Raises InputError if the result has no coloured tokens."""
        if importlib.util.find_spec("anywidget") is None:
            return self
        widget = importlib.import_module("ssmscope.render.widget")
        return widget.token_widget(self.blocks(), self._repr_html_)

    def to_html(self) -> str:
        """Return a self-contained page in light and dark.

        Nothing is fetched, and no script runs except inline ones of a kind's own views.
        """
        from ssmscope.render.html import fragment, page

        return page(self.headline, fragment(self.blocks()), _flatten(encode(self.provenance)))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values, which `Result.from_dict` reads back.

        An array becomes its dtype, shape and values; NaN becomes null, an infinity the string "inf" or "-inf". An array
        of more than `jsonable.MAX_LISTED_NUMBERS` numbers (up to `MAX_COMPRESSED_BYTES`) becomes its dtype, shape and
        "zlib": its numbers as little-endian bytes in C order, compressed with zlib, in base64.
        """
        return {"kind": self.kind, "class": _class_path(type(self)), **encode_fields(self)}

    def to_json(self) -> str:
        """Return `to_dict` as strict JSON, which preserves floats, float32 included, exactly."""
        return json.dumps(self.to_dict(), allow_nan=False)

    def tables(self) -> list[Table]:
        """Return the tables among the result's `blocks`."""
        from ssmscope.render.table import Table

        return [block for block in self.blocks() if isinstance(block, Table)]

    def to_latex(self) -> str:
        """Return the result's tables as booktabs tabulars, one below the other."""
        from ssmscope.render.markup import to_latex

        return "\n".join(map(to_latex, self.tables()))

    def to_markdown(self) -> str:
        """Return the result's tables in Markdown, one below the other."""
        from ssmscope.render.markup import to_markdown

        return "\n".join(map(to_markdown, self.tables()))

    def save(self, directory: str | os.PathLike[str], name: str, formats: Sequence[str] = SUFFIXES) -> dict[str, Path]:
        """Write NAME.json, NAME.csv, NAME.png and NAME.html into `directory` and return their paths by suffix.

        Everything is rendered before anything is written. If one fails, the directory stays as it was; after a kill
        it holds no files of two results, and `Result.load` reads the old one or the new one.

        Args:
            formats: others of `FORMATS`; the JSON, which is the result, is always written. Files of formats that are
                not asked for stay as they are.

        Raises:
            InputError: the name, a format or the directory cannot be used.
        """
        return save_together({name: self}, directory, formats)[name]

    @classmethod
    def load(cls: type[R], path: str | os.PathLike[str]) -> R:
        """Read the JSON that `save` wrote, as the class that wrote it.

        Raises:
            InputError: the file cannot be read, is not a result, or is not of this class; `Result.load` reads all.
        """
        where = check_path(path, "a result")
        try:
            document = json.loads(read_current(Path(path)))
        except OSError as error:
            raise InputError(f"cannot read {where}: {error.strerror or error}") from error
        except (ValueError, RecursionError) as error:  # It is not UTF-8 or JSON, or is nested too deeply.
            raise InputError(f"{where} is not a result: expected the .json file that save() wrote") from error
        try:
            return cls.from_dict(document)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error

    @classmethod
    def from_dict(cls: type[R], document: Mapping[str, Any]) -> R:
        """Return the result that `to_dict` described.

        Raises:
            InputError: the document does not describe a result of this class.
        """
        if not isinstance(document, Mapping) or not isinstance(document.get("kind"), str):
            raise InputError("not a result: expected the .json file that save() wrote, with a 'kind'")
        kind, homes = document["kind"], result_homes()
        if kind not in Result._kinds and kind in homes:
            importlib.import_module(homes[kind])
        found = Result._kinds.get(kind)
        if found is None:
            known = sorted({*homes, *Result._kinds})
            raise InputError(
                f"unknown kind of result {kind!r:.80}; known are {', '.join(known)}; import the module that defines it"
                f"{did_you_mean(kind, known)}"
            )
        if not issubclass(found, cls):
            raise InputError(f"a result of kind {kind!r} is not a {cls.__name__}; Result.load reads every kind")
        try:
            made = decode_fields(document, found)
            _flatten(encode(made.provenance))
            return made
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as error:
            told = "nested too deeply" if isinstance(error, RecursionError) else error
            raise InputError(f"a damaged result of kind {kind!r}: {told}") from error

    def _drawn(self, suffix: str) -> bytes:
        from ssmscope.render.pictures import encode_figure

        return encode_figure(self.figure(), suffix)

    def _written(self, suffix: str) -> bytes:
        """Return the result in one of `FORMATS`."""
        if suffix in ("png", "svg", "pdf"):
            return self._drawn(suffix)
        text = {
            "json": self.to_json,
            "csv": lambda: self.to_frame().to_csv(index=False, lineterminator="\n"),
            "html": self.to_html,
            "tex": self.to_latex,
            "md": self.to_markdown,
        }[suffix]()
        return text.encode(errors="strict" if suffix == "json" else "backslashreplace")


class OverTexts(Generic[T]):
    """Mixin of a result with several texts: `len`, iteration and `[i]` go over them."""

    texts: tuple[T, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[T]:
        return iter(self.texts)

    def __getitem__(self, index: int) -> T:
        return self.texts[index]


def checked_formats(formats: Sequence[str]) -> tuple[str, ...]:
    """Return the formats to write, JSON among them. Raise InputError for one that is not in `FORMATS`."""
    for each in formats:
        if each not in FORMATS:
            raise InputError(f"unknown format {each!r}; allowed are {', '.join(FORMATS)}{did_you_mean(each, FORMATS)}")
    return tuple(each for each in FORMATS if each == "json" or each in formats)


def save_together(
    results: Mapping[str, Result], directory: str | os.PathLike[str], formats: Sequence[str] = SUFFIXES
) -> dict[str, dict[str, Path]]:
    """Save several results under their names, all or none, as `Result.save` does; return paths by name and suffix."""
    formats = checked_formats(formats)
    contents: dict[str, bytes] = {}
    for name, result in results.items():
        if not name or name in (".", "..") or Path(name).name != name:
            raise InputError(
                f"{name!r} is not a file name; give a plain name without a folder, such as {result.kind!r}"
            )
        contents |= {f"{name}.{suffix}": result._written(suffix) for suffix in formats}
    folder = Path(directory)
    blocked = next((folder / file for file in contents if os.path.isdir(folder / file)), None)
    if blocked is not None:
        raise InputError(f"cannot write {blocked}: a folder of that name is in the way")
    publish(folder, next(iter(results)), contents)
    return {name: {suffix: folder / f"{name}.{suffix}" for suffix in formats} for name in results}


def _with_model(to_frame: Callable[[Any], DataFrame]) -> Any:
    """Wrap a class's `to_frame` to insert a first column `model` into tables that have none."""

    @functools.wraps(to_frame)
    def with_model(result: Result) -> DataFrame:
        frame = to_frame(result)
        if "model" not in frame:
            frame.insert(0, "model", result.model_name)
        return frame

    return with_model


def _class_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _flatten(value: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(value, Mapping):
        return [row for key, item in value.items() for row in _flatten(item, f"{prefix} {key}".strip())]
    return [(prefix, "none" if value is None else value if isinstance(value, str) else json.dumps(value))]
