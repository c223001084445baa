"""Tables of a report: cells that are numbers with intervals or words, and how they are written in Markdown and LaTeX.

`compared` makes the table of an analysis in which models and methods stand beside one another, `folded` turns any tidy
table into one: a number and the ends of its interval, three columns of it, become one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.bootstrap import Estimate
from ssmscope.interp.views.tokens import shorten, visible

if TYPE_CHECKING:
    from pandas import DataFrame

BEST, WORST = "★", "▼"
"""The marks of the best and the worst, beside bold and underlined."""

LONGEST = 200
"""As many characters as a cell shows."""

LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}"},
    **{"Δ": r"$\Delta$", "λ": r"$\lambda$", "ρ": r"$\rho$", "↑": r"$\uparrow$", "↓": r"$\downarrow$"},
    **{"→": r"$\rightarrow$", "−": "$-$", "–": "--", "—": "---", "…": r"\ldots{}", "±": r"$\pm$", "∞": r"$\infty$"},
    **{"≤": r"$\leq$", "≥": r"$\geq$", "·": r"$\cdot$", "″": "''", "₂": "$_2$", "“": "``", "”": "''"},
}
SUBSCRIPTS = {"A_MoRF": r"$A_{\mathrm{MoRF}}$", "A_LeRF": r"$A_{\mathrm{LeRF}}$"}


@dataclass(frozen=True)
class Cell:
    """A number with its interval, or words."""

    found: Estimate | None = None
    """None for words; an estimate without ends has no interval."""
    text: str = ""
    digits: int | None = 3
    """Behind the point; None for four significant ones."""
    best: bool = False
    worst: bool = False

    @property
    def is_number(self) -> bool:
        return self.found is not None

    @property
    def value(self) -> str:
        """The number alone, or the words; "–" for a number that is not defined."""
        if self.found is None:
            return shorten(visible(self.text), LONGEST)
        return self._number(self.found.value)

    @property
    def interval(self) -> str:
        """The ends, "[0.1, 0.2]", or nothing."""
        if self.found is None or math.isnan(self.found.low) or math.isnan(self.found.high):
            return ""
        return f"[{self._number(self.found.low)}, {self._number(self.found.high)}]"

    def _number(self, value: float) -> str:
        if math.isnan(value):
            return "–"
        if math.isinf(value):
            return "∞" if value > 0 else "−∞"
        text = f"{value:.4g}" if self.digits is None else f"{value:.{self.digits}f}"
        return (text if float(text) else text.lstrip("-")).replace("-", "−")


Labels = tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """Columns of labels, and columns of cells."""

    heads: Labels
    """The headings of the columns of labels."""
    columns: Labels
    rows: tuple[tuple[Labels, tuple[Cell, ...]], ...]
    note: str = ""
    """What stands below it."""

    @property
    def numbers(self) -> tuple[bool, ...]:
        """Which columns hold numbers."""
        return tuple(any(cells[at].is_number for _, cells in self.rows) for at in range(len(self.columns)))


@dataclass
class Line:
    """A row in the making. Numbers of the same column are compared between lines of the same peers."""

    labels: Labels
    cells: dict[str, Cell]
    peers: Hashable = field(default_factory=object)


def table(
    heads: Sequence[str],
    lines: Sequence[Line],
    *,
    more: Iterable[str] = (),
    less: Iterable[str] = (),
    note: str = "",
) -> Table:
    """The lines with the best of each column marked: of the columns `more` the largest, of `less` the smallest.

    Columns are those of any line, in their order. Where all that are compared are equal none is best.
    """
    columns = list(dict.fromkeys(name for line in lines for name in line.cells))
    better: dict[str, Callable[..., float]] = {**dict.fromkeys(more, max), **dict.fromkeys(less, min)}
    arrows = {max: " ↑", min: " ↓"}
    marked = False
    rows = []
    for line in lines:
        cells = []
        for name in columns:
            cell = line.cells.get(name, Cell())
            if name in better and cell.found is not None:
                beside = [one.cells[name].found for one in lines if one.peers == line.peers and name in one.cells]
                values = {one.value for one in beside if one is not None and not math.isnan(one.value)}
                if len(values) > 1 and cell.found.value == better[name](values):
                    cell, marked = replace(cell, best=True), True
            cells.append(cell)
        rows.append((line.labels, tuple(cells)))
    notes = [note] if note else []
    if marked:
        notes.append(f"{BEST} and bold: the best mean of those compared.")
    if any(cell.worst for line in lines for cell in line.cells.values()):
        notes.append(f"{WORST} and underlined: the worst of its row.")
    if any(cell.interval for line in lines for cell in line.cells.values()):
        notes.append("In brackets: the 95 % interval.")
    shown = tuple(name + arrows.get(better.get(name), "") for name in columns)  # type: ignore[arg-type]
    return Table(tuple(heads), shown, tuple(rows), " ".join(notes))


def folded(frame: DataFrame, *, heads: Sequence[str] = (), limit: int | None = None) -> Table:
    """Any tidy table: NAME, NAME_low and NAME_high, or value, low and high, as one column; `heads` are its labels.

    Numbers have four significant digits. Of more than `limit` rows the first are shown, and the note says so.
    """
    ends = interval_columns(frame)
    hidden = {end for pair in ends.values() for end in pair}
    columns = [name for name in frame.columns if name not in hidden and name not in heads]
    shown = frame.head(limit) if limit is not None else frame
    values = {name: shown[name].tolist() for name in shown.columns}
    numbers = {name for name in columns if frame[name].dtype.kind in "iuf"}
    rows = []
    for at in range(len(shown)):
        cells = tuple(_cell(name, at, values, ends, name in numbers) for name in columns)
        rows.append((tuple(str(values[name][at]) for name in heads), cells))
    notes = [f"{len(shown):,} of {len(frame):,} rows."] if len(shown) < len(frame) else []
    notes += ["In brackets: the 95 % interval."] if any(cell.interval for _, cells in rows for cell in cells) else []
    return Table(tuple(heads), tuple(map(str, columns)), tuple(rows), " ".join(notes))


def interval_columns(frame: DataFrame) -> Mapping[str, tuple[str, str]]:
    """The columns that hold the ends of another's interval, by its name."""
    names = list(frame.columns)
    pairs = {name: (f"{name}_low", f"{name}_high") for name in names}
    if {"low", "high"} <= set(names):
        at = names.index("low")
        if at and names[at + 1 : at + 2] == ["high"]:
            pairs[names[at - 1]] = ("low", "high")
    return {name: ends for name, ends in pairs.items() if set(ends) <= set(names)}


def _cell(name: str, at: int, values: Mapping[str, list], ends: Mapping[str, tuple[str, str]], number: bool) -> Cell:
    value = values[name][at]
    if _missing(value):
        return Cell(Estimate(math.nan, math.nan, math.nan)) if number else Cell(text="–")
    if isinstance(value, bool | np.bool_):
        return Cell(text="yes" if value else "no")
    if isinstance(value, int | np.integer):
        return Cell(Estimate(int(value), math.nan, math.nan), digits=0)
    if isinstance(value, float | np.floating):
        low, high = (values[end][at] for end in ends.get(name, ())) if name in ends else (math.nan, math.nan)
        low, high = (math.nan if _missing(end) else float(end) for end in (low, high))
        return Cell(Estimate(float(value), low, high), digits=None)
    return Cell(text=str(value))


def _missing(value: Any) -> bool:
    import pandas as pd

    return value is None or value is pd.NA or (isinstance(value, float | np.floating) and math.isnan(value))


def to_markdown(found: Table) -> str:
    """A table in Markdown: best values bold, the worst with their mark, intervals in brackets, the note below."""
    labels = len(found.heads)
    lines = [[*map(_for_markdown, (*found.heads, *found.columns))]]
    lines.append(["---"] * labels + ["---:" if number else "---" for number in found.numbers])
    for names, cells in found.rows:
        written = []
        for cell in cells:
            text = _for_markdown(cell.value)
            text = f"**{text}**" if cell.best else text
            written.append(" ".join(filter(None, (text, WORST * cell.worst, cell.interval))))
        lines.append([*map(_for_markdown, names), *written])
    note = f"\n{_for_markdown(found.note)}\n" if found.note else ""
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + note


def to_latex(found: Table) -> str:
    """A booktabs tabular: best values bold, the worst underlined, intervals small as [a, b], the note as a comment.

    Every character that TeX would act on is escaped.
    """
    aligned = "".join("r" if number else "l" for number in found.numbers)
    lines = []
    for names, cells in found.rows:
        written = []
        for cell in cells:
            text = for_latex(cell.value)
            text = rf"\textbf{{{text}}}" if cell.best else text
            text = rf"\underline{{{text}}}" if cell.worst else text
            written.append(text + (rf" {{\scriptsize {for_latex(cell.interval)[2:]}}}" if cell.interval else ""))
        lines.append(" & ".join([*map(for_latex, names), *written]) + " \\\\\n")
    top = " & ".join(map(for_latex, (*found.heads, *found.columns)))
    note = f"% {' '.join(visible(found.note).split())}\n" if found.note else ""
    return (
        f"% needs \\usepackage{{booktabs}}\n{note}\\begin{{tabular}}{{{'l' * len(found.heads)}{aligned}}}\n\\toprule\n"
        f"{top} \\\\\n\\midrule\n{''.join(lines)}\\bottomrule\n\\end{{tabular}}\n"
    )


def for_latex(text: str) -> str:
    """The text with what TeX would act on escaped; a bracket that begins a cell is no argument of what is before."""
    known = text.removesuffix(" ↑").removesuffix(" ↓")
    if known in SUBSCRIPTS:
        return SUBSCRIPTS[known] + for_latex(text.removeprefix(known))
    escaped = "".join(LATEX.get(character, character) for character in shorten(visible(text), LONGEST))
    return f"{{}}{escaped}" if escaped.lstrip()[:1] in ("[", "*") else escaped


def _for_markdown(text: str) -> str:
    kept = shorten(visible(text), LONGEST)
    return "".join(f"\\{character}" if character in r"\`*_{}<>|" else character for character in kept)
