"""`analyze report` as its users meet it: the page, skipped and failed jobs, and refusals."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from planned import TEXT, tiny_model, unpainted
from transformers import Lfm2Config, Lfm2ForCausalLM
from ssmscope import cli
from ssmscope.api.writing import locked
from ssmscope.reports import exports, running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture
def plan(model: str, tmp_path: Path) -> str:
    file = tmp_path / "mine.yaml"
    items = [{"heatmap": {"text": "$text"}}, {"stability": {"length": 9, "sequences": 1}}]
    file.write_text(yaml.safe_dump({"variables": {"text": TEXT}, "models": [model], "analyses": items}))
    return str(file)


out = pytest.fixture(lambda tmp_path: tmp_path / "out")


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_write", lambda report, root: None)
    unpainted(monkeypatch)


Answer = Callable[..., SimpleNamespace]


@pytest.fixture
def analyze(capsys: pytest.CaptureFixture[str]) -> Answer:
    """Runs one command line in this process: `.code`, `.out`, `.err`."""

    def run(*arguments: object) -> SimpleNamespace:
        capsys.readouterr()
        code = cli.run(["report", *(str(argument) for argument in arguments)])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


def refusal(analyze: Answer, *arguments: object) -> str:
    answer = analyze(*arguments)
    assert answer.code == 2 and answer.out == "" and answer.err.startswith("analyze: ") and answer.err.count("\n") == 1
    return answer.err


def test_a_plan_ends_in_a_page_and_tables_and_a_second_run_in_the_same(analyze, plan, out) -> None:
    answer = analyze(plan, "--out", out)
    assert answer.code == 0 and "mine: 2 of 2 jobs done" in answer.out and str(out / "index.html") in answer.out
    told = dict(line.split(": ", 1) for line in answer.out.splitlines()[2:])
    assert (
        [*told] == ["heatmap", "stability"]
        and "marginal in its one layer" in told["stability"]
        and " %" in told["heatmap"]
    )
    assert "[1/2] heatmap" in answer.err and "[2/2] stability" in answer.err
    assert (out / "index.html").read_text().startswith("<!doctype html>") and (out / "all.parquet").exists()
    tables = {path: path.read_bytes() for path in sorted((out / "tables").iterdir())}
    again = analyze(plan, "--out", out)
    assert again.code == 0 and "0 jobs to run, 2 done already" in again.err
    assert {path: path.read_bytes() for path in sorted((out / "tables").iterdir())} == tables


def test_what_has_no_answer_for_a_model_is_left_out_and_no_failure(analyze, tmp_path) -> None:
    place = tmp_path / "short"
    tiny_model(place)
    sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, layer_types=["conv"] * 2)
    ends = dict(pad_token_id=0, bos_token_id=0, eos_token_id=0)
    Lfm2ForCausalLM(Lfm2Config(**sizes, **ends, num_attention_heads=2)).save_pretrained(place)
    file = tmp_path / "plan.yaml"
    items = [{"heatmap": {"text": TEXT}}, {"lens show": {"text": TEXT}}]
    file.write_text(json.dumps({"title": "Short", "models": [str(place)], "analyses": items}))
    told = analyze(file, "--out", tmp_path / "out")
    assert told.code == 0 and "Short: 1 of 2 jobs done" in told.out
    assert "analyze: left out: heatmap: no layer of" in told.err
    page = (tmp_path / "out" / "index.html").read_text()
    assert "left out: no layer of" in page and "✗" not in page and "1 done, 1 left out" in page
    (record,) = (tmp_path / "out" / "failed").iterdir()
    assert json.loads(record.read_text())["state"] == "left-out"


@pytest.mark.usefixtures("no_page")
class TestJobs:
    def test_a_failed_job_is_one_line_and_the_exit_code_is_1(self, analyze, model, out, tmp_path) -> None:
        file = tmp_path / "plan.yaml"
        file.write_text(yaml.safe_dump({"models": [model], "analyses": [{"heatmap": {"ids": "99"}}, "stability"]}))
        answer = analyze(file, "--out", out)
        assert answer.code == 1 and "1 of 2 jobs done" in answer.out
        (line,) = [line for line in answer.err.splitlines() if line.startswith("analyze: ")]
        assert line.startswith(f"analyze: failed: analyze heatmap {model} --ids 99: ") and "99, outside" in line

    def test_json(self, analyze, plan, out) -> None:
        document = json.loads(analyze(plan, "--out", out, "--json").out)
        assert document["title"] == "mine" and document["page"] == str(out / "index.html")
        assert [(job["verb"], job["state"], job["error"]) for job in document["jobs"]] == [
            ("heatmap", "done", None), ("stability", "done", None),
        ]  # fmt: skip
        assert len(document["findings"]) == 2
        assert analyze(plan, "--out", out).out.splitlines()[2:] == document["findings"]

    def test_variables_and_models_of_the_command_line(self, analyze, plan, out, tmp_path) -> None:
        other = tiny_model(tmp_path / "other", 1)
        answer = analyze(plan, "--out", out, "--model", other, "--set", "text=a good = film", "--dry-run", "--json")
        commands = [job["command"] for job in json.loads(answer.out)["jobs"]]
        assert commands[0] == f"analyze heatmap {other} --text 'a good = film'"

    def test_a_dry_run_says_what_is_done_and_what_finished_jobs_took(self, analyze, plan, model, out, tmp_path) -> None:
        first = analyze(plan, "--out", out, "--dry-run")
        assert first.code == 0 and "2 jobs, 0 done; unknown for 2" in first.out and not out.exists()
        analyze(plan, "--out", out)
        rows = json.loads(analyze(plan, "--out", out, "--dry-run", "--json").out)["jobs"]
        assert [row["state"] for row in rows] == ["done", "done"] and all(row["estimate"] is None for row in rows)
        changed = analyze(plan, "--out", out, "--dry-run", "--set", "text=a film", "--json")
        row = json.loads(changed.out)["jobs"][0]
        assert row["state"] == "missing" and row["estimate"] == rows[0]["seconds"] and row["seconds"] is None
        shown = analyze(plan, "--out", out, "--dry-run", "--set", "text=a film").out
        assert "2 jobs, 1 done; about" in shown and "for 1, the mean of finished jobs of the same verb" in shown

    def test_a_page_that_cannot_be_written_leaves_the_results(self, analyze, plan, out, monkeypatch) -> None:
        def full(report: Any, root: Path) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(running, "_write", full)
        answer = analyze(plan, "--out", out)
        told = f"analyze: cannot write to {out}: No space left on device; make room; the results stay, and the same "
        assert answer.code == 2 and f"{told}command writes the page\n" in answer.err
        assert len(list(out.glob("results/*/job.json"))) == 2

    def test_an_interrupted_run_says_that_it_continues(self, analyze, plan, out, monkeypatch) -> None:
        def interrupted(*arguments: Any, **options: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("ssmscope.interp.heatmap.measure.scored", interrupted)
        answer = analyze(plan, "--out", out)
        assert answer.code == 130 and "analyze: interrupted; the same command continues" in answer.err


def test_tables_that_cannot_be_written(analyze, plan, out, monkeypatch) -> None:
    def full(report: Any, root: Path) -> None:
        raise OSError(28, "No space left on device")

    unpainted(monkeypatch)
    monkeypatch.setattr(exports, "write", full)
    answer = analyze(plan, "--out", out)
    assert answer.code == 2 and "No space left on device; make room; the results stay" in answer.err


class TestRefusals:
    def test_plans(self, analyze, plan, out, tmp_path) -> None:
        assert "quick, audit, baleen, diff-mamba; did you mean 'quick'?" in refusal(analyze, "quik", "--out", out)
        (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\xfa")
        assert "not UTF-8" in refusal(analyze, tmp_path / "bytes.yaml", "--out", out)
        (tmp_path / "typo.yaml").write_text("models: [m]\nanalyses: [heatmpa]")
        assert "did you mean 'heatmap'?" in refusal(analyze, tmp_path / "typo.yaml", "--out", out)
        assert "no demo is called" in refusal(analyze, plan, "--out", out, "--model", "demo/none")
        assert not out.exists()

    def test_options(self, analyze, plan, out) -> None:
        assert "write NAME=VALUE" in refusal(analyze, plan, "--out", out, "--set", "text")
        assert "did you mean 'text'?" in refusal(analyze, plan, "--out", out, "--set", "txt=a")
        assert "given twice" in refusal(analyze, plan, "--out", out, "--set", "text=a", "--set", "text=b")
        assert "no variable 'data'" in refusal(analyze, plan, "--out", out, "--data", "sst2")
        assert "did you mean 'local'?" in refusal(analyze, plan, "--out", out, "--engine", "lokal")
        assert "--workers needs --engine ray" in refusal(analyze, plan, "--out", out, "--workers", 2)
        assert "--out" in refusal(analyze, plan)
        assert "is a file" in refusal(analyze, plan, "--out", plan)
        assert not out.exists()

    def test_a_directory_in_use(self, analyze, plan, out) -> None:
        with locked(out):
            assert "is in use by process" in refusal(analyze, plan, "--out", out)

    def test_ray_that_is_not_installed(self, analyze, plan, out, monkeypatch) -> None:
        found = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else found(name, *rest)
        )
        told = refusal(analyze, plan, "--out", out, "--engine", "ray")
        assert "install it in ssmscope's checkout, with pip install '.[ray]'" in told


class TestQuick:
    @pytest.mark.parametrize(("model", "verbs"), [
        ("demo/sst2-baleen-e", "heatmap attention explain effect lens stability influence"),
        ("demo/babi-mamba2", "heatmap attention explain effect lens stability influence"),
        ("demo/cifar10-mamba", "stability influence"),
    ])  # fmt: skip
    def test_does_what_the_kind_of_model_can(self, analyze, out, model, verbs) -> None:
        rows = json.loads(analyze("quick", "--model", model, "--out", out, "--dry-run", "--json").out)["jobs"]
        assert [row["command"].split()[1] for row in rows] == verbs.split()

    def test_data_adds_what_needs_it(self, analyze, out) -> None:
        def verbs(model: str, data: str = "sst2") -> set[str]:
            arguments = ("quick", "--model", model, "--out", out, "--data", data, "--dry-run", "--json")
            return {row["verb"] for row in json.loads(analyze(*arguments).out)["jobs"]}

        assert {"fidelity", "position", "words"} <= verbs("demo/sst2-mamba") and "loss" not in verbs("demo/sst2-mamba")
        language = verbs("demo/babi-mamba2", "wikitext2")
        assert "loss" in language and "words" not in language
        assert verbs("demo/cifar10-mamba", "cifar10") == {"stability", "influence", "position"}

    @pytest.mark.parametrize(("model", "data", "line"), [
        ("demo/sst2-mamba", "zz", "analysis 8 (fidelity): unknown data 'zz'; give one of sst2, imdb"),
        ("demo/sst2-mamba", "sst", "unknown data 'sst'; "),
        ("demo/sst2-mamba", "no.csv", "analysis 8 (fidelity): there is no file 'no.csv'"),
        ("demo/sst2-mamba", "wikitext2", "unknown data 'wikitext2'; give one of sst2, imdb"),
        ("demo/cifar10-mamba", "sst2", "analysis 9 (position): unknown data 'sst2'; give one of cifar10, digits"),
        ("demo/babi-mamba2", "sst2", "analysis 11 (loss): unknown data 'sst2'; give one of wikitext2, books"),
        ("demo/sst2-mamba", "imdb", "analysis 8 (fidelity): imdb has no split 'test' in "),
    ])  # fmt: skip
    def test_data_that_cannot_be_had_is_refused_before_anything_runs(
        self, analyze, out, monkeypatch, model, data, line
    ) -> None:
        monkeypatch.setattr("ssmscope.loading.load.load", None)
        monkeypatch.setenv("SSMSCOPE_DATA", str(out.parent))
        assert line in refusal(analyze, "quick", "--model", model, "--data", data, "--out", out)
        assert not out.exists()
