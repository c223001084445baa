"""Methods of explanation by name: each is a function of an `Objective` and keyword options that returns `Scores`.

captum's attributions are methods too, as "captum:KernelShap", or as instances in Python.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from ssmscope.api.options import REPEATED, Metavar, OneOf
from ssmscope.core.progress import on_stderr
from ssmscope.core.registry import Registry
from ssmscope.errors import InputError, did_you_mean, index_of
from ssmscope.interp.methods.captum_names import CAPTUM, LLM

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.interp.explain.scored_text import Method, Scores

METHODS: Registry[Callable[..., Any]] = Registry("method", "ssmscope.methods")
"""Methods by name: functions of an `Objective` and keyword options; installed packages add theirs."""
DEFAULT_METHODS = ("lrp", "gradxinput", "survival")
"""Methods used by default, except those that a model refuses."""
CAPTUM_PREFIX = "captum:"
CAPTUM_METHODS = tuple(f"{CAPTUM_PREFIX}{each}" for each in CAPTUM)


def method_function(name: str) -> Callable[..., Scores]:
    """Import the function of a method."""
    if str(name).startswith(CAPTUM_PREFIX):
        index_of("method", name, CAPTUM_METHODS)
        from ssmscope.interp.methods import captum_llm, from_captum

        name = name.removeprefix(CAPTUM_PREFIX)
        run = captum_llm.attributed_by_tokens if name in LLM else from_captum.attributed
        return from_captum.captum_method(name, run)
    return METHODS[name]


def bind_method(name: str, options: Mapping[str, Any] | None = None, *, seed: int = 0) -> Method:
    """Return a method with its options bound; one that draws gets the seed unless it is among the options."""
    function = method_function(name)
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options or {}:
        if option not in known:
            allowed = f"allowed are {', '.join(known)}" if known else "it has none"
            raise InputError(f"{name} has no option {option!r}; {allowed}{did_you_mean(str(option), known)}")
    return partial(function, **{**({"seed": seed} if "seed" in known else {}), **(options or {})})


# ---- the options of the analyses that explain

Methods = Annotated[
    Sequence[str] | Mapping[str, Callable[..., Any]] | None,
    f"Methods of explanation: {', '.join(METHODS)}, and captum's as captum:KernelShap; by default those of "
    f"{','.join(DEFAULT_METHODS)} that fit the model.",
    OneOf("interp.methods:METHODS", CAPTUM_METHODS),
    Metavar("A,B,…"),
]
MethodOptions = Annotated[
    Mapping[str, Mapping[str, Any]] | None, "An option of a method, as ig.baseline=pad; may be repeated.", REPEATED
]


def check_methods(*, methods: Any, option: Any, **_: Any) -> None:
    """Raise InputError if a method is named twice, or an option belongs to no chosen method."""
    names = method_names(methods)
    if len(set(names)) < len(names):
        raise InputError(f"methods is {', '.join(names)}; name each once")
    for name, given in (option or {}).items():
        if name not in names:
            raise InputError(f"option is given for {name!r}, which is not among the methods{did_you_mean(name, names)}")
        if not isinstance(methods, Mapping):
            bind_method(name, given)


def method_names(methods: str | Sequence[str] | Mapping[str, Any] | None) -> list[str]:
    """Return the names of methods; None stands for `DEFAULT_METHODS`."""
    names = [methods] if isinstance(methods, str) else list(DEFAULT_METHODS if methods is None else methods)
    if not names:
        raise InputError(f"no method was given; allowed are {', '.join(METHODS)}, or functions of your own by name")
    return names


def _refused(name: str, model: Model) -> bool:
    """Return True if a method cannot explain a model, and say so on stderr."""
    check = getattr(importlib.import_module(method_function(name).__module__), f"check_{name}", None)
    try:
        if check is not None:
            check(model)
    except InputError as error:
        on_stderr().print(f"{name} is left out: {error}")
        return True
    return False


def _own(given: Any, options: Mapping[str, Any], seed: int) -> Method:
    """Bind the options of a function of the caller's own, or of an attribution of captum's."""
    if type(given).__module__.startswith("captum."):
        from ssmscope.interp.methods.from_captum import attributed

        return partial(attributed, which=given, **{"seed": seed, **options})
    return partial(given, **options) if options else given


def bind_methods(
    methods: str | Sequence[str] | Mapping[str, Callable[..., Any]] | None,
    option: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    model: Model,
    seed: int = 0,
) -> dict[str, Method]:
    """Return methods by name with their options bound; by default those of `DEFAULT_METHODS` that fit the model."""
    given = option or {}
    if isinstance(methods, Mapping):
        return {name: _own(each, given.get(name, {}), seed) for name, each in methods.items()}
    if methods is None:
        methods = [name for name in DEFAULT_METHODS if not _refused(name, model)]
    return {name: bind_method(name, given.get(name), seed=seed) for name in method_names(methods)}
