"""Knockout by windows, parts and heads: cut edges, refusals, and the finding where the answer is known."""

import numpy as np
import pytest
import torch
from examples import random_example, relative
from loud import loud
from planned import tiny_model
from refusals import refuses
import ssmscope
from ssmscope.api.results import Result
from ssmscope.core.cuts import cut_attention, cut_convolution, cut_edges
from ssmscope.core.edits import edited
from ssmscope.core.model import Model
from ssmscope.interp.knockout.result import Cut

IDS = [[5, 17, 3, 9, 22, 1, 4, 60], [7, 8, 9, 2, 40]]


@pytest.fixture(scope="module")
def models():
    names = ("mamba", "mamba2", "diff-mamba-hybrid", "groupmamba", "rwkv-deeper", "bamba")
    return {name: Model(loud(random_example(name)), name=name) for name in names}


def probability(model, ids, answer, edits=()) -> float:
    return model.run(model.encode(ids=ids), last_only=True, edits=edits).logits[0].double().softmax(-1)[answer].item()


@pytest.mark.parametrize("name", ["mamba2", "rwkv-deeper"])
def test_every_cell_is_a_run_of_its_own(models, name):
    model = models[name]
    result = ssmscope.knockout(model, model.encode(ids=IDS), from_=["1", "2:4"], to="last", window=1, answer=7)
    assert result.cuts == (Cut(0, model.num_layers - 1), *(Cut(i, i) for i in range(model.num_layers)))
    assert not result.attends
    # Of several texts spans are named as they were given, of one by its tokens.
    assert (result.sources, result.target) == (("1", "2:4"), "last")
    assert result.spans == (((1,), (1,)), ((2, 3), (2, 3))) and result.targets == ((7,), (4,))
    for text, ids in enumerate(IDS):
        assert result.probability[text] == pytest.approx(probability(model, ids, 7), rel=1e-4)
        for source, places in enumerate(([1], [2, 3])):
            for at, cut in enumerate(result.cuts):
                edit = cut_edges(places, [len(ids) - 1], layers=range(cut.first, cut.last + 1), level="block")
                expected = probability(model, ids, 7, edit)
                assert result.probabilities[text, source, at] == pytest.approx(expected, rel=1e-3)
    change = result.probabilities / result.probability[:, None, None] - 1
    np.testing.assert_allclose(result.changes[..., 0], change.mean(0))
    assert Result.from_dict(result.to_dict()) == result
    assert len(result.to_frame()) == change.size


@pytest.mark.parametrize("window", [1, 2, 3])
def test_parts_are_cut_where_they_are(window):
    """A hybrid's states in its state-space layers, and attention in those of attention."""
    model = ssmscope.load("demo/books-hybrid")
    kinds = ["attention" if hasattr(block, "self_attn") else "states" for block in model.module.base_model.layers]
    found = ssmscope.knockout(model, "It was a very good day", from_="0", by="part", window=window)
    for name in ("states", "attention"):
        every, *windows = [(cut.first, cut.last) for cut in found.cuts if cut.part == name]
        assert every == (0, len(kinds) - 1)
        own = [at for at, kind in enumerate(kinds) if kind == name]
        middle = range(len(kinds)), (window - 1) // 2, window // 2
        ends = [(max(at - middle[1], 0), min(at + middle[2], len(kinds) - 1)) for at in middle[0]]
        assert windows == [(a, b) for a, b in ends if any(a <= at <= b for at in own)] and len(own) < len(kinds)
        drawn = [[*map(int, line.get_xdata())] for axes in found.figure().axes for line in axes.lines]
        assert [at for at, (a, b) in enumerate(ends) if any(a <= layer <= b for layer in own)] in drawn


def test_heads_and_parts_are_cut_alone(models):
    model = models["mamba2"]
    result = ssmscope.knockout(model, model.encode(ids=IDS[0]), from_=["2"], by="head", level="ssm", answer=3)
    at = result.cuts.index(Cut(1, 1, head=4))
    expected = probability(model, IDS[0], 3, cut_edges([2], [7], layers=[1], heads=[4]))
    assert result.probabilities[0, 0, at] == pytest.approx(expected, rel=1e-4) and len(result.cuts) == 1 + 2 * 6
    # A layer with one recurrence is one part: no layer is left out.
    hybrid = {"kept": [0], "subtracted": [0], "one recurrence": [1]}
    grouped = {"one recurrence": [0], "own": [1, 2], "1 before": [1, 2]}
    for name, parts in {"diff-mamba-hybrid": hybrid, "groupmamba": grouped}.items():
        model = models[name]
        found = ssmscope.knockout(model, model.encode(ids=IDS[0]), from_=["2"], by="part", level="ssm", answer=3)
        assert tuple(dict.fromkeys(cut.part for cut in found.cuts if cut.part)) == tuple(parts)
        for part, layers in parts.items():
            last, number = model.num_layers - 1, int(part in ("subtracted", "1 before"))
            at = found.cuts.index(Cut(0, last, part=part))
            expected = probability(model, IDS[0], 3, cut_edges([2], [7], layers=layers, recurrences=[number]))
            assert found.probabilities[0, 0, at] == pytest.approx(expected, rel=1e-4)
            assert found.probabilities[0, 0, at] != found.probability[0]


@pytest.mark.parametrize("level", ["ssm", "block"])
@pytest.mark.parametrize("name", ["mamba2", "diff-mamba-hybrid", "groupmamba"])
def test_recurrences_are_cut_by_their_numbers(models, name, level):
    """One that a layer does not have changes nothing, and all together are what is cut without numbers."""
    model = models[name]

    def last(**options) -> torch.Tensor:
        edits = cut_edges([2], [7], level=level, **options) if options else ()
        return model.run(model.encode(ids=IDS[0]), last_only=True, edits=edits).logits

    plain, every = last(), last(recurrences=None)
    assert torch.equal(last(recurrences=[9]), plain) and relative(every, plain) > 1e-4
    torch.testing.assert_close(last(recurrences=range(9)), every)
    if name != "mamba2":
        one, other = last(recurrences=[0]), last(recurrences=[1])
        assert min(relative(one, plain), relative(other, plain), relative(one, other)) > 1e-5


def test_both_roads_of_a_hybrid_are_cut(models):
    """Layer 1 of three is attention: cut alone, with the states of the others, and head by head."""
    model, last = models["bamba"], len(IDS[0]) - 1
    batch = model.encode(ids=IDS[0])

    def cut(*edits):
        return pytest.approx(probability(model, IDS[0], 7, edits), rel=1e-4)

    states, attention = cut_edges([2], [last], level="block"), cut_attention([2], [last])
    found = ssmscope.knockout(model, batch, from_=["2"], window=1, answer=7)
    assert found.cuts == (Cut(0, 2), Cut(0, 0), Cut(1, 1), Cut(2, 2))
    assert not found.attends and found.layers == (0, 1, 2)
    assert [cut.name for cut in found.cuts] == ["layers 0–2", "layer 0", "layer 1 (attention)", "layer 2"]
    first = cut_edges([2], [last], layers=[0], level="block")
    assert found.probabilities[0, 0, :3].tolist() == [cut(states, attention), cut(first), cut(attention)]
    found = ssmscope.knockout(model, batch, from_=["2"], by="part", window=3, answer=7)
    assert found.probabilities[0, 0, found.cuts.index(Cut(0, 2, part="states"))] == cut(states)
    assert found.probabilities[0, 0, found.cuts.index(Cut(0, 2, part="attention"))] == cut(attention)
    found = ssmscope.knockout(model, batch, from_=["2"], by="head", answer=7)
    assert [each.head for each in found.cuts if each.part == "attention"] == [0, 1]
    one = cut(cut_attention([2], [last], heads=[1]))
    assert found.probabilities[0, 0, found.cuts.index(Cut(1, 1, 1, "attention"))] == one
    one = cut(cut_edges([2], [last], layers=[2], heads=[4], level="block"))
    assert found.probabilities[0, 0, found.cuts.index(Cut(2, 2, 4, "states"))] == one
    assert found.figure() is not None and Result.from_dict(found.to_dict()) == found


@pytest.mark.parametrize("name", ["mamba", "bamba"])
def test_the_convolution_is_a_road(models, name):
    model = models[name]
    for roads in ("convolution", "both"):
        result = ssmscope.knockout(
            model, model.encode(ids=IDS[0]), from_=["2:4"], to="5:7", window=1, roads=roads, answer=7
        )
        for at, cut in enumerate(result.cuts):
            own = [number for number in model.layer_numbers if cut.first <= number <= cut.last]
            edits = [cut_convolution([2, 3], range(3, 7), layers=own)]
            if roads == "both":
                edits.append(cut_edges([2, 3], [5, 6], layers=own, level="block"))
            if roads == "both" and len(own) < cut.last - cut.first + 1:
                edits.append(cut_attention([2, 3], [5, 6]))
            assert result.probabilities[0, 0, at] == pytest.approx(probability(model, IDS[0], 7, edits), rel=1e-4)
        assert "convolution" in result.headline


def test_windows_are_centred(models):
    model = Model(loud(random_example("mamba")))
    result = ssmscope.knockout(model, model.encode(ids=IDS[0]), from_=["2"], window=2, answer=3)
    assert result.cuts == (Cut(0, 1), Cut(0, 1), Cut(1, 1))
    assert result.probabilities[0, 0, 0] == pytest.approx(result.probabilities[0, 0, 1])


def test_an_answer_that_passes_one_edge_is_lost_with_it():
    """A state of one number that holds what token 1 wrote is all that the last position reads."""
    model = Model(random_example("selective-ssm-language"))
    ids = [3, 5, 9, 2]
    every = cut_edges(range(4), [3])
    with edited(model, every):
        logits = model.logits(model.encode(ids=ids))
    bias_alone = torch.zeros_like(logits[0, -1])  # the head has no bias, and the layer no skip
    assert torch.allclose(logits[0, -1], bias_alone, atol=1e-6)
    some = model.run(model.encode(ids=ids), edits=[cut_edges([0, 1], [3]), cut_edges([2, 3], [3])]).logits
    assert relative(some[0, -1] + 1, bias_alone + 1) < 1e-5  # edits compose


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ssmscope.load(tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize(("options", "says"), [
    ({"from_": ["3"], "to": "1"}, "no edge leads from '3' back to '1'"),
    ({"from_": ["1"], "window": 3}, "window is 3; mamba has 2 layers"),
    ({"from_": ["1"], "by": "head", "roads": "both"}, "the convolution is cut in windows of layers; leave out by"),
    ({"from_": ["1"], "by": "part"}, "have one recurrence each"),
    ({"from_": ["1"], "answer": 97}, "there is no target 97"),
])  # fmt: skip
def test_refused(models, options, says):
    refuses(says, ssmscope.knockout, models["mamba"], models["mamba"].encode(ids=IDS[0]), **options)
