"""Tokens as characters of a text, over many tokenizers; and failures of a tokenizer."""

import functools
import re
import time

import numpy as np
import pytest
import torch
from loud import loud
from many_tokenizers import LOSSLESS, TEXTS, TOKENIZERS
from refusals import refuses
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedTokenizerFast
import ssmscope
from ssmscope.attacks.words.hotflip import read
from ssmscope.core import pattern_limit
from ssmscope.core.encoding import Batch, encode_texts
from ssmscope.core.model import Model
from ssmscope.core.tokenizing import tokenize
from ssmscope.data.language import language_data
from ssmscope.data.text import text_data
from ssmscope.errors import InputError
from ssmscope.evaluation import Template
from ssmscope.evaluation.forking import token_rows
from ssmscope.interp.heatmap.words import word_groups, word_text
from ssmscope.interp.spans import find_piece, positions_of, words_at
from ssmscope.zoo.training.batches import encode

made = functools.cache(lambda name: TOKENIZERS[name]())


def batch_of(name: str, text: str) -> Batch:
    return encode_texts([text], made(name), 1000)


def touching(name: str, text: str, start: int, stop: int) -> tuple[int, ...]:
    """The tokens that have a part of some characters, by the tokenizer's own offsets."""
    offsets = made(name)(text, return_offsets_mapping=True)["offset_mapping"]
    return tuple(at for at, (begin, end) in enumerate(offsets) if begin < stop and end > start)


def language_model(name: str) -> Model:
    torch.manual_seed(0)
    sizes = dict(vocab_size=400, hidden_size=16, num_hidden_layers=2, state_size=4, num_heads=4, head_dim=8, n_groups=1)
    return ssmscope.load(loud(Mamba2ForCausalLM(Mamba2Config(**sizes))), tokenizer=made(name))


class TestTokens:
    @pytest.mark.parametrize("name", LOSSLESS)
    @pytest.mark.parametrize("text", TEXTS)
    def test_joined_they_are_the_text(self, name, text):
        batch = batch_of(name, text)
        assert "".join(batch.tokens[0]) == text
        assert len(batch.tokens[0]) == len(made(name)(text)["input_ids"])

    def test_tokens_that_share_a_character(self):
        batch = batch_of("bytes over spaces", "Der Müller aß 10€ ok")
        both = zip(batch.spelled[0].offsets, batch.tokens[0])
        shared = [((begin, end), text) for (begin, end), text in both if end - begin != len(text)]
        assert shared  # some token begins within a character that the token before shows
        assert all(text == "Der Müller aß 10€ ok"[end - len(text) : end] for (_, end), text in shared)

    @pytest.mark.parametrize("name", TOKENIZERS)
    @pytest.mark.parametrize("text", TEXTS)
    def test_words_end_at_white_space_and_at_no_mark(self, name, text):
        batch = batch_of(name, text)
        groups = [group for group in word_groups(batch.words[0]) if batch.words[0][group[0]] is not None]
        words = [word_text(batch.tokens[0], group) for group in groups]
        if "over spaces" not in name:  # whose tokens themselves reach over spaces
            assert not any(re.search(r"\S\s", word) for word in words)
        assert not any(re.match("[\u0300-\u036f\u200d\u093c-\u094d\ufe0f🏻-🏿]", word) for word in words)
        assert not any(word.endswith("\u200d") for word in words)


class TestSpans:
    @pytest.mark.parametrize("name", TOKENIZERS)
    @pytest.mark.parametrize("text", TEXTS)
    def test_are_the_tokens_whose_characters_they_are_of(self, name, text):
        batch = batch_of(name, text)
        for match in re.finditer(r"\S+", text):
            places = touching(name, text, *match.span())
            if text.count(match[0]) == 1:
                assert positions_of(match[0], batch) == places and match[0] in words_at(places, batch)
            begin = text.index(match[0])
            found = find_piece(match[0], batch.spelled[0])
            first = touching(name, text, begin, begin + len(match[0]))
            assert found == (first[0], first[-1] + 1)

    @pytest.mark.parametrize("name", TOKENIZERS)
    def test_whatever_the_case_the_spaces_and_the_form_of_accents(self, name):
        text = "The CAFÉ  Müller"
        batch = batch_of(name, text)
        assert positions_of("cafe\u0301 MÜLLER", batch) == touching(name, text, 4, 16)
        assert positions_of("the", batch) == touching(name, text, 0, 3)

    @pytest.mark.parametrize("text, span", [("a cafe\u0301 ok", "cafe"), ("👩\u200d👧 ok", "👩"), ("अच्छी", "अच")])
    def test_no_part_of_what_is_shown_as_one(self, text, span):
        refuses("has no words", positions_of, span, batch_of("bytes", text))
        assert positions_of(text.split()[0], batch_of("bytes", text))

    def test_of_scripts_without_spaces_and_what_the_tokenizer_passes_over(self):
        assert positions_of("电影", batch_of("bytes", "这部电影很好")) == tuple(range(6, 12))
        tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, " ": 2}, []))
        tokenizer.normalizer = normalizers.Replace("😀", "")
        batch = encode_texts(["a 😀 b"], PreTrainedTokenizerFast(tokenizer_object=tokenizer), 9)
        assert batch.tokens[0] == ("a", " ", " ", "b")
        refuses("skips '😀': no token covers it", positions_of, "😀", batch)

    def test_in_numbers(self):
        batch = batch_of("bytes", "the film ok")
        for span, places in {1: (1,), -1: (2,), np.int64(0): (0,)}.items():
            assert positions_of(span, batch) == places
        assert positions_of(slice(1, None), batch) == (1, 2) and positions_of([2, 0, -1], batch) == (0, 2)
        for span, says in ((9, "no position 9"), (True, "names no"), ((), "names no tokens"), ((1, "a"), "names no")):
            refuses(says, positions_of, span, batch)
        refuses("names no tokens", positions_of, slice(5, 5), batch)


model = pytest.fixture(scope="module")(lambda: language_model("byte fallback"))


class TestAnalyses:
    """Analyses of characters of several tokens."""

    def test_knockout_by_words_is_that_of_their_positions(self, model):
        text = "Der Müller aß 10€ ok"
        places = touching("byte fallback", text, 14, 17)
        named_ = ssmscope.knockout(model, text, from_=["10€"], window=1, answer=7)
        assert named_.spans == ((places,),) and named_.sources == ("10€",)
        first, stop = places[0], places[-1] + 1
        for given in (list(places),), (slice(first, stop),), slice(first, stop), f"{first}:{stop}":
            found = ssmscope.knockout(model, text, from_=given, window=1, answer=7)
            assert np.array_equal(found.probabilities, named_.probabilities)
        each = ssmscope.knockout(model, text, from_=[1, "Müller"], to=-1, window=1, answer=7)
        assert each.spans == (((1,),), (touching("byte fallback", text, 4, 10),))
        assert each.provenance["options"]["from"] == ["1", "Müller"]

    def test_two_models_are_compared_by_word_with_every_token_counted(self, model):
        text = "ok Müller 10€"
        pair = ssmscope.attention([model, language_model("bytes")], text, rows="last")
        (both,) = next(block for block in pair.blocks() if hasattr(block, "texts")).texts
        assert [token.strip() for token in both.tokens] == ["ok", "Müller", "10€"]
        for row, name, one in zip(both.rows, ("byte fallback", "bytes"), pair.results):
            weights = np.mean([np.abs(each.values[0]) for each in one[0].maps], axis=0)
            words = [touching(name, text, *match.span()) for match in re.finditer(r" ?\S+", text)]
            assert np.allclose(row.scores, [weights[list(places)].sum() for places in words], rtol=1e-6)

    def test_flips_write_no_word_into_a_part_of_one(self):
        """Neither into one of the bytes of a letter, nor before an accent that is written apart."""
        names = [*"abcdefghijklmnopqrstuvwxyz\u0301", *(f"<0x{byte:02X}>" for byte in "é".encode()), "film", "<unk>"]
        merges = [("f", "i"), ("fi", "l"), ("fil", "m")]
        vocabulary = {name: number for number, name in enumerate([*names, "fi", "fil"])}
        tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
        text = "film é b\u0301 x"
        cut = Model(language_model("byte fallback").module, fast)
        assert cut.encode(text).tokens[0] == ("film", "é", "", "b", "\u0301", "x")
        assert read(cut, text, Template("{content}")).places == {0: (0, 4), 5: (10, 11)}


def failing(model: object, cut: object = None, **special: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace() if cut is None else cut
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


VOCABULARY = {"a": 0, "film": 1}
RUNAWAY = pre_tokenizers.Split(Regex("(a+)+c"), "isolated")
FAILING = {
    "word level": lambda: failing(models.WordLevel(VOCABULARY)),
    "word level, unknown token not in the vocabulary": lambda: failing(
        models.WordLevel(VOCABULARY, unk_token="[UNK]"), unk_token="[UNK]"
    ),
    "word pieces": lambda: failing(models.WordPiece(VOCABULARY, unk_token="[UNK]")),
    "byte pairs": lambda: failing(models.BPE(VOCABULARY, [], unk_token="<unk>"), unk_token="<unk>"),
    "unigram": lambda: failing(models.Unigram([("a", -1.0), ("film", -2.0)])),
}


class TestFailures:
    @pytest.mark.parametrize("name", FAILING)
    def test_are_told_with_the_text_and_the_word(self, name):
        tokenizer = FAILING[name]()
        with pytest.raises(InputError) as found:
            tokenize(tokenizer, ["a", "a a", "a zebra a"], add_special_tokens=False)
        said = "is not a symbol of this tokenizer; its symbols are a film" if "level" in name else "does not know"
        assert str(found.value).startswith("text 2 has 'zebra', which ") and said in str(found.value)
        refuses("^the prompt has 'zebra'", tokenize, tokenizer, ["zebra"], named="the prompt")
        assert "\n" not in str(found.value)

    def test_of_a_split_pattern_that_runs_away(self, capfd):
        tokenizer = failing(models.BPE({"a": 0, "b": 1}, []), RUNAWAY)
        assert tokenize(tokenizer, "aab")["input_ids"] == [0, 0, 1]
        with pytest.raises(
            InputError, match=r"text 1 \('aaaa.*cannot be split by the tokenizer's regular .*retry-limit"
        ):
            tokenize(tokenizer, ["ab", "a" * 40 + "b"])
        assert capfd.readouterr().err == ""  # The library's own words would be a page long.

    def test_of_a_split_pattern_that_never_ends(self, monkeypatch):
        """Each match ends before the library's own limit, and the text has thousands."""
        monkeypatch.setattr(pattern_limit, "SECONDS", 0.3)
        text, began = ("a" * 22 + "!") * 1000, time.monotonic()
        tokenizer = failing(models.BPE({"a": 0, "b": 1}, []), pre_tokenizers.Split(Regex(r"(a+)+$"), "isolated"))
        model = Model(language_model("byte fallback").module, tokenizer)
        for call in (lambda: tokenize(tokenizer, text), lambda: model.encode(text), lambda: token_rows(model, [text])):
            refuses(r"regular expression '\(a\+\)\+\$': it takes more than 1 s; give another", call)
        assert time.monotonic() - began < 60
        monkeypatch.undo()
        assert tokenize(tokenizer, "aab")["input_ids"] == [0, 0, 1]  # Another process reads the next text.

    def test_known_patterns_need_no_process(self, monkeypatch):
        monkeypatch.setattr(pattern_limit.Splitter, "trouble", None)
        for demo in ("sst2-mamba2", "books-mamba2"):
            assert tokenize(ssmscope.load(f"demo/{demo}").tokenizer, "a film")["input_ids"]

    def test_what_somebody_presses_is_none(self):
        def pressed(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            tokenize(pressed, "a")

    @pytest.mark.parametrize("name", FAILING)
    def test_everywhere_that_texts_are_read(self, name):
        module = language_model("byte fallback").module
        model = Model(module, FAILING[name]())
        calls = [
            lambda: model.encode("a zebra"),
            lambda: ssmscope.explain(model, "a", methods=("gradxinput",), target=" zebra"),
            lambda: ssmscope.explain(model, "a zebra", methods=("gradxinput",)),
            lambda: ssmscope.knockout(model, "a zebra", from_=["a"]),
            lambda: token_rows(model, ["a", "zebra"]),
            lambda: ssmscope.Evaluator(model, words=("a", "film")).scores(["zebra"]),
            lambda: ssmscope.Evaluator(model, words=("a", "zebra")).scores(["a"]),
            lambda: language_data(["a", "zebra"], model.tokenizer, length=4),
            lambda: encode(text_data("t", "all", ["a", "zebra"], [0, 1], ["x", "y"]), model.tokenizer, 9),
        ]
        for call in calls:
            refuses("zebra", call)


def test_padding_is_the_tokenizers():
    inner = Tokenizer(models.WordLevel({"a": 0, "film": 1, "[PAD]": 2}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    for options, padded in (({"pad_token": "[PAD]"}, 2), ({}, 0)):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **options)
        batch = encode_texts(["film film", "film"], tokenizer, 3)
        assert batch.input_ids.tolist() == [[1, 1], [1, padded]] and batch.lengths == [2, 1]
