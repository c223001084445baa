"""Every part ablated by itself and many together, over a data set; the layers below are run once for each batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ssmscope.api.results import record_provenance
from ssmscope.api.sharding.parts import Columns, over
from ssmscope.core.bootstrap import estimates, resampled_means
from ssmscope.core.edits import edited
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.ablate.parts import Key, Part, chosen_of, part_of, units_of
from ssmscope.interp.ablate.result import Ablation, Unit
from ssmscope.interp.resuming import Plain, resumes
from ssmscope.interp.scoring import MEASURES, SIGNS, Scored, scored_examples

if TYPE_CHECKING:
    from ssmscope.api.inputs import ExampleData
    from ssmscope.interp.ablate.parts import What


def ablation(
    model: Model, data: ExampleData, what: What, by: str, metric: str, steps: int, limit: int | None, seed: int
) -> Ablation:
    """See `ssmscope.ablate`."""
    data = data if limit is None else data.sample(limit, seed=seed)
    if len(data) < 2:
        raise InputError(f"{data.name} ({data.split}) has one example; an interval needs two or more")
    examples = scored_examples(model, data)
    part = part_of(model, what)
    units = units_of(model, examples.batch.rows([0]), part)
    options = {"what": what, "by": by, "metric": metric, "steps": steps, "limit": limit}
    provenance = record_provenance(model.source, options=options, seed=seed, data=data)
    runs = Runs(examples, part, by, units, seed, provenance)
    plain, single = runs.single(units)
    halves = np.array_split(np.random.default_rng(seed).permutation(len(examples)), 2)
    signs = np.array(SIGNS)
    harms = (single - plain) * signs
    at = MEASURES.index(metric)
    order = np.argsort(harms[:, halves[0], at].mean(1), kind="stable").tolist()
    drawn = np.random.default_rng(seed).permutation(len(units)).tolist()
    counts = sorted({round(step * len(units) / steps) for step in range(steps + 1)})
    sets = [[units[number] for number in own[:count]] for own in (order, drawn) for count in counts]
    together = runs.together(sets, halves[1].tolist()).reshape(2, len(counts), len(halves[1]), len(MEASURES))
    first, other = map(len, halves)
    notes = (f"the curve's order is that of {first:,} examples, its values are those of the other {other:,}",)
    return Ablation(
        provenance=provenance,
        what=what,
        by=by,
        metric=metric,
        units=tuple(units),
        plain=_ends(plain, seed),
        harms=_ends(harms.transpose(1, 0, 2), seed),
        order=tuple(order),
        counts=tuple(counts),
        curves=_ends(together.transpose(2, 0, 1, 3), seed),
        notes=notes,
    )


def _ends(columns: Float[np.ndarray, "examples ..."], seed: int) -> Float[np.ndarray, "... three"]:
    """The mean over examples and its interval, all of one set of resamples."""
    rows = resampled_means(columns.reshape(len(columns), -1), seed=seed)
    return estimates(rows.reshape(len(rows), *columns.shape[1:]))


class Runs:
    """Runs of examples with parts of the model replaced."""

    def __init__(
        self,
        examples: Scored,
        part: Part,
        by: str,
        units: Sequence[Unit],
        seed: int,
        provenance: Mapping[str, Any],
    ) -> None:
        self.examples, self.part, self.by, self.provenance = examples, part, by, provenance
        self.heads = max((unit.head + 1 for unit in units if unit.head is not None), default=1)
        self.parts = max((unit.part + 1 for unit in units if unit.part is not None), default=1)
        self.resumes = resumes(examples.model, examples.batch.rows([0]))
        self.means = self._means() if by == "mean" else {}
        cycle = np.random.default_rng(seed).permutation(len(examples))
        self.donors = np.empty_like(cycle)
        """Per example the one whose values it gets: the next in a cycle through all."""
        self.donors[cycle] = np.roll(cycle, 1)

    def single(self, units: Sequence[Unit]) -> tuple[np.ndarray, np.ndarray]:
        """(examples, measures) with nothing ablated, (units, examples, measures) with each unit ablated by itself."""
        examples = self.examples
        plain = np.empty((len(examples), len(MEASURES)))
        found = np.empty((len(units), *plain.shape))
        layers = {layer: [n for n, unit in enumerate(units) if unit.layer == layer] for layer in self._layers(units)}

        def measure(rows: list[int]) -> Columns:
            base = Plain(examples.model, examples.batch.rows(rows))
            own = np.empty((len(units), len(rows), len(MEASURES)))
            values = self._values(rows)
            for layer, numbers in layers.items():
                for chosen in self._chunks(numbers, rows):
                    own[chosen] = self._run(rows, [[units[number]] for number in chosen], values, base, layer)
            return {"plain": examples.measured(base.logits, rows), "single": own}

        what = f"{len(units)} ablations, examples"
        for rows, part in over(examples.model, examples.batches(), measure, provenance=self.provenance, what=what):
            plain[rows], found[:, rows] = part["plain"], part["single"]
        return plain, found

    def together(self, sets: Sequence[Sequence[Unit]], used: Sequence[int]) -> np.ndarray:
        """(sets, used, measures) of these examples with every unit of a set ablated."""
        found = np.empty((len(sets), len(used), len(MEASURES)))
        place = {row: number for number, row in enumerate(used)}

        def measure(rows: list[int]) -> Columns:
            own, values = np.empty((len(sets), len(rows), len(MEASURES))), self._values(rows)
            for chosen in self._chunks(range(len(sets)), rows):
                own[chosen] = self._run(rows, [sets[number] for number in chosen], values)
            return {"together": own}

        what, batches = f"{len(sets)} sets ablated together, examples", self.examples.batches(used)
        for rows, part in over(self.examples.model, batches, measure, provenance=self.provenance, what=what):
            found[:, [place[row] for row in rows]] = part["together"]
        return found

    @staticmethod
    def _layers(units: Sequence[Unit]) -> list[int]:
        return list(dict.fromkeys(unit.layer for unit in units))

    def _chunks(self, numbers: Sequence[int], rows: Sequence[int]) -> Iterator[list[int]]:
        """Numbers whose runs of these examples go together."""
        longest = max(self.examples.batch.lengths[row] for row in rows)
        at_once = max(1, self.examples.room // (longest * len(rows)))
        for start in range(0, len(numbers), at_once):
            yield list(numbers[start : start + at_once])

    def _run(
        self,
        rows: Sequence[int],
        sets: Sequence[Sequence[Unit]],
        values: dict[Key, Tensor],
        base: Plain | None = None,
        layer: int = 0,
    ) -> np.ndarray:
        """(sets, rows, measures); from the layer on, of the plain run of these rows."""
        model, copies = self.examples.model, len(sets)
        batch = self.examples.batch.rows(list(rows) * copies)
        values = {key: value.repeat(copies, *[1] * (value.ndim - 1)) for key, value in values.items()}
        own = {key: value for key, value in values.items() if base is None or key[0] == layer}
        edits = self.part.ablated(own or self.means, chosen_of(sets, len(rows), self.heads, self.parts))
        with ExitStack() as around:
            around.enter_context(edited(model, edits))
            if base is not None and self.resumes:
                around.enter_context(base.below(layer, list(range(len(rows))) * copies))
            around.enter_context(torch.no_grad())
            around.enter_context(model.running(mask=batch.mask))
            logits = model.forward(batch)
        return self.examples.measured(logits, list(rows) * copies).reshape(copies, len(rows), len(MEASURES))

    def _means(self) -> dict[Key, Tensor]:
        """The mean of every part's value over all real tokens, (1, 1, …)."""
        sums: dict[Key, Any] = {}
        tokens = 0
        for rows in self.examples.batches():
            batch, kept = self.examples.batch.rows(rows), self._recorded(rows)
            tokens += int(batch.mask.sum())
            for key, value in kept.items():
                own = value[batch.mask].double().sum(0)
                sums[key] = sums.get(key, 0) + own
        return {key: (value / tokens)[None, None] for key, value in sums.items()}

    def _values(self, rows: Sequence[int]) -> dict[Key, Tensor]:
        """What is put into these examples: of a resampled one the donor's value at the same share of its length."""
        if self.by != "resample":
            return {}
        donors = self.donors[list(rows)].tolist()
        kept, lengths = self._recorded(donors), self.examples.batch.lengths
        longest = max(lengths[row] for row in rows)
        steps = torch.arange(longest)
        places = torch.stack(
            [
                (steps * (lengths[donor] - 1) / max(1, lengths[row] - 1)).round().long().clamp(max=lengths[donor] - 1)
                for row, donor in zip(rows, donors)
            ]
        )
        index = torch.arange(len(rows)).unsqueeze(1)
        return {key: value[index, places.to(value.device)] for key, value in kept.items()}

    def _recorded(self, rows: Sequence[int]) -> dict[Key, Tensor]:
        kept: dict[Key, Tensor] = {}
        self.examples.model.run(self.examples.batch.rows(rows), edits=self.part.recorded(kept), last_only=True)
        return kept
