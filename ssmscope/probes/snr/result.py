"""Result of the needle's probability by layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pandas as pd
from ssmscope.api.results import Result
from ssmscope.core.bootstrap import INTERVALS, Estimate, with_intervals
from ssmscope.errors import InputError
from ssmscope.probes.snr.measure import METRICS, LayerDifference, LayerSNR, SNRCurve, SNRDifference
from ssmscope.render.blocks import Block, Picture, Prose
from ssmscope.render.numbers import counted, evenly_spaced
from ssmscope.render.table import Cell, Line, Table, as_share, digits_of, table, with_interval
from ssmscope.render.tokens import shorten, visible

MAX_LAYERS = 24
"""Maximum number of layers in a table, without the model's own answer."""
MODELS_PER_TABLE = 3
MAX_NAME_LETTERS = 20


@dataclass(frozen=True)
class LensedModel:
    """Model with its lens and its number of layers L."""

    name: str
    lens: str
    layers: int


@dataclass(frozen=True)
class NeedleSNR(Result, kind="snr"):
    """Probability of the needle by layer."""

    models: tuple[LensedModel, ...]
    unit: str
    curves: tuple[SNRCurve, ...]
    """Curves by length, then task ("all" first if there are several), then model."""
    differences: tuple[SNRDifference, ...]
    notes: tuple[str, ...]

    def verdict(self, at: int = 0) -> str:
        curve = self.curve(self.models[at].name)
        length = "" if curve.length is None else f" at {curve.length:,} {self.unit}"
        average, accuracy = with_interval(curve.average), with_interval(curve.accuracy)
        return f"needle probability {average}, mean of layers; accuracy {accuracy}{length}"

    @classmethod
    def compare(cls, results: Sequence[NeedleSNR], labels: Sequence[Sequence[str]]) -> Table:
        lines, accuracy, average = [], "accuracy", "needle probability, mean of layers"
        for result, given in zip(results, labels):
            own = [model.name for model in result.models]
            label = dict(zip(own, given if len(given) == len(own) else own))
            for curve in result.curves:
                where = "–" if curve.length is None else f"{curve.length:,} {result.unit}"
                cells = {average: Cell(curve.average), accuracy: Cell(curve.accuracy)}
                lines.append(Line((label[curve.model], curve.task, where), cells, (curve.task, curve.length)))
        return table(("model", "task", "context"), lines, more=[average, accuracy])

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, "all" first if there are several."""
        return tuple(dict.fromkeys(curve.task for curve in self.curves))

    @property
    def lengths(self) -> tuple[int | None, ...]:
        return tuple(dict.fromkeys(curve.length for curve in self.curves))

    def curve(self, model: str | None = None, task: str | None = None, length: int | None = None) -> SNRCurve:
        """Return a curve, by default of the first model, all tasks and the first length; raise InputError without
        one."""
        wanted = (model or self.models[0].name, task or self.tasks[0], self.lengths[0] if length is None else length)
        for curve in self.curves:
            if (curve.model, curve.task, curve.length) == wanted:
                return curve
        known = ", ".join(dict.fromkeys(f"{one.model}/{one.task}/{one.length}" for one in self.curves))
        raise InputError(f"there is no curve {'/'.join(map(str, wanted))}; there are {known}")

    @property
    def headline(self) -> str:
        if len(self.models) == 1:
            return f"Needle probability of {self.model_name}: {self._known(self.models[0])}"
        return f"Needle probability: {'; '.join(f'{model.name} {self._known(model)}' for model in self.models)}"

    def _known(self, model: LensedModel) -> str:
        """Describe the needle's final probability, and the layer from which on half of it is there."""
        needles = [one.needle.value for one in self.curve(model.name).layers]
        late = [at for at, value in enumerate(needles) if value < needles[-1] / 2]
        at = f" at {self.lengths[0]:,} {self.unit}" if len(self.lengths) > 1 else ""
        return f"{as_share(needles[-1])}{at}, half of it from layer {late[-1] + 1 if late else 0} of {model.layers} on"

    def to_frame(self) -> pd.DataFrame:
        """Return a row per model, task, length and layer, followed by those of the differences of two models. Columns:
        part (curve or difference), model ("first − second" of a difference), lens, task, length, examples, layer,
        depth, then needle, distractor, ratio, log_ratio, candidate, beats, rank and leads, each with the ends of its 95
        % interval in columns ending in _low and _high. A difference has needle and log_ratio."""
        lenses = {one.name: one.lens for one in self.models}
        rows: list[dict[str, Any]] = []
        for curve in self.curves:
            about: dict[str, Any] = {"part": "curve", "model": curve.model, "lens": lenses[curve.model]}
            about |= {"task": curve.task, "length": curve.length, "examples": curve.examples}
            names = ("needle", "distractor", "ratio", *list(METRICS)[2:])
            rows += [{**about, **_cells(layer, names)} for layer in curve.layers]
        for two in self.differences:
            about = {"part": "difference", "model": f"{two.first} − {two.second}", "lens": None, "task": two.task}
            about |= {"length": two.length, "examples": self.curve(two.first, two.task, two.length).examples}
            rows += [{**about, **_cells(layer, ("needle", "log_ratio"))} for layer in two.layers]
        return pd.DataFrame(rows).astype({"length": "Int64"})

    def blocks(self) -> Iterable[Block]:
        yield Prose(self.headline, "title")
        for model in self.models:
            yield Prose(f"{model.name}: {model.lens}, {model.layers} layers", "note")
        yield Picture(self.figure, self.headline)
        for length in self.lengths:
            curves = [self.curve(model.name, self.tasks[0], length) for model in self.models]
            both = [one for one in self.differences if (one.task, one.length) == (self.tasks[0], length)]
            title = f"Needle probability{'' if length is None else f', contexts of {length:,} {self.unit}'}"
            continued = f"{title} (continued)"
            for _, alike in groupby(curves, key=lambda curve: len(curve.layers)):
                deep = list(alike)
                apart = both if len(self.models) == len(deep) == 2 else []
                for start in range(0, len(deep), MODELS_PER_TABLE):
                    yield _layers(title, deep[start : start + MODELS_PER_TABLE], apart)
                    title = continued
            yield _answers(self, length)
        yield Prose(
            f"Means over {counted(self.curves[0].examples, 'question')}"
            f"{' of all tasks' if len(self.tasks) > 1 else ''}; {INTERVALS}, over "
            "questions. Layer i reads the input of block i, 0 the embeddings; the last line is the model itself.",
            "definition",
        )
        for one in self.differences:
            if (one.task, one.length) == (self.tasks[0], self.lengths[0]):
                two = f"{one.first} − {one.second}"
                mean = Cell(one.average, digits=digits_of([one.average]))
                yield Prose(
                    f"Needle probability, mean over the layers below: {two} {mean.value} {mean.interval}", "note"
                )
        for note in self.notes:
            yield Prose(f"Note: {note}.", "note")


def _cells(layer: LayerSNR | LayerDifference, names: Sequence[str]) -> Mapping[str, Any]:
    found = with_intervals(**{name: getattr(layer, name) for name in names})
    return {"layer": layer.layer, "depth": layer.depth, **found}


def _layers(title: str, curves: Sequence[SNRCurve], apart: Sequence[SNRDifference]) -> Table:
    layers = len(curves[0].layers) - 1
    digits = digits_of(layer.needle for one in curves for layer in one.layers)
    rows = []
    for layer in (*evenly_spaced(layers, MAX_LAYERS), layers):
        needles = [*(one.layers[layer].needle for one in curves), *(one.layers[layer].needle for one in apart)]
        rows.append((("model" if layer == layers else str(layer),), tuple(Cell(one, digits=digits) for one in needles)))
    columns = (*(shorten(visible(curve.model), MAX_NAME_LETTERS) for curve in curves), *("difference" for _ in apart))
    return Table(("layer",), columns, tuple(rows), title=title)


def _answers(result: NeedleSNR, length: int | None) -> Table:
    curves = [curve for curve in result.curves if curve.length == length]
    columns = {"accuracy": [Cell(curve.accuracy) for curve in curves]}
    if not all(math.isnan(curve.chance) for curve in curves):
        columns["ln(needle / distractor)"] = [Cell(curve.layers[-1].log_ratio) for curve in curves]
        columns["among candidates"] = [Cell(curve.layers[-1].candidate) for curve in curves]
        columns["chance"] = [Cell(Estimate(curve.chance, math.nan, math.nan)) for curve in curves]
    labels = [(shorten(visible(curve.task), 12), shorten(visible(curve.model), MAX_NAME_LETTERS)) for curve in curves]
    title = "The models' own answers" if len(result.models) > 1 else "The model's own answer"
    return Table(("task", "model"), tuple(columns), tuple(zip(labels, zip(*columns.values()))), title=title)
