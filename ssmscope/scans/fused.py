"""The scan with a decay per state by Triton kernels (`fused_kernels`), for float32 on a GPU; silent when absent.

The forward pass keeps the states before every `CHECK`-th step; the backward pass recomputes what lies between. Without
the kernels (`launching`) `diagonal.scan` stays with torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssmscope.scans import native
from ssmscope.scans.exponents import smallest_exponent
from ssmscope.scans.launching import Kernels, on

CHECK = 16  # steps; the states before them are what the backward pass needs
TILE = 256  # states of one program's tile at most, unless a single channel has more: 8 registers of each thread
FILL = 2048  # programs that keep a GPU busy: with fewer, tiles get smaller
MOST = 4096  # states of a channel; with more, torch is as fast


def applicable(x: Tensor, b: Tensor, c: Tensor, initial: Tensor, delta: Tensor, A: Tensor) -> bool:
    """Whether `scan` takes these terms: width 1, a decay per state, float32, on one GPU."""
    state = b.shape[3]
    if x.device.type != "cuda" or x.shape[3] != 1 or A.shape[-1] != state or not 1 <= state <= MOST:
        return False
    terms = (x, b, c, initial, delta, A)
    plain = all(t.device == x.device and native.is_plain(t, "cuda") for t in terms)
    return plain and not torch.compiler.is_compiling() and available(x.device)


def scan(
    x: Tensor, b: Tensor, c: Tensor, initial: Tensor, delta: Tensor, A: Tensor, *, expected: bool, retention: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `diagonal.scan`, where `applicable`; the same numbers in every run on the same kind of GPU."""
    terms = (x, b, c, initial, delta, A)
    if torch.is_grad_enabled() and any(t.requires_grad for t in terms):
        y, final, kept = _Scan.apply(*terms, expected, retention)
        return y, final, kept if retention else None
    y, final, kept, _ = _forward(*terms, expected, retention, keep=False)
    return y, final, kept


class _Plan(NamedTuple):
    """How a scan is cut into programs: `blocks` a group, each of `block` channels by `states` (a power of two)."""

    batch: int
    length: int
    heads: int
    groups: int
    state: int
    states: int
    block: int
    blocks: int
    warps: int

    @property
    def programs(self) -> int:
        return self.batch * self.groups * self.blocks

    @property
    def chunks(self) -> int:
        return -(-self.length // CHECK)

    def sizes(self, expected: bool) -> dict[str, Any]:
        """The constants that the kernels are compiled for."""
        sizes = {"N": self.state, "STATES": self.states, "BLOCK": self.block, "CHECK": CHECK, "num_warps": self.warps}
        return {**sizes, "FLOOR": smallest_exponent(torch.float32), "EXPECTED": expected}


def _plan(x: Tensor, b: Tensor) -> _Plan:
    batch, length, heads, _ = x.shape
    groups, state = b.shape[2:]
    share, states = heads // groups, 1 << max(state - 1, 0).bit_length()
    block = min(max(1, TILE // states), 1 << max(share - 1, 0).bit_length())
    while block > 1 and batch * groups * -(-share // block) < FILL:
        block //= 2
    warps = min(max(1, block * states // TILE), 8)
    return _Plan(batch, length, heads, groups, state, states, block, -(-share // block), warps)


def _forward(x, b, c, initial, delta, A, expected: bool, retention: bool, keep: bool):
    """y, the final state, the mean decays or None, and the states at the chunks' starts or None."""
    plan = _plan(x, b)
    initial, A = initial.contiguous(), A.contiguous()
    y = x.new_empty(x.shape)
    final = torch.empty_like(initial)
    starts = x.new_empty(plan.chunks, *initial.shape) if keep else None
    kept = x.new_empty(plan.blocks * plan.groups, *x.shape[:2]) if retention else None
    if plan.programs and plan.length:
        with on(x):
            kernels.loaded().forward[(plan.programs,)](
                *(x, delta, A, b, c, initial, y, final, y if starts is None else starts, y if kept is None else kept),
                *(initial.numel(), *plan[:4], *x.stride()[:3], *delta.stride(), *b.stride(), *c.stride()),
                **plan.sizes(expected),
                KEEP=keep,
                RETAIN=retention,
            )
    else:
        final.copy_(initial)
    return y, final, kept.sum(0) / A.numel() if kept is not None else None, starts


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b, c, initial, delta, A, expected, retention):
        y, final, kept, starts = _forward(x, b, c, initial, delta, A, expected, retention, keep=True)
        ctx.save_for_backward(x, b, c, delta, A, starts)
        ctx.expected = expected
        if kept is None:
            kept = x.new_empty(0)
        ctx.mark_non_differentiable(kept)
        return y, final, kept

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y, grad_final, _):
        x, b, c, delta, A, starts = ctx.saved_tensors
        plan = _plan(x, b)
        A, grad_final = A.contiguous(), grad_final.contiguous()
        grad_x, grad_delta = x.new_empty(x.shape), x.new_empty(delta.shape)
        if not plan.programs or not plan.length:
            zeros = (torch.zeros_like(t) for t in (b, c))
            return grad_x, *zeros, grad_final, grad_delta, torch.zeros_like(A), None, None
        grad_initial = torch.empty_like(grad_final)
        grad_A = x.new_empty(plan.batch, *A.shape)
        grad_b, grad_c = (x.new_empty(plan.blocks, *b.shape) for _ in range(2))
        before = x.new_empty(plan.programs, CHECK, plan.block, plan.states)
        with on(x):
            kernels.loaded().backward[(plan.programs,)](
                *(x, delta, A, b, c, grad_y, starts, grad_final),
                *(before, grad_x, grad_delta, grad_A, grad_b, grad_c, grad_initial),
                *(grad_final.numel(), *plan[:4], *x.stride()[:3], *delta.stride(), *b.stride(), *c.stride()),
                *grad_y.stride()[:3],
                **plan.sizes(ctx.expected),
            )
        return grad_x, grad_b.sum(0), grad_c.sum(0), grad_initial, grad_delta, grad_A.sum(0), None, None


kernels = Kernels(
    "ssmscope.scans.fused_kernels",
    "the Triton scan",
    lambda one: _forward(one, one, one, one, one[..., 0], one[0, 0], False, False, keep=False),
)
available, why_not = kernels.available, kernels.why_not
