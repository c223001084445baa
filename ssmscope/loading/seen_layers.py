"""Layers of a module in a run of it: what they are called with, and whether they compute what their adapters say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor, nn
from ssmscope.core.adapted import Adapted, check_adapted
from ssmscope.core.intercept import evaluating, observe
from ssmscope.core.mixers import adapter_for, arguments, mixers, positions, read_as
from ssmscope.errors import InputError
from ssmscope.layers.pairs import SHARES, pair

TRIAL_TOKENS, FEWER_TOKENS = 40, 9
"""Tokens of the example where none is given, and where a module cannot run on so many."""


class SeenLayers:
    """Some layers of a module in one run of it. Raises InputError if one runs several times, or not at all.

    Attributes:
        inputs: the first argument of each layer, by its path; none for layers without.
    """

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module], run: Callable[[], Any]) -> None:
        self.module, self.layers, self.run = module, layers, run
        self.name = type(module).__name__
        self.inputs: dict[str, Tensor] = {}
        paths = {id(part): path for path, part in module.named_modules()}
        runs: Counter[str] = Counter()

        def note(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            path, first = paths[id(part)], _first_argument(part, args, kwargs)
            runs[path] += 1
            if first is not None:
                self.inputs[path] = first.clone()  # Some write into their input.

        with observe(before=[(layer, note) for layer in layers]):
            run()
        self.paths = [paths[id(layer)] for layer in layers]
        for path in self.paths:
            if runs[path] != 1:
                often = f"{runs[path]} times for a text; once can be read" if runs[path] else "never: leave it out of"
                raise InputError(f"{self.name} runs its layer {path} {often}{' the module' * (not runs[path])}")

    def positions(self, wanted: int | None = None, of_tokens: bool = True) -> int:
        """Return how many positions the layers read. Raises InputError unless all read as many, or as are `wanted`,
        `of_tokens` or of numbers."""
        found = {path: self._flat(path, u).shape[1] for path, u in self.inputs.items() if u.ndim > 2}
        all_ = next(iter(found.values()), 0) if wanted is None else wanted
        for path, number in found.items():
            if number != all_:
                first = next((path for path, other in found.items() if other == all_), None)
                whose = "the input" if first is None else first
                said = f"the layer {path} of {self.name} reads {number} positions where {whose} has {all_}:"
                if wanted is not None and (of_tokens or all_ % number or len({*found.values()}) > 1):
                    raise InputError(f"{said} give layers=… the path of a part whose layers read {all_}")
                if wanted is not None:
                    said = f"{said} give windows of {all_ // number} steps as one step, (batch, {number}, numbers), and"
                    raise InputError(f"{said} inputs=…, a function that lays them out as the network reads them")
                raise InputError(f"{said} only layers that read as many are read together; give layers=… such a part")
        return all_

    def check(self, given: Tensor, run_another: Callable[[], Any]) -> None:
        """Check that the layers read the positions of what was given in their order, and that adapted ones compute
        what their adapters say. `run_another` runs the module on an input of which the last token, or step, is another.

        Raises InputError as `check_adapted`, and if the input of a layer changes, but not at its last position.
        """
        self.positions(given.shape[1], of_tokens=not given.is_floating_point())
        for layer, path in zip(self.layers, self.paths):
            check_layer(layer, path, self.inputs.get(path))
        for path, u in SeenLayers(self.module, self.layers, run_another).inputs.items():
            if u.ndim > 2 and u.shape == self.inputs[path].shape:
                moved = self._flat(path, (u != self.inputs[path]).to(u.dtype)).any(-1)
                if bool(moved.any()) and not bool(moved[:, -1].any()):
                    said = f"{self.name} hands the positions to its layer {path} in another order: put the layer, with"
                    raise InputError(f"{said} what orders them and orders them back, in a module, and adapt that")

    def find_pair(self) -> bool:
        """Have modules of two layers, one of which reads the reversed input of the other, read as one layer. Return
        True if there are such. Raises InputError if there is no module around both, or one that does not add them up.
        """
        for (one, u), (other, v) in combinations(self.inputs.items(), 2):
            if u.ndim != 3 or u.shape != v.shape or torch.equal(u, v) or not torch.equal(u.flip(1), v):
                continue
            path = ".".join(commonprefix([one.split("."), other.split(".")]))
            said = f"{self.name} runs its layer {other} on the reversed input of {one}"
            if not path:
                raise InputError(f"{said}: put both in a module of their own, and adapt that with both_ways=True")
            around = self.module.get_submodule(path)
            given, kind = SeenLayers(self.module, [around], self.run).inputs.get(path), type(around)
            for share in SHARES:
                adapter = pair(one.removeprefix(f"{path}."), other.removeprefix(f"{path}."), share)
                read_as(kind, adapter)
                try:
                    check_layer(around, path, given)
                    return True
                except InputError as error:
                    why = error
            read_as(kind, None)
            raise InputError(f"{said}, and {path} does not add both up ({why}): adapt {kind.__name__}") from why
        return False

    def _flat(self, path: str, u: Tensor) -> Tensor:
        return positions(self.module.get_submodule(path), u)


def _first_argument(part: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    names = arguments(part)
    first = args[0] if args else kwargs.get(names[0]) if names else None
    return first if isinstance(first, Tensor) else None


def check_layer(layer: nn.Module, path: str, u: Tensor | None) -> None:
    """Check an adapted layer on the input it had, None without one, as `check_adapted` does; others are known."""
    adapter, name = adapter_for(layer), f"{path} ({type(layer).__name__})"
    if not isinstance(adapter, Adapted):
        return
    if u is None or u.ndim < 3:
        said = f"{name} is not called with u (batch, length, width)"
        raise InputError(f"{said} as its first argument, as an adapted layer is")
    check_adapted(layer, adapter, u, name)


def check_in_library_model(module: Any) -> None:
    """Check the adapted layers within a transformers model on a run of some token ids. Raises InputError as
    `SeenLayers`."""
    found = [mixer for mixer in mixers(module) if isinstance(adapter_for(mixer), Adapted)]
    if not found:
        return
    table = module.get_input_embeddings().weight
    ids = torch.arange(1, 2 * TRIAL_TOKENS + 1, device=table.device).view(2, -1).remainder(len(table))
    with torch.no_grad(), evaluating(module):
        seen = SeenLayers(module, found, lambda: module(input_ids=ids, attention_mask=torch.ones_like(ids)))
        for layer, path in zip(found, seen.paths):
            check_layer(layer, path, seen.inputs.get(path))
