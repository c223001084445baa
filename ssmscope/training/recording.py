"""A step of training, from the batch to the gradients, recorded as a CUDA graph and played back.

A small model's step is hundreds of short kernels, and a GPU waits for each to be launched. A recording is launched as
one. It holds what was computed, not how: shapes and numbers that Python had when it was made stay, which is why only
steps of settled shapes are recorded (`Objective.settled`), and why a prior that is annealed needs a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

RECORDABLE = ("mamba2", "baleen-mamba2", "diff-mamba")
"""Backbones whose forward and backward pass never wait for the GPU; what waits cannot be recorded."""

WARM_UP = 3
"""Steps that are run before a recording: libraries settle what they need in the first ones."""


def recordable(module: nn.Module, device: torch.device) -> bool:
    """Whether a model's step on this device can be recorded."""
    config = getattr(module, "config", None)
    return device.type == "cuda" and getattr(getattr(config, "backbone", config), "model_type", None) in RECORDABLE


class Recording:
    """The loss and the gradients of a batch, recorded.

    Gradients are in the parameters' `grad`, which must stay these tensors: they are overwritten, never added to.
    Random numbers are those of the generators at each call, as without a recording.

    Args:
        loss_of: the loss (a scalar) of a batch.
        parameters: which it has gradients by.
        batch: tensors on a GPU, of the shapes that all batches have.
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
            for _ in range(WARM_UP):
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
        """The loss of `batch`, a tensor that the next call overwrites."""
        for name, tensor in batch.items():
            self.batch[name].copy_(tensor)
        self.graph.replay()
        return self.loss


def _forget(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = None
