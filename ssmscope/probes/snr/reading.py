"""Probabilities of an answer and its distractors in every layer, read by a lens at the last token of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int

from ssmscope.core.batching import by_length
from ssmscope.core.tokenizing import tokenize
from ssmscope.errors import InputError
from ssmscope.probes.lens.lenses import chosen_states, tokens_at_once

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.data.babi import Question, QuestionData
    from ssmscope.probes.lens.lenses import Lens

NO_TOKEN = -1


class Prompts(NamedTuple):
    """Questions as tokens of one model.

    Attributes:
        rows: the token ids of every prompt, not padded.
        needles: (examples,) first token of every answer.
        distractors: (examples, most) distinct first tokens of every example's distractors, then `NO_TOKEN`.
        unknown: number of tokens in all rows that stand for words unknown to the tokenizer.
    """

    rows: tuple[tuple[int, ...], ...]
    needles: Int[np.ndarray, " examples"]
    distractors: Int[np.ndarray, "examples most"]
    unknown: int


def prompts_of(model: Model, data: QuestionData, template: str) -> Prompts:
    """Tokenize the prompts without special tokens, and find the first token of the answer, and of each distractor in
    its place, in the tokenizer's segmentation of prompt and word together."""
    reader = _Reader(model.name, model.tokenizer)
    found = [reader.read(example, prompt) for example, prompt in zip(data.examples, data.prompts(template))]
    distractors = np.full((len(found), max((len(one.distractors) for one in found), default=0)), NO_TOKEN)
    for line, one in zip(distractors, found):
        line[: len(one.distractors)] = one.distractors
    needles = np.array([one.needle for one in found], dtype=np.int64)
    return Prompts(tuple(one.row for one in found), needles, distractors, sum(one.unknown for one in found))


def check_readable(model: Model) -> None:
    """Raise InputError for a classifier, or a model without a tokenizer that gives the offsets of tokens."""
    if model.is_classifier:
        raise InputError(f"{model.name} is a classifier; a needle is a token that a language model predicts")
    model.check_classes("a needle")
    model.check_tokenizer("questions")
    if not getattr(model.tokenizer, "is_fast", False):
        raise InputError(f"{model.name} needs a fast tokenizer, whose offsets say where an answer begins")


class _Read(NamedTuple):
    row: tuple[int, ...]
    needle: int
    distractors: list[int]
    unknown: int


class _Encoded(NamedTuple):
    """Tokens of a text that ends in a word: ids, spans of characters, and the index of the word's first token."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int]]
    first: int


class _Reader:
    """Reader of prompts with one tokenizer."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        self.name, self.tokenizer = name, tokenizer

    def read(self, example: Question, prompt: str) -> _Read:
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
        return _Read(tuple(whole.ids[: whole.first]), needle, list(named), self._unknown(whole))

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
    """Readings of the lens for every example and layer, (examples, layers + 1), the model itself last.

    Attributes:
        needle: log-probability of the needle.
        distractor: the largest log-probability of a distractor; NaN without one.
        candidate: the needle's share of the probability of itself and all distractors; NaN without one.
        rank: the needle's rank in the vocabulary, 1 the best; ties share their mean rank.
        tokens: (examples,) tokens of the prompts.
        choices: (examples,) number of candidates, needle and distractors.
    """

    needle: Float[np.ndarray, "examples streams"]
    distractor: Float[np.ndarray, "examples streams"]
    candidate: Float[np.ndarray, "examples streams"]
    rank: Float[np.ndarray, "examples streams"]
    tokens: Int[np.ndarray, " examples"]
    choices: Int[np.ndarray, " examples"]

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
    for chosen in by_length(lengths, tokens_at_once(model, len(lens)), rows=range(number)):
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
