"""How many tokens run at once, and batches of texts by length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TOKENS_AT_ONCE = 4096
"""Tokens, padding included, that run together on a CPU, where larger batches are slower."""
GPU_BATCH_FACTOR = 16
"""Ratio of the tokens that run together on a GPU and on a CPU."""
MAX_NUMBERS_KEPT = 2**29
"""Numbers that a batch may keep: 2 GiB of float32."""


def tokens_at_once(device: torch.device, kept: float = 0, room: float = MAX_NUMBERS_KEPT) -> int:
    """Return the number of tokens, padding included, that run together on a device: fewer where so many numbers are
    `kept` of each that no more have `room`."""
    most = TOKENS_AT_ONCE * (1 if device.type == "cpu" else GPU_BATCH_FACTOR)
    return max(1, min(most, int(room / kept)) if kept else most)


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
    """Yield `rows` (by default all) that run together: of similar length, and with at most `tokens` tokens including
    padding, by default `TOKENS_AT_ONCE`, or a single one.

    Args:
        size: fixed number of rows per batch, in place of `tokens`.
        most: maximum number of rows per batch.
        padding: maximum tokens of padding per batch.
        longest_first: begin with the longest rows, so that a batch too large for memory fails at once.
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
