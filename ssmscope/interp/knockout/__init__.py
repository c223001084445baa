"""Which road an answer's information takes: edges between tokens cut, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import LANGUAGE_MODEL, TEXT_CLASSIFIER, TOKEN_CLASSIFIER, TOKEN_MODEL, Texts
from ssmscope.api.options import REPEATED, Metavar, Range, Seed

if TYPE_CHECKING:
    from ssmscope.core.model import Model, TextsLike
    from ssmscope.interp.knockout.result import Knockout


@analysis(
    "knockout",
    reads=Texts(),
    question="Through which layers does the information reach the answer?",
    models=(TEXT_CLASSIFIER, TOKEN_CLASSIFIER, LANGUAGE_MODEL, TOKEN_MODEL),
    dtype="float32",
)
def knockout(
    model: Model,
    texts: TextsLike,
    *,
    from_: Annotated[
        Sequence[str | int | list[int] | slice],
        "Words of the text, positions (3 or 3:5) or last, whose edges are cut; may be repeated, one after the other.",
        REPEATED,
        Metavar("SPAN"),
    ],
    to: Annotated[str | int | list[int] | slice, "Where they are not read any more.", Metavar("SPAN")] = "last",
    by: Annotated[
        Literal["window", "part", "head"],
        "Cut windows of layers, each of the recurrences that layers are made of (of a hybrid states and attention), or "
        "head by head.",
    ] = "window",
    level: Annotated[
        Literal["ssm", "block"],
        "Cut what is written at a source, or all that comes of it behind the convolution, at later tokens too.",
    ] = "block",
    roads: Annotated[
        Literal["states", "convolution", "both"],
        "Cut what is read of states (and in a hybrid by attention), what the convolution carries from a source to the "
        "tokens behind it, or both.",
    ] = "states",
    window: Annotated[int | None, "How many layers are cut at once; by default a fifth of them.", Range(1)] = None,
    answer: Annotated[
        int | str | None, "The class or next token that is asked after; else what is predicted.", Metavar("NAME")
    ] = None,
    seed: Seed = 0,
) -> Knockout:
    """Which road does the information take? The edges from some tokens to others are cut in windows of layers.

    Every layer's recurrence reads the tokens before by its implicit attention, y_t = Σ_s α[t, s] x_s + D x_t
    (Differential Mamba, Eq. 8). The terms of the sources are taken from y_t at the targets, in every window of layers
    and in all layers at once, and everything behind computed from what is left (attention knockout, Geva et al. 2023;
    of Mamba, Endy et al. 2025): the change of the answer's probability and logit. This is exact, no matrix is made,
    and nothing is masked or trained: what the sources wrote is scanned by itself.

    A layer's convolution, where it has one, mixes each token into the few after it before anything is written. At the
    level "block" a source is what the convolution reads, so that all that came of the token is cut; at "ssm" it is what
    the recurrence reads at its position, and what was written of it with later tokens stays.

    The other road is the convolution itself: it brings a source into x, B, C and Δ of the few tokens behind it, which
    may be all that the answer needs of it. It is cut by zeros in the taps of later tokens, as far as the last target.

    In a hybrid's layers of softmax attention sources are masked at the targets, and the softmax is over what is left; a
    token still reads itself. Over several texts the change is a mean with a 95 % bootstrap interval.

    Args:
        from_: each is cut by itself; in Python also positions as numbers, lists of them and slices. Words must stand in
            every text once.
        roads: "convolution" and "both" cut windows of layers.
        by: "part" cuts windows in each part of its layers alone, such as what a Diff-Mamba keeps and what it subtracts,
            or the states and the attention of a hybrid; "head" every head of every layer.
        answer: a class's number or name; a token's id or text.

    Raises:
        InputError: a span that is not there, from which no edge leads to the target, an answer of several tokens, a
            window of more layers than there are, "part" for a model whose layers have one recurrence, "head" where
            heads are single channels, either with the convolution, or the convolution of a layer that has none.
    """
    from ssmscope.core.model import as_batch
    from ssmscope.interp.knockout.measure import sweep

    sources = tuple(from_) if isinstance(from_, list | tuple) else (from_,)
    return sweep(model, as_batch(model, texts), sources, to, by, level, roads, window, answer, seed)
