"""The message with which a function refuses its input."""

from __future__ import annotations

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
