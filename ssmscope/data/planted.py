"""Texts whose label has one known reason planted in filler, so that the words an explanation must find are known.

Four tasks of two classes:

- `planted-words`: one of eight words determines the class.
- `planted-recall`: the text has pairs of a name and a colour, and asks for the colour of one name at the end.
- `planted-xor`: the text has two words of direction, and the label says whether they are the same.
- `planted-position`: the text has several of the eight words, and only the first counts.

Filler, length and positions of the planted words do not depend on the label, except for that "first".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

Row = dict[str, Any]

FILLER = (
    *("the a of to in on at by with from for and or as so then there here one two some any each this that").split(),
    *(
        "river table window garden street paper bottle mountain train letter kitchen forest engine basket bridge"
    ).split(),
    *("stood turned carried opened reached followed placed covered counted moved waited measured").split(),
    *("old small wooden early quiet narrow heavy plain round distant").split(),
)
NEGATIVE, POSITIVE = ("dreadful", "tedious", "clumsy", "hollow"), ("splendid", "moving", "graceful", "witty")
NAMES = ("anna", "boris", "clara", "david", "edith", "felix", "grace", "henry", "irene", "jonas", "karen", "louis")
COLOURS = ("red", "blue")
DIRECTIONS = ("north", "south")
MIN_WORDS, MAX_WORDS = 12, 32
"""Range of the number of words of a text."""
PAIRS = 4
SIZES = {"train": 16_000, "validation": 1_000, "test": 1_000}
"""Number of texts of each split; each split is drawn separately."""


def _filled(draw: random.Random, planted: list[tuple[list[str], bool]], after: list[tuple[str, bool]]) -> Row:
    """Put each group of `planted`, words and whether they are a reason, at a random place in filler, and `after` at the
    end; the groups keep their order."""
    count = draw.randint(MIN_WORDS, MAX_WORDS) - sum(len(words) for words, _ in planted) - len(after)
    places = sorted(draw.randint(0, count) for _ in planted)
    words: list[tuple[str, bool]] = []
    filler = [draw.choice(FILLER) for _ in range(count)]
    for at in range(count + 1):
        for place, (together, reason) in zip(places, planted):
            if place == at:
                words += [(word, reason) for word in together]
        words += [(word, False) for word in filler[at : at + 1]]
    words += after
    return {"text": " ".join(word for word, _ in words), "rationale": [int(reason) for _, reason in words]}


def _words(draw: random.Random, label: int) -> Row:
    return _filled(draw, [([draw.choice((NEGATIVE, POSITIVE)[label])], True)], [])


def _recall(draw: random.Random, label: int) -> Row:
    names = draw.sample(NAMES, PAIRS)
    asked = draw.randrange(PAIRS)
    colours = [label if i == asked else draw.randrange(2) for i in range(PAIRS)]
    pairs = [([name, COLOURS[colour]], i == asked) for i, (name, colour) in enumerate(zip(names, colours))]
    return _filled(draw, pairs, [("colour", False), ("of", False), (names[asked], True), ("?", False)])


def _xor(draw: random.Random, label: int) -> Row:
    first = draw.randrange(2)
    return _filled(draw, [([DIRECTIONS[first]], True), ([DIRECTIONS[first ^ label]], True)], [])


def _position(draw: random.Random, label: int) -> Row:
    classes = [label, *(draw.randrange(2) for _ in range(3))]
    return _filled(draw, [([draw.choice((NEGATIVE, POSITIVE)[c])], i == 0) for i, c in enumerate(classes)], [])


TASKS: Mapping[str, tuple[Callable[[random.Random, int], Row], tuple[str, str]]] = MappingProxyType(
    {
        "planted-words": (_words, ("negative", "positive")),
        "planted-recall": (_recall, COLOURS),
        "planted-xor": (_xor, ("same", "different")),
        "planted-position": (_position, ("negative", "positive")),
    }
)
"""Function that draws a text of a class, and the class names, by task."""


def planted(name: str, split: str) -> list[Row]:
    """Draw the rows of a task: `text`, `label` (0 and 1, equally often) and `rationale`, a 0 or 1 for every word. Every
    call gives the same rows. Each split has its own seed; splits are not checked for common texts."""
    draw, (of, _) = random.Random(f"{name} {split}"), TASKS[name]
    return [{**of(draw, at % 2), "label": at % 2} for at in range(SIZES[split])]
