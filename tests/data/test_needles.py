"""RULER's tasks: a reader who goes through the context sentence by sentence finds each answer, and no other."""

import re
from collections import Counter

import pytest
from ssmscope.data.babi import question_tokens, questions
from ssmscope.data.stories import NEEDLES, OBJECTS, PERSONS, PLACES, STORIES, TASKS
from ssmscope.zoo.documents import byte_tokenizer

WHO, WHERE, WHAT = (f"({'|'.join(names)})" for names in (PERSONS, PLACES, OBJECTS))


def in_places(context, question):
    """Everything at the place of the question that the question does not name."""
    key = re.search(rf"in the {WHERE} of {WHO}", question).groups()
    held = [thing for place, person, thing in re.findall(rf"In the {WHERE} of {WHO} is the {WHAT}", context)
            if (place, person) == key]  # fmt: skip
    return [thing for thing in held if thing not in re.findall(WHAT, question)]


def owners(context, question):
    """Everybody who comes to have the thing, hop by hop, whom the question does not name."""
    has: dict[str, str] = {}
    for person, thing, source in re.findall(rf"{WHO} has (?:the {WHAT}|what {WHO} has)", context):
        assert person not in has
        has[person] = thing or has[source]  # a fact never stands before what it refers to
    thing, named = re.search(WHAT, question).group(), re.findall(WHO, question)
    assert all(has[person] == thing for person in named)
    return [person for person, held in has.items() if held == thing and person not in named]


def as_often(context, question):
    counts, named = Counter(re.findall(rf"The {WHAT}", context)), re.findall(WHAT, question)
    assert len({counts[word] for word in named}) == 1
    return [word for word, count in counts.items() if count == counts[named[0]] and word not in named]


SOLVERS = {"needle": in_places, "multi-key": in_places, "multi-value": in_places, "variables": owners}
SOLVERS["common-words"] = as_often


@pytest.mark.parametrize("task", NEEDLES)
def test_a_reader_finds_exactly_the_answer(task):
    for facts in (None, NEEDLES[task].limits):
        for length, spaced in ((0, False), (300, True)):
            data = questions(task, length=length, examples=24, facts=facts, spaced=spaced, seed=4)
            assert set(Counter(data.answers).values()) == {3}  # of eight candidates
            for one in data.examples:
                assert SOLVERS[task](one.context, one.question) == [one.answer]


def test_sizes_are_rulers():
    """Two words in a key, 1 or 4 needles, four values of one key, a chain of four hops, words ten times as often."""
    found = {task: questions(task, length=0, examples=16).examples for task in NEEDLES}
    assert {len(one.facts) for one in found["needle"]} == {1}
    for task, keys in (("multi-key", 4), ("multi-value", 1)):
        for one in found[task]:
            facts = re.findall(rf"In the {WHERE} of {WHO} is the {WHAT}", one.context)
            assert len({fact[:2] for fact in facts}) == keys and len({fact[2] for fact in facts}) == 4
    for one in found["multi-value"]:
        assert sorted([one.answer, *re.findall(WHAT, one.question)]) == sorted(re.findall(WHAT, one.context))
    assert {len(re.findall(WHO, one.question)) for one in found["variables"]} == {4}
    assert {len(one.needles) for one in found["variables"]} == {1, 2, 3, 4, 5}
    for one in found["common-words"]:
        assert sorted(Counter(re.findall(WHAT, one.context)).values()) == [1] * 5 + [10] * 3


@pytest.mark.parametrize("task", NEEDLES)
def test_the_needles_alone_give_the_answer(task):
    for one in questions(task, length=200, examples=16, seed=2).examples:
        text = " ".join(fact.text for fact in one.needles)
        assert all(one.context[fact.start : fact.end] == fact.text for fact in one.facts)
        if task == "variables":
            assert re.findall(WHO, text)[-1 if len(one.needles) == 1 else -2] == one.answer
            assert re.search(WHAT, one.question).group() == re.search(WHAT, text).group()
        else:
            assert set(re.findall(WHAT, text)) == {one.answer}
            assert len(re.findall(one.answer, one.context)) == len(one.needles)


def test_splits_share_no_needle_and_stories_come_first():
    told = [{fact.text for one in questions("needle", length=0, examples=200, split=split).examples
             for fact in one.facts} for split in ("train", "test")]  # fmt: skip
    assert not told[0] & told[1] and min(map(len, told)) > 50
    assert tuple(TASKS) == (*STORIES, *NEEDLES)  # the place of a task seeds it


def test_the_first_bytes_tell_the_answers_apart():
    for task in NEEDLES:
        data = questions(task, length=0, examples=8)
        tokens = question_tokens(data, byte_tokenizer())
        assert len(set(tokens.targets.max(axis=1))) == len(data.candidates) == 8
