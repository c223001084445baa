"""Compiled models answer every input, by the parts that they name and by no other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exhaustive import ALL

from ssmscope import load
from ssmscope.core.edits import recorded, replaced
from ssmscope.core.roads import Edge, Roads, replacing
from ssmscope.errors import InputError
from ssmscope.zoo.compiled import FAMILIES, TASKS, compiled


def accuracy(model, ids: np.ndarray, answers: np.ndarray, edits=()) -> float:
    logits = model.run(model.encode(ids=ids.tolist()), last_only=True, edits=edits).logits
    return float((logits.argmax(-1) == torch.from_numpy(answers)).double().mean())


def cases(*decoys: bool) -> list:
    return [pytest.param(t, f, d, id=f"{t}-{f}-{d}") for t in TASKS for f in FAMILIES for d in decoys]


@pytest.mark.parametrize(("task", "family", "decoy"), cases(False))
def test_every_input_is_answered(task: str, family: str, decoy: bool) -> None:
    found = compiled(task, family, decoy=decoy)
    data = found.data(10_000 if ALL else 1000, seed=1)
    assert accuracy(load(found.module), data.ids, data.targets[:, -1]) == 1.0


@pytest.mark.parametrize(("task", "family", "decoy"), cases(True))
def test_true_parts_are_needed_and_decoys_are_not(task: str, family: str, decoy: bool) -> None:
    found = compiled(task, family, decoy=decoy)
    model, kept = load(found.module), {}
    clean, corrupted, answers, _ = found.pairs(400)
    with torch.no_grad():
        for name in (*found.nodes, *found.decoys):
            layer = int(name.split()[1])
            from_other = _outputs(model, corrupted)[layer]
            kept[name] = accuracy(model, clean, answers, [replaced("output", from_other, layers=[layer])])
    assert {kept[name] for name in found.decoys} == {1.0}
    assert max(kept[name] for name in found.nodes) < 0.4, kept


def _outputs(model, ids: np.ndarray) -> dict[int, torch.Tensor]:
    kept: dict[int, torch.Tensor] = {}
    model.run(model.encode(ids=ids.tolist()), edits=recorded("output", kept))
    return kept


@pytest.mark.parametrize(("task", "family", "decoy"), cases(True))
def test_true_edges_are_needed_and_no_others(task: str, family: str, decoy: bool) -> None:
    found = compiled(task, family, decoy=decoy)
    model, true = load(found.module), {Edge(*edge) for edge in found.edges}
    clean, corrupted, right, _ = found.pairs(60)
    batches = [model.encode(ids=ids.tolist()) for ids in (clean, corrupted)]
    with torch.no_grad():
        roads = Roads(model, batches[0])
        others = roads.run(batches[1]).outputs
        kept = {}
        for edge in roads.edges():
            logits = roads.run(batches[0], replacing(others, [edge])).logits
            kept[edge] = float((logits.argmax(-1) == torch.from_numpy(right)).double().mean())
    assert true <= set(kept)
    assert {kept[edge] for edge in set(kept) - true} == {1.0}
    assert max(kept[edge] for edge in true) < 0.75, kept


def test_unknown_names_are_refused_in_one_line() -> None:
    with pytest.raises(InputError, match="unknown compiled task 'recal'.*did you mean 'recall'"):
        compiled("recal")
    with pytest.raises(InputError, match="unknown family 'mamba-2'; choose one of mamba, mamba2, gated-delta"):
        compiled("recall", "mamba-2")
