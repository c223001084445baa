"""Attacks on single texts as people see them: picture, terminal, page, files."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import matplotlib
import pytest
from drawn import drawn, outside, overlapping
from matplotlib.figure import Figure

import ssmscope
from ssmscope.attacks.words.result import STYLE, SUMMARY, AttackedText, WordAttack, measure

TEXTS = {
    "success": ("a <b>great</b> film & a $x^{y story", "a <b>grate</b> film & a $x^{y stroy", 2),
    "failed": ("fine \x1b[31mred\x07 work", "fnie \x1b[31mred\x07 work", 1),
    "skipped": ("odd one", "odd one", 0),
}


def example(row: int, status: str, changed: int | None = None) -> AttackedText:
    text, attacked, usual = TEXTS[status]
    answer = 1 if status == "failed" else 0
    return AttackedText(
        row=row,
        status=status,
        label=1,
        clean=0 if status == "skipped" else 1,
        answer=answer,
        before=0.9,
        after=0.9 if status == "skipped" else 0.25 + answer / 2,
        queries=1 if status == "skipped" else 20 + row,
        gradients=0,
        words=8,
        changed=usual if changed is None else changed,
        text=text,
        attacked=attacked,
    )


def result(*examples: AttackedText, model: str = "demo/m", data: str = "reviews") -> WordAttack:
    origin = {"name": data, "split": "test", "fingerprint": "0", "examples": len(examples)}
    return WordAttack(
        provenance={"model": model, "data": origin, "options": {}, "seed": 0},
        recipe="deepwordbug",
        labels=("negative", "<positive>"),
        examples=examples,
        **measure(examples, 0),
        ran=("change a character", "no stop word"),
        left_out=("names <of> places: they need a tagger",),
    )


@pytest.fixture
def found() -> WordAttack:
    kinds = ["success"] * 6 + ["failed"] * 2 + ["skipped"] * 2
    changed = [3, 1, 2, 7, 2, 5, None, None, None, None]
    return result(*(example(row, kind, number) for row, (kind, number) in enumerate(zip(kinds, changed))))


class TestResult:
    def test_headline_and_summary(self, found):
        assert found.headline == "deepwordbug on demo/m: accuracy 0.800 clean, 0.200 under attack"
        assert list(found.summary) == list(SUMMARY)
        assert found.summary["success"].value == 0.75 and found.summary["attacked"] == found.attacked

    def test_frame(self, found):
        frame = found.to_frame()
        assert len(frame) == 10 and frame.status.tolist() == [each.status for each in found.examples]
        assert (
            set(frame.label) == {"<positive>"}
            and frame.answer.tolist() == ["negative"] * 6 + ["<positive>"] * 2 + ["negative"] * 2
        )
        assert frame.share.tolist() == [each.changed / 8 for each in found.examples]
        assert frame.columns[-2:].tolist() == ["text", "attacked"]

    def test_successes_come_with_the_fewest_changed_words_first(self, found):
        assert [each.row for each in found.successes] == [1, 2, 4, 0, 5, 3]

    def test_is_saved_and_read_back(self, found, tmp_path):
        paths = found.save(tmp_path, "words")
        again = ssmscope.Result.load(paths["json"])
        assert type(again) is WordAttack and again == found and again.examples == found.examples
        assert again.curve.tolist() == found.curve.tolist()
        json.loads(paths["json"].read_text())


class TestFigure:
    def test_the_curve_is_drawn_with_its_band(self, found):
        (axes,) = found.figure().axes
        (line,) = [line for line in axes.lines if len(line.get_xdata()) > 2]
        assert line.get_xdata().tolist() == [-0.5, *(words + 0.5 for words in range(8))]
        assert line.get_ydata().tolist() == [*found.curve[:, 0], found.curve[-1, 0]]
        assert found.curve[:, 0].tolist() == pytest.approx([0.8, 0.7, 0.5, 0.4, 0.4, 0.3, 0.3, 0.2])
        (band,) = axes.collections
        heights = band.get_paths()[0].vertices[:, 1]
        assert heights.min() == found.curve[:, 1].min() and heights.max() == found.curve[:, 2].max()

    def test_axes_of_the_user_are_drawn_into_and_settings_stay(self, found):
        before, axes = dict(matplotlib.rcParams), Figure().subplots()
        assert found.figure(ax=axes, title="Mine") is axes.figure and dict(matplotlib.rcParams) == before
        assert axes.get_title("left") == "Mine" and axes.get_ylabel() == "accuracy"
        (line,) = [line for line in axes.lines if len(line.get_xdata()) > 2]
        assert line.get_ydata().tolist() == [*found.curve[:, 0], found.curve[-1, 0]]
        assert [text.get_text()[:5] for text in axes.get_legend().get_texts()] == ["clean", "under"]

    @pytest.mark.parametrize("statuses", [["failed"] * 3, ["success"] * 3, ["skipped"] * 3, ["success", "failed"]])
    def test_the_two_accuracies_do_not_overlap_and_stay_on_the_paper(self, statuses):
        found = result(*(example(row, status) for row, status in enumerate(statuses)))
        figure, texts = drawn(found)
        assert not overlapping(texts) and not outside(figure, texts)
        assert {f"clean {found.accuracy.value:.3f}", f"under attack {found.attacked.value:.3f}"} <= {
            t for t, _ in texts
        }

    def test_names_in_the_figure(self, found):
        """A $ starts no formula, and whatever their length names stay on the paper."""
        for name in ("$m^{x$", "runs/" + "Wide-Model" * 20):
            figure = result(*found.examples, model=name, data="$d_{$" * 40).figure()
            figure.canvas.draw()
            edge = figure.get_window_extent().x1
            assert all(text.get_window_extent().x1 < edge for text in figure.texts)
            assert name[:4] in figure.texts[0].get_text() and name[-4:] in figure.texts[0].get_text()


class TestTerminal:
    def test_says_what_happened(self, found):
        shown = found.to_text(full=True)
        joined = " ".join(shown.split())
        for part in (
            found.headline,
            "clean accuracy 0.800 [",
            "success rate 0.750 [",
            "10 examples of reviews (test): 6 answers changed, 2 did not; 2 skipped",
            "Ran: change a character; no stop word.",
            "Note: deepwordbug ran without names <of> places: they need a tagger.",
            "row 1, <positive> → negative (p 0.90 → 0.25)",
            "[-great-]{+grate+}",
        ):
            assert part in joined
        assert max(map(len, shown.splitlines())) <= 100
        assert joined.count("→ negative") == 5  # the first of six successes

    def test_nothing_acts_on_the_terminal(self, found):
        with_control = dataclasses.replace(example(0, "failed"), status="success", answer=0)
        assert "\x1b" not in str(result(with_control)) and "\x07" not in str(result(with_control))

    @pytest.mark.parametrize(("status", "says"), [("skipped", "success rate –"), ("failed", "success rate 0.000")])
    def test_without_a_success(self, status, says):
        shown = str(result(example(0, status), example(1, status)))
        assert says in " ".join(shown.split()) and "fewest" not in shown and "nan" not in shown


class TestPage:
    def test_what_was_changed_is_marked_and_escaped(self, found):
        page = found.to_html()
        assert "&lt;b&gt;<del>great</del><ins>grate</ins>&lt;/b&gt;" in page and "<b>great" not in page
        assert "&lt;positive&gt; → negative" in page and "names &lt;of&gt; places" in page
        assert page.count("<del>") == 6 * 2 + 2 and "odd one" not in page

    def test_long_texts_are_wrapped(self):
        """The last of two rules for the same cell holds."""
        assert STYLE.rindex("pre-wrap") > STYLE.rindex("nowrap")

    def test_totals_and_order(self, found):
        page = found.to_html()
        for name, estimate in found.summary.items():
            digits = 1 if name == "queries" else 3
            assert re.search(rf">{SUMMARY[name]}</th><td class=\"number\">{estimate.value:.{digits}f} <small>\[", page)
        rows = re.findall(r"<tr><td>(\d+)</td><td>([^<]*)", page)
        assert [int(row) for row, _ in rows] == [1, 2, 4, 0, 5, 3, 6, 7]

    def test_of_many_examples_the_first_are_shown(self):
        many = result(*(example(row, "success") for row in range(60)))
        page = many.to_html()
        assert len(re.findall(r"<tr><td>\d", page)) == 40 and "40 of 60 attacked examples" in page
        assert "<script" not in page and "<title>deepwordbug on demo/m" in page

    def test_where_nothing_was_attacked(self):
        none = result(example(0, "skipped"))
        page = none.to_html()
        assert "nothing was attacked" in page and ">–</td>" in page and math.isnan(none.success.value)
        assert not re.search(r"\bnan\b", page.split("base64,")[1].partition('"')[2])
