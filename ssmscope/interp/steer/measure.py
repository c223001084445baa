"""Direction from contrasting texts, and runs with it added in several strengths."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from ssmscope.api.inputs import is_named, known_data, load_examples, one_text
from ssmscope.core.batching import HELD_OUT_LENGTH, by_length
from ssmscope.core.edits import Edit, Site, new_state, recorded
from ssmscope.core.encoding import Batch
from ssmscope.core.lasting_edits import LastingEdit, while_writing
from ssmscope.core.model import Model
from ssmscope.core.progress import progress_bar
from ssmscope.core.trace import LayerState
from ssmscope.errors import InputError, refuse_unused
from ssmscope.interp.objective import tokens_that_fit
from ssmscope.interp.partial_runs import PlainRun, can_start_at_layer
from ssmscope.interp.scoring import MEASURES, ScoredExamples, means_with_intervals

if TYPE_CHECKING:
    from ssmscope.api.inputs import ExampleData

Direction = tuple[Tensor, ...]
"""A vector (width,) for the residual stream at each layer; for states a tensor (heads, width, state) per recurrence."""


def held_out_examples(
    model: Model, data: Any, split: str | None, length: int, limit: int | None, seed: int
) -> ExampleData | None:
    """Return examples as they are given, or the data of a name, a file or a table, by default those that the model was
    trained on; None where these are not known."""
    from ssmscope.loading.load import trained_on

    if data is None:
        data = trained_on(model.name)
        data = data if data in known_data(model) else None
    named = is_named(data)
    refuse_unused("without named data", split=split is not None and not named)
    refuse_unused("without rows of text", length=length != HELD_OUT_LENGTH and (model.is_classifier or not named))
    if data is None:
        return None
    found: ExampleData = load_examples(model, data, split, length) if named else data
    return found if limit is None else found.sample(limit, seed=seed)


Layer = int | Sequence[int]
"""Number of a state-space layer in the model's list of layers, or several."""


def layers_of(layer: Layer) -> tuple[int, ...]:
    """Return the numbers of one layer or several."""
    return (layer,) if isinstance(layer, int) else tuple(layer)


def mean_difference(
    model: Model, toward: Sequence[Any], away: Sequence[Any], site: str, layer: Layer, *, pca: bool = False
) -> Direction:
    """Return the mean of one side's texts minus the other's: of the stream at their ends, in each layer, or of the
    states. With `pca` it is replaced by its projection on the first principal component, about the origin, of the
    differences of the pairs of texts, the first to the first and so on (as Zou et al. 2023, representation
    engineering)."""
    sides = []
    for texts in (toward, away):
        every = [_behind(model, one_text(model, text), site, layer) for text in texts]
        sides.append([torch.stack(parts) for parts in zip(*every)])
    found = tuple(first.mean(0) - second.mean(0) for first, second in zip(*sides))
    if pca:
        if len(toward) != len(away):
            raise InputError(f"{len(toward)} texts to steer to and {len(away)} from have no pairs; give as many")
        found = tuple(map(_on_first_component, found, (first - second for first, second in zip(*sides))))
    if not norm(found) > 0:
        advice = "give texts that differ, or a later layer"
        raise InputError(f"the texts to steer to and from have the same mean there; {advice}")
    return found


def _on_first_component(mean: Tensor, differences: Float[Tensor, "pairs ..."]) -> Tensor:
    """Return the projection of a mean on the direction in which the differences are largest."""
    first = torch.linalg.svd(differences.flatten(1), full_matrices=False).Vh[0]
    return (first * (first @ mean.flatten())).view_as(mean)


def _behind(model: Model, batch: Batch, site: str, layer: Layer) -> Direction:
    """Return the values at a text's end: of the stream in every layer, or of one layer's states."""
    if site == "state":
        (at,) = map(model.layer_numbers.index, layers_of(layer))
        return tuple(state[0].double() for state in model.run(batch, last_only=True).states[at].ssm)
    kept: dict[int, Tensor] = {}
    model.run(batch, edits=recorded("residual", kept, layers=layers_of(layer)), last_only=True)
    return tuple(kept[number][0, -1].double() for number in layers_of(layer))


def norm(direction: Direction) -> float:
    """Return ‖d‖ over all of its numbers."""
    return math.sqrt(sum(float(part.double().square().sum()) for part in direction))


def draw_like(direction: Direction, generator: torch.Generator) -> Direction:
    """Draw a Gaussian direction of the same norm."""
    drawn = tuple(torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in direction)
    scale = norm(direction) / norm(drawn)
    return tuple((scale * part).to(like.device) for part, like in zip(drawn, direction))


def steering_edit(site: str, layer: Layer, direction: Direction, strength: float) -> Edit:
    """Return the edit that adds strength · d to the residual stream, or to the state after the first token."""

    layers = layers_of(layer)

    def stream(value: Tensor, site: Site) -> Tensor:
        return value + (strength * direction[layers.index(site.layer)]).to(value)

    def state(value: LayerState, _: Site) -> LayerState:
        return replace(value, ssm=tuple(H + (strength * d).to(H) for H, d in zip(value.ssm, direction)))

    if site == "state":
        return new_state(0, state, layers=layers, name="state steered")
    return Edit("residual steered", "residual", stream, layers, options={"strength": strength})


def lasting(edit: Edit) -> list[Edit | LastingEdit]:
    """Return an edit as it acts while a model writes: of the stream at every token, of a state once, in the prompt."""
    return [edit] if edit.place == "state" else [while_writing(edit, prompt=True)]


class SteeredRuns:
    """Runs with every direction in every strength; with strength 0 they are the plain run."""

    def __init__(
        self, model: Model, site: str, layer: Layer, directions: Sequence[Direction], strengths: Sequence[float]
    ) -> None:
        self.model, self.first = model, min(layers_of(layer))
        self.shape = len(directions), len(strengths)
        self.edits = {
            (which, number): steering_edit(site, layer, directions[which], strengths[number])
            for which, number in np.ndindex(self.shape)
            if strengths[number]
        }

    def answers(self, batch: Batch, asked: Callable[[Tensor, int], float]) -> np.ndarray:
        """Return what is asked of the logits (1, classes) at the end of each text, by its number, (directions,
        strengths, texts)."""
        found = np.empty((*self.shape, len(batch.tokens)))
        room_here = tokens_that_fit(self.model, every_position=not self.model.is_classifier)
        for which, rows, logits in self._every(batch, list(by_length(batch.lengths, room_here))):
            for own, text in zip(logits, rows):
                last = own if own.ndim == 1 else own[batch.lengths[text] - 1]
                found[(*which, text)] = asked(last.unsqueeze(0), text)
        return found

    def costs(self, examples: ScoredExamples) -> np.ndarray:
        """Return the measures on held-out data, (directions, strengths, examples, measures)."""
        found = np.empty((*self.shape, len(examples), len(MEASURES)))
        for which, rows, logits in self._every(examples.batch, list(examples.batches())):
            found[(*which, rows)] = examples.measured(logits, rows)
        return found

    def _every(self, batch: Batch, batches: Sequence[list[int]]) -> Any:
        """Yield the indices of a direction and a strength, rows that run together, and their logits."""
        reuse = can_start_at_layer(self.model, batch.rows([0]))
        with progress_bar() as bar:
            task = bar.add_task("steered runs", total=self.shape[0] * self.shape[1] * len(batches))
            for rows in batches:
                own = batch.rows(rows)
                base = PlainRun(self.model, own, reuse=reuse)
                for which in np.ndindex(*self.shape):
                    edit = self.edits.get(which)
                    yield which, rows, base.logits if edit is None else base.again(self.first, edit)
                    bar.advance(task)


def summarise(
    values: Float[np.ndarray, "directions strengths examples measures"],
    seed: int,
    means: Callable[[np.ndarray, int], np.ndarray] = means_with_intervals,
) -> Float[np.ndarray, "three strengths measures ends"]:
    """Return the means with intervals of the direction, of the random ones' mean, and of the difference."""
    first, drawn = values[0], values[1:].mean(0)
    columns = np.stack([first, drawn, first - drawn]).transpose(2, 0, 1, 3)
    return means(columns, seed)
