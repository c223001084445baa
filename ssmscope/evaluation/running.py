"""Runs of rows in full batches, with shared prefixes run once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ssmscope.core.attention_layers import AttentionState
from ssmscope.core.batching import by_length
from ssmscope.core.encoding import Batch
from ssmscope.core.mixers import is_bidirectional
from ssmscope.core.model import Model, Run
from ssmscope.core.trace import LayerState, States, gathered, joined, size
from ssmscope.evaluation.forking import RESUME_COST_TOKENS, Pieces, Rows, ways_to_fork, whole_rows

MAX_BATCH_ACTIVATIONS = 2**19
"""Maximum size of a batch on a CPU, tokens times the model's width; a larger one no longer fits its caches."""
CPU_BATCH_TOKENS = 512, 2048
"""Smallest and largest number of tokens in a batch on a CPU."""
GPU_BATCH_FACTOR = 32
"""Factor by which a batch on a GPU is larger."""
BATCH_COST = {"cpu": (24, 2**24), "cuda": (768, 2**36)}
"""Cost of one more batch by device, in tokens: a constant for reading the weights, and a number of weights to divide by
those of a layer, for launching a layer's operations. On a GPU the latter takes half a millisecond, in which an H200
multiplies a token by some 2³⁶ weights."""
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
    fewest, most = CPU_BATCH_TOKENS
    return min(max(fewest, MAX_BATCH_ACTIVATIONS // model.width), most) * (
        1 if model.device.type == "cpu" else GPU_BATCH_FACTOR
    )


def max_batch_padding(model: Model) -> int:
    """Return the number of padding tokens that cost the model's device no more than one more batch."""
    weights = sum(weight.numel() for mixer in model.mixers for weight in mixer.parameters())
    reading, starting = BATCH_COST["cpu" if model.device.type == "cpu" else "cuda"]
    return reading + starting * len(model.mixers) // max(1, weights)


def max_held_states(model: Model, size: int) -> int:
    """Return the number of states of `size` bytes that may be held at a time."""
    if model.device.type != "cuda":
        return max(1, MAX_STATE_BYTES // max(1, size))
    return max(1, torch.cuda.get_device_properties(model.device).total_memory // 16 // max(1, size))


def plan_pieces(model: Model, rows: Rows, tokens_at_once: int, states_at_once: int) -> Pieces:
    """Return the plan for sorted, distinct rows that is cheapest on the model's device, counting tokens (with padding)
    and the cost of every batch. See `run_pieces` for the limits."""
    batch, held = max_batch_padding(model), max_batch_rows(model, states_at_once)

    def cost(pieces: Pieces) -> int:
        lengths = pieces.stop - pieces.start
        total = RESUME_COST_TOKENS * int((pieces.above >= 0).sum())
        together = batch_groups(pieces)
        for group in together:
            own = lengths[group].tolist()
            parts = by_length(own, tokens_at_once, most=None if group is together[-2] else held, padding=batch)
            total += sum(batch + len(part) * own[part[-1]] for part in parts)
        return total

    return min((*ways_to_fork(rows), whole_rows(rows)), key=cost)


def batch_groups(pieces: Pieces) -> list[Int[np.ndarray, " chosen"]]:
    """Return the pieces that run together, sorted by length: those that others continue from, level after level, then
    the remaining beginnings of rows, then all others."""
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
    """Run every piece once, and read the logits where a row ends.

    Pieces from whose states others start run level after level, then the others in full batches.

    Args:
        read: called with the rows that end in a batch; see `Read`.
        tokens_at_once: maximum number of tokens in a batch, with padding.
        states_at_once: maximum number of rows in a batch that starts from states or keeps them.
        states: pass the states to `read`.
    """
    padding = max_batch_padding(model)
    places = np.zeros(len(pieces.row), dtype=np.int64)  # Indices of pieces among the states that others start from.

    def run(chosen: Int[np.ndarray, " chosen"], starts: States, keep: bool) -> States:
        ended: list[States] = []
        most = max_batch_rows(model, states_at_once if starts or keep else None)
        lengths = (pieces.stop - pieces.start)[chosen].tolist()
        for part in by_length(lengths, tokens_at_once, most=most, padding=padding):
            batch = chosen[part]
            ids, mask = rows.padded(pieces.row[batch], pieces.start[batch], pieces.stop[batch])
            start = gathered(starts, _index(places[pieces.above[batch]], model)) if starts else None
            logits, after = run_batch(model, ids, mask, start, keep=keep)
            ends = np.flatnonzero(pieces.ends[batch])
            if len(ends) == len(batch):
                read(pieces.row[batch], logits, after)
            elif len(ends):
                at = _index(ends, model)
                read(pieces.row[batch[ends]], logits[at], gathered(after, at))
            ended.append(after)
        return joined(ended)

    *levels, first, others = batch_groups(pieces)
    left: list[States] = []
    held = 0
    for chosen in levels:
        left.append(run(chosen, left[-1] if left else (), True))
        places[chosen] = np.arange(len(chosen))
    for chosen in levels:
        places[chosen] += held
        held += len(chosen)
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
    model: Model,
    ids: Int[np.ndarray, "rows length"],
    mask: np.ndarray,
    states: States | None = None,
    *,
    keep: bool = False,
) -> Run:
    """Return the logits at each row's last token, (rows, …), and with `keep` the states after it.

    Layers get the padding mask only where states are kept, or where they are bidirectional. Otherwise padding, which
    comes after the last token, changes nothing that is read.
    """
    device = model.device
    batch = Batch(torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device), (), ())
    real = batch.mask if keep or is_bidirectional(model.module) else torch.ones_like(batch.mask)
    after: list[LayerState] = []
    with torch.no_grad(), model.running(mask=real, states=states, keep=after if keep else None):
        logits = model.forward(batch, last_only=True)
    return Run(logits, tuple(after))


def try_resuming(model: Model, rows: Rows) -> tuple[bool, int]:
    """Return whether a run in two parts equals a whole run, and the bytes of a row's states (with keys and values, of
    the longest row's).

    It is tested on a few of the rows; long ones are cut, short ones repeated.
    """
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


def _index(places: Int[np.ndarray, " rows"], model: Model) -> Tensor:
    return torch.from_numpy(places).to(model.device)
