"""Tables of the needle's probability by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ssmscope.core.bootstrap import Estimate
from ssmscope.render.blocks import Block, Picture, Prose
from ssmscope.render.numbers import counted, evenly_spaced
from ssmscope.render.table import Cell, Table, digits_of
from ssmscope.render.tokens import shorten, visible

if TYPE_CHECKING:
    from ssmscope.probes.snr.measure import SNRCurve, SNRDifference
    from ssmscope.probes.snr.result import NeedleSNR

MAX_LAYERS = 24
"""Maximum number of layers in a table, without the model's own answer."""
MODELS_PER_TABLE = 3
MAX_NAME_LETTERS = 20


def blocks(result: NeedleSNR) -> Iterator[Block]:
    """Yield, for each length, the needle's probability by layer over all tasks, with the difference of two models, and
    the models' own answers by task."""
    yield Prose(result.headline, "title")
    for model in result.models:
        yield Prose(f"{model.name}: {model.lens}, {model.layers} layers", "note")
    yield Picture(result.figure, result.headline)
    for length in result.lengths:
        curves = [result.curve(model.name, result.tasks[0], length) for model in result.models]
        both = [one for one in result.differences if (one.task, one.length) == (result.tasks[0], length)]
        title = f"Needle probability{'' if length is None else f', contexts of {length:,} {result.unit}'}"
        continued = f"{title} (continued)"
        for _, alike in groupby(curves, key=lambda curve: len(curve.layers)):
            deep = list(alike)
            apart = both if len(result.models) == len(deep) == 2 else []
            for start in range(0, len(deep), MODELS_PER_TABLE):
                yield _layers(title, deep[start : start + MODELS_PER_TABLE], apart)
                title = continued
        yield _answers(result, length)
    yield Prose(
        f"Means over {counted(result.curves[0].examples, 'question')}"
        f"{' of all tasks' if len(result.tasks) > 1 else ''}; 95 % bootstrap intervals over "
        "questions. Layer i reads the input of block i, 0 the embeddings; the last line is the model itself."
    )
    for one in result.differences:
        if (one.task, one.length) == (result.tasks[0], result.lengths[0]):
            two = f"{one.first} − {one.second}"
            mean = Cell(one.average, digits=digits_of([one.average]))
            yield Prose(f"Needle probability, mean over the layers below: {two} {mean.value} {mean.interval}", "note")
    for note in result.notes:
        yield Prose(f"Note: {note}.", "note")


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
