"""Comparison of a mixer's own forward pass with the terms read from it, where its parts have hooks or are replaced.

A hook may read or change anything, and a mixer's own forward pass need not call the part that the hook is on: some
releases multiply by a convolution's weight instead, and never call the activation. Terms that disagree with the forward
pass are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ssmscope.core.intercept import is_changed, unhooked

Compute = Callable[[Tensor], Any]
"""Function from a mixer's input to its output, or to a tuple that begins with it."""


def changed_parts(mixer: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a mixer, by name, that have hooks or another forward pass."""
    named = mixer.named_modules()
    return {name: part for name, part in named if name and (is_changed(part) or _has_backward_hooks(part))}


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def described(mixer: nn.Module, parts: Mapping[str, nn.Module]) -> str:
    """Return the beginning of an error: "MambaMixer of layer 2: hooks, or a forward pass, put on act"."""
    number = getattr(mixer, "layer_idx", getattr(mixer, "layer_id", None))
    where = type(mixer).__name__ + ("" if number is None else f" of layer {number}")
    more = f" and {len(parts) - 3} others" if len(parts) > 3 else ""
    return f"{where}: hooks, or a forward pass, put on {', '.join(list(parts)[:3]) or 'it'}{more}"


def same_outcome(
    mixer: nn.Module, parts: Mapping[str, nn.Module], theirs: Compute, ours: Compute, u: Tensor, mask: Tensor | None
) -> bool:
    """Return True if a mixer's own forward pass and what is read of it agree, or its hooks change neither. Outputs are
    compared on this input at real positions, `mask` (batch, length), and where gradients are asked for, the gradients
    by it."""
    found = [_outcome(compute, mixer, u, mask) for compute in (theirs, ours)]
    if all(map(agree, *found)):
        return True
    if any(map(_has_backward_hooks, parts.values())):  # They cannot be skipped.
        return False
    with unhooked(parts.values()):
        bare = [_outcome(compute, mixer, u, mask) for compute in (theirs, ours)]
    return all(agree(a, b, rounding=True) for pair in zip(found, bare) for a, b in zip(*pair))


def agree(found: Tensor, expected: Tensor, *, rounding: bool = False) -> bool:
    """Return True if two ways of computing the same gave the same numbers; with `rounding`, but for the last digits."""
    eps = max(torch.finfo(found.dtype).eps, torch.finfo(torch.float32).eps)  # Many layers compute in float32.
    allowed = 16 * eps if rounding or eps > 1e-5 else 4 * eps**0.5
    apart, size = (found - expected).detach().abs(), expected.detach().abs()
    return not apart.numel() or bool(apart.max() <= allowed * size.max())


def _outcome(compute: Compute, mixer: nn.Module, u: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return the output at real positions and, if gradients are enabled, the gradient of the sum of its squares."""
    real = slice(None) if mask is None else mask.bool().to(u.device)
    devices = [u.device] if u.device.type == "cuda" else []
    with torch.random.fork_rng(devices, enabled=mixer.training):
        if mixer.training:  # Both runs draw the same numbers.
            torch.manual_seed(0)
        v = u.detach().requires_grad_(torch.is_grad_enabled())
        y = compute(v)
        y = (y[0] if isinstance(y, tuple) else y)[real]
        if not y.requires_grad:
            return [y] if not torch.is_grad_enabled() else [y, torch.zeros_like(u)[real]]
        (gradient,) = torch.autograd.grad(y.square().sum(), v, allow_unused=True, materialize_grads=True)
    return [y.detach(), gradient[real]]
