"""Edges by road in every architecture: a run with one summand of one entrance replaced, against runs made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ssmscope.core.edits import Edit, blocks_of
from ssmscope.core.intercept import observe
from ssmscope.core.model import Model
from ssmscope.core.roads import EMBEDDING, TERMS, Edge, Roads, replacing
from ssmscope.errors import Unanswerable

IDS = [[5, 17, 3, 9, 22, 1, 4, 60, 61, 62, 5], [7, 8, 9, 2, 2, 40, 1]]
OTHER_IDS = [[50, 7, 31, 9, 22, 1, 4, 60, 61, 62, 5], [71, 18, 9, 2, 2, 40, 1]]


def by_hand(model: Model, batch, change: torch.Tensor, layer: int, road: str) -> torch.Tensor:
    """The logits with the terms of one road taken from a run in which the whole block reads a shifted stream."""
    kept = {}

    def keep(terms, site):
        kept["terms"] = terms
        return terms

    def shifted(block, args, kwargs):
        if args:
            return (args[0] + change, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + change}

    with observe(before=[(blocks_of(model.module)[layer], shifted)]):
        model.run(batch, edits=Edit("kept", "terms", keep, (layer,)))
    names = [name for name, each in TERMS.items() if each == road]

    def put(terms, site):
        if road == "gate":
            return replace(terms, z=kept["terms"].z)
        own = []
        for mine, other in zip(terms.recurrences, kept["terms"].recurrences):
            taken = {name: getattr(other, name) for name in names if getattr(mine, name, None) is not None}
            own.append(replace(mine, **taken))
        return replace(terms, recurrences=tuple(own))

    return model.run(batch, last_only=True, edits=Edit("put", "terms", put, (layer,))).logits


def test_edges_are_runs_with_one_entrance_replaced(model: Model, request) -> None:
    architecture = request.node.callspec.params["module"]
    if model.channels is not None:
        pytest.skip("reads no tokens")
    batch, other = model.encode(ids=IDS), model.encode(ids=OTHER_IDS)
    try:
        roads = Roads(model, batch)
    except Unanswerable:
        assert architecture.startswith(REFUSED), architecture
        return
    with torch.no_grad():
        base, others = roads.run(batch), roads.run(other)
        size = float(base.logits.abs().max())
        whole = roads.run(batch, replacing(others.outputs, roads.edges())).logits
        assert float((whole - others.logits).abs().max()) <= 1e-6 * size + 1e-6
        assert torch.equal(roads.run(batch).logits, model.run(batch, last_only=True).logits)
        change = others.outputs[EMBEDDING] - base.outputs[EMBEDDING]
        for part in roads.parts:
            if not part.name.startswith("mixer"):
                continue
            layer = int(part.name.split()[1])
            for road in set(part.roads) - {"rest"}:
                found = roads.run(batch, replacing(others.outputs, [Edge(EMBEDDING, part.name, road)])).logits
                expected = by_hand(model, batch, change, layer, road)
                assert float((found - expected).abs().max()) <= 1e-6 * size, (part.name, road)
                assert not torch.equal(found, base.logits), (part.name, road)
            break


REFUSED = (
    "groupmamba",
    "minimax",
    "olmo_hybrid",
    "plamo2",
    "qwen4_exp",
    "rwkv",
    "selective-ssm",
    "zamba",
    "mambavision",
)
"""Architectures whose blocks do more than add up their parts."""
