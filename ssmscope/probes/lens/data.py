"""Data for fitting a lens: rows of token ids, or images, in batches whose order depends only on the seed."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.data.pixels import PixelData
from ssmscope.data.text import TextData
from ssmscope.data.tokens import IGNORED, SequenceData, TokenData
from ssmscope.errors import InputError

LensData = TokenData | TextData | SequenceData | PixelData | Sequence[str] | Sequence[Sequence[int]]
"""Data that `rows_of` accepts."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows that a model reads: token ids, not padded, or images."""

    name: str
    split: str
    ids: tuple[tuple[int, ...], ...] = ()
    pixels: np.ndarray | None = None
    """(images, length, channels) uint8."""

    def __len__(self) -> int:
        return len(self.ids) if self.pixels is None else len(self.pixels)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of every row; an image has its pixels and the class token."""
        return [len(row) for row in self.ids] if self.pixels is None else [self.pixels.shape[1] + 1] * len(self)

    @property
    def fingerprint(self) -> str:
        """Hash over all rows, 16 hexadecimal digits."""
        digest = hashlib.blake2b(digest_size=8)
        if self.pixels is not None:
            digest.update(f"{self.pixels.shape}".encode())
            digest.update(np.ascontiguousarray(self.pixels).data)
        for row in self.ids:
            digest.update(np.asarray([len(row), *row], dtype=np.int64).tobytes())
        return digest.hexdigest()

    def take(self, chosen: Sequence[int]) -> Rows:
        pixels = None if self.pixels is None else self.pixels[list(chosen)]
        ids = tuple(self.ids[row] for row in chosen) if self.ids else ()
        return dataclasses.replace(self, ids=ids, pixels=pixels)

    def batch(self, model: Model, chosen: Sequence[int]) -> Batch:
        if self.pixels is not None:
            return model.encode(values=self.pixels[list(chosen)])
        return model.encode(ids=[list(self.ids[row]) for row in chosen])

    def described(self) -> dict[str, Any]:
        about = {"name": self.name, "split": self.split, "fingerprint": self.fingerprint}
        return {**about, "rows": len(self), "tokens": sum(self.lengths)}


def rows_of(model: Model, data: LensData) -> Rows:
    """Return the rows that the model reads: rows of tokens as they are, texts by its own tokenizer."""
    if isinstance(data, PixelData):
        rows = Rows(data.name, data.split, pixels=data.pixels)
    elif isinstance(data, TokenData | SequenceData):
        ids = [tuple(row) for row in data.ids.tolist()]
        if isinstance(data, TokenData) and ids:
            # The last row of a text cut into rows is padded at positions without a target.
            asked = np.flatnonzero(data.targets[-1] != IGNORED)
            ids[-1] = ids[-1][: int(asked[-1]) + 1] if len(asked) else ids[-1]
        rows = Rows(data.name, data.split, tuple(ids))
    elif isinstance(data, TextData):
        rows = Rows(data.name, data.split, _encoded(model, data.texts))
    elif isinstance(data, Sequence) and not isinstance(data, str) and all(isinstance(row, str) for row in data):
        rows = Rows("texts", "all", _encoded(model, data))  # type: ignore[arg-type]
    elif isinstance(data, Sequence) and not isinstance(data, str):
        rows = Rows("rows", "all", tuple(tuple(map(int, row)) for row in data))
    else:
        raise InputError(
            f"data is {type(data).__name__}; allowed are rows of tokens (language_data), texts, labelled sequences or "
            "images, a list of texts and a list of lists of token ids"
        )
    if not len(rows):
        raise InputError(f"{rows.name} ({rows.split}) is empty; give at least 4 texts or rows")
    if (rows.pixels is None) != (model.channels is None):
        reads, holds = ("tokens", "images") if model.channels is None else ("pixels", "tokens")
        raise InputError(f"{model.name} reads {reads}, but {rows.name} holds {holds}")
    rows.batch(model, [0])
    beyond = max((max(row, default=0) for row in rows.ids), default=0)
    if beyond >= model.vocabulary:
        raise InputError(f"{rows.name} has token id {beyond}, outside the model's 0…{model.vocabulary - 1}")
    return rows


def _encoded(model: Model, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    found = []
    for number, text in enumerate(texts):
        try:
            found.append(tuple(model.encode(text).input_ids[0].tolist()))
        except InputError as error:
            raise InputError(f"text {number}: {error}") from error
    return tuple(found)


def shuffled_batches(lengths: Sequence[int], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the batches of one epoch: all rows in an order drawn by the seed, with up to `tokens` tokens a batch."""
    batches: list[list[int]] = []
    room = 0
    for row in np.random.default_rng([seed, epoch]).permutation(len(lengths)).tolist():
        if not batches or lengths[row] > room:
            batches.append([])
            room = tokens
        batches[-1].append(row)
        room -= lengths[row]
    return batches


def split_rows(rows: Rows, share: float, seed: int) -> tuple[Rows, Rows]:
    """Split rows into those to fit on and a held-out share drawn by the seed, each in the order of the rows."""
    held = max(round(share * len(rows)), 2)
    if len(rows) - held < 1:
        needed = "a lens needs at least 3, of which 2 held out"
        raise InputError(f"{rows.name} ({rows.split}) has {len(rows)} rows; {needed}")
    order = np.random.default_rng([seed, len(rows)]).permutation(len(rows))
    return rows.take(np.sort(order[held:]).tolist()), rows.take(np.sort(order[:held]).tolist())
