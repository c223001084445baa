"""What a language model still finds in a long context: accuracy by task and length, of one model or of several.

Questions about facts that are spread in filler (`ssmscope.tasks.babi`, BABILong's recipe), as Differential Mamba
compares models on them (section 4.5): its Figure 8 is the accuracy of each model, its Figure 4 their ratio.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int

from ssmscope.bootstrap import Estimate, estimate, resampled_sums
from ssmscope.errors import InputError, did_you_mean
from ssmscope.evaluation.forking import Rows
from ssmscope.limits import HELD, refuse_above, refuse_reading
from ssmscope.probes.long_rows import (
    PIECE,
    head_logits,
    language_models,
    own_names,
    pieces_of,
    stderr_lines,
    whole_from,
)
from ssmscope.results import Result, record_provenance
from ssmscope.tasks.babi import PROMPT, QuestionData, question_tokens, questions, refuse_contexts
from ssmscope.tasks.filler import GENERATED, load_filler
from ssmscope.tasks.language import check_symbols
from ssmscope.tasks.stories import TASKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame
    from rich.console import Console, ConsoleOptions, RenderableType

    from ssmscope.model import Model

LENGTHS = (0, 1000, 2000, 4000, 8000, 16000)
NORMAL = 1.959963984540054
"""The 97.5 percentile of the normal distribution."""
LEVEL = 0.05
"""Two models differ in a cell where the interval of their ratio excludes 1 and the sign test's p is below this."""
SHORT = 2000
"""Texts of up to so many characters are counted once: sentences of filler come again in every cell."""
UNKNOWN = 0.01
"""A larger share of unknown tokens is told."""


def retrieval(
    models: Model | Sequence[Model],
    *,
    tasks: Sequence[str] = tuple(TASKS),
    lengths: Sequence[int] = LENGTHS,
    examples: int = 100,
    filler: str | Path | Sequence[str] | None = None,
    template: str = PROMPT,
    spaced: bool = True,
    split: str = "test",
    piece: int = PIECE,
    seed: int = 0,
    progress: bool = True,
) -> Retrieval:
    """Ask every model the same questions at every length, and count how often the answer is the likeliest next token.

    An answer is right if its first token has the largest logit of the whole vocabulary after the prompt; *constrained*,
    if it has the largest among the first tokens of the task's candidates. Chance is 1 / candidates: the answers are
    balanced. Logits with NaN or infinity in them give no answer.

    Accuracies have Wilson's 95 % interval, which is honest at 0 and 1 too; mean log-probabilities a bootstrap interval
    over examples. With several models, the ratio accuracy of the first / accuracy of another (Figure 4) has a paired
    bootstrap interval; it is not defined where the other is never right. Resamples in which only the other is never
    right count as infinite.

    A model runs `piece` tokens at a time from its states, which is exact; one that does not continue from them is found
    by a trial and runs whole.

    Args:
        models: language models with tokenizers.
        tasks: of `qa1` to `qa5` (`questions`).
        lengths: of the contexts, at most so many tokens of the first model's tokenizer; the question is not counted. At
            0 the facts stand alone.
        examples: a cell.
        filler: "generated" sentences (the default), "wikitext2", a file of text (`load_filler`), or sentences.
        template: how context and question are put, with {context} and {question}.
        spaced: a space before full stops and question marks, as tokenizers of whitespace words need it.
        split: of the stories: `test`, `validation` or `train`.
        piece: how many tokens of a context run at once.
        seed: draws stories, filler and resamples.
        progress: whether to print a line for every cell on stderr.

    Raises:
        InputError: no language model with a tokenizer, an unknown task or split, a number out of range, filler without
            a sentence, or a tokenizer that does not know the words of the questions or does not tell the candidates
            apart.
    """
    every = language_models(models)
    chosen, steps = _tasks(tasks), _lengths(lengths)
    whole_from(1, examples=examples, piece=piece)
    whole_from(0, seed=seed)
    refuse_above(HELD, examples=examples)
    reading = len(every) * len(chosen) * sum(steps) * examples
    refuse_reading(reading, f"{examples:,} questions of each task and length", "ask for fewer or shorter ones")
    refuse_contexts(steps[-1], examples)  # before the shorter ones are asked
    named = filler is None or isinstance(filler, str | Path)
    hay = load_filler(filler, split) if named else tuple(filler)  # type: ignore[arg-type]
    count = _counter(every[0].tokenizer)
    for task in chosen:  # what cannot be asked is refused before anything is
        first = questions(task, length=0, examples=1, split=split, seed=seed, spaced=spaced)
        for model in every:
            _candidates(model, first, template)
    names, digest = own_names(every), hashlib.sha256()
    shape = (len(every), len(chosen), len(steps))
    right = np.zeros((*shape, examples), dtype=bool)
    among = np.zeros_like(right)
    log_probability = np.zeros(right.shape, dtype=np.float32)
    tokens, unknown = np.zeros(shape), np.zeros(shape)
    say = stderr_lines(progress)
    for row, task in enumerate(chosen):
        for column, length in enumerate(steps):
            began = time.perf_counter()
            given: dict[str, Any] = {"split": split, "filler": hay, "seed": seed, "count": count, "spaced": spaced}
            data = questions(task, length=length, examples=examples, **given)
            digest.update(data.fingerprint.encode())
            if say is not None:
                say(f"{task}, {length:,} tokens: {examples:,} questions in {time.perf_counter() - began:.1f} s")
            for number, model in enumerate(every):
                began = time.perf_counter()
                at = (number, row, column)
                found = asked(model, data, template=template, piece=piece)
                right[at], among[at], log_probability[at] = found.right, found.among, found.log_probability
                tokens[at], unknown[at] = found.tokens.mean(), found.unknown
                if say is not None:
                    took = time.perf_counter() - began
                    say(f"  {names[number]}: accuracy {found.right.mean():.3f} in {took:.1f} s")
    cells, ratios = _measured(right, among, log_probability, tokens, seed)
    options: dict[str, Any] = {
        **{"tasks": list(chosen), "lengths": list(steps), "examples": examples},
        **{"filler": (GENERATED if filler is None else str(filler)) if named else "given sentences"},
        **{"template": template, "spaced": spaced, "split": split, "piece": piece},
    }
    return Retrieval(
        provenance={
            **record_provenance({"model": " and ".join(names)}, options=options, seed=seed),
            "models": [{**model.source, "model": name} for model, name in zip(every, names)],
            "data": {"split": split, "fingerprint": digest.hexdigest()[:16]},
        },
        models=names,
        tasks=chosen,
        lengths=steps,
        chance=tuple(1 / len(TASKS[task].answers) for task in chosen),
        cells=cells,
        ratios=ratios,
        right=right,
        log_probability=log_probability,
        notes=tuple(_notes(names, steps, tokens, unknown, log_probability)),
    )


# ---- what is asked


def _tasks(tasks: Sequence[str]) -> tuple[str, ...]:
    given = (tasks,) if isinstance(tasks, str) else tuple(tasks)
    wrong = [task for task in given if task not in TASKS]
    if wrong or not given:
        what = f"there is no task {wrong[0]!r}" if wrong else "no task was given"
        hint = did_you_mean(str(wrong[0]), TASKS) if wrong else ""
        raise InputError(f"{what}; there are {', '.join(TASKS)}{hint}")
    return tuple(dict.fromkeys(given))


def _lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    allowed = "allowed are numbers of tokens from 0 on, such as (0, 1000, 4000)"
    if isinstance(lengths, str | int) or not len(lengths):
        raise InputError(f"lengths is {lengths!r}; {allowed}")
    wrong = [n for n in lengths if isinstance(n, bool) or not isinstance(n, int) or n < 0]
    if wrong:
        raise InputError(f"lengths has {wrong[0]!r}; {allowed}")
    return tuple(sorted(set(lengths)))


def _counter(tokenizer: Any) -> Callable[[str], int]:
    known: dict[str, int] = {}

    def count(text: str) -> int:
        if text not in known:
            check_symbols([text], tokenizer)
            number = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
            if len(text) > SHORT:
                return number
            known[text] = number
        return known[text]

    return count


@dataclass(frozen=True, eq=False)
class Asked:
    """What a model made of questions.

    Attributes:
        right: (examples,) whether the answer's first token is the likeliest of the vocabulary.
        among: (examples,) whether it is the likeliest of the candidates' first tokens.
        log_probability: (examples,) of the answer's first token, in nats.
        tokens: (examples,) of the prompts.
        unknown: which share of these the tokenizer does not know.
    """

    right: Bool[np.ndarray, " examples"]
    among: Bool[np.ndarray, " examples"]
    log_probability: Float[np.ndarray, " examples"]
    tokens: Int[np.ndarray, " examples"]
    unknown: float


def asked(model: Model, data: QuestionData, *, template: str = PROMPT, piece: int = PIECE) -> Asked:
    """Ask a language model the questions.

    Raises:
        InputError: as `question_tokens`, also where two candidates of the task begin with the same token.
    """
    rows, targets = _rows(model, data, template)
    choices = _candidates(model, data, template)
    right, among = np.zeros(len(data), dtype=bool), np.zeros(len(data), dtype=bool)
    log_probability = np.full(len(data), np.nan)
    for part in pieces_of(model, rows, piece=piece):
        ended = np.flatnonzero(part.ends)
        if not len(ended):
            continue
        at, last = part.rows[ended], part.lengths[ended] - 1
        logits = head_logits(model, part.hidden[ended.tolist(), last.tolist()]).cpu().numpy()
        answers = targets[at]
        sound = (logits < np.inf).all(1)  # no NaN either; a token may be ruled out by −inf
        right[at] = sound & (logits.argmax(1) == answers)
        among[at] = sound & (choices[logits[:, choices].argmax(1)] == answers)
        log_probability[at] = log_softmax(logits, answers)
    unknown = model.tokenizer.unk_token_id
    share = float((rows.ids == unknown).mean()) if unknown is not None else 0.0
    return Asked(right, among, log_probability, rows.lengths, share)


def _rows(model: Model, data: QuestionData, template: str) -> tuple[Rows, Int[np.ndarray, " examples"]]:
    """The prompts' tokens, and the first token of every answer."""
    found = question_tokens(data, model.tokenizer, template=template)
    lengths = found.lengths
    ids = np.concatenate([row[:length] for row, length in zip(found.ids, lengths)])
    targets = found.targets[np.arange(len(lengths)), lengths - 1]
    beyond = int(max(ids.max(), targets.max()))
    if beyond >= model.vocabulary:
        raise InputError(
            f"the tokenizer gives id {beyond}, outside the vocabulary 0…{model.vocabulary - 1} of {model.name}"
        )
    return Rows(ids, np.concatenate([[0], lengths.cumsum()])), targets


def _candidates(model: Model, data: QuestionData, template: str) -> Int[np.ndarray, " candidates"]:
    """The first token of every word that may be an answer, where the answer stands."""
    first = data.examples[0]
    short = replace(first, context=" ".join(fact.text for fact in first.facts))
    each = replace(data, examples=tuple(replace(short, answer=word) for word in data.candidates))
    return _rows(model, each, template)[1]


def log_softmax(
    logits: Float[np.ndarray, "rows vocabulary"], at: Int[np.ndarray, " rows"]
) -> Float[np.ndarray, " rows"]:
    """The log-probability of one token a row, in float64; NaN where a logit is NaN or infinite."""
    wide = logits.astype(np.float64)
    with np.errstate(invalid="ignore"):
        wide -= wide.max(1, keepdims=True)
        return wide[np.arange(len(at)), at] - np.log(np.exp(wide).sum(1))


# ---- numbers


def wilson(successes: int, trials: int) -> Estimate:
    """A share with Wilson's 95 % score interval: (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n)."""
    share, spread = successes / trials, NORMAL**2 / trials
    middle = share + spread / 2
    half = math.sqrt(share * (1 - share) * spread + spread**2 / 4)
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    return Estimate(share, min(max(low, 0.0), share), max(min(high, 1.0), share))


def sign_test(above: Bool[np.ndarray, " examples"], below: Bool[np.ndarray, " examples"]) -> float:
    """The two-sided p of the exact sign test on the examples of which only one of two models is right."""
    first, second = int((above & ~below).sum()), int((below & ~above).sum())
    number = first + second
    tail = sum(math.comb(number, k) for k in range(min(first, second) + 1))
    return min(1.0, 2 * tail / 2**number)


def quotient(above: Float[np.ndarray, " rows"], below: Float[np.ndarray, " rows"]) -> Estimate:
    """above / below of the first row with its interval from the others: x / 0 is infinite there, and 0 / 0 left out."""
    if below[0] == 0:
        return Estimate(math.nan, math.nan, math.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        rows = above / below
    if not np.isinf(rows).any():
        return estimate(rows)
    # no interpolation: between a number and infinity there is nothing
    low, high = np.quantile(rows[1:][~np.isnan(rows[1:])], [0.025, 0.975], method="inverted_cdf")
    return Estimate(float(rows[0]), float(low), float(high))


def _measured(
    right: Bool[np.ndarray, "models tasks lengths examples"],
    among: Bool[np.ndarray, "models tasks lengths examples"],
    log_probability: Float[np.ndarray, "models tasks lengths examples"],
    tokens: Float[np.ndarray, "models tasks lengths"],
    seed: int,
) -> tuple[tuple[tuple[tuple[Cell, ...], ...], ...], tuple[tuple[tuple[Ratio, ...], ...], ...]]:
    models, rows, columns, examples = right.shape
    cells: list[list[list[Cell]]] = [[[] for _ in range(rows)] for _ in range(models)]
    ratios: list[list[list[Ratio]]] = [[[] for _ in range(rows)] for _ in range(models - 1)]
    for row in range(rows):
        for column in range(columns):
            hits = right[:, row, column]
            measured = np.concatenate([hits, log_probability[:, row, column]]).T.astype(np.float64)
            sums = resampled_sums(measured, seed=seed)
            for number in range(models):
                cells[number][row].append(
                    Cell(
                        tokens=float(tokens[number, row, column]),
                        accuracy=wilson(int(hits[number].sum()), examples),
                        constrained=wilson(int(among[number, row, column].sum()), examples),
                        log_probability=estimate(sums[:, models + number] / examples),
                    )
                )
            for other in range(1, models):
                value = quotient(sums[:, 0], sums[:, other])
                ratios[other - 1][row].append(Ratio(value, sign_test(hits[0], hits[other])))
    return tuple(tuple(map(tuple, each)) for each in cells), tuple(tuple(map(tuple, each)) for each in ratios)


def _notes(
    names: Sequence[str],
    lengths: Sequence[int],
    tokens: Float[np.ndarray, "models tasks lengths"],
    unknown: Float[np.ndarray, "models tasks lengths"],
    log_probability: Float[np.ndarray, "models tasks lengths examples"],
) -> Iterable[str]:
    for number, name in enumerate(names):
        broken = np.isnan(log_probability[number]).any((0, 2))
        if broken.any():
            yield (
                f"logits of {name} are not finite from {lengths[int(broken.argmax())]:,} tokens on; there it gives no "
                "answer"
            )
        share = float((unknown[number] * tokens[number]).sum() / tokens[number].sum())
        if share > UNKNOWN:
            yield f"the tokenizer of {name} does not know {100 * share:.0f} % of the prompts' tokens"


# ---- the result


@dataclass(frozen=True)
class Cell:
    """One model at one task and length."""

    tokens: float
    """Of a prompt by the model's own tokenizer, on average; the question is counted."""
    accuracy: Estimate
    """Wilson's interval."""
    constrained: Estimate
    """Accuracy among the candidates; Wilson's interval."""
    log_probability: Estimate
    """The mean log-probability of the answer's first token, in nats; bootstrap interval."""


@dataclass(frozen=True)
class Ratio:
    """Accuracy of the first model / accuracy of another on the same questions."""

    value: Estimate
    """With its paired bootstrap interval, whose end can be infinite; not defined where the other is never right."""
    p: float
    """Of the exact sign test on the questions of which only one of the two is right."""

    @property
    def differs(self) -> bool:
        """Whether the interval excludes 1. The sign test guards it: a few questions alone show no difference, though
        all resamples of them agree."""
        return (self.value.low > 1 or self.value.high < 1) and self.p < LEVEL


@dataclass(frozen=True)
class Retrieval(Result, kind="retrieval"):
    """Accuracy by task and context length, of one model or of several on the same questions."""

    models: tuple[str, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    chance: tuple[float, ...]
    """1 / candidates of every task."""
    cells: tuple[tuple[tuple[Cell, ...], ...], ...]
    """[model][task][length]."""
    ratios: tuple[tuple[tuple[Ratio, ...], ...], ...]
    """[other model][task][length]: of the first model to each of the others."""
    right: np.ndarray
    """(models, tasks, lengths, examples) bool: which questions are answered rightly."""
    log_probability: np.ndarray
    """(models, tasks, lengths, examples) float32, of the answer's first token in nats."""
    notes: tuple[str, ...]

    @property
    def examples(self) -> int:
        """Questions a cell."""
        return self.right.shape[-1]

    def mean(self, model: int, length: int) -> float:
        """The mean accuracy over the tasks at one of the lengths."""
        return float(self.right[model, :, self.lengths.index(length)].mean())

    @property
    def headline(self) -> str:
        ends = self.lengths if len(self.lengths) == 1 else (self.lengths[0], self.lengths[-1])
        found = [
            f"{name} " + " and ".join(f"{self.mean(number, n):.3f} at {n:,}" for n in ends)
            for number, name in enumerate(self.models)
        ]
        tasks = self.tasks[0] if len(self.tasks) == 1 else f"{len(self.tasks)} tasks"
        return f"Retrieval, accuracy on {tasks} by context tokens: {'; '.join(found)}"

    def to_frame(self) -> DataFrame:
        """A row per model, task and length.

        Columns: model, task, length, tokens, examples, accuracy, constrained, log_probability, chance, and in the rows
        of the other models ratio (the first model's accuracy / theirs), p (of the sign test) and differs; the 95 %
        interval of each is in columns ending in _low and _high.
        """
        import pandas as pd

        rows = []
        for number, name in enumerate(self.models):
            for row, task in enumerate(self.tasks):
                for column, length in enumerate(self.lengths):
                    cell = self.cells[number][row][column]
                    found = {"accuracy": cell.accuracy, "constrained": cell.constrained}
                    found |= {"log_probability": cell.log_probability}
                    ratio = self.ratios[number - 1][row][column] if number else None
                    nothing = Estimate(math.nan, math.nan, math.nan)
                    if self.ratios:
                        found |= {"ratio": nothing if ratio is None else ratio.value}
                    line: dict[str, Any] = {"model": name, "task": task, "length": length}
                    line |= {"tokens": cell.tokens, "examples": self.examples}
                    for what, one in found.items():
                        line |= {what: one.value, f"{what}_low": one.low, f"{what}_high": one.high}
                    if self.ratios:
                        line |= {"p": math.nan if ratio is None else ratio.p}
                        line |= {"differs": ratio is not None and ratio.differs}
                    rows.append({**line, "chance": self.chance[row]})
        return pd.DataFrame(rows)

    def figure(self) -> Figure:
        """A grid of tasks and lengths for every model's accuracies, and one for every ratio."""
        from ssmscope.probes.retrieval_figure import draw

        return draw(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[RenderableType]:
        from ssmscope.probes.retrieval_terminal import show

        yield from show(self)
