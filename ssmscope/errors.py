"""InputError, the one error that a user's input can cause, with suggestions of the nearest valid name."""

from __future__ import annotations

import difflib
import math
import os
import pickle
import re
import struct
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from traceback import walk_tb
from typing import Any

UNPICKLABLE = (
    *(pickle.UnpicklingError, struct.error, EOFError, OSError, RuntimeError, ValueError),
    *(AssertionError, AttributeError, LookupError, TypeError),
)
"""Errors that torch raises on a damaged file of weights."""


class InputError(ValueError):
    """Input that cannot be used. The message is one line: what was given, what is allowed, what to do."""


_OPTION = r"\b([a-z]\w*)=(…|True\b|False\b|'[^']*'|\"[^\"]*\"|-?\d+)"
OPTION_IN_MESSAGE = re.compile(rf"[\w.]+\({_OPTION}\)|(?<![.\w]){_OPTION}")
"""Option in a message: "tokenizer=…", "heads='abs'", or in a call, "model.encode(ids=…)"."""


def as_typed(message: str, settings: Collection[str] = ()) -> str:
    """Return a message with its options as they are typed on the command line: "--tokenizer", "--heads abs", and
    "--set NAME=…" for those among `settings`."""
    return OPTION_IN_MESSAGE.sub(lambda found: _typed(found, settings), message)


def _typed(found: re.Match[str], settings: Collection[str]) -> str:
    name, value = found[1] or found[3], found[2] or found[4]
    if name in settings:
        return f"--set {name}={value}"
    name = {"values": "image"}.get(name, name).strip("_").replace("_", "-")
    given = "" if value in ("…", "True", "False") else f" {value.strip(chr(34) + chr(39))}"
    return f"--{'no-' * (value == 'False')}{name}{given}"


class Unanswerable(InputError):
    """Question that does not apply to a model, whatever the options: a report notes it and goes on."""


SAME_MEANING = (
    "clean before original reference source good",
    "corrupted after bad attacked counterfactual edited perturbed",
    "out output output-dir save-to directory folder",
    "data dataset corpus file train-file input-file",
    "text prompt sentence input inputs",
    "limit samples n max-examples max-samples num-samples",
    "methods method attribution attributions attributor algorithm",
    "target class label attributed token",
    "label sentiment category rating",
    "contrast foil versus against",
    "continuation completion generated response answer-text forced",
    "max-new-tokens new-tokens num-tokens tokens",
    "device gpu cuda",
    "seed random-state random-seed",
    "layers layer blocks block",
    "site hook component module activation",
    "strengths strength coefficient multiplier alpha scale-by",
    "toward positive",
    "away negative",
    "explain attribute saliency attributions importance interpret lrp shap lime",
    "heatmap memory retention survival",
    "fidelity faithfulness faithful deletion comprehensiveness",
    "plausibility agreement rationale rationales",
    "patch causal-tracing trace activation-patching patching",
    "ablate ablation circuit",
    "steer control repe vector steering",
    "lens logit-lens tuned-lens tunedlens",
    "generate write sample complete",
    "words adversarial textattack attack",
    "loss perplexity ppl",
    "evaluate accuracy eval test benchmark",
    "report audit plan run",
    "serve app ui web server demo",
)
"""Words that people use for one thing: an option's or a verb's name first, or among them."""


def nearest(name: str, options: Iterable[str], n: int = 3) -> list[str]:
    """Return at most `n` of `options` that mean the same as `name` (`SAME_MEANING`), or else resemble it, the most
    alike first."""
    folded = {option.lower(): option for option in options}
    plain = name.lower().lstrip("-").replace("_", "-")
    same = {word for line in SAME_MEANING if plain in line.split() for word in line.split()} - {plain}
    meant = [option for key, option in folded.items() if key.lstrip("-").replace("_", "-") in same]
    return meant[:n] or [folded[hit] for hit in difflib.get_close_matches(name.lower(), folded, n=n, cutoff=0.5)]


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


KERNEL_PACKAGES = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}
"""Packages whose kernels transformers calls wherever they can be imported, by module, with the names to install."""


@contextmanager
def kernels_explained() -> Iterator[None]:
    """Raise InputError in place of an error from within mamba_ssm or causal_conv1d in the context: installed without
    their CUDA kernels, or asked to compute on a CPU, they fail only when they are called."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        names = {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in walk_tb(error.__traceback__)}
        inside = [package for package in KERNEL_PACKAGES if package in names]
        inside += ["mamba_ssm"] * (getattr(error, "name", None) == "selective_scan_cuda" and not inside)
        if not inside or ran_out_of_memory(error):
            raise
        package = KERNEL_PACKAGES[inside[0]]
        reason = str(error).partition("\n")[0]
        built = f"MAMBA_KEEP_CUDA_BUILD=TRUE pip install --no-build-isolation {' '.join(KERNEL_PACKAGES.values())}"
        raise InputError(
            f"the package {package}, whose kernels transformers calls, cannot compute here ({reason}): uninstall it, "
            f"as ssmscope needs none of them, or on a GPU install it with its kernels ({built})"
        ) from error


def check_whole(least: int, **numbers: Any) -> None:
    """Raise InputError unless these numbers, which are seeds, sizes and counts by name, are whole and from `least`
    on."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise InputError(f"{name} is {value!r:.60}; allowed is a whole number from {least} on")


def check_number(least: float, **numbers: Any) -> None:
    """Raise InputError unless these numbers, by name, are finite and from `least` on."""
    for name, value in numbers.items():
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
        if not (math.isfinite(number) and number >= least):
            from_ = f" from {least} on" * math.isfinite(least)
            raise InputError(f"{name} is {value!r:.60}; allowed is a {'finite ' * (not from_)}number{from_}")


def check_model(given: Any, what: str) -> None:
    """Raise InputError unless a loaded model is given to `what`."""
    module = sys.modules.get("ssmscope.core.model")  # No model exists before its module is imported.
    if module is None or not isinstance(given, module.Model):
        said = f"{type(given).__name__} was given to {what} as its model"
        raise InputError(f"{said}; give one that ssmscope.load returns")


def refuse_unused(where: str, **given: bool) -> None:
    """Raise InputError for the first of these options that is given, where it has no effect."""
    if (name := next((name for name, is_given in given.items() if is_given), None)) is not None:
        raise InputError(f"{name}=… has no effect {where}; leave it out")


def check_path(given: Any, what: str) -> str:
    """Return a path as text. Raise InputError for anything else, given as `what`."""
    if not isinstance(given, str | os.PathLike):
        raise InputError(f"{type(given).__name__} was given as {what}; give its path")
    return os.fspath(given)


def index_of(what: str, name: str, known: Sequence[str]) -> int:
    """Return the place of a name among those that are known. Raise InputError if it is not among them."""
    if name not in known:
        raise InputError(f"there is no {what} {name!r}; allowed are {', '.join(known)}{did_you_mean(str(name), known)}")
    return known.index(name)
