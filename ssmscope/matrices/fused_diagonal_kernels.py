"""The tiles on the diagonal, for `fused_kernels`, where what they are made of is explained.

Importing this module needs triton.
"""

import triton
import triton.language as tl

from ssmscope.scans.tile_kernels import dot, in_parts, one_over, unit_of

LEAST: tl.constexpr = tl.constexpr(-80.0)
"""A factor's unit is at least 2^LEAST of the largest b or c, which are taken over it before they meet what may be 0."""
LEAST_SHARE: tl.constexpr = tl.constexpr(2.0**-80)
HIDDEN: tl.constexpr = tl.constexpr(1e4)
"""Takes away from an exponent: channels that are none then have factors of 0, and not what a unit makes infinite."""


@triton.jit
def channels_of(chunk, group, width, bc_width, segment, BD: tl.constexpr):
    """Of the chunk of a group of `width` channels: its channels, which of them are real, and the group of b and c that
    they read. A chunk lies within `segment` neighbouring channels that have both groups in common."""
    share = tl.cdiv(segment, BD)
    within = (chunk % share) * BD
    first = group * width + (chunk // share) * segment + within
    return first + tl.arange(0, BD), within + tl.arange(0, BD) < segment, first // bc_width


@triton.jit
def levels(
    since,
    rest,
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
    BD: tl.constexpr,
    NEAR: tl.constexpr,
    UNROLLED: tl.constexpr,
    LEFT: tl.constexpr,
    TERMS: tl.constexpr,
):
    """Of a tile on the diagonal the lower left quarters of all squares of 2 NEAR rows, of 4 NEAR, or so on: one product
    of their rows and their columns, of which only the blocks on the diagonal mean anything. Into a strip (splits,
    matrices, length, TILE). Units are those of a chunk; UNROLLED divides N."""
    split, matrix = tl.program_id(0) % splits, tl.program_id(2).to(tl.int64)
    tile = tl.program_id(0) // splits
    row, group = matrix // groups, (matrix % groups).to(tl.int32)
    rows = NEAR << tl.program_id(1)  # of such a quarter
    own = tl.arange(0, TILE // 2)
    start = tile * TILE + own // rows * (2 * rows)
    s = start + own % rows
    t = s + rows
    t_in, s_in = t < length, s < length
    pivot = tl.minimum(start + rows, length) - 1

    since += row * length * heads
    rest += row * length * heads
    written += row * length * heads
    b += row * b_row
    c += row * c_row
    left += row * left_row
    acc = tl.zeros([TILE // 2, TILE // 2], tl.float32)
    each = tl.cdiv(chunks, splits)
    for chunk in range(split * each, tl.minimum(split * each + each, chunks)):
        d, real, bc_group = channels_of(chunk, group, width, bc_width, segment, BD)
        t_mask, s_mask = t_in[:, None] & real[None, :], s_in[:, None] & real[None, :]
        place = pivot[:, None] * heads + d[None, :]
        middle, low = tl.load(since + place, mask=s_mask, other=0.0), tl.load(rest + place, mask=s_mask, other=0.0)
        place = t[:, None] * heads + d[None, :]
        S_t = tl.load(since + place, mask=t_mask, other=0.0) - middle
        S_t = tl.where(t_mask, S_t + (tl.load(rest + place, mask=t_mask, other=0.0) - low), 0.0)
        place = s[:, None] * heads + d[None, :]
        S_s = middle - tl.load(since + place, mask=s_mask, other=0.0)
        S_s += low - tl.load(rest + place, mask=s_mask, other=0.0)
        w = tl.load(written + place, mask=s_mask, other=0.0)
        if LEFT:
            gate = tl.load(left + t[:, None] * left_step + d[None, :] * left_head, mask=t_mask, other=0.0)
        less = tl.where(real, 0.0, HIDDEN)[None, :]
        t_at, s_at = c + t * c_step + bc_group * c_group, b + s * b_step + bc_group * b_group
        slowest = tl.full([BD], float("-inf"), tl.float32)
        c_most = tl.zeros([TILE // 2], tl.float32)
        b_most = tl.zeros([TILE // 2], tl.float32)
        for states in range(0, N, 16):
            n = states + tl.arange(0, 16)
            known = (n < N)[:, None] & real[None, :]
            decays = tl.load(A + n[:, None] * heads + d[None, :], mask=known, other=float("-inf"))
            slowest = tl.maximum(slowest, tl.max(decays, axis=0))
            known = t_in[:, None] & (n < N)[None, :]
            c_n = tl.load(t_at[:, None] + n[None, :] * c_state, mask=known, other=0.0)
            c_most = tl.maximum(c_most, tl.max(tl.abs(c_n), axis=1))
            known = s_in[:, None] & (n < N)[None, :]
            b_n = tl.load(s_at[:, None] + n[None, :] * b_state, mask=known, other=0.0)
            b_most = tl.maximum(b_most, tl.max(tl.abs(b_n), axis=1))
        slowest = tl.where(real, slowest, 0.0)
        decayed = tl.exp2(S_t * slowest[None, :] - less)
        if LEFT:
            decayed *= tl.abs(gate)
        t_unit = unit_of(c_most * tl.maximum(tl.max(decayed, axis=1), LEAST_SHARE))
        decayed = tl.exp2(S_s * slowest[None, :] - less) * tl.abs(w)
        s_unit = unit_of(b_most * tl.maximum(tl.max(decayed, axis=1), LEAST_SHARE))
        t_over, s_over = one_over(t_unit), one_over(s_unit)
        for states in range(0, N, UNROLLED):
            part = tl.zeros([TILE // 2, TILE // 2], tl.float32)
            for k in tl.static_range(UNROLLED):
                n = states + k
                A_n = tl.load(A + n * heads + d, mask=real, other=0.0)
                c_n = tl.load(t_at + n * c_state, mask=t_in, other=0.0) * t_over
                b_n = tl.load(s_at + n * b_state, mask=s_in, other=0.0) * s_over
                P = tl.exp2(S_t * A_n[None, :] - less) * c_n[:, None]
                if LEFT:
                    P *= gate
                Q = tl.exp2(S_s * A_n[None, :] - less) * b_n[:, None] * w
                P_high, P_low = in_parts(P, True, TERMS)
                Q_high, Q_low = in_parts(Q, True, TERMS)
                part = dot(part, P_high, P_low, tl.trans(Q_high), tl.trans(Q_low), TERMS)
            # the tensor cores cut what they add to a sum, so that they are given short ones
            acc += part * t_unit[:, None] * s_unit[None, :]

    target += split.to(tl.int64) * split_step + matrix * matrix_step
    same = (start[:, None] == start[None, :]) & t_in[:, None] & s_in[None, :]
    tl.store(target + t.to(tl.int64)[:, None] * TILE + (s % TILE)[None, :], acc * scale, mask=same)


@triton.jit
def near(
    since,
    rest,
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
    NEAR: tl.constexpr,
    UNROLLED: tl.constexpr,
    LEFT: tl.constexpr,
):
    """The triangles of NEAR rows on the diagonal, pair by pair, in float32, into a strip as that of `levels`.

    Of one program every row is that of a pair o steps apart, or, where that would leave the triangle, of the row below
    it by NEAR − o, whose pair is that many steps apart; with o = 0 they are those on the diagonal. UNROLLED divides N.
    """
    split, matrix = tl.program_id(0) % splits, tl.program_id(2).to(tl.int64)
    row, group = matrix // groups, (matrix % groups).to(tl.int32)
    apart = tl.program_id(1)
    own = tl.program_id(0) // splits * ROWS + tl.arange(0, ROWS)
    t = tl.where(own % NEAR >= apart, own, own + NEAR - apart)
    s = tl.where(own % NEAR >= apart, own - apart, own)
    t_in = t < length

    since += row * length * heads
    rest += row * length * heads
    written += row * length * heads
    b += row * b_row
    c += row * c_row
    left += row * left_row
    acc = tl.zeros([ROWS, BD], tl.float32)
    each = tl.cdiv(chunks, splits)
    for chunk in range(split * each, tl.minimum(split * each + each, chunks)):
        d, real, bc_group = channels_of(chunk, group, width, bc_width, segment, BD)
        inside = t_in[:, None] & real[None, :]
        t_place, s_place = t[:, None] * heads + d[None, :], s[:, None] * heads + d[None, :]
        S = tl.load(since + t_place, mask=inside, other=0.0) - tl.load(since + s_place, mask=inside, other=0.0)
        S += tl.load(rest + t_place, mask=inside, other=0.0) - tl.load(rest + s_place, mask=inside, other=0.0)
        weight = tl.load(written + s_place, mask=inside, other=0.0)
        if LEFT:
            weight *= tl.load(left + t[:, None] * left_step + d[None, :] * left_head, mask=inside, other=0.0)
        t_at, s_at = c + t * c_step + bc_group * c_group, b + s * b_step + bc_group * b_group
        if apart == 0:
            same = tl.zeros([ROWS], tl.float32)
            for n in range(N):
                c_n = tl.load(t_at + n * c_state, mask=t_in, other=0.0)
                same += c_n * tl.load(s_at + n * b_state, mask=t_in, other=0.0)
            acc += same[:, None] * weight
        else:
            total = tl.zeros([ROWS, BD], tl.float32)
            for states in range(0, N, UNROLLED):
                for k in tl.static_range(UNROLLED):
                    n = states + k
                    A_n = tl.load(A + n * heads + d, mask=real, other=0.0)
                    bc_n = tl.load(t_at + n * c_state, mask=t_in, other=0.0)
                    bc_n *= tl.load(s_at + n * b_state, mask=t_in, other=0.0)
                    total += tl.exp2(S * A_n[None, :]) * bc_n[:, None]
            acc += total * weight

    target += split.to(tl.int64) * split_step + matrix * matrix_step
    tl.store(target + t.to(tl.int64) * TILE + s % TILE, tl.sum(acc, axis=1) * scale, mask=t_in)
