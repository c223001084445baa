"""Training step, from the batch to the gradients, recorded as a CUDA graph and replayed.

A small model's step consists of hundreds of short kernels, whose launches dominate. A recording is launched as one. It
holds the kernels, not the Python code: shapes and Python numbers stay as they were, so only steps of fixed shapes are
recorded (`Objective.settled`), and a changed prior needs a new recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

RECORDABLE = ("mamba2", "baleen-mamba2", "diff-mamba")
"""Backbones whose forward and backward passes never wait for the GPU, which a recording requires."""

WARM_UP_STEPS = 3
"""Steps before a recording, in which libraries initialize."""


def recordable(module: nn.Module, device: torch.device) -> bool:
    """Return True if a model's step on this device can be recorded."""
    config = getattr(module, "config", None)
    return device.type == "cuda" and getattr(getattr(config, "backbone", config), "model_type", None) in RECORDABLE


class Recording:
    """Recording of the loss and the gradients of a batch.

    Gradients are in the parameters' `grad`, which must stay the same tensors: they are overwritten, never accumulated.
    Random numbers come from the generators at each call, as without a recording.

    Args:
        loss_of: function that computes the loss (a scalar) of a batch.
        parameters: parameters to compute gradients for.
        batch: tensors on a GPU, of the shapes of all batches.
    """

    def __init__(
        self,
        loss_of: Callable[[Mapping[str, Tensor]], Tensor],
        parameters: Sequence[nn.Parameter],
        batch: Mapping[str, Tensor],
    ) -> None:
        self.batch = {name: tensor.clone() for name, tensor in batch.items()}
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_STEPS):
                _forget(parameters)
                loss_of(self.batch).backward()
        torch.cuda.current_stream().wait_stream(aside)
        _forget(parameters)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            loss = loss_of(self.batch)
            loss.backward()
        self.loss = loss.detach()

    def __call__(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss of `batch`, a tensor that the next call overwrites."""
        for name, tensor in batch.items():
            self.batch[name].copy_(tensor)
        self.graph.replay()
        return self.loss


def _forget(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
