"""Rules of relevance for parts of other libraries' blocks, on parts made by hand."""

from dataclasses import replace

import pytest
import torch
from refusals import refuses
from torch import Tensor, nn
from torch.nn.functional import gelu, silu
from transformers.models.mamba.modeling_mamba import MambaRMSNorm
from ssmscope.core.affine import is_norm
from ssmscope.core.blocks import ATTENTION, EXPERTS, FEED_FORWARD, GATED, LATENT, BlockPart, block_part, of_hybrids
from ssmscope.core.intercept import override_forward
from ssmscope.errors import InputError
from ssmscope.interp.methods.lrp_blocks import _mapped, gated, halved, part_handlers, runs_its_parts

draw = torch.Generator().manual_seed(0)
X = torch.randn(5, 3, generator=draw, dtype=torch.float64)


def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return made


class Gated(nn.Module):
    """W₃ (act(g) ⊙ h)."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(3, 4), linear(3, 4), linear(4, 2, bias)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Plain(nn.Module):
    """W₂ act(h)."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj, self.activation = linear(3, 4), linear(4, 2, True), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


def slopes(module: nn.Module, half: bool, part: BlockPart) -> tuple[Tensor, Tensor]:
    """The output of a module with its handlers, and the gradient of its sum of squares' coefficients by its input."""
    x = X.clone().requires_grad_()
    with override_forward(part_handlers(module, part, half)):
        y = module(x)
    return y.detach(), torch.autograd.grad((y * torch.arange(1.0, 1 + y.numel()).view_as(y)).sum(), x)[0]


def expected(output: Tensor, x: Tensor) -> Tensor:
    weights = torch.arange(1.0, 1 + output.numel()).view_as(output)
    return torch.autograd.grad((output * weights).sum(), x)[0]


@pytest.mark.parametrize("half", [True, False])
def test_a_gated_part_has_half_of_its_relevance_through_each_factor_or_all_through_one(half):
    module, x = Gated(bias=not half), X.clone().requires_grad_()
    found, slope = slopes(module, half, GATED)
    torch.testing.assert_close(found, module(X).detach())
    g, h = module.gate_proj(x), module.up_proj(x)
    own = h * silu(g).detach()
    if half:
        own = own / 2 + h.detach() * g * torch.sigmoid(g).detach() / 2
    torch.testing.assert_close(slope, expected(own @ module.down_proj.weight.T, x))
    torch.testing.assert_close(gated(silu, g, h, half), own)
    handlers = dict(part_handlers(module, GATED, half))
    assert list(handlers) == ([module.act_fn, module] if half else [module.act_fn])
    assert [runs_its_parts(handler) for handler in handlers.values()] == ([False, True] if half else [False])


@pytest.mark.parametrize("half", [True, False])
def test_an_activation_alone_is_its_factor(half):
    module, x = Plain(), X.clone().requires_grad_()
    part = replace(FEED_FORWARD, act="activation")
    found, slope = slopes(module, half, part)
    torch.testing.assert_close(found, module(X).detach())
    h = module.up_proj(x)
    torch.testing.assert_close(slope, expected((h * (gelu(h) / h).detach()) @ module.down_proj.weight.T, x))
    assert list(dict(part_handlers(module, part, half))) == [module.activation]


def test_a_bias_after_a_gate_keeps_its_relevance():
    """It is no part of the product whose relevance is halved."""
    module, x = Gated(bias=True), X.clone().requires_grad_()
    handlers = dict(part_handlers(module, GATED, True))
    assert list(handlers) == [module.act_fn, module.down_proj] and runs_its_parts(handlers[module.down_proj])
    found, slope = slopes(module, True, GATED)
    torch.testing.assert_close(found, module(X).detach())
    own = gated(silu, module.gate_proj(x), module.up_proj(x), True)
    torch.testing.assert_close(slope, expected(own @ module.down_proj.weight.T, x))
    bias = module.down_proj.bias
    with override_forward(part_handlers(module, GATED, True)):
        (slope,) = torch.autograd.grad(module(X).sum(), bias)
    assert slope.tolist() == [len(X)] * len(bias)


def test_an_activation_that_is_a_function_has_no_rule():
    module = Plain()
    module.activation = None
    module.act_fn = gelu
    refuses("lrp has no rule for a Plain, whose activation is not a module", part_handlers, module, FEED_FORWARD, True)


def test_projections_of_queries_and_keys_are_frozen():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj, self.gate = (linear(3, 3) for _ in range(4))
            self.linear_q_adapter_list = nn.ModuleList([linear(3, 3), linear(3, 3)])

        def forward(self, x):
            q = self.q_proj(x) + self.linear_q_adapter_list[1](x)
            return torch.softmax(q @ self.k_proj(x).T, -1) @ (self.v_proj(x) * self.gate(x))

    module, x = Attention(), X.clone().requires_grad_()
    part = replace(ATTENTION, frozen=("q_proj", "k_proj", "gate", "linear_q_adapter_list", "of_another_size"))
    handled = [own for own, _ in part_handlers(module, part, True)]
    assert handled == [module.q_proj, module.k_proj, module.gate, *module.linear_q_adapter_list]
    found, slope = slopes(module, True, part)
    q = module.q_proj(x) + module.linear_q_adapter_list[1](x)
    A = torch.softmax(q @ module.k_proj(x).T, -1).detach()
    torch.testing.assert_close(slope, expected(A @ (module.v_proj(x) * module.gate(x).detach()), x))
    torch.testing.assert_close(found, module(X).detach())


def test_of_latent_attention_only_what_becomes_keys_is_frozen():
    class Latent(nn.Module):
        kv_lora_rank, qk_nope_head_dim, num_heads = 2, 1, 2

        def __init__(self, bias=False):
            super().__init__()
            self.kv_a_proj_with_mqa, self.kv_b_proj = linear(3, 2 + 4, bias), linear(2, 2 * (1 + 3))

        def forward(self, x):
            latent = self.kv_a_proj_with_mqa(x)
            return torch.cat([self.kv_b_proj(latent[..., :2]), latent[..., 2:]], dim=-1)

    module, x = Latent(), X.clone().requires_grad_()
    found, slope = slopes(module, True, LATENT)
    torch.testing.assert_close(found, module(X).detach())
    frozen = [0, 4, 8, 9, 10, 11]  # of each head the first of four, and the part that is rotated
    kept = torch.tensor([at not in frozen for at in range(12)])
    y = module(x)
    torch.testing.assert_close(slope, expected(torch.where(kept, y, y.detach()), x))
    with pytest.raises(InputError, match="lrp has no rule for a Latent with biases before its keys and values"):
        part_handlers(Latent(bias=True), LATENT, True)


def test_outputs_of_every_kind_are_mapped():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    count = torch.tensor([3, 4])
    found = halved(lambda given: (given, (count, given * 2), None, "cache"), x)
    assert found[1][0] is count and found[2:] == (None, "cache")
    assert torch.equal(found[0], x) and torch.equal(found[1][1], 2 * x)
    (slope,) = torch.autograd.grad((found[0] + found[1][1]).sum(), x)
    assert slope.tolist() == [1.5, 1.5]
    assert _mapped(count, lambda y: y / 2) is count


def test_parts_are_known_by_the_nearest_class_that_is_declared():
    declared = of_hybrids("Own", SparseAttention=EXPERTS)
    attention = type("OwnAttention", (nn.Module,), {})
    sparse = type("OwnSparseAttention", (attention,), {})
    assert block_part(type("Faster", (attention,), {})(), declared) is ATTENTION
    assert block_part(type("Faster", (sparse,), {})(), declared) is EXPERTS
    assert block_part(type("Attention", (nn.Module,), {})(), declared) is None


def test_norms_are_known_by_what_they_have():
    for norm in (nn.RMSNorm(4), MambaRMSNorm(4), nn.LayerNorm(4)):
        assert is_norm(norm)
    for other in (nn.GroupNorm(2, 4), nn.BatchNorm1d(4), nn.InstanceNorm1d(4), nn.Linear(4, 4), nn.Embedding(4, 4)):
        assert not is_norm(other)
