"""Goal of a search for triggers on its texts, exactly and to first order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ssmscope.attacks.curves import Questions
from ssmscope.attacks.poisoning.memory import NO_TRIGGER, Beginning, memory, share_gradients, steps, threshold
from ssmscope.attacks.poisoning.triggers import Slot, Trigger, Vocabulary, attacked
from ssmscope.attacks.words.hotflip import embedded, estimates, loss_gradients
from ssmscope.core.model import Model
from ssmscope.evaluation import label_words


@dataclass(eq=False)
class Goal:
    """Mean over texts of a number from 0 to 1 that a trigger is to raise, minus a penalty on a detector's suspicion.

    Attributes:
        objective: "forget": 1 − the survival of the span at the end; "plant": the probability of the target class;
            "flip": 1 − that of the true one.
        target: index of the planted class.
        penalty: weight of the detector's suspicion above `allowed`.
        window: the detectors' window in tokens.
        runs: number of texts run for values.
        gradients: number of gradients, one per text and trigger.
    """

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
    _beginnings: list[Beginning] = field(default_factory=list)
    _steps: np.ndarray | None = None

    @property
    def beginnings(self) -> list[Beginning]:
        """Traces of the texts before the triggers, computed on first use."""
        if not self._beginnings:
            detectors = (self.detector,) if self.penalty else ()
            self._beginnings = [Beginning.of(self.model, slot, detectors, self.window) for slot in self.slots]
        return self._beginnings

    @cached_property
    def allowed(self) -> float:
        """Suspicion that at most the share `alarms` of the clean texts exceeds.

        It is the attacker's estimate of the detector's threshold, from the attacker's own texts.
        """
        clean = [memory(self.model, each, NO_TRIGGER).suspicion[self.detector][0] for each in self.beginnings]
        return threshold(np.array(clean), self.alarms)

    def __call__(self, triggers: Sequence[Trigger]) -> Float[np.ndarray, " triggers"]:
        """Compute the value of every trigger."""
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
        texts = [
            attacked(self.asked, slot, self.vocabulary.text(trigger)) for trigger in triggers for slot in self.slots
        ]
        scores = self.asked.evaluator.scores(texts).reshape(len(triggers), len(self.slots), -1)
        shares = np.exp(scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True))
        if self.objective == "plant":
            return shares[..., self.target]
        return 1 - shares[:, np.arange(len(self.slots)), self.asked.labels[[slot.row for slot in self.slots]]]

    def gains(self, triggers: Sequence[Trigger], place: int) -> Float[Tensor, "triggers words"]:
        """Estimate to first order how much each word at a place would add to the goal without its penalty.

        This is HotFlip (Ebrahimi et al. 2018, Eq. 4), summed over texts as for the universal triggers of Wallace et al.
        (2019).
        """
        self.gradients += len(triggers) * len(self.slots)
        tokens = self.vocabulary.tokens(triggers)
        if self.objective == "forget":
            upwards = -share_gradients(self.model, self.slots, tokens)
        else:
            upwards = self._loss_gradients(tokens)
        words = embedded(self.model, self.vocabulary.ids)
        return estimates(upwards[:, place], words[[trigger[place] for trigger in triggers]], words)

    def _loss_gradients(self, tokens: np.ndarray) -> Float[Tensor, "triggers length width"]:
        words, sign = self.asked.evaluator.words, -1 if self.objective == "plant" else 1
        true = self.asked.labels[[slot.row for slot in self.slots]].tolist()
        labels = [self.target] * len(true) if self.objective == "plant" else true
        text = attacked(self.asked, self.slots[0], self.vocabulary.words[0])
        ids = label_words(self.model, words, after=text).ids if words else None
        rows = [(*slot.before, *own, *slot.after) for own in tokens.tolist() for slot in self.slots]
        found = loss_gradients(self.model, rows, labels * len(tokens), ids)
        starts = [len(slot.before) for slot in self.slots] * len(tokens)
        own = torch.stack([each[at : at + tokens.shape[1]] for each, at in zip(found, starts)])
        return sign * own.reshape(len(tokens), len(self.slots), *own.shape[1:]).sum(1)

    def largest_steps(self, number: int) -> Sequence[int]:
        """Return the words that replace the largest part of the states, the largest first."""
        if self._steps is None:
            self._steps = np.argsort(-steps(self.model, self.beginnings[:4], self.vocabulary.ids), kind="stable")
        return self._steps[:number].tolist()


@dataclass(frozen=True)
class Guided:
    """Words to try at a place: a third each by the largest gradient, by the largest steps, and at random.

    With `gradient_only` all are by the largest gradient.
    """

    goal: Goal
    candidates: int
    random: np.random.Generator
    gradient_only: bool = False

    def __call__(self, triggers: Sequence[Trigger], place: int) -> list[list[int]]:
        words = len(self.goal.vocabulary)
        third = self.candidates if self.gradient_only else -(-self.candidates // 3)
        ranked = self.goal.gains(triggers, place).topk(min(third, words)).indices.tolist()
        if self.gradient_only:
            return ranked
        large = self.goal.largest_steps(third)
        return [
            list(dict.fromkeys([*own, *large, *self.random.integers(0, words, third).tolist()]))[: self.candidates]
            for own in ranked
        ]
