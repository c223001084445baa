"""The generalisation bound as its users meet it: its terms, files and views."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from theorem import exact_sums, log_fraction, make, numbers

from ssmscope.api.results import Result
from ssmscope.errors import InputError
from ssmscope.probes.bound import generalization_bound
from ssmscope.probes.bound import result as bound_words
from ssmscope.probes.bound.result import GeneralizationBound
from ssmscope.probes.bound.terms import CURVES, Norms, capacity, log_linear_capacity, norms_of, theorem_model


@pytest.fixture(scope="module")
def result() -> GeneralizationBound:
    return generalization_bound(make(rows=3, abscissa=0.1), length=40, examples=500)


class TestResult:
    def test_frame(self, result):
        frame = result.to_frame()
        assert list(frame.columns) == ["model", "layer", "symbol", "value", "meaning"] and frame.symbol.is_unique
        values = frame.set_index("symbol").value
        assert values["ln C"] == result.capacity.log and values["vacuous"] == 1 and values["bound"] == 1
        assert values[[f"share of {name}" for name in ("W_B", "W_C", "w", "A", "q")]].sum() == pytest.approx(1)
        S1, S2 = exact_sums(Fraction(math.exp(result.norms.log_rho)), 40)
        assert values["ln S₁"] == pytest.approx(log_fraction(S1)) and values["ln S₂"] == pytest.approx(log_fraction(S2))
        assert values["ln m needed"] == pytest.approx(2 * (math.log(3) + result.capacity.log))

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

    def test_saved_and_read_back(self, result, tmp_path):
        paths = result.save(tmp_path, "bound")
        assert Result.load(paths["json"]) == result
        page = paths["html"].read_text()
        assert "The bound is vacuous" in page and "<script" not in page

    def test_words(self, result):
        said = str(result).replace("\n", " ")
        assert "The bound is vacuous" in said and "which is not an upper bound for s_A > 0" in said
        assert "s_A > 0: a state may grow" in said and "(Eq. 19)" in said
        holds = generalization_bound(make(), length=3, examples=10**12)
        assert not holds.vacuous and "differ by at most" in str(holds) and "with probability 95 %" in str(holds)
        assert "s_A < 0: no state can grow" in str(holds)
        known = dataclasses.replace(holds, gap=dataclasses.replace(holds.gap, bound=1.5))
        assert "is no less than c_l = 1" in str(known).replace("\n", " ")
        zero = generalization_bound(make(abscissa=0.0), length=3, examples=10)
        expected = numbers(make(abscissa=0.0))["B_w"] * 3 * math.sqrt(2 / (math.pi * 10))
        assert zero.log_lower == pytest.approx(math.log(expected), rel=1e-9)
        assert "(Eq. 20)" in str(zero) and "C grows as T²" in str(zero)

    def test_figures_of_all_kinds(self, result):
        steep = generalization_bound(make(abscissa=0.5), length=40, examples=500)
        assert steep.figure().axes[0].get_yscale() == "log"
        flat = generalization_bound(make(abscissa=-0.5), length=40, examples=500)
        assert flat.figure().axes[0].get_yscale() == "linear"
        name = "$x^{" + "deep/" * 40
        hostile = dataclasses.replace(result, provenance={**result.provenance, "model": name})
        figure = hostile.figure()
        figure.canvas.draw()
        edge = figure.get_window_extent().x1
        assert all(text.get_window_extent().x1 < edge for text in figure.texts)
        assert "$x^{" in figure.texts[0].get_text()

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (dict(length=0), "length is 0"),
            (dict(length=2.5), "length is 2.5"),
            (dict(examples=True), "examples is True"),
            (dict(delta=0), "delta is 0"),
            (dict(delta=1.0), "delta is 1.0"),
            (dict(loss_bound=-1), "loss_bound is -1"),
            (dict(lipschitz=math.inf), "lipschitz is inf"),
            (dict(lengths=[]), "lengths is empty"),
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


def sentences(abscissa: float, log_lower: float = math.nan, rows: int = 1, **gap) -> list[str]:
    """Words about terms that are made up."""
    norms = dict(abscissa=abscissa, log_rho=-0.125, log_rho_printed=0.25, B_A=1.5, B_q=0.75, p=0.0)
    shares = {"W_B": 0.1, "A": 0.6, "w": 0.3}
    made = dict(length=1024, log_linear=8.75, rows=rows, row=1, delta=0.05, loss_bound=2.0, examples=6920)
    gap = dict(vacuous=False, bound=0.43217, log_examples=9.0) | gap
    return list(
        bound_words.sentences(
            SimpleNamespace(
                **made,
                norms=SimpleNamespace(**norms),
                capacity=SimpleNamespace(log=12.5, log_printed=11.25, shares=shares),
                gap=SimpleNamespace(**gap),
                log_lower=log_lower,
                is_linear_attention=False,
            )
        )
    )


def test_every_number_stands_in_its_sentence():
    capacity, loss, growth, linear = sentences(-0.5)
    assert capacity == (
        "ln C at T = 1,024: 12.50 with all constants, 11.25 by Eq. 14, 8.75 as linear attention. The largest part is "
        "the cover of A, 60 %."
    )
    assert loss == "Expected and training loss differ by at most 0.432 with probability 95 %, m = 6,920 (Eq. 13)."
    assert growth == (
        "s_A < 0: no state can grow, ln ρ = −0.125, and C is bounded at every length; it grows up to about 8 tokens."
    )
    assert linear.endswith("p = 0.541 (the paper prints p = e); here |A| ≤ 1.5, ‖q‖ = 0.75, softplus(p) = 0.693.")
    *_, row = sentences(-0.5, rows=3)
    assert row == "w is row 1 of the 3 rows of W, the one with the largest C."


@pytest.mark.parametrize(("log_examples", "needed"), [(9.0, "8,103"), (13.9, "1,088,161"), (25.0, "10^10.9")])
def test_a_vacuous_bound_says_when_it_begins_to_hold(log_examples, needed):
    assert sentences(-0.5, vacuous=True, log_examples=log_examples)[1] == (
        "The bound is vacuous: 3 l C / √m exceeds c_l = 2 at m = 6,920, so losses are only known to differ by at most "
        f"c_l. It begins to hold at m = {needed}."
    )
    assert "0.05" not in sentences(-0.5)[1] and sentences(-0.5, bound=2.0)[1].endswith(
        "m = 6,920 (Eq. 13), which is no less than c_l = 2, the largest possible difference."
    )


def test_growth_by_the_sign_of_the_abscissa():
    assert sentences(0.0, 3.25)[2:4] == [
        "s_A = 0: no state grows, and C grows as T².",
        "Lower bound on the Rademacher complexity, as printed (Eq. 20): e^3.25.",
    ]
    grows, lower, _ = sentences(0.5, 3.25)[2:]
    assert grows == (
        "s_A > 0: a state may grow by ln ρ = −0.125 a token, and C by as much. (Eq. 15 prints 0.250, which is not an "
        "upper bound for s_A > 0.)"
    )
    assert lower == "Lower bound on the Rademacher complexity, as printed (Eq. 19): e^3.25."
