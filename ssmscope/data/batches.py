"""Padded batches of texts of similar length, in an order that depends only on seed and epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssmscope.core.tokenizing import tokenize
from ssmscope.data.text import TextData

BATCHES_PER_POOL = 50
"""Number of batches whose rows are sorted by length together."""


class Examples(NamedTuple):
    """Token ids, one list per text cut to the maximum length with its end token kept, and class ids."""

    ids: list[list[int]]
    labels: list[int]


class TextBatch(NamedTuple):
    """A padded batch: `ids` (batch, length) int64 padded on the right, `mask` (batch, length) int64 with 1 at real
    tokens, `labels` (batch,) int64."""

    ids: Tensor
    mask: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> TextBatch:
        return TextBatch(self.ids.to(device), self.mask.to(device), self.labels.to(device))


def encode(data: TextData, tokenizer: Any, max_length: int) -> Examples:
    """Encode every text, cut to `max_length` tokens; the tokenizer's end token is kept."""
    ids = tokenize(tokenizer, list(data.texts), truncation=True, max_length=max_length)["input_ids"]
    return Examples(ids, list(data.labels))


def epoch_order(lengths: Sequence[int], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the row indices of one epoch's batches: shuffled, then sorted by length within each pool of batches."""
    draw = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    rows = torch.randperm(len(lengths), generator=draw).tolist()
    batches: list[list[int]] = []
    for start in range(0, len(rows), batch_size * BATCHES_PER_POOL):
        pool = sorted(rows[start : start + batch_size * BATCHES_PER_POOL], key=lambda row: lengths[row])
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    return [batches[i] for i in torch.randperm(len(batches), generator=draw).tolist()]


def length_order(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Return the indices of all rows in batches, shortest rows first."""
    rows = sorted(range(len(lengths)), key=lambda row: lengths[row])
    return [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]


def collate(examples: Examples, rows: Sequence[int], pad_id: int) -> TextBatch:
    """Collate the given rows into one batch, padded to the longest."""
    longest = max(len(examples.ids[row]) for row in rows)
    ids = torch.full((len(rows), longest), pad_id, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(examples.ids[row])] = torch.tensor(examples.ids[row])
        mask[i, : len(examples.ids[row])] = 1
    return TextBatch(ids, mask, torch.tensor([examples.labels[row] for row in rows]))


def drop_tokens(ids: Tensor, share: float, unknown_id: int, special: Tensor) -> Tensor:
    """Replace each token by the unknown token with probability `share`, except the tokens in `special`."""
    if share == 0:
        return ids
    dropped = (torch.rand(ids.shape, dtype=torch.float32) < share) & ~torch.isin(ids, special)
    return ids.masked_fill(dropped, unknown_id)
