"""The verbs of attacks: they answer as Python does, a killed run continues, and a refusal leaves nothing."""

import contextlib
import functools
import importlib.util
import io
import json
from pathlib import Path

import pytest
from exhaustive import few
import ssmscope
from ssmscope import cli
from ssmscope.api.store import Store
from ssmscope.data.text import load_text
from ssmscope.evaluation import evaluator

needs_textattack = pytest.mark.skipif(
    importlib.util.find_spec("textattack") is None, reason="textattack is not installed"
)

MODEL = "demo/sst2-mamba2"
TEMPLATES = ("Review: {content}", "Is it good, or bad? {content}")
VERBS = {
    "noise": ("--rates", "0.1"),
    "overflow": ("--lengths", "0,8", "--where", "after"),
    "poison": ("--length", "1", "--set", "sweeps=1", "--set", "candidates=2", "--set", "draws=1", "--set", "penalty=0"),
    "prompts": ("--attacks", "stresstest", "--template", TEMPLATES[0], "--template", TEMPLATES[1]),
    "words": ("--recipe", "hotflip", "--set", "flips=1", "--limit", "4"),
}
CALLS = {
    "noise": lambda model, data: ssmscope.noise(model, data, rates=[0.1]),
    "overflow": lambda model, data: ssmscope.overflow(model, data, lengths=[0, 8], where="after"),
    "poison": lambda model, data: ssmscope.poison(model, data, length=1, sweeps=1, candidates=2, draws=1, penalty=0),
    "prompts": lambda model, data: ssmscope.prompts(model, data, attacks=["stresstest"], template=TEMPLATES),
    "words": lambda model, data: ssmscope.words(model, data, recipe="hotflip", flips=1, limit=4),
}
REFUSED = {  # once the model is loaded
    "noise": ("--words", "bad,good"),
    "overflow": ("--words", "bad,good"),
    "poison": ("--span", "nowhere"),
    "prompts": ("--template", TEMPLATES[0], "--words", "bad,good"),
    "words": ("--recipe", "pwws", "--synonyms", "none.json"),
}
ANSWERS = "answers.sqlite"
EACH_VERB = pytest.mark.parametrize("verb", few(VERBS, "poison", "prompts"))


@pytest.fixture(scope="module")
def reviews(tmp_path_factory) -> Path:
    texts = {"a gripping, funny film": "positive", "dull and lifeless": "negative", "moving": "positive"}
    texts |= {"a tired, predictable mess": "negative", "a good story, well acted": "positive"}
    file = tmp_path_factory.mktemp("data") / "reviews.tsv"
    file.write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in texts.items()))
    return file


@pytest.fixture(scope="module")
def answered(reviews, tmp_path_factory):
    """Return where a verb has written its answer, and its printed output."""

    @functools.cache
    def of(verb: str) -> tuple[Path, str]:
        out = tmp_path_factory.mktemp("answered") / verb
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = cli.run([verb, MODEL, "--data", str(reviews), *VERBS[verb], "--json", "--out", str(out)])
        assert code == 0
        return out, printed.getvalue()

    return of


@EACH_VERB
def test_the_answer_is_what_python_gives(verb, answered, reviews):
    out, printed = answered(verb)
    found = json.loads(printed)
    assert found == json.loads((out / f"{verb}.json").read_text())
    model = ssmscope.load(MODEL)
    expected = json.loads(CALLS[verb](model, load_text(str(reviews), None, label_names=model.labels)).to_json())
    for each in (found, expected):
        each.pop("cost", None)
        each["provenance"].pop("date")
    assert found == expected


@EACH_VERB
def test_a_killed_run_continues(verb, analyze, reviews, tmp_path, monkeypatch):
    line = (verb, MODEL, "--data", reviews, *VERBS[verb], "--out", tmp_path / "out")
    monkeypatch.setattr(evaluator, "BATCHES_PER_CHUNK", 0.05)  # else a few texts are kept at once
    real = Store.add

    def killed(*args):
        real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "add", killed)
        assert analyze(*line).code == 130
    assert (tmp_path / "out" / ANSWERS).exists() and not (tmp_path / "out" / f"{verb}.json").exists()
    assert analyze(*line).code == 0
    first = json.loads((tmp_path / "out" / f"{verb}.json").read_text())
    assert analyze(*line).code == 0
    again = json.loads((tmp_path / "out" / f"{verb}.json").read_text())
    costs = [each.pop("cost", None) for each in (first, again)]  # seconds among them
    if verb == "prompts":
        assert costs[0]["run"] > 0 and costs[1]["run"] == 0
    first["provenance"].pop("date"), again["provenance"].pop("date")
    assert first == again


@needs_textattack
@EACH_VERB
def test_a_refusal_leaves_nothing(verb, analyze, answered, reviews, tmp_path):
    line = (verb, MODEL, "--data", reviews, *REFUSED[verb])
    answer = analyze(*line, "--out", tmp_path / "new" / "out")
    assert answer.code == 2 and answer.out == "" and answer.err.count("\n") == 1
    assert not (tmp_path / "new").exists()
    known, _ = answered(verb)
    before = {path.name: path.read_bytes() for path in known.iterdir()}
    assert ANSWERS in before
    assert analyze(*line, "--out", known).code == 2
    results = {name for name in before if not name.startswith(ANSWERS)}  # SQLite's own files come and go
    assert {name: (known / name).read_bytes() for name in results} == {name: before[name] for name in results}
    assert (known / ANSWERS).exists()


def test_answers_are_kept_where_the_user_says(analyze, reviews, tmp_path):
    line = ("prompts", MODEL, "--data", reviews, *VERBS["prompts"], "--cache", tmp_path / "kept.sqlite")
    assert analyze(*line, "--out", tmp_path / "out").code == 0
    assert (tmp_path / "kept.sqlite").exists() and not (tmp_path / "out" / ANSWERS).exists()
