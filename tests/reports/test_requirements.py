"""Requirements as they are written: what each says, and what is refused. Files of gates: JSON, JUnit and Markdown, read
back by their own parsers."""

import json
import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from described import check, of_table
from planned import planned
from refusals import refused, refuses
from ssmscope.api.scores import Score
from ssmscope.core.bootstrap import Estimate
from ssmscope.reports.gate_files import FILES, gates_headline, gates_table, is_failure, junit, note, told, write_gates
from ssmscope.reports.gates import Gate
from ssmscope.reports.requirements import Requirement, read_requirement, read_requirements


def test_limits_in_numbers_and_in_percent():
    text = "position.drop <= 0.2"
    assert read_requirement(text) == Requirement(text, "position.drop", "<=", 0.2, None, None, None)
    full = read_requirement(" words.success[deepwordbug, 500 queries]≥-1.5e-2   at 97.5 %  for runs/my model ")
    assert (full.name, full.operator, full.limit) == ("words.success[deepwordbug, 500 queries]", ">=", -0.015)
    assert (full.level, full.model, full.reference) == (0.975, "runs/my model", None)
    assert full.text == "words.success[deepwordbug, 500 queries]≥-1.5e-2 at 97.5 % for runs/my model"
    region = read_requirement("position.drop[0%:10%] < −.5")
    assert (region.name, region.operator, region.limit) == ("position.drop[0%:10%]", "<", -0.5)
    assert read_requirement("loss > 3 at 90%").level == 0.9 and read_requirement("loss > 3 at 99.9 %").level == 0.999
    found = read_requirement("noise.drop[10 %] <= 5.7 % at 95 % for demo/sst2-mamba2")
    assert (found.name, found.limit, found.percent, found.level) == ("noise.drop[10 %]", 0.057, True, 0.95)
    margin = read_requirement("accuracy no worse than baseline by 1%")
    assert (margin.limit, margin.percent, margin.reference) == (0.01, True, "baseline")
    assert not read_requirement("noise.drop <= 0.05 at 95 %").percent


def test_no_worse_than():
    found = read_requirement("accuracy no worse than baseline by 0.01 at 95 % for demo/sst2-mamba2")
    assert (found.name, found.operator, found.limit, found.reference) == ("accuracy", "", 0.01, "baseline")
    assert (found.level, found.model) == (0.95, "demo/sst2-mamba2")
    short = read_requirement("words.success[textfooler] no worse than runs/old one")
    assert (short.limit, short.reference, short.level, short.model) == (0.0, "runs/old one", None, None)


@pytest.mark.parametrize(("text", "says"), [
    ("position.drop", "write 'NAME <= NUMBER'"),
    ("accuracy >= 0.8 at 0.95", "a level ends in %"),
    ("accuracy == 0.8", "the comparisons are <=, >=, < and >"),
    ("accuracy >= nan", "is not understood"),
    ("accuracy >= 0.8 and more", "is not understood"),
    (">= 0.8", "is not understood"),
    ("accuracy >= 0.8 at 50 %", "above 50 % and below 100 %"),
    ("accuracy >= 0.8 at 100 %", "above 50 % and below 100 %"),
    ("accuracy >= 0.8 at 99.99999999999999 %", "the level is 99.99999999999999 %; give one above 50 % and below"),
    ("accuracy >= 0.8 at 50.000000000000001 %", "above 50 % and below 100 %"),
    ("accuracy no worse than baseline by -0.1", "the margin is -0.1; give a number of at least 0"),
    ("accuracy >= " + "1" * 489, "501 characters; at most 500"),
])  # fmt: skip
def test_refusals(text, says):
    assert says in refused(read_requirement, text)


def test_a_baseline_that_is_not_given():
    wanted = ["accuracy >= 0.5", "accuracy no worse than baseline", "accuracy >= 0.5"]
    refuses("needs an earlier report; give it with --baseline", read_requirements, wanted, baseline=False)
    assert [each.text for each in read_requirements(wanted, baseline=True)] == wanted[:2]
    many = [f"accuracy >= {number}" for number in range(1001)]
    assert len(read_requirements(many[1:], baseline=False)) == 1000
    refuses("1,001 requirements; at most 1,000", read_requirements, many, baseline=False)
    assert read_requirement("accuracy >= " + "0" * 488).limit == 0


class TestInAPlan:
    PLAN = {"models": ["demo/sst2-mamba2"], "analyses": ["stability"]}

    def test_a_text_or_a_list(self):
        assert planned(self.PLAN).require == ()
        assert planned({**self.PLAN, "require": "accuracy >= 0.5"}).require == ("accuracy >= 0.5",)
        two = ["accuracy >= 0.5", "words.success[deepwordbug] <= 0.5 at 95 %"]
        assert planned({**self.PLAN, "require": two}).require == tuple(two)

    def test_a_variable(self):
        plan = {**self.PLAN, "variables": {"gate": None}, "require": ["$gate"]}
        assert planned(plan, variables={"gate": "accuracy >= 0.5"}).require == ("accuracy >= 0.5",)
        refuses("require needs a variable that is not set", planned, plan)

    @pytest.mark.parametrize(("given", "shown"), [
        ([], "nothing"), ([""], "nothing"), ([None], "nothing"), (["accuracy >= 0", None], "nothing"),
        ({"a": "b"}, "{'a': 'b'}"),
    ])  # fmt: skip
    def test_refusals(self, given, shown):
        assert f"require has {shown}; give texts such as" in refused(planned, {**self.PLAN, "require": given})


NAN = math.nan


def gate(text: str, state: str, found: Estimate, **more) -> Gate:
    score = Score("accuracy", "demo/a", 0.75, 0.7, 0.8, 200, "higher", "%")
    return Gate(read_requirement(text), score, state, found, **more)


MET = gate("accuracy >= 0.7", "met", Estimate(0.75, 0.7, 0.8))
MISSED = gate(
    "accuracy no worse than baseline by 0.01 at 95 %", "missed", Estimate(-0.05, -0.08, -0.02), tail=0.025,
    reference=Score("accuracy", "demo/a", 0.8, 0.75, 0.85, 200, "higher", "%"),
)  # fmt: skip
UNDECIDED = gate("accuracy >= 0.7 at 95 %", "undecided", Estimate(0.75, 0.69, 0.81), tail=0.025, reason="so it is")
OTHER = replace(
    MET, score=replace(MET.score, model="b\x00 <|> \ud800"), found=Estimate(NAN, NAN, NAN), state="undecided"
)
GATES = (MET, MISSED, UNDECIDED, OTHER)


def test_what_is_said():
    named = replace(MET, requirement=read_requirement("accuracy >= 0.7 for demo/a"))
    strict = replace(UNDECIDED, requirement=read_requirement("accuracy >= 0.7 at 99 %"), tail=0.005)
    other = replace(OTHER, score=replace(MET.score, model="b"))
    gates = (MET, MISSED, UNDECIDED, other, replace(UNDECIDED, needed=1200), replace(other, reason="why"), named)
    tables = (line for shown in (gates[:4], [UNDECIDED], [MET]) for line in of_table(gates_table(shown)))
    heads = (gates_headline(GATES), gates_headline([MET]), note([strict, UNDECIDED]))
    check("gates", (*heads, *map(told, gates), *tables))


def test_junit():
    text = junit(GATES, "T & <t>", strict=False)
    assert '" time="0">\n  <testsuite name="demo/a" tests="3" ' in text
    root = ElementTree.fromstring(text)
    assert root.tag == "testsuites" and root.attrib["name"] == "T & <t>"
    assert {name: root.attrib[name] for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4", "failures": "1", "errors": "0", "skipped": "2",
    }  # fmt: skip
    first, second = root
    assert (first.attrib["name"], first.attrib["tests"]) == ("demo/a", "3")
    assert (second.attrib["name"], second.attrib["skipped"]) == ("b� <|> �", "1")
    kinds = [(case.attrib["name"], [(child.tag, child.attrib["message"]) for child in case]) for case in first]
    assert kinds == [
        ("accuracy >= 0.7", []),
        (MISSED.requirement.text, [("failure", f"missed: {told(MISSED)}")]),
        (UNDECIDED.requirement.text, [("skipped", f"undecided: {told(UNDECIDED)}")]),
    ]
    strict = ElementTree.fromstring(junit(GATES, "T", strict=True))
    assert (strict.attrib["failures"], strict.attrib["skipped"]) == ("3", "0")
    assert [is_failure(each, strict=True) for each in GATES] == [False, True, True, True]


def test_files(tmp_path):
    summary = write_gates(GATES, tmp_path, title="A *títle*", strict=False)
    assert summary == (tmp_path / "gates.md").read_text()
    assert summary.startswith("## A \\*títle\\*\n\n**4 gates: 1 missed, 2 undecided, 1 met.**\n\n| requirement |")
    assert summary.count("| ❌ missed |") == 1 and summary.count("| ⚠️ undecided") == 2 and "| ✅ met |" in summary
    document = json.loads((tmp_path / "gates.json").read_text())
    assert {state: document[state] for state in ("met", "missed", "undecided")} == {
        "met": 1,
        "missed": 1,
        "undecided": 2,
    }
    assert '"title": "A *títle*"' in (tmp_path / "gates.json").read_text()
    missed = document["gates"][1]
    assert missed == {
        "requirement": MISSED.requirement.text, "state": "missed", "reason": "", "model": "demo/a", "score": "accuracy",
        "value": 0.75, "reference": 0.8, "paired": False, "found": -0.05, "low": -0.08, "high": -0.02, "level": 0.95,
        "tail": 0.025, "examples": 200, "examples_needed": 0,
    }  # fmt: skip
    assert document["gates"][3]["found"] is None
    ElementTree.parse(tmp_path / "gates.xml")
    write_gates((), tmp_path, title="A title", strict=False)
    assert not any((tmp_path / name).exists() for name in FILES)
