"""Mean of a relaxed Bernoulli ("concrete") gate, σ((ℓ + z) / τ) with logistic noise z (Maddison et al. 2017).

It is not the keep probability σ(ℓ): at σ(ℓ) = .99 and τ = 1 it is .963, and over a thousand steps the difference
compounds. At τ = 1 it has the closed form p (p − 1 − ln p) / (p − 1)², p = e^ℓ; in general it is one integral over z,
which is tabulated once for each τ.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

TABLE_STEP = 0.1
"""Distance of the table's ℓ; the cubic between them is right to 1e-7."""
MAX_LOGIT = 100.0
"""Largest ℓ in the table, beyond that of any float32 keep probability."""


def mean_log_gate(logit: Tensor, tau: float) -> Tensor:
    """Return log E[σ((ℓ + z) / τ)] of every ℓ in `logit`, without cancellation at either end; differentiable.

    The noise is symmetric, so 1 − E at ℓ is E at −ℓ: one table of log E for ℓ ≤ 0 does for both.
    """
    size = logit.abs().clamp(max=MAX_LOGIT)
    log_small = _interpolated(size, tau)
    return torch.where(logit > 0, torch.log1p(-log_small.exp()), log_small)


def _interpolated(size: Tensor, tau: float) -> Tensor:
    """Interpolate the table's log E at ℓ = −`size` by cubic Hermite pieces."""
    values, slopes = (t.to(size) for t in _table(float(tau)))
    place = size / TABLE_STEP
    at = place.detach().floor().clamp(max=len(values) - 2)
    u, at = place - at, at.long()
    v0, v1, s0, s1 = values[at], values[at + 1], slopes[at] * TABLE_STEP, slopes[at + 1] * TABLE_STEP
    rise = v1 - v0
    return v0 + u * (s0 + u * (3 * rise - 2 * s0 - s1 + u * (s0 + s1 - 2 * rise)))


@functools.cache
def _table(tau: float) -> tuple[Tensor, Tensor]:
    """Return log E at ℓ = 0, −TABLE_STEP, …, −MAX_LOGIT and its derivative by −ℓ, float64.

    E = ∫ σ((ℓ + z) / τ) f(z) dz, f the logistic density, by the trapezium rule, which converges exponentially for
    analytic functions: their poles are π and πτ from the real line. The integral further than `reach` below 0 and above
    −ℓ is less than e^−60 of it.
    """
    spacing, reach = min(1.0, tau) / 4, 60 * max(1.0, tau)
    z = torch.arange(-reach, MAX_LOGIT + 1 + reach, spacing, dtype=torch.float64)
    log_density = logsigmoid(z) + logsigmoid(-z) + torch.tensor(spacing, dtype=torch.float64).log()
    values, slopes = [], []
    for size in torch.arange(0.0, MAX_LOGIT + 1.5 * TABLE_STEP, TABLE_STEP, dtype=torch.float64):
        near = slice(int((size + 2 * reach) / spacing))
        score = (z[near] - size) / tau
        opened = logsigmoid(score)
        terms = opened + log_density[near]
        value = torch.logsumexp(terms, 0)
        steep = torch.logsumexp(terms + opened - score, 0)
        values.append(value)
        slopes.append(-(steep - value).exp() / tau)
    return torch.stack(values), torch.stack(slopes)
