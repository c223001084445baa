"""The bound's terms over batches of layers made by hand, its formulas with every term of its own, and its lengths.

The terms of the generalisation bound for layers that are not the theorem's.
The generalisation bound as its users meet it: its terms, files and views.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from examples import FEW, TEXTS, random_example
from handmade import HEADS, STATE, WIDTH, drawn_layer, steps_of
from loud import loud
from theorem import make, numbers

from ssmscope import ops
from ssmscope.core.model import Model
from ssmscope.core.trace import LayerTrace
from ssmscope.errors import InputError
from ssmscope.probes.bound import generalization_bound, measure
from ssmscope.probes.bound.measure import curve_lengths, measure_terms
from ssmscope.probes.bound.result import GeneralizationBound
from ssmscope.probes.bound.terms import (
    CURVES,
    LayerTerms,
    Norms,
    capacity,
    log_linear_capacity,
    norms_of,
    theorem_model,
)
from ssmscope.probes.stability.measure import inputs_of, record_layers


def visits(monkeypatch: pytest.MonkeyPatch, layers: list[list[LayerTrace]]) -> tuple[LayerTerms, ...]:
    """The terms of a model on batches of these traces."""

    def visit_layers(model, batch, see):
        for traces in layers:
            for index, trace in enumerate(traces):
                see([0, 1], index, trace)

    monkeypatch.setattr(measure, "visit_layers", visit_layers)
    return measure_terms(SimpleNamespace(num_layers=len(layers[0])), None)


MASKS = [[1, 1, 0], [1, 1, 1]], None, [[1, 0, 0], [1, 1, 0]]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_terms_are_the_extremes_of_all_batches_and_real_tokens(monkeypatch, order):
    batches = [[drawn_layer(seed, mask), drawn_layer(10 + seed, mask)] for seed, mask in enumerate(MASKS)]
    batches = [batches[at] for at in order]
    for layer, found in enumerate(visits(monkeypatch, batches)):
        steps = steps_of([traces[layer] for traces in batches])
        assert (found.layer, found.part, found.parts, found.name) == (layer, 0, 1, str(layer))
        assert (found.channels, found.state) == (HEADS * WIDTH, STATE)
        assert found.B_x == pytest.approx(max(r.x[text, t].norm().item() for r, text, t in steps))
        assert found.B_b == pytest.approx(max(group.norm().item() for r, text, t in steps for group in r.b[text, t]))
        assert found.B_c == pytest.approx(max(group.norm().item() for r, text, t in steps for group in r.c[text, t]))
        delta = torch.stack([r.delta[text, t] for r, text, t in steps])
        assert (found.delta_min, found.M_delta) == pytest.approx((delta.min().item(), delta.max().item()))
        raw = torch.log(torch.expm1(delta))
        assert found.half_range == pytest.approx(((raw.amax(0) - raw.amin(0)) / 2).max().item())
        assert (found.abscissa, found.B_A) == pytest.approx((-0.2, 3.2 + 4 / 9))
        assert found.log_rho == pytest.approx(max(-0.2 * delta[:, 0].min().item(), -1.2 * delta[:, 1].min().item()))


def test_steps_are_a_recurrences_own_and_norms_those_of_every_token(monkeypatch):
    trace = drawn_layer(3, None, turn=[[0, 0, 1], [1, 0, 0]])
    first, second = visits(monkeypatch, [[trace]])
    assert (first.name, second.name, second.part, second.parts) == ("0.0", "0.1", 1, 2)
    for place, found in enumerate((first, second)):
        delta = torch.stack([r.delta[text, t] for r, text, t in steps_of([trace], place)])
        assert (found.delta_min, found.M_delta) == pytest.approx((delta.min().item(), delta.max().item()))
        assert found.B_x == pytest.approx(trace.recurrences[place].x.flatten(2).norm(dim=2).max().item())
    assert second.B_A == pytest.approx(2 * first.B_A)


def test_a_recurrence_without_steps_or_continuous_decays(monkeypatch):
    trace = drawn_layer(4, MASKS[2], kind="log_a")
    (found,) = visits(monkeypatch, [[trace]])
    assert (found.delta_min, found.M_delta) == (1, 1)
    assert all(math.isnan(value) for value in (found.abscissa, found.B_A, found.half_range))
    assert math.isnan(found.log_capacity(9)) and math.isfinite(found.log_output(9))
    assert found.log_rho == pytest.approx(max(r.log_a[text, t].max().item() for r, text, t in steps_of([trace])))


def test_the_steps_of_a_delta_rule_are_its_betas(monkeypatch):
    plain = drawn_layer(7, None).recurrences[0]
    terms = dict(x=plain.x, b=plain.b, c=plain.c, log_a=-plain.delta.unsqueeze(-1))
    trace = LayerTrace(torch.zeros(2, 3, 7), (ops.DeltaRecurrence(**terms, beta=plain.delta / 3),))
    (found,) = visits(monkeypatch, [[trace]])
    assert (3 * found.delta_min, 3 * found.M_delta) == pytest.approx(
        (plain.delta.min().item(), plain.delta.max().item())
    )
    assert math.isnan(found.half_range) and math.isnan(found.abscissa)


@pytest.mark.parametrize("term", ["x", "b", "c", "delta"])
def test_terms_that_are_not_finite_are_refused(monkeypatch, term):
    trace = drawn_layer(5, None)
    getattr(trace.recurrences[0], term)[1, 2] = math.inf
    with pytest.raises(InputError, match="the terms of layer 1 are not finite on these inputs"):
        visits(monkeypatch, [[drawn_layer(6, None), trace]])


LAYER_TERMS = LayerTerms(
    **dict(layer=2, part=0, parts=1, channels=6, state=5, abscissa=-0.3, B_A=2.5, B_x=1.7, B_b=0.6, B_c=3.1),
    **dict(delta_min=0.2, M_delta=1.9, half_range=0.8, log_rho=-0.06),
)


def test_formulas_of_a_layer():
    rho = math.exp(-0.06)
    S1, S2 = sum(rho**t for t in range(7)), sum(t * rho**t for t in range(7))
    assert LAYER_TERMS.sums(7) == pytest.approx((math.log(S1), math.log(S2)))
    assert LAYER_TERMS.log_state(7) == pytest.approx(math.log(1.9 * 0.6 * 1.7 * S1))
    assert LAYER_TERMS.log_output(7) == pytest.approx(math.log(3.1 * 1.9 * 0.6 * 1.7 * S1))
    steps = 1.9 ** (2 / 3) * 30 ** (1 / 3) + 0.8 ** (2 / 3)
    assert LAYER_TERMS.log_capacity(7) == pytest.approx(math.log(1.9 * 1.7 * 0.6 * 3.1 * 2.5 * S2 * steps**1.5))


@pytest.mark.parametrize(
    ("length", "top"), [(3, 10_000), (999, 10_000), (1000, 10_000), (1001, 10_010), (7000, 70_000)]
)
def test_the_lengths_of_curves_are_even_on_a_logarithmic_axis(length, top):
    expected = sorted({round(2 * (top / 2) ** (k / 40)) for k in range(41)})
    assert curve_lengths(None, length).tolist() == expected
    assert curve_lengths([7, 2, 7, 5], length).tolist() == [2, 5, 7]


def test_every_number_of_a_bound():
    model = make(4, 2, 6, rows=3, abscissa=0.1)
    found = generalization_bound(model, length=9, examples=4, delta=0.1, loss_bound=2.5, lipschitz=0.7, lengths=[3, 8])
    norms = norms_of(theorem_model(model), found.row)
    assert found.norms == norms and found.lengths.tolist() == [3, 8]
    expected = norms.B_w * ((1 + norms.abscissa) ** 9 - 1) / norms.abscissa * math.sqrt(2 / (math.pi * 4))
    assert found.log_lower == pytest.approx(math.log(expected))
    assert found.gap.log_examples == pytest.approx(2 * (math.log(3 * 0.7 / 2.5) + found.capacity.log))
    assert not found.notes
    (note,) = generalization_bound(model, length=9, examples=3).notes
    assert note == "the covers of Lemma D.3 require m ≥ d, here 3 and 4"


@pytest.mark.parametrize(
    ("length", "inputs"),
    [(1, 2), (2, 2), (3, 3), (512, 512), (600, 512), (None, 512)],
)
def test_random_inputs_are_as_long_as_the_bounds_texts_within_limits(monkeypatch, length, inputs):
    monkeypatch.setattr(measure, "measure_terms", lambda model, batch: (LAYER_TERMS,))
    found = generalization_bound(Model(loud(random_example("mamba"))), length=length, seed=3, lengths=[4, 6])
    assert found.inputs == f"4 random sequences of {inputs} tokens (seed 3)"
    assert found.length == (length or 512)
    np.testing.assert_allclose(found.curves, [[LAYER_TERMS.log_output(4), LAYER_TERMS.log_output(6)]])


def test_texts_are_measured_as_they_are(monkeypatch):
    monkeypatch.setattr(measure, "measure_terms", lambda model, batch: (LAYER_TERMS,))
    model = Model(loud(random_example("mamba")))
    for length, expected in ((None, 11), (40, 40)):
        found = generalization_bound(model, model.encode(ids=TEXTS), length=length)
        assert (found.inputs, found.length) == ("3 texts of 3 to 11 tokens", expected)


OUTSIDE = [name for name in FEW if not name.startswith("selective")]


class TestOtherArchitectures:
    @pytest.mark.parametrize("name", OUTSIDE)
    def test_terms_are_the_largest_of_the_trace(self, name):
        model = Model(loud(random_example(name)))
        batch = model.encode(ids=TEXTS)
        terms = measure_terms(model, batch)
        traces = [model.trace(ids=row) for row in TEXTS]
        norms = record_layers(model, batch, [10]).norms
        for one in terms:
            layers = [trace.layers[one.layer] for trace in traces]
            each = [layer.recurrences[one.part] for layer in layers]
            largest = [
                max(getattr(r, term).double().flatten(start).norm(dim=-1).max().item() for r in each)
                for term, start in (("x", 2), ("b", 3), ("c", 3))
            ]
            assert (one.B_x, one.B_b, one.B_c) == pytest.approx(tuple(largest), rel=1e-5)
            heads, width, state = each[0].shape[2:]
            assert (one.channels, one.state) == (heads * width, state)
            for layer, recurrence in zip(layers, each):
                if layer.initial is None:
                    scanned = ops.scan_reference(recurrence)
                    length = recurrence.x.shape[1]
                    size = scanned.state.double().norm().item()
                    assert math.log(size) <= one.log_state(length) + 1e-5
                    skip = dataclasses.replace(recurrence, D=None)
                    y = ops.scan_reference(skip).y[0, -1].double().norm().item()
                    assert math.log(max(y, 1e-300)) <= one.log_output(length) + 1e-5
        assert norms.shape == (model.num_layers, 3, 1)

    def test_eq_14_with_measured_terms(self):
        model = Model(loud(random_example("mamba")))
        (one, _) = measure_terms(model, model.encode(ids=TEXTS))
        each = [model.trace(ids=row).layers[0].recurrence for row in TEXTS]
        delta = torch.cat([r.delta[0] for r in each]).double()
        A = each[0].A.double()
        raw = torch.log(torch.expm1(delta))
        half = ((raw.amax(0) - raw.amin(0)) / 2).max().item()
        assert one.half_range == pytest.approx(half, rel=1e-5)
        assert (one.delta_min, one.M_delta) == pytest.approx((delta.min().item(), delta.max().item()), rel=1e-5)
        assert (one.abscissa, one.B_A) == pytest.approx((A.max().item(), A.abs().max().item()))
        rho = torch.exp(delta.unsqueeze(-1) * A).max().item()
        T, M = 40, delta.max().item()
        S2 = sum(t * rho**t for t in range(T))
        steps = M ** (2 / 3) * (5 * 48) ** (1 / 3) + half ** (2 / 3)
        expected = M * one.B_x * one.B_b * one.B_c * A.abs().max().item() * S2 * steps**1.5
        assert one.log_capacity(T) == pytest.approx(math.log(expected), rel=1e-5)

    def test_is_marked(self):
        found = generalization_bound(Model(loud(random_example("gla")), None, "gla"), length=50, examples=10)
        assert not found.applies and found.vacuous is None and found.gap is None and found.capacity is None
        assert "outside the theorem's assumptions" in found.headline
        assert "no bound on the loss follows" in str(found).replace("\n", " ") and "nan" not in str(found)
        assert found.inputs == "4 random sequences of 50 tokens (seed 0)"
        frame = found.to_frame()
        assert set(frame["layer"]) == {0, 1} and frame[frame.symbol == "s_A"].value.isna().all()
        assert found.curves.shape == (2, len(found.lengths))
        tables = [block for block in found.blocks() if getattr(block, "heads", ()) == ("layer",)]
        meanings = dict(zip(frame.symbol, frame.meaning))
        for table in tables:
            assert table.note == "; ".join(f"{symbol}: {meanings[symbol]}" for symbol in table.columns) + "."
            for (_, cells), layer in zip(table.rows, (0, 1), strict=True):
                values = frame[frame.layer == layer].set_index("symbol").value
                assert [cell.found.value for cell in cells] == values[list(table.columns)].tolist()
        at = [one.log_output(int(found.lengths[7])) for one in found.layers]
        assert found.curves[:, 7].tolist() == pytest.approx(at)

    def test_damaged(self):
        model = Model(loud(random_example("mamba2")))
        with torch.no_grad():
            model.mixers[1].in_proj.weight.fill_(math.nan)
        with pytest.raises(InputError, match="layer 1 are not finite|layers.1.mixer.in_proj.weight are not finite"):
            generalization_bound(model, length=5, examples=10)


def test_inputs_are_the_seeds():
    model = Model(loud(random_example("mamba")))
    one, same, other = (inputs_of(model, None, length=9, samples=2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.batch.input_ids, same.batch.input_ids)
    assert not torch.equal(one.batch.input_ids, other.batch.input_ids)


@pytest.fixture(scope="module")
def result() -> GeneralizationBound:
    return generalization_bound(make(rows=3, abscissa=0.1), length=40, examples=500)


class TestResult:
    def test_curves(self, result):
        assert result.curves.shape == (3, len(result.lengths)) and result.lengths[0] == 2
        place = 17
        T = int(result.lengths[place])
        found = capacity(result.norms, T)
        assert result.curves[:, place].tolist() == pytest.approx(
            [found.log, found.log_printed, log_linear_capacity(result.norms, T)]
        )
        frame = result.curve()
        assert set(frame.curve) == set(CURVES) and len(frame) == 3 * len(result.lengths)
        short = generalization_bound(make(), length=40, examples=500, lengths=[100, 1, 100])
        assert short.lengths.tolist() == [1, 100]
        short.figure()

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (dict(length=0), "length is 0"),
            (dict(lengths=[5, 0]), "lengths is 0"),
            (dict(texts="a text"), "holds for all texts: leave them out"),
            (dict(examples=None), "was trained on is not recorded; give it, examples=…"),
        ],
    )
    def test_refuses(self, options, says):
        with pytest.raises(InputError, match=says.replace("[", r"\[").replace("]", r"\]")):
            generalization_bound(make(), **{"length": 5, "examples": 10, **options})

    def test_refuses_damaged_weights(self):
        model = make()
        with torch.no_grad():
            model.module.ssm.W_C[0, 0] = math.nan
        with pytest.raises(InputError, match="is damaged: 1 of the .* numbers of .*W_C are not finite"):
            generalization_bound(model, length=5, examples=10)

    def test_norms_of_half_precision(self):
        model = make()
        model.module.to(torch.bfloat16)
        found = norms_of(theorem_model(model), 0)
        assert isinstance(found, Norms) and found.B_B == pytest.approx(numbers(model)["B_B"], rel=1e-12)
