"""Terms of a mixer by road: those of one road, of one head, or of the taps of its convolution from another input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from ssmscope.core.mixers import Edits, adapter_for, computed_by, mixers, terms_of
from ssmscope.core.model import Model
from ssmscope.core.trace import LayerTrace
from ssmscope.errors import InputError, Unanswerable

TERMS = {"x": "x", "b": "B", "c": "C", "delta": "delta", "log_a": "decay", "beta": "beta", "e": "removed", "r": "along"}
"""Roads of a mixer by the term of its recurrences."""
GATE, REST, TAP = "gate", "rest", "tap "
"""Roads of the output gate, and of all that an architecture computes of its input besides these."""


def roads_of(mixer: nn.Module, layer: LayerTrace, *, convolved: bool = False) -> tuple[str, ...]:
    """Return the roads of a mixer by which another input, or what its convolution reads of one, changes its output."""
    noise = torch.randn(layer.u.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(layer.u)
    # An activation may be shut for one of them.
    streams = (layer.u.roll(1, 1) * 1.5, layer.u + layer.u.abs().max() * noise)
    every = [dict.fromkeys(range(layer.reach), u) for u in streams] if convolved else []
    others = [with_taps(mixer, layer, u) for u in every] or [terms_of(mixer, u, layer.mask) for u in streams]
    output = adapter_for(mixer).output
    known = {road for r in layer.recurrences for term, road in TERMS.items() if getattr(r, term, None) is not None}
    roads = [road for road in (*TERMS.values(), GATE, REST) if road in known or road in (GATE, REST)]
    plain = output(mixer, layer)
    changes = lambda road, other: not torch.equal(output(mixer, with_road(layer, other, road)), plain)  # noqa: E731
    return tuple(road for road in roads if any(changes(road, other) for other in others))


def with_road(layer: LayerTrace, other: LayerTrace, road: str, head: int | None = None) -> LayerTrace:
    """Return a layer's terms with those of one road from its terms for another input, for one head if it is given."""
    if head is not None:
        layer, heads = _by_head(layer), layer.recurrences[0].x.shape[2]
        whole = with_road(layer, _by_head(other), road)
        taken: list[dict[str, Any]] = []
        for own, new in zip(layer.recurrences, whole.recurrences):
            pairs = {term: (getattr(own, term, None), getattr(new, term, None)) for term in TERMS}
            moved = {term: (a, b) for term, (a, b) in pairs.items() if a is not None and b is not None and a is not b}
            taken.append({term: _of_head(a, b, head, heads) for term, (a, b) in moved.items()})
        z = whole.z
        if z is not None and layer.z is not None and z is not layer.z:
            z = _of_head(layer.z.flatten(2), z.flatten(2), head, heads).view_as(z)
        swapped = tuple(replace(own, **each) for own, each in zip(whole.recurrences, taken))
        return replace(whole, recurrences=swapped, z=z)
    if road == GATE:
        return replace(layer, z=other.z)
    both = zip(layer.recurrences, other.recurrences)
    if road == REST:
        kept = [(own, new, [term for term in TERMS if getattr(own, term, None) is not None]) for own, new in both]
        swapped = tuple(replace(new, **{term: getattr(own, term) for term in terms}) for own, new, terms in kept)
        return replace(other, recurrences=swapped, z=layer.z)
    term = next(term for term, each in TERMS.items() if each == road)
    has = lambda r: getattr(r, term, None) is not None  # noqa: E731
    swapped = tuple(replace(own, **{term: getattr(new, term)}) if has(own) else own for own, new in both)
    return replace(layer, recurrences=swapped)


def _by_head(layer: LayerTrace) -> LayerTrace:
    """Return a layer's terms with those of a group repeated for each of its heads."""
    recurrences = []
    for own in layer.recurrences:
        heads, values = own.x.shape[2], {term: getattr(own, term, None) for term in TERMS}
        shared = {term: t for term, t in values.items() if t is not None and t.ndim > 3 and t.shape[2] < heads}
        every = {term: t.repeat_interleave(heads // t.shape[2], 2) for term, t in shared.items()}
        recurrences.append(replace(own, **every))
    return replace(layer, recurrences=tuple(recurrences))


def _of_head(own: Tensor, new: Tensor, head: int, heads: int) -> Tensor:
    """Return a term (batch, length, heads, …), or channels by head, with one head's from another."""
    at = torch.arange(heads, device=own.device) == head
    if own.shape[2] > heads:
        at = at.repeat_interleave(own.shape[2] // heads)
    return torch.where(at.view(-1, *[1] * (own.ndim - 3)), new, own)


def with_taps(mixer: nn.Module, layer: LayerTrace, streams: Mapping[int, Tensor]) -> LayerTrace:
    """Return a layer's terms where its convolution reads the token so far back from these other inputs.

    Of all tokens that position t reads, one stands at t − lag (mod taps): the terms at every `taps`-th position are
    those for a convolution's input that has the other run's values there.
    """
    convolutions = [part for child in mixer.children() for part in mixers(child)] or [mixer]

    def terms(u: Tensor, change: Callable[[int, Tensor], Tensor]) -> LayerTrace:
        changes = {id(part): partial(change, number) for number, part in enumerate(convolutions)}
        with computed_by(Edits(conv_inputs=changes)):
            return terms_of(mixer, u, layer.mask)

    read: dict[int, dict[int, Tensor]] = {}
    for lag, u in streams.items():
        own = read[lag] = {}
        terms(u, lambda number, value, own=own: own.setdefault(number, value))  # type: ignore[misc]
    found = layer
    for first in range(layer.reach):

        def mixed(number: int, value: Tensor, first: int = first) -> Tensor:
            value = value.clone()
            for lag, others in read.items():
                every = slice((first - lag) % layer.reach, None, layer.reach)
                value[:, every] = others[number][:, every]
            return value

        found = _at_positions(found, terms(layer.u, mixed), slice(first, None, layer.reach))
    return found


def _at_positions(layer: LayerTrace, other: LayerTrace, places: slice) -> LayerTrace:
    """Return a layer's terms with another's at some positions."""
    recurrences = []
    for own, new in zip(layer.recurrences, other.recurrences):
        taken = {}
        for term in TERMS:
            if (value := getattr(own, term, None)) is not None and value.shape[1] == layer.u.shape[1]:
                taken[term] = value.clone()
                taken[term][:, places] = getattr(new, term)[:, places]
        recurrences.append(replace(own, **taken))
    return replace(layer, recurrences=tuple(recurrences))


def heads_of(model: Model, mixer: nn.Module, layer: LayerTrace) -> tuple[int, nn.Module]:
    """Return the number of a mixer's heads, and the linear map at its end. Raise InputError if heads are single
    channels, Unanswerable if the map does not read them one after the other."""
    heads, width = layer.recurrences[0].x.shape[2:4]
    if width == 1:
        raise InputError(f"the heads of {model.name} are single channels; leave nodes=… out")
    out: Any = getattr(getattr(adapter_for(mixer), "FORM", None), "out", "out_proj")
    out = out(mixer, layer) if callable(out) else out
    last = dict(mixer.named_modules()).get(out)
    if len(layer.recurrences) > 1 or last is None or getattr(last, "in_features", 0) != heads * width:
        raise Unanswerable(f"what heads of {model.name} write does not add up to a mixer's output; leave nodes=… out")
    return int(heads), last
