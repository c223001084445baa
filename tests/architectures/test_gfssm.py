"""GFSSM: the layer against its definition and its matrices, the base model at Q = 1, streaming, and the effects of
grouping and the filter."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from loud import TrueFloat64, loud
from torch import nn
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

from ssmscope import ops
from ssmscope.core.mixers import adapter_for, fast_scan, mixers
from ssmscope.core.model import Model
from ssmscope.errors import InputError
from ssmscope.layers import mamba, mamba2
from ssmscope.zoo import gfssm

SIZES = dict(vocab_size=50, hidden_size=16, num_hidden_layers=2, expand=2, conv_kernel=3, state_size=3)
MAMBA = dict(**SIZES, time_step_rank=2)
MAMBA2 = dict(**SIZES, num_heads=4, head_dim=8, n_groups=2, chunk_size=8)
GROUPED = {
    "mamba": lambda **options: gfssm.GFSSMMambaForCausalLM(gfssm.GFSSMMambaConfig(**MAMBA, **options)),
    "mamba2": lambda **options: gfssm.GFSSMForCausalLM(gfssm.GFSSMConfig(**MAMBA2, **options)),
}
BASE_MODELS = {
    "mamba": (mamba, lambda: MambaForCausalLM(MambaConfig(**MAMBA))),
    "mamba2": (mamba2, lambda: Mamba2ForCausalLM(Mamba2Config(**MAMBA2))),
}
BASES = pytest.mark.parametrize("base", list(GROUPED))


def noisy(model):
    """The model, loud, with a random filter and random prompts."""
    for name, parameter in model.named_parameters():
        if ".grouping." in name:
            nn.init.normal_(parameter, std=0.5)
    return loud(model)


def first_layer(base: str, **options):
    """The first mixer of a random model in float64 with an input, and its terms and those of its base."""
    torch.manual_seed(0)
    mixer = mixers(noisy(GROUPED[base](**options)).double())[0]
    u = torch.randn(2, 19, 16).double()
    with torch.no_grad():
        return mixer, gfssm.compute_terms(mixer, u), BASE_MODELS[base][0].compute_terms(mixer, u).recurrence


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def summed(layer) -> torch.Tensor:
    return sum(s.y for s in layer.scan())


def by_hand(mixer, r: ops.Recurrence, groups: int, *, own_turn: bool = True) -> torch.Tensor:
    """The outputs of a layer step by step, from the terms of its base (the paper's equations, in a loop)."""
    batch, length, heads, width, state = r.shape
    share = heads // r.b.shape[2]
    b, c = (t.repeat_interleave(share, 2) for t in (r.b, r.c))
    a, k = r.log_decay().exp(), mixer.grouping.fir[0]
    D = r.D if r.D.ndim == 2 else r.D[:, None]
    h = [mixer.grouping.prompt[i].expand(batch, -1, -1, -1) for i in range(groups)]
    outputs = []
    for t in range(length):
        s = sum(k[j] * r.x[:, t - j] for j in range(len(k)) if j <= t)
        i = t % groups if own_turn else 0
        h[i] = a[:, t, :, None] * h[i] + r.delta[:, t, :, None, None] * s[..., None] * b[:, t, :, None]
        outputs.append((sum(h) * c[:, t, :, None]).sum(-1) + D * s)
    return torch.stack(outputs, 1)


@BASES
@pytest.mark.parametrize("groups, taps", [(1, 4), (2, 4), (3, 2), (4, 1)])
def test_the_layer_is_its_definition(base, groups, taps):
    mixer, layer, recurrence = first_layer(base, state_groups=groups, fir_taps=taps)
    with torch.no_grad():
        expected = by_hand(mixer, recurrence, groups)
        assert relative(summed(layer), expected) < 1e-12
        if groups > 1:
            assert relative(by_hand(mixer, recurrence, groups, own_turn=False), expected) > 1e-2


def decay_between(log_a: torch.Tensor, t: int, s: int, groups: int, i: int) -> torch.Tensor:
    """∏ Ā_r over s < r ≤ t with r ≡ i mod Q, (batch, heads, state or 1)."""
    return log_a[:, [r for r in range(s + 1, t + 1) if r % groups == i]].sum(1).exp()


@BASES
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_the_layer_is_a_matrix(base, groups):
    """y = (Σ_j k_j L_j) x + Σ_i C_tᵀ (∏_{r≤t, r≡i} Ā_r) h_{i,0}, and no part of it can be left out."""
    mixer, layer, r = first_layer(base, state_groups=groups)
    batch, length, heads, width, state = r.shape
    b, c = (t.repeat_interleave(heads // r.b.shape[2], 2) for t in (r.b, r.c))
    log_a, D = r.log_decay(), r.D
    L = torch.zeros(batch, heads, length, length).double()
    sink = torch.zeros(batch, length, heads, width).double()
    with torch.no_grad():
        for t in range(length):
            for s in range(t + 1):
                kept = decay_between(log_a, t, s, groups, s % groups)
                L[:, :, t, s] = (c[:, t] * kept * r.delta[:, s, :, None] * b[:, s]).sum(-1)
            for i in range(groups):
                kept = decay_between(log_a, t, -1, groups, i)
                sink[:, t] += ((c[:, t] * kept)[:, :, None] * mixer.grouping.prompt[i]).sum(-1)
        L += torch.diag_embed(D[:, None].expand(heads, length))
        Z = torch.diag(torch.ones(length - 1), -1).double()
        k = mixer.grouping.fir[0]
        filtered = sum(k[j] * L @ torch.linalg.matrix_power(Z, j) for j in range(len(k)))
        without = torch.einsum("bhts,bshp->bthp", filtered, r.x)
        y = summed(layer)
        assert relative(without + sink, y) < 1e-12
        assert relative(without, y) > 1e-3
        assert relative(torch.einsum("bhts,bshp->bthp", k[0] * L, r.x) + sink, y) > 1e-2


@BASES
def test_one_group_without_filter_and_prompt_is_the_base_model(base):
    torch.manual_seed(0)
    plain = loud(BASE_MODELS[base][1]())
    grouped = GROUPED[base](state_groups=1)
    missing, unexpected = grouped.load_state_dict(plain.state_dict(), strict=False)
    assert {name.split(".grouping.")[-1] for name in missing} == {"fir", "prompt"} and not unexpected
    grouped, plain = Model(grouped), Model(plain)
    batch = grouped.encode(ids=[[3, 9, 17, 2, 40, 5, 6], [7, 8, 9]])
    assert torch.equal(grouped.logits(batch), plain.logits(batch))
    trace = plain.trace(batch)
    torch.testing.assert_close(grouped.trace(batch).retention, trace.retention, rtol=0, atol=0, equal_nan=True)
    for change in ("fir", "prompt"):
        with torch.no_grad():
            parameter = nn.init.ones_(getattr(grouped.mixers[0].grouping, change))
        assert relative(grouped.logits(batch)[batch.mask], plain.logits(batch)[batch.mask]) > 1e-3
        nn.init.zeros_(parameter) if change == "prompt" else nn.init.eye_(parameter)


@BASES
def test_retention_is_the_decay_of_the_group_that_a_token_steps(base):
    """Retention is that of the base's gates for any number of groups: held states do not count."""
    mixer, layer, recurrence = first_layer(base, state_groups=3)
    with torch.no_grad():
        torch.testing.assert_close(layer.retention(), ops.retention(recurrence))
        assert (layer.retention() < 0.99).all()
        for group, one in enumerate(layer.recurrences):
            own = torch.arange(19) % 3 == group
            torch.testing.assert_close(one.log_decay()[:, own], recurrence.log_decay()[:, own])
            assert (one.log_decay()[:, ~own] == 0).all() and (one.written[:, ~own] == 0).all()


def test_turns_are_counted_over_real_positions():
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1]]).bool()
    turn = gfssm.turns(mask, 3, 5, 3)
    assert [turn[row][mask[row]].tolist() for row in range(3)] == [[0, 1, 2, 0, 1], [0, 1], [0, 1, 2]]
    assert gfssm.turns(None, 2, 5, 3).tolist() == [[0, 1, 2, 0, 1]] * 2


# ---- streams


def in_segments(model: Model, ids: list[int], cuts: list[int], change=lambda state: state) -> torch.Tensor:
    states, parts = None, []
    for start, stop in zip([0, *cuts], [*cuts, len(ids)]):
        run = model.run(model.encode(ids=ids[start:stop]), states)
        states = [change(state) for state in run.states]
        parts.append(run.logits)
    return torch.cat(parts, dim=1)


def forgets_phase(state: gfssm.GroupedState) -> gfssm.GroupedState:
    return replace(state, ssm=(*state.ssm[1:], state.ssm[0]))


@pytest.mark.parametrize("base, groups", [("mamba", 2), ("mamba2", 2), ("mamba2", 3)])
def test_a_long_stream_in_segments_is_one_pass(base, groups):
    torch.manual_seed(0)
    model = Model(noisy(GROUPED[base](state_groups=groups)).double())
    ids = torch.randint(0, 50, (3000,)).tolist()
    cuts = [1, 3, 1000, 1001, 2333]
    with TrueFloat64():
        whole = model.run(model.encode(ids=ids)).logits
        assert relative(in_segments(model, ids, cuts), whole) < 1e-10


def test_every_part_of_the_state_is_needed():
    torch.manual_seed(0)
    model = Model(noisy(GROUPED["mamba2"](state_groups=3)).double())
    ids = torch.randint(0, 50, (40,)).tolist()
    wrong = {
        "phase": forgets_phase,
        "filter": lambda state: replace(state, fir=torch.zeros_like(state.fir)),
        "convolution": lambda state: replace(state, conv=torch.zeros_like(state.conv)),
        "groups": lambda state: replace(state, ssm=tuple(map(torch.zeros_like, state.ssm))),
    }
    with TrueFloat64():
        whole = model.run(model.encode(ids=ids)).logits
        assert relative(in_segments(model, ids, [16, 23]), whole) < 1e-12
        for part, change in wrong.items():
            assert relative(in_segments(model, ids, [16, 23], change), whole) > 1e-3, part


def test_every_row_of_a_padded_batch_keeps_its_own_phase():
    torch.manual_seed(0)
    model = Model(noisy(GROUPED["mamba2"](state_groups=3)))
    texts = [torch.randint(0, 50, (9,)).tolist() for _ in range(4)]
    cuts = [5, 1, 3, 4]
    first = model.run(model.encode(ids=[text[:cut] for text, cut in zip(texts, cuts)]))
    second = model.run(model.encode(ids=[text[cut:] for text, cut in zip(texts, cuts)]), first.states)
    third = model.run(model.encode(ids=[[7, 8]] * 4), second.states)
    for row, (text, cut) in enumerate(zip(texts, cuts)):
        whole = model.run(model.encode(ids=[*text, 7, 8])).logits[0]
        parts = (first.logits[row, :cut], second.logits[row, : 9 - cut], third.logits[row])
        assert relative(torch.cat(parts), whole) < 1e-5
    alone = model.run(model.encode(ids=texts[1])).states[0].ssm
    assert all(relative(two[1], one[0]) < 1e-5 for one, two in zip(alone, second.states[0].ssm))


# ---- what grouping and the filter do


def final_states(growth: float, steps: int, groups: int, dtype: torch.dtype) -> torch.Tensor:
    """The states (groups, …) after an impulse at t = 0 and steps of a constant transition exp(`growth`)."""
    x = torch.zeros(1, steps, 1, 1, dtype=dtype)
    x[:, 0] = 1
    ones = torch.ones(1, steps, 1, 1, dtype=dtype)
    A = torch.full((1, 1), growth, dtype=dtype)
    plain = ops.Recurrence(x=x, b=ones, c=ones, delta=ones[..., 0], A=A)
    turn = gfssm.turns(None, 1, steps, groups)
    return torch.stack([ops.scan(r).state for r in gfssm.grouped(plain, turn, groups)])


def test_two_groups_survive_1000_steps_on_which_the_plain_recurrence_overflows():
    """Grouping divides the exponent of growth by Q. It does not bound what grows: the states still do, more slowly."""
    assert final_states(0.1, 1000, 1, torch.float32).isinf().any()
    assert final_states(0.1, 1000, 2, torch.float32).isfinite().all()
    norms = {
        (groups, steps): final_states(0.1, steps, groups, torch.float64).norm().log().item()
        for groups in (1, 2, 4)
        for steps in (500, 1000)
    }
    for groups in (1, 2, 4):
        for steps in (500, 1000):  # the group of t = 0 makes steps / Q steps, the first of which writes
            assert norms[groups, steps] == pytest.approx(0.1 * (steps / groups - 1), rel=1e-9)
        assert norms[groups, 1000] > norms[groups, 500] + 0.1 * 500 / groups - 1e-6


def test_states_are_bounded_with_and_without_groups_where_the_transition_decays():
    """‖h_i‖ ≤ max ‖Δ B s‖ / (1 − max a) for every group at every t; and memory of a token lasts Q times as long."""
    torch.manual_seed(0)
    steps, decay = 1000, 0.98
    x, b = torch.rand(1, steps, 1, 1).double(), torch.ones(1, steps, 1, 1).double()
    r = ops.Recurrence(x=x, b=b, c=b, delta=b[..., 0], A=torch.full((1, 1), math.log(decay)).double())
    for groups in (1, 2):
        for one in gfssm.grouped(r, gfssm.turns(None, 1, steps, groups), groups):
            assert ops.states(one, range(0, steps, 10)).abs().max() < x.max() / (1 - decay)
    memory = [final_states(math.log(decay), 201, groups, torch.float64).max().item() for groups in (1, 2)]
    assert memory == pytest.approx([decay**200, decay**100])


# ---- as transformers models


@BASES
def test_groups_are_learnt(base):
    torch.manual_seed(0)
    model = GROUPED[base](state_groups=3).train()
    ids = torch.randint(0, 50, (2, 12))
    with fast_scan(model):
        model(ids, labels=ids).loss.backward()
    for mixer in mixers(model):
        assert mixer.grouping.fir.tolist() == [[1, 0, 0, 0]] and not mixer.grouping.prompt.any()
        assert (mixer.grouping.fir.grad != 0).all()
        assert mixer.grouping.prompt.grad.flatten(1).norm(dim=1).min() > 0


@BASES
def test_a_base_models_weights_can_be_loaded(base, tmp_path):
    torch.manual_seed(0)
    plain = loud(BASE_MODELS[base][1]())
    plain.save_pretrained(tmp_path)
    kind = type(GROUPED[base]())
    config = kind.config_class.from_dict({**plain.config.to_dict(), "state_groups": 2})
    grouped = kind.from_pretrained(tmp_path, config=config)
    weights = grouped.state_dict()
    for name, weight in plain.state_dict().items():
        assert torch.equal(weights[name], weight), name
    for mixer in mixers(grouped):
        assert mixer.grouping.fir.tolist() == [[1, 0, 0, 0]] and not mixer.grouping.prompt.any()
    assert type(adapter_for(mixers(grouped)[0])) is type(gfssm)


@pytest.mark.parametrize("options", [{"state_groups": 0}, {"fir_taps": 0}, {"state_groups": 1.5}, {"fir_taps": True}])
def test_impossible_sizes_are_refused(options):
    with pytest.raises(InputError, match=f"{next(iter(options))} .* give one from 1 on"):
        gfssm.GFSSMConfig(**MAMBA2, **options)
