"""Which texts run together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TOKENS_AT_ONCE = 4096
"""How many tokens, padding included, run together on a CPU, where larger batches are slower."""
ON_A_GPU = 16
"""How many times as many run together there."""


def tokens_at_once(device: torch.device) -> int:
    """How many tokens, padding included, run together by default: as many as suit the device."""
    return TOKENS_AT_ONCE * (1 if device.type == "cpu" else ON_A_GPU)


def by_length(
    lengths: Sequence[int],
    tokens: int | None = None,
    *,
    rows: Sequence[int] | None = None,
    size: int | None = None,
    most: int | None = None,
    padding: int | None = None,
    longest_first: bool = False,
) -> Iterator[list[int]]:
    """Rows that run together: of alike length, and with their padding of at most `tokens` tokens, or a single one.

    Args:
        lengths: of all rows.
        tokens: by default `TOKENS_AT_ONCE`.
        rows: which rows; by default all.
        size: how many rows are in a batch, whatever their tokens.
        most: how many rows a batch has at most.
        padding: how many tokens of padding it has at most.
        longest_first: so that a batch that does not fit into memory fails at once.
    """
    tokens = TOKENS_AT_ONCE if tokens is None else tokens
    order = sorted(range(len(lengths)) if rows is None else rows, key=lambda row: lengths[row])
    chosen: list[int] = []
    real = 0
    for row in reversed(order) if longest_first else order:
        longest = lengths[chosen[0] if chosen and longest_first else row]
        together = longest * (len(chosen) + 1)
        full = len(chosen) == most or together > tokens
        full |= padding is not None and together - real - lengths[row] > padding
        if chosen and (full if size is None else len(chosen) == size):
            yield chosen
            chosen, real = [], 0
        chosen.append(row)
        real += lengths[row]
    if chosen:
        yield chosen
