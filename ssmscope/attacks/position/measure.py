"""Estimates of the position-bias attack from class ids, and the check of its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from ssmscope.attacks.position.regions import Region
from ssmscope.attacks.position.replaced import LEFT_OUT, Pixels, Tokens
from ssmscope.attacks.position.result import Attacked
from ssmscope.core.bootstrap import Estimate, estimate, lowest, ratio, resampled_sums
from ssmscope.core.model import Model
from ssmscope.data.pixels import PixelData
from ssmscope.data.sequences import SequenceData
from ssmscope.data.text import TextData
from ssmscope.errors import InputError

PAPER = ((0, 32), (0, 96), (928, 1024), (992, 1024))
"""Regions of Baleen's Table 3, in 1024 pixels."""

SHARES = ("0%:10%", "0%:25%", "75%:100%", "90%:100%")
"""Regions for sequences of other lengths than 1024 tokens."""


class Measured(NamedTuple):
    """Estimates, and the rows (value, then resamples) behind them: accuracies, the clean one first, and drops."""

    clean: Estimate
    attacked: tuple[Attacked, ...]
    rows: np.ndarray
    drops: np.ndarray


def measure(
    labels: Int[np.ndarray, " examples"],
    clean: Int[np.ndarray, " examples"],
    attacked: Int[np.ndarray, "examples regions"],
    donor_labels: Int[np.ndarray, " examples"] | None,
    regions: Sequence[Region],
    seed: int,
) -> Measured:
    """Compute all estimates from class ids."""
    right = (clean == labels)[:, None]
    usable = attacked != LEFT_OUT
    changed = usable & right & (attacked != clean[:, None])
    taken = changed & (attacked == (labels if donor_labels is None else donor_labels)[:, None])
    columns = [right, usable, usable & right, usable & (attacked == labels[:, None]), changed, taken]
    sums = resampled_sums(np.concatenate(columns, axis=1).astype(np.float64), seed=seed)
    rights, *rest = np.split(sums, 1 + len(regions) * np.arange(5), axis=1)
    among, clean_right, hits, changes, takes = rest
    accuracy, drops = ratio(hits, among), 1 - ratio(hits, clean_right)
    parts = {"accuracy": accuracy, "clean": ratio(clean_right, among), "drop": drops}
    parts |= {"flipped": ratio(changes, clean_right)}
    parts |= {"success": ratio(takes, clean_right)} if donor_labels is not None else {}
    results = [
        Attacked(
            **{"region": str(region), **vars(region)},
            examples=int(usable[:, i].sum()),
            left_out=int((~usable[:, i]).sum()),
            **{name: estimate(part[:, i]) for name, part in parts.items()},
        )
        for i, region in enumerate(regions)
    ]
    rows = np.concatenate([rights / len(labels), accuracy], axis=1)
    return Measured(estimate(rows[:, 0]), tuple(results), rows, drops)


def averages(measured: Measured, number: int) -> dict[str, Any]:
    """Compute the averages over the first `number` regions, by the fields of `PositionBias`."""
    accuracies = measured.rows[:, : 1 + number]
    return {
        "average": estimate(accuracies[:, 1:].mean(1)),
        "average_drop": estimate(measured.drops[:, :number].mean(1)),
        "average_with_clean": estimate(accuracies.mean(1)),
        "spread": float(accuracies[0].std(ddof=1)),
        "worst_regions": lowest(-measured.drops[:, :number]),
        "worst_windows": lowest(-measured.drops[:, number:]),
    }


def notes_on(measured: Measured, examples: int) -> Iterator[str]:
    if measured.clean.value == 0:
        yield "the clean accuracy is 0: there is no drop to measure"
    if short := [one for one in measured.attacked if one.left_out]:
        most = max(short, key=lambda one: one.left_out)
        yield (
            f"{len(short)} of the regions and windows extend beyond some examples or their donors, which are left out "
            f"there: {most.left_out:,} of {examples:,} at {most.region}"
        )


def replaced_inputs(model: Model, data: Any) -> Callable[..., Pixels | Tokens]:
    """Return the class that replaces tokens in data of this kind."""
    model.check_classes("the position-bias attack")
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
