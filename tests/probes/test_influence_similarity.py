"""Similarity of tokens: every measure at every place against whole matrices and the model's own forward pass."""

import math

import numpy as np
import pytest
import torch
from examples import TEXTS, random_example
from loud import loud
from refusals import refuses
from ssmscope.core.model import Model
from ssmscope.interp.methods.gradients import keep_outputs
from ssmscope.probes.influence.similarity import blocks_of, mean_cosine, similarity_of, spread


def example(name: str) -> Model:
    return Model(loud(random_example(name)), name=name)


def pairwise(x: np.ndarray) -> float:
    """The mean of cos(x_i, x_j), i ≠ j, from the whole matrix."""
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    matrix = unit @ unit.T
    return float(matrix[~np.eye(len(x), dtype=bool)].mean())


class TestSimilarity:
    @pytest.mark.parametrize("name", ["mamba2", "rwkv", "diff-mamba", "groupmamba", "selective-ssm", "gla"])
    def test_every_place_the_slow_way(self, name):
        model = example(name)
        batch = model.encode(ids=TEXTS)
        found = similarity_of(model, batch, at_once=20)
        n = model.num_layers
        assert found.places == ("embeddings", *map(str, range(n)), "output")
        vectors: dict[tuple[str, int], list[np.ndarray]] = {}
        for text in TEXTS:  # each alone, through the model's own forward pass
            one = model.encode(ids=[text])
            blocks, outs = {}, {}
            with torch.no_grad(), keep_outputs(blocks_of(model.module), blocks), keep_outputs(model.mixers, outs):
                base = model.module.base_model
                run = base(input_ids=one.input_ids) if base is not model.module else None
                if run is None:
                    model.module(input_ids=one.input_ids)
            last = outs[n - 1] if run is None else run.last_hidden_state
            for at, x in enumerate([model.embed(one).detach(), *(blocks[i] for i in range(n)), last]):
                vectors.setdefault(("stream", at), []).append(x[0].double().numpy())
            for at in range(n):
                vectors.setdefault(("mixer", at), []).append(outs[at][0].double().numpy())
        for (part, at), texts in vectors.items():
            place = found.places[at] if part == "stream" else str(at)
            middle = np.concatenate(texts).mean(0)
            expected = {
                "cosine": np.mean([pairwise(x) for x in texts]),
                "centred": np.mean([pairwise(x - middle) for x in texts]),
                "spread": np.mean([np.linalg.norm(x - x.mean(0)) / np.linalg.norm(x) for x in texts]),
            }
            for measure, value in expected.items():
                assert found.estimate(place, measure, part).value == pytest.approx(value, abs=2e-5), (place, measure)

    def test_orthogonal_opposite_and_absent_vectors(self):
        x = torch.tensor([[[1.0, 0], [0, 2], [9, 9]], [[3.0, 0], [-1, 0], [0, 0]], [[0.0, 0], [0, 0], [1, 1]]])
        mask = torch.tensor([[True, True, False], [True] * 3, [True] * 3])
        cosine = mean_cosine(x, mask)
        assert cosine[:2].tolist() == [0, -1] and cosine[2].isnan()
        assert mean_cosine(x[:1, :1], mask[:1, :1]).isnan() and spread(x[:1, :1], mask[:1, :1]).isnan()
        torch.testing.assert_close(spread(x, mask)[0], torch.tensor(math.sqrt(2.5 / 5)))
        for measure in (mean_cosine, spread):  # whatever the vectors' size
            torch.testing.assert_close(measure(x / 64, mask), measure(x, mask), equal_nan=True)
        assert spread(0 * x, mask).isnan().all() and mean_cosine(0 * x, mask).isnan().all()

    def test_intervals_are_over_texts(self):
        model = example("mamba")
        one = similarity_of(model, model.encode(ids=TEXTS[:1]), at_once=100)
        assert math.isnan(one.estimate(0).low) and not math.isnan(one.estimate(0).value)
        found = similarity_of(model, model.encode(ids=TEXTS), at_once=100).estimate("0", "spread")
        assert found.low < found.value < found.high

    def test_what_is_not_there_is_refused(self):
        found = similarity_of(example("mamba"), example("mamba").encode(ids=TEXTS), at_once=100)
        refuses("no measure 'cosin'; allowed are .*; did you mean 'cosine'", found.estimate, 0, "cosin")
        refuses("no place 'embeddings'; allowed are 0, 1", found.estimate, "embeddings", part="mixer")
