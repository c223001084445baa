"""What a Mamba's mixer does between its two outer projections, at once by C kernels for float32 on a CPU, with
gradients; optional, silent when absent (Mamba, Gu & Dao 2023, Algorithm 2).

Nothing is written that only the next part reads, as Δ before and after its softplus, y before its gate, or the halves
of a gradient before they are put side by side.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from ssmscope.scans import native, passes_native


def applicable(*terms: Tensor) -> bool:
    """Whether `between` takes these: float32, on a CPU, outside of autocasting."""
    whole = not torch.compiler.is_compiling() and not torch.is_autocast_enabled("cpu")
    return whole and all(native.is_plain(t, "cpu") for t in terms) and native.available() and passes_native.available()


def between(
    projected: Tensor,
    convolution: tuple[Tensor, Tensor | None],
    read: Tensor,
    step: tuple[Tensor, Tensor],
    A_log: Tensor,
    D: Tensor,
    tree: native.Tree | None = None,
) -> Tensor:
    """y ⊙ SiLU(z), (batch, length, channels), of `projected` (batch, length, 2 channels): what the convolution reads,
    and z. With a tree, of one sequence that holds its pieces, without gradients.

    Args:
        convolution: its weight (channels, taps), the current position's last, at most `passes_native.TAPS`, and bias.
        read: (rank + 2 states, channels), which gives Δ's low-rank input, B and C.
        step: (channels, rank) and (channels,), which give Δ before its softplus.
        A_log: (channels, states).
        D: (channels,).
    """
    terms = (projected, *convolution, read, *step, A_log, D)
    if tree is None and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in terms):
        return _Between.apply(*terms)
    return _forward(*terms, keep=False, tree=tree)[0]


def _forward(
    projected, weight, bias, read, step_weight, step_bias, A_log, D, *, keep: bool, tree=None
) -> tuple[Tensor, ...]:
    """What `between` gives, and what its gradient needs: the convolution's output, what it projects to, v, and the
    states at the chunks' starts."""
    entered, z = projected.chunk(2, dim=-1)
    x = passes_native._convolved(entered, weight, bias, None, None if tree is None else tree.inputs(weight.shape[1]))
    low = linear(x, read)
    step, b, c = _parts(low, step_weight.shape[1])
    v = linear(step, step_weight)
    A, x_of, step_bias = A_log.exp().neg_(), x.unsqueeze(-1), step_bias.contiguous()
    if tree is not None:
        return native.forward_tree(x_of, b, c, v, A, D, tree, bias=step_bias, z=z).squeeze(-1), x, low, v
    initial = x.new_zeros(len(x), x.shape[2], 1, A.shape[1])
    y, _, _, starts = native._forward(x_of, b, c, initial, v, A, D, False, False, keep, bias=step_bias, z=z)
    return y.squeeze(-1), x, low, v, starts


def _parts(low: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Δ's low-rank input, and B and C of one group."""
    states = (low.shape[-1] - rank) // 2
    step, b, c = low.split([rank, states, states], dim=-1)
    return step, b.unsqueeze(2), c.unsqueeze(2)


class _Between(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *terms: Any) -> Tensor:
        y, *kept = _forward(*terms, keep=True)
        ctx.save_for_backward(*terms, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        projected, weight, bias, read, step_weight, step_bias, A_log, D, x, low, v, starts = ctx.saved_tensors
        of = ctx.needs_input_grad
        channels, rank = step_weight.shape
        step, b, c = _parts(low, rank)
        A = A_log.exp().neg_()
        grad_projected = projected.new_empty(projected.shape)
        entered, z = projected.chunk(2, dim=-1)
        grad_entered, grad_z = grad_projected.chunk(2, dim=-1)
        grad_x, grad_b, grad_c, _, grad_v, grad_A, grad_D = native._backward(
            *(x.unsqueeze(-1), b, c, v, A, D, starts, grad.unsqueeze(-1), None, False),
            bias=step_bias.contiguous(),
            z=z,
            grad_z=grad_z,
        )
        grad_low = torch.cat([grad_v @ step_weight, grad_b.squeeze(2), grad_c.squeeze(2)], dim=-1)
        grad_x, flat_low, flat_v = grad_x.view(-1, channels), grad_low.flatten(0, 1), grad_v.flatten(0, 1)
        grad_x.addmm_(flat_low, read)
        of_convolution = passes_native._convolved_back(entered, weight, bias, None, grad_x.view(x.shape), grad_entered)
        return (
            grad_projected,
            *of_convolution[:2],
            flat_low.T @ x.flatten(0, 1) if of[3] else None,
            flat_v.T @ step.flatten(0, 1) if of[4] else None,
            flat_v.sum(0) if of[5] else None,
            grad_A * A if of[6] else None,
            grad_D if of[7] else None,
        )
