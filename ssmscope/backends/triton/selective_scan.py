"""Mamba-1's selective scan, a decay per state, on a GPU (Mamba, Gu & Dao 2023, Algorithm 2 and section 3.3.2).

Where texts and channels alone do not fill the GPU, the length is cut into chunks that run in parallel: a first pass
finds what each chunk does to the state, a second one runs each from its true start. States are never written for every
step: for gradients, those before each `TILE` steps are kept, and the others are computed again.

A program takes BLOCK channels of one group with all their states, a tile (BLOCK, STATES) in registers, and walks one
chunk of steps. Tensors are float32 and their last dimension is contiguous; states and channels beyond the last are
masked. The grid is (blocks of channels, chunks, batch).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from ssmscope.backends.shapes import ChannelMemory, Channels, Keys, PerHead, Rates, Start
from ssmscope.backends.triton import power_of_two, with_contiguous_rows

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
    x: Channels, b: Keys, c: Keys, initial: Start, delta: PerHead, A: Rates, *, expected: bool, retention: bool
) -> tuple[Channels, ChannelMemory, Tensor | None]:
    """Return y_t = c_t·H_t, the final state, and with `retention` the mean of a_t over heads and states, (batch,
    length), through which no gradient flows. H_t = a_t ⊙ H_{t-1} + Δ_t x_t b_t with a_t = exp(Δ_t A), or with
    `expected` 1 / (1 − Δ_t A). The same terms give the same numbers, bit for bit."""
    terms = (x, b, c, initial, delta, A)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in terms):
        return _Scan.apply(*terms, expected, retention)
    y, final, mean_decay, _ = _forward(*terms, expected, retention, keep=False)
    return y, final, mean_decay


class _Terms:
    """Terms of a scan as kernels take them, its division into programs, and the arguments that all launches share. A
    program has `block` channels, and a group of heads `blocks` of these; a text has chunks of a multiple of TILE
    steps."""

    def __init__(self, x: Tensor, b: Tensor, c: Tensor, delta: Tensor, A: Tensor, expected: bool) -> None:
        self.x, self.b, self.c, self.delta = map(with_contiguous_rows, (x.squeeze(3), b, c, delta))
        self.A = A.contiguous()
        (batch, length, heads), (groups, state) = delta.shape, b.shape[2:]
        share, states = heads // groups, power_of_two(state)
        self.block = min(max(1, NUMBERS_PER_PROGRAM // states), power_of_two(share))
        self.blocks = -(-share // self.block)
        chunks = min(PROGRAMS_IN_FLIGHT // (batch * groups * self.blocks), length // MIN_STEPS_PER_CHUNK)
        chunks = chunks if chunks > 2 else 1  # With two, the first pass costs what the second saves.
        steps = -(-length // (chunks * TILE)) * TILE
        self.sizes = length, steps, heads, groups
        self.grid = groups * self.blocks, -(-length // steps), batch
        self.constants = {
            "N": state, "STATES": states, "BLOCK": self.block, "EXPECTED": expected, "STAGES": STEPS_LOADED_AHEAD,
            "num_warps": WARPS_PER_PROGRAM,
        }  # fmt: skip

    def chunk_ends(self, x: Tensor, b: Tensor, backward: bool) -> Tensor | None:
        """Return what each chunk adds to the state, and the products of its decays; None with a single chunk."""
        blocks, chunks, batch = self.grid
        if chunks == 1:
            return None
        ends = x.new_empty(2, batch, chunks, *self.A.shape)
        chunk_ends[blocks, chunks - 1, batch](
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
    chunk_outputs[t.grid](
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
        grad_y = torch.zeros_like(t.x) if grad_y is None else with_contiguous_rows(grad_y.squeeze(3))
        grad_x, grad_delta = x.new_empty(x.shape), x.new_empty(delta.shape)
        grad_bc, grad_A = x.new_empty(2, t.blocks, *b.shape), x.new_empty(x.shape[0], t.grid[1], *A.shape)
        grad_initial = x.new_empty(x.shape[0], x.shape[2], 1, A.shape[1])
        scratch = x.new_empty(*t.grid, TILE, t.block, t.constants["STATES"])
        chunk_gradients[t.grid](
            t.x, t.delta, t.b, t.c, t.A, starts, scratch, t.chunk_ends(grad_y, t.c, True),
            grad_y, None if grad_final is None else grad_final.contiguous(),
            grad_x, grad_delta, grad_bc, grad_A, grad_initial, *t.sizes,
            *t.x.stride()[:2], *t.delta.stride()[:2], *t.b.stride()[:3], *t.c.stride()[:3], *grad_y.stride()[:2],
            **t.constants, TILE=TILE,
        )  # fmt: skip
        grad_initial = grad_initial if ctx.needs_input_grad[3] else None
        return grad_x, *grad_bc.sum(1), grad_initial, grad_delta, grad_A.sum((0, 1)), None, None


# ---- kernels

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def channels_of_program(heads, groups, N: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr):
    """Return the group, the channels, which of them exist, and the offsets and the mask of a tile of (heads, N)."""
    share = heads // groups
    blocks = tl.cdiv(share, BLOCK)
    group = tl.program_id(0) // blocks
    own = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    d, n = group * share + own, tl.arange(0, STATES)
    return group, d, own < share, d[:, None] * N + n[None, :], (own < share)[:, None] & (n < N)[None, :]


@triton.jit
def steps_of_chunk(chunk, steps, length):
    """Return the first step of a chunk, in 64 bits as offsets need it, and the number of its steps."""
    return (chunk * steps).to(tl.int64), tl.minimum(steps, length - chunk * steps)


@triton.jit
def load_rates(A, at, real, EXPECTED: tl.constexpr):
    """Return A in the unit of `decays`."""
    rates = tl.load(A + at, mask=real, other=0.0)
    return rates if EXPECTED else rates * LOG2_E


@triton.jit
def decays(delta, rates, EXPECTED: tl.constexpr):
    """Return a = exp(Δ A), or 1 / (1 − Δ A), of a tile."""
    exponents = delta[:, None] * rates
    return 1.0 / (1.0 - exponents) if EXPECTED else tl.exp2(exponents)


@triton.jit
def apply_chunk(state, ends, chunk, at, real, size):
    """Return what `chunk` makes of the tile of states that enters it; `ends` is what `chunk_ends` wrote."""
    rows, chunks = tl.num_programs(2).to(tl.int64), tl.num_programs(1)
    at += (tl.program_id(2) * chunks + chunk) * size
    product = tl.load(ends + rows * chunks * size + at, mask=real, other=0.0)
    return product * state + tl.load(ends + at, mask=real, other=0.0)


@triton.jit(do_not_specialize=["length", "steps"])
def chunk_ends(
    x, delta, b, A, ends, length, steps, heads, groups,
    x_row, x_step, delta_row, delta_step, b_row, b_step, b_group,
    N: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    EXPECTED: tl.constexpr, BACKWARD: tl.constexpr
):  # fmt: skip
    """Write the state that each chunk but the last ends with when it starts from zero, and then the product of its
    decays, (2, batch, chunks, heads, N). BACKWARD walks all chunks but the first from their ends, with the gradient of
    y as `x` and c as `b`: `ends` is then the gradient of the state before the chunk."""
    row, chunk = tl.program_id(2).to(tl.int64), tl.program_id(1) + (1 if BACKWARD else 0)
    group, d, known, at, real = channels_of_program(heads, groups, N, STATES, BLOCK)
    n = tl.arange(0, STATES)
    rates = load_rates(A, at, real, EXPECTED)
    first, count = steps_of_chunk(chunk, steps, length)
    state, product = tl.zeros((BLOCK, STATES), tl.float32), tl.full((BLOCK, STATES), 1.0, tl.float32)
    for i in tl.range(0, count, num_stages=STAGES):
        t = first + (count - 1 - i if BACKWARD else i)
        step = tl.load(delta + row * delta_row + t * delta_step + d, mask=known, other=0.0)
        value = tl.load(x + row * x_row + t * x_step + d, mask=known, other=0.0)
        key = tl.load(b + row * b_row + t * b_step + group * b_group + n, mask=n < N, other=0.0)
        a = decays(step, rates, EXPECTED)
        product *= a
        if BACKWARD:
            state = a * (state + value[:, None] * key[None, :])
        else:
            state = a * state + (value * step)[:, None] * key[None, :]
    chunks = tl.num_programs(1) + 1
    at += (row * chunks + chunk) * heads * N
    tl.store(ends + at, state, mask=real)
    tl.store(ends + tl.num_programs(2).to(tl.int64) * chunks * heads * N + at, product, mask=real)


@triton.jit(do_not_specialize=["length", "steps"])
def chunk_outputs(
    x, delta, b, c, A, initial, ends, y, final, starts, decay_sums, length, steps, heads, groups,
    x_row, x_step, delta_row, delta_step, b_row, b_step, b_group, c_row, c_step, c_group,
    N: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr,
    EXPECTED: tl.constexpr
):  # fmt: skip
    """Write y (batch, length, heads) and the final state (batch, heads, N), from what `chunk_ends` wrote. Any of these
    may be None: `ends` with a single chunk, `initial` for zero, `starts` (batch, tiles, heads, N), which gets the state
    before each TILE steps, and `decay_sums` (blocks of channels, batch, length), which gets the sum of the decays of a
    block's states."""
    row, chunk, chunks = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    group, d, known, at, real = channels_of_program(heads, groups, N, STATES, BLOCK)
    n = tl.arange(0, STATES)
    rates = load_rates(A, at, real, EXPECTED)
    state = tl.zeros((BLOCK, STATES), tl.float32)
    if initial is not None:
        state += tl.load(initial + row * heads * N + at, mask=real, other=0.0)
    if ends is not None:
        for k in range(chunk):
            state = apply_chunk(state, ends, k, at, real, heads * N)
    first, count = steps_of_chunk(chunk, steps, length)
    tiles = tl.cdiv(length, TILE)
    for i in tl.range(0, count, num_stages=STAGES):
        t = first + i
        if starts is not None:
            tl.store(starts + (row * tiles + t // TILE) * heads * N + at, state, mask=real & (t % TILE == 0))
        step = tl.load(delta + row * delta_row + t * delta_step + d, mask=known, other=0.0)
        value = tl.load(x + row * x_row + t * x_step + d, mask=known, other=0.0)
        key = tl.load(b + row * b_row + t * b_step + group * b_group + n, mask=n < N, other=0.0)
        query = tl.load(c + row * c_row + t * c_step + group * c_group + n, mask=n < N, other=0.0)
        a = decays(step, rates, EXPECTED)
        state = a * state + (value * step)[:, None] * key[None, :]
        tl.store(y + (row * length + t) * heads + d, tl.sum(state * query[None, :], axis=1), mask=known)
        if decay_sums is not None:
            total = tl.sum(tl.where(real, a, 0.0))
            tl.store(decay_sums + (tl.program_id(0) * tl.num_programs(2) + row) * length + t, total)
    if chunk == chunks - 1:
        tl.store(final + row * heads * N + at, state, mask=real)


@triton.jit(do_not_specialize=["length", "steps"])
def chunk_gradients(
    x, delta, b, c, A, starts, scratch, ends, grad_y, grad_final,
    grad_x, grad_delta, grad_bc, grad_A, grad_initial, length, steps, heads, groups,
    x_row, x_step, delta_row, delta_step, b_row, b_step, b_group, c_row, c_step, c_group, y_row, y_step,
    N: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, TILE: tl.constexpr,
    EXPECTED: tl.constexpr
):  # fmt: skip
    """Write the gradients of x, Δ and the initial state, and parts of those of b and c, (2, blocks of a group, batch,
    length, groups, N), and of A, (batch, chunks, heads, N).

    The adjoint of the state is λ_t = c_t ȳ_t + r_{t+1} with r_t = a_t λ_t, which runs back in time and starts from what
    `chunk_ends` wrote. Each TILE steps are walked forward from `starts`, which leaves the states H_{t-1} in `scratch`,
    and then back: x̄_t = Δ_t λ_t·b_t, b̄_t = Σ_d λ_t Δ_t x_t, c̄_t = Σ_d ȳ_t H_t, and the gradient of Δ_t A is
    r_t H_{t-1}, or with the expected decay a_t r_t H_{t-1}.
    """
    row, chunk, chunks = tl.program_id(2).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    group, d, known, at, real = channels_of_program(heads, groups, N, STATES, BLOCK)
    n = tl.arange(0, STATES)
    rates = load_rates(A, at, real, EXPECTED)
    carried = tl.zeros((BLOCK, STATES), tl.float32)
    if grad_final is not None:
        carried += tl.load(grad_final + row * heads * N + at, mask=real, other=0.0)
    if ends is not None:
        for k in range(chunks - 1 - chunk):
            carried = apply_chunk(carried, ends, chunks - 1 - k, at, real, heads * N)
    x += row * x_row + d
    delta += row * delta_row + d
    b += row * b_row + group * b_group + n
    c += row * c_row + group * c_group + n
    grad_y += row * y_row + d
    program = (row * chunks + chunk) * tl.num_programs(0) + tl.program_id(0)
    slots = tl.arange(0, BLOCK)[:, None] * STATES + n[None, :]
    scratch += program * TILE * BLOCK * STATES + slots
    blocks = tl.num_programs(0) // groups
    grad_bc += (tl.program_id(0) % blocks * tl.num_programs(2) + row) * length * groups * N + group * N + n
    grad_c = grad_bc + blocks * tl.num_programs(2).to(tl.int64) * length * groups * N
    grad_rates = tl.zeros((BLOCK, STATES), tl.float32)
    first, all_steps = steps_of_chunk(chunk, steps, length)
    tiles = tl.cdiv(all_steps, TILE)
    for k in range(tiles):
        begin = first + (tiles - 1 - k) * TILE
        count = tl.minimum(TILE, all_steps - (tiles - 1 - k) * TILE)
        tile = row * tl.cdiv(length, TILE) + begin // TILE
        state = tl.load(starts + tile * heads * N + at, mask=real, other=0.0)
        for i in tl.range(0, count, num_stages=STAGES):
            t = begin + i
            step = tl.load(delta + t * delta_step, mask=known, other=0.0)
            value = tl.load(x + t * x_step, mask=known, other=0.0)
            key = tl.load(b + t * b_step, mask=n < N, other=0.0)
            tl.store(scratch + i * BLOCK * STATES, state)
            state = decays(step, rates, EXPECTED) * state + (value * step)[:, None] * key[None, :]
        tl.debug_barrier()  # Threads may read states that others wrote.
        for j in tl.range(0, count, num_stages=STAGES):
            i = count - 1 - j
            t = begin + i
            before = tl.load(scratch + i * BLOCK * STATES)
            step = tl.load(delta + t * delta_step, mask=known, other=0.0)
            value = tl.load(x + t * x_step, mask=known, other=0.0)
            above = tl.load(grad_y + t * y_step, mask=known, other=0.0)
            key = tl.load(b + t * b_step, mask=n < N, other=0.0)
            query = tl.load(c + t * c_step, mask=n < N, other=0.0)
            a, written = decays(step, rates, EXPECTED), value * step
            after = a * before + written[:, None] * key[None, :]
            adjoint = above[:, None] * query[None, :] + carried
            carried = a * adjoint
            of_exponent = carried * before
            if EXPECTED:
                of_exponent *= a
            grad_rates += of_exponent * step[:, None]
            of_written = tl.sum(adjoint * key[None, :], axis=1)
            of_step = tl.sum(of_exponent * rates, axis=1) * (1.0 if EXPECTED else LN_2) + of_written * value
            to = (row * length + t) * heads + d
            tl.store(grad_x + to, of_written * step, mask=known)
            tl.store(grad_delta + to, of_step, mask=known)
            tl.store(grad_bc + t * groups * N, tl.sum(adjoint * written[:, None], axis=0), mask=n < N)
            tl.store(grad_c + t * groups * N, tl.sum(after * above[:, None], axis=0), mask=n < N)
        tl.debug_barrier()  # The next tile overwrites them.
    tl.store(grad_A + (row * chunks + chunk) * heads * N + at, grad_rates, mask=real)
    if chunk == 0:
        tl.store(grad_initial + row * heads * N + at, carried, mask=real)
