"""Labelled examples and baselines in numbers that can be checked by hand, and every refusal of theirs."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from bags import bag, texts
from examples import random_example
from faithful import reader
from refusals import refuses
import ssmscope
from ssmscope.core.encoding import Batch
from ssmscope.core.model import Model
from ssmscope.data.pixels import PixelData
from ssmscope.data.text import text_data
from ssmscope.data.tokens import IGNORED, SequenceData, TokenData
from ssmscope.errors import InputError
from ssmscope.interp import baselines, scoring
from ssmscope.interp.baselines import baseline_embeddings, baseline_name, ordinary_tokens, singularity_note
from ssmscope.interp.explain.scored_text import Scores
from ssmscope.interp.labelled import check_classifier, class_ids, marked_tokens, read_texts, token_scores, word_ids
from ssmscope.interp.scoring import ScoredExamples, check_heads, means_with_intervals, scored_examples

images = pytest.fixture(scope="module")(lambda: ssmscope.load("demo/cifar10-mamba"))

PIXELS = PixelData("p", "all", np.full((2, 6, 3), 9, dtype=np.uint8), np.array([1, 0]), ("x", "y"), (2, 3))
ROWS = np.array([[5, 3, 9, 2], [1, 7, 7, 4]])


def test_classifiers_of_texts_alone(images):
    model, language = reader(), Model(random_example("mamba"), name="mine")
    check_classifier(model, texts("a b"), "it")
    for given, data, line in (
        (language, texts("a"), "mine is not a classifier: it needs a predicted class"),
        (images, texts("a"), "a model of pixels was given; it needs a classifier of texts and labelled texts"),
        (model, PIXELS, "data of PixelData was given; it needs"),
        (dataclasses.replace(model, tokenizer=None), texts("a"), "no tokenizer"),
        (model, dataclasses.replace(texts("a"), texts=(), labels=()), r"toy \(test\) has no example"),
    ):
        refuses(line, check_classifier, given, data, "it")


def test_texts_are_read_with_their_sizes_and_marked_tokens():
    model = bag({"a": 0.5, "b": 1.0, "c": 2.0})
    marked = [((0, 1), (4, 5)), None, ((1, 2),), ((2, 3),)]
    lengths, sizes, masks = read_texts(model, texts("a b c a", "b c", "a b", "a bc", rationales=marked))
    assert (lengths, sizes) == ([5, 3, 3, 3], [4, 2, 2, 2])
    assert masks[0].tolist() == [True, False, True, False]
    assert masks[1:3] == [None, None] and masks[3].tolist() == [False, True]  # a space marks nothing
    lengths, sizes, masks = read_texts(model, texts("b c"))
    assert (lengths, sizes, masks) == ([3], [2], [None])
    slow = bag({"a": 0.5, "b": 1.0})
    object.__setattr__(slow, "tokenizer", SimpleNamespace(is_fast=False))
    refuses("the tokenizer of bag does not say which characters", marked_tokens, slow, "a b", ((0, 1),))
    assert marked_tokens(slow, "a b", None) is None

    class Odd:
        """A tokenizer whose special tokens have characters, as the name of one that stands in a text."""

        is_fast = True

        def __call__(self, text, **_):
            return {"offset_mapping": [(0, 3), (4, 5), (6, 9)], "special_tokens_mask": [1, 0, 0]}

    object.__setattr__(slow, "tokenizer", Odd())
    assert marked_tokens(slow, "<s> a b c", ((0, 9),)).tolist() == [False, True, True]
    assert marked_tokens(slow, "<s> a b c", ((5, 7),)).tolist() == [False, False, True]
    assert marked_tokens(slow, "<s> a b c", ((0, 3),)) is None
    refuses(r"row 2 of toy \(test\): the text is empty", read_texts, model, texts("a", " "))


def test_a_methods_scores_are_those_of_ordinary_tokens():
    ids = torch.zeros(2, 4, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]).bool()
    batch = Batch(ids, mask, (("s", "a", "b", "e"), ("s", "a")), ((None, 0, 1, None), (None, 0)))
    nan = math.nan
    scores = torch.tensor([[nan, 1.0, 2.0, nan], [nan, 3.0, nan, nan]])
    own, converged = token_scores("mine", Scores(scores, converged=torch.tensor([True, False])), batch)
    assert [row.tolist() for row in own] == [[1, 2], [3]] and converged.tolist() == [True, False]
    assert own[0].dtype == np.float64 and token_scores("mine", Scores(scores), batch)[1] is None
    scores[1, 1] = math.inf
    with pytest.raises(InputError, match="the scores of the method mine are not finite: the model is damaged"):
        token_scores("mine", Scores(scores), batch)
    assert token_scores("mine", Scores(scores), batch, finite=False)[0][1].tolist() == [math.inf]
    with pytest.raises(InputError, match=r"the method mine gives scores of shape \(2, 3\) for \(2, 4\) tokens"):
        token_scores("mine", Scores(scores[:, :3]), batch)


def test_labels_are_matched_by_name_or_by_number():
    model = reader(labels=3)
    unnamed = reader(labels=3)
    unnamed.module.config.id2label = {i: f"LABEL_{i}" for i in range(3)}
    some = text_data("d", "all", ["a", "b", "c"], [0, 1, 0], ("class 2", "class 0"))
    other = text_data("d", "all", ["a", "b", "c"], [2, 1, 0], ("u", "v", "w"))
    two = text_data("d", "all", ["a", "b"], [1, 0], ("u", "v"))
    assert class_ids(model, some).tolist() == [2, 0, 2] and class_ids(unnamed, other).tolist() == [2, 1, 0]
    refuses(
        "d has the classes .*; .* tells apart .*: give data of these; if u, v, w mean the same", class_ids, model, other
    )
    for data in (two, some, dataclasses.replace(other, label_column="label")):
        refuses(r"d has the classes .*; .* tells apart LABEL_0, .*: say which is which", class_ids, unnamed, data)
    assert word_ids(other, ["bad", "fair", "good"]).tolist() == [2, 1, 0]
    refuses(r"words are x, y; d has 3 classes, u, v, w: give one for each, in this order", word_ids, other, ["x", "y"])


def test_measures_are_means_over_what_is_asked():
    """Rows have one answer each, or several positions, some of which are not asked."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 7, generator=draw)
    asked: list[list[int]] = [[3, IGNORED, 0, 6], [IGNORED, 2, IGNORED, IGNORED], [6, 5, 4, IGNORED]]
    logits[0, 0, 3] = logits[2, 1, 5] = 9.0
    examples = ScoredExamples(None, None, torch.tensor(asked))
    rows = [2, 0, 0]
    found = examples.measured(logits[rows], rows)
    for row, own in zip(rows, found):
        p = logits[row].double().softmax(-1)
        each = [(p[at, target], float(p[at].argmax() == target)) for at, target in enumerate(asked[row]) if target >= 0]
        expected = np.mean([[-math.log(p), right, p] for p, right in each], axis=0)
        assert own == pytest.approx(expected, rel=1e-5)
    cut = examples.measured(logits[:1, :2], [0])  # of the first two positions one is asked
    assert cut[0, 2] == pytest.approx(float(logits[0, 0].softmax(-1)[3]), rel=1e-5) and cut[0, 1] == 1
    classes = ScoredExamples(None, None, torch.tensor([4, 0, 2]))
    (own,) = classes.measured(logits[1, :1], [2])
    assert own[2] == pytest.approx(float(logits[1, 0].softmax(-1)[2]), rel=1e-5)
    assert classes.measured(torch.tensor([[0.0, 0.5]], dtype=torch.bfloat16), [1])[0, 0] == pytest.approx(0.974077)


def test_examples_of_every_kind_fit_their_models(images):
    language, model = Model(random_example("mamba"), name="mine"), reader(labels=3)
    rows = TokenData("t", "all", ROWS, np.where(ROWS > 4, ROWS, IGNORED), tuple("abc"))
    found = scored_examples(language, rows)
    assert found.targets.tolist() == rows.targets.tolist() and found.batch.input_ids.tolist() == ROWS.tolist()
    assert len(found) == 2 and found.room == 4096
    sequences = SequenceData("s", "all", ROWS, np.array([2, 0]), tuple("abc"), ("class 0", "class 1", "class 2"))
    assert scored_examples(model, sequences).targets.tolist() == [2, 0]
    named = dataclasses.replace(texts("a b", "c"), label_names=("class 2", "class 0"))
    found = scored_examples(model, named)
    assert found.batch.lengths == [3, 2] and found.targets.tolist() == [2, 0]
    one = dataclasses.replace(PIXELS, pixels=np.full((2, 1024, 3), 9, dtype=np.uint8), shape=(32, 32))
    one = dataclasses.replace(one, label_names=("cat", "dog"))
    assert scored_examples(images, one).targets.tolist() == [5, 3]
    assert scored_examples(images, one).batch.values.shape == (2, 1024, 3)
    for given, data, line in (
        (language, texts("a"), "TextData was given, and mine is a language model: give rows of text"),
        (model, rows, "TokenData was given, and .* is a classifier: give labelled examples"),
        (model, SimpleNamespace(name="n"), "data of SimpleNamespace was given; give labelled texts"),
        (language, dataclasses.replace(rows, targets=np.where(ROWS > 7, ROWS, IGNORED)), r"a row of t \(all\) asks"),
        (model, dataclasses.replace(sequences, labels=np.array([3, 0])), r"s \(all\) has the class 3, and names of 3"),
        (model, dataclasses.replace(sequences, labels=np.array([0, -1])), r"s \(all\) has the class -1, and names"),
    ):
        refuses(line, scored_examples, given, data)


def test_heads_and_intervals(monkeypatch):
    model: Any = SimpleNamespace(name="mine")
    check_heads(model, 256, "leave it")
    refuses("the 257 heads of mine are single channels; leave it", check_heads, model, 257, "leave it")
    columns = np.random.default_rng(0).random((5, 3, 2))
    found = means_with_intervals(columns, 0)
    assert found.shape == (3, 2, 3) and found[..., 0] == pytest.approx(columns.mean(0))
    assert (found[..., 1] < found[..., 0]).all() and (found[..., 0] < found[..., 2]).all()
    one = means_with_intervals(columns[:1], 0)
    assert one[..., 0] == pytest.approx(columns[0]) and np.isnan(one[..., 1:]).all()
    two = means_with_intervals(columns[:2], 0)
    assert np.isfinite(two).all()
    assert scoring.HARM_SIGNS == (1, -1, -1) and scoring.MEASURES == ("loss", "accuracy", "probability")


def explained(model: Model, *lines: str) -> Any:
    from ssmscope.interp.objective import objective

    return objective(model, model.encode(list(lines)), target=1)


def test_a_baseline_is_singular_where_it_is_far_smaller_than_the_typical_embedding(monkeypatch):
    """Embeddings of one number, whose sizes are 0, 0, 0, 2, 4, 8, 16: the typical one is 2."""
    monkeypatch.setattr(baselines, "SINGULAR_SHARE", 0.25)
    goal = explained(bag({"a": -2.0, "b": 4.0, "c": 8.0, "d": -16.0}), "a b", "c")
    start = torch.tensor([[4.0, -0.5, 1.0], [8.0, 0.5, 0.0]]).unsqueeze(-1)  # the last place is padding
    assert goal.batch.mask.tolist() == [[True, True, True], [True, True, False]]
    assert singularity_note(goal, start) == ""
    start[0, 1] = -0.4375
    assert singularity_note(goal, start) == (
        "its baseline is near the point where norms are singular (embeddings of size 0.44, the typical one is 2): "
        "scores depend on small changes of it"
    )


def test_the_unknown_word_is_neutral_where_it_was_trained(monkeypatch):
    monkeypatch.setattr(baselines, "SINGULAR_SHARE", 0.25)
    model = bag({"a": -2.0, "b": 4.0, "c": 8.0, "d": -16.0})
    table = model.module.words.weight
    for size, name in ((0.5, "the token [UNK]"), (0.4375, "the mean embedding at the median size of embeddings")):
        table[1] = size
        assert baseline_name(explained(model, "a b")) == name
    table[1] = 0.0
    mean, size = table.mean(), 2.0
    found = baseline_embeddings(explained(model, "a b", "c"))
    assert found[0, :, 0].tolist() == pytest.approx([math.copysign(size, mean)] * 3) and found[1, 2] == 0
    odd = bag({"a": -2.0, "b": 4.0})
    for number, name in ((4, "the token b"), (5, "the mean embedding at the median size of embeddings")):
        odd.tokenizer.backend_tokenizer.add_tokens(["[UNK2]"])
        odd.tokenizer._special_tokens_map["unk_token"] = "b" if number == 4 else "[UNK2]"
        assert odd.tokenizer.unk_token_id == number and baseline_name(explained(odd, "a b")) == name


def test_baselines_by_name():
    model = reader()
    goal = explained(model, "a b c", "d")
    table = model.module.get_input_embeddings().weight.detach()
    for given, place, name in (
        ("a", 3, "the token a"), ("pad", 0, "the token [PAD]"), ("[CLS]", 2, "the token [CLS]"),
        ("cls", 2, "the token [CLS]"), (4, 4, "the token b"), ("12", 12, "the token j"),
        (np.int64(12), 12, "the token j"), (0, 0, "the token [PAD]"),
    ):  # fmt: skip
        assert baseline_name(goal, given) == name
        torch.testing.assert_close(baseline_embeddings(goal, given)[1], table[place] * goal.batch.mask[1][:, None])
    assert baseline_name(goal, "mean") == "the mean embedding" and baseline_name(goal, "zero") == "a zero embedding"
    assert baseline_name(goal, "scaled-mean") == "the mean embedding at the median size of embeddings"
    assert ordinary_tokens(goal).tolist() == [[True, True, True, False], [True, False, False, False]]
    without = dataclasses.replace(goal, model=dataclasses.replace(model, tokenizer=None))
    assert baseline_name(without, "12") == "the token 12"
    for found, given, line in (
        (goal, 13, "there is no token 13 for a baseline; ids are 0 to 12"),
        (goal, "13", "there is no token 13 for a baseline"),
        (goal, -1, "there is no token -1"),
        (goal, "mask", "has no mask token; allowed are 'neutral', .*, a token's id and a token$"),
        (goal, "pat", "unknown baseline 'pat'; allowed are .*did you mean 'pad'"),
        (goal, 1.5, "unknown baseline 1.5"),
        (goal, True, "unknown baseline True"),
        (without, "pad", "unknown baseline 'pad'; allowed are 'neutral', 'scaled-mean', 'mean', 'zero', a token's id"),
    ):
        refuses(line, baseline_embeddings, found, given)


def test_greys_of_images(images):
    from ssmscope.interp.objective import objective

    goal = objective(images, images.encode(values=np.full((1, 4, 3), 200, dtype=np.uint8)), target=0)
    for given, grey in (("neutral", 0.5), ("mean", 0.5), ("scaled-mean", 0.5), (0, 0.0), (1, 1.0), ("0.25", 0.25)):
        assert baseline_name(goal, given) == f"a grey of {grey:g}"
        expected = images.module.embed(torch.full((3,), grey)).detach()
        torch.testing.assert_close(baseline_embeddings(goal, given)[0, 3], expected)
    for given in (1.01, -0.01, "grey", "meam"):
        refuses(f"unknown baseline {given!r} for the pixels of .*a grey from 0 to 1", baseline_embeddings, goal, given)
    assert baseline_embeddings(goal, "zero").abs().max() == 0 and baseline_name(goal, "zero") == "a zero embedding"
    small = baseline_embeddings(goal, "zero") + 0.001
    typical = goal.embeddings().square().mean(-1).sqrt().median().item()
    assert f"embeddings of size 0.001, the typical one is {typical:.2g}" in singularity_note(goal, small)
