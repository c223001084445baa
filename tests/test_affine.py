"""Linear maps, convolutions, norms and embeddings read from their modules' outputs."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from linear_layers import EXACT, Bent, Scaled, conv, linear
from refusals import refuses
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.models.mamba2.modeling_mamba2 import Mamba2RMSNorm
from ssmscope.core.affine import agrees_with_weight, depthwise, embedding_table, linear_map, matrix, norm_terms, offset
from ssmscope.errors import InputError


class Folded(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.flip(0) * 2


def wrapped(bias: bool) -> dict[str, nn.Module]:
    """Linear layers whose weights do not say what they compute."""
    hooked, before, own, parametrised, normed = (linear(bias=bias) for _ in range(5))
    hooked.register_forward_hook(lambda module, args, y: -2 * y)
    before.register_forward_pre_hook(lambda module, args: (args[0].flip(-1),))
    forward = own.forward
    own.forward = lambda x: forward(x) / 2
    parametrize.register_parametrization(parametrised, "weight", Folded())
    nn.utils.weight_norm(normed)
    with torch.no_grad():
        normed.weight_g.mul_(3)  # the weight itself is of the last forward
    return {
        "subclass": linear(Scaled, bias), "hook": hooked, "hook before": before, "own forward": own,
        "parametrised": parametrised, "weight norm": normed,
    }  # fmt: skip


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", wrapped(True))
def test_a_linear_layer_is_what_it_computes(name, bias):
    module = wrapped(bias)[name]
    u, w = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(2, 3, 7, dtype=torch.float64)
    own, zero = module(u).detach(), module(torch.zeros(1, 5, dtype=torch.float64))[0].detach()
    project = linear_map(module)
    torch.testing.assert_close(project(u, True), own, **EXACT)
    torch.testing.assert_close(project(u, False), own - zero, **EXACT)
    torch.testing.assert_close(linear_map(module, rows=slice(2, 6))(u, False), (own - zero)[..., 2:6], **EXACT)
    torch.testing.assert_close(linear_map(module, rows=slice(2, 6))(u, True), own[..., 2:6], **EXACT)
    W, b = matrix(module), offset(module)
    torch.testing.assert_close(u @ W.mT, own - zero, **EXACT)
    assert (b is None) == (not zero.any())
    if b is not None:
        torch.testing.assert_close(b, zero, **EXACT)
    v = torch.zeros_like(u, requires_grad=True)
    (transposed,) = torch.autograd.grad(project(v, False), v, w)
    torch.testing.assert_close(transposed, w @ W, **EXACT)


class Clipped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-4, 4)


class Mixing(nn.Linear):
    """Layer whose output also depends on the position before, so that it maps no position by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x).roll(1, dims=1)


class Dropping(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.1))


class Rounded(nn.Linear):
    """Activations of 8 bits."""

    def forward(self, x: Tensor) -> Tensor:
        step = x.abs().max() / 127
        return super().forward(x if not step else (x / step).round() * step)


class Failing(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no kernel\nfor this")


@pytest.mark.parametrize("kind, why", [
    (Bent, "no linear map of its input"), (Clipped, "no linear map of its input"),
    (Mixing, "no linear map of every position"), (Dropping, "no linear map"), (Rounded, "no linear map of its input"),
    (Failing, r"cannot be read by calling it \(no kernel\)"),
])  # fmt: skip
@pytest.mark.parametrize("read", [linear_map, offset, matrix])
def test_what_is_no_linear_map_is_refused(kind, why, read: Callable):
    module = linear(kind).float()
    before = torch.random.get_rng_state()
    with pytest.raises(InputError, match=why) as error:
        read(module, "Mixer.in_proj")
    assert str(error.value).startswith(f"Mixer.in_proj, a {kind.__name__} of ") and "\n" not in str(error.value)
    assert str(error.value).endswith(": put a layer of torch in its place, dequantised if it is quantised")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_damaged_layer_is_called_damaged():
    module = linear(Scaled)
    with torch.no_grad():
        module.weight[0, 0] = torch.nan
    refuses("not finite: the model is damaged", matrix, module)
    refuses("no linear layer that can be read", matrix, nn.Sequential(linear()))


def test_whether_the_weight_says_all():
    assert agrees_with_weight(linear()) and not agrees_with_weight(linear(Scaled))
    watched = linear()
    watched.register_forward_hook(lambda module, args, y: None)
    assert agrees_with_weight(watched)
    conv = nn.Conv1d(4, 4, 3, groups=4, padding=2)
    conv.register_forward_hook(lambda module, args, y: y + 1)
    assert not agrees_with_weight(conv)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("bias", [True, False])
def test_a_depthwise_convolution_is_its_answer_to_an_impulse(padding, bias):
    plain, hooked, parametrised = (conv(padding, bias) for _ in range(3))
    assert depthwise(plain, 6, 4) == (plain.weight, plain.bias)
    hooked.register_forward_hook(lambda module, args, y: -3 * y)
    parametrize.register_parametrization(parametrised, "weight", Folded())
    for module, scale, own in ((hooked, -3, plain.weight), (parametrised, 1, plain.weight.flip(0) * 2)):
        weight, constant = depthwise(module, 6, 4)
        torch.testing.assert_close(weight, scale * own, **EXACT)
        assert (constant is None) == (not bias)
        if bias:
            torch.testing.assert_close(constant, scale * plain.bias, **EXACT)


def test_the_gradient_of_a_read_convolution_reaches_its_weight():
    module = conv(3, True)
    module.register_forward_hook(lambda module, args, y: 2 * y)
    weight, bias = depthwise(module, 6, 4)
    found = torch.autograd.grad(weight.sum() + 5 * bias.sum(), (module.weight, module.bias))
    torch.testing.assert_close(found[0], torch.full_like(module.weight, 2))
    torch.testing.assert_close(found[1], torch.full_like(module.bias, 10))


def norms() -> dict[str, tuple[nn.Module, type[nn.Module]]]:
    torch.manual_seed(2)
    made: dict[str, tuple[nn.Module, type[nn.Module]]] = {
        "layer norm": (nn.LayerNorm(7), nn.LayerNorm),
        "rms norm": (nn.RMSNorm(7, eps=1e-3), nn.RMSNorm),
        "transformers' rms norm": (Mamba2RMSNorm(7, eps=1e-3), Mamba2RMSNorm),
    }
    for module, _ in made.values():
        for parameter in module.parameters():
            nn.init.normal_(parameter)
    return made


@pytest.mark.parametrize("name", norms())
def test_a_norms_weight_is_what_it_multiplies_by(name):
    module, kind = norms()[name]
    plain = norm_terms(module, kind)
    assert plain.weight is module.weight and plain.bias is getattr(module, "bias", None)
    module.register_forward_hook(lambda module, args, y: -2 * y)
    found = norm_terms(module, kind)
    torch.testing.assert_close(found.weight, -2 * module.weight, rtol=1e-5, atol=1e-6)
    assert (found.bias is None) == (plain.bias is None) and found.eps == plain.eps
    if plain.bias is not None:
        torch.testing.assert_close(found.bias, -2 * module.bias, rtol=1e-5, atol=1e-6)
    module.register_forward_hook(lambda module, args, y: y.tanh())
    refuses(f"is no {type(module).__name__}", norm_terms, module, kind)


def test_what_is_no_norm_is_refused():
    refuses("no norm that can be read", norm_terms, nn.Identity(), nn.RMSNorm)


def test_the_embedding_table_is_what_the_embeddings_give():
    plain, hooked = nn.Embedding(40000, 2), nn.Embedding(40000, 2)
    hooked.load_state_dict(plain.state_dict())
    hooked.register_forward_hook(lambda module, args, y: 3 * y)
    tables = [embedding_table(SimpleNamespace(get_input_embeddings=lambda m=m: m)) for m in (plain, hooked)]
    assert torch.equal(tables[0], plain.weight) and torch.equal(tables[1], 3 * plain.weight)
    assert not tables[1].requires_grad
