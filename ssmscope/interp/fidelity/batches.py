"""Texts whose tokens can be ranked, and all that is measured on a batch of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor
from ssmscope.api.sharding.parts import Columns
from ssmscope.core.model import Model
from ssmscope.data.pixels import PixelData
from ssmscope.data.text import TextData
from ssmscope.errors import InputError
from ssmscope.interp.fidelity.measure import (
    hidden_sets,
    knockout_effects,
    ranking,
    run_hidden,
    text_measures,
    tied_share,
)
from ssmscope.interp.labelled import encoded_rows, read_texts, row_targets, token_scores
from ssmscope.interp.objective import objective
from ssmscope.interp.plausibility.measure import marked_share


@dataclass(frozen=True, eq=False)
class Rankable:
    """Texts of at least two tokens.

    Attributes:
        data: all texts.
        lengths, sizes: number of tokens of each, with and without special ones.
        masks: rationale of each, if people marked it.
        rows: the texts that are measured.
        long: number of texts that are longer than the maximum.
        share: mean share of the tokens that rationales mark; None without rationales.
    """

    data: TextData | PixelData
    lengths: Sequence[int]
    sizes: Sequence[int]
    masks: Sequence[np.ndarray | None]
    rows: list[int]
    long: int
    share: float | None


def rankable(model: Model, data: TextData | PixelData, max_tokens: int | None) -> Rankable:
    """Return the texts of at most `max_tokens` tokens that can be ranked; raise InputError if there is none."""
    lengths, sizes, masks = read_texts(model, data)
    fits = [max_tokens is None or length <= max_tokens for length in lengths]
    rows = [row for row, size in enumerate(sizes) if size > 1 and fits[row]]
    if not rows:
        asked = "has two tokens" if max_tokens is None else f"has between two tokens and {max_tokens:,}"
        raise InputError(f"no text of {data.name} ({data.split}) {asked}: there is nothing to rank")
    marked = [masks[row] for row in rows]
    share = marked_share(marked) if any(mask is not None for mask in marked) else None
    return Rankable(data, lengths, sizes, masks, rows, fits.count(False), share)


@dataclass(frozen=True, eq=False, kw_only=True)
class Measures:
    """All measurements of a batch, with the options of `fidelity_auc`.

    Attributes:
        methods: functions from an objective to attributions, by name.
        grid: shares of hidden tokens.
        layers: layers in which tokens are knocked out, one after the other; None for all at once.
        further: captum's measures.
        fill: embedding that replaces a hidden token's.
        random: number of random rankings.
    """

    model: Model
    texts: Rankable
    methods: Mapping[str, Callable[..., Any]]
    grid: Sequence[Fraction]
    layers: Sequence[int | None]
    further: Sequence[str]
    fill: Tensor
    random: int
    mode: str
    value: str
    target: int | str | None
    batch_size: int | None
    seed: int

    def __call__(self, rows: Sequence[int]) -> Columns:
        """Return the measurements of texts, a row for each."""
        batch = encoded_rows(self.model, self.texts.data, rows)
        goal = objective(self.model, batch, target=row_targets(self.model, self.texts.data, rows, self.target))
        if self.layers and goal.continues:
            raise InputError("knocking tokens out measures one next token; give a target of one token")
        given = {name: method(goal) for name, method in self.methods.items()}
        scores = [token_scores(name, each, batch) for name, each in given.items()]
        drawn = [np.random.default_rng([self.seed, row]).random((self.random, self.texts.sizes[row])) for row in rows]
        every = [np.concatenate([[own[text] for own, _ in scores], each]) for text, each in enumerate(drawn)]
        measured = self._measured(rows, batch, goal.targets, every)
        numbers = [found for found, _ in measured]
        if self.further:
            from ssmscope.interp.fidelity.captum_measures import captum_measures

            theirs = captum_measures(self.further, goal, self.methods, every, fill=self.fill, seed=self.seed)
            numbers = [np.concatenate(both, axis=1) for both in zip(numbers, theirs)]
        converged = [np.ones(len(rows), dtype=bool) if own is None else own for _, own in scores]
        return {
            "values": np.stack(numbers),
            "curves": np.stack([curves for _, curves in measured]),
            "targets": np.array([ids[0] for ids in goal.targets]),
            "tied": np.array([[tied_share(own) for own in each[: len(given)]] for each in every]),
            "unconverged": ~np.stack(converged, axis=1),
            "said": np.full(len(rows), "\n".join(f"{name}: {each.note}" for name, each in given.items() if each.note)),
        }

    def _measured(
        self, rows: Sequence[int], batch: Any, targets: Sequence[tuple[int, ...]], scores: Sequence[np.ndarray]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return `text_measures` of every text of a batch, from its methods' and random scores (rankings, tokens)."""
        methods, how = len(self.methods), dict[str, Any](value=self.value, batch_size=self.batch_size)
        places = [np.concatenate([ranking(each[:methods]), (-each[methods:]).argsort(1).argsort(1)]) for each in scores]
        hidden = [hidden_sets(each, self.grid) for each in places]
        sets = [each.sets for each in hidden]
        values = run_hidden(self.model, batch, targets, sets, fill=self.fill, mode=self.mode, **how)
        effects: list[Any] = [None] * len(rows)
        if self.layers:
            effects = knockout_effects(self.model, batch, [ids[0] for ids in targets], layers=self.layers, **how)
        rationales = [None if self.texts.share is None else self.texts.masks[row] for row in rows]
        of_texts = zip(scores, hidden, values, rationales, effects)
        return [text_measures(*text, methods=methods, share=self.texts.share) for text in of_texts]
