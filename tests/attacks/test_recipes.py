"""Parts that every recipe runs and leaves out, in words and in objects, with all resources and with none."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("textattack") is None:
    pytest.skip("textattack is not installed", allow_module_level=True)

from described import check
from tiny_bert import save_bert

from ssmscope.attacks import recipes
from ssmscope.attacks.names import ATTACKS, on_words
from ssmscope.attacks.offline import textattack
from ssmscope.attacks.recipes import recipe

textattack()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resources")
    save_bert(folder / "bert")
    (folder / "vectors.txt").write_text("good 1 0\nbad 0 1\nfilm 1 1\n")
    (folder / "words.json").write_text(json.dumps({"good": ["fine"], "bad": ["poor"]}))
    return folder


@pytest.fixture(autouse=True)
def own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "stopwords", lambda: (frozenset({"the"}), "ours"))


def tagged(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    import nltk

    def tag(words: list[str], tagset: str) -> list[tuple[str, str]]:
        if not there:
            raise LookupError("no tagger")
        return [(word, "NOUN") for word in words]

    monkeypatch.setattr(nltk, "pos_tag", tag)


GIVEN = (
    ("deepwordbug", "words", ""), ("textbugger", "prompt", ""), ("textbugger", "words", "embeddings encoder"),
    ("textfooler", "words", "embeddings encoder tagger"), ("textfooler", "prompt", "embeddings"),
    ("bertattack", "words", "masked_lm"), ("pwws", "words", "synonyms"), ("checklist", "words", ""),
)  # fmt: skip


def test_what_runs_is_told(monkeypatch, place) -> None:
    shown = []
    for name, flavour, given in GIVEN:
        tagged(monkeypatch, "tagger" in given)
        files = {"embeddings": "vectors.txt", "encoder": "bert", "masked_lm": "bert", "synonyms": "words.json"}
        found = recipe(name, flavour=flavour, **{each: place / files[each] for each in given.split() if each in files})
        assert (found.name, found.suffixes) == (name, ())
        shown += [f"{name} of {flavour} with {given or 'nothing'}", *(f"runs: {part}" for part in found.ran)]
        shown += [f"left out: {part}" for part in found.left_out]
    check("recipes", (line.replace(str(place), "PLACE") for line in shown))


def test_the_options_of_a_recipe_are_the_resources_that_it_reads(monkeypatch, place) -> None:
    tagged(monkeypatch, True)
    read = set()

    class Watched(recipes.Resources):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    files = dict(embeddings="vectors.txt", masked_lm="bert", encoder="bert", synonyms="words.json")
    for name in on_words():
        read.clear()
        ATTACKS[name].build(Watched(**{option: place / file for option, file in files.items()}), False)
        assert read & files.keys() == set(ATTACKS[name].options), name


def test_the_parts_are_set_as_the_papers_say(monkeypatch, place) -> None:
    tagged(monkeypatch, True)
    files = dict(embeddings=place / "vectors.txt", encoder=place / "bert")
    bugger = recipe("textbugger", flavour="words", **files).transformation.transformations
    assert [type(each).__name__ for each in bugger] == [
        *("WordSwapRandomCharacterInsertion", "WordSwapRandomCharacterDeletion", "WordSwapNeighboringCharacterSwap"),
        *("Homoglyphs", "WordSwapEmbedding"),
    ]
    assert bugger[0].letters_to_insert == " " and bugger[4].max_candidates == 5
    assert all(each.random_one and each.skip_first_char and each.skip_last_char for each in bugger[:3])
    fooler = {type(each).__name__: each for each in recipe("textfooler", flavour="words", **files).constraints}
    assert list(fooler)[:2] == ["RepeatModification", "StopwordModification"]
    assert fooler["StopwordModification"].stopwords == {"the"} and fooler["PartOfSpeech"].allow_verb_noun_swap
    assert fooler["InputColumnModification"].matching_column_labels == ["premise", "hypothesis"]
    similar = fooler["Similarity"]
    assert (similar.compare_against_original, similar.window_size, similar.skip_text_shorter_than_window) == (
        False,
        15,
        True,
    )
    assert recipe("textfooler", flavour="words", **files).transformation.max_candidates == 50
    bert = recipe("bertattack", flavour="words", masked_lm=place / "bert", encoder=place / "bert")
    similar = bert.constraints[-1]
    assert (similar.compare_against_original, similar.threshold) == (True, 0.2) and bert.transformation.candidates == 48
    assert similar.window_size == float("inf")
    pwws = recipe("pwws", flavour="words", synonyms=place / "words.json")
    assert pwws.transformation.table == {"good": ("fine",), "bad": ("poor",)} and not hasattr(pwws, "transformations")
    lists = [type(each).__name__ for each in recipe("checklist", flavour="words").transformation.transformations]
    assert lists == ["WordSwapExtend", "Contractions", "Numbers"]
    assert [type(each).__name__ for each in recipe("checklist", flavour="words").constraints] == ["RepeatModification"]
