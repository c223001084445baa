"""Measurement of a data set batch by batch, here or on workers, with stored parts from which a killed run continues."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ssmscope.api.store import Store, removed_if_refused
from ssmscope.core.progress import progress_bar

if TYPE_CHECKING:
    from ssmscope.core.model import Model

Columns = Mapping[str, np.ndarray]
"""Measurements of one batch: arrays of numbers, booleans or texts by name."""
Measure = Callable[[Any], Columns]
"""Function that measures a batch, independently of all other batches."""
BatchEngine = Callable[["Model", Measure, Sequence[tuple[int, Any]]], Iterator[tuple[int, Columns]]]
"""Function that measures numbered batches and yields each number with its part, in any order."""

PARTS = ".parts.sqlite"
"""File, within a result's directory, of its parts until the result is complete."""

engine: ContextVar[BatchEngine | None] = ContextVar("engine", default=None)
"""Engine that measures batches; None for this process."""
_keeping: ContextVar[tuple[Store, list[bytes]] | None] = ContextVar("keeping", default=None)
"""Store of the parts, and the keys used."""


def over(
    model: Model,
    batches: Iterable[Any],
    measure: Measure,
    *,
    provenance: Mapping[str, Any] | None = None,
    what: str | None = "texts",
    size: Callable[[Any], int] = len,
) -> Iterator[tuple[Any, Columns]]:
    """Yield every batch with its measurements, in the order of `batches`.

    The batches are fixed in advance, so the digits do not depend on the number of workers or interruptions. Within
    `keeping`, each part is stored as soon as it is measured.

    Args:
        provenance: everything that the parts depend on except the batches; without it they are not stored.
        what: noun for the items of a batch, to show progress; None for no progress.
        size: returns the number of items of a batch.

    Raises:
        InputError: as `measure`.
    """
    batches = list(batches)
    kept = _Kept(provenance, what, batches)
    missing = [(number, batch) for number, batch in enumerate(batches) if number not in kept.found]
    waiting: dict[int, Columns] = {}

    def ready(first: int) -> Iterator[tuple[Any, Columns]]:
        number = first
        while number in waiting or number in kept.found:
            yield batches[number], waiting.pop(number) if number in waiting else kept.get(number)
            number += 1

    following = 0
    with nullcontext() if what is None else progress_bar() as bar:  # A bar of its own would hide the caller's.
        every = sum(map(size, batches))
        done = every - sum(size(batch) for _, batch in missing)
        advance = None if bar is None else partial(bar.advance, bar.add_task(str(what), total=every, completed=done))
        for number, part in (engine.get() or here)(model, measure, missing) if missing else ():
            kept.put(number, part)
            if advance is not None:
                advance(size(batches[number]))
            waiting[number] = part
            for found in ready(following):
                following += 1
                yield found
        yield from ready(following)


def here(model: Model, measure: Measure, batches: Sequence[tuple[int, Any]]) -> Iterator[tuple[int, Columns]]:
    """Measure one batch after the other in this process."""
    for number, batch in batches:
        yield number, measure(batch)


@contextmanager
def keeping(out: Path | None) -> Iterator[None]:
    """Store parts in a file in the directory `out`, and remove them when the body is done. They stay if the process is
    killed, or if workers or a disk fail; where the input is refused, a file that the body made is removed."""
    if out is None:
        yield
        return
    with removed_if_refused(Path(out) / PARTS):
        store, used = Store(Path(out) / PARTS), list[bytes]()
        token = _keeping.set((store, used))
        try:
            yield
            store.drop(used)
        finally:
            _keeping.reset(token)


class _Kept:
    """Stored parts of one measurement, by the numbers of their batches; none without provenance."""

    def __init__(self, provenance: Mapping[str, Any] | None, what: str | None, batches: Sequence[Any]) -> None:
        self.store, self.keys = Store(None), [b""] * len(batches)
        keeping = _keeping.get()
        if keeping is not None and provenance is not None:
            lasting = {name: value for name, value in provenance.items() if name != "date"}
            essence = json.dumps([lasting, what, batches], sort_keys=True, default=str)
            digest = hashlib.sha256(essence.encode()).hexdigest()[:16]
            self.store, self.keys = keeping[0], [f"{digest}/{number}".encode() for number in range(len(batches))]
            keeping[1].extend(self.keys)
        known = self.store.known(self.keys)
        self.found = {number for number, key in enumerate(self.keys) if key in known}

    def get(self, number: int) -> Columns:
        (value,) = self.store.get([self.keys[number]]).values()
        with np.load(io.BytesIO(value), allow_pickle=False) as stored:
            return dict(stored)

    def put(self, number: int, part: Columns) -> None:
        if self.store.file is not None:
            stream, arrays = io.BytesIO(), dict[str, Any](part)
            np.savez(stream, **arrays)
            self.store.add({self.keys[number]: stream.getvalue()})
