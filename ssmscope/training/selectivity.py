"""Selectivity of a model: variation of Δ over tokens, half-lives of heads, and a Baleen's divergence."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ssmscope.architectures.own.baleen import MIXERS, bernoulli_kl, exponential_kl, prior_of
from ssmscope.core.mixers import mixers
from ssmscope.core.trace import LayerTrace
from ssmscope.ops import Recurrence

FLAT = 0.1
"""Coefficient of variation of Δ below which a head's selection is noise."""


class _Sums:
    """Sums over tokens of one layer: Δ, Δ² and log a by head, and the divergence."""

    def __init__(self) -> None:
        self.tokens = 0
        self.of: dict[str, Any] = {"delta": 0.0, "squared": 0.0, "log_a": 0.0, "kl": 0.0}

    def add(self, mixer: Any, layer: LayerTrace) -> None:
        recurrence = layer.recurrence
        if recurrence.delta is None:
            return
        delta = recurrence.delta.double()
        log_a = recurrence.log_decay().double().mean(-1)
        values = {"delta": delta, "squared": delta.square(), "log_a": log_a}
        if isinstance(mixer, MIXERS):
            values["kl"] = _divergence(mixer, recurrence)
        real = torch.ones_like(delta[..., 0], dtype=torch.bool) if layer.mask is None else layer.mask.bool()
        self.tokens += int(real.sum())
        for name, value in values.items():
            # Padding has Δ = 0, where the divergence is infinite.
            self.of[name] = self.of[name] + value.where(real.unsqueeze(-1), 0.0).sum((0, 1))


def _divergence(mixer: Any, recurrence: Recurrence) -> Tensor:
    """Compute the KL of every token and head, (batch, length, heads)."""
    assert recurrence.delta is not None
    prior = prior_of(mixer)
    if mixer.baleen.gate == "exponential":
        return exponential_kl(recurrence.delta.double(), torch.as_tensor(prior).to(recurrence.delta), mixer.baleen.kl)
    A = -mixer.A_log.double().exp()
    A = A if A.ndim == 2 else A.unsqueeze(-1)
    return bernoulli_kl(recurrence.delta.double().unsqueeze(-1) * A, prior).mean(-1)


class Selectivity:
    """Observer of a model in evaluation, for every layer with a time step Δ and over all tokens.

    `records` returns by head (by channel for Mamba): `variation`, standard deviation / mean of Δ over tokens;
    `half_life`, ln 2 / mean of −log a, in tokens; `selective`, the share of heads that vary by `FLAT` or more; for a
    Baleen `kl`, the divergence from its prior, a mean over tokens and heads in nats. Gates are those of evaluation.

        watched = Selectivity(module)
        with torch.no_grad(), fast_scan(module, visit=watched.visit):
            module(**inputs)
        watched.records()
    """

    def __init__(self, module: Any) -> None:
        self.mixers = mixers(module)
        self.sums: dict[int, _Sums] = {}

    def visit(self, index: int, layer: LayerTrace, _: Any) -> None:
        if len(layer.recurrences) == 1:
            self.sums.setdefault(index, _Sums()).add(self.mixers[index], layer)

    def records(self) -> list[dict[str, Any]]:
        return [_record(index, self.mixers[index], one) for index, one in sorted(self.sums.items()) if one.tokens]


def _record(index: int, mixer: Any, sums: _Sums) -> dict[str, Any]:
    mean, squared, log_a = (sums.of[name] / sums.tokens for name in ("delta", "squared", "log_a"))
    variation = (squared - mean.square()).clamp(min=0).sqrt() / mean
    record = {
        "layer": index,
        "variation": [round(v, 4) for v in variation.tolist()],
        "half_life": [round(v, 2) for v in (math.log(2) / (-log_a).clamp(min=1e-12)).tolist()],
        "selective": float((variation >= FLAT).double().mean()),
    }
    if isinstance(mixer, MIXERS):
        record["kl"] = float((sums.of["kl"] / sums.tokens).mean())
    return record
