"""Scores of results: values as recorded, pairing of the same examples, and the file of a report's scores."""

import importlib
import inspect
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from refusals import refuses
import ssmscope
from ssmscope.api.analyses import analyses, result_homes
from ssmscope.api.analysis import Call
from ssmscope.api.jsonable import encode
from ssmscope.api.results import Result
from ssmscope.api.scores import Score, is_paired
from ssmscope.data.text import text_data
from ssmscope.reports.gates import _declared, _stands_for
from ssmscope.reports.scores import read_scores, write_scores


def scores(result):
    return list(result.card_scores())


def score(model: str, values: list[float], *, among: list[float] | None = None, ids: str = "abc") -> Score:
    below = np.ones(len(values)) if among is None else np.array(among)
    examples = np.stack([np.array(values), below], axis=1)
    value = float(examples[:, 0].sum() / examples[:, 1].sum())
    return Score("words.success", model, value, value - 0.1, value + 0.2, len(values), "lower", "share", examples, ids)


def test_scores_of_the_same_examples_are_paired():
    one, other = score("a", [1, 0, 1]), score("b", [0, 0, 1])
    assert is_paired(one, other) and not is_paired(one, replace(other, example_ids="other"))
    assert not is_paired(replace(one, example_ids=""), replace(other, example_ids=""))
    assert not is_paired(one, replace(other, examples=None))


def test_written_scores_are_read_back(tmp_path):
    every = [score("a", [0.1, 0.2, 1 / 3]), Score("loss", "b", 1.5, math.nan, math.nan, 0, "", "nats")]
    write_scores(every, tmp_path)
    for where in (tmp_path, tmp_path / "scores.json"):
        first, second = read_scores(where)
        assert np.array_equal(first.examples, every[0].examples) and first.estimate == every[0].estimate
        assert replace(first, examples=None) == replace(every[0], examples=None)
        assert json.loads((tmp_path / "scores.json").read_text())["scores"][0]["unit"] == "share"
        assert second.name == "loss" and math.isnan(second.low) and not second.has_interval


@pytest.mark.parametrize("text", ["[]", "{}", '{"scores": [{"name": "a"}]}', "\udcff"])
def test_a_file_without_scores_is_refused(tmp_path, text):
    (tmp_path / "scores.json").write_text(text, errors="surrogateescape")
    refuses("does not hold a report's scores", read_scores, tmp_path)
    refuses("there are no scores at", read_scores, tmp_path / "elsewhere.json")


@pytest.mark.parametrize(
    "examples",
    [5, 1.5, "x", True, [1, 1], {}, np.zeros(3), np.zeros((3, 3)), np.array([["a", "b"]]), np.array([[math.nan, 1]])],
)
def test_examples_that_are_no_examples_are_refused(tmp_path, examples):
    write_scores([score("a", [0.1, 0.2])], tmp_path)
    document = json.loads((tmp_path / "scores.json").read_text())
    document["scores"][0]["examples"] = encode(examples)
    (tmp_path / "scores.json").write_text(json.dumps(document))
    refuses("does not hold a report's scores: ", read_scores, tmp_path)


TEXTS = (
    "A gripping, beautifully acted film with a moving end.", "Dull and overlong; the plot never starts.",
    "It made me laugh, and then it made me think.", "A waste of a fine cast.", "Awful.",
    "The quiet last scene moved me to tears.", "Wooden acting, flat jokes, lovely music.",
    "A thin plot, but a wonderful cast and a warm heart.",
)  # fmt: skip
DATA = text_data("own", "test", TEXTS, (1, 0, 1, 0, 0, 1, 0, 1), ("negative", "positive"))
MEASURED = {
    "evaluate": lambda model: ssmscope.evaluate(model, DATA, progress=False),
    "position": lambda model: ssmscope.position(model, DATA, regions=["0:2", "4:6"]),
    "position other": lambda model: ssmscope.position(model, DATA, replacement="other"),
    "words": lambda model: ssmscope.words(model, DATA, recipe="hotflip", progress=False),
    "insertion": lambda model: ssmscope.insertion(model, DATA, places=3),
    "overflow": lambda model: ssmscope.overflow(model, DATA, lengths=[64]),
    "noise": lambda model: ssmscope.noise(model, DATA, rates=[0.1, 0.4]),
    "poison": lambda model: ssmscope.poison(
        model, DATA, train=2, length=2, draws=2, candidates=2, sweeps=1, objective="flip", progress=False
    ),
    "fidelity": lambda model: ssmscope.fidelity(model, DATA, methods=["gradxinput"], steps=4),
    "prompts": lambda model: ssmscope.prompts(
        model, DATA, attacks=["stresstest"], template=["Is it good? {content}", "Review: {content}"], progress=False
    ),
}


@pytest.mark.parametrize("verb", MEASURED)
def test_the_examples_of_a_score_give_its_value(verb):
    """Also where a region of the last two tokens, 4:6, is beyond the text "Awful."."""
    found = scores(MEASURED[verb](ssmscope.load("demo/sst2-mamba2", dtype="float32")))
    known = [one for one in found if one.examples is not None and not math.isnan(one.value)]
    assert known and len({one.name for one in found}) == len(found)
    for one in known:
        above, below = one.examples.sum(0)
        assert above / below == pytest.approx(one.value, abs=1e-6), one.name
        assert bool(one.example_ids) is not one.name.startswith("position.success") and one.low <= one.value <= one.high
    assert {one.model for one in found} == {"demo/sst2-mamba2"}
    declared = [*_declared(Call.of(verb.split()[0], ["demo/sst2-mamba2"], {"data": "sst2"}))]
    for one in found:
        limits = next(each for name, each in declared if _stands_for(name, one.name))
        assert math.isnan(one.value) or limits.low <= one.value <= limits.high
        assert limits.is_share == (one.unit == "share")


def test_what_is_not_over_the_examples_says_so():
    model = ssmscope.load("demo/sst2-mamba2", dtype="float32")
    growth, given = (scores(ssmscope.stability(model, **one))[0] for one in ({"length": 8}, {"texts": list(TEXTS)}))
    assert (growth.apart, given.apart) == ("random tokens", "") and growth.better == given.better == ""
    recent, given = (scores(ssmscope.influence(model, **one))[0] for one in ({"length": 8}, {"texts": list(TEXTS)}))
    assert (recent.apart, given.apart) == ("random tokens", "")
    assert scores(ssmscope.sanity(model, list(TEXTS[:3]), methods=["gradxinput"]))[0].apart == "3 given texts"
    for verb in ("poison", "fidelity", "noise"):
        apart = {one.apart for one in scores(MEASURED[verb](model))}
        assert len(apart) == 1 and bool(*apart) is (verb != "noise")


def test_every_analysis_names_its_scores():
    """Those that its results' code writes, but the harness's of `evaluate`; a row of a card is of one of them."""
    for verb, declared in analyses().items():
        homes = result_homes()
        kind = importlib.import_module(homes[verb]) and Result._kinds[verb] if verb in homes else Result
        reader = kind.card_scores
        written = set(re.findall(r'(?:make|named|models\))\)?\(f?"([\w.-]+)', inspect.getsource(reader)))
        names = {name.partition("[")[0] for name in declared.scores}
        written |= {"influence.recent"} & names
        assert written <= names and (verb == "evaluate" or written == names), verb
        rows = [re.split(r"\\\[", row.pattern)[0].replace("\\", "") for row in declared.dimensions]
        assert set(rows) <= names
