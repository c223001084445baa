"""The methods of explanation by name: each a function of an `Objective` and keyword options that gives `Scores`.

captum's attributions are methods too, as "captum:KernelShap", or as instances in Python.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from ssmscope.api.options import REPEATED, Metavar, OneOf
from ssmscope.core.progress import on_stderr
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.methods.captum_names import CAPTUM

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.interp.explain.result import Method, Scores


class _Methods(Mapping[str, "Callable[..., Scores]"]):
    """Names, and functions that are imported when they are asked for."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = dict(homes)

    def __getitem__(self, name: str) -> Callable[..., Scores]:
        if name.startswith(OF_CAPTUM) and name in self:
            return importlib.import_module(f"{__name__}.from_captum").named(name.removeprefix(OF_CAPTUM))
        module, _, function = self._homes[name].partition(":")
        return getattr(importlib.import_module(f"{__name__}.{module}"), function)

    def __contains__(self, name: object) -> bool:
        return name in self._homes or name in NAMES

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)


METHODS: Mapping[str, Callable[..., Scores]] = _Methods(
    {
        "ig": "integrated:ig",
        "gradxinput": "gradients:gradxinput",
        "smoothgrad": "gradients:smoothgrad",
        "gradcam": "gradients:gradcam",
        "lrp": "lrp:lrp",
        "occlusion": "occlusion:occlusion",
        "attention-rollout": "attention:attention_rollout",
        "attention-gradient": "attention:attention_gradient",
        "survival": "selection:survival",
        "self-retention": "selection:self_retention",
        "self-write": "selection:self_write",
        "random": "random:random",
    }
)
"""Every method of ours by name; captum's are found by theirs."""

USUAL = ("lrp", "gradxinput", "survival")
"""The methods that are asked where none is named, but for those that a model refuses."""

OF_CAPTUM = "captum:"
NAMES = (*METHODS, *(f"{OF_CAPTUM}{each}" for each in CAPTUM))
"""Every method by name, captum's too."""


def method(name: str, options: Mapping[str, Any] | None = None, *, seed: int = 0) -> Method:
    """A method with its options settled.

    Args:
        options: of the method, by their names.
        seed: of methods that draw, unless it is among the options.

    Raises:
        InputError: for an unknown method or option.
    """
    if name not in METHODS:
        raise InputError(f"unknown method {name!r}; allowed are {', '.join(NAMES)}{did_you_mean(str(name), NAMES)}")
    function = METHODS[name]
    known = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    given = dict(options or {})
    for option in given:
        if option not in known:
            allowed = f"allowed are {', '.join(known)}" if known else "it has none"
            raise InputError(f"{name} has no option {option!r}; {allowed}{did_you_mean(str(option), known)}")
    if "seed" in known:
        given.setdefault("seed", seed)
    return partial(function, **given)


# ---- the options of the analyses that explain

Methods = Annotated[
    Sequence[str] | Mapping[str, Callable[..., Any]] | None,
    f"Methods of explanation: {', '.join(METHODS)}, and captum's as captum:KernelShap; else those of {','.join(USUAL)} "
    "that can be asked of the model.",
    OneOf("interp.methods:NAMES"),
    Metavar("A,B,…"),
]
MethodOptions = Annotated[
    Mapping[str, Mapping[str, Any]] | None, "An option of a method, as ig.baseline=pad; may be repeated.", REPEATED
]


def check_methods(*, methods: Any, option: Any, **_: Any) -> None:
    """Refuse methods that are named twice, and options that no chosen method has.

    Raises:
        InputError: as said.
    """
    names = named(methods)
    if len(set(names)) < len(names):
        raise InputError(f"methods is {', '.join(names)}; name each once")
    for name, given in (option or {}).items():
        if name not in names:
            raise InputError(f"options of {name!r}, which is not among the methods{did_you_mean(name, names)}")
        if not isinstance(methods, Mapping):
            method(name, given)


def named(methods: str | Sequence[str] | Mapping[str, Any] | None) -> list[str]:
    """The names of methods; None stands for `USUAL`.

    Raises:
        InputError: there is none.
    """
    names = [methods] if isinstance(methods, str) else list(USUAL if methods is None else methods)
    if not names:
        raise InputError(f"no method was given; allowed are {', '.join(METHODS)}, or functions of your own by name")
    return names


def _refused(name: str, model: Model) -> bool:
    """Whether a method cannot be asked of a model, which is said on stderr."""
    check = getattr(importlib.import_module(METHODS[name].__module__), f"check_{name}", None)
    try:
        if check is not None:
            check(model)
    except InputError as error:
        on_stderr().print(f"{name} is left out: {error}")
        return True
    return False


def _own(given: Any, options: Mapping[str, Any], seed: int) -> Method:
    """A function of the caller's own, or an attribution of captum's, with its options settled."""
    if type(given).__module__.startswith("captum."):
        from ssmscope.interp.methods.from_captum import attributed

        return partial(attributed, which=given, **{"seed": seed, **options})
    return partial(given, **options) if options else given


def settled(
    methods: str | Sequence[str] | Mapping[str, Callable[..., Any]] | None,
    option: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    model: Model,
    seed: int = 0,
) -> dict[str, Method]:
    """Methods by name with their options settled; those of ours that draw get the seed.

    None stands for those of `USUAL` that can be asked of the model; what is left out, and why, is said on stderr.
    """
    given = option or {}
    if methods is None:
        methods = [name for name in USUAL if not _refused(name, model)]
    if isinstance(methods, Mapping):
        return {name: _own(each, given.get(name, {}), seed) for name, each in methods.items()}
    return {name: method(name, given.get(name), seed=seed) for name in named(methods)}
