"""Checks of how the numbers of a new weight are drawn."""

import pytest
from torch import Tensor


def check_spread(weight: Tensor, std: float) -> None:
    """A normal draw: the spread of so many, and some outside of ±1.9 of it, which a uniform draw never is."""
    weight = weight.detach()
    assert float(weight.std()) == pytest.approx(std, rel=0.1) and float(weight.abs().max()) > 1.9 * std


def check_uniform(weight: Tensor, low: float, high: float) -> None:
    weight = weight.detach()
    room = (high - low) / 4
    assert low <= float(weight.min()) < low + room and high - room < float(weight.max()) <= high
