"""Hidden-state poisoning: triggers that make a state-space model forget, and detectors of them.

A selective recurrence decides by each token how much of its state to keep. Tokens that make it forget nearly everything
are known as hidden-state poisoning attacks (HiSPA; Le Mercier et al. 2026, who find them in hybrids too and detect them
by a classifier on block outputs, CLASP; Bonetto 2026, SpectralGuard, monitors the spectral radius of the transition).
Here the objective is the exact share of the final states that was written at the tokens before the trigger. `insertion`
and `overflow` are the members of the family without a search.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.dimensions import Dimension
from ssmscope.api.inputs import TEXT_MODELS, Data
from ssmscope.api.limits import NOT_NEGATIVE, SHARE, SHARE_DIFFERENCE
from ssmscope.api.options import Cache, LabelWords, Limit, Metavar, Progress, Range, Reads, Seed, Template
from ssmscope.attacks.names import check_asked
from ssmscope.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from ssmscope.attacks.poisoning.result import StatePoisoning
    from ssmscope.core.model import Model
    from ssmscope.data.text import TextData


def check_poison(*, objective: str, target: str | None, span: str | None, **others: Any) -> None:
    """Raise InputError if a target is given but none is planted, the span is empty, or `check_asked` does."""
    if target is not None and objective != "plant":
        raise InputError(f"target=… is the class to plant; leave it out, or give objective='plant', not {objective}")
    if span is not None and not span.strip():
        raise InputError("span=… is empty; give words of the texts, or none for everything before the trigger")
    check_asked(**others)


@analysis(
    "poison",
    reads=Data("texts"),
    question="Can a few tokens make it forget?",
    models=TEXT_MODELS,
    dtype="float32",  # Gradients need the precision.
    check=check_poison,
    settings="train beam candidates sweeps draws detector penalty alarms",
    scores={
        "poison.survival[OBJECTIVE]": SHARE,
        "poison.flipped[OBJECTIVE]": SHARE,
        "poison.beyond[OBJECTIVE]": SHARE_DIFFERENCE,
        "poison.auroc[OBJECTIVE, DETECTOR]": NOT_NEGATIVE._replace(high=1),
    },
    dimensions=(
        Dimension("Poisoning, answers", r"poison\.beyond\[\w+\]", "answers that change beyond words of equal log-odds"),
        Dimension("Poisoning, memory", r"poison\.survival\[\w+\]", "share of the memory that stays"),
        Dimension("Detection of poison", r"poison\.auroc\[\w+, window\]", "AUROC, 0.5 is chance"),
    ),
)
def state_poisoning(
    model: Model,
    data: TextData,
    *,
    objective: Annotated[
        Literal["forget", "plant", "flip"],
        "Lower the survival of the tokens before, raise a planted class, or lower the true one.",
    ] = "forget",
    length: Annotated[int, "Number of tokens of the trigger.", Range(1, 64)] = 4,
    place: Annotated[float, "Share of a text's words before the trigger; 1 is the end.", Range(0, 1)] = 1.0,
    span: Annotated[
        str | None, "Words whose survival is measured, in texts that have them; by default all before the trigger."
    ] = None,
    target: Annotated[str | None, "Class to plant; by default the first.", Metavar("NAME")] = None,
    vocabulary: Annotated[
        str | Path | None, "File of words for triggers, one a line; by default the model's own.", Reads("file")
    ] = None,
    train: Annotated[int, "Number of texts to search on, at most a quarter of all.", Range(1, 4096)] = 32,
    beam: Annotated[int, "Triggers kept from one step to the next.", Range(1, 256)] = 3,
    candidates: Annotated[int, "Words tried at each place of each trigger.", Range(1, 4096)] = 24,
    sweeps: Annotated[int, "Maximum number of passes over all places.", Range(1, 64)] = 2,
    draws: Annotated[int, "Random triggers to compare with; the search starts from the best.", Range(1, 1000)] = 10,
    detector: Annotated[
        Literal["token", "window", "half-life"], "Detector that the adaptive attack tries to evade."
    ] = "window",
    penalty: Annotated[
        float, "Weight of the detector's suspicion in the adaptive attack; 0 for no such attack.", Range(0, 1e6)
    ] = 10.0,
    alarms: Annotated[float, "False positive rate at the detectors' thresholds.", Range(0, 1, strict=True)] = 0.05,
    transfer: Annotated[
        Sequence[str | Model] | None,
        "Further models with the same tokenizer to try the triggers on.",
        Reads("model"),
        Metavar("MODEL,…"),
    ] = None,
    template: Template = None,
    words: LabelWords = None,
    limit: Limit = None,
    cache: Cache = None,
    seed: Seed = 0,
    progress: Progress = True,
) -> StatePoisoning:
    """Search for one trigger, the same in all texts, that makes a model forget, and measure it on held-out texts.

    The survival of a span is the share of the final states that was written at its tokens, exact in every head, as a
    mean over layers (`Trace.survival`). A trigger stands after the first ⌊place · n + ½⌋ of a text's n words. The
    search replaces its tokens one after the other, keeps the `beam` best triggers by the exact mean over its texts, and
    tries words of the largest gradient (HotFlip), words of the largest steps Δ, and random ones.

    It is compared, on the same held-out texts, with random triggers (the mean of all draws), a random search over as
    many triggers, HotFlip's trigger (gradients alone, raising the loss of the true class), and the same search with a
    penalty on suspicion above that of its own clean texts (adaptive). What its words say is told from what they make
    forget by up to five triggers each of its words in other orders, and of other words that, alone, have its log-odds:
    `beyond` is the share of right answers that it changes minus the share that these change. A third of the texts that
    the search does not see sets the detectors' thresholds; results are on the others. Intervals are 95 % over
    these, Wilson's of the shares of one trigger, else bootstrap; the trigger is held fixed.

    Detectors: "token", the smallest share of the earlier memory that any token leaves; "window", the smallest share of
    the memory that is older than `length` tokens, relative to the share of such tokens; "half-life", the mean over
    tokens of 1 / half-life.

    Args:
        span: its first occurrence in a text counts. With a template triggers and spans are within {content}.
        target: name of a class.

    Raises:
        InputError: no text has the span before the trigger, there are fewer than two words for triggers or fewer than
            four texts, a model of `transfer` has another tokenizer, a class is unknown, and what `Template` and
            `Evaluator` refuse.
    """
    from ssmscope.attacks.curves import questions
    from ssmscope.attacks.poisoning.controls import controls
    from ssmscope.attacks.poisoning.measure import (
        Tried,
        divided,
        observe,
        other_models,
        read_otherwise,
        searched,
        victim,
    )
    from ssmscope.attacks.poisoning.memory import DETECTORS, Vocabulary, slots_of
    from ssmscope.attacks.poisoning.result import FOUND, StatePoisoning
    from ssmscope.attacks.poisoning.search import Goal
    from ssmscope.core.batching import refuse_reading
    from ssmscope.core.progress import on_stderr, progress_bar

    model.check_recurrent_state("forgetting")
    asking: dict[str, Any] = dict(template=template, words=words, limit=limit, cache=cache, seed=seed)
    asked = questions(model, data, **asking)
    others = other_models(model, transfer or ())
    if target is not None and target not in asked.classes:
        near = did_you_mean(target, asked.classes)
        raise InputError(f"there is no class {target!r}; allowed are {', '.join(asked.classes)}{near}")
    planted = None if objective != "plant" else 0 if target is None else asked.classes.index(target)
    known = Vocabulary.of(model, vocabulary, asked.evaluator.words or ())
    usable = slots_of(model, asked, known.text((0,) * length), place, span)
    to_search, for_thresholds, held_out = divided(usable, train, seed)
    number = 4 * (draws + sweeps * length * beam * candidates)
    tokens = sum(len(slot.before) + length + len(slot.after) for slot in to_search)
    refuse_reading(number * tokens, "this search", "search with fewer candidates, sweeps or texts")

    def goal(objective: str, penalty: float) -> Goal:
        slots = to_search
        if objective == "plant":  # Texts of the planted class already have it.
            slots = [slot for slot in slots if asked.labels[slot.row] != planted] or slots
        return Goal(model, asked, slots, known, objective, planted or 0, detector, length, penalty, alarms)

    goals = {FOUND: goal(objective, 0.0), "hotflip": goal("flip", 0.0)}
    goals |= {"adaptive": goal(objective, penalty)} if penalty else {}
    with progress_bar(on_stderr(progress)) as bar:
        searching = bar.add_task("searches", total=1 + len(goals))
        groups, cost = searched(
            goals, length, draws, candidates, beam, sweeps, seed, functools.partial(bar.advance, searching)
        )
        (best,) = next(each.triggers for each in groups if each.name == FOUND)
        for name, same in controls(asked, known, best, seed).items():
            groups.append(Tried(name, tuple(same), float(goals[FOUND](same).mean()), len(same)))
        total = (len(for_thresholds) + len(held_out)) * (1 + len(others))
        advance = functools.partial(bar.advance, bar.add_task("texts", total=total))
        victims, triggers = [], [trigger for group in groups for trigger in group.triggers]
        for each in (model, *others):
            its = asked if each is model else questions(each, data, **asking)
            seen = observe(each, its, held_out, known, triggers, length, advance)
            clean = observe(each, its, for_thresholds, known, (), length, advance)
            labels = its.labels[[slot.row for slot in held_out]]
            victims.append(victim(each.name, labels, seen, groups, known, clean, alarms, planted, seed))
    to_plant = None if planted is None else asked.classes[planted]
    transferred = [each.name for each in others] or None
    return StatePoisoning(
        provenance=asked.provenance(model, seed, target=to_plant, transfer=transferred),
        detectors=DETECTORS,
        texts=(len(to_search), len(for_thresholds), len(held_out)),
        rows=tuple(slot.row for slot in held_out),
        vocabulary=len(known),
        victims=tuple(victims),
        cost=cost,
        notes=tuple(read_otherwise(model, asked, held_out, known, groups)),
    )
