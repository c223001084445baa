"""What is in a model's memory: which tokens its states still hold, keep, or are replaced at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.analysis import analysis
from ssmscope.errors import InputError
from ssmscope.reads import Texts
from ssmscope.signature import Layers, Metavar, Range, Reads, Top

if TYPE_CHECKING:
    from ssmscope.interp.heatmap.result import SelectionHeatmap
    from ssmscope.model import Model, TextsLike


def check_heatmap(
    *, score: str, at: int | None, contrast: Any, through: bool, half_lives: bool, heads: Any, **_: Any
) -> None:
    """Refuse options that contradict each other.

    Raises:
        InputError: as said.
    """
    asked = {"at": at is not None, "through": through, "half_lives": half_lives}
    if score != "survival" and any(asked.values()):
        named = next(name for name, given in asked.items() if given)
        raise InputError(f"{named} is of survival, what is left of a token; not of {score}")
    if through and half_lives:
        raise InputError("half_lives are of what each layer writes itself; give it without through")
    if contrast is not None and (at is not None or through or heads is not None):
        raise InputError("contrast compares whole layers at the end of texts; give it without at, through and heads")


@analysis("heatmap", reads=Texts(), question="What is in its memory?", check=check_heatmap)
def selection_heatmap(
    model: Model | None,
    texts: TextsLike,
    *,
    score: Annotated[
        Literal["survival", "retention", "write"],
        "A token's share of what the states hold; the share of what it already had that is kept when it reads the "
        "token (Eq. 10), or replaced.",
    ] = "survival",
    at: Annotated[int | None, "Look into the states after this token, from 0; else at the end.", Range(0)] = None,
    layers: Layers = "all",
    heads: Annotated[Literal["all", "top"] | None, "Also show every head, or the eight most selective ones."] = None,
    through: Annotated[bool, "Follow deep layers' memory through those below to the tokens of the input."] = False,
    half_lives: Annotated[bool, "Also after how many tokens half of what is written at a token is left."] = False,
    contrast: Annotated[
        str | None, "z-scores against each token's own average over these texts.", Reads("data"), Metavar("DATA")
    ] = None,
    scale: Annotated[Literal["shared", "row"], "Colour all rows on one scale, or each on its own."] = "shared",
    top: Top = 5,
    punctuation: Annotated[bool, "Name punctuation too."] = False,
    merge: Annotated[bool, "Put the tokens of a word together."] = False,
) -> SelectionHeatmap:
    """What a model's states hold of each token of a text, and the words that stand out.

    Survival, the default: a layer writes W_s at token s, and R_s = (∏ of the transitions after s) W_s is left of it.
    Its share is ‖R_s‖ / Σ_s' ‖R_s'‖ in every head, averaged over heads weighted by Σ ‖R‖, then over layers.
    Retention: (1 / ND) Σ_d Σ_n E[A_t]^(n, d) (Baleen, Eq. 10), the share of what a layer
    already had that is kept when it reads token t: one that is strongly written scores low. Write is 1 − retention.

    The rationale is of whole words that stand out, at most `top` and at most a third of them: those with 1.5 times
    their even share of the state, or a standard deviation above the mean of other scores. A row whose coefficient of
    variation over tokens is below 0.1 is noise, and shown flat.

    Raises:
        InputError: a layer or position that is not there, a score that is not finite, options that contradict each
            other, and a trace without its inputs where they are needed.
    """
    from ssmscope.interp.heatmap.scored import scored

    return scored(
        model,
        texts,
        score=score,
        at=at,
        layers=layers,
        heads=heads,
        through=through,
        half_lives=half_lives,
        contrast=contrast,
        scale=scale,
        top=top,
        punctuation=punctuation,
        merge=merge,
    )
