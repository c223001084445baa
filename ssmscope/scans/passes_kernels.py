"""Triton kernels of passes over a layer's terms that no gradient flows through.

Imported by `ssmscope.scans.passes` and `fused_parts_kernels` alone, where triton is installed. Inputs are of any
floating type, arithmetic is in float32; channels lie side by side, strides are those of batch and step.
"""

import triton
import triton.language as tl


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


@triton.jit
def convolve(
    x, weight, bias, y, length, row_stride, step_stride,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """y = SiLU(causal convolution of x), (batch, length, channels); a program has STEPS steps of WIDTH channels."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = part * STEPS + tl.arange(0, STEPS)
    c = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    real = (t < length)[:, None] & (c < CHANNELS)[None, :]
    total = pre_activation(x, weight, bias, row, t, c, real, row_stride, step_stride, CHANNELS, TAPS)
    at = (row * length + t[:, None]) * CHANNELS + c[None, :]
    tl.store(y + at, (total * tl.sigmoid(total)).to(y.dtype.element_ty), mask=real)


@triton.jit
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


@triton.jit
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


@triton.jit
def left(
    x, delta, A, b, after, out, length, channels, groups,
    x_row, x_step, x_channel, delta_row, delta_step, delta_channel, b_row, b_step, b_group, b_state,
    N: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
    FLOOR: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """‖R_s‖ of BLOCK channels of one group at STEPS positions, the last first: |x_s Δ_s| times the length of the key
    b_s ⊙ exp(A S_s), S_s the Δ after s: `after` (batch, chunks, channels), float64, those after the chunk.

    With EACH `out` is (batch, length, channels), else (blocks of channels, batch, length), their sums.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    share = channels // groups
    blocks = tl.cdiv(share, BLOCK)
    group, block = tl.program_id(2) // blocks, tl.program_id(2) % blocks
    own = block * BLOCK + tl.arange(0, BLOCK)
    valid = own < share
    d, n = group * share + own, tl.arange(0, STATES)
    real = n < N
    decays = tl.load(A + d[:, None] * N + n[None, :], mask=valid[:, None] & real[None, :], other=0.0)
    S = tl.load(after + (row * tl.num_programs(1) + chunk) * channels + d, mask=valid, other=0.0)
    for i in range(STEPS):
        t = chunk * STEPS + STEPS - 1 - i
        if t < length:
            step = tl.load(delta + row * delta_row + t * delta_step + d * delta_channel, mask=valid, other=0.0)
            value = tl.load(x + row * x_row + t * x_step + d * x_channel, mask=valid, other=0.0)
            key = tl.load(b + row * b_row + t * b_step + group * b_group + n * b_state, mask=real, other=0.0)
            exponent = decays * S.to(tl.float32)[:, None]
            key = tl.exp(tl.where(exponent < FLOOR, FLOOR, exponent)) * key[None, :]
            found = tl.abs(value * step) * tl.sqrt(tl.sum(key * key, axis=1))
            if EACH:
                tl.store(out + (row * length + t) * channels + d, found, mask=valid)
            else:
                place = (tl.program_id(2).to(tl.int64) * tl.num_programs(0) + row) * length + t
                tl.store(out + place, tl.sum(tl.where(valid, found, 0.0), axis=0))
            S += step.to(tl.float64)


INTERPRETED = not isinstance(convolve, triton.JITFunction)
"""Whether triton interprets kernels in numpy (TRITON_INTERPRET=1 when it was imported): they then take CPU tensors."""
