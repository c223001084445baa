import sys
import types

import numpy as np
import pytest
import torch
from refusals import refuses
from transformers import AutoTokenizer, MambaConfig, MambaForCausalLM
from written_rows import write_rows
import ssmscope
from ssmscope.core.tokenizing import tokenize
from ssmscope.data.language import language_data, load_lines
from ssmscope.data.text import load_text
from ssmscope.data.tokenizer import save_tokenizer
from ssmscope.data.tokens import IGNORED
from ssmscope.errors import InputError
from ssmscope.zoo.documents import byte_tokenizer, symbol_tokenizer, word_tokenizer
from ssmscope.zoo.sequences import LISTOPS

LINES = ["= Title =", "", "the cat saw the dog", "the dog ran"]


def saved(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    return AutoTokenizer.from_pretrained(tmp_path)


def model_with(tokenizer):
    config = MambaConfig(vocab_size=len(tokenizer), hidden_size=8, state_size=2, num_hidden_layers=1, time_step_rank=2)
    return ssmscope.load(MambaForCausalLM(config), tokenizer=tokenizer)


@pytest.mark.parametrize("suffix", [".txt", ".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_format_gives_the_same_lines(tmp_path, suffix):
    path, lines = tmp_path / f"book{suffix}", ["one, two", "", "  three "]
    if suffix == ".txt":
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        write_rows(path, [{"id": number, "text": line} for number, line in enumerate(lines)])
    assert load_lines(path) == ("one, two", "", "three")


def test_a_text_of_several_lines_becomes_them(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\ntwo\\n"}\n{"text": " three \\n\\n"}\n')
    assert load_lines(path) == ("one", "two", "three", "")


def test_wikitext_is_read_from_the_folder_without_what_is_no_line(tmp_path, monkeypatch):
    write_rows(tmp_path / "wikitext2" / "test.parquet", [{"text": t} for t in (" ", " = A <unk> = ", " ", "")])
    monkeypatch.setenv("SSMSCOPE_DATA", str(tmp_path))
    assert load_lines("wikitext2") == ("", "= A <unk> =", "")
    refuses("wikitext2 has no split 'train' in .*; there are test", load_lines, "wikitext2", "train")
    refuses("wikitext2 has no labels: it is data for language models", load_text, "wikitext2")


def test_wikitext_is_read_from_the_hub_with_its_rare_words_as_in_the_folder(monkeypatch):
    module, calls = types.ModuleType("datasets"), []
    module.load_dataset = lambda *given, split: calls.append((*given, split)) or [{"text": " one \n"}, {"text": ""}]
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setattr("ssmscope.data.hub.check_reach", lambda name: None)
    monkeypatch.delenv("SSMSCOPE_DATA", raising=False)
    assert load_lines("wikitext2", "validation") == ("one",)
    assert calls == [("Salesforce/wikitext", "wikitext-2-v1", "validation")]
    refuses("wikitext2 has no split 'tests'; there are .*did you mean 'test'", load_lines, "wikitext2", "tests")


def test_texts_that_cannot_be_read_are_refused(tmp_path):
    blank, latin, table = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "c.csv"
    blank.write_text("\n  \n")
    latin.write_bytes("café\n".encode("latin-1"))
    table.write_text("line\nx\n")
    for given, message in [
        (blank, "holds no word"),
        (latin, r"not UTF-8 text \(byte 3\)"),
        (table, "no column 'text'"),
        (tmp_path / "none.txt", "could not be read: No such file"),
        ("wikitext", "unknown text 'wikitext'; give wikitext2, books, or a file .*did you mean 'wikitext2'"),
    ]:
        refuses(message, load_lines, given)
    refuses("split 'test' was asked for", load_lines, blank, "test")


def test_bytes_are_their_own_ids_and_decode_exactly(tmp_path):
    tokenizer = byte_tokenizer()
    every = bytes(range(256)).decode("latin-1")  # all code points under 256; their UTF-8 has no byte C0, C1, F5 or more
    texts = [every, "  two  spaces\tand\nlines \n", "日本 é😀 <unk> Ġ Ċ [CLS]", "don't we'll\r\n"]
    for one in (tokenizer, saved(tokenizer, tmp_path)):
        assert len(one) == 256 and one.all_special_tokens == []
        for text in texts:
            assert one(text)["input_ids"] == list(text.encode())
            assert one.decode(list(text.encode())) == text
        assert sorted(one.get_vocab().values()) == list(range(256))


def test_bytes_are_merged_into_the_words_of_the_text():
    batch = model_with(byte_tokenizer()).encode("a né b")
    assert batch.input_ids[0].tolist() == list("a né b".encode())
    assert batch.tokens[0] == ("a", " ", "n", "é", "", " ", "b") and batch.words[0] == (0, 1, 1, 1, 1, 2, 2)


def test_words_are_ordered_by_number_and_alphabet(tmp_path):
    tokenizer = word_tokenizer(LINES)
    names = ["<unk>", "<eos>", "the", "=", "dog", "Title", "cat", "ran", "saw"]
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))) == names
    again = saved(tokenizer, tmp_path)
    assert (again.unk_token_id, again.eos_token_id, again.pad_token_id) == (0, 1, None)
    for one in (tokenizer, again):
        # neither "<unk>" nor "<eos>" is searched for within words
        assert one("the  new cat\tsaw <unk> non-<unk> <eos>d The")["input_ids"] == [2, 0, 6, 8, 0, 0, 0, 0]
        assert one.decode([2, 6, 1]) == "the cat <eos>"
    assert word_tokenizer(LINES[::-1]).get_vocab() == tokenizer.get_vocab()
    assert word_tokenizer(["b <unk> <unk> <eos> a a"], vocabulary=3).get_vocab() == {"<unk>": 0, "<eos>": 1, "a": 2}


def test_word_tokenizers_that_cannot_be_are_refused():
    refuses("vocabulary of 2 was asked for", word_tokenizer, LINES, vocabulary=2)
    refuses("no word", word_tokenizer, ["", "<unk> <eos>"])


@pytest.mark.parametrize("tokens", [("0", "1"), LISTOPS, ("k0", "k1", "v0", "copy", "<pad>")])
def test_symbols_keep_their_ids(tmp_path, tokens):
    draw = np.random.default_rng(0).integers(len(tokens), size=30).tolist()
    text = " ".join(tokens[i] for i in draw)
    for one in (symbol_tokenizer(tokens), saved(symbol_tokenizer(tokens), tmp_path)):
        assert len(one) == len(tokens) and one.all_special_tokens == []
        assert one.decode(draw) == text
        batch = model_with(one).encode([text, tokens[0]])
        assert batch.input_ids[0].tolist() == draw and batch.tokens[0] == tuple(tokens[i] for i in draw)
        assert batch.words[0] == tuple(range(30))
        assert torch.equal(batch.mask.sum(1), torch.tensor([30, 1]))


def test_other_symbols_are_refused(tmp_path):
    tokenizer = saved(symbol_tokenizer(["0", "1"]), tmp_path)
    assert tokenize(tokenizer, ["0 1", " 1\t1 "])["input_ids"] == [[0, 1], [1, 1]]
    with pytest.raises(InputError, match="text 1 has '2', which is not a symbol of this tokenizer; its symbols are 0"):
        tokenize(tokenizer, ["0 1", "0 2 1"])
    refuses("the text has '01', which is not a symbol", language_data, ["0 01"], tokenizer, length=2)
    for tokens, message in [
        ([], "no symbol"),
        (["a", "b", "a"], "'a' is given twice"),
        (["a", "b c"], "'b c' is empty or holds white space"),
        (["a", ""], "'' is empty"),
    ]:
        refuses(message, symbol_tokenizer, tokens)


@pytest.mark.parametrize("length", [1, 2, 5, 7, 12, 13, 100])
def test_rows_ask_for_every_token_but_the_first_once_and_in_order(length):
    tokenizer = word_tokenizer(LINES)
    words = "= Title = <eos> <eos> the cat saw the dog <eos> the dog ran <eos>".split()
    data = language_data(LINES, tokenizer, length=length, name="tale", split="train")
    ids, targets = data.ids.ravel(), data.targets.ravel()
    asked = targets != IGNORED
    assert [data.tokens[i] for i in targets[asked]] == words[1:]
    assert [data.tokens[i] for i in ids[asked]] == words[:-1]
    assert asked.tolist() == sorted(asked.tolist(), reverse=True)  # nothing but the end is padding
    assert 0 <= (~asked).sum() < length and set(ids[~asked]) <= {0}
    assert np.array_equal(data.ids[1:, 0], data.targets[:-1, -1])
    assert data.ids.shape == data.targets.shape == (-(-14 // length), length)
    assert (data.name, data.split, len(data.tokens)) == ("tale", "train", len(tokenizer))


def test_bytes_are_cut_with_their_line_ends():
    data = language_data(LINES, byte_tokenizer(), length=10)
    asked = data.targets.ravel() != IGNORED
    text = "\n".join(LINES) + "\n"
    assert bytes(data.ids.ravel()[asked].tolist()) == text.encode()[:-1]
    assert bytes(data.targets.ravel()[asked].tolist()) == text.encode()[1:] and data.tokens[ord("a")] == "a"


def test_rows_that_cannot_be_are_refused():
    tokenizer = word_tokenizer(LINES)
    refuses("length is 0; allowed is a whole number from 1 on", language_data, LINES, tokenizer, length=0)
    for lines, count in ([], 0), ([""], 1):
        refuses(f"tale has {count} tokens", language_data, lines, tokenizer, length=4, name="tale")


def test_wikitext_has_its_known_size(real_data):
    real_data("wikitext2", "test")
    lines = load_lines("wikitext2", "test")
    # the number of words and line ends in the literature
    assert (len(lines), sum(len(line.split()) + 1 for line in lines)) == (4358, 245_569)
    data = language_data(lines[:400], word_tokenizer(lines[:400]), length=64)
    assert (data.targets != IGNORED).sum() == sum(len(line.split()) + 1 for line in lines[:400]) - 1
