"""Views of attacks on prompts: the differences between prompts, the table, the picture and the page."""

from __future__ import annotations

import re

import numpy as np
import pytest
from drawn import drawn, outside, overlapping

from ssmscope.attacks.prompts.result import UNDEFINED, AttackedPrompt, Cost, PromptAttack, PromptAttacker
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
