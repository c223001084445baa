"""Parts that every recipe runs and leaves out, in words and in objects, with all resources and with none."""

import importlib.util
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("textattack") is None:
    pytest.skip("textattack is not installed", allow_module_level=True)

import nltk
from described import check
from tiny_bert import save_bert
from ssmscope.attacks import recipes
from ssmscope.attacks.names import ATTACKS, on_words
from ssmscope.attacks.offline import textattack
from ssmscope.attacks.recipes import recipe
from ssmscope.errors import InputError

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


def absent(*_: Any) -> None:
    raise LookupError("no data")


def tagged(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    def tag(words: list[str], tagset: str) -> list[tuple[str, str]]:
        if not there:
            absent()
        return [(word, "NOUN") for word in words]

    monkeypatch.setattr(nltk, "pos_tag", tag)


FILES = {"embeddings": "vectors.txt", "masked_lm": "bert", "encoder": "bert", "synonyms": "words.json"}


def test_what_runs_is_told(monkeypatch, place) -> None:
    """Every attack that is a search, with nothing, with the first resource and with all that it reads, or its
    refusal."""
    shown = []
    monkeypatch.setattr(nltk.corpus, "wordnet", SimpleNamespace(synsets=absent))
    for name in (each for each in ATTACKS if ATTACKS.places[each].startswith("ssmscope.")):
        declared = ATTACKS[name]
        searches = {"words": declared.words, "prompt": None if declared.suffixes else declared.prompts}
        flavours = [flavour for flavour, search in searches.items() if search is not None]
        resources = dict.fromkeys(((), declared.options[:1], declared.options))
        for flavour, given in itertools.product(flavours, resources):
            tagged(monkeypatch, len(given) > 1)
            shown.append(f"{name} of {flavour} with {' '.join(given) or 'nothing'}")
            try:
                found = recipe(name, flavour=flavour, **{each: place / FILES[each] for each in given})
            except InputError as error:
                shown.append(f"refused: {error}")
                continue
            assert (found.name, found.suffixes) == (name, ())
            shown += [f"runs: {part}" for part in found.ran] + [f"left out: {part}" for part in found.left_out]
    check("recipes", (line.replace(str(place), "PLACE") for line in shown))


def test_the_options_of_a_recipe_are_the_resources_that_it_reads(monkeypatch, place) -> None:
    tagged(monkeypatch, True)
    read = set()

    class Watched(recipes.Resources):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    for name in on_words():
        read.clear()
        ATTACKS[name].build(Watched(**{option: place / file for option, file in FILES.items()}), False)
        assert read & FILES.keys() == set(ATTACKS[name].options), name


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
