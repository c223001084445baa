"""What the verbs of `analyze` share: their common options, what was typed as values, answers and refusals."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ssmscope.errors import InputError, did_you_mean
from ssmscope.inputs import check_arguments, texts_of, whole_numbers
from ssmscope.options import whole

if TYPE_CHECKING:
    from rich.console import Console

    from ssmscope.encoding import Batch
    from ssmscope.model import Model
    from ssmscope.results import Result

# UsageError and ClickException, which typer brings itself or takes from click, depending on its version.
_USAGE_ERROR: Any = typer.BadParameter.__base__
_CLICK_ERROR: Any = _USAGE_ERROR.__base__


PIPED = 120
"""How many columns an answer has where stdout is no terminal: tables with intervals need more than rich's 80."""


class Verbs(TyperGroup):
    """The verbs; an unknown one is answered with the nearest."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order in which they are written down; typer itself puts groups of verbs behind all others."""
        names = list(super().list_commands(ctx))
        for group in [name for name in names if isinstance(self.commands[name], TyperGroup)]:
            first = next(iter(self.commands[group].commands.values()))  # type: ignore[attr-defined]
            home = first.callback.__module__
            beside = [n for n in names if n != group and self.commands[n].callback.__module__ == home]
            if beside:
                names.remove(group)
                names.insert(names.index(beside[0]), group)
        return names

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            verbs = ", ".join(self.commands)
            raise InputError(f"no verb {args[0]!r}; there are {verbs}{did_you_mean(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


# ---- options that several verbs have

MODEL = Annotated[str, typer.Argument(metavar="MODEL", help="demo/NAME, a directory, a file, or a hub id.")]
OUT = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write VERB.json, .csv, .png and .html there.")]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
TOKENIZER = Annotated[
    str | None, typer.Option("--tokenizer", metavar="NAME", help="A directory or hub id, where MODEL has none.")
]
DEVICE = Annotated[str, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:1 or mps.")]
TEXT = Annotated[list[str] | None, typer.Option("--text", metavar="TEXT", help="A text; may be repeated.")]
FILE = Annotated[str | None, typer.Option("--file", metavar="FILE", help="UTF-8 texts, one a line; - is stdin.")]
IDS = Annotated[
    list[str] | None, typer.Option("--ids", metavar="5,17,3", help="Token ids instead of a text; may be repeated.")
]
IMAGE = Annotated[
    list[str] | None,
    typer.Option("--image", metavar="FILE", help="A PNG or JPEG, for a model of pixels; may be repeated."),
]
SPLIT = Annotated[
    str | None, typer.Option("--split", metavar="NAME", help="Of a known data set; by default the one to test on.")
]
METHODS = Annotated[
    str, typer.Option("--methods", metavar="A,B,…", help="Methods of explanation, with commas between them.")
]
METHOD_OPTION = Annotated[
    list[str] | None,
    typer.Option(
        "--option", metavar="METHOD.NAME=VALUE", help="An option of a method, as ig.baseline=pad; repeatable."
    ),
]
MAX_TOKENS = Annotated[int, typer.Option("--max-tokens", parser=whole, metavar="N", help="Refuse longer texts.")]


# ---- what was typed, and the answer


class Given:
    """The texts, ids or images of a command line, checked before a model is loaded."""

    def __init__(
        self,
        text: list[str] | None,
        file: str | None,
        ids: list[str] | None,
        image: list[str] | None,
        max_tokens: int,
    ) -> None:
        if ids and (text or file is not None):
            raise InputError("--ids cannot be combined with --text or --file; give one of them")
        if image and (text or file is not None or ids):
            raise InputError("--image cannot be combined with --text, --file or --ids; give one of them")
        if max_tokens < 1:
            raise InputError(f"--max-tokens is {max_tokens}; allowed is a whole number from 1 on")
        self.rows = [whole_numbers(row, "--ids", "5,17,3") for row in ids] if ids else None
        self.texts = texts_of(text, file) if self.rows is None and not image else None
        self.image, self.max_tokens = image, max_tokens

    def encoded(self, model: Model) -> Batch:
        """As a batch of the model."""
        values = None
        if self.image and model.channels is not None:
            from ssmscope.tasks.pixels import read_images

            values = read_images(self.image, model.channels, model.config.image_size)
        elif self.image:
            raise InputError(f"{model.name} reads tokens, not pixels: give --text, --file or --ids instead of --image")
        return model.encode(self.texts, ids=self.rows, values=values, max_tokens=self.max_tokens)


def console(**options: Any) -> Console:
    """Prints on stdout. Where that is no terminal there is no width to keep to."""
    from rich.console import Console

    piped = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED
    return Console(width=piped, **options)


def names(value: str) -> list[str]:
    return [name.strip() for name in value.split(",")]


def method_options(given: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """The options "ig.steps=64" by method and name; numbers and yes or no as such."""
    found: dict[str, dict[str, Any]] = {}
    for each in given or []:
        place, equals, value = each.partition("=")
        method, dot, name = place.partition(".")
        if not (equals and dot and method and name):
            raise InputError(f"--option {each!r}: write METHOD.NAME=VALUE, as in --option ig.baseline=pad")
        found.setdefault(method.strip(), {})[name.strip().replace("-", "_")] = _as_value(value)
    return found


def _as_value(value: str) -> Any:
    if value in ("true", "false"):
        return value == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def numbers(value: str, option: str, example: str) -> str | list[int]:
    """A list of numbers where there are any in it, else the word that it is."""
    return whole_numbers(value, option, example) if set(value) & set("0123456789,") else value


def answer(result: Result, out: Path | None, json: bool) -> None:
    """Write the files if they are wanted, then show the result as a person or a program reads it."""
    files = result.save(out, result.kind) if out is not None else {}
    if json:
        print(result.to_json())
    else:
        console().print(result)
    if files:
        print("\nFiles:", *files.values(), sep="\n  ", file=sys.stderr if json else sys.stdout)


# ---- running a command line

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""A disk takes no more."""

given: list[str] = []
"""The command line that runs, for the model card."""


@functools.cache
def command_of(app: typer.Typer) -> Any:
    """The application as the command that it is. It is made once: that takes longer than most refusals."""
    return typer.main.get_command(app)


def run(app: typer.Typer, arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    given[:] = arguments
    command = command_of(app)
    try:
        check_arguments(arguments)
        with command.make_context("analyze", list(arguments) or ["--help"]) as context:
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as end:
        return end.exit_code
    except InputError as error:
        return _refuse(str(error))
    except _CLICK_ERROR as error:
        return _refuse(_usage_message(error, arguments))
    except (KeyboardInterrupt, typer.Abort) as end:
        print("; ".join(["analyze: interrupted", *map(str, end.args)]), file=sys.stderr)
        return 130
    except BrokenPipeError:  # `analyze … | head` has read enough
        _discard_stdout()
        return 1
    except OSError as error:
        if error.errno not in FULL:
            raise
        _discard_stdout()
        print(f"analyze: cannot write: {error.strerror}; make room", file=sys.stderr)
        return 1
    return 0


def _discard_stdout() -> None:
    """Nothing may be flushed into a pipe that is closed, or to a disk that is full, at exit."""
    with suppress(OSError):  # of a stream that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(message: str) -> int:
    line = " ".join(message.split())
    print("analyze:", "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line), file=sys.stderr)
    return 2


def _usage_message(error: Any, arguments: Sequence[str]) -> str:
    """What a usage error says, with the nearest options and with where to read more."""
    message = str(error.format_message()).strip()
    if message.startswith("No such option") and error.ctx is not None:
        options = [name for parameter in error.ctx.command.params for name in parameter.opts if name[:1] == "-"]
        message = f"no option {error.option_name}{did_you_mean(error.option_name, [*options, '--help'])}"
    verb = arguments[0] if arguments and arguments[0].isidentifier() else ""
    return f"{message[:1].lower()}{message[1:].rstrip('.')} (see {' '.join(filter(None, ('analyze', verb)))} --help)"
