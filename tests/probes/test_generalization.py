"""The generalisation bound: sums against exact rationals, capacity against plain numbers, published checkpoints."""

import json
import math
from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from examples import random_example
from loud import loud
from refusals import refuses
from theorem import exact_sums, log_fraction, make, numbers
import ssmscope
from ssmscope import ops
from ssmscope.api.results import Result
from ssmscope.core.model import Model
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.probes.bound import generalization_bound
from ssmscope.probes.bound.measure import curve_lengths
from ssmscope.probes.bound.terms import (
    LINEAR_P,
    capacity,
    gap,
    log_lower_bound,
    log_sums,
    norms_of,
    softplus,
    theorem_model,
    worst_row,
)
from ssmscope.zoo.selective import SelectiveSSMConfig, SelectiveSSMForCausalLM


class TestSums:
    NEAR = [1 + sign * Fraction(1, 10**k) for sign in (1, -1) for k in (1, 2, 3, 4, 6, 9, 12)]
    FAR = [Fraction(1, 10**9), Fraction(1, 2), Fraction(9, 10), Fraction(6, 5), Fraction(3), Fraction(10**6)]

    @pytest.mark.parametrize("length", [2, 3, 7, 40, 120])
    def test_against_rationals(self, length):
        for rho in self.NEAR + self.FAR:
            expected = [log_fraction(s) for s in exact_sums(rho, length)]
            assert log_sums(log_fraction(rho), length) == pytest.approx(expected, rel=1e-13, abs=1e-13), rho

    @pytest.mark.parametrize("sign", [1, -1])
    def test_where_the_two_forms_of_the_mean_meet(self, sign):
        """|T ln ρ| = 0.1, and on both sides of it."""
        for length, factor in product((2, 5, 50), (0.5, 0.999, 1.001, 2.0)):
            rho = Fraction(math.exp(sign * 0.1 * factor / length))
            expected = [log_fraction(s) for s in exact_sums(rho, length)]
            assert log_sums(log_fraction(rho), length) == pytest.approx(expected, rel=1e-13, abs=1e-13)

    def test_a_length_for_which_whole_numbers_have_no_64_bits_is_refused(self):
        assert len(curve_lengths(None, 10**15)) > 30 and curve_lengths([5, 10**15], 3).tolist() == [5, 10**15]
        for lengths, length in ((None, 10**18), ([1, 10**15 + 1], 5)):
            refuses("allowed are lengths up to 1,000,000,000,000,000", curve_lengths, lengths, length)

    def test_long_texts_do_not_overflow(self):
        """At ρ = 6/5 the sums are 5 (ρᵀ − 1) and 30 + (5T − 30) ρᵀ."""
        T, r = 10**6, math.log(1.2)
        assert log_sums(r, T) == pytest.approx((T * r + math.log(5), T * r + math.log(5 * T - 30)), rel=1e-14)
        # At ρ = 1/2 they are 2 and 2, up to 2^−T.
        assert log_sums(-math.log(2), T) == pytest.approx((math.log(2), math.log(2)), rel=1e-13)
        assert log_sums(-2000.0, 5)[1] == pytest.approx(-2000.0)
        assert log_sums(2000.0, 5) == pytest.approx((8000.0, 8000.0 + math.log(4)))


def plain_capacity(n: dict[str, float], T: int) -> tuple[float, float, dict[str, float]]:
    """C with constants, C of Eq. 14 and the parts α^{1/3} β^{2/3}, by the formulas of the proof, without logarithms."""
    low, high = (math.log(1 + math.exp(n["p"] + sign * n["B_q"] * n["B_u"])) for sign in (-1, 1))
    rho = math.exp(n["s"] * (low if n["s"] <= 0 else high))
    S1, S2 = sum(rho**t for t in range(T)), sum(t * rho**t for t in range(T))
    u, B, C, w, q, A, N, d = (n[name] for name in ("B_u", "B_B", "B_C", "B_w", "B_q", "B_A", "N", "d"))
    parts = {
        "W_B": (u**2 * n["M_B"] ** 2 * math.log(2 * N * d + 1), w * C * u**2 * high * S1),
        "W_C": ((high * B * u**2 * S1 * n["M_C"]) ** 2 * math.log(2 * N * d**2 + 1), w * u),
        "w": ((high * B * C * u**3 * S1 * n["M_w"]) ** 2 * math.log(2 * d + 1), 1),
        "A": (2 * n["M_A"] ** 2 * N * d * math.log(math.sqrt(2) * N * d), high**2 * w * B * C * u**3 * S2),
        "q": (u**2 * n["M_q"] ** 2 * math.log(2 * d + 1), w * B * C * u**3 * (S1 + high * A * S2)),
    }
    terms = {name: alpha ** (1 / 3) * beta ** (2 / 3) for name, (alpha, beta) in parts.items()}
    steps = high ** (2 / 3) * N ** (1 / 3) * d ** (1 / 3) + q ** (2 / 3) * u ** (2 / 3)
    return sum(terms.values()) ** 1.5, high * w * u**3 * B * C * A * S2 * steps**1.5, terms


class TestCapacity:
    @pytest.mark.parametrize("abscissa", [-0.7, -1e-3, 0.0, 0.05, 0.4])
    @pytest.mark.parametrize("T", [2, 9, 60])
    def test_against_plain_numbers(self, abscissa, T):
        model = make(abscissa=abscissa)
        bound = generalization_bound(model, length=T, examples=100)
        with_constants, printed, terms = plain_capacity(numbers(model), T)
        assert bound.capacity is not None and bound.norms is not None
        assert bound.capacity.log == pytest.approx(math.log(with_constants), rel=1e-12)
        assert bound.capacity.log_printed == pytest.approx(math.log(printed), rel=1e-12)
        shares = {name: term / sum(terms.values()) for name, term in terms.items()}
        assert dict(bound.capacity.shares) == pytest.approx(shares, rel=1e-10)
        for name, value in numbers(model).items():
            if name[1:2] == "_":
                assert getattr(bound.norms, name) == pytest.approx(value, rel=1e-12), name
        T_terms = {symbol: value for _, symbol, value, _ in bound.terms()}
        assert T_terms["s_A"] == pytest.approx(abscissa, abs=1e-7) and T_terms["d"] == 3 and T_terms["N"] == 2

    def test_one_token(self):
        """S₂ = 0: nothing depends on A, and the cover of A costs nothing."""
        found = generalization_bound(make(), length=1, examples=10)
        assert found.capacity is not None and found.capacity.shares["A"] == 0
        assert found.capacity.log_printed == -math.inf and math.isfinite(found.capacity.log)
        assert Result.from_dict(json.loads(found.to_json())) == found

    def test_weights_that_are_zero(self):
        model = make()
        with torch.no_grad():
            model.module.head.weight.zero_()
        found = generalization_bound(model, length=5, examples=100)
        assert found.capacity is not None and found.gap is not None
        assert found.capacity.log == -math.inf and not found.vacuous
        assert dict(found.capacity.shares) == dict.fromkeys(("W_B", "W_C", "w", "A", "q"), 0)
        assert found.gap.bound == pytest.approx(3 * math.sqrt(math.log(40) / 200))
        assert "Generalisation bound" in str(found)


class TestGrowth:
    """ρ bounds the growth of every state on every input; the printed one does not for s_A > 0."""

    @pytest.mark.parametrize("abscissa", [-0.4, 0.0, 0.3])
    def test_no_state_grows_faster(self, abscissa):
        model = make(6, 3, 40, abscissa=abscissa, scale=1.0)
        norms = norms_of(theorem_model(model), 0)
        ids = torch.randint(40, (8, 30), generator=torch.Generator().manual_seed(1))
        recurrence = model.trace(ids=ids.tolist()).layers[0].recurrence
        log_a = recurrence.log_decay().double()
        assert log_a.max() <= norms.log_rho + 1e-9
        assert norms.delta_min <= recurrence.delta.min() and recurrence.delta.max() <= norms.M_delta
        S1, _ = log_sums(norms.log_rho, 30)
        states = ops.scan_reference(recurrence).state.double().flatten(1).norm(dim=1)
        log_most = math.log(norms.M_delta * norms.B_B) + 2 * math.log(norms.B_u) + S1
        assert states.max().log() <= log_most  # Lemma E.4
        if abscissa > 0:
            assert log_a.max() > norms.log_rho_printed
        else:
            assert norms.log_rho == norms.log_rho_printed


class TestGap:
    def test_is_the_minimum_of_dudleys_integral(self):
        """2 inf_α (4α + 12 ∫_α^{c_l} l C / (√m ε) dε) + 3 c_l √(ln(2/δ) / 2m), by a search over α."""
        cases = (0.3, 900, 1.0, 1.0, 0.05), (2.0, 10**4, 5.0, 0.25, 0.01), (0.7, 400, 2.0, 3.0, 0.2)
        for C, m, c, slope, delta in cases:
            alpha = np.geomspace(1e-6, c, 400_001)
            dudley = (4 * alpha + 12 * slope * C / math.sqrt(m) * np.log(c / alpha)).min()
            expected = 2 * dudley + 3 * c * math.sqrt(math.log(2 / delta) / (2 * m))
            found = gap(math.log(C), examples=m, delta=delta, loss_bound=c, lipschitz=slope)
            assert found.bound == pytest.approx(expected, rel=1e-7) and not found.vacuous
            by_formula = 24 * slope * C / math.sqrt(m) * (1 + math.log(c * math.sqrt(m) / (3 * slope * C)))
            tail = 3 * c * math.sqrt(math.log(2 / delta) / (2 * m))
            assert found.bound == pytest.approx(by_formula + tail, rel=1e-12)

    def test_vacuous(self):
        """From 3 l C / √m = c_l on it holds; beyond it is c_l, never a negative number."""
        c, slope, m = 2.0, 0.5, 144
        edge = c * math.sqrt(m) / (3 * slope)
        options = dict(examples=m, delta=0.05, loss_bound=c, lipschitz=slope)
        below, above = gap(math.log(edge * (1 - 1e-9)), **options), gap(math.log(edge * (1 + 1e-9)), **options)
        assert not below.vacuous and above.vacuous and above.bound == c
        assert below.bound == pytest.approx(8 * c + 3 * c * math.sqrt(math.log(40) / (2 * m)), rel=1e-8)
        for one in (below, above):
            assert one.log_examples == pytest.approx(math.log(m), abs=1e-8)
        exact = gap(0.0, examples=1, delta=0.5, loss_bound=3.0, lipschitz=1.0)  # 3 l C / √m = 3 = c_l
        assert not exact.vacuous and exact.bound == pytest.approx(24 + 9 * math.sqrt(math.log(4) / 2))
        for log_capacity in (-800.0, 0.0, 40.0, 1e5):
            assert gap(log_capacity, **options).bound >= 0
        needed = math.ceil(math.exp(gap(math.log(100.0), **options).log_examples) * (1 + 1e-12))
        assert not gap(math.log(100.0), **{**options, "examples": needed}).vacuous
        assert gap(math.log(100.0), **{**options, "examples": needed - 2}).vacuous


class TestLowerBound:
    def test_as_printed(self):
        expected = 3.0 * (1.2**10 - 1) / 0.2 * math.sqrt(2 / (math.pi * 50))
        assert log_lower_bound(0.2, 3.0, length=10, examples=50) == pytest.approx(math.log(expected), rel=1e-12)
        expected = 3.0 * 10 * math.sqrt(2 / (math.pi * 50))
        assert log_lower_bound(0.0, 3.0, length=10, examples=50) == pytest.approx(math.log(expected), rel=1e-12)
        assert math.isnan(log_lower_bound(-0.1, 3.0, length=10, examples=50))

    def test_limits(self):
        at_zero = log_lower_bound(0.0, 1.0, length=1000, examples=50)
        assert log_lower_bound(1e-12, 1.0, length=1000, examples=50) == pytest.approx(at_zero, rel=1e-8)
        long = log_lower_bound(0.2, 1.0, length=10**6, examples=50)
        assert long == pytest.approx(10**6 * math.log(1.2) + math.log(5) + math.log(2 / (math.pi * 50)) / 2, rel=1e-12)


class TestLinearAttention:
    def test_the_step_is_one(self):
        """With A = 0, q = 0 and p = ln(e − 1) the model is linear attention; with the printed p = e it is not."""
        model = make(4, 3, 9, abscissa=0.0)
        with torch.no_grad():
            model.module.ssm.A.zero_()
            model.module.ssm.q_delta.zero_()
            model.module.ssm.p_delta.fill_(LINEAR_P)
        found = generalization_bound(model, length=5, examples=10)
        assert found.is_linear_attention and "which Proposition 3.4 covers" in str(found)
        ids = [3, 1, 8, 2, 2]
        u, W_B, W_C = (t.detach().double() for t in (model.module.embedding.weight[ids], *_projections(model)))
        y = sum(((W_C @ u[-1]) @ (W_B @ past)) * past for past in u)
        expected = (model.module.head.weight.double() @ y).item()
        assert model.logits(model.encode(ids=ids))[0, 1].item() == pytest.approx(expected, rel=1e-5)
        with torch.no_grad():
            model.module.ssm.p_delta.fill_(math.e)
        found = generalization_bound(model, length=5, examples=10)
        assert not found.is_linear_attention and softplus(math.e) == pytest.approx(2.782, abs=1e-3)

    def test_the_other_conditions(self):
        for name in ("A", "q_delta"):
            model = make(abscissa=0.0)
            with torch.no_grad():
                model.module.ssm.A.zero_()
                model.module.ssm.q_delta.zero_()
                model.module.ssm.p_delta.fill_(LINEAR_P)
                getattr(model.module.ssm, name).flatten()[0] = -0.01
            assert not generalization_bound(model, length=5, examples=10).is_linear_attention
        assert not generalization_bound(Model(loud(random_example("mamba"))), length=5, examples=10).is_linear_attention


def _projections(model: Model):
    return model.module.ssm.W_B, model.module.ssm.W_C


class TestClasses:
    def test_the_worst_row_of_the_head(self):
        """One row is the longest, another has the largest sum: the capacity decides."""
        model = make(8, 2, 5, rows=4)
        with torch.no_grad():
            head = model.module.head.weight
            head.fill_(0.01)
            head[1, 0] = 3.0
            head[2] = 1.0
            head[3] = 0.9
        parts = theorem_model(model)
        assert parts is not None
        for T in (1, 20):
            logs = [capacity(norms_of(parts, row), T).log for row in range(4)]
            assert worst_row(parts, T) == int(np.argmax(logs))
        found = generalization_bound(model, length=20, examples=9)
        assert found.rows == 4 and found.row == worst_row(parts, 20)
        assert f"row {found.row} of the 4 rows of W" in str(found)
        assert found.capacity == capacity(norms_of(parts, found.row), 20)

    def test_other_heads(self):
        """A language model has a row per token, a classifier of ours two rows and a bias, which is said."""
        torch.manual_seed(0)
        config = SelectiveSSMConfig(vocab_size=11, hidden_size=4, state_size=2)
        language = generalization_bound(Model(SelectiveSSMForCausalLM(config)), length=5, examples=100)
        assert language.applies and language.rows == 11 and not language.notes
        module = SSMForSequenceClassification(SSMClassifierConfig(config, num_labels=2))
        for bias, said in ((0.0, False), (1.0, True)):
            module.head.bias.data[1] = bias
            found = generalization_bound(Model(module), length=5, examples=3)
            assert found.applies and found.rows == 2
            assert ["bias" in note for note in found.notes] == [False, True][: 1 + said]
            assert "m ≥ d" in found.notes[0]
        config = SelectiveSSMConfig(vocab_size=1, hidden_size=4, state_size=2)
        pixels = SSMForSequenceClassification(SSMClassifierConfig(config, channels=3, image_size=(2, 3), num_labels=2))
        found = generalization_bound(Model(pixels), length=9, examples=3)
        assert not found.applies  # no table bounds its inputs
        assert found.inputs == "4 random sequences of 7 tokens (seed 0)"  # as many as an image has

    def test_what_the_theorem_does_not_cover(self):
        model = make()
        one = {"mixers": model.mixers, "module": model.module, "channels": None}
        assert theorem_model(SimpleNamespace(**one)) is not None
        headless = SimpleNamespace(get_output_embeddings=lambda: None)
        for changed in ({"mixers": model.mixers * 2}, {"channels": 3}, {"module": headless}):
            assert theorem_model(SimpleNamespace(**{**one, **changed})) is None

    @pytest.mark.parametrize(("parameter", "name"), [
        ("ssm.A", "A"), ("ssm.W_B", "W_B"), ("ssm.W_C", "W_C"), ("ssm.q_delta", "q"), ("ssm.p_delta", "p"),
        ("head.weight", "the head"), ("embedding.weight", "the embedding"),
    ])  # fmt: skip
    def test_one_number_that_is_not_finite(self, parameter, name):
        model = make()
        model.module.get_parameter(parameter).data.view(-1)[-1] = math.inf
        parts = theorem_model(model)
        refuses(f"^{name} of the selective SSM has numbers that are not finite", norms_of, parts, 0)


class TestOracles:
    @pytest.mark.parametrize(("name", "length", "abscissa", "log_rho", "printed", "capacities"), [
        ("majority_T25_seed1.pth", 25, 0.214152202, 0.271, 0.0025, None),
        ("imdb_T100_seed1.pth", 100, 0.205731139, None, None, (66.86, 70.55)),
        ("listops_T100_seed3.pth", 100, -0.139018178, None, None, None),
    ])  # fmt: skip
    def test_numbers(self, oracle, name, length, abscissa, log_rho, printed, capacities):
        found = generalization_bound(ssmscope.load(oracle(name)), length=length, examples=1000)
        assert found.vacuous and found.gap is not None and found.gap.bound == 1.0
        assert found.norms is not None and found.norms.abscissa == pytest.approx(abscissa, abs=1e-8)
        if log_rho is not None:
            assert found.norms.log_rho == pytest.approx(log_rho, abs=5e-4)
            assert found.norms.log_rho_printed == pytest.approx(printed, abs=5e-5)
        assert found.capacity is not None
        if capacities is not None:
            assert (found.capacity.log_printed, found.capacity.log) == pytest.approx(capacities, abs=5e-3)

    def test_listops(self, oracle):
        """w is the first class's row of W, at the 104 tokens to which the texts are padded; the worst row has more."""
        parts = theorem_model(ssmscope.load(oracle("listops_T100_seed3.pth")))
        assert parts is not None and worst_row(parts, 104) == 8
        first, worst = (capacity(norms_of(parts, row), 104) for row in (0, 8))
        assert (first.log_printed, first.log) == pytest.approx((28.91, 32.88), abs=5e-3)
        assert worst.log_printed > first.log_printed and worst.log > first.log
