"""Majority and ListOps; the published checkpoints' accuracies on them are in tests/architectures/test_load.py."""

import numpy as np
import pytest
from refusals import refuses
from ssmscope.errors import InputError
from ssmscope.zoo.sequences import LISTOPS, listops, majority


def test_majority():
    train, test = majority(25, examples=4000, seed=3)
    assert train.ids.shape == test.ids.shape == (4000, 25) and set(np.unique(train.ids)) == {0, 1}
    assert (test.labels == (test.ids.sum(1) > 12.5)).all()
    ones = test.ids.sum(1)
    assert ones.min() == 0 and ones.max() == 25 and abs(ones.mean() - 12.5) < 0.5  # uniform on 0…25
    assert abs(train.ids.sum() / 4000 - 12.5 * 0.75) < 0.4  # a quarter of the ones is gone
    clean, same = majority(25, examples=4000, flipped=0.0, seed=3)
    assert (clean.labels == train.labels).all() and (same.ids == test.ids).all()
    assert (clean.labels == (clean.ids.sum(1) > 12.5)).all() and (train.ids <= clean.ids).all()
    assert (majority(9, seed=1)[0].ids == majority(9, seed=1)[0].ids).all()
    assert not (majority(9, seed=1)[0].ids == majority(9, seed=2)[0].ids).all()


@pytest.mark.parametrize("options", [dict(length=0), dict(length=3, examples=0), dict(length=3, flipped=1.5)])
def test_majority_refuses(options):
    with pytest.raises(InputError):
        majority(**options)


def test_listops():
    data = listops(["( ( [MAX 4 ) 7 ) ]", "3"], [7, 3])
    assert data.ids.tolist() == [[11, 4, 7, 14], [3, 15, 15, 15]] and data.labels.tolist() == [7, 3]
    assert [data.tokens[i] for i in data.ids[0]] == ["[MAX", "4", "7", "]"] and len(LISTOPS) == 16
    assert listops(["3", "[SM 1 2 ]"], [3, 3], width=6).ids.tolist() == [
        [3, 15, 15, 15, 15, 15],
        [13, 1, 2, 14, 15, 15],
    ]
    refuses("width is 3, and an expression has 4 tokens", listops, ["[SM 1 2 ]"], [3], width=3)
    refuses(r"'\[FIRST' is not a token of ListOps", listops, ["[FIRST 1 ]"], [1])
    refuses("as many of each", listops, [], [])
