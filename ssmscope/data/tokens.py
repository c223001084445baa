"""Data sets held in numpy arrays, and token sequences with targets at some positions."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from ssmscope.errors import InputError, check_whole

D = TypeVar("D", bound="ArrayData")

IGNORED = -100
"""Target of positions without a target; torch's cross-entropy ignores it."""


def fingerprint_of(content: Any, **options: Any) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of the content as JSON."""
    return hashlib.sha256(json.dumps(content, **options).encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayData:
    """Data set with a name and a split, e.g. `majority` and `test`, whose arrays have one row per example."""

    name: str
    split: str

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    @property
    def fingerprint(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of everything but name and split."""
        plain = {name: value for name, value in vars(self).items() if name not in ("name", "split", *self.arrays)}
        digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
        for key, array in self.arrays.items():
            digest.update(f"{key} {array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]

    def take(self: D, indices: Sequence[int] | np.ndarray, *, split: str | None = None) -> D:
        """Return the examples at `indices`, in that order."""
        rows: dict[str, Any] = {key: array[np.asarray(indices)] for key, array in self.arrays.items()}
        return dataclasses.replace(self, split=split or self.split, **rows)

    def divide(
        self: D, share: float, *, seed: int = 0, what: str = "held_out", splits: Sequence[str | None] = (None, None)
    ) -> tuple[D, D]:
        """Split off a `share` of the examples; return the rest and the part, by default "(held out)" of this split."""
        check_whole(0, seed=seed)
        held = round(share * len(self))
        if not 0 < held < len(self):
            raise InputError(f"{what} {share} of {len(self)} examples leaves one of two parts empty")
        order = np.random.default_rng(seed).permutation(len(self))
        part = self.take(np.sort(order[:held]), split=splits[1] or f"{self.split} (held out)")
        return self.take(np.sort(order[held:]), split=splits[0]), part

    def sample(self: D, n: int, *, seed: int = 0) -> D:
        """Draw at most `n` examples without replacement; they keep their order."""
        check_whole(1, n=n)
        check_whole(0, seed=seed)
        if n >= len(self):
            return self
        return self.take(np.sort(np.random.default_rng(seed).permutation(len(self))[:n]))


@dataclasses.dataclass(frozen=True, eq=False)
class TokenData(ArrayData):
    """Token `ids` (examples, length) and the token to predict after each position, `targets` (examples, length),
    `IGNORED` where there is none; `tokens` are the tokens by id."""

    ids: np.ndarray
    targets: np.ndarray
    tokens: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceData(ArrayData):
    """Sequences `ids` (examples, length) of token ids with their class ids `labels` (examples,). `tokens` names each
    id, `label_names` each class."""

    ids: np.ndarray
    labels: np.ndarray
    tokens: tuple[str, ...]
    label_names: tuple[str, ...]
