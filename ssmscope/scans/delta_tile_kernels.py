"""Functions of the Triton kernels of the delta rule: its matrices in parts, and what stands within a chunk.

Importing this module needs triton.
"""

import triton
import triton.language as tl

from ssmscope.scans.tile_kernels import dot, in_parts, largest_of, load_tile, one_over, row_units, store_tile, unit_of

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
def flip_rows(a, SCALED: tl.constexpr):
    """The transposed of a matrix in parts with units of its rows."""
    unit = 1.0
    if SCALED:
        unit = tl.trans(a[2])
    return tl.trans(a[0]), tl.trans(a[1]), unit


@triton.jit
def split_rows(a, SCALED: tl.constexpr, TERMS: tl.constexpr):
    """A matrix in parts, and the units of its rows, (rows, 1)."""
    unit = 1.0
    if SCALED:
        unit = row_units(a, True)[:, None]
        a = a * one_over(unit)
    high, low = in_parts(a, SCALED, TERMS)
    return high, low, unit


@triton.jit
def side(at, q, n, step, real, real_n, EVEN: tl.constexpr, WHOLE: tl.constexpr):
    """A side, (Q, N), whose units are among the weights, in one part."""
    tile = load_tile(at, q, n, step, real, real_n, EVEN, WHOLE)
    return tile, tile, 1.0


@triton.jit
def square(at, units, own, q, SCALED: tl.constexpr):
    """A chunk's T or A, (Q, Q), in one part, and its unit."""
    Q: tl.constexpr = q.shape[0]
    tile = load_tile(at + own * Q * Q, q, q, Q, q >= 0, q >= 0, True, True)
    unit = 1.0
    if SCALED:
        unit = tl.load(units + own)
    return tile, tile, unit


@triton.jit
def keep_square(at, units, own, q, a, SCALED: tl.constexpr):
    """Stores what `square` loads."""
    Q: tl.constexpr = q.shape[0]
    parts = split(a, SCALED, 1)
    store_tile(at + own * Q * Q, q, q, Q, q >= 0, q >= 0, parts[0], True, True)
    if SCALED:
        tl.store(units + own, parts[2])


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
    reader, reader_parts, k_flipped, log_a, at, k, k_step, s, q, n, heads, real, real_n,
    N: tl.constexpr, BY_STATE: tl.constexpr, SCALED: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """reader_tᵀ Γ[t, s] k_s for s ≤ t, and 0 above, (Q, Q), of the reader and, transposed, k in parts. Where BY_STATE
    its columns are made from the last to the first, so that the sums of log a from each s on grow by one step's."""
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
        S = product(tl.zeros([Q, Q], tl.float32), reader_parts, k_flipped, SCALED, TERMS) * between(s, q)
    return S


@triton.jit
def inverse(L, q, SCALED: tl.constexpr, TERMS: tl.constexpr):
    """(I + L)⁻¹ of L below the diagonal, (Q, Q): of two blocks on the diagonal whose inverses are known, the corner is
    −D⁻¹ L A⁻¹."""
    Q: tl.constexpr = q.shape[0]
    t, s = q[:, None], q[None, :]
    T = tl.where(t == s, 1.0, tl.where((t // 2 == s // 2) & (t > s), -L, 0.0))
    high, low, unit = split(-L, SCALED, TERMS)
    zero = tl.zeros_like(high)
    size = 2
    while size < Q:
        corner = (t // (2 * size) == s // (2 * size)) & (t // size > s // size)
        parts = split(T, SCALED, TERMS)
        of_corner = (tl.where(corner, high, zero), tl.where(corner, low, zero), unit)
        half = product(tl.zeros([Q, Q], tl.float32), parts, of_corner, SCALED, TERMS)
        T = product(T, split(half, SCALED, TERMS), parts, SCALED, TERMS)
        size *= 2
    return T


@triton.jit
def through(D, own, n, real_n, N: tl.constexpr, BY_STATE: tl.constexpr):
    """What a chunk multiplies states, (N, P), by."""
    if BY_STATE:
        decay = tl.load(D + own * N + n, mask=real_n, other=0.0)[:, None]
    else:
        decay = tl.load(D + own)
    return decay


@triton.jit
def column(heads, P: tl.constexpr, WIDTH: tl.constexpr):
    """The sequence, the head and the first of its columns that this program has."""
    program = tl.program_id(0).to(tl.int64)
    BLOCKS: tl.constexpr = (P + WIDTH - 1) // WIDTH
    return program // (BLOCKS * heads), program // BLOCKS % heads, program % BLOCKS * WIDTH
