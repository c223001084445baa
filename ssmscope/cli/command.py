"""What the verbs of `analyze` share: their common options, and how a command line runs, answers and refuses."""

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

from ssmscope.core.reading import SURROGATE
from ssmscope.core.shipped import demos
from ssmscope.errors import InputError, as_typed, did_you_mean, ran_out_of_memory

if TYPE_CHECKING:
    from rich.console import Console


# UsageError and ClickException, which typer brings itself or takes from click, depending on its version.
_USAGE_ERROR: Any = typer.BadParameter.__base__
_CLICK_ERROR: Any = _USAGE_ERROR.__base__


PIPED = 120
"""How many columns an answer has where stdout is no terminal: tables with intervals need more than rich's 80."""


class Verbs(TyperGroup):
    """The verbs; an unknown one is answered with the nearest."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order in which they are added; typer itself puts groups of verbs behind all others."""
        names = list(super().list_commands(ctx))
        for group in [name for name in names if isinstance(self.commands[name], TyperGroup)]:
            first = next(iter(self.commands[group].commands.values()))  # type: ignore[attr-defined]
            room, _, package = first.callback.analysis.module.rpartition(".")
            below = [
                name
                for name in names
                if (analysis := getattr(self.commands[name].callback, "analysis", None)) is not None
                and analysis.module.rpartition(".")[0] == room
                and analysis.module.rpartition(".")[2] > package
            ]
            if below:
                names.remove(group)
                names.insert(names.index(below[0]), group)
        return names

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            verbs = ", ".join(self.commands)
            raise InputError(f"no verb {args[0]!r}; there are {verbs}{did_you_mean(args[0], self.commands)}")
        return super().resolve_command(ctx, args)


# ---- options that several verbs have


def shipped(incomplete: str) -> list[str]:
    """The shipped models whose name begins like this, for a shell that completes a line."""
    return [name for name in demos() if name.startswith(incomplete)]


MODEL = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="demo/NAME, a directory, a file, or a hub id.", autocompletion=shipped),
]
OUT = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write VERB.json, .csv, .png and .html there.")]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
TOKENIZER = Annotated[
    str | None, typer.Option("--tokenizer", metavar="NAME", help="A directory or hub id, where MODEL has none.")
]
DEVICE = Annotated[
    str, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:1 or mps; auto takes a GPU where there is one.")
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
    """Prints on stdout. Where that is no terminal there is no width to keep to."""
    from rich.console import Console

    piped = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED
    return Console(width=piped, **options)


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
        return _refuse(as_typed(str(error)))
    except _CLICK_ERROR as error:
        return _refuse(_usage_message(error, arguments))
    except (KeyboardInterrupt, typer.Abort) as end:
        print("; ".join(["analyze: interrupted", *map(str, end.args)]), file=sys.stderr)
        return 130
    except BrokenPipeError:  # `analyze … | head` has read enough
        _discard_stdout()
        return 1
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        return _refuse(f"this needs more memory than there is ({str(error).partition(chr(10))[0] or 'none left'})")
    except OSError as error:
        if error.errno not in FULL:
            raise
        _discard_stdout()
        print(f"analyze: cannot write: {error.strerror}; make room", file=sys.stderr)
        return 1
    return 0


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse a command line with bytes that are no UTF-8; names of what exists may have them.

    Raises:
        InputError: naming the option.
    """
    for before, argument in zip(("", *arguments), arguments):
        if SURROGATE.search(argument) and not os.path.lexists(argument):
            named = before if before.startswith("--") else argument.partition("=")[0]
            named = named if named.startswith("--") and not SURROGATE.search(named) else "an argument"
            raise InputError(f"{named} is not valid UTF-8; give it in UTF-8")


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
