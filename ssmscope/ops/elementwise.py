"""Scan of states that are numbers, each with its own decay: H_t = a_t ⊙ H_{t-1} + written_t.

In one chunk the steps are walked one after the other. In several, all chunks walk their steps at once, from zero; then
one pass over the chunks carries the state from each to the next. With √length chunks that is 2 √length operations,
which a GPU needs; a CPU is faster without the second pass over the states. Nothing is kept for the backward pass but
decays and states: the adjoint λ_t = ȳ_t + a_{t+1} λ_{t+1} is the same scan in reversed time.
"""

from __future__ import annotations

import math

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from ssmscope.ops.recurrence import smallest_exponent


def scan(
    log_a: Float[Tensor, "batch length heads #n"],
    written: Float[Tensor, "batch length heads n"],
    initial: Float[Tensor, "batch heads n"],
    chunks: int | None = None,
) -> Float[Tensor, "batch length heads n"]:
    """Return H_t for all t, differentiable in every term; in √length chunks where `chunks` is None."""
    length = written.shape[1]
    if length == 0:
        return torch.zeros_like(written)
    return _Scan.apply(log_a, written, initial, math.isqrt(length) if chunks is None else min(chunks, length))


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_a: Tensor, written: Tensor, initial: Tensor, chunks: int) -> Tensor:
        states = _states(log_a, written, initial, chunks)
        ctx.save_for_backward(log_a, states, initial)
        ctx.chunks = chunks
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        log_a, states, initial = ctx.saved_tensors
        following = pad(log_a[:, 1:], (0, 0, 0, 0, 0, 1))  # This is a_{t+1}; the last acts on nothing.
        adjoint = _states(following.flip(1), grad.flip(1), torch.zeros_like(initial), ctx.chunks).flip(1)
        a = log_a.clamp(min=smallest_exponent(states.dtype)).exp()
        before = torch.cat([initial.unsqueeze(1), states[:, :-1]], dim=1)
        grad_log_a = adjoint * before
        grad_log_a = grad_log_a.sum(-1, keepdim=True) if log_a.shape[-1] < grad_log_a.shape[-1] else grad_log_a
        return grad_log_a * a, adjoint, a[:, 0] * adjoint[:, 0], None


def _states(log_a: Tensor, written: Tensor, initial: Tensor, chunks: int) -> Tensor:
    length, floor = written.shape[1], smallest_exponent(written.dtype)
    steps = -(-length // chunks)
    missing = -length % steps  # Added steps have decay 1 and write nothing.
    log_a, H = (pad(t, (0, 0, 0, 0, 0, missing)) for t in (log_a, written))
    log_a, H = (rearrange(t, "b (k q) h n -> q b k h n", q=steps) for t in (log_a, H))
    a, H = log_a.clamp(min=floor).exp(), H.clone(memory_format=torch.contiguous_format)
    if H.shape[2] == 1:
        H[0].addcmul_(a[0], initial.unsqueeze(1))
    for step in range(1, steps):
        H[step].addcmul_(a[step], H[step - 1])
    if H.shape[2] > 1:
        from_start = log_a.cumsum(0).clamp(min=floor).exp()
        carried, before = initial, []
        for written_by_chunk, kept in zip(H[-1].unbind(1), from_start[-1].unbind(1)):
            before.append(carried)
            carried = torch.addcmul(written_by_chunk, kept, carried)
        H.addcmul_(from_start, torch.stack(before, dim=1))
    return rearrange(H, "q b k h n -> b (k q) h n")[:, :length]
