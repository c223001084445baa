"""Random ListOps expressions against the process that they stand for, a slow evaluator, and the authors' files."""

import random
import statistics
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from refusals import refuses
from written_rows import write_rows
from ssmscope.data.tokens import ArrayData
from ssmscope.zoo.sequences import LISTOPS, evaluate, listops_expressions
from ssmscope.zoo.training.data import parts_of

PAD = LISTOPS.index("[PAD]")


def texts_of(data):
    return [" ".join(LISTOPS[i] for i in row if i != PAD) for row in data.ids]


def nested(text):
    """An expression as nested lists: an operator's name, then values."""
    tokens = iter(text.split())

    def value(token):
        return [token[1:], *map(value, iter(lambda: next(tokens), "]"))] if token[0] == "[" else int(token)

    return value(next(tokens))


OPERATIONS = {"MIN": min, "MAX": max, "SM": lambda v: sum(v) % 10, "MED": lambda v: int(statistics.median(v))}


def slow(tree):
    return OPERATIONS[tree[0]]([slow(v) for v in tree[1:]]) if isinstance(tree, list) else tree


def size(tree):
    return 2 + sum(map(size, tree[1:])) if isinstance(tree, list) else 1


def depth(tree):
    return 1 + max(map(depth, tree[1:])) if isinstance(tree, list) else 0


def numbers(tree):
    """Return the number of values of each expression within."""
    return [len(tree) - 1, *(n for v in tree[1:] for n in numbers(v))] if isinstance(tree, list) else []


def places(tree):
    """Return the place of each inner expression among its neighbours, from 0 to 1."""
    if not isinstance(tree, list):
        return []
    own = [i / (len(tree) - 2) for i, v in enumerate(tree[1:]) if isinstance(v, list)]
    return own + [p for v in tree[1:] for p in places(v)]


def shares(values):
    counts = Counter(values)
    return {value: count / counts.total() for value, count in counts.items()}


def distance(one, other):
    """Return the total variation: half the sum of differences of the shares."""
    a, b = shares(one), shares(other)
    return sum(abs(a.get(value, 0) - b.get(value, 0)) for value in {*a, *b}) / 2


def grown(draw, most):
    """An expression as the definition says; None once it is longer than `most`."""
    used = 0

    def value(level):
        nonlocal used
        used += 1
        if used > most:
            raise OverflowError
        if level == 1 or (level < 10 and draw.random() < 0.25):
            used += 1
            values = [value(level + 1) for _ in range(draw.randint(2, 10))]
            return [draw.choice([*OPERATIONS]), *values]
        return draw.randrange(10)

    try:
        return value(1)
    except OverflowError:
        return None


hundred = pytest.fixture(scope="module")(lambda: listops_expressions(100, examples=1000, seed=4))


def test_labels_are_the_values(hundred):
    for data in hundred:
        assert [slow(nested(text)) for text in texts_of(data)] == data.labels.tolist()


@pytest.mark.parametrize("text, value", [
    ("[MED 1 4 ]", 2), ("[MED 9 0 4 8 ]", 6), ("[MED 7 1 5 ]", 5), ("[SM 9 9 3 ]", 1),
    ("( ( ( [MAX 4 ) ( ( ( [MIN 9 ) 7 ) ] ) ) ] )", 7), ("[MIN 3 [SM 5 6 ] 8 ]", 1), ("3", 3),
])  # fmt: skip
def test_evaluate(text, value):
    assert evaluate(text) == value


@pytest.mark.parametrize("text, message", [
    ("", "has 0 values"), ("1 2", "has 2 values"), ("[MAX 1 2", "has 1 unclosed brackets"),
    ("[MAX ]", "']' has no place"), ("1 ]", "']' has no place"), ("[FIRST 1 2 ]", r"'\[FIRST' has no place"),
    ("[MAX 10 2 ]", "'10' has no place"),
])  # fmt: skip
def test_evaluate_refuses(text, message):
    refuses(message, evaluate, text)


def test_form(hundred):
    train, test = hundred
    assert isinstance(train, ArrayData) and (train.split, test.split) == ("train", "test")
    for data in hundred:
        assert data.ids.shape == (1000, 104) and data.ids.dtype == data.labels.dtype == np.int64
        assert data.tokens == LISTOPS and data.label_names == tuple("0123456789")
        trees = [nested(text) for text in texts_of(data)]
        lengths = (data.ids != PAD).sum(1)
        assert [size(tree) for tree in trees] == lengths.tolist()  # the padding is on the right
        assert set(lengths.tolist()) == set(range(96, 105))
        assert max(map(depth, trees)) == 9 and {n for tree in trees for n in numbers(tree)} == set(range(2, 11))
        counts = np.bincount(data.ids[data.ids != PAD], minlength=15)
        for alike in (counts[:10], counts[10:14]):  # digits and operators are uniform
            assert abs(alike / alike.mean() - 1).max() < 0.06


def test_distribution_is_that_of_the_definition():
    """Expressions of 16 to 24 tokens, against ones that grew and were kept for their length."""
    drawn = [nested(text) for data in listops_expressions(20, examples=3000, seed=1) for text in texts_of(data)]
    draw, kept = random.Random(0), []
    while len(kept) < 6000:
        tree = grown(draw, 24)
        if tree is not None and 16 <= size(tree) <= 24:
            kept.append(tree)
    for view in (lambda tree: [size(tree)], lambda tree: [depth(tree)], numbers, places):
        assert distance(*([v for tree in trees for v in view(tree)] for trees in (drawn, kept))) < 0.03
    assert distance(map(slow, drawn), map(slow, kept)) < 0.04


def test_seeds_and_streams():
    train, test = listops_expressions(30, examples=40, seed=2)
    again, same = listops_expressions(30, examples=40, seed=2)
    assert train.fingerprint == again.fingerprint and test.fingerprint == same.fingerprint
    assert listops_expressions(30, examples=40, seed=3)[0].fingerprint != train.fingerprint
    longer = listops_expressions(30, examples=60, seed=2)
    assert (longer[0].ids[:40] == train.ids).all() and (longer[1].ids[:40] == test.ids).all()


def test_no_expression_comes_twice():
    """There are only 400 expressions of 4 tokens."""
    train, test = listops_expressions(8, examples=2000, seed=0)
    assert len({*texts_of(train), *texts_of(test)}) == 4000 and train.ids.shape[1] == 12
    assert {size(nested(text)) for text in texts_of(train)} == set(range(4, 13))


def test_long_ones():
    train, _ = listops_expressions(1000, examples=10)
    assert train.ids.shape == (10, 1004) and 996 <= (train.ids != PAD).sum(1).min()
    assert [slow(nested(text)) for text in texts_of(train)] == train.labels.tolist()


@pytest.mark.parametrize("options, message", [
    (dict(length=7), "length is 7; allowed is a whole number from 8 on"),
    (dict(length=2001), "length is 2,001; allowed are up to 2,000"),
    (dict(length=20, examples=0), "examples is 0"),
    (dict(length=20, seed=-1), "seed is -1; allowed is a whole number from 0 on"),
])  # fmt: skip
def test_refuses(options, message):
    refuses(message, listops_expressions, **options)


@pytest.mark.parametrize("split", ["T100_1000_train", "T100_1000_test", "T200_1000_train", "T300_1000_test"])
def test_the_authors_labels(real_data, split):
    table = pd.read_parquet(real_data("listops", split))
    assert [evaluate(text) for text in table.text] == table.label.tolist()


def test_the_authors_distribution(real_data, hundred):
    table = pd.read_parquet(real_data("listops", "T100_5000_train"))
    theirs = [nested(text.replace("(", " ").replace(")", " ")) for text in table.text]
    ours = [nested(text) for data in hundred for text in texts_of(data)]
    for view in (lambda tree: [size(tree)], lambda tree: [depth(tree)], numbers, places):
        assert distance(*([v for tree in trees for v in view(tree)] for trees in (ours, theirs))) < 0.04
    assert distance(map(slow, ours), map(slow, theirs)) < 0.05


def options(**given):
    base = dict.fromkeys(("split", "validation", "test", "flipped", "vocabulary"))
    return {**base, "data": "listops", "kind": "sequences", "seed": 5, "held_out": 0.0, "share": 1, **given}


def test_training_reads_the_file_or_draws(tmp_path, monkeypatch):
    monkeypatch.delenv("SSMSCOPE_DATA", raising=False)
    parts, tokenizer = parts_of(options(length=20, examples=12))
    expected = listops_expressions(20, examples=12, seed=5)
    assert [parts[split].fingerprint for split in ("train", "test")] == [data.fingerprint for data in expected]
    assert len(tokenizer) == len(LISTOPS)
    for split, text, label in (("train", "( ( [MAX 4 ) 7 ) ]", 7), ("test", "( ( [MIN 4 ) 7 ) ]", 4)):
        write_rows(tmp_path / "listops" / f"T20_12_{split}.parquet", [{"text": text, "label": label}])
    monkeypatch.setenv("SSMSCOPE_DATA", str(tmp_path))
    read, _ = parts_of(options(length=20, examples=12))
    assert texts_of(read["train"]) == ["[MAX 4 7 ]"] and read["test"].labels.tolist() == [4]
    drawn, _ = parts_of(options(length=20, examples=11))  # there is no such file
    assert drawn["train"].ids.shape == (11, 24)
