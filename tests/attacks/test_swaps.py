"""Swaps and goals by hand: candidates in their order, limits exactly reached, and what a goal asks for."""

import importlib.util
import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("textattack") is None:
    pytest.skip("textattack is not installed", allow_module_level=True)

from ssmscope.attacks.offline import textattack
from ssmscope.attacks.resources import WordVectors
from ssmscope.data.text import PAIR_SEPARATOR

textattack()

from textattack.shared import AttackedText  # noqa: E402
from ssmscope.attacks.prompts.goal import PromptAccuracy  # noqa: E402
from ssmscope.attacks.swaps import MAX_CHANGED_NUMBER, Contractions, MaskedWords, Numbers, Synonyms, Vectors  # noqa: E402
from ssmscope.attacks.words.goal import ChangedAnswer, KeepsPair  # noqa: E402


def texts(*given: str) -> list[AttackedText]:
    return [AttackedText(each) for each in given]


class Judge:
    """Judge of four examples, of which a prompt has as many right as it has letters; it records the prompts."""

    labels = np.arange(4)

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def right(self, prompts: list[str]) -> np.ndarray:
        self.asked.append(prompts)
        return np.array([[at < len(prompt) for at in range(4)] for prompt in prompts])

    def fewer(self, prompts: list[str], than: int) -> np.ndarray:
        self.asked.append((prompts, than))
        return np.array([min(len(prompt), than) for prompt in prompts])


class TestPromptAccuracy:
    @pytest.mark.parametrize("as_promptbench", [False, True])
    def test_candidates_are_bounded_by_the_best_so_far(self, as_promptbench: bool) -> None:
        judge = Judge()
        goal = PromptAccuracy(judge, as_promptbench=as_promptbench)  # type: ignore[arg-type]
        assert goal._call_model(texts("abc")) == [0.75] and goal.clean == 0.75
        assert goal._call_model(texts("a", "abcd")) == [0.25, 1.0]
        assert goal._call_model(texts("ab", "abcde")) == [0.5, 0.75 if not as_promptbench else 1.25]
        assert goal._call_model(texts("abcd", "x")) == [0.5, 0.25] and goal._call_model(texts("x", "yz")) == [
            0.25,
            0.25,
        ]
        first = 5 if as_promptbench else 3
        assert judge.asked == [
            *(["abc"], ["a", "abcd"]),
            *((["ab", "abcde"], first), (["abcd", "x"], 2), (["x", "yz"], 1)),
        ]
        assert goal.tried == {"abc", "a", "abcd", "ab", "abcde", "x", "yz"} and goal.clean == 0.75
        scores = [goal._get_score(output, None) for output in (0.75, 0.25)]  # type: ignore[arg-type]
        assert scores == pytest.approx([-1.75 if as_promptbench else 0.0, 0.5], abs=1e-9)
        assert [goal._is_goal_complete(output, None) for output in (0.0, 0.25)] == [True, False]  # type: ignore[arg-type]

    def test_a_call_for_nothing_counts(self) -> None:
        judge = Judge()
        goal = PromptAccuracy(judge)  # type: ignore[arg-type]
        goal._call_model(texts("abc"))
        assert goal._call_model([]) == []
        goal._call_model(texts("ab"))
        assert judge.asked == [["abc"], (["ab"], 3)]
        assert (goal.query_budget, goal.use_cache, goal.maximizable, goal.allow_skip) == (math.inf, False, False, True)


def test_only_other_texts_with_a_word_are_asked_for() -> None:
    asked: list[list[str]] = []

    def ask(given: Any) -> list[np.ndarray]:
        asked.append(list(given))
        return [np.array([len(text), 9.0]) for text in given]

    goal = ChangedAnswer(ask, "clean", np.array([0.25, 0.75]), 7)
    found = goal._call_model(texts("ab", "clean", "abc", " ", "ab"))
    assert [each.tolist() for each in found] == [[2, 9], [0.25, 0.75], [3, 9], [0.25, 0.75], [2, 9]]
    assert goal._call_model(texts("clean"))[0].tolist() == [0.25, 0.75] and asked == [["ab", "abc", "ab"]]
    assert (goal.query_budget, goal.use_cache, goal.maximizable, goal.allow_skip) == (7, False, False, True)
    assert ChangedAnswer(ask, "clean", np.zeros(2)).query_budget == math.inf


def test_the_separator_of_a_pair_is_kept() -> None:
    one, none, two = texts(f"a{PAIR_SEPARATOR}b", "a b", f"a{PAIR_SEPARATOR}b{PAIR_SEPARATOR}c")
    keeps = KeepsPair()
    assert keeps.compare_against_original
    found = [[keeps._check_constraint(new, old) for new in (one, none, two)] for old in (one, none)]
    assert found == [[True, False, False], [False, True, False]]


def test_numbers_that_are_changed() -> None:
    numbers = Numbers()
    for number in (MAX_CHANGED_NUMBER - 1, 1 - MAX_CHANGED_NUMBER, 3):
        assert len(numbers._alter_number(number)) > 0
    for number in (MAX_CHANGED_NUMBER, -MAX_CHANGED_NUMBER, 10**12):
        assert len(numbers._alter_number(number)) == 0
    assert numbers._get_new_number("²") == [] and len(numbers._get_new_number("12")) > 0 and not numbers.deterministic


def test_contractions_of_adjacent_words() -> None:
    text = AttackedText("it is what it is and they are it")
    swap = Contractions()
    expected = {
        0: "it's what it is and they are it",
        3: "it is what it's and they are it",
        6: "it is what it is and they're it",
    }
    found = swap._get_transformations(text, [6, 3, 0, 1, 4, 7, 8])
    assert [each.text for each in found] == list(expected.values())
    assert [each.text for each in swap._get_transformations(text, [7, 6, 3, 0])] == [expected[6]]


class TestVectors:
    VECTORS = Vectors(
        WordVectors(("a", "b", "c", "d", "e"), np.array([[1, 0], [0.6, 0.8], [0, 1], [0.6, 0.8], [-1, 0]], np.float32))
    )

    @pytest.mark.parametrize(
        ("word", "topn", "nearest"),
        [("a", 2, [1, 3]), ("a", 3, [1, 3, 2]), ("a", 99, [1, 3, 2, 4]), (1, 1, [3]), (2, 2, [1, 3]), ("e", 0, [])],
    )
    def test_neighbours_come_by_cosine_and_then_by_row(self, word: Any, topn: int, nearest: list[int]) -> None:
        assert self.VECTORS.nearest_neighbours(word, topn) == nearest

    def test_words_and_rows(self) -> None:
        found = self.VECTORS
        assert found["c"].tolist() == found[2].tolist() == [0, 1] and found["x"] is None  # type: ignore[union-attr]
        assert found.get_cos_sim("a", 1) == pytest.approx(0.6) and found.get_mse_dist("a", "b") == pytest.approx(0.8)
        assert found.get_mse_dist("a", "e") == 4 and (found.word2index("d"), found.index2word(3)) == (3, "d")


def test_synonyms_have_the_words_case_once_and_are_others() -> None:
    swap = Synonyms({"film": ("movie", "Movie", "film", "picture"), "Good": ("fine",)})
    found = [swap._get_replacement_words(word) for word in ("film", "Film", "FILM", "good", "Good")]
    assert found == [["movie", "picture"], ["Movie", "Picture"], ["MOVIE", "PICTURE"], [], []]


class TestMaskedWords:
    NAMES = ["[PAD]", "a", "##b", "c", "d", "##e", "!", "f"]

    def swap(self, candidates: int) -> MaskedWords:
        def word(ids: Any) -> str:
            return "".join(self.NAMES[each].removeprefix("##") for each in ids)

        model = SimpleNamespace(word=word, continues=lambda token: self.NAMES[token].startswith("##"))
        return MaskedWords(model, candidates)  # type: ignore[arg-type]

    @pytest.mark.parametrize("candidates", [1, 3, 5, 99])
    def test_several_tokens_are_ranked_by_their_sum(self, candidates: int) -> None:
        draw = torch.Generator().manual_seed(3)
        logs = torch.randn(3, 8, generator=draw).double().log_softmax(-1)
        logs[:, 0] = -math.inf
        number = min(candidates, 8)
        tops = [row.topk(number).indices.tolist() for row in logs]
        ways = sorted(
            (-sum(float(logs[at, each]) for at, each in enumerate(ids)), ids) for ids in itertools.product(*tops)
        )
        swap = self.swap(candidates)
        words = [swap.masked_lm.word(ids) for loss, ids in ways[:number] if math.isfinite(loss)]
        assert swap._words(logs, [1, 2, 5]) == [each for each in dict.fromkeys(words) if each.strip("!")]

    def test_words_are_replaced_by_other_single_words_in_the_order_of_the_text(self, monkeypatch) -> None:
        asked: list[Any] = []

        def words(self: Any, logs: torch.Tensor, ids: list[int]) -> list[str]:
            asked.append((logs.tolist(), ids))
            return ["film", "a b", "good", "movie", "x, y"]

        read = SimpleNamespace(
            ids=[9, 5, 6, 7],
            log_probabilities=torch.arange(4.0),
            places=lambda start, stop: [1] if start == 0 else [2, 3],
        )
        swap = self.swap(3)
        swap.masked_lm = SimpleNamespace(read=lambda text: read)  # type: ignore[assignment]
        monkeypatch.setattr(MaskedWords, "_words", words)
        found = swap._get_transformations(AttackedText("good film"), [1, 0])
        assert asked == [([1.0], [5]), ([2.0, 3.0], [6, 7])]
        assert [each.text for each in found] == ["film film", "movie film", "good good", "good movie"]

    def test_one_token_is_of_its_kind(self) -> None:
        logs = torch.tensor([[-math.inf, -3.0, -1.0, -2.0, -2.5, -4.0, -0.5, -2.0]])
        assert self.swap(99)._words(logs, [3]) == ["c", "f", "d", "a"]  # equal ones by their numbers
        assert self.swap(4)._words(logs, [3]) in (["c", "f"], ["f", "c"]) and self.swap(99)._words(logs, [2]) == [
            "b",
            "e",
        ]
        assert self.swap(99)._words(logs[:0], []) == []
