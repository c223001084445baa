"""Gates as a table and as files next to the report: gates.json, gates.xml (JUnit) and gates.md, a summary in GitHub's
Markdown."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ssmscope.api.jsonable import encode
from ssmscope.api.writing import write_whole
from ssmscope.render.markup import to_markdown
from ssmscope.render.numbers import brackets, counted, number
from ssmscope.render.table import Cell, Table, value_cell
from ssmscope.render.tokens import visible
from ssmscope.reports.gates import MET, MISSED, STATES, UNDECIDED, Gate

FILES = ("gates.json", "gates.xml", "gates.md")
MARKS = {MET: "✓", MISSED: "✗", UNDECIDED: "○"}
EMOJI = {MET: "✅", MISSED: "❌", UNDECIDED: "⚠️"}
"""Marks of the states in GitHub's Markdown."""
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write_gates(gates: Sequence[Gate], root: Path, *, title: str, strict: bool) -> str:
    """Write the files of a report's gates into its directory, or remove those of an earlier run if there are no gates;
    return the summary in Markdown, empty without gates. With `strict`, JUnit counts an undecided gate as a failure."""
    if not gates:
        for name in FILES:
            (root / name).unlink(missing_ok=True)
        return ""
    summary = markdown(gates, title)
    for name, content in zip(FILES, (as_json(gates, title), junit(gates, title, strict=strict), summary)):
        write_whole(root / name, content)
    return summary


def gates_headline(gates: Sequence[Gate]) -> str:
    """Count the gates by state: "1 of 4 gates missed, 2 undecided"."""
    count = {state: sum(gate.state == state for gate in gates) for state in STATES}
    bad = [f"{count[state]:,} {state}" for state in (MISSED, UNDECIDED) if count[state]]
    return f"{counted(len(gates), 'gate')}: {', '.join([*bad, f'{count[MET]:,} met'])}"


def is_failure(gate: Gate, *, strict: bool) -> bool:
    """Return True for a missed gate, with `strict` for an undecided one too."""
    return gate.state == MISSED or (strict and gate.state == UNDECIDED)


def told(gate: Gate) -> str:
    """Describe a gate in one line: requirement, model, number, and why it is undecided."""
    model = f" ({gate.score.model})" if gate.score.model and gate.requirement.model is None else ""
    return f"{gate.requirement.text}{model}: {'; '.join(filter(None, (measured(gate), reason(gate))))}"


def reason(gate: Gate) -> str:
    """Say why a gate is undecided or has no score, and how many examples would decide; empty for others."""
    return gate.reason + f"; about {gate.needed:,} examples would decide" * bool(gate.needed)


def measured(gate: Gate) -> str:
    """Format the number that is compared, with the bounds that decide; empty if it is not defined."""
    if math.isnan(gate.found.value):
        return ""
    if gate.reference is None:
        return f"{number(gate.found.value, 3)}{brackets(gate.found, 3)}"
    change = f"{gate.found.value:+.3f}".replace("-", "−")
    return f"{number(gate.score.value, 3)}, {change}{brackets(gate.found, 3)} from {number(gate.reference.value, 3)}"


def gates_table(gates: Sequence[Gate], marks: Mapping[str, str] = MARKS) -> Table:
    """Return a row per gate, those that are missed first, with the mark of its state."""
    columns = ("state", "score", "reference", "difference")
    shown = len(columns) if any(gate.reference is not None for gate in gates) else 2
    rows = []
    for gate in sorted(gates, key=lambda gate: STATES.index(gate.state)):
        state = Cell(text=": ".join(filter(None, (f"{marks[gate.state]} {gate.state}", reason(gate)))))
        cells = [state, Cell(gate.found), Cell(), Cell()]
        if gate.reference is not None:
            kind = "same examples" if gate.paired else "other examples"
            reference = f"{number(gate.reference.value, 3)} ({kind})"
            cells = [state, value_cell(gate.score.estimate), Cell(text=reference), Cell(gate.found)]
        rows.append(((gate.requirement.text, gate.score.model), tuple(cells[:shown])))
    return Table(("requirement", "model"), columns[:shown], tuple(rows), note(gates), every=len(gates))


def note(gates: Sequence[Gate]) -> str:
    """Say what the brackets hold, and with which confidence no gate is decided wrongly: 1 − Σ tails."""
    tails = [gate.tail for gate in gates if gate.requirement.level is not None]
    if not tails:
        return "The estimate decides; in brackets: the 95 % interval."
    bounds = " or ".join(f"{100 * (1 - tail):.4g} %" for tail in sorted(set(tails), reverse=True))
    told = (
        f"In brackets: bounds that hold with {bounds} each and decide {counted(len(tails), 'gate')}, so that with "
        f"{100 * (1 - sum(tails)):.4g} % none of these is decided wrongly."
    )
    others = " Without a level the estimate decides; its brackets are the 95 % interval."
    return told + others * (len(tails) < len(gates))


def markdown(gates: Sequence[Gate], title: str) -> str:
    """Return the gates as a section in GitHub's Markdown."""
    heading = re.sub(r"([\\`*_{}\[\]<>|#])", r"\\\1", visible(title))
    return f"## {heading}\n\n**{gates_headline(gates)}.**\n\n{to_markdown(gates_table(gates, EMOJI))}"


def as_json(gates: Sequence[Gate], title: str) -> str:
    """Return the gates as strict JSON."""
    document = {
        "title": title,
        **{state: sum(gate.state == state for gate in gates) for state in STATES},
        "gates": [encode(as_record(gate)) for gate in gates],
    }
    return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def as_record(gate: Gate) -> Mapping[str, Any]:
    """Return a gate as names and values: `found` is compared, `low` and `high` are its bounds, each with `tail` beyond
    it."""
    requirement, score = gate.requirement, gate.score
    return {
        "requirement": requirement.text,
        "state": gate.state,
        "reason": gate.reason,
        "model": score.model,
        "score": score.name,
        "value": score.value,
        "reference": None if gate.reference is None else gate.reference.value,
        "paired": gate.paired,
        "found": gate.found.value,
        "low": gate.found.low,
        "high": gate.found.high,
        "level": requirement.level,
        "tail": gate.tail,
        "examples": score.count,
        "examples_needed": gate.needed,
    }


def junit(gates: Sequence[Gate], title: str, *, strict: bool) -> str:
    """Return the gates as JUnit XML: a suite per model, a failure for a missed gate, and for an undecided one a skipped
    test or, with `strict`, a failure."""
    kinds = [
        (gate, "failure" if is_failure(gate, strict=strict) else "skipped" * (gate.state != MET)) for gate in gates
    ]
    root = ElementTree.Element("testsuites", {"name": _xml(title), **_counts(kinds)})
    for model in dict.fromkeys(gate.score.model for gate in gates):
        own, name = [each for each in kinds if each[0].score.model == model], _xml(model) or "report"
        suite = ElementTree.SubElement(root, "testsuite", {"name": name, **_counts(own)})
        for gate, kind in own:
            case = {"classname": name, "name": _xml(gate.requirement.text), "time": "0"}
            found = ElementTree.SubElement(suite, "testcase", case)
            if kind:
                ElementTree.SubElement(found, kind, {"message": _xml(f"{gate.state}: {told(gate)}")})
    ElementTree.indent(root)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(root, encoding="unicode")}\n'


def _counts(kinds: Sequence[tuple[Gate, str]]) -> dict[str, str]:
    found = Counter(kind for _, kind in kinds)
    counts = {"tests": len(kinds), "failures": found["failure"], "errors": 0, "skipped": found["skipped"], "time": 0}
    return {name: str(count) for name, count in counts.items()}


def _xml(text: str) -> str:
    """Replace characters that no XML file can hold."""
    return _NOT_IN_XML.sub("�", text)
