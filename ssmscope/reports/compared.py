"""The table of an analysis: its models, methods or attacks beside one another, the best marked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ssmscope.bootstrap import Estimate
from ssmscope.reports.grouping import Found, Group
from ssmscope.reports.tables import Cell, Line, Table, folded, table

ROWS = 200
"""How many rows a table has that no kind of result lays out for itself."""


def compared(group: Group, kind: str) -> Table:
    """The table of the group's results of one kind."""
    found = [one for one in group.found() if one.result.kind == kind]
    return _KINDS[kind](found) if kind in _KINDS else _every_row(found)


def _every_row(found: Sequence[Found]) -> Table:
    import pandas as pd

    frames = [one.result.to_frame() for one in found]
    if len(found) > 1:
        for frame, one in zip(frames, found):
            frame.insert(0, "of", one.label)
        share = max(ROWS // len(found), 10)
        every = sum(map(len, frames))
        made = folded(pd.concat([frame.head(share) for frame in frames], ignore_index=True), heads=["of"])
        shown = len(made.rows)
        note = f"{shown:,} of {every:,} rows. {made.note}".strip() if shown < every else made.note
        return Table(("model",), made.columns, made.rows, note)
    return folded(frames[0], limit=ROWS)


def several(found: Found, names: Sequence[str]) -> list[str]:
    """What the models of a result of several are called in the report; as the result calls them where it has others."""
    own = found.entry.models
    if len(own) != len(names):
        return list(names)
    return [found.label.replace(", ".join(own), name, 1) for name in own]


def _fidelity(found: Sequence[Found]) -> Table:
    from ssmscope.interp.fidelity_result import RANDOM, more_is_better, name_of

    lines = []
    more: set[str] = set()
    less: set[str] = set()
    for one in found:
        result: Any = one.result
        for method in result.rows:
            cells = {name_of(each): Cell(result.estimate(method, each)) for each in result.measures}
            peers = (one.label, method) if method == RANDOM else (one.label, None)
            lines.append(Line((one.label, result.data, method), cells, peers))
        for each in result.measures:
            (more if more_is_better(each) else less).add(name_of(each))
    return table(("model", "data", "method"), lines, more=more, less=less)


def _plausibility(found: Sequence[Found]) -> Table:
    from ssmscope.interp.plausibility import MEASURES

    lines = []
    for one in found:
        result: Any = one.result
        numbers = iter(result.estimates)
        for method in result.methods:
            cells = {name: Cell(next(numbers)) for name in MEASURES.values()}
            lines.append(Line((one.label, method), cells, one.label))
    return table(("model", "method"), lines, more=MEASURES.values())


def _position(found: Sequence[Found]) -> Table:
    lines, less = [], ["average drop, %"]
    for one in found:
        result: Any = one.result
        cells = {"clean accuracy": Cell(result.clean)}
        for region in result.regions:
            name = f"drop at {region.region}, %"
            less.append(name)
            cells[name] = Cell(region.drop.times(100), digits=1)
        cells["average drop, %"] = Cell(result.average_drop.times(100), digits=1)
        lines.append(Line((one.label,), cells, "all"))
    note = "Drop: 1 − accuracy with the region replaced / clean accuracy."
    return table(("model",), lines, more=["clean accuracy"], less=less, note=note)


def _prompts(found: Sequence[Found]) -> Table:
    lines = []
    less: list[str] = []
    for one in found:
        result: Any = one.result
        cells = {"clean accuracy": Cell(result.average_clean)}
        drops = [each.drop.value for each in result.attacks if not math.isnan(each.drop.value)]
        for each in result.attacks:
            name = f"PDR of {each.name}, %"
            less.append(name)
            worst = len(set(drops)) > 1 and each.drop.value == max(drops)
            cells[name] = Cell(each.drop.times(100), digits=1, worst=worst)
        lines.append(Line((one.label,), cells, "all"))
    ways = dict.fromkeys(one.result.measured for one in found)  # type: ignore[attr-defined]
    note = " ".join(["PDR: 1 − accuracy under the attack / clean accuracy, mean over templates.", *ways])
    return table(("model",), lines, more=["clean accuracy"], less=less, note=note)


def _words(found: Sequence[Found]) -> Table:
    from ssmscope.attacks.words_result import SUMMARY

    lines = []
    for one in found:
        result: Any = one.result
        cells = {
            name: Cell(result.summary[each], digits=1 if each == "queries" else 3) for each, name in SUMMARY.items()
        }
        lines.append(Line((one.label, result.recipe), cells, result.recipe))
    more = [SUMMARY[name] for name in ("accuracy", "attacked")]
    return table(("model", "attack"), lines, more=more, less=[SUMMARY["success"]])


def _stability(found: Sequence[Found]) -> Table:
    lines = []
    for one in found:
        result: Any = one.result
        frame = result.to_frame()
        counts = ", ".join(f"{number} {name}" for name, number in result.counts().items() if number)
        cells = {"verdict": Cell(text=result.verdict), result.unit: Cell(text=counts)}
        for column in ("spectral_abscissa", "largest_gain", "possible_gain", "growth"):
            largest = frame[column].max()
            cells[f"largest {column.removeprefix('largest_').replace('_', ' ')}"] = _plain(largest)
        lines.append(Line((one.label,), cells))
    note = "Gains and growth are natural logarithms per token, the spectral abscissa is per unit of Δ."
    return table(("model",), lines, note=note)


def _bound(found: Sequence[Found]) -> Table:
    lines = []
    for one in found:
        result: Any = one.result
        gap, capacity = result.gap, result.capacity
        said = "outside the assumptions" if gap is None else "vacuous" if gap.vacuous else "holds"
        cells = {"bound": Cell(text=said), "m": Cell(text=f"{result.examples:,}"), "T": Cell(text=f"{result.length:,}")}
        cells["losses differ by at most"] = _plain(gap.bound if gap is not None and not gap.vacuous else math.nan)
        cells["ln C"] = _plain(math.nan if capacity is None else capacity.log)
        lines.append(Line((one.label,), cells))
    return table(("model",), lines)


def _snr(found: Sequence[Found]) -> Table:
    lines, accuracy, average = [], "accuracy", "needle probability, mean of layers"
    for one in found:
        result: Any = one.result
        shown = dict(zip((read.name for read in result.models), several(one, [read.name for read in result.models])))
        for curve in result.curves:
            where = "–" if curve.length is None else f"{curve.length:,} {result.unit}"
            cells = {average: Cell(curve.average), accuracy: Cell(curve.accuracy)}
            lines.append(Line((shown[curve.model], curve.task, where), cells, (curve.task, curve.length)))
    return table(("model", "task", "context"), lines, more=[average, accuracy])


def _retrieval(found: Sequence[Found]) -> Table:
    lines = []
    more: list[str] = []
    for one in found:
        result: Any = one.result
        for name, rows in zip(several(one, result.models), result.cells):
            for task, row in zip(result.tasks, rows):
                cells = {f"accuracy at {length:,}": Cell(each.accuracy) for length, each in zip(result.lengths, row)}
                more += cells
                lines.append(Line((name, task), cells, task))
    return table(("model", "task"), lines, more=more, note="Lengths are in tokens of context.")


def _loss(found: Sequence[Found]) -> Table:
    lines = []
    less: list[str] = []
    for one in found:
        result: Any = one.result
        for name, each in zip(several(one, result.models), result.summaries):
            mean = f"{result.unit} a token"
            cells = {mean: Cell(each.mean)}
            cells |= {f"after {a:,} to {b:,}": Cell(part) for (a, b), part in zip(result.bins, each.bins)}
            less += cells
            lines.append(Line((name,), cells, result.provenance.get("data", {}).get("name")))
    return table(("model",), lines, less=less)


def _lens(found: Sequence[Found]) -> Table:
    lines = []
    for one in found:
        result: Any = one.result
        cells = {"tuned lens": Cell(result.tuned), "logit lens": Cell(result.logit)}
        lines.append(Line((one.label,), cells))
    return table(("model",), lines, note="KL to the model's own answers in nats, mean over layers.")


def _overflow(found: Sequence[Found]) -> Table:
    lines = []
    more: list[str] = []
    for one in found:
        result: Any = one.result
        for curve in result.curves:
            cells = {"without filler": Cell(result.clean)}
            cells |= {f"{point.tokens:,} tokens": Cell(point.accuracy) for point in curve.points if point.tokens}
            more += cells
            lines.append(Line((one.label, curve.where), cells, curve.where))
    return table(("model", "filler"), lines, more=more, note="Accuracy.")


def _insertion(found: Sequence[Found]) -> Table:
    lines, names = [], ("clean accuracy", "at the hardest place", "worst of each example")
    for one in found:
        result: Any = one.result
        for curve in result.curves:
            numbers = (result.clean, curve.hardest.accuracy, curve.worst)
            lines.append(Line((one.label, curve.phrase), dict(zip(names, map(Cell, numbers))), curve.phrase))
    return table(("model", "phrase"), lines, more=names)


def _influence(found: Sequence[Found]) -> Table:
    lines = []
    for one in found:
        result: Any = one.result
        reach = result.output
        cells = {"rate λ": Cell(reach.decay.rate, digits=None)}
        cells["decay length"] = Cell(reach.decay.length, digits=None)
        cells[f"share of the last {result.recent}"] = Cell(reach.recent(result.recent))
        cells["90 % held within"] = _plain(reach.effective_context(0.9))
        lines.append(Line((one.label, reach.place), cells))
    return table(("model", "of"), lines, note="Decay length and context are in tokens, the rate is per token.")


def _heatmap(found: Sequence[Found]) -> Table:
    lines = []
    for one in found:
        result: Any = one.result
        for number, text in enumerate(result, start=1):
            tokens = " · ".join(f"{token.strip()} {score:.3f}" for _, token, score in text.top(result.size)[:8])
            cells = {"answer": Cell(text=text.answer), "p": Cell(Estimate(text.probability, math.nan, math.nan))}
            cells |= {"score": Cell(text=result.score), "highest tokens": Cell(text=tokens)}
            lines.append(Line((one.label, str(number)), cells))
    note = f"{ROWS:,} of {len(lines):,} texts." if len(lines) > ROWS else ""
    return table(("model", "text"), lines[:ROWS], note=note)


def _attention(found: Sequence[Found]) -> Table:
    import pandas as pd

    frames = []
    for one in found:
        result: Any = one.result
        frame = result.summary()
        frame["text"] += 1
        frame.insert(0, "model", one.label)
        frames.append(frame)
    every = pd.concat(frames, ignore_index=True)
    empty = [
        name for name in ("part", "outside") if not every[name].map(lambda cell: cell == cell and cell != "").any()
    ]
    return folded(every.drop(columns=empty), heads=["model"], limit=ROWS)


def _explain(found: Sequence[Found]) -> Table:
    lines = []
    for one in found:
        result: Any = one.result
        for number, text in enumerate(result, start=1):
            for each in text.attributions:
                scores = each.scores.tolist()
                top = " · ".join(f"{text.tokens[at].strip()} {scores[at]:.3g}" for at in text.top(each, result.top)[:8])
                cells = {"of": Cell(text=text.target), "f": _plain(text.value), "highest scores": Cell(text=top)}
                cells["relative error of the sum"] = _plain(math.nan if each.delta is None else each.delta)
                lines.append(Line((one.label, str(number), each.method), cells))
    note = f"{ROWS:,} of {len(lines):,} rows." if len(lines) > ROWS else ""
    return table(("model", "text", "method"), lines[:ROWS], note=note)


def _effect(found: Sequence[Found]) -> Table:
    lines = []
    for one in found:
        result: Any = one.result
        cells = {"answer": Cell(text=result.answer_name), "change": Cell(text=result.changed_name)}
        cells["p kept"] = _plain(result.kept)
        for layer, cosine in zip(result.layers, result.state_cosine.tolist()):
            cells[f"final states alike, layer {layer}"] = _plain(cosine)
        lines.append(Line((one.label,), cells))
    return table(("model",), lines, note="Alike: the cosine of the states before and after the change.")


def _plain(value: float) -> Cell:
    return Cell(Estimate(float(value), math.nan, math.nan), digits=None)


_KINDS: dict[str, Callable[[Sequence[Found]], Table]] = {
    "attention": _attention,
    "bound": _bound,
    "effect": _effect,
    "explain": _explain,
    "fidelity": _fidelity,
    "heatmap": _heatmap,
    "influence": _influence,
    "insertion": _insertion,
    "lens-fit": _lens,
    "loss": _loss,
    "overflow": _overflow,
    "plausibility": _plausibility,
    "position": _position,
    "prompts": _prompts,
    "retrieval": _retrieval,
    "snr": _snr,
    "stability": _stability,
    "words": _words,
}
