"""Stability of layers made by hand, a step at a time: gains, norms, limits and their consequences."""

import dataclasses
import functools
import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from examples import EXAMPLES, random_example
from handmade import HEADS, STATE, drawn_layer, steps_of
from loud import loud
from ssmscope import ops
from ssmscope.core.mixers import mixers
from ssmscope.core.model import Model
from ssmscope.core.trace import LayerTrace
from ssmscope.errors import InputError
from ssmscope.layers.delta import DeltaMixer
from ssmscope.layers.linear_layers import GatedLinearAttention, Retention
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.probes.stability import measure
from ssmscope.zoo.selective import SelectiveSSMConfig

MASK = [[1, 1, 0], [1, 1, 1]]


def gains_of(recurrence: ops.Recurrence, text: int, t: int) -> tuple[torch.Tensor, ...]:
    """The log-decays of a step (heads, states), the largest log-gain of each head (heads,) and, of a delta rule, the
    rest of the transition."""
    if not isinstance(recurrence, ops.DeltaRecurrence):
        log_a = recurrence.log_decay(t, t + 1)[text, 0]
        return log_a, log_a.amax(-1)
    b = recurrence.by_head()[0][text, t]
    kept = torch.eye(STATE) - recurrence.beta[text, t, :, None, None] * b[:, :, None] * b[:, None, :]
    log_a = recurrence.log_a[text, t, :, 0]
    return log_a.unsqueeze(-1), log_a + torch.linalg.svdvals(kept)[:, 0].log(), kept


def together(recurrence: ops.Recurrence, steps: list[tuple[int, int]]) -> torch.Tensor:
    """The log-gains of several steps (heads, states): of a delta rule that of its fastest direction."""
    log_a, _, *kept = zip(*(gains_of(recurrence, *at) for at in steps))
    found = torch.stack(log_a).sum(0)
    return found + torch.linalg.svdvals(functools.reduce(torch.matmul, kept[0]))[:, :1].log() if kept else found


@pytest.mark.parametrize("kind", ["A", "expected", "log_a", "delta rule"])
@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("pieces", [1, 3])
def test_gains_are_those_of_single_steps(monkeypatch, kind, mask, pieces):
    monkeypatch.setattr(measure, "MAX_DECAYS", 2 * HEADS * STATE * pieces)
    layer = drawn_layer(1, mask, turn=[[1, 0, 0], [0, 1, 1]], kind=kind)
    for place in (0, 1):
        counted, stepping = measure.step_masks(layer, place)
        found = measure.step_gains(layer.recurrences[place], counted, stepping)
        every = [(text, t) for _, text, t in steps_of([dataclasses.replace(layer, turn=None)], place)]
        of_texts = [[at for at in every if at[0] == text] for text in (0, 1)]
        sums = [together(layer.recurrences[place], own) for own in of_texts]
        torch.testing.assert_close(found.sums, sum(sums), check_dtype=False)
        largest = [gains_of(r, text, t)[1] for r, text, t in steps_of([layer], place)]
        torch.testing.assert_close(found.largest, torch.stack(largest).amax(0), check_dtype=False)
        for text in (0, 1):
            mean = sums[text] / len(of_texts[text])
            assert found.growth[text].item() == pytest.approx(mean.max().item(), rel=1e-6)


def test_a_state_that_can_grow_or_stay_gains_most_in_its_longest_step():
    layer = drawn_layer(2, MASK)
    A = torch.tensor([[-0.5, 0.4], [0.0, -1.0], [-0.3, -0.2], [0.7, 0.1]]).double().repeat_interleave(2, 1)
    recurrence = dataclasses.replace(layer.recurrence, A=torch.cat([A, A[:, :1]], 1))
    counted, stepping = measure.step_masks(layer, 0)
    found = measure.step_gains(recurrence, counted, stepping)
    delta = recurrence.delta[counted]
    expected = [0.4 * delta[:, 0].max(), 0.0, -0.2 * delta[:, 2].min(), 0.7 * delta[:, 3].max()]
    assert found.largest.tolist() == pytest.approx([float(each) for each in expected])
    assert measure.step_gains(recurrence, counted, ~counted & counted).largest.tolist() == [-math.inf] * 4


@pytest.mark.parametrize("states", [1, 2])
def test_a_delta_rule_with_a_decay_per_state_has_no_known_gain(states):
    torch.manual_seed(0)
    terms = [torch.rand(1, 3, 1, size) for size in (4, 2, 2)]
    log_a = -torch.rand(1, 3, 1, states)
    recurrence = ops.DeltaRecurrence(*terms, log_a=log_a, beta=torch.rand(1, 3, 1))
    every = torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(InputError, match="not known for a delta rule") if states > 1 else nullcontext():
        found = measure.step_gains(recurrence, every, every)
        assert (recurrence.beta * recurrence.b[:, :, 0].square().sum(-1) < 2).all()  # the other direction is kept whole
        assert found.sums.shape == (1, 1) and found.largest.item() == pytest.approx(log_a.max().item())


@pytest.mark.parametrize("rwkv", [False, True])
@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("turn", [None, [[1, 0, 1], [1, 1, 0]]])
def test_steps_that_count(rwkv, initial, mask, turn):
    """All tokens but an RWKV's first of an empty memory; a recurrence's own are those of its turn."""
    layer = drawn_layer(3, mask, turn=turn)
    layer = dataclasses.replace(layer, extras={"log_weight": torch.zeros(1)} if rwkv else {"other": torch.zeros(1)})
    layer = dataclasses.replace(layer, initial=(torch.zeros(1),) if initial else None)
    expected = torch.tensor(mask or [[1, 1, 1]] * 2, dtype=torch.bool)
    expected[:, 0] &= not rwkv or initial
    for place in range(len(layer.recurrences)):
        counted, stepping = measure.step_masks(layer, place)
        assert counted.tolist() == expected.tolist()
        own = expected if turn is None else expected & (torch.tensor(turn) == place)
        assert stepping.tolist() == own.tolist()
    assert mask is None or layer.mask.tolist() == torch.tensor(mask, dtype=torch.bool).tolist()


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("positions", [[0, 1, 2], [1], [0, 2, 3, 9], [4, 7]])
def test_norms_are_those_of_all_states_together(initial, positions):
    layer = drawn_layer(4, MASK, turn=[[1, 0, 0], [0, 1, 1]])
    random = torch.Generator().manual_seed(5)
    shape = ops.scan_reference(layer.recurrences[0]).state.shape
    starts = tuple(torch.randn(shape, generator=random, dtype=torch.float64) for _ in layer.recurrences)
    layer = dataclasses.replace(layer, initial=starts if initial else None)
    found = measure.state_norms(layer, positions)
    assert found.shape == (2, len(positions))
    for place, at in enumerate(positions):
        for text in (0, 1):
            if at >= len(MASK[0]) or not MASK[text][at]:
                assert found[text, place].isnan()
                continue
            square = 0.0
            for recurrence, start in zip(layer.recurrences, starts):
                state = ops.scan_reference(recurrence.between(0, at + 1), start if initial else None).state[text]
                square += state.square().sum().item()
            assert found[text, place].item() == pytest.approx(math.sqrt(square), rel=1e-6)


def test_norms_of_states_that_overflow_are_infinite():
    layer = drawn_layer(6, None)
    layer.recurrence.x[1, 1] = math.nan
    found = measure.state_norms(layer, [0, 1, 2])
    assert found[0].isfinite().all() and found[1, 0].isfinite() and (found[1, 1:] == math.inf).all()


@pytest.mark.parametrize("bad", [0, 1])
def test_one_sum_of_one_recurrence_that_is_no_number(monkeypatch, bad):
    own, calls = measure.step_gains, []

    def gains(*given):
        found = own(*given)
        if len(calls) == 2 + bad:  # of the second layer
            found.sums[1, -1] = math.nan
        calls.append(given)
        return found

    monkeypatch.setattr(measure, "step_gains", gains)
    model = Model(random_example("gfssm"), None, "gfssm")
    with pytest.raises(InputError, match="the decays of layer 1 are not finite; the model is damaged"):
        measure.record_layers(model, model.encode(ids=[5, 9, 3]), [2])


def limits(mixer, layer: LayerTrace, norms=None, place: int = 0) -> measure.Recorded:
    return measure.recorded_limits(mixer, layer, layer.recurrences[place], norms)


def clamped(low: float, high: float):
    return SimpleNamespace(time_step_limit=(low, high))


class TestLimits:
    A = torch.tensor([[-3.0, -0.5], [0.25, -1.0], [0.0, -2.0], [-1.5, -4.0]])

    def layer(self, expected: bool = False) -> LayerTrace:
        layer = drawn_layer(7, None, kind="expected" if expected else "A")
        A = torch.cat([self.A, self.A, self.A[:, 1:]], 1).double()
        return dataclasses.replace(layer, recurrences=(dataclasses.replace(layer.recurrence, A=A),))

    def test_of_clamped_steps(self):
        found = limits(clamped(0.5, 4.0), self.layer())
        assert found.abscissa.tolist() == [-0.5, 0.25, 0.0, -1.5]
        assert found.possible.tolist() == [-0.25, 1.0, 0.0, -0.75]
        assert found.bounded_by == "steps Δ from 0.5 to 4" and not found.mixes and found.bare is None

    def test_of_expected_decays(self):
        found = limits(clamped(0.5, 4.0), self.layer(expected=True))
        expected = [-math.log(1.25), 1.0, 0.0, -math.log(1.75)]
        assert found.possible.tolist() == pytest.approx(expected)

    def test_of_steps_of_any_size(self):
        found = limits(SimpleNamespace(), self.layer())
        assert found.possible.tolist() == [0.0, math.inf, 0.0, 0.0] and not found.possible[:1].signbit().any()
        assert found.bounded_by == "steps Δ of any size"

    @pytest.mark.parametrize(("low", "high", "how"), [
        (0, 1e6, "steps Δ from 0 to 1e+06"),
        (0, 1.5e6, "steps Δ of any size"),
        (0.125, 3e6, "steps Δ from 0.125 to 3e+06"),
    ])  # fmt: skip
    def test_how_steps_are_bounded(self, low, high, how):
        assert limits(clamped(low, high), self.layer()).bounded_by == how

    def test_of_a_model_that_the_theorem_covers(self):
        norms = SimpleNamespace(delta_min=2.0, M_delta=8.0)
        found = limits(clamped(0.5, 4.0), self.layer(), norms)
        assert found.possible.tolist() == [-1.0, 2.0, 0.0, -3.0]
        assert found.bounded_by == "ρ of the generalisation bound"

    @pytest.mark.parametrize("kind", [GatedLinearAttention, DeltaMixer])
    def test_of_gates(self, kind):
        for rule in ("log_a", "delta rule"):
            found = limits(kind.__new__(kind), drawn_layer(8, None, kind=rule))
            assert found.abscissa is None and found.possible.tolist() == [0.0] * HEADS and found.bare is None
            assert found.bounded_by == "gates are at most 1" and found.mixes == (rule == "delta rule")

    def test_of_constant_decays(self):
        log_a = -torch.tensor([[0.5, 0.75], [2.0, 0.125], [1.0, 1.5], [3.0, 2.5]]).repeat(1, 3)[:, :STATE]
        layer = drawn_layer(9, None, kind="log_a")
        recurrence = dataclasses.replace(layer.recurrence, log_a=log_a.expand(2, 3, HEADS, STATE))
        found = measure.recorded_limits(Retention.__new__(Retention), layer, recurrence, None)
        assert found.possible.tolist() == [-0.5, -0.125, -1.0, -2.5] and found.bounded_by == "decays are constant"

    def test_of_an_rwkv_and_of_others(self):
        layer = drawn_layer(10, None, kind="log_a")
        decay = torch.tensor([0.5, 0.25])
        rwkv = dataclasses.replace(layer, extras={"log_weight": torch.zeros(1), "decay": decay})
        found = limits(mixers(random_example("rwkv"))[0], rwkv)
        assert found.bare.tolist() == [0.5, 0.25] and found.bounded_by == "gates are at most 1" and not found.mixes
        # The gated delta rule, whose transitions at every token are at most 1.
        for name in EXAMPLES.keys() & {"qwen3_next", "kimi_linear", "olmo_hybrid-negative-eigenvalues"}:
            model = Model(loud(random_example(name)))
            layer_of = model.trace(ids=[[3, 9, 4, 1, 7, 5]]).layers[0]
            found, (rule,) = limits(model.mixers[0], layer_of), layer_of.recurrences
            key = rule.b.repeat_interleave(rule.shape[2] // rule.b.shape[2], dim=2)
            step = rule.beta[..., None, None] * key.unsqueeze(-1) * key.unsqueeze(-2)
            kept = rule.log_a.exp().unsqueeze(-1) * (torch.eye(step.shape[-1]) - step)
            assert found.possible.tolist() == [0.0] * rule.shape[2] and found.mixes
            assert torch.linalg.matrix_norm(kept, 2).max() <= 1 + 1e-5
        found = limits(mixers(random_example("rwkv7"))[0], layer)
        assert (found.abscissa, found.possible, found.bounded_by) == (None, None, "no bound is known")

    def test_where_a_mixer_keeps_its_limits(self):
        one = clamped(0.25, 3)
        for mixer in (one, SimpleNamespace(m1=one), SimpleNamespace(sizes=one), SimpleNamespace(m1=None, sizes=one)):
            assert measure.step_limits(mixer) == (0.25, 3.0)
        assert measure.step_limits(SimpleNamespace(m2=one)) == (0.0, math.inf)


def recorded(half: list[list[float]], steps: int = 10, **changed) -> measure.Recorded:
    """Means from half-lives (heads, states)."""
    sums = torch.tensor(-steps * math.log(2) / np.array(half))
    values = dict(largest=torch.tensor([-0.2, -0.1]), growth=[-0.25, -0.5], bounded_by="so")
    return measure.Recorded(**{**dict(abscissa=None, possible=None, sums=sums, steps=steps), **values, **changed})


def judged(found: measure.Recorded, longest: int = 8, overflows: bool = False):
    return measure.layer_stability(3, 1, 2, found, longest, 1e-6, 0, overflows)


def test_a_layer_is_what_its_half_lives_say():
    found = judged(recorded([[1.0, 8.0, 2.0], [5.0, 4.0, 3.0]]))
    assert (found.layer, found.part, found.parts, found.states, found.heads) == (3, 1, 2, 3, 2)
    assert found.never == 0 and found.behaviour == "stable" and found.half_life.tolist() == pytest.approx([2, 4])
    assert found.quantiles == pytest.approx((1, 2, 3, 5, 8))
    assert found.mean.tolist() == pytest.approx([-math.log(2) / 8, -math.log(2) / 5])
    assert found.growth.value == -0.375 and found.largest.tolist() == pytest.approx([-0.2, -0.1])
    assert found.abscissa is None and found.possible is None and found.bounded_by == "so"
    longer = judged(recorded([[1.0, 8.5, 2.0], [math.inf, 4.0, 3.0]]))
    assert longer.never == 2 and longer.behaviour == "marginal" and longer.why.startswith("2 of 6 states")
    assert judged(recorded([[1.0, 2.0]]), overflows=True).behaviour == "unstable"
    known = judged(recorded([[1.0], [2.0]], possible=torch.tensor([0.0, 0.5]), abscissa=torch.tensor([0.0, 2.0])))
    assert known.behaviour == "unstable" and known.possible.tolist() == [0.0, 0.5] and known.abscissa.tolist() == [0, 2]


def test_records_add_up():
    one = measure.Recorded(None, None, "so")
    first = measure.StepGains(torch.tensor([[1.0], [2.0]]), torch.tensor([-0.5, -3.0]), torch.tensor([-0.25, -0.75]))
    second = measure.StepGains(torch.tensor([[4.0], [8.0]]), torch.tensor([-1.0, -2.0]), torch.tensor([-0.125]))
    one.add(first, torch.tensor([[True, False], [True, True]]))
    one.add(second, torch.tensor([[True, True]]))
    assert one.sums.tolist() == [[5.0], [10.0]] and one.largest.tolist() == [-0.5, -2.0]
    assert one.steps == 5 and one.growth == [-0.25, -0.75, -0.125]


def test_notes_name_quantiles_of_bare_weights():
    lives = [2.0, 4.0, 8.0, 16.0]
    bare = measure.Recorded(
        None, None, "so", bare=torch.tensor([0.5 ** (1 / life) for life in lives], dtype=torch.float64)
    )
    (said,) = measure.notes_on([bare])
    assert said.endswith("half-lives of 4 tokens (median; 5 % to 95 %: 2 to 16)")


@pytest.mark.parametrize(("log_gain", "said"), [
    (19.5, "2.943e+08"), (20.0, "e^20"), (20.5, "e^20.5"), (0.0006, "1.001"), (0.0004, "e^0.0004"),
    (1000.0, "e^1e+03"),
])  # fmt: skip
def test_limits_of_gains_in_words(log_gain, said):
    assert measure._gain(log_gain) == said


def test_means_over_texts_have_intervals_from_two_on():
    nan = math.nan
    columns = np.array([[1.0, nan, 3.0, math.inf, nan], [2.0, 7.0, 5.0, 4.0, 8.0], [6.0, nan, 8.0, 2.0, 5.0]])
    found = measure.means_of(columns, seed=0)
    assert found[[0, 1, 2, 4], 0].tolist() == pytest.approx([3, 7, 16 / 3, 6.5]) and np.isinf(found[3]).all()
    assert np.isnan(found[1, 1:]).all() and (found[[0, 2, 4], 1] < found[[0, 2, 4], 0]).all()
    single = measure.means_of(columns[:1, :3], seed=0)
    assert single[:, 0].tolist() == pytest.approx([1, math.nan, 3], nan_ok=True) and np.isnan(single[:, 1:]).all()


def test_random_pixels_and_tokens():
    random = np.random.default_rng(0)
    backbone = SelectiveSSMConfig(vocab_size=1, hidden_size=4, state_size=2)
    config = SSMClassifierConfig(backbone, channels=3, image_size=(2, 4), num_labels=2)
    pixels = Model(SSMForSequenceClassification(config).eval(), None, "pixels")
    assert measure.random_batch(pixels, 5, 2, random).values.shape == (5, 1, 3)
    with pytest.raises(InputError, match="length is 1; allowed is a whole number from 2 on: the last is the class"):
        measure.random_batch(pixels, 5, 1, random)
    every, encode = set(range(97)), Model(random_example("mamba"), None, "mamba").encode
    for special, drawn in (({0, 3}, every - {0, 3}), (every, every), (set(), every)):
        tokenizer = SimpleNamespace(all_special_ids=sorted(special))
        fake = SimpleNamespace(channels=None, tokenizer=tokenizer, vocabulary=97, encode=encode)
        assert set(measure.random_batch(fake, 5, 400, random).input_ids.flatten().tolist()) == drawn
