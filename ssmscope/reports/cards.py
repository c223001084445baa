"""Model cards from a report: `model-index` metadata and a section in Markdown, merged into the model's own card."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard
from yaml import YAMLError
from ssmscope.api.inputs import LANGUAGE_MODEL, PIXEL_CLASSIFIER, TEXT_CLASSIFIER
from ssmscope.api.scores import SHARE_UNIT, Score
from ssmscope.api.writing import write_whole
from ssmscope.data.text import LINE_SOURCES, SOURCES
from ssmscope.errors import InputError
from ssmscope.render.markup import to_markdown
from ssmscope.render.table import Cell, Table, number_cell
from ssmscope.reports.gate_files import gates_headline, gates_table
from ssmscope.reports.grouping import groups, model_names, unique_names, verdict
from ssmscope.reports.intervals import interval
from ssmscope.reports.store import Report

FOLDER = "cards"
"""Folder of a report's cards in its directory."""
BEGIN, END = "<!-- ssmscope report: begin -->", "<!-- ssmscope report: end -->"
"""Marks around the section, which a later report replaces."""
TASKS = {
    TEXT_CLASSIFIER: "text-classification",
    PIXEL_CLASSIFIER: "image-classification",
    LANGUAGE_MODEL: "text-generation",
}
"""The hub's names of tasks by kind of model."""
MAX_PRECISE_DIGITS = 6
"""Significant digits of numbers in metadata."""


class _Measured(NamedTuple):
    """A score and the provenance of the result that has it."""

    score: Score
    provenance: Mapping[str, Any]


def write_cards(report: Report, root: Path) -> list[Path]:
    """Write a card of every model with results into the folder `cards` of a report's directory, and return the paths.

    A card is the model's own, its README.md, with the section added, or replaced where it has one, and its metadata
    completed; the model's files stay as they are. Raise InputError if such a README.md cannot be read.
    """
    names = [name for name in model_names(report) if next(_measured(report, name), None) is not None]
    paths = [root / FOLDER / f"{name}.md" for name in unique_names(names)]
    for name, path in zip(names, paths):
        write_whole(path, card(report, name, own_card(report, name)))
    return paths


def own_card(report: Report, model: str) -> str:
    """Return the text of the README.md in a model's directory; empty if there is none."""
    from ssmscope.loading.load import locate

    path = locate(report.provenance["models"][model]["model"]) / "README.md"
    try:
        return path.read_text(encoding="utf-8-sig") if path.is_file() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the card {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def card(report: Report, model: str, own: str = "") -> str:
    """Return a model's card: `own`, or a new one, with the metadata and the section of a report."""
    text = own or f"---\ntags: [ssmscope]\n---\n\n# {escaped(model)}\n"
    text = text if text.startswith("---") else f"---\n{{}}\n---\n{text}"
    try:
        made = ModelCard(text, ignore_metadata_errors=True)
    except (ValueError, YAMLError) as error:
        raise InputError(f"the metadata of {model}'s card cannot be read: {' '.join(str(error).split())}") from error
    found = list(_eval_results(report, model))
    data: Any = made.data
    known = data.eval_results or []
    kept = [each for each in known if all(_subject(each) != _subject(one) for one in found)]
    data.model_name = data.model_name or Path(model).name
    data.eval_results = [*kept, *found] or None
    before, _, rest = made.text.partition(BEGIN)
    after = rest.partition(END)[2].lstrip("\n")
    made.text = f"{before.rstrip()}\n\n{section(report, model)}" + f"\n{after}" * bool(after)
    return str(made.content)


def section(report: Report, model: str) -> str:
    """Return the section of a model's card: the finding of each analysis, the scores, and the gates."""
    version, date = report.provenance["versions"]["ssmscope"], report.provenance["date"][:10]
    parts = [f"## {escaped(report.title)}", f"Measured with ssmscope {version} on {date}."]
    findings = [
        f"- **{escaped(group.heading)}** (`analyze {group.verb}`): {escaped(verdict(found, model))}"
        for group in groups(report)
        for found in group.results()
        if model in found.entry.models
    ]
    parts.append("\n".join(findings))
    if measured := list(_measured(report, model)):
        parts.append(to_markdown(_table(measured)).rstrip())
    gates = [gate for gate in report.gates if gate.score.model == model]
    if gates:
        parts += [f"**{gates_headline(gates)}.**", to_markdown(gates_table(gates)).rstrip()]
    return "\n\n".join([BEGIN, *filter(None, parts), END]) + "\n"


def _measured(report: Report, model: str) -> Iterator[_Measured]:
    for entry in report.entries:
        for result in entry.results:
            for one in result.card_scores(entry.models):
                if one.model == model:
                    yield _Measured(one, result.provenance)


def _table(measured: list[_Measured]) -> Table:
    rows = []
    for one, provenance in measured:
        data = _data(provenance)
        on = f"{data['name']} ({data['split']})" if data else ""
        count = number_cell(one.count) if one.count else Cell()
        shown = Cell(interval(one), digits=3 if one.unit == SHARE_UNIT else None)
        rows.append(((one.name,), (shown, Cell(text=one.unit), Cell(text=one.better), Cell(text=on), count)))
    columns = ("value", "unit", "better", "data", "examples")
    return Table(("score",), columns, tuple(rows), "In brackets: the 95 % interval.", every=len(rows))


def _eval_results(report: Report, model: str) -> Iterator[EvalResult]:
    """Yield the scores on data as the hub's evaluation results, with their intervals as arguments of the metric."""
    kind = report.provenance["models"].get(model, {}).get("kind")
    for one, provenance in _measured(report, model):
        data = _data(provenance)
        if data is None or math.isnan(one.value):
            continue
        source = {**SOURCES, **LINE_SOURCES}.get(data["name"])
        args: dict[str, Any] = {"unit": one.unit} if one.unit else {}
        args |= {"better": one.better} if one.better else {}
        ends = interval(one)
        args |= {"interval": [_rounded(ends.low), _rounded(ends.high)], "level": 0.95} if ends.low < ends.high else {}
        yield EvalResult(
            task_type=TASKS.get(kind or "", "other"),
            dataset_type=source.repository if source and source.repository else data["name"],
            dataset_name=data["name"],
            dataset_config=source.configuration if source else None,
            dataset_split=data["split"],
            metric_type=one.name,
            metric_value=_rounded(one.value),
            metric_args={**args, "examples": one.count} if one.count else args or None,
        )


def _data(provenance: Mapping[str, Any]) -> dict[str, str] | None:
    """Return name and split of the data of a result; None if it has none. A file goes by its name."""
    data = provenance.get("data")
    if not isinstance(data, Mapping) or not data.get("name"):
        return None
    return {"name": Path(str(data["name"])).name, "split": str(data.get("split") or "")}


def _subject(result: EvalResult) -> tuple[Any, ...]:
    return (*result.unique_identifier, result.metric_type)


def _rounded(value: float) -> float:
    return float(f"{value:.{MAX_PRECISE_DIGITS}g}")


def escaped(text: str) -> str:
    """Return a text in one line, without signs that Markdown reads."""
    return re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", " ".join(text.split()))
