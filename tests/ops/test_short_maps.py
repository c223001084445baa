"""Attention maps of every kind and with everything around them on a few tokens, whole and in small pieces."""

from dataclasses import replace

import pytest
import torch
from defined_maps import AROUND, FORMS, channels, draw, in_cells, means, near, surroundings
from exhaustive import ALL, in_turns
from refusals import refuses
from small_pieces import make_small
from ssmscope import ops
from ssmscope.ops import Recurrence, pooled, triangle
from ssmscope.ops.terms import GateAndTaps


@pytest.fixture(params=[False, True], ids=["whole", "in pieces"], autouse=True)
def pieces(request, monkeypatch):
    if request.param:
        make_small(monkeypatch)


@pytest.mark.parametrize("length", [1, 2, 11, 37] if ALL else [11])
@pytest.mark.parametrize(("kind", "around"), in_turns(FORMS, AROUND))
def test_all_forms_are_those_of_the_definition(kind, around, length):
    """Cells of 2 tokens and more, which inputs reach from the cell before, and shorter ones than they reach."""
    r = draw(kind, length)
    rows = [length - 1, 0, length // 2, length - 1]
    for narrow, skip, counts in ((False, True, (1, 2, r.shape[2])), (True, False, (1, 2))):
        given = surroundings(r, around, narrow=narrow)
        M = channels(r, skip, **given)
        for groups in counts:
            for absolute in (False, True):
                exact = means(M.abs() if absolute else M, groups)
                options = {"groups": groups, "absolute": absolute, "skip": skip, **given}
                near(ops.attention(r, **options), exact)
                near(ops.attention(r, rows=rows, **options), exact[:, :, rows])
            exact = means(M, groups)
            for cells in {1, max(1, length // 3)} if skip else {max(1, length // 5), length}:
                near(ops.pooled_attention(r, cells, groups=groups, skip=skip, **given), in_cells(exact, cells))


@pytest.mark.parametrize("kind", [kind for kind in FORMS if kind.startswith("delta")])
def test_cells_of_a_long_delta_rule(kind, monkeypatch):
    r = draw(kind, 11)
    monkeypatch.setattr(pooled, "MAX_EXACT_DELTA_LENGTH", 10)
    for skip in (False, True):
        exact = means(channels(r, skip), 2)
        for cells in (1, 3, 8):
            near(ops.pooled_attention(r, cells, groups=2, skip=skip), in_cells(exact, cells))
    for cells in (5, 11):  # also of one token each
        refuses("of at most 10 tokens, not 11", ops.pooled_attention, r, cells, **surroundings(r, "left"))
    narrow = replace(r, D=None)
    near(ops.pooled_attention(narrow, 3, skip=True), in_cells(means(channels(narrow, False), 1), 3))


@pytest.mark.parametrize(("kind", "around"), [(kind, around) for kind in FORMS for around in ("nothing", "both")])
def test_gradients_of_whole_maps_and_of_rows(kind, around):
    r = draw(kind, 5, batch=1)
    names = [name for name in ("b", "c", "delta", "A", "log_a", "D", "beta") if getattr(r, name, None) is not None]
    terms = {name: getattr(r, name).clone().requires_grad_() for name in names}
    given = {name: t.requires_grad_() for name, t in surroundings(r, around, reach=3).items()}
    r = replace(r, **terms)
    leaves = [*terms.values(), *given.values()]
    weights = torch.linspace(-1, 2, 50, dtype=torch.float64).view(1, 2, 5, 5)
    exact = means(channels(r, True, **given), 2)
    for rows in (None, [3, 1]):
        chosen = [0, 1, 2, 3, 4] if rows is None else rows
        found = ops.attention(r, groups=2, skip=True, rows=rows, **given)
        ours, wanted = ((each * weights[:, :, chosen]).sum() for each in (found, exact[:, :, chosen]))
        for one, other in zip(*(torch.autograd.grad(each, leaves, retain_graph=True) for each in (ours, wanted))):
            near(one, other, 1e-10)


@pytest.mark.parametrize("order", [[4, 3, 2, 1, 0], [2, 4, 0, 3, 1]], ids=["backwards", "mixed"])
@pytest.mark.parametrize("around", AROUND)
def test_maps_in_another_order(around, order):
    """The output at a position is read of what was visited before it, at any place."""
    r = replace(draw("mamba-2", 5), order=torch.tensor(order))
    given = surroundings(r, around, reach=3)
    visited = {name: t[:, order] for name, t in given.items()}
    M, place = channels(replace(r.at(r.order)), True, **visited), r.order.argsort()
    exact = means(M, 2)[:, :, place][..., place]
    near(ops.attention(r, groups=2, skip=True, **given), exact)
    near(ops.attention(r, groups=2, skip=True, rows=[3, 0], **given), exact[:, :, [3, 0]])


@pytest.mark.parametrize("length", [1, 2, 3, 6, 7, 11, 21])
def test_gradients_of_the_triangle(length):
    """Gradients are those of any of its three terms alone, from a product for every pair."""
    g = torch.Generator().manual_seed(0)
    terms = [torch.rand(2, length, 3, generator=g, dtype=torch.float64) for _ in range(3)]
    weights = torch.rand(2, length, length, generator=g, dtype=torch.float64)
    near(triangle.strict(*terms), triangle.reference(*terms), 1e-14)
    for asking in range(3):
        a, R, W = (t.clone().requires_grad_(at == asking) for at, t in enumerate(terms))
        exact = sum(
            ((R[:, t] * W[:, s] * a[:, s + 1 : t].prod(1)).sum(-1) * weights[:, t, s]).sum()
            for t in range(length)
            for s in range(t)
        )
        ours = (triangle.strict(a, R, W) * weights).sum()
        near(ours.reshape(1), torch.as_tensor(exact, dtype=torch.float64).reshape(1))
        leaf = (a, R, W)[asking]
        if length > 2:
            near(*(torch.autograd.grad(each, leaf)[0] for each in (ours, exact)))


def test_gates_and_taps_of_one_column():
    """A width of which only the mean counts, where there is a gate or there are taps, but not both."""
    left, taps = torch.arange(24.0).view(1, 2, 3, 4), torch.arange(72.0).view(1, 2, 3, 3, 4)
    assert GateAndTaps().columns() == GateAndTaps()
    assert torch.equal(GateAndTaps(left).columns().left, left.mean(-1, keepdim=True))
    assert torch.equal(GateAndTaps(None, taps).columns().taps, taps.mean(-1, keepdim=True))
    both = GateAndTaps(left, taps)
    assert both.columns() is both and both.reach == 3 and GateAndTaps(left).reach == 1
    assert GateAndTaps().is_empty and not any(
        each.is_empty for each in (both, GateAndTaps(left), GateAndTaps(None, taps))
    )


@pytest.mark.parametrize("decays", [1, 4])
@pytest.mark.parametrize("cells", [2, 5])
def test_cells_of_log_decays_in_heads_of_two_channels(cells, decays):
    """Several heads read one group, and there is no step."""
    g = torch.Generator().manual_seed(0)
    x = torch.zeros(2, 9, 6, 2, dtype=torch.float64)
    b, c = (torch.randn(2, 9, 2, 4, generator=g, dtype=torch.float64) for _ in range(2))
    r = Recurrence(x, b, c, log_a=-torch.rand(2, 9, 6, decays, generator=g, dtype=torch.float64))
    for around in AROUND:
        given = surroundings(r, around, reach=2)
        exact = means(channels(r, False, **given), 3)
        near(ops.pooled_attention(r, cells, groups=3, **given), in_cells(exact, cells))
        near(ops.attention(r, groups=3, **given), exact)
        near(ops.attention(r, groups=3, rows=[8, 2], **given), exact[:, :, [8, 2]])
