"""The Triton kernels of `scalar_fused`: the scan with one decay per head and its gradient, as products of chunks.

Of a chunk of Q steps, S_t = Σ_{r≤t} log a_r counted from the chunk's start, in float64: the difference of two of them
has all the digits that float32 can hold. What lies above the diagonal is masked before it is exponentiated. `carry`
walks the chunks one after the other and keeps the state before each; the other kernels work on all chunks side by side.
What has a matrix per head (L, below) goes head by head; what meets the states goes for HEADS of them at once, in tiles
of HEADS · PART columns, PART the next power of two of a head's width P. Products are of float32 in three parts of TF32,
which keeps its digits. Sums over heads leave a program as its own row of a table that torch adds up: nothing depends on
the order in which programs run.

Importing this module needs triton.
"""

import triton
import triton.language as tl


@triton.jit
def _product(a, b):
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _decay(log_a, FLOOR: tl.constexpr):
    """exp(log a), a float64, as a float32."""
    log_a = log_a.to(tl.float32)
    return tl.exp(tl.where(log_a < FLOOR, FLOOR, log_a))  # a NaN is not below the floor and stays


@triton.jit
def _tile(at, rows, columns, step, within, real, valid):
    """(steps, columns) of a term, 0 off its edges."""
    return tl.load(
        at + rows[:, None] * step + columns[None, :] * within, mask=real[:, None] & valid[None, :], other=0.0
    )


@triton.jit
def carry(
    S,
    left,
    right,
    first,
    states,
    last,
    length,
    heads,
    groups,
    left_row,
    left_step,
    left_head,
    left_within,
    right_row,
    right_step,
    right_group,
    right_within,
    P: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    STATES: tl.constexpr,
    Q: tl.constexpr,
    FLOOR: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """The state (P, N) before every chunk, `states` (batch, heads, chunks, P, N), and after the last, `last` (batch,
    heads, P, N): H ← exp(S_Q) H + Σ_s exp(S_Q − S_s) left_s right_sᵀ from `first`; `left` is x and `right` b.

    With REVERSE the adjoint after every chunk, and before the first, with `left` ȳ and `right` c, from the last chunk
    to the first: Λ ← exp(S_Q) Λ + Σ_t exp(S_t) ȳ_t c_tᵀ. A program has one head of one sequence and WIDTH of P.
    """
    program = tl.program_id(0).to(tl.int64)
    blocks: tl.constexpr = (P + WIDTH - 1) // WIDTH
    block = program % blocks
    head = (program // blocks) % heads
    row = program // (blocks * heads)
    group = head // (heads // groups)
    q, p, n = tl.arange(0, Q), block * WIDTH + tl.arange(0, WIDTH), tl.arange(0, STATES)
    wide, real_n = p < P, n < N
    own = p[:, None] * N + n[None, :]
    tile = wide[:, None] & real_n[None, :]
    matrix = (row * heads + head) * P * N
    chunks = tl.cdiv(length, Q)
    S_at = S + row * chunks * Q * heads + head
    left_at = left + row * left_row + head * left_head
    right_at = right + row * right_row + group * right_group
    states_at = states + (row * heads + head) * chunks * P * N
    H = tl.load(first + matrix + own, mask=tile, other=0.0)
    for i in range(chunks):
        k = i
        if REVERSE:
            k = chunks - 1 - i
        t = (row * 0 + k) * Q + q  # in 64 bits
        real = t < length
        S_t, total = tl.load(S_at + t * heads), tl.load(S_at + ((row * 0 + k) * Q + Q - 1) * heads)
        weight = _decay(S_t if REVERSE else total - S_t, FLOOR)
        left_t = _tile(left_at, t, p, left_step, left_within, real, wide) * weight[:, None]
        right_t = _tile(right_at, t, n, right_step, right_within, real, real_n)
        tl.store(states_at + (row * 0 + k) * P * N + own, H, mask=tile)
        H = _decay(total, FLOOR) * H + _product(tl.trans(left_t), right_t)
    tl.store(last + matrix + own, H, mask=tile)


@triton.jit
def _place(heads, groups, chunks, blocks):
    """Of this program: its sequence, chunk, group, number among those that share the group's heads, and first head."""
    program = tl.program_id(0).to(tl.int64)
    block = program % blocks
    group = (program // blocks) % groups
    chunk = (program // (blocks * groups)) % chunks
    row = program // (blocks * groups * chunks)
    share = heads // groups
    return row, chunk, group, block, group * share + block * (share // blocks)


@triton.jit
def _columns(i, per, first, P: tl.constexpr, HEADS: tl.constexpr, PART: tl.constexpr):
    """Of the tile of HEADS heads from the i-th of a program's on: each column's head, its place in it, and masks of
    what is a head and what is a column of one."""
    w = tl.arange(0, HEADS * PART)
    head, within = i + w // PART, w % PART
    return first + head, within, head < per, (head < per) & (within < P)


@triton.jit
def read(
    S,
    x,
    b,
    c,
    states,
    y,
    length,
    heads,
    groups,
    blocks,
    x_row,
    x_step,
    x_head,
    x_within,
    b_row,
    b_step,
    b_group,
    b_within,
    c_row,
    c_step,
    c_group,
    c_within,
    P: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    STATES: tl.constexpr,
    HEADS: tl.constexpr,
    PART: tl.constexpr,
    Q: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """y_t = Σ_{s≤t} exp(S_t − S_s) (c_t · b_s) x_s + exp(S_t) H c_t of every chunk, H the state before it; `y` (batch,
    length, heads, P). A program has one chunk and a part of the heads of one group."""
    chunks = tl.cdiv(length, Q)
    row, chunk, group, block, first = _place(heads, groups, chunks, blocks)
    per = heads // groups // blocks
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    wide, real_n = p < P, n < N
    t = chunk * Q + q
    real = t < length
    before = q[:, None] >= q[None, :]
    b_t = _tile(b + row * b_row + group * b_group, t, n, b_step, b_within, real, real_n)
    c_t = _tile(c + row * c_row + group * c_group, t, n, c_step, c_within, real, real_n)
    cb = _product(c_t, tl.trans(b_t))
    S_at = S + (row * chunks + chunk) * Q * heads
    y_at = y + (row * length + t) * heads * P
    for i in range(0, per, HEADS):
        for j in range(i, tl.minimum(i + HEADS, per)):
            head = first + j
            S_t = tl.load(S_at + q * heads + head)
            L = _decay(tl.where(before, S_t[:, None] - S_t[None, :], 0.0), FLOOR)
            x_t = _tile(x + row * x_row + head * x_head, t, p, x_step, x_within, real, wide)
            out = _product(tl.where(before, cb * L, 0.0), x_t)
            tl.store(y_at[:, None] + head * P + p[None, :], out, mask=real[:, None] & wide[None, :])
        tl.debug_barrier()  # what one thread laid down another may pick up
        head_w, p_w, is_head, valid = _columns(i, per, first, P, HEADS, PART)
        S_w = tl.load(S_at + q[:, None] * heads + head_w[None, :], mask=is_head[None, :], other=0.0)
        state = ((row * heads + head_w) * chunks + chunk) * P * N + p_w * N
        held = tl.load(states + state[:, None] + n[None, :], mask=valid[:, None] & real_n[None, :], other=0.0)
        place, there = y_at[:, None] + (head_w * P + p_w)[None, :], real[:, None] & valid[None, :]
        within = tl.load(place, mask=there, other=0.0)
        tl.store(place, within + _decay(S_w, FLOOR) * _product(c_t, tl.trans(held)), mask=there)


@triton.jit
def back_within(
    S,
    x,
    b,
    c,
    ybar,
    through,
    xbar,
    bbars,
    cbars,
    batch,
    length,
    heads,
    groups,
    blocks,
    x_row,
    x_step,
    x_head,
    x_within,
    b_row,
    b_step,
    b_group,
    b_within,
    c_row,
    c_step,
    c_group,
    c_within,
    ybar_row,
    ybar_step,
    ybar_head,
    ybar_within,
    P: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    STATES: tl.constexpr,
    HEADS: tl.constexpr,
    PART: tl.constexpr,
    Q: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """Of every chunk the gradients by what its own steps write, with L[t, s] = exp(S_t − S_s) for s ≤ t:

    x̄_s = Σ_t L[t, s] (c_t · b_s) ȳ_t, b̄_s = Σ_t L[t, s] (ȳ_t · x_s) c_t, c̄_t = Σ_s L[t, s] (ȳ_t · x_s) b_s, and what
    passes through step r, Σ_{s<r≤t} L[t, s] (ȳ_t · x_s) (c_t · b_s), the gradient of log a_r.

    `through` (batch, chunks, Q, heads), `xbar` (batch, length, heads, P), `bbars` and `cbars` (blocks, batch, length,
    groups, N), one row of which is that of a program's heads.
    """
    chunks = tl.cdiv(length, Q)
    row, chunk, group, block, first = _place(heads, groups, chunks, blocks)
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    wide, real_n = p < P, n < N
    t = chunk * Q + q
    real = t < length
    before, earlier = q[:, None] >= q[None, :], q[:, None] > q[None, :]
    later = tl.where(q[:, None] <= q[None, :], 1.0, 0.0)
    b_t = _tile(b + row * b_row + group * b_group, t, n, b_step, b_within, real, real_n)
    c_t = _tile(c + row * c_row + group * c_group, t, n, c_step, c_within, real, real_n)
    cb = _product(c_t, tl.trans(b_t))
    steps_at = (row * chunks + chunk) * Q * heads
    all_yx = tl.zeros([Q, Q], tl.float32)
    for head in range(first, first + heads // groups // blocks):
        S_t = tl.load(S + steps_at + q * heads + head)
        L = tl.where(before, _decay(tl.where(before, S_t[:, None] - S_t[None, :], 0.0), FLOOR), 0.0)
        x_t = _tile(x + row * x_row + head * x_head, t, p, x_step, x_within, real, wide)
        ybar_t = _tile(ybar + row * ybar_row + head * ybar_head, t, p, ybar_step, ybar_within, real, wide)
        yx = L * _product(ybar_t, tl.trans(x_t))
        all_yx += yx
        x_out = _product(tl.trans(L * cb), ybar_t)
        place = ((row * length + t) * heads + head) * P
        tl.store(xbar + place[:, None] + p[None, :], x_out, mask=real[:, None] & wide[None, :])
        passed = tl.where(earlier, _product(later, yx * cb), 0.0)  # [r, s]: Σ_{t≥r}, for s < r
        tl.store(through + steps_at + q * heads + head, tl.sum(passed, axis=1))
    shared = ((((block * batch + row) * length + t) * groups + group) * N)[:, None] + n[None, :]
    there = real[:, None] & real_n[None, :]
    tl.store(bbars + shared, _product(tl.trans(all_yx), c_t), mask=there)
    tl.store(cbars + shared, _product(all_yx, b_t), mask=there)


@triton.jit
def back_across(
    S,
    left,
    right,
    matrices,
    states,
    crossing,
    met,
    xbar,
    bars,
    batch,
    length,
    heads,
    groups,
    blocks,
    left_row,
    left_step,
    left_head,
    left_within,
    right_row,
    right_step,
    right_group,
    right_within,
    P: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    STATES: tl.constexpr,
    HEADS: tl.constexpr,
    PART: tl.constexpr,
    Q: tl.constexpr,
    FLOOR: tl.constexpr,
    ADJOINT: tl.constexpr,
):
    """Of every chunk the gradients by the state H before it, or with ADJOINT by the adjoint Λ after it, added to those
    of `back_within`.

    With H as `matrices`, ȳ as `left` and c as `right`: c̄_t = exp(S_t) Hᵀ ȳ_t, and of log a the part `crossing`,
    exp(S_t) ȳ_t · H c_t (batch, chunks, Q, heads). With Λ, x and b: b̄_s = exp(S_Q − S_s) Λᵀ x_s, `crossing`
    exp(S_Q − S_s) x_s · Λ b_s, x̄_s = exp(S_Q − S_s) Λ b_s, and `met`, exp(S_Q) ⟨Λ, H⟩ (batch, chunks, heads).
    """
    chunks = tl.cdiv(length, Q)
    row, chunk, group, block, first = _place(heads, groups, chunks, blocks)
    per = heads // groups // blocks
    q, n = tl.arange(0, Q), tl.arange(0, STATES)
    real_n = n < N
    t = chunk * Q + q
    real = t < length
    right_t = _tile(right + row * right_row + group * right_group, t, n, right_step, right_within, real, real_n)
    shared = ((((block * batch + row) * length + t) * groups + group) * N)[:, None] + n[None, :]
    bar = tl.load(bars + shared, mask=real[:, None] & real_n[None, :], other=0.0)
    for i in range(0, per, HEADS):
        head_w, p_w, is_head, valid = _columns(i, per, first, P, HEADS, PART)
        there = real[:, None] & valid[None, :]
        j = i + tl.arange(0, HEADS)
        steps_at = (row * chunks + chunk) * Q * heads
        state = (((row * heads + head_w) * chunks + chunk) * P * N + p_w * N)[:, None] + n[None, :]
        tile = valid[:, None] & real_n[None, :]
        matrix = tl.load(matrices + state, mask=tile, other=0.0)
        S_w = tl.load(S + steps_at + (q * heads)[:, None] + head_w[None, :], mask=is_head[None, :], other=0.0)
        if ADJOINT:
            total_w = tl.load(S + steps_at + (Q - 1) * heads + head_w, mask=is_head, other=0.0)
            S_w = total_w[None, :] - S_w
            both = tl.sum(matrix * tl.load(states + state, mask=tile, other=0.0), axis=1) * _decay(total_w, FLOOR)
            both = tl.sum(tl.reshape(both, (HEADS, PART)), axis=1)
            tl.store(met + (row * chunks + chunk) * heads + first + j, both, mask=j < per)
        left_at = left + row * left_row + (head_w * left_head + p_w * left_within)[None, :]
        left_w = tl.load(left_at + (t * left_step)[:, None], mask=there, other=0.0)
        weight = _decay(S_w, FLOOR)
        across = weight * _product(right_t, tl.trans(matrix))
        if ADJOINT:
            place = xbar + ((row * length + t) * heads * P)[:, None] + (head_w * P + p_w)[None, :]
            tl.store(place, tl.load(place, mask=there, other=0.0) + across, mask=there)
        by_head = tl.sum(tl.reshape(left_w * across, (Q, HEADS, PART)), axis=2)
        tl.store(crossing + steps_at + (q * heads)[:, None] + (first + j)[None, :], by_head, mask=(j < per)[None, :])
        bar += _product(left_w * weight, matrix)
    tl.store(bars + shared, bar, mask=real[:, None] & real_n[None, :])


INTERPRETED = not isinstance(carry, triton.JITFunction)
"""Whether triton interprets kernels in numpy (TRITON_INTERPRET=1 when it was imported): they then take CPU tensors."""
