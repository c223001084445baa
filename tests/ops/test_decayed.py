"""Long texts whose first tokens have decayed to nothing, and whose last ones have not."""

from __future__ import annotations

import pytest
import torch
from small_pieces import make_small

from ssmscope import ops
from ssmscope.ops import Recurrence, survival

LENGTH = 300


def drawn(kind: str) -> Recurrence:
    g = torch.Generator().manual_seed(0)
    x, b, c = (torch.randn(2, LENGTH, 2, size, generator=g) for size in (3, 4, 4))
    rate = torch.rand(2, LENGTH, 2, 4, generator=g) + 0.5
    if kind == "log-decays":
        return Recurrence(x, b, c, log_a=-rate)
    A = -torch.rand(2, 4, generator=g) - 0.5
    return Recurrence(x, b, c, delta=rate[..., 0], A=A, expected=kind == "expected")


@pytest.mark.parametrize("small", [False, True], ids=["whole", "small pieces"])
@pytest.mark.parametrize("kind", ["log-decays", "timed", "expected"])
def test_what_is_left_is_that_of_float64(kind, small, monkeypatch):
    r = drawn(kind)
    exact = r.to(torch.float64)
    decays = exact.log_decay()
    after = decays.flip(1).cumsum(1).flip(1) - decays
    keys = exact.b * after.exp()
    norms = exact.written.norm(dim=-1) * keys.norm(dim=-1)
    H = torch.einsum("bthp,bthn->bhpn", exact.written, keys)
    towards = torch.einsum("bthp,bthn,bhpn->bth", exact.written, keys, H)
    if small:
        make_small(monkeypatch)
    close = dict(rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(survival.remaining_norms(r).double(), norms, **close)
    found, _ = survival.left_towards_state(r)
    torch.testing.assert_close(found.double(), towards, **close)
    torch.testing.assert_close(ops.scan(r).state.double(), H, **close)
    assert norms[:, 0].max() < 1e-30 < 1e-2 < norms[:, -5:].min()
