"""The command `analyze`: one verb per question about a trained state-space model.

Exit codes: 0, the answer is on stdout; 1, a job of a report failed, or the answer could not be printed; 2, the input
cannot be used, and one line on stderr says why; 130, interrupted. Anything else is a bug and shows a traceback. The
verbs import what they need when they run.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from ssmscope import __version__
from ssmscope.api.sharding.workers import on_engine
from ssmscope.api.signatures import options_of
from ssmscope.api.verbs import VERBS
from ssmscope.cli import command
from ssmscope.cli.command import add_to, declared
from ssmscope.cli.models import models
from ssmscope.cli.pages import push, report, serve
from ssmscope.cli.settings import Verb

app = typer.Typer(
    cls=command.Verbs,
    help="Interpret and probe trained state-space models: Mamba, Mamba-2, Falcon-Mamba, Baleen and their kin.",
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ssmscope {__version__}")
        raise typer.Exit


@app.callback()
def analyze(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Handle the options that need no verb."""


# The order of the verbs in a panel of --help is that of these lines.
audit = "How robust is it? Run a plan, such as audit, of models × analyses into one page."
app.command(rich_help_panel=command.FIRST, short_help=audit)(
    declared(report, options_of(on_engine, without=("gpus_per_worker",)))
)
for verb in (models, serve, push):
    app.command(rich_help_panel=command.MAKING)(declared(verb))
for name in VERBS:
    answer: Any = command.from_elsewhere(VERBS[name])
    app.command(name, cls=Verb, rich_help_panel=command.MAKING, epilog=answer.epilog)(answer)
add_to(app)

COMPLETION = "_ANALYZE_COMPLETE"
"""Environment variable, named by click after the program, with which a shell asks to complete a line."""
ALLOCATIONS_PER_COLLECTION = 200_000
"""Objects allocated before the youngest generation is searched for garbage; Python's own value is 700."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    return command.run(app, arguments)


def main() -> None:
    """Run the command line of this process."""
    # Imports make two million objects that live until the process ends: searching them for garbage takes a quarter of a
    # short verb. The process is the command's own.
    gc.set_threshold(ALLOCATIONS_PER_COLLECTION)
    atexit.register(gc.freeze)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if COMPLETION in os.environ:
        app(prog_name="analyze")
    # A refusal is one line, which the messages of libraries that load would bury.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", message="ssmscope ")  # Our own are shown, such as that of a missing kernel.
    warnings.formatwarning = lambda message, *_, **__: f"{message}\n"
    sys.exit(run(sys.argv[1:]))
