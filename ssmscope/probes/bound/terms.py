"""Norms of a selective SSM's weights and the terms of its generalisation bound, in logarithms, so that no length
overflows.

Generalization Error Analysis for Selective State-Space Models (Honarpisheh et al.), Theorem 3.3 and its proof. Where a
check refutes the printed formula, the docstring says so: the growth rate ρ for s_A > 0, the sign in S₂ (Eq. 15), and
the first constant of the bound (Eq. 13).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ssmscope.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor
    from ssmscope.core.model import Model


LINEAR_P = math.log(math.e - 1)
"""The p with softplus(p) = 1, which Proposition 3.4 requires; it prints p = e, which gives a step of 2.78."""
CURVES = ("with constants", "Eq. 14", "linear attention")
"""The readings of the capacity: with all constants, as printed, and of Proposition 3.4."""
SERIES_BELOW = 0.1
"""|T ln ρ| below which the mean index of the sums is a series around ρ = 1; the closed form would lose two digits."""


def softplus(x: float) -> float:
    """Return ln(1 + eˣ)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def log(x: float) -> float:
    """Return ln x for x ≥ 0, −inf at 0."""
    return math.log(x) if x > 0 else -math.inf


def log_sum(terms: Iterable[float]) -> float:
    """Return ln Σ exp(terms)."""
    terms = tuple(terms)
    top = max(terms)
    return top if math.isinf(top) else top + math.log(sum(math.exp(term - top) for term in terms))


def log_sums(log_rho: float, length: int) -> tuple[float, float]:
    """Return ln S₁ and ln S₂, S₁ = Σ_{t<T} ρᵗ and S₂ = Σ_{t<T} t ρᵗ, T = `length` (Lemma E.6), precisely at any ρ. S₂ =
    S₁ times the mean index under the weights ρᵗ, whose closed form has no cancellation away from ρ = 1. (Eq. 15 prints
    S₂ with another sign: at ρ = .5, T = 3 it must be 1.) ln S₂ is −inf at T = 1, where S₂ = 0."""
    r, T = abs(log_rho), length
    if r == 0:
        return math.log(T), log(T * (T - 1) / 2)
    # These are the sums for ρ < 1; reversed, Σ_t ρᵗ = ρ^{T−1} Σ_t ρ^{−t}, they give those for ρ > 1.
    falling = math.log(-math.expm1(-T * r)) - math.log(-math.expm1(-r))
    log_s1 = falling if log_rho < 0 else falling + (T - 1) * r
    if T * r < SERIES_BELOW:
        mean = (T - 1 + math.copysign(T * _langevin(T * r / 2) - _langevin(r / 2), log_rho)) / 2
        return log_s1, log_s1 + log(mean)
    scaled = 1 / -math.expm1(-r) - T * math.exp(-(T - 1) * r) / -math.expm1(-T * r)  # This is the mean index times e^r.
    if log_rho < 0:
        return log_s1, log_s1 - r + log(scaled)
    return log_s1, log_s1 + log(T - 1 - math.exp(-r) * scaled)


def _langevin(y: float) -> float:
    """Return coth y − 1/y for 0 ≤ y ≤ 0.05, within 1e-16."""
    return y / 3 - y**3 / 45 + 2 * y**5 / 945 - y**7 / 4725


@dataclass(frozen=True)
class Norms:
    """Sizes, p and norms of a selective SSM that the bound depends on (Assumptions 3.1, 3.2 and 3.4). `B_u` is the
    largest norm of an embedding; `B_B`, `B_C` are spectral norms, `B_w`, `B_q` Euclidean ones, `B_A` the largest |A|;
    each M is the sum of absolute values."""

    channels: int
    state: int
    abscissa: float
    """s_A."""
    p: float
    B_u: float
    B_B: float
    B_C: float
    B_w: float
    B_q: float
    B_A: float
    M_B: float
    M_C: float
    M_w: float
    M_q: float
    M_A: float

    @property
    def delta_min(self) -> float:
        """Smallest possible step, softplus(p − B_q B_u)."""
        return softplus(self.p - self.B_q * self.B_u)

    @property
    def M_delta(self) -> float:
        """Largest possible step, softplus(p + B_q B_u) (Eq. 15)."""
        return softplus(self.p + self.B_q * self.B_u)

    @property
    def log_rho(self) -> float:
        """Largest growth of a state in a step, ln ρ: s_A δ_min for s_A ≤ 0, else s_A M_Δ. Eq. 15 has δ_min at either
        sign, which is not an upper bound for s_A > 0: see `log_rho_printed`."""
        return self.abscissa * (self.delta_min if self.abscissa <= 0 else self.M_delta)

    @property
    def log_rho_printed(self) -> float:
        """Printed value of ln ρ (Eq. 15), s_A ln(1 + e^{p − B_q B_u}), with η = 0."""
        return self.abscissa * self.delta_min


@dataclass(frozen=True)
class Capacity:
    """Capacity as ln C at a length: `log` with all constants, `log_printed` by Eq. 14, which hides them in its Õ."""

    log: float
    log_printed: float
    shares: Mapping[str, float]
    """Share of each parameter's cover (W_B, W_C, w, A, q) in γ = Σ α^{1/3} β^{2/3}, C = γ^{3/2}."""


def capacity(norms: Norms, length: int) -> Capacity:
    """Compute C = (Σ α^{1/3} β^{2/3})^{3/2} over the covers of W_B, W_C, w, A, q (Eqs. 72–79, Lemma C.9), and Eq. 14. α
    is the cost of a cover and β the sensitivity of the output to it (Lemma E.7). That of p is left out, as in the
    proof."""
    n, N, d = norms, norms.state, norms.channels
    S1, S2 = log_sums(n.log_rho, length)
    u, B, C, w, A, q = map(log, (n.B_u, n.B_B, n.B_C, n.B_w, n.B_A, n.B_q))
    M_B, M_C, M_w, M_A, M_q = map(log, (n.M_B, n.M_C, n.M_w, n.M_A, n.M_q))
    delta = log(n.M_delta)
    through = w + B + C + 3 * u
    parts = {
        "W_B": (2 * (u + M_B) + log(math.log(2 * N * d + 1)), w + C + 2 * u + delta + S1),
        "W_C": (2 * (delta + B + 2 * u + S1 + M_C) + log(math.log(2 * N * d**2 + 1)), w + u),
        "w": (2 * (delta + B + C + 3 * u + S1 + M_w) + log(math.log(2 * d + 1)), 0.0),
        "A": (math.log(2 * N * d) + 2 * M_A + log(math.log(math.sqrt(2) * N * d)), 2 * delta + through + S2),
        "q": (2 * (u + M_q) + log(math.log(2 * d + 1)), through + log_sum((S1, delta + A + S2))),
    }
    terms = {name: (alpha + 2 * beta) / 3 for name, (alpha, beta) in parts.items()}
    total = log_sum(terms.values())
    steps = log_sum(((2 * delta + math.log(N * d)) / 3, 2 * (q + u) / 3))
    return Capacity(
        log=1.5 * total,
        log_printed=delta + through + A + S2 + 1.5 * steps,
        shares={name: math.exp(term - total) if term > -math.inf else 0.0 for name, term in terms.items()},
    )


def log_linear_capacity(norms: Norms, length: int) -> float:
    """Return ln(T B_w B_B B_C B_u³), the capacity of linear attention with these weights (Proposition 3.4)."""
    n = norms
    return math.log(length) + log(n.B_w) + log(n.B_B) + log(n.B_C) + 3 * log(n.B_u)


@dataclass(frozen=True)
class Gap:
    """The bound on the difference between expected and training loss."""

    bound: float
    """The right side of Eq. 13; if vacuous c_l, the largest possible difference of two losses."""
    vacuous: bool
    """True if 3 l C / √m > c_l: the bound then does not hold, and the right side may even be negative."""
    log_examples: float
    """ln of the smallest m at which it is not vacuous."""


def gap(log_capacity: float, *, examples: int, delta: float, loss_bound: float, lipschitz: float) -> Gap:
    """Evaluate Eq. 13 with m = `examples`, c_l = `loss_bound`, l = `lipschitz`, at probability 1 − `delta`:

    24 l C / √m · (1 + ln(c_l √m / (3 l C))) + 3 c_l √(ln(2/δ) / 2m).

    The paper prints 12, having dropped the 2 before the Rademacher complexity in Eq. 48, and has no l in the logarithm,
    although the minimum of Eq. 45 at α = 3 l C / √m has one.
    """
    needed = math.log(3 * lipschitz / loss_bound) + log_capacity
    x = needed - math.log(examples) / 2  # This is ln(3 l C / (c_l √m)).
    if x > 0:
        return Gap(loss_bound, True, 2 * needed)
    dudley = 8 * loss_bound * math.exp(x) * (1 - x) if x > -math.inf else 0.0
    return Gap(dudley + 3 * loss_bound * math.sqrt(math.log(2 / delta) / (2 * examples)), False, 2 * needed)


def log_lower_bound(abscissa: float, B_w: float, *, length: int, examples: int) -> float:
    """Return ln of the lower bound on the Rademacher complexity, as printed: B_w ((1 + s_A)ᵀ − 1) / s_A · √(2 / πm) for
    s_A > 0 (Eq. 19), B_w T √(2 / πm) for s_A = 0 (Eq. 20); NaN for s_A < 0, where the theorem says nothing. It holds
    for inputs in [−1, 1] and a class of scalar models (d = N = 1)."""
    if abscissa < 0:
        return math.nan
    if abscissa == 0:
        grown = math.log(length)
    else:
        steps = length * math.log1p(abscissa)
        grown = steps + math.log(-math.expm1(-steps)) - math.log(abscissa)
    return log(B_w) + grown + math.log(2 / (math.pi * examples)) / 2


@dataclass(frozen=True)
class LayerTerms:
    """Largest terms of the bound on the inputs, in one recurrence of a layer outside the theorem, as
    `GeneralizationBound.terms` describes them; without a continuous A, s_A and |A| are NaN, without a Δ its half range
    is, and Δ is 1."""

    layer: int
    part: int
    parts: int
    channels: int
    """Heads × their width."""
    state: int
    abscissa: float
    B_A: float
    B_x: float
    B_b: float
    """The largest ‖b_t‖₂ of a group, as is that of c."""
    B_c: float
    delta_min: float
    """The smallest Δ (a delta rule's β)."""
    M_delta: float
    half_range: float
    """The largest of all heads."""
    log_rho: float

    def sums(self, length: int) -> tuple[float, float]:
        return log_sums(self.log_rho, length)

    def log_state(self, length: int) -> float:
        """Return ln(M_Δ ‖b‖ ‖x‖ S₁), which bounds a state that starts at 0 on inputs of these norms (Lemma E.4)."""
        return log(self.M_delta) + log(self.B_b) + log(self.B_x) + self.sums(length)[0]

    def log_output(self, length: int) -> float:
        """Return ln(‖c‖ M_Δ ‖b‖ ‖x‖ S₁), which bounds the recurrence's output."""
        return log(self.B_c) + self.log_state(length)

    def log_capacity(self, length: int) -> float:
        """Return ln of the right side of Eq. 14 with these terms and a readout of norm 1; NaN without an A."""
        if math.isnan(self.B_A) or math.isnan(self.half_range):
            return math.nan
        delta = log(self.M_delta)
        through = log(self.B_x) + log(self.B_b) + log(self.B_c)
        steps = log_sum(((2 * delta + math.log(self.state * self.channels)) / 3, 2 * log(self.half_range) / 3))
        return delta + through + log(self.B_A) + self.sums(length)[1] + 1.5 * steps

    @property
    def name(self) -> str:
        """Layer number, "3", or "3.1" for the second of several recurrences."""
        return str(self.layer) if self.parts == 1 else f"{self.layer}.{self.part}"


class TheoremModel(NamedTuple):
    """One selective SSM between embeddings (tokens, channels) and a head (rows, channels), which the theorem covers."""

    parameters: Mapping[str, Tensor]
    """A (channels, states), W_B, W_C (states, channels), q (channels,) and p (one number)."""
    embeddings: Tensor
    head: Tensor
    bias: bool
    """True if the head has a bias, unlike the theorem's output wᵀy[T]."""


def theorem_model(model: Model) -> TheoremModel | None:
    """Return the parts of a model that the theorem covers; None for several layers, another layer or pixel inputs."""
    from ssmscope.core.affine import embedding_table, matrix, offset
    from ssmscope.core.heads import linear_head
    from ssmscope.core.mixers import adapter_for

    mixers, head = model.mixers, linear_head(model.module)
    parameters = getattr(adapter_for(mixers[0]), "theorem_parameters", None) if len(mixers) == 1 else None
    if parameters is None or model.channels is not None or head is None:
        return None
    constant = offset(head, "the head")
    bias = constant is not None and bool(constant.any())
    return TheoremModel(parameters(mixers[0]), embedding_table(model.module), matrix(head, "the head"), bias)


def norms_of(parts: TheoremModel, row: int) -> Norms:
    """Compute the norms (Assumptions 3.1, 3.2 and 3.4) with w = row `row` of the head, in float64."""
    from torch.linalg import matrix_norm

    given = {**parts.parameters, "the head": parts.head[row], "the embedding": parts.embeddings}
    A, W_B, W_C, q, p, w, table = (tensor.detach().cpu().double() for tensor in given.values())
    broken = next((name for name, tensor in given.items() if not bool(tensor.isfinite().all())), None)
    if broken is not None:
        raise InputError(f"{broken} of the selective SSM has numbers that are not finite; the model is damaged")
    return Norms(
        channels=A.shape[0],
        state=A.shape[1],
        abscissa=A.max().item(),
        p=p.item(),
        B_u=table.norm(dim=1).max().item(),
        B_B=matrix_norm(W_B, 2).item(),
        B_C=matrix_norm(W_C, 2).item(),
        B_w=w.norm().item(),
        B_q=q.norm().item(),
        B_A=A.abs().max().item(),
        **{f"M_{name}": t.abs().sum().item() for name, t in zip("BCwqA", (W_B, W_C, w, q, A))},
    )


def worst_row(parts: TheoremModel, length: int) -> int:
    """Return the row of the head with the largest capacity at `length`; the theorem is for scalar outputs."""
    W, norms = parts.head.detach().cpu().double(), norms_of(parts, 0)
    sizes = zip(W.norm(dim=1).tolist(), W.abs().sum(1).tolist())
    logs = [capacity(replace(norms, B_w=norm, M_w=total), length).log for norm, total in sizes]
    return logs.index(max(logs))
