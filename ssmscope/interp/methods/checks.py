"""Checks of the methods' options, and the source of their random numbers."""

from __future__ import annotations

import math
import zlib

import numpy as np

from ssmscope.errors import InputError
from ssmscope.interp.objective import Objective


def check_whole(name: str, value: int, least: int) -> None:
    """Raise InputError unless the option is a whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InputError(f"{name} is {value!r}; allowed is a whole number from {least} on")


def check_number(name: str, value: float, least: float) -> None:
    """Raise InputError unless the option is a finite number from `least` on."""
    plain = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not plain or not math.isfinite(value) or value < least:
        raise InputError(f"{name} is {value!r}; allowed is a number from {least} on")


def text_generator(objective: Objective, text: int, seed: int) -> np.random.Generator:
    """Return a generator that depends only on the seed and on the text's own tokens or pixels."""
    check_whole("seed", seed, 0)
    batch = objective.batch
    if batch.values is not None:
        content = [zlib.crc32(batch.values[text].cpu().double().numpy().tobytes())]
    else:
        content = batch.input_ids[text, : objective.lengths[text]].tolist()
    return np.random.default_rng([int(seed), *content])
