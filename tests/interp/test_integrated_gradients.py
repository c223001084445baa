"""Integrated Gradients: converged scores are right token by token; baselines; and reports of the cost."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refuses
import ssmscope
from ssmscope.errors import InputError
from ssmscope.interp.baselines import baseline_embeddings
from ssmscope.interp.explain import explain
from ssmscope.interp.explain.views import doubt
from ssmscope.interp.methods import integrated
from ssmscope.interp.methods.integrated import ig
from ssmscope.interp.objective import objective

TEXTS = ["A gripping film.", "Dull, and far too long.", "There is no pleasure in watching a child suffer."]
demo = pytest.fixture(scope="module")(lambda: ssmscope.load("demo/snli-baleen-b"))
found = pytest.fixture(scope="module")(lambda demo: objective(demo, demo.encode(TEXTS)))


@pytest.fixture(scope="module")
def twin(found):
    """The same in float64."""
    model = ssmscope.load("demo/snli-baleen-b")
    model.module.double()
    return replace(found, model=model)


def truth(twin, baseline: str) -> list[np.ndarray]:
    """Compute scores in float64 by Gauss–Legendre on pieces of the path, halved until that changes no token's score on
    any of them by 1e-5; special tokens stay."""
    nodes, weights = np.polynomial.legendre.leggauss(10)
    end = twin.embeddings()
    start = baseline_embeddings(twin, baseline)
    scores = []
    for text, words in enumerate(twin.batch.words):
        e, b = end[text, : len(words)], start[text, : len(words)].clone()
        b[[word is None for word in words]] = e[[word is None for word in words]]

        def integrals(pieces: np.ndarray, e=e, b=b, text=text) -> np.ndarray:
            """(pieces, tokens) of pieces (first, last)."""
            first, last = pieces[:, :1], pieces[:, 1:]
            places = torch.from_numpy((first + last + (last - first) * nodes) / 2).view(-1, 1, 1)
            slopes = (twin.gradient(b + places * (e - b), [text] * len(places)) * (e - b)).sum(-1).numpy()
            return (last - first) / 2 * np.einsum("n,pnt->pt", weights, slopes.reshape(len(pieces), len(nodes), -1))

        pieces = np.stack([np.arange(8), np.arange(1, 9)], 1) / 8
        whole, total = integrals(pieces), np.zeros(len(words))
        while len(pieces):
            middle = pieces.mean(1)
            halves = np.stack([np.stack([pieces[:, 0], middle], 1), np.stack([middle, pieces[:, 1]], 1)], 1)
            fine = integrals(halves.reshape(-1, 2)).reshape(*halves.shape[:2], -1)
            good = np.abs(fine.sum(1) - whole).max(1) < 1e-5
            total += fine[good].sum((0, 1))
            pieces, whole = halves[~good].reshape(-1, 2), fine[~good].reshape(-1, len(words))
        scores.append(total)
    return scores


@pytest.mark.parametrize("baseline", ["neutral", "mean"])
def test_what_is_called_converged_is_right_token_by_token(found, twin, baseline):
    """The sum of the scores says nothing of this: on the path from the mean it is right where tokens are not."""
    result = ig(found, baseline=baseline)
    assert result.converged.all() and (result.error <= 0.01).all() and (result.steps <= 1500).all()
    sums = []
    for text, expected in enumerate(truth(twin, baseline)):
        own, largest = result.scores[text, : len(expected)].numpy(), np.abs(expected).max()
        assert np.abs(own - expected).max() <= 0.01 * largest
        apart = expected[:, None] - expected[None, :] > 0.01 * largest
        assert (own[:, None] > own[None, :])[apart].all()
        coarse = ig(found.rows([text]), baseline=baseline, steps=24, cap=24)
        off = np.abs(coarse.scores[0].numpy() - expected).max() / largest
        sums.append((float(coarse.delta[0]), float(off)))
        assert not coarse.converged.any()
    if baseline == "mean":
        assert any(off > 2 * delta and off > 0.01 for delta, off in sums)


def test_special_tokens_keep_their_own_embedding(found):
    kept, moved = ig(found), ig(found, special=True)
    last = [length - 1 for length in found.lengths]
    assert [found.batch.words[text][place] for text, place in enumerate(last)] == [None] * 3
    rows = list(range(3))
    assert not kept.scores[rows, last].any() and moved.scores[rows, last].all()
    start = baseline_embeddings(found)
    for result, begun in ((moved, start), (kept, start.clone())):
        if result is kept:
            begun[rows, last] = found.embeddings()[rows, last]
        gap = found.values() - found.values(begun)
        torch.testing.assert_close(result.scores.sum(1), gap, rtol=0.02, atol=0.01)


def test_a_result_says_what_it_compares_with(demo):
    result = explain(demo, TEXTS[:1], methods=["ig"], option={"ig": {"baseline": "mean"}})
    each = result.attribution()
    assert each.baseline == "the mean embedding" and "singular" in each.note and each.error <= 0.01
    shown = " ".join(str(result).split())
    assert "ig compares with the mean embedding; its baseline is near the point" in shown
    assert "ig compares with the mean embedding" in result.to_html()
    few = explain(demo, TEXTS[2:], methods=["ig"], option={"ig": {"baseline": "mean", "cap": 40}})
    assert doubt(few.attribution()).startswith("not converged, ±78.") and "not converged" in str(few)
    assert "of the largest score" in few.to_html()
    none = explain(demo, TEXTS[:1], methods=["ig"], option={"ig": {"cap": 12}})
    assert doubt(none.attribution()) == "convergence not checked" and "convergence not" in str(none)
    assert not none.attribution().note


def test_explain_says_it_on_stderr(demo, monkeypatch, capsys):
    monkeypatch.setattr("ssmscope.interp.objective.MIN_REPORTED_SECONDS", 0.0)
    monkeypatch.setattr("ssmscope.interp.objective.WARMUP_SECONDS", 0.0)
    explain(demo, TEXTS[:2], methods=["ig"])
    answer = capsys.readouterr()
    assert "ig: 2 texts take 72 to 3,000 gradients, about" in answer.err and not answer.out


def test_in_half_precision_it_goes_to_its_cap_and_says_the_error():
    errors, scores = [], []
    for dtype in ("float32", "bfloat16"):
        model = ssmscope.load("demo/sst2-mamba", dtype=dtype)
        result = ig(objective(model, model.encode(TEXTS[:1]), target=1), tolerance=1e-4, cap=250)
        errors.append(float(result.error[0]))
        scores.append(result.scores[0].double())
        assert bool(result.converged[0]) == (dtype == "float32")
    apart = (scores[1] - scores[0]).abs().max() / scores[0].abs().max()
    assert errors[0] < 1e-4 < errors[1] and apart < errors[1]


def test_places_on_a_path_are_not_rounded_to_half_precision():
    """0.503 in bfloat16 is 0.5: the quadrature would be at other places than its nodes."""
    start, end = torch.zeros(1, 24, 1).bfloat16(), torch.linspace(0.5, 1.5, 24).view(1, 24, 1).bfloat16()
    path = integrated._Path(SimpleNamespace(lengths=[24], meter=None), start, end, 12)
    assert torch.equal(path.points([0], [0.503]), (0.503 * end.float()).bfloat16())
    assert path.points([0], [0.503]).ne(path.points([0], [0.5])).any()


def test_steps_of_explain_are_those_of_integrated_gradients(demo):
    found = explain(demo, TEXTS[:1], methods="ig,lrp", steps=5, option={"ig": {"baseline": "mean"}})
    expected = ig(objective(demo, demo.encode(TEXTS[:1])), fixed=5, baseline="mean")
    np.testing.assert_allclose(found[0].attributions[0].scores, expected.scores[0].numpy(), atol=1e-6)
    assert found.summary()["steps"].tolist()[0] == 15 and "5 fixed steps" in found[0].attributions[0].note
    refuses("which is not among the methods; name ig$", explain, demo, TEXTS[:1], steps=5)
    with pytest.raises(InputError, match="are one thing; give one of them$"):
        explain(demo, TEXTS[:1], methods="ig", steps=5, option={"ig": {"fixed": 5}})
    refuses("^fixed is 0", ig, objective(demo, demo.encode(TEXTS[:1])), fixed=0)
