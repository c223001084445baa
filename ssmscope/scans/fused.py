"""The scan with a decay per state by CUDA kernels (`fused.cu`), for float32 on a GPU; silent when absent.

The length is cut into chunks that run side by side where sequences and channels alone do not fill the GPU: a first pass
gives what each chunk does to a state, a second starts each from the states before it. The forward pass keeps the states
before every `TILE`-th step; the backward pass recomputes what lies between. Without the kernels (`nvrtc`)
`diagonal.scan` stays with torch.
"""

from __future__ import annotations

import functools
import os
import struct
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ssmscope.scans import native
from ssmscope.scans.building import SWITCH
from ssmscope.scans.nvrtc import Launch, Launches, Program

TILE = 16  # steps between states that are kept, as in fused.cu
SUB = 4  # steps whose states the gradient holds in registers, as in fused.cu
MOST = 512  # states of a channel; with more, torch is as fast
LEAST = 4  # tiles of a chunk
# `Terms` of fused.cu: addresses and strides, and sizes
_PLACES, _SIZES = struct.Struct("=41q"), struct.Struct("=8i")
NOTHING = (0,) * 9  # addresses that the forward pass does not need
FORWARD = tuple(f"run_forward<{what}>" for what in range(4))  # 1 to keep states, 2 to sum decays, 3 for both


def applicable(x: Tensor, b: Tensor, c: Tensor, initial: Tensor | None, delta: Tensor, A: Tensor) -> bool:
    """Whether `scan` takes these terms: width 1, a decay per state, float32, on one GPU."""
    state = b.shape[3]
    if not x.is_cuda or x.shape[3] != 1 or A.shape[-1] != state or torch.compiler.is_compiling():
        return False
    terms = (x, b, c, delta, A) if initial is None else (x, b, c, delta, A, initial)
    device = x.device
    return native.are_plain(terms, device) and os.environ.get(SWITCH) != "0" and _takes(state, device)


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
    y, final, kept, _ = _forward(_pass(x, b, FORWARD[2 * retention], expected), *terms, D, retention, keep=False)
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
    """One pass over terms of some sizes: how it is cut, its kernels, whether they have anything to do, how many numbers
    tell what chunks add to states, or how states decay in them, and the pass that goes back over the states kept."""

    plan: _Plan
    launches: Launches
    runs: bool
    between: int
    sizes: bytes
    back: _Pass | None


def _pass(x: Tensor, b: Tensor, entry: str, expected: bool) -> _Pass:
    """Of the kernel `entry`, and of what comes before and after it."""
    return _planned(x.shape, b.shape, entry, expected, x.device)


@functools.lru_cache(256)
def _planned(shape: torch.Size, narrow: torch.Size, entry: str, expected: bool, device: torch.device) -> _Pass:
    backward = entry == "run_backward"
    (batch, length, heads, _), (_, _, groups, state) = shape, narrow
    plan = _plan(batch, length, heads, groups, state, backward, _processors(device))
    entries = [f"run_ends<{str(backward).lower()}>"] if plan.chunks > 1 else []
    entries += [entry, "run_sums"] if backward else [entry]
    launches = Launches(*(_launch(plan, one, expected) for one in entries))
    between = plan.chunks * plan.batch * plan.heads * plan.states if plan.chunks > 1 else 0
    sizes = _SIZES.pack(*plan[:5], plan.blocks, plan.chunks, plan.tiles)
    back = _planned(shape, narrow, "run_backward", expected, device) if entry in FORWARD[1::2] else None
    return _Pass(plan, launches, plan.programs > 0 < plan.length, between, sizes, back)


def _launch(plan: _Plan, entry: str, expected: bool) -> Launch:
    defines = f"ENTRY={entry}", f"CD={plan.cd}", f"SN={plan.sn}", f"LN={plan.ln}", f"WARPS={plan.warps}"
    shared = _shared(entry == "run_backward", plan.cd, plan.sn, plan.ln, plan.warps)
    blocks = plan.programs
    if entry == "run_sums":
        numbers = (plan.heads + 2 * plan.batch * plan.length * plan.groups) * plan.state
        shared, blocks = 0, -(-numbers // (32 * plan.warps))
    room = (8 if entry == "run_backward" else 16) // plan.warps
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


def _terms(sizes: bytes, x: Tensor, delta: Tensor, ybar: Tensor, b: Tensor, c: Tensor, *places: int) -> bytes:
    """`Terms` of fused.cu; what a kernel does not touch may be 0."""
    views = (x.data_ptr(), *x.stride()[:3], delta.data_ptr(), *delta.stride(), ybar.data_ptr(), *ybar.stride()[:3])
    return _PLACES.pack(*views, b.data_ptr(), *b.stride(), c.data_ptr(), *c.stride(), *places) + sizes


def _at(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _forward(run: _Pass, x, b, c, initial, delta, A, D, retention: bool, keep: bool):
    """y, the final state, the mean decays or None, and the states before every TILE-th step or None."""
    plan, launches, runs, between, sizes, _ = run
    A = A.contiguous()
    initial, D = None if initial is None else initial.contiguous(), None if D is None else D.contiguous()
    new = x.new_empty  # sizes one by one, as a torch.Size takes twice as long
    y, final = new(*x.shape), new(plan.batch, plan.heads, 1, plan.state)
    starts = new(plan.all_tiles, plan.batch, plan.heads, plan.states) if keep else None
    kept = new(plan.rows, plan.batch, plan.length) if retention else None
    if runs:
        ends = new(2 * between) if between else None
        decays = 0 if ends is None else ends.data_ptr() + 4 * between  # bytes
        written = y.data_ptr(), final.data_ptr(), _at(kept), _at(starts), _at(ends), decays
        places = (A.data_ptr(), _at(D), _at(initial), 0, *written, *NOTHING)
        kernels.launch(launches, _terms(sizes, x, delta, x, b, c, *places), x.device)
    elif initial is None:
        final.zero_()
    else:
        final.copy_(initial)
    return y, final, kept.sum(0) if kept is not None else None, starts


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b, c, initial, delta, A, expected, retention):
        run = _pass(x, b, FORWARD[1 + 2 * retention], expected)
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
    plan, launches, runs, between, sizes, _ = ctx.back
    new, A = x.new_empty, A.contiguous()
    grad_x, grad_delta, grad_A = new(*x.shape), new(*delta.shape), new(*A.shape)
    grad_b, grad_c = new(*b.shape), new(*c.shape)
    asked = ctx.needs_input_grad[3]
    if not runs:
        zeros = (g.zero_() for g in (grad_x, grad_b, grad_c))
        return *zeros, grad_final if asked else None, grad_delta.zero_(), grad_A.zero_(), None, None
    grad_y = x.new_zeros(()).expand(x.shape) if grad_y is None else grad_y
    grad_final = None if grad_final is None else grad_final.contiguous()
    grad_initial = new(plan.batch, plan.heads, 1, plan.state) if asked else None
    of_A, of_b = plan.chunks * plan.batch * A.numel(), plan.blocks * b.numel()
    scratch = new(2 * between + of_A + 2 * of_b)  # one tensor: making six took longer than a short scan
    ends = scratch.data_ptr()
    decays = ends + 4 * between  # bytes
    A_parts = decays + 4 * between
    b_parts = A_parts + 4 * of_A
    given = A.data_ptr(), 0, 0, _at(grad_final), 0, 0, 0, starts.data_ptr(), ends, decays
    parts = grad_x.data_ptr(), grad_delta.data_ptr(), A_parts, b_parts, b_parts + 4 * of_b
    sums = _at(grad_initial), grad_A.data_ptr(), grad_b.data_ptr(), grad_c.data_ptr()
    kernels.launch(launches, _terms(sizes, x, delta, grad_y, b, c, *given, *parts, *sums), x.device)
    return grad_x, grad_b, grad_c, grad_initial, grad_delta, grad_A, None, None


_refused = torch.autograd.function.once_differentiable(_backward)  # what it gives cannot be differentiated again


def _attempt(one: Tensor) -> None:
    states = one.expand(1, 1, 1, 16)  # as many as Mamba has
    terms = one, states, states, states, one[..., 0], -states[0, 0], None
    _forward(_pass(one, states, FORWARD[0], False), *terms, False, keep=False)


kernels = Program(Path(__file__).with_name("fused.cu"), "the CUDA scan", _attempt)
available, why_not = kernels.available, kernels.why_not
