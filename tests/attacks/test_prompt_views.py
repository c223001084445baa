"""Views of attacks on prompts: the differences between prompts, the table, the picture and the page."""

from __future__ import annotations

import html
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from drawn import drawn, labels, outside, overlapping

import ssmscope
from ssmscope.attacks.prompts.result import (
    UNDEFINED,
    AttackedPrompt,
    Cost,
    PromptAttack,
    PromptAttacker,
    by_template,
    html_prompts,
    terminal_prompts,
)
from ssmscope.core.bootstrap import Estimate
from ssmscope.render.worddiff import Piece, html_diff, rich_diff, word_diff

NAMES = ("stresstest", "checklist", "deepwordbug", "textbugger", "textfooler", "bertattack", "semantic")


def around(value: float) -> Estimate:
    return Estimate(value, value - 0.05, value + 0.04)


def attacked(number: int = 6, names=NAMES, skipped: tuple[int, ...] = (), told=None) -> PromptAttack:
    """Made-up numbers of as many attacks and templates."""
    templates = tuple(f"Is it <b>good</b> & {i} 'positive'?\nText: {{content}}\nAnswer:" for i in range(number))
    clean = tuple(around(0.0 if i in skipped else 0.9 - 0.03 * i) for i in range(number))
    attacks = []
    for row, name in enumerate(names):
        prompts = []
        for i, template in enumerate(templates):
            if i in skipped:
                prompts.append(AttackedPrompt(None, UNDEFINED, UNDEFINED, 0))
                continue
            hit = 0.8 - 0.1 * row - 0.02 * (i * 5 % 7)
            worst = template.replace("good", "g<ood") if row % 2 else template + " and <i>true</i>"
            prompts.append(AttackedPrompt(worst, around(hit), around(1 - hit / clean[i].value), 3 + i))
        there = [i for i in range(number) if i not in skipped]
        drops = [prompts[i].drop.value for i in there]
        attacks.append(
            PromptAttacker(
                name=name,
                prompts=tuple(prompts),
                accuracy=around(float(np.mean([prompts[i].accuracy.value for i in there]))) if there else UNDEFINED,
                drop=around(float(np.mean(drops))) if there else UNDEFINED,
                worst=there[int(np.argmax(drops))] if there else None,
                ran=("a part", "another <part>"),
                left_out=("a third part: it needs a file",) if name == "textbugger" else (),
            )
        )
    order = sorted(
        (at for at, one in enumerate(attacks) if one.worst is not None), key=lambda at: -attacks[at].drop.value
    )
    return PromptAttack(
        provenance=dict(model="runs/mine", data=dict(name="sst2", split="test", fingerprint="0" * 16, examples=1821)),
        templates=templates,
        clean=clean,
        average_clean=around(float(np.mean([each.value for each in clean]))),
        attacks=tuple(attacks),
        worst=told or tuple(order[:1]),
        cost=Cost(12345, 1234, 5.678),
        notes=("something to know",),
    )


class TestWordDiff:
    def test_by_hand(self):
        assert word_diff("a good film.", "a goood film!") == (
            Piece("same", "a "),
            Piece("removed", "good"),
            Piece("added", "goood"),
            Piece("same", " film"),
            Piece("removed", "."),
            Piece("added", "!"),
        )
        assert word_diff("it", "it  now") == (Piece("same", "it"), Piece("added", "  now"))
        assert word_diff("it's so", "so") == (Piece("removed", "it's "), Piece("same", "so"))
        assert word_diff("", "") == () and word_diff("a", "a") == (Piece("same", "a"),)

    def test_pieces_join_to_both_texts(self):
        draw = np.random.default_rng(0)
        alphabet = list("ab  \n.'{}<&é—𝟕_-")
        for _ in range(300):
            before, after = ("".join(draw.choice(alphabet, draw.integers(0, 25))) for _ in range(2))
            pieces = word_diff(before, after)
            assert "".join(p.text for p in pieces if p.kind != "added") == before
            assert "".join(p.text for p in pieces if p.kind != "removed") == after
            assert all(p.text for p in pieces) and {p.kind for p in pieces} <= {"same", "removed", "added"}
            assert all(a.kind != b.kind for a, b in zip(pieces, pieces[1:]))

    def test_in_long_texts_frequent_words_count_too(self):
        between = " so" * 300
        pieces = word_diff(f"a{between} good film", f"the{between} bad film")
        assert [p.text for p in pieces if p.kind != "same"] == ["a", "the", "good", "bad"]

    def test_in_a_terminal(self):
        line = rich_diff("a [bad] film\n", "a [good] film\nx")
        assert line.plain == "a [[-bad-]{+good+}] film⏎{+x+}"
        styles = {line.plain[span.start : span.end]: str(span.style) for span in line.spans}
        assert styles == {"[-bad-]": "red strike", "{+good+}": "green underline", "{+x+}": "green underline"}

    def test_as_html(self):
        assert html_diff("a <b> c", "a <i> c & d") == ("a &lt;<del>b</del><ins>i</ins>&gt; c<ins> &amp; d</ins>")


class Page(HTMLParser):
    """Tags that are opened and closed, in order, and the texts of cells."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("img", "br", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


class TestFrame:
    def test_rows(self):
        frame = attacked(3).to_frame()
        assert frame.part.tolist() == ["template", "template", "template", "average", "worst"] * 7
        assert frame.columns[1:7].tolist() == ["part", "attack", "template", "clean", "clean_low", "clean_high"]
        row = frame[(frame.attack == "deepwordbug") & (frame.template == 1) & (frame.part == "template")].iloc[0]
        found = attacked(3).attacks[2].prompts[1]
        assert row["drop"] == 100 * found.drop.value and row.drop_low == 100 * found.drop.low
        assert row.accuracy == found.accuracy.value and row.clean == attacked(3).clean[1].value
        assert row.prompt == found.prompt and row.clean_prompt == attacked(3).templates[1] and row.tried == 4
        mean = frame[(frame.attack == "deepwordbug") & (frame.part == "average")].iloc[0]
        assert mean["drop"] == 100 * attacked(3).attacks[2].drop.value and mean.tried == 3 + 4 + 5
        worst = frame[frame.part == "worst"]
        assert worst.template.tolist() == [one.worst for one in attacked(3).attacks]

    def test_no_time_of_the_clock(self):
        assert not any("second" in name or "run" in name for name in attacked().to_frame().columns)

    @pytest.mark.parametrize("given", [False, True])
    def test_every_table_says_whose_drops_they_are(self, given, tmp_path):
        found = attacked(2)
        found.provenance["options"] = {"as_promptbench": given}
        said = f"Measured as {'PromptBench' if given else 'ssmscope'} does: a search "
        assert found.measured.startswith(said) and found.measured.endswith("own drops.")
        frame = found.to_frame()
        assert frame.attrs["caption"] == found.measured
        assert set(frame["measured_as"]) == {"promptbench" if given else "ssmscope"}
        paths = found.save(tmp_path, "prompts")
        assert ("promptbench" in paths["csv"].read_text()) == given
        assert found.measured in " ".join(str(found).split())
        assert found.measured in html.unescape(found.to_html())
        shown = labels(found.figure())
        assert any(f"measured {'' if given else 'not '}as PromptBench" in text for text in shown)
        note = PromptAttack.compare([found, attacked(2)], [["a"], ["b"]]).note
        assert said in note and "Measured as ssmscope does" in note

    def test_is_saved_and_read_back(self, tmp_path):
        for result in (attacked(), attacked(1), attacked(3, skipped=(1,)), attacked(2, skipped=(0, 1))):
            assert type(result).from_dict(json.loads(result.to_json())) == result
        paths = result.save(tmp_path, "prompts")
        assert ssmscope.Result.load(paths["json"]) == result


class TestTerminal:
    def test_what_it_says(self):
        shown = attacked().to_text(full=True)
        lead = "Prompt attacks on runs/mine: accuracy 0.825 clean, 0.137 under the worst on average, semantic"
        assert lead in " ".join(shown.split())
        for name in NAMES:
            assert shown.count(f"\n{name} ") >= 1
        assert re.search(
            r"stresstest +0\.7\d\d \[0\.\d+, 0\.\d+\] +\d+\.\d \[-?\d+\.\d, \d+\.\d\] +\d+\.\d \(template \d\)", shown
        )
        assert "{+ and <i>true</i>+}" in " ".join(shown.split()) and "<b>[-good-]{+g<ood+}</b>" in shown
        assert "Note: textbugger ran without a third part: it needs a file." in shown and "something to know." in shown
        assert "12,345 filled prompts, 1,234 of them run by the model, in 5.7 s." in shown
        assert max(map(len, shown.splitlines())) <= 100 and "nan" not in shown

    def test_no_attack_is_called_the_worst_that_cannot_be_told_from_all_others(self):
        assert attacked(2, NAMES[:3], told=(2, 1, 0)).headline.endswith(
            "clean, 0.550 to 0.750 attacked, under no attack clearly lowest"
        )
        some = attacked(2, NAMES[:3], told=(2, 1)).headline
        assert some.endswith("0.550 under the worst on average, deepwordbug, indistinguishable from 1 other")
        assert attacked(2, NAMES[:1]).headline.endswith(" clean, 0.750 under stresstest")

    def test_one_template(self):
        shown = str(attacked(1, NAMES[:2]))
        assert "(template 0)" not in shown and "one template;" in shown and "checklist: " in shown

    def test_nothing_to_attack(self):
        shown = str(attacked(2, NAMES[:2], skipped=(0, 1)))
        assert "no drop defined" in shown and "nan" not in shown and " – " in shown

    def test_a_prompt_that_is_not_worse(self):
        template = "Say: {content}"
        same = AttackedPrompt(template, around(0.9), Estimate(0, 0, 0), 4)
        one = PromptAttacker("deepwordbug", (same,), around(0.9), Estimate(0, 0, 0), 0, (), ())
        result = attacked(1)
        result = PromptAttack(
            result.provenance, (template,), (around(0.9),), around(0.9), (one,), (0,), result.cost, ()
        )
        assert "deepwordbug: no prompt it tried is worse than the template" in str(result)
        assert "No prompt it tried is worse than the template." in result._repr_html_()


class TestFigure:
    def test_marks(self):
        result = attacked(3, NAMES[:2])
        (axes,) = result.figure().axes
        dots = [line for line in axes.lines if line.get_marker() == "o"]
        values = [line.get_xdata()[0] for line in dots]
        expected = [
            value
            for values in ([result.clean] * 2, [[each.accuracy for each in one.prompts] for one in result.attacks])
            for found in values
            for value in (each.value for each in found)
        ]
        assert values == expected
        bars = [tuple(line.get_xdata()) for line in axes.lines if line.get_marker() == "None"]
        assert {(found.accuracy.low, found.accuracy.high) for one in result.attacks for found in one.prompts} <= set(
            bars
        )
        assert [text.get_text() for text in axes.get_yticklabels()] == [
            "stresstest 0",
            "1",
            "2",
            f"{NAMES[1]} 0",
            "1",
            "2",
        ]
        texts = [text.get_text() for text in axes.texts]
        assert any(re.fullmatch(r"drop \d+\.\d % \[−?\d+\.\d, \d+\.\d\]", t) for t in texts)

    @pytest.mark.parametrize(("number", "names"), [(6, NAMES), (1, NAMES[:1]), (2, NAMES[:4])])
    def test_nothing_overlaps(self, number, names):
        figure, texts = drawn(attacked(number, names))
        assert not overlapping(texts) and not outside(figure, texts)

    def test_names_of_any_length(self):
        result = attacked(2)
        for name in ("$m^{x$", "runs/" + "Wide-Model" * 20):
            provenance = {**result.provenance, "model": name, "data": {**result.provenance["data"], "name": name}}
            figure = PromptAttack(**{**vars(result), "provenance": provenance}).figure()
            figure.draw_without_rendering()
            assert all(text.get_window_extent().x1 < figure.get_window_extent().x1 for text in figure.texts)

    def test_without_a_drop(self):
        (axes,) = attacked(2, NAMES[:2], skipped=(0, 1)).figure().axes
        assert "no drop defined" in [text.get_text() for text in axes.texts]


class TestPage:
    def test_is_whole_and_escaped(self):
        text = attacked()._repr_html_().partition('<div class="ssmscope-outline"')[0]
        assert Page(text).open == [] and "nan" not in re.sub('base64,[^"]*', "", text)
        assert "<b>good</b>" not in text and "<i>true" not in text and "<part>" not in text
        for template in attacked().templates:
            assert template in html.unescape(text)
        assert "textbugger ran without a third part" in text and "5.7 s" in text and "something to know." in text

    def test_worst_prompts_show_what_changed(self):
        text = attacked()._repr_html_()
        assert "<ins> and &lt;i&gt;true&lt;/i&gt;</ins>" in text
        assert "&lt;b&gt;<del>good</del><ins>g&lt;ood</ins>&lt;/b&gt;" in text
        semantic = text[text.index("<b>semantic") :]
        assert "<ins>" not in semantic[: semantic.index("<details>")]  # a rewritten prompt is shown as it is

    def test_best_and_worst_of_each_attack(self):
        result = attacked(3)
        _, accuracies, drops = (
            re.findall(r"<tr>(.*?)</tr>", found)
            for found in re.findall(r"<tbody>(.*?)</tbody>", result._repr_html_(), re.S)
        )
        assert len(accuracies) == 1 + len(NAMES) and len(drops) == len(NAMES)
        for one, accuracy, drop in zip(result.attacks, accuracies[1:], drops):
            cells = re.findall(r"<td(.*?)</td>", drop)
            values = [found.drop.value for found in one.prompts]
            assert len(cells) == 4 and [i for i, cell in enumerate(cells) if "best" in cell] == [int(np.argmin(values))]
            assert [i for i, cell in enumerate(cells) if "worst" in cell] == [int(np.argmax(values))]
            assert f">{one.prompts[0].accuracy.value:.3f}" in accuracy
            assert f"{100 * one.drop.value:.1f} ".replace("-", "−") in cells[3]

    def test_every_drop_is_in_percent_with_its_interval(self):
        result = attacked(3)
        *_, drops = re.findall(r"<tbody>(.*?)</tbody>", by_template(result), re.S)
        for one, line in zip(result.attacks, re.findall(r"<tr>(.*?)</tr>", drops)):
            told = html.unescape(re.sub("<.*?>", " ", line))
            for found in (*(each.drop for each in one.prompts), one.drop):
                ends = [f"{100 * end:.1f}".replace("-", "−") for end in (found.value, found.low, found.high)]
                assert re.search(rf"{ends[0]}[\s★▼]+\[{ends[1]}, {ends[2]}\]", told), (one.name, ends)

    def test_equal_drops_are_none_the_best(self):
        result = attacked(2, NAMES[:1])
        (one,) = result.attacks
        same = replace(one, prompts=tuple(replace(each, drop=around(0.25)) for each in one.prompts))
        text = by_template(replace(result, attacks=(same,)))
        assert ' best"' not in text and ' worst"' not in text
        twice = replace(one, prompts=tuple(replace(one.prompts[0], drop=around(drop)) for drop in (0.25, 0.5, 0.25)))
        line = re.findall(r"<tr>(.*?)</tr>", by_template(replace(attacked(3, NAMES[:1]), attacks=(twice,))))[-1]
        marked = re.findall(r"<td(.*?)</td>", line)
        assert ["best" in cell for cell in marked] == [True, False, True, False]
        assert ["worst" in cell for cell in marked] == [False, True, False, False]

    def test_numbers_come_before_the_prompt(self):
        text = html_prompts(attacked(2, NAMES[:1]))
        numbers, prompt = text.index("<b>stresstest, template"), text.index('<p class="prompt">')
        assert numbers < prompt < text.index("<ins>") < text.index("<summary>Templates</summary>")
        one = attacked(2, NAMES[:1]).attacks[0]
        found, clean = one.prompts[one.worst], attacked(2).clean[one.worst]
        assert f"{clean.value:.3f} → {found.accuracy.value:.3f}, drop " in text

    def test_attacks_without_a_worst_prompt_are_left_out(self):
        result = attacked(2, NAMES[:3])
        mixed = replace(result, attacks=(replace(result.attacks[0], worst=None), *result.attacks[1:]))
        lines = [line.plain for line in terminal_prompts(mixed)]
        assert len(lines) == 2 and lines[0].startswith(NAMES[1]) and lines[1].startswith(f"\n{NAMES[2]}, template ")
        assert f"<b>{NAMES[0]}, template" not in html_prompts(mixed) and f"<b>{NAMES[1]}, template" in html_prompts(
            mixed
        )
        assert [line.plain.partition(":")[0] for line in terminal_prompts(attacked(1, NAMES[:1]))] == [NAMES[0]]

    def test_one_template_has_no_best(self):
        text = attacked(1)._repr_html_()
        assert ' best"' not in text and ">average</th>" not in text and "template 0<" in text

    def test_skipped_templates(self):
        text = attacked(3, skipped=(1,))._repr_html_()
        assert text.count(">–</td>") == 2 * len(NAMES) and not math.isnan(
            attacked(3, skipped=(1,)).attacks[0].drop.value
        )
        assert "no drop" in attacked(2, skipped=(0, 1))._repr_html_()
