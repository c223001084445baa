"""Likely faults behind a difference: each is put into the model, and the one that gives the other runtime's numbers is
named. No fault is guessed from sizes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ssmscope import ops
from ssmscope.core.edits import Edit, Site
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.core.take_trace import states_of_rows
from ssmscope.core.trace import LayerState, LayerTrace, tensors
from ssmscope.ops import DeltaRecurrence, Recurrence
from ssmscope.ops.recurrence import by_head
from ssmscope.probes.states.files import named_tensors, recorded_run, tensor_names

MAX_BOUNDARIES = 64
"""Number of places at which a convolution's lost tail is looked for."""
MAX_HEADS = 4096
"""Number of heads among which swapped ones are looked for."""
NARROW = (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16)
"""Dtypes in which a state may have been kept, narrowest first."""

Rows = Sequence[tuple[int, int]]


class Fits(Protocol):
    """Function that says whether tensors agree with the file's in the layer in question, in all rows or in one."""

    def __call__(self, tried: Mapping[str, Tensor], row: int | None = None) -> bool: ...


def without_decay(r: Recurrence) -> Recurrence:
    """Return a recurrence of which nothing decays, a_t = 1: A is forgotten."""
    log_a = torch.zeros_like(r.x[..., :1])
    return (
        replace(r, log_a=log_a) if isinstance(r, DeltaRecurrence) else replace(r, A=None, log_a=log_a, expected=False)
    )


def decayed_late(r: Recurrence) -> Recurrence | None:
    """Return a recurrence that decays after it writes, H_t = a_t (H_{t−1} + b_t x_tᵀ); None of one that removes
    several times."""
    if isinstance(r, DeltaRecurrence):
        if r.several > 1:
            return None
        (e, along), (b, c), a = r.removal(), r.by_head(), r.log_a.exp()
        return replace(r, b=a * b, c=c, e=e, r=along)
    if r.one_decay_per_head:
        a, log_a = r.log_decay().exp().squeeze(-1), r.log_decay()
        return replace(r, delta=a if r.delta is None else a * r.delta, A=None, log_a=log_a, expected=False)
    return replace(r, b=by_head(r.b, r.shape[2]) * r.log_decay().exp(), c=by_head(r.c, r.shape[2]))


def without_skip(r: Recurrence) -> Recurrence | None:
    """Return a recurrence whose D is forgotten; None of one without."""
    return None if r.D is None else replace(r, D=None)


def with_tiled_groups(r: Recurrence) -> Recurrence | None:
    """Return a recurrence whose head h reads group h mod groups in place of h // (heads / groups)."""
    heads, groups = r.shape[2], r.b.shape[2]
    if groups in (1, heads) or getattr(r, "e", None) is not None:
        return None
    share = heads // groups
    return replace(r, b=r.b.repeat(1, 1, share, 1), c=r.c.repeat(1, 1, share, 1))


TERMS: Mapping[str, Callable[[Recurrence], Recurrence | None]] = {
    "A is forgotten: the state does not decay": without_decay,
    "steps in the wrong order: the state decays after the write, not before": decayed_late,
    "groups are swapped: head h reads group h mod groups": with_tiled_groups,
    "D is forgotten: the output lacks D x": without_skip,
}
"""Faults of a layer's terms, by what is said of them."""


def fault_of_terms(change: Callable[[Recurrence], Recurrence | None], layer: int) -> Edit:
    """Return the edit that puts a fault into all recurrences of a layer that can have it."""

    def faulty(terms: LayerTrace, _: Site) -> LayerTrace:
        return replace(terms, recurrences=tuple(change(r) or r for r in terms.recurrences))

    return Edit(f"fault {change.__name__}", "terms", faulty, (layer,))


@dataclass(frozen=True)
class Suspect:
    """First difference, from which faults are looked for.

    Attributes:
        layer: index of the state-space layer; None for attention or the head.
        tensor: name of the tensor that differs first.
        rows: the file's rows, and `differs` those among them that do.
        parts: parts of the file.
        fits: True for tensors that agree with the file's in that layer.
        allowed: relative error that the file's dtype allows this tensor.
    """

    layer: int | None
    tensor: str
    rows: Rows
    differs: Sequence[int]
    parts: Sequence[str]
    fits: Fits
    allowed: float
    dtype: torch.dtype


def likely_fault(
    model: Model, batch: Batch, given: Mapping[str, Tensor], exact: Mapping[str, Tensor], at: Suspect
) -> str:
    """Return the first fault that explains the file's numbers, in words; "" if none does."""
    return next(_explanations(model, batch, given, exact, at), "")


def _explanations(
    model: Model, batch: Batch, given: Mapping[str, Tensor], exact: Mapping[str, Tensor], at: Suspect
) -> Iterator[str]:
    if at.layer is None:
        return
    number, layers = model.layer_numbers[at.layer], model.trace(batch).layers
    states = [name for name in exact if name.startswith(f"layers.{number}.state.") and name in given]
    if at.tensor in states:
        kept = _kept_in(given[at.tensor], at.dtype)
        if kept is not None:
            yield f"the state is kept in {str(kept).removeprefix('torch.')}"
        before = _states(model, batch, [(text, max(position - 1, 0)) for text, position in at.rows])
        first = torch.tensor([position == 0 for _, position in at.rows])
        late = {name: before[name].masked_fill(first.view(-1, *[1] * (before[name].ndim - 1)), 0) for name in states}
        if at.fits(late):
            yield "the state is one token late: it lacks the row's last token"
        swapped = _swapped(given[at.tensor], exact[at.tensor], at.allowed)
        if swapped is not None:
            yield f"heads are swapped: head {swapped[0]} has the state of head {swapped[1]}"
    tried = [(at.layer, said, change) for said, change in TERMS.items()]
    if at.layer and not at.tensor.endswith(".output"):  # What the layer before does wrong after its state.
        previous = model.layer_numbers[at.layer - 1]
        tried.append((at.layer - 1, f"D is forgotten in layer {previous}", without_skip))
    for layer, said, change in tried:
        with suppress(ValueError):  # A family that compares its recurrences cannot have every fault.
            if any(change(r) is not None for r in layers[layer].recurrences):
                if at.fits(recorded_run(model, batch, at.rows, at.parts, [fault_of_terms(change, layer)])):
                    yield said
    if states and at.differs:
        boundary = _lost_tail(model, batch, at)
        if boundary is not None:
            yield f"the convolution's tail is lost before token {boundary}: where a run continued, it began with zeros"
        if at.tensor in states and _carried(layers[at.layer], given, exact, at, states):
            yield (
                "something is read before the text: a mask of left padding is ignored, or the state of another text is "
                "not cleared"
            )


def _states(model: Model, batch: Batch, rows: Rows) -> dict[str, Tensor]:
    found = named_tensors(model, states_of_rows(model, batch, rows))
    return {name: value.detach().cpu() for name, value in found.items()}


def _kept_in(state: Tensor, dtype: torch.dtype) -> torch.dtype | None:
    """Return the narrowest dtype that holds every number of a state, if it is narrower than the runtime's."""
    for each in NARROW:
        narrower = torch.finfo(each).eps > torch.finfo(dtype).eps
        if narrower and bool((state.float().to(each).float() == state.float()).all()):
            return each
    return None


def _swapped(given: Tensor, exact: Tensor, allowed: float) -> tuple[int, int] | None:
    """Return the first head that has another head's state, if every head has one's, each once."""
    if given.ndim < 3 or not 1 < given.shape[1] <= MAX_HEADS:
        return None
    theirs, ours = (t.double().transpose(0, 1).flatten(1) for t in (given, exact))
    order = torch.cdist(theirs, ours).argmin(1)
    places = torch.arange(len(order))
    if torch.equal(order, places) or not torch.equal(order.sort().values, places):
        return None
    error = (theirs - ours[order]).square().mean().sqrt() / ours.square().mean().sqrt()
    first = int((order != places).int().argmax())
    return (first, int(order[first])) if float(error) <= allowed else None


def _lost_tail(model: Model, batch: Batch, at: Suspect) -> int | None:
    """Return the token from which on the layer's convolution began anew, for the first row that differs."""
    text, position = at.rows[at.differs[0]]
    ids = batch.input_ids[text, : position + 1].tolist()
    agree = [p for row, (t, p) in enumerate(at.rows) if t == text and p < position and row not in at.differs]
    start = max(agree, default=0) + 1
    for boundary in range(start, min(position + 1, start + MAX_BOUNDARIES)):
        before = model.run(model.encode(ids=ids[:boundary]), last_only=True).states
        own = before[at.layer or 0]
        if own.conv is None:
            return None
        cut: list[LayerState] = list(before)
        cut[at.layer or 0] = replace(own, conv=torch.zeros_like(own.conv))
        after = model.run(model.encode(ids=ids[boundary:]), cut, last_only=True).states
        found = dict(zip(tensor_names(model, after), (t.cpu() for t in tensors(after))))
        if at.fits(found, at.differs[0]):
            return boundary
    return None


def _carried(
    layer: LayerTrace, given: Mapping[str, Tensor], exact: Mapping[str, Tensor], at: Suspect, states: Sequence[str]
) -> bool:
    """Return True if the states' difference after a text's later rows is what the layer's own transitions leave of the
    difference after the row before: whatever is too much was there before the first row."""
    if len(states) != len(layer.recurrences):
        return False
    compared = False
    for row, (text, position) in enumerate(at.rows[:-1]):
        next_text, then = at.rows[row + 1]
        if next_text != text or position < layer.reach - 1:
            continue
        if row not in at.differs and row + 1 in at.differs:  # What was read before a text fades.
            return False
        for r, name in zip(layer.recurrences, states):
            scale, error = exact[name].double().square().mean().sqrt(), given[name].double() - exact[name].double()
            part = r.of_rows(text, text + 1).between(position + 1, then + 1)
            start = error[row : row + 1].to(r.x)
            left = ops.scan(replace(part, x=torch.zeros_like(part.x)), start).state
            if float((left.cpu().double() - error[row + 1]).square().mean().sqrt() / scale) > at.allowed:
                return False
        compared |= row in at.differs
    return compared
