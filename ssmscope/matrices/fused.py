"""The mean implicit attention of a layer with a decay per state by Triton kernels (`fused_kernels`), for float32 on a
GPU; silent when absent.

The sum over channels and states is a matrix product, of factors which are made for some channels after the other.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import get_ident
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ssmscope.errors import InputError, did_you_mean
from ssmscope.matrices.fused_plan import TABLES, Plan
from ssmscope.matrices.terms import Around, diagonals
from ssmscope.scans import native
from ssmscope.scans.driver import Beside
from ssmscope.scans.launching import Bound, Kernels, Known, are_aligned, bound, compiled_ahead, on, watched

PRECISIONS = {"highest": 2, "high": 1}  # the parts of 11 bits of which the operands of the products are
TILE = 128  # rows of the tiles; their sums fill half the registers of a GPU's processor
NEAR = 16  # rows of the triangles on the diagonal
CHANNELS = 64  # in one step of the tiles' products, times one state
WIDE = 32  # in one step of what is on the diagonal
TRIANGLES = 4  # in a program
ROWS = 32  # of a tile whose factors a program makes
LAUNCH: dict[str, dict[str, Any]] = {
    "sums": {"CHANNELS": 32, "num_warps": 4},
    "starts": {"CHANNELS": 32},
    "near": {"num_warps": 4},
    "levels": {"num_warps": 4, "num_stages": 1},
    "factors": {"num_warps": 4, "UNROLLED": 4},
}
PRODUCTS: dict[int, dict[str, Any]] = {1: {"num_warps": 8, "num_stages": 6}, 2: {"num_warps": 8, "num_stages": 5}}
HIGH = {1: 2, 2: 1}  # tiles above each other that are made together
STAGES = ((200 * 2**10, 6), (140 * 2**10, 4), (0, 1))  # the most that they have from so many bytes of shared memory on
UNROLLED = 1  # states of a step of `levels`
FILL = 132  # programs of the tiles that run at once
SPREAD = 2  # of them that each processor runs, one after the other
SHARES = 4  # the most matrices' worth of memory that sums of shares of the channels may take
ROOM = 2**30  # bytes that the factors may take, if those of one chunk of channels and one sequence do not take more
THREADS = 64  # whose launches are kept
TOGETHER = 64  # tiles whose sums of steps are summed at a time
FLOOR = -126.0  # float32 knows no 2^-127 but for subnormal numbers
MOST = 256  # states of a channel


def applicable(
    x: Tensor, b: Tensor, c: Tensor, delta: Tensor | None, A: Tensor | None, left: Tensor | None, right: Tensor | None
) -> bool:
    """Whether `mean` takes these terms: width 1, a decay per state given by Δ and A, float32, on one GPU, no gradients.

    A may be positive (a state then grows); the matrix must be finite. The decay must be exp(Δ A), not the expected one.
    """
    if x.device.type != "cuda" or x.shape[3] != 1 or delta is None or A is None:
        return False
    state = b.shape[3]
    if A.shape[-1] != state or not 1 <= state <= MOST or not x.numel():
        return False
    terms = [t for t in (b, c, delta, A, left, right) if t is not None]
    if not all(t.device == x.device and native.is_plain(t, "cuda") for t in terms):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in terms):
        return False
    return not torch.compiler.is_compiling() and available(x.device)


def mean(
    b: Float[Tensor, "batch length bc_groups state"],
    c: Float[Tensor, "batch length bc_groups state"],
    delta: Float[Tensor, "batch length heads"],
    A: Float[Tensor, "heads state"],
    left: Float[Tensor, "batch length heads"] | None = None,
    right: Float[Tensor, "batch length heads"] | None = None,
    *,
    groups: int = 1,
    precision: str = "highest",
) -> Float[Tensor, "batch groups length length"]:
    """The mean over each group's channels d of left_td right_sd Σ_n c_tn exp(A_dn Σ_{s<r≤t} Δ_rd) Δ_sd b_sn for s ≤ t,
    0 above the diagonal (Differential Mamba, Eq. 8), where `applicable`.

    Head d reads group d // (heads / bc_groups) of b and c, and belongs to group d // (heads / groups) of the result.
    Besides the result it takes 4 tables of (batch, length, heads), at most twice `SHARES` times the result's memory,
    and `ROOM`. The same numbers in every run on the same kind of GPU. Δ must be finite and ≥ 0, and a factor c · left
    below 2^31.

    `precision`, as of torch's products, says of how many parts the tensor cores read the factors, which are made in
    float32: "highest" of two (22 bits), "high" of one (11 bits, as TF32). Sums, and pairs of steps within triangles of
    `NEAR` rows on the diagonal, are of float32 always.

    Raises:
        InputError: for an unknown precision.
        ValueError: when the groups do not divide the heads.
    """
    if precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise InputError(f"unknown precision {precision!r}; known are {known}{did_you_mean(precision, PRECISIONS)}")
    batch, length, heads = delta.shape
    if groups < 1 or heads % groups:
        raise ValueError(f"{groups} groups do not divide {heads} heads")
    out = delta.new_empty(batch, groups, length, length)
    if not out.numel():
        return out
    shape = (length, heads, b.shape[3], groups, b.shape[2], PRECISIONS[precision])
    together = _plan(1, *shape, *_sizes()).together
    with on(delta):
        if together >= batch:
            _make(out, _plan(batch, *shape, *_sizes()), b, c, delta, A, left, right)
        else:
            for terms in zip(*(_parts(t, together, batch) for t in (out, b, c, delta, left, right)), strict=True):
                part, b_part, c_part, delta_part, *around = terms
                _make(part, _plan(len(part), *shape, *_sizes()), b_part, c_part, delta_part, A, *around)
    return out


def _parts(t: Tensor | None, size: int, batch: int) -> Sequence[Tensor | None]:
    return [None] * -(-batch // size) if t is None else t.split(size)


def takes(r: Any, around: Around) -> bool:
    """Whether `whole` makes the mean matrix of a recurrence with what stands around it."""
    if getattr(r, "beta", None) is not None or r.expected or r.shape[3] != 1:
        return False
    left = None if around.left is None else around.left.squeeze(-1)
    right = None if around.taps is None else around.taps[:, :, 0].squeeze(-1)
    if (r.D is not None and r.D.requires_grad) and torch.is_grad_enabled():
        return False
    return applicable(r.x, r.b, r.c, r.delta, r.A, left, right)


def whole(
    r: Any, groups: int, skip: bool, around: Around, precision: str | None = None
) -> Float[Tensor, "batch groups length length"]:
    """`mean` of a recurrence, with D on the diagonal for `skip` and with what stands around it, where `takes` says so.

    Every tap is a matrix of its own: what the input at s spreads to step s + i is the column s + i of the recurrence's.
    The default precision is that of torch's own products, `torch.get_float32_matmul_precision()`; "medium" is "high".
    """
    precision = precision or ("highest" if torch.get_float32_matmul_precision() == "highest" else "high")
    length, heads = r.shape[1:3]
    left = None if around.left is None else around.left.squeeze(-1)
    terms = (r.b, r.c, r.delta, r.A, left)
    if around.taps is None:
        out = mean(*terms, groups=groups, precision=precision)
    else:
        out = r.b.new_zeros(len(r.b), groups, length, length)
        for i in range(around.reach):
            arriving = torch.nn.functional.pad(around.taps[:, : length - i, i].squeeze(-1), (0, 0, i, 0))
            each = mean(*terms, arriving.contiguous(), groups=groups, precision=precision)
            out[..., : length - i] += each[..., i:]
    if skip and r.D is not None:
        for i, added in enumerate(diagonals(r, around)):
            by_group = added.unflatten(-1, (groups, heads // groups)).mean(-1)
            out.diagonal(-i, 2, 3).add_(by_group.transpose(1, 2))
    return out


def _sizes() -> tuple[int, ...]:
    return TILE, NEAR, CHANNELS, WIDE, FILL, SHARES, ROOM, SPREAD


@functools.lru_cache(maxsize=256)
def _plan(*sizes: int) -> Plan:
    return Plan(*sizes)


TERMS = ("out", "b", "c", "delta", "A", "factor", "gate")
PLACES = {name: place for place, name in enumerate((*TERMS, *TABLES))}
"""Where each tensor stands among those that the kernels take."""
DELTA, WRITTEN = PLACES["delta"], PLACES["written"]


class _Launch(NamedTuple):
    """A kernel with all that its call needs but the tensors, which are chosen by `of` from all of them."""

    kernel: Bound
    grid: tuple[int, ...]
    of: Callable[[Sequence[Any]], tuple[Any, ...]]
    numbers: tuple[float, ...]


@dataclass(frozen=True)
class _Launches:
    """In order: those whose tables all others read, those beside the ones that come then, and what waits for both."""

    first: list[_Launch] = field(default_factory=list)
    aside: list[_Launch] = field(default_factory=list)
    then: list[_Launch] = field(default_factory=list)
    last: list[_Launch] = field(default_factory=list)
    known: dict[int, _Known | None] = field(default_factory=dict)
    """By thread, once it has launched them of tensors that start where most do; None where triton does."""


class _Known(NamedTuple):
    """`_Launches` in a thread that has made them before, of tensors known by their places in memory."""

    parts: list[list[tuple[Known, Callable[[Sequence[Any]], tuple[Any, ...]]]]]
    beside: Beside

    def __call__(self, places: list[int], stream: int) -> None:
        """All of them; those aside on a stream of their own."""
        first, aside, then, last = self.parts
        for launch, of in first:
            launch(of(places), stream)
        self.beside.begin(stream)
        for launch, of in aside:
            launch(of(places), self.beside.stream)
        for launch, of in then:
            launch(of(places), stream)
        self.beside.end(stream)
        for launch, of in last:
            launch(of(places), stream)


def _make(out: Tensor, plan: Plan, b: Tensor, c: Tensor, delta: Tensor, A: Tensor, left, right) -> None:
    """`mean` into `out`."""
    given = b, c, delta, A, delta if right is None else right, delta if left is None else left
    as_it_is = right is None and delta.is_contiguous()
    around = left is not None, right is not None, not as_it_is
    launches = _launches(plan, delta.device, around, tuple([t.stride() for t in given]))
    offsets, size = plan.places
    space = delta.new_empty(size, dtype=torch.uint8)
    start, own, thread = space.data_ptr(), [t.data_ptr() for t in (out, *given)], get_ident()
    usual = are_aligned((*own, start)) and not watched()
    known = launches.known.get(thread) if usual else None
    if known is not None:
        places = own + [start + offset for offset in offsets]
        if as_it_is:
            places[WRITTEN] = places[DELTA]
        known(places, torch._C._cuda_getCurrentRawStream(delta.device.index))
        return
    tables = [
        space[at:][: dtype.itemsize * size].view(dtype) for at, (dtype, size) in zip(offsets, plan.tables.values())
    ]
    tensors = [out, *given, *tables]
    if as_it_is:
        tensors[WRITTEN] = delta
    calls = [
        [(launch, (*launch.of(tensors), *launch.numbers)) for launch in part]
        for part in (launches.first, launches.aside, launches.then, launches.last)
    ]

    def run() -> None:
        for launch, terms in itertools.chain(*calls):
            launch.kernel(launch.grid, *terms)

    compiled_ahead(plan, run)
    run()
    if usual and thread not in launches.known:
        if len(launches.known) >= THREADS:
            launches.known.clear()
        launches.known[thread] = _known(calls, delta.device.index)


def _known(calls: Sequence[Sequence[tuple[_Launch, tuple[Any, ...]]]], index: int | None) -> _Known | None:
    """Calls that were made in this thread as it can make them again; None where triton makes one of them."""
    parts = []
    for part in calls:
        found = [(launch.kernel.known(launch.grid, *terms), launch.of) for launch, terms in part]
        parts.append([(each, of) for each, of in found if each is not None])
        if len(parts[-1]) < len(part):
            return None
    return _Known(parts, Beside(_stream(index).cuda_stream))


@functools.lru_cache(maxsize=256)
def _launches(
    plan: Plan, device: torch.device, around: tuple[bool, bool, bool], strides: tuple[tuple[int, ...], ...]
) -> _Launches:
    """What `_make` launches for tensors of such strides. `around` says whether there is something on the left, on the
    right, and whether what is written has to be."""
    kernel = kernels.loaded()
    heads, groups, tile, state = plan.heads, plan.groups, plan.tile, plan.state
    left, right, writing = around
    of_b, of_c, of_delta, of_A, of_factor, of_gate = strides
    cut = (groups, heads // groups, heads // plan.bc_groups, plan.segment)
    found = _Launches()

    def add(where: list[_Launch], kernel: Bound, grid: tuple[int, ...], names: str, *numbers: float) -> None:
        chosen = operator.itemgetter(*(PLACES[name] for name in names.split()))
        where.append(_Launch(kernel, grid, chosen, numbers))

    blocks = {name: -(-heads // LAUNCH[name]["CHANNELS"]) for name in ("sums", "starts")}
    add(
        found.first,
        bound(kernel.sums, BLOCK=tile, RIGHT=right, WRITTEN=writing, **LAUNCH["sums"]),
        (plan.tiles, blocks["sums"], plan.batch),
        "delta factor since rest until written totals",
        *(plan.length, heads, *of_delta, *of_factor),
    )
    add(
        found.first,
        bound(kernel.prepare, N=state, ROWS=64, num_warps=2),
        (-(-max(plan.rows, heads) // 64), plan.batch * plan.bc_groups),
        "b c A read wrote most decays slowest",
        *(plan.length, plan.rows, heads, plan.bc_groups, math.log2(math.e), *of_b, *of_c, *of_A),
    )

    common: dict[str, Any] = {"N": state, "LEFT": left}
    channels, count = plan.cut(plan.wide)
    shares = (*plan.strip_steps, plan.length, heads, *cut, count, plan.strip_splits, plan.rows, groups / heads)
    sizes: dict[str, Any] = {"TILE": tile, "BD": channels, "NEAR": plan.near}
    add(
        found.aside,
        bound(kernel.near, ROWS=TRIANGLES, **common, **sizes, **LAUNCH["near"]),
        (-(-plan.length // (TRIANGLES * plan.near)) * plan.strip_splits, plan.matrices),
        "delta written decays wrote read gate strip",
        *(*shares, *of_delta, *of_gate),
    )
    if plan.inner:
        sizes |= {"UNROLLED": math.gcd(state, UNROLLED), "TERMS": plan.terms}
        add(
            found.aside,
            bound(kernel.levels, **common, **sizes, **LAUNCH["levels"]),
            (plan.tiles * plan.strip_splits, plan.inner, plan.matrices),
            "since rest written decays wrote read slowest most gate strip",
            *(*shares, *of_gate),
        )

    if plan.below:
        starts = bound(kernel.starts, STEP=TOGETHER, **LAUNCH["starts"])
        add(found.then, starts, (blocks["starts"], plan.batch), "totals before", plan.tiles, heads)
        channels, size = plan.cut(plan.most)[0], min(ROWS, tile)
        common |= {"STATES": min(16, 1 << (state - 1).bit_length()), "BD": channels, "FLOOR": FLOOR}
        bounds = bound(kernel.bounds, ROWS=4, WIDE=256, **common)
        common |= {"TERMS": plan.terms, "TILE": tile, "HIGH": tile * HIGH[plan.terms]}
        factors = bound(kernel.factors, ROWS=size, **common, **LAUNCH["factors"])
        common = {name: common[name] for name in ("BD", "TERMS", "TILE", "HIGH")}
        common |= {"PACKED": plan.splits > 1, **_product_launch(device.index, plan.terms)}
        for chunks in plan.passes:
            which = (plan.length, heads, *cut, chunks.start)
            add(
                found.then,
                bounds,
                (plan.below + -(-plan.length // 4) + plan.levels * plan.tiles, plan.matrices),
                "since until written before decays slowest most gate units shifts found counts",
                *(*which, len(chunks), plan.tiles, plan.rows, *of_gate),
            )
            add(
                found.then,
                factors,
                (plan.rows // size, len(chunks), plan.levels * plan.matrices),
                "since until written before decays wrote read gate units shifts table",
                *(*which, plan.tiles, plan.levels, plan.rows, plan.factors // plan.terms, *of_gate),
            )
            add(
                found.then,
                bound(kernel.products, AGAIN=chunks.start > 0, **common),
                (plan.works[HIGH[plan.terms]] * plan.splits, plan.matrices),
                f"table found counts units shifts cuts {'packed' if plan.splits > 1 else 'out'}",
                *(*plan.steps, plan.length, plan.tiles, plan.levels, plan.rows, len(chunks) * state, plan.splits),
                *(plan.wanted, groups / heads, plan.factors // plan.terms),
            )
    add(
        found.last,
        bound(kernel.gather, TILE=tile, ROWS=8),
        (plan.tiles**2 * (tile // 8), plan.matrices),
        "packed strip cuts out",
        *(*plan.steps, *plan.strip_steps, plan.length, plan.splits if plan.splits > 1 else 0, plan.strip_splits),
    )
    return found


@functools.cache
def _stream(index: int | None) -> torch.cuda.Stream:
    return torch.cuda.Stream(index)


@functools.cache
def _product_launch(index: int | None, terms: int) -> dict[str, Any]:
    """How `products` is launched on this GPU."""
    how = PRODUCTS[terms]
    room = 0
    if index is not None:
        room = getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", 0)
    most = next(stages for size, stages in STAGES if room >= size)
    return how | {"num_stages": min(how["num_stages"], most)}


def _attempt(one: Tensor) -> None:
    """All kernels, with triangles of two rows: those of `NEAR` take triton some ten seconds."""
    one = one.new_ones(1, 2 * TILE, 1, 1)
    plan = replace(_plan(1, 2 * TILE, 1, 1, 1, 1, PRECISIONS["highest"], *_sizes()), near=2)
    with torch.no_grad(), on(one):
        _make(one.new_empty(1, 1, 2 * TILE, 2 * TILE), plan, one, one, one[..., 0], one[0, :1, 0], None, None)


kernels = Kernels("ssmscope.matrices.fused_kernels", "the fused attention", _attempt)
available, why_not = kernels.available, kernels.why_not
