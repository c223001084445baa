"""Tensors that kernels write, made in half the time: for a short scan Python takes longer than the GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes, and strides in numbers."""

# what torch makes tensors with in the code that it compiles: without its dispatcher, on the current GPU
_quick: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def contiguous(*sizes: int) -> Layout:
    """The layout of a contiguous tensor of these sizes."""
    return sizes, torch.empty(sizes, device="meta").stride()


def maker(like: Tensor) -> Callable[..., Tensor]:
    """What makes tensors where `like` is, given the two parts of a layout and a type; their numbers are not set."""
    if _quick is not None and like.is_cuda and like.get_device() == torch._C._cuda_getDevice():
        return _quick
    return lambda sizes, strides, dtype: like.new_empty_strided(sizes, strides, dtype=dtype)
