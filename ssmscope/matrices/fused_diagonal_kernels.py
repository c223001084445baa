"""The tiles on the diagonal, for `fused_kernels`, where what they are made of is explained.

Importing this module needs triton.
"""

import triton
import triton.language as tl

from ssmscope.matrices.fused_first_kernels import HIDDEN, channels_of
from ssmscope.scans.tile_kernels import dot, in_parts, one_over, unit_of

LEAST_SHARE: tl.constexpr = tl.constexpr(2.0**-80)
"""As `fused_first_kernels.LEAST`."""


@triton.jit(do_not_specialize=["length", "chunks", "splits"])
def levels(
    since,
    rest,
    written,
    A,
    wrote,
    read,
    slowest,
    most,
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
    rows,
    scale,
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
    high = NEAR << tl.program_id(1)  # rows of such a quarter
    own = tl.arange(0, TILE // 2)
    start = tile * TILE + own // high * (2 * high)
    s = start + own % high
    t = s + high
    t_in, s_in = t < length, s < length
    pivot = tl.minimum(start + high, length) - 1

    since += row * length * heads
    rest += row * length * heads
    written += row * length * heads
    bc_groups = heads // bc_width
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
        bc_at = row * bc_groups + bc_group
        t_at, s_at = read + bc_at * N * rows + t, wrote + bc_at * N * rows + s
        c_most = tl.load(most + bc_at * 2 * rows + t)
        b_most = tl.load(most + bc_at * 2 * rows + rows + s)
        slow = tl.load(slowest + d, mask=real, other=0.0)
        decayed = tl.exp2(S_t * slow[None, :] - less)
        if LEFT:
            decayed *= tl.abs(gate)
        t_unit = unit_of(c_most * tl.maximum(tl.max(decayed, axis=1), LEAST_SHARE))
        decayed = tl.exp2(S_s * slow[None, :] - less) * tl.abs(w)
        s_unit = unit_of(b_most * tl.maximum(tl.max(decayed, axis=1), LEAST_SHARE))
        t_over, s_over = one_over(t_unit), one_over(s_unit)
        summed = tl.zeros([TILE // 2, TILE // 2], tl.float32)
        for states in range(0, N, UNROLLED):
            part = tl.zeros([TILE // 2, TILE // 2], tl.float32)
            if TERMS == 1:
                part = summed
            for k in tl.static_range(UNROLLED):
                n = states + k
                A_n = tl.load(A + n * heads + d, mask=real, other=0.0)
                c_n = tl.load(t_at + n * rows) * t_over
                b_n = tl.load(s_at + n * rows) * s_over
                P = tl.exp2(S_t * A_n[None, :] - less) * c_n[:, None]
                if LEFT:
                    P *= gate
                Q = tl.exp2(S_s * A_n[None, :] - less) * b_n[:, None] * w
                P_high, P_low = in_parts(P, True, TERMS)
                Q_high, Q_low = in_parts(Q, True, TERMS)
                part = dot(part, P_high, P_low, tl.trans(Q_high), tl.trans(Q_low), TERMS)
            if TERMS == 1:
                summed = part
            else:  # the tensor cores cut what they add to a sum, so that they are given short ones
                summed += part
        acc += summed * t_unit[:, None] * s_unit[None, :]

    target += split.to(tl.int64) * split_step + matrix * matrix_step
    same = (start[:, None] == start[None, :]) & t_in[:, None] & s_in[None, :]
    tl.store(target + t.to(tl.int64)[:, None] * TILE + (s % TILE)[None, :], acc * scale, mask=same)


@triton.jit(do_not_specialize=["length", "chunks", "splits"])
def near(
    delta,
    written,
    A,
    wrote,
    read,
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
    rows,
    scale,
    delta_row,
    delta_step,
    delta_head,
    left_row,
    left_step,
    left_head,
    N: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BD: tl.constexpr,
    NEAR: tl.constexpr,
    LEFT: tl.constexpr,
):
    """The triangles of NEAR rows on the diagonal, ROWS of them in a program, into a strip as that of `levels`: in
    float32, state by state, what every step of a triangle has written is carried on from step to step and read."""
    split, matrix = tl.program_id(0) % splits, tl.program_id(1).to(tl.int64)
    row, group = matrix // groups, (matrix % groups).to(tl.int32)
    first = (tl.program_id(0) // splits * ROWS + tl.arange(0, ROWS)) * NEAR
    bc_groups = heads // bc_width
    written += row * length * heads
    delta += row * delta_row
    left += row * left_row
    target += split.to(tl.int64) * split_step + matrix * matrix_step
    each = tl.cdiv(chunks, splits)
    total: tl.tuple = ()
    for _ in tl.static_range(NEAR * (NEAR + 1) // 2):
        total = total + (tl.zeros([ROWS, BD], tl.float32),)
    for chunk in range(split * each, tl.minimum(split * each + each, chunks)):
        d, real, bc_group = channels_of(chunk, group, width, bc_width, segment, BD)
        bc_at = (row * bc_groups + bc_group) * N * rows + first
        steps: tl.tuple = ()
        weights: tl.tuple = ()
        gates: tl.tuple = ()
        for k in tl.static_range(NEAR):
            t = first + k
            inside = (t < length)[:, None] & real[None, :]
            place = t[:, None] * delta_step + d[None, :] * delta_head
            steps = steps + (tl.load(delta + place, mask=inside, other=0.0),)
            place = t[:, None] * heads + d[None, :]
            weights = weights + (tl.load(written + place, mask=inside, other=0.0),)
            if LEFT:
                place = t[:, None] * left_step + d[None, :] * left_head
                gates = gates + (tl.load(left + place, mask=inside, other=0.0),)
        for n in range(N):
            A_n = tl.load(A + n * heads + d, mask=real, other=0.0)
            summed: tl.tuple = ()
            kept: tl.tuple = ()
            for k in tl.static_range(NEAR):
                c_k = tl.load(read + bc_at + n * rows + k)[:, None]
                b_k = tl.load(wrote + bc_at + n * rows + k)[:, None]
                if LEFT:
                    c_k = c_k * gates[k]
                carried: tl.tuple = ()
                if k > 0:
                    decay = tl.exp2(steps[k] * A_n[None, :])
                    for j in tl.static_range(k):
                        carried = carried + (kept[j] * decay,)
                kept = carried + (weights[k] * b_k,)
                for j in tl.static_range(k + 1):
                    summed = summed + (total[k * (k + 1) // 2 + j] + kept[j] * c_k,)
            total = summed
    for k in tl.static_range(NEAR):
        for j in tl.static_range(k + 1):
            place = target + (first + k).to(tl.int64) * TILE + (first + j) % TILE
            tl.store(place, tl.sum(total[k * (k + 1) // 2 + j], axis=1) * scale, mask=first + k < length)
