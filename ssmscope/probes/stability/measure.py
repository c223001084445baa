"""Inputs, gains of single steps, norms of the states, and the half-lives, growth and stability that follow from them,
each layer measured within the forward pass that computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from ssmscope import ops
from ssmscope.core.batching import (
    MAX_TOKENS_PER_ROW,
    MAX_TOKENS_TOGETHER,
    by_length,
    refuse_above,
    refuse_held,
    tokens_at_once,
)
from ssmscope.core.bootstrap import Estimate, estimates, resampled_means
from ssmscope.core.encoding import Batch
from ssmscope.core.mixers import adapter_for
from ssmscope.core.model import Model
from ssmscope.core.progress import progress_bar
from ssmscope.core.take_trace import TextsLike, as_batch
from ssmscope.core.trace import LayerTrace
from ssmscope.errors import InputError, Unanswerable
from ssmscope.probes.bound.terms import Norms, norms_of, theorem_model
from ssmscope.probes.stability.result import QUANTILES, LayerStability
from ssmscope.render.numbers import counted

DEFAULT_LENGTH = 512
"""Default length of random sequences in tokens."""
MAX_DECAYS = 2**22
"""Maximum number of decays in memory."""
STEPS_PER_PRODUCT = 128
"""Steps of a product of transitions between two scalings."""
MIN_LOG_GAIN = -80.0
"""Log-gain of a direction that a delta rule erases; the scans floor decays at the same value."""


class Inputs(NamedTuple):
    """Batch with a description, such as "4 random sequences of 512 tokens (seed 0)"."""

    batch: Batch
    name: str

    @property
    def longest(self) -> int:
        return max(self.batch.lengths)


def inputs_of(model: Model, texts: TextsLike | None, *, length: int | None, sequences: int, seed: int) -> Inputs:
    """Return texts, or random sequences (of 512 tokens by default, or the size of a pixel model's images)."""
    if texts is not None:
        if length is not None:
            advice = "give texts, or length=… of random sequences"
            raise InputError(f"both texts and length {length!r} were given; {advice}")
        batch = as_batch(model, texts)
        short = next((at for at, n in enumerate(batch.lengths) if n < 2), None)
        if short is not None:
            raise InputError(f"text {short} has one token; give two or more: a state is kept from one to the next")
        low, high = min(batch.lengths), max(batch.lengths)
        span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        shown = f"{len(batch.tokens)} series" if model.reads == "series" else counted(len(batch.tokens), "text")
        return Inputs(batch, f"{shown} of {span} {'steps' if model.reads == 'series' else 'tokens'}")
    if length is None:
        size = getattr(model.config, "image_size", None) if model.channels is not None else None
        length = size[0] * size[1] + model.config.class_token if size else DEFAULT_LENGTH
    batch = random_batch(model, sequences, length, np.random.default_rng(seed))
    return Inputs(batch, f"{counted(sequences, 'random sequence')} of {length:,} tokens (seed {seed})")


def random_batch(model: Model, number: int, length: int, random: np.random.Generator) -> Batch:
    """Draw random sequences, in which every token that is not special, or pixel value in [0, 1], is equally likely."""
    refuse_above(MAX_TOKENS_PER_ROW, length=length)
    what = f"{number:,} sequences of {length:,} tokens"
    refuse_held(number * length, what, "ask for fewer or shorter ones", most=MAX_TOKENS_TOGETHER)
    if model.channels is not None:
        if length < 2:
            raise InputError(f"length is {length}; allowed is a whole number from 2 on: the last is the class token")
        pixels = (number, length - model.config.class_token, model.channels)
        return model.encode(values=random.random(pixels, dtype=np.float32))
    special = set(model.tokenizer.all_special_ids) if model.tokenizer is not None else set()
    ordinary = [token for token in range(model.vocabulary) if token not in special] or list(range(model.vocabulary))
    return model.encode(ids=random.choice(ordinary, (number, length)).tolist())


class StepGains(NamedTuple):
    """Log-gains of a recurrence's steps on a batch: `sums` (heads, states) over the counted steps, the `largest` of any
    step (heads,), and each text's `growth` (rows,), the mean log-gain of the fastest-growing state."""

    sums: Tensor
    largest: Tensor
    growth: Tensor


@dataclass
class Recorded:
    """Measurements of one recurrence of a layer, summed over batches; float64."""

    abscissa: Tensor | None
    possible: Tensor | None
    bounded_by: str
    sums: Any = 0.0
    largest: Any = -math.inf
    steps: int = 0
    growth: list[float] = field(default_factory=list)
    mixes: bool = False
    """True if its transition is a matrix, a delta rule's."""
    bare: Tensor | None = None
    """Decays of an RWKV's numerator and denominator on their own, (channels,)."""

    def add(self, gains: StepGains, counted: Tensor) -> None:
        self.sums = self.sums + gains.sums
        self.largest = gains.largest.clamp(min=self.largest)
        self.steps += int(counted.sum())
        self.growth += gains.growth.tolist()


class Run(NamedTuple):
    """Recurrences of every layer, and the states' norms (layers, texts, positions), NaN after a text's end."""

    layers: list[list[Recorded]]
    norms: Tensor


def record_layers(model: Model, batch: Batch, positions: Sequence[int]) -> Run:
    """Run the model and record its layers; `positions` are 0-based and ascending."""
    layers: list[list[Recorded]] = [[] for _ in range(model.num_layers)]
    norms = torch.full((model.num_layers, len(batch.tokens), len(positions)), math.nan, dtype=torch.float64)
    mixers, parts = model.mixers, theorem_model(model)
    known = None if parts is None else norms_of(parts, 0)

    def see(rows: list[int], index: int, layer: LayerTrace) -> None:
        norms[index, rows] = state_norms(layer, positions).cpu()
        memories = ops.by_memory(layer.recurrences, enumerate(layer.recurrences))
        for part, ((place, recurrence), *_) in enumerate(memories):
            if len(layers[index]) == part:
                layers[index].append(recorded_limits(mixers[index], layer, recurrence, known))
            counted, stepping = step_masks(layer, place)
            layers[index][part].add(step_gains(recurrence, counted, stepping), counted)

    visit_layers(model, batch, see)
    for index, recorded in enumerate(layers):
        if any(bool(one.sums.isnan().any()) for one in recorded):
            raise InputError(f"the decays of layer {index} are not finite; the model is damaged")
    return Run(layers, norms)


def visit_layers(model: Model, batch: Batch, see: Callable[[list[int], int, LayerTrace], None]) -> None:
    """Run a batch, and call `see` with the rows that run together, and the number and the trace of each layer."""
    with progress_bar() as bar, torch.no_grad():
        batches = [*by_length(batch.lengths, tokens_at_once(model.device, width=model.width))]
        for rows in bar.track(batches, description="batches of texts"):
            part = batch.rows(rows)
            with model.running(mask=part.mask, visit=lambda index, layer, scans: see(rows, index, layer)):  # noqa: B023
                model.forward(part, last_only=True, checked=False)


def step_masks(layer: LayerTrace, place: int) -> tuple[Tensor, Tensor]:
    """Return two masks (batch, length): the steps of a layer's recurrence that count, and those that are its own. All
    real positions count. If recurrences take turns, positions at which one holds its state are not its own steps. The
    first token of an RWKV fills an empty memory with a fixed gate of 0, which does not count."""
    shape, device = layer.u.shape[:2], layer.u.device
    counted = torch.ones(shape, dtype=torch.bool, device=device) if layer.mask is None else layer.mask.clone()
    if "log_weight" in layer.extras and layer.initial is None:
        counted[:, 0] = False
    return counted, counted if layer.turn is None else counted & (layer.turn == place)


def step_gains(recurrence: ops.Recurrence, counted: Tensor, stepping: Tensor) -> StepGains:
    """Compute the log-gains of a recurrence's steps, with means over the steps `counted` and maxima over `stepping`. A
    diagonal transition's gains are its decays, log a_t. The delta rule's a (I − β b bᵀ) is symmetric; its eigenvalues
    are a (state − 1 of them) and a (1 − β ‖b‖²), and its largest singular value is the largest of these in size. A head
    has one mean, that of the direction that grows fastest over a text (`product_gain`)."""
    steps = counted.sum(1).double().unsqueeze(-1)
    if isinstance(recurrence, ops.DeltaRecurrence):
        assert recurrence.log_a is not None and recurrence.beta is not None
        if recurrence.log_a.shape[-1] > 1 or recurrence.e is not None:
            said = "the largest gain of a step is not known for a delta rule with a decay per state,"
            raise Unanswerable(f"{said} or that removes otherwise than it writes")
        b, _ = recurrence.by_head()
        log_a, state = recurrence.log_a.squeeze(-1).double(), b.shape[-1]
        along = (1 - recurrence.beta.double() * b.double().square().sum(-1)).abs().log().clamp(min=MIN_LOG_GAIN)
        mean = log_a.masked_fill(~counted.unsqueeze(-1), 0).sum(1) + product_gain(recurrence, counted)
        top = log_a + (along.clamp(min=0) if state > 1 else along)
        largest = top.masked_fill(~stepping.unsqueeze(-1), -torch.inf).amax((0, 1))
        return StepGains(mean.sum(0).unsqueeze(-1), largest, (mean / steps).amax(-1))
    if recurrence.A is not None and not recurrence.expected:  # With log a = Δ A, sums and maxima of Δ suffice.
        assert recurrence.delta is not None
        A, delta, own = recurrence.A.double(), recurrence.delta.double(), stepping.unsqueeze(-1)
        mean, top = delta.masked_fill(~counted.unsqueeze(-1), 0).sum(1), A.amax(-1)
        longest = delta.masked_fill(~own, -torch.inf).amax((0, 1))
        shortest = delta.masked_fill(~own, torch.inf).amin((0, 1))
        largest = torch.maximum(top * longest, top * shortest)
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


def product_gain(recurrence: ops.DeltaRecurrence, counted: Tensor) -> Tensor:
    """Return the logarithm of the largest singular value of ∏ (I − β_t b_t b_tᵀ) over the steps `counted`, (batch,
    heads): the final state of a run without decays and inputs that starts from the unit matrix. It is scaled back to
    norm 1 every `STEPS_PER_PRODUCT` steps; a memory that is erased whole counts as `MIN_LOG_GAIN` there, and what is
    within rounding of 1 as 1."""
    batch, length, heads, _, state = recurrence.shape
    b, beta = recurrence.b.double(), recurrence.beta.double() * counted.unsqueeze(-1)
    x = b.new_zeros(batch, length, heads, state)
    products = ops.DeltaRecurrence(x, b, torch.zeros_like(b), log_a=torch.zeros_like(x[..., :1]), beta=beta)
    unit = torch.eye(state, dtype=b.dtype, device=b.device).expand(batch, heads, state, state)
    P, gain = unit, b.new_zeros(batch, heads)
    for start in range(0, length, STEPS_PER_PRODUCT):
        P = ops.scan(products.between(start, start + STEPS_PER_PRODUCT), P).state
        norm = torch.linalg.eigvalsh(P.mT @ P)[..., -1].clamp(min=0).sqrt()
        gain += norm.log().clamp(min=MIN_LOG_GAIN)
        P = torch.where((norm > 0)[..., None, None], P / norm[..., None, None], unit)
    return gain.masked_fill(gain.abs() < 1e-13 * length, 0)


def state_norms(layer: LayerTrace, positions: Sequence[int]) -> Tensor:
    """Compute ‖H_t‖ (Frobenius) of all of a layer's states together at the positions, (batch, positions) float64: NaN
    after a text's last token, ∞ if the state overflows."""
    batch, length = layer.u.shape[:2]
    inside = [at for at in positions if at < length]
    squares = torch.zeros(batch, len(positions), dtype=torch.float64, device=layer.u.device)
    squares[:, len(inside) :] = torch.nan
    initial = layer.initial or (None,) * len(layer.recurrences)
    for memory in ops.by_memory(layer.recurrences, zip(layer.recurrences, initial)):
        writes, starts = zip(*memory)
        states, before = list(starts), 0
        for place, at in enumerate(inside):
            states = [ops.scan(r.between(before, at + 1), H).state for r, H in zip(writes, states)]
            size = torch.linalg.vector_norm(torch.stack(states).sum(0).flatten(1), dim=1, dtype=torch.float64)
            squares[:, place] += size.square().nan_to_num(torch.inf, posinf=torch.inf)
            before = at + 1
    if layer.mask is not None:
        squares[:, : len(inside)].masked_fill_(~layer.mask[:, inside], torch.nan)
    return squares.sqrt()


def recorded_limits(mixer: nn.Module, layer: LayerTrace, recurrence: ops.Recurrence, norms: Norms | None) -> Recorded:
    """Return the limits that follow from a recurrence's weights alone: each head's spectral abscissa s, and its largest
    possible growth in a step: s Δ at the lower end of Δ for s ≤ 0, and at its upper end for s > 0. Δ is a softplus,
    from 0 to ∞, unless it is clamped, or bounded by the embeddings' norm, as in a model that the generalisation theorem
    covers."""
    if recurrence.A is None:
        find = getattr(adapter_for(mixer), "growth_limit", None)
        if find is None:
            return Recorded(None, None, "no bound is known")
        limit = find(mixer, layer, recurrence)
        return Recorded(None, limit.possible, limit.reason, mixes=limit.mixes, bare=limit.bare)
    s = recurrence.A.double().amax(-1)
    if norms is not None:
        low, high, how = norms.delta_min, norms.M_delta, "ρ of the generalisation bound"
    else:
        low, high = step_limits(mixer)
        how = "steps Δ of any size" if low == 0 and high > 1e6 else f"steps Δ from {low:g} to {high:g}"
    least = s * low
    most = torch.where(s > 0, s * high, -torch.log1p(-least) if recurrence.expected else least)
    return Recorded(s, most + 0.0, how)


def step_limits(mixer: nn.Module) -> tuple[float, float]:
    """Return the limits to which a mixer clamps its Δ; (0, ∞) if it does not."""
    for part in (mixer, getattr(mixer, "m1", None), getattr(mixer, "sizes", None)):
        limits = getattr(part, "time_step_limit", None)
        if limits is not None:
            return float(limits[0]), float(limits[1])
    return 0.0, math.inf


def layer_stability(
    layer: int, part: int, parts: int, found: Recorded, longest: int, tolerance: float, seed: int, overflows: bool
) -> LayerStability:
    mean = found.sums.cpu().numpy() / found.steps
    half, largest = half_lives(mean), found.largest.cpu().numpy()
    possible = None if found.possible is None else found.possible.cpu().numpy()
    growth = Estimate(*means_of(np.array(found.growth)[:, None], seed)[0].tolist())
    never = int((half > longest).sum())
    behaviour, why = behaviour_of(largest, possible, growth.value, never, half.size, longest, tolerance, overflows)
    return LayerStability(
        layer=layer,
        part=part,
        parts=parts,
        states=mean.shape[1],
        behaviour=behaviour,
        why=why,
        abscissa=None if found.abscissa is None else found.abscissa.cpu().numpy(),
        largest=largest,
        possible=possible,
        bounded_by=found.bounded_by,
        mean=mean.max(1),
        half_life=np.array([_quantile(row, 0.5) for row in half]),
        quantiles=tuple(_quantile(half.ravel(), q) for q in QUANTILES),
        never=never,
        growth=growth,
    )


def notes_on(found: Sequence[Recorded]) -> tuple[str, ...]:
    notes = []
    if any(one.mixes for one in found):
        notes.append("a delta rule's growth and half-lives are those of the direction of its memory that fades slowest")
    bare = [one.bare.log().cpu().numpy() for one in found if one.bare is not None]
    if bare:
        low, median, high = (_quantile(half_lives(np.concatenate(bare)), q) for q in (0.05, 0.5, 0.95))
        notes.append(
            "an RWKV's memory is a weighted mean, which fades as values are added; its weights alone fade equally at "
            f"every token, with half-lives of {median:.3g} tokens (median; 5 % to 95 %: {low:.3g} to {high:.3g})"
        )
    return tuple(notes)


def half_lives(mean: np.ndarray) -> np.ndarray:
    """Return ln 2 / −E[log a] in tokens, any shape; infinite where the mean log-gain is not negative."""
    return np.divide(math.log(2), -mean, out=np.full(mean.shape, math.inf), where=mean < 0)


def _quantile(values: np.ndarray, q: float) -> float:
    """Return the quantile q without interpolation, so that infinite values are allowed."""
    return float(np.quantile(values, q, method="inverted_cdf"))


def behaviour_of(
    largest: np.ndarray,
    possible: np.ndarray | None,
    growth: float,
    never: int,
    states: int,
    longest: int,
    tolerance: float,
    overflows: bool,
) -> tuple[str, str]:
    """Return one of `BEHAVIOURS` and its reason in words; see `stability`."""
    if largest.max() > tolerance:
        return "unstable", f"a step multiplies a state by {_gain(largest.max())} on the inputs"
    if possible is not None and possible.max() > tolerance:
        return "unstable", f"a step may multiply a state by {_gain(possible.max())}"
    if overflows:
        return "unstable", "its states overflow on the inputs"
    if never:
        several = f"{never:,} of {states:,} states keep half of what they hold"
        kept = several if states > 1 else "its one state keeps half of what it holds"
        return "marginal", f"{kept} beyond the {longest:,} tokens of the longest text"
    if growth >= -tolerance:
        return "marginal", f"its slowest state changes by e^{growth:.2g} a token"
    can = "and none can grow" if possible is not None else "and none grows on the inputs"
    return "stable", f"every state forgets half within the {longest:,} tokens of the longest text, {can}"


def _gain(log_gain: float) -> str:
    if math.isinf(log_gain):
        return "any number"
    if log_gain < 20 and (factor := math.exp(log_gain)) > 1.0005:
        return f"{factor:.4g}"
    return f"e^{log_gain:.3g}"


def norm_positions(positions: int | Sequence[int], longest: int) -> list[int]:
    """Return the positions of the norms: a number of evenly spaced ones from 0 to `longest` − 1, or those given."""
    if isinstance(positions, int):
        if positions < 1:
            raise InputError(f"positions is {positions}; allowed is a number of positions from 1 on, or a list of them")
        if positions == 1:
            return [longest - 1]
        return np.unique(np.linspace(0, longest - 1, positions).round().astype(int)).tolist()
    if any(at >= longest for at in positions):
        raise InputError(f"positions is {list(positions)}; allowed are 0 to {longest - 1}, or a number of positions")
    return np.unique(positions).tolist()


def means_of(columns: np.ndarray, seed: int) -> np.ndarray:
    """Return the mean of each column (texts, columns) over the texts that have one, with an interval from two on:
    (columns, 3); infinite if one of its numbers is."""
    finite = np.where(np.isinf(columns), math.nan, columns)
    texts = (~np.isnan(finite)).sum(0)
    rows = resampled_means(finite, seed=seed)
    rows[1:, texts < 2] = math.nan
    found = estimates(rows)
    found[np.isinf(columns).any(0)] = math.inf
    return found
