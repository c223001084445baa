"""Probability of the answer in every layer, read through a lens: how early a model knows it.

Differential Mamba, section 4.6, appendix A.6 and Figure 6: facts are hidden in other text, a question about them
follows, and a lens reads the residual stream at its last token. The probability of the needle, the answer's first
token, is what the paper calls the signal-to-noise ratio. Distractors, words of the context that could be taken for the
answer, show how much of it goes beyond knowing the kind of word.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import LANGUAGE_MODEL
from ssmscope.api.options import REPEATED, Metavar, Range, Reads, Seed
from ssmscope.core.batching import MAX_ITEMS_HELD, MAX_TOKENS_PER_ROW
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.data.babi import QuestionData
    from ssmscope.probes.lens.lenses import Lens
    from ssmscope.probes.snr.result import NeedleSNR

NO_LENS = "logit"
"""Name of the logit lens among several lenses; None means it too."""


def check_asked(
    *, models: int, names: Any, lens: Any, tasks: Any, lengths: Any, filler: Any, questions: Any, **others: Any
) -> None:
    """Raise InputError if lenses or names are not one per model, or own questions have options of generated ones."""
    in_order = f"give one for each, in their order ({NO_LENS} is the logit lens)"
    for given, what, advice in ((lens, "lenses", in_order), (names, "names", "give one for each")):
        number = models if given is None else len(given) if isinstance(given, list | tuple) else 1
        if number != models:
            raise InputError(f"{number} {what} were given for {models} models; {advice}")
    for name, value in (("tasks", tasks), ("lengths", lengths), ("filler", filler)):
        if questions is not None and value is not None:
            raise InputError(f"{name}=… applies to generated questions, but yours were given; leave out one of the two")


TOKENS_PER_WORD = 1.3
"""Tokens of an English word, by which the time of a run is estimated."""


@analysis(
    "snr", question="How early does it know the answer?", several=True, models=(LANGUAGE_MODEL,), check=check_asked
)
def needle_snr(
    models: Model | Sequence[Model],
    *,
    lens: Annotated[
        Sequence[Literal["logit"] | str | Path | Lens | None] | None,
        "Lens of each MODEL as tuned-lens saves it, in their order (logit: the logit lens); may be repeated.",
        REPEATED,
        Reads("folder", (NO_LENS,)),
        Metavar("LENS"),
    ] = None,
    names: Annotated[
        Sequence[str] | None, "Names of the models (default: the names they were loaded by).", Metavar("A,B,…")
    ] = None,
    tasks: Annotated[
        Sequence[Literal["qa1", "qa2", "qa3", "qa4", "qa5"]] | None,
        "Tasks among qa1 to qa5 (default: all).",
        Metavar("A,B,…"),
    ] = None,
    lengths: Annotated[
        int | Sequence[int] | None, "Maximum context lengths (default: 1000).", Range(0, MAX_TOKENS_PER_ROW)
    ] = None,
    unit: Annotated[Literal["words", "tokens"], "Unit of lengths; tokens of the first model."] = "words",
    examples: Annotated[
        int | None, "Questions per task (default: 50, or all of your own).", Range(1, MAX_ITEMS_HELD)
    ] = None,
    filler: Annotated[
        str | Path | list[str] | None,
        "Text around the facts: generated (default), wikitext2, or a text file.",
        Reads("data", ("generated",)),
        Metavar("NAME"),
    ] = None,
    questions: Annotated[
        Sequence[str | Path | QuestionData] | None,
        "Your own questions: columns context, question, answer and optionally distractors; may be repeated.",
        REPEATED,
        Reads("file"),
        Metavar("FILE"),
    ] = None,
    template: Annotated[str, "Prompt that contains {context} and {question}."] = "{context} {question}",
    spaced: Annotated[bool, "Put a space before the full stops of generated facts."] = True,
    split: Annotated[Literal["test", "validation", "train"], "Split of the generated questions."] = "test",
    seed: Seed = 0,
) -> NeedleSNR:
    """Measure how early a model knows the answer: the probability of the needle and of distractors in every layer.

    Reproduces Differential Mamba's Figure 6 for one or several language models. Let q_i be the distribution that the
    lens reads at the prompt's last token from the input of block i (0: the embeddings; i = L is the model itself), n
    the needle, the answer's first token, and D the first tokens of the example's distractors. Per example and layer:

    - needle q_i(n), the paper's number; distractor max_{d ∈ D} q_i(d);
    - log ratio ln q_i(n) − max_{d ∈ D} ln q_i(d), from log-probabilities, which stay finite when probabilities
      underflow;
    - candidate q_i(n) / (q_i(n) + Σ_{d ∈ D} q_i(d)), with chance at 1 / (1 + |D|); beats: log ratio > 0;
    - rank of n in the vocabulary, from 1; leads: rank 1, which at i = L is the model's accuracy.

    Every number is a mean over examples with a 95 % bootstrap interval, the shares "beats" and "leads" with Wilson's.
    The ratio is that of two means, mean q_i(n) / mean max q_i(d), which confident examples dominate; the mean log ratio
    is the log of the geometric mean of the examples' ratios, in which all count equally. Models read the same
    questions, and their differences are paired per layer. If the models differ in depth, the numbers of the deeper one
    are interpolated linearly over depth i / L.

    Args:
        models: language models with tokenizers; the tokenizers may differ.
        lens: for every model a `Lens`, the directory of one, or None for the logit lens; a single None for all.
        examples: questions per task and length; drawn by the seed from a file's questions.
        filler: may also be sentences. Questions of the test split use WikiText's test split, others its validation
            split.
        questions: replace generated ones (`ssmscope.data.babi`): a file (`load_questions`) or `QuestionData`, or
            several, each of them a task.
        spaced: as in WikiText; see `ssmscope.data.babi.questions`.
        seed: draws questions and resamples.

    Raises:
        InputError: a classifier, a model without a fast tokenizer or one that does not know the questions' words, an
            answer that begins with the same token as one of its distractors, a lens of another model, numbers of lenses
            or names that differ from that of models, no questions, or more than can be read.
    """
    from ssmscope.api.provenance import record_provenance
    from ssmscope.core.progress import on_stderr, progress_bar
    from ssmscope.data.filler import GENERATED
    from ssmscope.probes.lens.lenses import lens_of
    from ssmscope.probes.long_rows import announce, distinct_names
    from ssmscope.probes.snr import measure, reading
    from ssmscope.probes.snr.result import LensedModel, NeedleSNR

    every = list(models) if isinstance(models, Sequence) else [models]
    if not every:
        raise InputError("no model was given; give at least one language model")
    shown = distinct_names(names or [model.name for model in every])
    for model in every:
        reading.check_readable(model)
    given = [None] * len(every) if lens is None else list(lens) if isinstance(lens, list | tuple) else [lens]
    lenses = [lens_of(None if each == NO_LENS else each, model) for each, model in zip(given, every)]
    drawing: dict[str, Any] = {"tasks": tasks, "lengths": lengths, "unit": unit, "examples": examples}
    drawing |= {"filler": filler, "spaced": spaced, "split": split, "seed": seed}
    asked = reading.asked_questions(every[0], questions, **drawing)
    words = sum(len(example.context.split()) for parts in asked.values() for part in parts for example in part.examples)
    announce(every, words * TOKENS_PER_WORD, "examples=… and lengths=… make it shorter or longer", on_stderr().print)
    curves: list[measure.SNRCurve] = []
    differences: list[measure.SNRDifference] = []
    notes = reading.lens_notes(lenses, shown)
    with progress_bar() as bar:
        for length, parts in asked.items():
            prompts = [[reading.prompts_of(model, part, template) for part in parts] for model in every]
            if not curves:
                notes += reading.unknown_notes(prompts, shown)
            read: list[list[reading.Needles]] = []
            for model, one, mine, name in zip(every, lenses, prompts, shown):
                label = name if length is None else f"{name}, {length:,} {unit}"
                line = bar.add_task(f"questions, {label[-40:]}", total=sum(map(len, parts)))
                read.append([reading.read_needles(model, one, part, partial(bar.advance, line)) for part in mine])
            for task, numbers in reading.by_task([part.name for part in parts], read):
                found, apart = measure.measure(shown, numbers, seed)
                curves += [measure.SNRCurve(name, task, length, **one) for name, one in zip(shown, found)]
                differences += [measure.SNRDifference(*pair, task, length, **one) for pair, one in apart]
    if not any(part.distractors for parts in asked.values() for data in parts for part in data.examples):
        notes.append("no question has distractors to compare the needle with")
    options: dict[str, Any] = {
        **{"lenses": [one.name for one in lenses], "tasks": [part.name for part in next(iter(asked.values()))]},
        **{"lengths": [n for n in asked if n is not None], "unit": unit, "examples": examples, "template": template},
    }
    if questions is None:
        told = f"{len(filler):,} sentences" if isinstance(filler, list | tuple) else str(filler or GENERATED)
        options["filler"] = told
        options |= {"spaced": spaced, "split": split}
    first = every[0].source if len(every) == 1 else {"model": ", ".join(shown)}
    return NeedleSNR(
        provenance={
            **record_provenance(first, options=options, seed=seed),
            "models": {name: model.source for name, model in zip(shown, every)},
            "data": reading.data_record(asked),
        },
        models=tuple(LensedModel(name, one.title, len(one)) for name, one in zip(shown, lenses)),
        unit=unit,
        curves=tuple(curves),
        differences=tuple(differences),
        notes=tuple(notes),
    )
