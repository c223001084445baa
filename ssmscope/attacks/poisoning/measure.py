"""Steps of the attack: divide the texts, search triggers, and measure them on held-out texts of every model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from ssmscope.attacks.curves import Questions
from ssmscope.attacks.poisoning.memory import (
    DETECTORS,
    NO_TRIGGER,
    Beginning,
    Slot,
    Trigger,
    Vocabulary,
    attacked,
    memory,
    threshold,
)
from ssmscope.attacks.poisoning.result import FOUND, MATCHED, Alarm, Cost, Poisoned, Victim
from ssmscope.attacks.poisoning.search import Goal, Guided, random_search, search
from ssmscope.core.bootstrap import estimate, ratio, resampled_sums, share
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.evaluation.forking import token_rows
from ssmscope.loading.load import load


class Tried(NamedTuple):
    """Triggers that are reported together: one, or the mean of several random ones."""

    name: str
    triggers: tuple[Trigger, ...]
    value: float
    asked: int


class Seen(NamedTuple):
    """Measurements on every text with one trigger, or on the clean texts."""

    survival: Float[np.ndarray, " texts"]
    answers: Int[np.ndarray, " texts"]
    suspicion: Mapping[str, Float[np.ndarray, " texts"]]


def divided(slots: Sequence[Slot], train: int, seed: int) -> tuple[list[Slot], list[Slot], list[Slot]]:
    """Divide texts at random: at most a quarter to search on, a third of the rest for thresholds, and held-out ones."""
    if len(slots) < 4:
        raise InputError(
            f"{len(slots)} texts can be attacked; give at least four, for the search, thresholds and results"
        )
    drawn = [slots[at] for at in np.random.default_rng(seed).permutation(len(slots))]
    first = min(train, len(slots) // 4)
    second = first + (len(slots) - first) // 3
    return drawn[:first], drawn[first:second], drawn[second:]


def searched(
    goals: Mapping[str, Goal],
    length: int,
    draws: int,
    candidates: int,
    beam: int,
    sweeps: int,
    seed: int,
    advance: Callable[[], None],
) -> tuple[list[Tried], Cost]:
    """Return random triggers, the best of a random search of equal cost, and the trigger found for each goal. All
    searches start from the same random triggers, and all values are those of the first goal."""
    started = time.perf_counter()
    goal = next(iter(goals.values()))
    random = np.random.default_rng([seed, 1])
    starts = goal.vocabulary.drawn(random, draws, length)
    known: dict[Trigger, float] = {}
    asked = random_search(goal, starts, known).asked
    groups = [Tried("random", tuple(starts), float(np.mean([known[trigger] for trigger in starts])), asked)]
    for name, own in goals.items():
        guide = Guided(own, candidates, np.random.default_rng([seed, 2]), gradient_only=name == "hotflip")
        found = search(own, guide, starts, beam=beam, sweeps=sweeps, known=known if own is goal else None)
        value = found.value if own is goal else random_search(goal, [found.trigger], known).value
        groups.append(Tried(name, (found.trigger,), value, found.asked))
        advance()
    drawn = goal.vocabulary.drawn(random, groups[1].asked - asked, length)
    chance = random_search(goal, [*starts, *drawn], known)
    groups.insert(1, Tried("random search", (chance.trigger,), chance.value, chance.asked))
    advance()
    runs, gradients = (sum(getattr(each, what) for each in goals.values()) for what in ("runs", "gradients"))
    return groups, Cost(runs=runs, gradients=gradients, seconds=time.perf_counter() - started)


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
    texts = asked.wrapped(asked.contents[slot.row] for slot in slots)
    texts += [attacked(asked, slot, vocabulary.text(trigger)) for trigger in triggers for slot in slots]
    answers = asked.evaluator.answers(asked.evaluator.scores(texts)).reshape(1 + len(triggers), -1)
    return [
        Seen(survival[at], answers[at], {each: found[at] for each, found in suspicion.items()})
        for at in range(1 + len(triggers))
    ]


def auroc_counts(
    negative: np.ndarray, positive: np.ndarray, counts: Float[np.ndarray, "rows texts"]
) -> Float[np.ndarray, " rows"]:
    """Compute the area under the ROC curve, P(negative < positive) + P(negative = positive) / 2, of paired texts. Text
    i occurs counts[r, i] times in resample r on both sides."""
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
    """Compute all estimates of one model. `seen` are measurements on the clean texts, then with the triggers of all
    groups in order; `others` those on other clean texts, which set detectors' thresholds; `target` is the planted
    class."""
    clean, texts = seen[0], len(labels)
    counts = resampled_sums(np.eye(texts), seed=seed)
    thresholds = {each: threshold(others[0].suspicion[each], alarms) for each in DETECTORS}

    def mean(columns: Sequence[np.ndarray]) -> np.ndarray:
        """Average over triggers, then over the texts of every resample."""
        return counts @ np.mean(np.asarray(columns, dtype=np.float64), axis=0) / texts

    right, survived = mean([clean.answers == labels]), mean([clean.survival])
    elsewhere = labels != target

    def planted(own: Sequence[Seen]) -> np.ndarray:
        return ratio(mean([(one.answers == target) & elsewhere for one in own]), mean([elsewhere]))

    found, first = [], 1
    changed: dict[str, np.ndarray] = {}
    for group in groups:
        own = seen[first : first + len(group.triggers)]
        first += len(group.triggers)
        survival, single = mean([one.survival for one in own]), len(own) == 1
        flipped: list[Bool[np.ndarray, " texts"]] = [
            (one.answers != clean.answers) & (clean.answers == labels) for one in own
        ]
        changed[group.name] = ratio(mean(flipped), right)
        detected = []
        for each, limit in thresholds.items():
            areas = [auroc_counts(clean.suspicion[each], one.suspicion[each], counts) for one in own]
            caught = mean([one.suspicion[each] > limit for one in own])
            detected.append(Alarm(auroc=estimate(np.mean(areas, axis=0)), caught=estimate(caught, of=single * texts)))
        poisoned = Poisoned(
            name=group.name,
            trigger=vocabulary.text(group.triggers[0]) if len(group.triggers) == 1 else None,
            triggers=len(group.triggers),
            value=group.value,
            asked=group.asked,
            survival=estimate(survival),
            kept=estimate(ratio(survival, survived)),
            accuracy=estimate(mean([one.answers == labels for one in own]), of=single * texts),
            flipped=estimate(changed[group.name], of=single * right[0] * texts),
            planted=None if target is None else estimate(planted(own), of=single * int(elsewhere.sum())),
            alarms=tuple(detected),
            right=np.mean([one.answers == labels for one in own], axis=0),
            survived=np.mean([one.survival for one in own], axis=0),
        )
        found.append(poisoned)
    return Victim(
        model=name,
        survival=estimate(survived),
        accuracy=estimate(right, of=texts),
        planted=None if target is None else estimate(planted([clean]), of=int(elsewhere.sum())),
        thresholds=tuple(thresholds.values()),
        false_alarms=tuple(
            share(int((clean.suspicion[name] > most).sum()), texts) for name, most in thresholds.items()
        ),
        attacks=tuple(found),
        right=clean.answers == labels,
        beyond=estimate(changed[FOUND] - changed[MATCHED]) if MATCHED in changed else None,
    )


def other_models(model: Model, given: Sequence[str | Model]) -> list[Model]:
    """Load the models to which triggers are transferred."""
    where, labels = str(model.device), model.class_names
    found = [each if isinstance(each, Model) else load(each, device=where, labels=labels) for each in given]
    for other in found:
        if other.tokenizer is None or other.tokenizer.get_vocab() != model.tokenizer.get_vocab():
            raise InputError(
                f"{other.name} has another tokenizer than {model.name}; triggers transfer to models of the same one"
            )
        if other.is_classifier != model.is_classifier or other.labels != model.labels:
            raise InputError(f"{other.name} has other classes than {model.name}; give a model of the same task")
    return found


def read_otherwise(
    model: Model, asked: Questions, slots: Sequence[Slot], words: Vocabulary, groups: Sequence[Tried]
) -> Iterator[str]:
    """Describe triggers that the tokenizer splits differently in some texts."""
    for name, (trigger,) in ((group.name, group.triggers) for group in groups if len(group.triggers) == 1):
        rows = token_rows(model, [attacked(asked, slot, words.text(trigger)) for slot in slots])
        own = words.tokens([trigger])[0].tolist()
        other = sum(row != [*slot.before, *own, *slot.after] for row, slot in zip(rows, slots))
        if other:
            yield f"in {other} of {len(slots)} texts the trigger {name!r} is tokenized differently"
