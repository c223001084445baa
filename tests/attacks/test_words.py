"""Attacks on single texts: equal to TextAttack's own loop, independent of one another, and refused where they must."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from bags import bag
from bags import texts as toy
from exhaustive import ALL
from loud import TrueFloat64, loud
from refusals import refuses
from tokenizers import Tokenizer
from tokenizers import models as token_models
from tokenizers.pre_tokenizers import Whitespace
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast
import ssmscope
from ssmscope.attacks.names import ATTACKS, HOTFLIP_OPTIONS, on_words
from ssmscope.attacks.offline import textattack
from ssmscope.attacks.recipes import attack_of
from ssmscope.attacks.recipes import recipe as recipe_of
from ssmscope.attacks.words import word_attack
from ssmscope.attacks.words.lockstep import draw_seed, sampled_rows
from ssmscope.attacks.words.result import AttackedText, WordAttack, changed_words, measure
from ssmscope.core.bootstrap import share
from ssmscope.data.text import PAIR_SEPARATOR, text_data
from ssmscope.errors import InputError
from ssmscope.evaluation import Evaluator

needs_textattack = pytest.mark.skipif(
    importlib.util.find_spec("textattack") is None, reason="textattack is not installed"
)

REVIEWS = {
    "it 's a great film that isn't boring , with 3 fine actors": 1, "a funny , touching and beautiful story": 1,
    "the best movie of the year , it is great": 1, "moving": 1, "a wonderful cast and a good story , well-made": 1,
    "an enjoyable and charming comedy": 1, "it's dull , stupid and a complete waste of 2 hours": 0, "boring": 0,
    "the worst film that i have seen , a bad mess": 0, "a tired and predictable story without any laughs": 0,
    "they do not know how bad this film is": 0, "an awful , unfunny comedy": 0, "a bad film that is great": 0,
    "a good film of course , but a sad ending": 0, "an unfunny , awful waste of time": 1,
}  # fmt: skip
SENTIMENT = ("negative", "positive")


def reviews(*rows: int):
    chosen = [list(REVIEWS.items())[row] for row in rows or range(len(REVIEWS))]
    return text_data("reviews", "all", [text for text, _ in chosen], [label for _, label in chosen], SENTIMENT)


model = pytest.fixture(scope="module")(lambda: ssmscope.load("demo/sst2-mamba2"))


@pytest.fixture(scope="module")
def resources(tmp_path_factory) -> dict[str, Path]:
    """Synonyms, word vectors and a masked language model of a few words."""
    from tiny_bert import save_bert

    folder = tmp_path_factory.mktemp("resources")
    table = {"great": ["good", "dull", "terrible"], "bad": ["great", "fine"], "film": ["movie", "mess"]}
    table |= {"funny": ["boring", "sad"], "story": ["plot", "mess"], "dull": ["fine", "moving"], "awful": ["great"]}
    (folder / "synonyms.json").write_text(json.dumps(table))
    words = sorted({word for text in REVIEWS for word in text.split() if word.isalpha()})
    draw = np.random.default_rng(0)
    lines = [f"{word} {' '.join(f'{x:.3f}' for x in draw.normal(1, 1, 3))}" for word in words]
    (folder / "vectors.txt").write_text("\n".join(lines))
    bert = save_bert(folder / "bert")
    return dict(synonyms=folder / "synonyms.json", embeddings=folder / "vectors.txt", masked_lm=bert, encoder=bert)


@pytest.fixture(scope="module")
def precise() -> ssmscope.Model:
    """Return the model in float64, so that the rounding of a batch decides no tie."""
    model = ssmscope.load("demo/sst2-mamba2")
    model.module.double()
    return model


def given(recipe: str, resources: dict[str, Path]) -> dict[str, Path]:
    return {name: resources[name] for name in ATTACKS[recipe].options}


@needs_textattack
class TestIsTextAttack:
    @pytest.mark.parametrize(
        ("recipe", "budget"), [*((recipe, None) for recipe in on_words()), ("deepwordbug", 9), ("pwws", 5)]
    )
    def test_texts_queries_and_fates_are_those_of_its_own_loop(self, precise, resources, recipe, budget, monkeypatch):
        """The model runs in float64; the scores are read in float32."""
        textattack()
        from textattack.goal_functions import UntargetedClassification
        from textattack.models.wrappers import ModelWrapper

        class Plain(ModelWrapper):
            """The transformers model as it is."""

            def __init__(self):
                self.model = precise.module

            def __call__(self, texts):
                batch = precise.tokenizer(texts, padding=True, return_tensors="pt")
                state = random.getstate()  # the checks of shapes in tests draw
                with torch.no_grad(), TrueFloat64():
                    logits = self.model(batch["input_ids"], batch["attention_mask"]).logits
                random.setstate(state)
                return logits.float()

        data, options = reviews(*() if ALL else (0, 3, 6, 10, 13, 14)), given(recipe, resources)
        limit = float("inf") if budget is None else budget
        scores = Evaluator.scores

        def in_float64(evaluator, texts):
            with TrueFloat64():
                return scores(evaluator, texts)

        monkeypatch.setattr(Evaluator, "scores", in_float64)
        found = word_attack(precise, data, recipe=recipe, budget=budget, seed=5, **options)
        goal = UntargetedClassification(Plain(), query_budget=limit)
        attack = attack_of(recipe_of(recipe, flavour="words", **options), goal)
        for row, (text, label) in enumerate(zip(data.texts, data.labels)):
            random.seed(draw_seed(5, row))
            np.random.seed(draw_seed(5, row))
            theirs, ours = attack.attack(text, label), found.examples[row]
            assert type(theirs).__name__.lower().startswith(ours.status[:4])
            assert (ours.attacked, ours.queries) == (theirs.perturbed_text(), theirs.num_queries)
            assert ours.after == pytest.approx(1 - theirs.perturbed_result.score, abs=1e-6)
            assert (ours.answer, ours.clean) == (theirs.perturbed_result.output, theirs.original_result.output)
        statuses = [example.status for example in found.examples]
        assert statuses.count("skipped") == 2 and len(set(statuses[:-2]) & {"success", "failed"}) > 0
        assert budget is None or max(example.queries for example in found.examples) == budget


def by_row(found: WordAttack) -> dict[int, AttackedText]:
    return {example.row: example for example in found.examples}


def rounded(example: AttackedText) -> dict:
    """Return the parts that do not depend on the rounding of a batch."""
    return {**vars(example), "before": round(example.before, 4), "after": round(example.after, 4)}


@needs_textattack
class TestSearches:
    def test_an_example_does_not_depend_on_the_others(self, model):
        """Neither the number of others under way, nor the limit, nor earlier draws matter."""
        every = by_row(word_attack(model, reviews(), seed=3))
        random.seed(11)
        np.random.seed(12)
        few = by_row(word_attack(model, reviews(), limit=4, active=1, seed=3))
        assert 4 == len(few) < len(every)
        assert {row: rounded(each) for row, each in few.items()} == {row: rounded(every[row]) for row in few}
        other = by_row(word_attack(model, reviews(), seed=4))
        assert [each.attacked for each in other.values()] != [each.attacked for each in every.values()]

    def test_the_two_sentences_of_a_pair_stay_apart(self, model, monkeypatch):
        waves = asked(monkeypatch)
        pairs = [f"good{PAIR_SEPARATOR}a great film", f"bad film{PAIR_SEPARATOR}dull", f"it{PAIR_SEPARATOR}'s great"]
        data = text_data("pairs", "all", pairs, [1, 0, 1], SENTIMENT)
        for recipe in ("textbugger", "checklist", "hotflip"):
            found = word_attack(model, data, recipe=recipe)
            assert all(example.attacked.count(PAIR_SEPARATOR) == 1 for example in found.examples)
        first = {text.partition(PAIR_SEPARATOR)[0] for wave in waves for text in wave if "great film" in text}
        assert len(first) > 3  # words on either side are tried

    def test_a_text_with_textattacks_own_mark_is_attacked_as_any(self, model):
        data = text_data("marked", "all", ["a bad <SPLIT> film of 2 hours"], [0], SENTIMENT)
        (found,) = word_attack(model, data).examples
        assert found.attacked.count(" ") == found.text.count(" ") and found.queries > 5

    def test_a_text_of_one_word_is_attacked_by_deletion_too(self, model):
        """Without it nothing is left that a model could be asked about."""
        found = word_attack(model, reviews(3, 7), recipe="textbugger")
        assert [example.status for example in found.examples] == ["success", "success"]
        assert all(example.queries > 3 and example.changed == 1 for example in found.examples)

    def test_a_budget_of_one_is_the_clean_text(self, model):
        for recipe in ("deepwordbug", "checklist", "hotflip"):
            found = word_attack(model, reviews(), recipe=recipe, budget=1)
            assert {example.status for example in found.examples} == {"failed", "skipped"}
            assert all(example.queries == 1 and example.attacked == example.text for example in found.examples)


def asked(monkeypatch) -> list[list[str]]:
    """Record the texts of every call of the evaluator from now on."""
    waves, scores = [], Evaluator.scores

    def kept(evaluator, texts):
        waves.append(list(texts))
        return scores(evaluator, texts)

    monkeypatch.setattr(Evaluator, "scores", kept)
    return waves


PROMPT = "review : {content} . good or bad ? answer :"
VOCABULARY = "[PAD] [UNK] [END] good bad fine great film a the is very dull review : . or ? answer sad".split()


@pytest.fixture(scope="module")
def speaker() -> ssmscope.Model:
    """A random language model of some words, whose two answers are about as frequent."""
    inner = Tokenizer(token_models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    inner.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", eos_token="[END]")
    sizes = dict(hidden_size=16, state_size=4, num_hidden_layers=2, time_step_rank=2)
    torch.manual_seed(0)
    return ssmscope.load(loud(MambaForCausalLM(MambaConfig(vocab_size=len(VOCABULARY), **sizes))), tokenizer=tokenizer)


def said(speaker: ssmscope.Model):
    """Texts with the answers that the model gives."""
    texts = ["a good film", "the film is very dull", "a bad , very bad film", "great", "the good is fine", "sad film"]
    found = Evaluator(speaker, words=["bad", "good"]).scores([PROMPT.replace("{content}", text) for text in texts])
    return text_data("spoken", "all", texts, found.argmax(1).tolist(), ("no", "yes"))


@needs_textattack
class TestLanguageModel:
    @pytest.mark.parametrize("recipe", ["deepwordbug", "textbugger", "pwws", "hotflip"])
    def test_only_the_text_is_attacked_and_no_label_word(self, speaker, recipe, monkeypatch, tmp_path):
        table = {"very": ["bad", "sad"], "film": ["good"], "good": ["fine"], "bad": ["dull"], "dull": ["fine"]}
        (tmp_path / "synonyms.json").write_text(json.dumps(table))
        options = {"synonyms": tmp_path / "synonyms.json"} if recipe == "pwws" else {}
        data = said(speaker)
        waves = asked(monkeypatch)
        found = word_attack(speaker, data, recipe=recipe, template=PROMPT, words=["bad", "good"], **options)
        before, after = PROMPT.split("{content}")
        texts = {text for wave in waves for text in wave}
        assert all(text.startswith(before) and text.endswith(after) for text in texts) and len(texts) > 12
        assert found.accuracy.value == 1 and found.labels == ("no", "yes")
        for example in found.examples:
            for word in ("good", "bad"):
                kept = example.attacked.split().count(word) >= example.text.split().count(word)
                assert kept and (recipe != "hotflip" or word in example.text or word not in example.attacked)
        assert found.attacked.value < 1 and found.provenance["options"]["words"] == ["bad", "good"]
        assert found.provenance["options"]["template"] == PROMPT

    def test_probabilities_are_those_of_the_two_answers(self, speaker):
        data = said(speaker)
        found = word_attack(speaker, data, recipe="hotflip", template=PROMPT, words=["bad", "good"], flips=1)
        for example in found.examples:
            for text, p in ((example.text, example.before), (example.attacked, example.after)):
                run = speaker.run(speaker.encode(PROMPT.replace("{content}", text)), last_only=True)
                both = run.logits[0, [4, 3]].softmax(-1)
                assert p == pytest.approx(float(both[example.label]), abs=1e-5)

    def test_words_are_needed_and_one_for_each_class(self, speaker):
        refuses("is a language model: give the word that it says for each class", word_attack, speaker, said(speaker))
        with pytest.raises(
            InputError, match="words are bad, good, fine; spoken has 2 classes, no, yes: give one for each"
        ):
            word_attack(speaker, said(speaker), words=["bad", "good", "fine"])


def example(status: str, queries: int = 10, words: int = 10, changed: int = 0) -> AttackedText:
    before, after = (0.9, 0.2 if status == "success" else 0.8) if status != "skipped" else (0.3, 0.3)
    clean = int(status != "skipped")
    answer = int(status == "failed")
    return AttackedText(0, status, 1, clean, answer, before, after, queries, 0, words, changed, "a", "b")


class TestNumbers:
    EXAMPLES = (
        *(example("success", 20, 10, 1), example("success", 40, 8, 2), example("success", 30, 20, 5)),
        *(
            example("failed", 50, 10, 9), example("skipped", 1), example("skipped", 1), example("failed", 60),
            example("skipped"),
        ),
    )  # fmt: skip

    def test_totals(self):
        found = measure(self.EXAMPLES, seed=0)
        assert found["accuracy"].value == 5 / 8 and found["attacked"].value == 2 / 8
        assert found["success"].value == 3 / 5 and found["share"].value == pytest.approx((1 / 10 + 2 / 8 + 5 / 20) / 3)
        assert found["queries"].value == pytest.approx((20 + 40 + 30 + 50 + 60) / 5)
        assert found["curve"][:, 0].tolist() == [5 / 8, 4 / 8, 3 / 8, 3 / 8, 3 / 8, 2 / 8]
        for name in ("accuracy", "attacked", "success", "share", "queries"):
            assert found[name].low < found[name].value < found[name].high
        assert (found["curve"][:, 1] <= found["curve"][:, 0]).all() and (
            found["curve"][:, 0] <= found["curve"][:, 2]
        ).all()

    def test_where_nothing_is_right(self):
        found = measure([example("skipped")] * 4, seed=0)
        assert found["accuracy"] == share(0, 4) == found["attacked"]
        assert all(math.isnan(found[name].value) for name in ("success", "share", "queries"))
        assert str(found["success"]) == "not defined" and found["curve"].shape == (2, 3)

    def test_changed_words_are_those_outside_the_longest_common_subsequence(self):
        def longest(a, b):
            if not a or not b:
                return 0
            if a[0] == b[0]:
                return 1 + longest(a[1:], b[1:])
            return max(longest(a[1:], b), longest(a, b[1:]))

        draw = random.Random(0)
        for _ in range(300):
            a, b = (draw.choices("abc", k=draw.randint(0, 7)) for _ in range(2))
            assert changed_words(" ".join(a), " ".join(b)) == (len(a), len(a) - longest(a, b))

    def test_rows_are_those_of_a_sample(self):
        data = text_data("many", "all", [f"text {i}" for i in range(50)], [0] * 50, SENTIMENT)
        for limit, seed in ((7, 0), (7, 1), (50, 0), (60, 0), (None, 3)):
            rows = sampled_rows(50, limit, seed)
            assert data.take(rows).texts == (data if limit is None else data.sample(limit, seed=seed)).texts


class TestOptions:
    def test_classes_are_matched_by_name(self, model):
        data = reviews()
        turned = text_data("turned", "all", data.texts, [1 - label for label in data.labels], SENTIMENT[::-1])
        found, other = (word_attack(model, each, recipe="hotflip", flips=1) for each in (data, turned))
        assert [vars(each) for each in found.examples] == [vars(each) for each in other.examples]
        assert found.labels == SENTIMENT

    @pytest.mark.parametrize(("options", "says"), [
        (dict(recipe="deepwordbgu"), "unknown recipe 'deepwordbgu'; allowed are .*; did you mean 'deepwordbug'"),
        (dict(recipe="hotflip", beam=0), "beam is 0"),
        (dict(recipe="hotflip", flips=0), "flips is 0"),
        (dict(recipe="hotflip", candidates=1.5), "candidates is 1.5"),
        (dict(beam=3), "beam=… is an option of hotflip; deepwordbug has none of that name: leave it out"),
        (dict(stopwords=True), "stopwords=… is an option of hotflip"),
        (dict(synonyms="table.json"), "synonyms=… is an option of pwws; deepwordbug"),
        (dict(recipe="pwws", encoder="folder"), "encoder=… is an option of textbugger and textfooler and bertattack"),
        (dict(template="a text"), "has no {content}"),
        (dict(words=["bad", "good"]), "is a classifier, whose"),
    ])  # fmt: skip
    def test_what_is_refused(self, model, options, says):
        refuses(says, word_attack, model, reviews(), **options)

    def test_data_of_another_kind(self, model):
        refuses("the data has no column 'label'; its columns are text", word_attack, model, ["a film"])
        refuses("has no example", word_attack, model, reviews().take([]))
        other = text_data("animals", "all", ["a cat"], [0], ("cat", "dog"))
        refuses("animals has the classes cat, dog; .* tells apart negative, positive", word_attack, model, other)

    @needs_textattack
    def test_what_an_attack_lacks_is_said_before_the_model_runs(self, model, monkeypatch):
        waves = asked(monkeypatch)
        refuses("textfooler .* give embeddings", word_attack, model, reviews(), recipe="textfooler")
        assert waves == []

    @pytest.mark.parametrize("recipe", [pytest.param("deepwordbug", marks=needs_textattack), "hotflip"])
    def test_where_nothing_is_right_nothing_is_attacked(self, model, recipe):
        data = reviews(1, 2)
        wrong = text_data("wrong", "all", data.texts, [0, 0], SENTIMENT)
        found = word_attack(model, wrong, recipe=recipe)
        assert [example.status for example in found.examples] == ["skipped"] * 2
        assert found.accuracy.value == found.attacked.value == 0 and math.isnan(found.success.value)

    def test_options_of_attacks_are_options(self):
        parameters = inspect.signature(word_attack).parameters
        assert {*HOTFLIP_OPTIONS, *(option for name in on_words() for option in ATTACKS[name].options)} <= set(
            parameters
        )


def test_a_bag_of_words_in_closed_form():
    """p = σ(Σ w): the flip with the most negative weight, and what is left of it."""
    weights = {"awful": -4.0, "poor": -1.0, "film": 0.0, "fine": 1.0, "great": 3.0}
    model = bag(weights)
    found = word_attack(model, toy("film poor", "great film fine", "great great great"), recipe="hotflip")
    first, second, third = found.examples
    assert (first.status, first.attacked, first.changed) == ("success", "film great", 1)
    assert first.queries == second.queries == 1 + 3
    assert (second.attacked, second.gradients) == ("awful film fine", 1)
    assert second.before == pytest.approx(1 / (1 + math.exp(-4)))
    assert second.after == pytest.approx(1 / (1 + math.exp(3)))
    assert (third.status, third.queries, third.gradients, third.attacked) == ("skipped", 1, 0, "great great great")
    assert (found.accuracy.value, found.attacked.value, found.success.value) == (2 / 3, 0, 1)
    assert found.share.value == pytest.approx((1 / 2 + 1 / 3) / 2) and found.queries.value == 4
