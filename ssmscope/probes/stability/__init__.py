"""Stability of a trained model: growth of its states in a step, half-lives and norms (Generalization Error Analysis for
Selective State-Space Models, Honarpisheh et al., section 4 and Experiment 1), measured for every architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from ssmscope.api.analysis import analysis
from ssmscope.api.dimensions import Dimension
from ssmscope.api.inputs import Texts
from ssmscope.api.options import Metavar, Range, Seed

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.core.take_trace import TextsLike
    from ssmscope.probes.stability.result import Stability


@analysis(
    "stability",
    reads=Texts(needed=False, instead="length"),
    question="Can its states grow, and how fast do they fade?",
    scores=("stability.growth",),
    dimensions=(Dimension("Stability", r"stability\.growth", "largest growth of the states, nats per token"),),
)
def stability(
    model: Model,
    texts: TextsLike | None = None,
    *,
    length: Annotated[
        int | None, "Length of random sequences instead of texts (default: 512, or that of an image).", Range(2)
    ] = None,
    sequences: Annotated[int, "Number of random sequences.", Range(1)] = 4,
    positions: Annotated[
        int | Sequence[int],
        "Positions at which norms are taken: N evenly spaced ones, or a list, from 0.",
        Range(0),
        Metavar("N|0,5,…"),
    ] = 33,
    tolerance: Annotated[float, "Log-gains up to this count as 0.", Range(0)] = 1e-6,
    seed: Seed = 0,
) -> Stability:
    """Measure whether states can grow and how fast they fade: spectral abscissa, growth, half-lives, norms by layer.

    The gain of a step is the factor by which the recurrence multiplies its state, a_t = exp(Δ_t A) for every head and
    state; if the transition is a matrix (delta rules), its largest singular value. All gains are natural logarithms.

    - The spectral abscissa of a head is the largest diagonal entry of its continuous state matrix A, s_A in the paper.
      GLA, RetNet, RWKV and delta rules have no such matrix: theirs is the largest log-gain of a step on the inputs.
    - The half-life of a state is ln 2 / −E[log a_t] in tokens, with the mean over all tokens of the inputs; infinite
      if the mean is not negative. A delta rule has one per head, of the direction that fades slowest: its gain over a
      text is the largest singular value of the product of the transitions.
    - Growth, the observed ln ρ, is the mean log-gain of a layer's fastest-growing state, averaged over texts, with its
      95 % bootstrap interval over texts. (Quantiles of half-lives describe the states and have no intervals.)
    - The worst case over all inputs is ln ρ of the generalisation bound for a selective SSM (s_A δ_min for s_A ≤ 0,
      else s_A M_Δ); otherwise the supremum of s_A Δ: for s_A ≤ 0 it is 0, approached as Δ → 0, unless Δ is clamped;
      for s_A > 0 it is unbounded.
    - Norms are ‖H_t‖ (Frobenius) over all states of a layer after token t is written, averaged over texts.

    A layer is unstable if a log-gain exceeds the tolerance, on the inputs or in the worst case; marginal if a half-life
    is longer than the longest text or growth is within the tolerance of 0; else stable: it cannot grow, and it forgets.
    A model is as stable as its worst layer.

    Raises:
        InputError: as `Model.encode`; a text of one token, a length given with texts, a position that no text has, or
            decays that are not finite.
    """
    import numpy as np
    from ssmscope.api.provenance import call_options, record_provenance
    from ssmscope.core.mixers import check_causal
    from ssmscope.probes.stability import measure
    from ssmscope.probes.stability.result import BEHAVIOURS, Stability

    inputs = measure.inputs_of(model, texts, length=length, sequences=sequences, seed=seed)
    check_causal(model.module, "stability")
    model.check_recurrent_state("stability")
    chosen = measure.norm_positions(positions, inputs.longest)
    found = measure.record_layers(model, inputs.batch, chosen)
    own: dict[str, Any] = {"longest": inputs.longest, "tolerance": tolerance, "seed": seed}
    layers = tuple(
        measure.layer_stability(number, part, len(parts), one, overflows=bool(norms.isinf().any()), **own)
        for number, parts, norms in zip(model.layer_numbers, found.layers, found.norms)
        for part, one in enumerate(parts)
    )
    options = call_options(sequences=sequences if texts is None else None)
    return Stability(
        provenance=record_provenance(model.source, options=options, seed=seed),
        inputs=inputs.name,
        given=texts is not None,
        texts=len(inputs.batch.tokens),
        longest=inputs.longest,
        behaviour=max((layer.behaviour for layer in layers), key=BEHAVIOURS.index),
        layers=layers,
        positions=np.array(chosen),
        norms=np.stack([measure.means_of(each.numpy(), seed) for each in found.norms]),
        notes=measure.notes_on([one for parts in found.layers for one in parts]),
    )
