"""Parts that architecture families share."""

from typing import Any

import pytest
import torch
from examples import EXAMPLES, VARIANTS, own_output, random_example, relative
from loud import TrueFloat64, doubled
from refusals import refusal
from torch import nn
from torch.nn.functional import conv1d, pad, silu
from ssmscope.core import forms
from ssmscope.core.mixers import adapter_for, mixers
from ssmscope.core.trace import LayerState, LayerTrace
from ssmscope.errors import InputError
from ssmscope.layers import mamba2, parts
from ssmscope.layers.parts import causal_convolution, mask_padding


@pytest.mark.parametrize("taps", [1, 3, 4])
@pytest.mark.parametrize("with_tail", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_causal_convolution_and_its_gradients(taps, with_tail, with_bias):
    g = torch.Generator().manual_seed(taps)
    x, weight, bias, tail = (
        torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()
        for shape in ((2, 7, 5), (5, 1, taps), (5,), (2, taps - 1, 5))
    )
    inputs = [x, weight, *([bias] if with_bias else []), *([tail] if with_tail and taps > 1 else [])]
    before = tail if with_tail else torch.zeros_like(tail)
    expected = conv1d(torch.cat([before, x], 1).mT, weight, bias if with_bias else None, groups=5).mT
    found = causal_convolution(x, weight, bias if with_bias else None, tail if with_tail else None)
    torch.testing.assert_close(found, expected)
    scale = torch.randn(found.shape, generator=g, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad((found * scale).sum(), inputs), torch.autograd.grad((expected * scale).sum(), inputs)
    ):
        torch.testing.assert_close(a, b)


def test_the_convolution_is_causal():
    x = torch.randn(1, 9, 3)
    changed = x.clone()
    changed[:, 5:] += 1
    weight = torch.randn(3, 1, 4)
    same = causal_convolution(x, weight, None)[:, :5] == causal_convolution(changed, weight, None)[:, :5]
    assert same.all()
    assert torch.equal(
        causal_convolution(x, weight, None), causal_convolution(pad(x, (0, 0, 3, 0)), weight, None)[:, 3:]
    )


def test_hidden_padding_is_zero():
    mask = torch.tensor([[True, False], [True, True]])
    assert mask_padding(torch.ones(2, 2, 3), mask).sum((1, 2)).tolist() == [3, 6]


def of(name: str) -> Any:
    return mixers(random_example(name))[0]


def test_what_a_release_reads_by_weight_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Release 5 of transformers multiplies by weights, and looks activations up by name; our own mixers do not."""
    theirs, ours, others = of("mamba"), of("gfssm-mamba"), of("gated-deltanet")
    for by_weight in (True, False):
        monkeypatch.setattr(parts, "BY_WEIGHT", by_weight)
        assert [parts._by_weight(mixer) for mixer in (theirs, ours, others)] == [by_weight, False, False]
    for mixer in (theirs, ours):
        mixer.activation = "relu"
    assert parts.activation(theirs) is theirs.act and parts.gate_activation(theirs) is theirs.act
    assert parts.activation(theirs, torch.tanh) is torch.tanh
    monkeypatch.setattr(parts, "BY_WEIGHT", True)
    assert isinstance(parts.activation(theirs, torch.tanh), nn.ReLU) and parts.gate_activation(theirs) is silu
    assert parts.activation(ours) is ours.act and parts.gate_activation(ours) is ours.act


@pytest.mark.parametrize("name", ["mamba", "mamba2", "jamba", "zamba", "bamba", "falcon_h1"])
def test_what_the_installed_release_reads_by_weight(name: str) -> None:
    """A mixer that multiplies by the weight of its convolution does not call it."""
    mixer, calls = of(name), []
    mixer.conv1d.register_forward_hook(lambda *called: calls.append(called))
    mixer(torch.randn(1, 5, mixer.hidden_size))
    assert bool(calls) != parts._by_weight(mixer)


def test_hooks_that_a_release_leaves_out_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, refuses in (("mamba", True), ("gfssm-mamba", False)):
        mixer = of(name)
        x, step = torch.randn(1, 5, mixer.intermediate_size), torch.randn(1, 5, mixer.time_step_rank)
        calls = {
            "conv1d": lambda m=mixer, x=x: parts.convolution(m, x),
            "dt_proj": lambda m=mixer, s=step: parts.step_projection(m, s),
        }
        for by_weight in (True, False):
            monkeypatch.setattr(parts, "BY_WEIGHT", by_weight)
            for part, call in calls.items():
                call()
                hook = mixer.get_submodule(part).register_forward_hook(lambda module, args, y: 1.5 * y)
                said = refusal(call) or ""
                hook.remove()
                told = f"the weight of {type(mixer).__name__}.{part} of layer 0 and leaves out what a PEFT adapter or"
                assert (told in said) == (refuses and by_weight) and bool(said) == (refuses and by_weight)


def test_gated_norms_are_known_by_what_they_compute() -> None:
    mixer = of("mamba2")
    width = mixer.intermediate_size
    y, gate = torch.randn(2, 5, width), torch.randn(2, 5, width)
    with torch.no_grad():
        mixer.norm.weight.copy_(torch.rand(width) + 0.5)

    def read() -> torch.Tensor:
        layer = LayerTrace(gate, (), z=gate)
        by_head = y.unflatten(-1, (mixer.num_heads, -1))
        return y * mamba2.FORM.output_map(mixer, layer, by_head).gate

    torch.testing.assert_close(read(), mixer.norm(y, gate))
    kind = type(mixer.norm)
    mixer.norm.__class__ = type("Other", (kind,), {"forward": lambda self, x, gate=None: 2 * x + 1})
    with pytest.raises(InputError, match="^Mamba2Mixer.norm of layer 0 does not compute the norm"):
        read()

    class Renamed(kind):  # type: ignore[misc, valid-type]
        pass

    class GatedAfter(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
            normed = super().forward(hidden_states)
            return normed if gate is None else normed * torch.nn.functional.silu(gate)

    mixer.norm.__class__ = Renamed
    torch.testing.assert_close(read(), mixer.norm(y, gate))
    mixer.norm.__class__ = GatedAfter
    with pytest.raises(InputError, match=r"^Mamba2Mixer.norm of layer 0 does not compute the norm"):
        read()


def test_what_a_hook_adds_to_a_norm_is_in_the_map() -> None:
    mixer = of("mamba2").double().eval()
    mixer.norm.register_forward_hook(lambda norm, args, y: y + 1)
    with torch.no_grad(), TrueFloat64():
        layer = mamba2.compute_terms(mixer, torch.randn(1, 5, mixer.in_proj.in_features, dtype=torch.float64))
        own, block = mamba2.FORM.output(mixer, layer), mamba2.FORM.linearized(mixer, layer)
        assert relative(block.matvec(block.u) + block.bias, own) < 1e-9
        assert relative(block.rest, mixer.out_proj(torch.ones_like(layer.gate)).expand_as(block.rest)) < 1e-9


def test_layers_are_named_by_their_number() -> None:
    for name, said in (
        ("mamba", "MambaMixer.a of layer 0"),
        ("rwkv", "RwkvBlock.a of layer 0"),
        ("gla", "GatedLinearAttention.a"),
    ):
        assert forms.named(of(name), "a") == said


def test_a_mixer_without_a_cache_refuses_any() -> None:
    for caches in ((None, 5), (5, None), (5, 5)):
        with pytest.raises(ValueError, match="^MambaMixer fills no cache: call the model with use_cache=False"):
            parts.refuse_caches(of("mamba"), *caches)
    parts.refuse_caches(of("mamba"), None, None)
    with pytest.raises(ValueError, match="fills no cache"):
        of("gated-deltanet")(torch.zeros(1, 2, 24), cache=5)


def test_factors_of_norms_by_groups() -> None:
    v = torch.randn(2, 3, 6, dtype=torch.float64)
    for size, groups in ((None, 1), (6, 1), (3, 2), (2, 3), (1, 6)):
        expected = torch.stack(
            [
                torch.cat(
                    [
                        1 / (part.square().mean(-1) + 0.5).sqrt().unsqueeze(-1).expand_as(part)
                        for part in row.chunk(groups, -1)
                    ],
                    -1,
                )
                for row in v
            ]
        )
        torch.testing.assert_close(parts.rms_factor(v, 0.5, size), expected)


def test_a_step_later() -> None:
    t = torch.arange(12.0).view(2, 3, 2)
    assert parts.delayed(t).tolist() == [[[0, 0], [0, 1], [2, 3]], [[0, 0], [6, 7], [8, 9]]]
    first = torch.tensor([[[5, 6]], [[7, 8]]])
    found = parts.delayed(t, first)
    assert found.tolist() == [[[5, 6], [0, 1], [2, 3]], [[7, 8], [6, 7], [8, 9]]] and found.dtype == t.dtype


REACH = {
    "mamba": 4, "mamba2": 4, "diff-mamba": 4, "gfssm": 7, "gfssm-three-groups": 6, "rwkv": 2, "rwkv7": 2, "gla": 1,
    "deltanet": 3, "mamba3": 2, "lfm2": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in REACH if name in EXAMPLES])
def test_a_write_depends_on_as_many_positions_as_a_layer_reaches(name: str) -> None:
    mixer = mixers(random_example(name).double())[0]
    compute = adapter_for(mixer).compute_terms
    width = mixer.attn.v_proj.in_features if hasattr(mixer, "attn") else random_example(name).config.hidden_size
    torch.manual_seed(0)
    u = torch.randn(1, 12, width, dtype=torch.float64)
    changed = u.clone()
    changed[0, 3] += 1
    with torch.no_grad():
        layer, other = compute(mixer, u), compute(mixer, changed)
    assert layer.reach == REACH[name]
    differs = torch.zeros(12, dtype=torch.bool)
    for one, two in zip(layer.recurrences, other.recurrences):
        differs |= (one.x != two.x).flatten(2).any(-1)[0]
    assert differs.nonzero().flatten().tolist() == [*range(3, 3 + REACH[name])]


@pytest.mark.parametrize(("name", "said"), [
    ("rwkv", "an RWKV block continues from an RwkvState, which"),
    ("rwkv7", "an RWKV-7 block continues from an RWKV7State, which"),
    ("xlstm", "an mLSTM continues from an MLSTMState, which"),
])  # fmt: skip
def test_states_of_another_kind_are_refused(name: str, said: str) -> None:
    mixer = of(name)
    u = torch.randn(1, 4, 24)
    with pytest.raises(TypeError, match=f"^{said}"):
        adapter_for(mixer).compute_terms(mixer, u, None, LayerState(None, ()))


@pytest.mark.parametrize("name", [name for name in sorted(VARIANTS) if name in EXAMPLES])
def test_layers_of_other_options_are_linear_maps(name: str) -> None:
    mixer = mixers(doubled(random_example(name).eval()))[-1]
    adapter = adapter_for(mixer)
    torch.manual_seed(0)
    modules = 1 + len(getattr(mixer, "before", ()))
    u = torch.randn(2, 7, modules * random_example(name).config.hidden_size, dtype=torch.float64)
    with torch.no_grad(), TrueFloat64():
        own, layer = own_output(mixer, u), adapter.compute_terms(mixer, u)
        block = adapter.linearized(mixer, layer)
        assert relative(adapter.output(mixer, layer), own) < 1e-9
    with torch.no_grad():
        assert relative(block.matvec(block.u) + block.bias, own) < 1e-9
