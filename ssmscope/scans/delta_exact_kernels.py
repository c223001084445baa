"""The Triton kernels of `delta_exact`: the delta rule and its gradient, as products of chunks of Q steps in 22 bits.

Of a chunk's first state H, its steps' keys k, values x and decays, Γ[t, s] = ∏_{s<r≤t} a_r, and M[t, s] = k_tᵀ Γ k_s
for s < t, the differences r that are written, H_t = a_t H_{t−1} + β_t r_t k_tᵀ, are (see `delta`)

    r = T x − T (Γ_start k) Hᵀ,   T = (I + M β)⁻¹;   H ← a_Q H + rᵀ (β Γ_end k).

`solve` makes what stands before and after H in these for all chunks side by side, `carry` walks the chunks, `read`
reads them. The adjoint Λ goes from the last chunk to the first, y reading A = c Γ kᵀ:

    ū = T̄ (Aᵀ ȳ + (Γ_end k) Λᵀ),   T̄ = (I + β M)⁻ᵀ;   Λ ← a_Q Λ + ȳᵀ (Γ_start c) − ūᵀ (β Γ_start k).

With one decay per head, sums of log a are float64, so that a difference of two has all its digits; with a decay per
state (BY_STATE) those of a pair of steps are summed by themselves. T is made in blocks of twice the size each time,
whose entries are bounded as its own are; factors β are where small rows may lose digits. Matrices of states are held
as (N, P), and multiplied in pairs of float16 (`tile_kernels`), those that `carry` reads written in that form once, over
a unit for each chunk and head.

Importing this module needs triton.
"""

import triton
import triton.language as tl

from ssmscope.scans.delta_tile_kernels import (
    between,
    column,
    decays,
    flip,
    inverse,
    load,
    met,
    place,
    product,
    split,
    through,
)
from ssmscope.scans.tile_kernels import INTERPRETED, load_parts, store_parts, store_tile

__all__ = ["INTERPRETED", "back", "carry", "read", "solve", "solve_back"]


@triton.jit
def pair(a):
    """A matrix in two parts, and their unit."""
    return split(a, True, 2)


@triton.jit
def times(acc, a, b):
    """acc + a b, of matrices in two parts."""
    return product(acc, a, b, True, 2)


@triton.jit
def keep(at, units, own, q, n, a, real_n, N: tl.constexpr, STATES: tl.constexpr):
    """Stores a matrix (Q, N) in parts (2, Q, N) and its unit."""
    Q: tl.constexpr = q.shape[0]
    high, low, unit = pair(a)
    store_parts(at + own * 2 * Q * N, q, n, q >= 0, real_n, high, low, N, Q * N, True, N == STATES, 2)
    tl.store(units + own, unit)


@triton.jit
def kept(at, units, own, q, n, real_n, N: tl.constexpr, STATES: tl.constexpr):
    """What `keep` stored."""
    Q: tl.constexpr = q.shape[0]
    high, low = load_parts(at + own * 2 * Q * N, q, n, q >= 0, real_n, N, Q * N, True, N == STATES, 2)
    return high, low, tl.load(units + own)


@triton.jit
def keep_total(D, at, total, n, real_n, N: tl.constexpr, BY_STATE: tl.constexpr):
    if BY_STATE:
        tl.store(D + at * N + n, total, mask=real_n)
    else:
        tl.store(D + at, total)


@triton.jit
def keys_of(
    log_a, beta, k, at, k_step, q, n, heads, real, real_n,
    N: tl.constexpr, STATES: tl.constexpr, BY_STATE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A chunk's keys, where they are and in parts, β, and its `decays`."""
    k_t = load(k, q, n, k_step, real, real_n, EVEN, N == STATES)
    strength = tl.load(beta + at + q * heads, mask=real, other=0.0)
    from_start, to_end, total, s = decays(log_a, at, q, n, heads, real, real_n, N, BY_STATE)
    return k, k_t, pair(k_t), strength, from_start, to_end, total, s


@triton.jit(do_not_specialize=["length", "chunks"])
def solve(
    log_a, beta, k, x, W, E, units, U, D, length, heads, groups, chunks, k_row, k_step, k_group, x_row, x_step, x_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """What is read of a chunk's first state, W = T Γ_start k, and written into its last, E = β Γ_end k, in parts
    (batch, chunks, heads, 2, Q, N) with their `units` (2, batch, chunks, heads), E's first; U = T x (batch,
    length, heads, P); and its whole decay D (batch, chunks, heads, N or 1)."""
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    row, group, head, start, at, own, real = place(length, heads, groups, chunks, q)
    real_n = n < N
    k_at, k_t, k_parts, strength, from_start, to_end, total, s = keys_of(
        log_a, beta, k + row * k_row + group * k_group + start * k_step, at, k_step, q, n, heads, real, real_n,
        N, STATES, BY_STATE, EVEN,
    )  # fmt: skip
    all_chunks = tl.num_programs(0)
    keep_total(D, own, total, n, real_n, N, BY_STATE)
    keep(E, units, own, q, n, k_t * to_end * strength[:, None], real_n, N, STATES)
    L = met(k_t, k_parts, flip(k_parts), log_a, at, k_at, k_step, s, q, n, heads, real, real_n, N, BY_STATE, True, 2)
    T = pair(inverse(tl.where(q[:, None] > q[None, :], L * strength[None, :], 0.0), q, True, 2))
    side = pair(k_t * from_start)
    w = times(tl.zeros([Q, STATES], tl.float32), T, side)
    keep(W, units + all_chunks, own, q, n, w, real_n, N, STATES)
    for p0 in range(0, P, WIDTH):
        wide = p < P - p0
        x_at = x + row * x_row + head * x_head + start * x_step + p0
        x_t = load(x_at, q, p, x_step, real, wide, EVEN, WHOLE_P)
        u = times(tl.zeros([Q, WIDTH], tl.float32), T, pair(x_t))
        store_tile(U + at * P + p0, q, p, heads * P, real, wide, u, EVEN, WHOLE_P)


@triton.jit(do_not_specialize=["length", "chunks"])
def solve_back(
    log_a, beta, k, c, ybar, W, E, F, units, U, D, length, heads, groups, chunks, k_row, k_step, k_group, c_row, c_step,
    c_group, ybar_row, ybar_step, ybar_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, EVEN: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """`solve` of the adjoint: W = −T̄ Γ_end k, E = −β Γ_start k, and with READ F = Γ_start c and U = T̄ Aᵀ ȳ."""
    WHOLE_N: tl.constexpr = N == STATES
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    row, group, head, start, at, own, real = place(length, heads, groups, chunks, q)
    real_n = n < N
    k_at, k_t, k_parts, strength, from_start, to_end, total, s = keys_of(
        log_a, beta, k + row * k_row + group * k_group + start * k_step, at, k_step, q, n, heads, real, real_n,
        N, STATES, BY_STATE, EVEN,
    )  # fmt: skip
    all_chunks = tl.num_programs(0)
    keep_total(D, own, total, n, real_n, N, BY_STATE)
    keep(E, units, own, q, n, -k_t * from_start * strength[:, None], real_n, N, STATES)
    L = met(k_t, k_parts, flip(k_parts), log_a, at, k_at, k_step, s, q, n, heads, real, real_n, N, BY_STATE, True, 2)
    T = flip(pair(inverse(tl.where(q[:, None] > q[None, :], L * strength[:, None], 0.0), q, True, 2)))
    w = times(tl.zeros([Q, STATES], tl.float32), T, pair(-k_t * to_end))
    keep(W, units + all_chunks, own, q, n, w, real_n, N, STATES)
    if READ:
        c_at = c + row * c_row + group * c_group + start * c_step
        c_t = load(c_at, q, n, c_step, real, real_n, EVEN, WHOLE_N)
        c_parts = pair(c_t)
        keep(F, units + 2 * all_chunks, own, q, n, c_t * from_start, real_n, N, STATES)
        A = met(
            c_t, c_parts, flip(k_parts), log_a, at, k_at, k_step, s, q, n, heads, real, real_n, N, BY_STATE, True, 2
        )
        A = flip(pair(A))
        both = pair(times(tl.zeros([Q, Q], tl.float32), T, A))
        for p0 in range(0, P, WIDTH):
            wide = p < P - p0
            y_at = ybar + row * ybar_row + head * ybar_head + start * ybar_step + p0
            y_t = load(y_at, q, p, ybar_step, real, wide, EVEN, WHOLE_P)
            y_parts = pair(y_t)
            u = times(tl.zeros([Q, WIDTH], tl.float32), both, y_parts)
            store_tile(U + at * P + p0, q, p, heads * P, real, wide, u, EVEN, WHOLE_P)


@triton.jit(do_not_specialize=["batch", "length", "chunks"])
def carry(
    W, E, F, units, U, D, ybar, first, states, last, batch, length, heads, chunks, ybar_row, ybar_step, ybar_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, EVEN: tl.constexpr, REVERSE: tl.constexpr, READ: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    """The `states` (batch, chunks, heads, N, P) before every chunk, with KEEP; after all, `last` (batch, heads, P, N);
    and r in place of U: r = U − W Hᵀ, Hᵀ ← D Hᵀ + Eᵀ r from `first`. With REVERSE from the last chunk to the first;
    with READ Fᵀ ȳ is added. A program has WIDTH columns of one head of one sequence.
    """
    WHOLE_N: tl.constexpr = N == STATES
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    row, head, p0 = column(heads, P, WIDTH)
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
        w = kept(W, units + all_chunks, own, q, n, real_n, N, STATES)
        e = kept(E, units, own, q, n, real_n, N, STATES)
        r = load(U + at * P + p0, q, p, heads * P, real, wide, EVEN, WHOLE_P)
        decay = through(D, own, n, real_n, N, BY_STATE)
        r -= times(tl.zeros([Q, WIDTH], tl.float32), w, pair(H))
        store_tile(U + at * P + p0, q, p, heads * P, real, wide, r, EVEN, WHOLE_P)
        H = times(decay * H, flip(e), pair(r))
        if READ:
            f = kept(F, units + 2 * all_chunks, own, q, n, real_n, N, STATES)
            y_at = ybar + row * ybar_row + head * ybar_head + start * ybar_step + p0
            y_t = pair(load(y_at, q, p, ybar_step, real, wide, EVEN, WHOLE_P))
            H = times(H, flip(f), y_t)
    tl.store(last + matrix, H, mask=real_n[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["length", "chunks"])
def read(
    log_a, beta, k, c, U, states, y, length, heads, groups, chunks, k_row, k_step, k_group, c_row, c_step, c_group,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """y = Γ_start c Hᵀ + A β r of every chunk, H the state before it; (batch, length, heads, P)."""
    WHOLE_N: tl.constexpr = N == STATES
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    row, group, head, start, at, own, real = place(length, heads, groups, chunks, q)
    real_n = n < N
    k_at, k_t, k_parts, strength, from_start, to_end, total, s = keys_of(
        log_a, beta, k + row * k_row + group * k_group + start * k_step, at, k_step, q, n, heads, real, real_n,
        N, STATES, BY_STATE, EVEN,
    )  # fmt: skip
    c_at = c + row * c_row + group * c_group + start * c_step
    c_t = load(c_at, q, n, c_step, real, real_n, EVEN, WHOLE_N)
    c_parts = pair(c_t)
    A = met(c_t, c_parts, flip(k_parts), log_a, at, k_at, k_step, s, q, n, heads, real, real_n, N, BY_STATE, True, 2)
    A, reader = pair(A), pair(c_t * from_start)
    states_at = states + own * N * P
    for p0 in range(0, P, WIDTH):
        wide = p < P - p0
        H = load(states_at + p0, n, p, P, real_n, wide, WHOLE_N, WHOLE_P)
        r = load(U + at * P + p0, q, p, heads * P, real, wide, EVEN, WHOLE_P)
        out = times(tl.zeros([Q, WIDTH], tl.float32), reader, pair(H))
        out = times(out, A, pair(r * strength[:, None]))
        store_tile(y + at * P + p0, q, p, heads * P, real, wide, out, EVEN, WHOLE_P)


@triton.jit(do_not_specialize=["length", "chunks"])
def back(
    log_a, beta, k, c, ybar, U, Ubar, states, adjoints, abar, betabar, kbar, cbar, length, heads, groups, chunks,
    k_row, k_step, k_group, c_row, c_step, c_group, ybar_row, ybar_step, ybar_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, EVEN: tl.constexpr,
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
        u_parts, ubar_parts = pair(r * strength), pair(ubar)
        y_parts, H_parts = pair(y_t), flip(pair(H))
        B = times(B, y_parts, flip(u_parts))
        G = times(G, ubar_parts, flip(u_parts))
        of_c = times(of_c, y_parts, H_parts)
        of_k = times(of_k, u_parts, flip(pair(adjoint)))
        erased = times(erased, ubar_parts, H_parts)
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
    k_parts, c_parts = pair(k_t), pair(c_t)
    among = times(tl.zeros([Q, Q], tl.float32), k_parts, flip(k_parts))
    passing = times(tl.zeros([Q, Q], tl.float32), c_parts, flip(k_parts)) * B - among * G
    later = tl.cumsum(tl.where(below, passing, 0.0), axis=0, reverse=True)
    of_a = tl.sum(tl.where(below, later + tl.sum(of_k * k_t, axis=1)[None, :], 0.0), axis=1)
    of_a += tl.cumsum(tl.sum(of_c * c_t - erased * k_t, axis=1), axis=0, reverse=True)
    of_a += total * tl.sum(across, axis=0)
    tl.store(abar + at + q * heads, of_a, mask=real)
    tl.store(betabar + at + q * heads, exchanged, mask=real)
    B, G = pair(B), pair(-(G + tl.trans(G)))
    of_c = times(of_c, B, k_parts)
    store_tile(cbar + at * N, q, n, heads * N, real, real_n, of_c, EVEN, WHOLE_N)
    of_k = times(of_k - erased, flip(B), c_parts)
    of_k = times(of_k, G, k_parts)
    store_tile(kbar + at * N, q, n, heads * N, real, real_n, of_k, EVEN, WHOLE_N)
