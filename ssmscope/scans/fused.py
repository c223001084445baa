"""The scan with a decay per state by CUDA kernels (`fused.cu`), for float32 on a GPU; silent when absent.

The length is cut into chunks that run side by side where sequences and channels alone do not fill the GPU: a first pass
gives what each chunk does to a state, a second starts each from the states before it; where all chunks fit on the GPU
at once both are one launch. The forward pass keeps the states before every `TILE`-th step; the backward pass recomputes
what lies between. Without the kernels (`nvrtc`) `diagonal.scan` stays with torch.
"""

from __future__ import annotations

import functools
import itertools
import struct
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ssmscope.scans import native
from ssmscope.scans.building import switched_off
from ssmscope.scans.making import Layout, contiguous, maker
from ssmscope.scans.nvrtc import MARKS, ROOM, Launch, Launches, Program

TILE = 16  # steps between states that are kept, as in fused_terms.cu
SUB = 4  # steps whose states the gradient holds in registers, as in fused_terms.cu
MOST = 512  # states of a channel; with more, torch is as fast
LEAST = 4  # tiles of a chunk
SHORT = 16  # tiles of a chunk: with more, the GPU takes longer than the host
# `Terms` of fused_terms.cu: addresses and strides of both passes, of the gradient, places in the scratch, and sizes
_BOTH, _BACK, _SIZES = struct.Struct("=27q"), struct.Struct("=39q"), struct.Struct("=4q8i")
FLOAT = torch.float32
FORWARD = tuple(f"run_forward<{what}>" for what in range(8))  # 1 to keep states, 2 to sum decays, 4 in one launch
BACKWARD = ("run_backward<false>", "run_backward<true>")


def applicable(x: Tensor, b: Tensor, c: Tensor, initial: Tensor | None, delta: Tensor, A: Tensor) -> bool:
    """Whether `scan` takes these terms: width 1, a decay per state, float32, on one GPU."""
    state = b.shape[3]
    if not x.is_cuda or x.shape[3] != 1 or A.shape[-1] != state or torch.compiler.is_compiling():
        return False
    terms = (x, b, c, delta, A) if initial is None else (x, b, c, delta, A, initial)
    device = x.device
    return native.are_plain(terms, device) and not switched_off() and _takes(state, device)


def adds_skip(D: Tensor, x: Tensor, *terms: Tensor | None) -> bool:
    """Whether `scan` of these terms adds D x_t too: float32, and no gradients are asked for."""
    return native.are_plain((D,), x.device) and not differentiated(D, x, *terms)


def differentiated(*terms: Tensor | None) -> bool:
    """Whether gradients are asked for."""
    if torch.is_grad_enabled():
        for t in terms:
            if t is not None and t.requires_grad:
                return True
    return False


def scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    initial: Tensor | None,
    delta: Tensor,
    A: Tensor,
    D: Tensor | None = None,
    *,
    expected: bool,
    retention: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `diagonal.scan`, where `applicable`; the same numbers in every run on the same kind of GPU. With
    `D` only where `adds_skip`.

    A decay below the smallest normal float32 is 0.
    """
    terms = (x, b, c, initial, delta, A)
    if differentiated(*terms):
        return _record(*terms, expected, retention)
    y, final, kept, _ = _forward(_pass(x, b, 2 * retention, expected), *terms, D, retention, keep=False)
    return y, final, kept


class _Plan(NamedTuple):
    """How a scan is cut: a warp has `cd` channels a lane, `sn` states of each, and `ln` lanes for a channel's states;
    a block of `warps` takes one of `chunks` of `tiles` tiles of one of `blocks` parts of a group's channels."""

    batch: int
    length: int
    heads: int
    groups: int
    state: int
    cd: int
    sn: int
    ln: int
    warps: int
    blocks: int
    chunks: int
    tiles: int

    @property
    def all_tiles(self) -> int:
        return -(-self.length // TILE)

    @property
    def states(self) -> int:
        """Of a channel, with those that pad them."""
        return self.sn * self.ln

    @property
    def rows(self) -> int:
        """Of sums of decays: a warp's share of the channels each."""
        return self.blocks * self.warps * self.groups

    @property
    def programs(self) -> int:
        return self.batch * self.chunks * self.groups * self.blocks

    @property
    def marks(self) -> int:
        """What a single launch counts with, as in fused_terms.cu."""
        return 2 + self.groups * (self.batch * self.chunks + self.blocks) + self.programs


def _shared(backward: bool, cd: int, sn: int, ln: int, warps: int) -> int:
    """Bytes of shared memory of a block."""
    states, views = sn * ln, 3 if backward else 2
    tiles = 2 * TILE * (views * (cd * 32 // ln * warps + 4) + 2 * states)
    laid = (TILE // SUB * cd * sn * 32 + 2 * TILE * states) * warps if backward else TILE * 33 * warps
    return 4 * (tiles + laid)


def _lanes(state: int) -> tuple[int, int, int, int]:
    """`cd`, `sn`, `ln` and `warps` of a plan for many channels of so many states."""
    padded = 1 << max(state - 1, 3).bit_length()
    sn = max(4, padded // 32)
    ln = padded // sn
    return min(16 // sn, ln), sn, ln, max(1, min(4, 512 // padded))


@functools.cache
def _takes(state: int, device: torch.device) -> bool:
    """Whether channels of so many states are scanned on this GPU: a block of the backward pass has room there."""
    if not 1 <= state <= MOST or not available(device):
        return False
    properties = torch.cuda.get_device_properties(device)
    return _shared(True, *_lanes(state)) <= getattr(properties, "shared_memory_per_block_optin", 48 * 2**10)


class _Pass(NamedTuple):
    """One pass over terms of some sizes: how it is cut, its kernels, whether they have anything to do, the pass that
    goes back over the states kept, and how what it writes lies in memory: x or y, Δ, A, b or c, the state, the states
    kept, the sums of decays."""

    plan: _Plan
    launches: Launches
    runs: bool
    back: _Pass | None
    wide: Layout
    steps: Layout
    rates: Layout
    narrow: Layout
    state: Layout
    starts: Layout
    kept: Layout


def _pass(x: Tensor, b: Tensor, what: int | None, expected: bool) -> _Pass:
    """Of the forward kernel that does so much, or of the backward one, and of what comes before and after it."""
    return _planned(x.shape, b.shape, what, expected, x.device)


@functools.lru_cache(256)
def _planned(shape: torch.Size, narrow: torch.Size, what: int | None, expected: bool, device: torch.device) -> _Pass:
    backward = what is None
    entry, joined = BACKWARD if what is None else (FORWARD[what], FORWARD[what + 4])
    (batch, length, heads, _), (_, _, groups, state) = shape, narrow
    plan = _plan(batch, length, heads, groups, state, backward, _processors(device))
    entries = [f"run_ends<{str(backward).lower()}>"] if plan.chunks > 1 else []
    entries += [entry, "run_sums"] if backward else [entry]
    between = plan.chunks * plan.batch * plan.heads * plan.states if plan.chunks > 1 else 0
    of_A, of_b = (plan.chunks * batch * heads * state, plan.blocks * narrow.numel()) if backward else (0, 0)
    # what chunks add to states, how states decay in them, and the parts of Ā, b̄ and c̄
    *places, scratch = itertools.accumulate((between, between, of_A, of_b, of_b))
    sizes = _SIZES.pack(*places, *plan[:5], plan.blocks, plan.chunks, plan.tiles)
    at_once = len(entries) > 1 and scratch <= ROOM and _fits(plan, backward, _processors(device))
    each = [_launch(plan, one, expected) for one in ([joined] if at_once else entries)]
    terms = _BACK if backward else _BOTH
    launches = Launches(each, terms, sizes, places=_BACK.size, scratch=scratch, counted=at_once)
    back = _planned(shape, narrow, None, expected, device) if what is not None and what % 2 else None
    runs = plan.programs > 0 < plan.length
    made = ((*shape,), shape[:3], (heads, state), (*narrow,), (batch, heads, 1, state))
    kept = ((plan.all_tiles, batch, heads, plan.states), (plan.rows, batch, length))
    return _Pass(plan, launches, runs, back, *(contiguous(*one) for one in made + kept))


def _fits(plan: _Plan, backward: bool, processors: int) -> bool:
    """Whether all blocks run at the same time, and so shortly that a launch more would count."""
    at_once = plan.programs * plan.warps <= (8 if backward else 16) * processors
    return at_once and plan.tiles <= SHORT and plan.marks <= MARKS


def _launch(plan: _Plan, entry: str, expected: bool) -> Launch:
    defines = f"ENTRY={entry}", f"CD={plan.cd}", f"SN={plan.sn}", f"LN={plan.ln}", f"WARPS={plan.warps}"
    backward = entry in BACKWARD
    shared = _shared(backward, plan.cd, plan.sn, plan.ln, plan.warps)
    blocks = plan.programs
    if entry == "run_sums":
        numbers = (plan.heads + 2 * plan.batch * plan.length * plan.groups) * plan.state
        shared, blocks = 0, -(-numbers // (32 * plan.warps))
    room = (8 if backward else 16) // plan.warps
    return Launch((*defines, f"EXPECTED={expected:d}", f"BLOCKS={room}"), blocks, 32 * plan.warps, shared)


def _plan(batch: int, length: int, heads: int, groups: int, state: int, backward: bool, processors: int) -> _Plan:
    """Chunks where there are too few warps without; fewer channels a lane where chunks would get too short."""
    share, tiles = heads // groups, max(1, -(-length // TILE))
    cd, sn, ln, warps = _lanes(state)
    while True:
        blocks = -(-share // (cd * 32 // ln * warps))
        side_by_side = max(1, batch * groups * blocks * warps)
        chunks = _chunks(side_by_side, tiles, backward, processors)
        if cd == 1 or 3 * side_by_side >= 8 * processors or side_by_side * chunks >= 6 * processors:
            break
        cd //= 2
    each = -(-tiles // chunks)
    return _Plan(batch, length, heads, groups, state, cd, sn, ln, warps, blocks, -(-tiles // each), each)


def _chunks(warps: int, tiles: int, backward: bool, processors: int) -> int:
    """Into how many chunks to cut the tiles of so many warps.

    Chunks take a second pass over the input. Forward that pays with less than three warps a processor, and then in
    about 15, of which it holds 16. Backward a processor holds 8 warps, and the second pass adds less than a third to
    the work; chunks make the last turn shorter. These are fits to times on an H200.
    """
    most = max(1, tiles // LEAST)
    if not backward:
        return 1 if 3 * warps >= 8 * processors else min(15 * processors // warps, most)

    def cost(chunks: int) -> float:
        turns = -(-warps * chunks // (8 * processors))
        return turns * (-(-tiles // chunks) + 1.5) * (1.0 if chunks == 1 else 1.3)

    return min(range(1, min(most, 8 * processors) + 1), key=cost)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _at(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _forward(run: _Pass, x, b, c, initial, delta, A, D, retention: bool, keep: bool):
    """y, the final state, the mean decays or None, and the states before every TILE-th step or None."""
    A = A.contiguous()
    initial, D = None if initial is None else initial.contiguous(), None if D is None else D.contiguous()
    new = maker(x)
    y, final = new(*run.wide, FLOAT), new(*run.state, FLOAT)
    starts = new(*run.starts, FLOAT) if keep else None
    kept = new(*run.kept, FLOAT) if retention else None
    if run.runs:
        terms = (
            x.data_ptr(), *x.stride(), delta.data_ptr(), *delta.stride(), 0,
            b.data_ptr(), *b.stride(), c.data_ptr(), *c.stride(), A.data_ptr(), _at(D), _at(initial),
            y.data_ptr(), final.data_ptr(), _at(kept), _at(starts),
        )  # fmt: skip
        kernels.launch(run.launches, terms, x.device)
    elif initial is None:
        final.zero_()
    else:
        final.copy_(initial)
    return y, final, kept.sum(0) if kept is not None else None, starts


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b, c, initial, delta, A, expected, retention):
        run = _pass(x, b, 1 + 2 * retention, expected)
        y, final, kept, starts = _forward(run, x, b, c, initial, delta, A, None, retention, keep=True)
        ctx.save_for_backward(x, b, c, delta, A, starts)
        ctx.back = run.back
        ctx.set_materialize_grads(False)
        if kept is not None:
            ctx.mark_non_differentiable(kept)
        return y, final, kept

    @staticmethod
    def backward(ctx, grad_y, grad_final, _):
        return (_refused if torch.is_grad_enabled() else _backward)(ctx, grad_y, grad_final)


# `apply` as it is without functorch, of which `applicable` takes no tensors
_record = super(torch.autograd.Function, _Scan).apply


def _backward(ctx, grad_y, grad_final):
    x, b, c, delta, A, starts = ctx.saved_tensors
    run, new, A = ctx.back, maker(x), A.contiguous()
    grad_x, grad_delta, grad_A = new(*run.wide, FLOAT), new(*run.steps, FLOAT), new(*run.rates, FLOAT)
    grad_b, grad_c = new(*run.narrow, FLOAT), new(*run.narrow, FLOAT)
    asked = ctx.needs_input_grad[3]
    if not run.runs:
        zeros = (g.zero_() for g in (grad_x, grad_b, grad_c))
        return *zeros, grad_final if asked else None, grad_delta.zero_(), grad_A.zero_(), None, None
    grad_y = x.new_zeros(()).expand(x.shape) if grad_y is None else grad_y
    grad_final = None if grad_final is None else grad_final.contiguous()
    grad_initial = new(*run.state, FLOAT) if asked else None
    terms = (
        x.data_ptr(), *x.stride(), delta.data_ptr(), *delta.stride(), 0,
        b.data_ptr(), *b.stride(), c.data_ptr(), *c.stride(), A.data_ptr(), 0, 0, 0, 0, 0, starts.data_ptr(),
        grad_y.data_ptr(), *grad_y.stride(), _at(grad_final),
        grad_x.data_ptr(), grad_delta.data_ptr(), _at(grad_initial),
        grad_A.data_ptr(), grad_b.data_ptr(), grad_c.data_ptr(),
    )  # fmt: skip
    kernels.launch(run.launches, terms, x.device)
    return grad_x, grad_b, grad_c, grad_initial, grad_delta, grad_A, None, None


_refused = torch.autograd.function.once_differentiable(_backward)  # what it gives cannot be differentiated again


def _attempt(one: Tensor) -> None:
    states = one.expand(1, 1, 1, 16)  # as many as Mamba has
    terms = one, states, states, states, one[..., 0], -states[0, 0], None
    _forward(_pass(one, states, 0, False), *terms, False, keep=False)


def _least(one: Tensor) -> None:
    sums = Launch(("ENTRY=run_sums", "CD=4", "SN=4", "LN=4", "WARPS=4", "EXPECTED=0", "BLOCKS=2"), 1, 128, 0)
    work = Launches([sums], _BACK, _SIZES.pack(*[0] * 12), places=_BACK.size)
    kernels.launch(work, [0] * (_BACK.size // 8), one.device)


SOURCES = tuple(Path(__file__).with_name(name) for name in ("fused_terms.cu", "fused.cu"))
kernels = Program(SOURCES, "the CUDA scan", _attempt, _least)
available, why_not = kernels.available, kernels.why_not
