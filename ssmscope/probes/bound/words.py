"""Sentences on the generalisation bound of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ssmscope.probes.bound.terms import LINEAR_P, softplus
from ssmscope.render.numbers import number, token_count

if TYPE_CHECKING:
    from ssmscope.probes.bound.result import GeneralizationBound
    from ssmscope.probes.bound.terms import Capacity, Gap, Norms


def sentences(result: GeneralizationBound) -> Iterator[str]:
    """Describe the bound in sentences."""
    n, c = result.norms, result.capacity
    if n is None or c is None or result.gap is None:
        yield (
            "Outside the theorem's assumptions: Theorem 3.3 covers one selective SSM on bounded inputs, with nothing "
            f"between its output and the answer. These are the largest terms on {result.inputs}, at T = "
            f"{result.length:,}; no bound on the loss follows from them."
        )
        yield (
            "‖H‖ and ‖y‖ bound the states and outputs of the layer's recurrence on inputs of these norms and gains "
            "(Lemma E.4). C is the right side of Eq. 14 for a readout of norm 1."
        )
        return
    yield (
        f"ln C at T = {result.length:,}: {c.log:.2f} with all constants, {c.log_printed:.2f} by Eq. 14, "
        f"{result.log_linear:.2f} as linear attention. {_largest(c)}"
    )
    yield _loss(result, result.gap)
    yield from _growth(n, result)
    yield _linear(n, result)
    if result.rows > 1:
        yield f"w is row {result.row} of the {result.rows} rows of W, the one with the largest C."


def _largest(c: Capacity) -> str:
    name = max(c.shares, key=lambda part: c.shares[part])
    return f"The largest part is the cover of {name}, {100 * c.shares[name]:.0f} %."


def _loss(result: GeneralizationBound, gap: Gap) -> str:
    level = f"with probability {100 * (1 - result.delta):g} %"
    needed = (
        f"10^{gap.log_examples / math.log(10):.1f}" if gap.log_examples > 14 else f"{math.exp(gap.log_examples):,.0f}"
    )
    if gap.vacuous:
        return (
            f"The bound is vacuous: 3 l C / √m exceeds c_l = {result.loss_bound:g} at m = {result.examples:,}, so "
            f"losses are only known to differ by at most c_l. It begins to hold at m = {needed}."
        )
    says = f"Expected and training loss differ by at most {gap.bound:.3g} {level}, m = {result.examples:,} (Eq. 13)"
    if gap.bound >= result.loss_bound:
        return f"{says}, which is no less than c_l = {result.loss_bound:g}, the largest possible difference."
    return f"{says}."


def _growth(n: Norms, result: GeneralizationBound) -> Iterator[str]:
    if n.abscissa < 0:
        yield (
            f"s_A < 0: no state can grow, ln ρ = {number(n.log_rho)}, and C is bounded at every length; it grows up to "
            f"about {token_count(-1 / n.log_rho)} tokens."
        )
    elif n.abscissa == 0:
        yield "s_A = 0: no state grows, and C grows as T²."
    else:
        yield (
            f"s_A > 0: a state may grow by ln ρ = {number(n.log_rho)} a token, and C by as much. (Eq. 15 prints "
            f"{number(n.log_rho_printed)}, which is no upper bound for s_A > 0.)"
        )
    if not math.isnan(result.log_lower):
        equation = "19" if n.abscissa > 0 else "20"
        yield f"Lower bound on the Rademacher complexity, as printed (Eq. {equation}): e^{result.log_lower:.2f}."


def _linear(n: Norms, result: GeneralizationBound) -> str:
    if result.is_linear_attention:
        return "A = 0, q = 0 and Δ = 1: the model is linear attention, which Proposition 3.4 covers."
    return (
        "It is not linear attention (Proposition 3.4), which requires A = 0, q = 0 and softplus(p) = 1, "
        f"p = {LINEAR_P:.3f} (the paper prints p = e); here |A| ≤ {n.B_A:.3g}, ‖q‖ = {n.B_q:.3g}, "
        f"softplus(p) = {softplus(n.p):.3g}."
    )
