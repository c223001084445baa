"""The verbs of the command line as a plan names them: their options, and command lines that are checked without
running."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import typer

from ssmscope.errors import InputError, did_you_mean

OWN = ("out", "json")
"""Options that the report sets itself."""

NOWHERE = os.devnull
"""An --out, for a verb that must have one to be parsed; nothing runs, so that nothing is written."""

# What typer raises for a wrong option; it comes from click or from typer itself, depending on its version.
CLICK_ERROR: Any = typer.BadParameter.__mro__[2]


@dataclass(frozen=True)
class Verb:
    """A verb that analyses one or several models and writes results."""

    name: str
    """As it is typed; "lens show" is a verb within a group."""
    command: Any

    @cached_property
    def _models(self) -> Any:
        return next((p for p in self.command.params if p.param_type_name == "argument"), None)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options that a plan may give, by name."""
        return {p.name: p for p in self.command.params if p.param_type_name == "option" and p.name not in OWN}

    @property
    def takes_several(self) -> bool:
        """Whether it reads several models at once."""
        return self._models.nargs == -1

    @property
    def analyses(self) -> bool:
        """Whether it is one of those that a plan may name."""
        named = {p.name for p in self.command.params}
        return self._models is not None and self._models.name in ("model", "models") and "out" in named

    def option_name(self, given: str) -> str:
        """The name of an option that was written with hyphens or underscores.

        Raises:
            InputError: there is none.
        """
        name = given.replace("-", "_")
        if name in OWN:
            raise InputError(f"the option {given!r} is set by the report itself; leave it out")
        if name not in self.options:
            known = ", ".join(self.options)
            raise InputError(
                f"{self.name} has no option {given!r:.80}; it has {known}{did_you_mean(name, self.options)}"
            )
        return name

    def typed(self, options: Mapping[str, Any]) -> list[str]:
        """Options of a plan as they are typed: a list with commas, or repeated where the option repeats.

        Raises:
            InputError: a value that cannot be typed.
        """
        found: list[str] = []
        for name, value in options.items():
            if value is not None:
                found += self._typed(name, value)
        return found

    def _typed(self, name: str, value: Any) -> list[str]:
        option = self.options[name]
        long = next(each for each in (*option.opts, "--" + name) if each.startswith("--"))
        if option.is_flag:
            if not isinstance(value, bool):
                raise InputError(f"{name} is {value!r:.80}; write true or false")
            if value:
                return [long]
            return list(option.secondary_opts[:1])
        items = value if isinstance(value, list) else [value]
        if not items or not all(isinstance(item, str | bool) for item in items):
            raise InputError(f"{name} is {value!r:.80}; give a value, or a list of values")
        texts = [str(item).lower() if isinstance(item, bool) else item for item in items]
        if name == "file" and "-" in texts:
            raise InputError("file is '-', and a plan has no standard input; give the name of a file")
        return [part for text in (texts if option.multiple else [",".join(texts)]) for part in (long, text)]

    def parsed(self, arguments: Sequence[str]) -> dict[str, Any]:
        """The options of a command line with their defaults filled in, checked without running the verb.

        Args:
            arguments: the models and options, without the verb.

        Raises:
            InputError: what the command line would refuse.
        """
        try:
            context = self.command.make_context(self.name, [*arguments, "--out", NOWHERE])
            with context:
                given = dict(context.params)
            if (check := getattr(self.command.callback, "check", None)) is not None:
                check(given)
        except CLICK_ERROR as error:
            message = str(error.format_message()).strip()
            raise InputError(f"{message[:1].lower()}{message[1:].rstrip('.')}") from error
        except typer.Exit as error:  # --help and the like, which end a command line before it runs
            raise InputError(f"{self.name} would end without a result; leave out what asks for help") from error
        return {name: _plain(given[name]) for name in self.options}


def _plain(value: Any) -> Any:
    """As JSON knows it."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def verbs_of(commands: Any) -> dict[str, Verb]:
    """The verbs of an application that a plan may name.

    Args:
        commands: the application as `typer.main.get_command` gives it.
    """
    return {verb.name: verb for verb in _leaves(commands, ()) if verb.analyses}


def _leaves(group: Any, above: tuple[str, ...]) -> Iterator[Verb]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _leaves(command, (*above, name))
        else:
            yield Verb(" ".join((*above, name)), command)
