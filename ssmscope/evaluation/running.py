"""Runs of rows in full batches, with shared prefixes run once, and greedy continuations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from ssmscope.core.attention_layers import AttentionState
from ssmscope.core.batching import by_length, tokens_at_once
from ssmscope.core.encoding import Batch
from ssmscope.core.ends import Ends, Written
from ssmscope.core.generation import Continuation, written_after
from ssmscope.core.interface import Runs
from ssmscope.core.mixers import is_bidirectional
from ssmscope.core.model import Model, Run
from ssmscope.core.trace import LayerState, States, gathered, joined, size
from ssmscope.evaluation.forking import RESUME_COST_TOKENS, Pieces, Rows, ways_to_fork, whole_rows

MAX_CACHED_NUMBERS = 2**23
"""Maximum number of values of a layer that fit a CPU's caches: 32 MiB of float32."""
BATCH_COST = {"cpu": (24, 2**24), "cuda": (768, 2**36)}
"""Cost of one more batch by device, in tokens: a constant for reading the weights, and a number of weights to divide by
those of a layer, for launching a layer's operations: what the device multiplies a token by in that time."""
MAX_BATCH_LOGITS = 2**26
"""Maximum number of logits in a batch: 256 MiB of float32."""
MAX_STATE_BYTES = 2**29
"""Maximum size on a CPU of the states that are held, or that a batch starts from; a GPU has a sixteenth of its memory
for them."""

TRIAL_LENGTHS = 8, 32
"""Minimum and maximum length of the rows that test whether a model continues from its states."""

Read = Callable[[Int[np.ndarray, " ends"], Tensor, States], None]
"""Callback that gets the indices of rows, their logits (rows, …) and, if requested, the states after them."""


def max_batch_tokens(model: Model) -> int:
    """Return the number of tokens per batch that suits the model's device."""
    room = MAX_CACHED_NUMBERS if model.device.type == "cpu" else None
    return tokens_at_once(model.device, room=room, width=model.width)


def max_batch_padding(model: Model) -> int:
    """Return the number of padding tokens that cost the model's device no more than one more batch."""
    weights = sum(weight.numel() for mixer in model.mixers for weight in mixer.parameters())
    reading, starting = BATCH_COST["cpu" if model.device.type == "cpu" else "cuda"]
    return reading + starting * len(model.mixers) // max(1, weights)


def max_held_states(model: Model, size: int) -> int:
    """Return the number of states of `size` bytes that may be held at a time."""
    gpu = model.device.type == "cuda"
    room = torch.cuda.get_device_properties(model.device).total_memory // 16 if gpu else MAX_STATE_BYTES
    return max(1, room // max(1, size))


def plan_pieces(model: Model, rows: Rows, tokens_at_once: int, states_at_once: int) -> Pieces:
    """Return the plan for sorted, distinct rows that is cheapest on the model's device, by tokens and batches."""
    batch, held = max_batch_padding(model), max_batch_rows(model, states_at_once)
    cost = partial(plan_cost, tokens_at_once=tokens_at_once, held=held, batch=batch)
    return min((*ways_to_fork(rows), whole_rows(rows)), key=cost)


def plan_cost(pieces: Pieces, *, tokens_at_once: int, held: int, batch: int) -> int:
    """Return the cost of running pieces, in tokens with padding, of which each batch costs `batch` and each resumed row
    `RESUME_COST_TOKENS` more; batches that start from states or keep them have at most `held` rows."""
    total = RESUME_COST_TOKENS * int((pieces.above >= 0).sum())
    *levels, first, others = batch_groups(pieces)
    for group, most in [*((level, held) for level in levels), (first, None), (others, held)]:
        own = (pieces.stop - pieces.start)[group].tolist()
        for part in by_length(own, tokens_at_once, most=most, padding=batch):
            total += batch + len(part) * own[part[-1]]
    return total


def batch_groups(pieces: Pieces) -> list[Int[np.ndarray, " chosen"]]:
    """Return the pieces that run together, by length: those that others continue from by level, beginnings, others."""
    ascending = np.argsort(pieces.stop - pieces.start, kind="stable")
    kept, first, level = (what[ascending] for what in (pieces.kept, pieces.above < 0, pieces.level))
    levels = [ascending[kept & (level == number)] for number in range(int(level[kept].max(initial=-1)) + 1)]
    return [*levels, ascending[~kept & first], ascending[~kept & ~first]]


def run_pieces(
    model: Model,
    rows: Rows,
    pieces: Pieces,
    read: Read,
    *,
    tokens_at_once: int,
    states_at_once: int,
    states: bool = False,
) -> None:
    """Run every piece once and, where rows end, `read` the logits and, with `states`, the states. Pieces from whose
    states others start run level after level, then the others in full batches: of at most `tokens_at_once` tokens with
    padding, and `states_at_once` rows that start from states or keep them."""
    padding = max_batch_padding(model)
    places = np.empty(len(pieces.row), dtype=np.int64)  # Indices of pieces among the states that others start from.

    def index(at: Int[np.ndarray, " rows"]) -> Tensor:
        return torch.from_numpy(at).to(model.device)

    def run(chosen: Int[np.ndarray, " chosen"], starts: States, keep: bool) -> States:
        ended: list[States] = []
        most = max_batch_rows(model, states_at_once if starts or keep else None)
        lengths = (pieces.stop - pieces.start)[chosen].tolist()
        for part in by_length(lengths, tokens_at_once, most=most, padding=padding):
            batch = chosen[part]
            ids, mask = rows.padded(pieces.row[batch], pieces.start[batch], pieces.stop[batch])
            start = gathered(starts, index(places[pieces.above[batch]])) if starts else None
            logits, after = run_batch(model, ids, mask, start, keep=keep)
            ends = np.flatnonzero(pieces.ends[batch])
            if len(ends) == len(batch):
                read(pieces.row[batch], logits, after)
            elif len(ends):
                read(pieces.row[batch[ends]], logits[index(ends)], gathered(after, index(ends)))
            ended.append(after)
        return joined(ended)

    *levels, first, others = batch_groups(pieces)
    left: list[States] = []
    for chosen in levels:
        left.append(run(chosen, left[-1] if left else (), True))
        places[chosen] = np.arange(len(chosen))
    for chosen, held in zip(levels, np.cumsum([0, *map(len, levels)])):
        places[chosen] += held
    everything = joined(left)
    left.clear()
    run(first, (), states)
    run(others, everything, states)


def max_batch_rows(model: Model, states_at_once: int | None = None) -> int:
    """Return the maximum number of rows in a batch, by their logits and, if given, by the limit on states."""
    numbers = len(model.labels) if model.labels is not None else model.vocabulary
    most = max(1, MAX_BATCH_LOGITS // numbers)
    return most if states_at_once is None else min(most, states_at_once)


def run_batch(
    model: Runs,
    ids: Int[np.ndarray, "rows length"],
    mask: np.ndarray,
    states: States | None = None,
    *,
    keep: bool = False,
) -> Run:
    """Return the logits at each row's last token, (rows, …), and with `keep` the states after it. Padding, which comes
    after the last token, needs a mask only where states are kept or layers are bidirectional."""
    device = model.device
    batch = Batch(torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device), (), ())
    real = batch.mask if keep or is_bidirectional(model.module) else torch.ones_like(batch.mask)
    after: list[LayerState] = []
    with torch.no_grad(), model.running(mask=real, states=states, keep=after if keep else None):
        logits = model.forward(batch, last_only=True)
    return Run(logits, tuple(after))


def try_resuming(model: Model, rows: Rows) -> tuple[bool, int]:
    """Test on a few rows, cut or repeated, whether a run in two parts equals a whole run. Return also the bytes of a
    row's states, with keys and values of the longest row's."""
    if not model.continues:
        return False, 0
    ascending = np.argsort(rows.lengths, kind="stable")
    chosen = np.unique(ascending[np.linspace(0, len(rows) - 1, 3).astype(np.int64)])
    parts = [rows.ids[rows.starts[row] : rows.starts[row + 1]] for row in chosen]
    parts = [np.resize(ids, min(max(len(ids), TRIAL_LENGTHS[0]), TRIAL_LENGTHS[1])) for ids in parts]
    tried = Rows(np.concatenate(parts), np.cumsum([0, *map(len, parts)]))
    everything, none = np.arange(len(tried)), np.zeros(len(tried), dtype=np.int64)
    half = tried.lengths // 2
    expected = run_batch(model, *tried.padded(everything, none, tried.lengths)).logits
    first = run_batch(model, *tried.padded(everything, none, half), keep=True)
    found = run_batch(model, *tried.padded(everything, half, tried.lengths), first.states).logits
    expected, found = expected.double(), found.double()
    spread = (expected - expected.mean(-1, keepdim=True)).abs().amax(-1)
    allowed = max(1e-3, 16 * torch.finfo(next(model.module.parameters()).dtype).eps)
    grow = [state for state in first.states if isinstance(state, AttentionState)]
    each = sum(size((state,)) // state.places.numel() for state in grow) * int(rows.lengths.max())
    each += size(tuple(state for state in first.states if not isinstance(state, AttentionState))) // len(tried)
    return bool(((found - expected).abs().amax(-1) <= allowed * spread).all()), each


class Answers:
    """Greedy answers of at most `new_tokens` tokens after a text. An answer stops at an end token, or at a line break
    after its first word. Of equally likely tokens the one with the lowest id is taken."""

    def __init__(self, model: Model, new_tokens: int) -> None:
        self.model, self.new_tokens = model, new_tokens
        self.ends = Ends.of(model, lambda said: "\n" in self._text(said))

    def after(self, rows: Rows, chosen: Int[np.ndarray, " ends"], logits: Tensor, states: States = ()) -> list[str]:
        """Generate the answers after these rows from the logits (ends, vocabulary) and the states there; without states
        every step runs whole rows."""
        texts = [rows.ids[rows.starts[row] : rows.starts[row + 1]].tolist() for row in chosen]
        following = Continuation(self.model, (logits, states)) if states else Rereading(self.model, texts, logits)
        said: list[list[int]] = [[] for _ in texts]
        for step in written_after(following, texts, self.ends, max_new_tokens=self.new_tokens):
            for token in step.written:
                said[token.row].append(token.id)
        return [self._text(ids).partition("\n")[0] for ids in said]

    def _text(self, ids: Sequence[int]) -> str:
        """Return the answer from its first word on, without the end token."""
        return self.ends.decode(ids).lstrip()


class Rereading(Continuation):
    """Logits of texts as they are written by a model that cannot continue: every step runs whole texts."""

    def __init__(self, model: Model, texts: Sequence[Sequence[int]], logits: Tensor) -> None:
        super().__init__(model, (logits, ()))
        self.texts = [[*text] for text in texts]

    def read(self, tokens: Sequence[Written]) -> None:
        self.rows = [token.row for token in tokens]
        for token in tokens:
            self.texts[token.row].append(token.id)
        whole = [self.texts[row] for row in self.rows]
        longer = Rows(np.concatenate(whole), np.cumsum([0, *map(len, whole)]))
        every = np.arange(len(longer))
        self.logits = run_batch(self.model, *longer.padded(every, np.zeros_like(every), longer.lengths)).logits
