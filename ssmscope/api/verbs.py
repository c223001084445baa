"""Verbs of the command line that are no analyses and come from elsewhere: entry points of `ssmscope.verbs`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

from ssmscope.core.registry import Registry

VERBS: Registry[Any] = Registry("verb", "ssmscope.verbs")
"""Functions declared with `@verb`, by the verb's name, which is the function's in Python too."""

F = TypeVar("F", bound=Callable[..., Any])


class Verb(NamedTuple):
    """Declaration of a verb.

    `answer` is the place, as "package.module:function", of what reads the arguments, calls the function and prints. Its
    `**options` are the function's keyword-only parameters but those in `without`; those in `settings` are
    settings (`Option`)."""

    answer: str
    without: Collection[str] = ()
    settings: Collection[str] = ()


def verb(answer: str, **declared: Collection[str]) -> Callable[[F], F]:
    """Declare a function as a verb, see `Verb`."""

    def declare(function: F) -> F:
        function.verb = Verb(answer, **declared)  # type: ignore[attr-defined]
        return function

    return declare
