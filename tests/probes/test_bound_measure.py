"""The bound's terms over batches of layers made by hand, its formulas with every term of its own, and its lengths."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from examples import TEXTS, random_example
from handmade import HEADS, STATE, WIDTH, drawn_layer, steps_of
from loud import loud
from refusals import refuses
from theorem import make
from ssmscope import ops
from ssmscope.core.model import Model
from ssmscope.core.trace import LayerTrace
from ssmscope.probes.bound import generalization_bound, measure
from ssmscope.probes.bound.measure import curve_lengths, measure_terms
from ssmscope.probes.bound.terms import LayerTerms, norms_of, theorem_model


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
    refuses("the terms of layer 1 are not finite on these inputs", visits, monkeypatch, [[drawn_layer(6, None), trace]])


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


@pytest.mark.parametrize(("length", "inputs"), [(1, 2), (2, 2), (3, 3), (512, 512), (600, 512), (None, 512)])
def test_random_inputs_are_as_long_as_the_bounds_texts_within_limits(monkeypatch, length, inputs):
    monkeypatch.setattr(measure, "measure_terms", lambda model, batch: (LAYER_TERMS,))
    found = generalization_bound(Model(loud(random_example("mamba"))), length=length, seed=3, lengths=[4, 6])
    assert found.inputs == f"4 random sequences of {inputs} tokens (seed 3)" and found.length == (length or 512)
    np.testing.assert_allclose(found.curves, [[LAYER_TERMS.log_output(4), LAYER_TERMS.log_output(6)]])


def test_texts_are_measured_as_they_are(monkeypatch):
    monkeypatch.setattr(measure, "measure_terms", lambda model, batch: (LAYER_TERMS,))
    model = Model(loud(random_example("mamba")))
    for length, expected in ((None, 11), (40, 40)):
        found = generalization_bound(model, model.encode(ids=TEXTS), length=length)
        assert (found.inputs, found.length) == ("3 texts of 3 to 11 tokens", expected)
