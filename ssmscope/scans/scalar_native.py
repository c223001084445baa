"""The scan with one decay per head by C kernels (`scalar.c`), for float32 on a CPU, with gradients; optional, silent
when absent.

Without the kernels (`building`) `scalar.scan` stays with torch.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from ssmscope.scans import building
from ssmscope.scans.building import address
from ssmscope.scans.native import SMALL, is_plain

SOURCE = Path(__file__).with_name("scalar.c")


def applicable(log_a: Tensor, b: Tensor, c: Tensor, x: Tensor, initial: Tensor, *others: Tensor | None) -> bool:
    """Whether `scan` takes these terms: float32, on a CPU."""
    terms = (log_a, b, c, x, initial, *others)
    return all(t is None or is_plain(t, "cpu") for t in terms) and not torch.compiler.is_compiling() and available()


def scan(
    log_a: Tensor, b: Tensor, c: Tensor, x: Tensor, initial: Tensor, delta: Tensor | None, D: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `scalar.scan`, where `applicable`, with D (heads, width); results do not depend on the number of threads.

    Raises:
        MemoryError: when there is none left for the work.
    """
    terms = (log_a, b, c, x, initial, delta, D)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in terms):
        return _Scan.apply(*terms)
    return _forward(*terms, keep=False)[:2]


class _Shape(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in ("batch", "length", "heads", "groups", "width", "states")] + [
        ("threads", ctypes.c_int)
    ]


class _View(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p)] + [(n, ctypes.c_int64) for n in ("batch", "step", "head")]


def _shape(x: Tensor, b: Tensor) -> _Shape:
    batch, length, heads, width = x.shape
    groups, states = b.shape[2:]
    threads = torch.get_num_threads() if x.numel() * states > SMALL else 1
    return _Shape(batch, length, heads, groups, width, states, threads)


def _view(t: Tensor | None) -> _View:
    return _View(None, 0, 0, 0) if t is None else _View(t.data_ptr(), *t.stride()[:3])


def _side_by_side(*terms: Tensor) -> list[Tensor]:
    """The terms with neighbouring numbers in their last dimension."""
    return [t if t.stride(-1) == 1 else t.contiguous() for t in terms]


def _forward(log_a, b, c, x, initial, delta, D, *, keep: bool, final: bool = True):
    """y, the final state (None without `final`), and the states at the chunks' starts or None; `initial` None is 0."""
    library, shape = kernels.loaded(), _shape(x, b)
    b, c, x = _side_by_side(b, c, x)
    initial, D = (None if t is None else t.contiguous() for t in (initial, D))
    y, last = x.new_empty(x.shape), x.new_empty(len(x), *x.shape[2:], b.shape[3]) if final else None
    starts = x.new_empty(library.ssm_heads_starts(shape)) if keep else None
    if library.ssm_heads(shape, *map(_view, (log_a, delta, b, c, x)), *map(address, (D, initial, y, last, starts))):
        raise MemoryError("no memory left for the scan")
    return y, last, starts


def _backward(log_a, b, c, x, delta, D, starts, grad_y, grad_final, grad_x, grad_b, grad_c):
    """The gradients of log_a, delta, initial and D, the last (heads, width); without `grad_final` nothing came of the
    final state, and the initial one is 0 and has none. Those of x, b and c are put into `grad_x`, `grad_b` and
    `grad_c`, which may stand side by side: only their steps may be further apart than what a step holds."""
    b, c, x, grad_y = _side_by_side(b, c, x, grad_y)
    grad_final, D = (None if t is None else t.contiguous() for t in (grad_final, D))
    grad_log_a, grad_delta, grad_initial = (
        None if t is None else t.new_empty(t.shape) for t in (log_a, delta, grad_final)
    )
    grad_D = None if D is None else D.new_zeros(len(x), *D.shape)
    failed = kernels.loaded().ssm_heads_backward(
        _shape(x, b),
        *map(_view, (log_a, delta, b, c, x)),
        *map(address, (D, starts)),
        _view(grad_y),
        *map(address, (grad_final, grad_log_a, grad_delta, grad_b, grad_c, grad_x, grad_initial, grad_D)),
        *(grad_x.stride(1), grad_b.stride(1)),
    )
    if failed:
        raise MemoryError("no memory left for the gradient of the scan")
    return grad_log_a, grad_delta, grad_initial, None if grad_D is None else grad_D.sum(0)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_a, b, c, x, initial, delta, D):
        y, final, starts = _forward(log_a, b, c, x, initial, delta, D, keep=True)
        ctx.save_for_backward(log_a, b, c, x, delta, D, starts)
        return y, final

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y, grad_final):
        log_a, b, c, x, delta, D, starts = ctx.saved_tensors
        grad_x, grad_b, grad_c = (t.new_empty(t.shape) for t in (x, b, c))
        terms = (log_a, b, c, x, delta, D, starts, grad_y, grad_final, grad_x, grad_b, grad_c)
        grad_log_a, grad_delta, grad_initial, grad_D = _backward(*terms)
        return grad_log_a, grad_b, grad_c, grad_x, grad_initial, grad_delta, grad_D


def _declare(library: ctypes.CDLL) -> None:
    shape, numbers = ctypes.POINTER(_Shape), ctypes.c_void_p
    library.ssm_heads_starts.argtypes, library.ssm_heads_starts.restype = [shape], ctypes.c_int64
    library.ssm_heads.argtypes = [shape, *[_View] * 5, *[numbers] * 5]
    library.ssm_heads_backward.argtypes = [
        shape,
        *[_View] * 5,
        *[numbers] * 2,
        _View,
        *[numbers] * 8,
        *[ctypes.c_int64] * 2,
    ]


kernels = building.Library(SOURCE, "scan-of-heads", "the C scan", _declare)
available, why_not = kernels.available, kernels.why_not
