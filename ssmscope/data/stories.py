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
    """Recipe for the stories of a task.

    `draw` draws a story with the given number of facts, None if no question has a unique answer. `kinds` are those of
    the answers, `facts` the default minimum and maximum number of facts, `limits` the range of a user's choice.
    """

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
    """Draw events in which persons walk, take objects that lie where they are, carry them and drop them.

    Nobody acts before the story has said where they are. An object that was never touched may lie anywhere.
    """
    places: dict[Entity, Entity] = {}
    holders: dict[Entity, Entity] = {}
    lying: dict[Entity, Entity] = {}
    objects = [Entity("object", i) for i in range(CAST["object"])]
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
    options = [place for i in range(CAST["place"]) if (place := Entity("place", i)) != places.get(person)]
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
    person = list(last)[random.integers(len(last))]
    at = last[person]
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
    until = touched if action == "drop" else len(events)
    walk = last_walk(events, person, until)
    supporting = frozenset([touched, walk])
    return Story(told(random, events), ("Where is the ", thing, "?"), events[walk].at, supporting)


def where_before(random: np.random.Generator, facts: int) -> Story | None:
    """Draw a story of qa3: the answer needs who took the object, where that person was, and the walk that brought it.

    Only places to which the object came once, and by being carried, are asked about.
    """
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
    """Draw a story of qa4: places on a grid, each next to an earlier one.

    The question repeats the words of one fact, so the two sides of the relation must not be confused, and no other
    place lies in the direction that it asks about.
    """
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
    order = random.permutation(facts)
    relations = [relations[i] for i in order]
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
    persons = [Entity("person", i) for i in range(CAST["person"])]
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
    for at, gift in enumerate(gifts):
        giver, thing, taker = gift
        questions: list[Sentence] = [
            ("Who gave the ", thing, " to ", taker, "?"),
            ("What did ", giver, " give to ", taker, "?"),
            ("Who did ", giver, " give the ", thing, " to?"),
        ]
        for left_out in (0, 2, 1):
            known = [part for i, part in enumerate(gift) if i != left_out]
            if sum([part for i, part in enumerate(other) if i != left_out] == known for other in gifts) == 1:
                found.append((questions[left_out], gift[left_out], at))
    return _asked(random, told_facts, found)


def _asked(
    random: np.random.Generator, facts: Sequence[Sentence], found: Sequence[tuple[Sentence, Entity, int]]
) -> Story | None:
    """Draw one of the questions found, each with its answer and the fact that gives it; None if there is none."""
    if not found:
        return None
    question, answer, at = found[random.integers(len(found))]
    return Story(tuple(facts), question, answer, frozenset([at]))


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "qa1": Task(where_person, ("place",), (2, 8), (2, 100)),
        "qa2": Task(where_object, ("place",), (4, 12), (3, 100)),
        "qa3": Task(where_before, ("place",), (6, 16), (3, 50)),
        "qa4": Task(which_place, ("place",), (2, 2), (2, 5)),
        "qa5": Task(who_gave, ("person", "object"), (2, 8), (2, 20)),
    }
)
