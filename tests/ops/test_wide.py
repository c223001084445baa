"""The scan of wide heads with a decay per state against the definition."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from ssmscope import ops
from ssmscope.ops import Recurrence, diagonal, wide


def draw(length=37, batch=2, heads=4, groups=2, width=3, state=5, scale=1.0, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    log_a = -scale * torch.rand(batch, length, heads, state, generator=g, dtype=torch.float64).to(dtype)
    b, c = normal(batch, length, groups, state), normal(batch, length, groups, state)
    return log_a, b, c, normal(batch, length, heads, width), normal(batch, heads, width, state)


def definition(log_a, b, c, x, initial) -> ops.Scan:
    return ops.scan_reference(Recurrence(x=x, b=b, c=c, log_a=log_a), initial)


def gradients(y, final, inputs):
    weights = torch.sin(torch.arange(y.numel(), dtype=y.dtype)).view(y.shape)
    return torch.autograd.grad((y * weights).sum() + (final**2).sum(), inputs)


@pytest.mark.parametrize("chunk, segment", [(1, 16), (2, 4), (8, 16), (32, 64), (64, 64)])
@pytest.mark.parametrize("length", [1, 2, 31, 33, 70])
def test_it_is_the_definition(length, chunk, segment, monkeypatch):
    monkeypatch.setattr(wide, "STEPS_PER_CHUNK", chunk)
    monkeypatch.setattr(wide, "STEPS_PER_SEGMENT", segment)
    terms = [t.requires_grad_() for t in draw(length)]
    ours, exact = wide.scan(*terms), definition(*terms)
    torch.testing.assert_close(ours[0], exact.y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours[1], exact.state, rtol=1e-12, atol=1e-12)
    for a, b in zip(gradients(*ours, terms), gradients(*exact[:2], terms)):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_no_steps_change_nothing():
    *terms, initial = draw(0)
    y, final = wide.scan(*terms, initial)
    assert y.shape == (2, 0, 4, 3) and torch.equal(final, initial)


@pytest.mark.parametrize("scale", [400.0, 1e6])
def test_strong_decays_overflow_nowhere(scale):
    terms = draw(100, scale=scale, dtype=torch.float32)
    terms[0][:, ::5] = 0.0  # held between two decays to nothing
    terms[0][:, 1::10] = -torch.inf
    leaves = [t.requires_grad_() for t in terms]
    ours, exact = wide.scan(*leaves), definition(*(t.double() for t in terms))
    assert (ours[0] - exact.y).abs().max() < 1e-5 * exact.y.abs().max()
    assert all(g.isfinite().all() for g in gradients(*ours, leaves))


def test_float32_is_near_float64_over_a_long_memory():
    terms = draw(1500, batch=1, scale=1e-3, dtype=torch.float32)
    ours, exact = wide.scan(*terms), definition(*(t.double() for t in terms))
    assert (ours[0] - exact.y).abs().max() < 2e-6 * exact.y.abs().max()


class Counted(TorchDispatchMode):
    """Counts the operations that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_ssm_scan_runs_it_without_a_loop_over_steps(monkeypatch):
    monkeypatch.setattr(diagonal, "scan", lambda *_, **__: pytest.fail("the scan of single steps ran"))
    log_a, b, c, x, initial = (t.requires_grad_() for t in draw(1025, batch=1))
    r = Recurrence(x=x, b=b, c=c, log_a=log_a)
    with Counted() as forward:
        out = ops.scan(r, initial, retention=True)
    with Counted() as backward:
        gradients(out.y, out.state, [log_a, b, c, x, initial])
    assert forward.count < 1025 / 2 and backward.count < 1025
    exact = ops.scan_reference(r, initial)
    for a, b in zip(out, exact):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_decays_below_the_floor_are_the_floor():
    """e⁻⁸⁰ in float32, as in the other scans: from the chunk's start, from a written step, and in the next chunk."""
    log_a, b, c, x, initial = draw(2 * wide.STEPS_PER_CHUNK, 1, 1, 1, width=2, state=1, dtype=torch.float32)
    log_a, b, c, x = torch.zeros_like(log_a), torch.ones_like(b), torch.ones_like(c), torch.zeros_like(x)
    log_a[:, 5] = -200.0
    floor = torch.tensor(-80.0).exp()
    y, final = wide.scan(log_a, b, c, x, torch.ones_like(initial))
    held = torch.where(torch.arange(2 * wide.STEPS_PER_CHUNK) < 5, 1.0, floor)
    torch.testing.assert_close(y[0, :, 0, 0], held, atol=0, rtol=1e-5)
    torch.testing.assert_close(final, torch.full_like(initial, floor), atol=0, rtol=1e-5)
    x[:, 4] = 1.0
    y, _ = wide.scan(log_a, b, c, x, torch.zeros_like(initial))
    torch.testing.assert_close(y[0, 5:, 0, 0], floor.expand(2 * wide.STEPS_PER_CHUNK - 5), atol=0, rtol=1e-5)
