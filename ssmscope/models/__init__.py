"""The architectures that can be read, one file each, and the models we add to transformers.

Every module of this package that defines `MIXERS` is an architecture: see `ssmscope.mixers.Architecture`. Importing the
package makes our model types known to transformers' Auto classes.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import transformers

from ssmscope import mixers


def _modules() -> dict[str, ModuleType]:
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    return {name: importlib.import_module(f"{__name__}.{name}") for name in names}


def architectures() -> dict[str, ModuleType]:
    """The architecture modules of this package, by name."""
    return {name: module for name, module in _modules().items() if hasattr(module, "MIXERS")}


def register() -> None:
    """Make every architecture readable and our model types known to transformers' Auto classes."""
    for module in _modules().values():
        if hasattr(module, "MIXERS"):
            mixers.register(module)
        for config, classes in getattr(module, "AUTO", ()):
            transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
            for auto, model_class in classes.items():
                getattr(transformers, auto).register(config, model_class, exist_ok=True)


register()
