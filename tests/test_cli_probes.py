"""`analyze stability`, `bound`, `checkpoints` and `influence`: options, printed and written output."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

IDS = ("--ids", "1,4,2,0,3,1,2", "--ids", "2,2,4,1")
Answer = Callable[..., SimpleNamespace]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Mamba of five tokens, and in `sweep` three selective SSMs of three spectral abscissae."""
    import torch
    from transformers import MambaConfig, MambaForCausalLM
    from ssmscope.zoo.selective import SelectiveSSMConfig, SelectiveSSMForSequenceClassification

    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    sizes = dict(vocab_size=5, hidden_size=8, state_size=4, num_hidden_layers=2)
    MambaForCausalLM(MambaConfig(**sizes, pad_token_id=0, bos_token_id=0, eos_token_id=0)).save_pretrained(
        folder / "mamba"
    )
    (folder / "sweep").mkdir()
    for name, abscissa in (("a.pth", -0.2), ("b.pth", 0.0), ("c.pth", 0.1)):
        config = SelectiveSSMConfig(vocab_size=5, hidden_size=6, state_size=3, spectral_abscissa=abscissa)
        weights = SelectiveSSMForSequenceClassification(config).state_dict()
        parts = {f"SSM.{key}" if key.startswith("ssm.") else key: t for key, t in weights.items()}
        parts["SSM.w"] = parts.pop("head.weight")[0]
        torch.save(parts, folder / "sweep" / name)
    return folder


@pytest.fixture(scope="module")
def trained(models: Path) -> Path:
    """A selective SSM's directory with the record of its training on 321 examples."""
    from ssmscope import load

    load(models / "sweep" / "a.pth").module.save_pretrained(models / "trained")
    record = {"data": {"train": {"name": "majority", "examples": 321}}}
    (models / "trained" / "training.json").write_text(json.dumps(record))
    return models / "trained"


def said(result: Any) -> dict[str, Any]:
    """A result as its JSON, but for when it was made."""
    found = json.loads(result.to_json()) if not isinstance(result, dict) else result
    return {**found, "provenance": {k: v for k, v in found["provenance"].items() if k != "date"}}


class TestBound:
    def test_of_a_selective_ssm(self, analyze: Answer, models: Path, tmp_path: Path) -> None:
        import ssmscope

        file = models / "sweep" / "a.pth"
        options = ("--delta", 0.1, "--loss-bound", 2, "--lipschitz", 3, "--lengths", "10,99")
        given = ("bound", file, "--length", 30, "--examples", 77, *options, "--out", tmp_path)
        answer = analyze(*given, "--json")
        names = [f"bound.{suffix}" for suffix in ("csv", "html", "json", "png")]
        assert answer.code == 0 and sorted(path.name for path in tmp_path.iterdir()) == names
        assert f"{tmp_path / 'bound.json'}, .csv, .png, .html" in answer.err
        found = json.loads(answer.out)
        setting: dict[str, Any] = dict(examples=77, delta=0.1, loss_bound=2.0, lipschitz=3.0, lengths=[10, 99])
        wanted = ssmscope.bound(ssmscope.load(file), length=30, **setting)
        assert said(found) == said(wanted) == said(json.loads((tmp_path / "bound.json").read_text()))
        shown = analyze(*given)
        assert shown.out.index("Generalisation bound of") < shown.out.index("Files:")

    def test_the_record_of_the_training_says_how_many_examples(self, analyze: Answer, trained: Path) -> None:
        given = ("bound", trained, "--length", 20, "--json")
        assert json.loads(analyze(*given).out)["examples"] == 321
        assert json.loads(analyze(*given, "--examples", 5).out)["examples"] == 5

    def test_what_cannot_be_is_refused(self, refusal: Callable[..., str], models: Path) -> None:
        one = models / "sweep" / "a.pth"
        assert "is not recorded; give it, --examples" in refusal("bound", one, "--length", 20)
        assert "holds for all texts: leave them out" in refusal("bound", one, *IDS, "--examples", 9)
        assert "delta is 2.0" in refusal("bound", one, "--length", 5, "--examples", 9, "--delta", 2)
        assert "examples is 0" in refusal("bound", one, "--length", 5, "--examples", 0)
        assert "lengths is 'z'" in refusal("bound", one, "--examples", 9, "--lengths", "3,z")


class TestTable:
    def test_a_row_a_checkpoint(self, analyze: Answer, models: Path, tmp_path: Path) -> None:
        import ssmscope

        files = [models / "sweep" / name for name in ("c.pth", "a.pth", "b.pth")]
        options = ("--length", 30, "--examples", 77, "--delta", 0.1, "--lengths", "10,99", "--seed", 2)
        answer = analyze("checkpoints", *files, *options, "--out", tmp_path)
        assert answer.code == 0 and "Stability of 3 checkpoints" in answer.out
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == [f"checkpoints.{suffix}" for suffix in ("csv", "html", "json", "png")]
        setting: dict[str, Any] = dict(examples=77, delta=0.1, lengths=[10, 99], seed=2)
        wanted = ssmscope.checkpoints([str(file) for file in files], length=30, **setting)
        found = json.loads((tmp_path / "checkpoints.json").read_text())
        assert said(found) == said(wanted)
        assert [round(row["abscissa"], 6) for row in found["rows"]] == [0.1, -0.2, 0.0]
        assert said(json.loads(analyze("checkpoints", *files, *options, "--json").out)) == said(wanted)

    def test_a_directory_stands_for_the_checkpoints_in_it(self, analyze: Answer, models: Path, tmp_path: Path) -> None:
        shutil.copytree(models / "sweep", tmp_path / "sweep")
        (tmp_path / "sweep" / "log.txt").write_text("no checkpoint")
        (tmp_path / "sweep" / ".c.pth").write_text("nor this")
        shutil.copytree(models / "mamba", tmp_path / "sweep" / "mamba")
        found = json.loads(analyze("checkpoints", tmp_path / "sweep", models / "sweep" / "b.pth", "--json").out)
        names = [Path(row["name"]).name for row in found["rows"]]
        assert names == ["a.pth", "b.pth", "c.pth", "mamba", "b.pth"]
        for name in ("b.pth", "c.pth"):
            (tmp_path / "sweep" / name).unlink()
        shutil.rmtree(tmp_path / "sweep" / "mamba")
        alone = json.loads(analyze("checkpoints", tmp_path / "sweep", "--length", 9, "--json").out)
        assert [Path(row["name"]).name for row in alone["rows"]] == ["a.pth"]

    def test_a_damaged_checkpoint_stops_nothing(self, analyze: Answer, models: Path, tmp_path: Path) -> None:
        import torch

        whole = (models / "sweep" / "a.pth").read_bytes()
        weights = torch.load(models / "sweep" / "b.pth", weights_only=True)
        weights["SSM.ssm.A"][0, 0] = float("nan")
        torch.save(weights, tmp_path / "nan.pth")
        torch.save({"weights": [1, 2]}, tmp_path / "other.pth")
        for name, content in {"cut": whole[:1500], "empty": b"", "text": b"hello", "whole": whole}.items():
            (tmp_path / f"{name}.pth").write_bytes(content)
        answer = analyze("checkpoints", tmp_path, tmp_path / "absent.pth", "--length", 9, "--full")
        assert answer.code == 0 and answer.err == ""
        assert "Stability of 7 checkpoints: 1 stable, 6 unreadable" in answer.out
        for name in ("cut", "empty", "text", "nan", "other", "absent"):
            assert f"{name}.pth unreadable" in answer.words and f" {name}.pth: " in answer.words
        found = json.loads(analyze("checkpoints", tmp_path, "--length", 9, "--json").out)
        assert [Path(row["name"]).stem for row in found["rows"] if not row["reason"]] == ["whole"]

    def test_what_cannot_be_is_refused(self, refusal: Callable[..., str], models: Path, tmp_path: Path) -> None:
        files = [models / "sweep" / name for name in ("a.pth", "b.pth")]
        for option in ("--text", "--sequences", "--tokenizer", "--device"):
            assert f"no option {option}" in refusal("checkpoints", *files, option, 3)
        assert "3 lengths were given for 2 checkpoints" in refusal("checkpoints", *files, "--length", "5,6,7")
        assert "examples is 0" in refusal("checkpoints", *files, "--examples", 0)
        (tmp_path / "x.pth").write_text("x")
        (tmp_path / "y.pth").write_text("y")
        assert "none of the 2 checkpoints can be read" in refusal("checkpoints", tmp_path)


@pytest.mark.parametrize("name", ["9" * 5000, "a\udc80", "x" * 300 + "/" + "y" * 300])
def test_a_name_that_no_file_can_have(refusal, name: str) -> None:
    assert "analyze: " in refusal("stability", name, "--text", "a")
