"""Losses, scores, batches, each against what it should be by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from ssmscope.core.bootstrap import wilson_interval
from ssmscope.data.babi import QuestionData, QuestionTokens, question_tokens, questions
from ssmscope.data.tokens import IGNORED, TokenData
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification
from ssmscope.zoo.baleen import BaleenMamba2Config, BaleenMamba2ForCausalLM, information_loss
from ssmscope.zoo.documents import word_tokenizer
from ssmscope.zoo.mad import compression
from ssmscope.zoo.sequences import majority
from ssmscope.zoo.training import objectives
from ssmscope.zoo.training.card import bootstrap_interval, score_record

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {
    "kind": "tokens", "seed": 0, "batch_size": 4, "precision": "fp32", "embedding_dropout": 0.0, "label_smoothing": 0.0,
    "spread_penalty": 0.0, "learning_rate": 1e-3, "weight_decay": 0.1,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "hidden_size": 8, "state_size": 4, "num_hidden_layers": 2, "head_dim": 4, "num_heads": 4, "n_groups": 1,
}  # fmt: skip
TOKENS: dict[str, Any] = {
    "vocab_size": 5, "expand": 2, "chunk_size": 4, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def language_model(**options) -> BaleenMamba2ForCausalLM:
    torch.manual_seed(0)
    return BaleenMamba2ForCausalLM(BaleenMamba2Config(**SIZES, **TOKENS, tie_word_embeddings=False, **options))


def classifier(**options) -> SSMForSequenceClassification:
    torch.manual_seed(0)
    backbone = BaleenMamba2Config(**SIZES, **TOKENS, **options)
    return SSMForSequenceClassification(SSMClassifierConfig(backbone, num_labels=2))


def token_data(rows: int = 12, length: int = 6) -> TokenData:
    draw = np.random.default_rng(0)
    ids, targets = draw.integers(0, 5, (2, rows, length))
    targets = np.where(draw.random((rows, length)) < 0.5, targets, IGNORED)
    return TokenData("drawn", "train", ids, targets, tuple("abcde"))


def parts(train) -> dict:
    return {"train": train, "validation": None, "test": None}


def divergence_of(module) -> Tensor:
    found = information_loss(module)
    assert found is not None
    return found


class TestQuestions:
    """The loss on the answer alone, with a weight also on the prompt, over rows of different lengths."""

    @staticmethod
    def data() -> QuestionTokens:
        tokenizer = word_tokenizer([text for task in ("qa1", "qa4") for text in told(task).texts])
        return QuestionTokens.joined([question_tokens(told(task), tokenizer) for task in ("qa1", "qa4")], "mixed")

    def module(self, data: QuestionTokens) -> BaleenMamba2ForCausalLM:
        torch.manual_seed(0)
        sizes = {**TOKENS, "vocab_size": len(data.tokens)}
        return BaleenMamba2ForCausalLM(BaleenMamba2Config(**SIZES, **sizes, gate="bernoulli", beta=0.0))

    @pytest.mark.parametrize("weight", [0.0, 0.3])
    def test_loss_row_by_row(self, weight) -> None:
        data = self.data()
        module, rows = self.module(data).eval(), [0, 3, 9]
        found = objectives.Questions(parts(data), {**OPTIONS, "prompt_weight": weight}, CPU).loss(module, rows)
        answers, prompts = [], []
        for row in rows:
            ids = torch.from_numpy(data.ids[row, : data.lengths[row]])
            named = -module(input_ids=ids[None]).logits[0].log_softmax(-1)
            answers.append(named[-1, data.targets[row, data.lengths[row] - 1]])
            prompts += [named[at, ids[at + 1]] for at in range(len(ids) - 1)]
        expected = torch.stack(answers).mean() + weight * torch.stack(prompts).mean()
        torch.testing.assert_close(found, expected)

    def test_scores_are_by_task(self) -> None:
        data = self.data()
        module = self.module(data)
        objective = objectives.Questions(parts(data), {**OPTIONS, "prompt_weight": 0.0}, CPU)
        score = objective.score(module, "train")
        assert list(score.groups) == ["qa1", "qa4"] and (score.asked == 1).all()
        for row, (ids, length) in enumerate(zip(data.ids, data.lengths)):
            with torch.no_grad():
                named = -module(input_ids=torch.from_numpy(ids[None, :length])).logits[0, -1].log_softmax(-1)
            answer = int(data.targets[row, length - 1])
            assert score.loss[row] == pytest.approx(float(named[answer]), rel=1e-5)
            assert score.right[row] == (named.argmin() == answer)
        for place, group in enumerate(score.groups.values()):
            assert np.array_equal(group.loss, score.loss[data.tasks == place])

    def test_batches_hold_every_row_once_and_alike_lengths(self) -> None:
        data = self.data()
        batches = objectives.Questions(parts(data), OPTIONS, CPU).batches(0)
        assert sorted(row for rows in batches for row in rows) == list(range(len(data)))
        within = np.mean([np.ptp(data.lengths[rows]) for rows in batches])
        assert within < np.ptp(data.lengths)


def told(task: str) -> QuestionData:
    return questions(task, length={"qa1": 12, "qa4": 60}[task], examples=8)


class TestInformation:
    """A Baleen is trained on cross-entropy + β · KL (Baleen, Eq. 5), whatever reads its last layer."""

    @pytest.mark.parametrize("gate", ["bernoulli", "exponential"])
    def test_of_a_language_model(self, gate) -> None:
        module, data = language_model(gate=gate, beta=0.7), token_data()
        module.train()
        torch.manual_seed(1)
        loss = objectives.NextTokens(parts(data), OPTIONS, CPU).loss(module, [2, 5, 7])
        torch.manual_seed(1)
        logits = module(input_ids=torch.from_numpy(data.ids[[2, 5, 7]])).logits
        divergence = divergence_of(module)
        targets = torch.from_numpy(data.targets[[2, 5, 7]])
        asked = targets != IGNORED
        named = -logits.log_softmax(-1)[asked].gather(1, targets[asked].unsqueeze(1)).mean()
        assert divergence > 1e-3
        torch.testing.assert_close(loss, named + 0.7 * divergence)

    @pytest.mark.parametrize("gate", ["bernoulli", "exponential"])
    def test_of_a_classifier(self, gate) -> None:
        module, (data, _) = classifier(gate=gate, beta=0.7), majority(9, examples=12)
        module.train()
        torch.manual_seed(1)
        loss = objectives.Sequences(parts(data), OPTIONS, CPU).loss(module, [1, 3, 8, 9])
        torch.manual_seed(1)
        logits = module(input_ids=torch.from_numpy(data.ids[[1, 3, 8, 9]])).logits
        divergence = divergence_of(module)
        assert divergence > 1e-3
        expected = cross_entropy(logits, torch.from_numpy(data.labels[[1, 3, 8, 9]])) + 0.7 * divergence
        torch.testing.assert_close(loss, expected)

    def test_of_the_compressing_model(self) -> None:
        module = language_model(gate="bernoulli", beta=0.7).train()
        data, _ = compression(length=5, vocabulary=5, train_examples=8, test_examples=1)
        objective = objectives.Reconstruction(parts(data), OPTIONS, CPU, width=module.config.hidden_size)
        torch.manual_seed(1)
        loss = objective.loss(module, [0, 1])
        torch.manual_seed(1)
        assert objective.extra is not None
        hidden = module.backbone(input_ids=torch.from_numpy(data.ids[:2])).last_hidden_state
        logits = objective.extra(hidden[:, -1])[:, :-1].flatten(0, 1)
        expected = cross_entropy(logits, torch.from_numpy(data.targets[:2, :-1]).flatten())
        torch.testing.assert_close(loss, expected + 0.7 * divergence_of(module))

    def test_is_none_without_random_gates(self) -> None:
        loss = torch.tensor(2.0)
        assert objectives.regularized(torch.nn.Linear(2, 2), loss) is loss


class TestSpread:
    def test_of_several_answers_is_the_mean_over_them(self) -> None:
        probability = torch.tensor([0.2, 0.4, 0.9])
        found = objectives.spread(torch.stack([1 - probability, probability], 1).log())
        assert found.item() == pytest.approx(math.sqrt((0.3**2 + 0.1**2 + 0.4**2) / 2))
        probabilities = torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1]])
        deviations = [0.4 / math.sqrt(2), 0.0, 0.4 / math.sqrt(2)]
        assert objectives.spread(probabilities.log()).item() == pytest.approx(sum(deviations) / 3, abs=1e-6)

    @pytest.mark.parametrize("classes", [2, 10])
    def test_has_a_gradient_where_every_answer_is_the_same(self, classes) -> None:
        logits = torch.full((6, classes), -1e4)
        logits[:, 1] = 1e4
        logits.requires_grad_()
        found = objectives.spread(logits)
        (gradient,) = torch.autograd.grad(found, logits)
        assert found.item() < 1e-5 and gradient.isfinite().all()

    def test_of_one_example_asks_for_nothing(self) -> None:
        logits = torch.tensor([[0.0, 3.0]], requires_grad=True)
        assert objectives.spread(logits).item() == pytest.approx(objectives.MIN_SPREAD)

    @pytest.mark.parametrize("scale", [0.01, 1.0])
    def test_penalty_acts_below_a_tenth(self, scale) -> None:
        data, _ = majority(5, examples=4)
        objective = objectives.Sequences(parts(data), {**OPTIONS, "spread_penalty": 10.0}, CPU)
        logits = torch.tensor([[0.0, 3.0], [1.0, -1.0], [0.5, 0.0]]) * scale
        labels = torch.tensor([1, 0, 1])
        below = max(0.0, 0.1 - logits.softmax(-1)[:, 1].std().item())
        assert (below > 0) == (scale == 0.01)
        expected = cross_entropy(logits, labels).item() + 10 * below
        assert objective.classified(torch.nn.Identity(), logits, labels).item() == pytest.approx(expected, rel=1e-5)


class TestScore:
    def test_counts_what_is_asked(self) -> None:
        module, data = language_model(gate="bernoulli"), token_data(rows=7)
        data.targets[3] = IGNORED
        objective = objectives.NextTokens(parts(data), OPTIONS, CPU)
        score = objective.score(module, "train")
        with torch.no_grad():
            logits = module.eval()(input_ids=torch.from_numpy(data.ids)).logits.log_softmax(-1)
        for row in range(7):
            places = [t for t in range(6) if data.targets[row, t] != IGNORED]
            assert score.asked[row] == len(places)
            assert score.right[row] == sum(logits[row, t].argmax().item() == data.targets[row, t] for t in places)
            assert score.loss[row] == pytest.approx(
                -sum(logits[row, t, data.targets[row, t]].item() for t in places), abs=1e-4
            )
        assert score.accuracy == score.right.sum() / (data.targets != IGNORED).sum()
        assert score.cross_entropy == pytest.approx(score.loss.sum() / score.asked.sum())

    def test_does_not_depend_on_how_many_rows_run_together(self, monkeypatch) -> None:
        module, data = language_model(gate="bernoulli"), token_data()
        objective = objectives.NextTokens(parts(data), OPTIONS, CPU)
        whole = objective.score(module, "train")
        monkeypatch.setattr("ssmscope.core.batching.TOKENS_AT_ONCE", 13)
        pieces = objective.score(module, "train")
        assert np.array_equal(whole.right, pieces.right) and np.allclose(whole.loss, pieces.loss, atol=1e-4)

    def test_of_one_answer_each_has_wilsons_interval(self) -> None:
        score = objectives.Score(np.array([1.0, 0, 1, 1]), np.ones(4), np.array([0.1, 2.0, 0.2, 0.3]))
        record = score_record(score)
        assert record["interval"] == list(wilson_interval(3, 4))
        assert (record["accuracy"], record["correct"], record["examples"]) == (0.75, 3, 4)
        assert record["cross_entropy"] == pytest.approx(0.65) and "asked" not in record

    @pytest.mark.parametrize("asked", [[2, 2, 2], [1, 1, 0]])
    def test_of_several_answers_has_a_bootstrap(self, asked) -> None:
        score = objectives.Score(np.array([1.0, 1, 0]), np.array(asked, float), np.array([1.0, 1.0, 0.0]))
        record = score_record(score, seed=4)
        assert record["asked"] == sum(asked)
        assert record["interval"] == list(bootstrap_interval(score.right, score.asked, seed=4))
        assert record["cross_entropy_interval"] == list(bootstrap_interval(score.loss, score.asked, seed=4))

    def test_the_bootstrap_divides_the_sums(self) -> None:
        """A ratio of twice as many right as asked for stays 2 in every resample, whatever the examples' sizes."""
        asked = np.arange(1.0, 30.0)
        assert bootstrap_interval(2 * asked, asked) == pytest.approx((2.0, 2.0))


class TestReconstruction:
    def test_reads_the_last_hidden_state_only(self) -> None:
        module = language_model(gate="bernoulli").eval()
        data, _ = compression(length=5, vocabulary=5, train_examples=6, test_examples=1)
        objective = objectives.Reconstruction(parts(data), OPTIONS, CPU, width=module.config.hidden_size)

        class Fixed(torch.nn.Module):
            def __init__(self, hidden):
                super().__init__()
                self.hidden = hidden

            @property
            def base_model(self):
                return lambda **_: type("Run", (), {"last_hidden_state": self.hidden})

        torch.manual_seed(0)
        hidden = torch.randn(2, 5, 8)
        logits, targets = objective.answers(Fixed(hidden), "train", [0, 1])
        assert logits.shape == (2, 5, 5) and torch.equal(targets, torch.from_numpy(data.targets[:2]))
        earlier = torch.cat([torch.randn(2, 4, 8), hidden[:, -1:]], 1)
        assert torch.equal(objective.answers(Fixed(earlier), "train", [0, 1])[0], logits)
        later = torch.cat([hidden[:, :-1], torch.randn(2, 1, 8)], 1)
        assert not torch.isclose(objective.answers(Fixed(later), "train", [0, 1])[0], logits).all(-1).any()
        assert not torch.allclose(logits[:, 0], logits[:, 1])  # the decoder knows where it is


class TestBatches:
    @pytest.fixture
    def objective(self) -> objectives.Arrays:
        return objectives.NextTokens(parts(token_data(rows=14)), OPTIONS, CPU)

    def test_are_of_one_size_and_leave_out_others_each_time(self, objective) -> None:
        seen = set()
        for epoch in range(20):
            batches = objective.batches(epoch)
            assert [len(rows) for rows in batches] == [4, 4, 4]
            chosen = [row for rows in batches for row in rows]
            assert len(set(chosen)) == 12
            seen |= set(chosen)
        assert seen == set(range(14))

    def test_are_decided_by_seed_and_epoch(self, objective) -> None:
        assert objective.batches(3) == objective.batches(3) and objective.batches(3) != objective.batches(4)
        other = objectives.NextTokens(objective.parts, {**OPTIONS, "seed": 1}, CPU)
        assert other.batches(3) != objective.batches(3)

    def test_of_fewer_examples_than_a_batch_is_all_of_them(self) -> None:
        few = objectives.NextTokens(parts(token_data(rows=3)), OPTIONS, CPU)
        (rows,) = few.batches(0)
        assert sorted(rows) == [0, 1, 2]
