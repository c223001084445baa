"""Filler sentences to put between the facts of a story: from a text or from a small grammar."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from ssmscope.data.language import load_lines
from ssmscope.data.stories import NAMES
from ssmscope.data.text import LINE_SOURCES
from ssmscope.errors import InputError

WORLD = frozenset(name.lower() for names in NAMES.values() for name in names)


@lru_cache(maxsize=2)  # A filler can be a whole book and is used for every task and length.
def _without_world(filler: tuple[str, ...]) -> list[str]:
    return [" ".join(s.split()) for s in filler if s.strip() and WORLD.isdisjoint(re.findall(r"\w+", s.lower()))]


def without_world(filler: Sequence[str]) -> list[str]:
    """Return the sentences that name nothing of the world, with single spaces; raise InputError if there is none."""
    if isinstance(filler, str):
        raise InputError("the filler is one text; give sentences, e.g. of sentences(load_lines('wikitext2'))")
    if kept := _without_world(tuple(filler)):
        return kept
    raise InputError(f"none of {len(filler)} sentences of filler can be used: they are empty or name the world's words")


GENERATED = "generated"


def load_filler(source: str | Path | None, split: str = "test") -> tuple[str, ...] | None:
    """Load the sentences of a known text or a file as filler; return None for `generated` or None, the grammar's.
    Questions of the split `test` use a known text's test split, all others its validation split."""
    if source is None or source == GENERATED:
        return None
    known = str(source) in LINE_SOURCES
    return sentences(load_lines(source, ("test" if split == "test" else "validation") if known else None))


def sentences(lines: Sequence[str]) -> tuple[str, ...]:
    """Split lines of prose into sentences, in order; raise InputError if there is none. Headings (`= Title =`), blank
    lines and fragments of fewer than three words are left out. In a line with spaces before full stops, as in WikiText,
    only those end a sentence; elsewhere a full stop ends one if a space and a capital letter, digit or quote follow."""
    found: list[str] = []
    for line in lines:
        text = " ".join(line.split())
        if text.startswith("=") and text.endswith("="):
            continue
        apart = re.search(r" [.!?](?: |$)", text)
        parts = re.split(r"(?<= [.!?]) " if apart else r"(?<=[.!?]) (?=[\"'“(]?[A-Z0-9])", text)
        found += [part for part in parts if len(part.split()) >= 3]
    if not found:
        raise InputError(f"there is no sentence in the {len(lines)} lines that were given")
    return tuple(found)


OPENINGS = (
    "The", "In spring the", "After heavy rain the", "On most days the", "For many years the", "Near the coast the",
    "Before dawn the", "Every autumn the", "Once in a while the", "Far from any road the",
)  # fmt: skip
QUALITIES = ("old", "pale", "quiet", "broad", "northerly", "restless", "well known", "small", "grey", "distant")
THINGS = tuple("river wind forest meadow sparrow mountain cloud harvest tide village oak fog".split())
DEEDS = (
    "changes", "rests", "grows", "turns towards the sea", "gives way to frost", "keeps its shape", "fades",
    "is hard to see", "looks almost blue", "comes into view", "shines", "carries the scent of pine",
)  # fmt: skip
ENDINGS = (
    "", " without a sound", " for a short time", " before the first snow falls", " and nobody knows why",
    " as it did a hundred years ago", " in the evening light", " although the air is dry", " again",
)  # fmt: skip


def generated(random: np.random.Generator, number: int, spaced: bool = True) -> list[str]:
    """Draw sentences of a small grammar that name nothing of the world: `In spring the old river changes again .`"""
    parts = (OPENINGS, QUALITIES, THINGS, DEEDS, ENDINGS)
    columns = [np.array(part)[random.integers(len(part), size=number)].tolist() for part in parts]
    made = [f"{opening} {quality} {thing} {deed}{ending}." for opening, quality, thing, deed, ending in zip(*columns)]
    return list(map(spaced_out, made)) if spaced else made


def spaced_out(sentence: str) -> str:
    """Put a space before the sentence's last character, a full stop or question mark."""
    return f"{sentence[:-1]} {sentence[-1]}"
