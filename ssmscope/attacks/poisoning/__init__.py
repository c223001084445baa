"""Tokens that make a state-space model forget, and what sees them: hidden-state poisoning.

A selective recurrence decides by each token how much of its state to keep. Tokens that were found to make it let go of
nearly all are known as hidden-state poisoning attacks (HiSPA; Le Mercier et al. 2026, who find them in hybrids too and
detect them by a classifier on block outputs, CLASP; Bonetto 2026, SpectralGuard, watches the spectral radius of the
transition). Here the objective is what is left: the exact share of the final states that was written at the tokens
before. `insertion` and `overflow` are the blind members of the family.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import TEXT_MODELS, Data
from ssmscope.api.options import Cache, LabelWords, Limit, Metavar, Progress, Range, Reads, Seed, Template
from ssmscope.attacks.checks import check_asked
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.attacks.poisoning.result import StatePoisoning
    from ssmscope.core.model import Model
    from ssmscope.data.text import TextData


def check_poison(*, objective: str, target: str | None, span: str | None, **others: Any) -> None:
    """Refuse a target where none is planted, an empty span, and what `check_asked` refuses.

    Raises:
        InputError: as said.
    """
    if target is not None and objective != "plant":
        raise InputError(f"target is the class that is planted; leave it out, or give objective plant, not {objective}")
    if span is not None and not span.strip():
        raise InputError("the span is empty; give words of the texts, or none for all that stands before the trigger")
    check_asked(**others)


@analysis(
    "poison",
    reads=Data("texts"),
    question="Can a few tokens make it forget?",
    models=TEXT_MODELS,
    dtype="float32",  # gradients need the digits
    check=check_poison,
)
def state_poisoning(
    model: Model,
    data: TextData,
    *,
    objective: Annotated[
        Literal["forget", "plant", "flip"],
        "Lower the survival of what came before, raise a planted class, or lower the true one.",
    ] = "forget",
    length: Annotated[int, "How many tokens the trigger has.", Range(1, 64)] = 4,
    place: Annotated[float, "How much of a text's words stand before the trigger; 1 is at its end.", Range(0, 1)] = 1.0,
    span: Annotated[
        str | None, "Words whose survival is meant, of the texts that have them; else of all before the trigger."
    ] = None,
    target: Annotated[str | None, "Of plant: the class; else the first.", Metavar("NAME")] = None,
    vocabulary: Annotated[
        str | Path | None, "A file of words that triggers may have, one a line; else the model's own.", Reads("file")
    ] = None,
    train: Annotated[int, "Texts the search is made on, at most a quarter of all.", Range(1, 4096)] = 32,
    beam: Annotated[int, "Triggers kept from one step to the next.", Range(1, 256)] = 3,
    candidates: Annotated[int, "Words tried at a place of each.", Range(1, 4096)] = 24,
    sweeps: Annotated[int, "How often every place is gone through, at most.", Range(1, 64)] = 2,
    draws: Annotated[int, "Random triggers beside it; the search begins with the best.", Range(1, 1000)] = 10,
    detector: Annotated[
        Literal["token", "window", "half-life"], "Which detector the adaptive attack is to escape."
    ] = "window",
    penalty: Annotated[
        float, "What the adaptive attack gives for its silence; 0 for no such attack.", Range(0, 1e6)
    ] = 10.0,
    alarms: Annotated[float, "False positives at the detectors' thresholds.", Range(0, 1, strict=True)] = 0.05,
    transfer: Annotated[
        Sequence[str | Model] | None,
        "Models of the same tokenizer that the triggers are tried on, too.",
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
    """Can a few tokens make it forget? One trigger for all texts is searched on some and measured on others.

    The survival of a span is the share of the states behind the text's last token that was written at its tokens, exact
    in every head, and as a mean over layers (`Trace.survival`). A trigger stands behind the first ⌊place · n + ½⌋ of a
    text's n words. The search replaces its tokens one after the other, keeps the `beam` best triggers by the exact mean
    over its texts, and tries words of the largest gradient (HotFlip), those of the largest steps, and random ones.

    Beside it, on the same held-out texts: random triggers (the mean of all draws), a random search that asks about as
    many triggers, HotFlip's trigger (the loss of the true class raised, by gradients alone), and the same search with a
    penalty on suspicion above what its own clean texts have (adaptive). A third of the texts that the search does not
    see sets the detectors' thresholds, the others are reported on. Intervals are 95 % bootstrap intervals over these;
    the trigger is held fixed.

    Detectors: "token", the least that any token leaves of all that was in the memory before it; "window", the least
    share of the memory that is older than `length` tokens, by the share of tokens that are; "half-life", the mean over
    tokens of 1 / half-life.

    Args:
        span: where it first stands in a text. With a template triggers and spans are within {content}.
        target: label words and classes are by name.

    Raises:
        InputError: a span that no text has before the trigger, fewer than two words for triggers, a transfer to a model
            of another tokenizer, an unknown class, fewer than four texts, and what `Template` and `Evaluator` refuse.
    """
    from ssmscope.api.results import record_provenance
    from ssmscope.attacks.curves import questions
    from ssmscope.attacks.poisoning.attack import Parts, measured, other_models, planted_class, read_otherwise, searched
    from ssmscope.attacks.poisoning.goals import Goal
    from ssmscope.attacks.poisoning.memory import DETECTORS
    from ssmscope.attacks.poisoning.result import StatePoisoning
    from ssmscope.attacks.poisoning.triggers import Vocabulary, slots_of
    from ssmscope.core.limits import refuse_reading
    from ssmscope.core.progress import on_stderr, progress_bar

    model.check_recurrent_state("forgetting")
    asking: dict[str, Any] = dict(template=template, words=words, limit=limit, cache=cache, seed=seed)
    asked = questions(model, data, **asking)
    others = other_models(model, transfer or ())
    planted = planted_class(asked, target) if objective == "plant" else None
    known = Vocabulary.of(model, vocabulary, asked.evaluator.words or ())
    parts = Parts.of(slots_of(model, asked, known.text((0,) * length), place, span), train, seed)
    number = 4 * (draws + sweeps * length * beam * candidates)
    tokens = sum(len(slot.before) + length + len(slot.after) for slot in parts.train)
    refuse_reading(number * tokens, "this search", "search with fewer candidates, sweeps or texts")

    def goal(objective: str, penalty: float) -> Goal:
        slots = parts.train
        if objective == "plant":  # what has the planted class already says nothing
            slots = [slot for slot in slots if asked.labels[slot.row] != planted] or slots
        return Goal(model, asked, slots, known, objective, planted or 0, detector, length, penalty, alarms)

    goals = {"found": goal(objective, 0.0), "hotflip": goal("flip", 0.0)}
    goals |= {"adaptive": goal(objective, penalty)} if penalty else {}
    with progress_bar(on_stderr(progress)) as bar:
        searching = bar.add_task("searches", total=1 + len(goals))
        groups, cost = searched(
            goals, length, draws, candidates, beam, sweeps, seed, functools.partial(bar.advance, searching)
        )
        total = (len(parts.threshold) + len(parts.held_out)) * (1 + len(others))
        advance = functools.partial(bar.advance, bar.add_task("texts", total=total))
        victims = []
        for each in (model, *others):
            its = asked if each is model else questions(each, data, **asking)
            victims.append(measured(each, its, parts, known, groups, length, alarms, planted, seed, advance))
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
        "limit": limit,
    }
    return StatePoisoning(
        provenance=record_provenance(model.source, options=options, seed=seed, data=asked.data),
        detectors=DETECTORS,
        texts=(len(parts.train), len(parts.threshold), len(parts.held_out)),
        vocabulary=len(known),
        victims=tuple(victims),
        cost=cost,
        notes=tuple(read_otherwise(model, asked, parts.held_out, known, groups)),
    )
