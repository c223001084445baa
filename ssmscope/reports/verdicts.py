"""What a result says of a model in one line: numbers with their intervals, no praise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ssmscope.bootstrap import Estimate
from ssmscope.interp.views.tokens import shorten, visible
from ssmscope.reports.grouping import Found

LONGEST = 240
"""As many characters as a line has."""


def verdict(found: Found, model: str) -> str:
    """What the result says of one of its entry's models, by its shown name."""
    said = _KINDS[found.result.kind](found, model) if found.result.kind in _KINDS else _headline(found.result)
    return shorten(visible(said), LONGEST)


def _headline(result: Any) -> str:
    """The headline without the model, which the row names: "Position bias of NAME: …" is "…"."""
    model = str(result.provenance.get("model", "a model"))
    for before in (f" of {model}: ", f" on {model}: "):
        if before in result.headline:
            return result.headline.split(before, 1)[1]
    return result.headline


def _fidelity(found: Found, model: str) -> str:
    result: Any = found.result
    best = result.best("delta")
    return f"ΔA {_number(result.estimate(best[0]))} of {' and '.join(best)}, the best of {len(result.methods)}"


def _plausibility(found: Found, model: str) -> str:
    result: Any = found.result
    numbers = iter(result.estimates)
    auprc = {name: (next(numbers), next(numbers), next(numbers))[2] for name in result.methods}
    best = max(auprc, key=lambda name: auprc[name].value)
    return f"AUPRC {_number(auprc[best])} of {best}, the best of {len(auprc)}; chance {result.chance:.3f}"


def _sanity(found: Found, model: str) -> str:
    result: Any = found.result
    ends = [f"{name} {_number(result.estimate(name, result.parts[-1]))}" for name in result.methods]
    return f"correlation with all parts randomised: {', '.join(ends)}"


def _position(found: Found, model: str) -> str:
    result: Any = found.result
    defined = [one for one in result.regions if not math.isnan(one.drop.value)]
    if not defined:
        return f"accuracy {_number(result.clean)}, no drop defined"
    worst = max(defined, key=lambda one: one.drop.value)
    said = f"average drop {_percent(result.average_drop)}"
    return f"{said}, worst {_share(worst.drop)} at {worst.region}" if len(defined) > 1 else said


def _prompts(found: Found, model: str) -> str:
    result: Any = found.result
    defined = sorted((one for one in result.attacks if not math.isnan(one.drop.value)), key=lambda one: -one.drop.value)
    if not defined:
        return f"accuracy {_number(result.average_clean)}, no PDR defined"
    worst, *others = defined
    way = " as PromptBench measures it" if result.as_promptbench else ""
    said = f"PDR{way} {_percent(worst.drop)} under {worst.name}"
    listed = ", ".join(f"{one.name} {_share(one.drop)}" for one in others)
    return f"{said} (▼ the worst), {listed}" if others else said


def _words(found: Found, model: str) -> str:
    result: Any = found.result
    return f"accuracy {result.accuracy.value:.3f}, {_number(result.attacked)} under {result.recipe}"


def _stability(found: Found, model: str) -> str:
    result: Any = found.result
    counts = [f"{number} {name}" for name, number in result.counts().items() if number]
    if len(counts) == 1:
        return f"{result.verdict} in {f'all {len(result)} {result.unit}' if len(result) > 1 else 'its one layer'}"
    return f"{result.verdict}: {', '.join(counts)} of {len(result)} {result.unit}"


def _stability_table(found: Found, model: str) -> str:
    result: Any = found.result
    row = next((row for name, row in zip(found.entry.models, result.rows) if name == model), None)
    if row is None or len(found.entry.models) != len(result.rows):
        return _headline(result)
    if row.reason:
        return f"unreadable: {row.reason}"
    bound = "" if row.vacuous is None else ", bound vacuous" if row.vacuous else f", bound {row.bound:.3g}"
    return f"{row.verdict}, s_A {row.abscissa:.3g}{bound}".replace("-", "−")


def _snr(found: Found, model: str) -> str:
    result: Any = found.result
    name = _own(found, model, [one.name for one in result.models])
    curve = result.curve(name)
    length = "" if curve.length is None else f" at {curve.length:,} {result.unit}"
    return f"needle probability {_number(curve.average)}, mean of layers; accuracy {_number(curve.accuracy)}{length}"


def _retrieval(found: Found, model: str) -> str:
    result: Any = found.result
    at = result.models.index(_own(found, model, result.models))
    ends = list(dict.fromkeys((result.lengths[0], result.lengths[-1])))
    means = " and ".join(f"{result.mean(at, length):.3f} at {length:,} tokens" for length in ends)
    number = len(result.tasks)
    return f"accuracy {means}, {'mean of ' if number > 1 else ''}{number} task{'s' if number > 1 else ''}"


def _loss(found: Found, model: str) -> str:
    result: Any = found.result
    at = result.models.index(_own(found, model, result.models))
    return f"{_number(result.summaries[at].mean)} {result.unit} a token"


def _lens(found: Found, model: str) -> str:
    result: Any = found.result
    return f"KL {_number(result.tuned)} nats with the tuned lens, {_number(result.logit)} with the logit lens"


def _overflow(found: Found, model: str) -> str:
    result: Any = found.result
    last = [f"{_number(curve.points[-1].accuracy)} {curve.where}" for curve in result.curves]
    tokens = result.curves[0].points[-1].tokens
    return f"accuracy {result.clean.value:.3f}; with {tokens:,} tokens of filler {' and '.join(last)} the text"


def _insertion(found: Found, model: str) -> str:
    result: Any = found.result
    return f"accuracy {result.clean.value:.3f}, {_number(result.worst)} with a phrase at each example’s worst place"


def _influence(found: Found, model: str) -> str:
    result: Any = found.result
    return str(result.found)


def _effect(found: Found, model: str) -> str:
    result: Any = found.result
    return f"{result.answer_name}; {result.changed_name}"


def _trajectory(found: Found, model: str) -> str:
    result: Any = found.result
    settled = np.concatenate([text.settled for text in result.texts])
    where = f"{len(settled):,} positions" if len(settled) > 1 else "one position"
    return f"the answer leads from layer {settled.mean():.1f} of {result.layers} on, mean of {where}, {result.lens}"


def _heatmap(found: Found, model: str) -> str:
    result: Any = found.result
    if len(result) != 1 or result.of_images:
        return f"{result.score} of {len(result):,} {'images' if result.of_images else 'texts'}, {result.layers_name}"
    tokens = ", ".join(f"“{visible(token).strip()}” {score:.3f}" for _, token, score in result[0].top(3))
    return f"highest {result.score}: {tokens or 'no tokens'}"


def _attention(found: Found, model: str) -> str:
    result: Any = found.result
    distances = [one.readouts.distance for text in result for one in text.maps]
    known = [value for value in distances if not math.isnan(value)]
    if not known:
        return f"{result.level_name}, {len(distances)} maps without mass"
    number = f"{len(known)} maps" if len(known) > 1 else "one map"
    return f"attends {np.mean(known):.1f} tokens back on average, {result.level_name}, {number}"


def _explain(found: Found, model: str) -> str:
    result: Any = found.result
    frame = result.summary()
    failed = int((frame["converged"] == False).sum())  # noqa: E712  # missing counts as neither
    number = f"{len(result)} text{'s' if len(result) > 1 else ''}"
    said = f"{', '.join(result.methods)} on {number}"
    return f"{said}; {failed} of {len(frame)} attributions incomplete" if failed else said


def _own(found: Found, model: str, names: Any) -> str:
    """What a result of several models calls the one that the report shows by another name."""
    shown = found.entry.models
    return names[shown.index(model)] if len(shown) == len(names) and model in shown else names[0]


def _number(found: Estimate) -> str:
    return str(found).replace("-", "−")


def _share(found: Estimate) -> str:
    return f"{100 * found.value:.1f} %".replace("-", "−")


def _percent(found: Estimate) -> str:
    if math.isnan(found.value):
        return "not defined"
    return f"{100 * found.value:.1f} % [{100 * found.low:.1f}, {100 * found.high:.1f}]".replace("-", "−")


_KINDS: dict[str, Callable[[Found, str], str]] = {
    "attention": _attention,
    "effect": _effect,
    "explain": _explain,
    "fidelity": _fidelity,
    "heatmap": _heatmap,
    "influence": _influence,
    "insertion": _insertion,
    "lens-fit": _lens,
    "loss": _loss,
    "overflow": _overflow,
    "plausibility": _plausibility,
    "position": _position,
    "prompts": _prompts,
    "retrieval": _retrieval,
    "sanity": _sanity,
    "snr": _snr,
    "stability": _stability,
    "stability-table": _stability_table,
    "trajectory": _trajectory,
    "words": _words,
}
