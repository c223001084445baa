"""Triton kernels of passes over a layer's terms that no gradient flows through.

Imported by `ssmscope.scans.passes` and `fused_parts_kernels` alone, where triton is installed. Inputs are of any
floating type, arithmetic is in float32; channels lie side by side, strides are those of batch and step.
"""

import triton
import triton.language as tl

NOTHING: tl.constexpr = tl.constexpr(-151.0)
"""2 to the power of this, or of less, is 0."""
INTERPRETED_HERE: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def pre_activation(x, weight, bias, row, t, c, real, row_stride, step_stride, CHANNELS, TAPS: tl.constexpr):
    """bias_c + Σ_j weight_{c,j} x_{t − TAPS + 1 + j, c} at steps `t` and channels `c`, zeros before the first step."""
    wide = c < CHANNELS
    total = tl.load(bias + c, mask=wide, other=0.0).to(tl.float32)[None, :]
    for j in tl.static_range(TAPS):
        s = t - (TAPS - 1) + j
        at = row * row_stride + s.to(tl.int64)[:, None] * step_stride + c[None, :]
        found = tl.load(x + at, mask=real & (s >= 0)[:, None], other=0.0).to(tl.float32)
        total += found * tl.load(weight + c * TAPS + j, mask=wide, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["length"])
def convolve(
    x, weight, bias, y, wide, length, row_stride, step_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr, BOTH: tl.constexpr,
):  # fmt: skip
    """y = SiLU(causal convolution of x), (batch, length, channels), rounded to x's type, with BOTH `wide`, the same in
    float32; a program has STEPS steps of WIDTH channels."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = part * STEPS + tl.arange(0, STEPS)
    c = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    real = (t < length)[:, None] & (c < CHANNELS)[None, :]
    total = pre_activation(x, weight, bias, row, t, c, real, row_stride, step_stride, CHANNELS, TAPS)
    at = (row * length + t[:, None]) * CHANNELS + c[None, :]
    found = (total * tl.sigmoid(total)).to(x.dtype.element_ty)
    tl.store(y + at, found.to(y.dtype.element_ty), mask=real)
    if BOTH:
        tl.store(wide + at, found.to(tl.float32), mask=real)


@triton.jit(do_not_specialize=["length"])
def gate(
    y, z, out, length, y_row, y_step, z_row, z_step,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out = y ⊙ SiLU(z), (batch, length, channels), of `out`'s type; a program has one step."""
    row, t = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    real = c < CHANNELS
    opened = tl.load(z + row * z_row + t * z_step + c, mask=real, other=0.0).to(tl.float32)
    found = tl.load(y + row * y_row + t * y_step + c, mask=real, other=0.0).to(tl.float32)
    found = found * opened * tl.sigmoid(opened)
    tl.store(out + (row * length + t) * CHANNELS + c, found.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["length"])
def norm(
    y, z, weight, out, length, eps, y_row, y_step, z_row, z_step,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out = weight · RMSNorm(y ⊙ SiLU(z)) over each SIZE neighbouring channels; a program has those of one step."""
    row, t = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    within = tl.arange(0, WIDTH)
    real = within < SIZE
    c = tl.program_id(2) * SIZE + within
    opened = tl.load(z + row * z_row + t * z_step + c, mask=real, other=0.0).to(tl.float32)
    found = tl.load(y + row * y_row + t * y_step + c, mask=real, other=0.0).to(tl.float32)
    found = found * opened * tl.sigmoid(opened)
    found = found * tl.rsqrt(tl.sum(found * found, axis=0) / SIZE + eps)
    found = found * tl.load(weight + c, mask=real, other=0.0).to(tl.float32)
    tl.store(out + (row * length + t) * CHANNELS + c, found.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["length"])
def widen(x, out, length, x_row, x_step, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """out = x in float32, (batch, length, channels); a program has one step."""
    row, t = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    value = tl.load(x + row * x_row + t * x_step + c, mask=c < CHANNELS, other=0.0).to(tl.float32)
    tl.store(out + (row * length + t) * CHANNELS + c, value, mask=c < CHANNELS)


@triton.jit(do_not_specialize=["length"])
def softplus(x, out, length, x_row, x_step, CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """out = log(1 + eˣ) in float32, (batch, length, channels); a program has one step."""
    row, t = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    real = c < CHANNELS
    value = tl.load(x + row * x_row + t * x_step + c, mask=real, other=0.0).to(tl.float32)
    tl.store(out + (row * length + t) * CHANNELS + c, softplus_of(value), mask=real)


@triton.jit(do_not_specialize=["rows"])
def project_and_softplus(
    x, weight, bias, out, sums, rows, x_row,
    CHANNELS: tl.constexpr, INNER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out = log(1 + eᵛ) in float32 of v = x weightᵀ + bias, x (rows, INNER) of 16 bits, weight (CHANNELS, INNER), and
    `sums` (rows / ROWS, CHANNELS) of it over each ROWS rows."""
    t, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    real, valid, k = t < rows, c < CHANNELS, tl.arange(0, DEPTH)
    value = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(0, INNER, DEPTH):
        known = first + k < INNER
        at = x + t.to(tl.int64)[:, None] * x_row + (first + k)[None, :]
        left = tl.load(at, mask=real[:, None] & known[None, :], other=0.0)
        at = weight + c[:, None] * INNER + (first + k)[None, :]
        right = tl.load(at, mask=valid[:, None] & known[None, :], other=0.0)
        if INTERPRETED_HERE:  # the interpreter multiplies bfloat16 by their bits
            left, right = left.to(tl.float32), right.to(tl.float32)
        value = tl.dot(left, tl.trans(right), value)
    value += tl.load(bias + c, mask=valid, other=0.0).to(tl.float32)[None, :]
    found = tl.where(real[:, None], softplus_of(value), 0.0)
    place = out + t.to(tl.int64)[:, None] * CHANNELS + c[None, :]
    tl.store(place, found, mask=real[:, None] & valid[None, :])
    tl.store(sums + tl.program_id(0).to(tl.int64) * CHANNELS + c, tl.sum(found, axis=0), mask=valid)


@triton.jit
def softplus_of(value):
    """log(1 + eᵛ), as max(v, 0) + 2 atanh(u / (2 + u)) with u = e^−|v|: the argument is at most a third, and of its odd
    powers those up to the 15th matter. log(1 + u) would lose the digits of a small u."""
    u = tl.exp(-tl.abs(value))
    s = u / (2.0 + u)
    square = s * s
    series = square * (1.0 / 15.0) + (1.0 / 13.0)
    for k in tl.static_range(6):
        series = series * square + 1.0 / (11 - 2 * k)
    return tl.maximum(value, 0.0) + 2.0 * s * series


@triton.jit(do_not_specialize=["rows"])
def rms_norm(
    x, weight, out, rows, eps, x_row,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """out = weight · RMSNorm(x) of rows (rows, channels), rounded to x's type before the weight, as libraries do."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    real = (r < rows)[:, None] & (c < CHANNELS)[None, :]
    value = tl.load(x + r[:, None] * x_row + c[None, :], mask=real, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, axis=1) / CHANNELS + eps)[:, None]
    if WEIGHTED:
        value = value.to(x.dtype.element_ty).to(tl.float32)
        value = value * tl.load(weight + c, mask=c < CHANNELS, other=0.0).to(tl.float32)[None, :]
    tl.store(out + r[:, None] * CHANNELS + c[None, :], value.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def add_and_norm(
    x, added, weight, total, out, rows, eps, x_row, added_row,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """total = x + added, and out = `rms_norm` of it rounded to the weight's type, of rows (rows, channels)."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    real = (r < rows)[:, None] & (c < CHANNELS)[None, :]
    value = tl.load(x + r[:, None] * x_row + c[None, :], mask=real, other=0.0).to(tl.float32)
    value += tl.load(added + r[:, None] * added_row + c[None, :], mask=real, other=0.0).to(tl.float32)
    value = value.to(total.dtype.element_ty)
    at = r[:, None] * CHANNELS + c[None, :]
    tl.store(total + at, value, mask=real)
    value = value.to(out.dtype.element_ty).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, axis=1) / CHANNELS + eps)[:, None]
    value = value.to(out.dtype.element_ty).to(tl.float32)
    value = value * tl.load(weight + c, mask=c < CHANNELS, other=0.0).to(tl.float32)[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows", "length"])
def lengths(
    x, out, rows, heads, length, x_row, x_step, x_head, WIDTH: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr
):
    """The lengths of the vectors of (batch, length, heads, width), one after the other."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, PADDED)
    at = r // (length * heads) * x_row + r // heads % length * x_step + r % heads * x_head
    real = (r < rows)[:, None] & (c < WIDTH)[None, :]
    value = tl.load(x + at[:, None] + c[None, :], mask=real, other=0.0).to(tl.float32)
    tl.store(out + r, tl.sqrt(tl.sum(value * value, axis=1)), mask=r < rows)


@triton.jit(do_not_specialize=["length"])
def left(
    x, delta, rates, b, after, out, length, channels, groups,
    x_row, x_step, x_channel, delta_row, delta_step, delta_channel, b_row, b_step, b_group, b_state,
    N: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, TILES: tl.constexpr,
    EACH: tl.constexpr,
):  # fmt: skip
    """‖R_s‖ of BLOCK channels of one group at TILES times STEPS positions, the last first: |x_s Δ_s| times the length
    of the key b_s ⊙ exp(A S_s), S_s the Δ after s. `rates` (states, channels) is A / log 2 twice, for the square of the
    exponential; `after` (batch, chunks, channels) are those Δ after the chunk. The last states of which nothing is left
    are not looked at.

    With EACH `out` is (batch, length, channels), else (blocks of channels, batch, length), their sums.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    share = channels // groups
    blocks = tl.cdiv(share, BLOCK)
    group, block = tl.program_id(2) // blocks, tl.program_id(2) % blocks
    own = block * BLOCK + tl.arange(0, BLOCK)
    valid = own < share
    d, within = group * share + own, tl.arange(0, STEPS)
    carried = tl.load(after + (row * tl.num_programs(1) + chunk) * channels + d, mask=valid, other=0.0)
    every = tl.arange(0, STATES)
    known = (every < N)[:, None] & valid[None, :]
    of_every = tl.load(rates + every[:, None] * channels + d[None, :], mask=known, other=0.0)
    gone = (of_every * carried[None, :] < NOTHING) | ~known  # of every step of the chunk; what is NaN is not gone
    alive = tl.max(tl.where(gone, 0, every[:, None] + 1))
    for i in range(TILES):
        t = (chunk * TILES + TILES - 1 - i) * STEPS + within
        real = (t < length)[:, None] & valid[None, :]
        at = delta + row * delta_row + t[:, None] * delta_step + d[None, :] * delta_channel
        step = tl.load(at, mask=real, other=0.0)
        behind = ((within + 1 < STEPS) & (t + 1 < length))[:, None] & valid[None, :]
        S = tl.cumsum(tl.load(at + delta_step, mask=behind, other=0.0), axis=0, reverse=True) + carried[None, :]
        square = tl.zeros((STEPS, BLOCK), tl.float32)
        keys = b + row * b_row + t * b_step + group * b_group
        for n in range(alive):
            rate = tl.load(rates + n * channels + d, mask=valid, other=0.0)
            key = tl.load(keys + n * b_state, mask=t < length, other=0.0).to(tl.float32)
            square += tl.exp2(rate[None, :] * S) * (key * key)[:, None]
        place = x + row * x_row + t[:, None] * x_step + d[None, :] * x_channel
        written = tl.load(place, mask=real, other=0.0).to(tl.float32) * step
        found = tl.abs(written) * tl.sqrt(square)
        if EACH:
            tl.store(out + (row * length + t[:, None]) * channels + d[None, :], found, mask=real)
        else:
            program = tl.program_id(2).to(tl.int64) * tl.num_programs(0) + row
            tl.store(out + program * length + t, tl.sum(tl.where(real, found, 0.0), axis=1), mask=t < length)
        carried += tl.sum(step, axis=0)


@triton.jit(do_not_specialize=["chunks"])
def later_sums(totals, after, chunks, channels, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """after = what stands behind each chunk in `totals` (batch, chunks, channels), summed in float64."""
    row = tl.program_id(0).to(tl.int64)
    k, d = tl.arange(0, CHUNKS), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = (row * chunks + k[:, None]) * channels + d[None, :]
    behind = (k + 1 < chunks)[:, None] & (d < channels)[None, :]
    found = tl.load(totals + at + channels, mask=behind, other=0.0).to(tl.float64)
    found = tl.cumsum(found, axis=0, reverse=True)
    tl.store(after + at, found.to(tl.float32), mask=(k < chunks)[:, None] & (d < channels)[None, :])


@triton.jit(do_not_specialize=["length"])
def left_of_heads(
    x, delta, rates, keys, after, out, length, heads, groups,
    x_row, x_step, x_head, delta_row, delta_step, delta_head,
    P: tl.constexpr, WIDTH: tl.constexpr, STEPS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """‖R_s‖ of STEPS positions of a head: ‖x_s‖ |Δ_s| exp(A S_s) ‖b_s‖, S_s the Δ after s. `rates` (heads,) is
    A / log 2, `keys` (batch, length, groups) are ‖b_s‖; `after` (batch, chunks, heads) are the Δ after the chunk.

    With EACH `out` is (batch, length, heads), else (heads, batch, length).
    """
    row, chunk, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    within, p = tl.arange(0, STEPS), tl.arange(0, WIDTH)
    t = chunk * STEPS + within
    real = t < length
    at = delta + row * delta_row + t * delta_step + head * delta_head
    step = tl.load(at, mask=real, other=0.0)
    behind = (within + 1 < STEPS) & (t + 1 < length)
    S = tl.cumsum(tl.load(at + delta_step, mask=behind, other=0.0), axis=0, reverse=True)
    S += tl.load(after + (row * tl.num_programs(1) + chunk) * heads + head)
    place = x + row * x_row + t[:, None] * x_step + head * x_head + p[None, :]
    value = tl.load(place, mask=real[:, None] & (p < P)[None, :], other=0.0).to(tl.float32)
    group = head // (heads // groups)
    found = tl.sqrt(tl.sum(value * value, axis=1)) * tl.abs(step) * tl.exp2(tl.load(rates + head) * S)
    found = found * tl.load(keys + (row * length + t) * groups + group, mask=real, other=0.0)
    if EACH:
        tl.store(out + (row * length + t) * heads + head, found, mask=real)
    else:
        tl.store(out + (head * tl.num_programs(0) + row) * length + t, found, mask=real)


INTERPRETED = not isinstance(convolve, triton.JITFunction)
"""Whether triton interprets kernels in numpy (TRITON_INTERPRET=1 when it was imported): they then take CPU tensors."""
