"""The C kernel of attention in cells, of heads with one decay in a gate and a convolution, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ssmscope import ssm
from ssmscope.matrices import cells_native, pooled
from ssmscope.ssm import Recurrence

pytestmark = pytest.mark.skipif(not cells_native.available(), reason=f"no C kernel here: {cells_native.why_not()}")


def draw(
    length: int, heads: int, groups: int, width: int, state: int, reach: int
) -> tuple[Recurrence, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    r = Recurrence(
        x=normal(2, length, heads, width),
        b=normal(2, length, groups, state),
        c=normal(2, length, groups, state),
        delta=0.2 * torch.rand(2, length, heads, generator=g),
        A=-torch.rand(heads, 1, generator=g),
        D=normal(heads, width),
    )
    return r, {"left": normal(2, length, heads, width), "taps": normal(2, length, reach, heads, width)}


def without_torch(monkeypatch) -> None:
    """The torch path fails the test."""
    monkeypatch.setattr(pooled, "_add_heads", lambda *_: pytest.fail("the torch path ran"))


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4])
@pytest.mark.parametrize(
    ("shape", "cells"),
    [((23, 4, 2, 3, 5, 2), 4), ((130, 6, 1, 40, 7, 4), 3), ((97, 2, 1, 16, 20, 4), 1), ((200, 2, 2, 6, 3, 1), 90)],
    ids=str,
)
def test_cells_are_those_of_the_definition(shape, cells, scale, monkeypatch):
    r, around = draw(*shape)
    r = replace(r, delta=r.delta * scale) if scale != 1 else r
    wide, double = r.to(torch.float64), {name: t.double() for name, t in around.items()}
    expected = {skip: ssm.pooled_attention(wide, cells, skip=skip, **double) for skip in (False, True)}
    without_torch(monkeypatch)
    for skip, of in expected.items():
        for groups in (1, shape[1]):
            found = ssm.pooled_attention(r, cells, groups=groups, skip=skip, **around)
            found = found if groups == 1 else found.mean(1, keepdim=True)
            assert found.dtype == torch.float32 and (found - of).abs().max() <= 3e-6 * of.abs().max()


def test_any_number_of_threads(monkeypatch):
    without_torch(monkeypatch)
    r, around = draw(300, 4, 1, 20, 9, 4)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(ssm.pooled_attention(r, 20, skip=True, **around))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:  # torch's products between cells may round otherwise
        assert (other - found[0]).abs().max() <= 1e-6 * found[0].abs().max()


@pytest.mark.parametrize("numbers", [0, 2**27])
def test_however_many_heads_are_read_together(numbers, monkeypatch):
    without_torch(monkeypatch)
    r, around = draw(150, 7, 1, 20, 9, 4)
    expected = ssm.pooled_attention(r, 20, **around)
    monkeypatch.setattr(cells_native, "HEADS", 3)
    monkeypatch.setattr(cells_native, "NUMBERS", numbers)
    found = ssm.pooled_attention(r, 20, **around)
    assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize(("band", "block"), [(0, 0), (3, 16), (40, 16), (500, 64)])
def test_blocks_between_cells_leave_nothing_out_and_are_as_large_as_pays(band, block):
    kept = torch.ones(500, 500).tril(-1).triu(-band)
    kept[420:] = 0
    blocks, covered = cells_native._blocks(kept), torch.zeros(500, 500)
    for rows, columns in blocks:
        covered[rows, columns] += 1
    assert covered.max() == min(band, 1) and (covered[kept != 0] == 1).all()
    assert max((rows.stop - rows.start for rows, _ in blocks), default=0) == block
    assert all(rows.start < 420 for rows, _ in blocks)
