"""Functions of the Triton kernels of `scalar_fused`: tiles in memory, and products of matrices in 16 bits.

With SCALED a matrix is held in float16, in TERMS parts of 11 bits each, over its unit: a power of two by which no
number of it reaches 2¹⁵. What is smaller than 2⁻¹⁷ of that loses digits of the second part, and what is smaller than
2⁻³⁹ is 0. Without SCALED it is held in bfloat16, as it is.

Importing this module needs triton.
"""

import triton
import triton.language as tl

INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether triton interprets kernels in numpy (TRITON_INTERPRET=1 when it was imported): they then take CPU tensors."""


@triton.jit
def bf16(a):
    a = a.to(tl.bfloat16)
    if INTERPRETED:  # the interpreter multiplies bfloat16 by their bits
        a = a.to(tl.float32)
    return a


@triton.jit
def unit_of(most):
    """The unit of numbers whose magnitude is at most this: in it, they are below 2¹⁵."""
    exponent = (most.to(tl.int32, bitcast=True) >> 23) & 255
    return ((tl.minimum(tl.maximum(exponent, 16), 240) - 14) << 23).to(tl.float32, bitcast=True)


@triton.jit
def unit_of_product(most, factor):
    """The unit of numbers of at most `most` times those of at most `factor`, which are finite over it also where `most`
    is 0."""
    return unit_of(tl.maximum(most, 7.888609052210118e-31) * factor)  # 2⁻¹⁰⁰


@triton.jit
def one_over(unit):
    """1 / unit, exactly."""
    return ((254 << 23) - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def largest_of(a):
    return tl.max(tl.max(tl.abs(a), axis=1), axis=0)


@triton.jit
def in_parts(a, SCALED: tl.constexpr, TERMS: tl.constexpr):
    """The first and the second part of a matrix over its unit; the second is the first where TERMS is 1."""
    if SCALED:
        high = a.to(tl.float16)
        low = high
        if TERMS == 2:
            low = (a - high.to(tl.float32)).to(tl.float16)
    else:
        high = bf16(a)
        low = high
    return high, low


@triton.jit
def dot(acc, a, a_low, b, b_low, TERMS: tl.constexpr):
    """acc + a b, of matrices in parts."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    if TERMS == 2:
        if INTERPRETED:
            a_low, b_low = a_low.to(tl.float32), b_low.to(tl.float32)
        acc = tl.dot(a_low, b, acc, input_precision="ieee")
        acc = tl.dot(a, b_low, acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def decay_of(high, low):
    """2 to the power of high + low."""
    return tl.exp2(high + low)


@triton.jit
def between(high_t, high_s):
    """2 to the power of S_t - S_s, whose second parts the caller puts in; finite also where s > t or it is NaN."""
    s = high_t - high_s
    if INTERPRETED:  # its minimum would be the NaN
        s = tl.where(s == s, s, 126.0)
    return tl.exp2(tl.minimum(s, 126.0))


@triton.jit
def load_tile(at, rows, columns, step, real, valid, EVEN: tl.constexpr, WHOLE: tl.constexpr):
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
def store_tile(at, rows, columns, step, real, valid, tile, EVEN: tl.constexpr, WHOLE: tl.constexpr):
    """Stores what `load_tile` loads."""
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
def share_of(heads, groups, chunks, blocks, WIDE: tl.constexpr):
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
