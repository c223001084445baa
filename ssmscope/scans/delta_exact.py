"""The delta rule by Triton kernels (`delta_exact_kernels`) whose products have 22 bits; optional.

One kernel solves the triangular systems of all chunks side by side, one walks the chunks and keeps the state before
each, one reads all chunks; the adjoint is solved for and walked in the same way, back. Numbers in pairs of 16 bits take
so much room that a walk which also reads (`delta_fused`, for products of fewer bits) is slower. What is left of keys
comes from here at any precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ssmscope.scans.delta_plan import Plan, power, segments, sizes_of, whole
from ssmscope.scans.launching import Kernels, bound, compiled_ahead, on
from ssmscope.scans.scalar_fused import _columns

CUTS = {
    "solve": (64, 4, 1),
    "solve_back": (64, 4, 1),
    "carry": (32, 4, 3),
    "carry_back": (32, 4, 2),
    "read": (64, 4, 1),
    "back": (32, 8, 1),
}
"""Of each kernel the columns of a head that a program takes at a time, its warps, and how many loads are under way."""


def keys_left(log_a: Tensor, beta: Tensor, b: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """As `delta.keys_left`, where `delta_fused.applicable`: ū of an adjoint that is I at the end."""
    state = b.shape[-1]
    P = torch.eye(state, device=b.device).expand(b.shape[0], beta.shape[2], -1, -1)
    for part in reversed(segments(beta)):
        terms = whole(log_a[:, part]), whole(beta[:, part]), _columns(b[:, part])
        with on(b):
            keys, _, P = _Plan(*sizes_of(*terms, state)).back(*terms, P)
        yield part, keys


class _Plan(Plan):
    @property
    def shape(self) -> tuple[int, ...]:
        return self.length, self.heads, self.groups, self.chunks

    def sizes(self, kernel: str) -> dict[str, Any]:
        """The constants that a kernel is compiled for."""
        columns, warps, stages = CUTS[kernel]
        tiles = {"P": self.width, "N": self.state, "STATES": power(self.state), "Q": self.steps}
        # Two warps have no wgmma, which in Triton 3.6 takes wrong rows where a product of 64 columns enters one of
        # fewer; `carry` and `back` have none that does where there are 64 states.
        if tiles["STATES"] < 64 or power(self.width) < columns:
            warps = 2
        columns = min(power(self.width), columns)
        how = {"BY_STATE": self.by_state, "EVEN": self.length % self.steps == 0}
        return {**tiles, **how, "WIDTH": columns, "num_warps": warps, "num_stages": stages}

    def sides(self, like: Tensor, count: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """So many matrices of chunks in parts, their units, and room for the chunks' decays."""
        each, parts = (self.batch, self.chunks, self.heads), (2, self.steps, self.state)
        matrices = [like.new_empty(*each, *parts, dtype=torch.float16) for _ in range(count)]
        units = like.new_empty(count, *each, dtype=torch.float32)
        return matrices, units, units.new_empty(*each, self.state if self.by_state else 1)

    def forward(
        self, log_a: Tensor, beta: Tensor, b: Tensor, x: Tensor, initial: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """r of every step, the states before chunks, and the last."""
        (W, E), units, D = self.sides(b, 2)
        U = self.rows(b, self.width, torch.float32)
        strides = (*b.stride()[:3], *x.stride()[:3])
        bound(kernels.loaded().solve, **self.sizes("solve"))(
            self.programs, log_a, beta, b, x, W, E, units, U, D, *self.shape, *strides
        )
        return U, *self.carry([W, E], units, U, D, None, initial, keep=True)

    def back(
        self,
        log_a: Tensor,
        beta: Tensor,
        b: Tensor,
        last: Tensor,
        c: Tensor | None = None,
        grad_y: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """ū of every step, the adjoints after chunks, and the one before the first; without c and `grad_y` nothing
        is read."""
        reads = c is not None and grad_y is not None
        sides, units, D = self.sides(b, 3 if reads else 2)
        U = self.rows(b, self.width, torch.float32)
        U = U if reads else U.zero_()
        c, grad_y = (b, U) if c is None or grad_y is None else (c, grad_y)
        bound(kernels.loaded().solve_back, **self.sizes("solve_back"), READ=reads)(
            self.programs,
            *(log_a, beta, b, c, grad_y, *sides[:2], sides[-1], units, U, D),
            *(*self.shape, *b.stride()[:3], *c.stride()[:3], *grad_y.stride()[:3]),
        )
        return U, *self.carry(sides, units, U, D, grad_y if reads else None, last, keep=reads, reverse=True)

    def carry(
        self,
        sides: list[Tensor],
        units: Tensor,
        U: Tensor,
        D: Tensor,
        read: Tensor | None,
        first: Tensor,
        *,
        keep: bool,
        reverse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The states before chunks and the last one, and r in place of U."""
        states = U.new_empty((self.batch, self.chunks, self.heads, self.state, self.width) if keep else (1,))
        first = whole(first)
        last = torch.empty_like(first)
        sizes = self.sizes("carry" if read is None else "carry_back")
        programs = self.batch * self.heads * -(-self.width // sizes["WIDTH"])
        y = U if read is None else read
        bound(kernels.loaded().carry, **sizes, REVERSE=reverse, READ=read is not None, KEEP=keep)(
            (programs,),
            *(*sides[:2], sides[-1], units, U, D, y, first, states, last),
            *(self.batch, self.length, self.heads, self.chunks, *y.stride()[:3]),
        )
        return states, last


class Scan(torch.autograd.Function):
    """As `delta.scan`, of one segment; b and c may be those of groups."""

    @staticmethod
    def forward(ctx, log_a, beta, b, c, x, initial) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        plan = _Plan(*sizes_of(log_a, beta, b, x.shape[-1]))
        ctx.save_for_backward(log_a, beta, b, c, x, initial)
        log_a, beta, b, c, x = whole(log_a), whole(beta), *map(_columns, (b, c, x))
        y = x.new_empty(x.shape)

        def run() -> Tensor:
            U, states, final = plan.forward(log_a, beta, b, x, initial)
            bound(kernels.loaded().read, **plan.sizes("read"))(
                plan.programs, log_a, beta, b, c, U, states, y, *plan.shape, *b.stride()[:3], *c.stride()[:3]
            )
            return final

        with on(x):
            compiled_ahead((plan, "forward"), run)
            final = run()
        return y, final.to(initial.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        terms = ctx.saved_tensors
        log_a, beta, b, c, x, initial = terms
        plan = _Plan(*sizes_of(log_a, beta, b, x.shape[-1]))
        log_a, beta, b, c, x = whole(log_a), whole(beta), *map(_columns, (b, c, x))
        grad_y = torch.zeros_like(x) if grad_y is None else _columns(grad_y)
        grad_final = torch.zeros_like(initial) if grad_final is None else grad_final
        grad_a, grad_beta = torch.empty_like(log_a), torch.empty_like(beta)
        grad_b, grad_c = (plan.rows(b, plan.state, torch.float32) for _ in "bc")

        def run() -> tuple[Tensor, Tensor]:
            U, states, _ = plan.forward(log_a, beta, b, x, initial)
            grad_x, adjoints, grad_initial = plan.back(log_a, beta, b, grad_final, c, grad_y)
            bound(kernels.loaded().back, **plan.sizes("back"))(
                plan.programs,
                *(log_a, beta, b, c, grad_y, U, grad_x, states, adjoints, grad_a, grad_beta, grad_b, grad_c),
                *(*plan.shape, *b.stride()[:3], *c.stride()[:3], *grad_y.stride()[:3]),
            )
            return grad_x, grad_initial

        with on(x):
            compiled_ahead((plan, "backward"), run)
            grad_x, grad_initial = run()
        grad_b, grad_c = (g.unflatten(2, (plan.groups, -1)).sum(3) for g in (grad_b, grad_c))
        found = (grad_a, grad_beta, grad_b, grad_c, grad_x, grad_initial)
        return tuple(g.to(t.dtype) for g, t in zip(found, terms, strict=True))


kernels = Kernels(
    "ssmscope.scans.delta_exact_kernels",
    "the exact Triton delta rule",
    lambda one: Scan.apply(one, one[..., 0], one, one, one, one),
)
