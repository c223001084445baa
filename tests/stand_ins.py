"""Stand-ins for results, whose numbers can be checked by eye, and a report's verdicts on them. A stand-in holds nothing
that the kind's class lacks."""

import dataclasses
import importlib
import inspect
import math
from typing import Any

import reported
from ssmscope.api import analyses as registry
from ssmscope.api.results import Result
from ssmscope.core.bootstrap import Estimate
from ssmscope.render.table import Table
from ssmscope.reports.grouping import Group, LabelledResult, comparison, verdict

NAN = math.nan


def e(value: float, low: float = NAN, high: float = NAN) -> Estimate:
    return Estimate(value, low, high)


class Stand:
    """Stand-in for a result of a kind, with some of its class's attributes."""

    def __init__(self, kind: str, items: tuple = (), *, model: str = "own", headline: str | None = None, **values):
        importlib.import_module(registry.result_homes()[kind])
        real = Result._kinds[kind]
        self.real = real
        known = {field.name for field in dataclasses.fields(real)} | set(dir(real))
        assert set(values) <= known, f"{real.__name__} has no {sorted(set(values) - known)}"
        assert not items or hasattr(real, "__getitem__") or hasattr(real, "__iter__")
        self.kind, self.items = kind, items
        self.provenance = {"model": model, "fingerprint": "f"}
        self.headline = headline or f"Something of {model}: its own words"
        vars(self).update(values)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the class if it is not given: its verdict, its properties."""
        if name == "real" or not hasattr(self.real, name):
            raise AttributeError(name)
        own = inspect.getattr_static(self.real, name)
        return own.__get__(self, type(self.real))

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self):
        return iter(self.items)

    def __getitem__(self, at: int) -> Any:
        return self.items[at]


def found(result: Any, models: tuple[str, ...] = ("m",), **options: Any) -> LabelledResult:
    entry = reported.entry(result.kind, result, models=models, options=options)
    return LabelledResult(", ".join(models), entry, result)


def said(result: Any, model: str = "m", models: tuple[str, ...] = ("m",)) -> str:
    return verdict(found(result, models), model)


def beside(*results: Any, models: tuple[str, ...] | None = None, kind: str | None = None) -> Table:
    """The table of results of the models a, b, …, or of models that are taken together."""
    entries = tuple(
        reported.entry("verb", result, models=models or ("abcdef"[at],), options={})
        for at, result in enumerate(results)
    )
    return comparison(Group("group", "Group", "verb", entries), kind or results[0].kind)


def shown(table: Table) -> list[tuple[str, ...]]:
    """Every row as it is read: labels, then cells with their marks and intervals."""
    rows = []
    for labels, cells in table.rows:
        texts = [
            " ".join(filter(None, (cell.value, "*" * cell.best, "!" * cell.worst, cell.interval))) for cell in cells
        ]
        rows.append((*labels, *texts))
    return rows
