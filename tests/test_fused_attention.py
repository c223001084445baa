"""The Triton kernels of the mean implicit attention against the definition in float64, and how they stay away."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from exhaustive import ALL
from scan_checks import DEVICE, says_that_triton_is_absent, slow_interpreted, triton_only

from ssmscope import matrices, ssm
from ssmscope.errors import InputError
from ssmscope.matrices import fused
from ssmscope.matrices.terms import Around
from ssmscope.scans import native

NAMES = ("b", "c", "delta", "A", "left", "right")
SEVERAL = 1 if DEVICE == "cpu" and not ALL else 2
"""Texts, or states: of one where that loses nothing and each costs the interpreter as much again."""
TOLERANCE = {"high": 1.5e-3, "highest": 5e-6}
"""Of the largest entry; the interpreter multiplies in float32 whatever the precision, but for rounded operands."""


def draw(batch=1, length=37, heads=6, bc_groups=1, state=4, *, decay=1.0, factors=False, seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g).to(DEVICE)

    return {
        "b": normal(batch, length, bc_groups, state),
        "c": normal(batch, length, bc_groups, state),
        "delta": decay * torch.rand(batch, length, heads, generator=g).to(DEVICE) ** 3,
        "A": -16 * torch.rand(heads, state, generator=g).to(DEVICE),
        "left": normal(batch, length, heads) if factors else None,
        "right": normal(batch, length, heads) if factors else None,
    }


def run(terms, *, groups=1, precision="highest"):
    return fused.mean(*(terms[n] for n in NAMES), groups=groups, precision=precision)


needs_kernels = triton_only(fused, lambda: run(draw(1, 2, 1)))


def definition(terms, *, groups=1) -> torch.Tensor:
    """In float64, each column's state by its own recurrence, h_s = right_s Δ_s b_s and h_t = exp(Δ_t A) h_{t−1}."""
    t = {name: value if value is None else value.double() for name, value in terms.items()}
    batch, length, heads = t["delta"].shape
    share = heads // t["b"].shape[2]
    b, c = (t[n].repeat_interleave(share, dim=2) for n in ("b", "c"))
    one = torch.ones_like(t["delta"])
    left, right = (one if t[n] is None else t[n] for n in ("left", "right"))
    alpha = one.new_zeros(batch, heads, length, length)
    h = one.new_zeros(batch, length, heads, b.shape[3])  # of the columns that have begun
    for step in range(length):
        h[:, :step] *= torch.exp(t["delta"][:, step, :, None] * t["A"]).unsqueeze(1)
        h[:, step] = (right * t["delta"])[:, step, :, None] * b[:, step]
        read = left[:, step, None] * (h[:, : step + 1] * c[:, step, None]).sum(-1)
        alpha[:, :, step, : step + 1] = read.mT
    return alpha.unflatten(1, (groups, -1)).mean(2)


def without_decay(terms) -> torch.Tensor:
    """The matrix where A is 0: (c_t · b_s) times the mean of left_t right_s Δ_s over channels."""
    t = {name: value.double() for name, value in terms.items()}
    read = (t["c"][:, :, 0] @ t["b"][:, :, 0].mT).unsqueeze(1)
    through = t["left"] @ (t["right"] * t["delta"]).mT / t["delta"].shape[2]
    return (read * through.unsqueeze(1)).tril()


def near(ours: torch.Tensor, exact: torch.Tensor, tolerance: float = TOLERANCE["highest"]) -> None:
    assert ours.shape == exact.shape and ours.dtype == torch.float32 and ours.isfinite().all()
    assert (ours - exact).abs().max() <= tolerance * exact.abs().max()
    assert torch.equal(ours, ours.tril())


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Of 64 rows, so that few steps make tiles of every kind, and programs that share the channels of a tile."""
    monkeypatch.setattr(fused, "TILE", 64)
    monkeypatch.setattr(fused, "NEAR", 8)
    monkeypatch.setattr(fused, "TRIANGLES", 8)
    monkeypatch.setattr(fused, "CHANNELS", 16)
    monkeypatch.setattr(fused, "WIDE", 16)
    monkeypatch.setattr(fused, "TOGETHER", 2)


SHAPES = [
    dict(batch=batch, length=length, heads=heads, bc_groups=bc_groups, state=state)
    for batch, length, heads, bc_groups, state in [
        (1, 1, 3, 1, 16),
        (1, 2, 1, 1, 1),
        (2, 17, 6, 2, 5),
        (1, 33, 34, 1, 3),
        (1, 70, 4, 4, 17),
        (1, 130, 36, 2, 4),
    ]
]


@needs_kernels
@pytest.mark.parametrize("factors", [False, True], ids=["plain", "factors"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_those_of_the_definition(shape, factors):
    if SEVERAL == 1 and shape["length"] >= 70 and not factors:
        pytest.skip("slow where it is interpreted: with factors it says as much")
    terms = draw(**shape, decay=0.1, factors=factors)
    near(run(terms), definition(terms))


@needs_kernels
@pytest.mark.parametrize("groups, bc_groups", [(1, 4), (4, 1), (12, 4), (3, 2), (2, 3)])
def test_any_groups(groups, bc_groups):
    terms = draw(2 if groups == 1 else 1, 70, 12, bc_groups, SEVERAL, decay=0.1, factors=True)
    near(run(terms, groups=groups), definition(terms, groups=groups))


@needs_kernels
@pytest.mark.parametrize("decay", [1e-4, 1e-2, 1.0, 30.0, 1e4])
def test_any_decay(decay):
    """From states that keep nearly all to states that are gone after one step, and blocks of them left out."""
    terms = draw(1, 140, 4, 1, 3, decay=decay, factors=True)
    near(run(terms), definition(terms))


@needs_kernels
def test_every_entry_is_as_exact_as_its_state_allows():
    """Relative to the entry itself: what is far from the diagonal is small where states decay, and counts as well."""
    terms = draw(1, 140, 1, 1, 1, decay=0.05)
    terms["b"], terms["c"] = torch.ones_like(terms["b"]), torch.ones_like(terms["c"])
    ours, exact = run(terms)[0, 0].double(), definition(terms)[0, 0]
    below = exact > 1e-34
    assert below.sum() > 5000
    assert (ours / exact - 1)[below].abs().max() <= 3e-5
    assert ours[~below].abs().max() <= 2e-34


@needs_kernels
def test_sudden_decays():
    """A step that forgets everything among steps that forget nothing leaves what comes after it exact."""
    terms = draw(1, 140, 4, 1, 3, decay=1e-3)
    terms["delta"][:, 5::23] = 1e5
    terms["delta"][:, 9] = 0.0
    terms["right"] = torch.where(terms["delta"] > 1, 1e-7, 1.0)
    terms["left"] = torch.ones_like(terms["right"])
    near(run(terms), definition(terms), 1e-5)


@needs_kernels
def test_states_that_grow_or_stay():
    terms = draw(1, 140, 4, 1, 4, decay=0.02)
    terms["A"][:, 0], terms["A"][:, 1] = 0.5, 0.0
    near(run(terms), definition(terms), 1e-5)


@needs_kernels
@pytest.mark.parametrize("precision", fused.PRECISIONS)
def test_precisions(precision):
    terms = draw(1, 140, 20, 1, 4, decay=0.1, factors=True)
    near(run(terms, precision=precision), definition(terms), TOLERANCE[precision])


@needs_kernels
@pytest.mark.parametrize(
    "decay", [pytest.param(0.001, marks=slow_interpreted), 0.1, pytest.param(1.0, marks=slow_interpreted)]
)
def test_the_largest_tiles(decay, monkeypatch):
    """As they are cut without the fixture above."""
    monkeypatch.undo()
    shapes = ((SEVERAL, 260, 3, 1, 3, 1), (1, 140, 80, 2, 1, 2))
    for (batch, length, heads, bc_groups, state, groups), alone in zip(shapes, fused.PRECISIONS):
        terms = draw(batch, length, heads, bc_groups, state, decay=decay, factors=groups == 2)
        exact = definition(terms, groups=groups)
        for precision in fused.PRECISIONS if SEVERAL > 1 else [alone]:
            near(run(terms, groups=groups, precision=precision), exact, TOLERANCE[precision])


@needs_kernels
@pytest.mark.skipif(DEVICE == "cpu", reason="slow where it is interpreted")
def test_large_matrices_for_all_precisions(monkeypatch):
    """Many chunks of channels, and more states than are looked at together: closed form, then against each other."""
    monkeypatch.undo()
    terms = draw(1, 700, 200, 1, 20, decay=0.02, factors=True)
    close = run(terms).double()
    near(run({**terms, "A": 0 * terms["A"]}), without_decay(terms), 2e-5)
    near(run(terms, precision="high"), close, TOLERANCE["high"])
    gone = {**terms, "delta": 30 * terms["delta"]}
    near(run(gone, precision="high"), run(gone).double(), TOLERANCE["high"])


@needs_kernels
def test_any_strides():
    terms = draw(2, 70, 6, 1, 5, decay=0.1, factors=True)
    plain = run(terms)
    strided = {}
    for name in ("delta", "left", "right"):  # channels first, as a convolution leaves them
        strided[name] = terms[name].transpose(1, 2).contiguous().transpose(1, 2)
    projected = torch.cat([terms["b"], terms["c"]], dim=-1)
    strided["b"], strided["c"] = projected.split(5, dim=-1)
    strided["A"] = terms["A"].T.contiguous().T
    alone = [["delta"], ["left"], ["right"], ["b", "c"], ["A"]] if SEVERAL > 1 else [["delta", "A"]]
    for names in (*alone, [*strided]):
        found = run({**terms, **{name: strided[name] for name in names}})
        # a GPU's threads share a tile of other strides in another way, and sum in another order
        assert (plain - found).abs().max() <= 1e-6 * plain.abs().max(), names


@needs_kernels
def test_how_the_work_is_cut_changes_no_value(monkeypatch):
    terms = draw(1, 140, 36, 1, SEVERAL, decay=0.1, factors=True)
    whole = run(terms)
    for changed in (
        {"FILL": 1, "SHARES": 1},
        {"TILE": 32},
        {"TILE": 128},
        {"CHANNELS": 32, "WIDE": 32},
        {"NEAR": 16},
        {"NEAR": 2, "ROOM": 1},
        {"ROOM": 200_000},
    ):
        for name, value in changed.items():
            monkeypatch.setattr(fused, name, value)
        torch.testing.assert_close(run(terms), whole, rtol=1e-5, atol=1e-6)


@needs_kernels
def test_a_map_made_before_is_made_again_of_other_tensors():
    """On a GPU by what is known of the first, in each thread; of tensors that start elsewhere as if it were new."""
    terms = [draw(SEVERAL, 70, 2, state=1, decay=0.1, factors=True, seed=seed) for seed in range(2)]
    exact = [definition(each) for each in terms]
    for each, expected in zip(terms, exact):
        near(run(each), expected)
    elsewhere = {name: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape) for name, t in terms[1].items()}
    near(run(elsewhere), exact[1])
    if torch.device(DEVICE).type == "cuda":  # triton interprets one kernel at a time
        with ThreadPoolExecutor(3) as threads:
            for found, expected in zip(threads.map(run, 4 * terms), 4 * exact, strict=True):
                near(found, expected)


@needs_kernels
@slow_interpreted
def test_two_runs_give_the_same_bits():
    terms = draw(2, 140, 50, 1, 2, decay=0.1)
    assert torch.equal(run(terms, precision="high"), run(terms, precision="high"))


@needs_kernels
@pytest.mark.parametrize("name", ["b", "c", "delta", "A", "left", "right"])
def test_nan_shows(name):
    terms = draw(2, 110, 4, 1, 3, decay=0.1, factors=True)
    terms[name][(0, 2) if name == "A" else (0, 100, 0)] = torch.nan
    out = run(terms)
    assert out[0, 0, 100:].isnan().any()
    assert out[1].isfinite().all() == (name != "A")
    assert torch.equal(out.isnan(), out.isnan().tril())


@pytest.mark.parametrize("length", [1, 31, 64, 65, 500, 2048, 5000])
@pytest.mark.parametrize("heads, bc_groups, groups", [(1536, 1, 1), (1536, 1, 6), (24, 8, 3), (3, 1, 3)])
def test_the_plan_covers_the_work_within_its_memory(length, heads, bc_groups, groups, monkeypatch):
    for tile in (32, 128):
        monkeypatch.setattr(fused, "TILE", tile)
        plan = fused._plan(2, length, heads, 16, groups, bc_groups, 2, *fused._sizes())
        assert plan.tile * plan.tiles >= length > plan.tile * (plan.tiles - 1)
        assert (heads // groups) % plan.segment == 0 and (heads // bc_groups) % plan.segment == 0
        for most, splits in ((fused.CHANNELS, plan.splits), (fused.WIDE, plan.strip_splits)):
            channels, chunks = plan.cut(most)
            assert chunks == heads // groups // plan.segment * -(-plan.segment // channels)
            assert 1 <= splits <= chunks
        assert [i for part in plan.passes for i in part] == list(range(plan.cut(fused.CHANNELS)[1]))
        assert plan.together >= 1 and (plan.bytes * 2 * len(plan.passes[0]) <= fused.ROOM or len(plan.passes[0]) == 1)
        room = fused.SHARES * length**2
        assert plan.splits == 1 or plan.splits * plan.below * plan.tile**2 <= room
        assert plan.strip_splits == 1 or plan.strip_splits * length * plan.tile <= room


def test_what_cannot_be_asked(monkeypatch):
    t = {name: value.cpu() for name, value in draw(factors=True).items()}
    arguments = [t[n] for n in NAMES]
    with pytest.raises(InputError, match="unknown precision 'hight'; known are highest, high; did you mean 'high'"):
        fused.mean(*arguments, precision="hight")
    with pytest.raises(ValueError, match="4 groups do not divide 6 heads"):
        fused.mean(*arguments, groups=4)


def test_other_cases_stay_away(monkeypatch):
    t = draw(factors=True)
    x = torch.ones(1, 37, 6, 1, device=DEVICE)
    on_cpu = {name: value.cpu() for name, value in t.items()}
    assert not fused.applicable(x.cpu(), *(on_cpu[n] for n in NAMES))
    assert fused.why_not("cpu") == "they run on GPUs only"
    if DEVICE == "cuda" and fused.why_not() is None:
        assert fused.applicable(x, *(t[n] for n in NAMES))
        assert fused.applicable(x, *({**t, "left": None, "right": None}[n] for n in NAMES))
        needs_gradient = {**t, "c": t["c"].clone().requires_grad_()}
        assert not fused.applicable(x, *(needs_gradient[n] for n in NAMES))
        with torch.no_grad():
            assert fused.applicable(x, *(needs_gradient[n] for n in NAMES))
        assert not fused.applicable(x.expand(-1, -1, -1, 2), *(t[n] for n in NAMES))
        for change in (
            {n: v.double() for n, v in t.items()},
            {"A": on_cpu["A"]},
            {"A": t["A"][:, :1]},
            {"delta": None},
            {"A": None},
        ):
            assert not fused.applicable(x, *({**t, **change}[n] for n in NAMES))
    monkeypatch.setenv(native.SWITCH, "0")
    assert not fused.available() and fused.why_not() == "SSMSCOPE_NATIVE=0"


def test_without_triton_it_says_so(monkeypatch):
    says_that_triton_is_absent(monkeypatch, fused.kernels, matrices)


@needs_kernels
@pytest.mark.parametrize("reach", [0, 1, 4])
@pytest.mark.parametrize("skip", [False, True])
def test_a_recurrence_with_what_stands_around_it(reach, skip):
    terms = draw(SEVERAL, 21, 6, 2, 3, factors=True)
    g = torch.Generator().manual_seed(1)
    taps = torch.randn(SEVERAL, 21, reach, 6, 1, generator=g).to(DEVICE) if reach else None
    recurrence = ssm.Recurrence(
        x=torch.zeros(SEVERAL, 21, 6, 1, device=DEVICE),
        **{name: terms[name] for name in ("b", "c", "delta", "A")},
        D=torch.randn(6, generator=g).to(DEVICE),
    )
    around = Around(terms["left"].unsqueeze(-1), taps)
    found = fused.whole(recurrence, 3, skip, around, "highest")
    exact = Around(*(None if t is None else t.double() for t in around))
    expected = ssm.attention(recurrence.to(torch.float64), groups=3, skip=skip, left=exact.left, taps=exact.taps)
    near(found, expected)


@needs_kernels
def test_the_precision_is_that_of_torchs_products(monkeypatch):
    terms = draw()
    recurrence = ssm.Recurrence(
        x=torch.zeros(1, 37, 6, 1, device=DEVICE), **{name: terms[name] for name in ("b", "c", "delta", "A")}
    )
    for setting, precision in (("highest", "highest"), ("high", "high"), ("medium", "high")):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda setting=setting: setting)
        asked = []
        monkeypatch.setattr(fused, "mean", lambda *terms, precision, groups, asked=asked: asked.append(precision))
        fused.whole(recurrence, 1, False, Around())
        assert asked == [precision]
