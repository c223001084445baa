"""Products with a linear layer's weight by oneDNN, which most builds of torch have and keep for 16 bits: of float32 and
a large weight a tenth faster than torch's own where vectors are wide; optional, silent when absent."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ssmscope.scans.native import is_plain

LEAST = 2**20
"""Numbers of a weight that is worth oneDNN's preparation, once for each number of rows."""


@cache
def faster() -> bool:
    """Whether oneDNN is faster on this processor: not where vectors are of 256 bits at most. There torch's own took .75
    to .92 of its time (four products of mamba-130m's size at 1,024 rows on a Zen 3, one thread and two)."""
    return torch.backends.cpu.get_cpu_capability() != "AVX2"


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias, (…, outputs), of `x` (…, inputs) and `weight` (outputs, inputs), with gradients of any order; as
    torch's `linear` to rounding, and that itself where oneDNN's is not `applicable`.

    A row's numbers do not depend on the number of threads, nor on how many rows there are beside it if there are any.
    """
    if not applicable(x, weight, bias):
        return linear(x, weight, bias)
    terms = (x, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in terms):
        return _Product.apply(*terms)
    return _found(*terms)


def worthwhile(weight: Tensor) -> bool:
    """Whether products with this weight may gain: float32, on a CPU where oneDNN is `faster`, large."""
    if weight.numel() < LEAST or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    return faster()


def applicable(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN takes these: float32, on a CPU, a large weight, outside of autocasting and compiling."""
    if not worthwhile(weight) or x.ndim < 2 or not x.numel():
        return False
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or not torch.backends.mkldnn.enabled:
        return False
    if bias is not None and not (is_plain(bias, "cpu") and bias.is_contiguous()):
        return False  # oneDNN reads a bias's numbers side by side, wherever they are
    return is_plain(x, "cpu") and is_plain(weight, "cpu") and available()


@cache
def available() -> bool:
    """Whether this build of torch has oneDNN, and hands products to it."""
    x, weight = torch.eye(2), torch.arange(6.0).view(3, 2)
    try:
        with torch.no_grad():
            return torch.equal(_found(x, weight, torch.ones(3)), weight.T + 1)
    except (AttributeError, RuntimeError):
        return False


def _found(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        return _found(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            product(grad, weight.T) if ctx.needs_input_grad[0] else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None,
            rows.sum(0) if ctx.needs_input_grad[2] else None,
        )
