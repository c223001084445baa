"""Sums over the words of many tensors in one launch (`word_sums_kernels`), for `ssmscope.fingerprint`; optional."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ssmscope.scans.launching import Kernels, bound, on

EACH = 4  # rows of a program


def applicable(words: Sequence[Tensor]) -> bool:
    """Whether the kernel takes these tensors of int32: on a GPU that triton knows."""
    return bool(words) and words[0].device.type == "cuda" and available(words[0].device)


def sums(words: Sequence[Tensor], rows: Tensor, columns: Tensor) -> Tensor:
    """Σ_i word_i · rows[i // c] · columns[i % c] of every tensor, modulo 2⁶⁴, (tensors,) int64, of c columns; rows are
    used again from the first on."""
    row = len(columns)
    sizes = torch.tensor([len(each) for each in words])
    counts = (sizes + EACH * row - 1) // (EACH * row)
    table = torch.stack([torch.tensor([each.data_ptr() for each in words]), sizes, counts.cumsum(0) - counts])
    owners = torch.repeat_interleave(torch.arange(len(words), dtype=torch.int32), counts)
    out = torch.zeros(len(words), dtype=torch.int64, device=rows.device)
    if not len(owners):
        return out
    with on(rows):
        constants = {"TENSORS": len(words), "ROWS": len(rows), "ROW": row, "BLOCK": min(row, 1024), "EACH": EACH}
        launch = bound(kernels.loaded().summed, **constants, num_warps=4)
        launch((len(owners),), _sent(owners, rows), _sent(table, rows), rows, columns, out)
    return out


def _sent(t: Tensor, to: Tensor) -> Tensor:
    """A tensor where another is, without waiting for what the GPU has to do before."""
    return t.pin_memory().to(to.device, non_blocking=True) if to.device.type == "cuda" else t


kernels = Kernels(
    "ssmscope.scans.word_sums_kernels",
    "the Triton sums of words",
    lambda one: sums([one.view(torch.int32).flatten()], one.long().flatten(), one.long().flatten()),
)
available, why_not = kernels.available, kernels.why_not
