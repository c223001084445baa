"""Recurrences whose state visits the positions in another order, as from the last to the first.

They are run with their positions in that order, and the results are put back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torch import Tensor

from ssmscope.errors import InputError

T = TypeVar("T")


def straight(recurrence: Any) -> Any:
    """Return a recurrence with its positions in the order in which its state visits them."""
    return recurrence if recurrence.order is None else recurrence.at(recurrence.order)


def along(order: Tensor | None, compute: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """Compute a function of (batch, length, …) on the positions in this order, and put the result back."""
    return compute(t) if order is None else compute(t[:, order])[:, order.argsort()]


def check_one_way(recurrences: Any, what: str) -> None:
    """Raise InputError if a state visits the positions in another order, for a question that then has no answer."""
    if any(recurrence.order is not None for recurrence in recurrences):
        raise InputError(f"the layer reads its input both ways, and {what} needs a layer that only reads it forwards")


def scan_in_order(run: Callable[..., T]) -> Callable[..., T]:
    """Extend a scan to recurrences with an order: outputs and retention are at their positions."""

    @wraps(run)
    def scanned(recurrence: Any, initial: Tensor | None = None, **options: Any) -> Any:
        if recurrence.order is None:
            return run(recurrence, initial, **options)
        found: Any = run(straight(recurrence), initial, **options)
        place = recurrence.order.argsort()
        kept = None if found.retention is None else found.retention[:, place]
        return found._replace(y=found.y[:, place], retention=kept)

    return scanned


def map_in_order(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Extend an attention map to recurrences with an order."""

    @wraps(run)
    def mapped(recurrence: Any, **options: Any) -> Tensor:
        order, rows = recurrence.order, options.get("rows")
        if order is None:
            return run(recurrence, **options)
        place = order.argsort()
        around = {name: t[:, order] for name in ("left", "taps") if (t := options.get(name)) is not None}
        chosen = None if rows is None else place[list(rows)].tolist()
        found = run(straight(recurrence), **{**options, **around, "rows": chosen})[..., place]
        return found if rows is not None else found[:, :, place]

    return mapped
