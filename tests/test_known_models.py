"""Shipped models, the data in records of training, and the types of models that can be read."""

from __future__ import annotations

import json

from ssmscope.core import known_models as readable
from ssmscope.core.known_models import LAYERS, MODELS, data_set_of, demos, readable_types, training_data


def test_shipped_models_are_listed_by_name(tmp_path, monkeypatch):
    names = [f"m{(7 * number) % 20:02}" for number in range(20)]
    for name in names:
        (tmp_path / "demo" / name).mkdir(parents=True)
        (tmp_path / "demo" / name / "config.json").touch()
    (tmp_path / "demo" / "none").mkdir()
    monkeypatch.setattr(readable, "PACKAGE", tmp_path)
    assert list(demos()) == [f"demo/{name}" for name in sorted(names)]
    assert demos()["demo/m03"] == tmp_path / "demo" / "m03"


def test_the_data_of_a_record_of_training(tmp_path):
    record = tmp_path / "training.json"
    assert training_data(tmp_path) == {}
    record.write_text(json.dumps({"data": {"train": {"name": "sst2", "rows": 3}}}))
    assert training_data(tmp_path) == {"name": "sst2", "rows": 3}
    for broken in ("{", "[]", '{"data": {}}', '{"data": {"train": 3}}', '{"data": null}'):
        record.write_text(broken)
        assert training_data(tmp_path) == {}
    names = {"sst2": "sst2", "ag_news-4": "ag_news-4", "": None, "own.csv": None, "a/b": None, "a\\b": None, "..": None}
    assert {name: data_set_of({"name": name}) for name in names} == names and data_set_of({}) is None


def test_types_of_models_are_ours_and_those_of_the_installed_transformers():
    import transformers

    known = {name.split(".")[2] for name in LAYERS if name.startswith("transformers.")}
    families = {name for name in known if hasattr(transformers.models, name)}
    text = {name: f"{name}_text" for name in ("glm5_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp")}
    found = readable_types()
    assert {"ssm-classifier", "mamba2attn", "baleen-mamba2"} < set(found) and "mamba2" in families
    assert list(found) == sorted(found) and set(found) == {
        *MODELS,
        *(text.get(f, f) for f in families),
    }
