"""Models from directories, hubs and memory. Importing this package makes the model types that transformers lacks known
to transformers' Auto classes."""

from __future__ import annotations

from types import ModuleType

import transformers
from ssmscope.core.known_models import LAYERS, MODELS
from ssmscope.errors import kernels_explained


def register(*modules: ModuleType) -> None:
    """Make the model classes in the modules' `AUTO` known to transformers' Auto classes."""
    for model in (model for module in modules for model in getattr(module, "AUTO", ())):
        transformers.AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
        _, task, of = model.__name__.rpartition("For")
        auto = getattr(transformers, f"AutoModel{task}{of if task else ''}")
        auto.register(model.config_class, model, exist_ok=True)


def register_added() -> None:
    """Register the model types of installed packages that add layers."""
    register(*(LAYERS[name] for name, place in LAYERS.places.items() if not place.startswith("ssmscope.")))


with kernels_explained():
    register(*{id(module): module for module in map(MODELS.__getitem__, sorted(MODELS))}.values())
