"""Tables of fidelity for papers: methods × measures, and methods × data sets."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ssmscope.core.bootstrap import Estimate
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.fidelity.measures import display_name, more_is_better
from ssmscope.render.markup import to_latex, to_markdown
from ssmscope.render.table import Cell, Table

if TYPE_CHECKING:
    from ssmscope.interp.fidelity.result import Fidelity

STYLES = ("markdown", "latex", "csv")
UNKNOWN = Estimate(math.nan, math.nan, math.nan)


def measure_table(result: Fidelity, style: str) -> str:
    """Return methods × measures of one result."""
    rows = [((name,), tuple(_cell(result, name, measure) for measure in result.measures)) for name in result.rows]
    columns = tuple(f"{display_name(one)} {'↑' if more_is_better(one) else '↓'}" for one in result.measures)
    return _written(Table(("method",), result.measures if style == "csv" else columns, tuple(rows)), style)


def data_table(results: Sequence[Fidelity], measure: str, style: str) -> str:
    """Return methods × data sets of one measure, for one or several models."""
    if not results:
        raise InputError("no result was given; give at least one that fidelity_auc made")
    found: dict[tuple[str, str], Fidelity] = {}
    for result in results:
        place = (result.model_name, result.data)
        if place in found:
            raise InputError(f"two results are of {place[0]} on {place[1]}; give one for each model and data set")
        result.best(measure)  # This raises for an unknown measure.
        found[place] = result
    models, sets = (list(dict.fromkeys(place[i] for place in found)) for i in (0, 1))
    rows = []
    for model in models:
        own = {name: found[model, name] for name in sets if (model, name) in found}
        methods = list(dict.fromkeys(method for result in own.values() for method in result.rows))
        methods.sort(key=lambda method: method == "random")
        averages = {method: _average(own, sets, method, measure) for method in methods}
        means = [mean for method, mean in averages.items() if mean is not None and method != "random"]
        top = (max if more_is_better(measure) else min)(means, default=None)
        for method in methods:
            there = [one if (one := own.get(name)) is not None and method in one.rows else None for name in sets]
            cells = [Cell(UNKNOWN) if one is None else _cell(one, method, measure) for one in there]
            if len(sets) > 1:
                mean = averages[method]
                alone = UNKNOWN if mean is None else Estimate(mean, math.nan, math.nan)
                cells.append(Cell(alone, best=method != "random" and mean is not None and mean == top))
            rows.append(((model, method)[len(models) == 1 :], tuple(cells)))
    columns = (*sets, *(["average"] if len(sets) > 1 else []))
    return _written(Table(("model", "method")[len(models) == 1 :], columns, tuple(rows)), style)


def _cell(result: Fidelity, method: str, measure: str) -> Cell:
    return Cell(result.estimate(method, measure), best=method in result.best(measure))


def _average(own: dict[str, Fidelity], sets: Sequence[str], method: str, measure: str) -> float | None:
    """Return a method's mean over the data sets, for a model that was measured on all of them."""
    if any(name not in own or method not in own[name].rows for name in sets):
        return None
    return sum(own[name].estimate(method, measure).value for name in sets) / len(sets)


def _written(found: Table, style: str) -> str:
    """Write a table in a style; as CSV plain numbers, each with the ends of its interval, and in the last column the
    columns in which the row is best."""
    if style not in STYLES:
        raise InputError(f"unknown style {style!r}; allowed are {', '.join(STYLES)}{did_you_mean(str(style), STYLES)}")
    if style != "csv":
        shown = replace(found, heads=tuple(map(str.capitalize, found.heads)))
        return to_latex(shown, plain=True) if style == "latex" else to_markdown(shown)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*found.heads, *(name + end for name in found.columns for end in ("", "_low", "_high")), "best_in"])
    for names, cells in found.rows:
        ends = [end for cell in cells for one in [cell.found or UNKNOWN] for end in (one.value, one.low, one.high)]
        best = ";".join(name for name, cell in zip(found.columns, cells) if cell.best)
        writer.writerow([*names, *("" if math.isnan(end) else end for end in ends), best])
    return out.getvalue()
