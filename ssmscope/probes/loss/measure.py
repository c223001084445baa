"""Long texts cut into windows of tokens, the loss of every token in them, and its summary: bins, slopes and curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count, pairwise, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from ssmscope.api.sharding.parts import Columns, over
from ssmscope.core.batching import tokens_at_once
from ssmscope.core.bootstrap import Estimate, estimates, resampled_sums
from ssmscope.core.model import Model
from ssmscope.core.tokenizing import tokenize
from ssmscope.data.language import load_lines, token_names
from ssmscope.data.rows import SUFFIXES, Row, checked_column, checked_path, checked_string, given_rows, read_rows
from ssmscope.data.text import LINE_SOURCES
from ssmscope.errors import InputError
from ssmscope.evaluation.forking import Rows, check_vocabulary
from ssmscope.evaluation.running import max_batch_tokens
from ssmscope.probes.long_rows import PIECE_TOKENS, head_logits, pieces_of
from ssmscope.probes.loss.result import Summary

UNITS_PER_NAT = {"nats": 1.0, "bits": 1 / math.log(2)}
FIRST_BIN_EDGES = (0, 128, 512)
"""Starts of the first bins of positions; the next ones are 1024, 2048, 4096, …"""
SLOPE_SKIPS = 100
"""Number of first positions that the slope leaves out."""
MAX_CURVE_POINTS = 240
"""Maximum number of positions of a smoothed curve."""
MAX_LOGITS = 2**24
"""Maximum number of logits in memory: 64 MiB of float32."""


def documents(data: Any, split: str | None) -> tuple[list[Sequence[str]], str]:
    """Return the lines of every document of a known text, a file, a table, or a list of texts, and a name for them."""
    if isinstance(data, str | Path):
        path = Path(data)
        if path.suffix.lower() not in SUFFIXES:
            return [load_lines(data, split)], str(data)
        checked_path(path, LINE_SOURCES, split)
        return [_document(row).split("\n") for row in read_rows(path)], str(data)
    if split is not None:
        raise InputError(f"split '{split}' has no meaning for texts; leave it out")
    if not len(data) or (rows := given_rows(data)) is None:
        raise InputError("data holds no text, or something that is not a text; give a name, a file, or texts")
    return [_document(row).split("\n") for row in rows], "texts"


def _document(row: Row) -> str:
    text = checked_column(row, "text")
    if not isinstance(text, str):
        raise InputError(f"{row.where} has no text; every row needs a document")
    return checked_string(text, "text", row)


def shared_windows(
    models: Sequence[Model], documents: Sequence[Sequence[str]], length: int
) -> tuple[Int[np.ndarray, "windows length+1"], int]:
    """Return `windows_of` several models; raise InputError if they do not share a tokenizer."""
    first, *others = models
    windows, left_out = windows_of(first, documents, length)
    for other in others:
        same = token_names(other.tokenizer) == token_names(first.tokenizer)
        if not same or not np.array_equal(windows_of(other, documents, length)[0], windows):
            raise InputError(
                f"{first.name} and {other.name} do not share a tokenizer, so their tokens differ; "
                "measure them one at a time"
            )
    return windows, left_out


def drawn(
    windows: Int[np.ndarray, "windows length+1"], limit: int | None, seed: int
) -> Int[np.ndarray, "limit length+1"]:
    """Return so many windows, drawn by the seed, in their order."""
    return windows[np.sort(np.random.default_rng(seed).permutation(len(windows))[:limit])]


def windows_of(
    model: Model, documents: Sequence[Sequence[str]], length: int
) -> tuple[Int[np.ndarray, "windows length+1"], int]:
    """Return windows of `length` + 1 tokens, the last of which is only predicted, and the number of documents without
    one. A line ends with a newline if the tokenizer has a token for it, else with its end-of-text token."""
    tokenizer = model.tokenizer
    try:
        newline = bool(tokenize(tokenizer, "\n", add_special_tokens=False)["input_ids"])
    except InputError:  # The tokenizer has no token for a newline.
        newline = False
    tail = [] if newline or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    windows, longest, left_out = [], 0, 0
    for lines in documents:
        texts = [line + "\n" for line in lines] if newline else list(lines)
        rows = tokenize(tokenizer, texts, add_special_tokens=False)["input_ids"] if texts else []
        stream = np.array([i for row in rows for i in (*row, *tail)], dtype=np.int64)
        number = (len(stream) - 1) // length if len(stream) else 0
        longest, left_out = max(longest, len(stream)), left_out + (number == 0)
        if number:
            windows.append(stream[np.arange(number)[:, None] * length + np.arange(length + 1)])
    if not windows:
        raise InputError(
            f"no document is long enough for a window of {length:,} tokens and one more: the longest has {longest:,}; "
            "give a smaller length, or longer texts"
        )
    found = np.concatenate(windows)
    check_vocabulary(model, found.max())
    return found, left_out


def window_losses(
    model: Model, windows: Int[np.ndarray, "windows length+1"], *, piece: int = PIECE_TOKENS
) -> Float[np.ndarray, "windows length"]:
    """Compute −ln p of every token of a window but the first given those before it, float32."""
    return window_scores(model, windows, partial(cross_entropy, reduction="none"), piece=piece)[..., 0]


def window_scores(
    model: Model,
    windows: Int[np.ndarray, "windows length+1"],
    score: Callable[[Tensor, Tensor], Tensor],
    *,
    piece: int = PIECE_TOKENS,
) -> Float[np.ndarray, "windows length scores"]:
    """Return scores of every token of a window but the first, float32. `score` is called with logits (tokens,
    vocabulary) and the tokens, and returns (tokens,) or (tokens, scores)."""
    number, length = windows.shape[0], windows.shape[1] - 1
    found = np.empty((number, length, 0), dtype=np.float32)
    rows = Rows(windows[:, :-1].ravel(), np.arange(number + 1) * length)
    step = tokens_at_once(model.device, model.vocabulary, MAX_LOGITS)
    for part in pieces_of(model, rows, piece=piece):
        stop = part.start + part.hidden.shape[1]
        targets = torch.from_numpy(windows[part.rows, part.start + 1 : stop + 1]).to(part.hidden.device).reshape(-1)
        hidden = part.hidden.flatten(0, 1)
        parts = [
            score(head_logits(model, hidden[at : at + step]), targets[at : at + step])
            for at in range(0, len(hidden), step)
        ]
        scores = torch.cat(parts).view(*part.hidden.shape[:2], -1).cpu().numpy()
        found = found if found.shape[2] else np.empty((number, length, scores.shape[2]), dtype=np.float32)
        found[part.rows, part.start : stop] = scores
    return found


def all_losses(
    model: Model,
    windows: Int[np.ndarray, "windows length+1"],
    *,
    piece: int,
    provenance: Mapping[str, Any],
    shown: bool,
) -> Float[np.ndarray, "windows length"]:

    def measure(rows: range) -> Columns:
        return {"losses": window_losses(model, windows[rows.start : rows.stop], piece=piece)}

    number, length = len(windows), windows.shape[1] - 1
    size, numbers = max(1, max_batch_tokens(model) // min(length, piece)), range(number)
    batches = [numbers[first : first + size] for first in numbers[::size]]
    found = np.empty((number, length), dtype=np.float32)
    for rows, part in over(model, batches, measure, provenance=provenance, what="windows" if shown else None):
        found[rows.start : rows.stop] = part["losses"]
    return found


def positions_of(length: int) -> tuple[int, ...]:
    """Return positions from 1 to `length`, evenly spaced in their logarithm."""
    return tuple(sorted({round(at) for at in np.geomspace(1, length, MAX_CURVE_POINTS).tolist()}))


def bins_of(length: int) -> list[tuple[int, int]]:
    """Return the bins of positions, (after, up to): (0, 128), (128, 512), (512, 1024), …, the last up to `length`."""
    every = chain(FIRST_BIN_EDGES, (1024 * 2**number for number in count()))
    edges = [*takewhile(lambda edge: edge < length, every), length]
    return list(pairwise(edges))


def smoothed(
    losses: Float[np.ndarray, "rows length"], positions: Sequence[int], smooth: int
) -> Float[np.ndarray, "rows positions"]:
    """Return the mean over `smooth` positions around each, counted from 1. The window shrinks symmetrically near the
    start, where the curve is steep, and is cut off at the end."""
    at = np.asarray(positions)
    half = np.minimum(at - 1, smooth // 2)
    first, last = at - half, np.minimum(at + half, losses.shape[1])
    sums = np.concatenate([np.zeros((len(losses), 1)), losses.astype(np.float64).cumsum(1)], axis=1)
    return (sums[:, last] - sums[:, first - 1]) / (last - first + 1)


def slopes(losses: Float[np.ndarray, "rows length"]) -> Float[np.ndarray, " rows"]:
    """Return the slope Σ (x − x̄) ℓ / Σ (x − x̄)² over the positions after `SLOPE_SKIPS`, x = log₂ position."""
    positions = np.arange(SLOPE_SKIPS + 1, losses.shape[1] + 1)
    if len(positions) < 2:
        return np.full(len(losses), np.nan)
    x = np.log2(positions)
    x -= x.mean()
    return losses[:, SLOPE_SKIPS:].astype(np.float64) @ x / (x @ x)


def summarise(
    losses: Float[np.ndarray, "models windows length"], positions: Sequence[int], smooth: int, seed: int
) -> dict[str, Any]:
    """Return the fields of a `TokenLoss` that summarise all losses."""
    models, windows, length = losses.shape
    bins = bins_of(length)
    columns = []
    for each in losses:
        parts = [each[:, low:high].astype(np.float64).mean(1) for low, high in bins]
        columns.append(np.stack([each.astype(np.float64).mean(1), slopes(each), *parts], axis=1))
    differences = [columns[0] - other for other in columns[1:]]
    curves = [smoothed(each, positions, smooth) for each in losses]
    wide = np.concatenate([*columns, *differences, *curves], axis=1)
    rows = resampled_sums(wide, seed=seed) / windows
    ends = estimates(rows if windows > 1 else rows[:1])  # A single window has no interval.
    columns_of_curves = models * len(positions)
    found = [
        [Estimate(*each) for each in own] for own in ends[:-columns_of_curves].reshape(2 * models - 1, -1, 3).tolist()
    ]
    every = [Summary(mean, slope, tuple(parts)) for mean, slope, *parts in found]
    return {
        **{"bins": tuple(bins), "summaries": tuple(every[:models]), "differences": tuple(every[models:])},
        "curves": ends[-columns_of_curves:].reshape(models, len(positions), 3),
    }


def notes_on(windows: int, left_out: int) -> Iterable[str]:
    if windows == 1:
        yield "one window: no number has an interval"
    if left_out:
        yield f"{left_out:,} document{'s are' if left_out > 1 else ' is'} shorter than a window and not read"
