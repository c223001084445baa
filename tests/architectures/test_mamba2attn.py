"""mamba_ssm's Mamba-2 with attention and MLPs, from a directory and in memory, against a slow reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from examples import random_example, relative
from loud import TrueFloat64
from packaged import in_memory, normed, written
from torch import Tensor
from torch.nn.functional import silu, softplus

import ssmscope
from ssmscope.core.model import Model
from ssmscope.errors import InputError

IDS = [[5, 17, 3, 9, 22, 1, 40], [7, 8, 9]]
WIDTH, STATE, HEAD, TAPS = 24, 6, 8, 4
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
    """Random weights by mamba_ssm's names."""
    torch.manual_seed(0)
    heads, read = INNER // HEAD, INNER + 2 * STATE
    weights = {"backbone.embedding.weight": torch.randn(48, WIDTH)}
    for layer in range(config["n_layer"]):
        at = f"backbone.layers.{layer}."
        weights[at + "norm.weight"] = 1 + torch.randn(WIDTH) / 3
        if layer in config.get("attn_layer_idx", []):
            o = config["attn_cfg"]
            size = o.get("head_dim", WIDTH // o["num_heads"])
            out, channels = size * o["num_heads"], size * (o["num_heads"] + 2 * o.get("num_heads_kv", o["num_heads"]))
            weights[at + "mixer.in_proj.weight"] = torch.randn(channels, WIDTH) / 4
            weights[at + "mixer.out_proj.weight"] = torch.randn(WIDTH, out) / 4
            if o.get("qkv_proj_bias", True):
                weights[at + "mixer.in_proj.bias"] = torch.randn(channels)
            if o.get("out_proj_bias", True):
                weights[at + "mixer.out_proj.bias"] = torch.randn(WIDTH)
            if o.get("d_conv"):
                weights[at + "mixer.conv1d.weight"] = torch.randn(channels, 1, o["d_conv"])
                weights[at + "mixer.conv1d.bias"] = torch.randn(channels)
        else:
            weights[at + "mixer.in_proj.weight"] = torch.randn(2 * INNER + 2 * STATE + heads, WIDTH) / 4
            weights[at + "mixer.conv1d.weight"] = torch.randn(read, 1, TAPS)
            weights[at + "mixer.conv1d.bias"] = torch.randn(read)
            weights[at + "mixer.dt_bias"] = torch.rand(heads) * 3 - 5
            weights[at + "mixer.A_log"] = torch.rand(heads)
            weights[at + "mixer.D"] = torch.randn(heads)
            weights[at + "mixer.norm.weight"] = 1 + torch.randn(INNER) / 3
            weights[at + "mixer.out_proj.weight"] = torch.randn(WIDTH, INNER) / 4
        if config.get("d_intermediate"):
            inner = 128 * math.ceil(config["d_intermediate"] / 128)
            weights[at + "norm2.weight"] = 1 + torch.randn(WIDTH) / 3
            weights[at + "mlp.fc1.weight"] = torch.randn(2 * inner, WIDTH) / 4
            weights[at + "mlp.fc2.weight"] = torch.randn(WIDTH, inner) / 8
    weights["backbone.norm_f.weight"] = 1 + torch.randn(WIDTH) / 3
    tied = config.get("tie_embeddings", True)
    weights["lm_head.weight"] = weights["backbone.embedding.weight"] if tied else torch.randn(48, WIDTH)
    return weights


def convolved(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    """Convolve x (length, channels), one position after the other."""
    kernel = w["conv1d.weight"][:, 0]
    read = [[(t - j, kernel[:, -1 - j]) for j in range(kernel.shape[1]) if t >= j] for t in range(len(x))]
    return torch.stack([w["conv1d.bias"] + sum(k * x[s] for s, k in each) for each in read])


def turned(head: Tensor, position: int, size: int, base: float, interleaved: bool) -> Tensor:
    """A head's first `size` numbers as complex ones, each times e^{i angle}."""
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + size // 2) for i in range(size // 2)]
    result = head.clone()
    for i, (a, b) in enumerate(pairs):
        number = complex(head[a], head[b]) * complex(
            math.cos(angle := position * base ** (-2 * i / size)), math.sin(angle)
        )
        result[a], result[b] = number.real, number.imag
    return result


def attention(x: Tensor, w: dict[str, Tensor], o: dict[str, Any]) -> Tensor:
    heads, keys = o["num_heads"], o.get("num_heads_kv", o["num_heads"])
    size = o.get("head_dim", WIDTH // heads)
    qkv = x @ w["in_proj.weight"].T + w.get("in_proj.bias", 0)
    qkv = convolved(qkv, w) if o.get("d_conv") else qkv
    q, k, v = (t.unflatten(-1, (-1, size)) for t in qkv.split([heads * size, keys * size, keys * size], dim=-1))
    how = o.get("rotary_emb_dim", 0), o.get("rotary_emb_base", 1e4), o.get("rotary_emb_interleaved", False)
    rows = []
    for t in range(len(x)):
        row = []
        for head in range(heads):
            of = head // (heads // keys)
            query = turned(q[t, head], t, *how)
            scores = torch.stack([query @ turned(k[s, of], s, *how) for s in range(t + 1)])
            row.append((scores * o.get("softmax_scale", size**-0.5)).softmax(0) @ v[: t + 1, of])
        rows.append(torch.cat(row))
    return torch.stack(rows) @ w["out_proj.weight"].T + w.get("out_proj.bias", 0)


def mamba2(x: Tensor, w: dict[str, Tensor]) -> Tensor:
    heads = INNER // HEAD
    z, read, step = (x @ w["in_proj.weight"].T).split([INNER, INNER + 2 * STATE, heads], dim=-1)
    values, b, c = silu(convolved(read, w)).split([INNER, STATE, STATE], dim=-1)
    step, state, rows = softplus(step + w["dt_bias"]), torch.zeros(heads, HEAD, STATE).double(), []
    for t in range(len(x)):
        value = values[t].view(heads, HEAD)
        kept = (-step[t] * w["A_log"].exp()).exp()[:, None, None] * state
        state = kept + step[t][:, None, None] * value[:, :, None] * b[t]
        rows.append((state @ c[t] + w["D"][:, None] * value).flatten())
    return normed(torch.stack(rows) * silu(z), w["norm.weight"]) @ w["out_proj.weight"].T


def reference(config: dict[str, Any], weights: dict[str, Tensor], ids: list[int]) -> Tensor:
    """Logits (length, vocabulary) in float64."""
    wide = {name: weight.double() for name, weight in weights.items()}
    x = wide["backbone.embedding.weight"][ids]
    for layer in range(config["n_layer"]):
        at = f"backbone.layers.{layer}."
        w = {name.removeprefix(at + "mixer."): t for name, t in wide.items() if name.startswith(at + "mixer.")}
        u = normed(x, wide[at + "norm.weight"])
        x = x + (attention(u, w, config["attn_cfg"]) if layer in config.get("attn_layer_idx", []) else mamba2(u, w))
        if config.get("d_intermediate"):
            h, g = (normed(x, wide[at + "norm2.weight"]) @ wide[at + "mlp.fc1.weight"].T).chunk(2, dim=-1)
            x = x + (h * silu(g)) @ wide[at + "mlp.fc2.weight"].T
    return normed(x, wide["backbone.norm_f.weight"]) @ wide["lm_head.weight"].T


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_the_references(kind, tmp_path):
    config = {"d_model": WIDTH, "n_layer": 3, "ssm_cfg": SSM, **CONFIGS[kind]}
    weights = stored(config)
    theirs = in_memory(config, weights)
    shared = ssmscope.load(theirs)
    assert {id(p) for p in shared.module.parameters()} == {id(p) for p in theirs.parameters()}
    read = ssmscope.load(written(tmp_path, config, weights), dtype="float64")
    batch = read.encode(ids=IDS)
    single = shared.logits(batch)
    with TrueFloat64():
        found = read.logits(batch)
    for row, ids in enumerate(IDS):
        expected = reference(config, weights, ids)
        assert relative(found[row, : len(ids)], expected) < 1e-10
        assert relative(single[row, : len(ids)].double(), expected) < 1e-4
        with torch.no_grad():  # the model's own pass, whose gated norm is in float32
            own = read.module(torch.tensor([ids])).logits[0]
        assert relative(own, expected) < 1e-5


@pytest.mark.parametrize(
    "change, words",
    [
        ({"attn_cfg": {"num_heads": 4}}, "causal false: attention that looks ahead"),
        ({"attn_cfg": {"num_heads": 5, "causal": True}}, "5 heads"),
        ({"attn_cfg": [4]}, "attn_cfg is .4.; allowed is an object"),
        ({"attn_layer_idx": [3]}, "attn_layer_idx has 3: give layers, from 0 to 2"),
        ({"attn_layer_idx": 1}, "attn_layer_idx is 1; allowed is a list"),
        ({"d_intermediate": 300}, "do not fit its configuration"),
        ({"ssm_cfg": {}}, "has attention layers .* and MLPs .* with Mamba-1"),
    ],
)
def test_what_cannot_be_read_is_named(change, words):
    config = {"d_model": WIDTH, "n_layer": 3, "ssm_cfg": SSM, **OTHER_OPTIONS}
    with pytest.raises(InputError, match=words):
        ssmscope.load(in_memory({**config, **change}, stored(config)))


def test_a_knockout_says_that_attentions_convolution_is_not_cut():
    for name, said in (("mamba2attn", True), ("bamba", False)):
        model = Model(random_example(name))
        assert ssmscope.knockout(model, model.encode(ids=IDS[:1]), from_=["1"], answer=7).attends is said
