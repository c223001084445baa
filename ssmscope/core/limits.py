"""How much may be asked for at once: what would run for months or fill any memory is refused before it begins."""

from __future__ import annotations

from collections.abc import Mapping

from ssmscope.errors import InputError

READ = 10**10
"""Tokens that one call has a model read: at a million a second three hours, at ten thousand twelve days."""
ROW = 2**17
"""Tokens of one text that a model reads in one piece: some gigabytes in a small model."""
TOGETHER = 2**22
"""Tokens of all texts that a model reads in one piece."""
HELD = 2**27
"""Numbers, tokens or words that are made before the work begins: a gigabyte or more."""
WORDS = 2**24
"""Words of stories that are told before the work begins."""
TEXTS = 10**7
"""Texts that are made before the work begins."""


def refuse_reading(tokens: float, what: str, advice: str) -> None:
    """Refuse work that is more than `READ` tokens.

    Raises:
        InputError: with the estimate and the limit.
    """
    _refuse(tokens, READ, f"{what} would have the model read about {tokens:,.0f} tokens", advice)


def refuse_held(number: float, what: str, advice: str, *, most: int = HELD, unit: str = "tokens") -> None:
    """Refuse to make more than `most` of something in memory.

    Raises:
        InputError: with the estimate and the limit.
    """
    _refuse(number, most, f"{what} would make {number:,.0f} {unit}", advice)


def refuse_above(most: int, **options: int | None) -> None:
    """Refuse options that are larger than any use of them.

    Raises:
        InputError: naming the option.
    """
    refuse_beyond(dict.fromkeys(options, most), options)


def refuse_beyond(limits: Mapping[str, int], options: Mapping[str, float | None]) -> None:
    """As `refuse_above`, each option with its own limit."""
    for name, most in limits.items():
        value = options.get(name)
        if value is not None and value > most:
            shown = f"{value:,}" if isinstance(value, int) else f"{value:g}"
            raise InputError(f"{name} is {shown}; allowed are up to {most:,}")


def _refuse(number: float, most: int, what: str, advice: str) -> None:
    if number > most:
        raise InputError(f"{what}; allowed are up to {most:,}: {advice}")
