"""Fields of flash-linear-attention's configurations: by default and given, as fields of the model that is built."""

from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import refused, refuses
from ssmscope.layers.gated_delta import UNIT_EPSILON
from ssmscope.loading.fla_checkpoints import MODEL_TYPES, TYPE_DEFAULTS, _as_mamba_ssm, is_fla, plan_fla
from ssmscope.loading.stored import Contents, Stored

HELD = Contents({"backbone.embeddings.weight": Stored((24, 64), True)}, 10**9)


def built(**fields: Any) -> Any:
    with torch.device("meta"):
        return plan_fla(fields, HELD, "m").build().config


@pytest.mark.parametrize(("fields", "known"), [
    *(({"model_type": kind}, True) for kind in MODEL_TYPES), ({"model_type": "mamba2", "norm_eps": 1e-5}, True),
    ({"model_type": "mamba2", "norm_eps": 1e-5, "layer_norm_epsilon": 1e-5}, False), ({"model_type": "mamba2"}, False),
    ({"model_type": "mamba", "norm_eps": 1e-5}, False), ({"norm_eps": 1e-5}, False),
])  # fmt: skip
def test_how_its_configurations_are_known(fields: dict[str, Any], known: bool) -> None:
    assert is_fla(Path(), fields) == known


COMMON = dict(hidden_size=2048, vocab_size=32000, num_hidden_layers=1, tie_word_embeddings=False)
NORMED = dict(layer_norm_epsilon=1e-6)
GATED_DELTA = dict(num_heads=6, key_size=1536, value_size=3072, conv_kernel=4, gated=True, largest_beta=1.0)
DELTA = dict(num_heads=16, key_size=2048, value_size=2048, conv_kernel=4, gated=False, largest_beta=1.0)
RWKV7 = dict(
    num_heads=32, decay_rank=64, rate_rank=64, value_rank=16, gate_rank=128, intermediate_size=8192, norm_bias=True,
    norm_first=True, unit_epsilon=UNIT_EPSILON,
)  # fmt: skip

SHALLOW = ("gated_deltanet", "gated_deltaproduct", "comba")


@pytest.mark.parametrize(("kind", "expected"), [
    ("gated_deltanet", {**NORMED, **GATED_DELTA, "intermediate_size": 5632, "head_norm_epsilon": 256e-6}),
    ("gated_deltaproduct", {**NORMED, **GATED_DELTA}),
    ("kda", dict(num_heads=16, key_size=2048, value_size=2048, lower_bound=None, head_norm_epsilon=128e-6)),
    ("comba", dict(num_heads=6, value_size=3072, inner_decay=True, output_correction=True)),
    ("delta_net", {**NORMED, **DELTA, "intermediate_size": 5632, "head_norm_epsilon": 128e-6}),
    ("gla", {**NORMED, "num_heads": 4, "key_size": 1024, "value_size": 2048, "gate_rank": 16, "tau": 16.0}),
    ("retnet", {**NORMED, "num_heads": 8, "key_size": 2048, "value_size": 4096, "intermediate_size": 2816}),
    ("rwkv7", {**RWKV7, "layer_norm_epsilon": 1e-5}),
    ("hgrn", {**NORMED, "lower_bounds": True, "intermediate_size": 5632}),
    ("hgrn2", {**NORMED, "lower_bounds": True, "num_heads": 16, "head_norm_epsilon": 1e-5}),
    ("gsa", {**NORMED, "num_heads": 4, "num_slots": 64, "tau": 8.0, "head_norm_epsilon": 1e-5}),
])  # fmt: skip
def test_by_default(kind: str, expected: dict[str, Any]) -> None:
    assert TYPE_DEFAULTS[kind].get("num_hidden_layers", 24) == (21 if kind in SHALLOW else 24)
    for attn in ({}, {"attn": None, "num_heads": None}):
        config = built(model_type=kind, num_hidden_layers=1, **attn)
        assert {name: getattr(config, name) for name in COMMON} == COMMON
        found = {name: getattr(config, name) for name in expected}
        assert found == pytest.approx(expected)
    if kind in ("gla", "retnet"):
        assert config.head_norm == "rms" and getattr(config, "swiglu", True)


FIELDS = dict(hidden_size=96, vocab_size=24, num_hidden_layers=2, tie_word_embeddings=True, num_heads=4, norm_eps=1e-3)
OUR_FIELDS = dict(hidden_size=96, vocab_size=24, num_hidden_layers=2, tie_word_embeddings=True, layer_norm_epsilon=1e-3)
SPREAD = dict(expand_k=0.5, expand_v=2.0, conv_size=3, allow_neg_eigval=True, intermediate_size=40)


@pytest.mark.parametrize(("kind", "fields", "expected"), [
    (
        "delta_net", SPREAD,
        dict(num_heads=4, key_size=48, value_size=192, conv_kernel=3, head_norm_epsilon=12e-3, largest_beta=2.0,
             intermediate_size=40),
    ),
    ("gated_deltanet", {**SPREAD, "head_dim": 10},
     dict(num_heads=4, key_size=40, value_size=80, conv_kernel=3, head_norm_epsilon=10e-3, largest_beta=2.0)),
    ("gla", {**SPREAD, "hidden_ratio": 3}, dict(key_size=48, value_size=192, intermediate_size=40)),
    ("gla", {"hidden_ratio": 4}, dict(key_size=48, value_size=96, intermediate_size=256)),
    ("gla", {"hidden_ratio": 4.02}, dict(intermediate_size=512)),
    ("retnet", {"expand_k": 0.25, "expand_v": 0.5}, dict(key_size=24, value_size=48, num_heads=4)),
    (
        "rwkv7",
        dict(head_dim=32, hidden_ratio=1.7, fuse_norm=False, norm_bias=False, norm_first=False,
             decay_low_rank_dim=5, a_low_rank_dim=6, v_low_rank_dim=7, gate_low_rank_dim=8, value_dim=[96, 96]),
        dict(num_heads=3, intermediate_size=192, unit_epsilon=0.0, norm_bias=False, norm_first=False,
             decay_rank=5, rate_rank=6, value_rank=7, gate_rank=8),
    ),
    ("rwkv7", dict(head_dim=48, hidden_ratio=2, value_dim=96), dict(num_heads=2, intermediate_size=192)),
    ("rwkv7", dict(head_dim=48, intermediate_size=50), dict(num_heads=2, intermediate_size=50)),
    ("hgrn", dict(use_lower_bound=False), dict(lower_bounds=False)),
    ("hgrn2", dict(use_lower_bound=False, expand_ratio=48), dict(lower_bounds=False, num_heads=2)),
    ("gsa", dict(num_slots=5, gate_logit_normalizer=3), dict(num_slots=5, tau=3.0, num_heads=4)),
])  # fmt: skip
def test_given(kind: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    config = built(model_type=kind, **FIELDS, **fields)
    assert {name: getattr(config, name) for name in OUR_FIELDS} == OUR_FIELDS
    assert {name: getattr(config, name) for name in expected} == pytest.approx(expected)
    assert plan_fla({"model_type": kind, **FIELDS, **fields}, HELD, "m").tied


def test_of_a_mamba_2_by_default() -> None:
    assert _as_mamba_ssm({"model_type": "mamba2", "norm_eps": 1e-3}, "m") == {
        "d_model": 2048, "n_layer": 48, "tie_embeddings": False, "residual_in_fp32": True, "norm_epsilon": 1e-3,
        "ssm_cfg": {
            "layer": "Mamba2", "d_state": 128, "d_conv": 4, "expand": 2, "headdim": 64, "ngroups": 1, "chunk_size": 256,
            "dt_limit": (0.0, float("inf")), "bias": False, "conv_bias": True, "rmsnorm": True,
            "norm_before_gate": False, "D_has_hdim": False,
        },
    }  # fmt: skip


def test_of_a_mamba_2() -> None:
    fields = dict(model_type="mamba2", hidden_size=64, num_hidden_layers=3, norm_eps=1e-3)
    config = built(**fields)
    assert (config.hidden_size, config.num_hidden_layers, config.layer_norm_epsilon) == (64, 3, 1e-3)
    assert (config.state_size, config.conv_kernel, config.expand, config.head_dim) == (128, 4, 2, 64)
    assert (config.n_groups, config.chunk_size, config.use_bias, config.use_conv_bias) == (1, 256, False, True)
    assert not config.tie_word_embeddings and config.residual_in_fp32 and config.vocab_size == 24
    other = dict(state_size=7, conv_kernel=3, expand=4, head_dim=16, chunk_size=9, use_bias=True, use_conv_bias=False)
    config = built(**fields, **other, tie_word_embeddings=True, residual_in_fp32=False, hidden_act="swish")
    assert {name: getattr(config, name) for name in other} == other
    assert config.tie_word_embeddings and not config.residual_in_fp32
    assert plan_fla({"model_type": "mamba2", "norm_eps": 1e-3}, HELD, "m").tied is False


@pytest.mark.parametrize(("fields", "said"), [
    ({"model_type": "mamba2", "norm_eps": 1e-3, "hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed is 'silu'"),
    ({"model_type": "gla", "hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed is 'swish'"),
    ({"model_type": "gla", "num_kv_heads": 2}, "num_kv_heads is 2; allowed is None"),
    ({"model_type": "gla", "use_gv": True}, "use_gv is true; allowed is False"),
    ({"model_type": "gla", "hidden_ratio": -1}, "hidden_ratio is -1; allowed is no negative number"),
    ({"model_type": "gla", "attn": 5}, "attn is 5; allowed is options of attention for some layers, or None"),
    ({"model_type": "gla", "attn": [5]}, "attn is [5]; allowed is options of attention for some layers, or None"),
    ({"model_type": "gla", "attn": [{"layers": [0]}, 5]}, "allowed is options of attention for some layers, or None"),
    ({"model_type": "rwkv7", "attn": {"layers": [0]}}, 'attn is {"layers": [0]}; allowed is None'),
    ({"model_type": "rwkv7", "value_dim": 5}, "value_dim is 5; allowed is hidden_size, 2048, in every layer"),
    ({"model_type": "rwkv7", "value_dim": [2048, 5]}, "value_dim is [2048, 5]; allowed is hidden_size, 2048, in"),
])  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], said: str) -> None:
    assert said in refused(plan_fla, fields, HELD, "m")


@pytest.mark.parametrize(("fields", "said"), [
    ({"model_type": "rwkv7", "head_dim": 60}, "head_dim 60 does not divide hidden_size 2048"),
    ({"model_type": "hgrn2", "expand_ratio": 60}, "expand_ratio 60 does not divide hidden_size 2048"),
])  # fmt: skip
def test_what_does_not_divide(fields: dict[str, Any], said: str) -> None:
    refuses(said, built, **fields)


def translated(kind: str, given: dict[str, Any], **fields: Any) -> dict[str, torch.Tensor]:
    return plan_fla({"model_type": kind, **fields}, HELD, "m").translate(given)


def test_names_and_joined_weights() -> None:
    at = "model.layers.1."
    rows = {each: torch.full((2, 3), float(number)) for number, each in enumerate("qkv")}
    given = {f"{at}attn.{each}_proj.weight": rows[each] for each in "qkv"}
    given |= {f"{at}attn.{each}_conv1d.weight": rows[each] + 5 for each in "qkv"}
    gate = torch.arange(8.0).view(4, 2)
    given |= {f"{at}mlp.gate_proj.weight": gate, "model.norm.weight": rows["q"], f"{at}attn_norm.weight": rows["k"]}
    given |= {f"{at}attn.{name}.weight": rows["v"] for name in ("o_norm", "o_proj", "g_proj", "a_proj", "b_proj")}
    given["model.embeddings.weight"] = rows["q"]
    ours = "backbone.layers.1."
    found = translated("gated_deltanet", given)
    assert torch.equal(found[f"{ours}mixer.qkv_proj.weight"], torch.cat([rows[each] for each in "qkv"]))
    assert torch.equal(found[f"{ours}mixer.conv1d.weight"], torch.cat([rows[each] + 5 for each in "qkv"]))
    assert torch.equal(found[f"{ours}mlp.gate.weight"], gate[:2])
    assert torch.equal(found[f"{ours}mlp.up.weight"], gate[2:])
    assert {name for name in found if "mixer" in name} == {
        f"{ours}mixer.{name}.weight"
        for name in ("qkv_proj", "conv1d", "head_norm", "out_proj", "z_proj", "decay_proj", "beta_proj")
    }
    assert {"backbone.norm_f.weight", f"{ours}norm.weight", "backbone.embeddings.weight"} < {*found}
    assert "lm_head.weight" not in found
    tied = translated("gated_deltanet", given, tie_word_embeddings=True)
    assert tied["lm_head.weight"] is rows["q"]
    both = translated("gated_deltanet", {**given, f"{at}mlp.up_proj.weight": gate + 1})
    assert torch.equal(both[f"{ours}mlp.gate.weight"], gate) and torch.equal(both[f"{ours}mlp.up.weight"], gate + 1)


def test_gates_rotations_and_attention() -> None:
    at, ours = "model.layers.0.attn.", "backbone.layers.0.mixer."
    rows = torch.arange(8.0).view(8, 1)
    bias = translated("gla", {f"{at}g_proj.weight": rows})[f"{ours}z_proj.bias"]
    assert torch.equal(bias, torch.zeros(8))
    assert f"{ours}z_proj.bias" not in translated("retnet", {f"{at}g_proj.weight": rows})
    given = {f"{at}{each}_proj.weight": rows for each in "qkv"}
    found = translated("retnet", given, num_heads=2)
    for each in "qk":
        assert found[f"{ours}{each}_proj.weight"].flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert torch.equal(found[f"{ours}v_proj.weight"], rows)
    assert torch.equal(translated("retnet", given, num_heads=3)[f"{ours}q_proj.weight"], rows)
    gsa = translated("gsa", given)
    assert torch.equal(gsa[f"{ours}i_proj.weight"], rows) and f"{ours}v_proj.weight" not in gsa
    other = {name.replace("layers.0", "layers.1"): tensor for name, tensor in given.items()}
    both = translated("gla", {**given, **other}, attn={"layers": [1], "num_heads": 2})
    assert torch.equal(both["backbone.layers.1.mixer.in_proj.weight"], torch.cat([rows] * 3))
    assert f"{ours}in_proj.weight" not in both and torch.equal(both[f"{ours}q_proj.weight"], rows)


def test_token_shifts_of_an_rwkv7() -> None:
    at, ours = "model.layers.0.attn.", "backbone.layers.0.mixer.attn."
    together = torch.arange(12.0).view(6, 1, 1, 2)
    found = translated("rwkv7", {f"{at}x_x": together})
    assert {name: found[f"{ours}x_{name}"].flatten().tolist() for name in "rwkvag"} == {
        "r": [0, 1], "w": [2, 3], "k": [4, 5], "v": [6, 7], "a": [8, 9], "g": [10, 11]
    }  # fmt: skip
    alone = translated("rwkv7", {f"{at}x_r": together[:1, 0], f"{at}a_lora.lora.0.weight": together})
    assert alone[f"{ours}x_r"].shape == (2,) and f"{ours}a_lora.into.weight" in alone
