"""The Triton kernels of `delta_fused`: the delta rule and its gradient, as products of chunks of Q steps.

Of a chunk's first state H, its steps' keys k, values x and decays, Γ[t, s] = ∏_{s<r≤t} a_r, and M[t, s] = k_tᵀ Γ k_s
for s < t, the differences r that are written, H_t = a_t H_{t−1} + β_t r_t k_tᵀ, are (see `delta`)

    r = T (x − Γ_start k Hᵀ),   T = (I + M β)⁻¹;   H ← a_Q H + (β Γ_end r)ᵀ k;   y = Γ_start c Hᵀ + A r,   A = c Γ kᵀ β.

`solve` makes T and A for all chunks side by side, `walk` walks the chunks. The adjoint Λ goes from the last chunk to
the first in `walk_back`:

    x̄ = Tᵀ (Aᵀ ȳ + β Γ_end k Λᵀ);   Λ ← a_Q Λ + (Γ_start ȳ)ᵀ c − (Γ_start x̄)ᵀ k.

What is left of keys are the adjoints ū = x̄ / β where nothing is read: with T = (I + β M)⁻¹ they are without β what x̄
are with it. Where TURNED, a walk holds the state as (P, N), not (N, P), and all else transposed too, its rows across a
program's warps: what a product gives then enters the next one from the same registers.

With one decay per head, sums of log a are float64, so that a difference of two has all its digits; with a decay per
state (BY_STATE) those of a pair of steps are summed by themselves. T is made in blocks of twice the size each time,
whose entries are bounded as its own are; factors β are where small rows may lose digits. Matrices are multiplied in
parts (`tile_kernels`); what a walk multiplies by, `solve` writes in that form once (the sides), its units in `weights`.

Importing this module needs triton.
"""

import triton
import triton.language as tl

from ssmscope.scans.delta_tile_kernels import (
    applied,
    between,
    column,
    cut,
    decays,
    flip,
    inverse,
    keep_side,
    keep_square,
    load,
    met,
    over_steps,
    place,
    product,
    side,
    split,
    split_rows,
    square,
    through,
    turned,
)
from ssmscope.scans.tile_kernels import INTERPRETED, load_tile, store_tile

__all__ = ["INTERPRETED", "back", "solve", "walk", "walk_back"]


@triton.jit(do_not_specialize=["length", "heads", "groups", "chunks", "plane"])
def solve(
    log_a, beta, k, c, T, A, weights, units, D, k_in, k_out, c_in, length, heads, groups, chunks, plane,
    k_row, k_step, k_group, c_row, c_step, c_group,
    N: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr, BY_STATE: tl.constexpr, EVEN: tl.constexpr,
    SCALED: tl.constexpr, TERMS: tl.constexpr, READ: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """T and, with READ, A of every chunk and head, (batch, chunks, heads, TERMS, Q, Q) in parts with their `units`
    (2, batch, chunks, heads), and decays D through it, (batch, chunks, heads, N or 1).

    `weights` (3, batch, chunks, heads, Q): what k of `k_in` is multiplied by where the first state is read, of `k_out`
    where the last is written, β with it, and c where the first is read. The sides (TERMS, batch, length, groups or
    heads, N) are k, k and c in parts; or, BY_STATE, with their decays, of every head. Where numbers are not in parts, k
    and c are themselves these sides. With LEFT T is (I + β M)⁻¹, and β in the weights of `k_in`, not of `k_out`.
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
    k_parts = split_rows(k_t, SCALED, TERMS)
    M = met(k_t, k_parts, k_parts, log_a, at, k_at, k_step, s, q, n, heads, real, real_n, N, BY_STATE, SCALED, TERMS)
    L = M * (strength[:, None] if LEFT else strength[None, :])
    T_t = inverse(tl.where(q[:, None] > q[None, :], L, 0.0), q, SCALED, PARTS)
    keep_square(T, units, own, q, T_t, SCALED, TERMS)
    enter, leave = tl.full([Q], 1.0, tl.float32), tl.full([Q], 1.0, tl.float32)
    SIDES: tl.constexpr = SCALED or BY_STATE
    sides = heads if BY_STATE else groups
    mine = head if BY_STATE else group
    writes = BY_STATE or head % (heads // groups) == 0
    to = ((row * length + start) * sides + mine) * N
    if BY_STATE:
        into, out = split_rows(k_t * from_start, SCALED, TERMS), split_rows(k_t * to_end, SCALED, TERMS)
        keep_side(k_in + to, q, n, sides * N, plane, real, real_n, into, EVEN, WHOLE, TERMS)
        keep_side(k_out + to, q, n, sides * N, plane, real, real_n, out, EVEN, WHOLE, TERMS)
        if SCALED:
            enter, leave = tl.reshape(into[2], [Q]), tl.reshape(out[2], [Q])
    else:
        enter, leave = tl.reshape(from_start, [Q]), tl.reshape(to_end, [Q])
        if SCALED:
            enter, leave = enter * tl.reshape(k_parts[2], [Q]), leave * tl.reshape(k_parts[2], [Q])
            if writes:
                keep_side(k_in + to, q, n, sides * N, plane, real, real_n, k_parts, EVEN, WHOLE, TERMS)
    if LEFT:
        enter *= strength
    else:
        leave *= strength
    each = tl.num_programs(0).to(tl.int64) * Q
    tl.store(weights + own * Q + q, enter)
    tl.store(weights + each + own * Q + q, leave)
    if READ:
        c_t = load(c + row * c_row + group * c_group + start * c_step, q, n, c_step, real, real_n, EVEN, WHOLE)
        c_parts = split_rows(c_t, SCALED, TERMS)
        A_t = met(
            c_t, c_parts, k_parts, log_a, at, k_at, k_step, s, q, n, heads, real, real_n, N, BY_STATE, SCALED, TERMS
        )
        keep_square(A, units + tl.num_programs(0), own, q, A_t * strength[None, :], SCALED, TERMS)
        if BY_STATE:
            c_parts = split_rows(c_t * from_start, SCALED, TERMS)
            enter = tl.full([Q], 1.0, tl.float32)
        else:
            enter = tl.reshape(from_start, [Q])
        if SCALED:
            enter *= tl.reshape(c_parts[2], [Q])
        tl.store(weights + 2 * each + own * Q + q, enter)
        if SIDES:
            if writes:
                keep_side(c_in + to, q, n, sides * N, plane, real, real_n, c_parts, EVEN, WHOLE, TERMS)


@triton.jit(do_not_specialize=["batch", "length", "heads", "sides", "chunks", "plane"])
def walk(
    k_in, k_out, c_in, T, A, weights, units, D, x, first, states, R, y, last, batch, length, heads, sides, chunks,
    plane, k_row, k_step, k_side, c_row, c_step, c_side, x_row, x_step, x_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr, TURNED: tl.constexpr,
    READ: tl.constexpr, KEEP: tl.constexpr,
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
    H = turned(tl.load(first + matrix, mask=wide[:, None] & real_n[None, :], other=0.0), not TURNED)
    each = (row * 0 + batch) * chunks * heads
    zero = turned(tl.zeros([Q, WIDTH], tl.float32), TURNED)
    decay = through(D, row * chunks * heads + head, n, real_n, N, BY_STATE, TURNED)
    for i in range(0, chunks):
        own = (row * chunks + i) * heads + head
        following = through(D, own + heads * (i + 1 < chunks), n, real_n, N, BY_STATE, TURNED)  # before it is needed
        start = (row * 0 + i) * Q  # in 64 bits
        real = q < length - start
        at = (row * length + start) * heads * P + head * P + p0
        if KEEP:
            kept = turned(H, not TURNED)
            store_tile(states + own * P * N + p0 * N, p, n, N, wide, real_n, kept, WHOLE_P, WHOLE_N)
        k_at = row * k_row + start * k_step + mine * k_side
        k = side(k_in + k_at, q, n, k_step, plane, real, real_n, EVEN, WHOLE_N, TERMS)
        x_t = load_tile(x + row * x_row + start * x_step + head * x_head + p0, q, p, x_step, real, wide, EVEN, WHOLE_P)
        enter = over_steps(tl.load(weights + own * Q + q), TURNED)
        leave = over_steps(tl.load(weights + (each + own) * Q + q), TURNED)
        h = cut(H, TURNED, SCALED, TERMS)
        met = applied(zero, k, h, TURNED, SCALED, TERMS)
        r = cut(turned(x_t, TURNED).to(tl.float32) - met * enter, TURNED, SCALED, TERMS)
        r = applied(zero, square(T, units, own, q, SCALED, TERMS), r, TURNED, SCALED, TERMS)
        if KEEP:
            store_tile(R + at, q, p, heads * P, real, wide, turned(r, TURNED), EVEN, WHOLE_P)
        if READ:
            c_at = c_in + row * c_row + start * c_step + mine * c_side
            c = side(c_at, q, n, c_step, plane, real, real_n, EVEN, WHOLE_N, TERMS)
            if SCALED or BY_STATE:
                enter = over_steps(tl.load(weights + (2 * each + own) * Q + q), TURNED)
            out = applied(zero, c, h, TURNED, SCALED, TERMS) * enter
            reader = square(A, units + each, own, q, SCALED, TERMS)
            out = applied(out, reader, cut(r, TURNED, SCALED, TERMS), TURNED, SCALED, TERMS)
            store_tile(y + at, q, p, heads * P, real, wide, turned(out, TURNED), EVEN, WHOLE_P)
        if BY_STATE:
            k = side(k_out + k_at, q, n, k_step, plane, real, real_n, EVEN, WHOLE_N, TERMS)
        H = applied(H * decay, flip(k), cut(r * leave, TURNED, SCALED, TERMS), TURNED, SCALED, TERMS)
        decay = following
    tl.store(last + matrix, turned(H, not TURNED), mask=wide[:, None] & real_n[None, :])


@triton.jit(do_not_specialize=["batch", "length", "heads", "sides", "chunks", "plane"])
def walk_back(
    k_in, k_out, c_in, T, A, weights, units, D, ybar, last, adjoints, xbar, first, batch, length, heads, sides, chunks,
    plane, k_row, k_step, k_side, c_row, c_step, c_side, y_row, y_step, y_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr, TURNED: tl.constexpr,
    READ: tl.constexpr,
):  # fmt: skip
    """The adjoint of the `first` state from that of the `last`, and `xbar` (batch, length, heads, P), or ū with the T
    and weights of LEFT; with READ of the outputs' ȳ, and the `adjoints` (batch, chunks, heads, P, N) after every
    chunk. Programs as in `walk`."""
    WHOLE_N: tl.constexpr = N == STATES
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    row, head, p0 = column(heads, P, WIDTH)
    mine = head // (heads // sides)
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    wide, real_n = p < P - p0, n < N
    matrix = (row * heads + head) * P * N + (p0 + p)[:, None] * N + n[None, :]
    H = turned(tl.load(last + matrix, mask=wide[:, None] & real_n[None, :], other=0.0), not TURNED)
    each = (row * 0 + batch) * chunks * heads
    zero = turned(tl.zeros([Q, WIDTH], tl.float32), TURNED)
    decay = through(D, (row * chunks + chunks - 1) * heads + head, n, real_n, N, BY_STATE, TURNED)
    for j in range(0, chunks):
        i = chunks - 1 - j
        own = (row * chunks + i) * heads + head
        following = through(D, own - heads * (i > 0), n, real_n, N, BY_STATE, TURNED)
        start = (row * 0 + i) * Q
        real = q < length - start
        at = (row * length + start) * heads * P + head * P + p0
        k_at = row * k_row + start * k_step + mine * k_side
        k = side(k_out + k_at, q, n, k_step, plane, real, real_n, EVEN, WHOLE_N, TERMS)
        enter = over_steps(tl.load(weights + own * Q + q), TURNED)
        leave = over_steps(tl.load(weights + (each + own) * Q + q), TURNED)
        g = applied(zero, k, cut(H, TURNED, SCALED, TERMS), TURNED, SCALED, TERMS) * leave
        decayed = H * decay
        decay = following
        if READ:
            kept = turned(H, not TURNED)
            store_tile(adjoints + own * P * N + p0 * N, p, n, N, wide, real_n, kept, WHOLE_P, WHOLE_N)
            y_at = ybar + row * y_row + start * y_step + head * y_head + p0
            y_t = turned(load_tile(y_at, q, p, y_step, real, wide, EVEN, WHOLE_P), TURNED).to(tl.float32)
            reader = flip(square(A, units + each, own, q, SCALED, TERMS))
            g = applied(g, reader, cut(y_t, TURNED, SCALED, TERMS), TURNED, SCALED, TERMS)
            c_at = c_in + row * c_row + start * c_step + mine * c_side
            c = flip(side(c_at, q, n, c_step, plane, real, real_n, EVEN, WHOLE_N, TERMS))
            read = enter
            if SCALED:
                read = over_steps(tl.load(weights + (2 * each + own) * Q + q), TURNED)
            decayed = applied(decayed, c, cut(y_t * read, TURNED, SCALED, TERMS), TURNED, SCALED, TERMS)
        solved = flip(square(T, units, own, q, SCALED, TERMS))
        g = applied(zero, solved, cut(g, TURNED, SCALED, TERMS), TURNED, SCALED, TERMS)
        store_tile(xbar + at, q, p, heads * P, real, wide, turned(g, TURNED), EVEN, WHOLE_P)
        if BY_STATE:
            k = side(k_in + k_at, q, n, k_step, plane, real, real_n, EVEN, WHOLE_N, TERMS)
        H = applied(decayed, flip(k), cut(g * -enter, TURNED, SCALED, TERMS), TURNED, SCALED, TERMS)
    tl.store(first + matrix, turned(H, not TURNED), mask=wide[:, None] & real_n[None, :])


@triton.jit(do_not_specialize=["length", "heads", "groups", "chunks"])
def back(
    log_a, beta, k, c, ybar, R, xbar, states, adjoints, abar, betabar, kbar, cbar, length, heads, groups, chunks,
    k_row, k_step, k_group, c_row, c_step, c_group, y_row, y_step, y_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    EVEN: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr, SUM: tl.constexpr,
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
    for p0 in tl.static_range(0, P, WIDTH):
        wide = p < P - p0
        r = flip(split(load(R + at * P + p0, q, p, heads * P, real, wide, EVEN, WHOLE_P), SCALED, TERMS))
        y_t = split(load(y_at + p0, q, p, y_step, real, wide, EVEN, WHOLE_P), SCALED, TERMS)
        x_t = split(load(xbar + at * P + p0, q, p, heads * P, real, wide, EVEN, WHOLE_P), SCALED, TERMS)
        B, G = product(B, y_t, r, SCALED, TERMS), product(G, x_t, r, SCALED, TERMS)
    k_whole = load(k_at, q, n, k_step, real, real_n, EVEN, WHOLE_N)
    c_whole = load(c_at, q, n, c_step, real, real_n, EVEN, WHOLE_N)
    k_t, c_t = split(k_whole, SCALED, TERMS), split(c_whole, SCALED, TERMS)
    gamma = between(s, q)
    B, G = B * gamma, tl.where(below, G * gamma, 0.0)
    passing = product(tl.zeros([Q, Q], tl.float32), c_t, flip(k_t), SCALED, TERMS) * B
    passing -= product(tl.zeros([Q, Q], tl.float32), k_t, flip(k_t), SCALED, TERMS) * G
    of_beta = tl.sum(passing, axis=0)
    passing = tl.where(below, passing * strength[None, :], 0.0)
    if SCALED:  # sums of entries of any size
        later = tl.cumsum(passing, axis=0, reverse=True)
    else:
        ones = split(tl.where(below, 0.0, 1.0), SCALED, TERMS)
        later = product(tl.zeros([Q, Q], tl.float32), ones, split(passing, SCALED, TERMS), SCALED, TERMS)
    of_a = tl.sum(tl.where(below, later, 0.0), axis=1)
    B, G = B * strength[None, :], G * strength[None, :]
    B, G = split(B, SCALED, TERMS), split(-(G + tl.trans(G)), SCALED, TERMS)
    of_c = tl.zeros([Q, STATES], tl.float32)
    for p0 in tl.static_range(0, P, WIDTH):
        wide = p < P - p0
        y_t = split(load(y_at + p0, q, p, y_step, real, wide, EVEN, WHOLE_P), SCALED, TERMS)
        H = load(states + states_at + p0 * N, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
        of_c = product(of_c, y_t, split(H, SCALED, TERMS), SCALED, TERMS)
    of_c *= from_start
    passed = tl.sum(of_c * c_whole, axis=1)
    of_c = product(of_c, B, k_t, SCALED, TERMS)
    store_tile(cbar + at * N, q, n, heads * N, real, real_n, of_c, EVEN, WHOLE_N)
    of_k = tl.zeros([Q, STATES], tl.float32)
    for p0 in tl.static_range(0, P, WIDTH):
        wide = p < P - p0
        x_t = split(load(xbar + at * P + p0, q, p, heads * P, real, wide, EVEN, WHOLE_P), SCALED, TERMS)
        H = load(states + states_at + p0 * N, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
        of_k = product(of_k, x_t, split(H, SCALED, TERMS), SCALED, TERMS)
    of_k *= -from_start
    passed += tl.sum(of_k * k_whole, axis=1)
    of_k = product(of_k, flip(B), c_t, SCALED, TERMS)
    of_k = product(of_k, G, k_t, SCALED, TERMS)
    written = tl.zeros([Q, STATES], tl.float32)
    for p0 in tl.static_range(0, P, WIDTH):
        wide = p < P - p0
        r = split(load(R + at * P + p0, q, p, heads * P, real, wide, EVEN, WHOLE_P), SCALED, TERMS)
        H = load(adjoints + states_at + p0 * N, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
        written = product(written, r, split(H, SCALED, TERMS), SCALED, TERMS)
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
