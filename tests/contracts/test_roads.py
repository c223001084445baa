"""Edges by road in every architecture: a run with one summand of one entrance replaced, against runs made by hand."""

from contextlib import nullcontext
from dataclasses import replace
from random import Random

import pytest
import torch
from exhaustive import ALL, half
from ssmscope.core.edits import Edit
from ssmscope.core.intercept import observe
from ssmscope.core.model import Model
from ssmscope.core.road_terms import TERMS
from ssmscope.core.roads import LOGITS, PROJECTIONS, Edge, Part, Roads, replacing
from ssmscope.errors import InputError, Unanswerable

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
    with (
        observe(before=before, after=after),
        nullcontext() if edge.sender in own else with_block_shifted(roads, part, change),
    ):
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
        whole_parts = {}  # Each is tried once, by any of its edges.
        named = sorted({edge.road for edge in edges} - {"rest"})
        for road in half(named, architecture) or named:
            edge = random.choice([each for each in edges if each.road == road])
            part = next(each for each in roads.parts if each.name == edge.receiver)
            change = others.outputs[edge.sender] - base.outputs[edge.sender]
            for way in (road, "")[: 1 + (whole_parts.setdefault(part.name, road) == road)]:
                cut = [edge] if way else [edge._replace(road=each) for each in part.roads]
                found = roads.run(batch, replacing(others.outputs, cut)).logits
                expected = by_hand(model, batch, roads, part, edge._replace(road=way), change)
                assert float((found - expected).abs().max()) <= 1e-6 * size, (edge, way)
                assert not torch.equal(found, base.logits), (edge, way)


def with_block_shifted(roads: Roads, part: Part, change: torch.Tensor):
    """A hook by which the part's block reads a shifted stream."""

    def shifted(block, args, kwargs):
        if args:
            return (args[0] + change, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + change}

    return observe(before=[(roads.blocks[part.block], shifted)])


def kept_terms(model: Model, batch, layer: int, edits=()):
    kept = []
    model.run(batch, edits=[*edits, Edit("kept", "terms", lambda terms, site: kept.append(terms) or terms, (layer,))])
    return kept[0]


def terms_in(terms):
    """The names and values of every recurrence's terms."""
    return [{n: v for n in TERMS if (v := getattr(r, n, None)) is not None} for r in terms.recurrences]


def tap_by_hand(model: Model, batch, roads: Roads, part: Part, lag: int, change: torch.Tensor) -> torch.Tensor:
    """The logits where each position t, one after the other, has its terms from a run in which the convolution reads
    the token t − lag of the shifted stream."""
    layer = int(part.name.split()[1])
    read: dict[int, torch.Tensor] = {}
    keep = Edit("kept", "convolution", lambda value, site: read.setdefault(site.part, value), (layer,))
    with with_block_shifted(roads, part, change):
        model.run(batch, edits=keep)
    own = kept_terms(model, batch, layer)
    values = [{name: value.clone() for name, value in each.items()} for each in terms_in(own)]
    for place in range(lag, batch.input_ids.shape[1]):

        def put(value, site, at=place - lag):
            value = value.clone()
            value[:, at] = read[site.part][:, at]
            return value

        found = terms_in(kept_terms(model, batch, layer, [Edit("put", "convolution", put, (layer,))]))
        for into, each in zip(values, found):
            for name in into:
                into[name][:, place] = each[name][:, place]
    changed = tuple(replace(r, **each) for r, each in zip(own.recurrences, values))
    edit = Edit("put", "terms", lambda terms, site: replace(terms, recurrences=changed), (layer,))
    return model.run(batch, last_only=True, edits=edit).logits


def head_by_hand(model: Model, batch, roads: Roads, part: Part, edge: Edge, change: torch.Tensor) -> torch.Tensor:
    """The logits where one head has a term, or its channels of the gate, of the shifted stream."""
    layer, head = int(part.name.split()[1]), int(edge.receiver.split()[-1])
    own = kept_terms(model, batch, layer)
    with with_block_shifted(roads, part, change):
        other = kept_terms(model, batch, layer)
    z, recurrences = own.z, []
    if edge.road == "gate":
        z = z.reshape(*z.shape[:2], part.heads, -1).clone()
        z[:, :, head] = other.z.reshape(z.shape)[:, :, head]
        z = z.reshape(own.z.shape)
    for recurrence, mine, theirs in zip(own.recurrences, terms_in(own), terms_in(other)):
        new = {}
        for name, value in mine.items():
            repeats = part.heads // value.shape[2]
            new[name] = value.repeat_interleave(repeats, 2)
            if TERMS[name] == edge.road:
                new[name][:, :, head] = theirs[name].repeat_interleave(repeats, 2)[:, :, head]
        recurrences.append(replace(recurrence, **new))
    changed = replace(own, recurrences=tuple(recurrences), z=z)
    return model.run(batch, last_only=True, edits=Edit("put", "terms", lambda *_: changed, (layer,))).logits


def written_by_head(model: Model, batch, part: Part, head: int) -> torch.Tensor:
    """The head's values through its columns in the mixer's last linear map."""
    read: dict[str, torch.Tensor] = {}
    with observe(before=[(part.last, lambda _, args, kwargs: read.update(u=args[0]))]):
        model.run(batch)
    width = read["u"].shape[-1] // part.heads
    own = slice(head * width, (head + 1) * width)
    return read["u"][..., own] @ part.last.weight[:, own].mT


@pytest.mark.parametrize("kind", ["taps", "heads"])
def test_taps_and_heads_are_those_of_runs_by_hand(model: Model, kind: str, request) -> None:
    architecture = request.node.callspec.params["module"]
    if model.channels is not None or architecture.startswith(REFUSED):
        pytest.skip("has no roads")
    # All tokens differ: the last layer of a model of short convolutions reads but the last few.
    ids = [row[:8] for row in IDS]
    batch, other = model.encode(ids=ids), model.encode(ids=[[each + 1 for each in row] for row in ids])
    try:
        roads = Roads(model, batch, **{kind: True})
    except (InputError, Unanswerable) as error:
        assert "heads of" in str(error) and kind == "heads"
        return
    random = Random(architecture)
    with torch.no_grad():
        base, others = roads.run(batch), roads.run(other)
        size = float(base.logits.abs().max())
        whole = roads.run(batch, replacing(others.outputs, roads.edges())).logits
        assert float((whole - others.logits).abs().max()) <= 1e-6 * size + 1e-6
        first = next(part for part in roads.parts if part.name.startswith("mixer"))
        last = [part for part in roads.parts if part.name.startswith("mixer")][-1]
        wanted = [edge for edge in roads.edges() if edge.receiver in last.nodes and edge.road != "rest"]
        if kind == "taps":
            wanted = [edge for edge in wanted if edge.road.startswith("tap ")]
        wanted = [edge for edge in wanted if edge.sender in (*first.nodes, "embedding")]
        named = sorted({edge.road for edge in wanted})
        if not ALL:  # The second and the last tap, half of the ways into a head.
            named = named[1 :: max(1, len(named) - 2)] if kind == "taps" else half(named, architecture) or named
        for road in named:
            # An earlier block's output, if there is one.
            edges = [edge for edge in wanted if edge.road == road]
            edge = random.choice(
                [each for each in edges if first.block < last.block and each.sender != "embedding"] or edges
            )
            if edge.sender != "embedding" and kind == "heads":
                head = int(edge.sender.split()[-1])
                ends = [written_by_head(model, each, first, head) for each in (batch, other)]
                change = ends[1] - ends[0]
            else:
                change = others.outputs[edge.sender] - base.outputs[edge.sender]
            found = roads.run(batch, replacing(others.outputs, [edge])).logits
            if kind == "taps":
                expected = tap_by_hand(model, batch, roads, last, int(road.split()[1]), change)
            else:
                expected = head_by_hand(model, batch, roads, last, edge, change)
            assert float((found - expected).abs().max()) <= 1e-6 * size, edge
            assert not torch.equal(found, base.logits), edge


REFUSED = (
    "groupmamba", "minimax", "olmo_hybrid", "plamo2", "qwen4_exp", "rwkv", "selective-ssm", "zamba", "mambavision",
    "lfm3", "glm5_next",
)  # fmt: skip
"""Architectures whose blocks do more than add up their parts."""
