"""InputError, the one error that a user's input can cause, with suggestions of the nearest valid name."""

from __future__ import annotations

import difflib
import pickle
import re
import struct
from collections.abc import Iterable, Sequence

UNPICKLABLE = (
    *(pickle.UnpicklingError, struct.error, EOFError, OSError, RuntimeError, ValueError),
    *(AssertionError, AttributeError, LookupError, TypeError),
)
"""Errors that torch raises on a damaged file of weights."""


class InputError(ValueError):
    """Input that cannot be used. The message is one line: what was given, what is allowed, what to do."""


OPTION_IN_MESSAGE = re.compile(r"(?:[\w.]+\()?\b([a-z]\w*)=…\)?")
"""Option in a message: "tokenizer=…", or in a call, "model.encode(ids=…)"."""


def as_typed(message: str) -> str:
    """Return a message with its options as they are typed on the command line: "--tokenizer"."""
    names = {"values": "image"}
    return OPTION_IN_MESSAGE.sub(
        lambda found: f"--{names.get(found[1], found[1]).strip('_').replace('_', '-')}", message
    )


class Unanswerable(InputError):
    """Question that does not apply to a model, whatever the options: a report notes it and goes on."""


def nearest(name: str, options: Iterable[str], n: int = 3) -> list[str]:
    """Return at most `n` of `options` that resemble `name`, the most alike first."""
    folded = {option.lower(): option for option in options}
    return [folded[hit] for hit in difflib.get_close_matches(name.lower(), folded, n=n, cutoff=0.5)]


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """Return a tail for an error message, `"; did you mean 'a' or 'b'?"`, empty if nothing resembles `name`."""
    hits = nearest(name, options)
    return "; did you mean " + " or ".join(repr(hit) for hit in hits) + "?" if hits else ""


INSTALL_PROMPTBENCH = "pip install --no-deps promptbench==0.0.4 autocorrect==2.6.1"
"""Command that installs PromptBench without what it pins, which nothing else runs on."""


def extra(name: str) -> str:
    """Return how to install an optional part of this package, as the end of "install it …"."""
    return f"in ssmscope's checkout, with pip install '.[{name}]'"


def ran_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error says that Python, numpy or torch found no memory for something, on a CPU or a GPU."""
    told = str(error) if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError) or "out of memory" in told or "can't allocate memory" in told


def index_of(what: str, name: str, known: Sequence[str]) -> int:
    """Return the place of a name among those that are known. Raise InputError if it is not among them."""
    if name not in known:
        raise InputError(f"there is no {what} {name!r}; allowed are {', '.join(known)}{did_you_mean(str(name), known)}")
    return known.index(name)
