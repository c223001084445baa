"""Attention of a GroupMamba's module to the states of its group (GroupMamba, Eqs. 7 to 9); see `groupmamba`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ssmscope.architectures.read.parts import at_least_float32
from ssmscope.core.trace import LayerTrace
from ssmscope.ops import Recurrence

MAX_CPU_STATE_NUMBERS, MAX_STATE_NUMBERS = 2**18, 2**24
"""Numbers of a module's states in memory at a time: on a CPU as many as fit in its cache."""


def all_states(
    recurrence: Recurrence, initial: Float[Tensor, "batch heads width state"] | None = None
) -> Float[Tensor, "batch length heads width state"]:
    """Compute H_t at every position by doubling: pass i makes every H_t the sum of the last 2ⁱ writes, decayed.

    That takes log₂(length) passes over all of the states, and only multiplies decays, so that nothing overflows.
    """
    b = recurrence.b.repeat_interleave(recurrence.shape[2] // recurrence.b.shape[2], dim=2)
    H = einsum(recurrence.written, b, "batch t head width, batch t head n -> batch t head width n")
    a = recurrence.log_decay().exp().unsqueeze(3)
    if initial is not None:
        H = torch.cat([H[:, :1] + a[:, :1] * initial.unsqueeze(1), H[:, 1:]], dim=1)
    step, length = 1, H.shape[1]
    while step < length:
        H = torch.cat([H[:, :step], H[:, step:] + a[:, step:] * H[:, :-step]], dim=1)
        a = torch.cat([a[:, :step], a[:, step:] * a[:, :-step]], dim=1)
        step *= 2
    return H


class Attended(NamedTuple):
    """Attention of every channel: `weights`, the α_j, and `reads`, the C^l W_V h^j, both (batch, length, heads, width,
    modules), the module itself first, then the modules before it in their order."""

    weights: Tensor
    reads: Tensor


def _attend_chunk(recurrences: tuple[Recurrence, ...], initial: tuple[Tensor, ...], metric: Tensor):
    states = torch.stack([all_states(r, H) for r, H in zip(recurrences, initial)])
    read = recurrences[0].c.repeat_interleave(states.shape[3] // recurrences[0].c.shape[2], dim=2)
    query = einsum(states[0], metric, "batch t head width m, m n -> batch t head width n")
    scores = einsum(query, states, "batch t head width n, j batch t head width n -> batch t head width j")
    reads = einsum(read, states, "batch t head n, j batch t head width n -> batch t head width j")
    return scores.softmax(-1), reads, states[:, :, -1]


def attend(mixer: nn.Module, layer: GroupTrace) -> Attended:
    """Return a layer's attention to its own and the borrowed states (GroupMamba, Eq. 7), differentiable.

    States are computed in chunks of time, and again for the backward pass: those of a long text are never all in
    memory.
    """
    W_Q, W_K = (at_least_float32(W) for W in (mixer.attention.W_Q, mixer.attention.W_K))
    metric = einsum(W_Q, W_K, "i m, i n -> m n") / W_Q.shape[0] ** 0.5  # qᵀ W_K h / √N = h^lᵀ metric h
    recurrences = (layer.recurrence, *layer.borrowed)
    batch, length, heads, width, state = layer.recurrence.shape
    zero = layer.recurrence.x.new_zeros(batch, heads, width, state)
    H = tuple(zero if start is None else start for start in initial_states(layer))
    limit = MAX_CPU_STATE_NUMBERS if zero.device.type == "cpu" else MAX_STATE_NUMBERS
    step = max(1, limit // (batch * heads * width * state))
    parts = []
    for start in range(0, length, step):
        chunk = tuple(r.between(start, start + step) for r in recurrences)
        if torch.is_grad_enabled():
            weights, reads, last = checkpoint(
                _attend_chunk, chunk, H, metric, use_reentrant=False, preserve_rng_state=False
            )
        else:
            weights, reads, last = _attend_chunk(chunk, H, metric)
        H = tuple(last.unbind(0))
        parts.append((weights, reads))
    return Attended(*(torch.cat(part, dim=1) for part in zip(*parts)))


class StateAttention(nn.Module):
    """Matrices W_Q, W_K, W_V (state, state) of a module; the first module attends to no other and has only W_V."""

    def __init__(self, state: int, first: bool) -> None:
        super().__init__()
        self.W_Q = None if first else nn.Parameter(torch.empty(state, state))
        self.W_K = None if first else nn.Parameter(torch.empty(state, state))
        self.W_V = nn.Parameter(torch.empty(state, state))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set W_V to the identity, and draw W_Q and W_K, so that states are averaged with random weights."""
        for W in (self.W_Q, self.W_K):
            if W is not None:
                nn.init.normal_(W, std=W.shape[0] ** -0.5)
        nn.init.eye_(self.W_V)


@dataclass(frozen=True, eq=False)
class GroupTrace(LayerTrace):
    """Trace of a layer that also reads the states of the modules before it.

    `u` (batch, length, modules · width) are the inputs of those modules and, last, its own. `recurrence` is the layer's
    own, and so is its retention; the `borrowed` recurrences are those of the modules before it, in their order, with
    their states before the first position (None for zero) and their own traces in `before`. All are read by this
    layer's W_Vᵀ C.
    """

    borrowed: tuple[Recurrence, ...] = ()
    borrowed_initial: tuple[Tensor | None, ...] = ()
    before: tuple[LayerTrace, ...] = ()


def initial_states(layer: GroupTrace) -> tuple[Tensor | None, ...]:
    """Return the states before the first position of a layer's own recurrence and of the borrowed ones."""
    return (None if layer.initial is None else layer.initial[0], *layer.borrowed_initial)
