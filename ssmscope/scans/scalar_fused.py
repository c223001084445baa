"""The scan with one decay per head by Triton kernels (`scalar_fused_kernels`), for float32 on a GPU; optional.

A kernel walks the chunks and keeps the state before each; another reads all chunks side by side; the backward pass
makes the states anew and does the same with the adjoint. Products have the precision of torch's own matrix products,
`torch.get_float32_matmul_precision()`: "highest", the default, has float32's digits (operands in three parts of
bfloat16), "high" 16 bits (two parts), "medium" the 8 bits of bfloat16, in which chunks' states are then kept too; sums
are float32 throughout. Without the kernels (`launching`) `scalar.scan` stays with torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssmscope.scans import native
from ssmscope.scans.exponents import smallest_exponent
from ssmscope.scans.launching import Kernels, on

FILL = 1024  # programs that keep a GPU busy: with fewer, the heads of a group are divided among several
MOST = 256  # of N: with more, a program's tiles no longer fit
STEPS = 64  # of a chunk
FLOOR = smallest_exponent(torch.float32) * 1.4426950408889634  # decays are powers of 2 in the kernels
FARTHEST = 1 << 24  # from one step to the next in memory: offsets within a chunk have 32 bits


class _Precision(NamedTuple):
    """How products are made, what states are kept in, and how many chunks `carry` and heads `read` load ahead."""

    products: str
    terms: int
    states: torch.dtype
    carry: int
    read: int


PRECISIONS = {
    "highest": _Precision("bf16x6", 3, torch.float32, carry=2, read=2),
    "high": _Precision("bf16x3", 2, torch.float32, carry=3, read=1),
    "medium": _Precision("bf16", 1, torch.bfloat16, carry=2, read=1),
}


def applicable(log_a: Tensor, b: Tensor, c: Tensor, x: Tensor, initial: Tensor, delta: Tensor | None = None) -> bool:
    """Whether `scan` takes these terms: float32, on one GPU, with states of a size that fits."""
    if x.device.type != "cuda" or not x.numel() or not 1 <= initial.shape[3] <= MOST:
        return False
    terms = [t for t in (log_a, b, c, x, initial, delta) if t is not None]
    plain = all(t.device == x.device and native.is_plain(t, "cuda") for t in terms)
    return plain and not torch.compiler.is_compiling() and available(x.device)


def scan(
    log_a: Tensor, b: Tensor, c: Tensor, x: Tensor, initial: Tensor, delta: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """As `scalar.scan`, where `applicable`; the same numbers in every run on the same kind of GPU."""
    return _Scan.apply(log_a, b, c, x, initial, delta, torch.get_float32_matmul_precision())


class _Plan(NamedTuple):
    """How a scan is cut: chunks of `STEPS`, heads into parts of at most 64 of their width, of which `blocks` programs
    share those of a group."""

    batch: int
    length: int
    heads: int
    groups: int
    width: int
    state: int
    weighted: bool
    precision: _Precision

    @property
    def chunks(self) -> int:
        return -(-self.length // STEPS)

    @property
    def part(self) -> int:
        """Columns of a tile of a head, a power of two of at least 16."""
        return min(_power(self.width, 16), 64)

    @property
    def parts(self) -> int:
        return -(-self.width // self.part)

    @property
    def blocks(self) -> int:
        side_by_side = self.batch * self.chunks * self.groups
        return min(-(-FILL // side_by_side), self.heads // self.groups * self.parts)

    @property
    def programs(self) -> int:
        """Of the kernels that work on all chunks side by side."""
        return self.batch * self.chunks * self.groups * self.blocks

    @property
    def shape(self) -> tuple[int, ...]:
        return self.length, self.heads, self.groups, self.chunks

    def sizes(self) -> dict[str, Any]:
        """The constants that kernels are compiled for."""
        tiles = {"P": self.width, "N": self.state, "WIDTH": self.part, "STATES": _power(self.state, 16), "Q": STEPS}
        how = {"FLOOR": FLOOR, "WEIGHTED": self.weighted, "EVEN": self.length % STEPS == 0}
        # Two warps have no wgmma, which in Triton 3.6 takes wrong rows where a product of STEPS columns enters one of
        # fewer.
        warps = 2 if min(self.part, tiles["STATES"]) < STEPS else 4
        return {**tiles, **how, "PRECISION": self.precision.products, "num_warps": warps}

    def sums(self, log_a: Tensor, delta: Tensor | None) -> Tensor:
        S = log_a.new_empty(self.batch, self.chunks, self.heads, 2 if delta is None else 3, STEPS)
        heads, weights = min(_power(self.heads), 16), log_a if delta is None else delta
        kernels.loaded().sums[(self.batch * self.chunks * -(-self.heads // heads),)](
            *(log_a, weights, S, self.length, self.heads, self.chunks, *log_a.stride(), *weights.stride()),
            **{"Q": STEPS, "HEADS": heads, "WEIGHTED": self.weighted, "num_warps": 4},
        )
        return S

    def carry(
        self, S: Tensor, left: Tensor, right: Tensor, first: Tensor | None, reverse: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The states before the chunks and the last one, or their adjoints; from 0 without a `first`."""
        matrices = (self.heads, self.width, self.state)
        states = S.new_empty(self.batch, self.chunks, *matrices, dtype=self.precision.states)
        last = S.new_empty(self.batch, *matrices)
        sizes = self.sizes()
        sizes["STATES"] = min(sizes["STATES"], 64)
        programs = self.batch * self.heads * self.parts * -(-self.state // sizes["STATES"])
        kernels.loaded().carry[(programs,)](
            *(S, left, right, last if first is None else first.contiguous(), states, last, *self.shape),
            *(*left.stride()[:3], *right.stride()[:3]),
            **sizes,
            STAGES=self.precision.carry,
            REVERSE=reverse,
            FIRST=first is not None,
        )
        return states, last

    def by_step(self, parts: Tensor) -> Tensor:
        """(batch, chunks, heads, parts, Q) as (batch, length, heads)."""
        whole = parts.squeeze(3) if self.parts == 1 else parts.sum(3)
        return whole.transpose(2, 3).flatten(1, 2)[:, : self.length]


def _power(size: int, least: int = 1) -> int:
    return max(least, 1 << (size - 1).bit_length())


def _plan(x: Tensor, b: Tensor, delta: Tensor | None, precision: str) -> _Plan:
    batch, length, heads, width = x.shape
    groups, state = b.shape[2:]
    return _Plan(batch, length, heads, groups, width, state, delta is not None, PRECISIONS[precision])


def _columns(t: Tensor) -> Tensor:
    """The term with its last dimension side by side."""
    return t if t.stride(-1) == 1 and t.stride(1) < FARTHEST else t.contiguous()


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_a, b, c, x, initial, delta, precision) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        plan = _plan(x, b, delta, precision)
        b, c, x = map(_columns, (b, c, x))
        y = x.new_empty(x.shape)
        with on(x):
            S = plan.sums(log_a, delta)
            states, final = plan.carry(S, x, b, initial)
            kernels.loaded().read[(plan.programs,)](
                *(S, x, b, c, states, y, *plan.shape, plan.blocks),
                *(*x.stride()[:3], *b.stride()[:3], *c.stride()[:3]),
                **plan.sizes(),
                STAGES=plan.precision.read if plan.state <= 128 else 1,
            )
        ctx.save_for_backward(log_a, b, c, x, initial, delta)
        ctx.precision = precision
        return y, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        log_a, b, c, x, initial, delta = ctx.saved_tensors
        plan = _plan(x, b, delta, ctx.precision)
        grad_y = torch.zeros_like(x) if grad_y is None else _columns(grad_y)
        with on(x):
            S = plan.sums(log_a, delta)
            states, _ = plan.carry(S, x, b, initial)
            adjoints, grad_initial = plan.carry(S, grad_y, c, grad_final, reverse=True)
            met = S.new_empty(plan.batch, plan.chunks, plan.heads, plan.parts)
            was_read, through = (S.new_empty(*met.shape, STEPS) for _ in range(2))
            grad_delta = through if delta is None else torch.empty_like(through)
            grad_x = x.new_empty(x.shape)
            grad_b, grad_c = (b.new_empty(plan.blocks, *b.shape) for _ in range(2))
            shape, sizes, programs = (plan.batch, *plan.shape, plan.blocks), plan.sizes(), (plan.programs,)
            kernels.loaded().back_states[programs](
                *(S, x, c, grad_y, states, adjoints, was_read, met, grad_b, grad_c, *shape),
                *(*x.stride()[:3], *c.stride()[:3], *grad_y.stride()[:3]),
                **{**sizes, "num_warps": 2 * sizes["num_warps"]},
            )
            kernels.loaded().back[programs](
                *(S, x, b, c, grad_y, adjoints, was_read, met, through, grad_delta, grad_x, grad_b, grad_c, *shape),
                *(*x.stride()[:3], *b.stride()[:3], *c.stride()[:3], *grad_y.stride()[:3]),
                **sizes,
                TERMS=plan.precision.terms,
            )
        grad_b, grad_c = (g.squeeze(0) if plan.blocks == 1 else g.sum(0) for g in (grad_b, grad_c))
        weights = None if delta is None else plan.by_step(grad_delta)
        return plan.by_step(through), grad_b, grad_c, grad_x, grad_initial, weights, None


kernels = Kernels(
    "ssmscope.scans.scalar_fused_kernels", "the Triton scan", lambda one: scan(one[..., 0], one, one, one, one)
)
available, why_not = kernels.available, kernels.why_not
