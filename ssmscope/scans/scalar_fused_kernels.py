"""The Triton kernels of `scalar_fused`: the scan with one decay per head and its gradient, as products of chunks.

Of a chunk of Q steps, S_t = Σ_{r≤t} log₂ a_r counted from the chunk's start, kept as the sum of two float32
(`sums`), so that a difference of two has all its digits. What lies above the diagonal is a product with 0, of a finite
number. `carry` walks the chunks one after the other, with the state at hand, and gives the outputs, or keeps the state
before each chunk; the kernels of the gradients work on all chunks side by side, each program on one chunk and a part of
the heads of one group, WIDTH of a head's P at a time. Where the input is weighted (WEIGHTED) the state is written
Δ_t x_t, and Δ stands below S. Sums over heads leave a program as its own row of a table that torch adds up: nothing
depends on the order in which programs run.

Matrices are multiplied in parts (`tile_kernels`), those of b, c and the states written in that form once (`parts`,
`carry`). Every step has units of its own, so that what is small is right also beside what is large, and later alone.

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
    load_parts,
    load_tile,
    one_over,
    row_units,
    share_of,
    store_parts,
    store_tile,
    unit_of,
    whole_of,
)

LEAST: tl.constexpr = tl.constexpr(-1e4)
"""Log-decays are at least this, so that the second part of a sum of them is small."""


@triton.jit(do_not_specialize=["length", "chunks"])
def sums(
    log_a, delta, S, length, heads, chunks, a_row, a_step, a_head, d_row, d_step, d_head,
    Q: tl.constexpr, HEADS: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
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
    a = tl.where(a < LEAST, LEAST, a) * tl.full([], 1.4426950408889634, tl.float64)
    s = tl.cumsum(a, axis=0)
    high = s.to(tl.float32)
    PARTS: tl.constexpr = 3 if WEIGHTED else 2
    at = S + (((row * chunks + chunk) * heads + h) * PARTS * Q)[None, :] + q[:, None]
    tl.store(at, high, mask=known)
    low = (s - high.to(tl.float64)).to(tl.float32)
    tl.store(at + Q, tl.where(low == low, low, 0.0), mask=known)  # a NaN stays in the first part alone
    if WEIGHTED:
        d = tl.load(delta + row * d_row + t[:, None] * d_step + h[None, :] * d_head, mask=there, other=0.0)
        tl.store(at + 2 * Q, d.to(tl.float32), mask=known)


@triton.jit(do_not_specialize=["length", "chunks"])
def parts(
    b, c, b_parts, c_parts, units, inner, length, groups, chunks, b_row, b_step, b_group, c_row, c_step, c_group,
    N: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr,
    INNER: tl.constexpr,
):  # fmt: skip
    """b and c in parts (batch, chunks, groups, TERMS, Q, N), 0 past the end, their `units` (batch, chunks, groups, 2,
    Q), and with INNER `inner` (batch, chunks, groups, Q, Q), c_t · b_s for s ≤ t. A program has a chunk of a group."""
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
    b_t, c_t = b_t.to(tl.float32), c_t.to(tl.float32)
    b_unit, c_unit = row_units(b_t, SCALED), row_units(c_t, SCALED)
    b_high, b_low = in_parts(b_t * one_over(b_unit)[:, None], SCALED, TERMS)
    c_high, c_low = in_parts(c_t * one_over(c_unit)[:, None], SCALED, TERMS)
    own = program * TERMS * Q * N
    store_parts(b_parts + own, q, n, real, real_n, b_high, b_low, N, Q * N, True, WHOLE_N, TERMS)
    store_parts(c_parts + own, q, n, real, real_n, c_high, c_low, N, Q * N, True, WHOLE_N, TERMS)
    tl.store(units + program * 2 * Q + q, b_unit)
    tl.store(units + (program * 2 + 1) * Q + q, c_unit)
    if INNER:
        bc = dot(tl.zeros([Q, Q], tl.float32), c_high, c_low, tl.trans(b_high), tl.trans(b_low), TERMS)
        bc = tl.where(q[:, None] >= q[None, :], bc * c_unit[:, None] * b_unit[None, :], 0.0)
        tl.store(inner + program * Q * Q + q[:, None] * Q + q[None, :], bc)


@triton.jit(do_not_specialize=["batch", "length", "chunks", "span", "segments"])
def carry(
    S, left, right, units, c, inner, D, first, finals, ends, out, state_units, left_units,
    before_units, met, last, batch, length, heads, groups, chunks, span, segments, left_row, left_step, left_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    WEIGHTED: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr, REVERSE: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, READ: tl.constexpr, SKIP: tl.constexpr, PASS: tl.constexpr,
    STAGES: tl.constexpr, BARRIER: tl.constexpr,
):  # fmt: skip
    """The state (P, N) after the last chunk, `last` (batch, heads, P, N), of H ← a_Q H + Σ_s (a_Q / a_s) Δ_s left_s
    right_sᵀ, a_t = 2^{S_t}, if LAST; from `first`, with FIRST, or 0. `left` is x and `right` b in parts. With READ
    `out` is y (batch, length, heads, P),

        y_t = Σ_{s≤t} (a_t / a_s) Δ_s inner[t, s] x_s + a_t H c_t, with SKIP + D x_t;

    without, the state before every chunk in parts, (batch, chunks, heads, TERMS, P, N), with `state_units` (batch,
    chunks, heads, P blocks) and the units of `left`, `left_units` (batch, chunks, heads, P blocks, Q).

    With REVERSE the adjoint after every chunk, and before the first, with `left` ȳ and `right` c, from the last chunk
    to the first: Λ ← a_Q Λ + Σ_t a_t ȳ_t c_tᵀ. It takes the place in `out` of the state H before the chunk, over
    `before_units`, of which `met` (batch, chunks, heads, P blocks, N blocks) keeps a_Q ⟨Λ, H⟩.

    A program has WIDTH by STATES numbers of one head of one sequence, and `span` chunks of it. Where there are several
    `segments`, PASS 1 walks all but the last of these from 0 and gives only where each ends, `finals` (segments - 1,
    batch, heads, P, N) and `ends`, log₂ of its decay and a bound of |finals|; PASS 2 starts from these.
    """
    program = tl.program_id(0).to(tl.int64)
    P_BLOCKS: tl.constexpr = (P + WIDTH - 1) // WIDTH
    N_BLOCKS: tl.constexpr = (N + STATES - 1) // STATES
    PARTS: tl.constexpr = 3 if WEIGHTED else 2
    n_block, p_block = program % N_BLOCKS, program // N_BLOCKS % P_BLOCKS
    n0, p0 = n_block * STATES, p_block * WIDTH
    rest = program // (N_BLOCKS * P_BLOCKS)
    head, row, segment = rest % heads, rest // heads % batch, rest // (heads * batch)
    group = head // (heads // groups)
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    wide, real_n = p < P - p0, n < N - n0
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    WHOLE_N: tl.constexpr = N % STATES == 0
    matrix = p0 * N + n0
    whole = (row * heads + head) * P * N + matrix
    left_at = left + row * left_row + head * left_head + p0
    bound = tl.full([], 0.0, tl.float32)
    passed = tl.full([], 0.0, tl.float32)
    H = tl.zeros([WIDTH, STATES], tl.float32)
    if FIRST:
        if segment == 0:
            H = load_tile(first + whole, p, n, N, wide, real_n, WHOLE_P, WHOLE_N).to(tl.float32)
            for i in range(0, N, STATES):  # that of all n, as every program of this head has it
                one = load_tile(first + whole - n0 + i, p, n, N, wide, n < N - i, WHOLE_P, WHOLE_N)
                bound = tl.maximum(bound, largest_of(one.to(tl.float32)))
    if PASS == 2:
        for i in range(0, segment):
            one = (i * batch + row) * heads + head
            end = ends + (one * P_BLOCKS + p_block) * 2
            decay = tl.exp2(tl.load(end))
            bound = decay * bound + tl.load(end + 1)
            final = load_tile(finals + one * P * N + matrix, p, n, N, wide, real_n, WHOLE_P, WHOLE_N)
            H = decay * H + final
    for i in tl.range(segment * span, tl.minimum((segment + 1) * span, chunks), num_stages=STAGES):
        k = i
        if REVERSE:
            k = chunks - 1 - i
        at = (row * chunks + k) * heads + head
        S_at = S + at * (PARTS * Q)
        high, low = tl.load(S_at + q), tl.load(S_at + Q + q)
        high_end, low_end = tl.load(S_at + Q - 1), tl.load(S_at + 2 * Q - 1)
        real = q < length - k * Q
        start = (row * 0 + k) * Q  # in 64 bits
        left_t = load_tile(left_at + start * left_step, q, p, left_step, real, wide, EVEN, WHOLE_P).to(tl.float32)
        shared = (row * chunks + k) * groups + group
        largest = tl.max(tl.abs(left_t), axis=1)
        left_unit = unit_of(largest, SCALED)
        decay = decay_of(high_end, low_end)
        if REVERSE:
            weight = decay_of(high, low)
        else:
            weight = decay_of(high_end - high, low_end - low)
            if WEIGHTED:
                weight *= tl.load(S_at + 2 * Q + q)
        weight *= tl.load(units + (shared * 2 + (1 if REVERSE else 0)) * Q + q)
        if PASS != 1:
            unit = unit_of(bound, SCALED)
            if READ:
                L = tl.load(inner + shared * Q * Q + q[:, None] * Q + q[None, :])
                written = tl.exp2(-low) * left_unit
                if WEIGHTED:
                    written *= tl.load(S_at + 2 * Q + q)
                L = L * between(high[:, None], high[None, :]) * written[None, :]
                if SKIP:
                    own = tl.exp2(-low) * left_unit * tl.load(D + head).to(tl.float32)
                    L += tl.where(q[:, None] == q[None, :], own[None, :], 0.0)
                L_unit = row_units(L, SCALED)
                L_high, L_low = in_parts(L * one_over(L_unit)[:, None], SCALED, TERMS)
                x_high, x_low = in_parts(left_t * one_over(left_unit)[:, None], SCALED, TERMS)
                y = dot(tl.zeros([Q, WIDTH], tl.float32), L_high, L_low, x_high, x_low, TERMS)
                y = y * (tl.exp2(low) * L_unit)[:, None]
                if BARRIER:
                    tl.debug_barrier()  # what is loaded below finds room only now
                c_at = c + shared * TERMS * Q * N
                c_t, c_low = load_parts(c_at, q, n, real, real_n, N, Q * N, True, WHOLE_N, TERMS)
                kept_high, kept_low = in_parts(H * one_over(unit), SCALED, TERMS)
                read = dot(tl.zeros([Q, WIDTH], tl.float32), c_t, c_low, tl.trans(kept_high), tl.trans(kept_low), TERMS)
                y += read * (decay_of(high, low) * (unit * tl.load(units + (shared * 2 + 1) * Q + q)))[:, None]
                y_at = out + ((row * length + start) * heads + head) * P + p0
                store_tile(y_at, q, p, heads * P, real, wide, y, EVEN, WHOLE_P)
                if BARRIER:
                    tl.debug_barrier()
                    left_t = load_tile(left_at + start * left_step, q, p, left_step, real, wide, EVEN, WHOLE_P)
                    left_t = left_t.to(tl.float32)
            else:
                kept_high, kept_low = in_parts(H * one_over(unit), SCALED, TERMS)
                own = at * P_BLOCKS + p_block
                kept_at = out + at * TERMS * P * N + matrix
                if REVERSE:
                    before, before_low = load_parts(kept_at, p, n, wide, real_n, N, P * N, WHOLE_P, WHOLE_N, TERMS)
                    both = tl.sum(tl.sum(whole_of(before, before_low, TERMS) * H, axis=1), axis=0)
                    tl.store(met + own * N_BLOCKS + n_block, both * tl.load(before_units + own) * decay)
                    if BARRIER:
                        tl.debug_barrier()  # all have read what is now written over
                store_parts(kept_at, p, n, wide, real_n, kept_high, kept_low, N, P * N, WHOLE_P, WHOLE_N, TERMS)
                tl.store(state_units + own, unit)
                tl.store(left_units + own * Q + q, left_unit)
        right_at = right + shared * TERMS * Q * N + n0
        right_t, right_low = load_parts(right_at, q, n, real, real_n, N, Q * N, True, WHOLE_N, TERMS)
        # finite over it also where all is 0: weights of trained models are above 8, and one over the smallest unit 2¹²⁵
        scale = unit_of(tl.max(tl.maximum(largest, 7.888609052210118e-31) * tl.abs(weight), axis=0), SCALED)  # 2⁻¹⁰⁰
        left_high, left_low = in_parts(left_t * (weight * one_over(scale))[:, None], SCALED, TERMS)
        added = dot(
            tl.zeros([WIDTH, STATES], tl.float32), tl.trans(left_high), tl.trans(left_low), right_t, right_low, TERMS
        )
        H = decay * H + added * scale
        bound = decay * bound + scale * (Q * 1073741824.0)
        passed += high_end + low_end
    if PASS == 1:
        one = (segment * batch + row) * heads + head
        store_tile(finals + one * P * N + matrix, p, n, N, wide, real_n, H, WHOLE_P, WHOLE_N)
        tl.store(ends + (one * P_BLOCKS + p_block) * 2, passed)
        tl.store(ends + (one * P_BLOCKS + p_block) * 2 + 1, bound)
    elif LAST:
        if segment == segments - 1:
            store_tile(last + whole, p, n, N, wide, real_n, H, WHOLE_P, WHOLE_N)


@triton.jit(do_not_specialize=["batch", "length", "chunks", "blocks"])
def back_states(
    S, left, right, units, states, state_units, left_units, was_read, gained,
    batch, length, heads, groups, chunks, blocks, left_row, left_step, left_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    WEIGHTED: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr, REVERSE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Of every chunk the gradient of c by the state H before it, c̄_t = a_t Hᵀ ȳ_t, summed over a program's heads, its
    row of `gained` (blocks, batch, length, groups, N), and what it is of log a, `was_read`, c̄_t · c_t of every head
    (batch, chunks, heads, parts, Q); `left` is ȳ and `right` c in parts.

    With REVERSE the gradient of b by the adjoint Λ after the chunk, b̄_s = (a_Q / a_s) Δ_s Λᵀ x_s; `left` is x, over the
    `left_units` that `carry` kept.
    """
    WIDE: tl.constexpr = (P + WIDTH - 1) // WIDTH
    PARTS: tl.constexpr = 3 if WEIGHTED else 2
    WHOLE_P: tl.constexpr = P % WIDTH == 0
    WHOLE_N: tl.constexpr = N == STATES
    row, chunk, group, block, begin, end = share_of(heads, groups, chunks, blocks, WIDE)
    q, p, n = tl.arange(0, Q), tl.arange(0, WIDTH), tl.arange(0, STATES)
    start = chunk * Q
    real, real_n = q < length - start, n < N
    if not REVERSE:
        shared = (row * chunks + chunk) * groups + group
        c_at = right + shared * TERMS * Q * N
        c_t, c_low = load_parts(c_at, q, n, real, real_n, N, Q * N, True, WHOLE_N, TERMS)
        c_t = whole_of(c_t, c_low, TERMS)
        c_unit = tl.load(units + (shared * 2 + 1) * Q + q)
    at = (row * chunks + chunk) * heads
    total = tl.zeros([Q, STATES], tl.float32)
    for part in tl.range(begin, end, num_stages=STAGES):
        head, p0 = part // WIDE, (part % WIDE) * WIDTH
        wide = p < P - p0
        own = at * WIDE + part
        S_at = S + (at + head) * (PARTS * Q)
        high, low = tl.load(S_at + q), tl.load(S_at + Q + q)
        if REVERSE:
            weight = decay_of(tl.load(S_at + Q - 1) - high, tl.load(S_at + 2 * Q - 1) - low)
            if WEIGHTED:
                weight *= tl.load(S_at + 2 * Q + q)
        else:
            weight = decay_of(high, low)
        H_at = states + ((at + head) * TERMS * P + p0) * N
        H, H_low = load_parts(H_at, p, n, wide, real_n, N, P * N, WHOLE_P, WHOLE_N, TERMS)
        left_at = left + row * left_row + head * left_head + start * left_step + p0
        left_t = load_tile(left_at, q, p, left_step, real, wide, EVEN, WHOLE_P).to(tl.float32)
        if REVERSE:
            left_unit = tl.load(left_units + own * Q + q)
        else:
            left_unit = row_units(left_t, SCALED)
        left_t, left_low = in_parts(left_t * one_over(left_unit)[:, None], SCALED, TERMS)
        one = dot(tl.zeros([Q, STATES], tl.float32), left_t, left_low, H, H_low, TERMS)
        one = one * (weight * left_unit * tl.load(state_units + own))[:, None]
        if not REVERSE:
            tl.store(was_read + own * Q + q, tl.sum(one * c_t, axis=1) * c_unit)
        total += one
    rows = gained + (((block * batch + row) * length + start) * groups + group) * N
    store_tile(rows, q, n, groups * N, real, real_n, total, EVEN, WHOLE_N)


@triton.jit
def _later(K, until, TERMS: tl.constexpr):
    """Σ_{t≥r} K[s, t] at [s, r]; K in TERMS + 1 numbers of 8 bits, `until` 1 at [t, r] for t ≥ r."""
    R = tl.zeros([K.shape[0], K.shape[1]], tl.float32)
    for _ in tl.static_range(TERMS):
        first = (K.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        R = tl.dot(bf16(first), until, R)
        K = K - first
    return tl.dot(bf16(K), until, R)


@triton.jit(do_not_specialize=["batch", "length", "chunks", "blocks"])
def back(
    S, x, b, c, ybar, units, adjoints, adjoint_units, x_units, ybar_units, was_read, met, D,
    abar, deltabar, xbar, bbars, cbars, Dbars, batch, length, heads, groups, chunks, blocks, x_row, x_step, x_head,
    ybar_row, ybar_step, ybar_head, xbar_row, xbar_step, xbar_head,
    P: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, STATES: tl.constexpr, Q: tl.constexpr,
    WEIGHTED: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr, N_BLOCKS: tl.constexpr,
    SKIP: tl.constexpr, STAGES: tl.constexpr, BARRIER: tl.constexpr,
):  # fmt: skip
    """Of every chunk the other gradients, and what its own steps add to those of b and c, with L[t, s] = a_t / a_s for
    s ≤ t:

    x̄_s = Δ_s Σ_t L[t, s] (c_t · b_s) ȳ_t + Δ_s (a_Q / a_s) Λ b_s, the same without Δ_s times x_s for Δ, b̄_s += Σ_t
    K[t, s] c_t and c̄_t += Σ_s K[t, s] b_s of K[t, s] = L[t, s] Δ_s (ȳ_t · x_s), summed over heads first.

    The gradient of log a_r is what passes through step r: what is written at s < r or before the chunk, and read at
    t ≥ r or after it, Σ_{s<r≤t} K[t, s] (c_t · b_s) + Σ_{t≥r} `was_read`_t + Σ_{s<r} written_s + `met`. A sum without
    differences: however small it is, its digits are right. `abar` and `deltabar` (batch, chunks, heads, parts, Q).
    Matrices of two steps stand here as [s, t]. With SKIP x̄_t += D ȳ_t, and `Dbars` (batch, chunks, heads, parts) are
    the parts of the gradient of D, Σ_t ȳ_t · x_t.
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
    b_at, c_at = b + shared * TERMS * Q * N, c + shared * TERMS * Q * N
    b_s, b_low = load_parts(b_at, q, n, real, real_n, N, Q * N, True, WHOLE_N, TERMS)
    c_t, c_low = load_parts(c_at, q, n, real, real_n, N, Q * N, True, WHOLE_N, TERMS)
    b_unit, c_unit = tl.load(units + shared * 2 * Q + q), tl.load(units + (shared * 2 + 1) * Q + q)
    bc = dot(tl.zeros([Q, Q], tl.float32), b_s, b_low, tl.trans(c_t), tl.trans(c_low), TERMS)
    bc = bc * b_unit[:, None] * c_unit[None, :]
    at = (row * chunks + chunk) * heads
    K_sum = tl.zeros([Q, Q], tl.float32)
    for part in tl.range(begin, end, num_stages=STAGES):
        head, p0 = part // WIDE, (part % WIDE) * WIDTH
        wide = p < P - p0
        own = at * WIDE + part
        S_at = S + (at + head) * (PARTS * Q)
        high, low = tl.load(S_at + q), tl.load(S_at + Q + q)
        high_end, low_end = tl.load(S_at + Q - 1), tl.load(S_at + 2 * Q - 1)
        ybar_at = ybar + row * ybar_row + head * ybar_head + start * ybar_step + p0
        ybar_t = load_tile(ybar_at, q, p, ybar_step, real, wide, EVEN, WHOLE_P).to(tl.float32)
        x_unit, ybar_unit = tl.load(x_units + own * Q + q), tl.load(ybar_units + own * Q + q)
        ybar_t, ybar_low = in_parts(ybar_t * one_over(ybar_unit)[:, None], SCALED, TERMS)
        s_weight, d = tl.exp2(-low), tl.full([Q], 1.0, tl.float32)
        if WEIGHTED:
            d = tl.load(S_at + 2 * Q + q)
        L = between(high[None, :], high[:, None]) * (tl.exp2(low) * ybar_unit)[None, :]
        Lbc = tl.where(later, L * bc, 0.0) * d[:, None]
        if SKIP:
            skipped = tl.exp2(low) * ybar_unit * tl.load(D + head).to(tl.float32)
            Lbc += tl.where(q[:, None] == q[None, :], skipped[:, None], 0.0)
        unit = row_units(Lbc, SCALED)
        L_high, L_low = in_parts(Lbc * one_over(unit)[:, None], SCALED, TERMS)
        out = dot(tl.zeros([Q, WIDTH], tl.float32), L_high, L_low, ybar_t, ybar_low, TERMS)
        out = out * (s_weight * unit)[:, None]
        adjoints_at = adjoints + ((at + head) * TERMS * P + p0) * N
        adjoint, adjoint_low = load_parts(adjoints_at, p, n, wide, real_n, N, P * N, WHOLE_P, WHOLE_N, TERMS)
        across = dot(tl.zeros([Q, WIDTH], tl.float32), b_s, b_low, tl.trans(adjoint), tl.trans(adjoint_low), TERMS)
        weight = decay_of(high_end - high, low_end - low) * (b_unit * tl.load(adjoint_units + own))
        across = across * weight[:, None]
        xbar_at = xbar + row * xbar_row + head * xbar_head + start * xbar_step + p0
        store_tile(xbar_at, q, p, xbar_step, real, wide, out + across * d[:, None], EVEN, WHOLE_P)
        x_at = x + row * x_row + head * x_head + start * x_step + p0
        x_s = load_tile(x_at, q, p, x_step, real, wide, EVEN, WHOLE_P).to(tl.float32)
        written = tl.sum(across * x_s, axis=1)
        if BARRIER:
            tl.debug_barrier()  # what stands above need no longer be held
        x_high, x_low = in_parts(x_s * one_over(x_unit)[:, None], SCALED, TERMS)
        K = dot(tl.zeros([Q, Q], tl.float32), x_high, x_low, tl.trans(ybar_t), tl.trans(ybar_low), TERMS)
        if SKIP:
            each = tl.sum(tl.where(q[:, None] == q[None, :], K, 0.0), axis=1) * x_unit * ybar_unit
            tl.store(Dbars + own, tl.sum(each, axis=0))
        K = tl.where(later, L * K, 0.0) * (s_weight * x_unit)[:, None]
        if WEIGHTED:
            tl.store(deltabar + own * Q + q, tl.sum(K * bc, axis=1) + written)
            written = written * d
            K = K * d[:, None]
        K_sum += K
        passing = _later(K * bc, until, TERMS)
        through = tl.sum(tl.where(earlier, passing + written[:, None], 0.0), axis=0)
        through += tl.cumsum(tl.load(was_read + own * Q + q), axis=0, reverse=True)
        for i in tl.static_range(N_BLOCKS):
            through += tl.load(met + own * N_BLOCKS + i)
        tl.store(abar + own * Q + q, through)
    rows = (((block * batch + row) * length + start) * groups + group) * N
    c_t, c_low = load_parts(c_at, q, n, real, real_n, N, Q * N, True, WHOLE_N, TERMS)  # anew: held, they cost room
    K = K_sum * c_unit[None, :]
    unit = row_units(K, SCALED)
    K_high, K_low = in_parts(K * one_over(unit)[:, None], SCALED, TERMS)
    b_sum = dot(tl.zeros([Q, STATES], tl.float32), K_high, K_low, c_t, c_low, TERMS) * unit[:, None]
    b_sum += load_tile(bbars + rows, q, n, groups * N, real, real_n, EVEN, WHOLE_N)
    store_tile(bbars + rows, q, n, groups * N, real, real_n, b_sum, EVEN, WHOLE_N)
    K = tl.trans(K_sum * b_unit[:, None])
    unit = row_units(K, SCALED)
    K_high, K_low = in_parts(K * one_over(unit)[:, None], SCALED, TERMS)
    c_sum = dot(tl.zeros([Q, STATES], tl.float32), K_high, K_low, b_s, b_low, TERMS) * unit[:, None]
    c_sum += load_tile(cbars + rows, q, n, groups * N, real, real_n, EVEN, WHOLE_N)
    store_tile(cbars + rows, q, n, groups * N, real, real_n, c_sum, EVEN, WHOLE_N)


INTERPRETED = not isinstance(sums, triton.JITFunction)
"""Whether triton interprets kernels in numpy (TRITON_INTERPRET=1 when it was imported): they then take CPU tensors."""
