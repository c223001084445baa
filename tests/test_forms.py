"""Forms: the output and the linear map of a plain torch layer that is declared, against its own loop over positions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from examples import relative
from refusals import refusal
from torch import nn
from torch.nn import functional
from ssmscope.core.forms import Form, Norm
from ssmscope.core.trace import LayerTrace
from ssmscope.ops import Recurrence

HEADS, WIDTH, TAPS = 2, 8, 3


class PlainRMSNorm(nn.Module):
    """A norm of the user's own."""

    def __init__(self, width: int, power: int = 2) -> None:
        super().__init__()
        self.weight, self.eps, self.power = nn.Parameter(torch.rand(width) + 0.5), 1e-3, power

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.weight * y / (y.abs().pow(self.power).mean(-1, keepdim=True) + self.eps) ** (1 / self.power)


NORMS: dict[str, Any] = {
    "none": lambda: nn.Identity(), "heads": lambda: nn.RMSNorm(WIDTH // HEADS, 1e-3),
    "channels": lambda: nn.RMSNorm(WIDTH), "layer": lambda: nn.LayerNorm(WIDTH // HEADS),
    "group": lambda: nn.GroupNorm(HEADS, WIDTH), "plain": lambda: PlainRMSNorm(WIDTH),
    "plain-heads": lambda: PlainRMSNorm(WIDTH // HEADS), "cubic": lambda: PlainRMSNorm(WIDTH, power=3),
    "layer-channels": lambda: nn.LayerNorm(WIDTH),
}  # fmt: skip


class Memory(nn.Module):
    """Heads that decay by what the token says: v after a convolution, read by q, normed, gated and projected."""

    def __init__(self, norm: str = "none", act: str = "silu", gate_first: bool = False) -> None:
        super().__init__()
        self.q, self.z, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.kv, self.a = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, HEADS)
        self.conv = nn.Conv1d(WIDTH, WIDTH, TAPS, groups=WIDTH)
        self.norm, self.act, self.gate_first = NORMS[norm](), getattr(functional, act), gate_first
        self.parts = nn.ModuleDict({"norm": self.norm})

    def normed(self, y: torch.Tensor) -> torch.Tensor:
        if isinstance(self.norm, nn.GroupNorm):
            return self.norm(y)
        weight = getattr(self.norm, "weight", None)
        by_head = weight is not None and len(weight) == WIDTH // HEADS
        return self.norm(y.unflatten(-1, (HEADS, -1)) if by_head else y).reshape(len(y), WIDTH)

    def forward(self, u: torch.Tensor) -> torch.Tensor:
        k, v = self.kv(u).chunk(2, dim=-1)
        H, found = u.new_zeros(len(u), HEADS, WIDTH // HEADS, WIDTH // HEADS), []
        for t in range(u.shape[1]):
            c = self.conv.bias + sum(
                self.conv.weight[:, 0, TAPS - 1 - j] * v[:, t - j] for j in range(min(TAPS, t + 1))
            )
            x, key, query = (each.unflatten(-1, (HEADS, -1)) for each in (functional.silu(c), k[:, t], self.q(u[:, t])))
            H = torch.sigmoid(self.a(u[:, t]))[..., None, None] * H + x.unsqueeze(-1) * key.unsqueeze(-2)
            y, gate = (H @ query.unsqueeze(-1)).flatten(1), self.act(self.z(u[:, t]))
            found.append(self.normed(y * gate) if self.gate_first else self.normed(y) * gate)
        return self.o(torch.stack(found, dim=1))


def terms(mixer: Memory, u: torch.Tensor) -> LayerTrace:
    k, v = mixer.kv(u).chunk(2, dim=-1)
    x = functional.silu(mixer.conv(functional.pad(v.mT, (TAPS - 1, 0))).mT)
    x, k, q = (each.unflatten(-1, (HEADS, -1)) for each in (x, k, mixer.q(u)))
    recurrence = Recurrence(x=x, b=k, c=q, log_a=functional.logsigmoid(mixer.a(u)).unsqueeze(-1))
    return LayerTrace(u, (recurrence,), z=mixer.z(u), conv_input=v, reach=TAPS)


FORM = Form(values=("kv", slice(WIDTH, None)), convolution="conv", activation="silu", gate="z", out="o")


def made(norm: str = "none", act: str = "silu", gate_first: bool = False) -> tuple[Memory, LayerTrace, Form]:
    torch.manual_seed(0)
    mixer = Memory(norm, act, gate_first).double()
    with torch.no_grad():
        for parameter in mixer.norm.parameters():
            parameter.add_(0.5 * torch.rand_like(parameter))
    layer = terms(mixer, torch.randn(2, 9, WIDTH, dtype=torch.float64))
    norm = None if norm == "none" else "norm"
    return mixer, layer, replace(FORM, norm=norm, gate_activation=act, gate_first=gate_first)


@pytest.mark.parametrize("act", ["gelu", "sigmoid"])
@pytest.mark.parametrize(("norm", "gate_first"), [
    *[(norm, first) for norm in ("none", "heads", "channels", "plain", "plain-heads") for first in (False, True)],
    *[(norm, False) for norm in ("layer", "layer-channels", "group")],
])  # fmt: skip
def test_a_declared_layer_gives_its_own_output_and_map(norm, gate_first, act):
    mixer, layer, form = made(norm, act, gate_first)
    with torch.no_grad():
        own, block = mixer(layer.u), form.linearized(mixer, layer)
        assert relative(form.output(mixer, layer), own) < 1e-12
        assert relative(block.matvec(layer.u) + block.bias, own) < 1e-12
        opened = block.paths[0].output_map.gate_map
        assert (opened is None) == (act == "sigmoid")  # It is no product with z.
        if opened is not None:
            assert relative(opened(layer.u, True), getattr(functional, act)(mixer.z(layer.u))) < 1e-12
    gradients = [torch.autograd.grad(y.square().sum(), list(mixer.parameters()), retain_graph=True)
                 for y in (mixer(layer.u), form.output(mixer, terms(mixer, layer.u)))]  # fmt: skip
    assert all(relative(found, expected) < 1e-9 for expected, found in zip(*gradients))


def test_fields_may_be_functions_of_the_mixer_and_its_trace():
    mixer, layer, form = made("heads")
    other = Form(
        values=lambda mixer, layer: lambda u, biased: mixer.kv(u)[..., WIDTH:] - (not biased) * mixer.kv.bias[WIDTH:],
        convolution=lambda mixer, layer: (mixer.conv.weight, mixer.conv.bias),
        channels=lambda mixer, layer: slice(0, layer.conv_input.shape[-1]),
        activation=lambda mixer, layer: nn.SiLU(),
        norm=lambda mixer, layer: Norm(mixer.norm.weight, None, mixer.norm.eps, WIDTH // HEADS),
        gate="z",
        out="o",
        inner=lambda mixer, layer, y: mixer.norm(y).flatten(2) * functional.silu(layer.gate),
    )
    v = torch.randn_like(layer.u)
    with torch.no_grad():
        assert relative(other.output(mixer, layer), form.output(mixer, layer)) < 1e-12
        found, expected = (each.linearized(mixer, layer) for each in (other, form))
        assert relative(found.matvec(v), expected.matvec(v)) < 1e-12
        assert relative(found.attention(), expected.attention()) < 1e-12
    # Dotted names are those of parts of parts.
    assert relative(replace(form, norm="parts.norm").output(mixer, layer), form.output(mixer, layer)) < 1e-12


@pytest.mark.parametrize(("norm", "change", "said"), [
    ("none", dict(values="vk"), "Memory has no part 'vk'; its parts are q, z, o, kv, a, conv, norm.*did you mean"),
    ("none", dict(values="norm"), "Memory.norm, a Identity .* is no linear layer that can be read"),
    ("none", dict(activation="sigmoid"), "is not 0 at 0: it is no factor, and the layer not a linear map"),
    ("none", dict(activation="silo"), "activation='silo' is neither a part of Memory nor a function .*'silu'"),
    ("none", dict(read="sigmoid"), "is not 0 at 0: it is no factor"),
    ("none", dict(norm="norm"), "Memory.norm, a Identity .*, is no norm that can be read"),
    ("cubic", {}, "Memory.norm does not compute the norm"),
    ("layer", dict(gate_first=True), "a norm that subtracts the mean is a linear map of a layer only before the gate"),
    ("heads", dict(inner=lambda mixer, layer, y: y.flatten(2)), "Memory.norm does not compute the norm"),
])  # fmt: skip
def test_what_is_refused(norm, change, said):
    mixer, layer, form = made(norm)
    with pytest.raises(Exception, match=said) as caught:
        replace(form, **change).linearized(mixer, layer)
    assert type(caught.value).__name__ == "InputError" and "\n" not in str(caught.value)


def test_a_convolution_needs_its_input_and_activations_their_names():
    mixer, layer, form = made()
    said = refusal(lambda: form.linearized(mixer, replace(layer, conv_input=None)))
    assert said == (
        "Memory: its form has a convolution, and its terms no `conv_input`: give the input of the convolution to "
        "LayerTrace"
    )
    for given in (functional.silu, torch.sigmoid, nn.SiLU()):
        assert "activation=" in (refusal(lambda: Form(values="kv", activation=given)) or "")  # noqa: B023
