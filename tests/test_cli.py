"""`analyze` as its users meet it: the answer on stdout, the files, and one clear line for every bad input."""

from __future__ import annotations

import inspect
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from warm import TRANSFORMERS

from ssmscope import cli, errors, register
from ssmscope.signature import options_of

ROOT = Path(__file__).resolve().parents[1]
WORDS = "a good film with bad acting , but great music .".split()
TEXT = "a good film with bad acting , but great music ."


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mamba with a tokenizer of ten words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("models") / "mamba"
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(directory)
    torch.manual_seed(0)
    sizes = dict(vocab_size=16, hidden_size=16, state_size=4, num_hidden_layers=3)
    MambaForCausalLM(MambaConfig(**sizes, pad_token_id=0, bos_token_id=0, eos_token_id=0)).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def untokenized(mamba: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model without its tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "untokenized"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(mamba / name, directory)
    return directory


Answer = Callable[..., SimpleNamespace]


@pytest.fixture
def refusal(analyze: Answer, tmp_path: Path) -> Callable[..., str]:
    """Runs a command line that must be refused, in the way every refusal has, and returns what the line says."""

    def run(*arguments: object) -> str:
        out = tmp_path / "must-not-appear"
        before = sorted(tmp_path.rglob("*"))
        given = (
            arguments
            if "--out" in arguments or not {"heatmap", "attention", "explain", "fidelity"} & set(arguments)
            else (*arguments, "--out", out)
        )
        answer = analyze(*given)
        assert answer.code == 2
        assert answer.out == ""
        assert answer.err.startswith("analyze: ") and answer.err.count("\n") == 1 and answer.err.endswith("\n")
        assert sorted(tmp_path.rglob("*")) == before
        return answer.err.removeprefix("analyze: ").rstrip("\n")

    return run


def process(*arguments: str | bytes, **options: typing.Any) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ssmscope", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, **options)


class TestAttention:
    def test_writes_its_files_and_says_what_the_last_token_attends_to(self, analyze, mamba, tmp_path) -> None:
        answer = analyze(
            "attention", mamba, "--text", TEXT, "--layers", "0,2", "--span", "great music", "--out", tmp_path
        )
        assert answer.code == 0 and answer.err == ""
        assert "layer 0" in answer.out and "layer 2" in answer.out and "layer 1" not in answer.out
        assert "marked: tokens 8–9" in answer.out
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["attention.csv", "attention.html", "attention.json", "attention.png"]
        options = json.loads((tmp_path / "attention.json").read_text())["provenance"]["options"]
        assert options["layers"] == [0, 2] and options["level"] == "block" and options["span"] == "great music"

    def test_json_alone(self, analyze, untokenized) -> None:
        ids = "1,2,3,4"
        answer = analyze("attention", untokenized, "--ids", ids, "--rows", "-1,0", "--level", "ssm", "--json")
        (text,) = json.loads(answer.out)["texts"]
        assert answer.code == 0 and text["queries"]["values"] == [3, 0] and len(text["maps"]) == 3

    @pytest.mark.parametrize(
        "options", [["--rollout"], ["--gradient"], ["--parts"], ["--heads", "all"], ["--pool", "3"]]
    )
    def test_every_kind_of_map(self, analyze, mamba, options: list[str]) -> None:
        answer = analyze("attention", mamba, "--text", TEXT, *options)
        assert answer.code == 0 and "Implicit attention" in answer.out

    def test_what_cannot_be_is_refused(self, refusal, mamba) -> None:
        given = ("attention", mamba, "--text", TEXT)
        assert "did you mean 'block'" in refusal(*given, "--level", "blck")
        assert "there is no layer 3" in refusal(*given, "--layers", "3")
        assert "layers is 'x'; allowed are all or a whole number" in refusal(*given, "--layers", "1,x")
        assert "target is the class or token of gradient; give both" in refusal(*given, "--target", "3")
        assert "gradient cannot be combined with rollout" in refusal(*given, "--gradient", "--rollout")
        assert "gradient cannot be combined with no skip" in refusal(*given, "--gradient", "--no-skip")
        assert "has no 'zebra'" in refusal(*given, "--span", "zebra")
        assert "no text" in refusal("attention", mamba)
        assert "not pixels" in refusal("attention", mamba, "--image", "x.png")


class TestExplain:
    def test_methods_stand_side_by_side(self, analyze, tmp_path) -> None:
        given = ("explain", "demo/sst2-mamba2", "--text", "A gripping film.", "--methods", "ig,lrp,self-retention")
        answer = analyze(*given, "--target", "negative", "--option", "ig.baseline=zero", "--out", tmp_path)
        assert answer.code == 0 and answer.err == ""
        assert all(name in answer.out for name in ("ig", "lrp", "self-retention", "explained: negative"))
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == ["explain.csv", "explain.html", "explain.json", "explain.png"]
        options = json.loads((tmp_path / "explain.json").read_text())["provenance"]["options"]
        assert options["option"]["ig"]["baseline"] == "zero"

    def test_a_language_models_next_token_against_another(self, analyze, mamba) -> None:
        given = ("explain", mamba, "--text", "a good film with", "--methods", "gradxinput,ig,lrp,occlusion,gradcam")
        answer = analyze(*given, "--target", "music", "--contrast", "acting", "--json")
        (text,) = json.loads(answer.out)["texts"]
        assert answer.code == 0 and text["target"] == "music − acting" and len(text["attributions"]) == 5
        assert analyze(*given, "--target", "bad acting").code == 0  # a continuation

    @pytest.mark.parametrize("demo", ["imdb-baleen-b", "rotten-tomatoes-baleen-e", "snli-mamba2", "sst2-mamba"])
    def test_every_method_on_demos(self, analyze, demo: str) -> None:
        methods = (
            "ig,gradxinput,smoothgrad,gradcam,occlusion,lrp,attention-rollout,attention-gradient,self-write,random"
        )
        answer = analyze("explain", f"demo/{demo}", "--text", "A gripping film.", "--methods", methods, "--json")
        assert answer.code == 0 and len(json.loads(answer.out)["texts"][0]["attributions"]) == 10

    def test_what_cannot_be_is_refused(self, refusal, mamba) -> None:
        given = ("explain", "demo/sst2-mamba2", "--text", "A film.")
        assert "'gradcam'" in refusal(*given, "--methods", "gradcm")
        assert "did you mean 'negative'" in refusal(*given, "--target", "negativ")
        assert "write METHOD.NAME=VALUE" in refusal(*given, "--option", "ig=3")
        assert "baseline" in refusal(*given, "--methods", "ig", "--option", "ig.basline=zero")
        assert "not among the methods" in refusal(*given, "--methods", "ig", "--option", "lrp.half=false")


class TestFidelity:
    def test_says_which_method_is_the_most_faithful(self, analyze, tmp_path) -> None:
        table = tmp_path / "reviews.csv"
        rows = ["a gripping and funny film,positive", "a dull and lifeless mess,negative", "moving and fine,positive"]
        table.write_text("text,label\n" + "\n".join(rows) + "\n")
        methods = ("--methods", "lrp,self-retention,random", "--steps", "5")
        given = ("fidelity", "demo/sst2-mamba2", "--data", table, *methods)
        answer = analyze(*given, "--out", tmp_path / "out")
        assert answer.code == 0 and "ΔA" in answer.out and "random" in answer.out
        assert len(list((tmp_path / "out").iterdir())) == 4
        short = json.loads(analyze(*given, "--max-tokens", "5", "--json").out)
        assert any("longer than asked for" in note for note in short["notes"])

    def test_what_cannot_be_is_refused(self, refusal, mamba) -> None:
        assert "no data" in refusal("fidelity", mamba)
        given = ("fidelity", "demo/sst2-mamba2", "--data", "sts2")
        assert "did you mean 'sst2'" in refusal(*given)


class TestPlausibility:
    def test_says_which_method_people_agree_with(self, analyze, tmp_path) -> None:
        table = tmp_path / "reviews.csv"
        table.write_text("text,label,rationale\na gripping film,positive,gripping\na dull mess,negative,\n")
        given = ("plausibility", "demo/sst2-mamba2", "--data", table, "--methods", "gradxinput,random")
        answer = analyze(*given, "--top", "1", "--out", tmp_path / "out")
        assert answer.code == 0 and "AUPRC" in answer.out and len(list((tmp_path / "out").iterdir())) == 4
        found = json.loads(analyze(*given, "--json").out)
        assert found["texts"] == [0] and found["left_out"] == 1 and found["top"] == found["share"]

    def test_what_cannot_be_is_refused(self, refusal, tmp_path) -> None:
        table = tmp_path / "reviews.csv"
        table.write_text("text,label\na gripping film,positive\na dull mess,negative\n")
        given = ("plausibility", "demo/sst2-mamba2", "--data", table, "--limit", "2")
        assert "has a rationale: give a file with a column 'rationale'" in refusal(*given)
        assert "top is 0.0; allowed" in refusal(*given, "--top", "0")


class TestSanity:
    def test_says_which_methods_need_the_weights(self, analyze, mamba, tmp_path) -> None:
        given = ("sanity", mamba, "--text", TEXT, "--methods", "gradxinput,self-retention", "--layers", "2")
        answer = analyze(*given, "--out", tmp_path)
        assert answer.code == 0 and "randomised down to" in answer.out and len(list(tmp_path.iterdir())) == 4
        found = json.loads(analyze(*given, "--json").out)
        assert found["parts"][-1] == "layer 2" and found["methods"] == ["gradxinput", "self-retention"]

    def test_what_cannot_be_is_refused(self, refusal, mamba) -> None:
        given = ("sanity", mamba, "--text", TEXT, "--methods", "gradxinput")
        assert "there is no layer 7" in refusal(*given, "--layers", "7")
        assert "did you mean 'gradxinput'" in refusal("sanity", mamba, "--text", TEXT, "--methods", "gradxinptu")


class TestHelp:
    def test_a_group_stands_among_the_verbs_in_the_order_of_the_packages(self) -> None:
        command = typer.main.get_command(cli.app)
        names = command.list_commands(None)
        expected = list(dict.fromkeys(name.partition(" ")[0] for name in register.analyses()))
        assert [name for name in names if name in expected] == expected and "lens" in expected
        assert sorted(names) == sorted(command.commands)

    def test_lists_the_verbs(self, analyze: Answer) -> None:
        answer = analyze("--help")
        assert answer.code == 0 and answer.err == ""
        assert all(verb in answer.out for verb in ("heatmap", "attention", "explain", "fidelity", "train"))
        assert analyze().out == answer.out

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
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["heatmpa", "x"], "did you mean 'heatmap'?"),
            (["heatmap"], "missing argument 'MODEL…' (see analyze heatmap --help)"),
            (["influence"], "missing argument 'MODEL' (see analyze influence --help)"),
            (["heatmap", "m", "--txt", "a"], "no option --txt; did you mean '--text'"),
            (["--verson"], "did you mean '--version'?"),
            (["heatmap", "m", "--text", "a", "--top", "many"], "top is 'many'; allowed is a whole number"),
            (["heatmap", "m", "--text", "a", "--max-tokens", "1e3"], "max_tokens is '1e3'; allowed is a whole number"),
            (["heatmap", "m", "--text", "a", "--max-tokens", "0"], "max_tokens is 0; allowed is"),
            (["influence", "m", "n", "--text", "a"], "unexpected extra argument"),
            (["heatmap", "m", "n", "o", "--text", "a"], "heatmap takes one model, or two"),
            (["heatmap", "m"], "no text; give --text TEXT, --file FILE, or --ids"),
            (["heatmap", "m", "--text", "a", "--file", "f"], "--text cannot be combined with --file"),
            (["heatmap", "m", "--text", "a", "--ids", "1"], "--ids cannot be combined with --text"),
            (["heatmap", "m", "--file", "f", "--ids", "1"], "--ids cannot be combined with --text or --file"),
            (["heatmap", "m", "--ids", "5,x"], "--ids '5,x': 'x' is no whole number"),
            (["heatmap", "m", "--ids", ""], "'' is no whole number"),
            (["heatmap", "m", "--ids", "9" * 5000], "is no whole number"),
            (["heatmap", "m", "--text", "a", "--layers", "0,,2"], "layers is ''; allowed are mean, all or"),
        ],
    )
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
    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (b"", "is empty; give one text a line"),
            (b" \n\n", "is empty; give one text a line"),
            (b"a film\n\na film\n", "line 2 is empty"),
            (b"a film\nun cin\xe9ma\n", "is not UTF-8 text (byte 13)"),
        ],
    )
    def test_refuses_what_is_no_list_of_texts(
        self, refusal: Callable[..., str], tmp_path: Path, content: bytes, says: str
    ) -> None:
        (tmp_path / "texts").write_bytes(content)
        assert says in refusal("heatmap", "m", "--file", tmp_path / "texts")

    def test_refuses_a_missing_one_and_a_directory(self, refusal: Callable[..., str], tmp_path: Path) -> None:
        assert "No such file" in refusal("heatmap", "m", "--file", tmp_path / "missing")
        assert "directory" in refusal("heatmap", "m", "--file", tmp_path)

    def test_holds_a_text_a_line(self, analyze: Answer, mamba: Path, tmp_path: Path) -> None:
        (tmp_path / "texts").write_bytes(b"\xef\xbb\xbfa good film\r\nbad acting\n\n")
        texts = json.loads(analyze("heatmap", mamba, "--file", tmp_path / "texts", "--json").out)["texts"]
        assert [text["tokens"] for text in texts] == [["a", "good", "film"], ["bad", "acting"]]

    def test_may_be_stdin(self, analyze: Answer, mamba: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a film\nbad music\n")))
        assert len(json.loads(analyze("heatmap", mamba, "--file", "-", "--json").out)["texts"]) == 2


class TestHeatmap:
    def test_prints_the_tokens_and_the_answer(self, analyze: Answer, mamba: Path) -> None:
        answer = analyze("heatmap", mamba, "--text", "a good film with bad acting")
        assert answer.code == 0 and answer.err == ""
        assert all(word in answer.out for word in ("answer", "survival", "stands out"))

    def test_writes_four_files_and_says_where(self, analyze: Answer, mamba: Path, tmp_path: Path) -> None:
        answer = analyze("heatmap", mamba, "--text", TEXT, "--out", tmp_path / "new" / "folder")
        names = {"heatmap.json", "heatmap.csv", "heatmap.png", "heatmap.html"}
        assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == names
        assert all(f"folder/{name}" in answer.out for name in names)

    def test_json_is_all_of_stdout_and_the_same_as_the_file(self, analyze: Answer, mamba: Path, tmp_path: Path) -> None:
        answer = analyze("heatmap", mamba, "--text", TEXT, "--json", "--out", tmp_path)
        assert json.loads(answer.out) == json.loads((tmp_path / "heatmap.json").read_text())
        assert "heatmap.png" in answer.err

    def test_is_what_python_gives(self, analyze: Answer, mamba: Path) -> None:
        import ssmscope

        trace = ssmscope.load(mamba).trace([TEXT, "bad film"])
        expected = ssmscope.selection_heatmap(trace, score="write", layers=[0, 2], top=2, merge=True)
        options = ("--score", "write", "--layers", "0,2", "--top", "2", "--merge", "--json")
        found = json.loads(analyze("heatmap", mamba, "--text", TEXT, "--text", "bad film", *options).out)
        wanted = json.loads(expected.to_json())
        assert found["texts"] == wanted["texts"]
        assert found["provenance"]["options"] == wanted["provenance"]["options"]

    def test_of_ids_needs_no_tokenizer(self, analyze: Answer, untokenized: Path) -> None:
        found = json.loads(analyze("heatmap", untokenized, "--ids", "5,7, 3", "--ids", "2", "--json").out)
        assert [text["tokens"] for text in found["texts"]] == [["5", "7", "3"], ["2"]]

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--text", ""], "empty"),
            (["--text", " \t\n"], "empty"),
            (["--text", "zebra quagga"], "does not know"),
            (["--text", "🎬🍿"], "does not know"),
            (["--text", "a \x1b[31mgood film"], "U+001B at position 2"),
            (["--text", "a film", "--text", "bad\x00film"], "text 1 has the control character U+0000 at position 3"),
            (["--text", "good film " * 10_000], "20,000 tokens, more than the limit of 16,384"),
            (["--text", TEXT, "--max-tokens", "5"], "11 tokens, more than the limit of 5"),
            (["--text", "a \udcff film"], "not valid UTF-8"),
            (["--ids", "1,16"], "16, outside the model's vocabulary 0…15"),
            (["--ids", "-1"], "-1, outside"),
            (["--text", TEXT, "--score", "retain"], "unknown score 'retain'; allowed are survival, retention, write"),
            (["--text", TEXT, "--layers", "men"], "did you mean 'mean'?"),
            (["--text", TEXT, "--layers", "0,3"], "no layer 3"),
            (["--text", TEXT, "--layers", "-1"], "layers is -1; allowed"),
            (["--text", TEXT, "--top", "0"], "top is 0"),
            (["--text", TEXT, "--device", "cud"], "cud"),
            (["--text", TEXT, "--device", "cuda:99"], "cuda:99"),
            (["--text", TEXT, "--dtype", "int8"], "choose one of auto, float32, float64, bfloat16, float16"),
        ],
    )
    def test_refuses(self, refusal: Callable[..., str], mamba: Path, arguments: list[str], says: str) -> None:
        assert says in refusal("heatmap", mamba, *arguments)

    def test_says_what_to_do_about_a_long_text(self, refusal: Callable[..., str], mamba: Path) -> None:
        said = refusal("heatmap", mamba, "--text", "a" * 50_000 + " " + "good " * 20_000)
        assert "--max-tokens" in said and len(said) < 300

    def test_refuses_a_text_without_a_tokenizer(self, refusal: Callable[..., str], untokenized: Path) -> None:
        assert "--ids" in refusal("heatmap", untokenized, "--text", TEXT)

    def test_refuses_an_out_that_is_a_file(self, refusal: Callable[..., str], mamba: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        assert "is a file" in refusal("heatmap", mamba, "--text", TEXT, "--out", tmp_path / "file")
        assert "is a file" in refusal("heatmap", mamba, "--text", TEXT, "--out", tmp_path / "file" / "below")
        assert (tmp_path / "file").read_text() == "mine"

    def test_refuses_an_out_that_cannot_be_written(self, refusal: Callable[..., str], mamba: Path) -> None:
        assert "annot" in refusal("heatmap", mamba, "--text", TEXT, "--out", "/proc/heatmap")

    @pytest.mark.parametrize("demo", ["sst2-mamba", "sst2-mamba2", "sst2-baleen-b", "sst2-baleen-e"])
    def test_of_a_shipped_model(self, analyze: Answer, refusal: Callable[..., str], demo: str) -> None:
        answer = analyze("heatmap", f"demo/{demo}", "--text", "A gripping, beautifully acted film.", "--json")
        (text,) = json.loads(answer.out)["texts"]
        assert text["answer"] == "positive" and {"gripping", ","} <= {token.strip() for token in text["tokens"]}
        assert "does not know" in refusal("heatmap", f"demo/{demo}", "--text", "🎬🍿")


class TestModel:
    """What is no model: nothing runs, nothing is written."""

    @pytest.fixture
    def rejected(self, refusal: Callable[..., str]) -> Callable[[object], str]:
        return lambda model: refusal("heatmap", model, "--ids", "1,2")

    def test_an_unknown_demo_is_answered_with_the_nearest(self, rejected: Callable[[object], str]) -> None:
        assert "did you mean 'demo/sst2-mamba" in rejected("demo/sst2-mmaba")

    def test_an_unknown_name(self, rejected: Callable[[object], str]) -> None:
        assert "sst2-mamba" in rejected("sst2-mamba")
        assert "nobody/such-model" in rejected("nobody/such-model")
        assert "no/such/place" in rejected("no/such/place")

    def test_a_directory_without_a_configuration(self, rejected: Callable[[object], str], tmp_path: Path) -> None:
        assert "config.json" in rejected(tmp_path)

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"model_type": "mamba", "hidden_size": "wide"}', "{}"])
    def test_a_configuration_that_is_none(
        self, rejected: Callable[[object], str], tmp_path: Path, content: str
    ) -> None:
        (tmp_path / "config.json").write_text(content)
        assert str(tmp_path) in rejected(tmp_path)

    @pytest.mark.parametrize("kept", [0, 4, 200, -1])
    def test_a_truncated_safetensors_file(
        self, rejected: Callable[[object], str], untokenized: Path, tmp_path: Path, kept: int
    ) -> None:
        weights = (untokenized / "model.safetensors").read_bytes()
        shutil.copy(untokenized / "config.json", tmp_path)
        (tmp_path / "model.safetensors").write_bytes(weights[:kept])
        assert str(tmp_path) in rejected(tmp_path)

    def test_no_weights(self, rejected: Callable[[object], str], untokenized: Path, tmp_path: Path) -> None:
        shutil.copy(untokenized / "config.json", tmp_path)
        assert str(tmp_path) in rejected(tmp_path)

    @pytest.mark.parametrize("layout", ["transformers", "mamba_ssm", "file"])
    @pytest.mark.parametrize("container", ["pickle", "zip"])
    def test_a_pickle_with_code_is_not_run(
        self,
        rejected: Callable[[object], str],
        untokenized: Path,
        tmp_path: Path,
        layout: str,
        container: str,
    ) -> None:
        import torch

        proof, model = tmp_path / "was-run", tmp_path / "model"
        model.mkdir()
        if layout == "transformers":
            shutil.copy(untokenized / "config.json", model)
        elif layout == "mamba_ssm":
            (model / "config.json").write_text('{"d_model": 16, "n_layer": 3, "vocab_size": 16, "ssm_cfg": {}}')
        weights = model / ("weights.pth" if layout == "file" else "pytorch_model.bin")
        payload = {"backbone.norm_f.weight": RunsWhenRead(str(proof))}
        if container == "pickle":
            weights.write_bytes(pickle.dumps(payload))
        else:
            torch.save(payload, weights)
        rejected(weights if layout == "file" else model)
        assert not proof.exists()

    def test_a_transformer(self, rejected: Callable[[object], str], tmp_path: Path) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16)).save_pretrained(tmp_path)
        said = rejected(tmp_path)
        assert "GPT2" in said and "state-space" in said

    def test_a_file_that_is_no_checkpoint(self, rejected: Callable[[object], str], tmp_path: Path) -> None:
        (tmp_path / "notes.pth").write_text("not a model")
        assert "notes.pth" in rejected(tmp_path / "notes.pth")


class RunsWhenRead:
    """Pickled, this is an instruction to create a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[typing.Any, ...]:
        return os.mkdir, (self.path,)


class TestTrain:
    @pytest.fixture
    def reviews(self, tmp_path: Path) -> Path:
        file = tmp_path / "reviews.tsv"
        rows = [f"a {word} film , {word} music .\t{label}" for word, label in (("good", "pos"), ("bad", "neg"))] * 12
        file.write_text("\n".join(["text\tlabel", *rows]) + "\n")
        return file

    def options(self, file: Path, out: Path) -> list[object]:
        sizes = ["--vocabulary", 40, "--width", 8, "--head-width", 8, "--state", 4, "--epochs", 2, "--no-progress"]
        return ["--data", file, "--out", out, *sizes]

    def test_the_model_can_be_used(self, analyze: Answer, reviews: Path, tmp_path: Path) -> None:
        out = tmp_path / "model"
        answer = analyze("train", "baleen-e", *self.options(reviews, out))
        assert answer.code == 0 and "validation accuracy" in answer.out and str(out) in answer.out
        again = analyze("train", "baleen-e", *self.options(reviews, out), "--json")
        assert json.loads(again.out) == json.loads((out / "training.json").read_text())
        assert "good" in analyze("explain", out, "--text", "a good film").out

    def test_options_are_those_of_the_function(self) -> None:
        from ssmscope.training import train_model

        train = next(each.callback for each in cli.app.registered_commands if each.callback.__name__ == "train")
        ours, declared = inspect.signature(train).parameters, options_of(train_model, without=("command",))
        theirs = inspect.signature(train_model).parameters
        assert set(ours) - set(theirs) == {"json"} and set(theirs) - set(ours) == {"command"}
        asked_for = {name for name in ours if ours[name].default is inspect.Parameter.empty}
        assert asked_for == {"architecture", "data"} and ours["out"].default is None  # then it is runs/NAME-ARCH
        for name, option in declared.items():
            assert option.read(ours[name].default) == theirs[name].default, name
        described = [typing.get_args(ours[name].annotation)[1].help for name in theirs if name in ours]
        assert all(described)

    def test_refuses(self, refusal: Callable[..., str], reviews: Path, tmp_path: Path) -> None:
        out = tmp_path / "model"
        assert "did you mean 'mamba2'" in refusal("train", "mmaba2", "--data", reviews, "--out", out)
        assert "sst2" in refusal("train", "mamba", "--data", "sst3", "--out", out)
        assert "missing option '--data'" in refusal("train", "mamba", "--out", out)
        assert "width is 'wide'; allowed is a whole number" in refusal(
            "train", "mamba", "--data", reviews, "--out", out, "--width", "wide"
        )
        assert "beta is 'x'; allowed is a number" in refusal(
            "train", "mamba", "--data", "d", "--out", out, "--beta", "x"
        )
        assert "is a file" in refusal("train", "mamba", "--data", reviews, "--out", reviews)
        assert "learning" in refusal("train", "mamba", "--data", reviews, "--out", out, "--learning-rate", "-1")

    def test_an_interruption_says_how_to_go_on(
        self, analyze: Answer, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ssmscope.cli.training.train_model", lambda *_, **__: signal.raise_signal(signal.SIGINT))
        answer = analyze("train", "mamba", *self.options(reviews, tmp_path / "model"))
        assert answer.code == 130 and answer.err.count("\n") == 1 and "the same command continues" in answer.err


class TestModels:
    def test_lists_what_is_shipped_and_what_can_be_loaded(self, analyze: Answer) -> None:
        answer = analyze("models")
        assert answer.code == 0
        for name in ("demo/sst2-mamba", "demo/sst2-mamba2", "demo/sst2-baleen-b", "demo/sst2-baleen-e"):
            assert name in answer.out
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
    def test_a_fault_of_ours_shows_its_traceback(
        self, analyze: Answer, mamba: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError("a fault")

        monkeypatch.setattr("ssmscope.models.load.load", fail)
        with pytest.raises(RuntimeError, match="a fault"):
            analyze("heatmap", mamba, "--text", TEXT)

    def test_an_interruption_is_one_line(self, analyze: Answer, mamba: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupt(*args: object, **kwargs: object) -> None:
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr("ssmscope.models.load.load", interrupt)
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


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("analyze heat", ["heatmap"]),
        ("analyze heatmap --sco", ["--score"]),
        ("analyze heatmap demo/sst2-bal", ["demo/sst2-baleen-b", "demo/sst2-baleen-e"]),
    ],
)
def test_a_shell_completes_verbs_options_and_models(line, words):
    asks = {"_ANALYZE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    done = subprocess.run(
        [sys.executable, "-m", "ssmscope"], env={**os.environ, **asks}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == words


class TestFormats:
    def test_what_is_asked_for_is_written_and_the_result_always(self, analyze, tmp_path):
        given = (
            "stability",
            "demo/sst2-mamba2",
            "--length",
            "9",
            "--out",
            str(tmp_path),
            "--formats",
            "svg,pdf,tex,md",
        )
        answer = analyze(*given)
        assert answer.code == 0
        written = {file.suffix: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
        assert set(written) == {".json", ".svg", ".pdf", ".tex", ".md"}
        assert b"<svg" in written[".svg"] and written[".pdf"].startswith(b"%PDF")
        assert b"\\toprule" in written[".tex"] and written[".md"].startswith(b"| ")
        assert all(str(tmp_path / f"stability{suffix}") in answer.out for suffix in written)

    @pytest.mark.parametrize(
        ("given", "says"),
        [
            (["--formats", "png,jpg", "--out", "OUT"], "unknown format 'jpg'; allowed are json, csv, png, html, svg"),
            (["--formats", "png"], "--formats says what is written: give --out DIR too"),
        ],
    )
    def test_what_is_refused(self, analyze, tmp_path, given, says):
        out = tmp_path / "out"
        answer = analyze("stability", "demo/sst2-mamba2", *(str(out) if each == "OUT" else each for each in given))
        assert answer.code == 2 and says in answer.err and answer.err.count("\n") == 1 and not out.exists()
