"""The heads of classifiers: what they read, and their own logits of every row of a padded batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ssmscope.encoding import last_positions
from ssmscope.intercept import twin, watched
from ssmscope.mixers import Handed


def class_logits(module: Any, arguments: dict[str, Tensor]) -> Tensor:
    """A classifier's own logits (batch, classes), every row read at the last position that its `attention_mask` has.

    transformers' heads look for the last token that is not the padding token of the configuration, and in embeddings
    read the last column: they are shown what the backbone gives at a row's last real position, wherever they look.
    """
    if not type(module).forward.__module__.startswith("transformers."):
        return module(**arguments).logits
    at = last_positions(arguments["attention_mask"])

    def read_at_last(_: nn.Module, output: Any) -> Handed:
        hidden = output[0]
        rows = torch.arange(len(at), device=hidden.device)
        return Handed(hidden[rows, at.to(hidden.device)].unsqueeze(1).expand_as(hidden))

    with watched(after=[(module.base_model, read_at_last)]):
        return _with_pad_token(module)(**arguments, use_cache=False).logits


def _with_pad_token(module: Any) -> Any:
    """The module, or a twin of it whose configuration has a padding token: without, transformers' classifiers refuse
    several rows."""
    config = copy.deepcopy(module.config)
    lacking = [each for each in (config, config.get_text_config()) if getattr(each, "pad_token_id", None) is None]
    if not lacking:
        return module
    for each in lacking:
        each.pad_token_id = 0
    found = twin(module)
    found.config = config
    return found
