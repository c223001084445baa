"""How well a language model uses its context: the loss of every next token against its position in a long text.

Differential Mamba compares models so in its Figure 3 (a), after Lin et al. (2025, Forgetting Transformer): where the
curve goes on falling, tokens far back still help; where it rises, the context is longer than the model can bear.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float, Int

from ssmscope.bootstrap import Estimate, estimate, resampled_sums
from ssmscope.errors import InputError, did_you_mean
from ssmscope.evaluation.forking import Rows
from ssmscope.probes.long_rows import (
    PIECE,
    head_logits,
    language_models,
    own_names,
    pieces_of,
    stderr_lines,
    whole_from,
)
from ssmscope.results import Result, record_provenance
from ssmscope.tasks.language import check_symbols, load_lines, token_names
from ssmscope.tasks.rows import SUFFIXES, checked_column, checked_string, read_rows
from ssmscope.tasks.text import LINE_SOURCES

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType

    from ssmscope.model import Model

UNITS = {"nats": 1.0, "bits": 1 / math.log(2)}
"""How much of each a nat is."""
EDGES = (0, 128, 512)
"""Where bins of positions begin; the next ones at 1024, 2048, 4096, …"""
SETTLED = 100
"""How many first positions the slope leaves out."""
POINTS = 240
"""At how many positions, at most, the smoothed curve is kept with its interval."""
LOGITS_AT_ONCE = 2**24
"""How many logits there are at a time: 64 MiB of float32."""


def token_loss(
    models: Model | Sequence[Model],
    data: str | Path | Sequence[str] = "wikitext2",
    *,
    split: str | None = None,
    length: int = 2048,
    limit: int | None = None,
    smooth: int = 101,
    unit: str = "nats",
    piece: int = PIECE,
    seed: int = 0,
    progress: bool = True,
) -> TokenLoss:
    """Measure −ln p(token | the i tokens before it) for i = 1 … `length`, on average over windows of long texts.

    Each document is cut into windows of `length` tokens, one after the other; a model reads each from an empty state,
    and is asked for the token after every one it has read. What is left of a document, or too short for a window, is
    not read. All models read the same windows, so they must share their tokenizer: a token of one is no token of
    another.

    At each position the losses are averaged over the windows, and over `smooth` positions around it (`smoothed`).
    Summarised: the mean loss in bins of positions, and its slope, that of the least squares line of the loss on
    log₂ position from position 101 on, what a doubling of the context adds to the loss. Intervals are 95 % bootstrap
    intervals over windows. With a second model, each bin and the slope have the paired difference of the first model
    less the other; all numbers share their resamples.

    Args:
        models: language models with tokenizers.
        data: "wikitext2" or a .txt file, whose lines are one long document; a csv, tsv, jsonl or parquet file with a
            column `text`, a document each row; or texts, a document each.
        split: of "wikitext2"; by default its test split.
        length: of a window, in tokens.
        limit: only so many windows, drawn by the seed.
        smooth: over how many positions the curve is averaged, an odd number; 1 leaves it as it is.
        unit: "nats" or "bits".
        piece: how many tokens of a window run at once, from the state after those before.
        seed: draws windows and resamples.
        progress: whether to print lines on stderr.

    Raises:
        InputError: no language model with a tokenizer, models that do not share one, texts without a window, an unknown
            unit, a number out of range, or a loss that is not finite.
    """
    every = language_models(models)
    whole_from(1, length=length, limit=limit, smooth=smooth, piece=piece)
    whole_from(0, seed=seed)
    if smooth % 2 == 0:
        raise InputError(f"smooth is {smooth}; allowed is an odd number of positions, as many on both sides")
    if unit not in UNITS:
        raise InputError(f"unknown unit {unit!r}; allowed are 'nats' and 'bits'{did_you_mean(str(unit), UNITS)}")
    texts, name = _documents(data, split)
    windows, left_out = _shared_windows(every, texts, length)
    found = len(windows)
    if limit is not None and limit < found:
        windows = windows[np.sort(np.random.default_rng(seed).permutation(found)[:limit])]
    names = own_names(every)
    losses = np.zeros((len(every), len(windows), length), dtype=np.float32)
    say = stderr_lines(progress)
    for number, model in enumerate(every):
        began = time.perf_counter()
        if say is not None:
            say(f"{names[number]}: {len(windows):,} windows of {length:,} tokens")
        losses[number] = window_losses(model, windows, piece=piece, say=say) * UNITS[unit]
        if not np.isfinite(losses[number]).all():
            at = int((~np.isfinite(losses[number]).all(0)).argmax()) + 1
            raise InputError(
                f"the loss of {names[number]} is not finite from position {at:,} on: the model overflows; give a "
                f"length below {at:,}"
            )
        if say is not None:
            say(f"  {losses[number].mean():.4f} {unit} a token in {time.perf_counter() - began:.1f} s")
    places = _places(length)
    options: dict[str, Any] = {
        **{"data": name, "split": split, "length": length, "limit": limit},
        **{"smooth": smooth, "unit": unit, "piece": piece},
    }
    digest = hashlib.sha256(np.ascontiguousarray(windows, dtype="<i8").tobytes()).hexdigest()[:16]
    return TokenLoss(
        provenance={
            **record_provenance({"model": " and ".join(names)}, options=options, seed=seed),
            "models": [{**model.source, "model": name} for model, name in zip(every, names)],
            "data": {"name": name, "windows": len(windows), "of": found, "fingerprint": digest},
        },
        models=names,
        unit=unit,
        smooth=smooth,
        positions=places,
        losses=losses.astype(np.float64).mean(1),
        **_measured(losses, places, smooth, seed),
        notes=tuple(_notes(len(windows), left_out)),
    )


# ---- what is read


def _documents(data: str | Path | Sequence[str], split: str | None) -> tuple[list[Sequence[str]], str]:
    """The lines of every document, and what they are called."""
    if isinstance(data, str | Path):
        path = Path(data)
        if str(data) in LINE_SOURCES or path.suffix.lower() not in SUFFIXES:
            return [load_lines(data, split)], str(data)
        if split is not None:
            raise InputError(f"split '{split}' was asked for, but file {path} has none; give a file each")
        rows = [checked_column(row, "text", number, path) for number, row in enumerate(read_rows(path), 1)]
        wrong = next((number for number, text in enumerate(rows, 1) if not isinstance(text, str)), None)
        if wrong is not None:
            raise InputError(f"row {wrong} of {path} has no text; every row needs one, a document")
        for number, text in enumerate(rows, 1):
            checked_string(text, "text", number, path)
        return [text.split("\n") for text in rows], str(data)
    if split is not None:
        raise InputError(f"split '{split}' means nothing for texts; leave it out")
    texts = list(data)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise InputError("data holds no text, or something that is none; give a name, a file, or texts")
    return [text.split("\n") for text in texts], "texts"


def _shared_windows(
    models: Sequence[Model], documents: Sequence[Sequence[str]], length: int
) -> tuple[Int[np.ndarray, "windows length+1"], int]:
    """As `_windows`, the same for all models."""
    first = models[0]
    windows, left_out = _windows(first, documents, length)
    for other in models[1:]:
        same = token_names(other.tokenizer) == token_names(first.tokenizer)
        if not same or not np.array_equal(_windows(other, documents, length)[0], windows):
            raise InputError(
                f"{first.name} and {other.name} do not share a tokenizer, so a token of one is no token of the other; "
                "measure them one at a time"
            )
    return windows, left_out


def _windows(
    model: Model, documents: Sequence[Sequence[str]], length: int
) -> tuple[Int[np.ndarray, "windows length+1"], int]:
    """Windows of `length` + 1 tokens, of which the last is only asked for; and how many documents have none.

    A line ends with a line end where the tokenizer knows one, else with its end-of-text token (`language_data`).
    """
    tokenizer = model.tokenizer
    newline = bool(tokenizer("\n", add_special_tokens=False)["input_ids"])
    tail = [] if newline or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    windows, longest, left_out = [], 0, 0
    for lines in documents:
        check_symbols(lines, tokenizer)
        texts = [line + "\n" for line in lines] if newline else list(lines)
        rows = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        stream = np.array([i for row in rows for i in (*row, *tail)], dtype=np.int64)
        number = (len(stream) - 1) // length if len(stream) else 0
        longest, left_out = max(longest, len(stream)), left_out + (number == 0)
        at = np.arange(number)[:, None] * length + np.arange(length + 1)
        windows.append(stream[at])
    found = np.concatenate(windows)
    if not len(found):
        raise InputError(
            f"no document is long enough for a window of {length:,} tokens and the one after it: the longest has "
            f"{longest:,}; give a smaller length, or longer texts"
        )
    if found.max() >= model.vocabulary:
        raise InputError(
            f"the tokenizer gives id {found.max()}, outside the vocabulary 0…{model.vocabulary - 1} of {model.name}"
        )
    return found, left_out


def window_losses(
    model: Model,
    windows: Int[np.ndarray, "windows length+1"],
    *,
    piece: int = PIECE,
    say: Callable[[str], None] | None = None,
) -> Float[np.ndarray, "windows length"]:
    """−ln p of every token of a window but the first, float32, from those before it.

    There are never more than `LOGITS_AT_ONCE` logits in memory, nor hidden states of more than a batch of pieces.
    """
    number, length = windows.shape[0], windows.shape[1] - 1
    found = np.zeros((number, length), dtype=np.float32)
    rows = Rows(windows[:, :-1].ravel(), np.arange(number + 1) * length)
    step = max(1, LOGITS_AT_ONCE // model.vocabulary)
    began, done = time.perf_counter(), 0
    for part in pieces_of(model, rows, piece=piece):
        stop = part.start + part.hidden.shape[1]
        targets = torch.from_numpy(windows[part.rows, part.start + 1 : stop + 1]).to(model.device).reshape(-1)
        hidden = part.hidden.flatten(0, 1)
        losses = [
            torch.nn.functional.cross_entropy(
                head_logits(model, hidden[at : at + step]), targets[at : at + step], reduction="none"
            )
            for at in range(0, len(hidden), step)
        ]
        found[part.rows, part.start : stop] = torch.cat(losses).view(part.hidden.shape[:2]).cpu().numpy()
        done += int(part.ends.sum())
        if say is not None and part.ends.any() and time.perf_counter() - began > 10:
            say(f"  {done:,} of {number:,} windows")
            began = time.perf_counter()
    return found


# ---- numbers


def _places(length: int) -> tuple[int, ...]:
    """Positions from 1 to `length`, evenly apart in their logarithm."""
    return tuple(sorted({round(at) for at in np.geomspace(1, length, POINTS).tolist()}))


def bins_of(length: int) -> list[tuple[int, int]]:
    """The bins of positions, (after, up to): 0–128, 128–512, 512–1024, 1024–2048, …; the last one ends at `length`."""
    edges = [*EDGES]
    while edges[-1] < length:
        edges.append(max(1024, 2 * edges[-1]))
    edges = [edge for edge in edges if edge < length] + [length]
    return list(zip(edges, edges[1:]))


def smoothed(
    losses: Float[np.ndarray, "rows length"], positions: Sequence[int], smooth: int
) -> Float[np.ndarray, "rows positions"]:
    """The mean over `smooth` positions around each, counted from 1: near the start, where the curve is steep, over as
    many after it as there are before; near the end over what there is."""
    at = np.asarray(positions)
    half = np.minimum(at - 1, smooth // 2)
    first, last = at - half, np.minimum(at + half, losses.shape[1])
    sums = np.concatenate([np.zeros((len(losses), 1)), losses.astype(np.float64).cumsum(1)], axis=1)
    return (sums[:, last] - sums[:, first - 1]) / (last - first + 1)


def slopes(losses: Float[np.ndarray, "rows length"]) -> Float[np.ndarray, " rows"]:
    """Σ (x − x̄) ℓ / Σ (x − x̄)² over the positions after `SETTLED`, x = log₂ position: the loss a doubling adds."""
    positions = np.arange(SETTLED + 1, losses.shape[1] + 1)
    if len(positions) < 2:
        return np.full(len(losses), np.nan)
    x = np.log2(positions)
    x -= x.mean()
    return losses[:, SETTLED:].astype(np.float64) @ x / (x @ x)


def _measured(
    losses: Float[np.ndarray, "models windows length"], positions: Sequence[int], smooth: int, seed: int
) -> dict[str, Any]:
    """The fields of a result that come from all losses."""
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
    if windows == 1:
        rows = rows[:1]  # one window has no interval
    summaries = [estimate(column) for column in rows.T]
    size = len(bins) + 2

    def summary(number: int) -> Summary:
        mean, slope, *parts = summaries[number * size : (number + 1) * size]
        return Summary(mean, slope, tuple(parts))

    curve = np.array([(one.value, one.low, one.high) for one in summaries[(2 * models - 1) * size :]])
    return {
        "bins": tuple(bins),
        "summaries": tuple(summary(number) for number in range(models)),
        "differences": tuple(summary(number) for number in range(models, 2 * models - 1)),
        "curves": curve.reshape(models, len(positions), 3),
    }


def _notes(windows: int, left_out: int) -> Iterable[str]:
    if windows == 1:
        yield "one window: no number has an interval"
    if left_out:
        yield f"{left_out:,} document{'s are' if left_out > 1 else ' is'} shorter than a window, and not read"


# ---- the result


@dataclass(frozen=True)
class Summary:
    """The losses of a model, or those of the first model less another's, in few numbers."""

    mean: Estimate
    """Over all positions: the model's cross-entropy on the windows."""
    slope: Estimate
    """Per doubling of the position, after the first 100; not defined where there are fewer than two more."""
    bins: tuple[Estimate, ...]
    """The mean in each bin of positions."""


@dataclass(frozen=True)
class TokenLoss(Result, kind="loss"):
    """The loss of the next token by its position, of one model or several on the same windows."""

    models: tuple[str, ...]
    unit: str
    """"nats" or "bits"."""
    smooth: int
    """Over how many positions the curves are averaged."""
    positions: tuple[int, ...]
    """Those of the curves: how many tokens have been read."""
    losses: np.ndarray
    """(models, length): the mean over the windows at every position, not smoothed."""
    bins: tuple[tuple[int, int], ...]
    """(after, up to) positions."""
    summaries: tuple[Summary, ...]
    """Of each model."""
    differences: tuple[Summary, ...]
    """Of the first model less each of the others, paired."""
    curves: np.ndarray
    """(models, positions, 3): the smoothed loss and its interval."""
    notes: tuple[str, ...]

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return self.losses.shape[1]

    @property
    def headline(self) -> str:
        found = [f"{name} {one.mean.value:.3f}" for name, one in zip(self.models, self.summaries)]
        return f"Loss by position, {self.unit} a token over {self.length:,} tokens: {'; '.join(found)}"

    @property
    def counted(self) -> str:
        """What was read."""
        data = self.provenance["data"]
        number = data["windows"]
        return f"{number:,} window{'s' if number > 1 else ''} of {self.length:,} tokens of {data['name']}"

    def summary(self) -> DataFrame:
        """A row per model, then per difference, and quantity: name, quantity (mean, slope, or a bin as "128–512"),
        value, low and high."""
        import pandas as pd

        names = [*self.models, *(f"{self.models[0]} − {other}" for other in self.models[1:])]
        rows = []
        for name, one in zip(names, (*self.summaries, *self.differences)):
            quantities = ["mean", "slope", *map(bin_name, self.bins)]
            for quantity, found in zip(quantities, (one.mean, one.slope, *one.bins)):
                row = {"name": name, "quantity": quantity, "value": found.value}
                rows.append({**row, "low": found.low, "high": found.high})
        return pd.DataFrame(rows)

    def to_frame(self) -> DataFrame:
        """A row per model and position of its curve: model, position, loss (smoothed) with its 95 % interval in
        loss_low and loss_high, and raw, the mean over windows at this position alone. `summary()` has the bins."""
        import pandas as pd

        rows = []
        for number, name in enumerate(self.models):
            for position, (value, low, high) in zip(self.positions, self.curves[number]):
                row: dict[str, Any] = {"model": name, "position": position, "loss": value}
                row |= {"loss_low": low, "loss_high": high, "raw": self.losses[number, position - 1]}
                rows.append(row)
        return pd.DataFrame(rows)

    def figure(self) -> Figure:
        """The smoothed loss of every model against position; with several, below it the differences in the bins."""
        from ssmscope.probes.token_loss_figure import draw

        return draw(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        yield Text(self.headline)
        yield Text("")
        table = Table(box=None, pad_edge=False)
        for heading in ("positions", *self.models, *(f"less {other}" for other in self.models[1:])):
            table.add_column(Text(heading), justify="left" if heading == "positions" else "right")
        every = (*self.summaries, *self.differences)
        for at, edges in enumerate(self.bins):
            table.add_row(bin_name(edges), *(str(one.bins[at]) for one in every))
        table.add_row("all", *(str(one.mean) for one in every))
        table.add_row("per doubling", *(str(one.slope) for one in every))
        yield table
        yield Text(f"\n{self.counted}; {self.unit} a token.")
        if self.differences:
            yield Text(f"less: the loss of {self.models[0]} less that of another; below 0 it is the better one.")
        yield Text("Intervals: 95 %, bootstrap over windows; per doubling: slope on log₂ position after the first 100.")
        yield from (Text(f"Note: {note}.") for note in self.notes)


def bin_name(edges: tuple[int, int]) -> str:
    return f"{edges[0]:,}–{edges[1]:,}"
