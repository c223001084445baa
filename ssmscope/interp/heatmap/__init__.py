"""What is in a model's memory: which tokens its selection mechanism keeps, or writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from ssmscope.analysis import analysis
from ssmscope.errors import InputError
from ssmscope.reads import Texts
from ssmscope.signature import Layers, Top, chosen_layers

if TYPE_CHECKING:
    from ssmscope.interp.heatmap.result import SelectionHeatmap
    from ssmscope.model import Model, TextsLike


@analysis("heatmap", reads=Texts(), question="What is in its memory?")
def selection_heatmap(
    model: Model | None,
    texts: TextsLike,
    *,
    score: Annotated[
        Literal["retention", "write"], "E[A_t], the share of its memory that is kept at a token, or 1 − E[A_t]."
    ] = "retention",
    layers: Layers = "mean",
    top: Top = 5,
    merge: Annotated[bool, "Put the tokens of a word together, scored by their mean."] = False,
) -> SelectionHeatmap:
    """Which tokens the selection mechanism keeps in memory, or writes to it, with the top-k rationale.

    Importance(t) = (1 / ND) Σ_d Σ_n E[A_t]^(n, d) (Baleen, Eq. 10): the retention gate averaged over channels (or
    heads) and states, how much of its memory a layer keeps when it reads token t. A token that is strongly written
    scores low; "write" is 1 − retention. Which of the two explains a model better is measured by fidelity AUC.

    Figure and page show every averaged layer; table and terminal do where `layers` is not "mean". The rationale is the
    `top` tokens of highest average score, ties by position, special tokens left out.

    Raises:
        InputError: a layer that the model does not have, or a score that is not finite.
    """
    import numpy as np

    from ssmscope.interp.heatmap.result import ScoredText, SelectionHeatmap, ranked
    from ssmscope.interp.heatmap.words import merged
    from ssmscope.model import as_trace
    from ssmscope.results import record_provenance

    trace = as_trace(model, texts, keep_inputs=False)
    places = chosen_layers(layers, trace.layer_numbers)
    chosen = tuple(trace.layer_numbers[place] for place in places)
    retention = trace.retention.detach().double().cpu().numpy()[list(places)]
    importance = retention if score == "retention" else 1.0 - retention
    found = []
    for row, real in enumerate(trace.mask.cpu().numpy()):
        scores = importance[:, row, real]
        if not np.isfinite(scores).all():
            layer = chosen[int(np.flatnonzero(~np.isfinite(scores).all(axis=1))[0])]
            raise InputError(f"the retention of text {row} is not finite at layer {layer}; the model is damaged")
        tokens, words = list(trace.tokens[row]), list(trace.words[row])
        if merge:
            tokens, words, scores = merged(tokens, words, scores)
        mean = scores.mean(axis=0).astype(np.float32)
        answer, probability = trace.answers[row]
        found.append(
            ScoredText(
                tokens=tuple(tokens),
                words=tuple(words),
                scores=scores.astype(np.float32),
                mean=mean,
                rationale=tuple(ranked(mean, words)[:top]),
                answer=answer,
                probability=float(probability),
                pixels=None if trace.pixels is None else trace.pixels[row].float().cpu().numpy(),
            )
        )
    options = {"score": score, "layers": layers if isinstance(layers, str) else list(chosen)}
    return SelectionHeatmap(
        provenance=record_provenance(trace.source, options={**options, "top": top, "merge": merge}),
        texts=tuple(found),
        score=score,
        layers=chosen,
        size=top,
        by_layer=layers != "mean",
    )
