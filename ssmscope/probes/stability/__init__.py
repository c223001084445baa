"""Is a trained model stable? What its states can grow by in a step, how fast they forget, how large they become.

Generalization Error Analysis for Selective State-Space Models (Honarpisheh et al.), section 4 and Experiment 1, made
into measurements that every architecture has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import Texts
from ssmscope.api.options import Metavar, Range, Seed

if TYPE_CHECKING:
    from ssmscope.core.model import Model, TextsLike
    from ssmscope.probes.stability.result import Stability


@analysis(
    "stability",
    reads=Texts(needed=False, instead="length"),
    question="Can its states grow, and how fast do they fade?",
)
def stability(
    model: Model,
    texts: TextsLike | None = None,
    *,
    length: Annotated[
        int | None, "Instead of texts, random sequences of N tokens; else of 512, or as many as an image has.", Range(2)
    ] = None,
    samples: Annotated[int, "How many random sequences.", Range(1)] = 4,
    positions: Annotated[
        int | Sequence[int],
        "Where norms are taken: at how many positions, evenly from the first to the last, or at which, from 0.",
        Range(0),
        Metavar("N|0,5,…"),
    ] = 33,
    tolerance: Annotated[float, "Log-gains up to this count as 0.", Range(0)] = 1e-6,
    seed: Seed = 0,
) -> Stability:
    """Can its states grow, and how fast do they fade? Spectral abscissa, growth, half-lives and norms by layer.

    The gain of a step is what the recurrence multiplies its state by, a_t = exp(Δ_t A) of every head and state; where
    the transition is a matrix (delta rules) it is the largest singular value. All gains are natural logarithms.

    - The spectral abscissa of a head is the largest diagonal entry of its continuous state matrix A, s_A of the paper.
      GLA, RetNet, RWKV and delta rules have no such matrix: theirs is the largest log-gain of a step on the inputs.
    - The half-life of a state, ln 2 / −E[log a_t] with the mean over all tokens of the inputs, is in tokens; infinite
      where the mean is not negative. A delta rule has one per head, by the mean over the directions of its memory.
    - Growth, ln ρ as observed, is the mean log-gain of a layer's state that grows most, averaged over texts, with its
      95 % bootstrap interval over texts. (Quantiles of half-lives describe the states, and have none.)
    - The worst case over all inputs is ln ρ of the generalisation bound for a selective SSM (s_A δ_min for s_A ≤ 0,
      else s_A M_Δ); elsewhere the supremum of s_A Δ: 0, approached as Δ → 0, for s_A ≤ 0, unless Δ is clamped, and
      unbounded for s_A > 0.
    - Norms are ‖H_t‖ (Frobenius) over all states of a layer, after token t was written, averaged over texts.

    A layer is unstable if a log-gain exceeds the tolerance, on the inputs or in the worst case; marginal if a half-life
    is longer than the longest text or growth is within the tolerance of 0; else stable: it cannot grow and forgets. A
    model is what its worst layer is.

    The 33 positions are those at which, of 1,024 tokens, the scans between them are of 32, their chunk.

    Raises:
        InputError: as `Model.encode`; a text of one token, a length beside texts, a position that no text has, or
            decays that are not finite.
    """
    import numpy as np

    from ssmscope.api.results import record_provenance
    from ssmscope.core.mixers import check_looks_back
    from ssmscope.probes.stability.inputs import inputs_of
    from ssmscope.probes.stability.layers import run
    from ssmscope.probes.stability.measure import layer_stability, mean_norms, notes_on, places
    from ssmscope.probes.stability.result import BEHAVIOURS, Stability

    inputs = inputs_of(model, texts, length=length, samples=samples, seed=seed)
    check_looks_back(model.module, "stability")
    model.check_recurrent_state("stability")
    chosen = places(positions, inputs.longest)
    found = run(model, inputs.batch, chosen)
    layers = tuple(
        layer_stability(number, part, len(parts), one, inputs.longest, tolerance, seed, bool(norms.isinf().any()))
        for number, parts, norms in zip(model.layer_numbers, found.layers, found.norms)
        for part, one in enumerate(parts)
    )
    options: dict[str, Any] = {
        "length": length,
        "samples": samples if texts is None else None,
        "positions": positions if isinstance(positions, int) else list(positions),
        "tolerance": tolerance,
    }
    return Stability(
        provenance=record_provenance(model.source, options=options, seed=seed),
        inputs=inputs.name,
        given=texts is not None,
        texts=len(inputs.batch.tokens),
        longest=inputs.longest,
        behaviour=max((layer.behaviour for layer in layers), key=BEHAVIOURS.index),
        layers=layers,
        positions=np.array(chosen),
        norms=np.stack([mean_norms(each.numpy(), seed) for each in found.norms]),
        notes=notes_on([one for parts in found.layers for one in parts]),
    )
