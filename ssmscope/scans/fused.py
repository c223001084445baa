"""The scan with a decay per state by CUDA kernels (`fused.cu`), for float32 on a GPU; silent when absent.

The length is cut into chunks that run side by side where sequences and channels alone do not fill the GPU: a first pass
gives what each chunk does to a state, a second starts each from the states before it. The forward pass keeps the states
before every `TILE`-th step; the backward pass recomputes what lies between. Without the kernels (`nvrtc`)
`diagonal.scan` stays with torch.
"""

from __future__ import annotations

import functools
import struct
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ssmscope.scans import native
from ssmscope.scans.launching import on
from ssmscope.scans.nvrtc import Program

TILE = 16  # steps between states that are kept, as in fused.cu
SUB = 4  # steps whose states the gradient holds in registers, as in fused.cu
MOST = 512  # states of a channel; with more, torch is as fast
LEAST = 4  # tiles of a chunk
_TERMS = struct.Struct("=41q8i")  # `Terms` of fused.cu


def applicable(x: Tensor, b: Tensor, c: Tensor, initial: Tensor, delta: Tensor, A: Tensor) -> bool:
    """Whether `scan` takes these terms: width 1, a decay per state, float32, on one GPU."""
    state = b.shape[3]
    if x.device.type != "cuda" or x.shape[3] != 1 or A.shape[-1] != state or not 1 <= state <= MOST:
        return False
    terms = (x, b, c, initial, delta, A)
    plain = all(t.device == x.device and native.is_plain(t, "cuda") for t in terms)
    return plain and not torch.compiler.is_compiling() and available(x.device) and _fits(state, x.device)


def adds_skip(D: Tensor | None, *terms: Tensor) -> bool:
    """Whether `scan` of these terms adds D x_t too: float32, and no gradients are asked for."""
    if D is None or D.device != terms[0].device or not native.is_plain(D, D.device.type):
        return False
    return not differentiated(D, *terms)


def differentiated(*terms: Tensor) -> bool:
    """Whether gradients are asked for."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in terms)


def scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    initial: Tensor,
    delta: Tensor,
    A: Tensor,
    D: Tensor | None = None,
    *,
    expected: bool,
    retention: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `diagonal.scan`, where `applicable`; the same numbers in every run on the same kind of GPU. with
    `D` only where `adds_skip`.

    A decay below the smallest normal float32 is 0.
    """
    terms = (x, b, c, initial, delta, A)
    if differentiated(*terms):
        y, final, kept = _Scan.apply(*terms, expected, retention)
        return y, final, kept if retention else None
    y, final, kept, _ = _forward(*terms, D, expected, retention, keep=False)
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

    def launch(self, entry: str, terms: bytes, expected: bool, device: torch.device) -> None:
        kernels.launch(*_launched(self, entry, expected), terms, device)


@functools.lru_cache(256)
def _launched(plan: _Plan, entry: str, expected: bool) -> tuple[tuple[str, ...], int, int, int]:
    """What `Program.launch` takes first."""
    defines = f"ENTRY={entry}", f"CD={plan.cd}", f"SN={plan.sn}", f"LN={plan.ln}", f"WARPS={plan.warps}"
    shared = _shared(entry == "run_backward", plan.cd, plan.sn, plan.ln, plan.warps)
    blocks = plan.programs
    if entry == "run_sums":
        numbers = (plan.heads + 2 * plan.batch * plan.length * plan.groups) * plan.state
        shared, blocks = 0, -(-numbers // (32 * plan.warps))
    room = (8 if entry == "run_backward" else 16) // plan.warps
    return (*defines, f"EXPECTED={expected:d}", f"BLOCKS={room}"), blocks, 32 * plan.warps, shared


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
def _fits(state: int, device: torch.device) -> bool:
    """Whether a block of the backward pass has room on this GPU."""
    properties = torch.cuda.get_device_properties(device)
    return _shared(True, *_lanes(state)) <= getattr(properties, "shared_memory_per_block_optin", 48 * 2**10)


@functools.lru_cache(256)
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


def _plan_of(x: Tensor, b: Tensor, backward: bool) -> _Plan:
    return _plan(*x.shape[:3], *b.shape[2:], backward, _processors(x.device))


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _terms(plan: _Plan, x: Tensor, delta: Tensor, ybar: Tensor, b: Tensor, c: Tensor, *places: int) -> bytes:
    """`Terms` of fused.cu; what a kernel does not touch may be 0."""
    return _TERMS.pack(
        *(x.data_ptr(), *x.stride()[:3], delta.data_ptr(), *delta.stride(), ybar.data_ptr(), *ybar.stride()[:3]),
        *(b.data_ptr(), *b.stride(), c.data_ptr(), *c.stride()),
        *places,
        *(plan.batch, plan.length, plan.heads, plan.groups, plan.state, plan.blocks, plan.chunks, plan.tiles),
    )


def _between(plan: _Plan) -> int:
    """How many numbers tell what chunks add to states, or how states decay in them."""
    return plan.chunks * plan.batch * plan.heads * plan.states if plan.chunks > 1 else 0


def _forward(x, b, c, initial, delta, A, D, expected: bool, retention: bool, keep: bool):
    """y, the final state, the mean decays or None, and the states before every TILE-th step or None."""
    plan = _plan_of(x, b, False)
    initial, A, D = initial.contiguous(), A.contiguous(), None if D is None else D.contiguous()
    y, final = x.new_empty(x.shape), x.new_empty(initial.shape)
    starts = x.new_empty(plan.all_tiles, plan.batch, plan.heads, plan.states) if keep else None
    kept = x.new_empty(plan.rows, plan.batch, plan.length) if retention else None
    if plan.programs and plan.length:
        ends = x.new_empty(2 * _between(plan))
        places = [A.data_ptr(), 0 if D is None else D.data_ptr(), initial.data_ptr(), 0, y.data_ptr(), final.data_ptr()]
        places += [0 if kept is None else kept.data_ptr(), 0 if starts is None else starts.data_ptr()]
        places += [ends.data_ptr(), ends.data_ptr() + 2 * ends.numel()]  # of 4 bytes each
        terms = _terms(plan, x, delta, x, b, c, *places, *[0] * 9)
        with on(x):
            if plan.chunks > 1:
                plan.launch("run_ends<false>", terms, expected, x.device)
            plan.launch(f"run_forward<{keep + 2 * retention}>", terms, expected, x.device)
    else:
        final.copy_(initial)
    return y, final, kept.sum(0) / A.numel() if kept is not None else None, starts


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b, c, initial, delta, A, expected, retention):
        y, final, kept, starts = _forward(x, b, c, initial, delta, A, None, expected, retention, keep=True)
        ctx.save_for_backward(x, b, c, delta, A, starts)
        ctx.expected = expected
        ctx.set_materialize_grads(False)
        if kept is not None:
            ctx.mark_non_differentiable(kept)
        return y, final, kept

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y, grad_final, _):
        x, b, c, delta, A, starts = ctx.saved_tensors
        plan = _plan_of(x, b, True)
        A = A.contiguous()
        grad_x, grad_b, grad_c, grad_delta, grad_A = (x.new_empty(t.shape) for t in (x, b, c, delta, A))
        if not plan.programs or not plan.length:
            zeros = (g.zero_() for g in (grad_x, grad_b, grad_c))
            return *zeros, grad_final, grad_delta.zero_(), grad_A.zero_(), None, None
        grad_y = x.new_zeros(()).expand(x.shape) if grad_y is None else grad_y
        grad_final = None if grad_final is None else grad_final.contiguous()
        grad_initial = x.new_empty(plan.batch, plan.heads, 1, plan.state)
        parts = plan.chunks * plan.batch * A.numel(), plan.blocks * b.numel(), plan.blocks * c.numel()
        sizes = _between(plan), _between(plan), *parts
        scratch = x.new_empty(sum(sizes))  # one tensor: making six took longer than a short scan
        ends, decays, *sums = accumulate((scratch.data_ptr(), *(4 * size for size in sizes[:-1])))
        places = [A.data_ptr(), 0, 0, 0 if grad_final is None else grad_final.data_ptr(), 0, 0, 0, starts.data_ptr()]
        places += [ends, decays, grad_x.data_ptr(), grad_delta.data_ptr(), *sums]
        places += [t.data_ptr() for t in (grad_initial, grad_A, grad_b, grad_c)]
        terms = _terms(plan, x, delta, grad_y, b, c, *places)
        with on(x):
            if plan.chunks > 1:
                plan.launch("run_ends<true>", terms, ctx.expected, x.device)
            plan.launch("run_backward", terms, ctx.expected, x.device)
            plan.launch("run_sums", terms, ctx.expected, x.device)
        return grad_x, grad_b, grad_c, grad_initial, grad_delta, grad_A, None, None


def _attempt(one: Tensor) -> None:
    states = one.expand(1, 1, 1, 16)  # as many as Mamba has
    _forward(one, states, states, states, one[..., 0], -states[0, 0], None, False, False, keep=False)


kernels = Program(Path(__file__).with_name("fused.cu"), "the CUDA scan", _attempt)
available, why_not = kernels.available, kernels.why_not
