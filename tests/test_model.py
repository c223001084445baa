"""Model and encoding: inputs, refusals, and records."""

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from examples import random_example
from loud import loud
from refusals import refused, refuses
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast
import ssmscope
from ssmscope.core.encoding import encode_ids, encode_texts, spelled_out
from ssmscope.core.model import Model
from ssmscope.core.take_trace import as_batch, as_trace
from ssmscope.errors import InputError
from ssmscope.networks.classifier import SSMClassifierConfig, SSMForSequenceClassification

WORDS = ["[PAD]", "[UNK]", "[CLS]", "a", "film", "##ed", "act", "good", "!", "Å"]


def word_tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(token_models.WordPiece({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = Whitespace()
    inner.post_processor = TemplateProcessing(single="$A [CLS]", special_tokens=[("[CLS]", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(token_models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=len(WORDS), hidden_size=8, state_size=3, num_hidden_layers=2, time_step_rank=2)
    return ssmscope.load(loud(MambaForCausalLM(config)), tokenizer=word_tokenizer())


def test_whitespace_and_emoji_beside_words_are_fine(model):
    assert model.encode("good\tfilm\r\n😀").tokens[0] == ("good", "film", "😀", "[CLS]")


@pytest.mark.parametrize(("texts", "said"), [
    ([], "no text"),
    ("", "the text is empty: give at least one word"),
    ("  \n\t ", "the text is empty: give at least one word"),
    (["a", ""], "text 1 is empty: give at least one word"),
    (["film\x1b\x00"], "the text has the control character U+001B at position 4: remove it"),
    ("a\x00b", "the text has the control character U+0000 at position 1"),
    ("😀😀", "the text has only characters that this model's tokenizer does not know: '😀😀'"),
    (["a", "zzz"], "text 1 has only characters that this model's tokenizer does not know: 'zzz'"),
    ("z" * 50, f"the text has only characters that this model's tokenizer does not know: '{'z' * 40}'"),
    ("film" + " " * 317, "the text has 321 characters, more than 320, the limit for 5 tokens: shorten or"),
    (["a", "a a a a a"], "text 1 has 6 tokens, more than the limit of 5: shorten or split it, or raise max_tokens"),
])  # fmt: skip
def test_what_is_said_of_a_text(model, texts, said):
    assert refused(model.encode, texts, max_tokens=5).startswith(said)
    assert model.encode("a a a a" + " " * 313, max_tokens=5).lengths == [5]


def test_ids_are_spelled_as_the_text_that_gives_them():
    tokenizer = byte_tokenizer()

    def ids(text):
        return tokenizer(text)["input_ids"]

    assert spelled_out([ids("a film ."), ids("é")], tokenizer, 256) == ["a film .", "é"]
    assert spelled_out([ids("a"), ids("a\x1b")], tokenizer, 256) is None
    assert spelled_out([ids("é")[:1]], tokenizer, 256) is None
    with pytest.raises(InputError, match="^the given ids hold id -3, outside the model's vocabulary 0…255"):
        spelled_out([[5, 256], [300, -3]], tokenizer, 256)
    own = word_tokenizer()
    assert spelled_out([[3, 7, 4, 2], [4, 2]], own, len(WORDS)) == ["a good film", "film"]
    assert spelled_out([[3, 7, 4]], own, len(WORDS)) is None


def test_texts_need_a_tokenizer_and_ids_do_not(model):
    bare = Model(model.module)
    refuses("has no tokenizer: give token ids", bare.encode, "a film")
    assert bare.encode(ids=[3, 4]).tokens == (("3", "4"),)
    assert model.encode(ids=[3, 2]).words == ((0, None),)
    refuses("either texts or token ids", bare.encode, "a", ids=[1])
    refuses("either texts or token ids", bare.encode)


def test_models_and_traces_are_shown_in_a_line(model):
    size = sum(each.numel() for each in model.module.parameters())
    assert repr(model) == (
        f"Model MambaForCausalLM: mamba language model, 2 state-space layers, {size:,} parameters, float32 on cpu"
    )
    trace = model.trace(["a good film", "film"])
    answers = ", ".join(f"{name!r} (p = {p:.3f})" for name, p in trace.answers)
    assert repr(trace) == (f"Trace of MambaForCausalLM (mamba): 2 texts of 2 to 4 tokens, 2 layers; answers {answers}")
    assert repr(ssmscope.load("demo/sst2-mamba2")).startswith(
        "Model demo/sst2-mamba2: mamba2 classifier (negative, positive), "
    )
    many = repr(model.trace(ids=[[3, 4]] * 9))
    assert many.count("p = ") == 3 and many.endswith("), …") and "\n" not in many and len(many) < 300


class TestWhatIsGiven:
    TEXTS = ["a good film", "acted film !"]

    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("kind", [None, "pt", "np"])
    def test_a_tokenizers_output(self, model, side, kind):
        model.tokenizer.padding_side = side
        given = model.tokenizer(["a good film", "film"], padding=True, return_tensors=kind)
        batch, right = model.encode(given), model.encode(["a good film", "film"])
        assert torch.equal(batch.input_ids, right.input_ids) and torch.equal(batch.mask, right.mask)
        assert batch.words == right.words and batch.spelled == right.spelled
        assert torch.equal(model.trace(dict(given)).logits, model.trace(right).logits)
        one = model.tokenizer("a good film", return_tensors=kind)
        assert model.encode(one).tokens == (("a", "good", "film", "[CLS]"),)

    def test_of_an_evaluator(self, model):
        ask = ssmscope.Evaluator(model, words=("good", "film"))
        right = ask.scores(self.TEXTS)
        for take in (np.array, pd.Series, tuple, lambda texts: (text for text in texts)):
            assert np.array_equal(ask.scores(take(self.TEXTS)), right)
        for given in (model.tokenizer(self.TEXTS), torch.tensor([[3, 4]]), [b"a film"], [None], {"text": ["a"]}):
            with pytest.raises(InputError):
                ask.scores(given)

    def test_a_generator_serves_two_models(self, model):
        found = ssmscope.explain([model, model], (text for text in self.TEXTS), methods=("gradxinput",))
        assert [len(one) for one in found.results] == [2, 2]
        refuses("is of one model", ssmscope.explain, [model, model], model.tokenizer("a film"), methods=("gradxinput",))


def test_a_tokenizer_larger_than_the_model_is_noticed(model):
    refuses("the tokenizer gives id 8", encode_texts, ["film !"], model.tokenizer, 8)


def test_dashes_of_windows_read_as_latin_1_are_no_control_characters(model):
    assert len(model.trace("a good \x97 film").tokens[0]) >= 4


def test_layers_are_a_sequence_and_none_without_inputs(model):
    trace = model.trace("a good film", keep_inputs=False)
    assert trace.retention.shape == (2, 1, 4) and len(trace) == 1
    with pytest.raises(ValueError, match="keep_inputs"):
        trace.layers[0]
    layers = model.trace("a good film").layers
    assert len(layers) == 2 and len(list(layers)) == 2 and len(layers[:1]) == 1
    assert torch.equal(layers[-1].u, layers[1].u)
    with pytest.raises(IndexError, match="layer 2 of a model with 2"):
        layers[2]


def test_answers_and_source(model):
    trace = model.trace(["a good film", "film"])
    for row, (answer, probability) in enumerate(trace.answers):
        best = trace.logits[row].softmax(-1).max(-1)
        assert answer == model.tokenizer.decode([best.indices.item()]) and probability == best.values.item()
    assert trace.source["architecture"] == "mamba" and trace.source["dtype"] == "float32"
    assert trace.source["device"] == "cpu" and trace.source["fingerprint"] == model.fingerprint


def test_fingerprint_follows_the_weights(model):
    before = model.fingerprint
    assert before == model.fingerprint and len(before) == 16
    with torch.no_grad():
        model.module.backbone.layers[0].mixer.D[0] += 1
    changed = model.fingerprint
    assert changed != before
    with torch.no_grad():
        model.module.backbone.layers[0].mixer.D[0] -= 1
    assert model.fingerprint == before


@pytest.mark.parametrize("name", ["mamba", "mamba2", "jamba"])
def test_text_is_generated_from_a_cache_within_a_run(name):
    """Asked for one by the model's own code, the parts that are run here fill it, whatever transformers calls it."""
    module = random_example(name).eval()
    ids = torch.randint(3, module.config.vocab_size, (2, 7))
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    slowly = module.generate(ids, use_cache=False, **options)
    with ssmscope.load(module).running():
        assert torch.equal(module.generate(ids, use_cache=True, **options), slowly)


def test_our_models_are_generated_from_without_a_cache_of_transformers(monkeypatch):
    """Releases 5.5 to 5.23 cannot ask theirs for its length where no layer is attention."""
    module, ids = random_example("gfssm").eval(), torch.tensor([[5, 9, 2]])
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "use_cache": True}
    expected = module.generate(ids, **options)
    monkeypatch.setattr(transformers.generation.utils, "DynamicCache", None)
    assert torch.equal(module.generate(ids, **options), expected) and expected.shape == (1, 12)


def test_a_model_without_state_space_layers_is_refused():
    class SomeAttention(torch.nn.Linear): ...

    attention, convolution = SomeAttention(2, 2), torch.nn.Conv1d(2, 2, 3)
    none, advice = "has no state-space layer that can be read", "a model of one of these types: .*, mamba, mamba2, .*"
    for module, given, said in (
        (torch.nn.Linear(2, 2), {"name": "Linear"}, f"^Linear {none}; give {advice}"),
        (torch.nn.Linear(2, 2), {}, f"^model is a Linear, which {none}; give {advice}"),
        (torch.nn.Sequential(attention), {}, rf"{none}, but attention \(SomeAttention\); ask captum or .* {advice}"),
        (torch.nn.Sequential(attention, convolution), {}, r"attention \(SomeAttention\) with convolutions; ask captum"),
    ):
        refuses(said, Model, module, **given)


def classifier(outputs: int = 3, problem: str | None = None, **options) -> Model:
    torch.manual_seed(0)
    backbone = MambaConfig(vocab_size=len(WORDS), hidden_size=8, state_size=3, num_hidden_layers=2, time_step_rank=2)
    names = {at: name for at, name in enumerate("uvwxyz"[:outputs])}
    config = SSMClassifierConfig(backbone, num_labels=outputs, problem_type=problem, id2label=names)
    return Model(loud(SSMForSequenceClassification(config)), **options)


class TestAnswers:
    LOGITS = torch.tensor([[0.5, 2.0, -1.0], [1.5, -3.0, 0.25]])

    def test_are_the_most_probable_class_or_label(self):
        for problem, kind, p in (
            (None, "classes", self.LOGITS.softmax(-1)),
            ("multi_label_classification", "labels", self.LOGITS.sigmoid()),
        ):
            model = classifier(problem=problem, tokenizer=word_tokenizer())
            assert model.gives == kind and model.is_classifier and model.labels == ["u", "v", "w"]
            assert model.answers_of(self.LOGITS) == (("v", float(p[0, 1])), ("u", float(p[1, 0])))
            assert torch.equal(model.probabilities(self.LOGITS), p)

    def test_are_numbers_of_a_regression(self):
        model = classifier(problem="regression")
        (one, p), (other, q) = model.answers_of(self.LOGITS * 1.23456)
        assert one == "u = 0.6173, v = 2.469, w = -1.235" and other == "u = 1.852, v = -3.704, w = 0.3086"
        assert np.isnan(p) and np.isnan(q) and model.gives == "numbers" and model.is_classifier
        with pytest.raises(
            InputError, match="^model gives numbers, as a regression does, and no probabilities; ask what"
        ):
            model.probabilities(self.LOGITS)

    def test_are_the_most_probable_next_token(self, model):
        logits = torch.zeros(2, len(WORDS))
        logits[0, 4], logits[1, 7] = 2.0, 1.0
        p = logits.softmax(-1)
        assert model.answers_of(logits) == (("film", float(p[0, 4])), ("good", float(p[1, 7])))
        assert Model(model.module).answers_of(logits) == (("4", float(p[0, 4])), ("7", float(p[1, 7])))
        assert model.labels is None and not model.is_classifier and model.gives == "next tokens"

    def test_are_none_without_a_head(self, model):
        bare = ssmscope.load(model.module.backbone)
        assert [name for name, _ in bare.answers_of(torch.zeros(2, 0))] == ["no head"] * 2
        assert not bare.is_classifier and bare.labels is None
        for ask in (lambda: bare.checked(torch.zeros(2, 3)), lambda: bare.check_classes("this")):
            refuses(f"^{bare.name} has no head and gives no answer", ask)

    def test_of_one_class_are_asked_for(self):
        assert classifier().check_classes("this") is None
        for problem, said in (
            ("multi_label_classification", "labels of which several may be right"),
            ("regression", "numbers, as"),
        ):
            with pytest.raises(InputError, match=f"^model gives {said}.*, and this needs one class for each text; ask"):
                classifier(problem=problem).check_classes("this")

    def test_are_of_finite_logits(self, model):
        for logits in (self.LOGITS, torch.zeros(2, 0), torch.full((2, 3), 3e38)):
            assert model.checked(logits) is logits
        for wrong in (torch.nan, torch.inf, -torch.inf):
            for dtype, advice in (
                (torch.float32, "on this input"),
                (torch.float16, "on this input in float16; try float32"),
            ):
                logits = self.LOGITS.to(dtype)
                logits[1, 2] = wrong
                said = f"^the logits of {model.name} are not finite: .*, or overflows {advice}"
                refuses(said, model.checked, logits)
                assert ("float16" in refused(model.checked, logits)) == (dtype == torch.float16)


class TestRuns:
    IDS = [[3, 7, 4, 5], [4, 8]]

    def test_give_the_logits_of_the_last_tokens_alone(self, model):
        batch = model.encode(ids=self.IDS)
        whole, last = model.run(batch), model.run(batch, last_only=True)
        assert whole.logits.shape == (2, 4, len(WORDS)) and len(whole.states) == 2
        torch.testing.assert_close(last.logits, whole.logits[[0, 1], [3, 1]])
        embedded = model.embed(batch)
        assert torch.equal(embedded, model.module.get_input_embeddings().weight[batch.input_ids])
        with torch.no_grad(), model.running(mask=batch.mask):
            torch.testing.assert_close(model.forward_embeddings(embedded, batch.mask), last.logits)
            found = model.forward_embeddings(embedded, batch.mask, last_only=False)
        torch.testing.assert_close(found[0], whole.logits[0])
        torch.testing.assert_close(found[1, :2], whole.logits[1, :2])
        torch.testing.assert_close(model.logits(batch)[0], whole.logits[0])

    @pytest.mark.parametrize("name", ["mamba", "jamba"])
    def test_keep_every_state(self, name):
        model = ssmscope.load(random_example(name))
        ids = [5, 17, 3, 9, 22]
        kept: list = []
        with torch.no_grad(), model.running(keep=kept):
            logits = model.forward(model.encode(ids=ids))
        run = model.run(model.encode(ids=ids))
        assert len(kept) == len(run.states)
        assert (len(run.states) > model.num_layers) == (name == "jamba")
        torch.testing.assert_close(run.logits, logits)
        first = model.run(model.encode(ids=ids[:2]))
        torch.testing.assert_close(
            model.run(model.encode(ids=ids[2:]), first.states).logits, logits[:, 2:], rtol=1e-4, atol=1e-4
        )
        for visited in ([], None):
            with torch.no_grad(), model.running(keep=visited):
                model.forward(model.encode(ids=ids))
        assert model.continues

    def test_are_checked_unless_they_are_not_to_be(self, model):
        with torch.no_grad():
            model.module.lm_head.weight[2] = torch.inf
        batch = model.encode(ids=self.IDS)
        refuses("are not finite", model.logits, batch)
        with torch.no_grad(), model.running(mask=batch.mask):
            assert not model.forward(batch, checked=False).isfinite().all()

    def test_of_an_analysis_are_of_its_own_input(self, model):
        batch, trace = model.encode(["a good film", "film"]), model.trace(["a good film", "film"])
        assert as_batch(model, batch) is batch and as_trace(None, trace) is trace
        for found in (as_batch(model, ["a good film", "film"]), as_batch(model, trace)):
            assert torch.equal(found.input_ids, batch.input_ids) and torch.equal(found.mask, batch.mask)
            assert (found.tokens, found.words, found.spelled) == (batch.tokens, batch.words, batch.spelled)
        for take in (as_batch, as_trace):
            refuses("^a str was given without its model; give the model first", take, None, "a film")
        found = as_trace(model, batch, keep_inputs=[1])
        assert torch.equal(found.layers[1].u, trace.layers[1].u)
        with pytest.raises(InputError, match="^a trace does not hold the images that it is of"):
            pixels = classifier()
            pixels.module.config.channels = 2
            as_batch(pixels, trace)


def test_what_a_model_says_of_itself(model):
    assert (model.vocabulary, model.width, model.num_layers, model.layer_numbers) == (len(WORDS), 8, 2, (0, 1))
    assert model.architecture == "mamba" and classifier().architecture == "mamba" and model.channels is None
    hybrid = ssmscope.load(random_example("jamba"))
    kinds = [type(each).__name__ for each in hybrid.module.model.layers]
    assert hybrid.layer_numbers == tuple(at for at, kind in enumerate(kinds) if "Mamba" in kind)
    assert model.check_tokenizer() is None
    with pytest.raises(InputError, match=r"^m has no tokenizer to read words with; give one, load\(tokenizer=…\)"):
        Model(model.module, name="m").check_tokenizer("words")
    size = sum(each.numel() for each in classifier(6).module.parameters())
    for outputs, names in ((4, "u, v, w, x"), (6, "u, v, w, x, …")):
        assert repr(classifier(outputs)).startswith(f"Model model: mamba classifier ({names}), 2 state-space layers, ")
    assert repr(classifier(6)).endswith(f", {size:,} parameters, float32 on cpu, no tokenizer")


IMAGES = torch.arange(24, dtype=torch.uint8).view(2, 6, 2) * 10


@pytest.fixture
def pixel_model() -> Model:
    torch.manual_seed(0)
    backbone = MambaConfig(vocab_size=1, hidden_size=8, state_size=3, num_hidden_layers=2, time_step_rank=2)
    config = SSMClassifierConfig(backbone, channels=2, image_size=(2, 3), num_labels=3)
    return ssmscope.load(loud(SSMForSequenceClassification(config)))


class TestPixels:
    def test_give_the_modules_logits_in_every_way(self, pixel_model, monkeypatch):
        batch = pixel_model.encode(values=IMAGES)
        with torch.no_grad():
            own = pixel_model.module(input_values=IMAGES / 255).logits
        torch.testing.assert_close(pixel_model.logits(batch), own, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(pixel_model.run(batch).logits, own, rtol=1e-4, atol=1e-4)
        monkeypatch.setattr("ssmscope.core.batching.TOKENS_AT_ONCE", 8)  # every image on its own
        trace = pixel_model.trace(values=IMAGES)
        torch.testing.assert_close(trace.logits, own, rtol=1e-4, atol=1e-4)
        assert trace.retention.shape == (2, 2, 7) and trace.layers[1].u.shape == (2, 7, 8)
        assert ssmscope.heatmap(trace)[0].tokens[-1] == "[class]"
        assert 6 not in ssmscope.heatmap(trace, top=9)[0].rationale

    def test_may_be_given_first(self, pixel_model):
        for given in (IMAGES, IMAGES.numpy()):
            assert torch.equal(pixel_model.encode(given).values, IMAGES.float() / 255)
            for more in (dict(values=IMAGES), dict(ids=[0])):
                refuses("reads pixels", pixel_model.encode, given, **more)

    def test_are_not_mixed_with_tokens(self, pixel_model, model):
        for wrong in (dict(texts="a film"), dict(ids=[0]), dict(values=IMAGES, ids=[0]), dict()):
            refuses(r"reads pixels \(3 × 2 of 2 channels\), not texts", pixel_model.encode, **wrong)
        refuses("reads tokens, not pixels", model.encode, values=IMAGES)
        refuses("reads pixels: give it a batch of its own", pixel_model.logits, encode_ids([[0, 0]], 1))
        refuses("reads tokens: give it a batch of its own", model.logits, pixel_model.encode(values=IMAGES))

    def test_image_size_is_no_part_of_the_fingerprint_and_channels_are(self, pixel_model):
        before = pixel_model.fingerprint
        pixel_model.module.config.image_size = None
        pixel_model.__dict__.pop("_hashed")
        assert pixel_model.fingerprint == before
        pixel_model.module.config.channels = 3
        pixel_model.__dict__.pop("_hashed")
        assert pixel_model.fingerprint != before
