"""Recurrences: the fast scans against the definition, identities, gradients."""

from dataclasses import replace

import pytest
import torch
from ssmscope import backends, ops
from ssmscope.backends.c import selective_scan
from ssmscope.ops import Recurrence, diagonal, scans, ssd

FORMS = ["factors", "factors-expected", "whole"]


def recurrence(
    form: str = "factors", *, batch: int = 2, length: int = 37, heads: int = 6, width: int = 3, state: int = 4,
    groups: int = 2, decays: str = "state", dtype: torch.dtype = torch.float64, seed: int = 0,
    requires_grad: bool = False,
) -> tuple[Recurrence, dict[str, torch.Tensor]]:  # fmt: skip
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    def uniform(*shape):
        return torch.rand(*shape, generator=g, dtype=torch.float64).to(dtype)

    n = state if decays == "state" else 1
    terms = {
        "x": draw(batch, length, heads, width),
        "b": draw(batch, length, groups, state),
        "c": draw(batch, length, groups, state),
        "D": draw(heads),
    }
    if form == "whole":  # decays from 1e-30 to 1, many of them close to 1
        log_a = -69.0 * uniform(batch, length, heads, n) ** 4
        log_a[:, ::7] = 0.0
        log_a[:, 3::7] = -69.0
        terms["log_a"] = log_a
        terms["delta"] = uniform(batch, length, heads) + 0.1
    else:
        terms["delta"] = 5 * uniform(batch, length, heads) ** 3
        terms["A"] = -16 * uniform(heads, n)
    if requires_grad:
        for t in terms.values():
            t.requires_grad_()
    return Recurrence(**terms, expected=form == "factors-expected"), terms


SHAPES = [
    dict(heads=6, width=1, groups=1), dict(heads=6, width=3, groups=2), dict(heads=3, width=4, groups=3, length=1),
    dict(heads=2, width=1, groups=1, length=70, batch=3), dict(heads=4, width=2, groups=2, length=33, state=1),
    dict(heads=1, width=3, groups=1), dict(heads=4, width=3, groups=1, length=2, state=5, batch=1),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decays", ["state", "head"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_scan_and_its_gradients_are_those_of_the_definition(form, decays, shape):
    r, terms = recurrence(form, decays=decays, requires_grad=True, **shape)
    initial = torch.randn(shape.get("batch", 2), shape["heads"], shape["width"], shape.get("state", 4)).double()
    for start in (None, initial.requires_grad_()):
        inputs, gradients = [*terms.values(), *([] if start is None else [start])], []
        fast, slow = ops.scan(r, start, retention=True), ops.scan_reference(r, start)
        for a, b in zip(fast, slow):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        for out in (fast, slow):
            weighted = (out.y * torch.sin(torch.arange(out.y.numel()).view(out.y.shape))).sum()
            gradients.append(torch.autograd.grad(weighted + (out.state**2).sum(), inputs))
        for a, b in zip(*gradients):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("decays", ["state", "head"])
def test_no_steps_leave_the_state_as_it_is(decays):
    r, H = recurrence(decays=decays, length=0)[0], torch.randn(2, 6, 3, 4).double()
    for found in (ops.scan(r, H), ops.scan_reference(r, H)):
        assert found.y.shape == (2, 0, 6, 3) and torch.equal(found.state, H)


@pytest.mark.parametrize("decays", ["state", "head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_decays_give_finite_values_and_gradients(decays, dtype):
    r, terms = recurrence(decays=decays, dtype=dtype, requires_grad=True, length=64)
    with torch.no_grad():
        terms["delta"][:, ::3] = 0.0  # decay 1
        terms["delta"][:, 1::3] = 1e6  # decay 0
    out = ops.scan(r)
    (out.y.sum() + out.state.sum()).backward()
    assert out.y.isfinite().all() and out.state.isfinite().all()
    for name, t in terms.items():
        assert t.grad.isfinite().all(), name


@pytest.mark.parametrize("decays", ["state", "head"])
def test_float32_is_within_1e_5_of_float64(decays):
    for form in FORMS:
        r, _ = recurrence(form, decays=decays, length=300, dtype=torch.float32)
        fast = ops.scan(r)
        exact = ops.scan_reference(r.to(torch.float64))
        assert (fast.y - exact.y).abs().max() < 1e-5 * exact.y.abs().max()


def test_expected_decay_is_the_mean_over_exponential_steps():
    mean, A = 0.7, -1.3
    steps = torch.distributions.Exponential(1 / mean).sample((400_000,)).double()
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    r = Recurrence(
        x=one, b=one, c=one, delta=torch.full((1, 1, 1), mean).double(), A=torch.tensor([[A]]).double(), expected=True
    )
    samples = (steps * A).exp()
    error = 5 * samples.std() / samples.numel() ** 0.5
    assert abs(r.log_decay().exp().item() - samples.mean()) < error
    assert abs(torch.tensor(A * mean).exp() - samples.mean()) > 5 * error  # exp of the mean is not a mean


def test_write_of_a_tiny_step_keeps_its_digits():
    one = torch.ones(1, 1, 1, 1)
    r = Recurrence(x=one, b=one, c=one, delta=torch.full((1, 1, 1), 1e-9), A=torch.tensor([[-1.0]]))
    torch.testing.assert_close(ops.write(r).item(), 1e-9, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [{}, {"width": 1, "state": 1, "groups": 6}], ids=str)
def test_joint_scans_are_the_separate_ones(form, shape, monkeypatch):
    """Each with its own decays, skip, state and retention, gradients too; one may have no skip."""
    drawn = [recurrence(form, decays="head", seed=seed, requires_grad=True, **shape) for seed in (1, 2, 3)]
    drawn[2][1].pop("D")
    rs = [drawn[0][0], drawn[1][0], replace(drawn[2][0], D=None)]
    terms = [t for _, each in drawn for t in each.values()]
    starts = [None, *(torch.randn(2, r.shape[2], *r.shape[3:]).double().requires_grad_() for r in rs[1:])]
    runs = []
    monkeypatch.setattr(scans, "scan", lambda r, *args, **kwargs: runs.append(r.shape) or ops.scan(r, *args, **kwargs))
    for initials in ([None] * len(rs), starts):
        inputs = [*terms, *(H for H in initials if H is not None)]
        found = scans.scan_all(rs, initials, retention=True)
        alone = [ops.scan(r, H, retention=True) for r, H in zip(rs, initials)]
        for ours, expected in zip(found, alone, strict=True):
            for a, b in zip(ours, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        gradients = (
            torch.autograd.grad(sum((s.y.sin() * i).sum() + (s.state**2).sum() for i, s in enumerate(each, 1)), inputs)
            for each in (found, alone)
        )
        for ours, expected in zip(*gradients):
            torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    assert [shape[0] for shape in runs] == [6, 6]
    assert scans.scan_all(rs, [None] * len(rs))[0].retention is None


def test_recurrences_of_different_forms_are_scanned_one_by_one():
    r, _ = recurrence(decays="head")
    others = [
        recurrence(decays="head", groups=3)[0], recurrence(decays="head", state=5)[0],
        recurrence(decays="head", width=2)[0], recurrence(decays="head", dtype=torch.float32)[0],
        recurrence(decays="head", batch=3)[0], replace(recurrence("whole", decays="head")[0], delta=None),
        recurrence(decays="state")[0], replace(r, order=torch.arange(36, -1, -1)),
    ]  # fmt: skip
    for other in others:
        for pair in ([r, other], [other, other]):
            for found, expected in zip(scans.scan_all(pair, [None, None]), map(ops.scan, pair), strict=True):
                torch.testing.assert_close(found.y, expected.y)
                torch.testing.assert_close(found.state, expected.state)


@pytest.mark.skipif(not backends.enabled() or selective_scan.why_not() is not None, reason="no C kernel")
@pytest.mark.parametrize("start", [False, True], ids=["from zero", "from a state"])
def test_a_cpu_walks_heads_of_small_states(start, monkeypatch):
    """Values, the final state and all gradients, with decays, steps and widths that differ between heads."""
    r, terms = recurrence(decays="head", groups=1, width=5, length=71, dtype=torch.float32, requires_grad=True)
    H = torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(1)).requires_grad_() if start else None
    exact_terms = {name: t.detach().double().requires_grad_() for name, t in terms.items()}
    exact_H = H.detach().double().requires_grad_() if H is not None else None
    monkeypatch.setattr(ssd, "scan", None)  # not used
    runs = ((ops.scan, r, terms, H), (ops.scan_reference, Recurrence(**exact_terms), exact_terms, exact_H))
    found = []
    for run, of, leaves, initial in runs:
        y, state, kept = run(of, initial, retention=True) if run is ops.scan else run(of, initial)
        weights = torch.sin(torch.arange(y.numel())).view(y.shape)
        inputs = [*leaves.values(), *([] if initial is None else [initial])]
        found.append([y, state, kept, *torch.autograd.grad((y * weights).sum() + (state**2).sum(), inputs)])
    for ours, slow in zip(*found, strict=True):
        assert ours.dtype is torch.float32 and (ours - slow).abs().max() <= 1e-5 * slow.abs().max()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("chunks", [1, None])
def test_a_decay_per_state_in_pieces_of_any_size(form, chunks, monkeypatch):
    """Steps held a few at a time, with gradients through each piece's first state, in one chunk and in several."""
    r, terms = recurrence(form, heads=3, width=1, groups=1, length=45, requires_grad=True)
    initial = torch.randn(2, 3, 1, 4).double().requires_grad_()
    monkeypatch.setitem(diagonal.MAX_NUMBERS_HELD, "cpu", 10 * initial.numel())
    scan = diagonal.scan_numbers
    monkeypatch.setattr(diagonal, "scan_numbers", lambda a, written, H, _: scan(a, written, H, chunks))
    found, exact = ops.scan(r, initial, retention=True), ops.scan_reference(r, initial)
    for ours, wanted in zip(found, exact):
        torch.testing.assert_close(ours, wanted, rtol=1e-11, atol=1e-11)
    inputs = [*terms.values(), initial]
    for ours, wanted in zip(*(torch.autograd.grad(o.y.sin().sum() + o.state.sum(), inputs) for o in (found, exact))):
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-10)
