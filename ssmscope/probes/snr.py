"""How early a model knows the answer: the needle's probability in every layer, read through a lens.

Differential Mamba, section 4.6, appendix A.6 and Figure 6: facts stand in other text, a question about them follows,
and a lens (`ssmscope.probes.lens`) reads the residual stream behind the question's last token, layer by layer. The
probability that it gives to the needle, the answer's first token, is what the paper calls the signal-to-noise ratio.
The words of the context that might be taken for the answer, its distractors, say how much of that is more than knowing
what kind of word is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ssmscope.errors import InputError, did_you_mean
from ssmscope.limits import HELD, ROW, refuse_above, refuse_reading
from ssmscope.probes.snr_measures import SNRCurve, SNRDifference, measure
from ssmscope.probes.snr_result import NeedleSNR, Read
from ssmscope.results import record_provenance
from ssmscope.tasks.babi import PROMPT, QuestionData, count_words
from ssmscope.tasks.babi import questions as generated_questions
from ssmscope.tasks.filler import GENERATED, load_filler
from ssmscope.tasks.question_files import load_questions

if TYPE_CHECKING:
    from ssmscope.model import Model
    from ssmscope.probes.lens import Lens
    from ssmscope.probes.snr_reading import Needles

TASKS = ("qa1", "qa2", "qa3", "qa4", "qa5")
LENGTH = 1000
EXAMPLES = 200
"""Of each task, as in the paper, whose contexts have 1,000 to 2,000 tokens."""
ALL = "all"
"""The examples of all tasks together."""
UNITS = ("words", "tokens")
NOTED = 0.01
"""The share of unknown words in the prompts from which on a note says so."""

Source = str | Path | QuestionData


def needle_snr(
    models: Model | Sequence[Model],
    *,
    lens: Lens | str | Path | None | Sequence[Lens | str | Path | None] = None,
    names: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
    lengths: int | Sequence[int] | None = None,
    unit: str = "words",
    examples: int | None = None,
    filler: str | Path | Sequence[str] | None = None,
    questions: Source | Sequence[Source] | None = None,
    template: str = PROMPT,
    spaced: bool = True,
    split: str = "test",
    seed: int = 0,
) -> NeedleSNR:
    """The needle's probability in every layer of one or several language models (Differential Mamba, Figure 6).

    With q_i the distribution that the lens reads behind the prompt's last token in what enters block i (0: the
    embeddings; i = L is the model itself), n the needle, the answer's first token, and D the first tokens of the
    example's distractors, per example and layer:

    - needle q_i(n), the paper's number; distractor max_{d ∈ D} q_i(d);
    - log ratio ln q_i(n) − max_{d ∈ D} ln q_i(d), from log-probabilities, which are finite where probabilities are 0;
    - candidate q_i(n) / (q_i(n) + Σ_{d ∈ D} q_i(d)), with chance at 1 / (1 + |D|); beats: log ratio > 0;
    - rank of n in the vocabulary, from 1; leads: rank 1, which at i = L is the model's accuracy.

    Every number is a mean over examples with a 95 % bootstrap interval. The ratio is that of two means, mean q_i(n) /
    mean max q_i(d), which the surest examples decide; the mean log ratio is the log of the geometric mean of the
    examples' ratios, in which all count alike. Models read the same questions, and their differences are paired: per
    layer, or with models of different depth at the layers of the one with fewer, the other's numbers interpolated
    linearly over depth i / L.

    Args:
        models: language models with tokenizers; the tokenizers may differ.
        lens: for every model a tuned lens in hand, the directory of one, or None, the logit lens; None alone: for all.
        names: what the models are called; by default what they were loaded as.
        tasks: of the generated questions (`ssmscope.tasks.babi`), by default qa1 to qa5.
        lengths: how long a context is at most, by default 1000.
        unit: words, or tokens of the first model's tokenizer.
        examples: of each task and length, by default 200; of a file's questions, by default all, else so many drawn by
            the seed.
        filler: what stands between the facts: generated (the default), wikitext2, a file of text, or sentences.
        questions: instead of generated ones, your own: a file (`load_questions`) or `QuestionData`, or several, each of
            them a task.
        template: a prompt with {context} and {question}.
        spaced: a space before the full stops of generated facts, as in WikiText; see `ssmscope.tasks.babi.questions`.
        split: of the generated questions: test, validation or train.
        seed: draws questions and resamples.

    Raises:
        InputError: a classifier, a model without a fast tokenizer or one that does not know the questions' words, an
            answer that begins with the same token as one of its distractors, a lens of another model, another number of
            lenses or names than models, no questions, or an option outside its range.
    """
    every = [models] if not isinstance(models, Sequence) else list(models)
    if not every:
        raise InputError("no model was given; give at least one language model")
    called = _called(every, names)
    given = _lenses(lens, len(every))
    if unit not in UNITS:
        raise InputError(f"unknown unit {unit!r}; allowed are {', '.join(UNITS)}{did_you_mean(str(unit), UNITS)}")
    for name, number, least in (("examples", examples, 1), ("seed", seed, 0)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < least):
            raise InputError(f"{name} is {number!r}; allowed is a whole number from {least} on")
    from ssmscope.probes.lens import lens_of
    from ssmscope.probes.snr_reading import check_readable, prompts_of, read_needles

    for model in every:
        check_readable(model)
    lenses = [lens_of(each, model) for each, model in zip(given, every)]
    if questions is not None:
        for name, value in (("tasks", tasks), ("lengths", lengths), ("filler", filler)):
            if value is not None:
                raise InputError(f"{name} are of generated questions, and yours were given; leave out one of the two")
        asked: dict[int | None, list[QuestionData]] = {None: _own(questions, examples, seed)}
    else:
        count = _count(every[0], unit)
        wanted = [LENGTH] if lengths is None else [lengths] if isinstance(lengths, int) else list(lengths)
        asked = _generated(tasks, wanted, examples or EXAMPLES, filler, split, spaced, seed, count)
    curves: list[SNRCurve] = []
    differences: list[SNRDifference] = []
    notes = _lens_notes(lenses, called)
    with _progress() as bar:
        for length, parts in asked.items():
            prompts = [[prompts_of(model, part, template) for part in parts] for model in every]
            if not curves:
                notes += _unknown_notes(prompts, called)
            read: list[list[Needles]] = []
            for model, one, mine, name in zip(every, lenses, prompts, called):
                label = name if length is None else f"{name}, {length:,} {unit}"
                line = bar.add_task(label[-40:], total=sum(map(len, parts)))

                def done(number: int, line: Any = line) -> None:
                    bar.advance(line, number)

                read.append([read_needles(model, one, part, done) for part in mine])
            for task, numbers in _pooled([part.name for part in parts], read):
                found, apart = measure(called, numbers, seed)
                curves += [SNRCurve(name, task, length, **one) for name, one in zip(called, found)]
                differences += [SNRDifference(*pair, task, length, **one) for pair, one in apart]
    if not any(part.distractors for parts in asked.values() for data in parts for part in data.examples):
        notes.append("no question has distractors: there is nothing to compare the needle with")
    options: dict[str, Any] = {
        **{"lenses": [one.name for one in lenses], "tasks": [part.name for part in next(iter(asked.values()))]},
        **{"lengths": [n for n in asked if n is not None], "unit": unit, "examples": examples, "template": template},
    }
    if questions is None:
        options |= {"filler": _described(filler), "spaced": spaced, "split": split}
    first = every[0].source if len(every) == 1 else {"model": ", ".join(called)}
    return NeedleSNR(
        provenance={
            **record_provenance(first, options=options, seed=seed),
            "models": {name: model.source for name, model in zip(called, every)},
            "data": _origin(asked),
        },
        models=tuple(Read(name, one.title, len(one)) for name, one in zip(called, lenses)),
        unit=unit,
        curves=tuple(curves),
        differences=tuple(differences),
        notes=tuple(notes),
    )


# ---- what is asked


def _called(models: Sequence[Model], names: Sequence[str] | None) -> list[str]:
    if names is not None and len(names) != len(models):
        raise InputError(f"{len(names)} names were given for {len(models)} models; give one for each")
    given = list(names or [model.name for model in models])
    return [f"{name} ({given[:at].count(name) + 1})" if name in given[:at] else name for at, name in enumerate(given)]


def _lenses(lens: Any, models: int) -> list[Any]:
    if lens is None:
        return [None] * models
    given = list(lens) if isinstance(lens, Sequence) and not isinstance(lens, str) else [lens]
    if len(given) != models:
        raise InputError(
            f"{len(given)} lenses were given for {models} models; give one for each, in their order (None is the logit "
            "lens)"
        )
    return given


def _count(model: Model, unit: str) -> Callable[[str], int]:
    if unit == "words":
        return count_words
    known: dict[str, int] = {}

    def count(text: str) -> int:  # filler is counted once, not once a task and length
        if text not in known:
            known[text] = len(model.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        return known[text]

    return count


def _generated(
    tasks: Sequence[str] | None,
    lengths: Sequence[int],
    examples: int,
    filler: str | Path | Sequence[str] | None,
    split: str,
    spaced: bool,
    seed: int,
    count: Callable[[str], int],
) -> dict[int | None, list[QuestionData]]:
    """Per length the questions of every task; the same stories at every length."""
    given = TASKS if tasks is None else tasks.split(",") if isinstance(tasks, str) else tasks
    chosen = tuple(dict.fromkeys(given))
    for name, some in (("tasks", chosen), ("lengths", lengths)):
        if not some:
            raise InputError(f"no {name} were given; give at least one")
    wrong = [n for n in lengths if isinstance(n, bool) or not isinstance(n, int) or n < 0]
    if wrong:
        raise InputError(f"lengths has {wrong[0]!r}; allowed are whole numbers from 0 on, such as (250, 1000)")
    refuse_above(ROW, lengths=max(lengths))
    refuse_above(HELD, examples=examples)
    tokens = len(chosen) * sum(lengths) * examples
    refuse_reading(tokens, f"{examples:,} questions of each task and length", "ask for fewer or shorter ones")
    hay = load_filler(filler, split) if filler is None or isinstance(filler, str | Path) else filler
    options: dict[str, Any] = dict(split=split, filler=hay, seed=seed, count=count, spaced=spaced)
    return {
        n: [generated_questions(task, length=n, examples=examples, **options) for task in chosen]
        for n in dict.fromkeys(lengths)
    }


def _own(questions: Source | Sequence[Source], examples: int | None, seed: int) -> list[QuestionData]:
    several = isinstance(questions, Sequence) and not isinstance(questions, str)
    parts = []
    for given in questions if several else [questions]:  # type: ignore[union-attr]
        data = given if isinstance(given, QuestionData) else load_questions(given)  # type: ignore[arg-type]
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


def _origin(asked: Mapping[int | None, Sequence[QuestionData]]) -> dict[str, Any]:
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


def _described(filler: str | Path | Sequence[str] | None) -> str:
    if filler is None or isinstance(filler, str | Path):
        return GENERATED if filler is None else str(filler)
    return f"{len(filler):,} sentences"


def _progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal, transient=True)


def _lens_notes(lenses: Sequence[Lens], names: Sequence[str]) -> list[str]:
    from ssmscope.probes.lens import LOGIT

    logit = [name for name, lens in zip(names, lenses) if lens.name == LOGIT]
    if not logit or len(logit) == len(lenses):
        return []
    return [f"{', '.join(logit)}: read by the logit lens; below the last layer that is no match for a tuned lens"]


def _unknown_notes(prompts: Sequence[Sequence[Any]], names: Sequence[str]) -> list[str]:
    notes = []
    for name, parts in zip(names, prompts):
        share = sum(part.unknown for part in parts) / sum(len(row) for part in parts for row in part.rows)
        if share >= NOTED:
            notes.append(f"{100 * share:.0f} % of the prompts' tokens are words that {name}'s tokenizer does not know")
    return notes


def _pooled(names: Sequence[str], read: Sequence[Sequence[Needles]]) -> Iterator[tuple[str, list[Needles]]]:
    """All tasks together where there are several, then each; per model the same examples in the same order."""
    if len(names) > 1:
        yield ALL, [type(parts[0]).joined(parts) for parts in read]
    for at, name in enumerate(names):
        yield name, [parts[at] for parts in read]
