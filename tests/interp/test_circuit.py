"""Circuits of compiled models are found, by values that a gradient or a run by hand confirms."""

from random import Random

import numpy as np
import pytest
import torch
from examples import random_example
from loud import loud
from refusals import refuses
import ssmscope
from ssmscope.core.model import Model
from ssmscope.core.roads import Edge
from ssmscope.data.pairs import read_pairs
from ssmscope.errors import InputError
from ssmscope.interp.circuit import measure
from ssmscope.interp.pairs import encode_pairs, shares
from ssmscope.zoo.compiled import compiled, pairs_of

TRUE = {Edge(*edge) for edge in compiled("recall", "mamba2", decoy=True).edges}
model = pytest.fixture(scope="module")(lambda: ssmscope.load(compiled("recall", "mamba2", decoy=True).module))


@pytest.mark.parametrize("method", ["exact", "integrated"])
def test_the_circuit_of_a_compiled_model_is_found(model: Model, method: str, tmp_path) -> None:
    found = ssmscope.circuit(model, data="recall", method=method, random=3, limit=24)
    assert set(found.circuit) == TRUE and found.faithfulness[0] == pytest.approx(1, abs=1e-3)
    assert found.random.max() < 0.5
    frame = found.to_frame()
    assert frame.loc[frame.receiver == "logits", "score"].min() == pytest.approx(-1, abs=0.05)
    assert found.headline.startswith("Circuit of Mamba2ForCausalLM: 4 of 15 edges keep 1.000")
    found.save(tmp_path, "circuit", ("json", "csv", "svg", "html"))
    assert ssmscope.Result.load(tmp_path / "circuit.json") == found


def test_greedy_choice_ends_at_the_faithfulness_that_is_asked(model: Model) -> None:
    found = ssmscope.circuit(model, data="recall", choose="greedy", until=0.9, random=0, limit=24)
    assert set(found.circuit) == TRUE and found.curve[-1].tolist() == pytest.approx([4, 1], abs=1e-3)
    assert (found.curve[:-1, 1] < 0.9).all()


MIXER = "mixer 1 head 0"
FINER = {
    "taps": {Edge("mixer 1", "logits"), Edge("embedding", "mixer 1", "tap 0"), Edge("embedding", "mixer 1", "tap 1")},
    "heads": {Edge(MIXER, "logits"), *(Edge("embedding", MIXER, road) for road in ("x", "B", "C"))},
}
"""The value stands at the token after its key; one head of several has it."""


@pytest.mark.parametrize("option, value", [("roads", "taps"), ("nodes", "heads")])
def test_the_circuit_is_found_by_tap_and_by_head(model: Model, option: str, value: str) -> None:
    found = ssmscope.circuit(model, data="recall", random=0, limit=12, **{option: value})
    assert set(found.circuit) == FINER[value] and found.faithfulness[0] == pytest.approx(1, abs=1e-3)


def test_heads_that_are_channels_or_that_do_not_add_up_are_refused() -> None:
    for family, heads in (("mamba", False), ("gated-delta", True)):
        loaded = ssmscope.load(compiled("recall", family).module)
        if heads:
            found = ssmscope.circuit(loaded, data="recall", nodes="heads", random=0, limit=4)
            assert "mixer 0 head 0" in found.nodes
        else:
            with pytest.raises(InputError, match="heads of .* are single channels; leave nodes=… out"):
                ssmscope.circuit(loaded, data="recall", nodes="heads", limit=4)
    with pytest.raises(InputError, match="add up to a mixer's output; leave nodes=… out"):
        ssmscope.circuit(ssmscope.load("demo/babi-diff-mamba"), data=STORY, nodes="heads")


STORY = [
    {
        "clean": "Clara walked to the attic . Where is Clara ?",
        "corrupted": "Clara walked to the cellar . Where is Clara ?",
    }
]


@pytest.mark.parametrize("finer", [{}, {"taps": True}, {"heads": True}])
def test_the_gradient_is_that_of_a_small_step(finer: dict[str, bool]) -> None:
    """Along clean + ε (corrupted − clean) through one road the metric's slope is the score."""
    from small_models import SMALL_MODELS

    torch.manual_seed(0)
    model = ssmscope.load(loud(SMALL_MODELS["bamba"]()["bamba"]), dtype="float64")
    rows = [{"clean": [5, 17, 3, 9], "corrupted": [50, 7, 3, 9], "target": 1, "contrast": 2}]
    runs = measure.PairRuns(encode_pairs(model, read_pairs(rows)), **finer)
    scores = runs.by_gradient()[0]
    base, other = (runs.roads.run(batch) for batch in (runs.pairs.clean, runs.pairs.corrupted))
    step = 1e-3
    with torch.no_grad():
        for edge in [runs.edges[at] for at in range(0, len(runs.edges), 5 if len(runs.edges) < 200 else 29)]:
            ends = []
            for sign in (1, -1):
                change = {edge.sender: sign * step * (other.outputs[edge.sender] - base.outputs[edge.sender])}
                shift = lambda *to, edge=edge, change=change: change if to[:2] == edge[1:] else {}  # noqa: E731
                ends.append(float(runs.pairs.measure(runs.roads.run(runs.pairs.clean, shift).logits, [0])))
            slope = (ends[0] - ends[1]) / (2 * step)
            assert scores[runs.edges.index(edge)] == pytest.approx(slope, rel=0.02, abs=0.01), edge.name


@pytest.mark.parametrize("name, finer", [("bamba", {}), ("bamba", {"heads": True}), ("qwen3_next", {}), ("jamba", {})])
def test_runs_of_exact_edges_begin_with_the_block_that_reads(name: str, finer: dict[str, bool]) -> None:
    """They are those of the whole run with the edge replaced."""
    model = Model(loud(random_example(name)).double())
    rows = [{"clean": [5, 17, 3, 9], "corrupted": [50, 7, 3, 9], "target": 1, "contrast": 2}]
    runs = measure.PairRuns(encode_pairs(model, read_pairs(rows)), **finer)
    runs.edges = Random(0).sample(runs.edges, min(20, len(runs.edges)))
    found = runs.exact()[0]
    assert found == pytest.approx([float(runs.without([edge])[0] - runs.clean[0]) for edge in runs.edges], abs=1e-5)
    assert np.abs(found).max() > 1e-3


def test_intervals_of_shares_cover_the_ratio_of_means() -> None:
    random, covered = np.random.default_rng(0), 0
    for seed in range(200):
        whole = random.normal(2.0, 0.5, 40)
        part = 0.3 * whole + random.normal(0, 0.3, 40)
        _, low, high = shares(part[:, None], whole, seed)[0]
        covered += low <= 0.3 <= high
    assert 182 <= covered <= 198


class AdditiveRuns:
    """Pairs whose edges' effects add up: (pairs, edges), of which the run without edges lacks theirs."""

    def __init__(self, effects: np.ndarray) -> None:
        self.effects, self.edges = effects, list(range(effects.shape[1]))
        self.clean, self.corrupted = effects.sum(1), np.zeros(len(effects))

    def without(self, edges: list[int]) -> np.ndarray:
        return self.clean - self.effects[:, edges].sum(1)


@pytest.mark.parametrize("choose", ["threshold", "greedy"])
@pytest.mark.parametrize("pairs, skewed", [(8, False), (16, True), (64, False)])
def test_intervals_cover_the_faithfulness_of_circuits_chosen_from_the_same_pairs(pairs, skewed, choose) -> None:
    """Faithfulness of a chosen circuit over all pairs that could be drawn lies in 95 % of its intervals."""
    mean = np.array([3.0, 2.0, 1.5, 1.2, 1.0, 0.8, 0.5, *[0.0] * 33])
    random, covered = np.random.default_rng(0), 0
    for seed in range(200):
        effects = random.normal(mean, 0.5, (pairs, len(mean)))
        effects *= random.lognormal(0, 0.6, (pairs, 1)) if skewed else 1.0
        runs = AdditiveRuns(effects)
        whole = runs.clean - runs.corrupted
        scores = np.abs(effects.mean(0)) / whole.mean()
        if choose == "greedy":
            kept, _ = measure.chosen_greedily(runs, np.argsort(-scores).tolist(), 0.9)  # type: ignore[arg-type]
        else:
            kept = scores >= 0.1
        found, low, high = shares(measure.faithful(runs, kept)[:, None], whole, seed)[0]  # type: ignore[arg-type]
        assert low <= found <= high
        covered += low <= mean[kept].sum() / mean.sum() <= high
    assert 182 <= covered <= 199  # 95 % of 200, less three standard deviations.


def test_pairs_are_refused_in_one_line(model: Model, tmp_path) -> None:
    for row, said in (
        ({"clean": [1, 2], "corrupted": [1, 2, 3]}, "pair 1 of the data: the clean text has 2 tokens"),
        ({"clean": [1, 2], "corrupted": [1, 2]}, "both texts have the same tokens"),
        ({"clean": [1, 7, 1], "corrupted": [1, 8, 1], "target": 3, "contrast": 3}, "both texts have the answer"),
        ({"clean": [1, 2]}, "no column 'corrupted'"),
    ):
        refuses(said, ssmscope.circuit, model, data=[row])
    refuses("unknown pairs 'recal'.*did you mean 'recall'", ssmscope.circuit, model, data="recal")


def test_spans_of_pairs_are_the_other_columns(tmp_path) -> None:
    path = tmp_path / "p.csv"
    path.write_text("clean,corrupted,target,subject\nAnn saw it,Bob saw it,x,Ann\n1 2,1 3,4,1\n", encoding="utf-8")
    found = read_pairs(path)
    assert (
        found.clean == ("Ann saw it", (1, 2)) and found.targets == ("x", 4) and found.spans == {"subject": ("Ann", "1")}
    )
    assert len(pairs_of("recall", 5)) == 5
