"""Attention matrices of layers with a decay per state and heads of width 1 by C kernels (`native.c`), for float32 on a
CPU; optional, silent when absent.

Without the kernels (`ssmscope.scans.building`) matrices are made by torch.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssmscope.matrices.terms import Around, needs_gradients, skips
from ssmscope.scans import building
from ssmscope.scans.building import address
from ssmscope.scans.native import is_plain

SOURCE = Path(__file__).with_name("native.c")
SMALL = 2**15  # decays; fewer are not worth waking threads for
FEW = 16  # channels, fewer of which are better kept apart
REACH = 16  # the most that an input may spread: REACH of the source
MOST = 256  # states of a channel


def applicable(r: Any, around: Around) -> bool:
    """Whether the functions below take these terms: one matrix a head, a decay per state given by Δ and A, float32, on
    a CPU, no gradients."""
    batch, length, heads, width, state = r.shape
    if getattr(r, "beta", None) is not None or r.delta is None or r.A is None or r.A.shape[-1] != state:
        return False
    if (width > 1 and not around.is_empty) or around.reach > min(REACH, max(length, 1)) or not 1 <= state <= MOST:
        return False
    if heads // r.b.shape[2] < FEW and r.b.shape[2] > 1:
        return False
    terms = [t for t in (r.b, r.c, r.delta, r.A, r.D, *around) if t is not None]
    if needs_gradients(r, around) or not all(is_plain(t, "cpu") for t in terms):
        return False
    return not torch.compiler.is_compiling() and available()


class _View(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p)] + [(n, ctypes.c_int64) for n in ("step", "channel")]


class _Terms(ctypes.Structure):
    _fields_ = (
        [(n, ctypes.c_int64) for n in ("length", "channels", "states", "reach")]
        + [(n, ctypes.c_int) for n in ("threads", "expected")]
        + [(n, _View) for n in ("delta", "left", "taps")]
        + [("tap", ctypes.c_int64)]
        + [(n, ctypes.c_void_p) for n in ("A", "b", "c", "D")]
    )


class _Held:
    """The terms of one sequence as the kernels take them, and what keeps their memory alive."""

    def __init__(self, r: Any, around: Around, D: Tensor | None) -> None:
        _, length, heads, _, state = r.shape
        delta = r.delta[0]
        A, b, c = r.A.contiguous(), r.b[0, :, 0].contiguous(), r.c[0, :, 0].contiguous()
        left = None if around.left is None else around.left[0, :, :, 0]
        taps = None if around.taps is None else around.taps[0, :, :, :, 0]
        D = None if D is None else D.contiguous()
        threads = torch.get_num_threads() if length * heads * state > SMALL else 1
        self.alive = (delta, A, b, c, left, taps, D)
        self.terms = _Terms(
            *(length, heads, state, around.reach, threads, r.expected),
            *(_view(delta), _view(left), _view(None if taps is None else taps[:, 0])),
            0 if taps is None else taps.stride(1),
            *map(address, (A, b, c, D)),
        )


def segments(r: Any, start: int, stop: int) -> list[tuple[int, int]]:
    """The heads start ≤ h < stop cut where they read another group of b and c."""
    share = r.shape[2] // r.b.shape[2]
    cuts = [start, *range((start // share + 1) * share, stop, share), stop]
    return list(zip(cuts[:-1], cuts[1:]))


def whole(r: Any, groups: int, absolute: bool, skip: bool, around: Around) -> Tensor:
    """The mean over each group's heads, (batch, groups, length, length), or of their absolute values, where
    `applicable`; D must be the same for the whole width of a head when `absolute`.

    Raises:
        MemoryError: when there is none left for the work.
    """
    batch, length, heads, _, _ = r.shape
    per_group = heads // groups
    out = r.b.new_zeros(batch, groups, length, length)
    D = _skips(r) if skip else None
    for row in range(batch if length else 0):
        for group in range(groups):
            for first, last in segments(r, group * per_group, (group + 1) * per_group):
                part, beside = r.of_rows(row, row + 1).of_heads(first, last), around.of_rows(row, row + 1)
                held = _Held(part, beside.of_heads(first, last), None if D is None else D[first:last])
                to = (address(out[row, group]), length)
                if absolute or last - first < FEW:
                    failed = kernels.loaded().ssm_singles(held.terms, absolute, *to)
                else:
                    failed = kernels.loaded().ssm_whole(held.terms, *to)
                _check(failed)
    return out.div_(per_group)


def pooled(r: Any, edge: Tensor, groups: int, skip: bool, around: Around) -> Tensor:
    """The sums over the pairs of each cell of the mean over each group's heads, where `applicable`; no cell is shorter
    than the reach.

    Raises:
        MemoryError: when there is none left for the work.
    """
    batch, _, heads, _, _ = r.shape
    cells, per_group = len(edge) - 1, heads // groups
    edge = edge.to(torch.int64).contiguous()
    out = r.b.new_zeros(batch, groups, cells, cells)
    D = _skips(r) if skip else None
    for row in range(batch):
        for group in range(groups):
            for first, last in segments(r, group * per_group, (group + 1) * per_group):
                part, beside = r.of_rows(row, row + 1).of_heads(first, last), around.of_rows(row, row + 1)
                held = _Held(part, beside.of_heads(first, last), None if D is None else D[first:last])
                _check(kernels.loaded().ssm_pooled(held.terms, address(edge), cells, address(out[row, group])))
    return out.div_(per_group)


def row(r: Any, t: int) -> Tensor:
    """α[t, s] of every head up to s = t, (batch, heads, t + 1), where `applicable` with nothing around."""
    batch, length, heads, _, _ = r.shape
    out = r.b.new_empty(batch, length, heads)
    for i in range(batch):
        for first, last in segments(r, 0, heads):
            held = _Held(r.of_rows(i, i + 1).of_heads(first, last), Around(), None)
            found = out[i] if (first, last) == (0, heads) else r.b.new_empty(length, last - first)
            kernels.loaded().ssm_row(held.terms, t, address(found))
            if found.data_ptr() != out[i].data_ptr():
                out[i, :, first:last] = found
    return out[:, : t + 1].transpose(1, 2)


def _skips(r: Any) -> Tensor | None:
    """D of every head, the mean over its width."""
    D = skips(r)
    return None if D is None else D.expand(r.shape[2], -1).mean(-1)


def _view(t: Tensor | None) -> _View:
    """Of (length, channels) with any strides."""
    return _View(None, 0, 0) if t is None else _View(t.data_ptr(), *t.stride())


def _check(failed: int) -> None:
    if failed:
        raise MemoryError("no memory left for the attention matrix")


def _declare(library: ctypes.CDLL) -> None:
    terms, numbers, number = ctypes.POINTER(_Terms), ctypes.c_void_p, ctypes.c_int64
    library.ssm_whole.argtypes = [terms, numbers, number]
    library.ssm_singles.argtypes = [terms, ctypes.c_int, numbers, number]
    library.ssm_row.argtypes, library.ssm_row.restype = [terms, number, numbers], None
    library.ssm_pooled.argtypes = [terms, numbers, number, numbers]


kernels = building.Library(SOURCE, "attention", "the C attention", _declare)
available, why_not = kernels.available, kernels.why_not
