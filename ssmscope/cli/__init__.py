"""The command `analyze`: one verb per question about a trained state-space model.

Exit codes: 0, the answer is on stdout; 1, a job of a report failed, or the answer could not be printed; 2, the input
cannot be used, and one line on stderr says why; 130, interrupted. Anything else is a fault of ours and shows a
traceback. The verbs import what they need when they run.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

# isort: off
from ssmscope import command
from ssmscope.cli.app import app as app

# The order of the verbs in --help is that of these lines.
from ssmscope.cli.training import train as train, models as models
from ssmscope.cli.report import report as report
from ssmscope.cli.serve import serve as serve
from ssmscope.cli import verbs
# isort: on

verbs.add_to(app)

COMPLETION = "_ANALYZE_COMPLETE"
"""The variable of the environment in which a shell asks to complete a line, which click names after the program."""


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    return command.run(app, arguments)


def main() -> None:
    """The entry point of the command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    if COMPLETION in os.environ:  # the shell asks for the next word
        app(prog_name="analyze")
    # A refusal is one line: what libraries have to say while they load would bury it.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    sys.exit(run(sys.argv[1:]))
