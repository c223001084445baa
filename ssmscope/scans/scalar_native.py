"""The scan with one decay per head by a C kernel (`scalar.c`), for float32 on a CPU, where no gradient is wanted;
optional, silent when absent.

Without the kernel (`building`) `scalar.scan` stays with torch.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from ssmscope.scans import building
from ssmscope.scans.native import SMALL, is_plain

SOURCE = Path(__file__).with_name("scalar.c")


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
    if kernels.loaded().ssm_heads(shape, *map(_view, (log_a, b, c, x)), *address):
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


def _declare(library: ctypes.CDLL) -> None:
    library.ssm_heads.argtypes = [ctypes.POINTER(_Shape), *[_View] * 4, *[ctypes.c_void_p] * 3]


kernels = building.Library(SOURCE, "scan-of-heads", "the C scan", _declare)
available, why_not = kernels.available, kernels.why_not
