"""The Triton kernels of `fused`: the mean implicit attention of a layer with a decay per state, as matrix products.

With S_t the sum of Δ_r over r ≤ t, a decay between s < t is exp(A (S_t − S_s)) = exp(A (S_t − S_p)) exp(A (S_p − S_s))
for a pivot p in s ≤ p ≤ t: two factors, neither above 1 where states decay, so that nothing overflows and what
underflows is 0 in the product as well. The mean over channels and states is then one matrix product over pairs
(channel, state).

Steps are cut into tiles. What is below the tiles on the diagonal is a square of half of all tiles, two squares of a
quarter, and so on: its levels. In each of them a square has its pivot right before its rows, and every step is a row or
a column of one square. So `factors` makes, for every level, one factor of every step, channel and state, and `products`
multiplies them, a tile of the matrix in a program; only chunks of channels of a state that are not gone between a
tile's columns and its rows, as `bounds` lists them. Within the tiles on the diagonal (`fused_diagonal_kernels`)
`levels` goes on so, with factors that are made where they are multiplied, and `near` makes the triangles that are left.
`gather` adds up what several programs have summed over their shares, in a fixed order: nothing depends on the order in
which programs run.

Factors are of float16, in one part or two (`tile_kernels`), over powers of two: those of `bounds`, for each row and
column within its tile, and for each tile and level as far as the slowest states have decayed up to its pivot.

Sums of Δ come from `sums` and `starts`: within a tile in both directions, exact to float32 however large the sum before
it, and in float64 over the tiles, so that a sum over any stretch of tiles is a difference.

Importing this module needs triton.
"""

import triton
import triton.language as tl

from ssmscope.matrices.fused_diagonal_kernels import levels, near
from ssmscope.matrices.fused_first_kernels import (
    HIDDEN,
    bounds,
    channels_of,
    gap_of,
    living,
    place_of,
    prepare,
    starts,
    sums,
    to_pivot,
)
from ssmscope.scans.tile_kernels import INTERPRETED, in_parts

__all__ = ["INTERPRETED", "bounds", "factors", "gather", "levels", "near", "prepare", "products", "starts", "sums"]


@triton.jit
def _level(i, j):
    """The level of a tile: the number of the highest bit in which its row and its column differ."""
    return ((i ^ j).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit(do_not_specialize=["length", "first_chunk", "tiles", "depth"])
def factors(
    since,
    until,
    written,
    before,
    A,
    wrote,
    read,
    left,
    units,
    shifts,
    table,
    length,
    heads,
    groups,
    width,
    bc_width,
    segment,
    first_chunk,
    tiles,
    depth,
    rows,
    table_part,
    left_row,
    left_step,
    left_head,
    N: tl.constexpr,
    STATES: tl.constexpr,
    TILE: tl.constexpr,
    HIGH: tl.constexpr,
    ROWS: tl.constexpr,
    BD: tl.constexpr,
    UNROLLED: tl.constexpr,
    LEFT: tl.constexpr,
    TERMS: tl.constexpr,
    FLOOR: tl.constexpr,
):
    """`table` (TERMS, matrices, depth, chunks, N, rows, BD): the factors of all steps at all `depth` levels, but for
    those of states that have decayed below 2^FLOOR in all of a chunk's channels between the tile and its pivot."""
    matrix, level = (tl.program_id(2) // depth).to(tl.int64), tl.program_id(2) % depth
    row, group = matrix // groups, (matrix % groups).to(tl.int32)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    i = tl.program_id(0) * ROWS // TILE
    is_row, end, begin = to_pivot(i, level)
    if end < tiles:
        d, real, bc_group = channels_of(first_chunk + chunk, group, width, bc_width, segment, BD)
        t_in = t < length
        inside = t_in[:, None] & real[None, :]
        gap = gap_of(before + row * (tiles + 1) * heads, end, begin, heads, d, real)
        over_gap = gap
        if HIGH > TILE:  # the tile above, with which it is multiplied, may need more
            above = tl.where(is_row & (level > 0), i // 2 * 2, end)
            over_gap = gap_of(before + row * (tiles + 1) * heads, above, begin, heads, d, real)
        place = row * length * heads + t[:, None] * heads + d[None, :]
        vector = (row * (heads // bc_width) + bc_group) * N * rows + t
        factor = tl.where(inside, 1.0, 0.0)
        if is_row:
            S = tl.load(since + place, mask=inside, other=0.0)
            vectors = read + vector
            if LEFT:
                gate = left + row * left_row + t[:, None] * left_step + d[None, :] * left_head
                factor = tl.load(gate, mask=inside, other=0.0)
        else:
            S = tl.load(until + place, mask=inside, other=0.0)
            vectors = wrote + vector
            factor = tl.load(written + place, mask=inside, other=0.0)
        S += gap[None, :]
        unit = tl.load(units + (matrix * 2 + tl.where(is_row, 0, 1)) * rows + t, mask=t_in, other=0.0)
        over = tl.exp2(-unit)
        shift = tl.load(shifts + (matrix * depth + level) * tiles + i)
        less = tl.where(real, shift, HIDDEN)[None, :]
        table += ((matrix * depth + level) * chunks + chunk) * N * rows * BD
        own = table + t.to(tl.int64)[:, None] * BD + tl.arange(0, BD)[None, :]
        for states in range(0, N, STATES):
            lives = living(over_gap, A, d, real, states, heads, N, STATES, FLOOR)
            alive = tl.sum(lives << tl.arange(0, STATES), axis=0)
            for k in range(0, STATES, UNROLLED):
                if (alive >> k) & ((1 << UNROLLED) - 1) != 0:
                    for m in tl.static_range(UNROLLED):
                        n = tl.minimum(states + k + m, N - 1)
                        lives_n = (alive >> (k + m)) & 1 != 0
                        A_n = tl.load(A + n * heads + d, mask=real, other=0.0)
                        v_n = tl.load(vectors + n * rows) * over
                        made = tl.exp2(S * A_n[None, :] - less) * v_n[:, None] * factor
                        high, low = in_parts(made, True, TERMS)
                        at = own + n.to(tl.int64) * rows * BD
                        tl.store(at, high, mask=lives_n)
                        if TERMS == 2:
                            tl.store(at + table_part, low, mask=lives_n)


@triton.jit
def _number(i, j, tiles):
    """That of a tile below the diagonal, of which `place_of` gives the row and the column."""
    line = tiles - 1 - (i - j)
    return line * (line + 1) // 2 + j


@triton.jit
def _multiply(table, found, units, shifts, target, i, j, begin, end, length, tiles, rows, scale, table_part,
              TILE: tl.constexpr, HIGH: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr, AGAIN: tl.constexpr,
              TERMS: tl.constexpr):  # fmt: skip
    """The sum over what `found` lists from `begin` to `end`, times `scale`, of HIGH rows from tile i on and of the
    columns of tile j."""
    own, column, k_own = tl.arange(0, HIGH), tl.arange(0, TILE), tl.arange(0, BD)
    t, s = i * TILE + own, j * TILE + column
    P_at = table + tl.minimum(t, rows - 1).to(tl.int64)[:, None] * BD + k_own[None, :]
    Q_at = table + s.to(tl.int64)[None, :] * BD + k_own[:, None]
    acc = tl.zeros([HIGH, TILE], tl.float32)
    for k in range(begin, end):
        at = tl.load(found + k).to(tl.int64) * rows * BD
        P, Q = tl.load(P_at + at), tl.load(Q_at + at)
        if INTERPRETED:
            P, Q = P.to(tl.float32), Q.to(tl.float32)
        if TERMS == 2:  # the tensor cores cut what they add to a sum, so that they are given short ones
            P_low, Q_low = tl.load(P_at + at + table_part), tl.load(Q_at + at + table_part)
            if INTERPRETED:
                P_low, Q_low = P_low.to(tl.float32), Q_low.to(tl.float32)
            part = tl.dot(P_low, Q, input_precision="ieee")
            part = tl.dot(P, Q_low, part, input_precision="ieee")
            acc += tl.dot(P, Q, part, input_precision="ieee")
        else:
            acc = tl.dot(P, Q, acc, input_precision="ieee")

    t_in = t < length
    t_unit = tl.load(units + t, mask=t_in, other=0.0) + tl.load(shifts + t // TILE, mask=t_in, other=0.0)
    s_unit = tl.load(units + rows + s, mask=s < length, other=0.0) + tl.load(shifts + j)
    t_half, s_half = tl.floor(0.5 * t_unit), tl.floor(0.5 * s_unit)  # twice a half: once might leave float32
    acc *= tl.exp2(t_half)[:, None] * tl.exp2(s_half)[None, :]
    acc *= tl.exp2(t_unit - t_half)[:, None] * (tl.exp2(s_unit - s_half) * scale)[None, :]
    if PACKED:
        at = _number(t // TILE, j, tiles).to(tl.int64) * TILE * TILE + own % TILE * TILE
        place, inside = target + at[:, None] + column[None, :], (t < rows)[:, None]
    else:
        place = target + t.to(tl.int64)[:, None] * length + s[None, :]
        inside = t_in[:, None] & (s < length)[None, :]
    if AGAIN:
        acc += tl.load(place, mask=inside, other=0.0)
    tl.store(place, acc, mask=inside)


@triton.jit(do_not_specialize=["tiles", "depth", "most", "splits", "wanted"])
def products(
    table,
    found,
    counts,
    units,
    shifts,
    cuts,
    target,
    split_step,
    matrix_step,
    length,
    tiles,
    depth,
    rows,
    most,
    splits,
    wanted,
    scale,
    table_part,
    TILE: tl.constexpr,
    HIGH: tl.constexpr,
    BD: tl.constexpr,
    PACKED: tl.constexpr,
    AGAIN: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Tiles below the diagonal, `scale` times the sum over a share of what `found` lists, at most `most` for a tile, in
    place or, PACKED, a tile after the other; AGAIN, added to what is there. With HIGH twice TILE, two tiles above each
    other are made together, but for those of the lowest level. `cuts` (matrices, tiles below the diagonal) is set to
    the shares of a tile: `splits`, or, where `wanted` is not 0, so many fewer that about `wanted` are alike and not
    empty."""
    matrix, works = tl.program_id(1).to(tl.int64), tl.num_programs(0) // splits
    # the first shares of all tiles first, which read the same factors, and of tiles those near the diagonal, since they
    # have most to do
    split, work = tl.program_id(0) // works, works - 1 - tl.program_id(0) % works
    pairs = tiles * (tiles - 1) // 2
    lowest = 0
    if HIGH > TILE:
        high = (tiles + 1) // 2
        lowest = work - high * (high - 1)  # at least 0: a tile of the lowest level
        i, j = place_of(work // 2, high)
        i, j = i * 2, j * 2 + work % 2
        if lowest >= 0:
            i, j = lowest * 2 + 1, lowest * 2
    else:
        i, j = place_of(work, tiles)
    pair = _number(i, j, tiles)
    counts += matrix * pairs
    count, shares = tl.load(counts + pair), splits
    if wanted > 0:
        total = 0
        for first in range(0, pairs, 256):
            place = first + tl.arange(0, 256)
            total += tl.sum(tl.load(counts + place, mask=place < pairs, other=0), axis=0)
        each = tl.maximum(tl.cdiv(tl.cdiv(total, HIGH // TILE), wanted), 1)
        shares = tl.minimum(tl.maximum((count + each // 2) // each, 1), splits)
    if split == 0:
        tl.store(cuts + matrix * pairs + pair, shares)
        if HIGH > TILE:
            if (lowest < 0) & (i + 1 < tiles):
                tl.store(cuts + matrix * pairs + _number(i + 1, j, tiles), shares)
    if split < shares:
        level = _level(i, j)
        table += (matrix * depth + level) * most * rows * BD
        found += (matrix * pairs + pair) * most
        units += matrix * 2 * rows
        shifts += (matrix * depth + level) * tiles
        target += split.to(tl.int64) * split_step + matrix * matrix_step
        begin, end = count * split // shares, count * (split + 1) // shares
        if HIGH > TILE:
            if lowest < 0:
                _multiply(table, found, units, shifts, target, i, j, begin, end, length, tiles, rows, scale,
                          table_part, TILE, HIGH, BD, PACKED, AGAIN, TERMS)  # fmt: skip
            else:
                _multiply(table, found, units, shifts, target, i, j, begin, end, length, tiles, rows, scale,
                          table_part, TILE, TILE, BD, PACKED, AGAIN, TERMS)  # fmt: skip
        else:
            _multiply(table, found, units, shifts, target, i, j, begin, end, length, tiles, rows, scale,
                      table_part, TILE, TILE, BD, PACKED, AGAIN, TERMS)  # fmt: skip


@triton.jit(do_not_specialize=["packed_splits", "strip_splits"])
def gather(
    packed,
    strip,
    cuts,
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
        pair = _number(i, j, count)
        packed += matrix * packed_matrix + pair.to(tl.int64) * TILE * TILE
        shares = 0
        if packed_splits > 0:
            shares = tl.load(cuts + matrix * (count * (count - 1) // 2) + pair)
        for _ in range(shares):
            total += tl.load(packed + own[:, None] * TILE + column[None, :])
            packed += packed_split
    if (j >= i) | (packed_splits > 0):
        place = out + matrix * length * length + t.to(tl.int64)[:, None] * length + s[None, :]
        tl.store(place, total, mask=(t < length)[:, None] & (s < length)[None, :])
