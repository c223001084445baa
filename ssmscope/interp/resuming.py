"""Runs that differ from a layer on and reuse the plain run's values below it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ssmscope.core.attention_layers import attention_modules
from ssmscope.core.edits import blocks_of, recorded
from ssmscope.core.encoding import Batch
from ssmscope.core.intercept import observe, override_forward
from ssmscope.core.model import Model


class PlainRun:
    """Plain run of a batch with its `logits`, from whose blocks other runs of its rows start."""

    def __init__(self, model: Model, batch: Batch) -> None:
        self.model, self.batch = model, batch
        self.stack, self.places = _stack(model)
        self._kept: dict[int, Any] = {}
        keep = [(block, lambda part, output: self._kept.update({id(part): output})) for block in self.stack]
        with observe(after=keep), torch.no_grad(), model.running(mask=batch.mask):
            self.logits = model.forward(batch)

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
        with override_forward(handlers):
            yield


def resumes(model: Model, batch: Batch) -> bool:
    """Return True if a model's layers can be run from the residual stream alone: if they stand in one list of blocks,
    and the last layer, run so, gives the logits of the whole run."""
    plain = PlainRun(model, batch)
    if not plain.places or any(getattr(mixer, "before", ()) for mixer in model.mixers):
        return False
    with plain.below(model.num_layers - 1, range(len(batch.tokens))), torch.no_grad(), model.running(mask=batch.mask):
        return bool(torch.allclose(model.forward(batch), plain.logits, rtol=1e-4, atol=1e-5))


class JoiningRun:
    """Run of one text that further rows join at the layer from which on they differ from it. It `works` if the model's
    layers are in one list of blocks that read only the stream, and rows that join them have the logits of the whole
    run."""

    def __init__(self, model: Model, batch: Batch) -> None:
        self.model, self.blocks = model, blocks_of(model.module)
        self._entering: dict[int, Tensor] = {}
        places = _stack(model)[1]
        reads_others = bool(attention_modules(model.module)) or any(getattr(m, "before", ()) for m in model.mixers)
        self.works = len(set(places)) == model.num_layers and not reads_others
        if self.works:
            length, layers = batch.input_ids.shape[1], range(model.num_layers)
            ends = [length] * model.num_layers + [max(1, length - 1)]
            begins = [0] * len(ends)
            edit = recorded("residual", self._entering)
            plain = model.run(token_windows(batch, [0, 0], [0, 0], ends[-2:]), edits=edit, last_only=True).logits
            rows = token_windows(batch, begins, begins, ends)
            with self.rows([*layers, layers[-1]], begins), torch.no_grad():
                with model.running(mask=torch.ones_like(rows.mask)):
                    found = model.forward(rows, last_only=True, checked=False)
            expected = plain[[0] * model.num_layers + [1]]
            self.works = found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5)

    def counts(self, layers: Sequence[int]) -> list[int]:
        """Return the number of rows that each layer runs, out of rows that join at these layers, which are sorted."""
        return [max(1, bisect_right(layers, layer)) for layer in range(self.model.num_layers)]

    @property
    def width(self) -> int:
        """Width of the stream, where it `works`."""
        return self._entering[0].shape[-1]

    @contextmanager
    def rows(self, layers: Sequence[int], begins: Sequence[int]) -> Iterator[None]:
        """Within the context row i of a run, of the text from token `begins[i]` on, joins at layer `layers[i]`, which
        are sorted; the first row is run in all layers."""
        stream = self._entering[0]
        at = torch.tensor(begins)[:, None] + torch.arange(stream.shape[1] - min(begins))
        at = at.clamp(max=stream.shape[1] - 1).to(stream.device)
        counts = enumerate(zip(self.blocks, self.counts(layers)))
        with observe(before=[(block, partial(self._enter, layer, at[:count])) for layer, (block, count) in counts]):
            yield

    def _enter(self, layer: int, at: Tensor, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the block's arguments with the stream of so many rows, (rows, length) positions `at` of the text."""
        stream = args[0] if args else kwargs["hidden_states"]
        stream = torch.cat([stream[: len(at)], self._entering[layer][0][at[len(stream) :]]])
        return ((stream, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": stream})


def token_windows(batch: Batch, rows: Sequence[int], begins: Sequence[int], ends: Sequence[int]) -> Batch:
    """Return the tokens begin ≤ t < end of these rows of texts of one length, padded on the right."""
    first, last = torch.tensor(begins)[:, None], torch.tensor(ends)[:, None]
    at = first + torch.arange(int((last - first).max()))
    chosen, device = torch.tensor(rows)[:, None], batch.mask.device
    spans = list(zip(rows, begins, ends))
    return Batch(
        batch.input_ids[chosen.to(device), at.clamp(max=batch.input_ids.shape[1] - 1).to(device)],
        (at < last).to(device),
        tuple(batch.tokens[row][begin:end] for row, begin, end in spans),
        tuple(batch.words[row][begin:end] for row, begin, end in spans),
    )


def _stack(model: Model) -> tuple[list[nn.Module], list[int]]:
    """Return the list of blocks that contains the state-space layers, and the place of each; empty without one."""
    named = dict(model.module.named_modules())
    names = {id(part): name for name, part in named.items()}
    split = [names[id(block)].rpartition(".") for block in blocks_of(model.module)]
    homes = {home for home, _, _ in split}
    if len(homes) != 1 or not isinstance(stack := named[homes.pop()], nn.ModuleList):
        return [], []
    return list(stack), [int(place) for _, _, place in split]


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply a change to every tensor that a block returned."""
    if isinstance(value, Tensor):
        return change(value)
    return tuple(_mapped(each, change) for each in value) if isinstance(value, tuple) else value
