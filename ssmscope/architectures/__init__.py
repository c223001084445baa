"""Architectures that can be read, and the models that we add to transformers.

`read` has the layers of other libraries, one file a family, `own` the models that transformers does not have, and
`loading` gets them from directories, hubs and memory. Every module of the first two that defines `MIXERS` is an
architecture: see `ssmscope.core.mixers.Architecture`. Importing the package makes our model types known to
transformers' Auto classes, and imports none of `LAZY_FAMILIES`.

In every architecture `compute_terms(mixer, u, mask, state)` takes the layer's input `u` (batch, length, width), a
`mask` (batch, length) that is True at real positions, and the `state` from which a run continues. At padding nothing
is written and the state holds.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import partial
from importlib.util import find_spec
from types import ModuleType

import transformers

from ssmscope.architectures import own, read
from ssmscope.core import mixers

LAZY_FAMILIES: dict[str, tuple[str, ...]] = {
    "bamba": ("bamba",),
    "falcon_h1": ("falcon_h1",),
    "granitemoehybrid": ("granitemoehybrid",),
    "jamba": ("jamba",),
    "kimi_linear": ("kimi_linear",),
    "lfm2": ("lfm2",),
    "lfm2_moe": ("lfm2_moe",),
    "lfm3": ("lfm3",),
    "minimax": ("minimax",),
    "nemotron_h": ("nemotron_h",),
    "olmo_hybrid": ("olmo_hybrid",),
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen3_next": ("qwen3_next",),
    "recurrent_gemma": ("recurrent_gemma",),
    "xlstm": ("xlstm",),
    "zamba": ("zamba",),
    "zamba2": ("zamba2",),
}
"""Model types of the families whose module in `read`, named as their folder in transformers, is imported with the
first model of the family. A release of transformers need not have each."""


def available_families() -> list[str]:
    """Return the lazy families that the installed transformers has."""
    return [name for name in LAZY_FAMILIES if find_spec(f"transformers.models.{name}") is not None]


def _import(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def _modules() -> dict[str, ModuleType]:
    rooms = (read, own)
    found = {
        info.name: room
        for room in rooms
        for info in pkgutil.iter_modules(room.__path__)
        if info.name not in LAZY_FAMILIES
    }
    return {name: importlib.import_module(f"{room.__name__}.{name}") for name, room in sorted(found.items())}


def architectures() -> dict[str, ModuleType]:
    """Import every architecture module of this package, and return them by name."""
    found = {name: module for name, module in _modules().items() if hasattr(module, "MIXERS")}
    return found | {name: _import(f"read.{name}") for name in available_families()}


def register() -> None:
    """Make every architecture readable and our model types known to transformers' Auto classes."""
    for name in available_families():
        mixers.register_later(f"transformers.models.{name}.modeling_{name}", partial(_import, f"read.{name}"))
    for module in _modules().values():
        if hasattr(module, "MIXERS"):
            mixers.register(module)
        for model in getattr(module, "AUTO", ()):
            transformers.AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
            _, task, of = model.__name__.rpartition("For")
            getattr(transformers, f"AutoModel{task}{of if task else ''}").register(
                model.config_class, model, exist_ok=True
            )


register()
