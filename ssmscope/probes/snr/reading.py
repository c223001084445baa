"""Questions about needles, and the probabilities of their answers and distractors in every layer, read by a lens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from ssmscope.core.batching import by_length, refuse_reading, tokens_at_once
from ssmscope.core.model import Model
from ssmscope.core.tokenizing import tokenize
from ssmscope.data.babi import Question, QuestionData, count_words, load_questions
from ssmscope.data.babi import questions as generated_questions
from ssmscope.data.filler import load_filler
from ssmscope.errors import InputError
from ssmscope.probes.lens.lenses import LOGIT, Lens, chosen_states
from ssmscope.probes.long_rows import token_counter

TASKS = ("qa1", "qa2", "qa3", "qa4", "qa5")
DEFAULT_LENGTH = 1000
EXAMPLES_PER_TASK = 50
"""Default number of examples, as in the paper, whose contexts have 1,000 to 2,000 tokens."""
ALL = "all"
"""Name for the examples of all tasks together."""
NOTED_UNKNOWN_SHARE = 0.01
"""Share of unknown words in the prompts from which on a note says so."""
Source = str | Path | QuestionData
NO_TOKEN = -1


def asked_questions(
    model: Model,
    questions: Source | Sequence[Source] | None,
    *,
    tasks: Sequence[str] | None,
    lengths: int | Sequence[int] | None,
    unit: str,
    examples: int | None,
    filler: str | Path | Sequence[str] | None,
    spaced: bool,
    split: str,
    seed: int,
) -> dict[int | None, list[QuestionData]]:
    """Return the questions of every task by length of the contexts; a user's own questions have the length None."""
    if questions is not None:
        return {None: _own_questions(questions, examples, seed)}
    count = count_words if unit == "words" else token_counter(model.tokenizer)
    wanted = [DEFAULT_LENGTH] if lengths is None else [lengths] if isinstance(lengths, int) else list(lengths)
    chosen, examples = tuple(dict.fromkeys(tasks or TASKS)), examples or EXAMPLES_PER_TASK
    tokens = len(chosen) * sum(wanted) * examples
    refuse_reading(tokens, f"{examples:,} questions of each task and length", "ask for fewer or shorter ones")
    hay = load_filler(filler, split) if filler is None or isinstance(filler, str | Path) else filler
    options: dict[str, Any] = dict(split=split, filler=hay, seed=seed, count=count, spaced=spaced)
    return {
        n: [generated_questions(task, length=n, examples=examples, **options) for task in chosen]
        for n in dict.fromkeys(wanted)
    }


def _own_questions(questions: Source | Sequence[Source], examples: int | None, seed: int) -> list[QuestionData]:
    parts = []
    for given in [questions] if isinstance(questions, str | Path | QuestionData) else questions:
        data = given if isinstance(given, QuestionData) else load_questions(given)
        if not len(data):
            raise InputError(f"{data.name} ({data.split}) has no questions; give at least one")
        if examples is not None:
            data = data.take(np.sort(np.random.default_rng(seed).permutation(len(data))[:examples]))
        parts.append(data)
    if not parts:
        raise InputError("no questions were given; give at least one file of them")
    names = [part.name for part in parts]
    if twice := [name for name in names if len(parts) > 1 and [*names, ALL].count(name) > 1]:
        advice = f"give each another ({ALL!r} is all of them)"
        raise InputError(f"the name {twice[0]!r} of a set of questions is taken; {advice}")
    return parts


def data_record(asked: Mapping[int | None, Sequence[QuestionData]]) -> dict[str, Any]:
    parts = [(length, part) for length, every in asked.items() for part in every]
    return {
        "name": ", ".join(dict.fromkeys(part.name for _, part in parts)),
        "split": parts[0][1].split,
        "examples": sum(len(part) for _, part in parts) // len(asked),
        "parts": [
            {"name": one.name, "length": length, "examples": len(one), "fingerprint": one.fingerprint}
            for length, one in parts
        ],
    }


def lens_notes(lenses: Sequence[Lens], names: Sequence[str]) -> list[str]:
    """Return a note if some models, but not all, are read by the logit lens."""
    logit = [name for name, lens in zip(names, lenses) if lens.name == LOGIT]
    if not logit or len(logit) == len(lenses):
        return []
    return [f"{', '.join(logit)}: read by the logit lens; below the last layer it is no match for a tuned lens"]


def unknown_notes(prompts: Sequence[Sequence[Any]], names: Sequence[str]) -> list[str]:
    """Return a note for every model whose tokenizer does not know many words of the prompts."""
    notes = []
    for name, parts in zip(names, prompts):
        share = sum(part.unknown for part in parts) / sum(len(row) for part in parts for row in part.rows)
        if share >= NOTED_UNKNOWN_SHARE:
            notes.append(f"{100 * share:.0f} % of the prompts' tokens are words that {name}'s tokenizer does not know")
    return notes


def by_task(names: Sequence[str], read: Sequence[Sequence[Needles]]) -> Iterator[tuple[str, list[Needles]]]:
    """Yield all tasks together if there are several, then each task, with the models' needles on the same examples."""
    if len(names) > 1:
        yield ALL, [type(parts[0]).joined(parts) for parts in read]
    for at, name in enumerate(names):
        yield name, [parts[at] for parts in read]


class Prompts(NamedTuple):
    """Questions as tokens of one model."""

    rows: tuple[tuple[int, ...], ...]
    needles: Int[np.ndarray, " examples"]
    """First token of every answer."""
    distractors: Int[np.ndarray, "examples most"]
    """Distinct first tokens of every example's distractors, then `NO_TOKEN`."""
    unknown: int
    """Number of tokens in all rows that stand for words unknown to the tokenizer."""


def prompts_of(model: Model, data: QuestionData, template: str) -> Prompts:
    """Tokenize the prompts without special tokens, and find the first token of the answer, and of each distractor in
    its place, in the tokenizer's segmentation of prompt and word together."""
    reader = _Reader(model.name, model.tokenizer)
    rows, needles, others, unknown = zip(*map(reader.read, data.examples, data.prompts(template)))
    distractors = np.full((len(rows), max(map(len, others))), NO_TOKEN)
    for line, own in zip(distractors, others):
        line[: len(own)] = own
    return Prompts(rows, np.array(needles, dtype=np.int64), distractors, sum(unknown))


def check_readable(model: Model) -> None:
    """Raise InputError for a classifier, or a model without a tokenizer that gives the offsets of tokens."""
    if model.is_classifier:
        raise InputError(f"{model.name} is {model.role}; a needle is a token that a language model predicts")
    model.check_classes("a needle")
    model.check_tokenizer("questions")
    if not getattr(model.tokenizer, "is_fast", False):
        raise InputError(f"{model.name} needs a fast tokenizer, whose offsets say where an answer begins")


class _Encoded(NamedTuple):
    """Tokens of a text that ends in a word: ids, spans of characters, and the index of the word's first token."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int]]
    first: int


class _Reader:
    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name, self.tokenizer = name, tokenizer

    def read(self, example: Question, prompt: str) -> tuple[tuple[int, ...], int, list[int], int]:
        """Return the tokens of the prompt, the needle, the distractors, and the number of unknown tokens."""
        whole = self._encode(prompt, example.answer)
        self._check_known(" ".join((*(fact.text for fact in example.facts), example.question)))
        needle = self._token(whole, example.answer)
        named: dict[int, str] = {}
        for word in example.distractors:
            other = self._encode(prompt, word)
            token = self._token(other, word)
            if other.ids[: other.first] != whole.ids[: whole.first]:
                raise InputError(
                    f"{self.name}'s tokenizer reads the end of a prompt differently before {word!r:.40} than before "
                    f"{example.answer!r:.40}; give a template with another end"
                )
            named.setdefault(token, word)
        if needle in named:
            raise InputError(
                f"for {self.name}'s tokenizer the answer {example.answer!r:.40} and its distractor "
                f"{named[needle]!r:.40} begin with the same token; use a tokenizer or words that tell them apart"
            )
        return tuple(whole.ids[: whole.first]), needle, list(named), self._unknown(whole)

    def _encode(self, prompt: str, word: str) -> _Encoded:
        text = prompt + ("" if prompt[-1].isspace() else " ") + word
        encoded = tokenize(self.tokenizer, text, add_special_tokens=False, return_offsets_mapping=True)
        ids, spans, begin = encoded["input_ids"], encoded["offset_mapping"], len(text) - len(word)
        first = next((at for at, (_, end) in enumerate(spans) if end > begin), len(ids))
        if not 0 < first < len(ids):
            raise InputError(f"{self.name}'s tokenizer reads nothing in {text[:40]!r} or in the word {word!r:.40}")
        return _Encoded(text, ids, spans, first)

    def _token(self, encoded: _Encoded, word: str) -> int:
        token = encoded.ids[encoded.first]
        if token == self.tokenizer.unk_token_id:
            raise self._unknown_word(word)
        return token

    def _check_known(self, text: str) -> None:
        encoded = tokenize(self.tokenizer, text, add_special_tokens=False, return_offsets_mapping=True)
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"]):
            if token == self.tokenizer.unk_token_id:
                raise self._unknown_word(text[start:end])

    def _unknown_word(self, word: str) -> InputError:
        return InputError(
            f"{self.name}'s tokenizer does not know {word!r:.40}, a word of a fact, question, answer or distractor; "
            "use a model that was trained with such words"
        )

    def _unknown(self, whole: _Encoded) -> int:
        """Count the unknown words of the prompt, except those that spell the unknown token itself."""
        if self.tokenizer.unk_token_id is None:
            return 0
        at = np.flatnonzero(np.array(whole.ids[: whole.first]) == self.tokenizer.unk_token_id)
        return sum(whole.text[slice(*whole.spans[i])].strip() != self.tokenizer.unk_token for i in at.tolist())


@dataclass(frozen=True)
class Needles:
    """Readings of the lens for every example and layer, the model itself last; NaN without distractors."""

    needle: Float[np.ndarray, "examples streams"]
    """Log-probability of the needle."""
    distractor: Float[np.ndarray, "examples streams"]
    """The largest log-probability of a distractor."""
    candidate: Float[np.ndarray, "examples streams"]
    """The needle's share of the probability of itself and all distractors."""
    rank: Float[np.ndarray, "examples streams"]
    """The needle's rank in the vocabulary, 1 the best; ties share their mean rank."""
    tokens: Int[np.ndarray, " examples"]
    choices: Int[np.ndarray, " examples"]
    """Number of candidates, needle and distractors."""

    @staticmethod
    def joined(parts: Sequence[Needles]) -> Needles:
        return Needles(*map(np.concatenate, zip(*(vars(part).values() for part in parts))))

    def __len__(self) -> int:
        return len(self.needle)


def read_needles(model: Model, lens: Lens, prompts: Prompts, done: Callable[[int], object]) -> Needles:
    """Run the prompts, those of similar length together, and read their last positions in all layers."""
    number, layers = len(prompts.rows), len(lens) + 1
    found = {name: np.full((number, layers), np.nan) for name in ("needle", "distractor", "candidate", "rank")}
    lengths = [len(row) for row in prompts.rows]
    for chosen in by_length(lengths, tokens_at_once(model.device, (len(lens) + 1) * model.width), rows=range(number)):
        batch = model.encode(ids=[list(prompts.rows[row]) for row in chosen])
        hidden = chosen_states(model, batch, "last")
        for part in lens.slices(len(chosen)):
            rows = chosen[part]
            read = _read(lens.log_probs(hidden[:, part]), prompts.needles[rows], prompts.distractors[rows])
            for name, values in read.items():
                found[name][rows] = values
        done(len(chosen))
    if not np.isfinite(found["needle"]).all() or np.isinf(found["distractor"]).any():
        raise InputError(f"{model.name} gives log-probabilities that are not finite; its weights are damaged")
    choices = 1 + (prompts.distractors != NO_TOKEN).sum(1)
    return Needles(**found, tokens=np.array(lengths), choices=choices)


def _read(
    logs: Float[torch.Tensor, "streams chosen tokens"],
    needles: Int[np.ndarray, " chosen"],
    distractors: Int[np.ndarray, "chosen most"],
) -> dict[str, Float[np.ndarray, "chosen streams"]]:
    mine = torch.from_numpy(needles).to(logs.device).view(1, -1, 1).expand(len(logs), -1, 1)
    own = logs.gather(-1, mine)
    rank = 1 + (logs > own).sum(-1).double() + ((logs == own).sum(-1).double() - 1) / 2
    needle = own.squeeze(-1).cpu().double()
    read = {"needle": needle, "rank": rank.cpu()}
    if distractors.shape[1]:
        absent = torch.from_numpy(distractors == NO_TOKEN).expand(len(logs), -1, -1)
        others = torch.from_numpy(distractors).to(logs.device).expand(len(logs), -1, -1)
        against = logs.gather(-1, others.clamp(min=0)).cpu().double().masked_fill(absent, -torch.inf)
        together = torch.cat([needle.unsqueeze(-1), against], dim=-1).logsumexp(-1)
        alone = absent.all(-1)
        read["distractor"] = against.amax(-1).masked_fill(alone, torch.nan)
        read["candidate"] = (needle - together).exp().masked_fill(alone, torch.nan)
    return {name: values.T.numpy() for name, values in read.items()}
