"""Survival of a text's beginning after a trigger, and the detectors' suspicion.

Everything is computed from ‖R_s(t)‖, the norm left after position t of what a recurrence wrote at s
(`ssmscope.ops.survival`), summed over the heads of a layer. The text before a trigger is run once, and every trigger
continues from its states; the terms of both parts are concatenated, so the survival is that of the whole text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ssmscope import ops
from ssmscope.attacks.poisoning.triggers import Slot
from ssmscope.core.batching import tokens_at_once
from ssmscope.core.encoding import Batch
from ssmscope.core.mixers import weights_constant
from ssmscope.core.model import Model
from ssmscope.core.trace import LayerState, LayerTrace, States, gathered, mapped
from ssmscope.ops import Recurrence, survival

DETECTORS = ("token", "window", "half-life")
NO_TRIGGER: Int[np.ndarray, "1 0"] = np.empty((1, 0), dtype=np.int64)
"""Empty trigger of a clean text."""

Terms = list[tuple[Recurrence, ...]]
"""Recurrences of every layer."""


def masses(recurrences: Sequence[Recurrence], at: int) -> Float[Tensor, "batch positions"]:
    """Compute Σ_heads ‖R_s(at)‖ for the positions s ≤ at."""
    return torch.cat([survival.left_norms(r.between(0, at + 1)) for r in recurrences], dim=2).sum(2)


def suspicion(
    recurrences: Sequence[Recurrence], detector: str, window: int, since: int = 1
) -> Float[Tensor, "batch positions"]:
    """Compute a detector's statistic in one layer, smaller where more is forgotten.

    token: Σ_{s<t} ‖R_s(t)‖ / Σ_{s<t} ‖R_s(t − 1)‖, the share of the earlier memory that token t leaves.
    window: Σ_{s≤t−w} ‖R_s(t)‖ / Σ_{s≤t} ‖R_s(t)‖, the share of the memory that is older than w tokens, divided by the
        share (t − w + 1) / (t + 1) of such tokens; from t = 2w on.
    half-life: 1 − the mean over s of 1 / half-life (without the last position), a single number.

    Args:
        since: the first t of the first two statistics.
    """
    length = recurrences[0].shape[1]
    found: list[Tensor] = []
    if detector == "half-life" and length > 1:
        found = [1 - survival.half_lives(recurrences)[:, :-1].reciprocal().mean(1)]
    elif detector == "window":
        for t in range(max(since, 2 * window), length):
            left = masses(recurrences, t)
            found.append(_quotient(left[:, : t - window + 1].sum(1), left.sum(1)) * (t + 1) / (t - window + 1))
    elif detector == "token":
        since = max(since, 1)
        every = [masses(recurrences, t) for t in range(since - 1, length)]
        found = [_quotient(now[:, :-1].sum(1), then.sum(1)) for then, now in zip(every, every[1:])]
    return torch.stack(found, 1) if found else recurrences[0].x.new_zeros(recurrences[0].shape[0], 0)


def _quotient(above: Tensor, below: Tensor) -> Tensor:
    """Divide; return 1 where there was nothing to forget."""
    return torch.where(below > 0, above / torch.where(below > 0, below, 1), 1)


@dataclass(frozen=True, eq=False)
class Beginning:
    """Text before a trigger after one run: terms of its layers, final states, and each detector's minimum so far.

    `states` are empty if the model cannot continue from them.
    """

    slot: Slot
    terms: Terms
    states: States
    window: int
    least: dict[str, float]

    @classmethod
    def of(cls, model: Model, slot: Slot, detectors: Sequence[str], window: int) -> Beginning:
        terms, states = run(model, np.array([slot.before]))
        # A half-life depends on later tokens, so it is known only at the end.
        known = {
            each: math.inf if each == "half-life" else float(_lowest(terms, each, window, 1)) for each in detectors
        }
        return cls(slot, terms, states if model.continues else (), window, known)


def _lowest(terms: Terms, detector: str, window: int, since: int) -> Float[Tensor, " batch"]:
    """Compute the minimum over positions of the mean over layers; infinite if there is no position."""
    seen = torch.stack([suspicion(each, detector, window, since) for each in terms]).mean(0)
    return seen.amin(1) if seen.shape[1] else torch.full_like(seen.sum(1), math.inf)


@dataclass(frozen=True, eq=False)
class Memory:
    """Survival of the span at the end, and each detector's suspicion, of one text with several triggers.

    Survival is the mean over layers of the span's share of the states. Suspicion is 1 minus the detector's minimum, 0
    for texts that are too short for it.
    """

    survival: Float[np.ndarray, " triggers"]
    suspicion: dict[str, Float[np.ndarray, " triggers"]]


@torch.no_grad()
def memory(model: Model, beginning: Beginning, triggers: Int[np.ndarray, "triggers length"]) -> Memory:
    """Compute the memory after every trigger, given by token ids; `NO_TRIGGER` stands for the clean text."""
    slot = beginning.slot
    count, start = len(triggers), len(slot.before)
    rest = np.concatenate([triggers, np.tile(np.array(slot.after, dtype=np.int64), (count, 1))], axis=1)
    step = max(1, tokens_at_once(model.device) // (start + rest.shape[1]))
    shares: list[Tensor] = []
    seen: dict[str, list[Tensor]] = {each: [] for each in beginning.least}
    for first in range(0, count, step):
        terms = _terms(model, beginning, rest[first : first + step])
        shares.append(torch.stack([_share(each, slot.span) for each in terms]).mean(0))
        for each, known in beginning.least.items():
            least = _lowest(terms, each, beginning.window, start).clamp(max=known)
            seen[each].append(1 - least.masked_fill(least.isinf(), 1))
    return Memory(
        torch.cat(shares).double().cpu().numpy(),
        {each: torch.cat(found).double().cpu().numpy() for each, found in seen.items()},
    )


def threshold(clean: Float[np.ndarray, " texts"], alarms: float) -> float:
    """Return the smallest of the numbers that at most the share `alarms` of them exceeds."""
    return float(np.quantile(clean, 1 - alarms, method="inverted_cdf"))


def _share(recurrences: Sequence[Recurrence], span: np.ndarray) -> Float[Tensor, " batch"]:
    left = masses(recurrences, recurrences[0].shape[1] - 1)
    return left[:, np.flatnonzero(span)].sum(1) / left.sum(1).clamp(min=torch.finfo(left.dtype).tiny)


def _terms(model: Model, beginning: Beginning, rest: np.ndarray) -> Terms:
    """Return the terms of the whole texts."""
    before = np.array(beginning.slot.before)
    if not rest.shape[1]:
        return beginning.terms
    if not beginning.states:
        return run(model, np.concatenate([np.tile(before, (len(rest), 1)), rest], axis=1))[0]
    states = gathered(beginning.states, torch.zeros(len(rest), dtype=torch.long, device=model.device))
    later, _ = run(model, rest, states)
    return [tuple(map(concatenated, firsts, seconds)) for firsts, seconds in zip(beginning.terms, later)]


def concatenated(first: Recurrence, second: Recurrence) -> Recurrence:
    """Concatenate the terms of one text's beginning with those of several continuations."""
    terms = {name: (getattr(first, name, None), getattr(second, name, None)) for name in ops.OVER_TIME}
    both: dict[str, Any] = {
        name: torch.cat([one.expand(len(other), *one.shape[1:]), other], dim=1)
        for name, (one, other) in terms.items()
        if one is not None and other is not None
    }
    return replace(second, **both)


@torch.no_grad()
def run(model: Model, ids: Int[np.ndarray, "rows length"], states: States | None = None) -> tuple[Terms, States]:
    """Run rows of one length and return the terms of every layer and the final states."""
    rows = torch.from_numpy(np.asarray(ids, dtype=np.int64)).to(model.device)
    batch = Batch(rows, torch.ones_like(rows, dtype=torch.bool), (), ())
    terms: dict[int, tuple[Recurrence, ...]] = {}
    after: list[LayerState] = []

    def visit(index: int, layer: LayerTrace, scans: tuple[ops.Scan, ...]) -> None:
        terms[index] = mapped(layer.recurrences, Tensor.detach)

    with model.running(mask=batch.mask, states=states, visit=visit, keep=after):
        model.forward(batch, last_only=True)
    return [terms[index] for index in sorted(terms)], tuple(after)


def steps(model: Model, beginnings: Sequence[Beginning], ids: Sequence[int]) -> Float[np.ndarray, " tokens"]:
    """Compute how much of the states each token replaces, 1 − E[a_t] (Baleen, Eq. 10), as a mean over layers and texts.

    Since the log-decay is Δ_t A, tokens are in the order of their steps Δ_t.
    """
    total = np.zeros(len(ids))
    rest = np.array(ids, dtype=np.int64)[:, None]
    for beginning in beginnings:
        width = 1 if beginning.states else len(beginning.slot.before) + 1
        step = max(1, tokens_at_once(model.device) // width)
        for first in range(0, len(rest), step):
            part = rest[first : first + step]
            if beginning.states:
                zeros = torch.zeros(len(part), dtype=torch.long, device=model.device)
                terms, _ = run(model, part, gathered(beginning.states, zeros))
            else:
                terms = _terms(model, beginning, part)
            kept = torch.stack([torch.stack([ops.retention(r)[:, -1] for r in each]).mean(0) for each in terms])
            total[first : first + step] += 1 - kept.mean(0).double().cpu().numpy()
    return total / len(beginnings)


def share_gradients(
    model: Model, slots: Sequence[Slot], triggers: Int[np.ndarray, "triggers length"]
) -> Float[Tensor, "triggers length width"]:
    """Compute the gradient of the spans' share of the final states at the triggers' embeddings, summed over texts.

    Norms are not differentiated position by position: with P the final state of a run that writes at the span alone,
    and H the final state, the share is the mean over layers of ‖P‖ / (‖P‖ + ‖H − P‖), the norms summed over heads.
    """
    width = triggers.shape[1]
    total: Tensor | None = None
    for slot in slots:
        start = len(slot.before)
        ends = (np.tile(np.array(each, dtype=np.int64), (len(triggers), 1)) for each in (slot.before, slot.after))
        rows = torch.from_numpy(np.concatenate([next(ends), triggers, next(ends)], axis=1)).to(model.device)
        mask = torch.ones_like(rows, dtype=torch.bool)
        inside = torch.zeros(rows.shape[1], dtype=torch.float32, device=model.device)
        inside[np.flatnonzero(slot.span)] = 1
        found: list[Tensor] = []

        def visit(_: int, layer: LayerTrace, scans: tuple[ops.Scan, ...]) -> None:
            alone = [replace(r, x=r.x * inside[:, None, None].to(r.x)) for r in layer.recurrences]  # noqa: B023
            parts = [ops.scan(r).state for r in alone]
            ours = torch.stack([_norm(part) for part in parts]).sum(0)
            others = torch.stack([_norm(scan.state - part) for scan, part in zip(scans, parts)]).sum(0)
            found.append(ours / (ours + others).clamp(min=1e-30))  # noqa: B023

        with torch.no_grad():
            embeddings = model.module.get_input_embeddings()(rows)
        with weights_constant(model.module), torch.enable_grad():
            inputs = embeddings.detach().requires_grad_()
            with model.running(mask=mask, visit=visit):
                model.forward_embeddings(inputs, mask)
            (gradient,) = torch.autograd.grad(torch.stack(found).mean(0).sum(), inputs)
        own = gradient[:, start : start + width]
        total = own if total is None else total + own
    assert total is not None
    return total


def _norm(state: Tensor) -> Tensor:
    return torch.linalg.vector_norm(state, dim=(2, 3)).sum(1)
