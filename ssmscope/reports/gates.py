"""Gates: requirements on a report's scores, each met, missed or undecided.

Without a level the estimate decides. With one, `at L %`, a gate is met if the one-sided confidence bound of its number
lies within the limit, missed if the opposite bound lies beyond it, and otherwise undecided. If m gates have a level, a
bound leaves out (1 − L) / m. Each gate can be decided wrongly in one direction only, so that with confidence L no gate
of the report is (Bonferroni). One-sided, Wilson's bounds of a share leave out up to .2 for .05 promised, so a share
also needs a binomial probability of at most (1 − L) / m at the limit; that of a wrong decision is then no larger.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ssmscope.api.analysis import Call
from ssmscope.api.dimensions import dimension_of
from ssmscope.api.limits import ANY, SHARE, SHARES, Limits
from ssmscope.api.scores import HIGHER, LOWER, Score, is_paired
from ssmscope.core.bootstrap import TAIL, Estimate
from ssmscope.errors import InputError, did_you_mean, nearest
from ssmscope.interp.methods import method_names
from ssmscope.render.numbers import counted
from ssmscope.reports.intervals import chance_beyond, counts_of, difference, interval
from ssmscope.reports.plan import Plan
from ssmscope.reports.requirements import BASELINE, OPERATORS, Requirement
from ssmscope.reports.scores import report_scores
from ssmscope.reports.store import FAILED, MISSING, Report

MET, MISSED, UNDECIDED = "met", "missed", "undecided"
STATES = (MISSED, UNDECIDED, MET)
MAX_EXAMPLES_NEEDED = 1_000_000
"""Number of examples above which none is advised."""
MAX_NAMES = 8
"""Maximum number of names listed in a refusal."""


@dataclass(frozen=True)
class Gate:
    """A requirement read on one score."""

    requirement: Requirement
    score: Score
    state: str
    """One of `STATES`."""
    found: Estimate
    """The number that is compared, the score or its difference from the reference, with the bounds that decide: those
    of a 95 % interval without a level, else each with `tail` beyond it."""
    tail: float = TAIL
    reference: Score | None = None
    """The score with which it is compared; None for a limit."""
    reason: str = ""
    """Why the gate is undecided, or has no score; empty for others."""
    needed: int = 0
    """Examples that would decide, see `examples_needed`; 0 for a gate that is decided, or if unknown."""

    @property
    def paired(self) -> bool:
        """True if both scores are of the same examples."""
        return self.reference is not None and is_paired(self.score, self.reference)


class _Read(NamedTuple):
    """A requirement, a score on which it is read, and the score of its reference."""

    requirement: Requirement
    score: Score
    reference: Score | None


def report_gates(report: Report, requirements: Sequence[Requirement], baseline: Sequence[Score]) -> tuple[Gate, ...]:
    """Decide the requirements on a report's scores. One that `decide` refuses is missed, or undecided if its score is
    missing while jobs have failed."""
    scores, kept, others = report_scores(report), [], []
    failed = any(entry.state in (FAILED, MISSING) for entry in report.entries)
    for one in requirements:
        try:
            decide([one], scores, baseline)
            kept.append(one)
        except InputError as error:
            unmeasured = failed and not _has(one, scores)
            reason = "not measured, because a job failed" if unmeasured else str(error).partition(f"{_told(one)}: ")[2]
            others.append(_unread(one, UNDECIDED if unmeasured else MISSED, reason or str(error)))
    return (*decide(kept, scores, baseline), *others)


def decide(
    requirements: Sequence[Requirement], scores: Sequence[Score], baseline: Sequence[Score] = ()
) -> tuple[Gate, ...]:
    """Decide every requirement on every model that has its score, or on the model that it names.

    A baseline's score is that of the same model, or of its only model. Scores that occur several times, as over several
    seeds, are each read, and compared in their order.

    Raises:
        InputError: there is no such score, of a model or of its reference, or neither side of it is better.
    """
    read = [each for one in requirements for each in _read(one, scores, baseline)]
    with_level = sum(each.requirement.level is not None for each in read)
    return tuple(_decided(each, with_level) for each in read)


def check(requirements: Sequence[Requirement], plan: Plan, baseline: Sequence[Score] = ()) -> None:
    """Check requirements before anything runs. Raise InputError if one names a model that the plan does not have or a
    score that none of its verbs has, has a limit that the score cannot reach, compares a model with itself, or reads a
    score that the baseline lacks."""
    models = [model.name for model in plan.models]
    declared = dict(each for call in plan.calls for each in _declared(call.call))
    benchmarks = any(call.call.options.get("tasks") for call in plan.calls if call.call.name == "evaluate")
    for one in requirements:
        reference = None if one.reference == BASELINE else one.reference
        for model in filter(None, (one.model, reference)):
            if model not in models:
                known = [*models, BASELINE] if model == reference else models
                raise InputError(f"{_told(one)}: there is no model {model!r}; there are {_listed(known, model)}")
        if reference not in (None, BASELINE) and (apart := _apart(one.name)):
            raise InputError(f"{_told(one)} compares models, but {apart}; give limits")
        if reference is not None and not {*(models if one.model is None else [one.model])} - {reference}:
            raise InputError(f"{_told(one)} compares {reference} with itself; add another model")
        limits = next((each for name, each in declared.items() if _stands_for(name, one.name)), None)
        if limits is None and not benchmarks:
            has = _listed(list(declared), one.name) if declared else "none"
            raise InputError(f"{_told(one)}: no verb of the plan has a score {one.name!r}; the scores are {has}")
        _check_limit(one, limits or (SHARE if one.name.startswith(SHARES) else ANY))
        if one.reference == BASELINE:
            _named(one, baseline, "the baseline")


def _declared(call: Call) -> Iterator[tuple[str, Limits]]:
    """Yield the names of a call's scores as they are written, with their limits."""
    scores = call.analysis.scores
    for name in scores:
        base, _, variant = name.removesuffix("]").partition("[")
        written = (
            [f"{base}[{each}]" for each in method_names(call.options[variant])] if variant in call.options else [name]
        )
        yield from ((each, scores[name] if isinstance(scores, Mapping) else ANY) for each in written)


def _stands_for(declared: str, name: str) -> bool:
    """Return True if a declared name is this one, or has capitals in place of what its bracket holds."""
    base, _, variant = declared.partition("[")
    return declared == name or (re.search("[A-Z]", variant) is not None and name.startswith(f"{base}["))


def _check_limit(requirement: Requirement, limits: Limits) -> None:
    """Raise InputError for a limit that no score of this name can reach, or in percent of what is no share."""
    value = requirement.limit
    if requirement.percent and not limits.is_share:
        raise InputError(f"{_told(requirement)}: {requirement.name} is no share; give a number without %")
    if margin := requirement.reference is not None:
        limits = Limits(0, limits.high if limits.is_share else math.inf, limits.is_share)
    if not limits.low <= value <= limits.high:
        hint = f": write {value / 100:g} or {value:g} %" if limits.is_share and 1 < value <= 100 else ""
        name = "the margin of " * margin + requirement.name
        raise InputError(f"{_told(requirement)}: {name} is {limits.told}{hint}")


def _decided(read: _Read, with_level: int) -> Gate:
    requirement, score, reference = read
    level = requirement.level
    tail = TAIL if level is None else float(f"{(1 - level) / with_level:.11g}")
    found = interval(score, tail) if reference is None else difference(score, reference, tail)
    operator, limit = _comparison(requirement, score, "" if reference is None else reference.model)
    state, reason = state_of(found, operator, limit, with_bounds=level is not None)
    counts = counts_of(score) if level is not None and reference is None else None
    if counts is not None and state != UNDECIDED:
        above = (state == MET) == operator.startswith(">")
        if chance_beyond(counts, limit, above=above) > tail:
            state, reason = UNDECIDED, "the exact binomial distribution does not exclude the limit"
    needed = examples_needed(found, limit, score.count) if state == UNDECIDED else 0
    return Gate(requirement, score, state, found, tail, reference, reason, needed)


def state_of(found: Estimate, operator: str, limit: float, *, with_bounds: bool) -> tuple[str, str]:
    """Compare a number with a limit; return its state, and the reason if it is undecided."""
    holds = OPERATORS[operator]
    if math.isnan(found.value):
        return UNDECIDED, "the score is not defined"
    if not with_bounds:
        return (MET if holds(found.value, limit) else MISSED), ""
    if math.isnan(found.low) or math.isnan(found.high):
        return UNDECIDED, "the score has no interval"
    worst, best = (found.high, found.low) if operator.startswith("<") else (found.low, found.high)
    if holds(worst, limit):
        return MET, ""
    return (UNDECIDED, "the interval contains the limit") if holds(best, limit) else (MISSED, "")


def examples_needed(found: Estimate, limit: float, examples: int) -> int:
    """Return the number of examples at which the bound between a number and its limit would reach the limit, if the
    number stays and the distance of the bound falls as 1 / √examples; rounded up to two digits, 0 if unknown or if the
    bound already does."""
    gap = limit - found.value
    reach = found.high - found.value if gap > 0 else found.value - found.low
    if not gap or not reach > 0 or reach < abs(gap):
        return 0
    needed = examples * (reach / gap) ** 2
    unit = 10 ** max(math.floor(math.log10(max(needed, 1))) - 1, 0)
    return math.ceil(needed / unit) * unit if needed <= MAX_EXAMPLES_NEEDED else 0


def _comparison(requirement: Requirement, score: Score, other: str) -> tuple[str, float]:
    """Return the operator and the limit of a requirement on this score, compared with that of the model `other`."""
    if requirement.reference is None:
        return requirement.operator, requirement.limit
    if (apart := _apart(score.name)) and score.model != other:
        raise InputError(f"{_told(requirement)} compares models, but {apart}; give limits with <= and >=")
    if score.better not in (HIGHER, LOWER):
        raise InputError(f"{_told(requirement)}: neither side of {score.name} is better; give limits with <= and >=")
    return (">=", -requirement.limit) if score.better == HIGHER else ("<=", requirement.limit)


def _apart(name: str) -> str:
    """Return the reason why no two models are compared by any score of a name; empty if they may be."""
    found = dimension_of(name)
    return "" if found is None else found.apart


def _unread(requirement: Requirement, state: str, reason: str) -> Gate:
    nothing = Estimate(math.nan, math.nan, math.nan)
    score = Score(requirement.name, requirement.model or "", math.nan, math.nan, math.nan, 0, "", "")
    return Gate(requirement, score, state, nothing, reason=reason)


# ---- the scores of a requirement


def _has(requirement: Requirement, scores: Sequence[Score]) -> bool:
    asked = {requirement.model, requirement.reference} - {None, BASELINE}
    own = {each.model for each in scores if each.name == requirement.name}
    return bool(own) and asked <= own


def _read(requirement: Requirement, scores: Sequence[Score], baseline: Sequence[Score]) -> Iterator[_Read]:
    named = _named(requirement, scores, "the report")
    models, reference = list(dict.fromkeys(each.model for each in scores)), requirement.reference
    own = {model: [each for each in named if each.model == model] for model in models}
    for model in filter(None, (requirement.model, None if reference == BASELINE else reference)):
        if not own.get(model):
            raise InputError(f"{_told(requirement)}: {model} has no score {requirement.name}")
    for model in models if requirement.model is None else [requirement.model]:
        if reference is None or not own[model]:
            yield from (_Read(requirement, score, None) for score in own[model])
        elif model != reference:
            theirs = own[reference] if reference != BASELINE else _of_baseline(requirement, model, baseline)
            if len(theirs) != len(own[model]):
                raise InputError(
                    f"{_told(requirement)}: {model} has {counted(len(own[model]), 'such score')} and {reference} has "
                    f"{len(theirs)}; compare reports of one plan"
                )
            yield from (_Read(requirement, *both) for both in zip(own[model], theirs))


def _of_baseline(requirement: Requirement, model: str, baseline: Sequence[Score]) -> list[Score]:
    named = _named(requirement, baseline, "the baseline")
    models = list(dict.fromkeys(each.model for each in baseline))
    if model not in models and len(models) > 1:
        raise InputError(f"{_told(requirement)}: the baseline has no model {model!r}; it has {_listed(models, model)}")
    return [each for each in named if each.model == (model if model in models else models[0])]


def _named(requirement: Requirement, scores: Sequence[Score], where: str) -> list[Score]:
    """Return the scores of the required name. Raise InputError, with the nearest names, if there is none."""
    found = [each for each in scores if each.name == requirement.name]
    if not found:
        names = list(dict.fromkeys(each.name for each in scores))
        has = f"it has {_listed(names, requirement.name)}" if names else "it has no scores"
        raise InputError(f"{_told(requirement)}: {where} has no score {requirement.name!r}; {has}")
    return found


def _told(requirement: Requirement) -> str:
    return f"require {requirement.text!r}"


def _listed(names: Sequence[str], asked: str) -> str:
    """Return the names that exist, of many those that resemble the one asked for."""
    more = len(names) - MAX_NAMES
    shown = list(dict.fromkeys([*nearest(asked, names, MAX_NAMES), *names]))[:MAX_NAMES] if more > 0 else names
    return ", ".join(shown) + f" and {more} more" * (more > 0) + did_you_mean(asked, names)
