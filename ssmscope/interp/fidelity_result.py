"""What a measurement of fidelity gives: numbers per method with their intervals, curves, differences, tables."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console

from ssmscope.bootstrap import Estimate
from ssmscope.errors import InputError, did_you_mean
from ssmscope.interp.plausibility import MEASURES as AGREEMENT
from ssmscope.results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import ConsoleOptions, RenderableType


MEASURES = {
    "delta": ("ΔA", True),
    "morf": ("A_MoRF", False),
    "lerf": ("A_LeRF", True),
    "comprehensiveness": ("comprehensiveness", True),
    "sufficiency": ("sufficiency", False),
}
"""The measures by name, how the views call them, and whether more is better."""

MORF, LERF = 0, 1
RANDOM = "random"
"""The name of the random rankings beside the methods'."""


@dataclass(frozen=True)
class Fidelity(Result, kind="fidelity"):
    """What hiding the tokens that each method names does to the output, text by text and on average."""

    methods: tuple[str, ...]
    measures: tuple[str, ...]
    value: str
    """What f is: "probability" or "logit"."""
    texts: np.ndarray
    """(texts,) int64: which of the data's texts are measured, those left out being too short."""
    predicted: np.ndarray
    """(texts,) int64: the class predicted on the clean text."""
    clean: np.ndarray
    """(texts,) f of the clean text."""
    values: np.ndarray
    """(methods, texts, measures); NaN where a text has no rationale."""
    random: np.ndarray
    """(texts, measures), the mean over the random rankings."""
    rankings: np.ndarray
    """(rankings, measures): each random ranking's mean over the texts."""
    estimates: np.ndarray
    """(methods + 1, measures, 3): mean, low and high end of its interval; the random rankings last."""
    paired: np.ndarray
    """(pairs, measures, 3): the differences of `pairs`."""
    shares: np.ndarray
    """(points,) the shares q of hidden tokens."""
    curve: np.ndarray
    """(methods + 1, 2, points, 3): mean f along MoRF and LeRF with its interval; the random rankings last."""
    marked: float | None
    """The mean share of tokens that people marked; None without rationales."""
    notes: tuple[str, ...]

    @property
    def rows(self) -> tuple[str, ...]:
        """The methods, and the random rankings behind them."""
        return (*self.methods, RANDOM)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """What `paired` holds the differences of, first − second."""
        return tuple(itertools.combinations(self.rows, 2))

    @property
    def data(self) -> str:
        """The name of the data."""
        return str(self.provenance["data"]["name"])

    @property
    def headline(self) -> str:
        model = self.provenance.get("model", "a model")
        best = max(self.methods, key=lambda name: self.estimate(name).value)
        return f"Fidelity of {len(self.methods)} methods on {model}: best ΔA {self.estimate(best).value:.3f} of {best}"

    def estimate(self, method: str, measure: str = "delta") -> Estimate:
        """A measure of a method, or of "random", with its interval.

        Raises:
            InputError: when there is no such method or measure.
        """
        place = [_place(what, name, all) for what, name, all in self._asked(method, measure)]
        return Estimate(*self.estimates[tuple(place)].tolist())

    def difference(self, method: str, other: str = RANDOM, measure: str = "delta") -> Estimate:
        """A measure of a method minus that of another, paired, with its interval.

        Raises:
            InputError: when there is no such method or measure.
        """
        a, m = (_place(what, name, all) for what, name, all in self._asked(method, measure))
        b = _place("method", other, self.rows)
        if a == b:
            return Estimate(0.0, 0.0, 0.0)
        found = self.paired[self.pairs.index((self.rows[min(a, b)], self.rows[max(a, b)])), m].tolist()
        return Estimate(*found) if a < b else Estimate(-found[0], -found[2], -found[1])

    def _asked(self, method: str, measure: str) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
        return ("method", method, self.rows), ("measure", measure, self.measures)

    def best(self, measure: str) -> tuple[str, ...]:
        """The methods of the best mean, several where they are equal; the random rankings take no part."""
        place = _place("measure", measure, self.measures)
        means = self.estimates[:-1, place, 0]
        top = np.nanmax(means) if more_is_better(measure) else np.nanmin(means)
        return tuple(name for name, mean in zip(self.methods, means) if mean == top)

    def to_frame(self) -> DataFrame:
        """A row per method (and "random") and measure: columns method, measure, value, low, high (the 95 % interval),
        texts, and, of the random rankings, spread: the standard deviation of their own means."""
        import pandas as pd

        spread = self.rankings.std(0, ddof=1)
        rows = []
        for number, method in enumerate(self.rows):
            for place, measure in enumerate(self.measures):
                texts = int((~np.isnan(self.random[:, place])).sum())
                own = spread[place] if method == RANDOM else math.nan
                rows.append((method, measure, *self.estimates[number, place].tolist(), texts, own))
        return pd.DataFrame(rows, columns=["method", "measure", "value", "low", "high", "texts", "spread"])

    def curves(self) -> DataFrame:
        """A row per method, ranking ("MoRF", "LeRF") and share q of hidden tokens: mean f with its interval."""
        import pandas as pd

        rows = [
            (method, order, share, *self.curve[number, at, point].tolist())
            for number, method in enumerate(self.rows)
            for at, order in enumerate(("MoRF", "LeRF"))
            for point, share in enumerate(self.shares.tolist())
        ]
        return pd.DataFrame(rows, columns=["method", "ranking", "q", "mean", "low", "high"])

    def differences(self) -> DataFrame:
        """A row per pair of methods ("random" is the second) and measure: the paired difference, first − second."""
        import pandas as pd

        rows = [
            (*pair, measure, *self.paired[number, place].tolist())
            for number, pair in enumerate(self.pairs)
            for place, measure in enumerate(self.measures)
        ]
        return pd.DataFrame(rows, columns=["method", "other", "measure", "difference", "low", "high"])

    def per_text(self) -> DataFrame:
        """A row per text and method (and "random"): columns text (its number in the data), predicted, clean (f of it),
        method, and a column for every measure."""
        import pandas as pd

        parts = []
        for method, values in zip(self.rows, [*self.values, self.random]):
            columns = dict(zip(self.measures, values.T))
            head = {"text": self.texts, "predicted": self.predicted, "clean": self.clean, "method": method}
            parts.append(pd.DataFrame({**head, **columns}))
        return pd.concat(parts, ignore_index=True)

    def table(self, *, style: str = "markdown") -> str:
        """Methods × measures with the best of each marked, as "markdown", "latex" or "csv"."""
        from ssmscope.interp.views.fidelity_table import measure_table

        return measure_table(self, style)

    def figure(self) -> Figure:
        """ΔA by method with its interval, and each method's curves beside those of the random rankings."""
        from ssmscope.interp.views.fidelity_figure import draw

        return draw(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from rich.table import Table
        from rich.text import Text

        data = self.provenance["data"]
        asked = self.provenance["options"]
        table = Table(title=Text(self.headline), title_justify="left", box=None, pad_edge=False)
        table.add_column("method")
        for measure in self.measures:
            arrow = "↑" if more_is_better(measure) else "↓"
            table.add_column(f"{name_of(measure)} {arrow}", justify="right", no_wrap=True)
        best = {measure: self.best(measure) for measure in self.measures}
        for number, method in enumerate(self.rows):
            cells = []
            for place, measure in enumerate(self.measures):
                mean, mark = self.estimates[number, place, 0], "*" if method in best[measure] else " "
                cells.append(Text("–" if math.isnan(mean) else f"{mean:.3f}{mark}"))
            table.add_row(Text(method), *cells)
        yield table
        how = "deleted" if asked["mode"] == "delete" else f"replaced by {_filled(asked['replacement'])}"
        yield Text(
            f"\n{len(self.texts):,} texts of {data['name']} ({data['split']}), tokens {how}, f the {self.value} of the "
            f"predicted class; {len(self.rankings)} random rankings. * the best. ΔA with 95 % bootstrap intervals:"
        )
        beside = Table(box=None, pad_edge=False)
        for heading in ("method", "ΔA", "minus random"):
            beside.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=True)
        for method in self.rows:
            apart = str(self.difference(method)) if method != RANDOM else ""
            beside.add_row(Text(method), str(self.estimate(method)), apart)
        yield beside
        yield from (Text(f"Note: {note}.") for note in self.notes)


def more_is_better(measure: str) -> bool:
    return MEASURES[measure][1] if measure in MEASURES else True


def name_of(measure: str) -> str:
    """How the views call a measure."""
    return MEASURES[measure][0] if measure in MEASURES else AGREEMENT[measure]


def _filled(replacement: str) -> str:
    names = {"mean": "the mean embedding", "zero": "a zero embedding", "pad": "the padding token"}
    return names.get(replacement, f"the token {replacement!r}")


def _place(what: str, name: str, known: Sequence[str]) -> int:
    if name not in known:
        raise InputError(f"there is no {what} {name!r}; allowed are {', '.join(known)}{did_you_mean(str(name), known)}")
    return known.index(name)


def fidelity_table(results: Sequence[Fidelity], *, measure: str = "delta", style: str = "markdown") -> str:
    """A measure of methods × data sets, as in Baleen's Table 2: a row per method and model, a column per data set and
    their average, the best method of each model and data set marked. The random rankings stand below the methods.

    Args:
        results: one per model and data set. A model column comes in when there are several models.
        measure: "delta", "morf", "lerf", "comprehensiveness", "sufficiency"; with rationales "token_f1", "iou_f1",
            "auprc".
        style: "markdown", "latex" (booktabs) or "csv", which has the intervals in columns of their own.

    Raises:
        InputError: no result, two of the same model and data set, an unknown measure or style.
    """
    from ssmscope.interp.views.fidelity_table import data_table

    return data_table(results, measure, style)
