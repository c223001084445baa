"""The kernel `tiles` of `fused_kernels` for Hopper GPUs, in Triton's lower language Gluon, faster there.

The warps of a program divide the work: two groups make the rows' factors and two the columns', into rings of buffers in
shared memory, from which a fifth feeds the tensor cores. So exponentials and products run at the same time.

Importing this module needs triton 3.6 or newer.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def _lowest(bits):
    """As `fused_kernels._lowest`."""
    low = (bits & -bits).to(gl.float32).to(gl.int32, bitcast=True)
    return gl.maximum((low >> 23) - 127, 0)


@gluon.jit
def _first(chunk, group, width, segment, BD: gl.constexpr):
    """A chunk's first channel, and how many channels its segment has from there on."""
    share = gl.cdiv(segment, BD)
    within = (chunk % share) * BD
    return group * width + (chunk // share) * segment + within, segment - within


@gluon.jit
def _alive(begin, end, A, first, rest, heads, states, N: gl.constexpr, STATES: gl.constexpr, BD: gl.constexpr,
           FLOOR: gl.constexpr):  # fmt: skip
    """Which of STATES states have not decayed below 2^FLOOR between the blocks in all of a chunk's channels: the bits
    of a number, and how many they are."""
    TABLE: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [4, 1], [0, 1])
    d = gl.arange(0, BD, layout=gl.SliceLayout(1, TABLE))
    n = gl.arange(0, STATES, layout=gl.SliceLayout(0, TABLE))
    gap = gl.load(end + first + d, mask=d < rest, other=0.0) - gl.load(begin + first + d, mask=d < rest, other=0.0)
    known = (d < rest)[:, None] & (states + n < N)[None, :]
    decays = gl.load(A + first + (states + n)[None, :] * heads + d[:, None], mask=known, other=0.0)
    lives = gl.where(known & ((gap.to(gl.float32)[:, None] * decays < FLOOR) == 0), 1, 0)  # a NaN lives
    lives = gl.max(lives, axis=0)
    return gl.sum(lives << n, axis=0), gl.sum(lives, axis=0)


@gluon.jit
def _two(alive, states, A, heads, d_in, vectors, vector_state, over):
    """The decays of the two lowest living states, b or c over their units, or 0 for the second where there is one
    state; and what lives besides."""
    n = states + _lowest(alive)
    alive = alive & (alive - 1)
    m = states + _lowest(alive)
    A_n = gl.load(A + n * heads, mask=d_in, other=0.0)
    A_m = gl.load(A + m * heads, mask=d_in, other=0.0)
    v_n = gl.load(vectors + n * vector_state) * over
    v_m = gl.load(vectors + m * vector_state) * gl.where(alive != 0, over, 0.0)
    return A_n, v_n, A_m, v_m, alive & (alive - 1)


@gluon.jit
def _put(ring, at, part, S, A, less, v, factor, PART: gl.constexpr, FACTORS: gl.constexpr, TERMS: gl.constexpr):
    """The factors of one state into the ring, in TERMS parts."""
    made = gl.exp2(S * A[None, :] - less[None, :]) * v[:, None]
    if FACTORS:
        made *= factor
    high = made.to(gl.float16)
    ring.index(at).slice(part, PART).store(high)
    if TERMS == 2:
        ring.index(at + 1).slice(part, PART).store((made - high.to(gl.float32)).to(gl.float16))


@gluon.jit
def _make(ring, ready, empty, sums, factors, factors_step, factors_head, vectors, vector_group, vector_state, units,
          nearest, begin, end, A, tile, part, length, heads, group, width, bc_width, segment, chunks, start,
          N: gl.constexpr, STATES: gl.constexpr, TILE: gl.constexpr, PART: gl.constexpr, BD: gl.constexpr,
          STAGES: gl.constexpr, ROWS: gl.constexpr, FACTORS: gl.constexpr, TERMS: gl.constexpr,
          FLOOR: gl.constexpr, HIDDEN: gl.constexpr):  # fmt: skip
    """The factors of PART of a tile's rows (`sums` of Δ since its start, `factors` left, `vectors` c) or columns
    (`sums` until its end, right ⊙ Δ, b), state by state, in TERMS parts over 2 to the power of their `units`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([PART * BD // 512, 4], [128 // BD, BD // 4], [4, 1], [1, 0])
    t = tile * TILE + part + gl.arange(0, PART, layout=gl.SliceLayout(1, LAYOUT))
    t_in = t < length
    d = gl.arange(0, BD, layout=gl.SliceLayout(0, LAYOUT))
    over = gl.exp2(-gl.load(units + t, mask=t_in, other=0.0))
    stage, phase = 0, 0
    for chunk in range(start, chunks):
        first, rest = _first(chunk, group, width, segment, BD)
        d_in = d < rest
        inside = t_in[:, None] & d_in[None, :]
        S = gl.load(sums + first + t[:, None] * heads + d[None, :], mask=inside, other=0.0)
        less = gl.where(d_in, 0.0, HIDDEN)
        if not ROWS:
            gap = gl.load(end + first + d, mask=d_in, other=0.0) - gl.load(begin + first + d, mask=d_in, other=0.0)
            S += gl.where(inside, gap.to(gl.float32)[None, :], 0.0)
            less = gl.where(d_in, nearest, HIDDEN)
        if FACTORS:
            places = t[:, None] * factors_step + (first + d)[None, :] * factors_head
            factor = gl.load(factors + places, mask=inside, other=0.0)
        else:
            factor = S
        vectors_at = vectors + (first // bc_width) * vector_group + t
        for states in range(0, N, STATES):
            alive, count = _alive(begin, end, A, first, rest, heads, states, N, STATES, BD, FLOOR)
            A_0, v_0, A_1, v_1, alive = _two(alive, states, A + first + d, heads, d_in, vectors_at, vector_state, over)
            for _ in range((count + 1) // 2):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                at = stage * 2 * TERMS
                _put(ring, at, part, S, A_0, less, v_0, factor, PART, FACTORS, TERMS)
                _put(ring, at + TERMS, part, S, A_1, less, v_1, factor, PART, FACTORS, TERMS)
                A_0, v_0, A_1, v_1, alive = _two(alive, states, A + first + d, heads, d_in, vectors_at, vector_state,
                                                 over)  # fmt: skip
                hopper.fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(ready.index(stage))
                stage += 1
                phase = gl.where(stage == STAGES, phase ^ 1, phase)
                stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def _multiply(P, Q, ready, empty, begin, end, A, t_units, s_units, nearest, target, row_step, rows, columns, scale,
              heads, group, width, segment, chunks, start,
              N: gl.constexpr, STATES: gl.constexpr, TILE: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr,
              FLOOR: gl.constexpr):  # fmt: skip
    """The sum of the products of what the two rings bring, into `target`."""
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    acc = hopper.warpgroup_mma_init(gl.zeros([TILE, TILE], gl.float32, layout=SUM))
    stage, phase, last = 0, 0, -1
    for chunk in range(start, chunks):
        first, rest = _first(chunk, group, width, segment, BD)
        for states in range(0, N, STATES):
            _bits, count = _alive(begin, end, A, first, rest, heads, states, N, STATES, BD, FLOOR)
            for _ in range((count + 1) // 2):
                mbarrier.wait(ready.index(stage), phase)
                for k in gl.static_range(2):
                    at = stage * 2 + k
                    acc = hopper.warpgroup_mma(P.index(at), Q.index(at).permute((1, 0)), acc, is_async=True)
                acc = hopper.warpgroup_mma_init(hopper.warpgroup_mma_wait(2, deps=[acc]))
                mbarrier.arrive(empty.index(gl.maximum(last, 0)), pred=last >= 0)
                last = stage
                stage += 1
                phase = gl.where(stage == STAGES, phase ^ 1, phase)
                stage = gl.where(stage == STAGES, 0, stage)
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    _store(acc, 0, t_units, s_units, nearest, target, row_step, rows, columns, scale)


@gluon.jit
def _product(P, Q, at, column, TILE: gl.constexpr):
    """Two states' products of two parts, of half of the columns."""
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE // 2, 16])
    acc = hopper.warpgroup_mma_init(gl.zeros([TILE, TILE // 2], gl.float32, layout=SUM))
    for k in gl.static_range(2):
        Q_high = Q.index(at + 2 * k).slice(column, TILE // 2).permute((1, 0))
        Q_low = Q.index(at + 2 * k + 1).slice(column, TILE // 2).permute((1, 0))
        acc = hopper.warpgroup_mma(P.index(at + 2 * k + 1), Q_high, acc, is_async=True)
        acc = hopper.warpgroup_mma(P.index(at + 2 * k), Q_low, acc, is_async=True)
        acc = hopper.warpgroup_mma(P.index(at + 2 * k), Q_high, acc, is_async=True)
    return hopper.warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _multiply_parts(P, Q, ready, empty, begin, end, A, t_units, s_units, nearest, target, row_step, rows, columns,
                    scale, heads, group, width, segment, chunks, start,
                    N: gl.constexpr, STATES: gl.constexpr, TILE: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr,
                    FLOOR: gl.constexpr):  # fmt: skip
    """As `_multiply`, of two parts. The tensor cores cut what they add to a sum: so they sum two states at a time, half
    of the columns after the other, and the rest is added where numbers are rounded."""
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE // 2, 16])
    one = gl.zeros([TILE, TILE // 2], gl.float32, layout=SUM)
    other = gl.zeros([TILE, TILE // 2], gl.float32, layout=SUM)
    stage, phase = 0, 0
    for chunk in range(start, chunks):
        first, rest = _first(chunk, group, width, segment, BD)
        for states in range(0, N, STATES):
            _bits, count = _alive(begin, end, A, first, rest, heads, states, N, STATES, BD, FLOOR)
            for _ in range((count + 1) // 2):
                mbarrier.wait(ready.index(stage), phase)
                one += _product(P, Q, stage * 4, 0, TILE)
                other += _product(P, Q, stage * 4, TILE // 2, TILE)
                mbarrier.arrive(empty.index(stage))
                stage += 1
                phase = gl.where(stage == STAGES, phase ^ 1, phase)
                stage = gl.where(stage == STAGES, 0, stage)
    _store(one, 0, t_units, s_units, nearest, target, row_step, rows, columns, scale)
    _store(other, TILE // 2, t_units, s_units, nearest, target, row_step, rows, columns, scale)


@gluon.jit
def _store(acc, column, t_units, s_units, nearest, target, row_step, rows, columns, scale):
    t = gl.arange(0, acc.shape[0], layout=gl.SliceLayout(1, acc.type.layout))
    s = column + gl.arange(0, acc.shape[1], layout=gl.SliceLayout(0, acc.type.layout))
    t_unit = gl.load(t_units + t, mask=t < rows, other=0.0)
    s_unit = gl.load(s_units + s, mask=s < columns, other=0.0) + nearest
    half = gl.exp2(0.5 * (t_unit[:, None] + s_unit[None, :]))  # twice: once might leave float32
    inside = (t < rows)[:, None] & (s < columns)[None, :]
    gl.store(target + t[:, None] * row_step + s[None, :], acc * half * half * scale, mask=inside)


@gluon.jit
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
    N: gl.constexpr,
    STATES: gl.constexpr,
    TILE: gl.constexpr,
    BD: gl.constexpr,
    PACKED: gl.constexpr,
    LEFT: gl.constexpr,
    TERMS: gl.constexpr,
    FLOOR: gl.constexpr,
    HIDDEN: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """As `fused_kernels.tiles`, of 4 warps, and 16 besides. The steps of `b` and of `c` lie side by side, with zeros
    after the sequence's end up to that of the tile."""
    YES: gl.constexpr = True
    NO: gl.constexpr = False
    ONE: gl.constexpr = 1
    ZERO: gl.constexpr = 0
    PART: gl.constexpr = TILE // 2
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, BD], gl.float16)

    program = gl.program_id(0)
    split, matrix = program % splits, gl.program_id(1).to(gl.int64)
    row, group = matrix // groups, (matrix % groups).to(gl.int32)
    pair = gl.num_programs(0) // splits - 1 - program // splits
    line = ((gl.sqrt(8.0 * pair.to(gl.float32) + 1.0) - 1.0) / 2.0).to(gl.int32)
    line = gl.where(line * (line + 1) // 2 > pair, line - 1, line)
    line = gl.where((line + 1) * (line + 2) // 2 <= pair, line + 1, line)
    j = pair - line * (line + 1) // 2
    count = gl.cdiv(length, TILE)
    i = j + count - 1 - line

    table = row * length * heads
    begin = before + row * (count + 1) * heads + (j + 1) * heads
    end = before + row * (count + 1) * heads + i * heads
    each = gl.cdiv(chunks, splits)
    start, stop = split * each, gl.minimum(split * each + each, chunks)
    target += split.to(gl.int64) * split_step + matrix * matrix_step
    if PACKED:
        target += pair.to(gl.int64) * TILE * TILE
        row_step = TILE
    else:
        target += i.to(gl.int64) * TILE * length + j * TILE
        row_step = length
    t_units, s_units = units + matrix * 2 * length, units + (matrix * 2 + 1) * length
    nearest = gl.load(gaps + matrix * (count * (count - 1) // 2) + pair)
    P = gl.allocate_shared_memory(gl.float16, [STAGES * 2 * TERMS, TILE, BD], SHARED)
    Q = gl.allocate_shared_memory(gl.float16, [STAGES * 2 * TERMS, TILE, BD], SHARED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(STAGES):
        mbarrier.init(ready.index(k), count=4)
        mbarrier.init(empty.index(k), count=1)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
        (_multiply if TERMS == 1 else _multiply_parts,
         (P, Q, ready, empty, begin, end, A, t_units + i * TILE, s_units + j * TILE, nearest, target, row_step,
          length - i * TILE, length - j * TILE, scale, heads, group, width, segment, stop, start, N, STATES, TILE, BD,
          STAGES, FLOOR)),
        (_make, (P, ready, empty, since + table, left + row * left_row, left_step, left_head,
                 c + row * c_row, c_group, c_state, t_units, nearest, begin, end, A, i, ZERO, length, heads, group,
                 width, bc_width, segment, stop, start, N, STATES, TILE, PART, BD, STAGES, YES, LEFT, TERMS, FLOOR,
                 HIDDEN)),
        (_make, (P, ready, empty, since + table, left + row * left_row, left_step, left_head,
                 c + row * c_row, c_group, c_state, t_units, nearest, begin, end, A, i, PART, length, heads, group,
                 width, bc_width, segment, stop, start, N, STATES, TILE, PART, BD, STAGES, YES, LEFT, TERMS, FLOOR,
                 HIDDEN)),
        (_make, (Q, ready, empty, until + table, written + table, heads, ONE,
                 b + row * b_row, b_group, b_state, s_units, nearest, begin, end, A, j, ZERO, length, heads, group,
                 width, bc_width, segment, stop, start, N, STATES, TILE, PART, BD, STAGES, NO, YES, TERMS, FLOOR,
                 HIDDEN)),
        (_make, (Q, ready, empty, until + table, written + table, heads, ONE,
                 b + row * b_row, b_group, b_state, s_units, nearest, begin, end, A, j, PART, length, heads, group,
                 width, bc_width, segment, stop, start, N, STATES, TILE, PART, BD, STAGES, NO, YES, TERMS, FLOOR,
                 HIDDEN)),
        ],
        [4, 4, 4, 4],
        [REGISTERS, REGISTERS, REGISTERS, REGISTERS],
    )  # fmt: skip
