"""Texts whose reason is planted: the label follows from the marked words alone, read here another way."""

import pytest
from refusals import refuses
from ssmscope.data.planted import COLOURS, DIRECTIONS, FILLER, MAX_WORDS, MIN_WORDS, NEGATIVE, POSITIVE, TASKS
from ssmscope.data.text import SOURCES, load_text


def label_of(name: str, words: list[str]) -> int:
    """The label as the task is worded, from the whole text."""
    if name == "planted-recall":
        asked = words[-2]
        return COLOURS.index(words[words.index(asked) + 1])
    if name == "planted-xor":
        one, other = (word for word in words if word in DIRECTIONS)
        return int(one != other)
    of_class = [int(word in POSITIVE) for word in words if word in POSITIVE + NEGATIVE]
    assert len(of_class) == (1 if name == "planted-words" else 4)
    return of_class[0]


@pytest.mark.parametrize("name", TASKS)
def test_the_label_follows_from_what_is_marked(name: str) -> None:
    data = load_text(name, "validation")
    assert len(data) == 1000 and sum(data.labels) == 500 and data.label_names == SOURCES[name].labels
    assert data.fingerprint == load_text(name, "validation").fingerprint != load_text(name, "test").fingerprint
    for text, label, spans in zip(data.texts, data.labels, data.rationales, strict=True):
        words = text.split()
        assert MIN_WORDS <= len(words) <= MAX_WORDS and label_of(name, words) == label
        marked = [text[start:end] for start, end in spans]
        assert not set(marked) & set(FILLER)
        if name == "planted-recall":
            assert marked == [words[-2], COLOURS[label], words[-2]]
        elif name == "planted-xor":
            assert len(marked) == 2 and label == int(marked[0] != marked[1])
        else:
            assert len(marked) == 1 and (marked[0] in POSITIVE) == bool(label)
            assert not set(words[: words.index(marked[0])]) & set(POSITIVE + NEGATIVE)


@pytest.mark.parametrize("name", TASKS)
def test_nothing_else_gives_the_label_away(name: str) -> None:
    """Lengths and places of what is marked are alike in both classes, and so are single words but the planted one."""
    data = load_text(name, "train")
    lengths, places = ([], []), ([], [])
    for text, label, spans in zip(data.texts, data.labels, data.rationales, strict=True):
        lengths[label].append(len(text.split()))
        places[label].append(len(text[: spans[0][0]].split()))
    for pair in (lengths, places):
        means = [sum(values) / len(values) for values in pair]
        spread = (sum((v - means[0]) ** 2 for v in pair[0]) / len(pair[0])) ** 0.5
        assert abs(means[0] - means[1]) < 4 * spread * (2 / len(pair[0])) ** 0.5
    if name == "planted-xor":  # neither direction alone says anything
        for direction in DIRECTIONS:
            share = [
                sum(direction in t.split() for t, y in zip(data.texts, data.labels) if y == label) for label in (0, 1)
            ]
            assert share[1] == 8000 and abs(share[0] - 4000) < 4 * 8000**0.5 / 2


def test_it_needs_no_folder_of_data(monkeypatch, tmp_path) -> None:
    expected = load_text("planted-xor", "test").fingerprint
    for folder in (None, str(tmp_path)):
        monkeypatch.delenv("SSMSCOPE_DATA", raising=False) if folder is None else monkeypatch.setenv(
            "SSMSCOPE_DATA", folder
        )
        assert load_text("planted-xor").fingerprint == expected
    refuses("planted-xor has no labelled split 'tests'; .*did you mean 'test'", load_text, "planted-xor", "tests")
