"""`analyze` as its users meet it: the answer on stdout, the files, and one clear line for every bad input."""

from __future__ import annotations

import inspect
import io
import json
import os
import signal
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from commands import TEXT, Answer, refused
from warm import TRANSFORMERS
from ssmscope import cli, errors
from ssmscope.api import analyses as registry
from ssmscope.api.signatures import options_of
from ssmscope.cli.command import command_of

ROOT = Path(__file__).resolve().parents[1]
refusal = pytest.fixture(lambda analyze, tmp_path: refused(analyze, tmp_path))


def process(*arguments: str | bytes, **options: typing.Any) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ssmscope", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, **options)


class TestHelp:
    def test_a_group_stands_among_the_verbs_in_the_order_of_the_packages(self) -> None:
        command = typer.main.get_command(cli.app)
        names = command.list_commands(None)
        every = registry.analyses().items()
        expected = list(dict.fromkeys(name.partition(" ")[0] for name, each in every if not each.first))
        assert [name for name in names if name in expected] == expected and "lens" in expected
        assert sorted(names) == sorted(command.commands)

    @pytest.mark.parametrize("verb", ["heatmap", "attention", "explain", "fidelity", "train", "models"])
    def test_of_a_verb_names_its_options(self, analyze: Answer, verb: str) -> None:
        answer = analyze(verb, "--help")
        assert answer.code == 0 and "--json" in answer.out

    def test_imports_nothing_heavy(self) -> None:
        heavy = {"torch", "transformers", "numpy", "pandas", "matplotlib", "datasets"}
        code = f"import sys; from ssmscope.cli import run; run(['--help']); print({heavy} & set(sys.modules))"
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert done.stdout.endswith("set()\n"), done.stderr

    def test_version(self, analyze: Answer) -> None:
        import ssmscope

        assert analyze("--version").out == f"ssmscope {ssmscope.__version__}\n"

    def test_as_a_module_and_as_a_command(self) -> None:
        done = process("--version")
        assert done.returncode == 0 and done.stdout.startswith("ssmscope ") and done.stderr == ""


class TestUsage:
    def test_the_help_begins_with_what_to_try_first(self, analyze: Answer) -> None:
        words = analyze("--help").words
        first = [
            "heatmap", "explain", "fidelity", "patch", "knockout", "generate", "report", "ablate", "bound", "words",
        ]  # fmt: skip
        places = [words.index(f"│ {verb} ") for verb in (*first, "models", "push", "train")]
        assert places == sorted(places) and "Which explanation can be trusted?" in words

    @pytest.mark.parametrize(("arguments", "says"), [
        (["heatmpa", "x"], "did you mean 'heatmap'?"),
        (["heatmap"], "missing argument 'MODEL…' (see analyze heatmap --help)"),
        (["influence"], "missing argument 'MODEL' (see analyze influence --help)"),
        (["sanity", "m", "--data", "d.csv"], "no option --data; did you mean '--file'? (see"),
        (["heatmap", "m", "--text", "a", "--no-progress"], "no option --no-progress: only verbs with a progress bar"),
        (["heatmap", "m", "--txt", "a"], "no option --txt; did you mean '--text'"),
        (["effect", "m", "--before", "a"], "no option --before; did you mean '--clean'?"),
        (["patch", "m", "--counterfactual", "a"], "no option --counterfactual; did you mean '--corrupted'?"),
        (["saliency", "m"], "did you mean 'explain'?"),
        (["--verson"], "did you mean '--version'?"),
        (["train", "mamba", "--data", "d", "--width", "8"], "no option --width; it is a setting: --set width=…"),
        (["train", "mamba", "--data", "d", "--set", "wdth=8"], "did you mean 'width'"),
        (["train", "mamba", "--data", "d", "--set", "width"], "--set 'width': write NAME=VALUE"),
        (["poison", "m", "--set", "beam=1", "--set", "beam=2"], "--set beam is given twice; give it once"),
        (["heatmap", "m", "--text", "a", "--top", "many"], "top is 'many'; allowed is a whole number"),
        (["heatmap", "m", "--text", "a", "--max-tokens", "1e3"], "max_tokens is '1e3'; allowed is a whole number"),
        (["heatmap", "m", "--text", "a", "--max-tokens", "0"], "max_tokens is 0; allowed is"),
        (["influence", "m", "n", "--text", "a"], "unexpected extra argument"),
        (["heatmap", "m", "n", "o", "--text", "a"], "heatmap takes one model, or two"),
        (["heatmap", "m"], "no text; give --text, --file, or --ids 5,17,3 for"),
        (["heatmap", "m", "--text", "a", "--file", "f"], "--text cannot be combined with --file"),
        (["heatmap", "m", "--text", "a", "--ids", "1"], "--ids cannot be combined with --text"),
        (["heatmap", "m", "--file", "f", "--ids", "1"], "--ids cannot be combined with --text or --file"),
        (["heatmap", "m", "--ids", "5,x"], "--ids 5,x: 'x' is not a whole number"),
        (["heatmap", "m", "--ids", ""], "'' is not a whole number"),
        (["heatmap", "m", "--ids", "9" * 5000], "is not a whole number"),
        (["heatmap", "m", "--text", "a", "--layers", "0,,2"], "layers is ''; allowed are mean, all or"),
    ])  # fmt: skip
    def test_is_answered_with_one_line(self, refusal: Callable[..., str], arguments: list[str], says: str) -> None:
        assert says in refusal(*arguments)

    def test_a_message_stays_one_printable_line(self, refusal: Callable[..., str]) -> None:
        assert "\x1b" not in refusal("heat\x1b[31m\nmap")

    def test_of_an_option_without_its_value(self, analyze: Answer) -> None:
        answer = analyze("heatmap", "m", "--text")
        assert answer.code == 2 and "'--text' requires an argument (see analyze heatmap --help)" in answer.err

    def test_the_process_exits_with_2(self) -> None:
        done = process("heatmap", "--text", "a")
        assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1


class TestFile:
    def test_may_be_stdin(self, analyze: Answer, mamba: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a film\nbad music\n")))
        assert len(json.loads(analyze("heatmap", mamba, "--file", "-", "--json").out)["texts"]) == 2


class TestModel:
    """Models that are none: nothing runs, nothing is written."""

    @pytest.fixture
    def rejected(self, refusal: Callable[..., str]) -> Callable[[object], str]:
        return lambda model: refusal("heatmap", model, "--ids", "1,2")

    def test_an_unknown_demo_is_answered_with_the_nearest(self, rejected: Callable[[object], str]) -> None:
        assert "did you mean 'demo/sst2-mamba" in rejected("demo/sst2-mmaba")


def test_a_command_line_has_few_names_of_options() -> None:
    def walk(command: typing.Any) -> Iterator[str]:
        for each in command.params:
            yield from (name for name in each.opts if name.startswith("--"))
        for inner in getattr(command, "commands", {}).values():
            yield from walk(inner)

    names = set(walk(command_of(cli.app)))
    assert {"--text", "--set", "--compile"} <= names and len(names) <= 180


class TestTrain:
    @pytest.fixture
    def reviews(self, tmp_path: Path) -> Path:
        file = tmp_path / "reviews.tsv"
        rows = [f"a {word} film , {word} music .\t{label}" for word, label in (("good", "pos"), ("bad", "neg"))] * 12
        file.write_text("\n".join(["text\tlabel", *rows]) + "\n")
        return file

    def options(self, file: Path, out: Path) -> list[object]:
        sizes = "--set vocabulary=40 --set width=8 --set head-width=8 --set state=4 --epochs 2 --no-progress"
        return ["--data", file, "--out", out, *sizes.split()]

    def test_the_model_can_be_used(self, analyze: Answer, reviews: Path, tmp_path: Path) -> None:
        out = tmp_path / "model"
        answer = analyze("train", "baleen-e", *self.options(reviews, out))
        assert answer.code == 0 and "validation accuracy" in answer.out and str(out) in answer.out
        again = analyze("train", "baleen-e", *self.options(reviews, out), "--json")
        assert json.loads(again.out) == json.loads((out / "training.json").read_text())
        assert "good" in analyze("explain", out, "--text", "a good film").out

    def test_options_are_those_of_the_function(self) -> None:
        from ssmscope.zoo.training import train_model

        train = next(each.callback for each in cli.app.registered_commands if each.callback.__name__ == "train")
        ours, declared = inspect.signature(train).parameters, options_of(train_model, without=("command",))
        theirs = inspect.signature(train_model).parameters
        settings = train_model.verb.settings
        assert set(ours) - set(theirs) == {"json", "set"}
        assert set(theirs) - set(ours) == {"command", *settings} and {"width", "beta", "dropout"} <= settings
        asked_for = {name for name in ours if ours[name].default is inspect.Parameter.empty}
        assert asked_for == {"architecture", "data"} and ours["out"].default is None  # then it is runs/NAME-ARCH
        for name in declared.keys() - settings:
            option = declared[name]
            assert option.read(ours[name].default) == theirs[name].default, name
        described = [typing.get_args(ours[name].annotation)[1].help for name in theirs if name in ours]
        assert all(described)

    def test_refuses(self, refusal: Callable[..., str], reviews: Path, tmp_path: Path) -> None:
        out = tmp_path / "model"
        assert "did you mean 'mamba2'" in refusal("train", "mmaba2", "--data", reviews, "--out", out)
        assert "sst2" in refusal("train", "mamba", "--data", "sst3", "--out", out)
        assert "missing option '--data'" in refusal("train", "mamba", "--out", out)
        assert "width is 'wide'; allowed is a whole number" in refusal(
            "train", "mamba", "--data", reviews, "--out", out, "--set", "width=wide"
        )
        assert "beta is 'x'; allowed is a number" in refusal(
            "train", "mamba", "--data", "d", "--out", out, "--set", "beta=x"
        )
        assert "is a file" in refusal("train", "mamba", "--data", reviews, "--out", reviews)
        assert "learning" in refusal("train", "mamba", "--data", reviews, "--out", out, "--set", "learning_rate=-1")

    def test_an_interruption_says_how_to_go_on(self, analyze, reviews, tmp_path, monkeypatch) -> None:
        place = "ssmscope.zoo.training.verbs.train_model"
        monkeypatch.setattr(place, lambda *_, **__: signal.raise_signal(signal.SIGINT))
        answer = analyze("train", "mamba", *self.options(reviews, tmp_path / "model"))
        assert answer.code == 130 and answer.err.count("\n") == 1 and "the same command continues" in answer.err


class TestModels:
    def test_lists_what_is_shipped_and_what_can_be_loaded(self, analyze: Answer) -> None:
        answer = analyze("models")
        assert answer.code == 0
        for name in ("demo/sst2-mamba", "demo/sst2-mamba2", "demo/sst2-baleen-b", "demo/sst2-baleen-e"):
            assert name in answer.out
        assert answer.out.count("\n") <= 25
        answer = analyze("models", "--full")
        for architecture in ("mamba", "mamba2", "falcon_mamba", "baleen-mamba"):
            assert architecture in answer.out

    def test_as_json(self, analyze: Answer) -> None:
        listed = json.loads(analyze("models", "--json").out)
        assert {"demo/sst2-mamba", "demo/sst2-baleen-e"} <= {model["name"] for model in listed["models"]}
        least = {"books": 0.2}  # of next tokens
        for model in listed["models"]:
            assert least.get(model["name"].removeprefix("demo/").partition("-")[0], 0.5) < model["test"]["accuracy"] < 1
        assert "mamba2" in listed["architectures"]


class TestFaults:
    def test_a_fault_of_ours_shows_its_traceback(self, analyze, mamba, monkeypatch) -> None:
        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError("a fault")

        monkeypatch.setattr("ssmscope.loading.load.load", fail)
        with pytest.raises(RuntimeError, match="a fault"):
            analyze("heatmap", mamba, "--text", TEXT)

    def test_an_interruption_is_one_line(self, analyze: Answer, mamba: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*args: object, **kwargs: object) -> None:
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr("ssmscope.loading.load.load", interrupt)
        answer = analyze("heatmap", mamba, "--text", TEXT)
        assert (answer.code, answer.out, answer.err) == (130, "", "analyze: interrupted\n")

    def test_a_reader_that_stops_early_is_no_fault(self, mamba: Path) -> None:
        read, write = os.pipe()
        os.close(read)
        ids = ",".join(["1"] * 4000)
        code = "import runpy; runpy.run_module('ssmscope', run_name='__main__')"
        try:
            done = TRANSFORMERS.run(code, "heatmap", mamba, "--ids", ids, "--json", stdout=write)
        finally:
            os.close(write)
        assert done.stderr == "" and done.returncode == 1

    def test_a_value_error_of_ours_is_told_from_a_users(self) -> None:
        assert issubclass(errors.InputError, ValueError)


@pytest.mark.parametrize(("line", "words"), [
    ("analyze heat", ["heatmap"]),
    ("analyze heatmap --sco", ["--score"]),
    ("analyze heatmap demo/sst2-bal", ["demo/sst2-baleen-b", "demo/sst2-baleen-e"]),
])  # fmt: skip
def test_a_shell_completes_verbs_options_and_models(line, words):
    asks = {"_ANALYZE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = subprocess.run(
        [sys.executable, "-m", "ssmscope"], env={**os.environ, **asks}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == words


class TestFormats:
    def test_what_is_asked_for_is_written_and_the_result_always(self, analyze, tmp_path):
        given = (
            "stability", "demo/sst2-mamba2", "--length", "9", "--out", str(tmp_path), "--formats", "svg,pdf,tex,md",
        )  # fmt: skip
        answer = analyze(*given)
        assert answer.code == 0
        written = {file.suffix: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
        assert set(written) == {".json", ".svg", ".pdf", ".tex", ".md"}
        assert b"<svg" in written[".svg"] and written[".pdf"].startswith(b"%PDF")
        assert b"\\toprule" in written[".tex"] and written[".md"].startswith(b"| ")
        assert f"Files: {tmp_path / 'stability.json'}, .svg, .pdf, .tex, .md" in answer.out

    @pytest.mark.parametrize(("given", "says"), [
        (["--formats", "png,jpg", "--out", "OUT"], "unknown format 'jpg'; allowed are json, csv, png, html, svg"),
        (["--formats", "png"], "--formats needs --out DIR; give that too"),
    ])  # fmt: skip
    def test_what_is_refused(self, analyze, tmp_path, given, says):
        out = tmp_path / "out"
        answer = analyze("stability", "demo/sst2-mamba2", *(str(out) if each == "OUT" else each for each in given))
        assert answer.code == 2 and says in answer.err and answer.err.count("\n") == 1 and not out.exists()
