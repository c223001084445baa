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
def _rounded(x, BITS: gl.constexpr):
    """As `fused_kernels._rounded`."""
    if BITS == 16:
        x = x.to(gl.bfloat16)
    else:
        x = (x.to(gl.int32, bitcast=True) + 0x1000).to(gl.float32, bitcast=True)
    return x


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
def _make(ring, ready, empty, sums, factors, factors_step, factors_head, vectors, vector_group, vector_state,
          begin, end, A, tile, part, length, heads, group, width, bc_width, segment, chunks, start,
          N: gl.constexpr, STATES: gl.constexpr, TILE: gl.constexpr, PART: gl.constexpr, BD: gl.constexpr,
          STAGES: gl.constexpr, ROWS: gl.constexpr, FACTORS: gl.constexpr, BITS: gl.constexpr,
          FLOOR: gl.constexpr):  # fmt: skip
    """The factors of PART of a tile's rows (`sums` of Δ since its start, `factors` left, `vectors` c) or columns
    (`sums` until its end, right ⊙ Δ, b), state by state."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([PART * BD // 512, 4], [128 // BD, BD // 4], [4, 1], [1, 0])
    t = tile * TILE + part + gl.arange(0, PART, layout=gl.SliceLayout(1, LAYOUT))
    t_in = t < length
    d = gl.arange(0, BD, layout=gl.SliceLayout(0, LAYOUT))
    stage, phase = 0, 0
    for chunk in range(start, chunks):
        first, rest = _first(chunk, group, width, segment, BD)
        d_in = d < rest
        inside = t_in[:, None] & d_in[None, :]
        S = gl.load(sums + first + t[:, None] * heads + d[None, :], mask=inside, other=0.0)
        if not ROWS:
            gap = gl.load(end + first + d, mask=d_in, other=0.0) - gl.load(begin + first + d, mask=d_in, other=0.0)
            S += gl.where(inside, gap.to(gl.float32)[None, :], 0.0)
        if FACTORS:
            places = t[:, None] * factors_step + (first + d)[None, :] * factors_head
            factor = gl.load(factors + places, mask=inside, other=0.0)
        vectors_at = vectors + (first // bc_width) * vector_group + t
        for states in range(0, N, STATES):
            alive, count = _alive(begin, end, A, first, rest, heads, states, N, STATES, BD, FLOOR)
            n = states + _lowest(alive)
            A_n = gl.load(A + first + n * heads + d, mask=d_in, other=0.0)
            v_n = gl.load(vectors_at + n * vector_state)
            for _ in range(count):
                alive = alive & (alive - 1)
                n = states + _lowest(alive)
                A_next = gl.load(A + first + n * heads + d, mask=d_in, other=0.0)
                v_next = gl.load(vectors_at + n * vector_state)
                made = gl.exp2(S * A_n[None, :]) * v_n[:, None]
                if FACTORS:
                    made *= factor
                made = _rounded(made, BITS)
                mbarrier.wait(empty.index(stage), phase ^ 1)
                ring.index(stage).slice(part, PART).store(made)
                hopper.fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(ready.index(stage))
                A_n, v_n = A_next, v_next
                stage += 1
                phase = gl.where(stage == STAGES, phase ^ 1, phase)
                stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def _multiply(P, Q, ready, empty, begin, end, A, target, row_step, rows, columns, scale,
              heads, group, width, segment, chunks, start,
              N: gl.constexpr, STATES: gl.constexpr, TILE: gl.constexpr, BD: gl.constexpr, STAGES: gl.constexpr,
              BITS: gl.constexpr, FLOOR: gl.constexpr):  # fmt: skip
    """The sum of the products of what the two rings bring, into `target`."""
    SUM: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 256 // BITS])
    acc = hopper.warpgroup_mma_init(gl.zeros([TILE, TILE], gl.float32, layout=SUM))
    stage, phase, last = 0, 0, -1
    for chunk in range(start, chunks):
        first, rest = _first(chunk, group, width, segment, BD)
        for states in range(0, N, STATES):
            _bits, count = _alive(begin, end, A, first, rest, heads, states, N, STATES, BD, FLOOR)
            for _ in range(count):
                mbarrier.wait(ready.index(stage), phase)
                acc = hopper.warpgroup_mma(P.index(stage), Q.index(stage).permute((1, 0)), acc, is_async=True)
                acc = hopper.warpgroup_mma_init(hopper.warpgroup_mma_wait(1, deps=[acc]))
                mbarrier.arrive(empty.index(gl.maximum(last, 0)), pred=last >= 0)
                last = stage
                stage += 1
                phase = gl.where(stage == STAGES, phase ^ 1, phase)
                stage = gl.where(stage == STAGES, 0, stage)
    acc = hopper.warpgroup_mma_wait(0, deps=[acc])
    t = gl.arange(0, TILE, layout=gl.SliceLayout(1, SUM))
    s = gl.arange(0, TILE, layout=gl.SliceLayout(0, SUM))
    inside = (t < rows)[:, None] & (s < columns)[None, :]
    gl.store(target + t[:, None] * row_step + s[None, :], acc * scale, mask=inside)


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
    b_group,
    b_state,
    c_row,
    c_group,
    c_state,
    left_row,
    left_step,
    left_head,
    N: gl.constexpr,
    STATES: gl.constexpr,
    TILE: gl.constexpr,
    STRIP: gl.constexpr,
    BD: gl.constexpr,
    WHERE: gl.constexpr,
    LEFT: gl.constexpr,
    PRECISION: gl.constexpr,
    FLOOR: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """As `fused_kernels.tiles`, without "strip" and without "tf32x3"; of 4 warps, and 16 besides. `b` and `c` are
    (batch, bc_groups, N, tiles · TILE), with zeros after the sequence's end."""
    BITS: gl.constexpr = 16 if PRECISION == "bf16" else 32
    KIND: gl.constexpr = gl.bfloat16 if PRECISION == "bf16" else gl.float32
    YES: gl.constexpr = True
    NO: gl.constexpr = False
    ONE: gl.constexpr = 1
    ZERO: gl.constexpr = 0
    PART: gl.constexpr = TILE // 2
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, BD], KIND)

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
    if WHERE == "out":
        target += i.to(gl.int64) * TILE * length + j * TILE
        row_step = length
    else:
        target += pair.to(gl.int64) * TILE * TILE
        row_step = TILE
    P = gl.allocate_shared_memory(KIND, [STAGES, TILE, BD], SHARED)
    Q = gl.allocate_shared_memory(KIND, [STAGES, TILE, BD], SHARED)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for k in gl.static_range(STAGES):
        mbarrier.init(ready.index(k), count=4)
        mbarrier.init(empty.index(k), count=1)
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
        (_multiply, (P, Q, ready, empty, begin, end, A, target, row_step, length - i * TILE, length - j * TILE, scale,
                     heads, group, width, segment, stop, start, N, STATES, TILE, BD, STAGES, BITS, FLOOR)),
        (_make, (P, ready, empty, since + table, left + row * left_row, left_step, left_head,
                 c + row * c_row, c_group, c_state, begin, end, A, i, ZERO, length, heads, group, width, bc_width,
                 segment, stop, start, N, STATES, TILE, PART, BD, STAGES, YES, LEFT, BITS, FLOOR)),
        (_make, (P, ready, empty, since + table, left + row * left_row, left_step, left_head,
                 c + row * c_row, c_group, c_state, begin, end, A, i, PART, length, heads, group, width, bc_width,
                 segment, stop, start, N, STATES, TILE, PART, BD, STAGES, YES, LEFT, BITS, FLOOR)),
        (_make, (Q, ready, empty, until + table, written + table, heads, ONE,
                 b + row * b_row, b_group, b_state, begin, end, A, j, ZERO, length, heads, group, width, bc_width,
                 segment, stop, start, N, STATES, TILE, PART, BD, STAGES, NO, YES, BITS, FLOOR)),
        (_make, (Q, ready, empty, until + table, written + table, heads, ONE,
                 b + row * b_row, b_group, b_state, begin, end, A, j, PART, length, heads, group, width, bc_width,
                 segment, stop, start, N, STATES, TILE, PART, BD, STAGES, NO, YES, BITS, FLOOR)),
        ],
        [4, 4, 4, 4],
        [REGISTERS, REGISTERS, REGISTERS, REGISTERS],
    )  # fmt: skip
