"""Cuts of edges in every window of layers, part or head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from ssmscope.core.attention_layers import attention_layers, attention_modules, attention_numbers
from ssmscope.core.batching import tokens_at_once
from ssmscope.core.cuts import cut_attention, cut_convolution, cut_edges
from ssmscope.core.edits import Edit
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.knockout.result import Cut
from ssmscope.interp.scoring import check_heads, probability_and_logit

STATES, ATTENTION, ONE = "states", "attention", "one recurrence"
"""Parts of a hybrid: reads of states, and reads by softmax attention; and of a layer with a single recurrence."""


def others_have_attention(model: Model) -> bool:
    """Return True if parts that are not cut look back: attention without a cache, or the convolution before it."""
    cut = attention_layers(model.module)
    others = cut.keys() != attention_modules(model.module).keys()
    return others or any(getattr(part, "taps", 0) for part in cut.values())


def roads_of(model: Model) -> dict[int, tuple[list[int], list[int]]]:
    """Return the state-space layers and the attention layers at each of the model's own layer numbers, in order."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for kind, numbers in enumerate((model.layer_numbers, attention_numbers(model.module))):
        for number in numbers:
            found.setdefault(number, ([], []))[kind].append(number)
    return dict(sorted(found.items()))


def cuts_of(model: Model, batch: Batch, by: str, window: int) -> Iterator[Cut]:
    """Yield the cuts one after another; the first is everything in all layers."""
    roads = roads_of(model)
    layers, last = list(roads), len(roads) - 1
    before, after = (window - 1) // 2, window // 2
    windows = [(layers[max(0, at - before)], layers[min(last, at + after)]) for at in range(len(layers))]
    yield Cut(layers[0], layers[-1])
    if by == "window":
        yield from (Cut(*ends, attention=ends[0] == ends[1] and not roads[ends[0]][0]) for ends in windows)
    elif by == "part":
        parts = parts_of(model, batch)
        names = list(dict.fromkeys(name for own in parts.values() for name in own))
        if len(names) < 2:
            raise InputError(f"the layers of {model.name} have one recurrence each; leave out by='part'")
        for name in names:
            yield Cut(layers[0], layers[-1], part=name)
            having = [layer for layer in layers if name in parts[layer]]
            shown = [ends for ends in windows if any(ends[0] <= layer <= ends[1] for layer in having)]
            yield from (Cut(*ends, part=name) for ends in shown)
    else:
        trace = model.trace(batch.rows([0]))
        heads = {at: layer.recurrences[0].shape[2] for at, layer in zip(trace.layer_numbers, trace.layers)}
        check_heads(model, max(heads.values()), "leave out by 'head'")
        several = (part.config.num_attention_heads for part in attention_layers(model.module).values())
        attending = dict(zip(attention_numbers(model.module), several))
        kinds = (heads, STATES if attending else ""), (attending, ATTENTION)
        for number, own in roads.items():
            for found, (counts, name) in zip(own, kinds):
                yield from (Cut(number, number, head, name) for at in found for head in range(counts[at]))


def parts_of(model: Model, batch: Batch) -> dict[int, tuple[str, ...]]:
    """Return the names of a layer's recurrences, or a hybrid's ways to read, by number."""
    if attention_layers(model.module):
        roads = roads_of(model).items()
        return {at: (STATES,) * bool(states) + (ATTENTION,) * bool(reads) for at, (states, reads) in roads}
    trace = model.trace(batch.rows([0]))
    found = {}
    for index, layer in enumerate(trace.layers):
        count = len(layer.recurrences) + len(getattr(layer, "borrowed", ()))
        found[model.layer_numbers[index]] = trace.linearized[index].parts[:count] if count > 1 else (ONE,)
    return found


class CutRuns:
    """Runs of texts with edges cut from some tokens to others, a row for each cut."""

    def __init__(self, model: Model, batch: Batch, by: str, window: int, level: str, roads: str) -> None:
        self.model, self.batch, self.level, self.roads = model, batch, level, roads
        self.layers, self.hybrid = roads_of(model), bool(attention_layers(model.module))
        self.cuts = list(cuts_of(model, batch, by, window))
        self.parts = parts_of(model, batch) if by == "part" else {}
        self.heads = {(cut.first, cut.part): cut.head + 1 for cut in self.cuts if cut.head is not None}
        """Numbers of heads of the layers' parts whose heads are cut, one after another."""

    def answers(
        self, text: int, sources: Sequence[int], targets: Sequence[int], answer: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the answer's probability and logit with nothing cut, (2,), and with each cut, (2, cuts); of a
        regression NaN and the number."""
        one, found = self.batch.rows([text]), np.empty((2, len(self.cuts)))
        tokens = tokens_at_once(self.model.device, width=self.model.width)
        at_once = max(1, tokens // len(one.tokens[0]))
        for name in dict.fromkeys(cut.part for cut in self.cuts):
            own = [number for number, cut in enumerate(self.cuts) if cut.part == name]
            for chosen in (own[start : start + at_once] for start in range(0, len(own), at_once)):
                edits = self._edits(name, chosen, sources, targets)
                found[:, chosen] = self._run(one.rows([0] * len(chosen)), edits, answer)
        return self._run(one, [], answer)[:, 0], found

    def _run(self, batch: Batch, edits: Sequence[Edit], answer: int) -> np.ndarray:
        logits = self.model.run(batch, edits=edits, last_only=True).logits
        if self.model.gives == "numbers":
            number = logits[:, answer].double().cpu().numpy()
            return np.stack([np.full_like(number, np.nan), number])
        return torch.stack(probability_and_logit(self.model, logits, answer)).cpu().numpy()

    def _edits(self, name: str, chosen: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> list[Edit]:
        """Return the edits that make these cuts, of the part `name`, in a row each."""
        edits, later = [], range(min(sources), max(targets) + 1)
        for layer, (states, attending) in self.layers.items():
            rows = torch.tensor([self.cuts[number].first <= layer <= self.cuts[number].last for number in chosen])
            if (count := self.heads.get((layer, name))) is not None:
                every = torch.arange(count)
                which = [self.cuts[number].head for number in chosen]
                rows = rows.unsqueeze(-1) & torch.stack(
                    [every == head if head is not None else every >= 0 for head in which]
                )
            if not bool(rows.any()) or (name and not self.heads and name not in self.parts[layer]):
                continue
            if self.roads != "states":
                edits += [cut_convolution(sources, later, rows={index: rows}) for index in states]
            if self.roads == "convolution":
                continue
            if name != ATTENTION:
                recurrences = [self.parts[layer].index(name)] if name and not self.hybrid else None
                own: dict[str, Any] = {"recurrences": recurrences, "level": self.level}
                edits += [cut_edges(sources, targets, rows={index: rows}, **own) for index in states]
            if name != STATES:
                edits += [cut_attention(sources, targets, rows={index: rows}) for index in attending]
        return edits
