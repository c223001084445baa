"""Gates of `analyze report`: exit codes, files, an earlier report, and refusals before anything runs."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from planned import unpainted
from ssmscope import cli
from ssmscope.reports import running

ROWS = ["A fine film.", "A dull film.", "Great fun.", "A bore.", "Lovely and wise.", "A mess of a film."]
MODEL = "demo/sst2-mamba2"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("data") / "films.csv"
    file.write_text("text,label\n" + "".join(f"{text},{1 - at % 2}\n" for at, text in enumerate(ROWS)))
    return str(file)


@pytest.fixture
def plan(data: str, tmp_path: Path) -> Callable[..., Path]:
    def write(*, models: Any = (MODEL,), analyses: Any = (), **more: Any) -> Path:
        file = tmp_path / "films.yaml"
        items = [{"evaluate": {"data": data}}, *analyses]
        file.write_text(yaml.safe_dump({"models": list(models), "analyses": items, **more}))
        return file

    return write


@pytest.fixture
def analyze(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    unpainted(monkeypatch)
    monkeypatch.setattr(running, "_write", without_page)

    def run(*arguments: object) -> SimpleNamespace:
        capsys.readouterr()
        code = cli.run(["report", *map(str, arguments)])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


def without_page(report: Any, root: Path) -> None:
    from ssmscope.reports.scores import report_scores, write_scores

    write_scores(report_scores(report), root)


def gates(root: Path) -> dict[str, str]:
    return {each["requirement"]: each["state"] for each in json.loads((root / "gates.json").read_text())["gates"]}


def test_exit_codes_and_files(analyze, plan, tmp_path) -> None:
    out = tmp_path / "out"
    met, unclear, missed = "accuracy >= 0.5", "accuracy >= 0.9 at 95 %", "cross-entropy <= 0.01"
    answer = analyze(plan(require=met), "--out", out, "--require", unclear)
    assert answer.code == 0 and "2 gates: 1 undecided, 1 met" in answer.out
    (line,) = [line for line in answer.err.splitlines() if line.startswith("analyze:")]
    assert line.startswith(f"analyze: undecided: {unclear} ({MODEL}): 1.000 [0.689, 1.000]; the interval contains")
    assert gates(out) == {met: "met", unclear: "undecided"}
    assert analyze(plan(require=met), "--out", out, "--require", unclear, "--strict").code == 1
    assert ElementTree.parse(out / "gates.xml").getroot().attrib["failures"] == "1"
    answer = analyze(plan(require=[met, missed]), "--out", out, "--json")
    assert answer.code == 1 and f"analyze: missed: {missed} ({MODEL}): " in answer.err
    assert [each["state"] for each in json.loads(answer.out)["gates"]] == ["met", "missed"]
    assert f"| {MODEL} | ❌ missed |" in (out / "gates.md").read_text()
    assert analyze(plan(), "--out", out).code == 0 and not list(out.glob("gates.*"))


def test_a_gate_without_a_score_fails_and_the_others_are_written(analyze, plan, tmp_path) -> None:
    """With another class's tokens alone the drop has another name, which only the run knows."""
    other, out, there = {"position": {"data": None, "replacement": "other"}}, tmp_path / "out", "accuracy >= 50 %"
    file = plan()
    other["position"]["data"] = yaml.safe_load(file.read_text())["analyses"][0]["evaluate"]["data"]
    answer = analyze(plan(analyses=[other], require=there), "--out", out, "--require", "position.drop <= 0.9")
    assert answer.code == 1 and "analyze: missed: position.drop <= 0.9: the report has no score" in answer.err
    assert gates(out) == {there: "met", "position.drop <= 0.9": "missed"}
    root = ElementTree.parse(out / "gates.xml").getroot()
    assert (root.attrib["tests"], root.attrib["failures"]) == ("2", "1")
    assert "| ✅ met |" in (out / "gates.md").read_text()


def test_an_earlier_report(analyze, plan, tmp_path) -> None:
    before, out = tmp_path / "before", tmp_path / "out"
    assert analyze(plan(), "--out", before).code == 0
    wanted = "cross-entropy no worse than baseline by 0.001 at 95 %"
    for where in (before, before / "scores.json"):
        answer = analyze(plan(models=["demo/sst2-baleen-e"]), "--out", out, "--require", wanted, "--baseline", where)
        (gate,) = json.loads((out / "gates.json").read_text())["gates"]
        earlier, now = (
            json.loads((place / "scores.json").read_text())["scores"][1]["value"] for place in (before, out)
        )
        assert (gate["value"], gate["reference"], gate["paired"]) == (now, earlier, True)
        assert gate["found"] == pytest.approx(now - earlier) and gate["low"] < gate["found"] < gate["high"]
        assert answer.code == (gate["state"] == "missed")
    same = analyze(plan(), "--out", before, "--require", wanted, "--baseline", before)
    assert same.code == 0 and gates(before) == {wanted: "met"}


def test_a_summary_for_github(analyze, plan, tmp_path, monkeypatch) -> None:
    out, summary = tmp_path / "out", tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert analyze(plan(require="accuracy >= 0.5"), "--out", out).code == 0 and summary.read_text() == "before\n"
    assert analyze(plan(require="accuracy >= 0.5"), "--out", out, "--github-summary").code == 0
    assert summary.read_text() == "before\n" + (out / "gates.md").read_text() + "\n"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "file.md"))
    answer = analyze(plan(require="accuracy >= 0.5"), "--out", out, "--github-summary")
    assert answer.code == 2 and "cannot write to $GITHUB_STEP_SUMMARY" in answer.err
