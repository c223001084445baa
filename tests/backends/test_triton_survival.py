"""Triton's norms of decayed keys against their definition in float64."""

import pytest
import torch
from backends.interpreted import DEVICE, needs_triton
from torch import Tensor

pytest.importorskip("triton")
from ssmscope.backends.triton import survival  # noqa: E402

pytestmark = needs_triton


def draw_terms(length: int, heads: int, groups: int, state: int, batch: int = 2) -> list[Tensor]:
    """Return Δ, A and b, drawn from one seed."""
    draw = torch.Generator().manual_seed(0)
    delta = torch.rand(batch, length, heads, generator=draw)
    A, b = -torch.rand(heads, state, generator=draw), torch.randn(batch, length, groups, state, generator=draw)
    return [t.to(DEVICE) for t in (delta, A, b)]


def reference(delta: Tensor, A: Tensor, b: Tensor) -> Tensor:
    """Return the norms in float64, with the steps after each position added up one by one."""
    delta, A = delta.double(), A.double()
    keys = b.double().repeat_interleave(delta.shape[2] // b.shape[2], 2)
    elapsed = torch.zeros_like(delta)
    for s in range(delta.shape[1] - 2, -1, -1):
        elapsed[:, s] = elapsed[:, s + 1] + delta[:, s + 1]
    return ((elapsed.unsqueeze(-1) * A).exp() * keys).norm(dim=-1)


def check(delta: Tensor, A: Tensor, b: Tensor) -> None:
    """Compare with the reference: an exponent is rounded, so the error grows with it, and numbers below the smallest
    normal float32 may be 0."""
    ours, exact = survival.key_norms(delta, A, b), reference(delta, A, b)
    assert ours.shape == exact.shape and ours.dtype == torch.float32
    tolerance = 3e-7 * (4 + exact.clamp(min=1e-37).log().abs())
    assert ((ours - exact).abs() <= tolerance * exact + 1e-37).all()


@pytest.mark.parametrize(
    ("length", "heads", "groups", "state"),
    [(1, 1, 1, 16), (63, 3, 1, 5), (64, 6, 2, 17), (65, 40, 1, 16), (300, 70, 2, 3)],
)
def test_norms(length, heads, groups, state):
    check(*draw_terms(length, heads, groups, state))


def test_long_text():
    delta, A, b = draw_terms(8192, 2, 1, 4, batch=1)
    check(delta / 100, A, b)


def test_norms_as_small_as_float32_holds():
    delta, A, b = draw_terms(200, 2, 1, 4, batch=1)
    A[:] = torch.tensor([[-0.8], [-1.2]])
    assert survival.key_norms(delta, A, b)[0, 0, 0] > 1e-36  # the square of which is 0
    check(delta, A, b)


def test_views():
    delta, A, b = draw_terms(70, 4, 1, 16)
    exact = survival.key_norms(delta, A, b)
    wide, halves = torch.cat([torch.ones_like(b), b], dim=-1), torch.stack([delta, delta + 1], dim=2)
    assert torch.equal(survival.key_norms(halves[:, :, 0], A.mT.contiguous().mT, wide[..., 16:]), exact)
    assert torch.equal(survival.key_norms(delta.mT.contiguous().mT, A, b.mT.contiguous().mT), exact)


def test_states_that_grow_or_vanish():
    delta, A, b = draw_terms(100, 4, 1, 16)
    check(delta, -A / 2, b)
    delta[:, ::7] = 1e6
    assert (survival.key_norms(delta, A, b)[:, :98] == 0).all()
    check(delta, A, b)


def test_fits():
    terms = delta, A, b = draw_terms(4, 2, 1, 16)
    assert survival.fits(*terms) and not survival.fits(delta[:, :0], A, b[:, :0])
    assert not survival.fits(delta, A[:, :1], b)
    for k in range(3):
        assert not survival.fits(*(t.double() if i == k else t for i, t in enumerate(terms)))
