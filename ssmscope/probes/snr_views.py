"""The needle's probability by layer as the tables of a terminal and of a page."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from ssmscope.interp.views.tokens import shorten, visible
from ssmscope.probes.trajectory_terminal import spread

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ssmscope.probes.snr_measures import SNRCurve, SNRDifference
    from ssmscope.probes.snr_result import NeedleSNR

LAYERS = 24
"""How many layers below the model's own answer a table has."""
BESIDE = 3
"""How many models stand beside one another."""
NAME = 20
"""As many characters as a name has in a table."""


class Cells(NamedTuple):
    """A table: its title, empty where it continues the one before, its headings, how many of them are names rather than
    numbers, and its rows."""

    title: str
    headings: list[str]
    names: int
    rows: list[list[str]]


def tables(result: NeedleSNR) -> Iterator[Cells]:
    """For each length the needle's probability by layer over all tasks, with the difference of two models; then the
    models' own answers, task by task."""
    for length in result.lengths:
        found = [result.curve(model.name, result.tasks[0], length) for model in result.models]
        both = [one for one in result.differences if (one.task, one.length) == (result.tasks[0], length)]
        where = "" if length is None else f", contexts of {length:,} {result.unit}"
        title = f"Needle probability{where}"
        for _, alike in groupby(found, key=lambda curve: len(curve.layers)):
            curves = list(alike)
            apart = both if len(result.models) == len(curves) == 2 else []
            for start in range(0, len(curves), BESIDE):
                yield _layers(title, curves[start : start + BESIDE], apart)
                title = ""
        yield _answers(result, length)


def _layers(title: str, curves: Sequence[SNRCurve], apart: Sequence[SNRDifference]) -> Cells:
    layers = len(curves[0].layers) - 1
    headings = ["layer", *(_short(curve.model) for curve in curves), *("difference" for _ in apart)]
    rows = []
    for layer in [*spread(layers, LAYERS), layers]:
        cells = [*(str(one.layers[layer].needle) for one in curves), *(str(one.layers[layer].needle) for one in apart)]
        rows.append(["model" if layer == layers else str(layer), *cells])
    return Cells(title, headings, 0, rows)


def _answers(result: NeedleSNR, length: int | None) -> Cells:
    curves = [curve for curve in result.curves if curve.length == length]
    compared = any(curve.chance == curve.chance for curve in curves)
    headings = ["task", "model", "accuracy"]
    headings += ["ln(needle/distractor)", "among candidates", "chance"] if compared else []
    rows = []
    for curve in curves:
        own = curve.layers[-1]
        row = [_short(curve.task, 12), _short(curve.model), str(curve.accuracy)]
        rows.append(row + ([str(own.log_ratio), str(own.candidate), f"{curve.chance:.3f}"] if compared else []))
    return Cells("The models' own answers" if len(result.models) > 1 else "The model's own answer", headings, 2, rows)


def remarks(result: NeedleSNR) -> Iterator[str]:
    """What stands below the tables."""
    yield (
        f"Means over {result.curves[0].examples:,} questions{' of all tasks' if len(result.tasks) > 1 else ''}; 95 % "
        "bootstrap intervals over questions. Layer i reads what enters block i, 0 the embeddings; the last line is the "
        "model itself."
    )
    for one in result.differences:
        if (one.task, one.length) == (result.tasks[0], result.lengths[0]):
            two = f"{visible(one.first)} − {visible(one.second)}"
            yield f"Needle probability, mean over the layers below: {two} {one.average}"
    yield from (f"Note: {note}." for note in result.notes)


def lenses(result: NeedleSNR) -> Iterator[str]:
    """What every model was read with."""
    for model in result.models:
        yield f"{visible(model.name)}: {visible(model.lens)}, {model.layers} layers"


def _short(name: str, width: int = NAME) -> str:
    return shorten(visible(name), width)


def terminal_view(result: NeedleSNR) -> Iterator[RenderableType]:
    """All tables, and what is to be said of them."""
    from rich.table import Table
    from rich.text import Text

    yield Text(visible(result.headline), style="bold")
    yield from (Text(line, style="dim") for line in lenses(result))
    for cells in tables(result):
        yield Text(f"\n{cells.title}" if cells.title else "")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for number, heading in enumerate(cells.headings):
            table.add_column(Text(heading), justify="left" if number < cells.names else "right", no_wrap=True)
        for row in cells.rows:
            table.add_row(*map(Text, row))
        yield table
    yield Text("")
    yield from map(Text, remarks(result))


def fragment(result: NeedleSNR, picture: bytes) -> str:
    """The same below the picture, as a self-contained piece of HTML."""
    parts = [f'<img alt="{escape(result.headline)}" src="data:image/png;base64,{base64.b64encode(picture).decode()}">']
    parts += [f"<p>{escape(line)}</p>" for line in lenses(result)]
    for cells in tables(result):
        parts += [f"<h2>{escape(cells.title)}</h2>"] if cells.title else []
        kind = [' class="name"' if number < cells.names else "" for number in range(len(cells.headings))]
        head = "".join(f"<th{each}>{escape(heading)}</th>" for each, heading in zip(kind, cells.headings))
        body = "".join(
            "<tr>" + "".join(f"<td{each}>{escape(cell)}</td>" for each, cell in zip(kind, row)) + "</tr>"
            for row in cells.rows
        )
        parts.append(f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>')
    parts += [f"<p>{escape(line)}</p>" for line in remarks(result)]
    return f'<div class="ssmscope-snr"><style>{_STYLE}</style>{"".join(parts)}</div>'


_STYLE = """
.ssmscope-snr { --ink: #1b1f24; --soft: #57606a; --line: #d8dee4; --paper: #ffffff; color: var(--ink);
  background: var(--paper); font: 14px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", sans-serif; }
@media (prefers-color-scheme: dark) {
.ssmscope-snr { --ink: #e6edf3; --soft: #9da7b3; --line: #30363d; --paper: #0f141a; } }
.ssmscope-snr img { max-width: 100%; background: #fff; }
.ssmscope-snr h2 { font-size: 15px; margin: 22px 0 6px; }
.ssmscope-snr p { color: var(--soft); font-size: 13px; margin: 4px 0; overflow-wrap: anywhere; }
.ssmscope-snr .wide { overflow-x: auto; margin-bottom: 12px; }
.ssmscope-snr table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
.ssmscope-snr th, .ssmscope-snr td { padding: 2px 22px 2px 0; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
.ssmscope-snr th { font-weight: 600; }
.ssmscope-snr .name { text-align: left; }
"""
