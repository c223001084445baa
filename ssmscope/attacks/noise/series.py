"""Series with noise, dropped steps or shifts, and a classifier's answers to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from ssmscope.api.provenance import call_options, record_provenance
from ssmscope.attacks.curves import no_drop, true_log_odds
from ssmscope.attacks.noise.measure import measure
from ssmscope.attacks.noise.result import CHANGES as NAMED
from ssmscope.attacks.noise.result import NoiseCurve
from ssmscope.core.batching import tokens_at_once
from ssmscope.core.model import Model
from ssmscope.interp.labelled import check_series, class_ids

CHANGES = tuple(NAMED)[1:]
"""Changes of series; the first is the default."""

Series = Float[np.ndarray, "examples length channels"]


def changed(series: Series, change: str, rate: float, seed: int) -> Series:
    """Return series with Gaussian noise of `rate` times each channel's standard deviation over the data; with each step
    replaced by the channels' mean with the probability `rate`; or moved by up to `rate` times their length, their first
    or last step repeated. A higher rate has the same draws, larger."""
    draws = np.random.default_rng([seed, CHANGES.index(change)])
    examples, length, _ = series.shape
    if change == "gaussian":
        return series + (rate * series.std((0, 1)) * draws.standard_normal(series.shape)).astype(series.dtype)
    if change == "dropped":
        gone = draws.random((examples, length, 1)) < rate
        return np.where(gone, series.mean((0, 1)), series).astype(series.dtype)
    moves = np.rint(rate * length * draws.uniform(-1, 1, (examples, 1))).astype(int)
    places = np.clip(np.arange(length) - moves, 0, length - 1)
    return np.take_along_axis(series, places[:, :, None], axis=1)


def answered(model: Model, forms: Sequence[Series]) -> Float[np.ndarray, "forms examples classes"]:
    """Return the log-probabilities of all classes for the series in each form."""
    at_once = max(1, tokens_at_once(model.device) // forms[0].shape[1])
    found = []
    for form in forms:
        with torch.no_grad():
            parts = [form[at : at + at_once] for at in range(0, len(form), at_once)]
            logits = torch.cat([model.logits(model.encode(values=part)) for part in parts])
        found.append(logits.double().log_softmax(-1).cpu().numpy())
    return np.stack(found)


def noise_in_series(
    model: Model, data: Any, change: str | None, rates: Sequence[float], limit: int | None, seed: int
) -> NoiseCurve:
    """Return the accuracy on series that a change makes more and more different, by default `CHANGES`' first. Raises
    InputError for data that are no labelled series of the model's channels."""
    check_series(model, data, "noise")
    data, change = data if limit is None else data.sample(limit, seed=seed), change or CHANGES[0]
    labels = class_ids(model, data)
    scores = answered(model, [data.pixels, *(changed(data.pixels, change, rate, seed) for rate in rates)])
    odds, no_errors = true_log_odds(scores, labels), [math.nan] * len(rates)
    found = measure(labels, scores.argmax(-1), odds, rates, no_errors, (), (), seed)
    options = call_options(rates=list(rates), change=change)
    return NoiseCurve(
        provenance=record_provenance(model.source, options=options, seed=seed, data=data),
        classes=tuple(model.labels or ()),
        **found,
        notes=tuple(no_drop(found["clean"])),
        change=change,
    )
