"""Architectures that can be read, and the models that we add to transformers.

`read` has the layers of libraries, one file per family, with models where transformers has none, `own` models of
papers, and `loading` gets them from directories, hubs and memory. `core.known_models` lists which module reads which
layers, see `core.mixers.LayerAdapter`. Importing the package makes our model types known to transformers' Auto classes.

In every architecture `compute_terms(mixer, u, mask, state)` takes the layer's input `u` (batch, length, width), a
`mask` (batch, length) that is True at real positions, and the `state` from which a run continues. At padding nothing
is written and the state holds.
"""

from __future__ import annotations

import importlib
from typing import Any

import transformers

from ssmscope.core.known_models import ADDED_FAMILIES, LAYERS
from ssmscope.errors import kernels_explained


def register(*modules: Any) -> None:
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
    names = {"own.classifier", *(module for module, *_ in ADDED_FAMILIES.values())}
    register(*(importlib.import_module(f"{__name__}.{name}") for name in sorted(names)))
