"""Memory of texts with triggers: survival of the beginning of a text, and the detectors' suspicion.

Survival and suspicion are computed from ‖R_s(t)‖, the norm left after position t of what a recurrence wrote at s
(`ssmscope.ops.survival`), summed over the heads of a layer. The text before a trigger is run once, and every trigger
continues from its states; the terms of both parts are concatenated, so the survival is that of the whole text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from ssmscope import ops
from ssmscope.attacks.curves import Questions
from ssmscope.attacks.insertion.places import inserted
from ssmscope.attacks.words.hotflip import letters
from ssmscope.core.batching import tokens_at_once
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.core.tokenizing import tokenize
from ssmscope.core.trace import LayerState, LayerTrace, States, gathered, mapped
from ssmscope.core.weights import weights_constant
from ssmscope.data.language import load_lines
from ssmscope.errors import InputError
from ssmscope.evaluation.forking import token_rows
from ssmscope.ops import Recurrence, survival

Trigger = tuple[int, ...]
"""Indices of words in a `Vocabulary`."""


@dataclass(frozen=True)
class Vocabulary:
    """Words of triggers; after a space each is one token."""

    words: tuple[str, ...]
    ids: tuple[int, ...]

    @classmethod
    def of(cls, model: Model, given: str | Path | None = None, absent: Iterable[str] = ()) -> Vocabulary:
        """Collect the model's tokens that are words, or a file's lines of one token, without `absent` ones."""
        tokenizer = model.tokenizer
        if not tokenizer.is_fast:
            raise InputError(f"poison needs the offsets of tokens; {model.name} has a slow tokenizer: give a fast one")
        special = set(tokenizer.all_special_ids)
        if given is None:
            listed = [letters(model, number) for number in sorted(tokenizer.get_vocab().values())]
        else:
            listed = list(load_lines(given))
        avoided = {word.lower() for word in absent}
        words = [word for word in dict.fromkeys(listed) if word and word.lower() not in avoided]
        encoded = tokenize(tokenizer, [f"{word} {word}" for word in words], return_offsets_mapping=True)
        found = []
        for word, ids, offsets in zip(words, encoded["input_ids"], encoded["offset_mapping"]):
            own = [number for number, (start, stop) in zip(ids, offsets) if stop > max(start, len(word))]
            if len(own) == 1 and own[0] not in special and own[0] < model.vocabulary:
                found.append((word, own[0]))
        if len(found) < 2:
            where = f"the tokens of {model.name}" if given is None else str(given)
            raise InputError(
                f"no tokens left for a trigger: {len(found)} of {where} is a word of one token; two are needed"
            )
        return cls(*zip(*found))

    def __len__(self) -> int:
        return len(self.words)

    def text(self, trigger: Trigger) -> str:
        return " ".join(self.words[number] for number in trigger)

    def tokens(self, triggers: Sequence[Trigger]) -> np.ndarray:
        """Return the token ids of triggers, (triggers, length)."""
        return np.asarray(self.ids, dtype=np.int64)[np.asarray(triggers, dtype=np.int64)]

    def drawn(self, random: np.random.Generator, number: int, length: int) -> list[Trigger]:
        return [tuple(row) for row in random.integers(0, len(self), (number, length)).tolist()]


@dataclass(frozen=True)
class Slot:
    """A text (`row` of the questions) with a place for a trigger after some words, and the token ids on either side.
    `span` is True at the tokens before it whose memory is attacked."""

    row: int
    words: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    span: Bool[np.ndarray, " before"]


def slots_of(model: Model, asked: Questions, filler: str, place: float, span: str | None) -> list[Slot]:
    """Return the texts that have the span before the place, which is after the first ⌊place · n + ½⌋ of n words. The
    filler has as many words, of one token each, as a trigger. The first occurrence of the span counts; without one, all
    tokens before the place are attacked."""
    places = [math.floor(place * len(content.split()) + 0.5) for content in asked.contents]
    filled = [inserted(content, filler, words) for content, words in zip(asked.contents, places)]
    texts = asked.wrapped(filled)
    rows = token_rows(model, texts)
    offsets = tokenize(model.tokenizer, texts, return_offsets_mapping=True)["offset_mapping"]
    found = []
    for row, (content, words, ids, own) in enumerate(zip(asked.contents, places, rows, offsets)):
        first = len(asked.before) + len(inserted(content, "\0", words).partition("\0")[0])
        ends = np.asarray(own).reshape(-1, 2)
        real = ends[:, 1] > ends[:, 0]
        within = np.flatnonzero(real & (ends[:, 1] > first) & (ends[:, 0] < first + len(filler)))
        if not words or len(within) != len(filler.split()):
            continue
        start, stop = int(within[0]), int(within[-1]) + 1
        chosen = np.ones(start, dtype=bool)
        if span is not None:
            begin = content.find(span)
            at = len(asked.before) + begin
            chosen = real[:start] & (ends[:start, 1] > at) & (ends[:start, 0] < at + len(span))
            if begin < 0 or at + len(span) > first:
                continue
        if chosen.any():
            found.append(Slot(row, words, tuple(ids[:start]), tuple(ids[stop:]), chosen))
    if not found:
        what = "a word" if span is None else f"{span!r}"
        raise InputError(f"no text has {what} before the trigger; give another span, or a larger place (up to 1)")
    return found


def attacked(asked: Questions, slot: Slot, trigger: str) -> str:
    """Return the whole text with a trigger."""
    return asked.before + inserted(asked.contents[slot.row], trigger, slot.words) + asked.after


DETECTORS = ("token", "window", "half-life")
NO_TRIGGER: Int[np.ndarray, "1 0"] = np.empty((1, 0), dtype=np.int64)
"""Empty trigger of a clean text."""
Terms = list[tuple[Recurrence, ...]]
"""Recurrences of every layer."""


def masses(recurrences: Sequence[Recurrence], at: int) -> Float[Tensor, "batch positions"]:
    """Compute Σ_heads ‖R_s(at)‖ for the positions s ≤ at."""
    memories = ops.by_memory(recurrences, [r.between(0, at + 1) for r in recurrences])
    return torch.cat([survival.remaining_norms(*memory) for memory in memories], dim=2).sum(2)


def suspicion(
    recurrences: Sequence[Recurrence], detector: str, window: int, since: int = 1
) -> Float[Tensor, "batch positions"]:
    """Compute a detector's statistic in one layer, smaller where more is forgotten, the first two from t = `since` on.

    token: Σ_{s<t} ‖R_s(t)‖ / Σ_{s<t} ‖R_s(t − 1)‖, the share of the earlier memory that token t leaves.
    window: Σ_{s≤t−w} ‖R_s(t)‖ / Σ_{s≤t} ‖R_s(t)‖, the share of the memory that is older than w tokens, divided by the
        share (t − w + 1) / (t + 1) of such tokens; from t = 2w on.
    half-life: 1 − the mean over s of 1 / half-life (without the last position), a single number.
    """
    length = recurrences[0].shape[1]
    found: list[Tensor] = []
    if detector == "half-life" and length > 1:
        found = [1 - survival.half_lives(recurrences)[:, :-1].reciprocal().mean(1)]
    elif detector == "window":
        for t in range(max(since, 2 * window), length):
            left = masses(recurrences, t)
            found.append(_quotient(left[:, : t - window + 1].sum(1), left.sum(1)) * (t + 1) / (t - window + 1))
    elif detector == "token":
        since = max(since, 1)
        every = [masses(recurrences, t) for t in range(since - 1, length)]
        found = [_quotient(now[:, :-1].sum(1), then.sum(1)) for then, now in zip(every, every[1:])]
    return torch.stack(found, 1) if found else recurrences[0].x.new_zeros(recurrences[0].shape[0], 0)


def _quotient(above: Tensor, below: Tensor) -> Tensor:
    """Divide; return 1 where there was nothing to forget."""
    return torch.where(below > 0, above / below, 1)


@dataclass(frozen=True, eq=False)
class Beginning:
    """Text before a trigger, run once; its `states` are empty if the model cannot continue from them. `least` is each
    detector's minimum so far."""

    slot: Slot
    terms: Terms
    states: States
    window: int
    least: dict[str, float]

    @classmethod
    def of(cls, model: Model, slot: Slot, detectors: Sequence[str], window: int) -> Beginning:
        terms, states = run(model, np.array([slot.before]))
        # A half-life depends on later tokens, so it is known only at the end.
        known = {each: math.inf if each == "half-life" else float(_lowest(terms, each, window)) for each in detectors}
        return cls(slot, terms, states if model.continues else (), window, known)


def _lowest(terms: Terms, detector: str, window: int, since: int = 1) -> Float[Tensor, " batch"]:
    """Compute the minimum over positions of the mean over layers; infinite if there is no position."""
    seen = torch.stack([suspicion(each, detector, window, since) for each in terms]).mean(0)
    return seen.amin(1) if seen.shape[1] else torch.full_like(seen.sum(1), math.inf)


@dataclass(frozen=True, eq=False)
class Memory:
    """Survival of the span at the end, mean over layers, and 1 − each detector's minimum (0 for shorter texts)."""

    survival: Float[np.ndarray, " triggers"]
    suspicion: dict[str, Float[np.ndarray, " triggers"]]


@torch.no_grad()
def memory(model: Model, beginning: Beginning, triggers: Int[np.ndarray, "triggers length"]) -> Memory:
    """Compute the memory after every trigger, given by token ids; `NO_TRIGGER` stands for the clean text."""
    slot = beginning.slot
    rest = _rows((), triggers, slot.after)
    step = max(1, tokens_at_once(model.device) // (len(slot.before) + rest.shape[1]))
    shares: list[Tensor] = []
    seen: dict[str, list[Tensor]] = {each: [] for each in beginning.least}
    for first in range(0, len(rest), step):
        terms = _terms(model, beginning, rest[first : first + step])
        left = [masses(each, each[0].shape[1] - 1) for each in terms]
        own = [each[:, np.flatnonzero(slot.span)].sum(1) for each in left]
        tiny = torch.finfo(left[0].dtype).tiny
        shares.append(torch.stack([part / each.sum(1).clamp(min=tiny) for part, each in zip(own, left)]).mean(0))
        for each, known in beginning.least.items():
            least = _lowest(terms, each, beginning.window, len(slot.before)).clamp(max=known)
            seen[each].append(1 - least.masked_fill(least.isinf(), 1))
    return Memory(_joined(shares), {each: _joined(found) for each, found in seen.items()})


def _joined(parts: Sequence[Tensor]) -> np.ndarray:
    return torch.cat(list(parts)).double().cpu().numpy()


def _rows(before: Sequence[int], triggers: np.ndarray, after: Sequence[int]) -> Int[np.ndarray, "triggers length"]:
    """Return the token ids of a text with every trigger."""
    return np.array([[*before, *own, *after] for own in triggers.tolist()], dtype=np.int64)


def threshold(clean: Float[np.ndarray, " texts"], alarms: float) -> float:
    """Return the smallest of the numbers that at most the share `alarms` of them exceeds."""
    return float(np.quantile(clean, 1 - alarms, method="inverted_cdf"))


def _terms(model: Model, beginning: Beginning, rest: np.ndarray) -> Terms:
    """Return the terms of the whole texts."""
    if not rest.shape[1]:
        return beginning.terms
    later = _continued(model, beginning, rest)
    if not beginning.states:
        return later
    return [tuple(map(concatenated, firsts, seconds)) for firsts, seconds in zip(beginning.terms, later)]


def _continued(model: Model, beginning: Beginning, rest: np.ndarray) -> Terms:
    """Return the terms of the rest alone, run from the states; of the whole texts if there are none."""
    if not beginning.states:
        return run(model, _rows(beginning.slot.before, rest, ()))[0]
    same = torch.zeros(len(rest), dtype=torch.long, device=model.device)
    return run(model, rest, gathered(beginning.states, same))[0]


def concatenated(first: Recurrence, second: Recurrence) -> Recurrence:
    """Concatenate the terms of one text's beginning with those of several continuations."""
    both: dict[str, Any] = {}
    for name in ops.OVER_TIME:
        one, other = getattr(first, name, None), getattr(second, name, None)
        if one is not None and other is not None:
            both[name] = torch.cat([one.expand(len(other), *one.shape[1:]), other], dim=1)
    return replace(second, **both)


@torch.no_grad()
def run(model: Model, ids: Int[np.ndarray, "rows length"], states: States | None = None) -> tuple[Terms, States]:
    """Run rows of one length and return the terms of every layer and the final states."""
    rows = torch.from_numpy(np.asarray(ids, dtype=np.int64)).to(model.device)
    batch = Batch(rows, torch.ones_like(rows, dtype=torch.bool), (), ())
    terms: Terms = []
    after: list[LayerState] = []

    def visit(_: int, layer: LayerTrace, scans: tuple[ops.Scan, ...]) -> None:
        terms.append(mapped(layer.recurrences, Tensor.detach))

    with model.running(mask=batch.mask, states=states, visit=visit, keep=after):
        model.forward(batch, last_only=True)
    return terms, tuple(after)


def steps(model: Model, beginnings: Sequence[Beginning], ids: Sequence[int]) -> Float[np.ndarray, " tokens"]:
    """Compute how much of the states each token replaces, 1 − E[a_t] (Baleen, Eq. 10), mean over layers and texts."""
    total = np.zeros(len(ids))
    rest = np.array(ids, dtype=np.int64)[:, None]
    for beginning in beginnings:
        width = 1 if beginning.states else len(beginning.slot.before) + 1
        step = max(1, tokens_at_once(model.device) // width)
        for first in range(0, len(rest), step):
            terms = _continued(model, beginning, rest[first : first + step])
            kept = [torch.stack([ops.retention(r)[:, -1] for r in each]).mean(0) for each in terms]
            total[first : first + step] += 1 - torch.stack(kept).mean(0).double().cpu().numpy()
    return total / len(beginnings)


def share_gradients(
    model: Model, slots: Sequence[Slot], triggers: Int[np.ndarray, "triggers length"]
) -> Float[Tensor, "triggers length width"]:
    """Compute the gradient of the spans' share of the final states at the triggers' embeddings, summed over texts.
    Norms are not differentiated position by position: with P the final state of a run that writes at the span alone,
    and H the final state, the share is the mean over layers of ‖P‖ / (‖P‖ + ‖H − P‖), the norms summed over heads."""
    total: Tensor | float = 0.0
    for slot in slots:
        rows = torch.from_numpy(_rows(slot.before, triggers, slot.after)).to(model.device)
        mask = torch.ones_like(rows, dtype=torch.bool)
        inside = torch.zeros(rows.shape[1], dtype=torch.float32, device=model.device)
        inside[np.flatnonzero(slot.span)] = 1
        found: list[Tensor] = []

        def visit(_: int, layer: LayerTrace, scans: tuple[ops.Scan, ...]) -> None:
            alone = [replace(r, x=r.x * inside[:, None, None].to(r.x)) for r in layer.recurrences]  # noqa: B023
            both = ((ops.scan(r).state, scan.state) for r, scan in zip(alone, scans))
            memories = [map(torch.stack, zip(*each)) for each in ops.by_memory(alone, both)]
            parts = [(part.sum(0), whole.sum(0)) for part, whole in memories]
            ours = torch.stack([_norm(part) for part, _ in parts]).sum(0)
            others = torch.stack([_norm(whole - part) for part, whole in parts]).sum(0)
            found.append(ours / (ours + others).clamp(min=1e-30))  # noqa: B023

        with torch.no_grad():
            embeddings = model.module.get_input_embeddings()(rows)
        with weights_constant(model.module), torch.enable_grad():
            inputs = embeddings.detach().requires_grad_()
            with model.running(mask=mask, visit=visit):
                model.forward_embeddings(inputs, mask)
            (gradient,) = torch.autograd.grad(torch.stack(found).mean(0).sum(), inputs)
        total = total + gradient[:, len(slot.before) :][:, : triggers.shape[1]]
    assert isinstance(total, Tensor)
    return total


def _norm(state: Tensor) -> Tensor:
    return torch.linalg.vector_norm(state, dim=(2, 3)).sum(1)
