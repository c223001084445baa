"""The scan with one decay per head by a C kernel (`scalar.c`), for float32 on a CPU, where no gradient is wanted;
optional, silent when absent.

The kernel is compiled on first use and kept (`building`). Without a compiler, or with SSMSCOPE_NATIVE=0, `why_not` says
so and `scalar.scan` stays with torch.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

from ssmscope.scans import building
from ssmscope.scans.native import SMALL, is_plain

SOURCE = Path(__file__).with_name("scalar.c")


def available() -> bool:
    """Whether such scans run through the C kernel; compiles it when that was not yet tried."""
    return why_not() is None


def why_not() -> str | None:
    """Why the C kernel is not in use, in one line, or None when it is."""
    return building.why_not(_library)


def applicable(log_a: Tensor, b: Tensor, c: Tensor, x: Tensor, initial: Tensor) -> bool:
    """Whether `scan` takes these terms: float32, on a CPU, none of which wants a gradient."""
    terms = (log_a, b, c, x, initial)
    if torch.is_grad_enabled() and any(t.requires_grad for t in terms):
        return False
    return all(is_plain(t, "cpu") for t in terms) and not torch.compiler.is_compiling() and available()


def scan(log_a: Tensor, b: Tensor, c: Tensor, x: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
    """As `scalar.scan`, where `applicable`; results do not depend on the number of threads.

    Raises:
        MemoryError: when there is none left for the work.
    """
    batch, length, heads, width = x.shape
    groups, states = b.shape[2:]
    b, c, x = (t if t.stride(-1) == 1 else t.contiguous() for t in (b, c, x))
    initial = initial.contiguous()
    y, final = x.new_empty(x.shape), initial.new_empty(initial.shape)
    threads = torch.get_num_threads() if x.numel() * states > SMALL else 1
    shape = _Shape(batch, length, heads, groups, width, states, threads)
    address = (initial.data_ptr(), y.data_ptr(), final.data_ptr())
    if _loaded().ssm_heads(shape, *map(_view, (log_a, b, c, x)), *address):
        raise MemoryError("no memory left for the scan")
    return y, final


class _Shape(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in ("batch", "length", "heads", "groups", "width", "states")] + [
        ("threads", ctypes.c_int)
    ]


class _View(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p)] + [(n, ctypes.c_int64) for n in ("batch", "step", "head")]


def _view(t: Tensor) -> _View:
    return _View(t.data_ptr(), *t.stride()[:3])


def _loaded() -> ctypes.CDLL:
    library = _library()
    if isinstance(library, str):
        raise RuntimeError(f"the C scan is not available: {library}")
    return library


@functools.cache
def _library() -> ctypes.CDLL | str:
    """The kernel, compiled if need be, or why there is none. Tried once per process."""
    return building.library(SOURCE, "scan-of-heads", _declare)


def _declare(library: ctypes.CDLL) -> None:
    library.ssm_heads.argtypes = [ctypes.POINTER(_Shape), *[_View] * 4, *[ctypes.c_void_p] * 3]
