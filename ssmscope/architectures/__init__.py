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

import transformers

from ssmscope.core.known_models import ADDED_FAMILIES
from ssmscope.errors import kernels_explained


def register() -> None:
    """Make our model types known to transformers' Auto classes: the classes in `AUTO` of each of their modules."""
    for name in sorted({"own.classifier", *(module for module, *_ in ADDED_FAMILIES.values())}):
        for model in importlib.import_module(f"{__name__}.{name}").AUTO:
            transformers.AutoConfig.register(model.config_class.model_type, model.config_class, exist_ok=True)
            _, task, of = model.__name__.rpartition("For")
            getattr(transformers, f"AutoModel{task}{of if task else ''}").register(
                model.config_class, model, exist_ok=True
            )


with kernels_explained():
    register()
