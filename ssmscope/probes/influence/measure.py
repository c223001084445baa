"""What is measured of a model: the inputs, the positions of its outputs, and the reach of each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ssmscope.core.encoding import Batch
from ssmscope.core.limits import ROW, TOGETHER, refuse_above, refuse_held
from ssmscope.core.model import as_batch
from ssmscope.errors import InputError
from ssmscope.probes.influence.jacobian import Dependence, Probes, block_norms
from ssmscope.probes.influence.reach import Reach, noise_of, reach_of

if TYPE_CHECKING:
    from ssmscope.core.model import Model, TextsLike

EXACT = 64
"""Up to how many components of y its Jacobian is computed exactly where nobody says whether it is."""


def measured(
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
    """The reach of one output.

    Args:
        dependence: it as a function of one vector per token.
        positions: those t of every text.
        place: "output", or a layer's number.
        probes: what norms are estimated with where they are not exact.
        fit: the least and the largest distance of the fitted line.
        chunk: how many tokens run together.

    Raises:
        InputError: gradients that are not finite.
    """
    assert probes.number is not None
    all_of_them = dependence.size <= max(EXACT, probes.number) if exact is None else exact
    drawn = Probes(None, probes.vectors, probes.seed) if all_of_them else probes
    blocks = block_norms(model, dependence, batch, positions, drawn, chunk)
    for text, block in enumerate(blocks):
        if not np.isfinite(block.norm).all():
            where = "the output" if place == "output" else f"layer {place}"
            raise InputError(
                f"the gradients of {where} are not finite on text {text}: the model is damaged, or overflows"
            )
    noise = noise_of(next(model.module.parameters()).dtype)
    return reach_of(place, blocks, exact=all_of_them, noise=noise, fit_from=fit[0], fit_to=fit[1], seed=probes.seed)


def inputs_of(model: Model, texts: TextsLike | None, length: int | None, sequences: int, seed: int) -> Batch:
    """The texts as a batch, or random sequences of `length` tokens; of pixels these are numbers in [0, 1].

    Raises:
        InputError: both or neither, a batch of another model, or what is too large.
    """
    if (texts is None) == (length is None):
        raise InputError("give either texts (or a batch of encode()), or a length for random sequences")
    if isinstance(texts, Batch):
        if (texts.values is None) != (model.channels is None):
            wanted = "tokens" if model.channels is None else "pixels"
            raise InputError(f"{model.name} reads {wanted}: give it a batch of its own encode()")
        return texts
    if length is None:
        assert texts is not None
        return as_batch(model, texts)
    refuse_above(ROW, length=length)
    what = f"{sequences:,} sequences of {length:,} tokens"
    refuse_held(sequences * length, what, "ask for fewer or shorter ones", most=TOGETHER)
    random = np.random.default_rng([seed, sequences, length])
    if model.channels is not None:
        if length < 2:
            raise InputError(f"length is {length}; allowed is a whole number from 2 on: the last is the class token")
        return model.encode(values=random.random((sequences, length - 1, model.channels), dtype=np.float32))
    special = set(model.tokenizer.all_special_ids) if model.tokenizer is not None else set()
    ordinary = np.array([i for i in range(model.vocabulary) if i not in special] or range(model.vocabulary))
    return model.encode(ids=random.choice(ordinary, (sequences, length)).tolist())


def positions_of(positions: str | Sequence[int], lengths: Sequence[int]) -> list[np.ndarray]:
    """The positions t of every text, in order.

    Raises:
        InputError: one that a text does not have.
    """
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
    """What a reader must know of the numbers."""
    texts = len(batch.tokens)
    if texts == 1:
        yield "one text: no number has an interval, and its tokens are centred on their own mean"
    dead = [reach.place for reach in reaches if np.isnan(reach.context).any()]
    if dead:
        yield f"no influence at all on some positions of {named(dead)}; they are left out of logarithms and shares"
    growing = [reach.place for reach in reaches if reach.decay.rate.value <= 0]
    if growing:
        yield f"the influence on {named(growing)} does not decay with distance"
    short = [reach.place for reach in reaches if not reach.decay.defined]
    if short:
        yield f"no line is fitted for {named(short)}: fewer than three distances are measured and above the noise"


def named(places: Sequence[str]) -> str:
    """ "the output", "layer 3", "the output and layers 0, 2", in words."""
    layers = [place for place in places if place != "output"]
    parts = ["the output"] if "output" in places else []
    if layers:
        parts.append(("layer " if len(layers) == 1 else "layers ") + ", ".join(layers))
    return " and ".join(parts)
