"""Everything that the views of a result show, as text, and its comparison with tests/views/recorded. With
SSMSCOPE_RECORD=1 the tests record what they see instead; read the difference before it is committed."""

import difflib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from drawn import said
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.patches import Rectangle
from rich.console import Console
from ssmscope.api.results import Result
from ssmscope.core.bootstrap import Estimate
from ssmscope.render.blocks import Custom, Picture, Prose, TokenMaps, TokenRow, TokenRows
from ssmscope.render.table import Cell, Table
from ssmscope.render.terminal import grid as terminal_grid

RECORDED = Path(__file__).with_name("views") / "recorded"


def check(name: str, shown: Iterable[str]) -> None:
    """Compare lines with those recorded under this name."""
    found, file = "".join(f"{line.rstrip()}\n" for line in "\n".join(shown).splitlines()), RECORDED / f"{name}.txt"
    if "SSMSCOPE_RECORD" in os.environ:
        RECORDED.mkdir(exist_ok=True)
        file.write_text(found)
    before = file.read_text().splitlines()
    assert not (changes := list(difflib.unified_diff(before, found.splitlines(), lineterm="", n=0))), "\n".join(changes)


def results_of(case: Callable[[], Iterator[str]]) -> list[Result]:
    """Return the results that a case shows whole or briefly, in order."""
    found: list[Result] = []

    def keep(result: Result, *_: Any, **__: Any) -> Iterator[str]:
        found.append(result)
        return iter(())

    with pytest.MonkeyPatch.context() as patch:
        for name in ("whole", "briefly"):
            patch.setitem(case.__globals__, name, keep)  # type: ignore[attr-defined]
        list(case())
    return found


def whole(result: Result, *more: pd.DataFrame | Table, picture: bool = False) -> Iterator[str]:
    """Yield what a result says of itself: its lines, its blocks, its frame, `more` tables, and a picture's words."""
    yield from briefly(result)
    for table in (result.to_frame(), *more):
        yield "" if isinstance(table, pd.DataFrame) else "compared"
        yield from in_lines(table)
    if picture:
        drawn = result.figure()
        title = " ".join(said(drawn).partition(" | ")[0].split())
        assert title.partition("…")[0] in " ".join(result.headline.split()), "the picture's title is the headline"
        yield from of_figure(drawn)


def briefly(result: Result) -> Iterator[str]:
    """Yield the lines and blocks of a result."""
    yield f"headline: {result.headline}"
    for at in range(len(getattr(result, "models", [0]))):
        yield f"verdict: {result.verdict(at)}"
    yield f"queries: {result.queries_made}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Result, "figure", lambda result, **options: options)
        found = list(described(result.blocks()))
    yield from found


def of_figure(figure: Figure) -> Iterator[str]:
    """Yield the words of a figure, its size, and the ends and lines of its axes."""
    yield "picture: " + " | ".join(filter(str.strip, said(figure).split(" | ")))
    yield "size: {:.2f} × {:.2f} inches".format(*figure.get_size_inches())
    for axes in filter(lambda axes: axes.axison, figure.axes):
        yield "axes: {:.4g} to {:.4g}, {:.4g} to {:.4g}".format(*axes.get_xlim(), *axes.get_ylim())
        yield f"ticks: {axes.get_xticks().round(4).tolist()}"
        yield from (f"area {each.get_datalim(axes.transData).extents.round(4).tolist()}" for each in axes.collections)
        yield from (
            f"bar {bar.get_bbox().extents.round(4).tolist()}" for bar in axes.patches if isinstance(bar, Rectangle)
        )
        yield from (f"text {text.get_position()} {text.get_text()}" for text in axes.texts)
        for line in (*axes.lines, *(handle for legend in figure.findobj(Legend) for handle in legend.legend_handles)):
            points = " ".join(f"{x:.4g},{y:.4g}" for x, y in line.get_xydata().tolist())
            look = (line.get_color(), line.get_linestyle(), line.get_marker(), line.get_markerfacecolor())
            yield f"line {look}: {points}"


def in_lines(table: pd.DataFrame | Table) -> Iterator[str]:
    if isinstance(table, Table):
        yield from of_table(table)
    else:
        kinds = {name: kind for name, kind in table.dtypes.items() if kind not in (np.float64, object, "str")}
        assert table.index.equals(pd.RangeIndex(len(table)))
        yield "frame: " + ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        yield table.to_csv(index=False, float_format="%.6g").rstrip()


def described(blocks: Iterable[Any]) -> Iterator[str]:
    for block in blocks:
        yield ""
        if isinstance(block, Prose):
            yield f"{block.kind}: {block.text}"
        elif isinstance(block, Picture):
            options = found if isinstance(found := block.draw(), dict) else {}
            yield f"picture: {block.alt}" + ", vector" * block.vector + ", folded" * block.folded + f" {options or ''}"
        elif isinstance(block, Table):
            yield from of_table(block)
        elif isinstance(block, TokenRows):
            yield from of_rows(block)
        elif isinstance(block, Custom):
            yield from of_custom(block)


def of_table(table: Table) -> Iterator[str]:
    yield f"table: {table.title}" + f", brief {table.brief}" * bool(table.brief)
    yield " | ".join((*table.heads, *table.columns))
    for labels, cells in table.rows:
        yield " | ".join((*labels, *map(of_cell, cells)))
    yield table.remarks


def of_cell(cell: Cell) -> str:
    number = "" if cell.found is None else f"#{cell.found.value:.4g}" if cell.text else "#"
    return "★" * cell.best + "▼" * cell.worst + " ".join(filter(None, (cell.value, cell.interval))) + number


def of_rows(block: TokenRows) -> Iterator[str]:
    yield f"rows of {block.of}: {block.score}; {block.name}; {block.marked}; {block.around}; first {block.first}" + (
        "; summed" * block.summed
    )
    for text in block.texts:
        yield f"text “{text.answer}” {text.probability:.4g}; {text.about}; span {text.span}; " + "|".join(text.tokens)
        yield f"words {text.words}" + (f", pixels {text.pixels.shape}" if text.pixels is not None else "")
        yield from map(of_row, text.rows)


def of_row(row: TokenRow) -> str:
    ends = ", ".join(f"{end:.4g}" for end in (*row.ends, *(row.own or ())))
    parts = [f"{row.name!r} {row.extent} of {ends}", "signed" * row.signed, row.remark]
    parts += [f"marked {list(row.marked)} against {list(row.against)}" if row.marked or row.against else ""]
    parts += ["" if row.query is None else f"query {row.query}", "" if row.state is None else f"state {row.state:.4g}"]
    parts += ["" if row.outside is None else f"outside {np.flatnonzero(row.outside).tolist()}"]
    return "; ".join(filter(None, parts)) + ": " + " ".join(f"{score:.4g}" for score in row.scores.tolist())


def of_custom(block: Custom) -> Iterator[str]:
    if isinstance(block, TokenMaps):
        yield f"maps {block.name}: {block.tokens}"
    yield (
        "custom"
        + ", on request" * block.on_request
        + ", with style" * bool(block.style)
        + ", with script" * bool(block.script)
    )
    if block.terminal is not None:
        shown = block.terminal(True)
        yield printed(terminal_grid(shown) if isinstance(shown, Table) else shown)
    if block.html is not None:
        yield from tags(re.sub(r"(?s)(?<=</summary>)(.*?</tr>).*(?=</details>)", r"\1", block.html()))


def printed(shown: Iterable[Any], width: int = 100, **options: Any) -> str:
    """Return the output to a terminal in colours, with ␛[style] before styled text."""
    fixed = dict(file=io.StringIO(), width=width, height=50, color_system="truecolor", force_terminal=True)
    console = Console(**{**fixed, "no_color": False, "legacy_windows": False, **options})  # type: ignore[arg-type]
    lines = (line for each in shown for line in console.render_lines(each, pad=False))
    styled = ([f"␛[{part.style}]{part.text}" if part.style else part.text for part in line] for line in lines)
    return "".join(f"{''.join(parts)}\n" for parts in styled)


def tags(html: str) -> list[str]:
    """Return HTML with a line for every part, without its style and the code of scripts."""
    kept = re.sub(r"(?s)<style>.*?</style>|<script>.*?</script>", "", html).replace("\n", "⏎")
    kept = re.sub(r"data:image/png;base64,[\w+/=]+", "data:image", kept)
    kept = re.sub(r"sha256-[\w+/=]+", "sha256", kept)
    return re.sub(r"(?=<(?:div|p|section|table|tr|details|ul|ol|li|h\d|script|img)\b)", "\n", kept).splitlines()


def spread(*shape: int, low: float = 0.0, high: float = 1.0, seed: int = 0) -> np.ndarray:
    """Return evenly spaced numbers, each another one, in a random order."""
    count = int(np.prod(shape))
    return (np.random.default_rng(seed).permutation(np.linspace(low, high, count + 2)[1:-1])).reshape(shape)


class Drawn:
    """Estimates and arrays, each with different numbers."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)

    def estimate(self, low: float = 0.0, high: float = 1.0) -> Estimate:
        """Return a number between the ends with an interval on which it does not lie in the middle."""
        drawn = self.random.uniform((low, 0.02, 0.02), (high, 0.1, 0.2)) * (1, *2 * [high - low])
        value, below, above = drawn.tolist()
        return Estimate(round(value, 6), round(value - below, 6), round(value + above, 6))

    def estimates(self, count: int, low: float = 0.0, high: float = 1.0) -> tuple[Estimate, ...]:
        return tuple(self.estimate(low, high) for _ in range(count))

    def ends(self, *shape: int, low: float = 0.0, high: float = 1.0) -> np.ndarray:
        """Return means with their intervals, (…, 3)."""
        found = [vars(self.estimate(low, high)).values() for _ in range(int(np.prod(shape)))]
        return np.array([list(each) for each in found]).reshape(*shape, 3)
