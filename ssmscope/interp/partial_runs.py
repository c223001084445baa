"""Runs that differ from a layer on and reuse the plain run's values below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from ssmscope.api.options import note
from ssmscope.core.attention_layers import attention_numbers
from ssmscope.core.edits import Edit, blocks_of, edited, in_words
from ssmscope.core.encoding import Batch
from ssmscope.core.intercept import observe, override_forward
from ssmscope.core.model import Model
from ssmscope.core.trace import States, gathered

RELATIVE_TOLERANCE, TOLERANCE = 1e-4, 1e-5
"""Tolerances within which a run that starts at a layer gives the logits of the whole run."""


class PlainRun:
    """Plain run of a batch with its `logits`; if `reuse`, edited runs of its rows start from its blocks. With
    `states` all of them continue a run, with `last_only` their logits are those at the last positions."""

    def __init__(
        self, model: Model, batch: Batch, states: States | None = None, *, reuse: bool = True, last_only: bool = False
    ) -> None:
        self.model, self.batch, self.states, self.reuse, self.last_only = model, batch, states, reuse, last_only
        self.stack, places = block_list(model)
        self.places = dict(zip(model.layer_numbers, places))
        self._kept: dict[int, Any] = {}
        keep = [(block, lambda part, output: self._kept.update({id(part): output})) for block in self.stack]
        with observe(after=keep):
            self.logits = self._forward(batch, states)

    def again(
        self,
        layer: int | None = None,
        edits: Sequence[Edit] | Edit = (),
        copies: int = 1,
        states: States | None = None,
        first: int | None = None,
    ) -> Tensor:
        """Return the logits of `copies` of the batch, in turn, in a run that differs from the plain one from the
        state-space layer of this number on; None: from the first, or the block in place `first`."""
        if first is None and self.reuse:
            first = next(iter(self.places.values())) if layer is None else self.places[layer]
        rows = list(range(len(self.batch.tokens))) * copies
        if states is None and self.states is not None:
            states = gathered(self.states, torch.tensor(rows))
        with edited(self.model, edits), self._below(first, rows) if self.reuse and first else nullcontext():
            return self._forward(self.batch.rows(rows), states)

    def _forward(self, batch: Batch, states: States | None) -> Tensor:
        with torch.no_grad(), self.model.running(mask=batch.mask, states=states):
            return self.model.forward(batch, last_only=self.last_only)

    @contextmanager
    def _below(self, first: int, rows: Sequence[int]) -> Iterator[None]:
        """Skip, within the context, the blocks before one; `rows` of the batch run together."""
        output = gathered(self._kept[id(self.stack[first - 1])], torch.tensor(rows))
        with override_forward([(block, lambda below, *args, **kwargs: output) for block in self.stack[:first]]):
            yield


def note_on_attention(model: Model, what: str) -> None:
    """Note that a hybrid's layers of softmax attention are not patched, or ablated."""
    if numbers := attention_numbers(model.module):
        layers = f"layer{'s' * (len(numbers) > 1)} {in_words(numbers)}"
        note(f"this is of state-space layers alone; softmax attention in {layers} is not {what}")


def can_start_at_layer(model: Model, batch: Batch) -> bool:
    """Return True if a model's layers can be run from the residual stream alone: if they stand in one list of blocks,
    and the last layer, run so, gives the logits of the whole run. A module of one's own runs rows of each length by
    themselves, unless it says which logits are alike with padding."""
    if model.gives not in getattr(model.module, "ignores_padding", (model.gives,)):
        return False
    plain = PlainRun(model, batch)
    if not plain.places or any(getattr(mixer, "before", ()) for mixer in model.mixers):
        return False
    return bool(torch.allclose(plain.again(model.layer_numbers[-1]), plain.logits, RELATIVE_TOLERANCE, TOLERANCE))


def block_list(model: Model) -> tuple[list[nn.Module], list[int]]:
    """Return the list of blocks that contains the state-space layers, and the place of each; empty without one."""
    named = dict(model.module.named_modules())
    names = {id(part): name for name, part in named.items()}
    split = [names[id(block)].rpartition(".") for block in blocks_of(model.module)]
    homes = {home for home, _, _ in split}
    if len(homes) != 1 or not isinstance(stack := named[homes.pop()], nn.ModuleList):
        return [], []
    return list(stack), [int(place) for _, _, place in split]
