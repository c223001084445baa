"""Compiled models answer every input, by the parts that they name and by no other."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from exhaustive import ALL
from refusals import refuses
import ssmscope
from ssmscope.core.edits import recorded, replaced
from ssmscope.zoo.compiled import FAMILIES, TASKS, compiled, pairs_of


def accuracy(model, ids: np.ndarray, answers: np.ndarray, edits=()) -> float:
    logits = model.run(model.encode(ids=ids.tolist()), last_only=True, edits=edits).logits
    return float((logits.argmax(-1) == torch.from_numpy(answers)).double().mean())


def cases(*decoys: bool) -> list:
    return [pytest.param(t, f, d, id=f"{t}-{f}-{d}") for t in TASKS for f in FAMILIES for d in decoys]


@pytest.mark.parametrize(("task", "family", "decoy"), cases(False))
def test_every_input_is_answered(task: str, family: str, decoy: bool) -> None:
    found = compiled(task, family, decoy=decoy)
    data = found.data(10_000 if ALL else 1000, seed=1)
    assert accuracy(ssmscope.load(found.module), data.ids, data.targets[:, -1]) == 1.0
    places = [found.positions(ids) for ids in data.ids[:100].tolist()]
    assert [ids[values[-1]] for ids, (values, _) in zip(data.ids, places)] == data.targets[:100, -1].tolist()
    assert all(ids[keys[0]] == ids[-1] for ids, (_, keys) in zip(data.ids, places) if keys)


@pytest.mark.parametrize(("task", "family", "decoy"), cases(True))
def test_true_parts_are_needed_and_decoys_are_not(task: str, family: str, decoy: bool) -> None:
    found = compiled(task, family, decoy=decoy)
    model, kept = ssmscope.load(found.module), {}
    pairs = pairs_of(task, 120)
    clean, corrupted, answers = map(np.array, (pairs.clean, pairs.corrupted, pairs.targets))
    with torch.no_grad():
        others = _outputs(model, corrupted)
        for name in (*found.nodes, *found.decoys):
            layer = int(name.split()[1])
            kept[name] = accuracy(model, clean, answers, [replaced("output", others[layer], layers=[layer])])
    assert {kept[name] for name in found.decoys} == {1.0}
    assert max(kept[name] for name in found.nodes) < 0.4, kept


def _outputs(model, ids: np.ndarray) -> dict[int, torch.Tensor]:
    kept: dict[int, torch.Tensor] = {}
    model.run(model.encode(ids=ids.tolist()), edits=recorded("output", kept))
    return kept


@pytest.mark.parametrize(("task", "family", "decoy"), cases(*[False] * ALL, True))
def test_exact_scores_tell_all_true_edges_from_the_others(task: str, family: str, decoy: bool) -> None:
    """An AUROC of 1, by a wide margin: a decoy's keys change the norm of the stream, and so the answer by little."""
    made = compiled(task, family, decoy=decoy)
    found = ssmscope.circuit(ssmscope.load(made.module), data=pairs_of(task, 24), random=0)
    sizes = dict(zip(found.edges, np.abs(found.scores[:, 0])))
    assert set(made.edges) <= set(sizes)
    assert min(sizes[edge] for edge in made.edges) > 3 * max(sizes[edge] for edge in sizes if edge not in made.edges)


def test_the_how_to_adds_a_task() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-compiled-model.md"
    code, there = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL), {}
    exec(code[0], there)
    made, found, data = there["made"], there["found"], there["made"].data(1000)
    assert accuracy(ssmscope.load(made.module), data.ids, data.targets[:, -1]) == 1.0
    assert made.decoys == ("mixer 0",) and {*made.edges} == {*found.circuit}


def test_unknown_names_are_refused_in_one_line() -> None:
    refuses("unknown compiled task 'recal'.*did you mean 'recall'", compiled, "recal")
    refuses("unknown family 'mamba-2'; choose one of mamba, mamba2, gated-delta", compiled, "recall", "mamba-2")
