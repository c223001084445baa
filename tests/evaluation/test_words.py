"""Templates, texts as tokens, and the words that stand for classes."""

import pytest
import torch
from refusals import refuses
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import Mamba2Config, Mamba2ForCausalLM, PreTrainedTokenizerFast
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.evaluation import Template, label_words
from ssmscope.evaluation.forking import token_rows
from ssmscope.evaluation.verbalizer import WordMatcher, log_probabilities
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.zoo.documents import byte_tokenizer, symbol_tokenizer, word_tokenizer
from ssmscope.zoo.tokenizers import train_tokenizer

SIZES = dict(hidden_size=16, state_size=4, num_heads=4, head_dim=8, n_groups=1, num_hidden_layers=1, expand=2)
KEYS = dict(pad_token_id=0, bos_token_id=0, eos_token_id=0)


def reading(tokenizer, vocabulary: int | None = None) -> Model:
    module = Mamba2ForCausalLM(Mamba2Config(vocab_size=vocabulary or len(tokenizer), **SIZES, **KEYS))
    return Model(module, tokenizer, "small")


def classifying(tokenizer) -> Model:
    config = SSMClassifierConfig(Mamba2Config(vocab_size=len(tokenizer), **SIZES, **KEYS), num_labels=2)
    return Model(SSMForSequenceClassification(config), tokenizer, "classifier")


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, with " good" as one token, "<s>" before a text and "</s>" after it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "g"), ("Ġg", "o"), ("Ġgo", "o"), ("Ġgoo", "d")]
    names = ["<s>", "</s>", *alphabet, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


class TestTemplate:
    def test_only_its_own_braces_are_filled(self):
        template = Template('{"a": {0}} {content} {b}')
        assert (template.before, template.after) == ('{"a": {0}} ', " {b}")
        assert template.fill("x {content} {c} \\1") == '{"a": {0}} x {content} {c} \\1 {b}'
        assert Template("{content}").before == Template("{content}").after == ""

    @pytest.mark.parametrize("text, words", [
        ("Say: {text}", r"'Say: {text}' has no {content}.*did you mean {content} by '{text}'\?"),
        ("A {b} of [contents]", r"did you mean {content} by '\[contents\]'\?"),
        ("<a> says {b}", r"did you mean {content} by '<a>'\?"),
        ("Say: {content", r"did you mean {content} by '{content'\?"),
        ("Say nothing", r"has no {content}, the placeholder for the text$"),
        ("{content} or {content}", "has {content} 2 times; it must have it once"),
        ("x" * 60, "'x{60}' has no"),
        ("x" * 61, "'x{60}…' has no"),
    ])  # fmt: skip
    def test_without_a_place_for_the_content(self, text, words):
        refuses(words, Template, text)


class TestRows:
    def test_special_tokens_at_the_end_are_for_classifiers(self):
        tokenizer = train_tokenizer(["a good film", "a bad film"], vocabulary=40)
        cls = tokenizer.cls_token_id
        with_end = tokenizer(["a good film", "bad"])["input_ids"]
        assert all(row[-1] == cls for row in with_end)
        assert token_rows(classifying(tokenizer), ["a good film", "bad"]) == with_end
        assert token_rows(reading(tokenizer), ["a good film", "bad"]) == [row[:-1] for row in with_end]

    def test_special_tokens_at_the_beginning_stay(self):
        tokenizer = merging_tokenizer()
        rows = token_rows(reading(tokenizer), ["a", "</s>", "<s> b"])
        ids = tokenizer.get_vocab()
        assert rows == [[0, ids["a"]], [0, 1], [0, 0, ids["Ġ"], ids["b"]]]

    def test_what_is_refused(self):
        model = reading(merging_tokenizer())
        refuses(r"text 1 \(''\) has no token that the tokenizer of small knows: give at", token_rows, model, ["a", ""])
        refuses(r"the text \('  '\) has no token", token_rows, reading(word_tokenizer(["a b"])), ["  "])
        with pytest.raises(InputError, match=r"'c', which is not a symbol of this tokenizer; its symbols are a b"):
            token_rows(reading(symbol_tokenizer(["a", "b"])), ["a b c"])
        with pytest.raises(InputError, match=r"the tokenizer gives id 98, outside the vocabulary 0…49 of small"):
            token_rows(reading(byte_tokenizer(), vocabulary=50), ["\t", "a b"])
        assert token_rows(reading(byte_tokenizer(), vocabulary=99), ["b"]) == [[98]]
        with pytest.raises(InputError, match=r"the tokenizer gives id 98, outside the vocabulary 0…97 of small"):
            token_rows(reading(byte_tokenizer(), vocabulary=98), ["b"])
        with pytest.raises(InputError, match=r"small has no tokenizer to read texts with; give one, load"):
            token_rows(Model(model.module, None, "small"), ["a"])
        assert token_rows(model, []) == []


class TestLabelWords:
    def test_are_what_a_text_goes_on_with(self):
        model = reading(word_tokenizer(["good bad not is it :"]))
        ids = model.tokenizer.get_vocab()
        found = label_words(model, ["good", "not bad"], after="it is :")
        assert found.words == ("good", "not bad") and found.ids == ((ids["good"],), (ids["not"], ids["bad"]))
        assert label_words(model, ["good", "not bad"], after="") == found

    def test_of_tokens_that_take_the_space_in(self):
        model = reading(merging_tokenizer())
        ids = model.tokenizer.get_vocab()
        assert label_words(model, ["good"], after="a:").ids == ((ids["Ġgood"],),)
        bad = tuple(ids[letter] for letter in "bad")
        assert label_words(model, ["bad"], after="a:").ids == ((ids["Ġ"], *bad),)
        assert label_words(model, ["bad"], after="a: ").ids == (bad,)  # no second space
        assert label_words(model, ["bad"], after="a:\n").ids == (bad,)
        assert label_words(model, ["good"], after="").ids == ((ids["Ġgood"],),)
        with pytest.raises(
            InputError, match=r"'good' merges with the text before it, 'a: ': end the text without white"
        ):
            label_words(model, ["good"], after="a: ")
        for letters, shown in ((50, "…" + "x" * 19), (20, "…" + "x" * 19), (19, "x" * 19)):
            with pytest.raises(InputError, match=f"merges with the text before it, '{shown} '"):
                label_words(model, ["bad", "good"], after="x" * letters + " ")

    @pytest.mark.parametrize("words, message", [
        (["good", " "], "the label word of class 1 is ' '; give every class a word"),
        (["good", None], "the label word of class 1 is None"),
        ([], r"\[\] was given for label words; give a list with one word for each class"),
        ("good", "'good' was given for label words; give a list"),
        (["good", "great"], "the label word 'great' has a token that the tokenizer of small does not know"),
        (["not great", "bad"], "the label word 'not great' has a token"),
        (["good", "good"], "the label words 'good' and 'good' have the same tokens"),
        (["good", "not  bad", "not bad"], "the label words 'not  bad' and 'not bad' have the same tokens"),
        (["bad", "not", "not bad"], "the tokens of the label word 'not' are the beginning of those of 'not bad'"),
        (["not bad", "not"], "the tokens of the label word 'not' are the beginning of those of 'not bad'"),
    ])  # fmt: skip
    def test_that_are_refused(self, words, message):
        model = reading(word_tokenizer(["good bad not is it :"]))
        refuses(message, label_words, model, words, after="it is :")

    def test_without_a_token_of_their_own(self):
        tokenizer = train_tokenizer(["a good film : bad"], vocabulary=40)
        tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
        with pytest.raises(InputError, match=r"the label word '\\u200b' has no token for the tokenizer of small"):
            label_words(reading(tokenizer), ["good", "\u200b"], after="film :")

    def test_the_unknown_token_itself_may_be_one(self):
        model = reading(word_tokenizer(["good bad"]))
        assert label_words(model, ["<unk>", "bad"], after="good").ids[0] == (model.tokenizer.unk_token_id,)

    def test_are_for_language_models(self):
        tokenizer = word_tokenizer(["good bad"])
        with pytest.raises(InputError, match="classifier is a classifier with its own classes"):
            label_words(classifying(tokenizer), ["good", "bad"], after="good")
        refuses("has no tokenizer", label_words, Model(reading(tokenizer).module), ["good", "bad"], after="good")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_log_probabilities_are_at_least_of_float32(dtype):
    logits = torch.linspace(-3, 5, 4000).view(2, 2000).to(dtype)
    tokens = torch.tensor([[3, 1999, 0], [7, 7, 1000]])
    found = log_probabilities(logits, tokens)
    expected = logits.double().log_softmax(1).gather(1, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("answer, label", [
    ("Bad, I think, not good", 1), ("GOOD", 0), ("goodness, unbad", None), ("not\n bad", 2), ("is not bad", 2),
    ("", None), ("c++ or bad", 3), ("cccc", None), ("_bad bad2 bad-good", 1),
])  # fmt: skip
def test_the_word_that_an_answer_names_first(answer, label):
    assert WordMatcher(["good", "bad", "not bad", "C++"])(answer) == label


def test_the_longer_word_counts_where_two_begin_alike():
    for words, expected in ((["not", "not bad"], 1), (["not bad", "not"], 0)):
        assert WordMatcher(words)("Not bad") == expected
        assert WordMatcher(words)("not badly") == 1 - expected
    refuses("two classes have the label word 'NOT  bad'", WordMatcher, ["not bad", "NOT  bad"])
