"""Passes over a layer's terms by a C kernel (`passes.c`), for float32 on a CPU, where no gradient is wanted; optional,
silent when absent.

Each reads its inputs once, where torch writes what it makes on the way. `passes` has those for a GPU.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from ssmscope.scans import building
from ssmscope.scans.building import address
from ssmscope.scans.native import SMALL, is_plain

SOURCE = Path(__file__).with_name("passes.c")


def applicable(*tensors: Tensor | None) -> bool:
    """Whether the kernels take these: float32, on a CPU, channels side by side, none of which wants a gradient."""
    given = [t for t in tensors if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return False
    plain = all(is_plain(t, "cpu") and t.stride(-1) == 1 for t in given)
    return plain and not torch.compiler.is_compiling() and available()


def silu_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor | None) -> Tensor:
    """SiLU(causal convolution) of `x` (batch, length, channels) by `weight` (channels, taps), the current position's
    last, and `bias` (channels,), with the taps − 1 inputs before the first position in `tail`, zeros when absent."""
    y, first = x.new_empty(x.shape), weight.flip(-1).t().contiguous()
    tail = None if tail is None else tail.contiguous()
    kernels.loaded().ssm_convolve(_shape(x, taps=weight.shape[1]), _view(x), *map(address, (first, bias, tail, y)))
    return y


def gated_norm(y: Tensor, z: Tensor, weight: Tensor, eps: float, size: int) -> Tensor:
    """weight · RMSNorm(y ⊙ SiLU(z)) of (batch, length, channels) over each `size` neighbours."""
    out = z.new_empty(z.shape)
    kernels.loaded().ssm_norm(_shape(z, size=size), _view(y), _view(z), address(weight), eps, address(out))
    return out


class _Shape(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in ("batch", "length", "channels", "taps", "size")] + [
        ("threads", ctypes.c_int),
    ]


class _View(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p)] + [(n, ctypes.c_int64) for n in ("batch", "step")]


def _shape(x: Tensor, *, taps: int = 0, size: int = 0) -> _Shape:
    return _Shape(*x.shape, taps, size, torch.get_num_threads() if x.numel() > SMALL else 1)


def _view(t: Tensor) -> _View:
    return _View(t.data_ptr(), *t.stride()[:2])


def _declare(library: ctypes.CDLL) -> None:
    shape, numbers = ctypes.POINTER(_Shape), ctypes.c_void_p
    library.ssm_convolve.argtypes, library.ssm_convolve.restype = [shape, _View, *[numbers] * 4], None
    library.ssm_norm.argtypes, library.ssm_norm.restype = [shape, _View, _View, numbers, ctypes.c_float, numbers], None


kernels = building.Library(SOURCE, "passes", "the C passes", _declare)
available, why_not = kernels.available, kernels.why_not
