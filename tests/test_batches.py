"""Measures of several texts are the same whether the texts run together or one by one."""

import dataclasses

import numpy as np
import pytest
import torch
from examples import TEXTS, random_example
from loud import loud
import ssmscope
from ssmscope.core import batching
from ssmscope.core.model import Model
from ssmscope.probes.bound import generalization_bound
from ssmscope.probes.bound.measure import measure_terms
from ssmscope.probes.stability.measure import record_layers

NAMES = ["mamba", "rwkv", "gated-deltanet", "diff-mamba"]
model = pytest.fixture(params=NAMES)(lambda request: Model(loud(random_example(request.param)), name=request.param))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch):
    """Call to have every text run by itself from then on."""
    return lambda: monkeypatch.setattr(batching, "TOKENS_AT_ONCE", 1)


def test_terms_of_the_bound(model, alone):
    batch = model.encode(ids=TEXTS)
    together = measure_terms(model, batch)
    alone()
    for one, other in zip(measure_terms(model, batch), together, strict=True):
        assert dataclasses.astuple(one) == pytest.approx(dataclasses.astuple(other), rel=1e-5, nan_ok=True)
    # The extremes are those of all texts: each is one text's, and none exceeds them.
    texts = [measure_terms(model, model.encode(ids=row)) for row in TEXTS]
    for part, whole in enumerate(together):
        largest = {name: max for name in ("B_x", "B_b", "B_c", "M_delta", "log_rho")}
        for name, pick in {**largest, "delta_min": min}.items():
            each = [getattr(text[part], name) for text in texts]
            assert getattr(whole, name) == pytest.approx(pick(each), rel=1e-5)


def test_gains_of_states(model, alone):
    batch = model.encode(ids=TEXTS)
    together = record_layers(model, batch, [0, 2, 5])
    alone()
    apart = record_layers(model, batch, [0, 2, 5])
    torch.testing.assert_close(apart.norms, together.norms, rtol=1e-5, atol=1e-6, equal_nan=True)
    for ours, theirs in zip(apart.layers, together.layers, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.sums, other.sums, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(one.largest, other.largest, rtol=1e-5, atol=1e-6)
            assert one.steps == other.steps and sorted(one.growth) == pytest.approx(sorted(other.growth), rel=1e-5)


@pytest.mark.parametrize("verb", ["stability", "influence", "bound", "explain"])
def test_tables(verb, model, alone):
    batch = model.encode(ids=TEXTS)
    made = {
        "stability": lambda: ssmscope.stability(model, batch, positions=[0, 2]),
        "influence": lambda: ssmscope.influence(model, batch, at="layers"),
        "bound": lambda: generalization_bound(model, batch, examples=10),
        "explain": lambda: ssmscope.explain(model, batch, methods=("gradxinput", "occlusion", "lrp")),
    }[verb]
    together = made().to_frame()
    alone()
    apart = made().to_frame()
    numbers = together.select_dtypes("number").columns
    assert len(numbers) and list(apart.columns) == list(together.columns)
    for name in numbers:
        rounding = 1e-4 * np.abs(np.nan_to_num(together[name])).max(
            initial=0.01
        )  # Scores cancel: their parts are larger.
        np.testing.assert_allclose(apart[name], together[name], rtol=1e-3, atol=rounding, err_msg=name)
