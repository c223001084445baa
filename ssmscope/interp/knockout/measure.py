"""Cuts of edges in every window of layers, part or head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from ssmscope.core.attention_layers import attention_layers, attention_modules, attention_numbers
from ssmscope.core.batching import TOKENS_AT_ONCE
from ssmscope.core.cuts import cut_attention, cut_convolution, cut_edges
from ssmscope.core.edits import Edit
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.interventions import check_heads
from ssmscope.interp.knockout.result import Cut


def others_have_attention(model: Model) -> bool:
    """Return True if parts that are not cut look back: attention without a cache, or the convolution before
    attention."""
    cut = attention_layers(model.module)
    return cut.keys() != attention_modules(model.module).keys() or any(
        getattr(part, "taps", 0) for part in cut.values()
    )


STATES, ATTENTION = "states", "attention"
"""Parts of a hybrid: reads of states, and reads by softmax attention."""


def roads_of(model: Model) -> dict[int, tuple[list[int], list[int]]]:
    """Return the state-space layers and the attention layers at each of the model's own layer numbers, in order."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for kind, numbers in enumerate((model.layer_numbers, attention_numbers(model.module))):
        for index, number in enumerate(numbers):
            found.setdefault(number, ([], []))[kind].append(index)
    return dict(sorted(found.items()))


def cuts_of(model: Model, batch: Batch, by: str, window: int) -> Iterator[Cut]:
    """Yield the cuts one after another; the first is everything in all layers."""
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
        check_heads(model, max(heads), "leave out by 'head'")
        attending = [part.config.num_attention_heads for part in attention_layers(model.module).values()]
        kinds = (heads, STATES if attending else ""), (attending, ATTENTION)
        for number, own in roads.items():
            for found, (counts, name) in zip(own, kinds):
                yield from (Cut(number, number, head, name) for index in found for head in range(counts[index]))


def parts_of(model: Model, batch: Batch) -> dict[int, tuple[str, ...]]:
    """Return the names of the recurrences of every layer, by its number, in order; none for a layer with one
    recurrence. In a hybrid the names of the ways it reads."""
    if attention_layers(model.module):
        roads = roads_of(model).items()
        return {at: (STATES,) * bool(states) + (ATTENTION,) * bool(reads) for at, (states, reads) in roads}
    trace = model.trace(batch.rows([0]))
    found = {}
    for index, layer in enumerate(trace.layers):
        count = len(layer.recurrences) + len(getattr(layer, "borrowed", ()))
        found[model.layer_numbers[index]] = trace.linearized[index].parts[:count] if count > 1 else ()
    return found


def edits_of(
    model: Model,
    cuts: Sequence[Cut],
    parts: Mapping[int, Sequence[str]],
    sources: Sequence[int],
    targets: Sequence[int],
    level: str,
    roads: str,
    length: int,
) -> Iterator[tuple[list[int], list[Edit]]]:
    """Yield numbers of cuts that run together, a row each, with the edits that make them; `parts` as from
    `parts_of`."""
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


def last_logits(model: Model, batch: Batch) -> torch.Tensor:
    """Return the logits at the end of every text of a batch, run at once under the edits in force."""
    with torch.no_grad(), model.running(mask=batch.mask):
        return model.forward(batch, last_only=True)
