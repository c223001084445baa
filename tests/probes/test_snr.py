"""Needle probabilities by layer: the prompts of any tokenizer, readings against slow ones and closed forms, intervals
and paired differences, and refusals."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from differential import PAPER_PROMPT
from loud import loud
from refusals import refuses
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

pytest.importorskip("tuned_lens")

from ssmscope.core.model import Model  # noqa: E402
from ssmscope.data.babi import PROMPT, Question, QuestionData, question_tokens, questions  # noqa: E402
from ssmscope.data.stories import PLACES  # noqa: E402
from ssmscope.errors import InputError  # noqa: E402
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification  # noqa: E402
from ssmscope.probes.lens.lenses import LOGIT, logit_lens  # noqa: E402
from ssmscope.probes.snr import needle_snr  # noqa: E402
from ssmscope.probes.snr.measure import METRICS, interpolation, measure  # noqa: E402
from ssmscope.probes.snr.reading import ALL, NO_TOKEN, Needles, lens_notes, prompts_of, unknown_notes  # noqa: E402  # noqa: E402
from ssmscope.render.table import Cell, with_interval  # noqa
from ssmscope.zoo.documents import byte_tokenizer, symbol_tokenizer, word_tokenizer  # noqa: E402
from ssmscope.zoo.tokenizers import train_tokenizer  # noqa: E402

TASKS = ("qa1", "qa2", "qa3", "qa4", "qa5")
QUESTIONS = {task: questions(task, length=40, examples=12, split="test") for task in TASKS}
TEXTS = [text for task in TASKS for text in questions(task, length=100, examples=60).texts]
WORDS, BYTES, PIECES = word_tokenizer(TEXTS), byte_tokenizer(), train_tokenizer(TEXTS, vocabulary=400)
QUICK = dict(lengths=40, examples=8)


def small(seed: int = 0, layers: int = 3, tokenizer=WORDS, name: str | None = None) -> Model:
    torch.manual_seed(seed)
    sizes = dict(hidden_size=16, num_hidden_layers=layers, state_size=4, num_heads=2, head_dim=16, expand=2, n_groups=1)
    config = Mamba2Config(vocab_size=len(tokenizer), **sizes, chunk_size=8, use_cache=False)
    return Model(loud(Mamba2ForCausalLM(config)), tokenizer, name or f"small{seed}")


def randomly_tuned(model: Model):
    lens = logit_lens(model)
    generator = torch.Generator().manual_seed(0)
    for translator in lens.tuned:
        translator.weight.copy_(0.2 * torch.randn(translator.weight.shape, generator=generator))
        translator.bias.copy_(torch.randn(translator.bias.shape, generator=generator))
    return dataclasses.replace(lens, name="random")


def own(*examples: tuple, name: str = "own") -> QuestionData:
    """Questions of (context, question, answer, distractors)."""
    made = [Question(context, asked, answer, (), tuple(others)) for context, asked, answer, others in examples]
    return QuestionData(name, "all", tuple(made), ("x",))


QUESTION = "Where is Alma ?"


def where(answer: str = "attic", distractors: tuple = ("cellar",)) -> tuple:
    context = "Alma went to the attic . Bruno went to the cellar . Clara went to the pantry ."
    return (context, QUESTION, answer, distractors)


model = pytest.fixture(scope="module")(lambda: small())
result = pytest.fixture(scope="module")(lambda: needle_snr([small(0), small(1)], lengths=[0, 40], examples=8))


class TestPrompts:
    @pytest.mark.parametrize(
        ("kind", "template"),
        [("words", PROMPT), ("bytes", PROMPT), ("bytes", PAPER_PROMPT), ("pieces", PROMPT), ("pieces", PAPER_PROMPT)],
    )
    def test_are_those_of_training_and_distractors_stand_in_the_answers_place(self, kind, template):
        tokenizer = {"words": WORDS, "bytes": BYTES, "pieces": PIECES}[kind]
        reads = small(tokenizer=tokenizer)
        for task in TASKS:
            data = QUESTIONS[task]
            found, trained = prompts_of(reads, data, template), question_tokens(data, tokenizer, template=template)
            for at, (row, example, prompt) in enumerate(zip(found.rows, data.examples, data.prompts(template))):
                length = int((trained.targets[at] != -100).argmax()) + 1
                assert list(row) == trained.ids[at, :length].tolist()
                assert found.needles[at] == trained.targets[at, length - 1]
                expected = []
                for word in example.distractors:
                    whole = tokenizer(f"{prompt} {word}", add_special_tokens=False)["input_ids"]
                    assert whole[:length] == list(row)
                    expected.append(whole[length])
                assert [token for token in found.distractors[at].tolist() if token != NO_TOKEN] == expected
                assert found.needles[at] not in expected

    def test_words_that_begin_alike_count_once(self, model):
        found = prompts_of(small(tokenizer=BYTES), own(where("attic", ("cellar", "corner", "pantry"))), PROMPT)
        first = [BYTES(word)["input_ids"][0] for word in ("cellar", "pantry")]
        assert found.distractors.tolist() == [first]

    def test_unknown_words_of_the_context_are_counted(self, model):
        data = own(("Zebra <unk> went to the attic quickly .", QUESTION, "attic", ("cellar",)))
        assert prompts_of(model, data, PROMPT).unknown == 2
        notes = needle_snr(model, questions=data).notes
        assert any(
            "17 % of the prompts' tokens are words that small0's tokenizer does not know" in one for one in notes
        )

    @pytest.mark.parametrize(("data", "says"), [
        (own(where("zebra")), "does not know 'zebra', a word of a fact, question, answer"),
        (own(where("attic", ("zebra",))), "does not know 'zebra'"),
        (own(("Alma is here .", "Where is Zoe ?", "attic", ())), "does not know 'Zoe'"),
        (own(where("attic", ("attic",))), "the answer 'attic' and its distractor 'attic' begin with the same token"),
    ])  # fmt: skip
    def test_what_is_refused(self, model, data, says):
        refuses(says, needle_snr, model, questions=data)

    def test_models_that_cannot_read_them(self, model):
        with pytest.raises(InputError, match="small0 has no tokenizer to read questions with; give one, load"):
            needle_snr(dataclasses.replace(model, tokenizer=None), **QUICK)
        backbone = Mamba2Config(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_heads=2, head_dim=8, n_groups=1)
        labels = SSMForSequenceClassification(SSMClassifierConfig(backbone, num_labels=2))
        with pytest.raises(InputError, match="is a classifier; a needle is a token that a language model predicts"):
            needle_snr(Model(labels, WORDS), **QUICK)
        refuses("is not a symbol of this tokenizer", needle_snr, small(tokenizer=symbol_tokenizer(["a", "b"])), **QUICK)
        with pytest.raises(InputError, match="'attic' and its distractor 'alcove' begin with the same token"):
            needle_snr(small(tokenizer=BYTES), questions=own(where("attic", ("alcove",))))


def fixed(weights: dict[str, float]) -> Model:
    """A model that answers every prompt that ends in "?" with probabilities in the ratio of the weights, 1 for all
    other tokens, in every layer: its blocks add nothing, and its head is made for that one embedding."""
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, state_size=4, use_cache=False)
    module = MambaForCausalLM(config)
    with torch.no_grad():
        for block in module.backbone.layers:
            block.mixer.out_proj.weight.zero_()
        mark = WORDS.convert_tokens_to_ids("?")
        module.lm_head.weight = torch.nn.Parameter(torch.zeros(len(WORDS), 16))
        normed = module.backbone.norm_f(module.backbone.embeddings.weight[mark])
        for word, weight in weights.items():
            module.lm_head.weight[WORDS.convert_tokens_to_ids(word)] = math.log(weight) * normed / normed.square().sum()
    return Model(module, WORDS, "fixed")


class TestReading:
    def test_of_probabilities_that_are_0(self):
        """Where float32 has no smaller number, log-probabilities still tell needle and distractor apart."""
        doubtful = fixed({"garage": 1e200, "attic": 10.0})
        last = needle_snr(doubtful, questions=own(where())).curve().layers[-1]
        assert last.needle.value < 1e-190 and last.log_ratio.value == pytest.approx(math.log(10), rel=1e-2)
        assert last.ratio.value == pytest.approx(10, rel=1e-1) and last.rank.value == 2


def needles(
    random: np.random.Generator, examples: int = 30, layers: int = 3, shift: np.ndarray | float = 0.0
) -> Needles:
    logs = -random.exponential(1.0, (examples, layers + 1)) + shift
    other = -random.exponential(2.0, (examples, layers + 1))
    share = np.exp(logs) / (np.exp(logs) + np.exp(other))
    ones = np.ones(examples, int)
    return Needles(logs, other, share, np.ceil(-logs), 10 * ones, 3 * ones)


class TestMeasures:
    def test_differences_are_paired(self):
        random = np.random.default_rng(2)
        read = needles(random, examples=200)
        near = dataclasses.replace(read, needle=read.needle - 0.1)
        far = needles(random, examples=200)
        _, pairs = measure(["a", "near", "far", "same"], [read, near, far, read], seed=0)
        found = dict(pairs)
        assert set(found) == {("a", x) for x in ("near", "far", "same")} | {
            ("near", "far"), ("near", "same"), ("far", "same"),
        }  # fmt: skip
        for one in found["a", "same"]["layers"]:
            assert dataclasses.astuple(one.needle) == dataclasses.astuple(one.log_ratio) == (0, 0, 0)
        for i, one in enumerate(found["a", "near"]["layers"]):
            q = np.exp(read.needle[:, i])
            assert one.needle.value == pytest.approx((1 - math.exp(-0.1)) * q.mean()) and one.needle.low > 0
            assert (one.log_ratio.low, one.log_ratio.high) == pytest.approx((0.1, 0.1))
            unpaired = found["a", "far"]["layers"][i].needle
            assert one.needle.high - one.needle.low < 0.2 * (unpaired.high - unpaired.low)
        below = np.exp(read.needle[:, :-1]).mean() - np.exp(far.needle[:, :-1]).mean()
        assert found["a", "far"]["average"].value == pytest.approx(below)

    def test_models_of_different_depth_meet_at_the_depths_of_the_shallower(self):
        assert (interpolation(4, 4) == np.eye(5)).all()
        for layers, onto in ((6, 4), (24, 7), (5, 1)):
            matrix, depth = interpolation(layers, onto), np.arange(layers + 1) / layers
            assert matrix.sum(1) == pytest.approx(1) and matrix @ depth == pytest.approx(np.arange(onto + 1) / onto)
            assert (matrix >= 0).all() and ((matrix > 1e-9).sum(1) <= 2).all()
        shallow, deep = (needles(np.random.default_rng(3), layers=n) for n in (2, 4))
        for pair, sign in (([shallow, deep], 1), ([deep, shallow], -1)):
            _, (((_, _), found),) = measure(["a", "b"], pair, seed=0)
            assert [one.depth for one in found["layers"]] == [0, 0.5, 1]
            apart = np.exp(shallow.needle).mean(0) - np.exp(deep.needle[:, ::2]).mean(0)
            assert [one.needle.value for one in found["layers"]] == pytest.approx(list(sign * apart))


class TestNeedleSNR:
    def test_tasks_are_pooled(self, result):
        assert result.tasks == (ALL, *TASKS) and result.lengths == (0, 40)
        assert [curve.task for curve in result.curves[:4]] == [ALL, ALL, "qa1", "qa1"] and len(result.curves) == 24
        for model in ("small0", "small1"):
            whole, parts = result.curve(model, ALL, 40), [result.curve(model, task, 40) for task in TASKS]
            assert whole.examples == 40 and {part.examples for part in parts} == {8}
            for layer in range(4):
                for name in METRICS:
                    mean = np.mean([getattr(part.layers[layer], name).value for part in parts])
                    assert getattr(whole.layers[layer], name).value == pytest.approx(mean), name
            assert whole.accuracy == whole.layers[3].leads

    def test_a_result_says_whose_it_is(self, model, result):
        alone = needle_snr(model, tasks=["qa3"], **QUICK).provenance
        assert alone["model"] == "small0" and alone["fingerprint"] == model.source["fingerprint"]
        both = result.provenance
        assert both["model"] == "small0, small1" and "fingerprint" not in both
        assert alone["models"] == {"small0": model.source}
        assert [source["model"] for source in both["models"].values()] == list(both["models"]) == ["small0", "small1"]

    def test_the_questions_are_those_asked_for(self, result):
        data = questions("qa1", length=40, examples=8, split="test")
        origin = result.provenance["data"]
        assert (origin["name"], origin["split"], origin["examples"]) == (", ".join(TASKS), "test", 40)
        assert origin["parts"][5] == dict(name="qa1", length=40, examples=8, fingerprint=data.fingerprint)
        long = result.curve(None, "qa1", 40)
        assert long.tokens == pytest.approx(np.mean([len(prompt.split()) for prompt in data.prompts()]))
        assert result.curve(None, "qa1", 0).tokens < long.tokens

    def test_models_with_other_tokenizers_read_the_same(self):
        result = needle_snr([small(), small(tokenizer=BYTES, name="bytes")], tasks=["qa5"], **QUICK)
        words, bytes_ = (result.curve(name) for name in ("small0", "bytes"))
        texts = questions("qa5", length=40, examples=8, split="test").prompts()
        assert bytes_.tokens == np.mean([len(f"{text} ".encode()) for text in texts]) > 3 * words.tokens
        assert words.chance == bytes_.chance

    def test_lenses(self, model, tmp_path):
        lens = randomly_tuned(model)
        result = needle_snr([model, small(1)], lens=[lens, None], **QUICK)
        assert [one.lens for one in result.models] == ["tuned lens random", "logit lens"]
        assert result.notes == ("small1: read by the logit lens; below the last layer it is no match for a tuned lens",)
        plain = needle_snr(model, **QUICK)
        assert plain.notes == ()
        mine, theirs = result.curve(), plain.curve()
        assert mine.layers[0].needle != theirs.layers[0].needle and mine.layers[3] == theirs.layers[3]
        saved = tmp_path / "lens"
        saved.mkdir()
        lens.tuned.save(saved)
        again = needle_snr(model, lens=saved, **QUICK)
        assert again.curve() == mine and again.models[0].lens == f"tuned lens {saved}"
        refuses("the tuned lens random belongs to another model than small1", needle_snr, small(1), lens=lens, **QUICK)
        with pytest.raises(InputError, match="1 lenses were given for 2 models; give one for each"):
            needle_snr([model, small(1)], lens=lens, **QUICK)

    def test_filler_lengths_and_splits(self, model, tmp_path):
        (tmp_path / "filler.txt").write_text("The grey tide comes into view . The old wind rests .\n")
        given = needle_snr(model, filler=tmp_path / "filler.txt", tasks=["qa1"], **QUICK)
        lines = ["The grey tide comes into view .", "The old wind rests ."]
        assert needle_snr(model, filler=lines, tasks=["qa1"], **QUICK).curves == given.curves
        assert given.curves != needle_snr(model, tasks=["qa1"], **QUICK).curves
        assert given.provenance["options"]["filler"] == str(tmp_path / "filler.txt")
        seen = needle_snr(model, tasks=["qa1"], split="train", **QUICK)
        assert seen.provenance["data"]["split"] == "train"
        counted = needle_snr(small(tokenizer=BYTES), tasks=["qa1"], unit="tokens", lengths=200, examples=8)
        asked = questions("qa1", length=200, examples=8, split="test", count=lambda text: len(text.encode()))
        assert counted.provenance["data"]["parts"][0]["fingerprint"] == asked.fingerprint
        assert (
            needle_snr(model, tasks=["qa1"], seed=1, **QUICK).curves != needle_snr(model, tasks=["qa1"], **QUICK).curves
        )

    def test_questions_of_ones_own(self, model):
        first, second = own(where(), where("pantry"), name="first"), own(where("cellar", ("attic",)), name="second")
        result = needle_snr(model, questions=[first, second])
        assert result.tasks == (ALL, "first", "second") and result.lengths == (None,)
        assert [result.curve(task=task).examples for task in result.tasks] == [3, 2, 1]
        assert needle_snr(model, questions=first, examples=1).curve().examples == 1
        bare = needle_snr(model, questions=own(where(distractors=())))
        assert "no question has distractors to compare the needle with" in bare.notes
        assert "candidates" not in str(bare) and len(bare.figure().axes) == 1

    @pytest.mark.parametrize(("options", "says"), [
        (dict(unit="letters"), "unknown unit 'letters'; allowed are words, tokens"),
        (dict(examples=0), "examples is 0; allowed is a whole number from 1 to"),
        (dict(tasks=["qa9"]), "unknown among tasks: 'qa9'; allowed are qa1, qa2, qa3, qa4, qa5"),
        (dict(lengths=[40, -1]), "lengths is -1; allowed are a whole number from 0 to 131,072"),
        (dict(lengths="4O"), "lengths is '4O'"),
        (dict(questions=[own(where()), own(where(), name="all")]), "the name 'all' of a set of questions is taken"),
        (dict(split="dev"), "unknown split 'dev'; allowed are test, validation, train"),
        (dict(names=["a", "b"]), "2 names were given for 1 models"),
        (dict(filler="no.txt"), "no.txt"),
        (dict(template="{context}"), "must hold {context} and {question} once each"),
        (dict(questions="no.csv"), "there is no file of questions no.csv"),
        (dict(questions=[own(where()), own(where())]), "the name 'own' of a set of questions is taken"),
        (dict(questions=own(where()), tasks=["qa1"]), "tasks=… applies to generated questions, but yours were given"),
        (dict(questions=own(where()), lengths=40), "lengths=… applies to generated questions"),
    ])  # fmt: skip
    def test_what_is_refused(self, model, options, says):
        refuses(says.replace("{", r"\{"), needle_snr, model, **options)
        refuses("no model was given", needle_snr, [])


def test_places_are_told_apart_by_their_first_byte():
    """Distinct first bytes let a model of bytes take part."""
    assert len({place[0] for place in PLACES}) == len(PLACES)


@pytest.mark.parametrize(("names", "noted"), [
    (("tuned", "tuned"), ""), (("logit", "logit"), ""), (("tuned", "logit"), "B"),
    (("logit", "tuned", "logit"), "A, C"), (("logit",), ""),
])  # fmt: skip
def test_models_under_another_lens_than_the_rest_are_named(names, noted):
    lenses = [SimpleNamespace(name=LOGIT if name == "logit" else "tuned lens") for name in names]
    notes = lens_notes(lenses, ["A", "B", "C"][: len(names)])
    expected = f"{noted}: read by the logit lens; below the last layer it is no match for a tuned lens"
    assert notes == ([expected] if noted else [])


def test_models_that_do_not_know_the_words_are_named():
    def part(unknown, *lengths):
        return SimpleNamespace(unknown=unknown, rows=[[0] * length for length in lengths])

    parts = [[part(2, 10, 10), part(0, 20)], [part(1, 10, 10), part(1, 10)], [part(0, 5)]]
    assert unknown_notes(parts, ["A", "B", "C"]) == [
        "5 % of the prompts' tokens are words that A's tokenizer does not know",
        "7 % of the prompts' tokens are words that B's tokenizer does not know",
    ]
    assert unknown_notes([[part(1, 101)]], ["A"]) == []
