"""Contents of a model's memory: the tokens that its states still hold, keep, or are overwritten at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import Texts
from ssmscope.api.options import Layers, Limit, Metavar, Range, Reads, Seed, Top
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.core.take_trace import TextsLike
    from ssmscope.data.text import TextData
    from ssmscope.interp.heatmap.result import DataHeatmap
    from ssmscope.interp.heatmap.text_result import SelectionHeatmap


OF_STATES = ("survival", "readable", "lift")
"""Scores of what the states hold after a token."""


def check_heatmap(
    *, score: str, at: int | None, contrast: Any, through: bool, half_lives: bool, heads: Any, **_: Any
) -> None:
    """Raise InputError if options contradict each other."""
    asked = {"at": at is not None, "through": through, "half_lives": half_lives}
    if score not in OF_STATES and any(asked.values()):
        named = next(name for name, given in asked.items() if given)
        raise InputError(f"{named}=… applies to survival only, not to {score}")
    if score == "readable" and (through or half_lives):
        raise InputError("through=… and half_lives=… follow survival; leave them out with readable")
    if through and half_lives:
        raise InputError("half_lives=… concerns each layer's own writes; give it without through=…")
    if contrast is not None and score == "lift":
        raise InputError("lift compares a token with those around it; give it without contrast=…")
    if contrast is not None and (at is not None or through or heads is not None):
        raise InputError("contrast=… compares whole layers at the end of texts; leave out at=…, through=… and heads=…")


def check_reads(of_data: bool, *, limit: int | None, **options: Any) -> None:
    """Raise InputError for options of single texts with a data set, or of data sets with texts."""
    if not of_data and limit is not None:
        raise InputError("limit=… is the number of texts read from a data set; give data=… too, or leave it out")
    alone = {"at": None, "heads": None, "through": False, "contrast": None, "scale": None, "merge": False}
    given = [name for name, default in alone.items() if options[name] is not default]
    if of_data and options.get("score") == "lift":
        raise InputError("lift compares tokens within a text; with a data set give survival")
    if of_data and given:
        raise InputError(f"{given[0]}=… applies to single texts; leave it out with a data set")


@analysis(
    "heatmap",
    reads=Texts(data=check_reads),
    question="What is in its memory?",
    first=1,
    pair="interp.paired:pair",
    kinds=("heatmap", "heatmap-data"),
    check=check_heatmap,
    sharded=True,
)
def selection_heatmap(
    model: Model | None,
    texts: TextsLike | TextData,
    *,
    score: Annotated[
        Literal["survival", "readable", "retention", "write", "lift"],
        "Share of the state written at a token, or of what can be read of it; share of the old state kept (Eq. 10), or "
        "overwritten, at the token; or survival over that of the tokens around it.",
    ] = "survival",
    at: Annotated[int | None, "Examine the states after this token, from 0; default the end.", Range(0)] = None,
    layers: Layers = "all",
    heads: Annotated[Literal["all", "top"] | None, "Also show all heads, or the eight most selective ones."] = None,
    through: Annotated[bool, "Follow the memory of deep layers through the layers below to the input tokens."] = False,
    half_lives: Annotated[bool, "Also show half-lives, in tokens, of what is written; always over a data set."] = False,
    contrast: Annotated[
        str | None, "Show z-scores against each token's own average over these texts.", Reads("data"), Metavar("DATA")
    ] = None,
    scale: Annotated[
        Literal["shared", "row"] | None, "Colour all rows on one scale, or each on its own; default: texts on one."
    ] = None,
    top: Top = 5,
    punctuation: Annotated[bool, "Also name punctuation."] = False,
    merge: Annotated[bool, "Merge the tokens of a word."] = False,
    limit: Limit = None,
    seed: Seed = 0,
) -> SelectionHeatmap | DataHeatmap:
    """Compute the share of each token of a text in a model's states, and the words that stand out.

    Survival, the default: a layer writes W_s at token s, and R_s = (∏ of the transitions after s) W_s is left of it.
    Its share is ‖R_s‖ / Σ_s' ‖R_s'‖ in every head, averaged over heads weighted by Σ ‖R‖, then over layers.
    Readable is the same with tr(R_sᵀ M R_s)^½ in place of ‖R_s‖, M the mean of c_t c_tᵀ over the text: it does not
    change when a model's states are rescaled, as survival does, though its outputs do not.
    Retention: (1 / ND) Σ_d Σ_n E[A_t]^(n, d) (Baleen, Eq. 10), the share of its old state that a layer keeps when
    it reads token t: a strongly written token scores low. Write is 1 − retention. Lift is survival over the median
    of the 12 tokens on either side, layer by layer, which shows a kept marker that the mean over layers hides.

    The rationale consists of whole words that stand out, at most `top` and at most a third of them: those with 1.5
    times their even share of the state, or, for other scores, a standard deviation above the mean. A row whose
    coefficient of variation over tokens is below 0.1 is noise, and shown flat; image maps keep their own range,
    labelled "hardly selects".

    Over labelled texts (`TextData`) the result is a `DataHeatmap`: the kept words, parts of a text and classes, right
    answers compared with wrong ones, and the half-lives of layers and heads. A word's score is its share of the state
    times the number of words in its text, 1 for an even spread; its mean over the word's occurrences has a 95 %
    bootstrap interval over texts.

    Raises:
        InputError: a layer or position that is not there, a score that is not finite, options that contradict each
            other, and a trace without its inputs where they are needed.
    """
    from ssmscope.data.text import TextData
    from ssmscope.interp.heatmap.measure import scored
    from ssmscope.interp.heatmap.over_data import scored_data

    if score in OF_STATES and contrast is None and model is not None:
        at = model.position if at is None else at
        model = model.at(at) if at is not None and getattr(model.module, "position", None) is not None else model
    options: dict[str, Any] = {"score": score, "at": at, "layers": layers, "heads": heads, "through": through}
    options |= {"half_lives": half_lives, "contrast": contrast, "scale": scale}
    options |= {"top": top, "punctuation": punctuation, "merge": merge}
    check_reads(isinstance(texts, TextData), limit=limit, **options)
    if isinstance(texts, TextData):
        return scored_data(model, texts, options, limit=limit, seed=seed)
    return scored(model, texts, options)
