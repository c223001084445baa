"""Reports on work that takes long, and the maximum length of a data set's texts."""

import io
import json
import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
import ssmscope
from ssmscope import cli
from ssmscope.api.analysis import Call
from ssmscope.api.inputs import check_fits, load_examples
from ssmscope.api.sharding.parts import over
from ssmscope.core import progress
from ssmscope.core.progress import count_tokens, on_stderr, progress_bar, pulse, worded_by
from ssmscope.data.text import load_text, text_data
from ssmscope.errors import InputError, as_typed


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BEFORE_FIRST_LINE", 0.1)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.1)


def test_work_that_goes_on_is_said_now_and_then(quick, capsys):
    with pulse("fidelity"):
        count_tokens(1200)
        time.sleep(0.15)
        with progress_bar(on_stderr(False)) as bar:
            task = bar.add_task("texts", total=40, completed=3)
            bar.advance(task, 2)
            time.sleep(0.2)
    first, second, *_ = capsys.readouterr().err.splitlines()
    assert first == "fidelity: 1,200 tokens read after 0 s"
    assert second == "fidelity: 5 of 40 texts, 1,200 tokens read after 0 s"


def test_a_measurement_without_progress_leaves_the_callers_bar(quick, capsys):
    """Its parts are counted by nobody: the line tells of the work that has a name."""

    def slowly(rows):
        time.sleep(0.25)
        return {"n": np.zeros(len(rows))}

    with pulse("words"), progress_bar(on_stderr(False)) as bar:
        bar.add_task("examples", total=50, completed=7)
        assert len(list(over(None, [[0, 1, 2]], slowly, what=None))) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("words: 7 of 50 examples, ") for line in lines)


def test_lines_name_options_as_the_reader_gives_them(capsys):
    """On the command line settings are given by --set; Python's names come back when it ends."""
    advice = "steps=… and batch_tokens=… make it shorter"
    on_stderr().print(advice)
    with worded_by(lambda line: as_typed(line, ["batch_tokens"])):
        on_stderr().print(advice)
    on_stderr().print(advice)
    typed = "--steps and --set batch_tokens=… make it shorter"
    assert capsys.readouterr().err.splitlines() == [advice, typed, advice]


def test_refusals_and_help_of_settings(capsys):
    """Both name a setting as --set takes it; the help has one line for each, with its default."""
    cli.command.known_settings[:] = ["learning_rate"]
    assert cli.command.in_its_words("lower learning_rate=… (1)") == "lower --set learning_rate=… (1)"
    assert cli.run(["lens", "fit", "--help"]) == 0
    help_lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    first = help_lines.index("Settings, each by --set NAME=VALUE:")
    told = help_lines[first + 2 :]
    assert "- batch_tokens=N: Tokens per step. [default: 4096]" in told and all(told[:-1])
    assert "" not in told[: told.index("- look_every=N: Steps between evaluations on held-out rows. [default: 10]")]


@pytest.mark.parametrize(("worth", "estimated"), [(0.5, True), (10**6, False)])
def test_long_work_has_an_estimate(quick, monkeypatch, capsys, worth, estimated):
    """It counts what is left at the speed so far, only where the whole takes long enough."""
    monkeypatch.setattr(progress, "SECONDS_WORTH_AN_ESTIMATE", worth)
    with pulse("patch"), progress_bar(on_stderr(False)) as bar:
        task = bar.add_task("cells", total=600)
        for _ in range(3):
            time.sleep(0.02)
            bar.advance(task)
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert any("3 of 600 cells" in line for line in lines)
    assert any(re.search(r" s, about \d+ s left$", line) for line in lines) == estimated


def test_every_line_of_long_work(monkeypatch, capsys):
    """Lines are about the last task whose end is known; there are none while a bar is seen, and lines again after
    it."""
    now, waited = [50.0], []
    task = lambda *of: SimpleNamespace(**dict(zip(("completed", "total", "description", "time_remaining"), of)))  # noqa: E731
    bars = [
        None,
        SimpleNamespace(disable=False, tasks=[task(1, 2, "seen", None)]),
        SimpleNamespace(
            disable=True,
            tasks=[task(5, 40, "texts", 900.0), task(1500.4, 2000, "cells", 23.0), task(3, None, "x", 1.0)],
        ),
        SimpleNamespace(disable=True, tasks=[task(1, 2, "", 16.0)]),
        SimpleNamespace(disable=True, tasks=[task(2, 2, "done", 0.0)]),
        SimpleNamespace(disable=True, tasks=[]),
    ]

    class Ended:
        def wait(self, seconds: float) -> bool:
            waited.append(seconds)
            if not bars:
                return True
            progress._Seen.bar, now[0] = bars.pop(0), now[0] + 3.5
            if len(bars) == 3:
                count_tokens(1200)
            return False

        def set(self) -> None: ...

    monkeypatch.setattr(progress, "threading", SimpleNamespace(Event=Ended, Thread=threading.Thread))
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress._Seen, "tokens", 10)
    with pulse("lens"):
        pass
    assert capsys.readouterr().err.splitlines() == [
        "lens: at work after 4 s",
        "lens: 1,500 of 2,000 cells, 1,200 tokens read after 10 s, about 23 s left",
        "lens: 1 of 2, 1,200 tokens read after 14 s, about 16 s left",
        "lens: 2 of 2 done, 1,200 tokens read after 18 s",
        "lens: 1,200 tokens read after 21 s",
    ]
    assert waited[:4] == [2.0, 10.0, 15.0, 22.5] and sorted(waited) == waited


@pytest.mark.parametrize(("quiet", "terminal"), [(False, True), (True, True), (False, False)])
def test_a_bar_is_seen_on_a_terminal_that_is_not_quiet(quiet, terminal):
    console = Console(file=io.StringIO(), quiet=quiet, force_terminal=terminal)
    bar = progress_bar(console)
    assert progress._Seen.bar is bar and bar.console is console and bar.live.transient
    assert bar.disable == (quiet or not terminal) and not bar.columns[0].markup
    assert progress_bar().console.stderr
    if bar.disable:  # The lines on stderr say how far it is.
        seen = iter(bar.track("abc"))
        next(seen), next(seen)
        assert bar.tasks[0].completed == 1


def test_lines_on_stderr_are_as_they_are(capsys):
    line = "[bold]1[/bold] 'a' " + "x" * 200
    on_stderr().print(line)
    on_stderr(False).print("nothing")
    printed = capsys.readouterr()
    assert printed.err == line + "\n" and printed.out == ""


def test_nothing_is_said_of_quick_or_quiet_work(quick, capsys):
    with pulse("heatmap"):
        pass
    with pulse("heatmap", shown=False):
        time.sleep(0.25)
    time.sleep(0.15)
    assert capsys.readouterr().err == ""


def test_it_ends_where_the_work_fails(quick, capsys):
    with pytest.raises(InputError), pulse("heatmap"):
        raise InputError("no")
    time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_calls_say_so(monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BEFORE_FIRST_LINE", 0.0)
    Call.of("heatmap", ["demo/sst2-mamba2"], {"text": ["a good film"]}).run()
    assert re.fullmatch(r"(heatmap: (at work|\d+ tokens read) after \d+ s\n)+", capsys.readouterr().err)


def test_texts_of_data_have_a_bound(tmp_path, capsys):
    """It is that of texts given by themselves; a huge one is not even tokenized."""
    rows = [{"text": "a film", "label": "positive"}, {"text": "good " * 20_000, "label": "negative"}]
    file = tmp_path / "a.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    for verb in ("fidelity", "words", "insertion", "noise", "overflow", "ablate", "position", "poison", "heatmap"):
        assert cli.run([verb, "demo/sst2-mamba2", "--data", str(file)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == (
            "analyze: row 2 of a has 20,001 tokens, more than the limit of 16,384: shorten or split it, or raise "
            "--max-tokens"
        )
    model = ssmscope.load("demo/sst2-mamba2")
    check_fits(model, load_text(file, label_names=model.labels), 20_001)
    with pytest.raises(InputError, match="row 2 of a has 20,001 tokens, more than the limit of 20,000"):
        load_examples(model, str(file), None, 256, max_tokens=20_000)
    huge = text_data("huge", "all", ["good " * 1_000_000], [0], model.labels)
    check_fits(replace(model, tokenizer=None), huge, 5)  # which reads no texts

    class Untouched:
        def __call__(self, *_: object, **__: object) -> None:
            raise AssertionError("tokenized")

    with pytest.raises(InputError, match="row 1 of huge has 5,000,000 characters, more than 1,048,576, the limit for"):
        check_fits(replace(model, tokenizer=Untouched()), huge, 16_384)
    with pytest.raises(InputError, match="the text has 5,000,000 characters, more than 640, the limit for 10 tokens"):
        replace(model, tokenizer=Untouched()).encode(huge.texts[0], max_tokens=10)
