"""Limits on the size of work: what would run for months or fill any memory is refused before it begins."""

from __future__ import annotations

from collections.abc import Mapping

from ssmscope.errors import InputError

MAX_TOKENS_READ = 10**10
"""Tokens that a model reads in one call: at a million a second three hours, at ten thousand twelve days."""
MAX_TOKENS_PER_ROW = 2**17
"""Tokens of one text that a model reads in one piece: some gigabytes in a small model."""
MAX_TOKENS_TOGETHER = 2**22
"""Tokens of all texts that a model reads in one piece."""
MAX_ITEMS_HELD = 2**27
"""Numbers, tokens or words made before the work begins: a gigabyte or more."""
MAX_STORY_WORDS = 2**24
"""Words of stories made before the work begins."""
MAX_TEXTS = 10**7
"""Texts made before the work begins."""


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
