"""Whether answers can be steered by a direction, and what that costs on other data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import LANGUAGE_MODEL, TEXT_CLASSIFIER, TOKEN_CLASSIFIER, TOKEN_MODEL, Texts
from ssmscope.api.options import REPEATED, Limit, Metavar, Range, Reads, Seed
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.model import Model, TextsLike
    from ssmscope.data.pixels import PixelData
    from ssmscope.data.sequences import SequenceData
    from ssmscope.data.text import TextData
    from ssmscope.data.tokens import TokenData
    from ssmscope.interp.steer.result import Steering


def check_strengths(*, strengths: Sequence[float], **_: object) -> None:
    """Refuse strengths that are given twice.

    Raises:
        InputError: as said.
    """
    if len(set(strengths)) < len(strengths):
        raise InputError(f"strengths has a number twice: {', '.join(f'{each:g}' for each in strengths)}")


@analysis(
    "steer",
    reads=Texts(),
    question="Can its answers be steered, and at what cost?",
    models=(TEXT_CLASSIFIER, TOKEN_CLASSIFIER, LANGUAGE_MODEL, TOKEN_MODEL),
    dtype="float32",
    check=check_strengths,
)
def steer(
    model: Model,
    texts: TextsLike,
    *,
    toward: Annotated[
        Sequence[str | Sequence[int]],
        "A text of what is steered to; may be repeated. Token ids for a model without a tokenizer.",
        REPEATED,
    ],
    away: Annotated[Sequence[str | Sequence[int]], "A text of what is steered from; may be repeated.", REPEATED],
    site: Annotated[
        Literal["residual", "state"],
        "What the direction is added to: the residual stream that a block reads, at every token, or the layer's memory "
        "behind a text's first token.",
    ] = "residual",
    layer: Annotated[int | None, "Of which state-space layer; by default the one in the middle.", Range(0)] = None,
    strengths: Annotated[
        Sequence[float], "By how much the direction is multiplied.", Range(-1000, 1000), Metavar("X,…")
    ] = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0),
    answer: Annotated[
        int | str | None, "The class or next token that is asked after; else what is predicted.", Metavar("NAME")
    ] = None,
    data: Annotated[
        str | TextData | PixelData | SequenceData | TokenData | None,
        "Held-out examples or text, for what it costs; else what MODEL learnt from.",
        Reads("data"),
        Metavar("DATA"),
    ] = None,
    split: Annotated[str | None, "Of a known data set; by default the one to test on.", Metavar("NAME")] = None,
    length: Annotated[int, "Tokens of a row, of a language model's text.", Range(2, 2**17)] = 128,
    limit: Limit = 200,
    random: Annotated[int, "Directions drawn at random, of the same norm.", Range(1, 1000)] = 5,
    seed: Seed = 0,
) -> Steering:
    """Can its answers be steered, and at what cost? A direction is added at a layer, in several strengths.

    The direction is the difference of means of contrasting texts (Rimsky et al. 2024, contrastive activation addition):
    of the residual stream that the layer's block reads at the texts' last tokens, which is then added, times its
    strength, at every token; or of the layer's states behind the texts, added to the state behind the first token, as
    if such texts had been read before. What a convolution keeps stays. Strength 1 is the difference itself.

    Measured are the answer's probability on the texts, and what the direction costs on held-out data: a classifier's
    accuracy and loss, a language model's loss of the next token. Beside stand directions drawn at random (Gaussian,
    each scaled to the same norm), and of both the mean with a 95 % bootstrap interval over texts or examples, paired:
    a direction that does no more than random ones of its size steers nothing.

    Args:
        data: examples themselves may be given; without any, and where the model's own are not known, costs are left
            out.

    Raises:
        InputError: a layer that the model does not have, texts whose means are the same, an answer of several tokens, a
            text of one token with the site "state", or strengths that are given twice.
    """
    from ssmscope.core.model import as_batch
    from ssmscope.interp.steer.measure import steered

    return steered(
        model,
        as_batch(model, texts),
        toward=toward,
        away=away,
        site=site,
        layer=layer,
        strengths=tuple(map(float, strengths)),
        answer=answer,
        data=data,
        split=split,
        length=length,
        limit=limit,
        random=random,
        seed=seed,
    )
