"""The delta rule by Triton kernels (`delta_fused_kernels`), for 32 or 16 bits on a GPU; optional.

Products have the precision of torch's own matrix products, `torch.get_float32_matmul_precision()`, forward and
backward: "highest", the default, has 22 bits, "high" the 11 bits of TF32, "medium" the 8 bits of bfloat16 (see
`scalar_fused`), in which chunks' states are then kept too; triangular systems have 22 bits, with "medium" 11. Terms may
be of 16 bits: they are read as they are, and outputs and gradients have the type of x and of their terms. What is left
of keys has 22 bits always. Without the kernels (`launching`) `delta` stays with torch, and so do gradients where every
state has its own decay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssmscope.scans import native
from ssmscope.scans.launching import Kernels, bound, on
from ssmscope.scans.scalar_fused import DTYPES, MOST, PRECISIONS, STEPS, Precision, _columns

ROOM = 227 << 10  # bytes that a program's tiles take of a GPU's shared memory, at most
AT_ONCE = 1 << 16  # steps of all sequences whose chunks' states are held
CUTS = {
    "solve": (64, 4, 1),
    "solve_back": (64, 4, 1),
    "carry": (32, 4, 3),
    "carry_back": (32, 4, 2),
    "read": (64, 4, 1),
    "back": (32, 8, 1),
}
"""Of each kernel the columns of a head that a program takes at a time, its warps, and how many loads are under way."""


def applicable(log_a: Tensor, beta: Tensor, b: Tensor, *others: Tensor) -> bool:
    """Whether `scan` and `keys_left` take these terms: of 32 or 16 bits, on one GPU with the shared memory of an H100,
    with states of a size that fits, and no gradient through decays of states."""
    if b.device.type != "cuda" or not 1 <= b.shape[-1] <= MOST:
        return False
    terms = (log_a, beta, b, *others)
    if not all(t.numel() and t.device == b.device and native.is_plain(t, "cuda", DTYPES) for t in terms):
        return False
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in terms)
    if wanted and (log_a.shape[-1] > 1 or not others):
        return False
    if torch.compiler.is_compiling() or not available(b.device):
        return False
    return getattr(torch.cuda.get_device_properties(b.device), "shared_memory_per_block_optin", 0) >= ROOM


def scan(log_a: Tensor, beta: Tensor, b: Tensor, c: Tensor, x: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """As `delta.scan`, where `applicable`; b and c may be those of groups. The same numbers in every run on the same
    kind of GPU, however the texts are batched."""
    precision = torch.get_float32_matmul_precision()
    segments = _segments(beta)
    if len(segments) == 1:  # not sliced: the gradient of a slice fills a whole tensor
        return _Scan.apply(log_a, beta, b, c, x, initial, precision)
    outputs, H = [], initial.float()
    for part in segments:
        y, H = _Scan.apply(*(t[:, part] for t in (log_a, beta, b, c, x)), H, precision)
        outputs.append(y)
    return torch.cat(outputs, dim=1), H.to(initial.dtype)


def keys_left(log_a: Tensor, beta: Tensor, b: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """As `delta.keys_left`: ū of an adjoint that is I at the end."""
    state = b.shape[-1]
    P = torch.eye(state, device=b.device).expand(b.shape[0], beta.shape[2], -1, -1)
    for part in reversed(_segments(beta)):
        terms = _whole(log_a[:, part]), _whole(beta[:, part]), _columns(b[:, part])
        with on(b):
            keys, _, P = _plan(*terms, state, "highest").back(*terms, P)
        yield part, keys


def _segments(beta: Tensor) -> list[slice]:
    """The parts of the length whose chunks' states are held at once, of whole chunks."""
    batch, length = beta.shape[:2]
    step = max(1, AT_ONCE // batch // STEPS) * STEPS
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


class _Plan(NamedTuple):
    """How a scan is cut: chunks of `steps`, of each of which a program has one head."""

    batch: int
    length: int
    heads: int
    groups: int
    width: int
    state: int
    by_state: bool
    precision: Precision

    @property
    def steps(self) -> int:
        return STEPS // 2 if self.by_state or self.state > 128 else STEPS

    @property
    def chunks(self) -> int:
        return -(-self.length // self.steps)

    @property
    def programs(self) -> tuple[int]:
        return (self.batch * self.chunks * self.heads,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.length, self.heads, self.groups, self.chunks

    def sizes(self, kernel: str) -> dict[str, Any]:
        """The constants that a kernel is compiled for."""
        columns, warps, stages = CUTS[kernel]
        tiles = {"P": self.width, "N": self.state, "STATES": _power(self.state), "Q": self.steps}
        # Two warps have no wgmma, which in Triton 3.6 takes wrong rows where a product of 64 columns enters one of
        # fewer; `carry` and `back` have none that does where there are 64 states.
        if tiles["STATES"] < 64 or _power(self.width) < columns:
            warps = 2
        columns = min(_power(self.width), columns)
        how = {"BY_STATE": self.by_state, "EVEN": self.length % self.steps == 0, **self.precision.sizes}
        return {**tiles, **how, "WIDTH": columns, "num_warps": warps, "num_stages": stages}

    @property
    def kept(self) -> torch.dtype:
        """What r, ū and the chunks' states are kept in."""
        return torch.float32 if self.precision.sizes["SCALED"] else self.precision.dtype

    def rows(self, like: Tensor, size: int, dtype: torch.dtype | None = None) -> Tensor:
        return like.new_empty(self.batch, self.length, self.heads, size, dtype=dtype or self.kept)

    def sides(self, like: Tensor, count: int) -> tuple[list[Tensor], Tensor, Tensor]:
        """So many matrices of chunks in parts, their units, and room for the chunks' decays."""
        each, parts = (self.batch, self.chunks, self.heads), (self.precision.terms, self.steps, self.state)
        matrices = [like.new_empty(*each, *parts, dtype=self.precision.dtype) for _ in range(count)]
        units = like.new_empty(count, *each, dtype=torch.float32)
        return matrices, units, units.new_empty(*each, self.state if self.by_state else 1)

    def forward(
        self, log_a: Tensor, beta: Tensor, b: Tensor, x: Tensor, initial: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """r of every step, the states before chunks, and the last."""
        (W, E), units, D = self.sides(b, 2)
        U = self.rows(b, self.width)
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
        U = self.rows(b, self.width) if reads else self.rows(b, self.width).zero_()
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
        first = _whole(first)
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


def _power(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _plan(log_a: Tensor, beta: Tensor, b: Tensor, width: int, precision: str) -> _Plan:
    (batch, length, heads), (groups, state) = beta.shape, b.shape[2:]
    return _Plan(batch, length, heads, groups, width, state, log_a.shape[-1] > 1, PRECISIONS[precision])


def _whole(t: Tensor) -> Tensor:
    """The term in float32 and in one piece."""
    return t.float().contiguous()


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_a, beta, b, c, x, initial, precision) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        plan = _plan(log_a, beta, b, x.shape[-1], precision)
        ctx.save_for_backward(log_a, beta, b, c, x, initial)
        ctx.precision = precision
        log_a, beta, b, c, x = _whole(log_a), _whole(beta), *map(_columns, (b, c, x))
        y = x.new_empty(x.shape)
        with on(x):
            U, states, final = plan.forward(log_a, beta, b, x, initial)
            bound(kernels.loaded().read, **plan.sizes("read"))(
                plan.programs, log_a, beta, b, c, U, states, y, *plan.shape, *b.stride()[:3], *c.stride()[:3]
            )
        return y, final.to(initial.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        terms = ctx.saved_tensors
        log_a, beta, b, c, x, initial = terms
        plan = _plan(log_a, beta, b, x.shape[-1], ctx.precision)
        log_a, beta, b, c, x = _whole(log_a), _whole(beta), *map(_columns, (b, c, x))
        grad_y = torch.zeros_like(x) if grad_y is None else _columns(grad_y)
        grad_final = torch.zeros_like(initial) if grad_final is None else grad_final
        grad_a, grad_beta = torch.empty_like(log_a), torch.empty_like(beta)
        grad_b, grad_c = (plan.rows(b, plan.state, torch.float32) for _ in "bc")
        with on(x):
            U, states, _ = plan.forward(log_a, beta, b, x, initial)
            grad_x, adjoints, grad_initial = plan.back(log_a, beta, b, grad_final, c, grad_y)
            bound(kernels.loaded().back, **plan.sizes("back"))(
                plan.programs,
                *(log_a, beta, b, c, grad_y, U, grad_x, states, adjoints, grad_a, grad_beta, grad_b, grad_c),
                *(*plan.shape, *b.stride()[:3], *c.stride()[:3], *grad_y.stride()[:3]),
            )
        grad_b, grad_c = (g.unflatten(2, (plan.groups, -1)).sum(3) for g in (grad_b, grad_c))
        found = (grad_a, grad_beta, grad_b, grad_c, grad_x, grad_initial)
        return *(g.to(t.dtype) for g, t in zip(found, terms, strict=True)), None


kernels = Kernels(
    "ssmscope.scans.delta_fused_kernels",
    "the Triton delta rule",
    lambda one: scan(one, one[..., 0], one, one, one, one),
)
available, why_not = kernels.available, kernels.why_not
