"""Triton kernels of Mamba-1's selective scan; `selective_scan.py` launches them.

A program takes BLOCK channels of one group with all their states, a tile (BLOCK, STATES) in registers, and walks one
chunk of steps. Tensors are float32 and their last dimension is contiguous; states and channels beyond the last are
masked. The grid is (blocks of channels, chunks, batch).
"""

import triton
import triton.language as tl

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
    EXPECTED: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Write the state that each chunk but the last ends with when it starts from zero, and then the product of its
    decays, (2, batch, chunks, heads, N).

    BACKWARD walks all chunks but the first from their ends, with the gradient of y as `x` and c as `b`: `ends` is then
    the gradient of the state before the chunk.
    """
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
    EXPECTED: tl.constexpr,
):  # fmt: skip
    """Write y (batch, length, heads) and the final state (batch, heads, N), from what `chunk_ends` wrote.

    Any of these may be None: `ends` with a single chunk, `initial` for zero, `starts` (batch, tiles, heads, N), which
    gets the state before each TILE steps, and `decay_sums` (blocks of channels, batch, length), which gets the sum of
    the decays of a block's states.
    """
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
    EXPECTED: tl.constexpr,
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
