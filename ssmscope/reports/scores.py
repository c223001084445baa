"""Scores of results: the numbers that a scorecard, a gate or a model card reads, under one name for each quantity.

A name is dotted and has a bracket for a variant: "accuracy", "position.drop", "words.success[deepwordbug]". Values and
intervals are those that a verb has recorded; nothing is measured anew.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.api.jsonable import decode_fields, encode_fields
from ssmscope.api.results import Result
from ssmscope.api.writing import write_whole
from ssmscope.core.bootstrap import Estimate
from ssmscope.errors import InputError
from ssmscope.render.numbers import counted

if TYPE_CHECKING:
    from ssmscope.reports.store import Report

SCORES = "scores.json"
"""File of a report's scores in its directory."""
HIGHER, LOWER = "higher", "lower"


@dataclass(frozen=True)
class Score:
    """One number of a model with its 95 % interval."""

    name: str
    model: str
    """Name that the report shows."""
    value: float
    low: float
    high: float
    """Ends of the interval; NaN if there is none."""
    count: int
    """Number of independent examples; 0 where the number is not a mean over examples."""
    better: str
    """ "higher" or "lower"; empty if neither is better."""
    unit: str
    """ "%" for a share between 0 and 1, which views show in percent; "nats", "tokens" and so on; empty for a plain
    number."""
    examples: np.ndarray | None = None
    """(examples, 2) in the order of the data: `value` is the sum of the first column divided by that of the second,
    which is 1 throughout for a mean. None if the number is no such ratio."""
    example_ids: str = ""
    """Fingerprint of the examples; scores with the same one are paired. Empty if unknown."""
    apart: str = ""
    """Reason why the scorecard compares it with no other model's; empty for others."""

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.value, self.low, self.high)

    @property
    def has_interval(self) -> bool:
        return not math.isnan(self.low)


ONE_SEARCH = "one search and its seed, which differs from another by more than texts do"
RANDOM = "random tokens"
LOGIT_SCALE = "ΔA depends on the scale of each model's logits"
"""Reasons for `Score.apart`."""


def is_paired(one: Score, other: Score) -> bool:
    """Return True if two scores have per-example values of the same examples."""
    return (
        one.examples is not None
        and other.examples is not None
        and len(one.examples) == len(other.examples)
        and one.example_ids == other.example_ids != ""
    )


# ---- scores of a result


def scores(result: Result, models: Sequence[str] = ()) -> list[Score]:
    """Return the scores of a verb's result; none for a verb without any.

    Args:
        models: names of the result's models as shown, by default those of the result.
    """
    read = READERS.get(result.kind)
    return [] if read is None else list(read(result, list(models) or _names(result)))


def _names(result: Result) -> list[str]:
    several = getattr(result, "models", None)
    return list(several) if several else [result.model_name]


def _fingerprint(result: Result) -> str:
    data = result.provenance.get("data")
    return str(data.get("fingerprint") or "") if isinstance(data, Mapping) else ""


def _count(result: Result) -> int:
    data = result.provenance.get("data")
    return int(data.get("examples") or data.get("windows") or 0) if isinstance(data, Mapping) else 0


class _Maker:
    """Maker of a result's scores: `model`, number of examples and fingerprint are the result's."""

    def __init__(self, result: Result, model: str, *, rows: Sequence[int] = ()) -> None:
        """`rows` are the examples that were measured, by default all."""
        self.model, self.count = model, _count(result)
        fingerprint = _fingerprint(result)
        own = f"{fingerprint}-{zlib.crc32(repr(tuple(rows)).encode()):08x}" if rows else fingerprint
        self.ids = own if fingerprint else ""

    def __call__(
        self,
        name: str,
        found: Estimate,
        better: str,
        unit: str = "%",
        *,
        above: np.ndarray | None = None,
        below: np.ndarray | None = None,
        count: int | None = None,
        paired: bool = True,
        apart: str = "",
    ) -> Score:
        """Make a score; `above` and `below` are the numerators and denominators (1 by default) of its examples, which
        are `paired` if they are in the order of the data."""
        examples = None
        if above is not None:
            ones = np.ones(len(above)) if below is None else below
            examples = np.stack([above, ones], axis=1).astype(np.float64)
        number = self.count if count is None else count
        ids = self.ids if examples is not None and paired else ""
        return Score(name, self.model, found.value, found.low, found.high, number, better, unit, examples, ids, apart)


def _evaluate(result: Any, models: Sequence[str]) -> Iterator[Score]:
    make = _Maker(result, models[0])
    for at, one in enumerate(result.scores):
        share = 0 <= one.estimate.value <= 1 and one.measure.startswith(("accuracy", "acc", "exact"))
        unit = "%" if share else "nats" if one.measure == "cross-entropy" else ""
        name = one.measure if one.shots is None else f"{one.measure}[{one.task}]"
        values = {} if result.values is None else {"above": result.values[:, at]}
        each = values or (_unordered(one.estimate.value, one.examples) if share else {})
        yield make(name, one.estimate, HIGHER if one.higher else LOWER, unit, count=one.examples, **each)


def _loss(result: Any, models: Sequence[str]) -> Iterator[Score]:
    for model, one in zip(models, result.summaries):
        make = _Maker(result, model)
        yield make("loss", one.mean, LOWER, result.unit)
        yield make("loss.slope", one.slope, LOWER, f"{result.unit} per doubling")


def _position(result: Any, models: Sequence[str]) -> Iterator[Score]:
    make = _Maker(result, models[0])
    kind = "" if result.replacement == "noise" else result.replacement
    regions = result.regions
    every: list[Lost | None] = [None] * len(regions)
    if result.right is not None:
        every = [_lost(result.right[0], one) for one in result.right[1 : 1 + len(regions)]]
    yield make(_named("position.drop", kind), result.average_drop, LOWER, **_average(every))
    for region, lost in zip(regions, every):
        found = {"count": region.examples, **_average([lost])}
        yield make(_named("position.drop", kind, region.region), region.drop, LOWER, **found)
        if region.success is not None:
            right = 0 if lost is None else int(lost[1].sum())
            name = _named("position.success", kind, region.region)
            yield make(name, region.success, LOWER, count=region.examples, **_unordered(region.success.value, right))


WORD_BUDGETS = (1, 2, 4)
"""Numbers of changed words whose accuracies are scores of an attack on words."""


def _words(result: Any, models: Sequence[str]) -> Iterator[Score]:
    make = _Maker(result, models[0])
    budget = result.provenance["options"].get("budget")
    variant = (result.recipe, "" if budget is None else f"{budget} queries")
    right = np.array([one.status != "skipped" for one in result.examples])
    won = np.array([one.status == "success" for one in result.examples])
    changed = np.array([one.changed for one in result.examples])
    yield make(_named("words.success", *variant), result.success, LOWER, above=won, below=right, count=int(right.sum()))
    for most in WORD_BUDGETS:
        allowed = f"{most} word{'s' * (most > 1)}"
        found = Estimate(*result.curve[min(most, len(result.curve) - 1)].tolist())
        withstood = right & ~(won & (changed <= most))
        yield make(_named("words.accuracy", *variant, allowed), found, HIGHER, above=withstood)
    yield make(_named("words.accuracy", *variant), result.attacked, HIGHER, above=right & ~won)


def _prompts(result: Any, models: Sequence[str]) -> Iterator[Score]:
    make = _Maker(result, models[0])
    clean = None if result.right is None else result.right[0].mean(0)
    yield make("prompts.clean", result.average_clean, HIGHER, above=clean)
    for at, one in enumerate(result.attacks):
        lost: list[Lost | None] = [None]
        if result.right is not None:
            lost = [_lost(*pair) for pair in zip(result.right[0], result.right[1 + at]) if (pair[1] >= 0).all()]
        yield make(_named("prompts.drop", one.name), one.drop, LOWER, **_average(lost))


def _insertion(result: Any, models: Sequence[str]) -> Iterator[Score]:
    lost = None if result.right is None else _lost(result.right[0], result.right[1:].all(0))
    yield _Maker(result, models[0])("insertion.drop", result.worst_drop, LOWER, **_average([lost]))


def _overflow(result: Any, models: Sequence[str]) -> Iterator[Score]:
    make = _Maker(result, models[0])
    for at, curve in enumerate(result.curves):
        last = curve.points[-1]
        lost = None if result.right is None else _lost(result.right[at, 0], result.right[at, -1])
        yield make(_named("overflow.drop", curve.where, f"{last.tokens} tokens"), last.drop, LOWER, **_average([lost]))


def _noise(result: Any, models: Sequence[str]) -> Iterator[Score]:
    make, every = _Maker(result, models[0]), [_lost(result.right[0], one) for one in result.right[1:]]
    yield make("noise.drop", result.average_drop, LOWER, **_average(every))
    for level, lost in zip(result.levels, every):
        yield make(_named("noise.drop", f"{100 * level.rate:g} %"), level.drop, LOWER, **_average([lost]))


def _poison(result: Any, models: Sequence[str]) -> Iterator[Score]:
    make, victim = _Maker(result, models[0], rows=result.rows), result.victims[0]
    found, goal, held_out = victim.attack("found"), result.objective, result.texts[2]
    lost = None if victim.right is None else _lost(victim.right, victim.right * found.right)
    yield make(
        _named("poison.survival", goal), found.survival, HIGHER, above=found.survived, count=held_out, apart=ONE_SEARCH
    )
    yield make(
        _named("poison.flipped", goal), found.flipped, LOWER, count=held_out, apart=ONE_SEARCH, **_average([lost])
    )
    if victim.beyond is not None:
        more = {}
        if victim.right is not None:
            right = victim.right.astype(np.float64)
            more = {"above": right * (victim.attack("log-odds").right - found.right), "below": right}
        yield make(_named("poison.beyond", goal), victim.beyond, LOWER, count=held_out, apart=ONE_SEARCH, **more)
    for name, alarm in zip(result.detectors, found.alarms):
        yield make(_named("poison.auroc", goal, name), alarm.auroc, HIGHER, "", count=held_out, apart=ONE_SEARCH)


Lost = tuple[np.ndarray, np.ndarray]
"""Numerators and denominators of the examples of a relative drop 1 − accuracy / clean accuracy."""


def _lost(clean: np.ndarray, attacked: np.ndarray) -> Lost:
    """Return the numerators and denominators of a drop; examples at which `attacked` is −1 are left out."""
    there = attacked >= 0
    return np.where(there, clean - 1.0 * attacked, 0.0), there * clean.astype(np.float64)


def _average(every: Sequence[Lost | None]) -> dict[str, Any]:
    """Return the numerators and denominators of a mean of drops, as arguments; none if they are not known. Drops over
    fewer examples than the first has weigh more, which keeps the mean exact."""
    known = [one for one in every if one is not None]
    if not known or len(known) < len(every) or any(not below.sum() for _, below in known):
        return {}
    most = max(known, key=lambda one: float(one[1].sum()))[1]
    return {"above": np.mean([above * most.sum() / below.sum() for above, below in known], axis=0), "below": most}


def _unordered(share: float, count: int) -> dict[str, Any]:
    """Return the numerators of a recorded share of so many examples, as arguments; none if it is no such share. They
    are not in the order of the data."""
    part = share * count
    if not count or math.isnan(part) or abs(part - round(part)) > 1e-6:
        return {}
    return {"above": np.arange(count) < round(part), "paired": False}


def _fidelity(result: Any, models: Sequence[str]) -> Iterator[Score]:
    make, place = _Maker(result, models[0]), result.measures.index("delta")
    for number, method in enumerate(result.methods):
        values = result.values[number, :, place]
        found = Estimate(*result.estimates[number, place].tolist())
        known = ~np.isnan(values)
        each = {"above": np.where(known, values, 0.0), "below": known, "count": len(values)}
        yield make(_named("fidelity", method), found, HIGHER, "", apart=LOGIT_SCALE, **each)


def _sanity(result: Any, models: Sequence[str]) -> Iterator[Score]:
    make, apart = _Maker(result, models[0]), counted(result.texts, "given text")
    for method in result.methods:
        found = result.estimate(method, result.parts[-1])
        yield make(_named("sanity", method), found, LOWER, "", count=result.texts, apart=apart)


def _stability(result: Any, models: Sequence[str]) -> Iterator[Score]:
    """Neither side of growth is better: what forgets faster is more stable, and remembers less."""
    make = _Maker(result, models[0])
    worst = max(result.layers, key=lambda layer: layer.growth.value)
    apart = "" if result.given else RANDOM
    yield make("stability.growth", worst.growth, "", "nats per token", count=result.texts, apart=apart)


def _influence(result: Any, models: Sequence[str]) -> Iterator[Score]:
    make = _Maker(result, models[0])
    recent, name = result.output.recent(result.recent), _named("influence.recent", f"last {result.recent}")
    apart = "" if result.provenance["options"]["length"] is None else RANDOM
    yield make(name, recent, "", count=len(result.lengths), apart=apart)


def _named(name: str, *variant: str) -> str:
    """Return a name with its variant in brackets, parts joined by ", "; the bare name without one."""
    parts = ", ".join(filter(None, variant))
    return f"{name}[{parts}]" if parts else name


READERS: Mapping[str, Callable[[Any, Sequence[str]], Iterator[Score]]] = {
    "evaluate": _evaluate,
    "loss": _loss,
    "position": _position,
    "words": _words,
    "prompts": _prompts,
    "insertion": _insertion,
    "noise": _noise,
    "overflow": _overflow,
    "poison": _poison,
    "fidelity": _fidelity,
    "sanity": _sanity,
    "stability": _stability,
    "influence": _influence,
}
"""Function that reads the scores of a result's kind."""
NAMES: Mapping[str, tuple[str, ...]] = {
    "evaluate": ("accuracy", "cross-entropy"),
    "loss": ("loss", "loss.slope"),
    "position": ("position.drop", "position.success"),
    "words": ("words.success", "words.accuracy"),
    "prompts": ("prompts.clean", "prompts.drop"),
    "insertion": ("insertion.drop",),
    "noise": ("noise.drop",),
    "overflow": ("overflow.drop",),
    "poison": ("poison.survival", "poison.flipped", "poison.beyond", "poison.auroc"),
    "fidelity": ("fidelity",),
    "sanity": ("sanity",),
    "stability": ("stability.growth",),
    "influence": ("influence.recent",),
}
"""Names without brackets of the scores of each kind; on tasks, `evaluate` has the harness's names instead."""


# ---- scores of a report


def report_scores(report: Report) -> list[Score]:
    """Return the scores of all results of a report in its order."""
    return [one for entry in report.entries for result in entry.results for one in scores(result, entry.models)]


def write_scores(every: Iterable[Score], directory: str | os.PathLike[str]) -> Path:
    """Write scores to `scores.json` in a directory, atomically, and return its path."""
    path = Path(directory, SCORES)
    document = {"scores": [encode_fields(one) for one in every]}
    write_whole(path, json.dumps(document, allow_nan=False, ensure_ascii=False) + "\n")
    return path


def read_scores(where: str | os.PathLike[str]) -> list[Score]:
    """Read the scores of a report from its directory or its `scores.json`. Raise InputError if it has none."""
    path = Path(where)
    path = path / SCORES if path.is_dir() else path
    try:
        document = json.loads(path.read_bytes())
        return [_checked(decode_fields(one, Score)) for one in document["scores"]]
    except OSError as error:
        raise InputError(
            f"there are no scores at {path}: {error.strerror or error}; give the directory of a report that has run"
        ) from error
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise InputError(f"{path} does not hold a report's scores: {error}") from error


def _checked(score: Score) -> Score:
    """Return a score that was read. Raise ValueError if its examples are not (examples, 2) finite numbers."""
    each = score.examples
    if each is not None and not (each.dtype.kind in "biuf" and each.ndim == 2 and each.shape[1] == 2):
        raise ValueError(f"the examples of {score.name} are {each.dtype} {each.shape}, not numbers (examples, 2)")
    if each is not None and not np.isfinite(each).all():
        raise ValueError(f"the examples of {score.name} are not finite")
    return score
