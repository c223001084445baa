"""Questions about needles, generated or the user's own, and their description in a record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.core.limits import refuse_reading
from ssmscope.data.babi import QuestionData, count_words
from ssmscope.data.babi import questions as generated_questions
from ssmscope.data.filler import GENERATED, load_filler
from ssmscope.data.question_files import load_questions
from ssmscope.errors import InputError
from ssmscope.probes.lens.lenses import LOGIT
from ssmscope.probes.long_rows import token_counter

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.probes.lens.lenses import Lens
    from ssmscope.probes.snr.reading import Needles

TASKS = ("qa1", "qa2", "qa3", "qa4", "qa5")
DEFAULT_LENGTH = 1000
EXAMPLES_PER_TASK = 200
"""Default number of examples, as in the paper, whose contexts have 1,000 to 2,000 tokens."""
ALL = "all"
"""Name for the examples of all tasks together."""
NOTED_UNKNOWN_SHARE = 0.01
"""Share of unknown words in the prompts from which on a note says so."""

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
        if examples is not None and examples < len(data):
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


def filler_record(filler: str | Path | Sequence[str] | None) -> str:
    return (
        str(filler or GENERATED) if filler is None or isinstance(filler, str | Path) else f"{len(filler):,} sentences"
    )


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
