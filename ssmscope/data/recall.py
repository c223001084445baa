"""Sequences of keys and values in which the value of a repeated key is the target."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from einops import rearrange

from ssmscope.data.tokens import IGNORED, TokenData


@dataclass(frozen=True)
class Recall:
    """Pairs of one key and one value token, some of them noise."""

    name: str
    length: int
    halves: int
    noises: int
    noise: float

    def draw(self, split: str, examples: int, random: np.random.Generator) -> TokenData:
        tokens = (*named("k", self.halves), *named("v", self.halves), *named("noise", self.noises))
        shape = examples, self.length // 2
        rows, place = np.arange(examples), np.arange(shape[1])
        key = random.integers(0, self.halves, shape)
        value = random.integers(self.halves, 2 * self.halves, shape)
        noisy = random.random(shape) < self.noise
        noisy[rows, random.integers(0, shape[1] - 1, examples)] = noisy[:, -1] = False
        first = first_uses(np.where(noisy, -1 - place, key))
        first[:, -1] = one_of(~noisy[:, :-1] & (first == place)[:, :-1], random)
        key[:, -1] = key[rows, first[:, -1]]
        value = np.take_along_axis(value, first, axis=1)
        targets = interleaved(np.where(first < place, value, IGNORED), np.full(shape, IGNORED))
        if self.noises:
            key[noisy], value[noisy] = random.integers(2 * self.halves, len(tokens), (2, noisy.sum()))
        return TokenData(self.name, split, interleaved(key, value), targets, tokens)


@dataclass(frozen=True)
class QueriedRecall:
    """All pairs first, then each of their keys once among other tokens, with its value as the target."""

    length: int
    halves: int
    pairs: int
    power: float

    def draw(self, split: str, examples: int, random: np.random.Generator) -> TokenData:
        tokens = (*named("k", self.halves), *named("v", self.halves))
        begin = 2 * self.pairs
        ids = np.empty((examples, self.length), dtype=np.int64)
        targets = np.full_like(ids, IGNORED)
        places = np.arange(1, (self.length - begin) // 2 + 1)
        spot = begin + 2 * weighted(places ** (self.power - 1), self.pairs, examples, random)
        for row, asked, at in zip(ids, targets, spot):
            key = random.choice(self.halves, self.pairs, replace=False)
            value = self.halves + random.choice(self.halves, self.pairs, replace=False)
            rank = random.integers(0, len(tokens) - self.pairs, self.length)
            # The rank counts the tokens that are none of these keys.
            row[:] = rank + np.searchsorted(np.sort(key) - np.arange(self.pairs), rank, side="right")
            row[0:begin:2], row[1:begin:2] = key, value
            row[at], asked[at] = key, value
        return TokenData("mqar", split, ids, targets, tokens)


@dataclass(frozen=True)
class FuzzyRecall:
    """Pairs of a run of key tokens and a run of value tokens."""

    length: int
    keys: int
    values: int
    key_tokens: int
    value_tokens: int

    def draw(self, split: str, examples: int, random: np.random.Generator) -> TokenData:
        tokens = (*named("k", self.keys), *named("v", self.values), "pad")
        shortest = 1 if split == "train" else self.key_tokens
        room = self.length - self.key_tokens - self.value_tokens  # The longest last pair must fit too.
        shape = examples, room // (shortest + 1) + 1
        rows, place = np.arange(examples), np.arange(shape[1])

        key = distinct(self.keys, self.key_tokens, shape, random)
        value = self.keys + distinct(self.values, self.value_tokens, shape, random)
        key_size = random.integers(shortest, self.key_tokens + 1, shape)
        value_size = random.integers(1, self.value_tokens + 1, shape)

        first = first_uses(run_codes(key, key_size))
        size = key_size + np.take_along_axis(value_size, first, axis=1)
        kept = size.cumsum(axis=1) <= room
        first[:, -1] = one_of(kept[:, :-1] & (first == place)[:, :-1], random)
        kept[:, -1] = True
        key[:, -1], key_size[:, -1] = key[rows, first[:, -1]], key_size[rows, first[:, -1]]
        value, value_size = value[rows[:, None], first], np.take_along_axis(value_size, first, axis=1)

        size = np.where(kept, key_size + value_size, 0)
        start = self.length - size[:, ::-1].cumsum(axis=1)[:, ::-1]
        ids = np.full((examples, self.length), tokens.index("pad"), dtype=np.int64)
        targets = np.full_like(ids, IGNORED)
        for i in range(self.key_tokens):
            row, pair = np.nonzero(kept & (i < key_size))
            ids[row, start[row, pair] + i] = key[row, pair, i]
        for i in range(self.value_tokens):
            row, pair = np.nonzero(kept & (i < value_size))
            spot, known = start[row, pair] + key_size[row, pair] + i, first[row, pair] < pair
            ids[row, spot] = value[row, pair, i]
            targets[row[known], spot[known] - 1] = value[row, pair, i][known]
        return TokenData("fuzzy-recall", split, ids, targets, tokens)


def first_uses(keys: np.ndarray) -> np.ndarray:
    """Return, for each entry of `keys` (examples, pairs), the first index in its row with the same key."""
    order = np.argsort(keys, axis=1, kind="stable")
    ordered = np.take_along_axis(keys, order, axis=1)
    new = np.diff(ordered, axis=1, prepend=ordered[:, :1] - 1) != 0
    group = np.maximum.accumulate(np.where(new, np.arange(keys.shape[1]), 0), axis=1)
    first = np.empty_like(order)
    np.put_along_axis(first, order, np.take_along_axis(order, group, axis=1), axis=1)
    return first


def one_of(allowed: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Draw an index in each row of `allowed` (examples, pairs), uniformly among those that are True."""
    return np.where(allowed, random.random(allowed.shape), -1).argmax(axis=1)


def weighted(weights: np.ndarray, count: int, examples: int, random: np.random.Generator) -> np.ndarray:
    """Draw (examples, count) indices without replacement, with probabilities proportional to `weights`.

    They are the largest values of log weight + Gumbel noise, in order.
    """
    noisy = np.log(weights) + random.gumbel(size=(examples, len(weights)))
    return np.argsort(-noisy, axis=1)[:, :count]


def distinct(choices: int, count: int, shape: tuple[int, int], random: np.random.Generator) -> np.ndarray:
    """Draw (*shape, count) integers below `choices` that are distinct along the last axis."""
    drawn = np.empty((*shape, count), dtype=np.int64)
    for i in range(count):
        rank = random.integers(0, choices - i, shape)
        for earlier in np.moveaxis(np.sort(drawn[..., :i], axis=-1), -1, 0):
            rank += rank >= earlier  # The rank counts only the numbers that are still free.
        drawn[..., i] = rank
    return drawn


def run_codes(runs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Number `runs` (examples, pairs, tokens) so that those with the same first `sizes` tokens share a number."""
    codes = np.zeros(sizes.shape, dtype=np.int64)
    for i in range(runs.shape[2]):
        longer = codes * (runs.max() + 2) + np.where(i < sizes, runs[..., i] + 1, 0)
        # Codes are renumbered each time, so that no run overflows 64 bits.
        codes = np.unique(longer, return_inverse=True)[1].reshape(sizes.shape)
    return codes


def interleaved(odd: np.ndarray, even: np.ndarray) -> np.ndarray:
    """Interleave the first, third, … and the second, fourth, … tokens of each sequence to (examples, length)."""
    return rearrange(np.stack([odd, even]), "two examples pairs -> examples (pairs two)")


def named(letter: str, number: int) -> tuple[str, ...]:
    return tuple(f"{letter}{i}" for i in range(number))
