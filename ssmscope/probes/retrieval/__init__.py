"""What a language model still finds in a long context: accuracy by task and length, of one model or of several.

Questions about facts that are spread in filler (`ssmscope.data.babi`, BABILong's recipe; RULER's needles in
`ssmscope.data.needles`), as Differential Mamba
compares models on them (section 4.5): its Figure 8 is the accuracy of each model, its Figure 4 their ratio.
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
        "Of qa1 to qa5, needle, multi-key, multi-value, variables, common-words.",
        OneOf("data.needles:TASKS"),
    ] = (
        "qa1",
        "qa2",
        "qa3",
        "qa4",
        "qa5",
    ),
    lengths: Annotated[
        Sequence[int], "Tokens of the contexts at most, by the first tokenizer; at 0 the facts stand alone.", Range(0)
    ] = (0, 1000, 2000, 4000, 8000, 16000),
    examples: Annotated[int, "Questions of each task and length.", Range(1)] = 100,
    filler: Annotated[
        str | Path | list[str],
        "generated, wikitext2, or a file of text.",
        Reads("lines", ("generated",)),
        Metavar("NAME"),
    ] = "generated",
    template: Annotated[str, "A prompt with {context} and {question} in it."] = "{context} {question}",
    spaced: Annotated[bool, "A space before the facts' full stops and question marks."] = True,
    split: Annotated[Literal["test", "validation", "train"], "Of the stories."] = "test",
    piece: Piece = 2048,
    seed: Seed = 0,
    progress: Progress = True,
) -> Retrieval:
    """What a model still finds in a long context: accuracy by task and length; of several also their ratio.

    All models get the same questions at every length. An answer is right if its first token has the largest logit of
    the whole vocabulary after the prompt; *constrained*, if it has the largest among the first tokens of the task's
    candidates. Chance is 1 / candidates: the answers are balanced. Logits with NaN or infinity in them give no answer.

    Accuracies have Wilson's 95 % interval, which is honest at 0 and 1 too; mean log-probabilities a bootstrap interval
    over examples. With several models, the ratio accuracy of the first / accuracy of another (Figure 4) has a paired
    bootstrap interval; it is not defined where the other is never right. Resamples in which only the other is never
    right count as infinite.

    A model runs `piece` tokens at a time from its states, which is exact; one that does not continue from them is found
    by a trial and runs whole. The question is not counted in a context's length. Tokenizers of whitespace words need
    the space before full stops. The sentences of the filler may be given themselves.

    Raises:
        InputError: no language model with a tokenizer, filler without a sentence, or a tokenizer that does not know the
            words of the questions or does not tell the candidates apart.
    """
    import hashlib
    import time

    import numpy as np

    from ssmscope.api.results import record_provenance
    from ssmscope.core.limits import HELD, refuse_above, refuse_reading
    from ssmscope.core.progress import on_stderr
    from ssmscope.data.babi import questions, refuse_contexts
    from ssmscope.data.filler import load_filler
    from ssmscope.data.needles import TASKS
    from ssmscope.probes.long_rows import language_models, own_names
    from ssmscope.probes.retrieval.measure import answers, compared, first_tokens, notes_on, token_counter
    from ssmscope.probes.retrieval.result import Retrieval

    every = language_models(models)
    chosen, steps = tuple(dict.fromkeys(tasks)), tuple(sorted(set(lengths)))
    refuse_above(HELD, examples=examples)
    reading = len(every) * len(chosen) * sum(steps) * examples
    refuse_reading(reading, f"{examples:,} questions of each task and length", "ask for fewer or shorter ones")
    refuse_contexts(steps[-1], examples)  # before the shorter ones are asked
    if isinstance(filler, str | Path):
        hay, name = load_filler(str(filler), split), str(filler)
    else:
        hay, name = tuple(filler), "given sentences"
    count = token_counter(every[0].tokenizer)
    for task in chosen:  # what cannot be asked is refused before anything is
        first = questions(task, length=0, examples=1, split=split, seed=seed, spaced=spaced)
        for model in every:
            first_tokens(model, first, template)
    names, digest = own_names(every), hashlib.sha256()
    shape = (len(every), len(chosen), len(steps))
    right = np.zeros((*shape, examples), dtype=bool)
    among = np.zeros_like(right)
    log_probability = np.zeros(right.shape, dtype=np.float32)
    tokens, unknown = np.zeros(shape), np.zeros(shape)
    say = on_stderr(progress).print
    for row, task in enumerate(chosen):
        for column, length in enumerate(steps):
            began = time.perf_counter()
            given: dict[str, Any] = {"split": split, "filler": hay, "seed": seed, "count": count, "spaced": spaced}
            data = questions(task, length=length, examples=examples, **given)
            digest.update(data.fingerprint.encode())
            say(f"{task}, {length:,} tokens: {examples:,} questions in {time.perf_counter() - began:.1f} s")
            for number, model in enumerate(every):
                began = time.perf_counter()
                at = (number, row, column)
                found = answers(model, data, template=template, piece=piece)
                right[at], among[at], log_probability[at] = found.right, found.among, found.log_probability
                tokens[at], unknown[at] = found.tokens.mean(), found.unknown
                took = time.perf_counter() - began
                say(f"  {names[number]}: accuracy {found.right.mean():.3f} in {took:.1f} s")
    cells, ratios = compared(right, among, log_probability, tokens, seed)
    options: dict[str, Any] = {
        **{"tasks": list(chosen), "lengths": list(steps), "examples": examples},
        **{"filler": name},
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
        notes=tuple(notes_on(names, steps, tokens, unknown, log_probability)),
    )
