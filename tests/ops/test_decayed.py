"""Long texts whose first tokens have decayed to nothing, and whose last ones have not.

The scan of states that are single numbers against its definition.
The scan of wide heads with a decay per state against the definition.
Sums of log-decays over more positions than are summed in one piece: survival, and rows of attention matrices.
"""

from __future__ import annotations

import pytest
import torch
from small_pieces import make_small
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ssmscope import ops
from ssmscope.ops import Recurrence, diagonal, survival, wide

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


"""Longer than two pieces of 128 positions; decays are so slow that the first position is still seen from the last."""


def slowly_decaying(kind: str) -> ops.Recurrence:
    g = torch.Generator().manual_seed(0)
    heads, width, state = 4, 1 if kind.startswith("mamba") else 3, 5
    x = torch.randn(2, LENGTH, heads, width, generator=g, dtype=torch.float64)
    b, c = (torch.randn(2, LENGTH, 2, state, generator=g, dtype=torch.float64) for _ in range(2))
    rate = torch.rand(2, LENGTH, heads, state, generator=g, dtype=torch.float64) / 100
    A = -torch.rand(heads, state, generator=g, dtype=torch.float64) - 0.5
    if kind == "one log-decay per head":
        return ops.Recurrence(x, b, c, log_a=-rate[..., :1])
    if kind == "a log-decay per state":
        return ops.Recurrence(x, b, c, log_a=-rate)
    if kind == "mamba2":
        return ops.Recurrence(x.repeat(1, 1, 1, 3), b, c, delta=rate[..., 0], A=A[:, :1])
    return ops.Recurrence(x, b, c, delta=rate[..., 0], A=A, expected=kind == "mamba expected")


DECAY_FORMS = ("one log-decay per head", "a log-decay per state", "mamba", "mamba expected", "mamba2")


@pytest.mark.parametrize("kind", DECAY_FORMS)
def test_survival_over_more_than_a_piece_is_that_of_the_runs_that_write_once(kind):
    r = slowly_decaying(kind)
    alone = survival.remaining_reference(r)
    norms = alone.norm(dim=(3, 4))
    assert norms[:, 0].sum() > 0.05 * norms[:, -1].sum()  # something is left of the first pieces
    torch.testing.assert_close(survival.remaining_norms(r), norms, rtol=1e-9, atol=1e-12)
    shares = norms.sum(2) / norms.sum((1, 2))[:, None]
    torch.testing.assert_close(survival.shares([r]), shares, rtol=1e-9, atol=1e-12)
    state = ops.scan_reference(r).state
    towards, _ = survival.left_towards_state(r)
    torch.testing.assert_close(towards, (alone * state[:, None]).sum((3, 4)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_survival_in_float32_over_more_than_a_piece(kind):
    """Float32 has kernels of its own on some devices."""
    r = slowly_decaying(kind)
    norms = survival.remaining_reference(r).norm(dim=(3, 4))
    torch.testing.assert_close(survival.remaining_norms(r.to(torch.float32)).double(), norms, rtol=1e-4, atol=1e-6)


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
