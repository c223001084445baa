"""Triton's selective scan and its gradients against a loop over steps in float64, and autograd through it."""

from functools import partial

import pytest
import torch
from backends.interpreted import DEVICE, needs_triton
from torch import Tensor

pytest.importorskip("triton")
from ssmscope.backends.triton import selective_scan  # noqa: E402

pytestmark = needs_triton
EXPONENTIAL = {"expected": False, "retention": False}


def draw_terms(length: int, heads: int = 3, groups: int = 1, state: int = 16, batch: int = 2, initial: bool = True):
    """Return x, b, c, the initial state or None, Δ and A, drawn from one seed."""
    draw = torch.Generator().manual_seed(0)
    x, b, c = (torch.randn(batch, length, *s, generator=draw) for s in ((heads, 1), (groups, state), (groups, state)))
    H = torch.randn(batch, heads, 1, state, generator=draw)
    delta = torch.rand(batch, length, heads, generator=draw)
    A = -3 * torch.rand(heads, state, generator=draw)
    return [None if t is None else t.to(DEVICE) for t in (x, b, c, H if initial else None, delta, A)]


def division(terms: list[Tensor]) -> selective_scan._Terms:
    """Return the division of a scan into programs."""
    return selective_scan._Terms(*terms[:3], *terms[4:], expected=False)


def reference(x, b, c, initial, delta, A, *, expected: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the final state and the mean decay of every step, one step after the other."""
    b, c = (t.repeat_interleave(x.shape[2] // t.shape[2], 2) for t in (b, c))
    H = torch.zeros_like(b[:, 0]) if initial is None else initial.squeeze(2)
    outputs, decays = [], []
    for t in range(x.shape[1]):
        exponents = delta[:, t, :, None] * A
        decays.append(1 / (1 - exponents) if expected else exponents.exp())
        H = decays[-1] * H + (delta[:, t, :, None] * x[:, t]) * b[:, t]
        outputs.append((H * c[:, t]).sum(-1, keepdim=True))
    return torch.stack(outputs, 1), H.unsqueeze(2), torch.stack(decays, 1).mean((2, 3))


def near(ours: Tensor, exact: Tensor, tolerance: float = 3e-6) -> None:
    assert ours.shape == exact.shape and ours.dtype == torch.float32
    assert (ours.double() - exact).abs().max() <= tolerance * exact.abs().max() + 1e-37


def run_with_gradients(scan, terms, **options):
    """Return y, the final state and the mean decays, and the gradients of every term of weighted outputs."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in terms]
    y, final, mean_decay = scan(*leaves, **options)
    weights = torch.linspace(-1, 1, y.numel()).to(y).view(y.shape)
    ((y * weights).sum() + (final * final).sum() / 2).backward()
    return (y, final, mean_decay), [t.grad for t in leaves if t is not None]


def check(terms, *, expected: bool = False, tolerance: float = 3e-6) -> None:
    """Compare outputs and gradients with the reference."""
    exact, exact_grads = run_with_gradients(
        reference, [None if t is None else t.double() for t in terms], expected=expected
    )
    ours, grads = run_with_gradients(selective_scan.scan, terms, expected=expected, retention=True)
    for one, other in zip((*ours, *grads), (*exact, *exact_grads)):
        near(one, other, tolerance)


@pytest.fixture
def many_programs(monkeypatch):
    """Cut terms into several blocks of channels and chunks."""
    monkeypatch.setattr(selective_scan, "NUMBERS_PER_PROGRAM", 32)
    monkeypatch.setattr(selective_scan, "MIN_STEPS_PER_CHUNK", 16)


@pytest.mark.parametrize("length", [1, 15, 16, 17])
@pytest.mark.parametrize("expected", [False, True])
def test_one_chunk(length, expected):
    check(draw_terms(length, initial=expected), expected=expected)


@pytest.mark.parametrize(
    ("length", "heads", "groups", "state", "initial", "expected"),
    [(70, 2, 1, 16, True, False), (50, 6, 2, 5, False, True), (50, 1, 1, 17, True, True), (50, 2, 2, 1, False, False)],
)
def test_several_chunks(many_programs, length, heads, groups, state, initial, expected):
    terms = draw_terms(length, heads, groups, state, batch=1, initial=initial)
    assert division(terms).grid[1] == (3 if length == 70 else 2)
    check(terms, expected=expected)


def test_several_blocks_of_a_group(many_programs):
    terms = draw_terms(20, heads=10, groups=2, batch=1)
    assert division(terms).blocks == 3
    check(terms)


def test_chunks_change_nothing_but_rounding(many_programs, monkeypatch):
    terms = draw_terms(50, heads=2, batch=1)
    chunked = selective_scan.scan(*terms, expected=False, retention=True)
    monkeypatch.setattr(selective_scan, "MIN_STEPS_PER_CHUNK", 1000)
    assert division(terms).grid[1] == 1
    for one, other in zip(chunked, selective_scan.scan(*terms, expected=False, retention=True)):
        near(one, other.double(), 1e-6)


def test_views(many_programs):
    x, b, c, initial, delta, A = draw_terms(50, heads=2, batch=1)
    projected = torch.cat([torch.ones_like(b), b, c], dim=-1)
    halves = torch.stack([delta, x.squeeze(-1)], dim=2)
    every_second = initial.repeat_interleave(2, dim=-1)[..., ::2]
    views = (
        halves[:, :, 1].unsqueeze(-1), projected[..., 16:32], projected[..., 32:], every_second, halves[:, :, 0],
        A.T.contiguous().T,
    )  # fmt: skip
    along_time = (x.transpose(1, 2).contiguous().transpose(1, 2), *(t.mT.contiguous().mT for t in (b, c)), *views[3:])
    outputs, grads = run_with_gradients(selective_scan.scan, (x, b, c, initial, delta, A), **EXPONENTIAL)
    for terms in (views, along_time):
        leaves = [t.detach().requires_grad_() for t in terms]
        ours = selective_scan.scan(*leaves, **EXPONENTIAL)
        assert all(torch.equal(one, other) for one, other in zip(ours[:2], outputs[:2]))
        weights = torch.linspace(-1, 1, x.numel()).to(x).view(x.shape)
        ((ours[0] * weights).sum() + ours[1].square().sum() / 2).backward()
        assert all(torch.equal(leaf.grad, grad) for leaf, grad in zip(leaves, grads))


@pytest.mark.parametrize("expected", [False, True])
def test_states_that_vanish(many_programs, expected):
    x, b, c, initial, delta, A = draw_terms(50, heads=2, batch=1)
    delta[:, ::3] *= 1e4  # decays of exp(-30000), where the expected ones are 1 / 30000
    delta[:, 1::3] = 0  # and none
    check((x, b, c, initial, delta, A), expected=expected)


def test_states_that_grow(many_programs):
    x, b, c, initial, delta, A = draw_terms(50, heads=2, batch=1)
    check((x, b, c, initial, delta, -A / 10), tolerance=1e-5)


def test_same_bits_every_time(many_programs):
    terms = draw_terms(50, heads=2, batch=1)
    runs = [run_with_gradients(selective_scan.scan, terms, expected=False, retention=True) for _ in range(2)]
    for one, other in zip(*((*outputs, *grads) for outputs, grads in runs)):
        assert torch.equal(one, other)


@pytest.mark.parametrize("used", [0, 1])
def test_gradient_of_one_output_alone(many_programs, used):
    terms, grads = draw_terms(50, heads=2, batch=1), []
    for scan, dtype in ((partial(selective_scan.scan, retention=True), torch.float32), (reference, torch.float64)):
        leaves = [t.to(dtype).requires_grad_() for t in terms]
        out = scan(*leaves, expected=False)[used]
        grads.append(torch.autograd.grad(out.sum(), leaves, materialize_grads=True))
    for one, other in zip(*grads):
        near(one, other)


def test_what_has_no_gradient():
    leaves = [t.requires_grad_() for t in draw_terms(4)]
    y, _, mean_decay = selective_scan.scan(*leaves, expected=False, retention=True)
    assert y.requires_grad and not mean_decay.requires_grad
    (grad,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_fits():
    terms = x, b, c, initial, delta, A = draw_terms(4)
    assert selective_scan.fits(*terms) and selective_scan.fits(x, b, c, None, delta, A)
    assert not selective_scan.fits(x.expand(-1, -1, -1, 2), *terms[1:])
    assert not selective_scan.fits(*terms[:5], A[:, :1])
    assert not selective_scan.fits(x[:, :0], b[:, :0], c[:, :0], initial, delta[:, :0], A)
    for k in range(6):
        assert not selective_scan.fits(*(t.double() if i == k else t for i, t in enumerate(terms)))
    wide = draw_terms(1, state=selective_scan.MAX_STATES_PER_CHANNEL + 1)
    assert not selective_scan.fits(*wide)
