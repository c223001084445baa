"""Stability: every architecture against a slow reference, closed forms, and verdicts."""

import json
import math

import numpy as np
import pytest
import torch
from examples import HALVES, TEXTS, random_example
from loud import loud
from refusals import refuses
from torch import nn
from torch.nn.functional import softplus
import ssmscope
from ssmscope import ops
from ssmscope.api.results import Result
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.probes.bound import generalization_bound
from ssmscope.probes.stability import stability
from ssmscope.probes.stability.measure import DEFAULT_LENGTH, behaviour_of, inputs_of, step_gains
from ssmscope.probes.stability.result import QUANTILES
from ssmscope.zoo.selective import SelectiveSSMConfig, SelectiveSSMForSequenceClassification

LN2 = math.log(2)


def example(name: str) -> Model:
    return Model(loud(random_example(name)), None, name)


def transition(recurrence: ops.Recurrence, t: int) -> torch.Tensor:
    """The transition of step t of one text: a delta rule's (heads, state, state), else its diagonal (heads, states)."""
    if not isinstance(recurrence, ops.DeltaRecurrence):
        return recurrence.log_decay(t, t + 1)[0, 0].double().exp()
    b = recurrence.by_head()[0][0, t].double()
    beta, a = recurrence.beta[0, t].double(), recurrence.log_a[0, t, :, 0].double().exp()
    return a[:, None, None] * (torch.eye(b.shape[-1]) - beta[:, None, None] * b[:, :, None] * b[:, None, :])


def log_gains(recurrence: ops.Recurrence, steps: list[int]) -> torch.Tensor:
    """The log-gains of some steps together, (heads, states); of a delta rule (heads, 1), of its fastest direction."""
    each = [transition(recurrence, t) for t in steps]
    if not isinstance(recurrence, ops.DeltaRecurrence):
        return torch.stack(each).log().sum(0)
    product = torch.eye(recurrence.shape[-1]).double()
    for one in each:
        product = product @ one
    return torch.linalg.svdvals(product)[:, :1].log()


def reference(model: Model, row: list[int], positions: list[int]) -> list[list[dict]]:
    """Measure one text, a step at a time."""
    found = []
    for layer in model.trace(ids=row).layers:
        parts = []
        starts = layer.initial or (None,) * len(layer.recurrences)
        for place, recurrence in enumerate(layer.recurrences):
            if recurrence.joins:
                continue
            same = [at for at, other in enumerate(layer.recurrences) if at == place or at > place and other.joins]
            steps = [t for t in range(len(row)) if t > 0 or "log_weight" not in layer.extras]
            own = [t for t in steps if layer.turn is None or layer.turn[0, t] == place]
            squares = []
            for at in [at for at in positions if at < len(row)]:
                states = [ops.scan_reference(layer.recurrences[n].between(0, at + 1), starts[n]).state for n in same]
                squares.append(torch.stack(states).sum(0).double().square().sum().item())
            parts.append(
                {
                    "sums": log_gains(recurrence, steps),
                    "steps": len(steps),
                    "largest": torch.stack([log_gains(recurrence, [t]).amax(-1) for t in own]).amax(0),
                    "squares": squares,
                }
            )
        found.append(parts)
    return found


@pytest.mark.parametrize("name", HALVES[0])
def test_against_a_slow_reference(name):
    """Texts of different lengths at once: padding counts for nothing."""
    model, positions = example(name), [0, 2, 5, 9]
    found = stability(model, model.encode(ids=TEXTS), positions=positions)
    each = [reference(model, row, positions) for row in TEXTS]
    assert found.given and found.longest == 11 and found.inputs == "3 texts of 3 to 11 tokens"
    assert found.numbers == model.layer_numbers and len(found) == sum(len(parts) for parts in each[0])
    for one in found.layers:
        place = found.numbers.index(one.layer)
        parts = [of_text[place][one.part] for of_text in each]
        mean = (sum(p["sums"] for p in parts) / sum(p["steps"] for p in parts)).numpy()
        half = np.sort(np.where(mean < 0, LN2 / np.maximum(-mean, 1e-300), np.inf).ravel())
        assert (one.heads, one.states) == mean.shape and one.parts == len(each[0][place])
        expected = [half[max(math.ceil(q * len(half)) - 1, 0)] for q in QUANTILES]
        assert one.quantiles == pytest.approx(expected, rel=1e-4) and one.never == (half > 11).sum()
        np.testing.assert_allclose(one.mean, mean.max(1), rtol=1e-4)
        largest = torch.stack([p["largest"] for p in parts]).amax(0).numpy()
        np.testing.assert_allclose(one.largest, largest, rtol=1e-4, atol=1e-7)
        growth = np.mean([(p["sums"] / p["steps"]).max().item() for p in parts])
        assert one.growth.value == pytest.approx(growth, rel=1e-4)
        assert one.growth.low <= one.growth.value <= one.growth.high
        if one.possible is not None:
            assert (one.largest <= one.possible + 1e-9).all()
    for layer in range(len(found.numbers)):
        for at in range(len(positions)):
            sizes = [of_text[layer] for of_text in each if len(of_text[layer][0]["squares"]) > at]
            norms = [math.sqrt(sum(part["squares"][at] for part in parts)) for parts in sizes]
            assert found.norms[layer, at, 0] == pytest.approx(np.mean(norms), rel=1e-4)
            assert math.isnan(found.norms[layer, at, 1]) == (len(norms) == 1)
    assert not any("forward" in vars(mixer) for mixer in model.mixers)


def test_long_texts_are_worked_in_pieces(monkeypatch):
    """Pieces of decays, and batches of texts, change nothing."""
    model = example("baleen-e-mamba")
    batch = model.encode(ids=TEXTS)
    whole = stability(model, batch, positions=[2, 7])
    monkeypatch.setattr("ssmscope.probes.stability.measure.MAX_DECAYS", 3 * 48 * 5 * 2)
    monkeypatch.setattr("ssmscope.core.batching.TOKENS_AT_ONCE", 8)
    pieces = stability(model, batch, positions=[2, 7])
    for a, b in zip(whole.layers, pieces.layers):
        assert a.quantiles == pytest.approx(b.quantiles, rel=1e-5) and a.growth.value == pytest.approx(b.growth.value)
        np.testing.assert_allclose(a.largest, b.largest, rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(whole.norms, pieces.norms, rtol=1e-5)


def selective(A, p: float = 0.3, seed: int = 0, channels: int | None = None) -> Model:
    """A selective SSM of constant steps softplus(p) with this table A (channels, state)."""
    A = torch.tensor(A)
    torch.manual_seed(seed)
    config = SelectiveSSMConfig(vocab_size=9, hidden_size=A.shape[0], state_size=A.shape[1])
    module = SelectiveSSMForSequenceClassification(config)
    with torch.no_grad():
        module.ssm.A.copy_(A)
        module.ssm.q_delta.zero_()
        module.ssm.p_delta.fill_(p)
    return Model(module, None, "constant")


class TestClosedForms:
    def test_constant_steps(self):
        """Half-lives are ln 2 / (Δ |A|), every gain Δ A, and the norm a geometric sum on one repeated token."""
        A = [[-0.5, -1.0], [-0.01, -3.0], [-0.2, -0.7]]
        model = selective(A)
        step = softplus(torch.tensor(0.3)).double().item()
        (one,) = stability(model, length=50).layers
        half = sorted(LN2 / (step * -a) for row in torch.tensor(A).double().tolist() for a in row)
        assert one.quantiles == pytest.approx((half[0], half[1], half[2], half[4], half[5]), rel=1e-7)
        assert one.half_life.tolist() == pytest.approx([LN2 / step, LN2 / (3 * step), LN2 / (0.7 * step)], rel=1e-6)
        assert one.never == sum(h > 50 for h in half) == 1
        top = torch.tensor([-0.5, -0.01, -0.2]).double() * step
        for found in (one.largest, one.mean, one.possible):
            assert found.tolist() == pytest.approx(top.tolist(), rel=1e-6)
        assert one.growth.value == pytest.approx(-0.01 * step, rel=1e-6)
        assert one.growth.low == pytest.approx(one.growth.high) and one.spectral_abscissa == pytest.approx(-0.01)
        result = stability(model, model.encode(ids=[4] * 20), positions=[0, 7, 19])
        ssm_layer, u = model.module.ssm, model.module.embedding.weight[4].double()
        written = step * torch.outer(u, ssm_layer.W_B.double() @ u)
        gains = torch.exp(step * ssm_layer.A.double())
        for place, at in enumerate((0, 7, 19)):
            H = written * (1 - gains ** (at + 1)) / (1 - gains)
            assert result.norms[0, place, 0] == pytest.approx(H.norm().item(), rel=1e-5)

    def test_a_text_shorter_than_the_groups(self):
        """A group whose turn does not come makes no step."""
        model = example("gfssm-three-groups")
        found = stability(model, model.encode(ids=[5, 9]))
        assert found[2].largest_gain == -math.inf and math.isfinite(found[1].largest_gain)
        assert found[2].never == found[2].heads * found[2].states
        assert "−∞" in str(found) and Result.from_dict(json.loads(found.to_json())) == found

    def test_the_worst_case_of_a_selective_ssm_is_the_bounds(self):
        for A in ([[-0.4, -1.0]], [[0.3, -1.0]]):
            model = selective(A)
            nn.init.normal_(model.module.ssm.q_delta)
            bound = generalization_bound(model, length=10, examples=10)
            assert stability(model, length=10)[0].possible_gain == pytest.approx(bound.norms.log_rho, rel=1e-9)

    @pytest.mark.parametrize("name", ["diff-mamba", "diff-s6"])
    def test_differential_layers_with_clamped_steps(self, name):
        model = example(name)
        for mixer in model.mixers:
            for part in (mixer.m1, mixer.m2) if name == "diff-mamba" else (mixer.sizes,):
                part.time_step_limit = (0.3, 1.5)
        found = stability(model, length=20)
        assert len(found) == 4
        for one in found.layers:
            assert one.bounded_by == "steps Δ from 0.3 to 1.5" and (one.largest <= one.possible + 1e-6).all()
            assert one.possible.tolist() == pytest.approx((0.3 * one.abscissa).tolist())

    def test_delta_rules(self):
        """Keys longer than 1 can make a state grow; what a text erases whole counts as e^−80."""
        b = torch.zeros(1, 3, 1, 2)
        b[0, :, 0, 0] = torch.tensor([1.0, 2.0, 0.0])
        terms = dict(x=torch.zeros(1, 3, 1, 1), c=b, log_a=torch.full((1, 3, 1, 1), -0.1))
        recurrence = ops.DeltaRecurrence(b=b, beta=torch.ones(1, 3, 1), **terms)
        counted = torch.ones(1, 3, dtype=torch.bool)
        gains = step_gains(recurrence, counted, counted)
        assert gains.largest.item() == pytest.approx(-0.1 + math.log(3))  # |1 − 1 · 4|
        assert gains.sums.item() == pytest.approx(-0.3, rel=1e-6)  # of the direction that no key touches
        alone = ops.DeltaRecurrence(b=b[..., :1], beta=torch.ones(1, 3, 1), **{n: t[..., :1] for n, t in terms.items()})
        assert step_gains(alone, counted, counted).sums.item() == pytest.approx(-0.3 - 80, rel=1e-6)
        one_state = {name: term[..., :1] for name, term in terms.items()}
        narrow = ops.DeltaRecurrence(b=b[..., :1] * 0.5, beta=torch.ones(1, 3, 1), **one_state)
        first = torch.tensor([[True, False, False]])
        assert step_gains(narrow, counted, first).largest.item() == pytest.approx(-0.1 + math.log(0.75))

    def test_rwkvs_first_token_does_not_count(self):
        found = stability(example("rwkv"), length=30)
        assert all(one.growth.value > -1e3 for one in found.layers)
        w = torch.cat([m.attention.time_decay.detach().double().exp() for m in example("rwkv").mixers])
        middle = torch.sort(LN2 / w).values[len(w) // 2 - 1].item()
        assert f"half-lives of {middle:.3g} tokens (median" in found.notes[0]


class TestBehaviour:
    def test_states_that_overflow(self):
        found = stability(selective([[1.0, -1.0]], p=1.0), length=100)
        assert found.behaviour == "unstable" and np.isinf(found.norms[0, -1, 0]) and np.isfinite(found.norms[0, 0, 0])
        assert "∞" in str(found) and Result.from_dict(json.loads(found.to_json())) == found
        found.figure()

    def test_states_that_are_written_too_large(self):
        model = selective([[-0.5, -1.0], [-0.5, -1.0]])
        with torch.no_grad():
            model.module.embedding.weight.fill_(1e25)
        found = stability(model, length=10)
        assert found[0].largest_gain < 0 and found.behaviour == "unstable"
        assert found[0].why == "its states overflow on the inputs"
        with torch.no_grad():
            model.module.embedding.weight[:8] = 0.1
        found = stability(model, model.encode(ids=[[1, 2, 8, 3], [4, 5]]), positions=4)
        assert np.isinf(found.norms[0, 2:, 0]).all() and np.isfinite(found.norms[0, :2, 0]).all()
        assert found[0].why == "its states overflow on the inputs"
        alone = stability(model, model.encode(ids=[[1, 2, 3], [4, 5]]))
        assert alone.behaviour == "stable"

    def test_the_model_is_what_its_worst_layer_is(self):
        model = example("mamba2")
        with torch.no_grad():
            model.mixers[1].A_log[2] = -12.0
        found = stability(model, length=40)
        assert [one.behaviour for one in found.layers] == ["stable", "marginal"] and found.behaviour == "marginal"
        assert found.headline == "Stability of mamba2: marginal in 1 of 2 layers"
        assert found.counts() == {"stable": 1, "marginal": 1, "unstable": 0}
        said = " ".join(found.to_text(full=True).split())
        assert "(1 stable, 1 marginal). The marginal layer, 1: 1 of 6 states keep half" in said
        with torch.no_grad():
            model.mixers[0].A_log[:3] = -12.0
        said = " ".join(stability(model, length=40).to_text(full=True).split())
        assert "The model is marginal in both layers: in layer 0, 3 of 6 states keep half" in said

    def test_damaged(self):
        model = example("mamba2")
        with torch.no_grad():
            model.mixers[1].in_proj.weight.fill_(math.nan)
        refuses("the decays of layer 1 are not finite", stability, model, length=5)
        assert not any("forward" in vars(mixer) for mixer in model.mixers)


class TestInputs:
    def test_random_tokens(self):
        model = example("mamba")
        found = inputs_of(model, None, length=30, sequences=3, seed=5)
        assert found.batch.input_ids.shape == (3, 30) and found.name == "3 random sequences of 30 tokens (seed 5)"
        assert found.batch.input_ids.unique().numel() > 50 and found.batch.input_ids.max() < 97
        assert inputs_of(model, None, length=None, sequences=1, seed=0).longest == DEFAULT_LENGTH
        one, same = (stability(model, length=30, seed=5) for _ in range(2))
        assert one.norms.tolist() == same.norms.tolist() and not one.given
        assert one.norms.tolist() != stability(model, length=30, seed=6).norms.tolist()

    def test_texts(self):
        model = ssmscope.load("demo/sst2-mamba2")
        text = "A gripping, beautifully acted film."
        found = stability(model, text)
        assert found.texts == 1 and found.given and found.inputs == f"1 text of {found.longest} tokens"
        assert math.isnan(found[0].growth.low) and np.isnan(found.norms[:, :, 1:]).all()
        batch = model.encode([text, "Dull."])
        assert isinstance(batch, Batch)
        np.testing.assert_array_equal(stability(model, batch).norms, stability(model, [text, "Dull."]).norms)

    def test_positions(self):
        model = example("mamba")
        for asked, expected in (
            (1, [29]), (2, [0, 29]), (4, [0, 10, 19, 29]), ([7, 3, 3], [3, 7]), (99, list(range(30))),
        ):  # fmt: skip
            assert stability(model, length=30, positions=asked).positions.tolist() == expected

    @pytest.mark.parametrize(("options", "says"), [
        (dict(length=1), "length is 1; allowed is a whole number from 2 on"), (dict(length="nine"), "length is 'nine'"),
        (dict(sequences=0), "sequences is 0"), (dict(positions=0), "positions is 0"),
        (dict(positions=[5, 30], length=30), r"positions is \[5, 30\]; allowed are 0 to 29"),
        (dict(tolerance=-0.1), "tolerance is -0.1"), (dict(texts="some words"), "no tokenizer"),
    ])  # fmt: skip
    def test_refuses(self, options, says):
        refuses(says, stability, example("mamba"), **options)

    def test_refuses_texts_that_keep_nothing(self):
        model = example("mamba")
        refuses("text 1 has one token", stability, model, model.encode(ids=[[1, 2], [3]]))
        refuses("both texts and length 9 were given", stability, model, model.encode(ids=[1, 2]), length=9)
        refuses("given without its model", stability, model.trace(ids=[1, 2]))


def test_published_checkpoints(oracle):
    """s_A, and how much the states really grow in a step."""
    found = stability(ssmscope.load(oracle("majority_T25_seed1.pth")), length=100)
    assert found.behaviour == "unstable" and found[0].spectral_abscissa == pytest.approx(0.214152202, abs=1e-8)
    assert found[0].largest_gain == pytest.approx(0.0345, abs=5e-5)
    assert found[0].possible_gain == pytest.approx(0.271, abs=5e-4)
    assert stability(ssmscope.load(oracle("listops_T100_seed3.pth")), length=100).behaviour == "stable"


@pytest.mark.parametrize(("largest", "possible", "growth", "never", "overflows", "said"), [
    ([-0.5, 0.7], [0.9], -1, 3, True, "unstable: a step multiplies a state by 2.014 on the inputs"),
    ([-0.5, -1], [0.2, 0.05], -1, 3, True, "unstable: a step may multiply a state by 1.221"),
    ([-0.5], [-0.1], -1, 3, True, "unstable: its states overflow on the inputs"),
    ([-0.5], None, -1, 3, False, "marginal: 3 of 1,200 states keep half of what they hold beyond the 1,024 tokens"),
    ([-0.5], [-0.1], -0.125, 0, False, "marginal: its slowest state changes by e^-0.12 a token"),
    ([0.125], [0.125], -1, 0, False, "stable: every state forgets half within the 1,024 tokens of the longest te"),
])  # fmt: skip
def test_what_decides_a_layers_behaviour(largest, possible, growth, never, overflows, said):
    """The first that holds, of numbers above a tolerance of 1 / 8."""
    possible = None if possible is None else np.array(possible)
    found = behaviour_of(np.array(largest), possible, growth, never, 1200, 1024, 0.125, overflows)
    assert ": ".join(found).startswith(said)


def test_a_stable_layer_cannot_grow_or_has_not_grown():
    for possible, end in ((np.array([-0.1]), "and none can grow"), (None, "and none grows on the inputs")):
        _, why = behaviour_of(np.array([-0.5]), possible, -1.0, 0, 4, 10, 0.0, False)
        assert why.endswith(end)
