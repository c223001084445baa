"""The generalisation bound of a selective SSM, computed from its weights.

Generalization Error Analysis for Selective State-Space Models (Honarpisheh et al.): Theorem 3.3, Proposition 3.4 and
Theorem 4.1.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.errors import InputError
from ssmscope.probes.bound_terms import (
    LINEAR_P,
    Capacity,
    Gap,
    LayerTerms,
    Norms,
    capacity,
    gap,
    log_linear_capacity,
    log_lower_bound,
    log_sums,
    softplus,
)
from ssmscope.results import Result, record_provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType

    from ssmscope.encoding import Batch
    from ssmscope.model import Model

CURVES = ("with constants", "Eq. 14", "linear attention")
"""The rows of a theorem model's curves: ln C with all constants, as printed, and of Proposition 3.4."""

POINTS = 41
"""Lengths of the curves where none are given, spread evenly on a logarithmic axis."""


def generalization_bound(
    model: Model,
    *,
    length: int,
    examples: int,
    delta: float = 0.05,
    loss_bound: float = 1.0,
    lipschitz: float = 1.0,
    lengths: Sequence[int] | None = None,
    texts: str | Sequence[str] | Batch | None = None,
    seed: int = 0,
) -> GeneralizationBound:
    """What Theorem 3.3 guarantees of a selective SSM: with probability 1 − δ its expected and its training loss differ
    by at most (Eq. 13, with the first constant that its proof gives)

        24 l C / √m · (1 + ln(c_l √m / (3 l C))) + 3 c_l √(ln(2/δ) / 2m),

    where the capacity C is a function of the norms of the weights and embeddings, the length T and the growth rate ρ.
    It holds only while 3 l C / √m ≤ c_l; beyond, the bound is vacuous, and c_l is all that is known. C is given with
    all constants of the proof, which the bound uses, and by Eq. 14, whose Õ hides them. The norms that the theorem
    assumes are taken to be the trained model's own. Where there are several classes w is the row of W with the largest
    C.

    Beside it: linear attention with the same W_B, W_C and w, C = T B_w B_B B_C B_u³ (Proposition 3.4), which this model
    is where A = 0, q = 0 and softplus(p) = 1; and the lower bounds on the Rademacher complexity for s_A ≥ 0, as printed
    (Eqs. 19 and 20).

    Any other model is outside of the theorem. What stands for its quantities is then measured layer by layer on texts,
    with C of Eq. 14's form, for comparisons between layers and lengths; no bound is derived from it.

    Args:
        model: a selective SSM between an embedding and a linear head; of other models only the measured terms.
        length: T, tokens of a text.
        examples: m, how many examples the model was trained on.
        delta: δ, the probability with which the bound may fail.
        loss_bound: c_l, the largest loss.
        lipschitz: l, the loss's Lipschitz constant.
        lengths: at which T the curves have ln C; by default 41 lengths up to 10,000 or 10 `length`.
        texts: of another model, what it is measured on; by default 4 random sequences of `length` tokens, at most 512.
        seed: draws random tokens.

    Raises:
        InputError: an option out of range, texts for a selective SSM, whose bound is about all of them, or numbers that
            are not finite.
    """
    for name, whole in (("length", length), ("examples", examples)):
        check_whole(name, whole)
    check_setting(delta, loss_bound, lipschitz)
    grid = grid_of(lengths, length)
    options: dict[str, Any] = {
        "length": length,
        "examples": examples,
        "delta": delta,
        "loss_bound": loss_bound,
        "lipschitz": lipschitz,
    }
    from ssmscope.probes.bound_norms import norms_of, theorem_model, worst_row

    parts = theorem_model(model)
    provenance = record_provenance(model.source, options=options, seed=seed if parts is None else None)
    setting = dict(length=length, examples=examples, delta=delta, loss_bound=loss_bound, lipschitz=lipschitz)
    if parts is None:
        return _outside(model, texts, seed, grid, provenance, setting)
    if texts is not None:
        raise InputError(f"the bound of {model.name} is about all texts: leave them out")
    row = worst_row(parts, length)
    norms = norms_of(parts, row)
    found = capacity(norms, length)
    notes = []
    if examples < norms.channels:
        notes.append(f"the covers of Lemma D.3 ask for m ≥ d, here {examples:,} and {norms.channels:,}")
    if parts.bias:
        notes.append("the head has a bias, which the theorem's output wᵀy[T] has not: it is left out")
    return GeneralizationBound(
        provenance=provenance,
        **setting,  # type: ignore[arg-type]
        norms=norms,
        row=row,
        rows=len(parts.head),
        capacity=found,
        gap=gap(found.log, examples=examples, delta=delta, loss_bound=loss_bound, lipschitz=lipschitz),
        log_linear=log_linear_capacity(norms, length),
        log_lower=log_lower_bound(norms.abscissa, norms.B_w, length=length, examples=examples),
        layers=(),
        inputs="",
        lengths=grid,
        curves=curves_of(norms, grid),
        notes=tuple(notes),
    )


def _outside(
    model: Model,
    texts: str | Sequence[str] | Batch | None,
    seed: int,
    grid: np.ndarray,
    provenance: dict[str, Any],
    setting: dict[str, Any],
) -> GeneralizationBound:
    from ssmscope.probes.bound_layers import measured
    from ssmscope.probes.stability_inputs import LENGTH, inputs_of

    length = None if texts is not None or model.channels is not None else max(2, min(setting["length"], LENGTH))
    inputs = inputs_of(model, texts, length=length, samples=4, seed=seed)
    layers = measured(model, inputs.batch)
    return GeneralizationBound(
        provenance=provenance,
        **setting,
        norms=None,
        row=0,
        rows=0,
        capacity=None,
        gap=None,
        log_linear=math.nan,
        log_lower=math.nan,
        layers=layers,
        inputs=inputs.name,
        lengths=grid,
        curves=np.array([[one.log_output(int(T)) for T in grid] for one in layers]),
        notes=(),
    )


@dataclass(frozen=True)
class GeneralizationBound(Result, kind="bound"):
    """The bound of a selective SSM with all of its terms; of another model the terms of its layers."""

    length: int
    examples: int
    delta: float
    loss_bound: float
    lipschitz: float
    norms: Norms | None
    """None where the model is not the theorem's; so are `capacity` and `gap`, and the numbers below are NaN."""
    row: int
    """The class whose row of W is w."""
    rows: int
    """How many rows W has."""
    capacity: Capacity | None
    gap: Gap | None
    log_linear: float
    """ln C of linear attention with these weights (Proposition 3.4)."""
    log_lower: float
    """ln of the lower bound on the Rademacher complexity (Eqs. 19 and 20); NaN where there is none, for s_A < 0."""
    layers: tuple[LayerTerms, ...]
    """Of a model that is not the theorem's."""
    inputs: str
    """What these were measured on, in words."""
    lengths: np.ndarray
    """(lengths,) T of the curves."""
    curves: np.ndarray
    """(3, lengths) ln C by `CURVES`; of another model (layers, lengths), ln of the largest output."""
    notes: tuple[str, ...]

    @property
    def applies(self) -> bool:
        """Whether the model is the theorem's."""
        return self.norms is not None

    @property
    def vacuous(self) -> bool | None:
        """Whether the bound says nothing at this m; None where the model is not the theorem's."""
        return None if self.gap is None else self.gap.vacuous

    @property
    def is_linear_attention(self) -> bool:
        """Whether the conditions of Proposition 3.4 hold: A = 0, q = 0 and a step of 1, within 1e-6."""
        n = self.norms
        return n is not None and n.B_A < 1e-6 and n.B_q < 1e-6 and abs(softplus(n.p) - 1) < 1e-6

    @property
    def headline(self) -> str:
        model = self.provenance.get("model", "a model")
        if self.capacity is None or self.gap is None:
            return f"Generalisation bound of {model}: outside the theorem's assumptions"
        if self.gap.vacuous:
            said = f"vacuous at m = {self.examples:,}"
        else:
            said = f"losses differ by at most {self.gap.bound:.3g} at m = {self.examples:,}"
        return f"Generalisation bound of {model}: {said}, ln C = {self.capacity.log:.2f} at T = {self.length:,}"

    def terms(self) -> list[tuple[int | None, str, float, str]]:
        """(layer, symbol, value, meaning) of every term. Symbols that begin with ln are natural logarithms."""
        if self.norms is None or self.capacity is None or self.gap is None:
            return [(one.layer, *term) for one in self.layers for term in self._of_layer(one)]
        n, c, g = self.norms, self.capacity, self.gap
        S1, S2 = log_sums(n.log_rho, self.length)
        rows: list[tuple[str, float, str]] = [
            ("s_A", n.abscissa, "spectral abscissa, the largest entry of A"),
            ("p", n.p, "bias of the step"),
            ("N", n.state, "states per channel"),
            ("d", n.channels, "channels"),
            *((name, getattr(n, name), meaning) for name, meaning in _NORMS.items()),
            ("Δ_min", n.delta_min, "softplus(p − B_q B_u): no step is smaller"),
            ("M_Δ", n.M_delta, "softplus(p + B_q B_u): no step is larger"),
            ("ln ρ", n.log_rho, "the most that a state grows in a step: s_A Δ_min, for s_A > 0 s_A M_Δ"),
            ("ln ρ printed", n.log_rho_printed, "Eq. 15: s_A Δ_min at either sign"),
            ("ln S₁", S1, "Σ ρᵗ, t < T"),
            ("ln S₂", S2, "Σ t ρᵗ, t < T"),
            ("ln C", c.log, "the capacity with all constants"),
            *((f"share of {name}", share, f"of the cover of {name} in C^(2/3)") for name, share in c.shares.items()),
            ("ln C printed", c.log_printed, "the capacity by Eq. 14, up to constants"),
            ("bound", g.bound, "on the difference of losses (Eq. 13); c_l where it is vacuous"),
            ("vacuous", float(g.vacuous), "1 where 3 l C / √m > c_l"),
            ("ln m needed", g.log_examples, "the smallest m at which the bound is not vacuous"),
            ("ln C linear", self.log_linear, "linear attention with these W_B, W_C, w (Proposition 3.4)"),
            ("p linear", LINEAR_P, "the p that Proposition 3.4 asks for, ln(e − 1)"),
            ("ln lower", self.log_lower, "lower bound on the Rademacher complexity (Eqs. 19, 20), for s_A ≥ 0"),
        ]
        return [(None, symbol, float(value), meaning) for symbol, value, meaning in rows]

    def _of_layer(self, one: LayerTerms) -> list[tuple[str, float, str]]:
        S1, S2 = one.sums(self.length)
        name = "" if one.parts == 1 else f" of recurrence {one.part}"
        rows: list[tuple[str, float, str]] = [
            ("s_A", one.abscissa, "spectral abscissa, the largest entry of A"),
            ("d", one.channels, "channels"),
            ("N", one.state, "states per channel"),
            ("B_A", one.B_A, "the largest |A|"),
            ("‖x‖", one.B_x, "the largest norm of what a step reads, for B_u"),
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
        return [(symbol, float(value), meaning + name) for symbol, value, meaning in rows]

    def to_frame(self) -> DataFrame:
        """A row per term: columns layer (missing where the whole model is meant), symbol, value and meaning.

        Symbols that begin with ln are natural logarithms. Of a model outside of the theorem they are those of its
        layers, the largest on the inputs.
        """
        import pandas as pd

        frame = pd.DataFrame(self.terms(), columns=["layer", "symbol", "value", "meaning"])
        return frame.astype({"layer": "Int64"})

    def curve(self) -> DataFrame:
        """ln C against T, columns length, curve (one of `CURVES`) and log_capacity; of a model outside of the theorem
        length, layer, part and log_output, ln of the largest output."""
        import pandas as pd

        if self.applies:
            rows = [(int(T), name, y) for name, row in zip(CURVES, self.curves) for T, y in zip(self.lengths, row)]
            return pd.DataFrame(rows, columns=["length", "curve", "log_capacity"])
        found = [
            (int(T), one.layer, one.part, y)
            for one, row in zip(self.layers, self.curves)
            for T, y in zip(self.lengths, row)
        ]
        return pd.DataFrame(found, columns=["length", "layer", "part", "log_output"])

    def figure(self) -> Figure:
        """ln C against T beside the largest C at which the bound says anything; of another model, the largest output of
        every layer."""
        from ssmscope.probes.bound_figure import draw

        return draw(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from ssmscope.probes.bound_terminal import view

        return view(self)

    def _repr_html_(self) -> str:
        from ssmscope.probes.bound_terminal import in_words

        return "".join(f"<p>{html.escape(said)}</p>" for said in in_words(self)) + super()._repr_html_()


_NORMS = {
    "B_u": "the largest norm of an embedding",
    "B_B": "spectral norm of W_B",
    "B_C": "spectral norm of W_C",
    "B_w": "norm of w",
    "B_q": "norm of q",
    "B_A": "the largest |A|",
    "M_B": "sum of |W_B|",
    "M_C": "sum of |W_C|",
    "M_w": "sum of |w|",
    "M_q": "sum of |q|",
    "M_A": "sum of |A|",
}


def curves_of(norms: Norms, lengths: np.ndarray) -> np.ndarray:
    """(3, lengths) ln C by `CURVES`."""
    found = [(capacity(norms, int(T)), log_linear_capacity(norms, int(T))) for T in lengths]
    return np.array([[c.log for c, _ in found], [c.log_printed for c, _ in found], [linear for _, linear in found]])


def grid_of(lengths: Sequence[int] | None, length: int) -> np.ndarray:
    """The lengths of the curves, ascending; by default from 2 to 10,000, or to 10 `length`.

    Raises:
        InputError: no length, or something else among them.
    """
    if lengths is None:
        top = max(10_000, 10 * length)
        return np.unique(np.round(np.geomspace(2, top, POINTS)).astype(np.int64))
    if isinstance(lengths, str | int) or not len(lengths):
        raise InputError(f"lengths is {lengths!r}; allowed is a list of whole numbers from 1 on")
    for T in lengths:
        check_whole("a length", T)
    return np.array(sorted(set(map(int, lengths))), dtype=np.int64)


def check_setting(delta: float, loss_bound: float, lipschitz: float) -> None:
    """Raises InputError unless δ is a probability and the loss's numbers are above 0."""
    if not 0 < delta < 1:
        raise InputError(f"delta is {delta!r}; allowed is a probability between 0 and 1")
    for name, number in (("loss_bound", loss_bound), ("lipschitz", lipschitz)):
        if not 0 < number < math.inf:
            raise InputError(f"{name} is {number!r}; allowed is a number above 0")


def check_whole(name: str, value: Any, *, least: int = 1) -> None:
    """Raises InputError unless `value` is a whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InputError(f"{name} is {value!r}; allowed is a whole number from {least} on")
