"""GroupMamba: the model against its definition in a loop, the base model at k = 1, and the memory of a forward pass."""

import copy

import pandas as pd
import pytest
import torch
from bases import ADAPTERS, BASES, MAMBA, MAMBA2, base_model, check_base_weights
from examples import relative
from exhaustive import in_turns
from loud import TrueFloat64, loud
from refusals import refuses
from torch import nn
import ssmscope
from ssmscope import ops
from ssmscope.core.mixers import adapter_for, mixers
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.zoo import groupmamba

DEEP = dict(num_hidden_layers=4, state_size=3, n_groups=2)
FIRST, SECOND = {**MAMBA, **DEEP}, {**MAMBA2, **DEEP}
GROUPED = {
    "mamba": lambda **options: groupmamba.GroupMambaForCausalLM(groupmamba.GroupMambaConfig(**{**FIRST, **options})),
    "mamba2": lambda **options: groupmamba.GroupMamba2ForCausalLM(
        groupmamba.GroupMamba2Config(**{**SECOND, **options})
    ),
}
IDS = [[3, 9, 17, 2, 40, 5, 6, 11, 3], [7, 8, 9], [1, 2, 3, 4, 5]]


def noisy(model):
    """The model, loud, with random attention that is neither even nor on one state only."""
    for name, parameter in model.named_parameters():
        if ".attention." in name:
            nn.init.normal_(parameter, std=0.3 if name.endswith("W_V") else 0.15)
    return loud(model)


def states_by_hand(r: ops.Recurrence) -> list[torch.Tensor]:
    """h_t of every t, (batch, channels, state): channels are heads and their widths."""
    batch, length, heads, width, state = r.shape
    b = r.b.repeat_interleave(heads // r.b.shape[2], 2)
    h, found = torch.zeros(batch, heads, width, state, dtype=r.x.dtype), []
    for t in range(length):
        h = torch.exp(r.delta[:, t, :, None] * r.A)[:, :, None] * h
        h = h + r.delta[:, t, :, None, None] * r.x[:, t, :, :, None] * b[:, t, :, None]
        found.append(h.flatten(1, 2))
    return found


def attend_by_hand(W, own, window) -> torch.Tensor:
    """Σ_j softmax_j(q · k_j / √N) v_j for one token, a channel at a time (GroupMamba, Eq. 7): (batch, channels, N)."""
    batch, channels, N = own.shape
    attended = torch.empty_like(own)
    for row in range(batch):
        for channel in range(channels):
            h = [state[row, channel] for state in window]
            if len(h) == 1 or W.W_Q is None:
                alpha = torch.full((len(h),), 1 / len(h), dtype=own.dtype)
            else:
                scores = [(W.W_Q @ own[row, channel]) @ (W.W_K @ one) for one in h]
                alpha = torch.softmax(torch.stack(scores) / N**0.5, 0)
            attended[row, channel] = sum(a * (W.W_V @ one) for a, one in zip(alpha, h))
    return attended


def by_hand(model, ids, k: int, base) -> torch.Tensor:
    """The backbone's last hidden state; the equations in a loop, only gates and projections are the base's."""
    hidden = model.backbone.embeddings(ids)
    states: list[list[torch.Tensor]] = []
    for index, block in enumerate(model.backbone.layers):
        layer = base.compute_terms(block.mixer, block.norm(hidden))
        r = layer.recurrence
        batch, length, heads, width, _ = r.shape
        c = r.c.repeat_interleave(heads // r.c.shape[2], 2).repeat_interleave(width, 2)
        D = r.D if r.D.ndim == 2 else r.D[:, None].expand(heads, width)
        states.append(states_by_hand(r))
        y = []
        for t in range(length):
            seen = [states[j][t] for j in range(max(0, index - k + 1), index + 1)]
            h = states[index][t]
            if k > 1:
                h = attend_by_hand(block.mixer.attention, h, seen)
            y.append((c[:, t] * h).sum(-1).view(batch, heads, width) + D * r.x[:, t])
        scanned = ops.Scan(torch.stack(y, 1), r.x, None)
        hidden = hidden + base.FORM.output(block.mixer, layer, (scanned,))
    return model.backbone.norm_f(hidden)


def double_model(base: str, **options):
    torch.manual_seed(0)
    return noisy(GROUPED[base](**options)).double(), torch.tensor([IDS[0], IDS[0][::-1]])


@pytest.mark.parametrize(("base", "k"), in_turns(GROUPED, [1, 2, 3, 4]))
def test_the_model_is_its_definition(base, k, monkeypatch):
    model, ids = double_model(base, k=k)
    with torch.no_grad(), TrueFloat64():
        expected = by_hand(model, ids, k, ADAPTERS[base])
        assert relative(model.backbone(ids).last_hidden_state, expected) < 1e-11
        for at_once in (1, 2 * 32 * 3 * 4):  # one position at a time; four
            monkeypatch.setattr(groupmamba, "MAX_CPU_STATE_NUMBERS", at_once)
            assert relative(model.backbone(ids).last_hidden_state, expected) < 1e-11


@BASES
@pytest.mark.parametrize("k", [2, 3])
def test_without_attention_the_states_of_a_group_are_averaged(base, k, tmp_path):
    model, ids = double_model(base, k=k, cross_attention=False)
    assert not [name for name, _ in model.named_parameters() if name.endswith(("W_Q", "W_K"))]
    with torch.no_grad(), TrueFloat64():
        expected = by_hand(model, ids, k, ADAPTERS[base])
        assert relative(model.backbone(ids).last_hidden_state, expected) < 1e-11
        trace = Model(model).trace(ids=ids.tolist())
        for number, (mixer, linearized) in enumerate(zip(mixers(model), trace.linearized, strict=True)):
            found = linearized.matvec(linearized.u) + linearized.bias
            assert relative(found, groupmamba.output(mixer, trace.layers[number])) < 1e-9
            for path in linearized.paths[: min(k, number + 1) if number else 0]:
                torch.testing.assert_close(path.weight, torch.full_like(path.weight, 1 / min(k, number + 1)))
    model.config.save_pretrained(tmp_path)
    assert type(model.config).from_pretrained(tmp_path).cross_attention is False


@BASES
def test_one_module_alone_is_the_base_model(base):
    plain, grouped = base_model(base, **DEEP), GROUPED[base](k=1)
    grouped.load_state_dict(plain.state_dict())  # no parameter is added
    assert grouped.num_parameters() == plain.num_parameters()
    grouped, plain = Model(grouped), Model(plain)
    batch = grouped.encode(ids=IDS)
    assert torch.equal(grouped.logits(batch), plain.logits(batch))
    ours, theirs = grouped.trace(batch), plain.trace(batch)
    torch.testing.assert_close(ours.retention, theirs.retention, rtol=0, atol=0, equal_nan=True)
    for one, other in zip(ours.linearized, theirs.linearized):
        assert torch.equal(one.matvec(one.u) + one.bias, other.matvec(one.u) + other.bias)
    cut = [
        ssmscope.knockout(each, each.encode(ids=IDS[:1]), from_=["1"], answer=7).to_frame() for each in (grouped, plain)
    ]
    pd.testing.assert_frame_equal(*(frame.drop(columns=["model"], errors="ignore") for frame in cut))
    half = [Model(each.module.bfloat16()) for each in (grouped, plain)]
    assert torch.equal(*(each.logits(each.encode(ids=IDS)) for each in half))
    backbone = half[0].module.backbone
    with backbone.memory.opened():
        assert backbone.layers[0](torch.zeros(1, 2, 16).bfloat16()).dtype == torch.float32


@BASES
def test_fewer_inputs_are_those_of_the_nearest_modules(base):
    model, _ = double_model(base, k=3)
    u = torch.randn(2, 9, 32).double()
    with torch.no_grad():
        layer = groupmamba.compute_terms(mixers(model)[3], u)
        wide = groupmamba.compute_terms(mixers(model)[3], torch.cat([u, u[..., :16]], dim=-1))
        nearest = ADAPTERS[base].compute_terms(mixers(model)[2], u[..., :16]).recurrence
        parts = [groupmamba.linearized(mixers(model)[3], each).parts for each in (layer, wide)]
    assert parts == [("own", "1 before"), ("own", "2 before", "1 before")]
    (one,) = layer.borrowed
    assert torch.equal(one.delta, nearest.delta) and torch.equal(one.x, nearest.x)
    assert one.D is None and layer.recurrence.D is not None  # the skip is the own module's, once
    assert one.c is layer.recurrence.c


def test_a_state_and_an_input_of_different_groups_are_refused():
    model = Model(double_model("mamba", k=3)[0])
    states = model.run(model.encode(ids=[1, 2, 3])).states
    mixer = model.mixers[3]
    with pytest.raises(InputError, match="state is that of 3 modules, the input that of 1"):
        groupmamba.compute_terms(mixer, torch.randn(1, 4, 16).double(), None, states[3])
    for width in (15, 64):
        refuses("1 to 3 modules of width 16", groupmamba.compute_terms, mixer, torch.randn(1, 4, width).double())


@BASES
def test_the_memory_is_empty_after_a_pass_and_after_an_error(base):
    model, ids = double_model(base, k=2)
    with torch.no_grad():
        model(ids)
        assert model.backbone.memory.inputs is None
        held = []

        def fail(module, arguments):
            held.extend(model.backbone.memory.inputs)
            raise RuntimeError("in the middle")

        hook = model.backbone.layers[2].mixer.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            model(ids)
        hook.remove()
        assert len(held) == 2  # no more than a group's
        assert model.backbone.memory.inputs is None


def test_a_copied_model_has_its_own_memory_and_neighbours():
    model, ids = double_model("mamba2", k=2)
    twin = copy.deepcopy(model)
    assert twin.backbone.memory is not model.backbone.memory
    assert all(block.memory is twin.backbone.memory for block in twin.backbone.layers)
    assert mixers(twin)[1].before == (mixers(twin)[0],)
    with torch.no_grad():
        nn.init.ones_(mixers(model)[0].conv1d.weight)
        assert relative(twin(ids).logits, model(ids).logits) > 1e-2


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_what_would_be_wrong_is_refused():
    model, ids = double_model("mamba", k=2)
    refuses("call the model, not the block alone", model.backbone.layers[1], torch.randn(1, 4, 16).double())
    refuses("has no cache", model.backbone, ids, cache_params=object())
    refuses("has no cache", model.backbone, ids, cache=object())  # as transformers says from 5.24 on
    with pytest.raises(ValueError, match="support .* checkpointing"):
        model.gradient_checkpointing_enable()
    memory = model.backbone.memory
    with memory.opened(), pytest.raises(InputError, match="attend to each other's states: load .* on one device"):
        memory.group(torch.zeros(1, 2, 16), 2)
        memory.group(torch.zeros(1, 2, 16, device="meta"), 2)


@BASES
def test_a_base_models_weights_can_be_loaded(base, tmp_path):
    grouped = check_base_weights(type(GROUPED[base]()), base, tmp_path, k=2)
    for index, mixer in enumerate(mixers(grouped)):
        assert torch.equal(mixer.attention.W_V, torch.eye(4)) and type(adapter_for(mixer)) is type(groupmamba)
        assert (mixer.attention.W_Q is None) == (mixer.attention.W_K is None) == (index == 0)
        assert mixer.attention.W_Q is None or 0.1 < mixer.attention.W_Q.std() < 2
    assert mixers(grouped)[1].before == (mixers(grouped)[0],)
    names = [name for name, _ in grouped.named_parameters()]
    assert not [name for name in names if ".before" in name] and len(names) == len(set(names))


@pytest.mark.parametrize("k", [0, -1, 5, 1.5, True, "2"])
def test_impossible_groups_are_refused(k):
    for config, sizes in ((groupmamba.GroupMambaConfig, FIRST), (groupmamba.GroupMamba2Config, SECOND)):
        refuses("integer from 1 .* number of layers, here 4", config, **sizes, k=k)
