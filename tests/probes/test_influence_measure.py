"""Products that are computed together, norms and their errors from sums made by hand, and notes."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from examples import TEXTS, random_example
from handmade import halving, reach
from loud import loud
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.probes.influence import measure

LONG, SHORT = [3, 1, 4, 1], [5, 9]
model = pytest.fixture(scope="module")(lambda: Model(loud(random_example("mamba")), name="mamba"))


def runs_of(model, monkeypatch, ids, positions, probes, chunk) -> list[list[bool]]:
    """The rows and the length of every forward pass, and whether each backward pass of it keeps the graph."""
    found: list[list] = []
    batch = model.encode(ids=ids)
    own = measure.of_output(model, batch, "hidden")

    def run(x, mask):
        assert x.shape[:2] == mask.shape
        found.append([tuple(x.shape[:2])])
        return own.run(x, mask)

    grad = torch.autograd.grad

    def noted(output, x, retain_graph):
        found[-1].append(retain_graph)
        return grad(output, x, retain_graph=retain_graph)

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "grad", noted)
        measure.block_norms(model, dataclasses.replace(own, run=run), batch, positions, probes, chunk)
    return found


@pytest.mark.parametrize(("chunk", "expected"), [
    (100, [[(8, 4), False]]),  # all 4 products of either text at once
    (31, [[(6, 4), True, False]]),  # 31 // 8 = 3 copies
    (16, [[(4, 4), True, False]]),
    (8, [[(2, 4), True, True, True, False]]),
    (7, [[(2, 2), False], [(1, 4), True, True, True, False]]),  # each alone; the short one with its 2 products
    (1, [[(1, 2), True, False], [(1, 4), True, True, True, False]]),
])  # fmt: skip
def test_what_runs_together(model, monkeypatch, chunk, expected):
    """Two texts, of which one has two positions and the other one, with two probes each."""
    positions = [np.array([1, 3]), np.array([1])]
    assert runs_of(model, monkeypatch, [LONG, SHORT], positions, measure.Probes(2), chunk) == expected


def test_a_single_token_whose_products_fill_no_round(model):
    """24 unit vectors, 5 at a time."""
    batch = model.encode(ids=[[7]])
    (found,) = measure.block_norms(
        model, measure.of_output(model, batch, "hidden"), batch, [np.array([0])], measure.Probes(None), 5
    )
    (whole,) = measure.block_norms(
        model, measure.of_output(model, batch, "hidden"), batch, [np.array([0])], measure.Probes(None), 100
    )
    np.testing.assert_allclose(found.norm, whole.norm, rtol=1e-5)


def test_outputs_and_layers_draw_their_own_probes(model):
    batch = model.encode(ids=TEXTS)
    output = measure.of_output(model, batch, "hidden")
    assert (output.place, output.size, output.layers) == (0, 24, 2)
    assert measure.of_output(model, batch, "logits").size == 97
    u = torch.zeros(3, 11, 24)
    for index in (0, 1):
        one = measure.of_layer(model, batch, index, u)
        assert (one.place, one.size, one.layers) == (1 + index, 24, 1)
    assert measure.of_layer(model, batch, 0, torch.zeros(3, 11, 72)).layers == 3
    assert measure.of_layer(model, batch, 0, torch.zeros(3, 11, 12)).layers == 1


def test_squares_do_not_underflow():
    gradient = torch.tensor([[[3e-30, -4e-30], [0.0, 0.0], [3e25, 4e25]], [[-2.0, 1.0], [0.5, 0.0], [-1.0, -2.0]]])
    expected = [[25e-60, 0, 25e50], [5, 0.25, 5]]
    np.testing.assert_allclose(measure._squares(gradient), expected, rtol=1e-6)
    assert (
        measure._squares(gradient[1:].bfloat16()).tolist() == [[5, 0.25, 5]]
        and measure._squares(gradient).dtype == np.float64
    )


def test_errors_are_those_of_a_mean():
    """The squares are 1, 4, 4 and 7, and four times 0; the variance of their mean is 6 / 4 / 3."""
    squares = np.array([[[1.0, 0.0]], [[4.0, 0.0]], [[4.0, 0.0]], [[7.0, 0.0]]])
    sums = np.stack([squares.sum(0), (squares**2).sum(0)])
    found = measure._blocks(np.array([1]), sums, measure.Probes(4), 4)
    assert found.norm.tolist() == [[2, 0]]
    assert found.error[0].tolist() == pytest.approx([math.sqrt(np.var([1, 4, 4, 7], ddof=1) / 4) / 4, 0])
    exact = measure._blocks(np.array([1]), sums, measure.Probes(None), 4)
    assert exact.norm.tolist() == [[4, 0]] and exact.error.tolist() == [[0, 0]]
    same = np.stack([np.full((1, 2), 3 * 0.1), np.full((1, 2), 3 * 0.1**2)])  # no spread, but for rounding
    assert measure._blocks(np.array([1]), same, measure.Probes(3), 3).error.max() < 1e-8


@pytest.mark.parametrize(("place", "where"), [("output", "the output"), ("3", "layer 3")])
def test_one_norm_that_is_not_finite(monkeypatch, place, where):
    bad = measure.Blocks(np.array([1]), np.array([[0.5, math.inf]]), np.zeros((1, 2)))
    good = measure.Blocks(np.array([1]), np.array([[0.5, 0.25]]), np.zeros((1, 2)))
    monkeypatch.setattr(measure, "block_norms", lambda **_: [good, bad])
    with pytest.raises(InputError, match=f"the gradients of {where} are not finite on text 1: the model is damaged"):
        measure.measure_reach(SimpleNamespace(size=9), place=place, exact=None, probes=measure.Probes(2), fit={})


def test_positions_in_order():
    assert [each.tolist() for each in measure.positions_of("all", [3, 1])] == [[0, 1, 2], [0]]
    assert [each.tolist() for each in measure.positions_of("last", [3, 1])] == [[2], [0]]
    assert [each.tolist() for each in measure.positions_of([2, -1, 0, -3], [3, 5])] == [[0, 2], [0, 2, 4]]


class TestNotes:
    def notes(self, *reaches, texts: int = 2) -> list[str]:
        return list(measure.notes_on(reaches, SimpleNamespace(tokens=[[1]] * texts)))

    def test_of_nothing_to_say(self):
        assert self.notes(reach(halving(9), halving(8))) == []
        assert self.notes(reach(halving(9)), texts=1) == [
            "one text: no number has an interval, and its tokens are centred on their own mean"
        ]

    def test_of_positions_without_influence(self):
        dead = dataclasses.replace(reach(halving(9), [0.0] * 4), place="3")
        assert self.notes(reach(halving(9), halving(8)), dead) == [
            "no influence at all on some positions of layer 3; they are left out of logarithms and shares"
        ]

    def test_a_line_that_fits_poorly_is_no_lack_of_influence(self):
        poor = reach([3.0, 1.0, 9.0, 0.5, 8.0, 0.2], [5.0, 0.5, 7.0, 0.25, 3.0])
        assert np.isnan(poor.context).all() and self.notes(poor) == []

    def test_of_influence_that_stays_or_grows(self):
        found = [
            dataclasses.replace(reach(norms, norms[:-1]), place=place)
            for place, norms in (("output", [1.0] * 6), ("1", halving(7)), ("2", [1.0, 1.5, 2.0, 4.0, 5.0]))
        ]
        assert self.notes(*found) == ["the influence on the output and layer 2 does not decay with distance"]

    def test_of_too_few_distances(self):
        found = [dataclasses.replace(reach(halving(count), halving(count)), place=str(count)) for count in (3, 4, 2)]
        assert self.notes(*found) == [
            "no line is fitted for layers 3, 2: fewer than three distances are measured and above the noise"
        ]
