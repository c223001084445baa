"""The position-bias attack: how accuracy depends on where in the sequence the tokens are that are spoiled.

Baleen, section 4.3 and Table 3, after Wang et al. (2024): state-space models lean on the last tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.attacks.regions import Given, Region, regions_of, windows_of
from ssmscope.attacks.replaced import LEFT_OUT, Pixels, Tokens, draw_donors
from ssmscope.bootstrap import Estimate, estimate, ratio, resampled_sums
from ssmscope.errors import InputError, did_you_mean
from ssmscope.limits import refuse_above
from ssmscope.results import Result, record_provenance
from ssmscope.tasks.pixels import PixelData
from ssmscope.tasks.sequences import SequenceData
from ssmscope.tasks.text import TextData

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType

    from ssmscope.model import Model

REPLACEMENTS = {
    "noise": "noise",
    "zeros": "zeros",
    "mean": "the mean",
    "other": "those of another class",
}
"""What tokens are replaced by, and how the views call it."""

PAPER = ((0, 32), (0, 96), (928, 1024), (992, 1024))
"""The regions of Baleen's Table 3, of 1024 pixels."""

SHARES = ("0%:10%", "0%:25%", "75%:100%", "90%:100%")
"""The regions where sequences are not of 1024 tokens."""


def position_bias(
    model: Model,
    data: PixelData | TextData | SequenceData,
    *,
    regions: Given | None = None,
    replacement: str = "noise",
    window: str | int | None = None,
    stride: str | int | None = None,
    limit: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> PositionBias:
    """Replace the tokens of one region after the other and measure what it costs the classifier (Baleen, Table 3).

    Regions are of the sequence without class and special tokens. The drop is relative, 1 − accuracy / clean accuracy.
    Every number has a 95 % bootstrap interval over examples; drops are paired, clean and attacked accuracy coming from
    the same resamples. (An accuracy of 0 or 1 does not vary under resampling: its interval has no width.) With "other",
    the attack succeeds on an example that is right when clean and is given the class whose tokens were put in.

    Noise is drawn once per example for all places: regions, batches and stride do not change it.

    Args:
        model: a classifier of pixels, of texts or of sequences.
        data: examples of its kind.
        regions: "0:32,0:96", pairs of tokens, or shares of every example's own tokens, "0%:10%". By default the paper's
            regions 0:32, 0:96, 928:1024, 992:1024 of 1024 tokens; else the first and last 10 % and 25 %.
        replacement: noise (pixels: N(0, 1) as in the paper; tokens: an embedding of N(0, 1) times the standard
            deviation of the embedding table), zeros (black; a zero embedding), mean (the data's mean pixel; the
            table's mean embedding), other (the same places of an example of another class).
        window: also measure windows of so many tokens, or of a share such as 10%, all along the sequence.
        stride: how far apart the windows are; by default a window's width.
        limit: only so many examples, drawn by the seed.
        batch_size: examples that are run together; by default as many as suit the device.
        seed: draws examples, noise, donors and resamples.

    Raises:
        InputError: the model is no classifier or one of other inputs or classes, a region or window that does not fit,
            an unknown replacement, or "other" on data of one class.
    """
    if replacement not in REPLACEMENTS:
        raise InputError(
            f"unknown replacement {replacement!r}; allowed are {', '.join(REPLACEMENTS)}"
            f"{did_you_mean(str(replacement), REPLACEMENTS)}"
        )
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch_size is {batch_size}; allowed is a whole number from 1 on")
    refuse_above(2**16, batch_size=batch_size)
    if seed < 0:
        raise InputError(f"seed is {seed}; allowed is a whole number from 0 on")
    if stride is not None and window is None:
        raise InputError("a stride was given without a window; give both")
    subject = _subject(model, data)
    if limit is not None:
        data = data.sample(limit, seed=seed)
    labels = class_ids(model, data)
    inputs = subject(model, data, replacement, seed)
    longest = int(inputs.lengths.max())
    usual: Given = PAPER if longest == PAPER[-1][1] and inputs.lengths.min() == longest else SHARES
    named = regions_of(usual if regions is None else regions, longest)
    windows = windows_of(window, stride, longest) if window is not None else ()
    every = (*named, *windows)
    donors = None
    if replacement == "other":
        reach = [[stop for _, stop in (r.bounds(n) for r in every) if stop <= n] for n in inputs.lengths.tolist()]
        needed = np.array([max(stops, default=0) for stops in reach])
        donors = draw_donors(labels, inputs.lengths, needed, seed)
    clean, attacked = inputs.predict(every, donors, batch_size)
    measured = measure(labels, clean, attacked, labels[donors] if donors is not None else None, every, seed)
    options: dict[str, Any] = {
        "regions": [str(region) for region in named],
        "replacement": replacement,
        "window": window,
        "stride": stride,
        "limit": limit,
        "batch_size": batch_size,
    }
    origin = {"name": data.name, "split": data.split, "fingerprint": data.fingerprint, "examples": len(data)}
    return PositionBias(
        provenance={**record_provenance(model.source, options=options, seed=seed), "data": origin},
        replacement=replacement,
        unit=inputs.unit,
        length=longest,
        width=data.shape[1] if isinstance(data, PixelData) else None,
        clean=measured.clean,
        regions=measured.attacked[: len(named)],
        windows=measured.attacked[len(named) :],
        **averages(measured, len(named)),
        notes=(*inputs.remarks, *_notes(measured, len(data))),
    )


@dataclass(frozen=True)
class Attacked:
    """What is measured with one region replaced."""

    region: str
    start: float
    stop: float
    percent: bool
    """Whether `start` and `stop` are in percent of each example's tokens."""
    examples: int
    left_out: int
    """Examples that are too short for the region, or whose donor is; they are in none of the numbers."""
    accuracy: Estimate
    clean: Estimate
    """Clean accuracy of the same examples."""
    drop: Estimate
    """1 − accuracy / clean accuracy."""
    flipped: Estimate
    """The share of the examples that are right when clean whose prediction changes."""
    success: Estimate | None
    """The share of them that are given the class whose tokens were put in; only with "other"."""


@dataclass(frozen=True)
class PositionBias(Result, kind="position"):
    """Accuracy with the tokens of each region replaced, and the drop along the sequence."""

    replacement: str
    unit: str
    """ "pixels" or "tokens"."""
    length: int
    """Tokens of the longest example."""
    width: int | None
    """Pixels of a row, of images."""
    clean: Estimate
    regions: tuple[Attacked, ...]
    windows: tuple[Attacked, ...]
    average: Estimate
    """Mean accuracy over the regions."""
    average_drop: Estimate
    average_with_clean: Estimate
    """Mean accuracy over the regions and the clean inputs: the "Avg." of Baleen's Table 3."""
    spread: float
    """The sample standard deviation of these, which that table gives behind ±."""
    notes: tuple[str, ...]

    @property
    def headline(self) -> str:
        model = self.provenance.get("model", "a model")
        number = f"{len(self.regions)} regions" if len(self.regions) > 1 else "one region"
        return (
            f"Position bias of {model}: accuracy {self.clean.value:.3f} clean, {share(self.average.value)} on average "
            f"with {self.unit} of {number} replaced by {REPLACEMENTS[self.replacement]}"
        )

    def to_frame(self) -> DataFrame:
        """A row for the clean inputs, each region, their averages, and each window.

        Columns: part, region, start, stop, unit ("pixels", "tokens" or "percent"), examples, left_out, accuracy, drop
        (relative, in percent), flipped and, with "other", success (shares of the examples that are right when clean);
        the 95 % interval of each is in columns ending in _low and _high.
        """
        import pandas as pd

        rows = [_row("clean", "clean", self.provenance["data"]["examples"], accuracy=self.clean)]
        for part, attacked in (("region", self.regions), ("window", self.windows)):
            for one in attacked:
                place = {"start": one.start, "stop": one.stop, "unit": "percent" if one.percent else self.unit}
                estimates = {"accuracy": one.accuracy, "drop": one.drop.times(100), "flipped": one.flipped}
                if one.success is not None:
                    estimates["success"] = one.success
                row = _row(part, one.region, one.examples, **estimates)
                rows.append({**row, **place, "left_out": one.left_out})
            if part == "region":
                mean = dict(accuracy=self.average, drop=self.average_drop.times(100))
                rows.append(_row("average", "average of the regions", None, **mean))
                rows.append(_row("average", "average with clean", None, accuracy=self.average_with_clean))
        names = ["accuracy", "drop", "flipped", *(["success"] if self.replacement == "other" else [])]
        columns = ["part", "region", "start", "stop", "unit", "examples", "left_out"]
        columns += [name + end for name in names for end in ("", "_low", "_high")]
        frame = pd.DataFrame(rows, columns=columns)
        return frame.astype({"examples": "Int64", "left_out": "Int64"})

    def figure(self) -> Figure:
        """Accuracy with each region replaced beside the clean accuracy, and the drop along the sequence where windows
        were asked for."""
        from ssmscope.attacks.position_figure import draw

        return draw(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        data = self.provenance["data"]
        headings = ["region", "accuracy", "drop in %", "flipped"]
        headings += ["success"] if self.replacement == "other" else []
        headings += ["examples"] if any(one.left_out for one in self.regions) else []
        table = Table(title=Text(self.headline), title_justify="left", box=None, pad_edge=False)
        for heading in headings:
            table.add_column(heading, justify="left" if heading == "region" else "right", no_wrap=True)

        def add(**cells: str) -> None:
            table.add_row(*(cells.get(heading.partition(" ")[0], "") for heading in headings))

        add(region="clean", accuracy=str(self.clean), examples=f"{data['examples']:,}")
        for one in self.regions:
            shares = {"flipped": share(one.flipped.value, "–"), "examples": f"{one.examples:,}"}
            if one.success is not None:
                shares["success"] = share(one.success.value, "–")
            add(region=one.region, accuracy=str(one.accuracy), drop=percent(one.drop), **shares)
        add(region="average", accuracy=str(self.average), drop=percent(self.average_drop))
        spread = "" if math.isnan(self.spread) else f" ± {self.spread:.3f}"
        add(region="with clean", accuracy=share(self.average_with_clean.value) + spread)
        yield table
        yield Text(f"\n{data['examples']:,} examples of {data['name']} ({data['split']}); 95 % bootstrap intervals.")
        defined = [one for one in self.windows if not math.isnan(one.drop.value)]
        if defined:
            worst = max(defined, key=lambda one: one.drop.value)
            yield Text(
                f"{len(self.windows)} windows: the largest drop is {percent(worst.drop)} % at {worst.region}, the mean "
                f"{100 * np.mean([one.drop.value for one in defined]):.1f} %."
            )
        yield from (Text(f"Note: {note}.") for note in self.notes)


@dataclass(frozen=True)
class Measured:
    """Estimates, and the rows (value, then resamples) that they come from: `rows` (1 + resamples, 1 + regions) of
    accuracies, the clean one first, `drops` (1 + resamples, regions)."""

    clean: Estimate
    attacked: tuple[Attacked, ...]
    rows: np.ndarray
    drops: np.ndarray


def measure(
    labels: np.ndarray,
    clean: np.ndarray,
    attacked: np.ndarray,
    donor_labels: np.ndarray | None,
    regions: Sequence[Region],
    seed: int,
) -> Measured:
    """All numbers from class ids: `labels`, `clean`, `donor_labels` (examples,) and `attacked` (examples, regions)."""
    number = len(regions)
    right = (clean == labels)[:, None]
    usable = attacked != LEFT_OUT
    hit = usable & (attacked == labels[:, None])
    changed = usable & right & (attacked != clean[:, None])
    taken = changed & (attacked == donor_labels[:, None]) if donor_labels is not None else np.zeros_like(changed)
    columns = np.concatenate([right, usable, usable & right, hit, changed, taken], axis=1)
    sums = resampled_sums(columns.astype(np.float64), seed=seed)
    rights, rest = sums[:, :1], sums[:, 1:]
    among, clean_right, hits, changes, takes = (rest[:, i * number : (i + 1) * number] for i in range(5))
    accuracy = ratio(hits, among)
    same = ratio(clean_right, among)
    drops = 1 - ratio(hits, clean_right)
    flipped, success = ratio(changes, clean_right), ratio(takes, clean_right)
    results = tuple(
        Attacked(
            region=str(region),
            start=region.start,
            stop=region.stop,
            percent=region.percent,
            examples=int(usable[:, i].sum()),
            left_out=int((~usable[:, i]).sum()),
            accuracy=estimate(accuracy[:, i]),
            clean=estimate(same[:, i]),
            drop=estimate(drops[:, i]),
            flipped=estimate(flipped[:, i]),
            success=estimate(success[:, i]) if donor_labels is not None else None,
        )
        for i, region in enumerate(regions)
    )
    rows = np.concatenate([rights / len(labels), accuracy], axis=1)
    return Measured(estimate(rows[:, 0]), results, rows, drops)


def averages(measured: Measured, number: int) -> dict[str, Any]:
    """The averages over the first `number` regions, by the names that `PositionBias` gives them."""
    accuracies = measured.rows[:, : 1 + number]
    return {
        "average": estimate(accuracies[:, 1:].mean(1)),
        "average_drop": estimate(measured.drops[:, :number].mean(1)),
        "average_with_clean": estimate(accuracies.mean(1)),
        "spread": float(accuracies[0].std(ddof=1)),
    }


def _notes(measured: Measured, examples: int) -> list[str]:
    notes = []
    if measured.clean.value == 0:
        notes.append("the clean accuracy is 0: there is no drop to measure")
    short = [one for one in measured.attacked if one.left_out]
    if short:
        most = max(short, key=lambda one: one.left_out)
        notes.append(
            f"{len(short)} of the regions and windows end after some examples do, or their donors, which are "
            f"left out there: {most.left_out:,} of {examples:,} at {most.region}"
        )
    return notes


def class_ids(model: Model, data: PixelData | TextData | SequenceData) -> np.ndarray:
    """The examples' labels as the model numbers its classes, (examples,) int64.

    Classes are matched by name, and by number where the model's have no names of their own.

    Raises:
        InputError: when they do not match.
    """
    ours, theirs = list(data.label_names), list(model.labels or ())
    labels = np.asarray(data.labels, dtype=np.int64)
    if set(ours) <= set(theirs):
        return np.array([theirs.index(name) for name in ours])[labels]
    unnamed = theirs == [f"LABEL_{i}" for i in range(len(theirs))]
    if unnamed and len(ours) == len(theirs):
        return labels
    given, known = (", ".join(names[:12]) for names in (ours, theirs))
    raise InputError(f"{data.name} has the classes {given}; {model.name} tells apart {known}: give data of these")


def _subject(model: Model, data: Any) -> Any:
    """How examples of this kind are read and spoiled."""
    if not model.is_classifier:
        raise InputError(f"{model.name} is no classifier: the position-bias attack measures a classifier's accuracy")
    if not isinstance(data, PixelData | TextData | SequenceData):
        raise InputError(f"data is {type(data).__name__}; allowed are labelled images, texts and sequences")
    if not len(data):
        raise InputError(f"{data.name} ({data.split}) has no example")
    pixels = isinstance(data, PixelData)
    if pixels != (model.channels is not None):
        reads, given = ("tokens", "images") if pixels else ("pixels", "texts")
        raise InputError(f"{model.name} reads {reads}, but {data.name} holds {given}")
    return Pixels if pixels else Tokens


def _row(part: str, region: str, examples: int | None, **estimates: Estimate) -> dict[str, Any]:
    row: dict[str, Any] = {"part": part, "region": region, "examples": examples}
    for name, found in estimates.items():
        row |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
    return row


def share(value: float, absent: str = "not defined") -> str:
    """An accuracy or another share, without an interval."""
    return absent if math.isnan(value) else f"{value:.3f}"


def percent(drop: Estimate) -> str:
    """A relative drop in percent, with its interval."""
    if math.isnan(drop.value):
        return "not defined"
    return f"{100 * drop.value:.1f} [{100 * drop.low:.1f}, {100 * drop.high:.1f}]"
