"""Parts of a layer that can be ablated: how to read them in a run, and how to replace their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from ssmscope.core.edits import Edit, Place, Site, blocks_of
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.ablate.result import Unit
from ssmscope.interp.interventions import check_heads

What = Literal["head", "layer", "recurrence", "convolution", "gate", "skip"]
PLACES: dict[str, Place] = {
    "head": "scans",
    "layer": "output",
    "recurrence": "scans",
    "convolution": "convolution",
    "gate": "terms",
    "skip": "scans",
}

Key = tuple[int, int]
"""Layer, and number of its recurrence or convolution."""


@dataclass(frozen=True, eq=False)
class Part:
    """One kind of part of a model's layers.

    Attributes:
        whole: the layers that are whole blocks, whose output has what entered them in it.
    """

    what: What
    whole: frozenset[int] = frozenset()

    def edits(self, change: Callable[[Key, Tensor], Tensor], layers: Sequence[int] | None = None) -> list[Edit]:
        """Return the edits that replace a part's value by what `change` returns for it.

        A value is (runs, length, heads, width) of a recurrence's output or its D x, else (runs, length, channels).
        """
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
            if self.what == "convolution":
                return change((layer, site.part), value)
            if self.what == "gate":
                return value if value.z is None else replace(value, z=change((layer, 0), value.z))
            if self.what == "skip":
                assert site.trace is not None
                terms = [_skip(scan.y, r) for scan, r in zip(value, site.trace.recurrences)]
                new = [None if t is None else change((layer, n), t) - t for n, t in enumerate(terms)]
                return tuple(scan if d is None else scan._replace(y=scan.y + d) for scan, d in zip(value, new))
            return tuple(scan._replace(y=change((layer, n), scan.y)) for n, scan in enumerate(value))

        found = [Edit(f"{self.what} ablated", PLACES[self.what], edited, own)]
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


def _skip(y: Tensor, recurrence: Any) -> Tensor | None:
    """Return D x of a recurrence, shaped as its output; None without D."""
    D = recurrence.D
    return None if D is None else (recurrence.x * (D if D.ndim == 2 else D.unsqueeze(-1))).to(y)


def part_of(model: Model, what: What) -> Part:
    """Return a kind of part of this model's layers."""
    names = {id(part): name for name, part in model.module.named_modules()}
    blocks = enumerate(zip(model.mixers, blocks_of(model.module)))
    own = {at for at, (mixer, block) in blocks if mixer is block and names[id(block)].rpartition(".")[2].isdigit()}
    return Part(what, frozenset(own) if what == "layer" else frozenset())


def units_of(model: Model, batch: Batch, part: Part) -> list[Unit]:
    """Return the units to ablate one after another.

    Raises:
        InputError: heads that are channels, or a part that no layer of the model has.
    """
    kept: dict[Key, Tensor] = {}
    model.run(batch, edits=part.recorded(kept), last_only=True)
    if not kept:
        lacks = {"convolution": "convolution", "gate": "output gate", "skip": "skip D x"}[part.what]
        raise InputError(f"the layers of {model.name} have no {lacks}; ablate another part")
    if part.what == "head":
        heads = {layer: value.shape[2] for (layer, _), value in kept.items()}
        check_heads(model, max(heads.values()), "ablate layers or another part")
        return [Unit(layer, head=head) for layer, count in sorted(heads.items()) for head in range(count)]
    if part.what != "recurrence":
        return [Unit(layer) for layer in sorted({layer for layer, _ in kept})]
    trace = model.trace(batch)
    several = {layer: trace.linearized[layer].parts for layer, number in kept if number}
    return [Unit(layer, number, several[layer][number] if layer in several else "") for layer, number in sorted(kept)]


def chosen_of(sets: Sequence[Sequence[Unit]], copies: int, heads: int, parts: int) -> dict[int, Tensor]:
    """Return `Part.ablated`'s choice for runs in which these sets of units are ablated, `copies` of each one after
    another.

    Args:
        heads, parts: the most that a layer has, of units that name some; else 1.
    """
    found = {unit.layer: torch.zeros(len(sets), parts, heads, dtype=torch.bool) for own in sets for unit in own}
    for run, own in enumerate(sets):
        for unit in own:
            number = slice(None) if unit.part is None else unit.part
            found[unit.layer][run, number, slice(None) if unit.head is None else unit.head] = True
    return {layer: where.repeat_interleave(copies, dim=0) for layer, where in found.items()}
