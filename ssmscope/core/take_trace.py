"""Recording of a trace: one run of a model, whose layers are recomputed from their inputs on access."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from ssmscope import ops
from ssmscope.core.batching import by_length, tokens_at_once
from ssmscope.core.edits import edited, edits_of, recompute_terms
from ssmscope.core.encoding import Batch
from ssmscope.core.fingerprint import adapters, versions
from ssmscope.core.intercept import evaluating
from ssmscope.core.interface import Runs
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.mixers import linearize, memory_of, stored_weights
from ssmscope.core.trace import KeptStates, Layers, LayerTrace, States, Trace, gathered, joined, mapped
from ssmscope.errors import InputError

Look = Callable[[int, Sequence[int], LayerTrace], None]
"""Function of a layer's number, the rows that run together, and the layer's terms on them."""

TextsLike = str | Iterable[str] | Mapping[str, Any] | Batch | Trace
"""Input of analyses: a text, several, a chat's messages, a tokenizer's output, a batch (of ids or images too), or an
existing trace."""


def take_trace(
    model: Runs, batch: Batch, keep_inputs: bool | Sequence[int], retention: bool, visit: Look | None
) -> Trace:
    """Run the model on a batch and record what its layers compute; arguments and errors as `Model.trace`."""
    rows, length = batch.input_ids.shape
    found = model.mixers
    wanted = range(len(found) if keep_inputs else 0) if isinstance(keep_inputs, bool) else set(keep_inputs)
    absent = sorted(set(wanted) - set(range(len(found))))
    if absent:
        raise InputError(f"there is no layer {absent[0]}; {model.name} has the layers 0 to {len(found) - 1}")
    edits = edits_of(model.module)
    if any(edit.place == "state" for edit in edits):
        raise InputError("a run whose states are edited is in pieces and has no trace; edit other places, or run it")
    map_shape, device = (len(found), rows, length), model.device
    summed = torch.full(map_shape, torch.nan, dtype=torch.float32, device=device)
    inputs: list[Tensor | None] = [None] * len(found)
    answered: list[Tensor] = []
    parts = [*map(sorted, by_length(batch.lengths, tokens_at_once(model.device, width=model.width)))]
    for chosen in parts:
        part = batch.rows(chosen)
        places = torch.tensor(chosen, device=device)  # Moving them in each layer would wait for a GPU.

        def record(index: int, layer: LayerTrace, scans: tuple[ops.Scan, ...]) -> None:
            kept = [scan.retention for scan in scans if scan.retention is not None]
            if kept:
                values = layer.joined(kept)
                values = values if layer.mask is None else values.masked_fill(~layer.mask, torch.nan)
                summed[index, places, : values.shape[1]] = values.to(summed)  # noqa: B023
            if index in wanted and len(parts) == 1:
                inputs[index] = layer.u
            elif index in wanted:
                held = inputs[index]
                u = inputs[index] = layer.u.new_zeros(rows, length, layer.u.shape[-1]) if held is None else held
                u[places.to(u.device), : layer.u.shape[1]] = layer.u  # noqa: B023
            if visit is not None:
                visit(index, chosen, layer)  # noqa: B023

        with torch.no_grad(), model.running(mask=part.mask, retention=retention, visit=record):
            answered.append(model.forward(part, last_only=True, checked=False))
    weights = versions(stored_weights(model.module), adapters(model.module))
    answers = torch.cat(answered)[torch.tensor(sum(parts, []), device=device).argsort()]
    logits = (answers if model.gives == "nothing" else model.checked(answers)).float()

    def recompute(index: int) -> LayerTrace:
        u = inputs[index]
        if u is None:
            raise ValueError(f"this trace was taken without the input of layer {index}: see keep_inputs")
        _check_unchanged(model, index, weights)
        with torch.no_grad(), evaluating(model.module):
            return mapped(recompute_terms(model, edits, index, u, batch.mask), Tensor.detach)

    def freeze(index: int) -> LinearizedLayer:
        layer = recompute(index)
        with torch.no_grad(), evaluating(model.module):
            return mapped(linearize(found[index], layer), Tensor.detach)

    def rerun(at: Any) -> KeptStates:
        for index in range(len(found)):
            _check_unchanged(model, index, weights)
        inside = {edit.key for edit in edits_of(model.module)}
        left = [edit for edit in edits if edit.key not in inside]
        with edited(model, left) if left else nullcontext():
            return states_at(model, batch, at)

    shown = {name: getattr(batch, name) for name in ("input_ids", "mask", "tokens", "words", "spelled")}
    shown |= memory_of(model.module)
    return Trace(
        **shown,
        retention=summed,
        logits=logits,
        answers=model.answers_of(logits),
        source=model.source_of(weights),
        layers=Layers(len(found), recompute),
        linearized=Layers(len(found), freeze),
        pixels=model.images_of(batch),
        series=batch.values if model.reads == "series" else None,
        numbers=model.layer_numbers,
        rerun=rerun,
    )


def states_at(model: Runs, batch: Batch, at: int | str | Sequence[int | str]) -> KeptStates:
    """Return the states after tokens of a batch's texts; arguments and errors as `Trace.states`."""
    at = list(at) if isinstance(at, Iterable) and not isinstance(at, str) else [at]
    if not model.continues:
        said = f"{model.name} cannot continue from its states: a part that reads earlier tokens keeps none, or"
        raise InputError(f"{said} attention is neither eager nor sdpa")
    shortest = min(batch.lengths)
    outside = [each for each in at if each != "last" and not (isinstance(each, int) and 0 <= each < shortest)]
    if outside or not at:
        said = f"at is {outside[0]!r}" if outside else "at is empty"
        raise InputError(f"{said}; allowed are 0 to {shortest - 1}, positions that every text has, and 'last'")
    wanted = {(row, n - 1 if each == "last" else int(each)) for row, n in enumerate(batch.lengths) for each in at}
    return states_of_rows(model, batch, sorted(wanted))


def states_of_rows(model: Runs, batch: Batch, wanted: Sequence[tuple[int, int]]) -> KeptStates:
    """Return the states after these tokens, (text, position) each; every text runs from its beginning to there."""
    rows: list[tuple[int, int]] = []
    parts: list[States] = []
    for position in sorted({position for _, position in wanted}):
        own = [row for row, each in wanted if each == position]
        part, stop = batch.rows(own), position + 1
        values = None if part.values is None else part.values[:, :stop]
        cut = replace(part, input_ids=part.input_ids[:, :stop], mask=part.mask[:, :stop], values=values)
        parts.append(model.run(cut, last_only=True).states)
        rows += [(row, position) for row in own]
    states = gathered(joined(parts), torch.tensor([rows.index(row) for row in wanted]))
    return KeptStates(states, tuple(wanted), batch.input_ids, batch.mask, model.source_of())


def _check_unchanged(model: Runs, index: int, before: dict[str, int]) -> None:
    """Raise InputError if the weights that a layer reads have changed: its terms cannot be recomputed."""
    names = {id(part): f"{path}." if path else "" for path, part in model.module.named_modules()}
    mixer = model.mixers[index]
    for part in (mixer, *getattr(mixer, "before", ())):
        prefix = names[id(part)]
        weights = {prefix + name: value for name, value in stored_weights(part).items()}
        now = versions(weights, {(prefix + name).rstrip("."): value for name, value in adapters(part).items()})
        if any(before.get(name) != version for name, version in now.items()):
            said = f"the weights of layer {index} of {model.name} have changed since this trace was taken: its terms"
            raise InputError(f"{said} cannot be recomputed; take a new trace")


def as_batch(model: Runs | None, texts: TextsLike) -> Batch:
    """Return an analysis's input (a text, several, a batch, or the texts of a trace) as one batch. Raises InputError as
    `Model.encode`, without a model, and for a trace of images, which does not hold them."""
    model = _given(model, texts)
    if not isinstance(texts, Trace):
        return model.encode(texts)
    if model.channels is not None:
        raise InputError("a trace does not hold the images that it is of; give their batch")
    return Batch(texts.input_ids, texts.mask, texts.tokens, texts.words, spelled=texts.spelled).to(model.device)


def as_trace(model: Runs | None, texts: TextsLike, *, keep_inputs: bool | Sequence[int] = True) -> Trace:
    """Return an analysis's input as a trace. A trace is returned as it is and needs no model; anything else is run."""
    return texts if isinstance(texts, Trace) else _given(model, texts).trace(texts, keep_inputs=keep_inputs)


def _given(model: Runs | None, texts: TextsLike) -> Runs:
    if model is None:
        raise InputError(f"a {type(texts).__name__} was given without its model; give the model first")
    return model


def few_tokens(model: Runs, most: int = 4) -> Batch:
    """Return an input of at most so many tokens, to try a model on; of a model that reads whole images, an image."""
    if model.channels is not None:
        known = model.config.image_size or (getattr(model.config, "steps", 2),)
        tokens = math.prod(known)  # Learnt positions allow no other number.
        values = torch.linspace(0, 1, tokens * model.channels, dtype=torch.float32)
        return model.encode(values=values.view(tokens, model.channels))
    return model.encode(ids=list(range(min(most, model.vocabulary))))
