"""Synthetic token tasks of MAD (recall, copying, compression, memorization), each testing one capability, and MQAR.

MAD is from Mechanistic Design and Scaling of Hybrid Architectures (Poli et al. 2024); Differential Mamba, appendix A.3,
compares with Mamba on it. Default sizes are the paper's easiest settings. The details of a sequence follow the
authors' code; each task states where it departs from it. Two differences hold for every task:

- `length` counts the tokens of `ids`. Where their code shifts the tokens by one and so reads one less, the last token
  is kept here without a target.
- Training has the same targets as testing. Their code trains the three recall tasks on every next token, most of
  which are unpredictable; `every_token` does so too.

The same seed gives the same data. Training and test set have separate random streams, so the number of training
examples does not change the test set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from ssmscope.core.limits import refuse_held
from ssmscope.data.recall import FuzzyRecall, QueriedRecall, Recall, interleaved, named
from ssmscope.data.tokens import IGNORED, TokenData
from ssmscope.errors import InputError

Parts = tuple[TokenData, TokenData]
D = TypeVar("D", bound=TokenData)


@dataclass(frozen=True, eq=False)
class CompressionData(TokenData):
    """Sequences to compress into the hidden state at their last token; not a next-token prediction task.

    `targets[:, t]` is `ids[:, t]`, predicted by a decoder that reads only the hidden state of the LAST position and a
    code for `t`: `logits[:, t] = decoder(hidden[:, -1] + code[t])`. The last position, with the token `compress`, has
    no target.
    """


def associative_recall(
    *,
    length: int = 128,
    vocabulary: int = 16,
    train_examples: int = 12800,
    test_examples: int = 1280,
    every_token: bool = False,
    seed: int = 0,
) -> Parts:
    """Draw in-context recall (multi-query): pairs of a key and its value, drawn anew for every sequence.

    A key keeps its value within a sequence; whenever it recurs, its value is the target. The key of the last pair has
    always occurred before. Several keys may have the same value.

    Args:
        length: tokens of a sequence, an even number
        vocabulary: number of tokens, an even number: one half are keys, the other values
        train_examples: number of training sequences
        test_examples: number of test sequences
        every_token: train on every next token, as the authors' code does, not only on values of known keys
        seed: number that decides the draws

    Raises:
        InputError: for sizes that cannot hold two pairs or two keys and values, or an odd length or vocabulary.
    """
    refuse_counts(train_examples, test_examples, seed)
    refuse_pairs(length, vocabulary, 0)
    task = Recall("associative-recall", length, vocabulary // 2, 0, 0.0)
    return asked(draw_parts(task.draw, train_examples, test_examples, seed), every_token)


def mqar(
    *,
    length: int = 64,
    vocabulary: int = 64,
    pairs: int = 4,
    power: float = 0.01,
    train_examples: int = 12800,
    test_examples: int = 1280,
    seed: int = 0,
) -> Parts:
    """Draw multi-query associative recall (Zoology, Arora et al. 2023): all pairs first, then a query of every key.

    After the pairs, every second position is a slot for a key; the p-th slot is taken with a probability proportional
    to p^(power − 1), so that distances follow a power law. Keys and values are distinct within a sequence. The value is
    the target at the queried key but does not follow it in the input; all other positions hold random tokens.

    The paper's vocabulary is 8,192, with 4 to 64 pairs at lengths of 64 to 512; 256 pairs just fit into 1,024 tokens.
    Their code fills with any token, including keys of the sequence without a target; here no key occurs a third time.

    Args:
        length: tokens of a sequence, an even number, at least four times the pairs
        vocabulary: number of tokens, an even number: one half are keys, the other values
        pairs: number of pairs, each queried once
        power: power of the distances; 1 for uniform positions
        train_examples: number of training sequences
        test_examples: number of test sequences
        seed: number that decides the draws

    Raises:
        InputError: for a length or vocabulary that cannot hold the pairs, an odd one, or a power that is not above 0.
    """
    refuse_counts(train_examples, test_examples, seed)
    refuse_below(1, pairs=pairs)
    refuse_pairs(length, vocabulary, 0)
    refuse_below(4 * pairs, length=length)
    refuse_below(2 * pairs, vocabulary=vocabulary)
    if not power > 0:
        raise InputError(f"power is {power}; a number above 0 is allowed")
    return draw_parts(QueriedRecall(length, vocabulary // 2, pairs, power).draw, train_examples, test_examples, seed)


def noisy_recall(
    *,
    length: int = 128,
    vocabulary: int = 32,
    noise_vocabulary: int = 16,
    noise: float = 0.2,
    train_examples: int = 12800,
    test_examples: int = 1280,
    every_token: bool = False,
    seed: int = 0,
) -> Parts:
    """Draw noisy in-context recall: `associative_recall` with tokens of another vocabulary between the pairs.

    As in the authors' code, each pair is replaced with probability `noise` by two independent noise tokens. One pair at
    a random position and the last pair are always kept.

    Args:
        length: tokens of a sequence, an even number
        vocabulary: number of tokens including noise; of the others, one half are keys, the other values
        noise_vocabulary: number of noise tokens
        noise: probability that a pair becomes noise, below 1
        train_examples: number of training sequences
        test_examples: number of test sequences
        every_token: train on every next token, as the authors' code does, not only on values of known keys
        seed: number that decides the draws

    Raises:
        InputError: as `associative_recall`, for no noise token, or for a probability outside 0…1.
    """
    refuse_counts(train_examples, test_examples, seed)
    refuse_below(1, noise_vocabulary=noise_vocabulary)
    refuse_pairs(length, vocabulary, noise_vocabulary)
    if not 0 <= noise < 1:
        raise InputError(f"noise is {noise}; a probability from 0 to below 1 is allowed")
    task = Recall("noisy-recall", length, (vocabulary - noise_vocabulary) // 2, noise_vocabulary, noise)
    return asked(draw_parts(task.draw, train_examples, test_examples, seed), every_token)


def fuzzy_recall(
    *,
    length: int = 128,
    vocabulary: int = 16,
    key_tokens: int = 3,
    value_tokens: int = 3,
    train_examples: int = 12800,
    test_examples: int = 1280,
    every_token: bool = False,
    seed: int = 0,
) -> Parts:
    """Draw fuzzy in-context recall: keys and values are runs of one or more tokens.

    Their lengths are uniform on 1…`key_tokens` and 1…`value_tokens`, and the tokens of a run are distinct; in the test
    set every key has `key_tokens`. When a key recurs, every token of its value is a target: the first after the key's
    last token, the others after the value's previous one. The last key has always occurred before. Padding is on the
    left.

    The paper divides the whole vocabulary equally into keys and values, the authors' code all but the padding, as
    here. Their code draws the last key first and sometimes fails to place it among the earlier ones; here it is drawn
    from the distinct keys that occurred.

    Args:
        length: tokens of a sequence, with room for two of the longest pairs
        vocabulary: number of tokens including padding; of the others, the lower half are keys, the rest values
        key_tokens: maximum number of tokens of a key
        value_tokens: maximum number of tokens of a value
        train_examples: number of training sequences
        test_examples: number of test sequences
        every_token: train on every next token, as the authors' code does, not only on values of known keys
        seed: number that decides the draws

    Raises:
        InputError: for a length that cannot hold two of the longest pairs, or a vocabulary whose halves are smaller
            than the longest run or than two.
    """
    refuse_counts(train_examples, test_examples, seed)
    refuse_below(1, key_tokens=key_tokens, value_tokens=value_tokens)
    refuse_below(max(2 * max(2, key_tokens) + 1, 2 * max(2, value_tokens)), vocabulary=vocabulary)
    refuse_below(2 * (key_tokens + value_tokens), length=length)
    keys = (vocabulary - 1) // 2
    task = FuzzyRecall(length, keys, vocabulary - 1 - keys, key_tokens, value_tokens)
    return asked(draw_parts(task.draw, train_examples, test_examples, seed), every_token)


def selective_copying(
    *,
    length: int = 256,
    vocabulary: int = 16,
    copied: int = 16,
    train_examples: int = 12800,
    test_examples: int = 1280,
    seed: int = 0,
) -> Parts:
    """Draw selective copying: tokens scattered among blanks, to be repeated in order after a copy token.

    After the copy token come as many blanks as there are tokens to copy; the target at each is the next of these.

    In the authors' code a blank never follows the last token to copy, and the positions of blanks do not depend on the
    seed. Here all choices of positions before the copy token are equally likely and drawn with the seed.

    Args:
        length: tokens of a sequence
        vocabulary: number of tokens including the blank and the copy token
        copied: number of tokens to copy
        train_examples: number of training sequences
        test_examples: number of test sequences
        seed: number that decides the draws

    Raises:
        InputError: for a length below twice `copied` and one, or a vocabulary without two tokens to copy.
    """
    refuse_counts(train_examples, test_examples, seed)
    refuse_below(1, copied=copied)
    refuse_below(4, vocabulary=vocabulary)
    refuse_below(2 * copied + 1, length=length)
    tokens = (*named("t", vocabulary - 2), "blank", "copy")
    prompt = length - copied - 1

    def draw(split: str, examples: int, random: np.random.Generator) -> TokenData:
        content = random.integers(0, vocabulary - 2, (examples, copied))
        places = np.sort(random.random((examples, prompt)).argsort(axis=1)[:, :copied], axis=1)
        ids = np.full((examples, length), tokens.index("blank"), dtype=np.int64)
        np.put_along_axis(ids, places, content, axis=1)
        ids[:, prompt] = tokens.index("copy")
        targets = np.full_like(ids, IGNORED)
        targets[:, prompt + 1 :] = content
        return TokenData("selective-copying", split, ids, targets, tokens)

    return draw_parts(draw, train_examples, test_examples, seed)


def compression(
    *,
    length: int = 32,
    vocabulary: int = 16,
    train_examples: int = 12800,
    test_examples: int = 1280,
    seed: int = 0,
) -> tuple[CompressionData, CompressionData]:
    """Draw compression: random tokens and a compress token, whose hidden state alone must hold all of them.

    `CompressionData` says how the targets are decoded. The authors' decoder adds a sine-cosine code of the position to
    that hidden state; their code also has the compress token itself as a target, which is always the last and trivial.

    Args:
        length: tokens of a sequence including the compress token
        vocabulary: number of tokens including the compress token
        train_examples: number of training sequences
        test_examples: number of test sequences
        seed: number that decides the draws

    Raises:
        InputError: for a length below 2 or a vocabulary below 3.
    """
    refuse_counts(train_examples, test_examples, seed)
    refuse_below(2, length=length)
    refuse_below(3, vocabulary=vocabulary)
    tokens = (*named("t", vocabulary - 1), "compress")

    def draw(split: str, examples: int, random: np.random.Generator) -> CompressionData:
        ids = random.integers(0, vocabulary - 1, (examples, length))
        targets = ids.copy()
        ids[:, -1] = tokens.index("compress")
        targets[:, -1] = IGNORED
        return CompressionData("compression", split, ids, targets, tokens)

    return draw_parts(draw, train_examples, test_examples, seed)


def memorization(
    *,
    length: int = 32,
    vocabulary: int = 256,
    train_examples: int = 256,
    test_examples: int = 1280,
    seed: int = 0,
) -> Parts:
    """Draw memorization: one dictionary of keys and values for all sequences, to be learnt by heart.

    Keys alternate with an insert token, whose target is the value of the preceding key. Values never occur in the
    input, and no two keys share one. The seed determines the dictionary, whatever the numbers of examples.

    A key occurs about `train_examples * length / vocabulary` times in training: 32 times by default, once in the
    paper's hardest setting, a vocabulary of 8192. Keys are drawn with replacement, so if that number is small the test
    set has some keys that training never showed.

    Args:
        length: tokens of a sequence, an even number
        vocabulary: number of tokens including the insert token; of the others, the lower half are keys, the
            rest values
        train_examples: number of training sequences
        test_examples: number of test sequences
        seed: number that decides the dictionary and the draws

    Raises:
        InputError: for an odd length or one below 2, or a vocabulary without two keys and two values.
    """
    refuse_counts(train_examples, test_examples, seed)
    refuse_below(2, length=length)
    refuse_odd(length=length)
    refuse_below(5, vocabulary=vocabulary)
    keys = (vocabulary - 1) // 2
    tokens = (*named("k", keys), *named("v", vocabulary - 1 - keys), "insert")
    *_, own = streams(seed)
    dictionary = keys + own.permutation(vocabulary - 1 - keys)[:keys]

    def draw(split: str, examples: int, random: np.random.Generator) -> TokenData:
        key = random.integers(0, keys, (examples, length // 2))
        ids = interleaved(key, np.full_like(key, tokens.index("insert")))
        targets = interleaved(np.full_like(key, IGNORED), dictionary[key])
        return TokenData("memorization", split, ids, targets, tokens)

    return draw_parts(draw, train_examples, test_examples, seed)


def streams(seed: int) -> tuple[np.random.Generator, np.random.Generator, np.random.Generator]:
    """Return independent random streams for the training set, the test set and what both share."""
    train, test, shared = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    return train, test, shared


def draw_parts(
    draw: Callable[[str, int, np.random.Generator], D], train_examples: int, test_examples: int, seed: int
) -> tuple[D, D]:
    train, test, _ = streams(seed)
    return draw("train", train_examples, train), draw("test", test_examples, test)


def asked(parts: Parts, every_token: bool) -> Parts:
    """Return the parts; with `every_token` every next token is a target of the training part."""
    train, test = parts
    if every_token:
        following = np.pad(train.ids[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)
        train = dataclasses.replace(train, targets=following)
    return train, test


def refuse_below(least: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < least:
            raise InputError(f"{name} is {size}; give at least {least}")


def refuse_odd(**sizes: int) -> None:
    for name, size in sizes.items():
        if size % 2:
            raise InputError(f"{name} is {size}; give an even number, e.g. {size + 1}")


def refuse_counts(train_examples: int, test_examples: int, seed: int) -> None:
    refuse_below(1, train_examples=train_examples, test_examples=test_examples)
    refuse_below(0, seed=seed)
    refuse_held(train_examples + test_examples, "so many examples", "ask for fewer", unit="examples")


def refuse_pairs(length: int, vocabulary: int, noises: int) -> None:
    refuse_below(4, length=length)
    refuse_odd(length=length)
    if vocabulary - noises < 4 or (vocabulary - noises) % 2:
        besides = f" besides the {noises} for noise" if noises else ""
        raise InputError(f"vocabulary is {vocabulary}; give an even number of tokens{besides}, at least {4 + noises}")


GENERATORS: Mapping[str, Callable[..., Parts]] = MappingProxyType(
    {
        "associative-recall": associative_recall,
        "mqar": mqar,
        "fuzzy-recall": fuzzy_recall,
        "noisy-recall": noisy_recall,
        "selective-copying": selective_copying,
        "compression": compression,
        "memorization": memorization,
    }
)
"""Generators by their command-line names; the keyword-only parameters of a generator are its options."""
