"""Common options of the verbs of `analyze`, and the running of a command line with its exit codes and errors."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from ssmscope.api import registry
from ssmscope.core.readable import demos
from ssmscope.core.reading import SURROGATE
from ssmscope.errors import InputError, as_typed, did_you_mean, ran_out_of_memory

if TYPE_CHECKING:
    from rich.console import Console


# UsageError and ClickException belong to typer or to click, depending on typer's version.
_USAGE_ERROR: Any = typer.BadParameter.__base__
_CLICK_ERROR: Any = _USAGE_ERROR.__base__


PIPED_COLUMNS = 120
"""Columns of an answer if stdout is not a terminal; tables with intervals need more than rich's 80."""


class Verbs(TyperGroup):
    """Group of verbs that names the nearest verb for an unknown one."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return other verbs, then those of analyses in the order of their table; typer lists groups last."""
        names = list(super().list_commands(ctx))
        order = list(dict.fromkeys(name.partition(" ")[0] for name in registry.analyses()))
        return [*(name for name in names if name not in order), *(name for name in order if name in names)]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            verbs = ", ".join(self.commands)
            raise InputError(f"no verb {args[0]!r}; there are {verbs}{did_you_mean(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


# ---- options shared by several verbs


def shipped(incomplete: str) -> list[str]:
    """Return the shipped models whose name begins like this, to complete a line in a shell."""
    return [name for name in demos() if name.startswith(incomplete)]


MODEL = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="demo/NAME, a directory, a file, or a hub id.", autocompletion=shipped),
]
OUT = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Directory for VERB.json, .csv, .png and .html.")
]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
TOKENIZER = Annotated[
    str | None, typer.Option("--tokenizer", metavar="NAME", help="A directory or hub id, if MODEL has no tokenizer.")
]
DEVICE = Annotated[
    str, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:1 or mps; auto takes a GPU if there is one.")
]
DTYPE = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="float32, bfloat16, float16 or float64; auto is float32 on a CPU, and as stored on a GPU.",
    ),
]


def console(**options: Any) -> Console:
    """Return a console on stdout, with a fixed width if that is not a terminal."""
    from rich.console import Console

    piped = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_COLUMNS
    return Console(width=piped, **options)


def show(heads: Sequence[str], rows: Iterable[Sequence[Any]], *notes: str, title: str = "") -> None:
    """Print a table, with its title above and notes below."""
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(*(Column(head, no_wrap=head != "command") for head in heads), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*map(Text, row))
    for each in ([Text(title, style="bold")] if title else []) + [table, *map(Text, notes)]:
        console(highlight=False).print(each)


# ---- running a command line

DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of a disk that takes no more."""

given: list[str] = []
"""Current command line, for the model card."""


@functools.cache
def command_of(app: typer.Typer) -> Any:
    """Return the application as a command, made once because that takes longer than most refusals."""
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
        return _refuse(as_typed(str(error)))
    except _CLICK_ERROR as error:
        return _refuse(_usage_message(error, arguments))
    except (KeyboardInterrupt, typer.Abort) as end:
        print("; ".join(["analyze: interrupted", *map(str, end.args)]), file=sys.stderr)
        return 130
    except BrokenPipeError:  # The reader, as in `analyze … | head`, has read enough.
        _discard_stdout()
        return 1
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        return _refuse(f"this needs more memory than there is ({str(error).partition(chr(10))[0] or 'none left'})")
    except OSError as error:
        if error.errno not in DISK_FULL_ERRORS:
            raise
        _discard_stdout()
        print(f"analyze: cannot write: {error.strerror}; make room", file=sys.stderr)
        return 1
    return 0


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise InputError for an argument that is not UTF-8, unless it names an existing file."""
    for before, argument in zip(("", *arguments), arguments):
        if SURROGATE.search(argument) and not os.path.lexists(argument):
            named = before if before.startswith("--") else argument.partition("=")[0]
            named = named if named.startswith("--") and not SURROGATE.search(named) else "an argument"
            raise InputError(f"{named} is not valid UTF-8; give it in UTF-8")


def _discard_stdout() -> None:
    """Redirect stdout to nowhere, so that exit flushes nothing into a closed pipe or to a full disk."""
    with suppress(OSError):  # The stream may have no file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(message: str) -> int:
    line = " ".join(message.split())
    print("analyze:", "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line), file=sys.stderr)
    return 2


def _usage_message(error: Any, arguments: Sequence[str]) -> str:
    """Return the message of a usage error, with the nearest options and a pointer to the help."""
    message = str(error.format_message()).strip()
    if message.startswith("No such option") and error.ctx is not None:
        options = [name for parameter in error.ctx.command.params for name in parameter.opts if name[:1] == "-"]
        message = f"no option {error.option_name}{did_you_mean(error.option_name, [*options, '--help'])}"
    verb = arguments[0] if arguments and arguments[0].isidentifier() else ""
    return f"{message[:1].lower()}{message[1:].rstrip('.')} (see {' '.join(filter(None, ('analyze', verb)))} --help)"
