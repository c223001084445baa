"""Pairs of texts as a model reads them: two batches of as many tokens, and the answers that are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from ssmscope.core.batching import by_length, tokens_at_once
from ssmscope.core.bootstrap import estimates, ratio, resampled_means
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.core.ties import difference
from ssmscope.data.pairs import PairData, Said
from ssmscope.errors import InputError
from ssmscope.interp.scoring import ScoredExamples, answer_ids


@dataclass(frozen=True, eq=False)
class EncodedPairs:
    """Clean and corrupted texts as batches, with the ids and names of both answers, each (pairs,)."""

    model: Model
    clean: Batch
    corrupted: Batch
    answers: tuple[tuple[int, int], ...]
    names: tuple[tuple[str, str], ...]

    def __len__(self) -> int:
        return len(self.answers)

    def batches(self, tokens: int) -> Iterator[list[int]]:
        """Yield pairs of similar length that run together."""
        yield from by_length(self.clean.lengths, tokens)

    def plain(self, batch: Batch) -> np.ndarray:
        """Return the differences of logits (pairs,) of plain runs of one side."""
        found = np.empty(len(self))
        for rows in self.batches(tokens_at_once(self.model.device, width=self.model.width)):
            found[rows] = self.measure(self.model.run(batch.rows(rows), last_only=True).logits, rows).cpu().numpy()
        return found

    def measure(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Return the difference of the logits of both answers for the rows' pairs, (rows,) float64."""
        ids = torch.tensor([self.answers[row] for row in rows], device=logits.device)
        found = logits.double().gather(1, ids)
        return found[:, 0] - found[:, 1]


def encode_pairs(model: Model, data: PairData, *, unequal: bool = False) -> EncodedPairs:
    """Encode pairs. Raise InputError, naming the pair, if its texts are the same or have one answer, or differ in
    length unless that is allowed.

    Answers that the data do not name are the predicted ones."""
    clean, corrupted = (_encoded(model, texts) for texts in (data.clean, data.corrupted))
    for number, (own, other) in enumerate(zip(clean.lengths, corrupted.lengths), 1):
        if own != other and not unequal:
            said = f"pair {number} of {data.name}: the clean text has {own} tokens and the corrupted one {other};"
            raise InputError(f"{said} give texts of as many tokens")
        if own == other and torch.equal(*(batch.input_ids[number - 1, :own] for batch in (clean, corrupted))):
            raise InputError(f"pair {number} of {data.name}: both texts have the same tokens; give two that differ")
    right, wrong = _answers(model, clean, data.targets), _answers(model, corrupted, data.contrasts)
    for number, (mine, theirs) in enumerate(zip(right, wrong), 1):
        if mine[0] == theirs[0]:
            said = f"pair {number} of {data.name}: both texts have the answer {mine[1]!r};"
            raise InputError(f"{said} name two that differ in the columns target and contrast")
    both = list(zip(right, wrong))
    ids, names = (tuple((mine[at], theirs[at]) for mine, theirs in both) for at in (0, 1))
    return EncodedPairs(model, clean, corrupted, ids, names)  # type: ignore[arg-type]


def _encoded(model: Model, texts: Sequence[Said]) -> Batch:
    if all(isinstance(text, str) for text in texts):
        return model.encode([str(text) for text in texts])
    if any(isinstance(text, str) for text in texts):
        raise InputError("some texts of the pairs are token ids and others are not; give one of the two")
    return model.encode(ids=[list(map(int, text)) for text in texts])


def _answers(model: Model, batch: Batch, given: Sequence[str | int | None]) -> list[tuple[int, str]]:
    if all(each is None for each in given):
        return list(zip(*answer_ids(model, batch, None)))
    found = []
    for row, each in enumerate(given):
        (number, *_), (name, *_) = answer_ids(model, batch.rows([row]), each)
        found.append((number, name))
    return found


@dataclass(frozen=True, eq=False)
class ScoredPairs(ScoredExamples):
    """Clean texts of pairs, measured by the difference of logits above that of the corrupted texts, (pairs,); `whole`
    is that of plain runs."""

    pairs: EncodedPairs
    corrupted: np.ndarray
    whole: np.ndarray
    measures, signs = ("share",), (-1.0,)

    @classmethod
    def of(cls, model: Model, data: PairData) -> ScoredPairs:
        """Run both sides of pairs."""
        pairs = encode_pairs(model, data)
        clean, corrupted = (pairs.plain(batch) for batch in (pairs.clean, pairs.corrupted))
        targets = torch.tensor([right for right, _ in pairs.answers])
        return cls(model, pairs.clean, targets, pairs, corrupted, whole_of(data.name, clean, corrupted))

    def measured(self, logits: Tensor, rows: Sequence[int]) -> np.ndarray:
        if logits.ndim == 3:
            ends = self.batch.last[list(rows)].to(logits.device)
            logits = logits[torch.arange(len(rows), device=logits.device), ends]
        return difference(self.pairs.measure(logits, rows).cpu().numpy(), self.corrupted[list(rows)])[:, None]

    def means(self, columns: np.ndarray, seed: int, rows: Sequence[int] | None = None) -> np.ndarray:
        return shares(columns, self.whole if rows is None else self.whole[list(rows)], seed)

    def donors(self, seed: int) -> tuple[Batch, np.ndarray]:
        return self.pairs.corrupted, np.arange(len(self))


def whole_of(name: str, clean: np.ndarray, corrupted: np.ndarray) -> np.ndarray:
    """Return the clean less the corrupted differences of logits. Raise InputError if their means are the same."""
    whole = clean - corrupted
    if not abs(whole.mean()) > 1e-6 * max(1e-30, float(np.abs([clean, corrupted]).max())):
        raise InputError(f"the answers of {name} do not differ between both runs; name other targets")
    return whole


def shares(changes: np.ndarray, whole: np.ndarray, seed: int) -> np.ndarray:
    """Return the mean of `changes` (pairs, …) relative to the mean of the `whole` (pairs,), with its bootstrap interval
    over pairs, (…, 3); one pair has no interval."""
    columns = np.concatenate([changes.reshape(len(changes), -1), whole[:, None]], axis=1)
    rows = resampled_means(columns, seed=seed)
    rows = rows if len(columns) > 1 else rows[:1]
    return estimates(ratio(rows[:, :-1], rows[:, -1:])).reshape(*changes.shape[1:], 3)
