"""Triton kernels for the scan with one decay per head (Mamba-2; Dao & Gu 2024, section 6) and its gradients.

Within a chunk of CHUNK steps let S_t be the sum of log₂ a from the chunk's first step to t, H the state before the
chunk, stored as (state, width), and CB[t, s] = c_t · b_s. Then

    y_t = Σ_{s≤t} 2^(S_t − S_s) CB[t, s] Δ_s x_s + 2^(S_t) Hᵀ c_t
    H ← 2^(S_end) H + Σ_s 2^(S_end − S_s) Δ_s b_s x_sᵀ.

The adjoint obeys the same equations with time reversed, b and c exchanged and ȳ for x: `states` and `outputs` do both.
S is the sum of two float32, which keeps the digits of differences of long sums. Exponents are masked before they are
exponentiated. Each sum is added up in an order that does not depend on the batch, so neither do results.
"""

import triton
import triton.language as tl

CHUNK: tl.constexpr = tl.constexpr(64)
MIN_LOG_DECAY: tl.constexpr = tl.constexpr(-1e4)  # finite, because differences of infinite sums are NaN
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
_HAS_BF16X6 = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6) and not INTERPRETED
# Both have about float32's precision; the first is faster.
FLOAT32: tl.constexpr = tl.constexpr("bf16x6" if _HAS_BF16X6 else "tf32x3")


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    """Return a @ b, summed in float32, of operands rounded to PRECISION: float32, tf32 or bfloat16."""
    a, b = a.to(tl.float32), b.to(tl.float32)
    if PRECISION == "float32":
        product = tl.dot(a, b, input_precision=FLOAT32)
    elif PRECISION == "tf32":
        product = tl.dot(a, b, input_precision="tf32")
    else:
        a, b = a.to(tl.bfloat16), b.to(tl.bfloat16)
        if INTERPRETED:  # numpy has no bfloat16
            a, b = a.to(tl.float32), b.to(tl.float32)
        product = tl.dot(a, b)
    return product


@triton.jit
def _load(pointer, row_stride, n_rows, n_columns, rows, columns):
    """Load a tile with contiguous columns, 0 outside of n_rows by n_columns."""
    mask = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    return tl.load(pointer + rows[:, None] * row_stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _store(pointer, row_stride, n_rows, n_columns, rows, columns, tile):
    mask = (rows < n_rows)[:, None] & (columns < n_columns)[None, :]
    tl.store(pointer + rows[:, None] * row_stride + columns[None, :], tile, mask=mask)


@triton.jit
def _decay(sums, t, s):
    """Return 2^(S_t − S_s) for steps t and s that broadcast."""
    high = tl.load(sums + t) - tl.load(sums + s)
    return tl.exp2(high + (tl.load(sums + CHUNK + t) - tl.load(sums + CHUNK + s)))


@triton.jit
def _causal_decay(sums, t, s):
    """Return 2^(S_t − S_s) for steps t and s that broadcast, 0 where s is later than t."""
    high = tl.load(sums + t) - tl.load(sums + s)
    exponent = high + (tl.load(sums + CHUNK + t) - tl.load(sums + CHUNK + s))
    return tl.exp2(tl.where(s <= t, exponent, float("-inf")))


@triton.jit
def _decay_from_start(sums, t):
    return tl.exp2(tl.load(sums + t) + tl.load(sums + CHUNK + t))


@triton.jit(do_not_specialize=["length"])
def prepare(
    log_a, b, c, delta, sums, products, length, heads, groups, a_row, a_step, a_head, b_row, b_step, b_group,
    c_row, c_step, c_group, d_row, d_step, d_head, N: tl.constexpr, N_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write S in two parts and Δ (batch, chunks, heads, 3, CHUNK), and CB (batch, chunks, groups, CHUNK, CHUNK). One
    program per (batch, chunk, group). Steps past the end have decay 1 and Δ = 0."""
    row, chunk, group = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    q, n, h = tl.arange(0, CHUNK), tl.arange(0, N_BLOCK), tl.arange(0, 16)
    step = chunk.to(tl.int64) * CHUNK
    at = row * tl.num_programs(1) + chunk
    b += row * b_row + step * b_step + group * b_group
    c += row * c_row + step * c_step + group * c_group
    product = tl.zeros([CHUNK, CHUNK], tl.float32)
    for n0 in range(0, N, N_BLOCK):
        b_s = _load(b + n0, b_step, length - step, N - n0, q, n)
        c_t = _load(c + n0, c_step, length - step, N - n0, q, n)
        product += _dot(c_t, tl.trans(b_s), PRECISION)
    tl.store(products + (at * groups + group) * CHUNK * CHUNK + q[:, None] * CHUNK + q[None, :], product)
    share = heads // groups
    for h0 in range(0, share, 16):
        head = group * share + h0 + h
        out = sums + (at * heads + head)[None, :] * 3 * CHUNK + q[:, None]
        there = (h0 + h < share)[None, :] & (q >= 0)[:, None]
        real = there & (q < length - step)[:, None]
        places = log_a + row * a_row + step * a_step + q[:, None] * a_step + head[None, :] * a_head
        a = tl.load(places, mask=real, other=0.0).to(tl.float64)
        total = tl.cumsum(tl.where(a < MIN_LOG_DECAY, MIN_LOG_DECAY, a) * LOG2_E, axis=0)
        high = total.to(tl.float32)
        low = (total - high.to(tl.float64)).to(tl.float32)
        tl.store(out, high, mask=there)
        tl.store(out + CHUNK, low, mask=there)
        weight = tl.where(real, 1.0, 0.0)
        if delta is not None:
            places = delta + row * d_row + step * d_step + q[:, None] * d_step + head[None, :] * d_head
            weight = tl.load(places, mask=real, other=0.0).to(tl.float32)
        tl.store(out + 2 * CHUNK, weight, mask=there)


@triton.jit(do_not_specialize=["length", "chunks"])
def states(
    sums, x, writing, first, kept, last, length, heads, groups, chunks,
    x_row, x_step, x_head, w_row, w_step, w_group, P: tl.constexpr, N: tl.constexpr,
    P_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Walk through the chunks with an N_BLOCK by P_BLOCK tile of one head's state in registers. Writes with `writing` =
    b; with REVERSE x is ȳ, writing = c and the state is the adjoint. Starts from `first` or 0. Fills `kept` (batch,
    chunks, heads, N, P) with the state before (REVERSE: after) each chunk, and `last` (batch, heads, P, N), if any,
    with the state at the end."""
    row, head, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    P_PARTS: tl.constexpr = (P + P_BLOCK - 1) // P_BLOCK
    p0, n0 = block % P_PARTS * P_BLOCK, block // P_PARTS * N_BLOCK
    q, p, n = tl.arange(0, CHUNK), tl.arange(0, P_BLOCK), tl.arange(0, N_BLOCK)
    x += row * x_row + head * x_head + p0
    writing += row * w_row + head // (heads // groups) * w_group + n0
    transposed = (row * heads + head) * P * N + (p0 + p)[None, :] * N + (n0 + n)[:, None]
    inside = (p < P - p0)[None, :] & (n < N - n0)[:, None]
    H = tl.zeros([N_BLOCK, P_BLOCK], tl.float32)
    if first is not None:
        H += tl.load(first + transposed, mask=inside, other=0.0).to(tl.float32)
    for i in range(0, chunks):
        chunk = chunks - 1 - i if REVERSE else i
        at = (row * chunks + chunk) * heads + head
        step = tl.cast(chunk, tl.int64) * CHUNK
        S = sums + at * 3 * CHUNK
        _store(kept + (at * N + n0) * P + p0, P, N - n0, P - p0, n, p, H)
        weight = _decay_from_start(S, q) if REVERSE else _decay(S, CHUNK - 1, q) * tl.load(S + 2 * CHUNK + q)
        x_t = _load(x + step * x_step, x_step, length - step, P - p0, q, p) * weight[:, None]
        w_t = _load(writing + step * w_step, w_step, length - step, N - n0, q, n)
        H = _decay_from_start(S, CHUNK - 1) * H + _dot(tl.trans(w_t), x_t, PRECISION)
    if last is not None:
        tl.store(last + transposed, H, mask=inside)


@triton.jit(do_not_specialize=["length"])
def outputs(
    sums, products, x, reading, kept, y, length, heads, groups, x_row, x_step, x_head, r_row, r_step, r_group,
    P: tl.constexpr, N: tl.constexpr, P_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, Q_BLOCK: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write y (batch, length, heads, P) of one chunk, P_BLOCK columns of one head, with `reading` = c and the `kept`
    state before the chunk; with REVERSE x̄, with ȳ for x, reading = b and the adjoint after the chunk."""
    row, chunk, program = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    P_PARTS: tl.constexpr = (P + P_BLOCK - 1) // P_BLOCK
    head, p0 = program // P_PARTS, program % P_PARTS * P_BLOCK
    group = head // (heads // groups)
    q, s, p, n = tl.arange(0, CHUNK), tl.arange(0, Q_BLOCK), tl.arange(0, P_BLOCK), tl.arange(0, N_BLOCK)
    step = chunk.to(tl.int64) * CHUNK
    at = row * tl.num_programs(1) + chunk
    S = sums + (at * heads + head) * 3 * CHUNK
    x += row * x_row + step * x_step + head * x_head + p0
    reading += row * r_row + step * r_step + group * r_group
    kept += (at * heads + head) * P * N + p0
    products += (at * groups + group) * CHUNK * CHUNK
    out = tl.zeros([CHUNK, P_BLOCK], tl.float32)
    for n0 in range(0, N, N_BLOCK):
        r_t = _load(reading + n0, r_step, length - step, N - n0, q, n)
        out += _dot(r_t, _load(kept + n0 * P, P, N - n0, P - p0, n, p), PRECISION)
    out *= (_decay(S, CHUNK - 1, q) if REVERSE else _decay_from_start(S, q))[:, None]
    for s0 in range(0, CHUNK, Q_BLOCK):
        t, r = q[:, None], s0 + s[None, :]
        if REVERSE:
            L = _causal_decay(S, r, t) * tl.load(products + r * CHUNK + t)
        else:
            L = _causal_decay(S, t, r) * tl.load(products + t * CHUNK + r) * tl.load(S + 2 * CHUNK + r)
        out += _dot(L, _load(x + s0 * x_step, x_step, length - step - s0, P - p0, s, p), PRECISION)
    if REVERSE:
        out *= tl.load(S + 2 * CHUNK + q)[:, None]
    _store(y + ((row * length + step) * heads + head) * P + p0, heads * P, length - step, P - p0, q, p, out)


@triton.jit(do_not_specialize=["length"])
def within(
    sums, products, x, y_bar, K_sums, a_bar, delta_bar, length, heads, groups, splits,
    x_row, x_step, x_head, y_row, y_step, y_head,
    P: tl.constexpr, P_BLOCK: tl.constexpr, HEADS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one chunk's log a and Δ by what its own steps write and read, with K[t, s] = 2^(S_t −
    S_s) Δ_s (ȳ_t · x_s) for s ≤ t: Σ_{s<r≤t} K[t, s] CB[t, s] of log a_r and Σ_t K[t, s] CB[t, s] / Δ_s of Δ_s, without
    differences or divisions, so that small gradients keep their digits. A program adds up the K of HEADS heads of a
    group in `K_sums` (splits, batch, chunks, groups, CHUNK, CHUNK)."""
    row, chunk, program = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group, split = program % groups, program // groups
    q, p = tl.arange(0, CHUNK), tl.arange(0, P_BLOCK)
    t, s = q[:, None], q[None, :]
    step = chunk.to(tl.int64) * CHUNK
    at = row * tl.num_programs(1) + chunk
    product = tl.load(products + (at * groups + group) * CHUNK * CHUNK + t * CHUNK + s)
    until = tl.where(t <= s, 1.0, 0.0)
    K_sum = tl.zeros([CHUNK, CHUNK], tl.float32)
    share = heads // groups
    for i in range(split * HEADS, tl.minimum((split + 1) * HEADS, share)):
        head = group * share + i
        S = sums + (at * heads + head) * 3 * CHUNK
        K = tl.zeros([CHUNK, CHUNK], tl.float32)
        for p0 in range(0, P, P_BLOCK):
            y_t = _load(y_bar + row * y_row + step * y_step + head * y_head + p0, y_step, length - step, P - p0, q, p)
            x_s = _load(x + row * x_row + step * x_step + head * x_head + p0, x_step, length - step, P - p0, q, p)
            K += _dot(y_t, tl.trans(x_s), PRECISION)
        K *= _causal_decay(S, t, s)
        delta = tl.load(S + 2 * CHUNK + s)
        K_sum += K * delta
        K *= product
        out = ((row * length) + step + q) * heads + head
        if delta_bar is not None:
            tl.store(delta_bar + out, tl.sum(K, axis=0), mask=q < length - step)
        passing = tl.where(s < t, _dot(until, K, PRECISION) * delta, 0.0)
        tl.store(a_bar + out, tl.sum(passing, axis=1), mask=q < length - step)
    at += split * tl.num_programs(0) * tl.num_programs(1)
    tl.store(K_sums + (at * groups + group) * CHUNK * CHUNK + t * CHUNK + s, K_sum)


@triton.jit(do_not_specialize=["length"])
def across(
    sums, K_sums, x, y_bar, b, c, before, after, b_bar, c_bar, a_bar, delta_bar, length, heads, groups, splits,
    x_row, x_step, x_head, y_row, y_step, y_head, b_row, b_step, b_group, c_row, c_step, c_group,
    P: tl.constexpr, N: tl.constexpr, P_BLOCK: tl.constexpr, N_BLOCK: tl.constexpr, HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one chunk's b and c, and of its log a and Δ by the state H before it and the adjoint Λ
    after it.

    Summed over heads, c̄_t = Σ_s K[t, s] b_s + 2^(S_t) H ȳ_t and b̄_s = Σ_t K[t, s] c_t + 2^(S_end − S_s) Δ_s Λ x_s.
    The gradient of log a_r is what the steps t ≥ r read from H, what the steps s < r write to Λ, and 2^(S_end) ⟨H, Λ⟩.

    A program has HEADS heads of one group and N_BLOCK of the state. b̄ and c̄ (splits, batch, length, groups, N) and the
    other gradients (N blocks, batch, length, heads) are to be summed over their first dimension.
    """
    row, chunk, program = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    group, split, part = program % groups, program // groups % splits, program // (groups * splits)
    q, p, n = tl.arange(0, CHUNK), tl.arange(0, P_BLOCK), tl.arange(0, N_BLOCK)
    n0 = part * N_BLOCK
    step = chunk.to(tl.int64) * CHUNK
    real = length - step
    at = row * tl.num_programs(1) + chunk
    b += row * b_row + step * b_step + group * b_group + n0
    c += row * c_row + step * c_step + group * c_group + n0
    K_at = (split * tl.num_programs(0) * tl.num_programs(1) + at) * groups + group
    K = tl.load(K_sums + K_at * CHUNK * CHUNK + q[:, None] * CHUNK + q[None, :])
    c_sum = _dot(K, _load(b, b_step, real, N - n0, q, n), PRECISION)
    b_sum = _dot(tl.trans(K), _load(c, c_step, real, N - n0, q, n), PRECISION)
    share = heads // groups
    for i in range(split * HEADS, tl.minimum((split + 1) * HEADS, share)):
        head = group * share + i
        S = sums + (at * heads + head) * 3 * CHUNK
        read = tl.zeros([CHUNK, N_BLOCK], tl.float32)
        written = tl.zeros([CHUNK, N_BLOCK], tl.float32)
        met = tl.zeros([N_BLOCK], tl.float32)
        for p0 in range(0, P, P_BLOCK):
            state_at = ((at * heads + head) * N + n0) * P + p0
            H = _load(before + state_at, P, N - n0, P - p0, n, p)
            y_t = _load(y_bar + row * y_row + step * y_step + head * y_head + p0, y_step, real, P - p0, q, p)
            read += _dot(y_t, tl.trans(H), PRECISION)
            adjoint = _load(after + state_at, P, N - n0, P - p0, n, p)
            x_s = _load(x + row * x_row + step * x_step + head * x_head + p0, x_step, real, P - p0, q, p)
            written += _dot(x_s, tl.trans(adjoint), PRECISION)
            met += tl.sum(H * adjoint, axis=1)
        read *= _decay_from_start(S, q)[:, None]
        written *= _decay(S, CHUNK - 1, q)[:, None]
        delta = tl.load(S + 2 * CHUNK + q)
        c_sum += read
        b_sum += written * delta[:, None]
        was_read = tl.sum(read * _load(c, c_step, real, N - n0, q, n).to(tl.float32), axis=1)
        was_written = tl.sum(written * _load(b, b_step, real, N - n0, q, n).to(tl.float32), axis=1)
        out = ((part * tl.num_programs(0) + row) * length + step + q) * heads + head
        if delta_bar is not None:
            tl.store(delta_bar + out, was_written, mask=q < real)
        was_written *= delta
        through = tl.cumsum(was_read, 0, reverse=True) + tl.cumsum(was_written, 0) - was_written
        through += _decay_from_start(S, CHUNK - 1) * tl.sum(met, axis=0)
        tl.store(a_bar + out, through, mask=q < real)
    out = (((split * tl.num_programs(0) + row) * length + step) * groups + group) * N + n0
    _store(c_bar + out, groups * N, real, N - n0, q, n, c_sum)
    _store(b_bar + out, groups * N, real, N - n0, q, n, b_sum)
