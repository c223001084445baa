"""Attacks on single texts as people see them: picture, terminal, page, files."""

from __future__ import annotations

import matplotlib
import pytest
from drawn import drawn, outside, overlapping
from matplotlib.figure import Figure

from ssmscope.attacks.words.result import AttackedText, WordAttack, measure

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
