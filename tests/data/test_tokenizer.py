import json

import pytest
import torch
from refusals import refuses
from transformers import AutoTokenizer
from ssmscope.data.text import text_data
from ssmscope.data.tokenizer import save_tokenizer
from ssmscope.loading.pretrained import read_tokenizer
from ssmscope.zoo.tokenizers import train_tokenizer
from ssmscope.zoo.training.batches import SubwordDropout, drop_tokens, encode, epoch_order, padded

TEXTS = [
    "The film isn't bad; it's a moving, well-made story ...",
    "you 've seen better films, and worse stories!!",
    "a story of moving films | and films of moving stories",
]
tokenizer = pytest.fixture(scope="module")(lambda: train_tokenizer(TEXTS * 3, vocabulary=90))


def data_of(texts):
    return text_data("texts", "train", texts, [0] * len(texts), ["a", "b"])


def test_every_text_ends_with_the_end_token_cut_or_not(tokenizer):
    whole = tokenizer(TEXTS[0])["input_ids"]
    cut = tokenizer(TEXTS[0], truncation=True, max_length=5)["input_ids"]
    assert whole[-1] == cut[-1] == tokenizer.cls_token_id and whole.count(tokenizer.cls_token_id) == 1
    assert cut[:-1] == whole[:4]


def test_offsets_and_word_ids_merge_sub_words_into_the_words_of_the_text(tokenizer):
    text = "Unseen words, isn't it ... you 've"
    encoded = tokenizer(text, return_offsets_mapping=True)
    spans = {}
    for word, (start, end) in zip(encoded.word_ids(), encoded["offset_mapping"]):
        if word is not None:
            first = spans.get(word, (start, end))[0]
            spans[word] = (first, end)
    words = [text[start:end] for start, end in spans.values()]
    assert words == ["Unseen", "words", ",", "isn't", "it", "...", "you", "'ve"]
    assert len(encoded["input_ids"]) > len(words) + 1 and encoded.word_ids()[-1] is None


def test_unseen_characters_become_the_unknown_token_one_each(tokenizer):
    tokens = tokenizer("film 日本").tokens()
    assert tokens[-3:] == ["[UNK]", "[UNK]", "[CLS]"]
    assert "[UNK]" not in tokenizer(TEXTS[0]).tokens()


def test_case_is_folded_only_on_request(tokenizer):
    assert tokenizer("THE FILM")["input_ids"] == tokenizer("the film")["input_ids"]
    cased = train_tokenizer(TEXTS, vocabulary=90, lowercase=False)
    assert cased("The")["input_ids"] != cased("the")["input_ids"]


def test_special_tokens_and_padding(tokenizer):
    assert [tokenizer.pad_token, tokenizer.unk_token, tokenizer.cls_token] == ["[PAD]", "[UNK]", "[CLS]"]
    assert [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.cls_token_id] == [0, 1, 2]
    batch = tokenizer(["film", TEXTS[0]], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"} and batch["input_ids"][0][-1] == 0
    assert batch["attention_mask"][0][:2] == [1, 1]
    assert len(tokenizer) <= 90


def test_a_tokenizer_is_the_same_every_time_and_saved_small(tokenizer, tmp_path):
    # The trainer's hash maps are seeded anew each time: with a `##` prefix five runs give five vocabularies.
    assert len({train_tokenizer(TEXTS, vocabulary=90).backend_tokenizer.to_str() for _ in range(5)}) == 1
    tokenizer(TEXTS, truncation=True, max_length=4, padding=True)  # leaves its settings in the tokenizer
    save_tokenizer(tokenizer, tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.is_fast
    texts = [*TEXTS, "Unseen wörds"]
    for text in texts:
        one, other = (t(text, return_offsets_mapping=True) for t in (tokenizer, again))
        assert one.data == other.data and one.word_ids() == other.word_ids()
    assert again.all_special_tokens == tokenizer.all_special_tokens
    assert again(["film", TEXTS[0]], padding=True)["input_ids"][0][-1] == 0
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == (
        "PreTrainedTokenizerFast"
    )
    assert "\n" not in (tmp_path / "tokenizer.json").read_text()
    # As release 5 of transformers saves it, whichever is installed.
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace("PreTrainedTokenizerFast", "TokenizersBackend"))
    assert read_tokenizer(tmp_path)(texts)["input_ids"] == tokenizer(texts)["input_ids"]


def test_impossible_tokenizers_are_refused():
    refuses("no text", train_tokenizer, [])
    refuses(r"vocabulary of 8 .* give at least 1\d|give at least \d\d", train_tokenizer, TEXTS, vocabulary=8)
    refuses("max_length is 1", train_tokenizer, TEXTS, max_length=1)


def test_without_dropped_merges_the_cut_is_the_tokenizers_own(tokenizer):
    data = data_of([*TEXTS, "unseen 日本 wörds", "[CLS] film"])
    for max_length in (100, 6):
        cuts = SubwordDropout(data, tokenizer, max_length, 0.0, seed=0)
        assert cuts.rows(0) == encode(data, tokenizer, max_length)


def test_dropped_merges_change_the_cut_but_not_the_letters(tokenizer):
    data = data_of(TEXTS)
    cuts = SubwordDropout(data, tokenizer, 200, 0.5, seed=0)
    first, second = cuts.rows(0), cuts.rows(1)
    assert first != second and first == SubwordDropout(data, tokenizer, 200, 0.5, seed=0).rows(0)
    greedy = encode(data, tokenizer, 200)
    for row, other, own in zip(first, second, greedy):
        letters = {"".join(tokenizer.convert_ids_to_tokens(ids)) for ids in (row, other, own)}
        assert len(letters) == 1
        assert len(row) >= len(own) and row[-1] == tokenizer.cls_token_id


def test_with_every_merge_dropped_only_letters_are_left(tokenizer):
    cuts = SubwordDropout(data_of(["moving films"]), tokenizer, 200, 1.0, seed=0)
    assert tokenizer.convert_ids_to_tokens(cuts.rows(0)[0]) == [*"movingfilms", "[CLS]"]


def test_long_texts_keep_their_end_token_under_dropout(tokenizer):
    cuts = SubwordDropout(data_of(TEXTS), tokenizer, 5, 0.9, seed=0)
    rows = cuts.rows(0)
    assert [len(row) for row in rows] == [5, 5, 5]
    assert {row[-1] for row in rows} == {tokenizer.cls_token_id}


def test_an_epoch_holds_every_row_once_in_batches_of_alike_length():
    lengths = [(7 * i) % 31 + 1 for i in range(1000)]
    order = epoch_order(lengths, 16, seed=0, epoch=0)
    assert sorted(row for batch in order for row in batch) == list(range(1000))
    spread = [max(lengths[r] for r in batch) - min(lengths[r] for r in batch) for batch in order]
    assert sum(spread) / len(spread) < 3
    assert order == epoch_order(lengths, 16, seed=0, epoch=0) and order != epoch_order(lengths, 16, seed=0, epoch=1)
    assert order != epoch_order(lengths, 16, seed=1, epoch=0)
    firsts = [lengths[batch[0]] for batch in order]
    assert firsts != sorted(firsts)


def test_dropped_tokens_become_unknown_and_special_ones_stay(tokenizer):
    data = data_of([text * 20 for text in TEXTS])
    rows = encode(data, tokenizer, 512)
    ids, mask = padded(rows, tokenizer.pad_token_id)
    special = torch.tensor([0, 2])
    torch.manual_seed(0)
    dropped = drop_tokens(ids, 0.3, 1, special)
    stays = torch.isin(ids, special)
    assert torch.equal(dropped[stays], ids[stays])
    share = (dropped != ids)[~stays].float().mean().item()
    assert abs(share - 0.3) < 0.05
    assert set(dropped[dropped != ids].tolist()) == {1}
    assert torch.equal(drop_tokens(ids, 0.0, 1, special), ids)
    assert torch.equal(mask.sum(1), torch.tensor([len(row) for row in rows]))
