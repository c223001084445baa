"""The scan with one decay per head by Triton kernels (`scalar_fused_kernels`), for float32 on a GPU; optional.

A kernel walks the chunks and keeps the state before each; another reads all chunks side by side; the backward pass
makes the states anew and does the same with the adjoint. Products have the precision of torch's own matrix products,
`torch.get_float32_matmul_precision()`: "highest", the default, has 22 bits (operands in two parts of float16, each over
a power of two, so that nothing leaves its range), "high" the 11 bits of TF32, "medium" the 8 bits of bfloat16; chunks'
states are kept in the same numbers, and sums are float32 throughout. Gradients have 22 bits whatever was chosen.
Without the kernels (`launching`) `scalar.scan` stays with torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssmscope.scans import native
from ssmscope.scans.launching import Kernels, on

FILL = 1024  # programs that keep a GPU busy: with fewer, the heads of a group are divided among several
MOST = 256  # of N: with more, a program's tiles no longer fit
STEPS = 64  # of a chunk
FARTHEST = 1 << 24  # from one step to the next in memory: offsets within a chunk have 32 bits


class Precision(NamedTuple):
    """What numbers products are of, and how many of them stand for one of float32."""

    dtype: torch.dtype
    terms: int

    @property
    def sizes(self) -> dict[str, Any]:
        return {"SCALED": self.dtype == torch.float16, "TERMS": self.terms}


PRECISIONS = {
    "highest": Precision(torch.float16, 2),
    "high": Precision(torch.float16, 1),
    "medium": Precision(torch.bfloat16, 1),
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
    precision: Precision

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
        how = {"WEIGHTED": self.weighted, "EVEN": self.length % STEPS == 0}
        # Two warps have no wgmma, which in Triton 3.6 takes wrong rows where a product of STEPS columns enters one of
        # fewer.
        warps = 2 if min(self.part, tiles["STATES"]) < STEPS else 4
        return {**tiles, **how, "num_warps": warps}

    def sums(self, log_a: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        S = log_a.new_empty(self.batch, self.chunks, self.heads, 2 if delta is None else 3, STEPS)
        most = log_a.new_empty(self.batch, self.chunks, self.heads, 3)
        heads, weights = min(_power(self.heads), 16), log_a if delta is None else delta
        kernels.loaded().sums[(self.batch * self.chunks * -(-self.heads // heads),)](
            *(log_a, weights, S, most, self.length, self.heads, self.chunks, *log_a.stride(), *weights.stride()),
            **{"Q": STEPS, "HEADS": heads, "WEIGHTED": self.weighted, "num_warps": 4},
        )
        return S, most

    def in_parts(self, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """b and c in parts, and their units."""
        each, precision = (self.batch, self.chunks, self.groups), self.precision
        b_parts, c_parts = (b.new_empty(*each, precision.terms, STEPS, self.state, dtype=precision.dtype) for _ in "bc")
        units, states = b.new_empty(*each, 2), _power(self.state, 16)
        kernels.loaded().parts[(self.batch * self.chunks * self.groups,)](
            *(b, c, b_parts, c_parts, units, self.length, self.groups, self.chunks, *b.stride()[:3], *c.stride()[:3]),
            **{"N": self.state, "STATES": states, "Q": STEPS, "num_warps": 8 if states >= 64 else 2},
            **precision.sizes,
        )
        return b_parts, c_parts, units

    def carry(
        self,
        S: Tensor,
        most: Tensor,
        left: Tensor,
        right: Tensor,
        units: Tensor,
        first: Tensor | None,
        reverse: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The states before the chunks in parts, their units, the largest |left| of each chunk, and the last state; or
        of their adjoints; from 0 without a `first`."""
        chunks, matrix = (self.batch, self.chunks, self.heads), (self.width, self.state)
        states = S.new_empty(*chunks, self.precision.terms, *matrix, dtype=self.precision.dtype)
        state_units, largest = (S.new_empty(*chunks, self.parts) for _ in range(2))
        last = S.new_empty(self.batch, self.heads, *matrix)
        sizes = self.sizes()
        sizes["STATES"] = min(sizes["STATES"], 64)
        programs = self.batch * self.heads * self.parts * -(-self.state // sizes["STATES"])
        kernels.loaded().carry[(programs,)](
            *(S, most, left, right, units, last if first is None else first.contiguous()),
            *(states, state_units, largest, last, *self.shape, *left.stride()[:3]),
            **sizes,
            **self.precision.sizes,
            REVERSE=reverse,
            FIRST=first is not None,
        )
        return states, state_units, largest, last

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
            S, most = plan.sums(log_a, delta)
            b_parts, c_parts, units = plan.in_parts(b, c)
            *states, largest, final = plan.carry(S, most, x, b_parts, units, initial)
            kernels.loaded().read[(plan.programs,)](
                *(S, most, x, b_parts, c_parts, units, *states, largest, y),
                *(*plan.shape, plan.blocks, *x.stride()[:3]),
                **plan.sizes(),
                **plan.precision.sizes,
            )
        ctx.save_for_backward(log_a, b, c, x, initial, delta)
        return y, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        log_a, b, c, x, initial, delta = ctx.saved_tensors
        plan = _plan(x, b, delta, "highest")
        grad_y = torch.zeros_like(x) if grad_y is None else _columns(grad_y)
        with on(x):
            S, most = plan.sums(log_a, delta)
            b_parts, c_parts, units = plan.in_parts(b, c)
            *states, largest_x, _ = plan.carry(S, most, x, b_parts, units, initial)
            *adjoints, largest_y, grad_initial = plan.carry(S, most, grad_y, c_parts, units, grad_final, reverse=True)
            met = S.new_empty(plan.batch, plan.chunks, plan.heads, plan.parts)
            was_read, through = (S.new_empty(*met.shape, STEPS) for _ in range(2))
            grad_delta = through if delta is None else torch.empty_like(through)
            grad_b, grad_c = (b.new_empty(plan.blocks, *b.shape) for _ in range(2))
            shape, sizes, programs = (plan.batch, *plan.shape, plan.blocks), plan.sizes(), (plan.programs,)
            strides = (*x.stride()[:3], *grad_y.stride()[:3])
            kernels.loaded().back_states[programs](
                *(S, most, x, c_parts, grad_y, units, *states, *adjoints, largest_x, largest_y),
                *(was_read, met, grad_b, grad_c, *shape, *strides),
                **{**sizes, "num_warps": 2 * sizes["num_warps"]},
            )
            del states  # before there is room for x's gradient
            grad_x = x.new_empty(x.shape)
            kernels.loaded().back[programs](
                *(S, x, b_parts, c_parts, grad_y, units, *adjoints, largest_x, largest_y),
                *(was_read, met, through, grad_delta, grad_x, grad_b, grad_c, *shape, *strides),
                **sizes,
            )
        grad_b, grad_c = (g.squeeze(0) if plan.blocks == 1 else g.sum(0) for g in (grad_b, grad_c))
        weights = None if delta is None else plan.by_step(grad_delta)
        return plan.by_step(through), grad_b, grad_c, grad_x, grad_initial, weights, None


kernels = Kernels(
    "ssmscope.scans.scalar_fused_kernels", "the Triton scan", lambda one: scan(one[..., 0], one, one, one, one)
)
available, why_not = kernels.available, kernels.why_not
