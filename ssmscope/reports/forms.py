"""Options that a visitor of the live page may set, as the analyses declare them.

Left out are options that name files on the server, those that change no number, and those of `EXCLUDED_OPTIONS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssmscope.api.options import Option
from ssmscope.api.registry import analysis_of
from ssmscope.core.reading import SURROGATE
from ssmscope.errors import InputError

EXCLUDED_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "heatmap": ("layers", "merge", "limit", "seed"),
    "attention": ("layers", "rows", "pool", "rollout", "residual", "span", "top"),
    "effect": ("before", "after"),
}
"""Analyses of the page, and their options without a control in its forms: layer and token have controls next to the
views, tokens are clicked, and whole maps, products of layers and data sets are not shown."""


def options(verb: str) -> dict[str, Option]:
    """Return the options of an analysis that a visitor may set, by name."""
    known = analysis_of(verb).options.items()
    return {
        name: option
        for name, option in known
        if name not in EXCLUDED_OPTIONS[verb] and option.reads is None and not option.no_effect
    }


def choices(option: Option) -> tuple[str, ...]:
    """Return the words that an option takes, with "" if it is optional; none if it takes other values too."""
    if option.kind is not None or option.several:
        return ()
    return option.words if option.default is not None else ("", *option.words)


def shown(option: Option) -> Any:
    """Return the default as a form shows it: a bool or a text."""
    if option.is_flag:
        return bool(option.default)
    return "" if option.default is None else option.typed(option.default)[1]


def chosen(verb: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a form's values to the analysis's options, leaving out empty ones; raise InputError for wrong ones."""
    known, found = options(verb), {}
    for name, value in given.items():
        if name not in known:
            raise InputError(f"{verb} has no option {name!r:.80} here; there are {', '.join(known)}")
        if isinstance(value, str):
            if SURROGATE.search(value):
                raise InputError(f"{name} has half of a character (a lone surrogate): remove it")
            value = value.strip()
        if value != "":
            found[name] = known[name].read(value)
    return found
