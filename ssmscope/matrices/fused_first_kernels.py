"""What the kernels of `fused_kernels` read, made by kernels that run before them; explained there.

Importing this module needs triton.
"""

import triton
import triton.language as tl

HIDDEN: tl.constexpr = tl.constexpr(1e4)
"""Takes away from an exponent: channels that are none then have factors of 0, and not what a unit makes infinite."""
LEAST: tl.constexpr = tl.constexpr(-80.0)
"""A factor's unit is at least 2^LEAST of the largest b or c, which are taken over it before they meet what may be 0."""
LARGEST: tl.constexpr = tl.constexpr(126.0)
"""Of the exponents of units."""


@triton.jit
def channels_of(chunk, group, width, bc_width, segment, BD: tl.constexpr):
    """Of the chunk of a group of `width` channels: its channels, which of them are real, and the group of b and c that
    they read. A chunk lies within `segment` neighbouring channels that have both groups in common."""
    share = tl.cdiv(segment, BD)
    within = (chunk % share) * BD
    first = group * width + (chunk // share) * segment + within
    return first + tl.arange(0, BD), within + tl.arange(0, BD) < segment, first // bc_width


@triton.jit(do_not_specialize=["length"])
def prepare(
    b,
    c,
    A,
    read,
    wrote,
    most,
    decays,
    slowest,
    length,
    rows,
    heads,
    groups,
    log2e,
    b_row,
    b_step,
    b_group,
    b_state,
    c_row,
    c_step,
    c_group,
    c_state,
    A_head,
    A_state,
    N: tl.constexpr,
    ROWS: tl.constexpr,
):
    """`read` and `wrote` (batch, groups, N, rows) are c and b with their steps side by side and zeros after the
    sequence's end; `most` (batch, groups, 2, rows) the largest |c| and |b| over the states. `decays` (N, heads) is
    A / log 2, `slowest` (heads) its largest."""
    which = tl.program_id(1).to(tl.int64)
    row, group = which // groups, which % groups
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside, padded = own < length, own < rows
    c += row * c_row + group * c_group
    b += row * b_row + group * b_group
    c_most = tl.zeros([ROWS], tl.float32)
    b_most = tl.zeros([ROWS], tl.float32)
    for n in range(N):
        c_n = tl.load(c + own * c_step + n * c_state, mask=inside, other=0.0)
        b_n = tl.load(b + own * b_step + n * b_state, mask=inside, other=0.0)
        tl.store(read + (which * N + n) * rows + own, c_n, mask=padded)
        tl.store(wrote + (which * N + n) * rows + own, b_n, mask=padded)
        c_most = tl.maximum(c_most, tl.abs(c_n))
        b_most = tl.maximum(b_most, tl.abs(b_n))
    tl.store(most + which * 2 * rows + own, c_most, mask=padded)
    tl.store(most + (which * 2 + 1) * rows + own, b_most, mask=padded)
    if which == 0:
        real = own < heads
        slow = tl.full([ROWS], float("-inf"), tl.float32)
        for n in range(N):
            A_n = tl.load(A + own * A_head + n * A_state, mask=real, other=0.0) * log2e
            tl.store(decays + n * heads + own, A_n, mask=real)
            slow = tl.maximum(slow, A_n)
        tl.store(slowest + own, slow, mask=real)


@triton.jit(do_not_specialize=["length"])
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
    WRITTEN: tl.constexpr,
):
    """Within tiles of BLOCK steps, (batch, length, heads): Σ Δ from the tile's start up to t in two parts, `since` and
    `rest`, and `until`, Σ Δ after s up to its end; `totals` (batch, tiles, heads) in float64; WRITTEN, `written` is
    right ⊙ Δ, or Δ."""
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
    if WRITTEN:
        tl.store(written + place, step, mask=inside)


@triton.jit(do_not_specialize=["blocks"])
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
def place_of(pair, tiles):
    """The row and the column of a tile below the diagonal, in the order of their distance from it, the farthest
    first."""
    line = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
    line = tl.where(line * (line + 1) // 2 > pair, line - 1, line)
    line = tl.where((line + 1) * (line + 2) // 2 <= pair, line + 1, line)
    j = pair - line * (line + 1) // 2
    return j + tiles - 1 - line, j


@triton.jit
def to_pivot(i, level):
    """Of a tile at a level: whether its steps are rows, and the tiles before whose starts the sums of Δ between it and
    its pivot end and begin."""
    block = i >> level
    is_row = (block & 1) == 1
    return is_row, tl.where(is_row, i, (block + 1) << level), tl.where(is_row, block << level, i + 1)


@triton.jit
def living(gap, A, d, real, states, heads, N: tl.constexpr, STATES: tl.constexpr, FLOOR: tl.constexpr):
    """Which of STATES states have not decayed below 2^FLOOR over `gap` in all of a chunk's channels."""
    n = states + tl.arange(0, STATES)
    known = real[:, None] & (n < N)[None, :]
    decays = tl.load(A + n[None, :] * heads + d[:, None], mask=known, other=0.0)
    lives = known & ((gap[:, None] * decays < FLOOR) == 0)  # a NaN lives
    return tl.max(lives.to(tl.int32), axis=0)


@triton.jit
def gap_of(before, end, begin, heads, d, real):
    """The sum of Δ from the start of tile `begin` to that of tile `end`."""
    gap = tl.load(before + end * heads + d, mask=real, other=0.0)
    return (gap - tl.load(before + begin * heads + d, mask=real, other=0.0)).to(tl.float32)


@triton.jit
def _exponent(most, share):
    """The power of two by which numbers of at most `most` times 2^`share` stay below 2^15."""
    return tl.minimum(tl.maximum(tl.ceil(tl.log2(most) + tl.maximum(share, LEAST)) - 14.0, -110.0), 110.0)


@triton.jit(do_not_specialize=["length", "first_chunk", "chunks", "tiles"])
def bounds(
    since,
    until,
    written,
    before,
    A,
    slowest,
    most,
    left,
    units,
    shifts,
    found,
    counts,
    length,
    heads,
    groups,
    width,
    bc_width,
    segment,
    first_chunk,
    chunks,
    tiles,
    rows,
    left_row,
    left_step,
    left_head,
    N: tl.constexpr,
    STATES: tl.constexpr,
    ROWS: tl.constexpr,
    WIDE: tl.constexpr,
    BD: tl.constexpr,
    LEFT: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """`found` (matrices, tiles below the diagonal, chunks · N) lists chunk · N + n of what has not decayed below
    2^FLOOR between a tile's columns and its rows, `counts` how many they are. `units` (matrices, 2, rows): the binary
    exponents of what a tile's rows and its columns are held over. `shifts` (matrices, levels, tiles): how far the
    slowest state has decayed between a tile and its pivot, in powers of two."""
    program, matrix = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, group = matrix // groups, (matrix % groups).to(tl.int32)
    pairs = tiles * (tiles - 1) // 2
    blocks = tl.cdiv(length, ROWS)
    before += row * (tiles + 1) * heads
    own = tl.arange(0, WIDE)
    if program < pairs:
        i, j = place_of(program, tiles)
        found += (matrix * pairs + program) * chunks * N
        count = 0
        for chunk in range(chunks):
            d, real, _bc_group = channels_of(first_chunk + chunk, group, width, bc_width, segment, BD)
            gap = gap_of(before, i, j + 1, heads, d, real)
            for states in range(0, N, STATES):
                lives = living(gap, A, d, real, states, heads, N, STATES, FLOOR)
                place = count + tl.cumsum(lives, axis=0) - 1
                tl.store(found + place, chunk * N + states + tl.arange(0, STATES), mask=lives > 0)
                count += tl.sum(lives, axis=0)
        tl.store(counts + matrix * pairs + program, count)
    elif program < pairs + blocks:
        t = (program - pairs) * ROWS + tl.arange(0, ROWS)
        t_in = t < length
        reads = tl.full([ROWS], float("-inf"), tl.float32)
        writes = tl.full([ROWS], float("-inf"), tl.float32)
        since += row * length * heads
        until += row * length * heads
        written += row * length * heads
        for first in range(0, width, WIDE):
            d = group * width + first + own
            inside = t_in[:, None] & (first + own < width)[None, :]
            place = t[:, None] * heads + d[None, :]
            A_d = tl.load(slowest + d, mask=first + own < width, other=0.0)[None, :]
            decayed = tl.load(since + place, mask=inside, other=0.0) * A_d
            if LEFT:
                gate = left + row * left_row + t[:, None] * left_step + d[None, :] * left_head
                decayed += tl.log2(tl.abs(tl.load(gate, mask=inside, other=0.0)))
            reads = tl.maximum(reads, tl.max(tl.where(inside, decayed, float("-inf")), axis=1))
            decayed = tl.load(until + place, mask=inside, other=0.0) * A_d
            decayed += tl.log2(tl.abs(tl.load(written + place, mask=inside, other=0.0)))
            writes = tl.maximum(writes, tl.max(tl.where(inside, decayed, float("-inf")), axis=1))
        bc_groups = heads // bc_width
        c_most = tl.zeros([ROWS], tl.float32)
        b_most = tl.zeros([ROWS], tl.float32)
        for bc_group in range(group * width // bc_width, (group * width + width - 1) // bc_width + 1):
            at = most + (row * bc_groups + bc_group) * 2 * rows + t
            c_most = tl.maximum(c_most, tl.load(at, mask=t_in, other=0.0))
            b_most = tl.maximum(b_most, tl.load(at + rows, mask=t_in, other=0.0))
        tl.store(units + matrix * 2 * rows + t, _exponent(c_most, reads), mask=t_in)
        tl.store(units + (matrix * 2 + 1) * rows + t, _exponent(b_most, writes), mask=t_in)
    else:
        which = program - pairs - blocks
        i = which % tiles
        _is_row, end, begin = to_pivot(i, which // tiles)
        if end < tiles:
            slow = tl.full([WIDE], float("-inf"), tl.float32)
            for first in range(0, width, WIDE):
                d, real = group * width + first + own, first + own < width
                decayed = gap_of(before, end, begin, heads, d, real) * tl.load(slowest + d, mask=real, other=0.0)
                decayed = tl.where(decayed == decayed, decayed, 0.0)  # a NaN lives
                slow = tl.maximum(slow, tl.where(real, decayed, float("-inf")))
            shift = tl.minimum(tl.maximum(tl.ceil(tl.max(slow, axis=0)), -LARGEST), LARGEST)
            tl.store(shifts + matrix * (tl.num_programs(0) - pairs - blocks) + which, shift)
