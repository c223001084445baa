"""The generalisation bound as its users meet it: its terms, files and views."""

import math

import pytest
import torch
from theorem import make, numbers
from ssmscope.errors import InputError
from ssmscope.probes.bound import generalization_bound
from ssmscope.probes.bound.result import GeneralizationBound
from ssmscope.probes.bound.terms import CURVES, Norms, capacity, log_linear_capacity, norms_of, theorem_model


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

    @pytest.mark.parametrize(("options", "says"), [
        (dict(length=0), "length is 0"), (dict(delta=0), "delta is 0"), (dict(delta=1.0), "delta is 1.0"),
        (dict(loss_bound=-1), "loss_bound is -1"), (dict(lipschitz=math.inf), "lipschitz is inf"),
        (dict(lengths=[5, 0]), "lengths is 0"), (dict(texts="a text"), "holds for all texts: leave them out"),
        (dict(examples=None), "was trained on is not recorded; give it, examples=…"),
    ])  # fmt: skip
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
