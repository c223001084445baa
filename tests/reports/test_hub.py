"""Tests of what is put on the hub, the card by which its tables are read, and models read from the hub's cache."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pandas as pd
import pytest
from examples import relative
from huggingface_hub.errors import LocalTokenNotFoundError
from huggingface_hub.utils import filter_repo_objects
from refusals import refusal
import ssmscope
from ssmscope.core.known_models import demos
from ssmscope.loading.load import trained_examples, trained_on
from ssmscope.reports.hub import dataset_card, push

ADDRESS = "https://huggingface.co/them/it"


@pytest.fixture
def hub(monkeypatch) -> dict[str, Any]:
    """A hub that keeps what it is told, and the names of files that it is given."""
    told: dict[str, Any] = {}

    class Address(str):
        repo_id = "them/it"

    def create(self, name: str, **options: Any) -> Address:
        told["made"] = (name, options)
        return Address(ADDRESS)

    def upload(self, *, folder_path: Path, ignore_patterns: list[str], **options: Any) -> None:
        names = [file.relative_to(folder_path).as_posix() for file in folder_path.rglob("*") if file.is_file()]
        told["files"] = sorted(filter_repo_objects(names, ignore_patterns=ignore_patterns))
        told["options"] = options

    monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", create)
    monkeypatch.setattr(huggingface_hub.HfApi, "upload_folder", upload)
    return told


def files_of(where: Path, *names: str) -> Path:
    for name in names:
        (where / name).parent.mkdir(parents=True, exist_ok=True)
        (where / name).write_text("a,b\n1,x\n" if name.endswith(".csv") else "{}")
    return where


def test_a_model_is_uploaded_with_its_card(hub, tmp_path):
    assert push("demo/sst2-mamba2", "them/it", private=True) == ADDRESS
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "training.json"} <= {*hub["files"]}
    assert hub["made"] == ("them/it", dict(repo_type="model", private=True, exist_ok=True))
    assert hub["options"]["repo_type"] == "model" and hub["options"]["repo_id"] == "them/it"
    push(files_of(tmp_path, "config.json", "checkpoint/state.pt", "logs/events", ".a.unfinished"), "them/it")
    assert hub["files"] == ["config.json", "logs/events"]


def test_a_report_is_uploaded_as_a_data_set(hub, tmp_path):
    made = ("index.html", "all.parquet", "tables/a.csv", "tables/a.md", "results/1/heatmap.csv", "results/1/job.json")
    left = ("working/2/.parts.sqlite", "failed/2.json", "results/1/.b", "answers.sqlite", "lock")
    push(files_of(tmp_path, *made, *left), "them/it")
    assert hub["files"] == sorted([*made, "README.md"]) and hub["made"][1]["repo_type"] == "dataset"
    (tmp_path / "README.md").write_text("mine")
    push(tmp_path, "them/it")
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_card_that_cannot_be_written(hub, tmp_path, monkeypatch):
    def replace(source, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", replace)
    said = refusal(push, files_of(tmp_path, "a.csv"), "them/it")
    where = tmp_path / "README.md"
    assert said == f"cannot write to {where}: Permission denied; give a place that can be written to"
    assert "made" not in hub and [file.name for file in tmp_path.iterdir()] == ["a.csv"]


def test_tables_are_read_by_their_names(tmp_path):
    datasets = pytest.importorskip("datasets")
    where = tmp_path / "it"
    files_of(where, "tables/heatmap.csv", "all.parquet", "results/1/heatmap.csv")
    odd = pd.DataFrame({"text": ['a "b", c', "é\nf"], "value": [0.1 + 0.2, 1e-9]})
    odd.to_csv(where / "tables" / "x--y.csv", index=False)
    (where / "README.md").write_text(dataset_card(where, 'One: "two" [#3]'), encoding="utf-8")
    read = datasets.load_dataset(str(where), "x--y", split="train", cache_dir=str(tmp_path / "cache"))
    assert read.to_dict() == odd.to_dict("list")
    assert datasets.get_dataset_config_names(str(where)) == ["heatmap", "x--y"]
    card = huggingface_hub.DatasetCard.load(where / "README.md")
    assert card.data.pretty_name == 'One: "two" [#3]' and card.data.tags == ["ssmscope"]
    assert '# One: "two" \\[\\#3\\]' in card.text and "| x--y | `tables/x--y.csv` |" in card.text


def test_refusals(hub, tmp_path, monkeypatch):
    assert refusal(push, tmp_path / "no", "them/it") == f"{tmp_path / 'no'} is no directory: give that of a model, " + (
        "a report or results"
    )
    assert "holds no tables" in (refusal(push, tmp_path, "them/it") or "") and "made" not in hub
    assert "is no name of a repository: give OWNER/NAME" in (refusal(push, tmp_path, "a/b/c") or "")

    def refused(error: Exception) -> str:
        def fail(self, *args: Any, **options: Any) -> None:
            raise error

        monkeypatch.setattr(huggingface_hub.HfApi, "create_repo", fail)
        return refusal(push, "demo/sst2-mamba2", "them/it") or ""

    assert "log in by hf auth login" in refused(LocalTokenNotFoundError("no token"))
    assert refused(ConnectionError("a\nb")).endswith("was not put into them/it: the hub is out of reach")
    forbidden = OSError("403\nForbidden")
    forbidden.response = SimpleNamespace()  # type: ignore[attr-defined]
    assert refused(forbidden).endswith("into them/it: the hub refused it (403 Forbidden)")


def test_a_demo_is_loaded_by_a_name_of_the_hub(tmp_path, monkeypatch):
    """The hub's cache has what `push` uploads, and nothing can be fetched."""
    name, own = "them/sst2-mamba2", demos()["demo/sst2-mamba2"]
    kept = tmp_path / "models--them--sst2-mamba2"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("0" * 40)
    shutil.copytree(own, kept / "snapshots" / ("0" * 40))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model, demo = ssmscope.load(name), ssmscope.load("demo/sst2-mamba2")
    assert model.name == name and model.fingerprint == demo.fingerprint
    text = "A gripping film."
    assert relative(model.trace(text).logits, demo.trace(text).logits) == 0
    assert trained_on(name) == trained_on("demo/sst2-mamba2") == "sst2"
    assert trained_examples(name) == trained_examples("demo/sst2-mamba2")
    assert trained_on("them/other") is None and trained_on("no -- name/it") is None
    assert "the hub is out of reach" in (refusal(ssmscope.load, "them/other") or "")
