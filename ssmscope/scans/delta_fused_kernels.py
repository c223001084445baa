"""The Triton kernels of `delta_fused`: the delta rule and its gradient, as products of chunks of Q steps.

Of a chunk's first state H, its steps' keys k, values x and decays, Γ[t, s] = ∏_{s<r≤t} a_r, and M[t, s] = k_tᵀ Γ k_s
for s < t, the differences r that are written, H_t = a_t H_{t−1} + β_t r_t k_tᵀ, are (see `delta`)

    r = T (x − Γ_start k Hᵀ),   T = (I + M β)⁻¹;   H ← a_Q H + (β Γ_end r)ᵀ k;   y = Γ_start c Hᵀ + A r,   A = c Γ kᵀ β.

`solve` makes T and A for all chunks side by side, `walk` walks the chunks. The adjoint Λ goes from the last chunk to
the first in `walk_back`:

    x̄ = Tᵀ (Aᵀ ȳ + β Γ_end k Λᵀ);   Λ ← a_Q Λ + (Γ_start ȳ)ᵀ c − (Γ_start x̄)ᵀ k.

Matrices of states are held as (N, P).

With one decay per head, sums of log a are float64, so that a difference of two has all its digits; with a decay per
state (BY_STATE) those of a pair of steps are summed by themselves. T is made in blocks of twice the size each time,
whose entries are bounded as its own are; factors β are where small rows may lose digits. Matrices are multiplied in
16 bits (`tile_kernels`), only T is made of pairs of float16 where SCALED; what a walk multiplies by, `solve` writes in
that form once (the sides), its units in `weights`.

Importing this module needs triton.
"""

import triton
import triton.language as tl

from ssmscope.scans.delta_tile_kernels import (
    between,
    column,
    decays,
    flip,
    flip_rows,
    inverse,
    keep_square,
    load,
    met,
    place,
    product,
    side,
    split,
    split_rows,
    square,
    through,
)
from ssmscope.scans.tile_kernels import INTERPRETED, load_tile, store_tile

__all__ = ["INTERPRETED", "back", "solve", "walk", "walk_back"]


@triton.jit(do_not_specialize=["length", "heads", "groups", "chunks"])
def solve(
    log_a, beta, k, c, T, A, weights, units, D, k_in, k_out, c_in, length, heads, groups, chunks,
    k_row, k_step, k_group, c_row, c_step, c_group,
    N: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr, BY_STATE: tl.constexpr, EVEN: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """T and A of every chunk and head, (batch, chunks, heads, Q, Q), with their `units` (2, batch, chunks, heads), and
    decays D through it, (batch, chunks, heads, N or 1).

    `weights` (3, batch, chunks, heads, Q): what k of `k_in` is multiplied by where the first state is read, of `k_out`
    where the last is written, β with it, and c where the first is read. The sides (batch, length, groups or heads, N)
    are k, k and c in 16 bits; or, BY_STATE, with their decays, of every head. Of bfloat16 with one decay per head, k
    and c are themselves these sides.
    """
    PARTS: tl.constexpr = 2 if SCALED else 1
    q, n = tl.arange(0, Q), tl.arange(0, STATES)
    row, group, head, start, at, own, real = place(length, heads, groups, chunks, q)
    real_n = n < N
    WHOLE: tl.constexpr = N == STATES
    k_at = k + row * k_row + group * k_group + start * k_step
    k_t = load(k_at, q, n, k_step, real, real_n, EVEN, WHOLE)
    strength = tl.load(beta + at + q * heads, mask=real, other=0.0)
    from_start, to_end, total, s = decays(log_a, at, q, n, heads, real, real_n, N, BY_STATE)
    if BY_STATE:
        tl.store(D + own * N + n, total, mask=real_n)
    else:
        tl.store(D + own, total)
    k_parts = split_rows(k_t, SCALED, 1)
    keys = flip_rows(k_parts, SCALED)
    M = met(k_t, k_parts, keys, log_a, at, k_at, k_step, s, q, n, heads, real, real_n, N, BY_STATE, SCALED, 1)
    T_t = inverse(tl.where(q[:, None] > q[None, :], M * strength[None, :], 0.0), q, SCALED, PARTS)
    keep_square(T, units, own, q, T_t, SCALED)
    enter, leave = tl.full([Q], 1.0, tl.float32), tl.full([Q], 1.0, tl.float32)
    sides = heads if BY_STATE else groups
    mine = head if BY_STATE else group
    writes = BY_STATE or head % (heads // groups) == 0
    to = ((row * length + start) * sides + mine) * N
    if BY_STATE:
        into, out = split_rows(k_t * from_start, SCALED, 1), split_rows(k_t * to_end, SCALED, 1)
        store_tile(k_in + to, q, n, sides * N, real, real_n, into[0], EVEN, WHOLE)
        store_tile(k_out + to, q, n, sides * N, real, real_n, out[0], EVEN, WHOLE)
        if SCALED:
            enter, leave = tl.reshape(into[2], [Q]), tl.reshape(out[2], [Q])
    else:
        enter, leave = tl.reshape(from_start, [Q]), tl.reshape(to_end, [Q])
        if SCALED:
            enter, leave = enter * tl.reshape(k_parts[2], [Q]), leave * tl.reshape(k_parts[2], [Q])
            if writes:
                store_tile(k_in + to, q, n, sides * N, real, real_n, k_parts[0], EVEN, WHOLE)
    leave *= strength
    each = tl.num_programs(0).to(tl.int64) * Q
    tl.store(weights + own * Q + q, enter)
    tl.store(weights + each + own * Q + q, leave)
    c_t = load(c + row * c_row + group * c_group + start * c_step, q, n, c_step, real, real_n, EVEN, WHOLE)
    c_parts = split_rows(c_t, SCALED, 1)
    A_t = met(c_t, c_parts, keys, log_a, at, k_at, k_step, s, q, n, heads, real, real_n, N, BY_STATE, SCALED, 1)
    keep_square(A, units + tl.num_programs(0), own, q, A_t * strength[None, :], SCALED)
    if BY_STATE:
        c_parts = split_rows(c_t * from_start, SCALED, 1)
        enter = tl.full([Q], 1.0, tl.float32)
    else:
        enter = tl.reshape(from_start, [Q])
    if SCALED:
        enter *= tl.reshape(c_parts[2], [Q])
    tl.store(weights + 2 * each + own * Q + q, enter)
    if SCALED or BY_STATE:
        if writes:
            store_tile(c_in + to, q, n, sides * N, real, real_n, c_parts[0], EVEN, WHOLE)


@triton.jit(do_not_specialize=["batch", "length", "heads", "sides", "chunks"])
def walk(
    k_in, k_out, c_in, T, A, weights, units, D, x, first, states, R, y, last, batch, length, heads, sides, chunks,
    k_row, k_step, k_side, c_row, c_step, c_side, x_row, x_step, x_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, READ: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """The `last` state (batch, heads, P, N) from the `first`; with READ y (batch, length, heads, P); with KEEP the
    `states` (batch, chunks, heads, P, N) before every chunk and r as R (batch, length, heads, P). A program has WIDTH
    columns of one head of one sequence."""
    WHOLE_N: tl.constexpr = N == STATES
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    row, head, p0 = column(heads, P, WIDTH)
    mine = head // (heads // sides)
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    wide, real_n = p < P - p0, n < N
    matrix = (row * heads + head) * P * N + (p0 + p)[:, None] * N + n[None, :]
    H = tl.trans(tl.load(first + matrix, mask=wide[:, None] & real_n[None, :], other=0.0))
    each = (row * 0 + batch) * chunks * heads
    zero = tl.zeros([Q, WIDTH], tl.float32)
    decay = through(D, row * chunks * heads + head, n, real_n, N, BY_STATE)
    for i in range(0, chunks):
        own = (row * chunks + i) * heads + head
        following = through(D, own + heads * (i + 1 < chunks), n, real_n, N, BY_STATE)  # before it is needed
        start = (row * 0 + i) * Q  # in 64 bits
        real = q < length - start
        at = (row * length + start) * heads * P + head * P + p0
        if KEEP:
            kept = tl.trans(H)
            store_tile(states + own * P * N + p0 * N, p, n, N, wide, real_n, kept, WHOLE_P, WHOLE_N)
        k_at = row * k_row + start * k_step + mine * k_side
        k = side(k_in + k_at, q, n, k_step, real, real_n, EVEN, WHOLE_N)
        x_t = load_tile(x + row * x_row + start * x_step + head * x_head + p0, q, p, x_step, real, wide, EVEN, WHOLE_P)
        enter = tl.load(weights + own * Q + q)[:, None]
        leave = tl.load(weights + (each + own) * Q + q)[:, None]
        h = split(H, SCALED, 1)
        met = product(zero, k, h, SCALED, 1)
        r = split(x_t.to(tl.float32) - met * enter, SCALED, 1)
        r = product(zero, square(T, units, own, q, SCALED), r, SCALED, 1)
        if KEEP:
            store_tile(R + at, q, p, heads * P, real, wide, r, EVEN, WHOLE_P)
        if READ:
            c_at = c_in + row * c_row + start * c_step + mine * c_side
            c = side(c_at, q, n, c_step, real, real_n, EVEN, WHOLE_N)
            if SCALED or BY_STATE:
                enter = tl.load(weights + (2 * each + own) * Q + q)[:, None]
            out = product(zero, c, h, SCALED, 1) * enter
            reader = square(A, units + each, own, q, SCALED)
            out = product(out, reader, split(r, SCALED, 1), SCALED, 1)
            store_tile(y + at, q, p, heads * P, real, wide, out, EVEN, WHOLE_P)
        if BY_STATE:
            k = side(k_out + k_at, q, n, k_step, real, real_n, EVEN, WHOLE_N)
        H = product(H * decay, flip(k), split(r * leave, SCALED, 1), SCALED, 1)
        decay = following
    tl.store(last + matrix, tl.trans(H), mask=wide[:, None] & real_n[None, :])


@triton.jit(do_not_specialize=["batch", "length", "heads", "sides", "chunks"])
def walk_back(
    k_in, k_out, c_in, T, A, weights, units, D, ybar, last, adjoints, xbar, first, batch, length, heads, sides, chunks,
    k_row, k_step, k_side, c_row, c_step, c_side, y_row, y_step, y_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """The adjoint of the `first` state from that of the `last` and the outputs' ȳ; the `adjoints` (batch, chunks,
    heads, P, N) after every chunk, and `xbar` (batch, length, heads, P). Programs as in `walk`."""
    WHOLE_N: tl.constexpr = N == STATES
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    row, head, p0 = column(heads, P, WIDTH)
    mine = head // (heads // sides)
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    wide, real_n = p < P - p0, n < N
    matrix = (row * heads + head) * P * N + (p0 + p)[:, None] * N + n[None, :]
    H = tl.trans(tl.load(last + matrix, mask=wide[:, None] & real_n[None, :], other=0.0))
    each = (row * 0 + batch) * chunks * heads
    zero = tl.zeros([Q, WIDTH], tl.float32)
    decay = through(D, (row * chunks + chunks - 1) * heads + head, n, real_n, N, BY_STATE)
    for j in range(0, chunks):
        i = chunks - 1 - j
        own = (row * chunks + i) * heads + head
        following = through(D, own - heads * (i > 0), n, real_n, N, BY_STATE)
        start = (row * 0 + i) * Q
        real = q < length - start
        at = (row * length + start) * heads * P + head * P + p0
        k_at = row * k_row + start * k_step + mine * k_side
        k = side(k_out + k_at, q, n, k_step, real, real_n, EVEN, WHOLE_N)
        enter = tl.load(weights + own * Q + q)[:, None]
        leave = tl.load(weights + (each + own) * Q + q)[:, None]
        g = product(zero, k, split(H, SCALED, 1), SCALED, 1) * leave
        decayed = H * decay
        decay = following
        kept = tl.trans(H)
        store_tile(adjoints + own * P * N + p0 * N, p, n, N, wide, real_n, kept, WHOLE_P, WHOLE_N)
        y_at = ybar + row * y_row + start * y_step + head * y_head + p0
        y_t = load_tile(y_at, q, p, y_step, real, wide, EVEN, WHOLE_P).to(tl.float32)
        reader = flip(square(A, units + each, own, q, SCALED))
        g = product(g, reader, split(y_t, SCALED, 1), SCALED, 1)
        c_at = c_in + row * c_row + start * c_step + mine * c_side
        c = flip(side(c_at, q, n, c_step, real, real_n, EVEN, WHOLE_N))
        read = enter
        if SCALED:
            read = tl.load(weights + (2 * each + own) * Q + q)[:, None]
        decayed = product(decayed, c, split(y_t * read, SCALED, 1), SCALED, 1)
        solved = flip(square(T, units, own, q, SCALED))
        g = product(zero, solved, split(g, SCALED, 1), SCALED, 1)
        store_tile(xbar + at, q, p, heads * P, real, wide, g, EVEN, WHOLE_P)
        if BY_STATE:
            k = side(k_in + k_at, q, n, k_step, real, real_n, EVEN, WHOLE_N)
        H = product(decayed, flip(k), split(g * -enter, SCALED, 1), SCALED, 1)
    tl.store(first + matrix, tl.trans(H), mask=wide[:, None] & real_n[None, :])


@triton.jit(do_not_specialize=["length", "heads", "groups", "chunks"])
def back(
    log_a, beta, k, c, ybar, R, xbar, states, adjoints, abar, betabar, kbar, cbar, length, heads, groups, chunks,
    k_row, k_step, k_group, c_row, c_step, c_group, y_row, y_step, y_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    EVEN: tl.constexpr, SCALED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Of every chunk the gradients of log a and β (batch, length, heads) and of each head's k and c (batch, length,
    heads, N), with one decay per head: B = Γ ⊙ (ȳ rᵀ), G = Γ ⊙ (x̄ rᵀ) below the diagonal,

        c̄ = Γ_start ȳ H + B β k,   k̄ = Γ_end β r Λ − Γ_start x̄ H + (B β)ᵀ c − (G β + (G β)ᵀ) k,
        β̄_s = Σ_t (B[t, s] c_t − G[t, s] k_t) · k_s + Γ_end k_s · (r_s Λ),

    and of log a_r what passes through step r: from s < r to t ≥ r, from H to t ≥ r, from s < r to Λ and from H to Λ.
    """
    WHOLE_N: tl.constexpr = N == STATES
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    row, group, head, start, at, own, real = place(length, heads, groups, chunks, q)
    real_n, below = n < N, q[:, None] > q[None, :]
    k_at = k + row * k_row + group * k_group + start * k_step
    c_at = c + row * c_row + group * c_group + start * c_step
    y_at = ybar + row * y_row + start * y_step + head * y_head
    states_at = own * P * N
    strength = tl.load(beta + at + q * heads, mask=real, other=0.0)
    from_start, to_end, total, s = decays(log_a, at, q, n, heads, real, real_n, N, False)
    B, G = tl.zeros([Q, Q], tl.float32), tl.zeros([Q, Q], tl.float32)
    # Where a program's columns are all of a head, r, ȳ, x̄ and H are loaded once.
    for p0 in tl.static_range(0, P, WIDTH):
        wide = p < P - p0
        r = split(load(R + at * P + p0, q, p, heads * P, real, wide, EVEN, WHOLE_P), SCALED, 1)
        y_t = split(load(y_at + p0, q, p, y_step, real, wide, EVEN, WHOLE_P), SCALED, 1)
        x_t = split(load(xbar + at * P + p0, q, p, heads * P, real, wide, EVEN, WHOLE_P), SCALED, 1)
        B, G = product(B, y_t, flip(r), SCALED, 1), product(G, x_t, flip(r), SCALED, 1)
    k_whole = load(k_at, q, n, k_step, real, real_n, EVEN, WHOLE_N)
    c_whole = load(c_at, q, n, c_step, real, real_n, EVEN, WHOLE_N)
    k_t, c_t = split(k_whole, SCALED, 1), split(c_whole, SCALED, 1)
    gamma = between(s, q)
    B, G = B * gamma, tl.where(below, G * gamma, 0.0)
    passing = product(tl.zeros([Q, Q], tl.float32), c_t, flip(k_t), SCALED, 1) * B
    passing -= product(tl.zeros([Q, Q], tl.float32), k_t, flip(k_t), SCALED, 1) * G
    of_beta = tl.sum(passing, axis=0)
    passing = tl.where(below, passing * strength[None, :], 0.0)
    if SCALED:  # sums of entries of any size
        later = tl.cumsum(passing, axis=0, reverse=True)
    else:
        ones = split(tl.where(below, 0.0, 1.0), SCALED, 1)
        later = product(tl.zeros([Q, Q], tl.float32), ones, split(passing, SCALED, 1), SCALED, 1)
    of_a = tl.sum(tl.where(below, later, 0.0), axis=1)
    B, G = B * strength[None, :], G * strength[None, :]
    B, G = split(B, SCALED, 1), split(-(G + tl.trans(G)), SCALED, 1)
    of_c = tl.zeros([Q, STATES], tl.float32)
    for p0 in tl.static_range(0, P, WIDTH):
        wide = p < P - p0
        if P > WIDTH:
            y_t = split(load(y_at + p0, q, p, y_step, real, wide, EVEN, WHOLE_P), SCALED, 1)
        H = split(load(states + states_at + p0 * N, p, n, N, wide, real_n, WHOLE_P, WHOLE_N), SCALED, 1)
        of_c = product(of_c, y_t, H, SCALED, 1)
    of_c *= from_start
    passed = tl.sum(of_c * c_whole, axis=1)
    of_c = product(of_c, B, k_t, SCALED, 1)
    store_tile(cbar + at * N, q, n, heads * N, real, real_n, of_c, EVEN, WHOLE_N)
    of_k = tl.zeros([Q, STATES], tl.float32)
    for p0 in tl.static_range(0, P, WIDTH):
        wide = p < P - p0
        if P > WIDTH:
            x_t = split(load(xbar + at * P + p0, q, p, heads * P, real, wide, EVEN, WHOLE_P), SCALED, 1)
            H = split(load(states + states_at + p0 * N, p, n, N, wide, real_n, WHOLE_P, WHOLE_N), SCALED, 1)
        of_k = product(of_k, x_t, H, SCALED, 1)
    of_k *= -from_start
    passed += tl.sum(of_k * k_whole, axis=1)
    of_k = product(of_k, flip(B), c_t, SCALED, 1)
    of_k = product(of_k, G, k_t, SCALED, 1)
    written = tl.zeros([Q, STATES], tl.float32)
    for p0 in tl.static_range(0, P, WIDTH):
        wide = p < P - p0
        if P > WIDTH:
            r = split(load(R + at * P + p0, q, p, heads * P, real, wide, EVEN, WHOLE_P), SCALED, 1)
        H = load(adjoints + states_at + p0 * N, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
        written = product(written, r, split(H, SCALED, 1), SCALED, 1)
    written *= to_end
    gives = tl.sum(written * k_whole, axis=1)
    of_k += written * strength[:, None]
    store_tile(kbar + at * N, q, n, heads * N, real, real_n, of_k, EVEN, WHOLE_N)
    tl.store(betabar + at + q * heads, of_beta + gives, mask=real)
    of_a += tl.sum(tl.where(below, (gives * strength)[None, :], 0.0), axis=1)
    of_a += tl.cumsum(passed, axis=0, reverse=True)
    across = tl.zeros([SUM, STATES], tl.float32)
    few = tl.arange(0, SUM)
    for first in range(0, P, SUM):
        some = few < P - first
        before = load(states + states_at + first * N, few, n, N, some, real_n, P % SUM == 0, WHOLE_N)
        after = load(adjoints + states_at + first * N, few, n, N, some, real_n, P % SUM == 0, WHOLE_N)
        across += before * after
    of_a += total * tl.sum(tl.sum(across, axis=1), axis=0)
    tl.store(abar + at + q * heads, of_a, mask=real)
