"""The page of families lists what can be read, from a record of what was run."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import transformers
from ssmscope.core.known_models import LAYERS, readable_types

DOCS = Path(__file__).parents[1] / "docs"
RECORDED = json.loads((DOCS / "families.json").read_text())


@pytest.fixture
def families() -> ModuleType:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("families", DOCS / "families.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_readable_type_was_run():
    release = transformers.__version__.partition(".")[0]
    (rows,) = [rows for each, rows in RECORDED.items() if each.partition(".")[0] == release]
    assert {*rows, "ssm-classifier"} == {*readable_types()}


def test_what_was_run_agrees_with_the_models_and_the_registry():
    places = {layer.rpartition(".")[2]: adapter for layer, adapter in LAYERS.places.items()}
    adapters = {f"{adapter.removeprefix('ssmscope.')} {layer}" for layer, adapter in places.items()}
    for rows in RECORDED.values():
        for row in rows.values():
            assert row["difference"] < 1e-10 and f"{row['adapter']} {row['layers']}" in adapters


def test_the_page_has_a_row_for_each_type_the_most_downloaded_first(families):
    table = [line for line in families.page().splitlines() if line.startswith("| `")]
    kinds = [line.split("`")[1] for line in table]
    assert sorted(kinds) == sorted({kind for rows in RECORDED.values() for kind in rows})
    assert tuple(kinds[: len(families.DEMAND)]) == families.DEMAND
    assert all(line.count(" | ") == 9 for line in table)
    by_kind = dict(zip(kinds, table))
    assert "no (" in by_kind["lfm2"] and by_kind["ssm-gla"].endswith("| yes | yes | yes | yes | yes |")
    assert "| 5 |" in by_kind["qwen3_5_text"] and "| 4, 5 |" in by_kind["mamba2"]
