"""Training passes that recompute each block for its gradients, in the memory of one block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from ssmscope.core.intercept import Handler, active_override, override_forward
from ssmscope.core.mixers import mixers
from ssmscope.ops.recurrence import checkpointed


def stacked(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model, with and without a mixer: the members of its outermost lists of blocks."""
    for part in module.children():
        found = mixers(part)
        if found and found != [part]:
            yield from part.children() if isinstance(part, nn.ModuleList) else stacked(part)


@contextmanager
def recomputed(module: nn.Module) -> Iterator[None]:
    """Keep only each block's input for the backward pass, which runs each block again, within the context and in this
    thread alone: the same numbers, about a third more time, and the memory of one block. The backward pass belongs
    within all contexts that change the run. A model whose mixers read other layers' terms runs as always."""
    readers = any(getattr(mixer, "before", ()) for mixer in mixers(module))
    blocks = [] if readers else list(stacked(module))
    with override_forward([(block, partial(_checkpointed, active_override(block))) for block in blocks]):
        yield


def _checkpointed(handler: Handler | None, below: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    block = below if handler is None else partial(handler, below)
    moving = any(isinstance(each, Tensor) and each.requires_grad for each in (*args, *kwargs.values()))
    if not (moving and torch.is_grad_enabled()):
        return block(*args, **kwargs)
    # On a GPU the backward pass has a thread of its own, which needs this one's overrides.
    run = partial(copy_context().run, block)
    return checkpointed(run, *args, **kwargs)
