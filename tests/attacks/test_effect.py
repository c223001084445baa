"""Effect of a change inside a model: closed forms on a model that forgets at a known rate, identities on every family,
and views that stay readable and safe. Steps of the effect of a change: aligned tokens of long texts, shares of a row,
and the tolerance of equality."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from drawn import drawn, labels, outside, overlapping
from examples import random_example
from fading import fading
from refusals import refuses
import ssmscope
from ssmscope.attacks.effect import attack_effect
from ssmscope.attacks.effect import measure as module
from ssmscope.attacks.effect.measure import SAME, _shares, aligned, cosine, effect_of, relative
from ssmscope.attacks.effect.result import AttackEffect
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.interp.attention import implicit_attention
from ssmscope.render.token_figure import MAX_BOXES

DECAY = 0.25
WEIGHTS = {"good": 2.0, "bad": -2.0, "film": 0.25, "a": 0.0, "b": 0.5}
STEPS = {"film": 2.0}
TEXT = [5, 17, 3, 9, 22, 1, 4, 60, 61, 62, 5]
FAMILIES = ["mamba", "mamba2", "baleen-e-mamba", "diff-mamba", "gfssm", "groupmamba", "gla", "rwkv", "selective-ssm"]


def random_model(name: str) -> ssmscope.Model:
    return ssmscope.Model(random_example(name).eval(), None, name)


def states(words: list[str]) -> np.ndarray:
    """(tokens, 3): y_t = Σ_s e^(−λ Σ steps after s) · step_s · u_s of u = (1, weight, …), by its recurrence."""
    y, rows = np.zeros(2), []
    for word in words:
        step = STEPS.get(word, 1.0)
        y = math.exp(-DECAY * step) * y + step * np.array([1.0, WEIGHTS.get(word, 0.0)])
        rows.append(y)
    return np.array(rows)


class TestClosedForm:
    """Every word of the model below decays what was read before it by e^(−λ · step)."""

    @pytest.fixture
    def model(self) -> ssmscope.Model:
        model = fading(WEIGHTS, decay=DECAY, steps=STEPS)
        with torch.no_grad():  # the embedding's third number, which sets the step, is left out of what is read
            model.module.head.weight[:, 2] = 0
        return model

    def test_attention_falls_by_what_is_read_since(self, model):
        found = attack_effect(model, clean="good a b", corrupted="good a film film b")
        for side, words in ((found.clean, ["good", "a", "b"]), (found.corrupted, ["good", "a", "film", "film", "b"])):
            steps = np.array([STEPS.get(word, 1.0) for word in [*words, "[CLS]"]])
            behind = steps[::-1].cumsum()[::-1] - steps
            weights = steps * np.exp(-DECAY * behind)
            assert side.attention[0] == pytest.approx(weights / weights.sum(), abs=1e-6) and side.sink.tolist() == [0]
            assert side.text.scores[0] == pytest.approx(np.exp(-DECAY * steps), abs=1e-6)
        assert found.corrupted.changed.tolist() == [False, False, True, True, False, False]
        assert found.corrupted.on_changed[0] == pytest.approx(found.corrupted.attention[0, 2:4].sum())
        assert found.clean.on_changed.tolist() == [0]

    def test_a_difference_dies_out_at_the_models_rate(self, model):
        """One word for another of the same step: the states are ‖Δ‖ e^(−λ k) apart k tokens later."""
        before, after = "b a good a a b a", "b a bad a a b a"
        found = attack_effect(model, clean=before, corrupted=after)
        assert found.pairs.tolist() == [[at, at] for at in (0, 1, 3, 4, 5, 6, 7)]
        first, second = (states([*text.split(), "[CLS]"]) for text in (before, after))
        apart = np.abs(second - first).sum(1)
        assert apart == pytest.approx([0, 0, *(4 * math.exp(-DECAY * k) for k in range(6))])
        read = model.module.ssm(model.module.embedding(model.encode(before).input_ids))[0]  # with the third number
        size = read.detach().norm(dim=1).double().numpy()
        expected = (apart / size)[[0, 1, 3, 4, 5, 6, 7]]
        assert found.distance[-1] == pytest.approx(expected, abs=1e-5)
        assert (found.distance[0] == 0).all()  # what the layer reads are the words themselves
        layer, head = found.spreads
        assert (layer.first, layer.peak, layer.peak_at, layer.last) == (None, 0, None, 0) and math.isnan(layer.remains)
        peak = expected.argmax()
        assert (head.first, head.peak_at) == (3, found.pairs[peak, 1]) and head.peak == pytest.approx(expected[peak])
        assert head.last == pytest.approx(expected[-1]) and head.remains == pytest.approx(expected[-1] / expected[peak])
        assert found.first_changed == 2

    def test_final_states_and_answers(self, model):
        """The final state is y at the last token, and so are the vectors that the head reads."""
        found = attack_effect(model, clean="good a b film", corrupted="bad a")
        first, second = (
            model.trace(text).layers[0].scan()[0].state.flatten().double() for text in ("good a b film", "bad a")
        )
        expected = torch.nn.functional.cosine_similarity(first, second, dim=0).item()
        assert found.state_cosine == pytest.approx([expected]) and abs(expected) < 0.999
        assert found.hidden_cosine == pytest.approx([1, expected])  # [CLS] itself, then y
        old, new = (states([*text.split(), "[CLS]"])[-1, 1] for text in ("good a b film", "bad a"))
        assert (found.clean.text.answer, found.corrupted.text.answer) == ("good", "bad")
        assert found.clean.text.probability == pytest.approx(1 / (1 + math.exp(-old)), abs=1e-6)
        assert found.kept == pytest.approx(1 / (1 + math.exp(-new)), abs=1e-6)
        assert found.kept == pytest.approx(1 - found.corrupted.text.probability, abs=1e-6)


def of_ids(model, before: list[int], after: list[int], **options) -> AttackEffect:
    """The effect of a change of token ids."""
    return effect_of(model, model.encode(ids=[before, after]), **options)


class TestIdentities:
    @pytest.mark.parametrize("name", FAMILIES)
    def test_a_suffix_leaves_everything_before_it(self, name):
        """Nothing looks ahead; and what stands at the end is read, which shows in the head's vectors."""
        found = of_ids(random_model(name), TEXT, [*TEXT, 7, 8, 9])
        assert found.pairs.tolist() == [[at, at] for at in range(len(TEXT))] and found.first_changed == len(TEXT)
        assert found.corrupted.changed.tolist() == [False] * len(TEXT) + [True] * 3
        assert (found.distance == 0).all() and found.summary().retention_change.max() < 1e-6
        assert all(spread.first is None for spread in found.spreads)
        assert (found.state_cosine < 1 - 1e-4).all() and found.hidden_cosine[-1] < 1 - 1e-4
        assert found.corrupted.on_changed.min() > 0.01

    @pytest.mark.parametrize("name", FAMILIES)
    def test_against_the_traces(self, name):
        """Retention by hand, attention from its own analysis, vectors and states of each text alone."""
        model = random_model(name)
        before, after = TEXT, [*TEXT[:3], 40, 41, *TEXT[4:]]
        found = of_ids(model, before, after)
        assert found.layers == tuple(range(model.num_layers)) and found.distance.shape == (model.num_layers + 1, 10)
        assert found.pairs.tolist() == [[at, at + (at > 3)] for at in range(len(TEXT)) if at != 3]
        assert found.clean.changed.nonzero()[0].tolist() == [3] and found.corrupted.changed.nonzero()[0].tolist() == [
            3,
            4,
        ]
        traces = [model.trace(ids=ids) for ids in (before, after)]
        for side, trace in zip((found.clean, found.corrupted), traces):
            maps = implicit_attention(trace, rows="last", heads="abs")[0].maps
            for number, layer in enumerate(trace.layers):
                each = [r.log_decay().exp() for r in layer.recurrences] if name != "rwkv" else []
                if name == "gfssm":  # groups take turns: the one that the token steps
                    each = [
                        torch.stack(each).gather(0, layer.turn[None, :, :, None, None].expand(1, *each[0].shape))[0]
                    ]
                if each:
                    by_hand = torch.stack([a.mean((2, 3)) for a in each]).mean(0)[0]
                    assert side.text.scores[number] == pytest.approx(by_hand.numpy(), abs=1e-5)
                mass = np.abs(maps[number].values[0])
                total = mass.sum() + (0 if maps[number].sink is None else abs(maps[number].sink[0]))
                assert side.attention[number] == pytest.approx(mass / total, abs=1e-5)
                assert side.attention[number].sum() + side.sink[number] == pytest.approx(1, abs=1e-5)
            assert side.text.mean == pytest.approx(side.text.scores.mean(0), abs=1e-6)
        for number in range(model.num_layers):
            first, second = (trace.layers[number] for trace in traces)
            for at, (i, j) in enumerate(found.pairs):
                apart = (second.u[0, j] - first.u[0, i]).norm() / first.u[0, i].norm()
                assert found.distance[number, at] == pytest.approx(apart.item(), abs=1e-4)
            finals = [torch.cat([scan.state.flatten() for scan in layer.scan()]).double() for layer in (first, second)]
            expected = torch.nn.functional.cosine_similarity(*finals, dim=0).item()
            assert found.state_cosine[number] == pytest.approx(expected, abs=1e-4)
        if name != "selective-ssm":
            hidden = [
                model.module.base_model(torch.tensor([ids])).last_hidden_state[0].detach() for ids in (before, after)
            ]
            apart = [((hidden[1][j] - hidden[0][i]).norm() / hidden[0][i].norm()).item() for i, j in found.pairs]
            assert found.distance[-1] == pytest.approx(apart, abs=1e-4)
            ends = torch.nn.functional.cosine_similarity(hidden[0][-1], hidden[1][-1], dim=0).item()
            assert found.hidden_cosine[-1] == pytest.approx(ends, abs=1e-4)
        assert (found.distance[:, :3] == 0).all() and found.distance[-1, 3:].max() > 1e-3
        assert found.spreads[-1].first == 5 and found.first_changed == 3

    def test_chosen_layers(self):
        model = random_model("groupmamba")
        every, some = (of_ids(model, TEXT, TEXT[::-1], layers=layers) for layers in ("all", [2, 0]))
        assert some.layers == (2, 0) and some.rows == ("2", "0", "head") and every.by_layer and some.by_layer
        assert (some.clean.attention == every.clean.attention[[2, 0]]).all()
        assert (some.distance == every.distance[[2, 0, 3]]).all() and some.state_cosine[1] == every.state_cosine[0]
        assert not of_ids(model, TEXT, TEXT).by_layer


class TestAlignment:
    def test_what_changed(self):
        found = attack_effect(fading(WEIGHTS), clean="good a bad b", corrupted="a bad film film b")
        assert found.clean.changed.tolist() == [True, False, False, False, False]
        assert found.corrupted.changed.tolist() == [False, False, True, True, False, False]
        assert found.first_changed == 0 and found.changed_name == "1 of 5 tokens removed, 2 of 6 tokens new"

    def test_of_texts_without_a_common_token(self):
        found = of_ids(random_model("mamba"), [1, 2], [3, 4, 5])
        assert found.pairs.shape == (0, 2) and found.distance.shape[1] == 0 and found.clean.changed.all()
        assert found.to_frame().distance.isna().all() and "nan" not in str(found)
        found.figure()
        assert type(found).from_dict(json.loads(found.to_json())) == found

    def test_relative_and_cosine(self):
        rows = np.array([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0]])
        assert relative(rows, np.array([[3.0, 9.0], [0.0, 0.0], [1.0, 0.0]]), SAME).tolist() == [1, 0, math.inf]
        assert relative(rows[:1], rows[:1] * (1 + 0.9 * SAME), SAME).tolist() == [0]
        assert relative(rows[:1], rows[:1] * (1 + 1.1 * SAME), SAME) == pytest.approx(1.1 * SAME)
        assert cosine(rows[0], rows[0] * -2) == pytest.approx(-1) and cosine(rows[1], rows[2]) == 1
        assert cosine(np.array([1.0, 0.0]), np.array([1.0, 1.0])) == pytest.approx(math.sqrt(0.5))
        assert math.isnan(cosine(rows[0], rows[1]))


class TestOptions:
    @pytest.mark.parametrize(("options", "says"), [
        (dict(corrupted=[3, 4]), r"corrupted is \[3, 4\]; allowed is a text"),
        (dict(clean=3), "clean is 3; allowed is a text"),
        (dict(corrupted=" "), "corrupted is empty; give a text"),
        (dict(layers="every"), "layers is 'every'; allowed are mean, all or a whole number from 0 on"),
        (dict(layers=[1]), "there is no layer 1"),
        (dict(top=0), "top is 0"),
    ])  # fmt: skip
    def test_what_is_refused(self, options, says):
        refuses(says, attack_effect, fading(WEIGHTS), **{"clean": "good", "corrupted": "bad", **options})

    def test_ids_and_models_that_cannot_read_it(self):
        refuses("id 99, outside the model's vocabulary", of_ids, fading(WEIGHTS), [3], [99])
        with pytest.raises(InputError, match="has no tokenizer to read texts with; give one, load"):
            attack_effect(random_model("mamba"), clean="good", corrupted="bad")

    def test_a_damaged_model(self):
        model = fading(WEIGHTS)
        with torch.no_grad():
            model.module.ssm.A[0, 0] = torch.nan
        refuses("not finite", attack_effect, model, clean="good", corrupted="bad")

    def test_no_hook_is_left(self):
        model = random_model("mamba2")
        of_ids(model, TEXT, TEXT[:4])
        assert not any(module._forward_hooks for module in model.module.modules())
        assert not any("forward" in vars(mixer) for mixer in model.mixers)


class TestResult:
    @pytest.fixture
    def result(self) -> AttackEffect:
        model = ssmscope.load("demo/sst2-mamba2")
        return attack_effect(
            model, clean="a gripping , well acted film", corrupted="a tedious , well acted film and true is true", top=3
        )

    def test_files_with_former_names_are_read(self, result, tmp_path):
        path = result.save(tmp_path, "effect")["json"]
        former = path.read_text().replace('"clean": {"text"', '"before": {"text"')
        path.write_text(former.replace('"corrupted": {"text"', '"after": {"text"'))
        assert '"before": {"text"' in former and ssmscope.Result.load(path) == result

    @pytest.mark.parametrize("words", [1, 5, 20, 57])
    def test_nothing_overlaps_or_leaves_the_sheet(self, words):
        draw = np.random.default_rng(words)
        names = ["a", "b", "film", "good", "bad"]
        text = [names[i] for i in draw.integers(0, 5, words)]
        longer = " ".join([*text, "bad", "b"])
        result = attack_effect(fading(WEIGHTS, decay=0.1), clean=" ".join(text), corrupted=longer)
        figure, texts = drawn(result)
        assert not overlapping(texts) and not outside(figure, texts)
        assert len(figure.axes[-1].get_xticklabels()) == words + 3

    def test_a_long_text_is_cut_in_the_figure_only(self):
        text = ["a", "b", "film"] * 360
        result = attack_effect(
            fading(WEIGHTS, decay=0.1), clean=" ".join(text), corrupted=" ".join([*text[:1000], "bad", *text[1000:]])
        )
        figure = result.figure()
        texts = labels(figure)
        for tokens in (1081, 1082):
            said = f"{MAX_BOXES:,} of {tokens:,} tokens, the end"
            assert sum(text.startswith(said) and text.endswith("; below, all of them") for text in texts) == 1
        assert len(figure.axes[-1].lines[-1].get_xdata()) == 1081
        assert figure.axes[-1].get_xlabel() == "position in the corrupted text"


def test_tokens_that_are_frequent_in_long_texts_are_aligned_too() -> None:
    often = [1, 2] * 150
    assert aligned([9, *often], often).tolist() == [[at + 1, at] for at in range(300)]
    assert aligned([1, 2, 3], [3, 1, 2]).tolist() == [[0, 1], [1, 2]] and aligned([1], [2]).shape == (0, 2)


@pytest.mark.parametrize(("weights", "sink", "shares", "state"), [
    ([1.0, -2.0, 0.0], None, [1 / 3, 2 / 3, 0], 0.0), ([1.0, -2.0, 0.0], -5.0, [1 / 8, 2 / 8, 0], 5 / 8),
    ([0.0, 0.0], -5.0, [0, 0], 1.0), ([0.0, 0.0], None, [0, 0], 0.0), ([0.0, 0.0], 0.0, [0, 0], 0.0),
])  # fmt: skip
def test_shares_of_the_last_row(weights: list[float], sink: float | None, shares: list[float], state: float) -> None:
    own = None if sink is None else np.array([sink], np.float32)
    found, before = _shares(np.array([weights], np.float32), own)
    assert found.tolist() == pytest.approx(shares) and found.dtype == np.float32 and before == pytest.approx(state)


@pytest.mark.parametrize(("dtype", "same"), [(torch.float32, SAME), (torch.bfloat16, 0.125), (torch.float64, SAME)])
def test_what_counts_as_the_same_depends_on_the_dtype(monkeypatch: pytest.MonkeyPatch, dtype: Any, same: float) -> None:
    seen: list[float] = []
    monkeypatch.setattr(
        module, "relative", lambda before, after, same: seen.append(same) or relative(before, after, same)
    )
    model = Model(random_example("mamba2").to(dtype).eval(), None, "m")
    batch = model.encode(ids=[[5, 17, 3, 9], [5, 17, 4, 9, 8]])
    found = effect_of(model, batch, layers="all")
    assert seen == [same] * model.num_layers + [SAME]  # the head's input is in float32 at least
    assert found.pairs.tolist() == [[0, 0], [1, 1], [3, 3]] and found.clean.changed.tolist() == [
        False, False, True, False,
    ]  # fmt: skip
    assert found.corrupted.changed.tolist() == [False, False, True, False, True]
    answers = [
        model.logits(model.encode(ids=[ids]))[0, -1].double().softmax(-1) for ids in ([5, 17, 3, 9], [5, 17, 4, 9, 8])
    ]
    assert found.kept == pytest.approx(float(answers[1][answers[0].argmax()]), rel=0.05)


def test_padding_is_no_token_of_a_text() -> None:
    model = Model(random_example("mamba2").eval(), None, "m")
    found = effect_of(model, model.encode(ids=[[5, 17, 3], [5, 17, 4, 0]]))
    assert found.pairs.tolist() == [[0, 0], [1, 1]] and found.corrupted.changed.tolist() == [False, False, True, True]
