"""Gains of single steps, and norms of the states, of a model's layers on a batch.

Each layer is measured within the forward pass that computes it; only sums, maxima and norms of its states and decays
are kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ssmscope import ops
from ssmscope.architectures.read.delta import DeltaMixer
from ssmscope.architectures.read.linear_layers import GatedLinearAttention, Retention
from ssmscope.core.batching import by_length
from ssmscope.errors import InputError, Unanswerable
from ssmscope.probes.bound.norms import norms_of, theorem_model

if TYPE_CHECKING:
    from ssmscope.core.encoding import Batch
    from ssmscope.core.model import Model
    from ssmscope.core.trace import LayerTrace
    from ssmscope.probes.bound.terms import Norms

MAX_DECAYS = 2**22
"""Maximum number of decays in memory."""
MIN_LOG_GAIN = -80.0
"""Log-gain of a direction that a delta rule erases; the scans floor decays at the same value."""
GATED: tuple[type[nn.Module], ...] = (GatedLinearAttention, Retention, DeltaMixer)
"""Mixers without Δ and A whose transitions are at most 1 by construction; RWKV's are recognised by their extras."""


class StepGains(NamedTuple):
    """Log-gains of a recurrence's steps on a batch: `sums` (heads, states) over the counted steps, the `largest` of any
    step (heads,), and each text's `growth` (rows,), the mean log-gain of the fastest-growing state."""

    sums: Tensor
    largest: Tensor
    growth: Tensor


@dataclass
class Recorded:
    """Measurements of one recurrence of a layer, summed over batches; float64."""

    abscissa: Tensor | None = None
    possible: Tensor | None = None
    bounded_by: str = ""
    state: int = 0
    sums: Tensor | None = None
    largest: Tensor | None = None
    steps: int = 0
    growth: list[float] = field(default_factory=list)
    mixes: bool = False
    """True if its transition is a matrix, a delta rule's."""
    bare: Tensor | None = None
    """Decays of an RWKV's numerator and denominator on their own, (channels,)."""

    def add(self, gains: StepGains, counted: Tensor) -> None:
        self.sums = gains.sums if self.sums is None else self.sums + gains.sums
        self.largest = gains.largest if self.largest is None else torch.maximum(self.largest, gains.largest)
        self.steps += int(counted.sum())
        self.growth += gains.growth.tolist()


class Run(NamedTuple):
    """Recurrences of every layer, and the states' norms (layers, texts, positions), NaN after a text's end."""

    layers: list[list[Recorded]]
    norms: Tensor


def record_layers(model: Model, batch: Batch, positions: Sequence[int]) -> Run:
    """Run the model and record its layers; `positions` are 0-based and ascending.

    Raises:
        InputError: a log-decay that is no number.
    """
    layers: list[list[Recorded]] = [[] for _ in range(model.num_layers)]
    norms = torch.full((model.num_layers, len(batch.tokens), len(positions)), math.nan, dtype=torch.float64)
    mixers, parts = model.mixers, theorem_model(model)
    known = None if parts is None else norms_of(parts, 0)
    for rows in by_length(batch.lengths):
        part = batch.rows(rows)

        def visit(index: int, layer: LayerTrace, scans: tuple[ops.Scan, ...]) -> None:
            mixer = mixers[index]
            norms[index, rows] = state_norms(layer, positions).cpu()  # noqa: B023
            for place, recurrence in enumerate(layer.recurrences):
                if len(layers[index]) == place:
                    layers[index].append(recorded_limits(mixer, layer, recurrence, known))
                counted, stepping = step_masks(layer, place)
                layers[index][place].add(step_gains(recurrence, counted, stepping), counted)

        with torch.no_grad(), model.running(mask=part.mask, visit=visit):
            model.forward(part, last_only=True, checked=False)
    for index, recorded in enumerate(layers):
        for one in recorded:
            assert one.sums is not None and one.largest is not None
            if bool(one.sums.isnan().any() | one.largest.isnan().any()):
                raise InputError(f"the decays of layer {index} are not finite; the model is damaged")
    return Run(layers, norms)


def step_masks(layer: LayerTrace, place: int) -> tuple[Tensor, Tensor]:
    """Return two masks (batch, length): the steps of a layer's recurrence that count, and those that are its own.

    All real positions count. If recurrences take turns, positions at which one holds its state are not its own steps.
    The first token of an RWKV fills an empty memory with a fixed gate of 0, which does not count.
    """
    shape, device = layer.u.shape[:2], layer.u.device
    counted = torch.ones(shape, dtype=torch.bool, device=device) if layer.mask is None else layer.mask.clone()
    if "log_weight" in layer.extras and layer.initial is None:
        counted[:, 0] = False
    return counted, counted if layer.turn is None else counted & (layer.turn == place)


def step_gains(recurrence: ops.Recurrence, counted: Tensor, stepping: Tensor) -> StepGains:
    """Compute the log-gains of a recurrence's steps, with means over the steps `counted` and maxima over `stepping`.

    A diagonal transition's gains are its decays, log a_t. The delta rule's transition a (I − β b bᵀ) is symmetric, with
    eigenvalues a (state − 1 of them) and a (1 − β ‖b‖²): its largest singular value is the largest of these in size,
    and one mean stands for all of a head's directions, log a + log|1 − β ‖b‖²| / state. That is their mean Lyapunov
    exponent exactly, as determinants multiply.

    Raises:
        InputError: for a delta rule with a decay per state, or that removes other keys than it writes, whose transition
            is not symmetric.
    """
    steps = counted.sum(1).double().unsqueeze(-1)
    if isinstance(recurrence, ops.DeltaRecurrence):
        assert recurrence.log_a is not None and recurrence.beta is not None
        if recurrence.log_a.shape[-1] > 1 or recurrence.e is not None:
            raise Unanswerable("the largest gain of a step is not known for a delta rule with a decay per state")
        b, _ = recurrence.by_head()
        log_a, state = recurrence.log_a.squeeze(-1).double(), b.shape[-1]
        along = (1 - recurrence.beta.double() * b.double().square().sum(-1)).abs().log().clamp(min=MIN_LOG_GAIN)
        mean = (log_a + along / state).masked_fill(~counted.unsqueeze(-1), 0).sum(1)
        top = log_a + (along.clamp(min=0) if state > 1 else along)
        largest = top.masked_fill(~stepping.unsqueeze(-1), -torch.inf).amax((0, 1))
        return StepGains(mean.sum(0).unsqueeze(-1), largest, (mean / steps).amax(-1))
    if recurrence.A is not None and not recurrence.expected:  # With log a = Δ A, sums and maxima of Δ suffice.
        assert recurrence.delta is not None
        A, delta, own = recurrence.A.double(), recurrence.delta.double(), stepping.unsqueeze(-1)
        mean, top = delta.masked_fill(~counted.unsqueeze(-1), 0).sum(1), A.amax(-1)
        longest = delta.masked_fill(~own, -torch.inf).amax((0, 1))
        shortest = delta.masked_fill(~own, torch.inf).amin((0, 1))
        largest = torch.where(top > 0, top * longest, top * shortest)
        if not bool(stepping.any()):
            largest = torch.full_like(top, -torch.inf)
        return StepGains(mean.sum(0).unsqueeze(-1) * A, largest, (mean / steps * top).amax(-1))
    batch, length, heads, _, state = recurrence.shape
    span = max(1, MAX_DECAYS // max(1, batch * heads * state))
    sums, tops = [], []
    for start in range(0, length, span):
        log_a = recurrence.log_decay(start, start + span).double()
        sums.append(log_a.masked_fill(~counted[:, start : start + span, None, None], 0).sum(1))
        tops.append(log_a.masked_fill(~stepping[:, start : start + span, None, None], -torch.inf).amax((0, 1, 3)))
    each = torch.stack(sums).sum(0)
    return StepGains(each.sum(0), torch.stack(tops).amax(0), (each / steps.unsqueeze(-1)).amax((1, 2)))


def state_norms(layer: LayerTrace, positions: Sequence[int]) -> Tensor:
    """Compute ‖H_t‖ (Frobenius) of all of a layer's states together at the positions, (batch, positions) float64: NaN
    after a text's last token, ∞ if the state overflows."""
    batch, length = layer.u.shape[:2]
    inside = [at for at in positions if at < length]
    squares = torch.zeros(batch, len(positions), dtype=torch.float64, device=layer.u.device)
    squares[:, len(inside) :] = torch.nan
    starts = layer.initial or (None,) * len(layer.recurrences)
    for recurrence, H in zip(layer.recurrences, starts):
        before = 0
        for place, at in enumerate(inside):
            H = ops.scan(recurrence.between(before, at + 1), H).state
            size = torch.linalg.vector_norm(H.flatten(1), dim=1, dtype=torch.float64)
            squares[:, place] += size.square().nan_to_num(torch.inf, posinf=torch.inf)
            before = at + 1
    if layer.mask is not None:
        real = layer.mask[:, torch.tensor(inside, device=layer.mask.device)]
        squares[:, : len(inside)].masked_fill_(~real, torch.nan)
    return squares.sqrt()


def recorded_limits(mixer: nn.Module, layer: LayerTrace, recurrence: ops.Recurrence, norms: Norms | None) -> Recorded:
    """Return what follows from a recurrence's weights alone: each head's spectral abscissa, and its largest possible
    growth in a step. `norms` are those of a model that the generalisation theorem covers.

    With s the abscissa of a head, the latter is s Δ at the lower end of Δ for s ≤ 0, and at its upper end for s > 0. Δ
    is a softplus, from 0 to ∞, unless it is clamped, or bounded by the embeddings' norm.
    """
    state = recurrence.shape[-1]
    if recurrence.A is None:
        if isinstance(mixer, Retention):
            assert recurrence.log_a is not None
            return Recorded(None, recurrence.log_a[0, 0].double().amax(-1), "decays are constant", state)
        if isinstance(mixer, GATED) or "log_weight" in layer.extras:
            none = torch.zeros(recurrence.shape[2], dtype=torch.float64, device=recurrence.x.device)
            bare = layer.extras["decay"].double() if "log_weight" in layer.extras else None
            mixes = isinstance(recurrence, ops.DeltaRecurrence)
            return Recorded(None, none, "gates are at most 1", state, mixes=mixes, bare=bare)
        return Recorded(None, None, "no bound is known", state)
    s = recurrence.A.double().amax(-1)
    if norms is not None:
        low, high, how = norms.delta_min, norms.M_delta, "ρ of the generalisation bound"
    else:
        low, high = step_limits(mixer)
        how = "steps Δ of any size" if low == 0 and high > 1e6 else f"steps Δ from {low:g} to {high:g}"
    least = s * low
    most = torch.where(s > 0, s * high, -torch.log1p(-least) if recurrence.expected else least)
    return Recorded(s, most + 0.0, how, state)


def step_limits(mixer: nn.Module) -> tuple[float, float]:
    """Return the limits to which a mixer clamps its Δ; (0, ∞) if it does not."""
    for part in (mixer, getattr(mixer, "m1", None), getattr(mixer, "sizes", None)):
        limits = getattr(part, "time_step_limit", None)
        if limits is not None:
            return float(limits[0]), float(limits[1])
    return 0.0, math.inf
