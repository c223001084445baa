"""Entries of a report: how they are stored, grouped, summed up and written, on hand-made ones."""

import json
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from planned import planned
from refusals import refused, refuses
from reported import PROVENANCE, entry
from ssmscope.api.results import Result
from ssmscope.errors import InputError, Unanswerable
from ssmscope.reports import page, plain_yaml, running
from ssmscope.reports.exports import everything
from ssmscope.reports.grouping import comparison, groups, model_names, verdict
from ssmscope.reports.jobs import Job, Jobs
from ssmscope.reports.keys import Fingerprints, key_of
from ssmscope.reports.page import items
from ssmscope.reports.plain_yaml import read_yaml
from ssmscope.reports.running import Outcome, execute
from ssmscope.reports.store import DONE, FAILED, LEFT_OUT, MISSING, RECORD, JobStore, Report


@dataclass(frozen=True)
class Table(Result, kind="test-table"):
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    def to_frame(self) -> pd.DataFrame:
        columns = {name: list(values) for name, values in zip(self.columns, zip(*self.rows))}
        words = {name: any(isinstance(value, str) for value in values) for name, values in columns.items()}
        return pd.DataFrame({n: pd.Series(v, dtype=object if words[n] else None) for n, v in columns.items()})

    def figure(self, **_: Any) -> Figure:
        return Figure()

    def verdict(self, at: int = 0) -> str:
        return f"{self.rows[at][0]}"

    @property
    def queries_made(self) -> str:
        return "7 runs" if self.rows[0][0] == "counted" else ""


def made(*rows: tuple[Any, ...], columns: tuple[str, ...] = ("a", "b"), **provenance: Any) -> Table:
    return Table({"model": "m", **provenance}, columns, rows)


def some() -> Report:
    first = entry("loss", made(("up", 1)), heading="One", models=("m",), options={"seed": 0, "k": [1, 2], "z": 1})
    second = entry("loss", made(("down", 2)), heading="One", models=("m",), options={"seed": 1, "k": (1, 2)})
    both = entry("loss", made(("x", 3), ("y", 4)), heading="Two", models=("n", "m"), options={"seed": 0})
    other = entry("bound", made(("z", 5)), heading="One", models=("n",), options={})
    failed = entry("bound", heading="Three", models=("m",), state=FAILED, error="no\n such  file", seconds=None)
    left = entry("bound", heading="Three", models=("n",), state=LEFT_OUT, error=None, seconds=2.0)
    missing = entry("bound", heading="Three", models=("m",), state=MISSING, seconds=None)
    return Report("title", (first, both, second, other, failed, left, missing), PROVENANCE)


def test_entries_are_grouped_by_heading_and_verb_and_labelled_by_what_differs() -> None:
    found = groups(some())
    assert [(each.name, each.heading, each.verb, len(each.entries)) for each in found] == [
        ("one", "One", "loss", 2),
        ("two", "Two", "loss", 1),
        ("one-2", "One", "bound", 1),
        ("three", "Three", "bound", 3),
    ]
    assert found[0].labels == ("m · seed 0 · z 1", "m · seed 1") and found[1].labels == ("n, m",)
    assert found[0].kinds == ("test-table",) and found[3].kinds == ()
    assert [one.result.rows[0][0] for one in found[0].results()] == ["up", "down"]
    assert model_names(some()) == ("m", "n")
    (both,) = found[1].results()
    assert [verdict(both, name) for name in ("m", "n", "elsewhere")] == ["y", "x", "x"]
    from ssmscope.render.markup import to_markdown

    shown = to_markdown(comparison(found[0], "test-table")).splitlines()
    told = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown if "seed" in line]
    assert [(cells[0], cells[-2], cells[-1]) for cells in told] == [
        ("m · seed 0 · z 1", "up", "1"),
        ("m · seed 1", "down", "2"),
    ]


def test_the_summary_has_a_line_for_each_entry_and_fewer_columns_than_rows() -> None:
    report = some()
    parts = groups(report)
    sections = [page._section(group, items(group), {}) for group in parts]
    found = page._summary(report, sections)
    assert found["corner"] == "analysis" and found["heads"] == [("m", ""), ("n", "")]
    assert [head for head, _ in found["rows"]] == [(one.heading, one.name) for one in parts]
    lines = [[[(line.anchor, line.state, line.text) for line in cell] for cell in cells] for _, cells in found["rows"]]
    assert lines == [
        [[("one--1", DONE, "seed 0 · z 1: up"), ("one--2", DONE, "seed 1: down")], []],
        [[("two--1", DONE, "y")], [("two--1", DONE, "x")]],
        [[], [("one-2--1", DONE, "z")]],
        [
            [("three--1", FAILED, "no such file"), ("three--3", MISSING, "not run yet")],
            [("three--2", LEFT_OUT, "no reason was recorded")],
        ],
    ]
    turned = page._summary(report, sections[:2])
    assert turned["corner"] == "model" and turned["heads"] == [("One", "one"), ("Two", "two")]
    assert [head for head, _ in turned["rows"]] == [("m", ""), ("n", "")]
    assert [[len(cell) for cell in cells] for _, cells in turned["rows"]] == [[2, 1], [0, 1]]
    assert page._counts(report) == "7 entries: 4 done, 1 failed, 1 left out, 1 not run yet; 7.0 s of computing"
    assert page._counts(Report("", (), PROVENANCE)) == "0 entries: none; 0.0 s of computing"


def test_the_origin_of_an_entry_names_each_result_where_it_has_several() -> None:
    (group,) = groups(
        Report("", (entry("loss", made(("counted", 1), seed=3), options={"k": None}, key="5"),), PROVENANCE)
    )
    (item,) = items(group)
    assert item.origin == (
        ("key", "5"), ("took", "1.2 s"), ("option k", "none"), ("model", "m"), ("seed", "3"), ("queries", "7 runs"),
    )  # fmt: skip
    several = entry("loss", made(("x", 1)), made(("counted", 1)), key="5", options={}, seconds=None)
    (item,) = items(groups(Report("", (several,), PROVENANCE))[0])
    names = [name for name, _ in item.origin]
    assert names == ["key", "test-table model", "test-table model", "test-table queries"]
    assert item.took == "" and [view.parts[0].anchor for view in item.views] == ["loss--1--1-1", "loss--1--2-1"]


def test_the_table_of_everything_keeps_the_types_of_columns_of_one_name() -> None:
    numbers = made((1, 0.5), (2, None), columns=("a", "kind"))
    words = made(("x", True), (None, False), columns=("a", "flag"))
    flags = made((True, "\ud800"), columns=("a", "text"))
    report = Report(
        "", tuple(entry("loss", each, key=key) for key, each in zip("123", (numbers, words, flags))), PROVENANCE
    )
    found = everything(report)
    identity = ["verb", "heading", "model", "key", "options", "kind", "row"]
    assert list(found) == [*identity, "a", "of_kind", "a:text", "flag", "a:flag", "text"]
    assert {name: str(found[name].dtype) for name in found if name not in identity} == {
        "a": "Int64", "of_kind": "Float64", "a:text": "string", "flag": "boolean", "a:flag": "boolean",
        "text": "string",
    }  # fmt: skip
    assert found["row"].tolist() == [0, 1, 0, 1, 0] and found["key"].tolist() == list("11223")
    assert found["text"].dropna().tolist() == ["\\ud800"] and found["options"][0] == '{"limit": 4}'
    assert found["a"].dropna().tolist() == [1, 2] and found["a:text"].dropna().tolist() == ["x"]
    empty = everything(Report("", (), PROVENANCE))
    assert list(empty) == identity and str(empty["row"].dtype) == "Int64" and str(empty["verb"].dtype) == "string"


def test_seconds_of_finished_jobs_by_verb(tmp_path: Path) -> None:
    records: dict[str, dict[str, Any]] = {
        "b": {"verb": "loss", "seconds": 2}, "a": {"verb": "loss", "seconds": 0.5},
        "c": {"verb": "bound", "seconds": 4}, "d": {"verb": None, "seconds": 8}, "e": {"verb": "loss", "seconds": "16"},
        "f": {"verb": "loss", "seconds": 32, "files": {"gone": 1}},
    }  # fmt: skip
    for key, record in records.items():
        folder = tmp_path / "results" / key
        folder.mkdir(parents=True)
        (folder / RECORD).write_text(json.dumps({"files": {}, **record}))
    found = JobStore(tmp_path).seconds()
    assert found == {"loss": [0.5, 2.0], "bound": [4.0]} and type(found["bound"][0]) is float


def job(key: str = "k", models: tuple[str, ...] = ("m",), run: Any = None, threads: int | None = None) -> Any:
    (line,) = planned({"models": list(models), "analyses": [{"loss": {}, "together": True}]}).calls
    call: Any = (
        line.call if run is None else SimpleNamespace(run=run, name="loss", command="analyze loss", models=models)
    )
    return Job(key, "One", call, models, 1.0, 0.0, threads)


def test_what_becomes_of_a_job_in_its_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, one = JobStore(tmp_path), job()
    monkeypatch.setattr(Result, "_drawn", lambda self, suffix: b"a picture")
    assert (store.entry(one).state, store.entry(one).error) == (MISSING, None)
    work = store.working("k")
    work.mkdir(parents=True)
    assert (store.entry(one).state, store.entry(one).error) == (MISSING, "unfinished")
    store.fail(one, {"state": LEFT_OUT, "error": "before", "seconds": 3.0, "traceback": "t"})
    assert [getattr(store.entry(one), name) for name in ("state", "error", "seconds", "traceback")] == [
        LEFT_OUT, "before", 3.0, "t",
    ]  # fmt: skip
    assert store.entry(one, {"error": "now"}).error == "now" and store.entry(one, {"error": "now"}).state == FAILED
    refuses("loss ended without a result", store.finish, one, {})
    made(("x", 1)).save(work, "b", ["json"])
    made(("y", 2)).save(work, "a", ["json"])
    (work / "notes.json").write_text("{}")
    (work / "answers.sqlite-wal").write_text("gone")
    (work / ".b.staged").mkdir()
    (work / RECORD).write_text("left by a killed run")
    (work / "other.json").write_text('{"kind": "x"}')
    store.finish(one, {"seconds": 1.5, "state": DONE})
    found = store.entry(one, {"error": "of another run"})
    assert (found.state, found.seconds, found.error) == (DONE, 1.5, None)
    assert [each.rows[0][0] for each in found.results] == ["y", "x"]
    assert sorted(os.listdir(store.finished("k"))) == ["a.json", "b.json", "job.json", "notes.json", "other.json"]
    assert not store.failure("k").exists() and not work.exists() and store.is_done(one)
    record = json.loads((store.finished("k") / RECORD).read_text())
    assert sorted(record["files"]) == ["a.json", "b.json", "notes.json", "other.json"]
    whole = (store.finished("k") / "a.json").read_bytes()
    for content in (bytes(len(whole)), whole[:-1], b""):  # one of its size with other bytes, as after a loss of power
        (store.finished("k") / "a.json").write_bytes(content)
        assert not store.is_done(one) and (store.entry(one).state, store.entry(one).results) == (MISSING, ())
    for content, state, rows in ((b'{"kind": 1}', DONE, ["x"]), (b"{", FAILED, [])):
        (store.finished("k") / "a.json").write_bytes(content)
        files = {**record["files"], "a.json": f"{zlib.crc32(content):08x}"}
        (store.finished("k") / RECORD).write_text(json.dumps({**record, "files": files}))
        entry = store.entry(one)
        assert store.is_done(one) and entry.state == state and [each.rows[0][0] for each in entry.results] == rows
        assert ("delete " in (entry.error or "")) == (state == FAILED)
    (store.finished("k") / "b.json").write_text("")
    assert not store.is_done(one)
    made(("again", 1)).save(work, "a", ["json"])
    store.finish(one, {"state": DONE})
    assert [each.rows[0][0] for each in store.entry(one).results] == ["again"]


@pytest.mark.parametrize(("error", "said", "unanswerable"), [
    (InputError("give \n  tokenizer=… too"), "give --tokenizer too", False),
    (Unanswerable("no \n answer"), "no answer", True),
    (ValueError("two \n\n lines"), "ValueError: two lines", False),
    (KeyError(), "KeyError", False),
    (SystemExit(3), "SystemExit: 3", False),
])  # fmt: skip
def test_a_failure_is_one_line_and_its_traceback(tmp_path, error, said, unanswerable) -> None:
    def fail(folder: Path) -> None:
        print("printed before")
        raise error

    folder = tmp_path / "working" / "k"
    found = execute(job(run=fail), folder)
    assert (found.error, found.unanswerable) == (said, unanswerable) and type(error).__name__ in (found.traceback or "")
    assert 0 <= found.seconds < 60 and not folder.exists()
    assert (tmp_path / "working" / "k.log").read_text() == "printed before\n"


def test_a_job_has_its_threads_and_its_log(tmp_path: Path) -> None:
    import torch

    before, seen = torch.get_num_threads(), []

    def run(folder: Path) -> None:
        seen.append(torch.get_num_threads())
        print("\ud800 é")

    for threads in (3, None):
        assert execute(job(run=run, threads=threads), tmp_path / "working" / "k").error is None
    assert seen == [3, before] and torch.get_num_threads() == before
    assert (tmp_path / "working" / "k" / "job.log").read_text("utf-8") == "\\ud800 é\n"


def test_a_run_says_what_it_does_and_records_it(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(running, "_write", lambda report, root: None)
    monkeypatch.setattr(Result, "_drawn", lambda self, suffix: b"a picture")
    one, two, three, four = (replace(job(name), key=name) for name in ("one", "two", "three", "four"))
    plan = planned({"title": "T", "models": ["m"], "analyses": ["loss"]})
    jobs = Jobs((one, two, three, four), {"m": {"files": "5"}})
    asked: list[str] = []

    def engine(missing: Any, store: JobStore) -> Any:
        asked.extend(each.key for each in missing)
        for each in missing:
            if each.key == "one":
                made(("x", 1)).save(store.working("one"), "loss", ["json"])
                yield each, Outcome(1.23456)
            elif each.key == "two":
                yield each, Outcome(2.0, "no model", "traceback")
            elif each.key == "three":
                yield each, Outcome(3.0, "no answer", "traceback", unanswerable=True)
            else:
                store.working("four").mkdir(parents=True)
                yield each, Outcome(4.0)

    report = running.run_plan(plan, jobs, tmp_path, engine=engine)
    assert asked == ["one", "two", "three", "four"]
    assert [(each.state, each.seconds, each.error) for each in report.entries] == [
        (DONE, 1.235, None),
        (FAILED, 2.0, "no model"),
        (LEFT_OUT, 3.0, "no answer"),
        (FAILED, 4.0, "loss ended without a result"),
    ]
    assert capsys.readouterr().err.splitlines() == [
        "4 jobs to run", "[1/4] loss m: 1.2 s", "[2/4] loss m: failed", "[3/4] loss m: left out",
        "[4/4] loss m: failed",
    ]  # fmt: skip
    assert (report.title, report.provenance["models"], report.provenance["plan"]) == (
        "T",
        {"m": {"files": "5"}},
        plan.text,
    )
    record = json.loads((tmp_path / "results" / "one" / RECORD).read_text())
    assert {name: record[name] for name in ("verb", "models", "state", "seconds", "command")} == {
        "verb": "loss", "models": ["m"], "state": DONE, "seconds": 1.235, "command": one.command,
    }  # fmt: skip
    assert "python" in record["versions"] and record["options"] == one.options
    running.run_plan(plan, Jobs((one, two), {}), tmp_path, engine=engine)
    assert asked[4:] == ["two"] and capsys.readouterr().err.splitlines()[0] == "1 job to run, 1 done already"
    running.run_plan(plan, Jobs((one,), {}), tmp_path, engine=None)  # type: ignore[arg-type]
    assert capsys.readouterr().err.splitlines() == ["0 jobs to run, 1 done already"]


def test_failures_that_cannot_be_recorded_are_in_the_report(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(running, "_write", lambda report, root: None)

    def full(self: JobStore, job: Job, record: Any) -> None:
        raise InputError("No space left")

    monkeypatch.setattr(JobStore, "fail", full)
    plan = planned({"models": ["m"], "analyses": ["loss"]})
    outcome = Outcome(2.0, "no model", "traceback")
    report = running.run_plan(
        plan, Jobs((job(),), {}), tmp_path, engine=lambda jobs, store: [(each, outcome) for each in jobs]
    )
    (found,) = report.entries
    assert (found.state, found.error, found.traceback, found.seconds) == (FAILED, "no model", "traceback", 2.0)
    assert "the failure of loss cannot be recorded: No space left" in capsys.readouterr().err.splitlines()


def test_jobs_run_once_each_model_by_model() -> None:
    made = [
        job("a", ("m",)), job("b", ("n",)), job("c", ("m",)), job("a", ("m",)), job("d", ("m", "n")), job("e", ("n",)),
    ]  # fmt: skip
    assert [each.key for each in Jobs(tuple(made), {}).to_run()] == ["a", "c", "b", "e", "d"]


def test_a_key_does_not_depend_on_the_order_of_options() -> None:
    call = job().call
    other = replace(call, options=dict(reversed(call.options.items())), inputs=dict(reversed(call.inputs.items())))
    models = [{"model": "m", "files": "5"}, {"model": "n", "files": "6"}]
    key = key_of(call, models, Fingerprints())
    assert key_of(other, [dict(reversed(each.items())) for each in models], Fingerprints()) == key
    assert key_of(call, models[::-1], Fingerprints()) != key and len(key) == 16


def test_a_plan_is_read_as_plain_values() -> None:
    text = "a: [1, 1.5, 2001-01-01, true, FALSE, 'true', ~, '', null, 'null', yes]\nb: {c: }\n<<: x\n"
    assert read_yaml(text) == {
        "a": ["1", "1.5", "2001-01-01", True, False, "true", None, "", None, "null", "yes"],
        "b": {"c": None},
        "<<": "x",
    }
    assert read_yaml("") is None and read_yaml("# nothing\n") is None and read_yaml("a") == "a"


@pytest.mark.parametrize(("text", "said"), [
    ("a: [\n", "the plan is not valid YAML in line 2: "),
    ("a:\n- !!set {x}\n", "line 2 of the plan has the tag 'tag:yaml.org,2002:set'; only plain values are allowed"),
    ("a:\n- !!omap [x: 1]\n", "line 2 of the plan has the tag 'tag:yaml.org,2002:omap'"),
    ("a:\n- !own [x]\n", "line 2 of the plan has the tag '!own'"),
    ("a:\n- !!binary eA==\n", "line 2 of the plan has the tag 'tag:yaml.org,2002:binary'"),
    ("a: 1\nb: 2\na: 3\n", "line 3 of the plan repeats the key 'a'; give it once"),
    ("a: 1\n[b]: 2\n", "line 2 of the plan has a list or mapping as a key"),
    ('a: "\\0"\n', "line 1 of the plan has a character that is not text"),
    ('a: "\\uD800"\n', "line 1 of the plan has a character that is not text"),
    ('"\\uDFFF": a\n', "line 1 of the plan has a character that is not text"),
    ("[" * 21 + "a" + "]" * 21, "line 1 of the plan is nested in more than 20 lists and mappings"),
])  # fmt: skip
def test_what_no_plan_can_hold_is_told_with_its_line(text: str, said: str) -> None:
    assert refused(read_yaml, text).startswith(said)


def test_the_limits_of_a_plan_are_reached_and_not_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_yaml("[" * 20 + "a" + "]" * 20) == eval("[" * 20 + "'a'" + "]" * 20)
    assert read_yaml("{a: " * 20 + "b" + "}" * 20) == eval("{'a': " * 20 + "'b'" + "}" * 20)
    refuses("nested in more than 20", read_yaml, "{a: " * 21 + "b" + "}" * 21)
    monkeypatch.setattr(plain_yaml, "MAX_NODES", 5)
    assert read_yaml("a: &x [1, 2]\nb: 5\n") == {"a": ["1", "2"], "b": "5"}
    assert read_yaml("a: &x [1]\nb: *x\n") == {"a": ["1"], "b": ["1"]}
    refuses("more than 5 values, aliases counted", read_yaml, "a: &x [1, 2]\nb: *x\n")
    monkeypatch.setattr(plain_yaml, "MAX_CHARACTERS", 5)
    assert read_yaml("a: 12") == {"a": "12"}
    refuses("the plan has 6 characters; at most 5 are allowed", read_yaml, "a: 123")


@pytest.mark.parametrize(("analyses", "said"), [
    (None, "analyses is nothing;"),
    ("$d", "analyses is nothing;"),
    ({"x": 1, "y": 2}, "analyses is a mapping with 'x, y';"),
    (["loss", None], "analysis 2 is nothing;"),
    ([{"loss": {}, "matrix": {"seed": None}}], "analysis 1 (loss), matrix: seed is nothing;"),
    ([{"loss": {}, "resources": ["x"]}], "analysis 1 (loss): resources is ['x'];"),
    ([{"loss": {}, "resources": {"cpus": True}}], "analysis 1 (loss): cpus is True;"),
    ([{"loss": {}, "resources": {"cpus": "100001"}}], "analysis 1 (loss): cpus is '100001'; give a number of at"),
    ([{"loss": {}, "resources": {"gpus": "1.5"}}], "analysis 1 (loss): gpus is '1.5'; above 1 only whole"),
    ([{"loss": {}, "together": [1]}], "analysis 1 (loss): together is ['1'];"),
    ([{"loss": {}, "name": " "}], "analysis 1 (loss): name is ' '; give a text"),
    ([{"loss": {}, "for": [["a"]]}], "analysis 1 (loss): for is [['a']]; allowed are"),
    ([{"loss": {}, "models": ["m", "o"]}],
     "analysis 1 (loss), models: no model of the plan is called 'o'; there are m, n"),
    ([{"loss": {}, "models": "m", "overrides": {"n": {}}}], "analysis 1 (loss), overrides: 'n' is not among"),
])  # fmt: skip
def test_what_is_wrong_with_an_analysis_is_told_with_its_place(analyses: Any, said: str) -> None:
    assert refused(planned, {"variables": {"d": None}, "models": ["m", "n"], "analyses": analyses}).startswith(said)


def test_resources_may_be_fractions_below_one_and_whole_numbers_above() -> None:
    given = {"cpus": "100000", "gpus": 0.25}
    (line,) = planned({"models": ["m"], "analyses": [{"loss": {}, "resources": given}]}).calls
    assert line.resources == {"cpus": 100000.0, "gpus": 0.25}
    (line,) = planned({"models": ["m"], "analyses": [{"loss": {}, "resources": {"cpus": 0, "gpus": 1}}]}).calls
    assert line.resources == {"cpus": 0.0, "gpus": 1.0}
