"""Attention knockout: edges between tokens cut, layer by layer, to find the route of an answer's information."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import LANGUAGE_MODEL, TEXT_CLASSIFIER, TOKEN_CLASSIFIER, TOKEN_MODEL, Texts
from ssmscope.api.options import REPEATED, Metavar, Range, Seed

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.core.take_trace import TextsLike
    from ssmscope.interp.knockout.result import Knockout


@analysis(
    "knockout",
    reads=Texts(),
    asks_at=True,
    question="Through which layers does the information reach the answer?",
    first=5,
    models=(TEXT_CLASSIFIER, TOKEN_CLASSIFIER, LANGUAGE_MODEL, TOKEN_MODEL),
    dtype="float32",
)
def knockout(
    model: Model,
    texts: TextsLike,
    *,
    from_: Annotated[
        Sequence[str | int | list[int] | slice],
        "Sources of the cut edges: words of the text, positions (3, 3:5 or 3,7) or last; may be repeated.",
        REPEATED,
        Metavar("SPAN"),
    ],
    to: Annotated[
        str | int | list[int] | slice,
        "Targets of the cut edges; last: the position that is asked about.",
        Metavar("SPAN"),
    ] = "last",
    by: Annotated[
        Literal["window", "part", "head"],
        "Cut windows of layers, the parts of layers (recurrences; in a hybrid states and attention), or single heads.",
    ] = "window",
    level: Annotated[
        Literal["ssm", "block"],
        "Cut what is written at a source, or everything that depends on it after the convolution.",
    ] = "block",
    roads: Annotated[
        Literal["states", "convolution", "both"],
        "Cut reads of states (and of attention in a hybrid), the convolution from a source to the tokens after it, or "
        "both.",
    ] = "states",
    window: Annotated[int | None, "Number of layers cut at once; default a fifth of them.", Range(1)] = None,
    answer: Annotated[
        int | str | None, "Class or next token in question; default the predicted one.", Metavar("NAME")
    ] = None,
    seed: Seed = 0,
) -> Knockout:
    """Knock out the edges from some tokens to others, in windows of layers.

    Every layer's recurrence reads the tokens before by its implicit attention, y_t = Σ_s α[t, s] x_s + D x_t
    (Differential Mamba, Eq. 8). The terms of the sources are subtracted from y_t at the targets, in every window of
    layers and in all layers at once, and everything after it is computed from the rest (attention knockout, Geva et al.
    2023; for Mamba, Endy et al. 2025): the change of the answer's probability and logit, of a regression that of its
    number. This is exact, without
    materializing the matrix or training anything: what the sources wrote is scanned by itself.

    A layer's convolution, where it has one, mixes each token into the few after it before anything is written. At the
    level "block" a source is the convolution's input, so that everything that depends on the token is cut; at "ssm" it
    is the recurrence's input at its position, and what was written of it with later tokens stays.

    The other route is the convolution itself: it brings a source into x, B, C and Δ of the few tokens after it, which
    may be all that the answer needs. It is cut by zeros in the taps of later tokens, as far as the last target.

    In a hybrid's layers of softmax attention sources are masked at the targets, and the softmax is over what is left; a
    token still reads itself. Over several texts the change is a mean with a 95 % bootstrap interval.

    Args:
        from_: each is cut by itself; in Python also positions as numbers, lists of them and slices. Words must occur
            once in every text.
        by: "part" cuts windows in each part of its layers alone, such as what a Diff-Mamba keeps and what it subtracts,
            or the states and the attention of a hybrid; "head" every head of every layer.

    Raises:
        InputError: a span that is not there, from which no edge leads to the target, an answer of several tokens, a
            window of more layers than there are, "part" for a model whose layers have one recurrence, "head" where
            heads are single channels, either with the convolution, or the convolution of a layer that has none.
    """
    import numpy as np
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.core.mixers import is_bidirectional
    from ssmscope.core.progress import progress_bar
    from ssmscope.core.take_trace import as_batch
    from ssmscope.errors import InputError
    from ssmscope.interp.knockout.measure import CutRuns, others_have_attention, roads_of
    from ssmscope.interp.knockout.result import Knockout
    from ssmscope.interp.scoring import answer_ids, means_with_intervals
    from ssmscope.interp.spans import positions_of, span_name, words_at

    sources = tuple(from_) if isinstance(from_, list | tuple) else (from_,)
    batch = as_batch(model, texts)
    count, layers = len(batch.tokens), len(roads_of(model))
    to = [model.position] if to == "last" and model.position is not None else to
    window = max(1, layers // 5) if window is None else window
    if window > layers:
        raise InputError(f"window is {window}; {model.name} has {layers} layers")
    if roads != "states" and by != "window":
        raise InputError(f"the convolution is cut in windows of layers; leave out by={by!r} or roads={roads!r}")
    if not sources:
        raise InputError("from_=… is empty; give words of the text, positions such as 3, 3:5 or 3,7, or last")
    targets = [positions_of(to, batch, text) for text in range(count)]
    spans = [[positions_of(span, batch, text) for text in range(count)] for span in sources]
    names, goal = [span_name(span) for span in sources], span_name(to)
    for name, places in zip(names, spans):
        for text, (own, read) in enumerate(zip(places, targets)):
            if min(own) > max(read) and not is_bidirectional(model.module):
                which = f" of text {text + 1}" if count > 1 else ""
                raise InputError(f"no edge leads from {name!r}{which} back to {goal!r}: a token reads those before it")
    runs = CutRuns(model, batch, by, window, level, roads)
    ids, said = answer_ids(model, batch, answer)
    plain, values = np.empty((2, count)), np.empty((2, count, len(sources), len(runs.cuts)))
    with progress_bar() as bar:
        for text, number in bar.track([*np.ndindex(count, len(sources))], description="texts and sources"):
            plain[:, text], values[:, text, number] = runs.answers(text, spans[number][text], targets[text], ids[text])
    change = values[0] / plain[0][:, None, None] - 1
    if model.gives == "numbers":
        change = values[1] - plain[1][:, None, None]
    options = call_options(**{"from": names, "to": goal, "window": window})
    return Knockout(
        provenance=record_provenance(model.source, options=options, seed=seed),
        tokens=batch.tokens,
        answers=tuple(said),
        sources=tuple(names) if count > 1 else tuple(words_at(each[0], batch) for each in spans),
        spans=tuple(tuple(each) for each in spans),
        target=goal if count > 1 else words_at(targets[0], batch),
        targets=tuple(targets),
        by=by,
        roads=roads,
        cuts=tuple(runs.cuts),
        probability=plain[0],
        logit=plain[1],
        probabilities=values[0],
        logits=values[1],
        changes=means_with_intervals(change, seed),
        attends=others_have_attention(model),
    )
