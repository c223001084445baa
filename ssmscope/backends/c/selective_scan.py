"""Mamba-1's selective scan in float32 on a CPU, forward and backward, by `selective_scan.c`.

The recurrence is Eq. 2 of Mamba (Gu & Dao 2023). Results do not depend on the number of threads, nor a sequence's
on the others of its batch.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from ssmscope.backends.c import compiler
from ssmscope.backends.shapes import ChannelMemory, Channels, Keys, PerHead, Rates, Start

SOURCE = Path(__file__).with_name("selective_scan.c")  # It includes "tiles.h" and "vectors.h".
MIN_DECAYS_FOR_THREADS = 2**15
"""Fewer decays (batch × length × heads × state) are done sooner than other threads wake up."""


def why_not() -> str | None:
    """Return why the kernel is unavailable here, in one line, or None if it is available; compiles it on first use."""
    found = _library()
    return found if isinstance(found, str) else None


def fits(x: Tensor, b: Tensor, c: Tensor, initial: Tensor | None, delta: Tensor | None, A: Tensor | None) -> bool:
    """Return True if the kernel serves these terms: float32, width 1, one group, a decay per state, not empty."""
    if delta is None or A is None or A.ndim != 2 or not x.numel() or not A.numel():
        return False
    batch, length, heads, width = x.shape
    states = A.shape[1]
    return (
        width == 1
        and b.shape == c.shape == (batch, length, 1, states)
        and delta.shape == (batch, length, heads)
        and A.shape[0] == heads
        and (initial is None or initial.shape == (batch, heads, 1, states))
        and all(t is None or t.dtype is torch.float32 for t in (x, b, c, initial, delta, A))
    )


def scan(
    x: Channels, b: Keys, c: Keys, initial: Start, delta: PerHead, A: Rates, *, expected: bool, retention: bool
) -> tuple[Channels, ChannelMemory, Float[Tensor, "batch length"] | None]:
    """Return y_t = H_t c_t and the final H of H_t = a_t ⊙ H_{t-1} + Δ_t x_t b_tᵀ, of terms that it `fits`.

    a_t is exp(Δ_t A), or 1 / (1 − Δ_t A) with `expected`. The third result is the mean of a_t over heads and states
    with `retention`, without a gradient, and None otherwise. The others are differentiable once, in every term.

    Args:
        initial: H before the first step; zero where it is None.

    Raises MemoryError if there is not enough memory for the work, RuntimeError if the kernel is unavailable.
    """
    terms = (x, b, c, initial, delta, A)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in terms):
        return _SelectiveScan.apply(*terms, expected, retention)
    return _forward(*terms, expected, retention, keep_starts=False)[:3]


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, b, c, initial, delta, A, expected, retention):
        ctx.every = any(ctx.needs_input_grad[place] for place in (1, 2, 4, 5))
        y, final, mean_decay, starts = _forward(x, b, c, initial, delta, A, expected, retention, keep_starts=ctx.every)
        ctx.save_for_backward(x, b, c, delta, A, starts)
        ctx.expected = expected
        if mean_decay is not None:
            ctx.mark_non_differentiable(mean_decay)
        return y, final, mean_decay

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y, grad_final, _):
        x, b, c, delta, A, starts = ctx.saved_tensors
        grad_y, grad_final = grad_y.resolve_neg(), grad_final.resolve_neg()
        b, c, A, grad_final = (t.contiguous() for t in (b, c, A, grad_final))
        others = (delta, A, b, c)
        grads = [x.new_empty(x.shape), *(t.new_empty(t.shape) if ctx.every else None for t in others)]
        grad_initial = torch.empty_like(grad_final) if ctx.needs_input_grad[3] else None
        failed = _kernels().selective_scan_backward(
            _problem(x, b, ctx.expected),
            *(_strided(x), _strided(delta), *map(_address, (A, b, c, starts))),
            *(_strided(grad_y), _address(grad_final), *map(_address, (*grads, grad_initial))),
        )
        if failed:
            raise MemoryError("not enough memory for the gradient of the selective scan")
        grad_x, grad_delta, grad_A, grad_b, grad_c = grads
        return grad_x, grad_b, grad_c, grad_initial, grad_delta, grad_A, None, None


def _forward(x, b, c, initial, delta, A, expected: bool, retention: bool, keep_starts: bool):
    """Return y, the final state, the mean decay or None, and the states that the backward pass starts from or None."""
    library, problem = _kernels(), _problem(x, b, expected)
    b, c, A = b.contiguous(), c.contiguous(), A.contiguous()
    initial = None if initial is None else initial.contiguous()
    y, final = x.new_empty(x.shape), x.new_empty(x.shape[0], x.shape[2], 1, A.shape[1])
    starts = x.new_empty(library.selective_scan_starts(problem)) if keep_starts else None
    mean_decay = x.new_empty(x.shape[:2]) if retention else None
    tensors = (A, b, c, initial, y, final, starts, mean_decay)
    if library.selective_scan_forward(problem, _strided(x), _strided(delta), *map(_address, tensors)):
        raise MemoryError("not enough memory for the selective scan")
    return y, final, mean_decay, starts


class _Problem(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "length", "channels", "states")] + [
        (name, ctypes.c_int) for name in ("threads", "expected")
    ]


class _Strided(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("batch", "step", "channel")]


def _problem(x: Tensor, b: Tensor, expected: bool) -> _Problem:
    threads = torch.get_num_threads() if x.numel() * b.shape[-1] > MIN_DECAYS_FOR_THREADS else 1
    return _Problem(*x.shape[:3], b.shape[-1], threads, expected)


def _strided(t: Tensor) -> _Strided:
    """Describe a tensor (batch, length, channels, …) with any strides."""
    return _Strided(t.data_ptr(), *t.stride()[:3])


def _address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


@functools.cache
def _library() -> ctypes.CDLL | str:
    """Return the compiled kernel with the types of its functions, or the reason why it is unavailable."""
    try:
        library = compiler.load(SOURCE)
    except compiler.Unavailable as error:
        return str(error)
    problem, strided, pointer = ctypes.POINTER(_Problem), ctypes.POINTER(_Strided), ctypes.c_void_p
    library.selective_scan_starts.argtypes = [problem]
    library.selective_scan_starts.restype = ctypes.c_int64
    library.selective_scan_forward.argtypes = [problem, *[strided] * 2, *[pointer] * 8]
    library.selective_scan_backward.argtypes = [problem, *[strided] * 2, *[pointer] * 4, strided, *[pointer] * 7]
    return library


def _kernels() -> ctypes.CDLL:
    found = _library()
    if isinstance(found, str):
        raise RuntimeError(f"the selective scan's C kernel is unavailable: {found}")
    return found
