"""Influence in words: a few sentences, and a table of the layers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.bootstrap import Estimate
from ssmscope.probes.influence_reach import SHARES, Reach

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ssmscope.probes.influence import Influence


def show(result: Influence) -> Iterable[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    yield Text(result.headline)
    yield Text("")
    yield from map(Text, sentences(result))
    yield Text("")
    reaches = {reach.place: reach for reach in result.reaches}
    table = Table(box=None, pad_edge=False)
    headings = ["place", "decay length", "R²", f"last {result.recent}", "50 %", "90 %", "95 %"]
    headings += ["cosine", "centred", "spread", "mixer's cosine"]
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "place" else "right", no_wrap=heading == "place")
    for place in result.similarity.places:
        alike = [number(result.similarity.estimate(place, name).value) for name in ("cosine", "centred", "spread")]
        own = "" if not place.isdigit() else number(result.similarity.estimate(place, part="mixer").value)
        reach = reaches.get(place)
        row = [""] * 6 if reach is None else _numbers(reach, result.recent)
        table.add_row(f"layer {place}" if place.isdigit() else place, *row, *alike, own)
    yield table
    if any(math.isinf(reach.effective_context(share)) for reach in result.reaches for share in SHARES):
        yield Text(f"> not reached: too short for that share are at least half of the {result.noun}.")
    yield from (Text(f"Note: {note}.") for note in result.notes)


def sentences(result: Influence) -> Iterable[str]:
    """What was measured, the decay, recency, the effective context, and how alike tokens become."""
    reach, unit, texts = result.output, result.unit, len(result.lengths)
    y = "the vector that the head reads" if result.of == "hidden" else "the logits"
    where = {"last": "the last position", "all": "every position", "chosen": "chosen positions"}[result.positions]
    yield f"‖∂y/∂x‖ of y, {y} at {where}, by the embeddings x of {result.counted}; {how(result)}."

    decay = reach.decay
    if not decay.defined:
        yield "Decay: too few distances for a line."
    elif math.isinf(decay.length.value):
        yield f"Decay: none with distance, λ = {decay.rate.value:.3g}{_ends(decay.rate)} (R² {decay.r2:.2f})."
    else:
        yield (
            f"Decay: by a factor of e every {decay.length.value:.3g} {unit}{_ends(decay.length)}, "
            f"λ = {decay.rate.value:.3g}{_ends(decay.rate)}, over distances {decay.first} to {decay.last} "
            f"(R² {decay.r2:.2f})."
        )
    recent = reach.recent(result.recent)
    ends = "" if math.isnan(recent.low) else f" [{100 * recent.low:.1f}, {100 * recent.high:.1f}]"
    yield f"Recency: the last {result.recent} {unit} hold {100 * recent.value:.1f} %{ends} of the influence."
    parts = []
    for share in SHARES:
        middle, missed = reach.effective_context(share), reach.not_reached(share)
        found = "not reached" if math.isinf(middle) else f"within {context(middle)}"
        some = f" (not reached in {missed} of {texts})" if missed and math.isfinite(middle) else ""
        parts.append(f"{100 * share:.0f} % {found}{some}")
    yield f"Effective context in {unit}, median: {'; '.join(parts)}."
    if any(reach.not_reached(share) for share in SHARES):
        held = ", ".join(f"{100 * s:.0f} % in {context(reach.effective_context(s, within=True))}" for s in SHARES)
        yield f"Of the influence of {result.one}'s own {unit} alone, the last ones hold {held}."
    first, last = (estimated(result.similarity.estimate(place)) for place in ("embeddings", "output"))
    centred = estimated(result.similarity.estimate("output", "centred"))
    yield (
        f"Similarity: the mean cosine of {result.one}'s {unit} is {first} at the embeddings and {last} at the output "
        f"({centred} when centred)."
    )


def how(result: Influence) -> str:
    """Whether the norms are exact, and how far they are off where they are not."""
    reach = result.output
    if reach.exact:
        return "exact"
    known = reach.error[~np.isnan(reach.error)]
    error = f", a norm's standard error is {100 * float(np.median(known)):.0f} %" if len(known) else ""
    return f"estimated with {result.provenance['options']['probes']} random vectors{error}"


def number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3f}"


def context(tokens: float) -> str:
    """An effective context; "–" where it is not defined."""
    return "–" if math.isnan(tokens) else "not reached" if math.isinf(tokens) else f"{tokens:,.0f}"


def estimated(found: Estimate) -> str:
    return number(found.value) if math.isnan(found.low) else str(found)


def _ends(found: Estimate) -> str:
    return "" if math.isnan(found.low) else f" [{found.low:.3g}, {found.high:.3g}]"


def _numbers(reach: Reach, recent: int) -> list[str]:
    length = reach.decay.length.value
    own = ["–" if math.isnan(length) else "∞" if math.isinf(length) else f"{length:.3g}", number(reach.decay.r2)]
    own.append(number(reach.recent(recent).value))
    contexts = (reach.effective_context(share) for share in SHARES)
    return own + [">" if math.isinf(each) else context(each) for each in contexts]
