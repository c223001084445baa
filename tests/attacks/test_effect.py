"""Effect of a change inside a model: closed forms on a model that forgets at a known rate, identities on every family,
and views that stay readable and safe."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import numpy as np
import pytest
import torch
from drawn import labels
from examples import random_example
from fading import fading
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PatchCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text
from seen import render

import ssmscope
from ssmscope.attacks.effect import attack_effect
from ssmscope.attacks.effect.measure import SAME, aligned, cosine, effect_of, relative
from ssmscope.attacks.effect.result import AttackEffect, attended
from ssmscope.errors import InputError
from ssmscope.interp.attention import implicit_attention
from ssmscope.render.colours import BLUES, ramp
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
            assert side.attention[0] == pytest.approx(weights / weights.sum(), abs=1e-6)
            assert side.sink.tolist() == [0]
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
    def test_of_equal_texts_nothing_moves(self, name):
        found = of_ids(random_model(name), TEXT, TEXT)
        assert not found.clean.changed.any() and not found.corrupted.changed.any() and found.first_changed is None
        assert (found.distance == 0).all()
        assert found.hidden_cosine == pytest.approx(1, abs=1e-9) and found.state_cosine == pytest.approx(1, abs=1e-9)
        assert found.summary()[["retention_change", "attention_change"]].max().max() < 1e-6
        assert all(spread.first is None for spread in found.spreads)
        assert found.kept == pytest.approx(found.clean.text.probability, rel=1e-6)

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
    def test_is_of_equal_tokens_in_order(self):
        draw = np.random.default_rng(0)
        for _ in range(50):
            first, second = (draw.integers(0, 4, draw.integers(1, 12)).tolist() for _ in range(2))
            pairs = aligned(first, second)
            assert [first[i] for i in pairs[:, 0]] == [second[j] for j in pairs[:, 1]]
            assert (np.diff(pairs, axis=0) > 0).all()

    def test_what_changed(self):
        found = attack_effect(fading(WEIGHTS), clean="good a bad b", corrupted="a bad film film b")
        assert found.clean.changed.tolist() == [True, False, False, False, False]
        assert found.corrupted.changed.tolist() == [False, False, True, True, False, False]
        assert found.first_changed == 0
        assert found.changed_name == "1 of 5 tokens removed, 2 of 6 tokens new"

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
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            (dict(corrupted=[3, 4]), r"corrupted is \[3, 4\]; allowed is a text"),
            (dict(clean=3), "clean is 3; allowed is a text"),
            (dict(corrupted=" "), "corrupted is empty; give a text"),
            (dict(layers="every"), "layers is 'every'; allowed are mean, all or a whole number from 0 on"),
            (dict(layers=[1]), "there is no layer 1"),
            (dict(top=0), "top is 0"),
        ],
    )
    def test_what_is_refused(self, options, says):
        with pytest.raises(InputError, match=says) as caught:
            attack_effect(fading(WEIGHTS), **{"clean": "good", "corrupted": "bad", **options})
        assert "\n" not in str(caught.value)

    def test_ids_that_the_model_does_not_have(self):
        with pytest.raises(InputError, match="id 99, outside the model's vocabulary"):
            of_ids(fading(WEIGHTS), [3], [99])

    def test_a_model_without_a_tokenizer(self):
        with pytest.raises(InputError, match="has no tokenizer to read texts with; give one, load"):
            attack_effect(random_model("mamba"), clean="good", corrupted="bad")

    def test_a_damaged_model(self):
        model = fading(WEIGHTS)
        with torch.no_grad():
            model.module.ssm.A[0, 0] = torch.nan
        with pytest.raises(InputError, match="not finite"):
            attack_effect(model, clean="good", corrupted="bad")

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
            model,
            clean="a gripping , well acted film",
            corrupted="a tedious , well acted film and true is true",
            top=3,
        )

    def test_is_saved_and_read_back(self, result, tmp_path):
        paths = result.save(tmp_path, "effect")
        assert {path.suffix for path in paths.values()} == {".json", ".csv", ".png", ".html"}
        again = ssmscope.Result.load(paths["json"])
        assert again == result and type(again) is AttackEffect and again.kind == "effect"
        former = paths["json"].read_text().replace('"clean": {"text"', '"before": {"text"')
        paths["json"].write_text(former.replace('"corrupted": {"text"', '"after": {"text"'))
        assert '"before": {"text"' in former and ssmscope.Result.load(paths["json"]) == result
        assert again.provenance["options"] == {
            "clean": "a gripping , well acted film",
            **{"corrupted": "a tedious , well acted film and true is true", "layers": "mean", "top": 3},
        }

    def test_frame(self, result):
        frame = result.to_frame()
        assert frame.side.tolist() == ["clean"] * 7 + ["corrupted"] * 11 and set(frame.layer) == {"mean"}
        assert frame.token[7:].tolist()[:2] == ["a", "tedious"]
        assert frame.changed.tolist() == [*result.clean.changed, *result.corrupted.changed]
        assert frame.partner.isna().tolist() == frame.changed.tolist() == frame.distance.isna().tolist()
        assert frame.partner[6] == 10 and frame.partner[17] == 6 and frame.partner[7] == 0
        assert (frame.retention + frame.write).to_numpy() == pytest.approx(1)
        assert frame.attention[7:].to_numpy() == pytest.approx(result.corrupted.attention.mean(0))
        assert frame.distance[17] == pytest.approx(result.distance[:-1, -1].mean())
        model = ssmscope.load("demo/sst2-mamba2")
        every = attack_effect(model, clean="a good film", corrupted="a bad film", layers="all").to_frame()
        assert every.layer.drop_duplicates().tolist() == ["mean", "0", "1", "head"] and len(every) == 2 * 4 * 4
        head = every[every.layer == "head"]
        assert head.retention.isna().all() and not head.distance[~head.changed].isna().any()

    def test_summary(self, result):
        frame = result.summary()
        assert frame.layer.tolist() == ["0", "1", "head"]
        assert frame.on_new[:2].tolist() == pytest.approx(
            result.corrupted.attention[:, [1, 6, 7, 8, 9]].sum(1).tolist()
        )
        assert frame.on_removed[:2].tolist() == pytest.approx(result.clean.attention[:, 1].tolist())
        pairs = [(0, 0), (2, 2), (3, 3), (4, 4), (5, 5), (6, 10)]
        change = [
            [abs(result.corrupted.text.scores[k, j] - result.clean.text.scores[k, i]) for i, j in pairs] for k in (0, 1)
        ]
        assert frame.retention_change[:2].tolist() == pytest.approx(np.mean(change, axis=1).tolist(), abs=1e-7)
        moved = [
            [abs(result.corrupted.attention[k, j] - result.clean.attention[k, i]) for i, j in pairs] for k in (0, 1)
        ]
        assert frame.attention_change[:2].tolist() == pytest.approx(np.mean(moved, axis=1).tolist(), abs=1e-7)
        assert frame["first"].isna().tolist() == [True, False, False] and frame["first"][2] == 2
        assert frame.iloc[2]["last"] == pytest.approx(result.distance[2, -1])

    def test_terminal(self, result):
        shown = render(result)
        assert result.headline.startswith("Effect of a change on demo/sst2-mamba2: “")
        for part in (
            "clean",
            "corrupted; ",
            "the last position attends",
            "state cosine",
            "The texts differ from token 1 on",
        ):
            assert part in shown
        assert max(map(len, shown.splitlines())) <= 100
        shown = render(result, force_terminal=True, color_system="truecolor", no_color=False)
        assert "\x1b[" in shown and "retention   0.9" in shown and "attention   0." in shown

    def test_what_the_last_position_attends_to(self, result):
        for side in (result.clean, result.corrupted):
            rows = attended("side", side, 4).rows
            order = np.argsort(-side.mean_attention, kind="stable")[:4]
            assert [labels[0] for labels, _ in rows] == [str(at) for at in order]
            assert [cells[-1].text for _, cells in rows] == ["yes" if side.changed[at] else "" for at in order]
            shares = [f"{100 * side.mean_attention[at]:.1f}" for at in order]
            assert [cells[0].value for _, cells in rows] == shares
        assert {cells[-1].text for _, cells in rows} == {"yes", ""}

    def test_page(self, result):
        page = result.to_html()
        assert page.count(result.changed_name) == 2  # the title, and that of the window
        assert "<script" not in page and "http" not in page.replace("http-equiv", "") and "data:image/" in page
        pieces = re.findall(r'<span class="([^"]*)" title="', page)
        assert len(pieces) == 2 * (7 + 11)  # retention and attention of both texts
        special = [word is None for side in (result.clean, result.corrupted) for word in side.text.words]
        retention = pieces[:7] + pieces[14:25]
        changed = [*result.clean.changed, *result.corrupted.changed]
        assert ["against" in names.split() for names in retention] == changed
        assert ["out" in names.split() for names in retention] == special
        assert {"v0", "v31"} <= {name for names in retention for name in names.split()}

    def test_rows(self, result):
        """The same share has the same colour on both sides, 0 the lowest; changed tokens and the top 3 are marked."""
        highest = max(side.mean_attention.max() for side in (result.clean, result.corrupted))
        for (_, side), text in zip(result.sides, result.token_rows().texts):
            retention, attention = text.rows
            assert attention.shades().tolist() == np.rint(31 * side.mean_attention / highest).astype(int).tolist()
            assert list(attention.marked) == side.top(3)
            changed = np.flatnonzero(side.changed).tolist()
            assert list(retention.against) == changed and not retention.marked
            assert list(attention.against) == [at for at in changed if at not in side.top(3)]
            assert retention.own == (side.text.mean[:-1].min(), side.text.mean[:-1].max())

    def test_layers_have_rows_where_they_were_asked_for(self):
        model = ssmscope.load("demo/sst2-mamba2")
        found = attack_effect(model, clean="a good film", corrupted="a bad film", layers="all")
        (text, _), side = found.token_rows().texts, found.clean
        names = [row.name for row in text.rows]
        assert names == ["retention", "attention", *(f"layer {at} {name}" for at in (0, 1) for name in names[:2])]
        assert (text.rows[4].scores == side.text.scores[1]).all() and (text.rows[5].scores == side.attention[1]).all()

    def test_figure(self, result):
        figure = result.figure()
        distances = figure.axes[-1]
        curves = {line.get_label(): line for line in distances.lines}
        assert curves["head"].get_ydata().tolist() == result.distance[-1].tolist()
        assert curves["layer 1"].get_xdata().tolist() == result.pairs[:, 1].tolist()
        labels = distances.get_xticklabels()
        assert [label.get_text() for label in labels] == list(result.corrupted.text.tokens)
        assert [label.get_color() == "#d1540a" for label in labels] == result.corrupted.changed.tolist()
        assert len(distances.patches) == 5  # a band for each new token
        texts = [text.get_text() for axes in figure.axes for text in axes.texts]
        assert all(token in texts for token in ("gripping", "tedious", "attention"))

    def test_one_range_for_both_texts(self, result):
        """The same retention has the same shade on both sides."""
        before, after = shades(result)
        i, j = result.pairs[0]
        assert before[i] == after[j] and min(*before[:-1], *after[:-1]) == 0 and max(*before, *after) == 31
        assert before[-1] == after[-1] == -1  # [CLS]

    @pytest.mark.parametrize(("lowest", "highest"), [(0.96815, 0.96958), (0.91, 0.97)])
    def test_noise_has_no_colours(self, result, lowest, highest):
        """The share replaced, 0.03042 to 0.03185, varies by less than a tenth; 0.03 to 0.09 does not."""

        def side(own, first, last):
            mean = np.linspace(first, last, len(own) - 1).astype(np.float32)
            return dataclasses.replace(own, text=dataclasses.replace(own.text, mean=np.append(mean, np.float32(0.5))))

        sides = dict(clean=side(result.clean, lowest, highest), corrupted=side(result.corrupted, highest, lowest))
        result, flat = dataclasses.replace(result, **sides), highest - lowest < 0.01
        before, after = (levels[:-1] for levels in shades(result))  # without [CLS]
        if flat:
            assert set(before) == set(after) == {16}
        else:
            assert (before[0], after[0], sorted(before), sorted(after)) == (0, 31, before, after[::-1])
        figure = result.figure()
        boxes = next(each for each in figure.findobj(PatchCollection) if len(each.get_facecolor()) >= len(before))
        assert [to_hex(colour) for colour in boxes.get_facecolor()][: len(before)] == [ramp(BLUES)[at] for at in before]
        page, first = result.to_html(), result.clean.text.tokens[0]
        assert re.search(rf'class="v{before[0]}[^"]*" title="[^"]*">{first}<', page)
        drawn = " ".join(text.get_text() for text in figure.findobj(Text))
        for view in (page, drawn):
            assert ("flat: noise" in view) == flat and f"{lowest:.2f}"[:3] in view

    def test_layers_are_not_clipped(self):
        """Layers reach beyond the average; every row says its own range, on scales that hold all rows."""
        model = ssmscope.load("demo/sst2-mamba2")
        result = attack_effect(model, clean="a gripping film .", corrupted="a tedious film .", layers="all")
        rows = [row for text in result.token_rows().texts for row in text.rows]
        assert [row.name for row in rows[:4]] == ["retention", "attention", "layer 0 retention", "layer 0 attention"]
        for kind in ("retention", "attention"):
            own = [row for row in rows if row.name.endswith(kind)]
            seen = [row.scores if row.outside is None else row.scores[~row.outside] for row in own]
            for row, scores in zip(own, seen):
                assert row.own == (scores.min(), scores.max()) and row.ends == own[0].ends
            low, high = min(each.min() for each in seen), max(each.max() for each in seen)
            assert own[0].ends == ((low, high) if kind == "retention" else (0, high))

    @pytest.mark.parametrize("words", [1, 5, 20, 57])
    def test_nothing_overlaps_or_leaves_the_sheet(self, words):
        draw = np.random.default_rng(words)
        names = ["a", "b", "film", "good", "bad"]
        text = [names[i] for i in draw.integers(0, 5, words)]
        longer = " ".join([*text, "bad", "b"])
        result = attack_effect(fading(WEIGHTS, decay=0.1), clean=" ".join(text), corrupted=longer)
        figure = result.figure()
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        sheet, distances = figure.axes[0], figure.axes[-1]
        width, height = canvas.get_width_height()
        written = [text.get_window_extent() for text in sheet.texts]
        labels = [label.get_window_extent() for label in distances.get_xticklabels()]
        assert len(labels) == words + 3
        assert all(a.x1 <= b.x0 for a, b in zip(labels, labels[1:]))
        for box in (*written, *labels, *(text.get_window_extent() for text in distances.get_legend().get_texts())):
            assert box.x0 > 0 and box.x1 < width and box.y0 > 0 and box.y1 < height
        for at, box in enumerate(written):
            assert not any(apart(box, other) for other in written[at + 1 :])
        top = distances.get_tightbbox().y1
        assert all(box.y0 > top - 1 for box in written if box.y1 > distances.get_window_extent().y1)

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

    def test_hostile_tokens(self, result, tmp_path):
        tokens = ("<script>alert(1)</script>", " $x^{$", "\x1b[31m", "電影", "&amp;", "\n", "[CLS]")
        text = dataclasses.replace(result.clean.text, tokens=tokens, answer="<b>$_{</b>")
        hostile = dataclasses.replace(result, clean=dataclasses.replace(result.clean, text=text))
        hostile = dataclasses.replace(
            hostile,
            corrupted=dataclasses.replace(
                hostile.corrupted, text=dataclasses.replace(hostile.corrupted.text, tokens=(*tokens, *tokens)[:11])
            ),
            provenance={**result.provenance, "model": "$m_{" * 30},
        )
        paths = hostile.save(tmp_path, "effect")
        page = paths["html"].read_text()
        assert "<script>alert" not in page and "&lt;script&gt;" in page and "<b>$_" not in page
        assert "\x1b[31m" not in str(hostile)


def shades(result: AttackEffect) -> list[list[int]]:
    """The shades of both texts in the row of retention."""
    return [text.rows[0].shades().tolist() for text in result.token_rows().texts]


def apart(first, second) -> bool:
    """Return True if two boxes overlap by more than a pixel both ways."""
    wide = min(first.x1, second.x1) - max(first.x0, second.x0)
    tall = min(first.y1, second.y1) - max(first.y0, second.y0)
    return wide > 1 and tall > 1
