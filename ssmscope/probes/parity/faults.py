"""Likely faults behind a difference: each is put into the model, and the one that gives the other runtime's numbers is
named. No fault is guessed from sizes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor
from ssmscope import ops
from ssmscope.core.edits import Edit, Site
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.core.trace import LayerTrace, tensors
from ssmscope.ops import DeltaRecurrence, Recurrence
from ssmscope.ops.recurrence import by_head
from ssmscope.probes.parity.measure import Case
from ssmscope.probes.parity.result import Compared
from ssmscope.probes.states.files import recorded_run, tensor_names

MAX_BOUNDARIES = 64
"""Number of places at which a convolution's lost tail is looked for."""
MAX_HEADS = 4096
"""Number of heads among which swapped ones are looked for."""
NARROW = (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16)
"""Dtypes in which a state may have been kept, narrowest first."""


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


def compared(
    model: Model, batch: Batch, rows: Sequence[tuple[int, int]], given: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[tuple[Compared, ...], str]:
    """Return every tensor of a file with its error, and the likely fault behind the first that differs."""
    case = Case(model, batch, rows, given, dtype)
    first = next((name for name in case.names if case.over[name]), "")
    return case.tensors(), next(explanations(case, first), "") if first.startswith("layers.") else ""


def explanations(at: Case, tensor: str) -> Iterator[str]:
    """Yield the faults that explain the file's numbers, in words, the likeliest first; `tensor` is the first that
    differs."""
    prefix, index = ".".join(tensor.split(".")[:2]) + ".", at.model.layer_numbers.index(int(tensor.split(".")[1]))
    layers, given = at.model.trace(at.batch).layers, at.given[tensor]
    if not bool(given.isfinite().all()):
        yield "it overflowed: the file has NaN or infinite numbers there"
    states = [name for name in at.exact if name.startswith(f"{prefix}state.") and name in at.given]
    if tensor in states:
        kept = _kept_in(given, at.dtype)
        if kept is not None:
            yield f"the state is kept in {str(kept).removeprefix('torch.')}"
        earlier = [(text, max(position - 1, 0)) for text, position in at.rows]
        late = recorded_run(at.model, at.batch, earlier, ("states",))
        first = torch.tensor([position == 0 for _, position in at.rows])
        before = {name: late[name].where(~first.view(-1, *[1] * (late[name].ndim - 1)), 0) for name in states}
        if at.fits(before, prefix):
            yield "the state is one token late: it lacks the row's last token"
        swapped = _swapped(given, at.exact[tensor], at.allowed[tensor])
        if swapped is not None:
            yield f"heads are swapped: head {swapped[0]} has the state of head {swapped[1]}"
    tried = [(index, said, change) for said, change in TERMS.items()]
    if index and not tensor.endswith(".output"):  # What the layer before does wrong after its state.
        tried.append((index - 1, f"D is forgotten in layer {at.model.layer_numbers[index - 1]}", without_skip))
    for layer, said, change in tried:
        with suppress(ValueError):  # A family that compares its recurrences cannot have every fault.
            if any(change(r) is not None for r in layers[layer].recurrences):
                if at.fits(at.run(fault_of_terms(change, at.model.layer_numbers[layer])), prefix):
                    yield said
    rows = at.over[tensor] if tensor.startswith(prefix) and not tensor.endswith((".residual", ".output")) else []
    if states and rows:
        boundary = _lost_tail(at, prefix, index, rows)
        if boundary is not None:
            yield f"the convolution's tail is lost before token {boundary}: where a run continued, it began with zeros"
        if tensor in states and _carried(layers[index], at, states, rows, at.allowed[tensor]):
            yield (
                "something is read before the text: a mask of left padding is ignored, or the state of another text is "
                "not cleared"
            )


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


def _lost_tail(at: Case, prefix: str, index: int, differs: Sequence[int]) -> int | None:
    """Return the token from which on a layer's convolution began anew, for the first row that differs."""
    row, model = differs[0], at.model
    text, position = at.rows[row]
    ids = at.batch.input_ids[text, : position + 1].tolist()
    agree = [p for other, (t, p) in enumerate(at.rows) if t == text and p < position and other not in differs]
    start = max(agree, default=0) + 1
    for boundary in range(start, min(position + 1, start + MAX_BOUNDARIES)):
        states = list(model.run(model.encode(ids=ids[:boundary]), last_only=True).states)
        own = states[index]
        if own.conv is None:
            return None
        states[index] = replace(own, conv=torch.zeros_like(own.conv))
        after = model.run(model.encode(ids=ids[boundary:]), states, last_only=True).states
        if at.fits(dict(zip(tensor_names(model, after), (t.cpu() for t in tensors(after)))), prefix, row):
            return boundary
    return None


def _carried(layer: LayerTrace, at: Case, states: Sequence[str], differs: Sequence[int], allowed: float) -> bool:
    """Return True if the states' difference after a text's later rows is what the layer's own transitions leave of the
    difference after the row before: whatever is too much was there before the first row."""
    if len(states) != len(layer.recurrences):
        return False
    compared = False
    for row, ((text, position), (next_text, then)) in enumerate(pairwise(at.rows)):
        if next_text != text or position < layer.reach - 1:
            continue
        if row not in differs and row + 1 in differs:  # What was read before a text fades.
            return False
        for r, name in zip(layer.recurrences, states):
            exact = at.exact[name].double()
            error = at.given[name].double() - exact
            part = r.of_rows(text, text + 1).between(position + 1, then + 1)
            left = ops.scan(replace(part, x=torch.zeros_like(part.x)), error[row : row + 1].to(r.x)).state.cpu()
            if (left.double() - error[row + 1]).square().mean() > allowed**2 * exact.square().mean():
                return False
        compared |= row in differs
    return compared
