"""Result of the generalisation bound: all terms, tables and curves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from ssmscope.api.results import Result
from ssmscope.core.ties import descending
from ssmscope.probes.bound.terms import CURVES, LINEAR_P, Capacity, Gap, LayerTerms, Norms, log_sums, softplus
from ssmscope.render.blocks import Block
from ssmscope.render.numbers import number, token_count
from ssmscope.render.table import Cell, Line, Table, number_cell, table

NORM_MEANINGS = {
    "B_u": "the largest norm of an embedding",
    "B_B": "spectral norm of W_B",
    "B_C": "spectral norm of W_C",
    "B_w": "norm of w",
    "B_q": "norm of q",
    "B_A": "the largest |A|",
    **{f"M_{name}": f"sum of |{weight}|" for name, weight in zip("BCwqA", ("W_B", "W_C", "w", "q", "A"))},
}


@dataclass(frozen=True, kw_only=True)
class GeneralizationBound(Result, kind="bound"):
    """The bound of a selective SSM with all its terms; for any other model, the terms of its layers."""

    length: int
    """T."""
    examples: int | None
    """m; None if unknown and not needed for a bound."""
    delta: float
    loss_bound: float
    lipschitz: float
    norms: Norms | None = None
    """None if the theorem does not cover the model; then `capacity` and `gap` are None and the numbers below NaN."""
    row: int = 0
    """The class whose row of W is w."""
    rows: int = 0
    """Number of rows of W."""
    capacity: Capacity | None = None
    gap: Gap | None = None
    log_linear: float = math.nan
    """ln C of linear attention with these weights (Proposition 3.4)."""
    log_lower: float = math.nan
    """ln of the lower bound on the Rademacher complexity (Eqs. 19 and 20); NaN for s_A < 0, where there is none."""
    layers: tuple[LayerTerms, ...] = ()
    """Measured terms of a model outside the theorem."""
    inputs: str = ""
    lengths: np.ndarray
    """(lengths,) T of the curves."""
    curves: np.ndarray
    """(3, lengths) ln C by `CURVES`; outside the theorem (layers, lengths) ln of the largest output."""
    notes: tuple[str, ...] = ()

    @property
    def applies(self) -> bool:
        return self.norms is not None

    @property
    def vacuous(self) -> bool | None:
        """Return True if the bound says nothing at this m; None if the theorem does not cover the model."""
        return None if self.gap is None else self.gap.vacuous

    @property
    def is_linear_attention(self) -> bool:
        """Return True if the conditions of Proposition 3.4 hold: A = 0, q = 0 and a step of 1, within 1e-6."""
        n = self.norms
        return n is not None and n.B_A < 1e-6 and n.B_q < 1e-6 and abs(softplus(n.p) - 1) < 1e-6

    @property
    def headline(self) -> str:
        start = f"Generalisation bound of {self.model_name}: "
        if self.capacity is None or self.gap is None:
            return f"{start}outside the theorem's assumptions"
        said = "vacuous" if self.gap.vacuous else f"losses differ by at most {self.gap.bound:.3g}"
        return f"{start}{said} at m = {self.examples:,}, ln C = {self.capacity.log:.2f} at T = {self.length:,}"

    @classmethod
    def compare(cls, results: Sequence[GeneralizationBound], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        for result, (label,) in zip(results, labels):
            gap, capacity = result.gap, result.capacity
            state = "outside the assumptions" if gap is None else "vacuous" if gap.vacuous else "holds"
            examples = "–" if result.examples is None else f"{result.examples:,}"
            cells = {"bound": Cell(text=state), "m": Cell(text=examples), "T": Cell(text=f"{result.length:,}")}
            cells["losses differ by at most"] = number_cell(gap.bound if gap and not gap.vacuous else math.nan)
            cells["ln C"] = number_cell(math.nan if capacity is None else capacity.log)
            lines.append(Line((label,), cells))
        return table(("model",), lines)

    def terms(self) -> list[tuple[int | None, str, float, str]]:
        """Return (layer, symbol, value, meaning) of every term. Symbols that begin with ln are natural logarithms."""
        if self.norms is None or self.capacity is None or self.gap is None:
            return [
                (one.layer, symbol, value, meaning + f" of recurrence {one.part}" * (one.parts > 1))
                for one in self.layers
                for symbol, value, meaning in self._layer_terms(one)
            ]
        n, c, g = self.norms, self.capacity, self.gap
        S1, S2 = log_sums(n.log_rho, self.length)
        rows: list[tuple[str, float, str]] = [
            ("s_A", n.abscissa, "spectral abscissa, the largest entry of A"),
            ("p", n.p, "bias of the step"),
            ("N", n.state, "states per channel"),
            ("d", n.channels, "channels"),
            *((name, getattr(n, name), meaning) for name, meaning in NORM_MEANINGS.items()),
            ("Δ_min", n.delta_min, "softplus(p − B_q B_u): no step is smaller"),
            ("M_Δ", n.M_delta, "softplus(p + B_q B_u): no step is larger"),
            ("ln ρ", n.log_rho, "the largest growth of a state in a step: s_A Δ_min, for s_A > 0 s_A M_Δ"),
            ("ln ρ printed", n.log_rho_printed, "Eq. 15: s_A Δ_min at either sign"),
            ("ln S₁", S1, "Σ ρᵗ, t < T"),
            ("ln S₂", S2, "Σ t ρᵗ, t < T"),
            ("ln C", c.log, "the capacity with all constants"),
            *((f"share of {name}", share, f"of the cover of {name} in C^(2/3)") for name, share in c.shares.items()),
            ("ln C printed", c.log_printed, "the capacity by Eq. 14, up to constants"),
            ("bound", g.bound, "on the difference of losses (Eq. 13); c_l if vacuous"),
            ("vacuous", float(g.vacuous), "1 if 3 l C / √m > c_l"),
            ("ln m needed", g.log_examples, "the smallest m at which the bound is not vacuous"),
            ("ln C linear", self.log_linear, "linear attention with these W_B, W_C, w (Proposition 3.4)"),
            ("p linear", LINEAR_P, "the p that Proposition 3.4 requires, ln(e − 1)"),
            ("ln lower", self.log_lower, "lower bound on the Rademacher complexity (Eqs. 19, 20), for s_A ≥ 0"),
        ]
        return [(None, symbol, float(value), meaning) for symbol, value, meaning in rows]

    def _layer_terms(self, one: LayerTerms) -> list[tuple[str, float, str]]:
        S1, S2 = one.sums(self.length)
        return [
            ("s_A", one.abscissa, "spectral abscissa, the largest entry of A"),
            ("d", float(one.channels), "channels"),
            ("N", float(one.state), "states per channel"),
            ("B_A", one.B_A, "the largest |A|"),
            ("‖x‖", one.B_x, "the largest norm of a step's input, for B_u"),
            ("‖b‖", one.B_b, "for B_B B_u"),
            ("‖c‖", one.B_c, "for B_C B_u"),
            ("Δ_min", one.delta_min, "the smallest step"),
            ("M_Δ", one.M_delta, "the largest step"),
            ("B_q B_u", one.half_range, "half the range of softplus⁻¹(Δ)"),
            ("ln ρ", one.log_rho, "the largest log-gain of a step"),
            ("ln S₁", S1, "Σ ρᵗ, t < T"),
            ("ln S₂", S2, "Σ t ρᵗ, t < T"),
            ("ln ‖H‖", one.log_state(self.length), "the largest state (Lemma E.4)"),
            ("ln ‖y‖", one.log_output(self.length), "the largest output"),
            ("ln C printed", one.log_capacity(self.length), "Eq. 14 with these terms and ‖w‖ = 1; no bound follows"),
        ]

    def to_frame(self) -> pd.DataFrame:
        """Return a row per term: columns layer (missing for terms of the whole model), symbol, value and meaning.
        Symbols that begin with ln are natural logarithms. For a model outside the theorem the terms are those of its
        layers, the largest on the inputs."""
        frame = pd.DataFrame(self.terms(), columns=["layer", "symbol", "value", "meaning"])
        return frame.astype({"layer": "Int64"})

    def curve(self) -> pd.DataFrame:
        """Return ln C against T: columns length, curve (one of `CURVES`) and log_capacity; for a model outside the
        theorem length, layer, part and log_output, ln of the largest output."""
        labels = [(name,) for name in CURVES] if self.applies else [(one.layer, one.part) for one in self.layers]
        rows = [(int(T), *label, y) for label, row in zip(labels, self.curves) for T, y in zip(self.lengths, row)]
        names = ["curve", "log_capacity"] if self.applies else ["layer", "part", "log_output"]
        return pd.DataFrame(rows, columns=["length", *names])

    def blocks(self) -> Iterable[Block]:
        yield from self.opening(*sentences(self), notes=self.notes)
        if self.applies:
            rows = tuple(((symbol,), (number_cell(value), Cell(text=says))) for _, symbol, value, says in self.terms())
            yield Table(("symbol",), ("value", "meaning"), rows)
        else:
            yield self._layer_table(slice(0, 10))
            yield self._layer_table(slice(10, None))

    def _layer_table(self, chosen: slice) -> Table:
        terms = [self._layer_terms(one)[chosen] for one in self.layers]
        known = [at for at in range(len(terms[0])) if not all(math.isnan(row[at][1]) for row in terms)]
        symbols, _, meanings = zip(*(terms[0][at] for at in known))
        rows = tuple(
            ((one.name,), tuple(number_cell(row[at][1]) for at in known)) for one, row in zip(self.layers, terms)
        )
        note = "; ".join(f"{symbol}: {meaning}" for symbol, meaning in zip(symbols, meanings))
        return Table(("layer",), symbols, rows, f"{note}.")


def sentences(result: GeneralizationBound) -> Iterator[str]:
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
    name = [*c.shares][descending(np.array([*c.shares.values()]))[0]]
    return f"The largest part is the cover of {name}, {100 * c.shares[name]:.0f} %."


def _loss(result: GeneralizationBound, gap: Gap) -> str:
    level = f"with probability {100 * (1 - result.delta):g} %"
    if gap.vacuous:
        power = gap.log_examples / math.log(10)
        needed = f"10^{power:.1f}" if gap.log_examples > 14 else f"{math.exp(gap.log_examples):,.0f}"
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
            f"{number(n.log_rho_printed)}, which is not an upper bound for s_A > 0.)"
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
