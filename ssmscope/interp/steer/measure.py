"""A direction from contrasting texts, added to runs in several strengths: the answer's probability, and the cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ssmscope.api.inputs import known_data, load_examples, one_text
from ssmscope.api.results import record_provenance
from ssmscope.core.batching import by_length
from ssmscope.core.bootstrap import estimates, resampled_means
from ssmscope.core.edits import Edit, Site, edited, new_state, recorded
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.core.progress import progress_bar
from ssmscope.core.trace import LayerState
from ssmscope.errors import InputError
from ssmscope.interp.answers import answers, measured
from ssmscope.interp.objective import room
from ssmscope.interp.resuming import Plain, resumes
from ssmscope.interp.scoring import MEASURES, Scored, scored_examples
from ssmscope.interp.steer.result import Steering

if TYPE_CHECKING:
    from ssmscope.api.inputs import ExampleData

Direction = tuple[Tensor, ...]
"""Of the residual stream one vector (width,), of states one tensor (heads, width, state) for each recurrence."""


def steered(
    model: Model,
    batch: Batch,
    *,
    toward: Sequence[Any],
    away: Sequence[Any],
    site: str,
    layer: int | None,
    strengths: tuple[float, ...],
    answer: int | str | None,
    data: str | ExampleData | None,
    split: str | None,
    length: int,
    limit: int | None,
    random: int,
    seed: int,
) -> Steering:
    """See `ssmscope.steer`."""
    layer = model.num_layers // 2 if layer is None else layer
    if layer >= model.num_layers:
        raise InputError(f"there is no layer {layer}; {model.name} has the layers 0 to {model.num_layers - 1}")
    if site == "state":
        model.check_recurrent_state("a state")
    if site == "state" and min(batch.lengths) < 2:
        raise InputError("a text has one token, behind which no state is read; give longer texts, or another site")
    direction = difference(model, toward, away, site, layer)
    generator = torch.Generator().manual_seed(seed)
    directions = [direction, *(drawn_like(direction, generator) for _ in range(random))]
    ids, names = answers(model, batch, answer)
    held_out = held_out_examples(model, data, split, length, limit, seed)
    doses = Doses(model, site, layer, directions, strengths)
    found = doses.probabilities(batch, ids)
    costs = np.empty((len(directions), len(strengths), 0, len(MEASURES)))
    if held_out is not None:
        costs = doses.costs(scored_examples(model, held_out))
    options = {
        **{"toward": list(toward), "away": list(away), "site": site, "layer": layer, "strengths": list(strengths)},
        **{"answer": answer, "split": split, "length": length, "limit": limit, "random": random},
    }
    return Steering(
        provenance=record_provenance(model.source, options=options, seed=seed, data=held_out),
        site=site,
        layer=layer,
        strengths=strengths,
        answers=tuple(names),
        norm=float(norm(direction)),
        direction=tuple(part.double().cpu().numpy() for part in direction),
        probability=summarised(found[..., None], seed)[..., 0, :],
        by_direction=found.mean(-1),
        costs=summarised(costs, seed) if costs.size else np.empty((3, len(strengths), 0, 3)),
        classifies=model.is_classifier,
    )


def held_out_examples(
    model: Model, data: str | ExampleData | None, split: str | None, length: int, limit: int | None, seed: int
) -> ExampleData | None:
    """The data by its name, or that which the model learnt from; None where that is not known."""
    from ssmscope.architectures.loading.load import trained_on

    if data is None:
        data = trained_on(model.name)
        if data is None or data not in known_data(model):
            return None
    found = load_examples(model, data, split, length) if isinstance(data, str) else data
    return found if limit is None else found.sample(limit, seed=seed)


def difference(model: Model, toward: Sequence[Any], away: Sequence[Any], site: str, layer: int) -> Direction:
    """The mean over the texts of one side less that over the texts of the other: of what a block reads at their last
    tokens, or of the states behind them.

    Raises:
        InputError: both means are the same.
    """
    means = []
    for texts in (toward, away):
        if not texts:
            raise InputError("no text to steer to or from; give toward=… and away=…")
        every = [_behind(model, one_text(model, text), site, layer) for text in texts]
        means.append([torch.stack(parts).mean(0) for parts in zip(*every)])
    found = tuple(first - second for first, second in zip(*means))
    if not norm(found) > 0:
        raise InputError(
            "the texts to steer to and from have the same mean there; give texts that differ, or a later layer"
        )
    return found


def _behind(model: Model, batch: Batch, site: str, layer: int) -> Direction:
    """What a text has at its end."""
    if site == "state":
        return tuple(state[0].double() for state in model.run(batch, last_only=True).states[layer].ssm)
    kept: dict[int, Tensor] = {}
    model.run(batch, edits=recorded("residual", kept, layers=[layer]), last_only=True)
    return (kept[layer][0, -1].double(),)


def norm(direction: Direction) -> float:
    """‖d‖ over all of its numbers."""
    return math.sqrt(sum(float(part.double().square().sum()) for part in direction))


def drawn_like(direction: Direction, generator: torch.Generator) -> Direction:
    """A Gaussian direction of the same norm."""
    drawn = tuple(torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in direction)
    scale = norm(direction) / norm(drawn)
    return tuple((scale * part).to(like.device) for part, like in zip(drawn, direction))


def steering(site: str, layer: int, direction: Direction, strength: float) -> Edit:
    """The edit that adds strength · d: to the residual stream that a block reads, at every token, or to the state
    behind the first token."""

    def stream(value: Tensor, _: Site) -> Tensor:
        return value + (strength * direction[0]).to(value)

    def state(value: LayerState, _: Site) -> LayerState:
        return replace(value, ssm=tuple(H + (strength * d).to(H) for H, d in zip(value.ssm, direction)))

    if site == "state":
        return new_state(0, state, layers=[layer], name="state steered")
    return Edit("residual steered", "residual", stream, (layer,), options={"strength": strength})


class Doses:
    """Runs with every direction in every strength; with strength 0 they are the plain run."""

    def __init__(
        self, model: Model, site: str, layer: int, directions: Sequence[Direction], strengths: Sequence[float]
    ) -> None:
        self.model, self.layer = model, layer
        self.shape = len(directions), len(strengths)
        self.edits = {
            (which, number): steering(site, layer, direction, strength)
            for which, direction in enumerate(directions)
            for number, strength in enumerate(strengths)
            if strength
        }

    def probabilities(self, batch: Batch, ids: Sequence[int]) -> np.ndarray:
        """(directions, strengths, texts) of every text's answer."""
        found = np.empty((*self.shape, len(ids)))
        room_here = room(self.model, every_position=not self.model.is_classifier)
        for which, rows, logits in self._every(batch, list(by_length(batch.lengths, room_here))):
            for run, text in enumerate(rows):
                last = logits[run] if logits.ndim == 2 else logits[run, batch.lengths[text] - 1]
                found[(*which, text)] = float(measured(self.model, last.unsqueeze(0), ids[text])[0])
        return found

    def costs(self, examples: Scored) -> np.ndarray:
        """(directions, strengths, examples, measures)."""
        found = np.empty((*self.shape, len(examples), len(MEASURES)))
        for which, rows, logits in self._every(examples.batch, list(examples.batches())):
            found[(*which, rows)] = examples.measured(logits, rows)
        return found

    def _every(self, batch: Batch, batches: Sequence[list[int]]) -> Any:
        """A direction's and strength's numbers, rows that run together, and their logits."""
        resumed = resumes(self.model, batch.rows([0]))
        with progress_bar() as bar:
            task = bar.add_task("steered runs", total=self.shape[0] * self.shape[1] * len(batches))
            for rows in batches:
                own = batch.rows(rows)
                base = Plain(self.model, own)
                for which in np.ndindex(*self.shape):
                    edit = self.edits.get(which)
                    yield which, rows, base.logits if edit is None else self._run(own, base, edit, resumed)
                    bar.advance(task)

    def _run(self, batch: Batch, base: Plain, edit: Edit, resumed: bool) -> Tensor:
        with ExitStack() as around:
            around.enter_context(edited(self.model, edit))
            if resumed:
                around.enter_context(base.below(self.layer, range(len(batch.tokens))))
            around.enter_context(torch.no_grad())
            around.enter_context(self.model.running(mask=batch.mask))
            return self.model.forward(batch)


def summarised(
    values: Float[np.ndarray, "directions strengths examples measures"], seed: int
) -> Float[np.ndarray, "three strengths measures ends"]:
    """Means over the examples with their intervals: of the direction, of the mean of the random ones, and of the first
    less the second, all of one set of resamples; one example has no interval."""
    first, drawn = values[0], values[1:].mean(0)
    columns = np.stack([first, drawn, first - drawn]).transpose(2, 0, 1, 3)
    shape = columns.shape[1:]
    rows = resampled_means(columns.reshape(len(columns), -1), seed=seed)
    if len(columns) == 1:
        rows = rows[:1]
    return estimates(rows.reshape(len(rows), *shape))
