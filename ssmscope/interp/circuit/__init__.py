"""Circuits by road: the edges between a model's parts that an answer depends on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from ssmscope.api.analysis import analysis
from ssmscope.api.inputs import LANGUAGE_MODEL, TEXT_CLASSIFIER, TOKEN_CLASSIFIER, TOKEN_MODEL
from ssmscope.api.options import Metavar, Range, Reads, Seed
from ssmscope.errors import refuse_unused

if TYPE_CHECKING:
    from ssmscope.core.model import Model
    from ssmscope.data.pairs import PairData
    from ssmscope.interp.circuit.result import Circuit


def check_circuit(*, method: str, steps: int, choose: str, threshold: float, until: float, **_: object) -> None:
    """Raise InputError for options of another method or choice."""
    unused = {"threshold": threshold != 0.1} if choose == "greedy" else {"until": until != 0.9}
    refuse_unused(f"with {method}, {choose}", steps=steps != 5 and method != "integrated", **unused)


@analysis(
    "circuit",
    question="Which parts, reading what from which, compute the answer?",
    models=(TEXT_CLASSIFIER, TOKEN_CLASSIFIER, LANGUAGE_MODEL, TOKEN_MODEL),
    dtype="float32",
    check=check_circuit,
)
def circuit(
    model: Model,
    *,
    data: Annotated[
        str | PairData | list[Any],
        "Pairs: a csv or jsonl file with the columns clean, corrupted and target, or the name of a generated set.",
        Reads("pairs"),
        Metavar("PAIRS"),
    ],
    method: Annotated[
        Literal["exact", "gradient", "integrated"],
        "Run every edge, approximate all of them by one gradient (attribution patching), or by the mean of gradients "
        "between both embeddings.",
    ] = "exact",
    steps: Annotated[int, "Gradients of the method integrated.", Range(1, 1000)] = 5,
    nodes: Annotated[Literal["parts", "heads"], "Take mixers whole, or head by head."] = "parts",
    roads: Annotated[
        Literal["terms", "taps"], "Name what comes through a convolution by the terms x, B, C, …, or by its taps."
    ] = "terms",
    choose: Annotated[
        Literal["threshold", "greedy"],
        "Keep every edge of at least a threshold, or the strongest until the circuit is faithful.",
    ] = "threshold",
    threshold: Annotated[float, "Smallest share of the answer of an edge that is kept.", Range(0)] = 0.1,
    until: Annotated[float, "Faithfulness at which greedy choice ends.", Range(0, 1)] = 0.9,
    random: Annotated[int, "Number of random circuits of the same size.", Range(0, 1000)] = 20,
    limit: Annotated[int | None, "Maximum number of pairs, the first ones.", Range(1)] = None,
    seed: Seed = 0,
) -> Circuit:
    """Score the edges between a model's parts and choose the circuit of an answer.

    Parts are the embedding, each layer's mixer, attention and feed-forward part, and the logits. An edge is what a part
    reads of an earlier one's output by one of its roads: a mixer's x, B, C, Δ (delta), decay, β, or gate, an
    attention's q, k, v. With taps, what a convolution brings is divided by how far back its token stands ("tap 0" is
    the token's own); with heads, each reads for itself and writes its share of its mixer's output. An edge's score is
    the change of the difference of logits of the two answers when that alone is the corrupted run's, as a share of
    their difference between both runs: −1 where the answer becomes the corrupted one.

    Exact scores compute a mixer's terms for its input with that summand replaced, and take the road's. The method
    "gradient" is (corrupted − clean output) · gradient of what the road reads (attribution patching, Nanda 2023; Syed
    et al. 2023), for all edges by one backward pass; "integrated" averages gradients at embeddings between the two
    (Hanna et al. 2024).

    The circuit's faithfulness is (m − m_corrupted) / (m_clean − m_corrupted), m the mean difference of logits in a run
    in which all other edges read the corrupted run; beside it stands that of random circuits of as many edges. Means
    over pairs have 95 % bootstrap intervals.

    Args:
        data: further columns are classes of positions, which are not read here.

    Raises:
        InputError: pairs of different length, the same texts, one answer of both, or a model whose blocks are more than
            the sum of their parts.
    """
    import numpy as np
    from ssmscope.api.provenance import record_provenance
    from ssmscope.core.ties import descending
    from ssmscope.data.pairs import read_pairs
    from ssmscope.interp.circuit import measure
    from ssmscope.interp.circuit.result import Circuit
    from ssmscope.interp.pairs import encode_pairs, shares, whole_of

    given = read_pairs(data).take(limit)
    runs = measure.PairRuns(encode_pairs(model, given), taps=roads == "taps", heads=nodes == "heads")
    whole = whole_of(given.name, runs.clean, runs.corrupted)
    effects = runs.exact() if method == "exact" else runs.by_gradient(steps if method == "integrated" else 0)
    scores = shares(effects, whole, seed)
    order = descending(np.abs(scores[:, 0])).tolist()
    curve: list[tuple[int, float]] = []
    if choose == "greedy":
        kept, curve = measure.chosen_greedily(runs, order, until)
    else:
        kept = np.abs(scores[:, 0]) >= threshold
    found = measure.faithful(runs, kept)
    draw, others = np.random.default_rng(seed), []
    for _ in range(random):
        other = np.zeros(len(kept), dtype=bool)
        other[draw.choice(len(kept), int(kept.sum()), replace=False)] = True
        others.append(float(measure.faithful(runs, other).mean() / whole.mean()))
    return Circuit(
        provenance=record_provenance(model.source, seed=seed, data=given),
        pairs=len(given),
        method=method,
        nodes=(*runs.roads.names, "logits"),
        senders=tuple(edge.sender for edge in runs.edges),
        receivers=tuple(edge.receiver for edge in runs.edges),
        roads=tuple(edge.road for edge in runs.edges),
        scores=scores,
        kept=kept,
        faithfulness=shares(found[:, None], whole, seed)[0],
        random=np.array(others),
        curve=np.array(curve).reshape(-1, 2),
        clean=float(runs.clean.mean()),
        corrupted=float(runs.corrupted.mean()),
    )
