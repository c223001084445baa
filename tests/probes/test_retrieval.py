"""Retrieval against one question at a time, on models that know their answers, and as its users meet it."""

import functools
import math

import numpy as np
import pytest
import torch
from differential import PAPER_PROMPT
from loud import loud
from refusals import refused
from torch import nn
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM
import ssmscope
import ssmscope.loading
from ssmscope.core.bootstrap import share
from ssmscope.core.model import Model
from ssmscope.data.babi import QuestionData, questions
from ssmscope.data.filler import generated
from ssmscope.data.stories import NAMES, STORIES
from ssmscope.errors import InputError
from ssmscope.probes.retrieval import retrieval
from ssmscope.probes.retrieval.measure import answers, notes_on, quotient, sign_test
from ssmscope.probes.retrieval.result import Ratio
from ssmscope.zoo.documents import byte_tokenizer, symbol_tokenizer, word_tokenizer

QUIET = {"progress": False}
FILLER = generated(np.random.default_rng(0), 40)


@functools.cache
def vocabulary(*more: str):
    texts = [
        text for task in (*STORIES, *more) for text in questions(task, length=60, examples=30, filler=FILLER).texts
    ]
    return word_tokenizer([*texts, *FILLER])


def speaker(kind: str = "mamba2", seed: int = 0, tokenizer=None) -> Model:
    """A random model in which the scan matters, and which likes to say the names of the world."""
    world = [name for names in NAMES.values() for name in names] if tokenizer is None else []
    tokenizer = tokenizer if tokenizer is not None else vocabulary()
    torch.manual_seed(seed)
    sizes = dict(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=2, expand=2, state_size=4)
    ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=1)
    if kind == "mamba":
        module = MambaForCausalLM(MambaConfig(**sizes, **ids))
    else:
        heads = dict(head_dim=8, num_heads=4, n_groups=1, chunk_size=8, time_step_limit=(0.0, 1e9))
        module = Mamba2ForCausalLM(Mamba2Config(**sizes, **ids, **heads))
    module = loud(module)
    with torch.no_grad():
        module.lm_head.weight *= 0.1
    return liking(Model(module, tokenizer, kind), world)


def liking(model: Model, words) -> Model:
    """The model, to which these words are now likelier than others, or more unlikely."""
    with torch.no_grad():
        model.module.lm_head.weight[model.tokenizer.convert_tokens_to_ids(list(words))] *= 5
    return model


class Answers(nn.Module):
    """A head that knows an answer by what the model has made of its prompt."""

    def __init__(self, seen: torch.Tensor, answers: torch.Tensor, vocabulary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seen)
        self.answers, self.vocabulary = answers, vocabulary

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        at = torch.cdist(hidden, self.weight).argmin(-1)
        return 20.0 * nn.functional.one_hot(self.answers[at], self.vocabulary).float()


def prompt_ids(model: Model, data: QuestionData) -> list[list[int]]:
    return [model.tokenizer(f"{one.context} {one.question}")["input_ids"] for one in data.examples]


def knowing(model: Model, every: list[QuestionData], wrong: int = 0) -> Model:
    """The model with a head that knows the answers, but those of the first `wrong` questions of each data set."""
    seen, answers = [], []
    for data in every:
        for number, (row, one) in enumerate(zip(prompt_ids(model, data), data.examples)):
            with torch.no_grad():
                seen.append(model.module.base_model(torch.tensor([row]), use_cache=False).last_hidden_state[0, -1])
            word = "." if number < wrong else one.answer
            answers.append(model.tokenizer.convert_tokens_to_ids(word))
    module = type(model.module)(model.config)
    module.load_state_dict(model.module.state_dict())
    module.lm_head = Answers(torch.stack(seen), torch.tensor(answers), model.vocabulary)
    return Model(module.eval(), model.tokenizer, "knowing")


def tokens_of(model: Model):
    return lambda text: len(model.tokenizer(text)["input_ids"])


class TestAgainstOneAtATime:
    @pytest.mark.parametrize("kind", ["mamba", "mamba2"])
    @pytest.mark.parametrize("task", ["qa1", "qa5"])
    def test_answers_and_their_probabilities(self, kind, task):
        data = questions(task, length=70, examples=48, filler=FILLER, split="test")
        model = liking(speaker(kind), data.candidates)
        among = model.tokenizer.convert_tokens_to_ids(list(data.candidates))
        rows = prompt_ids(model, data)
        alone = [model.logits(model.encode(ids=[row]))[0, -1].double() for row in rows]
        for piece in (16, 2048):
            found = answers(model, data, piece=piece)
            for at, (row, logits, one) in enumerate(zip(rows, alone, data.examples)):
                answer = model.tokenizer.convert_tokens_to_ids(one.answer)
                assert found.right[at] == (int(logits.argmax()) == answer)
                assert found.among[at] == (among[int(logits[among].argmax())] == answer)
                assert found.log_probability[at] == pytest.approx(float(logits.log_softmax(-1)[answer]), abs=2e-4)
                assert found.tokens[at] == len(row)
            assert 0 < found.right.mean() <= found.among.mean() < 1


class TestKnownAnswers:
    def known(self, model: Model, tasks=("qa1", "variables"), lengths=(0, 60)) -> list[QuestionData]:
        given = dict(examples=16, split="test", filler=FILLER, seed=3, count=tokens_of(model))
        return [questions(task, length=n, **given) for task in tasks for n in lengths]

    def test_a_model_that_knows_all_answers_has_accuracy_1(self):
        model = speaker(tokenizer=vocabulary("variables"))
        every = self.known(model)
        given = dict(tasks=["qa1", "variables"], lengths=[0, 60], examples=16, filler=FILLER, seed=3, piece=16, **QUIET)
        found = retrieval([knowing(model, every), knowing(model, every, wrong=4)], **given)
        assert found.right[0].all() and found.chance == (1 / 8, 1 / 8)
        assert found.models == ("knowing", "knowing (2)") and found.lengths == (0, 60)
        for row in range(2):
            for column in range(2):
                first, second = (found.cells[number][row][column] for number in (0, 1))
                assert first.accuracy.value == first.constrained.value == 1
                assert first.accuracy == share(16, 16) and second.accuracy == share(12, 16)
                # the likeliest token has a logit of 20 before all others
                assert first.log_probability.value == pytest.approx(-math.log1p((model.vocabulary - 1) / math.exp(20)))
                # all candidates have the same logit where the model says something else: the first one is taken
                assert second.constrained.value >= second.accuracy.value
                assert found.ratios[0][row][column].value.value == pytest.approx(16 / 12)
                assert found.ratios[0][row][column].p == 2 / 2**4
                data = every[2 * row + column]
                assert first.tokens == np.mean([len(each) for each in prompt_ids(model, data)])
        assert found.mean(1, 60) == 0.75
        assert "knowing 1.000 at 0 and 1.000 at 60; knowing (2) 0.750 at 0 and 0.750 at 60" in found.headline

    def test_contexts_are_as_long_as_the_first_tokenizer_says(self):
        """A byte tokenizer's contexts are far shorter than those of as many words; the second model reads the same."""
        words, letters = speaker(), speaker(tokenizer=byte_tokenizer())
        given = dict(tasks=["qa1"], lengths=[400], examples=4, filler=FILLER, **QUIET)
        by_words, by_bytes = retrieval([words, letters], **given), retrieval([letters, words], **given)
        longest = max(map(len, FILLER))
        assert 400 - 20 < by_words.cells[0][0][0].tokens < 400 + 20
        assert by_words.cells[1][0][0].tokens > 1500
        assert 400 - longest < by_bytes.cells[0][0][0].tokens < 400 + 40
        assert by_bytes.provenance["data"]["fingerprint"] != by_words.provenance["data"]["fingerprint"]

    def test_logits_that_are_not_finite_give_no_answer(self):
        """There is none even where the answer's own token is not finite, which numpy takes for the likeliest."""
        model = speaker()
        word = questions("qa1", length=0).candidates[3]
        with torch.no_grad():
            model.module.lm_head.weight[model.tokenizer.convert_tokens_to_ids(word)] = 3e38  # overflows
            model.module.backbone.norm_f.weight.fill_(1e3)
        found = retrieval(model, tasks=["qa1"], lengths=[0, 50], examples=8, filler=FILLER, **QUIET)
        assert not found.right.any() and found.cells[0][0][0].constrained.value == 0
        assert math.isnan(found.cells[0][0][0].log_probability.value)
        assert found.notes[0] == "logits of mamba2 are not finite from 0 tokens on; there it gives no answer"

    def test_unknown_filler_is_told(self):
        found = retrieval(
            speaker(), tasks=["qa1"], lengths=[0, 90], examples=4, filler=["Xyzzy plugh quux frob ."], **QUIET
        )
        assert "does not know" in found.notes[0] and found.notes[0].endswith("% of the prompts' tokens")
        assert not retrieval(speaker(), tasks=["qa1"], lengths=[0], examples=4, **QUIET).notes


class TestNumbers:
    @pytest.mark.parametrize("right, number", [(0, 100), (1, 7), (50, 100), (8, 10), (100, 100)])
    def test_wilsons_ends_are_where_the_test_just_accepts(self, right, number):
        """(p̂ − p)² = z² p (1 − p) / n at both ends."""
        found = share(right, number)
        assert found.value == right / number and 0 <= found.low <= found.value <= found.high <= 1
        for end in (found.low, found.high):
            if 0 < end < 1:
                assert (found.value - end) ** 2 == pytest.approx(1.959964**2 * end * (1 - end) / number, rel=1e-5)
        assert found.low < found.high

    def test_the_sign_test_against_all_outcomes(self):
        random = np.random.default_rng(0)
        for _ in range(20):
            first, second = random.random((2, 12)) < random.random((2, 1))
            differ = np.flatnonzero(first != second)
            seen = abs(int(first[differ].sum()) * 2 - len(differ))
            outcomes = [bin(k).count("1") for k in range(2 ** len(differ))]
            extreme = np.mean([abs(2 * k - len(differ)) >= seen for k in outcomes])
            assert sign_test(first, second) == pytest.approx(extreme)

    def test_ratios_where_one_is_never_right(self):
        above, below = np.array([3.0, 4, 2, 3]), np.array([2.0, 0, 1, 2])
        found = quotient(above, below)
        assert (found.value, found.low, found.high) == (1.5, 1.5, math.inf)
        nothing = quotient(np.array([3.0, 3]), np.array([0.0, 1]))
        assert math.isnan(nothing.value) and math.isnan(nothing.low) and not Ratio(nothing, 0.001).differs
        many = np.concatenate([[7.0], np.arange(1.0, 101)])
        some = quotient(many, np.where(many == 100, 0.0, 1.0))  # 1 to 99, and once infinite
        assert (some.value, some.low, some.high) == (7, 3, 98)
        # 0 / 0 says nothing
        assert quotient(np.array([2.0, 0, 4]), np.array([1.0, 0, 2])).high == 2

    def test_one_question_alone_shows_no_difference(self):
        """0 of 100 against 1 of 100: all resamples with a ratio agree on 0, the sign test does not."""
        first, second = np.zeros(100, dtype=bool), np.arange(100) == 7
        ratio = Ratio(quotient(np.zeros(3), np.array([1.0, 1, 2])), sign_test(first, second))
        assert (ratio.value.low, ratio.value.high, ratio.p) == (0, 0, 1) and not ratio.differs
        assert Ratio(ratio.value, 0.01).differs
        assert not Ratio(quotient(np.array([2.0, 1, 3]), np.array([2.0, 2, 2])), 0.01).differs


class TestOptions:
    def test_the_template_and_the_split_are_used(self):
        model = speaker()
        plain = questions("qa1", length=40, examples=4, filler=FILLER, split="validation", count=tokens_of(model))
        given = dict(tasks=["qa1"], lengths=[40], examples=4, filler=FILLER, split="validation", **QUIET)
        found = retrieval(model, **given, template=PAPER_PROMPT)
        expected = answers(model, plain, template=PAPER_PROMPT)
        assert found.log_probability[0, 0, 0] == pytest.approx(expected.log_probability, rel=1e-6)
        other = retrieval(model, **given)
        assert np.abs(other.log_probability - found.log_probability).max() > 0.01

    def test_the_longest_contexts_are_refused_first(self, monkeypatch):
        asked = []
        monkeypatch.setattr("ssmscope.data.babi.refuse_contexts", lambda *given: asked.append(given))
        retrieval(speaker(), tasks=["qa1"], lengths=[12, 0], examples=2, **QUIET)
        assert asked[0] == (12, 2)

    def test_the_seed_draws_the_questions(self):
        given = dict(tasks=["qa1"], lengths=[40], examples=8, **QUIET)
        first, again, other = (retrieval(speaker(), **given, seed=seed) for seed in (1, 1, 2))
        assert len(first.provenance["data"]["fingerprint"]) == 16
        assert retrieval(speaker(), tasks=["qa1"], lengths=[8, 0], examples=1, **QUIET).lengths == (0, 8)
        assert (first.log_probability == again.log_probability).all()
        assert not (first.log_probability == other.log_probability).all()

    @pytest.mark.parametrize("options, said", [
        (dict(tasks=["qa7"]), "unknown among tasks: 'qa7'; allowed are qa1, qa2, qa3, qa4, qa5, needle, "),
        (dict(lengths=[0, -1]), "lengths is -1; allowed are a whole number from 0 on, or several"),
        (dict(examples=0), "examples is 0; allowed is a whole number from 1 on"),
        (dict(piece=0), "piece is 0"),
        (dict(split="tests"), "unknown split 'tests'; allowed are test, validation, train; did you mean 'test'?"),
        (dict(filler="wikitext3"), "did you mean 'wikitext2'?"),
        (dict(template="{context}"), "must hold {context} and {question}"),
    ])  # fmt: skip
    def test_refuses(self, options, said):
        assert said in refused(retrieval, speaker(), **{**QUIET, "examples": 3, "lengths": [0], **options})

    def test_refuses_models_that_cannot_answer(self):
        model = speaker()
        for models, message in (
            ([], "no model was given"),
            (ssmscope.load("demo/sst2-mamba2"), "is a classifier; give a language model"),
            (Model(model.module, None, "mute"), "mute has no tokenizer"),
            (Model(model.module, word_tokenizer(["other words"]), "m"), "the tokenizer does not know"),
            (Model(model.module, symbol_tokenizer(["a", "b"]), "m"), "is not a symbol of this tokenizer"),
        ):
            assert message in refused(retrieval, models, lengths=[0], examples=2, **QUIET)
        texts = questions("qa1", length=0, examples=5).texts
        longer = word_tokenizer([" ".join(f"w{i}" for i in range(model.vocabulary))] * 500 + [*texts])
        with pytest.raises(InputError, match="outside the vocabulary"):
            retrieval(Model(model.module, longer, "m"), tasks="qa1", lengths=[0], examples=2, filler=FILLER, **QUIET)


def test_notes_are_shares_of_all_tokens():
    """In prompts of 100 and 200 tokens, 20 and 30 are unknown to A, and none to B."""
    tokens, unknown = np.array([[[100.0, 200]]] * 2), np.array([[[0.2, 0.15]], [[0.0, 0]]])
    known = np.zeros((2, 1, 2, 3))
    (note,) = notes_on(["A", "B"], [50, 100], tokens, unknown, known)
    assert note == "the tokenizer of A does not know 17 % of the prompts' tokens"
    known[1, 0, 1, 2] = np.nan
    notes = list(notes_on(["A", "B"], [50, 100], tokens, 0 * unknown, known))
    assert notes == ["logits of B are not finite from 100 tokens on; there it gives no answer"]
