"""The message with which a function refuses its input."""

import re
from collections.abc import Callable
from typing import Any

from ssmscope.errors import InputError


def refusal(check: Callable[..., Any], *given: Any, **options: Any) -> str | None:
    """Return the message of the InputError that a call raises; None if it raises none."""
    try:
        check(*given, **options)
    except InputError as error:
        return str(error)
    return None


def refused(check: Callable[..., Any], /, *given: Any, **options: Any) -> str:
    """Return the message, of one line, with which a call is refused."""
    said = refusal(check, *given, **options)
    assert said is not None, "the call is not refused"
    assert "\n" not in said, said
    return said


def refuses(words: str, check: Callable[..., Any], /, *given: Any, **options: Any) -> None:
    """Check that a call is refused in one line, in which a regular expression is found."""
    assert re.search(words, said := refused(check, *given, **options)), f"{words!r} is not found in {said!r}"
