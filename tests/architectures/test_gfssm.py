"""GFSSM: the layer against its definition, the base model at Q = 1, and turns; contracts try all else."""

import pytest
import torch
from bases import ADAPTERS, BASES, MAMBA, MAMBA2, base_model, check_base_weights
from examples import relative
from loud import loud
from refusals import refuses
from torch import nn
from ssmscope import ops
from ssmscope.core.mixers import adapter_for, mixers
from ssmscope.core.model import Model
from ssmscope.zoo import gfssm

GROUPED = {
    "mamba": lambda **options: gfssm.GFSSMMambaForCausalLM(gfssm.GFSSMMambaConfig(**{**MAMBA, **options})),
    "mamba2": lambda **options: gfssm.GFSSMForCausalLM(gfssm.GFSSMConfig(**{**MAMBA2, **options})),
}


def by_hand(mixer, r: ops.Recurrence, groups: int) -> torch.Tensor:
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
        i = t % groups
        h[i] = a[:, t, :, None] * h[i] + r.delta[:, t, :, None, None] * s[..., None] * b[:, t, :, None]
        outputs.append((sum(h) * c[:, t, :, None]).sum(-1) + D * s)
    return torch.stack(outputs, 1)


@BASES
@pytest.mark.parametrize("groups, taps", [(1, 4), (2, 4), (3, 2), (4, 1)])
def test_the_layer_is_its_definition(base, groups, taps):
    torch.manual_seed(0)
    model = GROUPED[base](state_groups=groups, fir_taps=taps, n_groups=2)
    for name, parameter in model.named_parameters():
        if ".grouping." in name:
            nn.init.normal_(parameter, std=0.5)
    mixer, u = mixers(loud(model).double())[0], torch.randn(2, 19, 16).double()
    with torch.no_grad():
        layer, recurrence = gfssm.compute_terms(mixer, u), ADAPTERS[base].compute_terms(mixer, u).recurrence
        assert relative(sum(s.y for s in layer.scan()), by_hand(mixer, recurrence, groups)) < 1e-12
    loaded, ids = Model(model), [3, 9, 17, 2, 40, 5, 6, 7, 8]
    whole, first = (loaded.run(loaded.encode(ids=each)) for each in (ids, ids[:4]))
    assert relative(loaded.run(loaded.encode(ids=ids[4:]), first.states).logits, whole.logits[:, 4:]) < 1e-5


@BASES
def test_one_group_without_filter_and_prompt_is_the_base_model(base):
    plain, grouped = base_model(base), GROUPED[base](state_groups=1)
    missing, unexpected = grouped.load_state_dict(plain.state_dict(), strict=False)
    assert {name.split(".grouping.")[-1] for name in missing} == {"fir", "prompt"} and not unexpected
    grouped, plain = Model(grouped), Model(plain)
    batch = grouped.encode(ids=[[3, 9, 17, 2, 40, 5, 6], [7, 8, 9]])
    assert torch.equal(grouped.logits(batch), plain.logits(batch))
    trace = plain.trace(batch)
    torch.testing.assert_close(grouped.trace(batch).retention, trace.retention, rtol=0, atol=0, equal_nan=True)


def test_turns_are_counted_over_real_positions():
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 1, 1, 1]]).bool()
    turn = gfssm.turns(mask, 3, 5, 3)
    assert [turn[row][mask[row]].tolist() for row in range(3)] == [[0, 1, 2, 0, 1], [0, 1], [0, 1, 2]]
    assert gfssm.turns(None, 2, 5, 3).tolist() == [[0, 1, 2, 0, 1]] * 2


@BASES
def test_a_base_models_weights_can_be_loaded(base, tmp_path):
    grouped = check_base_weights(type(GROUPED[base]()), base, tmp_path, state_groups=2)
    for mixer in mixers(grouped):
        assert mixer.grouping.fir.tolist() == [[1, 0, 0, 0]] and not mixer.grouping.prompt.any()
    assert type(adapter_for(mixers(grouped)[0])) is type(gfssm)


@pytest.mark.parametrize("options", [{"state_groups": 0}, {"fir_taps": 0}, {"state_groups": 1.5}, {"fir_taps": True}])
def test_impossible_sizes_are_refused(options):
    refuses(f"{next(iter(options))} .* give one from 1 on", gfssm.GFSSMConfig, **MAMBA2, **options)
