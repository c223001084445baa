"""The Triton kernels of `delta_fused`: the delta rule and its gradient, as products of chunks of Q steps.

Of a chunk's first state H, its steps' keys k, values x and decays, Γ[t, s] = ∏_{s<r≤t} a_r, and M[t, s] = k_tᵀ Γ k_s
for s < t, the differences r that are written, H_t = a_t H_{t−1} + β_t r_t k_tᵀ, are (see `delta`)

    r = T x − T (Γ_start k) Hᵀ,   T = (I + M β)⁻¹;   H ← a_Q H + rᵀ (β Γ_end k).

`solve` makes what stands before and after H in these for all chunks side by side, `carry` walks the chunks, `read`
reads them. The adjoint Λ goes from the last chunk to the first, y reading A = c Γ kᵀ:

    ū = T̄ (Aᵀ ȳ + (Γ_end k) Λᵀ),   T̄ = (I + β M)⁻ᵀ;   Λ ← a_Q Λ + ȳᵀ (Γ_start c) − ūᵀ (β Γ_start k).

With one decay per head, sums of log a are float64, so that a difference of two has all its digits; with a decay per
state (BY_STATE) those of a pair of steps are summed by themselves. T is made in blocks of twice the size each time,
whose entries are bounded as its own are; factors β are where small rows may lose digits. Matrices of states are held
as (N, P), and multiplied in parts (`tile_kernels`), those that `carry` reads written in that form once, over a unit
for each chunk and head.

Importing this module needs triton.
"""

import triton
import triton.language as tl

from ssmscope.scans.tile_kernels import INTERPRETED, dot, in_parts, largest_of, load_tile, one_over, store_tile, unit_of

__all__ = ["INTERPRETED", "back", "carry", "read", "solve", "solve_back"]

LEAST: tl.constexpr = tl.constexpr(-1e4)
"""Log-decays are at least this, so that a difference of two sums is a number."""


@triton.jit
def split(a, SCALED: tl.constexpr, TERMS: tl.constexpr):
    """A matrix in parts, and their unit."""
    unit = 1.0
    if SCALED:
        unit = unit_of(largest_of(a))
        a = a * one_over(unit)
    high, low = in_parts(a, SCALED, TERMS)
    return high, low, unit


@triton.jit
def flip(a):
    """The transposed, in parts."""
    return tl.trans(a[0]), tl.trans(a[1]), a[2]


@triton.jit
def product(acc, a, b, SCALED: tl.constexpr, TERMS: tl.constexpr):
    """acc + a b, of matrices in parts."""
    if SCALED:
        acc += dot(tl.zeros_like(acc), a[0], a[1], b[0], b[1], TERMS) * (a[2] * b[2])
    else:
        acc = dot(acc, a[0], a[1], b[0], b[1], TERMS)
    return acc


@triton.jit
def keep(
    at, units, own, q, n, a, real_n, N: tl.constexpr, STATES: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr
):
    """Stores a matrix (Q, N) in parts (TERMS, Q, N) and its unit."""
    high, low, unit = split(a, SCALED, TERMS)
    at += own * TERMS * q.shape[0] * N
    store_tile(at, q, n, N, q >= 0, real_n, high, True, N == STATES)
    if TERMS == 2:
        store_tile(at + q.shape[0] * N, q, n, N, q >= 0, real_n, low, True, N == STATES)
    if SCALED:
        tl.store(units + own, unit)


@triton.jit
def kept(
    at, units, own, q, n, real_n, N: tl.constexpr, STATES: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr
):
    """What `keep` stored."""
    at += own * TERMS * q.shape[0] * N
    high = load_tile(at, q, n, N, q >= 0, real_n, True, N == STATES)
    low = high
    if TERMS == 2:
        low = load_tile(at + q.shape[0] * N, q, n, N, q >= 0, real_n, True, N == STATES)
    unit = 1.0
    if SCALED:
        unit = tl.load(units + own)
    return high, low, unit


@triton.jit
def load(at, rows, columns, step, real, valid, EVEN: tl.constexpr, WHOLE: tl.constexpr):
    """A tile of a term, in float32."""
    return load_tile(at, rows, columns, step, real, valid, EVEN, WHOLE).to(tl.float32)


@triton.jit
def place(length, heads, groups, chunks, q):
    """Of this program: its sequence, group, first step, where its numbers of a head and of a chunk begin, and which of
    its steps are real."""
    program = tl.program_id(0).to(tl.int64)
    row, chunk, head = program // (heads * chunks), program // heads % chunks, program % heads
    group, start = head // (heads // groups), chunk * q.shape[0]
    return row, group, head, start, (row * length + start) * heads + head, program, q < length - start


@triton.jit
def decays(log_a, at, q, n, heads, real, real_n, N: tl.constexpr, BY_STATE: tl.constexpr):
    """The decays from the chunk's start through each step and from each, exclusive, to its end, (Q, states or 1);
    through the whole chunk, (states) or a number; and sums of log a in float64, (Q), of no use where BY_STATE."""
    if BY_STATE:
        known = real_n[None, :]
        each = log_a + at * N + (q * heads * N)[:, None] + n[None, :]
        a = tl.load(each, mask=real[:, None] & known, other=0.0)
        Q: tl.constexpr = q.shape[0]
        later = (q < Q - 1)[:, None]
        length = tl.sum(real.to(tl.int32), axis=0)
        after = tl.load(each + heads * N, mask=later & (q < length - 1)[:, None] & known, other=0.0)
        a, after = tl.where(a < LEAST, LEAST, a), tl.where(after < LEAST, LEAST, after)
        s = tl.cumsum(a, axis=0)
        from_start, to_end = tl.exp(s), tl.exp(tl.cumsum(after, axis=0, reverse=True))
        total = tl.exp(tl.sum(a, axis=0))
    else:
        a = tl.load(log_a + at + q * heads, mask=real, other=0.0).to(tl.float64)
        a = tl.where(a < LEAST, LEAST, a)
        s, end = tl.cumsum(a, axis=0), tl.sum(a, axis=0)
        from_start, to_end = tl.exp(s.to(tl.float32))[:, None], tl.exp((end - s).to(tl.float32))[:, None]
        total = tl.exp(end.to(tl.float32))
    return from_start, to_end, total, s


@triton.jit
def between(s, q):
    """Γ[t, s] for s ≤ t, and 0 above, from sums of log a in float64, (Q)."""
    below = q[:, None] >= q[None, :]
    return tl.where(below, tl.exp(tl.where(below, s[:, None] - s[None, :], 0.0).to(tl.float32)), 0.0)


@triton.jit
def met(
    reader, reader_parts, k_parts, log_a, at, k, k_step, s, q, n, heads, real, real_n,
    N: tl.constexpr, BY_STATE: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """reader_tᵀ Γ[t, s] k_s for s ≤ t, and 0 above, (Q, Q). Where BY_STATE its columns are made from the last to the
    first, so that the sums of log a from each s on grow by one step's."""
    Q: tl.constexpr = q.shape[0]
    if BY_STATE:
        length = tl.sum(real.to(tl.int32), axis=0)
        since = tl.zeros_like(reader)
        S = tl.zeros([Q, Q], tl.float32)
        for i in range(0, Q):
            column = Q - 1 - i
            next_a = tl.load(
                log_a + (at + (column + 1) * heads) * N + n, mask=real_n & (column + 1 < length) & (i > 0), other=0.0
            )
            since += tl.where((q > column)[:, None], tl.where(next_a < LEAST, LEAST, next_a)[None, :], 0.0)
            key = tl.load(k + column * k_step + n, mask=real_n & (column < length), other=0.0).to(tl.float32)
            S = tl.where((q == column)[None, :], tl.sum(reader * tl.exp(since) * key[None, :], axis=1)[:, None], S)
        S = tl.where(q[:, None] >= q[None, :], S, 0.0)
    else:
        S = product(tl.zeros([Q, Q], tl.float32), reader_parts, flip(k_parts), SCALED, TERMS) * between(s, q)
    return S


@triton.jit
def inverse(L, q, TERMS: tl.constexpr):
    """(I + L)⁻¹ of L below the diagonal, (Q, Q), by products of so many parts of 11 bits: of two blocks on the diagonal
    whose inverses are known, the corner is −D⁻¹ L A⁻¹."""
    Q: tl.constexpr = q.shape[0]
    t, s = q[:, None], q[None, :]
    T = tl.where(t == s, 1.0, tl.where((t // 2 == s // 2) & (t > s), -L, 0.0))
    high, low, unit = split(-L, True, TERMS)
    zero = tl.zeros_like(high)
    size = 2
    while size < Q:
        corner = (t // (2 * size) == s // (2 * size)) & (t // size > s // size)
        parts = split(T, True, TERMS)
        of_corner = (tl.where(corner, high, zero), tl.where(corner, low, zero), unit)
        half = product(tl.zeros([Q, Q], tl.float32), parts, of_corner, True, TERMS)
        T = product(T, split(half, True, TERMS), parts, True, TERMS)
        size *= 2
    return T


@triton.jit
def keep_total(D, at, total, n, real_n, N: tl.constexpr, BY_STATE: tl.constexpr):
    if BY_STATE:
        tl.store(D + at * N + n, total, mask=real_n)
    else:
        tl.store(D + at, total)


@triton.jit
def keys_of(
    log_a, beta, k, at, k_step, q, n, heads, real, real_n,
    N: tl.constexpr, STATES: tl.constexpr, BY_STATE: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr,
    TERMS: tl.constexpr,
):  # fmt: skip
    """A chunk's keys, where they are and in parts, β, and its `decays`."""
    k_t = load(k, q, n, k_step, real, real_n, EVEN, N == STATES)
    strength = tl.load(beta + at + q * heads, mask=real, other=0.0)
    from_start, to_end, total, s = decays(log_a, at, q, n, heads, real, real_n, N, BY_STATE)
    return k, k_t, split(k_t, SCALED, TERMS), strength, from_start, to_end, total, s


@triton.jit
def solve(
    log_a, beta, k, x, W, E, units, U, D, length, heads, groups, chunks, k_row, k_step, k_group, x_row, x_step, x_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """What is read of a chunk's first state, W = T Γ_start k, and written into its last, E = β Γ_end k, in parts
    (batch, chunks, heads, TERMS, Q, N) with their `units` (2, batch, chunks, heads), E's first; U = T x (batch,
    length, heads, P); and its whole decay D (batch, chunks, heads, N or 1)."""
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    PARTS: tl.constexpr = 2 if SCALED else 1
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    row, group, head, start, at, own, real = place(length, heads, groups, chunks, q)
    real_n = n < N
    k_at, k_t, k_parts, strength, from_start, to_end, total, s = keys_of(
        log_a, beta, k + row * k_row + group * k_group + start * k_step, at, k_step, q, n, heads, real, real_n,
        N, STATES, BY_STATE, EVEN, SCALED, TERMS,
    )  # fmt: skip
    all_chunks = tl.num_programs(0)
    keep_total(D, own, total, n, real_n, N, BY_STATE)
    keep(E, units, own, q, n, k_t * to_end * strength[:, None], real_n, N, STATES, SCALED, TERMS)
    L = met(k_t, k_parts, k_parts, log_a, at, k_at, k_step, s, q, n, heads, real, real_n, N, BY_STATE, SCALED, TERMS)
    T = split(inverse(tl.where(q[:, None] > q[None, :], L * strength[None, :], 0.0), q, PARTS), SCALED, TERMS)
    side = split(k_t * from_start, SCALED, TERMS)
    w = product(tl.zeros([Q, STATES], tl.float32), T, side, SCALED, TERMS)
    keep(W, units + all_chunks, own, q, n, w, real_n, N, STATES, SCALED, TERMS)
    for p0 in range(0, P, WIDTH):
        wide = p < P - p0
        x_at = x + row * x_row + head * x_head + start * x_step + p0
        x_t = load(x_at, q, p, x_step, real, wide, EVEN, WHOLE_P)
        u = product(tl.zeros([Q, WIDTH], tl.float32), T, split(x_t, SCALED, TERMS), SCALED, TERMS)
        store_tile(U + at * P + p0, q, p, heads * P, real, wide, u, EVEN, WHOLE_P)


@triton.jit
def solve_back(
    log_a, beta, k, c, ybar, W, E, F, units, U, D, length, heads, groups, chunks, k_row, k_step, k_group, c_row, c_step,
    c_group, ybar_row, ybar_step, ybar_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """`solve` of the adjoint: W = −T̄ Γ_end k, E = −β Γ_start k, and with READ F = Γ_start c and U = T̄ Aᵀ ȳ."""
    WHOLE_N: tl.constexpr = N == STATES
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    PARTS: tl.constexpr = 2 if SCALED else 1
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    row, group, head, start, at, own, real = place(length, heads, groups, chunks, q)
    real_n = n < N
    k_at, k_t, k_parts, strength, from_start, to_end, total, s = keys_of(
        log_a, beta, k + row * k_row + group * k_group + start * k_step, at, k_step, q, n, heads, real, real_n,
        N, STATES, BY_STATE, EVEN, SCALED, TERMS,
    )  # fmt: skip
    all_chunks = tl.num_programs(0)
    keep_total(D, own, total, n, real_n, N, BY_STATE)
    keep(E, units, own, q, n, -k_t * from_start * strength[:, None], real_n, N, STATES, SCALED, TERMS)
    L = met(k_t, k_parts, k_parts, log_a, at, k_at, k_step, s, q, n, heads, real, real_n, N, BY_STATE, SCALED, TERMS)
    T = flip(split(inverse(tl.where(q[:, None] > q[None, :], L * strength[:, None], 0.0), q, PARTS), SCALED, TERMS))
    w = product(tl.zeros([Q, STATES], tl.float32), T, split(-k_t * to_end, SCALED, TERMS), SCALED, TERMS)
    keep(W, units + all_chunks, own, q, n, w, real_n, N, STATES, SCALED, TERMS)
    if READ:
        c_at = c + row * c_row + group * c_group + start * c_step
        c_t = load(c_at, q, n, c_step, real, real_n, EVEN, WHOLE_N)
        c_parts = split(c_t, SCALED, TERMS)
        keep(F, units + 2 * all_chunks, own, q, n, c_t * from_start, real_n, N, STATES, SCALED, TERMS)
        A = met(
            c_t, c_parts, k_parts, log_a, at, k_at, k_step, s, q, n, heads, real, real_n, N, BY_STATE, SCALED, TERMS
        )
        A = flip(split(A, SCALED, TERMS))
        both = split(product(tl.zeros([Q, Q], tl.float32), T, A, SCALED, TERMS), SCALED, TERMS)
        for p0 in range(0, P, WIDTH):
            wide = p < P - p0
            y_at = ybar + row * ybar_row + head * ybar_head + start * ybar_step + p0
            y_t = load(y_at, q, p, ybar_step, real, wide, EVEN, WHOLE_P)
            y_parts = split(y_t, SCALED, TERMS)
            u = product(tl.zeros([Q, WIDTH], tl.float32), both, y_parts, SCALED, TERMS)
            store_tile(U + at * P + p0, q, p, heads * P, real, wide, u, EVEN, WHOLE_P)


@triton.jit
def carry(
    W, E, F, units, U, D, ybar, first, states, last, batch, length, heads, chunks, ybar_row, ybar_step, ybar_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr, REVERSE: tl.constexpr,
    READ: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The `states` (batch, chunks, heads, N, P) before every chunk, with KEEP; after all, `last` (batch, heads, P, N);
    and r in place of U: r = U − W Hᵀ, Hᵀ ← D Hᵀ + Eᵀ r from `first`. With REVERSE from the last chunk to the first;
    with READ Fᵀ ȳ is added. A program has WIDTH columns of one head of one sequence.
    """
    program = tl.program_id(0).to(tl.int64)
    P_BLOCKS: tl.constexpr = (P + WIDTH - 1) // WIDTH
    WHOLE_N: tl.constexpr = N == STATES
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    p0 = program % P_BLOCKS * WIDTH
    head, row = program // P_BLOCKS % heads, program // (P_BLOCKS * heads)
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    wide, real_n = p < P - p0, n < N
    matrix = (row * heads + head) * P * N + (p0 + p)[None, :] * N + n[:, None]
    all_chunks = (row * 0 + batch) * chunks * heads
    H = tl.load(first + matrix, mask=real_n[:, None] & wide[None, :], other=0.0)
    for i in range(0, chunks):
        chunk = i
        if REVERSE:
            chunk = chunks - 1 - i
        own = (row * chunks + chunk) * heads + head
        if KEEP:
            store_tile(states + own * N * P + p0, n, p, P, real_n, wide, H, WHOLE_N, WHOLE_P)
        start = (row * 0 + chunk) * Q  # in 64 bits
        real = q < length - start
        at = (row * length + start) * heads + head
        w = kept(W, units + all_chunks, own, q, n, real_n, N, STATES, SCALED, TERMS)
        e = kept(E, units, own, q, n, real_n, N, STATES, SCALED, TERMS)
        r = load(U + at * P + p0, q, p, heads * P, real, wide, EVEN, WHOLE_P)
        if BY_STATE:
            decay = tl.load(D + own * N + n, mask=real_n, other=0.0)[:, None]
        else:
            decay = tl.load(D + own)
        r -= product(tl.zeros([Q, WIDTH], tl.float32), w, split(H, SCALED, TERMS), SCALED, TERMS)
        store_tile(U + at * P + p0, q, p, heads * P, real, wide, r, EVEN, WHOLE_P)
        H = product(decay * H, flip(e), split(r, SCALED, TERMS), SCALED, TERMS)
        if READ:
            f = kept(F, units + 2 * all_chunks, own, q, n, real_n, N, STATES, SCALED, TERMS)
            y_at = ybar + row * ybar_row + head * ybar_head + start * ybar_step + p0
            y_t = split(load(y_at, q, p, ybar_step, real, wide, EVEN, WHOLE_P), SCALED, TERMS)
            H = product(H, flip(f), y_t, SCALED, TERMS)
    tl.store(last + matrix, H, mask=real_n[:, None] & wide[None, :])


@triton.jit
def read(
    log_a, beta, k, c, U, states, y, length, heads, groups, chunks, k_row, k_step, k_group, c_row, c_step, c_group,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """y = Γ_start c Hᵀ + A β r of every chunk, H the state before it; (batch, length, heads, P)."""
    WHOLE_N: tl.constexpr = N == STATES
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    row, group, head, start, at, own, real = place(length, heads, groups, chunks, q)
    real_n = n < N
    k_at, k_t, k_parts, strength, from_start, to_end, total, s = keys_of(
        log_a, beta, k + row * k_row + group * k_group + start * k_step, at, k_step, q, n, heads, real, real_n,
        N, STATES, BY_STATE, EVEN, SCALED, TERMS,
    )  # fmt: skip
    c_at = c + row * c_row + group * c_group + start * c_step
    c_t = load(c_at, q, n, c_step, real, real_n, EVEN, WHOLE_N)
    c_parts = split(c_t, SCALED, TERMS)
    A = met(c_t, c_parts, k_parts, log_a, at, k_at, k_step, s, q, n, heads, real, real_n, N, BY_STATE, SCALED, TERMS)
    A, reader = split(A, SCALED, TERMS), split(c_t * from_start, SCALED, TERMS)
    states_at = states + own * N * P
    for p0 in range(0, P, WIDTH):
        wide = p < P - p0
        H = load(states_at + p0, n, p, P, real_n, wide, WHOLE_N, WHOLE_P)
        r = load(U + at * P + p0, q, p, heads * P, real, wide, EVEN, WHOLE_P)
        out = product(tl.zeros([Q, WIDTH], tl.float32), reader, split(H, SCALED, TERMS), SCALED, TERMS)
        out = product(out, A, split(r * strength[:, None], SCALED, TERMS), SCALED, TERMS)
        store_tile(y + at * P + p0, q, p, heads * P, real, wide, out, EVEN, WHOLE_P)


@triton.jit
def back(
    log_a, beta, k, c, ybar, U, Ubar, states, adjoints, abar, betabar, kbar, cbar, length, heads, groups, chunks,
    k_row, k_step, k_group, c_row, c_step, c_group, ybar_row, ybar_step, ybar_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Of every chunk the gradients of log a and β (batch, length, heads) and of each head's k and c (batch, length,
    heads, N), and x̄ = β ū in place of ū, with one decay per head: u = β r, B = Γ ⊙ (ȳ uᵀ), G = Γ ⊙ (β ū uᵀ) below the
    diagonal,

        c̄ = Γ_start ȳ H + B k,   k̄ = Γ_end u Λ − Γ_start β ū H + Bᵀ c − (G + Gᵀ) k,   β̄_t = ū_t · r_t,

    and of log a_r what passes through step r: from s < r to t ≥ r, from H to t ≥ r, from s < r to Λ and from H to Λ.
    """
    WHOLE_N: tl.constexpr = N == STATES
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    row, group, head, start, at, own, real = place(length, heads, groups, chunks, q)
    real_n = n < N
    strength = tl.load(beta + at + q * heads, mask=real, other=0.0)[:, None]
    B, G = tl.zeros([Q, Q], tl.float32), tl.zeros([Q, Q], tl.float32)
    of_c, of_k = tl.zeros([Q, STATES], tl.float32), tl.zeros([Q, STATES], tl.float32)
    erased = tl.zeros([Q, STATES], tl.float32)
    across, exchanged = tl.zeros([STATES], tl.float32), tl.zeros([Q], tl.float32)
    states_at = own * N * P
    for p0 in range(0, P, WIDTH):
        wide = p < P - p0
        r = load(U + at * P + p0, q, p, heads * P, real, wide, EVEN, WHOLE_P)
        ubar = load(Ubar + at * P + p0, q, p, heads * P, real, wide, EVEN, WHOLE_P)
        y_at = ybar + row * ybar_row + head * ybar_head + start * ybar_step + p0
        y_t = load(y_at, q, p, ybar_step, real, wide, EVEN, WHOLE_P)
        H = load(states + states_at + p0, n, p, P, real_n, wide, WHOLE_N, WHOLE_P)
        adjoint = load(adjoints + states_at + p0, n, p, P, real_n, wide, WHOLE_N, WHOLE_P)
        across += tl.sum(H * adjoint, axis=1)
        exchanged += tl.sum(r * ubar, axis=1)
        ubar *= strength
        u_parts, ubar_parts = split(r * strength, SCALED, TERMS), split(ubar, SCALED, TERMS)
        y_parts, H_parts = split(y_t, SCALED, TERMS), flip(split(H, SCALED, TERMS))
        B = product(B, y_parts, flip(u_parts), SCALED, TERMS)
        G = product(G, ubar_parts, flip(u_parts), SCALED, TERMS)
        of_c = product(of_c, y_parts, H_parts, SCALED, TERMS)
        of_k = product(of_k, u_parts, flip(split(adjoint, SCALED, TERMS)), SCALED, TERMS)
        erased = product(erased, ubar_parts, H_parts, SCALED, TERMS)
        store_tile(Ubar + at * P + p0, q, p, heads * P, real, wide, ubar, EVEN, WHOLE_P)
    k_at = k + row * k_row + group * k_group + start * k_step
    k_t = load(k_at, q, n, k_step, real, real_n, EVEN, WHOLE_N)
    c_at = c + row * c_row + group * c_group + start * c_step
    c_t = load(c_at, q, n, c_step, real, real_n, EVEN, WHOLE_N)
    from_start, to_end, total, s = decays(log_a, at, q, n, heads, real, real_n, N, False)
    of_c, of_k, erased = from_start * of_c, to_end * of_k, from_start * erased
    gamma = between(s, q)
    below = q[:, None] > q[None, :]
    B, G = B * gamma, tl.where(below, G * gamma, 0.0)
    k_parts, c_parts = split(k_t, SCALED, TERMS), split(c_t, SCALED, TERMS)
    among = product(tl.zeros([Q, Q], tl.float32), k_parts, flip(k_parts), SCALED, TERMS)
    through = product(tl.zeros([Q, Q], tl.float32), c_parts, flip(k_parts), SCALED, TERMS) * B - among * G
    later = tl.cumsum(tl.where(below, through, 0.0), axis=0, reverse=True)
    of_a = tl.sum(tl.where(below, later + tl.sum(of_k * k_t, axis=1)[None, :], 0.0), axis=1)
    of_a += tl.cumsum(tl.sum(of_c * c_t - erased * k_t, axis=1), axis=0, reverse=True)
    of_a += total * tl.sum(across, axis=0)
    tl.store(abar + at + q * heads, of_a, mask=real)
    tl.store(betabar + at + q * heads, exchanged, mask=real)
    B, G = split(B, SCALED, TERMS), split(-(G + tl.trans(G)), SCALED, TERMS)
    of_c = product(of_c, B, k_parts, SCALED, TERMS)
    store_tile(cbar + at * N, q, n, heads * N, real, real_n, of_c, EVEN, WHOLE_N)
    of_k = product(of_k - erased, flip(B), c_parts, SCALED, TERMS)
    of_k = product(of_k, G, k_parts, SCALED, TERMS)
    store_tile(kbar + at * N, q, n, heads * N, real, real_n, of_k, EVEN, WHOLE_N)
