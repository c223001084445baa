"""What a Mamba-2's mixer does between its two outer projections, at once by C kernels for float32 on a CPU, with
gradients; optional, silent when absent (Mamba-2, Dao & Gu 2024, section 7).

One step of autograd: no state is begun with or kept at the end, and the parts of a gradient are written side by side.
The numbers are those of the same kernels one after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from ssmscope.scans import native, passes_native, scalar_native


class Sizes(NamedTuple):
    """What `between` is told besides tensors: groups of heads that share B and C, the least and the largest Δ, and the
    norm's ε and how many neighbouring channels it takes together."""

    groups: int
    limits: tuple[float, float]
    eps: float
    normed: int


def applicable(*terms: Tensor) -> bool:
    """Whether `between` takes these: float32, on a CPU, outside of autocasting."""
    whole = not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
    plain = whole and all(native.is_plain(t, "cpu") for t in terms)
    return plain and scalar_native.available() and passes_native.available()


def between(
    projected: Tensor,
    convolution: tuple[Tensor, Tensor | None],
    step_bias: Tensor,
    A_log: Tensor,
    D: Tensor,
    norm: Tensor,
    sizes: Sizes,
) -> Tensor:
    """RMSNorm(y ⊙ SiLU(z)), (batch, length, channels), of `projected`: z, what the convolution reads (x, B and C side
    by side), and Δ before its bias and softplus, (batch, length, channels + channels + 2 groups states + heads).

    Args:
        convolution: its weight (channels + 2 groups states, taps), the current position's last, at most
            `passes_native.TAPS`, and bias.
        step_bias: (heads,), as A_log and D.
        norm: the norm's weight, (channels,).
    """
    terms = (projected, *convolution, step_bias, A_log, D, norm)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in terms):
        return _Between.apply(*terms, sizes)
    return _forward(*terms, sizes, keep=False)[0]


def _parts(projected: Tensor, inner: int, heads: int) -> list[Tensor]:
    """z, what the convolution reads, and Δ before its bias."""
    return list(projected.split([inner, projected.shape[-1] - inner - heads, heads], dim=-1))


def _side_by_side(xBC: Tensor, inner: int) -> tuple[Tensor, ...]:
    """The channels of x, of B and of C."""
    shared = (xBC.shape[-1] - inner) // 2
    return xBC.split([inner, shared, shared], dim=-1)


def _scanned(xBC: Tensor, inner: int, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """x (batch, length, heads, width), B and C (batch, length, groups, states)."""
    x, b, c = _side_by_side(xBC, inner)
    return x.unflatten(-1, (heads, -1)), b.unflatten(-1, (groups, -1)), c.unflatten(-1, (groups, -1))


def _forward(projected, weight, bias, step_bias, A_log, D, norm, sizes: Sizes, *, keep: bool) -> tuple[Tensor, ...]:
    """What `between` gives, and what its gradient needs: the convolution's output, Δ, y, and the states at the chunks'
    starts."""
    inner, heads = len(norm), len(D)
    z, entered, step = _parts(projected, inner, heads)
    xBC = passes_native._convolved(entered, weight, bias, None)
    delta = softplus(step + step_bias).clamp_(*sizes.limits)
    x, b, c = _scanned(xBC, inner, heads, sizes.groups)
    by_channel = D.unsqueeze(-1).expand(x.shape[2:])
    terms = (delta * -A_log.exp(), b, c, x, None, delta, by_channel)
    y, _, starts = scalar_native._forward(*terms, keep=keep, final=False)
    y = y.flatten(2)
    return passes_native._normed(y, z, norm, sizes.eps, sizes.normed), xBC, delta, y, starts


class _Between(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *terms: Any) -> Tensor:
        out, *kept = _forward(*terms, keep=True)
        ctx.save_for_backward(*terms[:-1], *kept)
        ctx.sizes = terms[-1]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        projected, weight, bias, step_bias, A_log, D, norm, xBC, delta, y, starts = ctx.saved_tensors
        of, sizes, inner, heads = ctx.needs_input_grad, ctx.sizes, len(norm), len(D)
        grad_projected = projected.new_empty(projected.shape)
        z, entered, step = _parts(projected, inner, heads)
        grad_z, grad_entered, grad_step = _parts(grad_projected, inner, heads)
        grad_y, grad_norm = passes_native._normed_back(y, z, norm, sizes.eps, sizes.normed, grad, grad_z)
        grad_xBC = torch.empty_like(xBC)
        A = -A_log.exp()
        x, b, c = _scanned(xBC, inner, heads, sizes.groups)
        grad_log_a, grad_delta, _, grad_D = scalar_native._backward(
            *(delta * A, b, c, x, delta, D.unsqueeze(-1).expand(x.shape[2:]), starts),
            *(grad_y.unflatten(-1, (heads, -1)), None, *_side_by_side(grad_xBC, inner)),
        )
        grad_A_log = (grad_log_a * delta).sum((0, 1)) * A if of[4] else None
        biased = step + step_bias
        grad_delta.addcmul_(grad_log_a, A).mul_(biased.sigmoid())
        if tuple(sizes.limits) != (0.0, float("inf")):
            free = softplus(biased)
            grad_delta.masked_fill_((free < sizes.limits[0]) | (free > sizes.limits[1]), 0)
        grad_step.copy_(grad_delta)
        of_convolution = passes_native._convolved_back(entered, weight, bias, None, grad_xBC, grad_entered)
        return (
            grad_projected,
            *of_convolution[:2],
            grad_delta.sum((0, 1)) if of[3] else None,
            grad_A_log,
            grad_D.sum(-1) if of[5] else None,
            grad_norm if of[6] else None,
            None,
        )
