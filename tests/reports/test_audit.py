"""A whole audit on a few texts: every dimension is filled, and a killed run gives the digits of one that was not."""

import json
import re

import pytest
import yaml

from ssmscope.api.dimensions import dimensions
from ssmscope.data.text import load_text
from ssmscope.reports.budget import with_budget
from ssmscope.reports.hardest import EXPLAINED
from ssmscope.reports.jobs import make_jobs
from ssmscope.reports.plan import SHIPPED_PLANS, read_plan
from ssmscope.reports.running import run_locally, run_plan
from ssmscope.reports.scorecard import scorecard
from ssmscope.reports.scores import read_scores

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


def short_plan(data, *verbs):
    """The shipped plan with these analyses alone, each as cheap as it can be."""
    plan = yaml.safe_load(SHIPPED_PLANS["audit"].read_text(encoding="utf-8"))
    cheap = {"noise": {"rates": "0.1,0.4"}}
    kept = []
    for each in plan["analyses"]:
        (verb,) = set(each) - {"name", "for", "size"}
        if verb in verbs:
            each[verb] = {**(each[verb] or {}), **cheap.get(verb, {})}
            kept.append(each)
    text = yaml.safe_dump({**plan, "analyses": kept, "hardest": 2}, sort_keys=False)
    return with_budget(read_plan(text, models=MODELS, variables={"data": str(data)}))


class Killed(Exception):
    pass


def test_a_killed_run_gives_the_same_digits(data, tmp_path):
    plan = short_plan(data, "position", "noise")
    jobs = make_jobs(plan)

    def dying(jobs, store):
        for number, each in enumerate(run_locally(jobs, store)):
            if number == 3:
                raise Killed
            yield each

    with pytest.raises(Killed):
        run_plan(plan, jobs, tmp_path / "killed", engine=dying)
    assert not (tmp_path / "killed" / "scores.json").exists()
    for name in ("killed", "whole"):
        made = run_plan(plan, jobs, tmp_path / name, engine=run_locally)
        assert [entry.state for entry in made.entries] == ["done"] * len(made.entries)
    scores = [(tmp_path / name / "scores.json").read_bytes() for name in ("killed", "whole")]
    assert scores[0] == scores[1]
    # The hardest examples are chosen from results, and so are those that are explained.
    explained = [entry for entry in made.entries if entry.heading == EXPLAINED]
    assert {entry.models[0] for entry in explained} <= set(MODELS) and explained
    for entry in explained:
        assert set(entry.options["text"]) <= {one.text for one in made.hardest}
    page = (tmp_path / "whole" / "index.html").read_text(encoding="utf-8")
    assert [int(number) for number in re.findall(r"Example (\d+): ", page)] == [1, 2]
    assert 'id="_scorecard"' in page and 'id="_findings"' in page and 'id="_hardest"' in page
    assert (tmp_path / "whole" / "figures" / "scorecard.svg").exists()
    card = scorecard(read_scores(tmp_path / "whole"))
    assert [row.name for row in card.rows][:2] == ["position.drop", "position.drop[other]"]
    assert all(entry is not None for row in card.rows for entry in row.entries)


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
