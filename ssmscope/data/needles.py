"""RULER's needle tasks (Hsieh et al. 2024) as questions with one word for an answer, in the world of our stories.

- `needle`: one fact names what is in a place; what is there? (single needle)
- `multi-key`: four facts name what is in four places; what is in one of them?
- `multi-value`: four facts name things in one place; what is there besides three of them?
- `variables`: a person has a thing, four others what the one before has; three more pass on another thing. Who has
  the first thing besides four of the five? (variable tracking)
- `common-words`: three words come ten times each, five others once; which comes as often as two of the three?

As in RULER, a needle's key is two words (here a place and its owner), drawn like its value; facts stand at random
places in filler, those of a chain in their order; a chain has four hops; a common word comes ten times as often as
another.

Otherwise than in RULER:

- Values are numbers of seven digits, words or UUIDs there, and variables runs of five letters. Models that know few
  words could not read them; here all are names of the world, eight of each kind.
- A model writes there, and the share of all values that it wrote is its score. This probe scores the first token of one
  word: where several are the answer, the question names all but one, each of them being left as often. Accuracy
  is the recall of a value given the others, an easier question, and cannot be put beside RULER's numbers.
- Several keys asked in a row (multi-query) are `multi-key` here, one question each.
- One chain of variables is the default there. The second one here keeps its names from being the only ones in the
  context.
- The list of words fills the context there: ten common ones thirty times, others three times. Here it is the same at
  every length and spread in filler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from ssmscope.data.stories import TASKS as STORIES
from ssmscope.data.stories import Entity, Sentence, Story, Task

ALONE = 3
"""The people of the chain that is not asked about."""
COMMON, OFTEN = 3, 10
"""So many words come so often; every other word once."""


def named(kind: str, numbers: np.ndarray) -> list[Entity]:
    return [Entity(kind, number) for number in numbers.tolist()]


def besides(others: Sequence[Entity], article: str = "the ") -> Sentence:
    """The names with `and` between them."""
    parts: list[str | Entity] = []
    for other in others:
        parts += [" and " + article if parts else article, other]
    return tuple(parts)


def one_of_many(random: np.random.Generator, facts: int) -> Story:
    """Things in as many places, one of which is asked for. No two facts share their key or their thing."""
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
    """Things in one place; the one that the question does not name is asked for."""
    key = Entity("place", 0), Entity("person", 0)
    things = named("object", random.permutation(8)[:facts])
    at = int(random.integers(facts))
    others = [things[i] for i in random.permutation(facts) if i != at]
    question = ("What is in the ", key[0], " of ", key[1], " except ", *besides(others), "?")
    return Story(tuple(holds(key, thing) for thing in things), question, things[at], frozenset([at]))


def chained(random: np.random.Generator, facts: int) -> Story:
    """Two chains of persons, the later of whom have what the one before has; all but three are in the asked one."""
    persons = named("person", random.permutation(8)[:facts])
    asked = facts - ALONE
    chains = [persons[:asked], persons[asked:]]
    whose = random.permutation([0] * asked + [1] * ALONE)
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
    """Words in any order, `COMMON` of them `OFTEN` times each and each of the others once."""
    words = named("object", random.permutation(8))
    common, rare = words[:COMMON], words[COMMON : COMMON + facts - COMMON * OFTEN]
    mentions = [*common * OFTEN, *rare]
    order = [mentions[i] for i in random.permutation(facts)]
    answer, *others = (common[i] for i in random.permutation(COMMON))
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
"""Everything that `ssmscope.data.babi.questions` can ask, stories first."""
