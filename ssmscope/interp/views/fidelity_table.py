"""Tables of fidelity for papers: methods × measures, and methods × data sets."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from ssmscope.bootstrap import Estimate
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.views.tokens import visible

if TYPE_CHECKING:
    from ssmscope.interp.fidelity_result import Fidelity

STYLES = ("markdown", "latex", "csv")

_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"Δ": r"$\Delta$", "↑": r"$\uparrow$", "↓": r"$\downarrow$", "–": "--"},
}
_SUBSCRIPTS = {"A_MoRF": r"$A_{\mathrm{MoRF}}$", "A_LeRF": r"$A_{\mathrm{LeRF}}$"}


class Cell(NamedTuple):
    """A number of a table; `best` marks it, and an average has no interval."""

    found: Estimate
    best: bool = False


def measure_table(result: Fidelity, style: str) -> str:
    """Methods × measures of one result."""
    from ssmscope.interp.fidelity_result import more_is_better, name_of

    _check(style)
    rows = [([method], [_cell(result, method, measure) for measure in result.measures]) for method in result.rows]
    if style == "csv":
        return _csv(["method"], list(result.measures), rows)
    arrows = [f" {'↑' if more_is_better(measure) else '↓'}" for measure in result.measures]
    return _written(style, ["Method"], [name_of(m) for m in result.measures], arrows, rows, {len(rows) - 1})


def data_table(results: Sequence[Fidelity], measure: str, style: str) -> str:
    """Methods × data sets of one measure, for one or several models."""
    from ssmscope.interp.fidelity_result import more_is_better

    _check(style)
    if not results:
        raise InputError("no result was given; give at least one that fidelity_auc made")
    found: dict[tuple[str, str], Fidelity] = {}
    for result in results:
        place = (str(result.provenance.get("model", "a model")), result.data)
        if place in found:
            raise InputError(f"two results are of {place[0]} on {place[1]}; give one for each model and data set")
        result.best(measure)  # names the measures if this is none
        found[place] = result
    models, sets = (list(dict.fromkeys(place[i] for place in found)) for i in (0, 1))
    rows: list[tuple[list[str], list[Cell | None]]] = []
    ruled = set()
    for model in models:
        own = {name: found[model, name] for name in sets if (model, name) in found}
        methods = list(dict.fromkeys(method for result in own.values() for method in result.rows))
        methods.sort(key=lambda method: method == "random")
        averages = {method: _average(own, sets, method, measure) for method in methods}
        means = [mean for method, mean in averages.items() if mean is not None and method != "random"]
        top = (max if more_is_better(measure) else min)(means, default=None)
        for method in methods:
            cells: list[Cell | None] = []
            for name in sets:
                there = own.get(name)
                cells.append(None if there is None or method not in there.rows else _cell(there, method, measure))
            if len(sets) > 1:
                mean = averages[method]
                alone = None if mean is None else Estimate(mean, math.nan, math.nan)
                cells.append(None if alone is None else Cell(alone, method != "random" and mean == top))
            rows.append(([*([model] if len(models) > 1 else []), method], cells))
        ruled.add(len(rows) - 1)
    heads = [*(["model"] if len(models) > 1 else []), "method"]
    columns = [*sets, *(["average"] if len(sets) > 1 else [])]
    if style == "csv":
        return _csv(heads, columns, rows)
    return _written(style, [head.capitalize() for head in heads], columns, [""] * len(columns), rows, ruled)


def _cell(result: Fidelity, method: str, measure: str) -> Cell:
    return Cell(result.estimate(method, measure), method in result.best(measure))


def _average(own: dict[str, Fidelity], sets: Sequence[str], method: str, measure: str) -> float | None:
    """A method's mean over the data sets, of a model that was measured on all of them."""
    if any(name not in own or method not in own[name].rows for name in sets):
        return None
    return sum(own[name].estimate(method, measure).value for name in sets) / len(sets)


def _check(style: str) -> None:
    if style not in STYLES:
        raise InputError(f"unknown style {style!r}; allowed are {', '.join(STYLES)}{did_you_mean(str(style), STYLES)}")


def _csv(heads: Sequence[str], columns: Sequence[str], rows: Sequence) -> str:
    """Plain numbers, each with the ends of its interval, and in the last column where the row is best."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*heads, *(name + end for name in columns for end in ("", "_low", "_high")), "best_in"])
    for names, cells in rows:
        numbers: list[float | str] = []
        for cell in cells:
            ends = (cell.found.value, cell.found.low, cell.found.high) if cell is not None else (math.nan,) * 3
            numbers += ["" if math.isnan(end) else end for end in ends]
        best = ";".join(name for name, cell in zip(columns, cells) if cell is not None and cell.best)
        writer.writerow([*names, *numbers, best])
    return out.getvalue()


def _written(
    style: str,
    heads: Sequence[str],
    columns: Sequence[str],
    arrows: Sequence[str],
    rows: Sequence,
    last: set[int],
) -> str:
    """Markdown or LaTeX; `last` has the rows that end a model's, below which LaTeX draws a rule."""
    latex = style == "latex"
    escape = _for_latex if latex else _for_markdown
    strong = (lambda text: rf"\textbf{{{text}}}") if latex else (lambda text: f"**{text}**")
    lines = []
    for names, cells in rows:
        written = []
        for cell in cells:
            text = "--" if latex else "–"
            if cell is not None and not math.isnan(cell.found.value):
                minus = "$-$" if latex else "−"
                text = f"{cell.found.value:.3f}".replace("-", minus)
                text = strong(text) if cell.best else text
                if not math.isnan(cell.found.low):
                    text += f" [{cell.found.low:.3f}, {cell.found.high:.3f}]".replace("-", minus)
            written.append(text)
        lines.append([*map(escape, names), *written])
    top = [*map(escape, heads), *(escape(name) + escape(arrow) for name, arrow in zip(columns, arrows))]
    if not latex:
        aligned = ["---"] * len(heads) + ["---:"] * len(columns)
        return "".join(f"| {' | '.join(line)} |\n" for line in (top, aligned, *lines))
    body = ""
    for number, line in enumerate(lines):
        body += " & ".join(line) + " \\\\\n" + ("\\midrule\n" if number in last and number < len(lines) - 1 else "")
    return (
        f"\\begin{{tabular}}{{{'l' * len(heads)}{'r' * len(columns)}}}\n\\toprule\n{' & '.join(top)} \\\\\n\\midrule\n"
        f"{body}\\bottomrule\n\\end{{tabular}}\n"
    )


def _for_latex(text: str) -> str:
    return _SUBSCRIPTS.get(text) or "".join(_LATEX.get(character, character) for character in visible(text))


def _for_markdown(text: str) -> str:
    return "".join(f"\\{character}" if character in r"\`*_{}[]<>|" else character for character in visible(text))
