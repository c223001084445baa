"""Survival where little is left, exactly half, or nothing, against runs that write at one position alone."""

import math
from dataclasses import replace

import pytest
import torch
from defined_maps import draw
from refusals import refuses
from small_pieces import make_small
from ssmscope import ops
from ssmscope.ops import DeltaRecurrence, Recurrence, survival
from ssmscope.ops.recurrence import by_head

RECURRENCES = ("mamba, two groups", "mamba-2", "gla", "delta", "delta, a decay per state")
CLOSE = dict(rtol=1e-10, atol=1e-12)


@pytest.fixture(params=[False, True], ids=["whole", "in pieces"], autouse=True)
def pieces(request, monkeypatch):
    if request.param:
        make_small(monkeypatch)


def alone(r: Recurrence) -> torch.Tensor:
    """Return the rest of every position's write, (batch, length, heads, width · state)."""
    return survival.remaining_reference(r).flatten(3)


@pytest.mark.parametrize("kind", RECURRENCES)
def test_what_is_left_is_that_of_runs_that_write_once(kind):
    r = draw(kind, 7)
    left, H = alone(r), ops.scan_reference(r).state.flatten(2)
    torch.testing.assert_close(survival.remaining_norms(r), left.norm(dim=-1), **CLOSE)
    towards, rest = survival.left_towards_state(r)
    torch.testing.assert_close(towards, (left * H[:, None]).sum(-1), **CLOSE)
    assert rest.shape == (2, r.shape[2]) and not rest.any()


@pytest.mark.parametrize("at", [None, 0, 4])
@pytest.mark.parametrize("kinds", [("mamba, two groups",), ("mamba-2", "gla"), ("delta", "gla")], ids=" and ".join)
def test_shares_are_of_all_recurrences_together(kinds, at):
    drawn = [draw(kind, 6, seed=seed) for seed, kind in enumerate(kinds)]
    rs = [replace(r, x=r.x / 1000) for r in drawn]
    stop = 6 if at is None else at + 1
    cut = [r.between(0, stop) for r in rs]
    g = torch.Generator().manual_seed(2)
    starts = [torch.randn(2, *r.shape[2:], generator=g, dtype=torch.float64) / 1000 for r in rs]
    norms = torch.cat([alone(r).norm(dim=-1) for r in cut], dim=2)
    inner, whole = [], []
    for r, start in zip(cut, starts):
        H = ops.scan_reference(r, start).state.flatten(2)
        inner.append((alone(r) * H[:, None]).sum(-1))
        whole.append(H.square().sum(-1))
    inner, whole = torch.cat(inner, dim=2), torch.cat(whole, dim=1)
    later = (0, 0, 0, 6 - stop)
    for options, expected in (
        ({}, (norms.sum(2) / norms.sum((1, 2))[:, None])[..., None]),
        ({"per_head": True}, norms / norms.sum(1, keepdim=True)),
        ({"signed": True, "initial": starts}, (inner.sum(2) / whole.sum(1)[:, None])[..., None]),
        ({"signed": True, "initial": starts, "per_head": True}, inner / whole[:, None]),
    ):
        expected = torch.nn.functional.pad(expected, later)
        expected = expected if "per_head" in options else expected.squeeze(2)
        torch.testing.assert_close(survival.shares(rs, at=at, **options), expected, **CLOSE)


def rescaled(r: Recurrence, scale: torch.Tensor) -> Recurrence:
    """Return a recurrence with states (…, n) multiplied by a scale (n,), and the same outputs."""
    more = {}
    if isinstance(r, DeltaRecurrence):
        (e, k), own = r.removal(), r.by_head()
        more = {"e": e / scale, "r": k * scale, "c": own[1] / scale, "b": own[0] * scale}
    return replace(r, **{"b": r.b * scale, "c": r.c / scale, **more})


@pytest.mark.parametrize("kind", RECURRENCES)
def test_readable_shares_are_of_what_is_read_and_survive_rescaled_states(kind):
    """tr(R_sᵀ M R_s) is Σ_t ‖R_s c_t‖²; survival changes with the unit of each state, though no output does."""
    r = draw(kind, 7)
    N = r.shape[4]
    moved = rescaled(r, torch.logspace(-1, 1, N, dtype=torch.float64))
    torch.testing.assert_close(ops.scan_reference(moved).y, ops.scan_reference(r).y, **CLOSE)
    for at in (None, 3):
        cut = r.between(0, 7 if at is None else at + 1)
        read = torch.einsum("bshpn,bthn->bshtp", survival.remaining_reference(cut), by_head(r.c, r.shape[2]))
        norms = torch.nn.functional.pad(read.square().sum((3, 4)).sqrt(), (0, 0, 0, 7 - cut.shape[1]))
        found = survival.shares([r], at=at, readable=True, per_head=True)
        torch.testing.assert_close(found, norms / norms.sum(1, keepdim=True), **CLOSE)
        for per_head in (False, True):
            same, plain = (
                [survival.shares([each], at=at, readable=asked, per_head=per_head) for each in (r, moved)]
                for asked in (True, False)
            )
            torch.testing.assert_close(*same, rtol=1e-7, atol=1e-9)
            assert (plain[0] - plain[1]).abs().max() > 0.01


@pytest.mark.parametrize("at", [None, 3, 4, 2])
def test_shares_in_another_order_are_of_what_was_visited_by_then(at):
    order = [3, 0, 4, 1, 2]
    r = replace(draw("mamba-2", 5), order=torch.tensor(order))
    places = order if at is None else order[: order.index(at) + 1]
    found = ops.scan_reference(r.at(torch.tensor(places))).state.flatten(2)
    left = alone(r.at(torch.tensor(places)))
    norms, towards = left.norm(dim=-1), (left * found[:, None]).sum(-1)
    expected, signed = torch.zeros(2, 5, 6, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.float64)
    for step, place in enumerate(places):
        expected[:, place] = norms[:, step] / norms.sum(1)
        signed[:, place] = towards[:, step].sum(1) / found.square().sum((1, 2))
    torch.testing.assert_close(survival.shares([r], at=at, per_head=True), expected, **CLOSE)
    torch.testing.assert_close(survival.shares([r], at=at, signed=True), signed, **CLOSE)
    for outside in (5, -1):
        refuses(f"no position {outside}; allowed are 0 to 4", survival.shares, [r], at=outside)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("kind", RECURRENCES)
def test_of_nothing_nothing_is_left(kind, per_head):
    r = draw(kind, 4)
    nothing = replace(r, x=torch.zeros_like(r.x))
    for signed in (False, True):
        assert not survival.shares([nothing], signed=signed, per_head=per_head).any()
    assert survival.half_lives([nothing], per_head=per_head).eq(math.inf).all()


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("kind", ["decays", "timed", "delta"])
def test_half_lives_end_where_exactly_half_is_left(kind, steps):
    one = torch.ones(1, 9, 1, 1, dtype=torch.float64)
    kept = torch.where(torch.arange(9) % steps == 0, 0.5, 1.0).double()  # half of a state decays at every such step
    log_a = kept.log()[None, :, None, None]
    assert torch.equal(log_a.exp().flatten(), kept)
    if kind == "decays":
        r = Recurrence(one, one, one, log_a=log_a)
    elif kind == "timed":
        step = (log_a / math.log(0.5))[..., 0]
        r = Recurrence(one, one, one, delta=step, A=torch.full((1, 1), math.log(0.5), dtype=torch.float64))
        r = replace(r, x=torch.where(step[..., None] > 0, one, 0))  # elsewhere nothing is written
    else:
        r = DeltaRecurrence(one, 0 * one, one, log_a=log_a, beta=one[..., 0])
        r = replace(r, b=torch.where(torch.arange(9) == 3, 1.0, 0.0).double().view(1, 9, 1, 1))
    found = survival.half_lives([r])[0]
    for s in range(9):
        written = (r.written.abs() * r.b.abs())[0, s, 0, 0] > 0
        until = next((t - s for t in range(s + 1, 9) if kept[s + 1 : t + 1].prod() <= 0.5), math.inf)
        assert found[s] == (until if written else math.inf)


@pytest.mark.parametrize(
    "kinds", [("mamba-2", "mamba-2"), ("delta", "mamba-2"), ("mamba, two groups",)], ids=" and ".join
)
@pytest.mark.parametrize("length", [1, 2, 5, 8])
def test_half_lives_of_short_texts(kinds, length):
    rs = [draw(kind, length, seed=seed) for seed, kind in enumerate(kinds)]
    rs = [r if r.log_a is not None else replace(r, delta=r.delta / 2) for r in rs]
    stops = [torch.cat([alone(r.between(0, stop)).norm(dim=-1) for r in rs], dim=2) for stop in range(1, length + 1)]

    def until(masses: list[torch.Tensor]) -> float:
        """Steps until half of the first is left."""
        return next((lag for lag, mass in enumerate(masses) if lag and mass <= masses[0] / 2), math.inf)

    whole, heads = survival.half_lives(rs), survival.half_lives(rs, per_head=True)
    assert heads.shape == (2, length, sum(r.shape[2] for r in rs))
    for row in range(2):
        for s in range(length):
            assert whole[row, s] == until([after[row, s].sum() for after in stops[s:]])
            for head in range(heads.shape[2]):
                assert heads[row, s, head] == until([after[row, s, head] for after in stops[s:]])


def test_writings_of_negative_steps_have_sizes_too():
    r = draw("mamba-2", 5)
    r = replace(r, delta=torch.where(torch.arange(5)[:, None] % 2 == 0, -r.delta, r.delta), A=r.A / 4)
    torch.testing.assert_close(survival.remaining_norms(r), alone(r).norm(dim=-1), **CLOSE)


@pytest.mark.parametrize("slow", [0.01, 0.7], ids=["one state keeps", "every state forgets"])
@pytest.mark.parametrize("kind", ["timed", "expected", "log-decays", "one per head"])
def test_a_slow_state_outlasts_a_fast_one(kind, slow):
    """All states, or all but one, have decayed to nothing in float32, and one head keeps nothing."""
    length = 200
    g = torch.Generator().manual_seed(0)
    x, b, c = (torch.randn(1, length, 2, size, generator=g, dtype=torch.float64) for size in (3, 2, 2))
    rates = torch.tensor([[1.0, slow], [2.0, 3.0]], dtype=torch.float64)
    step = 0.5 + torch.rand(1, length, 2, generator=g, dtype=torch.float64)
    if kind in ("timed", "expected"):
        r = Recurrence(x, b, c, delta=step, A=-rates, expected=kind == "expected")
    elif kind == "log-decays":
        r = Recurrence(x, b, c, log_a=-step.unsqueeze(-1) * rates)
    else:
        r = Recurrence(x, b, c, log_a=-(step * rates.min(1).values).unsqueeze(-1))
    log_a = r.log_decay()
    keys = b * (log_a.flip(1).cumsum(1).flip(1) - log_a).exp()
    norms, rounded = r.written.norm(dim=-1) * keys.norm(dim=-1), r.to(torch.float32)
    torch.testing.assert_close(survival.remaining_norms(rounded).double(), norms, rtol=1e-4, atol=1e-12)
    assert norms[0, 0, 1] < 1e-80 < 1e-3 < norms[0, -3:].min() and (norms[0, 0, 0] > 1e-2) == (slow == 0.01)
    H = torch.einsum("bthp,bthn->bhpn", r.written, keys)
    towards = torch.einsum("bthp,bthn,bhpn->bth", r.written, keys, H)
    torch.testing.assert_close(survival.left_towards_state(rounded)[0].double(), towards, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ops.scan(rounded).state.double(), H, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["mamba, two groups", "mamba-2", "gla", "linear attention"])
def test_keys_of_parts_of_any_size(kind):
    """Zeros, and numbers whose squares are no float32 next to others, negative ones alone too."""
    r = draw(kind, 5)
    b = r.b.clone()
    b[:, 0] = 0
    b[:, 1, :, 1:] *= 1e-25
    b[:, 2] = -b[:, 2].abs() * 1e-25
    b[:, 3] *= 1e25
    r = replace(r, b=b, x=r.x.float().double())
    names = ("x", "b", "c", "delta", "A", "log_a")
    rounded = replace(r, D=None, **{n: t.float() for n in names if (t := getattr(r, n)) is not None})
    found = survival.remaining_norms(rounded).double()
    torch.testing.assert_close(found, alone(r).norm(dim=-1), rtol=1e-4, atol=0)
    assert torch.equal(survival.half_lives([rounded]), survival.half_lives([r]).float())


@pytest.mark.parametrize("first", [0, 3, 6])
@pytest.mark.parametrize("kinds", [("mamba, two groups",), ("mamba-2", "gla"), ("delta", "gla")], ids=" and ".join)
def test_shares_of_a_sweep_are_those_after_each_position(kinds, first):
    rs = [draw(kind, 7, seed=seed) for seed, kind in enumerate(kinds)]
    found = survival.shares_from(rs, first)
    expected = torch.stack([survival.shares(rs, at=at) for at in range(first, 7)], dim=1)
    torch.testing.assert_close(found, expected, **CLOSE)
