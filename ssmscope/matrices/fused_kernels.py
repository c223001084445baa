"""The Triton kernels of `fused`: the mean implicit attention of a layer with a decay per state, as matrix products.

With S_t the sum of Δ_r over r ≤ t, a decay between s < t is exp(A (S_t − S_s)) = exp(A (S_t − S_p)) exp(A (S_p − S_s))
for a pivot p in s ≤ p ≤ t: two factors, neither above 1 where states decay, so that nothing overflows and what
underflows is 0 in the product as well. A block of rows below a block of columns has its pivot right before the rows;
the mean over channels and states is then one matrix product over pairs (channel, state), whose operands are made in
registers. `tiles` makes such blocks: the square tiles below the diagonal, and within those on it the lower left quarter
of every square of twice BLOCK rows, of four times, and so on. What remains are triangles of BLOCK rows, made by
`triangles`. `gather` adds up what several programs have summed over their share of the channels, in a
fixed order: nothing depends on the order in which programs run.

Sums of Δ come from `sums` and `starts`: within a tile in both directions, exact to float32 however large the sum before
it, and in float64 over the tiles, so that a sum over any stretch of tiles is a difference.

Importing this module needs triton.
"""

import triton
import triton.language as tl


@triton.jit
def sums(
    delta,
    right,
    since,
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
    HALVES: tl.constexpr,
):
    """Within blocks of BLOCK steps: `since`, Σ Δ from the block's start up to t, and `until`, Σ Δ after s up to its end
    (batch, length, heads); `totals` (batch, blocks, heads) in float64; `written` is right ⊙ Δ, or Δ. With HALVES
    `since` alone: what `until` would have in blocks 0, 2, …, itself in blocks 1, 3, …"""
    row, block = tl.program_id(2).to(tl.int64), tl.program_id(0)
    t = block * BLOCK + tl.arange(0, BLOCK)
    d = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (t < length)[:, None] & (d < heads)[None, :]
    step = tl.load(delta + row * delta_row + t[:, None] * delta_step + d[None, :] * delta_head, mask=inside, other=0.0)
    exact = step.to(tl.float64)
    total = tl.sum(exact, axis=0)
    up = tl.cumsum(exact, axis=0)
    down = total[None, :] - up
    place = row * length * heads + t[:, None] * heads + d[None, :]
    if HALVES:
        tl.store(since + place, tl.where(block % 2 == 1, up, down).to(tl.float32), mask=inside)
    else:
        tl.store(since + place, up.to(tl.float32), mask=inside)
        tl.store(until + place, down.to(tl.float32), mask=inside)
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
def _rounded(x, PRECISION: tl.constexpr):
    """An operand of the tensor cores. They cut float32 to TF32's 10 bits of mantissa; half a unit of the last one makes
    that rounding to nearest."""
    if PRECISION == "bf16":
        x = x.to(tl.bfloat16)
    elif PRECISION == "tf32":
        x = (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _product(P, Q, acc, PRECISION: tl.constexpr):
    """acc + P Qᵀ."""
    P, Q = _rounded(P, PRECISION), tl.trans(_rounded(Q, PRECISION))
    if PRECISION == "tf32x3":
        acc = tl.dot(P, Q, acc, input_precision="tf32x3")
    else:
        acc = tl.dot(P, Q, acc, input_precision="tf32")
    return acc


@triton.jit
def _channels(chunk, group, width, bc_width, segment, BD: tl.constexpr):
    """Of the chunk of a group of `width` channels: its channels, which of them are real, and the group of b and c that
    they read. A chunk lies within `segment` neighbouring channels that have both groups in common."""
    share = tl.cdiv(segment, BD)
    within = (chunk % share) * BD
    first = group * width + (chunk // share) * segment + within
    return first + tl.arange(0, BD), within + tl.arange(0, BD) < segment, first // bc_width


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
    STRIP: tl.constexpr,
    BD: tl.constexpr,
    WHERE: tl.constexpr,
    LEFT: tl.constexpr,
    PRECISION: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """Blocks of TILE rows by TILE columns, `scale` times the sum over a share of the channels.

    WHERE they go is "out" (rows of `length`), "packed" (a block after the other) or "strip" (rows of STRIP columns, for
    the lower left quarters of the squares of 2 TILE rows on the diagonal). `A` (N, heads) holds A / log 2. A state that
    has decayed below 2^FLOOR in all of a chunk's channels before the block begins is left out: its factors are 0.
    """
    program = tl.program_id(0)
    split, matrix = program % splits, tl.program_id(1).to(tl.int64)
    row, group = matrix // groups, (matrix % groups).to(tl.int32)
    if WHERE == "strip":
        i = 2 * (program // splits) + 1
        j = i - 1
    else:
        # blocks in the order of their distance from the diagonal, since those near it have most to do
        pair = tl.num_programs(0) // splits - 1 - program // splits
        line = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
        line = tl.where(line * (line + 1) // 2 > pair, line - 1, line)
        line = tl.where((line + 1) * (line + 2) // 2 <= pair, line + 1, line)
        j = pair - line * (line + 1) // 2
        i = j + tl.cdiv(length, TILE) - 1 - line
    t, s = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    t_in, s_in = t < length, s < length

    since += row * length * heads
    until += row * length * heads
    written += row * length * heads
    before += row * (tl.cdiv(length, TILE) + 1) * heads
    b += row * b_row
    c += row * c_row
    left += row * left_row
    acc = tl.zeros([TILE, TILE], tl.float32)
    each = tl.cdiv(chunks, splits)
    for chunk in range(split * each, tl.minimum(split * each + each, chunks)):
        d, real, bc_group = _channels(chunk, group, width, bc_width, segment, BD)
        rows, columns = t_in[:, None] & real[None, :], s_in[:, None] & real[None, :]
        S_t = tl.load(since + t[:, None] * heads + d[None, :], mask=rows, other=0.0)
        S_s = tl.load(until + s[:, None] * heads + d[None, :], mask=columns, other=0.0)
        if WHERE != "strip":
            gap = tl.load(before + i * heads + d, mask=real, other=0.0)
            gap = (gap - tl.load(before + (j + 1) * heads + d, mask=real, other=0.0)).to(tl.float32)
            S_s += tl.where(columns, gap[None, :], 0.0)
        w = tl.load(written + s[:, None] * heads + d[None, :], mask=columns, other=0.0)
        if LEFT:
            gate = tl.load(left + t[:, None] * left_step + d[None, :] * left_head, mask=rows, other=0.0)
        for states in range(0, N, STATES):
            left_over = tl.minimum(STATES, N - states)
            alive = (1 << left_over) - 1
            if WHERE != "strip":
                n_own = tl.arange(0, STATES)
                known = real[:, None] & (states + n_own < N)[None, :]
                decays = tl.load(A + (states + n_own)[None, :] * heads + d[:, None], mask=known, other=0.0)
                lives = known & ((gap[:, None] * decays < FLOOR) == 0)  # a NaN lives
                lives = tl.max(lives.to(tl.int32), axis=0)
                alive, left_over = tl.sum(lives << n_own, axis=0), tl.sum(lives, axis=0)
            for _ in range(left_over):
                n = states + _lowest(alive)
                alive = alive & (alive - 1)
                A_n = tl.load(A + n * heads + d, mask=real, other=0.0)
                c_n = tl.load(c + t * c_step + bc_group * c_group + n * c_state, mask=t_in, other=0.0)
                b_n = tl.load(b + s * b_step + bc_group * b_group + n * b_state, mask=s_in, other=0.0)
                P = tl.exp2(S_t * A_n[None, :]) * c_n[:, None]
                if LEFT:
                    P *= gate
                Q = tl.exp2(S_s * A_n[None, :]) * (w * b_n[:, None])
                acc = _product(P, Q, acc, PRECISION)

    t_own, s_own = tl.arange(0, TILE), tl.arange(0, TILE)
    target += split.to(tl.int64) * split_step + matrix * matrix_step
    inside = t_in[:, None] & s_in[None, :]
    if WHERE == "out":
        target += i.to(tl.int64) * TILE * length + j * TILE
        tl.store(target + t_own[:, None] * length + s_own[None, :], acc * scale, mask=inside)
    elif WHERE == "packed":
        target += pair.to(tl.int64) * TILE * TILE
        tl.store(target + t_own[:, None] * TILE + s_own[None, :], acc * scale)
    else:
        target += i.to(tl.int64) * TILE * STRIP + (j * TILE) % STRIP
        tl.store(target + t_own[:, None] * STRIP + s_own[None, :], acc * scale, mask=inside)


@triton.jit
def _between(own, pivot):
    """Which steps r lie between t and the end of step pivot_t − 1, r ≤ t of those after it and r > t of those before,
    as the matrix of 0 and 1 by which the steps' Δ are multiplied: sums of what is positive, without differences."""
    t, r, p = own[:, None], own[None, :], pivot[:, None]
    return (((r >= p) & (r <= t)) | ((r < p) & (r > t))).to(tl.float32)


@triton.jit
def triangles(
    delta,
    written,
    A,
    b,
    c,
    left,
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
    delta_row,
    delta_step,
    delta_head,
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
    STRIP: tl.constexpr,
    BLOCK: tl.constexpr,
    BD: tl.constexpr,
    LEFT: tl.constexpr,
    PRECISION: tl.constexpr,
    SPAN: tl.constexpr,
):
    """The squares of BLOCK rows on the diagonal, into a strip as `tiles` has it; only what is at s ≤ t means anything.

    The pivot is the square's middle: above it a factor exceeds 1 where the other is as far below. Where a state changes
    by more than 2^SPAN from there, only the lower left quarter is made so, with factors below 1, and the two halves of
    the diagonal each by a pivot of their own; where even that is too far, pair by pair, in float32.
    """
    program = tl.program_id(0)
    split, matrix = program % splits, tl.program_id(1).to(tl.int64)
    row, group = matrix // groups, (matrix % groups).to(tl.int32)
    block = program // splits
    HALF: tl.constexpr = BLOCK // 2
    own = tl.arange(0, BLOCK)
    t = block * BLOCK + own
    t_in = t < length
    after, after_own = (own >= HALF)[:, None], (own % HALF >= HALF // 2)[:, None]
    to_middle = _between(own, HALF + own * 0)
    to_own = _between(own, own // HALF * HALF + HALF // 2)

    delta += row * delta_row
    written += row * length * heads
    b += row * b_row
    c += row * c_row
    left += row * left_row
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    halves = tl.zeros([BLOCK, BLOCK], tl.float32)
    each = tl.cdiv(chunks, splits)
    for chunk in range(split * each, tl.minimum(split * each + each, chunks)):
        d, real, bc_group = _channels(chunk, group, width, bc_width, segment, BD)
        inside = t_in[:, None] & real[None, :]
        step = tl.load(delta + t[:, None] * delta_step + d[None, :] * delta_head, mask=inside, other=0.0)
        S = tl.dot(to_middle, step, input_precision="ieee")
        S_own = tl.dot(to_own, step, input_precision="ieee")
        far, far_own = tl.max(S, axis=0), tl.max(S_own, axis=0)
        w = tl.load(written + t[:, None] * heads + d[None, :], mask=inside, other=0.0)
        if LEFT:
            gate = tl.load(left + t[:, None] * left_step + d[None, :] * left_head, mask=inside, other=0.0)
        for n in range(N):
            A_n = tl.load(A + n * heads + d, mask=real, other=0.0)
            c_n = tl.load(c + t * c_step + bc_group * c_group + n * c_state, mask=t_in, other=0.0)
            b_n = tl.load(b + t * b_step + bc_group * b_group + n * b_state, mask=t_in, other=0.0)
            Q = w * b_n[:, None]
            if LEFT:
                P = gate * c_n[:, None]
            else:
                P = tl.broadcast_to(c_n[:, None], [BLOCK, BD])
            change = S * A_n[None, :]
            if tl.max(far * tl.abs(A_n), axis=0) <= SPAN:
                grown = tl.exp2(tl.where(after, change, -change))
                shrunk = tl.exp2(tl.where(after, -change, change))
                acc = _product(P * grown, Q * shrunk, acc, PRECISION)
            else:
                kept = tl.exp2(change)
                acc = _product(tl.where(after, P * kept, 0.0), tl.where(after, 0.0, Q * kept), acc, PRECISION)
                if tl.max(far_own * tl.abs(A_n), axis=0) <= SPAN:
                    change = S_own * A_n[None, :]
                    grown = tl.exp2(tl.where(after_own, change, -change))
                    shrunk = tl.exp2(tl.where(after_own, -change, change))
                    halves = _product(P * grown, Q * shrunk, halves, PRECISION)
                else:
                    since_s = tl.zeros([BLOCK, BD], tl.float32)  # Σ Δ after s up to t, from the last s to the first
                    for k in range(HALF):
                        s = HALF - 1 - k
                        at = block * BLOCK + s  # and, in the second half, as far after its start
                        first, second = real & (at < length), real & (at + HALF < length)
                        there = tl.load(written + at * heads + d, mask=first, other=0.0)[None, :]
                        beyond = tl.load(written + (at + HALF) * heads + d, mask=second, other=0.0)[None, :]
                        b_at = b + bc_group * b_group + n * b_state
                        there *= tl.load(b_at + at * b_step, mask=at < length, other=0.0)
                        beyond *= tl.load(b_at + (at + HALF) * b_step, mask=at + HALF < length, other=0.0)
                        term = P * tl.exp2(since_s * A_n[None, :]) * tl.where(after, beyond, there)
                        halves += tl.where((own % HALF == s)[None, :], tl.sum(term, axis=1)[:, None], 0.0)
                        there = tl.load(delta + at * delta_step + d * delta_head, mask=first, other=0.0)
                        beyond = tl.load(delta + (at + HALF) * delta_step + d * delta_head, mask=second, other=0.0)
                        step_s = tl.where(after, beyond[None, :], there[None, :])
                        since_s += tl.where((own % HALF >= s)[:, None], step_s, 0.0)

    acc += tl.where((own // HALF)[:, None] == (own // HALF)[None, :], halves, 0.0)
    target += (
        split.to(tl.int64) * split_step
        + matrix * matrix_step
        + block.to(tl.int64) * BLOCK * STRIP
        + (block * BLOCK) % STRIP
    )
    tl.store(target + own[:, None] * STRIP + own[None, :], acc * scale, mask=t_in[:, None] & t_in[None, :])


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


INTERPRETED = not isinstance(tiles, triton.JITFunction)
"""Whether triton interprets kernels in numpy (TRITON_INTERPRET=1 when it was imported): they then take CPU tensors."""
