"""Result of typing errors, or of noise in series: accuracy at each rate, and texts whose answer changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup
from pandas import DataFrame
from rich.text import Text
from ssmscope.api.scores import LOWER, Changed, Score, ScoreMaker, average, first_wrong, lost, named
from ssmscope.attacks.closing import AccuracyCurve, Flips, closing, percent, tidy
from ssmscope.attacks.words.result import STYLE, in_tags
from ssmscope.core.bootstrap import Estimate
from ssmscope.render.blocks import Block, Custom, Prose
from ssmscope.render.table import Cell, Line, Table, in_percent, table
from ssmscope.render.tokens import visible
from ssmscope.render.worddiff import html_diff, rich_diff

CHANGES = {
    "typed": ("Typing errors", "errors in {:.3g} % of the letters"),
    "gaussian": ("Gaussian noise", "noise of {:.3g} % of a standard deviation"),
    "dropped": ("Dropped steps", "{:.3g} % of the steps dropped"),
    "shifted": ("Shifts", "shifts by up to {:.3g} % of the length"),
}
"""Changes, those of texts first: their names, and how much of them there is."""


@dataclass(frozen=True)
class NoiseLevel(Flips):
    """Estimates at one rate."""

    rate: float
    """Probability that a letter is drawn for an error, or size of the change of a series."""
    errors: float = math.nan
    """Errors per letter of these texts, fewer than the rate says where a swap takes a letter with an error."""

    def said(self, change: str) -> str:
        """Return how much of a change there is, in words."""
        share = self.rate if math.isnan(self.errors) else self.errors
        return CHANGES[change][1].format(100 * share)


@dataclass(frozen=True)
class Mistyped:
    """A text whose right answer changes, at the lowest rate at which it does."""

    row: int
    """Place among the result's examples, from 0."""
    rate: float
    text: str
    typed: str
    label: int
    answer: int


@dataclass(frozen=True)
class NoiseCurve(AccuracyCurve, kind="noise"):
    """Accuracy of a model on texts with more and more typing errors, or on series with more and more noise."""

    classes: tuple[str, ...]
    levels: tuple[NoiseLevel, ...]
    average_drop: Estimate
    """Mean drop over the rates."""
    mistyped: tuple[Mistyped, ...]
    """The first texts whose answer changes; none of series."""
    change: str = "typed"
    """One of `CHANGES`."""

    def verdict(self, at: int = 0) -> str:
        most = self.levels[-1]
        return (
            f"average drop {in_percent(self.average_drop)}, {in_percent(most.drop, interval=False)} with "
            f"{most.said(self.change)}"
        )

    @classmethod
    def compare(cls, results: Sequence[NoiseCurve], labels: Sequence[Sequence[str]]) -> Table:
        lines = []
        less: list[str] = []
        for result, (label,) in zip(results, labels):
            cells = {"clean accuracy": Cell(result.clean)}
            drops = {f"drop at {100 * one.rate:g} %, %": percent(one.drop) for one in result.levels}
            drops["average drop, %"] = percent(result.average_drop)
            less += drops
            lines.append(Line((label,), cells | drops, "all"))
        note = "Drop: 1 − accuracy with errors or noise at that rate / clean accuracy."
        return table(("model",), lines, more=["clean accuracy"], less=less, note=note)

    @property
    def headline(self) -> str:
        most = self.levels[-1]
        return (
            f"{CHANGES[self.change][0]} on {self.model_name}: accuracy {self.clean.value:.3f} clean, "
            f"{most.accuracy.value:.3f} with {most.said(self.change)}"
        )

    def card_scores(self, models: Sequence[str] = ()) -> Iterator[Score]:
        assert self.right is not None
        make, every = ScoreMaker(self, models), [lost(self.right[0], one) for one in self.right[1:]]
        yield make("noise.drop", self.average_drop, LOWER, harm=True, **average(every))
        for level, one in zip(self.levels, every):
            yield make(named("noise.drop", f"{100 * level.rate:g} %"), level.drop, LOWER, **average([one]))

    def changed_answers(self, texts: Callable[[], Sequence[str]]) -> Iterator[Changed]:
        from ssmscope.attacks.noise.typos import with_typos

        if self.change != "typed":
            return
        for text, at in first_wrong(self.right, texts):
            rate = self.levels[at].rate
            typed = with_typos(text, rate, self.provenance["seed"])
            yield Changed(text, typed, f"typing errors at a rate of {100 * rate:g} %")

    def sketch(self, at: int = 0) -> Markup:
        from ssmscope.render.sketches import curve

        found = [self.clean, *(one.accuracy for one in self.levels)]
        return curve(f"accuracy by rate of {CHANGES[self.change][0].lower()}", [one.value for one in found])

    def to_frame(self) -> DataFrame:
        """A row for the clean texts, each rate, and the average over the rates. Columns: part ("clean", "rate",
        "average"), rate, accuracy, drop (relative, in percent), flipped (of the examples right when clean), log_odds
        (the mean change); the 95 % interval of each is in columns ending in _low and _high."""
        rows: list[dict[str, Any]] = [{"part": "clean", "accuracy": self.clean}]
        rows += [one.row(part="rate", log_odds=one.log_odds_change) for one in self.levels]
        rows.append({"part": "average", "drop": self.average_drop.times(100)})
        return tidy(rows, ["part", "rate", "accuracy", "drop", "flipped", "log_odds"])

    def blocks(self) -> Iterable[Block]:
        yield from self.opening()
        yield self._levels_table()
        if self.mistyped:
            yield Prose("Texts whose answer changes", "heading")
            yield Custom(lambda colours: terminal_texts(self), lambda: html_texts(self), STYLE)
        yield from closing(self, self.notes)

    def _levels_table(self) -> Table:
        lines = [Line(("clean",), {"accuracy": Cell(self.clean)})]
        for one in self.levels:
            cells = {"errors per letter": Cell(text=f"{one.errors:.3f}"), **one.cells()}
            lines.append(Line((f"{100 * one.rate:g} %",), cells))
        lines.append(Line(("average",), {"drop in %": percent(self.average_drop)}))
        note = (
            "rate: probability of an error in a letter; a swap takes the next letter with its error; drop: "
            "1 − accuracy / clean accuracy; flipped: share of the texts answered correctly when clean whose "
            "answer changes."
        )
        return replace(table(("rate",), lines), note=note)


MAX_TERMINAL_TEXTS = 5


def _turn(result: NoiseCurve, each: Mistyped) -> str:
    return f"{visible(result.classes[each.label])} → {visible(result.classes[each.answer])}"


def terminal_texts(result: NoiseCurve) -> Iterator[Text]:
    for each in result.mistyped[:MAX_TERMINAL_TEXTS]:
        line = Text(f"{100 * each.rate:g} %, {_turn(result, each)}: ", style="bold")
        yield line.append_text(rich_diff(visible(each.text), visible(each.typed)))


def html_texts(result: NoiseCurve) -> Markup:
    rows = Markup("")
    for each in result.mistyped:
        text = Markup(html_diff(each.text, each.typed))
        cells = in_tags("td", (f"{100 * each.rate:g} %", _turn(result, each)))
        rows += Markup('<tr>{}<td class="text">{}</td></tr>').format(cells, text)
    table = Markup(
        '<div class="wide" tabindex="0"><table class="texts"><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    )
    return table.format(in_tags("th", ("rate", "class", "text")), rows)
