"""Files of word vectors and synonyms line by line, and models of sentences and masked words by their tokenizers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refuses
from ssmscope.attacks import resources
from ssmscope.attacks.resources import Encoder, MaskedLM, Read, _max_length, load_synonyms, load_vectors
from ssmscope.errors import InputError


class TestVectors:
    @pytest.mark.parametrize(("text", "words", "rows"), [
        ("2 3\nb 3 0 4\na 0 0 -2\n", ["b", "a"], [[0.6, 0, 0.8], [0, 0, -1]]),
        ("2 3 4\n\n \n7 4 3\n", ["2", "7"], [[0.6, 0.8], [0.8, 0.6]]),
        ("x 3\n7 -2\n8 5\n", ["x", "7", "8"], [[1], [-1], [1]]),  # a header is the first line alone
        ("3 1\n7 2 \n", ["7"], [[1]]),
        ("a 0 0\nb 0 1e-9\n", ["a", "b"], [[0, 0], [0, 1]]),
        ("b  1\t2e1 \n", ["b"], [[1 / math.sqrt(401), 20 / math.sqrt(401)]]),
    ])  # fmt: skip
    def test_lines(self, tmp_path: Path, text: str, words: list[str], rows: list[list[float]]) -> None:
        (tmp_path / "v.vec").write_text(text)
        found = load_vectors(tmp_path / "v.vec")
        assert list(found.words) == words and found.unit.dtype == np.float32
        assert found.unit == pytest.approx(np.array(rows), abs=1e-6)

    @pytest.mark.parametrize(("words", "vectors", "said"), [
        (["a", "b"], np.ones((2, 3), dtype=np.int64), "an .npz needs the arrays"),
        ([b"a", b"b"], np.ones((2, 3)), "an .npz needs the arrays"),
        (["a", "b"], np.ones((2, 3, 1)), "an .npz needs the arrays"),
        (["a", "b"], np.ones(2), "an .npz needs the arrays"),
        (["a", "b", "c"], np.ones((2, 3)), "an .npz needs the arrays"),
        ([["a"], ["b"]], np.ones((2, 3)), "an .npz needs the arrays"),
        (np.zeros(0, dtype="U1"), np.ones((0, 3)), "holds no word vector"),
        (["a", "b"], np.array([[1.0, 2], [np.inf, 0]]), "holds vectors that are not finite"),
    ])  # fmt: skip
    def test_arrays_of_other_kinds(self, tmp_path: Path, words: Any, vectors: np.ndarray, said: str) -> None:
        np.savez(tmp_path / "v.npz", words=np.array(words), vectors=vectors)
        refuses(said, load_vectors, tmp_path / "v.npz")

    def test_an_archive_has_a_limit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        np.savez_compressed(tmp_path / "v.npz", words=np.array(["a", "b"]), vectors=np.zeros((2, 500)))
        held = 128 + 8 + 128 + 8000  # bytes of the two arrays and their headers
        monkeypatch.setattr(resources, "MAX_UNZIPPED_BYTES", held)
        assert load_vectors(tmp_path / "v.npz").unit.shape == (2, 500)
        resources._load_vectors.cache_clear()
        monkeypatch.setattr(resources, "MAX_UNZIPPED_BYTES", held - 1)
        refuses("holds 8,264 bytes; allowed are up to 8,263", load_vectors, tmp_path / "v.npz")


class TestSynonyms:
    def test_pairs_are_stripped_and_each_is_there_once(self, tmp_path: Path) -> None:
        listed = {
            " Film ": [" movie", "picture ", "movie"], "": ["x"], "film": ["Movie", ""], "word": ["synonym", "term"],
        }  # fmt: skip
        (tmp_path / "s.json").write_text(json.dumps(listed))
        lines = 'word,synonym\n\n Film , movie\nFILM,picture\n"a, b",c\n,x\ny,\nword,term\nfilm,movie\n'
        (tmp_path / "s.csv").write_text(lines)
        assert load_synonyms(tmp_path / "s.json") == {"film": ("movie", "picture", "Movie"), "word": ("term",)}
        assert load_synonyms(tmp_path / "s.csv") == {"film": ("movie", "picture"), "a, b": ("c",), "word": ("term",)}

    @pytest.mark.parametrize(("name", "content"), [
        ("s.json", '{"a": ["b"], "c": "d"}'), ("s.json", '{"a": ["b\\ud800"]}'), ("s.json", '{"a": [1]}'),
        ("s.json", '{"a": ["b"]'), ("s.csv", 'a,b\n"c,d\n'), ("S.CSV", "a,b\n"),
    ])  # fmt: skip
    def test_other_contents(self, tmp_path: Path, name: str, content: str) -> None:
        (tmp_path / name).write_text(content)
        refuses("is not a file of synonyms; allowed are a .json file", load_synonyms, tmp_path / name)
        refuses("is not a file of synonyms", load_synonyms, tmp_path)


class Words:
    """Tokenizer of letters: a token's id is its place in the alphabet, 0 is padding."""

    is_fast, pad_token, eos_token, model_max_length, all_special_ids = True, None, "z", 5, [0, 26]

    def __init__(self, *tokens: str) -> None:
        self.tokens, self.asked = list(tokens), list[int]()

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return [self.tokens[each] for each in ids] if isinstance(ids, list) else self.tokens[ids]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).replace("▁", " ")

    def __call__(self, texts: list[str], *, max_length: int, **form: Any) -> Any:
        assert form == {"padding": True, "truncation": True, "return_tensors": "pt"} and self.pad_token == "z"
        self.asked.append(len(texts))
        rows = [[ord(letter) - 96 for letter in text[:max_length]] for text in texts]
        longest = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows]).reshape(len(rows), longest)
        return Batch(input_ids=ids, attention_mask=(ids > 0).long())


class Batch(dict):  # type: ignore[type-arg]
    def to(self, device: Any) -> Batch:
        return self


class Module:
    """Model whose states are a token's id and its square; padding has large ones."""

    device = torch.device("cpu")

    def __init__(self, **config: Any) -> None:
        self.config = SimpleNamespace(**{"hidden_size": 2, "model_type": "bert", **config})

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        ids = input_ids.half() + 99 * (attention_mask == 0)
        return SimpleNamespace(last_hidden_state=torch.stack([ids, ids**2], -1))


class TestEncoder:
    def test_means_are_over_the_tokens_of_each_sentence(self, monkeypatch: pytest.MonkeyPatch) -> None:
        words = Words()
        monkeypatch.setattr(resources, "_load", lambda *_: (Module(max_position_embeddings=4), words))
        monkeypatch.setattr(resources, "SENTENCES_PER_BATCH", 2)
        found = Encoder("own")(("abc", "b", "", "e", "cdefgh"))
        rows = [[2, 14 / 3], [2, 4], [0, 0], [5, 25], [4.5, (9 + 16 + 25 + 36) / 4]]  # of the last four tokens
        assert words.asked == [2, 2, 1] and found.dtype == torch.float32
        assert found.numpy() == pytest.approx(np.array(rows), rel=1e-3)
        assert Encoder("own")(()).shape == (0, 2)

    @pytest.mark.parametrize(("config", "most", "length"), [
        ({"max_position_embeddings": 300}, 1000, 300),
        ({"max_position_embeddings": 300}, 200, 200),
        ({}, 1000, 512),
        ({"max_position_embeddings": None, "pad_token_id": 3}, 1000, 512),
        ({"max_position_embeddings": 514, "model_type": "roberta", "pad_token_id": 1}, 1000, 512),
        ({"max_position_embeddings": 514, "model_type": "roberta", "pad_token_id": 0}, 1000, 514),
        ({"max_position_embeddings": 514, "model_type": "roberta"}, 1000, 514),
    ])  # fmt: skip
    def test_the_longest_text(self, config: dict[str, Any], most: int, length: int) -> None:
        assert _max_length(Module(**config), SimpleNamespace(model_max_length=most)) == length


class TestMaskedLM:
    def test_tokens_within_some_characters(self) -> None:
        read = Read([5, 6, 7, 8, 9], [(0, 0), (0, 3), (3, 5), (6, 8), (5, 5)], torch.zeros(0))
        for place, tokens in (((0, 3), [1]), ((3, 6), [2]), ((4, 7), [2, 3]), ((5, 6), []), ((2, 4), [1, 2])):
            assert read.places(*place) == tokens

    @pytest.mark.parametrize(("tokens", "mark", "continues", "word"), [
        (["a", "##b", "c"], None, [False, True, False], "abc"),
        (["▁a", "b", "▁c"], "▁", [False, True, False], "ab c"),
        (["Ġa", "b", "▁c"], "Ġ", [False, True, True], "Ġab c"),
    ])  # fmt: skip
    def test_marks_of_words(self, monkeypatch: pytest.MonkeyPatch, tokens, mark, continues, word) -> None:
        monkeypatch.setattr(resources, "_load", lambda *_: (Module(), Words(*tokens)))
        found = MaskedLM("own")
        assert found.starts == mark and (found.length, found.special) == (5, {0, 26})
        assert [found.continues(token) for token in range(3)] == continues and found.word((0, 1, 2)) == word

    def test_a_slow_tokenizer_has_no_offsets(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(resources, "_load", lambda *_: (Module(), SimpleNamespace(is_fast=False)))
        refuses("masked_lm 'own' has a tokenizer without offsets", MaskedLM, "own")


def test_weights_of_the_older_form_are_fetched_where_there_are_no_others(tmp_path: Path, monkeypatch) -> None:
    asked: list[tuple[str, ...]] = []

    def fetched(name: str, patterns: tuple[str, ...]) -> Path:
        asked.append(patterns[-1:])
        return tmp_path

    def refuse(where: Path) -> None:
        raise InputError("no tokenizer")

    monkeypatch.setattr(resources, "fetched", fetched)
    monkeypatch.setattr(resources, "read_tokenizer", refuse)
    for _ in range(2):
        refuses(r"^encoder 'own' could not be loaded \(no tokenizer\); give the directory or", Encoder, "own")
        (tmp_path / "model.safetensors").write_bytes(b"")
    assert asked == [("*.safetensors",), ("*.bin",), ("*.safetensors",)]
