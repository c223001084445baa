"""Documents: every character is asked for once, and bits per character of a model that is known in closed form."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from ssmscope.data.language import (
    bits_per_character,
    byte_tokenizer,
    characters_of_tokens,
    document_data,
    load_documents,
    word_tokenizer,
)
from ssmscope.data.tokenizer import train_byte_pairs
from ssmscope.data.tokens import IGNORED
from ssmscope.errors import InputError
from ssmscope.zoo.training.card import score_record
from ssmscope.zoo.training.objectives import NextTokens

TEXTS = ["It was a café — naïve, “good”.\n\nThe end.", "Zoë 日本語 ran ran ran\n", "a"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_byte_pairs(TEXTS, vocabulary=280, lowercase=False)


def test_the_characters_of_a_text_are_those_of_its_tokens(tokenizer):
    counts = characters_of_tokens(tokenizer)
    for text in (*TEXTS, "ünknown 🙂 ‘x’ \t "):
        ids = tokenizer(text)["input_ids"]
        assert counts[ids].sum() == len(text) and tokenizer.decode(ids) == text
    assert counts[tokenizer.eos_token_id] == 0
    assert characters_of_tokens(byte_tokenizer()).sum() == 256 - 64  # all bytes but the continuation bytes


@pytest.mark.parametrize("length", [1, 7, 1000])
def test_every_character_is_asked_for_once(tokenizer, length):
    data = document_data(TEXTS, tokenizer, length=length, name="tale", split="test")
    asked = data.targets[data.targets != IGNORED]
    end = tokenizer.eos_token_id
    assert tokenizer.decode(asked) == "[END]".join([*TEXTS, ""]) and (asked == end).sum() == len(TEXTS)
    assert data.ids[0, 0] == end and data.characters.sum() == sum(map(len, TEXTS))
    flat = data.ids.reshape(-1)[: len(asked)]
    assert (flat[1:] == asked[:-1]).all()
    counts = characters_of_tokens(tokenizer)
    for targets, characters in zip(data.targets, data.characters, strict=True):
        assert counts[targets[targets != IGNORED]].sum() == characters


def test_a_unigram_costs_its_entropy(tokenizer):
    """A model that always says log p of the tokens' own frequencies: Σ n log₂(1 / p) over the characters."""
    data = document_data(TEXTS, tokenizer, length=8)
    counts = Counter(data.targets[data.targets != IGNORED].tolist())
    total = sum(counts.values())
    logits = torch.full((len(tokenizer),), -1e9)
    for token, count in counts.items():
        logits[token] = math.log(count / total)
    module = torch.nn.Identity()
    module.forward = lambda input_ids: SimpleNamespace(logits=logits.expand(*input_ids.shape, -1))
    options = {"kind": "language", "precision": "fp32"}
    score = NextTokens({"test": data}, options, torch.device("cpu")).score(module, "test")
    exact = sum(n * math.log2(total / n) for n in counts.values()) / sum(map(len, TEXTS))
    assert bits_per_character(score.loss, data.characters) == pytest.approx(exact, rel=1e-5)
    record = score_record(score, data.characters)
    assert record["bits_per_character"] == pytest.approx(exact, rel=1e-5)
    low, high = record["bits_per_character_interval"]
    assert low < exact < high and record["characters"] == sum(map(len, TEXTS))
    assert bits_per_character(np.array([math.log(2)]), np.array([4])) == pytest.approx(0.25)


def test_what_cannot_be_counted_is_refused(tokenizer):
    with pytest.raises(InputError, match="tokenizers of bytes that take a text as it is"):
        characters_of_tokens(word_tokenizer(["a b"]))
    with pytest.raises(InputError, match="tokenizers of bytes that take a text as it is"):
        characters_of_tokens(train_byte_pairs(TEXTS, vocabulary=270, lowercase=True))
    with pytest.raises(InputError, match="no end token"):
        document_data(TEXTS, byte_tokenizer(), length=4)
    with pytest.raises(InputError, match="length is 0; allowed is a whole number from 1 on"):
        document_data(TEXTS, tokenizer, length=0)
    with pytest.raises(InputError, match="no document"):
        document_data([], tokenizer, length=4)
    with pytest.raises(InputError, match="no character"):
        bits_per_character(np.array([1.0]), np.array([0]))


def test_books_are_read_from_the_folder_alone(tmp_path, monkeypatch):
    (tmp_path / "books").mkdir()
    pq.write_table(pa.table({"title": ["T"] * 2, "text": [" one\n", "two"]}), tmp_path / "books" / "test.parquet")
    monkeypatch.setenv("SSMSCOPE_DATA", str(tmp_path))
    assert load_documents("books") == (" one\n", "two")
    with pytest.raises(InputError, match="books has no split 'train'"):
        load_documents("books", "train")
    with pytest.raises(InputError, match="unknown documents 'book'.*did you mean 'books'"):
        load_documents("book")
    pq.write_table(pa.table({"text": ["one", " "]}), tmp_path / "books" / "test.parquet")
    with pytest.raises(InputError, match="row 2 of .* has no text"):
        load_documents("books")
    monkeypatch.delenv("SSMSCOPE_DATA")
    with pytest.raises(InputError, match="books is not on the hub; set SSMSCOPE_DATA"):
        load_documents("books")
