"""Parts of a model's layers, and runs with every part ablated alone, and with many together, over a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor
from ssmscope.api.inputs import one_text
from ssmscope.api.sharding.parts import Columns, over
from ssmscope.core.edits import Edit, Place, Site, block_parts, blocks_of
from ssmscope.core.encoding import Batch
from ssmscope.core.lasting_edits import while_writing
from ssmscope.core.mixers import numbers_in
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.ablate.result import Ablation, Unit
from ssmscope.interp.edited_texts import EditedText, edited_texts
from ssmscope.interp.partial_runs import PlainRun, can_start_at_layer
from ssmscope.interp.scoring import ScoredExamples, check_heads

What = Literal["head", "layer", "recurrence", "convolution", "gate", "skip", "attention", "feed-forward"]
OUTSIDE: dict[str, Place] = {"attention": "attention-output", "feed-forward": "feed-forward"}
"""Places of parts outside the state-space layers."""
PLACES: dict[str, Place] = {"layer": "output", "convolution": "convolution", "gate": "terms", **OUTSIDE}
"""Places of parts that are not among the outputs of scans."""

Key = tuple[int, int]
"""Layer, and number of its recurrence or convolution."""


@dataclass(frozen=True, eq=False)
class Part:
    """One kind of part of a model's layers."""

    what: What
    whole: frozenset[int] = frozenset()
    """Layers that are whole blocks, whose output has what entered them in it."""

    def edits(self, change: Callable[[Key, Tensor], Tensor], layers: Sequence[int] | None = None) -> list[Edit]:
        """Return the edits that replace a part's value, (runs, length, [heads,] width), by what `change` returns."""
        own = None if layers is None else tuple(layers)
        entered: dict[int, Tensor] = {}

        def enter(u: Tensor, site: Site) -> Tensor:
            entered[site.layer] = u
            return u

        def edited(value: Any, site: Site) -> Any:
            layer = site.layer
            if self.what == "layer":
                u = entered[layer] if layer in self.whole else 0
                return u + change((layer, 0), value - u)
            if self.what in OUTSIDE:
                return change((layer, 0), value)
            if self.what == "convolution":
                return change((layer, site.part), value)
            if self.what == "gate":
                return value if value.z is None else replace(value, z=change((layer, 0), value.z))
            if self.what == "skip":
                assert site.trace is not None
                scans = list(value)
                for n, (scan, recurrence) in enumerate(zip(value, site.trace.recurrences)):
                    if (D := recurrence.D) is not None:
                        skip = (recurrence.x * (D if D.ndim == 2 else D.unsqueeze(-1))).to(scan.y)  # (…, heads, width)
                        scans[n] = scan._replace(y=scan.y + change((layer, n), skip) - skip)
                return tuple(scans)
            return tuple(scan._replace(y=change((layer, n), scan.y)) for n, scan in enumerate(value))

        found = [Edit(f"{self.what} ablated", PLACES.get(self.what, "scans"), edited, own)]
        return [Edit("input kept", "input", enter, own), *found] if self.whole else found

    def recorded(self, into: dict[Key, Tensor]) -> list[Edit]:
        """Return the edits that keep every part's value, and change nothing."""

        def keep(key: Key, value: Tensor) -> Tensor:
            into[key] = value
            return value

        return self.edits(keep)

    def ablated(
        self, values: Mapping[Key, Tensor], chosen: Mapping[int, Bool[Tensor, "runs parts heads"]]
    ) -> list[Edit]:
        """Return the edits that put `values` in the place of the chosen parts, by layer; the dimensions of parts and
        heads are 1 where all are meant, and missing values are zero."""

        def change(key: Key, value: Tensor) -> Tensor:
            layer, number = key
            where = chosen[layer].to(value.device)
            where = where[:, min(number, where.shape[1] - 1)]
            where = where.view(*where.shape[:1], *[1] * (value.ndim - 3), where.shape[1], 1)
            new = values[key].to(value) if key in values else torch.zeros_like(value[:1, :1])
            return torch.where(where, new, value)

        return self.edits(change, list(chosen))


def part_of(model: Model, what: What) -> Part:
    names = {id(part): name for name, part in model.module.named_modules()}
    blocks = zip(model.layer_numbers, zip(model.mixers, blocks_of(model.module)))
    own = {at for at, (mixer, block) in blocks if mixer is block and names[id(block)].rpartition(".")[2].isdigit()}
    return Part(what, frozenset(own) if what == "layer" else frozenset())


def units_of(model: Model, batch: Batch, part: Part) -> list[Unit]:
    kept: dict[Key, Tensor] = {}
    model.run(batch, edits=part.recorded(kept), last_only=True)
    if not kept:
        lacks = {"convolution": "convolution", "gate": "output gate", "skip": "skip D x"}.get(part.what, part.what)
        raise InputError(f"the layers of {model.name} have no {lacks}; ablate another part")
    if part.what == "head":
        heads = {layer: value.shape[2] for (layer, _), value in kept.items()}
        check_heads(model, max(heads.values()), "ablate layers or another part")
        return [Unit(layer, head=head) for layer, count in sorted(heads.items()) for head in range(count)]
    if part.what in OUTSIDE:
        parts = [*block_parts(model.module, OUTSIDE[part.what])]
        names = dict(zip(numbers_in(parts), parts))
        return [Unit(number, called=_in_block(part.what, names[number])) for number, _ in sorted(kept)]
    if part.what != "recurrence":
        return [Unit(layer) for layer in sorted({layer for layer, _ in kept})]
    trace = model.trace(batch)
    several = {layer: trace.linearized[trace.layer_numbers.index(layer)].parts for layer, number in kept if number}
    return [Unit(layer, number, several[layer][number] if layer in several else "") for layer, number in sorted(kept)]


def _in_block(what: str, name: str) -> str:
    """Name a part by its block, as "attention of block 5", and by itself where a block has several."""
    parts = name.split(".")
    numbered = next((at for at, each in enumerate(parts) if each.isdigit()), None)
    block = f" of block {parts[numbered]}" if numbered is not None else ""
    return f"{what}{block}{f' ({parts[-1]})' if what == 'feed-forward' else ''}"


def chosen_of(sets: Sequence[Sequence[Unit]], copies: int, heads: int, parts: int) -> dict[int, Tensor]:
    """Return `Part.ablated`'s choice for runs that ablate these sets of units, `copies` of each in a row."""
    found = {unit.layer: torch.zeros(len(sets), parts, heads, dtype=torch.bool) for own in sets for unit in own}
    for run, own in enumerate(sets):
        for unit in own:
            number = slice(None) if unit.part is None else unit.part
            found[unit.layer][run, number, slice(None) if unit.head is None else unit.head] = True
    return {layer: where.repeat_interleave(copies, dim=0) for layer, where in found.items()}


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
        self.reuse = can_start_at_layer(examples.model, examples.batch.rows([0]))
        self.means = self._means() if by == "mean" else {}
        self.count = len(examples.measures)
        self.donated, self.donors = examples.donors(seed)

    def single(self, units: Sequence[Unit]) -> tuple[np.ndarray, np.ndarray]:
        """Return measures of the plain run, (examples, measures), and of single ablations, (units, examples,
        measures)."""
        examples = self.examples
        plain = np.empty((len(examples), self.count))
        found = np.empty((len(units), *plain.shape))
        layers = {unit.layer: [n for n, other in enumerate(units) if other.layer == unit.layer] for unit in units}

        def measure(rows: list[int]) -> Columns:
            base = PlainRun(examples.model, examples.batch.rows(rows), reuse=self.reuse)
            own = np.empty((len(units), len(rows), self.count))
            values = self._values(rows)
            for layer, numbers in layers.items():
                for chosen in self._chunks(numbers, rows):
                    sets, whole = [[units[number]] for number in chosen], self.part.what in OUTSIDE
                    own[chosen] = self._run(rows, sets, values, None if whole else base, layer)
            return {"plain": examples.measured(base.logits, rows), "single": own}

        what = f"examples, {len(units)} ablations each"
        for rows, part in over(examples.model, examples.batches(), measure, provenance=self.provenance, what=what):
            plain[rows], found[:, rows] = part["plain"], part["single"]
        return plain, found

    def together(self, sets: Sequence[Sequence[Unit]], used: Sequence[int]) -> np.ndarray:
        """Return the measures (sets, used, measures) of these examples with every unit of a set ablated."""
        found = np.empty((len(sets), len(used), self.count))
        place = {row: number for number, row in enumerate(used)}

        def measure(rows: list[int]) -> Columns:
            own, values = np.empty((len(sets), len(rows), self.count)), self._values(rows)
            for chosen in self._chunks(range(len(sets)), rows):
                own[chosen] = self._run(rows, [sets[number] for number in chosen], values)
            return {"together": own}

        what, batches = f"examples, {len(sets)} sets ablated together", self.examples.batches(used)
        for rows, part in over(self.examples.model, batches, measure, provenance=self.provenance, what=what):
            found[:, [place[row] for row in rows]] = part["together"]
        return found

    def written(self, result: Ablation, prompts: Sequence[Any] | None, tokens: int) -> tuple[EditedText, ...]:
        """Return what is written after prompts without ablation, and with the most harmful unit, and all that can go
        alone, ablated."""
        model, first = self.examples.model, self.examples.batch.rows([0])
        given = [one_text(model, prompt) for prompt in prompts or ()]
        ids = [batch.input_ids[0].tolist() for batch in given] or [
            first.input_ids[0, : -(-first.lengths[0] // 2)].tolist()
        ]
        sets = {result.units[result.ranked[0]].name: [result.units[result.ranked[0]]]}
        if result.can_go:
            sets[f"all {len(result.can_go)} that can go"] = [result.units[number] for number in result.can_go]
        edits = {
            f"without {name}": [
                while_writing(edit, prompt=True)
                for edit in self.part.ablated(self.means, chosen_of([own], len(ids), self.heads, self.parts))
            ]
            for name, own in sets.items()
        }
        return edited_texts(model, model.encode(ids=ids), edits, tokens)

    def _chunks(self, numbers: Sequence[int], rows: Sequence[int]) -> Iterator[list[int]]:
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
        layer: int | None = None,
    ) -> np.ndarray:
        """Return measures (sets, rows, measures); with `base`, these rows' plain run, runs start from it at `layer`."""
        copies = len(sets)
        values = {key: value.repeat(copies, *[1] * (value.ndim - 1)) for key, value in values.items()}
        own = {key: value for key, value in values.items() if base is None or key[0] == layer}
        edits = self.part.ablated(own or self.means, chosen_of(sets, len(rows), self.heads, self.parts))
        batch = self.examples.batch.rows(list(rows) * copies)
        if base is None:
            logits = self.examples.model.run(batch, edits=edits).logits
        else:
            logits = base.again(layer, edits, copies)
        return self.examples.measured(logits, list(rows) * copies).reshape(copies, len(rows), self.count)

    def _means(self) -> dict[Key, Tensor]:
        """Return the mean of every part's value over all real tokens, (1, 1, …)."""
        sums: dict[Key, Any] = {}
        for rows in self.examples.batches():
            mask = self.examples.batch.rows(rows).mask
            for key, value in self._recorded(rows, self.examples.batch).items():
                sums[key] = sums.get(key, 0) + value[mask].double().sum(0)
        return {key: (value / sum(self.examples.batch.lengths))[None, None] for key, value in sums.items()}

    def _values(self, rows: Sequence[int]) -> dict[Key, Tensor]:
        """Return the values put into these examples: with resampling the donor's at the same share of its length."""
        if self.by != "resample":
            return {}
        donors = self.donors[list(rows)].tolist()
        kept, lengths = self._recorded(donors, self.donated), self.examples.batch.lengths
        longest = max(lengths[row] for row in rows)
        steps = torch.arange(longest)
        last = [(max(1, lengths[row] - 1), self.donated.lengths[donor] - 1) for row, donor in zip(rows, donors)]
        places = torch.stack([(steps * there / here).round().long().clamp(max=there) for here, there in last])
        index = torch.arange(len(rows)).unsqueeze(1)
        return {key: value[index, places.to(value.device)] for key, value in kept.items()}

    def _recorded(self, rows: Sequence[int], batch: Batch) -> dict[Key, Tensor]:
        kept: dict[Key, Tensor] = {}
        self.examples.model.run(batch.rows(rows), edits=self.part.recorded(kept), last_only=True)
        return kept
