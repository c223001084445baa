"""Triton kernels of the delta rule's scan and of its sweep from the end. Importing this module needs triton.

In a chunk of Q steps with keys k_t (the rows of b), Γ[t, s] = ∏_{s<r≤t} a_r is the decay between two steps, Γ_start[t]
the one from the chunk's start through t, Γ_end[t] the one from t, exclusive, to its end, and

    L[t, s] = β_t k_tᵀ Γ[t, s] k_s  for s < t,   T = (I + L)⁻¹.

With the memory H (state, width) before the chunk, u what each step writes (Yang et al. 2024, section 3):

    u = T β x − T β Γ_start k H,   y = Γ_start c H + (c Γ kᵀ) u,   H ← Γ_chunk H + (Γ_end k)ᵀ u.

With the product P of the transitions after the chunk, what is left of its keys has the transposed system:

    left = Tᵀ Γ_end k P,   P ← Γ_chunk P − (β Γ_start k)ᵀ left.

Both have the form u = written + erase H, H ← Γ_chunk H + write u. `solve` makes these matrices for all chunks in
parallel, padded with zeros to whole chunks and tiles; `walk` takes the chunks in order.
"""

import triton
import triton.language as tl

PRECISION = tl.constexpr("tf32x3")
"""Three products of TF32 for one, with errors near float32's: the erased and the written value must cancel."""


@triton.jit(do_not_specialize=["length", "first_chunk", "chunks"])
def solve(
    log_a, beta, b, c, x, erase, write, decay, read, inner, written, length, first_chunk, chunks, heads, groups,
    N: tl.constexpr, STATES: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, FROM_END: tl.constexpr,
):  # fmt: skip
    """Compute the matrices of one chunk and head; program_id(0) runs over (batch, chunks, heads).

    The terms are contiguous, log_a (batch, length, heads, N or 1), x (batch, length, heads, P). Results, for each
    program: erase (Q, STATES), write (STATES, Q), decay (STATES or 1), and for the scan alone read = Γ_start c
    (Q, STATES), inner = c Γ kᵀ (Q, Q) and written (Q, COLUMNS).
    """
    q, n = tl.arange(0, Q), tl.arange(0, STATES)
    own = tl.program_id(0).to(tl.int64)
    head, row = own % heads, own // (heads * chunks)
    step = (first_chunk + own // heads % chunks) * Q + q
    real = step < length
    at = (row * length + step) * heads + head
    b_at = (row * length + step) * groups + head // (heads // groups)

    in_state = n < N
    mask = real[:, None] & in_state[None, :]
    k = tl.load(b + b_at[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
    reader = k
    if not FROM_END:
        reader = tl.load(c + b_at[:, None] * N + n[None, :], mask=mask, other=0.0).to(tl.float32)
    strength = tl.load(beta + at, mask=real, other=0.0)[:, None]
    if BY_STATE:
        left = tl.sum(real.to(tl.int32), axis=0)
        among, within, from_start, to_end, total = decay_by_state(
            log_a + tl.min(at, axis=0) * N + n, heads * N, b + tl.min(b_at, axis=0) * N + n, groups * N,
            k, reader, q, in_state, left,
        )  # fmt: skip
        tl.store(decay + own * STATES + n, total)
    else:
        a = tl.load(log_a + at, mask=real, other=0.0)
        among, within, from_start, to_end, total = decay_by_head(a, k, reader, q)
        tl.store(decay + own, total)
    if FROM_END:
        erasing, writing = to_end * k, -strength * from_start * k
    else:
        erasing, writing = -strength * from_start * k, to_end * k
        tl.store(tile(read + own * Q * STATES, q, n, STATES), from_start * reader)
        tl.store(tile(inner + own * Q * Q, q, q, Q), within)
    tl.store(tile(write + own * Q * STATES, n, q, Q), tl.trans(writing))

    T = inverse(tl.where(q[:, None] > q[None, :], strength * among, 0.0), q)
    if FROM_END:
        T = tl.trans(T)
    tl.store(tile(erase + own * Q * STATES, q, n, STATES), tl.dot(T, erasing, input_precision=PRECISION))
    if not FROM_END:
        for p0 in range(0, COLUMNS, WIDTH):
            p = p0 + tl.arange(0, WIDTH)
            x_t = tl.load(x + at[:, None] * P + p[None, :], mask=real[:, None] & (p < P)[None, :], other=0.0)
            u = tl.dot(T, strength * x_t.to(tl.float32), input_precision=PRECISION)
            tl.store(tile(written + own * Q * COLUMNS, q, p, COLUMNS), u)


@triton.jit(do_not_specialize=["length", "first_chunk", "chunks"])
def walk(
    erase, write, decay, read, inner, written, memory, out, length, first_chunk, chunks, heads,
    N: tl.constexpr, STATES: tl.constexpr, P: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, Q: tl.constexpr,
    BY_STATE: tl.constexpr, FROM_END: tl.constexpr,
):  # fmt: skip
    """Carry a block of the memory's columns through the chunks, from the last to the first if FROM_END.

    program_id(0) runs over (batch, heads), program_id(1) over blocks. `memory` (batch, heads, P, N) is replaced by its
    final value; `out` (batch, length, heads, P) becomes y, or u if FROM_END.
    """
    q, n, p = tl.arange(0, Q), tl.arange(0, STATES), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    own_head = tl.program_id(0).to(tl.int64)
    row, head = own_head // heads, own_head % heads
    memory_at = memory + own_head * P * N + p[None, :] * N + n[:, None]
    in_memory = (n < N)[:, None] & (p < P)[None, :]
    H = tl.load(memory_at, mask=in_memory, other=0.0)
    for i in range(0, chunks):
        chunk = i
        if FROM_END:
            chunk = chunks - 1 - i
        own = (row * chunks + chunk) * heads + head
        erasing = tl.load(tile(erase + own * Q * STATES, q, n, STATES))
        if FROM_END:
            u = tl.dot(erasing, H, input_precision=PRECISION)
            y = u
        else:
            u = tl.load(tile(written + own * Q * COLUMNS, q, p, COLUMNS))
            u = tl.dot(erasing, H, u, input_precision=PRECISION)
            y = tl.dot(tl.load(tile(read + own * Q * STATES, q, n, STATES)), H, input_precision=PRECISION)
            y = tl.dot(tl.load(tile(inner + own * Q * Q, q, q, Q)), u, y, input_precision=PRECISION)
        if BY_STATE:
            H *= tl.load(decay + own * STATES + n)[:, None]
        else:
            H *= tl.load(decay + own)
        H = tl.dot(tl.load(tile(write + own * Q * STATES, n, q, Q)), u, H, input_precision=PRECISION)
        step = (first_chunk + chunk) * Q + q
        out_at = out + ((row * length + step) * heads + head)[:, None] * P + p[None, :]
        tl.store(out_at, y, mask=(step < length)[:, None] & (p < P)[None, :])
    tl.store(memory_at, H, mask=in_memory)


@triton.jit
def tile(at, rows, columns, row_stride):
    """Return addresses of a matrix's rows and columns."""
    return at + rows[:, None] * row_stride + columns[None, :]


@triton.jit
def decay_by_head(a, k, c, q):
    """Return k Γ kᵀ and c Γ kᵀ (Q, Q), zero for s > t; Γ_start and Γ_end (Q, 1); and the decay through the chunk.

    Log-decays `a` (Q) are summed in float64, so that the difference of two large sums keeps the digits of a small one.
    """
    sums = tl.cumsum(a.to(tl.float64), axis=0)
    total = tl.sum(a.to(tl.float64), axis=0)
    causal = q[:, None] >= q[None, :]
    between = tl.where(causal, sums[:, None] - sums[None, :], 0.0).to(tl.float32)
    gamma = tl.where(causal, tl.exp(between), 0.0)
    among = gamma * tl.dot(k, tl.trans(k), input_precision=PRECISION)
    within = gamma * tl.dot(c, tl.trans(k), input_precision=PRECISION)
    from_start, to_end = tl.exp(sums.to(tl.float32)), tl.exp((total - sums).to(tl.float32))
    return among, within, from_start[:, None], to_end[:, None], tl.exp(total.to(tl.float32))


@triton.jit
def decay_by_state(a_at, a_stride, k_at, k_stride, k, c, q, in_state, length):
    """Return `decay_by_head` with a decay per state: Γ_start and Γ_end are (Q, STATES), the chunk's decay (STATES).

    The columns of k Γ kᵀ are summed from the last to the first, so that the log-decays between s and every t grow by
    one step's. No cumulative product is divided by another: where states decay, nothing overflows.
    """
    Q: tl.constexpr = q.shape[0]
    among, within = tl.zeros([Q, Q], tl.float32), tl.zeros([Q, Q], tl.float32)
    between, to_end = tl.zeros_like(k), tl.zeros_like(k)
    after = tl.sum(between, axis=0)
    for i in range(0, Q):
        s = Q - 1 - i
        real = in_state & (s < length)
        a_s = tl.load(a_at + s.to(tl.int64) * a_stride, mask=real, other=0.0)
        k_s = tl.load(k_at + s.to(tl.int64) * k_stride, mask=real, other=0.0).to(tl.float32)
        decayed = tl.exp(between) * k_s[None, :]
        here = q == s
        among = tl.where(here[None, :], tl.sum(k * decayed, axis=1)[:, None], among)
        within = tl.where(here[None, :], tl.sum(c * decayed, axis=1)[:, None], within)
        to_end = tl.where(here[:, None], after[None, :], to_end)
        after += a_s
        between += tl.where((q >= s)[:, None], a_s[None, :], 0.0)
    causal = q[:, None] >= q[None, :]
    return among, tl.where(causal, within, 0.0), tl.exp(between), tl.exp(to_end), tl.exp(after)


@triton.jit
def inverse(L, q):
    """Return (I + L)⁻¹ of L (Q, Q) below the diagonal, from inverses of diagonal blocks of twice the size each time.

    With the inverses A and D of two neighbouring blocks, the corner between them is −D L A. Unlike products of powers
    of L, which are far larger than their sum where keys are alike, every block is bounded as the inverse itself.
    """
    Q: tl.constexpr = q.shape[0]
    t, s = q[:, None], q[None, :]
    T = tl.where(t == s, 1.0, 0.0)
    size = 1
    while size < Q:
        corner = tl.where((t // (2 * size) == s // (2 * size)) & (t // size > s // size), L, 0.0)
        T -= tl.dot(tl.dot(T, corner, input_precision=PRECISION), T, input_precision=PRECISION)
        size *= 2
    return T
