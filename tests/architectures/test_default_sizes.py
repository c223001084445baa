"""Fields of our own configurations that are not given have the documented values."""

import pytest
import torch
from examples import random_example
from refusals import refusal, refused
from torch.nn.functional import softplus
from ssmscope.core.mixers import mixers
from ssmscope.layers.delta import DeltaNetConfig
from ssmscope.layers.hgrn import GSAConfig, HGRN2Config, HGRNConfig
from ssmscope.layers.linear_attention import GLAConfig, RetNetConfig
from ssmscope.layers.mamba3 import Mamba3Config
from ssmscope.layers.mambavision import MambaVisionConfig
from ssmscope.layers.rwkv7 import RWKV7Config
from ssmscope.layers.vim import VimConfig

WIDTH = 80
SWIGLU = 216
"""8/3 of the width, 213.3, rounded up to a multiple of 8."""

FAMILIES = (HGRNConfig, HGRN2Config, GSAConfig, GLAConfig, DeltaNetConfig, RetNetConfig, RWKV7Config)


def sizes_of(config):
    """Return the least that a configuration must be given; HGRN has no heads."""
    sizes = {"hidden_size": WIDTH, "vocab_size": 16, "num_hidden_layers": 1}
    return sizes if config is HGRNConfig else {**sizes, "num_heads": 4}


@pytest.mark.parametrize(("config", "sizes"), [
    (HGRNConfig, {"intermediate_size": SWIGLU, "num_heads": 80, "forget_size": 80}),
    (HGRN2Config, {"intermediate_size": SWIGLU, "num_heads": 4, "forget_size": 80}),
    (GSAConfig, {"intermediate_size": SWIGLU}),
    (GLAConfig, {"intermediate_size": SWIGLU, "key_size": 40, "value_size": 80}),
    (DeltaNetConfig, {"intermediate_size": SWIGLU, "key_size": 60, "value_size": 120}),
    (RetNetConfig, {"intermediate_size": 160, "key_size": 80, "value_size": 160}),
    (RWKV7Config, {"intermediate_size": 320}),
])  # fmt: skip
def test_of_the_width(config, sizes):
    made = config(**sizes_of(config))
    assert {name: getattr(made, name) for name in sizes} == sizes
    # What is given stays, and a configuration that was saved is read as it was.
    other = config(**sizes_of(config), intermediate_size=24)
    assert other.intermediate_size == 24
    again = config.from_dict(made.to_dict())
    assert {name: getattr(again, name) for name in sizes} == sizes


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


TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")


@pytest.mark.parametrize("config", FAMILIES)
def test_tokens_and_ties(config):
    plain = config(**sizes_of(config))
    assert [getattr(plain, name) for name in TOKENS] == [0, 0, 0] and not getattr(plain, "use_cache", False)
    assert plain.tie_word_embeddings == (config is not RWKV7Config)
    other = dict(pad_token_id=3, bos_token_id=4, eos_token_id=5, tie_word_embeddings=config is RWKV7Config)
    given = config(**sizes_of(config), **other, use_cache=True)
    assert {name: getattr(given, name) for name in other} == other and not getattr(given, "use_cache", False)


@pytest.mark.parametrize("config", FAMILIES)
@pytest.mark.parametrize("name", ["vocab_size", "num_hidden_layers", "num_heads", "intermediate_size"])
def test_sizes_are_whole_numbers(config, name):
    if name == "num_heads" and config is HGRNConfig:
        return  # which has none
    sizes = sizes_of(config)
    least = 0 if name == "intermediate_size" else 1
    for value in (least - 1, True, 2.5, "4"):
        said = refusal(config, **{**sizes, name: value}) or ""
        assert said.startswith(f"{name} {value!r} must be an integer, {least} or more")
    assert getattr(config(**{**sizes, name: 1}), name) == 1
    if least == 0 and config is not RWKV7Config:
        assert config(**{**sizes, name: 0}).intermediate_size == 0


def test_fields_of_their_defaults_are_of_the_class_alone():
    """A configuration's fingerprint is made from its own fields."""
    sizes = sizes_of(GLAConfig)
    for config, field, default, other in (
        (GLAConfig, "head_norm", "layer", "rms"), (RetNetConfig, "swiglu", False, True),
        (DeltaNetConfig, "unit_epsilon", 0.0, 1e-3), (DeltaNetConfig, "largest_beta", 1.0, 2.0),
        (DeltaNetConfig, "head_norm_epsilon", None, 1e-3), (HGRN2Config, "head_norm_epsilon", None, 1e-3),
    ):  # fmt: skip
        for value in (default, other):
            made = config(**sizes, **{field: value})
            assert getattr(made, field) == value and (field in vars(made)) == (value == other)
    assert refusal(GLAConfig, **sizes, head_norm="batch") == ("head_norm 'batch' is unknown: choose one of layer, rms")


def test_taus_and_shares_to_their_bounds():
    sizes = sizes_of(GLAConfig)
    assert GLAConfig(**sizes, tau=0.5).tau == 0.5
    for tau in (0, -1, float("nan")):
        assert refusal(GLAConfig, **sizes, tau=tau) == f"tau {tau!r} must be a positive number"
    for name, given in (("key_size", {"key_size": 42}), ("value_size", {"value_size": 42})):
        said = f"{name} 42 cannot be shared by 4 heads: give a multiple of 4"
        assert refusal(GLAConfig, **sizes, **given) == said == refusal(DeltaNetConfig, **sizes, **given)
    assert (
        refusal(HGRN2Config, **sizes, forget_size=42)
        == "forget_size 42 cannot be shared by 4 heads: give a multiple of 4"
    )
    assert refusal(RWKV7Config, **{**sizes, "hidden_size": 42}) == (
        "hidden_size 42 cannot be shared by 4 heads: give a multiple of 4"
    )
    for config, name in ((DeltaNetConfig, "conv_kernel"), (GLAConfig, "gate_rank"), (RetNetConfig, "hidden_size")):
        assert refused(config, **{**sizes, name: 0}).startswith(f"{name} 0 must be an integer, 1 or more")
    assert GLAConfig(**sizes).gate_rank == 16
    assert refusal(RetNetConfig, **sizes, key_size=12) == (
        "a head's key size 3 is odd: rotation needs pairs; change key_size or rotary=False"
    )
    assert (
        RetNetConfig(**sizes, key_size=8).key_size == 8
        and RetNetConfig(**sizes, key_size=4, rotary=False).key_size == 4
    )


def test_sizes_of_a_mamba_3():
    def made(**fields):
        return Mamba3Config(**{"hidden_size": 24, "num_hidden_layers": 1, "head_dim": 8, **fields})

    plain = made()
    assert (plain.num_heads, plain.n_groups, plain.state_size, plain.expand) == (6, 1, 128, 2)
    assert (plain.rope_fraction, plain.decay, plain.decay_floor, plain.head_norm) == (0.5, "heavy-tail", 1e-4, False)
    assert [made(**fields).num_heads for fields in ({"head_dim": 1}, {"head_dim": 48}, {"expand": 3})] == [48, 1, 9]
    assert [made(n_groups=groups).n_groups for groups in (1, 2, 3, 6)] == [1, 2, 3, 6]
    assert made(state_size=4).state_size == 4 and made(state_size=2, rope_fraction=1.0).state_size == 2
    for fields in (
        {"head_dim": 0}, {"head_dim": -8}, {"head_dim": 96}, {"head_dim": 32}, {"n_groups": 0}, {"n_groups": 4},
    ):  # fmt: skip
        given = {"head_dim": 8, "n_groups": 1, **fields}
        assert refusal(made, **given) == (
            f"head_dim {given['head_dim']} must divide the 48 channels, and n_groups {given['n_groups']} the heads "
            "that it makes"
        )
    for fields in ({"state_size": 3}, {"state_size": 1, "rope_fraction": 1.0}, {"rope_fraction": 0.75}):
        given = {"state_size": 128, "rope_fraction": 0.5, **fields}
        said = (
            f"rope_fraction {given['rope_fraction']} of a state of {given['state_size']}: give 0.5 or 1, of 4 or more"
        )
        assert refusal(made, **given) == said


@pytest.mark.parametrize("name", [
    "vocab_size", "hidden_size", "num_hidden_layers", "state_size", "expand", "conv_kernel", "time_step_rank",
    "positions",
])  # fmt: skip
def test_sizes_of_a_vision_mamba(name):
    least = 0 if name == "positions" else 1
    assert getattr(VimConfig(**{name: least}), name) == least
    assert not getattr(VimConfig(use_cache=True), "use_cache", False)  # of which release 5 knows nothing
    for value in (least - 1, True, 1.0):
        assert refusal(VimConfig, **{name: value}) == f"{name} {value!r} must be an integer, {least} or more"


@pytest.mark.parametrize(
    "name",
    ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "state_size",
     "conv_kernel", "time_step_rank", "stem_size", "last_layers", "last_heads"],
)  # fmt: skip
def test_sizes_of_a_mambavision(name):
    heads = {"num_attention_heads": 1, "last_heads": 1}
    least = 2 if name == "hidden_size" else 1
    assert getattr(MambaVisionConfig(**{**heads, name: least}), name) == least
    for value in (0, True, 1.0):
        assert refusal(MambaVisionConfig, **{name: value}) == f"{name} {value!r} must be an integer, 1 or more"


def test_stage_4_of_a_mambavision_is_twice_as_wide():
    config = MambaVisionConfig(hidden_size=48, num_attention_heads=3, time_step_rank=3, intermediate_size=90)
    last = config.last_stage()
    assert (last.hidden_size, last.intermediate_size, last.time_step_rank) == (96, 180, 6)
    assert (last.num_hidden_layers, last.num_attention_heads) == (4, 16) and config.hidden_size == 48
    assert MambaVisionConfig().last_stage().time_step_rank == 40  # ⌈640 / 16⌉, as T's
