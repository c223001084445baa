"""Scores: forked as unforked, as slow loops over texts and classes, and as its users meet them."""

import numpy as np
import pytest
import torch
from evaluation.slow import (
    CONTENTS,
    FILLING,
    LABELS,
    PHRASES,
    TEMPLATES,
    TEXTS,
    WORDS,
    labels_of,
    language_model,
    slow_likelihoods,
)
from loud import TrueFloat64, loud
from refusals import refuses
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import nn
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast
from transformers.models.mamba.modeling_mamba import MambaMixer
import ssmscope
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.evaluation import Evaluator, Template, running
from ssmscope.evaluation import evaluator as asking
from ssmscope.evaluation.forking import token_rows
from ssmscope.zoo.documents import byte_tokenizer, symbol_tokenizer


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
@pytest.mark.parametrize("normalise", [False, True])
def test_likelihoods_are_those_of_the_models_own_forward(name, normalise):
    model = language_model(name, torch.float64)
    texts = TEXTS[::4]
    with TrueFloat64(), torch.no_grad():
        found = Evaluator(model, words=PHRASES, normalise=normalise).scores(texts)
        slow = slow_likelihoods(
            lambda row: model.module(torch.tensor([row])).logits[0],
            token_rows(model, texts),
            labels_of(model, PHRASES),
            normalise,
        )
    np.testing.assert_allclose(found, slow, rtol=1e-9)
    assert (found < 0).all() and np.ptp(found) > 1


@pytest.mark.parametrize("tokens_at_once", [1, 33, None])
def test_scores_are_in_the_order_of_the_call(tokens_at_once):
    model = language_model("mamba2")
    evaluator = Evaluator(model, words=PHRASES, tokens_at_once=tokens_at_once)
    order = np.random.default_rng(0).permutation(len(TEXTS))
    shuffled = evaluator.scores([TEXTS[at] for at in order] + TEXTS[:3])
    assert (evaluator.asked, evaluator.run) == (len(TEXTS) + 3, len(set(TEXTS)))
    found = evaluator.grid(TEMPLATES, CONTENTS)
    assert found.shape == (len(TEMPLATES), len(CONTENTS), len(PHRASES)) and found.dtype == np.float64
    assert evaluator.run == len(set(TEXTS)) and evaluator.asked == 2 * len(TEXTS) + 3
    assert (found.reshape(len(TEXTS), -1)[order] == shuffled[: len(TEXTS)]).all()
    alone = [Evaluator(model, words=PHRASES).scores([text])[0] for text in TEXTS[::5]]
    np.testing.assert_allclose(found.reshape(len(TEXTS), -1)[::5], alone, rtol=1e-5, atol=1e-5)
    assert evaluator.scores([]).shape == (0, len(PHRASES)) and evaluator.grid([], CONTENTS).shape == (
        0,
        len(CONTENTS),
        len(PHRASES),
    )


def test_shared_beginnings_are_run_once(tokens_run):
    model = language_model("mamba")
    start = " ".join(FILLING[:20])
    texts = [f"{start} w{30 + number} w40 :" for number in range(5)]

    def run(evaluator: Evaluator, texts: list[str]) -> int:
        tokens_run.clear()
        evaluator.scores(texts)
        return sum(tokens_run)

    one, several = Evaluator(model, words=WORDS), Evaluator(model, words=PHRASES)
    for evaluator in (one, several):
        run(evaluator, [f"{start} w80", f"{start} w81"])  # finds out whether it forks
    assert run(one, texts) == 20 + 5 * 3
    assert run(one, [*texts, f"{start} w50"]) == 21  # one is new
    assert run(one, texts[::-1]) == 0
    # "not", "not so", "very", "very bad" and "very bad is" stand before the last tokens of labels
    assert run(several, texts) == 20 + 5 * 3 + 5 * 5


@pytest.mark.parametrize("words", [WORDS, PHRASES], ids=["one token", "several tokens"])
@pytest.mark.parametrize("scoring", ["likelihood", "generated"])
def test_no_more_states_are_held_than_allowed(monkeypatch, words, scoring):
    model = language_model("rwkv")
    expected = Evaluator(model, words=words, scoring=scoring).scores(TEXTS)
    most, held, run_pieces, run_batch = 7, [], asking.run_pieces, running.run_batch
    monkeypatch.setattr(asking, "max_held_states", lambda *_: most)

    def pieces_counted(model, rows, pieces, read, **options):
        held.append(pieces.kept.sum())
        run_pieces(model, rows, pieces, read, **options)

    def states_counted(model, ids, mask, states=None, *, keep=False):
        assert len(ids) <= most or not (states or keep)
        found = run_batch(model, ids, mask, states, keep=keep)
        for state in found.states:
            for tensor in (state.conv, *state.ssm):  # none keeps what is larger in memory
                assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return found

    monkeypatch.setattr(asking, "run_pieces", pieces_counted)
    monkeypatch.setattr(running, "run_batch", states_counted)
    found = Evaluator(model, words=words, scoring=scoring).scores(TEXTS)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    assert max(held) <= most and len(held) > 1 and sum(held) > 3


def test_a_text_that_ends_in_what_a_label_says(tokens_run):
    model = language_model("mamba2")
    start = " ".join(FILLING[:9])
    texts = [start, f"{start} not", f"{start} not bad"]
    evaluator = Evaluator(model, words=["not bad", "bad"])
    evaluator.scores(["w80"])
    tokens_run.clear()
    found = evaluator.scores(texts)
    assert sum(tokens_run) == 9 + 4  # … not, … not bad, … not not, … not bad not
    for text, scores in zip(texts, found):
        np.testing.assert_allclose(Evaluator(model, words=["not bad", "bad"]).scores([text])[0], scores, rtol=1e-5)


def test_what_a_text_ends_with_decides_a_words_tokens():
    sizes = dict(hidden_size=16, state_size=4, num_heads=4, head_dim=8, n_groups=1, num_hidden_layers=2)
    torch.manual_seed(0)
    model = Model(loud(Mamba2ForCausalLM(Mamba2Config(vocab_size=256, **sizes))), byte_tokenizer(), "bytes")
    texts = ["ab:", "ab: ", "ab:\n", "ab: \n", "b"]
    labels = [[list((joint + word).encode()) for word in ("yes", "no")] for joint in (" ", "", "", "", " ")]
    found = Evaluator(model, words=["yes", "no"]).scores(texts)
    for text, ids, scores in zip(texts, labels, found):
        slow = slow_likelihoods(lambda row: model.logits(model.encode(ids=row))[0], [list(text.encode())], ids)
        np.testing.assert_allclose(scores, slow[0], rtol=1e-5)


def test_a_word_that_merges_with_the_end_of_one_text_only():
    merging = Tokenizer(BPE({"x": 0, "y": 1, " ": 2, "g": 3, "x ": 4}, [("x", " ")]))  # no pre-tokenizer keeps it apart
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merging)
    evaluator = Evaluator(Model(language_model("mamba2").module, tokenizer, "merging"), words=["g"])
    assert evaluator.scores(["y", "x y"]).shape == (2, 1)
    refuses(
        "the label word 'g' merges with the text before it, 'y x': end the text without", evaluator.scores, ["y", "y x"]
    )


class TestGenerated:
    @pytest.mark.parametrize(
        "name, fork", [("mamba", True), ("mamba2", True), ("rwkv", True), ("gfssm", True), ("mamba2", False)]
    )
    def test_answers_are_those_of_a_slow_loop(self, name, fork, tokens_run):
        model = language_model(name)
        words = FILLING[::5]
        said = [slow_answer(model, row, 5) for row in token_rows(model, TEXTS)]
        expected = [first_of(words, tokens) for tokens in said]
        assert len({tuple(tokens) for tokens in said}) > 5 and -1 in expected and len(set(expected)) > 3
        evaluator = Evaluator(model, words=words, scoring="generated", new_tokens=5, fork=fork, tokens_at_once=150)
        scores = evaluator.scores(TEXTS)
        assert evaluator.forks == fork
        assert sum(tokens_run) < 1.4 * sum(len(text.split()) for text in TEXTS) if fork else sum(tokens_run) > 2000
        assert evaluator.answers(scores).tolist() == expected
        assert (scores.sum(1) == (np.array(expected) >= 0)).all() and set(scores.flat) == {0.0, 1.0}

    def test_fewer_tokens_say_less(self):
        model = language_model("mamba2")
        said = {
            number: Evaluator(model, words=FILLING[::9], scoring="generated", new_tokens=number).scores(TEXTS)
            for number in (1, 4)
        }
        assert said[1].sum() < said[4].sum() and (said[4][said[1].any(1)] == said[1][said[1].any(1)]).all()


def slow_answer(model: Model, row: list[int], new_tokens: int) -> list[str]:
    """Tokens up to the end token of the model's generation settings."""
    said: list[int] = []
    while len(said) < new_tokens and model.module.generation_config.eos_token_id not in said:
        said.append(int(model.logits(model.encode(ids=[*row, *said]))[0, -1].argmax()))
    return model.tokenizer.convert_ids_to_tokens(said)


def first_of(words, tokens) -> int:
    return next((words.index(token) for token in tokens if token in words), -1)


class GateAndTaps(nn.Module):
    """Mamba mixer with self-attention next to it."""

    def __init__(self, mixer: MambaMixer, width: int) -> None:
        super().__init__()
        self.mixer, self.attention = mixer, nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, hidden, *args, **kwargs):
        future = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).triu(1)
        attended, _ = self.attention(hidden, hidden, hidden, attn_mask=future, need_weights=False)
        return self.mixer(hidden, *args, **kwargs) + attended


@pytest.fixture
def hybrid() -> Model:
    torch.manual_seed(0)
    sizes = dict(vocab_size=97, hidden_size=24, state_size=5, num_hidden_layers=2, time_step_rank=3)
    module = MambaForCausalLM(MambaConfig(**sizes))
    module.backbone.layers[1].mixer = GateAndTaps(module.backbone.layers[1].mixer, 24)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
    return Model(module, symbol_tokenizer([*FILLING, *LABELS]), "hybrid")


class TestHybrids:
    @pytest.mark.parametrize("words", [WORDS, PHRASES], ids=["one token", "several tokens"])
    def test_are_run_as_a_whole(self, hybrid, words):
        evaluator = Evaluator(hybrid, words=words)
        assert evaluator.forks
        found = evaluator.scores(TEXTS)
        assert not evaluator.forks
        with torch.no_grad():
            slow = slow_likelihoods(
                lambda row: hybrid.module(torch.tensor([row])).logits[0],
                token_rows(hybrid, TEXTS[:12]),
                labels_of(hybrid, words),
            )
        np.testing.assert_allclose(found[:12], slow, rtol=1e-4, atol=1e-4)

    def test_say_what_they_say(self, hybrid):
        words = FILLING[::2]
        expected = [first_of(words, slow_answer(hybrid, row, 3)) for row in token_rows(hybrid, TEXTS[:12])]
        evaluator = Evaluator(hybrid, words=words, scoring="generated", new_tokens=3)
        assert evaluator.answers(evaluator.scores(TEXTS[:12])).tolist() == expected and not evaluator.forks

    def test_are_told_from_others_by_short_texts_too(self, hybrid):
        for text in ("w1", "w1 w2 w3", CONTENTS[3]):
            evaluator = Evaluator(hybrid, words=PHRASES)
            evaluator.scores([text])
            assert not evaluator.forks


class TestClassifiers:
    def test_scores_are_the_logits(self):
        model = ssmscope.load("demo/sst2-mamba2")
        texts = [
            "a gripping film .",
            "a dull film .",
            "a gripping film , and a dull one , and a dull one , and so on .",
        ]
        evaluator = Evaluator(model)
        found = evaluator.grid([Template("the critic wrote that it was {content}"), Template("{content}")], texts)
        expected = [
            [model.trace(f"{start}{text}").logits[0] for text in texts]
            for start in ("the critic wrote that it was ", "")
        ]
        np.testing.assert_allclose(found, torch.stack([torch.stack(row) for row in expected]), rtol=1e-4, atol=1e-5)
        assert (evaluator.answers(found) == found.argmax(-1)).all() and evaluator.answers(found).shape == (2, 3)

    @pytest.mark.parametrize("name", ["selective-ssm", "selective-ssm-classes"])
    def test_of_token_ids(self, name):
        model = language_model(name)
        texts = [text for text in TEXTS if text]
        forked = Evaluator(model, tokens_at_once=100)
        expected = Evaluator(model, fork=False).scores(texts)
        np.testing.assert_allclose(forked.scores(texts), expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())
        assert forked.forks


class TestRefused:
    @pytest.mark.parametrize("options, words", [
        ({}, "mamba2 is a language model: give the word that it says for each class"),
        (dict(words=WORDS, scoring="likelyhood"), r"unknown scoring 'likelyhood'.*did you mean 'likelihood'\?"),
        (dict(words=WORDS, new_tokens=0), "new_tokens is 0; allowed is a whole number from 1 on"),
        (dict(words=WORDS, tokens_at_once=0), "tokens_at_once is 0"),
        (dict(words=[]), "give a list with one word for each class"),
        (dict(words=WORDS, scoring="generated", normalise=True), "normalise applies only to likelihoods"),
        (dict(words=["Good", "good"], scoring="generated"), "two classes have the label word 'good'"),
    ])  # fmt: skip
    def test_options_of_a_language_model(self, options, words):
        refuses(words, Evaluator, language_model("mamba2"), **options)

    @pytest.mark.parametrize("options, words", [
        (dict(words=WORDS), "label words is for language models"),
        (dict(scoring="generated"), "the scoring 'generated' is for language models"),
        (dict(normalise=True), "normalise applies only to likelihoods"),
    ])  # fmt: skip
    def test_options_of_a_classifier(self, options, words):
        refuses(words, Evaluator, language_model("selective-ssm"), **options)

    def test_models_that_read_no_texts(self):
        refuses("reads pixels; give a model of texts", Evaluator, ssmscope.load("demo/cifar10-mamba2"))
        refuses("has no tokenizer", Evaluator, Model(language_model("mamba2").module), words=WORDS)

    def test_texts(self):
        evaluator = Evaluator(language_model("mamba2"), words=WORDS)
        refuses(r"text 1 \(' '\) has no token", evaluator.scores, ["w1", " "])
        refuses("one text was given; give a list of texts", evaluator.scores, "w1")
        refuses("token ids were given; give a list of texts", evaluator.scores, np.array([[1, 2]]))
        assert evaluator.run == 0
        assert (evaluator.scores(np.array(["w1 w2", "w3"])) == evaluator.scores(("w1 w2", "w3"))).all()

    def test_a_damaged_model(self):
        model = language_model("mamba2")
        with torch.no_grad():
            model.mixers[0].D.fill_(torch.nan)
        for fork in (True, False):
            with pytest.raises(InputError, match="mamba2 is damaged: .* of the .* numbers of .* are not finite"):
                Evaluator(model, words=WORDS, fork=fork).scores(["w1 w2", "w3"])
