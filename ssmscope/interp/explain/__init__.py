"""Token attributions: which tokens a model's output rests on, by one or several methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import Texts
from ssmscope.api.options import REPEATED, Metavar, Range, Seed, Top
from ssmscope.errors import InputError
from ssmscope.interp.methods import MethodOptions, Methods, check_methods, method_names

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.core.take_trace import TextsLike
    from ssmscope.interp.explain.result import Explanation


def check_explain(*, methods: Any, steps: int | None, option: Any, at: Any, by: Any, **given: object) -> None:
    """Raise InputError for methods and options that do not fit, or steps without Integrated Gradients."""
    if at == "all" and by:
        raise InputError("by=… sums the scores of tokens, and at='all' asks about each; give one of them")
    check_methods(methods=methods, option=option, **given)
    if steps is not None and "ig" not in method_names(methods):
        raise InputError("steps=… are those of Integrated Gradients, which is not among the methods; name ig")
    if steps is not None and "fixed" in (option or {}).get("ig", {}):
        raise InputError("steps=… and the option ig.fixed are one thing; give one of them")


@analysis(
    "explain",
    reads=Texts(),
    asks_at=True,
    kinds=("explain", "explain-positions"),
    question="Which tokens does an answer rest on?",
    first=2,
    pair="interp.paired:pair",
    dtype="float32",  # Gradients need the precision.
    check=check_explain,
)
def explain(
    model: Model,
    texts: TextsLike,
    *,
    methods: Methods = None,
    target: Annotated[
        int | str | Sequence[int | str | Sequence[int]] | None,
        "Class, next token or continuation, or one for each text; default the predicted one.",
        REPEATED,
        Metavar("NAME"),
    ] = None,
    contrast: Annotated[int | str | None, "Class or token whose logit is subtracted.", Metavar("NAME")] = None,
    by: Annotated[
        Sequence[str] | None,
        "Scores of each `sentence` or `line`, or of spans: words, or positions (3:5); may be repeated.",
        REPEATED,
        Metavar("sentence|line|SPAN"),
    ] = None,
    top: Top = 5,
    steps: Annotated[
        int | None,
        "Fixed number of steps of Integrated Gradients, as captum's n_steps; by default as many as it takes.",
        Range(1, 100_000),
    ] = None,
    option: MethodOptions = None,
    at: Annotated[
        Literal["all"] | int | None,
        "Position whose answer is asked about, or all of a text, of a model with one at each.",
    ] = None,
    seed: Seed = 0,
) -> Explanation:
    """Attribute an output to the tokens of its text, by one or several methods compared.

    Every method scores the tokens of every text, or the pixels of every image, for the same number f: the logit of a
    class or of the next token, less that of `contrast`, or the log-probability of a continuation (see
    `ssmscope.interp.objective`). Where Integrated Gradients takes more than two seconds, stderr announces the
    number of gradients and the time they take, and then reports progress.

    With `by` a score is that of a sentence (which ends at . ! ? or … before a space, or at an empty line), of a line,
    or of a named span next to the rest of the text: the sum of its tokens' scores. Special tokens stay apart.

    Args:
        methods: names, or functions by name: each gets an `Objective` of a batch of texts and gives their `Scores`.
        target: a class's number or name; a token's id or text, or a continuation as a text or as a list of ids. A list
            has one for each text, or a single one for all.
        option: options of methods, by name: {"ig": {"baseline": "pad"}}.
        at: a position, or "all" for the answers at every position of one text, a `PositionExplanation`.

    Raises:
        InputError: an unknown option, target or contrast, spans that are not in a text or overlap, or scores that are
            not finite.
    """
    from dataclasses import replace

    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.core.take_trace import as_batch
    from ssmscope.interp.explain.groups import grouped
    from ssmscope.interp.explain.result import Explanation, PositionExplanation
    from ssmscope.interp.explain.scored_text import Attribution, ExplainedText, kind_of
    from ssmscope.interp.gates import note_on_gates
    from ssmscope.interp.methods import bind_methods
    from ssmscope.interp.objective import Meter, last_logits, objective

    if steps is not None:
        option = {**(option or {}), "ig": {**(option or {}).get("ig", {}), "fixed": steps}}
    named = bind_methods(methods, option, model=model, seed=seed)
    batch = as_batch(model, texts)
    if at == "all" and len(batch.lengths) != 1:
        raise InputError(f"at='all' asks about every position of one text, and {len(batch.lengths)} were given")
    if isinstance(target, list | tuple) and len(target) == 1:
        target = [*target] * len(batch.tokens)
    rows: list[ExplainedText] = []
    for place in range(batch.lengths[0]) if at == "all" else [at]:
        asked = model if place is None else model.at(place)
        logits = last_logits(asked, batch)
        wanted = logits.argmax(-1).tolist() if target is None else target
        explained = replace(objective(asked, batch, target=wanted, contrast=contrast), meter=Meter())
        values = explained.values()
        found = {name: method(explained) for name, method in named.items()}
        answers, pixels = model.answers_of(logits), model.images_of(batch)
        series = batch.values if model.reads == "series" else None
        rows += [
            ExplainedText(
                tokens=tuple(batch.tokens[row]),
                words=tuple(batch.words[row]),
                answer=answers[row][0],
                probability=float(answers[row][1]),
                target=explained.names[row],
                value=float(values[row]),
                attributions=tuple(
                    Attribution.of(name, scores, row, length, kind_of(named[name])) for name, scores in found.items()
                ),
                pixels=None if pixels is None else pixels[row].float().cpu().numpy(),
                series=None if series is None else series[row, :length].float().cpu().numpy(),
            )
            for row, length in enumerate(batch.lengths)
        ]
    if by:
        rows = [grouped(text, batch, row, by) for row, text in enumerate(rows)]
    options = call_options(methods=list(named), target=[text.target for text in rows], option=option or {})
    options |= {"at": "all"} if at == "all" else {}
    source = (model.at(at) if isinstance(at, int) else model).source
    provenance = record_provenance(source, options=options, seed=seed)
    notes = note_on_gates(model, batch, [name for name, method in named.items() if kind_of(method).gate])
    if unknown := dict.fromkeys(word for each in batch.spelled for word in each.unknown_words):
        notes.append(f"the tokenizer does not know {' and '.join(f'“{word}”' for word in unknown)} ([UNK])")
    made = PositionExplanation if at == "all" else Explanation
    return made(provenance=provenance, texts=tuple(rows), methods=tuple(named), top=top, notes=tuple(notes))
