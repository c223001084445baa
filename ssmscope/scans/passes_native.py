"""Passes over a layer's terms by C kernels (`passes.c`), for float32 on a CPU, with gradients; optional, silent when
absent.

Each reads its inputs once, where torch writes what it makes on the way. `passes` has those for a GPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ssmscope.scans import building
from ssmscope.scans.building import address
from ssmscope.scans.native import SMALL, is_plain

SOURCE = Path(__file__).with_name("passes.c")
TAPS = 8  # of a convolution, at most
STEPS = 64  # rows whose gradients of a weight are added up together: STEPS of the source


def applicable(*tensors: Tensor | None) -> bool:
    """Whether the kernels take these: float32, on a CPU, channels side by side, of three dimensions at most."""
    given = [t for t in tensors if t is not None]
    plain = all(is_plain(t, "cpu") and t.ndim <= 3 and t.stride(-1) == 1 for t in given)
    return plain and not torch.compiler.is_compiling() and available()


def silu_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor | None) -> Tensor:
    """SiLU(causal convolution) of `x` (batch, length, channels) by `weight` (channels, taps), the current position's
    last, at most TAPS of them, and `bias` (channels,), with the taps − 1 inputs before the first position in `tail`,
    zeros when absent."""
    return _run(_Convolution, _convolved, x, weight, bias, tail)


def gated_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float, size: int) -> Tensor:
    """weight · RMSNorm(y ⊙ SiLU(z)) of (batch, length, channels) over each `size` neighbours."""
    return _run(_Norm, _normed, y, z, weight, eps, size)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight · RMSNorm(x) of (batch, length, channels)."""
    return _run(_Norm, _normed, x, None, weight, eps, x.shape[2])


def add_and_rms_norm(x: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + added of (batch, length, channels), and `rms_norm` of that, in one pass, without gradients."""
    total, out = x.new_empty(x.shape), x.new_empty(x.shape)
    terms = (_shape(x), _view(x), _view(added), address(weight), eps)
    kernels.loaded().ssm_add_norm(*terms, *map(address, (total, out)))
    return total, out


def gated(y: Tensor, z: Tensor) -> Tensor:
    """y ⊙ SiLU(z) of (batch, length, channels)."""
    return _run(_Gate, _gated, y, z)


def softplus(v: Tensor) -> Tensor:
    """log(1 + eᵛ) of (batch, length, channels), with a relative error below 3e-7."""
    return _run(_Softplus, _softplus, v)


def _run(function: Any, plain: Callable[..., Tensor], *args: Any) -> Tensor:
    wanted = torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in args)
    return function.apply(*args) if wanted else plain(*args)


def _convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor | None, inputs: Tensor | None = None
) -> Tensor:
    """The convolution's output; of one sequence, at positions of which `inputs` (length, taps) says what each reads."""
    y, first = x.new_empty(x.shape), weight.flip(-1).t().contiguous()
    tail = None if tail is None else tail.contiguous()
    numbers = map(address, (first, bias, tail, inputs, y))
    kernels.loaded().ssm_convolve(_shape(x, taps=weight.shape[1]), _view(x), *numbers)
    return y


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, tail):
        ctx.save_for_backward(x, weight, bias, tail)
        return _convolved(x, weight, bias, tail)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, bias, tail = ctx.saved_tensors
        grad_x = x.new_empty(x.shape)
        grad_weight, grad_bias, grad_tail = _convolved_back(x, weight, bias, tail, grad, grad_x)
        return grad_x, grad_weight, grad_bias, grad_tail


def _convolved_back(x, weight, bias, tail, grad, grad_x):
    """The gradients of a convolution's weight, bias and tail; that of x is put into `grad_x`, channels side by side."""
    batch, length, channels = x.shape
    taps, first, grad = weight.shape[1], weight.flip(-1).t().contiguous(), _side_by_side(grad)
    tail = None if tail is None else tail.contiguous()
    sums = x.new_empty(batch * -(-length // STEPS), taps + 1, channels)
    grad_tail = None if tail is None else tail.new_empty(tail.shape)
    kernels.loaded().ssm_convolve_backward(
        _shape(x, taps=taps),
        _view(x),
        *map(address, (first, bias, tail)),
        _view(grad),
        *map(address, (grad_x, grad_tail, sums)),
        grad_x.stride(1),
    )
    sums = sums.sum(0)
    return sums[:taps].t().flip(-1), None if bias is None else sums[taps], grad_tail


def _normed(y: Tensor, z: Tensor | None, weight: Tensor, eps: float, size: int) -> Tensor:
    out = y.new_empty(y.shape)
    kernels.loaded().ssm_norm(_shape(y, size=size), _view(y), _view(z), address(weight), eps, address(out))
    return out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, z, weight, eps, size):
        ctx.save_for_backward(y, z, weight)
        ctx.numbers = (eps, size)
        return _normed(y, z, weight, eps, size)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        y, z, weight = ctx.saved_tensors
        grad_z = None if z is None else z.new_empty(z.shape)
        eps, size = ctx.numbers
        grad_y, grad_weight = _normed_back(y, z, weight, eps, size, grad, grad_z)
        return grad_y, grad_z, grad_weight, None, None


def _normed_back(y, z, weight, eps, size, grad, grad_z):
    """The gradients of y and of the weight; that of z is put into `grad_z`, channels side by side."""
    grad, grad_y = _side_by_side(grad), y.new_empty(y.shape)
    sums = y.new_empty(-(-y.shape[0] * y.shape[1] // STEPS), y.shape[2])
    kernels.loaded().ssm_norm_backward(
        *(_shape(y, size=size), _view(y), _view(z), address(weight), eps, _view(grad)),
        *map(address, (grad_y, grad_z, sums)),
        0 if grad_z is None else grad_z.stride(1),
    )
    return grad_y, sums.sum(0)


def _gated(y: Tensor, z: Tensor) -> Tensor:
    out = z.new_empty(z.shape)
    kernels.loaded().ssm_gate(_shape(z), _view(y), _view(z), address(out))
    return out


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, z):
        ctx.save_for_backward(y, z)
        return _gated(y, z)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        y, z = ctx.saved_tensors
        grad_y, grad_z = (z.new_empty(z.shape) for _ in range(2))
        terms = (_shape(z), *map(_view, (y, z, _side_by_side(grad))))
        kernels.loaded().ssm_gate_backward(*terms, *map(address, (grad_y, grad_z)))
        return grad_y, grad_z


def _softplus(v: Tensor) -> Tensor:
    out = v.new_empty(v.shape)
    kernels.loaded().ssm_softplus(_shape(v), _view(v), address(out))
    return out


class _Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return _softplus(v)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        out = v.new_empty(v.shape)
        kernels.loaded().ssm_softplus_backward(_shape(v), _view(v), _view(_side_by_side(grad)), address(out))
        return out


class _Shape(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in ("batch", "length", "channels", "taps", "size")] + [
        ("threads", ctypes.c_int),
    ]


class _View(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p)] + [(n, ctypes.c_int64) for n in ("batch", "step")]


def _shape(x: Tensor, *, taps: int = 0, size: int = 0) -> _Shape:
    return _Shape(*x.shape, taps, size, torch.get_num_threads() if x.numel() > SMALL else 1)


def _view(t: Tensor | None) -> _View:
    return _View(None, 0, 0) if t is None else _View(t.data_ptr(), *t.stride()[:2])


def _side_by_side(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _declare(library: ctypes.CDLL) -> None:
    shape, numbers, real = ctypes.POINTER(_Shape), ctypes.c_void_p, ctypes.c_float
    taken = {
        "convolve": [_View, *[numbers] * 5],
        "convolve_backward": [_View, *[numbers] * 3, _View, *[numbers] * 3, ctypes.c_int64],
        "norm": [_View, _View, numbers, real, numbers],
        "add_norm": [_View, _View, numbers, real, *[numbers] * 2],
        "norm_backward": [_View, _View, numbers, real, _View, *[numbers] * 3, ctypes.c_int64],
        "gate": [_View, _View, numbers],
        "gate_backward": [_View, _View, _View, numbers, numbers],
        "softplus": [_View, numbers],
        "softplus_backward": [_View, _View, numbers],
    }
    for name, types in taken.items():
        function = getattr(library, f"ssm_{name}")
        function.argtypes, function.restype = [shape, *types], None


kernels = building.Library(SOURCE, "passes", "the C passes", _declare)
available, why_not = kernels.available, kernels.why_not
