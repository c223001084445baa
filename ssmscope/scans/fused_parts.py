"""What stands around a scan, with gradients, by Triton kernels (`fused_parts_kernels`) on a GPU; optional.

The causal convolution with SiLU, the gate, the gated norm and the norms between layers are bound by memory: each kernel
(some are of `passes`) reads its inputs once, and the backward pass computes anew what the forward pass could have kept.
The convolution and the gate are of any floating type, the others of float32. Without triton torch does what they do.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssmscope.scans import native, passes, scalar_fused
from ssmscope.scans.launching import bound, on

TILE = 2048  # numbers of the rows that a norm's program takes at once
TIMES = 8  # that it does so for gradients
MOST = 1024  # channels of a norm: with more, a program's rows no longer fit
ANSWERS = 2**15  # of a cross-entropy, at most


def applicable(*tensors: Tensor | None, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """Whether the kernels take these: of these types, on one GPU, channels side by side."""
    given = [t for t in tensors if t is not None]
    first = given[0]
    if first.device.type != "cuda" or not first.numel() or torch.compiler.is_compiling():
        return False
    plain = native.are_plain(given, first.device, dtypes) and all(t.stride(-1) == 1 for t in given)
    return plain and scalar_fused.available(first.device)


def silu_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *, wide: bool = False) -> Tensor:
    """As `passes.silu_convolution`."""
    return _SiluConvolution.apply(x, weight.contiguous(), bias, not wide, wide)


def silu_convolution_and_wide(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `passes.silu_convolution_and_wide`."""
    return _SiluConvolution.apply(x, weight.contiguous(), bias, True, True)


def gated(y: Tensor, z: Tensor) -> Tensor:
    """As `passes.gated`."""
    return _Gate.apply(y, z)


def gated_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · RMSNorm(y ⊙ SiLU(z)) of vectors (…, channels)."""
    return _GatedNorm.apply(y, z, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · RMSNorm(x) of vectors (…, channels)."""
    return _RmsNorm.apply(x, weight, eps)


def cross_entropy(logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
    """The mean cross-entropy of `logits` (rows, answers) and `targets` (rows,) that are not `ignored`; the gradient
    reads the logits again, and nothing of their size is kept."""
    return _CrossEntropy.apply(logits, targets, ignored)


class _SiluConvolution(torch.autograd.Function):
    """In x's `own` type, in a `wide` one, or both."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, own: bool, wide: bool) -> Any:
        ctx.save_for_backward(x, weight, bias)
        ctx.set_materialize_grads(False)
        if own and wide:
            return passes.silu_convolution_and_wide(x, weight, bias)
        return passes.silu_convolution(x, weight, bias, wide=wide)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        given = [_side_by_side(grad) for grad in grads if grad is not None]
        if not given:
            return (None,) * 5
        batch, length, channels = x.shape
        (grid, sizes), taps = passes.cut(x, weight, *passes.CONVOLVED_BACK), weight.shape[1]
        grad_total, grad_x = x.new_empty(x.shape, dtype=torch.float32), x.new_empty(x.shape)
        summed = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        sums = grad_total.new_empty(batch, grid[1], taps + 1, channels) if summed else grad_total
        terms = (x, weight, x.new_zeros(channels) if bias is None else bias, given[0], given[-1], grad_total, sums)
        strides = (stride for t in (x, given[0], given[-1]) for stride in t.stride()[:2])
        with on(x):
            bound(_kernels().convolve_back_activation, **sizes, BOTH=len(given) == 2, SUMMED=summed)(
                grid, *terms, length, *strides
            )
            bound(_kernels().convolve_back_input, **sizes)(grid, grad_total, weight, grad_x, length)
        if not summed:
            return grad_x, None, None, None, None
        by_taps = sums.sum((0, 1)).to(weight.dtype)
        return grad_x, by_taps[:taps].mT, None if bias is None else by_taps[taps], None, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, z: Tensor) -> Tensor:
        ctx.save_for_backward(y, z)
        return passes.gated(y, z)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        y, z = ctx.saved_tensors
        grad = _side_by_side(grad)
        (batch, length, channels), width = z.shape, min(scalar_fused._power(z.shape[2], 16), 1024)
        grad_y, grad_z = y.new_empty(y.shape), z.new_empty(z.shape)
        strides = (stride for t in (y, z, grad) for stride in t.stride()[:2])
        with on(z):
            bound(_kernels().gate_back, CHANNELS=channels, WIDTH=width, num_warps=4)(
                (batch, length, -(-channels // width)), y, z, grad, grad_y, grad_z, length, *strides
            )
        return grad_y, grad_z


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat_y, flat_z = _rows(y), _rows(z)
        out = y.new_empty(y.shape)
        sizes = _norm_sizes(y)
        with on(y):
            bound(_kernels().norm, **sizes)(
                (-(-len(flat_y) // sizes["ROWS"]),),
                *(flat_y, flat_z, weight, out, len(flat_y), eps, flat_y.stride(0), flat_z.stride(0)),
            )
        ctx.save_for_backward(y, z, weight)
        ctx.eps = eps
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, z, weight = ctx.saved_tensors
        flat_y, flat_z, given = _rows(y), _rows(z), _rows(_side_by_side(grad))
        sizes, programs = _back_sizes(flat_y)
        grad_y, grad_z, sums = y.new_empty(y.shape), y.new_empty(y.shape), y.new_empty(programs, y.shape[-1])
        strides = (flat_y.stride(0), flat_z.stride(0), given.stride(0))
        with on(y):
            bound(_kernels().norm_back, **sizes)(
                (programs,), flat_y, flat_z, weight, given, grad_y, grad_z, sums, len(flat_y), ctx.eps, *strides
            )
        return grad_y, grad_z, sums.sum(0), None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return passes.rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat, given = _rows(x), _rows(_side_by_side(grad))
        sizes, programs = _back_sizes(flat)
        grad_x, sums = x.new_empty(x.shape), x.new_empty(programs, x.shape[-1])
        with on(x):
            bound(_kernels().rms_norm_back, **sizes)(
                (programs,), flat, weight, given, grad_x, sums, len(flat), ctx.eps, flat.stride(0), given.stride(0)
            )
        return grad_x, sums.sum(0), None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, ignored: int) -> Tensor:
        log_sums, losses = (logits.new_empty(len(logits)) for _ in range(2))
        sizes = _loss_sizes(logits)
        with on(logits):
            bound(_kernels().cross_entropy, **sizes)(
                (len(logits),), logits, targets, log_sums, losses, logits.shape[1], logits.stride(0), ignored
            )
        asked = (targets != ignored).sum()
        ctx.save_for_backward(logits, targets, log_sums, asked)
        ctx.ignored = ignored
        return losses.sum() / asked

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, targets, log_sums, asked = ctx.saved_tensors
        grad_logits = logits.new_empty(logits.shape)
        scale, sizes = grad / asked, _loss_sizes(logits)
        with on(logits):
            bound(_kernels().cross_entropy_back, **sizes)(
                (len(logits),),
                *(logits, targets, log_sums, scale, grad_logits, logits.shape[1], logits.stride(0), ctx.ignored),
            )
        return grad_logits, None, None


def _loss_sizes(logits: Tensor) -> dict[str, Any]:
    width = scalar_fused._power(logits.shape[1], 16)
    return {"WIDTH": width, "num_warps": min(16, max(4, width // 512))}


def _side_by_side(grad: Tensor) -> Tensor:
    return grad if grad.stride(-1) == 1 else grad.contiguous()


def _rows(t: Tensor) -> Tensor:
    """(…, channels) as (rows, channels), copied where its rows are not evenly spaced."""
    return t.reshape(-1, t.shape[-1])


def _norm_sizes(y: Tensor) -> dict[str, Any]:
    width = scalar_fused._power(y.shape[-1], 16)
    return {"CHANNELS": y.shape[-1], "ROWS": max(1, TILE // width), "WIDTH": width, "num_warps": 4}


def _back_sizes(rows: Tensor) -> tuple[dict[str, Any], int]:
    """The constants of a norm's gradient, and how many programs it takes."""
    sizes = {**_norm_sizes(rows), "TIMES": TIMES}
    return sizes, -(-len(rows) // (sizes["ROWS"] * TIMES))


@functools.cache
def _kernels() -> ModuleType:
    from ssmscope.scans import fused_parts_kernels

    return fused_parts_kernels
