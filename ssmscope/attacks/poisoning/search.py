"""Search for triggers: goals on texts, exactly and to first order, and a beam search guided by both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from ssmscope.attacks.curves import Questions
from ssmscope.attacks.poisoning.memory import (
    NO_TRIGGER,
    Beginning,
    Slot,
    Trigger,
    Vocabulary,
    attacked,
    memory,
    share_gradients,
    steps,
    threshold,
)
from ssmscope.attacks.words.hotflip import embedded, estimates, loss_gradients
from ssmscope.core.model import Model
from ssmscope.core.ties import descending, difference
from ssmscope.evaluation import label_words

Value = Callable[[Sequence[Trigger]], Float[np.ndarray, " triggers"]]
"""Goal of triggers, the larger the better."""
Proposals = Callable[[Sequence[Trigger], int], Sequence[Sequence[int]]]
"""Words to try at a place of every trigger."""


@dataclass(eq=False)
class Goal:
    """Mean over texts of a number from 0 to 1 that a trigger is to raise, minus `penalty` times a detector's suspicion
    above `allowed`. The number is, by `objective`, forget: 1 − the survival of the span at the end; plant: the
    probability of the target class; flip: 1 − that of the true one. `runs` and `gradients` count the texts that were
    run for values and for gradients, one per text and trigger."""

    model: Model
    asked: Questions
    slots: Sequence[Slot]
    vocabulary: Vocabulary
    objective: str
    target: int
    detector: str
    window: int
    penalty: float = 0.0
    alarms: float = 0.05
    runs: int = 0
    gradients: int = 0

    @cached_property
    def beginnings(self) -> list[Beginning]:
        """Traces of the texts before the triggers."""
        detectors = (self.detector,) if self.penalty else ()
        return [Beginning.of(self.model, slot, detectors, self.window) for slot in self.slots]

    @cached_property
    def allowed(self) -> float:
        """Attacker's estimate of the detector's threshold: what the share `alarms` of its own clean texts exceeds."""
        clean = [memory(self.model, each, NO_TRIGGER).suspicion[self.detector][0] for each in self.beginnings]
        return threshold(np.array(clean), self.alarms)

    @cached_property
    def largest_steps(self) -> list[int]:
        """Words in the order of the part of the states that they replace, the largest first."""
        return descending(steps(self.model, self.beginnings[:4], self.vocabulary.ids)).tolist()

    @property
    def labels(self) -> np.ndarray:
        """True classes of the texts."""
        return self.asked.labels[[slot.row for slot in self.slots]]

    def __call__(self, triggers: Sequence[Trigger]) -> Float[np.ndarray, " triggers"]:
        self.runs += len(triggers) * len(self.slots)
        found = np.zeros(len(triggers))
        if self.objective == "forget" or self.penalty:
            tokens = self.vocabulary.tokens(triggers)
            for beginning in self.beginnings:
                seen = memory(self.model, beginning, tokens)
                found += (1 - seen.survival) * (self.objective == "forget")
                if self.penalty:
                    found -= self.penalty * np.maximum(seen.suspicion[self.detector] - self.allowed, 0)
        if self.objective != "forget":
            found += self.answered(triggers).sum(1)
        return found / len(self.slots)

    def answered(self, triggers: Sequence[Trigger]) -> Float[np.ndarray, "triggers texts"]:
        """Compute the probability of the target, or of any class but the true one."""
        words = [self.vocabulary.text(trigger) for trigger in triggers]
        texts = [attacked(self.asked, slot, each) for each in words for slot in self.slots]
        scores = self.asked.evaluator.scores(texts).reshape(len(triggers), len(self.slots), -1)
        shares = np.exp(scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True))
        if self.objective == "plant":
            return shares[..., self.target]
        return 1 - shares[:, np.arange(len(self.slots)), self.labels]

    def gains(self, triggers: Sequence[Trigger], place: int) -> Float[Tensor, "triggers words"]:
        """Estimate to first order how much each word at a place would add to the goal without its penalty. This is
        HotFlip (Ebrahimi et al. 2018, Eq. 4), summed over texts as by Wallace et al. (2019)."""
        self.gradients += len(triggers) * len(self.slots)
        tokens = self.vocabulary.tokens(triggers)
        if self.objective == "forget":
            upwards = -share_gradients(self.model, self.slots, tokens)
        else:
            upwards = self._loss_gradients(tokens)
        words = embedded(self.model, self.vocabulary.ids)
        return estimates(upwards[:, place], words[[trigger[place] for trigger in triggers]], words)

    def _loss_gradients(self, tokens: np.ndarray) -> Float[Tensor, "triggers length width"]:
        words, plants = self.asked.evaluator.words, self.objective == "plant"
        labels = [self.target] * len(self.slots) if plants else self.labels.tolist()
        text = attacked(self.asked, self.slots[0], self.vocabulary.words[0])
        ids = label_words(self.model, words, after=text).ids if words else None
        rows = [(*slot.before, *own, *slot.after) for own in tokens.tolist() for slot in self.slots]
        found = loss_gradients(self.model, rows, labels * len(tokens), ids)
        starts = [len(slot.before) for slot in self.slots] * len(tokens)
        own = torch.stack([each[at : at + tokens.shape[1]] for each, at in zip(found, starts)])
        total = own.reshape(len(tokens), len(self.slots), *own.shape[1:]).sum(1)
        return -total if plants else total


@dataclass(frozen=True)
class Guided:
    """Words to try at a place: a third each by the largest gradient (or all), by the largest steps, and at random."""

    goal: Goal
    candidates: int
    random: np.random.Generator
    gradient_only: bool = False

    def __call__(self, triggers: Sequence[Trigger], place: int) -> list[list[int]]:
        words = len(self.goal.vocabulary)
        third = self.candidates if self.gradient_only else -(-self.candidates // 3)
        ranked = descending(self.goal.gains(triggers, place).cpu().numpy())[:, :third].tolist()
        if self.gradient_only:
            return ranked
        large = self.goal.largest_steps[:third]
        drawn = [self.random.integers(0, words, third).tolist() for _ in ranked]
        return [list(dict.fromkeys([*own, *large, *more]))[: self.candidates] for own, more in zip(ranked, drawn)]


class Found(NamedTuple):
    """End of a search: the best trigger, its value, and the number of evaluated triggers."""

    trigger: Trigger
    value: float
    asked: int


def search(
    value: Value,
    proposals: Proposals,
    starts: Sequence[Trigger],
    *,
    beam: int,
    sweeps: int,
    known: dict[Trigger, float] | None = None,
) -> Found:
    """Replace one token after the other, and keep the `beam` best of all evaluated triggers, from the best start on. A
    sweep is over all places; one that finds nothing better ends the search. `known` holds values, also new ones."""
    values = {} if known is None else known
    met = set(starts)
    kept = _best(value, starts, values, beam)
    for _ in range(sweeps):
        best = values[kept[0]]
        for place in range(len(kept[0])):
            offered = [
                (*trigger[:place], word, *trigger[place + 1 :])
                for trigger, words in zip(kept, proposals(kept, place))
                for word in words
            ]
            met.update(offered)
            kept = _best(value, [*kept, *offered], values, beam)
        if difference(values[kept[0]], best) <= 0:
            break
    return Found(kept[0], values[kept[0]], len(met))


def random_search(value: Value, drawn: Sequence[Trigger], known: dict[Trigger, float] | None = None) -> Found:
    """Return the best of random triggers."""
    values = {} if known is None else known
    (best,) = _best(value, drawn, values, 1)
    return Found(best, values[best], len(set(drawn)))


def _best(value: Value, triggers: Sequence[Trigger], values: dict[Trigger, float], number: int) -> list[Trigger]:
    """Evaluate triggers without a value and return the best in order; ties by their numbers."""
    new = [trigger for trigger in dict.fromkeys(triggers) if trigger not in values]
    if new:
        values.update(zip(new, map(float, value(new))))
    known = sorted(set(triggers))
    found = np.array([values[trigger] for trigger in known])
    return [known[at] for at in descending(found, float(np.abs(found).max(initial=0)))[:number]]
