"""Estimates of triggers on held-out texts: survival, answers and detectors, with intervals over the texts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from ssmscope.attacks.curves import Questions
from ssmscope.attacks.poisoning.memory import DETECTORS, NO_TRIGGER, Beginning, memory, threshold
from ssmscope.attacks.poisoning.result import Alarm, Poisoned, Victim
from ssmscope.attacks.poisoning.triggers import Slot, Trigger, Vocabulary, attacked
from ssmscope.core.bootstrap import estimate, ratio, resampled_sums
from ssmscope.core.model import Model


@dataclass(frozen=True)
class Tried:
    """Triggers that are reported together: one, or the mean of several random ones."""

    name: str
    triggers: tuple[Trigger, ...]
    value: float
    asked: int


@dataclass(frozen=True, eq=False)
class Seen:
    """Measurements on every text with one trigger, or on the clean texts."""

    survival: Float[np.ndarray, " texts"]
    answers: Int[np.ndarray, " texts"]
    suspicion: Mapping[str, Float[np.ndarray, " texts"]]


def observe(
    model: Model,
    asked: Questions,
    slots: Sequence[Slot],
    vocabulary: Vocabulary,
    triggers: Sequence[Trigger],
    window: int,
    advance: Callable[[], None],
) -> list[Seen]:
    """Measure the clean texts, and then the texts with each trigger."""
    survival = np.empty((1 + len(triggers), len(slots)))
    suspicion = {each: np.empty((1 + len(triggers), len(slots))) for each in DETECTORS}
    tokens = vocabulary.tokens(triggers) if triggers else NO_TRIGGER
    for at, slot in enumerate(slots):
        beginning = Beginning.of(model, slot, DETECTORS, window)
        parts = [memory(model, beginning, NO_TRIGGER)]
        parts += [memory(model, beginning, tokens)] if triggers else []
        survival[:, at] = np.concatenate([part.survival for part in parts])
        for each, found in suspicion.items():
            found[:, at] = np.concatenate([part.suspicion[each] for part in parts])
        advance()
    texts = [asked.before + asked.contents[slot.row] + asked.after for slot in slots]
    texts += [attacked(asked, slot, vocabulary.text(trigger)) for trigger in triggers for slot in slots]
    answers = asked.evaluator.answers(asked.evaluator.scores(texts)).reshape(1 + len(triggers), -1)
    return [
        Seen(survival[at], answers[at], {each: found[at] for each, found in suspicion.items()})
        for at in range(1 + len(triggers))
    ]


def auroc_counts(
    negative: Float[np.ndarray, " texts"],
    positive: Float[np.ndarray, " texts"],
    counts: Float[np.ndarray, "rows texts"],
) -> Float[np.ndarray, " rows"]:
    """Compute the area under the ROC curve, P(negative < positive) + P(negative = positive) / 2.

    Text i occurs counts[r, i] times in resample r on both sides, so pairs stay together.
    """
    wins = (negative[:, None] < positive) + 0.5 * (negative[:, None] == positive)
    pairs = counts.sum(1) ** 2
    return np.einsum("rt,rt->r", counts @ wins, counts) / pairs


def victim(
    name: str,
    labels: Int[np.ndarray, " texts"],
    seen: Sequence[Seen],
    groups: Sequence[Tried],
    vocabulary: Vocabulary,
    others: Sequence[Seen],
    alarms: float,
    target: int | None,
    seed: int,
) -> Victim:
    """Compute all estimates of one model.

    Args:
        seen: measurements on the clean texts, then with the triggers of all groups in order.
        others: measurements on other clean texts, which set the detectors' thresholds: the smallest that at most the
            share `alarms` of them exceeds.
        target: index of the planted class.
    """
    clean, texts = seen[0], len(labels)
    counts = resampled_sums(np.eye(texts), seed=seed)
    thresholds = {each: threshold(others[0].suspicion[each], alarms) for each in DETECTORS}

    def mean(column: np.ndarray) -> np.ndarray:
        return counts @ np.asarray(column, dtype=np.float64) / texts

    right, survived = mean(clean.answers == labels), mean(clean.survival)
    elsewhere = np.zeros(texts) if target is None else labels != target
    found, first = [], 1
    for group in groups:
        own = seen[first : first + len(group.triggers)]
        first += len(group.triggers)
        survival = mean(np.mean([one.survival for one in own], axis=0))
        flipped: Bool[np.ndarray, "triggers texts"] = np.array(
            [(one.answers != clean.answers) & (clean.answers == labels) for one in own]
        )
        planted = None
        if target is not None:
            share = np.mean([(one.answers == target) & elsewhere for one in own], axis=0)
            planted = estimate(ratio(mean(share), mean(elsewhere)))
        found.append(
            Poisoned(
                name=group.name,
                trigger=vocabulary.text(group.triggers[0]) if len(group.triggers) == 1 else None,
                triggers=len(group.triggers),
                value=group.value,
                asked=group.asked,
                survival=estimate(survival),
                kept=estimate(ratio(survival, survived)),
                accuracy=estimate(mean(np.mean([one.answers == labels for one in own], axis=0))),
                flipped=estimate(ratio(mean(flipped.mean(0)), right)),
                planted=planted,
                alarms=tuple(
                    Alarm(
                        auroc=estimate(
                            np.mean(
                                [auroc_counts(clean.suspicion[each], one.suspicion[each], counts) for one in own],
                                axis=0,
                            )
                        ),
                        caught=estimate(mean(np.mean([one.suspicion[each] > limit for one in own], axis=0))),
                    )
                    for each, limit in thresholds.items()
                ),
            )
        )
    share = (clean.answers == target) & (elsewhere > 0)
    return Victim(
        model=name,
        survival=estimate(survived),
        accuracy=estimate(right),
        planted=None if target is None else estimate(ratio(mean(share), mean(elsewhere))),
        thresholds=tuple(thresholds.values()),
        false_alarms=tuple(estimate(mean(clean.suspicion[each] > limit)) for each, limit in thresholds.items()),
        attacks=tuple(found),
    )
