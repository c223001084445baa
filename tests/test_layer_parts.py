"""Parts of layers, traces, edits and heads, by hand: states joined, edges cut, options described."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from defined_maps import draw
from examples import random_example
from refusals import refusal, refuses
from torch import nn
from ssmscope import ops
from ssmscope.core import heads, trace
from ssmscope.core.cuts import contribution, cut_attention, cut_convolution, cut_edges
from ssmscope.core.edits import Edit, Site, blocks_of, digest, new_state, recorded, replaced
from ssmscope.core.linearized import as_diagonal
from ssmscope.core.mixers import check_causal, is_bidirectional, known_mixers, memory_of, mixers
from ssmscope.core.trace import Layers, LayerState, LayerTrace
from ssmscope.errors import Unanswerable


def state(*shapes: tuple[int, ...], conv: bool = True, begin: int = 0) -> LayerState:
    made = [torch.arange(begin, begin + math.prod(shape)).float().view(shape) for shape in shapes]
    return LayerState(made[0] if conv else None, tuple(made[1:] if conv else made))


def test_the_last_inputs_of_a_convolution():
    x = torch.arange(1.0, 13.0).view(2, 6, 1)
    before = torch.tensor([[[-2.0], [-1.0]], [[-4.0], [-3.0]]])
    mask = torch.tensor([[True] * 6, [True, False, False, False, False, False]])
    none, hole = torch.zeros(2, 6, dtype=torch.bool), torch.tensor([[True, False, True, False, False, False]] * 2)

    def last(**options) -> list[list[float]]:
        return trace.last_inputs(x, 3, **options).squeeze(-1).tolist()

    assert last() == [[5, 6], [11, 12]] == last(before=before)
    assert last(mask=mask) == [[5, 6], [0, 7]]
    assert last(before=before, mask=mask) == [[5, 6], [-3, 7]]
    assert last(before=before, mask=none) == before.squeeze(-1).tolist()
    assert last(mask=hole) == [[2, 3], [8, 9]]  # what comes before a row's last real position
    short = trace.last_inputs(x[:, :1], 3, before=before)
    assert short.squeeze(-1).tolist() == [[-1, 1], [-3, 7]]
    assert trace.last_inputs(x[:, :1], 3).squeeze(-1).tolist() == [[0, 1], [0, 7]]
    assert trace.last_inputs(x, 1).shape == (2, 0, 1)


def test_states_are_gathered_joined_and_sized():
    first, second = (
        (state((2, 3, 4)), state((2, 5), conv=False)),
        (state((1, 2, 4), begin=50), state((1, 5), conv=False)),
    )
    assert trace.size(first) == 4 * (24 + 10) and [t.shape for t in trace.tensors(first)] == [(2, 3, 4), (2, 5)]
    chosen = trace.gathered(first, torch.tensor([1, 1, 0]))
    assert torch.equal(chosen[0].conv, first[0].conv[[1, 1, 0]])
    assert torch.equal(chosen[1].ssm[0], first[1].ssm[0][[1, 1, 0]]) and chosen[1].conv is None
    assert trace.joined([first]) is first and trace.joined([]) == ()
    both = trace.joined([first, second])
    padded = torch.nn.functional.pad(second[0].conv, (0, 0, 0, 1))
    assert torch.equal(both[0].conv, torch.cat([first[0].conv, padded])) and both[0].ssm == ()
    assert torch.equal(both[1].ssm[0], torch.cat([first[1].ssm[0], second[1].ssm[0]]))
    numbers = trace.joined([(LayerState(torch.tensor([1.0]), ()),), (LayerState(torch.tensor([2.0, 3.0]), ()),)])
    assert numbers[0].conv.tolist() == [1, 2, 3]


def test_a_state_alone_holds_nothing_larger():
    large = torch.arange(24.0).view(4, 6)
    whole, part = (
        trace.alone(LayerState(large, (large[:, :2],))).conv,
        trace.alone(LayerState(None, (large[:1],))).ssm[0],
    )
    assert whole is large and torch.equal(part, large[:1]) and part.untyped_storage().nbytes() == 24


def test_records_of_tensors_are_changed_everywhere():
    layer = LayerTrace(torch.ones(1, 2, 3), (draw("mamba", 2),), extras={"kl": torch.ones(2)}, initial=(torch.ones(1),))
    found = trace.mapped(layer, lambda t: 0 * t)
    for each in (found.u, found.recurrences[0].b, found.extras["kl"], found.initial[0]):
        assert not each.any()
    assert found.reach == 1 and found.mask is None and found.recurrences[0].expected is False


def test_layers_are_made_as_they_are_asked_for():
    asked: list[int] = []
    layers = Layers(4, lambda index: asked.append(index) or index)
    assert (layers[0], layers[-1], layers[-4], layers[1:], layers[::-2]) == (0, 3, 0, [1, 2, 3], [3, 1])
    assert asked == [0, 3, 0, 1, 2, 3, 3, 1] and len(layers) == 4
    for outside in (4, -5):
        with pytest.raises(IndexError, match=f"layer {outside} of a model with 4"):
            layers[outside]


def test_a_layers_quantities_over_its_recurrences():
    r, other = draw("mamba-2", 5), draw("gla", 5)
    layer = LayerTrace(torch.zeros(2, 5, 3), (r, other), at=3)
    each = torch.stack([ops.retention(r), ops.retention(other)])
    torch.testing.assert_close(layer.retention(), each.mean(0))
    turn = torch.tensor([[0, 1, 0, 0, 1], [1, 1, 0, 1, 0]])
    taking_turns = replace(layer, turn=turn).retention()
    assert torch.equal(taking_turns, torch.where(turn == 0, each[0], each[1]))
    assert torch.equal(layer.survival(), layer.survival(3)) and not layer.survival()[:, 4:].any()
    assert layer.survival(2)[:, :3].all() and not layer.survival(2)[:, 3:].any()
    assert torch.equal(replace(layer, at=None).survival(), layer.survival(4))
    with pytest.raises(ValueError, match="2 recurrences"):
        _ = layer.recurrence
    assert replace(layer, recurrences=(r,)).recurrence is r


def test_a_layer_scans_from_a_state_or_its_own_beginning():
    r = draw("mamba", 4)
    own, other = (torch.full((2, 6, 1, 3), value, dtype=torch.float64) for value in (1.0, 2.0))
    layer = LayerTrace(torch.zeros(2, 4, 3), (r,))
    for found, H in (
        (layer.scan(), None),
        (replace(layer, initial=(own,)).scan(), own),
        (replace(layer, initial=(own,)).scan(LayerState(None, (other,))), other),
    ):
        torch.testing.assert_close(found[0].state, ops.scan_reference(r, H).state)
        assert found[0].retention is None
    assert layer.scan(retention=True)[0].retention.shape == (2, 4)
    inputs = torch.arange(24.0).view(2, 4, 3)
    kept = replace(layer, conv_input=inputs, reach=3).state_after(layer.scan())
    assert torch.equal(kept.conv, inputs[:, 2:]) and layer.state_after(layer.scan()).conv is None


def test_what_no_layer_remembers_is_unanswerable():
    trace.check_recurrent_state(True, "m", "survival")
    with pytest.raises(Unanswerable, match="no layer of m has a recurrent memory, which survival is about"):
        trace.check_recurrent_state(False, "m", "survival")


@pytest.mark.parametrize("kind", ["mamba, two groups", "mamba-2", "gla", "delta"])
def test_what_sources_contribute_to_targets(kind):
    """Rows and times begin late, end early, or do not meet, and come in another order."""
    r = draw(kind, 7, batch=3)
    alpha = ops.attention_reference(r)
    chosen = [
        ([(1, 2), (1, 3)], [(0, 5), (1, 4), (1, 6)]),
        ([(0, 0), (2, 6)], [(0, 6), (1, 6), (2, 6)]),
        ([(1, 5)], [(1, 2), (1, 4)]),  # the targets come before
        ([(1, 4)], [(1, 4)]),
        ([(2, 3)], []),
        ([], [(0, 1)]),
    ]
    for sources, targets in chosen:
        cut, read = (torch.zeros(3, 7, dtype=torch.bool) for _ in range(2))
        for places, mask in ((sources, cut), (targets, read)):
            for place in places:
                mask[place] = True
        x = r.x * cut[..., None, None] * (torch.arange(r.shape[2]) != 1)[:, None]  # and head 1 contributes nothing
        expected = torch.einsum("bhts,bshp->bthp", alpha, x) * read[..., None, None]
        torch.testing.assert_close(contribution(r, x, read), expected, rtol=1e-10, atol=1e-12)
        if not kind.startswith("delta"):
            backwards = replace(r.at(torch.arange(6, -1, -1)), order=torch.arange(6, -1, -1))
            found = contribution(backwards, x.flip(1), read.flip(1)).flip(1)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_what_edits_tell_of_themselves():
    """Every argument, as plain values, and a key that tells two edits apart."""
    mask = torch.tensor([[True, False, True]])
    value = torch.ones(1, 3, 2)
    ends, by_row = {"sources": [1, 2], "targets": [4]}, {"sources": "by row", "targets": [0]}
    keep = lambda kept, site: kept  # noqa: E731
    told = [
        (
            cut_edges((1, 2), range(4, 5), layers=(0, 2), heads=(1,), recurrences=(3,), level="block"),
            ("edges cut", "scans", [0, 2], {**ends, "heads": [1], "recurrences": [3], "level": "block"}),
        ),
        (
            cut_edges(mask, [0]),
            ("edges cut", "scans", None, {**by_row, "heads": None, "recurrences": None, "level": "ssm"}),
        ),
        (
            cut_edges(mask, [0], rows={3: mask[:, 0], 1: mask[:, 1]}),
            ("edges cut", "scans", [3, 1], {**by_row, "heads": None, "recurrences": None, "level": "ssm"}),
        ),
        (cut_convolution([1, 2], (4,), layers=range(2)), ("edges cut", "taps", [0, 1], {**ends, "heads": None})),
        (cut_attention([1, 2], [4], heads=range(2)), ("edges cut", "attention", None, {**ends, "heads": [0, 1]})),
        (
            replaced("output", value, (2, 0), layers=(1,), heads=(5,)),
            ("output replaced", "output", [1], {"positions": [2, 0], "heads": [5]}),
        ),
        (
            replaced("input", value),
            ("input replaced", "input", None, {"positions": "slice(None, None, None)", "heads": None}),
        ),
        (
            replaced("input", value, rows={4: mask}),
            ("input replaced", "input", [4], {"positions": "slice(None, None, None)", "heads": None}),
        ),
        (recorded("scans", {}, layers=(7,)), ("scans recorded", "scans", [7], {})),
        (new_state(3, keep), ("state replaced", "state", None, {"after": 3})),
        (new_state(0, keep, layers=range(2), name="own"), ("own", "state", [0, 1], {"after": 0})),
    ]
    for edit, (name, place, layers, more) in told:
        assert edit.describe() == {"name": name, "place": place, "layers": layers, "key": edit.key, **more}
        assert edit.acts_in(0) == (layers is None or 0 in layers) and len(edit.key) == 16
    assert len({edit.key for edit, _ in told}) == len(told)


def test_keys_of_edits_tell_every_argument():
    value, other = torch.ones(1, 3, 2), torch.ones(1, 2, 3)
    keys = [
        cut_edges([1], [2]).key, cut_edges([2], [2]).key, cut_edges([1], [3]).key,
        *(cut_edges([1], [2], **{name: [1]}).key for name in ("layers", "heads", "recurrences")),
        cut_edges([1], [2], level="block").key, cut_convolution([1], [2]).key, cut_attention([1], [2]).key,
        replaced("output", value).key, replaced("input", value).key, replaced("output", 2 * value).key,
        replaced("output", other).key, replaced("output", value.double()).key, replaced("output", value, [1]).key,
        replaced("output", value, layers=[1]).key, replaced("scans", value, heads=[1]).key,
        replaced("output", {1: value, 2: other}).key, digest([], [torch.zeros(0, 2)]), digest([], [torch.zeros(0, 3)]),
        digest([], []),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys) and cut_edges((1,), range(2, 3)).key == keys[0]
    assert digest([1], [None, value]) == digest([1], [value.T.contiguous().T])


def test_values_that_replace_others():
    """At positions and heads, by layer and number, or by masks of their own."""
    old, new = torch.arange(24.0).view(2, 4, 3), -torch.arange(12.0).view(1, 4, 3)
    at = Site(2, nn.Identity())
    assert torch.equal(replaced("output", new).change(old, at), new.expand(2, 4, 3))
    found = replaced("output", {2: new, 3: 5 * new}, [3, 1]).change(old, at)
    assert torch.equal(found[:, [1, 3]], new[:, [1, 3]].expand(2, 2, 3)) and torch.equal(found[:, ::2], old[:, ::2])
    found = replaced("residual", new, slice(2, None)).change(old, at)
    assert torch.equal(found[:, 2:], new[:, 2:].expand(2, 2, 3)) and torch.equal(found[:, :2], old[:, :2])
    part = {(2, 0): 7 * new, (2, 1): new}
    assert torch.equal(replaced("convolution", part).change(old, replace(at, part=1)), new.expand(2, 4, 3))
    mask = torch.tensor([[True, False, False, True], [False, False, True, False]])
    assert torch.equal(replaced("input", new, rows={2: mask}).change(old, at), torch.where(mask[..., None], new, old))
    y, z = (torch.arange(begin, begin + 16.0).view(1, 2, 4, 2) for begin in (100, 200))
    scans = tuple(ops.Scan(each, None, None) for each in (y, z))
    values = {(2, 0): -y, (2, 1): -z}
    one, two = replaced("scans", values, [1], heads=[0, 3]).change(scans, at)
    for found, own in ((one.y, y), (two.y, z)):
        expected = own.clone()
        expected[:, 1, [0, 3]] *= -1
        assert torch.equal(found, expected)
    by_head = torch.zeros(1, 2, 4, dtype=torch.bool)
    by_head[0, 1, 2] = True
    one, _ = replaced("scans", values, rows={2: by_head}).change(scans, at)
    assert torch.equal(one.y, torch.where(by_head[..., None], -y, y))


def test_an_edit_says_where_and_after_which_token():
    keep = lambda value, site: value  # noqa: E731
    assert "an edit has no place 'outputs'; allowed are residual, input" in refusal(Edit, "x", "outputs", keep)
    said = "give it with the place 'state' alone"
    assert said in refusal(Edit, "x", "state", keep) and said in refusal(Edit, "x", "output", keep, after=0)


class Wrapped(nn.Module):
    """Mixer that records the calls around it."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def test_blocks_are_the_innermost_numbered_modules():
    one, two, three = (random_example("mamba").backbone.layers[0].mixer for _ in range(3))
    inner = nn.ModuleList([nn.ModuleList([nn.Identity(), Wrapped(inside=Wrapped(mixer=one))]), Wrapped(mixer=two)])
    module = Wrapped(layers=inner, last=Wrapped(mixer=three))
    assert mixers(module) == [one, two, three] and blocks_of(module) == [inner[0][1], inner[1], three]


def test_one_layer_that_remembers_or_reads_ahead_is_enough():
    vim, mamba, short = (mixers(random_example(name))[0] for name in ("vim", "mamba", "lfm2"))
    for parts, recurrent, both_ways in (
        ([mamba, mamba], True, False), ([mamba, vim], True, True), ([vim, mamba], True, True), ([short], False, False),
        ([short, mamba], True, False), ([mamba, short], True, False),
    ):  # fmt: skip
        module = nn.Sequential(*parts)
        assert memory_of(module) == {"has_recurrent_state": recurrent, "bidirectional": both_ways}
        assert is_bidirectional(module) is both_ways
        said = refusal(check_causal, module, "this")
        assert (said is not None) == both_ways
    names = known_mixers().split(", ")
    assert names == sorted(names) and {"MambaMixer", "Mamba2Mixer"} <= set(names)


def test_kinds_of_heads():
    config = lambda labels, problem=None: SimpleNamespace(num_labels=labels, problem_type=problem)  # noqa: E731
    labels = "multi_label_classification"
    assert [heads.given_by(config(*each)) for each in ((3,), (2,), (1,), (1, labels), (3, labels))] == [
        *("classes", "classes", "numbers", "labels", "labels")
    ]
    assert [heads.given_by(config(*each)) for each in ((3, "regression"), (1, "single_label_classification"))] == [
        *("numbers", "numbers")
    ]
    assert heads.given_by(SimpleNamespace(num_labels=4)) == "classes"
    head, score, output = nn.Linear(2, 3), nn.Linear(2, 4), nn.Linear(2, 5)
    own = dict(get_output_embeddings=lambda: output)
    for parts, expected in (
        ({"head": head, "score": score}, head),
        ({"score": score}, score),
        ({"head": "none", "score": score}, score),
        ({}, output),
    ):
        assert heads.linear_head(SimpleNamespace(**parts, **own)) is expected
    hidden = torch.ones(1, 2)
    stand_in = heads.BackboneOutput(hidden)
    assert stand_in[0] is stand_in.last_hidden_state is hidden and stand_in[:1] == (hidden,)
    assert stand_in.past_key_values is None


def test_an_activation_over_its_argument():
    c = torch.tensor([-2.0, 0.0, 3.0, 1e-3])
    for act, at_zero in (
        (torch.tanh, 1.0), (nn.GELU(), 0.5), (lambda t: 3 * t, 3.0), (lambda t: t.relu() + 2 * t, 3.0),
    ):  # fmt: skip
        expected = torch.where(c == 0, at_zero, act(c) / torch.where(c == 0, 1, c))
        torch.testing.assert_close(as_diagonal(act, c), expected)
        leaf = c.clone().requires_grad_()
        assert torch.autograd.grad(as_diagonal(act, leaf).sum(), leaf)[0].isfinite().all()
    own = nn.SiLU()
    for act in (nn.functional.silu, nn.SiLU(), own):
        torch.testing.assert_close(as_diagonal(act, c), torch.sigmoid(c))
    own.register_forward_hook(lambda module, args, y: 2 * y)
    torch.testing.assert_close(as_diagonal(own, c), 2 * torch.sigmoid(c))
    shift = torch.tensor([0.0, 0.0, 1.0, 0.0])
    refuses("is not 0 at 0", as_diagonal, lambda t: t + shift, c)
