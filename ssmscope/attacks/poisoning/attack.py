"""Steps of the attack: divide the texts, search triggers, and measure them on the model and on transfer models."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ssmscope.architectures.loading.load import load
from ssmscope.attacks.curves import Questions
from ssmscope.attacks.poisoning.goals import Goal, Guided
from ssmscope.attacks.poisoning.measure import Tried, observe, victim
from ssmscope.attacks.poisoning.result import Cost, Victim
from ssmscope.attacks.poisoning.search import random_search, search
from ssmscope.attacks.poisoning.triggers import Slot, Trigger, Vocabulary, attacked
from ssmscope.core.model import Model
from ssmscope.errors import InputError, did_you_mean
from ssmscope.evaluation.encoded import token_rows


@dataclass(frozen=True)
class Parts:
    """Texts to search on, texts that set thresholds, and held-out texts."""

    train: list[Slot]
    threshold: list[Slot]
    held_out: list[Slot]

    @classmethod
    def of(cls, slots: Sequence[Slot], train: int, seed: int) -> Parts:
        """Divide the texts at random: at most a quarter for the search, a third of the rest for thresholds.

        Raises:
            InputError: fewer than four texts.
        """
        if len(slots) < 4:
            raise InputError(
                f"{len(slots)} texts can be attacked; give at least four, for the search, thresholds and results"
            )
        drawn = [slots[at] for at in np.random.default_rng(seed).permutation(len(slots))]
        first = min(train, len(slots) // 4)
        second = first + (len(slots) - first) // 3
        return cls(drawn[:first], drawn[first:second], drawn[second:])


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
    """Return random triggers, the best of a random search of equal cost, and the trigger found for each goal.

    All searches start from the same random triggers, and all values are those of the first goal.
    """
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


def measured(
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
    """Measure all triggers on one model."""
    triggers = [trigger for group in groups for trigger in group.triggers]
    seen = observe(model, asked, parts.held_out, words, triggers, window, advance)
    others = observe(model, asked, parts.threshold, words, (), window, advance)
    labels = asked.labels[[slot.row for slot in parts.held_out]]
    return victim(model.name, labels, seen, groups, words, others, alarms, target, seed)


def other_models(model: Model, given: Sequence[str | Model]) -> list[Model]:
    """Load the models to which triggers are transferred.

    Raises:
        InputError: one has another tokenizer or other classes.
    """
    found = [each if isinstance(each, Model) else load(each, device=str(model.device)) for each in given]
    for other in found:
        if other.tokenizer is None or other.tokenizer.get_vocab() != model.tokenizer.get_vocab():
            raise InputError(
                f"{other.name} has another tokenizer than {model.name}; triggers transfer to models of the same one"
            )
        if other.is_classifier != model.is_classifier or other.labels != model.labels:
            raise InputError(f"{other.name} has other classes than {model.name}; give a model of the same task")
    return found


def planted_class(asked: Questions, target: str | None) -> int:
    """Return the index of a class; by default the first.

    Raises:
        InputError: there is no class of that name.
    """
    if target is not None and target not in asked.classes:
        near = did_you_mean(target, asked.classes)
        raise InputError(f"there is no class {target!r}; allowed are {', '.join(asked.classes)}{near}")
    return 0 if target is None else asked.classes.index(target)


def read_otherwise(
    model: Model, asked: Questions, slots: Sequence[Slot], words: Vocabulary, groups: Sequence[Tried]
) -> list[str]:
    """Describe triggers that the tokenizer splits differently in some texts."""
    found = []
    for group in groups:
        if len(group.triggers) > 1:
            continue
        rows = token_rows(model, [attacked(asked, slot, words.text(group.triggers[0])) for slot in slots])
        own = words.tokens(group.triggers)[0].tolist()
        other = sum(row != [*slot.before, *own, *slot.after] for row, slot in zip(rows, slots))
        if other:
            found.append(f"in {other} of {len(slots)} texts the trigger {group.name!r} is tokenized differently")
    return found
