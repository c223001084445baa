"""Implicit attention matrices against the definition, channel by channel, in float64; and float32 against float64."""

import re
from dataclasses import replace

import pytest
import torch
from defined_maps import FORMS, channels, draw, means, near, surroundings
from ssmscope import ops
from ssmscope.ops import Recurrence, pooled, terms
from ssmscope.ops.terms import GateAndTaps


@pytest.mark.parametrize("kind", ["mamba", "mamba-2", "gla", "delta"])
def test_gradients_are_needed_where_a_term_asks_for_one(kind):
    plain = draw(kind, 4)
    left, taps = torch.ones(2, 4, 1, 1), torch.ones(2, 4, 2, 1, 1)
    empty = GateAndTaps()
    assert not terms.needs_gradients(plain, empty) and not terms.needs_gradients(plain, GateAndTaps(left, taps))
    assert not terms.needs_gradients(replace(plain, D=None), empty)
    tensors = {
        name: value for name in ("b", "c", "D", "A", "log_a") if (value := getattr(plain, name, None)) is not None
    }
    for name, value in tensors.items():
        asking = replace(plain, **{name: value.clone().requires_grad_()})
        assert terms.needs_gradients(asking, empty)
        with torch.no_grad():
            assert not terms.needs_gradients(asking, empty)
    assert terms.needs_gradients(plain, GateAndTaps(left.clone().requires_grad_()))
    assert terms.needs_gradients(plain, GateAndTaps(None, taps.clone().requires_grad_()))


def test_no_steps():
    r = draw("mamba", 5).between(0, 0)
    assert ops.attention(r, groups=3).shape == (2, 3, 0, 0) and ops.attention_reference(r).shape == (2, 6, 0, 0)


@pytest.mark.parametrize("kind", FORMS)
def test_a_matrix_times_the_input_is_the_output_of_the_scan(kind):
    r = draw(kind, 29)
    if kind.startswith("delta") or r.shape[3] > 1:
        r = replace(r, D=r.D[:, :1].expand(-1, r.shape[3]))  # as one matrix serves a head's whole width
    matrix = ops.attention(r, groups=r.shape[2], skip=True)
    near(torch.einsum("bhts,bshp->bthp", matrix, r.x), ops.scan(r).y)


REGIMES = ("small steps", "constant steps", "large steps", "mixed", "expected", "log_a", "growing")


def in_regime(regime: str, kind: str, length: int = 260) -> Recurrence:
    heads, width, groups, state = {"mamba": (32, 1, 1, 4), "mamba-2": (6, 4, 1, 16)}[kind]
    g = torch.Generator().manual_seed(3)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    x, D = normal(1, length, heads, width), normal(heads)
    b, c = normal(1, length, groups, state), normal(1, length, groups, state)
    delta = torch.rand(1, length, heads, generator=g)
    A = -16 * torch.rand(heads, state if kind == "mamba" else 1, generator=g)
    if regime == "small steps":
        delta = 1e-3 * delta
    elif regime == "constant steps":
        delta = torch.full_like(delta, 1e-3)
    elif regime == "large steps":
        delta = 1e3 * delta
    elif regime == "mixed":
        delta = torch.nn.functional.softplus(8 * normal(1, length, heads) - 4)
    elif regime == "growing":
        delta, A = 2e-3 * delta, A.abs()
    elif regime == "log_a":
        return Recurrence(x, b, c, log_a=3 * delta.unsqueeze(-1) * A, D=D)
    return Recurrence(x, b, c, delta=delta, A=A, D=D, expected=regime == "expected")


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("kind", ["mamba", "mamba-2"])
def test_float32(kind, regime):
    r = in_regime(regime, kind)
    exact, last = r.to(torch.float64), r.shape[1] - 1
    for around in ("nothing", "both"):
        given = surroundings(r, around)
        precise = {name: t.double() for name, t in given.items()}
        for options in ({}, {"absolute": True}, {"rows": [last]}, {"skip": True, "groups": 2}):
            near(ops.attention(r, **options, **given).double(), ops.attention(exact, **options, **precise), 1e-5)
        ours, slow = (ops.pooled_attention(t, 9, skip=True, **g) for t, g in ((r, given), (exact, precise)))
        near(ours.double(), slow, 1e-5)


def test_no_gradient_flows_through_cells():
    r = draw("mamba", 9)
    asked = replace(r, A=r.A.clone().requires_grad_())
    assert not ops.pooled_attention(asked, 3).requires_grad


def test_pairs_of_cells():
    edge = pooled.edges(11, 4)
    assert edge.tolist() == [0, 2, 5, 8, 11]
    assert pooled.causal_pairs(edge).tolist() == [[3, 0, 0, 0], [6, 6, 0, 0], [6, 9, 6, 0], [6, 9, 9, 6]]


@pytest.mark.parametrize("groups", [0, 4, 7])
def test_groups_that_do_not_divide(groups):
    r = draw("mamba", 5)
    for make in (ops.attention, lambda r, groups: ops.pooled_attention(r, 2, groups=groups)):
        with pytest.raises(ValueError, match=f"{groups} groups do not divide 6 heads"):
            make(r, groups=groups)


@pytest.mark.parametrize("order", [None, [4, 3, 2, 1, 0]], ids=["forwards", "backwards"])
def test_rows_outside(order):
    r = replace(draw("mamba", 5), order=None if order is None else torch.tensor(order))
    for rows, outside in (([5], [5]), ([-1, 2], [-1]), ([], [])):
        with pytest.raises(ValueError, match=re.escape(f"rows {outside}: give at least one, each from 0 to 4")):
            ops.attention(r, rows=rows)


def test_cells_outside():
    r = draw("mamba", 5)
    for cells in (0, 6):
        with pytest.raises(ValueError, match=f"{cells} cells: give from 1 to the length, 5"):
            ops.pooled_attention(r, cells)


def test_a_reach_beyond_the_length_is_cut():
    r = draw("mamba", 3)
    given = surroundings(r, "both", reach=7)
    near(ops.attention(r, **given), means(channels(r, False, **given), 1))
    assert GateAndTaps(None, given["taps"]).reach == 7
