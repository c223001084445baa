"""Influence: Jacobian blocks against autograd's, their decay and context against closed forms and the slow way."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from examples import HALVES, TEXTS, random_example
from loud import TrueFloat64, doubled, loud
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from ssmscope import ops
from ssmscope.core import mixers
from ssmscope.core.bootstrap import FEWER_DRAWS, RESAMPLES
from ssmscope.core.model import Model
from ssmscope.core.trace import LayerTrace
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.probes.influence import influence
from ssmscope.probes.influence.measure import Blocks, Probes, block_norms, of_layer, of_output
from ssmscope.probes.influence.reach import QUANTILES, SHARES, noise_of, reach_of

FLOAT32 = noise_of(torch.float32)


def example(name: str) -> Model:
    return Model(loud(random_example(name)), name=name)


WIDTH = 5


class Leaky(nn.Module):
    """y_t = Σ_s decay^{t−s} (c·b) V x_s, one head, with V (width, width)."""

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.V = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.b, self.c = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))

    def forward(self, u):
        return _output(self, _quantities(self, u))

    @property
    def gain(self) -> float:
        """‖∂y_t/∂x_t‖_F."""
        return float((self.b @ self.c).detach().abs() * self.V.detach().norm())


def _quantities(mixer, u, mask=None, state=None) -> LayerTrace:
    batch, length, _ = u.shape
    log_a = torch.full((batch, length, 1, 1), math.log(mixer.decay), dtype=u.dtype)
    b, c = (t.expand(batch, length, 1, 3) for t in (mixer.b, mixer.c))
    return LayerTrace(u, (ops.Recurrence(x=(u @ mixer.V.mT).unsqueeze(2), b=b, c=c, log_a=log_a),), mask=mask)


def _output(mixer, layer, scans=None):
    (scanned,) = layer.scan() if scans is None else scans
    return scanned.y.squeeze(2)


class LeakyConfig(PretrainedConfig):
    model_type = "leaky-for-tests"


class LeakyModel(PreTrainedModel):
    config_class, base_model_prefix = LeakyConfig, "backbone"

    def __init__(self, *decays: float) -> None:
        super().__init__(LeakyConfig())
        torch.manual_seed(1)
        self.embeddings = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(Leaky(decay)) for decay in decays])  # no residual stream
        self.head = nn.Linear(WIDTH, 7, bias=False)

    def get_input_embeddings(self):
        return self.embeddings

    def get_output_embeddings(self):
        return self.head

    def forward(self, inputs_embeds=None, input_ids=None, attention_mask=None, use_cache=None):
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x = layer(x)
        return BaseModelOutput(last_hidden_state=x)


class LeakyForCausalLM(PreTrainedModel):
    config_class, base_model_prefix = LeakyConfig, "backbone"

    def __init__(self, *decays: float) -> None:
        super().__init__(LeakyConfig())
        self.backbone = LeakyModel(*decays)

    def get_input_embeddings(self):
        return self.backbone.embeddings

    def get_output_embeddings(self):
        return self.backbone.head

    def forward(self, **arguments):
        return SimpleNamespace(logits=self.backbone.head(self.backbone(**arguments).last_hidden_state))


@pytest.fixture
def leaky(monkeypatch):
    reader = type("Reader", (), dict(compute_terms=staticmethod(_quantities), output=staticmethod(_output)))
    monkeypatch.setitem(mixers._ADAPTERS, Leaky, reader)
    return lambda *decays: Model(LeakyForCausalLM(*decays), name="leaky")


def ids(length: int, count: int = 1, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, 11, (count, length)).tolist()


class TestClosedForm:
    @pytest.mark.parametrize("decay", [0.9, 0.5, 0.99])
    def test_the_decay_of_a_linear_layer(self, leaky, decay):
        model = leaky(decay)
        batch = model.encode(ids=[*ids(60, 2), *ids(37, 1)])
        found = influence(model, batch)
        fit = found.output.decay
        gain = model.mixers[0].gain
        assert found.output.exact and (fit.first, fit.last, fit.ended) == (1, 59, "text")
        assert fit.rate.value == pytest.approx(-math.log(decay), rel=1e-5)
        assert fit.length.value == pytest.approx(-1 / math.log(decay), rel=1e-5)
        assert fit.intercept == pytest.approx(math.log(gain), abs=1e-4) and fit.r2 == pytest.approx(1)
        assert fit.rate.low == pytest.approx(fit.rate.value, abs=1e-6) and fit.rate.high >= fit.rate.low
        curve = found.distances()
        np.testing.assert_allclose(curve.norm, gain * decay**curve.distance, rtol=1e-4)
        np.testing.assert_allclose(curve.log_norm, math.log(gain) + curve.distance * math.log(decay), atol=1e-4)
        assert curve.pairs.tolist() == [3] * 37 + [2] * 23
        share = [np.mean([(1 - decay) * decay**d / (1 - decay**n) for n in (60, 60, 37) if d < n]) for d in range(60)]
        np.testing.assert_allclose(curve.share, share, rtol=1e-4)
        within = [np.mean([min(1, (1 - decay ** (d + 1)) / (1 - decay**n)) for n in (60, 60, 37)]) for d in range(60)]
        np.testing.assert_allclose(curve.within, within, rtol=1e-4)
        assert found.output.recent(8).value == pytest.approx(within[7], rel=1e-4)
        assert found.output.recent(1000).value == pytest.approx(1)

    @pytest.mark.parametrize("decay", [0.9, 0.5, 0.99])
    def test_the_effective_context_goes_on_before_the_text(self, leaky, decay):
        """An endless text holds 1 − decay^k of the influence in its last k tokens."""
        model = leaky(decay)
        found = influence(model, model.encode(ids=[*ids(60), *ids(10), *ids(200)])).output
        wanted = [math.ceil(math.log(1 - share) / math.log(decay) - 1e-9) for share in SHARES]
        for text, length in enumerate((60, 10, 200)):
            assert found.context[text].tolist() == [k if k <= length else math.inf for k in wanted]
            own = [math.ceil(math.log(1 - share * (1 - decay**length)) / math.log(decay) - 1e-9) for share in SHARES]
            assert found.held[text].tolist() == own
        for share, k in zip(SHARES, wanted):
            missed = sum(k > length for length in (60, 10, 200))
            assert found.not_reached(share) == missed
            assert found.effective_context(share) == (k if missed < 2 else math.inf)
            assert found.effective_context(share, 1.0) == (k if missed == 0 else math.inf)
            assert found.effective_context(share, 0.0) == (k if missed < 3 else math.inf)

    def test_layers_alone_and_all_positions(self, leaky):
        """The output of two layers in a row is the convolution of both; each alone is its own."""
        model = leaky(0.8, 0.6)
        found = influence(model, model.encode(ids=ids(12, 2)), at="layers", positions="all")
        first, second = model.mixers
        both = float((second.V @ first.V).detach().norm() / (second.V.norm() * first.V.norm()).detach())
        whole = first.gain * second.gain * both
        d = np.arange(12)
        np.testing.assert_allclose(found.distances().norm, whole * (0.8 ** (d + 1) - 0.6 ** (d + 1)) / 0.2, rtol=1e-4)
        for place, mixer, decay in (("0", first, 0.8), (1, second, 0.6)):
            np.testing.assert_allclose(found.distances(place).norm, mixer.gain * decay**d, rtol=1e-4)
            assert found.distances(place).pairs.tolist() == [2 * (12 - each) for each in d]
        assert [reach.place for reach in found.reaches] == ["output", "0", "1"]
        assert found.layers[1].decay.rate.value == pytest.approx(-math.log(0.6), rel=1e-4)

    def test_growth_has_no_length_and_is_not_reached(self, leaky):
        model = leaky(1.1)
        found = influence(model, model.encode(ids=ids(30, 2)))
        decay = found.output.decay
        assert decay.rate.value == pytest.approx(-math.log(1.1), rel=1e-4) and decay.length.value == math.inf
        assert np.isinf(found.output.context).all() and np.isfinite(found.output.held).all()
        assert any("does not decay" in note for note in found.notes)

    def test_logits_are_the_head_of_the_hidden_vector(self, leaky):
        model = leaky(0.7)
        with torch.no_grad():
            mixer = model.mixers[0]
            gain = mixer.gain * float((model.module.backbone.head.weight @ mixer.V).norm() / mixer.V.norm())
        found = influence(model, model.encode(ids=ids(9)), of="logits")
        np.testing.assert_allclose(found.distances().norm, gain * 0.7 ** np.arange(9), rtol=1e-4)


def jacobian(run, x: torch.Tensor) -> np.ndarray:
    """‖∂ run(x)/∂x_s‖_F of run: (length, width) → (size,), by autograd."""
    full = torch.autograd.functional.jacobian(run, x)  # (size, length, width)
    return full.square().sum((0, 2)).sqrt().numpy()


POSITIONS = [np.array([3, 10]), np.array([2]), np.array([0, 5])]
LAST = [np.array([10]), np.array([2]), np.array([5])]


class TestExact:
    @pytest.mark.parametrize("name", HALVES[0])
    def test_the_output_is_autograds_in_float64(self, name):
        """The model's own slow path on one text is compared with copies of padded texts through the fast scans."""
        model = Model(doubled(example(name).module))
        batch = model.encode(ids=TEXTS)
        with TrueFloat64():
            found = block_norms(model, of_output(model, batch, "hidden"), batch, LAST, Probes(None))
            own = model.embed(model.encode(ids=TEXTS[2:])).detach()[0]

            def last(x):
                module = model.module
                if module.base_model is not module:
                    return module.base_model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0, 5]
                return module.ssm(x[None])[0, 5]

            expected = jacobian(last, own)
        np.testing.assert_allclose(found[2].norm[0], expected, rtol=1e-8, atol=1e-10 * expected.max())
        assert not any(block.error.any() for block in found)

    @pytest.mark.parametrize("name", HALVES[1])
    def test_a_mixers_are_autograds_in_float64(self, name):
        model = Model(doubled(example(name).module))
        batch = model.encode(ids=TEXTS)
        index = model.num_layers - 1
        u = model.trace(batch, keep_inputs=[index]).layers[index].u
        with TrueFloat64():
            found = block_norms(model, of_layer(model, batch, index, u), batch, LAST, Probes(None))
            mixer, length = model.mixers[index], len(TEXTS[2])

            def last(x):
                own = mixer(x[None])
                return (own[0] if isinstance(own, tuple) else own)[0, length - 1]

            expected = jacobian(last, u[2, :length])
        np.testing.assert_allclose(found[2].norm[0], expected, rtol=1e-8, atol=1e-10 * expected.max())

    @pytest.mark.parametrize("name", HALVES[0])
    def test_nothing_depends_on_what_comes_later(self, name):
        model = example(name)
        batch = model.encode(ids=TEXTS)
        found = block_norms(model, of_output(model, batch, "hidden"), batch, POSITIONS, Probes(3))
        for block, own, text in zip(found, POSITIONS, TEXTS):
            assert block.norm.shape == block.error.shape == (len(own), len(text))
            for row, t in enumerate(own):
                assert (block.norm[row, t + 1 :] == 0).all() and (block.norm[row, : t + 1] > 0).all()

    def test_a_classifiers_logits(self):
        torch.manual_seed(0)
        backbone = example("mamba2").config
        module = loud(SSMForSequenceClassification(SSMClassifierConfig(backbone, num_labels=3))).double()
        model = Model(module)
        batch = model.encode(ids=TEXTS)
        with TrueFloat64():
            positions = [np.array([length - 1]) for length in batch.lengths]
            found = block_norms(model, of_output(model, batch, "logits"), batch, positions, Probes(None))
            for text, row in enumerate(TEXTS):
                own = model.embed(model.encode(ids=[row])).detach()[0]
                expected = jacobian(lambda x: module(inputs_embeds=x[None]).logits[0], own)
                np.testing.assert_allclose(found[text].norm[0], expected, rtol=1e-8)

    def test_neither_chunks_nor_company_change_anything(self):
        model = example("mamba2")
        batch = model.encode(ids=TEXTS)
        for probes, chunks in ((Probes(None), (70,)), (Probes(5, seed=3), (1, 23))):
            every = block_norms(model, of_output(model, batch, "hidden"), batch, POSITIONS, probes)
            for chunk in chunks:
                again = block_norms(model, of_output(model, batch, "hidden"), batch, POSITIONS, probes, chunk)
                for a, b in zip(every, again):
                    np.testing.assert_allclose(a.norm, b.norm, rtol=1e-4)
                    np.testing.assert_allclose(a.error, b.error, rtol=1e-2)
            alone = [np.array([10]), *POSITIONS[1:]]
            fewer = block_norms(model, of_output(model, batch, "hidden"), batch, alone, probes)
            np.testing.assert_allclose(fewer[0].norm[0], every[0].norm[1], rtol=1e-4)

    def test_nothing_is_left_behind(self):
        model = example("mamba")
        asking = [p.requires_grad for p in model.module.parameters()]
        state = torch.random.get_rng_state()
        influence(model, model.encode(ids=TEXTS), at="layers", probes=2, exact=False)
        assert [p.requires_grad for p in model.module.parameters()] == asking
        assert all(p.grad is None for p in model.module.parameters())
        assert not any(part._forward_hooks for part in model.module.modules())
        assert all("forward" not in mixer.__dict__ for mixer in model.mixers)
        assert torch.equal(state, torch.random.get_rng_state())


class TestEstimates:
    def test_the_mean_square_has_no_bias_and_the_error_is_its_own(self):
        """Hutchinson: E‖Jᵀv‖² = ‖J‖_F², with variance 2 (‖A‖_F² − Σ A_ii²), A = J Jᵀ. At 4.5 standard errors
        two of 100,000 would fail by chance; the seed is settled."""
        model = example("mamba2")
        batch = model.encode(ids=TEXTS[:1])
        t, count = 10, 3000
        dependence = of_output(model, batch, "hidden")
        (exact,) = block_norms(model, dependence, batch, [np.array([t])], Probes(None))
        (found,) = block_norms(model, dependence, batch, [np.array([t])], Probes(count, seed=1))
        with torch.enable_grad():
            full = torch.autograd.functional.jacobian(lambda x: dependence.run(x, batch.mask)[0, t], dependence.x)[:, 0]
        for s in range(t + 1):
            A = (full[:, s] @ full[:, s].mT).double().detach()
            spread = A.square().sum() - A.diagonal().square().sum()
            error = math.sqrt(2 * float(spread) / count)  # of the mean square
            assert abs(found.norm[0, s] ** 2 - exact.norm[0, s] ** 2) < 4.5 * error
            assert found.error[0, s] == pytest.approx(error / (2 * exact.norm[0, s]), rel=0.2)

    def test_probes_are_drawn_by_seed_place_text_position_and_number(self):
        own = Probes(4, seed=1)
        first = own.vector(2, 50, 0, 3, 7)
        assert (first == own.vector(2, 50, 0, 3, 7)).all() and set(first) == {-1.0, 1.0}
        for other in (own.vector(1, 50, 0, 3, 7), own.vector(2, 50, 1, 3, 7), own.vector(2, 50, 0, 4, 7)):
            assert (first != other).any()
        assert (first != own.vector(2, 50, 0, 3, 8)).any() and (first != Probes(4, seed=2).vector(2, 50, 0, 3, 7)).any()
        assert (Probes(None).vector(2, 4, 0, 0, 0) == [0, 0, 1, 0]).all() and Probes(None).count(9) == 9


def synthetic(count: int = 5, seed: int = 0, error: float = 0.0) -> list[Blocks]:
    """Texts of different lengths with some of their positions."""
    random = np.random.default_rng(seed)
    found = []
    for text in range(count):
        length = 9 + 2 * text
        t = np.array([length - 1]) if text % 2 else np.array([2, length - 1])
        s = np.arange(length)
        norm = np.where(
            s <= t[:, None], np.exp(0.5 * text - 0.2 * (t[:, None] - s) + random.normal(0, 0.4, (len(t), length))), 0
        )
        found.append(Blocks(t, norm, error * norm * random.random(norm.shape)))
    return found


def by_distance(blocks: list[Blocks]) -> list[list[tuple[int, float, float, float]]]:
    """Per distance (text, norm, share, error) of every (text, t) that has it: the slow way."""
    most = max(int(block.positions.max()) for block in blocks)
    found: list[list[tuple[int, float, float, float]]] = [[] for _ in range(most + 1)]
    for text, block in enumerate(blocks):
        for row, t in enumerate(block.positions):
            total = sum(block.norm[row, : t + 1])
            for s in range(t + 1):
                found[t - s].append((text, block.norm[row, s], block.norm[row, s] / total, block.error[row, s]))
    return found


class TestReach:
    def test_every_number_the_slow_way(self):
        blocks = synthetic(error=0.3)
        slow = by_distance(blocks)
        reach = reach_of("output", blocks, exact=False, noise=FLOAT32, seed=4)
        assert reach.pairs.tolist() == [len(each) for each in slow]
        logs = np.array([np.mean([math.log(one[1]) for one in each]) for each in slow])
        np.testing.assert_allclose(reach.log_norm[:, 0], logs)
        np.testing.assert_allclose(reach.norm[:, 0], [np.mean([one[1] for one in each]) for each in slow])
        np.testing.assert_allclose(reach.share[:, 0], [np.mean([one[2] for one in each]) for each in slow])
        error = [math.sqrt(np.mean([(one[3] / one[1]) ** 2 for one in each])) for each in slow]
        np.testing.assert_allclose(reach.error, error)
        for d, each in enumerate(slow):
            np.testing.assert_allclose(reach.quantiles[d], np.quantile([one[1] for one in each], QUANTILES))
        assert not reach.noisy.any()
        last = [block.norm[-1, block.positions[-1] :: -1] for block in blocks]
        for k in (1, 3, 12):
            expected = np.mean([own[:k].sum() / own.sum() for own in last])
            assert reach.recent(k).value == pytest.approx(expected)
        assert (np.diff(reach.within[:, 0]) >= 0).all()

    def test_the_line_is_weighted_least_squares(self):
        blocks = synthetic()
        for fit_from, fit_to, ended in ((1, None, "text"), (0, 9, "asked"), (3, 400, "text")):
            reach = reach_of("output", blocks, exact=True, noise=FLOAT32, fit_from=fit_from, fit_to=fit_to)
            d = np.arange(fit_from, min(16, 16 if fit_to is None else fit_to) + 1)
            w, y = reach.pairs[d], reach.log_norm[d, 0]
            slope, level = np.polyfit(d, y, 1, w=np.sqrt(w))
            decay = reach.decay
            assert (decay.first, decay.last, decay.ended) == (d[0], d[-1], ended)
            assert decay.rate.value == pytest.approx(-slope) and decay.intercept == pytest.approx(level)
            rest, mean = y - level - slope * d, np.average(y, weights=w)
            assert decay.r2 == pytest.approx(1 - (w * rest**2).sum() / (w * (y - mean) ** 2).sum())
            assert decay.length.value == pytest.approx(-1 / slope)
            assert decay.length.low == pytest.approx(1 / decay.rate.high)

    def test_intervals_are_of_resampled_texts(self):
        blocks, seed = synthetic(), 7
        slow = by_distance(blocks)
        reach = reach_of("output", blocks, exact=True, noise=FLOAT32, seed=seed)
        drawn = np.random.default_rng(seed).integers(0, len(blocks), (RESAMPLES, len(blocks) - FEWER_DRAWS))
        rates, fifth = [], []
        for texts in drawn:
            times = np.bincount(texts, minlength=len(blocks))
            known = [[(times[one[0]], math.log(one[1])) for one in each if times[one[0]]] for each in slow]
            d = [at for at, each in enumerate(known) if each and at >= 1]
            w = np.array([sum(n for n, _ in known[at]) for at in d])
            y = np.array([sum(n * log for n, log in known[at]) / n_all for at, n_all in zip(d, w)])
            x = np.array(d) - np.average(d, weights=w)
            rates.append(-(w * x * y).sum() / (w * x * x).sum())
            fifth.append(np.nan if 5 not in d else y[d.index(5)])
        for found, values in ((reach.decay.rate, rates), (reach.log_norm[5], fifth)):
            low, high = (found.low, found.high) if hasattr(found, "low") else found[1:]
            np.testing.assert_allclose([low, high], np.nanquantile(values, [0.025, 0.975]))

    def test_one_text_has_no_interval(self):
        reach = reach_of("output", synthetic(1), exact=True, noise=FLOAT32)
        assert math.isnan(reach.decay.rate.low) and np.isnan(reach.norm[:, 1:]).all()
        assert not math.isnan(reach.decay.rate.value) and not np.isnan(reach.norm[:, 0]).any()

    def test_noise_ends_the_range_and_counts_as_noise(self):
        """Underflow: in float32 the norms of a fast decay are 0 from some distance on."""
        length = 80
        with np.errstate(under="ignore"):
            row = np.exp(-2.0 * np.arange(length))[::-1].astype(np.float32).astype(np.float64)
        blocks = [Blocks(np.array([length - 1]), row[None] * scale, 0 * row[None]) for scale in (1.0, 1e3)]
        reach = reach_of("output", blocks, exact=True, noise=FLOAT32)
        limit = math.floor(-math.log(FLOAT32) / 2)
        assert reach.decay.ended == "noise" and reach.decay.last == limit < length - 1
        assert reach.decay.rate.value == pytest.approx(2, rel=1e-5)
        assert (reach.noisy[: limit + 1] == 0).all() and (reach.noisy[limit + 1 :] == 1).all()
        np.testing.assert_allclose(reach.log_norm[limit + 1 :, 0], math.log(FLOAT32) + math.log(1e3) / 2)
        assert reach.context.tolist() == [[1, 2, 2]] * 2  # 1 − e^{−2k}: .865, .982
        # What underflows are the numbers themselves, however small the largest is.
        tiny = [Blocks(np.array([length - 1]), row[None] * 1e-5, 0 * row[None])]
        lower = reach_of("output", tiny, exact=True, noise=FLOAT32)
        assert lower.decay.last == math.floor(math.log(1e-5 / FLOAT32) / 2) < limit

    def test_a_distance_with_few_noisy_norms_is_kept(self):
        row = np.exp(-0.1 * np.arange(30.0))[::-1]
        blocks = [Blocks(np.array([29]), row[None].copy(), 0 * row[None]) for _ in range(40)]
        for text in (0, 1):
            blocks[text].norm[0, 10] = 0.0  # at distance 19, of 2 in 40
        kept = reach_of("output", blocks, exact=True, noise=FLOAT32)
        assert kept.decay.last == 29 and kept.noisy[19] == 0.05
        blocks[2].norm[0, 10] = 0.0
        ended = reach_of("output", blocks, exact=True, noise=FLOAT32)
        assert (ended.decay.last, ended.decay.ended) == (18, "noise")

    @pytest.mark.parametrize("norm", [0.1, 0.3, 0.7, 1 / 3])
    def test_a_share_that_is_just_held_is_held(self, norm):
        """k of n equal norms hold k / n, however their sum is rounded."""
        for n in (6, 8, 10, 20, 40, 100):
            row = np.full((1, n), norm)
            found = reach_of("output", [Blocks(np.array([n - 1]), row, 0 * row)], exact=True, noise=FLOAT32)
            assert found.held.tolist() == [[math.ceil(n / 2), -(-9 * n // 10), -(-19 * n // 20)]]

    def test_what_is_too_short_or_without_influence(self):
        short = reach_of(
            "output", [Blocks(np.array([2]), np.ones((1, 3)), np.zeros((1, 3)))], exact=True, noise=FLOAT32
        )
        assert not short.decay.defined and np.isnan(short.context).all() and short.held.tolist() == [[2, 3, 3]]
        vanishing = np.array([[0.0, 0.0, 0.0, 1.0]])
        fast = reach_of("output", [Blocks(np.array([3]), vanishing, 0 * vanishing)], exact=True, noise=FLOAT32)
        assert not fast.decay.defined and fast.context.tolist() == [[1, 1, 1]]
        blocks = [*synthetic(2), Blocks(np.array([4]), np.zeros((1, 5)), np.zeros((1, 5)))]
        dead = reach_of("output", blocks, exact=True, noise=FLOAT32)
        alive = reach_of("output", blocks[:2], exact=True, noise=FLOAT32)
        assert np.isnan(dead.context[2]).all() and dead.decay.rate.value == pytest.approx(alive.decay.rate.value)
        np.testing.assert_allclose(dead.log_norm[:, 0], alive.log_norm[:, 0])
        np.testing.assert_allclose(dead.within[:, 0], alive.within[:, 0])
        assert dead.effective_context(0.5) == alive.effective_context(0.5) and dead.norm[2, 0] < alive.norm[2, 0]

    def test_quantiles_are_of_single_texts(self):
        context = np.array([[5, 5, math.inf], [2, math.inf, math.inf], [9, 8, math.nan], [3, 4, math.inf]])
        reach = reach_of("output", synthetic(), exact=True, noise=FLOAT32)
        reach = dataclasses.replace(reach, context=context, held=context[::-1] - 1)
        assert [reach.effective_context(0.5, quantile) for quantile in (0, 0.25, 0.5, 0.75, 1)] == [2, 2, 3, 5, 9]
        assert [reach.effective_context(0.9, quantile) for quantile in (0.25, 0.5, 0.75, 1)] == [4, 5, 8, math.inf]
        assert reach.effective_context(0.95) == math.inf and reach.effective_context(0.5, within=True) == 2
        assert [reach.not_reached(share) for share in SHARES] == [0, 1, 3]
