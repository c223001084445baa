"""Dependence of outputs on distant inputs (recency), and similarity of tokens by layer (over-smoothing).

State-space models forget: if every state decays, |∂y_t/∂x_s| falls exponentially in t − s, and if states hardly decay,
all tokens become similar (Wang et al., Understanding and mitigating bottlenecks of state space models through the lens
of recency and over-smoothing, arXiv 2501.00658). Both are measured on the trained model itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.dimensions import Dimension
from ssmscope.api.inputs import Texts
from ssmscope.api.limits import SHARE
from ssmscope.api.options import Metavar, Range, Seed
from ssmscope.errors import InputError

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.core.take_trace import TextsLike
    from ssmscope.probes.influence.result import Influence


@analysis(
    "influence",
    reads=Texts(instead="length"),
    settings="probes fit_from fit_to",
    question="How far back does an output depend on its input?",
    dtype="float32",  # Gradients need this precision.,
    scores={"influence.recent[last N]": SHARE},
    dimensions=(Dimension("Influence", r"influence\.recent\[.*\]", "share of the last tokens"),),
)
def influence(
    model: Model,
    texts: TextsLike | None = None,
    *,
    length: Annotated[
        int | None, "Length of random sequences instead of texts; of pixels with the class token.", Range(1)
    ] = None,
    sequences: Annotated[int, "Number of random sequences.", Range(1)] = 8,
    positions: Annotated[
        Literal["last", "all"] | Sequence[int], "Output positions; -1 is a text's last.", Metavar("last|all|0,-1")
    ] = "last",
    at: Annotated[Literal["output", "layers"], "Only the whole model, or each layer's mixer too."] = "output",
    of: Annotated[
        Literal["hidden", "logits"], "The head's input, or the logits (of a classifier at the last position only)."
    ] = "hidden",
    exact: Annotated[
        bool | None, "Exact or estimated norms (default: exact for outputs of up to 64 components)."
    ] = None,
    probes: Annotated[int, "Random vectors of an estimate, each a backward pass.", Range(2)] = 8,
    fit_from: Annotated[
        int, "Smallest distance of the fit; at 0 an output also reads its own token past the memory.", Range(0)
    ] = 1,
    fit_to: Annotated[
        int | None, "Largest distance of the fit (default: as far as the texts and the noise allow).", Range(0)
    ] = None,
    recent: Annotated[int, "Number of last tokens called recent.", Range(1)] = 8,
    piece: Annotated[int | None, "Tokens that run at once (default: as many as suit the device).", Range(1)] = None,
    seed: Seed = 0,
) -> Influence:
    """Measure how far back an output depends on its input (recency), and how similar tokens become (over-smoothing).

    Computes ‖∂y_t/∂x_s‖_F by distance t − s, its decay, the effective context, and the similarity of tokens by layer.
    y_t is the head's input at position t, or the logits; x_s is the embedding of token s; the norm is the Frobenius
    norm of the Jacobian block. With layers, each mixer is also measured alone: its output against its own input,
    through its actual gates and norms. An exact norm takes a backward pass for every component of y.

    By distance: the mean of ln‖J‖ over all (text, t), and its least-squares line ln‖J‖ = a − λ (t − s), weighted by
    the number of (text, t) at each distance; 1/λ is the decay length. The range of the fit ends where norms underflow.
    At each text's last measured position: the share of the influence held by its last k tokens,
    Σ_{s > t−k} ‖J_ts‖ / Σ_s ‖J_ts‖; and the effective context, the smallest k that holds 50, 90 and 95 % if the
    influence continued before the text's first token along the fitted line. A text too short to hold the share does not
    reach it. If the line fits poorly (R² below 0.9), the influence of tokens before the text is unknown, and views
    show shares of the text's own tokens. Intervals are 95 % bootstrap intervals over texts; a single text has none.

    Raises:
        InputError: both texts and a length, or neither; a position that a text does not have; logits of a classifier at
            another position than the last; or gradients that are not finite.
    """
    import numpy as np
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.core.batching import MAX_NUMBERS_KEPT, refuse_reading
    from ssmscope.core.mixers import check_causal
    from ssmscope.core.progress import progress_bar
    from ssmscope.probes.influence import measure
    from ssmscope.probes.influence.result import Influence
    from ssmscope.probes.influence.similarity import similarity_of

    batch = measure.inputs_of(model, texts, length, sequences, seed)
    check_causal(model.module, "influence")
    if of == "logits" and model.is_classifier and positions != "last":
        raise InputError(f"{model.name} is {model.role}, with logits at the last position only: give positions='last'")
    refuse_reading(probes * batch.mask.numel(), f"{probes:,} probes", "ask for fewer")
    run: dict[str, Any] = {"model": model, "batch": batch, "chunk": piece}
    run |= {"positions": measure.positions_of(positions, batch.lengths), "exact": exact}
    run |= {"probes": measure.Probes(probes, seed), "fit": {"fit_from": fit_from, "fit_to": fit_to}}
    layers = model.num_layers if at == "layers" else 0
    together = max(1, MAX_NUMBERS_KEPT // (4 * batch.mask.numel() * model.width))  # GroupMamba has several inputs.
    with progress_bar() as bar:
        task = bar.add_task("outputs and layers", total=1 + layers)
        reaches = [measure.measure_reach(measure.of_output(model, batch, of), place="output", **run)]
        bar.advance(task)
        for start in range(0, layers, together):
            group = range(start, min(start + together, layers))
            trace = model.trace(batch, keep_inputs=group)
            for index in group:
                found = measure.of_layer(model, batch, index, trace.layers[index].u)
                reaches.append(measure.measure_reach(found, place=str(trace.layer_numbers[index]), **run))
                bar.advance(task)
    options = call_options(sequences=sequences if length is not None else None)
    return Influence(
        provenance=record_provenance(model.source, options=options, seed=seed),
        of=of,
        positions=positions if isinstance(positions, str) else "chosen",
        unit=model.unit,
        lengths=np.array(batch.lengths),
        recent=recent,
        reaches=tuple(reaches),
        similarity=similarity_of(model, batch, at_once=piece, seed=seed),
        notes=tuple(measure.notes_on(reaches, batch)),
    )
