"""The questions that models are asked about needles, generated or a user's own, and what a record says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.core.limits import refuse_reading
from ssmscope.core.tokenizing import tokenize
from ssmscope.data.babi import QuestionData, count_words
from ssmscope.data.babi import questions as generated_questions
from ssmscope.data.filler import GENERATED, load_filler
from ssmscope.data.question_files import load_questions
from ssmscope.errors import InputError
from ssmscope.probes.lens.lenses import LOGIT

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.probes.lens.lenses import Lens
    from ssmscope.probes.snr.reading import Needles

TASKS = ("qa1", "qa2", "qa3", "qa4", "qa5")
LENGTH = 1000
EXAMPLES = 200
"""Of each task, as in the paper, whose contexts have 1,000 to 2,000 tokens."""
ALL = "all"
"""The examples of all tasks together."""
NOTED = 0.01
"""The share of unknown words in the prompts from which on a note says so."""

Source = str | Path | QuestionData


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
    """Per length of the contexts the questions of every task; of a user's own questions there is one length, None.

    Args:
        model: in whose tokens lengths are where `unit` is tokens.

    Raises:
        InputError: see `needle_snr`.
    """
    if questions is not None:
        return {None: _own(questions, examples, seed)}
    count = _count(model, unit)
    wanted = [LENGTH] if lengths is None else [lengths] if isinstance(lengths, int) else list(lengths)
    return _generated(tasks or TASKS, wanted, examples or EXAMPLES, filler, split, spaced, seed, count)


def called(models: Sequence[Model], names: Sequence[str] | None) -> list[str]:
    """What the models are called, each by a name of its own."""
    given = list(names or [model.name for model in models])
    return [f"{name} ({given[:at].count(name) + 1})" if name in given[:at] else name for at, name in enumerate(given)]


def _count(model: Model, unit: str) -> Callable[[str], int]:
    if unit == "words":
        return count_words
    known: dict[str, int] = {}

    def count(text: str) -> int:  # filler is counted once, not once a task and length
        if text not in known:
            known[text] = len(tokenize(model.tokenizer, text, add_special_tokens=False)["input_ids"])
        return known[text]

    return count


def _generated(
    tasks: Sequence[str],
    lengths: Sequence[int],
    examples: int,
    filler: str | Path | Sequence[str] | None,
    split: str,
    spaced: bool,
    seed: int,
    count: Callable[[str], int],
) -> dict[int | None, list[QuestionData]]:
    """Per length the questions of every task; the same stories at every length."""
    chosen = tuple(dict.fromkeys(tasks))
    tokens = len(chosen) * sum(lengths) * examples
    refuse_reading(tokens, f"{examples:,} questions of each task and length", "ask for fewer or shorter ones")
    hay = load_filler(filler, split) if filler is None or isinstance(filler, str | Path) else filler
    options: dict[str, Any] = dict(split=split, filler=hay, seed=seed, count=count, spaced=spaced)
    return {
        n: [generated_questions(task, length=n, examples=examples, **options) for task in chosen]
        for n in dict.fromkeys(lengths)
    }


def _own(questions: Source | Sequence[Source], examples: int | None, seed: int) -> list[QuestionData]:
    parts = []
    for given in [questions] if isinstance(questions, str | Path | QuestionData) else questions:
        data = given if isinstance(given, QuestionData) else load_questions(given)
        if not len(data):
            raise InputError(f"{data.name} ({data.split}) holds no question; give at least one")
        if examples is not None and examples < len(data):
            data = data.take(np.sort(np.random.default_rng(seed).permutation(len(data))[:examples]))
        parts.append(data)
    if not parts:
        raise InputError("no questions were given; give at least one file of them")
    called = [part.name for part in parts]
    twice = [name for name in called if len(parts) > 1 and [*called, ALL].count(name) > 1]
    if twice:
        raise InputError(
            f"the name {twice[0]!r} of a set of questions is taken; give each another ({ALL!r} is all of them)"
        )
    return parts


def origin(asked: Mapping[int | None, Sequence[QuestionData]]) -> dict[str, Any]:
    """What a record says of the questions."""
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


def described(filler: str | Path | Sequence[str] | None) -> str:
    """What a record says of the filler."""
    if filler is None or isinstance(filler, str | Path):
        return GENERATED if filler is None else str(filler)
    return f"{len(filler):,} sentences"


def lens_notes(lenses: Sequence[Lens], names: Sequence[str]) -> list[str]:
    """That some models, but not all, are read by the logit lens."""
    logit = [name for name, lens in zip(names, lenses) if lens.name == LOGIT]
    if not logit or len(logit) == len(lenses):
        return []
    return [f"{', '.join(logit)}: read by the logit lens; below the last layer that is no match for a tuned lens"]


def unknown_notes(prompts: Sequence[Sequence[Any]], names: Sequence[str]) -> list[str]:
    """Of every model whose tokenizer lacks many words of the prompts how many these are."""
    notes = []
    for name, parts in zip(names, prompts):
        share = sum(part.unknown for part in parts) / sum(len(row) for part in parts for row in part.rows)
        if share >= NOTED:
            notes.append(f"{100 * share:.0f} % of the prompts' tokens are words that {name}'s tokenizer does not know")
    return notes


def pooled(names: Sequence[str], read: Sequence[Sequence[Needles]]) -> Iterator[tuple[str, list[Needles]]]:
    """All tasks together where there are several, then each; per model the same examples in the same order."""
    if len(names) > 1:
        yield ALL, [type(parts[0]).joined(parts) for parts in read]
    for at, name in enumerate(names):
        yield name, [parts[at] for parts in read]
