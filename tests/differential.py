"""Numbers of Differential Mambas that several tests look at, and the paper's prompt."""

import torch
from torch import nn
from ssmscope.zoo.diff_mamba import Subtraction

PAPER_PROMPT = "<context>{context}</context> Question:{question} Answer:"
"""Prompt template of appendix A.5.1."""


def lambdas(module: nn.Module) -> dict[int, float]:
    """λ of every differential layer of a model, by the layer's index."""
    with torch.no_grad():
        return {m.layer_idx: m.current_lambda().item() for m in module.modules() if isinstance(m, Subtraction)}
