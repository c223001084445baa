"""Synthetic token tasks of MAD (recall, copying, compression, memorization), each testing one capability, and MQAR.

MAD is from Mechanistic Design and Scaling of Hybrid Architectures (Poli et al. 2024); Differential Mamba, appendix A.3,
compares with Mamba on it. Default sizes are the paper's easiest settings. The details of a sequence follow the
authors' code; each task states where it departs from it. Two differences hold for every task:

- `length` counts the tokens of `ids`. Where their code shifts the tokens by one and so reads one less, the last token
  is kept here without a target.
- Training has the same targets as testing. Their code trains the three recall tasks on every next token, most of
  which are unpredictable; `every_token` does so too.

Every task takes `train_examples`, `test_examples` and `seed`, returns a training and a test set with separate random
streams, and raises InputError for sizes that its sequences cannot have.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from einops import rearrange
from ssmscope.core.batching import refuse_held
from ssmscope.data.tokens import IGNORED, TokenData
from ssmscope.errors import InputError, check_whole

Parts = tuple[TokenData, TokenData]


@dataclass(frozen=True, eq=False)
class CompressionData(TokenData):
    """Sequences to compress into the hidden state at their last token; not a next-token prediction task. `targets[:,
    t]` is `ids[:, t]`, predicted by a decoder that reads only the hidden state of the LAST position and a code for `t`:
    `logits[:, t] = decoder(hidden[:, -1] + code[t])`. The last position, with the token `compress`, has no target."""


class Part(NamedTuple):
    """Part of a task's data to draw: its random stream, and one that starts alike in both parts."""

    split: str
    examples: int
    random: np.random.Generator
    shared: np.random.Generator


Drawn = tuple[np.ndarray, np.ndarray, tuple[str, ...]]
"""Ids and targets (examples, length), and the tokens."""

GENERATORS: dict[str, Callable[..., Parts]] = {}
"""Generators by their command-line names; the keyword-only parameters of a generator are its options."""


def generator(
    name: str, *, train_examples: int = 12800, kind: type[TokenData] = TokenData
) -> Callable[[Callable[..., Drawn]], Callable[..., Parts]]:
    """Register a function that draws a part of a task as the generator of its training and test set."""

    def register(draw: Callable[..., Drawn]) -> Callable[..., Parts]:
        def generate(
            *, train_examples: int = train_examples, test_examples: int = 1280, seed: int = 0, **sizes: int | float
        ) -> Parts:
            check_whole(1, train_examples=train_examples, test_examples=test_examples)
            check_whole(0, seed=seed)
            refuse_held(train_examples + test_examples, "so many examples", "ask for fewer", unit="examples")
            *streams, shared = np.random.SeedSequence(seed).spawn(3)
            train, test = (
                kind(name, split, *draw(Part(split, examples, *map(np.random.default_rng, (own, shared))), **sizes))
                for split, examples, own in zip(("train", "test"), (train_examples, test_examples), streams)
            )
            return train, test

        _, *own = inspect.signature(draw).parameters.values()
        *common, _ = inspect.signature(generate).parameters.values()
        GENERATORS[name] = functools.wraps(draw)(generate)
        generate.__signature__ = inspect.Signature([*own, *common])  # type: ignore[attr-defined]
        return generate

    return register


@generator("associative-recall")
def associative_recall(part: Part, *, length: int = 128, vocabulary: int = 16, every_token: bool = False) -> Drawn:
    """Draw in-context recall (multi-query): pairs of a key and its value, drawn anew for every sequence. Whenever a key
    recurs, its value is the target; the key of the last pair has always occurred before. Several keys may have the same
    value. One half of the vocabulary are keys, the other values."""
    return _recall(part, length, vocabulary, 0, 0.0, every_token)


@generator("noisy-recall")
def noisy_recall(
    part: Part,
    *,
    length: int = 128,
    vocabulary: int = 32,
    noise_vocabulary: int = 16,
    noise: float = 0.2,
    every_token: bool = False,
) -> Drawn:
    """Draw noisy in-context recall: `associative_recall` with tokens of another vocabulary between the pairs. As in the
    authors' code, each pair is replaced with probability `noise` by two independent noise tokens, which are
    `noise_vocabulary` of the `vocabulary`. One pair at a random position and the last pair are always kept."""
    check_whole(1, noise_vocabulary=noise_vocabulary)
    return _recall(part, length, vocabulary, noise_vocabulary, noise, every_token)


def _recall(part: Part, length: int, vocabulary: int, noises: int, noise: float, every_token: bool) -> Drawn:
    halves = _refuse_pairs(length, vocabulary, noises)
    if not 0 <= noise < 1:
        raise InputError(f"noise is {noise}; a probability from 0 to below 1 is allowed")
    random, examples = part.random, part.examples
    tokens = (*named("k", halves), *named("v", halves), *named("noise", noises))
    shape = examples, length // 2
    rows, place = np.arange(examples), np.arange(shape[1])
    key = random.integers(0, halves, shape)
    value = random.integers(halves, 2 * halves, shape)
    noisy = random.random(shape) < noise
    noisy[rows, random.integers(0, shape[1] - 1, examples)] = noisy[:, -1] = False
    first = first_uses(np.where(noisy, -1 - place, key))
    first[:, -1] = one_of(~noisy[:, :-1] & (first == place)[:, :-1], random)
    key[:, -1] = key[rows, first[:, -1]]
    value = np.take_along_axis(value, first, axis=1)
    targets = interleaved(np.where(first < place, value, IGNORED), np.full(shape, IGNORED))
    if noises:
        key[noisy], value[noisy] = random.integers(2 * halves, len(tokens), (2, noisy.sum()))
    return *_asked(part, interleaved(key, value), targets, every_token), tokens


@generator("mqar")
def mqar(part: Part, *, length: int = 64, vocabulary: int = 64, pairs: int = 4, power: float = 0.01) -> Drawn:
    """Draw multi-query associative recall (Zoology, Arora et al. 2023): all pairs first, then a query of every key.

    After the `pairs`, every second position is a slot for a key; the p-th slot is taken with a probability proportional
    to p^(`power` − 1), so that distances follow a power law, and are uniform for 1. Keys and values, each one half of
    the vocabulary, are distinct within a sequence. The value is the target at the queried key but does not follow it in
    the input; all other positions hold random tokens. The paper's vocabulary is 8,192, with 4 to 64 pairs at lengths of
    64 to 512. Their code fills with any token, including keys without a target; here no key occurs a third time.
    """
    check_whole(1, pairs=pairs)
    halves = _refuse_pairs(length, vocabulary, 0)
    check_whole(4 * pairs, length=length)
    check_whole(2 * pairs, vocabulary=vocabulary)
    if not power > 0:
        raise InputError(f"power is {power}; a number above 0 is allowed")
    random = part.random
    tokens = (*named("k", halves), *named("v", halves))
    begin = 2 * pairs
    ids = np.empty((part.examples, length), dtype=np.int64)
    targets = np.full_like(ids, IGNORED)
    places = np.arange(1, (length - begin) // 2 + 1)
    spot = begin + 2 * weighted(places ** (power - 1), pairs, part.examples, random)
    for row, asked, at in zip(ids, targets, spot):
        key = random.choice(halves, pairs, replace=False)
        value = halves + random.choice(halves, pairs, replace=False)
        rank = random.integers(0, len(tokens) - pairs, length)
        # The rank counts the tokens that are none of these keys.
        row[:] = rank + np.searchsorted(np.sort(key) - np.arange(pairs), rank, side="right")
        row[0:begin:2], row[1:begin:2] = key, value
        row[at], asked[at] = key, value
    return ids, targets, tokens


@generator("fuzzy-recall")
def fuzzy_recall(
    part: Part,
    *,
    length: int = 128,
    vocabulary: int = 16,
    key_tokens: int = 3,
    value_tokens: int = 3,
    every_token: bool = False,
) -> Drawn:
    """Draw fuzzy in-context recall: keys and values are runs of one or more tokens.

    Their lengths are uniform on 1…`key_tokens` and 1…`value_tokens`, and the tokens of a run are distinct; in the test
    set every key has `key_tokens`. When a key recurs, every token of its value is a target. The last key has always
    occurred before. Padding is on the left.

    The paper divides the whole vocabulary equally into keys and values, the authors' code all but the padding, as here.
    Their code draws the last key first and sometimes fails to place it earlier; here it is drawn from those before.
    """
    check_whole(1, key_tokens=key_tokens, value_tokens=value_tokens)
    check_whole(max(2 * max(2, key_tokens) + 1, 2 * max(2, value_tokens)), vocabulary=vocabulary)
    check_whole(2 * (key_tokens + value_tokens), length=length)
    keys = (vocabulary - 1) // 2
    values = vocabulary - 1 - keys
    random, examples = part.random, part.examples
    tokens = (*named("k", keys), *named("v", values), "pad")
    shortest = 1 if part.split == "train" else key_tokens
    room = length - key_tokens - value_tokens  # The longest last pair must fit too.
    shape = examples, room // (shortest + 1) + 1
    rows, place = np.arange(examples), np.arange(shape[1])

    key = distinct(keys, key_tokens, shape, random)
    value = keys + distinct(values, value_tokens, shape, random)
    key_size = random.integers(shortest, key_tokens + 1, shape)
    value_size = random.integers(1, value_tokens + 1, shape)

    first = first_uses(run_codes(key, key_size))
    size = key_size + np.take_along_axis(value_size, first, axis=1)
    kept = size.cumsum(axis=1) <= room
    first[:, -1] = one_of(kept[:, :-1] & (first == place)[:, :-1], random)
    kept[:, -1] = True
    key[:, -1], key_size[:, -1] = key[rows, first[:, -1]], key_size[rows, first[:, -1]]
    value, value_size = value[rows[:, None], first], np.take_along_axis(value_size, first, axis=1)

    size = np.where(kept, key_size + value_size, 0)
    start = length - size[:, ::-1].cumsum(axis=1)[:, ::-1]
    ids = np.full((examples, length), tokens.index("pad"), dtype=np.int64)
    targets = np.full_like(ids, IGNORED)
    row, pair, i = np.nonzero(kept[..., None] & (np.arange(key_tokens) < key_size[..., None]))
    ids[row, start[row, pair] + i] = key[row, pair, i]
    row, pair, i = np.nonzero(kept[..., None] & (np.arange(value_tokens) < value_size[..., None]))
    spot, known = start[row, pair] + key_size[row, pair] + i, first[row, pair] < pair
    ids[row, spot] = value[row, pair, i]
    targets[row[known], spot[known] - 1] = value[row, pair, i][known]
    return *_asked(part, ids, targets, every_token), tokens


@generator("selective-copying")
def selective_copying(part: Part, *, length: int = 256, vocabulary: int = 16, copied: int = 16) -> Drawn:
    """Draw selective copying: `copied` tokens scattered among blanks, to be repeated in order after a copy token.

    After the copy token come as many blanks as there are tokens to copy; the target at each is the next of these. The
    vocabulary includes both. In the authors' code a blank never follows the last token to copy, and the positions of
    blanks do not depend on the seed; here all choices of positions are equally likely and drawn with the seed.
    """
    check_whole(1, copied=copied)
    check_whole(4, vocabulary=vocabulary)
    check_whole(2 * copied + 1, length=length)
    tokens = (*named("t", vocabulary - 2), "blank", "copy")
    prompt = length - copied - 1
    content = part.random.integers(0, vocabulary - 2, (part.examples, copied))
    places = np.sort(part.random.random((part.examples, prompt)).argsort(axis=1)[:, :copied], axis=1)
    ids = np.full((part.examples, length), tokens.index("blank"), dtype=np.int64)
    np.put_along_axis(ids, places, content, axis=1)
    ids[:, prompt] = tokens.index("copy")
    targets = np.full_like(ids, IGNORED)
    targets[:, prompt + 1 :] = content
    return ids, targets, tokens


@generator("compression", kind=CompressionData)
def compression(part: Part, *, length: int = 32, vocabulary: int = 16) -> Drawn:
    """Draw compression: random tokens and a compress token, whose hidden state alone must hold all of them.

    `CompressionData` says how the targets are decoded. The authors' decoder adds a sine-cosine code of the position to
    that hidden state; their code also has the compress token itself as a target, which is always the last and trivial.
    """
    check_whole(2, length=length)
    check_whole(3, vocabulary=vocabulary)
    tokens = (*named("t", vocabulary - 1), "compress")
    ids = part.random.integers(0, vocabulary - 1, (part.examples, length))
    targets = ids.copy()
    ids[:, -1], targets[:, -1] = tokens.index("compress"), IGNORED
    return ids, targets, tokens


@generator("memorization", train_examples=256)
def memorization(part: Part, *, length: int = 32, vocabulary: int = 256) -> Drawn:
    """Draw memorization: one dictionary of keys and values for all sequences, to be learnt by heart.

    Keys alternate with an insert token, whose target is the value of the preceding key. Values never occur in the
    input, and no two keys share one. Of the vocabulary but the insert token, the lower half are keys, the rest values.

    A key occurs about `train_examples * length / vocabulary` times in training: 32 times by default, once in the
    paper's hardest setting, a vocabulary of 8192. If that is few, the test set has keys that training never showed.
    """
    check_whole(2, length=length)
    _refuse_odd(length)
    check_whole(5, vocabulary=vocabulary)
    keys = (vocabulary - 1) // 2
    tokens = (*named("k", keys), *named("v", vocabulary - 1 - keys), "insert")
    dictionary = keys + part.shared.permutation(vocabulary - 1 - keys)[:keys]
    key = part.random.integers(0, keys, (part.examples, length // 2))
    ids = interleaved(key, np.full_like(key, tokens.index("insert")))
    return ids, interleaved(np.full_like(key, IGNORED), dictionary[key]), tokens


def _asked(part: Part, ids: np.ndarray, targets: np.ndarray, every_token: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and targets; with `every_token` every next token is a target in training."""
    return ids, next_tokens(ids) if every_token and part.split == "train" else targets


def next_tokens(ids: np.ndarray) -> np.ndarray:
    """Return the targets of `ids` (examples, length) if every next token is one."""
    return np.pad(ids[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)


def _refuse_odd(length: int) -> None:
    if length % 2:
        raise InputError(f"length is {length}; give an even number, e.g. {length + 1}")


def _refuse_pairs(length: int, vocabulary: int, noises: int) -> int:
    """Return the number of keys, one half of the tokens that are not noise."""
    check_whole(4, length=length)
    _refuse_odd(length)
    if vocabulary - noises < 4 or (vocabulary - noises) % 2:
        besides = f" besides the {noises} for noise" if noises else ""
        raise InputError(f"vocabulary is {vocabulary}; give an even number of tokens{besides}, at least {4 + noises}")
    return (vocabulary - noises) // 2


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
    """Draw (examples, count) indices without replacement, with probabilities proportional to `weights`. They are the
    largest values of log weight + Gumbel noise, in order."""
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
