"""Imports of large libraries without Python's search for cycles that nothing refers to: nearly all that an import makes
stays, and torch and transformers make so much that the search takes a quarter of their import."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_for_good = False


def for_good() -> None:
    """Never search what there is and what is imported from now on: for a process that ends with its work, which then
    saves as much again when it ends."""
    global _for_good
    _for_good = True
    gc.freeze()


@contextmanager
def without_collection() -> Iterator[None]:
    """Within the context no cycles are searched for."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _for_good:
            gc.freeze()
        if collects:
            gc.enable()
