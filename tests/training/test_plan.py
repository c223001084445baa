"""`analyze train`: options of each architecture and task, their defaults, and refusals."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
from ssmscope import cli
from ssmscope.errors import InputError
from ssmscope.zoo.training import train_model
from ssmscope.zoo.training.options import RECIPES, SELECTIVE, defaults
from ssmscope.zoo.training.plan import checked

RECALL = "--data associative-recall --length 8 --set vocabulary=4 --examples 40 --epochs 1 --no-progress".split()
SIZES = "--set width=8 --set state=4 --set head_width=8"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SSMSCOPE_DATA", raising=False)
    return tmp_path


def settled(architecture: str, data: str, **given) -> dict:
    """The options of a run that is given `given` only."""
    defaults = {name: p.default for name, p in inspect.signature(train_model).parameters.items()}
    return checked({**defaults, "architecture": architecture, "data": data, "out": Path("out"), **given})


@pytest.mark.parametrize(("architecture", "own", "backbone", "config"), [
    ("diff-mamba", f"{SIZES} --set layers=1 --set scope=s6 --set normalize=false --set lambda_form=scalar",
     "diff-mamba", {"scope": "s6", "normalize": False, "lambda_form": "scalar"}),
    ("groupmamba", f"{SIZES} --set k=2 --set cross_attention=false", "groupmamba-mamba2",
     {"k": 2, "cross_attention": False}),
    ("gfssm", f"{SIZES} --set layers=1 --set state_groups=2 --set fir_taps=3 --set prompt=false", "gfssm",
     {"fir_taps": 3, "prompt": False}),
    ("selective", "--set width=8 --set state=4", "selective-ssm", {"state_size": 4}),
])  # fmt: skip
def test_the_command_line_trains_the_papers_architectures(architecture, own, backbone, config, capsys) -> None:
    assert cli.run(["train", architecture, *RECALL, *own.split(), "--json"]) == 0
    out = Path("runs", f"associative-recall-{architecture}")
    record = json.loads((out / "training.json").read_text())
    assert json.loads(capsys.readouterr().out) == record
    assert (record["architecture"], record["backbone"]) == (architecture, backbone)
    saved = json.loads((out / "config.json").read_text())
    assert {name: saved[name] for name in config} == config
    assert record["command"].startswith("analyze ")
    assert cli.run(["train", architecture, *RECALL, *own.split()]) == 0
    said = capsys.readouterr().out
    assert f"test accuracy {record['test']['accuracy']:.3f}" in said and f"Saved in {out};" in said
    if architecture in ("selective", "diff-mamba"):
        assert ("spectral abscissa" if architecture == "selective" else "mean lambda") in said
    assert cli.run(["heatmap", str(out), "--text", "k0 v1 k1", "--json"]) == 0


def test_a_model_of_one_kind_of_question_can_be_asked_as_it_says(capsys) -> None:
    line = "train mamba2 --data needle --length 12 --examples 200 --epochs 1 --set layers=1 --no-progress"
    assert cli.run(f"{line} {SIZES}".split()) == 0
    said = capsys.readouterr().out.split("try: analyze ")[1].split()
    assert said == ["retrieval", "runs/needle-mamba2", "--tasks", "needle", "--lengths", "0,500"]
    assert cli.run([*said[:-1], "0,20", "--examples", "8", "--no-progress"]) == 0
    assert "Retrieval, accuracy on needle" in capsys.readouterr().out


def test_without_out_a_file_names_the_directory(empty_folder, capsys) -> None:
    Path("words.txt").write_text("a b c d\n" * 30)
    line = f"train mamba2 --data words.txt {SIZES} --epochs 1 --length 8 --set layers=1 --no-progress"
    assert cli.run(line.split()) == 0
    assert "validation perplexity" in capsys.readouterr().out
    assert sorted(path.name for path in empty_folder.iterdir()) == ["runs", "words.txt"]
    assert Path("runs/words-mamba2/training.json").exists()


@pytest.mark.parametrize(("line", "says"), [
    ("mamba2 --data majority --set k=2", "k does not apply to mamba2"),
    ("mamba2 --data majority --set scope=s6", "scope does not apply to mamba2"),
    ("mamba2 --data majority --set spectral_abscissa=0.1", "spectral_abscissa does not apply to mamba2"),
    ("gfssm --data majority --set k=2", "k does not apply to gfssm on mamba2"),
    ("selective --data majority --set layers=2", "layers does not apply to selective"),
    ("selective --data majority --set decays=spread", "decays does not apply to selective"),
    ("gla --data majority --set head_width=8", "head_width does not apply to gla"),
    ("mamba2 --data sst2 --set flipped=0.1", "flipped does not apply to sst2"),
    ("mamba2 --data associative-recall --set pairs=4", "pairs does not apply to associative-recall"),
    ("mamba2 --data mqar --set every_token=true", "every_token does not apply to mqar"),
    ("mamba2 --data wikitext2 --set every_token=true", "every_token does not apply to wikitext2"),
    ("mamba2 --data sst2 --set padding=read", "padding does not apply to mamba2"),
    ("selective --data majority --set padding=read", "padding does not apply to majority"),
    ("mamba2 --data majority --set start=normal", "start does not apply to mamba2"),
    ("selective --data majority --set start=authors", "start is 'authors'; choose one of scaled, normal"),
    ("mamba2 --data majority --set optimizer=sgd", "optimizer is 'sgd'; choose one of adamw, adam"),
    ("mamba2 --data sst2 --length 9", "length does not apply to sst2"),
    ("mamba2 --data digits --examples 9", "examples does not apply to digits"),
    ("mamba2 --data qa1 --unit byte", "unit does not apply to qa1"),
    ("mamba2 --data fuzzy-recall --set prompt_weight=1", "prompt_weight does not apply to fuzzy-recall"),
    ("mamba2 --data majority --filler a.txt", "filler does not apply to majority"),
    ("mamba2 --data majority --set vocabulary=5", "vocabulary does not apply to majority"),
    ("mamba2 --data majority --set lowercase=true", "lowercase does not apply to majority"),
    ("mamba2 --data majority --set max_length=5", "max_length does not apply to majority"),
    ("mamba2 --data majority --set token_dropout=0.1", "token_dropout does not apply to majority"),
    ("mamba2 --data digits --set embedding_dropout=0.1", "embedding_dropout does not apply to digits"),
    ("mamba2 --data qa1 --set label_smoothing=0.1", "label_smoothing does not apply to qa1"),
    ("mamba2 --data qa1 --set spread_penalty=1", "spread_penalty does not apply to qa1"),
    ("mamba2 --data majority --split train", "majority, which has its own splits"),
    ("mamba2 --data qa1 --test x", "qa1, whose questions are generated"),
    ("mamba2 --data majority --recipe experiment1", "the recipe 'experiment1' is the selective SSM's"),
    ("selective --data majority --recipe experiment3", "unknown recipe 'experiment3'; choose one of experiment1"),
    ("selective --data majority --recipe experiment3", "did you mean 'experiment"),
    ("mamba2 --data asociative-recall", "did you mean 'associative-recall'"),
    ("mamba2 --data qa6", "unknown data 'qa6'"),
    ("mmaba2 --data majority", "did you mean 'mamba2'"),
    ("selective --data digits", "the selective SSM reads tokens"),
    ("rwkv --data majority --set layers=1", "layers is 1; for this rwkv it must be at least 2"),
    ("groupmamba --data majority --set k=3 --set layers=2", "layers is 2; for this groupmamba it must be at least 3"),
    ("mamba2 --data majority --examples 4 --set held_out=0.01", "held_out 0.01 of 4 examples leaves one of two"),
    ("mamba2 --data associative-recall --examples 3 --set held_out=0.9", "held_out 0.9 of 3 examples leaves one"),
    ("mamba2 --data majority --set share=0.0001", "a balanced share of 0.0001 needs 0 of class 'more zeros'"),
    ("mamba2 --data majority --set flipped=1.5", "flipped is 1.5; it must be from 0 to 1"),
    ("mamba2 --data majority --set share=0", "share is 0.0; it must be above 0"),
    ("mamba2 --data associative-recall --set vocabulary=1", "vocabulary is 1; it must be at least 2"),
    ("mamba2 --data sst2 --set vocabulary=7", "vocabulary is 7; it must be at least 8"),
    ("mamba2 --data associative-recall --length 7", "length is 7; give an even number"),
    ("mamba2 --data compression --length 1", "length is 1; allowed is a whole number from 2 on"),
    ("diff-mamba --data majority --set scope=blok", "scope is 'blok'; choose one of block, s6"),
    ("mamba2 --data absent.txt", "absent.txt could not be read"),
    ("mamba2 --data listops --length 0", "length is 0"),
    ("mamba2 --data text.txt --unit byte --set vocabulary=300", "vocabulary does not apply to bytes"),
    ("mamba2 --data text.txt --split train", "split 'train' was asked for, but file"),
    ("mamba2 --data text.txt --length 100000", "held_out 0.1 of 1 examples leaves one of two parts empty"),
    ("mamba2 --data majority --init-from demo/sst2-mamba2", "tokens, and majority has 2; init_from needs"),
    ("mamba2 --data associative-recall --init-from demo/sst2-mamba2", "demo/sst2-mamba2 is a classifier"),
    ("selective --data majority --init-from demo/sst2-mamba2", "is not a classifier with a selective SSM"),
])  # fmt: skip
def test_what_means_nothing_is_refused_in_one_line(line, says, tmp_path, capsys) -> None:
    Path("text.txt").write_text("some words in a line\n")
    assert cli.run(["train", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("analyze: ") and err.count("\n") == 1
    assert says in err
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_pixels_are_not_learnt_by_a_model_of_tokens() -> None:
    pytest.importorskip("sklearn")
    with pytest.raises(InputError, match="demo/sst2-mamba2 reads no pixels of 1 channels"):
        train_model("mamba2", "digits", "out", init_from="demo/sst2-mamba2", progress=False)
    assert not Path("out").exists()


class TestDefaults:
    def test_experiment_1_is_the_papers(self) -> None:
        options = settled("selective", "majority", recipe="experiment1")
        assert (options["epochs"], options["share"], options["spectral_abscissa"]) == (10, 0.1, 0.1)
        expected = {name: SELECTIVE[name] for name in ("learning_rate", "schedule", "clip", "spread_penalty")}
        assert {name: options[name] for name in expected} == expected
        assert (options["width"], options["state"], options["held_out"]) == (16, 4, 0.0)

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_what_is_given_goes_before_the_recipe(self, recipe) -> None:
        given = {"epochs": 3, "share": 0.5, "spectral_abscissa": -0.5, "learning_rate": 0.1, "width": 5}
        options = settled("selective", "majority", recipe=recipe, **given)
        assert {name: options[name] for name in given} == given

    def test_zero_is_a_value(self) -> None:
        options = settled("mamba2", "sst2", dropout=0.0, subword_dropout=0.0, held_out=0.0)
        assert options["dropout"] == options["subword_dropout"] == options["held_out"] == 0.0
        assert settled("mamba2", "sst2")["dropout"] == 0.3
        assert settled("selective", "majority", spread_penalty=0.0)["spread_penalty"] == 0.0

    @pytest.mark.parametrize(
        ("data", "kind"),
        [("sst2", "text"), ("digits", "pixels"), ("majority", "sequences"), ("qa1", "tokens"), ("a.txt", "language")],
    )
    def test_are_those_of_the_kind(self, data, kind) -> None:
        options = settled("mamba2", data)
        recipe = defaults("mamba2", kind, None)
        shared = {name: recipe[name] for name in ("width", "decays", "held_out", "epochs", "batch_size", "saved_as")}
        assert options["kind"] == kind and recipe["epochs"] > 1
        assert {name: options[name] for name in shared} == shared

    def test_a_model_has_as_many_layers_as_it_needs(self) -> None:
        assert settled("groupmamba", "majority", k=4)["layers"] == 4
        assert settled("rwkv", "sst2")["layers"] == 2
        assert settled("mamba2", "sst2")["layers"] == 1
        assert settled("selective", "majority")["layers"] is None
