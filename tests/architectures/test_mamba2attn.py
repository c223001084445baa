"""mamba_ssm's Mamba-2 with attention and MLPs, from a directory and in memory, against a slow reference."""

from typing import Any

import packaged
import pytest
import torch
from by_hand import attended, convolved, normed, scanned, turned
from examples import random_example
from packaged import IDS, WIDTH, check_logits, in_memory
from refusals import refuses
from torch import Tensor
from torch.nn.functional import silu, softplus
import ssmscope
from ssmscope.core.model import Model

STATE, HEAD, TAPS = 6, 8, 4
INNER = 2 * WIDTH
SSM = {"layer": "Mamba2", "d_state": STATE, "headdim": HEAD, "chunk_size": 8}
PUBLISHED: dict[str, Any] = {  # of mamba2attn-2.7b, smaller
    "attn_layer_idx": [1],
    "attn_cfg": {
        **{"causal": True, "d_conv": 4, "head_dim": 8, "num_heads": 5, "rotary_emb_dim": 4},
        **{"out_proj_bias": False, "qkv_proj_bias": False},
    },
}
OTHER_OPTIONS = {
    "attn_layer_idx": [0, 2],
    "attn_cfg": {
        **{"causal": True, "num_heads": 4, "num_heads_kv": 2, "softmax_scale": 0.7, "rotary_emb_dim": 6},
        **{"rotary_emb_interleaved": True, "rotary_emb_base": 50.0},
    },
    "d_intermediate": 16,
    "tie_embeddings": False,
}
UNROTATED = {"attn_layer_idx": [2], "attn_cfg": {"causal": True, "num_heads": 3, "d_conv": 3}}
CONFIGS = {"published": PUBLISHED, "other": OTHER_OPTIONS, "unrotated": UNROTATED, "mlps": {"d_intermediate": 130}}


def stored(config: dict[str, Any]) -> dict[str, Tensor]:
    heads, read = INNER // HEAD, INNER + 2 * STATE

    def mixer(layer: int) -> dict[str, Tensor]:
        if layer not in config.get("attn_layer_idx", []):
            return {
                "in_proj.weight": torch.randn(2 * INNER + 2 * STATE + heads, WIDTH) / 4,
                "conv1d.weight": torch.randn(read, 1, TAPS), "conv1d.bias": torch.randn(read),
                "dt_bias": torch.rand(heads) * 3 - 5, "A_log": torch.rand(heads), "D": torch.randn(heads),
                "norm.weight": 1 + torch.randn(INNER) / 3, "out_proj.weight": torch.randn(WIDTH, INNER) / 4,
            }  # fmt: skip
        o = config["attn_cfg"]
        size = o.get("head_dim", WIDTH // o["num_heads"])
        out, channels = size * o["num_heads"], size * (o["num_heads"] + 2 * o.get("num_heads_kv", o["num_heads"]))
        found = {"in_proj.weight": torch.randn(channels, WIDTH) / 4, "out_proj.weight": torch.randn(WIDTH, out) / 4}
        if o.get("qkv_proj_bias", True):
            found["in_proj.bias"] = torch.randn(channels)
        if o.get("out_proj_bias", True):
            found["out_proj.bias"] = torch.randn(WIDTH)
        if o.get("d_conv"):
            found["conv1d.weight"] = torch.randn(channels, 1, o["d_conv"])
            found["conv1d.bias"] = torch.randn(channels)
        return found

    return packaged.stored(config, mixer)


def attention(x: Tensor, w: dict[str, Tensor], o: dict[str, Any]) -> Tensor:
    heads, keys = o["num_heads"], o.get("num_heads_kv", o["num_heads"])
    size = o.get("head_dim", WIDTH // heads)
    qkv = x @ w["in_proj.weight"].T + w.get("in_proj.bias", 0)
    qkv = convolved(qkv, w["conv1d.weight"], w["conv1d.bias"]) if o.get("d_conv") else qkv
    q, k, v = (t.unflatten(-1, (-1, size)) for t in qkv.split([heads * size, keys * size, keys * size], dim=-1))
    how = o.get("rotary_emb_dim", 0), o.get("rotary_emb_base", 1e4), o.get("rotary_emb_interleaved", False)
    read = attended(q, k, v, o.get("softmax_scale", size**-0.5), lambda head, t: turned(head, t, *how))
    return read @ w["out_proj.weight"].T + w.get("out_proj.bias", 0)


def mamba2(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    heads = INNER // HEAD
    z, read, step = (x @ w["in_proj.weight"].T).split([INNER, INNER + 2 * STATE, heads], dim=-1)
    read = silu(convolved(read, w["conv1d.weight"], w["conv1d.bias"]))
    values, b, c = read.split([INNER, STATE, STATE], dim=-1)
    step, values = softplus(step + w["dt_bias"]), values.unflatten(-1, (heads, HEAD))
    y = scanned(values, b, c, step, -w["A_log"].exp().unsqueeze(1), w["D"]).flatten(1)
    return normed(y * silu(z), w["norm.weight"]) @ w["out_proj.weight"].T


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_the_references(kind, tmp_path):
    config = {"d_model": WIDTH, "n_layer": 3, "ssm_cfg": SSM, **CONFIGS[kind]}

    def mixer(layer: int, u: Tensor, w: dict[str, Tensor]) -> Tensor:
        return attention(u, w, config["attn_cfg"]) if layer in config.get("attn_layer_idx", []) else mamba2(u, w)

    check_logits(tmp_path, config, stored(config), mixer)


@pytest.mark.parametrize("change, words", [
    ({"attn_cfg": {"num_heads": 4}}, "causal false: attention that looks ahead"),
    ({"attn_cfg": {"num_heads": 5, "causal": True}}, "5 heads"),
    ({"attn_cfg": [4]}, "attn_cfg is .4.; allowed is an object"),
    ({"attn_layer_idx": [3]}, "attn_layer_idx has 3: give layers, from 0 to 2"),
    ({"attn_layer_idx": 1}, "attn_layer_idx is 1; allowed is a list"),
    ({"d_intermediate": 300}, "do not fit its configuration"),
    ({"ssm_cfg": {}}, "has attention layers .* and MLPs .* with Mamba-1"),
])  # fmt: skip
def test_what_cannot_be_read_is_named(change, words):
    config = {"d_model": WIDTH, "n_layer": 3, "ssm_cfg": SSM, **OTHER_OPTIONS}
    refuses(words, ssmscope.load, in_memory({**config, **change}, stored(config)))


def test_a_knockout_says_that_attentions_convolution_is_not_cut():
    for name, said in (("mamba2attn", True), ("bamba", False)):
        model = Model(random_example(name))
        assert ssmscope.knockout(model, model.encode(ids=IDS[:1]), from_=["1"], answer=7).attends is said
