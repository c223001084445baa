"""The scan with one decay per head by Triton kernels (`scalar_fused_kernels`), for float32 on a GPU; optional.

A kernel walks the chunks and keeps the state before each; another reads all chunks side by side; the backward pass does
the same with the adjoint. Without the kernels (`launching`) `scalar.scan` stays with torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ssmscope.scans import native
from ssmscope.scans.exponents import smallest_exponent
from ssmscope.scans.launching import Kernels, on

FILL = 256  # programs that keep a GPU busy: with fewer, the heads of a group are divided among several
MOST = 256  # of P and of N: with more, a program's tiles no longer fit
STEPS = 32  # of a chunk
COLUMNS = 32  # of heads whose states a program takes at once


def applicable(log_a: Tensor, b: Tensor, c: Tensor, x: Tensor, initial: Tensor) -> bool:
    """Whether `scan` takes these terms: float32, on one GPU, with heads and states of a size that fits."""
    width, state = initial.shape[2:]
    if x.device.type != "cuda" or not x.numel() or not 1 <= state <= MOST or not 1 <= width <= MOST:
        return False
    terms = (log_a, b, c, x, initial)
    plain = all(t.device == x.device and native.is_plain(t, "cuda") for t in terms)
    return plain and not torch.compiler.is_compiling() and available(x.device)


def scan(log_a: Tensor, b: Tensor, c: Tensor, x: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """As `scalar.scan`, where `applicable`; the same numbers in every run on the same kind of GPU."""
    return _Scan.apply(log_a, b, c, x, initial)


class _Plan(NamedTuple):
    """How a scan is cut: chunks of Q steps; `blocks` programs that share the heads of a group."""

    batch: int
    length: int
    heads: int
    groups: int
    width: int
    state: int
    steps: int
    blocks: int

    @property
    def chunks(self) -> int:
        return -(-self.length // self.steps)

    @property
    def programs(self) -> int:
        """Of the kernels that work on all chunks side by side."""
        return self.batch * self.chunks * self.groups * self.blocks

    def sizes(self, width: int | None = None) -> dict[str, Any]:
        """The constants that the kernels are compiled for; tiles are powers of two, of at least 16."""
        tiles = {"WIDTH": width or _power(self.width, 16), "STATES": _power(self.state, 16), "Q": self.steps}
        warps = 2 if tiles["WIDTH"] * tiles["STATES"] <= 2048 else 4
        floor = smallest_exponent(torch.float32)
        return {"P": self.width, "N": self.state, **tiles, "FLOOR": floor, "num_warps": warps, "num_stages": 1}

    def side_by_side(self) -> dict[str, Any]:
        """Also those of the heads that a program takes at once."""
        part = _power(self.width)
        return {**self.sizes(), "PART": part, "HEADS": max(16 // part, min(4, COLUMNS // part), 1)}

    def sums(self, log_a: Tensor) -> Tensor:
        """S, (batch, chunks · Q, heads) float64: the sum of the log-decays from the start of a step's chunk."""
        whole = pad(log_a.double(), (0, 0, 0, self.chunks * self.steps - self.length))
        return whole.unflatten(1, (self.chunks, self.steps)).cumsum(2).flatten(1, 2).contiguous()


def _power(size: int, least: int = 1) -> int:
    return max(least, 1 << (size - 1).bit_length())


def _plan(x: Tensor, b: Tensor) -> _Plan:
    batch, length, heads, width = x.shape
    groups, state = b.shape[2:]
    share = heads // groups
    blocks, side_by_side = 1, batch * -(-length // STEPS) * groups
    while blocks < share and side_by_side * blocks < FILL:
        blocks = next(more for more in range(blocks + 1, share + 1) if share % more == 0)
    return _Plan(batch, length, heads, groups, width, state, STEPS, blocks)


def _carry(plan: _Plan, S: Tensor, left: Tensor, right: Tensor, first: Tensor, reverse: bool) -> tuple[Tensor, ...]:
    """The states before the chunks and the last one, or their adjoints."""
    states = first.new_empty(plan.batch, plan.heads, plan.chunks, plan.width, plan.state)
    first, last = first.contiguous(), first.new_empty(first.shape)
    width = 16 if plan.batch * plan.heads < FILL else min(_power(plan.width, 16), 64)
    programs = plan.batch * plan.heads * -(-plan.width // width)
    kernels.loaded().carry[(programs,)](
        *(S, left, right, first, states, last),
        *(plan.length, plan.heads, plan.groups),
        *(*left.stride(), *right.stride()),
        **plan.sizes(width),
        REVERSE=reverse,
    )
    return states, last


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_a: Tensor, b: Tensor, c: Tensor, x: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        plan = _plan(x, b)
        with on(x):
            S = plan.sums(log_a)
            states, final = _carry(plan, S, x, b, initial, False)
            y = x.new_empty(x.shape)
            kernels.loaded().read[(plan.programs,)](
                *(S, x, b, c, states, y),
                *(plan.length, plan.heads, plan.groups, plan.blocks),
                *(*x.stride(), *b.stride(), *c.stride()),
                **plan.side_by_side(),
            )
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(S, b, c, x, states)
        return y, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y: Tensor, grad_final: Tensor) -> tuple[Tensor, ...]:
        S, b, c, x, states = ctx.saved_tensors
        plan = _plan(x, b)
        with on(x):
            adjoints, grad_initial = _carry(plan, S, grad_y, c, grad_final, True)
            steps = (plan.batch, plan.chunks, plan.steps, plan.heads)
            through, read_by, written = (x.new_empty(steps) for _ in range(3))
            met, grad_x = x.new_empty(plan.batch, plan.chunks, 1, plan.heads), x.new_empty(x.shape)
            grad_b, grad_c = (x.new_empty(plan.blocks, *b.shape) for _ in range(2))
            shape = (plan.batch, plan.length, plan.heads, plan.groups, plan.blocks)
            sizes, programs = plan.side_by_side(), (plan.programs,)
            kernels.loaded().back_within[programs](
                *(S, x, b, c, grad_y, through, grad_x, grad_b, grad_c, *shape),
                *(*x.stride(), *b.stride(), *c.stride(), *grad_y.stride()),
                **sizes,
            )
            kernels.loaded().back_across[programs](
                *(S, x, b, adjoints, states, written, met, grad_x, grad_b, *shape, *x.stride(), *b.stride()),
                **sizes,
                ADJOINT=True,
            )
            kernels.loaded().back_across[programs](
                *(S, grad_y, c, states, states, read_by, met, grad_x, grad_c, *shape, *grad_y.stride(), *c.stride()),
                **sizes,
                ADJOINT=False,
            )
        # through step r goes what is read at r or later of the state before, and what was written earlier of the
        # adjoint after; a sum without differences: however small it is, its digits are right
        read_later = read_by.flip(2).cumsum(2).flip(2)
        written_earlier = pad(written[:, :, :-1], (0, 0, 1, 0)).cumsum(2)
        grad_log_a = (through + read_later + written_earlier + met).flatten(1, 2)[:, : plan.length]
        grad_b, grad_c = (g.squeeze(0) if plan.blocks == 1 else g.sum(0) for g in (grad_b, grad_c))
        return grad_log_a, grad_b, grad_c, grad_x, grad_initial


kernels = Kernels(
    "ssmscope.scans.scalar_fused_kernels", "the Triton scan", lambda one: scan(one[..., 0], one, one, one, one)
)
available, why_not = kernels.available, kernels.why_not
