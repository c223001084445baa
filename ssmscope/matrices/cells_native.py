"""Attention matrices in cells where heads have one decay, and a gate and a convolution around them, by a C kernel
(`cells.c`), for float32 on a CPU; optional, silent when absent: then `pooled` stays with torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ssmscope.matrices.native import REACH
from ssmscope.matrices.terms import Around, decays, skips
from ssmscope.scans import building
from ssmscope.scans.building import address
from ssmscope.scans.native import SMALL, is_plain
from ssmscope.scans.products import product

SOURCE = Path(__file__).with_name("cells.c")
LONGEST = 512  # steps of a cell
HEADS, NUMBERS = 12, 2**27  # whose rows are read together, as they stand side by side, and what their states may hold
BLOCKS = (16, 64)  # cells whose products with as many others are left out where nothing is left between them


def applicable(r: Any, around: Around, longest: int) -> bool:
    """Whether `add` takes the terms, of one sequence and group at a time: one decay a head, both things around them,
    float32 on a CPU, cells of at most LONGEST steps."""
    left, taps = around.left, around.taps
    if left is None or taps is None or left.shape[3] != taps.shape[4] or around.reach > REACH or longest > LONGEST:
        return False
    terms = (r.b, r.c, left, taps, *(t for t in (r.log_a, r.delta, r.A, r.D) if t is not None))
    plain = all(is_plain(t, "cpu") for t in terms) and left.stride(3) == taps.stride(4) == 1
    return plain and not torch.compiler.is_compiling() and available()


def add(
    total: Float[Tensor, "cells cells"],
    r: Any,
    edge: Tensor,
    around: Around,
    scores: Float[Tensor, "cells steps steps"],
    skip: bool,
    between: Callable[[Tensor], Tensor],
) -> None:
    """Adds the sums over the pairs of each cell, the mean over a head's channels and the sum over the heads, where
    `applicable`; with `skip` D too. `scores` are c_t · b_s within cells; `between` gives the products of decays across
    cells.

    Raises:
        MemoryError: when there is none left for the work.
    """
    _, length, heads, _, state = r.shape
    assert around.left is not None and around.taps is not None
    cells, width, library = len(edge) - 1, around.left.shape[3], kernels.loaded()
    threads = torch.get_num_threads() if length * width * state > SMALL else 1
    edge, scores = edge.to(torch.int64).contiguous(), scores.contiguous()
    b, c = (t[0, :, 0].contiguous() for t in (r.b, r.c))
    skips_by = skips(r) if skip else None
    shape = _Shape(cells, heads, state, width, around.reach, scores.shape[1], threads)
    size = library.ssm_cell_size(shape)
    together = min(heads, HEADS, max(1, NUMBERS // (2 * cells * size)))
    sums = [total.new_empty(together, cells, size) for _ in range(2)]
    for begin in range(0, heads, together):
        some = slice(begin, min(begin + together, heads))
        shape.heads = count = some.stop - begin
        R, arrived = (t[:count] for t in sums)
        across, own, beside = (total.new_empty(count, cells) for _ in range(3))
        a = decays(r.of_heads(begin, some.stop))[0, :, :, 0].mT.contiguous()
        step = None if r.step is None else r.step[0, :, some].mT.contiguous()
        left, taps = around.left[0, :, some], around.taps[0, :, :, some]
        views = [_view(b), _view(c), _view(left, 1), _view(taps, 2)]
        past = None if skips_by is None else skips_by[some].expand(count, width).contiguous()
        numbers = (scores, past, across, R, arrived, own, beside)
        if library.ssm_cells(shape, *map(address, (edge, a, step)), *views, *map(address, numbers)):
            raise MemoryError("no memory left for the attention matrix in cells")
        total.diagonal().add_(own.sum(0) / width)
        if cells == 1:
            continue
        total.diagonal(-1).add_(beside[:, 1:].sum(0) / width)
        for kept, R_from, to in zip(between(across[:, 1:]) / width, R[:, 1:], arrived[:, 1:]):
            for rows, columns in _blocks(kept):
                total[1:, :-1][rows, columns] += product(R_from[rows], to[columns]) * kept[rows, columns]


def _blocks(kept: Float[Tensor, "cells cells"]) -> list[tuple[slice, slice]]:
    """Rows and columns that hold all numbers but zeros: large blocks, unless small ones leave out a good part of the
    pairs, each of which takes them half as long again."""
    cells = len(kept)
    first = torch.where(kept.any(1), (kept != 0).int().argmax(1), cells).tolist()

    def cut(block: int) -> list[tuple[slice, slice]]:
        rows = [slice(i, min(i + block, cells)) for i in range(0, cells, block)]
        begins = [min(first[each]) for each in rows]
        return [(each, slice(begin, each.stop)) for each, begin in zip(rows, begins) if begin < each.stop]

    def pairs(blocks: list[tuple[slice, slice]]) -> int:
        return sum((rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in blocks)

    small, large = map(cut, BLOCKS)
    return small if 1.5 * pairs(small) < pairs(large) else large


class _Shape(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int64) for n in ("cells", "heads", "states", "width", "reach", "longest")] + [
        ("threads", ctypes.c_int)
    ]


class _View(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p)] + [(n, ctypes.c_int64) for n in ("step", "tap", "head")]


def _view(t: Tensor, heads: int = 0) -> _View:
    """Of (length, …), heads in that dimension."""
    return _View(t.data_ptr(), t.stride(0), t.stride(1), t.stride(heads))


def _declare(library: ctypes.CDLL) -> None:
    shape, numbers = ctypes.POINTER(_Shape), ctypes.c_void_p
    library.ssm_cells.argtypes = [shape, *[numbers] * 3, *[_View] * 4, *[numbers] * 7]
    library.ssm_cell_size.argtypes, library.ssm_cell_size.restype = [shape], ctypes.c_int64


kernels = building.Library(SOURCE, "cells", "the C attention in cells", _declare)
available, why_not = kernels.available, kernels.why_not
