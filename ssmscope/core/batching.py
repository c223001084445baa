"""Number of tokens that run at once, batches of texts by length, and refusals of work that fills any memory or runs for
months."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ssmscope.errors import InputError

if TYPE_CHECKING:
    import torch

TOKENS_AT_ONCE = 4096
"""Tokens, padding included, that run together on a CPU, where larger batches are slower."""
GPU_BATCH_FACTOR = 16
LAYER_NUMBERS_PER_WIDTH = 16
"""Numbers that a layer holds of each token while it runs, as a multiple of the model's width."""
MAX_NUMBERS_KEPT = 2**29
"""Numbers that a batch may keep: 2 GiB of float32."""
MAX_TOKENS_READ = 10**10
"""Tokens that a model reads in one call: at a million a second three hours, at ten thousand twelve days."""
HELD_OUT_LENGTH = 128
"""Default number of tokens per row of text that measures the cost of an edit."""
MAX_TOKENS_PER_ROW = 2**17
"""Tokens of one text that a model reads in one piece: some gigabytes in a small model."""
MAX_TOKENS_TOGETHER = 2**22
"""Tokens of all texts that a model reads in one piece."""
MAX_ITEMS_HELD = 2**27
"""Numbers, tokens or words made before the work begins: a gigabyte or more."""
MAX_STORY_WORDS = 2**24
MAX_TEXTS = 10**7


def tokens_at_once(device: torch.device, kept: float = 0, room: float | None = None, *, width: int = 0) -> int:
    """Return the number of tokens, padding included, that run together on a device: fewer if the numbers `kept` per
    token, or held by a layer of this `width`, would exceed `room` (default `MAX_NUMBERS_KEPT`)."""
    most = TOKENS_AT_ONCE * (1 if device.type == "cpu" else GPU_BATCH_FACTOR)
    kept += LAYER_NUMBERS_PER_WIDTH * width
    room = MAX_NUMBERS_KEPT if room is None else room
    return max(1, min(most, int(room / kept)) if kept else most)


def by_length(
    lengths: Sequence[int],
    tokens: int,
    *,
    rows: Sequence[int] | None = None,
    size: int | None = None,
    most: int | None = None,
    padding: int | None = None,
    longest_first: bool = False,
) -> Iterator[list[int]]:
    """Yield `rows` (by default all) that run together: of similar length, and with at most `tokens` tokens including
    padding (`tokens_at_once`), or a single one.

    Args:
        size: fixed number of rows per batch, in place of `tokens`.
        most: maximum number of rows per batch.
        padding: maximum tokens of padding per batch.
        longest_first: begin with the longest rows, so that a batch too large for memory fails at once.
    """
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


def refuse_reading(tokens: float, what: str, advice: str) -> None:
    """Raise InputError if the model would read too many tokens."""
    _refuse(tokens, MAX_TOKENS_READ, f"{what} would have the model read about {tokens:,.0f} tokens", advice)


def refuse_held(number: float, what: str, advice: str, *, most: int = MAX_ITEMS_HELD, unit: str = "tokens") -> None:
    """Raise InputError if more than `most` of something would be made in memory."""
    _refuse(number, most, f"{what} would make {number:,.0f} {unit}", advice)


def refuse_above(most: int, **options: int | None) -> None:
    """Raise InputError if an option is larger than `most`."""
    refuse_beyond(dict.fromkeys(options, most), options)


def refuse_beyond(limits: Mapping[str, int], options: Mapping[str, float | None]) -> None:
    """Raise InputError if an option is larger than its own limit."""
    for name, most in limits.items():
        if (value := options.get(name)) is not None and value > most:
            shown = f"{value:,}" if isinstance(value, int) else f"{value:g}"
            raise InputError(f"{name} is {shown}; allowed are up to {most:,}")


def _refuse(number: float, most: int, what: str, advice: str) -> None:
    if number > most:
        raise InputError(f"{what}; allowed are up to {most:,}: {advice}")
