"""captum's measures of explanations (Yeh et al. 2019, On the (In)fidelity and Sensitivity of Explanations)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from captum.metrics import infidelity, sensitivity_max
from jaxtyping import Float
from torch import Tensor
from ssmscope.interp.explain.scored_text import Method, kind_of
from ssmscope.interp.fidelity.measures import INFIDELITY
from ssmscope.interp.methods.from_captum import drawing
from ssmscope.interp.objective import Objective, text_generator

SAMPLES = 10
"""Perturbations of a text."""
RADIUS = 0.02
"""Largest perturbation of a number of an embedding, as a share of the text's root mean square."""


def captum_measures(
    names: Sequence[str],
    goal: Objective,
    methods: Mapping[str, Method],
    scores: Sequence[Float[np.ndarray, "rankings n"]],
    *,
    fill: Float[Tensor, " width"],
    seed: int,
) -> list[Float[np.ndarray, "rankings measures"]]:
    """Return captum's measures of every text's scores, those of the methods first; the sensitivity of the random ones,
    which explain nothing, is NaN, and so is that of methods that do not read the embeddings."""
    found = []
    for text, rankings in enumerate(scores):
        columns = []
        for name in names:
            draws = int(text_generator(goal, text, seed).integers(2**31))
            if name == INFIDELITY:
                columns.append([infidelity_of(goal, text, own, fill, draws) for own in rankings])
                continue
            moving = {method: run for method, run in methods.items() if kind_of(run).embeddings}
            changed = {method: sensitivity_of(goal, text, run, draws) for method, run in moving.items()}
            own = [changed.get(method, np.nan) for method in methods]
            columns.append([*own, *[np.nan] * (len(rankings) - len(own))])
        found.append(np.array(columns, dtype=np.float64).T)
    return found


def infidelity_of(goal: Objective, text: int, scores: np.ndarray, fill: Float[Tensor, " width"], seed: int) -> float:
    """Compute captum's infidelity, E[(Iᵀ scores − (f(x) − f(x without the tokens of I)))²], over random halves I of the
    ordinary tokens, which `fill` replaces; scores are rescaled to the best factor (captum's `normalize`)."""
    embeddings = goal.embeddings()[text, : goal.lengths[text]]
    places = [at for at, word in enumerate(goal.batch.words[text]) if word is not None]
    f = goal.function(text)

    def of_present(present: Float[Tensor, "runs n"]) -> Float[Tensor, " runs"]:
        runs = embeddings.repeat(len(present), 1, 1)
        runs[:, places] = torch.where(present.unsqueeze(-1) > 0, runs[:, places], fill.to(runs))
        with torch.no_grad():
            return f(runs)

    def hide(present: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.bernoulli(torch.full_like(present, 0.5))
        return hidden, present - hidden

    present = embeddings.new_ones(1, len(places))
    given = torch.from_numpy(scores).to(present).unsqueeze(0)
    with drawing(seed):
        return float(infidelity(of_present, hide, present, given, n_perturb_samples=SAMPLES, normalize=True))


def sensitivity_of(goal: Objective, text: int, method: Method, seed: int) -> float:
    """Compute captum's sensitivity_max, the largest ‖scores(x′) − scores(x)‖ / ‖scores(x)‖ of x′ in a small box."""
    inputs = goal.embeddings()[text : text + 1, : goal.lengths[text]]

    def explain(given: Any) -> tuple[Tensor]:
        embeddings = given[0] if isinstance(given, tuple) else given  # captum calls it with either.
        with torch.enable_grad():
            return (method(moved(goal.rows([text] * len(embeddings)), embeddings)).scores.detach().to(inputs),)

    radius = RADIUS * float(inputs.pow(2).mean().sqrt())
    with drawing(seed):
        return float(sensitivity_max(explain, inputs, perturb_radius=radius, n_perturb_samples=SAMPLES))


@dataclass(frozen=True, eq=False)
class _Moved(Objective):
    """An objective whose texts have other embeddings."""

    instead: Tensor | None = None

    def embeddings(self) -> Tensor:
        assert self.instead is not None
        return self.instead

    def rows(self, chosen: Sequence[int]) -> Objective:
        assert self.instead is not None
        rows = super().rows(chosen)
        return replace(rows, instead=self.instead[list(chosen), : max(rows.lengths)])  # type: ignore[call-arg]


def moved(goal: Objective, embeddings: Float[Tensor, "texts length width"]) -> Objective:
    """Return the objective of the same texts with other embeddings."""
    return _Moved(**{each.name: getattr(goal, each.name) for each in fields(goal)}, instead=embeddings)
