"""GroupMamba: the model against its definition in a loop, the base model at k = 1, its matrices, streams, and the
memory of a forward pass."""

from __future__ import annotations

import copy
from dataclasses import replace

import pandas as pd
import pytest
import torch
from exhaustive import in_turns
from loud import TrueFloat64, loud
from torch import nn
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

import ssmscope
from ssmscope import ops
from ssmscope.core.mixers import adapter_for, fast_scan, mixers
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.layers import mamba, mamba2
from ssmscope.zoo import groupmamba

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=4, expand=2, conv_kernel=3, state_size=3)
MAMBA = dict(**SIZES, time_step_rank=2)
MAMBA2 = dict(**SIZES, num_heads=4, head_dim=8, n_groups=2, chunk_size=8)
GROUPED = {
    "mamba": lambda **options: groupmamba.GroupMambaForCausalLM(groupmamba.GroupMambaConfig(**MAMBA, **options)),
    "mamba2": lambda **options: groupmamba.GroupMamba2ForCausalLM(groupmamba.GroupMamba2Config(**MAMBA2, **options)),
}
BASE_MODELS = {
    "mamba": (mamba, lambda: MambaForCausalLM(MambaConfig(**MAMBA))),
    "mamba2": (mamba2, lambda: Mamba2ForCausalLM(Mamba2Config(**MAMBA2))),
}
BASES = pytest.mark.parametrize("base", list(GROUPED))
IDS = [[3, 9, 17, 2, 40, 5, 6, 11, 3], [7, 8, 9], [1, 2, 3, 4, 5]]


def noisy(model):
    """The model, loud, with random attention that is neither even nor on one state only."""
    for name, parameter in model.named_parameters():
        if ".attention." in name:
            nn.init.normal_(parameter, std=0.3 if name.endswith("W_V") else 0.15)
    return loud(model)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


# ---- the definition


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


def attend_by_hand(W, own, window, *, scaled=True, query_from_last=True, with_value=True) -> torch.Tensor:
    """Σ_j softmax_j(q · k_j / √N) v_j for one token, a channel at a time (GroupMamba, Eq. 7): (batch, channels, N)."""
    batch, channels, N = own.shape
    attended = torch.empty_like(own)
    for row in range(batch):
        for channel in range(channels):
            h = [state[row, channel] for state in window]
            q_of = own[row, channel] if query_from_last else h[0]
            if len(h) == 1 or W.W_Q is None:
                alpha = torch.full((len(h),), 1 / len(h), dtype=own.dtype)
            else:
                scores = [(W.W_Q @ q_of) @ (W.W_K @ one) for one in h]
                alpha = torch.softmax(torch.stack(scores) / (N**0.5 if scaled else 1), 0)
            values = [W.W_V @ one if with_value else one for one in h]
            attended[row, channel] = sum(a * v for a, v in zip(alpha, values))
    return attended


def group(index: int, k: int) -> range:
    """The modules whose states module `index` attends to."""
    return range(max(0, index - k + 1), index + 1)


def by_hand(model, ids, k: int, base, *, window=group, **wrong) -> torch.Tensor:
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
            seen = [states[j][t] for j in window(index, k)]
            h = states[index][t]
            if k > 1:
                h = attend_by_hand(block.mixer.attention, h, seen, **wrong)
            y.append((c[:, t] * h).sum(-1).view(batch, heads, width) + D * r.x[:, t])
        scanned = ops.Scan(torch.stack(y, 1), r.x, None)
        hidden = hidden + base.FORM.output(block.mixer, layer, (scanned,))
    return model.backbone.norm_f(hidden)


WRONG_EQUATIONS = {
    "one state too many": dict(window=lambda index, k: range(max(0, index - k), index + 1)),
    "one state too few": dict(window=lambda index, k: range(max(0, index - k + 2), index + 1)),
    "groups that do not slide": dict(window=lambda index, k: range(index // k * k, index + 1)),
    "no scale": dict(scaled=False),
    "query from a neighbour": dict(query_from_last=False),
    "no W_V": dict(with_value=False),
}


def double_model(base: str, **options):
    torch.manual_seed(0)
    return noisy(GROUPED[base](**options)).double(), torch.tensor([IDS[0], IDS[0][::-1]])


@pytest.mark.parametrize(("base", "k"), in_turns(GROUPED, [1, 2, 3, 4]))
def test_the_model_is_its_definition(base, k, monkeypatch):
    model, ids = double_model(base, k=k)
    with torch.no_grad(), TrueFloat64():
        expected = by_hand(model, ids, k, BASE_MODELS[base][0])
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
        expected = by_hand(model, ids, k, BASE_MODELS[base][0])
        assert relative(model.backbone(ids).last_hidden_state, expected) < 1e-11
        trace = Model(model).trace(ids=ids.tolist())
        for number, (mixer, linearized) in enumerate(zip(mixers(model), trace.linearized, strict=True)):
            found = linearized.matvec(linearized.u) + linearized.bias
            assert relative(found, groupmamba.output(mixer, trace.layers[number])) < 1e-9
            for path in linearized.paths[: min(k, number + 1) if number else 0]:
                torch.testing.assert_close(path.weight, torch.full_like(path.weight, 1 / min(k, number + 1)))
    model.config.save_pretrained(tmp_path)
    assert type(model.config).from_pretrained(tmp_path).cross_attention is False


@pytest.mark.parametrize(("mistake", "base"), in_turns(WRONG_EQUATIONS, GROUPED))
def test_a_wrong_definition_is_seen(base, mistake):
    model, ids = double_model(base, k=2)
    with torch.no_grad(), TrueFloat64():
        own = model.backbone(ids).last_hidden_state
        assert relative(by_hand(model, ids, 2, BASE_MODELS[base][0], **WRONG_EQUATIONS[mistake]), own) > 1e-3


@BASES
def test_gradients_are_those_of_the_definition(base, monkeypatch):
    monkeypatch.setattr(groupmamba, "MAX_CPU_STATE_NUMBERS", 2 * 32 * 3 * 4)
    model, ids = double_model(base, k=3)
    weights = [p for n, p in model.named_parameters() if "lm_head" not in n]
    target = torch.randn(2, 9, 16).double()
    with TrueFloat64():
        found = torch.autograd.grad((model.backbone(ids).last_hidden_state * target).sum(), weights)
        expected = torch.autograd.grad((by_hand(model, ids, 3, BASE_MODELS[base][0]) * target).sum(), weights)
    for a, b in zip(found, expected):
        assert relative(a, b) < 1e-9


@BASES
def test_one_module_alone_is_the_base_model(base):
    torch.manual_seed(0)
    plain = loud(BASE_MODELS[base][1]())
    grouped = GROUPED[base](k=1)
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
def test_a_module_that_keeps_its_own_state_is_the_base_models(base):
    """This holds for W_V = 1 and no other states to attend to, and not with others."""
    mixer = mixers(double_model(base, k=4)[0])[3]
    u = torch.randn(2, 9, 64).double()
    with torch.no_grad():
        nn.init.eye_(mixer.attention.W_V)
        expected = BASE_MODELS[base][0].FORM.output(mixer, BASE_MODELS[base][0].compute_terms(mixer, u[..., -16:]))
        assert relative(mixer(u[..., -16:]), expected) < 1e-12
        assert relative(mixer(u), expected) > 1e-2


# ---- what a trace holds


@BASES
def test_the_layer_is_a_matrix(base):
    """Σ_j diag(α_j) [C^l W_V (∏ Ā^j) B̄^j] x^j + D x^l, from the trace alone."""
    model, ids = double_model(base, k=3)
    trace = Model(model).trace(ids=ids.tolist())
    layer, mixer = trace.layers[3], mixers(model)[3]
    r = layer.recurrence
    batch, length, heads, width, _ = r.shape
    with torch.no_grad():
        alpha = groupmamba.attend(mixer, layer).weights
        assert alpha.shape == (batch, length, heads, width, 3)
        torch.testing.assert_close(alpha.sum(-1), torch.ones_like(alpha[..., 0]))
        assert alpha.std(dim=1).mean() > 1e-2  # neither even nor the same for every token
        y = (r.D if r.D.ndim == 2 else r.D[:, None]) * r.x
        for j, one in enumerate((r, *layer.borrowed)):
            b, c = (t.repeat_interleave(heads // r.b.shape[2], 2) for t in (one.b, one.c))
            L = torch.zeros(batch, heads, length, length).double()
            for t in range(length):
                for s in range(t + 1):
                    kept = one.log_decay(s + 1, t + 1).sum(1).exp()
                    L[:, :, t, s] = (c[:, t] * kept * one.delta[:, s, :, None] * b[:, s]).sum(-1)
            y = y + alpha[..., j] * torch.einsum("bhts,bshp->bthp", L, one.x)
        made = BASE_MODELS[base][0].FORM.output(mixer, layer, (ops.Scan(y, r.x, None),))
        assert relative(made, groupmamba.output(mixer, layer)) < 1e-11


@BASES
def test_retention_is_that_of_the_own_module(base):
    model, ids = double_model(base, k=2)
    trace = Model(model).trace(ids=ids.tolist())
    for index, layer in enumerate(trace.layers):
        own = BASE_MODELS[base][0].compute_terms(mixers(model)[index], layer.u[..., -16:])
        torch.testing.assert_close(layer.retention(), own.retention())
        for one, other in zip(layer.borrowed, [trace.layers[index - 1]]):
            torch.testing.assert_close(one.log_decay(), other.recurrence.log_decay())


@BASES
def test_fewer_inputs_are_those_of_the_nearest_modules(base):
    model, _ = double_model(base, k=3)
    u = torch.randn(2, 9, 32).double()
    with torch.no_grad():
        layer = groupmamba.compute_terms(mixers(model)[3], u)
        wide = groupmamba.compute_terms(mixers(model)[3], torch.cat([u, u[..., :16]], dim=-1))
        nearest = BASE_MODELS[base][0].compute_terms(mixers(model)[2], u[..., :16]).recurrence
        parts = [groupmamba.linearized(mixers(model)[3], each).parts for each in (layer, wide)]
    assert parts == [("own", "1 before"), ("own", "2 before", "1 before")]
    (one,) = layer.borrowed
    assert torch.equal(one.delta, nearest.delta) and torch.equal(one.x, nearest.x)
    assert one.D is None and layer.recurrence.D is not None  # the skip is the own module's, once
    assert one.c is layer.recurrence.c


@BASES
def test_weights_are_a_softmax_over_states(base, monkeypatch):
    """softmax_j(qᵀ W_K h^j / √N) from the states themselves (Eq. 7), computed in chunks of four tokens as in one."""
    model, ids = double_model(base, k=3)
    layer, mixer = Model(model).trace(ids=ids.tolist()).layers[3], mixers(model)[3]
    batch, length, _, _, state = layer.recurrence.shape
    states = torch.stack([ops.states(r, range(length)) for r in (layer.recurrence, *layer.borrowed)], dim=-1)
    query = torch.einsum("on,bthpn->bthpo", mixer.attention.W_Q, states[..., 0])
    keys = torch.einsum("on,bthpnj->bthpoj", mixer.attention.W_K, states)
    expected = (torch.einsum("bthpo,bthpoj->bthpj", query, keys) / state**0.5).softmax(-1)
    whole = groupmamba.attend(mixer, layer).weights
    torch.testing.assert_close(whole, expected)
    monkeypatch.setattr(groupmamba, "MAX_CPU_STATE_NUMBERS", 4 * states[:, 0, ..., 0].numel())
    torch.testing.assert_close(groupmamba.attend(mixer, layer).weights, expected)


# ---- streams


@BASES
def test_a_stream_in_segments_is_one_pass(base):
    model = Model(double_model(base, k=3)[0])
    ids = torch.randint(0, 50, (300,)).tolist()

    def in_segments(change=lambda state: state):
        states, parts = None, []
        for start, stop in ((0, 1), (1, 3), (3, 170), (170, 300)):
            run = model.run(model.encode(ids=ids[start:stop]), states)
            states = [change(state) for state in run.states]
            parts.append(run.logits)
        return torch.cat(parts, dim=1)

    def borrowing(state, change):
        return replace(state, before=tuple(map(change, state.before)))

    with TrueFloat64():
        whole = model.run(model.encode(ids=ids)).logits
        assert relative(in_segments(), whole) < 1e-10
        wrong = {
            "own": lambda s: replace(s, ssm=(torch.zeros_like(s.ssm[0]),)),
            "convolution": lambda s: replace(s, conv=torch.zeros_like(s.conv)),
            "borrowed": lambda s: borrowing(s, lambda one: replace(one, ssm=(torch.zeros_like(one.ssm[0]),))),
            "borrowed convolution": lambda s: borrowing(s, lambda one: replace(one, conv=torch.zeros_like(one.conv))),
        }
        for part, change in wrong.items():
            assert relative(in_segments(change), whole) > 1e-4, part


def test_a_state_and_an_input_of_different_groups_are_refused():
    model = Model(double_model("mamba", k=3)[0])
    states = model.run(model.encode(ids=[1, 2, 3])).states
    mixer = model.mixers[3]
    with pytest.raises(InputError, match="state is that of 3 modules, the input that of 1"):
        groupmamba.compute_terms(mixer, torch.randn(1, 4, 16).double(), None, states[3])
    for width in (15, 64):
        with pytest.raises(InputError, match="1 to 3 modules of width 16"):
            groupmamba.compute_terms(mixer, torch.randn(1, 4, width).double())


# ---- the memory of a forward pass


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
    with pytest.raises(InputError, match="call the model, not the block alone"):
        model.backbone.layers[1](torch.randn(1, 4, 16).double())
    with pytest.raises(InputError, match="has no cache"):
        model.backbone(ids, cache_params=object())
    with pytest.raises(InputError, match="has no cache"):
        model.backbone(ids, cache=object())  # as transformers says from 5.24 on
    with pytest.raises(ValueError, match="support .* checkpointing"):
        model.gradient_checkpointing_enable()
    memory = model.backbone.memory
    with memory.opened(), pytest.raises(InputError, match="attend to each other's states: load .* on one device"):
        memory.group(torch.zeros(1, 2, 16), 2)
        memory.group(torch.zeros(1, 2, 16, device="meta"), 2)


# ---- as transformers models


@BASES
def test_the_attention_is_learnt(base):
    torch.manual_seed(0)
    model = GROUPED[base](k=2).train()
    ids = torch.randint(0, 50, (2, 12))
    with fast_scan(model):
        model(ids, labels=ids).loss.backward()
    for index, mixer in enumerate(mixers(model)):
        assert torch.equal(mixer.attention.W_V, torch.eye(3))
        assert mixer.attention.W_V.grad.norm() > 0
        assert (mixer.attention.W_Q is None) == (mixer.attention.W_K is None) == (index == 0)
        if index:
            assert mixer.attention.W_Q.grad.norm() > 0 and mixer.attention.W_K.grad.norm() > 0
    names = [name for name, _ in model.named_parameters()]
    assert not [name for name in names if ".before" in name] and len(names) == len(set(names))


@BASES
def test_a_base_models_weights_can_be_loaded(base, tmp_path):
    torch.manual_seed(0)
    plain = loud(BASE_MODELS[base][1]())
    plain.save_pretrained(tmp_path)
    kind = type(GROUPED[base]())
    config = kind.config_class.from_dict({**plain.config.to_dict(), "k": 4})
    grouped = kind.from_pretrained(tmp_path, config=config)
    weights = grouped.state_dict()
    for name, weight in plain.state_dict().items():
        assert torch.equal(weights[name], weight), name
    for mixer in mixers(grouped):
        assert torch.equal(mixer.attention.W_V, torch.eye(3)) and type(adapter_for(mixer)) is type(groupmamba)
        assert mixer.attention.W_Q is None or 0.1 < mixer.attention.W_Q.std() < 2
    assert len(mixers(grouped)[3].before) == 3


@pytest.mark.parametrize("k", [0, -1, 5, 1.5, True, "2"])
def test_impossible_groups_are_refused(k):
    for config, sizes in ((groupmamba.GroupMambaConfig, MAMBA), (groupmamba.GroupMamba2Config, MAMBA2)):
        with pytest.raises(InputError, match="integer from 1 .* number of layers, here 4"):
            config(**sizes, k=k)
