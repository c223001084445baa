"""Inputs, output positions, and norms of Jacobian blocks of an output by each token, from vector–Jacobian products."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from ssmscope.core.batching import by_length
from ssmscope.core.encoding import Batch
from ssmscope.core.heads import head_logits
from ssmscope.core.intercept import evaluating
from ssmscope.core.mixers import adapter_for
from ssmscope.core.model import Model
from ssmscope.core.take_trace import TextsLike, as_batch
from ssmscope.core.weights import weights_constant
from ssmscope.errors import InputError, Unanswerable
from ssmscope.interp.methods.gradients import head_input
from ssmscope.interp.objective import tokens_that_fit
from ssmscope.probes.influence.reach import Blocks, Reach, noise_of, reach_of
from ssmscope.probes.stability.measure import random_batch

MAX_EXACT_COMPONENTS = 64
"""Largest y whose Jacobian is computed exactly by default."""


@dataclass(frozen=True)
class Probes:
    """Vectors v of vᵀJ; a random one, of ±1, depends on the seed, the place, the text, the position and its number."""

    number: int | None
    """Number of random vectors; None for every unit vector, which is exact."""
    seed: int = 0

    def count(self, size: int) -> int:
        return size if self.number is None else self.number

    def vector(self, which: int, size: int, place: int, text: int, position: int) -> Float[np.ndarray, " size"]:
        if self.number is None:
            return np.eye(1, size, which)[0]
        random = np.random.default_rng([self.seed, place, text, position, which])
        return 2.0 * random.integers(0, 2, size) - 1


@dataclass(frozen=True, eq=False)
class Dependence:
    """Output y at every position of a text as a differentiable function of one vector x per token."""

    x: Float[Tensor, "texts length width"]
    """Point at which the derivative is taken."""
    size: int
    """Number of components of y."""
    run: Callable[[Tensor, Tensor], Tensor]
    """Map of x (rows, length, width) and its mask to the input of `at`."""
    at: Callable[[Tensor, Tensor], Tensor]
    """Map of the output of `run` and a position of each row to y (rows, size)."""
    layers: int
    """Number of layers that it runs through, which determines the memory of a backward pass."""
    place: int
    """0 for the whole model, 1 + i for layer i, so that they draw different probes."""


def of_output(model: Model, batch: Batch, of: str) -> Dependence:
    """Return the head's input, or the logits (a classifier's at the last position), as a function of the embeddings."""
    with torch.no_grad():
        x = model.embed(batch)
    module = model.module
    head = module.get_output_embeddings() if of == "logits" and not model.is_classifier else None
    classes = of == "logits" and model.is_classifier
    if of == "logits" and head is None and not classes:
        raise Unanswerable(f"{model.name} has no head that is one linear map; ask for the influence on hidden vectors")

    def run(x: Tensor, mask: Tensor) -> Tensor:
        with model.running(mask=mask):
            return model.forward_embeddings(x, mask) if classes else head_input(model, x, mask).to(x.device)

    def at(found: Tensor, positions: Tensor) -> Tensor:
        if classes:
            return found
        y = found[torch.arange(len(found), device=found.device), positions]
        return y if head is None else head_logits(module, y)

    size = len(model.labels or ()) if classes else model.width if head is None else head.out_features
    return Dependence(x, size, run, at, model.num_layers, 0)


def of_layer(model: Model, batch: Batch, index: int, u: Float[Tensor, "texts length width"]) -> Dependence:
    """Return the output of one mixer as a function of its input, at the input `u` that it has in the model."""
    mixer = model.mixers[index]
    adapter = adapter_for(mixer)

    def run(x: Tensor, mask: Tensor) -> Tensor:
        with evaluating(model.module):
            return adapter.output(mixer, adapter.compute_terms(mixer, x, mask))

    def at(found: Tensor, positions: Tensor) -> Tensor:
        return found[torch.arange(len(found), device=found.device), positions]

    return Dependence(u, model.width, run, at, max(1, u.shape[-1] // model.width), 1 + index)


def block_norms(
    model: Model,
    dependence: Dependence,
    batch: Batch,
    positions: Sequence[Int[np.ndarray, " positions"]],
    probes: Probes,
    chunk: int | None = None,
) -> list[Blocks]:
    """Compute ‖∂y_t/∂x_s‖_F of every text at its `positions` t, for all s. ‖J‖_F² = Σ_i ‖Jᵀe_i‖² over unit vectors e_i,
    or E‖Jᵀv‖² over random v with E vvᵀ = I (Hutchinson 1990). The mean over the probes is unbiased; its root, the norm,
    is on average too small by about error² / (2 norm), and the errors of neighbouring s are correlated. Texts, and
    copies of them if there is room, run forward once and backward once per vector, at most `chunk` tokens at a time
    (but at least a whole text)."""
    count = probes.count(dependence.size)
    lengths = batch.lengths
    sums = [np.zeros((2, len(own), lengths[text])) for text, own in enumerate(positions)]
    most = tokens_that_fit(model, layers=dependence.layers, gradients=True) if chunk is None else chunk
    for chosen in by_length(lengths, most):
        longest = max(lengths[text] for text in chosen)
        products = max(len(positions[text]) for text in chosen) * count
        copies = max(1, min(products, most // (len(chosen) * longest)))
        rows = [text for text in chosen for _ in range(copies)]
        x = dependence.x[rows, :longest].detach().requires_grad_()
        # Both passes are in this context, because recomputed parts of the backward pass need the same weights.
        with weights_constant(model.module), torch.enable_grad():
            found = dependence.run(x, batch.mask[rows, :longest])
            rounds = math.ceil(products / copies)
            for step in range(rounds):
                v, at, jobs = np.zeros((len(rows), dependence.size)), [0] * len(rows), []
                for row, text in enumerate(rows):
                    place, which = divmod(step * copies + row % copies, count)
                    if place < len(positions[text]):
                        at[row] = int(positions[text][place])
                        v[row] = probes.vector(which, dependence.size, dependence.place, text, at[row])
                        jobs.append((row, text, place))
                y = dependence.at(found, torch.tensor(at, device=x.device))
                weight = torch.from_numpy(v).to(torch.promote_types(y.dtype, torch.float32)).to(y.device)
                (gradient,) = torch.autograd.grad((y * weight).sum(), x, retain_graph=step < rounds - 1)
                squares = _squares(gradient)
                for row, text, place in jobs:
                    square = squares[row, : lengths[text]]
                    sums[text][:, place] += square, square**2
    return [_blocks(own, total, probes, count) for own, total in zip(positions, sums)]


def _squares(gradient: Float[Tensor, "rows length width"]) -> Float[np.ndarray, "rows length"]:
    """Return Σ_width gradient², in float64 on the CPU, scaled before squaring because not every device has float64."""
    gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    scale = gradient.abs().amax(-1)
    unit = gradient / scale.where(scale > 0, 1).unsqueeze(-1)
    return unit.square().sum(-1).cpu().double().numpy() * scale.cpu().double().numpy() ** 2


def _blocks(positions: Int[np.ndarray, " positions"], sums: np.ndarray, probes: Probes, count: int) -> Blocks:
    if probes.number is None:
        return Blocks(positions, np.sqrt(sums[0]), np.zeros_like(sums[0]))
    mean, mean_square = sums / count
    spread = np.maximum(mean_square - mean**2, 0) / (count - 1)  # This is the variance of the mean.
    norm = np.sqrt(mean)
    error = np.divide(np.sqrt(spread), 2 * norm, out=np.zeros_like(norm), where=norm > 0)
    return Blocks(positions, norm, error)


def measure_reach(
    dependence: Dependence, *, place: str, exact: bool | None, probes: Probes, fit: Mapping[str, Any], **run: Any
) -> Reach:
    """Measure the reach of one output; `run` holds the other arguments of `block_norms`."""
    assert probes.number is not None
    if exact is None:
        exact = dependence.size <= max(MAX_EXACT_COMPONENTS, probes.number)
    drawn = Probes(None, probes.seed) if exact else probes
    blocks = block_norms(dependence=dependence, probes=drawn, **run)
    for text, block in enumerate(blocks):
        if not np.isfinite(block.norm).all():
            where = "the output" if place == "output" else f"layer {place}"
            raise InputError(
                f"the gradients of {where} are not finite on text {text}: the model is damaged, or overflows"
            )
    noise = noise_of(next(run["model"].module.parameters()).dtype)
    return reach_of(place, blocks, exact=exact, noise=noise, seed=probes.seed, **fit)


def inputs_of(model: Model, texts: TextsLike | None, length: int | None, sequences: int, seed: int) -> Batch:
    if (texts is None) == (length is None):
        raise InputError("give either texts (or a batch of encode()), or length=… for random sequences")
    if isinstance(texts, Batch):
        if (texts.values is None) != (model.channels is None):
            raise InputError(f"{model.name} reads {model.reads}: give it a batch of its own encode()")
        return texts.to(model.device)
    if length is not None:
        return random_batch(model, sequences, length, np.random.default_rng([seed, sequences, length]))
    return as_batch(model, texts)  # type: ignore[arg-type]


def positions_of(positions: str | Sequence[int], lengths: Sequence[int]) -> list[np.ndarray]:
    """Return the positions t of every text in ascending order; raise InputError if a text does not have one."""
    if isinstance(positions, str):
        return [np.arange(n - 1 if positions == "last" else 0, n) for n in lengths]
    found = []
    for text, n in enumerate(lengths):
        outside = [each for each in positions if not -n <= each < n]
        if outside:
            allowed = f"it has {n} tokens; allowed are {-n} to {n - 1}"
            raise InputError(f"text {text} has no position {outside[0]}: {allowed}")
        found.append(np.unique([each % n for each in positions]))
    return found


def notes_on(reaches: Sequence[Reach], batch: Batch) -> Iterable[str]:
    texts = len(batch.tokens)
    if texts == 1:
        yield "one text: no number has an interval, and its tokens are centred on their own mean"
    if dead := [reach.place for reach in reaches if np.isnan(reach.held).any()]:
        where = name_places(dead)
        yield f"no influence at all on some positions of {where}; they are left out of logarithms and shares"
    if growing := [reach.place for reach in reaches if reach.decay.rate.value <= 0]:
        yield f"the influence on {name_places(growing)} does not decay with distance"
    if short := [reach.place for reach in reaches if not reach.decay.defined]:
        why = "fewer than three distances are measured and above the noise"
        yield f"no line is fitted for {name_places(short)}: {why}"


def name_places(places: Sequence[str]) -> str:
    """Return places in words: "the output", "layer 3", "the output and layers 0, 2"."""
    layers = [place for place in places if place != "output"]
    parts = ["the output"] * ("output" in places)
    parts += [f"layer{'s' * (len(layers) > 1)} {', '.join(layers)}"] * bool(layers)
    return " and ".join(parts)
