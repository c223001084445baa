"""Measurement of a data set batch by batch, here or on workers, with parts in files so that a killed run continues."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.api.writing import write_whole
from ssmscope.core.progress import on_stderr, progress_bar
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.model import Model

Columns = Mapping[str, np.ndarray]
"""Measurements of one batch: arrays of numbers, booleans or texts by name."""
Measure = Callable[[Any], Columns]
"""Function that measures a batch, independently of all other batches."""
Engine = Callable[["Model", Measure, Sequence[tuple[int, Any]]], Iterator[tuple[int, Columns]]]
"""Function that measures numbered batches and yields each number with its part, in any order."""

PARTS = ".parts"
"""Folder, within a result's directory, of its parts until the result is complete."""

engine: ContextVar[Engine | None] = ContextVar("engine", default=None)
"""Engine that measures batches; None for this process."""
_keeping: ContextVar[tuple[Path, dict[Path, bool]] | None] = ContextVar("keeping", default=None)
"""Folder of the parts, and the folders used within it, each with True if it is new."""


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
    `keeping`, each part is written to a file as soon as it is measured.

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
    with progress_bar(on_stderr(what is not None)) as bar:
        done = sum(map(size, batches)) - sum(size(batch) for _, batch in missing)
        task = bar.add_task(what or "", total=sum(map(size, batches)), completed=done)
        for number, part in (engine.get() or here)(model, measure, missing) if missing else ():
            kept.put(number, part)
            bar.advance(task, size(batches[number]))
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
    """Store parts in a folder of the directory `out` until the body ends.

    They stay if the process is killed, or if workers or a disk fail. If the input is refused, only parts that were
    there before stay.
    """
    if out is None:
        yield
        return
    home = Path(out) / PARTS
    made = [place for place in (home, *home.parents) if not place.exists()]
    used: dict[Path, bool] = {}
    token = _keeping.set((home, used))
    try:
        yield
    except InputError as error:
        if error.__cause__ is None:
            _remove([folder for folder, new in used.items() if new], made)
        raise
    else:
        _remove(used, [home])
    finally:
        _keeping.reset(token)


def _remove(folders: Iterable[Path], above: Iterable[Path]) -> None:
    """Remove folders, and the directories above them that are empty."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for place in above:
        with suppress(OSError):
            place.rmdir()


class _Kept:
    """Stored parts of one measurement, by the numbers of their batches; none without provenance."""

    def __init__(self, provenance: Mapping[str, Any] | None, *essence: Any) -> None:
        self.folder: Path | None = None
        self.found: set[int] = set()
        keeping = _keeping.get()
        if keeping is not None and provenance is not None:
            lasting = {name: value for name, value in provenance.items() if name != "date"}
            digest = hashlib.sha256(json.dumps([lasting, *essence], sort_keys=True, default=str).encode())
            self.folder = keeping[0] / digest.hexdigest()[:16]
            keeping[1].setdefault(self.folder, not self.folder.exists())
            self.found = {int(file.stem) for file in self.folder.glob("*.npz") if self._read(file) is not None}

    def get(self, number: int) -> Columns:
        assert self.folder is not None
        part = self._read(self.folder / f"{number}.npz")
        assert part is not None
        return part

    def put(self, number: int, part: Columns) -> None:
        if self.folder is not None:
            stream, arrays = io.BytesIO(), dict[str, Any](part)
            np.savez(stream, **arrays)
            write_whole(self.folder / f"{number}.npz", stream.getvalue())

    @staticmethod
    def _read(file: Path) -> Columns | None:
        """Return the part in a file; None if it is damaged and has to be measured again."""
        try:
            with np.load(file, allow_pickle=False) as stored:
                return dict(stored)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            return None
