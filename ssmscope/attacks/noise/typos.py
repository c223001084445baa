"""Typing errors in a text."""

from __future__ import annotations

import zlib

import numpy as np

ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
NEIGHBOURS = {
    key: "".join(
        other
        for number, line in enumerate(ROWS)
        for place, other in enumerate(line)
        if other != key and abs(number - row) <= 1 and abs(place + number / 2 - at - row / 2) <= 1
    )
    for row, keys in enumerate(ROWS)
    for at, key in enumerate(keys)
}
"""Keys next to each key of a QWERTY keyboard, whose rows are each half a key further to the right."""


def with_typos(text: str, rate: float, seed: int) -> str:
    """Return a text with the errors of `typed`."""
    return typed(text, rate, seed)[0]


def typed(text: str, rate: float, seed: int) -> tuple[str, int]:
    """Return a text in which letters have an error, and the number of errors. Each letter is drawn with probability
    `rate` and then swapped with the next letter, left out, doubled, or replaced by a neighbouring key, each with
    probability 1/4. A letter without the partner that its error needs is doubled, and a swap takes the next letter with
    it, whose own error is lost: there are fewer errors than the rate says, fewer swaps and more doubled letters. Random
    numbers depend on text and seed alone, and the errors of a lower rate are among those of a higher one, unless a swap
    takes or moves them."""
    random = np.random.default_rng([seed, zlib.crc32(text.encode(errors="surrogatepass"))])
    hit, kinds, keys = random.random(len(text)), random.integers(4, size=len(text)), random.random(len(text))
    made, at, errors = [], 0, 0
    while at < len(text):
        letter, after, drawn = text[at], text[at + 1 : at + 2], bool(hit[at] < rate)
        if not letter.isalpha() or not drawn:
            made.append(letter)
        elif kinds[at] == 0 and after.isalpha():
            made.append(after + letter)
            at += 1
        elif kinds[at] == 1 and (after.isalpha() or text[at - 1 : at].isalpha()):
            pass
        elif kinds[at] == 2 and (near := NEIGHBOURS.get(letter.lower())):
            key = near[int(keys[at] * len(near))]
            made.append(key.upper() if letter.isupper() else key)
        else:
            made.append(2 * letter)
        errors += letter.isalpha() and drawn
        at += 1
    return "".join(made), errors
