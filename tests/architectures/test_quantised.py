"""Models in memory with quantised layers are read as the dequantised model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import relative
from loud import loud
from small_models import language_model
from torch import nn
import ssmscope
from ssmscope.loading.quantised import dequantised

TEXTS = [[5, 17, 3, 9, 22, 1, 4], [4, 8, 1]]
MAMBA: dict[str, Any] = dict(vocab_size=97, hidden_size=64, num_hidden_layers=2, expand=2, conv_kernel=4)
SIZES: dict[str, dict[str, Any]] = {
    "mamba": dict(**MAMBA, state_size=16, time_step_rank=32),
    "mamba2": dict(**MAMBA, state_size=12, num_heads=8, head_dim=16, n_groups=1, chunk_size=8),
}
LEFT_OUT = ("lm_head", "dt_proj", "x_proj")


def mixers_changed(kind: str, change: Callable[[nn.Linear], nn.Module]) -> tuple[nn.Module, list[nn.Module]]:
    torch.manual_seed(0)
    module = loud(language_model(kind, **SIZES[kind]))
    changed = []
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if type(child) is nn.Linear and name not in LEFT_OUT:
                setattr(part, name, change(child))
                changed.append(getattr(part, name))
    return module, changed


def by_4_bits(layer: nn.Linear) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    has_bias, own = layer.bias is not None, dict(quant_type="nf4", compress_statistics=False)
    made = bnb.nn.Linear4bit(layer.in_features, layer.out_features, bias=has_bias, compute_dtype=torch.float32, **own)
    made.weight = bnb.nn.Params4bit(layer.weight.data.clone(), requires_grad=False, module=made, **own)
    made.bias = layer.bias
    return made.to("cpu").eval()


def by_8_bits(layer: nn.Linear) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    made = bnb.nn.Linear8bitLt(layer.in_features, layer.out_features, layer.bias is not None, has_fp16_weights=False)
    made.weight = bnb.nn.Int8Params(layer.weight.data.clone(), requires_grad=False, has_fp16_weights=False)
    made.bias = layer.bias
    return made.to("cpu").eval()


def by_torchao(layer: nn.Linear) -> nn.Module:
    ao = pytest.importorskip("torchao.quantization")
    holder = nn.Sequential(copy.deepcopy(layer))
    ao.quantize_(holder, ao.Int8WeightOnlyConfig())
    return holder[0]


def rounded(weight: torch.Tensor, made: nn.Module) -> torch.Tensor:
    """Return the weight that a layer stands for, written out from its codes and scales."""
    if type(made).__name__ == "Linear8bitLt":
        codes, most = made.weight.CB.float(), weight.abs().amax(1, keepdim=True)
        found = codes * made.weight.SCB.unsqueeze(1) / 127
        assert ((found - weight).abs() < 0.6 * most / 127).all()  # They are computed in float16.
        return found
    if type(made).__name__ != "Linear4bit":
        return made.weight.dequantize()
    state, blocks = made.weight.quant_state, weight.reshape(-1, made.weight.quant_state.blocksize)
    most = blocks.abs().amax(1, keepdim=True)
    codes = (blocks / most).unsqueeze(-1).sub(state.code).abs().argmin(-1)
    return (state.code[codes] * most).view_as(weight)


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("quantise", [by_4_bits, by_8_bits, by_torchao])
@pytest.mark.parametrize("run", [False, True], ids=["new", "after a run"])
def test_what_is_found_is_that_of_the_dequantised_model(kind, quantise, run):
    originals = [p.weight.detach().clone() for p in mixers_changed(kind, copy.deepcopy)[1]]
    module, changed = mixers_changed(kind, quantise)
    kinds = [type(part) for part in changed]
    stands_for = iter(zip([rounded(weight, made) for weight, made in zip(originals, changed)], changed))

    def plain(_: nn.Linear) -> nn.Linear:
        weight, made = next(stands_for)
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=made.bias is not None)
        layer.weight.data, layer.bias = weight.clone(), made.bias
        return layer

    expected = ssmscope.load(mixers_changed(kind, plain)[0])
    if run:
        with torch.no_grad():
            module(torch.tensor(TEXTS[:1]))
    model = ssmscope.load(module)
    assert [type(part) for part in changed] == kinds and model.module is not module
    # Once it has run on a CPU, a layer of 4 bits keeps the greatest number of a block in bfloat16.
    allowed = 5e-2 if quantise is by_4_bits and run else 1e-5
    batch = model.encode(ids=TEXTS)
    found, other = model.trace(batch), expected.trace(batch)
    assert relative(found.logits, other.logits) < allowed
    for one, two in zip(found.linearized, other.linearized):
        with torch.no_grad():
            assert relative(one.attention("block"), two.attention("block")) < 5 * allowed
    assert relative(*(trace.survival().nan_to_num() for trace in (found, other))) < allowed
    for method in ("lrp", "gradxinput"):
        scores = [
            ssmscope.explain(each, each.encode(ids=TEXTS[:1]), methods=[method]).attribution().scores
            for each in (model, expected)
        ]
        assert relative(*map(torch.from_numpy, scores)) < 5 * allowed


def test_a_model_without_quantised_layers_is_itself():
    module = loud(language_model("mamba2", **SIZES["mamba2"]))
    assert ssmscope.load(module).module is module


@pytest.mark.parametrize(("inputs", "runs"), [(128, True), (96, False)], ids=["after a run", "rows of 1.5 blocks"])
def test_scales_of_4_bits_belong_to_their_blocks(inputs, runs):
    """Once it has run on a CPU, bitsandbytes 0.50 saves scales transposed, and it dequantises cut rows wrongly."""
    torch.manual_seed(0)
    layer = nn.Linear(inputs, 32, bias=False)
    layer.weight.data = torch.randn(32, inputs) * torch.rand(32, 1) * torch.linspace(0.2, 1, inputs)
    original = layer.weight.data.clone()
    made = nn.Sequential(by_4_bits(layer))
    if runs:
        made(torch.ones(1, inputs))
    assert relative(dequantised(made)[0].weight, original) < 0.12


class PackedLinear(nn.Module):
    """A layer as GPTQ's libraries have it in memory: codes, no weight, and a forward pass of its own."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.infeatures, self.bias = layer.in_features, layer.bias
        largest = layer.weight.data.abs().amax(1)
        self.register_buffer("scales", largest / 7)
        self.register_buffer("qzeros", torch.full_like(largest, 8))
        self.register_buffer("qweight", (layer.weight.data / self.scales[:, None]).round() + 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():  # Their kernels have no gradients.
            weight = (self.qweight - self.qzeros[:, None]) * self.scales[:, None]
            return nn.functional.linear(x, weight, self.bias)


@pytest.mark.parametrize("kind", SIZES)
def test_layers_without_a_weight_are_read_by_what_they_compute(kind):
    module, changed = mixers_changed(kind, PackedLinear)
    found = ssmscope.load(module)
    layers = [part for part in dequantised(module).modules() if type(part) is nn.Linear]
    for made in changed:
        weight = (made.qweight - 8) * made.scales[:, None]
        assert any(part.weight.shape == weight.shape and relative(part.weight, weight) < 1e-5 for part in layers)
    with torch.no_grad():
        own = module(torch.tensor(TEXTS[:1])).logits
    batch = found.encode(ids=TEXTS[:1])
    assert relative(found.trace(batch).logits, own[:, -1]) < 1e-5
    scores = ssmscope.explain(found, batch, methods=["gradxinput"]).attribution().scores
    assert abs(scores).max() > 0 and all(type(part) is PackedLinear for part in changed)
