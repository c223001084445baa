"""Typed texts as pieces of a page: the numbers are those of the analyses, texts stay texts, refusals are one line."""

import dataclasses
import html
import re

import numpy as np
import pytest
from refusals import refuses
import ssmscope
from ssmscope import cli
from ssmscope.api.analyses import analysis_of
from ssmscope.attacks.effect import attack_effect
from ssmscope.interp.attention import implicit_attention
from ssmscope.interp.heatmap import selection_heatmap
from ssmscope.loading.load import load
from ssmscope.render import numbers
from ssmscope.render.tokens import NO_BREAK
from ssmscope.reports import live as forms
from ssmscope.reports import live as module
from ssmscope.reports.live import PREDICTIONS_SHOWN, TRACES_KEPT, Live, predictions
from ssmscope.reports.serving import _is_loopback, page

TEXT = "A gripping film , beautifully acted ."
EDITED = "A boring film , beautifully acted ."
HOSTILE = "<script>alert(1)</script> \"'> <img src=x onerror=alert(1)> </style> &amp; ${1+1} film"
CLASSIFIER, LANGUAGE = 0, 1
models = pytest.fixture(scope="module")(lambda: [load("demo/sst2-mamba2"), load("demo/instruct-mamba2")])
live = pytest.fixture(scope="module")(lambda models: Live(models, max_tokens=60))


def spans(piece: str) -> list[str]:
    """The tokens of the first flowing text of a piece, as HTML."""
    (flow, *_) = re.findall(r'<p class="tokens">(.*?)</p>', piece)
    return re.findall(r"<span.*?</span>", flow)


def text_of(span: str) -> str:
    return html.unescape(re.sub("<.*?>", "", span))


def titles(piece: str) -> list[list[str]]:
    return [html.unescape(re.search('title="(.*?)"', span)[1]).split("\n") for span in spans(piece)]


def told(piece: str) -> str:
    """The line of a refusal; a piece that is anything else fails."""
    (line,) = re.findall(r'<p class="refusal" role="alert">(.*?)</p>', piece)
    assert "\n" not in line and "Traceback" not in piece
    return html.unescape(line)


class TestPredictions:
    def test_the_classes_are_the_softmax_of_the_logits(self, live, models):
        model = models[CLASSIFIER]
        frame = predictions(model, live.trace(CLASSIFIER, TEXT), live.trace(CLASSIFIER, EDITED))
        found = {row.name: (row.given, row.edited, row.change) for row in frame.itertuples()}
        assert set(found) == set(model.labels)
        for place, text in enumerate((TEXT, EDITED)):
            logits = model.logits(model.encode(text))[0].double().numpy()
            for label, logit in zip(model.labels, logits):
                assert found[label][place] == pytest.approx(np.exp(logit) / np.exp(logits).sum(), abs=1e-5)
        for given, edited, change in found.values():
            assert change == pytest.approx(edited - given)
        assert frame["given"].is_monotonic_decreasing

    def test_the_next_tokens_are_the_likeliest_of_either_text(self, live, models):
        model = models[LANGUAGE]
        frame = predictions(model, live.trace(LANGUAGE, TEXT), live.trace(LANGUAGE, EDITED))
        wanted: dict[int, list[float]] = {}
        rows = [model.logits(model.encode(text))[0, -1].double().softmax(-1) for text in (TEXT, EDITED)]
        for row in rows:
            for token in row.topk(PREDICTIONS_SHOWN).indices.tolist():
                wanted[token] = [float(each[token]) for each in rows]
        assert sorted(frame["name"]) == sorted(model.tokenizer.decode([token]) for token in wanted)
        np.testing.assert_allclose(sorted(frame["given"]), sorted(p for p, _ in wanted.values()), atol=1e-5)
        np.testing.assert_allclose(sorted(frame["edited"]), sorted(q for _, q in wanted.values()), atol=1e-5)
        alone = predictions(model, live.trace(LANGUAGE, TEXT))
        assert len(alone) == PREDICTIONS_SHOWN and list(alone) == ["name", "given"]

    def test_the_table_shows_them(self, live, models):
        frame = predictions(models[CLASSIFIER], live.trace(CLASSIFIER, TEXT), live.trace(CLASSIFIER, EDITED))
        piece = live.answer(CLASSIFIER, TEXT, EDITED).prediction
        rows = [re.findall("<td.*?>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", piece)[1:]]
        for cells, row in zip(rows, frame.itertuples(), strict=True):
            name, *numbers = (re.sub("<.*?>", "", cell) for cell in cells)
            assert name == row.name
            assert [float(number.replace("−", "-")) for number in numbers] == pytest.approx(
                [row.given, row.edited, row.change], abs=5.01e-4
            )
        widths = [float(width) for width in re.findall(r"width:([\d.]+)px", piece)]
        shares = [60 * share for row in frame.itertuples() for share in (row.given, row.edited)]
        assert widths == pytest.approx(shares, abs=0.051)
        best = re.findall(r'<tr><td>(\w+)</td><td class="best">', piece)
        assert best == [frame["name"][0]]
        assert "edited" not in live.answer(CLASSIFIER, TEXT).prediction


class TestHeatmap:
    @pytest.mark.parametrize("score", ["survival", "retention", "write"])
    @pytest.mark.parametrize("layer", ["mean", "0", "1"])
    def test_the_numbers_are_those_of_selection_heatmap(self, live, models, score, layer):
        given, edited = live.heatmaps(CLASSIFIER, TEXT, EDITED, score=score, layer=layer)
        for text, piece in ((TEXT, given), (EDITED, edited)):
            trace = models[CLASSIFIER].trace(text)
            (whole,) = selection_heatmap(trace, score=score, layers="all")
            wanted = whole.mean if layer == "mean" else whole.scores[int(layer)]
            name = "mean: " if layer == "mean" else f"layer {layer}: "
            shown = [next(line for line in lines if line.startswith(name)) for lines in titles(piece)]
            numbers = [float(line.removeprefix(name).split(" (")[0]) for line in shown]
            assert numbers == pytest.approx(wanted.tolist(), rel=1e-5)
            assert [text_of(span) for span in spans(piece)] == [token.strip() for token in trace.tokens[0]]

    @pytest.mark.parametrize(("layer", "rows"), [("mean", 3), ("1", 1)])
    def test_the_layers_stand_below_their_average(self, live, layer, rows):
        assert live.heatmaps(CLASSIFIER, TEXT, layer=layer)[0].count('<p class="tokens">') == rows

    def test_without_an_edited_text_there_is_one(self, live):
        answer = live.answer(CLASSIFIER, TEXT, "  ")
        assert answer.given and answer.edited == answer.change == ""
        assert live.heatmaps(CLASSIFIER, TEXT, score="write", layer="1")[1] == ""


class TestRow:
    @pytest.mark.parametrize("level", ["ssm", "block"])
    @pytest.mark.parametrize("layer", [0, 1])
    def test_the_numbers_are_those_of_implicit_attention(self, live, models, level, layer):
        trace = models[LANGUAGE].trace(TEXT)
        whole = implicit_attention(trace, layers=layer, level=level).map()
        for position in (0, 4, len(whole) - 1):
            piece = live.row(LANGUAGE, TEXT, str(position), layer=layer, level=level)
            every = spans(piece)
            assert len(every) == len(whole)
            row = whole[position, : position + 1]
            for key, span in enumerate(every):
                names = re.search('class="(.*?)"', span)[1].split()
                assert ("out" in names) == (key > position) and ("query" in names) == (key == position)
                if key > position:
                    continue
                lines = html.unescape(re.search('title="(.*?)"', span)[1]).split("\n")
                assert lines[0].startswith(f"position {key}")
                weight = float(lines[1].rpartition(": ")[2].partition(" (")[0].replace("−", "-"))
                assert weight == pytest.approx(float(row[key]), rel=1e-5, abs=1e-7)
                shade = int(re.search('data-l="(.*?)"', span)[1])
                assert shade == pytest.approx(16 * row[key] / abs(row).max(), abs=0.51)
            order = np.argsort(-abs(row), kind="stable")[:5]
            ranks = {key: re.search(r"\(rank (\d)\)", span) for key, span in enumerate(every)}
            found = sorted((int(rank[1]), key) for key, rank in ranks.items() if rank)
            assert [key for _, key in found] == order.tolist()

    def test_the_state_before_the_first_token_has_its_place(self, live, models, monkeypatch):
        def with_state(*args, **options):
            result = implicit_attention(*args, **options)
            (map_,) = result[0].maps
            self.largest = float(abs(map_.values).max())
            sunk = dataclasses.replace(map_, sink=np.array([-2 * self.largest], dtype=np.float32))
            return dataclasses.replace(result, texts=(dataclasses.replace(result[0], maps=(sunk,)),))

        monkeypatch.setattr(module, "implicit_attention", with_state)
        piece = live.row(CLASSIFIER, TEXT, "3", layer=0, level="block").replace(NO_BREAK, " ")
        assert re.search('<i class="state" data-l="-16" title="−.*?">state</i>', piece)
        shades = [abs(int(shade)) for shade in re.findall('data-l="(.*?)"', "".join(spans(piece)))]
        assert max(shades) == 8 and "[state] −" in piece

    def test_a_position_is_asked_for_and_refused(self, live):
        assert "Click a token" in live.row(CLASSIFIER, TEXT, " ", layer=0, level="ssm")
        last = len(live.trace(CLASSIFIER, TEXT).tokens[0]) - 1
        assert 'role="alert"' not in live.row(CLASSIFIER, TEXT, f" {last} ", layer=0, level="ssm")
        for wrong in (str(last + 1), "-1", "1.5", "two", "²", "9" * 5000, "<b>"):
            line = told(live.row(CLASSIFIER, TEXT, wrong, layer=0, level="ssm"))
            assert line.startswith("there is no token") and line.endswith(f"the tokens 0 to {last}") and len(line) < 90


class TestExplanations:
    def test_both_texts_are_explained_as_explain_does(self, live, models):
        piece = live.explained(CLASSIFIER, TEXT, EDITED, methods="gradxinput", top="2").replace(NO_BREAK, " ")
        found = ssmscope.explain(models[CLASSIFIER], [TEXT, EDITED], methods=["gradxinput"], top=2)
        for text in found:
            (own,) = text.attributions
            best = text.top(own, 1)[0]
            assert html.escape(f"{text.tokens[best].strip()} {numbers.number(float(own.scores[best]))}") in piece
        assert "unknown among methods" in told(live.explained(CLASSIFIER, TEXT, "", methods="wrong"))


class TestEdits:
    def test_what_changed_is_marked_and_said(self, live, models):
        answer = live.answer(CLASSIFIER, TEXT, EDITED)
        assert "<del>gripping</del><ins>boring</ins>" in answer.change
        effect = attack_effect(models[CLASSIFIER], clean=TEXT, corrupted=EDITED)
        assert html.escape(effect.answer_name) in answer.change and html.escape(effect.changed_name) in answer.change
        changed = re.findall(r'<span class="[^"]*against" title="[^"]*">(.*?)</span>', answer.change)
        assert list(dict.fromkeys(changed)) == ["gripping", "boring"]

    def test_nothing_changed(self, live):
        assert "no token changed" in live.answer(CLASSIFIER, TEXT, TEXT).change

    def test_an_edited_text_that_is_refused_is_named(self, live):
        answer = live.answer(CLASSIFIER, TEXT, "film " * 61)
        assert told(answer.prediction).startswith("the edited text: the text has 62 tokens, more than the limit of 60")
        assert (answer.given, answer.edited, answer.change) == ("", "", "")


class TestRefusals:
    @pytest.mark.parametrize(("text", "line"), [
        ("", "the text is empty: give at least one word"),
        (" \n\t", "the text is empty: give at least one word"),
        ("film " * 60, "the text has 61 tokens, more than the limit of 60"),
        ("x" * (64 * 60 + 1), "the text has 3,841 characters, more than 3,840"),
        ("a \x07 bell", "the text has the control character U+0007"),
        ("half \ud83d", "the text has half of a character"),
    ])  # fmt: skip
    def test_a_text(self, live, text, line):
        answer = live.answer(CLASSIFIER, text)
        assert told(answer.prediction).startswith(line) and answer.given == ""
        assert told(live.heatmaps(CLASSIFIER, text, score="write", layer="0")[0]).startswith(line)
        assert told(live.row(CLASSIFIER, text, "0", layer=0, level="ssm")).startswith(line)

    def test_the_longest_that_is_allowed_is_not(self, live):
        assert 'role="alert"' not in live.answer(CLASSIFIER, "film " * 59).prediction

    def test_options(self, live):
        assert "did you mean 'write'" in told(live.heatmaps(CLASSIFIER, TEXT, score="writes", layer="0")[0])
        assert "there is no layer 2" in told(live.heatmaps(CLASSIFIER, TEXT, score="write", layer="2")[0])
        assert "unknown level" in told(live.row(CLASSIFIER, TEXT, "0", layer=0, level="blocks"))
        assert "there is no layer 7" in told(live.row(CLASSIFIER, TEXT, "0", layer=7, level="ssm"))

    def test_models(self, models):
        for given, line in (
            ([], "no model"),
            ([load("demo/cifar10-mamba")], "reads pixels"),
            ([dataclasses.replace(models[0], tokenizer=None)], "has no tokenizer"),
        ):
            refuses(line, Live, given)
        refuses("--max-tokens is 0", Live, models, max_tokens=0)


@pytest.mark.parametrize("number", [CLASSIFIER, LANGUAGE])
def test_a_text_stays_a_text(live, number):
    answer = live.answer(number, HOSTILE, HOSTILE.replace("film", "play"))
    row = live.row(number, HOSTILE, "4", layer=0, level="block")
    refused = live.row(number, HOSTILE, "<script>", layer=0, level="block")
    assert "no token '<script>'" in told(refused)
    for piece in (*dataclasses.astuple(answer), row, refused):
        assert (
            "<script" not in piece and "<img src=x" not in piece and piece.count("</style>") == piece.count("<style>")
        )
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in answer.change
    assert "".join(map(text_of, spans(answer.given))).startswith("<script>alert(1)</script>")


def test_a_model_is_called_by_its_name(models):
    odd = dataclasses.replace(models[0], name="<i>odd</i>")
    shown = page(Live([odd]))
    assert shown.count("&lt;i&gt;odd&lt;/i&gt;") == 2 and "<i>" not in shown


def test_traces_are_kept_and_few(models):
    live = Live(models)
    first = live.trace(0, TEXT)
    assert live.trace(0, TEXT) is first and live.trace(1, TEXT) is not first
    for number in range(TRACES_KEPT - 1):
        live.trace(0, f"{TEXT} {number}")
        assert live.trace(0, TEXT) is first
    for number in range(TRACES_KEPT):
        live.trace(0, f"{TEXT} {number} again")
    assert live.trace(0, TEXT) is not first


class TestForms:
    def test_options_are_declared_and_read_nothing_on_the_server(self):
        every = {verb: forms.form_options(verb) for verb in forms.EXCLUDED_OPTIONS}
        assert set(every["effect"]) == {"layers", "top"} and "contrast" not in every["heatmap"]
        for verb, options in every.items():
            declared = analysis_of(verb).options
            for name, option in options.items():
                assert option is declared[name] and option.reads is None and not option.no_effect
                left = forms.form_values(verb, {name: forms.shown(option)})
                assert option.is_default(left.get(name))
            assert set(forms.EXCLUDED_OPTIONS[verb]) <= set(declared)  # none that is gone

    def test_heads_half_lives_and_parts_are_shown(self, live, models):
        rows = live.heatmaps(CLASSIFIER, TEXT, layer="0", heads="all")[0]
        (found,) = selection_heatmap(models[CLASSIFIER], TEXT, layers=[0], heads="all")
        assert rows.count('<p class="tokens">') == 1 + len(found.heads)
        options = ({"heads": "all"}, {"half_lives": True}, {})
        tables = [live.heatmaps(CLASSIFIER, TEXT, layer="0", **each)[0].count("<table") for each in options]
        assert tables == [1, 1, 0]
        assert "half-life in tokens" in live.heatmaps(CLASSIFIER, TEXT, layer="mean", half_lives=True)[0]
        heads = live.row(CLASSIFIER, TEXT, "3", layer=0, heads="all")
        maps = implicit_attention(models[CLASSIFIER], TEXT, layers=[0], heads="all", rows=[3])[0].maps
        assert re.findall(r"<b>layer 0 · head (\d+)", heads) == [each.head for each in maps] and len(maps) > 1


class TestVerb:
    @pytest.mark.parametrize(("arguments", "line"), [
        (("demo/sst2-mamba2", "--host", "203.0.113.7"),
         "cannot listen on 203.0.113.7: Cannot assign requested address; give another --host or --port"),
        (("demo/sst2-mamba2", "--host", "\x80"),
         "cannot listen on \\x80: encoding of hostname failed; give another --host or --port"),
        (("demo/sst2-mamba2", "--max-tokens", "0"), "max_tokens is 0; allowed is a whole number from 1 on"),
    ])  # fmt: skip
    def test_refusals_are_one_line(self, capsys, arguments, line):
        assert cli.run(["serve", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err == f"analyze: {line}\n"

    def test_loopback(self):
        assert all(map(_is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "localhost")))
        assert not any(map(_is_loopback, ("0.0.0.0", "::", "192.168.0.7", "example.org")))
