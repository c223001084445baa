"""The labels of a file are names, or indices: all of them, and which is decided once."""

from __future__ import annotations

import random

import pytest

from ssmscope.data.rows import class_ids, label_column, sorted_names
from ssmscope.data.text import load_text
from ssmscope.errors import InputError

STARS = ("1", "2", "3")
SWAPPED = ("1", "0")


@pytest.mark.parametrize(
    ("labels", "names", "expected"),
    [
        (["negative", "positive"], ("negative", "positive"), [0, 1]),
        (["0", "1"], ("negative", "positive"), [0, 1]),
        (["1", "2", "3", "1"], STARS, [0, 1, 2, 0]),
        (["3"], STARS, [2]),
        (["0", "2", "1"], STARS, [0, 2, 1]),
        (["0", "1"], ("0", "1"), [0, 1]),
        (["1", "1"], ("0", "1", "two"), [1, 1]),
    ],
)
def test_all_are_names_or_all_indices(labels, names, expected) -> None:
    assert class_ids(labels, names, "a.csv", "label") == expected


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        (["1", "2"], STARS, "'1' of a.csv is the name of one class and the index of another .*1, 2, 3.*label_name"),
        (["0", "1"], SWAPPED, "'0' of a.csv is the name of one class and the index of another"),
        (["0", "1", "3"], STARS, r"'3' \(row 3\), a class's name, and '0' \(row 1\), a class's index"),
        (["positive", "1", "0"], ("negative", "positive"), r"'positive' \(row 1\), a class's name, and '1' \(row 2\)"),
        (["1", "4"], STARS, "row 2 of a.csv has the label '4'; allowed are 1, 2, 3"),
        (["01"], ("a", "b"), "row 1 of a.csv has the label '01'"),
    ],
)
def test_what_is_ambiguous_or_unknown_is_refused(labels, names, message) -> None:
    with pytest.raises(InputError, match=message) as caught:
        class_ids(labels, names, "a.csv", "label")
    assert "\n" not in str(caught.value)


def test_the_column_says_what_labels_are() -> None:
    assert class_ids(["1", "2"], STARS, "a.csv", "label_name") == [0, 1]
    assert class_ids(["1", "2"], STARS, "a.csv", "label_index") == [1, 2]
    with pytest.raises(InputError, match="label '3'; allowed are 0 to 2"):
        class_ids(["3"], STARS, "a.csv", "label_index")
    with pytest.raises(InputError, match="label '0'; allowed are 1, 2, 3"):
        class_ids(["0"], STARS, "a.csv", "label_name")
    assert label_column({"text": "", "label_name": ""}) == "label_name"
    assert label_column({"label_name": "", "label": ""}) == label_column({}) == "label"


def test_the_labels_of_a_like_file_are_names_where_they_can_be() -> None:
    assert class_ids(["1", "2"], STARS, "a.csv", "label", as_written=True) == [0, 1]
    assert class_ids(["0", "2"], STARS, "a.csv", "label", as_written=True) == [0, 2]


def test_no_reading_depends_on_the_order_of_rows() -> None:
    draw = random.Random(0)
    for _ in range(300):
        names = tuple(draw.sample(["0", "1", "2", "3", "a", "b"], draw.randint(2, 4)))
        labels = [draw.choice([*names, "0", "1"]) for _ in range(draw.randint(1, 5))]
        shuffled = draw.sample(range(len(labels)), len(labels))
        found = []
        for order in (range(len(labels)), shuffled):
            try:
                ids = class_ids([labels[i] for i in order], names, "a.csv", "label")
                found.append(sorted(zip(order, ids)))
            except InputError:
                found.append(None)
        assert found[0] == found[1]
        if found[0] is not None:
            ids = [at for _, at in found[0]]
            assert ids == [names.index(x) if x in names else -1 for x in labels] or ids == [
                int(x) if x.isdecimal() else -1 for x in labels
            ]


def test_a_file_of_numbers_is_read_as_a_whole(tmp_path) -> None:
    path = tmp_path / "stars.csv"
    path.write_text("text,label\ndull,1\nfine,2\ngreat,3\n")
    assert load_text(path, label_names=STARS).labels == (0, 1, 2)
    path.write_text("text,label\ndull,0\nfine,1\ngreat,2\n")
    assert load_text(path, label_names=STARS).labels == (0, 1, 2)
    path.write_text("text,label\ndull,1\nfine,2\n")
    with pytest.raises(InputError, match="rename the column to label_name or to label_index"):
        load_text(path, label_names=STARS)
    path.write_text("text,label_index\ndull,1\nfine,2\n")
    assert load_text(path, label_names=STARS).labels == (1, 2)
    assert load_text(path).label_names == ("1", "2")


def test_whole_numbers_are_sorted_by_value_and_always_alike() -> None:
    assert sorted_names(["10", "9", "01", "1"]) == ("01", "1", "9", "10")
    assert sorted_names(["b", "10", "9"]) == ("10", "9", "b")
