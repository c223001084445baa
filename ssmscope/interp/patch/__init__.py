"""Where an answer comes from: what one run had is put into another, layer by layer and token by token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import LANGUAGE_MODEL, TEXT_CLASSIFIER, TOKEN_CLASSIFIER, TOKEN_MODEL
from ssmscope.api.options import Metavar
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.interp.patch.result import Patching


def check_method(*, method: str, metric: str, **_: object) -> None:
    """Refuse a probability of the gradient's approximation, which is of logits.

    Raises:
        InputError: as said.
    """
    if method == "gradient" and metric == "probability":
        raise InputError("the gradient approximates logits, not probabilities; give metric difference or normalised")


@analysis(
    "patch",
    check=check_method,
    question="Where, in layers and tokens, does the answer come from?",
    models=(TEXT_CLASSIFIER, TOKEN_CLASSIFIER, LANGUAGE_MODEL, TOKEN_MODEL),
    dtype="float32",
)
def patch(
    model: Model,
    *,
    clean: Annotated[
        str | list[int],
        "The text with the answer; token ids for a model without a tokenizer.",
    ],
    corrupted: Annotated[str | list[int], "One of as many tokens that has another answer."],
    site: Annotated[
        Literal["state", "output", "residual", "convolution", "head"],
        "What is patched: the memory behind a token, a mixer's output, the residual stream that a block reads, what a "
        "convolution reads, or single heads' outputs.",
    ] = "state",
    direction: Annotated[
        Literal["denoise", "noise"],
        "Put what is clean into the corrupted run, or what is corrupted into the clean one.",
    ] = "denoise",
    metric: Annotated[
        Literal["normalised", "difference", "probability"],
        "What is shown: the difference of logits from 0 (nothing) to 1 (the other run's), itself, or the answer's "
        "probability.",
    ] = "normalised",
    positions: Annotated[
        str | int | list[int] | slice | None,
        "Words, positions (3 or 3:5) or last; else all of the tokens.",
        Metavar("SPAN"),
    ] = None,
    method: Annotated[
        Literal["exact", "gradient", "both"],
        "Run every cell, or approximate all of them by one gradient (attribution patching), or both, with their "
        "correlation.",
    ] = "exact",
    answer: Annotated[
        int | str | None, "The clean text's class or next token; else what is predicted.", Metavar("NAME")
    ] = None,
    contrast: Annotated[
        int | str | None, "The corrupted text's; else what is predicted of it.", Metavar("NAME")
    ] = None,
) -> Patching:
    """Where does the answer come from? What a run on one text had is put into a run on another, cell by cell.

    Activation patching (Meng et al. 2022, causal tracing; Zhang & Nanda 2024): of two texts with as many tokens and
    different answers, one is run with a single activation, of one layer at one token, taken from the other. Of every
    cell it has the answer's probability and the difference of the logits of answer and contrast, normalised as (m −
    m_base) / (m_other − m_base); and, in a row of its own, those of all layers patched at that token together.

    The state, which recurrences alone have, is patched behind a token: all that the layer keeps of the tokens up to it,
    the last inputs of its convolution included. The token's own output is already computed then, and later ones
    continue from it; all layers together are the whole memory, and the run is that of the other text's tokens followed
    by this one's. Heads are patched at all chosen tokens at once.

    Runs begin behind what they share: at the states before the first token that is patched, where the model can
    continue from states, and at the layer that is patched, where layers read the residual stream and nothing else; all
    layers of a token are one batch. Before the first token that differs nothing is run.

    The method "gradient" is for large models: two forward passes and a backward one give (a_other − a_base) · ∂m/∂a of
    every cell, m the difference of the logits (attribution patching, Nanda 2023; Syed et al. 2023, Eq. 2). It is
    patching to first order and misses what saturates: "both" has its correlation with the exact grid, over all cells
    from the first token that differs on. All layers together have no approximation.

    Raises:
        InputError: texts of different length, that are the same or have no token in common, one answer of both, an
            answer of several tokens, positions that are not there, a convolution in a model that has none, heads that
            are single channels, or the probability as the metric of the method "gradient".
    """
    from ssmscope.interp.patch.measure import patched

    return patched(model, clean, corrupted, site, direction, metric, positions, method, answer, contrast)
