"""The scan of states that are single numbers against its definition."""

import pytest
import torch
from ssmscope import ops
from ssmscope.ops import diagonal


def terms(length: int, heads: int = 3, width: int = 2, scale: float = 1.0, decays: int = 1, dtype=torch.float64):
    torch.manual_seed(length)
    log_a = -scale * torch.rand(2, length, heads, decays, dtype=dtype)
    return log_a, torch.randn(2, length, heads, width, dtype=dtype), torch.randn(2, heads, width, dtype=dtype)


def by_steps(log_a, written, initial) -> torch.Tensor:
    states = []
    for a, x in zip(log_a.exp().unbind(1), written.unbind(1)):
        initial = a * initial + x
        states.append(initial)
    return torch.stack(states, dim=1)


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 50])
@pytest.mark.parametrize(("decays", "chunks"), [(1, None), (2, 1), (2, 4)])
def test_values_and_gradients_are_the_definitions(length, decays, chunks):
    given = [t.requires_grad_() for t in terms(length, decays=decays)]
    ours, expected = diagonal.scan_numbers(*given, chunks), by_steps(*given)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    found, wanted = (torch.autograd.grad((y * weights).sum(), given) for y in (ours, expected))
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_no_step_gives_nothing():
    assert diagonal.scan_numbers(*terms(0)).shape == (2, 0, 3, 2)


def test_decays_of_any_strength_overflow_nowhere():
    log_a, written, initial = (t.requires_grad_() for t in terms(40, scale=2000.0, dtype=torch.float32))
    states = diagonal.scan_numbers(log_a, written, initial)
    torch.testing.assert_close(states, by_steps(log_a, written, initial))
    assert all(g.isfinite().all() for g in torch.autograd.grad(states.square().sum(), [log_a, written, initial]))
    cut = torch.full_like(log_a, -1e30)
    torch.testing.assert_close(diagonal.scan_numbers(cut, written, initial), written)


def test_recurrences_of_single_numbers_run_through_it(monkeypatch):
    log_a, x, initial = terms(20)
    b, c = torch.randn(2, 2, 20, 3, 1).double().unbind()
    r = ops.Recurrence(x=x, b=b, c=c, log_a=log_a, D=torch.randn(3).double())
    slow = ops.scan_reference(r, initial.unsqueeze(-1))
    used = []
    monkeypatch.setattr(diagonal, "scan_numbers", lambda *t, own=diagonal.scan_numbers: (used.append(1), own(*t))[1])
    fast = ops.scan(r, initial.unsqueeze(-1), retention=True)
    assert used
    for one, other in zip(fast, slow):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
