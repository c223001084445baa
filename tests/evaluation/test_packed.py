"""Packed runs: that they give what whole rows give, which models take them, and how rows are cut into them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from evaluation.slow import ONE, TEXTS, language_model
from torch import Tensor, nn

from ssmscope.edits import Edit, edited
from ssmscope.evaluation import Evaluator, packed
from ssmscope.evaluation.forking import Rows, as_bytes, ways_to_fork, whole
from ssmscope.evaluation.packed import bands, packs, parts, plain, planned, run_packed
from ssmscope.evaluation.running import run_batch
from ssmscope.models import mamba
from ssmscope.scans import native, passes_native

PACKED = ("mamba", "mamba2", "gfssm")


def random_rows(seed: int = 0, count: int = 24) -> Rows:
    """Rows of few tokens, which share beginnings of every length."""
    draw = np.random.default_rng(seed)
    return Rows.of(sorted(set(as_bytes([draw.integers(5, 8, draw.integers(1, 14)).tolist() for _ in range(count)]))))


def logits_of(run, rows: Rows) -> Tensor:
    found: dict[int, Tensor] = {}

    def read(ends, logits, _):
        assert found.keys().isdisjoint(ends.tolist())
        found.update(zip(ends.tolist(), logits))

    run(read)
    return torch.stack([found[row] for row in range(len(rows))])


@pytest.mark.parametrize(
    ("name", "dtype", "apart"),
    [(name, torch.float64, 1e-6) for name in PACKED]  # whose norms round to float32 in transformers
    + [("mamba", torch.float32, 1e-5)],  # over the tree at once
)
@pytest.mark.parametrize("padding", [0, 64])
def test_what_it_gives_is_what_whole_rows_give(monkeypatch, name, dtype, apart, padding):
    monkeypatch.setattr(packed, "PADDING", padding)
    trees: list[Tensor | None] = []
    over_tree = mamba.over_tree

    def noted(*given):
        trees.append(over_tree(*given))
        return trees[-1]

    monkeypatch.setattr(mamba, "over_tree", noted)
    model, rows = language_model(name, dtype), random_rows()
    every = np.arange(len(rows))
    expected = run_batch(model, *rows.padded(every, np.zeros_like(every), rows.lengths)).logits
    (finest,) = ways_to_fork(rows, (0,))
    assert finest.level.max() > 3 and finest.tokens < whole(rows).tokens / 1.2
    for pieces in (finest, whole(rows)):
        found = logits_of(lambda read: run_packed(model, rows, pieces, read), rows)  # noqa: B023
        torch.testing.assert_close(found, expected, rtol=apart, atol=apart)
    found = logits_of(lambda read: packed.run_rows(model, rows, read, tokens_at_once=6), rows)
    torch.testing.assert_close(found, expected, rtol=apart, atol=apart)
    at_once = native.available() and passes_native.available() and dtype == torch.float32
    assert bool(trees) == (name == "mamba") and all((y is not None) == at_once for y in trees)


def test_bands_have_every_token_once():
    rows = random_rows(1)
    (pieces,) = ways_to_fork(rows, (0,))
    at, seen = 0, []
    for band, ids in bands(rows, pieces):
        assert band.tokens == slice(at, at + len(ids)) and band.above is None or (pieces.above[band.pieces] >= 0).all()
        tokens = torch.from_numpy(ids).double().view(1, -1, 1)
        side = band.rows(torch.cat([torch.full((1, at, 1), torch.nan), tokens], 1))
        assert side.shape[:2] == band.shape and band.flat(side).tolist() == tokens[0].tolist()
        at += len(ids)
        seen += band.pieces.tolist()
    assert at == pieces.tokens and sorted(seen) == list(range(len(pieces.row)))


def test_rows_are_cut_evenly_and_in_their_order():
    rows = random_rows(2, 200)
    distinct = int((rows.lengths - rows.shared()).sum())
    for most in (1, 40, distinct - 1, distinct, 10_000):
        cut = list(parts(rows, most))
        assert [first for first, _ in cut] == np.cumsum([0, *(len(part) for _, part in cut)])[:-1].tolist()
        assert np.concatenate([part.ids for _, part in cut]).tolist() == rows.ids.tolist()
        assert len(cut) == min(len(rows), -(-distinct // most)) or most == 1
        assert max((part.lengths - part.shared()).sum() for _, part in cut) < distinct / len(cut) + 2 * 14


def test_forks_are_worth_their_bands(monkeypatch):
    shared = list(range(300, 340))
    rows = Rows.of(sorted(as_bytes([[*shared, end] for end in range(6)])))
    assert planned(rows).tokens == 40 + 6
    monkeypatch.setattr(packed, "BAND", 400)
    assert planned(rows).tokens == whole(rows).tokens


def test_which_models_run_packed():
    assert all(packs(language_model(name)) for name in PACKED)
    assert not any(packs(language_model(name)) for name in ("rwkv", "groupmamba", "bamba", "diff-mamba"))


class Placed(nn.Embedding):
    """Embeddings that depend on where a token stands."""

    by = 0.0

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.by * torch.arange(ids.shape[1]).view(1, -1, 1)


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_a_model_that_knows_places_does_not(name):
    model = language_model(name)
    weight = model.module.base_model.embeddings.weight
    placed = model.module.base_model.embeddings = Placed(*weight.shape, _weight=weight)
    assert packs(model)
    placed.by = 0.3
    assert plain(model) and not packs(model)


def test_what_others_have_put_on_a_model_is_run():
    model = language_model("mamba2")
    evaluator = Evaluator(model, words=ONE)
    expected = evaluator.scores(TEXTS[:4])
    part = model.mixers[0].in_proj
    hook = part.register_forward_hook(lambda module, args, output: output)
    assert not plain(model)
    hook.remove()
    with edited(model, Edit("doubled", "output", lambda t, site: 2 * t)):
        assert not plain(model)
        changed = evaluator.scores(TEXTS[:4])
    assert plain(model) and np.abs(changed - expected).max() > 1e-3
    assert "forward" not in vars(part) and (evaluator.scores(TEXTS[:4]) == expected).all()
