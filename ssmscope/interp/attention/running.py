"""Maps of a batch of texts as the options ask for them, and their mean share on marked tokens over a data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ssmscope.api.options import chosen_layers
from ssmscope.api.provenance import record_provenance
from ssmscope.api.sharding.parts import Columns, over
from ssmscope.core.attention_layers import attention_numbers
from ssmscope.core.batching import by_length, tokens_at_once
from ssmscope.core.bootstrap import Estimate, estimates, resampled_means
from ssmscope.core.model import Model
from ssmscope.core.take_trace import TextsLike, as_batch, as_trace
from ssmscope.core.trace import Trace
from ssmscope.data.text import TextData
from ssmscope.errors import InputError
from ssmscope.interp.attention import measure
from ssmscope.interp.attention.maps import MarkedShare
from ssmscope.interp.attention.result import DataAttention
from ssmscope.interp.labelled import marked_tokens, read_texts


def shown_texts(
    model: Model | None,
    texts: TextsLike,
    asked: measure.Asked,
    marks: measure.Marks = None,
    *,
    layers: str | Sequence[int],
    parts: bool,
    rollout: bool,
    gradient: bool,
    target: int | str | None,
) -> tuple[Trace, list[measure.ShownText], list[str]]:
    """Return the trace of a batch, its texts with their maps, and the targets of a gradient."""
    if gradient:
        if model is None:
            raise InputError("gradient runs the model: give it before the texts")
        return measure.gradient_maps(model, as_batch(model, texts), layers, target, asked, marks)
    known = texts.layer_numbers if isinstance(texts, Trace) else () if model is None else model.layer_numbers
    softmax = () if model is None else attention_numbers(model.module)
    own, beside = measure.split_layers(layers, known, softmax)
    trace = as_trace(model, texts, keep_inputs=chosen_layers(own, known) if known else True)
    if not len(trace.linearized):
        raise InputError("the trace has no layers: take it with keep_inputs=True")
    chosen = chosen_layers(own, trace.layer_numbers)
    rows = range(len(trace))
    marked = [None] * len(trace) if marks is None else marks
    shown = [measure.ShownText(trace, row, asked, marked[row], rollout=rollout) for row in rows]
    hybrid = model if beside else None
    for index in () if rollout else chosen:
        linearized = trace.linearized[index]
        for row, text in enumerate(shown):
            one = linearized.of_text(row, text.length)
            for part in (None, *(one.parts if parts else ())):
                measure.add_maps(text, one, trace.layer_numbers[index], part)
    if rollout:
        weights: list[dict[int, Any]] = [{} for _ in shown]
        if hybrid is not None:
            batch = as_batch(hybrid, texts)
            weights = [measure.mean_weights(hybrid, batch, row, beside) for row in rows]
        measure.roll_out(trace, chosen, shown, weights)
    elif hybrid is not None:
        batch = as_batch(hybrid, texts)
        for row, text in enumerate(shown):
            if not measure.exceeds_map_limit(hybrid, 1, text.length):
                measure.see_softmax(hybrid, batch, row, beside, text.add_softmax)
    return trace, shown, []


def attention_over(
    model: Model, data: TextData, asked: measure.Asked, options: Mapping[str, Any], *, seed: int, **how: Any
) -> DataAttention:
    """Average the share of every map on the marked tokens over a data set's texts that have such tokens."""
    model.check_tokenizer()
    spans = data.rationales or [None] * len(data)
    marks = [marked_tokens(model, text, own) for text, own in zip(data.texts, spans)]
    used = [row for row, mask in enumerate(marks) if mask is not None]
    if not used:
        raise InputError(
            f"no text of {data.name} ({data.split}) has marked tokens: give a file with a column 'rationale', or name "
            "another by relevant=…"
        )

    def measured(rows: Sequence[int]) -> Columns:
        batch = model.encode([data.texts[row] for row in rows])
        trace, texts, _ = shown_texts(model, batch, asked, [marks[row] for row in rows], **how)
        if trace.bidirectional:
            raise InputError(f"{model.name} reads both ways: no query comes after the marked tokens; give single texts")
        shares = [[1 - each.readouts.outside for each in (*text.maps, text.even_map())] for text in texts]
        names = [[each.layer, each.part, each.head] for each in texts[0].maps]
        return {"shares": np.array(shares), "names": np.array(names)}

    provenance = record_provenance(model.source, options=options, seed=seed, data=data)
    lengths, _, _ = read_texts(model, data)
    kept = len(model.layer_numbers) * max(lengths) if asked.rows == "all" else 0
    batches = by_length(lengths, tokens_at_once(model.device, kept), rows=used)
    parts = list(over(model, batches, measured, provenance=provenance))
    order = np.argsort(np.concatenate([rows for rows, _ in parts]))
    shares = np.concatenate([part["shares"] for _, part in parts])[order]
    *found, (even, _, _) = estimates(resampled_means(shares, seed=seed)).tolist()
    names = parts[0][1]["names"].tolist()
    return DataAttention(
        provenance=provenance,
        level="gradient" if how["gradient"] else asked.level,
        heads=asked.heads,
        texts=len(used),
        left_out=len(data) - len(used),
        even=even,
        maps=tuple(
            MarkedShare(layer, part, head, Estimate(*share)) for (layer, part, head), share in zip(names, found)
        ),
    )
