"""The terms of the generalisation bound for layers that are not the theorem's."""

import dataclasses
import math

import pytest
import torch
from examples import FEW, TEXTS, random_example
from loud import loud
from ssmscope import ops
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.probes.bound import generalization_bound
from ssmscope.probes.bound.measure import measure_terms
from ssmscope.probes.stability.measure import inputs_of, record_layers

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
    one, same, other = (inputs_of(model, None, length=9, sequences=2, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.batch.input_ids, same.batch.input_ids)
    assert not torch.equal(one.batch.input_ids, other.batch.input_ids)
