"""Retrieval from long contexts: accuracy by task and length, of one or several models.

Facts are spread in filler text (`ssmscope.data.babi`, BABILong's recipe; RULER's needles).
Differential Mamba (section 4.5) compares models on such questions: Figure 8 shows their accuracy, Figure 4 the ratio.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import LANGUAGE_MODEL
from ssmscope.api.options import Metavar, OneOf, Piece, Progress, Range, Reads, Seed

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.probes.retrieval.result import Retrieval


SHORTEST_QUESTION_TOKENS = 80
"""Tokens that a question takes at least, of which the facts are a part."""


@analysis(
    "retrieval",
    question="What does it still find in a long context?",
    several=True,
    models=(LANGUAGE_MODEL,),
    dtype="float32",
)
def retrieval(
    models: Model | Sequence[Model],
    *,
    tasks: Annotated[
        Sequence[str],
        "Tasks among qa1 to qa5, needle, multi-key, multi-value, variables, common-words.",
        OneOf("data.stories:TASKS"),
    ] = ("qa1", "qa2", "qa3", "qa4", "qa5"),
    lengths: Annotated[
        Sequence[int], "Maximum context lengths, in tokens of the first tokenizer; 0 for the facts alone.", Range(0)
    ] = (0, 1000, 2000),
    examples: Annotated[int, "Questions per task and length.", Range(1)] = 20,
    filler: Annotated[
        str | Path | list[str],
        "Text around the facts: generated, wikitext2, or a text file.",
        Reads("lines", ("generated",)),
        Metavar("NAME"),
    ] = "generated",
    template: Annotated[str, "Prompt that contains {context} and {question}."] = "{context} {question}",
    spaced: Annotated[bool, "Put a space before the facts' full stops and question marks."] = True,
    split: Annotated[Literal["test", "validation", "train"], "Split of the stories."] = "test",
    piece: Piece = 2048,
    seed: Seed = 0,
    progress: Progress = True,
) -> Retrieval:
    """Measure what a model finds in a long context: accuracy by task and length, and the ratio of several models.

    All models get the same questions at every length. An answer is right if its first token has the largest logit of
    the vocabulary after the prompt; *constrained* accuracy compares only the first tokens of the task's candidates.
    Chance is 1 / candidates: the answers are balanced. Logits with NaN or infinity give no answer.

    Accuracies have Wilson's 95 % interval, mean log-probabilities a bootstrap interval over examples. With several
    models, the ratio of the first model's accuracy to another's (Figure 4) has a paired bootstrap interval; it is not
    defined if the other is never right. Resamples in which only the other is never right count as infinite.

    Before it begins, stderr says how long it takes, from a short run of each model.

    A model runs `piece` tokens at a time from its states, which is exact; one that does not continue from them (which
    is tested) runs every prompt whole. A context's length does not count the question. Tokenizers of whitespace words
    need the space before full stops. The filler may also be a list of sentences.

    Raises:
        InputError: a model that is not a language model with a tokenizer, filler without a sentence, or a tokenizer
            that does not know the words of the questions or does not tell the candidates apart.
    """
    import hashlib
    import time

    import numpy as np
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.core.batching import MAX_ITEMS_HELD, refuse_above, refuse_reading
    from ssmscope.core.progress import on_stderr, progress_bar
    from ssmscope.data.babi import questions, refuse_contexts
    from ssmscope.data.filler import load_filler
    from ssmscope.data.stories import TASKS
    from ssmscope.probes.long_rows import announce, distinct_names, language_models, token_counter
    from ssmscope.probes.retrieval import measure
    from ssmscope.probes.retrieval.result import Retrieval

    every = language_models(models)
    chosen, steps = tuple(dict.fromkeys(tasks)), tuple(sorted(set(lengths)))
    refuse_above(MAX_ITEMS_HELD, examples=examples)
    reading = len(every) * len(chosen) * sum(steps) * examples
    refuse_reading(reading, f"{examples:,} questions of each task and length", "ask for fewer or shorter ones")
    refuse_contexts(steps[-1], examples)  # The longest is refused before the shorter ones run.
    if isinstance(filler, str | Path):
        hay, name = load_filler(str(filler), split), str(filler)
    else:
        hay, name = tuple(filler), "given sentences"
    count = token_counter(every[0].tokenizer)
    for task in chosen:  # Tasks that a model cannot read are refused before anything runs.
        first = questions(task, length=0, examples=1, split=split, seed=seed, spaced=spaced)
        for model in every:
            measure.first_tokens(model, first, template)
    names, digest = distinct_names(model.name for model in every), hashlib.sha256()
    shape = (len(every), len(chosen), len(steps))
    right, among = np.empty((2, *shape, examples), dtype=bool)
    log_probability = np.empty(right.shape, dtype=np.float32)
    tokens, unknown = np.empty((2, *shape))
    console = on_stderr(progress)
    asked = len(chosen) * examples * sum(map(max, steps, [SHORTEST_QUESTION_TOKENS] * len(steps)))
    announce(every, asked, "examples=… and lengths=… make it shorter or longer", console.print)
    with progress_bar(console) as bar:
        for row, column in bar.track([*np.ndindex(*shape[1:])], description="tasks and lengths"):
            began, length = time.perf_counter(), steps[column]
            given: dict[str, Any] = {"split": split, "filler": hay, "seed": seed, "count": count, "spaced": spaced}
            data = questions(chosen[row], length=length, examples=examples, **given)
            digest.update(data.fingerprint.encode())
            took = time.perf_counter() - began
            console.print(f"{chosen[row]}, {length:,} tokens: {examples:,} questions in {took:.1f} s")
            for number, model in enumerate(every):
                began, at = time.perf_counter(), (number, row, column)
                found = measure.answers(model, data, template=template, piece=piece)
                right[at], among[at], log_probability[at] = found.right, found.among, found.log_probability
                tokens[at], unknown[at] = found.tokens.mean(), found.unknown
                took = time.perf_counter() - began
                console.print(f"  {names[number]}: accuracy {found.right.mean():.3f} in {took:.1f} s")
    cells, ratios = measure.compare_models(right, among, log_probability, tokens, seed)
    options = call_options(tasks=list(chosen), lengths=list(steps), filler=name)
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
        notes=tuple(measure.notes_on(names, steps, tokens, unknown, log_probability)),
    )
