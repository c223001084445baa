"""Scores of runs, edited or not: the answer's probability; on known answers loss and accuracy; and their means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from ssmscope.core.batching import by_length
from ssmscope.core.bootstrap import estimates, resampled_means, shares
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.data.pixels import PixelData
from ssmscope.data.text import TextData
from ssmscope.data.tokens import IGNORED, SequenceData, TokenData
from ssmscope.errors import InputError
from ssmscope.interp.labelled import class_ids
from ssmscope.interp.objective import objective, tokens_that_fit

if TYPE_CHECKING:
    from ssmscope.api.inputs import ExampleData

MEASURES = ("loss", "accuracy", "probability")
"""Measures of the right class, or, averaged over a row's positions, of the right next token; the loss in nats."""
HARM_SIGNS = (1.0, -1.0, -1.0)
"""Sign of a change that is harm, for each measure."""


@dataclass(frozen=True, eq=False)
class ScoredExamples:
    """Encoded examples with their classes, or (examples, length) next tokens, `IGNORED` where none is asked."""

    model: Model
    batch: Batch
    targets: Tensor
    measures: ClassVar[tuple[str, ...]] = MEASURES
    signs: ClassVar[tuple[float, ...]] = HARM_SIGNS

    def __len__(self) -> int:
        return len(self.batch.tokens)

    @property
    def room(self) -> int:
        """Number of tokens that run together."""
        return tokens_that_fit(self.model, every_position=not self.model.is_classifier)

    def batches(self, rows: Sequence[int] | None = None) -> Iterator[list[int]]:
        """Yield examples of similar length that run together."""
        yield from by_length(self.batch.lengths, self.room, rows=rows)

    def measured(self, logits: Tensor, rows: Sequence[int]) -> np.ndarray:
        """Return the measures (runs, measures) for logits of the last or all positions; `rows` has each run's
        example."""
        targets = self.targets[list(rows)]
        if targets.ndim == 1:
            logits, targets = logits.unsqueeze(1), targets.unsqueeze(1)
        targets = targets[:, : logits.shape[1]].to(logits.device)
        asked = targets != IGNORED
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        wanted = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        log_p = (wanted - logits.logsumexp(-1)).double()
        each = torch.stack([-log_p, (logits.argmax(-1) == targets).double(), log_p.exp()], dim=-1)
        sums = (each * asked.unsqueeze(-1)).sum(1)
        return (sums / asked.sum(1, keepdim=True)).cpu().numpy()

    def means(self, columns: np.ndarray, seed: int, rows: Sequence[int] | None = None) -> np.ndarray:
        """Return the mean over examples, or these of them, with its interval."""
        return means_with_intervals(columns, seed)

    def levels(self, columns: np.ndarray, seed: int, rows: Sequence[int] | None = None) -> np.ndarray:
        """Return `means` of the measures themselves, not of changes: a classifier's accuracy has Wilson's interval."""
        found = self.means(columns, seed, rows)
        if self.measures == MEASURES and self.targets.ndim == 1:
            found[..., 1, :] = shares(columns[..., 1].sum(0), len(columns))
        return found

    def donors(self, seed: int) -> tuple[Batch, np.ndarray]:
        """Return texts and for each example the one whose values it gets: the next in a cycle through all."""
        cycle = np.random.default_rng(seed).permutation(len(self))
        found = np.empty_like(cycle)
        found[cycle] = np.roll(cycle, 1)
        return self.batch, found


def scored_examples(model: Model, data: ExampleData) -> ScoredExamples:
    """Encode labelled texts, sequences or images of a classifier, or rows of tokens of a language model."""
    model.check_classes(f"accuracy on {data.name}")
    kind = type(data).__name__
    if isinstance(data, TokenData) == model.is_classifier:
        wants = "a classifier: give labelled examples" if model.is_classifier else "a language model: give rows of text"
        raise InputError(f"{kind} was given, and {model.name} is {wants}")
    if isinstance(data, TokenData):
        targets = torch.from_numpy(data.targets)
        if not bool((targets != IGNORED).any(1).all()):
            raise InputError(f"a row of {data.name} ({data.split}) asks for nothing")
        return ScoredExamples(model, model.encode(ids=data.ids.tolist()), targets.to(model.device))
    if isinstance(data, PixelData):
        batch = model.encode(values=data.pixels)
    elif isinstance(data, SequenceData):
        batch = model.encode(ids=data.ids.tolist())
    elif isinstance(data, TextData):
        batch = model.encode(list(data.texts))
    else:
        raise InputError(f"data of {kind} was given; give labelled texts, sequences or images, or rows of tokens")
    return ScoredExamples(model, batch, torch.from_numpy(class_ids(model, data)).to(model.device))


MAX_HEADS = 256
"""Largest number of heads of a layer; with more, heads are single channels."""


def check_heads(model: Model, heads: int, instead: str) -> None:
    """Raise InputError if the heads of a layer are single channels; `instead` says what to do."""
    if heads > MAX_HEADS:
        raise InputError(f"the {heads:,} heads of {model.name} are single channels; {instead}")


def means_with_intervals(columns: Float[np.ndarray, "examples ..."], seed: int) -> Float[np.ndarray, "... three"]:
    """Return the mean over examples and its interval, all from one set of resamples; one example has no interval."""
    rows = resampled_means(columns.reshape(len(columns), -1), seed=seed)
    rows = rows if len(columns) > 1 else rows[:1]
    return estimates(rows.reshape(len(rows), *columns.shape[1:]))


def answer_ids(model: Model, batch: Batch, answer: int | str | None) -> tuple[list[int], list[str]]:
    """Return for every text the id and the name of the class or token in question; by default the predicted one."""
    goal = objective(model, batch, target=answer)
    if goal.continues:
        raise InputError(
            f"the answer {answer!r} has several tokens; give one, with the space before it where it has one"
        )
    return [ids[0] for ids in goal.targets], list(goal.names)


def probability_and_logit(model: Model, logits: Tensor, answer: int) -> tuple[Tensor, Tensor]:
    """Return the answer's probability and logit in every row of logits (rows, classes), float64."""
    precise = logits.double()
    return model.probabilities(precise)[:, answer], precise[:, answer]
