"""The delta rule by Triton kernels (`delta_fused_kernels`), for 32 or 16 bits on a GPU; optional.

Forward, one kernel inverts the triangular systems of all chunks side by side, and one walks the chunks with the state
at hand and writes the outputs. The backward pass walks them again and keeps the state before each chunk, walks back
with the adjoint, and finds the gradients of all chunks side by side.
Products have the precision of torch's own matrix products, `torch.get_float32_matmul_precision()`, forward and
backward: "highest", the default, has 22 bits, "high" the 11 bits of TF32, "medium" the 8 bits of bfloat16 (see
`scalar_fused`), in which chunks' states are then kept too. Terms may be of 16 bits: they are read as they are, and
outputs and gradients have the type of x and of their terms. What is left of keys has 22 bits always. Without the
kernels (`launching`) `delta` stays with torch, and so do gradients where every state has its own decay.
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
CARD = 132  # programs that run at once where each has most of a multiprocessor's shared memory
TOGETHER = 1 << 14  # entries of two states that `back` multiplies at a time


class Cut(NamedTuple):
    """How a kernel is run.

    Attributes:
        columns: of a head that a program takes at a time.
        warps: of a program.
        stages: loads that are under way.
        turned: whether a walk holds its matrices transposed.
    """

    columns: int
    warps: int
    stages: int
    turned: bool = False


CUTS = {
    "solve": Cut(64, 4, 1),
    "walk": Cut(32, 4, 3),
    "walk_back": Cut(32, 4, 2),
    "back": Cut(128, 8, 1),
    "solve in parts": Cut(64, 4, 1),
    "walk in parts": Cut(32, 4, 2),
    "walk_back in parts": Cut(32, 4, 2),
    "back in parts": Cut(32, 8, 1),
}


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
            plan = _plan(*terms, state, "highest")
            keys, _, P = plan.walk_back(plan.solve(*terms, None), None, P)
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

    def sizes(self, kernel: str) -> dict[str, Any]:
        """The constants that a kernel is compiled for."""
        columns, warps, stages, turned = CUTS[kernel + " in parts" * self.scaled]
        tiles: dict[str, Any] = {"N": self.state, "STATES": _power(self.state), "Q": self.steps}
        # Two warps have no wgmma, nor have 32 rows: in Triton 3.6 it takes wrong rows where a product of 64 columns
        # enters one of fewer.
        if kernel != "solve":
            small = min(tiles["STATES"], self.steps) < STEPS
            columns = min(_power(self.width), 32 if small else columns)
            warps = 2 if tiles["STATES"] < STEPS or columns < 32 else warps
            tiles |= {"P": self.width, "WIDTH": columns}
        if kernel != "back":
            tiles["BY_STATE"] = self.by_state
            if kernel != "solve":
                tiles["TURNED"] = turned
        how = {"EVEN": self.length % self.steps == 0, **self.precision.sizes}
        return {**tiles, **how, "num_warps": warps, "num_stages": stages}

    @property
    def scaled(self) -> bool:
        return self.precision.dtype == torch.float16

    @property
    def kept(self) -> torch.dtype:
        """What r, x̄ and the chunks' states are kept in."""
        return torch.float32 if self.scaled else self.precision.dtype

    def rows(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return like.new_empty(self.batch, self.length, self.heads, self.width, dtype=dtype or self.kept)

    def solve(self, log_a: Tensor, beta: Tensor, b: Tensor, c: Tensor | None) -> _Solved:
        """What `walk` multiplies by; without c what `walk_back` does where nothing is read."""
        each, square = (self.batch, self.chunks, self.heads), (self.precision.terms, self.steps, self.steps)
        T = b.new_empty(*each, *square, dtype=self.precision.dtype)
        A = T if c is None else torch.empty_like(T)
        units = b.new_empty(2, *each, dtype=torch.float32)
        weights = units.new_empty(3, *each, self.steps)
        D = units.new_empty(*each, self.state if self.by_state else 1)
        sides = self.heads if self.by_state else self.groups
        k_in = k_out = b
        c_in = b if c is None else c
        if self.scaled or self.by_state:
            size = (self.precision.terms, self.batch, self.length, sides, self.state)
            k_in = k_out = b.new_empty(size, dtype=T.dtype)
            k_out = torch.empty_like(k_in) if self.by_state else k_in
            c_in = k_in if c is None else torch.empty_like(k_in)
        plane = self.batch * self.length * sides * self.state
        given = b if c is None else c
        bound(kernels.loaded().solve, **self.sizes("solve"), READ=c is not None, LEFT=c is None)(
            self.programs,
            *(log_a, beta, b, given, T, A, weights, units, D, k_in, k_out, c_in),
            *(self.length, self.heads, self.groups, self.chunks, plane, *b.stride()[:3], *given.stride()[:3]),
        )
        return _Solved(k_in, k_out, c_in, T, A, weights, units, D)

    def walk(self, solved: _Solved, x: Tensor, initial: Tensor, *, read: bool) -> tuple[Tensor, ...]:
        """The outputs and the last state, or, where nothing is read, r of every step and the states before chunks."""
        first = _whole(initial)
        last = torch.empty_like(first)
        y = x.new_empty(x.shape) if read else self.rows(x)
        states = first if read else y.new_empty(self.batch, self.chunks, self.heads, self.width, self.state)
        self._walk("walk", solved, (x, first, states, y, y, last), x, READ=read, KEEP=not read)
        return y, last if read else states

    def walk_back(self, solved: _Solved, grad_y: Tensor | None, last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x̄ of every step, the adjoints after chunks, and that of the first state; ū, and no adjoints, where nothing
        is read."""
        last = _whole(last)
        first = torch.empty_like(last)
        found = self.rows(last)
        y, adjoints = found, last
        if grad_y is not None:
            y, adjoints = grad_y, found.new_empty(self.batch, self.chunks, self.heads, self.width, self.state)
        self._walk("walk_back", solved, (y, last, adjoints, found, first), y, READ=grad_y is not None)
        return found, adjoints, first

    def _walk(self, kernel: str, solved: _Solved, terms: tuple[Tensor, ...], rows: Tensor, **how: bool) -> None:
        sizes = self.sizes(kernel)
        programs = self.batch * self.heads * -(-self.width // sizes["WIDTH"])
        if programs > CARD:  # two at a time on a multiprocessor gain more than loads further ahead
            sizes["num_stages"] = min(sizes["num_stages"], 2)
        k, c = solved.k_in, solved.c_in
        sides, plane = k.shape[-2], k.stride(0) if k.ndim == 5 else 0
        bound(getattr(kernels.loaded(), kernel), **sizes, **how)(
            (programs,),
            *(*solved, *terms, self.batch, self.length, self.heads, sides, self.chunks, plane),
            *(*k.stride()[-4:-1], *c.stride()[-4:-1], *rows.stride()[:3]),
        )

    def back(
        self, terms: tuple[Tensor, ...], R: Tensor, xbar: Tensor, states: Tensor, adjoints: Tensor
    ) -> list[Tensor]:
        """The gradients of log a, β, b and c."""
        log_a, beta, b, c, grad_y = terms
        grads = [torch.empty_like(log_a), torch.empty_like(beta)]
        for _ in "bc":
            grads.append(b.new_empty(*beta.shape, self.state, dtype=self.kept))
        sizes = self.sizes("back")
        bound(kernels.loaded().back, **sizes, SUM=min(_power(self.width), TOGETHER // sizes["STATES"]))(
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


def _power(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def _plan(log_a: Tensor, beta: Tensor, b: Tensor, width: int, precision: str) -> _Plan:
    (batch, length, heads), (groups, state) = beta.shape, b.shape[2:]
    return _Plan(batch, length, heads, groups, width, state, log_a.shape[-1] > 1, PRECISIONS[precision])


def _whole(t: Tensor) -> Tensor:
    """The term in float32 and in one piece."""
    return t.float().contiguous()


def _given(precision: str, log_a: Tensor, beta: Tensor, b: Tensor, c: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """The terms as the kernels take them: b and c of the type of products that take them whole."""
    if precision == "medium":
        b, c = b.bfloat16(), c.bfloat16()
    return _whole(log_a), _whole(beta), _columns(b), _columns(c), _columns(x)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_a, beta, b, c, x, initial, precision) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        plan = _plan(log_a, beta, b, x.shape[-1], precision)
        terms = log_a, beta, b, c, x, initial
        log_a, beta, b, c, x = _given(precision, log_a, beta, b, c, x)
        with on(x):
            solved = plan.solve(log_a, beta, b, c)
            y, final = plan.walk(solved, x, initial, read=True)
        ctx.save_for_backward(*terms, *solved)
        ctx.precision = precision
        return y, final.to(initial.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
        terms, solved = ctx.saved_tensors[:6], _Solved(*ctx.saved_tensors[6:])
        log_a, beta, b, c, x, initial = terms
        plan = _plan(log_a, beta, b, x.shape[-1], ctx.precision)
        log_a, beta, b, c, x = _given(ctx.precision, log_a, beta, b, c, x)
        grad_y = torch.zeros_like(x) if grad_y is None else _columns(grad_y)
        grad_final = torch.zeros_like(initial) if grad_final is None else grad_final
        with on(x):
            R, states = plan.walk(solved, x, initial, read=False)
            grad_x, adjoints, grad_initial = plan.walk_back(solved, grad_y, grad_final)
            grads = plan.back((log_a, beta, b, c, grad_y), R, grad_x, states, adjoints)
        found = (*grads, grad_x, grad_initial)
        return *(g.to(t.dtype) for g, t in zip(found, terms, strict=True)), None


kernels = Kernels(
    "ssmscope.scans.delta_fused_kernels",
    "the Triton delta rule",
    lambda one: scan(one, one[..., 0], one, one, one, one),
)
available, why_not = kernels.available, kernels.why_not
