"""Scan with a decay per state and heads of width 1 (Mamba, Gu & Dao 2023, Algorithm 2).

The states of all steps would take `state` times the room of the input, so some steps are held at a time, and walked
again in the backward pass.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from ssmscope import backends
from ssmscope.backends.shapes import ChannelMemory, Channels, Inputs, Memory
from ssmscope.ops.recurrence import Recurrence, by_head, checkpointed, smallest_exponent
from ssmscope.ops.recurrence import retention as mean_decay

MAX_NUMBERS_HELD = {"cpu": 2**19, "cuda": 2**26}
"""Numbers of all states and steps held at once: as many as a CPU's cache holds, or keep a GPU busy."""
MAX_WALKED_STATE = 128
"""Numbers per channel up to which a CPU walks the states of heads with one decay."""


def scan(
    r: Recurrence, initial: ChannelMemory | None, *, retention: bool
) -> tuple[Channels, ChannelMemory, Tensor | None]:
    """Return outputs without the skip, the final state and, with `retention`, the mean decay of every step."""
    if r.log_a is None:
        terms = (r.x, r.b, r.c, initial, r.delta, r.A)
        if backend := backends.find("selective_scan", *terms):
            return backend.scan(*terms, expected=r.expected, retention=retention)
    batch, length, heads, _, state = r.shape
    H = r.x.new_zeros(batch, heads, state) if initial is None else initial.squeeze(2)
    device = r.x.device.type
    step = max(1, MAX_NUMBERS_HELD.get(device, MAX_NUMBERS_HELD["cuda"]) // max(1, batch * heads * state))
    run = partial(_segment, chunks=1 if device == "cpu" else None)
    if torch.is_grad_enabled() and step < length:
        run = partial(checkpointed, run)
    outputs = [r.x[:, :0]]
    for start in range(0, length, step):
        y, H = run(r.between(start, start + step), H)
        outputs.append(y)
    return torch.cat(outputs, dim=1), H.unsqueeze(2), mean_decay(r).detach() if retention else None


def walks_channels(r: Recurrence) -> bool:
    """Return True if a CPU should walk these heads with one decay by the kernel of width 1, every channel a head of its
    own: with small states that is faster than products over chunks."""
    small = r.shape[4] <= MAX_WALKED_STATE
    return small and r.A is not None and not r.expected and r.x.dtype is torch.float32 and r.x.device.type == "cpu"


def scan_channels(r: Recurrence, initial: Memory | None) -> tuple[Inputs, Memory] | None:
    """Return outputs without the skip and the final state, or None where no kernel serves the terms."""
    batch, length, heads, width, state = r.shape
    assert r.delta is not None and r.A is not None
    H = None if initial is None else initial.reshape(batch, heads * width, 1, state)
    x, delta, A = r.x.reshape(batch, length, heads * width, 1), r.delta, r.A.expand(-1, state)
    if width > 1:
        delta, A = delta.repeat_interleave(width, dim=2), A.repeat_interleave(width, dim=0)
    terms = (x, r.b, r.c, H, delta, A)
    if backend := backends.find("selective_scan", *terms):
        y, final, _ = backend.scan(*terms, expected=False, retention=False)
        return y.view(r.x.shape), final.view(batch, heads, width, state)
    return None


def _segment(r: Recurrence, H: Tensor, *, chunks: int | None) -> tuple[Tensor, Tensor]:
    """Return outputs and the last state of some steps that start from H (batch, heads, state)."""
    heads = r.shape[2]
    states = scan_numbers(r.log_decay(), r.written * by_head(r.b, heads), H, chunks)
    y = einsum(states, by_head(r.c, heads), "b t h n, b t h n -> b t h").unsqueeze(-1)
    return y, states[:, -1]


# ---- states that are numbers, each with its own decay: H_t = a_t ⊙ H_{t-1} + written_t
#
# In one chunk the steps are walked one after the other. In several, all chunks walk their steps at once, from zero;
# then a pass over the chunks carries the state from each to the next. With √length chunks that is 2 √length operations,
# as a GPU needs; a CPU is faster without the second pass over the states. Nothing is kept for the backward pass but
# decays and states: the adjoint λ_t = ȳ_t + a_{t+1} λ_{t+1} is the same scan in reversed time.


def scan_numbers(
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
