"""Fidelity of explanations: the effect on a model's output of hiding the tokens that they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.dimensions import Dimension
from ssmscope.api.inputs import LANGUAGE_MODEL, TEXT_CLASSIFIER, Data
from ssmscope.api.options import Limit, Metavar, OneOf, Range, Seed
from ssmscope.errors import InputError
from ssmscope.interp.fidelity.measures import LOGIT_SCALE, RANDOM
from ssmscope.interp.methods import METHODS, MethodOptions, Methods, check_methods, method_names

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.data.pixels import PixelData
    from ssmscope.data.text import TextData
    from ssmscope.interp.fidelity.result import Fidelity

MIN_TOKENS_PER_TEXT = 128
"""Tokens of a batch per text in it at least, since each text has hundreds of copies."""


def check_fidelity(*, methods: Any, option: Any, **_: Any) -> None:
    """Raise InputError as `check_methods`, for "random" alone, and for a function of that name."""
    if isinstance(methods, Mapping) and RANDOM in methods:
        raise InputError(f"the method {RANDOM!r} is always there, as random rankings; give your function another name")
    names = [name for name in method_names(methods) if name != RANDOM]
    if not names:
        raise InputError(f"no method was given but {RANDOM}, which is always there; allowed are {', '.join(METHODS)}")
    check_methods(methods=methods if isinstance(methods, Mapping) else names, option=option)


@analysis(
    "fidelity",
    reads=Data("texts", leaves_out=True, series=True),
    question="Which explanation can be trusted?",
    first=3,
    models=(TEXT_CLASSIFIER, LANGUAGE_MODEL),
    dtype="float32",  # Gradients need the precision.
    check=check_fidelity,
    sharded=True,
    scores=("fidelity[methods]",),
    dimensions=(Dimension("Explanations, fidelity", r"fidelity\[.*\]", "ΔA", LOGIT_SCALE),),
)
def fidelity_auc(
    model: Model,
    data: TextData | PixelData,
    *,
    methods: Methods = None,
    target: Annotated[
        int | str | None,
        "Class, next token or continuation, or `label` for each text's own; default the predicted one.",
        Metavar("NAME|label"),
    ] = None,
    limit: Limit = None,
    max_tokens: Annotated[int | None, "Leave out longer texts.", Range(1)] = None,
    mode: Annotated[Literal["replace", "delete"], "Replace a hidden token, or delete it."] = "replace",
    replacement: Annotated[str, "Embedding that replaces a hidden token's.", Metavar("mean|zero|pad|TOKEN")] = "mean",
    value: Annotated[
        Literal["probability", "log-probability", "logit"] | None,
        "Quantity f of the target; default the probability of a class, the log-probability of a token.",
    ] = None,
    steps: Annotated[int, "Number of steps from no hidden token to all.", Range(1, 10_000)] = 20,
    knockout: Annotated[
        bool, "Also correlate scores with the exact effect of knocking each token out, in all layers."
    ] = False,
    knockout_layers: Annotated[
        bool, "Also correlate scores with the exact effect of knocking each token out in each layer alone."
    ] = False,
    measures: Annotated[
        Sequence[str] | None,
        "Also take these measures of captum's: captum:infidelity, captum:sensitivity_max.",
        OneOf("interp.fidelity.measures:CAPTUM_MEASURES"),
        Metavar("A,B"),
    ] = None,
    random_rankings: Annotated[int, "Number of random rankings to compare with, 20 or more.", Range(20, 100_000)] = 20,
    option: MethodOptions = None,
    batch_size: Annotated[int | None, "Number of copies that run together.", Range(1, 2**16)] = None,
    seed: Seed = 0,
) -> Fidelity:
    """Measure the fidelity AUC of methods of explanation over a data set, compared with random rankings.

    f is the probability of the class that the model predicts on the clean text (Baleen, Table 2); of a language model
    the log-probability of the next token, or of a continuation. Each method explains that target's logit; its signed
    scores rank the n non-special tokens, ties by position. For q = 0, 1/steps, …, 1 the first round(q n) tokens of the
    ranking are hidden (most relevant first, MoRF), or the last ones (least relevant first, LeRF, which goes through the
    same ranking from its end: of equal scores the last token first). Halves are rounded to the even number.

    - A_MoRF and A_LeRF are the areas under f over q, by trapezoids; ΔA = A_LeRF − A_MoRF, the higher the better.
    - Comprehensiveness is f(x) − f(x without the top tokens), sufficiency f(x) − f(the top tokens alone, the others
      hidden), each the mean over the top round(q n) tokens for q = 0.05, 0.1, 0.2, 0.5 (DeYoung et al. 2020, ERASER,
      without its share of 0.01, which rounds to no token in a short text).

    - ρ knockout, on request, is Spearman's correlation over a text's tokens of the scores with f(x) − f(x without the
      edges from the token to all later ones), cut in all layers (attention knockout, Geva et al. 2023): an intervention
      that hides no token and puts in nothing that the model has not seen. A hybrid's softmax attention is cut too; a
      token's own position keeps it. Texts whose output no knockout changes are left out. A further table, on request,
      has the correlations with the effect of the same edges cut in one layer only.

    - captum's measures, on request (Yeh et al. 2019), both the lower the better. Infidelity is E[(Iᵀ scores − (f(x) −
      f(x without the tokens of I)))²] over ten random halves I of the tokens; f is the logit that is explained, and the
      best factor rescales the scores. sensitivity_max is the largest change of the scores, relative to their norm, in
      ten draws of a box around the embeddings of 0.02 of their size; methods that read none (survival) have none.

    Every number has a 95 % bootstrap interval over texts, and so have the differences between any two methods, and
    between a method and the random rankings (whose mean is taken text by text): all come from the same resamples. Texts
    of one token have no ranking and are left out. Where people marked the texts' rationales, the methods' agreement
    with them (`ssmscope.plausibility`) is measured too.

    Args:
        data: texts, or images or series (`labelled_series`); their labels are used by the target "label" alone.
        target: of a language model, "label" is the label's name as the text's continuation.
        methods: those of `explain`, or functions by name, see there. The random rankings are there in any case.
        mode: with "replace" the length is kept, with "delete" the tokens that are left close up.
        replacement: the vector, which should not be a method's own baseline: the mean of the embedding table, zero, or
            a token's embedding; of images and series the data's mean pixel or step, or zero. When everything is deleted
            it is the one token that is left.

    Raises:
        InputError: neither a classifier nor a language model, knockouts with a target of several tokens, no text of two
            tokens, or scores or logits that are not finite.
    """
    from fractions import Fraction

    import numpy as np
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.api.sharding.parts import over
    from ssmscope.core.batching import by_length, tokens_at_once
    from ssmscope.interp.explain.scored_text import kind_of
    from ssmscope.interp.fidelity.batches import Measures, rankable
    from ssmscope.interp.fidelity.measure import circular_notes, replacement_vector, summarise
    from ssmscope.interp.fidelity.measures import KNOCKOUT, layer_measure
    from ssmscope.interp.gates import TEXTS_JUDGED, note_on_gates
    from ssmscope.interp.knockout.measure import roads_of
    from ssmscope.interp.labelled import check_classifier, encoded_rows
    from ssmscope.interp.methods import bind_methods
    from ssmscope.interp.objective import objective

    check_classifier(model, data, "fidelity", numbers=True, next_tokens=True)
    value = value or ("probability" if model.is_classifier else "log-probability")
    own = isinstance(methods, Mapping)
    if methods is not None and not own:
        methods = [name for name in method_names(methods) if name != RANDOM]
    ready = bind_methods(methods, option, model=model, seed=seed)
    if limit is not None:
        data = data.sample(limit, seed=seed)
    fill, texts = replacement_vector(model, replacement, data), rankable(model, data, max_tokens)
    grid = [Fraction(step, steps) for step in range(steps + 1)]
    where: dict[str, int | None] = {KNOCKOUT: None} if knockout else {}
    where |= {layer_measure(number): number for number in roads_of(model)} if knockout_layers else {}
    further = tuple(dict.fromkeys(measures or ()))
    how: Any = dict(mode=mode, value=value, target=target, random=random_rankings, batch_size=batch_size, seed=seed)
    how |= dict(grid=grid, layers=list(where.values()), further=further, fill=fill)
    options = call_options(methods=list(ready), option=option or {}, value=value)
    provenance = record_provenance(model.source, options=options, seed=seed, data=data)
    room = tokens_at_once(model.device)
    together: Any = dict(size=batch_size, most=room // MIN_TOKENS_PER_TEXT, longest_first=True)
    batches = list(by_length(texts.lengths, room, rows=texts.rows, **together))
    measured = Measures(model=model, texts=texts, methods=ready, **how)
    order, parts = zip(*over(model, batches, measured, provenance=provenance))
    lines = np.argsort(np.concatenate(order))
    found = {name: np.concatenate([part[name] for part in parts])[lines] for name in parts[0]}
    notes = dict.fromkeys(note for said in found["said"].tolist() for note in said.split("\n") if note)
    if mode == "replace" and not own:
        goal = objective(model, encoded_rows(model, data, [batches[0][0]]))
        notes |= dict.fromkeys(circular_notes(goal, list(ready), option or {}, fill))
    judged = encoded_rows(model, data, texts.rows[:TEXTS_JUDGED])
    notes |= dict.fromkeys(
        note_on_gates(model, judged, [name for name, method in ready.items() if kind_of(method).gate])
    )
    of_data: Any = dict(total=len(data), used=np.array(texts.rows), long=texts.long, share=texts.share, seed=seed)
    of_data |= dict(knocked=tuple(where), further=further, notes=list(notes))
    return summarise(provenance, tuple(ready), found, grid, **of_data)
