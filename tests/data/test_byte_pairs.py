"""The tokenizer of prompts: it loses nothing but case, appends nothing, and keeps label words whole."""

import pytest
from refusals import refuses
from transformers import AutoTokenizer
from ssmscope.data.tokenizer import save_tokenizer
from ssmscope.errors import InputError
from ssmscope.zoo.tokenizers import ANSWER_END, PAD, UNKNOWN, train_byte_pairs

TEXTS = [
    "Is this 'positive' or 'negative'?\na moving film , isn't it\nAnswer: positive",
    'Classify: "it \'s a dull story ..." (1999)\nAnswer: negative',
]
ODD_TEXTS = [
    "Line one\nline two\n\n\tindented  twice , 'quoted' (1,234.5%) -- end: \r\n", " leading and trailing  ",
    "h\u043em\u03bfglyphs, na\u00efve e\u0301, a\u200db, \u65e5\u672c\u8a9e \U0001f3ac",
    "you 've don't isn't 'tis o'clock _under_score !!! ?!", "[END] [UNK] [PAD]", "\n",
]  # fmt: skip
tokenizer = pytest.fixture(scope="module")(lambda: train_byte_pairs(TEXTS * 5, vocabulary=340))


@pytest.mark.parametrize("text", [*TEXTS, *ODD_TEXTS])
def test_a_text_is_decoded_as_it_was_but_for_its_case(tokenizer, text) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text.lower()
    cased = train_byte_pairs(TEXTS, vocabulary=300, lowercase=False)
    assert cased.decode(cased(text)["input_ids"]) == text


@pytest.mark.parametrize("text", [*TEXTS, *ODD_TEXTS])
def test_no_text_has_a_special_token(tokenizer, text) -> None:
    special = {tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id}
    assert special == set(tokenizer.all_special_ids) == {0, 1, 2}
    ids = tokenizer(text)["input_ids"]
    assert not special & set(ids) and ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == [PAD, UNKNOWN, ANSWER_END]


def test_what_tokens_never_cross(tokenizer) -> None:
    text = "It's  a 'film'\n\n(12) isn't ... you 've"
    encoded = tokenizer(text, return_offsets_mapping=True)
    spans = {}
    for word, (start, end) in zip(encoded.word_ids(), encoded["offset_mapping"]):
        spans[word] = (spans.get(word, (start, end))[0], end)
    expected = ["It's", " ", " a", " '", "film", "'", "\n", "\n", "(", "12", ")", " isn't", " ...", " you", " 've"]
    assert [text[start:end] for start, end in spans.values()] == expected


def test_a_prompt_keeps_its_tokens_when_an_answer_follows(tokenizer) -> None:
    for text in (*TEXTS, "no end", "It is", "ends with 9", 'quoted "', "a\n{b}", "\u65e5"):
        for word in ("positive", "negative"):
            ids = tokenizer(text)["input_ids"]
            whole = tokenizer(f"{text} {word}")["input_ids"]
            assert whole[:-1] == ids and tokenizer.decode(whole[-1:]) == f" {word}"


def test_the_same_texts_give_the_same_tokenizer_every_time_and_so_does_its_file(tokenizer, tmp_path) -> None:
    assert len({train_byte_pairs(TEXTS, vocabulary=300).backend_tokenizer.to_str() for _ in range(5)}) == 1
    save_tokenizer(tokenizer, tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*TEXTS, *ODD_TEXTS):
        one, other = (t(text, return_offsets_mapping=True) for t in (tokenizer, again))
        assert one["input_ids"] == other["input_ids"] and one["offset_mapping"] == other["offset_mapping"]
        assert again.decode(other["input_ids"]) == text.lower()
    assert again.all_special_ids == tokenizer.all_special_ids and again.eos_token == ANSWER_END


def test_impossible_tokenizers_are_refused() -> None:
    assert len(train_byte_pairs(["a"], vocabulary=259)) == 259
    with pytest.raises(InputError, match="a vocabulary of 258 has no room for 256 bytes and 3 special .* at least 259"):
        train_byte_pairs(["a"], vocabulary=258)
    refuses("no text to train a tokenizer on", train_byte_pairs, [])
