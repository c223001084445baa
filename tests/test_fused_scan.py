"""The Triton kernels of the scan against the definition in float64, and how they come and stay away.

On a machine with a GPU the compiled kernels are tested; elsewhere the same kernels in triton's interpreter, where
triton is installed and TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import sys

import pytest
import torch

from ssmscope import ssm
from ssmscope.scans import diagonal, fused, native
from ssmscope.ssm import Recurrence

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("x", "b", "c", "initial", "delta", "A")


def draw(batch=2, length=37, heads=6, groups=1, state=4, *, seed=0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(DEVICE)

    return {
        "x": normal(batch, length, heads, 1),
        "b": normal(batch, length, groups, state),
        "c": normal(batch, length, groups, state),
        "initial": normal(batch, heads, 1, state),
        "delta": 5 * torch.rand(batch, length, heads, generator=g).to(DEVICE) ** 3,
        "A": -16 * torch.rand(heads, state, generator=g).to(DEVICE),
    }


def run(terms, *, expected=False, retention=False):
    return fused.scan(*(terms[n] for n in NAMES), expected=expected, retention=retention)


def why_skipped() -> str | None:
    if DEVICE == "cuda":
        return fused.why_not()
    library = fused.kernels.found()
    if isinstance(library, str):
        return library
    if not library.INTERPRETED:
        return "no GPU; with TRITON_INTERPRET=1 the kernels are interpreted"
    try:
        run(draw(1, 1, 1))
    except library.triton.runtime.errors.InterpreterError as error:  # that of triton 3.6.0 needs numpy below 2.4
        return f"triton's interpreter does not work here: {error}"
    return None


WHY = why_skipped()
needs_kernels = pytest.mark.skipif(WHY is not None, reason=f"no Triton kernels here: {WHY}")


def definition(terms, *, expected=False) -> ssm.Scan:
    """In float64. `x` is what is written already, so log a is given whole: with `delta` it would be scaled again."""
    t = {name: value.double() for name, value in terms.items()}
    log_a = t["delta"][..., None] * t["A"]
    if expected:
        log_a = -torch.log1p(-log_a)
    return ssm.scan_reference(Recurrence(x=t["x"], b=t["b"], c=t["c"], log_a=log_a), t["initial"])


def gradients(out, terms):
    y, final = out[:2]
    weights = torch.sin(torch.arange(y.numel(), dtype=torch.float64, device=DEVICE)).view(y.shape)
    inputs = [terms[n] for n in NAMES]
    return torch.autograd.grad((y * weights).sum() + (final**2).sum(), inputs, materialize_grads=True)


def near(ours: torch.Tensor, exact: torch.Tensor, tolerance=1e-5) -> None:
    assert ours.shape == exact.shape and ours.dtype == torch.float32
    if exact.numel():
        assert (ours - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Of 64 states, so that few channels make several programs, the last of them with channels to spare."""
    monkeypatch.setattr(fused, "TILE", 64)
    monkeypatch.setattr(fused, "FILL", 1)


SHAPES = [
    dict(batch=b, length=length, heads=heads, groups=groups, state=n)
    for b, length, heads, groups, n in [
        (1, 0, 5, 1, 4),
        (1, 1, 3, 1, 16),
        (1, 31, 5, 1, 16),
        (1, 33, 14, 2, 5),
        (3, 17, 2, 1, 1),
        (1, 100, 2, 2, 2),
        (2, 2 * fused.CHECK, 2, 1, 65),
    ]
]


@needs_kernels
@pytest.mark.parametrize("expected", [False, True], ids=["exp", "expected"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_are_those_of_the_definition(shape, expected):
    terms = draw(**shape)
    y, final, kept = run(terms, expected=expected, retention=True)
    exact = definition(terms, expected=expected)
    near(y, exact.y)
    near(final, exact.state)
    near(kept, exact.retention, 1e-6)
    assert run(terms)[2] is None

    leaves = {name: t.requires_grad_() for name, t in terms.items()}
    y2, final2, kept2 = run(leaves, expected=expected, retention=True)
    assert torch.equal(y, y2) and torch.equal(final, final2) and torch.equal(kept, kept2)
    for name, ours, slow in zip(
        NAMES, gradients((y2, final2), leaves), gradients(definition(leaves, expected=expected), leaves)
    ):
        assert torch.isfinite(ours).all(), name
        near(ours, slow.double())


@needs_kernels
def test_any_strides():
    terms = draw(2, 20, 10, 1, 8)
    plain = run(terms, retention=True)
    strided = dict(terms)
    for name in ("x", "delta"):  # channels first, as a convolution leaves them
        strided[name] = terms[name].transpose(1, 2).contiguous().transpose(1, 2)
    projected = torch.cat([terms["b"], terms["c"]], dim=-1)
    strided["b"], strided["c"] = projected.split(8, dim=-1)
    for name in ("A", "initial"):
        strided[name] = terms[name].transpose(0, -1).contiguous().transpose(0, -1)
    for a, b in zip(plain, run(strided, retention=True)):
        assert torch.equal(a, b)
    one_step = terms["delta"][:, :, :1]
    spread = {**terms, "delta": one_step.expand(-1, -1, 10).requires_grad_()}
    held = {**terms, "delta": one_step.repeat(1, 1, 10).requires_grad_()}
    grads = [torch.autograd.grad(run(t)[0].sum(), t["delta"])[0] for t in (spread, held)]  # of a gradient of stride 0
    assert torch.equal(*grads)


@needs_kernels
def test_extreme_decays():
    terms = draw(1, 40, 6, 1, 5)
    terms["delta"][:, ::3] = 0.0  # decay 1
    terms["delta"][:, 1::3] = 1e6  # decay 0
    terms["A"][:, 0] = 0.0
    leaves = {name: t.requires_grad_() for name, t in terms.items()}
    y, final, kept = run(leaves, retention=True)
    exact = definition(leaves)
    near(y, exact.y)
    near(kept, exact.retention, 1e-6)
    for name, ours, slow in zip(NAMES, gradients((y, final), leaves), gradients(exact, leaves)):
        assert ours.isfinite().all(), name
        near(ours, slow.double())


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
def test_gradients_show_nan():
    terms = {name: t.requires_grad_() for name, t in draw(1, 20, 6, 1, 5).items()}
    y, _, _ = run(terms)
    at = torch.zeros_like(y)
    at[0, 10, 3] = torch.nan
    grads = dict(zip(NAMES, torch.autograd.grad(y, [terms[n] for n in NAMES], at)))
    assert grads["x"][0, :11, 3].isnan().all() and grads["x"][0, 11:, 3].isfinite().all()
    assert grads["delta"][0, :, 2].isfinite().all() and grads["b"][0, :11].isnan().all()


@needs_kernels
def test_how_the_work_is_cut_changes_no_value(monkeypatch):
    terms = {name: t.requires_grad_() for name, t in draw(1, 35, 6, 2, 4).items()}
    whole = run(terms, retention=True)
    grads = gradients(whole, terms)
    for tile, check in ((8, 16), (64, 7)):
        monkeypatch.setattr(fused, "TILE", tile)
        monkeypatch.setattr(fused, "CHECK", check)
        cut = run(terms, retention=True)
        for a, b in zip((*whole, *grads), (*cut, *gradients(cut, terms))):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    half = {n: t[:, :15] if n in ("x", "b", "c", "delta") else t for n, t in terms.items()}
    rest = {n: t[:, 15:] if n in ("x", "b", "c", "delta") else t for n, t in terms.items()}
    first = run(half)
    second = run({**rest, "initial": first[1]})
    torch.testing.assert_close(torch.cat([first[0], second[0]], dim=1), whole[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(second[1], whole[1], rtol=1e-5, atol=1e-5)


@needs_kernels
def test_two_runs_give_the_same_bits():
    terms = {name: t.requires_grad_() for name, t in draw(2, 20, 12, 1, 8).items()}
    runs = []
    for _ in range(2):
        out = run(terms, retention=True)
        runs.append((*out, *gradients(out, terms)))
    for a, b in zip(*runs):
        assert torch.equal(a, b)


@needs_kernels
def test_it_is_what_ssm_scan_runs(monkeypatch):
    monkeypatch.setattr(diagonal, "_forward", lambda *_: pytest.fail("the torch path ran"))
    if DEVICE == "cpu":
        monkeypatch.setattr(native, "applicable", lambda *_: False)
        monkeypatch.setattr(fused, "applicable", lambda *_: True)
    t = draw(2, 20, 12, 2, 5)
    D = torch.ones(12, device=DEVICE)
    for expected in (False, True):
        r = Recurrence(x=t["x"], b=t["b"], c=t["c"], delta=t["delta"], A=t["A"], D=D, expected=expected)
        ours, exact = ssm.scan(r, t["initial"], retention=True), ssm.scan_reference(r.to(torch.float64), t["initial"])
        for a, b in zip(ours, exact):
            near(a, b)


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
    from ssmscope import scans

    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "ssmscope.scans.fused_kernels", raising=False)
    monkeypatch.delattr(scans, "fused_kernels", raising=False)
    why = fused.kernels.look()
    assert isinstance(why, str) and why.startswith("triton cannot be imported")
