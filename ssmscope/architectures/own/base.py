"""The base that our own layers are built on: Mamba or Mamba-2."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.mamba.modeling_mamba import MambaMixer

from ssmscope.architectures.read import mamba, mamba2


def base_of(mixer: nn.Module) -> Any:
    """Return the architecture, `mamba` or `mamba2`, that reads the base of a mixer."""
    return mamba if isinstance(mixer, MambaMixer) else mamba2
