"""Edges cut in every window of layers, part or head: the answer's probability and logit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ssmscope.api.results import record_provenance
from ssmscope.core.attention_layers import attention_layers, attention_modules, attention_numbers
from ssmscope.core.batching import TOKENS_AT_ONCE
from ssmscope.core.bootstrap import estimates, resampled_means
from ssmscope.core.cuts import cut_attention, cut_convolution, cut_edges
from ssmscope.core.edits import Edit, edited
from ssmscope.core.encoding import Batch
from ssmscope.core.mixers import is_bidirectional
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.answers import answers, measured
from ssmscope.interp.knockout.result import Cut, Knockout
from ssmscope.interp.spans import Span, named, positions_of, span_name

MOST_HEADS = 256
"""Of a layer: with more they are channels, one by one."""


def sweep(
    model: Model,
    batch: Batch,
    sources: Sequence[Span],
    target: Span,
    by: str,
    level: str,
    roads: str,
    window: int | None,
    answer: int | str | None,
    seed: int,
) -> Knockout:
    """See `ssmscope.knockout`."""
    texts, layers = len(batch.tokens), len(roads_of(model))
    window = max(1, layers // 5) if window is None else window
    if window > layers:
        raise InputError(f"window is {window}; {model.name} has {layers} layers")
    if roads != "states" and by != "window":
        raise InputError(f"the convolution is cut in windows of layers; leave out by {by!r} or roads {roads!r}")
    if not sources:
        raise InputError("from_ is empty; give words of the text, positions such as 3 or 3:5, or last")
    to = [positions_of(target, batch, text) for text in range(texts)]
    spans = [[positions_of(span, batch, text) for text in range(texts)] for span in sources]
    names, goal = [span_name(span) for span in sources], span_name(target)
    for name, places in zip(names, spans):
        for text, (own, read) in enumerate(zip(places, to)):
            if min(own) > max(read) and not is_bidirectional(model.module):
                which = f" of text {text + 1}" if texts > 1 else ""
                raise InputError(f"no edge leads from {name!r}{which} back to {goal!r}: a token reads those before it")
    cuts = list(cuts_of(model, batch, by, window))
    parts = parts_of(model, batch) if by == "part" else {}
    ids, said = answers(model, batch, answer)
    values = np.empty((2, texts, len(sources), len(cuts)))
    plain = np.empty((2, texts))
    for text in range(texts):
        one = batch.rows([text])
        plain[:, text] = [float(each) for each in measured(model, _last(model, one), ids[text])]
        for number, places in enumerate(spans):
            for chosen, edits in _edits(model, cuts, parts, places[text], to[text], level, roads, len(one.tokens[0])):
                with edited(model, edits):
                    logits = _last(model, one.rows([0] * len(chosen)))
                values[:, text, number, chosen] = torch.stack(measured(model, logits, ids[text])).cpu().numpy()
    change = values[0] / plain[0][:, None, None] - 1
    rows = resampled_means(change.reshape(texts, -1), seed=seed)
    ends = estimates(rows.reshape(len(rows), len(sources), len(cuts)))
    if texts == 1:
        ends[..., 1:] = np.nan
    options: dict[str, Any] = {"from": names, "to": goal, "by": by, "level": level, "roads": roads}
    options |= {"window": window, "answer": answer}
    return Knockout(
        provenance=record_provenance(model.source, options=options, seed=seed),
        tokens=batch.tokens,
        answers=tuple(said),
        sources=tuple(names) if texts > 1 else tuple(named(each[0], batch) for each in spans),
        spans=tuple(tuple(each) for each in spans),
        target=goal if texts > 1 else named(to[0], batch),
        targets=tuple(to),
        by=by,
        roads=roads,
        cuts=tuple(cuts),
        probability=plain[0],
        logit=plain[1],
        probabilities=values[0],
        logits=values[1],
        changes=ends,
        attends=_others_have_attention(model),
    )


def _others_have_attention(model: Model) -> bool:
    """Whether something looks back that is not cut: attention without a cache, or the convolution before attention."""
    cut = attention_layers(model.module)
    return cut.keys() != attention_modules(model.module).keys() or any(
        getattr(part, "taps", 0) for part in cut.values()
    )


STATES, ATTENTION = "states", "attention"
"""The parts of a hybrid: what goes through states, and what through softmax attention."""


def roads_of(model: Model) -> dict[int, tuple[list[int], list[int]]]:
    """Through what a token can read others, by the model's own layer numbers in their order: which of its state-space
    layers, and which of its layers of attention."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for kind, numbers in enumerate((model.layer_numbers, attention_numbers(model.module))):
        for index, number in enumerate(numbers):
            found.setdefault(number, ([], []))[kind].append(index)
    return dict(sorted(found.items()))


def cuts_of(model: Model, batch: Batch, by: str, window: int) -> Iterator[Cut]:
    """What is cut, one after the other; the first is all of it in all layers.

    Raises:
        InputError: for parts of a model whose layers have one, and for heads that are channels.
    """
    roads = roads_of(model)
    layers = list(roads)
    every = Cut(layers[0], layers[-1])
    windows = [
        (layers[max(0, at - (window - 1) // 2)], layers[min(len(layers) - 1, at + window // 2)])
        for at in range(len(layers))
    ]
    yield every
    if by == "window":
        yield from (Cut(*ends) for ends in windows)
    elif by == "part":
        names = list(dict.fromkeys(name for parts in parts_of(model, batch).values() for name in parts))
        if len(names) < 2:
            raise InputError(f"the layers of {model.name} have one recurrence each; leave out by 'part'")
        yield from (Cut(*ends, part=name) for name in names for ends in [(every.first, every.last), *windows])
    else:
        trace = model.trace(batch.rows([0]))
        heads = [layer.recurrences[0].shape[2] for layer in trace.layers]
        if max(heads) > MOST_HEADS:
            raise InputError(f"the {max(heads):,} heads of {model.name} are single channels; leave out by 'head'")
        attending = [part.config.num_attention_heads for part in attention_layers(model.module).values()]
        kinds = (heads, STATES if attending else ""), (attending, ATTENTION)
        for number, own in roads.items():
            for found, (counts, name) in zip(own, kinds):
                yield from (Cut(number, number, head, name) for index in found for head in range(counts[index]))


def parts_of(model: Model, batch: Batch) -> dict[int, tuple[str, ...]]:
    """The names of the recurrences of every layer, by its number, in their order; none for a layer that has one. Of a
    hybrid what it reads by."""
    if attention_layers(model.module):
        roads = roads_of(model).items()
        return {at: (STATES,) * bool(states) + (ATTENTION,) * bool(reads) for at, (states, reads) in roads}
    trace = model.trace(batch.rows([0]))
    found = {}
    for index, layer in enumerate(trace.layers):
        count = len(layer.recurrences) + len(getattr(layer, "borrowed", ()))
        found[model.layer_numbers[index]] = trace.linearized[index].parts[:count] if count > 1 else ()
    return found


def _edits(
    model: Model,
    cuts: Sequence[Cut],
    parts: Mapping[int, Sequence[str]],
    sources: Sequence[int],
    targets: Sequence[int],
    level: str,
    roads: str,
    length: int,
) -> Iterator[tuple[list[int], list[Edit]]]:
    """Numbers of cuts that are run together, a row each, with the edits that make them; `parts` as `parts_of`."""
    heads: dict[tuple[int, str], int] = {}
    for cut in cuts:
        if cut.head is not None:
            heads[cut.first, cut.part] = max(heads.get((cut.first, cut.part), 0), cut.head + 1)
    at_once, later = max(1, TOKENS_AT_ONCE // length), range(min(sources) + 1, max(targets) + 1)
    hybrid = bool(attention_layers(model.module))
    for name in dict.fromkeys(cut.part for cut in cuts):
        own = [number for number, cut in enumerate(cuts) if cut.part == name]
        for start in range(0, len(own), at_once):
            chosen = own[start : start + at_once]
            edits = []
            for layer, (states, attending) in roads_of(model).items():
                rows = torch.tensor([cuts[number].first <= layer <= cuts[number].last for number in chosen])
                if (count := heads.get((layer, name))) is not None:
                    which = [cuts[number].head for number in chosen]
                    each = [
                        torch.arange(count) == head if head is not None else torch.arange(count) >= 0 for head in which
                    ]
                    rows = rows.unsqueeze(-1) & torch.stack(each)
                if not bool(rows.any()) or (name and not heads and name not in parts[layer]):
                    continue
                if roads != "states":
                    edits += [cut_convolution(sources, later, rows={index: rows}) for index in states]
                if roads == "convolution":
                    continue
                if name != ATTENTION:
                    recurrences = [parts[layer].index(name)] if name and not hybrid else None
                    edits += [
                        cut_edges(sources, targets, rows={index: rows}, recurrences=recurrences, level=level)
                        for index in states
                    ]
                if name != STATES:
                    edits += [cut_attention(sources, targets, rows={index: rows}) for index in attending]
            yield chosen, edits


def _last(model: Model, batch: Batch) -> torch.Tensor:
    with torch.no_grad(), model.running(mask=batch.mask):
        return model.forward(batch, last_only=True)
