"""How early a model knows the answer: the needle's probability in every layer, read through a lens.

Differential Mamba, section 4.6, appendix A.6 and Figure 6: facts stand in other text, a question about them follows,
and a lens (`ssmscope.load_lens`) reads the residual stream behind the question's last token, layer by layer. The
probability that it gives to the needle, the answer's first token, is what the paper calls the signal-to-noise ratio.
The words of the context that might be taken for the answer, its distractors, say how much of that is more than knowing
what kind of word is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import LANGUAGE_MODEL
from ssmscope.api.options import REPEATED, Metavar, Range, Reads, Seed
from ssmscope.core.limits import HELD, ROW
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.data.babi import QuestionData
    from ssmscope.probes.lens.lenses import Lens
    from ssmscope.probes.snr.reading import Needles
    from ssmscope.probes.snr.result import NeedleSNR

NO_LENS = "logit"
"""What stands for the logit lens among several lenses; None does too."""


def check_asked(
    *, models: int, names: Any, lens: Any, tasks: Any, lengths: Any, filler: Any, questions: Any, **others: Any
) -> None:
    """Refuse another number of lenses or names than of models, and options of generated questions beside one's own."""
    for given, what, advice in (
        (lens, "lenses", f"give one for each, in their order ({NO_LENS} is the logit lens)"),
        (names, "names", "give one for each"),
    ):
        if given is None:
            continue
        number = len(given) if isinstance(given, list | tuple) else 1
        if number != models:
            raise InputError(f"{number} {what} were given for {models} models; {advice}")
    for name, value in (("tasks", tasks), ("lengths", lengths), ("filler", filler)):
        if questions is not None and value is not None:
            raise InputError(f"{name} are of generated questions, and yours were given; leave out one of the two")


@analysis(
    "snr",
    question="How early does it know the answer?",
    several=True,
    models=(LANGUAGE_MODEL,),
    check=check_asked,
)
def needle_snr(
    models: Model | Sequence[Model],
    *,
    lens: Annotated[
        Sequence[Literal["logit"] | str | Path | Lens | None] | None,
        "The tuned lens of each MODEL, in their order (logit: none); may be repeated.",
        REPEATED,
        Reads("folder", (NO_LENS,)),
        Metavar("LENS"),
    ] = None,
    names: Annotated[
        Sequence[str] | None, "What the models are called; by default what they were loaded as.", Metavar("A,B,…")
    ] = None,
    tasks: Annotated[
        Sequence[Literal["qa1", "qa2", "qa3", "qa4", "qa5"]] | None,
        "Of qa1 to qa5, by default all.",
        Metavar("A,B,…"),
    ] = None,
    lengths: Annotated[int | Sequence[int] | None, "Of the contexts at most, by default 1000.", Range(0, ROW)] = None,
    unit: Annotated[Literal["words", "tokens"], "Of lengths; tokens of the first model."] = "words",
    examples: Annotated[
        int | None, "Of each task, by default 200; of your own questions, by default all.", Range(1, HELD)
    ] = None,
    filler: Annotated[
        str | Path | list[str] | None,
        "Between the facts: generated, wikitext2, or a file of text; by default generated.",
        Reads("data", ("generated",)),
        Metavar("NAME"),
    ] = None,
    questions: Annotated[
        Sequence[str | Path | QuestionData] | None,
        "Your own: columns context, question, answer and, if need be, distractors; may be repeated.",
        REPEATED,
        Reads("file"),
        Metavar("FILE"),
    ] = None,
    template: Annotated[str, "A prompt with {context} and {question} in it."] = "{context} {question}",
    spaced: Annotated[bool, "A space before the full stops of generated facts."] = True,
    split: Annotated[Literal["test", "validation", "train"], "Of the generated questions."] = "test",
    seed: Seed = 0,
) -> NeedleSNR:
    """How early a model knows the answer: the probability of the needle token in every layer, and of distractors.

    One or several language models (Differential Mamba, Figure 6). With q_i the distribution that the lens reads behind
    the prompt's last token in what enters block i (0: the embeddings; i = L is the model itself), n the needle, the
    answer's first token, and D the first tokens of the example's distractors, per example and layer:

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
        examples: of each task and length; of a file's questions so many drawn by the seed.
        filler: also sentences. WikiText's validation split stands in questions for training and validation, its test
            split in those of the test.
        questions: instead of generated ones (`ssmscope.data.babi`): a file (`load_questions`) or `QuestionData`, or
            several, each of them a task.
        spaced: as in WikiText; see `ssmscope.data.babi.questions`.
        seed: draws questions and resamples.

    Raises:
        InputError: a classifier, a model without a fast tokenizer or one that does not know the questions' words, an
            answer that begins with the same token as one of its distractors, a lens of another model, another number of
            lenses or names than models, no questions, or more than can be read.
    """
    from ssmscope.api.results import record_provenance
    from ssmscope.core.progress import progress_bar
    from ssmscope.probes.lens.lenses import lens_of
    from ssmscope.probes.snr.measure import SNRCurve, SNRDifference, measure
    from ssmscope.probes.snr.questions import (
        asked_questions,
        called,
        described,
        lens_notes,
        origin,
        pooled,
        unknown_notes,
    )
    from ssmscope.probes.snr.reading import check_readable, prompts_of, read_needles
    from ssmscope.probes.snr.result import LensedModel, NeedleSNR

    every = list(models) if isinstance(models, Sequence) else [models]
    if not every:
        raise InputError("no model was given; give at least one language model")
    shown = called(every, names)
    for model in every:
        check_readable(model)
    given = [None] * len(every) if lens is None else list(lens) if isinstance(lens, list | tuple) else [lens]
    lenses = [lens_of(None if each == NO_LENS else each, model) for each, model in zip(given, every)]
    asked = asked_questions(
        every[0],
        questions,
        tasks=tasks,
        lengths=lengths,
        unit=unit,
        examples=examples,
        filler=filler,
        spaced=spaced,
        split=split,
        seed=seed,
    )
    curves: list[SNRCurve] = []
    differences: list[SNRDifference] = []
    notes = lens_notes(lenses, shown)
    with progress_bar() as bar:
        for length, parts in asked.items():
            prompts = [[prompts_of(model, part, template) for part in parts] for model in every]
            if not curves:
                notes += unknown_notes(prompts, shown)
            read: list[list[Needles]] = []
            for model, one, mine, name in zip(every, lenses, prompts, shown):
                label = name if length is None else f"{name}, {length:,} {unit}"
                line = bar.add_task(label[-40:], total=sum(map(len, parts)))

                def done(number: int, line: Any = line) -> None:
                    bar.advance(line, number)

                read.append([read_needles(model, one, part, done) for part in mine])
            for task, numbers in pooled([part.name for part in parts], read):
                found, apart = measure(shown, numbers, seed)
                curves += [SNRCurve(name, task, length, **one) for name, one in zip(shown, found)]
                differences += [SNRDifference(*pair, task, length, **one) for pair, one in apart]
    if not any(part.distractors for parts in asked.values() for data in parts for part in data.examples):
        notes.append("no question has distractors: there is nothing to compare the needle with")
    options: dict[str, Any] = {
        **{"lenses": [one.name for one in lenses], "tasks": [part.name for part in next(iter(asked.values()))]},
        **{"lengths": [n for n in asked if n is not None], "unit": unit, "examples": examples, "template": template},
    }
    if questions is None:
        options |= {"filler": described(filler), "spaced": spaced, "split": split}
    first = every[0].source if len(every) == 1 else {"model": ", ".join(shown)}
    return NeedleSNR(
        provenance={
            **record_provenance(first, options=options, seed=seed),
            "models": {name: model.source for name, model in zip(shown, every)},
            "data": origin(asked),
        },
        models=tuple(LensedModel(name, one.title, len(one)) for name, one in zip(shown, lenses)),
        unit=unit,
        curves=tuple(curves),
        differences=tuple(differences),
        notes=tuple(notes),
    )
