"""Triton kernels of what stands around a scan: the gradients of the causal convolution with SiLU and of the gate, and
the gated norm.

Imported by `ssmscope.scans.fused_parts` alone, where triton is installed. Channels lie side by side; strides are those
of batch and step, or of rows. Arithmetic is in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ssmscope.scans.passes_kernels import pre_activation


@triton.jit(do_not_specialize=["length"])
def convolve_back_activation(
    x, weight, bias, grad_y, grad_wide, grad_total, sums,
    length, row_stride, step_stride, grad_row, grad_step, wide_row, wide_step,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr, BOTH: tl.constexpr,
    SUMMED: tl.constexpr,
):  # fmt: skip
    """The gradient by the convolution before SiLU (batch, length, channels), from that of y, with BOTH from that of its
    copy too; with SUMMED also each program's part of those by weight and bias, `sums` (batch, programs, TAPS + 1,
    channels)."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = part * STEPS + tl.arange(0, STEPS)
    c = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    real = (t < length)[:, None] & (c < CHANNELS)[None, :]
    total = pre_activation(x, weight, bias, row, t, c, real, row_stride, step_stride, CHANNELS, TAPS)
    gate = tl.sigmoid(total)
    at = row * grad_row + t.to(tl.int64)[:, None] * grad_step + c[None, :]
    grad = tl.load(grad_y + at, mask=real, other=0.0).to(tl.float32)
    if BOTH:
        at = row * wide_row + t.to(tl.int64)[:, None] * wide_step + c[None, :]
        grad += tl.load(grad_wide + at, mask=real, other=0.0).to(tl.float32)
    grad = grad * gate * (1.0 + total * (1.0 - gate))
    tl.store(grad_total + (row * length + t[:, None]) * CHANNELS + c[None, :], grad, mask=real)
    if SUMMED:
        place = sums + ((row * tl.num_programs(1) + part) * (TAPS + 1)) * CHANNELS + c
        for j in tl.static_range(TAPS):
            s = t - (TAPS - 1) + j
            at = row * row_stride + s.to(tl.int64)[:, None] * step_stride + c[None, :]
            found = tl.load(x + at, mask=real & (s >= 0)[:, None], other=0.0).to(tl.float32)
            tl.store(place + j * CHANNELS, tl.sum(grad * found, axis=0), mask=c < CHANNELS)
        tl.store(place + TAPS * CHANNELS, tl.sum(grad, axis=0), mask=c < CHANNELS)


@triton.jit(do_not_specialize=["length"])
def convolve_back_input(
    grad_total, weight, grad_x, length,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, STEPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient by the convolution's input, Σ_j weight_{c,j} grad_total_{t + TAPS − 1 − j, c}."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = part * STEPS + tl.arange(0, STEPS)
    c = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    real = (t < length)[:, None] & (c < CHANNELS)[None, :]
    total = tl.zeros((STEPS, WIDTH), tl.float32)
    for j in tl.static_range(TAPS):
        s = t + (TAPS - 1) - j
        found = tl.load(
            grad_total + (row * length + s[:, None]) * CHANNELS + c[None, :],
            mask=(s < length)[:, None] & (c < CHANNELS)[None, :],
            other=0.0,
        )
        total += found * tl.load(weight + c * TAPS + j, mask=c < CHANNELS, other=0.0).to(tl.float32)[None, :]
    at = (row * length + t[:, None]) * CHANNELS + c[None, :]
    tl.store(grad_x + at, total.to(grad_x.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["length"])
def gate_back(
    y, z, grad, grad_y, grad_z, length, y_row, y_step, z_row, z_step, grad_row, grad_step,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients of y ⊙ SiLU(z) by y and z, (batch, length, channels); a program has one step."""
    row, t = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    c = tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    real = c < CHANNELS
    opened = tl.load(z + row * z_row + t * z_step + c, mask=real, other=0.0).to(tl.float32)
    value = tl.load(y + row * y_row + t * y_step + c, mask=real, other=0.0).to(tl.float32)
    given = tl.load(grad + row * grad_row + t * grad_step + c, mask=real, other=0.0).to(tl.float32)
    gate = tl.sigmoid(opened)
    at = (row * length + t) * CHANNELS + c
    tl.store(grad_y + at, (given * opened * gate).to(grad_y.dtype.element_ty), mask=real)
    found = given * value * gate * (1.0 + opened * (1.0 - gate))
    tl.store(grad_z + at, found.to(grad_z.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def norm(
    y, z, weight, out, rows, eps, y_stride, z_stride, CHANNELS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """weight · RMSNorm(y ⊙ SiLU(z)), of rows (rows, channels)."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, WIDTH)
    real = (r < rows)[:, None] & (c < CHANNELS)[None, :]
    z_value = tl.load(z + r[:, None] * z_stride + c[None, :], mask=real, other=0.0)
    opened = tl.load(y + r[:, None] * y_stride + c[None, :], mask=real, other=0.0) * z_value * tl.sigmoid(z_value)
    factor = tl.rsqrt(tl.sum(opened * opened, axis=1) / CHANNELS + eps)
    scale = tl.load(weight + c, mask=c < CHANNELS, other=0.0)
    tl.store(out + r[:, None] * CHANNELS + c[None, :], opened * factor[:, None] * scale[None, :], mask=real)


@triton.jit(do_not_specialize=["rows"])
def norm_back(
    y, z, weight, grad, grad_y, grad_z, sums, rows, eps, y_stride, z_stride, grad_stride,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """The gradients of `norm` by y and z, each program's part of that by the weight, `sums` (programs, channels); a
    program takes ROWS rows TIMES times."""
    c = tl.arange(0, WIDTH)
    scale = tl.load(weight + c, mask=c < CHANNELS, other=0.0)[None, :]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for i in range(TIMES):
        r = (tl.program_id(0).to(tl.int64) * TIMES + i) * ROWS + tl.arange(0, ROWS)
        real = (r < rows)[:, None] & (c < CHANNELS)[None, :]
        z_value = tl.load(z + r[:, None] * z_stride + c[None, :], mask=real, other=0.0)
        y_value = tl.load(y + r[:, None] * y_stride + c[None, :], mask=real, other=0.0)
        gate = tl.sigmoid(z_value)
        open_z = z_value * gate
        opened = y_value * open_z
        given = tl.load(grad + r[:, None] * grad_stride + c[None, :], mask=real, other=0.0)
        by_opened, by_weight = by_normed(opened, given, scale, eps, CHANNELS)
        total += by_weight
        at = r[:, None] * CHANNELS + c[None, :]
        tl.store(grad_y + at, by_opened * open_z, mask=real)
        tl.store(grad_z + at, by_opened * y_value * gate * (1.0 + z_value * (1.0 - gate)), mask=real)
    tl.store(sums + tl.program_id(0) * CHANNELS + c, tl.sum(total, axis=0), mask=c < CHANNELS)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_back(
    x, weight, grad, grad_x, sums, rows, eps, x_stride, grad_stride,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """The gradients of weight · RMSNorm(x), as `norm_back`."""
    c = tl.arange(0, WIDTH)
    scale = tl.load(weight + c, mask=c < CHANNELS, other=0.0)[None, :]
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for i in range(TIMES):
        r = (tl.program_id(0).to(tl.int64) * TIMES + i) * ROWS + tl.arange(0, ROWS)
        real = (r < rows)[:, None] & (c < CHANNELS)[None, :]
        value = tl.load(x + r[:, None] * x_stride + c[None, :], mask=real, other=0.0)
        given = tl.load(grad + r[:, None] * grad_stride + c[None, :], mask=real, other=0.0)
        by_x, by_weight = by_normed(value, given, scale, eps, CHANNELS)
        total += by_weight
        tl.store(grad_x + r[:, None] * CHANNELS + c[None, :], by_x, mask=real)
    tl.store(sums + tl.program_id(0) * CHANNELS + c, tl.sum(total, axis=0), mask=c < CHANNELS)


@triton.jit
def cross_entropy(logits, targets, log_sums, losses, answers, row_stride, ignored, WIDTH: tl.constexpr):
    """Of a row of logits (rows, answers) the logarithm of the sum of exponentials, and that less the target's logit, 0
    where the target is the ignored one."""
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    value = tl.load(logits + row * row_stride + c, mask=c < answers, other=float("-inf"))
    most = tl.max(value, axis=0)
    log_sum = most + tl.log(tl.sum(tl.exp(value - most), axis=0))
    target = tl.load(targets + row)
    own = tl.sum(tl.where(c == target, value, 0.0), axis=0)
    tl.store(log_sums + row, log_sum)
    tl.store(losses + row, tl.where(target == ignored, 0.0, log_sum - own))


@triton.jit
def cross_entropy_back(logits, targets, log_sums, scale, grad, answers, row_stride, ignored, WIDTH: tl.constexpr):
    """scale · (softmax of a row − 1 at the target), 0 where the target is the ignored one; `scale` is one number."""
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    target = tl.load(targets + row)
    factor = tl.where(target == ignored, 0.0, tl.load(scale))
    value = tl.load(logits + row * row_stride + c, mask=c < answers, other=float("-inf"))
    share = tl.exp(value - tl.load(log_sums + row)) - tl.where(c == target, 1.0, 0.0)
    tl.store(grad + row * answers + c, factor * share, mask=c < answers)


@triton.jit
def by_normed(value, given, scale, eps, CHANNELS: tl.constexpr):
    """The gradients of scale · RMSNorm(value) by the value and, of each row, by the scale."""
    factor = tl.rsqrt(tl.sum(value * value, axis=1) / CHANNELS + eps)[:, None]
    normed = value * factor
    by_weight = given * normed
    given = given * scale
    return factor * (given - normed * (tl.sum(given * normed, axis=1) / CHANNELS)[:, None]), by_weight


INTERPRETED = not isinstance(norm, triton.JITFunction)
"""Whether triton interprets kernels in numpy (TRITON_INTERPRET=1 when it was imported): they then take CPU tensors."""
