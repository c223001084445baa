"""Records of a run's state-space layers: `LayerTrace` for one layer, `Trace` for the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad
from ssmscope import ops
from ssmscope.core.linearized import LinearizedLayer
from ssmscope.core.tokenizing import Spelled
from ssmscope.errors import InputError, Unanswerable
from ssmscope.ops import survival
from ssmscope.outline import Outlined

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class LayerState(Outlined):
    """State from which a layer continues: `conv` (batch, taps − 1, channels), the last inputs of its convolution (None
    without one), and `ssm`, a final state (batch, heads, width, state) for each of its recurrences."""

    conv: Tensor | None
    ssm: tuple[Tensor, ...]


def last_inputs(
    x: Float[Tensor, "batch length channels"],
    taps: int,
    before: Float[Tensor, "batch before channels"] | None = None,
    mask: Bool[Tensor, "batch length"] | None = None,
) -> Float[Tensor, "batch before channels"]:
    """Return the last taps − 1 inputs of a convolution up to each row's last real position, after `before` or zeros."""
    before = before if before is not None else x.new_zeros(x.shape[0], taps - 1, x.shape[2])
    if mask is None and x.shape[1] == 1:  # Nothing to cut off, which would be kept in memory.
        return torch.cat([before[:, 1:].to(x.dtype), x], dim=1)
    x = torch.cat([before.to(x.dtype), x], dim=1)
    if mask is None:
        return x[:, x.shape[1] - (taps - 1) :]
    positions = torch.arange(mask.shape[1], device=x.device)
    last = (mask * (positions + 1)).amax(1)  # The number of positions before a row's continuation.
    index = last[:, None] + torch.arange(taps - 1, device=x.device)
    return x.gather(1, index[:, :, None].expand(-1, -1, x.shape[2]))


States = tuple[LayerState, ...]


Earlier = Sequence[LayerState] | None


def mapped(record: T, change: Callable[[Tensor], Tensor]) -> T:
    """Return a state, a layer's terms, or anything made of tensors, with `change` applied to every tensor."""
    again: Any = partial(mapped, change=change)
    if isinstance(record, Tensor):
        return change(record)  # type: ignore[return-value]
    if isinstance(record, tuple):
        return tuple(map(again, record))  # type: ignore[return-value]
    if isinstance(record, Mapping):
        return {name: again(value) for name, value in record.items()}  # type: ignore[return-value]
    if is_dataclass(record) and not isinstance(record, type):
        return replace(record, **{each.name: again(getattr(record, each.name)) for each in fields(record)})
    return record


def tensors(states: Any) -> list[Tensor]:
    found: list[Tensor] = []

    def keep(t: Tensor) -> Tensor:
        found.append(t)
        return t

    mapped(states, keep)
    return found


def moved(state: LayerState, device: torch.device) -> LayerState:
    """Return a layer's state on this device."""
    first = (*state.ssm, state.conv)[0]
    return state if first is None or first.device == device else mapped(state, lambda t: t.to(device))


def gathered(states: States, rows: Tensor) -> States:
    """Return the states of these rows, one or several times each."""
    return mapped(states, lambda t: t.index_select(0, rows.to(t.device)))


def joined(parts: Sequence[States]) -> States:
    """Return the states of several batches as those of one; shorter kept keys are padded."""
    if len(parts) == 1:
        return parts[0]
    columns = iter(list(zip(*map(tensors, parts))))
    return mapped(parts[0], lambda _: _stacked(next(columns))) if parts else ()


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    longest = max((t.shape[1] for t in rows if t.ndim > 1), default=0)
    return torch.cat([t if t.ndim == 1 else pad(t, (0, 0) * (t.ndim - 2) + (0, longest - t.shape[1])) for t in rows])


def check_rows(states: Earlier, texts: int) -> None:
    """Raise InputError if a run of so many texts is to continue from no states, or those of another number of rows."""
    if not (
        states is None or (isinstance(states, list | tuple) and all(isinstance(each, LayerState) for each in states))
    ):
        said = f"{type(states).__name__} was given as states"
        raise InputError(f"{said}; give those of a run, or of kept ones all, kept.states, or some, kept.of([0])")
    rows = {len(t) for t in tensors(tuple(states or ())[:1])} - {texts}
    if rows:
        raise InputError(f"the states have {rows.pop()} rows and {texts} texts continue from them; give a row for each")


def alone(state: LayerState) -> LayerState:
    """Return a state whose tensors are not parts of larger ones, which it would keep in memory."""
    return mapped(state, lambda t: t.clone() if t.untyped_storage().nbytes() > t.numel() * t.element_size() else t)


def size(states: States) -> int:
    return sum(t.numel() * t.element_size() for t in tensors(states))


@dataclass(frozen=True, eq=False)
class LayerTrace(Outlined):
    """Terms of one layer on one batch, recomputed from the mixer's input `u` (batch, length, model width) and weights.

    Attributes:
        recurrences: most layers have one.
        mask: True at real positions, (batch, length); None when all are. At padding the recurrences hold their state.
        conv_input: input of the causal convolution, (batch, length, channels); None without one.
        conv_tail: the taps − 1 inputs before the first position, where the run continued from a state.
        taps: mask of the inputs that the convolution reads at every position, (batch, length, taps) bool, its own
            first; None where it reads all, as in every run that is not edited.
        z: the output gate before its activation, (batch, length, channels); None without one.
        initial: each recurrence's state before the first position, learnt or carried over; None where they are zero.
        turn: (batch, length), the only recurrence that a token steps while the others hold; None where all step.
        reach: number of positions that a write depends on through convolutions and shifts: 1 without any.
        at: the position whose states the model answers from, where those are not the last ones.
        extras: further tensors of the architecture by the names of its paper, e.g. the KL of a stochastic gate.
    """

    u: Tensor
    recurrences: tuple[ops.Recurrence, ...]
    mask: Tensor | None = None
    conv_input: Tensor | None = None
    conv_tail: Tensor | None = None
    taps: Tensor | None = None
    z: Tensor | None = None
    initial: tuple[Tensor, ...] | None = None
    turn: Tensor | None = None
    reach: int = 1
    at: int | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def recurrence(self) -> ops.Recurrence:
        """Only recurrence of the layer. Raises ValueError when it has several."""
        if len(self.recurrences) != 1:
            raise ValueError(f"this layer has {len(self.recurrences)} recurrences: choose one of `recurrences`")
        return self.recurrences[0]

    @property
    def gate(self) -> Tensor:
        """The output gate `z` of a layer that has one."""
        assert self.z is not None
        return self.z

    def scan(self, state: LayerState | None = None, *, retention: bool = False) -> tuple[ops.Scan, ...]:
        """Run the layer's recurrences, from `state` when given; see `ops.scan_all`."""
        initial = state.ssm if state is not None else self.initial or (None,) * len(self.recurrences)
        return ops.scan_all(self.recurrences, initial, retention=retention)

    def state_after(self, scans: tuple[ops.Scan, ...]) -> LayerState:
        """Return the state from which a run continues: the last inputs of the convolution, and the final states."""
        conv = None if self.conv_input is None else last_inputs(self.conv_input, self.reach, self.conv_tail, self.mask)
        return LayerState(conv=conv, ssm=tuple(scan.state for scan in scans))

    def retention(self) -> Tensor:
        """Return the mean of a_t over states, heads and the layer's recurrences, (batch, length) (Baleen, Eq. 10).
        Where recurrences take turns it is that of the one that token t steps: holding the others is not its choice."""
        return self.joined([ops.retention(r) for r in self.recurrences])

    def survival(
        self, at: int | None = None, *, signed: bool = False, readable: bool = False, per_head: bool = False
    ) -> Tensor:
        """Return each position's share of the states after position `at`, (batch, length): `survival.shares`."""
        at = self.at if at is None else at
        how = {"signed": signed, "readable": readable, "per_head": per_head}
        return survival.shares(self.recurrences, initial=self.initial, at=at, **how)

    def half_lives(self, *, per_head: bool = False) -> Tensor:
        """Return the positions after which half of each writing is left: `survival.half_lives`."""
        return survival.half_lives(self.recurrences, per_head=per_head)

    def joined(self, each: Sequence[Tensor]) -> Tensor:
        """Combine a quantity (batch, length) of every recurrence into the layer's, as `retention` does."""
        stacked = torch.stack(tuple(each))
        return stacked.mean(0) if self.turn is None else stacked.gather(0, self.turn.unsqueeze(0)).squeeze(0)


class Layers(Sequence[T], Generic[T]):
    """Layers of a trace, each recomputed on access: a layer's terms are larger than its input."""

    def __init__(self, number: int, recompute: Callable[[int], T]) -> None:
        self._number, self._recompute = number, recompute

    def __len__(self) -> int:
        return self._number

    def __repr__(self) -> str:
        return f"<{self._number} layers, each recomputed on access>"

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"layer {index} of a model with {len(self)} state-space layers")
        return self._recompute(index % len(self))


def check_recurrent_state(has_recurrent_state: bool, name: str, what: str) -> None:
    """Raise Unanswerable if no layer of a model keeps a memory, which `what` asks about."""
    if not has_recurrent_state:
        said = f"no layer of {name} has a recurrent memory, which {what} is about:"
        raise Unanswerable(f"{said} its layers are short convolutions and attention")


@dataclass(frozen=True, eq=False)
class Trace(Outlined):
    """Run of a model on a batch of texts, whose real tokens are shown as `tokens`.

    Attributes:
        input_ids, mask: (batch, length), padded on the right; the mask is True at real positions.
        retention: (layers, batch, length) float32, the mean of E[A_t] over channels or heads and states of every
            layer (Baleen, Eq. 10), summed during the forward pass; NaN at padding.
        logits: (batch, classes) of a classifier, (batch, vocabulary) at each text's last position of a language model.
        words: per text and real token, the index of the word it belongs to; None for a special token.
        answers: per text, the predicted class (or label, or next token) and its probability; for a model that gives
            numbers, these and NaN.
        source: provenance: model, architecture, fingerprint, dtype, device.
        layers: each layer's `LayerTrace`, and `linearized` each as a linear map of its input, recomputed on access.
        pixels: (batch, height, width, channels) of images whose size the model knows; else None.
        series: (batch, length, channels), the numbers of series; else None.
        numbers: the state-space layers' numbers in the model if it has other layers between them, else None.
        has_recurrent_state, bidirectional: True if some layer keeps a state, or reads later tokens.
        spelled: per text that was given as such, the text and the characters of each token.
        rerun: function that runs the texts again for `states`; None in a trace that was made by hand.
    """

    input_ids: Tensor
    mask: Tensor
    retention: Tensor
    logits: Tensor
    tokens: tuple[tuple[str, ...], ...]
    words: tuple[tuple[int | None, ...], ...]
    answers: tuple[tuple[str, float], ...]
    source: Mapping[str, Any]
    layers: Sequence[LayerTrace]
    linearized: Sequence[LinearizedLayer] = ()
    pixels: Tensor | None = None
    series: Tensor | None = None
    numbers: tuple[int, ...] | None = None
    has_recurrent_state: bool = True
    bidirectional: bool = False
    spelled: tuple[Spelled, ...] = ()
    rerun: Callable[[Any], KeptStates] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        lengths = sorted(map(len, self.tokens))
        span = f"{lengths[0]:,}" if lengths[0] == lengths[-1] else f"{lengths[0]:,} to {lengths[-1]:,}"
        said = ", ".join(f"{answer!r:.40} (p = {p:.3f})" for answer, p in self.answers[:3])
        what = ("image" if self.pixels is not None else "text") + "s" * (len(self) != 1)
        return (
            f"Trace of {self.source['model']} ({self.source['architecture']}): {len(self)} {what} of {span} tokens, "
            f"{len(self.retention)} layers; answers {said}" + ", …" * (len(self) > 3)
        )

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """Numbers of the layers of `retention` and `layers`, a hybrid's in the model's own count."""
        return tuple(range(len(self.retention))) if self.numbers is None else self.numbers

    def survival(self, at: int | None = None, *, signed: bool = False, readable: bool = False) -> Tensor:
        """Return every token's share of the states after position `at`, by default the last one: (layers, batch,
        length), NaN at padding; see `survival.shares`. Raises InputError for a position that not every text has, and
        ValueError for a trace that was taken without its inputs."""
        shortest = int(self.mask.sum(1).min())
        if at is not None and not 0 <= at < shortest:
            raise InputError(f"there is no position {at} in every text; allowed are 0 to {shortest - 1}")
        found = [layer.survival(at, signed=signed, readable=readable).to(self.mask.device) for layer in self.layers]
        return torch.stack(found).masked_fill(~self.mask, torch.nan)

    def states(self, at: int | str | Sequence[int | str] = "last") -> KeptStates:
        """Return the states after tokens of every text: positions from 0, and "last" for each text's own last. The
        texts run once more, as they did. Raises InputError for positions that not every text has, changed weights, and
        a model whose layers do not keep all that they read of earlier tokens."""
        if self.rerun is None:
            raise InputError("this trace has no model to run again; take one with model.trace")
        return self.rerun(at)


@dataclass(frozen=True, eq=False)
class KeptStates(Outlined):
    """States after chosen tokens of texts, from which runs continue.

    Attributes:
        states: as `Model.run` gives and takes them, a row for each of `rows`.
        rows: numbers of the text and of the last token that was read, from 0.
        input_ids, mask: (texts, length), the texts, padded on the right.
        source: provenance: model, architecture, fingerprint, dtype, device.
    """

    states: States
    rows: tuple[tuple[int, int], ...]
    input_ids: Tensor
    mask: Tensor
    source: Mapping[str, Any]

    def of(self, rows: Sequence[int]) -> States:
        """Return the states of some rows, one or several times each. Raises InputError if there is no such row."""
        rows = list(rows) if isinstance(rows, Iterable) else [rows]
        outside = [row for row in rows if row not in range(len(self.rows))]
        if outside or not rows:
            said = f"there is no row {outside[0]!r:.60}" if outside else "no row was given"
            raise InputError(f"{said}; allowed are 0 to {len(self.rows) - 1}")
        return gathered(self.states, torch.tensor([*rows]))
