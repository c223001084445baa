"""Edges by road in every architecture: a run with one summand of one entrance replaced, against runs made by hand."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

from ssmscope.core.edits import Edit
from ssmscope.core.intercept import observe
from ssmscope.core.model import Model
from ssmscope.core.roads import LOGITS, PROJECTIONS, TERMS, Edge, Part, Roads, replacing
from ssmscope.errors import Unanswerable

IDS = [[5, 17, 3, 9, 22, 1, 4, 60, 61, 62, 5], [7, 8, 9, 2, 2, 40, 1]]
OTHER_IDS = [[50, 7, 31, 9, 22, 1, 4, 60, 61, 62, 6], [71, 18, 9, 2, 2, 40, 3]]


def by_hand(model: Model, batch, roads: Roads, part: Part, edge: Edge, change: torch.Tensor) -> torch.Tensor:
    """The logits with one entrance of a part taken from a run in which its block reads a shifted stream, or an earlier
    part of the block gives a shifted output, while its other parts give what they do; without a road, its input."""
    kept, raw, terms = {}, {}, {name for name, each in TERMS.items() if each == edge.road}
    own = {each.name: each.module for each in roads.parts if each.block == part.block and each is not part}
    place = getattr(part.module, PROJECTIONS.get(edge.road, ""), part.module)
    with observe(after=[(module, lambda _, output, at=at: raw.update({at: output})) for at, module in own.items()]):
        model.run(batch)
    if edge.sender in own:
        given = raw[edge.sender]
        raw[edge.sender] = (given[0] + change, *given[1:]) if isinstance(given, tuple) else given + change

    def shifted(block, args, kwargs):
        if edge.sender in own:
            return None
        if args:
            return (args[0] + change, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + change}

    def keep(layer, site):
        return kept.setdefault("terms", layer)

    def put(layer, site):
        if edge.road == "gate":
            return replace(layer, z=kept["terms"].z)
        taken = [
            {name: getattr(other, name) for name in terms if getattr(mine, name, None) is not None}
            for mine, other in zip(layer.recurrences, kept["terms"].recurrences)
        ]
        swapped = (replace(mine, **each) for mine, each in zip(layer.recurrences, taken))
        return replace(layer, recurrences=tuple(swapped))

    layers = (int(part.name.split()[1]),) if part.name.startswith("mixer") else (0,)
    before = [(part.module, lambda _, args, kwargs: kept.update(input=(args, kwargs)))]
    after = [(module, lambda _, output, at=at: raw[at]) for at, module in own.items()]
    after += [(place, lambda _, output: kept.update(output=output))]
    with observe(before=[(roads.blocks[part.block], shifted), *before], after=after):
        model.run(batch, edits=Edit("kept", "terms", keep, layers))
    if edge.road in PROJECTIONS:
        with observe(after=[(place, lambda *_: kept["output"])]):
            return model.run(batch, last_only=True).logits
    if edge.road:
        return model.run(batch, last_only=True, edits=Edit("put", "terms", put, layers)).logits
    with observe(before=[(part.module, lambda *_: kept["input"])]):
        return model.run(batch, last_only=True).logits


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
    random = Random(architecture)
    with torch.no_grad():
        base, others = roads.run(batch), roads.run(other)
        size = float(base.logits.abs().max())
        whole = roads.run(batch, replacing(others.outputs, roads.edges())).logits
        assert float((whole - others.logits).abs().max()) <= 1e-6 * size + 1e-6
        assert torch.equal(roads.run(batch).logits, model.run(batch, last_only=True).logits)
        edges = [edge for edge in roads.edges() if edge.receiver != LOGITS]
        for road in sorted({edge.road for edge in edges} - {"rest"}):
            edge = random.choice([each for each in edges if each.road == road])
            part = next(each for each in roads.parts if each.name == edge.receiver)
            change = others.outputs[edge.sender] - base.outputs[edge.sender]
            for road in (edge.road, ""):
                cut = [edge] if road else [edge._replace(road=each) for each in part.roads]
                found = roads.run(batch, replacing(others.outputs, cut)).logits
                expected = by_hand(model, batch, roads, part, edge._replace(road=road), change)
                assert float((found - expected).abs().max()) <= 1e-6 * size, (edge, road)
                assert not torch.equal(found, base.logits), (edge, road)


REFUSED = tuple("groupmamba minimax olmo_hybrid plamo2 qwen4_exp rwkv selective-ssm zamba mambavision".split())
"""Architectures whose blocks do more than add up their parts."""
