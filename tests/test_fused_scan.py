"""The Triton kernels of the scan against the definition in float64, and how they come and stay away."""

from __future__ import annotations

import pytest
import torch
from scan_checks import DEVICE, NAMES, ScanChecks, draw, gradients, leaves_of, says_that_triton_is_absent, triton_only

from ssmscope import scans
from ssmscope.scans import diagonal, fused, native


def run(terms, *, expected=False, retention=False):
    return fused.scan(*(terms[n] for n in NAMES), expected=expected, retention=retention)


needs_kernels = triton_only(fused, lambda: run(draw(1, 1, 1)))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Of 64 states, so that few channels make several programs, the last of them with channels to spare."""
    monkeypatch.setattr(fused, "TILE", 64)
    monkeypatch.setattr(fused, "FILL", 1)


SHAPES = [  # batch, length, heads, groups, state
    (1, 0, 5, 1, 4),
    (1, 1, 3, 1, 16),
    (1, 31, 5, 1, 16),
    (1, 33, 14, 2, 5),
    (3, 17, 2, 1, 1),
    (1, 100, 2, 2, 2),
    (2, 2 * fused.CHECK, 2, 1, 65),
]


@needs_kernels
class TestScan(ScanChecks):
    terms = dict(length=40, heads=10, state=8)
    run = staticmethod(run)

    @pytest.mark.parametrize("expected", [False, True], ids=["exp", "expected"])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_values_and_gradients(self, shape, expected):
        self.are_those_of_the_definition(draw(*shape), expected)

    @pytest.mark.parametrize("expected", [False, True])
    def test_it_is_what_ssm_scan_runs(self, expected, monkeypatch):
        monkeypatch.setattr(diagonal, "_forward", lambda *_: pytest.fail("the torch path ran"))
        if DEVICE == "cpu":
            monkeypatch.setattr(native, "applicable", lambda *_: False)
            monkeypatch.setattr(fused, "applicable", lambda *_: True)
        self.is_what_ssm_scan_runs(draw(2, 20, 12, 2, 5), expected)


@needs_kernels
def test_the_decay_is_exp_down_to_the_floor():
    steps = torch.cat([torch.linspace(0, 79.9, 400), torch.tensor([0.0, 1e-9, 80.0, 100.0, 1e30, torch.inf])])
    steps = steps.to(DEVICE)
    one = torch.ones(1, 1, 1, 1, device=DEVICE)
    A = -torch.ones(
        len(steps), 3, device=DEVICE
    )  # three states: an edge beside them, which infinite steps must not reach
    terms = dict(x=0 * one, b=one.expand(-1, -1, -1, 3), initial=torch.ones(1, len(steps), 1, 3, device=DEVICE), A=A)
    terms |= dict(x=torch.zeros(1, 1, len(steps), 1, device=DEVICE), c=terms["b"], delta=steps.view(1, 1, -1))
    y, _, _ = run(terms)
    exact = 3 * (-steps.double()).clamp(min=-80).exp()
    assert (y.flatten().double() / exact - 1).abs().max() <= 1e-5  # a step of 80 is known to 5e-6 only
    near_zero = steps < 1
    assert (y.flatten().double() / exact - 1)[near_zero].abs().max() <= 5e-7
    assert y.flatten()[steps == 0].unique().item() == 3.0


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_nan_shows(name):
    terms = draw(2, 20, 6, 1, 5)
    at = (0,) * (2 if name == "A" else 3)
    terms[name][at] = torch.nan
    y, _, kept = run(terms, retention=True)
    assert y[0, :, 0].isnan().any()
    assert y[1].isfinite().all() == (name != "A")
    assert kept[0].isnan().any() == (name in ("delta", "A"))


@needs_kernels
def test_how_the_work_is_cut_changes_no_value(monkeypatch):
    terms = leaves_of(draw(1, 35, 6, 2, 4))
    whole = run(terms, retention=True)
    grads = gradients(whole, terms.values())
    for tile, check in ((8, 16), (64, 7)):
        monkeypatch.setattr(fused, "TILE", tile)
        monkeypatch.setattr(fused, "CHECK", check)
        cut = run(terms, retention=True)
        for a, b in zip((*whole, *grads), (*cut, *gradients(cut, terms.values()))):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    half = {n: t[:, :15] if n in ("x", "b", "c", "delta") else t for n, t in terms.items()}
    rest = {n: t[:, 15:] if n in ("x", "b", "c", "delta") else t for n, t in terms.items()}
    first = run(half)
    second = run({**rest, "initial": first[1]})
    torch.testing.assert_close(torch.cat([first[0], second[0]], dim=1), whole[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(second[1], whole[1], rtol=1e-5, atol=1e-5)


@needs_kernels
def test_two_runs_give_the_same_bits():
    terms = leaves_of(draw(2, 20, 12, 1, 8))
    runs = []
    for _ in range(2):
        out = run(terms, retention=True)
        runs.append((*out, *gradients(out, terms.values())))
    for a, b in zip(*runs):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tile", [1, 64, 256])
@pytest.mark.parametrize("fill", [1, 100, 10**6])
def test_every_channel_has_one_program(tile, fill, monkeypatch):
    monkeypatch.setattr(fused, "TILE", tile)
    monkeypatch.setattr(fused, "FILL", fill)
    for heads, groups, state in ((1, 1, 1), (5, 1, 16), (14, 2, 5), (1536, 1, 16), (64, 1, 64), (3, 3, 300)):
        plan = fused._plan(torch.empty(2, 7, heads, 1), torch.empty(2, 7, groups, state))
        share = heads // groups
        assert plan.blocks * plan.block >= share > (plan.blocks - 1) * plan.block
        assert plan.states >= state > plan.states // 2 and plan.block & (plan.block - 1) == 0
        assert plan.block == 1 or (plan.block * plan.states <= tile and plan.programs >= min(fill, 2 * groups))
        assert plan.programs == 2 * groups * plan.blocks and plan.chunks * fused.CHECK >= 7


def test_other_cases_stay_away(monkeypatch):
    t = {name: value.cpu() for name, value in draw().items()}
    assert not fused.applicable(*(t[n] for n in NAMES))
    assert fused.why_not("cpu") == "they run on GPUs only"
    if DEVICE == "cuda":
        on_gpu = draw()
        assert fused.applicable(*(on_gpu[n] for n in NAMES))
        for change in (
            {n: v.double() for n, v in on_gpu.items()},
            {"x": on_gpu["x"].expand(-1, -1, -1, 3), "initial": on_gpu["initial"].expand(-1, -1, 3, -1)},
            {"A": t["A"]},
            {"A": on_gpu["A"][:, :1]},
        ):
            assert not fused.applicable(*({**on_gpu, **change}[n] for n in NAMES))
    monkeypatch.setenv(native.SWITCH, "0")
    assert not fused.available() and fused.why_not() == "SSMSCOPE_NATIVE=0"


def test_without_triton_it_says_so(monkeypatch):
    says_that_triton_is_absent(monkeypatch, fused.kernels, scans)
