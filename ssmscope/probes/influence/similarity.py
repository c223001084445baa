"""Over-smoothing: similarity of a text's token vectors from layer to layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from ssmscope.core.batching import by_length, tokens_at_once
from ssmscope.core.bootstrap import Estimate
from ssmscope.core.edits import blocks_of
from ssmscope.core.encoding import Batch
from ssmscope.core.intercept import observe
from ssmscope.core.model import Model
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.methods.gradients import head_input
from ssmscope.interp.scoring import means_with_intervals

MEASURES = ("cosine", "centred", "spread")
PARTS = ("stream", "mixer")


@dataclass(frozen=True)
class Similarity:
    """Similarity of the vectors of a text's tokens, in the residual stream and in each mixer's output. For the vectors
    x_1 … x_n of one text: "cosine", the mean of cos(x_i, x_j) over pairs i ≠ j; "centred", the same for x_i − μ, with μ
    the mean over all tokens of all texts; "spread", ‖X − 1 x̄ᵀ‖_F / ‖X‖_F with x̄ the text's own mean, the share of the
    norm in which its tokens differ, 0 if all are equal."""

    places: tuple[str, ...]
    """Places in the stream: "embeddings", the layers' numbers (after each block), and "output", the head's input. The
    mixers have the layers' numbers only."""
    stream: np.ndarray
    """(places, measures, 3): means over texts with their intervals; NaN if not defined."""
    mixer: np.ndarray
    """(layers, measures, 3)."""

    def estimate(self, place: str | int, measure: str = "cosine", part: str = "stream") -> Estimate:
        """Return a measure at a place; raise InputError if there is no such place, measure or part."""
        places = self.places if part == "stream" else self.places[1:-1]
        for what, name, known in (("part", part, PARTS), ("place", str(place), places), ("measure", measure, MEASURES)):
            if name not in known:
                near = did_you_mean(str(name), known)
                raise InputError(f"there is no {what} {name!r}; allowed are {', '.join(known)}{near}")
        values = self.stream if part == "stream" else self.mixer
        return Estimate(*values[places.index(str(place)), MEASURES.index(measure)].tolist())


def similarity_of(model: Model, batch: Batch, *, at_once: int | None, seed: int = 0) -> Similarity:
    """Compute all measures at all places over the real tokens of every text, in two runs, the first for the means."""
    layers, texts = model.num_layers, len(batch.tokens)
    totals: dict[tuple[str, int], Any] = {}

    def add(place: tuple[str, int], x: Tensor, mask: Tensor, chosen: list[int]) -> None:
        totals[place] = totals.get(place, 0) + (x * mask.unsqueeze(-1)).sum((0, 1))

    _visit(model, batch, at_once, add)
    means = {place: total / sum(batch.lengths) for place, total in totals.items()}
    values = {"stream": np.full((layers + 2, texts, 3), np.nan), "mixer": np.full((layers, texts, 3), np.nan)}

    def measure(place: tuple[str, int], x: Tensor, mask: Tensor, chosen: list[int]) -> None:
        found = [mean_cosine(x, mask), mean_cosine(x - means[place], mask), spread(x, mask)]
        values[place[0]][place[1], chosen] = torch.stack(found, dim=1).cpu().double().numpy()

    _visit(model, batch, at_once, measure)
    places = ("embeddings", *map(str, model.layer_numbers), "output")
    return Similarity(places, *(means_with_intervals(values[part].transpose(1, 0, 2), seed) for part in PARTS))


def mean_cosine(x: Float[Tensor, "texts length width"], mask: Bool[Tensor, "texts length"]) -> Float[Tensor, " texts"]:
    """Return the mean of cos(x_i, x_j) over pairs i ≠ j of real tokens, (‖Σ u_i‖² − n) / (n (n − 1)) with unit vectors
    u_i. Vectors of length 0 are left out; NaN with fewer than two others."""
    size = x.norm(dim=-1)
    real = mask & (size > 0)
    unit = x / size.where(real, 1).unsqueeze(-1) * real.unsqueeze(-1)
    n = real.sum(1)
    pairs = (unit.sum(1).square().sum(-1) - unit.square().sum((1, 2))) / (n * (n - 1))
    return pairs.where(n > 1, torch.nan)


def spread(x: Float[Tensor, "texts length width"], mask: Bool[Tensor, "texts length"]) -> Float[Tensor, " texts"]:
    """Return ‖X − 1 x̄ᵀ‖_F / ‖X‖_F of the real tokens; NaN for a single token or zeros."""
    real, n = mask.unsqueeze(-1), mask.sum(1)
    x = x * real
    middle = x.sum(1, keepdim=True) / n.view(-1, 1, 1)
    above, below = ((each * real).square().sum((1, 2)).sqrt() for each in (x - middle, x))
    return (above / below).where((n > 1) & (below > 0), torch.nan)


def _visit(model: Model, batch: Batch, at_once: int | None, read: Callable[..., None]) -> None:
    """Run the texts, and call `read` with the vectors at every place, (texts, length, width), and their mask."""
    for chosen in by_length(batch.lengths, at_once or tokens_at_once(model.device)):
        part = batch.rows(chosen)
        mask = part.mask

        def show(place: tuple[str, int], x: Tensor) -> None:
            read(place, x.to(mask.device, torch.promote_types(x.dtype, torch.float32)), mask, chosen)  # noqa: B023

        def shown(place: tuple[str, int], module: nn.Module, output: Any) -> None:
            show(place, output[0] if isinstance(output, tuple) else output)  # noqa: B023

        with torch.no_grad(), model.running(mask=mask):
            embeddings = model.embed(part)
            show(("stream", 0), embeddings)
            parts = [(("stream", 1 + index), block) for index, block in enumerate(blocks_of(model.module))]
            parts += [(("mixer", index), mixer) for index, mixer in enumerate(model.mixers)]
            with observe(after=[(part, partial(shown, place)) for place, part in parts]):
                found = head_input(model, embeddings, mask)
            show(("stream", model.num_layers + 1), found)
