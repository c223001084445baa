"""What stands around a Mamba-2's scan, by Triton kernels (`fused_parts_kernels`), for float32 on a GPU; optional.

The causal convolution with SiLU, the gated norm and the norms between layers are bound by memory: each kernel (some are
of `passes`) reads its inputs once, and the backward pass computes anew what the forward pass could have kept. Without
triton torch compiles or runs them.
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


def applicable(*tensors: Tensor) -> bool:
    """Whether the kernels take these: float32, on one GPU, channels side by side."""
    first = tensors[0]
    return (
        first.device.type == "cuda"
        and first.numel() > 0
        and all(t.device == first.device and native.is_plain(t, "cuda") and t.stride(-1) == 1 for t in tensors)
        and scalar_fused.available(first.device)
    )


def silu_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """SiLU(causal convolution) of `x` (batch, length, channels) by `weight` (channels, taps) and `bias` (channels,)."""
    return _SiluConvolution.apply(x, weight.contiguous(), bias)


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
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return passes.silu_convolution(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        x, weight, bias = ctx.saved_tensors
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        batch, length, channels = x.shape
        (grid, sizes), taps = passes.cut(x, weight), weight.shape[1]
        grad_total, grad_x = x.new_empty(x.shape), x.new_empty(x.shape)
        sums = x.new_empty(batch, grid[1], taps + 1, channels)
        with on(x):
            bound(_kernels().convolve_back_activation, **sizes)(
                grid, x, weight, bias, grad, grad_total, sums, length, *x.stride()[:2], *grad.stride()[:2]
            )
            bound(_kernels().convolve_back_input, **sizes)(grid, grad_total, weight, grad_x, length)
        by_taps = sums.sum((0, 1))
        return grad_x, by_taps[:taps].mT, by_taps[taps]


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
        flat_y, flat_z, given = _rows(y), _rows(z), _rows(grad if grad.stride(-1) == 1 else grad.contiguous())
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
        flat, given = _rows(x), _rows(grad if grad.stride(-1) == 1 else grad.contiguous())
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
