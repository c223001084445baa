"""Agreement of explanations with what people marked as the reason for a text's label."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import LANGUAGE_MODEL, TEXT_CLASSIFIER, Data
from ssmscope.api.options import Limit, Metavar, Range, Seed
from ssmscope.errors import InputError
from ssmscope.interp.methods import MethodOptions, Methods, check_methods
from ssmscope.interp.plausibility.measures import check_top

if TYPE_CHECKING:
    from ssmscope.api.sharding.parts import Columns
    from ssmscope.core.model import Model
    from ssmscope.data.text import TextData
    from ssmscope.interp.plausibility.result import Plausibility


def check_plausibility(*, top: float | None, **options: Any) -> None:
    """Raise InputError if methods or options do not fit, as in `check_methods`, or the size of rationales does not."""
    check_methods(**options)
    check_top(top)


@analysis(
    "plausibility",
    reads=Data("texts", leaves_out=True),
    question="Do explanations agree with people?",
    models=(TEXT_CLASSIFIER, LANGUAGE_MODEL),
    dtype="float32",  # Gradients need the precision.
    check=check_plausibility,
    sharded=True,
)
def plausibility(
    model: Model,
    data: TextData,
    *,
    methods: Methods = None,
    target: Annotated[
        int | str | None,
        "Class, next token or continuation, or `label` for each text's own; default the predicted one.",
        Metavar("NAME|label"),
    ] = None,
    top: Annotated[
        float | None,
        "Number of tokens, or share of them, in a rationale; default the mean share that people marked.",
        Metavar("N|X"),
    ] = None,
    limit: Limit = None,
    max_tokens: Annotated[int | None, "Leave out longer texts.", Range(1)] = None,
    option: MethodOptions = None,
    batch_size: Annotated[int | None, "Number of texts that run together.", Range(1, 2**16)] = None,
    seed: Seed = 0,
) -> Plausibility:
    """Measure the agreement of methods' scores with the human rationales in a data set's column "rationale".

    Each method explains the logit of the class or next token that the model predicts, or of another target. Per text:
    token F1 and IOU F1 of its top tokens as a rationale, and the area under the precision-recall curve of all scores
    (AUPRC), compared with that of random scores (DeYoung et al. 2020, ERASER, section 4.1); their means have 95 %
    bootstrap intervals over texts. Agreement with people says whether an explanation convinces, not whether it is what
    the model does: that is `fidelity_auc`.

    Args:
        data: texts with rationales; those without one are left out. A file has them in its column "rationale", see
            `ssmscope.data.rows`, an ERASER folder as evidence, see `ssmscope.data.eraser`.
        methods: those of `explain`, or functions by name, see there.
        target: of a language model, "label" is the label's name as the text's continuation.

    Raises:
        InputError: the model is neither a classifier of texts nor a language model, no text has a rationale, a
            tokenizer that does not say which characters a token is of, or scores that are not finite.
    """
    from dataclasses import replace

    import numpy as np
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.api.sharding.parts import over
    from ssmscope.core.batching import by_length, tokens_at_once
    from ssmscope.interp.explain.scored_text import kind_of
    from ssmscope.interp.gates import TEXTS_JUDGED, note_on_gates
    from ssmscope.interp.labelled import check_classifier, read_texts, row_targets, token_scores
    from ssmscope.interp.methods import bind_methods
    from ssmscope.interp.objective import objective
    from ssmscope.interp.plausibility.measure import plausibility_of

    check_classifier(model, data, "plausibility", next_tokens=True)
    ready = bind_methods(methods, option, model=model, seed=seed)
    if limit is not None:
        data = data.sample(limit, seed=seed)
    lengths, sizes, masks = read_texts(model, data)
    masks = [None if max_tokens is not None and n > max_tokens else mask for n, mask in zip(lengths, masks)]
    marked = [row for row, mask in enumerate(masks) if mask is not None]
    if not marked:
        raise InputError(
            f"no text of {data.name} ({data.split}) has a rationale: give a file with a column 'rationale' or an "
            "ERASER folder, and texts that are short enough"
        )

    def measure(rows: Sequence[int]) -> Columns:
        batch = model.encode([data.texts[row] for row in rows])
        goal = objective(model, batch, target=row_targets(model, data, rows, target))
        every = [token_scores(name, method(goal), batch)[0] for name, method in ready.items()]
        return {"scores": np.stack([np.concatenate(own) for own in every])}

    size = int(top) if top is not None and top >= 1 else top
    options = call_options(methods=list(ready), top=size, option=option or {})
    provenance = record_provenance(model.source, options=options, seed=seed, data=data)
    found = {name: [np.empty(0)] * len(data) for name in ready}
    batches = by_length(lengths, tokens_at_once(model.device), rows=marked, size=batch_size, longest_first=True)
    for rows, part in over(model, batches, measure, provenance=provenance):
        ends = np.cumsum([sizes[row] for row in rows])[:-1]
        for name, scores in zip(ready, part["scores"]):
            for row, own in zip(rows, np.split(scores, ends)):
                found[name][row] = own
    judged = model.encode([data.texts[row] for row in marked[:TEXTS_JUDGED]])
    notes = note_on_gates(model, judged, [name for name, method in ready.items() if kind_of(method).gate])
    return replace(plausibility_of(found, masks, top=size, seed=seed), provenance=provenance, notes=tuple(notes))
