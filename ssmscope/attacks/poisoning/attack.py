"""The whole attack: texts parted, triggers searched, and measured on the model and on those that they are taken to."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ssmscope.attacks.curves import Questions, questions
from ssmscope.attacks.poisoning.goals import Goal, Guided
from ssmscope.attacks.poisoning.measure import Tried, observe, victim
from ssmscope.attacks.poisoning.memory import DETECTORS
from ssmscope.attacks.poisoning.result import Cost, StatePoisoning, Victim
from ssmscope.attacks.poisoning.search import random_search, search
from ssmscope.attacks.poisoning.triggers import Slot, Vocabulary, attacked, slots_of
from ssmscope.errors import InputError, did_you_mean
from ssmscope.evaluation.encoded import token_rows
from ssmscope.limits import refuse_reading
from ssmscope.model import Model
from ssmscope.models.load import load
from ssmscope.progress import on_stderr, progress_bar
from ssmscope.results import record_provenance
from ssmscope.tasks.text import TextData


@dataclass(frozen=True)
class Parts:
    """The texts that the search is made on, those that set thresholds, and those that are reported on."""

    train: list[Slot]
    threshold: list[Slot]
    held_out: list[Slot]

    @classmethod
    def of(cls, slots: Sequence[Slot], train: int, seed: int) -> Parts:
        """Drawn by the seed: at most a quarter for the search, a third of the rest for thresholds.

        Raises:
            InputError: fewer than four texts.
        """
        if len(slots) < 4:
            raise InputError(
                f"{len(slots)} texts can be attacked; give at least four, to search on, for thresholds and to report on"
            )
        drawn = [slots[at] for at in np.random.default_rng(seed).permutation(len(slots))]
        first = min(train, len(slots) // 4)
        second = first + (len(slots) - first) // 3
        return cls(drawn[:first], drawn[first:second], drawn[second:])


def poison(
    model: Model,
    data: TextData,
    *,
    objective: str,
    length: int,
    place: float,
    span: str | None,
    target: str | None,
    vocabulary: str | Path | None,
    train: int,
    beam: int,
    candidates: int,
    sweeps: int,
    draws: int,
    detector: str,
    penalty: float,
    alarms: float,
    transfer: Sequence[str | Model],
    asking: Mapping[str, Any],
    progress: bool,
) -> StatePoisoning:
    """What `state_poisoning` gives."""
    seed = asking["seed"]
    asked = questions(model, data, **asking)
    others = [each if isinstance(each, Model) else load(each, device=str(model.device)) for each in transfer]
    for other in others:
        _check_tokenizer(model, other)
    planted = _class(asked, target) if objective == "plant" else None
    words = Vocabulary.of(model, vocabulary, asked.evaluator.words or ())
    slots = slots_of(model, asked, words.text((0,) * length), place, span)
    parts = Parts.of(slots, train, seed)
    tried = 4 * (draws + sweeps * length * beam * candidates) * len(parts.train)
    tokens = sum(len(slot.before) + length + len(slot.after) for slot in parts.train) / len(parts.train)
    refuse_reading(tried * tokens, "this search", "search with fewer candidates, sweeps or texts")
    random = np.random.default_rng([seed, 1])
    with progress_bar(on_stderr(progress)) as bar:
        steps = bar.add_task("searches", total=4 if penalty else 3)
        started = time.perf_counter()
        goals = {"found": _goal(model, asked, parts, words, objective, planted, detector, length, 0.0)}
        goals["hotflip"] = _goal(model, asked, parts, words, "flip", planted, detector, length, 0.0)
        if penalty:
            goals["adaptive"] = _goal(model, asked, parts, words, objective, planted, detector, length, penalty, alarms)
        starts = words.drawn(random, draws, length)
        known: dict[tuple[int, ...], float] = {}
        by_chance = random_search(goals["found"], starts, known)
        mean = float(np.mean([known[trigger] for trigger in starts]))
        groups = [Tried("random", tuple(starts), mean, by_chance.asked)]
        searched = []
        for name, goal in goals.items():
            guide = Guided(goal, candidates, np.random.default_rng([seed, 2]), gradient_only=name == "hotflip")
            own = known if name == "found" else None
            found = search(goal, guide, starts, beam=beam, sweeps=sweeps, known=own)
            value = found.value if name == "found" else float(goals["found"]([found.trigger])[0])
            searched.append(Tried(name, (found.trigger,), value, found.asked))
            bar.advance(steps)
        drawn = words.drawn(random, searched[0].asked - len(set(starts)), length)
        chance = random_search(goals["found"], [*starts, *drawn], known)
        groups += [Tried("random search", (chance.trigger,), chance.value, chance.asked), *searched]
        bar.advance(steps)
        cost = Cost(
            runs=sum(goal.runs for goal in goals.values()),
            gradients=sum(goal.gradients for goal in goals.values()),
            seconds=time.perf_counter() - started,
        )
        measuring = bar.add_task("texts", total=(len(parts.threshold) + len(parts.held_out)) * (1 + len(others)))
        victims, notes = [], []
        for each in (model, *others):
            its = asked if each is model else questions(each, data, **asking)
            victims.append(
                _victim(each, its, parts, words, groups, length, alarms, planted, seed, lambda: bar.advance(measuring))
            )
    notes += _read_otherwise(model, asked, parts.held_out, words, groups)
    options = {
        "objective": objective,
        "length": length,
        "place": place,
        "span": span,
        "target": None if planted is None else asked.classes[planted],
        "vocabulary": None if vocabulary is None else str(vocabulary),
        "train": train,
        "beam": beam,
        "candidates": candidates,
        "sweeps": sweeps,
        "draws": draws,
        "detector": detector,
        "penalty": penalty,
        "alarms": alarms,
        "transfer": [each.name for each in others] or None,
        "template": None if asked.template is None else asked.template.text,
        "words": None if asked.evaluator.words is None else list(asked.evaluator.words),
        "limit": asking["limit"],
    }
    return StatePoisoning(
        provenance=record_provenance(model.source, options=options, seed=seed, data=asked.data),
        detectors=DETECTORS,
        texts=(len(parts.train), len(parts.threshold), len(parts.held_out)),
        vocabulary=len(words),
        victims=tuple(victims),
        cost=cost,
        notes=tuple(notes),
    )


def _goal(
    model: Model,
    asked: Questions,
    parts: Parts,
    words: Vocabulary,
    objective: str,
    target: int | None,
    detector: str,
    window: int,
    penalty: float,
    alarms: float = 0.05,
) -> Goal:
    slots = parts.train
    if objective == "plant":  # what has the planted class already says nothing
        slots = [slot for slot in slots if asked.labels[slot.row] != target] or slots
    return Goal(model, asked, slots, words, objective, target or 0, detector, window, penalty, alarms)


def _victim(
    model: Model,
    asked: Questions,
    parts: Parts,
    words: Vocabulary,
    groups: Sequence[Tried],
    window: int,
    alarms: float,
    target: int | None,
    seed: int,
    advance: Callable[[], None],
) -> Victim:
    triggers = [trigger for group in groups for trigger in group.triggers]
    seen = observe(model, asked, parts.held_out, words, triggers, window, advance)
    others = observe(model, asked, parts.threshold, words, (), window, advance)
    labels = asked.labels[[slot.row for slot in parts.held_out]]
    return victim(model.name, labels, seen, groups, words, others, alarms, target, seed)


def _check_tokenizer(model: Model, other: Model) -> None:
    """Refuse a model that reads the same text as other tokens."""
    if other.tokenizer is None or other.tokenizer.get_vocab() != model.tokenizer.get_vocab():
        raise InputError(
            f"{other.name} has another tokenizer than {model.name}; triggers are taken to models of the same one"
        )
    if other.is_classifier != model.is_classifier or other.labels != model.labels:
        raise InputError(f"{other.name} has other classes than {model.name}; give a model of the same task")


def _class(asked: Questions, target: str | None) -> int:
    if target is None:
        return 0
    if target not in asked.classes:
        near = did_you_mean(target, asked.classes)
        raise InputError(f"there is no class {target!r}; allowed are {', '.join(asked.classes)}{near}")
    return asked.classes.index(target)


def _read_otherwise(
    model: Model, asked: Questions, slots: Sequence[Slot], words: Vocabulary, groups: Sequence[Tried]
) -> list[str]:
    """Triggers that some texts read as other tokens than were meant."""
    found = []
    for group in groups:
        if len(group.triggers) > 1:
            continue
        rows = token_rows(model, [attacked(asked, slot, words.text(group.triggers[0])) for slot in slots])
        own = words.tokens(group.triggers)[0].tolist()
        other = sum(row != [*slot.before, *own, *slot.after] for row, slot in zip(rows, slots))
        if other:
            found.append(f"{other} of {len(slots)} texts read the trigger {group.name!r} as other tokens")
    return found
