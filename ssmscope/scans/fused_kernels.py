"""The Triton kernels of `fused`: the scan with a decay per state and its gradient, one pass over the steps each.

A program owns one sequence and `BLOCK` neighbouring channels of one group: a tile (BLOCK, STATES) of states in
registers, `STATES` the next power of two of the number of states N. It walks the steps in order and loads the next
step's terms while it works on this one's. Off the tile's edges x, b and c are 0 and A is −1, so that states there stay
0 and no infinite step makes a NaN. Sums over channels leave a program as its own row of a table that torch adds up:
nothing depends on the order in which programs run.

Importing this module needs triton.
"""

import triton
import triton.language as tl


@triton.jit
def _place(heads, groups, BLOCK: tl.constexpr):
    """Of this program: its sequence, group, number among the group's programs, first channel, and the mask of its
    channels. Numbers are of 64 bits; within a tile 32 are enough, and half the registers."""
    program = tl.program_id(0).to(tl.int64)
    share = heads // groups
    blocks = tl.cdiv(share, BLOCK)
    block = program % blocks
    group = (program // blocks) % groups
    row = program // (blocks * groups)
    return row, group, block, group * share + block * BLOCK, block * BLOCK + tl.arange(0, BLOCK) < share


@triton.jit
def _decay(delta, A, FLOOR: tl.constexpr, EXPECTED: tl.constexpr):
    """a_t of a tile: exp(Δ A), or 1 / (1 − Δ A)."""
    log_a = delta[:, None] * A
    if EXPECTED:
        a = 1.0 / (1.0 - log_a)
    else:
        a = tl.exp(tl.where(log_a < FLOOR, FLOOR, log_a))  # a NaN is not below the floor and stays
    return a


@triton.jit
def forward(
    x,
    delta,
    A,
    b,
    c,
    initial,
    y,
    final,
    starts,
    kept,
    start_step,
    batch,
    length,
    heads,
    groups,
    x_row,
    x_step,
    x_head,
    delta_row,
    delta_step,
    delta_head,
    b_row,
    b_step,
    b_group,
    b_state,
    c_row,
    c_step,
    c_group,
    c_state,
    N: tl.constexpr,
    STATES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
    FLOOR: tl.constexpr,
    EXPECTED: tl.constexpr,
    KEEP: tl.constexpr,
    RETAIN: tl.constexpr,
):
    """y (batch, length, heads) and `final` (batch, heads, N); with KEEP the states before every CHECK-th step, `starts`
    (chunks, batch, heads, N), `start_step` numbers each; with RETAIN the programs' sums of a_t, `kept` (blocks ×
    groups, batch, length). `A` (heads, N) and `initial` are contiguous, the other terms have strides."""
    row, group, block, head, valid = _place(heads, groups, BLOCK)
    d, n = tl.arange(0, BLOCK), tl.arange(0, STATES)
    real = n < N
    tile = valid[:, None] & real[None, :]
    own = d[:, None] * N + n[None, :]
    matrix = (row * heads + head) * N
    decays = tl.load(A + head * N + own, mask=tile, other=-1.0)
    H = tl.load(initial + matrix + own, mask=tile, other=0.0)
    x_at, delta_at = x + row * x_row + head * x_head, delta + row * delta_row + head * delta_head
    b_at, c_at = b + row * b_row + group * b_group, c + row * c_row + group * c_group
    y_at = y + row * length * heads + head
    start_at = starts + matrix
    kept_at = kept + ((block * groups + group) * batch + row) * length
    x_d, delta_d, b_n, c_n = d * x_head, d * delta_head, n * b_state, n * c_state

    x_t, delta_t = tl.load(x_at + x_d, mask=valid, other=0.0), tl.load(delta_at + delta_d, mask=valid, other=0.0)
    b_t, c_t = tl.load(b_at + b_n, mask=real, other=0.0), tl.load(c_at + c_n, mask=real, other=0.0)
    for t in range(length):
        more = t + 1 < length
        x_at += x_step
        delta_at += delta_step
        b_at += b_step
        c_at += c_step
        x_next = tl.load(x_at + x_d, mask=valid & more, other=0.0)
        delta_next = tl.load(delta_at + delta_d, mask=valid & more, other=0.0)
        b_next = tl.load(b_at + b_n, mask=real & more, other=0.0)
        c_next = tl.load(c_at + c_n, mask=real & more, other=0.0)
        if KEEP:
            if t % CHECK == 0:
                tl.store(start_at + own, H, mask=tile)
                start_at += start_step
        a = _decay(delta_t, decays, FLOOR, EXPECTED)
        H = a * H + x_t[:, None] * b_t[None, :]
        tl.store(y_at + d, tl.sum(H * c_t[None, :], axis=1), mask=valid)
        y_at += heads
        if RETAIN:
            tl.store(kept_at, tl.sum(tl.sum(tl.where(tile, a, 0.0), axis=1), axis=0))
            kept_at += 1
        x_t, delta_t, b_t, c_t = x_next, delta_next, b_next, c_next
    tl.store(final + matrix + own, H, mask=tile)


@triton.jit
def backward(
    x,
    delta,
    A,
    b,
    c,
    ybar,
    starts,
    finalbar,
    before,
    xbar,
    deltabar,
    Abars,
    bbars,
    cbars,
    initialbar,
    start_step,
    batch,
    length,
    heads,
    groups,
    x_row,
    x_step,
    x_head,
    delta_row,
    delta_step,
    delta_head,
    b_row,
    b_step,
    b_group,
    b_state,
    c_row,
    c_step,
    c_group,
    c_state,
    ybar_row,
    ybar_step,
    ybar_head,
    N: tl.constexpr,
    STATES: tl.constexpr,
    BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
    FLOOR: tl.constexpr,
    EXPECTED: tl.constexpr,
):
    """The adjoint recurrence λ_t = c_t ȳ_t + a_{t+1} λ_{t+1}, chunk by chunk from the last to the first.

    A chunk's states are computed again from the one at its start and laid down in `before` (programs, CHECK, BLOCK,
    STATES). Gives x̄_t = Σ_n λ_t b_t and Δ̄_t = Σ_n g_t A (batch, length, heads), the rows' Ā = Σ_t g_t Δ_t (batch,
    heads, N), the programs' b̄_t = Σ_d λ_t x_t and c̄_t = Σ_d ȳ_t H_t (blocks, batch, length, groups, N), and the initial
    state's; g_t, the gradient of Δ_t A, is λ_t a_t H_{t−1}, and for the expected decay a_t times that.
    """
    row, group, block, head, valid = _place(heads, groups, BLOCK)
    d, n = tl.arange(0, BLOCK), tl.arange(0, STATES)
    real = n < N
    tile = valid[:, None] & real[None, :]
    own = d[:, None] * N + n[None, :]
    matrix = (row * heads + head) * N
    decays = tl.load(A + head * N + own, mask=tile, other=-1.0)
    carried = tl.load(finalbar + matrix + own, mask=tile, other=0.0)  # a_{t+1} λ_{t+1}
    Abar = tl.zeros([BLOCK, STATES], tl.float32)
    laid = d[:, None] * STATES + n[None, :]
    before += tl.program_id(0).to(tl.int64) * CHECK * BLOCK * STATES
    x += row * x_row + head * x_head
    delta += row * delta_row + head * delta_head
    ybar += row * ybar_row + head * ybar_head
    b += row * b_row + group * b_group
    c += row * c_row + group * c_group
    x_d, delta_d, ybar_d, b_n, c_n = d * x_head, d * delta_head, d * ybar_head, n * b_state, n * c_state
    sums = (block * batch + row) * length

    chunks = tl.cdiv(length, CHECK)
    for k in range(chunks):
        chunk = (chunks - 1 - k) + row * 0  # in 64 bits
        first = chunk * CHECK
        steps = tl.minimum(length - first, CHECK).to(tl.int32)
        H = tl.load(starts + chunk * start_step + matrix + own, mask=tile, other=0.0)
        for s in range(steps):
            tl.store(before + s * BLOCK * STATES + laid, H)
            t = first + s
            x_t = tl.load(x + t * x_step + x_d, mask=valid, other=0.0)
            delta_t = tl.load(delta + t * delta_step + delta_d, mask=valid, other=0.0)
            b_t = tl.load(b + t * b_step + b_n, mask=real, other=0.0)
            H = _decay(delta_t, decays, FLOOR, EXPECTED) * H + x_t[:, None] * b_t[None, :]
        tl.debug_barrier()  # what one thread laid down another may pick up
        for i in range(steps):
            s = steps - 1 - i
            t = first + s
            x_t = tl.load(x + t * x_step + x_d, mask=valid, other=0.0)
            delta_t = tl.load(delta + t * delta_step + delta_d, mask=valid, other=0.0)
            ybar_t = tl.load(ybar + t * ybar_step + ybar_d, mask=valid, other=0.0)
            b_t = tl.load(b + t * b_step + b_n, mask=real, other=0.0)
            c_t = tl.load(c + t * c_step + c_n, mask=real, other=0.0)
            previous = tl.load(before + s * BLOCK * STATES + laid)
            adjoint = ybar_t[:, None] * c_t[None, :] + carried
            a = _decay(delta_t, decays, FLOOR, EXPECTED)
            carried = adjoint * a
            g = carried * previous
            if EXPECTED:
                g *= a
            Abar += g * delta_t[:, None]
            out = (row * length + t) * heads + head
            tl.store(xbar + out + d, tl.sum(adjoint * b_t[None, :], axis=1), mask=valid)
            tl.store(deltabar + out + d, tl.sum(g * decays, axis=1), mask=valid)
            shared = ((sums + t) * groups + group) * N
            tl.store(bbars + shared + n, tl.sum(adjoint * x_t[:, None], axis=0), mask=real)
            tl.store(cbars + shared + n, tl.sum(H * ybar_t[:, None], axis=0), mask=real)
            H = previous
        tl.debug_barrier()
    tl.store(initialbar + matrix + own, carried, mask=tile)
    tl.store(Abars + matrix + own, Abar, mask=tile)


INTERPRETED = not isinstance(forward, triton.JITFunction)
"""Whether triton interprets kernels in numpy (TRITON_INTERPRET=1 when it was imported): they then take CPU tensors."""
