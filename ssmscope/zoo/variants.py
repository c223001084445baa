"""Variants of transformers' Mamba and Mamba-2: configuration, backbone and language model after mixins."""

from __future__ import annotations

from typing import Any

import transformers
from transformers.models.mamba.modeling_mamba import MambaMixer
from ssmscope.layers import mamba, mamba2
from ssmscope.networks.generation import MAMBA2_TIED, ContinuesFromStates


def base_of(mixer: Any) -> Any:
    """Return the architecture, `mamba` or `mamba2`, that reads the base of a mixer."""
    return mamba if isinstance(mixer, MambaMixer) else mamba2


def variant(base: str, name: str, model_type: str, fields: type, backbone: type, language: type) -> tuple[Any, ...]:
    """Return NAMEConfig, NAMEModel, the backbone, and NAMEForCausalLM, the language model: the classes of transformers'
    `base`, "Mamba" or "Mamba2", after these mixins. `fields` has the `__init__` of the configuration."""
    module = {"__module__": fields.__module__}
    made = {"model_type": model_type, "__init__": fields.__init__, "__doc__": fields.__doc__}  # type: ignore[misc]
    config = type(f"{name}Config", (fields, getattr(transformers, f"{base}Config")), {**module, **made})
    own = {**module, "config_class": config}
    model = type(f"{name}Model", (backbone, getattr(transformers, f"{base}Model")), own)
    own |= {"backbone_class": model} | ({"_tied_weights_keys": MAMBA2_TIED} if base == "Mamba2" else {})
    bases = (ContinuesFromStates, language, getattr(transformers, f"{base}ForCausalLM"))
    return config, model, type(f"{name}ForCausalLM", bases, own)
