"""Work over a data set in parts: here or on an engine's workers, and kept in files from which a killed run goes on."""

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
"""What is measured of one batch: arrays of numbers, truths or texts by name."""
Measure = Callable[[Any], Columns]
"""Of a batch; it may depend on nothing that another batch leaves behind."""
Engine = Callable[["Model", Measure, Sequence[tuple[int, Any]]], Iterator[tuple[int, Columns]]]
"""Measures batches, given with their numbers, and yields each number with its part, in any order."""

PARTS = ".parts"
"""The folder of a result's directory in which its parts are until it is there."""

engine: ContextVar[Engine | None] = ContextVar("engine", default=None)
"""What measures batches; None for this process."""
_keeping: ContextVar[tuple[Path, dict[Path, bool]] | None] = ContextVar("keeping", default=None)
"""Where parts are kept, and the folders that were used, with whether they were new."""


def over(
    model: Model,
    batches: Iterable[Any],
    measure: Measure,
    *,
    provenance: Mapping[str, Any] | None = None,
    what: str | None = "texts",
    size: Callable[[Any], int] = len,
) -> Iterator[tuple[Any, Columns]]:
    """Every batch with what is measured of it, in the order of `batches`.

    How the data are cut into batches is settled before, so the digits are the same on any number of workers and after
    any number of interruptions. Within `keeping`, a part is in a file once it is measured.

    Args:
        provenance: all that the parts depend on beside the batches; without, they are not kept.
        what: the batches consist of; None shows no progress.
        size: how many of these a batch has.

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
    """The engine of this process: one batch after the other."""
    for number, batch in batches:
        yield number, measure(batch)


@contextmanager
def keeping(out: Path | None) -> Iterator[None]:
    """Within the context parts are kept in a folder of the directory `out`, until the body ends.

    They stay where it is killed, or where workers or a disk failed; where the input is refused, only if they were there
    before.
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
    """Remove folders, and of those above the empty ones."""
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    for place in above:
        with suppress(OSError):
            place.rmdir()


class _Kept:
    """The parts of one measurement in files, by the numbers of their batches; without provenance there are none."""

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
        """The part in a file; None where it is damaged, and has to be measured again."""
        try:
            with np.load(file, allow_pickle=False) as stored:
                return dict(stored)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            return None
