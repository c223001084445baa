"""Accuracy against the length of filler between a text and the question about it.

A state-space model keeps its context in a state of fixed size. Filler between a text and the position where its class
is read occupies and decays the state; on contexts longer than in training, states can leave their usual range ("state
collapse", Chen et al. 2024, Stuffed Mamba). Filler before the text is equally long and out of place but read first, so
its cost is not forgetting. The two curves are a measurement, not a claim of that paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.dimensions import Dimension
from ssmscope.api.inputs import TEXT_MODELS, Data
from ssmscope.api.limits import DROP
from ssmscope.api.options import Cache, LabelWords, Limit, Metavar, Range, Reads, Seed, Template
from ssmscope.attacks.names import check_asked
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.attacks.overflow.result import StateOverflow
    from ssmscope.core.model import Model
    from ssmscope.data.text import TextData

LENGTHS = (0, 16, 32, 64, 128, 256, 512)


def check_overflow(*, lengths: Sequence[int], filler: str | None, **others: Any) -> None:
    """Raise InputError if no length is above 0, the filler has no word, or `check_asked` does."""
    if max(lengths) == 0:
        raise InputError("lengths has only 0; give a number of tokens from 1 on, such as 64")
    if filler is not None and not filler.strip():
        raise InputError("the filler is empty; give a text of at least one word, or none for generated sentences")
    check_asked(**others)


@analysis(
    "overflow",
    reads=Data("texts"),
    question="When is its state full?",
    models=TEXT_MODELS,
    check=check_overflow,
    sharded=True,
    scores={"overflow.drop[PLACE, N tokens]": DROP},
    dimensions=(Dimension("Filler", r"overflow\.drop\[after, .*\]", "drop with the longest filler"),),
)
def state_overflow(
    model: Model,
    data: TextData,
    *,
    lengths: Annotated[Sequence[int], "Numbers of filler tokens; 0 is added.", Range(0)] = LENGTHS,
    filler: Annotated[
        str | None, "A text, a file or wikitext2; by default generated sentences.", Reads("lines"), Metavar("TEXT|FILE")
    ] = None,
    where: Annotated[Literal["after", "before", "both"], "Place of the filler: after the text, before it, or both."] = (
        "both"
    ),
    template: Template = None,
    words: LabelWords = None,
    limit: Limit = None,
    cache: Cache = None,
    seed: Seed = 0,
) -> StateOverflow:
    """Measure accuracy as filler grows between a text and the question about it.

    A classifier reads its last token, so the filler follows the text. A language model reads the end of its template,
    so the filler stands between {content} and the rest. The control "before" has the same filler before the text,
    within the template. All examples have the same filler, and a longer one begins with the shorter. Filler that is too
    short is repeated; generated sentences are neutral.

    Every number has a 95 % interval over examples: Wilson's of accuracies and other shares, else a bootstrap, all from
    the same resamples. Chance is the share of the data's most frequent class. The half-length is the shortest measured
    length at which half of the accuracy above chance is lost. Its interval is over the resamples in which the clean
    accuracy is above chance; its upper end is infinite if too many of them never lose half.

    Args:
        template: by default, like the words, the first of a known data set's own (`TASK_PROMPTS`).

    Raises:
        InputError: an empty filler, no length above 0, data that do not fit the model, and what `Template` and
            `Evaluator` refuse.
    """
    from ssmscope.attacks.curves import questions
    from ssmscope.attacks.overflow.measure import added_tokens, filled, filler_text, measure, notes_on, pieces_of
    from ssmscope.attacks.overflow.result import StateOverflow
    from ssmscope.core.batching import MAX_TOKENS_PER_ROW, refuse_above, refuse_reading

    steps = tuple(sorted({0, *lengths}))
    places = ("after", "before") if where == "both" else (where,)
    refuse_above(MAX_TOKENS_PER_ROW, lengths=steps[-1])
    examples = len(data) if limit is None else min(limit, len(data))
    tokens = len(places) * sum(steps) * examples
    refuse_reading(tokens, f"filler of these lengths for {examples:,} examples", "give shorter lengths, or a limit")
    asked = questions(model, data, template=template, words=words, limit=limit, cache=cache, seed=seed)
    given = None if filler is None else filler_text(filler)
    pieces = pieces_of(asked, model, given, steps, seed)
    texts = [text for place in places for piece in pieces for text in filled(asked, place, piece)]
    shape = (len(places), len(steps))
    (answers, odds), added = asked.answered(texts, *shape), added_tokens(model, texts, shape)
    found = measure(asked.labels, answers, odds, places, steps, added, len(asked.classes), seed)
    return StateOverflow(
        provenance=asked.provenance(model, seed, lengths=list(steps)),
        classes=asked.classes,
        **found,
        filler=pieces[-1],
        right=answers == asked.labels,
        notes=tuple(notes_on(model, given, pieces[-1], found["clean"], found["chance"], found["curves"])),
    )
