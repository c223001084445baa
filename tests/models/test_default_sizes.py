"""Sizes of our own configurations that nobody gave are what their documentation says."""

from __future__ import annotations

import pytest

from ssmscope.models.delta import DeltaNetConfig
from ssmscope.models.hgrn import GSAConfig, HGRN2Config, HGRNConfig
from ssmscope.models.linear_attention import GLAConfig, RetNetConfig
from ssmscope.models.rwkv7 import RWKV7Config

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
