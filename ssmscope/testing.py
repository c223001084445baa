"""Checks of one's own layers, for tests of them."""

from __future__ import annotations

from typing import Any

from torch import nn
from ssmscope.core.model import Model
from ssmscope.loading.load import load


def check_adapter(module: nn.Module, example: Any, **options: Any) -> Model:
    """Check the adapted layers of a module on token ids (batch, length), or numbers (batch, length, channels), and
    return the module as a model; `options` are those of `load`.

    Every layer's output is recomputed from its terms: for all positions and for some, continued from a state, in a
    padded batch, and in float64. Raises InputError with layer and size of a difference.
    """
    return load(module, example=example, **options)
