"""Layers of mamba_ssm, mambapy, xlstm and minGRU-pytorch in networks of one's own, without a word about them."""

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from loud import loud
from own_layers import Mamba2
from refusals import refuses
from torch import Tensor, nn
import ssmscope
from ssmscope.errors import InputError
from ssmscope.interp.methods.lrp import lrp
from ssmscope.interp.objective import objective

ROWS = [[4, 9, 8, 1, 2, 6, 7, 5, 4], [3, 5, 7, 1]]


class Network(nn.Module):
    def __init__(self, make: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(30, 16), nn.Linear(16, 30)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.layers = nn.ModuleList(make(16) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return self.head(x)


def mambapy(width: int, **fields: Any) -> nn.Module:
    from mambapy.mamba import MambaBlock, MambaConfig

    return MambaBlock(MambaConfig(d_model=width, n_layers=1, **fields))


def min_gru(width: int, **fields: Any) -> nn.Module:
    from minGRU_pytorch.minGRU import minGRU

    return minGRU(width, **fields)


def mlstm(width: int) -> nn.Module:
    from xlstm.blocks.mlstm.layer import mLSTMLayer, mLSTMLayerConfig

    return mLSTMLayer(mLSTMLayerConfig(embedding_dim=width, context_length=64))


MADE: dict[str, tuple[Callable[[int], nn.Module], bool]] = {
    "mamba_ssm Mamba2": (Mamba2, True),
    "mamba_ssm Mamba2 without norm": (lambda width: Mamba2(width, rmsnorm=False), True),
    "mamba_ssm Mamba2 norm first": (lambda width: Mamba2(width, before=True, limit=0.4), True),
    "mambapy": (mambapy, True),
    "mambapy with norms": (lambda width: mambapy(width, inner_layernorms=True, pscan=False, bias=True), True),
    "minGRU_pytorch": (min_gru, False),
    "minGRU_pytorch wider": (lambda width: min_gru(width, expansion_factor=1.5), False),
    "xlstm": (mlstm, False),
}
"""Modules by name, and whether what stands around the recurrence is declared."""


@pytest.fixture(params=MADE)
def network(request) -> tuple[nn.Module, bool]:
    package = request.param.partition(" ")[0]
    if package != "mamba_ssm" and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    make, declared = MADE[request.param]
    torch.manual_seed(0)
    module = Network(make)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith(("fgate.weight", "igate.weight")):
                weight.normal_(0, 0.1)
    return loud(module), declared


def test_numbers_are_the_modules_own(network: tuple[nn.Module, bool]) -> None:
    module, declared = network
    model = ssmscope.load(module)
    batch = model.encode(ids=ROWS)
    with torch.no_grad():
        own = [module(torch.tensor([row])) for row in ROWS]
    found = model.logits(batch)
    for row, expected in enumerate(own):
        torch.testing.assert_close(found[row, : expected.shape[1]], expected[0], rtol=1e-3, atol=1e-3)
    first = model.run(model.encode(ids=[ROWS[0][:4]]))
    rest = model.run(model.encode(ids=[ROWS[0][4:]]), first.states).logits
    torch.testing.assert_close(rest, own[0][:, 4:], rtol=1e-3, atol=1e-3)
    written = model.generate(ids=ROWS[:1], max_new_tokens=3).ids[0]
    whole = [*ROWS[0]]
    with torch.no_grad():
        for token in written:
            assert token == int(module(torch.tensor([whole]))[0, -1].argmax())
            whole.append(token)
    survival = model.trace(batch).survival()
    np.testing.assert_allclose(survival[:, 0].sum(-1), 1, atol=1e-5)


def test_what_is_declared_is_exact_and_the_rest_refused(network: tuple[nn.Module, bool]) -> None:
    module, declared = network
    model = ssmscope.load(module.double())
    batch = model.encode(ids=ROWS[:1])
    trace = model.trace(batch)
    if not declared:
        with pytest.raises(InputError):
            ssmscope.attention(model, batch, level="block")
        return
    with torch.no_grad():
        for layer, linear, norm, mixer, x in zip(
            trace.layers, trace.linearized, module.norms, module.layers, _inputs(module, batch.input_ids)
        ):
            own = mixer(norm(x))
            assert layer.u.shape == x.shape
            torch.testing.assert_close(linear.matvec(linear.u) + linear.bias, own, rtol=1e-6, atol=1e-6)
    scores = lrp(objective(model, batch, target=[3]))
    assert scores.delta is not None and float(scores.delta.max()) < 1e-4


def _inputs(module: nn.Module, ids: Tensor) -> list[Tensor]:
    x, found = module.tokens(ids), []
    for norm, layer in zip(module.norms, module.layers):
        found.append(x)
        x = x + layer(norm(x))
    return found


def test_a_part_beside_the_recurrence_is_refused() -> None:
    class Wider(Mamba2):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.in_proj = nn.Linear(width, self.in_proj.out_features + 8, bias=False)

        def forward(self, u: Tensor) -> Tensor:
            return u

    refuses("a part beside its recurrence", ssmscope.load, Network(Wider).eval())
