"""Answers by layer: numbers compared with tuned-lens's own, the layers at which answers settle, and the views."""

import dataclasses
import math
import re

import numpy as np
import pytest
import torch
from drawn import labels, panels_of
from examples import TEXTS
from loud import loud
from refusals import refuses
from transformers import Mamba2Config, Mamba2ForCausalLM

pytest.importorskip("tuned_lens")

import ssmscope.probes.lens.lenses as lenses  # noqa: E402
from ssmscope.core.model import Model  # noqa: E402
from ssmscope.errors import InputError  # noqa: E402
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification  # noqa: E402
from ssmscope.probes.lens import trajectory  # noqa: E402
from ssmscope.probes.lens.lenses import chosen_states, logit_lens  # noqa: E402
from ssmscope.probes.lens.result import (  # noqa: E402
    STATISTICS,
    LensedText,  # noqa: E402
)
from ssmscope.zoo.documents import word_tokenizer  # noqa: E402

WORDS = "the cat sat on a mat and saw two dogs run by old red barn while rain fell".split()
LINES = ["the cat sat on a mat and saw two dogs", "rain fell", "two dogs run by the old red barn while rain fell"]


def backbone(vocabulary: int, layers: int) -> Mamba2Config:
    return Mamba2Config(
        vocab_size=vocabulary, hidden_size=16, num_hidden_layers=layers, state_size=4, num_heads=2, head_dim=16,
        expand=2, n_groups=1, chunk_size=8, use_cache=False,
    )  # fmt: skip


def language(layers: int = 3) -> Model:
    tokenizer = word_tokenizer([" ".join(WORDS)])
    torch.manual_seed(0)
    module = loud(Mamba2ForCausalLM(backbone(len(tokenizer), layers)))
    with torch.no_grad():
        module.lm_head.weight.mul_(4)
    return Model(module, tokenizer, name="speaker")


def classifier() -> Model:
    tokenizer = word_tokenizer([" ".join(WORDS)])
    torch.manual_seed(0)
    labels = {0: "calm", 1: "wild", 2: "odd"}
    config = SSMClassifierConfig(backbone(len(tokenizer), 2), num_labels=3, id2label=labels)
    return Model(loud(SSMForSequenceClassification(config)), tokenizer, name="judge")


def tuned(model: Model):
    """The logit lens with random translators in it."""
    lens = logit_lens(model)
    generator = torch.Generator().manual_seed(0)
    for translator in lens.tuned:
        translator.weight.copy_(0.2 * torch.randn(translator.weight.shape, generator=generator))
        translator.bias.copy_(torch.randn(translator.bias.shape, generator=generator))
    return dataclasses.replace(lens, name="runs/lens")


model = pytest.fixture(scope="module")(lambda: language())
result = pytest.fixture(scope="module")(lambda model: trajectory(model, LINES, lens=tuned(model)))


def theirs_of(model: Model, line: str):
    """The package's own trajectory, of every position but the last, whose next token is unknown."""
    from tuned_lens.plotting import PredictionTrajectory

    batch = model.encode(line)
    ids, logs = batch.input_ids[0].numpy(), tuned(model).log_probs(chosen_states(model, batch, "every")[:, :-1])
    return PredictionTrajectory(logs.numpy(), ids[:-1], targets=ids[1:], tokenizer=model.tokenizer)


class TestNumbers:
    def test_are_those_of_tuned_lens(self, model, result):
        pytest.importorskip("plotly")
        for line, text in zip(LINES, result.texts):
            theirs = theirs_of(model, line)
            for name, found in (
                ("entropy", theirs.entropy()),
                ("cross_entropy", theirs.cross_entropy()),
                ("kl", theirs.forward_kl()),
                ("top_probability", theirs.max_probability()),
            ):
                ours = getattr(text, name)[:, :-1]
                assert ours.shape == (4, len(text) - 1)
                assert ours == pytest.approx(found.stats, rel=1e-4, abs=1e-5), name
            assert (text.top[:, :-1] == theirs.log_probs.argmax(-1)).all()

    def test_the_last_row_is_the_model(self, model, result):
        for line, text in zip(LINES, result.texts):
            own = model.logits(model.encode(line))[0].log_softmax(-1)
            assert text.final == tuple(model.tokenizer.decode([i]) for i in own.argmax(-1).tolist())
            assert text.top_probability[-1] == pytest.approx(own.exp().max(-1).values.numpy(), rel=1e-4)
            assert text.answer_probability[-1] == pytest.approx(text.top_probability[-1])
            assert text.entropy[-1] == pytest.approx(-(own.exp() * own).sum(-1).numpy(), rel=1e-4)
            assert np.abs(text.kl[-1]).max() < 1e-6 and (text.kl[:-1] > 1e-4).all()
            assert text.agrees[-1].all() and not text.agrees[0].all()

    def test_of_the_final_answer(self, model, result):
        lens, text = tuned(model), result.texts[0]
        states = lenses.hidden_states(model, model.encode(LINES[0]))[:, 0]
        answer = model.logits(model.encode(LINES[0]))[0].argmax(-1)
        for layer in range(3):
            q = lens.tuned(states[layer], layer).softmax(-1)
            expected = q.gather(-1, answer.unsqueeze(-1)).squeeze(-1)
            assert text.answer_probability[layer] == pytest.approx(expected.numpy(), rel=1e-4)
            assert (text.agrees[layer] == (q.argmax(-1) == answer).numpy()).all()
            assert text.answers[layer] == tuple(model.tokenizer.decode([i]) for i in q.argmax(-1).tolist())

    def test_texts_together_are_texts_alone(self, model, result, monkeypatch):
        monkeypatch.setitem(lenses.MAX_LOGITS, "cpu", 1)
        for line, text in zip(LINES, result.texts):
            (alone,) = trajectory(model, line, lens=tuned(model)).texts
            assert alone.tokens == text.tokens == tuple(line.split()) and alone.answers == text.answers
            assert alone.positions.tolist() == list(range(len(text)))
            for name in STATISTICS:
                assert getattr(alone, name) == pytest.approx(getattr(text, name), rel=1e-4, abs=1e-5, nan_ok=True)

    def test_at_the_last_position(self, model, result):
        last = trajectory(model, LINES, lens=tuned(model), positions="last")
        for text, whole in zip(last.texts, result.texts):
            assert text.positions.tolist() == [len(whole) - 1] and text.top.shape == (4, 1)
            assert text.kl[:, 0] == pytest.approx(whole.kl[:, -1], rel=1e-4, abs=1e-5)
            assert text.answers == tuple((row[-1],) for row in whole.answers)
            assert np.isnan(text.cross_entropy).all()

    def test_of_a_classifier(self):
        judge = classifier()
        found = trajectory(judge, LINES)
        assert found.positions == "last" and found.classes and found.lens == "logit lens"
        own = judge.logits(judge.encode(LINES)).softmax(-1)
        for row, text in enumerate(found.texts):
            assert text.final == (judge.labels[own[row].argmax()],)
            assert text.answer_probability[-1, 0] == pytest.approx(own[row].max().item(), rel=1e-5)
        every = trajectory(judge, LINES, positions="every")
        for text, whole in zip(found.texts, every.texts):
            assert whole.entropy.shape == (3, len(whole))
            assert whole.entropy[:, -1] == pytest.approx(text.entropy[:, 0], rel=1e-4)
            assert np.isnan(whole.cross_entropy).all()
        assert "cross_entropy" not in every.to_frame()

    def test_of_ids_without_a_tokenizer(self, model):
        bare = dataclasses.replace(model, tokenizer=None)
        (text,) = trajectory(bare, bare.encode(ids=TEXTS[1])).texts
        assert text.tokens == ("7", "8", "9") and text.final[0] == str(text.top[-1, 0])
        batch = model.encode(LINES[1])
        assert trajectory(model, batch).texts[0].answers == trajectory(model, LINES[1]).texts[0].answers

    def test_the_first_token_of_the_vocabulary_may_follow(self, model):
        ids = [[3, 0, 5, 0], [1, 0]]
        found = trajectory(model, model.encode(ids=ids), lens=tuned(model))
        for row, text in zip(ids, found.texts):
            logs = tuned(model).log_probs(chosen_states(model, model.encode(ids=row), "every"))
            expected = [-logs[:, at, token] for at, token in enumerate(row[1:])]
            np.testing.assert_allclose(text.cross_entropy[:, :-1], torch.stack(expected, 1), rtol=1e-4)
            assert np.isnan(text.cross_entropy[:, -1]).all()

    @pytest.mark.parametrize("name", [name for name in STATISTICS if name != "cross_entropy"])
    def test_one_number_that_is_not_finite(self, model, monkeypatch, name):
        own = lenses._statistics

        def statistics(*given):
            found = own(*given)
            found[name][1, 0] = math.inf
            return found

        monkeypatch.setattr(lenses, "_statistics", statistics)
        refuses("answers that are not finite", trajectory, model, LINES[1])

    def test_settled(self):
        top = np.array([[5, 5, 1, 2, 5], [5, 1, 1, 5, 1], [5, 5, 1, 5, 1], [5, 5, 5, 5, 5]])
        flat = np.zeros(top.shape)
        text = LensedText(
            ("a",) * 5, (0, 1, 2, 3, 4), np.arange(5), flat, flat, flat, flat, flat, top,
            tuple(tuple(map(str, row)) for row in top.tolist()),
        )  # fmt: skip
        assert text.settled.tolist() == [0, 2, 3, 1, 3]

    def test_where_the_lens_was_fitted(self, model):
        lens = dataclasses.replace(tuned(model), positions="last")
        assert trajectory(model, LINES[0], lens=lens).positions == "last"
        assert trajectory(model, LINES[0], lens=lens, positions="every").positions == "every"

    @pytest.mark.parametrize(("options", "says"), [
        (dict(statistic="entrpy"), "unknown statistic 'entrpy'; allowed are .* did you mean 'entropy'?"),
        (dict(positions="first"), "unknown positions 'first'; allowed are every, last"),
        (dict(lens="nowhere"), "nowhere has no lens"),
    ])  # fmt: skip
    def test_what_is_refused(self, model, options, says):
        refuses(says, trajectory, model, LINES, **options)

    def test_other_refusals(self, model):
        with pytest.raises(InputError, match="judge is a classifier: there is no next token"):
            trajectory(classifier(), LINES, statistic="cross_entropy")
        with pytest.raises(InputError, match="the tuned lens runs/lens belongs to another model than speaker"):
            trajectory(language(layers=2), LINES, lens=tuned(model))
        damaged = language()
        lens = tuned(damaged)
        lens.tuned.layer_translators[1].bias[0] = torch.nan
        refuses("answers that are not finite", trajectory, damaged, LINES, lens=lens)


class TestViews:
    def test_figure_of_many_tokens_and_layers(self):
        deep = trajectory(language(layers=30), " ".join(WORDS * 2))
        for start, first, last in ((0, "tokens 0 to 23 of 36", "the"), (24, "tokens 24 to 35 of 36", "barn")):
            figure = deep.figure(start=start)
            written = labels(figure)
            (note,) = [text for text in written if "figure(start=…)" in text]
            assert first in note and "25 of 31 layers" in note and last in written
            (sheet,) = panels_of(figure)
            assert sheet.images[0].get_array().shape == (25, 24 if start == 0 else 12)
        refuses("there is no token 36 to start the figure at; allowed are 0 to 35", deep.figure, start=36)
        refuses("unknown statistic 'kll'", deep.figure, statistic="kll")

    def test_figure_of_last_positions(self):
        found = trajectory(classifier(), LINES)
        written = labels(found.figure())
        assert [text[-6:] for text in written if re.search(r" text \d$", text)] == ["text 0", "text 1", "text 2"]
        assert all(written.count(text.final[0]) for text in found.texts)
        refuses("there is no text 3 to start", found.figure, start=3)
        with pytest.raises(InputError, match="unknown statistic 'cross_entropy'; allowed are answer_probability"):
            found.figure(statistic="cross_entropy")
