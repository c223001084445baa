"""The delta rule by Triton kernels (`delta_fused_kernels`), for 32 or 16 bits on a GPU; optional.

Products have the precision of torch's own matrix products, `torch.get_float32_matmul_precision()`, forward and
backward: "highest", the default, has 22 bits (`delta_exact`); "high" the 11 bits of TF32 and "medium" the 8 bits of
bfloat16 (see `scalar_fused`), in which chunks' states are then kept too, are here. Forward, one kernel inverts the
triangular systems of all chunks side by side, and one walks the chunks with the state at hand and writes the outputs.
The backward pass walks them again and keeps the state before each chunk, walks back with the adjoint, and finds the
gradients of all chunks side by side.
Terms may be of 16 bits: they are read as they are, and outputs and gradients have the type of x and of their terms.
Without the kernels (`launching`) `delta` stays with torch, and so do gradients where every state has its own decay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssmscope.scans import delta_exact, native
from ssmscope.scans.delta_plan import Plan, power, segments, sizes_of, whole
from ssmscope.scans.launching import Kernels, bound, compiled_ahead, on
from ssmscope.scans.scalar_fused import DTYPES, MOST, PRECISIONS, STEPS, _columns

ROOM = 227 << 10  # bytes that a program's tiles take of a GPU's shared memory, at most
CARD = 132  # programs that run at once where each has most of a multiprocessor's shared memory
TOGETHER = 1 << 14  # entries of two states that `back` multiplies at a time


class Cut(NamedTuple):
    """How a kernel is run.

    Attributes:
        columns: of a head that a program takes at a time.
        warps: of a program.
        stages: loads that are under way.
    """

    columns: int
    warps: int
    stages: int


CUTS = {
    "solve": Cut(64, 4, 1),
    "walk": Cut(32, 4, 3),
    "walk_back": Cut(32, 4, 2),
    "back": Cut(128, 4, 1),
}


def applicable(log_a: Tensor, beta: Tensor, b: Tensor, *others: Tensor) -> bool:
    """Whether `scan` and `delta_exact.keys_left` take these terms: of 32 or 16 bits, on one GPU with the shared memory
    of an H100, with states of a size that fits, and no gradient through decays of states."""
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
    parts = segments(beta)
    if len(parts) == 1:  # not sliced: the gradient of a slice fills a whole tensor
        return _scan(log_a, beta, b, c, x, initial)
    outputs, H = [], initial.float()
    for part in parts:
        y, H = _scan(*(t[:, part] for t in (log_a, beta, b, c, x)), H)
        outputs.append(y)
    return torch.cat(outputs, dim=1), H.to(initial.dtype)


def _scan(*terms: Tensor) -> tuple[Tensor, Tensor]:
    precision = torch.get_float32_matmul_precision()
    return delta_exact.Scan.apply(*terms) if precision == "highest" else _Scan.apply(*terms, precision)


@dataclass(frozen=True)
class _Plan(Plan):
    dtype: torch.dtype
    """What numbers are of in products."""

    @property
    def scaled(self) -> bool:
        return self.dtype == torch.float16

    @property
    def kept(self) -> torch.dtype:
        """What r, x̄ and the chunks' states are kept in."""
        return torch.float32 if self.scaled else self.dtype

    def sizes(self, kernel: str) -> dict[str, Any]:
        """The constants that a kernel is compiled for."""
        columns, warps, stages = CUTS[kernel]
        if kernel == "back" and self.scaled:  # no second program has room beside it
            warps *= 2
        tiles: dict[str, Any] = {"N": self.state, "STATES": power(self.state), "Q": self.steps}
        # Two warps have no wgmma, nor have 32 rows: in Triton 3.6 it takes wrong rows where a product of 64 columns
        # enters one of fewer.
        if kernel != "solve":
            small = min(tiles["STATES"], self.steps) < STEPS
            columns = min(power(self.width), 32 if small else columns)
            warps = 2 if tiles["STATES"] < STEPS or columns < 32 else warps
            tiles |= {"P": self.width, "WIDTH": columns}
        if kernel != "back":
            tiles["BY_STATE"] = self.by_state
        how = {"EVEN": self.length % self.steps == 0, "SCALED": self.scaled}
        return {**tiles, **how, "num_warps": warps, "num_stages": stages}

    def solve(self, log_a: Tensor, beta: Tensor, b: Tensor, c: Tensor) -> _Solved:
        """What walks multiply by."""
        each = (self.batch, self.chunks, self.heads)
        T, A = (b.new_empty(*each, self.steps, self.steps, dtype=self.dtype) for _ in "TA")
        units = b.new_empty(2, *each, dtype=torch.float32)
        weights = units.new_empty(3, *each, self.steps)
        D = units.new_empty(*each, self.state if self.by_state else 1)
        k_in, k_out, c_in = b, b, c
        if self.scaled or self.by_state:
            sides = self.heads if self.by_state else self.groups
            k_in, c_in = (T.new_empty(self.batch, self.length, sides, self.state) for _ in "kc")
            k_out = torch.empty_like(k_in) if self.by_state else k_in
        bound(kernels.loaded().solve, **self.sizes("solve"))(
            self.programs,
            *(log_a, beta, b, c, T, A, weights, units, D, k_in, k_out, c_in),
            *(self.length, self.heads, self.groups, self.chunks, *b.stride()[:3], *c.stride()[:3]),
        )
        return _Solved(k_in, k_out, c_in, T, A, weights, units, D)

    def walk(self, solved: _Solved, x: Tensor, initial: Tensor, *, read: bool) -> tuple[Tensor, ...]:
        """The outputs and the last state, or, where nothing is read, r of every step and the states before chunks."""
        first = whole(initial)
        last = torch.empty_like(first)
        y = x.new_empty(x.shape) if read else self.rows(x, self.width, self.kept)
        states = first if read else y.new_empty(self.batch, self.chunks, self.heads, self.width, self.state)
        self._walk("walk", solved, (x, first, states, y, y, last), x, READ=read, KEEP=not read)
        return y, last if read else states

    def walk_back(self, solved: _Solved, grad_y: Tensor, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x̄ of every step, the adjoints after chunks, and that of the first state."""
        last = whole(last)
        first = torch.empty_like(last)
        found = self.rows(last, self.width, self.kept)
        adjoints = found.new_empty(self.batch, self.chunks, self.heads, self.width, self.state)
        self._walk("walk_back", solved, (grad_y, last, adjoints, found, first), grad_y)
        return found, adjoints, first

    def _walk(self, kernel: str, solved: _Solved, terms: tuple[Tensor, ...], rows: Tensor, **how: bool) -> None:
        sizes = self.sizes(kernel)
        programs = self.batch * self.heads * -(-self.width // sizes["WIDTH"])
        # Two at a time on a multiprocessor gain more than loads further ahead, which float16 was not timed with.
        if self.scaled or programs > CARD:
            sizes["num_stages"] = min(sizes["num_stages"], 2)
        k, c = solved.k_in, solved.c_in
        bound(getattr(kernels.loaded(), kernel), **sizes, **how)(
            (programs,),
            *(*solved, *terms, self.batch, self.length, self.heads, k.shape[2], self.chunks),
            *(*k.stride()[:3], *c.stride()[:3], *rows.stride()[:3]),
        )

    def back(
        self, terms: tuple[Tensor, ...], R: Tensor, xbar: Tensor, states: Tensor, adjoints: Tensor
    ) -> list[Tensor]:
        """The gradients of log a, β, b and c."""
        log_a, beta, b, c, grad_y = terms
        grads = [torch.empty_like(log_a), torch.empty_like(beta)]
        grads += [self.rows(b, self.state, self.kept) for _ in "bc"]
        sizes = self.sizes("back")
        bound(kernels.loaded().back, **sizes, SUM=min(power(self.width), TOGETHER // sizes["STATES"]))(
            self.programs,
            *(log_a, beta, b, c, grad_y, R, xbar, states, adjoints, *grads),
            *(self.length, self.heads, self.groups, self.chunks),
            *(*b.stride()[:3], *c.stride()[:3], *grad_y.stride()[:3]),
        )
        if self.heads > self.groups:
            grads[2:] = (g.unflatten(2, (self.groups, -1)).sum(3) for g in grads[2:])
        return grads


class _Solved(NamedTuple):
    """What walks multiply by, as `solve` of the kernels says."""

    k_in: Tensor
    k_out: Tensor
    c_in: Tensor
    T: Tensor
    A: Tensor
    weights: Tensor
    units: Tensor
    D: Tensor


def _plan(log_a: Tensor, beta: Tensor, b: Tensor, x: Tensor, precision: str) -> _Plan:
    return _Plan(*sizes_of(log_a, beta, b, x.shape[-1]), PRECISIONS[precision].dtype)


def _given(precision: str, log_a: Tensor, beta: Tensor, b: Tensor, c: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """The terms as the kernels take them: b and c of the type of products that take them whole."""
    if precision == "medium":
        b, c = b.bfloat16(), c.bfloat16()
    return whole(log_a), whole(beta), _columns(b), _columns(c), _columns(x)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_a, beta, b, c, x, initial, precision) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        plan = _plan(log_a, beta, b, x, precision)
        terms = log_a, beta, b, c, x, initial
        log_a, beta, b, c, x = _given(precision, log_a, beta, b, c, x)

        def run() -> tuple[Any, ...]:
            solved = plan.solve(log_a, beta, b, c)
            return solved, *plan.walk(solved, x, initial, read=True)

        with on(x):
            compiled_ahead((plan, "forward"), run)
            solved, y, final = run()
        ctx.save_for_backward(*terms, *solved)
        ctx.precision = precision
        return y, final.to(initial.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        terms, solved = ctx.saved_tensors[:6], _Solved(*ctx.saved_tensors[6:])
        log_a, beta, b, c, x, initial = terms
        plan = _plan(log_a, beta, b, x, ctx.precision)
        log_a, beta, b, c, x = _given(ctx.precision, log_a, beta, b, c, x)
        grad_y = torch.zeros_like(x) if grad_y is None else _columns(grad_y)
        grad_final = torch.zeros_like(initial) if grad_final is None else grad_final

        def run() -> tuple[Any, ...]:
            R, states = plan.walk(solved, x, initial, read=False)
            grad_x, adjoints, grad_initial = plan.walk_back(solved, grad_y, grad_final)
            grads = plan.back((log_a, beta, b, c, grad_y), R, grad_x, states, adjoints)
            return *grads, grad_x, grad_initial

        with on(x):
            compiled_ahead((plan, "backward"), run)
            found = run()
        return *(g.to(t.dtype) for g, t in zip(found, terms, strict=True)), None


kernels = Kernels(
    "ssmscope.scans.delta_fused_kernels",
    "the Triton delta rule",
    lambda one: scan(one, one[..., 0], one, one, one, one),
)
available, why_not = kernels.available, kernels.why_not
