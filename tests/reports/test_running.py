"""Running plans: nothing is lost, nothing runs twice, and failures leave the rest alone."""

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from planned import TEXT, jobs_of, numbers, run, tables, tiny_model, unpainted
from refusals import refuses
import ssmscope
import ssmscope.loading.load
from ssmscope import cli
from ssmscope.api.writing import locked
from ssmscope.errors import InputError
from ssmscope.loading.load import ModelCache, cache_models, load
from ssmscope.render import pictures
from ssmscope.reports import keys as code
from ssmscope.reports import page as report_page
from ssmscope.reports import running
from ssmscope.reports.store import JobStore


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("models")
    return [str(tiny_model(folder / name, seed)) for seed, name in enumerate(("one", "two"))]


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out pages and pictures, which take longer than the jobs tested."""
    monkeypatch.setattr(running, "_write", lambda report, root: None)
    unpainted(monkeypatch)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The verbs of the jobs that were run, in order, with their models."""
    found: list[str] = []

    def counted(job: Any, folder: Path) -> Any:
        found.append(" ".join([job.verb, *job.models]))
        return execute(job, folder)

    execute = running.execute
    monkeypatch.setattr(running, "execute", counted)
    return found


def plan(models: list[str], *more: Any) -> dict[str, Any]:
    named = [{"model": model, "name": Path(model).name} for model in models]
    items = [{"heatmap": {"text": TEXT}}, {"stability": {"length": 9, "sequences": 1}}, {"influence": {"text": TEXT}}]
    return {"title": "Two models", "models": named, "analyses": [*items, *more]}


def states(report: Any) -> list[str]:
    return [entry.state for entry in report.entries]


class TestKeys:
    def keys(self, model: str, options: Any, verb: str = "heatmap", **more: Any) -> list[str]:
        return [job.key for job in jobs_of({"models": [model], "analyses": [{verb: options}], **more}).every]

    def test_the_code_matters_that_computes_the_result_and_no_other(self, models, monkeypatch, tmp_path) -> None:
        root = tmp_path / "ssmscope"
        shutil.copytree(code.ROOT, root, ignore=shutil.ignore_patterns("demo", "__pycache__"))
        asked = {"heatmap": {"text": "a"}, "stability": {}, "words": {"data": str(tmp_path / "d.csv")}}
        (tmp_path / "d.csv").write_text("text,label\na,0\n")

        def keys() -> dict[str, str]:
            for cached in (code.code_of, code.digest, code.imported):
                cached.cache_clear()
            return {verb: self.keys(models[0], options, verb)[0] for verb, options in asked.items()}

        def changed(put: str, *files: str) -> set[str]:
            """The verbs whose keys other texts of files change; they are changed back."""
            before = {root / file: (root / file).read_bytes() for file in files}
            for place, text in before.items():
                place.write_bytes(text + put.encode())
            found = {verb for verb, key in keys().items() if key != first[verb]}
            for place, text in before.items():
                place.write_bytes(text)
            return found

        here = keys()
        monkeypatch.setattr(code, "ROOT", root)
        first = keys()
        assert first == here, "the same code elsewhere is the same"
        assert changed("\nX = 1\n", "interp/heatmap/words.py") == {"heatmap"}
        assert changed("\nX = 1\n", "probes/stability/measure.py") == {"stability"}
        assert changed("\nX = 1\n", "attacks/words/lockstep.py") == {"words"}
        every = set(asked)
        assert changed("\n/* x */\n", "backends/c/selective_scan.c") == every, "the kernels belong to it"
        assert changed("\n/* x */\n", "backends/c/vectors.h") == every
        assert changed("\nX = 1\n", "backends/triton/ssd_kernels.py") == every, "backends are imported by name"
        assert changed("\nX = 1\n", "layers/mamba.py") == every, "layers are imported by name"
        assert changed("\nX = 1\n", "api/inputs.py") == every, "how texts are read"
        others = ("api/analyses.py", "reports/page.py", "cli/command.py", "zoo/training/run.py", "__init__.py")
        assert changed("\nX = 1\n", *others) == set()
        line = "    return scored("
        file = root / "interp/heatmap/__init__.py"
        text = file.read_text()
        assert line in text
        file.write_text(text.replace(line, "    trace = trace\n" + line))
        assert {verb for verb, key in keys().items() if key != first[verb]} == {"heatmap"}
        file.write_bytes(text.replace("\n", "\r\n").encode())
        assert keys() == first, "line ends of Windows are the same code"

    def test_the_content_of_a_known_data_set_matters_given_or_learnt_from(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setenv("SSMSCOPE_DATA", str(tmp_path))
        (tmp_path / "sst2").mkdir()
        (tmp_path / "imdb").mkdir()
        (tmp_path / "imdb" / "test.parquet").write_bytes(b"other")
        (tmp_path / "sst2" / "test.parquet").write_bytes(b"one")
        model, verb = "demo/sst2-mamba", "fidelity"
        given, default, other = (self.keys(model, o, verb) for o in ({"data": "sst2"}, {}, {"data": "imdb"}))
        (tmp_path / "sst2" / "test.parquet").write_bytes(b"two")
        assert self.keys(model, {"data": "sst2"}, verb) != given and self.keys(model, {}, verb) != default
        assert self.keys(model, {"data": "imdb"}, verb) == other

    def test_a_text_that_is_a_files_name_is_a_text(self, models, tmp_path, monkeypatch) -> None:
        monkeypatch.chdir(tmp_path)
        before = self.keys(models[0], {"text": "a"})
        Path("a").write_text("content")
        assert self.keys(models[0], {"text": "a"}) == before


class TestKinds:
    def test_for_leaves_out_and_a_verb_that_cannot_is_an_error(self, models) -> None:
        both = [models[0], "demo/sst2-mamba"]
        item = {"effect": {"clean": "a", "corrupted": "b"}}
        jobs = jobs_of(
            {"models": both, "analyses": [{**item, "for": "text-classifier"}, {**item, "for": "language-model"}]}
        )
        assert [job.call.models for job in jobs.every] == [("demo/sst2-mamba",), (models[0],)]
        with pytest.raises(InputError, match=r"analysis 1 \(position\) does not support .*one, of kind language-model"):
            jobs_of({"models": both, "analyses": [{"position": {}}]})
        assert jobs_of({"models": both, "analyses": [{"position": {}, "models": "demo/sst2-mamba"}]}).every
        with pytest.raises(InputError, match="no analysis of the plan is for these models"):
            jobs_of({"models": both, "analyses": [{"stability": {}, "for": "pixel-classifier"}]})

    def test_a_model_that_does_not_exist(self) -> None:
        refuses("did you mean 'demo/sst2-mamba", jobs_of, {"models": ["demo/sst2-mambo"], "analyses": ["stability"]})


@pytest.mark.usefixtures("no_page")
class TestRunning:
    def test_results_are_those_of_the_command_line(self, models, tmp_path) -> None:
        report = run(plan(models[:1]), tmp_path / "out")
        assert states(report) == ["done"] * 3
        entry = report.entries[0]
        assert entry.command == f"analyze heatmap {models[0]} --text '{TEXT}'" and entry.models == ("one",)
        assert cli.run(["heatmap", models[0], "--text", TEXT, "--out", str(tmp_path / "alone")]) == 0
        alone = json.loads((tmp_path / "alone" / "heatmap.json").read_text())
        ours = json.loads((tmp_path / "out" / "results" / entry.key / "heatmap.json").read_text())
        for document in (alone, ours):
            document["provenance"].pop("date")
        assert ours == alone
        (result,) = entry.results
        assert result.kind == "heatmap" and entry.options["top"] == 5 and entry.seconds is not None
        assert (tmp_path / "out" / "results" / entry.key / "job.log").exists()

    def test_models_are_loaded_once(self, models, tmp_path, monkeypatch) -> None:
        read: list[str] = []
        original = ssmscope.loading.load._read
        monkeypatch.setattr(
            ssmscope.loading.load, "_read", lambda where, name, *more: read.append(name) or original(where, name, *more)
        )
        run(plan(models, {"checkpoints": {"length": 8}, "together": True}), tmp_path)
        assert read == models

    def test_a_job_that_fails_leaves_the_rest_alone_and_is_tried_again(self, models, tmp_path, ran) -> None:
        asked = plan(models[:1], {"heatmap": {"ids": "99"}})
        asked["analyses"].insert(0, asked["analyses"].pop())
        report = run(asked, tmp_path)
        assert states(report) == ["failed", "done", "done", "done"]
        failed = report.entries[0]
        assert "99" in str(failed.error) and "Traceback" in str(failed.traceback) and failed.seconds is not None
        record = json.loads((tmp_path / "failed" / f"{failed.key}.json").read_text())
        assert record["error"] == failed.error and record["state"] == "failed" and record["command"] == failed.command
        ran.clear()
        assert states(run(asked, tmp_path)) == states(report) and ran == ["heatmap one"]

    def test_what_other_plans_left_is_cleared(self, models, tmp_path) -> None:
        asked = plan(models[:1], {"heatmap": {"ids": "99"}})
        (done, *_, failed), other = (entry.key for entry in run(asked, tmp_path).entries), "0123456789abcdef"
        for key in (done, failed, other):
            (tmp_path / "working" / key).mkdir()
            (tmp_path / "working" / f"{key}.log").write_text("half")
        for name in (f"{other}.json", f"{done}.json", "notes.json"):
            (tmp_path / "failed" / name).write_text("{}")
        run(asked, tmp_path)
        assert {path.name for path in (tmp_path / "failed").iterdir()} == {f"{failed}.json", "notes.json"}
        assert {path.name for path in (tmp_path / "working").iterdir()} == {failed, f"{failed}.log"}

    def test_a_full_disk(self, models, tmp_path, monkeypatch, capsys) -> None:
        original, full = Path.write_bytes, [True]

        def write(path: Path, content: bytes) -> int:
            if full[0] and "heatmap" in str(path):
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(path, content)

        monkeypatch.setattr(Path, "write_bytes", write)
        report = run(plan(models[:1]), tmp_path)
        assert states(report) == ["failed", "done", "done"] and "No space left" in str(report.entries[0].error)
        full[0] = False
        assert states(run(plan(models[:1]), tmp_path)) == ["done"] * 3

    @pytest.mark.parametrize("record", ["finish", "fail"])
    def test_a_disk_that_is_full_when_the_record_is_written(
        self, models, tmp_path, monkeypatch, capsys, record
    ) -> None:
        def full(*args: Any, **kwargs: Any) -> None:
            raise InputError("cannot write to it: No space left on device")

        monkeypatch.setattr(JobStore, record, full)
        asked = plan(models[:1], {"heatmap": {"ids": "99"}})
        report = run(asked, tmp_path)
        assert states(report) == (["failed"] * 4 if record == "finish" else ["done"] * 3 + ["failed"])
        told = "No space left" if record == "finish" else "99"
        assert told in str(report.entries[-1 if record == "fail" else 0].error)

    def test_a_verb_that_wants_a_directory_of_its_own(self, models, tmp_path) -> None:
        text = tmp_path / "lines.txt"
        text.write_text("a good film with bad acting , but great music .\n" * 40)
        fit = {"lens fit": {"data": str(text), "length": 8, "steps": 1, "batch_tokens": 8}}
        (entry,) = run({"models": models[:1], "analyses": [fit]}, tmp_path / "out").entries
        assert entry.state == "done", entry.traceback
        assert entry.results[0].kind == "lens-fit" and entry.command.startswith("analyze lens fit ")
        assert (tmp_path / "out" / "results" / entry.key / "job.log").exists()


class TestTheLock:
    def test_a_directory_is_one_runs_at_a_time(self, models, tmp_path) -> None:
        with locked(tmp_path):
            refuses(rf"in use by process {os.getpid()};", run, plan(models[:1]), tmp_path)
        assert not (tmp_path / "results").exists()
        with locked(tmp_path):
            pass

    def test_a_place_that_cannot_be_written_to(self, tmp_path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(InputError, match="cannot write to"):
            with locked(tmp_path / "file" / "below"):
                pass


class TestKilled:
    @pytest.fixture(autouse=True)
    def one_thread(self) -> Iterator[None]:
        """The threads of OpenMP do not come with a fork, and their number changes the last digits of sums."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)

    def killed(self, start: Callable[[], object], after: float) -> int | None:
        """Run in a process of its own and kill it so many seconds later; how it ended."""
        process = multiprocessing.get_context("fork").Process(target=start)
        process.start()
        process.join(after)
        process.kill()
        process.join()
        return process.exitcode

    def test_nothing_is_lost(self, models, tmp_path, ran, monkeypatch) -> None:
        root, again = tmp_path / "unbroken", tmp_path / "killed"
        unpainted(monkeypatch)  # nor are the pictures in the page and next to it looked at
        monkeypatch.setattr(pictures, "encode_figure", lambda figure, suffix: b"a picture")
        monkeypatch.setattr(report_page, "image_html", lambda picture: "")
        started = time.perf_counter()
        with monkeypatch.context() as patch:
            patch.setattr(running, "_write", lambda report, root: None)
            run(plan(models), root)
        took = time.perf_counter() - started
        run(plan(models), root)
        draw, ends = random.Random(), []
        for _ in range(3):
            ends.append(self.killed(lambda: run(plan(models), again), draw.uniform(0.1, 0.6) * took))
            for place, document in numbers(again).items():  # every result that is there is whole
                assert document == numbers(root)[place]
        assert ends[0] == -signal.SIGKILL
        kept = {path.name: path.stat().st_mtime_ns for path in again.glob("results/*")}
        ran.clear()
        report = run(plan(models), again)
        assert states(report) == ["done"] * 6 and len(ran) == 6 - len(kept)
        assert {name: (again / "results" / name).stat().st_mtime_ns for name in kept} == kept
        assert numbers(again) == numbers(root) and tables(again) == tables(root) and len(tables(root)) > 3


class TestKept:
    def test_load_returns_what_it_returned_before(self, models) -> None:
        with cache_models(ModelCache(2)):
            one = load(models[0])
            assert load(models[0], device="cpu", dtype="float32") is one
            assert load(models[0], dtype="float64") is not one and load(models[0], tokenizer=models[1]) is not one
        assert load(models[0]) is not one

    def test_the_latest_are_kept(self, models) -> None:
        kept = ModelCache(1)
        with cache_models(kept):
            one = load(models[0])
            load(models[1])
            assert len(kept.models) == 1 and load(models[0]) is not one
        kept = ModelCache(2)
        with cache_models(kept):
            one, two = load(models[0]), load(models[1])
            assert load(models[0]) is one
            load(models[0], dtype="float64")
            assert load(models[0]) is one and load(models[1]) is not two

    def test_a_tokenizer_or_model_in_memory_is_not_kept(self, models) -> None:
        kept = ModelCache(2)
        with cache_models(kept):
            one = load(models[0])
            load(models[0], tokenizer=one.tokenizer)
            load(one.module)
            assert len(kept.models) == 1

    def test_after_an_error_nothing_is_kept_anymore(self, models) -> None:
        with pytest.raises(ZeroDivisionError):
            with cache_models(ModelCache(1)):
                raise ZeroDivisionError
        assert load(models[0]) is not load(models[0])
