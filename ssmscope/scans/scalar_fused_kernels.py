"""The Triton kernels of `scalar_fused`: the scan with one decay per head and its gradient, as products of chunks.

Of a chunk of Q steps, S_t = Σ_{r≤t} log₂ a_r counted from the chunk's start, kept as the sum of two float32
(`sums`), so that a difference of two has all its digits. What lies above the diagonal is masked before it is
exponentiated. `carry` walks the chunks one after the other and keeps the state before each; the other kernels work on
all chunks side by side, each program on one chunk and a part of the heads of one group, WIDTH of a head's P at a time.
Where the input is weighted (WEIGHTED) the state is written Δ_t x_t, and Δ stands below S. PRECISION is that of
products: "bf16x6" has float32's digits, "bf16x3" 16 bits, "bf16" 8. Sums over heads leave a program as its own row of a
table that torch adds up: nothing depends on the order in which programs run.

Importing this module needs triton.
"""

import triton
import triton.language as tl

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether triton interprets kernels in numpy (TRITON_INTERPRET=1 when it was imported): they then take CPU tensors."""
LEAST: tl.constexpr = tl.constexpr(-1e6)
"""Log-decays are at least this, so that sums of them stay finite."""


@triton.jit
def _bf16(a):
    a = a.to(tl.bfloat16)
    if INTERPRETED:  # the interpreter multiplies bfloat16 by their bits
        a = a.to(tl.float32)
    return a


@triton.jit
def _dot(acc, a, b, PRECISION: tl.constexpr):
    """acc + a b"""
    if PRECISION == "bf16":
        acc = tl.dot(_bf16(a), _bf16(b), acc)
    elif INTERPRETED:  # it knows no parts of bfloat16
        acc = tl.dot(a, b, acc, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _decay(high, low, FLOOR: tl.constexpr):
    """2 to the power of high + low."""
    s = high + low
    return tl.exp2(tl.where(s < FLOOR, FLOOR, s))  # a NaN is not below the floor and stays


@triton.jit
def _tile(at, rows, columns, step, real, valid, EVEN: tl.constexpr, WHOLE: tl.constexpr):
    """(rows, columns) of a term, 0 off its edges; EVEN: all rows are real, WHOLE: all columns valid."""
    at = at + (rows[:, None] * step + columns[None, :])
    if EVEN and WHOLE:
        tile = tl.load(at)
    elif WHOLE:
        tile = tl.load(at, mask=real[:, None], other=0.0)
    elif EVEN:
        tile = tl.load(at, mask=valid[None, :], other=0.0)
    else:
        tile = tl.load(at, mask=real[:, None] & valid[None, :], other=0.0)
    return tile


@triton.jit
def _put(at, rows, columns, step, real, valid, tile, EVEN: tl.constexpr, WHOLE: tl.constexpr):
    """Stores what `_tile` loads."""
    at = at + (rows[:, None] * step + columns[None, :])
    if EVEN and WHOLE:
        tl.store(at, tile)
    elif WHOLE:
        tl.store(at, tile, mask=real[:, None])
    elif EVEN:
        tl.store(at, tile, mask=valid[None, :])
    else:
        tl.store(at, tile, mask=real[:, None] & valid[None, :])


@triton.jit
def sums(
    log_a,
    delta,
    S,
    length,
    heads,
    chunks,
    a_row,
    a_step,
    a_head,
    d_row,
    d_step,
    d_head,
    Q: tl.constexpr,
    HEADS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """S (batch, chunks, heads, 2 or 3, Q): its first part, its second, and Δ. A program has HEADS heads of a chunk."""
    program = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(heads, HEADS)
    h = (program % blocks) * HEADS + tl.arange(0, HEADS)
    chunk = (program // blocks) % chunks
    row = program // (blocks * chunks)
    q = tl.arange(0, Q)
    t = chunk * Q + q
    known = (q >= 0)[:, None] & (h < heads)[None, :]
    there = known & (t < length)[:, None]
    a = tl.load(log_a + row * a_row + t[:, None] * a_step + h[None, :] * a_head, mask=there, other=0.0).to(tl.float64)
    s = tl.cumsum(tl.where(a < LEAST, LEAST, a) * tl.full([], 1.4426950408889634, tl.float64), axis=0)
    high = s.to(tl.float32)
    PARTS: tl.constexpr = 3 if WEIGHTED else 2
    at = S + (((row * chunks + chunk) * heads + h) * PARTS * Q)[None, :] + q[:, None]
    tl.store(at, high, mask=known)
    tl.store(at + Q, (s - high.to(tl.float64)).to(tl.float32), mask=known)
    if WEIGHTED:
        d = tl.load(delta + row * d_row + t[:, None] * d_step + h[None, :] * d_head, mask=there, other=0.0)
        tl.store(at + 2 * Q, d, mask=known)


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
    chunks,
    left_row,
    left_step,
    left_head,
    right_row,
    right_step,
    right_group,
    P: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    STATES: tl.constexpr,
    Q: tl.constexpr,
    FLOOR: tl.constexpr,
    WEIGHTED: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    REVERSE: tl.constexpr,
    FIRST: tl.constexpr,
):
    """The state (P, N) before every chunk, `states` (batch, chunks, heads, P, N), and after the last, `last` (batch,
    heads, P, N): H ← a_Q H + Σ_s (a_Q / a_s) Δ_s left_s right_sᵀ, a_t = 2^{S_t}, from `first` or, without FIRST, from
    0; `left` is x and `right` b.

    With REVERSE the adjoint after every chunk, and before the first, with `left` ȳ and `right` c, from the last chunk
    to the first: Λ ← a_Q Λ + Σ_t a_t ȳ_t c_tᵀ. A program has WIDTH by STATES numbers of one head of one sequence.
    """
    program = tl.program_id(0).to(tl.int64)
    P_BLOCKS: tl.constexpr = (P + WIDTH - 1) // WIDTH
    N_BLOCKS: tl.constexpr = (N + STATES - 1) // STATES
    PARTS: tl.constexpr = 3 if WEIGHTED else 2
    n0, p0 = (program % N_BLOCKS) * STATES, (program // N_BLOCKS % P_BLOCKS) * WIDTH
    rest = program // (N_BLOCKS * P_BLOCKS)
    head, row = rest % heads, rest // heads
    group = head // (heads // groups)
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    wide, real_n = p < P - p0, n < N - n0
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    WHOLE_N: tl.constexpr = N % STATES == 0
    matrix = (row * heads + head) * P * N + p0 * N + n0
    left_at = left + row * left_row + head * left_head + p0
    right_at = right + row * right_row + group * right_group + n0
    if FIRST:
        H = _tile(first + matrix, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
    else:
        H = tl.zeros([WIDTH, STATES], tl.float32)
    for i in tl.range(0, chunks, num_stages=STAGES):
        k = i
        if REVERSE:
            k = chunks - 1 - i
        at = (row * chunks + k) * heads + head
        S_at = S + at * (PARTS * Q)
        high, low = tl.load(S_at + q), tl.load(S_at + Q + q)
        high_end, low_end = tl.load(S_at + Q - 1), tl.load(S_at + 2 * Q - 1)
        real = q < length - k * Q
        if REVERSE:
            weight = _decay(high, low, FLOOR)
        else:
            weight = _decay(high_end - high, low_end - low, FLOOR)
            if WEIGHTED:
                weight *= tl.load(S_at + 2 * Q + q)
        start = (row * 0 + k) * Q  # in 64 bits
        left_t = _tile(left_at + start * left_step, q, p, left_step, real, wide, EVEN, WHOLE_P)
        right_t = _tile(right_at + start * right_step, q, n, right_step, real, real_n, EVEN, WHOLE_N)
        _put(states + at * P * N + p0 * N + n0, p, n, N, wide, real_n, H, WHOLE_P, WHOLE_N)
        H = _dot(_decay(high_end, low_end, FLOOR) * H, tl.trans(left_t * weight[:, None]), right_t, PRECISION)
    _put(last + matrix, p, n, N, wide, real_n, H, WHOLE_P, WHOLE_N)


@triton.jit
def _place(heads, groups, chunks, blocks, WIDE: tl.constexpr):
    """Of this program: its sequence, chunk, group, number among those that share the group, and its first part of a
    head and the one after the last; a head has WIDE parts."""
    program = tl.program_id(0).to(tl.int64)
    block = program % blocks
    group = (program // blocks) % groups
    chunk = (program // (blocks * groups)) % chunks
    row = program // (blocks * groups * chunks)
    share = heads // groups * WIDE
    per = tl.cdiv(share, blocks)
    first = group * share + block * per
    return row, chunk, group, block, first, tl.minimum(first + per, (group + 1) * share)


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
    chunks,
    blocks,
    x_row,
    x_step,
    x_head,
    b_row,
    b_step,
    b_group,
    c_row,
    c_step,
    c_group,
    P: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    STATES: tl.constexpr,
    Q: tl.constexpr,
    FLOOR: tl.constexpr,
    WEIGHTED: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y_t = Σ_{s≤t} L[t, s] Δ_s (c_t · b_s) x_s + a_t H c_t of every chunk, L[t, s] = a_t / a_s and H the state before
    it; `y` (batch, length, heads, P)."""
    WIDE: tl.constexpr = (P + WIDTH - 1) // WIDTH
    PARTS: tl.constexpr = 3 if WEIGHTED else 2
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    WHOLE_N: tl.constexpr = N == STATES
    row, chunk, group, block, begin, end = _place(heads, groups, chunks, blocks, WIDE)
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    start = chunk * Q
    real, real_n = q < length - start, n < N
    before = q[:, None] >= q[None, :]
    b_t = _tile(b + row * b_row + group * b_group + start * b_step, q, n, b_step, real, real_n, EVEN, WHOLE_N)
    c_t = _tile(c + row * c_row + group * c_group + start * c_step, q, n, c_step, real, real_n, EVEN, WHOLE_N)
    cb = _dot(tl.zeros([Q, Q], tl.float32), c_t, tl.trans(b_t), PRECISION)
    at = (row * chunks + chunk) * heads
    for part in tl.range(begin, end, num_stages=STAGES):
        head, p0 = part // WIDE, (part % WIDE) * WIDTH
        wide = p < P - p0
        S_at = S + (at + head) * (PARTS * Q)
        high, low = tl.load(S_at + q), tl.load(S_at + Q + q)
        H = _tile(states + ((at + head) * P + p0) * N, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
        x_t = _tile(x + row * x_row + head * x_head + start * x_step + p0, q, p, x_step, real, wide, EVEN, WHOLE_P)
        out = _dot(tl.zeros([Q, WIDTH], tl.float32), c_t, tl.trans(H), PRECISION)
        out = out * _decay(high, low, FLOOR)[:, None]
        inner = cb * _decay(high[:, None] - high[None, :], low[:, None] - low[None, :], FLOOR)
        if WEIGHTED:
            inner = inner * tl.load(S_at + 2 * Q + q)[None, :]
        out = _dot(out, tl.where(before, inner, 0.0), x_t, PRECISION)
        y_at = y + ((row * length + start) * heads + head) * P + p0
        _put(y_at, q, p, heads * P, real, wide, out, EVEN, WHOLE_P)


@triton.jit
def back_states(
    S,
    x,
    c,
    ybar,
    states,
    adjoints,
    was_read,
    met,
    bbars,
    cbars,
    batch,
    length,
    heads,
    groups,
    chunks,
    blocks,
    x_row,
    x_step,
    x_head,
    c_row,
    c_step,
    c_group,
    ybar_row,
    ybar_step,
    ybar_head,
    P: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    STATES: tl.constexpr,
    Q: tl.constexpr,
    FLOOR: tl.constexpr,
    WEIGHTED: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of every chunk the gradients of b and c by the adjoint Λ after it and the state H before it, b̄_s = (a_Q / a_s)
    Δ_s Λᵀ x_s and c̄_t = a_t Hᵀ ȳ_t, summed over a program's heads, its row of `bbars` and `cbars` (blocks, batch,
    length, groups, N); and what crosses a chunk's ends, for the gradient of log a: `was_read`, a_t ȳ_t · H c_t (batch,
    chunks, heads, parts, Q), and `met`, a_Q ⟨Λ, H⟩ (batch, chunks, heads, parts)."""
    WIDE: tl.constexpr = (P + WIDTH - 1) // WIDTH
    PARTS: tl.constexpr = 3 if WEIGHTED else 2
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    WHOLE_N: tl.constexpr = N == STATES
    row, chunk, group, block, begin, end = _place(heads, groups, chunks, blocks, WIDE)
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    start = chunk * Q
    real, real_n = q < length - start, n < N
    c_t = _tile(c + row * c_row + group * c_group + start * c_step, q, n, c_step, real, real_n, EVEN, WHOLE_N)
    at = (row * chunks + chunk) * heads
    b_sum, c_sum = tl.zeros([Q, STATES], tl.float32), tl.zeros([Q, STATES], tl.float32)
    for part in tl.range(begin, end, num_stages=1):
        head, p0 = part // WIDE, (part % WIDE) * WIDTH
        wide = p < P - p0
        S_at = S + (at + head) * (PARTS * Q)
        high, low = tl.load(S_at + q), tl.load(S_at + Q + q)
        high_end, low_end = tl.load(S_at + Q - 1), tl.load(S_at + 2 * Q - 1)
        own = ((at + head) * P + p0) * N
        weight = _decay(high_end - high, low_end - low, FLOOR)
        if WEIGHTED:
            weight *= tl.load(S_at + 2 * Q + q)
        x_t = _tile(x + row * x_row + head * x_head + start * x_step + p0, q, p, x_step, real, wide, EVEN, WHOLE_P)
        adjoint = _tile(adjoints + own, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
        b_sum = _dot(b_sum, x_t * weight[:, None], adjoint, PRECISION)
        H = _tile(states + own, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
        both = tl.sum(tl.sum(H.to(tl.float32) * adjoint.to(tl.float32), axis=1), axis=0)
        tl.store(met + part + at * WIDE, both * _decay(high_end, low_end, FLOOR))
        ybar_at = ybar + row * ybar_row + head * ybar_head + start * ybar_step + p0
        ybar_t = _tile(ybar_at, q, p, ybar_step, real, wide, EVEN, WHOLE_P) * _decay(high, low, FLOOR)[:, None]
        one = _dot(tl.zeros([Q, STATES], tl.float32), ybar_t, H, PRECISION)
        tl.store(was_read + (part + at * WIDE) * Q + q, tl.sum(one * c_t, axis=1))
        c_sum += one
    shared = (((block * batch + row) * length + start) * groups + group) * N
    _put(bbars + shared, q, n, groups * N, real, real_n, b_sum, EVEN, WHOLE_N)
    _put(cbars + shared, q, n, groups * N, real, real_n, c_sum, EVEN, WHOLE_N)


@triton.jit
def _earlier(K, strictly, TERMS: tl.constexpr):
    """Σ_{s<r} K[t, s] at [t, r]; K in TERMS numbers of 8 bits, `strictly` 1 at [s, r] for s < r."""
    R = tl.dot(_bf16(K), strictly)
    for _ in tl.static_range(TERMS - 1):
        K = K - _bf16(K).to(tl.float32)
        R = tl.dot(_bf16(K), strictly, R)
    return R


@triton.jit
def back(
    S,
    x,
    b,
    c,
    ybar,
    adjoints,
    was_read,
    met,
    abar,
    deltabar,
    xbar,
    bbars,
    cbars,
    batch,
    length,
    heads,
    groups,
    chunks,
    blocks,
    x_row,
    x_step,
    x_head,
    b_row,
    b_step,
    b_group,
    c_row,
    c_step,
    c_group,
    ybar_row,
    ybar_step,
    ybar_head,
    P: tl.constexpr,
    N: tl.constexpr,
    WIDTH: tl.constexpr,
    STATES: tl.constexpr,
    Q: tl.constexpr,
    FLOOR: tl.constexpr,
    WEIGHTED: tl.constexpr,
    EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Of every chunk the other gradients, and what its own steps add to those of b and c, with L[t, s] = a_t / a_s for
    s ≤ t:

    x̄_s = Δ_s Σ_t L[t, s] (c_t · b_s) ȳ_t + Δ_s (a_Q / a_s) Λ b_s, the same without Δ_s times x_s for Δ, b̄_s += Σ_t
    K[t, s] c_t and c̄_t += Σ_s K[t, s] b_s of K[t, s] = L[t, s] Δ_s (ȳ_t · x_s), summed over heads first.

    The gradient of log a_r is what passes through step r: what is written at s < r or before the chunk, and read at
    t ≥ r or after it, Σ_{s<r≤t} K[t, s] (c_t · b_s) + Σ_{t≥r} `was_read`_t + Σ_{s<r} written_s + `met`. A sum without
    differences: however small it is, its digits are right. `abar` and `deltabar` (batch, chunks, heads, parts, Q).
    """
    WIDE: tl.constexpr = (P + WIDTH - 1) // WIDTH
    PARTS: tl.constexpr = 3 if WEIGHTED else 2
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    WHOLE_N: tl.constexpr = N == STATES
    row, chunk, group, block, begin, end = _place(heads, groups, chunks, blocks, WIDE)
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    start = chunk * Q
    real, real_n = q < length - start, n < N
    before = q[:, None] >= q[None, :]
    strictly = _bf16(tl.where(q[:, None] < q[None, :], 1.0, 0.0))
    b_t = _tile(b + row * b_row + group * b_group + start * b_step, q, n, b_step, real, real_n, EVEN, WHOLE_N)
    c_t = _tile(c + row * c_row + group * c_group + start * c_step, q, n, c_step, real, real_n, EVEN, WHOLE_N)
    cb = _dot(tl.zeros([Q, Q], tl.float32), c_t, tl.trans(b_t), PRECISION)
    at = (row * chunks + chunk) * heads
    K_sum = tl.zeros([Q, Q], tl.float32)
    for part in tl.range(begin, end, num_stages=1):
        head, p0 = part // WIDE, (part % WIDE) * WIDTH
        wide = p < P - p0
        S_at = S + (at + head) * (PARTS * Q)
        high, low = tl.load(S_at + q), tl.load(S_at + Q + q)
        high_end, low_end = tl.load(S_at + Q - 1), tl.load(S_at + 2 * Q - 1)
        steps = (part + at * WIDE) * Q + q
        x_t = _tile(x + row * x_row + head * x_head + start * x_step + p0, q, p, x_step, real, wide, EVEN, WHOLE_P)
        ybar_at = ybar + row * ybar_row + head * ybar_head + start * ybar_step + p0
        ybar_t = _tile(ybar_at, q, p, ybar_step, real, wide, EVEN, WHOLE_P)
        L = tl.where(before, _decay(high[:, None] - high[None, :], low[:, None] - low[None, :], FLOOR), 0.0)
        out = _dot(tl.zeros([Q, WIDTH], tl.float32), tl.trans(L * cb), ybar_t, PRECISION)
        K = L * _dot(tl.zeros([Q, Q], tl.float32), ybar_t, tl.trans(x_t), PRECISION)
        if WEIGHTED:
            d = tl.load(S_at + 2 * Q + q)
            K = K * d[None, :]
        K_sum += K
        passing = _earlier(K * cb, strictly, TERMS) + tl.load(was_read + steps)[:, None]
        through = tl.sum(tl.where(before, passing, 0.0), axis=0) + tl.load(met + part + at * WIDE)
        adjoint = _tile(adjoints + ((at + head) * P + p0) * N, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
        across = _dot(tl.zeros([Q, WIDTH], tl.float32), b_t, tl.trans(adjoint), PRECISION)
        across = across * _decay(high_end - high, low_end - low, FLOOR)[:, None]
        written = tl.sum(across * x_t, axis=1)
        out += across
        if WEIGHTED:
            written = written * d
            tl.store(deltabar + steps, tl.sum(out * x_t, axis=1))
            out = out * d[:, None]
        through += tl.sum(tl.where(before, 0.0, written[:, None]), axis=0)
        tl.store(abar + steps, through)
        x_at = xbar + ((row * length + start) * heads + head) * P + p0
        _put(x_at, q, p, heads * P, real, wide, out, EVEN, WHOLE_P)
    shared = (((block * batch + row) * length + start) * groups + group) * N
    b_sum = _tile(bbars + shared, q, n, groups * N, real, real_n, EVEN, WHOLE_N)
    b_sum = _dot(b_sum, tl.trans(K_sum), c_t, PRECISION)
    _put(bbars + shared, q, n, groups * N, real, real_n, b_sum, EVEN, WHOLE_N)
    c_sum = _tile(cbars + shared, q, n, groups * N, real, real_n, EVEN, WHOLE_N)
    c_sum = _dot(c_sum, K_sum, b_t, PRECISION)
    _put(cbars + shared, q, n, groups * N, real, real_n, c_sum, EVEN, WHOLE_N)
