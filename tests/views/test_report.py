"""The whole page of a report of hand-made results, and its data."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import attended
import numpy as np
import pandas as pd
import pytest
from described import check, spread, tags
from matplotlib.figure import Figure
from reported import PROVENANCE, entry, failed
from ssmscope.api.results import Result
from ssmscope.interp.heatmap.scored_text import ScoredText
from ssmscope.interp.heatmap.text_result import SelectionHeatmap
from ssmscope.render.blocks import Block, Custom, Picture, Prose, TokenRow, TokenRows, TokenText
from ssmscope.render.table import Cell, Line, Table, number_cell, table
from ssmscope.reports import page
from ssmscope.reports.grouping import groups
from ssmscope.reports.store import LEFT_OUT, MISSING, Report, ReportEntry

TOKENS = ("[CLS]", " A", " won", "der", " <film>", "\n")


@dataclass(frozen=True)
class Every(Result, kind="every-block-test"):
    """A result with every kind of block."""

    size: int

    def to_frame(self) -> pd.DataFrame:
        return pd.DataFrame({"x": range(self.size)})

    def verdict(self, at: int = 0) -> str:
        return f"verdict {at} of {self.size}"

    @property
    def queries_made(self) -> str:
        return f"{self.size} queries" if self.size > 12 else ""

    @classmethod
    def compare(cls, results: Any, labels: Any) -> Table:
        return table(
            ("model",), [Line((str(names),), {"x": number_cell(one.size)}) for one, names in zip(results, labels)]
        )

    def blocks(self) -> Iterator[Block]:
        yield Prose("a title", "title")
        yield Prose("a heading", "heading")
        yield Prose("a <note>", "note")
        lines = [Line((str(at),), {"x": Cell(text=f"{at}")}) for at in range(self.size)]
        yield replace(table(("row",), lines), title="A title" * (self.size > 12), brief=2)
        yield Picture(Figure, "a picture", vector=self.size > 12)
        yield Picture(Figure, "folded", folded=True)
        yield Custom(html=lambda: "<p>asked</p>", script="asked()", style=".asked {}", on_request=True)
        yield Custom(html=lambda: "<p>shown</p>")
        yield Custom(html=lambda: "")
        yield Custom(lambda colours: [])
        row = TokenRow(
            "ig", spread(6, low=-1, seed=self.size), (-1.0, 1.0), True, marked=(1, 5), against=(2, 3), remark="r"
        )
        other = TokenRow("a\nb", spread(6, seed=2), (0.0, 1.0), outside=np.arange(6) % 5 == 0, own=(0.25, 0.5))
        text = TokenText(TOKENS, (None, 0, 1, 1, 2, None), (row, other), "y\nes", 0.75, "about\tit")
        image = replace(text, pixels=np.ones((1, 5, 1)))
        of = "method" if self.size > 12 else "layer"
        block = TokenRows(
            (text, image, replace(text, tokens=TOKENS[:3], words=(None,) * 3, rows=(row, row))), of, "s", "n", "m"
        )
        yield block
        yield replace(block, score="s2")


def heatmap(model: str, score: str, seed: int) -> SelectionHeatmap:
    scores = spread(1, 6, seed=seed).astype(np.float32)
    one = ScoredText(TOKENS, (None, 0, 1, 1, 2, 3), scores, scores[0], (2, 3), "yes", 0.75)
    about = {"model": model, "fingerprint": f"of {model}", "options": {"score": score}}
    return SelectionHeatmap(about, (one,), score, (seed,), 3, False)


def entries() -> list[ReportEntry]:
    return [replace(one, key=f"key-{number}") for number, one in enumerate(made_entries())]


def made_entries() -> Iterator[ReportEntry]:
    for name in ("a", "b"):
        for score in ("survival", "write"):
            made = heatmap(name, score, len(score))
            yield entry("heatmap", made, heading="What is kept", models=(name,), options={"score": score, "at": None})
    attention = attended.make(
        attended.make_text(tokens=TOKENS, maps=2), attended.make_text(5), attended.make_text(tokens=TOKENS), model="a"
    )
    attention = replace(attention, provenance={"model": "a", "fingerprint": "of a"})
    yield entry("attention", attention, models=("a",), seconds=119.96)
    yield entry("attention", replace(attention, level="ssm"), models=("a",))
    yield entry("attention", replace(attention, level="gradient"), models=("a",), heading="More attention")
    yield entry(
        "every", Every({"model": "a, b", "list": [1, True, None], "none": []}, 13), models=("a", "b"), seconds=7300.4
    )
    yield entry("every", Every({"model": "c"}, 12), Every({"model": "c"}, 3), heading="Every block", models=("c",))
    yield failed("words", "no file\n<b>glove</b>" + "e" * 300, "Traceback:\n  line 1", models=("a",))
    yield failed("words", "", "", models=("b",))
    yield entry("words", models=("c",), state=MISSING, seconds=None, heading="More words")
    yield entry("words", models=("d",), state=MISSING, seconds=None, error="unfinished", heading="More words")
    yield entry("words", models=("e",), state=LEFT_OUT, error="it has no answers", seconds=None, heading="More words")
    yield entry("every", heading="Nothing", models=("a",))


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out pictures, which take most of the time."""
    monkeypatch.setattr(Result, "figure", lambda result: Figure())
    monkeypatch.setattr("ssmscope.render.html.data_uri", lambda figure, vector: f"data:{vector}")


def shown(report: Report) -> list[str]:
    return tags(page.render(report))


def few_models() -> Iterator[str]:
    about = {**PROVENANCE, "plan": "a\nplan " + "x" * 400, "deep": {"er": {"and": [1, 2.5, None, False], "more": ()}}}
    yield from shown(Report("A <report>", tuple(entries()), about))
    yield from tags(Every({"model": "in a notebook"}, 13)._repr_html_())


def many_models() -> Iterator[str]:
    yield from shown(Report("Two", tuple(entries()[1:3]), {}))
    yield from shown(Report("One", tuple(entries()[:1]), {}))[:20]
    yield from shown(Report("None", (), {}))


def limits() -> Iterator[str]:
    report = Report("Cut", tuple(entries()), {})
    sizes = {name: getattr(page, name) for name in ("MAX_TOKENS_PER_TEXT", "MAX_BYTES", "MAX_NAME_CHARACTERS")}
    size = 6 * (16 + 6) + 300
    more = [{"MAX_BYTES": 4 * size + 6 * (16 + 12) + 300 - less} for less in (0, 1)]
    parts = [each for group in groups(report)[::2] for each in page._parts(page.items(group))]
    rows = [(one, part.block) for one, part in parts if isinstance(part.block, TokenRows)]
    for limit in (
        {"MAX_TOKENS_PER_TEXT": 3}, {"MAX_BYTES": size}, {"MAX_BYTES": size - 1}, {"MAX_BYTES": 2 * size}, *more,
    ):  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            for name, most in {**sizes, **limit}.items():
                patch.setattr(page, name, most)
            yield f"{limit}: {page.packed(rows, {})}"
    for words in (14, 15, 16):
        yield page.name_of([(bool(at), "abc") for at in range(words)])
    yield page.name_of([(False, "x" * 60)]) + page.name_of([(True, "x" * 60)]) + page.name_of([])
    for seconds in (0.04, 119.94, 120.0, 7199.4, 7199.6, 7260.0, 90000.0):
        yield page.duration(seconds)
    yield page.shortened("x" * 300) + page.shortened("x" * 301) + page.shortened("y" * 20, 10)
    yield f"{page.flatten({'a': {'b': np.array([1, 2]), '': (True, None)}, 'c': [], 'd': 'x' * 12}, 'p', 10)}"
    for about in ({"fingerprint": "f", "model": "m"}, {"fingerprint": "", "model": "m"}, {}):
        yield page.model_of(Every(about, 3))


CASES: dict[str, Callable[[], Iterator[str]]] = {
    f"report-{case.__name__.replace('_', '-')}": case for case in (few_models, many_models, limits)
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_shown(name: str) -> None:
    check(name, CASES[name]())


def test_a_report_without_a_time_takes_none() -> None:
    with pytest.raises(ValueError):
        page._island({"end": math.nan})
    missing = entry("words", models=("c",), state=MISSING, seconds=None)
    assert page._counts(Report("t", (missing,), {})) == "1 entries: 1 not run yet; 0.0 s of computing"
    assert page._counts(Report("t", (), {})) == "0 entries: none; 0.0 s of computing"
