"""Edits act in every architecture: cut edges equal matrices with zeros in them, and patched runs are the other run."""

from dataclasses import replace

import pytest
import torch
from examples import OTHER_HYBRIDS, TEXTS, hooks, multiplied, random_example, relative
from exhaustive import half
from loud import TrueFloat64, doubled, loud
from refusals import refuses
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from ssmscope import ops
from ssmscope.core.attention_layers import attention_layers, attention_modules, attention_numbers
from ssmscope.core.cuts import contribution, cut_attention, cut_convolution, cut_edges
from ssmscope.core.edits import BLOCK_PLACES, PLACES, Edit, block_parts, edited, in_words, new_state, recorded, replaced
from ssmscope.core.intercept import override_forward
from ssmscope.core.linearized import OutputMap, Path
from ssmscope.core.mixers import adapter_for, is_bidirectional, memory_of
from ssmscope.core.model import Model
from ssmscope.core.trace import mapped, tensors
from ssmscope.errors import InputError
from ssmscope.layers import parts, rwkv, rwkv7
from ssmscope.zoo import groupmamba

NOT = () if parts.BY_WEIGHT else ("jamba", "zamba", "recurrent_gemma")
INTERFACED = [name for name in OTHER_HYBRIDS if name not in NOT]
"""Hybrids whose attention is run by one of transformers' functions."""
IDS = [[5, 17, 3, 9, 22, 1, 4, 60, 61, 62, 5], [7, 8, 9, 2, 2, 40, 1]]
OTHER_IDS = [[50, 7, 31, 9, 22, 1, 4, 60, 61, 62, 5], [71, 18, 9, 2, 2, 40, 1]]
"""Another beginning, of three tokens at the most."""


def attended(
    r: ops.Recurrence, keep: torch.Tensor, initial: torch.Tensor | None, path: Path | None = None
) -> torch.Tensor:
    """y from the matrices of every head with entries (batch, t, s) set to zero, its skip, and what it starts from; with
    a path the entries of the block's matrices, of every channel."""
    alpha = ops.attention(replace(r, D=None), groups=r.shape[2])
    if path is None:
        y = torch.einsum("bhts,bshp->bthp", alpha * keep.unsqueeze(1), r.x)
    else:
        bare = replace(
            path, recurrence=replace(path.recurrence, D=None), weight=None, output_map=OutputMap(lambda v: v)
        )
        channels = multiplied(bare, "block") * ~keep.unsqueeze(1)
        cut = torch.einsum("bcts,bsc->btc", channels, path.input_map.source)
        y = torch.einsum("bhts,bshp->bthp", alpha, r.x) - cut.unflatten(-1, r.x.shape[2:])
    if r.D is not None:
        y = y + (r.D if r.D.ndim == 2 else r.D.unsqueeze(-1)) * r.x
    return y if initial is None else y + ops.scan(replace(r, x=0 * r.x, D=None), initial).y


def brute_force(model: Model, batch, keep: torch.Tensor, level: str = "ssm") -> torch.Tensor:
    """The logits with the entries of all layers' matrices set to zero where `keep` (batch, t, s) is False."""

    def handler(below, u, *args, mixer, **kwargs):
        reader = adapter_for(mixer)
        layer = reader.compute_terms(mixer, u, batch.mask)
        starts = layer.initial or (None,) * len(layer.recurrences)
        paths = reader.linearized(mixer, layer).paths if level == "block" else (None,) * 9
        if reader is rwkv:  # a token reads what the one before left
            later = torch.cat([keep[:, 1:], keep[:, -1:]], dim=1)
            y = attended(layer.recurrence, later, starts[0])  # it has no convolution after its values
            return reader.output(mixer, layer, (ops.Scan(y, None, None),))
        if isinstance(layer, groupmamba.GroupTrace) and layer.borrowed:
            weights = groupmamba.attend(mixer, layer).weights
            every = [replace(layer.recurrence, D=None), *layer.borrowed]
            y = sum(weights[..., j] * attended(r, keep, None, paths[j]) for j, r in enumerate(every))
            y = y + attended(layer.recurrence, 0 * keep, None)  # the skip
            return groupmamba.base_of(mixer).FORM.output(mixer, layer, (ops.Scan(y, None, None),))
        each = zip(layer.recurrences, starts, paths)
        return reader.output(mixer, layer, tuple(ops.Scan(attended(r, keep, H, path), H, None) for r, H, path in each))

    def bound(mixer):
        def run(below, *args, **kwargs):
            u = args[0] if args else kwargs.pop("hidden_states")
            made, reader = handler(below, u, mixer=mixer), adapter_for(mixer)
            return reader.returned(made) if hasattr(reader, "returned") else made

        return run

    readers = dict.fromkeys(map(adapter_for, model.mixers))
    with torch.no_grad(), TrueFloat64(), model.running(mask=batch.mask):
        opened = [reader.reading(model.module) for reader in readers if hasattr(reader, "reading")]
        for context in opened:
            context.__enter__()
        try:
            with override_forward([(mixer, bound(mixer)) for mixer in model.mixers]):
                return model.forward(batch)
        finally:
            for context in opened:
                context.__exit__(None, None, None)


def precise(model: Model, batch, edits=()) -> torch.Tensor:
    with TrueFloat64():
        return model.run(batch, edits=edits).logits


def test_cut_edges_are_zeros_in_the_matrices(module, request):
    model = Model(doubled(module))
    batch = model.encode(ids=IDS)
    sources, targets = (torch.zeros_like(batch.mask) for _ in range(2))
    sources[0, [1, 4]] = sources[1, 2] = True
    targets[0, [1, 6, 10]] = targets[1, [3, 6]] = True
    keep = ~(targets[:, :, None] & sources[:, None, :])
    plain = precise(model, batch)
    assert relative(brute_force(model, batch, torch.ones_like(keep)), plain) < 1e-9
    for level in half(("ssm", "block"), request.node.name):
        expected = brute_force(model, batch, keep, level)
        found = precise(model, batch, cut_edges(sources, targets, level=level))
        changed = relative(expected, plain)
        assert changed > 1e-6 and relative(found, expected) < 1e-8 * min(1, changed)


def convolution_without(sources: torch.Tensor, targets: torch.Tensor):
    """`causal_convolution` term by term, without those from `sources` at other `targets`, (batch, length) bool each."""

    def run(x, weight, bias, tail=None, taps=None, act=None):
        count = weight.shape[-1]
        rows = []
        for t in range(x.shape[1]):
            total = torch.zeros_like(x[:, 0])
            for j in range(min(count, t + 1)):
                cut = sources[:, t - j] & targets[:, t] if j else torch.zeros(len(x), dtype=torch.bool)
                total = total + torch.where(cut[:, None], 0, x[:, t - j] * weight[:, 0, count - 1 - j])
            rows.append(total if bias is None else total + bias)
        y = torch.stack(rows, dim=1)
        return y if act is None else act(y)

    return run


def has_convolution(model: Model) -> bool:
    kept: dict = {}
    model.run(model.encode(ids=IDS[:1]), edits=recorded("convolution", kept))
    return bool(kept)


def test_a_cut_convolution_is_one_of_zeros(module, monkeypatch):
    """Alone, and with the edges of the states."""
    model = Model(doubled(module))
    batch = model.encode(ids=IDS)
    sources, targets = (torch.zeros_like(batch.mask) for _ in range(2))
    sources[0, [1, 4, 5]] = sources[1, 2] = True
    targets[0, [2, 3, 5, 6, 10]] = targets[1, [3, 4, 6]] = True
    cut = cut_convolution(sources, targets)
    if not has_convolution(model):
        refuses("has no convolution", model.run, batch, edits=cut)
        return
    plain, alone = precise(model, batch), precise(model, batch, cut)
    both = precise(model, batch, [cut, cut_edges(sources, targets)])
    naive, before = convolution_without(sources, targets), rwkv.token_before
    monkeypatch.setattr(parts, "causal_convolution", naive)
    late = torch.zeros_like(sources)
    late[:, 1:] = sources[:, :-1] & targets[:, 1:]
    for file in (rwkv, rwkv7):
        naively = lambda x, *_: before(x, None, None).masked_fill(late.unsqueeze(-1), 0)  # noqa: E731
        monkeypatch.setattr(file, "token_before", naively)
    keep = ~(targets[:, :, None] & sources[:, None, :])
    for found, expected in ((alone, precise(model, batch)), (both, brute_force(model, batch, keep))):
        changed = relative(expected, plain)
        assert changed > 1e-6 and relative(found, expected) < 1e-8 * min(1, changed)


def test_maps_of_a_cut_convolution_are_the_layers_own(module):
    """The frozen map of an edited run is its layer's output, and the block's matrices are what recurrences read."""
    model = Model(doubled(module))
    batch, kept = model.encode(ids=IDS[:1]), {}
    if not has_convolution(model):
        return
    with TrueFloat64(), edited(model, [cut_convolution([2, 3], range(11)), recorded("output", kept)]):
        trace = model.trace(batch)
        for index in range(model.num_layers):
            linearized = trace.linearized[index]
            assert relative(linearized.matvec(linearized.u) + linearized.bias, kept[model.layer_numbers[index]]) < 1e-9
            for path in linearized.paths:
                bare = replace(path, weight=None, output_map=OutputMap(lambda v: v))
                made = torch.einsum("bcts,bsc->btc", multiplied(bare, "block"), path.input_map.source)
                assert (
                    relative(made + 1, bare.read(path.input_map.values(path.input_map.source, False), False) + 1) < 1e-9
                )


MORE_ROADS = "rwkv", "xlstm", "groupmamba", "gfssm", "mamba2attn", "ssm-mamba3", "ssm-gsa", "glm5_next", "qwen4_exp"
"""In which a token is read by another road too: in what RWKV and xLSTM divide by, in GroupMamba's attention over
modules, by GFSSM's filter in the skip of later tokens, by the convolution before mamba2attn's attention, in what
Mamba-3's next step writes, in the keys of GSA's slots, and in the groups of keys that GLM-5.3 and Qwen4-Exp choose."""


def held_at(place: int) -> Edit:
    """Hold constant how much a token makes the states forget."""

    def held(r):
        terms = {name: getattr(r, name, None) for name in ("b", "delta", "log_a", "beta", "e", "r")}
        at, given = torch.tensor([place]), {name: term for name, term in terms.items() if term is not None}
        return replace(r, **{name: t.index_fill(1, at, -0.1 if name == "log_a" else 0.1) for name, t in given.items()})

    def change(layer, site):
        return replace(layer, recurrences=tuple(map(held, layer.recurrences)))

    return Edit("decay held", "terms", change)


def test_no_other_road_leads_from_a_token(module):
    """No later token depends on it once its edges in states, convolutions and attention are cut and its decays held."""
    model = Model(doubled(module))
    unread = (
        attention_modules(model.module).keys() - attention_layers(model.module).keys()
    )  # RecurrentGemma's before release 5
    if model.architecture.startswith(MORE_ROADS) or model.is_classifier or unread:
        return
    later = range(4, 11)
    edits = [cut_edges([3], later), held_at(3)]
    edits += [cut_convolution([3], later)] * has_convolution(model)
    edits += [cut_attention([3], later)] * bool(attention_layers(model.module))
    changed = [[*IDS[0][:3], 77, *IDS[0][4:]]]
    for cut in (True, False):
        one, other = (precise(model, model.encode(ids=ids), edits * cut)[:, 4:] for ids in (IDS[:1], changed))
        assert (relative(other, one) < 1e-9) == cut


def attended_without(keep: torch.Tensor):
    """Transformers' eager attention with the weights of edges (batch, heads or 1, queries, keys) taken out, and the
    others of a query scaled to sum to 1 again."""

    def run(part, q, k, v, mask, scaling=None, **_):
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
        causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if mask is not None:
            causal = causal & (mask if mask.dtype == torch.bool else mask == 0)
        weights = scores.masked_fill(~causal, -torch.inf).softmax(-1).nan_to_num() * keep
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)
        return (weights @ v).transpose(1, 2).contiguous(), weights

    return run


@pytest.mark.parametrize("heads", [None, [1]], ids=["all heads", "one head"])
@pytest.mark.parametrize("module", INTERFACED, indirect=True)
def test_cut_edges_of_attention_are_weights_taken_out(module, heads, monkeypatch):
    model = Model(doubled(module))
    batch = model.encode(ids=IDS)
    sources, targets = (torch.zeros_like(batch.mask) for _ in range(2))
    sources[0, [1, 4]] = sources[1, 2] = True
    targets[0, [1, 6, 10]] = targets[1, [3, 6]] = True
    edges = targets[:, :, None] & sources[:, None, :] & ~torch.eye(11, dtype=torch.bool)
    others = torch.arange(model.config.num_attention_heads) != 1 if heads else torch.zeros(1, dtype=torch.bool)
    keep = ~edges.unsqueeze(1) | others[None, :, None, None]
    plain = precise(model, batch)
    found = precise(model, batch, cut_attention(sources, targets, heads=heads))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", attended_without(torch.ones_like(keep)))
    assert relative(precise(model, batch)[batch.mask], plain[batch.mask]) < 1e-9
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", attended_without(keep))
    expected = precise(model, batch)
    changed = relative(expected[batch.mask], plain[batch.mask])
    assert changed > 1e-6 and relative(found[batch.mask], expected[batch.mask]) < 1e-8 * min(1, changed)


@pytest.mark.parametrize("module", ["bamba", "falcon_h1", "zamba"], indirect=True)
def test_attention_is_cut_by_layer_and_behind_states(module):
    model = Model(doubled(module))
    ids, last = IDS[0], len(IDS[0]) - 1
    numbers = attention_numbers(model.module)
    found = precise(model, model.encode(ids=ids), cut_attention([7], [last], layers=numbers[:1]))
    with TrueFloat64():
        states = model.run(model.encode(ids=ids[:6])).states
        end = model.run(
            model.encode(ids=ids[6:]), states, edits=cut_attention([1], [last - 6], layers=numbers[:1])
        ).logits
    assert relative(end, found[:, 6:]) < 1e-9
    with pytest.raises(InputError, match=f"there is no layer 9; the model has the layers {in_words(numbers)}"):
        model.run(model.encode(ids=ids), edits=cut_attention([1], [2], layers=[9]))


def test_a_model_without_attention_has_none_to_cut():
    model = Model(random_example("mamba"))
    with pytest.raises(InputError, match="no layer 0; the model has no layers of softmax attention"):
        model.run(model.encode(ids=IDS[0]), edits=cut_attention([1], [2], layers=[0]))


def test_a_token_cut_from_all_is_the_state_without_its_write(module):
    model = Model(doubled(module))
    batch = model.encode(ids=IDS[:1])
    seen = []
    with torch.no_grad(), TrueFloat64(), model.running(visit=lambda index, layer, scans: seen.append((layer, scans))):
        model.forward(batch)
    one, every = (torch.zeros_like(batch.mask) for _ in range(2))
    one[:, 3] = every[:, :] = True
    for layer, scans in seen:
        for r, scan, H in zip(layer.recurrences, scans, layer.initial or (None,) * len(scans)):
            without = ops.scan_reference(replace(r, x=r.x.masked_fill(one[:, :, None, None], 0), D=None), H).y
            skip = 0 if r.D is None else (r.D if r.D.ndim == 2 else r.D.unsqueeze(-1)) * r.x
            assert (
                relative(scan.y - contribution(r, r.x.masked_fill(~one[:, :, None, None], 0), every), without + skip)
                < 1e-9
            )


STREAMS = ("glm5_next_text",)
"""Architectures with several residual streams, whose edits are refused."""


def test_a_run_patched_with_itself_is_itself(model):
    batch = model.encode(ids=IDS)
    plain = model.run(batch).logits
    for place in ("residual", "input", "convolution", "output", "scans")[model.architecture in STREAMS :]:
        kept: dict = {}
        watched = model.run(batch, edits=recorded(place, kept)).logits
        again = model.run(batch, edits=replaced(place, kept)).logits
        assert torch.equal(watched, plain) and torch.equal(again, plain)
        assert kept or place == "convolution"


def test_a_layer_in_pieces_is_the_layer(model):
    batch = model.encode(ids=IDS)
    if is_bidirectional(model.module):
        with pytest.raises(InputError, match="both ways, and a state after a token needs layers"):
            model.run(batch, edits=new_state(1, lambda state, site: state))
        return
    cuts = [new_state(1, lambda state, site: state), new_state(6, lambda state, site: state, layers=[0])]
    assert relative(model.run(batch, edits=cuts).logits, model.run(batch).logits) < 1e-5


def test_everything_patched_is_the_other_run(model):
    batch, other = model.encode(ids=IDS), model.encode(ids=OTHER_IDS)
    expected, own = (model.run(each, last_only=True).logits for each in (other, batch))
    assert relative(own, expected) > 1e-4
    kept, states = {}, {}
    keep = (
        []
        if is_bidirectional(model.module)
        else [new_state(2, lambda state, site: states.setdefault(site.layer, state))]
    )
    again = model.architecture in ("zamba", "zamba2", *STREAMS)  # Zamba's attention reads the embeddings again.
    model.run(other, edits=[*([] if again else [recorded("residual", kept)]), *keep])
    ways = [] if again else [replaced("residual", kept, layers=[0])]
    if not attention_modules(model.module) and keep:  # else attention is another road from the past
        ways.append(new_state(2, lambda state, site: states[site.layer]))
    for way in ways:
        assert relative(model.run(batch, last_only=True, edits=way).logits, expected) < 1e-5


def test_only_later_tokens_change(model):
    if model.is_classifier:
        pytest.skip("a classifier reads the last position only")
    batch = model.encode(ids=IDS[:1])
    plain = model.run(batch).logits

    def twice(state, site):
        return replace(state, ssm=mapped(state.ssm, lambda t: 2 * t + 1 if t.is_floating_point() else t))

    found = model.run(batch, edits=new_state(4, twice)).logits
    assert relative(found[:, :5], plain[:, :5]) < 1e-5
    assert (
        all(relative(found[:, t], plain[:, t]) > 1e-6 for t in range(6, 11))
        == memory_of(model.module)["has_recurrent_state"]
    )


def test_nothing_is_left_behind(model):
    batch = model.encode(ids=TEXTS)
    plain = model.logits(batch)

    def fail(*_):
        raise RuntimeError("in the middle")

    for place in PLACES:
        after = 1 if place == "state" else None
        edit = Edit("fails", place, fail, after=after)
        if place in ("convolution", "taps") and model.run(batch).states[0].conv is None:
            continue
        if (place == "attention" and not attention_layers(model.module)) or (
            place == "state" and is_bidirectional(model.module)
        ):
            continue
        if place in BLOCK_PLACES and not block_parts(model.module, place):
            continue
        if place == "residual" and model.architecture in STREAMS:
            refuses(
                r"the residual stream at layer 0 is \(.*\), not \(batch, length, width\)", model.run, batch, edits=edit
            )
            continue
        with pytest.raises(RuntimeError, match="in the middle"), edited(model, edit):
            model.logits(batch)
        assert hooks(model) == 0 and "edits" not in model.source
    assert torch.equal(model.logits(batch), plain)


def test_an_edited_trace_is_that_of_the_edited_run(model):
    batch = model.encode(ids=IDS)
    plain = model.trace(batch)

    def without(layer, site):
        return replace(layer, recurrences=tuple(replace(r, x=0 * r.x) for r in layer.recurrences))

    edit = Edit("no input", "terms", without, layers=(0,))
    with edited(model, edit):
        trace = model.trace(batch)
        assert torch.allclose(model.logits(batch), model.run(batch).logits, atol=0)
    assert trace.source["edits"][0]["name"] == "no input" and "edits" not in plain.source
    assert all((r.x == 0).all() for r in trace.layers[0].recurrences)
    assert any((r.x != 0).any() for r in plain.layers[0].recurrences)
    if model.num_layers > 1:
        assert not torch.equal(trace.layers[1].u, plain.layers[1].u)


def test_states_are_those_of_a_run_that_ends_there(model):
    if is_bidirectional(model.module):
        return
    batch, kept = model.encode(ids=IDS[:1]), {}
    model.run(batch, edits=new_state(4, lambda state, site: kept.setdefault(site.layer, state)))
    ended = model.run(model.encode(ids=[IDS[0][:5]])).states
    for number, state in zip(model.layer_numbers, ended):
        for a, b in zip(tensors(kept[number]), tensors(state), strict=True):
            assert torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-5)


def test_what_cannot_be_edited_is_refused(model):
    batch = model.encode(ids=IDS)
    same = new_state(3, lambda state, site: state)
    for edits, says in (
        ([Edit("x", "output", lambda value, site: value, layers=(99,))], "there is no layer 99"),
        ([same, cut_edges([0], [3])], "cannot be edited in one run"),
        ([new_state(10, lambda state, site: state)], "no token comes after token 10"),
    ):
        refuses(says, model.run, batch, edits=edits)
    with pytest.raises(InputError, match="is in pieces and has no trace"), edited(model, same):
        model.trace(batch)


@pytest.mark.parametrize(
    "name, place", [*(("mamba2", place) for place in ("residual", "input", "output", "state")), ("deltanet", "state")]
)
def test_edits_compose_in_the_order_in_which_they_are_given(name, place):
    """v → 2 v, then v → v + 1, is 2 v + 1, not 2 v + 2; those of an outer context come first, and of states after two
    tokens the earlier is changed first."""
    model = Model(loud(random_example(name)))
    batch = model.encode(ids=IDS[:1])
    seen: dict[str, torch.Tensor] = {}

    def edit(name, change, after=4):
        def changed(value, site):
            seen[name] = value.ssm[0] if place == "state" else value
            return replace(value, ssm=tuple(map(change, value.ssm))) if place == "state" else change(value)

        return (
            new_state(after, changed, layers=[1], name=name) if place == "state" else Edit(name, place, changed, (1,))
        )

    double, add = edit("double", lambda v: 2 * v), edit("add", lambda v: v + 1)
    both = model.run(batch, edits=[double, add]).logits
    torch.testing.assert_close(seen["add"], 2 * seen["double"])
    with edited(model, double):
        assert torch.equal(model.run(batch, edits=add).logits, both)
    other = model.run(batch, edits=[add, double]).logits
    torch.testing.assert_close(seen["double"], seen["add"] + 1)
    assert relative(other, both) > 1e-4
    if place == "state":
        later = edit("later", lambda h: 3 * h, after=6)
        turned = [model.run(batch, edits=edits).logits for edits in ([double, later], [later, double])]
        assert torch.equal(*turned) and relative(turned[0], both) > 1e-4


def test_an_edits_key_tells_the_rows_that_it_acts_on():
    one, other = torch.tensor([True, False]), torch.tensor([False, True])
    value = torch.ones(1, 11, 24)
    for make in (
        lambda rows: cut_edges([1], [5], rows={0: rows}),
        lambda rows: cut_attention([1], [5], rows={0: rows}),
        lambda rows: cut_convolution([1], [5], rows={0: rows}),
        lambda rows: replaced("output", value, rows={0: rows.unsqueeze(1).expand(2, 11)}),
    ):
        assert make(one).key == make(one.clone()).key != make(other).key
    assert cut_edges([1], [5], rows={0: one}).key != cut_edges([1], [5], rows={1: one}).key
    assert cut_edges([1], [5], rows={0: one}).key != cut_edges([1], [5]).key
