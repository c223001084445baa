"""Terms of recurrences: refusals, parts of them, and the smallest quantities."""

from dataclasses import replace

import pytest
import torch
from defined_maps import FORMS, draw
from refusals import refuses
from ssmscope import ops
from ssmscope.ops import DeltaRecurrence, Recurrence, scans, terms
from ssmscope.ops.recurrence import along, check_one_way, smallest_exponent, straight
from ssmscope.ops.terms import GateAndTaps


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape)


TERMS = dict(x=zeros(2, 5, 6, 3), b=zeros(2, 5, 2, 4), c=zeros(2, 5, 2, 4))
TIMED = dict(TERMS, delta=zeros(2, 5, 6), A=zeros(6, 4))
DECAYED = dict(TERMS, log_a=zeros(2, 5, 6, 4))
DELTA = dict(TERMS, log_a=zeros(2, 5, 6, 1), beta=zeros(2, 5, 6))
KEYS = dict(e=zeros(2, 5, 6, 4), r=zeros(2, 5, 6, 4))


@pytest.mark.parametrize(("given", "change", "says"), [
    (TIMED, {"b": zeros(2, 5, 2, 3)}, "must both be"),
    (TIMED, {"b": zeros(2, 4, 2, 4), "c": zeros(2, 4, 2, 4)}, "must both be"),
    (TIMED, {"b": zeros(1, 5, 2, 4), "c": zeros(1, 5, 2, 4)}, "must both be"),
    (TIMED, {"b": zeros(2, 5, 4, 4), "c": zeros(2, 5, 4, 4)}, "dividing the 6 heads"),
    (TIMED, {"A": None}, "give the decay once"),
    (TIMED, {"log_a": zeros(2, 5, 6, 4)}, "give the decay once"),
    (TIMED, {"delta": None}, "A needs delta"),
    (TIMED, {"delta": zeros(2, 5, 3)}, "delta .* must be"),
    (TIMED, {"A": zeros(3, 4)}, "the decay .* must be"),
    (TIMED, {"A": zeros(6, 2)}, "the decay .* must be"),
    (DECAYED, {"log_a": zeros(2, 4, 6, 4)}, "the decay .* must be"),
    (DECAYED, {"log_a": zeros(2, 5, 6, 3)}, "the decay .* must be"),
    (DECAYED, {"expected": True}, "needs A and delta"),
    (DELTA, {"b": zeros(2, 5, 2, 3)}, "must both be"),
    (DELTA, {"beta": None}, "needs its write strength beta"),
    (DELTA, {"beta": zeros(2, 5, 2)}, "needs its write strength beta"),
    (DELTA, {"delta": zeros(2, 5, 6)}, "given as log_a, without delta"),
    (DELTA, {"log_a": None, "delta": zeros(2, 5, 6), "A": zeros(6, 4)}, "given as log_a, without delta"),
    (DELTA, {"e": KEYS["e"]}, "has both keys"),
    (DELTA, {"r": KEYS["r"]}, "has both keys"),
    (DELTA, {**KEYS, "e": zeros(2, 5, 2, 4)}, "has both keys"),
    (DELTA, {**KEYS, "r": zeros(2, 5, 6, 3)}, "has both keys"),
])  # fmt: skip
def test_terms_that_do_not_fit(given, change, says):
    kind = DeltaRecurrence if given is DELTA else Recurrence
    with pytest.raises(ValueError, match=says):
        kind(**{**given, **change})


@pytest.mark.parametrize(("given", "change"), [
    *((TIMED, change) for change in ({}, {"A": zeros(6, 1)}, {"expected": True})),
    *((DECAYED, change) for change in ({}, {"log_a": zeros(2, 5, 6, 1)}, {"delta": zeros(2, 5, 6)})),
    *((DELTA, change) for change in ({}, {"log_a": None}, {"log_a": zeros(2, 5, 6, 4)}, KEYS)),
])  # fmt: skip
def test_terms_that_fit(given, change):
    kind = DeltaRecurrence if given is DELTA else Recurrence
    r = kind(**{**given, **change})
    assert r.shape == (2, 5, 6, 3, 4)
    assert r.one_decay_per_head == ((r.A if r.A is not None else r.log_a).shape[-1] == 1)


def test_the_least_exponent_of_every_precision():
    halves = torch.float16, torch.bfloat16, torch.float32
    assert smallest_exponent(torch.float64) == -700 and {smallest_exponent(each) for each in halves} == {-80}


def test_no_steps_have_no_retention():
    r = draw("mamba-2", 5).between(0, 0)
    assert ops.retention(r, per_head=True).shape == (2, 0, 6) and ops.write(r).shape == (2, 0)


@pytest.mark.parametrize("kind", ["mamba", "mamba-2", "gla", "delta", "delta, a decay per state"])
def test_retention_is_the_mean_of_the_transitions_eigenvalues(kind):
    r = draw(kind, 5)
    b, state = r.b.repeat_interleave(r.shape[2] // r.b.shape[2], dim=2), r.shape[4]
    if isinstance(r, DeltaRecurrence):
        unit = torch.eye(state, dtype=torch.float64)
        a = torch.diag_embed(r.log_a.exp().expand(*r.log_a.shape[:3], state))
        removed = unit - r.beta[..., None, None] * b.unsqueeze(-1) * b.unsqueeze(-2)
        per_head = (removed @ a).diagonal(0, -2, -1).mean(-1)
    else:
        per_head = r.log_decay().exp().mean(-1)
    for found, expected in ((ops.retention, per_head), (ops.write, 1 - per_head)):
        torch.testing.assert_close(found(r, per_head=True), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(found(r), expected.mean(2), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ops.scan(r, retention=True).retention, per_head.mean(2), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(r.mean_decay(1, 4), per_head[:, 1:4], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(r.one_minus_mean_decay(2), 1 - per_head[:, 2:], rtol=1e-12, atol=1e-12)


def test_heads_have_their_own_terms_and_groups():
    """A range within one group keeps one of b; a range over two has one for each head."""
    r = draw("mamba-2", 5)  # 6 heads read 2 groups
    for start, stop, groups in ((0, 2, [0]), (3, 6, [1]), (2, 5, [0, 1, 1]), (4, 9, [1])):
        part, heads = r.of_heads(start, stop), slice(start, min(stop, 6))
        for name, own in {"b": r.b[:, :, groups], "c": r.c[:, :, groups], "x": r.x[:, :, heads]}.items():
            assert torch.equal(getattr(part, name), own)
        for name, own in {"A": r.A[heads], "D": r.D[heads], "delta": r.delta[:, :, heads]}.items():
            assert torch.equal(getattr(part, name), own)
    assert torch.equal(r.of_width(2).D, r.D[:, 2:3]) and torch.equal(r.of_width(2).x, r.x[..., 2:3])
    bare = replace(r, D=r.D[:, 0])
    assert bare.of_width(2).D is bare.D and replace(r, D=None).of_width(2).D is None


def test_orders():
    r, order = draw("mamba", 5), torch.tensor([3, 0, 4, 1, 2])
    ordered = replace(r, order=order)
    assert straight(r) is r and torch.equal(straight(ordered).x, r.x[:, order]) and straight(ordered).order is None
    t = torch.arange(10.0).view(1, 5, 2)
    assert along(None, torch.neg, t).tolist() == (-t).tolist()
    expected = torch.zeros_like(t)
    for step, place in enumerate(order.tolist()):
        expected[:, place] = t[:, order[: step + 1]].sum(1)
    assert torch.equal(along(order, lambda u: u.cumsum(1), t), expected)
    check_one_way([r, r], "this")
    for pair in ([r, ordered], [ordered, r]):
        refuses("both ways, and this needs a layer", check_one_way, pair, "this")


def test_ranges_of_heads():
    """At most so many at a time, and, where they share scores, of one group of b and c."""
    r = draw("mamba-2", 5)
    assert [*terms._parts(r, 0, 6, 4, False)] == [(0, 4), (4, 6)]
    assert [*terms._parts(r, 0, 6, 2, True)] == [(0, 2), (2, 3), (3, 5), (5, 6)]
    assert [*terms._parts(r, 2, 6, 9, True)] == [(2, 3), (3, 6)]
    assert [*terms._parts(r, 3, 6, 3, True)] == [(3, 6)]


def test_gates_and_taps_that_do_not_fit():
    x = zeros(2, 5, 6, 3)
    for groups in (0, 4, 7):
        with pytest.raises(ValueError, match=f"{groups} groups do not divide 6 heads"):
            terms.gate_and_taps(x, groups, None, None)
    for name, wrong in (
        ("left", (2, 5, 6, 2)), ("left", (2, 5, 3, 3)), ("taps", (2, 5, 4, 6, 2)), ("taps", (2, 4, 4, 6, 3)),
    ):  # fmt: skip
        given = {"left": None, "taps": None, name: zeros(*wrong)}
        with pytest.raises(ValueError, match=f"{name} .* does not fit x"):
            terms.gate_and_taps(x, 2, **given)
    found = terms.gate_and_taps(x, 3, torch.ones(2, 5, 6, 1), torch.ones(2, 5, 4, 6, 1))
    assert (found.left.shape, found.taps.shape) == ((2, 5, 6, 3), (2, 5, 4, 6, 3))
    assert terms.gate_and_taps(x, 3, None, None) == GateAndTaps()


def test_states_at_chosen_positions_start_from_the_given_one():
    r = draw("gla", 6)
    H = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    chosen = [4, 0, 5, 4]
    expected = torch.stack([ops.scan_reference(r.between(0, t + 1), H).state for t in chosen], dim=1)
    torch.testing.assert_close(ops.states(r, chosen, H), expected)
    for outside in ([6], [2, -1]):
        with pytest.raises(ValueError, match="outside 0…5"):
            ops.states(r, outside)


@pytest.mark.parametrize("kind", FORMS)
def test_scans_of_every_kind(kind):
    """Scans run once, twice, not at all, and for two recurrences together."""
    r, other = draw(kind, 7), draw(kind, 7, seed=1)
    _, _, heads, width, state = r.shape
    H = torch.linspace(-1, 1, 2 * heads * width * state, dtype=torch.float64).view(2, heads, width, state)
    exact = ops.scan_reference(r, H)
    first = ops.scan(r.between(0, 3), H, retention=True)
    second = ops.scan(r.between(3), first.state, retention=True)
    joined = [torch.cat([getattr(each, name) for each in (first, second)], dim=1) for name in ("y", "retention")]
    close = dict(rtol=1e-10, atol=1e-12)
    for found in (ops.scan(r, H, retention=True), ops.Scan(joined[0], second.state, joined[1])):
        for ours, wanted in zip(found, exact):
            torch.testing.assert_close(ours, wanted, **close)
    none = ops.scan(r.between(0, 0), H, retention=True)
    assert torch.equal(none.state, H) and (none.y.numel(), none.retention.shape) == (0, (2, 0))
    for found, wanted in zip(scans.scan_all([r, other], [H, None]), (exact, ops.scan_reference(other))):
        torch.testing.assert_close(found.y, wanted.y, **close)
        torch.testing.assert_close(found.state, wanted.state, **close)


def test_a_skip_is_the_input_times_its_factor():
    x, y = torch.arange(24.0).view(1, 2, 3, 4), torch.full((1, 2, 3, 4), 100.0)
    by_head, by_channel = torch.tensor([1.0, 2.0, 4.0]), torch.arange(12.0).view(3, 4)
    assert scans.with_skip(y, x, None) is y
    assert torch.equal(scans.with_skip(y, x, by_head), y + by_head[:, None] * x)
    assert torch.equal(scans.with_skip(y, x, by_channel), y + by_channel * x)
    assert terms.skips(replace(draw("mamba-2", 3), D=None)) is None
    r = draw("mamba, two groups", 3)
    assert torch.equal(terms.skips(r), r.D.unsqueeze(-1))
