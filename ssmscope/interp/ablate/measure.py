"""Runs with every part ablated alone, and with many together, over a data set."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ssmscope.api.sharding.parts import Columns, over
from ssmscope.core.edits import edited
from ssmscope.interp.ablate.parts import Key, Part, chosen_of
from ssmscope.interp.ablate.result import Unit
from ssmscope.interp.resuming import PlainRun, resumes
from ssmscope.interp.scoring import MEASURES, ScoredExamples

if TYPE_CHECKING:
    pass


class AblationRuns:
    """Runs of examples with parts of the model replaced."""

    def __init__(
        self,
        examples: ScoredExamples,
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
        """Return (examples, measures) with nothing ablated, (units, examples, measures) with each unit ablated
        alone."""
        examples = self.examples
        plain = np.empty((len(examples), len(MEASURES)))
        found = np.empty((len(units), *plain.shape))
        layers = {layer: [n for n, unit in enumerate(units) if unit.layer == layer] for layer in self._layers(units)}

        def measure(rows: list[int]) -> Columns:
            base = PlainRun(examples.model, examples.batch.rows(rows))
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
        """Return (sets, used, measures) of these examples with every unit of a set ablated."""
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
        """Yield numbers whose runs of these examples go together."""
        longest = max(self.examples.batch.lengths[row] for row in rows)
        at_once = max(1, self.examples.room // (longest * len(rows)))
        for start in range(0, len(numbers), at_once):
            yield list(numbers[start : start + at_once])

    def _run(
        self,
        rows: Sequence[int],
        sets: Sequence[Sequence[Unit]],
        values: dict[Key, Tensor],
        base: PlainRun | None = None,
        layer: int = 0,
    ) -> np.ndarray:
        """Return (sets, rows, measures), from `layer` on starting from the plain run of these rows."""
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
        """Return the mean of every part's value over all real tokens, (1, 1, …)."""
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
        """Return the values put into these examples: with resampling the donor's value at the same share of its
        length."""
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
