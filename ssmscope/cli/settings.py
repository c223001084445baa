"""Settings of verbs, each given by --set NAME=VALUE: their part of the help, and their values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from typer.core import TyperCommand
from ssmscope.api.options import Option
from ssmscope.errors import InputError, did_you_mean


class Verb(TyperCommand):
    """Verb whose help ends with its settings, one below the other and as they are; typer's releases space them out or
    run them together, and take defaults in brackets for markup."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from rich.console import Console
        from rich.padding import Padding
        from rich.text import Text

        told, self.epilog = self.epilog, None
        try:
            super().format_help(ctx, formatter)
        finally:
            self.epilog = told
        if told:
            Console(highlight=False).print(Padding(Text(told), (0, 1)))


def settings_help(options: Iterable[Option]) -> str | None:
    """Return the settings among options as the end of a verb's help; None if there are none."""
    rows = [
        f"- {each.name}={each.metavar or 'true|false'}: {each.help}"
        + ("" if each.default is None else f" [default: {each.typed(each.default)[1].partition('=')[2]}]")
        for each in options
        if each.setting
    ]
    return "\n".join(["Settings, each by --set NAME=VALUE:\n", *rows]) if rows else None


def named_values(typed: Sequence[str], known: Iterable[str] | None = None) -> dict[str, str]:
    """Return the values of --set by name. Raise InputError for another form, or a name that is unknown or repeated."""
    found: dict[str, str] = {}
    for each in typed:
        name, equals, value = each.partition("=")
        name = name.strip()
        if not equals or not name:
            raise InputError(f"--set {each!r:.80}: write NAME=VALUE")
        if known is not None and (name := name.replace("-", "_")) not in known:
            raise InputError(f"no setting {name!r:.80}; there are {', '.join(known)}{did_you_mean(name, known)}")
        if name in found:
            raise InputError(f"--set {name} is given twice; give it once")
        found[name] = value
    return found
