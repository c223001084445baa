"""HotFlip's parts by hand: the candidates that a search keeps, and the words that may be replaced and inserted."""

import dataclasses

import numpy as np
import pytest
import torch
from bags import bag, tokenizer
from fading import fading
from tokenizers import Regex, Tokenizer
from tokenizers import models as token_models
from tokenizers.pre_tokenizers import Sequence, Split, WhitespaceSplit
from transformers import PreTrainedTokenizerFast
from ssmscope.attacks.words.hotflip import Limits, Node, Search, Vocabulary, best_flips, read
from ssmscope.evaluation import Template
from ssmscope.zoo.documents import byte_tokenizer

TEMPLATE = Template("{content}")
WORDS = "good bad film fine dull".split()


@pytest.mark.parametrize(("limits", "whose", "said"), [
    (Limits(), "", ["the 3 best flips by the gradient", "words of one token for others", "greedy"]),
    (
        Limits(beam=2, flips=1, candidates=7),
        "ours",
        [
            *("the 7 best flips by the gradient", "words of one token for others", "no stop word (ours)"),
            *("a beam of 2", "at most 1 word"),
        ],
    ),
    (Limits(flips=2), "",
     ["the 3 best flips by the gradient", "words of one token for others", "greedy", "at most 2 words"]),
])  # fmt: skip
def test_what_runs_is_told(limits: Limits, whose: str, said: list[str]) -> None:
    assert list(limits.described(whose)) == said


def node(text: str, estimate: float = 0.0, loss: float = 0.0, answer: int = 0, places: int = 1) -> Node:
    scores = np.array([1.0, 0.0]) if answer == 0 else np.array([0.0, 1.0])
    return Node(text, (0,), {at: (at, at + 1) for at in range(places)}, estimate, scores, loss)


class TestSearch:
    @pytest.mark.parametrize(
        ("budget", "queries", "texts"), [(None, 1, "bacd"), (9, 5, "bacd"), (9, 6, "bac"), (9, 8, "b"), (9, 9, "")]
    )
    def test_each_text_is_chosen_once_by_its_best_estimate(self, budget, queries, texts) -> None:
        offered = [node("a", 0.5), node("b", 0.2), node("c", 0.3), node("b", 0.9), node("d", -0.1), node("a", 0.4)]
        search = Search(0, node("x"), [node("x")], queries=queries)
        found = search.chosen(offered, Limits(budget=budget))
        assert "".join(each.text for each in found) == texts and search.queries == queries + len(texts)
        assert [each.estimate for each in found] == [0.9, 0.5, 0.3, -0.1][: len(texts)]

    @pytest.mark.parametrize(("reached", "limits", "best", "beam", "over"), [
        ([node("a", loss=1.5), node("b", loss=3.0), node("c", loss=2.5)], Limits(), "b", "b", False),
        ([node("a", loss=1.5), node("b", loss=3.0), node("c", loss=2.5)], Limits(beam=2), "b", "bc", False),
        ([node("a", loss=1.5), node("b", loss=2.0)], Limits(beam=3), "x", "ba", False),
        ([node("a", loss=1.5), node("b", loss=3.0, places=0)], Limits(beam=2), "b", "a", False),
        ([node("b", loss=3.0, places=0)], Limits(beam=2), "b", "", True),
        ([node("a", loss=1.0, answer=1), node("b", loss=3.0)], Limits(), "a", "b", True),
        ([node("a", loss=1.0, answer=1), node("b", loss=1.2, answer=1)], Limits(), "b", "b", True),
        ([node("b", loss=3.0)], Limits(flips=3), "b", "b", True),
        ([node("b", loss=3.0)], Limits(flips=4), "b", "b", False),
        ([node("b", loss=3.0)], Limits(budget=7), "b", "b", True),
        ([node("b", loss=3.0)], Limits(budget=8), "b", "b", False),
        ([], Limits(), "x", "", True),
    ])  # fmt: skip
    def test_the_best_of_the_evaluated_is_kept(self, reached, limits, best, beam, over) -> None:
        search = Search(0, node("x", loss=2.0), [node("x"), node("y")], queries=7, gradients=5, depth=2)
        search.settle(reached, limits)
        assert (search.best.text, "".join(each.text for each in search.beam), search.over) == (best, beam, over)
        assert (search.depth, search.gradients, search.queries) == (3, 7, 7)


class TestWords:
    def test_a_character_of_two_tokens_is_no_token(self) -> None:
        letters = dataclasses.replace(fading(dict.fromkeys(map(str, range(253)), 0.0)), tokenizer=byte_tokenizer())
        found = read(letters, "a é b B", Template("c {content} d"), frozenset({"b"}))
        assert found.places == {2: (0, 1)} and bytes(found.ids) == "c a é b B d".encode()

    def test_a_word_ends_at_no_combining_mark(self) -> None:
        inner = tokenizer([*WORDS, "\u0301"]).backend_tokenizer
        inner.pre_tokenizer = Sequence([WhitespaceSplit(), Split(Regex("\u0301"), "isolated")])
        model = bag(dict.fromkeys([*WORDS, "\u0301"], 0.0))
        marks = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", cls_token="[CLS]")
        model = dataclasses.replace(model, tokenizer=marks)
        found = read(model, "bad film\u0301 good zebra fine.", TEMPLATE)
        assert {found.text[start:stop] for start, stop in found.places.values()} == {"bad", "good"}

    def test_a_word_that_is_inserted_is_no_special_one_and_has_an_embedding(self) -> None:
        model = dataclasses.replace(bag(dict.fromkeys(WORDS, 0.0)), tokenizer=tokenizer([*WORDS, "more", "Film"]))
        found = Vocabulary.of(model, absent={"bad", "film"})
        assert (found.ids, found.words) == ({"": (3, 6, 7)}, {"": ("good", "fine", "dull")})
        assert found.embeddings[""].shape == (3, 1)
        inner = Tokenizer(token_models.WordLevel({"unk": 0, "good": 1, "film": 2}, unk_token="unk"))
        own = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="unk")
        assert Vocabulary.of(dataclasses.replace(model, tokenizer=own)).words == {"": ("good", "film")}

    @pytest.mark.parametrize("number", [1, 4, 7, 99])
    def test_the_best_flips_are_those_of_all_places(self, number) -> None:
        model = bag({"good": 3.0, "bad": -4.0, "film": 0.5, "fine": 1.25, "dull": -1.5})
        given, weights = read(model, "film good dull", TEMPLATE), dict(zip(WORDS, (3.0, -4.0, 0.5, 1.25, -1.5)))
        gradient = torch.tensor([[-1.0], [-0.5], [2.0], [9.0]])
        ways = [
            (float(gradient[at, 0]) * (weights[word] - weights[old]), at, word)
            for at, old in enumerate("film good dull".split())
            for word in WORDS
            if word != old
        ]
        ranked = sorted(ways, reverse=True)[:number]
        found = best_flips(model, given, gradient, Vocabulary.of(model), number)
        assert [each.estimate for each in found] == pytest.approx([estimate for estimate, *_ in ranked])
        for each, (_, at, word) in zip(found, ranked, strict=True):
            words = "film good dull".split()
            words[at] = word
            assert each.text == " ".join(words) and each.ids == (*(3 + WORDS.index(one) for one in words), 2)
