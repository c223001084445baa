"""A whole audit on a few texts: every dimension is filled, and a killed run gives the digits of one that was not."""

import json
import re

import pytest
from ssmscope.api.dimensions import dimensions
from ssmscope.data.text import load_text
from ssmscope.reports.plan import SHIPPED_PLANS, read_plan

MODELS = ("demo/sst2-mamba2", "demo/sst2-baleen-e")
WORDS = ("gripping", "dull", "moving", "flat", "warm", "wooden", "clever", "awful", "lovely", "thin", "fine", "poor")
ROWS = [
    {"text": f"a {word} film with a {word} {thing}", "label": ("positive", "negative")[at % 2]}
    for at, word in enumerate(WORDS)
    for thing in ("cast", "plot", "end")
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "films.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    assert len(load_text(file)) == 36
    return file


def test_every_dimension_has_its_analysis():
    """Each row of the card is measured by the shipped plan, on classifiers or on language models."""
    plan = read_plan(
        SHIPPED_PLANS["audit"].read_text(encoding="utf-8"), models=MODELS, variables={"data": "sst2", "text": "books"}
    )
    verbs = {call.call.name for call in plan.calls}
    names = {"accuracy": "evaluate"}
    measured = {re.split(r"\\|\[", dimension.pattern)[0] for dimension in dimensions()}
    assert {names.get(name, name) for name in measured} == verbs
    sized = {call.call.name for call in plan.calls if call.size is not None}
    assert verbs - sized == {"sanity"}
    assert plan.budget == 300 and plan.hardest == 6
