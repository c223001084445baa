"""Questions about facts hidden in long text: BABILong's recipe (Kuratov et al. 2024) over our own stories.

The facts of a story (`ssmscope.data.stories`) stand at random places between sentences of filler
(`ssmscope.data.filler`); both keep their order, and the question comes last. Differential Mamba (section 4.5, appendix
A.5) compares models on such questions, and its Figure 6 shows the probability of the needle at each layer.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ssmscope.core.batching import MAX_STORY_WORDS, refuse_held
from ssmscope.core.text_files import parse_json
from ssmscope.core.tokenizing import tokenize
from ssmscope.data.filler import generated, spaced_out, without_world
from ssmscope.data.language import token_names
from ssmscope.data.prompts import answered
from ssmscope.data.rows import SUFFIXES, Row, checked_text, read_rows
from ssmscope.data.stories import NAMES, TASKS, Task, write
from ssmscope.data.tokens import IGNORED, TokenData, fingerprint_of
from ssmscope.errors import InputError, check_whole, did_you_mean

PROMPT = "{context} {question}"

SPLITS = {"train": (0, 1), "validation": (2,), "test": (3,)}
"""Residues modulo 4 of the CRC-32 of a story's text that belong to each split."""

GENERATED_SENTENCES = 1000
"""Number of filler sentences drawn from the grammar when no filler is given."""


@dataclass(frozen=True)
class Fact:
    """One sentence of the story: `context[start:end]` or `context.split()[first_word:last_word]`. `supporting` is True
    for the needles, the facts that give the answer."""

    text: str
    start: int
    end: int
    first_word: int
    last_word: int
    supporting: bool


@dataclass(frozen=True)
class Question:
    """A context, a question about it and its one-word answer. `facts` are the story's sentences in the order of the
    context, whose rest is filler, and `distractors` other words of the answer's kind in it, in order of appearance."""

    context: str
    question: str
    answer: str
    facts: tuple[Fact, ...]
    distractors: tuple[str, ...]

    @property
    def needles(self) -> tuple[Fact, ...]:
        return tuple(fact for fact in self.facts if fact.supporting)


@dataclass(frozen=True)
class QuestionData:
    """Questions of one task, with all possible answers as `candidates`."""

    name: str
    split: str
    examples: tuple[Question, ...]
    candidates: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def contexts(self) -> tuple[str, ...]:
        return tuple(example.context for example in self.examples)

    @property
    def questions(self) -> tuple[str, ...]:
        return tuple(example.question for example in self.examples)

    @property
    def answers(self) -> tuple[str, ...]:
        return tuple(example.answer for example in self.examples)

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts to train a word tokenizer on: all contexts, all questions and all names of the world."""
        return (*self.contexts, *self.questions, *(name for names in NAMES.values() for name in names))

    @property
    def fingerprint(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of everything but name and split."""
        content = [[dataclasses.asdict(example) for example in self.examples], self.candidates]
        return fingerprint_of(content, sort_keys=True)

    def take(self, indices: Sequence[int] | np.ndarray, *, split: str | None = None) -> QuestionData:
        """Return the questions at `indices`, in that order."""
        return dataclasses.replace(self, split=split or self.split, examples=tuple(self.examples[i] for i in indices))

    def prompts(self, template: str = PROMPT) -> list[str]:
        """Fill `template`, which holds `{context}` and `{question}` once each, with every context and question."""
        if template.count("{context}") != 1 or template.count("{question}") != 1:
            raise InputError(f"the template {template!r} must hold {{context}} and {{question}} once each")
        return [template.replace("{question}", one.question).replace("{context}", one.context) for one in self.examples]


def count_words(text: str) -> int:
    """Count the words between white space."""
    return len(text.split())


def questions(
    task: str,
    *,
    length: int,
    examples: int = 1000,
    split: str = "train",
    filler: Sequence[str] | None = None,
    seed: int = 0,
    count: Callable[[str], int] = count_words,
    facts: tuple[int, int] | None = None,
    spaced: bool = True,
) -> QuestionData:
    """Draw questions of one task whose facts are hidden in contexts of at most `length`.

    The answers are balanced: every run of as many examples as there are candidates has each once as its answer. A seed
    gives the same stories and questions at every length and in every filler. Splits never share a story.

    Args:
        task: `qa1` (where is a person), `qa2` (where is an object), `qa3` (where was it before), `qa4` (which place
            lies north of …), `qa5` (who gave what to whom), or one of `NEEDLES`.
        length: maximum length of a context without its question, as measured by `count`, by default in words. Whole
            sentences of filler are added while any fits; length 0 gives the facts alone (BABILong's 0k).
        filler: sentences in their natural order, read cyclically from a random one on; those that name something of
            the world are left out. By default sentences of a small grammar.
        facts: minimum and maximum number of facts per story (default: `TASKS[task].facts`), drawn uniformly.
        spaced: put a space before the full stops and question marks of our sentences, as WikiText does, so that a word
            tokenizer reads the same word in the facts and as the answer. False suits subword tokenizers.

    Raises:
        InputError: for an unknown task or split, a number out of range, or filler without a usable sentence.
    """
    for what, name, known in (("task", task, TASKS), ("split", split, SPLITS)):
        if name not in known:
            raise InputError(f"there is no {what} '{name}'; there are {', '.join(known)}{did_you_mean(name, known)}")
    check_whole(0, length=length, seed=seed)
    check_whole(1, examples=examples)
    refuse_contexts(length, examples)
    kind = TASKS[task]
    least, most = kind.facts if facts is None else facts
    if not kind.limits[0] <= least <= most <= kind.limits[1]:
        allowed = f"{kind.limits[0]} to {kind.limits[1]}"
        raise InputError(f"{task} cannot have {least} to {most} facts; allowed are {allowed}, the minimum first")
    key = [seed, list(TASKS).index(task), list(SPLITS).index(split)]
    stories, places = (np.random.default_rng([*key, part]) for part in (0, 1))
    sentences = generated(places, GENERATED_SENTENCES, spaced) if filler is None else without_world(filler)
    hay = [(sentence, max(count(f" {sentence}"), 1)) for sentence in sentences]
    made: list[Question] = []
    while len(made) < examples:
        for at in stories.permutation(len(kind.answers))[: examples - len(made)]:
            number = int(stories.integers(least, most + 1))
            story = draw_story(kind, kind.answers[at], number, split, stories, spaced)
            made.append(hide_facts(story, hay, length, count, places))
    return QuestionData(task, split, tuple(made), kind.answers)


class WrittenStory(NamedTuple):
    """A story in words; `supporting` holds the indices of the facts that give the answer."""

    facts: tuple[str, ...]
    question: str
    answer: str
    supporting: frozenset[int]
    distractors: tuple[str, ...]


def draw_story(
    task: Task, answer: str, facts: int, split: str, random: np.random.Generator, spaced: bool
) -> WrittenStory:
    """Draw a story of the split with this answer: first without names, so that any name can be the answer."""
    while True:
        story = task.draw(random, facts)
        if story is None or answer not in NAMES[story.answer.kind]:
            continue
        names = {kind: [every[i] for i in random.permutation(len(every))] for kind, every in NAMES.items()}
        own = names[story.answer.kind]
        here, there = story.answer.number, own.index(answer)
        own[here], own[there] = own[there], own[here]
        told = [write(sentence, names) for sentence in (*story.facts, story.question)]
        parts = [part for fact in story.facts for part in fact if not isinstance(part, str)]
        alike = dict.fromkeys(own[part.number] for part in parts if part.kind == story.answer.kind)
        distractors = tuple(name for name in alike if name != answer)
        if (distractors or len(told) == 2) and zlib.crc32("\n".join(told).encode()) % 4 in SPLITS[split]:
            *written, question = map(spaced_out, told) if spaced else told
            return WrittenStory(tuple(written), question, answer, story.supporting, distractors)


Haystack = Sequence[tuple[str, int]]
"""Filler sentences in order, each with the length that it adds to a context."""


def hide_facts(
    story: WrittenStory, hay: Haystack, length: int, count: Callable[[str], int], random: np.random.Generator
) -> Question:
    """Place the facts of a story between sentences of filler, from a random one on, without those longer than the room
    that is left; several facts may share one gap."""
    room, found = length - count(" ".join(story.facts)), list[str]()
    shortest, at = min(size for _, size in hay), int(random.integers(len(hay)))
    while room >= shortest:
        sentence, size = hay[at % len(hay)]
        if size <= room:
            found.append(sentence)
            room -= size
        at += 1
    places = np.sort(random.random(len(story.facts)))
    while True:
        question = _placed(story, found, (places * (len(found) + 1)).astype(int).tolist())
        if not found or count(question.context) <= length:
            return question
        found.pop()  # The whole can count more than the sum of its parts.


def _placed(story: WrittenStory, filler: Sequence[str], places: Sequence[int]) -> Question:
    """Insert fact i of the story before filler sentence `places[i]`."""
    order = [(place, number, text, True) for number, (place, text) in enumerate(zip(places, story.facts))]
    order += [(place, len(order), text, False) for place, text in enumerate(filler)]
    facts, start, word, texts = list[Fact](), 0, 0, list[str]()
    for _, number, text, is_fact in sorted(order):
        stop, last = start + len(text), word + len(text.split())
        if is_fact:
            facts.append(Fact(text, start, stop, word, last, number in story.supporting))
        texts.append(text)
        start, word = stop + 1, last
    return Question(" ".join(texts), story.question, story.answer, tuple(facts), story.distractors)


QUESTION_COLUMNS = ("context", "question", "answer")


def load_questions(path: str | Path) -> QuestionData:
    """Load the questions of a csv, tsv, jsonl or parquet file with the columns `context`, `question` and `answer`.

    An optional column `distractors` holds other words of the context that might be taken for the answer: a list, in a
    csv or tsv file written as JSON or separated by commas. It may be empty. Raise InputError if the file cannot be
    read, a column or a value is missing, or distractors are not words or include the answer.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES or not os.path.isfile(path):
        raise InputError(
            f"there is no file of questions {path}; give one ending in {', '.join(SUFFIXES)}, with the columns "
            f"{', '.join(QUESTION_COLUMNS)}"
        )
    examples = []
    for row in read_rows(path):
        context, question, answer = (checked_text(row, column) for column in QUESTION_COLUMNS)
        examples.append(Question(context, question, answer, (), _distractors(row, answer)))
    words = {word for one in examples for word in (one.answer, *one.distractors)}
    return QuestionData(path.stem, "all", tuple(examples), tuple(sorted(words)))


def _distractors(row: Row, answer: str) -> tuple[str, ...]:
    given = row.get("distractors")
    if isinstance(given, str) and given.strip().startswith("["):
        with suppress(ValueError):
            given = parse_json(given.strip())
    elif isinstance(given, str):
        given = given.split(",") if given.strip() else None
    if given is None or given != given:
        return ()
    if not isinstance(given, list) or not all(isinstance(word, str) and word.strip() for word in given):
        raise InputError(f"{row.where} has the distractors {given!r:.60}; allowed is a list of words")
    words = tuple(dict.fromkeys(word.strip() for word in given))
    if answer in words:
        raise InputError(f"{row.where} has its answer {answer!r:.40} among the distractors; leave it out there")
    return words


@dataclass(frozen=True, eq=False)
class QuestionTokens(TokenData):
    """Questions as rows of tokens, padded on the right; `lengths` and `tasks` (examples,) are the number of tokens of
    each prompt and the index of its task in `task_names`."""

    lengths: np.ndarray
    tasks: np.ndarray
    task_names: tuple[str, ...]

    @staticmethod
    def joined(parts: Sequence[QuestionTokens], name: str) -> QuestionTokens:
        """Concatenate the questions of several tasks with one tokenizer and split."""
        longest = max(part.ids.shape[1] for part in parts)
        names = tuple(dict.fromkeys(task for part in parts for task in part.task_names))

        def joined(of: str, fill: int = 0) -> np.ndarray:
            rows = [getattr(part, of) for part in parts]
            wide = [
                r if r.ndim == 1 else np.pad(r, ((0, 0), (0, longest - r.shape[1])), constant_values=fill) for r in rows
            ]
            return np.concatenate(wide)

        tasks = [np.array([names.index(task) for task in part.task_names])[part.tasks] for part in parts]
        rows = joined("ids"), joined("targets", IGNORED), parts[0].tokens, joined("lengths"), np.concatenate(tasks)
        return QuestionTokens(name, parts[0].split, *rows, names)


def refuse_contexts(length: int, examples: int) -> None:
    """Raise InputError if the contexts hold more words than fit in memory."""
    what = f"{examples:,} contexts of {length:,} words"
    refuse_held(examples * max(length, 30), what, "ask for fewer or shorter ones", most=MAX_STORY_WORDS, unit="words")


def question_tokens(data: QuestionData, tokenizer: Any, *, template: str = PROMPT) -> QuestionTokens:
    """Encode questions for a language model, which predicts the answer's first token after the prompt's last token.

    No other position has a target. Rows are padded on the right to the longest. No special tokens are added. Raise
    InputError if the tokenizer gives no offsets, does not know a word of a fact, question or answer, or begins two
    answers with the same token.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InputError("question_tokens needs a fast tokenizer: where the answer begins is read from its offsets")
    prompts = data.prompts(template)
    texts = list(map(answered, prompts, data.answers))
    _check_known(data, tokenizer)
    encoded = tokenize(tokenizer, texts, add_special_tokens=False, return_offsets_mapping=True)
    rows: list[list[int]] = []
    named: dict[int, str] = {}
    for text, answer, row, spans in zip(texts, data.answers, encoded["input_ids"], encoded["offset_mapping"]):
        begin = len(text) - len(answer)
        first = next((at for at, (_, end) in enumerate(spans) if end > begin), None)
        if first is None:
            raise InputError(f"the tokenizer makes no token of the answer {answer!r}; use one that knows it")
        if (other := named.setdefault(row[first], answer)) != answer:
            raise InputError(
                f"'{other}' and '{answer}' begin with the same token; use a tokenizer that tells them apart"
            )
        rows.append(row[: first + 1])
    lengths, tasks = np.array([len(row) - 1 for row in rows]), np.zeros(len(rows), dtype=np.int64)
    ids = np.full((len(rows), lengths.max()), tokenizer.pad_token_id or 0, dtype=np.int64)
    targets = np.full_like(ids, IGNORED)
    for line, asked, row in zip(ids, targets, rows):
        line[: len(row) - 1] = row[:-1]
        asked[len(row) - 2] = row[-1]
    return QuestionTokens(data.name, data.split, ids, targets, token_names(tokenizer), lengths, tasks, (data.name,))


def _check_known(data: QuestionData, tokenizer: Any) -> None:
    for example in data.examples if tokenizer.unk_token_id is not None else ():
        needed = " ".join((*(fact.text for fact in example.facts), example.question, example.answer))
        encoded = tokenize(tokenizer, needed, add_special_tokens=False, return_offsets_mapping=True)
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"]):
            if token == tokenizer.unk_token_id:
                raise InputError(
                    f"the tokenizer does not know {needed[start:end]!r}, a word of a fact, question or answer; make it "
                    "of the texts of the training questions (QuestionData.texts)"
                )
