"""Fields of our own configurations that nobody gave have the values that their documentation says."""

from __future__ import annotations

import pytest
import torch
from examples import random_example
from torch.nn.functional import softplus

from ssmscope.architectures.read.delta import DeltaNetConfig
from ssmscope.architectures.read.hgrn import GSAConfig, HGRN2Config, HGRNConfig
from ssmscope.architectures.read.linear_attention import GLAConfig, RetNetConfig
from ssmscope.architectures.read.rwkv7 import RWKV7Config
from ssmscope.core.mixers import mixers
from ssmscope.errors import InputError

WIDTH = 80
SWIGLU = 216
"""8/3 of the width, 213.3, rounded up to a multiple of 8."""


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (HGRNConfig, {"intermediate_size": SWIGLU, "num_heads": 80, "forget_size": 80}),
        (HGRN2Config, {"intermediate_size": SWIGLU, "num_heads": 4, "forget_size": 80}),
        (GSAConfig, {"intermediate_size": SWIGLU}),
        (GLAConfig, {"intermediate_size": SWIGLU, "key_size": 40, "value_size": 80}),
        (DeltaNetConfig, {"intermediate_size": SWIGLU, "key_size": 60, "value_size": 120}),
        (RetNetConfig, {"intermediate_size": 160, "key_size": 80, "value_size": 160}),
        (RWKV7Config, {"intermediate_size": 320}),
    ],
)
def test_of_the_width(config, sizes):
    given = {} if config is HGRNConfig else {"num_heads": 4}
    made = config(hidden_size=WIDTH, vocab_size=16, num_hidden_layers=1, **given)
    assert {name: getattr(made, name) for name in sizes} == sizes
    # What is given stays, and a configuration that was saved is read as it was.
    other = config(hidden_size=WIDTH, vocab_size=16, num_hidden_layers=1, **given, intermediate_size=24)
    assert other.intermediate_size == 24
    again = config.from_dict(made.to_dict())
    assert {name: getattr(again, name) for name in sizes} == sizes


@pytest.mark.parametrize("layers", [[0, 3], [-1, 0], [0, 0], [1, True], [0.0], 2, ["0"]])
def test_layers_of_attention_are_layers(layers):
    sizes = {"hidden_size": WIDTH, "vocab_size": 16, "num_hidden_layers": 3, "num_heads": 4}
    with pytest.raises(InputError, match="attention has the layers .*: give a list, each once, from 0 to 2"):
        GLAConfig(**sizes, attention=[{"layers": layers, "num_heads": 4}])
    assert GLAConfig(**sizes, attention=[{"layers": [0, 2], "num_heads": 4}]).attention[0]["layers"] == [0, 2]


@pytest.mark.parametrize(
    "attention", [{"layers": [0], "num_heads": 4}, [3], ["layers"], [{"layers": [0], "num_heads": 4}, 1]]
)
def test_attention_is_a_list_of_options(attention):
    with pytest.raises(InputError, match="must be a list of options, each for some layers"):
        GLAConfig(hidden_size=WIDTH, vocab_size=16, num_hidden_layers=3, num_heads=4, attention=attention)


def test_steps_begin_evenly_in_their_logarithm():
    torch.manual_seed(0)
    (mixer, *_) = mixers(random_example("mamba3"))
    mixer.dt_bias = torch.nn.Parameter(torch.zeros(4000))
    mixer.steps = 0.001, 0.1, 0.01
    mixer.reset_parameters()
    steps = softplus(mixer.dt_bias)
    assert 0.0099 < steps.min() and steps.max() < 0.1001
    # Half of them would be below √(0.001 · 0.1) = 0.01, and are set to it; of the others half are below 0.0316.
    assert (steps < 0.0101).double().mean() == pytest.approx(0.5, abs=0.03)
    assert (steps < 0.0316).double().mean() == pytest.approx(0.75, abs=0.03)
