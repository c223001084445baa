"""What tests of mixers that run at once share."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

from ssmscope.mixers import fast_scan, weights_constant


def counted(monkeypatch: pytest.MonkeyPatch, kernels: ModuleType) -> list[int]:
    """An entry for each time that a module's `between` runs."""
    made: list[int] = []
    inner = kernels.between
    monkeypatch.setattr(kernels, "between", lambda *terms: made.append(1) or inner(*terms))
    return made


def answers(model: nn.Module, length: int, constant: bool = False, sensitive: bool = True) -> list[torch.Tensor]:
    """The logits and, where `sensitive`, the gradients of the embeddings and of all weights that are asked for."""
    g = torch.Generator().manual_seed(length)
    dtype = next(model.parameters()).dtype
    embeds = torch.randn(2, length, model.config.hidden_size, generator=g).to(dtype).requires_grad_(sensitive)
    asked = [] if constant else [p for n, p in model.named_parameters() if "embeddings" not in n]
    with torch.set_grad_enabled(sensitive), fast_scan(model):
        if constant:
            with weights_constant(model):
                logits = model(inputs_embeds=embeds).logits
        else:
            logits = model(inputs_embeds=embeds).logits
        weights = torch.randn(logits.shape, generator=g).to(dtype)
        return [logits, *(torch.autograd.grad((logits * weights).sum(), [embeds, *asked]) if sensitive else ())]
