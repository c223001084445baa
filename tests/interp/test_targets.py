"""Targets of explanation as a user names them, and reports of their cost, in numbers checked by hand."""

import copy
import zlib
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from examples import TEXTS, random_example
from faithful import reader
from loud import loud
from refusals import refuses
from tokenizers import Tokenizer, normalizers
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast
import ssmscope
from ssmscope.core import batching
from ssmscope.core.intercept import observe
from ssmscope.core.model import Model
from ssmscope.core.progress import duration
from ssmscope.errors import check_number, check_whole
from ssmscope.interp import objective as module
from ssmscope.interp.explain import views
from ssmscope.interp.methods import lrp as propagating
from ssmscope.interp.objective import Meter, objective, target_warning, text_generator, tokens_that_fit


@pytest.fixture(scope="module")
def plain() -> Model:
    """A language model of 97 tokens without a tokenizer."""
    return Model(loud(random_example("mamba")), name="plain")


def worded(words: list[str], unknown: str | None = "[UNK]", lower: bool = False) -> PreTrainedTokenizerFast:
    backend = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token=unknown))
    backend.pre_tokenizer = Whitespace()
    if lower:
        backend.normalizer = normalizers.Lowercase()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=unknown)


def test_a_classifiers_target_is_a_class_by_name_or_number():
    model = reader(labels=3)
    model.module.config.id2label = {0: "1", 1: "0", 2: "class c"}
    batch = model.encode(["a b", "c"])
    for target, expected in (("1", 0), ("0", 1), ("2", 2), (2, 2), (np.int64(1), 1), ("class c", 2)):
        found = objective(model, batch, target=target)
        assert found.targets == ((expected,),) * 2 and found.names == (("1", "0", "class c")[expected],) * 2
    both = objective(model, batch, target=["class c", 0], contrast="0")
    assert both.targets == ((2,), (0,)) and both.contrasts == (1, 1) and both.names == ("class c − 0", "1 − 0")
    for target, line in (
        (3, "there is no target 3; allowed are 0 to 2"),
        ("3", "there is no target 3; allowed are 0 to 2"),
        ("class d", "has no target 'class d'; its classes are 1, 0, class c; did you mean 'class c'"),
        ([[0], 1], r"the target \[0\] cannot be explained: a classifier's target is one class"),
        (["0"], "1 targets for 2 texts: give one for all, or one for each"),
    ):
        refuses(line, objective, model, batch, target=target)


def test_a_language_models_target_is_a_token_or_a_continuation(plain):
    batch = plain.encode(ids=TEXTS[1:])
    found = objective(plain, batch, target=[[3, "50", np.int64(96)], "0"])
    assert found.targets == ((3, 50, 96), (0,)) and found.names == ("3,50,96", "0") and found.continues
    for target, line in (
        (97, "there is no target 97; allowed are 0 to 96"),
        ([[3, 97], 1], "there is no target 97"),
        ([(), 1], r"the target \[\] cannot be explained: a continuation has at least one token"),
        ("film", "plain has no target 'film'; it has no tokenizer: give a token's id$"),
    ):
        refuses(line, objective, plain, batch, target=target)
    for options in (dict(target=[[3, 4], 1]), dict(target=1, probability=True)):
        refuses("a contrast is the difference of two logits", objective, plain, batch, contrast=2, **options)


def test_words_as_targets(plain, capsys):
    words = [*(f"w{at}" for at in range(94)), "[UNK]", "cat", "sat", "far"]  # the last one is the 98th
    model = Model(plain.module, worded(words, lower=True), name="model")
    batch = model.encode(ids=TEXTS[:1])
    assert objective(model, batch, target="cat").targets == ((95,),)
    assert objective(model, batch, target="sat cat").names == ("sat cat",)
    assert capsys.readouterr().err == ""
    assert objective(model, batch, target="Cat", contrast="Cat").targets == ((95,),)
    assert capsys.readouterr().err == "the target 'Cat' is read as the token 'cat'\n"
    assert target_warning(model, "Sat cat") == "the target 'Sat cat' is read as the 2 tokens 'sat', 'cat'"
    assert target_warning(model, "sat cat") == target_warning(model, " cat") == ""
    for target, line in (
        ("dog", "the target 'dog' has a word unknown to model"),
        ("cat dog", "the target 'cat dog' has a word unknown to model"),
        ("cat far", "the target 'cat far' has the id 97, outside the vocabulary of model"),
        (" ", "the target ' ' has no token"),
    ):
        refuses(line, objective, model, batch, target=target)
    refuses("a contrast is the difference of two logits", objective, model, batch, target="cat", contrast="sat cat")
    upper = Model(plain.module, worded(["[UNK]", "cat"]), name="upper")
    assert objective(upper, batch, target="[UNK]").targets == ((0,),)


def test_a_target_that_begins_with_a_space_is_meant_so(plain):
    vocabulary = {" ": 0, "x": 1, " x": 2, "  x": 3, "y": 4}
    backend = Tokenizer(BPE(vocabulary, [(" ", "x"), (" ", " x")]))
    model = Model(plain.module, PreTrainedTokenizerFast(tokenizer_object=backend), name="model")
    assert objective(model, model.encode(ids=TEXTS[1:2]), target=" x").targets == ((2,),)
    assert target_warning(model, " x") == target_warning(model, "  x") == target_warning(model, "y") == ""
    assert target_warning(model, "x").endswith("; ' x', with the space before it, is another, one token")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_head_with_a_bias_gives_float32(plain, dtype):
    body = copy.deepcopy(plain.module)
    body.lm_head = nn.Linear(24, 97)
    half = Model(body.to(dtype))
    found, read = objective(half, half.encode(ids=TEXTS[1:2]), target=40, contrast=9), []
    with observe(before=[(body.lm_head, lambda module, args, kwargs: read.append(args[0][0, -1].float()))]):
        value = found.values()[0]
    weight, bias = body.lm_head.weight.float(), body.lm_head.bias.float()
    expected = read[0] @ weight[40] + bias[40] - read[0] @ weight[9] - bias[9]
    torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


def test_whole_numbers_and_numbers():
    for value in (2, 3, np.int64(2)):
        check_whole(2, steps=value)
    for value in (2, 2.5, np.float32(3), np.int64(2)):
        check_number(2, noise=value)
    for value in (1, True, 2.0, "3", None):
        refuses("steps is .*; allowed is a whole number from 2 on", check_whole, 2, steps=value)
    for value in (1.5, True, float("inf"), float("nan"), "3", None):
        refuses("noise is .*; allowed is a number from 2 on", check_number, 2, noise=value)
    refuses("steps is True", check_whole, 0, steps=True)
    refuses("noise is True", check_number, 0, noise=True)


def test_what_is_drawn_depends_on_the_seed_and_the_texts_own_tokens_or_pixels():
    ids = torch.tensor([[5, 7, 0, 0], [5, 7, 9, 2]])
    texts = SimpleNamespace(batch=SimpleNamespace(values=None, input_ids=ids), lengths=[2, 4])
    values = torch.rand(2, 3, 4).bfloat16()
    images = SimpleNamespace(batch=SimpleNamespace(values=values, input_ids=ids), lengths=[4, 4])
    assert text_generator(texts, 0, 3).random() == np.random.default_rng([3, 5, 7]).random()
    assert text_generator(texts, 1, 3).random() == np.random.default_rng([3, 5, 7, 9, 2]).random()
    content = zlib.crc32(values[1].double().numpy().tobytes())
    assert text_generator(images, 1, 4).random() == np.random.default_rng([4, content]).random()
    refuses("seed is -1", text_generator, texts, 0, -1)


def test_the_number_of_tokens_that_fit(plain, monkeypatch):
    assert tokens_that_fit(plain) == batching.TOKENS_AT_ONCE == 4096
    monkeypatch.setattr(batching, "MAX_NUMBERS_KEPT", 40 * plain.num_layers * 24 * 7)
    assert [tokens_that_fit(plain, gradients=True, layers=layers) for layers in (None, 1, 2)] == [7, 14, 7]
    kept = 4 * 97 + 24 * plain.num_layers  # logits, and the residual stream after each layer
    assert tokens_that_fit(plain, every_position=True) == 40 * plain.num_layers * 24 * 7 // kept
    assert tokens_that_fit(plain, gradients=True, every_position=True) == 7
    monkeypatch.setattr(batching, "MAX_NUMBERS_KEPT", 1)
    assert tokens_that_fit(plain, gradients=True) == tokens_that_fit(plain, every_position=True) == 1


def test_blocks_run_again_where_a_backward_pass_does_not_fit(plain, monkeypatch):
    ran: list[nn.Module] = []

    @contextmanager
    def noted(of):
        ran.append(of)
        yield

    monkeypatch.setattr(module, "recomputed", noted)
    goal = objective(plain, plain.encode(ids=TEXTS[:2]), target=3)
    embeddings = goal.embeddings()[:, :5]  # 2 × 5 tokens
    size = 10 * module.KEPT_NUMBERS_PER_TOKEN * plain.num_layers * 24
    gradients = []
    for most, again in ((size, []), (size - 1, [plain.module])):
        monkeypatch.setattr(batching, "MAX_NUMBERS_KEPT", most)
        ran.clear()
        gradients.append(goal.gradient(embeddings, [0, 0]))
        assert ran == again
    assert torch.equal(*gradients)


@pytest.mark.parametrize("half", [True, False])
def test_relevance_keeps_copies_of_half_precision_weights_too(plain, half, monkeypatch):
    body = copy.deepcopy(plain.module)
    if half:
        body.backbone.layers[1].bfloat16()
    model = Model(body)
    goal = objective(model, model.encode(ids=TEXTS), target=3)
    copies = sum(weight.numel() for weight in body.backbone.layers[1].parameters()) if half else 0
    size = 3 * 5 * 4 * module.KEPT_NUMBERS_PER_TOKEN * model.num_layers * 24 + 4 * copies
    x = torch.zeros(3, 5, 24)
    for most, limit, fits in ((size, size, True), (size, size - 1, False), (size - 4, size, False)):
        monkeypatch.setattr(batching, "MAX_NUMBERS_KEPT", most // 4)
        monkeypatch.setattr(propagating, "MAX_BACKWARD_BYTES", limit)
        assert propagating._fits(goal, x) == fits


def test_a_module_of_ones_own_may_miss_little_of_what_is_added(monkeypatch):
    """The terms 3 − 1 + 2, which f misses by 0.5, add up to 3 + 1 + 2 + 4.5 in absolute value."""

    class Own:
        lengths, targets, probability = [2], ((1,),), False
        model = SimpleNamespace(module=None, name="mine", device=torch.device("cpu"), width=1)

        def embeddings(self):
            return torch.ones(1, 2, 1)

        def __call__(self, embeddings, texts):
            return torch.tensor([4.5])

    goal = Own()
    goal.model.module = goal
    monkeypatch.setattr(propagating, "_not_linear", lambda module: "")
    monkeypatch.setattr(propagating, "OwnModel", Own)
    monkeypatch.setattr(propagating, "propagated", lambda *_: (torch.tensor([[3.0, -1.0]]), torch.tensor([2.0]), None))
    monkeypatch.setattr(propagating, "MAX_SUM_ERROR", 0.048)
    found = propagating.lrp(goal)
    assert found.delta.item() == pytest.approx(0.5 / 4.5) and not found.converged.any()
    monkeypatch.setattr(propagating, "MAX_SUM_ERROR", 0.047)
    refuses("misses the logits of mine by 4.8% of what is added", propagating.lrp, goal)


def test_a_continuation_takes_room_but_for_its_last_token(plain, monkeypatch):
    found = objective(plain, plain.encode(ids=TEXTS), target=[[4, 9, 1], [8], [2, 2]])  # 13, 3 and 7 tokens run
    for most, parts in ((14, [[1, 2], [0]]), (13, [[1], [2], [0]]), (39, [[1, 2, 0]]), (38, [[1, 2], [0]])):
        monkeypatch.setattr(batching, "TOKENS_AT_ONCE", most)
        assert list(found.batches(range(3))) == parts
    assert list(found.parts(gradients=False)) == [([1, 2], 6), ([0], 11)]


def test_a_function_of_one_text_runs_in_pieces_unless_it_is_differentiated(monkeypatch):
    monkeypatch.setattr(module, "tokens_at_once", lambda device: 7)
    ran = []

    class Counted:
        def __call__(self, embeddings, texts):
            ran.append((len(embeddings), texts))
            return embeddings.sum((1, 2))

    function = module._Function(Counted(), 2)
    given = torch.rand(5, 3, 2)
    torch.testing.assert_close(function(given), given.sum((1, 2)))
    assert ran == [(2, [2, 2]), (2, [2, 2]), (1, [2])]
    ran.clear()
    assert function(given.requires_grad_()).requires_grad and ran == [(5, [2] * 5)]
    with torch.no_grad():
        ran.clear()
        function(given)
        assert len(ran) == 3
        function(torch.rand(2, 8, 1))  # a single run has more tokens than fit
        assert [runs for runs, _ in ran[3:]] == [1, 1]


def metered(lengths, least, most, ticks):
    """Lines of a meter that begins at 4 s and is told at each tick (time, gradients, tokens, texts done)."""
    lines: list[str] = []
    now = [4.0]
    meter = Meter(lines.append, lambda: now[0])
    meter.plan("ig", lengths, least, most)
    for at, *given in ticks:
        now[0], before = 4.0 + at, len(lines)
        meter.ran(*given)
        lines += [""] * (len(lines) == before)
    return lines


def test_a_meter_reports_what_takes_long_and_then_at_intervals(monkeypatch):
    monkeypatch.setattr(module, "WARMUP_SECONDS", 0.25)
    monkeypatch.setattr(module, "MIN_REPORTED_SECONDS", 2.0)
    ticks = [(0.125, 1, 1), (0.25, 1, 1), (9.75, 3, 8, 0), (10.25, 4, 8, 1), (20.0, 1, 8, 1), (20.25, 1000, 9, 2)]
    assert metered([3, 5], 3, 3, ticks) == [
        "",  # too early to know
        "ig: 2 texts take 6 gradients, about 3 s",
        "",
        "ig: 9 gradients after 10 s, 1 of 2 texts done",
        "",
        "ig: 1,010 gradients after 20 s, 2 of 2 texts done",
    ]
    assert metered([8], 3, 900, ticks[:4]) == [
        "", "ig: the text takes 3 to 900 gradients, about 3 s to 15.0 min", "", "ig: 9 gradients after 10 s",
    ]  # fmt: skip
    # Two seconds are not reported, and what has become slower is.
    assert metered([3, 5], 2, 9, [(0.25, 1, 2), (0.5, 1, 2), (1.5, 1, 2)]) == [
        "",
        "",
        "ig: 2 texts take 4 to 18 gradients, about 4 s to 18 s",
    ]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(1.4, "1 s"), (99.4, "99 s"), (99.5, "1.7 min"), (5969, "99.5 min"), (5970, "1.7 h"), (9000, "2.5 h")],
)
def test_durations(seconds, said):
    assert duration(seconds) == said


def test_of_a_head_of_log_odds_either_class_is_explained():
    """The first class has the logit 0, and the scores of the second with the other sign."""
    model = ssmscope.load("demo/sst2-selective")
    texts = ["A dull, lifeless film.", "A gripping film."]
    (_, negative), (_, positive) = model.logits(model.encode(texts)).tolist()
    assert negative < 0 < positive
    found = objective(model, model.encode(texts))
    assert found.names == ("negative", "positive") and found.values().tolist() == pytest.approx([-negative, positive])
    for method in ("gradxinput", "lrp", "occlusion"):
        one, other = (
            ssmscope.explain(model, texts, methods=[method], target=name) for name in ("negative", "positive")
        )
        for text in (0, 1):
            a, b = (each.attribution(text).scores for each in (one, other))
            assert np.abs(a).max() > 0.1 and a == pytest.approx(-b, abs=1e-5)
    assert objective(model, model.encode(texts), probability=True).contrasts is None
    three = objective(model, model.encode(texts), target="negative", contrast="negative")
    assert three.values().tolist() == [0, 0]


def test_a_contrast_is_named_without_the_spaces_of_its_tokens():
    model = ssmscope.load("demo/books-mamba2")
    found = ssmscope.explain(model, "in such a", target=" light", contrast=" way", methods="survival")
    assert found[0].target == " light − way"
    assert found.headline.startswith("Explanation of demo/books-mamba2: “light − way” rests most on “a”")
    assert views.about(found[0]).startswith("explained: light − way, f = ")
