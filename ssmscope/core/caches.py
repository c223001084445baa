"""Caches of models: the names of their arguments, and runs that fill none."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import nn

CACHES = ("cache_params", "past_key_values", "cache", "state")
"""Names of the caches that mixers and attention layers continue from and fill; transformers calls all of them `cache`
from 5.24 on."""


@cache
def _place_of_cache(kind: Any) -> int | None:
    """Return the number of arguments before `use_cache` in a forward pass; None if it takes none of that name."""
    names = list(inspect.signature(kind.forward).parameters.values())[1:]
    for place, parameter in enumerate(names):
        if parameter.name == "use_cache":
            return place if parameter.kind is parameter.POSITIONAL_OR_KEYWORD else len(names) + 1
    return None


def may_cache(part: nn.Module) -> bool:
    """Return True if a part's forward pass takes `use_cache`."""
    kind: Any = type(part)
    return _place_of_cache(kind) is not None


def without_cache(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments with `use_cache=False`, or None if the caller gives it."""
    kind: Any = type(part)
    place = _place_of_cache(kind)
    if place is None or len(args) > place or kwargs.get("use_cache") is not None:
        return None
    return args, {**kwargs, "use_cache": False}
