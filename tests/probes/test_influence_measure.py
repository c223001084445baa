"""Products that are computed together, norms and their errors from sums made by hand, and notes.

The reach of an output where its numbers are at a limit: on norms by distance that are made by hand.
Similarity of tokens: every measure at every place against whole matrices and the model's own forward pass.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from examples import TEXTS, random_example
from handmade import NOISE, halving, reach
from loud import loud

from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.methods.gradients import keep_outputs
from ssmscope.probes.influence import measure
from ssmscope.probes.influence import reach as reaching
from ssmscope.probes.influence.measure import (
    Blocks,
    Probes,
    _blocks,
    _squares,
    block_norms,
    notes_on,
    of_layer,
    of_output,
    positions_of,
)
from ssmscope.probes.influence.reach import SHARES, noise_of
from ssmscope.probes.influence.similarity import blocks_of, mean_cosine, similarity_of, spread

LONG, SHORT = [3, 1, 4, 1], [5, 9]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(loud(random_example("mamba")), name="mamba")


def runs_of(model, monkeypatch, ids, positions, probes, chunk) -> list[list[bool]]:
    """The rows and the length of every forward pass, and whether each backward pass of it keeps the graph."""
    found: list[list] = []
    batch = model.encode(ids=ids)
    own = of_output(model, batch, "hidden")

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
        block_norms(model, dataclasses.replace(own, run=run), batch, positions, probes, chunk)
    return found


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        (100, [[(8, 4), False]]),  # all 4 products of either text at once
        (31, [[(6, 4), True, False]]),  # 31 // 8 = 3 copies
        (16, [[(4, 4), True, False]]),
        (8, [[(2, 4), True, True, True, False]]),
        (7, [[(2, 2), False], [(1, 4), True, True, True, False]]),  # each alone; the short one with its 2 products
        (1, [[(1, 2), True, False], [(1, 4), True, True, True, False]]),
    ],
)
def test_what_runs_together(model, monkeypatch, chunk, expected):
    """Two texts, of which one has two positions and the other one, with two probes each."""
    positions = [np.array([1, 3]), np.array([1])]
    assert runs_of(model, monkeypatch, [LONG, SHORT], positions, Probes(2), chunk) == expected


def test_a_single_token_whose_products_fill_no_round(model):
    """24 unit vectors, 5 at a time."""
    batch = model.encode(ids=[[7]])
    (found,) = block_norms(model, of_output(model, batch, "hidden"), batch, [np.array([0])], Probes(None), 5)
    (whole,) = block_norms(model, of_output(model, batch, "hidden"), batch, [np.array([0])], Probes(None), 100)
    np.testing.assert_allclose(found.norm, whole.norm, rtol=1e-5)


def test_outputs_and_layers_draw_their_own_probes(model):
    batch = model.encode(ids=TEXTS)
    output = of_output(model, batch, "hidden")
    assert (output.place, output.size, output.layers) == (0, 24, 2)
    assert of_output(model, batch, "logits").size == 97
    u = torch.zeros(3, 11, 24)
    for index in (0, 1):
        one = of_layer(model, batch, index, u)
        assert (one.place, one.size, one.layers) == (1 + index, 24, 1)
    assert of_layer(model, batch, 0, torch.zeros(3, 11, 72)).layers == 3
    assert of_layer(model, batch, 0, torch.zeros(3, 11, 12)).layers == 1


def test_squares_do_not_underflow():
    gradient = torch.tensor([[[3e-30, -4e-30], [0.0, 0.0], [3e25, 4e25]], [[-2.0, 1.0], [0.5, 0.0], [-1.0, -2.0]]])
    expected = [[25e-60, 0, 25e50], [5, 0.25, 5]]
    np.testing.assert_allclose(_squares(gradient), expected, rtol=1e-6)
    assert _squares(gradient[1:].bfloat16()).tolist() == [[5, 0.25, 5]]
    assert _squares(gradient).dtype == np.float64


def test_errors_are_those_of_a_mean():
    """The squares are 1, 4, 4 and 7, and four times 0; the variance of their mean is 6 / 4 / 3."""
    squares = np.array([[[1.0, 0.0]], [[4.0, 0.0]], [[4.0, 0.0]], [[7.0, 0.0]]])
    sums = np.stack([squares.sum(0), (squares**2).sum(0)])
    found = _blocks(np.array([1]), sums, Probes(4), 4)
    assert found.norm.tolist() == [[2, 0]]
    assert found.error[0].tolist() == pytest.approx([math.sqrt(np.var([1, 4, 4, 7], ddof=1) / 4) / 4, 0])
    exact = _blocks(np.array([1]), sums, Probes(None), 4)
    assert exact.norm.tolist() == [[4, 0]] and exact.error.tolist() == [[0, 0]]
    same = np.stack([np.full((1, 2), 3 * 0.1), np.full((1, 2), 3 * 0.1**2)])  # no spread, but for rounding
    assert _blocks(np.array([1]), same, Probes(3), 3).error.max() < 1e-8


@pytest.mark.parametrize(("place", "where"), [("output", "the output"), ("3", "layer 3")])
def test_one_norm_that_is_not_finite(monkeypatch, place, where):
    bad = Blocks(np.array([1]), np.array([[0.5, math.inf]]), np.zeros((1, 2)))
    good = Blocks(np.array([1]), np.array([[0.5, 0.25]]), np.zeros((1, 2)))
    monkeypatch.setattr(measure, "block_norms", lambda **_: [good, bad])
    with pytest.raises(InputError, match=f"the gradients of {where} are not finite on text 1: the model is damaged"):
        measure.measure_reach(SimpleNamespace(size=9), place=place, exact=None, probes=Probes(2), fit={})


def test_positions_in_order():
    assert [each.tolist() for each in positions_of("all", [3, 1])] == [[0, 1, 2], [0]]
    assert [each.tolist() for each in positions_of("last", [3, 1])] == [[2], [0]]
    assert [each.tolist() for each in positions_of([2, -1, 0, -3], [3, 5])] == [[0, 2], [0, 2, 4]]


class TestNotes:
    def notes(self, *reaches, texts: int = 2) -> list[str]:
        return list(notes_on(reaches, SimpleNamespace(tokens=[[1]] * texts)))

    def test_of_nothing_to_say(self):
        assert self.notes(reach(halving(9), halving(8))) == []

    def test_of_one_text(self):
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


class TestRangeOfTheFit:
    @pytest.mark.parametrize(
        ("fit", "last", "ended", "defined"),
        [
            (dict(), 6, "text", True),
            (dict(fit_to=6), 6, "text", True),
            (dict(fit_to=5), 5, "asked", True),
            (dict(fit_to=3), 3, "asked", True),
            (dict(fit_to=2), 2, "asked", False),
            (dict(fit_from=4), 6, "text", True),
            (dict(fit_from=5), 6, "text", False),
            (dict(fit_from=9), 8, "text", False),
            (dict(fit_from=9, fit_to=20), 8, "text", False),
            (dict(fit_from=0, fit_to=2), 2, "asked", True),
        ],
    )
    def test_is_what_is_asked_and_there(self, fit, last, ended, defined):
        decay = reach(halving(7)[:1] + [0.7 * norm for norm in halving(7)[1:]], halving(5), **fit).decay
        assert (decay.first, decay.last, decay.ended, decay.defined) == (fit.get("fit_from", 1), last, ended, defined)

    @pytest.mark.parametrize("first", [1, 4, 6])
    def test_ends_before_the_first_distance_that_is_noise(self, first):
        """Only distances of the range count, its first one among them."""
        norms = halving(9)
        norms[6] = NOISE / 2
        decay = reach(norms, fit_from=first).decay
        assert (decay.last, decay.ended, decay.defined) == (5, "noise", first == 1)
        assert (reach(norms, fit_from=7, fit_to=8).decay.last, reach(norms, fit_to=5).decay.ended) == (8, "asked")

    def test_a_norm_at_the_noise_is_none(self):
        found = reach([1, 0.5, NOISE, NOISE * 0.99])
        assert found.noisy.tolist() == [0, 0, 0, 1]
        assert found.log_norm[2:, 0].tolist() == [math.log(NOISE)] * 2
        assert reach([8, 4, 2, 8 * NOISE, 7 * NOISE]).noisy.tolist() == [0, 0, 0, 0, 1]

    def test_ends_where_no_text_with_influence_goes_on(self):
        found = reach(halving(5), halving(6), [0.0] * 9)
        assert (found.decay.last, found.decay.ended) == (5, "noise")
        assert found.noisy[:6].tolist() == [0] * 6 and np.isnan(found.noisy[6:]).all()
        assert found.pairs.tolist() == [3] * 5 + [2] + [1] * 3

    def test_norms_that_do_not_change_have_no_line_to_explain(self):
        decay = reach([1.0] * 6, [1.0] * 9).decay
        assert decay.rate.value == 0 and decay.length.value == math.inf and math.isnan(decay.r2)
        assert not decay.straight and decay.defined

    def test_is_straight_from_nine_tenths_on(self):
        decay = reach(halving(9)).decay
        for r2, straight in ((0.9, True), (0.8999, False), (1.0, True), (math.nan, False)):
            assert dataclasses.replace(decay, r2=r2).straight == straight
        undefined = dataclasses.replace(decay, rate=reach(halving(2)).decay.rate, r2=1.0)
        assert not undefined.straight and not undefined.defined


class TestContext:
    def test_a_text_shorter_than_the_fit_is_unknown(self):
        """The second text has no distance of the fit: nothing says how its influence goes on."""
        found = reach(halving(9), halving(1), halving(2, 3.0))
        assert found.context[0].tolist() == [1, 4, 5] and np.isnan(found.context[1]).all()
        assert found.held[1].tolist() == [1, 1, 1]
        assert found.context[2].tolist() == [1, math.inf, math.inf]  # of 6 it holds 4.5

    def test_goes_on_from_a_texts_own_level(self):
        """The text's own tokens are those within reach, out of 1 / (1 − e^−λ) in all; a level is over its own
        distances."""
        norms = [math.exp(-0.3 * d + 0.05 * (-1) ** d) for d in range(8)]
        shorter = [1.1 * norm for norm in norms[:5]]
        found = reach(norms, shorter)
        decay = found.decay
        assert decay.straight
        for row, own in enumerate((norms, shorter)):
            chosen = range(1, len(own))
            level = np.mean([math.log(own[d]) + decay.rate.value * d for d in chosen])
            beyond = sum(math.exp(level - decay.rate.value * d) for d in range(len(own), 400))
            total, held = sum(own) + beyond, np.cumsum(own)
            for share, k in zip(SHARES, found.context[row]):
                assert k == (math.inf if share * total > held[-1] else 1 + (held < share * total).sum())

    def test_shares_are_never_above_one(self):
        for count in range(2, 60):
            assert reach([1 / count] * count).within[:, 0].max() <= 1

    def test_whose_tokens_count(self):
        found = reach(halving(9), halving(8))
        nan = math.nan
        for context, held, own in (
            ([[nan, 3.0, nan], [nan, nan, nan]], [[4.0, nan, nan], [nan, 5.0, 5.0]], True),
            ([[nan, 3.0, nan], [2.0, nan, nan]], [[4.0, nan, nan], [5.0, nan, nan]], False),
            ([[nan, 3.0, nan], [2.0, nan, nan]], [[4.0, nan, nan], [nan, 5.0, 5.0]], True),
            ([[nan, 3.0, 3.0], [nan, 2.0, 2.0]], [[nan, 4.0, 4.0], [nan, 5.0, 5.0]], False),
        ):
            changed = dataclasses.replace(found, context=np.array(context), held=np.array(held))
            assert changed.of_own_tokens is own

    def test_what_is_not_measured_is_refused(self):
        found = reach(halving(9))
        assert found.recent(np.int64(1)).value == 256 / 511 and found.recent(9).value == found.recent(90).value == 1
        for quantile in (-0.01, 1.01, math.nan):
            with pytest.raises(InputError, match="allowed are 0.5, 0.9, 0.95, and quantiles from 0 to 1"):
                found.effective_context(0.9, quantile)
        with pytest.raises(InputError, match="share 0.8, quantile 0.5"):
            found.not_reached(0.8)
        for tokens in (True, 1.5, "two", 0):
            with pytest.raises(InputError, match=f"tokens is {tokens!r}; allowed is a whole number from 1 on"):
                found.recent(tokens)


def test_noise_is_where_a_float_loses_digits():
    assert noise_of(torch.float32) == 2.0**-103 and noise_of(torch.float64) == 2.0**-970


def test_distances_are_resampled_in_pieces(monkeypatch):
    random = np.random.default_rng(1)
    texts = [random.exponential(size=count) for count in (11, 7, 9, 14)]
    whole = reach(*texts, seed=3)
    for columns in (1, 4, 13, 14):
        monkeypatch.setattr(reaching, "RESAMPLED_COLUMNS", columns)
        pieces = reach(*texts, seed=3)
        for name in ("log_norm", "norm", "share", "within"):
            np.testing.assert_array_equal(getattr(whole, name), getattr(pieces, name))


def example(name: str) -> Model:
    return Model(loud(random_example(name)), name=name)


def pairwise(x: np.ndarray) -> float:
    """The mean of cos(x_i, x_j), i ≠ j, from the whole matrix."""
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    matrix = unit @ unit.T
    return float(matrix[~np.eye(len(x), dtype=bool)].mean())


class TestSimilarity:
    @pytest.mark.parametrize("name", ["mamba2", "rwkv", "diff-mamba", "groupmamba", "selective-ssm", "gla"])
    def test_every_place_the_slow_way(self, name):
        model = example(name)
        batch = model.encode(ids=TEXTS)
        found = similarity_of(model, batch, at_once=20)
        n = model.num_layers
        assert found.places == ("embeddings", *map(str, range(n)), "output")
        vectors: dict[tuple[str, int], list[np.ndarray]] = {}
        for text in TEXTS:  # each alone, through the model's own forward pass
            one = model.encode(ids=[text])
            blocks, outs = {}, {}
            with torch.no_grad(), keep_outputs(blocks_of(model.module), blocks), keep_outputs(model.mixers, outs):
                base = model.module.base_model
                run = base(input_ids=one.input_ids) if base is not model.module else None
                if run is None:
                    model.module(input_ids=one.input_ids)
            last = outs[n - 1] if run is None else run.last_hidden_state
            for at, x in enumerate([model.embed(one).detach(), *(blocks[i] for i in range(n)), last]):
                vectors.setdefault(("stream", at), []).append(x[0].double().numpy())
            for at in range(n):
                vectors.setdefault(("mixer", at), []).append(outs[at][0].double().numpy())
        for (part, at), texts in vectors.items():
            place = found.places[at] if part == "stream" else str(at)
            middle = np.concatenate(texts).mean(0)
            expected = {
                "cosine": np.mean([pairwise(x) for x in texts]),
                "centred": np.mean([pairwise(x - middle) for x in texts]),
                "spread": np.mean([np.linalg.norm(x - x.mean(0)) / np.linalg.norm(x) for x in texts]),
            }
            for name, value in expected.items():
                assert found.estimate(place, name, part).value == pytest.approx(value, abs=2e-5), (place, name)

    def test_the_same_token_again_and_again(self):
        model = example("mamba2")
        found = similarity_of(model, model.encode(ids=[[5] * 9, [8] * 6]), at_once=100)
        assert found.estimate("embeddings").value == pytest.approx(1, abs=1e-6)
        assert found.estimate("embeddings", "spread").value == pytest.approx(0, abs=1e-6)
        assert found.estimate("embeddings", "centred").value == pytest.approx(1, abs=1e-6)
        assert found.estimate(0).value < 1 - 1e-4

    def test_orthogonal_opposite_and_absent_vectors(self):
        x = torch.tensor([[[1.0, 0], [0, 2], [9, 9]], [[3.0, 0], [-1, 0], [0, 0]], [[0.0, 0], [0, 0], [1, 1]]])
        mask = torch.tensor([[True, True, False], [True] * 3, [True] * 3])
        cosine = mean_cosine(x, mask)
        assert cosine[:2].tolist() == [0, -1] and cosine[2].isnan()
        assert mean_cosine(x[:1, :1], mask[:1, :1]).isnan() and spread(x[:1, :1], mask[:1, :1]).isnan()
        torch.testing.assert_close(spread(x, mask)[0], torch.tensor(math.sqrt(2.5 / 5)))
        for of in (mean_cosine, spread):  # whatever the vectors' size
            torch.testing.assert_close(of(x / 64, mask), of(x, mask), equal_nan=True)
        assert spread(0 * x, mask).isnan().all() and mean_cosine(0 * x, mask).isnan().all()

    def test_intervals_are_over_texts(self):
        model = example("mamba")
        one = similarity_of(model, model.encode(ids=TEXTS[:1]), at_once=100)
        assert math.isnan(one.estimate(0).low) and not math.isnan(one.estimate(0).value)
        found = similarity_of(model, model.encode(ids=TEXTS), at_once=100).estimate("0", "spread")
        assert found.low < found.value < found.high

    def test_what_is_not_there_is_refused(self):
        found = similarity_of(example("mamba"), example("mamba").encode(ids=TEXTS), at_once=100)
        with pytest.raises(InputError, match="no measure 'cosin'; allowed are .*; did you mean 'cosine'"):
            found.estimate(0, "cosin")
        with pytest.raises(InputError, match="no place 'embeddings'; allowed are 0, 1"):
            found.estimate("embeddings", part="mixer")
