"""Short stories about persons, places and objects, each with a question that some of its facts answer.

Five tasks in the manner of bAbI's first five (Weston et al. 2015), with our own world and words:

- `qa1`, one supporting fact: persons walk about; where is one of them?
- `qa2`, two supporting facts: they also take objects along and put them down; where is an object?
- `qa3`, three supporting facts: where was an object before it came to a place?
- `qa4`, two-argument relations: places lie north, south, east or west of each other; which one lies so?
- `qa5`, three-argument relations: persons give objects to each other; who gave what to whom?

Every question has one answer, one word, and a story mentions at least one other word of the answer's kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

PERSONS = ("Alma", "Bruno", "Clara", "Dario", "Edith", "Felix", "Greta", "Hugo")
PLACES = ("attic", "bakery", "cellar", "garage", "kitchen", "library", "pantry", "stable")
OBJECTS = ("basket", "hammer", "kettle", "lantern", "mirror", "ribbon", "umbrella", "violin")
NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType({"person": PERSONS, "place": PLACES, "object": OBJECTS})
"""Names of the world by kind. Within a kind, and among all persons and objects, no two names share their first letter
and case, so the first byte identifies an answer."""

CAST = {"person": 4, "place": 6, "object": 3}
"""Maximum number of each kind in one story."""

WALK = ("walked to", "went to", "hurried to", "moved to")
TAKE = ("picked up", "took", "grabbed")
DROP = ("put down", "dropped", "left behind")
GIVE = ("gave", "handed", "passed")
DIRECTIONS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
)

OTHER_CHAIN_LENGTH = 3
"""Number of people in the chain that is not asked about."""
COMMON_WORDS, COMMON_WORD_COUNT = 3, 10
"""Number of common words, and how often each occurs; every other word occurs once."""


class Entity(NamedTuple):
    """Person, place or object of a story, which gets its name only when the story is written."""

    kind: str
    number: int


Sentence = tuple[str | Entity, ...]


class Story(NamedTuple):
    """Facts in order, a question, its answer, and the indices of the facts that give it."""

    facts: tuple[Sentence, ...]
    question: Sentence
    answer: Entity
    supporting: frozenset[int]


class Task(NamedTuple):
    """Recipe for the stories of a task. `draw` draws a story with the given number of facts, None if no question has a
    unique answer. `kinds` are those of the answers, `facts` the default minimum and maximum number of facts, `limits`
    the range of a user's choice."""

    draw: Callable[[np.random.Generator, int], Story | None]
    kinds: tuple[str, ...]
    facts: tuple[int, int]
    limits: tuple[int, int]

    @property
    def answers(self) -> tuple[str, ...]:
        """All possible answers."""
        return tuple(name for kind in self.kinds for name in NAMES[kind])


class Event(NamedTuple):
    """Action of a person: walks to a place, takes an object or drops it; `at` is the person's place afterwards."""

    action: str
    person: Entity
    other: Entity
    at: Entity


def write(sentence: Sentence, names: Mapping[str, list[str]]) -> str:
    """Write a sentence with the entities' names `names[kind][number]`."""
    return "".join(part if isinstance(part, str) else names[part.kind][part.number] for part in sentence)


def errands(random: np.random.Generator, count: int) -> list[Event]:
    """Draw events in which persons walk, take objects that lie where they are, carry them and drop them. Nobody acts
    before the story has said where they are. An object that was never touched may lie anywhere."""
    places: dict[Entity, Entity] = {}
    holders: dict[Entity, Entity] = {}
    lying: dict[Entity, Entity] = {}
    objects = named("object", range(CAST["object"]))
    events: list[Event] = []
    for _ in range(count):
        drops = [("drop", person, thing) for thing, person in holders.items()]
        free = [thing for thing in objects if thing not in holders]
        takes = [("take", p, o) for p, place in places.items() for o in free if lying.get(o, place) == place]
        draw = random.random()
        options = takes if draw < 0.35 else drops if draw < 0.5 else []
        if not options:
            events.append(_walk(random, places))
            continue
        action, person, thing = options[random.integers(len(options))]
        if action == "take":
            holders[thing] = person
        else:
            del holders[thing]
            lying[thing] = places[person]
        events.append(Event(action, person, thing, places[person]))
    return events


def _walk(random: np.random.Generator, places: dict[Entity, Entity]) -> Event:
    """Draw a walk of a person to a place other than the current one in `places`."""
    person = Entity("person", int(random.integers(CAST["person"])))
    options = [place for place in named("place", range(CAST["place"])) if place != places.get(person)]
    place = places[person] = options[random.integers(len(options))]
    return Event("walk", person, place, place)


def told(random: np.random.Generator, events: list[Event]) -> tuple[Sentence, ...]:
    """Write the events as sentences."""
    verbs = {"walk": WALK, "take": TAKE, "drop": DROP}
    return tuple(
        (event.person, f" {verbs[event.action][random.integers(len(verbs[event.action]))]} the ", event.other, ".")
        for event in events
    )


def where_person(random: np.random.Generator, facts: int) -> Story | None:
    """Draw a story of qa1: the person's last walk gives the answer."""
    places: dict[Entity, Entity] = {}
    events = [_walk(random, places) for _ in range(facts)]
    last = {event.person: at for at, event in enumerate(events)}
    person, at = list(last.items())[random.integers(len(last))]
    return Story(told(random, events), ("Where is ", person, "?"), events[at].at, frozenset([at]))


def where_object(random: np.random.Generator, facts: int) -> Story | None:
    """Draw a story of qa2: the answer needs who last took or dropped the object, and where that person was or is."""
    events = errands(random, facts)
    last = {event.other: at for at, event in enumerate(events) if event.action != "walk"}
    if not last:
        return None
    thing = list(last)[random.integers(len(last))]
    touched = last[thing]
    action, person, _, _ = events[touched]
    walk = last_walk(events, person, touched if action == "drop" else len(events))
    return Story(told(random, events), ("Where is the ", thing, "?"), events[walk].at, frozenset([touched, walk]))


def where_before(random: np.random.Generator, facts: int) -> Story | None:
    """Draw a story of qa3: the answer needs who took the object, where that person was, and the walk that brought it.
    Only places to which the object came once, and by being carried, are asked about."""
    events = errands(random, facts)
    holders: dict[Entity, int] = {}
    stays: dict[Entity, list[Entity]] = {}
    found: list[tuple[Entity, int, frozenset[int]]] = []
    for at, event in enumerate(events):
        if event.action == "take":
            holders[event.other] = at
            stays.setdefault(event.other, [event.at])
        elif event.action == "drop":
            del holders[event.other]
        else:
            for thing, taken in holders.items():
                if events[taken].person == event.person:
                    stays[thing].append(event.at)
                    found.append((thing, at, frozenset([taken, last_walk(events, event.person, at), at])))
    found = [one for one in found if stays[one[0]].count(events[one[1]].at) == 1]
    if not found:
        return None
    thing, at, supporting = found[random.integers(len(found))]
    place = events[at].at
    before = stays[thing][stays[thing].index(place) - 1]
    question = ("Where was the ", thing, " before the ", place, "?")
    return Story(told(random, events), question, before, supporting)


def last_walk(events: list[Event], person: Entity, until: int) -> int:
    """Return the index of the person's last walk before event `until`."""
    return max(at for at in range(until) if events[at].action == "walk" and events[at].person == person)


def which_place(random: np.random.Generator, facts: int) -> Story | None:
    """Draw a story of qa4: places on a grid, each next to an earlier one. The question repeats the words of one fact,
    so the two sides of the relation must not be confused, and no other place lies in the direction asked about."""
    spots = {Entity("place", 0): (0, 0)}
    relations: list[tuple[Entity, str, Entity]] = []
    names = list(DIRECTIONS)
    for number in range(1, facts + 1):
        options = [
            (place, name, spot)
            for place, (x, y) in spots.items()
            for name, (right, up) in DIRECTIONS.items()
            if (spot := (x + right, y + up)) not in spots.values()
        ]
        old, name, spot = options[random.integers(len(options))]
        new = Entity("place", number)
        spots[new] = spot
        opposite = names[names.index(name) ^ 1]
        relations.append((new, name, old) if random.random() < 0.5 else (old, opposite, new))
    relations = [relations[i] for i in random.permutation(facts)]
    found: list[tuple[Sentence, Entity, int]] = []
    for at, (one, name, other) in enumerate(relations):
        right, up = DIRECTIONS[name]
        along = {place: x * right + y * up for place, (x, y) in spots.items()}
        if sum(step > along[other] for step in along.values()) == 1:
            found.append(((f"What is {name} of the ", other, "?"), one, at))
        if sum(step < along[one] for step in along.values()) == 1:
            found.append((("What is the ", one, f" {name} of?"), other, at))
    return _asked(random, [("The ", one, f" is {name} of the ", other, ".") for one, name, other in relations], found)


def who_gave(random: np.random.Generator, facts: int) -> Story | None:
    """Draw a story of qa5: objects pass from hand to hand; only questions that fit exactly one gift are asked."""
    holders: dict[Entity, Entity] = {}
    gifts: list[tuple[Entity, Entity, Entity]] = []
    told_facts: list[Sentence] = []
    persons = named("person", range(CAST["person"]))
    for _ in range(facts):
        thing = Entity("object", int(random.integers(CAST["object"])))
        giver = holders.get(thing, persons[random.integers(len(persons))])
        others = [person for person in persons if person != giver]
        taker = holders[thing] = others[random.integers(len(others))]
        gifts.append((giver, thing, taker))
        verb = GIVE[random.integers(len(GIVE))]
        told_facts.append(
            (giver, f" {verb} the ", thing, " to ", taker, ".")
            if random.random() < 0.5
            else (giver, f" {verb} ", taker, " the ", thing, ".")
        )
    found: list[tuple[Sentence, Entity, int]] = []
    for at, (giver, thing, taker) in enumerate(gifts):
        if sum(other[1:] == (thing, taker) for other in gifts) == 1:
            found.append((("Who gave the ", thing, " to ", taker, "?"), giver, at))
        if sum(other[:2] == (giver, thing) for other in gifts) == 1:
            found.append((("Who did ", giver, " give the ", thing, " to?"), taker, at))
        if sum(other[::2] == (giver, taker) for other in gifts) == 1:
            found.append((("What did ", giver, " give to ", taker, "?"), thing, at))
    return _asked(random, told_facts, found)


def _asked(
    random: np.random.Generator, facts: Sequence[Sentence], found: Sequence[tuple[Sentence, Entity, int]]
) -> Story | None:
    """Draw one of the questions found, each with its answer and the fact that gives it; None if there is none."""
    if not found:
        return None
    question, answer, at = found[int(random.integers(len(found)))]
    return Story(tuple(facts), question, answer, frozenset([at]))


def named(kind: str, numbers: np.ndarray | range) -> list[Entity]:
    return [Entity(kind, int(number)) for number in numbers]


def besides(others: Sequence[Entity], article: str = "the ") -> Sentence:
    """Join names with `and`."""
    return tuple(part for at, other in enumerate(others) for part in (" and " * (at > 0) + article, other))


def one_of_many(random: np.random.Generator, facts: int) -> Story:
    """Draw things, each in a place of its own, and ask for one. No two facts share a key or a thing."""
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


STORIES: Mapping[str, Task] = MappingProxyType(
    {
        "qa1": Task(where_person, ("place",), (2, 8), (2, 100)),
        "qa2": Task(where_object, ("place",), (4, 12), (3, 100)),
        "qa3": Task(where_before, ("place",), (6, 16), (3, 50)),
        "qa4": Task(which_place, ("place",), (2, 2), (2, 5)),
        "qa5": Task(who_gave, ("person", "object"), (2, 8), (2, 20)),
    }
)
NEEDLES: Mapping[str, Task] = MappingProxyType(
    {
        "needle": Task(one_of_many, ("object",), (1, 1), (1, 1)),
        "multi-key": Task(one_of_many, ("object",), (4, 4), (2, 8)),
        "multi-value": Task(all_of_one, ("object",), (4, 4), (2, 8)),
        "variables": Task(chained, ("person",), (8, 8), (5, 8)),
        "common-words": Task(counted, ("object",), (35, 35), (31, 35)),
    }
)
"""RULER's needle tasks (Hsieh et al. 2024) as questions with one-word answers, in the world of our stories.

- `needle`: one fact names what is in a place; what is there? (single needle)
- `multi-key`: four facts name what is in four places; what is in one of them?
- `multi-value`: four facts name things in one place; what is there besides three of them?
- `variables`: a person has a thing, four others have what the one before has; three more pass on another thing. Who has
  the first thing besides four of the five? (variable tracking)
- `common-words`: three words occur ten times each, five others once; which occurs as often as two of the three?

As in RULER, a needle's key is two words (here a place and its owner), facts stand at random positions in filler, those
of a chain in order, a chain has four hops, and a common word occurs ten times as often as others. Differences:

- There, values are seven-digit numbers, words or UUIDs, and variables five letters, which models with a small
  vocabulary cannot read. Here all are names of the world, eight of each kind.
- There, a model generates text and is scored by the share of all values in it. Here the first token of one word is
  scored: if several words are the answer, the question names all but one, each equally often left out. That recall of a
  value given the others is an easier question, and not comparable with RULER's numbers.
- Several keys queried in a row (multi-query) are `multi-key` here, one question each.
- RULER has one chain of variables by default. A second one here adds other names to the context.
- There, the list of words fills the context: ten common ones thirty times, others three times. Here it is the same at
  every length and spread in filler.
"""
TASKS: Mapping[str, Task] = MappingProxyType({**STORIES, **NEEDLES})
"""All tasks of `ssmscope.data.babi.questions`; the place of a task seeds it."""
