"""Sentences on influence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.probes.influence.reach import SHARES
from ssmscope.render.numbers import brackets, number

if TYPE_CHECKING:
    from ssmscope.probes.influence.result import Influence


def sentences(result: Influence) -> Iterable[str]:
    """Describe the measurement, decay, recency, effective context and similarity in sentences."""
    reach, unit, texts = result.output, result.unit, len(result.lengths)
    y = "the head's input" if result.of == "hidden" else "the logits"
    where = {"last": "the last position", "all": "every position", "chosen": "chosen positions"}[result.positions]
    yield f"‖∂y/∂x‖ of y, {y} at {where}, by the embeddings x of {result.counted}; {norms_in_words(result)}."

    decay = reach.decay
    if not decay.defined:
        yield "Decay: too few distances for a line."
    elif math.isinf(decay.length.value):
        yield f"Decay: none with distance, λ = {number(decay.rate.value)}{brackets(decay.rate)} (R² {decay.r2:.2f})."
    else:
        yield (
            f"Decay: by a factor of e every {number(decay.length.value)} {unit}{brackets(decay.length)}, "
            f"λ = {number(decay.rate.value)}{brackets(decay.rate)}, over distances {decay.first} to {decay.last} "
            f"(R² {decay.r2:.2f})." + " The exponential fit is poor." * (not decay.straight)
        )
    recent = reach.recent(result.recent)
    ends = brackets(recent.times(100), 1)
    yield f"Recency: the last {result.recent} {unit} hold {100 * recent.value:.1f} %{ends} of the influence."
    if reach.of_own_tokens:
        yield (
            "Effective context: not defined, because the influence does not fall at one rate, so that the influence of "
            f"{unit} before {result.one} is unknown."
        )
    else:
        parts = []
        for share in SHARES:
            middle, missed = reach.effective_context(share), reach.not_reached(share)
            found = "not reached" if math.isinf(middle) else f"within {tokens_or_dash(middle)}"
            some = f" (not reached in {missed} of {texts})" if missed and math.isfinite(middle) else ""
            parts.append(f"{100 * share:.0f} % {found}{some}")
        yield f"Effective context in {unit}, median: {'; '.join(parts)}."
    if result.of_own_tokens or any(reach.not_reached(share) for share in SHARES):
        held = ", ".join(
            f"{100 * s:.0f} % in {tokens_or_dash(reach.effective_context(s, within=True))}" for s in SHARES
        )
        yield f"Of the influence of {result.one}'s own {unit} alone, the last ones hold {held}."
    similarity = result.similarity
    cosines = similarity.estimate("embeddings"), similarity.estimate("output"), similarity.estimate("output", "centred")
    first, last, centred = (f"{number(found.value, 3)}{brackets(found, 3)}" for found in cosines)
    yield (
        f"Similarity: the mean cosine of {result.one}'s {unit} is {first} at the embeddings and {last} at the output "
        f"({centred} when centred)."
    )


def norms_in_words(result: Influence) -> str:
    """Return "exact", or the number of random vectors with the standard error of a norm."""
    reach = result.output
    if reach.exact:
        return "exact"
    known = reach.error[~np.isnan(reach.error)]
    error = f", a norm's standard error is {100 * float(np.median(known)):.0f} %" if len(known) else ""
    return f"estimated with {result.provenance['options']['probes']} random vectors{error}"


def tokens_or_dash(tokens: float) -> str:
    """Return an effective context in words; "–" if not defined."""
    return "–" if math.isnan(tokens) else "not reached" if math.isinf(tokens) else f"{tokens:,.0f}"
