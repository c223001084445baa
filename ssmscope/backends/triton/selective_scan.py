"""Mamba-1's selective scan, a decay per state, on a GPU (Mamba, Gu & Dao 2023, Algorithm 2 and section 3.3.2).

Where texts and channels alone do not fill the GPU, the length is cut into chunks that run in parallel: a first pass
finds what each chunk does to the state, a second one runs each from its true start. States are never written for every
step: for gradients, those before each `TILE` steps are kept, and the others are computed again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ssmscope.backends.triton import power_of_two, with_contiguous_rows
from ssmscope.backends.triton import selective_scan_kernels as kernels

MAX_STATES_PER_CHANNEL = 256
TILE = 16
"""Steps between states that are kept for the gradient."""
NUMBERS_PER_PROGRAM = 1024
"""Channels × states of a program."""
WARPS_PER_PROGRAM = 1
STEPS_LOADED_AHEAD = 4
PROGRAMS_IN_FLIGHT = 2048
"""Programs that fill a GPU."""
MIN_STEPS_PER_CHUNK = 64


def fits(x: Tensor, b: Tensor, c: Tensor, initial: Tensor | None, delta: Tensor, A: Tensor) -> bool:
    """Return True for what `scan` takes: heads of width 1, a decay per state, float32, no empty dimension."""
    terms = (x, b, c, delta, A) if initial is None else (x, b, c, delta, A, initial)
    return (
        all(t.dtype == torch.float32 and t.numel() > 0 for t in terms)
        and x.shape[3] == 1
        and A.shape[-1] == b.shape[3] <= MAX_STATES_PER_CHANNEL
    )


def scan(
    x: Float[Tensor, "batch length heads 1"],
    b: Float[Tensor, "batch length groups state"],
    c: Float[Tensor, "batch length groups state"],
    initial: Float[Tensor, "batch heads 1 state"] | None,
    delta: Float[Tensor, "batch length heads"],
    A: Float[Tensor, "heads state"],
    *,
    expected: bool,
    retention: bool,
) -> tuple[Float[Tensor, "batch length heads 1"], Float[Tensor, "batch heads 1 state"], Tensor | None]:
    """Return y_t = c_t·H_t, the final state, and with `retention` the mean of a_t over heads and states, (batch,
    length), through which no gradient flows.

    H_t = a_t ⊙ H_{t-1} + Δ_t x_t b_t with a_t = exp(Δ_t A), or with `expected` 1 / (1 − Δ_t A). The same terms give the
    same numbers, bit for bit.
    """
    terms = (x, b, c, initial, delta, A)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in terms):
        return _Scan.apply(*terms, expected, retention)
    y, final, mean_decay, _ = _forward(*terms, expected, retention, keep=False)
    return y, final, mean_decay


class _Plan(NamedTuple):
    """Division of a scan into programs.

    A program has `block` channels, a group `blocks` of these; a text has `chunks` of `steps` steps, a multiple of TILE.
    """

    block: int
    blocks: int
    chunks: int
    steps: int


def _plan(x: Tensor, b: Tensor) -> _Plan:
    batch, length, heads, _ = x.shape
    groups, state = b.shape[2:]
    share = heads // groups
    block = min(max(1, NUMBERS_PER_PROGRAM // power_of_two(state)), power_of_two(share))
    blocks = -(-share // block)
    chunks = min(PROGRAMS_IN_FLIGHT // (batch * groups * blocks), length // MIN_STEPS_PER_CHUNK)
    chunks = chunks if chunks > 2 else 1  # With two, the first pass costs what the second saves.
    steps = -(-length // (chunks * TILE)) * TILE
    return _Plan(block, blocks, -(-length // steps), steps)


class _Terms:
    """Terms of a scan as kernels take them, and the arguments that all launches share."""

    def __init__(self, x: Tensor, b: Tensor, c: Tensor, delta: Tensor, A: Tensor, expected: bool) -> None:
        self.plan = _plan(x, b)
        self.x, self.b, self.c, self.delta = map(with_contiguous_rows, (x.squeeze(3), b, c, delta))
        self.A = A.contiguous()
        batch, length, heads = delta.shape
        groups, state = b.shape[2:]
        self.sizes = length, self.plan.steps, heads, groups
        self.grid = groups * self.plan.blocks, self.plan.chunks, batch
        self.constants = {
            "N": state, "STATES": power_of_two(state), "BLOCK": self.plan.block, "EXPECTED": expected,
            "STAGES": STEPS_LOADED_AHEAD, "num_warps": WARPS_PER_PROGRAM,
        }  # fmt: skip

    def chunk_ends(self, x: Tensor, b: Tensor, backward: bool) -> Tensor | None:
        """Return what each chunk adds to the state, and the products of its decays; None with a single chunk."""
        blocks, chunks, batch = self.grid
        if chunks == 1:
            return None
        ends = x.new_empty(2, batch, chunks, *self.A.shape)
        kernels.chunk_ends[blocks, chunks - 1, batch](
            x, self.delta, b, self.A, ends, *self.sizes,
            *x.stride()[:2], *self.delta.stride()[:2], *b.stride()[:3], **self.constants, BACKWARD=backward,
        )  # fmt: skip
        return ends


def _forward(x, b, c, initial, delta, A, expected: bool, retention: bool, keep: bool):
    """Return y, the final state, the mean decays or None, and the states before each TILE steps or None."""
    t = _Terms(x, b, c, delta, A, expected)
    batch, length, heads = delta.shape
    y, final = x.new_empty(x.shape), x.new_empty(batch, heads, 1, A.shape[1])
    starts = x.new_empty(batch, -(-length // TILE), *A.shape) if keep else None
    decay_sums = x.new_empty(t.grid[0], batch, length) if retention else None
    kernels.chunk_outputs[t.grid](
        t.x, t.delta, t.b, t.c, t.A, None if initial is None else initial.contiguous(),
        t.chunk_ends(t.x, t.b, False), y, final, starts, decay_sums, *t.sizes,
        *t.x.stride()[:2], *t.delta.stride()[:2], *t.b.stride()[:3], *t.c.stride()[:3], **t.constants, TILE=TILE,
    )  # fmt: skip
    return y, final, None if decay_sums is None else decay_sums.sum(0) / A.numel(), starts


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, b, c, initial, delta, A, expected, retention):
        y, final, mean_decay, starts = _forward(x, b, c, initial, delta, A, expected, retention, keep=True)
        ctx.save_for_backward(x, b, c, delta, A, starts)
        ctx.expected = expected
        ctx.set_materialize_grads(False)
        if mean_decay is not None:
            ctx.mark_non_differentiable(mean_decay)
        return y, final, mean_decay

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y, grad_final, _):
        x, b, c, delta, A, starts = ctx.saved_tensors
        t = _Terms(x, b, c, delta, A, ctx.expected)
        plan, states = t.plan, t.constants["STATES"]
        grad_y = torch.zeros_like(t.x) if grad_y is None else with_contiguous_rows(grad_y.squeeze(3))
        grad_x, grad_delta = x.new_empty(x.shape), x.new_empty(delta.shape)
        grad_bc, grad_A = x.new_empty(2, plan.blocks, *b.shape), x.new_empty(x.shape[0], plan.chunks, *A.shape)
        grad_initial = x.new_empty(x.shape[0], x.shape[2], 1, A.shape[1])
        scratch = x.new_empty(*t.grid, TILE, plan.block, states)
        kernels.chunk_gradients[t.grid](
            t.x, t.delta, t.b, t.c, t.A, starts, scratch, t.chunk_ends(grad_y, t.c, True),
            grad_y, None if grad_final is None else grad_final.contiguous(),
            grad_x, grad_delta, grad_bc, grad_A, grad_initial, *t.sizes,
            *t.x.stride()[:2], *t.delta.stride()[:2], *t.b.stride()[:3], *t.c.stride()[:3], *grad_y.stride()[:2],
            **t.constants, TILE=TILE,
        )  # fmt: skip
        grad_initial = grad_initial if ctx.needs_input_grad[3] else None
        return grad_x, *grad_bc.sum(1), grad_initial, grad_delta, grad_A.sum((0, 1)), None, None
