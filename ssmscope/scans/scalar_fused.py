"""The scan with one decay per head by Triton kernels (`scalar_fused_kernels`), for 32 or 16 bits on a GPU; optional.

A kernel walks the chunks with the state at hand and writes the outputs. The backward pass walks them again and keeps
the state before each chunk, walks back with the adjoint, which takes the states' place, and finds the gradients of all
chunks side by side; rows, or heads, come one part after the other where the states of all would take more room than x.
Products have the precision of torch's own matrix products, `torch.get_float32_matmul_precision()`, forward and
backward: "highest", the default, has 22 bits (operands in two parts of float16, over a power of two for each step, so
that nothing leaves its range), "high" the 11 bits of TF32, "medium" the 8 bits of bfloat16; chunks' states are kept in
the same numbers, and sums are float32 throughout. Terms may be of 16 bits: they are read as they are, and outputs and
gradients have the type of x and of their terms. Without the kernels (`launching`) `scalar.scan` stays with torch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssmscope.scans import native
from ssmscope.scans.launching import Bound, Kernels, bound, compiled_ahead, on

FILL = 256  # programs that keep a GPU busy: with fewer, the heads of a group are divided among several
WALKS = 264  # programs that run at once where each walks many chunks: with fewer, the length is cut into segments
SPAN = 32  # chunks of a segment at least
HELD = 1 << 25  # bytes of states that the backward pass may hold, however small the terms
MOST = 256  # of N: with more, a program's tiles no longer fit
STEPS = 64  # of a chunk
LAUNCH: dict[str, dict[str, Any]] = {
    "read": {"num_warps": 1, "STAGES": 1, "BARRIER": True},
    "read once": {"num_warps": 1, "STAGES": 1, "BARRIER": False},
    "read 16 bits": {"num_warps": 1, "STAGES": 2, "BARRIER": False},
    "keep": {"num_warps": 1, "STAGES": 2, "BARRIER": False},
    "adjoint": {"num_warps": 1, "STAGES": 2, "BARRIER": True},
    "states": {"num_warps": 1, "STAGES": 2},
    "back": {"num_warps": 1, "STAGES": 1, "BARRIER": True},
}  # of each kernel: how many times as many warps as `sizes` says, steps loaded ahead, whether loads wait for room;
# outputs are read "once" where operands are of one part, from terms of 32 or of 16 bits
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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


def applicable(
    log_a: Tensor,
    b: Tensor,
    c: Tensor,
    x: Tensor,
    initial: Tensor | None,
    delta: Tensor | None = None,
    D: Tensor | None = None,
) -> bool:
    """Whether `scan` takes these terms: of 32 or 16 bits, on one GPU, with states of a size that fits."""
    if x.device.type != "cuda" or not x.numel() or not 1 <= b.shape[3] <= MOST:
        return False
    terms = tuple(t for t in (log_a, b, c, x, initial, delta, D) if t is not None)
    plain = native.are_plain(terms, x.device, DTYPES)
    return plain and not torch.compiler.is_compiling() and available(x.device)


def scan(
    log_a: Tensor,
    b: Tensor,
    c: Tensor,
    x: Tensor,
    initial: Tensor | None,
    delta: Tensor | None = None,
    D: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `scalar.scan`, where `applicable`, D (heads,); the same numbers in every run on the same kind of GPU."""
    precision = torch.get_float32_matmul_precision()
    b, c, x = map(_columns, (b, c, x))
    terms = (log_a, b, c, x, initial, delta, None if D is None else D.contiguous())
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in terms):
        return _Scan.apply(*terms, precision)
    return _forward(*terms, precision)


@dataclass(frozen=True, eq=False)
class _Plan:
    """How a scan is cut: chunks of `STEPS`, heads into parts of at most 64 of their width, of which `blocks` programs
    share those of a group; `fill`, `walks` and `span` as above."""

    batch: int
    length: int
    heads: int
    width: int
    groups: int
    state: int
    weighted: bool
    precision: Precision
    fill: int
    walks: int
    span: int

    @functools.cached_property
    def chunks(self) -> int:
        return -(-self.length // STEPS)

    @functools.cached_property
    def part(self) -> int:
        """Columns of a tile of a head, a power of two of at least 16."""
        return min(_power(self.width, 16), 64)

    @functools.cached_property
    def parts(self) -> int:
        return -(-self.width // self.part)

    @functools.cached_property
    def blocks(self) -> int:
        side_by_side = self.batch * self.chunks * self.groups
        return min(-(-self.fill // side_by_side), self.heads // self.groups * self.parts)

    @functools.cached_property
    def programs(self) -> int:
        """Of the kernels that work on all chunks side by side."""
        return self.batch * self.chunks * self.groups * self.blocks

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        return self.length, self.heads, self.groups, self.chunks

    @functools.cached_property
    def by_head(self) -> tuple[int, ...]:
        return self.batch, self.chunks, self.heads, self.parts

    @functools.cached_property
    def _made(self) -> dict[tuple[Any, ...], Bound]:
        return {}

    def kernel(self, name: str, how: str, **flags: bool | int) -> Bound:
        """A kernel compiled for its constants, the `sizes` and these."""
        key = (name, how, *flags.values())
        found = self._made.get(key)
        if found is None:
            found = self._made[key] = bound(getattr(kernels.loaded(), name), **self.sizes(how) | flags)
        return found

    def sizes(self, kernel: str) -> dict[str, Any]:
        """The constants that a kernel is compiled for."""
        states = _power(self.state, 16)
        if kernel == "sums":
            heads = min(_power(self.heads), 16)
            return {"Q": STEPS, "HEADS": heads, "WEIGHTED": self.weighted, "num_warps": 4}
        if kernel == "parts":
            tiles = {"N": self.state, "STATES": states, "Q": STEPS, "num_warps": 4 if states >= STEPS else 2}
            return {**tiles, **self.precision.sizes}
        tiles = {"P": self.width, "N": self.state, "WIDTH": self.part, "STATES": states, "Q": STEPS}
        how = {"WEIGHTED": self.weighted, "EVEN": self.length % STEPS == 0, **self.precision.sizes}
        # Two warps have no wgmma, which in Triton 3.6 takes wrong rows where a product of STEPS columns enters one of
        # fewer.
        warps = 2 if min(self.part, states) < STEPS else 4
        if warps == 4 and states > 128 and (kernel == "states" or kernel.startswith("read")):
            warps = 8
        launch = LAUNCH[kernel]
        if kernel in ("keep", "adjoint"):
            tiles["STATES"] = self._states
        return {**tiles, **how, **launch, "num_warps": warps * launch["num_warps"]}

    def sums(self, log_a: Tensor, delta: Tensor | None) -> Tensor:
        terms = 3 if self.weighted else 2
        S = log_a.new_empty((self.batch, self.chunks, self.heads, terms, STEPS), dtype=torch.float32)
        kernel, weights = self.kernel("sums", "sums"), log_a if delta is None else delta
        kernel(
            (self.batch * self.chunks * -(-self.heads // kernel.constants["HEADS"]),),
            *(log_a, weights, S, self.length, self.heads, self.chunks, *log_a.stride(), *weights.stride()),
        )
        return S

    def in_parts(self, S: Tensor, b: Tensor, c: Tensor, inner: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """b and c in parts, their units, and the products of both within chunks if asked for."""
        each, precision = (self.batch, self.chunks, self.groups), self.precision
        shape = (*each, precision.terms, STEPS, self.state)
        b_parts, c_parts = (S.new_empty(shape, dtype=precision.dtype) for _ in "bc")
        units = S.new_empty((*each, 2, STEPS))
        products = S.new_empty((*each, STEPS, STEPS)) if inner else units
        self.kernel("parts", "parts", INNER=inner)(
            (self.batch * self.chunks * self.groups,),
            *(b, c, b_parts, c_parts, units, products, self.length, self.groups, self.chunks),
            *(*b.stride()[:3], *c.stride()[:3]),
        )
        return b_parts, c_parts, units, products

    def read(
        self, S: Tensor, x: Tensor, b: Tensor, c: Tensor, first: Tensor | None, D: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The outputs in x's type and the last state in that of the first."""
        y = x.new_empty(x.shape)
        b_parts, c_parts, units, inner = self.in_parts(S, b, c, inner=True)
        last = (x if first is None else first).new_empty((self.batch, self.heads, self.width, self.state))
        self._walk(S, x, b_parts, units, first, last, y, c_parts, inner, D)
        return y, last

    def states(
        self, S: Tensor, x: Tensor, b: Tensor, units: Tensor, first: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The states before the chunks in parts, their units and those of x."""
        chunks, terms = self.by_head[:3], self.precision.terms
        states = S.new_empty((*chunks, terms, self.width, self.state), dtype=self.precision.dtype)
        state_units, x_units = S.new_empty(self.by_head), S.new_empty((*self.by_head, STEPS))
        self._walk(S, x, b, units, first, None, states, kept_units=(state_units, x_units))
        return states, state_units, x_units

    def adjoints(
        self, S: Tensor, grad_y: Tensor, c: Tensor, units: Tensor, ends: tuple[Any, Any], states: Tensor, before: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Writes the adjoints after the chunks in the place of the states before them; their units and those of ȳ, and
        what of both meets at each chunk. `ends`: the adjoint after the last chunk, and room for that before the
        first, or None."""
        met = S.new_empty((*self.by_head, -(-self.state // self._states)))
        kept_units = S.new_empty(self.by_head), S.new_empty((*self.by_head, STEPS))
        self._walk(S, grad_y, c, units, *ends, states, kept_units=kept_units, before=before, met=met)
        return *kept_units, met

    @functools.cached_property
    def _states(self) -> int:
        """Of N, how many a program has that walks and keeps the states."""
        return min(_power(self.state, 16), 128)

    def _walk(
        self,
        S: Tensor,
        left: Tensor,
        right: Tensor,
        units: Tensor,
        first: Tensor | None,
        last: Tensor | None,
        out: Tensor,
        c: Tensor | None = None,
        inner: Tensor | None = None,
        D: Tensor | None = None,
        *,
        kept_units: tuple[Tensor | None, Tensor | None] = (None, None),
        before: Tensor | None = None,
        met: Tensor | None = None,
    ) -> None:
        once = "read once" if left.dtype == torch.float32 else "read 16 bits"
        read = once if self.precision.terms == 1 else "read"
        how = read if c is not None else "keep" if before is None else "adjoint"
        walks, span, segments = self._segments(self._states if c is None else self.state)
        finals = ends = S
        if segments > 1:
            finals = S.new_empty((segments - 1, self.batch, self.heads, self.width, self.state))
            ends = S.new_empty((segments - 1, self.batch, self.heads, self.parts, 2))
        terms = (
            *(S, left, right, units, right if c is None else c, S if inner is None else inner),
            *(S if D is None else D, S if first is None else first.contiguous(), finals, ends, out),
            *(S if t is None else t for t in (*kept_units, before, met, last)),
            *(self.batch, *self.shape, span, segments, *left.stride()[:3]),
        )
        flags = {"REVERSE": before is not None, "FIRST": first is not None, "LAST": last is not None}
        for step in (1, 2) if segments > 1 else (0,):
            programs = walks * (segments - (step == 1))
            self.kernel("carry", how, **flags, READ=c is not None, SKIP=D is not None, PASS=step)((programs,), *terms)

    def _segments(self, states: int) -> tuple[int, int, int]:
        """Programs of a walk that has so many states each, chunks of a segment and their number."""
        walks = self.batch * self.heads * self.parts * -(-self.state // states)
        segments = max(1, min(self.chunks // self.span, self.walks // walks))
        span = -(-self.chunks // segments)
        return walks, span, -(-self.chunks // span)

    def by_step(self, parts: Tensor, dtype: torch.dtype) -> Tensor:
        """(batch, chunks, heads, parts, Q) as (batch, length, heads)."""
        whole = parts.squeeze(3) if self.parts == 1 else parts.sum(3)
        turned = whole.transpose(2, 3).to(dtype, memory_format=torch.contiguous_format, copy=True)
        return turned.view(self.batch, -1, self.heads)[:, : self.length]

    def cuts(self, room: int) -> tuple[list[slice], list[tuple[slice, slice]]]:
        """Rows, and heads with their groups, whose gradients are found one after the other, so that their states take
        no more than `room` bytes, or `HELD`."""
        of_head = self.chunks * self.width * self.state * self.precision.terms * 2
        room = max(HELD, room)
        share = self.heads // self.groups  # heads that are cut apart only where there is but one group
        least, units = (1, self.heads) if self.groups == 1 else (share, self.groups)
        rows = min(max(1, room // (of_head * self.heads)), self.batch)
        each = units if rows > 1 else min(max(1, room // (of_head * least)), units)
        all_heads = []
        for one in range(0, units, each):
            heads = slice(one * least, min(one + each, units) * least)
            all_heads.append((heads, slice(None) if self.groups == 1 else slice(one, one + each)))
        return [slice(row, row + rows) for row in range(0, self.batch, rows)], all_heads


def _power(size: int, least: int = 1) -> int:
    return max(least, 1 << (size - 1).bit_length())


def _plan(x: Tensor, b: Tensor, delta: Tensor | None, precision: str) -> _Plan:
    return _planned(*x.shape, *b.shape[2:], delta is not None, PRECISIONS[precision], FILL, WALKS, SPAN)


_planned = functools.lru_cache(maxsize=256)(_Plan)


def _columns(t: Tensor) -> Tensor:
    """The term with its last dimension side by side."""
    return t if t.stride(-1) == 1 and t.stride(1) < FARTHEST else t.contiguous()


def _forward(
    log_a: Tensor,
    b: Tensor,
    c: Tensor,
    x: Tensor,
    initial: Tensor | None,
    delta: Tensor | None,
    D: Tensor | None,
    precision: str,
) -> tuple[Tensor, Tensor]:
    """The outputs and the last state of terms in `_columns`."""
    plan = _plan(x, b, delta, precision)

    def run() -> tuple[Tensor, Tensor]:
        return plan.read(plan.sums(log_a, delta), x, b, c, initial, D)

    with on(x):
        compiled_ahead((plan, "forward"), run)
        return run()


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_a, b, c, x, initial, delta, D, precision) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(log_a, b, c, x, initial, delta, D)
        ctx.precision = precision
        return _forward(log_a, b, c, x, initial, delta, D, precision)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        log_a, b, c, x, initial, delta, D = ctx.saved_tensors
        grad_y = torch.zeros_like(x) if grad_y is None else _columns(grad_y)
        grad_x = x.new_empty(x.shape)
        whole = (log_a, b, c, x, initial, delta, D, grad_y, grad_final, grad_x)
        with on(x):
            plan = _plan(x, b, delta, ctx.precision)
            compiled_ahead((plan, "backward"), lambda: _in_cuts(whole, ctx.precision))
            found = _in_cuts(whole, ctx.precision)
        of_log_a, of_b, of_c, of_initial, of_delta, of_D = (
            None if g is None or t is None else g.to(t.dtype)
            for g, t in zip(found, (log_a, b, c, initial, delta, D), strict=True)
        )
        return of_log_a, of_b, of_c, grad_x, of_initial, of_delta, of_D, None


def _in_cuts(terms: tuple[Any, ...], precision: str) -> tuple[Tensor | None, ...]:
    """As `_gradients`, of rows and heads one part after the other."""
    plan = _plan(terms[3], terms[1], terms[5], precision)
    all_rows, all_heads = plan.cuts(terms[3].nbytes)
    if len(all_rows) == len(all_heads) == 1:
        return _gradients(terms, precision)
    of_group = None if plan.groups == 1 else 2  # heads share b and c: theirs are added; others stand side by side
    along, rows_along = (2, of_group, of_group, 1, 2, 0), (0, 0, 0, 0, 0, None)
    of_all = _Parts(rows_along)
    for rows in all_rows:
        of_rows = _Parts(along)
        for heads, groups in all_heads:
            by_head, by_group, state = (rows, slice(None), heads), (rows, slice(None), groups), (rows, heads)
            at = (by_head, by_group, by_group, by_head, state, by_head, heads, by_head, state, by_head)
            some = tuple(None if t is None else t[place] for t, place in zip(terms, at, strict=True))
            of_rows.add(_gradients(some, precision))
        of_all.add(of_rows.joined())
    return of_all.joined()


class _Parts:
    """Tensors that come in parts, side by side along a dimension each, or to be added where that is None."""

    def __init__(self, along: tuple[int | None, ...]) -> None:
        self.along = along
        self.parts: tuple[list[Tensor], ...] = tuple([] for _ in along)

    def add(self, parts: tuple[Tensor | None, ...]) -> None:
        for held, part, dim in zip(self.parts, parts, self.along, strict=True):
            if part is not None and dim is None and held:
                held[0].add_(part)
            elif part is not None:
                held.append(part)

    def joined(self) -> tuple[Tensor | None, ...]:
        return tuple(
            None if not held else held[0] if dim is None or len(held) == 1 else torch.cat(held, dim)
            for held, dim in zip(self.parts, self.along, strict=True)
        )


def _gradients(terms: tuple[Any, ...], precision: str) -> tuple[Tensor | None, ...]:
    """Those of log_a, b, c, initial, delta and D, of b, c, initial and D in float32; that of x is written to the last
    of the terms: these, ȳ, the gradient of the last state, and room for x's."""
    log_a, b, c, x, initial, delta, D, grad_y, grad_final, grad_x = terms
    plan = _plan(x, b, delta, precision)
    S = plan.sums(log_a, delta)
    b_parts, c_parts, units, _ = plan.in_parts(S, b, c, inner=False)
    states, state_units, x_units = plan.states(S, x, b_parts, units, initial)
    was_read, through = (S.new_empty(x_units.shape) for _ in range(2))
    grad_delta = through if delta is None else S.new_empty(x_units.shape)
    grad_b, grad_c = (S.new_empty((plan.blocks, *b.shape)) for _ in range(2))
    grad_D = S if D is None else S.new_empty(plan.by_head)
    shape, programs = (plan.batch, *plan.shape, plan.blocks), (plan.programs,)
    plan.kernel("back_states", "states", REVERSE=False)(
        programs,
        *(S, grad_y, c_parts, units, states, state_units, x_units, was_read, grad_c, *shape, *grad_y.stride()[:3]),
    )
    grad_initial = None if initial is None else S.new_empty(initial.shape)
    ends = grad_final, grad_initial
    adjoint_units, y_units, met = plan.adjoints(S, grad_y, c_parts, units, ends, states, state_units)
    plan.kernel("back_states", "states", REVERSE=True)(
        programs,
        *(S, x, b_parts, units, states, adjoint_units, x_units, was_read, grad_b, *shape, *x.stride()[:3]),
    )
    plan.kernel("back", "back", N_BLOCKS=met.shape[-1], SKIP=D is not None)(
        programs,
        *(S, x, b_parts, c_parts, grad_y, units, states, adjoint_units, x_units, y_units),
        *(was_read, met, S if D is None else D, through, grad_delta, grad_x, grad_b, grad_c, grad_D, *shape),
        *(*x.stride()[:3], *grad_y.stride()[:3], *grad_x.stride()[:3]),
    )
    grad_b, grad_c = (g.squeeze(0) if plan.blocks == 1 else g.sum(0) for g in (grad_b, grad_c))
    of_delta = None if delta is None else plan.by_step(grad_delta, delta.dtype)
    of_D = None if D is None else grad_D.sum((0, 1, 3))
    return plan.by_step(through, log_a.dtype), grad_b, grad_c, grad_initial, of_delta, of_D


kernels = Kernels(
    "ssmscope.scans.scalar_fused_kernels", "the Triton scan", lambda one: scan(one[..., 0], one, one, one, one)
)
available, why_not = kernels.available, kernels.why_not
