"""The application that the verbs register with."""

from __future__ import annotations

from typing import Annotated

import typer

from ssmscope import __version__
from ssmscope.command import Verbs

app = typer.Typer(
    cls=Verbs,
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
    """Options that need no verb."""
