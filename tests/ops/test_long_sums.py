"""Sums of log-decays over many positions: survival, and rows of attention matrices over several pieces."""

import pytest
import torch
from torch import Tensor
from ssmscope import ops
from ssmscope.ops import survival


def test_a_long_text_loses_no_digits():
    """Sums from the beginning would leave no digits of what the last tokens are: Σ log a is 1e6 there."""
    g = torch.Generator().manual_seed(0)
    x, b, c = (torch.randn(1, 5000, *sizes, generator=g) for sizes in ((2, 3), (1, 4), (1, 4)))
    r = ops.Recurrence(x, b, c, delta=torch.rand(1, 5000, 2, generator=g) * 400, A=torch.tensor([[-1.0], [-1e-3]]))
    found, exact = survival.shares([r]), survival.shares([r.to(torch.float64)])
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-12)


def row_by_definition(r: ops.Recurrence, t: int) -> Tensor:
    """Σ_n c_t b_s exp(Σ_{s<r≤t} log a_r) Δ_s, the mean over heads, (batch, length)."""
    log_a = r.log_decay().expand(*r.x.shape[:3], r.b.shape[-1])
    b, c = (term.repeat_interleave(r.x.shape[2] // term.shape[2], dim=2) for term in (r.b, r.c))
    found = torch.zeros(r.x.shape[:2], dtype=r.x.dtype)
    total = torch.zeros_like(log_a[:, 0])
    for s in range(t, -1, -1):
        step = 1 if r.delta is None else r.delta[:, s]
        found[:, s] = ((c[:, t] * b[:, s] * total.exp()).sum(-1) * step).mean(-1)
        total = total + log_a[:, s]
    return found


@pytest.mark.parametrize("by_state", [False, True], ids=["one decay per head", "a decay per state"])
@pytest.mark.parametrize("stepped", [False, True], ids=["log-decays", "steps"])
def test_a_row_of_many_heads_is_summed_over_chunks(by_state, stepped):
    """So many decays that 16 positions at a time are summed: a row of 50 is made in four chunks."""
    g = torch.Generator().manual_seed(1)
    heads, state, length = (2048, 32, 50) if by_state else (65536, 1, 50)
    decays = state if by_state else 1
    x = torch.zeros(1, length, heads, 1, dtype=torch.float64)
    b, c = (torch.rand(1, length, 1, state, generator=g, dtype=torch.float64) for _ in range(2))
    if stepped:
        A = -torch.rand(heads, decays, generator=g, dtype=torch.float64)
        r = ops.Recurrence(x, b, c, delta=torch.rand(1, length, heads, generator=g, dtype=torch.float64) / 10, A=A)
    else:
        r = ops.Recurrence(x, b, c, log_a=-torch.rand(1, length, heads, decays, generator=g, dtype=torch.float64) / 10)
    found = ops.attention(r, rows=[length - 1, 20])[:, 0]
    expected = torch.stack([row_by_definition(r, t) for t in (length - 1, 20)], dim=1)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
