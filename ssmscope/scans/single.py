"""The scan of states that are single numbers, in two levels of chunks (RWKV, whose channels keep one number each).

A chunk is as long as there are chunks, √length. All chunks walk their steps at once, from zero; then one pass over the
chunks carries the state from each to the next. That is 2 √length short operations, and nothing is kept for the backward
pass but decays and states: the adjoint λ_t = ȳ_t + a_{t+1} λ_{t+1} is the same scan in reversed time.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from ssmscope.scans.exponents import smallest_exponent


def scan(
    log_a: Float[Tensor, "batch length heads"],
    written: Float[Tensor, "batch length heads width"],
    initial: Float[Tensor, "batch heads width"],
) -> Float[Tensor, "batch length heads width"]:
    """H_t for all t of H_t = a_t H_{t-1} + written_t, differentiable in every term."""
    if written.shape[1] == 0:
        return torch.zeros_like(written)
    return _Scan.apply(log_a.unsqueeze(-1), written, initial)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_a: Tensor, written: Tensor, initial: Tensor) -> Tensor:
        states = _states(log_a, written, initial)
        ctx.save_for_backward(log_a, states, initial)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_a, states, initial = ctx.saved_tensors
        following = pad(log_a[:, 1:], (0, 0, 0, 0, 0, 1))  # a_{t+1}; the last acts on nothing
        adjoint = _states(following.flip(1), grad.flip(1), torch.zeros_like(initial)).flip(1)
        a = log_a.clamp(min=smallest_exponent(states.dtype)).exp()
        before = torch.cat([initial.unsqueeze(1), states[:, :-1]], dim=1)
        grad_log_a = (adjoint * before).sum(-1, keepdim=True) * a
        return grad_log_a, adjoint, a[:, 0] * adjoint[:, 0]


def _states(log_a: Tensor, written: Tensor, initial: Tensor) -> Tensor:
    length, floor = written.shape[1], smallest_exponent(written.dtype)
    chunk = max(1, math.isqrt(length))
    missing = -length % chunk  # steps with decay 1 that write nothing
    log_a, H = (pad(t, (0, 0, 0, 0, 0, missing)) for t in (log_a, written))
    log_a, H = (rearrange(t, "b (k q) h p -> q b k h p", q=chunk).contiguous() for t in (log_a, H))
    a = log_a.clamp(min=floor).exp()
    for step in range(1, chunk):
        H[step].addcmul_(a[step], H[step - 1])
    from_start = log_a.cumsum(0).clamp(min=floor).exp()
    carried, before = initial, []
    for written_by_chunk, kept in zip(H[-1].unbind(1), from_start[-1].unbind(1)):
        before.append(carried)
        carried = torch.addcmul(written_by_chunk, kept, carried)
    H.addcmul_(from_start, torch.stack(before, dim=1))
    return rearrange(H, "q b k h p -> b (k q) h p")[:, :length]
