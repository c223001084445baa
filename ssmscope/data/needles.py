"""RULER's needle tasks (Hsieh et al. 2024) as questions with one-word answers, in the world of our stories.

- `needle`: one fact names what is in a place; what is there? (single needle)
- `multi-key`: four facts name what is in four places; what is in one of them?
- `multi-value`: four facts name things in one place; what is there besides three of them?
- `variables`: a person has a thing, four others have what the one before has; three more pass on another thing. Who has
  the first thing besides four of the five? (variable tracking)
- `common-words`: three words occur ten times each, five others once; which occurs as often as two of the three?

As in RULER, a needle's key is two words (here a place and its owner), drawn like its value; facts stand at random
positions in filler, those of a chain in order; a chain has four hops; a common word occurs ten times as often as
others.

Differences from RULER:

- There, values are seven-digit numbers, words or UUIDs, and variables are five letters, which models with a small
  vocabulary cannot read. Here all are names of the world, eight of each kind.
- There, a model generates text and is scored by the share of all values in it. Here the first token of one word is
  scored: if several words are the answer, the question names all but one, each equally often left out. Accuracy is thus
  the recall of a value given the others, an easier question, and not comparable with RULER's numbers.
- Several keys queried in a row (multi-query) are `multi-key` here, one question each.
- RULER has one chain of variables by default. The second chain here keeps the names of the first from being the only
  ones in the context.
- There, the list of words fills the context: ten common ones thirty times, others three times. Here it is the same at
  every length and spread in filler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from ssmscope.data.stories import TASKS as STORIES
from ssmscope.data.stories import Entity, Sentence, Story, Task

OTHER_CHAIN_LENGTH = 3
"""Number of people in the chain that is not asked about."""
COMMON_WORDS, COMMON_WORD_COUNT = 3, 10
"""Number of common words, and how often each occurs; every other word occurs once."""


def named(kind: str, numbers: np.ndarray) -> list[Entity]:
    return [Entity(kind, number) for number in numbers.tolist()]


def besides(others: Sequence[Entity], article: str = "the ") -> Sentence:
    """Join names with `and`."""
    parts: list[str | Entity] = []
    for other in others:
        parts += [" and " + article if parts else article, other]
    return tuple(parts)


def one_of_many(random: np.random.Generator, facts: int) -> Story:
    """Draw things in as many places, one of which is asked for. No two facts share a key or a thing."""
    places, persons = np.unravel_index(random.choice(64, facts, replace=False), (8, 8))
    things = named("object", random.permutation(8)[:facts])
    keys = list(zip(named("place", places), named("person", persons)))
    told = tuple(holds(key, thing) for key, thing in zip(keys, things))
    at = int(random.integers(facts))
    place, person = keys[at]
    return Story(told, ("What is in the ", place, " of ", person, "?"), things[at], frozenset([at]))


def holds(key: tuple[Entity, Entity], thing: Entity) -> Sentence:
    return ("In the ", key[0], " of ", key[1], " is the ", thing, ".")


def all_of_one(random: np.random.Generator, facts: int) -> Story:
    """Draw things in one place; the answer is the one that the question does not name."""
    key = Entity("place", 0), Entity("person", 0)
    things = named("object", random.permutation(8)[:facts])
    at = int(random.integers(facts))
    others = [things[i] for i in random.permutation(facts) if i != at]
    question = ("What is in the ", key[0], " of ", key[1], " except ", *besides(others), "?")
    return Story(tuple(holds(key, thing) for thing in things), question, things[at], frozenset([at]))


def chained(random: np.random.Generator, facts: int) -> Story:
    """Draw two chains of persons, each of whom has what the one before has; all but three are in the queried chain."""
    persons = named("person", random.permutation(8)[:facts])
    asked = facts - OTHER_CHAIN_LENGTH
    chains = [persons[:asked], persons[asked:]]
    whose = random.permutation([0] * asked + [1] * OTHER_CHAIN_LENGTH)
    told, done = list[Sentence](), [0, 0]
    for number in whose.tolist():
        chain, step = chains[number], done[number]
        rest: Sentence = ("what ", chain[step - 1], " has.") if step else ("the ", Entity("object", number), ".")
        told.append((chain[step], " has ", *rest))
        done[number] += 1
    at = int(random.integers(asked))
    others = [chains[0][i] for i in random.permutation(asked) if i != at]
    question = ("Who has the ", Entity("object", 0), " except ", *besides(others, ""), "?")
    supporting = np.flatnonzero(whose == 0)[: at + 1].tolist()
    return Story(tuple(told), question, chains[0][at], frozenset(supporting))


def counted(random: np.random.Generator, facts: int) -> Story:
    """Draw words in random order, `COMMON_WORDS` of them `COMMON_WORD_COUNT` times each and the others once."""
    words = named("object", random.permutation(8))
    common = words[:COMMON_WORDS]
    mentions = common * COMMON_WORD_COUNT
    mentions += words[COMMON_WORDS : COMMON_WORDS + facts - len(mentions)]
    order = [mentions[i] for i in random.permutation(facts)]
    answer, *others = (common[i] for i in random.permutation(COMMON_WORDS))
    question = ("What comes as often as ", *besides(others), "?")
    supporting = frozenset(at for at, word in enumerate(order) if word == answer)
    return Story(tuple(("The ", word, ".") for word in order), question, answer, supporting)


NEEDLES: Mapping[str, Task] = MappingProxyType(
    {
        "needle": Task(one_of_many, ("object",), (1, 1), (1, 1)),
        "multi-key": Task(one_of_many, ("object",), (4, 4), (2, 8)),
        "multi-value": Task(all_of_one, ("object",), (4, 4), (2, 8)),
        "variables": Task(chained, ("person",), (8, 8), (5, 8)),
        "common-words": Task(counted, ("object",), (35, 35), (31, 35)),
    }
)
TASKS: Mapping[str, Task] = MappingProxyType({**STORIES, **NEEDLES})
"""All tasks of `ssmscope.data.babi.questions`, stories first."""
