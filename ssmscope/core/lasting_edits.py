"""Edits of a model that writes: when an edit acts, and edits of the memory that make sense for many tokens.

An edit given to `Model.generate` as it is acts in the run of the prompt, where its positions count; what it does to the
state is felt in every token after that. `while_writing` makes it act in the runs that read written tokens, in all, in
some, or where a condition holds:

    clamped = clamped_state(direction, 3.0, layers=[4])
    model.generate("Once", edits=[clamped, while_writing(clamped, start=5)])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from ssmscope.core.edits import Edit, Site, digest, new_state
from ssmscope.core.ends import Written
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.errors import InputError, check_whole
from ssmscope.ops import DeltaRecurrence, Recurrence


@dataclass(frozen=True, eq=False)
class LastingEdit:
    """Edit with the runs in which it acts while a model writes; see `while_writing`."""

    edit: Edit
    start: int = 0
    stop: int | None = None
    when: Callable[[Written], bool] | None = None
    prompt: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.edit, Edit):
            raise InputError(f"a {type(self.edit).__name__} was given as an edit; give an Edit, e.g. clamped_state(…)")
        check_whole(0, start=self.start)
        if self.stop is not None:
            check_whole(0, stop=self.stop)
        if self.edit.place == "state" and self.edit.after != -1:
            said = f"{self.edit.name}: a model that writes reads one token in each run, after which its state is edited"
            raise InputError(f"{said}: give after=-1")

    def acts(self, token: Written) -> bool:
        """Return True if the edit acts in the run that reads this token."""
        within = self.start <= token.number and (self.stop is None or token.number < self.stop)
        return within and (self.when is None or bool(self.when(token)))

    def describe(self) -> dict[str, Any]:
        """Return the edit and its time as plain values, for the provenance of a result."""
        when = None if self.when is None else getattr(self.when, "__qualname__", type(self.when).__name__)
        time = {"start": self.start, "stop": self.stop, "when": when, "prompt": self.prompt}
        return {**self.edit.describe(), "while_writing": time}


def while_writing(
    edit: Edit,
    *,
    start: int = 0,
    stop: int | None = None,
    when: Callable[[Written], bool] | None = None,
    prompt: bool = False,
) -> LastingEdit:
    """Make an edit act in the runs that read written tokens: in each, one token long, it finds position 0 alone.

    Args:
        start: number of the first written token, from 0, in whose run it acts.
        stop: number of the first one after it in whose run it no longer acts.
        when: condition on the written token that the run reads, see `Written`, decided for each text by itself.
        prompt: it acts in the prompt's run, too.

    Raises InputError for an edit of a state after another token than each run's last, −1.
    """
    return LastingEdit(edit, start, stop, when, prompt)


def clamped_state(
    direction: Tensor,
    value: float,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    recurrence: int = 0,
    after: int = -1,
) -> Edit:
    """Set the component of each head's state along `direction`, (width, state) or (heads, width, state), to `value`:
    H + (value − ⟨H, d⟩) d for the direction d of norm 1 in every head."""
    if not bool((direction.flatten(-2).norm(dim=-1) > 0).all()):
        raise InputError("the direction to clamp a state along is zero in some head; give it a length")

    def change(state: LayerState, _: Site) -> LayerState:
        H = state.ssm[recurrence]
        unit = direction.to(H) / direction.to(H).flatten(-2).norm(dim=-1)[..., None, None]
        along = (H * unit).sum((-2, -1), keepdim=True)
        changed = torch.where(_chosen(heads, H.shape[1], H)[:, None, None], H + (value - along) * unit, H)
        return replace(state, ssm=(*state.ssm[:recurrence], changed, *state.ssm[recurrence + 1 :]))

    options = {"value": value, "heads": heads and list(heads), "recurrence": recurrence}
    edit = new_state(after, change, layers=layers, name="state clamped")
    return replace(edit, options=options, key=digest([layers and list(layers), options, after], [direction]))


def held_state(*, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None) -> Edit:
    """Keep the states of some heads, by default all, as they are: nothing is forgotten, and nothing written."""
    return _of_terms("state held", partial(_held, heads=heads), layers, {"heads": heads and list(heads)})


def _held(r: Recurrence, _: int, __: Site, *, heads: Sequence[int] | None) -> Recurrence:
    """Return a recurrence with a_t = 1, which writes nothing, in these heads."""
    own = _chosen(heads, r.shape[2], r.x)
    if isinstance(r, DeltaRecurrence):
        return replace(r, log_a=r.log_a.masked_fill(own[:, None], 0), beta=r.beta.masked_fill(own, 0))
    delta = (torch.ones_like(r.x[..., 0]) if r.delta is None else r.delta).masked_fill(own, 0)
    return replace(r, delta=delta, log_a=None if r.log_a is None else r.log_a.masked_fill(own[:, None], 0))


def frozen_decays(
    decays: float | Mapping[int, Sequence[Tensor]],
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
) -> Edit:
    """Replace the decays a_t of some heads, by default all, by constants: one number from 0 to 1, or by layer a tensor
    for each recurrence, (heads, state) or (heads, 1). What is written stays; a delta rule still removes what it reads.
    """
    given = decays if isinstance(decays, Mapping) else {}
    values = [decay for each in given.values() for decay in each] if given else [torch.tensor([decays])]
    if any(bool((value < 0).any() | (value > 1).any()) for value in values):
        raise InputError("decays to freeze at are outside 0 to 1")
    own = tuple(given) if given and layers is None else layers
    options = {"heads": heads and list(heads)}
    return _of_terms("decays frozen", partial(_frozen, decays=decays, heads=heads), own, options, values)


def _frozen(r: Recurrence, number: int, site: Site, *, decays: Any, heads: Sequence[int] | None) -> Recurrence:
    value = decays[site.layer][number] if isinstance(decays, Mapping) else torch.tensor([[decays]])
    constant = value.to(r.x).clamp(min=torch.finfo(r.x.dtype).tiny).log()
    log_a = r.log_a if isinstance(r, DeltaRecurrence) else r.log_decay()
    log_a = torch.where(_chosen(heads, r.shape[2], r.x)[:, None], constant, log_a)
    return replace(r, A=None, log_a=log_a, expected=False)


def _of_terms(
    name: str,
    each: Callable[[Recurrence, int, Site], Recurrence],
    layers: Sequence[int] | None,
    options: Mapping[str, Any],
    values: Sequence[Tensor] = (),
) -> Edit:
    def change(layer: LayerTrace, site: Site) -> LayerTrace:
        return replace(layer, recurrences=tuple(each(r, number, site) for number, r in enumerate(layer.recurrences)))

    own = None if layers is None else tuple(layers)
    return Edit(name, "terms", change, own, options=options, key=digest([name, own, dict(options)], values))


def _chosen(heads: Sequence[int] | None, count: int, like: Tensor) -> Tensor:
    """Return a mask of these heads, (count,) bool; all without `heads`."""
    if heads is None:
        return torch.ones(count, dtype=torch.bool, device=like.device)
    absent = [head for head in heads if not 0 <= head < count]
    if absent:
        raise InputError(f"there is no head {absent[0]}; the layer has the heads 0 to {count - 1}")
    return torch.zeros(count, dtype=torch.bool, device=like.device).index_fill(0, like.new_tensor(heads).long(), True)
