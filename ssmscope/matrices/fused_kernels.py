"""The Triton kernels of `fused`: the mean implicit attention of a layer with a decay per state, as matrix products.

With S_t the sum of Δ_r over r ≤ t, a decay between s < t is exp(A (S_t − S_s)) = exp(A (S_t − S_p)) exp(A (S_p − S_s))
for a pivot p in s ≤ p ≤ t: two factors, neither above 1 where states decay, so that nothing overflows and what
underflows is 0 in the product as well. A block of rows below a block of columns has its pivot right before the rows;
the mean over channels and states is then one matrix product over pairs (channel, state), whose operands are made in
registers. `tiles` makes the square tiles below the diagonal so, and `levels`, within those on it, the lower left
quarter of every square of 16 rows, of 32, and so on. What remains are triangles of 8 rows, whose pairs `near` makes
one by one. `gather` adds up what several programs have summed over their share of the channels, in a fixed order:
nothing depends on the order in which programs run.

Operands are of float16, in one part or two (`tile_kernels`), over powers of two: those of a tile's rows and columns
come from `bounds`, as far as the slowest states have decayed there.

Sums of Δ come from `sums` and `starts`: within a tile in both directions, exact to float32 however large the sum before
it, and in float64 over the tiles, so that a sum over any stretch of tiles is a difference.

Importing this module needs triton.
"""

import triton
import triton.language as tl

from ssmscope.matrices.fused_diagonal_kernels import HIDDEN, LEAST, channels_of, levels, near
from ssmscope.scans.tile_kernels import INTERPRETED, dot, in_parts

__all__ = ["INTERPRETED", "bounds", "gather", "levels", "near", "starts", "sums", "tiles"]


@triton.jit
def sums(
    delta,
    right,
    since,
    rest,
    until,
    written,
    totals,
    length,
    heads,
    delta_row,
    delta_step,
    delta_head,
    right_row,
    right_step,
    right_head,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """Within tiles of BLOCK steps, (batch, length, heads): Σ Δ from the tile's start up to t in two parts, `since` and
    `rest`, and `until`, Σ Δ after s up to its end; `totals` (batch, tiles, heads) in float64; `written` is right ⊙ Δ,
    or Δ."""
    row, block = tl.program_id(2).to(tl.int64), tl.program_id(0)
    t = block * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (t < length)[:, None] & (d < heads)[None, :]
    step = tl.load(delta + row * delta_row + t[:, None] * delta_step + d[None, :] * delta_head, mask=inside, other=0.0)
    exact = step.to(tl.float64)
    total = tl.sum(exact, axis=0)
    up = tl.cumsum(exact, axis=0)
    high = up.to(tl.float32)
    place = row * length * heads + t[:, None] * heads + d[None, :]
    tl.store(since + place, high, mask=inside)
    tl.store(rest + place, (up - high.to(tl.float64)).to(tl.float32), mask=inside)
    tl.store(until + place, (total[None, :] - up).to(tl.float32), mask=inside)
    tl.store(totals + (row * tl.num_programs(0) + block) * heads + d, total, mask=d < heads)
    if RIGHT:
        step *= tl.load(
            right + row * right_row + t[:, None] * right_step + d[None, :] * right_head, mask=inside, other=0.0
        )
    tl.store(written + place, step, mask=inside)


@triton.jit
def starts(totals, before, blocks, heads, STEP: tl.constexpr, CHANNELS: tl.constexpr):
    """`before` (batch, blocks + 1, heads): the sums of `totals` (batch, blocks, heads) before each block, float64."""
    row = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    totals += row * blocks * heads
    before += row * (blocks + 1) * heads
    carried = tl.zeros([CHANNELS], tl.float64)
    tl.store(before + d, carried, mask=d < heads)
    for first in range(0, blocks, STEP):
        i = first + tl.arange(0, STEP)
        inside = (i < blocks)[:, None] & (d < heads)[None, :]
        place = i[:, None] * heads + d[None, :]
        own = tl.load(totals + place, mask=inside, other=0.0)
        tl.store(before + heads + place, carried[None, :] + tl.cumsum(own, axis=0), mask=inside)
        carried += tl.sum(own, axis=0)


@triton.jit
def _lowest(bits):
    """The number of the lowest bit that is set, of 31, and 0 where there is none."""
    low = (bits & -bits).to(tl.float32).to(tl.int32, bitcast=True)
    return tl.maximum((low >> 23) - 127, 0)


@triton.jit
def _place(pair, tiles):
    """The row and the column of a tile below the diagonal, in the order of their distance from it, the farthest
    first."""
    line = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    line = tl.where(line * (line + 1) // 2 > pair, line - 1, line)
    line = tl.where((line + 1) * (line + 2) // 2 <= pair, line + 1, line)
    j = pair - line * (line + 1) // 2
    return j + tiles - 1 - line, j


@triton.jit
def _vector_bound(v, step, group_step, state_step, t, inside, first, last, N: tl.constexpr, ROWS: tl.constexpr):
    """The largest |v_tn| over the states and the groups from `first` to `last`."""
    most = tl.zeros([ROWS], tl.float32)
    for bc_group in range(first, last + 1):
        for n in range(N):
            v_n = tl.load(v + t * step + bc_group * group_step + n * state_step, mask=inside, other=0.0)
            most = tl.maximum(most, tl.abs(v_n))
    return most


@triton.jit
def _exponent(most, share):
    """The power of two by which numbers of at most `most` times 2^`share` stay below 2^15."""
    return tl.minimum(tl.maximum(tl.ceil(tl.log2(most) + tl.maximum(share, LEAST)) - 14.0, -110.0), 110.0)


@triton.jit
def bounds(
    since,
    until,
    written,
    before,
    slowest,
    b,
    c,
    left,
    units,
    gaps,
    length,
    heads,
    groups,
    width,
    bc_width,
    tiles,
    b_row,
    b_step,
    b_group,
    b_state,
    c_row,
    c_step,
    c_group,
    c_state,
    left_row,
    left_step,
    left_head,
    N: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BD: tl.constexpr,
    LEFT: tl.constexpr,
):
    """`units` (matrices, 2, length): the binary exponents of what a tile's rows and its columns are held over. `gaps`
    (matrices, tiles below the diagonal): how far the slowest state has decayed between the tiles, in powers of two.
    `slowest` (heads) holds the largest A / log 2 of a channel."""
    program, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, group = matrix // groups, (matrix % groups).to(tl.int32)
    blocks = tl.cdiv(length, ROWS)
    own = tl.arange(0, BD)
    if program < blocks:
        t = program * ROWS + tl.arange(0, ROWS)
        t_in = t < length
        read = tl.full([ROWS], float("-inf"), tl.float32)
        wrote = tl.full([ROWS], float("-inf"), tl.float32)
        since += row * length * heads
        until += row * length * heads
        written += row * length * heads
        for first in range(0, width, BD):
            d = group * width + first + own
            inside = t_in[:, None] & (first + own < width)[None, :]
            place = t[:, None] * heads + d[None, :]
            A_d = tl.load(slowest + d, mask=first + own < width, other=0.0)[None, :]
            decayed = tl.load(since + place, mask=inside, other=0.0) * A_d
            if LEFT:
                gate = left + row * left_row + t[:, None] * left_step + d[None, :] * left_head
                decayed += tl.log2(tl.abs(tl.load(gate, mask=inside, other=0.0)))
            read = tl.maximum(read, tl.max(tl.where(inside, decayed, float("-inf")), axis=1))
            decayed = tl.load(until + place, mask=inside, other=0.0) * A_d
            decayed += tl.log2(tl.abs(tl.load(written + place, mask=inside, other=0.0)))
            wrote = tl.maximum(wrote, tl.max(tl.where(inside, decayed, float("-inf")), axis=1))
        bc_first, bc_last = group * width // bc_width, (group * width + width - 1) // bc_width
        most = _vector_bound(c + row * c_row, c_step, c_group, c_state, t, t_in, bc_first, bc_last, N, ROWS)
        tl.store(units + matrix * 2 * length + t, _exponent(most, read), mask=t_in)
        most = _vector_bound(b + row * b_row, b_step, b_group, b_state, t, t_in, bc_first, bc_last, N, ROWS)
        tl.store(units + (matrix * 2 + 1) * length + t, _exponent(most, wrote), mask=t_in)
    else:
        pair = program - blocks
        i, j = _place(pair, tiles)
        before += row * (tiles + 1) * heads
        slow = tl.full([BD], float("-inf"), tl.float32)
        for first in range(0, width, BD):
            channel = group * width + first + own
            real = first + own < width
            gap = tl.load(before + i * heads + channel, mask=real, other=0.0)
            gap = (gap - tl.load(before + (j + 1) * heads + channel, mask=real, other=0.0)).to(tl.float32)
            decayed = gap * tl.load(slowest + channel, mask=real, other=0.0)
            decayed = tl.where(decayed == decayed, decayed, 0.0)  # a NaN lives
            slow = tl.maximum(slow, tl.where(real, decayed, float("-inf")))
        nearest = tl.minimum(tl.maximum(tl.max(slow, axis=0), -126.0), 126.0)
        tl.store(gaps + matrix * (tiles * (tiles - 1) // 2) + pair, nearest)


@triton.jit
def tiles(
    since,
    until,
    written,
    before,
    A,
    b,
    c,
    left,
    units,
    gaps,
    target,
    split_step,
    matrix_step,
    length,
    heads,
    groups,
    width,
    bc_width,
    segment,
    chunks,
    splits,
    scale,
    b_row,
    b_step,
    b_group,
    b_state,
    c_row,
    c_step,
    c_group,
    c_state,
    left_row,
    left_step,
    left_head,
    N: tl.constexpr,
    STATES: tl.constexpr,
    TILE: tl.constexpr,
    BD: tl.constexpr,
    PACKED: tl.constexpr,
    LEFT: tl.constexpr,
    TERMS: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """Tiles below the diagonal, `scale` times the sum over a share of the channels, in place or, PACKED, a tile after
    the other.

    `A` (N, heads) holds A / log 2. A state that has decayed below 2^FLOOR in all of a chunk's channels before the tile
    begins is left out: its factors are 0.
    """
    program = tl.program_id(0)
    split, matrix = program % splits, tl.program_id(1).to(tl.int64)
    row, group = matrix // groups, (matrix % groups).to(tl.int32)
    # those near the diagonal first, since they have most to do
    pair = tl.num_programs(0) // splits - 1 - program // splits
    count = tl.cdiv(length, TILE)
    i, j = _place(pair, count)
    t, s = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    t_in, s_in = t < length, s < length
    t_unit = tl.load(units + matrix * 2 * length + t, mask=t_in, other=0.0)
    s_unit = tl.load(units + (matrix * 2 + 1) * length + s, mask=s_in, other=0.0)
    nearest = tl.load(gaps + matrix * (count * (count - 1) // 2) + pair)
    t_over, s_over = tl.exp2(-t_unit), tl.exp2(-s_unit)

    since += row * length * heads
    until += row * length * heads
    written += row * length * heads
    before += row * (count + 1) * heads
    b += row * b_row
    c += row * c_row
    left += row * left_row
    acc = tl.zeros([TILE, TILE], tl.float32)
    each = tl.cdiv(chunks, splits)
    for chunk in range(split * each, tl.minimum(split * each + each, chunks)):
        d, real, bc_group = channels_of(chunk, group, width, bc_width, segment, BD)
        rows, columns = t_in[:, None] & real[None, :], s_in[:, None] & real[None, :]
        S_t = tl.load(since + t[:, None] * heads + d[None, :], mask=rows, other=0.0)
        S_s = tl.load(until + s[:, None] * heads + d[None, :], mask=columns, other=0.0)
        gap = tl.load(before + i * heads + d, mask=real, other=0.0)
        gap = (gap - tl.load(before + (j + 1) * heads + d, mask=real, other=0.0)).to(tl.float32)
        S_s += tl.where(columns, gap[None, :], 0.0)
        t_less, s_less = tl.where(real, 0.0, HIDDEN)[None, :], tl.where(real, nearest, HIDDEN)[None, :]
        w = tl.load(written + s[:, None] * heads + d[None, :], mask=columns, other=0.0)
        if LEFT:
            gate = tl.load(left + t[:, None] * left_step + d[None, :] * left_head, mask=rows, other=0.0)
        for states in range(0, N, STATES):
            n_own = tl.arange(0, STATES)
            known = real[:, None] & (states + n_own < N)[None, :]
            decays = tl.load(A + (states + n_own)[None, :] * heads + d[:, None], mask=known, other=0.0)
            lives = known & ((gap[:, None] * decays < FLOOR) == 0)  # a NaN lives
            lives = tl.max(lives.to(tl.int32), axis=0)
            alive = tl.sum(lives << n_own, axis=0)
            for _ in range(tl.sum(lives, axis=0)):
                n = states + _lowest(alive)
                alive = alive & (alive - 1)
                A_n = tl.load(A + n * heads + d, mask=real, other=0.0)
                c_n = tl.load(c + t * c_step + bc_group * c_group + n * c_state, mask=t_in, other=0.0) * t_over
                b_n = tl.load(b + s * b_step + bc_group * b_group + n * b_state, mask=s_in, other=0.0) * s_over
                P = tl.exp2(S_t * A_n[None, :] - t_less) * c_n[:, None]
                if LEFT:
                    P *= gate
                Q = tl.exp2(S_s * A_n[None, :] - s_less) * b_n[:, None] * w
                P_high, P_low = in_parts(P, True, TERMS)
                Q_high, Q_low = in_parts(Q, True, TERMS)
                if TERMS == 2:  # the tensor cores cut what they add to a sum, so that they are given short ones
                    part = tl.zeros([TILE, TILE], tl.float32)
                    acc += dot(part, P_high, P_low, tl.trans(Q_high), tl.trans(Q_low), TERMS) * scale
                else:
                    acc = dot(acc, P_high, P_low, tl.trans(Q_high), tl.trans(Q_low), TERMS)

    half = tl.exp2(0.5 * (t_unit[:, None] + (s_unit + nearest)[None, :]))  # twice: once might leave float32
    acc = acc * half * half
    if TERMS == 1:
        acc *= scale
    t_own, s_own = tl.arange(0, TILE), tl.arange(0, TILE)
    target += split.to(tl.int64) * split_step + matrix * matrix_step
    if PACKED:
        target += pair.to(tl.int64) * TILE * TILE
        tl.store(target + t_own[:, None] * TILE + s_own[None, :], acc)
    else:
        target += i.to(tl.int64) * TILE * length + j * TILE
        inside = t_in[:, None] & s_in[None, :]
        tl.store(target + t_own[:, None] * length + s_own[None, :], acc, mask=inside)


@triton.jit
def gather(
    packed,
    strip,
    out,
    packed_split,
    packed_matrix,
    strip_split,
    strip_matrix,
    length,
    packed_splits,
    strip_splits,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`out` (matrices, length, length) from the shares of the sums: the tiles on the diagonal from `strip` (splits,
    matrices, length, TILE), those below from `packed` (splits, matrices, tiles, TILE, TILE) unless `packed_splits` is 0
    and they are in place; 0 above the diagonal."""
    matrix, count = tl.program_id(1).to(tl.int64), tl.cdiv(length, TILE)
    parts = TILE // ROWS
    tile, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    i, j = tile // count, tile % count
    own, column = part * ROWS + tl.arange(0, ROWS), tl.arange(0, TILE)
    t, s = i * TILE + own, j * TILE + column
    total = tl.zeros([ROWS, TILE], tl.float32)
    if i == j:
        strip += matrix * strip_matrix + i.to(tl.int64) * TILE * TILE
        known = (own[:, None] >= column[None, :]) & (t < length)[:, None]
        for _ in range(strip_splits):
            total += tl.load(strip + own[:, None] * TILE + column[None, :], mask=known, other=0.0)
            strip += strip_split
    elif j < i:
        line = count - 1 - (i - j)
        packed += matrix * packed_matrix + (line * (line + 1) // 2 + j).to(tl.int64) * TILE * TILE
        for _ in range(packed_splits):
            total += tl.load(packed + own[:, None] * TILE + column[None, :])
            packed += packed_split
    if (j >= i) | (packed_splits > 0):
        place = out + matrix * length * length + t.to(tl.int64)[:, None] * length + s[None, :]
        tl.store(place, total, mask=(t < length)[:, None] & (s < length)[None, :])
