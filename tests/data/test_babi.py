import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from differential import PAPER_PROMPT
from refusals import refuses
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast
from ssmscope.data.babi import SPLITS, question_tokens, questions
from ssmscope.data.filler import generated, sentences, without_world
from ssmscope.data.language import load_lines
from ssmscope.data.stories import NAMES, OBJECTS, PERSONS, PLACES, STORIES
from ssmscope.data.tokens import IGNORED
from ssmscope.errors import InputError
from ssmscope.zoo.documents import byte_tokenizer, symbol_tokenizer, word_tokenizer
from ssmscope.zoo.tokenizers import train_tokenizer

PROSE = [
    f"Sentence {i} of the {'long and winding ' * (i % 4)}chronicle goes on{' and on' * (i % 3)} ." for i in range(200)
]

WHO, WHERE, WHAT = (f"({'|'.join(names)})" for names in (PERSONS, PLACES, OBJECTS))
EVENT = re.compile(
    rf"{WHO} (?:(?:walked|went|hurried|moved) to the {WHERE}"
    rf"|(?:picked up|took|grabbed) the {WHAT}|(?:put down|dropped|left behind) the {WHAT})"
)


def histories(context):
    """Return the places of every person and every object, by walking through the story."""
    places, carried, stays = {}, {}, {}
    for person, place, taken, dropped in EVENT.findall(context):
        if place:
            assert places.get(person) != place
            places[person] = place
            for thing in (thing for thing, holder in carried.items() if holder == person):
                stays[thing].append(place)
        elif taken:
            assert taken not in carried, "nobody takes what another person has"
            assert stays.get(taken, [places[person]])[-1] == places[person], "nobody takes what is elsewhere"
            stays.setdefault(taken, [places[person]])
            carried[taken] = person
        else:
            assert carried.pop(dropped) == person, "nobody drops what another person has"
    return places, stays


def solve_person(context, question):
    return [histories(context)[0][re.search(WHO, question).group()]]


def solve_object(context, question):
    return [histories(context)[1][re.search(WHAT, question).group()][-1]]


def solve_before(context, question):
    thing, place = re.search(WHAT, question).group(), re.search(WHERE, question).group()
    stays = histories(context)[1][thing]
    return [before for before, after in zip(stays, stays[1:]) if after == place]


def solve_place(context, question):
    """All places that lie so, seen from the spots that the relations give every place."""
    steps = {"north": (0, 1), "south": (0, -1), "east": (1, 0), "west": (-1, 0)}
    side = "(north|south|east|west)"
    facts = re.findall(rf"The {WHERE} is {side} of the {WHERE}", context)
    spots = {facts[0][0]: np.zeros(2)}
    while len(spots) <= len(facts):
        for one, name, other in facts:
            if one in spots:
                spots.setdefault(other, spots[one] - steps[name])
            elif other in spots:
                spots[one] = spots[other] + steps[name]
    assert len({tuple(spot) for spot in spots.values()}) == len(spots)
    name, here = re.search(side, question).group(), re.search(WHERE, question).group()
    sign = 1 if question.startswith(f"What is {name}") else -1
    return [p for p, spot in spots.items() if sign * np.dot(spot - spots[here], steps[name]) > 0]


def solve_gift(context, question):
    owners, gifts = {}, []
    verb = "(?:gave|handed|passed)"
    for a, thing, b, c, d, other in re.findall(
        rf"{WHO} {verb} the {WHAT} to {WHO}|{WHO} {verb} {WHO} the {WHAT}", context
    ):
        gift = (a or c, thing or other, b or d)
        assert gift[0] != gift[2] and owners.get(gift[1], gift[0]) == gift[0], "one gives what one has"
        owners[gift[1]] = gift[2]
        gifts.append(gift)
    if match := re.match(rf"Who gave the {WHAT} to {WHO}", question):
        return [a for a, thing, b in gifts if (thing, b) == match.groups()]
    if match := re.match(rf"Who did {WHO} give the {WHAT} to", question):
        return [b for a, thing, b in gifts if (a, thing) == match.groups()]
    match = re.match(rf"What did {WHO} give to {WHO}", question)
    return [thing for a, thing, b in gifts if (a, b) == match.groups()]


SOLVERS = {
    "qa1": solve_person, "qa2": solve_object, "qa3": solve_before, "qa4": solve_place, "qa5": solve_gift
}  # fmt: skip


@pytest.mark.parametrize("spaced", [True, False])
@pytest.mark.parametrize("length", [0, 150])
@pytest.mark.parametrize("task", STORIES)
def test_a_solver_that_reads_the_context_finds_exactly_the_answer(task, length, spaced):
    for facts in (None, STORIES[task].limits):
        data = questions(task, length=length, examples=40, facts=facts, spaced=spaced, seed=4)
        for one in data.examples:
            assert SOLVERS[task](one.context, one.question) == [one.answer]


def completed(needles, elsewhere):
    """Return the needles after their preconditions: somebody came from elsewhere, and took an object that is dropped
    later."""
    text = " ".join(needles)
    person = re.search(WHO, text).group()
    dropped = re.findall(rf"(?:put down|dropped|left behind) the {WHAT}", text)
    before = [f"{person} walked to the {elsewhere} .", *(f"{person} took the {thing} ." for thing in dropped)]
    return " ".join([*before, *needles])


@pytest.mark.parametrize("task", STORIES)
def test_the_supporting_facts_alone_give_the_answer_and_none_of_them_can_be_spared(task):
    number = {"qa1": 1, "qa2": 2, "qa3": 3, "qa4": 1, "qa5": 1}[task]
    for one in questions(task, length=0, examples=100, seed=1).examples:
        needles = [fact.text for fact in one.needles]
        assert len(needles) == number
        text = " ".join(needles)
        if task in ("qa4", "qa5"):
            assert SOLVERS[task](text, one.question) == [one.answer]
            continue
        elsewhere = next(name for name in PLACES if name not in text + one.question)
        assert SOLVERS[task](completed(needles, elsewhere), one.question) == [one.answer]
        for spared in range(number) if number > 1 else ():
            less = completed([fact for at, fact in enumerate(needles) if at != spared], elsewhere)
            try:
                found = SOLVERS[task](less, one.question)
            except KeyError:  # nobody took the object
                continue
            assert found != [one.answer]


@pytest.mark.parametrize("task", STORIES)
def test_answers_are_balanced_and_have_distractors(task):
    kind = STORIES[task]
    data = questions(task, length=0, examples=20 * len(kind.answers))
    assert data.candidates == kind.answers and Counter(data.answers) == dict.fromkeys(kind.answers, 20)
    for one in data.examples:
        names = next(names for names in NAMES.values() if one.answer in names)
        mentioned = [word for word in re.findall(r"\w+", one.context) if word in names]
        assert one.answer in mentioned
        assert one.distractors == tuple(dict.fromkeys(word for word in mentioned if word != one.answer))
        assert one.distractors
    # the answer's place among the candidates and in the story says little about it
    firsts = Counter(re.findall("|".join(kind.answers), c)[0] == a for c, a in zip(data.contexts, data.answers))
    assert firsts[True] < 0.75 * len(data)


def test_every_name_of_a_kind_begins_with_its_own_letter():
    for names in (*NAMES.values(), PERSONS + OBJECTS):
        assert len({name[0] for name in names}) == len(names)


@pytest.mark.parametrize("filler", [None, PROSE])
@pytest.mark.parametrize("length", [0, 60, 300])
def test_offsets_point_at_the_facts_and_the_rest_is_filler(filler, length):
    for one in questions("qa2", length=length, examples=40, filler=filler).examples:
        words, rest, end = one.context.split(), [], 0
        for fact in one.facts:
            assert one.context[fact.start : fact.end] == fact.text
            assert words[fact.first_word : fact.last_word] == fact.text.split()
            assert fact.start >= end
            rest.append(one.context[end : fact.start])
            end = fact.end
        rest = " ".join(" ".join([*rest, one.context[end:]]).split())
        assert not set(re.findall(r"\w+", rest)) & {*PERSONS, *PLACES, *OBJECTS}
        if filler and rest:
            kept = [int(number) for number in re.findall(r"Sentence (\d+)", rest)]
            assert rest == " ".join(PROSE[i] for i in kept)
            steps = np.diff(kept) % len(PROSE)
            assert (steps >= 1).all() and (steps[:-8] == 1).all()  # only the last rooms are too small for some
        assert "  " not in one.context


def test_contexts_are_as_long_as_they_may_be():
    shortest = min(len(text.split()) for text in PROSE)
    alone = questions("qa3", length=0, examples=60)
    for length in (60, 200, 5000):
        data = questions("qa3", length=length, examples=60 if length < 1000 else 5, filler=PROSE)
        for one, story in zip(data.examples, alone.examples):
            size, least = len(one.context.split()), len(story.context.split())
            assert size == least if least + shortest > length else length - shortest < size <= length


def test_any_count_can_measure_the_length():
    tokenizer = train_tokenizer(PROSE + list(questions("qa1", length=0, examples=50).contexts), vocabulary=300)

    def tokens(text):
        return len(tokenizer(text)["input_ids"])

    by_tokens = [tokens(c) for c in questions("qa1", length=200, examples=30, filler=PROSE, count=tokens).contexts]
    assert 170 < min(by_tokens) and max(by_tokens) <= 200
    by_bytes = [len(c) for c in questions("qa1", length=900, examples=30, filler=PROSE, count=len).contexts]
    assert 900 - max(map(len, PROSE)) < min(by_bytes) and max(by_bytes) <= 900

    def dear(text):
        return len(text.split()) ** 2 // 50  # the whole counts more than its parts

    for one in questions("qa1", length=200, examples=3, filler=PROSE, count=dear, facts=(2, 2)).examples:
        assert 130 < dear(one.context) <= 200


def test_facts_are_spread_over_the_whole_context():
    data = questions("qa1", length=1000, examples=300, filler=PROSE)
    depth = np.array([fact.start / len(one.context) for one in data.examples for fact in one.facts])
    share = np.histogram(depth, bins=10, range=(0, 1))[0] / len(depth)
    assert (abs(share - 0.1) < 0.035).all()


def test_a_seed_gives_the_same_stories_at_every_length_and_another_seed_others():
    stories = {}
    for key, options in {
        "short": {"length": 0}, "long": {"length": 200}, "other filler": {"length": 100, "filler": PROSE},
        "other seed": {"length": 0, "seed": 8}, "other split": {"length": 0, "split": "test"},
    }.items():  # fmt: skip
        data = questions("qa2", **{"examples": 40, "seed": 7, **options})
        stories[key] = [(*(f.text for f in one.facts), one.question, one.answer) for one in data.examples]
    assert stories["short"] == stories["long"] == stories["other filler"]
    assert not set(stories["short"]) & {*stories["other seed"], *stories["other split"]}
    assert (
        questions("qa2", length=0, examples=15, seed=7).examples
        == questions("qa2", length=0, examples=40, seed=7).take(range(15)).examples
    )
    prints = [questions("qa2", length=90, examples=9, seed=seed).fingerprint for seed in (1, 1, 2)]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("task", ["qa1", "qa4"])
def test_splits_share_no_story_under_any_seeds(task):
    stories = {
        split: {
            " ".join([*(fact.text for fact in one.facts), one.question])
            for seed in range(2)
            for one in questions(task, length=0, examples=150, seed=seed, split=split, facts=(2, 2)).examples
        }
        for split in SPLITS
    }
    assert not stories["train"] & stories["validation"] and not stories["train"] & stories["test"]
    assert not stories["validation"] & stories["test"]


def test_impossible_questions_are_refused():
    for task, options, message in [
        ("qa6", {}, "no task 'qa6'; there are qa1, .*did you mean 'qa"),
        ("qa1", {"split": "tests"}, "no split 'tests'.*did you mean 'test'"),
        ("qa1", {"length": -1}, "length is -1"),
        ("qa1", {"examples": 0}, "examples is 0"),
        ("qa4", {"facts": (2, 8)}, "qa4 cannot have 2 to 8 facts; allowed are 2 to 5"),
        ("qa2", {"facts": (6, 5)}, "6 to 5 facts"),
        ("qa1", {"filler": "One. Two."}, "the filler is one text"),
        ("qa1", {"filler": ["The attic is cold .", " "]}, "none of 2 sentences"),
    ]:
        refuses(message, questions, task, **{"length": 50, "examples": 3, **options})


def test_sentences_are_cut_at_their_ends():
    lines = [
        " = Title = ", "", 'It costs 3 @.@ 5 cm . H. gammarus , e.g. here , is large ! " Is it so ? It is . No .',
        'He paid 3.5 p.m. today. "Why?" she asked. 12 men ran! Dr. who knows? Yes.', "no end here",
    ]  # fmt: skip
    assert sentences(lines) == (
        "It costs 3 @.@ 5 cm .", "H. gammarus , e.g. here , is large !", '" Is it so ?', "It is .",
        "He paid 3.5 p.m. today.", '"Why?" she asked.', "12 men ran!", "Dr. who knows?", "no end here",
    )  # fmt: skip
    refuses("no sentence in the 2 lines", sentences, ["= A =", ""])


def test_filler_never_names_the_world():
    given = ["The Attic, of course .", "An attic-like room .", "Attics  are  cold .", "Hugo's hat .", "A hugo ."]
    assert without_world(given) == ["Attics are cold ."]
    for spaced in (True, False):
        made = generated(np.random.default_rng(0), 5000, spaced)
        assert without_world(made) == made and len(set(made)) > 4000
        assert all(text.endswith(" ." if spaced else ".") and text[0].isupper() for text in made)


def test_real_text_can_be_the_filler(real_data):
    real_data("wikitext2", "validation")
    filler = sentences(load_lines("wikitext2", "validation")[:400])
    data = questions("qa3", length=300, examples=50, filler=filler)
    assert [solve_before(one.context, one.question) for one in data.examples] == [[a] for a in data.answers]
    assert all(280 < len(context.split()) <= 300 for context in data.contexts)


def test_the_answer_is_asked_after_the_prompt_and_nowhere_else():
    data = questions("qa2", length=90, examples=20)
    tokens = question_tokens(data, word_tokenizer(data.texts))
    assert tokens.ids.shape == tokens.targets.shape
    assert (tokens.name, tokens.split) == ("qa2", "train")
    for row, asked, one in zip(tokens.ids, tokens.targets, data.examples):
        words = [*one.context.split(), *one.question.split()]
        assert [tokens.tokens[i] for i in row[: len(words)]] == words
        assert np.flatnonzero(asked != IGNORED).tolist() == [len(words) - 1]
        assert tokens.tokens[asked[len(words) - 1]] == one.answer
        assert set(row[len(words) :]) <= {0}
    assert max(len(f"{one.context} {one.question}".split()) for one in data.examples) == tokens.ids.shape[1]


def test_bytes_are_asked_for_the_answers_first_letter():
    data = questions("qa5", length=40, examples=30, spaced=False)
    tokens = question_tokens(data, byte_tokenizer(), template=PAPER_PROMPT)
    for row, asked, one, prompt in zip(tokens.ids, tokens.targets, data.examples, data.prompts(PAPER_PROMPT)):
        assert prompt == f"<context>{one.context}</context> Question:{one.question} Answer:"
        (at,) = np.flatnonzero(asked != IGNORED)
        assert bytes(row[: at + 1].tolist()).decode() == prompt + " "
        assert chr(asked[at]) == one.answer[0]


def test_subword_tokenizers_are_asked_for_the_answers_first_token():
    data = questions("qa1", length=60, examples=40, spaced=False)
    tokenizer = train_tokenizer(data.texts, vocabulary=400)
    tokens = question_tokens(data, tokenizer)
    for row, asked, prompt, answer in zip(tokens.ids, tokens.targets, data.prompts(), data.answers):
        (at,) = np.flatnonzero(asked != IGNORED)
        alone = tokenizer(answer, add_special_tokens=False)["input_ids"]
        assert asked[at] == alone[0]
        assert row[: at + 1].tolist() == tokenizer(prompt, add_special_tokens=False)["input_ids"]


def test_tokenizers_that_cannot_ask_are_refused():
    data = questions("qa1", length=0, examples=16)
    with pytest.raises(InputError, match="does not know '.*', a word of a fact, question or answer"):
        question_tokens(data, word_tokenizer(data.contexts))
    refuses("is not a symbol of this tokenizer", question_tokens, data, symbol_tokenizer(["0", "1"]))
    letters = train_tokenizer(data.texts, vocabulary=60)
    refuses("must hold {context} and {question} once each", question_tokens, data, letters, template="{context}")
    alike = questions("qa1", length=0, examples=8)
    same = [one for one in alike.examples if one.answer in ("attic", "bakery")]
    same[1] = replace(same[1], answer=same[0].answer[0] + "x")
    refuses("begin with the same token", question_tokens, replace(alike, examples=tuple(same)), byte_tokenizer())
    refuses("needs a fast tokenizer", question_tokens, data, object())
    silent = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"?": 0}, [])))  # leaves out what it does not know
    refuses("makes no token of the answer '", question_tokens, data, silent)
