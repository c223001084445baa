"""The Triton kernels of `scalar_fused`: the scan with one decay per head and its gradient, as products of chunks.

Of a chunk of Q steps, S_t = Σ_{r≤t} log₂ a_r counted from the chunk's start, kept as the sum of two float32
(`sums`), so that a difference of two has all its digits. What lies above the diagonal is a product with 0, of a finite
number. `carry` walks the chunks one after the other and keeps the state before each; the other kernels work on all
chunks side by side, each program on one chunk and a part of the heads of one group, WIDTH of a head's P at a time.
Where the input is weighted (WEIGHTED) the state is written Δ_t x_t, and Δ stands below S. Sums over heads leave a
program as its own row of a table that torch adds up: nothing depends on the order in which programs run.

Matrices are multiplied in parts (`tile_kernels`), those of b, c and the states written in that form once (`parts`,
`carry`). A factor by row of a product is multiplied in after it: where it is small, it would cost float16 its digits.

Importing this module needs triton.
"""

import triton
import triton.language as tl

from ssmscope.scans.tile_kernels import (
    between,
    bf16,
    decay_of,
    dot,
    in_parts,
    largest_of,
    load_tile,
    one_over,
    share_of,
    store_tile,
    unit_of,
    unit_of_product,
)

LEAST: tl.constexpr = tl.constexpr(-1e4)
"""Log-decays are at least this, so that the second part of a sum of them is small."""


@triton.jit
def sums(
    log_a, delta, S, most, length, heads, chunks, a_row, a_step, a_head, d_row, d_step, d_head,
    Q: tl.constexpr, HEADS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """S (batch, chunks, heads, 2 or 3, Q): its first part, its second, and Δ; `most` (batch, chunks, heads, 3): the
    largest a_t, (a_Q / a_s) Δ_s and Δ_s of each chunk. A program has HEADS heads of a chunk."""
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
    a = tl.where(a < LEAST, LEAST, a) * tl.full([], 1.4426950408889634, tl.float64)
    s = tl.cumsum(a, axis=0)
    high = s.to(tl.float32)
    PARTS: tl.constexpr = 3 if WEIGHTED else 2
    place = (row * chunks + chunk) * heads + h
    at = S + (place * PARTS * Q)[None, :] + q[:, None]
    tl.store(at, high, mask=known)
    low = (s - high.to(tl.float64)).to(tl.float32)
    tl.store(at + Q, tl.where(low == low, low, 0.0), mask=known)  # a NaN stays in the first part alone
    left = tl.exp2(tl.sum(a, axis=0)[None, :].to(tl.float32) - high)
    d = tl.full([Q, HEADS], 1.0, tl.float32)
    if WEIGHTED:
        d = tl.load(delta + row * d_row + t[:, None] * d_step + h[None, :] * d_head, mask=there, other=0.0)
        tl.store(at + 2 * Q, d, mask=known)
    tl.store(most + place * 3, tl.max(tl.exp2(high), axis=0), mask=h < heads)
    tl.store(most + place * 3 + 1, tl.max(tl.abs(left * d), axis=0), mask=h < heads)
    tl.store(most + place * 3 + 2, tl.max(tl.abs(d), axis=0), mask=h < heads)


@triton.jit
def parts(
    b, c, b_parts, c_parts, units, length, groups, chunks, b_row, b_step, b_group, c_row, c_step, c_group,
    N: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """b and c in parts (batch, chunks, groups, TERMS, Q, N), 0 past the end, and their `units` (batch, chunks, groups,
    2). A program has a chunk of a group."""
    program = tl.program_id(0).to(tl.int64)
    group = program % groups
    chunk = (program // groups) % chunks
    row = program // (groups * chunks)
    q, n = tl.arange(0, Q), tl.arange(0, STATES)
    start = chunk * Q
    real, real_n = q < length - start, n < N
    WHOLE_N: tl.constexpr = N == STATES
    b_t = load_tile(b + row * b_row + group * b_group + start * b_step, q, n, b_step, real, real_n, False, WHOLE_N)
    c_t = load_tile(c + row * c_row + group * c_group + start * c_step, q, n, c_step, real, real_n, False, WHOLE_N)
    if SCALED:
        b_unit, c_unit = unit_of(largest_of(b_t)), unit_of(largest_of(c_t))
        b_t, c_t = b_t * one_over(b_unit), c_t * one_over(c_unit)
    b_high, b_low = in_parts(b_t, SCALED, TERMS)
    c_high, c_low = in_parts(c_t, SCALED, TERMS)
    own = program * TERMS * Q * N
    store_tile(b_parts + own, q, n, N, real, real_n, b_high, True, WHOLE_N)
    store_tile(c_parts + own, q, n, N, real, real_n, c_high, True, WHOLE_N)
    if TERMS == 2:
        store_tile(b_parts + own + Q * N, q, n, N, real, real_n, b_low, True, WHOLE_N)
        store_tile(c_parts + own + Q * N, q, n, N, real, real_n, c_low, True, WHOLE_N)
    if SCALED:
        tl.store(units + program * 2, b_unit)
        tl.store(units + program * 2 + 1, c_unit)


@triton.jit
def carry(
    S, most, left, right, units, first, states, state_units, largest, last, length, heads, groups, chunks, left_row,
    left_step, left_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    WEIGHTED: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr, REVERSE: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """The state (P, N) before every chunk, `states` (batch, chunks, heads, TERMS, P, N) with their units (batch,
    chunks, heads, parts), and after the last, `last` (batch, heads, P, N): H ← a_Q H + Σ_s (a_Q / a_s) Δ_s left_s
    right_sᵀ, a_t = 2^{S_t}, from `first` or, without FIRST, from 0; `left` is x and `right` b in parts. `largest` is
    the largest |left| of every chunk and part of a head.

    With REVERSE the adjoint after every chunk, and before the first, with `left` ȳ and `right` c, from the last chunk
    to the first: Λ ← a_Q Λ + Σ_t a_t ȳ_t c_tᵀ. A program has WIDTH by STATES numbers of one head of one sequence.
    """
    program = tl.program_id(0).to(tl.int64)
    P_BLOCKS: tl.constexpr = (P + WIDTH - 1) // WIDTH
    N_BLOCKS: tl.constexpr = (N + STATES - 1) // STATES
    PARTS: tl.constexpr = 3 if WEIGHTED else 2
    n0, p_block = (program % N_BLOCKS) * STATES, program // N_BLOCKS % P_BLOCKS
    p0 = p_block * WIDTH
    rest = program // (N_BLOCKS * P_BLOCKS)
    head, row = rest % heads, rest // heads
    group = head // (heads // groups)
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    wide, real_n = p < P - p0, n < N - n0
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    WHOLE_N: tl.constexpr = N % STATES == 0
    matrix = (row * heads + head) * P * N + p0 * N + n0
    left_at = left + row * left_row + head * left_head + p0
    bound = tl.full([], 0.0, tl.float32)
    if FIRST:
        H = load_tile(first + matrix, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
        if SCALED:
            for i in range(0, N, STATES):  # that of all n, as every program of this head has it
                one = load_tile(first + matrix - n0 + i, p, n, N, wide, n < N - i, WHOLE_P, WHOLE_N)
                bound = tl.maximum(bound, largest_of(one))
    else:
        H = tl.zeros([WIDTH, STATES], tl.float32)
    for i in tl.range(0, chunks, num_stages=2):
        k = i
        if REVERSE:
            k = chunks - 1 - i
        at = (row * chunks + k) * heads + head
        S_at = S + at * (PARTS * Q)
        high, low = tl.load(S_at + q), tl.load(S_at + Q + q)
        high_end, low_end = tl.load(S_at + Q - 1), tl.load(S_at + 2 * Q - 1)
        real = q < length - k * Q
        if REVERSE:
            weight = decay_of(high, low)
        else:
            weight = decay_of(high_end - high, low_end - low)
            if WEIGHTED:
                weight *= tl.load(S_at + 2 * Q + q)
        start = (row * 0 + k) * Q  # in 64 bits
        left_t = load_tile(left_at + start * left_step, q, p, left_step, real, wide, EVEN, WHOLE_P)
        shared = (row * chunks + k) * groups + group
        right_at = right + shared * TERMS * Q * N + n0
        right_t = load_tile(right_at, q, n, N, real, real_n, True, WHOLE_N)
        right_low = right_t
        if TERMS == 2:
            right_low = load_tile(right_at + Q * N, q, n, N, real, real_n, True, WHOLE_N)
        decay = decay_of(high_end, low_end)
        states_at = states + at * TERMS * P * N + p0 * N + n0
        kept = H
        if SCALED:
            own = at * P_BLOCKS + p_block
            unit = unit_of(bound)
            kept = H * one_over(unit)
            large = largest_of(left_t)
            tl.store(state_units + own, unit)
            tl.store(largest + own, large)
            left_unit = unit_of_product(large, tl.load(most + at * 3 + (0 if REVERSE else 1)))
            weight = weight * one_over(left_unit)
            right_unit = tl.load(units + shared * 2 + (1 if REVERSE else 0))
        kept_high, kept_low = in_parts(kept, SCALED, TERMS)
        store_tile(states_at, p, n, N, wide, real_n, kept_high, WHOLE_P, WHOLE_N)
        if TERMS == 2:
            store_tile(states_at + P * N, p, n, N, wide, real_n, kept_low, WHOLE_P, WHOLE_N)
        left_t, left_low = in_parts(left_t * weight[:, None], SCALED, TERMS)
        left_t, left_low = tl.trans(left_t), tl.trans(left_low)
        if SCALED:
            scale = left_unit * right_unit
            added = dot(tl.zeros([WIDTH, STATES], tl.float32), left_t, left_low, right_t, right_low, TERMS)
            H = decay * H + added * scale
            bound = decay * bound + scale * (Q * 1073741824.0)
        else:
            H = dot(decay * H, left_t, left_low, right_t, right_low, TERMS)
    store_tile(last + matrix, p, n, N, wide, real_n, H, WHOLE_P, WHOLE_N)


@triton.jit
def read(
    S, most, x, b, c, units, states, state_units, largest, y, length, heads, groups, chunks, blocks, x_row, x_step,
    x_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    WEIGHTED: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """y_t = Σ_{s≤t} L[t, s] Δ_s (c_t · b_s) x_s + a_t H c_t of every chunk, L[t, s] = a_t / a_s and H the state before
    it; `y` (batch, length, heads, P)."""
    WIDE: tl.constexpr = (P + WIDTH - 1) // WIDTH
    PARTS: tl.constexpr = 3 if WEIGHTED else 2
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    WHOLE_N: tl.constexpr = N == STATES
    row, chunk, group, block, begin, end = share_of(heads, groups, chunks, blocks, WIDE)
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    start = chunk * Q
    real, real_n = q < length - start, n < N
    shared = (row * chunks + chunk) * groups + group
    c_at = c + shared * TERMS * Q * N
    c_t = load_tile(c_at, q, n, N, real, real_n, True, WHOLE_N)
    c_low = c_t
    if TERMS == 2:
        c_low = load_tile(c_at + Q * N, q, n, N, real, real_n, True, WHOLE_N)
    b_at = b + shared * TERMS * Q * N
    b_t = load_tile(b_at, q, n, N, real, real_n, True, WHOLE_N)
    b_low = b_t
    if TERMS == 2:
        b_low = load_tile(b_at + Q * N, q, n, N, real, real_n, True, WHOLE_N)
    inner = dot(tl.zeros([Q, Q], tl.float32), c_t, c_low, tl.trans(b_t), tl.trans(b_low), TERMS)
    inner = tl.where(q[:, None] >= q[None, :], inner, 0.0)
    if SCALED:
        c_unit = tl.load(units + shared * 2 + 1)
        most_inner = unit_of(largest_of(inner))
        inner = inner * one_over(most_inner)
        inner_unit = most_inner * c_unit * tl.load(units + shared * 2)
    at = (row * chunks + chunk) * heads
    for part in tl.range(begin, end, num_stages=1):
        head, p0 = part // WIDE, (part % WIDE) * WIDTH
        wide = p < P - p0
        S_at = S + (at + head) * (PARTS * Q)
        high, low = tl.load(S_at + q), tl.load(S_at + Q + q)
        H_at = states + ((at + head) * TERMS * P + p0) * N
        H = load_tile(H_at, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
        H_low = H
        if TERMS == 2:
            H_low = load_tile(H_at + P * N, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
        x_at = x + row * x_row + head * x_head + start * x_step + p0
        x_t = load_tile(x_at, q, p, x_step, real, wide, EVEN, WHOLE_P)
        out = dot(tl.zeros([Q, WIDTH], tl.float32), c_t, c_low, tl.trans(H), tl.trans(H_low), TERMS)
        L, L_low = in_parts(inner * between(high[:, None], high[None, :]), SCALED, TERMS)
        out_weight, x_weight = decay_of(high, low), tl.exp2(-low)
        if WEIGHTED:
            x_weight *= tl.load(S_at + 2 * Q + q)
        scale = 1.0
        if SCALED:
            own = at * WIDE + part
            x_unit = unit_of_product(tl.load(largest + own), tl.load(most + (at + head) * 3 + 2))
            out_weight *= c_unit * tl.load(state_units + own)
            x_weight *= one_over(x_unit)
            scale = inner_unit * x_unit
        x_t, x_low = in_parts(x_t * x_weight[:, None], SCALED, TERMS)
        within = dot(tl.zeros([Q, WIDTH], tl.float32), L, L_low, x_t, x_low, TERMS)
        out = out * out_weight[:, None] + within * (tl.exp2(low) * scale)[:, None]
        y_at = y + ((row * length + start) * heads + head) * P + p0
        store_tile(y_at, q, p, heads * P, real, wide, out, EVEN, WHOLE_P)


@triton.jit
def back_states(
    S, most, x, c, ybar, units, states, state_units, adjoints, adjoint_units, largest_x, largest_ybar, was_read, met,
    bbars, cbars, batch, length, heads, groups, chunks, blocks, x_row, x_step, x_head, ybar_row, ybar_step, ybar_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    WEIGHTED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Of every chunk the gradients of b and c by the adjoint Λ after it and the state H before it, b̄_s = (a_Q / a_s)
    Δ_s Λᵀ x_s and c̄_t = a_t Hᵀ ȳ_t, summed over a program's heads, its row of `bbars` and `cbars` (blocks, batch,
    length, groups, N); and what crosses a chunk's ends, for the gradient of log a: `was_read`, a_t ȳ_t · H c_t (batch,
    chunks, heads, parts, Q), and `met`, a_Q ⟨Λ, H⟩ (batch, chunks, heads, parts)."""
    WIDE: tl.constexpr = (P + WIDTH - 1) // WIDTH
    PARTS: tl.constexpr = 3 if WEIGHTED else 2
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    WHOLE_N: tl.constexpr = N == STATES
    row, chunk, group, block, begin, end = share_of(heads, groups, chunks, blocks, WIDE)
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    start = chunk * Q
    real, real_n = q < length - start, n < N
    shared = (row * chunks + chunk) * groups + group
    c_at = c + shared * 2 * Q * N
    c_t = load_tile(c_at, q, n, N, real, real_n, True, WHOLE_N).to(tl.float32)
    c_t += load_tile(c_at + Q * N, q, n, N, real, real_n, True, WHOLE_N).to(tl.float32)
    c_t = c_t * tl.load(units + shared * 2 + 1)
    at = (row * chunks + chunk) * heads
    b_sum, c_sum = tl.zeros([Q, STATES], tl.float32), tl.zeros([Q, STATES], tl.float32)
    for part in tl.range(begin, end, num_stages=1):
        head, p0 = part // WIDE, (part % WIDE) * WIDTH
        wide = p < P - p0
        own = at * WIDE + part
        S_at = S + (at + head) * (PARTS * Q)
        high, low = tl.load(S_at + q), tl.load(S_at + Q + q)
        high_end, low_end = tl.load(S_at + Q - 1), tl.load(S_at + 2 * Q - 1)
        x_weight = decay_of(high_end - high, low_end - low)
        if WEIGHTED:
            x_weight *= tl.load(S_at + 2 * Q + q)
        y_weight = decay_of(high, low)
        states_at = ((at + head) * 2 * P + p0) * N
        adjoint = load_tile(adjoints + states_at, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
        H = load_tile(states + states_at, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
        adjoint_low = load_tile(adjoints + states_at + P * N, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
        H_low = load_tile(states + states_at + P * N, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
        whole_adjoint = adjoint.to(tl.float32) + adjoint_low.to(tl.float32)
        whole_H = H.to(tl.float32) + H_low.to(tl.float32)
        both = tl.sum(tl.sum(whole_H * whole_adjoint, axis=1), axis=0) * decay_of(high_end, low_end)
        x_at = x + row * x_row + head * x_head + start * x_step + p0
        x_t = load_tile(x_at, q, p, x_step, real, wide, EVEN, WHOLE_P)
        ybar_at = ybar + row * ybar_row + head * ybar_head + start * ybar_step + p0
        ybar_t = load_tile(ybar_at, q, p, ybar_step, real, wide, EVEN, WHOLE_P)
        H_unit, adjoint_unit = tl.load(state_units + own), tl.load(adjoint_units + own)
        x_unit, ybar_unit = unit_of(tl.load(largest_x + own)), unit_of(tl.load(largest_ybar + own))
        both = both * H_unit * adjoint_unit
        x_t, ybar_t = x_t * one_over(x_unit), ybar_t * one_over(ybar_unit)
        x_weight, y_weight = x_weight * (x_unit * adjoint_unit), y_weight * (ybar_unit * H_unit)
        x_t, x_low = in_parts(x_t, True, 2)
        one = dot(tl.zeros([Q, STATES], tl.float32), x_t, x_low, adjoint, adjoint_low, 2)
        b_sum += one * x_weight[:, None]
        tl.store(met + own, both)
        ybar_t, ybar_low = in_parts(ybar_t, True, 2)
        one = dot(tl.zeros([Q, STATES], tl.float32), ybar_t, ybar_low, H, H_low, 2) * y_weight[:, None]
        tl.store(was_read + own * Q + q, tl.sum(one * c_t, axis=1))
        c_sum += one
    rows = (((block * batch + row) * length + start) * groups + group) * N
    store_tile(bbars + rows, q, n, groups * N, real, real_n, b_sum, EVEN, WHOLE_N)
    store_tile(cbars + rows, q, n, groups * N, real, real_n, c_sum, EVEN, WHOLE_N)


@triton.jit
def _later(K, until):
    """Σ_{t≥r} K[s, t] at [s, r]; K in three numbers of 8 bits, `until` 1 at [t, r] for t ≥ r."""
    R = tl.zeros([K.shape[0], K.shape[1]], tl.float32)
    for _ in tl.static_range(2):
        first = (K.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        R = tl.dot(bf16(first), until, R)
        K = K - first
    return tl.dot(bf16(K), until, R)


@triton.jit
def back(
    S, x, b, c, ybar, units, adjoints, adjoint_units, largest_x, largest_ybar, was_read, met, abar, deltabar, xbar,
    bbars, cbars, batch, length, heads, groups, chunks, blocks, x_row, x_step, x_head, ybar_row, ybar_step, ybar_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    WEIGHTED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Of every chunk the other gradients, and what its own steps add to those of b and c, with L[t, s] = a_t / a_s for
    s ≤ t:

    x̄_s = Δ_s Σ_t L[t, s] (c_t · b_s) ȳ_t + Δ_s (a_Q / a_s) Λ b_s, the same without Δ_s times x_s for Δ, b̄_s += Σ_t
    K[t, s] c_t and c̄_t += Σ_s K[t, s] b_s of K[t, s] = L[t, s] Δ_s (ȳ_t · x_s), summed over heads first.

    The gradient of log a_r is what passes through step r: what is written at s < r or before the chunk, and read at
    t ≥ r or after it, Σ_{s<r≤t} K[t, s] (c_t · b_s) + Σ_{t≥r} `was_read`_t + Σ_{s<r} written_s + `met`. A sum without
    differences: however small it is, its digits are right. `abar` and `deltabar` (batch, chunks, heads, parts, Q).
    Matrices of two steps stand here as [s, t].
    """
    WIDE: tl.constexpr = (P + WIDTH - 1) // WIDTH
    PARTS: tl.constexpr = 3 if WEIGHTED else 2
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    WHOLE_N: tl.constexpr = N == STATES
    row, chunk, group, block, begin, end = share_of(heads, groups, chunks, blocks, WIDE)
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    start = chunk * Q
    real, real_n = q < length - start, n < N
    later = q[:, None] <= q[None, :]
    earlier = q[:, None] < q[None, :]
    until = bf16(tl.where(q[:, None] >= q[None, :], 1.0, 0.0))
    shared = (row * chunks + chunk) * groups + group
    b_at, c_at = b + shared * 2 * Q * N, c + shared * 2 * Q * N
    b_s = load_tile(b_at, q, n, N, real, real_n, True, WHOLE_N)
    b_low = load_tile(b_at + Q * N, q, n, N, real, real_n, True, WHOLE_N)
    c_t = load_tile(c_at, q, n, N, real, real_n, True, WHOLE_N)
    c_low = load_tile(c_at + Q * N, q, n, N, real, real_n, True, WHOLE_N)
    bc = dot(tl.zeros([Q, Q], tl.float32), b_s, b_low, tl.trans(c_t), tl.trans(c_low), 2)
    bc = tl.where(later, bc, 0.0)
    b_unit, c_unit = tl.load(units + shared * 2), tl.load(units + shared * 2 + 1)
    most_bc = unit_of(largest_of(bc))
    bc = bc * one_over(most_bc)
    bc_unit = most_bc * b_unit * c_unit
    at = (row * chunks + chunk) * heads
    K_sum = tl.zeros([Q, Q], tl.float32)
    for part in tl.range(begin, end, num_stages=1):
        head, p0 = part // WIDE, (part % WIDE) * WIDTH
        wide = p < P - p0
        own = at * WIDE + part
        S_at = S + (at + head) * (PARTS * Q)
        high, low = tl.load(S_at + q), tl.load(S_at + Q + q)
        high_end, low_end = tl.load(S_at + Q - 1), tl.load(S_at + 2 * Q - 1)
        weight = decay_of(high_end - high, low_end - low)
        s_weight, ybar_weight = tl.exp2(-low), tl.exp2(low)
        x_at = x + row * x_row + head * x_head + start * x_step + p0
        x_s = load_tile(x_at, q, p, x_step, real, wide, EVEN, WHOLE_P)
        ybar_at = ybar + row * ybar_row + head * ybar_head + start * ybar_step + p0
        ybar_t = load_tile(ybar_at, q, p, ybar_step, real, wide, EVEN, WHOLE_P)
        adjoints_at = adjoints + ((at + head) * 2 * P + p0) * N
        adjoint = load_tile(adjoints_at, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
        adjoint_low = load_tile(adjoints_at + P * N, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
        x_unit, ybar_unit = unit_of(tl.load(largest_x + own)), unit_of(tl.load(largest_ybar + own))
        x_s, ybar_weight = x_s * one_over(x_unit), ybar_weight * one_over(ybar_unit)
        weight = weight * (b_unit * tl.load(adjoint_units + own))
        x_high, x_low = in_parts(x_s, True, 2)
        ybar_t, ybar_low = in_parts(ybar_t * ybar_weight[:, None], True, 2)
        across = dot(tl.zeros([Q, WIDTH], tl.float32), b_s, b_low, tl.trans(adjoint), tl.trans(adjoint_low), 2)
        across = across * weight[:, None]
        written = tl.sum(across * x_s, axis=1)
        K = dot(tl.zeros([Q, Q], tl.float32), x_high, x_low, tl.trans(ybar_t), tl.trans(ybar_low), 2)
        L = between(high[None, :], high[:, None])
        written = written * x_unit
        out_weight = s_weight * (bc_unit * ybar_unit)
        s_weight = s_weight * (x_unit * ybar_unit)
        K = tl.where(later, L * K, 0.0)
        if WEIGHTED:
            d = tl.load(S_at + 2 * Q + q)
            gained = tl.sum(K * bc, axis=1) * s_weight * bc_unit
            tl.store(deltabar + own * Q + q, gained + written)
            written = written * d
            s_weight = s_weight * d
        K = K * s_weight[:, None]
        K_sum += K
        passing = _later(K * bc, until) * bc_unit
        through = tl.sum(tl.where(earlier, passing + written[:, None], 0.0), axis=0)
        through += tl.cumsum(tl.load(was_read + own * Q + q), axis=0, reverse=True) + tl.load(met + own)
        tl.store(abar + own * Q + q, through)
        L_high, L_low = in_parts(L * bc, True, 2)
        out = dot(tl.zeros([Q, WIDTH], tl.float32), L_high, L_low, ybar_t, ybar_low, 2)
        out = out * out_weight[:, None] + across
        if WEIGHTED:
            out = out * d[:, None]
        x_at = xbar + ((row * length + start) * heads + head) * P + p0
        store_tile(x_at, q, p, heads * P, real, wide, out, EVEN, WHOLE_P)
    rows = (((block * batch + row) * length + start) * groups + group) * N
    c_t = load_tile(c_at, q, n, N, real, real_n, True, WHOLE_N)  # anew: in shared memory it would cost room until here
    c_low = load_tile(c_at + Q * N, q, n, N, real, real_n, True, WHOLE_N)
    K_unit = unit_of(largest_of(K_sum))
    K_sum = K_sum * one_over(K_unit)
    K_high, K_low = in_parts(K_sum, True, 2)
    b_sum = dot(tl.zeros([Q, STATES], tl.float32), K_high, K_low, c_t, c_low, 2) * (K_unit * c_unit)
    b_sum += load_tile(bbars + rows, q, n, groups * N, real, real_n, EVEN, WHOLE_N)
    store_tile(bbars + rows, q, n, groups * N, real, real_n, b_sum, EVEN, WHOLE_N)
    c_sum = dot(tl.zeros([Q, STATES], tl.float32), tl.trans(K_high), tl.trans(K_low), b_s, b_low, 2)
    c_sum = c_sum * (K_unit * b_unit)
    c_sum += load_tile(cbars + rows, q, n, groups * N, real, real_n, EVEN, WHOLE_N)
    store_tile(cbars + rows, q, n, groups * N, real, real_n, c_sum, EVEN, WHOLE_N)


INTERPRETED = not isinstance(sums, triton.JITFunction)
"""Whether triton interprets kernels in numpy (TRITON_INTERPRET=1 when it was imported): they then take CPU tensors."""
