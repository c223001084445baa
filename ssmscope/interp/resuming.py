"""Runs of one batch that differ from a layer on: the blocks below it give what they gave in the plain run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ssmscope.edits import blocks_of
from ssmscope.encoding import Batch
from ssmscope.intercept import taken_over, watched
from ssmscope.model import Model


class Plain:
    """The plain run of a batch, from whose blocks other runs of its rows start.

    Attributes:
        logits: of the run.
    """

    def __init__(self, model: Model, batch: Batch) -> None:
        self.model, self.batch = model, batch
        self.stack, self.places = _stack(model)
        self._kept: dict[int, Any] = {}
        after = [(block, self._keep) for block in self.stack]
        with watched(after=after), torch.no_grad(), model.running(mask=batch.mask):
            self.logits = model.forward(batch)

    def _keep(self, block: nn.Module, output: Any) -> None:
        self._kept[id(block)] = output

    @contextmanager
    def below(self, layer: int, rows: Sequence[int]) -> Iterator[None]:
        """Within the context the blocks before a state-space layer are not run; `rows` of the batch run together."""
        first = self.places[layer] if self.places else 0
        if not first:
            yield
            return
        index = torch.as_tensor(list(rows), device=self.batch.mask.device)
        output = _mapped(self._kept[id(self.stack[first - 1])], lambda t: t.index_select(0, index))
        handlers = [(block, lambda below, *args, **kwargs: output) for block in self.stack[:first]]
        with taken_over(handlers):
            yield


def resumes(model: Model, batch: Batch) -> bool:
    """Whether a model's layers can be run from the stream that enters them alone: whether it stands in one list of
    blocks, and the last of its layers, run so, gives the logits of the whole run."""
    plain = Plain(model, batch)
    if not plain.places or any(getattr(mixer, "before", ()) for mixer in model.mixers):
        return False
    with plain.below(model.num_layers - 1, range(len(batch.tokens))), torch.no_grad(), model.running(mask=batch.mask):
        return bool(torch.allclose(model.forward(batch), plain.logits, rtol=1e-4, atol=1e-5))


def _stack(model: Model) -> tuple[list[nn.Module], list[int]]:
    """The list of blocks that the state-space layers stand in, and the place of each; empty where there is none."""
    named = dict(model.module.named_modules())
    names = {id(part): name for name, part in named.items()}
    split = [names[id(block)].rpartition(".") for block in blocks_of(model.module)]
    homes = {home for home, _, _ in split}
    if len(homes) != 1 or not isinstance(stack := named[homes.pop()], nn.ModuleList):
        return [], []
    return list(stack), [int(place) for _, _, place in split]


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a block returned with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    return tuple(_mapped(each, change) for each in value) if isinstance(value, tuple) else value
