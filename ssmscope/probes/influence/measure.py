"""Inputs, output positions and the reach of each output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.core.encoding import Batch
from ssmscope.core.model import as_batch
from ssmscope.errors import InputError
from ssmscope.probes.influence.jacobian import Dependence, Probes, block_norms
from ssmscope.probes.influence.reach import Reach, noise_of, reach_of
from ssmscope.probes.stability.inputs import random_batch

if TYPE_CHECKING:
    from ssmscope.core.model import Model, TextsLike

MAX_EXACT_COMPONENTS = 64
"""Largest y whose Jacobian is computed exactly by default."""


def measure_reach(
    model: Model,
    batch: Batch,
    dependence: Dependence,
    positions: Sequence[np.ndarray],
    *,
    place: str,
    exact: bool | None,
    probes: Probes,
    fit: tuple[int, int | None],
    chunk: int | None,
) -> Reach:
    """Measure the reach of one output.

    Args:
        dependence: the output as a function of one vector per token.
        positions: positions t of every text.
        place: "output", or a layer's number.
        probes: random vectors of estimated norms.
        fit: smallest and largest distance of the fitted line.
        chunk: tokens that run together.

    Raises:
        InputError: gradients that are not finite.
    """
    assert probes.number is not None
    if exact is None:
        exact = dependence.size <= max(MAX_EXACT_COMPONENTS, probes.number)
    drawn = Probes(None, probes.vectors, probes.seed) if exact else probes
    blocks = block_norms(model, dependence, batch, positions, drawn, chunk)
    for text, block in enumerate(blocks):
        if not np.isfinite(block.norm).all():
            where = "the output" if place == "output" else f"layer {place}"
            raise InputError(
                f"the gradients of {where} are not finite on text {text}: the model is damaged, or overflows"
            )
    noise = noise_of(next(model.module.parameters()).dtype)
    return reach_of(place, blocks, exact=exact, noise=noise, fit_from=fit[0], fit_to=fit[1], seed=probes.seed)


def inputs_of(model: Model, texts: TextsLike | None, length: int | None, sequences: int, seed: int) -> Batch:
    """Return the texts as a batch, or random sequences of `length` tokens.

    Raises:
        InputError: both or neither, a batch of another model, or sequences that are too long or too many.
    """
    if (texts is None) == (length is None):
        raise InputError("give either texts (or a batch of encode()), or a length for random sequences")
    if isinstance(texts, Batch):
        if (texts.values is None) != (model.channels is None):
            wanted = "tokens" if model.channels is None else "pixels"
            raise InputError(f"{model.name} reads {wanted}: give it a batch of its own encode()")
        return texts
    if length is not None:
        return random_batch(model, sequences, length, np.random.default_rng([seed, sequences, length]))
    assert texts is not None
    return as_batch(model, texts)


def positions_of(positions: str | Sequence[int], lengths: Sequence[int]) -> list[np.ndarray]:
    """Return the positions t of every text in ascending order; raise InputError if a text does not have one."""
    if isinstance(positions, str):
        return [np.arange(n - 1 if positions == "last" else 0, n) for n in lengths]
    found = []
    for text, n in enumerate(lengths):
        outside = [each for each in positions if not -n <= each < n]
        if outside:
            raise InputError(
                f"text {text} has no position {outside[0]}: it has {n} tokens; allowed are {-n} to {n - 1}"
            )
        found.append(np.unique([each % n for each in positions]))
    return found


def notes_on(reaches: Sequence[Reach], batch: Batch) -> Iterable[str]:
    """Yield notes on the numbers."""
    texts = len(batch.tokens)
    if texts == 1:
        yield "one text: no number has an interval, and its tokens are centred on their own mean"
    dead = [reach.place for reach in reaches if np.isnan(reach.context).any()]
    if dead:
        where = name_places(dead)
        yield f"no influence at all on some positions of {where}; they are left out of logarithms and shares"
    growing = [reach.place for reach in reaches if reach.decay.rate.value <= 0]
    if growing:
        yield f"the influence on {name_places(growing)} does not decay with distance"
    short = [reach.place for reach in reaches if not reach.decay.defined]
    if short:
        where = name_places(short)
        yield f"no line is fitted for {where}: fewer than three distances are measured and above the noise"


def name_places(places: Sequence[str]) -> str:
    """Return places in words: "the output", "layer 3", "the output and layers 0, 2"."""
    layers = [place for place in places if place != "output"]
    parts = ["the output"] if "output" in places else []
    if layers:
        parts.append(("layer " if len(layers) == 1 else "layers ") + ", ".join(layers))
    return " and ".join(parts)
